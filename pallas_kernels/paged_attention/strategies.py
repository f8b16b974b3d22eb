"""Drawn shapes of `paged_attention`, for tests: Hypothesis strategies over `arg_specs.AttentionSpec`.

A shape and a seed give all the arrays (`arg_specs.make_args`): page tables are permuted and partly shared, and what a row does not own
is NaN. Shrinks towards one plain decode row.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from pallas_kernels.paged_attention.arg_specs import AttentionSpec

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
PAGE_DTYPES = ("float32", "float16", "bfloat16", "int8", "uint8")


@st.composite
def attention_specs(
    draw: st.DrawFn,
    *,
    is_decode: bool | None = None,
    head_dims: Sequence[int] = HEAD_DIMS,
    page_sizes: Sequence[int] = PAGE_SIZES,
    page_dtypes: Sequence[str] = PAGE_DTYPES,
    q_dtypes: Sequence[str] = ("float32",),
    max_rows: int = 4,
    max_length: int = 160,
    max_tokens: int = 24,
    has_latent: bool = True,
) -> AttentionSpec:
    """One shape: decode or mixed (`is_decode` None draws which), MQA, GQA or MHA, with any of window, chunk, soft cap and sinks.

    Args:
        max_length: Most keys of a row.
        max_tokens: Most tokens of a mixed row, at most its keys.
        has_latent: Draw pages with one part too.
    """
    is_decode = draw(st.booleans()) if is_decode is None else is_decode
    page_size = draw(st.sampled_from(page_sizes))
    near_a_page = st.sampled_from((page_size - 1, page_size, page_size + 1, 2 * page_size))
    lengths = st.one_of(st.integers(1, max_length), near_a_page.filter(lambda length: length <= max_length))
    keys = draw(st.lists(lengths, min_size=1, max_size=max_rows))
    counts = [1 if is_decode else draw(st.integers(1, min(length, max_tokens))) for length in keys]
    rows = tuple(sorted(zip(counts, keys, strict=True), key=lambda row: row[0] > 1))
    num_kv_heads = draw(st.sampled_from((1, 2, 4)))
    limit = draw(st.sampled_from(("none", "window", "chunk")))
    reach = draw(st.integers(1, max_length))
    num_padding_rows = draw(st.integers(0, 2))
    return AttentionSpec(
        name="drawn",
        rows=rows,
        num_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3, 4, 8))),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from(head_dims)),
        page_size=page_size,
        max_pages=-(-max(keys) // page_size) + draw(st.integers(0, 2)),
        num_padding_rows=num_padding_rows,
        num_padding_tokens=num_padding_rows if is_decode else draw(st.integers(0, 3)),
        page_dtype=draw(st.sampled_from(page_dtypes)),
        num_parts=draw(st.sampled_from((2, 1))) if has_latent else 2,
        window=reach if limit == "window" else None,
        chunk=reach if limit == "chunk" else None,
        soft_cap=draw(st.sampled_from((None, 3.0))),
        has_sinks=draw(st.booleans()),
        is_decode=is_decode,
        q_dtype=draw(st.sampled_from(q_dtypes)),
        num_shared_pages=draw(st.integers(0, 2)),
    )
