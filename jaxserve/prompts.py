"""Stations 1 and 2 in Python: what a caller of `LLM` or `AsyncLLM` gives becomes token ids and checked parameters.

Both refuse the same things with the same words. Knows no engine: only the model's tokenizer and its `EngineInfo`. Next:
`llm` and `async_llm`, which run what comes out; `outputs` for what a caller gets back.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.admission import check_embedding, check_request
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import InvalidRequest
from jaxserve.text.chat_template import render_chat
from jaxserve.text.tokenizer import Tokenizer


class TokenPrompt(TypedDict):
    """A prompt as token ids, taken as they are: no BOS is added."""

    prompt_token_ids: Sequence[int]


class TextPrompt(TypedDict):
    """A prompt as text, the same as the bare string."""

    prompt: str


Prompt = str | TokenPrompt | TextPrompt
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it; `text` is None when it was given as token ids."""

    text: str | None
    token_ids: list[int]


class PromptReader:
    """Reads prompts, conversations and parameters for one model."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self.tokenizer = tokenizer
        self.info = info

    @property
    def default_params(self) -> SamplingParams:
        """What is used where no parameters are given: the model's generation_config, unless that is switched off."""
        return SamplingParams(**self.info.default_sampling_params)

    def read(self, prompt: Prompt) -> EncodedPrompt:
        """Token ids of a prompt in any of its forms; raises InvalidRequest for anything else."""
        given: Any = prompt
        if isinstance(given, Mapping) and "prompt_token_ids" in given:
            try:
                return EncodedPrompt(given.get("prompt"), [operator.index(token_id) for token_id in given["prompt_token_ids"]])
            except TypeError as error:
                raise InvalidRequest(f"prompt_token_ids must be a list of integers: {error}.", param="prompt_token_ids") from None
        text = given.get("prompt") if isinstance(given, Mapping) else given
        if not isinstance(text, str):
            raise InvalidRequest(
                f'a prompt is {type(given).__name__}; it must be a string, {{"prompt": text}} or {{"prompt_token_ids": ids}}.',
                param="prompt",
            )
        return EncodedPrompt(text, self.tokenizer.encode(text))

    def read_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> EncodedPrompt:
        """A conversation written by the chat template; options as in `text.chat_template.render_chat`."""
        text = render_chat(self.tokenizer, messages, template_kwargs={"tools": tools, **(chat_template_kwargs or {})}, **options)
        return EncodedPrompt(text, self.tokenizer.encode(text, add_special_tokens=False))

    def check(self, prompt: EncodedPrompt, params: SamplingParams | None, *, priority: int = 0) -> SamplingParams:
        """The parameters as the engine will use them; raises InvalidRequest for what this model cannot serve."""
        chosen = self.default_params if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise InvalidRequest(f"params is {type(params).__name__}; it must be SamplingParams.", param="params")
        return check_request(chosen, prompt.token_ids, self.info, priority=priority)

    def check_embedding(self, prompt: EncodedPrompt, params: PoolingParams | None, *, priority: int = 0) -> PoolingParams:
        """The parameters of an embedding; raises InvalidRequest for what this model cannot serve."""
        chosen = PoolingParams(pooling=self.info.default_pooling) if params is None else params
        if not isinstance(chosen, PoolingParams):
            raise InvalidRequest(f"params is {type(params).__name__}; it must be PoolingParams.", param="params")
        check_embedding(chosen, prompt.token_ids, self.info, priority=priority)
        return chosen

    def params_for_each(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Iterable[SamplingParams]:
        """One set of parameters for each of `count` prompts; raises InvalidRequest when they do not match."""
        if params is None:
            params = self.default_params
        if isinstance(params, SamplingParams):
            return itertools.repeat(params, count)
        each = listed(params, "params")
        if not all(isinstance(one, SamplingParams) for one in each):
            raise InvalidRequest(f"params is {type(params).__name__}; it must be SamplingParams, or a list of them.", param="params")
        if len(each) != count:
            raise InvalidRequest(
                f"there are {count} prompts but {len(each)} sampling parameters; give one for each, or one for all.", param="params"
            )
        return each


def listed(values: Any, name: str) -> list[Any]:
    """Any iterable as a list; raises InvalidRequest for what is none."""
    if not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} is {values!r}; give one of what `LLM` takes there, or a list.", param=name)
    return list(values)
