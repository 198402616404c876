"""Everything in one go: data, tokenizers, unified model, judges, evaluation, report.

    python -m experiments.quickstart --config=configs/quickstart.py --workdir=runs/quickstart

The same command again resumes: finished stages are skipped, training goes on from its newest checkpoint. The work
folder then holds report.html (open it in a browser), summary.json, and a checkpoint to generate from.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments import cli

if TYPE_CHECKING:
    from ernie5_jax.config import ExperimentConfig
    from ernie5_jax.evaluation import Results

_CONFIG = cli.define_config("quickstart.py")
_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Folder of the run; made if missing.")


def main(argv):
    del argv
    config = cli.load_config(_CONFIG)
    run_all(config, Path(_WORKDIR.value))


def run_all(config: ExperimentConfig, workdir: Path) -> dict[str, Any]:
    """Runs the stages that are not finished yet and returns the content of `summary.json`."""
    from ernie5_jax.data import SPLITS
    from ernie5_jax.evaluation import pipeline, summarize, write_report, write_summary
    from ernie5_jax.training import find_checkpoint, prepare_run, read_metrics, train

    stages = Stages(workdir)
    data = prepare_run(config, workdir, stage=stages.stage)
    with stages.stage("pretrain"):
        train(config, workdir, data)
    opened = pipeline.open_checkpoint(workdir)
    with stages.stage("held-out data"):
        training, held_out = (pipeline.split_documents(config, workdir / "data", split) for split in SPLITS)
    with stages.stage("judges"):
        judges = pipeline.make_judges(opened, training, folder=workdir / "judges", seed=config.seed)
    with stages.stage("evaluate"):
        results = _evaluate(opened, judges, training, held_out, workdir / "evaluation")
    run = {"checkpoint": str(find_checkpoint(workdir)), **opened.facts(), **results.numbers, "seconds": stages.seconds}
    with stages.stage("report"):
        metrics = read_metrics(workdir)
        write_report(workdir / "report.html", results, summarize(results, run), metrics, title=config.name.capitalize())
    summary = write_summary(workdir / "summary.json", results, run)
    print(f"{sum(stages.seconds.values()):.0f} s in all\n{workdir / 'report.html'}\n{workdir / 'summary.json'}")
    return summary


def _evaluate(opened: Any, judges: dict, training: list, held_out: list, folder: Path) -> Results:
    """The results in `folder` if they are this checkpoint's, else new ones."""
    from ernie5_jax.evaluation import EvaluationError, Results, pipeline

    with contextlib.suppress(EvaluationError):
        results = Results.load(folder)
        if results.source == opened.identity():
            return results
    results = pipeline.evaluate_suite(opened, judges, training, held_out, seed=opened.config.seed)
    results.save(folder)
    return results


class Stages:
    """Announces stages and keeps the time each took, in `stages.json`.

    An interrupted stage goes on in the next run of the script, so its times add up; looking again at one that is
    finished does not count.
    """

    def __init__(self, workdir: Path):
        self._path = workdir / "stages.json"
        try:
            stored = json.loads(self._path.read_text())
            self.seconds: dict[str, float] = dict(stored["seconds"])
            self._finished: set[str] = set(stored["finished"])
        except (OSError, ValueError, KeyError, TypeError):
            self.seconds, self._finished = {}, set()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block."""
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        try:
            yield
            self._count(name, time.perf_counter() - start)
            self._finished.add(name)
        except BaseException:
            self._count(name, time.perf_counter() - start)
            raise
        finally:
            self._write()
        print(f"== {name}: {self.seconds[name]:.1f} s", flush=True)

    def _count(self, name: str, seconds: float) -> None:
        before = self.seconds.get(name, 0.0)
        self.seconds[name] = round(max(before, seconds) if name in self._finished else before + seconds, 2)

    def _write(self) -> None:
        from ernie5_jax.evaluation import write_json

        write_json(self._path, {"seconds": self.seconds, "finished": sorted(self._finished)})


if __name__ == "__main__":
    cli.run(main)
