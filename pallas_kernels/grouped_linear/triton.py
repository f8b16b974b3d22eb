"""Blocks of rows times their experts' matrices in Triton: each block reads its rows and its expert's weights where they lie.

XLA's loop over blocks would copy every expert's matrix out of the stack before its product, and ask the host after each block whether to go
on; and it hands on rows sorted by expert, padded to blocks. The kernel is in `triton_kernels`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.grouped_linear.api import NO_COPY
from pallas_kernels.triton_launch import launch

MIN_ROWS = 16
"""A side of a tile that tensor cores multiply, at least."""


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
    """See `api.grouped_linear`; rows that no block in use has are whatever the memory held."""
    from pallas_kernels.grouped_linear.triton_kernels import multiply_blocks

    _, num_outputs, num_inputs = weight.shape
    size = place.shape[0] // block_expert.shape[0]
    assert size & (size - 1) == 0, f"blocks of {size} rows: must be a power of two"
    is_float32 = weight.dtype == jnp.float32
    tile_out = 64 if is_float32 else 128  # with TILE_IN and num_stages: within 99 KiB of shared memory, see `paged_attention.triton_sizes`
    return launch(
        multiply_blocks,
        grid=(block_expert.shape[0], -(-num_outputs // tile_out), 1),
        reads={
            "x": x.astype(weight.dtype),
            "weight": weight,
            "bias": weight if bias is None else bias,
            "place": place,
            "block_expert": block_expert,
            "num_used": num_used.reshape(1),
        },
        writes={"out": jax.ShapeDtypeStruct((x.shape[0] * copies, num_outputs), out_dtype)},
        num_warps=4,
        num_stages=2 if is_float32 else 3,
        constants={
            "NO_COPY": NO_COPY, "COPIES": copies, "SIZE": size, "ROWS": max(MIN_ROWS, size), "NUM_INPUTS": num_inputs,
            "NUM_OUTPUTS": num_outputs, "TILE_IN": 64, "TILE_OUT": tile_out, "HAS_BIAS": bias is not None, "IS_FLOAT32": is_float32,
        },
    )[0]  # fmt: skip
