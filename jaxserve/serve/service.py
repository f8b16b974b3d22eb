"""What HTTP and gRPC share: text to ids, checks, one engine request for each prompt, and token events back to text.

A client's request id is only a label here; the engine gets an id of our own, so a repeated one cannot mix answers. Leaving
`generate` early (disconnect, cancel, deadline, error) aborts in the engine. Text work that can take long runs in a thread pool.
Knows no protocol. Next: `http` and `grpc_server`; below: `engine.link_client`, `text.sequence_text`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.admission import check_request
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.link_client import EngineClient
from jaxserve.errors import EngineUnavailable, InvalidRequest, ModelNotFound
from jaxserve.serve.tracing import CallTrace, Tracer
from jaxserve.text.chat_template import render_chat
from jaxserve.text.sequence_text import SequenceText, TextDelta
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_SEQUENCES_PER_CALL = 1024
"""Prompts times n of one call."""
LONG_TEXT = 64 * 2**10
"""Texts of more characters, and more token ids, than this have a thread of their own: nobody else's text waits behind them."""
MAX_TEXT_CHARS = 4 * 2**20
"""Longest text that is tokenized where the context sets no limit: seconds of work."""
FEW_LOGPROBS = 20
MAX_MANY_LOGPROBS = 2**21
"""Log-probabilities in one call that asks for more than FEW_LOGPROBS for a token: seconds of work to write down."""
ABORT_S = 1.0
"""Time for aborted calls to hear of it."""


@dataclass(slots=True, kw_only=True)
class Delta:
    """What is new of one sequence of a call.

    Attributes:
        prompt_index: Which prompt of the call.
        index: Which of that prompt's n sequences.
        text: See `TextDelta`; likewise token_ids, logprobs, finish_reason, stop_reason.
        prompt_logprobs: With the first delta of a sequence, when asked; None for the first prompt token.
        error: What went wrong, when finish_reason is ERROR.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[Logprobs | None] | None
    error: str | None


class Service:
    """One front end's view of its engine and its text.

    Args:
        client: Connected to the engine.
        tokenizer: The model's.
        served_model_names: Names that clients may use; the first one is reported.
        tracer: Sends a span of each call; None traces nothing.
    """

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, served_model_names: Sequence[str] = (), tracer: Tracer | None = None
    ) -> None:
        self.client = client
        self._tracer = tracer
        self.tokenizer = tokenizer
        self.served_model_names = tuple(served_model_names) or (client.info.model,)
        self._is_draining = False
        self._labels: dict[str, set[str]] = {}
        self._id_prefix = secrets.token_hex(4)
        self._next_id = itertools.count()
        self._text_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
        self._long_text_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-text")

    @property
    def info(self) -> EngineInfo:
        """The engine's facts."""
        return self.client.info

    @property
    def is_ready(self) -> bool:
        """Whether new calls are served."""
        return self.client.is_alive and not self._is_draining

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls, lets open ones go on for `grace_s` seconds, then ends the rest with finish_reason abort."""
        self._is_draining = True
        await self._wait_for_calls(grace_s)
        self.client.abort_all()
        await self._wait_for_calls(ABORT_S)

    async def _wait_for_calls(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self.client.num_open and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Ends the thread pools."""
        for pool in (self._text_pool, self._long_text_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound, listing what is served, for a name that is not; None is whatever is served."""
        if name is not None and name not in self.served_model_names:
            served = ", ".join(repr(served_name) for served_name in self.served_model_names)
            raise ModelNotFound(f"the model {name!r} does not exist; served here: {served}.")

    def sampling_params(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Parameters from the fields a client gave, over the model's defaults; None is not given."""
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{"max_tokens": None} | dict(self.info.default_sampling_params) | given)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of any text up to MAX_TEXT_CHARS; raises InvalidRequest for a longer one."""
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"the text has {len(text)} characters; at most {MAX_TEXT_CHARS} are tokenized: shorten or split it.", param="prompt"
            )
        return (await self._encode([text], add_special_tokens))[0]

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return await self._in_pool(lambda: [self.tokenizer.token_text(token_id) for token_id in token_ids], len(token_ids))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return await self._in_pool(partial(self.tokenizer.decode, token_ids, skip_special_tokens), len(token_ids))

    async def tokenize_prompts(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, is_truncated: bool = False
    ) -> list[list[int]]:
        """Token ids of a call's prompts; those that cannot fit the context whatever their tokens are are refused without tokenizing."""
        if is_truncated:
            return [await self.tokenize(text, add_special_tokens=add_special_tokens) for text in texts]
        limit = self.info.max_model_len * self._max_token_bytes
        longest = max(map(len, texts))
        if longest > limit:
            raise InvalidRequest(
                f"the prompt has {longest} characters; the model's context of {self.info.max_model_len} tokens holds at most {limit}: "
                "shorten the prompt.",
                param="prompt",
            )
        return await self._encode(texts, add_special_tokens)

    async def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        size = sum(map(len, texts))
        return await self._in_pool(lambda: [self.tokenizer.encode(text, add_special_tokens) for text in texts], size)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of a chat; options as in `text.chat_template.render_chat`."""
        return await self._in_pool(partial(render_chat, self.tokenizer, messages, **options))

    def check(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, priority: int = 0) -> list[SamplingParams]:
        """Each prompt's parameters, as the engine will use them; raises InvalidRequest."""
        check_num_sequences(len(prompts), params.n)
        checked = [check_request(params, prompt, self.info, priority=priority) for prompt in prompts]
        _check_num_logprobs(prompts, checked, self.info.vocab_size)
        return checked

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        label: str = "",
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Delta]:
        """Runs the prompts together and yields what is new of each sequence as it comes; close it to abort the rest.

        Args:
            prompts: Token ids.
            params: For every prompt.
            label: The client's name for the call, for `abort`.
            priority: Lower runs earlier.
            cache_salt: Isolates the prefix cache.

        Raises:
            InvalidRequest: Before the first delta.
            EngineUnavailable: At any time.
        """
        if self._is_draining:
            raise EngineUnavailable("this server is shutting down; send the request to another one, or again later.")
        requests = [
            Request(
                request_id=f"{self._id_prefix}-{next(self._next_id)}",
                prompt_token_ids=tuple(prompt),
                params=checked,
                priority=priority,
                cache_salt=cache_salt,
            )
            for prompt, checked in zip(prompts, self.check(prompts, params, priority=priority), strict=True)
        ]
        prompt_indices = {request.request_id: i for i, request in enumerate(requests)}
        texts = {
            (request.request_id, index): SequenceText(self.tokenizer, request.params, request.prompt_token_ids)
            for request in requests
            for index in range(request.params.n)
        }
        with self._labelled(label, prompt_indices), self._traced(requests) as trace, self.client.generate(*requests) as stream:
            async for event in stream:
                text = texts[event.request_id, event.index].push(event)
                if trace is not None:
                    trace.on_tokens(len(text.token_ids), text.finish_reason and text.finish_reason.value)
                if text.is_stop_string_hit and event.finish_reason is None:
                    stream.drop(event.request_id, event.index)
                yield _delta(event, text, prompt_indices[event.request_id])

    def abort(self, label: str) -> None:
        """Ends every open call with this label; their streams end with finish_reason abort."""
        for request_id in self._labels.get(label, ()):
            self.client.abort(request_id)

    def _traced(self, requests: Sequence[Request]) -> AbstractContextManager[CallTrace | None]:
        if self._tracer is None:
            return nullcontext()
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return self._tracer.trace(CallTrace(self.served_model_names[0], requests[0].request_id, requests[0].params, num_prompt_tokens))

    @contextmanager
    def _labelled(self, label: str, request_ids: Mapping[str, int]) -> Iterator[None]:
        if not label:
            yield
            return
        ids = self._labels.setdefault(label, set())
        ids.update(request_ids)
        try:
            yield
        finally:
            ids.difference_update(request_ids)
            if not ids:
                self._labels.pop(label, None)

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(len(self.tokenizer.token_bytes(token_id)) for token_id in range(self.tokenizer.max_token_id + 1))

    async def warm_up(self) -> None:
        """Does ahead of the first request what would otherwise delay it."""
        await self._in_pool(lambda: self._max_token_bytes)

    async def _in_pool[T](self, function: Callable[[], T], size: int = 0) -> T:
        pool = self._long_text_pool if size > LONG_TEXT else self._text_pool
        return await asyncio.get_running_loop().run_in_executor(pool, function)


