"""Frozen configuration dataclasses, one file per room."""

from ernie5_jax.config.base import ConfigError, from_mapping, require, to_config_dict, to_plain
from ernie5_jax.config.data import CAPACITIES, DataConfig, SelfCorrectionConfig, SequenceConfig, SourceConfig
from ernie5_jax.config.experiment import IDENTITY_KEYS, ExperimentConfig
from ernie5_jax.config.model import ModelConfig, RouterConfig, StackConfig
from ernie5_jax.config.tokenizers import (
    AudioTokenizerConfig,
    TextTokenizerConfig,
    TokenizerTrainingConfig,
    VisualTokenizerConfig,
)
from ernie5_jax.config.training import (
    ElasticSamplingConfig,
    EvaluationConfig,
    GenerationConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)

__all__ = [
    "CAPACITIES",
    "IDENTITY_KEYS",
    "AudioTokenizerConfig",
    "ConfigError",
    "DataConfig",
    "ElasticSamplingConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "GenerationConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RouterConfig",
    "StackConfig",
    "SelfCorrectionConfig",
    "SequenceConfig",
    "SourceConfig",
    "TextTokenizerConfig",
    "TokenizerTrainingConfig",
    "TrainingConfig",
    "VisualTokenizerConfig",
    "from_mapping",
    "require",
    "to_config_dict",
    "to_plain",
]
