"""The types of `jaxserve.core` as EngineLink messages and back. Pure functions; `link.proto` says what the fields mean.

Only what the engine reads travels: the text side of the sampling parameters (stop strings, detokenize, ...), and what becomes of a
pooled vector, stay in the front end. Knows no sockets and no threads. Next: `link_server` (engine side) and `link_client` (front-end side).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from typing import Any

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine import link_pb2
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import EngineUnavailable, InvalidRequest, JaxserveError, Overloaded, RequestFailed

FEW_LOGPROBS = 20
"""Tokens with more of them, up to the whole vocabulary, travel one by one, so that a message that grows too large can be split."""
_OPTIONAL_PARAMS = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_PLAIN_PARAMS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "ignore_eos", "min_tokens",
)  # fmt: skip
_Kind = link_pb2.Rejection.Kind


def encode_add(request: Request) -> link_pb2.Command:
    """A command that queues the request."""
    params = request.params
    message = link_pb2.SamplingParams(
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias,
        **{name: getattr(params, name) for name in (*_PLAIN_PARAMS, *_OPTIONAL_PARAMS)},
    )
    add = link_pb2.Add(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=message,
        priority=request.priority,
        cache_salt=request.cache_salt,
        label=request.label,
        pooling=request.pooling.pooling if request.pooling else None,
    )
    return link_pb2.Command(add=add)


def decode_add(add: link_pb2.Add) -> Request:
    """The request, arriving now."""
    message = add.params
    values = {name: getattr(message, name) for name in _PLAIN_PARAMS}
    values |= {name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL_PARAMS}
    params = SamplingParams(stop_token_ids=tuple(message.stop_token_ids), logit_bias=dict(message.logit_bias), detokenize=False, **values)
    return Request(
        request_id=add.request_id,
        prompt_token_ids=tuple(add.prompt_token_ids),
        params=params,
        arrival_time_s=time.monotonic(),
        priority=add.priority,
        cache_salt=add.cache_salt if add.HasField("cache_salt") else None,
        label=add.label,
        pooling=PoolingParams(pooling=add.pooling) if add.pooling else None,
    )


def encode_abort(request_id: str, index: int | None) -> link_pb2.Command:
    """A command that ends a request, or one of its sequences."""
    return link_pb2.Command(abort=link_pb2.Abort(request_id=request_id, index=index))


def encode_abort_label(label: str) -> link_pb2.Command:
    """A command that ends every request with the label, whichever front end it came from."""
    return link_pb2.Command(abort_label=link_pb2.AbortLabel(label=label))


def encode_stats(stats: EngineStats) -> link_pb2.EngineStats:
    """The engine's figures; `decode_stats` is the inverse."""
    return link_pb2.EngineStats(**{spec.name: getattr(stats, spec.name) for spec in fields(EngineStats)})


def decode_stats(message: link_pb2.EngineStats) -> EngineStats:
    """The inverse of `encode_stats`."""
    values = {spec.name: getattr(message, spec.name) for spec in fields(EngineStats)}
    return EngineStats(**values | {"step_token_counts": tuple(message.step_token_counts)})


