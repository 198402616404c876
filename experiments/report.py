"""Writes the HTML report of a run that was evaluated: one page that needs no other file.

python -m experiments.report --workdir=runs/quickstart
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from experiments import cli

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run folder with summary.json, evaluation/, metrics.jsonl.", required=True
)
_OUT = flags.DEFINE_string("out", "", "Page to write; empty is report.html in the run folder.")
_TITLE = flags.DEFINE_string("title", "", "Heading; empty is the name of the folder.")


def main(argv):
    del argv
    from ernie5_jax.evaluation import EvaluationError, Results, write_report
    from ernie5_jax.training import read_metrics

    workdir = Path(_WORKDIR.value)
    results = Results.load(workdir / "evaluation")
    try:
        summary = json.loads((workdir / "summary.json").read_text())
    except (OSError, ValueError) as error:
        raise EvaluationError(f"summary '{workdir / 'summary.json'}': cannot be read ({error})") from None
    out = Path(_OUT.value) if _OUT.value else workdir / "report.html"
    title = _TITLE.value or workdir.resolve().name.capitalize()
    write_report(out, results, summary, read_metrics(workdir), title=title)
    print(out)


if __name__ == "__main__":
    cli.run(main)
