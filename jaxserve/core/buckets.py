"""The padded sizes that own one compiled program each. Padding every step to one of them is why nothing compiles after warm-up.

Two families from one traced function: a *decode* bucket has one token for each row; a *mixed* bucket has T ragged tokens.
Warm-up compiles exactly `Buckets.all()`. Used by the scheduler (to trim chunks), `runner.prepare` (to pad) and `runner.compile`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.core.plan import Plan

SMALL_LOGITS_ROWS = 8
MIN_DECODE_ROWS = 2
"""XLA multiplies a single bfloat16 row on CPU by a slow path, so one row is padded to two."""


class Bucket(NamedTuple):
    """One program's shape.

    Attributes:
        tokens: T, packed tokens.
        rows: B, sequences.
        logits_rows: R, rows that the LM head and the sampler run on.
        is_decode: Every row has one token; R = B = T.
        has_prompt_logprobs: The head also runs on every token (only where enabled by flag).
        has_pooling: Hidden states are also summed for each row (likewise).
    """

    tokens: int
    rows: int
    logits_rows: int
    is_decode: bool
    has_prompt_logprobs: bool = False
    has_pooling: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """The ladders: ascending row counts of decode steps and token counts of mixed steps.

    The largest decode bucket holds `max_num_seqs` rows; the largest mixed bucket holds the whole token budget.
    """

    max_num_seqs: int
    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    has_prompt_logprobs: bool = False
    has_pooling: bool = False

    @classmethod
    def build(
        cls, *, max_num_seqs: int, max_num_tokens: int, has_prompt_logprobs: bool = False, has_pooling: bool = False, ratio: int = 4
    ) -> Buckets:
        """Powers of two for decode; every `ratio`-fold for mixed, from 16 up to the budget."""
        decode = [MIN_DECODE_ROWS]
        while decode[-1] < max_num_seqs:
            decode.append(min(decode[-1] * 2, max(max_num_seqs, MIN_DECODE_ROWS)))
        mixed = [max_num_tokens]
        while mixed[-1] > 16 and (smaller := max(16, -(-mixed[-1] // ratio))) < mixed[-1]:
            mixed.append(smaller)
        return cls(max_num_seqs, tuple(decode), tuple(sorted(mixed)), has_prompt_logprobs, has_pooling)

    @property
    def max_num_tokens(self) -> int:
        """The largest step that fits."""
        return self.mixed_tokens[-1]

    def choose(self, plan: Plan) -> Bucket:
        """The smallest bucket that holds the plan's rows, tokens and sampled rows."""
        wants_prompt = self.has_prompt_logprobs and any(row.num_prompt_logprobs is not None for row in plan.rows)
        wants_pooling = self.has_pooling and any(row.num_pooled_tokens for row in plan.rows)
        if not wants_prompt and not wants_pooling and (not plan.rows or plan.rows[-1].num_tokens == 1):  # longer rows come last
            rows = _at_least(self.decode_rows, len(plan.rows))
            return Bucket(rows, rows, rows, is_decode=True)
        tokens = _at_least(self.mixed_tokens, plan.num_tokens)
        rows = self._rows_of(tokens)
        if wants_prompt or wants_pooling:
            # Those for prompt log-probabilities pool too, where both are enabled: a step may need both.
            return Bucket(tokens, rows, rows, is_decode=False, has_prompt_logprobs=wants_prompt, has_pooling=self.has_pooling)
        small = min(SMALL_LOGITS_ROWS, rows)
        return Bucket(tokens, rows, small if plan.num_sampled <= small else rows, is_decode=False)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket that warm-up compiles, small ones first."""
        buckets = [Bucket(rows, rows, rows, is_decode=True) for rows in self.decode_rows]
        for tokens in self.mixed_tokens:
            rows = self._rows_of(tokens)
            logits_rows = sorted({min(SMALL_LOGITS_ROWS, rows), rows})
            buckets += [Bucket(tokens, rows, size, is_decode=False) for size in logits_rows]
        for is_enabled, has_prompt in ((self.has_prompt_logprobs, True), (self.has_pooling, False)):
            for tokens in self.mixed_tokens if is_enabled else ():
                rows = self._rows_of(tokens)
                buckets.append(Bucket(tokens, rows, rows, is_decode=False, has_prompt_logprobs=has_prompt, has_pooling=self.has_pooling))
        return tuple(buckets)

    def boundary_below(self, num_tokens: int) -> int:
        """The largest mixed token count not above `num_tokens`, or 0: where a chunk may be trimmed to."""
        i = bisect_left(self.mixed_tokens, num_tokens + 1)
        return self.mixed_tokens[i - 1] if i else 0

    def _rows_of(self, tokens: int) -> int:
        # One more row bucket than needed would cost a program for each; the rows' own arrays are small.
        return max(MIN_DECODE_ROWS, min(tokens, self.max_num_seqs))


def _at_least(ladder: tuple[int, ...], size: int) -> int:
    i = bisect_left(ladder, size)
    if i == len(ladder):
        raise AssertionError(f"a step of size {size} is above the largest bucket {ladder[-1]}")
    return ladder[i]
