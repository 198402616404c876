"""One optimiser step as a pure function, and its compilation on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ernie5_jax.compiling import cpu_optimization
from ernie5_jax.config import ConfigError, ExperimentConfig
from ernie5_jax.elastic import step_masks
from ernie5_jax.model import ElasticMask, make_apply, present_experts
from ernie5_jax.parallel import DATA_AXIS, ShardingRules, current_rules, sum_over_devices, use_rules
from ernie5_jax.sequence import Batch, pack, stack
from ernie5_jax.training import objective
from ernie5_jax.training.metrics import diagnostic_sums, mask_sizes
from ernie5_jax.training.optimizer import adamw_update, average, decay_labels, global_norm
from ernie5_jax.training.precision import cast_params
from ernie5_jax.training.schedule import learning_rate
from ernie5_jax.training.state import (
    TrainState,
    compile_init,
    make_state,
    parameter_axes,
    sharded_abstract_state,
    state_shardings,
)

Metrics = dict[str, Any]
TrainStep = Callable[[TrainState, Batch, ElasticMask | None], tuple[TrainState, Metrics]]

SMALL = 2**18
"""Parameters of a model that is too small, on CPUs, for optimised machine code to pay for its compilation."""


def split_micro_batches(batch: Batch, count: int) -> Batch:
    """[B, ...] -> [count, B / count, ...] on every array but the denominators, which stay those of the whole batch."""
    rows = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "denominators"}
    split = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), rows)
    return Batch(**split, denominators=batch.denominators)


def update_router_bias(bias: jax.Array, counts: jax.Array, speed: float, present: Any = True) -> jax.Array:
    """Loss-free balancing (arXiv 2408.15664; decisions section 4): b += u sign(mean(c) - c); b -= mean(b).

    Args:
      bias: [L, E].
      counts: [L, E], loads of eligible rows; a layer without any keeps its bias.
      speed: u.
      present: bool [L, E], experts that a layer has.
    """
    moved = bias + speed * jnp.sign(counts.mean(-1, keepdims=True, where=present) - counts)
    moved = moved - moved.mean(-1, keepdims=True, where=present)
    return jnp.where((counts.sum(-1, keepdims=True) > 0) & present, moved, bias)


def make_train_step(config: ExperimentConfig, apply: Callable | None = None) -> TrainStep:
    """Builds `train_step(state, batch, masks) -> (state, metrics)`.

    The batch comes from `split_micro_batches`; masks have a leading axis of micro-batches, None = full model. If loss
    or gradient norm is not finite the old state comes back whole and `metrics["accepted"]` is False.

    Args:
      config: Everything.
      apply: The model as a pure function; None builds it from the configuration.
    """
    model, axes = config.model, parameter_axes(config.model)
    apply = apply or make_apply(model)
    labels = decay_labels(axes)

    def weighted_loss(params, router_bias, micro, mask, scale):
        params = cast_params(params, axes, config.training.precision)
        output = apply(params, router_bias, micro, mask)
        sums = objective.loss_sums(output, micro)
        loss = sum((scale[name] * sums[name] for name in sums), jnp.zeros((), jnp.float32))
        return loss, {"loss": loss, "sums": sums, **diagnostic_sums(output, micro, model)}

    def gradients(whole, rows):
        """Sums over all micro-batches."""
        params, router_bias, scale = whole
        batch, masks = rows

        def accumulate(micro):
            return jax.grad(weighted_loss, has_aux=True)(params, router_bias, *micro, scale)

        if batch.segment.shape[0] == 1:
            return accumulate(_micro(batch, masks, 0))
        return _scan_sum(accumulate, batch, masks)

    # The name appears in JAX's compile log; tokenizers have a train_step too.
    def unified_train_step(state: TrainState, batch: Batch, masks: ElasticMask | None) -> tuple[TrainState, Metrics]:
        z_tokens = objective.routed_tokens(batch, masks, model)
        weights = objective.modality_weights(state["loss_weight_ema"], config.loss)
        scale = objective.coefficients(weights, batch.denominators, z_tokens, config.loss, model.router.z_loss_weight)
        whole = (state["params"], state["router_bias"], scale)
        specs, every = jax.tree.map(current_rules().spec, axes, is_leaf=_is_names), PartitionSpec()
        divided = sum_over_devices(gradients, (specs, every, every), _row_specs(batch, masks), (specs, every))
        grads, totals = divided(whole, (batch, masks))
        return _apply_gradients(state, batch, grads, totals, masks, weights, config, labels)

    return unified_train_step


def _is_names(axes: Any) -> bool:
    return isinstance(axes, tuple)


def _micro(batch: Batch, masks: ElasticMask | None, i: int | jax.Array) -> tuple[Batch, ElasticMask | None]:
    rows = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "denominators"}
    picked, mask = jax.tree.map(lambda x: x[i], (rows, masks))
    return Batch(**picked, denominators=batch.denominators), mask


def _scan_sum(accumulate: Callable, batch: Batch, masks: ElasticMask | None) -> Any:
    """Sum of `accumulate` over the micro-batches; only one of them is live at a time."""
    shapes = jax.eval_shape(lambda: accumulate(_micro(batch, masks, 0)))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def step(carry, i):
        return jax.tree.map(jnp.add, carry, accumulate(_micro(batch, masks, i))), None

    return jax.lax.scan(step, zeros, jnp.arange(batch.segment.shape[0]))[0]


def _apply_gradients(state, batch: Batch, grads, totals, masks, weights, config: ExperimentConfig, labels):
    optimizer = config.optimizer
    norm = global_norm(grads)
    accepted = jnp.isfinite(totals["loss"]) & jnp.isfinite(norm)
    rate = learning_rate(state["step"], optimizer, config.training.steps)
    params, opt_state = adamw_update(
        state["params"], grads, state["opt_state"],
        step=state["step"], rate=rate, norm=norm, accepted=accepted, labels=labels, config=optimizer,
    )  # fmt: skip
    losses = {m: objective.ratio(totals["sums"][m], batch.denominators[m]) for m in objective.MODALITIES}
    present = {m: batch.denominators[m] > 0 for m in objective.MODALITIES}
    ema = state["ema_params"]
    rest = {
        "step": state["step"] + 1,
        "ema_params": average(ema, params, state["step"], optimizer.ema_decay) if ema else {},
        "router_bias": update_router_bias(
            state["router_bias"],
            totals["eligible_counts"],
            config.model.router.bias_update_speed,
            present_experts(config.model),
        ),
        "loss_weight_ema": objective.update_ema(state["loss_weight_ema"], losses, present, config.loss.ema_decay),
        "rng": state["rng"],
    }
    rest = jax.tree.map(lambda n, o: jnp.where(accepted, n, o), rest, {name: state[name] for name in rest})
    new = {**rest, "params": params, "opt_state": opt_state}
    metrics = {
        **totals,
        "accepted": accepted,
        "grad_norm": norm,
        "learning_rate": rate,
        "modality_weights": weights,
        "denominators": batch.denominators,
        "mask": mask_sizes(masks, config.model),
    }
    return new, metrics


def _row_specs(batch: Batch, masks: ElasticMask | None) -> tuple[Batch, Any]:
    """Rows of every micro-batch over the data axis; a mask that all rows share goes everywhere."""
    rows, whole = PartitionSpec(None, DATA_AXIS), PartitionSpec()
    return _batch_tree(batch, rows, whole), jax.tree.map(lambda x: rows if x.shape[1] > 1 else whole, masks)


def _batch_tree(batch: Batch, rows: Any, whole: Any) -> Batch:
    """A tree like `batch` with `rows` in place of arrays that have rows and `whole` in place of the denominators."""
    fields = {f.name: jax.tree.map(lambda _: rows, getattr(batch, f.name)) for f in dataclasses.fields(batch)}
    return Batch(**{**fields, "denominators": jax.tree.map(lambda _: whole, batch.denominators)})


def batch_shardings(mesh: Mesh, batch: Batch, *, micro_batches: bool = True) -> Batch:
    """Rows over the data axis (of every micro-batch, where these are the first axis), denominators everywhere."""
    spec = PartitionSpec(None, DATA_AXIS) if micro_batches else PartitionSpec(DATA_AXIS)
    return _batch_tree(batch, NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec()))


def check_rows(config: ExperimentConfig, mesh: Mesh) -> None:
    """Raises a `ConfigError` if the rows of a micro-batch cannot be split over the devices."""
    rows, devices = config.training.batch_rows // config.training.micro_batches, mesh.shape[DATA_AXIS]
    if rows % devices:
        raise ConfigError(
            f"config key 'training.batch_rows': found {rows} rows per micro-batch, "
            f"allowed: a multiple of the {devices} devices"
        )


class TrainProgram:
    """`program(state, batch, masks) -> (state, metrics)` of `make_train_step`, compiled before the first batch;
    and the state it starts from.

    Masks are an argument, so every submodel runs in this one program. The state's buffers are donated.

    Args:
      config: Everything; the shapes of batches follow from it.
      mesh: Devices.
      rules: Layout of the state.
      apply: The model as a pure function; None builds it from the configuration.
      example: A batch of the shapes that will come; None takes those of the configuration.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        rules: ShardingRules,
        apply: Callable | None = None,
        example: Batch | None = None,
    ):
        check_rows(config, mesh)
        self._config, self._mesh, self._rules = config, mesh, rules
        self._init: Callable[[], TrainState] | None = None
        self._compiled_before = _compilations()["count"]
        batch = example or split_micro_batches(empty_batch(config), config.training.micro_batches)
        self._shardings = batch_shardings(mesh, batch)
        abstract_batch = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), batch, self._shardings
        )
        whole = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(
            make_train_step(config, apply),
            donate_argnums=0,
            out_shardings=(state_shardings(config, mesh, rules), whole),
        )
        with jax.set_mesh(mesh), use_rules(rules):
            state = sharded_abstract_state(config, mesh, rules)
            self._program = jitted.lower(state, abstract_batch, masks_of_step(config, 0)).compile(
                compiler_options=_compiler_options(state["params"], mesh)
            )

    def __call__(self, state: TrainState, batch: Batch, masks: ElasticMask | None) -> tuple[TrainState, Metrics]:
        return self._program(state, jax.device_put(batch, self._shardings), masks)

    def compile_init(self) -> None:
        """Compiles `init` too; a run that starts from a checkpoint does not need it."""
        self._init = compile_init(self._config, self._mesh, self._rules)

    def init(self) -> TrainState:
        """The state before the first step."""
        return self._init() if self._init else make_state(self._config, self._mesh, self._rules)

    @property
    def compilations(self) -> int:
        """Training steps that JAX has compiled (or loaded from its cache) in this process since this one."""
        return _compilations()["count"] - self._compiled_before


