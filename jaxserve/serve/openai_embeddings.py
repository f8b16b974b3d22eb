"""`POST /v1/embeddings`: vectors of prompts, in OpenAI's shape. `embed` itself serves gRPC too.

Knows no sockets: `http` and `grpc_engine` call it. What runs below is `service`'s; how a vector is cut and scaled is
`core.pooling_params`'s.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.errors import DeadlineExceeded, InvalidRequest
from jaxserve.serve.delta import Delta
from jaxserve.serve.openai_answers import Usage, call_options, raise_if_failed, read_prompts
from jaxserve.serve.openai_types import EmbeddingBody
from jaxserve.serve.service import Service
from jaxserve.serve.sse import to_json


async def embed(service: Service, prompts: Sequence[Sequence[int]], params: PoolingParams, **options: Any) -> list[Delta]:
    """The last delta of each prompt, with its pooled vector, which is not cut and scaled yet.

    Args:
        service: What serves it.
        prompts: Token ids.
        params: For every prompt.
        options: As `Service.generate` takes them.

    Raises:
        InvalidRequest, Overloaded, EngineUnavailable: As `Service.generate`.
        RequestFailed: A step failed in the engine.
        DeadlineExceeded: The call was ended before all was computed.
    """
    embedded: dict[int, Delta] = {}
    async with aclosing(service.generate(prompts, params, **options)) as deltas:
        async for delta in deltas:
            raise_if_failed(delta)
            if delta.finish_reason is FinishReason.ABORT:
                raise DeadlineExceeded("the call ended before its embeddings were computed: its time was over, or it was aborted.")
            embedded[delta.prompt_index] = delta
    return [embedded[i] for i in range(len(prompts))]


class Embeddings:
    """A call of /v1/embeddings."""

    def __init__(self, service: Service, body: EmbeddingBody, prompts: list[list[int]], params: PoolingParams) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._params = params

    @classmethod
    async def prepare(cls, service: Service, body: EmbeddingBody) -> Embeddings:
        """Tokenizes and checks; raises InvalidRequest."""
        try:
            body.check_together()
            params = embedding_params(service, body.pooling, normalize=body.normalize, dimensions=body.dimensions)
            prompts = await read_prompts(service, body.input, body)
            service.check_embeddings(prompts, params, priority=body.priority or 0)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param="input" if error.param == "prompt" else error.param) from None
        return cls(service, body, prompts, params)

    async def answer(self) -> bytes:
        """Runs the call; the whole answer as JSON."""
        deltas = await embed(self._service, self._prompts, self._params, **call_options(self._body))
        # Seconds of work for many long vectors.
        return await asyncio.to_thread(self._to_json, deltas)

    def _to_json(self, deltas: list[Delta]) -> bytes:
        usage, data = Usage(), []
        for i, delta in enumerate(deltas):
            usage.add(delta)
            vector = self._params.finish(delta.embedding or [])
            shown = to_base64(vector) if self._body.encoding_format == "base64" else vector
            data.append({"object": "embedding", "index": i, "embedding": shown})
        model = self._body.model or self._service.served_model_names[0]
        return to_json({"object": "list", "data": data, "model": model, "usage": usage.to_json()})


def embedding_params(service: Service, pooling: str | None, **given: Any) -> PoolingParams:
    """Parameters from what a client gave, over the server's defaults; None is not given."""
    fields = {name: value for name, value in given.items() if value is not None}
    return PoolingParams(pooling=pooling or service.info.default_pooling, **fields)


def to_base64(vector: Sequence[float]) -> str:
    """The values as little-endian float32, in base64."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
