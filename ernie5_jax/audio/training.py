"""Training of the codec: spectral distance and commitment, codebooks by moving average."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from flax import nnx

from ernie5_jax.audio import rvq
from ernie5_jax.audio.errors import AudioError
from ernie5_jax.audio.networks import Codec
from ernie5_jax.audio.stft import log_magnitude
from ernie5_jax.config import AudioTokenizerConfig, require

REVIVE_EVERY = 5
_STATISTICS_CLIPS = 256
_KMEANS_FRAMES = 4096

State = dict[str, Any]
"""`params`, `codebooks`, `scale` (mean [bins] and std [] of the features), `optimizer`, `step` (int32), `key`."""


def codec_structure(config: AudioTokenizerConfig) -> nnx.GraphDef:
    """The codec without its parameters; merge it with a pure dict of them by `codec_from`."""
    return nnx.graphdef(nnx.eval_shape(lambda: Codec(config, nnx.Rngs(0))))


def codec_from(graph: nnx.GraphDef, params: Any) -> Codec:
    """The codec with `params`, the pure dict of its parameters."""
    return nnx.merge(graph, params)


def spectral_features(waves: jax.Array, scale: dict[str, jax.Array], config: AudioTokenizerConfig) -> jax.Array:
    """float32 [..., T * hop] -> normalised log magnitudes [..., T, bins]."""
    raw = log_magnitude(waves, config.fft_size, config.hop_length, config.log_floor)
    return (raw - scale["mean"]) / scale["std"]


def optimizer(config: AudioTokenizerConfig) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay to a hundredth and global-norm clipping."""
    training = config.training
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        training.learning_rate,
        min(training.warmup_steps, training.steps // 2),
        training.steps,
        training.learning_rate * 0.01,
    )
    # One flat vector: the update of many small arrays takes long to compile.
    return optax.flatten(
        optax.chain(
            optax.clip_by_global_norm(training.clip_norm),
            optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=training.weight_decay),
        )
    )


def initial_state(config: AudioTokenizerConfig, waves: np.ndarray, lengths: np.ndarray, seed: int) -> State:
    """State before the first step; the features' scale comes from `waves` [N, samples] with `lengths` [N] samples."""
    shape = (config.levels, config.bins, config.code_dim)
    # Distinct buffers: the state is donated.
    codebooks = rvq.Codebooks(codes=jnp.zeros(shape), counts=jnp.zeros(shape[:2]), sums=jnp.zeros(shape))
    count = min(len(waves), _STATISTICS_CLIPS)
    spectra = jax.jit(log_magnitude, static_argnames=("fft_size", "hop_length", "floor"))
    raw = np.asarray(spectra(waves[:count], config.fft_size, config.hop_length, config.log_floor))
    frames = raw[np.arange(raw.shape[1]) * config.hop_length < lengths[:count, None]]
    mean = frames.mean(0)
    scale = {"mean": jnp.asarray(mean), "std": jnp.asarray((frames - mean).std() + 1e-3)}

    @jax.jit  # one program instead of one per array
    def draw(seed):
        key, codec_key = jax.random.split(jax.random.key(seed))
        params = nnx.to_pure_dict(nnx.state(Codec(config, nnx.Rngs(params=codec_key))))
        return key, params, optimizer(config).init(params)

    key, params, optimizer_state = draw(seed)
    return {
        "params": params,
        "codebooks": codebooks,
        "scale": scale,
        "optimizer": optimizer_state,
        "step": jnp.int32(0),
        "key": key,
    }


def frame_mask(lengths: jax.Array, frames: int, config: AudioTokenizerConfig) -> jax.Array:
    """bool [B, frames]: frames that hold at least one of `lengths` [B] samples."""
    return jnp.arange(frames) * config.samples_per_frame < lengths[:, None]


