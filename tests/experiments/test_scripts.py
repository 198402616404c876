"""Every script from its command line, one after the other, with the smallest configuration: what they write opens."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import wave
from pathlib import Path

import numpy as np
import pytest
from absl.testing import absltest
from PIL import Image

from ernie5_jax.audio import load_audio_tokenizer
from ernie5_jax.data import DocumentShards
from ernie5_jax.text import load_text_tokenizer
from ernie5_jax.vision import load_visual_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]

SMALL = """
from configs import tiny


def get_config():
    config = tiny.get_config()
    config.visual.training.steps = 2
    config.audio.training.steps = 2
    config.audio.griffin_lim_iterations = 2
    config.training.steps = 4
    config.training.progress = False
    config.generation.max_text_tokens = 8
    config.generation.max_audio_frames = 8
    config.generation.video_frames = 5
    config.evaluation.judge_steps = 2
    config.evaluation.samples = 4
    config.evaluation.videos = 2
    return config
"""

MINE = """
import small


def get_config():
    config = small.get_config()
    with config.unlocked():
        config.data.sources = {"mine": {"path": "prepared"}}
    return config
"""

ABLATION = """
from configs import elastic_ablation


def get_config():
    config = elastic_ablation.get_config()
    with config.unlocked():
        config.data.sources = {"prose": {"path": "prose.jsonl"}}
    config.text.vocab_size = 384
    config.model.vocab_size = 384
    config.model.num_moe_layers = 4
    config.model.router.num_experts = 16
    config.sequence.length = 64
    config.training.steps = 2
    config.training.batch_rows = 4
    config.training.micro_batches = 2
    config.training.evaluate_rows = 4
    config.training.progress = False
    config.parallel.data = 1
    return config
