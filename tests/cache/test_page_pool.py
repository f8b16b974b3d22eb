"""The pool's queue order, owner counts and eviction, by hand; and random use against a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cache.page_pool import PagePool


def test_pages_come_in_id_order_and_never_the_null_page() -> None:
    pool = PagePool(6)
    assert (pool.num_free, pool.num_used) == (5, 0)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_allocating_more_than_is_free_touches_nothing() -> None:
    pool = PagePool(4)
    with pytest.raises(AssertionError, match="4 pages asked, 3 free"):
        pool.allocate(4)
    assert pool.allocate(3) == [1, 2, 3]


def test_blank_pages_are_reused_first_head_before_tail() -> None:
    pool = PagePool(8)
    pages = pool.allocate(3)
    pool.free(pages)
    assert pool.allocate(7) == [1, 2, 3, 4, 5, 6, 7]


def test_cached_pages_are_reused_last_tail_before_head() -> None:
    pool = PagePool(6)
    pages = pool.allocate(3)
    for page in pages:
        pool.mark_cached(page)
    pool.free(pages)
    assert pool.allocate(5) == [4, 5, 3, 2, 1]


def test_a_cached_page_is_evicted_when_it_is_handed_out_not_before() -> None:
    pool, evicted = PagePool(4), []
    pool.on_evict(evicted.append)
    pages = pool.allocate(3)
    pool.mark_cached(2)
    pool.free(pages)
    assert pool.allocate(2) == [1, 3] and evicted == []
    assert pool.allocate(1) == [2] and evicted == [2]
    assert not pool.is_cached(2)


def test_touch_takes_a_free_page_out_of_the_queue_with_its_content() -> None:
    pool = PagePool(5)
    pages = pool.allocate(4)
    pool.mark_cached(2)
    pool.free(pages)
    pool.touch([2])
    assert pool.is_cached(2) and pool.ref_count(2) == 1
    pool.touch([2])
    assert pool.allocate(3) == [1, 3, 4]
    pool.free([2])
    assert pool.num_free == 0
    pool.free([2])
    assert pool.num_free == 1


def test_freeing_twice_is_our_bug() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="page 1 is freed but has no owner"):
        pool.free(pages)


def test_null_pages_in_a_table_are_passed_over() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.free([0, page, 0])
    pool.check_integrity({})


def test_integrity_names_a_leak() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    pool.check_integrity({1: 1, 2: 1})
    with pytest.raises(AssertionError, match="owners differ"):
        pool.check_integrity({1: 1})


@given(st.data())
def test_random_use_keeps_free_plus_cached_plus_owned(data: st.DataObject) -> None:
    pool = PagePool(data.draw(st.integers(2, 9)))
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["allocate", "share", "free", "cache"]))
        if action == "allocate":
            tables.append(pool.allocate(data.draw(st.integers(0, pool.num_free))))
        elif tables:
            table = tables[data.draw(st.integers(0, len(tables) - 1))]
            if action == "share":
                pool.touch(table)
                tables.append(list(table))
            elif action == "cache":
                for page in table:
                    pool.mark_cached(page)
            else:
                pool.free(table)
                tables.remove(table)
        pool.check_integrity(Counter(page for table in tables for page in table))
