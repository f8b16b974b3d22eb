"""A log line about the engine every ten seconds while it is busy, and one after its work has ended. Then it is quiet.

Each line tells what is now and what changed since the line before it would have come, from two `EngineStats`. Runs in the asyncio
loop of the engine process, so it also speaks while a step hangs. Next: `engine.stats`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from jaxserve.engine.stats import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def log_stats(take_stats: Callable[[], EngineStats], interval_s: float = INTERVAL_S) -> None:
    """Logs until cancelled."""
    before, before_s = take_stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now, now_s = take_stats(), time.monotonic()
        if now.num_steps != before.num_steps or now.has_work or before.has_work:
            logger.info("%s", describe(before, now, now_s - before_s))
        before, before_s = now, now_s


def describe(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """The line: what runs and waits now, tokens a second and events since `before`, shares in percent."""
    num_queries = now.num_cache_queries - before.num_cache_queries
    parts = [
        f"running {now.num_running}",
        f"waiting {now.num_waiting}",
        f"prompt {(now.num_prompt_tokens - before.num_prompt_tokens) / seconds:.1f} tokens/s",
        f"generation {(now.num_generated_tokens - before.num_generated_tokens) / seconds:.1f} tokens/s",
        f"KV cache {100 * now.num_used_pages / max(1, now.num_pages - 1):.1f} %",  # the null page is never used
    ]
    if num_queries:
        parts.append(f"prefix hits {100 * (now.num_cache_hits - before.num_cache_hits) / num_queries:.1f} %")
    parts += [f"preemptions {now.num_preemptions - before.num_preemptions}", f"compiles {now.num_compiles - before.num_compiles}"]
    return ", ".join(parts)
