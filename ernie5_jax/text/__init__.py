"""Byte-exact text tokenizer: BPE on UTF-16BE with byte fallback and keyed BPE-dropout.

Special tokens are in `special_tokens`; other vocabularies plug in through `TextTokenizer`.
"""

from ernie5_jax.text.bpe import FIRST_MERGE, BpeTokenizer, TextTokenizerError, load_text_tokenizer
from ernie5_jax.text.pretokenize import num_utf8_bytes
from ernie5_jax.text.protocol import TextTokenizer
from ernie5_jax.text.special_tokens import NUM_SPECIAL_TOKENS, SPECIAL_TOKENS
from ernie5_jax.text.trainer import MAX_UNSPACED_CJK, train_bpe

__all__ = [
    "FIRST_MERGE",
    "MAX_UNSPACED_CJK",
    "NUM_SPECIAL_TOKENS",
    "SPECIAL_TOKENS",
    "BpeTokenizer",
    "TextTokenizer",
    "TextTokenizerError",
    "load_text_tokenizer",
    "num_utf8_bytes",
    "train_bpe",
]
