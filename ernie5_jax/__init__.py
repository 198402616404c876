"""ernie5_jax: unified multimodal sparse models in JAX.

Shape letters used everywhere: B batch rows, S sequence positions, D model width, N query heads, K key-value heads,
H head width, E experts, F expert width, L layers, Q codec levels, C bits of a visual code, R rows of an elastic mask.
"""
