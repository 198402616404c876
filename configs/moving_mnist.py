"""Two digits in motion from TFDS `moving_mnist`. TFDS needs the tensorflow package once, to write this set's files."""

from configs import quickstart
from ernie5_jax.config import SourceConfig, to_plain


def get_config():
    config = quickstart.get_config()
    config.name = "moving_mnist"
    mapping = {"video": "image_sequence", "caption": "two digits in motion"}
    # Clips have 20 frames; 9 are 1 modulo the temporal stride and fit a row. There is one split, "test".
    options = {"frames": "9", "tasks": "video_generation", "train_split": "test[:90%]", "test_split": "test[90%:]"}
    source = SourceConfig(tfds="moving_mnist", mapping=mapping, options=options)
    with config.unlocked():
        config.data.sources = {"moving_mnist": to_plain(source)}
        config.data.task_weights = {}
    config.generation.video_frames = 9
    return config
