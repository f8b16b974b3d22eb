"""Activations times a weight matrix in C++ on the CPU, called through XLA's typed FFI.

The kernel is `cpu_native.cc`, built on first use (`pallas_kernels.native`). Here: register it once for this process, leave to
XLA what it does better, and turn the arguments into the call's. Rules: `reference`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.linear import xla
from pallas_kernels.native import NativeUnavailable, load_library

SOURCE = Path(__file__).with_name("cpu_native.cc")
UNITS = ("float32 vectors", "AVX512-BF16", "AMX")
"""What can multiply bfloat16, by the number that the library gives."""
FEW_TOKENS = 16
"""Without AMX: up to here the kernel beats XLA, which then catches up, because the weights' bytes no longer decide (measured)."""


@functools.cache
def _target() -> tuple[str, str]:
    """Registers the kernel; returns its FFI name and the unit it multiplies bfloat16 with. Raises NativeUnavailable."""
    library, digest = load_library(SOURCE)
    # The name is part of a compiled program: with the hash in it, a cached program never meets a kernel it was not made for.
    name = f"pallas_kernels_linear_{digest}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.Linear), platform="cpu")
    return name, UNITS[library.LinearBfloat16Unit()]


@functools.cache
def unavailable_reason() -> str | None:
    """None when the kernel is built and registered, else why not. The first call may build it."""
    try:
        _target()
    except NativeUnavailable as error:
        return str(error)
    return None


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, out_dtype: DTypeLike) -> jax.Array:
    """See `api.linear`."""
    name, unit = _target()
    out_dtype = jnp.dtype(out_dtype)
    has_amx = unit == "AMX" and weight.dtype == jnp.bfloat16
    is_known = weight.dtype in (jnp.bfloat16, jnp.float32) and out_dtype in (weight.dtype, jnp.float32)
    if not is_known or (x.shape[0] > FEW_TOKENS and not has_amx):
        return xla.linear(x, weight, bias, out_dtype=out_dtype)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), out_dtype))
    return call(x.astype(weight.dtype), weight, jnp.zeros(0, weight.dtype) if bias is None else bias.astype(weight.dtype))
