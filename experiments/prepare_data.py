"""Prepares documents: the sources of a config file, or a JSONL manifest.

    python -m experiments.prepare_data --config=configs/quickstart.py --out=data
    python -m experiments.prepare_data --config=configs/quickstart.py --manifest=mine/train.jsonl --out=mine/prepared

Every line and file of a manifest is checked first; all bad lines are listed at once and nothing is written. A run that
was ended goes on where it stopped. Give a prepared manifest to training as
`config.data.sources.mine = {"path": "mine/prepared"}`.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from experiments import cli

_CONFIG = cli.define_config("quickstart.py")
_MANIFEST = flags.DEFINE_string("manifest", None, "A .jsonl file; without it the sources of the config are prepared.")
_OUT = flags.DEFINE_string("out", None, "Folder to write; needed unless --check_only.")
_CHECK_ONLY = flags.DEFINE_bool("check_only", False, "Only check the manifest.")


def main(argv):
    del argv
    from ernie5_jax import data
    from ernie5_jax.errors import UserError

    if _CHECK_ONLY.value and not _MANIFEST.value:
        raise UserError("flag --check_only: found no --manifest beside it, allowed: with a manifest to check")
    if not _CHECK_ONLY.value and not _OUT.value:
        raise UserError("flag --out: missing, allowed: a folder to write")
    config = cli.load_config(_CONFIG)
    out = Path(_OUT.value or "")
    if _MANIFEST.value and _CHECK_ONLY.value:
        print(f"{_MANIFEST.value}: {len(data.check_manifest(_MANIFEST.value, config))} documents, all good")
    elif _MANIFEST.value:
        for split, shards in data.prepare_manifest(_MANIFEST.value, config, out).items():
            _report(shards, split)
    else:
        for split in data.SPLITS:
            for name, shards in data.prepare_documents(config, out, split).items():
                _report(shards, f"{name} {split}")


def _report(shards, name: str) -> None:
    from collections import Counter

    tasks = Counter(document.meta.get("task", "") for document in shards)
    counts = ", ".join(f"{task} {count}" for task, count in sorted(tasks.items()))
    print(f"{shards.folder}: {name}, {len(shards)} documents ({counts})")


if __name__ == "__main__":
    cli.run(main)
