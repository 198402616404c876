"""Which experts each task uses: shares per layer, shared experts between tasks, balance.

    python -m experiments.analyze_routing --checkpoint=RUN --out=runs/routing

Counts held-out tokens by task (text, picture and film understanding and generation, sound); writes `routing.json` and
`routing.html`.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from experiments import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run folder or one of its checkpoints.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder for routing.json and routing.html.", required=True)
_MANIFEST = flags.DEFINE_string("manifest", "", "JSONL manifest of documents instead of the held-out ones.")
_DATA = flags.DEFINE_string("data", "", "Prepared documents, made where missing; empty is data/ in the run folder.")
_DOCUMENTS = flags.DEFINE_integer("documents", 600, "How many documents are counted, evenly spread.", lower_bound=1)
_FRACTION = flags.DEFINE_float("fraction", 0.25, "Share of experts that count as most used.", 0.001, 1.0)


def main(argv):
    del argv
    from ernie5_jax.evaluation import pipeline, write_json
    from ernie5_jax.evaluation.routing import analyze, routing_by_task
    from ernie5_jax.evaluation.routing_report import write_routing_report

    opened = pipeline.open_checkpoint(_CHECKPOINT.value)
    folder = pipeline.data_folder(_CHECKPOINT.value, _DATA.value)
    documents = pipeline.held_out_documents(opened, folder, _MANIFEST.value, _DOCUMENTS.value)
    use = routing_by_task(opened.held_out, opened.encode(documents))
    layer_experts = opened.config.model.layer_experts
    content = {
        "checkpoint": _CHECKPOINT.value,
        "documents": len(documents),
        **analyze(use, layer_experts, _FRACTION.value),
    }
    out = Path(_OUT.value)
    write_json(out / "routing.json", content)
    write_routing_report(out / "routing.html", content)
    for name, values in content["iou"].items():
        found = (values[layer] for layer in (0, len(values) // 2, -1))
        print(f"{name:<46} shared experts, first/middle/last layer: " + " ".join(f"{v:.2f}" for v in found))
    print(out / "routing.html")


if __name__ == "__main__":
    cli.run(main)
