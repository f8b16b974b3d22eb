"""What one call may ask for, beyond what the model allows (`engine.admission`): refused before any work is done for it.

Pure functions; each names what was given, the limit and what to change. Next: `service`, which asks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.link_codec import FEW_LOGPROBS
from jaxserve.errors import InvalidRequest

MAX_SEQUENCES_PER_CALL = 1024
"""Prompts times n of one call."""
MAX_LABEL_CHARS = 256
"""Of the name that a client gives its call in the body."""
MAX_MANY_LOGPROBS = 2**21
"""Log-probabilities in one call that asks for more than FEW_LOGPROBS for a token: seconds of work to write down."""


def check_num_sequences(num_prompts: int, n: int = 1) -> None:
    """Raises InvalidRequest when one call asks for too many; made first of all, so that a list of a million prompts costs nothing."""
    if num_prompts * n > MAX_SEQUENCES_PER_CALL:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences; one call may have {MAX_SEQUENCES_PER_CALL}.",
            param="prompt" if n == 1 else "n",
        )


def check_admissible(num_prompts: int, n: int, info: EngineInfo, num_engines: int = 1) -> None:
    """Raises InvalidRequest for a call that would find too little room even in idle engines; the n of one prompt share an engine."""
    limit = info.max_waiting + info.max_num_seqs
    num_most = n if n > limit else num_prompts * n
    num_takers = 1 if n > limit else num_engines
    if info.max_waiting and num_most > num_takers * limit:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences; this server takes {num_takers * limit} at once"
            f"{' of one prompt' if num_takers < num_engines else ''} ({num_takers * info.max_num_seqs} "
            f"running, {num_takers * info.max_waiting} waiting): ask for fewer, or start it with a larger --max-waiting.",
            param="prompt" if n == 1 else "n",
        )


def check_label(label: str) -> None:
    """Raises InvalidRequest for a name that is too long: every chunk of an answer repeats it, and every log line."""
    if len(label) > MAX_LABEL_CHARS:
        raise InvalidRequest(f"request_id has {len(label)} characters; it may have {MAX_LABEL_CHARS}.", param="request_id")


def check_num_logprobs(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], vocab_size: int) -> None:
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


def shorter_timeout(timeout_s: float | None, limit_s: float | None) -> float | None:
    """The smaller of what a call asks for and what the server allows; None is no limit. Raises InvalidRequest."""
    if timeout_s is None:
        return limit_s
    if not 0 < timeout_s < math.inf:
        raise InvalidRequest(f"timeout is {timeout_s}; it must be a number of seconds above 0.", param="timeout")
    return timeout_s if limit_s is None else min(timeout_s, limit_s)
