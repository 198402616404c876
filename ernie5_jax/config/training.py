"""Configuration of optimiser, training loop, parallelism, generation and evaluation."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ernie5_jax.config.base import require


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled decay, clipping and a schedule (ERNIE 5.0 section 3.2).

    Attributes:
      learning_rate: The largest one.
      end_learning_rate: Where the decay ends.
      schedule: "wsd" = warm-up, constant, linear decay over the last `decay_fraction`; "cosine" = warm-up, cosine.
      warmup_steps: Steps of linear warm-up.
      decay_fraction: Share of `training.steps` that "wsd" spends on its decay; 0 = constant to the end.
      beta1, beta2, eps: Adam's.
      weight_decay: Decoupled, on matrices only.
      clip_norm: Global gradient norm; 0 switches clipping off.
      ema_decay: Exponential moving average of the parameters; 0 switches it off.
    """

    learning_rate: float = 2e-3
    end_learning_rate: float = 2e-4
    schedule: Literal["wsd", "cosine"] = "wsd"
    warmup_steps: int = 80
    decay_fraction: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    ema_decay: float = 0.985

    def __post_init__(self):
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "> 0")
        require(self.end_learning_rate >= 0, "end_learning_rate", self.end_learning_rate, ">= 0")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, ">= 0")
        require(0 <= self.decay_fraction <= 1, "decay_fraction", self.decay_fraction, "0 ... 1")
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "0 <= ema_decay < 1")
        for key in ("beta1", "beta2"):
            require(0 <= getattr(self, key) < 1, key, getattr(self, key), f"0 <= {key} < 1")
        require(self.eps > 0, "eps", self.eps, "> 0")
        require(self.clip_norm >= 0, "clip_norm", self.clip_norm, ">= 0")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the objective (decisions section 6).

    Attributes:
      modality_weighting: "posterior" rescales modalities by w_m = clip(EMA_text / EMA_m); "fixed" uses `fixed_weights`.
      fixed_weights: w_m by modality name; missing ones are 1. Multiplies the posterior weight too.
      ema_decay: Decay of the running loss per modality.
      weight_min, weight_max: Clip of posterior weights.
      mtp_weight: Weight of multi-token prediction (0.3, then 0.1 in mid-training).
    """

    modality_weighting: Literal["posterior", "fixed"] = "posterior"
    fixed_weights: dict[str, float] = dataclasses.field(default_factory=dict)
    ema_decay: float = 0.98
    weight_min: float = 0.1
    weight_max: float = 10.0
    mtp_weight: float = 0.3

    def __post_init__(self):
        require(0 < self.weight_min <= self.weight_max, "weight_max", self.weight_max, ">= weight_min > 0")
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "0 <= ema_decay < 1")
        require(self.mtp_weight >= 0, "mtp_weight", self.mtp_weight, ">= 0")
        modalities = ("text", "image", "video", "audio")
        for key, weight in self.fixed_weights.items():
            require(key in modalities, f"fixed_weights.{key}", weight, ", ".join(modalities))


@dataclasses.dataclass(frozen=True)
class ElasticSamplingConfig:
    """Which submodel an optimiser step trains (ERNIE 5.0 section 3.3); all probabilities 1 = always the full model.

    The report's own probabilities are .75, .8 and .8.

    Attributes:
      full_depth, full_width, full_top_k: Probability of the full setting of each axis, drawn independently.
      min_layers, min_experts, min_top_k: Lower ends of the reduced settings; min_experts 0 = the model's top_k.
      max_layers, max_experts, max_top_k: Upper ends; 0 = one less than the full setting.
      granularity: "microbatch" draws one submodel per accumulation step: skipped layers cost nothing, and full and
        reduced models meet in one update where there are several. "row" gives every packed row its own: more of them
        per update, but a layer that one row needs runs for all, so depth saves no time.
      layer_choice: Which layers between the first and the codec layers stay: "random" or "even"ly spaced ones.
      expert_choice: "random" draws a subset in every layer, "nested" keeps the first ones.
    """

    full_depth: float = 1.0
    full_width: float = 1.0
    full_top_k: float = 1.0
    min_layers: int = 1
    min_experts: int = 0
    min_top_k: int = 1
    max_layers: int = 0
    max_experts: int = 0
    max_top_k: int = 0
    granularity: Literal["microbatch", "row"] = "microbatch"
    layer_choice: Literal["random", "even"] = "random"
    expert_choice: Literal["random", "nested"] = "random"

    def __post_init__(self):
        for key in ("full_depth", "full_width", "full_top_k"):
            require(0 <= getattr(self, key) <= 1, key, getattr(self, key), "0 ... 1")
        for axis in ("layers", "experts", "top_k"):
            low, high = getattr(self, f"min_{axis}"), getattr(self, f"max_{axis}")
            floor = 0 if axis == "experts" else 1
            require(low >= floor, f"min_{axis}", low, f">= {floor}")
            require(high == 0 or high >= low, f"max_{axis}", high, f"0 or >= min_{axis} = {low}")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The loop.

    Attributes:
      steps: Optimiser steps of the whole run; schedules depend on it.
      batch_rows: Packed rows of one optimiser step, all micro-batches together.
      micro_batches: Gradient-accumulation steps.
      precision: Parameter and compute types.
      log_every, checkpoint_every, evaluate_every: In steps; the latter two 0 = never (a last checkpoint is always
        written; the best one by held-out loss is kept only where there are evaluations).
      init_from: Run folder or checkpoint whose parameters and tokenizers a new run starts from; empty = from scratch.
      keep_checkpoints: Latest ones kept; the best by held-out loss is kept besides.
      evaluate_rows: Held-out rows of one evaluation.
      tensorboard: Whether TensorBoard files are written.
      progress: Whether bars are shown.
    """

    steps: int = 800
    batch_rows: int = 20
    micro_batches: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    log_every: int = 10
    checkpoint_every: int = 200
    evaluate_every: int = 0
    evaluate_rows: int = 16
    init_from: str = ""
    keep_checkpoints: int = 2
    tensorboard: bool = True
    progress: bool = True

    def __post_init__(self):
        for key in ("steps", "batch_rows", "micro_batches", "log_every", "evaluate_rows", "keep_checkpoints"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        for key in ("checkpoint_every", "evaluate_every"):
            require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0")
        require(
            self.batch_rows % self.micro_batches == 0,
            "micro_batches",
            self.micro_batches,
            f"a divisor of batch_rows = {self.batch_rows}",
        )


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Mesh and sharding preset.

    Attributes:
      data: Devices along the data axis; 0 = all devices.
      rules: "replicated", "fsdp" or "expert" (see `parallel.sharding`).
    """

    data: int = 0
    rules: Literal["replicated", "fsdp", "expert"] = "replicated"

    def __post_init__(self):
        require(self.data >= 0, "data", self.data, ">= 0")


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Default sampling settings per modality.

    Attributes:
      temperature, top_k, top_p: Sampling of text tokens; top_k = 0 and top_p = 1 switch the filters off.
      visual_temperature, audio_temperature: Of bits and codec levels.
      guidance: Classifier-free guidance scale; 1 = none.
      max_text_tokens, max_audio_frames: Limits of one generated span.
      video_frames: Pixel frames of a generated video (1 modulo the temporal stride).
      batch_size: Prompts decoded together.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    visual_temperature: float = 1.0
    audio_temperature: float = 1.0
    guidance: float = 1.0
    max_text_tokens: int = 48
    max_audio_frames: int = 32
    video_frames: int = 9
    batch_size: int = 64

    def __post_init__(self):
        for key in ("temperature", "visual_temperature", "audio_temperature"):
            require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0 (0 is greedy)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "0 < top_p <= 1")
        require(self.top_k >= 0, "top_k", self.top_k, ">= 0")
        for key in ("max_text_tokens", "max_audio_frames", "video_frames", "batch_size"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        require(self.guidance >= 0, "guidance", self.guidance, ">= 0")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation.

    Attributes:
      suite: Name of a built-in suite ("digits") or empty.
      samples: Prompts per generation task (images and speech).
      videos: Prompts of the video task.
      judge_steps: Training steps of each judge.
    """

    suite: str = "digits"
    samples: int = 300
    videos: int = 100
    judge_steps: int = 600

    def __post_init__(self):
        for key in ("samples", "videos", "judge_steps"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
