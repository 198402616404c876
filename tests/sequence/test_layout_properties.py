"""Random documents of all kinds against a slow restatement of the rules; training draws, prompts, refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.config import SelfCorrectionConfig, SequenceConfig
from ernie5_jax.errors import UserError
from ernie5_jax.sequence import (
    UNBOUNDED,
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    SequenceError,
    document_size,
    index_after_visual,
    layout,
    layout_prompt,
    scale_position,
    summary_position,
    text_position,
)
from ernie5_jax.testing import KINDS, random_encoded_document, random_encoded_span, square_scales, tiny_model_config
from ernie5_jax.text.special_tokens import BEGIN, BOS, END, EOA, EOS, NULL, SEP
from ernie5_jax.vision.pyramid import ScalePyramid

MODEL = tiny_model_config(visual_scales=3, mtp_depth=2)
SCALES = square_scales(3)
PYRAMID = ScalePyramid(SCALES, MODEL.visual_bits)
CONFIG = SequenceConfig(length=1024)
SIZES: Any = {"audio_bins": MODEL.audio_bins, "mtp_depth": MODEL.mtp_depth}


def _value(span: EncodedSpan) -> Any:
    return span.value


def _document(seed: int, **kwargs) -> EncodedDocument:
    return random_encoded_document(np.random.default_rng(seed), MODEL, scales=SCALES, **kwargs)


def _walk(document: EncodedDocument) -> list[tuple]:
    """The rules in words: per position (token or None, weight of this token as a target, group, (t, h, w), kind)."""
    out: list[tuple] = []
    index = group = 0

    def emit(token, weight, position, kind):
        out.append((token, weight, group, position, kind))

    def special(token, weight):
        nonlocal index, group
        emit(token, weight, (index,) * 3, "text")
        index, group = index + 1, group + 1

    special(BOS, 0)
    for span in document.spans:
        generate = span.role == "generate"
        if span.modality == "text":
            for token in _value(span).ids:
                special(int(token), float(generate))
            continue
        special(BEGIN[span.modality], float(generate))
        if span.modality == "audio":
            for _ in _value(span).codes:
                emit(None, 0, (index,) * 3, "audio")
                index, group = index + 1, group + 1
        else:
            offset, used = index, []
            grid = SCALES[-1] if generate else _value(span).features.shape[1:3]
            frames = len(_value(span).latents if generate else _value(span).features)
            blocks = [*SCALES[1:], "summary"] if generate else [grid]
            for y in range(frames):
                for block in blocks:
                    h, w = SCALES[0] if block == "summary" else block
                    for i in range(h):
                        for j in range(w):
                            t = offset + y + (block == "summary")
                            at = (t, offset + (i + 0.5) * grid[0] / h - 0.5, offset + (j + 0.5) * grid[1] / w - 0.5)
                            used.extend(at)
                            emit(None, 0, at, "visual" if generate else "understand")
                    group += 1
            index = 1 + math.floor(max(used))
        special(END[span.modality], 1)
        if not generate:
            special(SEP, 1)
    special(EOS, 1)
    return out


class LayoutPropertyTest(parameterized.TestCase):
    @parameterized.parameters(range(12))
    def test_equals_the_rules(self, seed):
        document = _document(seed, max_spans=6, first=KINDS[seed % len(KINDS)])
        walk = _walk(document)
        row = layout(document, CONFIG, PYRAMID, **SIZES)
        self.assertEqual(row.length, len(walk))
        self.assertEqual(row.token.tolist(), [token or 0 for token, *_ in walk])
        chex.assert_trees_all_close(row.position, np.asarray([p for *_, p, _ in walk], np.float32), atol=1e-5)
        groups = [g for _, _, g, _, _ in walk]
        q = np.arange(row.length)[:, None]
        allowed = (q < row.bounds[:, 0]) & (q >= row.bounds[:, 1])
        chex.assert_trees_all_equal(allowed, np.asarray(groups)[:, None] >= np.asarray(groups)[None])
        for name in ("visual", "understand", "audio"):
            expected = [i for i, (*_, kind) in enumerate(walk) if kind == name]
            found = row.inputs[name].index.tolist() if name in row.inputs else []
            self.assertEqual(found, expected)
        follows = [(i, walk[i + 1][0], walk[i + 1][1]) for i in range(len(walk) - 1)]
        targets = row.targets["text"]
        found = list(zip(targets.index, targets.values["token"], targets.weight, strict=True))
        self.assertEqual(found, [(i, t, w) for i, t, w in follows if t is not None and t != EOA])
        for d, slots in enumerate(row.mtp, 1):
            expected = []
            for i in range(len(walk) - d - 1):
                run = walk[i : i + d + 2]
                if all(token is not None for token, *_ in run):
                    expected.append((i, run[-1][0], run[-1][1]))
            self.assertEqual(list(zip(slots.index, slots.values["token"], slots.weight, strict=True)), expected)

    @parameterized.parameters(range(12))
    def test_size_is_what_layout_uses(self, seed):
        document = _document(seed, max_spans=6)
        row = layout(document, CONFIG, PYRAMID, **SIZES)
        size = document_size(document, SCALES)
        self.assertEqual(size.length, row.length)
        for key, value in size._asdict().items():
            if key != "length":
                name, kind = key.split("_")
                slots = getattr(row, kind).get(name)
                self.assertEqual(value, len(slots.index) if slots else 0, key)

    def test_reserve_for_bpe_dropout(self):
        document = EncodedDocument((EncodedSpan("text", "generate", EncodedText(np.full(21, 200, np.int32), 21)),))
        self.assertEqual(document_size(document, SCALES, text_reserve=1.15).length, math.ceil(1.15 * 21) + 2)


class TrainingDrawsTest(parameterized.TestCase):
    def _captioned(self, *after: tuple) -> EncodedDocument:
        rng = np.random.default_rng(0)
        kinds = [("text", "generate"), ("image", "understand"), ("image", "generate"), *after]
        return EncodedDocument(tuple(random_encoded_span(rng, kind, MODEL, SCALES) for kind in kinds))

    def test_condition_dropout(self):
        document = self._captioned(("text", "generate"))
        config = dataclasses.replace(CONFIG, condition_dropout=0.25, self_correction=SelfCorrectionConfig(0, 0))
        plain = layout(document, config, PYRAMID, **SIZES)
        caption, answer = _value(document.spans[0]).ids, _value(document.spans[3]).ids
        dropped = 0
        for seed in range(400):
            row = layout(document, config, PYRAMID, **SIZES, rng=np.random.default_rng(seed), train=True)
            chex.assert_trees_all_equal(row.position, plain.position)
            chex.assert_trees_all_equal(row.bounds, plain.bounds)
            chex.assert_trees_all_equal(row.targets["visual"], plain.targets["visual"])
            self.assertEqual(row.token[-1 - len(answer) : -1].tolist(), answer.tolist())  # no condition of anything
            if row.token[1] == NULL:
                dropped += 1
                changed = np.flatnonzero(row.token != plain.token)
                self.assertEqual(changed.tolist(), list(range(1, 1 + len(caption))))
                weight = row.targets["text"].weight.tolist()
                self.assertEqual(weight[: len(caption)], [0] * len(caption))
                self.assertEqual(weight[len(caption) :], plain.targets["text"].weight.tolist()[len(caption) :])
                self.assertEqual(row.text_bytes, len(answer))
            else:
                chex.assert_trees_all_equal(row.token, plain.token)
        self.assertBetween(dropped, 70, 130)  # binomial(400, .25), more than 3 standard deviations wide

    def test_self_correction_follows_the_pyramid(self):
        document = self._captioned()
        config = dataclasses.replace(CONFIG, self_correction=SelfCorrectionConfig(0.3, 0.5))
        row = layout(document, config, PYRAMID, **SIZES, rng=np.random.default_rng(7), train=True)
        rng = np.random.default_rng(7)
        rng.random()  # condition dropout draws first
        latents = _value(document.spans[2]).latents
        forced = PYRAMID.teacher_forcing(latents, config.self_correction, rng)
        chex.assert_trees_all_equal(row.targets["visual"].values["bits"], forced.bits[0])
        expected = np.concatenate([forced.inputs[0, 1:], forced.summary[0]])
        chex.assert_trees_all_equal(row.inputs["visual"].values["features"], expected)
        clean = layout(document, config, PYRAMID, **SIZES)
        self.assertTrue((clean.inputs["visual"].values["features"] != expected).any())

    def test_train_needs_rng(self):
        with self.assertRaisesRegex(SequenceError, "rng"):
            layout(self._captioned(), CONFIG, PYRAMID, **SIZES, train=True)


class PromptTest(parameterized.TestCase):
    @parameterized.parameters("text", "image", "video", "audio")
    def test_prefix_of_the_training_row(self, request):
        rng = np.random.default_rng(3)
        before = random_encoded_document(rng, MODEL, scales=SCALES, max_spans=5)
        answer = random_encoded_span(rng, (request, "generate"), MODEL, SCALES)
        full = layout(EncodedDocument((*before.spans, answer)), CONFIG, PYRAMID, **SIZES)
        prompt = layout_prompt(before, request, CONFIG, PYRAMID, **SIZES)
        n = prompt.row.length
        chex.assert_trees_all_equal(prompt.row.token, full.token[:n])
        chex.assert_trees_all_equal(prompt.row.position, full.position[:n])
        chex.assert_trees_all_equal(prompt.row.bounds[:, 1], full.bounds[:n, 1])
        self.assertTrue((prompt.row.bounds[:, 0] == UNBOUNDED).all())
        # Every later group of the answer sits where the shared functions say.
        if request in ("text", "audio"):
            steps = np.arange(len(_value(answer).ids if request == "text" else _value(answer).codes))
            expected = text_position(prompt.index + steps)
            after = prompt.index + len(steps)
        else:
            groups = []
            frames = len(_value(answer).latents)
            for y in range(frames):
                groups += [scale_position(prompt.index, y, k, SCALES) for k in range(1, len(SCALES))]
                groups.append(summary_position(prompt.index, y, SCALES))
            expected = np.concatenate(groups)
            after = index_after_visual(prompt.index, frames, SCALES)
        end = n + len(expected)
        chex.assert_trees_all_equal(full.position[n:end], expected)
        self.assertEqual(full.position[end].tolist(), [after] * 3)

    def test_positions_take_arrays(self):
        offsets = jnp.asarray([3, 17], jnp.int32)
        block = scale_position(offsets, 1, 1, SCALES)
        chex.assert_shape(block, (2, 4, 3))
        for b, offset in enumerate((3, 17)):
            chex.assert_trees_all_equal(np.asarray(block[b]), scale_position(offset, 1, 1, SCALES))
        chex.assert_shape(text_position(offsets), (2, 3))
        self.assertEqual(text_position(np.asarray([2])).dtype, np.float32)

    def test_unconditional_prompt(self):
        rng = np.random.default_rng(0)
        spans = tuple(random_encoded_span(rng, kind, MODEL, SCALES) for kind in KINDS if kind[0] != "audio")
        plain = layout_prompt(EncodedDocument(spans), "audio", CONFIG, PYRAMID, **SIZES)
        null = layout_prompt(EncodedDocument(spans), "audio", CONFIG, PYRAMID, **SIZES, drop_condition=True)
        chex.assert_trees_all_equal(null.row.position, plain.row.position)
        ordinary = plain.row.token > SEP
        self.assertTrue((null.row.token[ordinary] == NULL).all())
        chex.assert_trees_all_equal(null.row.token[~ordinary], plain.row.token[~ordinary])

    def test_empty_prompt(self):
        prompt = layout_prompt(EncodedDocument(()), "text", CONFIG, PYRAMID, **SIZES)
        self.assertEqual(prompt.row.token.tolist(), [BOS])
        self.assertEqual(prompt.index, 1)
        with self.assertRaisesRegex(SequenceError, "request.*'smell'"):
            layout_prompt(EncodedDocument(()), "smell", CONFIG, PYRAMID, **SIZES)  # type: ignore[arg-type]


class RefusalTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("no_frames", "audio", "generate", EncodedAudio(np.zeros((0, 3), np.int32)), r"span 0 \(audio, generate\)"),
        ("code_too_large", "audio", "generate", EncodedAudio(np.full((1, 3), 16, np.int32)), "allowed: 0 ... 15"),
        ("no_latents", "image", "generate", EncodedVisual(), "found nothing"),
        ("other_grid", "image", "generate", EncodedVisual(np.zeros((1, 2, 2, 4))), r"\[1, 2, 2, 4\].*\[t, 4, 4, 4\]"),
        ("image_of_two", "image", "generate", EncodedVisual(np.zeros((2, 4, 4, 4))), "2 latent frames, allowed: 1"),
        ("flat_features", "video", "understand", EncodedVisual(None, np.zeros((1, 4, 6))), "features"),
        ("structure_in_text", "text", "generate", EncodedText(np.asarray([SEP], np.int32), 1), "structural"),
    )
    def test_bad_span(self, modality, role, value, message):
        document = EncodedDocument((EncodedSpan(modality, role, value),))
        with self.assertRaisesRegex(SequenceError, message):
            layout(document, CONFIG, PYRAMID, **SIZES)

    @parameterized.parameters(
        ("length", ("text", "generate"), "positions"),
        ("text_targets", ("text", "generate"), "text_targets"),
        ("visual_inputs", ("image", "generate"), "visual_inputs"),
        ("visual_targets", ("video", "generate"), "visual_targets"),
        ("understand_inputs", ("video", "understand"), "understand_inputs"),
        ("audio_inputs", ("audio", "understand"), "audio_inputs"),
        ("audio_targets", ("audio", "generate"), "audio_targets"),
    )
    def test_overflow_is_refused(self, key, kind, what):
        span = random_encoded_span(np.random.default_rng(1), kind, MODEL, SCALES)
        document = EncodedDocument((span,))
        need = getattr(document_size(document, SCALES), key)
        layout(document, dataclasses.replace(CONFIG, **{key: need}), PYRAMID, **SIZES)
        config = dataclasses.replace(CONFIG, **{key: need - 1})
        with self.assertRaisesRegex(UserError, f"needs {need} {what}, allowed: .*'sequence.{key}' = {need - 1}"):
            layout(document, config, PYRAMID, **SIZES)

    def test_pyramid_must_start_with_one_cell(self):
        pyramid = ScalePyramid(((2, 2), (4, 4)), MODEL.visual_bits)
        span = random_encoded_span(np.random.default_rng(0), ("image", "generate"), MODEL, SCALES)
        with self.assertRaisesRegex(SequenceError, "first scale"):
            layout(EncodedDocument((span,)), CONFIG, pyramid, **SIZES)


if __name__ == "__main__":
    absltest.main()
