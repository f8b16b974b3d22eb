"""Stopwatch of `bench.host`: the time of each turn of the loop, split into parts that do not overlap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("schedule", "prepare", "wait", "read", "commit", "rest", "emit", "arrive")
"""In the order of a turn. prepare: with the upload. wait: for the device. read: arrays to a StepResult. rest: of the engine's step. emit:
events sorted by client, encoded to bytes. arrive: new requests and aborts, decoded and queued."""


class HostTimes:
    """Seconds of each part in each turn after the warm-up. Belongs to the loop's thread.

    A part inside another one counts for itself alone. What lies outside every part, between two steps, is the loop's own and counts
    as `emit`; `client` is what the benchmark does in place of the front end's process.
    """

    def __init__(self, num_warm_up_turns: int) -> None:
        self._num_unmeasured = num_warm_up_turns
        self._turns: list[dict[str, float]] = []
        self._current: dict[str, float] = {}
        self._open: list[str] = ["emit"]
        self._since_s = 0.0

    @property
    def num_turns(self) -> int:
        """Turns measured so far."""
        return len(self._turns)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Whatever runs inside counts as `name`."""
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def end_turn(self) -> None:
        """A turn ends here and the next begins."""
        self._switch()
        if self._num_unmeasured:
            self._num_unmeasured -= 1
        else:
            self._turns.append(self._current)
        self._current = {}

    def median(self, part: str) -> float:
        """Seconds of the part in the middle turn."""
        return statistics.median(turn.get(part, 0.0) for turn in self._turns)

    def median_host(self) -> float:
        """Seconds of all parts but `wait`."""
        return statistics.median(sum(turn.get(part, 0.0) for part in PARTS if part != "wait") for turn in self._turns)

    def median_period(self) -> float:
        """Seconds from step to step."""
        return statistics.median(sum(turn.values()) for turn in self._turns)

    def _switch(self) -> None:
        """Gives the time since the last call to the innermost open part."""
        now = time.perf_counter()
        name = self._open[-1]
        self._current[name] = self._current.get(name, 0.0) + now - self._since_s
        self._since_s = now
