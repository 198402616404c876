"""The report's ablation of elastic training (ERNIE 5.0 section 6.4.2) at small scale.

    make ablation

Trains every arm of `configs/elastic_ablation.py` (static, elastic in one axis, elastic in all) on the same tokens,
and measures each on the same held-out documents, whole and cut. Every finished run leaves its losses per document in a
file of `--results`, with the hash of its configuration: it is not trained again, also where only that file was carried
to another machine. An interrupted one goes on. Writes `ablation.json` (intervals, the hash of the configuration) and
prints the table beside the report's numbers; `--only=all_0,static_0` trains a part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from experiments import cli

if TYPE_CHECKING:
    from ernie5_jax.config import ExperimentConfig
    from ernie5_jax.model import ElasticMask

_CONFIG = cli.define_config("elastic_ablation.py")
_WORKDIR = flags.DEFINE_string("workdir", "runs/ablation", "Folder of all runs; made if missing.")
_RESULTS = flags.DEFINE_string("results", "", "Folder for losses of finished runs; empty is the work folder.")
_ONLY: flags.FlagHolder[Any] = flags.DEFINE_list("only", [], "Runs to train or look up, by name; empty is all of them.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of the static and of the all-three arm.", lower_bound=1)
_DOCUMENTS = flags.DEFINE_integer("documents", 400, "Held-out documents that are measured.", lower_bound=2)

_REDUCED = {"depth": {"full_depth": 0.75}, "width": {"full_width": 0.8}, "sparsity": {"full_top_k": 0.8}}


def main(argv):
    del argv
    from ernie5_jax.evaluation import write_json
    from ernie5_jax.training import prepare_run

    config, workdir = cli.load_config(_CONFIG), Path(_WORKDIR.value)
    results = Path(_RESULTS.value or workdir)
    runs = _chosen(all_runs(config, _SEEDS.value), _ONLY.value)
    losses = {name: _finished(results / f"{name}.json", run) for name, run in runs.items()}
    if not all(losses.values()):  # the same documents and tokenizers for all: those of seed 0
        prepare_run(config, workdir / "shared")
    for name, run in runs.items():
        if not losses[name]:
            losses[name] = run_arm(run, workdir / name, workdir / "shared", results / f"{name}.json", cuts(config))
        print(name, {cut: round(float(np.mean(values)), 4) for cut, values in losses[name].items()}, flush=True)
    if _ONLY.value:
        return
    lines = table(losses)
    content = {"config_sha256": _hash(config), "documents": _DOCUMENTS.value, "runs": list(runs), "table": lines}
    write_json(results / "ablation.json", content)
    for line in lines:
        low, high = line["interval"]
        print("{name:<44}{value:8.4f}  {0:.4f} ... {1:.4f}   report {report}".format(low, high, **line))
    print(results / "ablation.json")


def all_runs(config: ExperimentConfig, seeds: int) -> dict[str, ExperimentConfig]:
    """Configurations by `<arm>_<seed>`: `seeds` of the static and of the all-three arm, one of the others."""
    return {
        f"{arm}_{seed}": dataclasses.replace(config, elastic=elastic, seed=seed)
        for arm, elastic in arms(config).items()
        for seed in range(seeds if arm in ("static", "all") else 1)
    }


def _chosen(runs: dict[str, ExperimentConfig], only: list[str]) -> dict[str, ExperimentConfig]:
    from ernie5_jax.errors import UserError

    for name in only:
        if name not in runs:
            raise UserError(f"flag --only: found {name!r}, allowed: {', '.join(runs)}")
    return {name: run for name, run in runs.items() if not only or name in only}


def _hash(config: ExperimentConfig) -> str:
    from ernie5_jax.config import to_plain

    return hashlib.sha256(json.dumps(to_plain(config), sort_keys=True, default=str).encode()).hexdigest()


def arms(config: ExperimentConfig) -> dict[str, Any]:
    """`config.elastic` of every arm: probabilities of the report, ranges of its ablation."""
    router = config.model.router
    base = dataclasses.replace(
        config.elastic,
        granularity="microbatch",
        min_experts=router.num_experts // 2,
        max_experts=router.num_experts // 2,
        min_layers=1,
        min_top_k=1,
    )
    every = {key: value for reduced in _REDUCED.values() for key, value in reduced.items()}
    found = {"static": base, "all": dataclasses.replace(base, **every)}
    return found | {axis: dataclasses.replace(base, **reduced) for axis, reduced in _REDUCED.items()}


def cuts(config: ExperimentConfig) -> dict[str, ElasticMask]:
    """The submodels that every arm is measured as: layers evenly spaced, the first experts, fewer per token."""
    from ernie5_jax.elastic import submodel_mask

    model = config.model
    layers, experts, top_k = model.num_layers, model.router.num_experts, model.router.top_k
    sizes = {
        "full": (layers, experts, top_k),
        "depth": (3 * layers // 4, experts, top_k),
        "width": (layers, experts // 2, top_k),
        **{f"k{top_k // part}": (layers, experts, top_k // part) for part in (2, 4, 8)},
    }
    return {name: submodel_mask(model, *size) for name, size in sizes.items()}


def _identity(config: ExperimentConfig) -> dict[str, Any]:
    return {"config_sha256": _hash(config), "documents": _DOCUMENTS.value}


def _finished(result: Path, config: ExperimentConfig) -> dict[str, list[float]]:
    """Losses of a run that is finished, by cut; empty if it is not, or was another configuration's."""
    if not result.exists():
        return {}
    found = json.loads(result.read_text())
    if {key: found[key] for key in _identity(config)} == _identity(config):
        return found["losses"]
    print(f"{result} is another configuration's and is made anew", flush=True)
    return {}


