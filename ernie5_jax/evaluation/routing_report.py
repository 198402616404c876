"""One self-contained HTML page about the routing of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from ernie5_jax.evaluation import charts
from ernie5_jax.evaluation.report import templates
from ernie5_jax.files import write_file


def write_routing_report(path: Path, content: dict[str, Any]) -> None:
    """Writes the page from what `routing.analyze` found."""
    use = content["use"]
    layers, experts = len(next(iter(use.values()))), len(next(iter(use.values()))[0])
    scale = min(1.0, 4 / experts)
    tasks = [
        {
            "name": task.capitalize(),
            "chart": Markup(charts.heatmap(shares, f"expert use, {task}", scale)),
            "entropy": content["normalized_entropy"][task],
            "violation": content["max_violation"][task],
        }
        for task, shares in use.items()
    ]
    pairs = [
        {"name": name, "found": [values[layer] for layer in (0, layers // 2, layers - 1)]}
        for name, values in content["iou"].items()
    ]
    page = templates().get_template("routing.html.j2").render(
        tasks=tasks, pairs=pairs, layers=range(1, layers + 1), scale=scale, fraction=content["fraction"]
    )  # fmt: skip
    write_file(path, page)
