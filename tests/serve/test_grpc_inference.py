"""`jaxserve.v1.Inference` through its generated stub: text in, text out, with values that a person can compute."""

import asyncio
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.client import AsyncClient, Client
from jaxserve.errors import InvalidRequest
from jaxserve.protocol import inference_pb2 as pb
from jaxserve.protocol.inference_pb2_grpc import InferenceStub
from tests.serve.conftest import running_server

TIMEOUT_S = 30
ROOT = Path(__file__).parents[2]
PROTO = "jaxserve/protocol/inference.proto"


@pytest.fixture
def stub(server):
    with server.channel() as channel:
        yield InferenceStub(channel)


def sampling(**fields) -> pb.SamplingParams:
    return pb.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 12} | fields)


def request(prompt="Hello", options=None, **fields) -> pb.GenerateRequest:
    message = pb.GenerateRequest(sampling=sampling(**fields), options=options)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


def chat_request(*contents: str, **fields) -> pb.ChatRequest:
    roles = ("user", "assistant")
    messages = [pb.Message(role=roles[i % 2], content=content) for i, content in enumerate(contents)]
    return pb.ChatRequest(messages=messages, sampling=sampling(), **fields)


def generate(stub, *args, **fields) -> pb.GenerateResponse:
    return stub.Generate(request(*args, **fields), timeout=TIMEOUT_S)


def stream(stub, *args, **fields) -> list[pb.GenerateChunk]:
    return list(stub.GenerateStream(request(*args, **fields), timeout=TIMEOUT_S))


def refusal(call, message) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=TIMEOUT_S)
    return caught.value


def text_after(server, prompt: list[int], num_tokens: int, **options) -> str:
    return server.tokenizer.decode(server.output_ids(prompt, num_tokens, **options), True)


