"""How large the tiles of the Triton kernels are, and into how many parts the keys of a row are split.

All sizes fit the smallest shared memory of the cards served, 99 KiB for a block (capability 8.6, 8.9, 12.0), so that one choice serves
every card. Knows no arrays. Next: `triton`, which launches with these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.triton_launch import next_power

MIN_DIM = 16
"""A side of a tile that tensor cores multiply, at least."""
TILE_BYTES = 36 * 1024
"""Of a tile of queries, or of keys and values together: 128 x 128 or 32 x 576 elements of 16 bits."""
PROGRAMS_WANTED = 256
"""Programs that keep a large card busy: about two for each of the 132 cores of an H200, all running at once. With two tiles of some 36 KB
on their way to each, more bytes are in flight than memory needs to be busy; further parts only cost sums that are written and read."""
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of one launch.

    Attributes:
        block_m: Query rows of a program: tokens times `heads`.
        heads: Query heads of a kv head that share a program.
        tile: Positions in a step of the walk over keys.
        num_splits: Parts that a row's keys may be split into.
        min_tiles: Tiles of a part, at least.
        num_warps, num_stages: See `triton_launch`.
    """

    block_m: int
    heads: int
    tile: int
    num_splits: int = 1
    min_tiles: int = 1
    num_warps: int
    num_stages: int

    @property
    def tokens(self) -> int:
        """Tokens of a program."""
        return self.block_m // self.heads


def head_pieces(head_dim: int) -> tuple[int, int]:
    """D1, D2: two powers of two that cover a head dimension with little or no padding; D2 may be 0."""
    first = max(MIN_DIM, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - first
    return (first, 0) if rest <= 0 else (first, max(MIN_DIM, next_power(rest)))


def single_token_sizes(
    *, num_rows: int, num_kv_heads: int, group: int, num_parts: int, head_dim: int, page_bytes: int, dot_bytes: int, max_keys: int
) -> Sizes:
    """For rows with one token each: memory-bound, so enough programs and bytes in flight are what matters.

    Args:
        num_rows: B.
        num_kv_heads, group, num_parts, head_dim: See `api.paged_attention`.
        page_bytes: Of an element of the pages.
        dot_bytes: Of an element as it is multiplied: 4, or 2.
        max_keys: Width of the page table in positions.
    """
    dims = sum(head_pieces(head_dim))
    block_m = min(32 if dims > 256 else 64, max(MIN_DIM, next_power(group)))
    tile = _power_within(TILE_BYTES // num_parts // (dims * dot_bytes), 16, 128)
    # What a split writes, and its reader reads, is to stay below a tenth of the keys and values that it walks.
    fair_keys = group * 8 * 10 // (num_parts * page_bytes)
    min_tiles = -(-max(128, fair_keys) // tile)
    programs = num_rows * num_kv_heads * -(-group // min(group, block_m))
    num_splits = min(MAX_SPLITS, next_power(-(-PROGRAMS_WANTED // programs)), -(-max_keys // (min_tiles * tile)))
    return Sizes(
        block_m=block_m, heads=min(group, block_m), tile=tile, num_splits=num_splits, min_tiles=min_tiles,
        num_warps=8 if block_m * dims > 16 * 576 else 4,
        num_stages=3 if dims <= 256 else 2,
    )  # fmt: skip


def many_token_sizes(*, group: int, num_parts: int, head_dim: int, page_bytes: int, dot_bytes: int) -> Sizes:
    """For tiles of tokens: bound by arithmetic, so the tile of queries is as large as its sums fit into registers. Args as above."""
    dims = sum(head_pieces(head_dim))
    # Numbers that are converted, or multiplied in three steps, take registers of their own.
    is_plain = page_bytes == dot_bytes == 2
    block_m = _power_within(TILE_BYTES // (1 if is_plain else 2) // (dims * dot_bytes), 16, 128)
    tile = _power_within(TILE_BYTES // num_parts // (dims * dot_bytes), 16, 64)
    return Sizes(
        block_m=block_m, heads=min(group, block_m), tile=tile,
        num_warps=8 if block_m * dims > 64 * 128 else 4,
        num_stages=2,
    )  # fmt: skip


def _power_within(n: int, low: int, high: int) -> int:
    """The largest power of two that is at most n, within [low, high]."""
    return min(high, max(low, 1 << (max(n, 1).bit_length() - 1)))
