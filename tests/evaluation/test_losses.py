"""Held-out losses equal an unpacked, document by document evaluation; expert use adds up."""

import jax
import numpy as np
from absl.testing import absltest

from ernie5_jax.config import (
    AudioTokenizerConfig,
    ExperimentConfig,
    TextTokenizerConfig,
    TrainingConfig,
    VisualTokenizerConfig,
)
from ernie5_jax.evaluation import EvaluationError, HeldOut
from ernie5_jax.model import init_params, make_apply
from ernie5_jax.sequence import layout, pack, stack
from ernie5_jax.testing import KINDS, random_encoded_document, tiny_model_config, tiny_sequence_config
from ernie5_jax.training.objective import MODALITIES, loss_sums
from ernie5_jax.vision import ScalePyramid


def tiny_config() -> ExperimentConfig:
    model = tiny_model_config()
    return ExperimentConfig(
        model=model,
        text=TextTokenizerConfig(vocab_size=model.vocab_size),
        visual=VisualTokenizerConfig(channels=(8, model.vision_feature_dim), bits=4, scales=(1, 2), image_size=8),
        audio=AudioTokenizerConfig(levels=model.audio_levels, bins=model.audio_bins),
        sequence=tiny_sequence_config(),
        training=TrainingConfig(evaluate_rows=2),
    )


class HeldOutTest(absltest.TestCase):
    def test_equals_one_document_at_a_time(self):
        config = tiny_config()
        params, bias = init_params(config.model, seed=1)
        rng = np.random.default_rng(0)
        documents = [random_encoded_document(rng, config.model, max_spans=2, first=kind) for kind in KINDS]
        held_out = HeldOut(config, params, bias)
        found = held_out(documents)

        apply = jax.jit(make_apply(config.model))
        pyramid = ScalePyramid(((1, 1), (2, 2)), config.model.visual_bits)
        sums: dict[str, float] = dict.fromkeys(MODALITIES, 0.0)
        below: dict[str, float] = {}
        for document in documents:
            row = layout(
                document, config.sequence, pyramid, audio_bins=config.model.audio_bins, mtp_depth=config.model.mtp_depth
            )
            batch = stack([pack([row], config.sequence, config.model)])
            part = loss_sums(apply(params, bias, batch), batch)
            sums = {name: sums[name] + float(part[name]) for name in sums}
            below = {name: below.get(name, 0.0) + float(value) for name, value in batch.denominators.items()}
        for name in sums:
            self.assertGreater(below[name], 0, name)
            np.testing.assert_allclose(found[f"loss_{name}"], sums[name] / below[name], rtol=2e-5)
        expected = sums["text"] / np.log(2) / below["text_bytes"]
        np.testing.assert_allclose(found["text_bits_per_byte"], expected, rtol=2e-5)

    def test_text_losses_are_those_of_every_document(self):
        config = tiny_config()
        params, bias = init_params(config.model, seed=1)
        rng = np.random.default_rng(2)
        documents = [random_encoded_document(rng, config.model, [("text", "generate")], max_spans=3) for _ in range(5)]
        held_out = HeldOut(config, params, bias)
        found = held_out.text_losses(documents)
        self.assertLen(found, 5)
        for document, loss in zip(documents, found, strict=True):
            np.testing.assert_allclose(loss, held_out([document])["loss_text"], rtol=2e-5)

    def test_expert_use(self):
        config = tiny_config()
        held_out = HeldOut(config, *init_params(config.model, seed=1))
        rng = np.random.default_rng(1)
        documents = [random_encoded_document(rng, config.model, (("text", "generate"),)) for _ in range(3)]
        use = held_out(documents)["expert_use"]
        self.assertEqual(list(use), ["text"])  # nothing else occurs
        self.assertEqual(np.shape(use["text"]), (config.model.num_moe_layers + config.model.num_codec_layers, 8))
        np.testing.assert_allclose(np.sum(use["text"], -1), 1)
        documents.append(random_encoded_document(rng, config.model, (("image", "generate"),)))
        documents.append(random_encoded_document(rng, config.model, (("audio", "understand"),)))
        self.assertEqual(list(held_out(documents)["expert_use"]), ["text", "visual", "audio"])

    def test_no_documents(self):
        config = tiny_config()
        held_out = HeldOut(config, *init_params(config.model))
        with self.assertRaisesRegex(EvaluationError, "no documents"):
            held_out([])


if __name__ == "__main__":
    absltest.main()
