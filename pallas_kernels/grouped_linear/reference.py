"""The rules of `grouped_linear` as code: the oracle that the other implementations are compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def grouped_linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, block_expert: jax.Array, num_used: jax.Array, *, out_dtype: DTypeLike
) -> jax.Array:
    """See `api.grouped_linear`. Copies the matrix of every block."""
    num_blocks, (num_rows, num_inputs) = block_expert.shape[0], x.shape
    blocks = x.reshape(num_blocks, num_rows // num_blocks, num_inputs).astype(weight.dtype)
    out = jnp.einsum("bri,boi->bro", blocks, weight[block_expert], preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias[block_expert].astype(jnp.float32)[:, None]
    is_used = jnp.arange(num_blocks) < num_used
    return jnp.where(is_used[:, None, None], out, 0.0).reshape(num_rows, -1).astype(out_dtype)
