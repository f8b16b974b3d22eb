"""Two engines behind one front end: who gets what, and what is told when one is full, lost or asked for by its number."""

import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.config import ServerConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine import link_client
from jaxserve.engine.profiler import Profiler
from jaxserve.engine.routing import fingerprints
from jaxserve.errors import InvalidRequest

TIMEOUT_S = 30
SEATS = 8


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def pair(start_server):
    with start_server(num_engines=2) as server:
        yield server


@pytest.fixture
def stub(pair):
    with pair.channel() as channel:
        yield VllmEngineStub(channel)


def start(stub, prompt=(5, 7), num_tokens=4, rank=None, request_id=""):
    params = pb.SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
    tokenized = pb.TokenizedInput(input_ids=prompt)
    request = pb.GenerateRequest(
        request_id=request_id, tokenized=tokenized, sampling_params=params, stream=num_tokens > 100, data_parallel_rank=rank
    )
    return stub.Generate(request, timeout=TIMEOUT_S)


def complete(stub, prompt=(5, 7), **options) -> pb.GenerateComplete:
    [response] = list(start(stub, prompt, **options))
    return response.complete


def post(client, **fields):
    fields = {"model": "counting", "temperature": 0, "max_tokens": 4} | fields
    return client.completions.create(**fields, extra_body={"ignore_eos": True, "return_token_ids": True})


def num_open(server) -> list[int]:
    return [side.loop._limit.num_open for side in server.engine_sides]


def hold(server) -> None:
    """No step ends until `release`."""
    for side in server.engine_sides:
        side.runner.gate.clear()


def release(server) -> None:
    for side in server.engine_sides:
        side.runner.gate.set()


def scrape(server) -> str:
    with urllib.request.urlopen(f"{server.http}/metrics", timeout=TIMEOUT_S) as answer:
        return answer.read().decode()


def by_engine(text: str, name: str, labels: str = "") -> list[float]:
    return [float(value) for value in re.findall(rf"jaxserve:{name}{{.*engine=\"\d\".*{labels}.*}} (\S+)", text)]


def status(server, path: str) -> int:
    try:
        with urllib.request.urlopen(f"{server.http}{path}", timeout=TIMEOUT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def natural_home(prompt: list[int]) -> int:
    """Which of two idle engines a prompt goes to that nobody has seen."""
    return fingerprints(Request(request_id="", prompt_token_ids=tuple(prompt)), 16)[0] % 2


def test_prompts_of_clients_and_of_one_call_are_spread_and_the_n_of_a_prompt_stay_together(pair):
    hold(pair)
    with pair.client() as client, ThreadPoolExecutor(8) as pool:
        alone = []
        for i in range(4):
            alone.append(pool.submit(post, client, prompt=[5, i]))
            until(lambda: sum(num_open(pair)) == len(alone))
        assert num_open(pair) == [2, 2]
        prompts = [[9, i] for i in range(4)]
        together = pool.submit(post, client, prompt=prompts, n=3, temperature=1, seed=3)
        until(lambda: sum(num_open(pair)) == 4 + 12)
        assert num_open(pair) == [8, 8]
        assert [side.engine.info.max_num_seqs for side in pair.engine_sides] == [SEATS] * 2
        release(pair)
        for i, future in enumerate(alone):
            assert future.result(TIMEOUT_S).choices[0].token_ids == pair.output_ids([5, i], 4)
        choices = together.result(TIMEOUT_S).choices
    expected = [pair.output_ids(prompt, 4, seed=3 + i) for prompt in prompts for i in range(3)]
    assert [choice.token_ids for choice in choices] == expected
    pair.wait_until_idle()


def test_a_known_beginning_goes_where_it_is_known_and_salts_are_apart(pair, stub):
    prompts = [[i] * 33 for i in range(100, 104)]
    assert [complete(stub, prompt).cached_tokens for prompt in prompts] == [0] * 4
    for _ in range(3):
        assert [complete(stub, prompt + [7] * 8).cached_tokens for prompt in prompts] == [32] * 4
    queries = [side.loop.stats().num_cache_queries for side in pair.engine_sides]
    assert all(queries)
    with pair.client() as client:
        cached = []
        for salt in ("a", "b", "a", "b"):
            extra = {"cache_salt": salt, "ignore_eos": True}
            answer = client.completions.create(model="counting", prompt=[9] * 40, max_tokens=2, temperature=0, extra_body=extra)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 0, 32, 32]


