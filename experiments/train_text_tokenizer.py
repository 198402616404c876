"""Trains the text tokenizer on text files or manifests and saves it.

    python -m experiments.train_text_tokenizer --input=book.txt,manifest.jsonl --out=tokenizers/text

Files that end in .jsonl are manifests: the text spans of their documents are read. Every other file is one text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from experiments import cli

_INPUT = flags.DEFINE_list("input", None, "Files to learn from, separated by commas.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", None, "Special tokens and bytes included.")


def main(argv):
    del argv
    from tqdm import tqdm

    from ernie5_jax.config import TextTokenizerConfig
    from ernie5_jax.text import train_bpe

    config = TextTokenizerConfig()
    if _VOCAB_SIZE.value is not None:
        config = dataclasses.replace(config, vocab_size=_VOCAB_SIZE.value)
    texts = list(tqdm(_read_all(_INPUT.value), desc="reading", unit=" texts"))
    tokenizer = train_bpe(tqdm(texts, desc="splitting", unit=" texts"), config)
    tokenizer.save(_OUT.value)
    tokens = sum(len(tokenizer.encode(text)) for text in tqdm(texts, desc="encoding", unit=" texts"))
    characters = sum(map(len, texts))
    print(f"{_OUT.value}: {tokenizer.num_tokens} tokens, fingerprint {tokenizer.fingerprint()}")
    print(f"{characters} characters are {tokens} tokens, {characters / max(tokens, 1):.3f} characters per token")


def _read_all(paths: list[str]) -> Iterator[str]:
    for name in paths:
        path = Path(name)
        if not path.is_file():
            raise _bad(path, "no such file", "an existing text file or .jsonl manifest")
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise _bad(path, f"byte {error.start} is not UTF-8", "UTF-8 text") from None
        if path.suffix == ".jsonl":
            yield from _manifest_texts(path, content)
        else:
            yield content


def _manifest_texts(path: Path, content: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            spans = json.loads(line)["spans"]
            texts = [span["text"] for span in spans if "text" in span]
        except (ValueError, KeyError, TypeError):
            raise _bad(path, f"line {number}: {line[:60]!r}", 'an object with "spans"') from None
        for text in texts:
            if not isinstance(text, str):
                raise _bad(path, f"line {number}: text {text!r}", "a string")
            yield text


def _bad(path: Path, found: str, allowed: str) -> Exception:
    from ernie5_jax.errors import UserError

    return UserError(f"input '{path}': found {found}, allowed: {allowed}")


if __name__ == "__main__":
    cli.run(main)
