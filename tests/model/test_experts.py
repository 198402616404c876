"""The sparse layer: its formula, what it counts (decisions section 4) and the z-loss (components 1.2.2, 1.2.3)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

from ernie5_jax.config import LossConfig, RouterConfig
from ernie5_jax.model.experts import RoutingControl, SparseFFN
from ernie5_jax.testing import tiny_model_config
from ernie5_jax.training import objective

CONFIG = tiny_model_config(
    hidden_size=4, expert_width=3, shared_expert_width=5, router=RouterConfig(num_experts=4, top_k=2), init_scale=0.5
)


def _layer(seed=0) -> SparseFFN:
    return SparseFFN(CONFIG, CONFIG.router, nnx.Rngs(params=seed))


def _swiglu(x, w_in, w_out):
    gate, up = np.split(x @ w_in, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ w_out


class SparseFFNTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.layer = _layer()
        self.x = jax.random.normal(jax.random.key(1), (2, 5, 4))
        self.bias = jnp.asarray([0.0, 0.3, -0.2, 0.1])
        self.active = jnp.ones((2, 5), bool).at[1, 3:].set(False)

    def _logits(self) -> np.ndarray:
        return np.asarray(self.x) @ np.asarray(self.layer.router.kernel[...])

    def test_output_is_gated_experts_and_the_shared_one(self):
        layer, x = self.layer, np.asarray(self.x)
        found, _ = layer(self.x, RoutingControl(self.bias, self.active), return_index=False)
        assert layer.shared is not None
        p = np.exp(self._logits())
        p /= p.sum(-1, keepdims=True)
        expected = _swiglu(x, np.asarray(layer.shared.w_in.kernel[...]), np.asarray(layer.shared.w_out.kernel[...]))
        for b, s in zip(*np.nonzero(np.asarray(self.active)), strict=True):
            chosen = np.argsort(-(p[b, s] + np.asarray(self.bias)))[:2]
            for e in chosen:
                gate = p[b, s, e] / p[b, s, chosen].sum()
                w_in, w_out = np.asarray(layer.w_in[...][e]), np.asarray(layer.w_out[...][e])
                expected[b, s] += gate * _swiglu(x[b, s], w_in, w_out)
        chex.assert_trees_all_close(found, expected.astype(np.float32), atol=1e-5)

    def test_z_loss_sums_routed_tokens_over_live_experts(self):
        experts = jnp.ones((2, 4), bool).at[1, 0].set(False)
        logits, active = self._logits().astype(np.float64), np.asarray(self.active)
        for control, live in ((None, np.ones((2, 4), bool)), (experts, np.asarray(experts))):
            _, stats = self.layer(self.x, RoutingControl(self.bias, self.active, control), return_index=False)
            log_z = np.log((np.exp(logits) * live[:, None]).sum(-1))
            np.testing.assert_allclose(stats.z_loss_sum, (log_z**2)[active].sum(), rtol=1e-5)
            self.assertEqual(float(stats.tokens), 8)

    @pytest.mark.slow
    def test_loads_of_the_bias_rule(self):
        """Ranks really used, of rows in which every expert was enabled; PAD never counts."""
        experts = jnp.ones((2, 4), bool).at[0, 3].set(False)
        control = RoutingControl(self.bias, self.active, experts, jnp.asarray([2, 1], jnp.int32))
        _, stats = self.layer(self.x, control, return_index=True)
        index = np.asarray(stats.expert_index)
        np.testing.assert_array_equal((index < 4).sum(-1), [[2] * 5, [1, 1, 1, 0, 0]])
        self.assertNotIn(3, index[0])
        per_row = [np.bincount(row.ravel(), minlength=5)[:4] for row in index]
        np.testing.assert_array_equal(stats.counts, per_row[0] + per_row[1])
        np.testing.assert_array_equal(stats.eligible_counts, per_row[1])  # row 0 had an expert excluded
        self.assertEqual(float(stats.eligible_counts.sum()), 3)  # lower top-k: fewer ranks, but counted

    def test_z_loss_trains_the_router_in_proportion_to_its_weight(self):
        """Report 27: the gradient of the auxiliary loss arrives, and doubles with its coefficient."""
        below = {name: jnp.zeros(()) for name in (*objective.MODALITIES, "mtp")}
        weights = {name: jnp.ones(()) for name in objective.MODALITIES}

        def gradient(weight: float):
            scale = objective.coefficients(weights, below, jnp.float32(8), LossConfig(), weight)["z"]

            def loss(kernel):
                layer = _layer()
                layer.router.kernel.set_value(kernel)
                _, stats = layer(self.x, RoutingControl(self.bias, self.active), return_index=False)
                return scale * stats.z_loss_sum

            return jax.grad(loss)(self.layer.router.kernel[...])

        one, two = gradient(1e-3), gradient(2e-3)
        self.assertGreater(float(jnp.abs(one).max()), 1e-5)
        chex.assert_trees_all_close(two, 2 * one, rtol=1e-5)
        # d mean(log Z^2) / dW = mean(2 log Z x p^T).
        logits = self._logits()
        log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
        slope = np.where(np.asarray(self.active)[..., None], 2 * log_z * np.exp(logits - log_z), 0)
        expected = 1e-3 / 8 * np.einsum("bsd,bse->de", np.asarray(self.x), slope)
        chex.assert_trees_all_close(one, expected.astype(np.float32), rtol=1e-3, atol=1e-8)


if __name__ == "__main__":
    absltest.main()
