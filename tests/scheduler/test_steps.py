"""What one step holds: rows, chunks, budget, order, page writes."""

from __future__ import annotations

import time

from jaxserve.config import GroupLimits, SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.core.events import StepResult
from jaxserve.core.plan import PageWrite, Plan
from jaxserve.testing import CountingLoop


def sizes(plan: Plan) -> list[tuple[int, int]]:
    """(seq_id, num_tokens) of each row."""
    return [(row.seq_id, row.num_tokens) for row in plan.rows]


def test_a_request_from_prompt_to_end(make_loop) -> None:
    loop: CountingLoop = make_loop()
    loop.add("a", [5, 3, 1, 1, 2], max_tokens=3)
    first = loop.step()
    [row] = first.rows
    assert (row.start, row.num_tokens, row.token_ids, row.is_sampled) == (0, 5, (5, 3, 1, 1, 2), True)
    [admission] = first.admissions
    assert (admission.slot, admission.num_computed_tokens, admission.num_prompt_tokens, admission.rope_length) == (0, 0, 5, 5)
    assert first.page_writes == (PageWrite(0, 0, 0, 1), PageWrite(0, 0, 1, 2))
    second = loop.step()
    [row] = second.rows
    assert (row.start, row.num_tokens, row.token_ids, row.is_sampled) == (5, 1, (), True)
    assert second.admissions == () and second.page_writes == ()
    loop.step()
    # 5 + 3 + 1 + 1 + 2 = 12, and 5 tokens: 17; then 29 + 6 = 35; then 64 + 7 = 71.
    assert loop.outputs["a", 0].token_ids == [17, 35, 71]
    assert not loop.scheduler.has_work


def test_a_page_is_written_to_the_table_when_the_first_token_needs_it(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1, 2, 3], max_tokens=7)
    writes = [plan.page_writes for plan in loop.run()]
    # Lengths computed: 3, 4, 5 (second page), 6, 7, 8, 9 (third page).
    assert writes == [(PageWrite(0, 0, 0, 1),), (), (PageWrite(0, 0, 1, 2),), (), (), (), (PageWrite(0, 0, 2, 3),)]


def test_every_group_has_its_own_table(make_loop) -> None:
    loop = make_loop(groups=(GroupLimits(),) * 2)
    loop.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    assert loop.step().page_writes == (PageWrite(0, 0, 0, 1), PageWrite(0, 0, 1, 2), PageWrite(0, 1, 0, 3), PageWrite(0, 1, 1, 4))


def test_a_long_prompt_is_cut_at_the_budget_and_only_its_last_chunk_samples(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1] * 40, max_tokens=1)
    plans = loop.run()
    assert [[(row.start, row.num_tokens, row.is_sampled) for row in plan.rows] for plan in plans] == [
        [(0, 16, False)],
        [(16, 16, False)],
        [(32, 8, True)],
    ]


def test_no_event_for_an_unfinished_prefill(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1] * 20, max_tokens=1)
    loop.step()
    assert loop.outputs == {}


def test_running_come_before_waiting_and_share_one_budget(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1] * 3, max_tokens=9)
    loop.step()
    loop.add("b", [1] * 10, max_tokens=9)
    loop.add("c", [1] * 10, max_tokens=9)
    assert sizes(loop.step()) == [(0, 1), (1, 10), (2, 5)]
    assert sizes(loop.step()) == [(0, 1), (1, 1), (2, 5)]


def test_rows_with_one_token_come_first_also_when_they_are_the_end_of_a_prompt(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=16)
    loop.add("a", [1] * 17, max_tokens=9)
    loop.step()
    loop.add("b", [1] * 3, max_tokens=9)
    plan = loop.step()
    assert sizes(plan) == [(0, 1), (1, 3)]
    assert plan.rows[0].token_ids == (1,), "a prompt token, so the host must send it"


def test_decodes_are_not_stalled_by_a_long_prefill_ahead_of_them(make_loop) -> None:
    loop = make_loop(scheduling_policy="priority")
    loop.add("b", [1] * 3, max_tokens=9, priority=5)
    loop.step()
    loop.add("long", [1] * 60, max_tokens=2, priority=0)
    for _ in range(4):
        assert sizes(loop.step()) == [(0, 1), (1, 15)]


