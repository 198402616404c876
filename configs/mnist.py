"""Handwriting from TFDS `mnist` (downloaded by TFDS), in both directions."""

from configs import quickstart
from ernie5_jax.config import SourceConfig, to_plain


def get_config():
    config = quickstart.get_config()
    config.name = "mnist"
    mapping = {"image": "image", "caption": "a handwritten {label:word}", "digit": "label"}
    with config.unlocked():
        config.data.sources = {"mnist": to_plain(SourceConfig(tfds="mnist", mapping=mapping))}
        config.data.task_weights = {}
    return config
