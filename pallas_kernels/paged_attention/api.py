"""Attention of a step's tokens over KV pages: decode and ragged prefill behind one function.

Says the shapes and the rules that every implementation keeps, checks the arguments and hands over to the implementation that
`pallas_kernels.dispatch` picks. Next: `reference` (the rules as code), `xla` (portable), `cpu_native` (C++ on CPU).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32, UInt8

from pallas_kernels import dispatch
from pallas_kernels.quantized_kv import is_quantized


def paged_attention(
    q: Float[Array, "T N H"],
    pages: Float[Array, "num_pages parts K page_size H"]
    | Int8[Array, "num_pages parts K page_size H"]
    | UInt8[Array, "num_pages parts K page_size H"],
    page_tables: Int32[Array, "B P"],
    row_start: Int32[Array, "B+1"],
    kv_length: Int32[Array, "B"],
    token_row: Int32[Array, "T"],
    position: Int32[Array, "T"],
    *,
    is_decode: bool,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    kv_scales: Float32[Array, "num_pages parts K page_size"] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention of every token over the keys of its own row. Returns `[T, N, H]` in the dtype of `q`; math is float32.

    Args:
        q: Queries; head n uses kv head n // (N // K).
        pages: Keys (part 0) and values (part 1), float32, bfloat16 or float16, or int8 or uint8 (the bits of float8_e4m3fn) with
            `kv_scales`; with one part the keys are the values too (latent attention). Page 0 is the null page.
        page_tables: The pages of each row, in order; position s of row b is place s % page_size of page
            `page_tables[b, s // page_size]`. Entries past the row's length may hold anything.
        row_start: Row b owns tokens `[row_start[b], row_start[b + 1])`, adjacent and ascending in position.
        kv_length: Positions of each row that hold keys, this step's tokens included; 0 for padding rows.
        token_row: The row of each token; B for padding tokens, which come last.
        position: A token's position in its row, below the row's `kv_length`.
        is_decode: T == B and token b is row b's only token, at position `kv_length[b] - 1`.
        scale: Multiplies the dot products (head_dim ** -0.5 in most models).
        window: A token at position p sees `[max(0, p - window + 1), p]`; None sees `[0, p]`.
        chunk: A token sees the positions of its own chunk, `[p // chunk * chunk, p]` (Llama 4); not together with a window.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)` after scaling (Gemma 2).
        sinks: A logit for each query head that takes part in the softmax but has no value (GPT-OSS).
        kv_scales: What the numbers of 8-bit pages are multiplied with, one for each place, part and head; places that a row does not own
            may hold NaN.
        implementation: One of `dispatch.IMPLEMENTATIONS`; None takes the best one that this machine has.

    Tokens that see no key (padding) give 0. Whatever lies in places that no token of its row sees, NaN included, never reaches a token's
    output. A NaN that a token sees may also reach those of its row that do not see it.

    Raises:
        ValueError: unknown or unavailable `implementation`.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert pages.shape[1] in (1, 2) and pages.shape[4] == head_dim, (q.shape, pages.shape)
    assert num_heads % pages.shape[2] == 0, (q.shape, pages.shape)
    assert token_row.shape == position.shape == (num_tokens,), (token_row.shape, position.shape, q.shape)
    assert row_start.shape[0] == page_tables.shape[0] + 1 == kv_length.shape[0] + 1
    assert not is_decode or num_tokens == page_tables.shape[0], (q.shape, page_tables.shape)
    assert window is None or (window >= 1 and chunk is None), (window, chunk)
    assert chunk is None or chunk >= 1, chunk
    assert is_quantized(pages.dtype) == (kv_scales is not None), (pages.dtype, kv_scales)
    assert kv_scales is None or kv_scales.shape == pages.shape[:4], (kv_scales.shape, pages.shape)
    if implementation is None:
        needs = dispatch.Needs(
            head_dim=head_dim,
            page_size=pages.shape[3],
            num_parts=pages.shape[1],
            page_dtype=jnp.dtype(pages.dtype).name,
            q_dtype=jnp.dtype(q.dtype).name,
            group=num_heads // pages.shape[2],
            window=window,
            chunk=chunk,
            soft_cap=soft_cap,
            has_sinks=sinks is not None,
        )
        implementation, _ = dispatch.choose(dispatch.this_device(), needs)
    run = dispatch.load("paged_attention", implementation)
    attended: jax.Array = run(
        q, pages, page_tables, row_start, kv_length, token_row, position,
        is_decode=is_decode, scale=scale, window=window, chunk=chunk, soft_cap=soft_cap, sinks=sinks, kv_scales=kv_scales,
    )  # fmt: skip
    return attended
