"""The sampler against brute-force NumPy: distributions, order, penalties, equality across batches, log-probabilities, HLO."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.arrays import PenaltyState, SampledTokens, SlotState
from jaxserve.runner import filters
from jaxserve.runner.layout import ADMISSION_FLOATS, ADMISSION_INTS, ADMISSION_WORDS
from jaxserve.runner.logits import Logits
from jaxserve.runner.sampling import prompt_logprobs, sample

NUM_ROWS = 8
VOCAB = 500
NUM_DRAWS = 20_000
NUM_SLOTS = 9
NULL_SLOT = NUM_SLOTS - 1
NUM_PENALTY_SLOTS = 5
NULL_PENALTY = NUM_PENALTY_SLOTS - 1
DEFAULTS: dict[str, Any] = {
    "seed": (0, 0), "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "min_length": 0, "penalty_slot": NULL_PENALTY,
}  # fmt: skip


def make_slots(*rows: dict[str, Any], num_slots: int = NUM_SLOTS) -> SlotState:
    """Slot i has the parameters of rows[i]; the others are greedy."""
    words = np.zeros((num_slots, ADMISSION_WORDS), np.int32)
    for i in range(num_slots):
        params = DEFAULTS | (rows[i] if i < len(rows) else {})
        ints = params | dict(zip(("seed_high", "seed_low"), params["seed"], strict=True))
        words[i, : len(ADMISSION_INTS)] = np.asarray([ints.get(name, 0) for name in ADMISSION_INTS], np.uint32).view(np.int32)
        words[i, len(ADMISSION_INTS) :] = np.asarray([params[name] for name in ADMISSION_FLOATS], np.float32).view(np.int32)
    zeros = jnp.zeros((num_slots,), jnp.int32)
    return SlotState(last_token=zeros, length=zeros, page_tables=jnp.zeros((num_slots, 1, 2), jnp.int32), admission=jnp.asarray(words))


def make_penalties(vocab: int) -> PenaltyState:
    shape = (NUM_PENALTY_SLOTS, vocab)
    return PenaltyState(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))


@cache
def compiled_sample(full_logprobs: bool, num_token_ids: int | None = None) -> Any:
    def run(logits: Any, slots: Any, penalties: Any, row_slot: Any, position: Any, wants_sample: Any, wants_logprobs: Any) -> Any:
        return sample(
            Logits(logits, logits.shape[1]), slots, penalties, row_slot, position, wants_sample,
            num_logprobs=20, full_logprobs=full_logprobs, wants_logprobs=wants_logprobs, num_token_ids=num_token_ids,
        )  # fmt: skip

    return jax.jit(run)


def run_sample(
    logits: np.ndarray, slots: SlotState, penalties: PenaltyState | None = None, *, row_slot: Any = None, position: Any = None,
    wants: Any = None, logprobs: bool = False, full: bool = False, pad_to: int = NUM_ROWS, num_token_ids: int | None = None,
) -> tuple[SampledTokens, PenaltyState]:  # fmt: skip
    """One call; rows are padded to a multiple of `pad_to`, so that the tests share few compiled programs."""
    num_rows, vocab = logits.shape
    padding = -num_rows % pad_to
    row_slot = np.arange(num_rows) if row_slot is None else row_slot
    position = np.full(num_rows, 10) if position is None else position
    wants = np.ones(num_rows, bool) if wants is None else wants
    sampled, penalties = compiled_sample(full, num_token_ids)(
        jnp.asarray(np.pad(logits, ((0, padding), (0, 0))), jnp.float32), slots, penalties or make_penalties(vocab),
        jnp.asarray(np.pad(row_slot, (0, padding), constant_values=NULL_SLOT), jnp.int32),
        jnp.asarray(np.pad(position, (0, padding)), jnp.int32), jnp.asarray(np.pad(wants, (0, padding))), jnp.asarray(logprobs),
    )  # fmt: skip
    return SampledTokens(*(leaf[:num_rows] for leaf in sampled)), penalties


def kept_probabilities(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """The filtered distribution in float64, by sorting; tokens equal to the last one kept are kept."""
    probability = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    probability[probability < min_p * probability.max()] = 0
    if top_k:
        probability[probability < np.sort(probability)[::-1][min(top_k, len(probability)) - 1]] = 0
    if top_p < 1:
        descending = np.sort(probability)[::-1]
        last = np.argmax(np.cumsum(descending) >= top_p * probability.sum())
        probability[probability < descending[last]] = 0
    return probability / probability.sum()


def chi_square_limit(degrees: int) -> float:
    """About the 1 - 1e-6 quantile of the chi-square distribution (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * np.sqrt(2 / (9 * degrees))) ** 3