"""


def write_manifest(folder: Path) -> None:
    """`manifest.jsonl` of documents of every kind, and the files they name."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(6):
        pictures = [Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)) for _ in range(5)]
        pictures[0].save(folder / f"{i}.png")
        pictures[0].save(folder / f"{i}.gif", save_all=True, append_images=pictures[1:], duration=100)
        with wave.open(str(folder / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes((rng.normal(size=6000) * 4000).astype("<i2").tobytes())
        for modality, name in (("image", f"{i}.png"), ("video", f"{i}.gif"), ("audio", f"{i}.wav")):
            caption, split = f"{modality} number {i}", {"split": "test" if i == 5 else "train"}
            asked, medium = {"text": caption, "role": "understand"}, {modality: name, "role": "generate"}
            lines.append({"spans": [asked, medium], "meta": split})
            lines.append({"spans": [{**medium, "role": "understand"}, {"text": caption}], "meta": split})
    lines.append({"spans": [{"text": "prose of many words " * 40}], "meta": {"split_text": True}})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class _Scripts(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "small.py").write_text(SMALL)
        (self.folder / "mine.py").write_text(MINE)
        write_manifest(self.folder)

    def call(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        environment |= {
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{self.folder}",
            "JAX_PLATFORMS": "cpu",
            "ERNIE5_JAX_CACHE": str(REPOSITORY / ".cache" / "tests"),
        }
        command = [sys.executable, "-m", f"experiments.{script}", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def run_script(self, script: str, *arguments: str) -> str:
        result = self.call(script, *arguments)
        self.assertEqual(result.returncode, 0, f"{script} {arguments}: {result.stderr[-2000:]}")
        return result.stdout


@pytest.mark.slow
class ChainTest(_Scripts):
    """Scripts that work on what another one made."""

    def test_all(self):
        with self.subTest("prepare_data"):
            self.check_data()
        with self.subTest("tokenizers"):
            self.check_tokenizers()
        with self.subTest("pretrain"):
            self.check_training()
        with self.subTest("generate"):
            self.check_generation()
        with self.subTest("evaluate"):
            self.check_evaluation()
        with self.subTest("submodels"):
            self.check_submodels()
        with self.subTest("another tokenizer"):
            self.check_exchanged_tokenizer()
        with self.subTest("given tokenizers"):
            self.check_given_tokenizers()

    def check_data(self):
        arguments = ("--config=mine.py", "--manifest=manifest.jsonl", "--out=prepared")
        self.assertIn("37 documents, all good", self.run_script("prepare_data", *arguments, "--check_only"))
        self.assertFalse((self.folder / "prepared").exists())
        self.run_script("prepare_data", *arguments)
        sizes = {split: len(DocumentShards(self.folder / "prepared" / split)) for split in ("train", "test")}
        self.assertEqual(sizes, {"train": 31, "test": 6})

    def check_tokenizers(self):
        self.run_script("train_text_tokenizer", "--input=manifest.jsonl,small.py", "--vocab_size=370", "--out=tok/text")
        tokenizer = load_text_tokenizer(self.folder / "tok" / "text")
        self.assertEqual(tokenizer.decode(tokenizer.encode("image number 3")), "image number 3")
        self.assertLess(len(tokenizer.encode("image number 3")), 2 * len("image number 3"))  # bytes of UTF-16
        for modality in ("visual", "audio"):
            arguments = ("--config=mine.py", "--input=prepared/train", f"--out=tok/{modality}")
            self.run_script(f"train_{modality}_tokenizer", *arguments)
        self.assertEqual(load_visual_tokenizer(self.folder / "tok" / "visual").config.training.steps, 2)
        self.assertEqual(load_audio_tokenizer(self.folder / "tok" / "audio").config.training.steps, 2)

    def check_training(self):
        self.assertIn("abstract step", self.run_script("pretrain", "--config=mine.py", "--dry_run"))
        self.assertIn("step 2 of 4", self.run_script("pretrain", "--config=mine.py", "--workdir=run", "--stop_at=2"))
        self.assertIn("step 4 of 4", self.run_script("pretrain", "--config=mine.py", "--workdir=run"))
        records = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([record["step"] for record in records], [1, 2, 3, 4])
        for record in records:
            fields = ("loss", "tokens_per_second", "compilations", "live_layers", "live_experts", "top_k")
            self.assertEmpty(set(fields) - set(record))
            self.assertGreater(record["loss"], 0)
        self.assertTrue((self.folder / "run" / "checkpoints" / "4" / "files" / "config.json").is_file())

    def check_given_tokenizers(self):
        arguments = ("pretrain", "--config=mine.py", "--config.data.tokenizers=run/tokenizers", "--workdir=taken")
        self.assertIn("step 1 of 4", self.run_script(*arguments, "--stop_at=1"))
        facts = [
            json.loads((self.folder / run / "checkpoints" / step / "files" / "run.json").read_text())["tokenizers"]
            for run, step in (("run", "4"), ("taken", "1"))
        ]
        self.assertEqual(*facts)
        result = self.call(*arguments[:-1], "--workdir=other", "--config.audio.code_dim=12")
        self.assertRegex(result.stderr, r"^error: config key 'audio.code_dim': found 12, allowed: 8 as in data.tokeni")
        self.assertEqual(result.returncode, 1)

    def check_generation(self):
        arguments = ("--checkpoint=run", "--seed=1")
        prompt = "--prompt=image number \U0001f600"
        self.run_script("generate", *arguments, "--to=text", "--image=0.png", "--audio=0.wav", "--out=a.txt")
        (self.folder / "a.txt").read_text(encoding="utf-8", errors="surrogatepass")
        result = self.call("generate", *arguments, "--to=text", "--guidance=2")
        self.assertRegex(result.stderr, "^error: flag --guidance: found 2 with --to=text, allowed: with image")
        self.run_script("generate", *arguments, "--to=image", prompt, "--samples=2", "--guidance=1.5", "--out=a.png")
        for name in ("a_0.png", "a_1.png"):
            with Image.open(self.folder / name) as picture:
                self.assertEqual((picture.format, picture.mode, picture.size), ("PNG", "RGB", (16, 16)))
        self.run_script("generate", *arguments, "--to=video", prompt, "--video=0.gif", "--out=a.gif")
        with Image.open(self.folder / "a.gif") as picture:
            self.assertEqual((picture.format, picture.size), ("GIF", (16, 16)))
        self.run_script("generate", *arguments, "--to=audio", prompt, "--out=new/a.wav")
        with wave.open(str(self.folder / "new" / "a.wav")) as sound:
            self.assertEqual((sound.getframerate(), sound.getnchannels(), sound.getsampwidth()), (8000, 1, 2))

    def check_evaluation(self):
        self.run_script("evaluate", "--checkpoint=run", "--manifest=manifest.jsonl", "--out=scores.json")
        content = json.loads((self.folder / "scores.json").read_text())
        self.assertEqual((content["step"], content["documents"]), (4, 37))
        for name in ("text", "image", "video", "audio"):
            self.assertGreater(content["losses"][f"loss_{name}"], 0)
        tasks = ("image_caption_exact", "speech_caption_exact", "video_caption_exact")
        self.assertSameElements(content["scores"], tasks)
        self.assertEqual(content["scores"]["image_caption_exact"]["n"], 6)

    def check_submodels(self):
        printed = self.run_script("extract_submodel", "--checkpoint=run", "--experts=4", "--top_k=1", "--out=small")
        self.assertIn("held-out loss", printed)
        self.run_script("generate", "--checkpoint=small", "--to=text", "--image=0.png", "--out=small.txt")
        start = f"--config={REPOSITORY / 'configs' / 'from_checkpoint.py'}:small"
        printed = self.run_script("pretrain", start, "--config.training.steps=1", "--workdir=tuned")
        self.assertIn("step 1 of 1", printed)
        printed = self.run_script(
            "extract_submodel", "--checkpoint=run", "--budget=active=0.9,total=0.7", "--select=even", "--out=smaller"
        )
        self.assertIn("chosen", printed)
        for arguments, culprit in (
            (("--budget=active=0.001", "--out=none"), "nearest"),
            (("--budget=half", "--out=none"), "flag --budget"),
            (("--layers=1", "--out=none"), "layers: found 1"),
            (("--out=small",), "small"),
        ):
            result = self.call("extract_submodel", "--checkpoint=run", *arguments)
            self.assertEqual(result.returncode, 1)
            line = result.stderr.splitlines()[-1]
            self.assertRegex(line, "^error: .*allowed: ")
            self.assertIn(culprit, line)
        self.assertFalse((self.folder / "none").exists())
        self.run_script("evaluate_elastic", "--checkpoint=run", "--documents=6", "--out=elastic")
        content = json.loads((self.folder / "elastic" / "elastic.json").read_text())
        self.assertTrue(any(record.get("on_front") for record in content["sizes"]))
        self.assertIn("<svg", (self.folder / "elastic" / "elastic.html").read_text())
        self.assertIn("shared experts", self.run_script("analyze_routing", "--checkpoint=run", "--out=routing"))
        self.assertIn("<svg", (self.folder / "routing" / "routing.html").read_text())

    def check_exchanged_tokenizer(self):
        inside = self.folder / "run" / "checkpoints" / "4" / "files" / "tokenizers" / "text"
        shutil.rmtree(inside)
        shutil.copytree(self.folder / "tok" / "text", inside)
        result = self.call("generate", "--checkpoint=run", "--out=never.txt")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r"^error: checkpoint '[^\n]*another text tokenizer[^\n]*allowed: [^\n]*\n$")
        self.assertFalse((self.folder / "never.txt").exists())


@pytest.mark.slow
class AloneTest(_Scripts):
    """Scripts that start from nothing."""

    def test_quickstart(self):
        self.run_script("quickstart", "--config=small.py", "--workdir=quick")
        summary = json.loads((self.folder / "quick" / "summary.json").read_text())
        for name in ("image_caption_accuracy", "speech_generation_accuracy", "video_direction_accuracy"):
            self.assertEmpty({"value", "n", "ceiling", "chance"} - set(summary[name]))
        page = (self.folder / "quick" / "report.html").read_text()
        self.assertIn("<html", page)
        self.run_script("report", "--workdir=quick", "--out=page.html", "--title=Another")
        self.assertIn("Another", (self.folder / "page.html").read_text())
        self.check_comparison()

    def check_comparison(self):
        path = self.folder / "scores.json"
        self.run_script("evaluate", "--checkpoint=quick", "--samples=2", f"--out={path}")
        content = json.loads(path.read_text())
        scores = {task: content["scores"][task]["value"] for task in content["answers"]}
        for task, answers in content["answers"].items():
            self.assertEqual(sum(answers) / content["scores"][task]["n"], scores[task])
        perfect = {task: [True] * len(answers) for task, answers in content["answers"].items()}
        path.write_text(json.dumps({"answers": perfect}))
        self.run_script("evaluate", "--checkpoint=quick", "--samples=2", f"--baseline={path}", "--out=compared.json")
        kept = json.loads((self.folder / "compared.json").read_text())["kept"]
        self.assertAlmostEqual(kept["value"], sum(scores.values()) / len(scores))
        path.write_text(json.dumps({"answers": {"other_task": [True]}}))
        result = self.call("evaluate", "--checkpoint=quick", "--samples=2", f"--baseline={path}", "--out=unlike.json")
        self.assertRegex(result.stderr, "\nerror: compared scores: found prompts .*allowed: those of the reference")
        self.assertEqual(json.loads((self.folder / "unlike.json").read_text())["scores"], content["scores"])
        for wrong in ("compared.html", "page.html"):
            result = self.call("evaluate", "--checkpoint=quick", f"--baseline={wrong}")
            self.assertRegex(result.stderr, f"^error: flag --baseline: found '{wrong}', allowed: JSON that this script")
        sweep = ("--sizes=5x8x2,5x8x1", "--samples=2", "--documents=4", "--out=swept")
        self.run_script("evaluate_elastic", "--checkpoint=quick", *sweep)
        sizes = json.loads((self.folder / "swept" / "elastic.json").read_text())["sizes"]
        self.assertSameElements(sizes[0]["scores"], content["scores"])
        if "kept" in sizes[0]:
            self.assertEqual(sizes[0]["kept"]["value"], 1.0)

    def test_ablation(self):
        (self.folder / "ablation.py").write_text(ABLATION)
        text = "".join(chr(97 + i * i % 26) + " " * (i % 5 == 0) for i in range(4000))
        lines = [{"spans": [{"text": text}], "meta": {"split_text": True, "split": s}} for s in ("train", "test")]
        (self.folder / "prose.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        given = ("ablation", "--config=ablation.py", "--seeds=1", "--documents=8", "--results=found")
        arguments = (*given, "--workdir=arms")
        self.run_script(*arguments, "--only=all_0")
        self.run_script(*arguments)
        content = json.loads((self.folder / "found" / "ablation.json").read_text())
        self.assertSameElements(
            content["runs"], [f"{arm}_0" for arm in ("static", "all", "depth", "width", "sparsity")]
        )
        for run in content["runs"]:
            losses = json.loads((self.folder / "found" / f"{run}.json").read_text())["losses"]
            self.assertSameElements(losses, ["full", "depth", "width", "k4", "k2", "k1"])
            self.assertTrue(all(len(values) == 8 and min(values) > 0 for values in losses.values()))
        for line in content["table"]:
            self.assertBetween(line["value"], *line["interval"])
        before = (self.folder / "found" / "all_0.json").stat().st_mtime_ns
        self.run_script(*given, "--workdir=elsewhere")  # all losses are there
        self.assertEqual((self.folder / "found" / "all_0.json").stat().st_mtime_ns, before)
        self.assertFalse((self.folder / "elsewhere").exists())
        result = self.call(*arguments, "--only=all_7")
        self.assertRegex(result.stderr, "^error: flag --only: found 'all_7', allowed: static_0, all_0, depth_0")

    def test_benchmark(self):
        out = self.run_script("benchmark", "--suite=moe_smoke", "--rounds=1")
        numbers = json.loads(out.splitlines()[-1])
        self.assertEqual(numbers.pop("suite"), "moe_smoke")
        self.assertSameElements(numbers, ["matmul_gflops", "tokens_per_second", "roof_fraction"])
        self.assertGreater(min(numbers.values()), 0)
        result = self.call("benchmark", "--suite=moe_smoke", "--peer=transformers", "--peer_python=nowhere")
        self.assertRegex(result.stderr, "^error: --peer_python: found no file 'nowhere'")


if __name__ == "__main__":
    absltest.main()
