"""Pre-trains the unified model; the same work folder resumes.

    python -m experiments.pretrain --config=configs/tiny.py --workdir=runs/tiny

Data and tokenizers are made under the work folder first, where they are missing. `--stop_at=K` saves after step K and
ends without changing any schedule. `--dry_run` prints parameters, memory and one abstract step, and trains nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

from absl import flags

from experiments import cli

_CONFIG = cli.define_config("tiny.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if missing.")
_STOP_AT = flags.DEFINE_integer("stop_at", None, "Save and end after this step.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the parameter table, memory and an abstract step.")


def main(argv):
    del argv
    start = time.perf_counter()
    from ernie5_jax.errors import UserError

    config = cli.load_config(_CONFIG)
    if _DRY_RUN.value:
        from ernie5_jax.training.dry_run import describe

        print(describe(config))
        return
    if not _WORKDIR.value:
        raise UserError("flag --workdir: missing, allowed: a folder for the run")
    if _STOP_AT.value is not None and _STOP_AT.value < 1:
        raise UserError(f"flag --stop_at: found {_STOP_AT.value}, allowed: >= 1")
    from ernie5_jax.training import prepare_run, train

    workdir = Path(_WORKDIR.value)
    data = prepare_run(config, workdir)
    step = train(config, workdir, data, stop_at=_STOP_AT.value)
    print(f"step {step} of {config.training.steps}, {time.perf_counter() - start:.1f} s: {workdir}")


if __name__ == "__main__":
    cli.run(main)
