"""Invariants of the whole model: isolation, packing, modality blindness, elastic masks."""

import dataclasses
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from ernie5_jax.config import RouterConfig
from ernie5_jax.kernels.attention import attention_mask
from ernie5_jax.model import ElasticMask, check_mask, full_mask, init_params, logical_axes, make_apply
from ernie5_jax.sequence import EncodedDocument, layout, pack, stack
from ernie5_jax.testing import (
    KINDS,
    dummy_batch,
    dummy_rows,
    random_encoded_span,
    square_scales,
    tiny_model_config,
    tiny_sequence_config,
)
from ernie5_jax.vision.pyramid import ScalePyramid

CONFIG = tiny_model_config(init_scale=0.15)
LOGITS = ("text_logits", "mtp_logits", "visual_logits", "audio_logits")


def _parameters(config=CONFIG, seed=0):
    params, bias = jax.jit(lambda: init_params(config, seed))()
    return params, bias + 0.05 * jax.random.normal(jax.random.key(7), bias.shape)


def _random_mask(rng, config) -> ElasticMask:
    layers, experts = config.num_layers, config.router.num_experts
    top_k = rng.integers(1, config.router.top_k + 1, (1, layers)).astype(np.int32)
    enabled = np.zeros((1, layers, experts), bool)
    for layer in range(layers):
        count = rng.integers(top_k[0, layer], experts + 1)
        enabled[0, layer, rng.permutation(experts)[:count]] = True
    live = rng.random((1, layers)) < 0.6
    live[:, 0] = live[:, layers - config.num_codec_layers :] = True
    return ElasticMask(jnp.asarray(live), jnp.asarray(enabled), jnp.asarray(top_k))


class PackingTest(parameterized.TestCase):
    def test_packed_equals_unpacked(self):
        sequence = tiny_sequence_config(64)
        rows = dummy_rows(CONFIG, seed=3, rows=2, sequence=sequence)
        apply = jax.jit(make_apply(CONFIG))
        params, bias = _parameters()
        packed = apply(params, bias, stack([pack(row, sequence, CONFIG) for row in rows]))
        alone = [document for row in rows for document in row]
        single = apply(params, bias, stack([pack([document], sequence, CONFIG) for document in alone]))
        number = 0
        for i, row in enumerate(rows):
            offset = 0
            for document in row:
                end = offset + document.length
                found = packed.hidden[i, offset:end]
                chex.assert_trees_all_close(found, single.hidden[number, : document.length], atol=1e-5)
                offset, number = end, number + 1

    def test_pad_is_never_routed_or_counted(self):
        batch = dummy_batch(CONFIG, seed=4)
        tokens = int((batch.segment > 0).sum())
        self.assertLess(tokens, batch.segment.size)
        params, bias = _parameters()
        output = jax.jit(make_apply(CONFIG), static_argnames="return_routing")(params, bias, batch, return_routing=True)
        layers = CONFIG.num_moe_layers + CONFIG.num_codec_layers
        np.testing.assert_array_equal(output.router.counts.sum(-1), [tokens * CONFIG.router.top_k] * layers)
        index = np.asarray(output.router.expert_index)
        np.testing.assert_array_equal((index == CONFIG.router.num_experts).all(-1), [batch.segment == 0] * layers)


class IsolationTest(parameterized.TestCase):
    def test_jacobian_of_logits_is_zero_wherever_the_mask_forbids(self):
        """Two packed documents that hold all eight kinds of span, and padding; every head."""
        length = 96
        sequence = tiny_sequence_config(length)
        rng, scales = np.random.default_rng(1), square_scales(CONFIG.visual_scales)
        documents = []
        for order in ((0, 1, 7, 6, 4), (5, 4, 2, 0, 3)):
            spans = tuple(random_encoded_span(rng, KINDS[i], CONFIG, scales) for i in order)
            pyramid = ScalePyramid(scales, CONFIG.visual_bits)
            documents.append(
                layout(EncodedDocument(spans), sequence, pyramid, audio_bins=CONFIG.audio_bins, mtp_depth=1)
            )
        self.assertLess(sum(document.length for document in documents), length)
        batch = stack([pack(documents, sequence, CONFIG)])
        apply = make_apply(CONFIG)
        params, bias = _parameters()
        embeds = 0.3 * jax.random.normal(jax.random.key(0), (1, length, CONFIG.hidden_size))
        slots = {name: batch.targets[name] for name in ("text", "visual", "audio")}
        used = {name: np.flatnonzero(s.index[0] < length) for name, s in slots.items()}
        # One probe per position instead of all logits: a random direction hides no dependence.
        widths = (CONFIG.vocab_size, CONFIG.visual_bits, CONFIG.audio_levels * (CONFIG.audio_bins + 1))
        probes = [jax.random.normal(jax.random.key(i), (width,)) for i, width in enumerate(widths)]

        def outputs(embeds):
            output = apply(params, bias, batch, inputs_embeds=embeds)
            logits = (output.text_logits, output.visual_logits, output.audio_logits)
            heads = zip(logits, used.values(), probes, strict=True)
            return jnp.concatenate([head[0, at].reshape(len(at), -1) @ probe for head, at, probe in heads])

        jacobian = np.abs(np.asarray(jax.jit(jax.jacrev(outputs))(embeds)))[:, 0].max(-1)
        rows = jnp.arange(length, dtype=jnp.int32)[None]
        mask = attention_mask(
            q_rows=rows, k_rows=rows, bounds=batch.bounds, q_segment=batch.segment, k_segment=batch.segment
        )
        positions = np.concatenate([slots[name].index[0, at] for name, at in used.items()])
        allowed = np.asarray(mask)[0, positions]
        self.assertEqual(jacobian[~allowed].max(), 0)
        # The test can fail: what is allowed is really used.
        self.assertGreater(jacobian[allowed].min(), 0)


