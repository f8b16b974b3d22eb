"""Python's own settings in an engine process: neither the garbage collector nor another thread holds up a step.

Reference counting frees what a step leaves; only cycles need the collector. By default it runs about once in each step of some hundred
sequences, since their rows and events exceed its threshold before they are freed, and now and then it walks everything that start-up
made, which takes tens of milliseconds. The link's thread works while the loop waits for the device; by default it may keep the
loop, whose device is done, waiting for 5 ms.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GC_THRESHOLD = 20_000
"""New objects that set off a collection: above what one step of the largest batches has alive at once."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread may go on when another one asks for the interpreter."""


@contextmanager
def prompt_interpreter() -> Iterator[None]:
    """What exists now is never collected and what comes is looked at seldom; threads give way at once. Undone at the end."""
    thresholds, interval_s = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
