"""Next-codec prediction (components 1.10): which code may change which logits."""

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from ernie5_jax.model import init_params, make_apply
from ernie5_jax.model.embedding import Embedding
from ernie5_jax.sequence import EncodedAudio, EncodedDocument, EncodedSpan, Role, layout, pack, stack
from ernie5_jax.testing import square_scales, tiny_model_config, tiny_sequence_config
from ernie5_jax.vision.pyramid import ScalePyramid

FRAMES = 3
CODES = np.asarray([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int32)
SEQUENCE = tiny_sequence_config(8)  # BOS, BOA, three frames, EOA, EOS


def _batch(config, codes, role: Role = "generate"):
    document = EncodedDocument((EncodedSpan("audio", role, EncodedAudio(codes)),))
    pyramid = ScalePyramid(square_scales(2), config.visual_bits)
    row = layout(document, SEQUENCE, pyramid, audio_bins=config.audio_bins, mtp_depth=config.mtp_depth)
    return stack([pack([row], SEQUENCE, config)])


class NextCodecTest(parameterized.TestCase):
    @parameterized.parameters(1, 2, 3)
    def test_levels_and_frames_are_causal(self, levels_per_layer):
        config = tiny_model_config(levels_per_codec_layer=levels_per_layer, num_moe_layers=1, init_scale=0.15)
        self.assertEqual(config.num_codec_layers, -(-3 // levels_per_layer))
        params, bias = init_params(config, 1)
        apply = jax.jit(lambda batch: make_apply(config)(params, bias, batch).audio_logits[0, : FRAMES + 1])
        base = np.asarray(apply(_batch(config, CODES)))
        for frame in range(FRAMES):
            for level in range(3):
                codes = CODES.copy()
                codes[frame, level] = 11
                moved = np.abs(np.asarray(apply(_batch(config, codes))) - base).max(-1) > 1e-6  # [frame, level]
                # The code is fed back below the heads of later levels and read as input by all later frames.
                expected = np.zeros((FRAMES + 1, 3), bool)
                expected[frame, level + 1 :] = expected[frame + 1 :] = True
                np.testing.assert_array_equal(moved, expected)

    def test_the_end_is_fed_back_from_its_own_row(self):
        config = tiny_model_config(num_moe_layers=1, init_scale=0.15)
        params, bias = init_params(config, 1)
        run = jax.jit(lambda params: make_apply(config)(params, bias, _batch(config, CODES)).audio_logits[0])
        base = np.asarray(run(params))
        table = params["embedding"]["codec"]
        self.assertEqual(table.shape[1], config.audio_bins + 1)
        changed = {**params, "embedding": {**params["embedding"], "codec": table.at[0, -1].add(1.0)}}
        moved = np.abs(np.asarray(run(changed)) - base).max(-1) > 1e-6
        expected = np.zeros_like(moved)
        expected[FRAMES, 1:] = True  # only the position that predicts EOA, after level 1
        np.testing.assert_array_equal(moved[: FRAMES + 1], expected[: FRAMES + 1])

    def test_input_of_a_frame_is_the_sum_of_its_level_embeddings(self):
        config = tiny_model_config()
        embedding = Embedding(config, nnx.Rngs(params=0))
        for role in ("generate", "understand"):
            batch = _batch(config, CODES, role)
            at = batch.inputs["audio"].index[0, :FRAMES]
            table = np.asarray(embedding.codec[...])
            expected = np.stack([sum(table[n, code] for n, code in enumerate(frame)) for frame in CODES])
            chex.assert_trees_all_close(np.asarray(embedding(batch))[0, at], expected, atol=1e-6)


if __name__ == "__main__":
    absltest.main()
