"""What HTTP and gRPC share: text to ids, checks, one engine request for each prompt, and token events back to text.

A client's request id is only a label here; the engine gets an id of our own, so a repeated one cannot mix answers. Leaving
`generate` early (disconnect, cancel, deadline, error) aborts in the engine. Text work that can take long runs in a thread pool.
Exists before the engine does and after it is lost: calls are then refused by `check_ready`. Knows no protocol. Next: `http` and
`grpc_server`; below: `engine.replicas`, `text.sequence_text`.
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
from functools import lru_cache, partial
from typing import Any

from jaxserve.config import ServerConfig
from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.request import NO_SAMPLING, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.admission import check_embedding, check_request
from jaxserve.engine.event_stream import EventStream
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.replicas import Replicas
from jaxserve.errors import EngineUnavailable, InvalidRequest, ModelNotFound
from jaxserve.serve.call_limits import check_admissible, check_label, check_num_logprobs, check_num_sequences, shorter_timeout
from jaxserve.serve.delta import Delta, make_delta
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.request_log import CallLog, logged
from jaxserve.serve.tracing import CallTrace, Tracer
from jaxserve.text.chat_template import read_template, render_chat
from jaxserve.text.sequence_text import SequenceText
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONG_TEXT = 64 * 2**10
"""Texts of more characters, and more token ids, than this have a thread of their own: nobody else's text waits behind them."""
MAX_TEXT_CHARS = 4 * 2**20
"""Longest text that is tokenized where the context sets no limit: seconds of work."""
ABORT_S = 1.0
"""Time for aborted calls to hear of it."""


