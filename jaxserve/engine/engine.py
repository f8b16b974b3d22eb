"""One turn of the host loop: schedule, run, commit, emit. Everything an engine does for a token passes through `step`.

There are two loops with the same tokens. The *plain* one runs a step to its end before it plans the next. The *overlapped* one, the
default, plans and dispatches step N+1 while the device runs step N, and commits N meanwhile: the device never waits for the host.

Knows no model, no text and no sockets: the runner is anything that turns a Plan into a StepResult (`ModelRunner`, or
`testing.CountingRunner`, whose tokens a person can compute). Not thread-safe: `engine.loop` gives it a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
from typing import NamedTuple, Protocol

from jaxserve.core.events import StepResult, StepStats, TokenEvent
from jaxserve.core.plan import Plan
from jaxserve.core.request import Request
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.totals import Totals
from jaxserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_IDLE_TURNS = 100
"""Turns in a row that may plan nothing while there is work. A preemption costs one; more of them mean that the scheduler is stuck."""


class PendingStep(Protocol):
    """A dispatched step."""

    def wait(self) -> StepResult:
        """Blocks until the step's tokens are on the host; raises if the step failed."""


class Runner(Protocol):
    """What executes Plans. Steps run in the order of their dispatch; each sees the slots and pages that the one before it left."""

    @property
    def num_late_compiles(self) -> int:
        """Programs compiled by steps, after warm-up: should stay 0."""

    def run(self, plan: Plan) -> PendingStep:
        """Dispatches the plan without waiting for it."""

    def reset(self) -> None:
        """Reallocates pages and slot state after a failed step."""

    def close(self) -> None:
        """Frees the device."""


class _Dispatched(NamedTuple):
    plan: Plan
    pending: PendingStep


class Engine:
    """Scheduler and runner, turned step by step.

    Args:
        async_scheduling: Turn the overlapped loop, not the plain one.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo, *, async_scheduling: bool = True) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.info = info
        self.async_scheduling = async_scheduling
        self._last_plan: Plan | None = None  # committed
        self._in_flight: _Dispatched | None = None  # of the overlapped loop, between two turns
        self._totals = Totals()
        self._num_failed_in_row = 0
        self._num_idle_in_row = 0

    def add(self, request: Request) -> None:
        """Queues a request; raises InvalidRequest for one that could never run."""
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """Ends a request, or one of its sequences, wherever it is; an unknown id is not an error (it may just have ended)."""
        return self.scheduler.abort(request_id, index)

    @property
    def last_stats(self) -> StepStats | None:
        """Figures of the step that was committed last, and of the scheduler right now; None before the first."""
        return None if self._last_plan is None else self.scheduler.stats(self._last_plan)

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs, and while a step is in flight: its pages are free only after its commit."""
        return self._in_flight is not None or self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """One turn of the loop: advances every scheduled sequence by one step, and returns what came of the step that ended."""
        return self._turn_overlapped() if self.async_scheduling else self._turn_plain()

    def _turn_plain(self) -> list[TokenEvent]:
        """Schedules a step, runs it, waits for it, commits it."""
        plan = self.scheduler.schedule()
        if not plan.rows:
            return self._idle()
        try:
            result = self.runner.run(plan).wait()
        except Exception as error:
            return self._fail(error)
        return self._commit(plan, result)

    def _turn_overlapped(self) -> list[TokenEvent]:
        """Schedules step N+1 and dispatches it while N runs, then waits for N and commits N."""
        running = self._in_flight
        plan = self.scheduler.schedule()
        if not plan.rows and running is None:
            return self._idle()
        try:
            dispatched = _Dispatched(plan, self.runner.run(plan)) if plan.rows else None
            result = running.pending.wait() if running else None
        except Exception as error:
            return self._fail(error)
        events = self._commit(running.plan, result) if running and result else []
        self._in_flight = dispatched
        return events

    def _commit(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        self._num_failed_in_row = self._num_idle_in_row = 0
        events = self.scheduler.commit(plan, result)
        self._last_plan = plan
        self._totals.add(plan.num_tokens, events)
        return events

    def _idle(self) -> list[TokenEvent]:
        """Nothing could be planned and nothing runs: fine after a preemption, but never for long while there is work."""
        self._num_idle_in_row += 1
        assert self._num_idle_in_row <= MAX_IDLE_TURNS or not self.has_work, (
            f"{self.scheduler.num_running} sequences run and {self.scheduler.num_waiting} wait, but nothing is scheduled"
        )
        return []

    def _fail(self, error: Exception) -> list[TokenEvent]:
        """Ends what was running, rebuilds device state, and goes on; a second failure in a row is raised.

        A step dispatched behind the failed one is void too: it read what the failed one should have written.
        """
        logger.error("a step failed; its sequences end with an error", exc_info=error)
        self._in_flight = None
        self._num_failed_in_row += 1
        if self._num_failed_in_row > 1:
            raise error
        events = self.scheduler.fail_running(f"the step failed: {type(error).__name__}: {' '.join(str(error).split())}")
        self.runner.reset()
        return events

    def reset_prefix_cache(self) -> bool:
        """Forgets all known prefixes; refused (False) while any page is in use."""
        return self.scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Figures right now, and totals since the engine started."""
        return EngineStats(
            has_work=self.has_work,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_used_pages=self.scheduler.num_used_pages,
            num_pages=self.info.num_pages,
            num_preemptions=self.scheduler.num_preemptions,
            num_cache_queries=self.scheduler.num_cache_queries,
            num_cache_hits=self.scheduler.num_cache_hits,
            num_compiles=self.runner.num_late_compiles,
            **self._totals.figures(),
        )

    def close(self) -> None:
        """Frees the device; the engine cannot be used afterwards."""
        if self._in_flight is not None:
            with contextlib.suppress(Exception):  # nobody asks any more what became of it
                self._in_flight.pending.wait()
            self._in_flight = None
        self.runner.close()
