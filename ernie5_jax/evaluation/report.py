"""The report: one self-contained HTML page about one run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ernie5_jax.evaluation import charts, media
from ernie5_jax.evaluation.captions import DIGIT_WORDS
from ernie5_jax.evaluation.results import Example, Results
from ernie5_jax.files import write_file

SCORE_NAMES = {
    "image_caption_accuracy": ("Read a picture", "picture in, digit named in the caption"),
    "speech_word_accuracy": ("Hear a word", "unseen voices in, word written down"),
    "image_generation_accuracy": ("Draw a digit", "caption in, picture out"),
    "speech_generation_accuracy": ("Speak a word", "caption in, sound out"),
    "video_direction_accuracy": ("Film a direction", "caption in, movement right"),
    "video_digit_accuracy": ("Film a digit", "caption in, digit right"),
    "video_generation_accuracy": ("Film both", "digit and direction both right"),
}
_MODALITIES = ("text", "image", "video", "audio")
_INPUT_NAMES = {
    "text": "Text tokens",
    "visual": "Pictures and films being made",
    "understand": "Pictures and films being read",
    "audio": "Sound, heard or spoken",
}
_LOSS_UNITS = {
    "text": "nats per token",
    "image": "nats per bit",
    "video": "nats per bit",
    "audio": "nats per code",
}


def build_report(
    results: Results,
    summary: dict[str, Any],
    metrics: Sequence[dict[str, Any]],
    *,
    title: str = "Quickstart",
) -> str:
    """The page as HTML text; it refers to no other file and no address.

    Args:
      results: Scores and examples.
      summary: Content of `summary.json`.
      metrics: Records of the run, see `training.read_metrics`.
      title: Name of the run.
    """
    context = {
        "title": title,
        "summary": summary,
        "scores": _scores(results),
        "tiles": _tiles(results),
        "curves": _curves(metrics),
        "images": _images(results),
        "videos": [_video(example) for example in results.section("video_generation")],
        "real_videos": [_video(example) for example in results.section("video_generation_real")],
        "speech": [_audio(example, results.sample_rate) for example in results.section("speech_generation")],
        "real_speech": [_audio(example, results.sample_rate) for example in results.section("speech_generation_real")],
        "round_trip_speech": [
            _audio(example, results.sample_rate) for example in results.section("speech_generation_round_trip")
        ],
        "captions": [_picture(example) for example in results.section("image_caption")],
        "transcripts": [_audio(example, results.sample_rate) for example in results.section("speech_caption")],
        "texts": [_common(example) for example in results.section("text")],
        "text_bars": _text_bars(results),
        "numbers": results.numbers,
        "experts": _experts(results),
        "timing": _timing(summary),
        "facts": _facts(summary),
    }
    return templates().get_template("report.html.j2").render(context)


def templates() -> jinja2.Environment:
    """The pages of this room; an unknown name in one is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("ernie5_jax.evaluation"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def write_report(path: Path, *args: Any, **kwargs: Any) -> None:
    """Writes `build_report(...)` to `path`."""
    write_file(path, build_report(*args, **kwargs))


def _scores(results: Results) -> list[dict[str, Any]]:
    rows = []
    for key, (name, what) in SCORE_NAMES.items():
        if key in results.scores:
            score = results.scores[key]
            bar = Markup(charts.score_bar(score.value, score.interval, score.ceiling, score.chance))
            rows.append({"name": name, "what": what, "score": score, "interval": score.interval, "bar": bar})
    return rows


def _tiles(results: Results) -> list[dict[str, str]]:
    tiles = []
    for key in SCORE_NAMES:
        if key in results.scores and key != "video_digit_accuracy":
            tiles.append({"name": SCORE_NAMES[key][0], "value": f"{100 * results.scores[key].value:.1f}", "unit": "%"})
    if results.numbers.get("text_bits_per_byte") is not None:
        tiles.append({"name": "Text, bits/byte", "value": f"{results.numbers['text_bits_per_byte']:.2f}", "unit": ""})
    return tiles


def _curves(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    curves = []
    for name in _MODALITIES:
        records = [record for record in metrics if record.get(f"loss_{name}") is not None and "step" in record]
        if records:
            values = [record[f"loss_{name}"] for record in records]
            label = f"{name} loss over steps, from {values[0]:.3f} to {values[-1]:.3f}"
            chart = charts.line_chart([record["step"] for record in records], values, label, name)
            last = float(charts.smoothed(values)[-1])
            curves.append({"name": name, "unit": _LOSS_UNITS[name], "chart": Markup(chart), "last": last})
    return curves


def _picture(example: Example) -> dict[str, Any]:
    return _common(example) | {"source": media.data_uri(media.png(example.value), "image/png")}


def _video(example: Example) -> dict[str, Any]:
    sources = media.movie_sources(example.value)
    still = "" if sources else media.data_uri(media.animation(example.value), "image/png")
    return _common(example) | {"sources": sources, "still": still}


def _audio(example: Example, sample_rate: int) -> dict[str, Any]:
    source = media.data_uri(media.wav(example.value, sample_rate), "audio/wav")
    return _common(example) | {"source": source, "path": media.waveform_path(example.value)}


def _common(example: Example) -> dict[str, Any]:
    return {"caption": _readable(example.caption), "answer": _readable(example.answer), "right": example.right}


def _readable(text: str) -> str:
    """The text as a page may hold it: models write lone surrogates and control characters, judges figures."""
    text = "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return re.sub(r"(?<!\S)[0-9](?!\S)", lambda digit: DIGIT_WORDS[int(digit[0])], text)


def _images(results: Results) -> dict[str, list[dict[str, Any]]]:
    names = {"made": "image_generation", "real": "image_generation_real", "round_trip": "image_generation_round_trip"}
    return {key: [_picture(example) for example in results.section(section)] for key, section in names.items()}


def _text_bars(results: Results) -> Markup:
    names = {"text_bits_per_byte": "this model", "zlib": "zlib", "order0": "byte frequencies"}
    entries = [
        (label, results.numbers[k], f"{results.numbers[k]:.2f}") for k, label in names.items() if k in results.numbers
    ]
    return Markup(charts.bars(entries, highlight="this model")) if entries else Markup("")


def _experts(results: Results) -> list[dict[str, Any]]:
    if not results.routing:
        return []
    experts = len(next(iter(results.routing.values()))[0])
    scale = min(1.0, 4 / experts)
    return [
        {
            "name": _INPUT_NAMES.get(kind, kind),
            "chart": Markup(charts.heatmap(layers, f"expert use, {kind}", scale)),
            "scale": scale,
        }
        for kind, layers in results.routing.items()
    ]


def _timing(summary: dict[str, Any]) -> dict[str, Any]:
    seconds: dict[str, float] = {
        k: v for k, v in (summary.get("seconds") or {}).items() if v is not None and k != "total"
    }
    total = sum(seconds.values())
    entries = [(name.replace("_", " "), value, _duration(value)) for name, value in seconds.items()]
    return {"total": _duration(total), "chart": Markup(charts.bars(entries)) if entries else Markup("")}


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    names = {
        "checkpoint": "Checkpoint",
        "steps": "Training steps",
        "parameters": "Parameters",
        "active_fraction": "Active share of the backbone",
        "experts": "Experts per layer",
        "top_k": "Experts per token",
        "min_normalized_entropy": "Lowest normalised expert entropy",
        "max_violation": "Largest load violation",
        "seed": "Seed",
    }
    facts = [(label, _plain(summary[key])) for key, label in names.items() if summary.get(key) is not None]
    machine = summary.get("machine") or {}
    if machine:
        devices = ", ".join(sorted(set(machine["devices"])))
        facts.append(("Machine", f"{machine['system']}, {machine['cores']} cores, {devices}"))
    facts.append(("Versions", ", ".join(f"{k} {v}" for k, v in (summary.get("versions") or {}).items())))
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
