"""What every RPC has in common: keys, TLS, overload, request ids, the time before the engine is warm, and clients that do not read."""

import asyncio
import time

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.config import ServerConfig
from jaxserve.protocol import inference_pb2 as pb
from jaxserve.protocol.inference_pb2_grpc import InferenceStub
from jaxserve.serve import grpc_guard
from jaxserve.serve.server import FrontEnd

TIMEOUT_S = 30
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
"""Channel options of a client that does not prefetch more than 64 KiB."""
SERVICES = {
    "vllm.grpc.engine.VllmEngine": vllm.DESCRIPTOR.services_by_name["VllmEngine"],
    "jaxserve.v1.Inference": pb.DESCRIPTOR.services_by_name["Inference"],
}
METHODS = [
    (f"/{name}/{method.name}", method) for name, service in SERVICES.items() for method in service.methods if method.name != "HealthCheck"
]


def generate_request(**params) -> vllm.GenerateRequest:
    params = vllm.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 2} | params)
    return vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[5, 7]), sampling_params=params, stream=True)


def status_of(channel, path, metadata=()):
    """The status of a call with an empty message, whatever kind of method it is."""
    call = channel.stream_stream(path)(iter([b""]), timeout=TIMEOUT_S, metadata=metadata)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def health_of(channel, service=""):
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def test_a_key_guards_every_rpc_but_health(start_server):
    with start_server(ServerConfig(api_key=("correct-key",))) as server, server.channel() as channel:
        paths = [path for path, _ in METHODS] + ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no/such"]
        for metadata in ((), (("authorization", "Bearer wrong-key"),), (("authorization", "correct-key"),)):
            for path in paths:
                error = status_of(channel, path, metadata)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED, path
                assert "wrong-key" not in error.details() and "correct-key" not in error.details()
        assert health_of(channel) == "SERVING"
        stub = VllmEngineStub(channel)
        assert stub.HealthCheck(vllm.HealthCheckRequest(), timeout=TIMEOUT_S).healthy
        metadata = (("authorization", "Bearer correct-key"),)
        *_, last = stub.Generate(generate_request(), timeout=TIMEOUT_S, metadata=metadata)
        assert last.complete.finish_reason == "length"
        assert status_of(channel, "/no/such", metadata).code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_lists_both_services(server):
    with server.channel() as channel:
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        [answer] = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=TIMEOUT_S)
        assert SERVICES.keys() <= {service.name for service in answer.list_services_response.service}
        assert [health_of(channel, name) for name in SERVICES] == ["SERVING"] * 2


@pytest.mark.parametrize("is_mutual", [False, True])
def test_tls(start_server, tmp_path, is_mutual):
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    mine = authority.issue_cert("me@example.org")
    config = ServerConfig(ssl_certfile=str(tmp_path / "server.pem"), ssl_ca_certs=str(tmp_path / "ca.pem") if is_mutual else None)
    roots = authority.cert_pem.bytes()
    known = grpc.ssl_channel_credentials(roots, mine.private_key_pem.bytes(), mine.cert_chain_pems[0].bytes())
    with start_server(config) as server:
        address = f"localhost:{server.grpc.rpartition(':')[2]}"
        with grpc.secure_channel(address, known) as channel:
            *_, last = VllmEngineStub(channel).Generate(generate_request(), timeout=TIMEOUT_S)
            assert last.complete.finish_reason == "length"
        strangers = [grpc.insecure_channel(address), grpc.secure_channel(address, grpc.ssl_channel_credentials())]
        if is_mutual:
            strangers.append(grpc.secure_channel(address, grpc.ssl_channel_credentials(roots)))
        for channel in strangers:
            with channel, pytest.raises(grpc.RpcError) as caught:
                VllmEngineStub(channel).HealthCheck(vllm.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_beyond_max_waiting_calls_are_refused_at_once_and_the_others_end(start_server):
    with start_server(max_waiting=2) as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        server.runner.gate.clear()
        admitted = [stub.Generate(generate_request(), timeout=TIMEOUT_S) for _ in range(10)]  # 8 seats and 2 in the queue
        end = time.monotonic() + TIMEOUT_S
        while stub.GetServerInfo(vllm.GetServerInfoRequest(), timeout=TIMEOUT_S).active_requests < 10:
            assert time.monotonic() < end
        inference = InferenceStub(channel)
        text = pb.GenerateRequest(text="Hello")
        for refused in (stub.Generate(generate_request(), timeout=TIMEOUT_S), inference.GenerateStream(text, timeout=TIMEOUT_S)):
            start = time.process_time()  # of this process alone, which is also the server
            with pytest.raises(grpc.RpcError) as caught:
                list(refused)  # while no step ends
            assert time.process_time() - start < 0.1
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert float(dict(caught.value.trailing_metadata())["retry-after"]) >= 1
        server.runner.gate.set()
        assert [list(call)[-1].complete.finish_reason for call in admitted] == ["length"] * 10


def test_a_request_id_comes_back_and_one_is_made_where_there_is_none(server):
    with server.channel() as channel:
        stub = VllmEngineStub(channel)
        good = stub.Generate(generate_request(), timeout=TIMEOUT_S, metadata=(("x-request-id", "mine-1"),))
        list(good)
        bad = stub.Generate(generate_request(top_p=2.0), timeout=TIMEOUT_S, metadata=(("x-request-id", "mine-2"),))
        with pytest.raises(grpc.RpcError):
            list(bad)
        unnamed = stub.Generate(generate_request(), timeout=TIMEOUT_S)
        list(unnamed)
    ids = [dict(call.trailing_metadata())["x-request-id"] for call in (good, bad, unnamed)]
    assert ids[:2] == ["mine-1", "mine-2"]
    assert len(ids[2]) >= 16


def test_a_call_without_a_name_is_aborted_by_its_request_id(server):
    server.runner.step_s = 0.02
    try:
        with server.channel() as channel:
            stub = VllmEngineStub(channel)
            call = stub.Generate(generate_request(max_tokens=250), timeout=TIMEOUT_S, metadata=(("x-request-id", "to-end"),))
            next(call)
            stub.Abort(vllm.AbortRequest(request_ids=["to-end"]), timeout=TIMEOUT_S)
            assert list(call)[-1].complete.finish_reason == "abort"
    finally:
        server.runner.step_s = 0.0


def test_a_message_beyond_max_request_bytes_is_refused(start_server):
    with start_server(ServerConfig(max_request_bytes=2048)) as server, server.channel() as channel:
        stub = InferenceStub(channel)
        assert stub.Tokenize(pb.TokenizeRequest(text="a" * 1000), timeout=TIMEOUT_S).token_ids
        with pytest.raises(grpc.RpcError) as caught:
            stub.Tokenize(pb.TokenizeRequest(text="a" * 3000), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "method", ["/jaxserve.v1.Inference/Tokenize", "/jaxserve.v1.Inference/GenerateStream", "/vllm.grpc.engine.VllmEngine/Generate"]
)
def test_what_is_no_message_is_the_clients_fault(server, method, caplog):
    with server.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(method)(b"\xff\xff\xff", timeout=30))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


