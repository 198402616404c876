"""Kills a training run again and again; in the end it must look as if nothing had happened.

    python -m experiments.kill_test --kills=20

A run of the given config is killed (SIGKILL) at random moments, half of the times while a checkpoint is being written,
and started again each time. Every field of its metrics but those of time and process must then equal an uninterrupted
run's bit for bit, no completed checkpoint may be lost, and nothing temporary may be left. Exit code 0 if all holds.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import flags

from experiments import cli

_CONFIG = cli.define_config("tiny.py")
_KILLS = flags.DEFINE_integer("kills", 20, "How often to kill.")
_STEPS = flags.DEFINE_integer("steps", 0, "Optimiser steps of the run; 0 = 4 per kill and 20 more.")
_EVERY = flags.DEFINE_integer("checkpoint_every", 3, "Steps between checkpoints.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Keep the two runs here; default a temporary folder.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")
_PROGRAM = flags.DEFINE_string("program", "experiments.pretrain", "Module that is started and killed.")


def main(argv):
    del argv
    from ernie5_jax.errors import UserError

    if _KILLS.value < 1 or _EVERY.value < 1 or _STEPS.value < 0:
        raise UserError("flags --kills, --checkpoint_every, --steps: allowed: >= 1, >= 1, >= 0")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(_WORKDIR.value or temporary)
        steps = _STEPS.value or 4 * _KILLS.value + 20
        return 1 if _test(folder, steps, random.Random(_SEED.value)) else 0


def _test(folder: Path, steps: int, rng: random.Random) -> list[str]:
    reference, killed = folder / "reference", folder / "killed"
    for path in (reference, killed):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    start = time.perf_counter()
    if _start(reference, steps).wait():
        raise SystemExit(f"the uninterrupted run failed, see {reference / 'log.txt'}")
    print(f"uninterrupted run: {steps} steps, {time.perf_counter() - start:.0f} s", flush=True)
    # Data and tokenizers are a function of the configuration: the kills are for training.
    for name in ("data", "tokenizers"):
        shutil.copytree(reference / name, killed / name)
    problems: list[str] = []
    for number in range(_KILLS.value):
        problems += _kill_once(killed, steps, number, rng)
    newest = _newest(killed)
    if _start(killed, steps).wait():
        problems.append(f"the last run failed, see {killed / 'log.txt'}")
    if _newest(killed) < newest:
        problems.append(f"checkpoint {newest} was lost")
    problems += _compare(reference, killed)
    problems += [f"left behind: {path}" for path in killed.rglob("*tmp*")]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{_KILLS.value} kills: {'equal' if not problems else 'NOT equal'} to the uninterrupted run")
    return problems


def _kill_once(workdir: Path, steps: int, number: int, rng: random.Random) -> list[str]:
    """Starts the run and kills it at a random moment; returns what is wrong afterwards."""
    newest, stale = _newest(workdir), _being_written(workdir)
    process, began = _start(workdir, steps), time.perf_counter()
    writing = number % 2 == 0
    before, target = _lines(workdir), rng.randint(0, 6)
    if number % 7 == 3:  # also before the first step: while programs load and the state is restored
        time.sleep(rng.uniform(0, 8))
    else:
        while process.poll() is None:
            if writing and _being_written(workdir) - stale:
                break
            if not writing and _lines(workdir) > before + target:
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.15) if writing else rng.uniform(0, 0.5))
    problems = []
    if process.poll() is not None:
        problems.append(f"kill {number + 1}: the run had ended by itself with exit code {process.returncode}")
    process.kill()
    process.wait()
    what = "in a checkpoint" if writing else "anywhere"
    print(
        f"kill {number + 1} ({what}) after {time.perf_counter() - began:.1f} s, "
        f"{_lines(workdir)} records, checkpoint {newest} -> {_newest(workdir)}",
        flush=True,
    )
    if _newest(workdir) < newest:
        problems.append(f"kill {number + 1}: checkpoint {newest} was lost")
    return problems


def _start(workdir: Path, steps: int) -> subprocess.Popen:
    """The run as a process of its own; what it prints is appended to log.txt."""
    arguments = [a for a in sys.argv[1:] if a.startswith(("--config", "-config"))]
    if not any(a.partition("=")[0] in ("--config", "-config") for a in arguments):
        arguments.insert(0, f"--config={cli.REPOSITORY / 'configs' / 'tiny.py'}")
    command = [sys.executable, "-m", _PROGRAM.value, *arguments, f"--workdir={workdir}"]
    command += [f"--config.training.steps={steps}", f"--config.training.checkpoint_every={_EVERY.value}"]
    command += ["--config.training.log_every=1", "--config.training.progress=False"]
    with (workdir / "log.txt").open("a") as log:
        return subprocess.Popen(command, cwd=cli.REPOSITORY, stdout=log, stderr=log)


def _being_written(workdir: Path) -> set[int]:
    """Inodes of checkpoints that are not complete."""
    found = set()
    for path in (workdir / "checkpoints").glob("*tmp*"):
        with contextlib.suppress(FileNotFoundError):
            found.add(path.stat().st_ino)
    return found


def _newest(workdir: Path) -> int:
    folder = workdir / "checkpoints"
    return max((int(f.name) for f in folder.glob("*") if f.name.isdecimal()), default=0) if folder.is_dir() else 0


def _lines(workdir: Path) -> int:
    try:
        return (workdir / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _compare(reference: Path, killed: Path) -> list[str]:
    from ernie5_jax.training import PROCESS_FIELDS, read_metrics

    def plain(workdir: Path) -> dict[int, dict]:
        records = read_metrics(workdir)
        return {r["step"]: {k: v for k, v in r.items() if k not in PROCESS_FIELDS} for r in records}

    expected, found = plain(reference), plain(killed)
    if list(expected) != list(found) or len(read_metrics(killed)) != len(found):
        return [f"logged steps differ: {len(expected)} expected, {len(read_metrics(killed))} found"]
    for step, record in expected.items():
        for key in sorted({*record, *found[step]}):
            if record.get(key) != found[step].get(key):
                return [f"step {step}, {key}: {found[step].get(key)!r}, expected {record.get(key)!r}"]
    return []


if __name__ == "__main__":
    cli.run(main)
