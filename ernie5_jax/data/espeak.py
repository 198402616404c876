"""Speech synthesis with the espeak-ng library of the `espeakng-loader` wheel, called through ctypes.

espeak-ng keeps oscillator and flutter state in static variables that no call of its own resets, so the same word
sounds different after other words. Here the library is loaded afresh for every word (about a millisecond), by every
thread from a copy of its own: a rendering is then a pure function of its arguments, whatever was said before and
whatever another thread says. The copy knows the voices of this module only: finding one reads the
files of all voices there are, which takes longer than speaking a word.
Samples come at the library's own rate (22,050 Hz); `resample` brings them to another rate.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import itertools
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ernie5_jax.errors import UserError

ACCENTS = ("en", "en-us", "en-029", "en-gb-scotland", "en-gb-x-rp")
"""Base voices that exist in every build of the wheel ("en-gb" alone is refused by it)."""
VARIANTS = ("f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8")
"""Speaker variants; a voice name is "<accent>" or "<accent>+<variant>"."""
VOICES = tuple(f"{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS)

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: samples go to the callback, no sound device, no thread
_DONT_EXIT = 0x8000  # espeakINITIALIZE_DONT_EXIT: errors return instead of ending the process
_RATE, _PITCH = 1, 3  # espeak_PARAMETER
_UTF8 = 1  # espeakCHARS_UTF8
_BUFFER_MS = 200

_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class SpeechSynthesisError(UserError):
    """espeak-ng is missing, or was asked for something that it cannot say."""


class _Copy(threading.local):
    """A thread's own copy of the library: one file, loaded twice, would be one state."""

    def __init__(self):
        import espeakng_loader

        self._folder = tempfile.TemporaryDirectory(prefix="espeak")  # goes with the thread
        self.path = shutil.copy(espeakng_loader.get_library_path(), self._folder.name)
        data = Path(self._folder.name, "espeak-ng-data")
        _link_english(Path(espeakng_loader.get_data_path()), data)
        self.data = os.fsencode(data)


def _link_english(source: Path, target: Path) -> None:
    """Links the data of `source` that the voices of this module need into the new folder `target`."""
    (target / "lang").mkdir(parents=True)
    (target / "voices").mkdir()
    needed = ["phon*", "intonations", "en_dict", "lang/gmw/en*", *(f"voices/!v/{name}" for name in VARIANTS)]
    for path in itertools.chain.from_iterable(map(source.glob, needed)):
        link = target / path.relative_to(source)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path)


class _Library:
    """espeak-ng in its initial state; unloaded on leaving the context."""

    def __init__(self):
        try:
            copy = _own_copy()
            self.handle = ctypes.CDLL(copy.path)
        except ImportError as error:
            raise SpeechSynthesisError(
                f"espeak-ng: not usable ({error}), install the 'espeakng-loader' wheel"
            ) from None
        except OSError as error:
            raise SpeechSynthesisError(
                f"espeak-ng: not usable ({error}), allowed: a temporary folder (TMPDIR) from which libraries are loaded"
            ) from None
        self.chunks: list[bytes] = []
        self.callback = _Callback(self._receive)  # kept alive: the library holds only the address
        self.sample_rate = self.handle.espeak_Initialize(_SYNCHRONOUS, _BUFFER_MS, copy.data, _DONT_EXIT)
        if self.sample_rate <= 0:
            raise SpeechSynthesisError(f"espeak-ng: start failed with data folder {copy.data!r}")
        self.handle.espeak_ng_SetRandSeed(ctypes.c_long(1))  # initialisation seeds the noise from the clock
        self.handle.espeak_SetSynthCallback(self.callback)

    def __enter__(self) -> _Library:
        return self

    def __exit__(self, *error):
        self.handle.espeak_Terminate()
        _ctypes.dlclose(self.handle._handle)

    def _receive(self, wave, count, events) -> int:
        del events
        if wave and count > 0:
            self.chunks.append(ctypes.string_at(wave, 2 * count))
        return 0

    def speak(self, text: str, voice: str, rate: int, pitch: int) -> np.ndarray:
        """int16 samples, silence at the ends included."""
        if self.handle.espeak_SetVoiceByName(voice.encode()) != 0:
            raise SpeechSynthesisError(
                f"espeak-ng voice: found {voice!r}, allowed: {', '.join(ACCENTS)}, each with +f1 ... +f5, +m1 ... +m8"
            )
        self.handle.espeak_SetParameter(_RATE, int(rate), 0)
        self.handle.espeak_SetParameter(_PITCH, int(pitch), 0)
        encoded = text.encode("utf-8", "replace")
        size = ctypes.c_size_t(len(encoded) + 1)
        status = self.handle.espeak_Synth(ctypes.c_char_p(encoded), size, 0, 1, 0, _UTF8, None, None)
        self.handle.espeak_Synchronize()
        samples = np.frombuffer(b"".join(self.chunks), np.int16)
        if status != 0 or not samples.any():
            raise SpeechSynthesisError(f"espeak-ng text: found {text!r}, which gave no sound (status {status})")
        return samples


