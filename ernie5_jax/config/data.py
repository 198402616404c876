"""Configuration of data sources, sequence layout and packing."""

from __future__ import annotations

import dataclasses

from ernie5_jax.config.base import require


@dataclasses.dataclass(frozen=True)
class SelfCorrectionConfig:
    """Bit flips in the history of a generated picture (ERNIE 5.0 section 2.2.3; VideoAR eq. 8).

    Per scale p ~ U(flip_min + frame_delta * y, flip_max + frame_delta * y), y = latent frame from 0; the first scale
    of a later frame draws its lower end from the last p of the frame before (error inheritance).

    Attributes:
      flip_min, flip_max: Ends of the interval in the first frame; flip_max = 0 switches flips off.
      frame_delta: What every further frame adds to both.
    """

    flip_min: float = 0.0
    flip_max: float = 0.25
    frame_delta: float = 0.01

    def __post_init__(self):
        require(0 <= self.flip_min <= self.flip_max <= 1, "flip_max", self.flip_max, "flip_min <= flip_max <= 1")


@dataclasses.dataclass(frozen=True)
class SequenceConfig:
    """Rows of packed documents.

    Attributes:
      length: S, positions of one row.
      text_targets, visual_inputs, visual_targets, understand_inputs, audio_inputs, audio_targets:
        Slot capacities of one row; 0 means `length`. Packing respects them, nothing is cut.
      scale_weight_alpha: InfinityStar's alpha of the per-scale loss weights (`components` 1.6.5); 1 is Infinity's rule.
      scale_weight_cap: Its cap.
      condition_dropout: Probability that every text token of the condition becomes `<null>`.
      audio_level_weights: Loss weight of each codec level; empty means 1 for all.
      self_correction: Bit flips while training.
    """

    length: int = 128
    text_targets: int = 0
    visual_inputs: int = 0
    visual_targets: int = 0
    understand_inputs: int = 0
    audio_inputs: int = 0
    audio_targets: int = 0
    scale_weight_alpha: float = 1.0
    scale_weight_cap: float = 40.0
    condition_dropout: float = 0.1
    audio_level_weights: tuple[float, ...] = ()
    self_correction: SelfCorrectionConfig = dataclasses.field(default_factory=SelfCorrectionConfig)

    def __post_init__(self):
        require(self.length >= 2, "length", self.length, ">= 2")
        for key in CAPACITIES:
            require(0 <= getattr(self, key) <= self.length, key, getattr(self, key), f"0 ... length = {self.length}")
        require(0 <= self.condition_dropout < 1, "condition_dropout", self.condition_dropout, "0 <= p < 1")

    def capacity(self, name: str) -> int:
        """Slots of one row for `name`, one of `CAPACITIES`."""
        return getattr(self, name) or self.length


CAPACITIES = (
    "text_targets",
    "visual_inputs",
    "visual_targets",
    "understand_inputs",
    "audio_inputs",
    "audio_targets",
)


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One stream of documents of a mixture.

    Attributes:
      path: Folder of prepared document shards or a .jsonl manifest, or empty when `world` or `tfds` makes them.
      world: Name of a built-in world ("digits", "tiny", "digits_recorded", "python_source").
      tfds: TFDS name; `mapping` says which feature becomes which span.
      mapping: Span template of a TFDS example, e.g. `{"image": "image", "caption": "label"}`.
      weight: Mixture weight (share of documents).
      options: Options of the world or builder (strings, e.g. a folder of recordings).
    """

    path: str = ""
    world: str = ""
    tfds: str = ""
    mapping: dict[str, str] = dataclasses.field(default_factory=dict)
    weight: float = 1.0
    options: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        require(self.weight >= 0, "weight", self.weight, ">= 0")
        require(
            sum(map(bool, (self.path, self.world, self.tfds))) <= 1,
            "path",
            self.path,
            "one of path, world, tfds per source",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Mixture of document sources and how rows are read.

    Attributes:
      sources: Named sources.
      task_weights: Share of documents per task name (see docs/documents.md); empty means as they come.
      audio_corruption: Understood audio of a training document has a share of its codes, drawn from U(0, this),
        replaced by random ones.
      visual_corruption: The same for the cells of understood pictures and clips, which are replaced by zeros.
      tokenizers: Folder of tokenizers to take instead of training new ones, e.g. `tokenizers/` of another run.
      prefetch: Batches prepared ahead.
    """

    sources: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    task_weights: dict[str, float] = dataclasses.field(default_factory=dict)
    audio_corruption: float = 0.0
    visual_corruption: float = 0.0
    tokenizers: str = ""
    prefetch: int = 2

    def __post_init__(self):
        for key in ("audio_corruption", "visual_corruption"):
            require(0 <= getattr(self, key) < 1, key, getattr(self, key), "0 <= share < 1")
        require(self.prefetch >= 0, "prefetch", self.prefetch, ">= 0")
        for key, weight in self.task_weights.items():
            require(weight >= 0, f"task_weights.{key}", weight, ">= 0")
