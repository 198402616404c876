"""Kernels: an API with a reference each, then one file per backend."""
