"""Sharding rules: unknown and colliding names raise; presets lay parameters out as they say."""

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

from ernie5_jax.config import ConfigError, ParallelConfig
from ernie5_jax.model import init_params, logical_axes
from ernie5_jax.parallel import ShardingError, ShardingRules, constrain, make_mesh, preset, tree_shardings, use_rules
from ernie5_jax.testing import tiny_model_config


class RulesTest(parameterized.TestCase):
    @parameterized.parameters(
        (("layers", "embed", "mlp"), PartitionSpec(None, "data", None)),
        (("vocab", "embed"), PartitionSpec(None, "data")),
        (("batch", "sequence", None), PartitionSpec("data", None, None)),
    )
    def test_fsdp_spec(self, names, expected):
        self.assertEqual(preset("fsdp").spec(names), expected)

    def test_unknown_name(self):
        with self.assertRaisesRegex(ShardingError, "'embedd': unknown"):
            preset("replicated").spec(("embedd",))

    def test_collision(self):
        with self.assertRaisesRegex(ShardingError, "two dimensions on mesh axis 'data'"):
            preset("fsdp").spec(("batch", "embed"))

    def test_unknown_preset(self):
        with self.assertRaisesRegex(ShardingError, "'zero3': unknown, allowed: replicated, fsdp"):
            preset("zero3")

    def test_every_parameter_has_a_layout(self):
        config = tiny_model_config(num_dense_layers=1, tied_text_head=False)
        shapes, _ = jax.eval_shape(lambda: init_params(config))
        mesh = make_mesh(ParallelConfig(data=8))
        shardings = tree_shardings(mesh, preset("fsdp"), shapes, logical_axes(config))
        names = jax.tree.leaves(logical_axes(config), is_leaf=lambda n: isinstance(n, tuple))
        for sharding, axes in zip(jax.tree.leaves(shardings), names, strict=True):
            self.assertEqual("data" in sharding.spec, "embed" in axes)

    def test_indivisible_dimension_is_named(self):
        mesh = make_mesh(ParallelConfig(data=8))
        shapes = {"block": {"kernel": jax.ShapeDtypeStruct((12, 4), jnp.float32)}}
        axes = {"block": {"kernel": ("embed", "mlp")}}
        with self.assertRaisesRegex(
            ShardingError, "block/kernel: dimension 'embed' is 12, allowed: a multiple of the 8"
        ):
            tree_shardings(mesh, preset("fsdp"), shapes, axes)

    def test_too_many_devices(self):
        with self.assertRaisesRegex(ConfigError, "parallel.data"):
            make_mesh(ParallelConfig(data=jax.device_count() + 1))


class ConstrainTest(chex.TestCase):
    def test_without_a_mesh_nothing_happens(self):
        x = jnp.ones((4, 2))
        self.assertIs(constrain(x, ("batch", "hidden")), x)

    def test_rank_is_checked(self):
        with self.assertRaisesRegex(ShardingError, "2 names for rank 1"):
            constrain(jnp.ones(3), ("batch", "hidden"))

    def test_layout_follows_the_current_rules(self):
        mesh = make_mesh(ParallelConfig(data=4))
        for rules, shard in ((ShardingRules(), (2, 4)), (ShardingRules(batch=None, hidden="data"), (8, 1))):
            with jax.set_mesh(mesh), use_rules(rules):
                y = jax.jit(lambda x: constrain(x * 2, ("batch", "hidden")))(jnp.ones((8, 4)))
            self.assertEqual(y.sharding.shard_shape(y.shape), shard)


if __name__ == "__main__":
    absltest.main()
