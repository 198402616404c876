"""What is generated over the cache has the logits of the teacher-forced full forward (float32, 1e-5)."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.generation import (
    Cursor,
    Weights,
    advance,
    generate_audio,
    generate_text,
    generate_visual,
    prompt_batch,
    row_keys,
    sampling_params,
)
from ernie5_jax.model import empty_cache, init_params, make_apply
from ernie5_jax.sequence import (
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    layout,
    layout_prompt,
    pack,
    stack,
)
from ernie5_jax.testing import KINDS, random_encoded_document, square_scales, tiny_model_config, tiny_sequence_config
from ernie5_jax.vision.pyramid import ScalePyramid

CONFIG = tiny_model_config(vocab_size=360, visual_scales=3, audio_levels=4, init_scale=0.15)
PYRAMID = ScalePyramid(square_scales(3), CONFIG.visual_bits)
SEQUENCE = tiny_sequence_config(160)
ROOM = 72


def _prompts(modality, seed):
    """Documents of unequal length and their prompts; the first holds sound that was generated, and fed back."""
    rng = np.random.default_rng(seed)
    documents = [random_encoded_document(rng, CONFIG, KINDS, max_spans=n, scales=PYRAMID.scales) for n in (1, 3, 2)]
    sound = random_encoded_document(rng, CONFIG, (("audio", "generate"),), max_spans=1, scales=PYRAMID.scales)
    documents[0] = EncodedDocument((*sound.spans, *documents[0].spans))
    return documents, [layout_prompt(d, modality, SEQUENCE, PYRAMID, audio_bins=CONFIG.audio_bins) for d in documents]


def _full_forward(documents, spans):
    """Teacher-forced logits of the documents continued by `spans`."""
    rows = []
    for document, span in zip(documents, spans, strict=True):
        whole = EncodedDocument((*document.spans, span))
        row = layout(whole, SEQUENCE, PYRAMID, audio_bins=CONFIG.audio_bins, mtp_depth=CONFIG.mtp_depth)
        rows.append(pack([row], SEQUENCE, CONFIG))
    batch = stack(rows)
    params, bias = _weights()
    return batch, jax.jit(make_apply(CONFIG))(params, bias, batch)


def _weights():
    params, bias = jax.jit(lambda: init_params(CONFIG, 3))()
    return params, bias + 0.05 * jax.random.normal(jax.random.key(1), bias.shape)


def _last(slots, row, count):
    """The last `count` filled slots of a row."""
    filled = int((np.asarray(slots.index[row]) < SEQUENCE.length).sum())
    return slice(filled - count, filled)


class TeacherForcingTest(parameterized.TestCase):
    def _start(self, modality, head):
        documents, prompts = _prompts(modality, seed=5)
        batch, rows, lengths, index = prompt_batch(prompts, 80, head)
        params, bias = _weights()
        weights = Weights(params, bias, None)
        cursor = Cursor(empty_cache(CONFIG, len(prompts), 80 + ROOM), jnp.asarray(lengths), jnp.asarray(index))
        return documents, batch, rows, weights, cursor, row_keys(0, jnp.arange(3), jnp.zeros(3, jnp.int32))

    def _check(self, found, expected):
        scale = float(np.abs(expected).max())
        self.assertGreater(scale, 0.05)
        chex.assert_trees_all_close(np.asarray(found) / scale, np.asarray(expected) / scale, atol=1e-5)

    @parameterized.parameters(("image", 1), ("video", 3))
    def test_visual(self, modality, frames):
        documents, batch, rows, weights, cursor, keys = self._start(modality, "visual")
        apply = make_apply(CONFIG)

        @jax.jit
        def run(weights, cursor, batch, rows):
            output, cache = advance(apply, weights, cursor, batch, rows)
            cursor = dataclasses.replace(cursor, cache=cache)
            return generate_visual(
                apply,
                weights,
                cursor,
                output.visual_logits,
                keys,
                sampling_params(1.0),
                pyramid=PYRAMID,
                frames=frames,
                guided=False,
            )

        trace = run(weights, cursor, batch, rows)
        spans = [EncodedVisual(bits=np.asarray(bits)) for bits in trace.bits]
        full_batch, output = _full_forward(documents, [EncodedSpan(modality, "generate", s) for s in spans])
        count = frames * PYRAMID.tokens
        for i in range(3):
            part = _last(full_batch.targets["visual"], i, count)
            bits = full_batch.targets["visual"].values["bits"][i, part]
            np.testing.assert_array_equal(bits, np.asarray(trace.bits[i]).reshape(count, -1))
            self._check(trace.logits[i].reshape(count, -1), output.visual_logits[i, part])
            sign = np.where(bits > 0, 1, -1)
            log_probs = jax.nn.log_sigmoid(sign * output.visual_logits[i, part]).sum(-1)
            chex.assert_trees_all_close(trace.log_probs[i].reshape(count), log_probs, atol=1e-4)

    def test_audio_across_codec_levels(self):
        documents, batch, rows, weights, cursor, keys = self._start("audio", "audio")
        apply = make_apply(CONFIG)

        @jax.jit
        def run(weights, cursor, batch, rows):
            return generate_audio(
                apply,
                weights,
                cursor,
                (batch, rows),
                keys,
                sampling_params(1.0),
                levels=CONFIG.audio_levels,
                bins=CONFIG.audio_bins,
                max_frames=20,
                guided=False,
            )

        trace = run(weights, cursor, batch, rows)
        spans = []
        for codes, n in zip(trace.codes, trace.count, strict=True):
            spans.append(EncodedSpan("audio", "generate", EncodedAudio(np.asarray(codes[: max(int(n), 1)]))))
        self.assertGreater(int(trace.count.max()), 1)
        full_batch, output = _full_forward(documents, spans)
        for i in range(3):
            n = int(trace.count[i])
            if n == 0:
                continue
            ended = n < 20
            part = _last(full_batch.targets["audio"], i, n + 1)
            expected = np.array(output.audio_logits[i, part])[: n + ended]
            found = np.array(trace.logits[i, : n + ended])
            log_probs = np.array(jax.nn.log_softmax(jnp.asarray(expected)))
            codes = np.array(trace.codes[i, : n + ended])
            log_probs = np.take_along_axis(log_probs, codes[..., None], -1)[..., 0]
            log_probs[n:, 1:] = 0  # the end is one action
            chex.assert_trees_all_close(trace.log_probs[i, : n + ended], log_probs, atol=1e-4)
            expected[:, 1:, -1] = found[:, 1:, -1] = 0  # EOA of later levels is masked out in generation
            self._check(found, expected)

    def test_text(self):
        documents, batch, rows, weights, cursor, keys = self._start("text", "text")
        apply = make_apply(CONFIG)

        @jax.jit
        def run(weights, cursor, batch, rows):
            output, cache = advance(apply, weights, cursor, batch, rows)
            cursor = dataclasses.replace(cursor, cache=cache)
            return generate_text(
                apply, weights, cursor, output.text_logits[:, 0], keys, sampling_params(1.0), max_tokens=12
            )

        trace = run(weights, cursor, batch, rows)
        spans = []
        for token, n in zip(trace.token, trace.count, strict=True):
            self.assertGreater(int(n), 0)
            spans.append(EncodedSpan("text", "generate", EncodedText(np.asarray(token[: int(n)]), int(n))))
        full_batch, output = _full_forward(documents, spans)
        for i in range(3):
            n = int(trace.count[i])
            part = _last(full_batch.targets["text"], i, n + 1)
            found, expected = np.array(trace.logits[i, :n]), np.array(output.text_logits[i, part])[:n]
            self._check(np.where(np.isfinite(found), found, 0), np.where(np.isfinite(found), expected, 0))
            log_probs = jax.nn.log_softmax(expected)
            log_probs = np.take_along_axis(np.array(log_probs), np.asarray(trace.token[i, :n, None]), -1)[:, 0]
            chex.assert_trees_all_close(trace.log_probs[i, :n], log_probs, atol=1e-4)


if __name__ == "__main__":
    absltest.main()
