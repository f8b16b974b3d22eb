"""Logits to tokens: station 7 of the way of one token, pure functions traced into every step's program.

Order (vLLM's): log-probabilities are of the raw logits; then min_tokens mask and logit_bias; repetition, frequency and presence
penalties; greedy rows take the argmax; the others temperature, min_p, top_k, top_p and one draw (`runner.filters`). Each part
is a `lax.cond` branch, so one program serves every mix of options and costs what its rows ask for: a step of greedy rows alone
reads the logits once and copies none (`runner.logits`). A row's token depends on its own logits, parameters, seed and position only:
not on the batch, the row or the slot. A model's vocabulary may be padded beyond its tokenizer's: such ids are never drawn, but they stay
in log-probabilities and greedy rows, which are what the model says.

Knows nothing of sequences, stop strings or buckets. Next: `jaxserve.runner.step` calls `sample`; the scheduler commits the ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.arrays import PenaltyState, SampledTokens, SlotState
from jaxserve.runner.filters import Filters, draw, first_largest, fold_in, keep_within, largest
from jaxserve.runner.layout import ADMISSION_FLOATS, ADMISSION_INTS
from jaxserve.runner.logits import Logits

PROMPT_TILE = 64
"""Rows of the LM head that prompt log-probabilities hold at once: [64, V] float32 instead of [T, V]."""


class _RowParams(NamedTuple):
    """The sampling parameters of this step's rows."""

    seed: UInt32[Array, "R 2"]
    temperature: Float[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    presence_penalty: Float[Array, "R"]
    frequency_penalty: Float[Array, "R"]
    repetition_penalty: Float[Array, "R"]
    top_k: Int32[Array, "R"]
    min_length: Int32[Array, "R"]
    penalty_slot: Int32[Array, "R"]

    @classmethod
    def read(cls, admission: Int32[Array, "R words"]) -> _RowParams:
        """Of the rows' admissions. A branch reads them itself: what enters it from outside is one array, and computed only if taken."""
        words = {name: admission[:, i] for i, name in enumerate((*ADMISSION_INTS, *ADMISSION_FLOATS))}
        seed = lax.bitcast_convert_type(jnp.stack([words["seed_high"], words["seed_low"]], axis=1), jnp.uint32)
        floats = {name: lax.bitcast_convert_type(words[name], jnp.float32) for name in ADMISSION_FLOATS}
        return cls(seed=seed, **floats, **{name: words[name] for name in ("top_k", "min_length", "penalty_slot")})


def sample(
    logits: Logits,
    slots: SlotState,
    penalties: PenaltyState,
    row_slot: Int32[Array, "R"],
    position: Int32[Array, "R"],
    wants_sample: Bool[Array, "R"],
    *,
    num_logprobs: int,
    full_logprobs: bool,
    wants_logprobs: Bool[Array, ""],
    num_token_ids: int | None = None,
) -> tuple[SampledTokens, PenaltyState]:
    """One token for each row, and the penalty state with it counted.

    Args:
        logits: Of R rows; untouched output of the LM head.
        slots, penalties: State by slot; `penalties` is donated by the caller and updated in place.
        row_slot: Slot of each row, the null slot for padding.
        position: Position the sampled token will have in its sequence; folds into the random key and gates min_tokens.
        wants_sample: False for padding and for rows whose prompt is not finished; their outputs mean nothing.
        num_logprobs: Static; most likely tokens reported for each row.
        full_logprobs: Static; report the whole vocabulary, in vocabulary order, instead.
        wants_logprobs: Scalar; when False the log-probability outputs are zeros and cost nothing.
        num_token_ids: Static; only ids below it are drawn. None is the whole vocabulary.

    Returns:
        `SampledTokens`; token_id is -1 where a row's largest logit is not finite (NaN, +inf, or nothing but -inf).
    """
    admission = slots.admission[row_slot]
    params = _RowParams.read(admission)
    null_slot = penalties.output_counts.shape[0] - 1
    has_penalty = wants_sample & (params.penalty_slot != null_slot)
    is_random = wants_sample & (params.temperature > 0)
    k = logits.vocab_size if full_logprobs else min(num_logprobs, logits.vocab_size)

    def by_rows() -> SampledTokens:
        rows = logits.rows()
        adjusted = lax.cond(jnp.any(has_penalty), lambda: _adjust(rows, admission, penalties, position), lambda: rows)
        token_id = _choose(adjusted, admission, position, is_random, num_token_ids or logits.vocab_size)
        return lax.cond(
            wants_logprobs,
            lambda: _with_logprobs(rows, token_id, k, full_logprobs),
            lambda: _without_logprobs(token_id, k),
        )

    def by_largest() -> SampledTokens:
        best, token_id = logits.largest()
        return _without_logprobs(jnp.where(jnp.isfinite(best), token_id, -1), k)

    # Of state and inputs that are equal on every device: all take the same branch, in which they wait for each other.
    needs_rows = jnp.any(has_penalty | is_random) | wants_logprobs
    sampled = lax.cond(needs_rows, by_rows, by_largest)
    token_id = sampled.token_id
    counted_slot = jnp.where(has_penalty & (token_id >= 0), params.penalty_slot, null_slot + 1)  # out of bounds is dropped
    counts = penalties.output_counts.at[counted_slot, token_id].add(1, mode="drop")
    return sampled, penalties._replace(output_counts=counts)


def prompt_logprobs(
    logits_fn: Callable[[Float[Array, "M D"]], Logits],
    hidden: Float[Array, "T D"],
    targets: Int32[Array, "T"],
    *,
    num_logprobs: int,
    full_logprobs: bool,
) -> SampledTokens:
    """Log-probabilities of known tokens: entry t describes `targets[t]` under the logits of `hidden[t]`.

    The head runs over tiles of 64 rows, so the temporaries are [64, V] whatever T is.

    Args:
        logits_fn: The LM head, hidden rows to logits.
        hidden: Final hidden states of the step's tokens.
        targets: The token that follows each one; any id below V where nothing is wanted.
        num_logprobs, full_logprobs: As for `sample`.

    Returns:
        `SampledTokens` with the targets as token_id, -1 where the logits were not finite.
    """
    num_tokens = targets.shape[0]
    tile = min(PROMPT_TILE, num_tokens)
    padding = -num_tokens % tile

    def one_tile(args: tuple[jax.Array, jax.Array]) -> SampledTokens:
        rows, token_id = args
        logits = logits_fn(rows).rows()
        k = logits.shape[1] if full_logprobs else min(num_logprobs, logits.shape[1])
        token_id = jnp.where(jnp.isfinite(first_largest(logits)[0]), token_id, -1)
        return _with_logprobs(logits, token_id, k, full_logprobs)

    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, tile, hidden.shape[1])
    described = lax.map(one_tile, (hidden, jnp.pad(targets, (0, padding)).reshape(-1, tile)))
    return SampledTokens(*(leaf.reshape(-1, *leaf.shape[2:])[:num_tokens] for leaf in described))


