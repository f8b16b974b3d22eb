"""A scheduler around a `CountingRunner`, turned step by step, with the checks that hold at every step. Next: `scheduler.scheduler`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.plan import Plan
from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.testing.counting_runner import CountingRunner
from jaxserve.testing.serial_device import PretendedStep


@dataclass(slots=True)
class Output:
    """Everything one sequence has emitted."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    embedding: list[float] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


class CountingLoop:
    """Scheduler and CountingRunner turned step by step, with the checks that hold at every step.

    `step` is the plain loop; `dispatch` and `collect` are its halves, for plans in flight. `outputs` maps (request_id, index).
    """

    def __init__(self, limits: SchedulerLimits, *, buckets: Buckets | None = None, **runner_options: Any) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, buckets)
        self.runner = CountingRunner(
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_num_seqs=limits.max_num_seqs,
            groups=limits.groups,
            **{"tokens_of": self._tokens_of, **runner_options},
        )
        self.in_flight: deque[tuple[Plan, PretendedStep]] = deque()
        self.outputs: dict[tuple[str, int], Output] = {}

    def embed(self, request_id: str, prompt: Sequence[int], *, pooling: str = "last", salt: str | None = None) -> Request:
        """Queue an embedding."""
        params = PoolingParams(pooling=pooling)
        request = Request(request_id=request_id, prompt_token_ids=tuple(prompt), pooling=params, cache_salt=salt)
        self.scheduler.add(request)
        return request

    def add(self, request_id: str, prompt: Sequence[int], *, priority: int = 0, salt: str | None = None, **params: Any) -> Request:
        """Queue a request, greedy unless `params` say otherwise."""
        checked = SamplingParams(**{"temperature": 0.0, **params})
        request = Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=checked, priority=priority, cache_salt=salt)
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one sequence of it."""
        self.take(self.scheduler.abort(request_id, index))

    def dispatch(self) -> Plan:
        """Schedule and run a step; its results wait for `collect`."""
        plan = self.scheduler.schedule()
        assert (
            plan.num_tokens <= self.limits.max_num_batched_tokens
            and len(plan.rows) <= self.scheduler.num_running <= self.limits.max_num_seqs
        )
        pool = self.scheduler.roster.pages.pool
        self.runner.poison([page for page in range(1, pool.num_pages) if not pool.ref_count(page) and not pool.is_cached(page)])
        for _plan, pending in self.in_flight:
            new = {write.page for write in plan.page_writes if pool.ref_count(write.page) == 1}
            taken = new & (pending.read_pages | pending.written_pages)
            assert not taken, f"pages {taken} are handed out while a dispatched step uses them"
        if plan.rows:
            pending = self.runner.run(plan)
            freed = {page for page in pending.read_pages | pending.written_pages if not pool.ref_count(page)}
            assert not freed, f"pages {freed} are used but belong to nobody"
            self.in_flight.append((plan, pending))
        return plan

    def _tokens_of(self, seq_id: int) -> Sequence[int]:
        return self.scheduler.roster.sequences[seq_id].token_ids

    def collect(self) -> None:
        """Commit the oldest dispatched step."""
        plan, pending = self.in_flight.popleft()
        self.take(self.scheduler.commit(plan, pending.wait()))

    def step(self) -> Plan:
        """One turn of the plain loop."""
        plan = self.dispatch()
        while self.in_flight:
            self.collect()
        return plan

    def run(self, max_steps: int = 10_000) -> list[Plan]:
        """Steps until nothing is left; each must schedule something."""
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
            assert plans[-1].rows, "there is work but nothing was scheduled"
            assert len(plans) <= max_steps, "the work does not end"
        return plans

    def take(self, events: Sequence[TokenEvent]) -> None:
        """Add events to the outputs."""
        for event in events:
            output = self.outputs.setdefault((event.request_id, event.index), Output())
            assert output.finish_reason is None, "an event after the end"
            assert event.token_ids or event.finish_reason is not None, "an event without news"
            assert event.prompt_logprobs is None or not output.token_ids, "prompt logprobs after the first event"
            output.token_ids += event.token_ids
            output.logprobs += event.logprobs or []
            output.prompt_logprobs = output.prompt_logprobs or event.prompt_logprobs
            output.embedding = event.embedding
            output.num_cached_tokens = event.num_cached_tokens
            output.finish_reason, output.stop_reason, output.error = event.finish_reason, event.stop_reason, event.error
