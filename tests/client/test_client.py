"""The clients against a scripted server: retries, deadlines, keys, certificates, errors, and what a request becomes on the wire."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import trustme

from jaxserve.client import AsyncClient, Client, Usage
from jaxserve.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestFailed,
)
from jaxserve.protocol import inference_pb2 as pb
from jaxserve.protocol.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class Script(InferenceServicer):
    """Fails as often as it is told, then answers with the words it has, one in each piece."""

    def __init__(self):
        self.failures: list[tuple] = []
        self.words = ["one ", "two"]
        self.late_failure: tuple | None = None
        self.calls: list[tuple[float, object, dict]] = []
        self.release = threading.Event()
        self.release.set()
        self.cancelled = threading.Event()

    def Generate(self, request, context):
        self._begin(request, context)
        output = pb.Output(text="".join(self.words), token_ids=[1, 2], finish_reason=pb.FINISH_REASON_STOP, stop_text="!")
        return pb.GenerateResponse(outputs=[output], usage=pb.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=2))

    def GenerateStream(self, request, context):
        context.add_callback(self.cancelled.set)
        self._begin(request, context)
        for word in self.words:
            yield pb.GenerateChunk(output=pb.Output(text=word, token_ids=[7]))
        self.release.wait(20)
        if self.late_failure:
            context.abort(*self.late_failure)
        yield pb.GenerateChunk(output=pb.Output(finish_reason=pb.FINISH_REASON_LENGTH), usage=pb.Usage(prompt_tokens=3))

    Chat = Generate
    ChatStream = GenerateStream

    def Tokenize(self, request, context):
        self._begin(request, context)
        return pb.TokenizeResponse(token_ids=[ord(char) for char in request.text])

    def Detokenize(self, request, context):
        self._begin(request, context)
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def _begin(self, request, context):
        self.calls.append((time.monotonic(), request, dict(context.invocation_metadata())))
        if self.failures:
            code, details, *trailing = self.failures.pop(0)
            context.set_trailing_metadata(trailing)
            context.abort(code, details)


@contextlib.contextmanager
def serving(script, credentials=None):
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    add_InferenceServicer_to_server(script, server)
    port = server.add_insecure_port("localhost:0") if credentials is None else server.add_secure_port("localhost:0", credentials)
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        script.release.set()
        server.stop(None).wait()


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def address(script):
    with serving(script) as address:
        yield address


class Both:
    """Calls of either client in the same words: streams come as lists."""

    def __init__(self, is_async):
        self._is_async = is_async

    def __call__(self, address, method, *args, client=None, **kwargs):
        if not self._is_async:
            with Client(address, **client or {}) as one:
                result = getattr(one, method)(*args, **kwargs)
                return list(result) if method.endswith("stream") else result
        return asyncio.run(self._run(address, method, args, client or {}, kwargs))

    @staticmethod
    async def _run(address, method, args, client, kwargs):
        async with AsyncClient(address, **client) as one:
            result = getattr(one, method)(*args, **kwargs)
            return [piece async for piece in result] if method.endswith("stream") else await result


@pytest.fixture(params=[False, True], ids=["blocking", "asyncio"])
def call(request):
    return Both(request.param)


def test_answers(call, address):
    answer = call(address, "generate", "Hello")
    [output] = answer.outputs
    assert (answer.text, output.token_ids, output.finish_reason, output.stop_reason) == ("one two", [1, 2], "stop", "!")
    assert answer.usage == Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=2)
    pieces = call(address, "stream", "Hello")
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("one ", None), ("two", None), ("", "length")]
    assert [piece.usage and piece.usage.prompt_tokens for piece in pieces] == [None, None, 3]
    assert call(address, "tokenize", "AB") == [65, 66]
    assert call(address, "detokenize", [65, 66]) == "AB"


def test_arguments_are_where_the_protocol_has_them(call, address, script):
    arguments = {"temperature": 0.0, "stop": "x", "seed": None, "logit_bias": {3: -1.5}, "top_k": -1}
    call(address, "generate", [4, 5], request_id="r", cache_salt="s", priority=-2, model="m", **arguments)
    sampling = pb.SamplingParams(temperature=0.0, stop=["x"], logit_bias={3: -1.5}, top_k=-1)
    options = pb.CallOptions(request_id="r", cache_salt="s", priority=-2, model="m")
    assert script.calls[-1][1] == pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4, 5]), sampling=sampling, options=options)
    messages = [{"role": "user", "content": "Hi"}]
    call(address, "chat", messages, max_tokens=3, add_generation_prompt=False, chat_template_kwargs={"a": [1, {"b": None}]})
    expected = pb.ChatRequest(
        messages=[pb.Message(role="user", content="Hi")],
        sampling=pb.SamplingParams(max_tokens=3),
        options=pb.CallOptions(),
        add_generation_prompt=False,
    )
    expected.chat_template_kwargs.update({"a": [1, {"b": None}]})
    assert script.calls[-1][1] == expected
    assert "".join(piece.text for piece in call(address, "chat_stream", messages)) == "one two"
    call(address, "tokenize", "A", add_special_tokens=False)
    assert script.calls[-1][1] == pb.TokenizeRequest(text="A", add_special_tokens=False)
    assert all("authorization" not in metadata for _, _, metadata in script.calls)


@pytest.mark.parametrize("bad", [{"no_such": 1}, {"n": -1}, {"max_tokens": "many"}, {"temperature": "hot"}, {"timeout_s": float("nan")}])
def test_arguments_that_no_message_holds_are_invalid(call, address, script, bad):
    for method, prompt in (("generate", "Hello"), ("stream", "Hello"), ("chat", [{"role": "user", "content": "Hi"}])):
        with pytest.raises(InvalidRequest):
            call(address, method, prompt, **bad)
    with pytest.raises(InvalidRequest):
        call(address, "chat", [{"role": "user", "text": "Hi"}])
    with pytest.raises(InvalidRequest):
        call(address, "chat", [{"role": "user", "content": "Hi"}], chat_template_kwargs=["no names"])
    assert not script.calls


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_what_may_be_tried_again_is_and_retry_after_is_honoured(call, address, script, method):
    script.failures = [(UNAVAILABLE, "loading"), (UNAVAILABLE, "loading"), (EXHAUSTED, "full", ("retry-after", "0.7"))]
    assert call(address, method, "Hello")
    times = [time_s for time_s, _, _ in script.calls]
    assert len(times) == 4
    assert times[3] - times[2] >= 0.7
    assert times[2] - times[1] >= 0.1, "the second wait is at least half of 0.2 s"


def test_retries_end(call, address, script):
    script.failures = [(UNAVAILABLE, "the model is loading")] * 5
    with pytest.raises(EngineUnavailable, match="the model is loading"):
        call(address, "generate", "Hello", client={"max_retries": 2})
    assert len(script.calls) == 3
    script.failures = [(EXHAUSTED, "the queue is full", ("retry-after", "60"))]
    with pytest.raises(Overloaded, match="the queue is full") as caught:  # at once: the time allowed ends before the wait would
        call(address, "generate", "Hello", timeout_s=5)
    assert caught.value.retry_after_s == 60
    assert len(script.calls) == 4


def test_a_stream_that_has_begun_is_not_begun_again(call, address, script):
    script.late_failure = (UNAVAILABLE, "the engine is gone")
    with pytest.raises(EngineUnavailable, match="the engine is gone"):
        call(address, "stream", "Hello")
    assert len(script.calls) == 1


def test_a_server_that_comes_later_is_found(call, script):
    with serving(script) as address:
        pass
    port = int(address.rpartition(":")[2])
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add_InferenceServicer_to_server(script, server)
    timer = threading.Timer(0.5, lambda: (server.add_insecure_port(f"localhost:{port}"), server.start()))
    timer.start()
    try:
        assert call(address, "generate", "Hello", client={"max_retries": 20}).text == "one two"
    finally:
        timer.join()
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("NOT_FOUND", ModelNotFound),
        ("UNAUTHENTICATED", AuthenticationFailed),
        ("INTERNAL", RequestFailed),
        ("UNIMPLEMENTED", RequestFailed),
        ("RESOURCE_EXHAUSTED", InvalidRequest),
    ],
)
def test_other_errors_are_told_at_once(call, address, script, code, expected):
    for method in ("generate", "stream"):
        script.calls.clear()
        script.failures = [(grpc.StatusCode[code], "what was wrong")]
        with pytest.raises(expected, match="what was wrong"):
            call(address, method, "Hello")
        assert len(script.calls) == 1


def test_the_time_allowed_is_for_the_whole_call(call, address, script):
    script.release.clear()
    with pytest.raises(DeadlineExceeded):
        call(address, "stream", "Hello", timeout_s=0.3)
    assert script.cancelled.wait(30)
    with pytest.raises(TimeoutError):
        call(address, "stream", "Hello", client={"timeout_s": 0.3})
    script.failures = [(UNAVAILABLE, "loading")] * 50
    start = time.monotonic()
    with pytest.raises((EngineUnavailable, DeadlineExceeded)):
        call(address, "generate", "Hello", timeout_s=0.5, client={"max_retries": 50})
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12])
def test_time_beyond_counting_is_no_limit(call, address, timeout_s):
    for method in ("generate", "stream"):
        assert call(address, method, "Hello", timeout_s=timeout_s)


def test_leaving_a_stream_ends_its_call(address, script):
    script.release.clear()
    with Client(address) as client:
        pieces = client.stream("Hello")
        assert next(pieces).text == "one "
        pieces.close()
        assert script.cancelled.wait(30)

    async def leave() -> None:
        async with AsyncClient(address) as client:
            pieces = client.stream("Hello")
            assert (await anext(pieces)).text == "one "
            await pieces.aclose()
            assert await asyncio.to_thread(script.cancelled.wait, 10)

    script.cancelled.clear()
    asyncio.run(leave())


def test_the_key_goes_with_every_call(call, address, script):
    for method, argument in (("generate", "Hello"), ("stream", "Hello"), ("tokenize", "A"), ("detokenize", [65])):
        call(address, method, argument, client={"api_key": "secret"})
    assert [metadata["authorization"] for _, _, metadata in script.calls] == ["Bearer secret"] * 4


@pytest.mark.parametrize("key", ["ключ", "two\nlines"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(call, address, script, key):
    with pytest.raises(InvalidRequest, match="printable ASCII") as caught:
        call(address, "generate", "Hello", client={"api_key": key})
    assert key not in str(caught.value)
    assert not script.calls


def test_certificates(call, script, tmp_path):
    authority = trustme.CA()
    one, mine = authority.issue_cert("localhost"), authority.issue_cert("me@example.org")
    files = {"root": authority.cert_pem, "cert": mine.cert_chain_pems[0], "key": mine.private_key_pem}
    for name, blob in files.items():
        blob.write_to_path(tmp_path / f"{name}.pem")
    pair = (one.private_key_pem.bytes(), one.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), require_client_auth=True)
    root = {"root_certificates": tmp_path / "root.pem", "max_retries": 0}
    with serving(script, credentials) as address:
        identity = {"client_certificate": (tmp_path / "cert.pem", tmp_path / "key.pem")}
        assert call(address, "generate", "Hello", client=root | identity).text == "one two"
        for strange in ({"max_retries": 0}, {"use_tls": True, "max_retries": 0}, root):
            with pytest.raises(EngineUnavailable):
                call(address, "generate", "Hello", client=strange)
    with pytest.raises(OSError, match=r"missing\.pem"):
        Client(address, root_certificates=tmp_path / "missing.pem")


def test_many_threads_share_a_client(address):
    with Client(address) as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: client.generate("Hello").text, range(40))) == ["one two"] * 40


def test_the_import_is_light():
    heavy = ("jax", "numpy", "tokenizers", "pydantic", "starlette")
    code = f"import sys, jaxserve.client; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