def test_a_text_is_continued(server, stub):
    prompt = server.tokenizer.encode("Hello")
    answer = generate(stub)
    [output] = answer.outputs
    assert list(output.token_ids) == server.output_ids(prompt, 12)
    assert output.text == text_after(server, prompt, 12)
    assert (output.index, output.finish_reason, output.WhichOneof("stop_reason")) == (0, pb.FINISH_REASON_LENGTH, None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (len(prompt), 0, 12)
    assert list(generate(stub, [5, 7]).outputs[0].token_ids) == server.output_ids([5, 7], 12)


@pytest.mark.parametrize("n", [1, 3])
def test_the_pieces_of_a_stream_are_the_whole_answer(server, stub, n):
    fields = {"n": n, "temperature": 1.0, "seed": 4, "logprobs": 2}
    whole, chunks = generate(stub, **fields), stream(stub, **fields)
    assert [output.index for output in whole.outputs] == list(range(n))
    for output in whole.outputs:
        pieces = [chunk.output for chunk in chunks if chunk.output.index == output.index]
        assert "".join(piece.text for piece in pieces) == output.text
        assert [token_id for piece in pieces for token_id in piece.token_ids] == list(output.token_ids)
        assert [entry for piece in pieces for entry in piece.logprobs] == list(output.logprobs)
        assert [piece.finish_reason for piece in pieces] == [0] * (len(pieces) - 1) + [output.finish_reason]
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 12 * n


def test_log_probabilities_have_texts_and_ranks(server, stub):
    [output] = generate(stub, [5, 7], max_tokens=2, temperature=1.0, seed=3, logprobs=2).outputs
    expected = server.output_ids([5, 7], 2, seed=3)
    assert [entry.token.id for entry in output.logprobs] == expected
    # Without the seed the next token would be 3 lower: it is the likeliest, and the one drawn is the fourth.
    assert [(entry.token.logprob, entry.rank) for entry in output.logprobs] == [(-4.0, 4)] * 2
    for entry, token_id in zip(output.logprobs, expected, strict=True):
        assert [(top.id, top.logprob) for top in entry.top] == [(token_id - 3, -1.0), (token_id - 2, -2.0)]
        assert [top.text for top in entry.top] == [server.tokenizer.token_text(top.id) for top in entry.top]
        assert entry.token.text == server.tokenizer.token_text(token_id)
    assert not generate(stub, max_tokens=2).outputs[0].logprobs


def test_stop_strings_and_tokens(server, stub):
    ids = server.output_ids([5, 7], 40)
    [by_id] = generate(stub, [5, 7], max_tokens=40, stop_token_ids=[ids[6]]).outputs
    assert list(by_id.token_ids) == ids[: ids.index(ids[6]) + 1]
    assert (by_id.finish_reason, by_id.stop_token_id) == (pb.FINISH_REASON_STOP, ids[6])
    text = server.tokenizer.decode(ids, True)
    stop = text[10:13]
    [by_text] = generate(stub, [5, 7], max_tokens=40, stop=[stop]).outputs
    assert (by_text.finish_reason, by_text.stop_text, by_text.text) == (pb.FINISH_REASON_STOP, stop, text[: text.index(stop)])
    [kept] = generate(stub, [5, 7], max_tokens=40, stop=[stop], include_stop_str_in_output=True).outputs
    assert kept.text == text[: text.index(stop) + 3]
    assert "".join(chunk.output.text for chunk in stream(stub, [5, 7], max_tokens=40, stop=[stop])) == by_text.text
    server.wait_until_idle()


def test_a_chat_goes_through_the_template(server, stub):
    message = chat_request("Hello", "Hi", "And?")
    prompt = server.tokenizer.encode("<s>user: Hello<|im_end|><s>assistant: Hi<|im_end|><s>user: And?<|im_end|>assistant: ", False)
    answer = stub.Chat(message, timeout=TIMEOUT_S)
    assert list(answer.outputs[0].token_ids) == server.output_ids(prompt, 12)
    assert answer.outputs[0].text == text_after(server, prompt, 12)
    assert answer.usage.prompt_tokens == len(prompt)
    chunks = list(stub.ChatStream(message, timeout=TIMEOUT_S))
    assert "".join(chunk.output.text for chunk in chunks) == answer.outputs[0].text
    ended = stub.Chat(chat_request("Hello", add_generation_prompt=False), timeout=TIMEOUT_S)
    assert ended.usage.prompt_tokens == len(server.tokenizer.encode("<s>user: Hello<|im_end|>", False))
    open_message = chat_request("Hello", "Hi", add_generation_prompt=False, continue_final_message=True)
    continued = stub.Chat(open_message, timeout=TIMEOUT_S)
    assert continued.usage.prompt_tokens == len(server.tokenizer.encode("<s>user: Hello<|im_end|><s>assistant: Hi", False))


def test_template_variables_keep_their_types(model_path, tmp_path):
    directory = shutil.copytree(model_path, tmp_path / "model")
    (directory / "chat_template.jinja").write_text("{{ a + 1 }}|{{ b[0] }}|{{ c.d }}|{{ e }}")
    with running_server(directory, tmp_path / "link") as server, server.channel() as channel:
        message = chat_request("Hello")
        message.chat_template_kwargs.update({"a": 1, "b": [2.5], "c": {"d": True}, "e": None})
        answer = InferenceStub(channel).Chat(message, timeout=TIMEOUT_S)
        expected = server.tokenizer.encode("2|2.5|True|None", False)
        assert list(answer.outputs[0].token_ids) == server.output_ids(expected, 12)


def test_what_is_not_set_is_the_models_and_zero_is_meant(start_server):
    with start_server(default_sampling_params={"temperature": 0.6, "max_tokens": 5}) as server, server.channel() as channel:
        stub = InferenceStub(channel)
        bare = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 7]), sampling=pb.SamplingParams(seed=3, ignore_eos=True))
        assert list(stub.Generate(bare, timeout=TIMEOUT_S).outputs[0].token_ids) == server.output_ids([5, 7], 5, seed=3)
        bare.sampling.temperature = 0.0
        bare.sampling.max_tokens = 4
        assert list(stub.Generate(bare, timeout=TIMEOUT_S).outputs[0].token_ids) == server.output_ids([5, 7], 4)
        assert "max_tokens" in refusal(stub.Generate, request(max_tokens=0)).details()
        no_sampling = stub.Generate(pb.GenerateRequest(text="Hello"), timeout=TIMEOUT_S)
        assert len(no_sampling.outputs[0].token_ids) <= 5


