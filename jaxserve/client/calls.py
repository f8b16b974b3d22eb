"""What both clients share: arguments to messages, the channel's settings, and what to do after a failure. Does no input or output."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import grpc

from jaxserve.errors import RESPONSES, EngineUnavailable, InvalidRequest, JaxserveError, Overloaded, RequestFailed
from jaxserve.protocol import inference_pb2 as pb

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 8.0
MAX_TIMEOUT_S = 10 * 365 * 86_400
"""More than this is no limit."""
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Retries are ours, and a server that comes back should be found soon.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A server whose machine is gone says nothing: a call would wait for ever.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class CallArguments(TypedDict, total=False):
    """Keyword arguments of a generating call, explained in `inference.proto`; one that is None counts as not given.

    timeout_s is the time for the whole call, retries included, in seconds.
    """

    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    max_tokens: int | None
    min_tokens: int | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    include_stop_str_in_output: bool | None
    request_id: str | None
    model: str | None
    priority: int | None
    cache_salt: str | None
    timeout_s: float | None


class ChatArguments(CallArguments, total=False):
    """Those of a chat; the template's besides."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


_OPTIONS = frozenset(pb.CallOptions.DESCRIPTOR.fields_by_name)
_CHAT = ChatArguments.__annotations__.keys() - CallArguments.__annotations__.keys()


def generate_request(prompt: str | Sequence[int], arguments: Mapping[str, Any]) -> pb.GenerateRequest:
    """The message of a Generate call; raises InvalidRequest for a value that it cannot hold."""
    sampling, options, _ = _sorted(arguments)
    try:
        request = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), options=pb.CallOptions(**options))
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from None
    return request


def chat_request(messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any]) -> pb.ChatRequest:
    """The message of a Chat call; raises InvalidRequest for a value that it cannot hold."""
    sampling, options, rest = _sorted(arguments)
    template_kwargs = rest.pop("chat_template_kwargs", {})
    try:
        request = pb.ChatRequest(
            messages=[pb.Message(**message) for message in messages],
            sampling=pb.SamplingParams(**sampling),
            options=pb.CallOptions(**options),
            **rest,
        )
        request.chat_template_kwargs.update(template_kwargs)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(str(error)) from None
    return request


def _sorted(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The arguments that are given, for sampling, for the call and for the template."""
    given = {name: value for name, value in arguments.items() if value is not None and name != "timeout_s"}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    options = {name: given.pop(name) for name in _OPTIONS & given.keys()}
    rest = {name: given.pop(name) for name in _CHAT & given.keys()}
    return given, options, rest


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries; raises InvalidRequest for a key that no header can hold."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("the API key holds characters other than printable ASCII; look at how it was read.", param="api_key")
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def credentials(
    use_tls: bool, root_certificates: str | Path | None, client_certificate: tuple[str | Path, str | Path] | None
) -> grpc.ChannelCredentials | None:
    """Of the channel; None for plain text. Files are PEM; raises OSError for one that cannot be read."""
    if not (use_tls or root_certificates or client_certificate):
        return None
    roots = Path(root_certificates).read_bytes() if root_certificates else None
    if client_certificate is None:
        return grpc.ssl_channel_credentials(roots)
    certificate, key = client_certificate
    return grpc.ssl_channel_credentials(roots, Path(key).read_bytes(), Path(certificate).read_bytes())


class Attempts:
    """The tries of one call: how long the next one may take, and how long to wait before it.

    Args:
        timeout_s: For all of them; None is no limit.
        max_retries: After the first.
    """

    def __init__(self, timeout_s: float | None, max_retries: int) -> None:
        if timeout_s is not None and math.isnan(timeout_s):
            raise InvalidRequest("timeout_s is nan; it must be a number of seconds, or None for no limit.", param="timeout_s")
        # gRPC takes a deadline that it cannot count to for one that is over.
        self._end_s = None if timeout_s is None or timeout_s > MAX_TIMEOUT_S else time.monotonic() + timeout_s
        self._num_left = max_retries
        self._delay_s = FIRST_DELAY_S

    @property
    def rest_s(self) -> float | None:
        """Seconds left for the call; None is no limit."""
        return None if self._end_s is None else max(self._end_s - time.monotonic(), 0.0)

    def give_up(self) -> None:
        """Allows no further try: the caller has seen a part of the answer."""
        self._num_left = 0

    def delay_s(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next try; raises the failure as one of `jaxserve.errors` when there is none to be made."""
        failure = _failure(error)
        if self._num_left == 0 or not isinstance(failure, EngineUnavailable | Overloaded):
            raise failure from error
        delay_s = self._delay_s * random.uniform(0.5, 1.0)
        if isinstance(failure, Overloaded):
            delay_s = max(delay_s, failure.retry_after_s)
        rest_s = self.rest_s
        if rest_s is not None and delay_s >= rest_s:
            raise failure from error
        self._num_left -= 1
        self._delay_s = min(2 * self._delay_s, MAX_DELAY_S)
        return delay_s


def _failure(error: grpc.RpcError) -> JaxserveError:
    """A status as one of `jaxserve.errors`."""
    status, details = error.code().name, error.details() or ""
    if status == grpc.StatusCode.RESOURCE_EXHAUSTED.name:
        trailing: Any = error.trailing_metadata() or ()
        delays = [value for key, value in trailing if key == "retry-after"]
        # Without a time to come back, it is gRPC that finds a message too large.
        return Overloaded(details, retry_after_s=float(delays[0])) if delays else InvalidRequest(details)
    for cls, response in RESPONSES.items():
        if response.grpc_status == status and issubclass(cls, JaxserveError):
            return cls(details)
    return RequestFailed(f"{status}: {details}")