def test_before_the_engine_is_warm_every_call_is_unavailable(engine_side):
    not_served = {"SubscribeKvEvents", "FlushCache", "StartProfile", "StopProfile", "Abort"}

    def ask(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            assert [health_of(channel, name) for name in ("", *SERVICES)] == ["NOT_SERVING"] * 3
            assert not VllmEngineStub(channel).HealthCheck(vllm.HealthCheckRequest(), timeout=TIMEOUT_S).healthy
            for path, method in METHODS:
                if method.name not in not_served:
                    error = status_of(channel, path)
                    assert (error.code(), "loading" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True), path

    def ask_again(address: str) -> str:
        with grpc.insecure_channel(address) as channel:
            *_, last = VllmEngineStub(channel).Generate(generate_request(), timeout=TIMEOUT_S)
            assert [health_of(channel, name) for name in ("", *SERVICES)] == ["SERVING"] * 3
            return last.complete.finish_reason

    async def run() -> None:
        front_end = FrontEnd(ServerConfig(grpc_port=0, grpc_only=True), engine_side.address)
        endpoints = await front_end.start()
        try:
            await asyncio.to_thread(ask, endpoints.grpc)
            await engine_side.start()
            await front_end.wait_until_ready()
            assert await asyncio.to_thread(ask_again, endpoints.grpc) == "length"
        finally:
            await front_end.stop()
            await engine_side.stop()

    asyncio.run(run())


@pytest.mark.parametrize("service", SERVICES)
def test_a_client_that_does_not_read_is_aborted_and_slows_nobody(start_server, monkeypatch, service):
    monkeypatch.setattr(grpc_guard, "SLOW_READER_S", 0.4)
    with start_server() as server, grpc.insecure_channel(server.grpc, options=NARROW) as lazy, server.channel() as channel:
        server.runner.step_s = 0.005
        wide = {"n": 7, "temperature": 1.0, "max_tokens": 250, "logprobs": 20, "ignore_eos": True}
        if service == "jaxserve.v1.Inference":
            text = pb.GenerateRequest(text="Hello", sampling=pb.SamplingParams(**wide))
            call = InferenceStub(lazy).GenerateStream(text, timeout=TIMEOUT_S)
        else:
            call = VllmEngineStub(lazy).Generate(generate_request(**wide), timeout=TIMEOUT_S)
        next(call)
        for other in (channel, lazy):  # on its own connection too
            responses = VllmEngineStub(other).Generate(generate_request(max_tokens=10), timeout=TIMEOUT_S)
            assert list(responses)[-1].complete.finish_reason == "length"
        server.wait_until_idle()
        assert server.loop.stats().num_generated_tokens < 7 * 250
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "has not read" in caught.value.details()
