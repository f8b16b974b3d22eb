"""Which implementation runs: by what the machine can do, never by trial at run time.

An implementation that is not available says why; `doctor` and the start-up summary print it. Next: an operation's `api`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import jax

from pallas_kernels.linear import cpu_native as native_linear
from pallas_kernels.paged_attention import cpu_native as native_attention

IMPLEMENTATIONS = ("cpu_native", "xla", "reference")
"""Best first."""


def available() -> dict[str, str | None]:
    """For each implementation None, or why this machine cannot run it. The first call may build the native kernels (seconds)."""
    reason = native_attention.unavailable_reason() or native_linear.unavailable_reason()
    return {"cpu_native": reason, "xla": None, "reference": None}


def choose(platform: str) -> tuple[str, str]:
    """The implementation for a JAX platform ("cpu", "gpu", ...) and one clause that says why."""
    if platform != "cpu":
        return "xla", f"there is no kernel for {platform} yet"
    reason = available()["cpu_native"]
    return ("cpu_native", "native code for this CPU") if reason is None else ("xla", f"no native kernel: {reason}")


def load(operation: str, implementation: str) -> Callable[..., jax.Array]:
    """The function of an operation's implementation. Raises ValueError naming what there is, or why it cannot run here."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} does not exist; choose one of {', '.join(IMPLEMENTATIONS)}")
    if (reason := available()[implementation]) is not None:
        raise ValueError(f"implementation {implementation!r} cannot run here: {reason}")
    module = importlib.import_module(f"pallas_kernels.{operation}.{implementation}")
    return getattr(module, operation)
