"""min_p, top_k and top_p as one bound for each row, and the draw from what the bound keeps.

A row is seen as `below_best`: how far each scaled logit lies below the row's largest, so 0 is the best token and the weight
of a token is exp(-below_best). Each filter keeps the tokens within some distance, so all of them together are one number.
Nothing sorts or accumulates a whole row: the bound is read off the few largest values, or found by bisection when the kept
set is larger; the draw is a race in which each kept token has a random time of its own.

Knows no slots and no penalties. Next: `jaxserve.runner.sampling`, which draws; `jaxserve.runner.logits`.
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
    if k == 0 or k * LARGEST_TILE >= vocab:
        found, index = lax.top_k(values, k)
        return found, index
    tiles = _tiles(values, LARGEST_TILE, -jnp.inf)
    _, tile_ids = lax.top_k(jnp.max(tiles, axis=-1), k)
    tile_ids = jnp.sort(tile_ids, axis=-1)  # candidates in index order, so that equal values keep it
    candidates = _at(tiles, tile_ids[:, :, None]).reshape(num_rows, -1)
    found, place = lax.top_k(candidates, k)
    return found, _at(tile_ids, place // LARGEST_TILE) * LARGEST_TILE + place % LARGEST_TILE


def first_true(is_hit: Bool[Array, "R N"]) -> Int32[Array, "R"]:
    """Index of the first True of each row, N where there is none.

    By a float32 maximum, exact for N below 2^24: XLA:CPU has a fast one, but neither for argmax nor for integers.
    """
    size = is_hit.shape[1]
    from_end = size - lax.broadcasted_iota(jnp.float32, is_hit.shape, 1)
    return size - jnp.max(jnp.where(is_hit, from_end, 0.0), axis=-1).astype(jnp.int32)


def first_largest(values: Float[Array, "R V"]) -> tuple[Float[Array, "R"], Int32[Array, "R"]]:
    """The largest value of each row and the first index that has it; +inf, and any index, where a value is NaN or +inf.

    Reads the values once: the first tile with a largest maximum is the only one that is looked at again.
    """
    tiles = _tiles(values, LARGEST_TILE, -jnp.inf)
    # A sum shows a NaN, which the fast maximum of XLA:CPU passes over. That of squares is one only then: there is no -inf to add to inf.
    # Without the barrier XLA takes the maximum of maxima from the values anew.
    maxima, sums = lax.optimization_barrier((jnp.max(tiles, axis=-1), jnp.sum(tiles * tiles, axis=-1)))
    maxima = jnp.where(jnp.isnan(sums), jnp.inf, maxima)
    best = jnp.max(maxima, axis=-1, keepdims=True)
    tile = first_true(maxima == best)
    near = _at(tiles, jnp.minimum(tile, maxima.shape[1] - 1)[:, None, None])[:, 0]
    return best[:, 0], tile * LARGEST_TILE + first_true(near == best)


def keep_within(below_best: Float[Array, "R V"], filters: Filters, has_filter: Bool[Array, "R"]) -> Float[Array, "R"]:
    """The distance within which a token is kept by min_p, then top_k, then top_p over what those kept; inf keeps all.

    Tokens equal to the last one kept are kept too. Rows where `has_filter` is False get inf.
    """
    vocab = below_best.shape[1]
    nearest = -largest(-below_best, min(NUM_LARGEST, vocab))[0]
    farthest = jnp.max(below_best, axis=-1)
    bound = jnp.where(filters.min_p > 0, -jnp.log(filters.min_p), jnp.inf)

    has_top_k = has_filter & (filters.top_k > 0) & (filters.top_k < vocab)
    last_near = _at(nearest, jnp.clip(filters.top_k - 1, 0, nearest.shape[1] - 1)[:, None])[:, 0]
    near = jnp.where(has_top_k & (filters.top_k > nearest.shape[1]), jnp.inf, last_near)
    by_count = _smallest_distance(below_best, None, filters.top_k.astype(jnp.float32), near, nearest[:, -1], farthest)
    bound = jnp.where(has_top_k, jnp.minimum(bound, by_count), bound)

    has_top_p = has_filter & (filters.top_p < 1)

    def nucleus() -> jax.Array:
        weight = _weight(below_best, bound[:, None])
        mass = filters.top_p * jnp.sum(weight, axis=-1)
        near_weight = _weight(nearest, bound[:, None])
        is_reached = (_sums_before(near_weight) + near_weight >= mass[:, None]) | ~has_top_p[:, None]
        near = -jnp.max(jnp.where(is_reached, -nearest, -jnp.inf), axis=-1)
        return _smallest_distance(below_best, weight, mass, near, nearest[:, -1], jnp.minimum(farthest, bound))

    by_mass = lax.cond(jnp.any(has_top_p), nucleus, lambda: bound)
    return jnp.where(has_filter, jnp.where(has_top_p, by_mass, bound), jnp.inf)


def draw(below_best: Float[Array, "R V"], bound: Float[Array, "R"], key: UInt32[Array, "R 2"]) -> Int32[Array, "R"]:
    """A token within the bound with probability proportional to exp(-below_best): the first to arrive in an exponential race.

    Token i arrives after E_i / exp(-below_best_i), E_i exponential with mean 1; the least of these is distributed so. Which token wins
    hangs on the two fastest alone: the last bits of the other logits, which differ between buckets, do not move it, as they would move
    the borders of an inverse cumulative sum.
    """
    arrival = jnp.where(below_best <= bound[:, None], below_best + jnp.log(_exponentials(key, below_best.shape)), jnp.inf)
    return first_true(arrival == jnp.min(arrival, axis=-1, keepdims=True))


def fold_in(seed: UInt32[Array, "R 2"], position: Int32[Array, "R"]) -> UInt32[Array, "R 2"]:
    """The key data that `jax.random.fold_in` makes of each (seed, position).

    Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), written out because
    JAX's own compiles to a loop that costs every program more time than the rest of the draw.
    """
    keys = (seed[:, 0], seed[:, 1], seed[:, 0] ^ seed[:, 1] ^ jnp.uint32(0x1BD11BDA))
    a, b = keys[0], keys[1] + position.astype(jnp.uint32)
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = a ^ (b << distance | b >> (32 - distance))
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return jnp.stack([a, b], axis=1)


def _exponentials(key: UInt32[Array, "R 2"], shape: tuple[int, ...]) -> Float[Array, "R V"]:
    """Exponential numbers with mean 1, one for each token of each row, by a hash of the row's key and the token.

    Threefry for each would cost ten times as much. Two rounds of a 32-bit mixer with full avalanche (xorshift-multiply, constants
    from the hash-prospector project's list), the key's two words entering before each.
    """
    bits = lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(0x9E3779B9)
    for word in (key[:, :1], key[:, 1:]):
        bits = _mix(bits ^ word)
    # 32 bits as a float keep their leading ones: small numbers, of which the winners are made, are as exact as large ones.
    return -jnp.log1p(-(bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32 * (1 - 2.0**-24)))


def _mix(bits: jax.Array) -> jax.Array:
    bits = (bits ^ bits >> 16) * jnp.uint32(0x21F0AAAD)
    bits = (bits ^ bits >> 15) * jnp.uint32(0xD35A2D97)
    return bits ^ bits >> 15


def _smallest_distance(
    below_best: jax.Array, weight: jax.Array | None, target: jax.Array, near: jax.Array, beyond: jax.Array, limit: jax.Array
) -> jax.Array:
    """The smallest distance within which the tokens' weights (None counts them) sum to `target`; at most `limit`.

    `near` is the answer where it is known, and inf in the rows still to search, whose answer is `beyond` or more: bisection on
    the bit pattern, which orders non-negative floats as integers, so that 31 halvings find the exact value. It ends early when at
    most one token is left between the ends, which then keep the same tokens.
    """
    high = _bits(limit)
    low = jnp.where(near < jnp.inf, high - 1, _bits(beyond) - 1)  # always too near

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
    return jnp.where(near < jnp.inf, near, _float(far))


def _sums_before(weights: jax.Array) -> jax.Array:
    """For each weight the sum of those before it. A matrix product: for a few hundred columns quicker to compile than a scan."""
    size = weights.shape[1]
    is_before = lax.broadcasted_iota(jnp.int32, (size, size), 0) < lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return lax.dot(weights, is_before.astype(weights.dtype), precision=lax.Precision.HIGHEST)


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
