"""Keys and values stored in 8 bits with a float32 scale for each token, part and head: value = stored x scale.

Two dtypes: int8, and uint8 that holds the bits of float8_e4m3fn. Bits, because XLA on CPU scatters into a float8 array by converting all
of it there and back. Knows no pages; `write_kv` quantizes, `paged_attention` reads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, UInt8

LARGEST = {"int8": 127.0, "uint8": 448.0}
"""By page dtype, the magnitude that a token's largest value is stored as: that of int8, and that of float8_e4m3fn."""


def is_quantized(dtype: DTypeLike) -> bool:
    """Whether pages of this dtype have scales."""
    return jnp.dtype(dtype).name in LARGEST


def quantize(x: Float[Array, "*any H"], dtype: DTypeLike) -> tuple[Int8[Array, "*any H"] | UInt8[Array, "*any H"], Float[Array, "*any"]]:
    """What is stored of `x`, rounded to the nearest, and its scales: max|x| / `LARGEST`, 1 where all of x are 0. Math is float32."""
    largest = LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    peak = jnp.abs(x).max(axis=-1)
    scales = jnp.where(peak == 0.0, 1.0, peak / largest)
    scaled = jnp.clip(x / scales[..., None], -largest, largest)
    if dtype == jnp.int8:
        return jnp.round(scaled).astype(jnp.int8), scales
    return jax.lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8), scales


def stored_values(stored: Array) -> Float[Array, "..."]:
    """Elements of pages of any dtype as float32, before any scale."""
    if stored.dtype == jnp.uint8:
        stored = jax.lax.bitcast_convert_type(stored, jnp.float8_e4m3fn)
    return stored.astype(jnp.float32)
