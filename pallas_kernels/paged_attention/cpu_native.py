"""Attention over pages in C++ on the CPU, called through XLA's typed FFI.

The kernel is `cpu_native.cc`, built on first use (`pallas_kernels.native`). Here: register it once for this process, and turn
the arguments into the call's. Rules: `reference`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import NativeUnavailable, load_library

SOURCE = Path(__file__).with_name("cpu_native.cc")


@functools.cache
def _target() -> str:
    """Registers the kernel and returns its FFI name. Raises NativeUnavailable."""
    library, digest = load_library(SOURCE)
    # The name is part of a compiled program: with the hash in it, a cached program never meets a kernel it was not made for.
    name = f"pallas_kernels_paged_attention_{digest}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.PagedAttention), platform="cpu")
    return name


@functools.cache
def unavailable_reason() -> str | None:
    """None when the kernel is built and registered, else why not. The first call may build it."""
    try:
        _target()
    except NativeUnavailable as error:
        return str(error)
    return None


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    token_row: jax.Array,
    position: jax.Array,
    *,
    is_decode: bool,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """See `api.paged_attention`. `token_row` says what `row_start` says, so the kernel does not take it."""
    call = jax.ffi.ffi_call(_target(), jax.ShapeDtypeStruct(q.shape, jnp.float32))
    out = call(
        q.astype(jnp.float32),
        pages,
        page_tables,
        row_start,
        kv_length,
        position,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        jnp.zeros(0, jnp.float32) if kv_scales is None else kv_scales,
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int32(window or 0),
        chunk=np.int32(chunk or 0),
        is_decode=is_decode,
    )
    return out.astype(q.dtype)
