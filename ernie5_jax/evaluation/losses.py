"""Held-out losses through the training objective, and who uses which expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.config import ExperimentConfig
from ernie5_jax.evaluation.errors import EvaluationError
from ernie5_jax.kernels.cross_entropy import cross_entropy
from ernie5_jax.model import ElasticMask, full_mask, make_apply
from ernie5_jax.sequence import Batch, EncodedDocument, document_size, layout, pack, plan_rows, sizes_array, stack
from ernie5_jax.text.special_tokens import PAD
from ernie5_jax.training.metrics import diagnostic_sums, draft_sums, summarize
from ernie5_jax.training.objective import loss_sums
from ernie5_jax.vision import ScalePyramid

INPUT_KINDS = ("text", "visual", "understand", "audio")
"""What a position carries in: a text token, a picture being made, a picture being read, codec frames."""


class HeldOut:
    """The model, or a submodel of it, over documents, without dropout or flips. Compiled once, for one batch shape
    and all submodels.

    Args:
      config: Of the experiment.
      params: Parameters of the model (the averaged ones, if there are).
      router_bias: float32 [L_routed, E].
    """

    def __init__(self, config: ExperimentConfig, params: Any, router_bias: Any):
        self.config = config
        self.weights = params, jnp.asarray(router_bias)
        scales = config.visual.scales
        self._pyramid = ScalePyramid(tuple((side, side) for side in scales), config.visual.bits)
        self._step, self._text = jax.jit(self._make_step()), jax.jit(self._make_text_step())

    def _make_step(self) -> Any:
        apply, model = make_apply(self.config.model), self.config.model

        def step(params: Any, router_bias: jax.Array, mask: Any, batch: Batch, kinds: jax.Array) -> dict[str, Any]:
            output = apply(params, router_bias, batch, mask, return_routing=True)
            experts = jax.nn.one_hot(output.router.expert_index, model.router.num_experts).sum(-2)  # [L, B, S, E]
            used = jnp.einsum("lbse,bsm->mle", experts, kinds)
            diagnostics = {**diagnostic_sums(output, batch, model), **draft_sums(output, batch)}
            return {"sums": loss_sums(output, batch), "use": used, **diagnostics}

        return step

    def _make_text_step(self) -> Any:
        apply = make_apply(self.config.model)

        def step(params: Any, router_bias: jax.Array, mask: Any, batch: Batch) -> jax.Array:
            slots = batch.targets["text"]
            loss = cross_entropy(apply(params, router_bias, batch, mask).text_logits, slots.values["token"])
            return jnp.where(slots.weight > 0, loss, 0).sum(-1) / jnp.maximum((slots.weight > 0).sum(-1), 1)

        return step

    def batches(self, documents: Sequence[EncodedDocument]) -> list[Batch]:
        """Packed batches of `training.evaluate_rows` rows in the order of the documents; the last one is padded."""
        sizes = sizes_array([document_size(document, self._pyramid.scales) for document in documents])
        return self._rows(documents, plan_rows(sizes, self.config.sequence))

    def _rows(self, documents: Sequence[EncodedDocument], plans: Sequence[Sequence[int] | np.ndarray]) -> list[Batch]:
        """Batches of rows, each of the documents that its plan numbers."""
        config, model = self.config, self.config.model
        bins, depth = model.audio_bins, model.mtp_depth
        rows = [layout(d, config.sequence, self._pyramid, audio_bins=bins, mtp_depth=depth) for d in documents]
        packed = [pack([rows[i] for i in plan], config.sequence, model) for plan in plans]
        packed += [pack([], config.sequence, model)] * (-len(packed) % config.training.evaluate_rows)
        count = config.training.evaluate_rows
        return [stack(packed[start : start + count]) for start in range(0, len(packed), count)]

    def text_losses(self, documents: Sequence[EncodedDocument], mask: ElasticMask | None = None) -> np.ndarray:
        """Mean loss of every document's text, nats per token [documents]; what is not text is not measured."""
        mask = self._traced(mask)
        batches = self._rows(documents, [[i] for i in range(len(documents))])
        found = [np.asarray(self._text(*self.weights, mask, batch)) for batch in batches]
        return np.concatenate(found)[: len(documents)]

    def _traced(self, mask: ElasticMask | None) -> ElasticMask | None:
        if not self.config.model.elastic:
            return mask
        return jax.tree.map(jnp.asarray, mask or full_mask(self.config.model))

    def __call__(self, documents: Sequence[EncodedDocument], mask: ElasticMask | None = None) -> dict[str, Any]:
        """Losses and routing of `documents`.

        Args:
          documents: Encoded ones.
          mask: Submodel (of an elastic model only); None is the full model.

        Returns:
          What `training.metrics.summarize` gives (`loss_<modality>` in nats, `bit_accuracy`, `mtp_acceptance`, ...),
          and `text_bits_per_byte`, `expert_use` ([kind][layer][expert], shares that add up to 1 over experts),
          `min_normalized_entropy` and `max_violation` over all documents together, the worst layer's
          (absent where every layer has a single expert).

        Raises:
          EvaluationError: No documents.
        """
        if not documents:
            raise EvaluationError("held-out losses: found no documents, allowed: at least one")
        return self.measure(self.batches(documents), mask)

    def measure(self, batches: Sequence[Batch], mask: ElasticMask | None = None) -> dict[str, Any]:
        """`__call__` on what `batches` made of the documents."""
        mask = self._traced(mask)
        total: dict[str, Any] | None = None
        for batch in batches:
            found = self._step(*self.weights, mask, batch, _input_kinds(batch)) | {"denominators": batch.denominators}
            found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
            total = found if total is None else jax.tree.map(np.add, total, found)
        assert total is not None
        record = summarize(total, self.config.model)
        record["text_bits_per_byte"] = record.pop("bits_per_byte", None)
        record["expert_use"] = expert_use(total["use"])
        # A single expert has no balance: the lists are then absent.
        entropy, violation = (
            [v for v in record.pop(name, []) if v is not None] for name in ("normalized_entropy", "max_violation")
        )
        record |= {"min_normalized_entropy": min(entropy)} if entropy else {}
        record |= {"max_violation": max(violation)} if violation else {}
        return record


def expert_use(counts: np.ndarray) -> dict[str, list[list[float]]]:
    """Shares of routed tokens from counts [kinds, L, E]; kinds that never occurred are left out."""
    found = {}
    for name, layers in zip(INPUT_KINDS, counts, strict=True):
        if layers.sum():
            found[name] = (layers / np.maximum(layers.sum(-1, keepdims=True), 1)).tolist()
    return found


def _input_kinds(batch: Batch) -> np.ndarray:
    """float32 [B, S, 4]: one-hot `INPUT_KINDS` of every position, zeros at padding."""
    token = np.asarray(batch.token)
    rows, length = token.shape
    kinds = np.zeros((rows, length + 1, len(INPUT_KINDS)), np.float32)  # one more position takes the empty slots
    for i, name in enumerate(INPUT_KINDS):
        if name in batch.inputs:
            index = np.asarray(batch.inputs[name].index)
            kinds[np.arange(rows)[:, None], index, i] = 1
    kinds = kinds[:, :length]
    kinds[..., 0] = (token != PAD) & (np.asarray(batch.segment) > 0)
    return kinds
