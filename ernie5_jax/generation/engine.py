"""Batched generation: requests of one modality and many prompt lengths, one compiled program per shape."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ernie5_jax.compiling import cpu_optimization
from ernie5_jax.config import GenerationConfig, ModelConfig, SequenceConfig
from ernie5_jax.data import Tokenizers, encode_in_memory
from ernie5_jax.errors import UserError
from ernie5_jax.generation.audio import generate_audio
from ernie5_jax.generation.sampling import SamplingParams, row_keys, sampling_params
from ernie5_jax.generation.stepping import Cursor, Weights, advance, prompt_batch
from ernie5_jax.generation.text import generate_text
from ernie5_jax.generation.visual import generate_visual
from ernie5_jax.model import ElasticMask, Params, empty_cache, full_mask, make_apply
from ernie5_jax.sequence import Document, EncodedDocument, Modality, Prompt, layout_prompt
from ernie5_jax.vision.pyramid import ScalePyramid

PROMPT_BUCKET = 32
"""Prompts are padded to a multiple of this, so that few programs are compiled."""

HEADS = {"text": "text", "image": "visual", "video": "visual", "audio": "audio"}


class GenerationError(UserError):
    """A request that cannot be served."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
      document: The spans that come before, raw or encoded.
      to: Modality of the answer.
      sample: Number of the draw; different samples of one prompt differ, equal ones repeat.
    """

    document: Document | EncodedDocument
    to: Modality
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """An answer; the fields of other modalities are None.

    Attributes:
      text: str. image: uint8 [H, W, 3]. video: uint8 [T, H, W, 3]. audio: float32 [samples].
      sample_rate: Hz of `audio`.
      tokens: What was drawn: int32 [n] text ids, int8 [t, P, C] bits, or int32 [n, Q] codes.
      log_probs: Log-probability of each action under the model's own distribution, the softmax that training
        minimises (temperature 1, no guidance, no filter, nothing masked out): [n], [t, P] or [n, Q]; the stop
        (EOS, EOA) is the last one of text and audio when it was drawn.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    text: str | None = None
    image: np.ndarray | None = None
    video: np.ndarray | None = None
    audio: np.ndarray | None = None
    sample_rate: int | None = None