def draw_many(logits: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """Tokens of one row at NUM_DRAWS positions: one call, the same slot in every row."""
    slots = make_slots({**params, "seed": (1, 99)})
    padded = np.pad(logits, (0, VOCAB - len(logits)), constant_values=-np.inf)
    rows = np.broadcast_to(padded, (NUM_DRAWS, VOCAB))
    sampled, _ = run_sample(rows, slots, row_slot=np.zeros(NUM_DRAWS, int), position=np.arange(NUM_DRAWS))
    return np.asarray(sampled.token_id)


DISTRIBUTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 2.0, "top_p": 0.97},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.6, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    logits = (np.random.default_rng(3).normal(size=301) * 1.5).astype(np.float32)
    expected = kept_probabilities(logits, **params)
    counts = np.bincount(draw_many(logits, params), minlength=301)
    assert not counts[expected == 0].any(), "a token that the filters remove was drawn"
    common = expected * NUM_DRAWS >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * NUM_DRAWS
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < chi_square_limit(len(wanted) - 1)


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_kept_sets_are_exact(spread: float, is_rounded: bool) -> None:
    # Rounded logits have many ties, also at the boundary; a small spread makes kept sets larger than the list of nearest.
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(24, 3000)) * spread
    logits = (np.round(logits, 1) if is_rounded else logits).astype(np.float32)
    top_k = generator.choice([0, 1, 2, 63, 64, 65, 500, 2999, 3000, 5000], size=24)
    top_p = generator.choice([1.0, 0.05, 0.5, 0.9, 0.999], size=24)
    min_p = generator.choice([0.0, 0.01, 0.3], size=24)
    below_best = logits.max(-1, keepdims=True) - logits
    has_filter = (top_k > 0) | (top_p < 1) | (min_p > 0)
    chosen = filters.Filters(jnp.asarray(top_k), jnp.asarray(top_p, jnp.float32), jnp.asarray(min_p, jnp.float32))
    bound = np.asarray(jax.jit(filters.keep_within)(jnp.asarray(below_best), chosen, jnp.asarray(has_filter)))
    for row in range(24):
        expected = kept_probabilities(logits[row], 1.0, top_k[row], top_p[row], min_p[row])
        kept = (below_best[row] <= bound[row]).sum()
        # Float32 sums may put the end of a nucleus one distinct value away from the float64 one.
        assert abs(kept - (expected > 0).sum()) <= (1 if top_p[row] < 1 and not is_rounded else 0), (row, top_k[row], top_p[row])


def test_top_p_is_taken_over_what_top_k_kept() -> None:
    # Probabilities .4 .2 .2 .1 .1: top_k=2 renormalizes to .67 .33, so top_p=.6 keeps only the first; top_p alone keeps two.
    logits = np.log(np.array([0.4, 0.21, 0.19, 0.1, 0.1], np.float32))
    assert set(draw_many(logits, {"temperature": 1.0, "top_k": 2, "top_p": 0.6})) == {0}
    assert set(draw_many(logits, {"temperature": 1.0, "top_p": 0.6})) == {0, 1}
    # Temperature comes first: at 2 the best has .63 of two tokens' mass less, so the same top_p needs both.
    assert set(draw_many(logits, {"temperature": 2.0, "top_k": 2, "top_p": 0.6})) == {0, 1}


def test_ties_at_the_boundary_are_all_kept() -> None:
    logits = np.array([0.0, 1.0, 1.0, 1.0, -1.0], np.float32)
    assert set(draw_many(logits, {"temperature": 1.0, "top_k": 2})) == {1, 2, 3}
    assert set(draw_many(logits, {"temperature": 1.0, "top_p": 0.1})) == {1, 2, 3}
    assert set(draw_many(logits, {"temperature": 1.0, "min_p": 1.0})) == {1, 2, 3}


