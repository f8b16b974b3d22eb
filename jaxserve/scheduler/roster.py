"""Every sequence that is not finished: which wait, which run, and what the running ones hold, slots and pages.

One sequence at a time is moved from state to state here; when, and which one, is decided in `planner` (start, preempt) and `results` (end).
Knows no budget and no rows. Next: `scheduler.planner`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from time import monotonic

from jaxserve.config import SchedulerLimits
from jaxserve.core.sequence import FinishReason, Sequence, Status
from jaxserve.scheduler.integrity import check_pages, check_slots
from jaxserve.scheduler.preemption_log import PreemptionLog
from jaxserve.scheduler.prompt_share import PromptShares
from jaxserve.scheduler.sequence_pages import PageTables, SequencePages
from jaxserve.scheduler.waiting_queue import RANKS, WaitingQueue


class Roster:
    """The sequences by state.

    Attributes:
        queue: Those that wait; some of n > 1 are parked in `shares` before.
        running: Those that hold a slot, in rank order.
        set_aside: Preempted while a dispatched step computes them; queued at its commit.
        requests: The unfinished sequences of each request, by its id.
        sequences: The same by seq_id.
        committed_step_id: The latest step whose results are known.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.rank = RANKS[limits.scheduling_policy]
        self.pages = SequencePages(limits)
        self.shares = PromptShares(self.pages, limits.page_size)
        self.queue = WaitingQueue(self.rank)
        self.running: list[Sequence] = []
        self.set_aside: list[Sequence] = []
        self.requests: dict[str, list[Sequence]] = {}
        self.sequences: dict[int, Sequence] = {}
        self.free_slots = list(reversed(range(limits.max_num_seqs)))
        self.free_penalty_slots = list(reversed(range(limits.max_penalty_slots)))
        self.committed_step_id = -1
        self.num_preemptions = 0
        self._preemption_log = PreemptionLog(limits.num_pages)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no slot: waiting, preempted, or waiting for their prompt to be computed by a sibling."""
        return len(self.queue) + self.shares.num_parked + len(self.set_aside)

    def is_dispatched(self, seq: Sequence) -> bool:
        """Whether a step that is not committed computes tokens of it."""
        return seq.last_step_id > self.committed_step_id

    def add(self, sequences: list[Sequence]) -> None:
        """All sequences of a request that has arrived; they wait."""
        self.requests[sequences[0].request.request_id] = sequences
        self.sequences.update((sequence.seq_id, sequence) for sequence in sequences)
        if self._limits.has_recurrent_state:
            for sequence in sequences:  # each computes the prompt itself
                self.queue.push(sequence)
            return
        self.queue.push(sequences[0])
        if len(sequences) > 1:
            self.shares.add(sequences)

    def start(self, seq: Sequence, prefix: PageTables) -> int:
        """A waiting sequence runs: it takes a slot, which is returned, and becomes an owner of the pages of its known prefix."""
        self.queue.discard(seq)
        self.pages.take_prefix(seq, prefix)
        assert not (self._limits.has_recurrent_state and seq.num_computed_tokens), "no page holds the state before a prefix's end"
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
        if seq.started_s is None:
            seq.started_s = monotonic()
        self.shares.on_admitted(seq)
        seq.status = Status.RUNNING
        seq.slot = slot = self.free_slots.pop()
        seq.penalty_slot = self.free_penalty_slots.pop() if seq.params.needs_penalty_slot else None
        seq.rope_length = seq.num_tokens
        insort(self.running, seq, key=self.rank)
        return slot

    def preempt(self, seq: Sequence) -> None:
        """One that was just taken from the end of `running` gives up what it holds, and will be computed again."""
        self._preemption_log.note(seq, len(self.running) + 1)
        self._give_back(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if self.is_dispatched(seq):
            self.set_aside.append(seq)
        else:
            self.queue.push(seq)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """Finish a sequence in any state."""
        if seq.status is Status.RUNNING:
            i = bisect_left(self.running, self.rank(seq), key=self.rank)
            assert self.running[i] is seq
            del self.running[i]
            self._give_back(seq)
        else:
            self.queue.discard(seq)
            self.set_aside = [other for other in self.set_aside if other is not seq]
        seq.status, seq.finish_reason = Status.FINISHED, reason
        for child in self.shares.on_ended(seq):
            self.queue.push(child)
        del self.sequences[seq.seq_id]
        siblings = self.requests[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request.request_id]

    def requeue_set_aside(self, *, is_void: bool = False) -> None:
        """Those whose last dispatched step is committed, or void, wait again."""
        if not self.set_aside:
            return
        for seq in self.set_aside:
            if is_void:
                seq.num_pending_tokens = 0
            if not self.is_dispatched(seq):
                self.queue.push(seq)
        self.set_aside = [seq for seq in self.set_aside if self.is_dispatched(seq)]

    def num_leaving(self) -> int:
        """Pages that running sequences drop when dispatched steps are committed."""
        return sum(
            self.pages.num_leaving(seq, self.shares.end_unshared(seq, seq.num_computed_tokens))
            for seq in self.running
            if self.is_dispatched(seq)
        )

    def check_integrity(self) -> None:
        """Assert that nothing is leaked or shared that must not be. For tests: it walks everything."""
        held = self.shares.owners() + self.pages.deferred_owners()
        check_pages(self.pages, self.running, held, self._limits)
        assert self.running == sorted(self.running, key=self.rank)
        check_slots(self.free_slots, [seq.slot for seq in self.running], self._limits.max_num_seqs)
        check_slots(self.free_penalty_slots, [seq.penalty_slot for seq in self.running], self._limits.max_penalty_slots)
        assert len(self.running) + self.num_waiting == len(self.sequences), "a sequence is lost"
        assert sum(len(siblings) for siblings in self.requests.values()) == len(self.sequences)

    def _give_back(self, seq: Sequence) -> None:
        """Return pages and slots of a running sequence. Its slots may be taken by the next plan: steps run in order."""
        self.pages.release(seq, after_step=seq.last_step_id if self.is_dispatched(seq) else None)
        assert seq.slot is not None
        self.free_slots.append(seq.slot)
        seq.slot = None
        if seq.penalty_slot is not None:
            self.free_penalty_slots.append(seq.penalty_slot)
            seq.penalty_slot = None
