"""Norms against float64 formulas, and where each rounds."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.models.norm import Norm
from jaxserve.models.spec import NormSpec

EPS = 0.25


def expected(spec: NormSpec, x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    x = x.astype(np.float64)
    if spec.is_centered:
        x = x - x.mean(-1, keepdims=True)
    out = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.eps)
    if weight is not None:
        out = out * (weight + 1 if spec.is_offset else weight)
    return out if bias is None else out + bias


@pytest.mark.parametrize(
    ("is_centered", "has_bias", "is_offset", "is_wide"),
    # A bias goes with a mean; a weight stored minus one with none.
    [flags for flags in itertools.product([False, True], repeat=4) if flags[0] >= flags[1] and flags[0] + flags[2] < 2],
)
@pytest.mark.parametrize("weight_shape", [(6,), (3, 6)], ids=str)
def test_against_numpy(is_centered: bool, has_bias: bool, is_offset: bool, is_wide: bool, weight_shape: tuple[int, ...]) -> None:
    spec = NormSpec(EPS, is_centered, has_bias, is_offset, is_wide)
    rng = np.random.default_rng(0)
    x, weight = rng.normal(2.0, 3.0, (5, 3, 6)).astype(np.float32), rng.normal(1.0, 0.5, weight_shape).astype(np.float32)
    bias = rng.normal(size=weight_shape).astype(np.float32) if has_bias else None
    out = Norm(spec, jnp.asarray(weight), None if bias is None else jnp.asarray(bias))(jnp.asarray(x))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected(spec, x, weight, bias), rtol=1e-5, atol=1e-5)


def test_by_hand() -> None:
    # Mean square of (3, 4) is 12.5; with eps 13. Its mean is 3.5, its variance 0.25.
    x = jnp.array([[3.0, 4.0]])
    np.testing.assert_allclose(Norm(NormSpec(0.5), jnp.array([2.0, -1.0]))(x), [[2 * 3 / 13**0.5, -4 / 13**0.5]], rtol=1e-6)
    offset = Norm(NormSpec(0.5, is_offset=True, is_wide=True), jnp.array([1.0, -2.0]))
    np.testing.assert_allclose(offset(x), [[2 * 3 / 13**0.5, -4 / 13**0.5]], rtol=1e-6)
    layer_norm = Norm(NormSpec(0.75, is_centered=True, has_bias=True), jnp.array([2.0, 2.0]), jnp.array([0.0, 10.0]))
    np.testing.assert_allclose(layer_norm(x), [[-1.0, 11.0]], rtol=1e-6)


def test_no_weight_multiplies_by_nothing() -> None:
    np.testing.assert_allclose(Norm(NormSpec(0.5), None)(jnp.array([[3.0, 4.0]])), [[3 / 13**0.5, 4 / 13**0.5]], rtol=1e-6)


def test_large_float16_does_not_overflow() -> None:
    out = Norm(NormSpec(1e-6), jnp.ones(4, jnp.float16))(jnp.full((1, 4), 6e4, jnp.float16))
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, rtol=1e-3)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("is_wide", [False, True])
def test_rounding_before_or_after_the_weight(is_wide: bool) -> None:
    rng = np.random.default_rng(1)
    x, weight = rounded(rng.normal(size=(64, 32))), rounded(rng.normal(1.0, 0.3, 32))
    quotient = (x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(EPS))).astype(np.float32)
    once, twice = rounded(quotient * weight), rounded(rounded(quotient) * weight)
    assert (once != twice).mean() > 0.1
    norm = Norm(NormSpec(EPS, is_wide=is_wide), jnp.asarray(weight, jnp.bfloat16))
    out = np.asarray(norm(jnp.asarray(x, jnp.bfloat16)), np.float32)
    # The sum's order may move a quotient over a rounding boundary.
    assert (out == (once if is_wide else twice)).mean() > 0.99
