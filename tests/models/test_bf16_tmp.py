"""Every golden checkpoint in bfloat16, its longest prompt in one step: how far rounding carries the logits from those of float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import decoder, moe
from jaxserve.models.spec import ModelSpec, MoESpec

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
DENSE_LIMIT = 0.05
MOE_LIMIT = 0.10
"""Root mean square of the error over the standard deviation of the logits. What the folders have is 0.007 to 0.017."""


def is_mixture(spec: ModelSpec) -> bool:
    return any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)


@pytest.fixture
def chosen_experts(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The experts `[T, top_k]` that each mixture chose, layer by layer and in ascending order: filled by steps that are compiled later."""
    chosen: list[np.ndarray] = []

    def recording(*args: Any) -> moe.Choice:
        choice = route(*args)
        jax.debug.callback(lambda expert: chosen.append(np.sort(expert, axis=-1)), choice.expert, ordered=True)
        return choice

    route = moe.route
    monkeypatch.setattr(moe, "route", recording)
    # Layers as part of the step: as jits of their own they would reuse the traces of other tests.
    monkeypatch.setattr(decoder, "_run_layer", decoder._run_layer.__wrapped__)
    return chosen


def long_prompt_logits(case: Any, model: Any, sequence_run: Any) -> np.ndarray:
    run, prompt = sequence_run(model), case.prompts[-1]
    run.start(rope_length=len(prompt))
    logits: np.ndarray = run.feed(prompt)
    jax.effects_barrier()
    return logits


@pytest.mark.parametrize("folder", FOLDERS)
def test_rounding_error(folder: str, golden: Callable[..., Any], sequence_run: Any, chosen_experts: list[np.ndarray]) -> None:
    case = golden(folder)
    error = long_prompt_logits(case, case.model(jnp.bfloat16, None), sequence_run) - case.logits[-1]
    is_compared, limit = np.ones(len(error), bool), DENSE_LIMIT
    if is_mixture(case.spec):
        # A near tie between two experts is decided by a rounding, and then another network computes that token.
        narrow = list(chosen_experts)
        chosen_experts.clear()
        np.testing.assert_allclose(long_prompt_logits(case, case.model(), sequence_run), case.logits[-1], atol=1e-3)
        pairs = list(zip(narrow, chosen_experts, strict=True))
        assert len(pairs) == sum(isinstance(layer.mlp, MoESpec) for layer in case.spec.layers)
        is_compared = np.all([(ours == theirs)[: len(error)].all(axis=-1) for ours, theirs in pairs], axis=0)
        assert is_compared.mean() >= 0.7
        limit = MOE_LIMIT
    got = np.sqrt(np.mean(np.square(error[is_compared]))) / case.expected["logits_std"]
    print("FIG", folder, is_compared.mean(), got)
    assert got <= limit
