"""`linear`: every implementation that this machine has against float64 products, and the native kernel without this CPU's extras."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, linear, native
from pallas_kernels.linear import cpu_native
from pallas_kernels.linear.arg_specs import TEST_SPECS, LinearSpec, make_args

USABLE = [name for name, reason in dispatch.available().items() if reason is None]
# One rounding of the result; float32 keeps only what the order of the sums makes.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}

needs_native = pytest.mark.skipif("cpu_native" not in USABLE, reason="no native kernel")


def check(spec: LinearSpec, implementation: str) -> None:
    args = make_args(spec)
    expected = args.x.astype(np.float64) @ args.weight.astype(np.float64).T
    if args.bias is not None:
        expected += args.bias.astype(np.float64)
    out = linear(*map(as_array, args), out_dtype=spec.out_dtype, implementation=implementation)
    assert out.shape == expected.shape and out.dtype == spec.out_dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=TOLERANCE[spec.out_dtype] * np.abs(expected).max())


def as_array(array: np.ndarray | None) -> Any:
    return None if array is None else jnp.asarray(array)


@pytest.mark.parametrize(("spec", "implementation"), list(itertools.product(TEST_SPECS, USABLE)), ids=lambda x: getattr(x, "name", x))
def test_against_float64(spec: LinearSpec, implementation: str) -> None:
    check(spec, implementation)


@needs_native
@pytest.mark.parametrize("num_inputs", [64, 40], ids=["tiles", "rows"])
@pytest.mark.parametrize("num_tokens", [5, 21])
def test_a_bad_token_spoils_no_other(num_inputs: int, num_tokens: int) -> None:
    args = make_args(LinearSpec(num_tokens=num_tokens, num_inputs=num_inputs, num_outputs=48))
    good = linear(as_array(args.x), as_array(args.weight), implementation="cpu_native", out_dtype=jnp.bfloat16)
    bad = args.x.copy()
    bad[2, 3], bad[4, :] = np.nan, np.inf
    out = np.asarray(linear(as_array(bad), as_array(args.weight), implementation="cpu_native", out_dtype=jnp.bfloat16), np.float32)
    assert np.isnan(out[2]).all()
    assert not np.isfinite(out[4]).any()
    rest = [i for i in range(num_tokens) if i not in (2, 4)]
    np.testing.assert_array_equal(out[rest], np.asarray(good, np.float32)[rest])


@needs_native
def test_sums_overflow_to_infinity_in_bfloat16() -> None:
    x, weight = jnp.full((2, 32), 3e38, jnp.bfloat16), jnp.ones((16, 32), jnp.bfloat16)
    assert np.isposinf(np.asarray(linear(x, weight, implementation="cpu_native"), np.float32)).all()


@needs_native
def test_no_tokens_and_no_inputs() -> None:
    assert linear(jnp.zeros((0, 32), jnp.bfloat16), jnp.ones((16, 32), jnp.bfloat16), implementation="cpu_native").shape == (0, 16)
    out = linear(jnp.zeros((2, 0), jnp.bfloat16), jnp.ones((16, 0), jnp.bfloat16), jnp.ones(16, jnp.bfloat16), implementation="cpu_native")
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


@needs_native
def test_many_calls_at_once() -> None:
    """Products of one program run side by side on the threads that they also ask for help."""
    specs = [LinearSpec(num_tokens=3, num_inputs=512, num_outputs=1024)] * 6
    args = [make_args(spec, seed) for seed, spec in enumerate(specs)]
    run = jax.jit(lambda pairs: [linear(x, weight, implementation="cpu_native", out_dtype=jnp.float32) for x, weight in pairs])
    pairs = [(as_array(x), as_array(weight)) for x, weight, _ in args]
    expected = [x.astype(np.float32) @ weight.astype(np.float32).T for x, weight, _ in args]
    for _ in range(20):
        for out, right in zip(run(pairs), expected, strict=True):
            np.testing.assert_allclose(out, right, atol=1e-3)


@needs_native
def test_a_build_for_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FLAGS", tuple(flag for flag in native.FLAGS if flag != "-march=native"))
    monkeypatch.setattr(cpu_native, "_target", cpu_native._target.__wrapped__)
    assert cpu_native._target()[1] == "float32 vectors"
    for spec in TEST_SPECS:
        check(spec, "cpu_native")
