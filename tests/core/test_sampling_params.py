"""Sampling parameters: what is refused, by which name, and what is normalized."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.errors import InvalidRequest

WRONG: dict[str, list[Any]] = {
    "n": [0, -1, 129, 10**9, True, 1.0, "1", None],
    "temperature": [-0.1, 2.1, math.nan, math.inf, "1", None, True, 10**400],
    "top_p": [0, -1, 1.1, math.nan, "1", None],
    "top_k": [-2, 2**31, 1.0, True, None],
    "min_p": [-0.1, 1.1, math.nan, None],
    "presence_penalty": [-2.1, 2.1, math.nan, None],
    "frequency_penalty": [-2.1, 2.1, math.inf, None],
    "repetition_penalty": [0, -1, 1e-50, 1e300, math.nan, None],
    "seed": [2**63, -(2**63) - 1, 1.0, True, "1"],
    "stop": [5, b"a", [""], [5], ["a"] * 5, ["a" * 1025], {"a": 1}],
    "stop_token_ids": [5, "5", [True], ["5"], [1.0], list(range(129))],
    "ignore_eos": ["yes", 1, None],
    "max_tokens": [0, -1, 2**31, 3.0, True, "3"],
    "min_tokens": [-1, 17, 2**31, 3.0, None],
    "logprobs": [-2, True, 1.0, "1"],
    "prompt_logprobs": [-2, True, 1.0, "1"],
    "logit_bias": [[1], "x", {1: math.nan}, {1: "x"}, {1.5: 1}, {math.inf: 1}, {True: 1}, {"x": 1}, {"1.0": 1}, {None: 1}]
    + [{"9" * 5000: 1}, dict.fromkeys(range(1025), 1)],
    "detokenize": [None, 0, "no"],
    "skip_special_tokens": [None, 3],
    "spaces_between_special_tokens": [None, 3],
    "include_stop_str_in_output": [None, 3],
}


def test_every_field_is_tried() -> None:
    assert WRONG.keys() == {spec.name for spec in fields(SamplingParams)}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_name(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name, value
        assert name in str(caught.value) or str(caught.value).startswith("a stop string"), value


def test_what_excludes_each_other() -> None:
    for values, param in [
        ({"n": 2, "temperature": 0}, "n"),
        ({"stop": "a", "detokenize": False}, "stop"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**values)  # type: ignore[arg-type]
        assert caught.value.param == param


def test_normal_forms() -> None:
    params = SamplingParams(temperature=1e-300, top_k=-1, seed=-1, stop="end", stop_token_ids=[3, 3, 1], logit_bias={"7": 300, 8: -300})  # type: ignore[arg-type, dict-item]
    assert (params.temperature, params.top_k, params.seed) == (0.01, 0, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("end",), (3, 1), {7: 100.0, 8: -100.0})
    assert (none := SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)) == SamplingParams()  # type: ignore[arg-type]
    assert not none.needs_penalty_slot
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_penalized_logits_stay_finite(penalty: float) -> None:
    coldest = np.float32(SamplingParams(temperature=1e-9, repetition_penalty=penalty).temperature)
    with np.errstate(over="raise"):
        for logit in np.float32([1e4, -1e4]):
            assert np.isfinite((logit / np.float32(penalty) if logit > 0 else logit * np.float32(penalty)) / coldest)
