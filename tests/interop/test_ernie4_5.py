"""Weights of ERNIE 4.5 text models: every one lands where it belongs, and none is missed.

That the numbers then are those of transformers is what `experiments.benchmark --peer=transformers` checks first.
"""

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.interop import InteropError, from_ernie4_5
from ernie5_jax.model import init_params
from ernie5_jax.testing import tiny_model_config

CONFIG = tiny_model_config(num_dense_layers=1, audio_levels=0, mtp_depth=0, tied_text_head=False)


def state_of(params, bias):
    """The inverse of the import, for one dense and two sparse layers."""
    backbone = params["backbone"]
    state = {
        "model.embed_tokens.weight": params["embedding"]["text"],
        "model.norm.weight": params["final_norm"]["scale"],
        "lm_head.weight": params["text_head"]["kernel"].T,
    }
    layers = [("dense", 0), ("moe", 0), ("moe", 1)]
    for number, (stack, place) in enumerate(layers):
        layer = jax.tree.map(lambda a, place=place: a[place], backbone[stack])
        to = f"model.layers.{number}."
        state[to + "input_layernorm.weight"] = layer["attention_norm"]["scale"]
        state[to + "post_attention_layernorm.weight"] = layer["ffn_norm"]["scale"]
        for name in ("query", "key", "value", "out"):
            state[f"{to}self_attn.{name[0]}_proj.weight"] = layer["attention"][name]["kernel"].T
        ffn = layer["ffn"]
        if stack == "dense":
            state |= swiglu(to + "mlp.", ffn)
            continue
        state[to + "mlp.gate.weight"] = ffn["router"]["kernel"].T
        state[to + "mlp.gate.moe_statics.e_score_correction_bias"] = bias[number - 1][None]
        state[to + "mlp.experts.gate_up_proj"] = ffn["w_in"].swapaxes(1, 2)
        state[to + "mlp.experts.down_proj"] = ffn["w_out"].swapaxes(1, 2)
        state |= swiglu(to + "mlp.shared_experts.", ffn["shared"])
    return {name: np.asarray(value) for name, value in state.items()}


def swiglu(prefix, layer):
    gate, up = np.split(np.asarray(layer["w_in"]["kernel"]), 2, axis=1)
    return {
        prefix + "gate_proj.weight": gate.T,
        prefix + "up_proj.weight": up.T,
        prefix + "down_proj.weight": np.asarray(layer["w_out"]["kernel"]).T,
    }


class ImportTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        params, bias = jax.jit(lambda: init_params(CONFIG, 0))()
        rng = np.random.default_rng(0)
        # Other values in the text model's part; the other parts keep those of seed 0.
        parts = {name: params[name] for name in ("backbone", "final_norm", "text_head")}
        parts = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), parts)
        cls.params = {**params, **parts}
        cls.params["embedding"] = {**params["embedding"], "text": rng.normal(size=(352, 32)).astype(np.float32)}
        cls.bias = rng.normal(size=bias.shape).astype(np.float32)
        cls.state = state_of(cls.params, cls.bias)

    def test_every_weight_lands_where_it_belongs(self):
        params, bias = from_ernie4_5(self.state, CONFIG)
        chex.assert_trees_all_equal(params, self.params)
        chex.assert_trees_all_equal(bias, self.bias)

    def test_a_missing_weight_is_named(self):
        state = dict(self.state)
        del state["model.layers.2.mlp.gate.weight"]
        with self.assertRaisesRegex(InteropError, "'model.layers.2.mlp.gate.weight': missing"):
            from_ernie4_5(state, CONFIG)

    def test_a_weight_that_is_left_over_is_named(self):
        with self.assertRaisesRegex(InteropError, "'model.layers.3.odd': found it"):
            from_ernie4_5({**self.state, "model.layers.3.odd": np.zeros(1)}, CONFIG)

    def test_a_weight_of_another_shape_is_named(self):
        state = {**self.state, "model.norm.weight": np.zeros(31, np.float32)}
        with self.assertRaisesRegex(InteropError, r"'final_norm.scale': found shape \(31,\), allowed: \(32,\)"):
            from_ernie4_5(state, CONFIG)


if __name__ == "__main__":
    absltest.main()
