"""RoPE keys of configs: spellings, precedence, derived lengths, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.rope_config import derived_max_model_len, resolve_rope
from jaxserve.models.spec import RopeSpec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1.0, 1.1], "long_factor": [2.0, 4.0]}


def resolve(config: dict[str, Any], head_dim: int = 4, max_position_embeddings: int = 128) -> RopeSpec:
    return resolve_rope(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_scaling_is_read_under_both_names_of_its_type(key: str) -> None:
    spec = RopeSpec(kind="linear", theta=500.0, rotary_dim=4, factor=2.0)
    assert resolve({"rope_theta": 500, "rope_scaling": {key: "linear", "factor": 2}}) == spec
    assert resolve({"rope_parameters": {key: "linear", "factor": 2, "rope_theta": 500}}) == spec


def test_no_keys_mean_default() -> None:
    assert resolve({}) == resolve({"rope_scaling": None}) == RopeSpec(kind="default", theta=10_000.0, rotary_dim=4)


def test_partial_rotary_in_either_place() -> None:
    assert resolve({"partial_rotary_factor": 0.5}, head_dim=8).rotary_dim == 4
    assert resolve({"rope_parameters": {"partial_rotary_factor": 0.25, "rope_type": "default"}}, head_dim=8).rotary_dim == 2


def test_pretrained_length_comes_from_beside_inside_or_the_whole() -> None:
    inside = {"rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3}
    assert resolve({"rope_parameters": inside}).pretrained_length == 64
    assert resolve({"rope_parameters": inside, "original_max_position_embeddings": 32}).pretrained_length == 32
    assert resolve({"rope_parameters": {"rope_type": "llama3", **LLAMA3}}).pretrained_length == 128


def test_only_length_dependent_tables_have_an_original_length() -> None:
    assert resolve({"rope_scaling": {"type": "dynamic", "factor": 2}}).original_length == 128
    longrope = {"type": "longrope", "original_max_position_embeddings": 32, **LONGROPE}
    assert resolve({"rope_scaling": longrope}).original_length == 32
    for scaling in ({"type": "linear", "factor": 2}, {"type": "yarn", "factor": 2}, {"type": "llama3", **LLAMA3}, {"type": "default"}):
        assert resolve({"rope_scaling": scaling}).original_length is None


def test_yarn_attention_factor() -> None:
    def factor(**params: float) -> float:
        return resolve({"rope_scaling": {"type": "yarn", "factor": 4.0, **params}}).attention_factor

    assert factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(attention_factor=1.5) == 1.5
    assert factor(mscale=0.7, mscale_all_dim=0.5) == pytest.approx((0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert factor(mscale=0.7) == factor()  # both or neither


def test_longrope_attention_factor_from_the_ratio_of_lengths() -> None:
    scaling = {"type": "longrope", "original_max_position_embeddings": 32, **LONGROPE}
    assert resolve({"rope_scaling": scaling}).attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
    assert resolve({"rope_scaling": scaling | {"factor": 2.0}}).attention_factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(32)))
    assert resolve({"rope_scaling": scaling | {"attention_factor": 1.25}}).attention_factor == 1.25
    assert resolve({"rope_scaling": scaling}, max_position_embeddings=32).attention_factor == 1.0


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "default"}, 128),
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "llama3", "original_max_position_embeddings": 32, **LLAMA3}, 128),
        ({"type": "longrope", "original_max_position_embeddings": 32, **LONGROPE}, 128),
    ],
)
def test_derived_max_model_len(scaling: dict[str, Any], length: int) -> None:
    assert derived_max_model_len(resolve({"rope_scaling": scaling}), 128) == length


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "su", "factor": 2}}, "rope type 'su' is not supported; supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number above 0, got None"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor must be a number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 2}}, "both are 2"),
        ({"rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": [1.0]}}, "long_factor must be a list of 2 numbers"),
        ({"rope_parameters": {"rope_type": "default", "freq_divisors": [1.0, 0.0]}}, "freq_divisors must be a list of 2 numbers"),
        ({"partial_rotary_factor": 0.75}, r"rotates 3 dimensions \(head_dim 4"),
        ({"rope_theta": -1.0}, "rope_theta must be a number above 0"),
    ],
)
def test_what_is_wrong_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(config)


def test_dynamic_needs_more_than_one_frequency() -> None:
    with pytest.raises(CheckpointError, match="more than 2 rotated dimensions, got 2"):
        resolve({"rope_scaling": {"type": "dynamic", "factor": 2}}, head_dim=2)
