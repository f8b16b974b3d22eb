"""Notices an engine that hangs: its thread has work and ends no turn. Nothing can be done for a hung step but to start again.

Runs in the asyncio loop beside the engine's thread. Should a native call hold the interpreter itself, no Python runs any more; a timer
of `faulthandler`, in C, then ends the process. Next: `engine.loop`, whose figures it watches.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import traceback
from collections.abc import Callable

from jaxserve.engine.stats import EngineStats

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MARGIN_S = 3.0
"""What the native timer waits longer, so that an engine that can still tell why it ends does so."""


async def wait_for_stall(take_stats: Callable[[], EngineStats], timeout_s: float, period_s: float = PERIOD_S) -> str:
    """Returns why the engine counts as hung, once no turn has ended for `timeout_s` in spite of work; logs what all threads are doing."""
    while (stats := take_stats()).seconds_since_progress <= timeout_s:
        await asyncio.sleep(period_s)
    reason = f"the engine hangs: no step has ended for {stats.seconds_since_progress:.0f} s (--stall-timeout {timeout_s:g})"
    logger.critical("%s\n%s", reason, stacks())
    return reason


async def outlive_native_hangs(timeout_s: float, period_s: float = PERIOD_S) -> None:
    """Until cancelled, keeps a timer from running out that writes all stacks to stderr and ends the process with status 1."""
    try:
        while True:
            faulthandler.dump_traceback_later(timeout_s + MARGIN_S, exit=True)
            await asyncio.sleep(period_s)
    finally:
        faulthandler.cancel_dump_traceback_later()


def stacks() -> str:
    """What every thread is doing, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)
