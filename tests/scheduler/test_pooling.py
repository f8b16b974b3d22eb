"""Embeddings: prompts scheduled like any other, ended where they are computed, with the hidden states that count."""

from __future__ import annotations

import pytest

from jaxserve.core.buckets import Buckets
from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason
from jaxserve.errors import InvalidRequest
from jaxserve.testing import CountingLoop, hidden_state

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
# The last token, its position and the sum of all; with means 39 / 10, 45 / 10 and (3 + 4 + 8 + 9 + 14 + 23 + 25 + 31 + 36 + 39) / 10.
EXPECTED = {"last": [3.0, 9.0, 39.0, 1.0], "mean": pytest.approx([3.9, 4.5, 19.2, 1.0])}


def reference(prompt: list[int], pooling: str) -> object:
    states = [hidden_state(prompt[: i + 1]) for i in range(len(prompt))]
    return list(states[-1]) if pooling == "last" else pytest.approx([sum(values) / len(prompt) for values in zip(*states, strict=True)])


def ended(loop: CountingLoop, request_id: str) -> list[float]:
    output = loop.outputs[request_id, 0]
    assert (output.finish_reason, output.token_ids, output.error) == (FinishReason.STOP, [], None)
    assert output.embedding is not None
    return output.embedding


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("budget", [1, 3, 9, 10, 64])
def test_whatever_the_chunks(make_loop, pooling: str, budget: int) -> None:
    loop = make_loop(max_num_batched_tokens=budget)
    loop.embed("a", PROMPT, pooling=pooling)
    plans = loop.run()
    assert len(plans) == -(-len(PROMPT) // budget)
    assert ended(loop, "a") == EXPECTED[pooling]
    assert loop.scheduler.num_used_pages == 0


def test_rows_sample_nothing_and_name_the_tokens_that_count(make_loop) -> None:
    for pooling, counts in (("last", [0, 0, 1]), ("mean", [4, 4, 2])):
        loop = make_loop(max_num_batched_tokens=4)
        loop.embed("a", PROMPT, pooling=pooling)
        rows = [row for plan in loop.run() for row in plan.rows]
        assert [row.num_pooled_tokens for row in rows] == counts
        assert not any(row.is_sampled for row in rows)


def test_the_last_token_may_follow_a_cached_prefix_and_a_mean_may_not(make_loop) -> None:
    loop = make_loop()
    loop.add("before", PROMPT, max_tokens=1)
    loop.run()
    loop.embed("last", PROMPT)
    loop.embed("mean", PROMPT, pooling="mean")
    loop.run()
    assert (ended(loop, "last"), ended(loop, "mean")) == (EXPECTED["last"], EXPECTED["mean"])
    assert [loop.outputs[name, 0].num_cached_tokens for name in ("last", "mean")] == [8, 0]
    loop.add("after", PROMPT[:9], max_tokens=1, salt="other")
    loop.embed("salted", [7] * 9, pooling="mean", salt="other")
    loop.run()
    loop.add("reader", [7] * 9, max_tokens=1, salt="other")  # what a mean computed, others may use
    loop.run()
    assert loop.outputs["reader", 0].num_cached_tokens == 8


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("steps_before", [1, 2])
def test_preempted_in_the_middle(make_loop, pooling: str, steps_before: int) -> None:
    loop = make_loop(max_num_batched_tokens=4)
    loop.embed("a", PROMPT, pooling=pooling)
    for _ in range(steps_before):
        loop.step()
    [sequence] = loop.scheduler.roster.running
    loop.scheduler.roster.running.remove(sequence)
    loop.scheduler.roster.preempt(sequence)
    loop.run()
    assert ended(loop, "a") == EXPECTED[pooling]


def test_preempted_while_its_last_chunk_is_computed(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=8)
    loop.embed("a", PROMPT, pooling="mean")
    loop.dispatch()
    loop.dispatch()
    assert not loop.dispatch().rows, "nothing is scheduled behind the prompt"
    [sequence] = loop.scheduler.roster.running
    loop.scheduler.roster.running.remove(sequence)
    loop.scheduler.roster.preempt(sequence)
    while loop.in_flight:
        loop.collect()
    assert ended(loop, "a") == EXPECTED["mean"]
    assert not loop.scheduler.has_work
    loop.scheduler.check_integrity()


def test_many_at_once_with_generation_and_little_memory(make_loop) -> None:
    loop: CountingLoop = make_loop(num_pages=17, max_num_batched_tokens=7)
    prompts = {f"{pooling} {i}": [i + 1] * (3 * i + 1) for i in range(8) for pooling in ("last", "mean")}
    for name, prompt in prompts.items():
        loop.embed(name, prompt, pooling=name.split()[0])
        loop.add(f"tokens {name}", prompt[:8], max_tokens=20)
    while loop.scheduler.has_work:
        has_rows = bool(loop.dispatch().rows)
        while len(loop.in_flight) > has_rows:
            loop.collect()
        loop.scheduler.check_integrity()
    assert loop.scheduler.roster.num_preemptions > 3
    for name, prompt in prompts.items():
        assert ended(loop, name) == reference(prompt, name.split()[0])
        assert len(loop.outputs[f"tokens {name}", 0].token_ids) == 20


def test_the_whole_context_may_be_the_prompt(make_loop) -> None:
    loop = make_loop()
    loop.embed("a", [1] * 64)
    loop.run()
    assert ended(loop, "a") == [1.0, 63.0, 64.0, 1.0]
    with pytest.raises(InvalidRequest, match=r"the prompt has 65 tokens, but the context is 64 tokens; shorten"):
        loop.embed("b", [1] * 65)
    with pytest.raises(InvalidRequest, match=r"prompt and output together"):
        loop.add("c", [1] * 64)
    small = make_loop(num_pages=6)
    small.embed("a", [1] * 20)
    small.run()
    with pytest.raises(InvalidRequest, match=r"all 5 KV pages together hold 20 tokens"):
        small.embed("b", [1] * 21)


def test_what_is_not_finite_ends_its_own_sequence(make_loop) -> None:
    for pooling in ("last", "mean"):
        loop = make_loop(runner={"poison_token_id": 99}, max_num_batched_tokens=8)
        loop.embed("bad", [99, *PROMPT], pooling=pooling)
        loop.embed("good", PROMPT, pooling=pooling)
        loop.run()
        bad = loop.outputs["bad", 0]
        assert (bad.finish_reason, bad.error, bad.embedding) == (FinishReason.ERROR, "hidden states were not finite", None)
        assert ended(loop, "good") == EXPECTED[pooling]
        assert loop.embed("again", [99, *PROMPT]) and loop.step().admissions[0].num_computed_tokens == 0


def test_it_can_be_aborted(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=4)
    loop.embed("a", PROMPT, pooling="mean")
    loop.step()
    loop.abort("a")
    assert loop.outputs["a", 0].finish_reason is FinishReason.ABORT
    assert not loop.scheduler.has_work


def test_a_trimmed_chunk_counts_what_is_left_of_it(make_loop) -> None:
    buckets = Buckets(4, (2, 4), (8, 16), has_pooling=True)
    loop = make_loop(buckets=buckets, max_num_batched_tokens=9)
    loop.embed("a", [2] * 15, pooling="mean")
    assert [[(row.num_tokens, row.num_pooled_tokens) for row in plan.rows] for plan in loop.run()] == [[(8, 8)], [(7, 7)]]
    assert ended(loop, "a") == reference([2] * 15, "mean")


def test_buckets_with_pooling_serve_the_steps_that_need_them(make_loop) -> None:
    buckets = Buckets(4, (2, 4), (8, 16), has_prompt_logprobs=True, has_pooling=True)
    loop = make_loop(buckets=buckets)
    loop.embed("a", [1])
    chosen = buckets.choose(loop.step())
    assert (chosen.has_pooling, chosen.is_decode, chosen.has_prompt_logprobs) == (True, False, False)
    loop.embed("b", [1, 2])
    loop.add("c", [1, 2], max_tokens=2, prompt_logprobs=0)
    both = buckets.choose(loop.step())
    assert both.has_pooling and both.has_prompt_logprobs
    plain = buckets.choose(loop.step())
    assert plain.is_decode and not plain.has_pooling
    assert {chosen, both, plain} <= set(buckets.all())
    assert len(buckets.all()) == len(set(buckets.all())) == 2 + 2 * 1 + 4
    assert not any(bucket.has_pooling for bucket in Buckets(4, (2, 4), (8, 16)).all())


def test_a_request_without_parameters_samples_nothing() -> None:
    request = Request(request_id="a", prompt_token_ids=(1,))
    assert (request.params.n, request.params.max_tokens, request.params.needs_penalty_slot) == (1, 1, False)
