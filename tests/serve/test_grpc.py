"""`vllm.grpc.engine.VllmEngine` through a real client: chunk rules, defaults, errors, cancel, deadline, health, reflection."""

import asyncio
import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.config import ServerConfig
from jaxserve.serve import grpc_messages
from jaxserve.serve.server import FrontEnd

TIMEOUT_S = 30


@pytest.fixture
def stub(server) -> Iterator[VllmEngineStub]:
    with server.channel() as channel:
        yield VllmEngineStub(channel)


def request(prompt=(5, 7), *, stream=False, request_id="r", **params) -> pb.GenerateRequest:
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    tokenized = pb.TokenizedInput(input_ids=prompt)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokenized, stream=stream, sampling_params=pb.SamplingParams(**params))


def generate(stub, *args, **kwargs) -> list[pb.GenerateResponse]:
    return list(stub.Generate(request(*args, **kwargs), timeout=TIMEOUT_S))


def test_without_stream_there_is_only_a_complete(server, stub):
    [response] = generate(stub, max_tokens=6)
    complete = response.complete
    assert list(complete.output_ids) == server.output_ids([5, 7], 6)
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens, complete.index) == ("length", 2, 6, 0)
    assert complete.WhichOneof("matched_stop") is None


def test_a_stream_has_each_token_in_one_chunk_and_then_a_complete(server, stub):
    responses = generate(stub, max_tokens=6, stream=True)
    *chunks, last = responses
    assert [response.WhichOneof("response") for response in responses] == ["chunk"] * 6 + ["complete"]
    assert [token_id for response in chunks for token_id in response.chunk.token_ids] == server.output_ids([5, 7], 6)
    assert all(response.chunk.completion_tokens == 1 and response.chunk.prompt_tokens == 2 for response in chunks)
    assert list(last.complete.output_ids) == server.output_ids([5, 7], 6)[-1:]
    assert (last.complete.completion_tokens, last.complete.finish_reason) == (1, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_n_sequences_have_their_index_and_end_one_by_one(server, stub, stream):
    responses = generate(stub, n=3, temperature=1.0, seed=9, max_tokens=4, stream=stream)
    completes = [response.complete for response in responses if response.HasField("complete")]
    assert sorted(complete.index for complete in completes) == [0, 1, 2]
    for index in range(3):
        expected = server.output_ids([5, 7], 4, seed=9 + index)
        if stream:
            chunks = [response.chunk for response in responses if response.HasField("chunk") and response.chunk.index == index]
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected
        else:
            assert list(next(complete for complete in completes if complete.index == index).output_ids) == expected


def test_logprobs(stub):
    [response] = generate(stub, [5, 7, 9], max_tokens=2, logprobs=2, prompt_logprobs=1)
    output, given = response.complete.output_logprobs, response.complete.input_logprobs
    assert list(output.token_ids) == list(response.complete.output_ids)
    assert list(output.token_logprobs) == [-1.0, -1.0]
    assert [list(top.values) for top in output.top_logprobs] == [[-1.0, -2.0]] * 2
    assert list(given.token_ids) == [5, 7, 9]
    assert [entry.HasField("value") for entry in given.token_logprobs] == [False, True, True]
    streamed = generate(stub, [5, 7, 9], max_tokens=2, logprobs=2, prompt_logprobs=1, stream=True)
    assert [response.chunk.HasField("input_logprobs") for response in streamed[:-1]] == [True, False]
    assert [value for response in streamed[:-1] for value in response.chunk.output_logprobs.token_logprobs] == [-1.0, -1.0]
    [plain] = generate(stub, max_tokens=2)
    assert not plain.complete.HasField("output_logprobs")


def test_zeros_are_defaults(server, stub):
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 7]), sampling_params=pb.SamplingParams(seed=3, ignore_eos=True))
    [response] = list(stub.Generate(message, timeout=TIMEOUT_S))
    assert len(response.complete.output_ids) == 254  # max_tokens unset: the rest of the context
    assert list(response.complete.output_ids[:5]) == server.output_ids([5, 7], 5, seed=3)  # temperature unset: 1


def test_optional_fields_left_out_are_the_models_and_plain_zeros_the_protocols(start_server):
    defaults = {"temperature": 0.0, "max_tokens": 5, "top_p": 0.5, "repetition_penalty": 1.3}
    with start_server(default_sampling_params=defaults) as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        message = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[5, 7]), sampling_params=pb.SamplingParams(seed=3, ignore_eos=True)
        )
        [response] = list(stub.Generate(message, timeout=TIMEOUT_S))
        assert list(response.complete.output_ids) == server.output_ids([5, 7], 5)  # greedy: the seed does not matter
        message.sampling_params.temperature = 1.0
        message.sampling_params.max_tokens = 7
        [response] = list(stub.Generate(message, timeout=TIMEOUT_S))
        assert list(response.complete.output_ids) == server.output_ids([5, 7], 7, seed=3)
    params = grpc_messages.sampling_params(pb.SamplingParams(), defaults)
    assert (params.temperature, params.max_tokens, params.top_p, params.repetition_penalty) == (0.0, 5, 1.0, 1.0)


