"""The benchmark's plumbing: workers take turns and survive mistakes; shapes cost what they say."""

import sys
import textwrap

import jax
from absl.testing import absltest, parameterized

from ernie5_jax.model import init_params
from experiments.benchmarks.ours import model_config
from experiments.benchmarks.worker import Worker
from experiments.benchmarks.workloads import SHAPES

SERVER = """
import time
from experiments.benchmarks.worker import serve

def prepare(task, seconds=0.0):
    print("noise that must not reach the parent")
    if task == "fact":
        return {"found": seconds}
    if task == "end":
        import os
        os._exit(3)
    if task == "broken":
        raise ValueError("no such thing")
    return lambda: time.sleep(seconds)

serve(prepare)
"""


class WorkerTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.worker = Worker("stand-in", [sys.executable, "-c", textwrap.dedent(SERVER)])
        self.addCleanup(self.worker.close)

    def test_times_what_it_was_told_to_prepare(self):
        self.assertGreater(self.worker.ask(prepare="nap", task="sleep", seconds=0.05)["peak_bytes"], 0)
        seconds = self.worker.ask(run="nap", times=3)["seconds"]
        self.assertLen(seconds, 3)
        self.assertGreaterEqual(min(seconds), 0.05)
        self.assertEqual(self.worker.ask(prepare="x", task="fact", seconds=2)["found"], 2)

    def test_goes_on_after_a_mistake(self):
        with self.assertRaisesRegex(RuntimeError, "stand-in.*ValueError: no such thing"):
            self.worker.ask(prepare="x", task="broken")
        with self.assertRaisesRegex(RuntimeError, "KeyError: 'never'"):
            self.worker.ask(run="never")
        self.assertEqual(self.worker.ask(prepare="x", task="fact", seconds=3)["found"], 3)

    def test_a_process_that_ended_is_named(self):
        with self.assertRaisesRegex(RuntimeError, "stand-in.*ended with status 3"):
            self.worker.ask(prepare="x", task="end")
        with self.assertRaisesRegex(RuntimeError, "stand-in.*ended with status 3"):
            self.worker.ask(prepare="x", task="fact", seconds=1)


class ShapeTest(parameterized.TestCase):
    @parameterized.parameters(*SHAPES)
    def test_active_parameters_are_those_of_the_model(self, name):
        """All matrices of the model, of the experts top-k of them; the embedding is read, not multiplied with."""
        shape = SHAPES[name]
        config = model_config(shape)
        params, _ = jax.eval_shape(lambda: init_params(config))
        active = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path({k: params[k] for k in ("backbone", "text_head")}):
            path = jax.tree_util.keystr(path)
            if "norm" not in path:
                share = shape.top_k / shape.experts if "['ffn']['w_" in path and "shared" not in path else 1
                active += leaf.size * share
        self.assertEqual(shape.active_matmul_parameters, active)


if __name__ == "__main__":
    absltest.main()
