"""The train step and generation compile for a real TPU slice, on a machine without one."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl.testing import absltest, parameterized

_REPOSITORY = Path(__file__).resolve().parents[2]


@functools.cache
def _compile(what: str) -> dict[str, int]:
    """In a process of its own: libtpu sets up once per process and stays."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.parallel.compile_for_tpu", what],
        cwd=_REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
class TpuCompileTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if importlib.util.find_spec("libtpu") is None:
            self.skipTest("libtpu, the TPU compiler, cannot be imported: `make test-slow` provides it")

    def test_train_step_with_whole_parameters(self):
        found = _compile("train/replicated/float32")
        self.assertGreater(found["peak"], 0)
        self.assertGreater(found["all-reduce"], 0)  # gradients
        self.assertEqual(found["bfloat16"], 0)

    def test_train_step_with_split_parameters(self):
        found, whole = _compile("train/fsdp/bfloat16"), _compile("train/replicated/float32")
        self.assertGreater(found["peak"], 0)
        self.assertGreater(found["all-gather"], 0)  # parameters
        self.assertGreater(found["reduce-scatter"] + found["all-reduce"], 0)  # gradients
        self.assertEqual(found["bfloat16"], 1)
        # Float32 parameters, moments and average in both; a few small arrays are not split.
        self.assertLess(found["arguments"], 0.3 * whole["arguments"])

    @parameterized.parameters("v5e:2x4", "v5p:2x2x1", "v6e:2x2")
    def test_kernels(self, topology):
        for what, kernels in (("attention", "pallas"), ("attention", "auto"), ("sparse", "megablox")):
            with self.subTest(kernel=what, backend=kernels):
                self.assertGreater(_compile(f"{what}/{topology}/{kernels}")["kernels"], 0)
        self.assertGreater(_compile(f"sparse/{topology}/ragged")["peak"], 0)

    def test_generation_in_bfloat16(self):
        found = _compile("generate")
        self.assertGreater(found["arguments"], 0)
        self.assertGreater(found["peak"], 0)
        self.assertEqual(found["bfloat16"], 1)


if __name__ == "__main__":
    absltest.main()
