"""From a checkpoint to results: a suite over a world, or a manifest."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ernie5_jax.config import EvaluationConfig, ExperimentConfig, to_plain
from ernie5_jax.data import encode_in_memory, prepare_documents
from ernie5_jax.data.manifest import check_manifest
from ernie5_jax.evaluation.captions import digit_in, same_words
from ernie5_jax.evaluation.digits import DigitsSuite
from ernie5_jax.evaluation.errors import EvaluationError
from ernie5_jax.evaluation.judges import Judge, train_judges
from ernie5_jax.evaluation.losses import HeldOut
from ernie5_jax.evaluation.results import Results
from ernie5_jax.evaluation.scores import Score
from ernie5_jax.evaluation.tasks import ask
from ernie5_jax.generation import Engine, LoadedModel, load
from ernie5_jax.model import ElasticMask
from ernie5_jax.sequence import Document, EncodedDocument
from ernie5_jax.training.accounting import parameter_totals
from ernie5_jax.training.paths import find_checkpoint

SUITES = ("digits",)
_IDENTITY = ("seed", "model", "text", "visual", "audio", "data", "generation", "evaluation")


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint ready to be evaluated.

    Attributes:
      model: What `load` gives.
      held_out: Losses of encoded documents.
    """

    model: LoadedModel
    held_out: HeldOut

    @property
    def config(self) -> ExperimentConfig:
        return self.model.config

    @property
    def engine(self) -> Engine:
        return self.model.engine

    @property
    def step(self) -> int:
        return self.model.step

    def losses(self, documents: Sequence[Document], mask: ElasticMask | None = None) -> dict[str, Any]:
        """Losses, routing and bits per byte of raw documents, see `HeldOut`."""
        return self.held_out(self.encode(documents), mask)

    def encode(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        """Documents as the model reads them; prose is cut into rows."""
        return encode_in_memory(documents, self.model.tokenizers, self.config.sequence, split_prose=True)

    def identity(self) -> dict[str, Any]:
        """Tells whether saved results are those of this checkpoint and suite."""
        plain = json.loads(json.dumps(to_plain(self.config)))
        return {"step": self.step, "config": {name: plain[name] for name in _IDENTITY}}

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
    model = load(path)
    return Opened(model, HeldOut(model.config, model.params, model.router_bias))


def split_documents(config: ExperimentConfig, folder: Path, split: str, *, progress: bool = True) -> list[Document]:
    """Documents of one split ("train" or "test") of every source of `config`, made under `folder` where missing.

    Raises:
      DataError: A source that cannot be used, or no documents.
    """
    prepared = prepare_documents(config, folder, split, progress=progress)
    return [document for shards in prepared.values() for document in shards]


def data_folder(checkpoint: str | Path, folder: str = "") -> Path:
    """Prepared documents of a checkpoint: `folder`, or where that is "" the data/ of its run folder."""
    return Path(folder) if folder else find_checkpoint(checkpoint).parents[1] / "data"


def manifest_documents(opened: Opened, path: str) -> list[Document]:
    """Every document of a JSONL manifest, checked. Raises a `DataError` that lists all bad lines."""
    manifest = check_manifest(path, opened.config)
    return [manifest[i] for i in range(len(manifest))]


def held_out_documents(opened: Opened, folder: Path, manifest: str, count: int) -> list[Document]:
    """`count` evenly spread documents of a manifest, or of the held-out split where that is "".

    Args:
      opened: The checkpoint.
      folder: Of prepared documents, see `split_documents`.
      manifest: JSONL file.
      count: At most so many.

    Raises:
      DataError: A manifest or source that cannot be used.
    """
    documents = manifest_documents(opened, manifest) if manifest else split_documents(opened.config, folder, "test")
    picked = np.linspace(0, len(documents) - 1, min(count, len(documents))).astype(int)
    return [documents[i] for i in picked]


def check_suite(name: str) -> None:
    """Raises an `EvaluationError` unless `name` is one of `SUITES`."""
    if name not in SUITES:
        raise EvaluationError(f"suite: found {name!r}, allowed: {', '.join(SUITES)}")


def make_judges(
    opened: Opened,
    training: Sequence[Document],
    *,
    config: EvaluationConfig | None = None,
    folder: Path | None = None,
    seed: int = 0,
) -> dict[str, Judge]:
    """Judges for `evaluate_suite`, see `judges.train_judges`.

    Args:
      opened: The checkpoint; only its sample rate matters.
      training: Documents of the training split.
      config: Steps of training; None takes the checkpoint's.
      folder: Where judges are kept, per number of steps and seed; None trains them anew.
      seed: Of their training.
    """
    steps = (config or opened.config.evaluation).judge_steps
    return train_judges(
        training,
        steps=steps,
        seed=seed,
        sample_rate=opened.model.tokenizers.audio.sample_rate,
        folder=folder / f"steps_{steps}_seed_{seed}" if folder else None,
        progress=True,
    )


def evaluate_suite(
    opened: Opened,
    judges: dict[str, Judge],
    training: Sequence[Document],
    held_out: Sequence[Document],
    *,
    config: EvaluationConfig | None = None,
    mask: ElasticMask | None = None,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Results:
    """Runs the suite that the configuration names.

    Args:
      opened: The checkpoint.
      judges: From `make_judges`.
      training, held_out: Documents of both splits.
      config: Sizes of the suite; None takes the checkpoint's.
      mask: Submodel of an elastic checkpoint; nothing is compiled again for another one.
      seed: Of all draws.
      report: Called with one line per score.

    Raises:
      EvaluationError: Unknown suite.
    """
    config = config or opened.config.evaluation
    check_suite(config.suite)
    suite = DigitsSuite(
        opened.engine if mask is None else opened.engine.with_mask(mask),
        judges,
        training,
        held_out,
        opened.model.tokenizers.visual,
        opened.model.tokenizers.audio,
        config=config,
        losses=functools.partial(opened.losses, mask=mask),
        seed=seed,
        report=report,
    )
    results = suite.run()
    results.source = opened.identity()
    return results


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
