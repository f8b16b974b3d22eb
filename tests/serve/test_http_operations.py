"""Health, load, the dev endpoints, request ids and timeouts, over HTTP against a whole server."""

import asyncio
import json
import logging
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from jaxserve.config import ServerConfig


def call(server, path, body=None, *, method=None, **headers):
    """Status, headers and body of a call; a body makes it a POST."""
    data = None if body is None else json.dumps(body).encode()
    named = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.http + path, data, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def error_of(answer):
    return json.loads(answer[2])["error"]


COMPLETION = {"prompt": [5, 7], "max_tokens": 4, "temperature": 0}


def test_a_served_engine_is_healthy_ready_and_live(server):
    assert [call(server, path)[0] for path in ("/health", "/ready", "/live")] == [200] * 3


def test_without_an_engine_health_says_why_and_calls_are_503(fresh_server):
    server = fresh_server
    server.lose_engine()
    server.wait_until_ready(is_ready=False)
    for path in ("/health", "/ready", "/v1/completions"):
        answer = call(server, path, COMPLETION if path.startswith("/v1") else None)
        assert answer[0] == 503
        assert error_of(answer)["type"] == "ServiceUnavailableError"
        assert "restarting" in error_of(answer)["message"]
        assert int(answer[1]["Retry-After"]) >= 1
    assert call(server, "/live")[0] == 200
    server.return_engine()
    server.wait_until_ready()
    assert [call(server, path)[0] for path in ("/health", "/ready", "/live")] == [200] * 3


def test_a_draining_server_is_healthy_but_not_ready(fresh_server):
    server = fresh_server
    asyncio.run_coroutine_threadsafe(server.front_end.service.drain(0), server.aio_loop).result(30)
    assert call(server, "/health")[0] == 200
    assert call(server, "/live")[0] == 200
    answer = call(server, "/ready")
    assert answer[0] == 503
    assert "shutting down" in error_of(answer)["message"]
    assert call(server, "/v1/completions", COMPLETION)[0] == 503


def test_load_is_what_the_engine_runs_and_has_waiting(fresh_server):
    server = fresh_server
    server.runner.gate.clear()
    with server.client() as client:
        thread = threading.Thread(target=lambda: client.completions.create(model="counting", prompt=[5], n=3, temperature=1, max_tokens=2))
        thread.start()
        while json.loads(call(server, "/load")[2]) != {"server_load": 3}:
            assert thread.is_alive()
        server.runner.gate.set()
        thread.join(30)


