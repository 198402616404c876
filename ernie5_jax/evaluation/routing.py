"""Who uses which expert: routing by task (ERNIE 5.0 section 6.4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ernie5_jax.evaluation.errors import EvaluationError
from ernie5_jax.evaluation.losses import HeldOut
from ernie5_jax.metrics import max_violation, normalized_entropy, pairwise_expert_iou
from ernie5_jax.model import ElasticMask
from ernie5_jax.sequence import EncodedDocument

TASKS = ("text", "image understanding", "video understanding", "image generation", "video generation", "audio")


def task_of(document: EncodedDocument) -> str:
    """What a document is about: its first span that is not text; "text" where there is none."""
    for span in document.spans:
        if span.modality == "audio":
            return "audio"
        if span.modality in ("image", "video"):
            return f"{span.modality} {'generation' if span.role == 'generate' else 'understanding'}"
    return "text"


def _kind_of(task: str) -> str:
    """The positions of a task's documents that are counted, one of `losses.INPUT_KINDS`."""
    if task in ("text", "audio"):
        return task
    return "visual" if task.endswith("generation") else "understand"


def routing_by_task(
    held_out: HeldOut, documents: Sequence[EncodedDocument], mask: ElasticMask | None = None
) -> dict[str, np.ndarray]:
    """Share of tokens that each expert gets, [L_routed, E] by task, counted on the device over held-out documents.

    Of a task's documents only the positions of its own kind count: captions beside a picture are not picture tokens.

    Args:
      held_out: The checkpoint.
      documents: Encoded ones; the tasks of `TASKS` that they hold are reported, in that order.
      mask: Submodel; None is the full model.

    Raises:
      EvaluationError: No documents.
    """
    if not documents:
        raise EvaluationError("routing: found no documents, allowed: at least one")
    found = {}
    for task in TASKS:
        members = [document for document in documents if task_of(document) == task]
        use = held_out(members, mask)["expert_use"] if members else {}
        if _kind_of(task) in use:
            found[task] = np.asarray(use[_kind_of(task)])
    return found


def analyze(use: dict[str, np.ndarray], layer_experts: Sequence[int], fraction: float = 0.25) -> dict[str, Any]:
    """Numbers about `routing_by_task`, JSON-able.

    Args:
      use: Shares [L_routed, E] by task.
      layer_experts: Experts of every routed layer, see `ModelConfig`.
      fraction: Share of a layer's experts that count as most used.

    Returns:
      `use` itself; `normalized_entropy` and `max_violation`, lists over layers by task; `iou`, for every two tasks a
      list over layers of the intersection over union of their most used experts; `fraction`.

    Raises:
      EvaluationError: A layer with a single expert, which leaves nothing to choose.
    """
    if min(layer_experts) < 2:
        raise EvaluationError("routing: found a layer with a single expert, allowed: at least two in every layer")
    experts = np.array(layer_experts)
    pairs = pairwise_expert_iou(use, fraction, experts)
    return {
        "use": {task: shares.tolist() for task, shares in use.items()},
        "normalized_entropy": {task: normalized_entropy(shares, experts).tolist() for task, shares in use.items()},
        "max_violation": {task: max_violation(shares, experts).tolist() for task, shares in use.items()},
        "iou": {f"{a} / {b}": values.tolist() for (a, b), values in pairs.items()},
        "fraction": fraction,
    }
