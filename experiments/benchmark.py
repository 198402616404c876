"""Speed of this library, beside what else a user could take: transformers on the same machine, in the same sitting.

    make benchmark ARGS="--suite=moe_small --peer=transformers"

Both run in processes of their own and take turns, in float32, on all cores. First the peer's weights
are copied into our model, and logits, loss and gradients compared. The last line is a JSON object of ratios: how many
times as fast as the peer, or which share of the time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from ernie5_jax.errors import UserError
from experiments import cli
from experiments.benchmarks.worker import Worker
from experiments.benchmarks.workloads import SHAPES

_SUITES = ("moe_smoke", "moe_small", "moe_medium", "attention", "decode", "elastic")
_SUITE = flags.DEFINE_enum("suite", "moe_small", _SUITES, "What to measure.")
_PEER = flags.DEFINE_enum("peer", "none", ["none", "transformers"], "What to compare with.")
_PEER_PYTHON = flags.DEFINE_string("peer_python", ".venv/peer/bin/python", "A Python that has the peer (`make peer`).")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Measurements of each kind; medians count.", lower_bound=1)
_THREADS = os.cpu_count() or 1
_TOLERANCE = 1e-4


def main(argv):
    del argv
    if _PEER.value != "none" and not Path(_PEER_PYTHON.value).exists():
        raise UserError(
            f"--peer_python: found no file '{_PEER_PYTHON.value}', allowed: a Python with the peer (`make peer`)"
        )
    bench = Bench()
    try:
        _RUN[_SUITE.value](bench)
    finally:
        bench.close()
    print(json.dumps({"suite": _SUITE.value, **bench.results}))


class Bench:
    """The processes, and what was found."""

    def __init__(self):
        self.results: dict[str, float] = {}
        self._workers: dict[str, Worker] = {}

    def worker(self, name: str) -> Worker:
        """The process `name`, started when it is first asked for: ours (with so many devices) or the peer's.

        Emulated devices pay where loops of small products run beside each other; one device where there is one prompt.
        """
        if name not in self._workers:
            if name.startswith("peer"):
                command = [str(Path(_PEER_PYTHON.value).absolute()), "-m", "experiments.benchmarks.peer"]
                command.append(str(_THREADS))
                tunables = cli.KEEP_FREED if name == "peer tuned" else ""  # it gives freed memory back by default
            else:
                devices = _THREADS if name == "ours" else 1
                command = [sys.executable, "-m", "experiments.benchmarks.ours", str(devices)]
                tunables = cli.KEEP_FREED  # as every script of ours
            self._workers[name] = Worker(name, command, {"GLIBC_TUNABLES": tunables})
        return self._workers[name]

    def compare(self, title: str, tasks: dict[str, tuple[str, dict[str, Any]]], *, warm: int = 1) -> dict[str, float]:
        """Median seconds of several tasks (process, request), measured in turns; prints them with their spread."""
        for name, (worker, task) in tasks.items():
            self.worker(worker).ask(prepare=f"{title} {name}", **task)
            self.worker(worker).ask(run=f"{title} {name}", times=warm)
        seconds: dict[str, list[float]] = {name: [] for name in tasks}
        for _ in range(_ROUNDS.value):
            for name, (worker, _) in tasks.items():
                seconds[name] += self.worker(worker).ask(run=f"{title} {name}")["seconds"]
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        for name, values in seconds.items():
            print(f"{title:<24}{name:<16}{medians[name]:9.4f} s  ({min(values):.4f} ... {max(values):.4f})", flush=True)
        return medians

    def record(self, **numbers: float) -> None:
        """Keeps and prints results."""
        for name, value in numbers.items():
            self.results[name] = round(value, 4)
            print(f"{name:<40}{value:9.3f}", flush=True)

    def close(self) -> None:
        """Ends the processes and frees their memory."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


def _has_peer() -> bool:
    return _PEER.value != "none"


def _train(bench: Bench, shape: str, peer: str | None) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step; our largest memory over the peer's. Ends the processes: of a large shape three do not fit."""
    title, names = f"train beside {peer}" if peer else "train", ["ours", peer] if peer else ["ours"]
    seconds = bench.compare(title, {name: (name, {"task": "train", "shape": shape}) for name in names}, warm=2)
    peaks = {name: bench.worker(name).ask(run=f"{title} {name}")["peak_bytes"] for name in names}
    bench.close()
    return seconds, {name: peaks["ours"] / peak for name, peak in peaks.items()}


def _moe(bench: Bench, shape: str) -> None:
    if _has_peer():
        _check_equal(bench, shape)
        bench.close()
    seconds, peaks = _train(bench, shape, "peer" if _has_peer() else None)
    square = 4096
    roof = bench.compare("matmul", {"ours": ("ours one", {"task": "matmul", "size": square})})["ours"]
    rate = 2 * square**3 / roof
    tokens = SHAPES[shape].batch * SHAPES[shape].length
    bench.record(matmul_gflops=rate / 1e9, tokens_per_second=tokens / seconds["ours"])
    bench.record(roof_fraction=SHAPES[shape].train_flops / seconds["ours"] / rate)
    if _has_peer():
        bench.record(train_ratio=seconds["peer"] / seconds["ours"], peak_rss_ratio=peaks["peer"])
        tuned, peaks = _train(bench, shape, "peer tuned")
        bench.record(train_ratio_tuned=tuned["peer tuned"] / tuned["ours"], peak_rss_ratio_tuned=peaks["peer tuned"])
    ratios = []
    for batch in (1, 8):
        title, task = f"prefill B={batch}", {"task": "prefill", "shape": shape, "batch": batch}
        seconds = bench.compare(title, {"ours": ("ours one", task), **_peer(task)})
        if _has_peer():
            ratios.append(seconds["peer"] / seconds["ours"])
            bench.record(**{f"prefill_b{batch}_ratio": ratios[-1]})
    if ratios:
        bench.record(prefill_ratio=min(ratios))


