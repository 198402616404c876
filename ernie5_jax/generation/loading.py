"""From one path to a model that generates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from ernie5_jax.config import ExperimentConfig, GenerationConfig
from ernie5_jax.data import Tokenizers, load_tokenizers
from ernie5_jax.generation.engine import Engine, Request, Result
from ernie5_jax.model import ElasticMask, Params
from ernie5_jax.sequence import Document, Modality
from ernie5_jax.training.identity import check_tokenizers
from ernie5_jax.training.paths import find_checkpoint
from ernie5_jax.training.restore import load_run


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    Attributes:
      config: Resolved configuration of the run.
      params: Averaged parameters where the run keeps them.
      router_bias: float32 [L_routed, E].
      tokenizers: Text, visual and audio tokenizer.
      step: Optimiser steps taken.
      engine: The generator that `generate` uses.
    """

    config: ExperimentConfig
    params: Params
    router_bias: jax.Array
    tokenizers: Tokenizers
    step: int
    engine: Engine

    def generate(
        self,
        document: Document,
        to: Modality,
        *,
        seed: int = 0,
        samples: int = 1,
        **settings: Any,
    ) -> list[Result]:
        """Continues a document with `samples` spans of modality `to`.

        Args:
          document: The spans so far.
          to: text, image, video or audio.
          seed: Of all draws.
          samples: How many answers.
          **settings: Fields of `GenerationConfig` to change.

        Raises:
          GenerationError: No room for the answer, or an unknown modality.
        """
        config: GenerationConfig = dataclasses.replace(self.engine.config, **settings)
        requests = [Request(document, to, sample=i) for i in range(samples)]
        return self.engine.generate(requests, seed=seed, config=config)


def load(path: str | Path, *, mask: ElasticMask | None = None) -> LoadedModel:
    """Loads model, tokenizers and configuration.

    Args:
      path: A run folder (its newest checkpoint) or one checkpoint.
      mask: Submodel to run; None is the full model.

    Raises:
      CheckpointError: Nothing there, not readable, or with other tokenizers than it was trained with.
    """
    run = load_run(path)
    tokenizers = load_tokenizers(run.tokenizers)
    check_tokenizers(find_checkpoint(path), tokenizers.fingerprints())
    engine = Engine(
        run.config.model,
        run.params,
        run.router_bias,
        tokenizers,
        run.config.sequence,
        run.config.generation,
        mask,
    )
    return LoadedModel(run.config, run.params, run.router_bias, tokenizers, run.step, engine)
