"""Configuration of the text, visual and audio tokenizers and of their training."""

from __future__ import annotations

import dataclasses

from ernie5_jax.config.base import require


@dataclasses.dataclass(frozen=True)
class TextTokenizerConfig:
    """Byte-exact BPE on UTF-16BE (ERNIE 5.0 section 3.1).

    Attributes:
      vocab_size: Upper bound of the vocabulary, special tokens and 256 bytes included.
      dropout: Probability of skipping a merge in training-time encoding (BPE-dropout).
    """

    vocab_size: int = 768
    dropout: float = 0.0

    def __post_init__(self):
        require(self.vocab_size >= 352, "vocab_size", self.vocab_size, ">= 352 (96 special tokens and 256 bytes)")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "0 <= dropout < 1")


@dataclasses.dataclass(frozen=True)
class TokenizerTrainingConfig:
    """How a neural tokenizer is trained by its own script.

    Attributes:
      steps, batch_size: Of AdamW.
      learning_rate, warmup_steps: The largest one after a linear warm-up; a cosine decay follows.
      weight_decay: Decoupled.
      clip_norm: Global gradient norm.
      log_every: Steps between calls of the log.
    """

    steps: int = 500
    batch_size: int = 48
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 1e-4
    clip_norm: float = 10.0
    log_every: int = 20

    def __post_init__(self):
        for key in ("steps", "batch_size", "log_every"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, ">= 0")
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "> 0")
        require(self.clip_norm > 0, "clip_norm", self.clip_norm, "> 0")


