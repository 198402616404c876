"""The two tables of the layout contract, position by position, and the golden numbers of masks and weights."""

from __future__ import annotations

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.config import SequenceConfig
from ernie5_jax.kernels.attention.mask import attention_mask
from ernie5_jax.sequence import (
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    Row,
    aligned_centres,
    index_after_understood,
    layout,
    pack,
    scale_token_weights,
    scale_weights,
)
from ernie5_jax.testing import tiny_model_config
from ernie5_jax.text import special_tokens
from ernie5_jax.text.special_tokens import SPECIAL_TOKENS
from ernie5_jax.vision.pyramid import ScalePyramid

# input | text or slot target | weight | (t, h, w) | UTE. LTS is the length everywhere.
DOCUMENT_A = """
BOS  a    1  0 0 0        0
a    BOI  1  1 1 1        1
BOI  S1   1  2 2 2        2
S2in S2   1  3 3 3        3
S2in S2   1  3 3 4        3
S2in S2   1  3 4 3        3
S2in S2   1  3 4 4        3
SS   EOI  1  4 3.5 3.5    7
EOI  b    1  5 5 5        8
b    BOI  0  6 6 6        9
BOI  -    0  7 7 7        10
I    -    0  8 8 8        11
I    -    0  8 8 9        11
I    -    0  8 9 8        11
I    EOI  1  8 9 9        11
EOI  SEP  1  10 10 10     15
SEP  c    1  11 11 11     16
c    BOA  1  12 12 12     17
BOA  A1   1  13 13 13     18
A1   A2   1  14 14 14     19
A2   EOA! 1  15 15 15     20
EOA  d    1  16 16 16     21
d    BOA  0  17 17 17     22
BOA  -    0  18 18 18     23
A1   -    0  19 19 19     24
A2   -    0  20 20 20     25
EOA  SEP  1  21 21 21     26
SEP  e    1  22 22 22     27
e    EOS  1  23 23 23     28
EOS  -    0  24 24 24     29
"""

DOCUMENT_B = """
BOS    a    1  0 0 0        0
a      BOV  1  1 1 1        1
BOV    F1S1 1  2 2 2        2
F1S2in F1S2 1  3 3 3        3
F1S2in F1S2 1  3 3 4        3
F1S2in F1S2 1  3 4 3        3
F1S2in F1S2 1  3 4 4        3
F1SS   F2S1 1  4 3.5 3.5    7
F2S2in F2S2 1  4 3 3        8
F2S2in F2S2 1  4 3 4        8
F2S2in F2S2 1  4 4 3        8
F2S2in F2S2 1  4 4 4        8
F2SS   EOV  1  5 3.5 3.5    12
EOV    b    1  6 6 6        13
b      BOV  0  7 7 7        14
BOV    -    0  8 8 8        15
V      -    0  9 9 9        16
V      -    0  9 9 10       16
V      -    0  9 10 9       16
V      -    0  9 10 10      16
V      -    0  10 9 9       20
V      -    0  10 9 10      20
V      -    0  10 10 9      20
V      EOV  1  10 10 10     20
EOV    SEP  1  11 11 11     24
SEP    c    1  12 12 12     25
c      EOS  1  13 13 13     26
EOS    -    0  14 14 14     27
"""

BINS, LEVELS = 8, 3
LETTERS = {letter: 100 + i for i, letter in enumerate("abcde")}
PYRAMID = ScalePyramid(((1, 1), (2, 2)), 4)
CONFIG = SequenceConfig(length=32, scale_weight_cap=1.0)  # cap 1: every scale token weighs the same
MODEL = tiny_model_config(visual_bits=4, audio_levels=LEVELS, audio_bins=BINS, vision_feature_dim=6)


def _token_id(name: str) -> int | None:
    special = f"<{name.lower()}>"
    return LETTERS.get(name, SPECIAL_TOKENS.index(special) if special in SPECIAL_TOKENS else None)


