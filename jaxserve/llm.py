"""The Python interface: an engine in this process, prompts in, answers out.

    with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

All prompts go to the engine at once; it batches them. Knows no device: `engine.build` makes the engine. Next: `engine.engine`
for what a step does, `outputs` for what comes back, `async_llm` for the same with asyncio.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.request import NO_SAMPLING, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import EngineUnavailable
from jaxserve.outputs import EmbeddingRequestOutput, OutputBuilder, RequestOutput
from jaxserve.prompts import EncodedPrompt, Messages, Prompt, PromptReader, listed
from jaxserve.settings import read_engine_config
from jaxserve.text.tokenizer import Tokenizer


class LLM:
    """A model, loaded and ready. Calls from several threads run one after the other.

    Args:
        model: A converted checkpoint, a Hugging Face directory, a GGUF file or a hub id; converted once where needed.
        settings: Fields of `EngineConfig`, or their vLLM names. Sizes may be text, such as "4GiB".

    Raises:
        ConfigError: A setting is unknown or out of range, or the device cannot be used.
        CheckpointError: The model is missing, damaged or unsupported.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self._build(read_engine_config(model, settings, "LLM"))

    @classmethod
    def from_config(cls, config: EngineConfig, stage: Callable[[str, float, str], None] | None = None) -> Self:
        """An LLM from settings that are resolved already; `stage` takes each stage of start-up: name, seconds and a detail."""
        llm = cls.__new__(cls)
        llm._build(config, stage)
        return llm

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer) -> Self:
        """An LLM over an engine built elsewhere, which it then owns."""
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
        self._tokenizer = tokenizer
        self._reader = PromptReader(tokenizer, engine.info)
        self._lock = threading.Lock()
        self._request_ids = map(str, itertools.count())

    @property
    def info(self) -> EngineInfo:
        """Facts about the model and the engine."""
        return self._info

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given: the model's generation_config, unless that is switched off."""
        return self._reader.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: A string, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list of those.
            params: For all prompts, or one for each; None is `get_default_sampling_params()`.
            use_tqdm: Show progress on stderr.

        Returns:
            One output for each prompt, in their order. One whose step failed in the engine has finish_reason "error".

        Raises:
            InvalidRequest: A prompt or its parameters cannot be served; then nothing was generated.
            EngineUnavailable: The LLM is closed.
        """
        each = [prompts] if isinstance(prompts, str | Mapping) else listed(prompts, "prompts")
        return self._run([self._reader.read(prompt) for prompt in each], params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, written as a prompt by the model's chat template.

        Args:
            messages: A conversation (a list of `{"role": ..., "content": ...}`), or a list of conversations.
            params, use_tqdm: As in `generate`, likewise what it returns and raises.
            chat_template, add_generation_prompt, continue_final_message: As in `text.chat_template.render_chat`.
            tools: Shown to the template.
            chat_template_kwargs: More variables for the template.
        """
        each = listed(messages, "messages")
        conversations = [each] if each and isinstance(each[0], Mapping) else each
        prompts = [
            self._reader.read_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(prompts, params, use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Makes a vector of each prompt's hidden states; needs `enable_embeddings`.

        Args:
            prompts, use_tqdm: As in `generate`. A prompt may fill the whole context.
            params: For all prompts; None pools as the setting `pooling` says, and normalizes.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidRequest: A prompt or the parameters cannot be served; then nothing was computed.
            EngineUnavailable: The LLM is closed.
            RequestFailed: A step failed in the engine.
        """
        each = [prompts] if isinstance(prompts, str | Mapping) else listed(prompts, "prompts")
        read = [self._reader.read(prompt) for prompt in each]
        checked = [self._reader.check_embedding(prompt, params) for prompt in read]
        builders = self._serve(read, checked, use_tqdm)
        return [builder.embedding_output(asked) for builder, asked in zip(builders, checked, strict=True)]

    def close(self) -> None:
        """Frees the device. The LLM cannot be used afterwards; closing twice is fine."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(
        self, prompts: list[EncodedPrompt], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        # Everything is checked before the engine sees the first request.
        checked = [
            self._reader.check(prompt, each)
            for prompt, each in zip(prompts, self._reader.params_for_each(params, len(prompts)), strict=True)
        ]
        return [builder.output for builder in self._serve(prompts, checked, use_tqdm)]

    def _serve(self, prompts: list[EncodedPrompt], asked: Sequence[SamplingParams | PoolingParams], use_tqdm: bool) -> list[OutputBuilder]:
        with self._lock:
            if self._engine is None:
                raise EngineUnavailable("this LLM is closed; make a new one.")
            requests = [self._request(prompt, each) for prompt, each in zip(prompts, asked, strict=True)]
            _run_all(self._engine, requests, use_tqdm)
            return [builder for builder, _ in requests]

    def _request(self, prompt: EncodedPrompt, asked: SamplingParams | PoolingParams) -> tuple[OutputBuilder, Request]:
        request_id = next(self._request_ids)
        params, pooling = (asked, None) if isinstance(asked, SamplingParams) else (NO_SAMPLING, asked)
        builder = OutputBuilder(request_id, prompt.text, prompt.token_ids, params, self._tokenizer)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt.token_ids),
            params=params,
            pooling=pooling,
            arrival_time_s=builder.output.metrics.arrival_time_s,
        )
        return builder, request


