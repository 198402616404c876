"""Trains the visual tokenizer on the pictures and videos of prepared documents and saves it.

    python -m experiments.train_visual_tokenizer --config=configs/tiny.py --input=data/documents/tiny/train \
        --out=tokenizers/visual

Sizes and hyperparameters are those of `config.visual`. Documents marked as test split are left out.
"""

from __future__ import annotations

from absl import flags

from experiments import cli

_CONFIG = cli.define_config("tiny.py")
_INPUT = flags.DEFINE_list(
    "input",
    None,
    "Folders of one split of prepared documents (.../documents/NAME/train), separated by commas.",
    required=True,
)
_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)


def main(argv):
    del argv
    from ernie5_jax.data.shards import DocumentShards
    from ernie5_jax.vision import train_visual_tokenizer

    config = cli.load_config(_CONFIG)
    images, videos = {}, {}
    for folder in _INPUT.value:
        for document in DocumentShards(folder):
            if document.meta.get("split") == "test":
                continue
            for span in document.spans:
                found = {"image": images, "video": videos}.get(span.modality)
                if found is not None and hasattr(span.value, "tobytes"):
                    found.setdefault(span.value.tobytes(), span.value)
    print(f"{len(images)} pictures, {len(videos)} videos")
    last = {}
    tokenizer = train_visual_tokenizer(
        list(images.values()),
        list(videos.values()),
        config.visual,
        config.seed,
        log=lambda _, values: last.update(values),
    )
    tokenizer.save(_OUT.value)
    print(f"{_OUT.value}: fingerprint {tokenizer.fingerprint()}")
    print("last batch: " + ", ".join(f"{key} {value:.3f}" for key, value in sorted(last.items())))


if __name__ == "__main__":
    cli.run(main)
