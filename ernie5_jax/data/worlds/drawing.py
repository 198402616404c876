"""Digits in motion and captions, shared by the worlds."""

from __future__ import annotations

import numpy as np

from ernie5_jax.data.documents import DIGIT_WORDS

DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
"""(rows, columns) per frame."""
GLYPH_SIZE, CANVAS_SIZE, FRAMES = 12, 16, 5
"""A glyph crosses the 4 px that the canvas leaves in 4 steps: T = 5, two latent frames."""


def image_caption(digit: int) -> str:
    return f"a handwritten {DIGIT_WORDS[digit]}"


def motion_caption(digit: int, direction: str) -> str:
    return f"the digit {DIGIT_WORDS[digit]} moves {direction}"


def speech_caption(digit: int, speaker: str = "") -> str:
    spoken = f" spoken by {speaker}" if speaker else ""
    return f"the word {DIGIT_WORDS[digit]}{spoken}"


def resize(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [H, W] -> uint8 [size, size]: area mean when shrinking, bicubic when enlarging."""
    from PIL import Image

    if image.shape == (size, size):
        return image
    method = Image.Resampling.BOX if size < min(image.shape) else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(image).resize((size, size), method))


def jittered(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """uint8 [H, W] -> uint8 [16, 16]: turned by up to 12 degrees, scaled by up to 12 %, shifted by up to 1.5 pixels."""
    from PIL import Image

    middle = (CANVAS_SIZE - 1) / 2
    angle, scale, shift = np.radians(rng.uniform(-12, 12)), rng.uniform(0.88, 1.12), rng.uniform(-1.5, 1.5, 2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) / scale
    moved = middle - turn @ (middle + shift)
    # PIL maps output to input and puts pixel centres at + 0.5.
    matrix = np.column_stack([turn, moved + 0.5 - turn @ (0.5, 0.5)])
    picture = Image.fromarray(resize(image, CANVAS_SIZE))
    return np.asarray(
        picture.transform(picture.size, Image.Transform.AFFINE, matrix.ravel().tolist(), Image.Resampling.BICUBIC)
    )


def moving(image: np.ndarray, direction: str) -> np.ndarray:
    """uint8 [H, W] -> uint8 [5, 16, 16]: the glyph crosses the canvas through its centre, a pixel a frame."""
    glyph = resize(image, GLYPH_SIZE)
    rows, columns = DIRECTIONS[direction]
    frames = np.zeros((FRAMES, CANVAS_SIZE, CANVAS_SIZE), np.uint8)
    middle = (CANVAS_SIZE - GLYPH_SIZE) // 2
    for t in range(FRAMES):
        top, left = middle + rows * (t - middle), middle + columns * (t - middle)
        frames[t, top : top + GLYPH_SIZE, left : left + GLYPH_SIZE] = glyph
    return frames


def two_directions(index: int, seed: int = 0) -> list[str]:
    """Two different directions for picture `index`."""
    names = list(DIRECTIONS)
    return [names[i] for i in np.random.default_rng((seed, index)).permutation(len(names))[:2]]


def to_rgb(gray: np.ndarray) -> np.ndarray:
    """uint8 [...] -> uint8 [..., 3]."""
    return np.repeat(gray[..., None], 3, axis=-1)
