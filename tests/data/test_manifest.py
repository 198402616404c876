"""Manifests: every bad line is listed at once, and nothing is written for a bad manifest."""

import json
import os
import subprocess
import sys
import wave
from pathlib import Path

import chex
import numpy as np
import soundfile
from absl.testing import absltest
from PIL import Image

from ernie5_jax.data import ManifestError, check_manifest, media, prepare_manifest
from ernie5_jax.sequence import EncodedAudio, EncodedText, EncodedVisual
from ernie5_jax.testing import tiny_experiment_config

REPOSITORY = Path(__file__).resolve().parents[2]


class ManifestTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.create_tempdir().full_path)
        pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        self.pixels = pixels
        (self.folder / "good.png").write_bytes(media.encode_png(pixels))
        (self.folder / "cut.png").write_bytes(media.encode_png(pixels)[:100])
        self.samples = (np.round(np.random.default_rng(1).uniform(-1, 1, 100) * 32767) / 32768).astype(np.float32)
        soundfile.write(self.folder / "good.wav", self.samples, 1000)
        (self.folder / "cut.wav").write_bytes((self.folder / "good.wav").read_bytes()[:100])
        np.save(self.folder / "words.npy", np.array(["a", "b"]))
        np.save(self.folder / "ones.npy", np.ones(1))
        np.save(self.folder / "high.npy", np.full((2, tiny_experiment_config().audio.levels), 99))
        np.savez(self.folder / "two.npz", a=np.zeros(1), b=np.zeros(1))
        with wave.open(str(self.folder / "empty.wav"), "wb") as file:
            file.setparams((1, 2, 1000, 0, "NONE", ""))
        for frames in (5, 6, 97):
            pictures = [Image.fromarray(np.full((8, 8, 3), 2 * t, np.uint8)) for t in range(frames)]
            pictures[0].save(self.folder / f"{frames}.gif", save_all=True, append_images=pictures[1:])

    def write(self, *lines) -> Path:
        path = self.folder / "m.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    def test_all_bad_lines_are_listed_at_once(self):
        spans = lambda *spans, **more: {"spans": list(spans), **more}  # noqa: E731
        cases = [
            (spans({"text": "fine"}), None),
            (spans({"image": "cut.png", "role": "generate"}), r"span 0 image 'cut\.png': found a damaged file"),
            (spans({"text": "a"}, {"audio": "cut.wav", "role": "generate"}), r"span 1 audio 'cut\.wav': .*truncated"),
            (spans({"audio": "empty.wav", "role": "understand"}), r"empty\.wav': found 0 samples"),
            (spans({"video": "6.gif", "role": "generate"}), r"6\.gif': found T = 6 frames, allowed: T = 1 mod 4"),
            (spans({"text": ""}), "span 0 text: found an empty string, allowed: at least one character"),
            ("", None),
            ("{not json", "line: found text that is not JSON"),
            (spans({"image": "none.png", "role": "understand"}), "none.png': found no such file"),
            (spans({"text": "a"}, extra=1), "document: found unknown key 'extra', allowed: spans, meta"),
            (spans({"text": "a", "colour": 1}), "span 0: found unknown key 'colour', allowed: text, role"),
            (spans({"image": "good.png", "role": "draw"}), "role: found 'draw', allowed: generate, understand"),
            (spans({"image": "good.png"}), "role: found None"),
            (spans(), "spans: found .*, allowed: a list of at least one span"),
            (spans({"smell": "x", "role": "generate"}), "found none of the keys text, image, video, audio"),
            ("[1]", "allowed: an object with spans"),
            (spans({"text": 3}), "span 0 text: found 3, allowed: a string"),
            (spans({"text": "a"}, meta={"split": "half"}), "meta split: found 'half', allowed: train, test"),
            (
                spans({"video": "97.gif", "role": "generate"}),
                r"document: .*needs 129 positions, .*sequence\.length' = 96",
            ),
            (spans({"text": {"ids": [-1], "num_bytes": 1}}), "allowed: ids"),
            (spans({"text": {"ids": [3], "num_bytes": 1}}), r"allowed: ids \(a list of integers 10 \.\.\. \d+\)"),
            (spans({"text": {"ids": [2**40], "num_bytes": 1}}), "allowed: ids"),
            (spans({"image": {"bits": "words.npy"}, "role": "generate"}), "words.npy': found <U1, allowed: one array"),
            (spans({"image": {"bits": "two.npz"}, "role": "generate"}), "two.npz': found an .npz file"),
            (spans({"image": {"bits": "good.png"}, "role": "generate"}), "good.png.: found .*, allowed: an .npy file"),
            (spans({"image": {"bits": "ones.npy"}, "role": "generate"}), r"found shape \[1\], allowed: 3 axes that"),
            (spans({"audio": {"codes": "high.npy"}, "role": "generate"}), r"found values 99 \.\.\. 99, allowed: 0"),
            (
                spans({"image": {"features": "ones.npy"}, "role": "understand"}),
                r"found shape \[1\], allowed: 5 axes that end in 1, \d+, none 0",
            ),
            (spans({"image": "good.png", "role": "generate"}, meta={"split_text": True}), "in a document of one"),
            (spans({"image": "a\0b.png", "role": "generate"}), "embedded null byte"),
            (spans({"image": ".", "role": "generate"}), "found no readable file .*, allowed: an existing file"),
            ("[" * 100_000, "line: found text that is not JSON"),
            (spans({"text": "a"}, meta={"task": 3}), "meta task: found 3, allowed: a string"),
        ]
        path = self.write(*(line for line, _ in cases))
        with self.assertRaises(ManifestError) as caught:
            prepare_manifest(path, tiny_experiment_config(), self.folder / "out", progress=False)
        expected = {number: why for number, (_, why) in enumerate(cases, 1) if why}
        self.assertEqual([problem.line for problem in caught.exception.problems], list(expected))
        for problem in caught.exception.problems:
            self.assertRegex(str(problem), expected[problem.line])
        self.assertFalse((self.folder / "out").exists())

    def test_good_documents_arrive_whole(self):
        codes, bits = np.arange(6).reshape(2, 3), np.ones((1, 5, 4), np.int8)
        np.save(self.folder / "codes.npy", codes)
        np.save(self.folder / "bits.npy", bits)
        path = self.write(
            {"spans": [{"text": "a \ud800 ä", "role": "understand"}, {"image": "good.png", "role": "generate"}]},
            {"spans": [{"audio": "good.wav", "role": "understand"}, {"text": "hm"}], "meta": {"split": "test", "n": 1}},
            {
                "spans": [
                    {"video": "5.gif", "role": "understand"},
                    {"audio": {"codes": "codes.npy"}, "role": "generate"},
                ]
            },
            {
                "spans": [
                    {"text": {"ids": [97, 98], "num_bytes": 2}},
                    {"image": {"bits": "bits.npy"}, "role": "generate"},
                ]
            },
        )
        parts = prepare_manifest(path, tiny_experiment_config(), self.folder / "out", progress=False)
        self.assertEqual({split: len(part) for split, part in parts.items()}, {"train": 3, "test": 1})
        first, third, fourth = parts["train"]
        self.assertEqual(first.spans[0].value, "a \ud800 ä")
        chex.assert_trees_all_equal(first.spans[1].value, self.pixels)
        self.assertEqual(first.meta, {"source": "m.jsonl line 1", "task": "image_generation"})
        (second,) = parts["test"]
        chex.assert_trees_all_close(second.spans[0].value, self.samples, atol=0)
        self.assertEqual(second.spans[1].role, "generate")
        self.assertEqual(second.meta["n"], 1)
        self.assertEqual(second.meta["task"], "speech_caption")
        chex.assert_shape(third.spans[0].value, (5, 8, 8, 3))
        self.assertIsInstance(third.spans[1].value, EncodedAudio)
        chex.assert_trees_all_equal(third.spans[1].value.codes, codes.astype(np.int32))
        self.assertIsInstance(fourth.spans[0].value, EncodedText)
        self.assertIsInstance(fourth.spans[1].value, EncodedVisual)
        chex.assert_trees_all_equal(fourth.spans[1].value.bits, bits)
        self.assertIsNone(fourth.spans[1].value.latents)

    def test_missing_and_empty_manifest(self):
        with self.assertRaisesRegex(ValueError, "no such file"):
            check_manifest(self.folder / "none.jsonl", tiny_experiment_config(), progress=False)
        with self.assertRaisesRegex(ValueError, "no lines"):
            check_manifest(self.write(), tiny_experiment_config(), progress=False)

    def test_script_lists_bad_lines_and_fails_without_traceback(self):
        path = self.write("{", {"spans": [{"text": ""}]})
        arguments = [sys.executable, "-m", "experiments.prepare_data", f"--manifest={path}", f"--out={self.folder}/out"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        result = subprocess.run(
            [*arguments, "--config=configs/tiny.py"],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(result.returncode, 1)
        self.assertIn("line 1: line: found text that is not JSON", result.stderr)
        self.assertIn("line 2: span 0 text", result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertFalse((self.folder / "out").exists())


if __name__ == "__main__":
    absltest.main()