def test_ids_and_texts(server, stub):
    ids = server.tokenizer.encode("Hello there")
    answer = stub.Tokenize(pb.TokenizeRequest(text="Hello there"), timeout=TIMEOUT_S)
    assert (list(answer.token_ids), answer.max_model_len) == (ids, 256)
    bare = stub.Tokenize(pb.TokenizeRequest(text="Hello there", add_special_tokens=False), timeout=TIMEOUT_S)
    assert list(bare.token_ids) == server.tokenizer.encode("Hello there", False)
    texts = [
        stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skips), timeout=TIMEOUT_S).text for skips in (False, True)
    ]
    assert texts == [server.tokenizer.decode(ids, skips) for skips in (False, True)]
    assert texts[1] == "Hello there"


BAD = {
    "no prompt": (pb.GenerateRequest(sampling=pb.SamplingParams(n=1)), "text or token_ids"),
    "empty prompt": (request([]), "empty"),
    "temperature": (request(temperature=-1.0), "temperature"),
    "n of greedy": (request(n=2), "n is 2"),
    "foreign token": (request([320]), "320"),
    "logit_bias": (request(logit_bias={320: 1.0}), "320"),
    "logprobs": (request(logprobs=21), "logprobs"),
    "priority": (request(options=pb.CallOptions(priority=1)), "priority"),
    "no messages": (pb.ChatRequest(), "messages"),
    "system": (pb.ChatRequest(messages=[pb.Message(role="system", content="x")]), "no system role here"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_served_is_named(stub, name, is_stream):
    message, expected = BAD[name]
    kind = "Chat" if isinstance(message, pb.ChatRequest) else "Generate"
    method = getattr(stub, kind + ("Stream" if is_stream else ""))
    error = refusal(lambda *args, **options: list(method(*args, **options)) if is_stream else method(*args, **options), message)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert expected in error.details()


def test_another_model_is_not_found(stub):
    error = refusal(stub.Generate, request(options=pb.CallOptions(model="other")))
    assert (error.code(), "'counting'" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)
    assert generate(stub, options=pb.CallOptions(model="alias")).outputs
    assert refusal(stub.Detokenize, pb.DetokenizeRequest(token_ids=[10**6])).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_salt_keeps_prompts_apart(server, stub):
    prompt = [9] * 40
    salted = [generate(stub, prompt, options=pb.CallOptions(cache_salt=salt)).usage.cached_tokens for salt in ("a", "b", "a", "")]
    assert salted == [0, 0, 32, 0]


@pytest.mark.parametrize("how", ["cancel", "deadline", "abort"])
def test_calls_end_early(server, stub, how):
    server.runner.step_s = 0.05
    try:
        message = request(max_tokens=200, options=pb.CallOptions(request_id="early"))
        call = stub.GenerateStream(message, timeout=1.5 if how == "deadline" else TIMEOUT_S)
        next(call)
        if how == "abort":
            with server.channel() as channel:
                VllmEngineStub(channel).Abort(vllm.AbortRequest(request_ids=["early"]), timeout=TIMEOUT_S)
            assert list(call)[-1].output.finish_reason == pb.FINISH_REASON_ABORT
        else:
            if how == "cancel":
                call.cancel()
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code().name == {"cancel": "CANCELLED", "deadline": "DEADLINE_EXCEEDED"}[how]
        server.wait_until_freed()
    finally:
        server.runner.step_s = 0.0


def test_a_failed_step_is_internal_and_a_lost_engine_unavailable(fresh_server):
    with fresh_server.channel() as channel:
        stub = InferenceStub(channel)
        fresh_server.runner.error = ValueError("injected")
        assert refusal(stub.Generate, request()).code() is grpc.StatusCode.INTERNAL
        assert generate(stub).outputs
        fresh_server.lose_engine()
        fresh_server.wait_until_ready(is_ready=False)
        assert refusal(stub.Generate, request()).code() is grpc.StatusCode.UNAVAILABLE
        fresh_server.return_engine()
        fresh_server.wait_until_ready()
        assert generate(stub).outputs


def test_the_client_reads_what_the_server_writes(server):
    prompt = server.tokenizer.encode("Hello")
    chat_prompt = server.tokenizer.encode("<s>user: Hi<|im_end|>assistant: ", False)
    expected = [text_after(server, prompt, 12, seed=seed) for seed in (4, 5)]
    fields = {"n": 2, "temperature": 1.0, "seed": 4, "max_tokens": 12, "ignore_eos": True, "timeout_s": TIMEOUT_S}
    with Client(server.grpc) as client:
        answer = client.generate("Hello", **fields)
        assert [output.text for output in answer.outputs] == expected
        assert answer.usage.completion_tokens == 24
        texts = ["", ""]
        for piece in client.stream("Hello", **fields):
            texts[piece.index] += piece.text
        assert texts == expected
        assert client.detokenize(client.tokenize("Hello there"), skip_special_tokens=True) == "Hello there"
        [first] = server.output_ids(chat_prompt, 1)
        [output] = client.chat([{"role": "user", "content": "Hi"}], stop_token_ids=[first], temperature=0, logprobs=1).outputs
        assert (output.token_ids, output.stop_reason, output.finish_reason) == ([first], first, "stop")
        assert output.logprobs[0].token.id == first
        with pytest.raises(InvalidRequest, match="temperature"):
            client.generate("Hello", temperature=-1.0)

    async def talk() -> str:
        async with AsyncClient(server.grpc) as client:
            messages = [{"role": "user", "content": "Hi"}]
            return "".join([piece.text async for piece in client.chat_stream(messages, temperature=0, max_tokens=5, ignore_eos=True)])

    assert asyncio.run(talk()) == text_after(server, chat_prompt, 5)


def test_retries_carry_clients_through_overload(start_server):
    prompts = [[5, i] for i in range(14)]
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "timeout_s": TIMEOUT_S}
    with start_server(max_waiting=1) as server, Client(server.grpc) as client, ThreadPoolExecutor(14) as pool:

        def ask(prompt: list[int]) -> tuple[list[int], float]:
            start = time.monotonic()
            [output] = client.generate(prompt, **fields).outputs
            return output.token_ids, time.monotonic() - start

        server.runner.gate.clear()
        calls = [pool.submit(ask, prompt) for prompt in prompts[:9]]
        while server.loop.stats().num_waiting + server.loop.stats().num_running < 9:  # the seats and the queue
            time.sleep(0.005)
        calls += [pool.submit(ask, prompt) for prompt in prompts[9:]]
        time.sleep(0.3)  # the others are refused, and wait
        server.runner.gate.set()
        answers = [call.result(TIMEOUT_S) for call in calls]
        assert [token_ids for token_ids, _ in answers] == [server.output_ids(prompt, 6) for prompt in prompts]
        assert max(duration_s for _, duration_s in answers) >= 1, "nobody was told to come back in a second"


def test_the_generated_module_is_what_the_proto_says(tmp_path):
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={tmp_path}", PROTO]
    subprocess.run(command, check=True, cwd=ROOT)
    generated = PROTO.replace(".proto", "_pb2.py")
    assert messages_of(tmp_path / generated) == messages_of(ROOT / generated)


def messages_of(file: Path) -> str:
    """The messages as the module holds them; the rest of the file depends on the generator's version."""
    return next(line for line in file.read_text().splitlines() if "AddSerializedFile" in line)


def test_every_field_and_rpc_is_commented():
    lines = [line.strip() for line in (ROOT / PROTO).read_text().splitlines()]
    definitions = [i for i, line in enumerate(lines) if re.match(r"(rpc|oneof) |[\w.<>, ]+ = \d+;", line) and not line.startswith("//")]
    assert len(definitions) > 60
    bare = [lines[i] for i in definitions if not lines[i - 1].startswith("//")]
    assert not bare