def test_embeddings_are_spread_too(pair):
    hold(pair)
    with pair.client() as client, ThreadPoolExecutor(1) as pool:
        options = {"model": "counting", "input": [[3, i] for i in range(6)], "extra_body": {"normalize": False}}
        answer = pool.submit(client.embeddings.create, **options)
        until(lambda: num_open(pair) == [3, 3])
        release(pair)
        assert [one.embedding[0] for one in answer.result(TIMEOUT_S).data] == list(range(6))


def test_what_one_has_no_room_for_goes_to_the_next_and_429_means_that_all_are_full(start_server):
    silent = {"heartbeat_s": 3600}  # after the first, the front end hears nothing of what others send
    with start_server(num_engines=2, max_waiting=3, **silent) as server, server.client() as client, server.channel() as channel:
        stub = VllmEngineStub(channel)
        hold(server)
        for side, count in zip(server.engine_sides, (SEATS + 3, SEATS + 2), strict=True):
            other = side.loop.connect(lambda output: None)
            for i in range(count):
                params = SamplingParams(max_tokens=2, temperature=0)
                other.add(Request(request_id=f"other-{i}", prompt_token_ids=(5, 7), params=params))
        with pytest.raises(grpc.RpcError, match="--max-waiting 3") as caught:
            complete(stub, rank=0)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(post, client, prompt=[4, 2])  # refused by the first engine, which seems as idle as the second
            until(lambda: num_open(server) == [SEATS + 3] * 2)
            with pytest.raises(openai.RateLimitError, match="--max-waiting 3"):
                post(client, prompt=[4, 3])
            release(server)
            assert served.result(TIMEOUT_S).choices[0].token_ids == server.output_ids([4, 2], 4)
        text = scrape(server)
    assert sum(by_engine(text, "num_requests_rejected_total")) == 2
    assert sum(by_engine(text, "request_success_total", 'finished_reason="length"')) == 1


def test_a_call_may_be_as_large_as_all_engines_together_and_one_prompt_as_one(start_server):
    with start_server(num_engines=2, max_waiting=3) as server, server.client() as client:
        most = 2 * (SEATS + 3)
        assert len(post(client, prompt=[[5, i] for i in range(most)]).choices) == most
        with pytest.raises(openai.BadRequestError, match=f"takes {most} at once \\(16 running, 6 waiting\\)"):
            post(client, prompt=[[5, i] for i in range(most + 1)])
        with pytest.raises(openai.BadRequestError, match="takes 11 at once of one prompt \\(8 running, 3 waiting\\)"):
            post(client, prompt=[5], n=12, temperature=1)


def test_one_lost_engine_fails_its_own_requests_and_the_others_serve_on(pair, stub):
    for side in pair.engine_sides:
        side.runner.step_s = 0.01
    lost, kept = start(stub, [3, 7], 200, rank=1), start(stub, [4, 7], 100, rank=0)
    assert next(lost).chunk.token_ids
    until(lambda: num_open(pair) == [1, 1])
    pair.lose_engine(1)
    with pytest.raises(grpc.RpcError, match="engine 1 .*the request is lost, send it again") as caught:
        list(lost)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert list(next(kept).complete.output_ids) == pair.output_ids([4, 7], 100)

    assert (status(pair, "/health"), status(pair, "/ready")) == (200, 200)
    with pair.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    for i in range(4):
        assert list(complete(stub, [6, i]).output_ids) == pair.output_ids([6, i], 4)
    with pytest.raises(grpc.RpcError, match="engine 1 is restarting"):
        complete(stub, rank=1)
    text = scrape(pair)
    assert by_engine(text, "engine_up") == [1, 0]
    assert len(by_engine(text, "num_requests_running")) == 1
    assert [load.dp_rank for load in stub.GetLoads(pb.GetLoadsRequest(), timeout=TIMEOUT_S).loads] == [0]
    with pytest.raises(grpc.RpcError, match="engine 1 is restarting"):
        stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=TIMEOUT_S)

    pair.lose_engine(0)
    pair.wait_until_ready(is_ready=False)
    assert (status(pair, "/health"), status(pair, "/ready")) == (503, 503)
    with pair.client() as client, pytest.raises(openai.InternalServerError, match="is restarting"):
        post(client, prompt=[5])

    pair.return_engine(1)
    pair.wait_until_ready()
    assert list(complete(stub, [6, 9]).output_ids) == pair.output_ids([6, 9], 4)
    pair.return_engine(0)
    until(lambda: pair.front_end.client.engines[0].is_healthy)
    assert [complete(stub, rank=rank).finish_reason for rank in (0, 1)] == ["length"] * 2