class EspeakSynthesizer:
    """Renders text as speech; a pure function of its arguments.

    Example: `samples, rate = EspeakSynthesizer().render("three", "en-us+f2", rate=160, pitch=50)`.
    """

    def __init__(self, sample_rate: int | None = None):
        """`sample_rate`: Hz of the returned samples; None keeps the library's own (22,050)."""
        with _Library() as library:
            self._native_rate = library.sample_rate
        self.sample_rate = sample_rate or self._native_rate

    @property
    def voices(self) -> tuple[str, ...]:
        """Names that `render` accepts."""
        return ACCENTS + VOICES

    def render(self, text: str, voice: str = "en-us", rate: int = 160, pitch: int = 50) -> tuple[np.ndarray, int]:
        """Speaks `text`.

        Args:
          text: What to say, not blank.
          voice: "<accent>" or "<accent>+<variant>", see `voices`.
          rate: Words per minute, 80 ... 450.
          pitch: 0 ... 99.

        Returns:
          float32 [samples] in [-1, 1] without the silence at both ends, and the sample rate in Hz.

        Raises:
          SpeechSynthesisError: Blank text, unknown voice, rate or pitch out of range, or the library failed.
        """
        if not text.strip():
            raise SpeechSynthesisError(f"espeak-ng text: found {text!r}, allowed: text that is not blank")
        if not 80 <= rate <= 450:
            raise SpeechSynthesisError(f"espeak-ng rate: found {rate}, allowed: 80 ... 450 words per minute")
        if not 0 <= pitch <= 99:
            raise SpeechSynthesisError(f"espeak-ng pitch: found {pitch}, allowed: 0 ... 99")
        with _Library() as library:
            samples = library.speak(text, voice, rate, pitch)
        samples = trim_silence(samples.astype(np.float32) / 32768.0)
        return resample(samples, self._native_rate, self.sample_rate), self.sample_rate

    def render_all(self, requests: Iterable[tuple[str, str, int, int]]) -> Iterator[np.ndarray]:
        """Samples of many (text, voice, rate, pitch), in order, on all cores; see `render`."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for samples, _ in pool.map(lambda request: self.render(*request), requests):
                yield samples


@functools.cache
def _own_copy() -> _Copy:
    return _Copy()


def trim_silence(samples: np.ndarray, threshold: float = 1e-3) -> np.ndarray:
    """Cuts both ends of float32 [samples] where the magnitude stays below `threshold` of full scale."""
    loud = np.flatnonzero(np.abs(samples) > threshold)
    return samples[loud[0] : loud[-1] + 1] if loud.size else samples[:0]


def resample(samples: np.ndarray, source_rate: int, target_rate: int) -> np.ndarray:
    """Polyphase resampling with a Kaiser low-pass filter: float32 [n] -> float32 [ceil(n * target / source)]."""
    if source_rate == target_rate:
        return samples.astype(np.float32)
    from scipy import signal

    divisor = math.gcd(source_rate, target_rate)
    up, down = target_rate // divisor, source_rate // divisor
    return signal.resample_poly(samples, up, down, window=_low_pass(up, down)).astype(np.float32)


@functools.lru_cache(maxsize=64)
def _low_pass(up: int, down: int) -> np.ndarray:
    """The filter that `resample_poly` designs by default, which takes longer than using it on a word."""
    from scipy import signal

    largest = max(up, down)
    window: Any = ("kaiser", 5.0)  # declared as a string only
    return np.asarray(signal.firwin(20 * largest + 1, 1 / largest, window=window))
