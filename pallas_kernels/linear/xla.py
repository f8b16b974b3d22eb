"""Activations times a weight matrix by XLA's own dot product: any device, any dtype, the fallback everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, out_dtype: DTypeLike) -> jax.Array:
    """See `api.linear`."""
    # Written as `x @ weight.T` XLA:CPU would convert a bfloat16 weight whole.
    out = lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.promote_types(weight.dtype, out_dtype),
    ).astype(out_dtype)
    return out if bias is None else out + bias.astype(out_dtype)[None]