def test_a_new_engine_is_not_taken_to_know_what_the_old_one_knew(pair, stub):
    prompt = [11] * 40
    natural = natural_home(prompt)
    other = 1 - natural
    complete(stub, prompt, rank=other)
    assert complete(stub, prompt).cached_tokens == 32
    assert [bool(side.loop.stats().num_steps) for side in pair.engine_sides] == [natural == 1, natural == 0]
    pair.lose_engine(other)
    pair.return_engine(other)
    until(lambda: pair.front_end.client.engines[other].is_healthy)
    assert complete(stub, prompt).cached_tokens == 0
    assert pair.engine_sides[natural].loop.stats().num_steps


def test_an_abort_finds_the_engine(pair, stub):
    hold(pair)
    calls = [start(stub, [3, i], 200, rank=i, request_id="mine") for i in range(2)] + [start(stub, [4, 7], 4, rank=1, request_id="other")]
    until(lambda: num_open(pair) == [1, 2])
    stub.Abort(pb.AbortRequest(request_ids=["mine"]), timeout=TIMEOUT_S)
    release(pair)
    assert [list(call)[-1].complete.finish_reason for call in calls] == ["abort", "abort", "length"]
    pair.wait_until_idle()


def test_gateways_see_every_engine(pair, stub):
    for rank, count in ((0, 1), (1, 3)):
        for i in range(count):
            complete(stub, [5, i] * 20, rank=rank)
    info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert (info.data_parallel_size, info.max_num_seqs, info.active_requests) == (2, SEATS, 0)
    answer = stub.GetLoads(pb.GetLoadsRequest(), timeout=TIMEOUT_S)
    assert answer.dp_rank_count == 2
    assert [(load.dp_rank, load.max_running_requests, load.max_total_num_tokens) for load in answer.loads] == [
        (0, SEATS, 128 * 16),
        (1, SEATS, 128 * 16),
    ]
    [load] = stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=TIMEOUT_S).loads
    assert load.dp_rank == 1
    for request in (pb.GetLoadsRequest(dp_rank=2), pb.GetLoadsRequest(dp_rank=-1)):
        with pytest.raises(grpc.RpcError, match="2 engines, ranks 0 to 1"):
            stub.GetLoads(request, timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError, match="data_parallel_rank is 2; this server has 2 engines") as caught:
        complete(stub, rank=2)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_metrics_are_those_of_each_engine(pair, stub):
    for rank, count in ((0, 1), (1, 3)):
        for i in range(count):
            complete(stub, [5, i] * 20, rank=rank)
    pair.wait_until_idle()
    text = scrape(pair)
    assert by_engine(text, "engine_up") == [1, 1]
    assert by_engine(text, "generation_tokens_total") == [4, 12]
    assert by_engine(text, "iteration_tokens_total_count") == [side.loop.stats().num_steps for side in pair.engine_sides]
    assert by_engine(text, "request_success_total", 'finished_reason="length"') == [1, 3]
    assert by_engine(text, "prompt_tokens_total") == [40, 120]
    assert by_engine(text, "time_to_first_token_seconds_count") == [1, 3]
    assert by_engine(text, "request_generation_tokens_sum") == [4, 12]
    assert len(re.findall(r"# TYPE jaxserve:generation_tokens_total ", text)) == 1


