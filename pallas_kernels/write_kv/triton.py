"""Writing into pages in Triton: one launch for keys, values and scales, in place.

XLA's form is a scatter, and with scales a reduction and two scatters; here quantizing a vector and storing it is one pass. RoPE stays
outside, with XLA: it rotates queries and keys in one fusion, together with the norm or bias before it, and writing keys here before
they are in memory would save 2 x T x K x H elements of traffic, below 1 % of a step whose rows hold 256 keys or more, at the price of
a second rotation for the queries. Rules: `api`. Next: `triton_kernels`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_kv import LARGEST
from pallas_kernels.triton_launch import launch, next_power


def write_kv(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    write_page: jax.Array,
    write_offset: jax.Array,
    *,
    scales: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `api.write_kv`."""
    from pallas_kernels.write_kv.triton_kernels import write

    num_tokens, num_kv_heads, head_dim = k.shape
    _, num_parts, _, page_size, _ = pages.shape
    reads = {"k": k, "v": k if v is None else v, "write_page": write_page, "write_offset": write_offset}
    written = launch(
        write,
        grid=(num_tokens, num_parts),
        reads=reads if scales is not None else reads | {"scales": write_offset},  # a parameter that nobody looks at
        writes={"pages": pages} if scales is None else {"pages": pages, "scales": scales},
        num_warps=4,
        num_stages=1,
        constants={
            "K": num_kv_heads, "PARTS": num_parts, "PAGE_SIZE": page_size, "H": head_dim,
            "HEADS": next_power(num_kv_heads), "DIMS": next_power(head_dim),
            "LARGEST": 0.0 if scales is None else LARGEST[pages.dtype.name], "IS_FP8": pages.dtype == jnp.uint8,
        },
    )  # fmt: skip
    return written[0] if scales is None else (written[0], written[1])