@functools.cache
def _compilations() -> dict[str, int]:
    counter = {"count": 0}

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration" and "unified_train_step" in str(
            kwargs.get("fun_name", "")
        ):
            counter["count"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counter


def _compiler_options(params: Any, mesh: Mesh) -> Any:
    """A function of model and platform alone, so that a resumed run runs the same program."""
    small = sum(leaf.size for leaf in jax.tree.leaves(params)) < SMALL
    return cpu_optimization(0, mesh.devices.flat[0].platform) if small else None


def masks_of_step(config: ExperimentConfig, step: int) -> ElasticMask | None:
    """Masks of all micro-batches of the step after `step` steps; None for a model that is not elastic."""
    if not config.model.elastic:
        return None
    count = config.training.micro_batches
    rows = config.training.batch_rows // count
    return step_masks(config.seed, step, count, config.model, config.elastic, rows)


def empty_batch(config: ExperimentConfig) -> Batch:
    """A global batch of the configuration's shapes without a single token; numpy."""
    row = pack([], config.sequence, config.model)
    return stack([row] * config.training.batch_rows)


def make_eval_step(config: ExperimentConfig, mesh: Mesh, rules: ShardingRules, apply: Callable | None = None):
    """`eval_step(params, router_bias, batch) -> sums` of the full model on rows [B, ...]; nothing is updated."""
    apply, axes = apply or make_apply(config.model), parameter_axes(config.model)

    def eval_step(params, router_bias, batch: Batch) -> Metrics:
        output = apply(cast_params(params, axes, config.training.precision), router_bias, batch, None)
        return {"sums": objective.loss_sums(output, batch), **diagnostic_sums(output, batch, config.model)}

    jitted = jax.jit(eval_step, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def run(params, router_bias, batch: Batch) -> Metrics:
        if batch.segment.shape[0] % mesh.shape[DATA_AXIS] == 0:
            batch = jax.device_put(batch, batch_shardings(mesh, batch, micro_batches=False))
        with jax.set_mesh(mesh), use_rules(rules):
            return jitted(params, router_bias, batch)

    return run
