"""How often and how fast a child is started again, and what it is told, with children that only end."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.config import ServerConfig
from jaxserve.serve import child, supervisor
from jaxserve.serve.child import Child, Keeper, Part

SERVES = """
import json, os, sys
orders = json.load(sys.stdin)
os.write(orders["report_fd"], json.dumps({"ready": {"pid": os.getpid()}}).encode() + b"\\n")
"""


def part(script: str, **orders: str) -> Part:
    return Part("the child", [sys.executable, "-c", script], orders)


def keep(script: str, max_restarts: int) -> tuple[int, Keeper]:
    """Runs the child until it is given up; the status and what kept it."""

    async def run() -> tuple[int, Keeper]:
        keeper = Keeper(part(script), max_restarts, lambda *stage: None)
        return await keeper.run(), keeper

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_delays(monkeypatch, caplog):
    monkeypatch.setattr(child, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child, "MAX_DELAY_S", 0.03)
    caplog.set_level(logging.INFO)


def test_delays_double_up_to_a_bound_and_restarts_are_bounded(caplog):
    status, _ = keep("raise SystemExit(3)", 3)
    assert status == 1
    assert caplog.messages == [
        "the child ended with status 3; restart 1 of at most 3 follows in 0.01 s",
        "the child ended with status 3; restart 2 of at most 3 follows in 0.02 s",
        "the child ended with status 3; restart 3 of at most 3 follows in 0.03 s",
        "the child ended with status 3 after 3 restarts in 10 minutes (--max-restarts 3); ending the server",
    ]


def test_no_restart_is_made_when_none_is_allowed(caplog):
    status, _ = keep(SERVES + "os.kill(os.getpid(), 9)", 0)
    assert status == 1
    assert caplog.messages == ["the child was killed by SIGKILL after 0 restarts in 10 minutes (--max-restarts 0); ending the server"]


def test_one_that_cannot_start_as_told_is_not_started_again(caplog):
    status, keeper = keep("raise SystemExit(2)", 5)
    assert status == 2
    assert not keeper.first_ready.done()
    assert caplog.messages == ["the child ended with status 2; ending the server"]


def test_once_it_has_served_every_end_is_worth_a_restart(caplog):
    status, keeper = keep(SERVES + "os.close(orders['report_fd']); import time; time.sleep(0.2); sys.exit(2)", 1)
    assert status == 1
    assert keeper.first_ready.result()["pid"]
    assert caplog.messages[:2] == ["the child ended with status 2; restart 1 of at most 1 follows in 0.01 s", "the child serves again"]


def test_old_restarts_do_not_count(monkeypatch, caplog):
    monkeypatch.setattr(child, "RESTART_WINDOW_S", 0.0)

    async def run() -> None:
        keeper = Keeper(part(SERVES + "import time; time.sleep(0.2); sys.exit(3)"), 1, lambda *stage: None)
        task = asyncio.create_task(keeper.run())
        async with asyncio.timeout(20):
            while sum("restart" in message for message in caplog.messages) < 3:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        await keeper.stop(5)

    asyncio.run(run())
    assert set(caplog.messages) == {"the child ended with status 3; restart 1 of at most 1 follows in 0.01 s", "the child serves again"}


def test_restarts_that_never_serve_count_however_long_they_take(monkeypatch, caplog):
    monkeypatch.setattr(child, "RESTART_WINDOW_S", 0.0)
    status, _ = keep("raise SystemExit(3)", 2)
    assert status == 1
    assert len(caplog.messages) == 3


def test_one_that_falls_silent_is_asked_for_its_stacks_and_ended(monkeypatch, caplog, tmp_path: Path):
    monkeypatch.setattr(child, "TICK_S", 0.05)
    script = f"""
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1, file=open({str(tmp_path / "stacks")!r}, "w"))
def hang(): time.sleep(60)
{SERVES}
for _ in range(4):
    time.sleep(0.1)
    os.write(orders["report_fd"], b'{{"beat": true}}\\n')
hang()
"""
    hanging = Part("the child", [sys.executable, "-c", script], {}, max_silence_s=0.5)

    async def run() -> int:
        return await Keeper(hanging, 0, lambda *stage: None).run()

    assert asyncio.run(run()) == 1
    assert caplog.messages == [
        "the child hangs: it has given no sign of life for 0.5 s; ending it",
        "the child was killed by SIGKILL after 0 restarts in 10 minutes (--max-restarts 0); ending the server",
    ]
    assert "in hang" in (tmp_path / "stacks").read_text()


def test_orders_of_any_length_arrive(tmp_path: Path):
    async def run() -> int:
        script = "import json, sys; orders = json.load(sys.stdin); open(orders['path'], 'w').write(orders['key'])"
        started = await Child.start(part(script, key="k" * 2**20, path=str(tmp_path / "key")), lambda report: None)
        return await started.process.wait()

    assert asyncio.run(run()) == 0
    assert len((tmp_path / "key").read_text()) == 2**20


def test_one_that_does_not_end_is_killed(caplog):
    async def run() -> int | None:
        script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVES + "time.sleep(60)"
        deaf = asyncio.Event()
        started = await Child.start(part(script), lambda report: deaf.set())
        await asyncio.wait_for(deaf.wait(), 20)
        await started.stop("the child", 0.1)
        return started.process.returncode

    assert asyncio.run(run()) == -9
    assert "the child did not end within 0.1 s; killing it" in caplog.messages


@pytest.mark.parametrize(("cores", "given", "expected"), [(1, None, 1), (3, None, 1), (4, None, 2), (64, None, 2), (1, 3, 3), (8, 1, 1)])
def test_two_front_ends_from_four_cores_on(monkeypatch, cores, given, expected):
    monkeypatch.setattr(supervisor, "usable_cores", lambda: cores)
    assert supervisor.num_front_ends(ServerConfig(api_server_count=given)) == expected


@pytest.mark.parametrize("module", ["jaxserve.serve", "jaxserve.engine"])
def test_a_person_who_types_a_childs_command_is_told(module):
    done = subprocess.run([sys.executable, "-m", module], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "this process is started by `jaxserve serve`\n"
