"""Inside the Mosaic GPU kernels, what all warpgroups share: what a query sees, the walk over tiles, the operands of wgmma, masks.

Does not know how tiles get into shared memory. Next: `mosaic_gpu_fetch`, which brings them there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_plan import TilePlan

NO_SCORE = -1e30
"""The peak before any key: finite, so that a difference of two of them is 0 and not NaN."""
LOG2_E = 1.4426950408889634

Ref = Any
"""A reference into device or shared memory, or to barriers; Pallas gives these no public type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a token sees and how products become logits; see `api.paged_attention`."""

    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None

    def first_visible(self, position: jax.Array) -> jax.Array:
        """The first position that a token at each position sees."""
        if self.window is not None:
            return jnp.maximum(position - (self.window - 1), 0)
        if self.chunk is not None:
            return jnp.maximum(position, 0) // self.chunk * self.chunk
        return jnp.zeros_like(position)

    def logits(self, products: jax.Array) -> jax.Array:
        """Base-2 logits of dot products: the card has a fast exp2, no exp."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2_E)
        # tanh(x) = 1 - 2 / (exp(2x) + 1). The card's own tanh is off by 2^-11, which the cap multiplies.
        power = jnp.exp2(products * (2.0 * LOG2_E * self.scale / self.soft_cap))
        return (self.soft_cap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))


@dataclass(frozen=True, slots=True)
class Walk:
    """The tiles that a block visits, in positions of its row.

    Attributes:
        first, end: Some query of the block sees keys in `[first, end)`, and none sees another.
        origin: Where the block's first tile starts; a multiple of the box.
        count: Tiles.
    """

    first: jax.Array
    end: jax.Array
    origin: jax.Array
    count: jax.Array


def walk(first: jax.Array, end: jax.Array, plan: TilePlan, *, share: jax.Array | int = 0, num_shares: int = 1) -> Walk:
    """The tiles of one of equal shares of `[first, end)`; shares that are left over have none, and an empty walk has none."""
    origin = first // plan.box * plan.box
    in_all = jnp.where(end > first, (end - origin + plan.kv_tile - 1) // plan.kv_tile, 0)
    at_most = (in_all + num_shares - 1) // num_shares
    count = jnp.clip(in_all - share * at_most, 0, at_most)
    return Walk(first, end, origin + share * at_most * plan.kv_tile, count)


def operand(plan: TilePlan, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that wgmma reads. Both of its operands must have the same swizzle."""
    return swizzled(shape, dtype, plan.swizzle)


def swizzled(shape: tuple[int, ...], dtype: Any, num_bytes: int) -> Any:
    """Shared memory in blocks of 8 rows by a swizzle of `num_bytes`."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, num_bytes // jnp.dtype(dtype).itemsize)), swizzle(num_bytes)))


PRODUCTS = {1: ((0, 0),), 3: ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))}
"""By the parts of an operand, which parts of two are multiplied, small ones first. What 3 leave out is below 2^-24 of the product."""


def in_parts(x: jax.Array, num_parts: int, dtype: Any) -> tuple[jax.Array, ...]:
    """Numbers of `dtype`, the largest first, that add up to x: one rounded number, or three bfloat16 that hold a float32."""
    parts = []
    for n in range(num_parts):
        parts.append(x.astype(dtype))
        if n + 1 < num_parts:
            x = x - parts[n].astype(x.dtype)
    return tuple(parts)


def is_cut(start: jax.Array, kv_tile: int, steps: Walk) -> jax.Array:
    """Whether a tile holds places outside the walk: the first and the last of a walk may."""
    return (start < steps.first) | (start + kv_tile > steps.end)


def mask_values(values: Ref, start: jax.Array, steps: Walk) -> None:
    """Puts 0 over the values of a tile that lie outside the walk: their weights are 0, but 0 x NaN is NaN.

    For tiles that are cut. Call `commit_smem` before the multiplication.
    """
    kv_tile, width = values.shape
    step = 64 if width % 64 == 0 else width  # few registers at once: the kernel's sums stay in theirs
    position = start + plgpu.broadcasted_iota(jnp.int32, (kv_tile, step), 0, layout=plgpu.Layout.WGMMA)
    is_inside = (position >= steps.first) & (position < steps.end)
    for at in range(0, width, step):
        columns = values.at[:, pl.ds(at, step)]
        loaded = plgpu.load(columns, layout=plgpu.Layout.WGMMA)
        columns[...] = jnp.where(is_inside, loaded, jnp.zeros_like(loaded))
