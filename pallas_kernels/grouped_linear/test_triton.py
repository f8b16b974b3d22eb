"""The Triton kernel of `grouped_linear`: interpreted against the definition, and compiled for cards that are not here."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import deviceless, triton_on_numpy
from pallas_kernels.grouped_linear.api import NO_COPY, grouped_linear
from pallas_kernels.grouped_linear.arg_specs import TEST_SPECS, GroupedLinearArgs, GroupedLinearSpec, in_float64, make_args

if (reason := deviceless.unavailable_reason()) is not None:
    pytest.skip(reason, allow_module_level=True)

TOLERANCE = {"float32": 2e-6, "float16": 2.0**-10}


def run(args: GroupedLinearArgs, copies: int = 1, out_dtype: str = "float32") -> tuple[np.ndarray, triton_on_numpy.Traffic]:
    return triton_on_numpy.run(grouped_linear, *args, copies=copies, out_dtype=out_dtype, implementation="triton")


def check(spec: GroupedLinearSpec) -> None:
    args = make_args(spec)
    expected = in_float64(args, spec.copies)
    is_computed = ~np.isnan(expected[:, 0])
    is_read = is_computed.reshape(-1, spec.copies).any(axis=1)
    args.x[~is_read] = np.nan
    out, _ = run(args, spec.copies, spec.out_dtype)
    scale = max(np.abs(expected[is_computed]).max(initial=0.0), 1.0)
    np.testing.assert_allclose(out[is_computed], expected[is_computed], rtol=0, atol=TOLERANCE[spec.out_dtype] * scale)
    assert np.isnan(out[~is_computed]).all(), "what new arrays hold: nothing is stored there"


@pytest.mark.parametrize(
    "spec", [replace(s, dtype="float16" if s.dtype == "bfloat16" else s.dtype, out_dtype="float32") for s in TEST_SPECS]
)
def test_equals_float64(spec: GroupedLinearSpec) -> None:
    check(spec)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.builds(
        GroupedLinearSpec, num_rows=st.integers(1, 60), copies=st.integers(1, 4), num_blocks=st.just(5), num_used=st.integers(0, 5),
        block_size=st.sampled_from((4, 8, 16, 32, 64)), num_experts=st.integers(1, 6), num_inputs=st.integers(1, 150),
        num_outputs=st.integers(1, 150), dtype=st.sampled_from(("float32", "float16")), has_bias=st.booleans(),
    )
)  # fmt: skip
def test_equals_float64_whatever_the_shape(spec: GroupedLinearSpec) -> None:
    check(spec)


def test_a_bad_row_spoils_no_other() -> None:
    args = make_args(replace(TEST_SPECS[1], dtype="float16"))
    good, _ = run(args, 3)
    token = int(np.flatnonzero(~np.isnan(good[:, 0]))[0]) // 3
    args.x[token, 3] = np.nan
    out, _ = run(args, 3)
    mine = slice(token * 3, token * 3 + 3)
    assert np.isnan(out[mine]).all()
    np.testing.assert_array_equal(np.delete(out, mine, axis=0), np.delete(good, mine, axis=0))


def test_each_block_moves_the_matrix_of_its_expert_and_the_rows_that_it_has() -> None:
    spec = GroupedLinearSpec(
        num_rows=30, num_blocks=4, num_used=3, block_size=8, num_experts=5, num_inputs=128, num_outputs=256, dtype="float16",
        out_dtype="float16",
    )  # fmt: skip
    args = make_args(spec)
    _, traffic = run(args, out_dtype=spec.out_dtype)
    num_rows = np.count_nonzero(args.place[: 3 * 8] != NO_COPY)
    assert 0 < num_rows < 3 * 8
    matrices = 3 * 128 * 256 * 2
    rows = num_rows * 128 * 2 * 2  # read by each of the two tiles of outputs
    assert matrices + rows <= traffic.load_bytes <= matrices + rows + 2 * 4 * (4 + 3 + 3 * 8)  # num_used, block_expert, place
    assert traffic.store_bytes == num_rows * 256 * 2


@pytest.mark.parametrize("card", deviceless.CARDS)
@pytest.mark.parametrize(("size", "dtype"), [(4, jnp.bfloat16), (64, jnp.bfloat16), (64, jnp.float32)])
def test_compiles_for(card: str, size: int, dtype: type) -> None:
    def product(*args: jax.Array) -> jax.Array:
        return grouped_linear(args[0], args[1], None, *args[2:], copies=6, implementation="triton")

    shapes = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in (((40, 2048), dtype), ((16, 768, 2048), dtype), ((8 * size,), jnp.int32), ((8,), jnp.int32), ((), jnp.int32))
    ]
    assert "triton_kernel_call" in deviceless.compile_for(card, product, *shapes).as_text()
