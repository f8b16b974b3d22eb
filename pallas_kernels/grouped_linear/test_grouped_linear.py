"""`grouped_linear`: every implementation that this machine has against its definition in float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, grouped_linear
from pallas_kernels.grouped_linear.arg_specs import TEST_SPECS, GroupedLinearArgs, GroupedLinearSpec, in_float64, make_args

USABLE = [name for name, reason in dispatch.available().items() if reason is None]
# One rounding of the result; float32 keeps only what the order of the sums makes.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}
EVERYWHERE = pytest.mark.parametrize("implementation", USABLE)


def run(args: GroupedLinearArgs, copies: int, implementation: str, out_dtype: Any = jnp.float32) -> np.ndarray:
    arrays = [None if array is None else jnp.asarray(array) for array in args]
    options = {"copies": copies, "out_dtype": out_dtype, "implementation": implementation}
    out = jax.jit(lambda *arrays: grouped_linear(*arrays, **options))(*arrays)
    assert out.dtype == jnp.dtype(out_dtype)
    return np.asarray(out)


@pytest.mark.parametrize(("spec", "implementation"), list(itertools.product(TEST_SPECS, USABLE)), ids=lambda x: getattr(x, "name", x))
def test_against_float64(spec: GroupedLinearSpec, implementation: str) -> None:
    args = make_args(spec)
    expected = in_float64(args, spec.copies)
    out = run(args, spec.copies, implementation, spec.out_dtype).astype(np.float64)
    assert out.shape == expected.shape
    is_computed = ~np.isnan(expected[:, 0])
    assert is_computed.any() == (spec.num_used > 0)
    scale = max(np.abs(expected[is_computed]).max(initial=0.0), 1.0)
    np.testing.assert_allclose(out[is_computed], expected[is_computed], rtol=0, atol=TOLERANCE[spec.out_dtype] * scale)


@EVERYWHERE
def test_a_bad_row_spoils_no_other(implementation: str) -> None:
    spec = TEST_SPECS[1]
    args = make_args(spec)
    token, is_computed = np.arange(spec.num_rows * spec.copies) // spec.copies, ~np.isnan(in_float64(args, spec.copies)[:, 0])
    bad = [t for t in range(spec.num_rows) if is_computed[token == t].any()][:2]
    good = run(args, spec.copies, implementation)
    x = args.x.copy()
    x[bad[0], 3], x[bad[1], :] = np.nan, np.inf
    out = run(args._replace(x=x), spec.copies, implementation)
    assert np.isnan(out[is_computed & (token == bad[0])]).all() and not np.isfinite(out[is_computed & (token == bad[1])]).any()
    rest = is_computed & ~np.isin(token, bad)
    assert rest.any()
    np.testing.assert_array_equal(out[rest], good[rest])


@EVERYWHERE
def test_experts_of_unused_blocks_are_not_read(implementation: str) -> None:
    args = make_args(TEST_SPECS[1])
    unused = sorted(set(range(TEST_SPECS[1].num_experts)) - set(args.block_expert[: TEST_SPECS[1].num_used].tolist()))
    weight = args.weight.copy()
    weight[unused] = np.nan
    is_computed = ~np.isnan(in_float64(args, TEST_SPECS[1].copies)[:, 0])
    out, expected = (run(given, TEST_SPECS[1].copies, implementation)[is_computed] for given in (args._replace(weight=weight), args))
    np.testing.assert_array_equal(out, expected)


@EVERYWHERE
def test_rows_are_cast_to_the_weights_dtype(implementation: str) -> None:
    args = make_args(TEST_SPECS[5])
    narrow = args._replace(x=args.x.astype(jnp.bfloat16))
    out, wide = (run(given, 4, implementation) for given in (narrow, args._replace(x=narrow.x.astype(np.float32))))
    is_computed = ~np.isnan(in_float64(args, 4)[:, 0])
    np.testing.assert_array_equal(out[is_computed], wide[is_computed])
    arrays = [None if array is None else jnp.asarray(array) for array in narrow]
    assert grouped_linear(*arrays, copies=4, implementation=implementation).dtype == jnp.bfloat16


def test_an_unknown_implementation_is_refused() -> None:
    args = make_args(TEST_SPECS[0])
    with pytest.raises(ValueError, match="'fast' does not exist; choose one of cpu_native"):
        grouped_linear(*map(jnp.asarray, args[:2]), None, *map(jnp.asarray, args[3:]), implementation="fast")
