"""This library's side of the benchmark."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ernie5_jax.config import (
    ElasticSamplingConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RouterConfig,
    TextTokenizerConfig,
    TrainingConfig,
)
from ernie5_jax.generation import Cursor, Weights, advance, generate_text, row_keys, sampling_params
from ernie5_jax.interop import from_ernie4_5
from ernie5_jax.kernels.attention import attention
from ernie5_jax.kernels.grouped_matmul import moe_ffn
from ernie5_jax.model import ElasticMask, empty_cache, full_mask, init_params, make_apply
from ernie5_jax.parallel import DATA_AXIS, make_mesh, preset
from ernie5_jax.sequence import UNBOUNDED, Batch, Slots, token_rows
from ernie5_jax.training.objective import loss_sums
from ernie5_jax.training.step import TrainProgram, masks_of_step, split_micro_batches
from experiments import cli
from experiments.benchmarks.worker import serve
from experiments.benchmarks.workloads import (
    ATTENTION,
    BETAS,
    LEARNING_RATE,
    ROPE_BASE,
    SHAPES,
    WEIGHT_DECAY,
    AttentionShape,
    MoeShape,
)


def prepare(task: str, **arguments: Any) -> Any:
    """See `worker.serve`."""
    return globals()[f"_{task}"](**arguments)


def model_config(shape: MoeShape, **changes: Any) -> ModelConfig:
    """The peer's architecture: text only."""
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "num_moe_layers": shape.layers,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "expert_width": shape.expert_width,
        "shared_expert_width": shape.expert_width,
        "router": RouterConfig(shape.experts, shape.top_k, bias_update_speed=0.0),
        "rope_base": ROPE_BASE,
        "tied_text_head": False,
        "mtp_depth": 0,
        "vocab_size": shape.vocab_size,
        "audio_levels": 0,
        "elastic": False,
    }
    return ModelConfig(**{**settings, **changes})


def _matmul(size: int) -> Any:
    """The machine's rate: a square product in float32."""
    a = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    return _warm(lambda: product(a))


def _check(shape: str, weights: str) -> dict[str, Any]:
    """Largest differences from what `peer.export` wrote, relative to the largest value."""
    with np.load(weights) as file:
        arrays = {name: file[name] for name in file.files}
    config = model_config(SHAPES[shape])
    state = {name.removeprefix("state/"): a for name, a in arrays.items() if name.startswith("state/")}
    params, bias = from_ernie4_5(state, config)
    batch = token_rows(arrays["tokens"])
    apply = make_apply(config)

    def mean_loss(params):
        output = apply(params, bias, batch)
        return loss_sums(output, batch)["text"] / batch.denominators["text"], output.text_logits

    (loss, logits), grads = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(params)
    layer = grads["backbone"]["moe"]
    found = {
        "logits": (logits, arrays["logits"][:, :-1]),
        "loss": (loss, arrays["loss"]),
        "gradient text": (grads["embedding"]["text"], arrays["gradient/text"]),
        "gradient query": (layer["attention"]["query"]["kernel"][0].T, arrays["gradient/query"]),
        "gradient experts": (layer["ffn"]["w_out"][0].swapaxes(1, 2), arrays["gradient/experts"]),
    }
    return {"differences": {name: _difference(*pair) for name, pair in found.items()}}


def _train(shape: str, elastic: bool = False) -> Any:
    """One optimiser step; `elastic`: each with the mask that training would draw for it."""
    sizes = SHAPES[shape]
    sampling = ElasticSamplingConfig(full_depth=0.75, full_width=0.8, full_top_k=0.8) if elastic else None
    config = ExperimentConfig(
        model=model_config(sizes, elastic=elastic),
        text=TextTokenizerConfig(vocab_size=sizes.vocab_size),
        training=TrainingConfig(batch_rows=sizes.batch),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE,
            end_learning_rate=LEARNING_RATE,
            warmup_steps=0,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            clip_norm=0.0,
            ema_decay=0.0,
        ),
        parallel=ParallelConfig(data=len(jax.devices()), rules="expert"),
        elastic=sampling or ElasticSamplingConfig(),
    )
    batch = split_micro_batches(token_rows(_tokens(sizes, sizes.batch, sizes.length)), 1)
    program = TrainProgram(config, make_mesh(config.parallel), preset(config.parallel.rules), example=batch)
    state, step = program.init(), 0

    def train() -> None:
        nonlocal state, step
        state, metrics = program(state, batch, masks_of_step(config, step))
        step += 1
        assert metrics["accepted"]

    return train


def _prefill(shape: str, batch: int) -> Any:
    sizes = SHAPES[shape]
    config, weights = _weights(sizes)
    rows, start = _prompt(_tokens(sizes, batch, 512))
    apply = make_apply(config)

    @jax.jit
    def prefill(weights, rows):
        cursor = Cursor(empty_cache(config, batch, 512), start, start)
        output, cache = advance(apply, weights, cursor, rows, _row_numbers(rows))
        return output.text_logits, cache

    return _warm(lambda: prefill(weights, rows))


