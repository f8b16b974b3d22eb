"""Notices an engine that hangs: its thread has work and ends no turn. Nothing can be done for a hung step but to start again.

Runs in the asyncio loop beside the engine's thread. Should a native call hold the interpreter itself, no Python runs any more; the
supervisor, which then hears no beat of this process (`engine.child_process`), ends it. Time in which this process was stopped, or the whole
machine, counts for neither. Next: `engine.loop`, whose figures it watches.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable

from jaxserve.engine.stats import EngineStats

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


async def wait_for_stall(take_stats: Callable[[], EngineStats], timeout_s: float, period_s: float = PERIOD_S) -> str:
    """Returns why the engine counts as hung, once no turn has ended for `timeout_s` in spite of work; logs what all threads are doing."""
    since_s, num_looks = 0.0, 0
    # Looks are counted beside seconds: a process that was stopped finds a long time gone by, in which its engine could do nothing.
    while since_s <= timeout_s or num_looks * period_s < timeout_s:
        await asyncio.sleep(period_s)
        before_s, since_s = since_s, take_stats().seconds_since_progress
        num_looks = num_looks + 1 if since_s > before_s else 0
    reason = f"the engine hangs: no step has ended for {since_s:.0f} s (--stall-timeout {timeout_s:g})"
    logger.critical("%s\n%s", reason, stacks())
    return reason


def stacks() -> str:
    """What every thread is doing, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)