def check_num_sequences(num_prompts: int, n: int = 1) -> None:
    """Raises InvalidRequest when one call asks for too many; made first of all, so that a list of a million prompts costs nothing."""
    if num_prompts * n > MAX_SEQUENCES_PER_CALL:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences; one call may have {MAX_SEQUENCES_PER_CALL}.",
            param="prompt" if n == 1 else "n",
        )


def _check_num_logprobs(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], vocab_size: int) -> None:
    """Raises InvalidRequest when whole vocabularies are wanted of too many tokens; the parameters are checked."""
    outputs = sum(one.n * (one.max_tokens or 0) for one in params)
    for name, num_tokens in (("logprobs", outputs), ("prompt_logprobs", sum(map(len, prompts)))):
        asked = getattr(params[0], name) or 0
        width = vocab_size if asked == -1 else asked
        if width > FEW_LOGPROBS and num_tokens * width > MAX_MANY_LOGPROBS:
            raise InvalidRequest(
                f"{name} asks for {width} values for each of up to {num_tokens} tokens; {MAX_MANY_LOGPROBS} values fit into one call: "
                f"ask for at most {FEW_LOGPROBS}, or for fewer tokens.",
                param=name,
            )


def truncate_prompt(token_ids: list[int], limit: int | None, info: EngineInfo, *, side: str = "left") -> list[int]:
    """The prompt cut to `limit` tokens (-1: as many as leave room for one output token) at its left or right end; None keeps it."""
    if limit is None:
        return token_ids
    if limit == 0 or limit < -1 or limit > info.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {limit}; it must be from 1 to the context of {info.max_model_len}, or -1 for as much as fits.",
            param="truncate_prompt_tokens",
        )
    limit = info.max_model_len - 1 if limit == -1 else limit
    return token_ids[-limit:] if side == "left" else token_ids[:limit]


def _delta(event: TokenEvent, text: TextDelta, prompt_index: int) -> Delta:
    return Delta(
        prompt_index=prompt_index,
        index=event.index,
        text=text.text,
        token_ids=text.token_ids,
        logprobs=text.logprobs,
        finish_reason=text.finish_reason,
        stop_reason=text.stop_reason,
        num_prompt_tokens=event.num_prompt_tokens,
        num_cached_tokens=event.num_cached_tokens,
        prompt_logprobs=event.prompt_logprobs,
        error=event.error,
    )
