"""Pictures, videos and sound: files and bytes <-> arrays, brought to the size and rate a model reads.

Lossless bytes are kept in records: a picture is a PNG, a video is one PNG of its frames below each other, sound is a
16-bit WAV.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ernie5_jax.data.errors import DataError
from ernie5_jax.data.espeak import resample

if TYPE_CHECKING:
    from ernie5_jax.config import ExperimentConfig

T = TypeVar("T")

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp")
VIDEO_SUFFIXES = (".gif", ".mp4", ".mov", ".mkv", ".webm", ".avi")
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg")


@dataclasses.dataclass(frozen=True)
class MediaFormat:
    """What the tokenizers read.

    Attributes:
      image_size: Side of (square) pictures and video frames, pixels.
      sample_rate: Hz.
      temporal_stride: A video has T = 1 mod temporal_stride frames.
    """

    image_size: int = 16
    sample_rate: int = 8000
    temporal_stride: int = 4

    @classmethod
    def of(cls, config: ExperimentConfig) -> MediaFormat:
        """The format that the tokenizers of `config` read."""
        return cls(config.visual.image_size, config.audio.sample_rate, config.visual.temporal_stride)

    def fit_frames(self, frames: np.ndarray) -> np.ndarray:
        """uint8 [T, H, W, 3] -> uint8 [T, image_size, image_size, 3]: the shorter side is resized, the centre kept."""
        side = self.image_size
        if frames.shape[1:3] == (side, side):
            return frames
        return np.stack([_fit(frame, side) for frame in frames])

    def check_frames(self, count: int) -> None:
        """Raises a `DataError` unless a video of `count` frames can be tokenised."""
        if count < 1 or (count - 1) % self.temporal_stride:
            below = max(1, (count - 1) // self.temporal_stride * self.temporal_stride + 1)
            allowed = f"T = 1 mod {self.temporal_stride}, e.g. {below} or {below + self.temporal_stride}"
            raise DataError(f"found T = {count} frames, allowed: {allowed}")

    def fit_audio(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """float [samples] or [samples, channels] at `rate` Hz -> float32 [samples'], mono at `sample_rate`."""
        if samples.ndim == 2:
            samples = samples.mean(axis=1)
        if not len(samples):
            raise DataError("found 0 samples, allowed: at least 1")
        if not np.isfinite(samples).all():
            raise DataError("found samples that are not finite, allowed: numbers in -1 ... 1")
        return np.clip(resample(samples.astype(np.float32), rate, self.sample_rate), -1, 1)


def _fit(frame: np.ndarray, side: int) -> np.ndarray:
    from PIL import Image

    height, width = frame.shape[:2]
    scale = side / min(height, width)
    size = max(side, round(width * scale)), max(side, round(height * scale))
    # BOX is an exact area mean; enlarging needs interpolation.
    picture = Image.fromarray(frame).resize(size, Image.Resampling.BOX if scale < 1 else Image.Resampling.BICUBIC)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return np.asarray(picture.crop((left, top, left + side, top + side)))


def _pixels(picture) -> np.ndarray:
    """RGB of a PIL image; what is transparent becomes black."""
    if "A" in picture.getbands() or "transparency" in picture.info:
        from PIL import Image

        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (0, 0, 0, 255)), picture)
    return np.asarray(picture.convert("RGB"))