def make_keys(count: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 2**32, size=(count, 2), dtype=np.uint32))


def test_a_token_of_no_probability_is_never_drawn() -> None:
    below_best = jnp.full((1000, 300), jnp.inf).at[:, 137].set(0.0).at[:, 5].set(60.0)
    tokens = jax.jit(filters.draw)(below_best, jnp.full((1000,), jnp.inf), make_keys(1000))
    assert set(np.asarray(tokens)) == {137}
    assert set(np.asarray(jax.jit(filters.draw)(below_best - 100.0, jnp.full((1000,), -50.0), make_keys(1000)))) == {137}


def test_keys_are_those_of_fold_in() -> None:
    seeds = make_keys(100)
    folded = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seeds, impl="threefry2x32"), jnp.arange(100))
    np.testing.assert_array_equal(filters.fold_in(seeds, jnp.arange(100)), jax.random.key_data(folded))


def test_race_times_are_exponential_and_independent() -> None:
    times = np.asarray(filters._exponentials(make_keys(2000), (2000, 100)))
    assert times.min() > 0
    uniform = np.exp(-times)
    counts = np.bincount((uniform.ravel() * 100).astype(int), minlength=100)
    assert ((counts - 2000) ** 2 / 2000).sum() < chi_square_limit(99)
    for other in (np.roll(uniform, 1, axis=0), np.roll(uniform, 1, axis=1)):
        assert abs(np.corrcoef(uniform.ravel(), other.ravel())[0, 1]) < 0.012
    # Adjacent keys, as seed and seed + 1 or two positions could be, give unrelated rows.
    near = jnp.stack([jnp.zeros(2000, jnp.uint32), jnp.arange(2000, dtype=jnp.uint32)], axis=1)
    rows = np.exp(-np.asarray(filters._exponentials(near, (2000, 100))))
    assert abs(np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]) < 0.012
    winners = np.bincount(rows.argmax(axis=1), minlength=100)
    assert ((winners - 20) ** 2 / 20).sum() < chi_square_limit(99)


def test_tokens_do_not_depend_on_the_batch() -> None:
    # Six very different sequences, alone and together, in other rows and slots, among padding and other options.
    logits = np.random.default_rng(7).normal(size=(6, 500)).astype(np.float32) * 2
    params = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 70},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 1.0, "presence_penalty": 1.5, "penalty_slot": 2},
    ]
    params = [{**row, "seed": (i, 1000 + i)} for i, row in enumerate(params)]
    position = np.array([3, 14, 15, 92, 65, 35])
    alone = []
    for i in range(6):
        padded = np.stack([logits[i], np.zeros(500, np.float32)])
        sampled, _ = run_sample(
            padded, make_slots(params[i]), row_slot=[0, NULL_SLOT], position=[position[i], 0], wants=[True, False], pad_to=2
        )  # fmt: skip
        alone.append(int(sampled.token_id[0]))
    order = np.array([4, 0, 5, 2, 1, 3])
    slots = make_slots(*(params[i] for i in (3, 2, 1, 0, 5, 4)))
    slot_of = np.array([3, 2, 1, 0, 5, 4])
    garbage = np.full((2, 500), np.nan, np.float32)
    sampled, _ = run_sample(
        np.concatenate([logits[order], garbage]), slots, row_slot=[*slot_of[order], NULL_SLOT, NULL_SLOT],
        position=[*position[order], 0, 0], wants=[True] * 6 + [False] * 2,
    )  # fmt: skip
    assert [int(t) for t in sampled.token_id[:6]] == [alone[i] for i in order]
    again, _ = run_sample(logits, make_slots(*params), position=position + 1)
    assert [int(t) for t in again.token_id] != alone  # another position draws another number


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.random.default_rng(1).normal(size=(4, VOCAB)).astype(np.float32)
    logits[2, [77, 400]] = 9.0
    sampled, _ = run_sample(logits, make_slots())
    np.testing.assert_array_equal(sampled.token_id, logits.argmax(-1))
    mixed, _ = run_sample(logits, make_slots({}, {"temperature": 1.0, "top_k": 3}, {}, {"temperature": 1.0}))
    np.testing.assert_array_equal(np.asarray(mixed.token_id)[[0, 2]], logits.argmax(-1)[[0, 2]])


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_rows_without_finite_logits_give_minus_one(params: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).normal(size=(5, VOCAB)).astype(np.float32)
    logits[1, 5] = np.nan
    logits[2] = -np.inf
    logits[3, 5] = np.inf
    logits[4, 7:] = -np.inf
    sampled, _ = run_sample(logits, make_slots(*[params] * 5))
    assert [int(t) < 0 for t in sampled.token_id] == [False, True, True, True, False]
    assert int(sampled.token_id[4]) < 7


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_finite_logits_of_any_size_give_a_token(params: dict[str, Any]) -> None:
    """Their sum is not finite, and with -inf among them not even a number."""
    logits = np.random.default_rng(1).uniform(1e38, 3e38, size=(4, VOCAB)).astype(np.float32)
    logits[1:3, 7::9] = -np.inf
    logits[2:] *= np.random.default_rng(2).choice([-1, 1], size=(2, VOCAB)).astype(np.float32)
    logits[2, logits[2] == np.inf] = -np.inf
    sampled, _ = run_sample(logits, make_slots(*[params] * 4))
    np.testing.assert_array_equal(sampled.token_id, logits.argmax(-1))  # also what is drawn: all others are infinitely less likely