def run_arm(
    config: ExperimentConfig, workdir: Path, shared: Path, result: Path, masks: dict[str, ElasticMask]
) -> dict[str, list[float]]:
    """Trains (or goes on training) one run and writes `result`: nats per token of every held-out document, by cut."""
    from ernie5_jax.data import prepare_documents
    from ernie5_jax.evaluation import pipeline, write_json
    from ernie5_jax.training import prepare_run, train

    run = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizers=str(shared / "tokenizers")))
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / "data").exists():
        (workdir / "data").symlink_to((shared / "data").absolute(), target_is_directory=True)
    train(run, workdir, prepare_run(run, workdir))
    opened = pipeline.open_checkpoint(workdir)
    held_out = prepare_documents(run, workdir / "data", "test")
    documents = opened.encode([document for shards in held_out.values() for document in shards])
    chosen = np.linspace(0, len(documents) - 1, min(len(documents), _DOCUMENTS.value)).astype(int)
    documents = [documents[i] for i in chosen]
    measured = {cut: opened.held_out.text_losses(documents, mask) for cut, mask in masks.items()}
    losses = {cut: values.astype(float).round(6).tolist() for cut, values in measured.items()}
    text = opened.model.tokenizers.text.fingerprint()
    write_json(result, {**_identity(config), "text_tokenizer": text, "losses": losses})
    return losses


def table(losses: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Lines of comparison, each a relative difference of mean losses with a 95 % interval.

    Documents are drawn again with replacement, the same ones on both sides; where there are several seeds these too.
    """
    runs = {arm: [np.array([v[c] for c in v]) for n, v in losses.items() if n.rsplit("_", 1)[0] == arm]
            for arm in ("static", "all", *_REDUCED)}  # fmt: skip
    order = list(next(iter(losses.values())))
    lines = [
        _line(
            "all, full / static, full", runs["all"], runs["static"], order, "full", "full", "depth 0.998, width 1.004"
        ),
        _line("all, k 4 / all, k 8", runs["all"], runs["all"], order, order[3], "full", "1.001"),
        _line("all, k 2 / all, k 4", runs["all"], runs["all"], order, order[4], order[3], "1.016"),
        _line("all, k 1 / all, k 2", runs["all"], runs["all"], order, order[5], order[4], "1.086"),
    ]
    for cut, name in (("depth", "12 layers"), ("width", "32 experts"), (order[4], "k 2")):
        lines.append(_line(f"all, {name} / static, {name}", runs["all"], runs["static"], order, cut, cut, "-"))
    for axis in _REDUCED:
        lines.append(_line(f"{axis}, full / static, full", runs[axis], runs["static"], order, "full", "full", "-"))
    return lines


def _line(name, above, below, order, cut, other, report, draws: int = 2000) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    above, below = (np.stack([run[order.index(c)] for run in runs]) for runs, c in ((above, cut), (below, other)))
    paired = above.shape == below.shape and above.shape[0] > 1

    def ratio(a_runs, b_runs, documents) -> float:
        return above[a_runs][:, documents].mean() / below[b_runs][:, documents].mean()

    whole = ratio(np.arange(len(above)), np.arange(len(below)), np.arange(above.shape[1]))
    drawn = []
    for _ in range(draws):
        a_runs = rng.integers(0, len(above), len(above))
        b_runs = a_runs if paired else rng.integers(0, len(below), len(below))
        drawn.append(ratio(a_runs, b_runs, rng.integers(0, above.shape[1], above.shape[1])))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {
        "name": name,
        "value": float(whole),
        "interval": [float(low), float(high)],
        "report": report,
    }


if __name__ == "__main__":
    cli.run(main)
