"""What the engine process makes of its orders."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from jaxserve.engine import build, link_server
from jaxserve.engine.info import EngineInfo

main_module = importlib.import_module("jaxserve.engine.__main__")


def test_nothing_slow_is_imported_before_the_orders_are_read() -> None:
    # Until then a child would outlive a parent that is killed.
    for name in ("jaxserve.engine.__main__", "jaxserve.serve.__main__"):
        code = f"import sys, {name}; print([m for m in ('jax', 'grpc', 'starlette') if m in sys.modules])"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


class Reports:
    """In place of the pipe to the supervisor."""

    def __init__(self, fd: int) -> None:
        self.facts: dict[str, Any] = {}

    def stage(self, name: str, seconds: float, detail: str = "") -> None:
        pass

    def ready(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    async def beat(self) -> None:
        pass


@pytest.mark.parametrize(("max_waiting", "expected"), [(None, 4 * 8), (5, 5)])
def test_limits_come_from_the_orders_or_the_engine(
    engine, engine_info: EngineInfo, monkeypatch: pytest.MonkeyPatch, max_waiting: int | None, expected: int
) -> None:
    reports = Reports(0)
    orders = {
        "config": {"model": "m", "async_scheduling": False},
        "server": {"max_waiting": max_waiting, "stall_timeout": 7.0},
        "engine_address": "unix:/x",
        "max_host_bytes": 12345,
        "report_fd": 0,
    }
    served: dict[str, Any] = {}

    def run_engine_process(engine: Any, info: EngineInfo, address: str, on_ready: Any, **options: Any) -> int:
        served.update(info=info, address=address, **options)
        on_ready()
        return 0

    def build_engine(config: Any, stage: Any, *, max_host_bytes: int | None) -> Any:
        assert (config.model, config.async_scheduling, max_host_bytes) == ("m", False, 12345)
        return engine

    engine.close = lambda: served.update(is_closed=True)
    monkeypatch.setattr(main_module, "read_orders", lambda: orders)
    monkeypatch.setattr(main_module, "Reports", lambda fd: reports)
    monkeypatch.setattr(link_server, "run_engine_process", run_engine_process)
    monkeypatch.setattr(build, "build_engine", build_engine)
    assert main_module.main() == 0
    assert served["info"].max_waiting == expected
    assert (served["address"], served["stall_timeout_s"], served["is_closed"]) == ("unix:/x", 7.0, True)
    assert served["beat"] == reports.beat
    assert reports.facts == asdict(engine_info) | {"max_waiting": expected}
