r"""Another run that starts from a checkpoint: its configuration, its tokenizers and its parameters.

    python -m experiments.pretrain --config=configs/from_checkpoint.py:runs/small --workdir=runs/small_tuned \
        --config.training.steps=200
"""

from ernie5_jax.config import ConfigError, to_config_dict


def get_config(checkpoint: str = ""):
    from ernie5_jax.training import load_config

    if not checkpoint:
        raise ConfigError("flag --config: found from_checkpoint.py alone, allowed: from_checkpoint.py:CHECKPOINT")
    config = to_config_dict(load_config(checkpoint))
    config.training.init_from = checkpoint
    return config
