"""One self-contained HTML page about the submodels of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from ernie5_jax.evaluation import charts
from ernie5_jax.evaluation.report import templates
from ernie5_jax.files import write_file


def write_elastic_report(path: Path, content: dict[str, Any]) -> None:
    """Writes the page.

    Args:
      path: HTML file.
      content: `select`, and `sizes`, records as `submodels.Size.to_json` makes them, each with `positions_per_second`
        and maybe `mean_score`, `kept` (`scores.Kept`) and `on_front`.
    """
    sizes = [dict(record) for record in content["sizes"]]
    for record in sizes:
        record.setdefault("mean_score", None)
        record.setdefault("kept", None)
        record.setdefault("on_front", False)
    page = (
        templates()
        .get_template("elastic.html.j2")
        .render(
            select=content["select"],
            sizes=sizes,
            loss_chart=_chart(sizes, "loss", "held-out loss in nats"),
            score_chart=_chart(sizes, "mean_score", "mean task score") if sizes[0]["mean_score"] is not None else "",
        )
    )
    write_file(path, page)


def _chart(sizes: list[dict[str, Any]], key: str, label: str) -> Markup:
    points = [
        (s["backbone_active"], s[key], "{layers} layers, {experts} experts, top-{top_k}".format(**s), s["on_front"])
        for s in sizes
    ]
    return Markup(charts.scatter_chart(points, f"{label} over active parameters"))
