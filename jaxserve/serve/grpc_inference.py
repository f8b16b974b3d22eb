"""`jaxserve.v1.Inference`: text in, text out, over gRPC (`protocol/inference.proto` says what the fields mean).

Its calls are the service's calls, with the defaults of the OpenAI endpoints. A whole answer is its stream's outputs added up, so the
two cannot differ. Errors, keys and slow clients are `grpc_guard`'s. Next: `service`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import json_format

from jaxserve.core.events import Logprobs
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.admission import check_token_ids
from jaxserve.errors import InvalidRequest
from jaxserve.protocol import inference_pb2 as pb
from jaxserve.protocol.inference_pb2_grpc import InferenceServicer
from jaxserve.serve.delta import Delta
from jaxserve.serve.grpc_guard import name_call, write
from jaxserve.serve.openai_answers import Usage, chat_prompt, raise_if_failed
from jaxserve.serve.openai_logprobs import TokenNames, most_likely
from jaxserve.serve.openai_types import ChatBody
from jaxserve.serve.service import Service

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


class Inference(InferenceServicer):
    """The text service over one front-end service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        """Continues a prompt; answers when all of it is there."""
        return await self._whole(request, await self._prompt(request), context)

    async def GenerateStream(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Continues a prompt, piece by piece."""
        await self._stream(request, await self._prompt(request), context)

    async def Chat(self, request: pb.ChatRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        """Answers a conversation when all of the answer is there."""
        return await self._whole(request, await self._chat_prompt(request), context)

    async def ChatStream(self, request: pb.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        """Answers a conversation, piece by piece."""
        await self._stream(request, await self._chat_prompt(request), context)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """The token ids of a text."""
        adds_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await self._service.tokenize(request.text, add_special_tokens=adds_special)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._service.info.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        """The text of token ids."""
        service = self._service
        token_ids = list(request.token_ids)
        check_token_ids(token_ids, max(service.info.vocab_size, service.tokenizer.max_token_id + 1), "token_ids")
        return pb.DetokenizeResponse(text=await service.detokenize(token_ids, skip_special_tokens=request.skip_special_tokens))

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        self._service.check_model(request.options.model or None)
        match request.WhichOneof("prompt"):
            case "text":
                return (await self._service.tokenize_prompts([request.text]))[0]
            case "token_ids":
                return list(request.token_ids.ids)
        raise InvalidRequest("the request has no prompt; set text or token_ids.", param="prompt")

    async def _chat_prompt(self, request: pb.ChatRequest) -> list[int]:
        self._service.check_model(request.options.model or None)
        body = ChatBody(
            messages=[{"role": message.role, "content": message.content} for message in request.messages],
            add_generation_prompt=request.add_generation_prompt if request.HasField("add_generation_prompt") else True,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=_with_integers(json_format.MessageToDict(request.chat_template_kwargs)),
        )
        return await chat_prompt(self._service, body)

    async def _whole(
        self, request: pb.GenerateRequest | pb.ChatRequest, prompt: list[int], context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        outputs: defaultdict[int, pb.Output] = defaultdict(pb.Output)
        texts: defaultdict[int, list[str]] = defaultdict(list)
        response = pb.GenerateResponse()
        async with aclosing(self._chunks(request, prompt, context)) as chunks:
            async for chunk in chunks:
                outputs[chunk.output.index].MergeFrom(chunk.output)
                texts[chunk.output.index].append(chunk.output.text)  # merging replaces a text
                response.usage.MergeFrom(chunk.usage)
        for index, output in sorted(outputs.items()):
            output.text = "".join(texts[index])
            response.outputs.append(output)
        return response

    async def _stream(self, request: pb.GenerateRequest | pb.ChatRequest, prompt: list[int], context: grpc.aio.ServicerContext) -> None:
        async with aclosing(self._chunks(request, prompt, context)) as chunks:
            async for chunk in chunks:
                await write(context, chunk)

    async def _chunks(
        self, request: pb.GenerateRequest | pb.ChatRequest, prompt: list[int], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.GenerateChunk]:
        service, options = self._service, request.options
        params = service.sampling_params(_sampling_fields(request.sampling))
        names = TokenNames(service.tokenizer)
        usage = Usage()
        num_open = params.n
        deltas = service.generate(
            [prompt],
            params,
            label=name_call(options.request_id),
            priority=options.priority,
            cache_salt=options.cache_salt or None,
        )
        async with aclosing(deltas):
            async for delta in deltas:
                raise_if_failed(delta)
                usage.add(delta)
                num_open -= delta.finish_reason is not None
                if delta.text or delta.token_ids or delta.finish_reason is not None:
                    yield pb.GenerateChunk(output=_output(delta, params, names), usage=None if num_open else _usage(usage))


def _sampling_fields(message: pb.SamplingParams) -> dict[str, Any]:
    """The fields that are set, zero too, under their names in `SamplingParams`, which are the same."""
    fields = {descriptor.name: value for descriptor, value in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    return fields


def _output(delta: Delta, params: SamplingParams, names: TokenNames) -> pb.Output:
    output = pb.Output(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    if delta.logprobs is not None and params.logprobs is not None:
        output.logprobs.extend(_token_logprob(entry, params.logprobs, names) for entry in delta.logprobs)
    if delta.finish_reason is not None:
        output.finish_reason = FINISH_REASONS[delta.finish_reason]
    if isinstance(delta.stop_reason, int):
        output.stop_token_id = delta.stop_reason
    elif delta.stop_reason is not None:
        output.stop_text = delta.stop_reason
    return output


def _token_logprob(entry: Logprobs, num_top: int, names: TokenNames) -> pb.TokenLogprob:
    token = pb.Token(id=entry.token_id, text=names.text(entry.token_id), logprob=entry.logprob)
    top = [pb.Token(id=token_id, text=names.text(token_id), logprob=value) for token_id, value in most_likely(entry, num_top)]
    return pb.TokenLogprob(token=token, rank=entry.rank, top=top)


def _usage(usage: Usage) -> pb.Usage:
    counts = usage.to_json()
    return pb.Usage(
        prompt_tokens=counts["prompt_tokens"],
        cached_tokens=counts["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=counts["completion_tokens"],
    )


def _with_integers(value: Any) -> Any:
    """A `Struct`'s value with its whole numbers as integers: the message knows only doubles, and templates index and count."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