def _run_all(engine: Engine, requests: list[tuple[OutputBuilder, Request]], use_tqdm: bool) -> None:
    """Runs all requests to their ends. On any error, and on Ctrl-C, nothing of them stays in the engine."""
    running: dict[str, OutputBuilder] = {}
    with _Progress(len(requests), is_shown=use_tqdm) as progress, _interrupts_between_steps() as is_interrupted:
        try:
            for builder, request in requests:
                running[request.request_id] = builder
                engine.add(request)
            while running:
                if is_interrupted():
                    raise KeyboardInterrupt
                _step(engine, running, progress)
        finally:
            for request_id in running:
                engine.abort(request_id)
            # A step may still be in flight; what it computes belongs to sequences that have ended.
            while engine.has_work:
                engine.step()


def _step(engine: Engine, running: dict[str, OutputBuilder], progress: _Progress) -> None:
    assert engine.has_work, f"the engine is idle with {len(running)} requests unfinished"
    for event in engine.step():
        builder = running.get(event.request_id)
        if builder is None:  # tokens on their way when its last sequence hit a stop string
            continue
        is_prompt_new = builder.output.metrics.first_token_time_s is None
        delta = builder.push(event)
        if delta.is_stop_string_hit:
            engine.abort(event.request_id, event.index)
        if builder.output.finished:
            del running[event.request_id]
        progress.add(
            num_read=event.num_prompt_tokens if is_prompt_new and (delta.token_ids or event.embedding) else 0,
            num_written=len(delta.token_ids),
            num_finished=int(builder.output.finished),
        )
    progress.show()


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C wait for the step that runs, so that the engine is never left inside one; a second one does not wait.

    Yields a function that says whether Ctrl-C was pressed. Only the main thread is ever interrupted by it, and a handler that the
    program installed itself is left alone.
    """
    is_interrupted = threading.Event()
    default = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield is_interrupted.is_set
        return

    def note(signal_number: int, frame: Any) -> None:
        is_interrupted.set()
        signal.signal(signal.SIGINT, default)

    signal.signal(signal.SIGINT, note)
    try:
        yield is_interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, default)


class _Progress:
    """A bar of finished prompts with tokens per second, read and written."""

    def __init__(self, num_requests: int, *, is_shown: bool) -> None:
        self._bar = tqdm(total=num_requests, desc="Prompts", unit="prompt", dynamic_ncols=True, miniters=0, disable=not is_shown)
        self._started_s = time.monotonic()
        self._num_read = self._num_written = self._num_finished = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def add(self, *, num_read: int, num_written: int, num_finished: int) -> None:
        """Counts prompt tokens, generated tokens and finished prompts."""
        self._num_read += num_read
        self._num_written += num_written
        self._num_finished += num_finished

    def show(self) -> None:
        """Redraws, if it is time to."""
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        rates = f"{self._num_read / elapsed_s:.0f} tok/s in, {self._num_written / elapsed_s:.0f} tok/s out"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(self._num_finished - self._bar.n)
