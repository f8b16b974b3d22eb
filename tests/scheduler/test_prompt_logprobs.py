"""Prompt log-probabilities over chunks, preemption and cache hits."""

from __future__ import annotations

import pytest

from jaxserve.testing import CountingLoop, logprobs_of

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def expected(prompt: list[int], num_top: int) -> list:
    return [None, *(logprobs_of(prompt[i], prompt[:i], 1000, num_top) for i in range(1, len(prompt)))]


@pytest.mark.parametrize("budget", [1, 3, 4, 9, 10, 64])
def test_all_prompt_tokens_but_the_first_have_one(make_loop, budget: int) -> None:
    loop: CountingLoop = make_loop(max_num_batched_tokens=budget)
    loop.add("a", PROMPT, max_tokens=3, prompt_logprobs=2)
    loop.run()
    assert loop.outputs["a", 0].prompt_logprobs == expected(PROMPT, 2)


def test_rows_name_the_tokens_to_judge(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=4)
    loop.add("a", PROMPT, max_tokens=2, prompt_logprobs=0)
    rows = [(row.num_prompt_logprobs, row.prompt_targets) for plan in loop.run() for row in plan.rows]
    assert rows == [(0, (2, 3, 4, 5)), (0, (6, 7, 8, 9)), (0, (10, -1)), (None, ())]


def test_a_chunk_with_only_the_last_prompt_token_asks_for_none(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=9)
    loop.add("a", PROMPT, max_tokens=1, prompt_logprobs=0)
    rows = [(row.num_prompt_logprobs, row.prompt_targets) for plan in loop.run() for row in plan.rows]
    assert rows == [(0, (2, 3, 4, 5, 6, 7, 8, 9, 10)), (None, ())]


def test_a_prompt_of_one_token(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [5], max_tokens=1, prompt_logprobs=3)
    loop.run()
    assert loop.outputs["a", 0].prompt_logprobs == [None]


def test_they_survive_preemption_in_the_middle_of_the_prompt(make_loop) -> None:
    # "b" has 8 of its 16 tokens when "a" takes the page that it needs.
    loop = make_loop(num_pages=8, max_num_batched_tokens=9, enable_prefix_caching=False)
    loop.add("a", [1] * 8, max_tokens=16)
    loop.step()
    loop.add("b", [2] * 16, max_tokens=1, prompt_logprobs=1)
    loop.step()
    sequence = loop.scheduler.roster.sequences[1]
    assert 1 < len(sequence.prompt_logprobs) < 16
    loop.scheduler.roster.running.remove(sequence)
    loop.scheduler.roster.preempt(sequence)
    loop.run()
    assert loop.outputs["b", 0].prompt_logprobs == expected([2] * 16, 1)


def test_once_collected_a_resumed_sequence_may_read_the_cache(make_loop) -> None:
    loop = make_loop()
    loop.add("a", PROMPT, max_tokens=6, prompt_logprobs=1)
    loop.step()
    sequence = loop.scheduler.roster.running.pop()
    loop.scheduler.roster.preempt(sequence)
    [admission] = loop.step().admissions
    assert admission.num_computed_tokens == 8
    loop.run()
    assert loop.outputs["a", 0].prompt_logprobs == expected(PROMPT, 1)
    assert len(loop.outputs["a", 0].token_ids) == 6


def test_each_of_n_gets_them_though_one_computes_them(make_loop) -> None:
    loop = make_loop()
    loop.add("a", PROMPT, n=3, temperature=1.0, seed=1, max_tokens=2, prompt_logprobs=1)
    loop.run()
    for index in range(3):
        assert loop.outputs["a", index].prompt_logprobs == expected(PROMPT, 1)
