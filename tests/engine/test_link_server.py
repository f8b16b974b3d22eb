"""The engine process's side of EngineLink, asked over its generated stubs alone; and how an engine process ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from jaxserve.engine import link_pb2, link_pb2_grpc
from jaxserve.engine.link_server import HEARTBEAT_S, start_link_server
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.profiler import Profiler

TIMEOUT_S = 30


class Stream:
    """One front end's stream."""

    def __init__(self, stub: link_pb2_grpc.EngineLinkStub) -> None:
        self._call = stub.Connect()

    async def send(self, *commands: link_pb2.Command) -> None:
        await self._call.write(link_pb2.ToEngine(commands=commands))

    async def read(self, field: str):
        """The next message with something in `field`."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                message = await self._call.read()
                assert message is not grpc.aio.EOF, f"the stream ended without {field}"
                if field in [spec.name for spec, _ in message.ListFields()]:
                    return message

    async def finishes(self, count: int) -> list[link_pb2.Event]:
        ends: list[link_pb2.Event] = []
        while len(ends) < count:
            ends += [event for event in (await self.read("events")).events if event.finish_reason]
        return ends


def add(request_id: str, **fields) -> link_pb2.Command:
    defaults = {"n": 1, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    params = link_pb2.SamplingParams(**{**defaults, **fields.pop("params", {})})
    return link_pb2.Command(add=link_pb2.Add(request_id=request_id, prompt_token_ids=[5], params=params, **fields))


@asynccontextmanager
async def served(
    engine, directory: Path, *, profiler: Profiler | None = None, heartbeat_s: float = HEARTBEAT_S, **options
) -> AsyncIterator[link_pb2_grpc.EngineLinkStub]:
    loop = EngineLoop(engine, **options)
    loop.start()
    address = f"unix:{directory}/engine.sock"
    server = await start_link_server(loop, engine.info, address, profiler, heartbeat_s=heartbeat_s)
    async with grpc.aio.insecure_channel(address) as channel:
        yield link_pb2_grpc.EngineLinkStub(channel)
    engine.gate.set()
    await server.stop(None)
    await asyncio.to_thread(loop.stop)


def test_heartbeats_come_at_once_and_while_a_step_hangs(engine, tmp_path):
    async def main() -> None:
        async with served(engine, tmp_path, heartbeat_s=0.02) as stub:
            stream, other = Stream(stub), Stream(stub)
            assert not (await stream.read("heartbeat")).heartbeat.has_work
            engine.gate.clear()
            await stream.send(add("a"))
            for each in (stream, other):
                seconds: list[float] = []
                while len(seconds) < 3:
                    if (beat := (await each.read("heartbeat")).heartbeat).has_work:
                        seconds.append(beat.seconds_since_progress)
                assert 0 < seconds[0] < seconds[1] < seconds[2]
            stats = await stub.GetStats(link_pb2.GetStatsRequest())
            assert (stats.has_work, stats.num_running + stats.num_waiting) == (True, 1)

    asyncio.run(main())


def test_a_request_too_many_is_refused_while_a_step_hangs(engine, tmp_path):
    engine.info = replace(engine.info, max_num_seqs=1)

    async def main() -> None:
        async with served(engine, tmp_path, max_waiting=1) as stub:
            stream = Stream(stub)
            engine.gate.clear()
            await stream.send(add("a"), add("b"), add("c"), add("d"))
            [refusal] = (await stream.read("rejections")).rejections
            assert (refusal.request_id, refusal.kind) == ("c", link_pb2.Rejection.OVERLOADED)
            assert "--max-waiting 1" in refusal.message

    asyncio.run(main())


def test_an_abort_by_label_reaches_the_requests_of_every_front_end(engine, tmp_path):
    async def main() -> None:
        async with served(engine, tmp_path) as stub:
            one, two = Stream(stub), Stream(stub)
            await one.send(add("a", label="job"), add("b", label="other"))
            await two.send(add("c", label="job"))
            await two.read("tokens")
            await one.read("tokens")
            await two.send(link_pb2.Command(abort_label=link_pb2.AbortLabel(label="job")))
            assert [(end.request_id, end.finish_reason) for end in await one.finishes(1)] == [("a", "abort")]
            assert [(end.request_id, end.finish_reason) for end in await two.finishes(1)] == [("c", "abort")]
            assert list(engine.open) == [("b", 0)]
            await one.send(link_pb2.Command(abort=link_pb2.Abort(request_id="b")))
            await one.finishes(1)

    asyncio.run(main())


def test_flushing_is_refused_while_pages_are_in_use(engine, tmp_path):
    async def main() -> None:
        async with served(engine, tmp_path) as stub:
            stream = Stream(stub)
            await stream.send(add("a"))
            await stream.read("tokens")
            assert not (await stub.FlushCache(link_pb2.FlushCacheRequest())).is_flushed
            await stream.send(link_pb2.Command(abort=link_pb2.Abort(request_id="a")))
            await stream.finishes(1)
            assert (await stub.FlushCache(link_pb2.FlushCacheRequest())).is_flushed

    asyncio.run(main())


class IdleTracer:
    def start_trace(self, directory: str) -> None:
        pass

    def stop_trace(self) -> None:
        pass


def test_profiles_are_started_and_stopped_once(engine, tmp_path):
    async def refusal(call) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        return caught.value.details()

    async def main() -> None:
        async with served(engine, tmp_path, profiler=Profiler(IdleTracer())) as stub:
            assert await refusal(stub.StopProfile(link_pb2.StopProfileRequest())) == "no trace is running; start one first."
            await stub.StartProfile(link_pb2.StartProfileRequest(directory=f"{tmp_path}/traces"))
            again = await refusal(stub.StartProfile(link_pb2.StartProfileRequest(directory="/x")))
            assert again == f"a trace into {tmp_path}/traces is running; stop it first."
            assert (await stub.StopProfile(link_pb2.StopProfileRequest())).directory == f"{tmp_path}/traces"

    asyncio.run(main())


PROCESS = """
import asyncio, faulthandler, logging, signal, sys, time
from jaxserve.config import SchedulerLimits
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.link_server import run_engine_process
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.testing import CountingRunner