def _span(modality: str, role: str, frames: int = 1) -> EncodedSpan:
    rng = np.random.default_rng(len(modality) + 10 * len(role))
    if modality == "audio":
        value = EncodedAudio(np.arange(frames * LEVELS, dtype=np.int32).reshape(frames, LEVELS))
    elif role == "generate":
        value = EncodedVisual(latents=rng.normal(size=(frames, 2, 2, 4)).astype(np.float32))
    else:
        value = EncodedVisual(features=rng.normal(size=(frames, 2, 2, 1, 6)).astype(np.float32))
    return EncodedSpan(modality, role, value)  # type: ignore[arg-type]


def _text(letter: str) -> EncodedSpan:
    return EncodedSpan("text", "generate", EncodedText(np.asarray([LETTERS[letter]], np.int32), 1))


A = EncodedDocument((
    _text("a"), _span("image", "generate"), _text("b"), _span("image", "understand"), _text("c"),
    _span("audio", "generate", 2), _text("d"), _span("audio", "understand", 2), _text("e"),
))  # fmt: skip
B = EncodedDocument(
    (_text("a"), _span("video", "generate", 2), _text("b"), _span("video", "understand", 2), _text("c"))
)


def _value(span: EncodedSpan) -> Any:
    return span.value


def _layout(document: EncodedDocument, mtp_depth: int = 1) -> Row:
    return layout(document, CONFIG, PYRAMID, audio_bins=BINS, mtp_depth=mtp_depth)


def _mask(row, length: int | None = None) -> np.ndarray:
    rows = jnp.arange(len(row.token))[None]
    segment = jnp.asarray(row.segment)[None]
    mask = attention_mask(
        q_rows=rows, k_rows=rows, bounds=jnp.asarray(row.bounds)[None], q_segment=segment, k_segment=segment
    )[0]
    return np.asarray(mask)[:length, :length]


