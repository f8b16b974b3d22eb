"""`vllm.grpc.engine.VllmEngine`, the protocol that gateways speak, as the `smg-grpc-proto` package defines it.

A cancelled call or a passed deadline cancels the handler, and with it the work in the engine. What the messages mean is
`grpc_messages`'s; errors, keys and slow clients are `grpc_guard`'s. Next: `service`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer

from jaxserve.errors import EngineUnavailable, InvalidRequest
from jaxserve.serve import grpc_messages
from jaxserve.serve.call_limits import truncate_prompt
from jaxserve.serve.grpc_guard import name_call, write
from jaxserve.serve.http_operations import profile_directory
from jaxserve.serve.openai_embeddings import embed, embedding_params
from jaxserve.serve.service import Service

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
TOKENIZER_CHUNK_BYTES = 64 * 1024
FLUSH_RETRY_S = 0.05
MAX_FLUSH_WAIT_S = 600.0


class VllmEngine(VllmEngineServicer):
    """The engine service over one front-end service.

    Args:
        service: What it serves.
        has_dev_rpcs: FlushCache and the profiler are served too.
    """

    def __init__(self, service: Service, *, has_dev_rpcs: bool) -> None:
        self._service = service
        self._has_dev_rpcs = has_dev_rpcs
        self._tokenizer_zip: bytes | None = None
        self._loads = [grpc_messages.Loads() for _ in service.client.engines]
        self._start_time_s = time.monotonic()
        self._last_request_time_s = 0.0

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Tokens for one prompt; see `grpc_messages.Answer` for what is sent when."""
        self._last_request_time_s = time.time()
        self._service.check_ready()
        prompt = await self._prompt(request)
        params = grpc_messages.sampling_params(request.sampling_params, self._service.info.default_sampling_params)
        answer = grpc_messages.Answer(request.stream, prompt, params.logprobs or 0, params.prompt_logprobs or 0)
        label = name_call(request.request_id)
        engine = request.data_parallel_rank if request.HasField("data_parallel_rank") else None
        async with aclosing(self._service.generate([prompt], params, label=label, engine=engine)) as deltas:
            async for delta in deltas:
                for response in answer.responses(delta):
                    await write(context, response)

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        grpc_messages.check_served(request, len(self._service.client.engines))
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
        """Ends open calls by their request ids, of every front end; unknown ids are ignored, they may just have ended."""
        for name in filter(None, request.request_ids):
            self._service.abort(name)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:
        """Whether new calls are served, and else why not."""
        try:
            self._service.check_ready()
        except EngineUnavailable as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="ok")

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

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext) -> pb.GetServerInfoResponse:
        """Facts about the server and how busy it is, in sequences of all engines; what it does not have (KV transfer, media) is empty.

        `max_num_seqs` is that of one engine, as vLLM gives it.
        """
        info, figures = self._service.info, await self._service.client.stats()
        return pb.GetServerInfoResponse(
            active_requests=sum(stats.num_running + stats.num_waiting for stats in figures.values()),
            is_paused=not self._service.is_ready,
            last_receive_timestamp=self._last_request_time_s,
            uptime_seconds=time.monotonic() - self._start_time_s,
            server_type="vllm-grpc",
            data_parallel_size=len(self._service.client.engines),
            kv_cache_dtype=info.kv_cache_dtype,
            block_size=info.page_size,
            attention_backend=info.attention,
            model_dtype=info.dtype,
            max_num_seqs=info.max_num_seqs,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        """How busy each engine is that answers, or the one of `dp_rank`; see `grpc_messages.Loads`."""
        engines = self._service.client.engines
        if request.HasField("dp_rank"):
            grpc_messages.check_rank("dp_rank", request.dp_rank, len(engines))
            figures = {request.dp_rank: await engines[request.dp_rank].stats()}
        else:
            figures = await self._service.client.stats()
        now_s = time.monotonic()
        loads = [self._loads[rank].load(rank, stats, engines[rank].info, now_s) for rank, stats in figures.items()]
        return grpc_messages.loads_response(loads)

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext) -> common_pb2.FlushCacheResponse:
        """Forgets all known prefixes, once the engines have nothing to do; waits `timeout_s` for that."""
        await self._check_dev_rpc(context, "FlushCache")
        end = time.monotonic() + min(max(request.timeout_s, 0.0), MAX_FLUSH_WAIT_S)
        while not (is_flushed := await self._service.client.flush_cache()) and time.monotonic() < end:
            await asyncio.sleep(FLUSH_RETRY_S)
        message = "the prefix cache is empty" if is_flushed else "requests are running; try again when there are none, or raise timeout_s"
        return common_pb2.FlushCacheResponse(success=is_flushed, message=message)

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext) -> common_pb2.ProfileResponse:
        """Starts a trace of each engine by jax.profiler, into `output_dir` or a directory of its own in jaxserve's cache."""
        await self._check_dev_rpc(context, "StartProfile")
        grpc_messages.check_profile_served(request)
        directory = request.output_dir or str(profile_directory())
        await self._service.client.start_profile(directory)
        return common_pb2.ProfileResponse(success=True, message=f"tracing into {directory}")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext) -> common_pb2.ProfileResponse:
        """Ends the trace and writes it."""
        await self._check_dev_rpc(context, "StopProfile")
        directory = await self._service.client.stop_profile()
        return common_pb2.ProfileResponse(success=True, message=f"the trace is in {directory}")

    async def _check_dev_rpc(self, context: grpc.aio.ServicerContext, name: str) -> None:
        if not self._has_dev_rpcs:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{name} is off on this server; start it with --enable-dev-endpoints.")

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        """The tokenizer's files as a zip, cut into chunks; the last one carries the zip's sha256."""
        if self._tokenizer_zip is None:
            self._tokenizer_zip = await asyncio.to_thread(zip_tokenizer, Path(self._service.info.model_path))
        data = self._tokenizer_zip
        for start in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            is_last = start + TOKENIZER_CHUNK_BYTES >= len(data)
            sha256 = hashlib.sha256(data).hexdigest() if is_last else ""
            await write(context, common_pb2.GetTokenizerChunk(data=data[start : start + TOKENIZER_CHUNK_BYTES], sha256=sha256))

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        """The vector of a prompt, pooled as the server's settings say, of length 1."""
        self._last_request_time_s = time.time()
        self._service.check_ready()
        if not request.HasField("tokenized"):
            raise InvalidRequest("the request has no input; set tokenized.", param="tokenized")
        params = embedding_params(self._service, None)
        label = name_call(request.request_id)
        [delta] = await embed(self._service, [request.tokenized.input_ids], params, label=label)
        vector = params.finish(delta.embedding or [])
        return pb.EmbedResponse(embedding=vector, prompt_tokens=delta.num_prompt_tokens, embedding_dim=len(vector))

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        """Not served: gateways fall back to their own picture of the cache."""
        await _not_served(self, request, context)


async def _not_served(engine: VllmEngine, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not offer the call")


# RPCs of later versions: the generated base class refuses them too, but with a traceback in the log each time, and gateways ask often.
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
