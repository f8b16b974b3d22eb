"""Attention over pages in Triton, through jax-triton: for NVIDIA GPUs of capability 8.0 and newer, decode and ragged prefill.

Rows with one token and all other rows are separate launches: the first wait for memory, take a small tile of queries, and split the keys of
long rows into parts that a third kernel adds up; the others are bound by arithmetic and take large tiles of queries. A step of decode rows
is the first launch alone. Grids are static: programs with nothing to do return at once, so a program compiled for a bucket serves every
step in it.

Latent attention (MLA: pages of one part, keys are the values too) takes this route as well, in the absorbed form for decode and prefill.
In Triton a tile of keys that was loaded once serves both products; wgmma would want the 576 dimensions of a key in two layouts, and has
little to gain where the few heads of a decode row wait for memory.

The rules are `reference`'s, the kernels `triton_kernels`, the sizes `triton_sizes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.paged_attention import triton_sizes
from pallas_kernels.paged_attention.triton_sizes import Sizes
from pallas_kernels.triton_launch import launch, next_power

if TYPE_CHECKING:
    from pallas_kernels.dispatch import Needs

MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 576
"""Queries and sums of one row of a tile stay in registers."""
_TILES = {"tile": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4)}
TUNABLES = {
    "single": {**_TILES, "num_splits": (1, 2, 4, 8, 16, 32), "min_tiles": (1, 2, 4, 8)},
    "many": {**_TILES, "block_m": (16, 32, 64, 128)},
}
"""What `tuning` may try of `Sizes`, by launch; what does not fit a card does not compile there, and is passed over."""


def lacks(needs: Needs, capability: tuple[int, int] | None) -> str | None:
    """What keeps these kernels from serving a layer on a card of this capability, or None. Several things are separated by "; "."""
    missing = []
    if capability is not None and capability < MIN_CAPABILITY:
        missing.append("capability {}.{} or newer, this is {}.{}".format(*MIN_CAPABILITY, *capability))
    if needs.head_dim > MAX_HEAD_DIM:
        missing.append(f"head_dim {needs.head_dim}, the limit is {MAX_HEAD_DIM}")
    return "; ".join(missing) or None


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
    """See `api.paged_attention`. `token_row` says what `row_start` says, so the kernels do not take it."""
    call = _Call(q, pages, page_tables, row_start, kv_length, position, scale, window, chunk, soft_cap, sinks, kv_scales)
    if is_decode:
        return call.single_tokens("decode", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call.single_tokens("single", call.many_tokens())


class _Call:
    """One call's arrays, and the constants that its launches share."""

    def __init__(
        self,
        q: jax.Array,
        pages: jax.Array,
        page_tables: jax.Array,
        row_start: jax.Array,
        kv_length: jax.Array,
        position: jax.Array,
        scale: float,
        window: int | None,
        chunk: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
        kv_scales: jax.Array | None,
    ) -> None:
        self.q, self.row_start = q, row_start
        self.num_rows, self.max_pages = page_tables.shape
        _, self.num_parts, self.num_kv_heads, self.page_size, self.head_dim = pages.shape
        self.group = q.shape[1] // self.num_kv_heads
        self.page_bytes = pages.dtype.itemsize
        # Operands of one product have one dtype. 8-bit pages become the queries' dtype, which holds them exactly.
        is_float32 = q.dtype == jnp.float32 or (q.dtype != pages.dtype and kv_scales is None)
        self.dot_bytes = 4 if is_float32 else 2
        d1, d2 = triton_sizes.head_pieces(self.head_dim)
        # What a launch has no use for is some small array: kernels have a fixed list of parameters.
        self.reads = {
            "q": q, "pages": pages, "page_tables": page_tables, "row_start": row_start, "kv_length": kv_length, "position": position,
            "kv_scales": position if kv_scales is None else kv_scales, "sinks": position if sinks is None else sinks,
        }  # fmt: skip
        self.limits = {"WINDOW": window or 0, "CHUNK": chunk or 0}
        self.constants: dict[str, Any] = {
            **self.limits, "SCALE": float(scale), "SOFT_CAP": float(soft_cap or 0.0), "HAS_SINKS": sinks is not None,
            "N": q.shape[1], "K": self.num_kv_heads, "PARTS": self.num_parts, "PAGE_SIZE": self.page_size, "P": self.max_pages,
            "H": self.head_dim, "D1": d1, "D2": d2,
            "IS_FP8": pages.dtype == jnp.uint8, "HAS_SCALES": kv_scales is not None, "IS_FLOAT32": is_float32,
        }  # fmt: skip

    def single_tokens(self, rows: str, out: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
        """Writes the tokens of rows that have one; `rows` as in `triton_kernels.attend`."""
        sizes = triton_sizes.single_token_sizes(
            num_rows=self.num_rows, num_kv_heads=self.num_kv_heads, group=self.group, num_parts=self.num_parts, head_dim=self.head_dim,
            page_bytes=self.page_bytes, dot_bytes=self.dot_bytes, max_keys=self.max_pages * self.page_size,
        )  # fmt: skip
        sizes = self._tuned("single", {"rows": self.num_rows, "keys": self.max_pages * self.page_size}, sizes)
        unused = self.reads["position"]
        if sizes.num_splits == 1:
            return self._attend(rows, sizes, self.num_rows, {"tiles": unused, "stats": unused}, {"out": out})[0]
        parts = (self.num_rows, self.q.shape[1], sizes.num_splits)
        values, stats = self._attend(
            rows, sizes, self.num_rows, {"tiles": unused},
            {"out": jax.ShapeDtypeStruct((*parts, self.head_dim), jnp.float32), "stats": jax.ShapeDtypeStruct((*parts, 2), jnp.float32)},
        )  # fmt: skip
        return self._add_splits(rows, sizes, values, stats, out)

    def many_tokens(self) -> jax.Array:
        """The output of all tokens but those that are alone in their row, which is undefined; padding tokens give 0."""
        sizes = triton_sizes.many_token_sizes(
            group=self.group, num_parts=self.num_parts, head_dim=self.head_dim, page_bytes=self.page_bytes, dot_bytes=self.dot_bytes
        )
        sizes = self._tuned("many", {}, sizes)
        tiles = token_tiles(self.row_start, self.q.shape[0], sizes.tokens)
        unused = {"stats": self.reads["position"]}
        out = jax.ShapeDtypeStruct(self.q.shape, self.q.dtype)
        return self._attend("tiles", sizes, tiles.shape[0], {"tiles": tiles, **unused}, {"out": out})[0]

    def _tuned(self, kind: str, rounded: dict[str, int], sizes: Sizes) -> Sizes:
        """The sizes of a launch, as measured where they were."""
        shape_class = tuning.shape_class(
            kind, rounded=rounded, group=self.group, kv_heads=self.num_kv_heads, parts=self.num_parts, head_dim=self.head_dim,
            page_bytes=self.page_bytes, dot_bytes=self.dot_bytes,
        )  # fmt: skip
        return tuning.tuned("paged_attention", "triton", shape_class, sizes)

    def _attend(
        self,
        rows: str,
        sizes: Sizes,
        count: int,
        reads: dict[str, jax.Array],
        writes: dict[str, Any],
    ) -> tuple[jax.Array, ...]:
        from pallas_kernels.paged_attention.triton_kernels import attend

        return launch(
            attend,
            grid=(count, self.num_kv_heads * -(-self.group // sizes.heads), sizes.num_splits),
            reads=self.reads | reads,
            writes=writes,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
            constants=self.constants
            | {"BLOCK_M": sizes.block_m, "HEADS": sizes.heads, "TILE": sizes.tile, "ROWS": rows}
            | {"IS_SPLIT": sizes.num_splits > 1, "MIN_TILES": sizes.min_tiles},
        )

    def _add_splits(self, rows: str, sizes: Sizes, values: jax.Array, stats: jax.Array, out: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
        from pallas_kernels.paged_attention.triton_kernels import add_splits

        return launch(
            add_splits,
            grid=(self.num_rows, self.q.shape[1]),
            reads={"values": values, "stats": stats, "row_start": self.reads["row_start"], "kv_length": self.reads["kv_length"]},
            writes={"out": out},
            num_warps=4,
            num_stages=1,
            constants=self.limits
            | {"N": self.q.shape[1], "H": self.head_dim, "DIMS": next_power(self.head_dim), "TILE": sizes.tile, "ROWS": rows}
            | {"SPLITS": sizes.num_splits, "MIN_TILES": sizes.min_tiles, "SPLITS_PADDED": next_power(sizes.num_splits)},
        )[0]


def token_tiles(row_start: jax.Array, num_tokens: int, tokens: int) -> jax.Array:
    """Cuts the tokens of rows that have several into tiles of at most `tokens`, each inside one row, and padding tokens too.

    Returns int32 `[tiles, 3]`: row (-1 is padding), first token, number of tokens (0 where there is nothing left to do). The number of
    tiles is what any step of this shape may need.
    """
    num_rows = row_start.shape[0] - 1
    starts = jnp.append(row_start, jnp.int32(num_tokens))  # padding is a last row
    count = jnp.diff(starts)
    is_single = (count == 1) & (jnp.arange(num_rows + 1) < num_rows)
    tiles_of_row = jnp.where(is_single, 0, -(-count // tokens))
    ends = jnp.cumsum(tiles_of_row)
    index = jnp.arange(num_tokens // tokens + min(num_rows, num_tokens // 2) + 1, dtype=jnp.int32)
    row = (ends[None, :] <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    is_tile = row <= num_rows
    row = jnp.minimum(row, num_rows)
    first = starts[row] + (index - ends[row] + tiles_of_row[row]) * tokens
    size = jnp.where(is_tile, jnp.minimum(tokens, starts[row + 1] - first), 0)
    return jnp.stack([jnp.where(row < num_rows, row, -1), first, size], axis=1).astype(jnp.int32)
