"""The report's ablation of elastic training (ERNIE 5.0 section 6.4.2) at small scale.

    make ablation

Trains every arm of `configs/elastic_ablation.py` (static, elastic in one axis, elastic in all) on the same tokens,
and measures each on the same held-out documents, whole and cut. An arm that is finished is skipped, an interrupted one
goes on. Writes `ablation.json` (losses per document, intervals, the hash of the configuration) and prints the table
beside the report's numbers.
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
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of the static and of the all-three arm.", lower_bound=1)
_DOCUMENTS = flags.DEFINE_integer("documents", 400, "Held-out documents that are measured.", lower_bound=2)

_REDUCED = {"depth": {"full_depth": 0.75}, "width": {"full_width": 0.8}, "sparsity": {"full_top_k": 0.8}}


def main(argv):
    del argv
    from ernie5_jax.evaluation import write_json

    config, workdir = cli.load_config(_CONFIG), Path(_WORKDIR.value)
    losses: dict[str, dict[str, list[float]]] = {}
    first: Path | None = None
    for arm, elastic in arms(config).items():
        for seed in range(_SEEDS.value if arm in ("static", "all") else 1):
            name = f"{arm}_{seed}"
            run = dataclasses.replace(config, elastic=elastic, seed=seed)
            if first:
                run = _like(run, first, workdir / name)
            first = first or workdir / name
            losses[name] = run_arm(run, workdir / name, cuts(config))
            print(name, {cut: round(float(np.mean(values)), 4) for cut, values in losses[name].items()}, flush=True)
    text = json.dumps(_CONFIG.value.to_dict(), sort_keys=True, default=str)
    content = {
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "documents": _DOCUMENTS.value,
        "losses": losses,
        "table": table(losses),
    }
    write_json(workdir / "ablation.json", content)
    for line in content["table"]:
        low, high = line["interval"]
        print("{name:<44}{value:8.4f}  {0:.4f} ... {1:.4f}   report {report}".format(low, high, **line))
    print(workdir / "ablation.json")


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


def _like(config: ExperimentConfig, first: Path, workdir: Path) -> ExperimentConfig:
    """`config` on the documents and tokenizers of the first run: the same tokens for all."""
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / "data").exists():
        (workdir / "data").symlink_to((first / "data").absolute(), target_is_directory=True)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizers=str(first / "tokenizers")))


def run_arm(config: ExperimentConfig, workdir: Path, masks: dict[str, ElasticMask]) -> dict[str, list[float]]:
    """Trains (or goes on training) one arm; loss in nats per token of every held-out document, by cut."""
    from ernie5_jax.data import prepare_documents
    from ernie5_jax.evaluation import pipeline, write_json
    from ernie5_jax.training import prepare_run, train

    result = workdir / "losses.json"
    if result.exists():
        return json.loads(result.read_text())
    train(config, workdir, prepare_run(config, workdir))
    opened = pipeline.open_checkpoint(workdir)
    held_out = prepare_documents(config, workdir / "data", "test")
    documents = opened.encode([document for shards in held_out.values() for document in shards])
    chosen = np.linspace(0, len(documents) - 1, min(len(documents), _DOCUMENTS.value)).astype(int)
    documents = [documents[i] for i in chosen]
    losses = {name: opened.held_out.text_losses(documents, mask).tolist() for name, mask in masks.items()}
    write_json(result, losses)
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
