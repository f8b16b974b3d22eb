"""Continuous batching: at every step, which sequences run, how many tokens each computes, and in which pages.

There is no prefill phase and no decode phase. Each step gives sequences tokens, under one budget, so that their computed tokens catch
up with their known ones: running sequences first, then waiting ones. When pages run out, the last running sequence in rank order
is preempted: it gives up its pages and is computed again later. Ranks (`waiting_queue`) order waiting and running alike, so the first
sequence always gets on, and with it, in the end, all others.

`schedule` may be called again before the previous plan is committed (the overlapped loop): sampled tokens that the host does not
know yet are counted in `num_pending_tokens`, and pages that a dispatched step may still write are freed at its commit.

Knows no shapes, no device and no text. Next: `scheduler.step_draft`, `scheduler.sequence_pages`, then `jaxserve.engine.engine`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

from jaxserve.config import SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.core.events import StepResult, StepStats, TokenEvent
from jaxserve.core.plan import Admission, PageWrite, Plan, Row
from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason, Sequence, Status
from jaxserve.errors import InvalidRequest
from jaxserve.scheduler.arrival import check_arrival, make_sequences
from jaxserve.scheduler.integrity import check_pages, check_slots
from jaxserve.scheduler.pooling import collect as collect_pooled
from jaxserve.scheduler.preemption_log import PreemptionLog
from jaxserve.scheduler.prompt_logprobs import collect
from jaxserve.scheduler.prompt_share import PromptShares
from jaxserve.scheduler.sequence_pages import PageTables, SequencePages
from jaxserve.scheduler.step_draft import StepDraft
from jaxserve.scheduler.stopping import check_stop, masked_stop_ids
from jaxserve.scheduler.token_events import embedding_event, end_event, token_event
from jaxserve.scheduler.waiting_queue import RANKS, WaitingQueue

if TYPE_CHECKING:
    import numpy as np

WATERMARK = 0.01
"""Share of the pages that a waiting sequence must leave free while others run: room for them to grow, against thrashing."""

NOT_FINITE = "logits were not finite"
POOLED_NOT_FINITE = "hidden states were not finite"


class Scheduler:
    """Requests in, plans out, results in, events out. Not thread-safe: it belongs to the step loop."""

    def __init__(self, limits: SchedulerLimits, buckets: Buckets | None = None) -> None:
        self.limits = limits
        self._buckets = buckets
        self._rank = RANKS[limits.scheduling_policy]
        self._pages = SequencePages(limits)
        self._shares = PromptShares(self._pages, limits.page_size)
        self._queue = WaitingQueue(self._rank)
        self._running: list[Sequence] = []  # in rank order
        self._set_aside: list[Sequence] = []  # preempted while a dispatched step computes them; queued at its commit
        self._requests: dict[str, list[Sequence]] = {}
        self._sequences: dict[int, Sequence] = {}  # not finished, by seq_id
        self._seq_ids = count()
        self._free_slots = list(reversed(range(limits.max_num_seqs)))
        self._free_penalty_slots = list(reversed(range(limits.max_penalty_slots)))
        self._watermark = int(WATERMARK * limits.num_pages)
        self._next_step_id = 0
        self._committed_step_id = -1
        self._preemption_log = PreemptionLog(limits.num_pages)
        self._num_preemptions = 0
        self._num_cache_queries = 0
        self._num_cache_hits = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no slot: waiting, preempted, or waiting for their prompt to be computed by a sibling."""
        return len(self._queue) + self._shares.num_parked + len(self._set_aside)

    @property
    def num_used_pages(self) -> int:
        """Pages held by sequences, or by a dispatched step that may still write them."""
        return self._pages.pool.num_used

    @property
    def has_work(self) -> bool:
        """True while any sequence is not finished."""
        return bool(self._sequences)

    # ---------------------------------------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Accept a request: its n sequences wait. Raises `InvalidRequest` when it can never be served."""
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request id {request.request_id!r} is being served already; give each request its own.", param="request_id"
            )
        check_arrival(request, self.limits)
        sequences = make_sequences(request, self.limits, self._seq_ids)
        self._requests[request.request_id] = sequences
        self._sequences.update((sequence.seq_id, sequence) for sequence in sequences)
        if self.limits.has_recurrent_state:
            for sequence in sequences:  # each computes the prompt itself
                self._queue.push(sequence)
            return
        self._queue.push(sequences[0])
        if len(sequences) > 1:
            self._shares.add(sequences)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """End a request, or one sequence of it, in any state. An unknown or finished one gives no events."""
        chosen = [s for s in self._requests.get(request_id, ()) if index is None or s.index == index]
        # Children first: ending the first sequence would make a child compute the prompt.
        for sequence in reversed(chosen):
            self._end(sequence, FinishReason.ABORT)
        return [end_event(sequence) for sequence in chosen]

    def fail_running(self, message: str) -> list[TokenEvent]:
        """The device lost its state: every running sequence ends with an error, all pages are free, no prefix is known.

        Dispatched steps are void; waiting sequences go on. The caller resets the runner.
        """
        self._committed_step_id = self._next_step_id - 1
        failed = list(self._running)
        for sequence in failed:
            self._end(sequence, FinishReason.ERROR)
        self._shares.forget_pages()
        self._pages.release_deferred(self._committed_step_id)
        self._requeue_set_aside(is_void=True)
        self._pages.cache.reset()
        return [end_event(sequence, error=message) for sequence in failed]

    def reset_prefix_cache(self) -> bool:
        """Forget all known prefixes. Refused (False) while any page is in use: running sequences would register theirs again."""
        if self._pages.pool.num_used:
            return False
        self._pages.cache.reset()
        return True

    # ---------------------------------------------------------------------------------------------- planning a step

    def schedule(self) -> Plan:
        """Decide the next step. A plan without rows means: nothing can run (now); it need not be committed."""
        draft = StepDraft(self._next_step_id, self.limits.max_num_batched_tokens)
        self._next_step_id += 1
        self._schedule_running(draft)
        if not draft.has_preempted:
            self._admit_waiting(draft)
        if self._buckets is not None and draft.chunk_rows:
            draft.trim(self._buckets, self._sequences)
        return draft.to_plan()

    def _schedule_running(self, draft: StepDraft) -> None:
        page_size, num_groups, step_id, rows = self.limits.page_size, self.limits.num_groups, draft.step_id, draft.single_rows
        new_row = Row._make  # half the time of `Row(...)`, for each decoding sequence in each step
        # Preemption takes sequences from the end of the list, always behind the loop or at it.
        for i, seq in enumerate(self._running):
            if draft.budget == 0:
                return
            start = seq.num_computed_tokens
            if start < seq.rope_length:  # tokens known at admission are left: not a decode yet
                self._schedule_prefill(seq, i, draft)
                continue
            if start + 1 >= seq.max_length:  # a dispatched step samples its last token
                continue
            if start >= len(seq.page_tables[0]) * page_size:
                if not self._make_room(seq, num_groups, draft):
                    continue
                self._pages.grow(seq, start + 1, draft.page_writes)
            rows.append(new_row((seq.seq_id, seq.slot, start, 1, (), True, seq.params.logprobs, None, (), 0)))
            seq.num_computed_tokens = start + 1
            seq.num_pending_tokens += 1
            seq.last_step_id = step_id
            draft.budget -= 1

    def _schedule_prefill(self, seq: Sequence, i: int, draft: StepDraft) -> None:
        # Decodes behind in the list come first, so that a long prompt does not stall them; one token keeps the prefill moving.
        num_decodes = sum(1 for other in self._running[i + 1 :] if other.num_computed_tokens >= other.rope_length)
        num_tokens = self._chunk(seq, max(1, draft.budget - num_decodes))
        end = seq.num_computed_tokens + num_tokens
        if self._make_room(seq, self._pages.num_missing(seq, end), draft):
            self._pages.grow(seq, end, draft.page_writes)
            draft.add_chunk(seq, num_tokens)
            draft.num_reserved_pages += self._pages.num_reserved(seq)

    def _chunk(self, seq: Sequence, budget: int) -> int:
        want = seq.num_tokens - seq.num_computed_tokens
        return min(want, budget, self.limits.long_prefill_token_threshold or want)

    def _make_room(self, seq: Sequence, num_pages: int, draft: StepDraft) -> bool:
        """Have `num_pages` pages free for a running sequence, preempting from the end of the list. False: not in this step."""
        while self._pages.pool.num_free < num_pages:
            if self._shares.drop_idle():
                continue
            if self._pages.pool.num_free + self._pages.num_deferred + self._num_leaving() >= num_pages:
                return False  # preempting more would free nothing sooner than the commit of the dispatched step
            victim = self._running.pop()
            self._preempt(victim)
            draft.has_preempted = True
            if victim is seq:
                return False
        return True

    def _num_leaving(self) -> int:
        """Pages that running sequences drop when dispatched steps are committed."""
        return sum(
            self._pages.num_leaving(seq, self._shares.end_unshared(seq, seq.num_computed_tokens))
            for seq in self._running
            if self._is_dispatched(seq)
        )

    def _preempt(self, seq: Sequence) -> None:
        self._preemption_log.note(seq, len(self._running) + 1)
        self._give_back(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1
        self._num_preemptions += 1
        if self._is_dispatched(seq):
            self._set_aside.append(seq)
        else:
            self._queue.push(seq)

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Start waiting sequences while there are budget, slots and pages. One that does not fit blocks those behind it."""
        while draft.budget and self._free_slots:
            seq = self._queue.head(has_penalty_slot=bool(self._free_penalty_slots))
            if seq is None:
                return
            shared = self._shares.prefix_of(seq)
            prefix = self._pages.find_prefix(seq) if shared is None else shared
            if self._fits(seq, prefix, draft):
                self._queue.discard(seq)
                self._admit(seq, prefix, draft, is_query=shared is None)
            elif self._running or not self._shares.drop_idle():
                return

    def _fits(self, seq: Sequence, prefix: PageTables, draft: StepDraft) -> bool:
        """Whether the whole sequence, not just its first chunk, fits beside what the running ones hold and still need."""
        margin = self._watermark + draft.num_reserved_pages if self._running else 0
        return self._pages.num_admission_pages(seq.num_tokens, prefix) <= self._pages.pool.num_free - margin

    def _admit(self, seq: Sequence, prefix: PageTables, draft: StepDraft, *, is_query: bool) -> None:
        if is_query and self._pages.may_read_cache(seq):
            self._num_cache_queries += seq.num_tokens
            self._num_cache_hits += len(prefix[0]) * self.limits.page_size
        self._pages.take_prefix(seq, prefix)
        assert not (self.limits.has_recurrent_state and seq.num_computed_tokens), "no page holds the state before a prefix's end"
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
        if seq.started_s is None:
            seq.started_s = monotonic()
        self._shares.on_admitted(seq)
        seq.status = Status.RUNNING
        seq.slot = slot = self._free_slots.pop()
        seq.penalty_slot = self._free_penalty_slots.pop() if seq.params.needs_penalty_slot else None
        seq.rope_length = seq.num_tokens
        insort(self._running, seq, key=self._rank)
        draft.admissions.append(self._admission(seq, slot))
        draft.page_writes += [
            PageWrite(slot, group, i, page) for group, table in enumerate(seq.page_tables) for i, page in enumerate(table) if page
        ]
        num_tokens = self._chunk(seq, draft.budget)
        self._pages.grow(seq, seq.num_computed_tokens + num_tokens, draft.page_writes)
        draft.add_chunk(seq, num_tokens)
        draft.num_reserved_pages += self._pages.num_reserved(seq)

    def _admission(self, seq: Sequence, slot: int) -> Admission:
        has_penalties = seq.penalty_slot is not None
        return Admission(
            slot=slot,
            seq_id=seq.seq_id,
            params=seq.params,
            seed=seq.seed,
            num_computed_tokens=seq.num_computed_tokens,
            num_prompt_tokens=seq.num_prompt_tokens,
            rope_length=seq.rope_length,
            penalty_slot=seq.penalty_slot,
            token_ids=tuple(seq.token_ids) if has_penalties else (),
            stop_token_ids=masked_stop_ids(seq.params, self.limits.eos_token_ids) if has_penalties else (),
        )

    # ---------------------------------------------------------------------------------------------- results of a step

    def commit(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Take a step's results, in the order the plans were made. One event for each sequence with a new token or an end."""
        assert plan.step_id > self._committed_step_id, "plans are committed once and in order"
        self._committed_step_id = plan.step_id
        events: list[TokenEvent] = []
        page_size, eos, shares = self.limits.page_size, self.limits.eos_token_ids, self._shares
        has_shares = bool(shares)  # a commit ends shares and makes none
        find_sequence, emit = self._sequences.get, events.append
        for i, (row, token_id, logprobs) in enumerate(zip(plan.rows, result.token_ids, result.logprobs, strict=True)):
            seq = find_sequence(row.seq_id)
            if seq is None:
                continue  # ended while the step ran
            start = row.start
            end = start + row.num_tokens
            if end // page_size != start // page_size and token_id != -1:
                self._pages.register_full(seq, start, end)
            if row.num_prompt_logprobs is not None:
                collect(seq, start, result.prompt_logprobs[i] or [])
            if has_shares and token_id is not None and token_id != -1 and seq.status is Status.RUNNING:
                for child in shares.on_computed(seq, end):
                    self._queue.push(child)
            if end >= seq.drop_at and seq.status is Status.RUNNING:
                self._pages.drop_unseen(seq, shares.end_unshared(seq, end))
            if token_id is None:
                if row.num_pooled_tokens:
                    assert result.pooled is not None
                    events += self._pool(seq, row, result.pooled[i])
                continue
            seq.num_pending_tokens -= 1
            if token_id == -1:
                self._pages.forget(seq)  # what is not finite may have come from a page
                self._end(seq, FinishReason.ERROR)
                emit(end_event(seq, error=NOT_FINITE))
                continue
            token_ids = seq.token_ids
            token_ids.append(token_id)
            if token_id in eos or seq.params.stop_token_ids or len(token_ids) >= seq.max_length:
                self._end_if_stopped(seq)
            emit(token_event(seq, token_id, logprobs))
        self._pages.release_deferred(plan.step_id)
        self._requeue_set_aside()
        return events

    def _pool(self, seq: Sequence, row: Row, summed: np.ndarray) -> list[TokenEvent]:
        """Take a row's part of an embedding; the sequence ends with the last of its prompt."""
        if not collect_pooled(seq, row, summed):
            self._pages.forget(seq)
            self._end(seq, FinishReason.ERROR)
            return [end_event(seq, error=POOLED_NOT_FINITE)]
        if row.start + row.num_tokens < seq.num_prompt_tokens:
            return []
        self._end(seq, FinishReason.STOP)
        return [embedding_event(seq)]

    def _end_if_stopped(self, seq: Sequence) -> None:
        if check_stop(seq, self.limits.eos_token_ids):
            assert seq.finish_reason is not None
            self._end(seq, seq.finish_reason)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """Finish a sequence in any state."""
        if seq.status is Status.RUNNING:
            i = bisect_left(self._running, self._rank(seq), key=self._rank)
            assert self._running[i] is seq
            del self._running[i]
            self._give_back(seq)
        else:
            self._queue.discard(seq)
            self._set_aside = [other for other in self._set_aside if other is not seq]
        seq.status, seq.finish_reason = Status.FINISHED, reason
        for child in self._shares.on_ended(seq):
            self._queue.push(child)
        del self._sequences[seq.seq_id]
        siblings = self._requests[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.request_id]

    def _give_back(self, seq: Sequence) -> None:
        """Return pages and slots of a running sequence. Its slots may be taken by the next plan: steps run in order."""
        self._pages.release(seq, after_step=seq.last_step_id if self._is_dispatched(seq) else None)
        assert seq.slot is not None
        self._free_slots.append(seq.slot)
        seq.slot = None
        if seq.penalty_slot is not None:
            self._free_penalty_slots.append(seq.penalty_slot)
            seq.penalty_slot = None

    def _is_dispatched(self, seq: Sequence) -> bool:
        return seq.last_step_id > self._committed_step_id

    def _requeue_set_aside(self, *, is_void: bool = False) -> None:
        if not self._set_aside:
            return
        for seq in self._set_aside:
            if is_void:
                seq.num_pending_tokens = 0
            if not self._is_dispatched(seq):
                self._queue.push(seq)
        self._set_aside = [seq for seq in self._set_aside if self._is_dispatched(seq)]

    # ---------------------------------------------------------------------------------------------- figures and checks

    def stats(self, plan: Plan) -> StepStats:
        """Figures of a step and of the scheduler right now."""
        num_decode_rows = [row.token_ids for row in plan.rows].count(())
        return StepStats(
            step_id=plan.step_id,
            num_decode_rows=num_decode_rows,
            num_prefill_rows=len(plan.rows) - num_decode_rows,
            num_tokens=plan.num_tokens,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_used_pages=self._pages.pool.num_used,
            num_pages=self.limits.num_pages,
            num_preemptions=self._num_preemptions,
            num_cache_queries=self._num_cache_queries,
            num_cache_hits=self._num_cache_hits,
            num_kv_tokens=sum([seq.num_computed_tokens for seq in self._running]),
        )

    def check_integrity(self) -> None:
        """Assert that nothing is leaked or shared that must not be. For tests: it walks everything."""
        held = self._shares.owners() + self._pages.deferred_owners()
        check_pages(self._pages, self._running, held, self.limits)
        assert self._running == sorted(self._running, key=self._rank)
        check_slots(self._free_slots, [seq.slot for seq in self._running], self.limits.max_num_seqs)
        check_slots(self._free_penalty_slots, [seq.penalty_slot for seq in self._running], self.limits.max_penalty_slots)
        assert self.num_running + self.num_waiting == len(self._sequences), "a sequence is lost"
        assert sum(len(siblings) for siblings in self._requests.values()) == len(self._sequences)
