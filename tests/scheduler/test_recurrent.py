"""Models with a recurrent state: every sequence is computed from its first token on, whoever computed the same tokens before."""

from __future__ import annotations

import pytest

from jaxserve.testing import CountingLoop


def run(loop: CountingLoop) -> None:
    """To the end; a sequence's first row after each admission is at position 0, and no two sequences hold the same page."""
    while loop.scheduler.has_work:
        plan = loop.step()
        starts = {row.slot: row.start for row in plan.rows}
        assert all(starts[admission.slot] == admission.num_computed_tokens == 0 for admission in plan.admissions)
        pages = [page for seq in loop.scheduler.roster.running for table in seq.page_tables for page in table]
        assert len(pages) == len(set(pages))
        loop.scheduler.check_integrity()
    stats = loop.scheduler.stats(plan)
    assert stats.num_cache_queries == stats.num_cache_hits == 0


@pytest.mark.parametrize("num_pages", [100, 12], ids=["enough pages", "preemption"])
def test_no_prefix_is_found_and_no_prompt_shared(num_pages: int, make_loop) -> None:
    loop, prompt = make_loop(has_recurrent_state=True, num_pages=num_pages), list(range(1, 14))
    for name in ("first", "again"):
        loop.add(name, prompt, n=3, temperature=1.0, seed=5, max_tokens=20, prompt_logprobs=0)
        run(loop)
    assert len(loop.outputs) == 6
    for (name, index), output in loop.outputs.items():
        assert output.num_cached_tokens == 0 and len(output.token_ids) == 20
        assert output.token_ids == loop.outputs["first", index].token_ids, name
        assert output.prompt_logprobs is not None and [e.token_id for e in output.prompt_logprobs[1:] if e is not None] == prompt[1:]
    assert (loop.scheduler.roster.num_preemptions > 0) == (num_pages == 12)
    assert loop.scheduler.num_used_pages == 0


def test_samples_wait_in_the_queue_and_end_one_by_one(make_loop) -> None:
    loop = make_loop(has_recurrent_state=True, max_num_seqs=1)
    loop.add("r", [3, 1, 2], n=3, temperature=1.0, seed=5, max_tokens=4)
    loop.step()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 2)
    loop.abort("r", 0)
    assert loop.scheduler.num_waiting == 2
    loop.abort("r", 2)
    run(loop)
    assert [len(loop.outputs["r", i].token_ids) for i in range(3)] == [1, 4, 0]