class Engine:
    """Generates with one set of parameters.

    Args:
      model: Sizes of the backbone.
      params, router_bias: Its parameters (use the averaged ones of a checkpoint).
      tokenizers: Of the same checkpoint.
      sequence: Row length of training: prompt and answer together may not be longer.
      config: Default sampling settings.
      mask: Submodel; None is the full model.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        router_bias: jax.Array,
        tokenizers: Tokenizers,
        sequence: SequenceConfig,
        config: GenerationConfig | None = None,
        mask: ElasticMask | None = None,
    ):
        self.model, self.tokenizers, self.sequence = model, tokenizers, sequence
        self.config = config or GenerationConfig()
        if mask is None and model.elastic:
            mask = full_mask(model)  # as an argument, so that other masks run in the same programs
        self.weights = Weights(params, router_bias, mask)
        self.pyramid = ScalePyramid(tokenizers.visual.scales, tokenizers.visual.bits)
        self._apply = make_apply(model)
        self._programs: dict[Any, Any] = {}

    def generate(
        self, requests: Sequence[Request], *, seed: int = 0, config: GenerationConfig | None = None
    ) -> list[Result]:
        """Answers all requests, in their order; the answer to request i depends on (seed, i, sample) only.

        Args:
          requests: Prompts, modalities mixed.
          seed: Of all draws.
          config: Sampling settings instead of the engine's.

        Raises:
          GenerationError: A prompt that leaves no room for its answer, an unknown modality.
        """
        config = config or self.config
        documents = self._encode([request.document for request in requests])
        results: list[Result | None] = [None] * len(requests)
        for modality in HEADS:
            numbers = [i for i, request in enumerate(requests) if request.to == modality]
            for start in range(0, len(numbers), config.batch_size):
                part = numbers[start : start + config.batch_size]
                answers = self._batch(
                    modality, [documents[i] for i in part], part, [requests[i].sample for i in part], seed, config
                )
                for number, answer in zip(part, answers, strict=True):
                    results[number] = answer
        for number, (request, result) in enumerate(zip(requests, results, strict=True)):
            if result is None:
                raise GenerationError(f"request {number}: found to={request.to!r}, allowed: {', '.join(HEADS)}")
        return [result for result in results if result is not None]

    def with_mask(self, mask: ElasticMask) -> Engine:
        """This engine on another submodel; compiled programs are shared, so nothing is compiled again."""
        other = copy.copy(self)
        other.weights = Weights(self.weights.params, self.weights.router_bias, jax.tree.map(jnp.asarray, mask))
        return other

    def _encode(self, documents: Sequence[Document | EncodedDocument]) -> list[EncodedDocument]:
        raw = [i for i, document in enumerate(documents) if isinstance(document, Document)]
        encoded = iter(encode_in_memory([documents[i] for i in raw], self.tokenizers, self.sequence))  # type: ignore[misc]
        return [next(encoded) if isinstance(document, Document) else document for document in documents]

    def _batch(self, modality, documents, numbers, samples, seed, config: GenerationConfig) -> list[Result]:
        guided = config.guidance != 1 and modality != "text"
        prompts = self._prompts(modality, documents, guided=False)
        room = _room(modality, config, self.pyramid, self.tokenizers.visual.temporal_stride)
        longest = max(prompt.row.length for prompt in prompts)
        limit = self.sequence.length
        if longest + room > limit and modality in ("image", "video"):
            raise GenerationError(
                f"prompt: needs {longest} positions and {room} for its {modality}, allowed: sequence.length = {limit}"
            )
        room = min(room, limit - longest)
        if room < 1:
            raise GenerationError(f"prompt: needs {longest} positions, allowed: < sequence.length = {limit}")
        size = len(prompts)
        padding = -size % min(config.batch_size, _power_of_two(size))
        order = [*range(size), *([size - 1] * padding)]
        rows = [prompts[i] for i in order]
        if guided:
            rows += [self._prompts(modality, [documents[i]], guided=True)[0] for i in order]
        length = -(-longest // PROMPT_BUCKET) * PROMPT_BUCKET
        batch, row_index, lengths, index = prompt_batch(rows, length, HEADS[modality])
        keys = row_keys(seed, jnp.asarray([numbers[i] for i in order]), jnp.asarray([samples[i] for i in order]))
        program = self._program(modality, room, guided, config)
        trace = program(self.weights, batch, row_index, lengths, index, keys, _params(modality, config))
        trace = jax.tree.map(lambda a: np.asarray(a)[:size], trace)
        return self._results(modality, trace)

    def _prompts(self, modality: Modality, documents: list[EncodedDocument], guided: bool) -> list[Prompt]:
        return [
            layout_prompt(
                document,
                modality,
                self.sequence,
                self.pyramid,
                audio_bins=self.model.audio_bins,
                drop_condition=guided,
            )
            for document in documents
        ]

    def _program(self, modality: Modality, room: int, guided: bool, config: GenerationConfig):
        frames = _latent_frames(modality, config, self.tokenizers.visual.temporal_stride)
        key = (modality, room, guided, frames)
        run = functools.partial(self._run, modality=modality, room=room, guided=guided, frames=frames)
        # In one step, so that two threads share a program.
        return self._programs.setdefault(key, jax.jit(run, compiler_options=cpu_optimization(1)))

    def _run(self, weights, batch, row_index, lengths, index, keys, params, *, modality, room, guided, frames):
        """Prefill once, then one group per forward; traced. Logits stay on the device side of the trace."""
        capacity = batch.token.shape[1] + room
        cursor = Cursor(
            empty_cache(self.model, batch.token.shape[0], capacity, dtype=weights.router_bias.dtype), lengths, index
        )
        if modality == "audio":
            trace = generate_audio(
                self._apply,
                weights,
                cursor,
                (batch, row_index),
                keys,
                params,
                levels=self.model.audio_levels,
                bins=self.model.audio_bins,
                max_frames=room,
                guided=guided,
            )
            return trace._replace(logits=())
        output, cache = advance(self._apply, weights, cursor, batch, row_index)
        cursor = Cursor(cache, lengths, index)
        if modality == "text":
            logits = output.text_logits[:, 0]
            trace = generate_text(self._apply, weights, cursor, logits, keys, params, max_tokens=room)
            return trace._replace(logits=())
        trace = generate_visual(
            self._apply,
            weights,
            cursor,
            output.visual_logits,
            keys,
            params,
            pyramid=self.pyramid,
            frames=frames,
            guided=guided,
        )
        return trace._replace(logits=())

    def _results(self, modality: Modality, trace: Any) -> list[Result]:
        if modality == "text":
            return [
                Result(token[:n], log_probs[: n + 1], text=self.tokenizers.text.decode(token[:n]))
                for token, log_probs, n in zip(trace.token, trace.log_probs, trace.count, strict=True)
            ]
        if modality == "audio":
            codes = [codes[:n] for codes, n in zip(trace.codes, trace.count, strict=True)]
            waves = self.tokenizers.audio.decode(codes)
            rate = self.tokenizers.audio.sample_rate
            return [
                Result(c, log_probs[: len(c) + 1], audio=wave, sample_rate=rate)
                for c, log_probs, wave in zip(codes, trace.log_probs, waves, strict=True)
            ]
        pixels = self.tokenizers.visual.decode(trace.quantized)
        if modality == "image":
            return [Result(b, p, image=v[0]) for b, p, v in zip(trace.bits, trace.log_probs, pixels, strict=True)]
        return [Result(b, p, video=v) for b, p, v in zip(trace.bits, trace.log_probs, pixels, strict=True)]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _latent_frames(modality: Modality, config: GenerationConfig, stride: int) -> int:
    if modality != "video":
        return 1
    if config.video_frames % stride != 1 % stride:
        raise GenerationError(f"generation.video_frames: found {config.video_frames}, allowed: 1 modulo {stride}")
    return 1 + (config.video_frames - 1) // stride


def _room(modality: Modality, config: GenerationConfig, pyramid: ScalePyramid, stride: int) -> int:
    """Positions an answer may take behind its prompt."""
    if modality == "text":
        return config.max_text_tokens
    if modality == "audio":
        return config.max_audio_frames
    return pyramid.tokens * _latent_frames(modality, config, stride)


def _params(modality: Modality, config: GenerationConfig) -> SamplingParams:
    if modality == "text":
        return sampling_params(config.temperature, config.top_k, config.top_p)
    temperature = config.audio_temperature if modality == "audio" else config.visual_temperature
    return sampling_params(temperature, guidance=config.guidance)
