"""Does a new token end its sequence, and why? Stop strings are not here: they need text (`jaxserve.text`)."""

from __future__ import annotations

from collections.abc import Set

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason, Sequence


def check_stop(sequence: Sequence, eos_token_ids: Set[int]) -> bool:
    """Look at the token just appended; set `finish_reason` and `stop_reason` and return True when it is the last.

    Order: nothing but length stops before `min_tokens`; EOS (stop_reason None), unless ignored; a stop id of the client
    (stop_reason the id); length. Length is checked even before `min_tokens`: the context ends whatever was asked.
    """
    params, token_id = sequence.params, sequence.token_ids[-1]
    if sequence.num_output_tokens >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            sequence.finish_reason = FinishReason.STOP
            return True
        if token_id in params.stop_token_ids:
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, token_id
            return True
    if sequence.num_tokens >= sequence.max_length:
        sequence.finish_reason = FinishReason.LENGTH
        return True
    return False


def masked_stop_ids(params: SamplingParams, eos_token_ids: Set[int]) -> tuple[int, ...]:
    """Ids that may not be sampled before `min_tokens`: the EOS set unless ignored, and the client's stop ids."""
    eos = () if params.ignore_eos else eos_token_ids
    return tuple(sorted({*eos, *params.stop_token_ids}))
