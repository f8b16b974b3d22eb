"""Deltas as OpenAI choices. A whole answer is its stream's choices added up, so the two cannot differ.

`Completion` and `Chat` each know: the call (prompts, parameters), how a delta becomes a stream choice, and how stream choices add
up. Ids, envelopes, usage and transport are `http`'s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.errors import InvalidRequest, RequestFailed
from jaxserve.logs import request_id
from jaxserve.serve.call_limits import check_num_sequences, truncate_prompt
from jaxserve.serve.delta import Delta
from jaxserve.serve.openai_logprobs import TextOffsets, TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from jaxserve.serve.openai_types import ChatBody, CompletionBody, EmbeddingBody, TokenizeBody
from jaxserve.serve.service import Service

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when it is not given, as OpenAI has it."""


class Usage:
    """Token counts of a call, in OpenAI's shape."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_completion_tokens = 0

    def add(self, delta: Delta, *, is_output_dropped: bool = False) -> None:
        """Counts a delta; prompts count once, however many sequences they have."""
        if delta.prompt_index not in self._prompts or delta.index == 0:
            self._prompts[delta.prompt_index] = (delta.num_prompt_tokens, delta.num_cached_tokens)
        self._num_completion_tokens += 0 if is_output_dropped else len(delta.token_ids)

    def to_json(self) -> dict[str, Any]:
        """The counts so far."""
        num_prompt = sum(prompt for prompt, _ in self._prompts.values())
        num_cached = sum(cached for _, cached in self._prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


class Completion:
    """A call of /v1/completions."""

    id_prefix = "cmpl"
    object_name: ClassVar[str] = "text_completion"
    chunk_name: ClassVar[str] = "text_completion"

    def __init__(self, service: Service, body: CompletionBody, prompts: list[list[int]], texts: list[str], params: SamplingParams) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._texts = texts
        self._params = params
        self._names = TokenNames(service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._offsets: dict[int, TextOffsets] = {}
        self.is_output_dropped = body.max_tokens == 0

    @classmethod
    async def prepare(cls, service: Service, body: CompletionBody) -> Completion:
        """Tokenizes and checks; raises InvalidRequest."""
        body.check_together()
        prompts = await read_prompts(service, body.prompt, body)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        # With max_tokens 0 (echo alone) the engine still makes a token, which is dropped.
        fields = body.sampling_fields() | {"max_tokens": max_tokens or 1, "logprobs": body.logprobs}
        if body.echo and body.logprobs is not None:
            fields["prompt_logprobs"] = body.logprobs
        params = service.sampling_params(fields)
        service.check(prompts, params, priority=body.priority or 0)
        texts = [""] * len(prompts)
        if body.echo:
            texts = await _echo_texts(service, body, prompts, params.skip_special_tokens)
        return cls(service, body, prompts, texts, params)

    def deltas(self) -> AsyncGenerator[Delta]:
        """Runs the call; close it to abort."""
        return self._service.generate(self._prompts, self._params, **call_options(self._body))

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """What a stream sends for a delta: nothing while there is nothing to say."""
        number = delta.prompt_index * self._params.n + delta.index
        is_first = number not in self._offsets
        choice: dict[str, Any] = {"index": number, "text": "" if self.is_output_dropped else delta.text, "logprobs": None}
        if is_first:
            self._start(choice, number, delta)
        elif delta.logprobs is not None and not self.is_output_dropped and delta.token_ids:
            choice["logprobs"] = self._logprobs(number, delta)
        if self._body.return_token_ids and not self.is_output_dropped:
            choice["token_ids"] = delta.token_ids
        choice["finish_reason"] = "length" if self.is_output_dropped and delta.finish_reason else finish_reason(delta)
        choice["stop_reason"] = None if self.is_output_dropped else delta.stop_reason
        has_news = choice["text"] or choice["logprobs"] or choice.get("token_ids") or delta.finish_reason or delta.prompt_logprobs
        return [choice] if has_news or (is_first and self._body.echo) else []

    def _start(self, choice: dict[str, Any], number: int, delta: Delta) -> None:
        """The first choice of a sequence carries what belongs to the prompt."""
        body, prompt = self._body, self._prompts[delta.prompt_index]
        self._offsets[number] = TextOffsets(
            self._service.tokenizer, skip_special_tokens=self._params.skip_special_tokens, is_at_start=bool(body.echo)
        )
        choice["text"] = self._texts[delta.prompt_index] + choice["text"]
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs(number, delta, prompt if body.echo else [])
        if body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs, body.prompt_logprobs, self._names)
        if body.return_token_ids:
            choice["prompt_token_ids"] = prompt

    def _logprobs(self, number: int, delta: Delta, prompt: list[int] | None = None) -> dict[str, list[Any]] | None:
        token_ids, entries = list(prompt or []), list(delta.prompt_logprobs or []) if prompt else []
        if not self.is_output_dropped:
            token_ids += delta.token_ids
            entries += delta.logprobs or []
        if not token_ids:
            return None
        assert self._body.logprobs is not None
        return completion_logprobs(entries, token_ids, self._body.logprobs, self._names, self._offsets[number])

    def answer(self, choices: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
        """The body of a whole answer, from the stream choices of each sequence."""
        return {"choices": [_sum_completion(parts) for _, parts in sorted(choices.items())]}


class Chat:
    """A call of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object_name: ClassVar[str] = "chat.completion"
    chunk_name: ClassVar[str] = "chat.completion.chunk"
    is_output_dropped = False

    def __init__(self, service: Service, body: ChatBody, prompt: list[int], params: SamplingParams) -> None:
        self._service = service
        self._body = body
        self._prompt = prompt
        self._params = params
        self._names = TokenNames(service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._started: set[int] = set()
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None

    @classmethod
    async def prepare(cls, service: Service, body: ChatBody) -> Chat:
        """Renders the template, tokenizes and checks; raises InvalidRequest."""
        body.check_together()
        prompt = await chat_prompt(service, body)
        prompt = truncate_prompt(prompt, body.truncate_prompt_tokens, service.info, side=body.truncation_side or "left")
        fields = body.sampling_fields() | {
            "max_tokens": body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
        try:
            params = service.sampling_params(fields)
            service.check([prompt], params, priority=body.priority or 0)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=body.name_of(error.param)) from None
        return cls(service, body, prompt, params)

    def deltas(self) -> AsyncGenerator[Delta]:
        """Runs the call; close it to abort."""
        return self._service.generate([self._prompt], self._params, **call_options(self._body))

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """What a stream sends for a delta: first the role, then content, last the finish reason."""
        body = self._body
        choices: list[dict[str, Any]] = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            choices.append({"index": delta.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})
            if body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
                self._prompt_logprobs = prompt_logprobs(delta.prompt_logprobs, body.prompt_logprobs, self._names)
        choice: dict[str, Any] = {"index": delta.index, "delta": {"content": delta.text} if delta.text else {}, "logprobs": None}
        if delta.logprobs:
            choice["logprobs"] = {"content": chat_logprobs(delta.logprobs, body.top_logprobs or 0, self._names)}
        choice["finish_reason"] = finish_reason(delta)
        choice["stop_reason"] = delta.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if choice["delta"] or choice["logprobs"] or delta.finish_reason or choice.get("token_ids"):
            choices.append(choice)
        return choices

    def answer(self, choices: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
        """The body of a whole answer, from the stream choices of each sequence."""
        answer: dict[str, Any] = {"choices": [_sum_chat(parts) for _, parts in sorted(choices.items())]}
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer


def call_options(body: CompletionBody | ChatBody | EmbeddingBody) -> dict[str, Any]:
    """What `Service.generate` gets beside the prompts and the parameters."""
    label = body.request_id or request_id.get()
    return {"label": label, "priority": body.priority or 0, "cache_salt": body.cache_salt, "timeout_s": body.timeout}


def finish_reason(delta: Delta) -> str | None:
    """The finish reason as clients read it."""
    return delta.finish_reason.value if delta.finish_reason else None


async def chat_prompt(service: Service, body: ChatBody | TokenizeBody) -> list[int]:
    """Token ids of `body.messages`; the template writes special tokens itself, so none are added unless asked."""
    text = await service.render_chat(
        body.messages or [],
        add_generation_prompt=True if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
    )
    is_truncated = isinstance(body, ChatBody) and body.truncate_prompt_tokens is not None
    # What is asked for twice is there once: most templates write BOS themselves.
    bos = service.tokenizer.special_tokens.get("bos_token")
    adds_special = bool(body.add_special_tokens) and not (bos and text.startswith(bos))
    return (await service.tokenize_prompts([text], add_special_tokens=adds_special, is_truncated=is_truncated))[0]


async def read_prompts(service: Service, prompt: Any, body: CompletionBody | EmbeddingBody) -> list[list[int]]:
    """Token ids of a call's prompts: a text, token ids, or a list of either; raises InvalidRequest."""
    if not prompt and not isinstance(prompt, str):
        raise InvalidRequest("the prompt is empty; give at least one token.", param="prompt")
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    check_num_sequences(len(prompts))
    if isinstance(prompts[0], str):
        adds_special = True if body.add_special_tokens is None else body.add_special_tokens
        is_truncated = body.truncate_prompt_tokens is not None
        prompts = await service.tokenize_prompts(prompts, add_special_tokens=adds_special, is_truncated=is_truncated)
    side = body.truncation_side or "left"
    return [truncate_prompt(token_ids, body.truncate_prompt_tokens, service.info, side=side) for token_ids in prompts]


async def _echo_texts(service: Service, body: CompletionBody, prompts: list[list[int]], skip_special_tokens: bool) -> list[str]:
    """The prompts as text: as given, or decoded where they came as ids or were cut."""
    if body.truncate_prompt_tokens is None:
        if isinstance(body.prompt, str):
            return [body.prompt]
        if isinstance(body.prompt[0], str):
            return [str(text) for text in body.prompt]
    return [await service.detokenize(prompt, skip_special_tokens=skip_special_tokens) for prompt in prompts]


def _sum_completion(parts: list[dict[str, Any]]) -> dict[str, Any]:
    total = dict(parts[0])
    total["text"] = "".join(part["text"] for part in parts)
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    if logprobs:
        total["logprobs"] = {name: [value for part in logprobs for value in part[name]] for name in logprobs[0]}
    return _sum_rest(total, parts)


def _sum_chat(parts: list[dict[str, Any]]) -> dict[str, Any]:
    content = "".join(part["delta"].get("content", "") for part in parts)
    logprobs = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    total = {
        "index": parts[0]["index"],
        "message": {"role": "assistant", "content": content},
        "logprobs": {"content": logprobs} if any(part["logprobs"] for part in parts) else None,
    }
    return _sum_rest(total, parts)


def _sum_rest(total: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    total["finish_reason"] = parts[-1]["finish_reason"]
    total["stop_reason"] = parts[-1]["stop_reason"]
    if any("token_ids" in part for part in parts):
        total["token_ids"] = [token_id for part in parts for token_id in part.get("token_ids", ())]
    return total


def raise_if_failed(delta: Delta) -> None:
    """Raises RequestFailed for a sequence that the engine could not finish."""
    if delta.finish_reason is FinishReason.ERROR:
        raise RequestFailed(delta.error or "the engine failed")
