"""MTP acceptance against a restatement with loops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.testing import dummy_batch, tiny_model_config
from ernie5_jax.training.metrics import draft_sums


@dataclasses.dataclass
class Output:
    """What `draft_sums` reads of a `ModelOutput`."""

    text_logits: Any
    mtp_logits: Any


class DraftTest(parameterized.TestCase):
    @parameterized.parameters(*((seed, depth) for seed in range(3) for depth in (1, 2)))
    def test_equals_loops(self, seed, depth):
        config = tiny_model_config(mtp_depth=depth)
        batch = dummy_batch(config, seed=seed, rows=3)
        rng = np.random.default_rng(seed)
        text, mtp = batch.targets["text"], batch.targets["mtp"]
        # Few classes, so that heads often agree.
        output = Output(rng.normal(size=(*text.index.shape, 3)), rng.normal(size=(*mtp.index.shape, 3)))
        drafts = hits = 0
        for row in range(3):
            main = {}
            for slot, position in enumerate(text.index[row]):
                if position < batch.token.shape[1]:
                    main[int(position)] = output.text_logits[row, slot].argmax()
            for module in range(depth):
                for slot, position in enumerate(mtp.index[row, module]):
                    if mtp.weight[row, module, slot] > 0 and int(position) + module + 1 in main:
                        drafts += 1
                        hits += output.mtp_logits[row, module, slot].argmax() == main[int(position) + module + 1]
        found = draft_sums(output, jnp_tree(batch))  # pyright: ignore[reportArgumentType]
        self.assertGreater(drafts, 5)
        self.assertEqual((int(found["draft_hits"]), int(found["draft_count"])), (hits, drafts))

    def test_heads_that_agree_accept_everything(self):
        config = tiny_model_config()
        batch = dummy_batch(config, seed=1)
        one = np.eye(4)[2]
        output = Output(
            np.broadcast_to(one, (*batch.targets["text"].index.shape, 4)),
            np.broadcast_to(one, (*batch.targets["mtp"].index.shape, 4)),
        )
        found = draft_sums(output, jnp_tree(batch))  # pyright: ignore[reportArgumentType]
        self.assertEqual(found["draft_hits"], found["draft_count"])

    def test_nothing_to_compare(self):
        batch = dummy_batch(tiny_model_config())
        self.assertEqual(draft_sums(Output(None, None), batch), {})  # pyright: ignore[reportArgumentType]


def jnp_tree(batch):
    return jax.tree.map(jnp.asarray, batch)


if __name__ == "__main__":
    absltest.main()
