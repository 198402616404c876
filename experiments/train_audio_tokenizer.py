"""Trains the audio tokenizer on the sounds of prepared documents and saves it.

    python -m experiments.train_audio_tokenizer --config=configs/tiny.py --input=data/documents/tiny/train \
        --out=tokenizers/audio

Sizes and hyperparameters are those of `config.audio`. Documents marked as test split are left out.
"""

from __future__ import annotations

from pathlib import Path

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
    from ernie5_jax.audio import AudioError, train_audio_tokenizer
    from ernie5_jax.data.shards import DocumentShards

    config = cli.load_config(_CONFIG)
    clips = {}
    for folder in _INPUT.value:
        shards = DocumentShards(folder)
        if shards.sample_rate != config.audio.sample_rate:
            raise AudioError(
                f"folder '{folder}': found audio at {shards.sample_rate} Hz, allowed: {config.audio.sample_rate} Hz"
            )
        for document in shards:
            if document.meta.get("split") == "test":
                continue
            for span in document.spans:
                if span.modality == "audio" and hasattr(span.value, "tobytes"):
                    clips.setdefault(span.value.tobytes(), span.value)
    print(f"{len(clips)} clips")
    last: dict[str, float] = {}
    tokenizer = train_audio_tokenizer(list(clips.values()), config.audio, seed=config.seed, log=last.update)
    tokenizer.save(Path(_OUT.value))
    print(f"{_OUT.value}: fingerprint {tokenizer.fingerprint()}")
    print("last batch: " + ", ".join(f"{key} {value:.3f}" for key, value in sorted(last.items()) if key != "step"))


if __name__ == "__main__":
    cli.run(main)
