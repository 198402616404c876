"""A killed run ends as if nothing had happened, and the script that says so would notice if it did not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl.testing import absltest, parameterized

_REPOSITORY = Path(__file__).resolve().parents[2]


def kill_test(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # One device, as the configuration says, not the eight of the tests.
    environment = {**{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}, "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, "-m", "experiments.kill_test", *arguments]
    return subprocess.run(command, cwd=_REPOSITORY, env=environment, capture_output=True, text=True, check=False)


class StandInTest(parameterized.TestCase):
    def run_stand_in(self, fault: str) -> subprocess.CompletedProcess[str]:
        return kill_test("--program=tests.experiments.stand_in_run", "--kills=2", "--steps=60", FAULT=fault)

    def test_a_run_that_keeps_its_promises(self):
        result = self.run_stand_in("")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("2 kills: equal to the uninterrupted run", result.stdout)

    @parameterized.parameters(
        ("metrics", r"step \d+, loss: [\d.e-]+, expected [\d.e-]+"),
        ("checkpoints", r"checkpoint \d+ was lost"),
        ("leftovers", r"left behind: .*checkpoints/\d+\.orbax-checkpoint-tmp"),
        ("crash", r"the (run had ended by itself with exit code 1|last run failed)"),
    )
    def test_a_broken_promise_is_noticed(self, fault, message):
        result = self.run_stand_in(fault)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stderr, f"error: .*{message}")
        self.assertIn("NOT equal", result.stdout)


@pytest.mark.slow
class RealRunTest(absltest.TestCase):
    def test_five_kills(self):
        folder = self.create_tempdir().full_path
        result = kill_test("--kills=5", f"--workdir={folder}")
        log = Path(folder, "killed", "log.txt")
        self.assertEqual(
            result.returncode, 0, result.stdout + result.stderr + (log.read_text()[-2000:] if log.exists() else "")
        )


if __name__ == "__main__":
    absltest.main()
