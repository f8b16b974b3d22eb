"""Engine and front end as processes: start, signals, deaths on either side, busy ports, and no JAX in a front end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30
SCRIPT = """
import asyncio, json, sys
from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.supervisor import supervise
engine, model, port, grpc_port = sys.argv[1:]
config = ServerConfig(port=int(port), grpc_port=int(grpc_port))
try:
    sys.exit(asyncio.run(supervise([sys.executable, engine], {"model": model}, [sys.executable, "-m", "jaxserve.serve"], config)))
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


class Running:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> str:
        end = time.monotonic() + TIMEOUT_S
        while not (match := re.search(pattern, self.text())):
            assert time.monotonic() < end and self.process.poll() is None, self.text()
            time.sleep(0.02)
        return match[1]

    def client(self) -> OpenAI:
        return OpenAI(base_url=self.wait_for(r"(http://127\.0\.0\.1:\d+)") + "/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def child(self, part: str) -> psutil.Process:
        [child] = [child for child in psutil.Process(self.process.pid).children() if part in " ".join(child.cmdline())]
        return child

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)


@contextmanager
def serving(model_path: Path, log: Path, *, port: int = 0, grpc_port: int = 0, **environment: str) -> Iterator[Running]:
    command = [sys.executable, "-c", SCRIPT, str(ROOT / "tests/serve/counting_engine.py"), str(model_path), str(port), str(grpc_port)]
    # A killed supervisor leaves its socket's directory behind: where the test's other files are.
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(log.parent), **environment}
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream, env=variables, text=True)
    try:
        yield Running(process, log)
    finally:
        process.kill()
        process.wait()


def test_it_serves_without_jax_and_ends_in_order(model_path, tmp_path):
    with serving(model_path, tmp_path / "log") as server:
        answer = server.client().completions.create(model="counting", prompt=[5, 7], max_tokens=3, temperature=0)
        assert answer.usage.completion_tokens == 3
        assert re.search(r"weights +0\.25 s +none", server.text())
        curl = server.wait_for(r"(curl .*)\n")
        assert '"object":"text_completion"' in subprocess.run(curl, shell=True, capture_output=True, text=True, check=True).stdout
        maps = Path(f"/proc/{server.child('jaxserve.serve').pid}/maps").read_text()
        assert "jaxlib" not in maps
        children = psutil.Process(server.process.pid).children()
        assert len(children) == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Stopping;" in server.text()
        assert not any(child.is_running() for child in children), server.text()


def test_a_front_end_imports_no_jax():
    code = "import json, sys, jaxserve.serve.__main__, jaxserve.serve.supervisor; print(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in json.loads(result.stdout)}
    assert not loaded & {"jax", "jaxlib", "torch", "transformers"}


@pytest.mark.parametrize(("victim", "name"), [("counting_engine", "the engine"), ("jaxserve.serve", "the front end")])
def test_a_dead_child_ends_the_other_with_a_message(model_path, tmp_path, victim, name):
    with serving(model_path, tmp_path / "log") as server:
        server.client()
        children = psutil.Process(server.process.pid).children()
        server.child(victim).kill()
        assert server.wait() == 1
        assert f"{name} was killed by SIGKILL" in server.text()
        assert not any(child.is_running() for child in children)
        assert not list(tmp_path.glob("jaxserve-*"))


def test_killing_the_parent_ends_the_children(model_path, tmp_path):
    with serving(model_path, tmp_path / "log") as server:
        server.client()
        children = psutil.Process(server.process.pid).children()
        server.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=5)
        assert len(gone) == 2
        assert not alive


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_busy_port_ends_the_start_naming_the_flag(model_path, tmp_path, flag):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        ports = {"port": port} if flag == "--port" else {"grpc_port": port}
        with serving(model_path, tmp_path / "log", **ports) as server:
            assert server.wait() == 2
            assert f"{flag} {port} on 127.0.0.1 cannot be used" in server.text()


def test_one_port_for_both_doors_is_refused_at_once(model_path, tmp_path):
    with serving(model_path, tmp_path / "log", port=8123, grpc_port=8123) as server:
        assert server.wait() == 2
        assert "--port and --grpc-port are both 8123" in server.text()


def test_an_engine_that_cannot_start_ends_the_server_with_its_status(model_path, tmp_path):
    with serving(model_path, tmp_path / "log", COUNTING_ENGINE_FAILS="1") as server:
        assert server.wait() == 2
        assert "no such model" in server.text()


def test_sigterm_ends_a_server_that_is_still_starting(model_path, tmp_path):
    with serving(model_path, tmp_path / "log", COUNTING_ENGINE_HANGS="1") as server:
        end = time.monotonic() + TIMEOUT_S
        while len(children := psutil.Process(server.process.pid).children()) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(2)  # the front end has its signal handlers now
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert not any(child.is_running() for child in children), server.text()
