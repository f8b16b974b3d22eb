"""The order of sequences: who runs first, who is preempted last. One total order serves waiting and running sequences alike.

Knows no pages and no budget. Next: `scheduler.roster`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from jaxserve.core.sequence import Sequence

type Rank = Callable[[Sequence], Any]


def rank_fcfs(sequence: Sequence) -> int:
    """First come, first served: order of arrival at the scheduler."""
    return sequence.seq_id


def rank_priority(sequence: Sequence) -> tuple[int, float, int]:
    """Lower priority value first, then earlier arrival."""
    return (sequence.request.priority, sequence.request.arrival_time_s, sequence.seq_id)


RANKS: dict[str, Rank] = {"fcfs": rank_fcfs, "priority": rank_priority}


class WaitingQueue:
    """Waiting sequences in rank order; those that need a penalty slot apart, so that others pass them when none is free.

    A preempted sequence returns to its rank, so it is again ahead of everything that arrived later.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._plain: list[Sequence] = []
        self._penalized: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._plain) + len(self._penalized)

    def push(self, sequence: Sequence) -> None:
        """Insert at the sequence's rank."""
        insort(self._list_of(sequence), sequence, key=self._rank)

    def head(self, *, has_penalty_slot: bool) -> Sequence | None:
        """The first sequence that may start, None when there is none."""
        if not self._penalized or not has_penalty_slot:
            return self._plain[0] if self._plain else None
        if not self._plain:
            return self._penalized[0]
        return min(self._plain[0], self._penalized[0], key=self._rank)

    def discard(self, sequence: Sequence) -> None:
        """Remove the sequence if it is here."""
        queue = self._list_of(sequence)
        i = bisect_left(queue, self._rank(sequence), key=self._rank)
        if i < len(queue) and queue[i] is sequence:
            del queue[i]

    def _list_of(self, sequence: Sequence) -> list[Sequence]:
        return self._penalized if sequence.params.needs_penalty_slot else self._plain