def test_metrics_are_mounted(server):
    status, headers, body = call(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert b"jaxserve:num_requests_running" in body


DEV = ("/reset_prefix_cache", "/start_profile", "/stop_profile")


@pytest.mark.parametrize("path", DEV)
def test_dev_endpoints_are_off_unless_the_flag_is_given(server, path):
    answer = call(server, path, method="POST")
    assert answer[0] == 403
    assert "--enable-dev-endpoints" in error_of(answer)["message"]


@pytest.fixture
def dev_server(start_server):
    with start_server(ServerConfig(enable_dev_endpoints=True)) as server:
        yield server


def test_the_prefix_cache_is_reset_unless_it_is_in_use(dev_server):
    server = dev_server
    body = COMPLETION | {"prompt": list(range(100, 150))}

    def cached():
        return json.loads(call(server, "/v1/completions", body)[2])["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 48)
    assert call(server, "/reset_prefix_cache", method="POST")[0] == 200
    assert (cached(), cached()) == (0, 48)
    server.runner.step_s = 0.02
    with server.client() as client:
        stream = client.completions.create(model="counting", prompt=[5], max_tokens=250, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        answer = call(server, "/reset_prefix_cache", method="POST")
        assert answer[0] == 409
        assert "in use" in error_of(answer)["message"]
        stream.close()
    server.runner.step_s = 0.0
    assert cached() == 48


def test_a_profile_is_written_under_the_cache_directory(dev_server, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    asked = []

    async def start_profile(directory):
        asked.append(directory)

    async def stop_profile():
        return asked[-1]

    client = dev_server.front_end.service.client
    monkeypatch.setattr(client, "start_profile", start_profile)
    monkeypatch.setattr(client, "stop_profile", stop_profile)
    status, _, body = call(dev_server, "/start_profile", method="POST")
    assert status == 200
    assert Path(json.loads(body)["directory"]).parent == tmp_path / "cache" / "profiles"
    assert asked == [json.loads(body)["directory"]]
    assert json.loads(call(dev_server, "/stop_profile", method="POST")[2]) == {"directory": asked[0]}


def test_a_request_id_is_on_the_answer_and_in_its_id(server, client):
    status, headers, body = call(server, "/v1/completions", COMPLETION, X_Request_Id="mine-1")
    assert (status, headers["x-request-id"], json.loads(body)["id"]) == (200, "mine-1", "cmpl-mine-1")
    _, headers, body = call(server, "/v1/completions", COMPLETION | {"request_id": "body"}, X_Request_Id="mine-2")
    assert (headers["x-request-id"], json.loads(body)["id"]) == ("mine-2", "cmpl-body")
    answer = client.completions.with_raw_response.create(model="counting", prompt=[5], max_tokens=1)
    assert re.fullmatch("[0-9a-f]{32}", answer.request_id)
    assert answer.parse().id == f"cmpl-{answer.request_id}"


def test_errors_and_streams_carry_the_request_id(server, client):
    for path, body in (("/v1/completions", {"n": 0}), ("/v1/nothing", None), ("/v1/completions", None)):
        assert call(server, path, body, X_Request_Id="mine")[1]["x-request-id"] == "mine"
    with client.completions.with_streaming_response.create(
        model="counting", prompt=[5], max_tokens=2, stream=True, extra_headers={"X-Request-Id": "mine"}
    ) as answer:
        assert answer.headers["x-request-id"] == "mine"
        assert "cmpl-mine" in answer.read().decode()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="counting", prompt=[5], n=0)
    assert caught.value.request_id


def test_a_timeout_ends_the_answer_with_abort(fresh_server):
    server = fresh_server
    server.runner.step_s = 0.02
    with server.client() as client:
        options = {"ignore_eos": True, "timeout": 0.3, "return_token_ids": True}
        answer = client.completions.create(model="counting", prompt=[5], max_tokens=250, extra_body=options)
        [choice] = answer.choices
        assert choice.finish_reason == "abort"
        assert 0 < len(choice.token_ids) < 250
        assert choice.token_ids == server.output_ids([5], len(choice.token_ids))
        chunks = list(client.completions.create(model="counting", prompt=[5], max_tokens=250, stream=True, extra_body=options))
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["abort"]
        answer = client.completions.create(model="counting", prompt=[5], max_tokens=5, extra_body=options | {"timeout": 60})
        assert answer.choices[0].finish_reason == "length"
    server.wait_until_idle()


def test_the_servers_own_timeout_is_the_longest(start_server):
    with start_server(ServerConfig(request_timeout=0.3)) as server:
        server.runner.step_s = 0.02
        for fields in ({}, {"timeout": 60}):
            body = COMPLETION | {"max_tokens": 250, "ignore_eos": True} | fields
            answer = json.loads(call(server, "/v1/completions", body)[2])
            assert answer["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_timeout_that_is_none_is_400(server, timeout):
    answer = call(server, "/v1/completions", COMPLETION | {"timeout": timeout})
    assert answer[0] == 400
    assert error_of(answer)["param"] == "timeout"


def test_the_largest_body_is_a_setting(start_server):
    with start_server(ServerConfig(max_request_bytes=1024)) as server:
        assert call(server, "/v1/completions", COMPLETION)[0] == 200
        answer = call(server, "/v1/completions", COMPLETION | {"user": "x" * 1024})
        assert answer[0] == 413
        assert "--max-request-bytes" in error_of(answer)["message"]


def test_a_requests_own_template_is_refused_with_the_reason(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ messages }}"}
    answer = call(server, "/v1/chat/completions", body)
    assert (answer[0], error_of(answer)["param"]) == (400, "chat_template")
    assert "chat_template_kwargs" in error_of(answer)["message"]


def test_a_key_opens_every_endpoint_and_is_never_logged(start_server, caplog):
    caplog.set_level(logging.DEBUG)
    with start_server(ServerConfig(api_key=("open-sesame",), log_requests=True)) as server:
        for path in ("/v1/models", "/metrics", "/version", "/tokenize", "/nothing"):
            assert call(server, path)[0] == 401
        assert call(server, "/health")[0] == 200
        with server.client() as client, pytest.raises(openai.AuthenticationError, match="API key"):
            client.completions.create(model="counting", prompt=[5])
        with openai.OpenAI(base_url=f"{server.http}/v1", api_key="open-sesame", max_retries=0) as client:
            assert client.completions.create(model="counting", prompt=[5], max_tokens=1).choices
        assert call(server, "/metrics", Authorization="Bearer open-sesame")[0] == 200
        assert call(server, "/metrics", Authorization="Bearer sesame-street")[0] == 401
    # The client is in this process too, and its own lines are not the server's.
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith(("jaxserve", "uvicorn")))
    assert "begins" in ours
    assert "sesame" not in ours


def test_a_foreign_host_name_is_refused_on_loopback(server):
    answer = call(server, "/v1/models", Host="evil.example")
    assert answer[0] == 403
    assert "--allowed-hosts" in error_of(answer)["message"]
    assert call(server, "/v1/models", Host="localhost:1")[0] == 200
