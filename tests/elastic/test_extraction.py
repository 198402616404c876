"""The extracted submodel computes what the masked full model computes: logits and gradients."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ernie5_jax.compiling import cpu_optimization
from ernie5_jax.config import RouterConfig
from ernie5_jax.elastic import extract_submodel
from ernie5_jax.model import ElasticMask, full_mask, init_params, make_apply
from ernie5_jax.testing import dummy_batch, tiny_model_config
from ernie5_jax.training.accounting import parameter_totals
from ernie5_jax.training.objective import loss_sums

MODEL = tiny_model_config(
    num_dense_layers=1, num_moe_layers=4, router=RouterConfig(num_experts=8, top_k=3), init_scale=0.15
)
HEADS = ("text_logits", "mtp_logits", "visual_logits", "audio_logits")


def parameters(model=MODEL, seed=0):
    params, bias = jax.jit(lambda: init_params(model, seed))()
    bias = bias + 0.05 * jax.random.normal(jax.random.key(7), bias.shape)
    return jax.tree.map(lambda a: np.asarray(a, np.float64), (params, bias))


def random_mask(rng, model=MODEL, *, ragged=True) -> ElasticMask:
    """Depth, width and top-k reduced together; `ragged`: experts and top-k differ between layers."""
    layers, experts = model.num_layers, model.router.num_experts
    sizes = 1 if not ragged else layers
    top_k = np.broadcast_to(rng.integers(1, model.router.top_k + 1, (1, sizes)), (1, layers)).astype(np.int32)
    enabled = np.zeros((1, layers, experts), bool)
    width = np.broadcast_to(rng.integers(model.router.top_k, experts + 1, sizes), layers)
    for layer in range(layers):
        enabled[0, layer, rng.permutation(experts)[: width[layer]]] = True
    live = rng.random((1, layers)) < 0.6
    live[:, 0] = live[:, layers - model.num_codec_layers :] = True
    return ElasticMask(live, enabled, top_k)


class ExtractionTest(parameterized.TestCase):
    @parameterized.parameters(*range(20))
    @pytest.mark.slow
    def test_equals_the_masked_model(self, seed):
        """Float64: only the order of sums differs; a near tie of the routing would show as a large difference."""
        rng = np.random.default_rng(seed)
        mask = random_mask(rng, ragged=seed % 2 == 0)
        with jax.enable_x64(True):
            params, bias = parameters(seed=seed)
            small, small_params, small_bias = extract_submodel(MODEL, params, bias, mask)
            batch = jax.tree.map(
                lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, dummy_batch(MODEL, seed=seed)
            )
            full_grads, full = gradients(MODEL)(params, bias, batch, jax.tree.map(jnp.asarray, mask))
            grads, found = gradients(small)(small_params, small_bias, batch, None)
            for name in HEADS:
                wanted = getattr(full, name)
                chex.assert_trees_all_close(getattr(found, name), wanted, atol=1e-9 * float(jnp.abs(wanted).max()))
            _, wanted_grads, _ = extract_submodel(MODEL, full_grads, bias, mask)
            scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted_grads))
            chex.assert_trees_all_close(grads, wanted_grads, atol=1e-9 * scale)

    def test_the_full_mask_extracts_the_model_itself(self):
        params, bias = parameters()
        small, small_params, small_bias = extract_submodel(
            MODEL, params, bias, jax.tree.map(np.asarray, full_mask(MODEL))
        )
        self.assertEqual(small, dataclasses.replace(MODEL, elastic=False))
        chex.assert_trees_all_equal((small_params, small_bias), (params, bias))

    @pytest.mark.slow
    def test_extraction_of_an_extraction(self):
        """First to 6 experts, then to 4 of these: as at once."""
        params, bias = parameters()
        mask = jax.tree.map(np.array, full_mask(MODEL))
        mask.experts[..., 6:] = False
        small, small_params, small_bias = extract_submodel(MODEL, params, bias, mask)
        again = jax.tree.map(np.array, full_mask(small))
        again.experts[..., 4:] = False
        mask.experts[..., 4:] = False
        chex.assert_trees_all_equal(
            extract_submodel(small, small_params, small_bias, again)[1:],
            extract_submodel(MODEL, params, bias, mask)[1:],
        )

    def test_parameters_that_are_left(self):
        mask = random_mask(np.random.default_rng(3), ragged=False)
        params, bias = parameters()
        small, small_params, _ = extract_submodel(MODEL, params, bias, mask)
        count = sum(leaf.size for leaf in jax.tree.leaves(small_params))
        self.assertEqual(parameter_totals(small)["total"], count)
        self.assertLess(count, parameter_totals(MODEL)["total"])

    @parameterized.parameters("one_expert", "k_equals_experts", "one_layer_skipped", "favourite_excluded")
    @pytest.mark.slow
    def test_corner(self, name):
        mask = jax.tree.map(np.array, full_mask(MODEL))
        params, bias = parameters()
        if name == "one_expert":
            mask.top_k[:], mask.experts[..., 1:] = 1, False
        elif name == "k_equals_experts":
            mask.experts[..., 3:] = False
        elif name == "one_layer_skipped":
            mask.layers[0, 2] = False
        else:
            bias[:, 5], mask.experts[..., 5] = 100.0, False
        small, small_params, small_bias = extract_submodel(MODEL, params, bias, mask)
        batch = dummy_batch(MODEL, seed=5)
        to32 = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)  # noqa: E731
        full = forward(MODEL)(to32(params), to32(bias), batch, jax.tree.map(jnp.asarray, mask))
        found = forward(small)(to32(small_params), to32(small_bias), batch, None)
        for head in HEADS:
            wanted = getattr(full, head)
            chex.assert_trees_all_close(getattr(found, head), wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


class MistakesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("layers", lambda m: m.layers.__setitem__((0, -1), False), "first and codec layers"),
        ("top_k", lambda m: m.top_k.__setitem__((0, 1), 9), "top_k"),
        ("experts", lambda m: m.experts.__setitem__((0, 2), False), "experts"),
    )
    def test_a_mask_that_is_no_submodel(self, _, spoil, message):
        mask = jax.tree.map(np.array, full_mask(MODEL))
        spoil(mask)
        params, bias = parameters()
        with self.assertRaisesRegex(ValueError, message):
            extract_submodel(MODEL, params, bias, mask)

    def test_several_rows(self):
        params, bias = parameters()
        with self.assertRaisesRegex(ValueError, "2 rows"):
            extract_submodel(MODEL, params, bias, jax.tree.map(np.asarray, full_mask(MODEL, rows=2)))


@functools.cache
def gradients(model):
    """f(params, router_bias, batch, mask) -> (gradients, output); one program for all masks of a model."""
    apply = make_apply(model)

    def loss(params, bias, batch, mask):
        output = apply(params, bias, batch, mask)
        return sum(loss_sums(output, batch).values(), jnp.zeros(())), output

    return jax.jit(jax.grad(loss, has_aux=True), compiler_options=cpu_optimization(0))


@functools.cache
def forward(model):
    """f(params, router_bias, batch, mask) -> output."""
    return jax.jit(make_apply(model), compiler_options=cpu_optimization(0))


if __name__ == "__main__":
    absltest.main()
