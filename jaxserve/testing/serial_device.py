"""The clock of a pretended device, and a step that takes its time on it. Next: `testing.counting_runner`."""

from __future__ import annotations

import time
from collections.abc import Set

from jaxserve.core.events import StepResult


class SerialDevice:
    """The clock of a pretended device: steps begin in the order of their dispatch, each when the one before has ended."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._busy_until_s = 0.0

    def dispatch(self) -> float:
        """When (`time.perf_counter`) a step dispatched now will have ended."""
        self._busy_until_s = max(self._busy_until_s, time.perf_counter()) + self._step_s
        return self._busy_until_s


class PretendedStep:
    """A step whose outcome is known; `wait` pretends that the device takes until `ready_s`."""

    def __init__(self, outcome: StepResult | Exception, read_pages: Set[int], written_pages: Set[int], ready_s: float) -> None:
        self._outcome = outcome
        self.read_pages = read_pages
        self.written_pages = written_pages
        self._ready_s = ready_s

    def wait(self) -> StepResult:
        """The result, not before the step's pretended end; raises what the step was told to fail with."""
        time.sleep(max(0.0, self._ready_s - time.perf_counter()))
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome
