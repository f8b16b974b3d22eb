"""A whole server in this process: scheduler, CountingRunner, loop, EngineLink, front end, HTTP and gRPC; only the model is a double.

The next token is the sum of the ids so far, plus how many they are, plus the seed, modulo the vocabulary (320).
"""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.config import SchedulerLimits, ServerConfig
from jaxserve.core.plan import Plan
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.link_server import HEARTBEAT_S, start_link_server
from jaxserve.engine.loop import EngineLoop
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.serve.server import FrontEnd
from jaxserve.testing import CountingRunner, SerialDevice
from jaxserve.text.tokenizer import Tokenizer

VOCAB_SIZE = 320
EOS = 1
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class PausableRunner(CountingRunner):
    """Waits before each step while `pause` is set, and fails the next one with `error`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    @property
    def step_s(self) -> float:
        """The pretended duration of a step; may be changed between steps."""
        return self._device._step_s

    @step_s.setter
    def step_s(self, value: float) -> None:
        self._device = SerialDevice(value)

    def run(self, plan: Plan):
        assert self.gate.wait(30)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().run(plan)


@dataclass
class EngineSide:
    """What would be the engine's process: it can be lost and come back with empty hands."""

    address: str
    make: Callable[[], tuple[Engine, PausableRunner]]
    max_waiting: int = 0
    heartbeat_s: float = HEARTBEAT_S
    failures: list[BaseException] = field(default_factory=list)
    info_changes: dict[str, Any] = field(default_factory=dict)
    """Applied when it starts."""

    async def start(self) -> None:
        self.engine, self.runner = self.make()
        self.engine.info = replace(self.engine.info, **self.info_changes)
        self.loop = EngineLoop(self.engine, max_waiting=self.max_waiting, on_failure=self.failures.append)
        self.loop.start()
        self._link = await start_link_server(self.loop, self.engine.info, self.address, heartbeat_s=self.heartbeat_s)

    async def stop(self) -> None:
        await self._link.stop(None)
        self.runner.gate.set()
        await asyncio.to_thread(self.loop.stop)


