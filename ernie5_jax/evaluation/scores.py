"""Accuracies with everything that is needed to read them: sample size, interval, ceiling and chance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

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


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
