"""A small experiment, and a model of two matrices that stands in for the real one where only the step matters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ernie5_jax.config import (
    AudioTokenizerConfig,
    ElasticSamplingConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    TextTokenizerConfig,
    TrainingConfig,
    VisualTokenizerConfig,
)
from ernie5_jax.model import ModelOutput, RouterStats
from ernie5_jax.model.heads import Readout, gather_slots
from ernie5_jax.sequence.types import Batch
from ernie5_jax.testing import tiny_model_config, tiny_sequence_config


def small_experiment(model: ModelConfig | None = None, **sections: Any) -> ExperimentConfig:
    """An experiment whose widths fit `testing.dummy_batch`."""
    model = model or tiny_model_config()
    values = {
        "model": model,
        "text": TextTokenizerConfig(vocab_size=model.vocab_size),
        "visual": VisualTokenizerConfig(channels=(4, 6), bits=4, scales=(1, 2), image_size=8),
        "audio": AudioTokenizerConfig(levels=model.audio_levels, bins=model.audio_bins),
        "sequence": tiny_sequence_config(),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_fraction=0.0),
        "training": TrainingConfig(steps=8, batch_rows=4, log_every=1, tensorboard=False, progress=False),
        "elastic": ElasticSamplingConfig(),
    }
    return ExperimentConfig(**{**values, **sections})


def bag_of_tokens(config: ModelConfig):
    """apply(params, router_bias, batch, mask): text logits from the embedding alone, bits from another matrix."""

    def apply(params: Any, router_bias: jax.Array, batch: Batch, mask: Any = None) -> ModelOutput:
        del router_bias, mask
        table = params["embedding"]["text"]
        hidden = table[batch.token]
        text, visual = batch.targets["text"], batch.targets["visual"]
        routed, experts = config.num_routed_layers, config.router.num_experts
        tokens = (batch.segment > 0).sum().astype(jnp.float32)
        counts = jnp.zeros((routed, experts)).at[:, 0].set(tokens)
        return ModelOutput(
            hidden=hidden,
            text=Readout(gather_slots(hidden, text.index), table.T),
            mtp=None,
            visual_logits=gather_slots(hidden, visual.index) @ params["bit_head"]["out"]["kernel"],
            audio_logits=None,
            audio_codes=None,
            router=RouterStats(counts, counts, jnp.zeros(routed), jnp.full(routed, tokens)),
            cache=None,
        )

    return apply


def with_training(config: ExperimentConfig, **fields: Any) -> ExperimentConfig:
    """`config` with other fields of its training section."""
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **fields))
