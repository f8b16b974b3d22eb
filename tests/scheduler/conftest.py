"""A loop with small limits, each of which a test may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.config import SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.testing import CountingLoop

type MakeLoop = Callable[..., CountingLoop]


@pytest.fixture
def make_loop() -> MakeLoop:
    """`make_loop(limit=value, ...)`: 4 seats, 16 tokens a step, 100 pages of 4 tokens, context 64."""

    def make(*, buckets: Buckets | None = None, runner: dict[str, Any] | None = None, **limits: Any) -> CountingLoop:
        defaults: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_pages": 100, "page_size": 4}
        return CountingLoop(SchedulerLimits(**{**defaults, **limits}), buckets=buckets, **(runner or {}))

    return make
