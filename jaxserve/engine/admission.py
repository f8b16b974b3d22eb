"""The checks of a request that depend on the model, made before it reaches the engine.

One function, used by `LLM` and by the front end, so both refuse the same things with the same words. Knows no text: the
prompt is token ids here. What depends on the parameters alone is checked by `core.sampling_params`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import InvalidRequest


def check_request(params: SamplingParams, prompt_token_ids: Sequence[int], info: EngineInfo, *, priority: int = 0) -> SamplingParams:
    """The parameters as the engine will use them; raises InvalidRequest for what this model cannot serve.

    `max_tokens` is clamped to what the context leaves: clients use it as a cap, not as a demand.
    """
    num_prompt = len(prompt_token_ids)
    _check_prompt(prompt_token_ids, info)
    if num_prompt >= info.max_model_len:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens; the context is {info.max_model_len} and an output token must fit: shorten the prompt.",
            param="prompt",
        )
    check_token_ids(params.stop_token_ids, info.vocab_size, "stop_token_ids")
    check_token_ids(list(params.logit_bias), info.vocab_size, "logit_bias")
    _check_logprobs(params.logprobs, "logprobs", info)
    _check_logprobs(params.prompt_logprobs, "prompt_logprobs", info)
    if params.prompt_logprobs is not None and not info.has_prompt_logprobs:
        raise InvalidRequest("prompt_logprobs is not enabled; start with --enable-prompt-logprobs.", param="prompt_logprobs")
    if params.needs_penalty_slot and not info.max_penalty_slots:
        raise InvalidRequest(
            "penalties, logit_bias and min_tokens are disabled by --max-penalty-slots 0; raise it to use them.", param="max_penalty_slots"
        )
    _check_priority(priority, info)
    rest = info.max_model_len - num_prompt
    max_tokens = rest if params.max_tokens is None else min(params.max_tokens, rest)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but at most {max_tokens} tokens can follow a prompt of {num_prompt} tokens.",
            param="min_tokens",
        )
    return params.with_changes(max_tokens=max_tokens)


def check_embedding(params: PoolingParams, prompt_token_ids: Sequence[int], info: EngineInfo, *, priority: int = 0) -> None:
    """Raises InvalidRequest for an embedding that this model, or this engine, cannot serve."""
    if not info.has_embeddings:
        raise InvalidRequest("embeddings are not enabled; start with --enable-embeddings.")
    _check_prompt(prompt_token_ids, info)
    if len(prompt_token_ids) > info.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(prompt_token_ids)} tokens; the context is {info.max_model_len}: shorten the prompt.", param="prompt"
        )
    if params.dimensions is not None and params.dimensions > info.embedding_size:
        raise InvalidRequest(
            f"dimensions is {params.dimensions}; vectors of this model have {info.embedding_size}: ask for at most that.",
            param="dimensions",
        )
    _check_priority(priority, info)


def _check_prompt(prompt_token_ids: Sequence[int], info: EngineInfo) -> None:
    if not prompt_token_ids:
        raise InvalidRequest("the prompt is empty; give at least one token.", param="prompt")
    check_token_ids(prompt_token_ids, info.vocab_size, "prompt")


def _check_priority(priority: int, info: EngineInfo) -> None:
    if priority and info.scheduling_policy != "priority":
        raise InvalidRequest(
            f"priority is {priority}, but the scheduling policy is {info.scheduling_policy}; start with --scheduling-policy priority.",
            param="priority",
        )
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority is {priority}; it must be between -2^31 and 2^31 - 1.", param="priority")


def check_token_ids(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises InvalidRequest for an id that the model does not have."""
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"{name} holds token id {bad}; ids of this model are 0 to {vocab_size - 1}.", param=name)


def _check_logprobs(value: int | None, name: str, info: EngineInfo) -> None:
    has_limit = info.max_logprobs != -1
    if value is None or (value == -1 and not has_limit):
        return
    limit = info.max_logprobs if has_limit else info.vocab_size
    if value == -1 or value > limit:
        given = "the whole vocabulary" if value == -1 else str(value)
        raise InvalidRequest(f"{name} asks for {given}; at most {limit} are allowed (--max-logprobs).", param=name)
