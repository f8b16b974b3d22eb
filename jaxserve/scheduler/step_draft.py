"""A step being put together: rows, admissions, page writes and what is left of the token budget. Becomes a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.core.buckets import Buckets
from jaxserve.core.plan import Admission, PageWrite, Plan, Row
from jaxserve.core.sequence import Sequence
from jaxserve.scheduler.pooling import num_pooled_tokens
from jaxserve.scheduler.prompt_logprobs import chunk_targets


class StepDraft:
    """The step so far.

    Attributes:
        budget: Tokens that may still be scheduled.
        num_reserved_pages: Pages that running sequences still need for tokens they already have (unfinished prefills).
        has_preempted: A sequence was preempted for this step, so no waiting one may start.
    """

    __slots__ = ("admissions", "budget", "chunk_rows", "has_preempted", "num_reserved_pages", "page_writes", "single_rows", "step_id")

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.num_reserved_pages = 0
        self.has_preempted = False
        self.single_rows: list[Row] = []
        self.chunk_rows: list[Row] = []
        self.admissions: list[Admission] = []
        self.page_writes: list[PageWrite] = []

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule tokens that the host knows; advances the sequence."""
        start, slot = sequence.num_computed_tokens, sequence.slot
        assert 0 < num_tokens <= self.budget and slot is not None
        end = start + num_tokens
        is_embedding = sequence.request.pooling is not None
        is_sampled = end == sequence.num_tokens and not is_embedding
        targets = chunk_targets(sequence, start, num_tokens)
        row = Row(
            seq_id=sequence.seq_id,
            slot=slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=tuple(sequence.token_ids[start:end]),
            is_sampled=is_sampled,
            num_logprobs=sequence.params.logprobs if is_sampled else None,
            num_prompt_logprobs=sequence.params.prompt_logprobs if targets else None,
            prompt_targets=targets,
            num_pooled_tokens=num_pooled_tokens(sequence, start, num_tokens) if is_embedding else 0,
        )
        (self.single_rows if num_tokens == 1 else self.chunk_rows).append(row)
        sequence.num_computed_tokens = end
        sequence.num_pending_tokens += is_sampled
        sequence.last_step_id = self.step_id
        self.budget -= num_tokens

    def trim(self, buckets: Buckets, sequences: Mapping[int, Sequence]) -> None:
        """Shorten the last unfinished chunk to a bucket boundary, when its prefill still takes as many steps.

        A step just above a boundary would be padded to the next bucket: much work for few tokens.
        """
        total = len(self.single_rows) + sum(row.num_tokens for row in self.chunk_rows)
        boundary = buckets.boundary_below(total)
        if boundary in (0, total):
            return
        for i in reversed(range(len(self.chunk_rows))):
            row = self.chunk_rows[i]
            sequence = sequences[row.seq_id]
            if row.start + row.num_tokens == sequence.num_tokens:
                continue
            chunk, kept, left = row.num_tokens, row.num_tokens - (total - boundary), sequence.num_tokens - row.start
            if kept > 1 and -(-(left - kept) // chunk) == -(-(left - chunk) // chunk):
                targets = row.prompt_targets[:kept]
                self.chunk_rows[i] = row._replace(
                    num_tokens=kept,
                    token_ids=row.token_ids[:kept],
                    prompt_targets=targets,
                    num_pooled_tokens=min(row.num_pooled_tokens, kept),  # of an unfinished chunk all count, or none
                )
                sequence.num_computed_tokens = row.start + kept
            return

    def to_plan(self) -> Plan:
        """The finished step, single-token rows first."""
        return Plan(
            step_id=self.step_id,
            rows=(*self.single_rows, *self.chunk_rows),
            admissions=tuple(self.admissions),
            page_writes=tuple(self.page_writes),
        )