def loss_fn(params, state: State, waves, mask, levels, graph: nnx.GraphDef, config: AudioTokenizerConfig):
    """Loss of one batch.

    Returns:
      (scalar loss, (metrics, `Quantized`)). `log_magnitude_l1` is in nats, over the frames of `mask`.
    """
    codec = codec_from(graph, params)
    features = spectral_features(waves, state["scale"], config)
    latents = codec.encode(features, mask)
    quantized = rvq.quantize(state["codebooks"]["codes"], latents, levels, split=config.split)
    enabled = state["step"] >= quantizer_start(config)
    decoded = codec.decode(jnp.where(enabled, quantized.quantized, latents), mask)
    weight = mask.astype(decoded.dtype)
    frames = jnp.maximum(weight.sum(), 1)
    distance = jnp.abs(decoded - features.reshape(decoded.shape)).mean(-1) * state["scale"]["std"]
    reconstruction = (distance * weight).sum() / frames
    commit = (quantized.commit.sum(-1) * weight).sum() / frames
    # Before the quantiser is on, a pull towards the unit ball keeps the latents' scale in place.
    spread = (jax.nn.relu(latents**2 - 1).mean(-1) * weight).sum() / frames
    loss = reconstruction + jnp.where(enabled, config.commit_weight * commit, 0.1 * spread)
    metrics = {"loss": loss, "log_magnitude_l1": reconstruction, "commit": commit}
    return loss, (metrics, quantized)


def quantizer_start(config: AudioTokenizerConfig) -> int:
    """Step before which the codebooks are initialised; the quantiser is on from this step."""
    return int(config.quantize_after * config.training.steps)


