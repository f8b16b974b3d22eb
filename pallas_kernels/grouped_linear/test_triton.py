"""The Triton kernel of `grouped_linear`: interpreted against float64 products, and compiled for cards that are not here."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import deviceless, triton_on_numpy
from pallas_kernels.grouped_linear.api import grouped_linear
from pallas_kernels.grouped_linear.arg_specs import TEST_SPECS, GroupedLinearArgs, GroupedLinearSpec, make_args

if (reason := deviceless.unavailable_reason()) is not None:
    pytest.skip(reason, allow_module_level=True)

TOLERANCE = {"float32": 2e-6, "float16": 2.0**-10}


def run(args: GroupedLinearArgs, out_dtype: str = "float32") -> tuple[np.ndarray, triton_on_numpy.Traffic]:
    return triton_on_numpy.run(grouped_linear, *args, out_dtype=out_dtype, implementation="triton")


def check(spec: GroupedLinearSpec) -> None:
    args = make_args(spec)
    num_rows = spec.num_used * spec.block_size
    args.x[num_rows:] = np.nan  # rows of blocks that are not in use are not to be read
    expected = np.zeros((len(args.x), spec.num_outputs))
    for i, expert in enumerate(args.block_expert[: spec.num_used]):
        rows = slice(i * spec.block_size, (i + 1) * spec.block_size)
        expected[rows] = args.x[rows].astype(np.float64) @ args.weight[expert].astype(np.float64).T
        if args.bias is not None:
            expected[rows] += args.bias[expert].astype(np.float64)
    out, _ = run(args, spec.out_dtype)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[spec.out_dtype] * max(np.abs(expected).max(), 1.0))
    assert not out[num_rows:].any()


@pytest.mark.parametrize(
    "spec", [replace(s, dtype="float16" if s.dtype == "bfloat16" else s.dtype, out_dtype="float32") for s in TEST_SPECS]
)
def test_equals_float64(spec: GroupedLinearSpec) -> None:
    check(spec)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.builds(
        GroupedLinearSpec, num_blocks=st.just(5), num_used=st.integers(0, 5), block_size=st.sampled_from((4, 8, 16, 32, 64)),
        num_experts=st.integers(1, 6), num_inputs=st.integers(1, 150), num_outputs=st.integers(1, 150),
        dtype=st.sampled_from(("float32", "float16")), has_bias=st.booleans(),
    )
)  # fmt: skip
def test_equals_float64_whatever_the_shape(spec: GroupedLinearSpec) -> None:
    check(spec)


def test_a_bad_row_spoils_no_other() -> None:
    args = make_args(replace(TEST_SPECS[1], dtype="float16"))
    good, _ = run(args)
    args.x[2, 3] = np.nan
    out, _ = run(args)
    assert np.isnan(out[2]).all()
    np.testing.assert_array_equal(np.delete(out, 2, axis=0), np.delete(good, 2, axis=0))


def test_each_block_reads_the_matrix_of_its_expert_once() -> None:
    spec = GroupedLinearSpec(
        num_blocks=4, num_used=3, block_size=8, num_experts=5, num_inputs=128, num_outputs=256, dtype="float16", out_dtype="float16"
    )
    _, traffic = run(make_args(spec), spec.out_dtype)
    matrices = 3 * 128 * 256 * 2
    rows = 3 * 8 * 128 * 2 * 2  # read by each of the two tiles of outputs
    assert matrices + rows <= traffic.load_bytes <= matrices + rows + 200
    assert traffic.store_bytes == 4 * 8 * 256 * 2


@pytest.mark.parametrize("card", deviceless.CARDS)
@pytest.mark.parametrize(("size", "dtype"), [(4, jnp.bfloat16), (64, jnp.bfloat16), (64, jnp.float32)])
def test_compiles_for(card: str, size: int, dtype: type) -> None:
    def product(*args: jax.Array) -> jax.Array:
        return grouped_linear(args[0], args[1], None, *args[2:], implementation="triton")

    shapes = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((8 * size, 2048), dtype), ((16, 768, 2048), dtype), ((8,), jnp.int32), ((), jnp.int32))
    ]
    assert "triton_kernel_call" in deviceless.compile_for(card, product, *shapes).as_text()
