"""Embeddings through the real `openai` client and the gRPC stub; the double's hidden state is (token, position, sum so far, 1)."""

import base64
import logging
import struct
import urllib.request

import grpc
import openai
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.config import ServerConfig

TIMEOUT_S = 30
PLAIN = {"normalize": False}
PROMPT = [3, 4, 12]


def create(client, given=PROMPT, *, body=PLAIN, **options):
    return client.embeddings.create(model="counting", input=given, extra_body=body, **options)


def vectors(answer) -> list[list[float]]:
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return [entry.embedding for entry in answer.data]


def test_a_prompt_is_a_vector(client):
    # The client asks for base64 where its user says nothing, and decodes it.
    for options in ({}, {"encoding_format": "float"}):
        answer = create(client, **options)
        assert vectors(answer) == [[12.0, 2.0, 19.0, 1.0]]
        assert (answer.object, answer.model, answer.data[0].object) == ("list", "counting", "embedding")
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)


def test_base64_is_little_endian_float32(client):
    [vector] = vectors(create(client, [5, 7], encoding_format="base64", body={}))
    length = (7**2 + 1 + 12**2 + 1) ** 0.5
    assert struct.unpack("<4f", base64.b64decode(vector)) == pytest.approx([7 / length, 1 / length, 12 / length, 1 / length], rel=1e-6)


def test_forms_of_input(server, client):
    ids = server.tokenizer.encode("Hello")
    [text], [tokens] = vectors(create(client, "Hello")), vectors(create(client, ids))
    assert text == tokens == [float(ids[-1]), len(ids) - 1.0, float(sum(ids)), 1.0]
    assert vectors(create(client, ["Hello", "Hello"])) == [text, text]
    answer = create(client, [PROMPT, [5], [6, 7]])
    assert vectors(answer) == [[12.0, 2.0, 19.0, 1.0], [5.0, 0.0, 5.0, 1.0], [7.0, 1.0, 13.0, 1.0]]
    assert answer.usage.prompt_tokens == 6
    bare = create(client, "Hello", body={"add_special_tokens": False, **PLAIN})
    assert bare.usage.prompt_tokens == len(ids) - 1
    cut = create(client, [1, 2, *PROMPT], body={"truncate_prompt_tokens": 3, **PLAIN})
    assert vectors(cut) == [[12.0, 2.0, 19.0, 1.0]]


def test_pooling_dimensions_and_length(client):
    # Over [3, 4, 12]: tokens 3, 4, 12; positions 0, 1, 2; sums 3, 7, 19.
    mean = [19 / 3, 1.0, 29 / 3, 1.0]
    assert vectors(create(client, body={"pooling": "mean", **PLAIN}))[0] == pytest.approx(mean, rel=1e-6)
    [scaled] = vectors(create(client, body={}))
    assert sum(value**2 for value in scaled) == pytest.approx(1)
    [short] = vectors(create(client, [[3, 4]], dimensions=2, body={}))
    assert short == pytest.approx([4 / 17**0.5, 1 / 17**0.5], rel=1e-6)
    assert vectors(create(client, dimensions=3)) == [[12.0, 2.0, 19.0]]
    assert vectors(create(client, user="someone", body={"priority": 0, "timeout": 20, "dimensions": None, **PLAIN}))[0][0] == 12.0


def test_a_long_prompt_in_chunks_and_a_prefix_hit(server, client):
    prompt = [7] * 256  # the whole context; a step takes 64 tokens
    for pooling, cached in (("mean", 0), ("last", 240), ("mean", 0)):
        answer = create(client, prompt, body={"pooling": pooling, **PLAIN})
        expected = [7.0, 255.0, 1792.0, 1.0] if pooling == "last" else [7.0, 127.5, 7 * 257 / 2, 1.0]
        assert vectors(answer) == [pytest.approx(expected)]
        assert answer.usage.prompt_tokens_details["cached_tokens"] == cached
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("options", "message", "param"),
    [
        ({"given": []}, "the prompt is empty", "input"),
        ({"given": [[5], []]}, "the prompt is empty", "input"),
        ({"given": [7] * 257}, "the prompt has 257 tokens; the context is 256", "input"),
        ({"given": [320]}, "token id 320", "input"),
        ({"given": [[5]] * 1025}, "1025 prompts", "input"),
        ({"given": "a" * 2**16}, "the prompt has 65536 characters", "input"),
        ({"dimensions": 5}, "dimensions is 5; vectors of this model have 4", "dimensions"),
        ({"dimensions": 0}, "dimensions is 0; it must be at least 1", "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format", "encoding_format"),
        ({"body": {"pooling": "max"}}, "pooling", "pooling"),
        ({"body": {"temperature": 0.5}}, "temperature is not supported", "temperature"),
        ({"body": {"max_tokens": 1}}, "max_tokens is not supported", "max_tokens"),
        ({"body": {"stream": True}}, "stream is not supported", "stream"),
        ({"body": {"messages": [{"role": "user", "content": "hi"}]}}, "messages is not supported", "messages"),
        ({"body": {"cache_salt": ""}}, "cache_salt is empty", "cache_salt"),
        ({"body": {"priority": 1}}, "--scheduling-policy priority", "priority"),
    ],
)
def test_what_cannot_be_served_is_named(client, options, message, param):
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, **options)
    assert message in refused.value.body["message"]
    assert refused.value.body["param"] == param


