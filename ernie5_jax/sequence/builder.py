"""The work of `layout`: fills the arrays of one row span by span."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ernie5_jax.config import SequenceConfig
from ernie5_jax.sequence import positions as uni_rope
from ernie5_jax.sequence.errors import SequenceError
from ernie5_jax.sequence.row import Row
from ernie5_jax.sequence.sizes import span_name, visual_grid
from ernie5_jax.sequence.types import EncodedDocument, EncodedSpan, Slots
from ernie5_jax.sequence.weights import scale_token_weights
from ernie5_jax.text.special_tokens import BEGIN, BOS, END, EOA, NULL, PAD, SEP

if TYPE_CHECKING:
    from ernie5_jax.vision.pyramid import ScalePyramid


@functools.lru_cache(maxsize=256)
def _visual_template(
    scales: uni_rope.Scales, frames: int, alpha: float, cap: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Block start of every input relative to BOx, its scale, and the scale and weight of every target, all [t * P]."""
    cells = [h * w for h, w in scales]
    starts = np.concatenate([[0], np.cumsum(cells)[:-1]])
    order = [*range(1, len(scales)), 0]  # inputs: blocks of scales 2 ... K, then SS, which counts as scale 1
    scale = np.concatenate([np.full(cells[k], k) for k in order]).astype(np.int32)
    start = np.concatenate([np.full(cells[k], starts[k] if k else sum(cells)) for k in order])
    start = (start + sum(cells) * np.arange(frames)[:, None]).ravel().astype(np.int32)
    target_scale = np.tile(np.repeat(np.arange(len(scales)), cells), frames).astype(np.int32)
    weight = np.asarray(scale_token_weights(scales, alpha, cap), np.float32)[target_scale]
    return start, np.tile(scale, frames), target_scale, weight


