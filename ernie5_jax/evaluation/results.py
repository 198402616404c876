"""What an evaluation leaves behind: scores, plain numbers and examples to look at; saved as JSON beside one `.npz`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from ernie5_jax import files
from ernie5_jax.evaluation.errors import EvaluationError
from ernie5_jax.evaluation.scores import Score


@dataclasses.dataclass(frozen=True)
class Example:
    """Something to look at or listen to.

    Attributes:
      section: Where it belongs: a task name, or "<task>_real" for a held-out original.
      modality: Of `value`.
      value: uint8 [H, W, 3], uint8 [T, H, W, 3], float32 [samples] or an empty array for text.
      caption: The reference caption or the prompt.
      answer: What the model wrote, or what the judge read in what the model made.
      right: Whether `answer` is right, if that can be said.
    """

    section: str
    modality: str
    value: np.ndarray
    caption: str
    answer: str = ""
    right: bool | None = None


@dataclasses.dataclass
class Results:
    """Outcome of one suite.

    Attributes:
      suite: Its name.
      source: What was evaluated (see `pipeline.Opened.identity`), JSON-able.
      scores: By task.
      answers: Right or wrong by task, in the order of the prompts, to pair this model with another one (`kept_score`);
        scores that are parts of another one have none.
      numbers: Anything else that is one number, e.g. `image_variety`, `text_bits_per_byte`.
      losses: Held-out losses per modality, from the training objective.
      judges: Accuracy of each judge on held-out originals and round trips, by name.
      routing: Share of routed tokens, `[modality][layer][expert]`.
      seconds: Wall time by task; tasks that ran side by side overlap.
      examples: For the report.
      sample_rate: Hz of audio examples.
    """

    suite: str
    source: dict[str, Any] = dataclasses.field(default_factory=dict)
    scores: dict[str, Score] = dataclasses.field(default_factory=dict)
    answers: dict[str, list[bool]] = dataclasses.field(default_factory=dict)
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    judges: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    routing: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    examples: list[Example] = dataclasses.field(default_factory=list)
    sample_rate: int = 0

    @property
    def mean_score(self) -> float | None:
        """Mean over tasks, each counted once; None where nothing was asked."""
        values = [self.scores[task].value for task in self.answers]
        return sum(values) / len(values) if values else None

    def section(self, name: str) -> list[Example]:
        """The examples of one section, in order."""
        return [example for example in self.examples if example.section == name]

    def extend(self, other: Results) -> None:
        """Takes over what another part of the same suite found."""
        for name in ("scores", "answers", "numbers", "losses", "judges", "routing", "seconds"):
            getattr(self, name).update(getattr(other, name))
        self.examples.extend(other.examples)

    def to_json(self) -> dict[str, Any]:
        """Everything but the examples, ready for `json.dump`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "examples"}
        return fields | {"scores": {name: score.to_json() for name, score in self.scores.items()}}

    def save(self, folder: Path) -> None:
        """Writes `examples.npz` and then `results.json`, each atomically."""
        described = [
            {f: getattr(e, f) for f in ("section", "modality", "caption", "answer", "right")} for e in self.examples
        ]
        arrays: dict[str, Any] = {f"value{i}": example.value for i, example in enumerate(self.examples)}
        arrays["description"] = np.array(json.dumps(described))
        files.write_arrays(folder / "examples.npz", arrays, compress=True)
        write_json(folder / "results.json", self.to_json())

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Reads what `save` wrote.

        Raises:
          EvaluationError: No results there, or unreadable ones.
        """
        try:
            plain = json.loads((folder / "results.json").read_text())
            with np.load(folder / "examples.npz") as stored:
                described = json.loads(str(stored["description"]))
                examples = [Example(value=stored[f"value{i}"], **fields) for i, fields in enumerate(described)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvaluationError(
                f"results {folder}: found none that can be read ({error}), run the evaluation first"
            ) from None
        plain["scores"] = {name: Score.from_json(score) for name, score in plain["scores"].items()}
        return cls(**plain, examples=examples)


def write_json(path: Path, content: Any) -> None:
    """`files.write_json`; numbers that are not finite become null."""
    files.write_json(path, _plain(content), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if (
        isinstance(value, np.generic | np.ndarray)
        or hasattr(value, "__jax_array__")
        or hasattr(value, "addressable_shards")
    ):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
