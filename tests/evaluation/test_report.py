"""The page is whole, self-contained and says what the results say; media decode to what went in."""

import html.parser
import io
import re
from pathlib import Path

import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.evaluation import Example, Results, Score, charts, elastic_report, media, report, summary

_VOID = {"meta", "link", "img", "source", "br", "input"}


class Page(html.parser.HTMLParser):
    """Collects tags and attributes; fails on tags that are not closed in order (SVG shapes may close themselves)."""

    def __init__(self, text: str):
        super().__init__()
        self.stack, self.tags, self.words = [], [], []
        self.feed(text)
        assert not self.stack, self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, tag

    def handle_data(self, data):
        self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def results() -> Results:
    rng = np.random.default_rng(0)
    image = lambda: rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)  # noqa: E731
    video = lambda: np.stack([image() for _ in range(5)])  # noqa: E731
    wave = lambda: rng.normal(size=800).astype(np.float32) / 4  # noqa: E731
    examples = [
        Example("image_generation", "image", image(), "a handwritten two", "7", False),
        Example("image_generation", "image", image(), "a handwritten one", "1", True),
        Example("image_generation_real", "image", image(), "2"),
        Example("image_generation_round_trip", "image", image(), "2"),
        Example("video_generation", "video", video(), "two moves left", "2 left", True),
        Example("video_generation_real", "video", video(), "3 up"),
        Example("speech_generation", "audio", wave(), "the word two", "2", True),
        Example("image_caption", "image", image(), "a handwritten <two>", "a handwritten & six", False),
        Example("speech_caption", "audio", wave(), "the word two", "the word two", True),
        Example("text", "text", np.zeros(0), "Once", " upon\ud8a6 a\x00 time"),
    ]
    return Results(
        "digits",
        scores={"image_generation_accuracy": Score(0.957, 300, 0.972, 0.1, 0.986)},
        numbers={
            "image_variety": 0.61,
            "near_duplicates": 0.01,
            "text_bits_per_byte": 2.71,
            "zlib": 2.6,
            "order0": 4.4,
        },
        routing={"text": [[0.25] * 4, [0.1, 0.2, 0.3, 0.4]]},
        examples=examples,
        sample_rate=8000,
    )


class ReportTest(parameterized.TestCase):
    def page(self, results_, metrics):
        run = summary.summarize(results_, {"checkpoint": "runs/x", "seconds": {"data": 3.0, "pretrain": 125.0}})
        return report.build_report(results_, run, metrics, title="A <run>")

    def test_page(self):
        metrics = [{"step": s, "loss_text": 6 / (s + 1), "loss_audio": None} for s in range(5)]
        text = self.page(results(), metrics)
        page = Page(text)
        self.assertEqual([page.count(tag) for tag in ("video", "audio", "img")], [2, 2, 5])
        for name, value in [(a, v) for _, attrs in page.tags for a, v in attrs.items()]:
            if name in ("src", "href"):
                self.assertRegex(value, "^(data:|#)")
        self.assertNotRegex(text, r"https?://|url\(")
        words = " ".join(" ".join(page.words).split())
        for expected in (
            "95.7",
            "97.2",
            "98.6",
            "2 min 05 s",
            "2.71",
            "Text loss",
            "a handwritten & six",
            "read seven",
            "A <run>",
            "upon\ufffd a\ufffd time",
        ):
            self.assertIn(expected, words)
        self.assertNotIn("Audio loss", words)

    def test_page_of_an_empty_run(self):
        page = Page(self.page(Results("digits"), []))
        self.assertEqual(page.count("section"), 2)

    def test_writing_leaves_only_the_page(self):
        folder = Path(self.create_tempdir().full_path)
        report.write_report(folder / "report.html", results(), summary.summarize(results(), {}), [])
        self.assertEqual([path.name for path in folder.iterdir()], ["report.html"])


class ElasticReportTest(parameterized.TestCase):
    KEPT = {"value": 0.977, "interval": (0.955, 1.001), "prompts": 1500}  # noqa: RUF012

    @parameterized.parameters(
        ({}, 1, ""),
        ({"mean_score": 0.797}, 2, "79.7"),
        ({"mean_score": 0.797, "kept": KEPT}, 2, "97.7 (95.5-100.1)"),
    )
    def test_scores_and_what_is_kept_are_shown_where_they_are_known(self, scores, pictures, shown):
        size = {"layers": 9, "experts": 32, "top_k": 8, "backbone_active": 1000, "backbone_total": 3000, "loss": 8.25}
        path = Path(self.create_tempdir().full_path) / "elastic.html"
        records = [{**size, "positions_per_second": 12.0, "on_front": True, **scores} for _ in range(2)]
        elastic_report.write_elastic_report(path, {"select": "usage", "sizes": records})
        page = Page(path.read_text())
        self.assertLen([tag for tag, _ in page.tags if tag == "svg"], pictures)
        self.assertIn(shown, path.read_text())
        self.assertIn("8.2500", path.read_text())


class MediaTest(parameterized.TestCase):
    @parameterized.parameters("vp9", "h264")
    def test_movie(self, codec):
        import av
        from av.container import InputContainer

        video = np.stack([np.full((16, 16, 3), level, np.uint8) for level in (20, 120, 220, 60, 200)])
        with av.open(io.BytesIO(media.movie(video, codec))) as container:
            assert isinstance(container, InputContainer)
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        self.assertEqual((len(frames), frames[0].shape), (5, (128, 128, 3)))
        np.testing.assert_allclose([frame.mean() for frame in frames], (20, 120, 220, 60, 200), atol=4)

    def test_wav_and_png(self):
        import soundfile
        from PIL import Image

        wave = np.sin(np.arange(300) / 5).astype(np.float32) * 1.5
        samples, rate = soundfile.read(io.BytesIO(media.wav(wave, 8000)))
        self.assertEqual(rate, 8000)
        np.testing.assert_allclose(samples, np.clip(wave, -1, 1), atol=1e-4)
        picture = np.random.default_rng(0).integers(0, 255, (5, 4, 3)).astype(np.uint8)
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(media.png(picture)))), picture)

    def test_enlarged_sides_are_even(self):
        self.assertEqual(media.enlarge(np.zeros((1, 15, 13, 3), np.uint8)).shape, (1, 120, 104, 3))
        self.assertEqual(media.enlarge(np.zeros((1, 17, 17, 3), np.uint8)).shape, (1, 136, 136, 3))
        self.assertEqual(media.enlarge(np.zeros((1, 256, 200, 3), np.uint8)).shape, (1, 256, 200, 3))


class ChartsTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, 10, [0, 2.5, 5, 7.5, 10]),
        (0.31, 0.7, [0.4, 0.5, 0.6, 0.7]),
        (0, 1200, [0, 500, 1000]),
    )
    def test_ticks(self, low, high, expected):
        self.assertEqual(charts.nice_ticks(low, high), expected)

    def test_smoothing(self):
        np.testing.assert_allclose(charts.smoothed([1, 2, 3, 4, 10], share=0.4), [1.5, 2, 3, 17 / 3, 7])

    def test_line_chart_leaves_gaps_out(self):
        chart = charts.line_chart([0, 1, 2, 3], [4.0, None, float("nan"), 2.0], "x", "text")
        points = re.findall(r'class="raw" points="([^"]*)"', chart)
        self.assertLen(points[0].split(), 2)
        self.assertEqual(charts.line_chart([0], [None], "x", "text"), "")


if __name__ == "__main__":
    absltest.main()
