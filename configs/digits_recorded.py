"""Real handwriting and recordings, sized for an hour on two cores. Name their folder:

--config.data.sources.recorded.options.folder=PATH (see `ernie5_jax.data.worlds.recorded` for the files in it).
"""

from configs import quickstart
from ernie5_jax.config import SourceConfig, to_plain


def get_config():
    config = quickstart.get_config()
    config.name = "digits_recorded"
    with config.unlocked():
        source = SourceConfig(world="digits_recorded", options={"folder": ""})
        config.data.sources = {"recorded": to_plain(source)}
    config.data.audio_corruption = 0.2
    config.visual.training.steps = 700
    config.audio.hidden_size = 192
    config.audio.training.steps = 1500
    config.training.steps = 2400
    config.training.checkpoint_every = 500
    config.generation.audio_temperature = 0.4
    return config