def test_n_streams_with_logprobs_interleave_and_each_is_whole(server, stub):
    responses = generate(stub, n=3, temperature=1.0, seed=9, max_tokens=6, logprobs=1, prompt_logprobs=0, stream=True)
    expected = {index: server.output_ids([5, 7], 6, seed=9 + index) for index in range(3)}
    open_indices, order = {0, 1, 2}, []
    token_ids: dict[int, list[int]] = {index: [] for index in range(3)}
    for response in responses:
        kind = response.WhichOneof("response")
        message = getattr(response, kind)
        assert message.index in open_indices, "something follows a sequence's complete"
        if kind == "complete":
            open_indices.discard(message.index)
            assert (message.finish_reason, message.prompt_tokens) == ("length", 2)
            continue
        order.append(message.index)
        assert message.HasField("input_logprobs") == (not token_ids[message.index])
        token_ids[message.index] += message.token_ids
        logprobs = message.output_logprobs
        assert list(logprobs.token_ids) == list(message.token_ids)
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(message.token_ids) == message.completion_tokens
        # The counting model's likeliest token is the one without a seed, a token that is r further on has log-probability -1 - r.
        assert list(logprobs.token_logprobs) == [-1.0 - (9 + message.index)] * len(message.token_ids)
        assert [list(top.values) for top in logprobs.top_logprobs] == [[-1.0]] * len(message.token_ids)
    assert (token_ids, open_indices) == (expected, set())
    assert order[:6] != sorted(order[:6]), "the sequences came one after another"


def test_stop_tokens_and_stop_strings(server, stub):
    expected = server.output_ids([5, 7], 40)
    [by_id] = generate(stub, max_tokens=40, stop_token_ids=[expected[6]])
    first = expected.index(expected[6])
    assert list(by_id.complete.output_ids) == expected[: first + 1]
    assert (by_id.complete.finish_reason, by_id.complete.matched_token_id) == ("stop", expected[6])
    stop = server.tokenizer.decode(expected, False)[10:13]
    [by_text] = generate(stub, max_tokens=40, stop=[stop])
    assert (by_text.complete.finish_reason, by_text.complete.matched_stop_str) == ("stop", stop)
    assert len(by_text.complete.output_ids) < 40
    streamed = generate(stub, max_tokens=40, stop=[stop], stream=True)
    assert [token_id for response in streamed[:-1] for token_id in response.chunk.token_ids] == list(by_text.complete.output_ids)
    server.wait_until_idle()


def test_text_input_is_tokenized(server, stub):
    message = pb.GenerateRequest(text="Hello", sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    [response] = list(stub.Generate(message, timeout=TIMEOUT_S))
    assert list(response.complete.output_ids) == server.output_ids(server.tokenizer.encode("Hello"), 3)


def test_truncation(server, stub):
    [response] = generate(stub, [9, 9, 5, 7], max_tokens=3, truncate_prompt_tokens=2)
    assert list(response.complete.output_ids) == server.output_ids([5, 7], 3)


BAD = {
    "empty prompt": {"prompt": []},
    "prompt of the context": {"prompt": [5] * 256},
    "id out of vocabulary": {"prompt": [320]},
    "n": {"n": 10**9},
    "temperature": {"temperature": -1.0},
    "nan": {"temperature": float("nan")},
    "top_p": {"top_p": 2.0},
    "stops": {"stop": ["x"] * 100},
    "empty stop": {"stop": [""]},
    "logit_bias": {"logit_bias": {320: 1.0}},
    "negative logit_bias": {"logit_bias": {-1: 1.0}},
    "logprobs": {"logprobs": 21},
    "regex": {"regex": "a+"},
    "choice": {"choice": pb.ChoiceConstraint(choices=["a"])},
    "truncate": {"truncate_prompt_tokens": -5},
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_invalid_argument(stub, name, stream):
    with pytest.raises(grpc.RpcError) as caught:
        generate(stub, **{"max_tokens": 2} | BAD[name], stream=stream)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details()
    assert len(generate(stub, max_tokens=2)) == 1


def test_requests_without_input_or_with_media_are_invalid(stub):
    for message in (
        pb.GenerateRequest(request_id="x"),
        pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5]), mm_inputs=pb.MultimodalInputs(mm_hashes=["x"])),
        pb.GenerateRequest(text="x" * 10_000_000),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(message, timeout=TIMEOUT_S))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("stream", [False, True])
