"""Where `jaxserve chat` and `complete` get their text from: a server over OpenAI's HTTP protocol, or a model in this process.

Both write an answer piece by piece as it comes, and an interrupt (Ctrl-C) in the middle of one ends the request and not only the
printing: the server sees its connection closed, the engine its client. Knows no terminal: that is `chat_cli`.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.errors import ConfigError, EngineUnavailable, InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from jaxserve.outputs import RequestOutput

Write = Callable[[str], None]
Message = Mapping[str, str]

MODELS_TIMEOUT_S = 30.0
"""For the list of models; an answer may take any time, as Ctrl-C ends it."""


class AnswerSource(Protocol):
    """Gives answers. An error of the request is one of `jaxserve.errors`; the source can be asked again afterwards."""

    def chat(self, messages: Sequence[Message], write: Write) -> str | None:
        """Answers a conversation; the finish reason."""

    def complete(self, prompt: str, write: Write) -> str | None:
        """Continues a text; the finish reason."""

    def close(self) -> None:
        """Frees what it holds."""


class ServerSource:
    """A server that speaks OpenAI's HTTP protocol, jaxserve's or another's.

    Args:
        url: Such as http://127.0.0.1:8000, with or without /v1.
        model: One of the served models; None is the first.
        api_key: Sent as a bearer token.
        sampling: Fields of the request body.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: Mapping[str, Any]) -> None:
        host = _host_of(url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key holds characters other than printable ASCII; look at how it was given.")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        # A proxy from the environment cannot reach this machine's own loopback.
        handlers = [urllib.request.ProxyHandler({})] if _is_loopback(host) else []
        self._opener = urllib.request.build_opener(*handlers)
        self._body = {"model": model or self._first_model(), "stream": True, **sampling}

    @property
    def name(self) -> str:
        """The model and the server that answer."""
        return f"{self._body['model']} at {self._base}"

    def chat(self, messages: Sequence[Message], write: Write) -> str | None:
        """Answers a conversation; the finish reason."""
        return self._stream(
            "/chat/completions", {"messages": list(messages)}, lambda choice: (choice.get("delta") or {}).get("content"), write
        )

    def complete(self, prompt: str, write: Write) -> str | None:
        """Continues a text; the finish reason."""
        return self._stream("/completions", {"prompt": prompt}, lambda choice: choice.get("text"), write)

    def close(self) -> None:
        """Nothing to free: each request has its own connection."""

    def _first_model(self) -> str:
        with self._open("/models", None, MODELS_TIMEOUT_S) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise EngineUnavailable(f"{self._base}/models lists no model; is this an OpenAI-compatible server?") from None

    def _stream(self, path: str, fields: Mapping[str, Any], text_of: Callable[[dict[str, Any]], str | None], write: Write) -> str | None:
        reason = None
        with self._open(path, json.dumps({**self._body, **fields}).encode(), None) as response:
            for chunk in _chunks(response):
                if "error" in chunk:
                    raise RequestFailed(_message_of(chunk))
                for choice in chunk.get("choices") or ():
                    if text := text_of(choice):
                        write(text)
                    reason = choice.get("finish_reason") or reason
        return reason

    def _open(self, path: str, body: bytes | None, timeout_s: float | None) -> http.client.HTTPResponse:
        request = urllib.request.Request(self._base + path, data=body, headers=self._headers)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = "".join(filter(str.isprintable, str(getattr(error, "reason", None) or error)))  # some quote what they read
            raise EngineUnavailable(f"cannot reach {self._base}: {reason}. Is the server running there?") from None
        return response


class LocalSource:
    """A model in this process.

    Args:
        config: Of its engine.
        sampling: Fields of SamplingParams, over the model's defaults.
        stage: Takes each stage of start-up: name, seconds and a detail.
    """

    def __init__(self, config: EngineConfig, sampling: Mapping[str, Any], stage: Callable[[str, float, str], None]) -> None:
        from jaxserve.async_llm import AsyncLLM  # a chat with a server needs no tokenizer

        self._sampling = sampling
        self._llm = AsyncLLM.from_config(config, stage)
        # Its `run` turns Ctrl-C into a cancellation, which aborts in the engine, and then into KeyboardInterrupt.
        self._runner = asyncio.Runner()
        self.name = config.model

    def chat(self, messages: Sequence[Message], write: Write) -> str | None:
        """Answers a conversation; the finish reason."""
        return self._runner.run(_write_all(self._llm.chat(messages, self._params(max_tokens=None)), write))

    def complete(self, prompt: str, write: Write) -> str | None:
        """Continues a text; the finish reason."""
        return self._runner.run(_write_all(self._llm.generate(prompt, self._params()), write))

    def close(self) -> None:
        """Frees the device."""
        self._runner.close()
        self._llm.close()

    def _params(self, **defaults: Any) -> SamplingParams:
        return SamplingParams(**defaults | dict(self._llm.info.default_sampling_params) | dict(self._sampling))


async def _write_all(outputs: AsyncGenerator[RequestOutput], write: Write) -> str | None:
    num_written = 0
    async with aclosing(outputs):
        async for output in outputs:
            answer = output.outputs[0]
            if len(answer.text) > num_written:
                write(answer.text[num_written:])
                num_written = len(answer.text)
            if answer.finish_reason == "error":
                raise RequestFailed(output.error or "the engine failed")
            if output.finished:
                return answer.finish_reason
    return None


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]."""
    try:
        for line in response:
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                chunk = json.loads(data)
                if not isinstance(chunk, dict):
                    raise ValueError(f"it sent a {type(chunk).__name__} where an object belongs")
                yield chunk
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineUnavailable(f"the server broke off its answer: {error or type(error).__name__}") from None
    raise EngineUnavailable("the server broke off its answer.")


def _refusal(error: urllib.error.HTTPError) -> Exception:
    try:
        message = _message_of(json.load(error))
    except (ValueError, OSError, http.client.HTTPException):
        message = f"HTTP {error.code} {error.reason}"
    if error.code == 401:
        message = f"{message} Give --api-key, or set JAXSERVE_API_KEY."
    return InvalidRequest(message) if 400 <= error.code < 500 and error.code != 429 else EngineUnavailable(message)


def _message_of(body: Any) -> str:
    """The message of OpenAI's error shape, or whatever the server sent instead, in one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())


def _host_of(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.hostname
    except ValueError:  # brackets that do not match
        pass
    raise ConfigError(f"--url is {url!r}; it must be such as http://127.0.0.1:8000.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
