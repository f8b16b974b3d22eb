"""What one step will do, as host integers: the scheduler writes it, the runner obeys it.

A Plan is serializable and deterministic: another host that replays the same Plans reaches the same device state. It holds
nothing about padding; `core.buckets` picks the program and `runner.prepare` pads. Next: `core.events`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxserve.core.sampling_params import SamplingParams


class PageWrite(NamedTuple):
    """One changed entry of a slot's page table: `page_tables[slot, group, index] = page`."""

    slot: int
    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence takes a slot (first admission or resume after preemption): everything the device must know of it.

    Attributes:
        num_computed_tokens: KV positions already valid (prefix hit); the slot's length starts here.
        num_prompt_tokens: Length of the prompt; with `params.min_tokens` it says from where on EOS may be sampled.
        penalty_slot: None unless `params.needs_penalty_slot`.
        rope_length: See `Sequence.rope_length`.
        token_ids: All tokens so far, only when `penalty_slot` is set (fills counts and prompt mask), else empty.
        stop_token_ids: EOS set (unless ignored) and user stop ids, masked until `min_tokens`; only with a penalty slot.
    """

    slot: int
    seq_id: int
    params: SamplingParams
    seed: int
    num_computed_tokens: int
    num_prompt_tokens: int
    rope_length: int
    penalty_slot: int | None = None
    token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class Row(NamedTuple):
    """One sequence's part of a step.

    Attributes:
        start: Position of the first token computed; equals the slot's length on the device.
        num_tokens: Tokens computed, at least 1.
        token_ids: The tokens, or () when the single token is the slot's last sampled one (it may exist only on the device).
        is_sampled: True when the row reaches the sequence's last known token, so that a new one is sampled.
        num_logprobs: None, or how many top log-probabilities to return for the sampled token (-1 whole vocabulary).
        num_prompt_logprobs: None, or the same for the prompt tokens of this chunk.
        prompt_targets: With num_prompt_logprobs: for each computed position the token that follows it in the prompt
            (-1 after the prompt's end).
        num_pooled_tokens: Of an embedding: the hidden states of so many last tokens of the row are wanted, as their sum.
    """

    seq_id: int
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    is_sampled: bool
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    prompt_targets: tuple[int, ...] = ()
    num_pooled_tokens: int = 0


@dataclass(frozen=True, kw_only=True)  # without slots, so that its sums can be kept
class Plan:
    """One step. Admissions and page writes are applied before the rows are computed.

    Rows with one token come first, then the longer ones, so kernels can treat the two parts apart.
    """

    step_id: int
    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    page_writes: tuple[PageWrite, ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum([row.num_tokens for row in self.rows])

    @cached_property
    def num_sampled(self) -> int:
        """Rows that sample a token."""
        return sum([row.is_sampled for row in self.rows])
