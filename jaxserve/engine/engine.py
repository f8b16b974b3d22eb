"""One turn of the host loop: schedule, run, commit, emit. Everything an engine does for a token passes through `step`.

Knows no model, no text and no sockets: the runner is anything that turns a Plan into a StepResult (`ModelRunner`, or
`testing.CountingRunner`, whose tokens a person can compute). Not thread-safe: `engine.loop` gives it a thread of its own.
"""

from __future__ import annotations

import logging
from typing import Protocol

from jaxserve.core.events import StepResult, StepStats, TokenEvent
from jaxserve.core.plan import Plan
from jaxserve.core.request import Request
from jaxserve.engine.info import EngineInfo
from jaxserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class PendingStep(Protocol):
    """A dispatched step."""

    def wait(self) -> StepResult:
        """Blocks until the step's tokens are on the host; raises if the step failed."""


class Runner(Protocol):
    """What executes Plans."""

    def run(self, plan: Plan) -> PendingStep:
        """Dispatches the plan without waiting for it."""

    def reset(self) -> None:
        """Reallocates pages and slot state after a failed step."""

    def close(self) -> None:
        """Frees the device."""


class Engine:
    """Scheduler and runner, turned step by step."""

    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.info = info
        self.last_stats: StepStats | None = None
        self._num_failed_in_row = 0

    def add(self, request: Request) -> None:
        """Queues a request; raises InvalidRequest for one that could never run."""
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """Ends a request, or one of its sequences, wherever it is; an unknown id is not an error (it may just have ended)."""
        return self.scheduler.abort(request_id, index)

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Advances every scheduled sequence by one step and returns what came of it."""
        plan = self.scheduler.schedule()
        if not plan.rows:
            return self.scheduler.commit(plan, StepResult(token_ids=[], logprobs=[], prompt_logprobs=[]))
        try:
            result = self.runner.run(plan).wait()
        except Exception as error:
            return self._fail(error)
        self._num_failed_in_row = 0
        events = self.scheduler.commit(plan, result)
        self.last_stats = self.scheduler.stats(plan)
        return events

    def close(self) -> None:
        """Frees the device; the engine cannot be used afterwards."""
        self.runner.close()

    def _fail(self, error: Exception) -> list[TokenEvent]:
        """Ends what was running, rebuilds device state, and goes on; a second failure in a row is raised."""
        logger.error("a step failed; its sequences end with an error", exc_info=error)
        self._num_failed_in_row += 1
        if self._num_failed_in_row > 1:
            raise error
        events = self.scheduler.fail_running(f"the step failed: {type(error).__name__}: {' '.join(str(error).split())}")
        self.runner.reset()
        return events