def fill_tokens(message: link_pb2.Tokens, events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """Puts events that give one token, perhaps with log-probabilities, into an empty message; returns the others, for `fill_event`."""
    plain: list[TokenEvent] = []
    judged: list[tuple[int, Logprobs]] = []
    others: list[TokenEvent] = []
    for event in events:
        if event.finish_reason is not None or event.queue_s is not None or event.prompt_logprobs is not None or len(event.token_ids) != 1:
            others.append(event)
        elif event.logprobs is None:
            plain.append(event)
        elif len(event.logprobs[0].top_ids) <= FEW_LOGPROBS:
            judged.append((len(plain), event.logprobs[0]))
            plain.append(event)
        else:
            others.append(event)
    message.request_ids.extend([event.request_id for event in plain])
    message.indices.extend([event.index for event in plain])
    message.token_ids.extend([event.token_ids[0] for event in plain])
    message.num_prompt_tokens.extend([event.num_prompt_tokens for event in plain])
    message.num_cached_tokens.extend([event.num_cached_tokens for event in plain])
    if judged:
        _fill_token_logprobs(message.logprobs, judged)
    return others


def _fill_token_logprobs(message: link_pb2.TokenLogprobs, judged: list[tuple[int, Logprobs]]) -> None:
    message.places.extend([place for place, _ in judged])
    message.logprobs.extend([entry.logprob for _, entry in judged])
    message.ranks.extend([entry.rank for _, entry in judged])
    message.num_top.extend([len(entry.top_ids) for _, entry in judged])
    message.top_ids.extend(chain.from_iterable([entry.top_ids for _, entry in judged]))
    message.top_logprobs.extend(chain.from_iterable([entry.top_logprobs for _, entry in judged]))


def decode_tokens(message: link_pb2.Tokens) -> list[TokenEvent]:
    """The events that `fill_tokens` put into the message."""
    columns = (message.request_ids, message.indices, message.token_ids, message.num_prompt_tokens, message.num_cached_tokens)
    events = [
        TokenEvent(request_id, index, [token_id], num_prompt_tokens, num_cached_tokens)
        for request_id, index, token_id, num_prompt_tokens, num_cached_tokens in zip(*columns, strict=True)
    ]
    known = message.logprobs
    top_ids, top_logprobs, first = list(known.top_ids), list(known.top_logprobs), 0
    for place, logprob, rank, num_top in zip(known.places, known.logprobs, known.ranks, known.num_top, strict=True):
        end = first + num_top
        events[place].logprobs = [Logprobs(events[place].token_ids[0], logprob, rank, top_ids[first:end], top_logprobs[first:end])]
        first = end
    return events


def encode_event(event: TokenEvent) -> link_pb2.Event:
    """One event; a prompt's leading None among its logprobs is left out and put back by `decode_event`."""
    message = link_pb2.Event()
    fill_event(message, event)
    return message


def fill_event(message: link_pb2.Event, event: TokenEvent) -> None:
    """`encode_event` into an empty message. Field by field, and none that has its default: this runs for many tokens of a step."""
    message.request_id = event.request_id
    message.token_ids.extend(event.token_ids)
    message.num_prompt_tokens = event.num_prompt_tokens
    if event.index:
        message.index = event.index
    if event.num_cached_tokens:
        message.num_cached_tokens = event.num_cached_tokens
    if event.logprobs is not None:
        message.has_logprobs = True
        _fill_logprobs(message.logprobs, event.logprobs)
    if event.queue_s is not None:
        message.queue_s = event.queue_s
    if event.prefill_s is not None:
        message.prefill_s = event.prefill_s
    if event.prompt_logprobs is not None:
        message.has_prompt_logprobs = True
        _fill_logprobs(message.prompt_logprobs, (entry for entry in event.prompt_logprobs if entry is not None))
    if event.finish_reason is not None:
        _fill_end(message, event, event.finish_reason)


def _fill_end(message: link_pb2.Event, event: TokenEvent, reason: FinishReason) -> None:
    message.finish_reason = reason.value
    if event.embedding is not None:
        message.embedding.extend(event.embedding)
    if event.stop_reason is not None:
        message.stop_reason = event.stop_reason
    if event.error is not None:
        message.error = event.error


def decode_event(message: link_pb2.Event) -> TokenEvent:
    """The inverse of `encode_event`."""
    return TokenEvent(
        request_id=message.request_id,
        index=message.index,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        logprobs=_decode_logprobs(message.logprobs) if message.has_logprobs else None,
        prompt_logprobs=[None, *_decode_logprobs(message.prompt_logprobs)] if message.has_prompt_logprobs else None,
        embedding=list(message.embedding) or None,
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_reason=message.stop_reason if message.HasField("stop_reason") else None,
        error=message.error if message.HasField("error") else None,
        queue_s=message.queue_s if message.HasField("queue_s") else None,
        prefill_s=message.prefill_s if message.HasField("prefill_s") else None,
    )


def encode_rejection(request_id: str, error: Exception) -> link_pb2.Rejection:
    """Why the engine did not queue the request."""
    match error:
        case InvalidRequest():
            return link_pb2.Rejection(request_id=request_id, kind=_Kind.INVALID_REQUEST, message=str(error), param=error.param)
        case Overloaded():
            kind = _Kind.OVERLOADED
        case EngineUnavailable():
            kind = _Kind.UNAVAILABLE
        case _:
            kind = _Kind.INTERNAL
    return link_pb2.Rejection(request_id=request_id, kind=kind, message=str(error))


def decode_rejection(message: link_pb2.Rejection) -> JaxserveError:
    """The exception that the client of the request should see."""
    match message.kind:
        case _Kind.INVALID_REQUEST:
            return InvalidRequest(message.message, param=message.param if message.HasField("param") else None)
        case _Kind.OVERLOADED:
            return Overloaded(message.message)
        case _Kind.UNAVAILABLE:
            return EngineUnavailable(message.message)
        case _:
            return RequestFailed(message.message)


def _fill_logprobs(messages: Any, entries: Iterable[Logprobs]) -> None:
    """`messages` is a repeated field of link_pb2.Logprobs."""
    for entry in entries:
        message = messages.add()
        message.token_id, message.logprob, message.rank = entry.token_id, entry.logprob, entry.rank
        message.top_ids.extend(entry.top_ids)
        message.top_logprobs.extend(entry.top_logprobs)


def _decode_logprobs(messages: Iterable[link_pb2.Logprobs]) -> list[Logprobs]:
    return [Logprobs(m.token_id, m.logprob, m.rank, list(m.top_ids), list(m.top_logprobs)) for m in messages]