class GoldenTablesTest(parameterized.TestCase):
    @parameterized.named_parameters(("a", A, DOCUMENT_A), ("b", B, DOCUMENT_B))
    def test_table(self, document, table):
        lines = [line.split() for line in table.strip().splitlines()]
        row = _layout(document)
        self.assertEqual(row.length, len(lines))
        text = dict(zip(row.targets["text"].index.tolist(), range(100), strict=False))
        visual = dict(zip(row.targets["visual"].index.tolist(), range(100), strict=False))
        audio: Any = row.targets.get("audio")
        audio_at = dict(zip(audio.index.tolist(), range(100), strict=False)) if audio else {}
        visual_in = row.inputs["visual"].index.tolist()
        for i, (name, target, weight, t, h, w, ute) in enumerate(lines):
            with self.subTest(row=i):
                chex.assert_trees_all_equal(row.position[i], np.asarray([t, h, w], np.float32))
                self.assertEqual(row.bounds[i].tolist(), [len(lines), int(ute)])
                token = _token_id(name)
                self.assertEqual(row.is_text[i], token is not None)
                self.assertEqual(row.token[i], special_tokens.PAD if token is None else token)
                self.assertEqual(i in visual_in, "S2in" in name or "SS" in name)
                if "S2in" in name or "SS" in name:
                    scale = row.inputs["visual"].values["scale"][visual_in.index(i)]
                    self.assertEqual(scale, 0 if "SS" in name else 1)
                self.assertEqual(i in row.inputs["understand"].index, name in ("I", "V"))
                self.assertEqual("audio" in row.inputs and i in row.inputs["audio"].index, name in ("A1", "A2"))
                target_token = _token_id(target)
                self.assertEqual(i in text, target_token is not None)
                if target_token is not None:
                    slots = row.targets["text"]
                    self.assertEqual(slots.values["token"][text[i]], target_token)
                    self.assertEqual(slots.weight[text[i]], float(weight))
                self.assertEqual(i in visual, target[-2:] in ("S1", "S2"))
                if i in visual:
                    slots = row.targets["visual"]
                    self.assertEqual(slots.values["scale"][visual[i]], int(target[-1]) - 1)
                    self.assertEqual(slots.weight[visual[i]], float(weight))
                    self.assertEqual(slots.values["is_video"][visual[i]], target.startswith("F"))
                self.assertEqual(i in audio_at, target in ("A1", "A2", "EOA!"))
                if i in audio_at:
                    codes = {"A1": [0, 1, 2], "A2": [3, 4, 5], "EOA!": [BINS] * LEVELS}[target]
                    self.assertEqual(audio.values["codes"][audio_at[i]].tolist(), codes)
                    self.assertEqual(audio.weight[audio_at[i]].tolist(), [float(weight)] * LEVELS)

    def test_visual_values_follow_the_pyramid(self):
        row = _layout(B)
        forced = PYRAMID.teacher_forcing(_value(B.spans[1]).latents)
        chex.assert_trees_all_equal(row.targets["visual"].values["bits"], forced.bits.reshape(-1, 4))
        frames = [np.concatenate([forced.inputs[y, 1:], forced.summary[y]]) for y in range(2)]
        chex.assert_trees_all_equal(row.inputs["visual"].values["features"], np.concatenate(frames))

    @parameterized.named_parameters(
        ("a", A, {0: "BOI", 15: "c", 16: "BOA", 26: "e", 27: "EOS"}, {8, 21}),
        ("b", B, {0: "BOV", 24: "c", 25: "EOS"}, {13}),
    )
    def test_mtp_targets(self, document, weighted, unweighted):
        slots = _layout(document).mtp[0]
        found = {i: (t, w) for i, t, w in zip(slots.index, slots.values["token"], slots.weight, strict=True)}
        self.assertEqual({i: t for i, (t, w) in found.items() if w}, {i: _token_id(t) for i, t in weighted.items()})
        self.assertEqual({i for i, (_, w) in found.items() if not w}, unweighted)

    @parameterized.parameters(2, 3, 7)
    def test_a_run_of_t_tokens_has_t_minus_1_minus_d_targets(self, length):
        ids = np.arange(100, 100 + length - 2, dtype=np.int32)
        spans = (EncodedSpan("text", "generate", EncodedText(ids, 1)),) if length > 2 else ()
        row = _layout(EncodedDocument(spans), mtp_depth=3)
        self.assertEqual(row.length, length)  # BOS and EOS included
        self.assertLen(row.targets["text"].index, length - 1)
        for d, slots in enumerate(row.mtp, 1):
            self.assertLen(slots.index, max(length - 1 - d, 0))

    def test_mtp_reads_only_text(self):
        row = _layout(A, mtp_depth=2)
        for d in (1, 2):
            expected = [row.token[i + d] if i + d < 30 and row.is_text[i + d] else -1 for i in range(30)]
            self.assertEqual(row.mtp_token[d - 1].tolist(), expected)
        # Depth 2 needs four inputs of one run: 15 ... 18 and 26 ... 29 in table A.
        self.assertEqual(row.mtp[1].index.tolist(), [15, 26])
        self.assertEqual(row.mtp[1].values["token"].tolist(), [special_tokens.BOA, special_tokens.EOS])


