"""Elastic training: which submodel runs."""

from ernie5_jax.elastic.sampling import sample_mask, step_masks

__all__ = ["sample_mask", "step_masks"]
