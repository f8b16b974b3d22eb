"""The whole steps of well-known models, each compiled once for cards that are not here, for all tests of this folder."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import jax
import pytest

from jaxserve.bench import hlo, roofline
from jaxserve.bench.whole_step import WholeStep
from jaxserve.models.registry import resolve_spec
from jaxserve.runner.memory import MIN_PAGES, MemoryPlan

CONFIGS = Path(__file__).parent / "configs"
MODELS = {"llama-3.1-8b": 1, "llama-3.1-70b": 8, "qwen3-30b-a3b": 1, "gemma-3-27b": 1, "deepseek-v2-lite": 1}
"""By name of the config: how many cards share the model."""
QUICK = {"xla_gpu_autotune_level": 0}
"""XLA looks for what it could time on a card, and has none to time it on: a fifth of its work, and the programs are the same."""


class Programs:
    """One model's largest decode and mixed step; compiled when first asked for."""

    def __init__(self, name: str) -> None:
        self.step = WholeStep(resolve_spec(json.loads((CONFIGS / f"{name}.json").read_text())), num_devices=MODELS[name])
        self.name = name
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self._modules: dict[str, hlo.Module] = {}

    @cached_property
    def plan(self) -> MemoryPlan:
        """As start-up makes it: temporaries measured with hardly any pages, then the number of pages."""
        trial = self.step.lower(self.step.mixed_bucket, MIN_PAGES).compile(QUICK)
        return self.step.plan(trial.memory_analysis().temp_size_in_bytes)

    def compiled(self, family: str) -> jax.stages.Compiled:
        """The program with as many pages as the plan has."""
        if family not in self._compiled:
            bucket = self.step.decode_bucket if family == "decode" else self.step.mixed_bucket
            options = QUICK | (roofline.COMPILER_OPTIONS if family == "decode" else {})
            self._compiled[family] = self.step.lower(bucket, self.plan.num_pages).compile(options)
        return self._compiled[family]

    def module(self, family: str) -> hlo.Module:
        """Its text, read."""
        if family not in self._modules:
            self._modules[family] = hlo.parse(self.compiled(family).as_text())
        return self._modules[family]


@pytest.fixture(params=list(MODELS), scope="session")
def programs(request: pytest.FixtureRequest) -> Programs:
    return Programs(request.param)
