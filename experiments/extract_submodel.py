"""Cuts a smaller static model out of an elastically trained checkpoint, without retraining.

    python -m experiments.extract_submodel --checkpoint=RUN --layers=12 --experts=32 --top_k=4 --out=runs/small
    python -m experiments.extract_submodel --checkpoint=RUN --budget="active=0.537,total=0.358" --out=runs/small

The result is an ordinary checkpoint: generate from it, evaluate it, or train on with
`--config=configs/from_checkpoint.py:runs/small`. A budget is in shares of the backbone's parameters (no embeddings,
heads, MTP); under it, every submodel that could not be larger is measured on held-out documents and the best one kept.
"""

from __future__ import annotations

from absl import flags

from experiments import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run folder or one of its checkpoints.", required=True)
_OUT = flags.DEFINE_string("out", None, "Run folder to write; must hold no checkpoint.", required=True)
_LAYERS = flags.DEFINE_integer("layers", 0, "Layers that stay; 0 = all.", lower_bound=0)
_EXPERTS = flags.DEFINE_integer("experts", 0, "Experts of every layer that stay; 0 = all.", lower_bound=0)
_TOP_K = flags.DEFINE_integer(
    "top_k", 0, "Experts per token; 0 = as trained, or fewer where fewer stay.", lower_bound=0
)
_BUDGET = flags.DEFINE_string("budget", "", "Shares of the parameters instead of sizes: active=A,total=T.")
_SELECT = cli.define_select()
_MANIFEST = flags.DEFINE_string(
    "manifest", "", "JSONL manifest of documents to measure on instead of the held-out ones."
)
_DATA = flags.DEFINE_string("data", "", "Prepared documents, made where missing; empty is data/ in the run folder.")
_DOCUMENTS = flags.DEFINE_integer("documents", 200, "How many documents are measured, evenly spread.", lower_bound=1)
_SEED = cli.define_seed("Of --select=random.")


def main(argv):
    del argv
    budget = _parse_budget(_BUDGET.value) if _BUDGET.value else None
    from ernie5_jax.errors import UserError

    if budget and (_LAYERS.value or _EXPERTS.value or _TOP_K.value):
        raise UserError(f"flag --budget: found {_BUDGET.value!r} beside sizes, allowed: a budget or sizes")
    from ernie5_jax.evaluation import pipeline
    from ernie5_jax.evaluation.submodels import Submodels
    from ernie5_jax.training.submodel import check_unused, save_submodel

    check_unused(_OUT.value)  # before minutes of measuring
    opened = pipeline.open_checkpoint(_CHECKPOINT.value)
    folder = pipeline.data_folder(_CHECKPOINT.value, _DATA.value)
    documents = pipeline.held_out_documents(opened, folder, _MANIFEST.value, _DOCUMENTS.value)
    submodels = Submodels(opened.held_out, opened.encode(documents), _SEED.value)
    if budget:
        chosen, _ = submodels.within(*budget, rule=_SELECT.value, report=print)
        print(f"chosen: the smallest held-out loss under the budget, of {len(documents)} documents")
    else:
        model = submodels.model
        experts = _EXPERTS.value or model.router.num_experts
        top_k = _TOP_K.value or min(model.router.top_k, experts)
        chosen = submodels.size(_LAYERS.value or model.num_layers, experts, top_k, _SELECT.value)
    full = submodels.full()
    save_submodel(_CHECKPOINT.value, chosen.mask, _OUT.value)
    print(_table(full, chosen))
    print(_OUT.value)


def _parse_budget(text: str) -> tuple[float, float]:
    from ernie5_jax.errors import UserError

    allowed = "active=A,total=T with shares in 0 ... 1"
    found = {"active": 1.0, "total": 1.0}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if name.strip() not in found or not 0 < share <= 1:
            raise UserError(f"flag --budget: found {text!r}, allowed: {allowed}")
        found[name.strip()] = share
    return found["active"], found["total"]


def _table(full, small) -> str:
    rows = [("", "full", "submodel", "share")]
    for name in ("layers", "experts", "top_k"):
        rows.append((name, str(getattr(full, name)), str(getattr(small, name)), ""))
    labels = {
        "backbone_total": "parameters without embeddings and heads",
        "backbone_active": "  of these active per token",
        "total": "parameters with embeddings and heads",
        "active": "  of these active per token",
    }
    for key, label in labels.items():
        a, b = full.totals[key], small.totals[key]
        rows.append((label, f"{a:,}", f"{b:,}", f"{b / a:.1%}"))
    a, b = (4 * size.totals["total"] for size in (full, small))
    rows.append(("bytes in float32", f"{a:,}", f"{b:,}", f"{b / a:.1%}"))
    rows.append(("held-out loss", f"{full.loss:.4f}", f"{small.loss:.4f}", ""))
    width = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{r[0]:<{width[0]}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(r[1:], width[1:], strict=True)) for r in rows
    )


if __name__ == "__main__":
    cli.run(main)
