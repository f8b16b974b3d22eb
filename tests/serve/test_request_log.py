"""What logs say of requests: nothing of their words by default, whatever goes wrong; with --log-requests, prompt and answer, cut short."""

import http.client
import json
import logging
import re
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxserve.config import ServerConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.serve.request_log import MAX_ANSWER_CHARS, MAX_PROMPT_TOKENS, given_params, logged
from jaxserve.text.sequence_text import TextDelta

MARK = "xyzzy-plugh"
MARK_IDS = [300, 301, 302, 303]


def post(server, path: str, body: Any) -> int:
    """By a client that logs nothing itself; returns the status."""
    address = urlsplit(server.http)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def generate(server, request: pb.GenerateRequest) -> grpc.StatusCode:
    with server.channel() as channel:
        try:
            list(server.stub(channel).Generate(request, timeout=30))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def written(caplog: pytest.LogCaptureFixture) -> str:
    """All lines at all levels, with their exceptions."""
    formatter = logging.Formatter("%(name)s %(message)s")
    return "\n".join(formatter.format(record) for record in caplog.records)


def test_no_log_line_repeats_what_a_request_says(fresh_server, caplog):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "jaxserve")
    completion = {"model": "counting", "prompt": MARK, "max_tokens": 8, "ignore_eos": True}
    user = {"role": "user", "content": MARK}
    statuses = [
        post(fresh_server, "/v1/completions", completion),
        post(fresh_server, "/v1/completions", completion | {"prompt": MARK_IDS, "stream": True, "logprobs": 1, "echo": True}),
        post(fresh_server, "/v1/chat/completions", {"model": "counting", "messages": [user], "stop": MARK, "max_tokens": 4}),
        post(fresh_server, "/tokenize", {"model": "counting", "prompt": MARK}),
        post(fresh_server, "/v1/chat/completions", {"model": "counting", "messages": [user, {"role": "system", "content": MARK}]}),
        post(fresh_server, "/v1/completions", completion | {"temperature": MARK}),
        post(fresh_server, "/v1/completions", completion | {"model": MARK}),
        post(fresh_server, "/v1/completions", completion | {"prompt": MARK * 1000}),
        post(fresh_server, "/v1/completions", completion | {"unknown": MARK}),
        post(fresh_server, "/v1/completions", f'{{"prompt": "{MARK}"'.encode()),
    ]
    assert statuses[:4] == [200] * 4
    assert set(statuses[4:]) <= {200, 400, 404}
    params = pb.SamplingParams(max_tokens=8, ignore_eos=True, stop=[MARK])
    assert generate(fresh_server, pb.GenerateRequest(text=MARK, sampling_params=params)) == grpc.StatusCode.OK
    too_hot = pb.SamplingParams(max_tokens=8, temperature=9)
    assert generate(fresh_server, pb.GenerateRequest(text=MARK, sampling_params=too_hot)) == grpc.StatusCode.INVALID_ARGUMENT
    fresh_server.runner.error = RuntimeError("the device is on fire")
    assert post(fresh_server, "/v1/completions", completion) == 500
    fresh_server.wait_until_idle()

    log = written(caplog)
    assert "the device is on fire" in log
    assert MARK not in log
    assert "300, 301" not in log
    answers = [fresh_server.output_ids(ids, 8) for ids in (fresh_server.tokenizer.encode(MARK), MARK_IDS)]
    for ids in answers:
        assert repr(ids)[1:12] not in log
        assert fresh_server.tokenizer.decode(ids) not in log


def test_with_log_requests_a_call_has_two_lines(start_server, caplog):
    caplog.set_level(logging.INFO, "jaxserve")
    with start_server(ServerConfig(log_requests=True)) as server:
        ids = server.tokenizer.encode(MARK)
        body = {"model": "counting", "prompt": MARK, "max_tokens": 3, "ignore_eos": True, "temperature": 0, "request_id": "mine"}
        assert post(server, "/v1/completions", body) == 200
        answer = server.tokenizer.decode(server.output_ids(ids, 3))
    begin, end = (record.getMessage() for record in caplog.records if record.name == "jaxserve.serve.request_log")
    name = re.match(r"request \S+ \('mine'\)", begin)
    assert name
    assert begin.startswith(f"{name[0]} begins: {len(ids)} prompt tokens, the first of them {ids} '{MARK}', parameters {{")
    assert "'max_tokens': 3" in begin
    assert re.fullmatch(re.escape(name[0]) + r" ended after \d+\.\d{3} s: length, 3 tokens, " + re.escape(repr(answer)), end)


class Letters:
    """A tokenizer whose every token is an x."""

    def decode(self, token_ids: list[int]) -> str:
        return "x" * len(token_ids)


def log_of(caplog: pytest.LogCaptureFixture, prompt: int, answer: str, *, n: int = 1, error: BaseException | None = None) -> list[str]:
    """The lines of one request whose sequences all say `answer`; the last one ends by itself unless there is an error."""
    caplog.set_level(logging.INFO, "jaxserve")
    request = Request(request_id="r-1", prompt_token_ids=tuple(range(prompt)), params=SamplingParams(n=n))

    def run() -> None:
        with logged([request], Letters()) as log:  # type: ignore[arg-type]
            for index in range(n):
                log.on_text("r-1", index, TextDelta(text=answer, token_ids=[1, 2], finish_reason=None if error else FinishReason.STOP))
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    return [record.getMessage() for record in caplog.records]


def test_long_prompts_and_answers_are_cut(caplog):
    begin, end = log_of(caplog, 10 * MAX_PROMPT_TOKENS, "a" * 3 * MAX_ANSWER_CHARS, n=2)
    assert "2560 prompt tokens" in begin
    assert begin.count("x") == MAX_PROMPT_TOKENS
    assert str(MAX_PROMPT_TOKENS) not in begin.split("them")[1].split("]")[0].split(", ")
    assert end.count("aa") == MAX_ANSWER_CHARS // 2
    assert end.count("stop, 2 tokens") == 2


@pytest.mark.parametrize(("error", "why"), [(GeneratorExit(), "its client left"), (RuntimeError("lost"), "RuntimeError: lost")])
def test_a_call_that_breaks_off_says_why(caplog, error, why):
    _, end = log_of(caplog, 1, "word", error=error)
    assert end.endswith(f": {why}, 2 tokens, 'word'")


def test_only_parameters_that_were_given_are_logged():
    assert given_params(SamplingParams(top_k=5, seed=0)) == {"top_k": 5, "seed": 0}