def test_cancel_and_deadline_free_the_pages(server, stub, how, stream):
    server.runner.step_s = 0.05
    try:
        call = stub.Generate(request(max_tokens=250, stream=stream), timeout=1.5 if how == "deadline" else TIMEOUT_S)
        while not server.engine.scheduler.num_running:
            time.sleep(0.005)
        if how == "cancel":
            call.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        expected = grpc.StatusCode.CANCELLED if how == "cancel" else grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.code() is expected
        server.wait_until_freed()
    finally:
        server.runner.step_s = 0.0


def test_abort_ends_all_calls_of_that_id_and_no_other(server, stub):
    server.runner.step_s = 0.02
    results: dict[str, list[str]] = {}

    def run(name: str, request_id: str) -> None:
        responses = generate(stub, max_tokens=20, request_id=request_id)
        results[name] = [response.complete.finish_reason for response in responses]

    threads = [threading.Thread(target=run, args=args) for args in (("a1", "a"), ("a2", "a"), ("b", "b"))]
    try:
        for thread in threads:
            thread.start()
        while server.engine.scheduler.num_running < 3:
            time.sleep(0.005)
        stub.Abort(pb.AbortRequest(request_ids=["a", "unknown"]), timeout=TIMEOUT_S)
        for thread in threads:
            thread.join(TIMEOUT_S)
    finally:
        server.runner.step_s = 0.0
    assert results == {"a1": ["abort"], "a2": ["abort"], "b": ["length"]}


def test_abort_reaches_calls_of_the_other_front_end(engine_side):
    async def run() -> list[str]:
        await engine_side.start()
        engine_side.runner.step_s = 0.02
        front_ends = [FrontEnd(ServerConfig(grpc_port=0, grpc_only=True), engine_side.address) for _ in range(2)]
        one, other = [str((await front_end.start()).grpc) for front_end in front_ends]
        try:
            for front_end in front_ends:
                await front_end.wait_until_ready()
            async with grpc.aio.insecure_channel(one) as channel, grpc.aio.insecure_channel(other) as other_channel:
                make = VllmEngineStub(channel).Generate
                streams = [aiter(make(request(max_tokens=20, stream=True, request_id=name), timeout=TIMEOUT_S)) for name in ("a", "b")]
                for stream in streams:
                    await anext(stream)
                await VllmEngineStub(other_channel).Abort(pb.AbortRequest(request_ids=["a"]), timeout=TIMEOUT_S)
                return [[response async for response in stream][-1].complete.finish_reason for stream in streams]
        finally:
            for front_end in front_ends:
                await front_end.stop()
            await engine_side.stop()

    assert asyncio.run(run()) == ["abort", "length"]


def test_model_info(server, stub):
    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert (info.max_context_length, info.vocab_size, info.served_model_name) == (256, 320, "counting")
    assert (info.is_generation, info.model_type, list(info.architectures)) == (True, "llama", ["LlamaForCausalLM"])
    assert (list(info.eos_token_ids), info.bos_token_id, info.pad_token_id, info.max_req_input_len) == ([1], 0, 2, 255)
    assert json.loads(info.default_sampling_params_json) == {}


def test_tokenizer_files_come_as_a_zip(server, stub, model_path):
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=TIMEOUT_S))
    data = b"".join(chunk.data for chunk in chunks)
    assert all(len(chunk.data) <= 64 * 1024 and not chunk.sha256 for chunk in chunks[:-1])
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.read("tokenizer.json") == (model_path / "tokenizer.json").read_bytes()
    assert "chat_template.jinja" in archive.namelist()


def test_health_and_reflection(server, stub):
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy
    with server.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "vllm.grpc.engine.VllmEngine"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        messages = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        [answer] = list(reflection.ServerReflectionInfo(messages, timeout=TIMEOUT_S))
        assert "vllm.grpc.engine.VllmEngine" in [service.name for service in answer.list_services_response.service]


def test_rpcs_that_are_not_served_say_so_without_a_traceback(stub, caplog):
    calls = [
        lambda: list(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=TIMEOUT_S)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not caplog.records


def test_a_failed_step_is_a_complete_with_error(fresh_server):
    fresh_server.runner.error = ValueError("injected")
    with fresh_server.channel() as channel:
        stub = VllmEngineStub(channel)
        [response] = generate(stub, max_tokens=5)
        assert response.complete.finish_reason == "error"
        [after] = generate(stub, max_tokens=2)
        assert after.complete.finish_reason == "length"


def test_a_lost_engine_is_unavailable(fresh_server):
    fresh_server.loop.stop()
    with fresh_server.channel() as channel:
        stub = VllmEngineStub(channel)
        end = time.monotonic() + TIMEOUT_S
        while stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy:
            assert time.monotonic() < end
        with pytest.raises(grpc.RpcError) as caught:
            generate(stub, max_tokens=2)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
