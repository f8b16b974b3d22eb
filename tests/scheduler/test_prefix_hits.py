"""What is read from and written to the prefix cache, seen through whole requests; the counting device checks every page's content."""

from __future__ import annotations

import pytest

from jaxserve.cache.prefix_cache import Hit, PrefixCache
from jaxserve.config import GroupLimits
from jaxserve.testing import CountingLoop, solo_output

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def serve(loop: CountingLoop, name: str, prompt: list[int], **params) -> int:
    """Run one request alone; its tokens must be those of a cold run. Returns the cached tokens."""
    request = loop.add(name, prompt, **{"max_tokens": 3, **params})
    loop.run()
    loop.scheduler.check_integrity()
    output = loop.outputs[name, 0]
    assert output.token_ids == solo_output(prompt, request.params, max_length=loop.limits.max_model_len)[0]
    return output.num_cached_tokens


def test_a_second_equal_prompt_reads_its_full_pages(make_loop) -> None:
    loop = make_loop()
    assert serve(loop, "cold", PROMPT) == 0
    assert serve(loop, "warm", PROMPT) == 8
    assert serve(loop, "longer", PROMPT + [11] * 9) == 8
    assert serve(loop, "shorter", PROMPT[:6]) == 4
    assert serve(loop, "other", [9, *PROMPT[1:]]) == 0


def test_an_exact_multiple_recomputes_the_whole_last_page(make_loop) -> None:
    loop = make_loop()
    serve(loop, "cold", PROMPT[:8])
    assert serve(loop, "warm", PROMPT[:8]) == 4
    assert serve(loop, "one more", PROMPT[:9]) == 8


def test_generated_tokens_are_cached_too(make_loop) -> None:
    loop = make_loop()
    serve(loop, "a", PROMPT[:6], max_tokens=8)
    # 14 tokens, of which the last was never computed: 13 positions, 3 full pages.
    conversation = PROMPT[:6] + loop.outputs["a", 0].token_ids
    assert serve(loop, "b", [*conversation, 1]) == 12


def test_a_page_is_known_only_once_its_step_is_committed(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=32)
    loop.add("a", PROMPT, max_tokens=3)
    loop.dispatch()
    loop.add("b", PROMPT, max_tokens=3)
    loop.dispatch()
    assert len(loop.scheduler.roster.pages.cache) == 0
    while loop.in_flight:
        loop.collect()
    loop.run()
    assert loop.outputs["b", 0].num_cached_tokens == 0
    assert serve(loop, "c", PROMPT) == 8


def test_salts_isolate(make_loop) -> None:
    loop = make_loop()
    serve(loop, "a", PROMPT)
    assert serve(loop, "b", PROMPT, salt="x") == 0
    assert serve(loop, "c", PROMPT, salt="x") == 8
    assert serve(loop, "d", PROMPT, salt="y") == 0
    assert serve(loop, "e", PROMPT) == 8


def test_off_means_off(make_loop) -> None:
    loop = make_loop(enable_prefix_caching=False)
    assert [serve(loop, name, PROMPT) for name in "ab"] == [0, 0]
    assert loop.scheduler.stats(loop.scheduler.schedule()).num_cache_queries == 0


@pytest.mark.parametrize("num_groups", [1, 3])
def test_hits_with_groups(make_loop, num_groups: int) -> None:
    loop = make_loop(groups=(GroupLimits(),) * num_groups)
    serve(loop, "a", PROMPT)
    assert serve(loop, "b", PROMPT) == 8


def test_running_sequences_share_pages_and_the_last_owner_frees_them(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=64)
    loop.add("a", PROMPT, max_tokens=3)
    loop.step()
    used = loop.scheduler.roster.pages.pool.num_used
    loop.add("b", PROMPT, max_tokens=9)
    loop.step()
    assert loop.scheduler.roster.pages.pool.num_used == used + 1, "two full pages are shared, the partial one is not"
    loop.run()
    loop.scheduler.check_integrity()


def test_least_recently_used_prefix_goes_first(make_loop) -> None:
    # 8 usable pages. Each request leaves 2 full pages behind.
    loop = make_loop(num_pages=9, max_model_len=20)
    for name, first in [("a", 1), ("b", 2), ("c", 3)]:
        serve(loop, name, [first] * 9, max_tokens=1)
    assert serve(loop, "a again", [1] * 9, max_tokens=1) == 8
    serve(loop, "d", [4] * 17, max_tokens=1)
    assert serve(loop, "a once more", [1] * 9, max_tokens=1) == 8, "just used"
    assert serve(loop, "b again", [2] * 9, max_tokens=1) < 8, "oldest"


def test_a_hit_on_free_pages_counts_against_what_is_free(make_loop) -> None:
    # 5 usable pages, 4 of them cached for the prompt. Taking them leaves one, and the sequence needs one more.
    loop = make_loop(num_pages=6, max_model_len=20)
    serve(loop, "a", [1] * 17, max_tokens=1)
    loop.add("b", [2] * 3, max_tokens=5)
    loop.step()
    loop.add("c", [1] * 17, max_tokens=1)
    assert loop.step().admissions == ()
    loop.run()
    assert loop.outputs["c", 0].num_cached_tokens > 0


