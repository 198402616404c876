"""Accuracies with everything that is needed to read them: sample size, interval, ceiling and chance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ernie5_jax.evaluation.errors import EvaluationError

_Z95 = 1.959963984540054


def wilson_interval(successes: float, n: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson score interval of a binomial proportion (Wilson, 1927).

    Args:
      successes: Number of right answers, 0 ... n.
      n: Trials, >= 1.
      z: Normal quantile; the default gives 95 %.

    Returns:
      Lower and upper end, both within 0 ... 1.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"wilson_interval: found {successes} of {n}, allowed: 0 <= successes <= n, n >= 1")
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclasses.dataclass(frozen=True)
class Score:
    """An accuracy over `n` prompts.

    Attributes:
      value: Share of right answers.
      n: Prompts.
      ceiling: The judge's accuracy on held-out originals after a tokenizer round trip.
      chance: Accuracy of guessing.
      original: The judge's accuracy on the held-out originals themselves.
      exact: Share of captions that equal the reference word for word, where that is meant.
    """

    value: float
    n: int
    ceiling: float | None = None
    chance: float | None = None
    original: float | None = None
    exact: float | None = None

    @classmethod
    def of(cls, right: Sequence[bool], **kwargs: Any) -> Score:
        """The score of one list of right (True) and wrong (False) answers."""
        if not len(right):
            raise EvaluationError("score: found no answers, allowed: at least one prompt")
        return cls(value=float(sum(map(bool, right))) / len(right), n=len(right), **kwargs)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % binomial interval of `value`."""
        return wilson_interval(self.value * self.n, self.n)

    def to_json(self) -> dict[str, Any]:
        plain = {k: v for k, v in dataclasses.asdict(self).items() if v is not None or k in ("ceiling", "chance")}
        return plain | {"interval": list(self.interval)}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Score:
        return cls(**{f.name: plain.get(f.name) for f in dataclasses.fields(cls)})  # type: ignore[arg-type]

    def line(self, name: str) -> str:
        """One line for the terminal, e.g. `image_caption  97.8 % (95.7-98.9, n 359)  ceiling 97.2  chance 10.0`."""
        low, high = self.interval
        text = f"{name:<34}{_percent(self.value)} % ({_percent(low)}-{_percent(high)}, n {self.n})"
        for label, value in (("original", self.original), ("ceiling", self.ceiling), ("chance", self.chance)):
            text += "" if value is None else f"  {label} {_percent(value)}"
        return text


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a smaller or otherwise changed model keeps of a reference's mean task score.

    Attributes:
      value: Mean score over tasks, divided by that of the reference.
      interval: 95 % of it, over prompts drawn again with replacement within each task, the same ones for both.
      prompts: How many both have answered.
    """

    value: float
    interval: tuple[float, float]
    prompts: int

    def __str__(self) -> str:
        low, high = self.interval
        return f"keeps {_percent(self.value)} % ({_percent(low)}-{_percent(high)}, {self.prompts} paired prompts)"


def kept_score(
    answers: Mapping[str, Sequence[bool]], reference: Mapping[str, Sequence[bool]], *, draws: int = 2000, seed: int = 0
) -> Kept:
    """Compares right (True) and wrong answers to the same prompts, by task (ERNIE 5.0 section 6.4.2 compares means).

    Raises:
      EvaluationError: Other tasks or numbers of prompts on the two sides, or a reference without a right answer.
    """
    found, wanted = ({task: len(right) for task, right in side.items()} for side in (answers, reference))
    if found != wanted or not wanted:
        raise EvaluationError(f"compared scores: found prompts {found}, allowed: those of the reference, {wanted}")
    pairs = [np.array([answers[task], reference[task]], float) for task in reference]
    rng = np.random.default_rng(seed)
    mean = np.mean([pair.mean(1) for pair in pairs], axis=0)
    if mean[1] == 0:
        raise EvaluationError("compared scores: found a reference with no right answer, allowed: at least one")
    drawn = np.zeros((draws, 2))
    for pair in pairs:
        n = pair.shape[1]
        drawn += pair[:, rng.integers(0, n, (draws, n))].mean(-1).T / len(pairs)
    low, high = np.quantile(drawn[:, 0] / np.maximum(drawn[:, 1], np.finfo(float).tiny), (0.025, 0.975))
    return Kept(float(mean[0] / mean[1]), (float(low), float(high)), sum(wanted.values()))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
