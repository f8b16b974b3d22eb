"""Attention over pages in plain JAX operations: portable, and its cost follows true lengths, not padded shapes.

Two loops write one output buffer. The first takes the leading rows that have one token each, some rows at a time; the second
takes the remaining rows in query tiles, each inside one row. Both walk the KV tiles that their tokens can see with an online
softmax (Milakov and Gimelshein, arXiv 1805.02867), and all trip counts are computed from the step's lengths, so padding rows,
padding tokens and the unused width of the page table cost nothing. The heads that share a kv head are packed with the tokens
into one matrix. Rules: `reference`. Next: `cpu_native`, which does the same in C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.quantized_kv import stored_values

PRECISION = jax.lax.Precision.HIGHEST
"""Of products of float32, which a GPU would otherwise multiply as TF32, with 10 bits of fraction. A CPU knows no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a loop takes at once.

    Attributes:
        scores: Tokens times keys in a step of the inner loop: few tokens take many keys, because a step has a fixed cost of its own.
        min_kv_tile: Keys in a step of the inner loop, at least (or one page, where pages are larger).
        rows: Rows with one token that share a step of the inner loop; they run as long as the longest of them.
        query_tile: Tokens of a chunk that share a walk over the keys.
    """

    scores: int = 1024
    min_kv_tile: int = 64
    rows: int = 16
    query_tile: int = 32


_SINGLE = {"scores": (512, 2048, 4096), "rows": (4, 8, 32)}
TUNABLES = {"decode": _SINGLE, "mixed": {**_SINGLE, "query_tile": (16, 64, 128)}}
"""What `tuning` may try beside the defaults, by kind of step."""


class _Softmax(NamedTuple):
    """Running softmax of [W, K, M * G] queries: largest score, sum of weights, weighted sum of values."""

    peak: jax.Array
    total: jax.Array
    values: jax.Array


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    token_row: jax.Array,
    position: jax.Array,
    *,
    is_decode: bool,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """See `api.paged_attention`."""
    num_tokens, num_rows = q.shape[0], page_tables.shape[0]
    shape_class = tuning.shape_class(
        "decode" if is_decode else "mixed",
        rounded={"rows": num_rows, "tokens": num_tokens, "keys": page_tables.shape[1] * pages.shape[3]},
        dtype=pages.dtype.name, parts=pages.shape[1], kv_heads=pages.shape[2], group=q.shape[1] // pages.shape[2], head_dim=q.shape[2],
    )  # fmt: skip
    sizes = tuning.tuned("paged_attention", "xla", shape_class, Sizes())
    attend = functools.partial(
        _attend, sizes=sizes, pages=pages, kv_scales=kv_scales, scale=scale, window=window, chunk=chunk, soft_cap=soft_cap, sinks=sinks
    )
    spare = max(sizes.rows, sizes.query_tile)  # the last tile of a loop may reach past the last token
    padded_q = jnp.pad(q, ((0, spare), (0, 0), (0, 0)))
    out = jnp.zeros(padded_q.shape, q.dtype)
    if is_decode:
        num_single = jnp.max(jnp.where(kv_length > 0, jnp.arange(num_rows) + 1, 0))
        return _single_rows(attend, sizes.rows, out, padded_q, page_tables, kv_length, num_single)[:num_tokens]
    count = jnp.diff(row_start)
    num_single = jnp.cumprod((count == 1).astype(jnp.int32)).sum()
    out = _single_rows(attend, sizes.rows, out, padded_q, page_tables, kv_length, num_single)
    padded_position = jnp.pad(position, (0, spare))
    return _chunks(attend, sizes.query_tile, out, padded_q, page_tables, row_start, padded_position, num_single)[:num_tokens]


def _single_rows(
    attend: Callable[..., jax.Array],
    rows: int,
    out: jax.Array,
    q: jax.Array,
    tables: jax.Array,
    kv_length: jax.Array,
    num_single: jax.Array,
) -> jax.Array:
    """Writes the output of tokens [0, num_single): token b is the only one of row b. What follows in its last tile becomes 0."""
    width = min(rows, tables.shape[0])
    rows_to_pad = -tables.shape[0] % width
    tables = jnp.pad(tables, ((0, rows_to_pad), (0, 0)))
    end_key = jnp.where(jnp.arange(kv_length.shape[0]) < num_single, kv_length, 0)
    end_key = jnp.pad(end_key, (0, rows_to_pad))

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        start = i * width
        ends = jax.lax.dynamic_slice_in_dim(end_key, start, width)
        tile = attend(
            jax.lax.dynamic_slice_in_dim(q, start, width)[:, None],
            jax.lax.dynamic_slice_in_dim(tables, start, width),
            position=ends[:, None] - 1,
            end_key=ends,
        )
        return jax.lax.dynamic_update_slice_in_dim(out, tile[:, 0], start, 0)

    return jax.lax.fori_loop(0, (num_single + width - 1) // width, one_tile, out)


def _chunks(
    attend: Callable[..., jax.Array],
    query_tile: int,
    out: jax.Array,
    q: jax.Array,
    tables: jax.Array,
    row_start: jax.Array,
    position: jax.Array,
    num_single: jax.Array,
) -> jax.Array:
    """Writes the output of the tokens of rows [num_single, B), in query tiles that lie inside one row.

    Tiles run in ascending order and put 0 past their row's end; the next row's first tile overwrites that.
    """
    count = jnp.where(jnp.arange(tables.shape[0]) < num_single, 0, jnp.diff(row_start))
    tiles_end = jnp.cumsum((count + query_tile - 1) // query_tile)

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(tiles_end <= i)
        index_in_row = i - jnp.where(row > 0, tiles_end[row - 1], 0)
        start = row_start[row] + index_in_row * query_tile
        is_mine = start + jnp.arange(query_tile) < row_start[row + 1]
        positions = jnp.where(is_mine, jax.lax.dynamic_slice_in_dim(position, start, query_tile), -1)
        tile = attend(
            jax.lax.dynamic_slice_in_dim(q, start, query_tile)[None],
            jax.lax.dynamic_slice_in_dim(tables, row, 1),
            position=positions[None],
            end_key=positions.max(keepdims=True) + 1,
        )
        return jax.lax.dynamic_update_slice_in_dim(out, tile[0], start, 0)

    return jax.lax.fori_loop(0, tiles_end[-1], one_tile, out)


def _attend(
    q: jax.Array,
    tables: jax.Array,
    *,
    position: jax.Array,
    end_key: jax.Array,
    pages: jax.Array,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    sizes: Sizes,
) -> jax.Array:
    """Attention of W x M tokens: q [W, M, N, H], tables [W, P], position [W, M] (-1 sees nothing), end_key [W]."""
    width, num_queries, num_heads, head_dim = q.shape
    _, num_parts, num_kv_heads, page_size, _ = pages.shape
    group = num_heads // num_kv_heads
    keys_at_once = max(sizes.min_kv_tile, sizes.scores // (width * num_queries))
    pages_in_tile = max(1, min(keys_at_once // page_size, tables.shape[1]))
    tile = pages_in_tile * page_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages_in_tile)))
    packed = (width, num_kv_heads, num_queries * group)
    queries = q.astype(jnp.float32).reshape(width, num_queries, num_kv_heads, group, head_dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(*packed, head_dim)
    query_position = jnp.repeat(position, group, axis=1)[:, None, :, None]  # [W, 1, M * G, 1]
    first_seen = _first_seen(position, window, chunk)  # [W, M]
    first_key = jnp.where(position < 0, jnp.iinfo(jnp.int32).max, first_seen).min(axis=1)
    query_first = jnp.repeat(first_seen, group, axis=1)[:, None, :, None]

    def one_tile(i: jax.Array, state: _Softmax) -> _Softmax:
        key_position = i * tile + jnp.arange(tile)[None]
        is_written = (key_position >= first_key[:, None]) & (key_position < end_key[:, None])  # [W, tile]
        page_ids = jax.lax.dynamic_slice_in_dim(tables, i * pages_in_tile, pages_in_tile, axis=1)
        has_keys = is_written.reshape(width, pages_in_tile, page_size).any(axis=2)
        page_ids = jnp.where(has_keys, page_ids, 0)
        kv = stored_values(pages.at[page_ids].get(mode="promise_in_bounds"))  # [W, pages, parts, K, page_size, H]
        if kv_scales is not None:
            kv *= kv_scales.at[page_ids].get(mode="promise_in_bounds")[..., None]
        kv = kv.transpose(2, 0, 3, 1, 4, 5).reshape(num_parts, width, num_kv_heads, tile, head_dim)
        # Values nobody may see are taken out: a weight of 0 would still let a NaN through.
        kv = jnp.where(is_written[None, :, None, :, None], kv, 0.0)
        k, v = kv[0], kv[-1]
        scores = jnp.einsum("wkmh,wksh->wkms", queries, k, precision=PRECISION) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        key_position = key_position[:, None, None]
        is_visible = is_written[:, None, None, :] & (key_position <= query_position) & (key_position >= query_first)
        return _accumulate(state, jnp.where(is_visible, scores, -jnp.inf), v)

    state = _Softmax(jnp.full(packed, -jnp.inf), jnp.zeros(packed), jnp.zeros((*packed, head_dim)))
    if sinks is not None:
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, 1, group), (1, num_queries, 1))
        state = state._replace(peak=jnp.tile(sink.reshape(1, *packed[1:]), (width, 1, 1)), total=jnp.ones(packed))
    state = jax.lax.fori_loop(first_key.min() // tile, (end_key.max() + tile - 1) // tile, one_tile, state)
    values = state.values / jnp.where(state.total == 0.0, 1.0, state.total)[..., None]
    values = values.reshape(width, num_kv_heads, num_queries, group, head_dim).transpose(0, 2, 1, 3, 4)
    return values.reshape(q.shape).astype(q.dtype)


def _first_seen(position: jax.Array, window: int | None, chunk: int | None) -> jax.Array:
    """The first position that a token at each position sees."""
    if window is not None:
        return jnp.maximum(position - (window - 1), 0)
    return jnp.zeros_like(position) if chunk is None else position // chunk * chunk


def _accumulate(state: _Softmax, scores: jax.Array, v: jax.Array) -> _Softmax:
    """Takes one tile into the running softmax: scores [W, K, M * G, tile] (-inf is not visible), v [W, K, tile, H]."""
    peak = jnp.maximum(state.peak, scores.max(axis=-1))
    shift = jnp.where(jnp.isneginf(peak), 0.0, peak)  # nothing visible yet: exp(-inf - 0) is 0, exp(-inf + inf) NaN
    weights = jnp.exp(scores - shift[..., None])
    decay = jnp.exp(state.peak - shift)
    values = state.values * decay[..., None] + jnp.einsum("wkms,wksh->wkmh", weights, v, precision=PRECISION)
    return _Softmax(peak, state.total * decay + weights.sum(axis=-1), values)
