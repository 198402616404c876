"""A model that knows four documents by heart generates exactly them.

Training and decoding lay out positions, masks and inputs in different code: where they differ, the loss falls all the
same and samples are noise (InfinityStar#18). Here the samples must be the documents.
"""

import jax
import numpy as np
import pytest
from absl.testing import absltest

from ernie5_jax.compiling import cpu_optimization
from ernie5_jax.config import GenerationConfig
from ernie5_jax.data import Tokenizers, encode_in_memory
from ernie5_jax.data.documents import captioned
from ernie5_jax.evaluation.losses import HeldOut
from ernie5_jax.generation import Engine, Request
from ernie5_jax.metrics import psnr
from ernie5_jax.sequence import Document, EncodedAudio, EncodedVisual, layout, pack, stack
from ernie5_jax.testing import (
    DummyAudioTokenizer,
    DummyTextTokenizer,
    DummyVisualTokenizer,
    tiny_experiment_config,
)
from ernie5_jax.training.state import init_state
from ernie5_jax.training.step import make_train_step, split_micro_batches
from ernie5_jax.vision.pyramid import ScalePyramid

STEPS = 250


@pytest.mark.slow
class OverfitTest(absltest.TestCase):
    def test_generates_what_it_has_learnt(self):
        config = tiny_experiment_config(
            model={"elastic": False, "init_scale": 0.1},
            optimizer={"learning_rate": 5e-3, "warmup_steps": 20, "weight_decay": 0.0, "ema_decay": 0.0},
            training={"steps": STEPS, "batch_rows": 4},
        )
        text = DummyTextTokenizer(config.model.vocab_size)
        tokenizers = Tokenizers(text, DummyVisualTokenizer(), DummyAudioTokenizer())
        documents = _documents(np.random.default_rng(0))
        encoded = encode_in_memory(documents, tokenizers, config.sequence)
        pyramid = ScalePyramid(tokenizers.visual.scales, tokenizers.visual.bits)
        rows = [layout(d, config.sequence, pyramid, audio_bins=16, mtp_depth=1) for d in encoded]
        batch = stack([pack([row], config.sequence, config.model) for row in rows])
        state = _train(config, batch)

        losses = HeldOut(config, state["params"], state["router_bias"])(encoded)
        for modality in ("text", "image", "video", "audio"):
            self.assertLess(losses[f"loss_{modality}"], 0.05)
        self.assertGreater(losses["mtp_acceptance"], 0.9)

        engine = Engine(
            config.model, state["params"], state["router_bias"], tokenizers, config.sequence,
            GenerationConfig(temperature=0, visual_temperature=0, audio_temperature=0, video_frames=5),
        )  # fmt: skip
        requests = [Request(Document(d.spans[:-1]), d.spans[-1].modality) for d in documents]
        said, image, video, audio = engine.generate(requests)
        self.assertEqual(said.text, documents[0].spans[-1].value)
        for result, number in ((image, 1), (video, 2)):
            bits = rows[number].targets["visual"].values["bits"]
            np.testing.assert_array_equal(result.tokens.reshape(bits.shape), bits)
        sound = encoded[3].spans[-1].value
        assert isinstance(sound, EncodedAudio)
        np.testing.assert_array_equal(audio.tokens, sound.codes)

        picture = encoded[1].spans[-1].value
        assert isinstance(picture, EncodedVisual) and picture.latents is not None and image.image is not None
        through = tokenizers.visual.decode(pyramid.dequantize(pyramid.quantize(picture.latents[None])))[0, 0]
        original = documents[1].spans[-1].value
        found, wanted = (psnr(x[None] / 255.0, original[None] / 255.0)[0] for x in (image.image, through))
        self.assertAlmostEqual(found, wanted, delta=0.1)


def _documents(rng):
    flat = rng.integers(0, 256, (5, 2, 2, 3), dtype=np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    wave = rng.uniform(-1, 1, 4).repeat(40).astype(np.float32)
    return [
        captioned("image_caption", flat[4], "two words"),
        captioned("image_generation", flat[0], "a picture"),
        captioned("video_generation", flat, "a film"),
        captioned("speech_generation", wave, "a sound"),
    ]


def _train(config, batch):
    step = jax.jit(make_train_step(config), donate_argnums=0, compiler_options=cpu_optimization(0))
    state, batch = jax.jit(lambda: init_state(config))(), split_micro_batches(batch, 1)
    for _ in range(STEPS):
        state, _ = step(state, batch, None)
    return state


if __name__ == "__main__":
    absltest.main()
