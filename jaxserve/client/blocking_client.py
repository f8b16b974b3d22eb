"""`Client`: calls that wait for their answer. `async_client` is the same for asyncio; keep them alike. Next: `calls`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from jaxserve.client import answers
from jaxserve.client.answers import Answer, Piece
from jaxserve.client.calls import (
    CHANNEL_OPTIONS,
    Attempts,
    CallArguments,
    ChatArguments,
    chat_request,
    credentials,
    generate_request,
    metadata,
)
from jaxserve.protocol import inference_pb2 as pb
from jaxserve.protocol.inference_pb2_grpc import InferenceStub


class Client:
    """A client of one server; any number of threads may use it at once.

    A call that the server cannot take now (EngineUnavailable, Overloaded) is tried again after a while, one that streams only until its
    first piece is there. What remains is raised as one of `jaxserve.errors`.

    Args:
        address: `host:port` of the server's gRPC door.
        api_key: Where the server asks for one.
        timeout_s: Of calls that give none, in seconds; None is no limit. DeadlineExceeded is raised when it is over.
        max_retries: How often a call is tried again.
        use_tls: Speak TLS; implied by the certificates below.
        root_certificates: PEM file of the authorities to trust; default those of the system.
        client_certificate: PEM files of this client's certificate and its key.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        max_retries: int = 5,
        use_tls: bool = False,
        root_certificates: str | Path | None = None,
        client_certificate: tuple[str | Path, str | Path] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._metadata = metadata(api_key)
        secrets = credentials(use_tls, root_certificates, client_certificate)
        if secrets is None:
            self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, secrets, CHANNEL_OPTIONS)
        self._stub = InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and all open calls."""
        self._channel.close()

    def generate(self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]) -> Answer:
        """Continues a prompt, given as text or token ids."""
        return answers.answer(self._call(self._stub.Generate, generate_request(prompt, arguments), arguments.get("timeout_s")))

    def stream(self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]) -> Iterator[Piece]:
        """Continues a prompt, piece by piece; ends the call when the iterator is closed."""
        return self._pieces(self._stub.GenerateStream, generate_request(prompt, arguments), arguments.get("timeout_s"))

    def chat(self, messages: Sequence[Mapping[str, str]], **arguments: Unpack[ChatArguments]) -> Answer:
        """Answers a conversation of messages with role and content."""
        return answers.answer(self._call(self._stub.Chat, chat_request(messages, arguments), arguments.get("timeout_s")))

    def chat_stream(self, messages: Sequence[Mapping[str, str]], **arguments: Unpack[ChatArguments]) -> Iterator[Piece]:
        """Answers a conversation, piece by piece; ends the call when the iterator is closed."""
        return self._pieces(self._stub.ChatStream, chat_request(messages, arguments), arguments.get("timeout_s"))

    def tokenize(self, text: str, *, add_special_tokens: bool = True, timeout_s: float | None = None) -> list[int]:
        """The token ids of a text."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call(self._stub.Detokenize, request, timeout_s).text)

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.rest_s, metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.delay_s(error))

    def _pieces(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Iterator[Piece]:
        attempts = self._attempts(timeout_s)
        has_started = False
        while True:
            call = method(request, timeout=attempts.rest_s, metadata=self._metadata)
            try:
                for chunk in call:
                    has_started = True
                    yield answers.piece(chunk)
                return
            except grpc.RpcError as error:
                if has_started:
                    attempts.give_up()
                delay_s = attempts.delay_s(error)
            finally:
                call.cancel()
            time.sleep(delay_s)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._timeout_s if timeout_s is None else timeout_s, self._max_retries)
