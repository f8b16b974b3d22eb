"""How many sequences may wait: a request beyond that is refused before it enters the engine's inbox.

Counts open sequences itself, so that a burst is judged by all of it, also while the engine's thread is inside a step. Knows no
requests. Next: `engine.loop`, which asks here.
"""

from __future__ import annotations

import threading

from jaxserve.engine.stats import EngineStats
from jaxserve.errors import Overloaded


class WaitingLimit:
    """Counts sequences that are not finished. Its methods may be called from any thread.

    Args:
        max_waiting: Most sequences that may wait; 0 is no limit.
        max_num_seqs: Sequences that the engine can run at once.
    """

    def __init__(self, max_waiting: int, max_num_seqs: int) -> None:
        self._max_waiting = max_waiting
        self._max_num_seqs = max_num_seqs
        self._lock = threading.Lock()
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Sequences taken and not finished, those in the inbox included."""
        return self._num_open

    def take(self, num_sequences: int, stats: EngineStats) -> None:
        """Counts sequences that arrive, or raises Overloaded. `stats` are the engine's figures after its latest turn.

        Free seats do not count as waiting while the engine has nothing waiting: what arrives will run at once. When sequences wait in
        spite of free seats, pages are short. An engine without any work takes every request.
        """
        with self._lock:
            seats = stats.num_running if stats.num_waiting else self._max_num_seqs
            num_waiting = max(0, self._num_open - seats)
            if self._max_waiting and self._num_open and self._num_open + num_sequences > seats + self._max_waiting:
                raise Overloaded(
                    f"{num_waiting} sequences are waiting, {num_sequences} more would exceed --max-waiting {self._max_waiting}; "
                    "try again later, raise it, or serve the model by more engines."
                )
            self._num_open += num_sequences

    def give_back(self, num_sequences: int) -> None:
        """Sequences have ended, or were never started."""
        with self._lock:
            self._num_open -= num_sequences
