"""Workloads of `experiments.benchmark`, the two processes that run them, and how the parent talks to these."""
