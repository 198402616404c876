"""Router goldens (components 1.2.2, decisions section 3)."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from ernie5_jax.config import RouterConfig
from ernie5_jax.model import choose_experts
from ernie5_jax.model.router import Router


def _choose(logits, bias, k, *, excluded=None, scoring: Any = "softmax", **limits):
    config = RouterConfig(num_experts=len(logits), top_k=k, scoring=scoring)
    if excluded is not None:
        limits["experts"] = jnp.ones(len(logits), bool).at[excluded].set(False)
    array = jnp.asarray(logits, jnp.float32)[None, None]
    return choose_experts(array, jnp.asarray(bias, jnp.float32), config, **limits)


class RouterTest(parameterized.TestCase):
    def test_bias_selects_but_never_weighs(self):
        routing = _choose((2, 1, 0, -1), (-1, 0, 0.5, 0), 2)
        np.testing.assert_array_equal(routing.expert_index[0, 0], [2, 1])
        chex.assert_trees_all_close(routing.gates[0, 0], jnp.asarray([0.268941, 0.731059]), atol=1e-6)

    def test_excluded_expert_with_the_largest_bias(self):
        routing = _choose((2, 1, 0, -1), (0, 0, 1.5, 0), 2, excluded=2)
        np.testing.assert_array_equal(routing.expert_index[0, 0], [0, 1])
        chex.assert_trees_all_close(routing.gates[0, 0], jnp.asarray([0.731059, 0.268941]), atol=1e-6)

    def test_softmax_runs_over_live_experts_only(self):
        routing = _choose((2, 1, 0, -1), (0, 0, 0.2, 0), 1, excluded=0)
        np.testing.assert_array_equal(routing.expert_index[0, 0], [1])
        chex.assert_trees_all_close(routing.probs[0, 0], jnp.asarray([0, 0.665241, 0.244728, 0.090031]), atol=1e-6)

    def test_fewer_live_experts_than_ranks(self):
        routing = _choose((2, 1, 0), (0, 0, 0), 3, excluded=jnp.asarray([0, 2]))
        np.testing.assert_array_equal(routing.expert_index[0, 0], [1, 3, 3])
        chex.assert_trees_all_close(routing.gates[0, 0], jnp.asarray([1.0, 0, 0]))

    def test_lower_top_k_renormalises(self):
        routing = _choose((2, 1, 0, -1), (0,) * 4, 3, top_k=jnp.asarray(2))
        np.testing.assert_array_equal(routing.expert_index[0, 0], [0, 1, 4])
        chex.assert_trees_all_close(routing.gates[0, 0], jnp.asarray([0.731059, 0.268941, 0]), atol=1e-6)

    def test_sigmoid_scores(self):
        routing = _choose((0.0, 2.0, -2.0), (0, 0, 0), 2, scoring="sigmoid")
        scores = 1 / (1 + np.exp([-2.0, 0.0]))
        np.testing.assert_array_equal(routing.expert_index[0, 0], [1, 0])
        chex.assert_trees_all_close(routing.gates[0, 0], (scores / scores.sum()).astype(np.float32), atol=1e-6)

    def test_replayed_choices_keep_gradients_of_the_scores(self):
        override = jnp.asarray([[[3, 0]]])

        def gate(logits):
            config = RouterConfig(num_experts=4, top_k=2)
            return choose_experts(logits, jnp.zeros(4), config, override=override).gates[0, 0, 0]

        logits = jnp.asarray([[[2.0, 1, 0, -1]]])
        self.assertAlmostEqual(float(gate(logits)), 1 / (1 + np.exp(3)), places=6)
        self.assertGreater(float(jnp.abs(jax.grad(gate)(logits)).max()), 0.01)

    def test_z_golden(self):
        """z-loss is the mean of log_z^2; excluded experts are not in it."""
        routing = _choose((2, 1, 0, -1), (0,) * 4, 2)
        np.testing.assert_allclose(routing.log_z[0, 0], 2.440190, atol=1e-6)
        np.testing.assert_allclose(routing.log_z[0, 0] ** 2, 5.954526, rtol=1e-6)
        np.testing.assert_allclose(_choose((2, 1, 0, -1), (0,) * 4, 1, excluded=0).log_z[0, 0], 1.407606, atol=1e-6)
        np.testing.assert_allclose(_choose((2, 1, 0, -1), (0,) * 4, 1, excluded=2).log_z[0, 0], 2.349012, atol=1e-6)

    def test_scores_are_computed_in_full_float32(self):
        router = Router(4, RouterConfig(num_experts=3, top_k=1), 0.5, nnx.Rngs(params=0))
        program: Any = jax.make_jaxpr(lambda x: router(x, jnp.zeros(3)).probs)(jnp.ones((1, 2, 4), jnp.bfloat16))
        (product,) = [e for e in program.jaxpr.eqns if e.primitive is jax.lax.dot_general_p]
        self.assertEqual(product.outvars[0].aval.dtype, jnp.float32)
        self.assertEqual(set(product.params["precision"]), {jax.lax.Precision.HIGHEST})

    def test_no_gradient_reaches_the_bias(self):
        def total(bias):
            config = RouterConfig(num_experts=4, top_k=2)
            routing = choose_experts(jnp.asarray([[[2.0, 1, 0, -1]]]), bias, config)
            return (routing.gates * jnp.asarray([1.0, 2.0])).sum()

        chex.assert_trees_all_equal(jax.grad(total)(jnp.zeros(4)), jnp.zeros(4))


if __name__ == "__main__":
    absltest.main()