def test_the_model_must_be_served(client):
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.embeddings.create(model="other", input="Hello")


def test_without_the_flag_both_doors_name_it(start_server):
    with start_server(has_embeddings=False) as server, server.client() as client, server.channel() as channel:
        with pytest.raises(openai.BadRequestError, match="--enable-embeddings"):
            create(client)
        with pytest.raises(grpc.RpcError) as refused:
            VllmEngineStub(channel).Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT)), timeout=TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "--enable-embeddings" in refused.value.details()


def test_grpc_embed(start_server):
    with start_server(default_pooling="mean") as server, server.channel() as channel:
        stub = VllmEngineStub(channel)
        answer = stub.Embed(pb.EmbedRequest(request_id="r", tokenized=pb.TokenizedInput(input_ids=[3, 4])), timeout=TIMEOUT_S)
        length = (3.5**2 + 0.5**2 + 5**2 + 1) ** 0.5
        assert list(answer.embedding) == pytest.approx([3.5 / length, 0.5 / length, 5 / length, 1 / length], rel=1e-6)
        assert (answer.prompt_tokens, answer.embedding_dim) == (2, 4)
        for request in (pb.EmbedRequest(), pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[]))):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Embed(request, timeout=TIMEOUT_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with server.client() as client:
            assert vectors(create(client, [3, 4])) == [[3.5, 0.5, 5.0, 1.0]]


def test_beside_generation_and_after_a_failed_step(fresh_server):
    with fresh_server.client() as client:
        stream = client.completions.create(model="counting", prompt=[5, 7], max_tokens=30, stream=True, extra_body={"ignore_eos": True})
        assert vectors(create(client)) == [[12.0, 2.0, 19.0, 1.0]]
        assert sum(1 for _ in stream) > 1
        fresh_server.runner.error = ValueError("injected")
        with pytest.raises(openai.InternalServerError, match="injected"):
            create(client)
        assert len(vectors(create(client, [[5, i] for i in range(20)]))) == 20
    fresh_server.wait_until_idle()


def test_a_call_whose_time_is_over_or_whose_client_leaves_ends(fresh_server):
    with fresh_server.client() as client:
        fresh_server.runner.gate.clear()
        with pytest.raises(openai.APIStatusError) as ended:
            create(client, body={"timeout": 0.05})
        assert ended.value.status_code == 504
        with pytest.raises(openai.APITimeoutError):
            create(client.with_options(timeout=0.2))
        fresh_server.runner.gate.set()
    fresh_server.wait_until_idle()


def test_metrics_and_log_count_it(start_server, caplog):
    with caplog.at_level(logging.INFO), start_server(ServerConfig(log_requests=True)) as server, server.client() as client:
        create(client, [PROMPT, [5]])
        with urllib.request.urlopen(f"{server.http}/metrics", timeout=TIMEOUT_S) as response:
            text = response.read().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="counting"}'
    for name, value in {
        "prompt_tokens_total": 4, "generation_tokens_total": 0, "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "time_to_first_token_seconds_count": 0, "request_decode_time_seconds_count": 0, "request_generation_tokens_count": 0,
    }.items():  # fmt: skip
        assert float(lines[f"jaxserve:{name}{labels}"]) == value, name
    begins = [record.getMessage() for record in caplog.records if " begins: " in record.getMessage()]
    assert len(begins) == 2 and all("pooling='last'" in line for line in begins)
