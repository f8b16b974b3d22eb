"""A server with two engines and two front ends as processes: spread, affinity, the death of one engine, and that of the parent."""

import json
import re
from contextlib import ExitStack

import grpc
import psutil
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tests.serve.server_process import DIRECT, TIMEOUT_S, Call, Running, serving, until


def num_cached(channel: grpc.Channel, prompt: list[int]) -> int:
    params = pb.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=params)
    [response] = VllmEngineStub(channel).Generate(request, timeout=TIMEOUT_S)
    return response.complete.cached_tokens


def get(server: Running, path: str) -> str:
    with DIRECT.open(f"{server.http}{path}", timeout=TIMEOUT_S) as answer:
        return answer.read().decode()


def is_idle(server: Running) -> bool:
    """As every front end knows: each question reaches one of them."""
    return all(json.loads(get(server, "/load")) == {"server_load": 0} for _ in range(8))


def ended(server: Running) -> dict[tuple[str, str], int]:
    """Sequences by engine and reason, which any front end tells of all."""
    text = get(server, "/metrics")
    found = re.findall(r'jaxserve:request_success_total{engine="(\d)",finished_reason="(\w+)".*} (\S+)', text)
    return {(engine, reason): int(float(count)) for engine, reason, count in found if float(count)}


def test_two_engines_and_two_front_ends(model_path, tmp_path):
    with serving(model_path, tmp_path, api_server_count=2, data_parallel_size=2) as server, ExitStack() as stack:
        server.wait_for("(Ready)")
        for name in ("engine 0", "engine 1"):
            assert re.search(rf"{name}: weights +0\.25 s +none", server.text())
            assert re.search(rf"  {name} +cpu, 128 pages x 16 = 2,048 tokens", server.text())
        channels = list(server.channels(stack).values())

        calls = [Call(channels[i % 2], [3 + i, 7], 20) for i in range(8)]
        for call in calls:
            call.wait()
            assert call.token_ids == call.expected
        per_engine = [server.stats(i).num_generated_tokens for i in (0, 1)]
        assert sum(per_engine) >= 8 * 20 and min(per_engine) >= 2 * 20

        until(lambda: is_idle(server), "heartbeats without work")
        for channel in channels:
            for i in range(3):
                prompt = [100 + i] * 33 + [channels.index(channel)]
                assert [num_cached(channel, prompt) for _ in range(3)][1:] == [32, 32]

        lost = [Call(channel, [3 + i, 7], rank=1) for i, channel in enumerate(channels)]
        kept = [Call(channel, [30 + i, 7], rank=0) for i, channel in enumerate(channels)]
        until(lambda: all(call.token_ids for call in lost + kept), "tokens")
        server.engines()[1].kill()
        for call in lost:
            call.wait()
            assert call.error is not None and call.error.code() == grpc.StatusCode.UNAVAILABLE
            assert "engine 1" in call.error.details() and "send it again" in call.error.details()
        assert [server.status("/ready") for _ in range(8)] == [200] * 8
        assert all(server.completes() for _ in range(4))
        for call in kept:
            call.wait()
            assert call.token_ids == call.expected
        assert re.search(r"engine 1 was killed by SIGKILL; restart 1 of at most 5 follows in 0\.5 s", server.text())

        server.wait_for("(engine 1 serves again)")
        until(lambda: 'engine_up{engine="1",model_name="counting"} 1.0' in get(server, "/metrics"), "engine_up")
        for i, channel in enumerate(channels):
            again = Call(channel, [50 + i, 7], 20, rank=1)
            again.wait()
            assert again.token_ids == again.expected

        counts = ended(server)
        assert sum(counts.values()) == 8 + 18 + 2 + 4 + 2 + 2
        assert {key: count for key, count in counts.items() if key[1] != "length"} == {("1", "error"): 2}
        assert all(ended(server) == counts for _ in range(6))

        children = server.children()
        assert len(children) == 4
        server.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=5)
        assert (len(gone), alive) == (4, [])
