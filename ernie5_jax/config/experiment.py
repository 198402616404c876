"""The whole configuration of one experiment."""

from __future__ import annotations

import dataclasses

from ernie5_jax.config.base import require
from ernie5_jax.config.data import DataConfig, SequenceConfig
from ernie5_jax.config.model import ModelConfig
from ernie5_jax.config.tokenizers import AudioTokenizerConfig, TextTokenizerConfig, VisualTokenizerConfig
from ernie5_jax.config.training import (
    ElasticSamplingConfig,
    EvaluationConfig,
    GenerationConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """Every room's configuration, checked against each other.

    `IDENTITY_KEYS` may not change when a run is resumed, the others may.
    """

    name: str = "experiment"
    seed: int = 0
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    text: TextTokenizerConfig = dataclasses.field(default_factory=TextTokenizerConfig)
    visual: VisualTokenizerConfig = dataclasses.field(default_factory=VisualTokenizerConfig)
    audio: AudioTokenizerConfig = dataclasses.field(default_factory=AudioTokenizerConfig)
    sequence: SequenceConfig = dataclasses.field(default_factory=SequenceConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    elastic: ElasticSamplingConfig = dataclasses.field(default_factory=ElasticSamplingConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)

    def __post_init__(self):
        pairs = (
            ("model.vocab_size", self.model.vocab_size, "text.vocab_size", self.text.vocab_size),
            ("model.visual_bits", self.model.visual_bits, "visual.bits", self.visual.bits),
            ("model.visual_scales", self.model.visual_scales, "len(visual.scales)", len(self.visual.scales)),
            ("model.vision_feature_dim", self.model.vision_feature_dim, "visual.feature_dim", self.visual.feature_dim),
            ("model.audio_levels", self.model.audio_levels, "0 or audio.levels", self.audio.levels),
            ("model.audio_bins", self.model.audio_bins, "audio.bins", self.audio.bins),
        )
        if not self.model.audio_levels:
            pairs = pairs[:-2]  # no sound
        for key, found, other, expected in pairs:
            require(found == expected, key, found, f"{other} = {expected}")
        require(
            len(self.sequence.audio_level_weights) in (0, self.audio.levels),
            "sequence.audio_level_weights",
            self.sequence.audio_level_weights,
            f"empty or {self.audio.levels} numbers",
        )
        require(0 <= self.seed < 2**32, "seed", self.seed, "0 ... 2**32 - 1")
        top_k = self.model.router.top_k
        min_top_k = self.elastic.min_top_k
        require(min_top_k <= top_k, "elastic.min_top_k", min_top_k, f"<= model.router.top_k = {top_k}")
        require(
            self.model.elastic or self.elastic.full_depth == self.elastic.full_width == self.elastic.full_top_k == 1,
            "model.elastic",
            self.model.elastic,
            "True when elastic sampling is on",
        )


IDENTITY_KEYS = (
    "seed",
    "model",
    "text",
    "visual",
    "audio",
    "sequence",
    "data.sources",
    "data.task_weights",
    "data.audio_corruption",
    "data.visual_corruption",
    "optimizer",
    "loss",
    "elastic",
    "training.batch_rows",
    "training.micro_batches",
    "training.precision",
    "training.init_from",
)
"""Keys a resumed run must share with its checkpoint (`model.remat` excepted: it changes no value)."""
