"""A server as processes, for tests: `serving` starts one with counting engines, `Running` looks at it, `Call` asks it."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil
from grpc import Channel
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.engine import link_pb2, link_pb2_grpc

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SCRIPT = """
import asyncio, json, sys
from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.logs import set_up_logging
from jaxserve.serve.supervisor import supervise
engine, model, settings = sys.argv[1:]
config = ServerConfig(**json.loads(settings))
set_up_logging(config.log_format)
try:
    sys.exit(asyncio.run(supervise([sys.executable, engine], {"model": model}, [sys.executable, "-m", "jaxserve.serve"], config)))
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def until(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


def solo_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """What the CountingRunner gives, as a person would compute it."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append((sum(ids) + len(ids)) % 320)
    return ids[len(prompt) :]


def connect(address: str) -> grpc.Channel:
    """A connection of its own, made."""
    channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    grpc.channel_ready_future(channel).result(TIMEOUT_S)
    return channel


class Call(threading.Thread):
    """A streaming gRPC call."""

    def __init__(self, channel: grpc.Channel, prompt: list[int], num_tokens: int = 200, rank: int | None = None) -> None:
        super().__init__(daemon=True)
        self.expected = solo_tokens(prompt, num_tokens)
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.error: grpc.RpcError | None = None
        params = pb.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        tokenized = pb.TokenizedInput(input_ids=prompt)
        request = pb.GenerateRequest(tokenized=tokenized, sampling_params=params, stream=True, data_parallel_rank=rank)
        self._responses = VllmEngineStub(channel).Generate(request)
        self.start()

    def run(self) -> None:
        try:
            for response in self._responses:
                if response.HasField("chunk"):
                    self.token_ids += response.chunk.token_ids
                else:
                    self.finish_reason = response.complete.finish_reason
        except grpc.RpcError as error:
            self.error = error

    def wait(self) -> None:
        self.join(TIMEOUT_S)
        assert not self.is_alive()


class Running:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> str:
        def look() -> re.Match[str] | None:
            assert self.process.poll() is None, self.text()
            return re.search(pattern, self.text())

        try:
            return until(look, pattern)[1]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    @property
    def http(self) -> str:
        return self.wait_for(r"HTTP +(http://127\.0\.0\.1:\d+)")

    @property
    def grpc(self) -> str:
        return self.wait_for(r"gRPC +(127\.0\.0\.1:\d+)")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def status(self, path: str) -> int:
        """Of a GET over a new connection; 0 when it cannot be made."""
        try:
            with DIRECT.open(self.http + path, timeout=TIMEOUT_S) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def health(self) -> int:
        with grpc.insecure_channel(self.grpc) as channel:
            try:
                return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status
            except grpc.RpcError:
                return 0

    def stats(self, engine: int = 0) -> link_pb2.EngineStats:
        [path] = self.log.parent.glob(f"jaxserve-*/engine{engine}.sock")
        with grpc.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            return link_pb2_grpc.EngineLinkStub(channel).GetStats(link_pb2.GetStatsRequest(), timeout=5)

    def completes(self) -> bool:
        with self.client() as client:
            answer = client.completions.create(model="counting", prompt=[5, 7], max_tokens=3, temperature=0)
        return answer.usage.completion_tokens == 3

    def children(self, part: str = "") -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if part in " ".join(child.cmdline())]

    def engine(self) -> psutil.Process:
        [child] = self.children("counting_engine")
        return child

    def engines(self) -> list[psutil.Process]:
        """Each, by its number."""
        listening = {one.laddr: child for child in self.children("counting_engine") for one in child.net_connections("unix") if one.laddr}
        return [child for address, child in sorted(listening.items()) if re.search(r"/engine\d+\.sock$", address)]

    def num_connections(self, front_end: psutil.Process) -> int:
        """gRPC connections of clients."""
        port = int(self.grpc.rpartition(":")[2])
        return sum(one.laddr.port == port and one.status == "ESTABLISHED" for one in front_end.net_connections("tcp"))

    def channels(self, stack: ExitStack) -> dict[psutil.Process, Channel]:
        """A connection to each front end, until the stack closes."""
        front_ends = self.children("jaxserve.serve")
        channels: dict[psutil.Process, Channel] = {}
        while len(channels) < len(front_ends):  # which front end gets a connection is the kernel's choice
            before = {child: self.num_connections(child) for child in front_ends}
            channel = stack.enter_context(connect(self.grpc))
            [owner] = [child for child in front_ends if self.num_connections(child) > before[child]]
            channels[owner] = channel
        return channels

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)


@contextmanager
def serving(model_path: Path, directory: Path, environment: dict[str, str] | None = None, **settings: Any) -> Iterator[Running]:
    settings = {"port": 0, "grpc_port": 0, "api_server_count": 1, "log_format": "text"} | settings
    command = [sys.executable, "-c", SCRIPT, str(ROOT / "tests/serve/counting_engine.py"), str(model_path), json.dumps(settings)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory), **(environment or {})}
    log = directory / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream, env=variables, text=True)
    try:
        yield Running(process, log)
    finally:
        process.kill()
        process.wait()
