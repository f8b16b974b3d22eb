"""When an engine counts as hung."""

import asyncio
import logging

import pytest

from jaxserve.engine.stats import EngineStats
from jaxserve.engine.watchdog import wait_for_stall


def test_work_without_progress_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    looks = iter([0.0, 59.0, 0.0, 60.0, 61.0])

    def take_stats() -> EngineStats:
        return EngineStats(has_work=True, seconds_since_progress=next(looks))

    with caplog.at_level(logging.CRITICAL):
        reason = asyncio.run(wait_for_stall(take_stats, 60.0, period_s=0))
    assert reason == "the engine hangs: no step has ended for 61 s (--stall-timeout 60)"
    assert "test_work_without_progress_is_noticed" in caplog.text, "the stacks of all threads"
