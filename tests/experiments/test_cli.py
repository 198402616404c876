"""What a user sees of a script that goes wrong: one line, exit code 1, no traceback."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
from absl.testing import absltest, parameterized

from experiments import cli

REPOSITORY = Path(__file__).resolve().parents[2]

CONFIG = """
from ernie5_jax.config import ExperimentConfig, to_config_dict


def get_config():
    return to_config_dict(ExperimentConfig())
"""

SCRIPT = '''
"""A script that says what it was given."""

import sys

from absl import flags

from experiments import cli

CONFIG = cli.define_config()
DO = flags.DEFINE_string("do", "print", "What to do.")


def main(argv):
    import jax

    config = cli.load_config(CONFIG)
    if DO.value == "memory":
        import os

        return print(os.environ["GLIBC_TUNABLES"])
    if DO.value == "open":
        open("missing.txt")
    if DO.value == "crash":
        raise RuntimeError("a bug")
    print(config.training.steps, jax.device_count(), jax.config.jax_compilation_cache_dir)


if __name__ == "__main__":
    cli.run(main)
'''


class CliTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.create_tempdir().full_path)
        self.environment = {}
        (self.folder / "config.py").write_text(CONFIG)
        (self.folder / "contradictory.py").write_text(CONFIG.replace("Config())", "Config(), seed=1)"))
        (self.folder / "script.py").write_text(SCRIPT)

    def script(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        ours = ("XLA_FLAGS", "ERNIE5_JAX_TRACEBACK", "GLIBC_TUNABLES")
        environment = {key: value for key, value in os.environ.items() if key not in ours} | self.environment
        environment |= {"PYTHONPATH": str(REPOSITORY), "ERNIE5_JAX_CACHE": str(self.folder / "cache")}
        command = [sys.executable, "script.py", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def test_override_emulated_devices_and_cache(self):
        result = self.script("--config=config.py", "--config.training.steps=5", "--config.parallel.data=3")
        self.assertEqual(result.returncode, 0, result.stderr)
        steps, devices, cache = result.stdout.split()
        self.assertEqual((steps, devices), ("5", "3"))
        self.assertStartsWith(cache, str(self.folder / "cache"))

    @parameterized.parameters(({}, cli.KEEP_FREED), ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, None))
    def test_freed_memory_stays_unless_the_user_says_otherwise(self, environment, expected):
        if platform.libc_ver()[0] != "glibc" or jax.default_backend() != "cpu":
            self.skipTest("only CPUs with glibc")
        self.environment = environment
        result = self.script("--config=config.py", "--do=memory")
        self.assertEqual(result.stdout.strip(), expected or environment["GLIBC_TUNABLES"], result.stderr)

    def test_help(self):
        result = self.script("--help")
        self.assertEqual(result.returncode, 0)
        self.assertStartsWith(result.stdout, "A script that says what it was given.")
        self.assertIn("--do: What to do. (default: 'print')", result.stdout)

    @parameterized.parameters(
        ([], "--config"),
        (["--config=none.py"], "flag --config: found 'none.py', allowed: an existing Python file"),
        (["--config", "none.py"], "flag --config: found 'none.py', allowed: an existing Python file"),
        (["--config=contradictory.py"], "contradictory.py: .*to_config_dict"),
        (["--config=config.py", "--wat=1"], "unknown command line flag 'wat'"),
        (["--config=config.py", "wat"], "argument 'wat'"),
        (["--config=config.py", "--config.training.stepz=4"], "config key 'training.stepz': unknown"),
        (["--config=config.py", "--config.trainin.steps=4"], "config key 'trainin.steps': unknown"),
        (["--config=config.py", "--config.training.steps=many"], "config.training.steps=many"),
        (["--config=config.py", "--config.training.steps=-4"], "config key 'training.steps': found -4, allowed: >= 1"),
        (["--config=config.py", "--do=open"], "missing.txt"),
    )
    def test_bad_input_is_one_line(self, arguments, message):
        result = self.script(*arguments)
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stdout, "")
        self.assertRegex(result.stderr, rf"(?i)^error: [^\n]*{message}[^\n]*\n$")

    def test_a_bug_keeps_its_traceback(self):
        result = self.script("--config=config.py", "--do=crash")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("Traceback", result.stderr)


if __name__ == "__main__":
    absltest.main()