class RowBuilder:
    """Fills preallocated arrays span by span. `row` is the next position, `row + shift` its running index."""

    def __init__(
        self,
        length: int,
        config: SequenceConfig,
        pyramid: ScalePyramid,
        audio_bins: int,
        rng: np.random.Generator | None,
    ):
        self.config, self.pyramid, self.audio_bins, self.rng = config, pyramid, audio_bins, rng
        self.token = np.full(length, -1, np.int32)  # -1: not a text-vocabulary token
        self.weight = np.zeros(length, np.float32)  # of the token as a target
        self.group_start = np.arange(length, dtype=np.int32)
        self.index = np.arange(length, dtype=np.float32)
        self.position = np.empty((length, 3), np.float32)
        self.inputs: dict[str, list[tuple[np.ndarray, dict[str, np.ndarray]]]] = {}
        self.targets: dict[str, list[tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]]] = {}
        self.text_bytes = 0.0
        self.row = self.shift = self.run_start = 0
        self.add_special(BOS, 0.0)

    def add_special(self, token: int, weight: float) -> None:
        self.token[self.row] = token
        self.weight[self.row] = weight
        self.row += 1

    def add_document(self, document: EncodedDocument, conditions: int) -> None:
        """Adds every span; text of the first `conditions` spans becomes NULL."""
        for number, span in enumerate(document.spans):
            if span.modality == "text":
                self.add_text(number, span, number < conditions)
                continue
            generate = span.role == "generate"
            self.add_special(BEGIN[span.modality], float(generate))
            if span.modality == "audio":
                self.add_audio(number, span, generate)
            elif generate:
                self.add_generated_visual(number, span)
            else:
                self.add_understood_visual(number, span)
            self.add_special(END[span.modality], 1.0)
            if not generate:
                self.add_special(SEP, 1.0)

    def add_text(self, number: int, span: EncodedSpan, null: bool) -> None:
        ids: np.ndarray = span.value.ids  # type: ignore[union-attr]
        if not len(ids):
            return
        if ids.min() <= SEP:
            raise SequenceError(
                f"{span_name(number, span)}: found id {ids.min()}, allowed: ids > {SEP}, no structural token"
            )
        end = self.row + len(ids)
        self.token[self.row : end] = NULL if null else ids
        # A token that the model no longer sees is no target either: it would learn to say NULL.
        if span.role == "generate" and not null:
            self.weight[self.row : end] = 1
            self.text_bytes += span.value.num_bytes  # type: ignore[union-attr]
        self.row = end

    def add_audio(self, number: int, span: EncodedSpan, generate: bool) -> None:
        codes: np.ndarray = span.value.codes  # type: ignore[union-attr]
        frames, levels = codes.shape
        if codes.min() < 0 or codes.max() >= self.audio_bins:
            found = f"codes {codes.min()} ... {codes.max()}"
            raise SequenceError(f"{span_name(number, span)}: found {found}, allowed: 0 ... {self.audio_bins - 1}")
        start, self.row = self.row, self.row + frames
        self.inputs.setdefault("audio", []).append((np.arange(start, self.row, dtype=np.int32), {"codes": codes}))
        if not generate:
            return
        target = np.empty((frames + 1, levels), np.int32)
        target[:-1], target[-1] = codes, self.audio_bins
        weight = np.ones((frames + 1, levels), np.float32)
        if self.config.audio_level_weights:
            if len(self.config.audio_level_weights) != levels:
                found = f"{levels} codec levels"
                allowed = f"{len(self.config.audio_level_weights)}, one per config key 'sequence.audio_level_weights'"
                raise SequenceError(f"{span_name(number, span)}: found {found}, allowed: {allowed}")
            weight *= np.asarray(self.config.audio_level_weights, np.float32)
        index = np.arange(start - 1, self.row, dtype=np.int32)
        self.targets.setdefault("audio", []).append((index, {"codes": target}, weight))

    def add_generated_visual(self, number: int, span: EncodedSpan) -> None:
        pyramid, config = self.pyramid, self.config
        latents: np.ndarray | None = span.value.latents  # type: ignore[union-attr]
        codes: np.ndarray | None = span.value.bits  # type: ignore[union-attr]
        name, given = ("latents", latents) if latents is not None else ("bits", codes)
        allowed = (*pyramid.scales[-1], pyramid.bits) if name == "latents" else (pyramid.tokens, pyramid.bits)
        assert given is not None, "counted before"
        if given.shape[1:] != allowed:
            found = f"{name} of shape {list(given.shape)}"
            raise SequenceError(
                f"{span_name(number, span)}: found {found}, allowed: [t, {', '.join(map(str, allowed))}]"
            )
        frames = len(given)
        if latents is None:
            forced = pyramid.forcing_of_bits(given)
        else:
            flips = config.self_correction if self.rng is not None and config.self_correction.flip_max > 0 else None
            forced = pyramid.teacher_forcing(latents, flips, self.rng)
        # Inputs follow BOx frame by frame: the blocks of scales 2 ... K, then SS. Targets are one position ahead.
        features = np.concatenate([forced.inputs[:, 1:], forced.summary], axis=1).reshape(-1, pyramid.bits)
        start, scale, target_scale, weight = _visual_template(
            pyramid.scales, frames, config.scale_weight_alpha, config.scale_weight_cap
        )
        begin = self.row - 1
        self.add_block(start + begin, uni_rope.visual_table(pyramid.scales, frames))
        index = np.arange(begin, begin + len(start) + 1, dtype=np.int32)
        self.inputs.setdefault("visual", []).append((index[1:], {"features": features, "scale": scale}))
        bits = forced.bits.reshape(-1, pyramid.bits)
        is_video = np.full(len(start), span.modality == "video")
        values = {"bits": bits, "scale": target_scale, "is_video": is_video}
        self.targets.setdefault("visual", []).append((index[:-1], values, weight))
        self.resume(uni_rope.index_after_visual(self.offset, frames, pyramid.scales))

    def add_understood_visual(self, number: int, span: EncodedSpan) -> None:
        frames, height, width = visual_grid(number, span)
        features: np.ndarray = span.value.features  # type: ignore[union-attr]
        cells = height * width
        index = np.arange(self.row, self.row + frames * cells, dtype=np.int32)
        values = {"features": features.reshape(frames * cells, *features.shape[3:])}
        self.inputs.setdefault("understand", []).append((index, values))
        start = index - np.arange(len(index), dtype=np.int32) % cells
        self.add_block(start, uni_rope.understood_table(frames, (height, width)))
        self.resume(uni_rope.index_after_understood(self.offset, frames, (height, width)))

    def add_block(self, group_start: np.ndarray, table: np.ndarray) -> None:
        """Adds the positions of a visual span; `offset` is then the running index at which it began."""
        self.flush_run()
        self.offset = self.row + self.shift
        end = self.row + len(table)
        self.group_start[self.row : end] = group_start
        np.add(table, np.float32(self.offset), out=self.position[self.row : end])
        self.row = end

    def flush_run(self) -> None:
        """Writes the positions of the text and audio since the last visual span."""
        run = self.index[self.run_start : self.row] + np.float32(self.shift)
        self.position[self.run_start : self.row] = uni_rope.text_position(run)

    def resume(self, index: int) -> None:
        """Lets the running index go on at `index`."""
        self.shift = index - self.row
        self.run_start = self.row

    def finish(self, mtp_depth: int, end: int) -> Row:
        self.flush_run()
        if self.row != len(self.token):
            raise AssertionError(f"layout filled {self.row} of {len(self.token)} counted positions")
        is_text = self.token >= 0
        # EOA is predicted by the codec heads (and understood frames predict nothing), never by the text head.
        index = np.flatnonzero(is_text[1:] & (self.token[1:] != EOA)).astype(np.int32)
        text = Slots(index, {"token": self.token[index + 1]}, self.weight[index + 1])
        inputs = {}
        for name, parts in self.inputs.items():
            index = _join([part[0] for part in parts])
            inputs[name] = Slots(index, _join_values([part[1] for part in parts]), np.ones(len(index), np.float32))
        targets = {"text": text}
        for name, parts in self.targets.items():
            index, values = _join([part[0] for part in parts]), _join_values([part[1] for part in parts])
            targets[name] = Slots(index, values, _join([part[2] for part in parts]))
        mtp, mtp_token = self.mtp(mtp_depth, is_text)
        bounds = np.empty((self.row, 2), np.int32)
        bounds[:, 0], bounds[:, 1] = end, self.group_start
        token = np.where(is_text, self.token, np.int32(PAD))
        return Row(token, is_text, self.position, bounds, inputs, targets, mtp, mtp_token, self.text_bytes)

    def mtp(self, depth: int, is_text: np.ndarray) -> tuple[tuple[Slots, ...], np.ndarray]:
        """Targets of module d where inputs i ... i + d + 1 are one run of text, and the token it reads at i + d."""
        run = np.cumsum(~is_text)  # constant inside a run of text
        tokens = np.full((depth, self.row), -1, np.int32)
        slots = []
        for d in range(1, depth + 1):
            tokens[d - 1, : max(self.row - d, 0)] = self.token[d:]  # already -1 where the input is not text
            step = d + 1
            same = is_text[:-step] & is_text[step:] & (run[:-step] == run[step:])
            index = np.flatnonzero(same).astype(np.int32)
            slots.append(Slots(index, {"token": self.token[index + step]}, self.weight[index + step]))
        return tuple(slots), tokens


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _join_values(parts: list[dict[str, Any]]) -> dict[str, Any]:
    for name, first in parts[0].items():
        for part in parts[1:]:
            if part[name].shape[1:] != first.shape[1:]:
                found = f"{list(part[name].shape[1:])} beside {list(first.shape[1:])}"
                raise SequenceError(f"{name}: found {found} per position, allowed: one shape in a document")
    return {name: _join([part[name] for part in parts]) for name in parts[0]}
