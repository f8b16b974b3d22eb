"""Where programs run, and how they are compiled for it."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.runner.placement import Placement, gpu_options


def test_passes_that_the_user_disabled_stay_so() -> None:
    assert gpu_options("") == {"xla_disable_hlo_passes": "rematerialization"}
    flags = "--xla_disable_hlo_passes=algsimp,dot-merger --xla_dump_to=here"
    assert gpu_options(flags)["xla_disable_hlo_passes"] == "rematerialization,algsimp,dot-merger"


@pytest.mark.parametrize(("platform", "precision"), [("gpu", "HIGHEST"), ("cpu", "DEFAULT")])
def test_float32_is_multiplied_as_float32_on_a_gpu(platform: str, precision: str) -> None:
    device: Any = SimpleNamespace(platform=platform)
    x = jnp.ones((2, 2))
    with Placement(device, None).lowering():
        text = jax.jit(lambda x: x @ x).lower(x).as_text()
    assert f"precision = [{precision}, {precision}]" in text
