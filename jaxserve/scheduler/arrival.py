"""A request arrives: refuse what can never fit, else make its sequences.

Knows the limits, not the load: what is accepted here will run sooner or later. Next: `scheduler.scheduler`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from jaxserve.config import SchedulerLimits
from jaxserve.core.page_counts import longest_fit
from jaxserve.core.request import Request
from jaxserve.core.sequence import Sequence
from jaxserve.errors import InvalidRequest

_SEED_MASK = (1 << 64) - 1


def longest_sequence(limits: SchedulerLimits) -> int:
    """Most tokens, prompt and output together, that one sequence may reach: the context, or all pages when those are fewer.

    The last token of a sequence is sampled but never computed, so it needs no place in a page.
    """
    return min(limits.max_model_len, _num_kv_tokens(limits) + 1)


def check_arrival(request: Request, limits: SchedulerLimits) -> None:
    """Raise `InvalidRequest` for what can never be scheduled, whatever else is running."""
    length, is_embedding = len(request.prompt_token_ids), request.pooling is not None
    if length == 0:
        raise InvalidRequest("the prompt is empty; give at least one token.", param="prompt")
    num_kv_tokens = _num_kv_tokens(limits)
    if length > min(limits.max_model_len - (not is_embedding), num_kv_tokens):
        if limits.max_model_len <= num_kv_tokens + (not is_embedding):
            together = "" if is_embedding else ", prompt and output together"
            limit, remedy = f"the context is {limits.max_model_len} tokens{together}", "raise --max-model-len"
        else:
            limit = f"all {limits.num_pages - 1} KV pages together hold {num_kv_tokens} tokens"
            remedy = "give the KV pages more memory (--kv-cache-memory-bytes)"
        raise InvalidRequest(f"the prompt has {length} tokens, but {limit}; shorten the prompt or {remedy}.", param="prompt")
    if request.priority and limits.scheduling_policy != "priority":
        raise InvalidRequest(
            f"priority is {request.priority}, but requests run in order of arrival; leave it out or start with "
            "--scheduling-policy priority.",
            param="priority",
        )
    if request.params.needs_penalty_slot and limits.max_penalty_slots == 0:
        raise InvalidRequest(
            "penalties, logit_bias and min_tokens are off here (--max-penalty-slots 0); leave them out or raise it.", param="logit_bias"
        )


def make_sequences(request: Request, limits: SchedulerLimits, seq_ids: Iterator[int]) -> list[Sequence]:
    """The request's n sequences. Sequence i has seed + i; without a seed the first is drawn afresh for each request."""
    params = request.params
    seed = secrets.randbits(64) if params.seed is None else params.seed
    length, max_length = len(request.prompt_token_ids), longest_sequence(limits)
    if request.pooling is not None:
        max_length = length + 1  # nothing is scheduled behind the prompt
    elif params.max_tokens is not None:
        max_length = min(max_length, length + params.max_tokens)
    return [
        Sequence(
            seq_id=next(seq_ids),
            request=request,
            index=index,
            params=params,
            seed=(seed + index) & _SEED_MASK,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=length,
            max_length=max_length,
            page_tables=[[] for _ in range(limits.num_groups)],
            num_dropped=[0] * limits.num_groups,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        for index in range(params.n)
    ]


def _num_kv_tokens(limits: SchedulerLimits) -> int:
    """Positions of one sequence that all pages hold, as far as the context goes."""
    return longest_fit(
        limits.groups, limits.num_pages - 1, max_chunk=limits.max_chunk, page_size=limits.page_size, max_length=limits.max_model_len
    )
