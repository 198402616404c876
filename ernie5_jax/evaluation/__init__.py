"""Evaluation: judges, task suites, held-out losses, summary and report."""

from ernie5_jax.evaluation.captions import digit_in, same_words
from ernie5_jax.evaluation.compression import order0_bits_per_byte, zlib_bits_per_byte
from ernie5_jax.evaluation.digits import DigitsSuite, caption_of
from ernie5_jax.evaluation.errors import EvaluationError
from ernie5_jax.evaluation.judges import Judge, train_judge, train_judges
from ernie5_jax.evaluation.losses import HeldOut
from ernie5_jax.evaluation.report import build_report, write_report
from ernie5_jax.evaluation.results import Example, Results, write_json
from ernie5_jax.evaluation.scores import Score, wilson_interval
from ernie5_jax.evaluation.summary import machine, summarize, versions, write_summary
from ernie5_jax.evaluation.variety import image_variety, near_duplicates, rms_distances, within_class_distance

__all__ = [
    "DigitsSuite",
    "EvaluationError",
    "Example",
    "HeldOut",
    "Judge",
    "Results",
    "Score",
    "build_report",
    "caption_of",
    "digit_in",
    "image_variety",
    "machine",
    "near_duplicates",
    "order0_bits_per_byte",
    "rms_distances",
    "same_words",
    "summarize",
    "train_judge",
    "train_judges",
    "versions",
    "wilson_interval",
    "within_class_distance",
    "write_json",
    "write_report",
    "write_summary",
    "zlib_bits_per_byte",
]