class Service:
    """One front end's view of its engines and its text.

    Args:
        client: Started; the engines may still load.
        config: The server's settings.
        tracer: Sends a span of each call; None traces nothing.
    """

    def __init__(self, client: Replicas, config: ServerConfig, tracer: Tracer | None = None) -> None:
        self.client = client
        self.config = config
        self.metrics = Metrics(config.metrics_prefix, client.engines, next(iter(config.served_model_name), None))
        self._tracer = tracer
        self._chat_template = None if config.chat_template is None else read_template(config.chat_template)
        self._tokenizer: Tokenizer | None = None
        self._is_draining = False
        self._listeners: list[Callable[[], None]] = []
        self._id_prefix = secrets.token_hex(4)
        self._next_id = itertools.count()
        self._text_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
        self._long_text_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-text")
        client.add_listener(self._tell)

    async def load(self) -> None:
        """Waits for an engine and reads the tokenizer; does ahead of the first request what would otherwise delay it.

        Raises:
            CheckpointError: The tokenizer cannot be read.
        """
        await self.client.wait_until_connected()
        tokenizer = await asyncio.to_thread(Tokenizer.from_directory, self.info.model_path)
        if self._chat_template is not None:
            tokenizer.chat_templates = {"default": self._chat_template}
        await self._in_pool(lambda: _max_token_bytes(tokenizer))
        self._tokenizer = tokenizer
        self._tell()

    @property
    def info(self) -> EngineInfo:
        """The engines' facts; raises EngineUnavailable before one first came up."""
        return self.client.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; raises EngineUnavailable before it is read."""
        if self._tokenizer is None:
            raise EngineUnavailable("the model is still loading; send the request again in a while.")
        return self._tokenizer

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """Names that clients may use; the first one is reported."""
        return self.config.served_model_name or (self.info.model,)

    @property
    def is_healthy(self) -> bool:
        """Whether an engine is warm, is heard of and makes progress."""
        return self._tokenizer is not None and self.client.is_healthy

    @property
    def is_ready(self) -> bool:
        """Whether new calls are served."""
        return self.is_healthy and not self._is_draining

    def check_ready(self) -> None:
        """Raises EngineUnavailable, saying why, while new calls are not served."""
        if self._is_draining:
            raise EngineUnavailable("this server is shutting down; send the request to another one, or again later.")
        if not self.client.is_healthy:
            raise EngineUnavailable(self.client.why)
        _ = self.tokenizer

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Calls back, in the asyncio loop, whenever `is_healthy` or `is_ready` may have changed."""
        self._listeners.append(callback)

    def _tell(self) -> None:
        for callback in self._listeners:
            callback()

    async def drain(self, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """Refuses new calls, lets open ones go on, then ends the rest with finish_reason abort.

        Args:
            grace_s: How long they may go on, in seconds.
            hurry: Ends that time when it is set.
        """
        self._is_draining = True
        self._tell()
        await self._wait_for_calls(grace_s, hurry)
        self.client.abort_all()
        await self._wait_for_calls(ABORT_S)

    async def _wait_for_calls(self, timeout_s: float, hurry: asyncio.Event | None = None) -> None:
        end = time.monotonic() + timeout_s
        while self.client.num_open and time.monotonic() < end and not (hurry and hurry.is_set()):
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Ends the thread pools."""
        for pool in (self._text_pool, self._long_text_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound, listing what is served, for a name that is not; None is whatever is served.

        The first check of a call, so it raises EngineUnavailable while calls are not served.
        """
        self.check_ready()
        if name is not None and name not in self.served_model_names:
            served = ", ".join(repr(served_name) for served_name in self.served_model_names)
            raise ModelNotFound(f"the model {name!r} does not exist; served here: {served}.")

    def sampling_params(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Parameters from the fields a client gave, over the model's defaults; None is not given."""
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{"max_tokens": None} | dict(self.info.default_sampling_params) | given)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of any text up to MAX_TEXT_CHARS; raises InvalidRequest for a longer one."""
        self.check_ready()
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"the text has {len(text)} characters; at most {MAX_TEXT_CHARS} are tokenized: shorten or split it.", param="prompt"
            )
        return (await self._encode([text], add_special_tokens))[0]

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        tokenizer = self.tokenizer
        return await self._in_pool(lambda: [tokenizer.token_text(token_id) for token_id in token_ids], len(token_ids))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return await self._in_pool(partial(self.tokenizer.decode, token_ids, skip_special_tokens), len(token_ids))

    async def tokenize_prompts(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, is_truncated: bool = False
    ) -> list[list[int]]:
        """Token ids of a call's prompts; those that cannot fit the context whatever their tokens are are refused without tokenizing."""
        self.check_ready()
        if is_truncated:
            return [await self.tokenize(text, add_special_tokens=add_special_tokens) for text in texts]
        limit = self.info.max_model_len * _max_token_bytes(self.tokenizer)
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
        tokenizer = self.tokenizer
        return await self._in_pool(lambda: [tokenizer.encode(text, add_special_tokens) for text in texts], size)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of a chat; options as in `text.chat_template.render_chat`."""
        self.check_ready()
        return await self._in_pool(partial(render_chat, self.tokenizer, messages, **options))

    def check(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, priority: int = 0) -> list[SamplingParams]:
        """Each prompt's parameters, as the engine will use them; raises InvalidRequest."""
        check_num_sequences(len(prompts), params.n)
        check_admissible(len(prompts), params.n, self.info, len(self.client.engines))
        checked = [check_request(params, prompt, self.info, priority=priority) for prompt in prompts]
        check_num_logprobs(prompts, checked, self.info.vocab_size)
        return checked

    def check_embeddings(self, prompts: Sequence[Sequence[int]], params: PoolingParams, *, priority: int = 0) -> None:
        """Raises InvalidRequest for prompts that cannot be embedded."""
        check_num_sequences(len(prompts))
        check_admissible(len(prompts), 1, self.info, len(self.client.engines))
        for prompt in prompts:
            check_embedding(params, prompt, self.info, priority=priority)

    def _requests(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | PoolingParams, *, priority: int, **rest: Any
    ) -> list[Request]:
        if isinstance(params, PoolingParams):
            self.check_embeddings(prompts, params, priority=priority)
            checked, pooling = [NO_SAMPLING] * len(prompts), params
        else:
            checked, pooling = self.check(prompts, params, priority=priority), None
        return [
            Request(
                request_id=f"{self._id_prefix}-{next(self._next_id)}",
                prompt_token_ids=tuple(prompt),
                params=each,
                pooling=pooling,
                priority=priority,
                **rest,
            )
            for prompt, each in zip(prompts, checked, strict=True)
        ]

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | PoolingParams,
        *,
        label: str = "",
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        engine: int | None = None,
    ) -> AsyncGenerator[Delta]:
        """Runs the prompts together and yields what is new of each sequence as it comes; close it to abort the rest.

        Args:
            prompts: Token ids.
            params: For every prompt; with PoolingParams it is embedded, and no token generated.
            label: The client's name for the call, for `abort`.
            priority: Lower runs earlier.
            cache_salt: Isolates the prefix cache.
            timeout_s: Seconds from now after which the sequences left end with finish_reason abort; the server may allow less.
            engine: The number of the engine that is to do it; None chooses one for each prompt.

        Raises:
            InvalidRequest: Before the first delta.
            Overloaded: Before the first delta; too many sequences wait.
            EngineUnavailable: At any time.
        """
        with self.metrics.call() as measured:
            self.check_ready()
            check_label(label)
            timeout_s = shorter_timeout(timeout_s, self.config.request_timeout)
            requests = self._requests(prompts, params, label=label, priority=priority, cache_salt=cache_salt)
            measured.begin(requests)
            prompt_indices = {request.request_id: i for i, request in enumerate(requests)}
            texts = {
                (request.request_id, index): SequenceText(self.tokenizer, request.params, request.prompt_token_ids)
                for request in requests
                for index in range(request.params.n)
            }
            with (
                self._traced(requests) as trace,
                self._logged(requests) as log,
                self.client.generate(*requests, engine=engine) as stream,
                _ending_after(timeout_s, stream),
            ):
                measured.engine_ids = stream.engine_ids
                async for event in stream:
                    text = texts[event.request_id, event.index].push(event)
                    measured.on_event(event, text)
                    if trace is not None:
                        trace.on_tokens(len(text.token_ids), text.finish_reason and text.finish_reason.value)
                    if log is not None:
                        log.on_text(event.request_id, event.index, text)
                    if text.is_stop_string_hit and event.finish_reason is None:
                        stream.drop(event.request_id, event.index)
                    yield make_delta(event, text, prompt_indices[event.request_id])

    def abort(self, label: str) -> None:
        """Ends every open call with this label, of whichever front end; their streams end with finish_reason abort."""
        if label:
            self.client.abort_label(label)

    def _traced(self, requests: Sequence[Request]) -> AbstractContextManager[CallTrace | None]:
        if self._tracer is None:
            return nullcontext()
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        params = requests[0].params if requests[0].pooling is None else None
        return self._tracer.trace(CallTrace(self.served_model_names[0], requests[0].request_id, params, num_prompt_tokens))

    def _logged(self, requests: Sequence[Request]) -> AbstractContextManager[CallLog | None]:
        return logged(requests, self.tokenizer) if self.config.log_requests else nullcontext()

    async def _in_pool[T](self, function: Callable[[], T], size: int = 0) -> T:
        pool = self._long_text_pool if size > LONG_TEXT else self._text_pool
        return await asyncio.get_running_loop().run_in_executor(pool, function)


@lru_cache(maxsize=2)
def _max_token_bytes(tokenizer: Tokenizer) -> int:
    return max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.max_token_id + 1))


@contextmanager
def _ending_after(timeout_s: float | None, stream: EventStream) -> Iterator[None]:
    """Ends the stream's sequences when the time is over."""
    timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, stream.end)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
