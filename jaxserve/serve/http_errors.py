"""Errors as HTTP answers: OpenAI's error shape, the status of `errors.RESPONSES`, and when to come again.

No answer shows a traceback; what was not raised on purpose is logged and named by its class alone. Used by every HTTP module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import AuthenticationFailed, EngineUnavailable, JaxserveError, Overloaded, response_for
from jaxserve.serve.sse import to_json
from jaxserve.serve.tracing import caller_headers

logger = logging.getLogger(__name__)

RETRY_UNAVAILABLE_S = 5.0
"""When to ask again a server whose engine loads or starts again."""
KINDS = {403: "PermissionDeniedError", 404: "NotFoundError", 408: "RequestTimeoutError"}
"""OpenAI `error.type` of refusals by HTTP itself; others are BadRequestError."""


def route(path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
    """A route whose endpoint's errors become answers, and whose headers are left for the tracer."""
    return Route(path, _answering_errors(endpoint), methods=[method])


def _answering_errors(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        caller_headers.set(request.headers)
        try:
            return await endpoint(request)
        except HTTPException:
            raise
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return error_answer(error)

    return answer


def error_answer(error: Exception) -> Response:
    """The whole answer for an error."""
    answer = json_answer(error_body(error), response_for(error).http_status)
    if isinstance(error, AuthenticationFailed):
        answer.headers["WWW-Authenticate"] = "Bearer"
    retry_after_s = _retry_after_s(error)
    if retry_after_s is not None:
        answer.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        answer.headers["retry-after-ms"] = str(max(1, round(retry_after_s * 1000)))
    return answer


def _retry_after_s(error: Exception) -> float | None:
    if isinstance(error, Overloaded):
        return error.retry_after_s
    return RETRY_UNAVAILABLE_S if isinstance(error, EngineUnavailable) else None


def error_body(error: Exception) -> dict[str, Any]:
    """The body alone, as the last event of a stream has it; logs what is our bug."""
    response = response_for(error)
    if not isinstance(error, JaxserveError):
        logger.error("a request failed unexpectedly", exc_info=error)
    message = str(error) if isinstance(error, JaxserveError) else f"internal error: {type(error).__name__}"
    return make_body(message, response.openai_type, response.http_status, getattr(error, "param", None))


def make_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def refusal(status: int, message: str) -> Response:
    """The answer to what HTTP itself refuses."""
    return json_answer(make_body(message, KINDS.get(status, "BadRequestError"), status), status)


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for HTTPException: errors of routing, of bodies and of endpoints that are off."""
    assert isinstance(error, HTTPException)
    is_routing = error.status_code in (404, 405)
    answer = refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}" if is_routing else error.detail)
    answer.headers.update(error.headers or {})
    return answer


def json_answer(value: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(to_json(value), status, media_type="application/json")
