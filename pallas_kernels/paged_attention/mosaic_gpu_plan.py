"""The sizes of the Mosaic GPU kernels: tiles, pipeline stages, splits, shared memory; and what they cannot serve.

Plain arithmetic on shapes, so that `dispatch` can ask without loading a GPU compiler. Next: `mosaic_gpu_tile` uses the sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARED_MEMORY_BYTES = 232_448 - 2_048 - 512
"""Of a block on capability 9.0, less what Mosaic takes for reductions across warps and for barriers."""
HALF_A_CORE_BYTES = 110 * 1024
"""A block this small shares its core with a second one, which computes while the first waits at its start or end."""
NUM_CORES = 132
MAX_SPLITS = 16
MIN_TILES_IN_SPLIT = 4
"""A split shorter than that costs more in its start, its end and the reduce than it brings."""
WARPGROUP_ROWS = 64
"""wgmma's M is a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """The shape of a kernel's tiles.

    Attributes:
        kv_tile: Keys (and values) that a step of the loop takes; a multiple of 64, whatever the page size.
        box: Rows of one copy: the largest count that divides both a page and a tile.
        num_stages: Tiles of keys and values in flight or in use.
        head_dim: As stored.
        padded_head_dim: Of the values in shared memory; decode has the head dimension on wgmma's M, a multiple of 64.
        swizzle: Bytes of the swizzle of all wgmma operands: the largest that divides a row of the head.
    """

    kv_tile: int
    box: int
    num_stages: int
    head_dim: int
    padded_head_dim: int
    swizzle: int

    @property
    def boxes_in_tile(self) -> int:
        """Copies that fetch the keys of a tile."""
        return self.kv_tile // self.box


def swizzle_of(head_dim: int) -> int:
    """The swizzle for rows of `head_dim` 16-bit numbers, a multiple of 16: two wgmma operands must share one of 32 bytes or more."""
    return next(size for size in (128, 64, 32) if head_dim * 2 % size == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan(TilePlan):
    """Attributes: num_queries: the query heads of a kv head, padded to wgmma's N, a multiple of 8."""

    num_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan(TilePlan):
    """The shape of a kernel's tiles, with those of the queries.

    Attributes:
        group: Rows of a token: the query heads of a kv head, padded to a power of two, so that 64 rows are whole tokens.
        chunk: Columns of the output (and of one product with the values) that are in shared memory at once.
    """

    group: int
    chunk: int

    @property
    def tokens_in_warpgroup(self) -> int:
        """Whole tokens in a warpgroup's rows."""
        return WARPGROUP_ROWS // self.group


def plan_decode(*, head_dim: int, group: int, page_size: int, max_keys: int) -> DecodePlan | None:
    """Tiles for one token a row, the `group` query heads of a kv head on wgmma's N; None where shared memory is too small.

    Args:
        max_keys: What a page table row can name.
    """
    padded_head_dim, num_queries = -(-head_dim // WARPGROUP_ROWS) * WARPGROUP_ROWS, -(-group // 8) * 8
    for kv_tile in (128, 64) if head_dim <= 64 and max_keys > 64 else (64,):
        fixed = num_queries * (2 * head_dim + 2 * kv_tile + 4 * padded_head_dim + 8)
        stage = 2 * kv_tile * (head_dim + padded_head_dim)
        if fixed + 2 * stage <= SHARED_MEMORY_BYTES:
            return DecodePlan(
                kv_tile=kv_tile, box=math.gcd(page_size, kv_tile), num_stages=max(2, min(4, (HALF_A_CORE_BYTES - fixed) // stage)),
                head_dim=head_dim, padded_head_dim=padded_head_dim, swizzle=swizzle_of(head_dim), num_queries=num_queries,
            )  # fmt: skip
    return None


def plan_prefill(*, head_dim: int, group: int, page_size: int, max_keys: int, out_bytes: int) -> PrefillPlan | None:
    """Tiles for chunks of rows, the `group` query heads of a kv head beside their tokens on wgmma's M; None where it has no room.

    Args:
        max_keys: What a page table row can name.
        out_bytes: Of one number of the output.
    """
    chunk = head_dim if head_dim <= 128 or head_dim % 64 else 64
    # A copy to device memory starts at a multiple of 128 bytes.
    padded_group = next((g for g in (1, 2, 4, 8, 16, 32, 64) if g >= group and g * chunk * out_bytes % 128 == 0), None)
    if padded_group is None:
        return None
    fixed = 2 * WARPGROUP_ROWS * (2 * head_dim + out_bytes * chunk + 4)
    for kv_tile in (128, 64) if head_dim <= 128 and max_keys > 64 else (64,):
        if (num_stages := min(4, (SHARED_MEMORY_BYTES - fixed) // (4 * kv_tile * head_dim))) >= 2:
            return PrefillPlan(
                kv_tile=kv_tile, box=math.gcd(page_size, kv_tile), num_stages=num_stages, head_dim=head_dim,
                padded_head_dim=head_dim, swizzle=swizzle_of(head_dim), group=padded_group, chunk=chunk,
            )  # fmt: skip
    return None


def num_splits(*, num_rows: int, num_kv_heads: int, max_keys: int, kv_tile: int) -> int:
    """In how many parts a row's keys are walked: enough blocks for four on each core, no more than the longest row can use."""
    wanted = -(-4 * NUM_CORES // (num_rows * num_kv_heads))
    longest = -(-max_keys // kv_tile) // MIN_TILES_IN_SPLIT
    return max(1, min(wanted, longest, MAX_SPLITS))
