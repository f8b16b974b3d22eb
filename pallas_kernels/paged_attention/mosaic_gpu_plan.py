"""The sizes of the Mosaic GPU kernels: tiles, pipeline stages, splits, shared memory; and what they cannot serve.

Plain arithmetic on shapes, so that `dispatch` can ask without loading a GPU compiler. Next: `mosaic_gpu_tile` uses the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARED_MEMORY_BYTES = 232_448 - 512
"""Of a block on capability 9.0, less its barriers."""
HALF_A_CORE_BYTES = 233_472 // 2 - 1_024 - 512
"""A block this small shares its core with a second one, which computes while the first waits at its start or end."""
REDUCTION_BYTES = {"decode": 2_048, "prefill": 1_024}
"""For reductions across warps, of which prefill has none."""
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
        num_stored: Tiles in flight as they are stored, where wgmma cannot read that; 0 where it can, and TMA fills the stages.
        num_parts: 16-bit numbers that add up to one operand: 3 for float32.
        head_dim: As stored.
        padded_head_dim: Of the values in shared memory; decode has the head dimension on wgmma's M, a multiple of 64.
        swizzle: Bytes of the swizzle of all wgmma operands: the largest that divides a row of the head.
    """

    kv_tile: int
    box: int
    num_stages: int
    num_stored: int
    num_parts: int
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
        num_compute: Warpgroups that multiply, each 64 rows.
    """

    group: int
    chunk: int
    num_compute: int

    @property
    def tokens_in_warpgroup(self) -> int:
        """Whole tokens in a warpgroup's rows."""
        return WARPGROUP_ROWS // self.group


def num_parts(page_bytes: int) -> int:
    """16-bit numbers that hold a stored one of `page_bytes` bytes: float32 has 24 bits of precision, bfloat16 has 8."""
    return 3 if page_bytes == 4 else 1


def plan_decode(*, head_dim: int, group: int, page_size: int, page_bytes: int, max_keys: int) -> DecodePlan | None:
    """Tiles for one token a row, the `group` query heads of a kv head on wgmma's N; None where shared memory is too small.

    Args:
        page_bytes: Of one number of the pages.
        max_keys: What a page table row can name.
    """
    padded_head_dim, num_queries = -(-head_dim // WARPGROUP_ROWS) * WARPGROUP_ROWS, -(-group // 8) * 8
    parts, limits = num_parts(page_bytes), (HALF_A_CORE_BYTES, SHARED_MEMORY_BYTES)
    for kv_tile in (128, 64) if head_dim <= 64 and page_bytes < 4 and max_keys > 64 else (64,):
        box = math.gcd(page_size, kv_tile)
        fixed = REDUCTION_BYTES["decode"] + _in_memory(
            *(2 * parts * num_queries * columns for columns in (head_dim, kv_tile)),
            4 * num_queries * padded_head_dim,
            *[4 * num_queries] * 2,
        )
        ring = _ring(fixed, kv_tile=kv_tile, box=box, width=head_dim, padded_width=padded_head_dim, page_bytes=page_bytes, limits=limits)
        if ring is not None:
            num_stages, num_stored = ring
            return DecodePlan(
                kv_tile=kv_tile, box=box, num_stages=num_stages, num_stored=num_stored, num_parts=parts, head_dim=head_dim,
                padded_head_dim=padded_head_dim, swizzle=swizzle_of(head_dim), num_queries=num_queries,
            )  # fmt: skip
    return None


def plan_prefill(*, head_dim: int, group: int, page_size: int, page_bytes: int, max_keys: int, out_bytes: int) -> PrefillPlan | None:
    """Tiles for chunks of rows, the `group` query heads of a kv head beside their tokens on wgmma's M; None where it has no room.

    Args:
        page_bytes: Of one number of the pages.
        max_keys: What a page table row can name.
        out_bytes: Of one number of the output.
    """
    parts = num_parts(page_bytes)
    chunk = head_dim if head_dim * parts <= 128 or head_dim % 64 else 64
    # A copy to device memory starts at a multiple of 128 bytes.
    padded_group = next((g for g in (1, 2, 4, 8, 16, 32, 64) if g >= group and g * chunk * out_bytes % 128 == 0), None)
    if padded_group is None:
        return None
    num_compute = 1 if parts > 1 else 2
    rows = num_compute * WARPGROUP_ROWS
    fixed = REDUCTION_BYTES["prefill"] + _in_memory(2 * parts * rows * head_dim, out_bytes * rows * chunk, 4 * rows)
    # One stage of 128 keys would leave those who multiply waiting for the next to be widened.
    is_wide = head_dim <= {1: 64, 2: 128, 4: 0}[page_bytes] and max_keys > 64
    for kv_tile in (128, 64) if is_wide else (64,):
        box = math.gcd(page_size, kv_tile)
        ring = _ring(fixed, kv_tile=kv_tile, box=box, width=head_dim, padded_width=head_dim, page_bytes=page_bytes)
        if ring is not None:
            num_stages, num_stored = ring
            return PrefillPlan(
                kv_tile=kv_tile, box=box, num_stages=num_stages, num_stored=num_stored, num_parts=parts, head_dim=head_dim,
                padded_head_dim=head_dim, swizzle=swizzle_of(head_dim), group=padded_group, chunk=chunk, num_compute=num_compute,
            )  # fmt: skip
    return None


def _ring(
    fixed: int, *, kv_tile: int, box: int, width: int, padded_width: int, page_bytes: int, limits: Sequence[int] = (SHARED_MEMORY_BYTES,)
) -> tuple[int, int] | None:
    """Stages of operands and stored tiles, beside `fixed` bytes: the most that the first of `limits` holds that holds any."""
    row, scales = 2 * num_parts(page_bytes), 4 * 2 if page_bytes == 1 else 0
    choices = {1: ((2, 4), (2, 3), (2, 2), (1, 2), (1, 1)), 2: ((4, 0), (3, 0), (2, 0)), 4: ((1, 2), (1, 1))}[page_bytes]

    def taken(num_stages: int, num_stored: int) -> int:
        stages = (num_stages * kv_tile * size for size in (row * width, row * padded_width, scales))
        stored = (num_stored * kv_tile * page_bytes * width,) * 2
        return fixed + _in_memory(*stages, *stored, num_stored * scales * kv_tile // box * scales_of_box(box))

    # With one stored tile nothing is on its way while it is widened: rather a core of one's own.
    fits = (c for limit in limits for c in choices if taken(*c) <= limit and (c[1] != 1 or limit == limits[-1]))
    return next(fits, None)


def _in_memory(*sizes: int) -> int:
    """Bytes of arrays of shared memory: Mosaic starts each at a multiple of 1,024."""
    return sum(-(-size // 1_024) * 1_024 for size in sizes)


def scales_of_box(box: int) -> int:
    """Places for the scales of a box as TMA writes them: at multiples of 128 bytes."""
    return -(-box // 32) * 32


def num_splits(*, num_rows: int, num_kv_heads: int, max_keys: int, kv_tile: int) -> int:
    """In how many parts a row's keys are walked: enough blocks for four on each core, no more than the longest row can use."""
    wanted = -(-4 * NUM_CORES // (num_rows * num_kv_heads))
    longest = -(-max_keys // kv_tile) // MIN_TILES_IN_SPLIT
    return max(1, min(wanted, longest, MAX_SPLITS))
