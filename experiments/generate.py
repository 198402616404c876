"""Generates text, an image, a video or audio from a checkpoint.

    python -m experiments.generate --checkpoint=RUN --prompt="a handwritten three" --to=image --out=three.png
    python -m experiments.generate --checkpoint=RUN --image=three.png --to=text
    python -m experiments.generate --checkpoint=RUN --prompt="the word two" --to=audio --out=two.wav
    python -m experiments.generate --checkpoint=RUN --prompt="the digit one moves left" --to=video --out=one.gif

Media given by --image, --video and --audio come before the prompt, to be understood.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Run folder or one of its checkpoints.", required=True)
_PROMPT = flags.DEFINE_string("prompt", "", "Text before the answer.")
_TO: flags.FlagHolder[Any] = flags.DEFINE_enum(
    "to", "text", ["text", "image", "video", "audio"], "Modality of the answer."
)
_IMAGE = flags.DEFINE_string("image", "", "Picture to understand.")
_VIDEO = flags.DEFINE_string("video", "", "Video to understand (gif, mp4).")
_AUDIO = flags.DEFINE_string("audio", "", "Sound to understand (wav, flac).")
_SEED = cli.define_seed("Of all draws.")
_SAMPLES = flags.DEFINE_integer("samples", 1, "Answers to draw; --out gets a number before its ending.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "", "File to write: png, gif, mp4, wav or txt; empty prints text, else picks a name.")
_GUIDANCE = flags.DEFINE_float("guidance", None, "Classifier-free guidance scale; empty takes the checkpoint's.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Of the answer; empty takes the checkpoint's.")

ENDINGS = {"text": (".txt",), "image": (".png",), "video": (".gif", ".mp4"), "audio": (".wav",)}


def main(argv):
    del argv
    from ernie5_jax.errors import UserError

    to = _TO.value
    out = Path(_OUT.value or f"generated{ENDINGS[to][0]}")
    if out.suffix.lower() not in ENDINGS[to]:
        raise UserError(f"flag --out: found {str(out)!r}, allowed for --to={to}: {' or '.join(ENDINGS[to])}")

    if to == "text" and _GUIDANCE.value is not None:
        raise UserError(
            f"flag --guidance: found {_GUIDANCE.value:g} with --to=text, allowed: with image, video or audio"
        )

    from ernie5_jax.generation import load
    from ernie5_jax.training.restore import load_config

    document = _document(load_config(_CHECKPOINT.value))  # bad input shows before anything large is read
    model = load(_CHECKPOINT.value)
    results = model.generate(document, to, seed=_SEED.value, samples=_SAMPLES.value, **_settings(to))
    for number, result in enumerate(results):
        if to == "text" and not _OUT.value:
            print(result.text)
            continue
        path = out if len(results) == 1 else out.with_stem(f"{out.stem}_{number}")
        _write(path, result)
        print(path)


def _settings(to: str) -> dict[str, float]:
    settings = {}
    if _GUIDANCE.value is not None:
        settings["guidance"] = _GUIDANCE.value
    if _TEMPERATURE.value is not None:
        name = {"text": "temperature", "audio": "audio_temperature"}.get(to, "visual_temperature")
        settings[name] = _TEMPERATURE.value
    return settings


def _document(config):
    from ernie5_jax.data import MediaFormat, read_audio, read_image, read_video
    from ernie5_jax.sequence import Document, Modality, Span

    form = MediaFormat.of(config)
    readers: tuple[tuple[Modality, str | None, Callable], ...] = (
        ("image", _IMAGE.value, read_image),
        ("video", _VIDEO.value, read_video),
        ("audio", _AUDIO.value, read_audio),
    )
    spans = [Span(kind, "understand", read(Path(path), form)) for kind, path, read in readers if path]
    if _PROMPT.value:
        spans.append(Span("text", "understand", _PROMPT.value))
    return Document(tuple(spans))


def _write(path: Path, result) -> None:
    from ernie5_jax.data import media
    from ernie5_jax.evaluation.media import movie
    from ernie5_jax.files import write_file

    if result.text is not None:
        content = result.text.encode("utf-8", "surrogatepass")
    elif result.image is not None:
        content = media.encode_png(result.image)
    elif result.video is not None:
        content = _gif(result.video) if path.suffix.lower() == ".gif" else movie(result.video, "h264")
    else:
        content = media.encode_wav(result.audio, result.sample_rate)
    write_file(path, content)


def _gif(video) -> bytes:
    import io

    from PIL import Image

    frames = [Image.fromarray(frame) for frame in video]
    buffer = io.BytesIO()
    frames[0].save(buffer, "gif", save_all=True, append_images=frames[1:], duration=150, loop=0)
    return buffer.getvalue()


if __name__ == "__main__":
    cli.run(main)
