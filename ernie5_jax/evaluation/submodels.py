"""Choosing and comparing submodels of an elastic checkpoint by held-out loss (ERNIE 5.0 section 6.4.2)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.config import ModelConfig
from ernie5_jax.elastic import ElasticError, evenly, submodel_mask
from ernie5_jax.evaluation.losses import HeldOut
from ernie5_jax.model import ElasticMask, fixed_layers, full_mask, make_apply
from ernie5_jax.sequence import Batch, EncodedDocument
from ernie5_jax.training.accounting import submodel_totals
from ernie5_jax.training.objective import MODALITIES, loss_sums

Rule = Literal["usage", "nested", "even", "random", "importance"]
RULES: tuple[str, ...] = get_args(Rule)


@dataclasses.dataclass(frozen=True)
class Size:
    """A submodel with the same experts and top-k in every layer, and what it costs and loses.

    Attributes:
      layers, experts, top_k: How many.
      mask: Which ones.
      totals: See `training.accounting.submodel_totals`.
      loss: Held-out loss in nats, the sum of the modalities' means.
    """

    layers: int
    experts: int
    top_k: int
    mask: ElasticMask
    totals: dict[str, int]
    loss: float

    def to_json(self) -> dict[str, Any]:
        sizes = {"layers": self.layers, "experts": self.experts, "top_k": self.top_k}
        return {**sizes, **self.totals, "loss": self.loss}


class Submodels:
    """Submodels of one checkpoint, measured on the same documents.

    Args:
      held_out: Losses of the checkpoint; its model must be elastic.
      documents: Encoded ones.
      seed: Of the rule "random".

    Raises:
      ElasticError: The model is not elastic.
    """

    def __init__(self, held_out: HeldOut, documents: Sequence[EncodedDocument], seed: int = 0):
        if not held_out.config.model.elastic:
            raise ElasticError("config key 'model.elastic': found False, allowed: True (a model trained elastically)")
        self.model: ModelConfig = held_out.config.model
        self._held_out, self._seed = held_out, seed
        self._batches = held_out.batches(documents)

    def loss(self, mask: ElasticMask) -> float:
        """Held-out loss in nats, the sum of the modalities' means. Nothing is compiled for a new mask."""
        record = self._held_out.measure(self._batches, mask)
        return sum(record.get(f"loss_{name}", 0.0) for name in MODALITIES)

    def scores(self, rule: Rule, kept: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What `submodel_mask` ranks by: layers [L] (None spaces them evenly) and experts [L, E] (None: the first).

        usage       experts that the most held-out tokens go to, every kind of token weighing the same; layers evenly
                    spaced
        nested      the first experts and the first layers
        even        evenly spaced experts (`kept` of them) and layers
        random      drawn
        importance  experts whose removal changes the loss most, to first order; layers whose removal raises it most
        """
        layers, experts = self.model.num_layers, self.model.router.num_experts
        if rule == "nested":
            return -np.arange(layers, dtype=float), None
        if rule == "even":
            return None, np.broadcast_to(evenly(experts, kept), (layers, experts))
        if rule == "random":
            rng = np.random.default_rng(self._seed)
            return rng.random(layers), rng.random((layers, experts))
        if rule == "usage":
            return None, self._usage
        return self._layer_importance, self._expert_importance

    def size(self, layers: int, experts: int, top_k: int, rule: Rule) -> Size:
        """The submodel of these sizes and its held-out loss."""
        layer_scores, expert_scores = self.scores(rule, experts)
        mask = submodel_mask(self.model, layers, experts, top_k, layer_scores=layer_scores, expert_scores=expert_scores)
        return Size(layers, experts, top_k, mask, submodel_totals(self.model, mask), self.loss(mask))

    def full(self) -> Size:
        """The whole model."""
        model = self.model
        mask = full_mask(model)
        totals = submodel_totals(model, mask)
        return Size(model.num_layers, model.router.num_experts, model.router.top_k, mask, totals, self.loss(mask))

    def within(
        self, active: float, total: float, rule: Rule, report: Callable[[str], None] | None = None
    ) -> tuple[Size, list[Size]]:
        """The best submodel under a parameter budget.

        Every submodel that fits and could not be larger in layers, experts or top-k is measured.

        Args:
          active, total: Largest shares of the backbone's parameters (no embeddings, heads, MTP) that one token uses
            and that there are at all.
          rule: Which layers and experts stay.
          report: Called with a line per submodel.

        Returns:
          The one with the smallest held-out loss, and all that were measured, best first.

        Raises:
          ElasticError: No submodel fits; names the nearest.
        """
        whole = submodel_totals(self.model, full_mask(self.model))
        fitting, nearest = [], (np.inf, (0, 0, 0), (0.0, 0.0))
        for sizes in self._all_sizes():
            totals = submodel_totals(self.model, submodel_mask(self.model, *sizes))
            share = tuple(totals[f"backbone_{k}"] / whole[f"backbone_{k}"] for k in ("active", "total"))
            excess = max(share[0] - active, share[1] - total)
            nearest = min(nearest, (excess, sizes, share))
            if excess <= 0:
                fitting.append(sizes)
        if not fitting:
            _, (n, m, k), (a, t) = nearest
            raise ElasticError(
                f"budget: found active={active:g}, total={total:g}, which no submodel meets, allowed: at least the "
                f"nearest one's active={a:.3f}, total={t:.3f} ({n} layers, {m} experts, top-{k})"
            )
        measured = []
        for sizes in _not_dominated(fitting):
            size = self.size(*sizes, rule=rule)
            measured.append(size)
            if report:
                share = (size.totals[f"backbone_{k}"] / whole[f"backbone_{k}"] for k in ("active", "total"))
                report("{:3d} layers {:4d} experts  top-{:<2d} active {:.3f}  total {:.3f}  loss {:.4f}".format(
                    *sizes, *share, size.loss))  # fmt: skip
        measured.sort(key=lambda size: size.loss)
        return measured[0], measured

    def _all_sizes(self) -> Iterable[tuple[int, int, int]]:
        router = self.model.router
        layers = range(int(fixed_layers(self.model).sum()), self.model.num_layers + 1)
        for n, m, k in itertools.product(layers, range(1, router.num_experts + 1), range(1, router.top_k + 1)):
            if k <= m:
                yield n, m, k

    @functools.cached_property
    def _usage(self) -> np.ndarray:
        """[L, E] shares of held-out tokens; rows of dense layers are 0."""
        use = self._held_out.measure(self._batches)["expert_use"]
        shares = np.sum([np.asarray(layers) for layers in use.values()], axis=0)
        return np.pad(shares, ((self.model.num_dense_layers, 0), (0, 0)))

    @functools.cached_property
    def _layer_importance(self) -> np.ndarray:
        """[L] rise of the loss without each layer; infinite for those that always run."""
        full = jax.tree.map(np.array, full_mask(self.model))
        whole, rise = self.loss(full), np.full(self.model.num_layers, np.inf)
        for layer in np.flatnonzero(~fixed_layers(self.model)):
            live = full.layers.copy()
            live[0, layer] = False
            rise[layer] = self.loss(dataclasses.replace(full, layers=live)) - whole
        return rise

    @functools.cached_property
    def _expert_importance(self) -> np.ndarray:
        """[L, E] |sum of w * dLoss/dw| over an expert's output matrix: what removing its output costs, to first order.

        The output is linear in that matrix, so the sum is the derivative by a factor on the expert (Taylor pruning,
        arXiv 1906.10771).
        """
        apply, (params, bias) = make_apply(self.model), self._held_out.weights
        mask = full_mask(self.model)

        @jax.jit
        def gradient(params: Any, batch: Batch) -> Any:
            def loss(backbone: Any) -> jax.Array:
                sums = loss_sums(apply({**params, "backbone": backbone}, bias, batch, mask), batch)
                means = (sums[m] / jnp.maximum(batch.denominators[m], 1) for m in MODALITIES)
                return functools.reduce(jnp.add, means)

            return jax.grad(loss)(params["backbone"])

        total = np.zeros((self.model.num_layers, self.model.router.num_experts))
        for batch in self._batches:
            found, start = gradient(params, batch), 0
            for stack in self.model.stacks:
                if stack.router is not None:
                    slope, weight = found[stack.name]["ffn"]["w_out"], params["backbone"][stack.name]["ffn"]["w_out"]
                    total[start : start + stack.count] += np.abs(np.asarray((slope * weight).sum((-1, -2))))
                start += stack.count
        return total


def _not_dominated(sizes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those that no other one exceeds in any size without falling short in another."""
    found = set(sizes)
    grown = lambda s, i: tuple(x + (j == i) for j, x in enumerate(s))  # noqa: E731
    return [s for s in sizes if not any(grown(s, i) in found for i in range(3))]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, loss) that no other point beats in both, by cost."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    front, best = [], np.inf
    for i in order:
        if points[i][1] < best:
            front.append(i)
            best = points[i][1]
    return front


def default_sizes(model: ModelConfig) -> list[tuple[int, int, int]]:
    """The full model, every axis reduced alone, and all three together."""
    layers, experts, top_k = model.num_layers, model.router.num_experts, model.router.top_k
    fixed = int(fixed_layers(model).sum())
    sizes = [(layers, experts, top_k)]
    sizes += [(max(fixed, round(share * layers)), experts, top_k) for share in (0.75, 0.5)]
    sizes += [(layers, max(1, experts // part), min(top_k, max(1, experts // part))) for part in (2, 4)]
    sizes += [(layers, experts, max(1, top_k // part)) for part in (2, 4, 8)]
    sizes.append((max(fixed, round(0.75 * layers)), max(1, experts // 2), max(1, min(top_k, experts // 2) // 2)))
    return list(dict.fromkeys(sizes))
