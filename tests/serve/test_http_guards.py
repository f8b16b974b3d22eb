"""What calls pass before their endpoint, by calling the ASGI application itself."""

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.logs import request_id
from jaxserve.serve.http_guards import guards


def call(config, path="/echo", method="GET", **headers):
    """Status, headers and body of one call; header names with _ for -."""
    named = {"host": "localhost:8000"} | {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    if headers.get("host", "") is None:
        del named["host"]
    sent = []

    async def echo(request):
        return PlainTextResponse(request_id.get())

    routes = [Route(path, echo, methods=["GET", "POST"]) for path in ("/echo", "/health", "/ready", "/live", "/metrics")]
    app = Starlette(routes=routes, middleware=guards(config))

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    encoded = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": encoded, "http_version": "1.1"}
    asyncio.run(app(scope, receive, send))
    answer_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answer_headers, b"".join(message.get("body", b"") for message in sent[1:])


KEYED = ServerConfig(api_key=("one", "two"))


@pytest.mark.parametrize("path", ["/echo", "/metrics", "/nothing", "/health/", "/healthy", "/v1/models"])
def test_without_a_key_every_path_is_401(path):
    for header in (None, "Bearer three", "two"):
        status, headers, body = call(KEYED, path, authorization=header)
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
        assert headers["x-request-id"]
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("AuthenticationError", 401)
        assert "three" not in error["message"]


def test_with_a_key_and_for_health_calls_are_served():
    assert call(KEYED, authorization="Bearer two")[0] == 200
    assert call(KEYED, "/nothing", authorization="Bearer two")[0] == 404
    assert [call(KEYED, path)[0] for path in ("/health", "/ready", "/live")] == [200] * 3


def test_keys_that_cannot_be_read_are_an_error_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="--api-key-file"):
        guards(ServerConfig(api_key_file=str(tmp_path / "missing")))


@pytest.mark.parametrize("path", ["/echo", "/health"])
def test_foreign_host_names_are_403_naming_the_flag(path):
    status, _, body = call(ServerConfig(), path, host="evil.example:8000")
    assert status == 403
    error = json.loads(body)["error"]
    assert error["type"] == "PermissionDeniedError"
    assert "evil.example" in error["message"]
    assert "--allowed-hosts" in error["message"]
    for config in (KEYED, ServerConfig(host="0.0.0.0"), ServerConfig(allowed_hosts=("evil.example",))):
        assert call(config, path, host="evil.example:8000", authorization="Bearer one")[0] == 200
    assert call(ServerConfig(), path, host=None)[0] == 200


def test_pages_of_other_origins_may_not_call():
    status, headers, body = call(ServerConfig(), method="POST", origin="https://evil.example")
    assert status == 403
    assert "--allowed-origins" in json.loads(body)["error"]["message"]
    assert "access-control-allow-origin" not in headers
    assert call(ServerConfig(), method="POST", origin="http://localhost:8000")[0] == 200
    keyed = call(KEYED, method="POST", origin="https://evil.example", authorization="Bearer one")
    assert keyed[0] == 200
    assert "access-control-allow-origin" not in keyed[1]


def test_allowed_origins_may_call_and_ask_before_without_a_key():
    config = ServerConfig(api_key=("one",), allowed_origins=("https://chat.example",))
    asked = {"origin": "https://chat.example", "access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    status, headers, _ = call(config, method="OPTIONS", **asked)
    assert status == 200
    assert headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in headers["access-control-allow-headers"].lower()
    assert call(config, method="OPTIONS", **(asked | {"origin": "https://evil.example"}))[0] == 400
    status, headers, _ = call(config, method="POST", origin="https://chat.example", authorization="Bearer one")
    assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert "x-request-id" in headers["access-control-expose-headers"]
    refused = call(config, method="POST", origin="https://chat.example")
    assert (refused[0], refused[1]["access-control-allow-origin"]) == (401, "https://chat.example")
    assert call(ServerConfig(allowed_origins=("*",)), origin="https://any.example")[1]["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "a b:c/d"])
def test_a_sane_request_id_is_taken_and_echoed(given):
    _, headers, body = call(ServerConfig(), x_request_id=given)
    assert headers["x-request-id"] == given
    assert body.decode() == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "é", "a\x7fb", "a\tb"])
def test_any_other_request_id_is_replaced(given):
    _, first, body = call(ServerConfig(), x_request_id=given)
    _, second, _ = call(ServerConfig(), "/nothing", x_request_id=given)
    assert first["x-request-id"] == body.decode()
    assert first["x-request-id"] != given
    assert len({first["x-request-id"], second["x-request-id"]}) == 2
