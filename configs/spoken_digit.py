"""Spoken digits from TFDS `spoken_digit`. TFDS needs the tensorflow package once, to write this set's files."""

from configs import quickstart
from ernie5_jax.config import SourceConfig, to_plain


def get_config():
    config = quickstart.get_config()
    config.name = "spoken_digit"
    mapping = {"audio": "audio", "caption": "the word {label:word}", "digit": "label"}
    # TFDS has one split, sorted at random; its last tenth is held out.
    options = {"train_split": "train[:90%]", "test_split": "train[90%:]", "sample_rate": "8000"}
    source = SourceConfig(tfds="spoken_digit", mapping=mapping, options=options)
    with config.unlocked():
        config.data.sources = {"spoken_digit": to_plain(source)}
        config.data.task_weights = {}
    return config
