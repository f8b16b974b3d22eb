"""Next-token logits, in parts by vocabulary where several devices share a model: each has its own columns.

A greedy token needs the largest logit of each part and nothing else of it; what needs whole rows has them gathered. What comes of either is
equal on every device. Both make the devices wait for each other, and those that enter a branch of a `lax.cond` would wait for ever for
others that do not: its predicate must be equal on every device, as all is that comes from the slots, the step's packed inputs or from here.

Knows no slots and no options. Next: `jaxserve.runner.sampling`, which asks; `models.decoder`, whose head gives each device its columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.models.shards import AXIS
from jaxserve.runner.filters import first_largest


@dataclass(frozen=True)
class Logits:
    """The logits of R rows.

    Attributes:
        part: This device's columns, float32; column j of device d is id d N + j. Those past the vocabulary mean nothing.
        vocab_size: V.
        num_parts: Devices; with several, the methods are called inside `shard_map` over `shards.AXIS`.
    """

    part: Float[Array, "R N"]
    vocab_size: int
    num_parts: int = 1

    def rows(self) -> Float[Array, "R V"]:
        """All logits, on every device."""
        if self.num_parts == 1:
            return self.part
        return lax.all_gather(self.part, AXIS, axis=1, tiled=True)[:, : self.vocab_size]

    def largest(self) -> tuple[Float[Array, "R"], Int32[Array, "R"]]:
        """The largest logit of each row and the lowest id that has it; +inf, and any id, where one is NaN or +inf.

        Copies no logits.
        """
        if self.num_parts == 1:
            return first_largest(self.part)
        part, size = self.part, self.part.shape[1]
        start = lax.axis_index(AXIS) * size
        if size * self.num_parts > self.vocab_size:
            part = jnp.where(lax.broadcasted_iota(jnp.int32, part.shape, 1) < self.vocab_size - start, part, -jnp.inf)
        value, index = first_largest(part)
        pairs = lax.all_gather(jnp.stack([lax.bitcast_convert_type(value, jnp.int32), start + index]), AXIS)
        values, ids = lax.bitcast_convert_type(pairs[:, 0], jnp.float32), pairs[:, 1]
        best = jnp.max(values, axis=0, keepdims=True)
        return best[0], jnp.min(jnp.where(values == best, ids, self.vocab_size), axis=0)
