"""Training of the visual tokenizer on pictures and clips in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from ernie5_jax.config import VisualTokenizerConfig
from ernie5_jax.vision.autoencoder import Variables, centre, init_variables, make_apply, to_pixels
from ernie5_jax.vision.convolution import Stream
from ernie5_jax.vision.errors import VisionError
from ernie5_jax.vision.quantizer import residual_bsq
from ernie5_jax.vision.tokenizer import CausalVisualTokenizer, make_pyramid

State = dict[str, Any]
Metrics = dict[str, jax.Array]

_STATISTICS_BATCHES = 16


def train_visual_tokenizer(
    images: Sequence[np.ndarray] | np.ndarray | None,
    videos: Sequence[np.ndarray] | np.ndarray | None,
    config: VisualTokenizerConfig,
    seed: int = 0,
    *,
    log: Callable[[int, dict[str, float]], None] | None = None,
    progress: bool = True,
) -> CausalVisualTokenizer:
    """Trains from scratch.

    Args:
      images: uint8 [H, W, 3] each, H = W = image_size; None or empty for clips only.
      videos: uint8 [T, H, W, 3] each, T = 1 mod temporal stride; longer ones are cut to the shortest, from a random
        first frame.
      config: Sizes and hyperparameters.
      seed: Of parameters and batches.
      log: Called with (step, metrics) every `config.training.log_every` steps.
      progress: Shows a progress bar.

    Raises:
      VisionError: Nothing to train on, or a picture or clip of another size.
    """
    batches = _Batches(images, videos, config, seed)
    state = init_state(config, seed)
    step = compiled_train_step(config)
    settings = config.training
    bar = tqdm(range(1, settings.steps + 1), desc="visual tokenizer", unit=" steps", disable=not progress)
    for number in bar:
        state, metrics = step(state, *batches[number])
        if number % settings.log_every == 0 or number == settings.steps:
            values = {key: float(value) for key, value in metrics.items()}
            if not np.isfinite(values["loss"]):
                raise VisionError(
                    f"visual tokenizer training: found loss {values['loss']} at step {number}, allowed: finite"
                )
            bar.set_postfix(psnr=f"{values.get('image_psnr', values.get('video_psnr', 0.0)):.1f}")
            if log is not None:
                log(number, values)
    variables = {**init_variables(config, seed), "params": state["params"], "mean": state["mean"]}
    return CausalVisualTokenizer(config, {**variables, "features": _feature_statistics(config, variables, batches)})


def _feature_statistics(config: VisualTokenizerConfig, variables: Variables, batches: _Batches) -> np.ndarray:
    """float32 [2, D] for `standardise`, measured on a few training batches."""
    tokenizer = CausalVisualTokenizer(config, variables)
    parts = []
    for number in range(1, 1 + _STATISTICS_BATCHES):
        images, videos = batches[number]
        for clips in (None if images is None else images[:, None], videos):
            if clips is not None:
                parts.append(tokenizer.encode(np.asarray(clips))[1].reshape(-1, config.feature_dim))
    features = np.concatenate(parts)
    return np.stack([features.mean(0), 1 / (features.std(0) + 1e-3)]).astype(np.float32)


def init_state(config: VisualTokenizerConfig, seed: int) -> State:
    """Fresh training state: `step`, `params`, `mean`, `opt_state`."""
    variables = init_variables(config, seed)
    return {
        "step": jnp.zeros((), jnp.int32),
        "opt_state": _optimizer(config).init(variables["params"]),
        "params": variables["params"],
        "mean": variables["mean"],
    }


@functools.lru_cache(maxsize=8)
def compiled_train_step(config: VisualTokenizerConfig) -> Callable[[State, Any, Any], tuple[State, Metrics]]:
    """`make_train_step`, jitted once per configuration; the state is donated."""
    return jax.jit(make_train_step(config), donate_argnums=0)


def make_train_step(
    config: VisualTokenizerConfig,
) -> Callable[[State, jax.Array | None, jax.Array | None], tuple[State, Metrics]]:
    """`step(state, images, videos) -> (state, metrics)`, pure.

    images: uint8 [N, H, W, 3] or None; videos: uint8 [M, T, H, W, 3] or None. Every frame counts the same.
    """
    optimizer = _optimizer(config)
    loss = functools.partial(tokenizer_loss, config)

    def step(state: State, images: jax.Array | None, videos: jax.Array | None) -> tuple[State, Metrics]:
        clips = {} if images is None else {"image": to_pixels(images)[:, None]}
        if videos is not None:
            clips["video"] = to_pixels(videos)
        gradients, (mean, metrics) = jax.grad(loss, has_aux=True)(state["params"], state["mean"], state["step"], clips)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "mean": mean, "opt_state": opt_state}, metrics

    return step


def tokenizer_loss(
    config: VisualTokenizerConfig, params: Any, mean: jax.Array, step: jax.Array, clips: dict[str, jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
    """Reconstruction and quantiser losses.

    Args:
      config: Weights.
      params: Of the autoencoder.
      mean: [2, C], running mean latents.
      step: [], steps done; the running mean moves faster in the first ones.
      clips: Pixels in [-1, 1], [B, T, H, W, 3] by kind ("image", "video").

    Returns:
      Loss, (new mean, metrics).
    """
    apply, pyramid = make_apply(config), make_pyramid(config)
    encoded, _, _ = apply.encode(params, list(clips.values()), None)
    # The batch's own means, with their gradient: lagging ones let the bits of the first scale settle on one side.
    batch_mean = _mean_latents(encoded, mean)
    stream = Stream([])
    latents = stream.join([centre(group, batch_mean, start=True) for group in encoded])
    decay = jnp.minimum(config.mean_decay, (step + 1) / (step + 10)).astype(latents.dtype)
    mean = decay * mean + (1 - decay) * jax.lax.stop_gradient(batch_mean)
    codes = residual_bsq(latents, pyramid, config.entropy_temperature)
    decoded, _ = apply.decode(params, stream.groups(codes.quantized), None)
    loss = config.commit_weight * codes.commit
    loss += config.entropy_weight * config.entropy_temperature * codes.entropy_loss()
    metrics = {"commit": codes.commit, "sample_entropy": codes.sample_entropy}
    metrics |= {f"bit_entropy_{k + 1}": bit_entropy(bits) for k, bits in enumerate(codes.bits)}
    for (kind, pixels), found in zip(clips.items(), decoded, strict=True):
        error = jnp.mean((jnp.clip(found, -1, 1) - pixels) ** 2, axis=(1, 2, 3, 4))
        metrics[f"{kind}_psnr"] = jnp.mean(10 * jnp.log10(4 / (error + 1e-8)))
    loss += _reconstruction_loss(config, Stream([]).join(decoded), Stream([]).join(list(clips.values())))
    return loss, (mean, {"loss": loss, **metrics})


def _mean_latents(encoded: Sequence[jax.Array], otherwise: jax.Array) -> jax.Array:
    """[2, C]: mean of the first latent frames and of the later ones; `otherwise` where a batch has no later ones."""
    first = jnp.concatenate([group[:, 0] for group in encoded]).mean((0, 1, 2))
    later = [group[:, 1:].reshape(-1, group.shape[-1]) for group in encoded if group.shape[1] > 1]
    return jnp.stack([first, jnp.concatenate(later).mean(0) if later else otherwise[1]])


def bit_entropy(bits: jax.Array) -> jax.Array:
    """Mean over the C bits of the entropy of each bit over all tokens, in bits: 1 = balanced, 0 = constant."""
    p = jnp.clip(bits.reshape(-1, bits.shape[-1]).astype(jnp.float32).mean(0), 1e-6, 1 - 1e-6)
    return -jnp.mean(p * jnp.log2(p) + (1 - p) * jnp.log2(1 - p))


def _reconstruction_loss(config: VisualTokenizerConfig, decoded: jax.Array, pixels: jax.Array) -> jax.Array:
    error = decoded - pixels
    loss = config.l1_weight * jnp.mean(jnp.abs(error)) + config.l2_weight * jnp.mean(error**2)
    for axis in (1, 2):
        loss += 0.5 * config.gradient_weight * jnp.mean(jnp.abs(jnp.diff(error, axis=axis)))
    return loss


def _optimizer(config: VisualTokenizerConfig) -> optax.GradientTransformation:
    settings = config.training
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        settings.learning_rate,
        min(settings.warmup_steps, settings.steps - 1),
        settings.steps,
        0.02 * settings.learning_rate,
    )
    # One flat vector: a fraction of the compile time of one update per parameter.
    return optax.flatten(
        optax.chain(
            optax.clip_by_global_norm(settings.clip_norm),
            optax.adamw(schedule, b2=0.99, weight_decay=settings.weight_decay),
        )
    )


class _Batches:
    """Batch of every step as a function of (seed, step)."""

    def __init__(self, images: Any, videos: Any, config: VisualTokenizerConfig, seed: int):
        self.images = images if images is not None and len(images) else None
        self.videos = videos if videos is not None and len(videos) else None
        if self.images is None and self.videos is None:
            raise VisionError("visual tokenizer training: found no picture and no video, allowed: at least one")
        self.config, self.seed = config, seed
        side, stride = config.image_size, config.temporal_stride
        for kind, items, rank in (("picture", self.images, 3), ("video", self.videos, 4)):
            for i, item in enumerate(() if items is None else (items[i] for i in range(len(items)))):
                fits = item.dtype == np.uint8 and item.ndim == rank and item.shape[-3:] == (side, side, 3)
                if not fits or (rank == 4 and item.shape[0] % stride != 1 % stride):
                    frames = f"T = 1 mod {stride}, " if rank == 4 else ""
                    found = f"{item.dtype} {tuple(item.shape)}"
                    raise VisionError(
                        f"training {kind} {i}: found {found}, allowed: uint8, {frames}{side} x {side} x 3"
                    )
        self.clip_frames = 0 if self.videos is None else min(len(self.videos[i]) for i in range(len(self.videos)))

    def __getitem__(self, step: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        rng = np.random.default_rng((self.seed, step))
        images = videos = None
        if self.images is not None:
            images = np.stack(
                [self.images[i] for i in rng.integers(len(self.images), size=self.config.training.batch_size)]
            )
        if self.videos is not None:
            picked = [self.videos[i] for i in rng.integers(len(self.videos), size=self.config.video_batch_size)]
            starts = [int(rng.integers(len(v) - self.clip_frames + 1)) for v in picked]
            videos = np.stack([v[s : s + self.clip_frames] for v, s in zip(picked, starts, strict=True)])
        return images, videos
