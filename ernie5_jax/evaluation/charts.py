"""Charts as inline SVG. Colours come from the page's CSS (classes and variables), so they follow light and dark."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Scale = Callable[[Any], Any]
"""From a value of an axis to its place in the picture."""

_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 26


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers within low ... high (steps of 1, 2, 2.5 or 5 times a power of ten)."""
    span = max(high - low, 1e-9)
    power = 10 ** math.floor(math.log10(span / count))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def smoothed(values: Sequence[float], share: float = 0.05) -> np.ndarray:
    """Centred moving average over `share` of the curve; shorter at the ends."""
    y = np.asarray(values, np.float64)
    half = int(len(y) * share / 2)
    total = np.concatenate([[0.0], np.cumsum(y)])
    low = np.maximum(np.arange(len(y)) - half, 0)
    high = np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


def line_chart(steps: Sequence[float], values: Sequence[float | None], label: str, kind: str) -> str:
    """One curve over training steps: raw values faint, the smoothed curve on top.

    Args:
      steps, values: Same length, None and values that are not finite are left out.
      label: What the curve shows, for readers of screens.
      kind: CSS class of the colour, e.g. "audio".
    """
    points = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None and math.isfinite(v)]
    if not points:
        return ""
    x, y = np.array(points, np.float64).T
    top = float(np.quantile(y, 0.995))
    low, high = _padded(float(y.min()), max(top, float(y.min()) + 1e-6))
    right = max(float(x.max()), float(x.min()) + 1)
    left = float(x.min())

    def to_x(v):
        return _LEFT + (v - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def to_y(v):
        return _TOP + (high - np.clip(v, low, high)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_open(_WIDTH, _HEIGHT, label, f"chart {kind}")]
    parts += _axes((left, right), (low, high), to_x, to_y)
    curve = smoothed(y)
    parts.append(f'<polyline class="raw" points="{_points(to_x(x), to_y(y))}"/>')
    parts.append(f'<polyline class="line" points="{_points(to_x(x), to_y(curve))}"/>')
    parts.append(f'<circle class="end" cx="{to_x(x[-1]):.1f}" cy="{to_y(curve[-1]):.1f}" r="3.5"/>')
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), 120)).round().astype(int))
    hover = [
        [round(float(to_x(x[i])), 1), round(float(to_y(curve[i])), 1), int(x[i]), round(float(curve[i]), 4)]
        for i in kept
    ]
    parts.append('<g class="hover" visibility="hidden"><line y1="10" y2="174"/><circle r="3.5"/></g></svg>')
    return f'<div class="plot" data-points="{html.escape(json.dumps(hover))}">{"".join(parts)}</div>'


def scatter_chart(points: Sequence[tuple[float, float, str, bool]], label: str) -> str:
    """Points (x, y, name shown on hovering, whether filled); the filled ones are joined by a line in the order of x."""
    x, y = (np.array([point[i] for point in points], np.float64) for i in (0, 1))
    (left, right), (low, high) = (_padded(float(v.min()), max(float(v.max()), float(v.min()) + 1e-6)) for v in (x, y))
    to_x = lambda v: _LEFT + (v - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)  # noqa: E731
    to_y = lambda v: _TOP + (high - v) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)  # noqa: E731
    parts = [_open(_WIDTH, _HEIGHT, label, "chart text")]
    parts += _axes((left, right), (low, high), to_x, to_y)
    filled = np.array(sorted((px, py) for px, py, _, full in points if full)).reshape(-1, 2)
    parts.append(f'<polyline class="line" points="{_points(to_x(filled[:, 0]), to_y(filled[:, 1]))}"/>')
    for px, py, name, full in points:
        kind = "end" if full else "end hollow"
        parts.append(
            f'<circle class="{kind}" cx="{to_x(px):.1f}" cy="{to_y(py):.1f}" r="4">'
            f"<title>{html.escape(name)}: {py:.4g}</title></circle>"
        )
    return "".join(parts) + "</svg>"


def score_bar(value: float, interval: tuple[float, float], ceiling: float | None, chance: float | None) -> str:
    """A bar from 0 to 100 % with its interval, a tick at the ceiling and one at chance."""
    width, height = 220, 22
    label = f"{100 * value:.1f} percent"
    parts = [_open(width, height, label, "score")]
    parts.append(f'<rect class="track" x="0" y="6" width="{width}" height="10" rx="5"/>')
    parts.append(f'<rect class="fill" x="0" y="6" width="{max(value * width, 2):.1f}" height="10" rx="5"/>')
    low, high = (width * share for share in interval)
    parts.append(f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="11" y2="11"/>')
    for name, share in (("ceiling", ceiling), ("chance", chance)):
        if share is not None:
            at = min(max(share * width, 1), width - 1)
            parts.append(
                f'<line class="{name}" x1="{at:.1f}" x2="{at:.1f}" y1="1" y2="21">'
                f"<title>{name} {100 * share:.1f} %</title></line>"
            )
    return "".join(parts) + "</svg>"


def bars(entries: Sequence[tuple[str, float, str]], highlight: str = "") -> str:
    """Labelled horizontal bars from zero, as HTML: text keeps its size on narrow screens.

    Args:
      entries: (label, value >= 0, text behind the bar).
      highlight: Label of the bar in the accent colour; the others are grey. Empty colours all.
    """
    longest = max((value for _, value, _ in entries), default=0) or 1
    parts = []
    for label, value, text in entries:
        kind = "fill" if label == highlight or not highlight else "other"
        parts.append(
            f"<dt>{html.escape(label)}</dt><dd>"
            f'<span class="{kind}" style="width:{75 * value / longest:.2f}%"></span>{html.escape(text)}</dd>'
        )
    return f'<dl class="bars">{"".join(parts)}</dl>'


def heatmap(shares: Sequence[Sequence[float]], label: str, scale: float) -> str:
    """Layers (rows) by experts (columns); full colour is a share of `scale` or more."""
    cell, left, top = 11, 26, 4
    layers, experts = len(shares), len(shares[0])
    width, height = left + cell * experts, top + cell * layers + 18
    parts = [_open(width, height, label, "heatmap")]
    for y, layer in enumerate(shares):
        parts.append(f'<text class="tick" x="{left - 6}" y="{top + y * cell + 8.5}" text-anchor="end">{y + 1}</text>')
        for x, share in enumerate(layer):
            strength = min(share / scale, 1)
            parts.append(
                f'<rect x="{left + x * cell}" y="{top + y * cell}" width="{cell - 1}" height="{cell - 1}" rx="1.5" '
                f'fill-opacity="{0.04 + 0.96 * strength:.3f}">'
                f"<title>layer {y + 1}, expert {x + 1}: {100 * share:.1f} %</title></rect>"
            )
    for x in range(0, experts, max(1, experts // 4)):
        parts.append(
            f'<text class="tick" x="{left + x * cell + cell / 2}" y="{height - 5}" text-anchor="middle">{x + 1}</text>'
        )
    return "".join(parts) + "</svg>"


def _axes(x: tuple[float, float], y: tuple[float, float], to_x: Scale, to_y: Scale) -> list[str]:
    """Grid lines and labels of both axes."""
    parts = []
    for tick in nice_ticks(*y, 5):
        at = to_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in nice_ticks(*x):
        at = to_x(tick)
        parts.append(f'<text class="tick" x="{at:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{_number(tick)}</text>')
    return parts


def _open(width: float, height: float, label: str, kind: str) -> str:
    return f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}">'


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low)
    return (0.0 if 0 <= low < 0.25 * high else low - margin), high + margin


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:g}"
