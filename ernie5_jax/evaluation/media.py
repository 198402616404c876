"""Media as data URIs, so that a page needs no other file."""

from __future__ import annotations

import base64
import fractions
import io

import numpy as np
from jaxtyping import Float, UInt8

FRAMES_PER_SECOND = 6
_TARGET_SIDE = 128


def data_uri(content: bytes, kind: str) -> str:
    """`data:<kind>;base64,...`."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def png(picture: UInt8[np.ndarray, "h w c"]) -> bytes:
    """The picture as PNG, pixel for pixel (pages enlarge it with `image-rendering: pixelated`)."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def wav(samples: Float[np.ndarray, " n"], sample_rate: int) -> bytes:
    """Mono 16-bit WAV; louder than full scale is clipped."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.clip(samples, -1, 1), sample_rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def enlarge(video: UInt8[np.ndarray, "t h w c"], side: int = _TARGET_SIDE) -> UInt8[np.ndarray, "t H W c"]:
    """Repeats pixels so that the longer side is about `side`, both sides even (video formats need that)."""
    factor = max(1, side // max(video.shape[1:3]))
    factor += factor % 2 and (video.shape[1] % 2 or video.shape[2] % 2)
    return video.repeat(factor, 1).repeat(factor, 2)


def movie(video: UInt8[np.ndarray, "t h w c"], codec: str = "vp9") -> bytes:
    """The enlarged video as WebM (`vp9`, every open browser) or MP4 (`h264`, Apple's older ones).

    Raises:
      ValueError: The installed PyAV cannot encode it.
    """
    import av
    from av.video.stream import VideoStream

    name, container_format = {"vp9": ("libvpx-vp9", "webm"), "h264": ("libx264", "mp4")}[codec]
    video = enlarge(video)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container_format) as container:
        quality = {"crf": "24", "b": "0"} if codec == "vp9" else {"crf": "18"}
        stream = container.add_stream(name, rate=fractions.Fraction(FRAMES_PER_SECOND), options=quality)
        assert isinstance(stream, VideoStream)
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def movie_sources(video: UInt8[np.ndarray, "t h w c"]) -> list[tuple[str, str]]:
    """`(data URI, type)` of every format that can be encoded here; none without video codecs (see `animation`)."""
    sources = []
    for codec, kind in (("vp9", "video/webm"), ("h264", "video/mp4")):
        try:
            sources.append((data_uri(movie(video, codec), kind), kind))
        except (ImportError, ValueError, OSError):  # av's own errors derive from ValueError or OSError
            continue
    return sources


def animation(video: UInt8[np.ndarray, "t h w c"]) -> bytes:
    """The video as an endlessly playing animated PNG."""
    from PIL import Image

    frames = [Image.fromarray(np.ascontiguousarray(frame)) for frame in video]
    buffer = io.BytesIO()
    frames[0].save(
        buffer, "PNG", save_all=True, append_images=frames[1:], duration=round(1000 / FRAMES_PER_SECOND), loop=0
    )
    return buffer.getvalue()


def waveform_path(samples: Float[np.ndarray, " n"], width: int = 200, height: int = 40) -> str:
    """Outline of the loudness as an SVG path, `width` x `height` units."""
    columns = np.array_split(np.abs(np.asarray(samples, np.float64)), 50)
    peaks = np.array([column.max() if len(column) else 0 for column in columns])
    peaks = np.maximum(peaks / max(float(peaks.max()), 1e-6), 0.03)
    x = np.linspace(0, width, len(peaks))
    upper = [f"{a:.1f},{height / 2 * (1 - p):.1f}" for a, p in zip(x, peaks, strict=True)]
    lower = [f"{a:.1f},{height / 2 * (1 + p):.1f}" for a, p in zip(x[::-1], peaks[::-1], strict=True)]
    return "M" + "L".join([*upper, *lower]) + "Z"
