"""More clients than the server takes, and clients that do not read, with the openai client and raw sockets."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

import httpx2
import openai
import pytest

from jaxserve.config import ServerConfig
from jaxserve.serve import http_connection

SEATS, MAX_WAITING = 8, 3


@pytest.fixture
def full_server(start_server):
    """Takes MAX_WAITING sequences beside the SEATS that run; its steps wait for the gate."""
    with start_server(ServerConfig(), max_waiting=MAX_WAITING) as server:
        server.runner.gate.clear()
        yield server


def complete(client, prompt, **options):
    extra = {"ignore_eos": True, "return_token_ids": True}
    return client.completions.create(model="counting", prompt=prompt, temperature=0, max_tokens=6, extra_body=extra, **options)


def wait_until_open(server, num_sequences):
    end = time.monotonic() + 30
    while server.front_end.service.client.num_open < num_sequences or server.loop._limit.num_open < num_sequences:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_full_server_refuses_at_once_and_finishes_what_it_took(full_server, is_stream):
    server = full_server
    with server.client() as client, ThreadPoolExecutor(16) as pool:
        taken = [pool.submit(complete, client, [5, i]) for i in range(SEATS + MAX_WAITING)]
        wait_until_open(server, SEATS + MAX_WAITING)
        seconds = []
        for _ in range(5):  # while no step ends
            start = time.process_time()  # of this process alone, which is also the server
            with pytest.raises(openai.RateLimitError, match="--max-waiting 3") as caught:
                complete(client, [5, 99], stream=is_stream)
            seconds.append(time.process_time() - start)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert int(caught.value.response.headers["retry-after-ms"]) >= 1
            assert caught.value.type == "RateLimitError"
        assert sorted(seconds)[2] < 0.1, seconds
        server.runner.gate.set()
        for i, future in enumerate(taken):
            assert future.result(30).choices[0].token_ids == server.output_ids([5, i], 6)
    server.wait_until_idle()


def test_the_openai_clients_retries_succeed(full_server):
    server = full_server
    num_clients = 3 * (SEATS + MAX_WAITING)
    refused = Semaphore(0)
    count = httpx2.Client(event_hooks={"response": [lambda response: refused.release() if response.status_code == 429 else None]})
    options = {"http_client": count, "max_retries": 4}
    with server.client().with_options(**options) as client, ThreadPoolExecutor(num_clients) as pool:
        answers = [pool.submit(complete, client, [5, i]) for i in range(num_clients)]
        for _ in range(num_clients - SEATS - MAX_WAITING):
            assert refused.acquire(timeout=30)
        server.runner.gate.set()
        for i, future in enumerate(answers):
            assert future.result(30).choices[0].token_ids == server.output_ids([5, i], 6)
    server.wait_until_idle()


def test_a_client_that_stops_reading_is_aborted_and_slows_nobody(server, monkeypatch):
    monkeypatch.setattr(http_connection, "SLOW_READER_S", 2.0)
    server.runner.step_s = 0.03
    before = server.loop.stats().num_generated_tokens
    num_wanted = 6 * 250
    body = {"prompt": [5], "max_tokens": 250, "n": 6, "temperature": 1, "seed": 3, "ignore_eos": True, "logprobs": 20, "stream": True}
    data = json.dumps(body).encode()
    host, port = server.http.removeprefix("http://").split(":")
    try:
        with socket.socket() as sock, server.client() as client:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            assert sock.recv(100)
            others, waits = 0, []  # in steps: how busy the machine is does not matter
            while server.engine.has_work:
                first_step = server.runner.num_steps
                assert complete(client, [5, 7]).choices[0].token_ids == server.output_ids([5, 7], 6)
                waits.append(server.runner.num_steps - first_step)
                others += 6
            generated = server.loop.stats().num_generated_tokens - before - others
            assert 0 < generated < num_wanted
            assert max(waits) < 2.0 / server.runner.step_s, waits
            server.wait_until_idle()
    finally:
        server.runner.step_s = 0.0
