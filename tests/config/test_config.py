"""Strict conversion of experiment files into frozen configurations."""

import dataclasses
import re

from absl.testing import absltest, parameterized

from ernie5_jax import config as config_package
from ernie5_jax.config import (
    IDENTITY_KEYS,
    AudioTokenizerConfig,
    ConfigError,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    RouterConfig,
    SourceConfig,
    VisualTokenizerConfig,
    from_mapping,
    to_config_dict,
    to_plain,
)
from ernie5_jax.errors import UserError


def changed(path: str, value):
    """The default experiment as nested dicts with `path` set to `value`."""
    plain = to_plain(ExperimentConfig())
    node = plain
    *parents, last = path.split(".")
    for parent in parents:
        node = node[parent]
    node[last] = value
    return plain


class FromMappingTest(parameterized.TestCase):
    def test_round_trip(self):
        sources = {"digits": SourceConfig(world="digits", weight=2.0, options={"voices": "3"})}
        config = ExperimentConfig(
            seed=7,
            data=DataConfig(sources=sources, task_weights={"text": 0.5}),
            model=ModelConfig(num_dense_layers=1, visual_scales=2),
            visual=VisualTokenizerConfig(scales=(1, 4)),
        )
        self.assertEqual(from_mapping(ExperimentConfig, to_config_dict(config)), config)
        self.assertEqual(from_mapping(ExperimentConfig, to_plain(config)), config)

    def test_missing_keys_take_defaults(self):
        self.assertEqual(from_mapping(ExperimentConfig, {"seed": 3}), ExperimentConfig(seed=3))

    def test_lists_become_tuples_and_whole_numbers_become_floats(self):
        config = from_mapping(ExperimentConfig, {"visual": {"scales": [1, 2, 4]}, "optimizer": {"weight_decay": 0}})
        self.assertEqual(config.visual.scales, (1, 2, 4))
        self.assertIsInstance(config.optimizer.weight_decay, float)

    def test_is_frozen(self):
        with self.assertRaises(dataclasses.FrozenInstanceError):
            ExperimentConfig().model.num_heads = 2  # pyright: ignore[reportAttributeAccessIssue]

    @parameterized.parameters(
        ("modle", {}, "config key 'modle': unknown"),
        ("model.heads", 4, "config key 'model.heads': unknown"),
        ("model.router.experts", 4, "config key 'model.router.experts': unknown"),
        ("data.sources", {"a": {"wold": "digits"}}, "config key 'data.sources.a.wold': unknown"),
    )
    def test_unknown_key_is_named(self, path, value, message):
        with self.assertRaisesWithPredicateMatch(ConfigError, lambda error: str(error).startswith(message)):
            from_mapping(ExperimentConfig, changed(path, value))

    @parameterized.parameters(
        ("training.steps", "many"),
        ("training.steps", 1.5),
        ("training.steps", True),
        ("training.tensorboard", 1),
        ("optimizer.learning_rate", "0.1"),
        ("optimizer.schedule", "linear"),
        ("visual.scales", 4),
        ("model.router", 8),
        ("name", None),
    )
    def test_wrong_type_names_key_and_value(self, path, value):
        with self.assertRaisesRegex(ConfigError, rf"^config key '{path}': found .*{value!r}.*, allowed: .+"):
            from_mapping(ExperimentConfig, changed(path, value))

    def test_wrong_element_of_a_sequence_is_named(self):
        with self.assertRaisesRegex(ConfigError, r"^config key 'visual.scales\[1\]': found 'two', allowed: .*int"):
            from_mapping(ExperimentConfig, changed("visual.scales", (1, "two", 4)))

    @parameterized.parameters(
        ("training.steps", -1, "training.steps"),
        ("training.micro_batches", 3, "training.micro_batches"),
        ("model.num_heads", 3, "model.num_kv_heads"),
        ("model.head_dim", 7, "model.head_dim"),
        ("model.router.top_k", 99, "model.router.top_k"),
        ("visual.scales", (1, 2, 3), "visual.scales"),
        ("visual.temporal_stride", 3, "visual.temporal_stride"),
        ("sequence.visual_targets", 100000, "sequence.visual_targets"),
        ("data.task_weights", {"text": -1.0}, "data.task_weights.text"),
        ("loss.fixed_weights", {"smell": 1.0}, "loss.fixed_weights.smell"),
        ("generation.top_p", 0.0, "generation.top_p"),
        ("generation.max_text_tokens", 0, "generation.max_text_tokens"),
        ("visual.scales", (2, 4), "visual.scales"),
        ("training.evaluate_rows", 0, "training.evaluate_rows"),
        ("optimizer.learning_rate", float("nan"), "optimizer.learning_rate"),
        ("optimizer.beta1", 1.0, "optimizer.beta1"),
        ("optimizer.eps", 0.0, "optimizer.eps"),
        ("model.dense_width", 0, "model.dense_width"),
        ("audio.max_seconds", 0.0, "audio.max_seconds"),
    )
    def test_value_out_of_range_names_the_key(self, path, value, named):
        with self.assertRaisesRegex(ConfigError, rf"^config key '{named}': found .*, allowed: .+"):
            from_mapping(ExperimentConfig, changed(path, value))

    @parameterized.parameters(
        ("model.vocab_size", 901, "model.vocab_size", "text.vocab_size"),
        ("visual.bits", 9, "model.visual_bits", "visual.bits = 9"),
        ("audio.levels", 9, "model.audio_levels", "audio.levels = 9"),
        ("elastic.min_top_k", 99, "elastic.min_top_k", "model.router.top_k"),
        ("sequence.audio_level_weights", (1.0,), "sequence.audio_level_weights", "empty or [0-9]+ numbers"),
        ("model.elastic", "off", "model.elastic", "bool"),
    )
    def test_contradiction_between_rooms_names_both(self, path, value, named, other):
        with self.assertRaisesRegex(ConfigError, rf"^config key '{named}': found .*, allowed: .*{other}"):
            from_mapping(ExperimentConfig, changed(path, value))

    def test_elastic_sampling_needs_an_elastic_model(self):
        plain = changed("model.elastic", False)
        from_mapping(ExperimentConfig, plain)
        plain["elastic"]["full_depth"] = 0.5
        with self.assertRaisesRegex(ConfigError, "^config key 'model.elastic'"):
            from_mapping(ExperimentConfig, plain)

    @parameterized.parameters(None, 3, [("seed", 1)])
    def test_not_a_mapping(self, value):
        with self.assertRaisesRegex(ConfigError, "allowed: a mapping"):
            from_mapping(ExperimentConfig, value)

    def test_config_error_is_a_user_error_in_one_line(self):
        with self.assertRaises(UserError) as caught:
            from_mapping(ExperimentConfig, changed("training.steps", "many\nlines"))
        self.assertNotIn("\n", str(caught.exception))