@dataclass
class Server:
    engine_sides: list[EngineSide]
    tokenizer: Tokenizer
    http: str
    grpc: str
    front_end: FrontEnd
    aio_loop: asyncio.AbstractEventLoop

    @property
    def engine_side(self) -> EngineSide:
        """The first one, in most tests the only one."""
        return self.engine_sides[0]

    @property
    def engine(self) -> Engine:
        return self.engine_side.engine

    @property
    def runner(self) -> PausableRunner:
        return self.engine_side.runner

    @property
    def loop(self) -> EngineLoop:
        return self.engine_side.loop

    @property
    def engine_failures(self) -> list[BaseException]:
        return self.engine_side.failures

    def lose_engine(self, number: int = 0) -> None:
        """As if its process were killed."""
        asyncio.run_coroutine_threadsafe(self.engine_sides[number].stop(), self.aio_loop).result(30)

    def return_engine(self, number: int = 0) -> None:
        """As if its process were started again; the front end will connect soon after."""
        asyncio.run_coroutine_threadsafe(self.engine_sides[number].start(), self.aio_loop).result(30)

    def wait_until_ready(self, *, is_ready: bool = True, timeout_s: float = 30.0) -> None:
        """Until the front end serves calls, or does not any more."""
        end = time.monotonic() + timeout_s
        while self.front_end.service.is_ready != is_ready:
            assert time.monotonic() < end, self.front_end.service.client.why
            time.sleep(0.005)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0, timeout=30, **options)

    def stub(self, channel: grpc.Channel) -> VllmEngineStub:
        return VllmEngineStub(channel)

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(self.grpc) as channel:
            yield channel

    def output_ids(self, prompt: list[int], num_tokens: int, *, seed: int = 0) -> list[int]:
        """What the model gives after a prompt, as a person would compute it (no stops)."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append((sum(ids) + len(ids) + seed) % VOCAB_SIZE)
        return ids[len(prompt) :]

    def wait_until_idle(self, timeout_s: float = 30.0) -> None:
        """Until nothing runs or waits and every page is free or cached."""
        end = time.monotonic() + timeout_s
        for engine in (side.engine for side in self.engine_sides):
            while engine.has_work:
                assert time.monotonic() < end, f"still {engine.scheduler.num_running} sequences running"
                time.sleep(0.005)
            engine.scheduler.check_integrity()

    def wait_until_freed(self) -> None:
        """Until nothing runs any more, soon: counted in steps, since how busy the machine is does not matter."""
        before = self.runner.num_steps
        self.wait_until_idle(timeout_s=30.0)
        assert self.runner.num_steps - before <= 20


def make_engine(model_path: Path, **options: Any) -> tuple[Engine, PausableRunner]:
    limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_pages=129, page_size=16, eos_token_ids=frozenset({EOS}),
    )  # fmt: skip
    runner = PausableRunner(num_pages=limits.num_pages, page_size=limits.page_size, max_num_seqs=limits.max_num_seqs, vocab_size=VOCAB_SIZE)
    info = EngineInfo(
        model_path=str(model_path), model="counting", model_type="llama", architectures=("LlamaForCausalLM",), dtype="float32",
        max_model_len=limits.max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), bos_token_id=0, pad_token_id=2,
        has_prompt_logprobs=True, num_pages=limits.num_pages, page_size=limits.page_size, max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens, **{"has_embeddings": True, "embedding_size": 4} | options,
    )  # fmt: skip
    return Engine(Scheduler(limits), runner, info), runner


@contextmanager
def running_server(
    model_path: Path,
    socket_directory: Path,
    *,
    config: ServerConfig | None = None,
    max_waiting: int = 0,
    num_engines: int = 1,
    heartbeat_s: float = HEARTBEAT_S,
    **info: Any,
) -> Iterator[Server]:
    config = config or ServerConfig(served_model_name=("counting", "alias"))
    addresses = [f"unix:{socket_directory}/engine{i}.sock" for i in range(num_engines)]
    make = partial(make_engine, model_path, max_waiting=max_waiting, **info)
    engine_sides = [EngineSide(address, make, max_waiting, heartbeat_s) for address in addresses]
    started, stop = threading.Event(), asyncio.Event()
    servers: list[Server] = []

    async def serve() -> None:
        for side in engine_sides:
            await side.start()
        front_end = FrontEnd(replace(config, port=0, grpc_port=0), *addresses)
        endpoints = await front_end.start()
        await front_end.wait_until_ready()
        await asyncio.gather(*(engine.wait_until_connected() for engine in front_end.client.engines))
        tokenizer, aio_loop = Tokenizer.from_directory(model_path), asyncio.get_running_loop()
        servers.append(Server(engine_sides, tokenizer, endpoints.http or "", endpoints.grpc or "", front_end, aio_loop))
        started.set()
        await stop.wait()
        hurry = asyncio.Event()
        hurry.set()
        await front_end.stop(hurry)
        for side in engine_sides:
            await side.stop()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            started.set()

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    assert started.wait(30)
    assert servers, "the server did not start"
    try:
        yield servers[0]
    finally:
        for side in engine_sides:
            side.runner.gate.set()
        servers[0].aio_loop.call_soon_threadsafe(stop.set)
        thread.join(30)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's names it after the test, too long for the path of a socket in it."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="session")
def model_path(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(golden_dir / "llama3-rope" / name, path / name)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="session")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    with running_server(model_path, tmp_path_factory.mktemp("link")) as server:
        yield server
        assert server.front_end.service.is_ready, f"a test did not leave it as it was: {server.front_end.service.client.why}"


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def fresh_server(model_path: Path, tmp_path: Path) -> Iterator[Server]:
    """A server that a test may break."""
    with running_server(model_path, tmp_path / "link", default_sampling_params={"temperature": 0.0, "top_k": 7}) as server:
        yield server


@pytest.fixture
def start_server(model_path: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[Server]]:
    """Starts a server with settings of the test's own: `with start_server(ServerConfig(...)) as server`."""
    return partial(_start_server, model_path, tmp_path / "link")


def _start_server(model_path: Path, directory: Path, config: ServerConfig | None = None, **options: Any) -> AbstractContextManager[Server]:
    config = replace(config or ServerConfig(), served_model_name=("counting", "alias"))
    return running_server(model_path, directory, config=config, **options)


@pytest.fixture
def engine_side(model_path: Path, tmp_path: Path) -> EngineSide:
    """An engine that has not started, for a test with front ends of its own."""
    return EngineSide(f"unix:{tmp_path}/link/engine.sock", lambda: make_engine(model_path))