def _adjust(logits: jax.Array, admission: jax.Array, penalties: PenaltyState, position: jax.Array) -> jax.Array:
    """min_tokens mask, logit_bias, then repetition, frequency and presence penalties.

    The null penalty slot's row is all zeros, which leaves rows without penalties as they are.
    """
    params = _RowParams.read(admission)
    slot = params.penalty_slot
    counts = penalties.output_counts[slot]
    is_masked = penalties.is_stop[slot] & (position < params.min_length)[:, None]
    logits = jnp.where(is_masked, -jnp.inf, logits + penalties.logit_bias[slot])
    repetition = jnp.where((counts > 0) | penalties.is_in_prompt[slot], params.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - params.frequency_penalty[:, None] * counts
    return logits - params.presence_penalty[:, None] * (counts > 0)


def _choose(logits: jax.Array, admission: jax.Array, position: jax.Array, is_random: jax.Array, num_token_ids: int) -> jax.Array:
    """Greedy token, or a draw from ids below `num_token_ids` where `is_random`; -1 where the largest logit is not finite."""
    best, greedy = first_largest(logits)
    is_finite = jnp.isfinite(best)
    is_random = is_random & is_finite

    def random() -> jax.Array:
        params = _RowParams.read(admission)
        has_filter = is_random & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
        temperature = jnp.where(is_random, params.temperature, 1.0)
        drawable, top = logits, best
        if num_token_ids < logits.shape[1]:
            drawable = jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, 1) < num_token_ids, logits, -jnp.inf)
            top = jnp.max(drawable, axis=-1)
        below_best = (top[:, None] - drawable) / temperature[:, None]
        bound = lax.cond(
            jnp.any(has_filter),
            lambda: keep_within(below_best, Filters(params.top_k, params.top_p, params.min_p), has_filter),
            lambda: jnp.full_like(best, jnp.inf),
        )
        drawn = jnp.where(jnp.isfinite(top), draw(below_best, bound, fold_in(params.seed, position)), -1)
        return jnp.where(is_random, drawn, greedy)

    token_id = lax.cond(jnp.any(is_random), random, lambda: greedy)
    return jnp.where(is_finite, token_id, -1)


def _with_logprobs(logits: jax.Array, token_id: jax.Array, k: int, full_logprobs: bool) -> SampledTokens:
    chosen = jnp.take_along_axis(logits, jnp.maximum(token_id, 0)[:, None], axis=1, mode="promise_in_bounds")
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.float32).astype(jnp.int32)  # exact below 2^24; see `filters.first_true`
    best = jnp.max(logits, axis=-1, keepdims=True)
    normalizer = best + jnp.log(jnp.sum(jnp.exp(logits - best), axis=-1, keepdims=True))
    if full_logprobs:
        top_ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        return SampledTokens(token_id, (chosen - normalizer)[:, 0], rank, top_ids, logits - normalizer)
    values, top_ids = largest(logits, k)
    return SampledTokens(token_id, (chosen - normalizer)[:, 0], rank, top_ids, values - normalizer)


def _without_logprobs(token_id: jax.Array, k: int) -> SampledTokens:
    num_rows = token_id.shape[0]
    none = jnp.zeros((num_rows,), jnp.float32)
    top_ids = jnp.zeros((num_rows, k), jnp.int32)
    return SampledTokens(token_id, none, jnp.zeros_like(token_id), top_ids, jnp.zeros((num_rows, k), jnp.float32))