class ConfigDictTest(absltest.TestCase):
    def test_edited_like_a_config_file(self):
        config = to_config_dict(ExperimentConfig())
        config.training.steps = 9
        config.data.sources = {"digits": {"world": "digits"}}
        converted = from_mapping(ExperimentConfig, config)
        self.assertEqual(converted.training.steps, 9)
        self.assertEqual(converted.data.sources, {"digits": SourceConfig(world="digits")})
        with self.assertRaises(TypeError):
            config.training.steps = "nine"
        config.model.heads = 4
        with self.assertRaisesRegex(ConfigError, "^config key 'model.heads': unknown"):
            from_mapping(ExperimentConfig, config)

    def test_identity_keys_exist(self):
        config = ExperimentConfig()
        for path in IDENTITY_KEYS:
            node = config
            for part in path.split("."):
                node = getattr(node, part)


class DocstringTest(parameterized.TestCase):
    @parameterized.parameters(
        *(cls for cls in vars(config_package).values() if dataclasses.is_dataclass(cls) and cls is not ExperimentConfig)
    )
    def test_attributes_are_the_fields(self, cls):
        _, _, listed = (cls.__doc__ or "").partition("Attributes:\n")
        names = re.findall(r"^ {6}(\w[\w, \n]*):", listed, re.MULTILINE)
        documented = [name.strip() for group in names for name in group.split(",")]
        self.assertSameElements(documented, [field.name for field in dataclasses.fields(cls)])


class DerivedValuesTest(absltest.TestCase):
    def test_layers(self):
        config = ModelConfig(num_dense_layers=1, num_moe_layers=3, audio_levels=5, levels_per_codec_layer=2)
        self.assertEqual([(s.name, s.count) for s in config.stacks], [("dense", 1), ("moe", 3), ("codec", 3)])
        self.assertEqual(config.num_layers, 7)
        self.assertEqual([(s.kind, s.count) for s in ModelConfig(audio_levels=0).stacks], [("moe", 7)])

    def test_stacks_that_differ(self):
        stacks = ((2, 16, 4), (3, 32, 2), (1, 8, 1))
        config = ModelConfig(
            num_moe_layers=4, audio_levels=4, elastic=False, router=RouterConfig(32, 4), sparse_stacks=stacks
        )
        found = [(s.name, s.kind, s.count, s.router.num_experts, s.router.top_k) for s in config.stacks if s.router]
        expected = [
            ("moe", "moe", 2, 16, 4),
            ("moe_1", "moe", 2, 32, 2),
            ("codec", "codec", 1, 32, 2),
            ("codec_1", "codec", 1, 8, 1),
        ]
        self.assertEqual(found, expected)
        for wrong, key in (
            ({"sparse_stacks": ((6, 32, 40),)}, "sparse_stacks"),
            ({"sparse_stacks": ((5, 32, 4),)}, "sparse_stacks"),
            ({"router": RouterConfig(64, 4)}, "router"),
            ({"elastic": True}, "elastic"),
        ):
            with self.assertRaisesRegex(ConfigError, f"'{key}'"):
                dataclasses.replace(config, **wrong)

    def test_strides(self):
        visual = VisualTokenizerConfig(patch_size=2, channels=(8, 16), scales=(1, 3), image_size=12)
        self.assertEqual((visual.spatial_stride, visual.feature_dim), (4, 16))
        audio = AudioTokenizerConfig(sample_rate=8000, hop_length=80, fold=8)
        self.assertEqual((audio.samples_per_frame, audio.frame_rate), (640, 12.5))

    def test_capacity_defaults_to_the_row(self):
        config = ExperimentConfig().sequence
        self.assertEqual(config.capacity("audio_inputs"), config.length)
        self.assertEqual(dataclasses.replace(config, audio_inputs=9).capacity("audio_inputs"), 9)


if __name__ == "__main__":
    absltest.main()
