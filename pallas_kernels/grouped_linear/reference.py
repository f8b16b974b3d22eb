"""The rules of `grouped_linear` as code: the oracle that the other implementations are compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.grouped_linear.api import NO_COPY


def grouped_linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    place: jax.Array,
    block_expert: jax.Array,
    num_used: jax.Array,
    *,
    copies: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """See `api.grouped_linear`; rows that no block in use has are 0. Copies the matrix of every block."""
    places = place.reshape(block_expert.shape[0], -1)
    blocks = x.astype(weight.dtype).at[places // copies].get(mode="clip")
    out = jnp.einsum("bri,boi->bro", blocks, weight[block_expert], preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias[block_expert].astype(jnp.float32)[:, None]
    is_used = jnp.arange(block_expert.shape[0]) < num_used
    places = jnp.where(is_used[:, None], places, NO_COPY)
    return jnp.zeros((x.shape[0] * copies, weight.shape[1]), out_dtype).at[places].set(out.astype(out_dtype), mode="drop")