def penalize(logits: np.ndarray, prompt: list[int], output: list[int], row: dict[str, Any], bias: dict[int, float]) -> np.ndarray:
    """The rules by hand, token by token."""
    result = logits.astype(np.float32).copy()
    for token, value in bias.items():
        result[token] += np.float32(value)
    for token in set(prompt) | set(output):
        factor = np.float32(row["repetition_penalty"])
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token in set(output):
        result[token] -= np.float32(row["frequency_penalty"]) * output.count(token)
        result[token] -= np.float32(row["presence_penalty"])
    return result


def test_penalties_against_the_rules_by_hand() -> None:
    # Greedy for 12 steps with sampled tokens counted on the device; the row beside it has no penalties.
    vocab = VOCAB
    generator = np.random.default_rng(11)
    logits = generator.normal(size=vocab).astype(np.float32)
    row = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.25, "penalty_slot": 3}
    prompt, output, bias = [1, 2, 2, 7, 499], [7, 7, 9], {3: 1.5, 4: -2.0}
    penalties = make_penalties(vocab)
    penalties = PenaltyState(
        penalties.output_counts.at[3].set(np.bincount(output, minlength=vocab)),
        penalties.is_in_prompt.at[3, jnp.asarray(prompt)].set(True),
        penalties.logit_bias.at[3, jnp.asarray(list(bias))].set(jnp.asarray(list(bias.values()))),
        penalties.is_stop,
    )
    slots = make_slots(row, {})
    for _ in range(12):
        expected = penalize(logits, prompt, output, row, bias)
        sampled, penalties = run_sample(np.stack([logits, logits]), slots, penalties)
        assert sampled.token_id.tolist() == [expected.argmax(), logits.argmax()]
        output.append(int(sampled.token_id[0]))
        np.testing.assert_array_equal(penalties.output_counts[3], np.bincount(output, minlength=vocab))
    assert len(set(output)) > 5, "the penalties never changed the choice"
    assert not penalties.output_counts[jnp.asarray([0, 1, 2, 4])].any()


def test_tokens_are_counted_only_for_rows_that_sample() -> None:
    logits = np.random.default_rng(1).normal(size=(4, VOCAB)).astype(np.float32)
    logits[3] = np.nan
    slots = make_slots(*({"penalty_slot": slot} for slot in (0, 1, NULL_PENALTY, 2)))
    _, penalties = run_sample(logits, slots, wants=[True, False, True, True])
    expected = np.zeros((NUM_PENALTY_SLOTS, VOCAB), int)
    expected[0, logits[0].argmax()] = 1
    np.testing.assert_array_equal(penalties.output_counts, expected)