@functools.partial(jax.jit, static_argnames=("graph", "config"), donate_argnums=0)
def train_step(
    state: State, waves: jax.Array, lengths: jax.Array, *, graph: nnx.GraphDef, config: AudioTokenizerConfig
):
    """One optimiser and codebook step.

    Args:
      state: See `State`; donated.
      waves: float32 [B, samples], zero past each clip's end; samples a multiple of `samples_per_frame`.
      lengths: int32 [B] samples.
      graph: `codec_structure(config)`.
      config: Static.

    Returns:
      (state, metrics).
    """
    mask = frame_mask(lengths, waves.shape[1] // config.samples_per_frame, config)
    level_key, revive_key = jax.random.split(jax.random.fold_in(state["key"], state["step"]))
    levels = rvq.draw_levels(level_key, (waves.shape[0],), config.levels, config.quantizer_dropout)
    levels = jnp.broadcast_to(levels[:, None], mask.shape)
    grads, (metrics, quantized) = jax.grad(loss_fn, has_aux=True)(
        state["params"], state, waves, mask, levels, graph, config
    )
    updates, optimizer_state = optimizer(config).update(grads, state["optimizer"], state["params"])
    revive = jnp.where(state["step"] % REVIVE_EVERY == 0, config.revive_threshold, 0.0)
    codebooks = rvq.update(state["codebooks"], revive_key, quantized, mask, config.ema_decay, revive)
    enabled = state["step"] >= quantizer_start(config)
    codebooks = jax.tree.map(lambda new, old: jnp.where(enabled, new, old), codebooks, state["codebooks"])
    usage = (codebooks["counts"] > config.revive_threshold * codebooks["counts"].mean(-1, keepdims=True)).mean()
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    metrics |= {"gradient_norm": norm, "codes_in_use": usage}
    new_state = state | {
        "params": optax.apply_updates(state["params"], updates),
        "codebooks": codebooks,
        "optimizer": optimizer_state,
        "step": state["step"] + 1,
    }
    return new_state, metrics


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def initialize_codebooks(state: State, waves: jax.Array, lengths: jax.Array, *, graph, config) -> rvq.Codebooks:
    """k-means on the latents of `waves`; counts are brought to those of a training batch."""
    mask = frame_mask(lengths, waves.shape[1] // config.samples_per_frame, config)
    codec = codec_from(graph, state["params"])
    latents = codec.encode(spectral_features(waves, state["scale"], config), mask)
    key = jax.random.fold_in(state["key"], config.training.steps)
    # Drawn with replacement: the number of valid frames is not static.
    chosen = rvq.draw_weighted(key, mask.reshape(-1).astype(latents.dtype), (min(_KMEANS_FRAMES, mask.size),))
    chosen_latents = latents.reshape(-1, config.latent_dim)[chosen]
    books = rvq.initialize(key, chosen_latents, config.levels, config.bins, split=config.split)
    share = config.training.batch_size * mask.mean() * mask.shape[1] / chosen.size
    return rvq.Codebooks(codes=books["codes"], counts=books["counts"] * share, sums=books["sums"] * share)


class Clips:
    """Clips padded to one length, and random batches of them as a function of (seed, step)."""

    def __init__(self, clips: Sequence[np.ndarray], config: AudioTokenizerConfig, seed: int):
        self.frames = -(-round(config.max_seconds * config.sample_rate) // config.samples_per_frame)
        self.samples = self.frames * config.samples_per_frame
        self.waves = np.zeros((len(clips), self.samples), np.float32)
        self.lengths = np.zeros(len(clips), np.int32)
        for i, clip in enumerate(clips):
            if np.ndim(clip) != 1 or len(clip) == 0:
                raise AudioError(f"audio clip {i}: found shape {np.shape(clip)}, allowed: [samples] with samples >= 1")
            self.lengths[i] = min(len(clip), self.samples)
            self.waves[i, : self.lengths[i]] = clip[: self.samples]
        self.config, self.seed = config, seed

    def batch(self, step: int, size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """float32 [B, samples], int32 [B]; clips start at a random place inside their first frame."""
        rng = np.random.default_rng([self.seed, step])
        size = size or self.config.training.batch_size
        chosen = rng.integers(0, len(self.waves), size)
        shifts = rng.integers(0, self.config.samples_per_frame, size)
        waves = np.zeros((size, self.samples), np.float32)
        for row, (index, shift) in enumerate(zip(chosen, shifts, strict=True)):
            waves[row, shift:] = self.waves[index, : self.samples - shift]
        return waves, np.minimum(self.lengths[chosen] + shifts, self.samples).astype(np.int32)


def fit(
    clips: Sequence[np.ndarray],
    config: AudioTokenizerConfig,
    seed: int = 0,
    progress: bool = True,
    log: Callable[[dict[str, float]], None] | None = None,
) -> State:
    """Trains a codec; see `train_audio_tokenizer`."""
    require(config.max_seconds > 0, "max_seconds", config.max_seconds, "> 0")
    if not len(clips):
        raise AudioError("audio clips: found none, allowed: at least one")
    data = Clips(clips, config, seed)
    state = initial_state(config, data.waves, data.lengths, seed)
    graph = codec_structure(config)
    start = quantizer_start(config)
    bar = tqdm.trange(config.training.steps, desc="audio tokenizer", disable=not progress)
    for step in bar:
        if step == start:
            sample = data.batch(config.training.steps, max(1, 2 * _KMEANS_FRAMES // data.frames))
            state["codebooks"] = initialize_codebooks(state, *sample, graph=graph, config=config)
        state, metrics = train_step(state, *data.batch(step), graph=graph, config=config)
        if (step + 1) % config.training.log_every == 0 or step + 1 == config.training.steps:
            values = {name: float(value) for name, value in metrics.items()}
            bar.set_postfix(l1=f"{values['log_magnitude_l1']:.3f}", codes=f"{values['codes_in_use']:.2f}")
            if not np.isfinite(values["loss"]):
                raise AudioError(
                    f"audio tokenizer: loss is not finite at step {step + 1}, lower training.learning_rate"
                )
            if log is not None:
                log({"step": step + 1, **values})
    return state
