"""From a checkpoint to results: a suite over a world, or a manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ernie5_jax.audio import AudioTokenizer, load_audio_tokenizer
from ernie5_jax.config import EvaluationConfig, ExperimentConfig, SequenceConfig
from ernie5_jax.data.encoding import Tokenizers
from ernie5_jax.data.encoding import _Encoder as Encoder
from ernie5_jax.data.media import MediaFormat
from ernie5_jax.data.records import unpack_encoded
from ernie5_jax.data.worlds import world_sources
from ernie5_jax.evaluation.captions import digit_in, same_words
from ernie5_jax.evaluation.digits import DigitsSuite
from ernie5_jax.evaluation.errors import EvaluationError
from ernie5_jax.evaluation.judges import train_judges
from ernie5_jax.evaluation.losses import HeldOut
from ernie5_jax.evaluation.results import Results
from ernie5_jax.evaluation.scores import Score
from ernie5_jax.evaluation.tasks import ask
from ernie5_jax.generation import Engine
from ernie5_jax.sequence import Document, EncodedDocument
from ernie5_jax.text import TextTokenizer, load_text_tokenizer
from ernie5_jax.training.accounting import parameter_totals
from ernie5_jax.training.restore import load_run
from ernie5_jax.vision import VisualTokenizer, load_visual_tokenizer

SUITES = ("digits",)


@dataclasses.dataclass
class MemoryTokenizers:
    """The tokenizers of a checkpoint, encoding documents in memory (see `generation.Tokenizers`)."""

    text: TextTokenizer
    visual: VisualTokenizer
    audio: AudioTokenizer
    sequence: SequenceConfig

    def encode_documents(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        """Encodes documents; long prose is cut at word boundaries into several.

        Raises:
          DataError: A document does not fit a row.
        """
        encoder = Encoder(Tokenizers(self.text, self.visual, self.audio), self.sequence, 1.0)
        return [unpack_encoded(record)[0] for record in encoder.encode(list(documents), 0)]


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint ready to be evaluated.

    Attributes:
      config: Its resolved configuration.
      step: Optimiser steps it was trained for.
      engine: Generates from it (averaged parameters, if it has any).
      held_out: Losses of encoded documents.
    """

    config: ExperimentConfig
    step: int
    engine: Engine
    held_out: HeldOut

    def losses(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Losses, routing and bits per byte of raw documents, see `HeldOut`."""
        return self.held_out(self.engine.tokenizers.encode_documents(list(documents)))

    def facts(self) -> dict[str, Any]:
        """What `summary.json` says about the model itself."""
        totals = parameter_totals(self.config.model)
        return {
            "steps": self.step,
            "seed": self.config.seed,
            "experts": self.config.model.router.num_experts,
            "top_k": self.config.model.router.top_k,
            "layers": self.config.model.num_layers,
            "parameters": totals["total"],
            "active_parameters": totals["active"],
            "active_fraction": totals["backbone_active"] / totals["backbone_total"],
        }


def open_checkpoint(path: str | Path) -> Opened:
    """Loads model and tokenizers from one path: a run folder or one of its checkpoints.

    Raises:
      CheckpointError: Nothing there, or not readable.
    """
    run = load_run(path)
    tokenizers = MemoryTokenizers(
        load_text_tokenizer(run.tokenizers / "text"),
        load_visual_tokenizer(run.tokenizers / "visual"),
        load_audio_tokenizer(run.tokenizers / "audio"),
        run.config.sequence,
    )
    config = run.config
    engine = Engine(config.model, run.params, run.router_bias, tokenizers, config.sequence, config.generation)
    return Opened(config, run.step, engine, HeldOut(config, run.params, run.router_bias))


def world_documents(config: ExperimentConfig, split: str, folder: Path) -> list[Document]:
    """Documents of one split ("train" or "test") of every built-in world that `config` trains on.

    Args:
      config: Sources and formats.
      split: Which documents.
      folder: Where worlds keep what they make.

    Raises:
      EvaluationError: No source of the configuration is a world.
    """
    form = MediaFormat.of(config)
    documents: list[Document] = []
    for source in config.data.sources.values():
        if source.world:
            found = world_sources(source.world, split, form, folder, source.options)
            documents += [found[i] for i in range(len(found))]
    if not documents:
        raise EvaluationError(
            f"suite: found no built-in world in config key 'data.sources' ({', '.join(config.data.sources)}), "
            "allowed: a checkpoint trained on one; others are evaluated on a manifest"
        )
    return documents


def evaluate_suite(
    opened: Opened,
    training: Sequence[Document],
    held_out: Sequence[Document],
    *,
    judges: Path | None = None,
    config: EvaluationConfig | None = None,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Results:
    """Trains (or loads) the judges and runs the suite that the configuration names.

    Args:
      opened: The checkpoint.
      training, held_out: Documents of both splits.
      judges: Folder where judges are kept; None trains them anew.
      config: Sizes of the suite; None takes the checkpoint's.
      seed: Of judges and draws.
      report: Called with one line per score.

    Raises:
      EvaluationError: Unknown suite.
    """
    config = config or opened.config.evaluation
    if config.suite not in SUITES:
        raise EvaluationError(f"suite: found {config.suite!r}, allowed: {', '.join(SUITES)}")
    tokenizers = opened.engine.tokenizers
    trained = train_judges(
        training,
        steps=config.judge_steps,
        seed=seed,
        sample_rate=tokenizers.audio.sample_rate,
        folder=judges,
        progress=True,
    )
    suite = DigitsSuite(
        opened.engine,
        trained,
        training,
        held_out,
        tokenizers.visual,
        tokenizers.audio,
        config=config,
        losses=opened.losses,
        seed=seed,
        report=report,
    )
    return suite.run()


def evaluate_documents(opened: Opened, documents: Sequence[Document], *, seed: int = 0) -> dict[str, Any]:
    """Losses per modality of any documents, and how well their captions are reproduced.

    A document counts as captioned when all it asks for is a text at its end, after something to understand.

    Returns:
      JSON-able: `step`, `documents`, `losses` (see `HeldOut`), and `scores`: per task the share of captions that are
      right word for word, and of digits, where the documents say which digit is meant.
    """
    record = opened.losses(documents)
    scores: dict[str, Score] = {}
    tasks: dict[str, list[Document]] = {}
    for document in documents:
        if _is_captioned(document):
            tasks.setdefault(str(document.meta.get("task", "caption")), []).append(document)
    for stream, (task, members) in enumerate(sorted(tasks.items())):
        said = ask(opened.engine, members, seed=seed, stream=stream)
        truth = [str(document.spans[-1].value) for document in members]
        scores[f"{task}_exact"] = Score.of([same_words(a, b) for a, b in zip(said, truth, strict=True)])
        labels = [document.meta.get("digit") for document in members]
        if None not in labels:
            right = [digit_in(text) == label for text, label in zip(said, labels, strict=True)]
            scores[f"{task}_digit"] = Score.of(right, chance=0.1)
    return {
        "step": opened.step,
        "documents": len(documents),
        "losses": record,
        "scores": {name: score.to_json() for name, score in scores.items()},
    }


def _is_captioned(document: Document) -> bool:
    *before, last = document.spans
    return (
        last.modality == "text"
        and last.role == "generate"
        and isinstance(last.value, str)
        and any(span.modality != "text" for span in before)
        and all(span.role == "understand" for span in before)
    )
