"""The mutable host state of one token stream. A request with n > 1 has n of them.

Holds state only; policy lives in `jaxserve.scheduler`, page ownership in `jaxserve.cache`. Next: `core.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxserve.core.events import Logprobs


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended; the values are what clients read."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream.

    Position ranges, with c = num_computed_tokens and t = len(token_ids):

        [0, num_cached_tokens)   KV found in the prefix cache at the latest admission
        [0, c)                   KV valid, or being written by a dispatched step
        [c, t)                   known tokens still to be computed; plain decode has exactly one
        [num_prompt_tokens, t)   output tokens

    Attributes:
        seq_id: Unique integer inside the engine.
        index: Which of the request's n sequences this is.
        params: The request's parameters; of n sequences each has its own `seed`.
        seed: 64-bit seed of the sequence's random numbers, drawn at creation when the client gave none.
        token_ids: Prompt and output.
        page_tables: One list of page ids for each KV group; entry i holds positions [i * page_size, (i + 1) * page_size).
        num_dropped: For each KV group, leading entries of its table that no token will see any more: they are the null page.
        drop_at: Number of tokens, computed and committed, at which the next page may be dropped.
        attend_at: Number of those from which on a commit has more to do for the sequence than to append a token; 0 is always.
        decodes_until: Number of computed tokens below which the next token needs no new page, and is neither known nor the last; 0 is none.
        page_hashes: Chained hashes of the sequence's full pages, as far as they were needed; the same for every KV group.
        slot: Place in the device's slot state while running, else None.
        penalty_slot: Place in the penalty state while running, when the parameters need one.
        num_cached_tokens: Tokens found in the prefix cache at the first admission (what usage reports).
        rope_length: Sequence length at the latest admission; picks the table of length-dependent RoPE.
        num_pending_tokens: Tokens that dispatched steps sample and that the host does not know yet.
        last_step_id: Latest step that computes tokens of this sequence; -1 before the first.
        started_s: `time.monotonic()` of its first admission, None before.
        prompt_logprobs: When asked: None for the first prompt token, then one entry for each prompt token computed so far.
        pooled: Of an embedding: the sum of the hidden states that count, as far as they were computed and committed.
    """

    seq_id: int
    request: Request
    index: int
    params: SamplingParams
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_length: int
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    page_tables: list[list[int]] = field(default_factory=list)
    num_dropped: list[int] = field(default_factory=list)
    drop_at: int = 0
    attend_at: int = 0
    decodes_until: int = 0
    page_hashes: list[bytes] = field(default_factory=list)
    slot: int | None = None
    penalty_slot: int | None = None
    rope_length: int = 0
    num_pending_tokens: int = 0
    last_step_id: int = -1
    started_s: float | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    pooled: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def num_tokens(self) -> int:
        """Length of prompt and output together."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """True once `finish_reason` is set."""
        return self.status is Status.FINISHED