def _decode(shape: str, batch: int, top_k: int | None = None) -> Any:
    """Prompt and new tokens, greedily; `top_k`: through the elastic model, cut to so many experts a token."""
    sizes = SHAPES[shape]
    config, weights = _weights(sizes, elastic=top_k is not None)
    if top_k is not None:
        mask = full_mask(config)
        weights = Weights(
            weights.params, weights.router_bias, ElasticMask(mask.layers, mask.experts, mask.top_k * 0 + top_k)
        )
    rows, start = _prompt(_tokens(sizes, batch, sizes.prompt))
    apply, keys, greedy = make_apply(config), row_keys(0, jnp.arange(batch), jnp.arange(batch)), sampling_params(0.0)

    @jax.jit
    def decode(weights, rows):
        cursor = Cursor(empty_cache(config, batch, sizes.prompt + sizes.new_tokens), start, start)
        output, cache = advance(apply, weights, cursor, rows, _row_numbers(rows))
        logits, cursor = output.text_logits[:, 0], Cursor(cache, start, start)
        trace = generate_text(apply, weights, cursor, logits, keys, greedy, max_tokens=sizes.new_tokens)
        return trace._replace(logits=())

    def run() -> None:
        trace = decode(weights, rows)
        assert int(trace.count.max()) == sizes.new_tokens, "a sequence ended early"

    return _warm(run)


def _attention(packed: bool, length: int = ATTENTION.length) -> Any:
    """Forward and backward, heads divided over the devices."""
    shape = ATTENTION
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (jax.random.normal(key, (1, length, n, shape.head_dim)) for key, n in zip(keys, heads, strict=True))
    where = _where(shape, length, packed)
    split, whole = PartitionSpec(None, None, DATA_AXIS), PartitionSpec()

    def total(q, k, v, where):
        return attention(q, k, v, **where).sum()

    def gradients(q, k, v, where):
        return jax.grad(total, argnums=(0, 1, 2))(q, k, v, where)

    mesh = make_mesh(ParallelConfig())
    both = jax.jit(
        jax.shard_map(gradients, mesh=mesh, in_specs=(split, split, split, whole), out_specs=split, check_vma=False)
    )
    return _warm(lambda: both(q, k, v, where))


def _where(shape: AttentionShape, length: int, packed: bool) -> dict[str, Any]:
    row = jnp.arange(length, dtype=jnp.int32)[None]
    segment = 1 + row // (length // shape.documents) if packed else jnp.ones_like(row)
    bounds = jnp.stack([jnp.full_like(row, UNBOUNDED), row], axis=-1)
    return {"bounds": bounds, "q_segment": segment, "k_segment": segment, "q_rows": row, "k_rows": row}


def _stack(shape: str, layers: int, backward: bool) -> Any:
    """The layers of the elastic model without head, the first `layers` of them live."""
    sizes = SHAPES[shape]
    config, weights = _weights(sizes, elastic=True)
    live = (jnp.arange(sizes.layers) < layers)[None]
    mask = full_mask(config)
    mask = ElasticMask(live, mask.experts, mask.top_k)
    rows = token_rows(_tokens(sizes, sizes.batch, sizes.length))
    rows = Batch(**{**vars(rows), "targets": {}})
    apply = make_apply(config)

    def total(stack, rows, mask):
        params = {**weights.params, "backbone": stack}
        return jnp.square(apply(params, weights.router_bias, rows, mask).hidden).mean()

    program = jax.jit(jax.value_and_grad(total) if backward else total)
    return _warm(lambda: program(weights.params["backbone"], rows, mask))


def _sparse_layer(shape: str, tokens: int, largest_top_k: int, top_k: int) -> Any:
    """Forward and backward of the experts of one layer; ranks from a traced `top_k` on are not used."""
    sizes = SHAPES[shape]
    d, f, e = sizes.hidden_size, sizes.expert_width, sizes.experts
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (tokens, d))
    w_in, w_out = (0.02 * jax.random.normal(k, s) for k, s in zip(keys[1:3], ((e, d, 2 * f), (e, f, d)), strict=True))
    gates, index = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[3], (tokens, e))), largest_top_k)

    @jax.jit
    def both(x, gates, w_in, w_out, index, top_k):
        used = jnp.where(jnp.arange(largest_top_k) < top_k, index, e)
        return jax.grad(lambda *a: jnp.square(moe_ffn(a[0], a[1], used, a[2], a[3])).sum(), argnums=(0, 1, 2, 3))(
            x, gates, w_in, w_out
        )

    return _warm(lambda: both(x, gates, w_in, w_out, index, jnp.int32(top_k)))


def _weights(sizes: MoeShape, **changes: Any) -> tuple[ModelConfig, Weights]:
    config = model_config(sizes, **changes)
    params, bias = jax.jit(functools.partial(init_params, config))()
    return config, Weights(params, bias, full_mask(config) if config.elastic else None)


def _prompt(tokens: np.ndarray) -> tuple[Batch, jax.Array]:
    """The batch of a prompt, its last position read by the text head, and the row that comes next."""
    size, length = tokens.shape
    rows = token_rows(tokens)
    last = Slots(np.full((size, 1), length - 1, np.int32), {}, np.ones((size, 1), np.float32))
    return Batch(**{**vars(rows), "targets": {"text": last}}), jnp.full(size, length, jnp.int32)


def _row_numbers(rows: Batch) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(rows.token.shape[1], dtype=jnp.int32), rows.token.shape)


def _tokens(shape: MoeShape, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(batch * 1000 + length).integers(100, shape.vocab_size, (batch, length))


def _difference(found: Any, wanted: Any) -> float:
    wanted = np.asarray(wanted)
    return float(np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max())


def _warm(run: Any) -> Any:
    """`run`, waited for, after a first call that compiles."""

    def wait() -> None:
        jax.block_until_ready(run())

    wait()
    return wait


if __name__ == "__main__":
    cli.set_up_jax(int(sys.argv[1]))
    serve(prepare)
