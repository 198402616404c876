"""Rows of ready-made tokens against a restatement with loops."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ernie5_jax.kernels.attention import attention_mask
from ernie5_jax.sequence import token_rows


class TokenRowsTest(parameterized.TestCase):
    @parameterized.parameters((None,), ([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]],))
    def test_equals_loops(self, segment):
        token = np.random.default_rng(0).integers(0, 50, (2, 8))
        segment = None if segment is None else np.array(segment)
        batch = token_rows(token, segment)
        documents = np.ones((2, 8), int) if segment is None else segment
        text = batch.targets["text"]
        mask = attention_mask(
            bounds=batch.bounds,
            q_segment=batch.segment,
            k_segment=batch.segment,
            q_rows=jnp.broadcast_to(jnp.arange(8), (2, 8)),
            k_rows=jnp.broadcast_to(jnp.arange(8), (2, 8)),
        )
        tokens = targets = 0
        for row in range(2):
            place = {}
            for i in range(8):
                document = documents[row, i]
                place[document] = place.get(document, -1) + 1
                if not document:
                    continue
                tokens += 1
                np.testing.assert_array_equal(batch.position[row, i], 3 * [place[document]])
                seen = [j for j in range(8) if np.asarray(mask)[row, i, j]]
                self.assertEqual(seen, [j for j in range(i + 1) if documents[row, j] == document])
                if i < 7:
                    learnt = documents[row, i + 1] == document
                    self.assertEqual(text.weight[row, i], learnt)
                    self.assertEqual((text.index[row, i], text.values["token"][row, i]), (i, token[row, i + 1]))
                    targets += learnt
        self.assertEqual((batch.denominators["tokens"], batch.denominators["text"]), (tokens, targets))


if __name__ == "__main__":
    absltest.main()
