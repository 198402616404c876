"""Checkpoints: what is kept, what is cleaned, and one-line errors."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from ernie5_jax.training import CheckpointError, Checkpoints, find_checkpoint
from ernie5_jax.training.checkpoint import restore_state

STATE = {"step": jnp.int32(3), "params": {"mtp": {0: {"w": jnp.arange(6.0).reshape(2, 3)}}}, "empty": {}}

FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from experiments import cli
from ernie5_jax.training import Checkpoints

def main(argv):
    checkpoints = Checkpoints(Path(sys.argv[1]), 2, {"config.json": b"{}"})
    checkpoints.save(1, {"x": np.zeros(3, np.float32)})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    checkpoints.save(2, {"x": np.random.default_rng(0).normal(size=100_000)})
    checkpoints.wait()

sys.argv, folder = [sys.argv[0]], sys.argv[1]
sys.argv.append(folder)
try:
    main(None)
except Exception as error:
    sys.exit(cli._report(error))
"""


def abstract(state):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state)


class CheckpointTest(chex.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.workdir = Path(folder.name) / "run"

    def test_latest_and_best_stay_and_are_self_contained(self):
        checkpoints = Checkpoints(self.workdir, 2, {"config.json": b"{}", "tokenizers/text/x": b"abc"})
        self.assertIsNone(checkpoints.latest)
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, None)):
            checkpoints.save(step, {**STATE, "step": jnp.int32(step)}, loss)
        checkpoints.wait()
        self.assertEqual((checkpoints.latest, checkpoints.best), (5, 2))
        checkpoints.close()
        folder = self.workdir / "checkpoints"
        self.assertEqual({f.name for f in folder.iterdir()}, {"2", "4", "5"})
        self.assertEqual((folder / "2" / "files" / "tokenizers" / "text" / "x").read_bytes(), b"abc")
        chex.assert_trees_all_equal(restore_state(folder / "4", abstract(STATE)), {**STATE, "step": jnp.int32(4)})

    def test_values_are_those_of_the_call_even_if_buffers_are_reused(self):
        checkpoints = Checkpoints(self.workdir, 2, {"config.json": b"{}"})
        add = jax.jit(lambda x: x + 1, donate_argnums=0)
        x = jnp.zeros((1000, 100))
        checkpoints.save(1, {"x": x})
        for _ in range(20):
            x = add(x)
        checkpoints.wait()
        self.assertEqual(float(jnp.abs(checkpoints.restore(1, abstract({"x": x}))["x"]).max()), 0.0)
        checkpoints.close()

    def test_leftovers_of_a_dead_run_are_removed(self):
        stale = self.workdir / "checkpoints" / "7.orbax-checkpoint-tmp"
        (stale / "state").mkdir(parents=True)
        Checkpoints(self.workdir, 1, {}).close()
        self.assertFalse(stale.exists())

    def test_parts_may_be_left_out(self):
        checkpoints = Checkpoints(self.workdir, 1, {"config.json": b"{}"})
        checkpoints.save(1, STATE)
        checkpoints.wait()
        wanted = {**abstract(STATE), "params": jax.tree.map(lambda _: ..., STATE["params"])}
        self.assertEqual(int(checkpoints.restore(1, wanted)["step"]), 3)
        checkpoints.close()

    def test_full_disk_ends_in_one_line_and_leaves_nothing(self):
        result = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(self.workdir)], capture_output=True, text=True, check=False
        )
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertLen(result.stderr.splitlines(), 1, result.stderr)
        self.assertIn("cannot be written", result.stderr)
        self.assertEqual([f.name for f in (self.workdir / "checkpoints").iterdir()], ["1"])

    def test_damaged_checkpoint_is_named(self):
        checkpoints = Checkpoints(self.workdir, 1, {"config.json": b"{}"})
        checkpoints.save(1, STATE)
        checkpoints.wait()
        checkpoints.close()
        state = self.workdir / "checkpoints" / "1" / "state"
        for file in state.rglob("*"):
            if file.is_file():
                file.write_bytes(b"damaged")
        with self.assertRaisesRegex(CheckpointError, "checkpoints/1': cannot be read"):
            restore_state(self.workdir / "checkpoints" / "1", abstract(STATE))

    @parameterized.parameters("d", "manifest.ocdbt", "_METADATA")
    def test_a_missing_part_is_named(self, part):
        checkpoints = Checkpoints(self.workdir, 1, {"config.json": b"{}"})
        checkpoints.save(1, STATE)
        checkpoints.wait()
        checkpoints.close()
        lost = self.workdir / "checkpoints" / "1" / "state" / part
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
        with self.assertRaisesRegex(CheckpointError, f"checkpoints/1': found no state/{part}"):
            restore_state(self.workdir / "checkpoints" / "1", abstract(STATE))

    def test_other_shapes_are_refused(self):
        checkpoints = Checkpoints(self.workdir, 1, {"config.json": b"{}"})
        checkpoints.save(1, {"w": jnp.ones((2, 3))})
        checkpoints.wait()
        checkpoints.close()
        with self.assertRaises(CheckpointError):
            restore_state(self.workdir / "checkpoints" / "1", abstract({"w": jnp.ones((3, 3)), "b": jnp.ones(2)}))

    def test_a_missing_router_bias_is_refused(self):
        """Report 22; and what is there comes back exactly."""
        checkpoints = Checkpoints(self.workdir, 2, {"config.json": b"{}"})
        whole = {**STATE, "router_bias": jnp.asarray([[0.1, -0.3, 0.2]])}
        for step, state in enumerate((STATE, whole), 1):
            checkpoints.save(step, state)
        checkpoints.wait()
        checkpoints.close()
        with self.assertRaises(CheckpointError):
            restore_state(self.workdir / "checkpoints" / "1", abstract(whole))
        chex.assert_trees_all_equal(restore_state(self.workdir / "checkpoints" / "2", abstract(whole)), whole)


class FindTest(parameterized.TestCase):
    def test_every_way_to_name_one(self):
        with tempfile.TemporaryDirectory() as name:
            workdir = Path(name)
            for step in (9, 10):
                (workdir / "checkpoints" / str(step) / "files").mkdir(parents=True)
                (workdir / "checkpoints" / str(step) / "state").mkdir()
                (workdir / "checkpoints" / str(step) / "files" / "config.json").write_text("{}")
            newest = workdir / "checkpoints" / "10"
            for path in (workdir, workdir / "checkpoints", newest):
                self.assertEqual(find_checkpoint(path), newest)
            nine = workdir / "checkpoints" / "9"
            self.assertEqual(find_checkpoint(str(nine)), nine)
            with self.assertRaisesRegex(CheckpointError, "none found"):
                find_checkpoint(workdir / "elsewhere")


if __name__ == "__main__":
    absltest.main()
