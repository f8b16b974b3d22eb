"""What `engine.build` derives from a checkpoint's small files."""

from __future__ import annotations

import logging

import jax
import pytest

from jaxserve import SamplingParams
from jaxserve.engine.build import default_sampling_params, out_of_memory, servable_eos_ids
from jaxserve.errors import ConfigError


def test_defaults_come_from_the_generation_config(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.05,
        "max_new_tokens": 99,
        "do_sample": True,
        "num_beams": 4,
    }
    params = default_sampling_params(given)
    assert params == {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.05, "max_tokens": 99}
    assert SamplingParams(**params).max_tokens == 99
    with caplog.at_level(logging.WARNING):
        assert default_sampling_params({"temperature": 7, "top_k": None, "top_p": "high", "max_new_tokens": 0, "min_p": 0.1}) == {
            "min_p": 0.1
        }
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "temperature is left out",
        "top_p is left out",
        "max_new_tokens is left out",
    ]


def test_end_tokens_outside_the_vocabulary_are_left_out() -> None:
    # A mask over the vocabulary is made of them: one past its end would fail the step.
    assert servable_eos_ids({7, 320, 2, -1, 319}, 320) == (2, 7, 319)


def test_a_device_without_room_is_an_error_of_the_configuration() -> None:
    """Which ends the server; any other trouble of a device is one to try again after."""
    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 117440512 bytes.\nand so on"
    told = pytest.raises(ConfigError, match=r"no room for the weights; take fewer\. It says: RESOURCE.*117440512 bytes\.$")
    with told, out_of_memory("the weights; take fewer"):
        raise jax.errors.JaxRuntimeError(said)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the link is down"), out_of_memory("the weights"):
        raise jax.errors.JaxRuntimeError("INTERNAL: the link is down")
