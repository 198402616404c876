"""The `digits` suite: does the model read, hear, draw, speak and film digits, and how well does it model text?"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ernie5_jax.audio.protocol import AudioTokenizer
from ernie5_jax.config import EvaluationConfig
from ernie5_jax.evaluation import media_sets
from ernie5_jax.evaluation.captions import digit_in, same_words
from ernie5_jax.evaluation.compression import order0_bits_per_byte, zlib_bits_per_byte
from ernie5_jax.evaluation.judges import JUDGED_MODALITIES, Judge
from ernie5_jax.evaluation.media_sets import MediaSet
from ernie5_jax.evaluation.results import Example, Results
from ernie5_jax.evaluation.scores import Score
from ernie5_jax.evaluation.tasks import Generator, ask, make
from ernie5_jax.evaluation.variety import image_variety, near_duplicates
from ernie5_jax.sequence.types import Document
from ernie5_jax.vision.protocol import VisualTokenizer

_CEILING_ITEMS = 300
_SHOWN = 10
_LOSS_DOCUMENTS = 100


@dataclasses.dataclass
class DigitsSuite:
    """Runs the tasks, one draw per prompt, nothing filtered.

    Attributes:
      engine: Generates (see `tasks.Generator`).
      judges: From `judges.train_judges`.
      training, held_out: Documents of both splits.
      visual, audio: Tokenizers, for round trips.
      losses: Held-out losses per modality of a list of documents, see `losses.HeldOut`; None leaves them out.
      seed: Of all draws.
    """

    engine: Generator
    judges: dict[str, Judge]
    training: Sequence[Document]
    held_out: Sequence[Document]
    visual: VisualTokenizer
    audio: AudioTokenizer
    config: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    losses: Callable[[Sequence[Document]], dict[str, Any]] | None = None
    seed: int = 0
    report: Callable[[str], None] = print
    _stream: int = dataclasses.field(default=0, init=False)  # tells the draws of tasks apart

    def run(self) -> Results:
        """Every task for which there are documents, in a fixed order."""
        self._results = Results("digits", sample_rate=self.audio.sample_rate)
        self._references: dict[str, tuple[MediaSet, list[np.ndarray]]] = {}
        self._timed("judges", DigitsSuite._judge_accuracy)  # the others show its numbers
        with _pool() as pool:
            for part, lines in pool.map(self._apart, range(len(_TASKS)), *zip(*_TASKS, strict=True)):
                self._results.extend(part)
                for line in lines:
                    self.report(line)
        return self._results

    def _apart(self, number: int, name: str, task: Callable[[DigitsSuite], None]) -> tuple[Results, list[str]]:
        """Results and lines of one task alone."""
        suite, lines = copy.copy(self), []
        suite.report, suite._stream = lines.append, number + 1
        suite._results = Results("digits", judges=self._results.judges)
        suite._timed(name, task)
        return suite._results, lines

    def _timed(self, name: str, task: Callable[[DigitsSuite], None]) -> None:
        start = time.perf_counter()
        task(self)
        self._results.seconds[name] = round(time.perf_counter() - start, 3)

    def _judge_accuracy(self) -> None:
        known = [d.meta.get("unseen_voice") is False for d in self.held_out]
        sets = {
            "image": ("image", self.held_out),
            "video": ("video", self.held_out),
            "speech": ("speech", [d for d, k in zip(self.held_out, known, strict=True) if not k]),
            "known_voices": ("speech", [d for d, k in zip(self.held_out, known, strict=True) if k]),
        }
        with _pool() as pool:
            judged = pool.map(self._judge, *zip(*sets.values(), strict=True))
            for name, outcome in zip(sets, judged, strict=True):
                if outcome is not None:
                    originals, decoded, self._results.judges[name] = outcome
                    self._references[name] = originals, decoded

    def _judge(self, kind: str, documents: Sequence[Document]) -> tuple[MediaSet, list[np.ndarray], dict] | None:
        """Originals, their round trips, and the judge's accuracy on both; None where there is nothing to judge."""
        judge, originals = self.judges.get(kind), media_sets.collect(documents, JUDGED_MODALITIES[kind])
        if judge is None or not len(originals):
            return None
        order = np.random.default_rng(self.seed).permutation(len(originals))[:_CEILING_ITEMS]
        originals = originals.take(order.tolist())
        if kind == "speech":
            decoded = media_sets.round_trip_audio(self.audio, originals.values)
        else:
            decoded = media_sets.round_trip_pictures(self.visual, originals.values)
        accuracy: dict[str, float] = {"n": len(originals)}
        for which, values in (("original", originals.values), ("round_trip", decoded)):
            seen = judge.predict(values)
            right = {"digit": seen["digit"] == np.array(originals.digits)}
            if "direction" in seen:
                right["direction"] = seen["direction"] == np.array(originals.directions)
                right["both"] = right["digit"] & right["direction"]
            accuracy |= {f"{which}_{head}": float(hits.mean()) for head, hits in right.items()}
        return originals, decoded, accuracy

    def _losses(self) -> None:
        if self.losses is None:
            return
        documents = [
            document
            for task in sorted({str(document.meta.get("task")) for document in self.held_out})
            for document in media_sets.of_task(self.held_out, task)[:_LOSS_DOCUMENTS]
        ]
        record = self.losses(documents)
        self._results.routing = record.get("expert_use", {})
        numbers = {name: value for name, value in record.items() if isinstance(value, float)}
        routing = ("min_normalized_entropy", "max_violation")
        self._results.numbers |= {name: numbers.pop(name) for name in routing if name in numbers}
        self._results.losses = numbers

    def _context(self, kind: str, head: str = "digit", reference: str = "") -> dict[str, float]:
        """Original, ceiling and chance that stand beside a score."""
        judge, accuracy = self.judges[kind], self._results.judges.get(reference or kind, {})
        heads = ("digit", "direction") if head == "both" else (head,)
        chance = 1 / np.prod([len(judge.labels[name]) for name in heads])
        context = {"chance": float(chance)}
        if accuracy:
            context |= {"original": accuracy[f"original_{head}"], "ceiling": accuracy[f"round_trip_{head}"]}
        return context

    def _voices(self, known: bool = False) -> str:
        """Held-out recordings to compare with: unseen voices or `known` ones, the others where there are none."""
        first, other = ("known_voices", "speech") if known else ("speech", "known_voices")
        return first if first in self._references else other

    def _score(
        self, name: str, right: Sequence[bool], context: dict[str, float], *, part: bool = False, **more: float
    ) -> None:
        """Keeps and reports a score; a `part` of another one does not count once more in means over tasks."""
        self._results.scores[name] = score = Score.of(right, **context, **more)
        if not part:
            self._results.answers[name] = [bool(answer) for answer in right]
        self.report(score.line(name.removesuffix("_accuracy")))

    def _show(
        self, section: str, kind: str, values: Sequence[np.ndarray], documents: Sequence[Document], **lists: Any
    ) -> None:
        for i, value in enumerate(values):
            extra = {name: entries[i] for name, entries in lists.items()}
            self._results.examples.append(
                Example(section, JUDGED_MODALITIES[kind], value, caption_of(documents[i]), **extra)
            )

    def _understand(self, task: str, kind: str, name: str) -> None:
        documents = media_sets.of_task(self.held_out, task, labelled=True)
        # Voices that training never had, where there are any.
        documents = [d for d in documents if d.meta.get("unseen_voice") is not False] or documents
        if not documents or kind not in self.judges:
            return
        documents = media_sets.balanced(documents, min(len(documents), max(self.config.samples, 1)))
        said = ask(self.engine, documents, seed=self.seed, stream=self._stream)
        right = [digit_in(text) == document.meta["digit"] for text, document in zip(said, documents, strict=True)]
        exact = [same_words(text, caption_of(document)) for text, document in zip(said, documents, strict=True)]
        context = self._context(kind, reference=self._voices() if kind == "speech" else kind)
        self._score(name, right, context, exact=float(np.mean(exact)))
        wrong_first = (np.flatnonzero(np.array(right) == state)[:_SHOWN].tolist() for state in (False, True))
        chosen = [*next(wrong_first), *next(wrong_first)]
        values = [_medium(documents[i], JUDGED_MODALITIES[kind]) for i in chosen]
        self._show(
            task,
            kind,
            values,
            [documents[i] for i in chosen],
            answer=[said[i] for i in chosen],
            right=[right[i] for i in chosen],
        )

    def _prompts(self, task: str, count: int, keys: Sequence[str] = ("digit",)) -> list[Document]:
        labelled = (media_sets.of_task(split, task, labelled=True) for split in (self.held_out, self.training))
        documents = next(filter(None, labelled), [])
        # A voice that was never heard cannot be asked for; its recordings still serve listening.
        documents = [d for d in documents if d.meta.get("unseen_voice") is not True] or documents
        return media_sets.balanced(documents, count, keys) if documents else []

    def _show_real(self, task: str, reference: str) -> None:
        originals, decoded = self._references.get(reference, (MediaSet([], [], []), []))
        kind = "speech" if reference == "known_voices" else reference
        first = [originals.digits.index(digit) for digit in sorted(set(originals.digits))]
        captions = [
            Document((), {"caption": f"{originals.digits[i]} {originals.directions[i]}".strip()}) for i in first
        ]
        self._show(f"{task}_real", kind, [originals.values[i] for i in first], captions)
        self._show(f"{task}_round_trip", kind, [decoded[i] for i in first], captions)

    def _images(self) -> None:
        prompts = self._prompts("image_generation", self.config.samples)
        if not prompts or "image" not in self.judges:
            return
        values = make(self.engine, prompts, "image", seed=self.seed, stream=self._stream)
        seen = self.judges["image"].predict(values)["digit"]
        asked = np.array([prompt.meta["digit"] for prompt in prompts])
        self._score("image_generation_accuracy", (seen == asked).tolist(), self._context("image"))
        self._distances(np.stack(values), asked)
        self._show_real("image_generation", "image")
        self._show_made("image_generation", "image", values, prompts, seen, (seen == asked).tolist(), 8 * _SHOWN)

    def _distances(self, samples: np.ndarray, asked: np.ndarray) -> None:
        if "image" not in self._references:
            return
        originals, decoded = self._references["image"]
        training, numbers = media_sets.collect(self.training, "image"), self._results.numbers
        numbers["near_duplicates"] = near_duplicates(samples, np.stack(training.values), np.stack(decoded))
        self.report(f"{'near_duplicates':<34}{numbers['near_duplicates']:.3f}")
        if np.unique(originals.digits, return_counts=True)[1].max() < 2:
            return  # a world of one held-out picture per digit has no variety to compare with
        numbers["image_variety"] = image_variety(samples, asked, np.stack(decoded), np.array(originals.digits))
        self.report(f"{'image_variety':<34}{numbers['image_variety']:.3f}")

    def _show_made(
        self, task: str, kind: str, values: list, prompts: list, seen: Any, right: list[bool], count: int
    ) -> None:
        # The first ones, right or wrong: a gallery that hides failures would mislead.
        shown = slice(0, count)
        self._show(
            task,
            kind,
            values[shown],
            prompts[shown],
            answer=[str(s) for s in seen[shown]],
            right=[bool(r) for r in right[shown]],
        )

    def _speech(self) -> None:
        prompts = self._prompts("speech_generation", self.config.samples)
        if not prompts or "speech" not in self.judges:
            return
        values = make(self.engine, prompts, "audio", seed=self.seed, stream=self._stream)
        seen = self.judges["speech"].predict(values)["digit"]
        right = [digit == prompt.meta["digit"] for digit, prompt in zip(seen, prompts, strict=True)]
        reference = self._voices(known=True)
        self._score("speech_generation_accuracy", right, self._context("speech", reference=reference))
        self._show_real("speech_generation", reference)
        self._show_made("speech_generation", "speech", values, prompts, seen, right, _SHOWN + 2)

    def _videos(self) -> None:
        prompts = self._prompts("video_generation", self.config.videos, ("digit", "direction"))
        judge = self.judges.get("video")
        if not prompts or judge is None or "direction" not in judge.labels:
            return
        # As long as the held-out clips, which the judge was trained on.
        config = dataclasses.replace(self.engine.config, video_frames=len(_medium(prompts[0], "video")))
        values = make(self.engine, prompts, "video", seed=self.seed, stream=self._stream, config=config)
        seen = judge.predict(values)
        digit = seen["digit"] == np.array([prompt.meta["digit"] for prompt in prompts])
        direction = seen["direction"] == np.array([prompt.meta["direction"] for prompt in prompts])
        self._score("video_generation_accuracy", (digit & direction).tolist(), self._context("video", "both"))
        self._score("video_direction_accuracy", direction.tolist(), self._context("video", "direction"), part=True)
        self._score("video_digit_accuracy", digit.tolist(), self._context("video", "digit"), part=True)
        self._show_real("video_generation", "video")
        answers = [f"{d} {where}" for d, where in zip(seen["digit"], seen["direction"], strict=True)]
        self._show_made(
            "video_generation", "video", values, prompts, answers, (digit & direction).tolist(), 2 * _SHOWN - 2
        )

    def _text(self) -> None:
        documents = media_sets.of_task(self.held_out, "text")
        if not documents:
            return
        text = "".join(str(span.value) for document in documents for span in document.spans)
        data = text.encode("utf-8", "surrogatepass")
        numbers = self._results.numbers
        numbers |= {"order0": order0_bits_per_byte(data), "zlib": zlib_bits_per_byte(data)}
        if self.losses is not None:
            numbers["text_bits_per_byte"] = self.losses(documents)["text_bits_per_byte"]
            values = (numbers[k] for k in ("text_bits_per_byte", "order0", "zlib"))
            self.report("{:<34}{:.3f}  order0 {:.3f}  zlib {:.3f}".format("text_bits_per_byte", *values))
        prompts = [_beginning(document) for document in documents[: _SHOWN // 2]]
        said = make(self.engine, prompts, "text", seed=self.seed, stream=self._stream, whole=True)
        for prompt, text in zip(prompts, said, strict=True):
            self._results.examples.append(Example("text", "text", np.zeros(0), str(prompt.spans[0].value), text))


_TASKS: tuple[tuple[str, Callable[[DigitsSuite], None]], ...] = (
    ("losses", DigitsSuite._losses),
    ("image_caption", lambda suite: suite._understand("image_caption", "image", "image_caption_accuracy")),
    ("speech_caption", lambda suite: suite._understand("speech_caption", "speech", "speech_word_accuracy")),
    ("image_generation", DigitsSuite._images),
    ("speech_generation", DigitsSuite._speech),
    ("video_generation", DigitsSuite._videos),
    ("text", DigitsSuite._text),
)


def _pool() -> ThreadPoolExecutor:
    """On CPUs two at a time: while one is compiled, which takes one core, another one computes."""
    return ThreadPoolExecutor(2 if jax.default_backend() == "cpu" else 1)


def caption_of(document: Document) -> str:
    """The caption of a document: its meta key, or else its text spans."""
    if document.meta.get("caption"):
        return str(document.meta["caption"])
    return " ".join(str(span.value) for span in document.spans if span.modality == "text")


def _medium(document: Document, modality: str) -> np.ndarray:
    return next(span.value for span in document.spans if span.modality == modality)


def _beginning(document: Document, characters: int = 60) -> Document:
    span = document.spans[0]
    return Document((dataclasses.replace(span, value=str(span.value)[:characters]),))