class Runner(CountingRunner):
    def run(self, plan):
        if self.num_steps == 3:
            self.num_steps += 1
            hang_or_fail()
        return super().run(plan)

def hang_or_fail():
    if sys.argv[2] == "hangs":
        time.sleep(1000)
    if sys.argv[2] == "holds the interpreter":
        import ctypes
        ctypes.PyDLL(None).sleep(1000)
    runner.failures = {number: RuntimeError(f"failure {number}") for number in range(100)}

logging.basicConfig(level=logging.INFO)
limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, num_pages=33, page_size=16)
runner = Runner(num_pages=33, page_size=16, max_num_seqs=2, vocab_size=320, step_s=0.005)
info = EngineInfo(model_path="", model="counting", model_type="llama", dtype="float32", max_model_len=256, vocab_size=320,
                  eos_token_ids=(), num_pages=33, page_size=16, max_num_seqs=2, max_num_batched_tokens=64)
engine = Engine(Scheduler(limits), runner, info)
async def beat():
    while True:
        print("beat", flush=True)
        await asyncio.sleep(0.05)
faulthandler.register(signal.SIGUSR1)
status = run_engine_process(engine, info, sys.argv[1], lambda: print("ready", flush=True), stall_timeout_s=1, beat=beat)
print("returned", flush=True)
sys.exit(status)
"""


@asynccontextmanager
async def engine_process(directory: Path, behaviour: str):
    address = f"unix:{directory}/engine.sock"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, address, behaviour, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TIMEOUT_S), grpc.aio.insecure_channel(address) as channel:
            assert await process.stdout.readline() == b"ready\n"
            yield process, Stream(link_pb2_grpc.EngineLinkStub(channel))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_hung_step_ends_the_process_after_the_front_ends_heard_why(tmp_path):
    async def main() -> None:
        async with engine_process(tmp_path, "hangs") as (process, stream):
            await stream.send(add("a"))
            assert "the engine hangs: no step has ended for" in (await stream.read("failure")).failure
            stdout, stderr = await process.communicate()
            assert (process.returncode, set(stdout.split())) == (1, {b"beat"})
            assert b"hang_or_fail" in stderr, "the log shows where it hangs"

    asyncio.run(main())


def test_a_step_that_holds_the_interpreter_silences_the_process_which_still_tells_where_it_is(tmp_path):
    async def main() -> None:
        async with engine_process(tmp_path, "holds the interpreter") as (process, stream):
            await stream.send(add("a"))
            with contextlib.suppress(TimeoutError):
                while True:
                    assert await asyncio.wait_for(process.stdout.readline(), 3) == b"beat\n"
            process.send_signal(signal.SIGUSR1)
            stacks = b""
            while b"hang_or_fail" not in stacks:
                stacks += await process.stderr.readline()

    asyncio.run(main())


def test_two_failed_steps_in_a_row_end_the_process_after_the_front_ends_heard_why(tmp_path):
    async def main() -> None:
        async with engine_process(tmp_path, "fails") as (process, stream):
            await stream.send(add("a"), add("b"), add("c"), add("d"))
            ends = await stream.finishes(2)
            assert {(end.request_id, end.finish_reason) for end in ends} == {("a", "error"), ("b", "error")}
            assert "the step failed: RuntimeError: failure" in ends[0].error
            assert "the engine failed: RuntimeError: failure" in (await stream.read("failure")).failure
            await process.communicate()
            assert process.returncode == 1

    asyncio.run(main())


def test_an_idle_engine_does_not_count_as_hung_and_ends_when_told(tmp_path):
    async def main() -> None:
        async with engine_process(tmp_path, "idles") as (process, stream):
            for _ in range(3):  # a heartbeat each second: longer than the timeout for a stall
                assert not (await stream.read("heartbeat")).heartbeat.has_work
            process.send_signal(signal.SIGTERM)
            stdout, _ = await process.communicate()
            assert (process.returncode, set(stdout.split())) == (0, {b"beat", b"returned"})

    asyncio.run(main())
