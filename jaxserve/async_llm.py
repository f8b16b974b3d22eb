"""The Python interface with asyncio: the engine turns in a thread of its own, and answers come as they grow.

    async with AsyncLLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
        async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

Every request is a client of its own of the `engine.loop`: leaving the `async for`, by break, cancellation or an error, closes that client,
and the engine drops the request before its next step. Prompts and parameters are read as in `LLM` (`prompts`). Next: `engine.loop`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from jaxserve.config import EngineConfig
from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.request import NO_SAMPLING, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.loop import EngineLoop, Output
from jaxserve.errors import EngineUnavailable
from jaxserve.outputs import EmbeddingRequestOutput, OutputBuilder, RequestOutput
from jaxserve.prompts import EncodedPrompt, Messages, Prompt, PromptReader
from jaxserve.settings import read_engine_config
from jaxserve.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model, loaded and ready, for many requests at once. Loading happens in the constructor and takes its time.

    Its coroutines may be used from any event loop, also from several.

    Args:
        model: A converted checkpoint, a Hugging Face directory, a GGUF file or a hub id; converted once where needed.
        settings: Fields of `EngineConfig`, or their vLLM names. Sizes may be text, such as "4GiB".

    Raises:
        ConfigError: A setting is unknown or out of range, or the device cannot be used.
        CheckpointError: The model is missing, damaged or unsupported.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self._build(read_engine_config(model, settings, "AsyncLLM"))

    @classmethod
    def from_config(cls, config: EngineConfig, stage: Callable[[str, float, str], None] | None = None) -> Self:
        """From settings that are resolved already; `stage` takes each stage of start-up: name, seconds and a detail."""
        llm = cls.__new__(cls)
        llm._build(config, stage)
        return llm

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer) -> Self:
        """Over an engine built elsewhere, which it then owns."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer)
        return llm

    def _build(self, config: EngineConfig, stage: Callable[[str, float, str], None] | None = None) -> None:
        from jaxserve.engine.build import build_engine  # loads JAX: only once the settings are known to be good

        engine = build_engine(config, stage)
        self._attach(engine, Tokenizer.from_directory(engine.info.model_path))

    def _attach(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine: Engine | None = engine
        self._info = engine.info
        self._reader = PromptReader(tokenizer, engine.info)
        self._streams: set[_Stream] = set()
        self._engine_ids = itertools.count()
        self._close_lock = threading.Lock()
        self._loop = EngineLoop(engine)
        self._loop.start()

    @property
    def info(self) -> EngineInfo:
        """Facts about the model and the engine."""
        return self._info

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._reader.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given: the model's generation_config, unless that is switched off."""
        return self._reader.default_params

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Completes one prompt; yields the whole answer so far, each time there is more of it.

        Each output is a snapshot; the last one has `finished` set. A reader slower than the engine gets fewer, longer steps. One whose step
        failed in the engine ends with finish_reason "error".

        Args:
            prompt: A string, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            params: None is `get_default_sampling_params()`.
            request_id: A name for `abort`; need not be unique. None makes one up.
            priority: Lower runs earlier, under the priority policy.
            cache_salt: Isolates the prefix cache.

        Raises:
            InvalidRequest: The prompt or its parameters cannot be served; before the first output.
            EngineUnavailable: The engine failed or is closed, at any time.
        """
        encoded = await asyncio.to_thread(self._reader.read, prompt)
        async with aclosing(self._run(encoded, params, request_id, priority, cache_salt)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answers one conversation, written as a prompt by the model's chat template; else as `generate`.

        Args:
            messages: A list of `{"role": ..., "content": ...}`.
            params, request_id, priority, cache_salt: As in `generate`.
            chat_template, add_generation_prompt, continue_final_message: As in `text.chat_template.render_chat`.
            tools: Shown to the template.
            chat_template_kwargs: More variables for the template.
        """
        encoded = await asyncio.to_thread(
            self._reader.read_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        async with aclosing(self._run(encoded, params, request_id, priority, cache_salt)) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Makes a vector of the prompt's hidden states; needs `enable_embeddings`.

        Args:
            prompt, request_id, priority, cache_salt: As in `generate`. The prompt may fill the whole context.
            params: None pools as the setting `pooling` says, and normalizes.

        Raises:
            InvalidRequest: The prompt or its parameters cannot be served.
            EngineUnavailable: The engine failed or is closed.
            RequestFailed: The step failed in the engine, or the request was aborted.
        """
        encoded = await asyncio.to_thread(self._reader.read, prompt)
        pooling = self._reader.check_embedding(encoded, params, priority=priority)
        builder, request = self._request(encoded, NO_SAMPLING, pooling, request_id, priority, cache_salt)
        async with aclosing(self._outputs(builder, request)) as outputs:
            async for _ in outputs:
                pass
        return builder.embedding_output(pooling)

    async def _run(
        self, prompt: EncodedPrompt, params: SamplingParams | None, label: str | None, priority: int, cache_salt: str | None
    ) -> AsyncGenerator[RequestOutput]:
        checked = self._reader.check(prompt, params, priority=priority)
        builder, request = self._request(prompt, checked, None, label, priority, cache_salt)
        async with aclosing(self._outputs(builder, request)) as outputs:
            async for output in outputs:
                yield output

    def _request(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        pooling: PoolingParams | None,
        label: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> tuple[OutputBuilder, Request]:
        engine_id = str(next(self._engine_ids))
        builder = OutputBuilder(label or engine_id, prompt.text, prompt.token_ids, params, self._reader.tokenizer)
        request = Request(
            request_id=engine_id,
            prompt_token_ids=tuple(prompt.token_ids),
            params=params,
            pooling=pooling,
            arrival_time_s=builder.output.metrics.arrival_time_s,
            priority=priority,
            cache_salt=cache_salt,
            label=label or "",
        )
        return builder, request

    async def _outputs(self, builder: OutputBuilder, request: Request) -> AsyncGenerator[RequestOutput]:
        stream = _Stream(self._loop, request, builder)
        self._streams.add(stream)
        try:
            stream.start()
            while not builder.output.finished:
                yield await stream.next_output()
        finally:
            self._streams.discard(stream)
            stream.close()

    async def abort(self, request_id: str) -> None:
        """Ends every open request of this name: its last output has finish_reason "abort". An unknown name is not an error."""
        for stream in list(self._streams):
            if stream.request_id == request_id:
                stream.abort()

    def close(self) -> None:
        """Ends the engine after the step it is in and frees the device; open requests raise EngineUnavailable. Closing twice is fine."""
        with self._close_lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                has_ended = self._loop.stop()
                if has_ended:  # a step that hangs still uses the device
                    engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.close)


class _Stream:
    """One request on its way: what the engine's thread delivers, waiting for the event loop that reads it."""

    def __init__(self, loop: EngineLoop, request: Request, builder: OutputBuilder) -> None:
        self._engine_loop = loop
        self._request = request
        self._builder = builder
        self._arrived: deque[Output] = deque()
        self._wake = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        """The caller's name for the request."""
        return self._builder.output.request_id

    def start(self) -> None:
        """Hands the request to the engine; raises Overloaded when it takes no more."""
        self._client = self._engine_loop.connect(self._deliver)
        self._client.add(self._request)

    def abort(self) -> None:
        """Ends the request in the engine; its last events still come."""
        self._client.abort(self._request.request_id)

    def close(self) -> None:
        """Drops the request from the engine, if it is still there."""
        self._client.close()

    async def next_output(self) -> RequestOutput:
        """The answer so far, once there is more of it."""
        has_news = False
        while not has_news:
            await self._wake.wait()
            self._wake.clear()
            while self._arrived:
                has_news |= self._take(self._arrived.popleft())
        return _snapshot(self._builder.output)

    def _deliver(self, output: Output) -> None:
        """In the engine's thread."""
        self._arrived.append(output)
        # Asked after the append: whoever found it empty before that has not been woken for this.
        if len(self._arrived) == 1:
            try:
                self._event_loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the event loop ended with this request open
                self._client.close()

    def _take(self, output: Output) -> bool:
        """Adds what arrived; whether any of it is for the caller."""
        for _, error in output.rejections:
            raise error
        has_news = False
        for event in output.events:
            delta = self._builder.push(event)
            if delta.is_stop_string_hit and event.finish_reason is None:
                self._client.abort(event.request_id, event.index)
            has_news |= bool(delta.token_ids) or delta.finish_reason is not None
        if output.failure is not None and not self._builder.output.finished:
            raise EngineUnavailable(output.failure)
        return has_news


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that later tokens do not change."""
    outputs = [
        replace(answer, token_ids=list(answer.token_ids), logprobs=None if answer.logprobs is None else list(answer.logprobs))
        for answer in output.outputs
    ]
    return replace(output, outputs=outputs, metrics=copy(output.metrics))
