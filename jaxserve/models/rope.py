"""Rotary position embedding: cos and sin tables of a step's tokens, and the rotation of queries and keys.

Formulas follow transformers' `modeling_rope_utils` (5.24), including its order of float32 operations, since models were trained
with those tables. Parameters come resolved from `rope_config.py`. Knows nothing of attention.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxserve.models.spec import RopeSpec


def rotary_tables(rope: RopeSpec, position: Int32[Array, "T"], rope_length: Int32[Array, "T"]) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every token, `[T, rotary_dim / 2]` float32, multiplied by the attention factor.

    Where the table depends on the sequence's length (dynamic, longrope), that length is `max(rope_length, position + 1)`:
    the length at admission for all of a prompt's chunks, then the growing one of a cached decode.
    """
    length = jnp.maximum(rope_length, position + 1)
    match rope.kind:
        case "dynamic":
            frequencies = _dynamic(rope, length)
        case "longrope":
            frequencies = _longrope(rope, length)
        case _:
            frequencies = jnp.asarray(inverse_frequencies(rope))[None]
    angle = position.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angle) * rope.attention_factor, jnp.sin(angle) * rope.attention_factor


def rotate(x: Float[Array, "T heads H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]) -> jax.Array:
    """Rotates the leading `2 * half` dimensions of each head, dimension i with i + half, in float32. Returns the dtype of `x`."""
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def inverse_frequencies(rope: RopeSpec) -> np.ndarray:
    """Radians per position of each rotated pair, `[rotary_dim / 2]` float32: the table that does not depend on the length.

    For dynamic and longrope it is the original one, of sequences no longer than `original_length`.
    """
    frequencies = np.float32(1.0) / _wavelengths(rope)
    match rope.kind:
        case "linear":
            return frequencies / np.float32(rope.factor)
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope)
        case "longrope":
            return np.float32(1.0) / (np.asarray(rope.short_factors, np.float32) * _wavelengths(rope))
    if rope.freq_divisors:
        return frequencies / np.asarray(rope.freq_divisors, np.float32)
    return frequencies


def _exponents(rope: RopeSpec) -> np.ndarray:
    return np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)


def _wavelengths(rope: RopeSpec) -> np.ndarray:
    """Positions per radian."""
    return np.float32(rope.theta) ** _exponents(rope)


def _llama3(rope: RopeSpec, frequencies: np.ndarray) -> np.ndarray:
    """Long waves are slowed by `factor`, short ones kept, those between are blended (Llama 3.1)."""
    assert rope.pretrained_length is not None
    length, low, high = rope.pretrained_length, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    smooth = (length / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    slowed = np.where(wavelength > length / low, frequencies / rope.factor, blended)
    return np.where(wavelength < length / high, frequencies, slowed).astype(np.float32)


def _yarn(rope: RopeSpec) -> np.ndarray:
    """A ramp over dimensions from the original frequencies to interpolated ones (YaRN, arXiv 2309.00071)."""
    assert rope.pretrained_length is not None
    dim, pretrained_length = rope.rotary_dim, rope.pretrained_length

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(pretrained_length / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    wavelengths = _wavelengths(rope)
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * wavelengths)
    return interpolated * ramp + (np.float32(1.0) / wavelengths) * (1 - ramp)


def _dynamic(rope: RopeSpec, length: Int32[Array, "T"]) -> jax.Array:
    """NTK-aware frequencies of each token, `[T, rotary_dim / 2]`: a larger base for a longer sequence."""
    assert rope.original_length is not None
    ratio = rope.factor * length.astype(jnp.float32) / rope.original_length - (rope.factor - 1)
    is_long = length > rope.original_length
    base = rope.theta * jnp.where(is_long, ratio, 1.0) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    scaled = 1.0 / base[:, None] ** jnp.asarray(_exponents(rope))[None]
    return jnp.where(is_long[:, None], scaled, jnp.asarray(inverse_frequencies(rope))[None])


def _longrope(rope: RopeSpec, length: Int32[Array, "T"]) -> jax.Array:
    """The long or the short table for each token, `[T, rotary_dim / 2]`."""
    assert rope.original_length is not None
    long = np.float32(1.0) / (np.asarray(rope.long_factors, np.float32) * _wavelengths(rope))
    return jnp.where((length > rope.original_length)[:, None], jnp.asarray(long)[None], jnp.asarray(inverse_frequencies(rope))[None])
