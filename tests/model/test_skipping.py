"""A layer that a traced flag may skip: the values and gradients of `lax.cond`, without a copy of the weights."""

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from ernie5_jax.model.skipping import run_if


def _run(given, fixed):
    weights, hidden = given
    shift, number = fixed
    return hidden + jnp.tanh(hidden @ weights + shift), {"number": number + 1, "sum": hidden.sum()}


def _skip(given, fixed):
    del fixed
    return given[1], {"number": jnp.int32(0), "sum": jnp.zeros(())}


def _loss(call, run):
    def loss(given, fixed, flag):
        hidden, stats = call(flag, run, _skip, given, fixed)
        return jnp.square(hidden).sum() + 3 * stats["sum"]

    return loss


def _case():
    keys = jax.random.split(jax.random.key(0), 3)
    given = (jax.random.normal(keys[0], (3, 8, 8)), jax.random.normal(keys[1], (4, 8)))
    return given, (jax.random.normal(keys[2], (8,)), jnp.int32(2))


class RunIfTest(parameterized.TestCase):
    @parameterized.product(flag=(True, False), checkpointed=(True, False))
    def test_equals_cond(self, flag, checkpointed):
        (weights, hidden), fixed = _case()
        run = jax.checkpoint(_run) if checkpointed else _run
        given, flag = (weights[0], hidden), jnp.asarray(flag)
        with self.subTest("values"):
            chex.assert_trees_all_equal(
                run_if(flag, run, _skip, given, fixed), jax.lax.cond(flag, run, _skip, given, fixed)
            )
        found = jax.jit(jax.grad(_loss(run_if, run)))(given, fixed, flag)
        wanted = jax.grad(_loss(jax.lax.cond, _run))(given, fixed, flag)
        chex.assert_trees_all_close(found, wanted, rtol=1e-6)

    def test_a_scan_over_layers_stacks_no_weights(self):
        given, fixed = _case()

        def loss(weights, hidden, flags):
            def step(hidden, xs):
                return run_if(xs[1], _run, _skip, (xs[0], hidden), fixed)[0], None

            return jnp.square(jax.lax.scan(step, hidden, (weights, flags))[0]).sum()

        flags = jnp.array([True, False, True])
        jaxpr = jax.make_jaxpr(jax.grad(loss))(*given, flags)
        forward, backward = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
        self.assertNotIn((3, 8, 8), [v.aval.shape for v in forward.outvars])
        self.assertIn((3, 8, 8), [v.aval.shape for v in backward.outvars])  # the gradient
        gradient = jax.grad(loss)(*given, flags)
        chex.assert_trees_all_equal(gradient[1], jnp.zeros((8, 8)))
        self.assertGreater(float(jnp.abs(gradient[0]).max()), 0)


if __name__ == "__main__":
    absltest.main()
