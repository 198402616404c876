"""Text only, from TFDS `tiny_shakespeare` (downloaded by TFDS), cut between words into rows."""

from configs import quickstart
from ernie5_jax.config import SourceConfig, to_plain


def get_config():
    config = quickstart.get_config()
    config.name = "tiny_shakespeare"
    source = SourceConfig(tfds="tiny_shakespeare", mapping={"text": "text"})
    with config.unlocked():
        config.data.sources = {"tiny_shakespeare": to_plain(source)}
        config.data.task_weights = {}
    config.sequence.text_targets = 0
    return config
