"""Connections that misbehave, against a real uvicorn with a small application behind it."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from jaxserve.config import ServerConfig
from jaxserve.serve import http_connection
from jaxserve.serve.http_connection import read_body, uvicorn_config
from jaxserve.serve.http_errors import http_error
from jaxserve.serve.sse import ServerSentEvents

MAX_BODY = 2**20


class App:
    """Endpoints that tell what became of them."""

    def __init__(self):
        self.num_sent = 0
        self.stream_ended = threading.Event()

    async def length(self, request):
        return PlainTextResponse(str(len(await read_body(request, MAX_BODY))))

    async def endless(self, request):
        async def chunks():
            try:
                while True:
                    self.num_sent += 1
                    yield {"text": "x" * 10_000}
                    await asyncio.sleep(0)
            finally:
                self.stream_ended.set()

        return ServerSentEvents({}, chunks())

    async def large(self, request):
        return PlainTextResponse("x" * 10_000_000)

    def app(self):
        routes = [
            Route("/length", self.length, methods=["POST"]),
            Route("/endless", self.endless),
            Route("/large", self.large),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: http_error})


@contextmanager
def serving(app):
    """Its port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, ServerConfig(), flush_s=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def app():
    return App()


@pytest.fixture(scope="module")
def port(app):
    with serving(app.app()) as port:
        yield port


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def read_until(sock, end):
    answer = b""
    while not answer.endswith(end):
        part = sock.recv(65536)
        assert part, answer
        answer += part


def read_all(sock):
    """What the server sends until it closes."""
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def assert_alive(port):
    with connect(port) as sock:
        sock.sendall(b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"3")
    assert b"\r\nserver:" not in answer.lower()


def error_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "request_bytes",
    [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
     b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: five\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 40_000],
)  # fmt: skip
def test_what_is_not_http_gets_an_error_body(port, request_bytes):
    with connect(port) as sock:
        sock.sendall(request_bytes)
        answer = read_all(sock)
    status, error = error_of(answer)
    assert (status, error["type"]) == (400, "BadRequestError")
    assert b"\r\nx-request-id: " in answer
    assert "32768" in error["message"]
    assert_alive(port)


def test_headers_that_come_at_once_are_measured_too(port, caplog):
    with connect(port) as sock:
        sock.sendall(b"POST /length HTTP/1.1\r\nContent-Length: 0\r\nHost: x\r\nA: " + b"x" * 100_000 + b"\r\n\r\n")
        answer = read_all(sock)
    assert not answer.startswith(b"HTTP/1.1 200"), answer
    assert_alive(port)
    assert not caplog.records, "strangers can fill no log"


@pytest.mark.parametrize("start", [b"", b"POST /len", b"POST /length HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_do_not_come_end_the_connection(port, monkeypatch, start):
    monkeypatch.setattr(http_connection, "HEADERS_S", 0.2)
    with connect(port) as sock:
        sock.sendall(start)
        assert read_all(sock) == b""
    assert_alive(port)


def test_headers_that_drip_end_the_connection(port, monkeypatch):
    monkeypatch.setattr(http_connection, "HEADERS_S", 0.3)
    with connect(port) as sock:
        sock.sendall(b"GET /length HTTP/1.1\r\nHost: x\r\n")
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 200:
                sock.sendall(b"A: b\r\n")
                sent += 1
                time.sleep(0.02)
    assert sent < 200


def test_a_kept_connection_has_the_time_anew_for_each_request(port, monkeypatch):
    monkeypatch.setattr(http_connection, "HEADERS_S", 0.3)
    with connect(port) as sock:
        for _ in range(4):
            sock.sendall(b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n")
            time.sleep(0.12)
            sock.sendall(b"abc")
            read_until(sock, b"\r\n\r\n3")
        time.sleep(0.4)  # idle, not in the middle of headers
        sock.sendall(b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
        read_until(sock, b"\r\n\r\n3")


def test_a_body_that_does_not_come_is_408(port, monkeypatch):
    monkeypatch.setattr(http_connection, "UPLOAD_S", 0.2)
    with connect(port) as sock:
        sock.sendall(b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        status, error = error_of(read_all(sock))
    assert (status, error["type"]) == (408, "RequestTimeoutError")
    assert "only 3 bytes" in error["message"]


def test_a_body_has_more_time_for_what_has_come(port, monkeypatch):
    monkeypatch.setattr(http_connection, "UPLOAD_S", 0.3)
    monkeypatch.setattr(http_connection, "MIN_UPLOAD_BYTES_PER_S", 10_000)
    with connect(port) as sock:
        sock.sendall(b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")
        for _ in range(6):
            sock.sendall(b"x" * 10_000)
            time.sleep(0.1)
        read_until(sock, b"\r\n\r\n60000")


@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_that_is_too_large_is_413_and_not_read_for_long(port, monkeypatch, has_length):
    monkeypatch.setattr(http_connection, "HEADERS_S", 0.3)
    size = MAX_BODY + 1
    how = b"Content-Length: %d\r\n\r\n" % (2 * size) if has_length else b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (2 * size)
    with connect(port) as sock:
        sock.sendall(b"POST /length HTTP/1.1\r\nHost: x\r\n" + how + b"x" * size)
        status, error = error_of(read_all(sock))
    assert (status, error["code"]) == (413, 413)
    assert "--max-request-bytes" in error["message"]
    assert_alive(port)


def test_a_client_that_stops_reading_is_cut_and_slows_nobody(app, port, monkeypatch):
    monkeypatch.setattr(http_connection, "SLOW_READER_S", 3.0)
    app.stream_ended.clear()
    app.num_sent = 0
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(1000)
        blocked_at = -1
        while blocked_at != app.num_sent:  # until its buffers are full
            blocked_at = app.num_sent
            time.sleep(0.1)
        assert not app.stream_ended.is_set()
        assert blocked_at * 10_000 < 2**20
        assert_alive(port)
        assert not app.stream_ended.is_set(), "the others had to wait until it was cut"
        assert app.stream_ended.wait(30)
    assert_alive(port)


def test_a_client_that_reads_slowly_but_reads_is_served(app, port, monkeypatch):
    monkeypatch.setattr(http_connection, "SLOW_READER_S", 2.0)
    app.stream_ended.clear()
    with connect(port) as sock:
        sock.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(25):
            time.sleep(0.1)
            assert sock.recv(2**20)
        assert not app.stream_ended.is_set()
    assert app.stream_ended.wait(30)


def test_a_whole_answer_that_nobody_reads_is_given_up(port, monkeypatch):
    monkeypatch.setattr(http_connection, "SLOW_READER_S", 0.3)
    with connect(port) as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(100)
        time.sleep(1)
        answer = read_all(sock)
    assert len(answer) < 10_000_000
