"""Stands in for a training run where only the killing is tested; the variable FAULT makes it break a promise."""

import json
import os
import shutil
import sys
import time
from pathlib import Path


def main() -> None:
    options = {name: value for name, _, value in (a.lstrip("-").partition("=") for a in sys.argv[1:])}
    workdir, steps = Path(options["workdir"]), int(options["config.training.steps"])
    every, fault = int(options["config.training.checkpoint_every"]), os.environ.get("FAULT", "")
    folder, metrics = workdir / "checkpoints", workdir / "metrics.jsonl"
    for name in ("data", "tokenizers", "checkpoints"):
        (workdir / name).mkdir(parents=True, exist_ok=True)
    if fault != "leftovers":
        for temporary in folder.glob("*tmp*"):
            shutil.rmtree(temporary)
    start = max((int(f.name) for f in folder.iterdir() if f.name.isdecimal()), default=0)
    if fault == "checkpoints" and start:
        shutil.rmtree(folder)
        folder.mkdir()
        start, every = 0, steps + 1
    records = metrics.read_text().splitlines()[:start] if start else []
    metrics.write_text("".join(f"{record}\n" for record in records))
    if fault == "crash" and start:
        sys.exit("no second start")
    with metrics.open("a") as log:
        for step in range(start + 1, steps + 1):
            loss = 1 / step + (1e-15 if fault == "metrics" and start else 0)
            log.write(json.dumps({"step": step, "loss": loss, "elapsed_seconds": time.perf_counter()}) + "\n")
            log.flush()
            time.sleep(0.01)
            if step % every == 0:
                temporary = folder / f"{step}.orbax-checkpoint-tmp"
                temporary.mkdir()
                time.sleep(0.3)
                temporary.rename(folder / str(step))


if __name__ == "__main__":
    main()
