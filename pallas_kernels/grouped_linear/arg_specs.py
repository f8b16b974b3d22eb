"""The one list of shapes that the tests of `grouped_linear` share, and the arrays that belong to a shape. Next: `test_grouped_linear`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pallas_kernels.grouped_linear.api import NO_COPY
from pallas_kernels.linear.arg_specs import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLinearSpec:
    """One call's shape. Rows, weight and bias have the same dtype."""

    num_rows: int
    copies: int = 1
    num_blocks: int
    num_used: int
    block_size: int
    num_experts: int
    num_inputs: int
    num_outputs: int
    dtype: str = "bfloat16"
    out_dtype: str = "float32"
    has_bias: bool = False

    @property
    def name(self) -> str:
        """For test ids and cards."""
        blocks = f"{self.num_rows}x{self.copies}-{self.num_used}of{self.num_blocks}x{self.block_size}"
        return f"{blocks}-E{self.num_experts}-{self.num_inputs}x{self.num_outputs}-{self.dtype}-{self.out_dtype}" + "-bias" * self.has_bias


class GroupedLinearArgs(NamedTuple):
    """The positional arguments of `api.grouped_linear`, as NumPy arrays."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None
    place: np.ndarray
    block_expert: np.ndarray
    num_used: np.ndarray


def make_args(spec: GroupedLinearSpec, seed: int = 0) -> GroupedLinearArgs:
    """Random arrays of a shape, from a standard normal distribution; blocks of an expert are neighbours, as sorting leaves them.

    Some rows of blocks have no copy and some copies no row. Blocks that are not in use have some too.
    """
    rng = np.random.default_rng(seed)
    dtype = DTYPES[spec.dtype]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    num_copies = spec.num_rows * spec.copies
    place = np.full(spec.num_blocks * spec.block_size, NO_COPY, np.int32)
    num_placed = -(-3 * min(len(place), num_copies) // 4)
    place[rng.permutation(len(place))[:num_placed]] = rng.permutation(num_copies)[:num_placed]
    return GroupedLinearArgs(
        x=normal(spec.num_rows, spec.num_inputs),
        weight=normal(spec.num_experts, spec.num_outputs, spec.num_inputs),
        bias=normal(spec.num_experts, spec.num_outputs) if spec.has_bias else None,
        place=place,
        block_expert=np.sort(rng.integers(0, spec.num_experts, spec.num_blocks)).astype(np.int32),
        num_used=np.array(spec.num_used, np.int32),
    )


def in_float64(args: GroupedLinearArgs, copies: int) -> np.ndarray:
    """The result from its definition; NaN for rows that no block in use has."""
    out = np.full((len(args.x) * copies, args.weight.shape[1]), np.nan)
    places = args.place.reshape(len(args.block_expert), -1)
    for i in range(int(args.num_used)):
        p, expert = places[i][places[i] != NO_COPY], args.block_expert[i]
        out[p] = args.x[p // copies].astype(np.float64) @ args.weight[expert].astype(np.float64).T
        if args.bias is not None:
            out[p] += args.bias[expert].astype(np.float64)
    return out


TEST_SPECS: tuple[GroupedLinearSpec, ...] = (
    # All blocks in use, some, one, none; more blocks than experts and fewer; more copies than rows of blocks and fewer.
    GroupedLinearSpec(num_rows=10, copies=2, num_blocks=5, num_used=5, block_size=4, num_experts=3, num_inputs=64, num_outputs=96),
    GroupedLinearSpec(
        num_rows=18, copies=3, num_blocks=7, num_used=3, block_size=8, num_experts=16, num_inputs=96, num_outputs=49, has_bias=True
    ),
    GroupedLinearSpec(
        num_rows=1, num_blocks=1, num_used=1, block_size=4, num_experts=8, num_inputs=32, num_outputs=64, out_dtype="bfloat16"
    ),
    GroupedLinearSpec(num_rows=16, num_blocks=4, num_used=0, block_size=4, num_experts=4, num_inputs=32, num_outputs=16, has_bias=True),
    GroupedLinearSpec(
        num_rows=200, num_blocks=3, num_used=2, block_size=64, num_experts=2, num_inputs=128, num_outputs=80, out_dtype="bfloat16"
    ),
    GroupedLinearSpec(
        num_rows=9, copies=4, num_blocks=6, num_used=5, block_size=4, num_experts=4, num_inputs=71, num_outputs=21, dtype="float32"
    ),
    GroupedLinearSpec(
        num_rows=96, num_blocks=6, num_used=5, block_size=16, num_experts=4, num_inputs=64, num_outputs=33, dtype="float32", has_bias=True
    ),
    GroupedLinearSpec(
        num_rows=7, copies=2, num_blocks=4, num_used=3, block_size=4, num_experts=4, num_inputs=64, num_outputs=33, dtype="float16",
        out_dtype="float16",
    ),
)  # fmt: skip
