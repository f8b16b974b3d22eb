"""A layer's step on its page array, of floats or of 8 bits with scales: write the new keys and values, then attend over all.

Knows no weights. The layers are `attention` and `mla`; the kernels, and how 8-bit pages are stored, are `pallas_kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array, Float

from jaxserve.arrays import PageArray, QuantizedPages
from pallas_kernels import paged_attention, write_kv

if TYPE_CHECKING:
    from jaxserve.models.attention import LayerInputs


def write_and_attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    inputs: LayerInputs,
    pages: PageArray,
    *,
    backend: str | None,
    **options: Any,
) -> tuple[jax.Array, PageArray]:
    """Returns what the queries read `[T, N, H]`, and the pages with the step's keys and values.

    Tokens of the step read each other from the pages too, so that what a token sees of another does not hang on how prompts were cut.

    Args:
        v: None where keys are the values too.
        options: Of `paged_attention`.
    """
    places = inputs.write_page, inputs.write_offset
    scales: jax.Array | None = None
    written: PageArray
    if isinstance(pages, QuantizedPages):
        values, scales = write_kv(pages.values, k, v, *places, scales=pages.scales, implementation=backend)
        written = QuantizedPages(values, scales)
    else:
        written = values = write_kv(pages, k, v, *places, implementation=backend)
    rows = inputs.page_tables, inputs.row_start, inputs.kv_length, inputs.token_row, inputs.position
    return paged_attention(q, values, *rows, kv_scales=scales, implementation=backend, **options), written