class RoutingTest(absltest.TestCase):
    @pytest.mark.slow
    def test_replayed_routing_gives_the_same_logits_and_gradients(self):
        batch = dummy_batch(CONFIG, seed=10, rows=1)
        params, bias = _parameters()

        def loss(params, bias, override):
            output = make_apply(CONFIG)(params, bias, batch, None, routing_override=override, return_routing=True)
            return sum((jnp.square(getattr(output, name)).mean() for name in LOGITS), jnp.zeros(())), output

        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, free), gradient = run(params, bias, None)
        index = free.router.expert_index
        # With another bias the model would choose otherwise.
        (_, replayed), replayed_gradient = run(params, -10 * bias, index)
        np.testing.assert_array_equal(replayed.router.expert_index, index)
        chex.assert_trees_all_equal(replayed.router.counts, free.router.counts)
        for name in LOGITS:
            chex.assert_trees_all_close(getattr(replayed, name), getattr(free, name), atol=1e-5)
        chex.assert_trees_all_close(replayed_gradient, gradient, atol=1e-5)
        (_, other), _ = run(params, -10 * bias, None)
        self.assertTrue(bool((other.router.expert_index != index).any()))

    @pytest.mark.slow
    def test_recomputation_counts_nothing_twice(self):
        """Report 24."""
        batch = dummy_batch(CONFIG, seed=11, rows=1)
        params, bias = _parameters()

        def run(remat):
            apply = make_apply(dataclasses.replace(CONFIG, remat=remat))

            def loss(params):
                output = apply(params, bias, batch)
                return jnp.square(output.text_logits).mean(), output.router

            return jax.jit(jax.grad(loss, has_aux=True))(params)

        (plain, stats), (again, same) = run(False), run(True)
        chex.assert_trees_all_equal(same.counts, stats.counts)
        chex.assert_trees_all_equal(same.eligible_counts, stats.eligible_counts)
        chex.assert_trees_all_close(again, plain, rtol=1e-5, atol=1e-5)


class ModalityBlindnessTest(parameterized.TestCase):
    def test_equal_hidden_vectors_get_equal_experts_and_outputs(self):
        config = dataclasses.replace(CONFIG, audio_levels=0)
        batch = dummy_batch(CONFIG, seed=2, rows=1)
        # The same vectors and positions in every slot: what differs between positions is only the modality.
        length = batch.token.shape[1]
        position = np.zeros_like(batch.position)
        bounds = np.stack([np.full((1, length), length), np.zeros((1, length))], -1).astype(np.int32)
        segment = np.ones_like(batch.segment)
        batch = dataclasses.replace(batch, position=position, bounds=bounds, segment=segment)
        batch.targets.pop("audio")
        vector = jax.random.normal(jax.random.key(0), (config.hidden_size,))
        embeds = jnp.broadcast_to(vector, (1, length, config.hidden_size))
        params, bias = _parameters(config)
        output = make_apply(config)(params, bias, batch, inputs_embeds=embeds, return_routing=True)
        index = np.asarray(output.router.expert_index)
        np.testing.assert_array_equal(index, np.broadcast_to(index[:, :, :1], index.shape))
        same = jnp.broadcast_to(output.hidden[:, :1], output.hidden.shape)
        chex.assert_trees_all_close(output.hidden, same, atol=1e-6)


