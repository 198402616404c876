"""Stages of the quickstart: interrupted ones add up, finished ones count once."""

from pathlib import Path
from unittest import mock

from absl.testing import absltest

from experiments import quickstart


class StagesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.workdir = Path(self.create_tempdir().full_path)
        self.now = 0.0
        self.enter_context(mock.patch.object(quickstart.time, "perf_counter", lambda: self.now))

    def take(self, name: str, seconds: float, error: BaseException | None = None) -> float:
        """One run of the script that spends `seconds` in a stage."""
        stages = quickstart.Stages(self.workdir)
        with stages.stage(name):
            self.now += seconds
            if error:
                raise error
        return stages.seconds[name]

    def test_times(self):
        with self.assertRaises(KeyboardInterrupt):
            self.take("pretrain", 5.0, KeyboardInterrupt())
        self.assertEqual(self.take("pretrain", 7.0), 12.0)
        self.assertEqual(self.take("pretrain", 1.0), 12.0)
        self.assertEqual(self.take("pretrain", 30.0), 30.0)  # made anew after a change
        self.assertEqual(self.take("data", 2.0), 2.0)
        self.assertEqual(quickstart.Stages(self.workdir).seconds, {"pretrain": 30.0, "data": 2.0})

    def test_a_damaged_file_starts_anew(self):
        (self.workdir / "stages.json").write_text("{")
        self.assertEqual(self.take("data", 2.0), 2.0)


if __name__ == "__main__":
    absltest.main()
