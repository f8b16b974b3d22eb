"""min_p, top_k and top_p as one bound for each row, and the draw from what the bound keeps.

A row is seen as `below_best`: how far each scaled logit lies below the row's largest, so 0 is the best token and the weight
of a token is exp(-below_best). Each filter keeps the tokens within some distance, so all of them together are one number.
Nothing sorts or accumulates a whole row: the bound is read off the few largest values, or found by bisection when the kept
set is larger; the draw finds a tile by the tiles' sums, then a token in it.

Knows no slots and no penalties. Next: `jaxserve.runner.sampling`, its only caller.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

NUM_LARGEST = 64
"""Kept sets up to this size need no bisection; most top_k values and most nuclei are smaller."""
LARGEST_TILE = 32

_Bracket = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Bit patterns of two distances, one too near and one far enough, and the weights within them; [R] each."""


class Filters(NamedTuple):
    """The filters of each row; top_k 0, top_p 1 and min_p 0 are off."""

    top_k: Int32[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]


def largest(values: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R k"], Int32[Array, "R k"]]:
    """The k largest values of each row and their indices, descending; the lower index first where equal. `lax.top_k`, but faster.

    The k largest values lie in the k tiles with the largest maxima, so only those are searched: half the time of `lax.top_k`
    on CPU, and no sort of a whole row on GPU.
    """
    num_rows, vocab = values.shape
    if k * LARGEST_TILE >= vocab:
        found, index = lax.top_k(values, k)
        return found, index
    tiles = _tiles(values, LARGEST_TILE, -jnp.inf)
    _, tile_ids = lax.top_k(jnp.max(tiles, axis=-1), k)
    tile_ids = jnp.sort(tile_ids, axis=-1)  # candidates in index order, so that equal values keep it
    candidates = _at(tiles, tile_ids[:, :, None]).reshape(num_rows, -1)
    found, place = lax.top_k(candidates, k)
    return found, _at(tile_ids, place // LARGEST_TILE) * LARGEST_TILE + place % LARGEST_TILE


def keep_within(below_best: Float[Array, "R V"], filters: Filters, has_filter: Bool[Array, "R"]) -> Float[Array, "R"]:
    """The distance within which a token is kept by min_p, then top_k, then top_p over what those kept; inf keeps all.

    Tokens equal to the last one kept are kept too. Rows where `has_filter` is False get inf.
    """
    vocab = below_best.shape[1]
    nearest = -largest(-below_best, min(NUM_LARGEST, vocab))[0]
    bound = jnp.where(filters.min_p > 0, -jnp.log(filters.min_p), jnp.inf)
    has_top_k = has_filter & (filters.top_k > 0) & (filters.top_k < vocab)
    k = jnp.where(has_top_k, filters.top_k, 1)
    by_count = _smallest_distance(below_best, None, k.astype(jnp.float32), nearest, jnp.full_like(bound, jnp.inf), has_top_k)
    bound = jnp.where(has_top_k, jnp.minimum(bound, by_count), bound)
    has_top_p = has_filter & (filters.top_p < 1)

    def nucleus() -> jax.Array:
        weight = jnp.where(below_best <= bound[:, None], jnp.exp(-below_best), 0.0)
        mass = filters.top_p * jnp.sum(weight, axis=-1)
        return _smallest_distance(below_best, weight, mass, nearest, bound, has_top_p)

    by_mass = lax.cond(jnp.any(has_top_p), nucleus, lambda: bound)
    return jnp.where(has_filter, jnp.where(has_top_p, by_mass, bound), jnp.inf)


def draw(below_best: Float[Array, "R V"], bound: Float[Array, "R"], u: Float[Array, "R"]) -> Int32[Array, "R"]:
    """A token within the bound with probability proportional to exp(-below_best): the inverse of the cumulative sum at u.

    Two levels of about sqrt(V) entries instead of one of V. Never a token of weight 0, whatever the sums round to.
    """
    tile_size = 1 << max(1, (below_best.shape[1] - 1).bit_length() // 2)
    tiles = _tiles(below_best, tile_size, jnp.inf)
    sums = jnp.sum(_weight(tiles, bound[:, None, None]), axis=-1)
    tile, rest = _pick(sums, u * jnp.sum(sums, axis=-1))
    chosen = _at(tiles, tile[:, None, None])[:, 0]
    index, _ = _pick(_weight(chosen, bound[:, None]), rest)
    return tile * tile_size + index


def uniform(seed: UInt32[Array, "R 2"], position: Int32[Array, "R"]) -> Float[Array, "R"]:
    """A number in [0, 1) for each (seed, position): one threefry block, of which 24 bits are used."""
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    bits = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, position))[:, 0]
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _smallest_distance(
    below_best: jax.Array, weight: jax.Array | None, target: jax.Array, nearest: jax.Array, limit: jax.Array, is_wanted: jax.Array
) -> jax.Array:
    """The smallest distance within which the tokens' weights (None counts them) sum to `target`; at most `limit`.

    Read off `nearest`, the ascending smallest distances, where it lies among them. For the other wanted rows: bisection on the
    bit pattern, which orders non-negative floats as integers, so that 31 halvings find the exact value. It ends early when
    at most one token is left between the ends, which then keep the same tokens.
    """
    near_weight = jnp.ones_like(nearest) if weight is None else _weight(nearest, limit[:, None])
    is_reached = jnp.cumsum(near_weight, axis=-1) >= target[:, None]
    is_near = jnp.any(is_reached, axis=-1)
    near = _at(nearest, jnp.argmax(is_reached, axis=-1)[:, None])[:, 0]

    high = _bits(jnp.minimum(jnp.max(below_best, axis=-1), limit))
    low = jnp.where(is_wanted & ~is_near, _bits(nearest[:, -1]) - 1, high - 1)  # never reaches the target

    def is_open(state: _Bracket) -> jax.Array:
        low, high, sum_low, sum_high = state
        lightest = 1.0 if weight is None else jnp.exp(-_float(high))
        return jnp.any((high - low > 1) & (sum_high - sum_low >= 1.5 * lightest))

    def halve(state: _Bracket) -> _Bracket:
        low, high, sum_low, sum_high = state
        middle = low + (high - low) // 2
        is_kept = below_best <= _float(middle)[:, None]
        total = jnp.sum(jnp.where(is_kept, 1.0 if weight is None else weight, 0.0), axis=-1)
        is_enough = total >= target
        return (
            jnp.where(is_enough, low, middle),
            jnp.where(is_enough, middle, high),
            jnp.where(is_enough, sum_low, total),
            jnp.where(is_enough, total, sum_high),
        )

    unknown = jnp.full_like(target, jnp.inf)
    far = lax.while_loop(is_open, halve, (low, high, jnp.zeros_like(target), unknown))[1]
    return jnp.where(is_near, near, _float(far))


def _pick(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the first positive weight whose cumulative sum exceeds the target, and how far the target reaches into it."""
    sums = jnp.cumsum(weights, axis=-1)
    is_positive = weights > 0
    is_hit = is_positive & (sums > target[:, None])
    last = weights.shape[1] - 1 - jnp.argmax(is_positive[:, ::-1], axis=-1)
    index = jnp.where(jnp.any(is_hit, axis=-1), jnp.argmax(is_hit, axis=-1), last).astype(jnp.int32)
    before = _at(sums, jnp.maximum(index - 1, 0)[:, None])[:, 0]
    return index, target - jnp.where(index > 0, before, 0.0)


def _weight(below_best: jax.Array, bound: jax.Array) -> jax.Array:
    return jnp.where(below_best <= bound, jnp.exp(-below_best), 0.0)


def _tiles(values: jax.Array, tile_size: int, padding: float) -> jax.Array:
    """[R, V] as [R, tiles, tile_size], padded where V is not a multiple."""
    num_rows, vocab = values.shape
    padded = jnp.pad(values, ((0, 0), (0, -vocab % tile_size)), constant_values=padding)
    return padded.reshape(num_rows, -1, tile_size)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """Entries along axis 1; the indices are in bounds by construction, so no code checks them."""
    return jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds")


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