def test_logit_bias_comes_before_the_repetition_penalty() -> None:
    # Token 0: (1 + 1) / 2 = 1, below token 1's 1.2. The other order gives 1 / 2 + 1 = 1.5.
    penalties = make_penalties(VOCAB)
    penalties = penalties._replace(
        logit_bias=penalties.logit_bias.at[0, 0].set(1.0), is_in_prompt=penalties.is_in_prompt.at[0, 0].set(True)
    )
    logits = np.full((1, VOCAB), -5.0, np.float32)
    logits[0, :2] = [1.0, 1.2]
    sampled, _ = run_sample(logits, make_slots({"penalty_slot": 0, "repetition_penalty": 2.0}), penalties)
    assert int(sampled.token_id[0]) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_masked_before_min_length(temperature: float) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 4] = 50.0
    logits[:, 6] = 30.0
    penalties = make_penalties(VOCAB)
    # A bias cannot lift a masked token.
    penalties = penalties._replace(is_stop=penalties.is_stop.at[:2, 4].set(True), logit_bias=penalties.logit_bias.at[:2, 4].set(9.0))
    rows = [{"penalty_slot": i, "min_length": 12, "temperature": temperature} for i in range(2)]
    sampled, _ = run_sample(logits, make_slots(*rows), penalties, position=[11, 12])
    assert sampled.token_id.tolist() == [6, 4]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = np.random.default_rng(2).normal(size=(3, VOCAB)).astype(np.float32) * 3
    penalties = make_penalties(VOCAB)
    penalties = penalties._replace(logit_bias=penalties.logit_bias.at[0, 17].set(100.0))
    slots = make_slots({"penalty_slot": 0}, {"temperature": 2.0}, {"temperature": 0.5, "top_k": 50})
    sampled, _ = run_sample(logits, slots, penalties, logprobs=True)
    assert int(sampled.token_id[0]) == 17
    check_logprobs(sampled, logits)
    silent, _ = run_sample(logits, slots, penalties)
    np.testing.assert_array_equal(silent.token_id, sampled.token_id)
    assert not silent.logprob.any() and not silent.rank.any() and not silent.top_logprobs.any()


def check_logprobs(sampled: SampledTokens, logits: np.ndarray) -> None:
    expected = log_softmax(logits)
    for row, token in enumerate(sampled.token_id.tolist()):
        assert float(sampled.logprob[row]) == pytest.approx(expected[row, token], abs=1e-5)
        assert int(sampled.rank[row]) == 1 + (logits[row] > logits[row, token]).sum()
    top_ids = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(sampled.top_ids, top_ids)
    np.testing.assert_allclose(sampled.top_logprobs, np.take_along_axis(expected, top_ids, 1), atol=1e-5)


def test_full_logprobs_are_in_vocabulary_order() -> None:
    logits = np.random.default_rng(2).normal(size=(3, VOCAB)).astype(np.float32)
    sampled, _ = run_sample(logits, make_slots(), logprobs=True, full=True)
    np.testing.assert_array_equal(sampled.top_ids, np.tile(np.arange(VOCAB), (3, 1)))
    np.testing.assert_allclose(sampled.top_logprobs, log_softmax(logits), atol=1e-5)


@pytest.mark.parametrize("num_tokens", [16, 64, 150])
def test_prompt_logprobs_match_one_big_head(num_tokens: int) -> None:
    generator = np.random.default_rng(4)
    hidden = generator.normal(size=(num_tokens, 8)).astype(np.float32)
    head = generator.normal(size=(8, 900)).astype(np.float32)
    targets = generator.integers(0, 900, size=num_tokens)

    def logits_fn(rows: jax.Array) -> Logits:
        assert rows.shape[0] <= 64
        return Logits(rows @ jnp.asarray(head), 900)

    described = jax.jit(lambda h, t: prompt_logprobs(logits_fn, h, t, num_logprobs=20, full_logprobs=False))(hidden, targets)
    np.testing.assert_array_equal(described.token_id, targets)
    check_logprobs(described, np.asarray(jnp.asarray(hidden) @ jnp.asarray(head)))
    full = prompt_logprobs(logits_fn, jnp.asarray(hidden), jnp.asarray(targets), num_logprobs=20, full_logprobs=True)
    assert full.top_logprobs.shape == (num_tokens, 900)
    np.testing.assert_allclose(full.top_logprobs, log_softmax(hidden @ head), atol=1e-4)


