"""Every exception jaxserve raises on purpose, and what a client is told for each.

    JaxserveError
    ├── InvalidRequest          the client asked for something that cannot be served
    ├── AuthenticationFailed    the client sent no API key, or a wrong one
    ├── ModelNotFound           the client named a model that is not served here
    ├── Overloaded              try again later: a queue limit is reached
    ├── EngineUnavailable       the engine is starting, draining or gone
    ├── RequestFailed           this request failed inside the engine; others go on
    ├── DeadlineExceeded        the call took longer than its caller allows
    ├── ConfigError             a flag, environment variable or file is wrong (exit status 2)
    └── CheckpointError         a checkpoint is missing, damaged or unsupported

`RESPONSES` is the one table that maps a class to its HTTP status, OpenAI error type and gRPC status name; HTTP and gRPC both
read it. Anything not listed is an internal error. A message says what was given, the limit, and what to change.
"""

from __future__ import annotations

from typing import NamedTuple

ERROR_PREFIX = "jaxserve: error: "
"""Begins the one line on stderr that tells why a command failed; a parent process finds the reason by it."""


class JaxserveError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequest(JaxserveError, ValueError):
    """The request cannot be served as written; `param` names the offending field, if there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class AuthenticationFailed(JaxserveError):
    """The call has no API key, or none of this server's."""


class ModelNotFound(JaxserveError):
    """The request names a model that is not served here."""


class Overloaded(JaxserveError):
    """A queue limit is reached; `retry_after_s` is a hint in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(JaxserveError):
    """The engine is starting, draining or gone."""


class RequestFailed(JaxserveError):
    """One request failed inside the engine."""


class DeadlineExceeded(JaxserveError, TimeoutError):
    """A client's call took longer than the client allowed; its work on the server is over."""


class ConfigError(JaxserveError):
    """A flag, an environment variable or a configuration file is wrong."""


class CheckpointError(JaxserveError):
    """A checkpoint is missing, damaged or of an unsupported kind."""


class Response(NamedTuple):
    """What a client is told: HTTP status, OpenAI `error.type`, name of the `grpc.StatusCode`."""

    http_status: int
    openai_type: str
    grpc_status: str


INTERNAL = Response(500, "InternalServerError", "INTERNAL")
RESPONSES: dict[type[BaseException], Response] = {
    InvalidRequest: Response(400, "BadRequestError", "INVALID_ARGUMENT"),
    AuthenticationFailed: Response(401, "AuthenticationError", "UNAUTHENTICATED"),
    ModelNotFound: Response(404, "NotFoundError", "NOT_FOUND"),
    Overloaded: Response(429, "RateLimitError", "RESOURCE_EXHAUSTED"),
    EngineUnavailable: Response(503, "ServiceUnavailableError", "UNAVAILABLE"),
    RequestFailed: INTERNAL,
    DeadlineExceeded: Response(504, "TimeoutError", "DEADLINE_EXCEEDED"),
}


def response_for(error: BaseException) -> Response:
    """The table's entry for the error's class or its nearest listed base; INTERNAL when there is none."""
    for cls in type(error).__mro__:
        if cls in RESPONSES:
            return RESPONSES[cls]
    return INTERNAL
