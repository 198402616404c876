"""Compiles one program for a TPU slice that is not there and prints what came out as JSON; run by the tests.

python -m tests.parallel.compile_for_tpu train/fsdp/bfloat16
python -m tests.parallel.compile_for_tpu generate
"""

from __future__ import annotations

import json
import os
import sys
from typing import Literal

# Before jax is imported: no search for a TPU or its metadata server; the default backend stays the CPU.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    JAX_OPTIMIZATION_LEVEL="O0",
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

from ernie5_jax.config import ElasticSamplingConfig, TrainingConfig  # noqa: E402
from ernie5_jax.generation import Cursor, Weights, generate_audio, sampling_params  # noqa: E402
from ernie5_jax.kernels.attention import attention  # noqa: E402
from ernie5_jax.kernels.grouped_matmul import moe_ffn  # noqa: E402
from ernie5_jax.model import empty_cache, init_params, make_apply  # noqa: E402
from ernie5_jax.parallel import DATA_AXIS, preset  # noqa: E402
from ernie5_jax.sequence import Batch, Slots  # noqa: E402
from ernie5_jax.testing import tiny_model_config  # noqa: E402
from ernie5_jax.training.step import TrainProgram  # noqa: E402
from tests.training.helpers import small_experiment  # noqa: E402

TOPOLOGY = "v5e:2x4"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter")


def compile_train_step(rules: str, precision: Literal["float32", "bfloat16"]):
    """The whole optimiser step of an elastic model with every part, two micro-batches."""
    config = small_experiment(
        # Wide enough that parameters, not the batch, decide the size of the arguments.
        tiny_model_config(hidden_size=64, expert_width=64, num_dense_layers=1),
        training=TrainingConfig(steps=8, batch_rows=16, micro_batches=2, precision=precision),
        elastic=ElasticSamplingConfig(full_depth=0.5, full_width=0.5, full_top_k=0.5),
    )
    return TrainProgram(config, _mesh(), preset(rules))._program


def compile_generation():
    """Prefill and the loop over audio frames, every codec level sampled, in bfloat16 on one chip."""
    config, size, prompt, frames = tiny_model_config(), 2, 16, 4
    apply = make_apply(config)
    here = NamedSharding(_mesh(), PartitionSpec())

    def run(params, bias, mask, batch, rows, keys):
        cursor = Cursor(
            empty_cache(config, size, prompt + frames, dtype=jnp.bfloat16),
            jnp.full(size, prompt, jnp.int32),
            jnp.full(size, prompt, jnp.int32),
        )
        return generate_audio(
            apply,
            Weights(params, bias, mask),
            cursor,
            (batch, rows),
            keys,
            sampling_params(1.0, top_k=3, top_p=0.9),
            levels=config.audio_levels,
            bins=config.audio_bins,
            max_frames=frames,
            guided=False,
        )

    params, bias = jax.eval_shape(lambda: init_params(config))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)
    batch = _prompt(size, prompt)
    rows = np.tile(np.arange(prompt, dtype=np.int32), (size, 1))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), (params, bias, None, batch, rows, keys)
    )
    return jax.jit(run).lower(*arguments).compile()


def compile_attention(topology: str, backend: str):
    """Values and gradients of attention over 1,024 positions on one chip."""
    here = NamedSharding(_mesh(topology, 1), PartitionSpec())

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def loss(q, k, v, rows, bounds):
        where = {"q_segment": rows, "k_segment": rows, "q_rows": rows, "k_rows": rows}
        implementation = None if backend == "auto" else backend
        return attention(q, k, v, bounds=bounds, **where, implementation=implementation).astype(jnp.float32).sum()

    q, k = array(jnp.bfloat16, 2, 1024, 8, 128), array(jnp.bfloat16, 2, 1024, 4, 128)
    rows, bounds = array(jnp.int32, 2, 1024), array(jnp.int32, 2, 1024, 2)
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, rows, bounds).compile()


def compile_sparse_layer(topology: str, backend: str):
    """Values and gradients of a sparse layer of 16 experts, top-4, on one chip."""
    here = NamedSharding(_mesh(topology, 1), PartitionSpec())

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def loss(x, gates, index, w_in, w_out):
        implementation = None if backend == "auto" else backend
        return moe_ffn(x, gates, index, w_in, w_out, implementation=implementation).astype(jnp.float32).sum()

    x, gates, index = array(jnp.bfloat16, 512, 256), array(jnp.float32, 512, 4), array(jnp.int32, 512, 4)
    w_in, w_out = array(jnp.bfloat16, 16, 256, 512), array(jnp.bfloat16, 16, 256, 256)
    return jax.jit(jax.grad(loss, (0, 1, 3, 4))).lower(x, gates, index, w_in, w_out).compile()


def _prompt(size: int, length: int) -> Batch:
    last = Slots(np.full((size, 1), length - 1, np.int32), {}, np.ones((size, 1), np.float32))
    return Batch(
        token=np.zeros((size, length), np.int32),
        position=np.zeros((size, length, 3), np.float32),
        bounds=np.zeros((size, length, 2), np.int32),
        segment=np.ones((size, length), np.int32),
        inputs={},
        targets={"audio": last},
        mtp_token=np.zeros((size, 0, length), np.int32),
        denominators={},
    )


def _mesh(topology: str = TOPOLOGY, chips: int | None = None) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:chips]
    return Mesh(np.array(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


_PROGRAMS = {
    "train": compile_train_step,
    "generate": compile_generation,
    "attention": compile_attention,
    "sparse": compile_sparse_layer,
}


def main(what: str) -> None:
    kind, *arguments = what.split("/")
    compiled = _PROGRAMS[kind](*arguments)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    print(
        json.dumps(
            {
                "arguments": memory.argument_size_in_bytes,
                "temporaries": memory.temp_size_in_bytes,
                "peak": memory.peak_memory_in_bytes,
                "bfloat16": "bf16[" in text,
                "kernels": text.count("tpu_custom_call"),
                **{name: text.count(f"{name}(") + text.count(f"{name}-start(") for name in COLLECTIVES},
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