def _decode(bench: Bench) -> None:
    for batch in (1, 8):
        title, task = f"decode B={batch}", {"task": "decode", "shape": "moe_small", "batch": batch}
        seconds = bench.compare(title, {"ours": ("ours one", task), **_peer(task)})
        bench.record(**{f"decode_b{batch}_tokens_per_second": batch * SHAPES["moe_small"].new_tokens / seconds["ours"]})
        if _has_peer():
            bench.record(**{f"decode_b{batch}_ratio": seconds["peer"] / seconds["ours"]})
            best = bench.compare(
                title + " best", {"ours": ("ours one", task), "peer": ("peer best", {**task, "best": True})}
            )
            bench.record(**{f"decode_b{batch}_ratio_best": best["peer"] / best["ours"]})


def _attention(bench: Bench) -> None:
    for name, packed in (("packed", True), ("causal", False)):
        task = {"task": "attention", "packed": packed}
        seconds = bench.compare(f"attention {name}", {"ours": ("ours", task), **_peer(task)})
        if _has_peer():
            bench.record(**{f"{name}_8k_ratio": seconds["peer"] / seconds["ours"]})
    long = bench.worker("ours long")
    before = long.ask(prepare="start", task="matmul", size=8)["peak_bytes"]
    after = long.ask(prepare="32k", task="attention", packed=False, length=32768)["peak_bytes"]
    bench.record(flash_32k_bytes=after - before)


def _elastic(bench: Bench) -> None:
    task = {"task": "decode", "shape": "moe_medium", "batch": 8}
    seconds = bench.compare("decode top-k", {str(k): ("ours one", {**task, "top_k": k}) for k in (4, 1)})
    bench.record(decode_topk25_ratio=seconds["4"] / seconds["1"])
    task = {"task": "stack", "shape": "moe_small", "backward": False}
    layers = SHAPES["moe_small"].layers
    part = (layers // 4, layers // 2, layers)
    seconds = bench.compare("forward layers", {str(n): ("ours one", {**task, "layers": n}) for n in part})
    bench.record(forward_depth_slope=_slope(list(part), [seconds[str(n)] for n in part]))
    task = {**task, "backward": True}
    seconds = bench.compare("gradient layers", {str(n): ("ours one", {**task, "layers": n}) for n in part[1:]})
    bench.record(half_depth_ratio=seconds[str(part[1])] / seconds[str(layers)])
    task = {"task": "sparse_layer", "shape": "moe_small", "tokens": 2048, "largest_top_k": 8}
    seconds = bench.compare("sparse layer top-k", {str(k): ("ours one", {**task, "top_k": k}) for k in (8, 2)})
    bench.record(topk2of8_ratio=seconds["2"] / seconds["8"])
    _elastic_step(bench)


def _elastic_step(bench: Bench, masks: int = 40) -> None:
    """Mean over masks, because they differ; the static step in between."""
    seconds: dict[str, list[float]] = {}
    for name, elastic in (("static", False), ("elastic", True)):
        bench.worker("ours").ask(prepare=name, task="train", shape="moe_small", elastic=elastic)
        bench.worker("ours").ask(run=name, times=2)
        seconds[name] = []
    for _ in range(masks):
        for name, values in seconds.items():
            values += bench.worker("ours").ask(run=name)["seconds"]
    means = {name: statistics.fmean(values) for name, values in seconds.items()}
    print(f"step, mean of {masks}: static {means['static']:.3f} s, elastic {means['elastic']:.3f} s", flush=True)
    bench.record(elastic_step_ratio=means["elastic"] / means["static"])


def _slope(layers: list[int], seconds: list[float]) -> float:
    """Time per layer when few run, over time per layer when all run: 1 where time is proportional to live layers."""
    return (seconds[0] / layers[0]) / (seconds[-1] / layers[-1])


def _peer(task: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {"peer": ("peer", task)} if _has_peer() else {}


def _check_equal(bench: Bench, shape: str) -> None:
    """Raises a `UserError` if the same weights do not give the same numbers."""
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.npz")
        bench.worker("peer").ask(prepare="export", task="export", shape=shape, out=weights)
        found = bench.worker("ours one").ask(prepare="check", task="check", shape=shape, weights=weights)["differences"]
    for name, difference in found.items():
        print(f"same weights, {name:<24}difference {difference:.1e}", flush=True)
        if not difference <= _TOLERANCE:
            raise UserError(f"{shape}: {name} differs from the peer's by {difference:.1e}, allowed: {_TOLERANCE}")


_RUN: dict[str, Callable[[Bench], None]] = {
    "moe_smoke": lambda bench: _moe(bench, "moe_smoke"),
    "moe_small": lambda bench: _moe(bench, "moe_small"),
    "moe_medium": lambda bench: _moe(bench, "moe_medium"),
    "attention": _attention,
    "decode": _decode,
    "elastic": _elastic,
}

if __name__ == "__main__":
    cli.run(main)
