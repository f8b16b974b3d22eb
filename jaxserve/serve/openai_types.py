"""The bodies of the OpenAI endpoints: which fields are served, which are refused, and how a bad one is named.

Types are strict (a number in quotes is an error), unknown fields are ignored as vLLM ignores them (a debug line names them), and a known
field that is not served is an error that names it: nothing a client asked for is dropped in silence. Ranges are checked by
`core.sampling_params`. Next: `http`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError
from pydantic_core import from_json

from jaxserve.errors import InvalidRequest

logger = logging.getLogger(__name__)

type _List[T] = Annotated[list[T], FailFast()]
"""Fails at the first bad entry: a list of a million of them must not make a million messages."""

_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "documents": ([],),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0, 1),
    "logprob_token_ids": ([],),
    "lora_request": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (),
    "session_id": (),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Fields that vLLM or OpenAI serve or served and jaxserve does not, with the values that ask for nothing (null never does)."""
_CHAT_NOT_SERVED = {"chat_template": (), "echo": (False,)}
_WHY_NOT = {"chat_template": "the model's own template is used, as a template is a program; chat_template_kwargs sets its variables"}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)
    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The checked body; raises InvalidRequest naming the field at fault."""
        try:
            values = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise InvalidRequest(f"the body is a JSON {type(values).__name__}; it must be an object.")
        for name, neutral in cls.not_served.items():
            value = values.get(name)
            if value is not None and not any(value == other and type(value) is type(other) for other in neutral):
                why = f" ({_WHY_NOT[name]})" if name in _WHY_NOT else ""
                raise InvalidRequest(f"{name} is not supported by this server{why}; leave it out.", param=name)
        if logger.isEnabledFor(logging.DEBUG) and (unknown := sorted(set(values) - set(cls.model_fields) - set(cls.not_served))):
            logger.debug("ignoring unknown fields: %s", ", ".join(map(repr, unknown)))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _named(error) from None


def _named(error: ValidationError) -> InvalidRequest:
    """The first problem of a body, as one sentence; a union reports one for each member, so their parts are joined."""
    problems = error.errors(include_url=False, include_input=False)
    field = str(problems[0]["loc"][0]) if problems[0]["loc"] else None
    texts = dict.fromkeys(problem["msg"] for problem in problems if not field or str(problem["loc"][0]) == field)
    return InvalidRequest(f"{field or 'the body'}: {'; or '.join(texts)}.", param=field)


class StreamOptions(BaseModel):
    """What a stream carries besides the answer."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _GenerationBody(_Body):
    """Fields of both generating endpoints."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | _List[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: _List[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    """Seconds after which the sequences still running end with finish_reason abort. vLLM has no such field."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    _SAMPLING: ClassVar[tuple[str, ...]] = (
        "frequency_penalty", "presence_penalty", "logit_bias", "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p",
        "repetition_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
        "spaces_between_special_tokens", "prompt_logprobs",
    )  # fmt: skip

    def sampling_fields(self) -> dict[str, Any]:
        """The fields that SamplingParams has too; None is not given."""
        return {name: getattr(self, name) for name in self._SAMPLING}

    @property
    def wants_usage(self) -> bool:
        """A stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Every chunk of a stream carries the usage so far."""
        return bool(self.wants_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def check_together(self) -> None:
        """Checks fields against each other; raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is given without stream; set stream to true or leave it out.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed; set stream to false.", param="prompt_logprobs")
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt is empty; give a non-empty string or leave it out.", param="cache_salt")


class CompletionBody(_GenerationBody):
    """`POST /v1/completions`."""

    not_served = _NOT_SERVED
    prompt: str | _List[str] | _List[int] | _List[_List[int]]
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = None

    def check_together(self) -> None:
        """As above; no output at all is only useful with echo."""
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens is 0; it must be at least 1, or echo must be true.", param="max_tokens")


class ChatBody(_GenerationBody):
    """`POST /v1/chat/completions`."""

    not_served = {**_NOT_SERVED, **_CHAT_NOT_SERVED}
    messages: _List[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def name_of(self, param: str | None) -> str | None:
        """What the client called a sampling parameter."""
        if param == "logprobs":
            return "top_logprobs"
        return "max_completion_tokens" if param == "max_tokens" and self.max_completion_tokens is not None else param

    def check_together(self) -> None:
        """As above, and top_logprobs needs logprobs."""
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; set it to true.", param="top_logprobs")


_SAMPLING_ONLY = (
    "best_of", "echo", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "min_p",
    "min_tokens", "n", "presence_penalty", "prompt_logprobs", "repetition_penalty", "seed", "stop", "stop_token_ids", "stream",
    "stream_options", "suffix", "temperature", "top_k", "top_logprobs", "top_p",
)  # fmt: skip


class EmbeddingBody(_Body):
    """`POST /v1/embeddings`."""

    not_served = {
        **dict.fromkeys(_SAMPLING_ONLY, ()),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
        "mm_processor_kwargs": ({},),
    }
    model: str | None = None
    input: str | _List[str] | _List[int] | _List[_List[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    normalize: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    """vLLM has no such field: there, only the server chooses."""
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None

    def check_together(self) -> None:
        """Raises InvalidRequest for a salt that is none."""
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt is empty; give a non-empty string or leave it out.", param="cache_salt")


class TokenizeBody(_Body):
    """`POST /tokenize`: a prompt, or messages."""

    not_served = {"chat_template": (), "tools": ([],), "mm_processor_kwargs": ({},)}
    model: str | None = None
    prompt: str | None = None
    messages: _List[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: _List[int]
