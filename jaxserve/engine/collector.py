"""Keeps Python's garbage collector out of the steps. Reference counting frees what a step leaves; only cycles need the collector.

By default it runs about once in each step of some hundred sequences, since their rows and events exceed its threshold before they
are freed, and now and then it walks everything that start-up made, which takes tens of milliseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 20_000
"""New objects that set off a collection: above what one step of the largest batches has alive at once."""


@contextmanager
def quiet_collector() -> Iterator[None]:
    """What exists now is never collected, and what comes is looked at seldom."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
