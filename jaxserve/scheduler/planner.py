"""Station 4 of a token: which sequences compute how many tokens in the next step, and in which pages.

Running sequences come first, in rank order, each with one token (decode) or a chunk of its prompt; then waiting ones, each only if all of
it fits beside what runs. Where pages run out, the last running sequence is preempted, and then no waiting one starts.
Next: `scheduler.step_draft`, `scheduler.sequence_pages`; `scheduler.results` takes what the step gave.
"""

from __future__ import annotations

from jaxserve.config import SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.core.plan import Admission, PageWrite, Plan, Row
from jaxserve.core.sequence import Sequence
from jaxserve.scheduler.roster import Roster
from jaxserve.scheduler.sequence_pages import PageTables
from jaxserve.scheduler.step_draft import StepDraft
from jaxserve.scheduler.stopping import masked_stop_ids

WATERMARK = 0.01
"""Share of the pages that a waiting sequence must leave free while others run: room for them to grow, against thrashing."""


class Planner:
    """Makes the plans, one after the other.

    Attributes:
        num_planned: Plans so far; the next one has this step id.
        num_cache_queries, num_cache_hits: Tokens looked for and found in the prefix cache.
    """

    def __init__(self, limits: SchedulerLimits, buckets: Buckets | None, roster: Roster) -> None:
        self._limits = limits
        self._buckets = buckets
        self._roster = roster
        self._pages = roster.pages
        self._watermark = int(WATERMARK * limits.num_pages)
        self.num_planned = 0
        self.num_cache_queries = 0
        self.num_cache_hits = 0

    def plan(self) -> Plan:
        """The next step; without rows when nothing can run now."""
        draft = StepDraft(self.num_planned, self._limits.max_num_batched_tokens)
        self.num_planned += 1
        self._schedule_running(draft)
        if not draft.has_preempted:
            self._admit_waiting(draft)
        if self._buckets is not None and draft.chunk_rows:
            draft.trim(self._buckets, self._roster.sequences)
        return draft.to_plan()

    def _schedule_running(self, draft: StepDraft) -> None:
        step_id, rows = draft.step_id, draft.single_rows
        new = tuple.__new__  # makes a Row in half the time of `Row(...)`, for each decoding sequence in each step
        # Preemption takes sequences from the end of the list, always behind the loop or at it.
        for i, seq in enumerate(self._roster.running):
            if draft.budget == 0:
                return
            start = seq.num_computed_tokens
            if start >= seq.decodes_until and not self._may_decode(seq, i, draft):
                continue
            rows.append(new(Row, (seq.seq_id, seq.slot, start, 1, (), True, seq.params.logprobs, None, (), 0)))
            seq.num_computed_tokens = start + 1
            seq.num_pending_tokens += 1
            seq.last_step_id = step_id
            draft.budget -= 1

    def _may_decode(self, seq: Sequence, i: int, draft: StepDraft) -> bool:
        """Whether a running sequence computes its last sampled token in this step, for which it gets a page if it needs one.

        One whose prompt is not computed is given a chunk of it instead.
        """
        start = seq.num_computed_tokens
        if start < seq.rope_length:  # tokens known at admission are left
            self._schedule_prefill(seq, i, draft)
            return False
        if start + 1 >= seq.max_length:  # a dispatched step samples its last token
            return False
        if start >= len(seq.page_tables[0]) * self._limits.page_size:
            if not self._make_room(seq, self._limits.num_groups, draft):
                return False
            self._pages.grow(seq, start + 1, draft.page_writes)
        seq.decodes_until = min(len(seq.page_tables[0]) * self._limits.page_size, seq.max_length - 1)
        return True

    def _schedule_prefill(self, seq: Sequence, i: int, draft: StepDraft) -> None:
        # Decodes behind in the list come first, so that a long prompt does not stall them; one token keeps the prefill moving.
        behind = self._roster.running[i + 1 :]
        num_decodes = sum(1 for other in behind if other.num_computed_tokens >= other.rope_length)
        num_tokens = self._chunk(seq, max(1, draft.budget - num_decodes))
        end = seq.num_computed_tokens + num_tokens
        if self._make_room(seq, self._pages.num_missing(seq, end), draft):
            self._add_chunk(seq, num_tokens, draft)

    def _chunk(self, seq: Sequence, budget: int) -> int:
        want = seq.num_tokens - seq.num_computed_tokens
        return min(want, budget, self._limits.long_prefill_token_threshold or want)

    def _add_chunk(self, seq: Sequence, num_tokens: int, draft: StepDraft) -> None:
        self._pages.grow(seq, seq.num_computed_tokens + num_tokens, draft.page_writes)
        draft.add_chunk(seq, num_tokens)
        draft.num_reserved_pages += self._pages.num_reserved(seq)

    def _make_room(self, seq: Sequence, num_pages: int, draft: StepDraft) -> bool:
        """Have `num_pages` pages free for a running sequence, preempting from the end of the list. False: not in this step."""
        roster, pool = self._roster, self._pages.pool
        while pool.num_free < num_pages:
            if roster.shares.drop_idle():
                continue
            if pool.num_free + self._pages.num_deferred + roster.num_leaving() >= num_pages:
                return False  # preempting more would free nothing sooner than the commit of the dispatched step
            victim = roster.running.pop()
            roster.preempt(victim)
            draft.has_preempted = True
            if victim is seq:
                return False
        return True

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Start waiting sequences while there are budget, slots and pages. One that does not fit blocks those behind it."""
        roster = self._roster
        while draft.budget and roster.free_slots:
            seq = roster.queue.head(has_penalty_slot=bool(roster.free_penalty_slots))
            if seq is None:
                return
            shared = roster.shares.prefix_of(seq)
            prefix = self._pages.find_prefix(seq) if shared is None else shared
            if self._fits(seq, prefix, draft):
                self._admit(seq, prefix, draft, is_query=shared is None)
            elif roster.running or not roster.shares.drop_idle():
                return

    def _fits(self, seq: Sequence, prefix: PageTables, draft: StepDraft) -> bool:
        """Whether the whole sequence, not just its first chunk, fits beside what the running ones hold and still need."""
        margin = self._watermark + draft.num_reserved_pages if self._roster.running else 0
        return self._pages.num_admission_pages(seq.num_tokens, prefix) <= self._pages.pool.num_free - margin

    def _admit(self, seq: Sequence, prefix: PageTables, draft: StepDraft, *, is_query: bool) -> None:
        if is_query and self._pages.may_read_cache(seq):
            self.num_cache_queries += seq.num_tokens
            self.num_cache_hits += len(prefix[0]) * self._limits.page_size
        slot = self._roster.start(seq, prefix)
        draft.admissions.append(self._admission(seq, slot))
        draft.page_writes += [
            PageWrite(slot, group, i, page) for group, table in enumerate(seq.page_tables) for i, page in enumerate(table) if page
        ]
        self._add_chunk(seq, self._chunk(seq, draft.budget), draft)

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
            stop_token_ids=masked_stop_ids(seq.params, self._limits.eos_token_ids) if has_penalties else (),
        )
