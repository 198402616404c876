"""Rules that hold for the whole repository."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
from absl.testing import absltest, parameterized
from flax import nnx

import ernie5_jax
from ernie5_jax.config import ExperimentConfig, from_mapping
from ernie5_jax.model import UnifiedModel

REPOSITORY = Path(__file__).resolve().parents[1]
# cli is the helper that all scripts share.
SCRIPTS = sorted({path.stem for path in (REPOSITORY / "experiments").glob("*.py")} - {"__init__", "cli"})
CONFIGS = sorted({path.stem for path in (REPOSITORY / "configs").glob("*.py")} - {"__init__", "from_checkpoint"})
MODULES = sorted(module.name for module in pkgutil.walk_packages(ernie5_jax.__path__, "ernie5_jax."))
HEAVY = ("flax", "grain", "matplotlib", "optax", "orbax", "sklearn", "tensorflow_datasets", "tensorboardX")

# Spelled in halves so that this file passes its own test.
FORBIDDEN = {
    "a path of the machine it was written on": ("/wo" "rk/", "/ro" "ot/", "/ho" "me/", "/opt/" "wheels"),
    "a folder outside the repository": ("shared/" "spec", "shared/" "data", "shared/" "probes", "shared/" "peers"),
    "how it was written": ("cla" "ude", "anthro" "pic", "sub" "agent", "co" "pilot"),
    "a leftover": ("fix" "me", "<<<<<" "<<", ">>>>>" ">>", "breakpoint" "()"),
}
TEXT_SUFFIXES = ("", ".py", ".md", ".toml", ".txt", ".ipynb", ".html", ".cfg", ".yml", ".yaml", ".json")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


class ImportTest(parameterized.TestCase):
    @parameterized.parameters(MODULES)
    def test_module_can_be_imported(self, name):
        module = importlib.import_module(name)
        self.assertTrue((module.__doc__ or "").strip(), f"{name} has no docstring")

    def test_the_package_is_light(self):
        result = python("-c", "import sys, ernie5_jax; print(*{name.partition('.')[0] for name in sys.modules})")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEmpty(set(result.stdout.split()) & set(HEAVY))


class ScriptTest(parameterized.TestCase):
    @parameterized.parameters(SCRIPTS)
    def test_help_is_light(self, name):
        result = python("-X", "importtime", "-m", f"experiments.{name}", "--help")
        self.assertEqual(result.returncode, 0, result.stderr[-2000:])
        self.assertIn("flags:", result.stdout)
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
        self.assertEmpty(imported & set(HEAVY))


class ConfigFileTest(parameterized.TestCase):
    @parameterized.parameters(CONFIGS)
    def test_config_file_is_valid(self, name):
        config = from_mapping(ExperimentConfig, importlib.import_module(f"configs.{name}").get_config())
        model = nnx.eval_shape(lambda: UnifiedModel(config.model, nnx.Rngs(0)))
        shapes = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self.assertGreater(sum(leaf.size for leaf in shapes), 0)


class TrackedFilesTest(absltest.TestCase):
    def test_no_forbidden_words(self):
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if listing.returncode:
            self.skipTest("not a git checkout")
        found = []
        for name in filter(None, listing.stdout.split("\0")):
            path = REPOSITORY / name
            if path.suffix not in TEXT_SUFFIXES or not path.is_file():
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                for kind, words in FORBIDDEN.items():
                    found += [f"{name}:{number}: {kind}: {word}" for word in words if word in line.lower()]
        self.assertEmpty(found, "\n".join(found))

    def test_requirements_are_constrained(self):
        pins = re.findall(r"^([\w.-]+)==", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
        names = re.findall(r"^([\w.-]+)>=", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE)
        self.assertNotEmpty(names)
        normal = {re.sub(r"[-_.]+", "-", pin).lower() for pin in pins}
        self.assertEmpty({re.sub(r"[-_.]+", "-", name).lower() for name in names} - normal)


if __name__ == "__main__":
    absltest.main()
