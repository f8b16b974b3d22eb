"""The gRPC door: `vllm.grpc.engine.VllmEngine` as the `smg-grpc-proto` package defines it, health and reflection.

RPCs that are not served answer UNIMPLEMENTED. A cancelled call or a passed deadline cancels
the handler, and with it the work in the engine. What the messages mean is `grpc_messages`'s. Next: `service`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import zipfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer, add_VllmEngineServicer_to_server

from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError, response_for
from jaxserve.serve import grpc_messages
from jaxserve.serve.service import Service, truncate_prompt
from jaxserve.serve.tracing import caller_headers

logger = logging.getLogger(__name__)

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
MAX_MESSAGE_BYTES = 256 * 2**20
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Gateways ping often, also while idle.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A second server on the port must fail, not share it.
    ("grpc.so_reuseport", 0),
]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
TOKENIZER_CHUNK_BYTES = 64 * 1024


class VllmEngine(VllmEngineServicer):
    """The engine service over one front-end service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenizer_zip: bytes | None = None

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        """Tokens for one prompt; see `grpc_messages.Answer` for what is sent when."""
        failure: Exception
        caller_headers.set({key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)})
        try:
            prompt = await self._prompt(request)
            params = grpc_messages.sampling_params(request.sampling_params)
            answer = grpc_messages.Answer(request.stream, prompt, params.logprobs or 0, params.prompt_logprobs or 0)
            async with aclosing(self._service.generate([prompt], params, label=request.request_id)) as deltas:
                async for delta in deltas:
                    for response in answer.responses(delta):
                        yield response
            return
        except Exception as error:
            failure = error
        await _abort(context, failure)

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        grpc_messages.check_served(request)
        params = request.sampling_params
        limit = params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
        match request.WhichOneof("input"):
            case "tokenized":
                prompt = list(request.tokenized.input_ids)
            case "text":
                [prompt] = await self._service.tokenize_prompts([request.text], is_truncated=limit is not None)
            case _:
                raise InvalidRequest("the request has no input; set tokenized or text.", param="input")
        return truncate_prompt(prompt, limit, self._service.info)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends open calls by their request ids; unknown ids are ignored, they may just have ended."""
        for request_id in request.request_ids:
            self._service.abort(request_id)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:
        """Whether new calls are served."""
        is_ready = self._service.is_ready
        return pb.HealthCheckResponse(healthy=is_ready, message="ok" if is_ready else "the engine is gone or the server is shutting down")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.GetModelInfoResponse:
        """Facts about the model; ids that the model lacks are 0."""
        info = self._service.info
        return pb.GetModelInfoResponse(
            model_path=info.model_path,
            is_generation=True,
            max_context_length=info.max_model_len,
            vocab_size=info.vocab_size,
            served_model_name=self._service.served_model_names[0],
            tokenizer_path=info.model_path,
            model_type=info.model_type,
            architectures=info.architectures,
            eos_token_ids=info.eos_token_ids,
            pad_token_id=info.pad_token_id or 0,
            bos_token_id=info.bos_token_id or 0,
            max_req_input_len=info.max_model_len - 1,
            default_sampling_params_json=json.dumps(dict(info.default_sampling_params)),
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as a zip, cut into chunks; the last one carries the zip's sha256."""
        if self._tokenizer_zip is None:
            self._tokenizer_zip = await asyncio.to_thread(zip_tokenizer, Path(self._service.info.model_path))
        data = self._tokenizer_zip
        for start in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            is_last = start + TOKENIZER_CHUNK_BYTES >= len(data)
            sha256 = hashlib.sha256(data).hexdigest() if is_last else ""
            yield common_pb2.GetTokenizerChunk(data=data[start : start + TOKENIZER_CHUNK_BYTES], sha256=sha256)


async def _not_served(engine: VllmEngine, request: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not offer the call")


# The generated base class refuses them too, but with a traceback in the log each time, and gateways ask again and again.
for _method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods:
    if _method.name not in vars(VllmEngine):
        setattr(VllmEngine, _method.name, _not_served)


def zip_tokenizer(directory: Path) -> bytes:
    """The tokenizer's files of a checkpoint; equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TOKENIZER_FILES:
            if (directory / name).is_file():
                archive.writestr(zipfile.ZipInfo(name), (directory / name).read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends the call with the status that `errors.RESPONSES` gives."""
    status = grpc.StatusCode[response_for(error).grpc_status]
    if isinstance(error, JaxserveError):
        await context.abort(status, str(error))
    logger.error("a call failed unexpectedly", exc_info=error)
    await context.abort(status, f"internal error: {type(error).__name__}")


class GrpcServer:
    """The listening server.

    Args:
        service: What it serves.
        host, port: Where; port 0 picks a free one, see `port` after `start`.
    """

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service = service
        self._host = host
        self.port = port
        self._server = grpc.aio.server(options=OPTIONS)
        self._health = health.aio.HealthServicer()

    async def start(self) -> None:
        """Begins to listen; raises ConfigError when the port is taken."""
        add_VllmEngineServicer_to_server(VllmEngine(self._service), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{self.port}")
        except RuntimeError as error:
            await self._server.stop(None)
            raise ConfigError(f"--grpc-port {self.port} on {self._host} cannot be used: {error}") from None
        await self._server.start()
        await self.set_serving(True)

    async def set_serving(self, is_serving: bool) -> None:
        """What grpc.health.v1 answers, for "" and for the service."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and gives open ones `grace_s` seconds."""
        await self._server.stop(grace_s)
