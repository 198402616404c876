"""Which checkpoints go with which configuration and tokenizers."""

import json
import tempfile
from pathlib import Path

from absl.testing import absltest, parameterized

from ernie5_jax.config import ConfigError, ExperimentConfig, from_mapping, to_plain
from ernie5_jax.training import CheckpointError
from ernie5_jax.training.identity import check_resumable, check_tokenizers


class ConfigTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.workdir = Path(folder.name)
        self.files = self.workdir / "checkpoints" / "7" / "files"
        self.files.mkdir(parents=True)

    def write(self, **changes) -> None:
        config = to_plain(ExperimentConfig())
        del config["audio"]["split"]  # as before this key existed
        (self.files / "config.json").write_text(json.dumps(config | changes))

    def test_a_key_younger_than_the_checkpoint_had_its_default(self):
        self.write()
        check_resumable(self.workdir, ExperimentConfig())
        with self.assertRaisesRegex(ConfigError, "'audio.split': found True, allowed: False as in the checkpoint"):
            check_resumable(self.workdir, from_mapping(ExperimentConfig, {"audio": {"split": True}}))

    def test_fewer_steps_than_the_folder_has_behind_it(self):
        self.write()
        check_resumable(self.workdir, from_mapping(ExperimentConfig, {"training": {"steps": 7}}))
        with self.assertRaisesRegex(ConfigError, "'training.steps': found 6, allowed: at least 7, the steps that"):
            check_resumable(self.workdir, from_mapping(ExperimentConfig, {"training": {"steps": 6}}))

    def test_what_is_no_configuration_is_named(self):
        self.write(nonsense=1)
        with self.assertRaisesRegex(CheckpointError, "config.json': cannot be read .*nonsense"):
            check_resumable(self.workdir, ExperimentConfig())


class TokenizersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.checkpoint = Path(folder.name) / "7"
        (self.checkpoint / "files").mkdir(parents=True)

    def write(self, text: str) -> None:
        (self.checkpoint / "files" / "run.json").write_text(text)

    def test_equal_ones_and_those_of_older_checkpoints_pass(self):
        self.write(json.dumps({"tokenizers": {"text": "a", "audio": "b"}}))
        check_tokenizers(self.checkpoint, {"text": "a", "audio": "b"})
        self.write("{}")
        check_tokenizers(self.checkpoint, {"text": "a"})

    def test_another_one_is_named(self):
        self.write(json.dumps({"tokenizers": {"text": "a", "audio": "b"}}))
        with self.assertRaisesRegex(CheckpointError, r"7': found another audio tokenizer \(c\), allowed: .*\(b\)$"):
            check_tokenizers(self.checkpoint, {"text": "a", "audio": "c"})

    @parameterized.parameters(None, "{", "[]")
    def test_damaged_facts_are_named(self, text):
        if text is not None:
            self.write(text)
        with self.assertRaisesRegex(CheckpointError, r"run.json': cannot be read .*, allowed: an intact run.json"):
            check_tokenizers(self.checkpoint, {"text": "a"})


if __name__ == "__main__":
    absltest.main()
