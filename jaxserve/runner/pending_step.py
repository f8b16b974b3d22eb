"""A dispatched step: its arrays are on their way to the host; `wait` makes them the `StepResult` that the scheduler commits.

The reading half, `step_result`, is NumPy alone. Dispatching is in `runner.runner`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.arrays import SampledTokens
from jaxserve.core.buckets import Bucket
from jaxserve.core.events import Logprobs, StepResult
from jaxserve.core.plan import Plan
from jaxserve.runner.step import StepOutputs

_TILE_ROWS = 64
"""Rows whose log-probabilities are sorted together; bounds the copy where each row is a whole vocabulary."""


@dataclasses.dataclass(frozen=True, slots=True)
class PendingModelStep:
    """A dispatched step whose outputs are on their way to the host."""

    plan: Plan
    bucket: Bucket
    outputs: StepOutputs
    wants_logprobs: bool

    def __post_init__(self) -> None:
        for array in self._arrays_to_copy():
            array.copy_to_host_async()

    def wait(self) -> StepResult:
        """Blocks until the tokens are here; raises what the device raised."""
        outputs = self.outputs
        token_ids = np.asarray(outputs.sampled.token_id)
        sampled = _on_host(outputs.sampled) if self.wants_logprobs else None
        prompt = None if outputs.prompt is None else _on_host(outputs.prompt)
        result = step_result(self.plan, self.bucket, token_ids, sampled, prompt)
        if outputs.pooled is not None:
            result.pooled = np.asarray(outputs.pooled)
        return result

    def _arrays_to_copy(self) -> list[jax.Array]:
        outputs = self.outputs
        arrays = list(outputs.sampled) if self.wants_logprobs else [outputs.sampled.token_id]
        arrays += list(outputs.prompt or ())
        return arrays if outputs.pooled is None else [*arrays, outputs.pooled]


class HostTokens(NamedTuple):
    """`SampledTokens` as NumPy arrays."""

    token_id: np.ndarray
    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def step_result(plan: Plan, bucket: Bucket, token_ids: np.ndarray, sampled: HostTokens | None, prompt: HostTokens | None) -> StepResult:
    """The step's outputs in the order of the plan's rows.

    Args:
        token_ids: One for each logits row.
        sampled: The same rows with log-probabilities, None when no row asked.
        prompt: One for each of the step's tokens, None when no row asked.
    """
    rows = plan.rows
    num_rows = len(rows)
    sampled_rows = [i for i, row in enumerate(rows) if row.is_sampled]
    # In a decode bucket the logits rows are the rows themselves, in a mixed one the sampled rows.
    logits_rows: Sequence[int] = sampled_rows if bucket.is_decode else range(len(sampled_rows))
    values = token_ids.tolist()
    if len(sampled_rows) == num_rows:
        tokens = values[:num_rows]
    else:
        tokens = [None] * num_rows
        for i, row in zip(sampled_rows, logits_rows, strict=True):
            tokens[i] = values[row]
    logprobs: list[Logprobs | None] = [None] * num_rows
    if sampled is not None:
        asked = [(i, row, count) for i, row in zip(sampled_rows, logits_rows, strict=True) if (count := rows[i].num_logprobs) is not None]
        entries = _logprobs_at(sampled, [row for _, row, _ in asked], [count for _, _, count in asked])
        for (i, _, _), entry in zip(asked, entries, strict=True):
            logprobs[i] = entry
    return StepResult(token_ids=tokens, logprobs=logprobs, prompt_logprobs=_prompt_logprobs(plan, prompt))


def _prompt_logprobs(plan: Plan, prompt: HostTokens | None) -> list[list[Logprobs] | None]:
    result: list[list[Logprobs] | None] = [None] * len(plan.rows)
    if prompt is None:
        return result
    first = 0
    for i, row in enumerate(plan.rows):
        if row.num_prompt_logprobs is not None:
            positions = [first + t for t, target in enumerate(row.prompt_targets) if target >= 0]
            result[i] = _logprobs_at(prompt, positions, [row.num_prompt_logprobs] * len(positions))
        first += row.num_tokens
    return result


def _logprobs_at(tokens: HostTokens, rows: list[int], counts: list[int]) -> list[Logprobs]:
    """Some rows as plain values, best first; a count of -1 is the whole vocabulary."""
    entries = []
    for first in range(0, len(rows), _TILE_ROWS):
        tile, tile_counts = rows[first : first + _TILE_ROWS], counts[first : first + _TILE_ROWS]
        top_logprobs = tokens.top_logprobs[tile]
        # A stable sort leaves `top_k` results as they are and orders a whole vocabulary.
        best = np.argsort(-top_logprobs, axis=1, kind="stable")
        if min(tile_counts) >= 0:
            best = best[:, : max(tile_counts)]
        columns = (
            tokens.token_id[tile],
            tokens.logprob[tile],
            tokens.rank[tile],
            np.take_along_axis(tokens.top_ids[tile], best, 1),
            np.take_along_axis(top_logprobs, best, 1),
        )
        for count, token_id, logprob, rank, ids, values in zip(tile_counts, *(column.tolist() for column in columns), strict=True):
            end = None if count < 0 else count
            entries.append(Logprobs(token_id, logprob, rank, ids[:end], values[:end]))
    return entries


def _on_host(sampled: SampledTokens) -> HostTokens:
    return HostTokens(*(np.asarray(array) for array in sampled))
