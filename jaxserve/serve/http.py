"""The HTTP door: OpenAI's endpoints and the tokenizer's. Turns bodies into calls, and their deltas into answers.

A client that disconnects ends its call, streaming or not. What a call passes before it gets here is `http_guards`'s, errors are
`http_errors`'s, sockets `http_connection`'s, health and its like `http_operations`'s. What the answers look like is
`openai_answers`'s; what happens below is `service`'s.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.admission import check_token_ids
from jaxserve.errors import InvalidRequest
from jaxserve.logs import request_id
from jaxserve.serve.http_connection import read_body
from jaxserve.serve.http_errors import error_body, http_error, json_answer, route
from jaxserve.serve.http_guards import guards
from jaxserve.serve.http_operations import OperationsApi
from jaxserve.serve.openai_answers import Chat, Completion, Usage, chat_prompt, raise_if_failed
from jaxserve.serve.openai_embeddings import Embeddings
from jaxserve.serve.openai_types import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from jaxserve.serve.request_metrics import arrival_s
from jaxserve.serve.service import Service
from jaxserve.serve.sse import ServerSentEvents, until_disconnect


class HttpApi:
    """The endpoints over one service.

    Args:
        service: What is served, and the server's settings; its engine need not be there yet.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._config = service.config
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application; raises ConfigError when the API keys cannot be read."""
        routes = [
            route("/v1/completions", self.completions, "POST"),
            route("/v1/chat/completions", self.chat, "POST"),
            route("/v1/embeddings", self.embeddings, "POST"),
            route("/v1/models", self.models),
            route("/v1/models/{name:path}", self.model),
            route("/tokenize", self.tokenize, "POST"),
            route("/detokenize", self.detokenize, "POST"),
            *OperationsApi(self._service).routes(),
        ]
        return Starlette(routes=routes, middleware=guards(self._config), exception_handlers={HTTPException: http_error})

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        self._service.check_ready()
        body = CompletionBody.parse(await self._body(request))
        self._service.check_model(body.model)
        return await self._answer(request, body, Completion.prepare(self._service, body))

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        self._service.check_ready()
        body = ChatBody.parse(await self._body(request))
        self._service.check_model(body.model)
        return await self._answer(request, body, Chat.prepare(self._service, body))

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        self._service.check_ready()
        body = EmbeddingBody.parse(await self._body(request))
        self._service.check_model(body.model)
        call = await Embeddings.prepare(self._service, body)
        answer = await until_disconnect(request.receive, call.answer())
        return Response(status_code=499) if answer is None else Response(answer, media_type="application/json")

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_answer({"object": "list", "data": [self._model_card(name) for name in self._service.served_model_names]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        name = request.path_params["name"]
        self._service.check_model(name)
        return json_answer(self._model_card(name))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the ids of a prompt or of rendered messages."""
        body = TokenizeBody.parse(await self._body(request))
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
        return json_answer(answer)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of ids."""
        body = DetokenizeBody.parse(await self._body(request))
        self._service.check_model(body.model)
        check_token_ids(body.tokens, max(self._service.info.vocab_size, self._service.tokenizer.max_token_id + 1), "tokens")
        return json_answer({"prompt": await self._service.detokenize(body.tokens)})

    async def _body(self, request: Request) -> bytes:
        body = await read_body(request, self._config.max_request_bytes)
        arrival_s.set(time.perf_counter())
        return body

    def _model_card(self, name: str) -> dict[str, Any]:
        info = self._service.info
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "jaxserve", "root": info.model, "parent": None}
        return card | {"max_model_len": info.max_model_len, "permission": []}

    async def _answer(self, request: Request, body: CompletionBody | ChatBody, preparing: Awaitable[Completion | Chat]) -> Response:
        """Runs a call to the end, or to its first chunk and leaves the rest to the stream."""
        call = await preparing
        envelope = {
            "id": f"{call.id_prefix}-{body.request_id or request_id.get() or uuid.uuid4().hex}",
            "object": call.chunk_name if body.stream else call.object_name,
            "created": int(time.time()),
            "model": body.model or self._service.served_model_names[0],
        }
        if not body.stream:
            answer = await until_disconnect(request.receive, _whole_answer(call))
            return Response(status_code=499) if answer is None else json_answer(envelope | answer)
        chunks = _chunks(call, body, envelope)
        # A refusal that only the engine can give comes before the first chunk: it still gets its own status.
        first = await until_disconnect(request.receive, _first(chunks))
        return ServerSentEvents(first, chunks)


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
        yield error_body(error)


async def _first(chunks: AsyncGenerator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(chunks, None)