def test_reset_is_refused_while_pages_are_in_use(make_loop) -> None:
    loop = make_loop()
    serve(loop, "a", PROMPT)
    loop.add("b", [7], max_tokens=2)
    loop.step()
    assert not loop.scheduler.reset_prefix_cache()
    loop.run()
    assert loop.scheduler.reset_prefix_cache()
    assert serve(loop, "c", PROMPT) == 0


def test_length_dependent_rope_caches_only_pages_of_the_original_table(make_loop) -> None:
    loop = make_loop(rope_original_length=10)
    # Admitted with 9 tokens, so with the original table; computed up to 20, but only pages that end at or before 10 are known.
    serve(loop, "a", PROMPT[:9], max_tokens=12)
    assert len(loop.scheduler.roster.pages.cache) == 2
    assert serve(loop, "b", PROMPT) == 8, "10 tokens are not above the limit"
    # 11 tokens start with another table: nothing read, nothing written.
    long = [*PROMPT, 11]
    assert serve(loop, "c", long) == 0
    assert serve(loop, "d", [3] * 30) == 0
    assert len(loop.scheduler.roster.pages.cache) == 2


def test_length_dependent_rope_after_preemption_goes_by_the_new_length(make_loop) -> None:
    loop = make_loop(num_pages=8, rope_original_length=12, max_num_batched_tokens=32)
    loop.add("a", [1] * 12, max_tokens=12)
    loop.add("b", [2] * 12, max_tokens=3)
    admissions = [admission for plan in loop.run() for admission in plan.admissions if admission.seq_id == 1]
    assert [(admission.rope_length, admission.num_computed_tokens) for admission in admissions] == [(12, 0), (13, 0)]


def test_prompt_logprobs_are_not_read_from_the_cache_but_leave_pages_there(make_loop) -> None:
    loop = make_loop()
    assert serve(loop, "a", PROMPT, prompt_logprobs=1) == 0
    assert serve(loop, "b", PROMPT, prompt_logprobs=1) == 0
    assert serve(loop, "c", PROMPT) == 8


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages found by each lookup in the prefix cache."""
    found: list[int] = []
    find = PrefixCache.find

    def note(self: PrefixCache, *args) -> Hit:
        hit = find(self, *args)
        found.append(len(hit.tables[0]))
        return hit

    monkeypatch.setattr(PrefixCache, "find", note)
    return found


def test_the_head_of_a_blocked_queue_is_looked_up_once(make_loop, lookups: list[int]) -> None:
    loop = make_loop(num_pages=9, max_num_batched_tokens=32)
    loop.add("running", [50] * 12, max_tokens=8)
    loop.step()
    loop.add("blocked", PROMPT * 2 + [7] * 8, max_tokens=1)  # 7 pages, of 8 that "running" holds 3 of
    lookups.clear()
    for _ in range(7):
        plan = loop.step()
        assert not plan.admissions and loop.scheduler.num_waiting == 1
    assert lookups == [0]
    loop.step()
    assert loop.scheduler.num_waiting == 0 and lookups == [0], "the remembered lookup served the admission too"


def test_a_blocked_head_is_looked_up_again_when_its_next_page_becomes_known(make_loop, lookups: list[int]) -> None:
    loop = make_loop(num_pages=9, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    loop.add("running", PROMPT + PROMPT, max_tokens=1)  # computes one of its 5 pages in each step; 3 of the 8 are left
    loop.step()
    loop.add("blocked", PROMPT + PROMPT + [7] * 4, max_tokens=1)  # 6 pages: it fits when 3 of them are shared
    lookups.clear()
    while loop.scheduler.num_waiting:
        loop.step()
        loop.scheduler.check_integrity()
    assert lookups == [1, 2, 3] and loop.outputs == {}
    loop.run()
    assert loop.outputs["blocked", 0].num_cached_tokens == 12


def test_a_blocked_head_is_looked_up_again_when_its_pages_are_evicted(make_loop, lookups: list[int]) -> None:
    loop = make_loop(num_pages=9, max_num_batched_tokens=32)
    serve(loop, "cold", PROMPT * 2, max_tokens=1)  # 5 pages stay known
    loop.add("running", [50] * 12, max_tokens=15)  # grows from 3 pages to 7, the last 4 taken from those
    loop.step()
    blocked = loop.add("blocked", PROMPT * 2 + [7] * 8, max_tokens=1)
    lookups.clear()
    loop.run()
    assert lookups == [4, 3, 2, 1]
    assert loop.outputs["blocked", 0].num_cached_tokens == 4
    assert loop.outputs["blocked", 0].token_ids == solo_output(blocked.prompt_token_ids, blocked.params, max_length=64)[0]
