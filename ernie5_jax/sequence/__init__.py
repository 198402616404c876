"""Sequence: documents -> positions, attention bounds, slots and targets -> packed batches."""

from ernie5_jax.sequence.errors import SequenceError
from ernie5_jax.sequence.layout import UNBOUNDED, Prompt, layout, layout_prompt
from ernie5_jax.sequence.packing import DENOMINATORS, pack, plan_rows, stack
from ernie5_jax.sequence.plain import token_rows
from ernie5_jax.sequence.positions import (
    aligned_centres,
    index_after_understood,
    index_after_visual,
    scale_position,
    summary_position,
    text_position,
)
from ernie5_jax.sequence.row import Row
from ernie5_jax.sequence.sizes import Sizes, check_fits, document_size, row_capacity, sizes_array
from ernie5_jax.sequence.types import (
    Batch,
    Document,
    EncodedAudio,
    EncodedDocument,
    EncodedSpan,
    EncodedText,
    EncodedVisual,
    Modality,
    Role,
    Slots,
    Span,
)
from ernie5_jax.sequence.weights import scale_token_weights, scale_weights

__all__ = [
    "DENOMINATORS",
    "UNBOUNDED",
    "Batch",
    "Document",
    "EncodedAudio",
    "EncodedDocument",
    "EncodedSpan",
    "EncodedText",
    "EncodedVisual",
    "Modality",
    "Prompt",
    "Role",
    "Row",
    "SequenceError",
    "Sizes",
    "Slots",
    "Span",
    "aligned_centres",
    "check_fits",
    "document_size",
    "index_after_understood",
    "index_after_visual",
    "layout",
    "layout_prompt",
    "pack",
    "plan_rows",
    "row_capacity",
    "scale_position",
    "scale_token_weights",
    "scale_weights",
    "sizes_array",
    "stack",
    "summary_position",
    "text_position",
    "token_rows",
]
