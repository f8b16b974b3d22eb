"""The whole steps of well-known models, each compiled once for cards that are not here, for all tests of this folder."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from jaxserve.bench import hlo
from jaxserve.bench.whole_step import WholeStep
from jaxserve.models.registry import resolve_spec
from jaxserve.runner.memory import MIN_PAGES, MemoryPlan

CONFIGS = Path(__file__).parent / "configs"
MODELS = {"llama-3.1-8b": 1, "llama-3.1-70b": 8, "qwen3-30b-a3b": 1, "gemma-3-27b": 1, "deepseek-v2-lite": 1}
"""By name of the config: how many cards share the model."""


@dataclass(frozen=True)
class Programs:
    """One model's largest decode and mixed step.

    Attributes:
        plan: The memory plan, made before these were compiled.
        compiled, module: By family: the program, and its text, read.
    """

    step: WholeStep
    plan: MemoryPlan
    compiled: dict[str, jax.stages.Compiled]
    module: dict[str, hlo.Module]


def whole_step(name: str) -> WholeStep:
    spec = resolve_spec(json.loads((CONFIGS / f"{name}.json").read_text()))
    return WholeStep(spec, num_devices=MODELS[name])


@functools.cache
def compile_programs(name: str) -> Programs:
    step = whole_step(name)
    buckets = {"decode": step.decode_bucket, "mixed": step.mixed_bucket}
    # What start-up does: temporaries are measured with hardly any pages, then the plan decides how many there are.
    trial = step.lower(step.mixed_bucket, MIN_PAGES).compile()
    plan = step.plan(trial.memory_analysis().temp_size_in_bytes)
    lowered = {family: step.lower(bucket, plan.num_pages) for family, bucket in buckets.items()}
    with ThreadPoolExecutor() as pool:
        compiled = dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))
    return Programs(step, plan, compiled, {family: hlo.parse(program.as_text()) for family, program in compiled.items()})


@pytest.fixture(params=list(MODELS), scope="session")
def programs(request: pytest.FixtureRequest) -> Programs:
    return compile_programs(request.param)
