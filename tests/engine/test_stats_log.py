"""The log line of a busy engine: its figures by hand, and when it comes."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from jaxserve.engine.stats import EngineStats
from jaxserve.engine.stats_log import describe, log_stats

START = EngineStats(num_pages=101)
BUSY = EngineStats(
    has_work=True, num_running=3, num_waiting=2, num_used_pages=25, num_pages=101, num_steps=40, num_prompt_tokens=1000,
    num_generated_tokens=55, num_preemptions=1, num_cache_queries=1000, num_cache_hits=250, num_compiles=1,
)  # fmt: skip
DONE = EngineStats(num_pages=101, num_steps=50, num_prompt_tokens=1000, num_generated_tokens=80, num_cache_queries=1000, num_cache_hits=250,
                   num_preemptions=3, num_compiles=1)  # fmt: skip


def test_the_line_tells_what_is_now_and_what_changed():
    assert describe(START, BUSY, 10) == (
        "running 3, waiting 2, prompt 100.0 tokens/s, generation 5.5 tokens/s, KV cache 25.0 %, prefix hits 25.0 %, "
        "preemptions 1, compiles 1"
    )
    assert describe(BUSY, DONE, 10) == (
        "running 0, waiting 0, prompt 0.0 tokens/s, generation 2.5 tokens/s, KV cache 0.0 %, preemptions 2, compiles 0"
    )


@pytest.mark.parametrize(
    ("looks", "running"),
    [
        ([START, START, START], []),
        ([START, BUSY, DONE, DONE, DONE], [3, 0]),  # one line after the end, then quiet
        ([START, DONE, DONE], [0]),  # began and ended between two looks
        ([START, BUSY, BUSY], [3, 3]),  # a step that hangs
    ],
)
def test_it_speaks_while_busy_and_once_more(caplog: pytest.LogCaptureFixture, looks: list[EngineStats], running: list[int]):
    class LooksAreUsedUp(Exception):
        pass

    left: Iterator[EngineStats] = iter(looks)

    def take() -> EngineStats:
        for look in left:
            return look
        raise LooksAreUsedUp

    caplog.set_level(logging.INFO, "jaxserve")
    with pytest.raises(LooksAreUsedUp):
        asyncio.run(log_stats(take, 0.001))
    assert [
        int(record.getMessage().split(",")[0].removeprefix("running ")) for record in caplog.records if "running" in record.message
    ] == running