def test_when_decodes_fill_the_budget_an_older_prefill_still_moves(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=3, long_prefill_token_threshold=1)
    loop.add("long", [1] * 5, max_tokens=2)
    loop.add("b", [1], max_tokens=30)
    loop.add("c", [1], max_tokens=30)
    for _ in range(5):
        loop.step()
    assert loop.outputs["long", 0].token_ids, "one token of the prompt each step"


def test_long_prefill_threshold_leaves_room_for_others(make_loop) -> None:
    loop = make_loop(long_prefill_token_threshold=6)
    loop.add("a", [1] * 20, max_tokens=1)
    loop.add("b", [1] * 20, max_tokens=1)
    assert sizes(loop.step()) == [(0, 6), (1, 6)]


def test_chunk_is_trimmed_to_a_bucket_when_it_costs_no_step(make_loop) -> None:
    buckets = Buckets(max_num_seqs=4, decode_rows=(2, 4), mixed_tokens=(8, 16))
    loop = make_loop(buckets=buckets, long_prefill_token_threshold=8)
    loop.add("a", [1] * 3, max_tokens=9)
    loop.step()
    loop.add("b", [1] * 23, max_tokens=1)
    # One decode row and a chunk of 8 are 9 tokens, padded to 16; a chunk of 7 fits 8, and 23 = 7 + 8 + 8 is three chunks either way.
    assert sizes(loop.step()) == [(0, 1), (1, 7)]
    # 16 left: a chunk of 7 would leave 9, one chunk more than after 8.
    assert sizes(loop.step()) == [(0, 1), (1, 8)]
    assert sizes(loop.step()) == [(0, 1), (1, 8)]
    loop.run()
    loop.scheduler.check_integrity()


def test_the_last_chunk_is_never_trimmed(make_loop) -> None:
    loop = make_loop(buckets=Buckets(max_num_seqs=4, decode_rows=(2, 4), mixed_tokens=(8, 16)))
    loop.add("a", [1] * 9, max_tokens=1)
    assert sizes(loop.step()) == [(0, 9)]


def test_an_empty_scheduler_gives_an_empty_plan_that_may_be_committed(make_loop) -> None:
    loop = make_loop()
    plan = loop.scheduler.schedule()
    assert plan.rows == () and plan.num_tokens == 0
    assert loop.scheduler.commit(plan, StepResult(token_ids=[], logprobs=[], prompt_logprobs=[])) == []


def test_plans_are_deterministic(make_loop) -> None:
    def plans() -> list[Plan]:
        loop = make_loop(num_pages=12)
        for i in range(6):
            loop.add(str(i), [1, 2, 3] * (i + 1), max_tokens=8, temperature=1.0, seed=i)
        return loop.run()

    assert plans() == plans()


def test_statistics(make_loop) -> None:
    loop = make_loop(max_num_seqs=2)
    for name in "abc":
        loop.add(name, [1] * 5, max_tokens=3)
    plan = loop.step()
    stats = loop.scheduler.stats(plan)
    assert (stats.num_decode_rows, stats.num_prefill_rows, stats.num_tokens) == (0, 2, 10)
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages, stats.num_pages) == (2, 1, 4, 100)
    assert stats.num_kv_tokens == 10
    assert (stats.num_preemptions, stats.num_cache_queries, stats.num_cache_hits) == (0, 10, 0)
    loop.step()
    loop.step()
    stats = loop.scheduler.stats(loop.step())
    assert (stats.num_cache_queries, stats.num_cache_hits) == (15, 4), "c found a's first page; tokens, not pages"


def test_host_time_of_256_decode_rows() -> None:
    limits = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=1024, num_pages=4096)
    loop = CountingLoop(limits)
    for i in range(256):
        loop.add(str(i), [i] * 8, max_tokens=200)
    loop.step()
    seconds = []
    for _ in range(40):
        start = time.perf_counter()
        plan = loop.scheduler.schedule()
        middle = time.perf_counter()
        result = loop.runner.run(plan).wait()
        resumed = time.perf_counter()
        loop.take(loop.scheduler.commit(plan, result)[:0])
        seconds.append(middle - start + time.perf_counter() - resumed)
    # About 0.4 ms; the bound leaves room for a busy machine but not for per-token work.
    assert min(seconds) < 2e-3