class LengthsAndMasksTest(parameterized.TestCase):
    def test_image_with_three_scales(self):
        pyramid = ScalePyramid(((1, 1), (2, 2), (4, 4)), 4)
        latents = np.random.default_rng(0).normal(size=(1, 4, 4, 4)).astype(np.float32)
        document = EncodedDocument((EncodedSpan("image", "generate", EncodedVisual(latents=latents)),))
        row = layout(document, CONFIG, pyramid, audio_bins=BINS, mtp_depth=0)
        self.assertEqual(row.length, 1 + (1 + 4 + 16 + 1) + 2)  # BOS, BOI + scales + SS, EOI, EOS
        self.assertLen(row.targets["visual"].index, 21)
        self.assertEqual(row.targets["visual"].index.tolist(), list(range(1, 22)))
        self.assertEqual(row.inputs["visual"].index.tolist(), list(range(2, 23)))

    @parameterized.named_parameters(
        ("image_1_2_3", ((1, 1), (2, 2), (3, 3)), "image", 1, 16, 178),
        ("video_3_frames", ((1, 1), (2, 2)), "video", 3, 17, 171),
    )
    def test_allowed_pairs(self, scales, modality, frames, length, pairs):
        latents = np.random.default_rng(0).normal(size=(frames, *scales[-1], 4)).astype(np.float32)
        spans = (_text("a"), EncodedSpan(modality, "generate", EncodedVisual(latents=latents)))
        row = layout(EncodedDocument(spans), CONFIG, ScalePyramid(scales, 4), audio_bins=BINS, mtp_depth=0)
        self.assertEqual(_mask(row, length).sum(), pairs)
        if modality == "video":
            expected = [0, 1, 2, *[3] * 4, 7, *[8] * 4, 12, *[13] * 4]
            self.assertEqual(row.bounds[:17, 1].tolist(), expected)

    def test_two_packed_documents(self):
        document = EncodedDocument((_text("a"), _span("image", "generate")))
        row = _layout(document)
        packed = pack([row, row], CONFIG, MODEL)
        first = [*range(7), *range(row.length, row.length + 7)]  # BOS, a, BOI = scale 1, four cells of scale 2
        mask = _mask(packed)
        self.assertEqual(mask[np.ix_(first, first)].sum(), 68)
        self.assertFalse(mask[: row.length, row.length :].any() or mask[row.length :, : row.length].any())
        self.assertFalse(mask[2 * row.length :].any() or mask[:, 2 * row.length :].any())


class PositionsAndWeightsTest(parameterized.TestCase):
    @parameterized.parameters((1, [3.5]), (2, [1.5, 5.5]), (4, [0.5, 2.5, 4.5, 6.5]))
    def test_centre_alignment(self, cells, expected):
        self.assertEqual(aligned_centres(cells, 8).tolist(), expected)

    def test_understood_grid_as_ernie_45_vl(self):
        features = np.zeros((1, 2, 3, 1, 6), np.float32)
        document = EncodedDocument((_text("a"), EncodedSpan("image", "understand", EncodedVisual(features=features))))
        row = _layout(document)
        expected = [[3, 3, 3], [3, 3, 4], [3, 3, 5], [3, 4, 3], [3, 4, 4], [3, 4, 5], [6, 6, 6], [7, 7, 7]]
        self.assertEqual(row.position[3:11].tolist(), expected)
        self.assertEqual(index_after_understood(3, 1, (2, 3)), 6)

    @parameterized.parameters(
        (1.0, [0.032258, 0.064516, 0.129032, 0.258065, 0.516129]),
        (4.0, [0.007966, 0.024150, 0.073208, 0.221925, 0.672751]),
    )
    def test_scale_weights(self, alpha, expected):
        scales = tuple((n, n) for n in (1, 2, 4, 8, 16))
        chex.assert_trees_all_close(scale_weights(scales, alpha), np.asarray(expected), atol=1e-6)
        tokens = np.asarray(scale_token_weights(scales, alpha))
        cells = np.asarray([h * w for h, w in scales])
        self.assertAlmostEqual((tokens * cells).sum(), cells.sum())
        chex.assert_trees_all_close(tokens * cells / cells.sum(), np.asarray(expected), atol=1e-6)

    def test_scale_and_level_weights_reach_the_slots(self):
        config = SequenceConfig(length=32, scale_weight_alpha=1.0, audio_level_weights=(2.0, 1.0, 0.5))
        row = layout(A, config, PYRAMID, audio_bins=BINS, mtp_depth=0)
        # n = (1, 4): w ~ (2, 1) per token, mean 1 over five tokens.
        chex.assert_trees_all_close(row.targets["visual"].weight, np.asarray([5 / 3] + [5 / 6] * 4, np.float32))
        self.assertEqual(row.targets["audio"].weight.tolist(), [[2.0, 1.0, 0.5]] * 3)


if __name__ == "__main__":
    absltest.main()
