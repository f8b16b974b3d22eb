"""How a front end starts and ends: a port taken meanwhile, calls that are open when it stops, an engine that is gone."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxserve.config import ServerConfig
from jaxserve.engine.link_server import start_link_server
from jaxserve.engine.loop import EngineLoop
from jaxserve.errors import ConfigError
from jaxserve.serve import server as server_module
from jaxserve.serve.server import FrontEnd, run_front_end


def complete(http: str, **fields) -> tuple[int, str]:
    body = {"prompt": [5, 7], "temperature": 0, "ignore_eos": True, **fields}
    request = urllib.request.Request(f"{http}/v1/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_stopping_server_lets_calls_end_and_aborts_the_rest(fresh_server):
    server = fresh_server
    server.runner._step_s = 0.05
    answers: dict[str, tuple[int, str]] = {}
    calls = {"short": {"max_tokens": 8}, "long": {"max_tokens": 200}, "stream": {"max_tokens": 200, "stream": True}}

    def call(name: str) -> None:
        answers[name] = complete(server.http, **calls[name])

    threads = [threading.Thread(target=call, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    while server.engine.scheduler.num_running < 3:
        pass
    with server.channel() as channel:
        stub = server.stub(channel)
        draining = asyncio.run_coroutine_threadsafe(server.front_end._service.drain(1.0), server.aio_loop)
        while complete(server.http, max_tokens=1)[0] == 200:
            pass
        assert complete(server.http)[0] == 503
        assert not stub.HealthCheck(pb.HealthCheckRequest()).healthy
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5]))))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    draining.result(10)
    for thread in threads:
        thread.join()
    assert [status for status, _ in answers.values()] == [200, 200, 200]
    assert '"finish_reason":"length"' in answers["short"][1]
    assert '"finish_reason":"abort"' in answers["long"][1]
    assert answers["stream"][1].endswith("data: [DONE]\n\n")
    assert '"finish_reason":"abort"' in answers["stream"][1]
    server.wait_until_idle()


class IdleEngine:
    has_work = False


async def link_for(server, address: str) -> grpc.aio.Server:
    loop = EngineLoop(IdleEngine())
    loop.start()
    return await start_link_server(loop, server.engine.info, address)


def test_a_port_taken_while_the_engine_loads_is_an_error(server, tmp_path):
    async def start() -> None:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            port = other.getsockname()[1]
            front_end = FrontEnd(ServerConfig(port=port, http_only=True), f"unix:{tmp_path}/engine.sock")
            starting = asyncio.create_task(front_end.start())
            await asyncio.sleep(0.05)
            other.listen()
            link = await link_for(server, f"unix:{tmp_path}/engine.sock")
            with pytest.raises(ConfigError, match=f"--port {port} cannot be used"):
                await starting
            await front_end._client.close()
            await link.stop(None)

    asyncio.run(start())


def test_a_front_end_ends_by_itself_when_its_engine_is_lost(server, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "LOST_ENGINE_S", 0.1)

    async def run() -> int:
        address = f"unix:{tmp_path}/engine.sock"
        link = await link_for(server, address)
        ready = asyncio.Event()
        running = asyncio.create_task(run_front_end(ServerConfig(port=0, grpc_port=0), address, lambda _: ready.set()))
        await ready.wait()
        await link.stop(None)
        return await asyncio.wait_for(running, 10)

    assert asyncio.run(run()) == 1


def test_a_grpc_port_taken_while_the_engine_loads_is_an_error(server, tmp_path):
    async def start() -> None:
        address = f"unix:{tmp_path}/engine.sock"
        link = await link_for(server, address)
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            front_end = FrontEnd(ServerConfig(port=0, grpc_port=port, grpc_only=True), address)
            with pytest.raises(ConfigError, match=f"--grpc-port {port} on 127.0.0.1 cannot be used"):
                await front_end.start()
            await front_end._client.close()
            await link.stop(None)

    asyncio.run(start())
