"""What gateways and operators ask `VllmEngine` besides tokens: server information, loads, flushing, profiling."""

import time
from datetime import datetime

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve import __version__
from jaxserve.config import ServerConfig
from jaxserve.engine.profiler import Profiler
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import InvalidRequest
from jaxserve.serve.grpc_messages import Loads

TIMEOUT_S = 30
DEV = ServerConfig(enable_dev_endpoints=True)
PROMPT = list(range(2, 42))  # two full pages of 16 and a rest


def start(stub, prompt=(5, 7), max_tokens=4):
    params = pb.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=params)
    return stub.Generate(request, timeout=TIMEOUT_S)


def complete(stub, prompt=(5, 7), max_tokens=4) -> pb.GenerateComplete:
    [response] = list(start(stub, prompt, max_tokens))
    return response.complete


def test_server_info_counts_what_runs_and_waits(start_server):
    with start_server() as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        before = time.time()
        server.runner.gate.clear()
        calls = [start(stub) for _ in range(3)]
        end = time.monotonic() + 30
        while (info := stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)).active_requests < 3:
            assert time.monotonic() < end, info
        assert before <= info.last_receive_timestamp <= time.time()
        server.runner.gate.set()
        for call in calls:
            list(call)
        server.wait_until_idle()
        info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert (info.active_requests, info.is_paused, info.server_type, info.data_parallel_size) == (0, False, "vllm-grpc", 1)
    assert (info.block_size, info.max_num_seqs, info.model_dtype, info.kv_cache_dtype) == (16, 8, "float32", "float32")
    assert (info.kv_connector, info.kv_role, info.kv_engine_id, info.mm_processor) == ("", "", "", "")
    assert 0 < info.uptime_seconds < time.time() - before + 10


def test_loads_are_the_engines_figures(start_server):
    with start_server() as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        complete(stub, PROMPT)
        complete(stub, PROMPT)  # its first two pages are known
        answer = stub.GetLoads(pb.GetLoadsRequest(include=["core"]), timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (answer.version, answer.dp_rank_count) == (__version__, 1)
    assert datetime.fromisoformat(answer.timestamp).tzinfo is not None
    [load] = answer.loads
    assert (load.dp_rank, load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (0, 0, 0, 0)
    assert (load.max_total_num_tokens, load.max_running_requests, load.num_used_tokens) == (128 * 16, 8, 0)
    assert load.cache_hit_rate == pytest.approx(32 / 80)


def test_loads_by_hand(server):
    info = server.engine.info
    loads = Loads()
    stats = EngineStats(num_running=4, num_waiting=3, num_used_pages=32, num_pages=129, num_generated_tokens=1000)
    first = loads.load(2, stats, info, 100.0)
    assert (first.dp_rank, first.num_running_reqs, first.num_waiting_reqs, first.num_total_reqs, first.num_used_tokens) == (2, 4, 3, 7, 512)
    assert (first.token_usage, first.utilization, first.gen_throughput, first.cache_hit_rate) == (0.25, 0.5, 0.0, 0.0)
    later = EngineStats(num_pages=129, num_generated_tokens=1600)
    assert loads.load(2, later, info, 102.0).gen_throughput == 300.0
    assert loads.load(2, later, info, 102.1).gen_throughput == 300.0, "the interval is too short for a new rate"
    assert loads.load(2, later, info, 103.0).gen_throughput == 0.0
    assert loads.load(2, EngineStats(num_generated_tokens=5), info, 104.0).gen_throughput == 0.0, "the engine began anew"


@pytest.mark.parametrize("name", ["FlushCache", "StartProfile", "StopProfile"])
def test_development_rpcs_need_their_flag(server, name):
    with server.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        getattr(VllmEngineStub(channel), name)(getattr(common_pb2, f"{name}Request")(), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "--enable-dev-endpoints" in caught.value.details()


def test_a_flushed_cache_knows_no_prefix(start_server):
    with start_server(DEV) as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        assert [complete(stub, PROMPT).cached_tokens for _ in range(2)] == [0, 32]
        assert stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=TIMEOUT_S).success
        assert complete(stub, PROMPT).cached_tokens == 0


def test_flushing_waits_for_what_runs_as_long_as_it_may(start_server):
    with start_server(DEV) as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        server.runner.step_s = 0.02
        call = start(stub, max_tokens=40)
        while not server.engine.scheduler.num_running:
            time.sleep(0.002)
        at_once = stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=TIMEOUT_S)
        assert (at_once.success, "running" in at_once.message) == (False, True)
        assert stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=20), timeout=TIMEOUT_S).success
        assert [len(response.complete.output_ids) for response in call] == [40]


def test_profiling_writes_where_it_was_told(start_server, monkeypatch, tmp_path):
    running: list[str] = []

    def begin(profiler, directory):
        if running:
            raise InvalidRequest("a trace is running; stop it first.")
        running.append(directory)

    monkeypatch.setattr(Profiler, "start", begin)
    monkeypatch.setattr(Profiler, "stop", lambda profiler: running.pop())
    with start_server(DEV) as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        started = stub.StartProfile(common_pb2.StartProfileRequest(output_dir=str(tmp_path)), timeout=TIMEOUT_S)
        assert (started.success, running) == (True, [str(tmp_path)])
        with pytest.raises(grpc.RpcError, match="stop it first"):
            stub.StartProfile(common_pb2.StartProfileRequest(), timeout=TIMEOUT_S)
        stopped = stub.StopProfile(common_pb2.StopProfileRequest(), timeout=TIMEOUT_S)
        assert (stopped.success, running) == (True, [])
        assert str(tmp_path) in stopped.message
        for option in ({"num_steps": 3}, {"activities": ["CPU"]}, {"profile_by_stage": True}):
            with pytest.raises(grpc.RpcError) as caught:
                stub.StartProfile(common_pb2.StartProfileRequest(**option), timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert next(iter(option)) in caught.value.details()
    assert running == []
