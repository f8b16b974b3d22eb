"""What every HTTP call passes before its endpoint: a request id, the Host name, CORS, the API key. Plain ASGI, outermost first.

Health stays open to those without a key: probes have none. Decides nothing itself: the rules are `auth`'s.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.config import ServerConfig
from jaxserve.errors import AuthenticationFailed
from jaxserve.logs import request_id
from jaxserve.serve.auth import HostCheck, KeyCheck, read_keys
from jaxserve.serve.http_errors import error_answer, refusal

OPEN_PATHS = frozenset({"/health", "/ready", "/live"})
MAX_REQUEST_ID_CHARS = 128
EXPOSED_HEADERS = ("x-request-id", "retry-after", "retry-after-ms")
"""What pages of other origins may read of an answer's headers."""


def guards(config: ServerConfig) -> Sequence[Middleware]:
    """For `Starlette(middleware=...)`; raises ConfigError when the keys cannot be read."""
    keys = KeyCheck(read_keys(config))
    middlewares = [Middleware(RequestIdGuard), Middleware(HostGuard, check=HostCheck(config, has_keys=keys.has_keys))]
    if config.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
        middlewares.append(cors)
    return [*middlewares, Middleware(KeyGuard, keys=keys)]


class RequestIdGuard:
    """Takes a sane `x-request-id` from the client or makes one, leaves it in `logs.request_id`, and puts it on the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on."""
        chosen = choose_request_id(Headers(scope=scope).get("x-request-id"))
        # Set for this task alone: a connection has a task for each request.
        request_id.set(chosen)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = chosen
            await send(message)

        await self._app(scope, receive, send_with_id)


def choose_request_id(given: str | None) -> str:
    """The client's id if it is printable ASCII and not too long, else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


class HostGuard:
    """Refuses calls under foreign Host names and from foreign pages; see `auth.HostCheck`."""

    def __init__(self, app: ASGIApp, check: HostCheck) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, or answers 403."""
        headers = Headers(scope=scope)
        # Only HTTP/1.0 may come without a Host, and no browser speaks it.
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._check.is_host_allowed(host):
            answer = refusal(
                403,
                f"the Host {host!r} is not one of this server's: without an API key it answers on loopback names only; start it with "
                "--allowed-hosts NAME, or with --api-key.",
            )
        elif not self._check.is_origin_allowed(origin, host or ""):
            answer = refusal(
                403, f"pages of {origin!r} may not call this server; start it with --allowed-origins ORIGIN, or with --api-key."
            )
        else:
            await self._app(scope, receive, send)
            return
        await answer(scope, receive, send)


class KeyGuard:
    """Refuses calls without one of the keys, whatever their path is, but for health."""

    def __init__(self, app: ASGIApp, keys: KeyCheck) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, or answers 401."""
        if scope["path"] not in OPEN_PATHS:
            try:
                self._keys.check(Headers(scope=scope).get("authorization"))
            except AuthenticationFailed as error:
                await error_answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
