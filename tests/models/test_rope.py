"""Rotary tables against independent float64 formulas and hand-computed values, and the rotation itself."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.rope import inverse_frequencies, rotary_tables, rotate
from jaxserve.models.rope_config import resolve_rope
from jaxserve.models.spec import RopeSpec

HEAD_DIM = 64
LENGTH = 128


def spec_of(head_dim: int = HEAD_DIM, **scaling: object) -> RopeSpec:
    return resolve_rope({"rope_theta": 10_000.0, "rope_scaling": scaling}, head_dim=head_dim, max_position_embeddings=LENGTH)


def frequencies_at(rope: RopeSpec, length: int) -> np.ndarray:
    """The table that a sequence of `length` gets, read off the angle of position 1."""
    cos, sin = rotary_tables(rope, jnp.array([1], jnp.int32), jnp.array([length], jnp.int32))
    return np.arctan2(np.asarray(sin[0], np.float64), np.asarray(cos[0], np.float64))


def base_frequencies(theta: float = 10_000.0, dim: int = HEAD_DIM) -> list[float]:
    return [theta ** -(i / dim) for i in range(0, dim, 2)]


def test_default_by_hand() -> None:
    np.testing.assert_allclose(inverse_frequencies(spec_of(4, rope_type="default")), [1.0, 0.01], rtol=1e-6)
    cos, sin = rotary_tables(spec_of(4, rope_type="default"), jnp.array([0, 3], jnp.int32), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(cos, [[1, 1], [math.cos(3), math.cos(0.03)]], rtol=1e-6)
    np.testing.assert_allclose(sin, [[0, 0], [math.sin(3), math.sin(0.03)]], rtol=1e-6)


def test_linear_divides_every_frequency() -> None:
    expected = np.array(base_frequencies()) / 4
    np.testing.assert_allclose(inverse_frequencies(spec_of(rope_type="linear", factor=4.0)), expected, rtol=1e-6)


def test_stored_divisors() -> None:
    divisors = [1.0 + i for i in range(HEAD_DIM // 2)]
    expected = np.array(base_frequencies()) / divisors
    np.testing.assert_allclose(inverse_frequencies(spec_of(rope_type="default", freq_divisors=divisors)), expected, rtol=1e-6)


def test_llama3_against_a_plain_loop() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    expected = []
    for frequency in base_frequencies():
        turns = 32 * frequency / (2 * math.pi)  # rotations within the pretrained length
        share = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append(share * frequency + (1 - share) * frequency / 8)
    assert len({round(a / b, 3) for a, b in zip(expected, base_frequencies(), strict=True)}) > 3, "all three bands occur"
    np.testing.assert_allclose(inverse_frequencies(spec_of(rope_type="llama3", **scaling)), expected, rtol=2e-6)


@pytest.mark.parametrize("is_truncated", [True, False])
def test_yarn_against_a_plain_loop(is_truncated: bool) -> None:
    rope = spec_of(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=is_truncated, beta_fast=8, beta_slow=1)

    def dimension(rotations: float) -> float:
        return HEAD_DIM * math.log(32 / (rotations * 2 * math.pi)) / (2 * math.log(10_000.0))

    low, high = dimension(8), dimension(1)
    if is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    expected = []
    for i, frequency in enumerate(base_frequencies()):
        share = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(frequency / 4 * share + frequency * (1 - share))
    np.testing.assert_allclose(inverse_frequencies(rope), expected, rtol=2e-6)


def test_yarn_multiplies_cos_and_sin() -> None:
    rope = spec_of(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    cos, sin = rotary_tables(rope, jnp.array([0, 5], jnp.int32), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(np.hypot(cos, sin), 0.1 * math.log(4) + 1, rtol=1e-6)


@pytest.mark.parametrize(("length", "is_changed"), [(1, False), (LENGTH, False), (LENGTH + 1, True), (3 * LENGTH, True)])
def test_dynamic_changes_the_base_beyond_the_original_length(length: int, is_changed: bool) -> None:
    rope = spec_of(rope_type="dynamic", factor=2.0)
    theta = 10_000.0 * (2.0 * max(length, LENGTH) / LENGTH - 1.0) ** (HEAD_DIM / (HEAD_DIM - 2))
    assert (theta > 10_000.0) == is_changed
    np.testing.assert_allclose(frequencies_at(rope, length), base_frequencies(theta), rtol=5e-6)


@pytest.mark.parametrize(("length", "table"), [(1, "short"), (32, "short"), (33, "long"), (LENGTH, "long")])
def test_longrope_takes_the_long_table_beyond_the_pretrained_length(length: int, table: str) -> None:
    factors = {"short": [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)], "long": [2.0 + 0.1 * i for i in range(HEAD_DIM // 2)]}
    rope = spec_of(rope_type="longrope", short_factor=factors["short"], long_factor=factors["long"], original_max_position_embeddings=32)
    expected = [frequency / factor for frequency, factor in zip(base_frequencies(), factors[table], strict=True)]
    np.testing.assert_allclose(frequencies_at(rope, length), expected, rtol=5e-6)
    cos, sin = rotary_tables(rope, jnp.array([7], jnp.int32), jnp.array([length], jnp.int32))
    np.testing.assert_allclose(np.hypot(cos, sin), math.sqrt(1 + math.log(4) / math.log(32)), rtol=1e-6)


def test_a_token_past_the_admitted_length_counts_itself() -> None:
    rope = spec_of(rope_type="dynamic", factor=2.0)
    position = jnp.array([LENGTH - 1, LENGTH, 5], jnp.int32)
    admitted = jnp.array([10, 10, LENGTH + 1], jnp.int32)  # decodes of a short sequence, then a prefill of a long one
    cos, _ = rotary_tables(rope, position, admitted)
    by_length = [
        rotary_tables(rope, position[i : i + 1], jnp.array([n], jnp.int32))[0][0] for i, n in enumerate((LENGTH, LENGTH + 1, LENGTH + 1))
    ]
    np.testing.assert_array_equal(cos, jnp.stack(by_length))


@pytest.mark.parametrize("head_dim", [8, 12])
def test_rotation_is_a_complex_product_of_leading_pairs(head_dim: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 2, head_dim)).astype(np.float32)
    angle = random.standard_normal((3, 4)).astype(np.float32)
    out = np.asarray(rotate(jnp.asarray(x), jnp.cos(angle), jnp.sin(angle)))
    turned = (x[..., :4] + 1j * x[..., 4:8]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(out[..., :8], np.concatenate([turned.real, turned.imag], axis=-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[..., 8:], x[..., 8:])


def test_rotation_is_done_in_float32() -> None:
    x = jax.random.normal(jax.random.key(0), (5, 2, 8), jnp.bfloat16)
    angle = jax.random.normal(jax.random.key(1), (5, 4))
    out = rotate(x, jnp.cos(angle), jnp.sin(angle))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, rotate(x.astype(jnp.float32), jnp.cos(angle), jnp.sin(angle)).astype(jnp.bfloat16))


def test_scores_depend_on_distance_only() -> None:
    rope = spec_of(8, rope_type="default")
    q, k = (jax.random.normal(jax.random.key(seed), (1, 1, 8)) for seed in (0, 1))

    def score(q_position: int, k_position: int) -> float:
        cos, sin = rotary_tables(rope, jnp.array([q_position, k_position], jnp.int32), jnp.zeros(2, jnp.int32))
        return float(jnp.vdot(rotate(q, cos[:1], sin[:1]), rotate(k, cos[1:], sin[1:])))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
