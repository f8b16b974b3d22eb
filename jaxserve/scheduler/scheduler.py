"""Continuous batching: at every step, which sequences run, how many tokens each computes, and in which pages.

There is no prefill phase and no decode phase. Each step gives sequences tokens, under one budget, so that their computed tokens catch
up with their known ones: running sequences first, then waiting ones. When pages run out, the last running sequence in rank order
is preempted: it gives up its pages and is computed again later. Ranks (`waiting_queue`) order waiting and running alike, so the first
sequence always gets on, and with it, in the end, all others.

`schedule` may be called again before the previous plan is committed (the overlapped loop): sampled tokens that the host does not
know yet are counted in `num_pending_tokens`, and pages that a dispatched step may still write are freed at its commit.

Knows no shapes, no device and no text. Next: `scheduler.roster`, `scheduler.planner`, `scheduler.results`, then `jaxserve.engine.engine`.
"""

from __future__ import annotations

from itertools import count

from jaxserve.config import SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.core.events import StepResult, StepStats, TokenEvent
from jaxserve.core.plan import Plan
from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason
from jaxserve.errors import InvalidRequest
from jaxserve.scheduler.arrival import check_arrival, make_sequences
from jaxserve.scheduler.planner import Planner
from jaxserve.scheduler.results import take_results
from jaxserve.scheduler.roster import Roster
from jaxserve.scheduler.token_events import end_event


class Scheduler:
    """Requests in, plans out, results in, events out. Not thread-safe: it belongs to the step loop.

    Attributes:
        roster: All sequences that are not finished. Others than this class only look at it.
    """

    def __init__(self, limits: SchedulerLimits, buckets: Buckets | None = None) -> None:
        self.limits = limits
        self.roster = Roster(limits)
        self._planner = Planner(limits, buckets, self.roster)
        self._seq_ids = count()

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self.roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no slot: waiting, preempted, or waiting for their prompt to be computed by a sibling."""
        return self.roster.num_waiting

    @property
    def num_used_pages(self) -> int:
        """Pages held by sequences, or by a dispatched step that may still write them."""
        return self.roster.pages.pool.num_used

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self.roster.num_preemptions

    @property
    def num_cache_queries(self) -> int:
        """Tokens looked for in the prefix cache so far."""
        return self._planner.num_cache_queries

    @property
    def num_cache_hits(self) -> int:
        """Tokens found there so far."""
        return self._planner.num_cache_hits

    @property
    def has_work(self) -> bool:
        """True while any sequence is not finished."""
        return bool(self.roster.sequences)

    def add(self, request: Request) -> None:
        """Accept a request: its n sequences wait. Raises `InvalidRequest` when it can never be served."""
        if request.request_id in self.roster.requests:
            raise InvalidRequest(
                f"request id {request.request_id!r} is being served already; give each request its own.", param="request_id"
            )
        check_arrival(request, self.limits)
        self.roster.add(make_sequences(request, self.limits, self._seq_ids))

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """End a request, or one sequence of it, in any state. An unknown or finished one gives no events."""
        chosen = [s for s in self.roster.requests.get(request_id, ()) if index is None or s.index == index]
        # Children first: ending the first sequence would make a child compute the prompt.
        for sequence in reversed(chosen):
            self.roster.end(sequence, FinishReason.ABORT)
        return [end_event(sequence) for sequence in chosen]

    def schedule(self) -> Plan:
        """Decide the next step. A plan without rows means: nothing can run (now); it need not be committed."""
        return self._planner.plan()

    def commit(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Take a step's results, in the order the plans were made. One event for each sequence with a new token or an end."""
        assert plan.step_id > self.roster.committed_step_id, "plans are committed once and in order"
        self.roster.committed_step_id = plan.step_id
        events = take_results(self.roster, self.limits, plan, result)
        self.roster.pages.release_deferred(plan.step_id)
        self.roster.requeue_set_aside()
        return events

    def fail_running(self, message: str) -> list[TokenEvent]:
        """The device lost its state: every running sequence ends with an error, all pages are free, no prefix is known.

        Dispatched steps are void; waiting sequences go on. The caller resets the runner.
        """
        roster = self.roster
        roster.committed_step_id = self._planner.num_planned - 1
        failed = list(roster.running)
        for sequence in failed:
            roster.end(sequence, FinishReason.ERROR)
        roster.shares.forget_pages()
        roster.pages.release_deferred(roster.committed_step_id)
        roster.requeue_set_aside(is_void=True)
        roster.pages.cache.reset()
        return [end_event(sequence, error=message) for sequence in failed]

    def reset_prefix_cache(self) -> bool:
        """Forget all known prefixes. Refused (False) while any page is in use: running sequences would register theirs again."""
        if self.roster.pages.pool.num_used:
            return False
        self.roster.pages.cache.reset()
        return True

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
            num_used_pages=self.num_used_pages,
            num_pages=self.limits.num_pages,
            num_preemptions=self.num_preemptions,
            num_cache_queries=self.num_cache_queries,
            num_cache_hits=self.num_cache_hits,
            num_kv_tokens=sum([seq.num_computed_tokens for seq in self.roster.running]),
        )

    def check_integrity(self) -> None:
        """Assert that nothing is leaked or shared that must not be. For tests: it walks everything."""
        self.roster.check_integrity()