@dataclasses.dataclass(frozen=True)
class VisualTokenizerConfig:
    """Causal 3-D tokenizer with a multi-scale residual bitwise quantiser (ERNIE 5.0 section 2.2.1).

    Attributes:
      patch_size: Pixels folded into channels (per side) before the first convolution.
      channels: Convolution width per spatial resolution, finest first; its length minus one
        is the number of stride-2 spatial reductions.
      temporal_kernels: Frames that the convolutions of each resolution see, finest first; empty means 3 at the
        latent grid and 1 (per-frame convolutions) elsewhere.
      temporal_stride: Frames after the first that make one latent frame (a power of two).
      bits: C, latent channels = bits of one code.
      scales: Side lengths of the square scale pyramid, coarse to fine; the last one is the latent grid.
      image_size: Side of the (square) training pictures in pixels.
      res_blocks: Residual blocks per resolution.
      norm_eps: Large enough that flat (silent) input does not blow up gradients.
      commit_weight, entropy_weight, entropy_temperature: Quantiser losses (BSQ). The temperature of the published
        code, 0.01, leaves bits that have settled on one side without gradient.
      mean_decay: Decay of the running mean latents that are subtracted before quantisation.
      l1_weight, l2_weight, gradient_weight: Reconstruction losses on pixels in [-1, 1]: mean absolute error, mean
        squared error and absolute error of the differences between neighbouring pixels.
      video_batch_size: Clips per training step beside `training.batch_size` pictures.
      training: Steps, batch size, optimiser.
    """

    patch_size: int = 2
    channels: tuple[int, ...] = (48, 96)
    temporal_kernels: tuple[int, ...] = ()
    temporal_stride: int = 4
    bits: int = 12
    scales: tuple[int, ...] = (1, 2, 4)
    image_size: int = 16
    res_blocks: int = 1
    norm_eps: float = 1e-4
    commit_weight: float = 0.1
    entropy_weight: float = 0.2
    entropy_temperature: float = 0.1
    mean_decay: float = 0.98
    l1_weight: float = 1.0
    l2_weight: float = 4.0
    gradient_weight: float = 0.2
    video_batch_size: int = 6
    training: TokenizerTrainingConfig = dataclasses.field(
        default_factory=lambda: TokenizerTrainingConfig(steps=350, batch_size=32)
    )

    def __post_init__(self):
        for key in ("patch_size", "bits", "video_batch_size"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        require(self.res_blocks >= 0, "res_blocks", self.res_blocks, ">= 0")
        require(len(self.channels) >= 1 and min(self.channels) >= 1, "channels", self.channels, "at least one width")
        require(
            len(self.temporal_kernels) in (0, len(self.channels)) and all(k >= 1 for k in self.temporal_kernels),
            "temporal_kernels",
            self.temporal_kernels,
            f"none, or {len(self.channels)} sizes >= 1, one per entry of channels",
        )
        require(self.entropy_temperature > 0, "entropy_temperature", self.entropy_temperature, "> 0")
        require(0 <= self.mean_decay < 1, "mean_decay", self.mean_decay, "0 <= mean_decay < 1")
        stride = self.temporal_stride
        require(stride >= 1 and stride & (stride - 1) == 0, "temporal_stride", stride, "a power of two")
        require(
            len(self.scales) >= 1
            and self.scales[0] == 1  # one position, BOx, predicts the first scale
            and all(a < b for a, b in zip(self.scales, self.scales[1:], strict=False)),
            "scales",
            self.scales,
            "strictly increasing side lengths from 1",
        )
        require(
            max(self.scales, default=0) * self.spatial_stride == self.image_size,
            "scales",
            self.scales,
            f"last scale x spatial stride {self.spatial_stride} = image_size {self.image_size}",
        )

    @property
    def spatial_stride(self) -> int:
        return self.patch_size * 2 ** (len(self.channels) - 1)

    @property
    def feature_dim(self) -> int:
        """Channels of the pre-quantiser features that understanding reads."""
        return self.channels[-1]


@dataclasses.dataclass(frozen=True)
class AudioTokenizerConfig:
    """Residual-vector-quantised codec over log-magnitude features (ERNIE 5.0 section 2.3.1).

    One code frame covers `hop_length * fold` samples.

    Attributes:
      sample_rate: Hz.
      fft_size, hop_length: Short-time Fourier transform, samples.
      fold: Spectral frames per code frame.
      levels: Q.
      bins: Codes per level.
      code_dim: Width of a code.
      split: Whether level 1 quantises a vector of its own instead of the one whose rest the other levels quantise.
      hidden_size, num_blocks: Of encoder and decoder.
      norm_eps: Large enough that silence does not blow up gradients.
      log_floor: Magnitude (of a full-scale sine: 1) that silence is raised to before the logarithm.
      kernel_size: Code frames that one convolution sees.
      quantize_after: Share of the training steps before the codebooks are initialised and the quantiser is switched on.
      quantizer_dropout: Share of training clips whose number of levels is drawn from U{1 ... levels}.
      ema_decay: Decay of codebook statistics.
      revive_threshold: A code used less than this share of the mean usage is replaced from the batch.
      commit_weight: Of the commitment loss.
      griffin_lim_iterations, griffin_lim_momentum: Waveform reconstruction.
      max_seconds: Training clips are padded or cut to this length; encoding accepts any length.
      training: Steps, batch size, optimiser.
    """

    sample_rate: int = 8000
    fft_size: int = 512
    hop_length: int = 80
    fold: int = 4
    levels: int = 4
    bins: int = 128
    code_dim: int = 16
    split: bool = False
    hidden_size: int = 128
    num_blocks: int = 2
    kernel_size: int = 3
    norm_eps: float = 0.03
    log_floor: float = 3e-4
    quantize_after: float = 0.2
    quantizer_dropout: float = 0.25
    ema_decay: float = 0.99
    revive_threshold: float = 0.1
    commit_weight: float = 0.25
    griffin_lim_iterations: int = 40
    griffin_lim_momentum: float = 0.7
    max_seconds: float = 0.8
    training: TokenizerTrainingConfig = dataclasses.field(default_factory=TokenizerTrainingConfig)

    def __post_init__(self):
        for key in ("sample_rate", "fft_size", "hop_length", "fold", "levels", "code_dim", "hidden_size"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        require(self.bins >= 2, "bins", self.bins, ">= 2")
        require(not self.split or self.levels >= 2, "levels", self.levels, ">= 2 where split")
        require(self.kernel_size % 2 == 1, "kernel_size", self.kernel_size, "an odd number")
        require(self.num_blocks >= 0, "num_blocks", self.num_blocks, ">= 0")
        require(self.max_seconds > 0, "max_seconds", self.max_seconds, "> 0")
        require(self.griffin_lim_iterations >= 0, "griffin_lim_iterations", self.griffin_lim_iterations, ">= 0")
        require(self.log_floor > 0, "log_floor", self.log_floor, "> 0")
        require(0 <= self.quantize_after < 1, "quantize_after", self.quantize_after, "0 <= share < 1")
        require(0 <= self.quantizer_dropout <= 1, "quantizer_dropout", self.quantizer_dropout, "0 ... 1")
        require(0 < self.ema_decay < 1, "ema_decay", self.ema_decay, "between 0 and 1")
        require(self.hop_length <= self.fft_size, "hop_length", self.hop_length, f"<= fft_size = {self.fft_size}")

    @property
    def samples_per_frame(self) -> int:
        return self.hop_length * self.fold

    @property
    def latent_dim(self) -> int:
        """Width of the encoder's output."""
        return self.code_dim * (2 if self.split else 1)

    @property
    def spectral_bins(self) -> int:
        """Frequencies of one spectral frame."""
        return self.fft_size // 2 + 1

    @property
    def frame_rate(self) -> float:
        """Code frames per second."""
        return self.sample_rate / self.samples_per_frame
