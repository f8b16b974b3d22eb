"""`grouped_linear`: every implementation that this machine has against float64 products block by block."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, grouped_linear
from pallas_kernels.grouped_linear.arg_specs import TEST_SPECS, GroupedLinearArgs, GroupedLinearSpec, make_args

USABLE = [name for name, reason in dispatch.available().items() if reason is None]
# One rounding of the result; float32 keeps only what the order of the sums makes.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}
EVERYWHERE = pytest.mark.parametrize("implementation", USABLE)


def run(args: GroupedLinearArgs, implementation: str, out_dtype: Any = jnp.float32) -> np.ndarray:
    arrays = [None if array is None else jnp.asarray(array) for array in args]
    out = jax.jit(lambda *arrays: grouped_linear(*arrays, out_dtype=out_dtype, implementation=implementation))(*arrays)
    assert out.dtype == jnp.dtype(out_dtype)
    return np.asarray(out)


@pytest.mark.parametrize(("spec", "implementation"), list(itertools.product(TEST_SPECS, USABLE)), ids=lambda x: getattr(x, "name", x))
def test_against_float64(spec: GroupedLinearSpec, implementation: str) -> None:
    args = make_args(spec)
    expected = np.zeros((len(args.x), spec.num_outputs))
    for i, expert in enumerate(args.block_expert[: spec.num_used]):
        rows = slice(i * spec.block_size, (i + 1) * spec.block_size)
        expected[rows] = args.x[rows].astype(np.float64) @ args.weight[expert].astype(np.float64).T
        if args.bias is not None:
            expected[rows] += args.bias[expert].astype(np.float64)
    out = run(args, implementation, spec.out_dtype).astype(np.float64)
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[spec.out_dtype] * max(np.abs(expected).max(), 1.0))
    assert (out[spec.num_used * spec.block_size :] == 0).all()


@EVERYWHERE
def test_a_bad_row_spoils_no_other(implementation: str) -> None:
    args = make_args(TEST_SPECS[1])
    good = run(args, implementation)
    x, num_rows = args.x.copy(), TEST_SPECS[1].num_used * TEST_SPECS[1].block_size
    x[2, 3], x[9, :], x[num_rows:] = np.nan, np.inf, np.nan
    out = run(args._replace(x=x), implementation)
    assert np.isnan(out[2]).all() and not np.isfinite(out[9]).any()
    rest = [i for i in range(len(x)) if i not in (2, 9)]
    np.testing.assert_array_equal(out[rest], good[rest])
    assert (out[num_rows:] == 0).all()


@EVERYWHERE
def test_experts_of_unused_blocks_are_not_read(implementation: str) -> None:
    args = make_args(TEST_SPECS[1])
    unused = sorted(set(range(TEST_SPECS[1].num_experts)) - set(args.block_expert[: TEST_SPECS[1].num_used].tolist()))
    weight = args.weight.copy()
    weight[unused] = np.nan
    np.testing.assert_array_equal(run(args._replace(weight=weight), implementation), run(args, implementation))


@EVERYWHERE
def test_rows_are_cast_to_the_weights_dtype(implementation: str) -> None:
    args = make_args(TEST_SPECS[5])
    narrow = args._replace(x=args.x.astype(jnp.bfloat16))
    wide = run(args._replace(x=narrow.x.astype(np.float32)), implementation)
    np.testing.assert_array_equal(run(narrow, implementation), wide)
    arrays = [None if array is None else jnp.asarray(array) for array in narrow]
    assert grouped_linear(*arrays, implementation=implementation).dtype == jnp.bfloat16


def test_an_unknown_implementation_is_refused() -> None:
    args = make_args(TEST_SPECS[0])
    with pytest.raises(ValueError, match="'fast' does not exist; choose one of cpu_native"):
        grouped_linear(*map(jnp.asarray, args[:2]), None, *map(jnp.asarray, args[3:]), implementation="fast")
