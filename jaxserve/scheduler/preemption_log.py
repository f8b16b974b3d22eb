"""Tells whoever runs the server that the KV pages are too few: one line for a preemption, at most one line a second.

Each preempted sequence is computed again, so a server that preempts all the time is slow for a reason that a flag can mend. Knows
no policy. Next: `scheduler.roster`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jaxserve.core.sequence import Sequence

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Least time between two lines."""


class PreemptionLog:
    """Names the victim, its pages and the flags; preemptions within `INTERVAL_S` of the last line are only counted in the next."""

    def __init__(self, num_pages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_pages = num_pages
        self._clock = clock
        self._next_line_s = float("-inf")
        self._num_silent = 0

    def note(self, victim: Sequence, num_running: int) -> None:
        """Called before the victim gives its pages back."""
        now = self._clock()
        if now < self._next_line_s:
            self._num_silent += 1
            return
        request = victim.request
        logger.warning(
            "preempted request %s%s: the KV pages ran out with %d sequences running. It gives up its %d of %d pages and its %d tokens "
            "will be computed again. Give the pages more memory (--gpu-memory-utilization, --kv-cache-memory-bytes, --num-pages) or run "
            "fewer sequences at once (--max-num-seqs).%s",
            request.label or request.request_id,
            f" (sequence {victim.index} of {request.params.n})" if request.params.n > 1 else "",
            num_running,
            sum(len(table) for table in victim.page_tables) - sum(victim.num_dropped),
            self._num_pages - 1,
            victim.num_tokens,
            f" {self._num_silent} more preemptions since the last such line." if self._num_silent else "",
        )
        self._next_line_s = now + INTERVAL_S
        self._num_silent = 0