def test_prompt_logprobs_have_no_token_where_a_logit_is_nan() -> None:
    """In sizes for which the maximum of XLA:CPU passes over it; logits of any finite size have one."""
    logits = np.random.default_rng(7).normal(size=(150, 2000)).astype(np.float32)
    logits[50:] = np.sign(logits[50:]) * 3e38
    is_spoiled = np.arange(150) % 3 == 1
    logits[is_spoiled, 7 * np.flatnonzero(is_spoiled)] = np.nan

    def described(rows: jax.Array, targets: jax.Array) -> jax.Array:
        return prompt_logprobs(lambda rows: Logits(rows, 2000), rows, targets, num_logprobs=1, full_logprobs=False).token_id

    targets = np.arange(150)
    np.testing.assert_array_equal(jax.jit(described)(logits, targets), np.where(is_spoiled, -1, targets))


@pytest.mark.parametrize("shape", [(3, 100), (3, 5000), (3, 3001)])
@pytest.mark.parametrize("k", [0, 1, 20, 64])
def test_largest_is_top_k(shape: tuple[int, int], k: int) -> None:
    values = np.round(np.random.default_rng(0).normal(size=shape), 1).astype(np.float32) + 0.0  # many ties; XLA puts -0.0 below 0.0
    found, index = filters.largest(jnp.asarray(values), k)
    expected = np.argsort(-values, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_array_equal(found, np.take_along_axis(values, expected, 1))


def test_program_sorts_no_vocabulary_and_copies_no_penalty_state() -> None:
    vocab, num_rows = 5003, 4

    def run(logits: Any, slots: Any, penalties: Any, rows: Any, wants: Any, wants_logprobs: Any) -> Any:
        return sample(
            Logits(logits, vocab), slots, penalties, rows, rows, wants,
            num_logprobs=20, full_logprobs=False, wants_logprobs=wants_logprobs,
        )  # fmt: skip

    rows = jnp.arange(num_rows, dtype=jnp.int32)
    program = (
        jax.jit(run, donate_argnums=2)
        .lower(jnp.zeros((num_rows, vocab)), make_slots(), make_penalties(vocab), rows, rows >= 0, jnp.asarray(True))
        .compile()
    )
    text = program.as_text()
    sorted_sizes = [int(n) for shape in re.findall(r"= \(?\w+\[([\d,]+)\]\S* sort\(", text) for n in shape.split(",")]
    assert max(sorted_sizes, default=0) <= filters.NUM_LARGEST
    selected = re.findall(r"custom-call\(%\S+\), custom_call_target=\"TopK\"", text)
    assert selected, "the test no longer sees how lax.top_k is lowered"
    state_shape = rf"(?:s32|f32|pred)\[{NUM_PENALTY_SLOTS},{vocab}\]"
    assert not re.findall(rf"= {state_shape}\S* (?:copy|convert|select|copy-start)\(", text)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= NUM_PENALTY_SLOTS * vocab * 10  # counts, prompt, bias, stop: all donated


def test_padded_ids_are_never_drawn():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(NUM_ROWS, VOCAB)).astype(np.float32)
    logits[:, 300:] += 4.0  # the most likely ones are padding
    options = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 90, "top_p": 0.9}, {"temperature": 3.0}, {}]
    slots = make_slots(*({"temperature": 1.0, "seed": (i, 7)} | row for i, row in enumerate(options)), {"temperature": 0.0})
    unpadded = logits[:, :300]
    for position in range(50):
        at = np.full(NUM_ROWS, position)
        got, _ = run_sample(logits, slots, position=at, logprobs=True, num_token_ids=300)
        drawn = np.asarray(got.token_id[:7])
        assert drawn.max() < 300
        # The same as of a vocabulary without them.
        np.testing.assert_array_equal(drawn, run_sample(unpadded, slots, position=at)[0].token_id[:7])
    # Greedy rows and log-probabilities are of the whole vocabulary.
    assert int(got.token_id[7]) == int(logits[7].argmax()) >= 300
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(got.logprob, every[np.arange(NUM_ROWS), got.token_id], atol=1e-5)


def test_row_with_nothing_but_padding_to_draw():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 400] = 1.0
    assert int(run_sample(logits, make_slots({"temperature": 1.0}), num_token_ids=300)[0].token_id[0]) == -1
