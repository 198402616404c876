"""Special tokens of the text vocabulary; their ids are the same in every vocabulary."""

PAD, BOS, EOS, BOI, EOI, BOV, EOV, BOA, EOA, SEP, NULL = range(11)

SPECIAL_TOKENS = (
    "<pad>", "<bos>", "<eos>", "<boi>", "<eoi>", "<bov>", "<eov>", "<boa>", "<eoa>", "<sep>", "<null>",
    "<think>", "</think>", "<user>", "<assistant>", "<system>", "<speaker>", "<tool>", "</tool>",
)  # fmt: skip

NUM_SPECIAL_TOKENS = 96
"""Ids 0 ... 95: the named ones above, then `<reserved_i>`."""

BEGIN = {"image": BOI, "video": BOV, "audio": BOA}
END = {"image": EOI, "video": EOV, "audio": EOA}