class ElasticTest(parameterized.TestCase):
    @parameterized.parameters((False, 1e-6), (True, 1e-12))
    @pytest.mark.slow
    def test_full_mask_equals_the_static_program(self, x64, tolerance):
        batch = dummy_batch(CONFIG, seed=5, rows=1, sequence=tiny_sequence_config(48))
        params, bias = _parameters()

        def loss(config, mask, params, bias):
            output = make_apply(config)(params, bias, batch, mask)
            return sum((jnp.square(getattr(output, name)).mean() for name in LOGITS), jnp.zeros(()))

        with jax.enable_x64(x64):
            dtype = jnp.float64 if x64 else jnp.float32
            params, bias = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), dtype), (params, bias))

            def run(config, mask):
                return jax.jit(jax.value_and_grad(lambda p: loss(config, mask, p, bias)))(params)

            elastic = run(CONFIG, full_mask(CONFIG))
            plain = run(dataclasses.replace(CONFIG, elastic=False), None)
            self.assertEqual(plain[0].dtype, dtype)
            scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
            chex.assert_trees_all_close(elastic, plain, rtol=0, atol=tolerance * scale)

    def test_no_second_copy_of_expert_weights_is_kept_for_the_backward_pass(self):
        batch = dummy_batch(CONFIG, seed=6)
        params, bias = _parameters()

        def loss(params):
            return jnp.square(make_apply(CONFIG)(params, bias, batch, full_mask(CONFIG)).hidden).mean()

        weights = params["backbone"]["moe"]["ffn"]["w_in"].shape
        scans = [e for e in jax.make_jaxpr(jax.grad(loss))(params).eqns if e.primitive.name == "scan"]
        stacked = [sum(v.aval.shape == weights for v in scan.outvars) for scan in scans]
        self.assertEqual(sum(stacked), 1, "the gradient alone")

    def test_many_masks_run_through_one_compilation(self):
        batch = dummy_batch(CONFIG, seed=6)
        params, bias = _parameters()
        compiled = []

        class Count(logging.Handler):
            def emit(self, record):
                if "Finished XLA compilation of jit(counted)" in record.getMessage():
                    compiled.append(record)

        def counted(params, bias, batch, mask):
            return make_apply(CONFIG)(params, bias, batch, mask).hidden

        run, rng, seen = jax.jit(counted), np.random.default_rng(0), set()
        logger, handler = logging.getLogger("jax"), Count()
        logger.addHandler(handler)
        try:
            with jax.log_compiles(True):
                for _ in range(32):
                    mask = _random_mask(rng, CONFIG)
                    check_mask(mask, CONFIG)
                    seen.add(np.asarray(run(params, bias, batch, mask)).tobytes())
        finally:
            logger.removeHandler(handler)
        self.assertLen(compiled, 1)
        self.assertLen(seen, 32)

    def test_skipped_layers_do_nothing_and_are_not_counted(self):
        batch = dummy_batch(CONFIG, seed=8)
        params, bias = _parameters()
        mask = full_mask(CONFIG)
        mask = dataclasses.replace(mask, layers=mask.layers.at[:, 1].set(False))
        apply = jax.jit(make_apply(CONFIG))
        output = apply(params, bias, batch, mask)
        self.assertEqual(float(output.router.counts[1].sum()), 0)
        smaller = dataclasses.replace(CONFIG, num_moe_layers=1)
        kept = dict(params, backbone=dict(params["backbone"]))
        kept["backbone"]["moe"] = jax.tree.map(lambda a: a[:1], params["backbone"]["moe"])
        expected = make_apply(smaller)(kept, bias[jnp.asarray([0, 2, 3])], batch)
        for name in LOGITS:
            chex.assert_trees_all_close(getattr(output, name), getattr(expected, name), atol=1e-5)

    def test_rows_with_their_own_masks_equal_separate_runs(self):
        batch = dummy_batch(CONFIG, seed=9, rows=2)
        params, bias = _parameters()
        rng = np.random.default_rng(3)
        masks = [_random_mask(rng, CONFIG) for _ in range(2)]
        apply = jax.jit(make_apply(CONFIG))
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *masks)
        together = apply(params, bias, batch, both)
        for i, mask in enumerate(masks):
            alone = apply(params, bias, batch, mask)
            real = batch.segment[i] > 0
            chex.assert_trees_all_close(together.hidden[i][real], alone.hidden[i][real], atol=1e-5)
        np.testing.assert_array_equal(
            together.router.eligible_counts.sum(-1) > 0, np.asarray(both.experts.all(-1) & both.layers).any(0)
        )

    @parameterized.named_parameters(
        ("codec_layer_off", {"layers": (0, 3)}, "layer 3 is off"),
        ("too_few_experts", {"experts": 1}, "at least its top_k"),
        ("top_k_too_large", {"top_k": 3}, "allowed: 1 ... 2"),
    )
    def test_bad_masks_are_named(self, change, message):
        mask = full_mask(CONFIG)
        if "layers" in change:
            mask = dataclasses.replace(mask, layers=mask.layers.at[change["layers"]].set(False))
        if "experts" in change:
            mask = dataclasses.replace(mask, experts=mask.experts.at[:, :, change["experts"] :].set(False))
        if "top_k" in change:
            mask = dataclasses.replace(mask, top_k=mask.top_k + 1)
        with self.assertRaisesRegex(ValueError, message):
            check_mask(mask, CONFIG)


class ParametersTest(absltest.TestCase):
    def test_every_parameter_has_one_name_per_dimension(self):
        config = tiny_model_config(num_dense_layers=1, tied_text_head=False, router=RouterConfig(4, 2))
        shapes = jax.eval_shape(lambda: init_params(config, 0))[0]
        axes = logical_axes(config)
        jax.tree.map(lambda s, a: self.assertLen(a, s.ndim), shapes, axes, is_leaf=lambda x: isinstance(x, tuple))


if __name__ == "__main__":
    absltest.main()
