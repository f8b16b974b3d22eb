"""The HTTP door: OpenAI's endpoints, tokenizer endpoints, health. Turns bodies into calls, and errors into OpenAI's error shape.

Every error goes through `errors.RESPONSES`. A client that disconnects ends its call, streaming or not. What the answers look like
is `openai_answers`'s; what happens below is `service`'s.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.engine.admission import check_token_ids
from jaxserve.errors import InvalidRequest, JaxserveError, response_for
from jaxserve.serve.openai_answers import Chat, Completion, Usage, chat_prompt, raise_if_failed
from jaxserve.serve.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from jaxserve.serve.service import Service
from jaxserve.serve.sse import EventStream, to_json, until_disconnect
from jaxserve.serve.tracing import caller_headers

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
"""Parsing the JSON of one this large holds the event loop for some tenths of a second."""


class HttpApi:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        post = ["POST"]
        routes = [
            Route("/v1/completions", _answering_errors(self.completions), methods=post),
            Route("/v1/chat/completions", _answering_errors(self.chat), methods=post),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", _answering_errors(self.model)),
            Route("/tokenize", _answering_errors(self.tokenize), methods=post),
            Route("/detokenize", _answering_errors(self.detokenize), methods=post),
            Route("/health", self.health),
            Route("/version", self.version),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = CompletionBody.parse(await _read_body(request))
        self._service.check_model(body.model)
        return await self._answer(request, body, Completion.prepare(self._service, body))

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = ChatBody.parse(await _read_body(request))
        self._service.check_model(body.model)
        return await self._answer(request, body, Chat.prepare(self._service, body))

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return _json({"object": "list", "data": [self._model_card(name) for name in self._service.served_model_names]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        name = request.path_params["name"]
        self._service.check_model(name)
        return _json(self._model_card(name))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the ids of a prompt or of rendered messages."""
        body = TokenizeBody.parse(await _read_body(request))
        self._service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages.", param="prompt")
        if body.prompt is None:
            token_ids = await chat_prompt(self._service, body)
        else:
            adds_special = True if body.add_special_tokens is None else body.add_special_tokens
            token_ids = await self._service.tokenize(body.prompt, add_special_tokens=adds_special)
        answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": self._service.info.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = await self._service.token_texts(token_ids)
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of ids."""
        body = DetokenizeBody.parse(await _read_body(request))
        self._service.check_model(body.model)
        check_token_ids(body.tokens, max(self._service.info.vocab_size, self._service.tokenizer.max_token_id + 1), "tokens")
        return _json({"prompt": await self._service.detokenize(body.tokens)})

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 while new calls are served."""
        return Response(status_code=200 if self._service.is_ready else 503)

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return _json({"version": __version__})

    def _model_card(self, name: str) -> dict[str, Any]:
        info = self._service.info
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "jaxserve", "root": info.model, "parent": None}
        return card | {"max_model_len": info.max_model_len, "permission": []}

    async def _answer(self, request: Request, body: CompletionBody | ChatBody, preparing: Awaitable[Completion | Chat]) -> Response:
        """Runs a call to the end, or to its first chunk and leaves the rest to the stream."""
        call = await preparing
        envelope = {
            "id": f"{call.id_prefix}-{body.request_id or uuid.uuid4().hex}",
            "object": call.chunk_name if body.stream else call.object_name,
            "created": int(time.time()),
            "model": body.model or self._service.served_model_names[0],
        }
        if not body.stream:
            answer = await until_disconnect(request.receive, _whole_answer(call))
            return Response(status_code=499) if answer is None else _json(envelope | answer)
        chunks = _chunks(call, body, envelope)
        # A refusal that only the engine can give comes before the first chunk: it still gets its own status.
        first = await until_disconnect(request.receive, _first(chunks))
        return EventStream(first, chunks)


async def _whole_answer(call: Completion | Chat) -> dict[str, Any]:
    usage = Usage()
    choices: dict[int, list[dict[str, Any]]] = {}
    async with aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            raise_if_failed(delta)
            usage.add(delta, is_output_dropped=call.is_output_dropped)
            for choice in call.choices(delta):
                choices.setdefault(choice["index"], []).append(choice)
    return call.answer(choices) | {"usage": usage.to_json()}


async def _chunks(call: Completion | Chat, body: CompletionBody | ChatBody, envelope: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """The chunks of a stream. An error after the first one is the last chunk; before it, it is raised."""
    usage = Usage()
    has_started = False
    try:
        async with aclosing(call.deltas()) as deltas:
            async for delta in deltas:
                raise_if_failed(delta)
                usage.add(delta, is_output_dropped=call.is_output_dropped)
                for choice in call.choices(delta):
                    has_started = True
                    chunk = envelope | {"choices": [choice]}
                    yield chunk | {"usage": usage.to_json()} if body.wants_continuous_usage else chunk
        if body.wants_usage:
            yield envelope | {"choices": [], "usage": usage.to_json()}
    except Exception as error:
        if not has_started:
            raise
        yield _error_body(error)


async def _first(chunks: AsyncGenerator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(chunks, None)


async def _read_body(request: Request) -> bytes:
    """The body, up to its limit; raises HTTPException 413 as soon as it is passed."""
    too_large = HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _answering_errors(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        caller_headers.set(request.headers)
        try:
            return await endpoint(request)
        except JaxserveError as error:
            return _json(_error_body(error), response_for(error).http_status)
        except HTTPException:
            raise
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return _json(_error_body(error), 500)

    return answer


def _error_body(error: Exception) -> dict[str, Any]:
    response = response_for(error)
    if not isinstance(error, JaxserveError):
        logger.error("a request failed unexpectedly", exc_info=error)
    message = str(error) if isinstance(error, JaxserveError) else f"internal error: {type(error).__name__}"
    return _error(message, response.openai_type, response.http_status, getattr(error, "param", None))


def _error(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of routing and of body size."""
    assert isinstance(error, HTTPException)
    message = error.detail if error.status_code == 413 else f"{request.method} {request.url.path}: {error.detail}"
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    answer = _json(_error(message, kind, error.status_code), error.status_code)
    answer.headers.update(error.headers or {})
    return answer


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
