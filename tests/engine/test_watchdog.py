"""When an engine counts as hung."""

import asyncio
import logging
from collections.abc import Iterable

import pytest

from jaxserve.engine import watchdog
from jaxserve.engine.stats import EngineStats


@pytest.fixture
def looks_at(monkeypatch: pytest.MonkeyPatch):
    """Runs the watchdog, whose limit is 60 s and whose looks are 20 s apart, over an engine that gives these figures."""

    async def pause(seconds: float) -> None:
        assert seconds == 20.0

    monkeypatch.setattr(watchdog.asyncio, "sleep", pause)

    def run(seconds_since_progress: Iterable[float]) -> str:
        figures = iter(seconds_since_progress)

        def take_stats() -> EngineStats:
            return EngineStats(has_work=True, seconds_since_progress=next(figures))

        return asyncio.run(watchdog.wait_for_stall(take_stats, 60.0, period_s=20.0))

    return run


def test_work_without_progress_is_noticed(looks_at, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        reason = looks_at([20.0, 40.0, 60.0, 0.0, 19.0, 39.0, 60.0, 80.0])
    assert reason == "the engine hangs: no step has ended for 80 s (--stall-timeout 60)"
    assert "test_work_without_progress_is_noticed" in caplog.text, "the stacks of all threads"


def test_a_process_that_was_stopped_gets_its_time_back(looks_at) -> None:
    # Stopped for an hour in mid-step, after which the step ends; then again, and now the step hangs.
    reason = looks_at([5.0, 3605.0, 3.0, 0.0, 3600.0, 3620.0, 3640.0])
    assert reason == "the engine hangs: no step has ended for 3640 s (--stall-timeout 60)"
