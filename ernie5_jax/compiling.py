"""How hard XLA works on a program."""

from __future__ import annotations

import jax


def cpu_optimization(level: int, platform: str | None = None) -> dict[str, bool | int | str] | None:
    """Compiler options for a program that, on CPUs, runs too briefly for full optimisation to pay.

    Args:
      level: Of LLVM's optimisation, 0 (fastest to compile) to 3 (the default).
      platform: Where the program runs; None is the default backend.

    Returns:
      A value for `compiler_options`; None where the program does not run on CPUs.
    """
    return {"xla_backend_optimization_level": level} if (platform or jax.default_backend()) == "cpu" else None