def test_flushing_and_profiling_reach_all(start_server, monkeypatch, tmp_path):
    running: dict[int, str] = {}

    def begin(profiler, directory):
        if running.get(id(profiler)):
            raise InvalidRequest("a trace is running; stop it first.")
        running[id(profiler)] = directory

    def end(profiler):
        if not running.get(id(profiler)):
            raise InvalidRequest("no trace is running.")
        return running.pop(id(profiler))

    monkeypatch.setattr(Profiler, "start", begin)
    monkeypatch.setattr(Profiler, "stop", end)
    with start_server(ServerConfig(enable_dev_endpoints=True), num_engines=2) as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        for rank in (0, 1):
            assert [complete(stub, [9] * 40, rank=rank).cached_tokens for _ in range(2)] == [0, 32]
        moved = [12] * 40
        complete(stub, moved, rank=1 - natural_home(moved))
        server.engine_sides[1].runner.gate.clear()
        call = start(stub, rank=1)
        until(lambda: server.engine_sides[1].engine.has_work)
        flush = stub.FlushCache.future(common_pb2.FlushCacheRequest(timeout_s=TIMEOUT_S), timeout=TIMEOUT_S)
        release(server)
        list(call)
        assert flush.result().success
        assert [complete(stub, [9] * 40, rank=rank).cached_tokens for rank in (0, 1)] == [0, 0]
        natural = server.engine_sides[natural_home(moved)].loop
        num_steps = natural.stats().num_steps
        assert complete(stub, moved).cached_tokens == 0
        assert natural.stats().num_steps > num_steps

        profile = common_pb2.StartProfileRequest(output_dir=str(tmp_path))
        assert stub.StartProfile(profile, timeout=TIMEOUT_S).success
        assert sorted(running.values()) == [str(tmp_path / "engine-0"), str(tmp_path / "engine-1")]
        with pytest.raises(grpc.RpcError, match="stop it first"):
            stub.StartProfile(profile, timeout=TIMEOUT_S)
        assert str(tmp_path) in stub.StopProfile(common_pb2.StopProfileRequest(), timeout=TIMEOUT_S).message
        assert not running
        with pytest.raises(grpc.RpcError, match="no trace is running"):
            stub.StopProfile(common_pb2.StopProfileRequest(), timeout=TIMEOUT_S)


def test_what_an_engine_that_is_there_does_not_answer_has_not_succeeded(start_server, monkeypatch, tmp_path):
    running: list[str] = []
    proceed = threading.Event()

    def begin(profiler, directory):
        if directory.endswith("1"):
            assert proceed.wait(TIMEOUT_S)
        running.append(directory)

    monkeypatch.setattr(Profiler, "start", begin)
    monkeypatch.setattr(Profiler, "stop", lambda profiler: running.pop())
    monkeypatch.setattr(link_client, "CONTROL_TIMEOUT_S", 1.0)
    with start_server(ServerConfig(enable_dev_endpoints=True), num_engines=2) as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        server.engine_sides[1].runner.gate.clear()
        call = start(stub, rank=1)
        until(lambda: server.engine_sides[1].engine.has_work)
        assert not stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=TIMEOUT_S).success
        with pytest.raises(grpc.RpcError, match="engine 1 does not answer") as caught:
            stub.StartProfile(common_pb2.StartProfileRequest(output_dir=str(tmp_path)), timeout=TIMEOUT_S)
        assert (caught.value.code(), running) == (grpc.StatusCode.UNAVAILABLE, [])
        proceed.set()
        release(server)
        list(call)
        server.lose_engine(1)
        until(lambda: not server.front_end.client.engines[1].is_connected)
        assert stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=TIMEOUT_S).success


def test_an_engine_that_makes_no_progress_gets_nothing_new(start_server):
    with start_server(ServerConfig(stall_timeout=1), num_engines=2, heartbeat_s=0.05) as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        stalled, healthy = server.front_end.client.engines
        server.engine_sides[0].runner.gate.clear()
        server.engine_sides[1].runner.step_s = 0.01
        call = start(stub, [3, 7], rank=0)
        busy = [start(stub, [8, i], 200, rank=1) for i in range(2)]  # so that it is the stalled one that has less to do
        until(lambda: not stalled.is_healthy)
        assert healthy.is_healthy
        for i in range(4):
            assert list(complete(stub, [6, i]).output_ids) == server.output_ids([6, i], 4)
        assert (status(server, "/ready"), num_open(server)[0]) == (200, 1)
        assert by_engine(scrape(server), "engine_up") == [0, 1]
        assert all(list(one)[-1].complete.finish_reason == "length" for one in busy)
        release(server)
        assert [response.complete.finish_reason for response in call] == ["length"]


def test_what_fits_the_smaller_engine_is_taken(pair):
    pair.lose_engine(1)
    pair.engine_sides[1].info_changes = {"max_model_len": 99}
    pair.return_engine(1)
    until(lambda: pair.front_end.client.engines[1].is_healthy)
    assert pair.front_end.service.info.max_model_len == 99
    with pair.client() as client, pytest.raises(openai.BadRequestError, match="99"):
        post(client, prompt=[5] * 100)
