"""Sweeps submodels over an elastic checkpoint, without retraining and without compiling again.

    python -m experiments.evaluate_elastic --checkpoint=RUN --out=runs/elastic
    python -m experiments.evaluate_elastic --checkpoint=RUN --sizes=9x32x4,7x16x2 --samples=100 --out=runs/elastic

For every size (layers x experts x top-k): held-out loss, task scores of the checkpoint's suite and the share of the
first size's mean score that is kept, decoding speed, parameters of the backbone (active and total). Writes
`elastic.json` and `elastic.html`; sizes on the Pareto front of held-out loss and active parameters are marked.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run folder or one of its checkpoints.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder for elastic.json and elastic.html.", required=True)
_SIZES = flags.DEFINE_string("sizes", "", "layers x experts x top_k, comma-separated, e.g. 9x32x4,9x16x2.")
_SELECT = cli.define_select()
_SAMPLES = flags.DEFINE_integer("samples", 0, "Prompts per task; 0 measures losses and speed only.", lower_bound=0)
_DATA = flags.DEFINE_string("data", "", "Prepared documents, made where missing; empty is data/ in the run folder.")
_DOCUMENTS = flags.DEFINE_integer("documents", 200, "How many documents are measured, evenly spread.", lower_bound=1)
_SEED = cli.define_seed("Of judges, draws and --select=random.")


def main(argv):
    del argv
    from ernie5_jax.data import SPLITS
    from ernie5_jax.evaluation import pipeline, write_json
    from ernie5_jax.evaluation.elastic_report import write_elastic_report
    from ernie5_jax.evaluation.scores import kept_score
    from ernie5_jax.evaluation.submodels import Submodels, default_sizes, pareto_front

    opened = pipeline.open_checkpoint(_CHECKPOINT.value)
    folder = pipeline.data_folder(_CHECKPOINT.value, _DATA.value)
    documents = pipeline.held_out_documents(opened, folder, "", _DOCUMENTS.value)
    submodels = Submodels(opened.held_out, opened.encode(documents), _SEED.value)
    sizes = _parse_sizes(_SIZES.value) if _SIZES.value else default_sizes(submodels.model)
    chosen = [submodels.size(*size, rule=_SELECT.value) for size in sizes]  # complains before long work begins
    names = SPLITS if _SAMPLES.value else ()
    splits = {split: pipeline.split_documents(opened.config, folder, split) for split in names}
    judges = pipeline.make_judges(opened, splits["train"], seed=_SEED.value) if splits else {}
    records, answers = [], []
    for size in chosen:
        record = size.to_json() | {"positions_per_second": _speed(opened.engine.with_mask(size.mask))}
        if splits:
            results = _results(opened, judges, splits, size.mask)
            answers.append(results.answers)
            record["scores"] = {name: score.value for name, score in results.scores.items()}
            record["mean_score"] = results.mean_score
            if any(map(any, answers[0].values())):  # else there is nothing to keep
                record["kept"] = dataclasses.asdict(kept_score(answers[-1], answers[0]))
        records.append(record)
        print(_line(record), flush=True)
    for i in pareto_front([(r["backbone_active"], r["loss"]) for r in records]):
        records[i]["on_front"] = True
    out = Path(_OUT.value)
    content = {"checkpoint": _CHECKPOINT.value, "select": _SELECT.value, "sizes": records}
    write_json(out / "elastic.json", content)
    write_elastic_report(out / "elastic.html", content)
    print(out / "elastic.html")


def _parse_sizes(text: str) -> list[tuple[int, int, int]]:
    from ernie5_jax.errors import UserError

    sizes = []
    for part in text.split(","):
        numbers = part.strip().split("x")
        if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
            raise UserError(f"flag --sizes: found {part!r}, allowed: layers x experts x top_k such as 9x32x4")
        sizes.append((int(numbers[0]), int(numbers[1]), int(numbers[2])))
    return sizes


def _results(opened, judges, splits, mask):
    from ernie5_jax.evaluation import pipeline

    config = dataclasses.replace(opened.config.evaluation, samples=_SAMPLES.value, videos=_SAMPLES.value)
    documents = (splits[split] for split in ("train", "test"))
    return pipeline.evaluate_suite(
        opened, judges, *documents, config=config, mask=mask, seed=_SEED.value, report=lambda _: None
    )


def _speed(engine, repeats: int = 3) -> float:
    """Positions per second while a batch of pictures is made: every picture takes the same number of groups."""
    from ernie5_jax.generation import Request
    from ernie5_jax.sequence import Document, Span

    prompt = Document((Span("text", "understand", "a picture"),))
    requests = [Request(prompt, "image", sample=i) for i in range(engine.config.batch_size)]
    engine.generate(requests)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.generate(requests)
        seconds.append(time.perf_counter() - start)
    positions = sum(height * width for height, width in engine.pyramid.scales)
    return len(requests) * positions / sorted(seconds)[repeats // 2]


def _line(record: dict[str, Any]) -> str:
    sizes = "{layers:3d} layers {experts:4d} experts  top-{top_k:<2d}".format(**record)
    counts = "active {backbone_active:,}  total {backbone_total:,}".format(**record)
    text = f"{sizes} {counts}  loss {record['loss']:.4f}  {record['positions_per_second']:,.0f} positions/s"
    if record.get("mean_score") is not None:
        text += f"  mean score {record['mean_score']:.3f}"
    if "kept" in record:
        from ernie5_jax.evaluation.scores import Kept

        text += f", {Kept(**record['kept'])}"
    return text


if __name__ == "__main__":
    cli.run(main)
