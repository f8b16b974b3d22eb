"""A pytest plugin for `scripts/gates`: a skipped test is a failure there, and the counts of what was proved are printed at the end.

Counted by itself: shapes that Hypothesis drew, programs lowered for cards that are not here, the kernels in them. A test that draws by
other means adds its own with `record_property("shapes", n)`, likewise "programs" and "kernels".
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

COUNTED = ("shapes", "kernels", "programs")


class GatesReport:
    """What one run counted."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.kernels: set[tuple[str, bytes]] = set()
        self.skipped: list[str] = []

    def watch_lowering(self) -> None:
        """Counts what is lowered for a card: kernels by `deviceless.lower_for`, whole steps by `WholeStep.lower`."""
        from jaxserve.bench.whole_step import WholeStep
        from pallas_kernels import deviceless

        def counting(lower: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **options: Any) -> Any:
                lowered = lower(*args, **options)
                self.counts["programs"] += 1
                self.kernels.update(deviceless.kernel_payloads(lowered))
                return lowered

            return counted

        for owner, name in ((deviceless, "lower_for"), (WholeStep, "lower")):
            setattr(owner, name, counting(getattr(owner, name)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up what a test recorded, and notes a skip."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)
        if report.when == "call":
            self.counts.update({name: int(value) for name, value in report.user_properties if name in COUNTED})

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Adds the examples of a Hypothesis test."""
        statistics = getattr(item, "hypothesis_statistics", "")
        self.counts["shapes"] += sum(map(int, re.findall(r"(\d+) passing,", statistics)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a module that skips itself."""
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails the run where anything was skipped."""
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The card and the JSON line."""
        for name in self.skipped:
            terminalreporter.write_line(f"SKIPPED, which the gates count as a failure: {name}", red=True)
        self.counts["kernels"] += len(self.kernels)
        num_passed = len(terminalreporter.stats.get("passed", ()))
        seconds = round(time.perf_counter() - self.started, 1)
        counts = {"gates": "skipped" if self.skipped else "ran", "tests": num_passed, **self.counts, "seconds": seconds}
        terminalreporter.section("gates")
        terminalreporter.write_line(
            f"{num_passed} tests passed: {counts['shapes']} shapes drawn, {counts['programs']} programs compiled for cards that are not "
            f"here, {counts['kernels']} different kernels in them, {seconds} s"
        )
        terminalreporter.write_line(json.dumps(counts))


def pytest_configure(config: pytest.Config) -> None:
    """Registers the report. By now `conftest.py` has set the environment that JAX reads."""
    report = GatesReport()
    report.watch_lowering()
    config.pluginmanager.register(report)
