"""How a front end lives: doors open before the engine is there, while it restarts, two at one port, and calls open when it stops."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.config import ServerConfig
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.child_process import HURRY_SIGNAL
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.serve.ports import bind, held_ports
from jaxserve.serve.server import FLUSH_S, FrontEnd, run_front_end

HURRY = asyncio.Event()
HURRY.set()


def get(http: str, path: str) -> tuple[int, str]:
    return ask(urllib.request.Request(f"{http}{path}"))


def complete(http: str, **fields) -> tuple[int, str]:
    body = {"prompt": [5, 7], "temperature": 0, "ignore_eos": True, **fields}
    return ask(urllib.request.Request(f"{http}/v1/completions", json.dumps(body).encode()))


def ask(request: urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def message(answer: tuple[int, str]) -> str:
    return json.loads(answer[1])["error"]["message"]


def health(address: str) -> str:
    with grpc.insecure_channel(address) as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def probes(http: str, address: str) -> tuple[int, int, int, str]:
    return (*(get(http, path)[0] for path in ("/live", "/health", "/ready")), health(address))


@asynccontextmanager
async def open_front_end(address: str, **config):
    front_end = FrontEnd(ServerConfig(**{"port": 0, "grpc_port": 0} | config), address)
    endpoints = await front_end.start()
    try:
        yield front_end, endpoints
    finally:
        await front_end.stop(HURRY)


def test_the_doors_open_before_the_engine_is_there(engine_side):
    async def main() -> None:
        async with open_front_end(engine_side.address) as (front_end, endpoints):
            assert await asyncio.to_thread(probes, endpoints.http, endpoints.grpc) == (200, 503, 503, "NOT_SERVING")
            refused = await asyncio.to_thread(complete, endpoints.http)
            assert refused[0] == 503 and "still loading" in message(refused)
            with grpc.insecure_channel(endpoints.grpc) as channel, pytest.raises(grpc.RpcError, match="still loading") as caught:
                await asyncio.to_thread(generate, channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await engine_side.start()
            await asyncio.wait_for(front_end.wait_until_ready(), 30)
            assert await asyncio.to_thread(probes, endpoints.http, endpoints.grpc) == (200, 200, 200, "SERVING")
            assert (await asyncio.to_thread(complete, endpoints.http))[0] == 200
        await engine_side.stop()

    asyncio.run(main())


def generate(channel: grpc.Channel, **fields) -> list[pb.GenerateResponse]:
    return list(VllmEngineStub(channel).Generate(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5]), **fields), timeout=30))


def test_a_tokenizer_that_cannot_be_read_is_an_error(engine_side, tmp_path):
    async def main() -> None:
        engine_side.info_changes = {"model_path": str(tmp_path / "nothing")}
        await engine_side.start()
        async with open_front_end(engine_side.address) as (front_end, _):
            with pytest.raises(CheckpointError):
                await asyncio.wait_for(front_end.wait_until_ready(), 30)
        await engine_side.stop()

    asyncio.run(main())


def test_a_lost_engine_fails_open_calls_at_once_and_is_served_again_when_it_returns(fresh_server):
    server = fresh_server
    server.runner.step_s = 0.02
    answers: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda: answers.append(complete(server.http, max_tokens=200))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while server.engine.scheduler.num_running < 3:
        pass
    server.lose_engine()
    for thread in threads:
        thread.join(30)
    assert [status for status, _ in answers] == [503] * 3
    assert "send it again" in message(answers[0])
    assert probes(server.http, server.grpc) == (200, 503, 503, "NOT_SERVING")
    refused = complete(server.http)
    assert refused[0] == 503 and "restarting" in message(refused)
    server.return_engine()
    server.wait_until_ready()
    assert probes(server.http, server.grpc) == (200, 200, 200, "SERVING")
    status, answer = complete(server.http, max_tokens=3, return_token_ids=True)
    assert (status, json.loads(answer)["choices"][0]["token_ids"]) == (200, server.output_ids([5, 7], 3))


def test_a_returned_engine_may_differ(fresh_server):
    fresh_server.lose_engine()
    fresh_server.engine_side.info_changes = {"max_model_len": 32}
    fresh_server.return_engine()
    fresh_server.wait_until_ready()
    assert fresh_server.front_end.service.info.max_model_len == 32
    refused = complete(fresh_server.http, prompt=[5] * 33)
    assert refused[0] == 400 and "32" in message(refused)


def test_a_timeout_ends_a_call_with_what_it_has(fresh_server):
    server = fresh_server
    server.runner.step_s = 0.02
    begin = time.monotonic()
    texts = asyncio.run_coroutine_threadsafe(collect(server, timeout_s=0.3), server.aio_loop).result(30)
    assert time.monotonic() - begin >= 0.3
    [(token_ids, reason), (others, other_reason)] = texts
    assert (reason, other_reason) == ("abort", "abort")
    assert 0 < len(token_ids) < 100 and token_ids == server.output_ids([5, 7], len(token_ids))
    assert len(others) < 100
    server.wait_until_idle()


def test_a_timeout_needs_no_engine_that_steps(fresh_server):
    server = fresh_server
    server.runner.gate.clear()
    texts = asyncio.run_coroutine_threadsafe(collect(server, timeout_s=0.1), server.aio_loop).result(30)
    assert texts == [([], "abort"), ([], "abort")]
    server.runner.gate.set()
    server.wait_until_idle()


async def collect(server, **options) -> list[tuple[list[int], str]]:
    """Tokens and finish of two sequences, the first greedy."""
    service = server.front_end.service
    params = service.sampling_params({"temperature": 0.0, "ignore_eos": True, "max_tokens": 200})
    found: list[tuple[list[int], str]] = [([], ""), ([], "")]
    async for delta in service.generate([[5, 7], [9]], params, **options):
        token_ids, _ = found[delta.prompt_index]
        found[delta.prompt_index] = (token_ids + delta.token_ids, delta.finish_reason.value if delta.finish_reason else "")
    return found


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_positive(server, timeout_s):
    with pytest.raises(ValueError, match="timeout is") as caught:
        asyncio.run_coroutine_threadsafe(collect(server, timeout_s=timeout_s), server.aio_loop).result(30)
    assert caught.value.param == "timeout"


def test_the_server_may_allow_less_time_than_a_call_asks_for(start_server):
    with start_server(config=ServerConfig(request_timeout=0.2)) as server:
        server.runner.step_s = 0.02
        for options in ({}, {"timeout_s": 60}):
            texts = asyncio.run_coroutine_threadsafe(collect(server, **options), server.aio_loop).result(30)
            assert [reason for _, reason in texts] == ["abort", "abort"]


def test_a_call_that_nobody_reads_ends_and_slows_nobody(fresh_server, monkeypatch):
    monkeypatch.setattr("jaxserve.engine.event_stream.MAX_PENDING_BYTES", 20_000)  # some sixty tokens with twenty logprobs each
    server = fresh_server

    async def main() -> None:
        service = server.front_end.service
        params = service.sampling_params({"temperature": 0.0, "ignore_eos": True, "max_tokens": 200, "logprobs": 20})
        unread = service.generate([[5, 7]], params)
        first = await anext(unread)
        while server.engine.has_work:
            await asyncio.sleep(0.005)
        assert [reason for _, reason in await collect(server)] == ["length", "length"]
        rest = [delta async for delta in unread]
        token_ids = [token_id for delta in (first, *rest) for token_id in delta.token_ids]
        assert 20 < len(token_ids) < 150 and token_ids == server.output_ids([5, 7], len(token_ids))
        assert rest[-1].finish_reason is FinishReason.ABORT

    asyncio.run_coroutine_threadsafe(main(), server.aio_loop).result(20)
    server.wait_until_idle()


def test_a_call_that_can_never_be_admitted_is_refused_naming_the_flag(start_server):
    with start_server(max_waiting=4) as server:
        refused = complete(server.http, n=13, temperature=1)
        assert refused[0] == 400 and "--max-waiting" in message(refused) and "12 at once" in message(refused)
        assert complete(server.http, n=12, temperature=1, max_tokens=2)[0] == 200


def test_an_abort_reaches_the_calls_of_other_front_ends(fresh_server):
    server = fresh_server
    server.runner.step_s = 0.01

    async def main() -> list[tuple[list[int], str]]:
        async with open_front_end(server.engine_side.address) as (other, _):
            await asyncio.wait_for(other.wait_until_ready(), 30)
            call = asyncio.create_task(collect(server, label="mine"))
            while server.engine.scheduler.num_running < 2:
                await asyncio.sleep(0.005)
            other.service.abort("")
            other.service.abort("somebody else's")
            other.service.abort("mine")
            return await asyncio.wait_for(call, 30)

    texts = asyncio.run_coroutine_threadsafe(main(), server.aio_loop).result(30)
    assert [reason for _, reason in texts] == ["abort", "abort"]
    server.wait_until_idle()


def test_a_stopping_server_lets_calls_end_and_aborts_the_rest(fresh_server):
    server = fresh_server
    server.runner.step_s = 0.05
    answers: dict[str, tuple[int, str]] = {}
    calls = {"short": {"max_tokens": 8}, "long": {"max_tokens": 200}, "stream": {"max_tokens": 200, "stream": True}}

    def call(name: str) -> None:
        answers[name] = complete(server.http, **calls[name])

    threads = [threading.Thread(target=call, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    while server.engine.scheduler.num_running < 3:
        pass
    draining = asyncio.run_coroutine_threadsafe(server.front_end.service.drain(1.0), server.aio_loop)
    server.wait_until_ready(is_ready=False)
    # /health says that the engine is well; the rest that this front end takes no calls.
    assert probes(server.http, server.grpc) == (200, 200, 503, "NOT_SERVING")
    assert complete(server.http)[0] == 503
    with server.channel() as channel:
        assert not server.stub(channel).HealthCheck(pb.HealthCheckRequest()).healthy
        with pytest.raises(grpc.RpcError) as refused:
            generate(channel)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    draining.result(30)
    for thread in threads:
        thread.join()
    assert [status for status, _ in answers.values()] == [200, 200, 200]
    assert '"finish_reason":"length"' in answers["short"][1]
    assert '"finish_reason":"abort"' in answers["long"][1]
    assert answers["stream"][1].endswith("data: [DONE]\n\n")
    assert '"finish_reason":"abort"' in answers["stream"][1]
    server.wait_until_idle()


@pytest.mark.parametrize("in_hurry", [False, True])
def test_a_stopping_server_lets_clients_read_what_was_sent_unless_told_to_hurry(engine_side, in_hurry):
    """The answer is larger than what the sockets hold."""

    async def main() -> None:
        await engine_side.start()
        front_end = FrontEnd(ServerConfig(port=0, grpc_port=0), engine_side.address)
        endpoints = await front_end.start()
        await asyncio.wait_for(front_end.wait_until_ready(), 30)
        reader, writer, length = await begin_to_read(endpoints.http, prompt=[[5]] * 6, n=8, max_tokens=200, logprobs=20, seed=1)
        assert length > 1_000_000 and not front_end.client.num_open
        hurry = asyncio.Event()
        stopping = asyncio.create_task(front_end.stop(hurry))
        done, _ = await asyncio.wait({stopping}, timeout=FLUSH_S + 0.5)
        assert not done
        if in_hurry:
            hurry.set()
        else:
            answer = json.loads(await reader.readexactly(length))
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 48
        await asyncio.wait_for(stopping, 30)
        writer.close()
        await engine_side.stop()

    asyncio.run(main())


async def begin_to_read(http: str, **fields) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """Sends a completion and reads the headers of the answer alone; with the length of the rest."""
    body = json.dumps({"ignore_eos": True, **fields}).encode()
    host, port = http.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    headers = await reader.readuntil(b"\r\n\r\n")
    return reader, writer, int(re.search(rb"content-length: (\d+)", headers).group(1))


def test_the_hurry_signal_cuts_the_drain_short(engine_side):
    async def main() -> tuple[int, tuple[int, str]]:
        await engine_side.start()
        engine_side.runner.step_s = 0.05
        ready: asyncio.Future = asyncio.get_running_loop().create_future()
        config = ServerConfig(port=0, grpc_port=0, shutdown_timeout=600)
        running = asyncio.create_task(run_front_end(config, [engine_side.address], ready.set_result))
        endpoints = await asyncio.wait_for(ready, 30)
        call = asyncio.create_task(asyncio.to_thread(complete, endpoints.http, max_tokens=200))
        while not engine_side.engine.scheduler.num_running:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        while (await asyncio.to_thread(get, endpoints.http, "/ready"))[0] == 200:
            await asyncio.sleep(0.005)
        assert not call.done()
        os.kill(os.getpid(), HURRY_SIGNAL)
        status = await asyncio.wait_for(running, 30)
        answer = await call
        await engine_side.stop()
        return status, answer

    status, (http_status, body) = asyncio.run(main())
    assert status == 0
    assert http_status == 200 and '"finish_reason":"abort"' in body


def test_a_signal_while_the_engine_loads_ends_the_front_end(tmp_path):
    async def main() -> int:
        running = asyncio.create_task(
            run_front_end(ServerConfig(port=0, grpc_port=0), [f"unix:{tmp_path}/engine.sock"], lambda _: pytest.fail("not ready"))
        )
        while not signal.getsignal(signal.SIGTERM):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(running, 30)

    assert asyncio.run(main()) == 0


def test_two_front_ends_share_their_ports_and_one_serves_on_alone(engine_side):
    async def main() -> None:
        await engine_side.start()
        with held_ports(ServerConfig(port=0, grpc_port=0)) as config:
            both = [FrontEnd(config, engine_side.address, share_ports=True) for _ in range(2)]
            endpoints = [await front_end.start() for front_end in both]
            assert endpoints[0] == endpoints[1]
            for front_end in both:
                await asyncio.wait_for(front_end.wait_until_ready(), 30)
            await both[0].stop(HURRY)
            for _ in range(8):  # each a new connection
                assert (await asyncio.to_thread(complete, endpoints[1].http, max_tokens=2))[0] == 200
                assert await asyncio.to_thread(health, endpoints[1].grpc) == "SERVING"
            await both[1].stop(HURRY)
        await engine_side.stop()

    asyncio.run(main())


@pytest.mark.parametrize("is_listening", [True, False])
def test_a_taken_http_port_is_an_error_at_once(tmp_path, is_listening):
    async def start() -> None:
        with bind("127.0.0.1", 0, "--port") as other:
            port = other.getsockname()[1]
            if is_listening:
                other.listen()
            else:  # it begins to listen between our bind and our listen
                front_end = FrontEnd(ServerConfig(port=port, http_only=True), f"unix:{tmp_path}/engine.sock")
                http_api = front_end._start_http

                async def listen_first(sock: socket.socket) -> None:
                    other.listen()
                    await http_api(sock)

                front_end._start_http = listen_first
                with pytest.raises(ConfigError, match=f"--port {port} cannot be used"):
                    await front_end.start()
                return
            with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 cannot be used"):
                await FrontEnd(ServerConfig(port=port, http_only=True), f"unix:{tmp_path}/engine.sock").start()

    asyncio.run(start())


def test_a_taken_grpc_port_is_an_error_at_once(tmp_path):
    async def start() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            front_end = FrontEnd(ServerConfig(port=0, grpc_port=port), f"unix:{tmp_path}/engine.sock")
            with pytest.raises(ConfigError, match=f"--grpc-port {port} on 127.0.0.1 cannot be used"):
                await front_end.start()

    asyncio.run(start())
