"""Evaluates a checkpoint and writes JSON: losses per modality and task scores.

    python -m experiments.evaluate --checkpoint=runs/quickstart --suite=digits --out=scores.json
    python -m experiments.evaluate --checkpoint=runs/small --suite=digits --baseline=scores.json
    python -m experiments.evaluate --checkpoint=runs/quickstart --manifest=documents.jsonl

A suite trains small judges on real training data and prints, beside every score, their accuracy on held-out originals
and on tokenizer round trips (the ceiling), and chance; with a baseline (another evaluation's JSON, same prompts) also
the share of its mean score that this checkpoint keeps. A manifest needs no judge: its documents go through the training
objective, and captions are compared with what the model writes.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from experiments import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run folder or one of its checkpoints.", required=True)
_SUITE = flags.DEFINE_string("suite", "", "Built-in suite; empty takes the checkpoint's own.")
_MANIFEST = flags.DEFINE_string("manifest", "", "JSONL manifest to evaluate on instead of a suite.")
_OUT = flags.DEFINE_string("out", "", "JSON file to write; empty prints to standard output.")
_BASELINE = flags.DEFINE_string("baseline", "", "JSON of the same suite on another checkpoint, to compare with.")
_SAMPLES = flags.DEFINE_integer("samples", 0, "Prompts per task of a suite; 0 takes its own number.", lower_bound=0)
_DATA = flags.DEFINE_string("data", "", "Prepared documents, made where missing; empty is data/ in the run folder.")
_SEED = cli.define_seed("Of judges and draws.")


def main(argv):
    del argv
    from ernie5_jax.errors import UserError
    from ernie5_jax.evaluation import pipeline, write_json

    if _SUITE.value and _MANIFEST.value:
        raise UserError(f"flag --manifest: found {_MANIFEST.value!r} beside --suite, allowed: one of the two")
    if _BASELINE.value and _MANIFEST.value:
        raise UserError(f"flag --baseline: found {_BASELINE.value!r} beside --manifest, allowed: with a suite")
    baseline = _read_baseline(_BASELINE.value) if _BASELINE.value else None  # before minutes of work
    opened = pipeline.open_checkpoint(_CHECKPOINT.value)
    content = _manifest(opened) if _MANIFEST.value else _suite(opened)
    content = {"checkpoint": _CHECKPOINT.value, **content}
    if _OUT.value:
        write_json(Path(_OUT.value), content)
    if baseline:  # after writing: other prompts in the baseline must not cost the evaluation
        content["kept"] = _compare(content["answers"], baseline)
        if _OUT.value:
            write_json(Path(_OUT.value), content)
    if _OUT.value:
        print(_OUT.value)
    else:
        print(json.dumps(content, indent=2))


def _manifest(opened):
    from ernie5_jax.evaluation import pipeline

    documents = pipeline.manifest_documents(opened, _MANIFEST.value)
    return {"manifest": _MANIFEST.value, **pipeline.evaluate_documents(opened, documents, seed=_SEED.value)}


def _read_baseline(path):
    from ernie5_jax.errors import UserError

    try:
        return {
            task: [bool(right) for right in answers]
            for task, answers in json.loads(Path(path).read_text())["answers"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"flag --baseline: found {path!r}, allowed: JSON that this script wrote with a suite") from None


def _compare(answers, baseline):
    import dataclasses
    import sys

    from ernie5_jax.evaluation.scores import kept_score

    kept = kept_score(answers, baseline)
    print(f"{kept} of {_BASELINE.value}", file=sys.stderr)
    return dataclasses.asdict(kept)


def _suite(opened):
    import dataclasses
    import sys

    from ernie5_jax.data import SPLITS
    from ernie5_jax.evaluation import pipeline

    config = opened.config.evaluation
    config = dataclasses.replace(config, suite=_SUITE.value or config.suite)
    if _SAMPLES.value:
        config = dataclasses.replace(config, samples=_SAMPLES.value, videos=_SAMPLES.value)
    pipeline.check_suite(config.suite)
    folder = pipeline.data_folder(_CHECKPOINT.value, _DATA.value)
    training, held_out = (pipeline.split_documents(opened.config, folder, split) for split in SPLITS)
    report = lambda line: print(line, file=sys.stderr)  # noqa: E731 (standard output is for the JSON)
    judges = pipeline.make_judges(opened, training, config=config, seed=_SEED.value)
    results = pipeline.evaluate_suite(
        opened, judges, training, held_out, config=config, seed=_SEED.value, report=report
    )
    if not results.scores:
        report(f"suite {config.suite!r}: no held-out document has its labels, nothing was scored (see --manifest)")
    return {"step": opened.step, **results.to_json()}


if __name__ == "__main__":
    cli.run(main)