def decode_image(data: bytes) -> np.ndarray:
    """PNG, JPEG, ... -> uint8 [H, W, 3].

    Raises:
      DataError: Empty, truncated or no picture.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            return _pixels(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"found {_reason(error, data)}, allowed: a whole picture") from None


def decode_video(data: bytes) -> np.ndarray:
    """GIF (through pillow, which keeps short frames) or any container PyAV reads -> uint8 [T, H, W, 3].

    A GIF holds equal frames as one that is shown longer; it counts as often as it is longer than the shortest one.
    """
    frames = _gif_frames(data) if data[:4] == b"GIF8" else _container_frames(data)
    if not frames:
        raise DataError("found 0 frames, allowed: at least 1")
    if len({frame.shape for frame in frames}) > 1:
        raise DataError("found frames of different sizes, allowed: one size")
    return np.stack(frames)


def _gif_frames(data: bytes) -> list[np.ndarray]:
    from PIL import Image, ImageSequence

    try:
        with Image.open(io.BytesIO(data)) as picture:
            shown = [(_pixels(frame), frame.info.get("duration", 0)) for frame in ImageSequence.Iterator(picture)]
        shortest = max(min(duration for _, duration in shown), 1)
        return [pixels for pixels, duration in shown for _ in range(max(round(duration / shortest), 1))]
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"found {_reason(error, data)}, allowed: a whole video") from None


def _container_frames(data: bytes) -> list[np.ndarray]:
    import av
    import av.error

    if not data:
        raise DataError("found an empty file, allowed: a whole video")
    try:
        with av.open(io.BytesIO(data), mode="r") as container:
            if not container.streams.video:
                raise DataError("found no video stream, allowed: a video")
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    except (av.error.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"found {_reason(error, data)}, allowed: a whole video") from None


def decode_audio(data: bytes) -> tuple[np.ndarray, int]:
    """WAV, FLAC, ... -> float32 [samples] or [samples, channels] in [-1, 1], and the rate in Hz.

    Raises:
      DataError: No sound file, a truncated one, or one of zero length.
    """
    import soundfile

    missing = _missing_wav_bytes(data)
    if missing > 0:
        raise DataError(f"found a truncated file ({missing} bytes missing), allowed: whole sound files")
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    except (soundfile.SoundFileError, OSError, ValueError, TypeError) as error:
        raise DataError(f"found {_reason(error, data)}, allowed: a whole sound file") from None
    if not len(samples):
        raise DataError("found 0 samples, allowed: at least 1")
    return samples, rate


def _missing_wav_bytes(data: bytes) -> int:
    """Bytes that a WAV's data chunk promises beyond the end of `data`; soundfile would silently return fewer."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return 0
    position = 12
    while position + 8 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        if data[position : position + 4] == b"data":
            streamed = size >= 0xFFFFFFFF - 64  # a writer that could not seek back leaves the largest size
            return 0 if streamed else position + 8 + size - len(data)
        position += 8 + size + size % 2
    return 0


def _reason(error: BaseException, data: bytes) -> str:
    if not data:
        return "an empty file"
    text = str(error).replace("\n", " ")
    if "identify" in text or "Format not recognised" in text or "Invalid data" in text:
        return "a file of unknown kind or damaged"
    return f"a damaged file ({text[:120]})"


def encode_png(pixels: np.ndarray) -> bytes:
    """uint8 [H, W, 3] -> PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png", compress_level=3)
    return buffer.getvalue()


def encode_wav(samples: np.ndarray, rate: int) -> bytes:
    """float32 [samples] in [-1, 1] -> 16-bit WAV."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def read_image(path: Path, form: MediaFormat) -> np.ndarray:
    """Picture file -> uint8 [image_size, image_size, 3]."""
    return form.fit_frames(_read(path, decode_image)[None])[0]


def read_video(path: Path, form: MediaFormat) -> np.ndarray:
    """Video file -> uint8 [T, image_size, image_size, 3], T = 1 mod temporal_stride."""
    frames = _read(path, decode_video)
    try:
        form.check_frames(len(frames))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return form.fit_frames(frames)


def read_audio(path: Path, form: MediaFormat) -> np.ndarray:
    """Sound file -> float32 [samples] at sample_rate."""
    return _read(path, lambda data: form.fit_audio(*decode_audio(data)))


def _read(path: Path, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: found no such file, allowed: an existing file") from None
    except OSError as error:
        raise DataError(f"{path}: found no readable file ({error.strerror}), allowed: an existing file") from None
    except ValueError as error:  # DataError, or a path with a zero byte
        raise DataError(f"{path}: {error}") from None
