"""Keys, hits and eviction of the prefix cache, by hand and against a brute-force search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cache.page_pool import PagePool
from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.config import GroupLimits


def store(
    cache: PrefixCache, pool: PagePool, tokens: list[int], page_size: int, *, root: bytes | None = None, groups: int = 1
) -> list[list[int]]:
    """Compute all full pages of `tokens`, register them, and free them."""
    hashes: list[bytes] = []
    count = len(tokens) // page_size
    cache.extend_hashes(hashes, root or cache.chain_root(), tokens, count)
    tables = [pool.allocate(count) for _ in range(groups)]
    for group, table in enumerate(tables):
        for page_hash, page in zip(hashes, table, strict=True):
            cache.register(page_hash, group, page)
        pool.free(table)
    cache.check_integrity()
    return tables


def find(cache: PrefixCache, tokens: list[int], page_size: int, root: bytes | None = None) -> list[list[int]]:
    return cache.find([], root or cache.chain_root(), tokens, (len(tokens) - 1) // page_size).tables


def test_a_hit_is_the_longest_chain_of_full_pages_and_leaves_the_last_token() -> None:
    pool = PagePool(20)
    cache = PrefixCache(pool, 2)
    [pages] = store(cache, pool, [1, 2, 3, 4, 5, 6, 7], 2)
    assert len(pages) == 3, "the page of token 7 is not full"
    assert find(cache, [1, 2, 3, 4, 9, 9, 9], 2) == [pages[:2]]
    assert find(cache, [1, 2, 3, 4, 5, 6, 7], 2) == [pages]
    assert find(cache, [1, 2, 3, 4, 5, 6], 2) == [pages[:2]], "an exact multiple recomputes its whole last page"
    assert find(cache, [9, 2, 3, 4, 5, 6], 2) == [[]]
    assert find(cache, [3, 4, 5, 6, 7], 2) == [[]], "page content alone is not a key: what stands before counts"


def test_the_same_text_split_elsewhere_is_another_chain() -> None:
    pool = PagePool(20)
    cache = PrefixCache(pool, 2)
    hashes_a: list[bytes] = []
    hashes_b: list[bytes] = []
    cache.extend_hashes(hashes_a, cache.chain_root(), [1, 2, 1, 2], 2)
    cache.extend_hashes(hashes_b, cache.chain_root(), [12, 1, 1, 2], 2)
    assert len({*hashes_a, *hashes_b}) == 4


def test_salts_isolate_and_tags_do_not_collide() -> None:
    pool = PagePool(20)
    cache = PrefixCache(pool, 2)
    store(cache, pool, [1, 2, 3, 4], 2, root=cache.chain_root(salt="a"))
    assert find(cache, [1, 2, 3, 4, 5], 2) == [[]]
    assert find(cache, [1, 2, 3, 4, 5], 2, cache.chain_root(salt="b")) == [[]]
    assert find(cache, [1, 2, 3, 4, 5], 2, cache.chain_root(adapter="a")) == [[]], "an adapter named like a salt is not that salt"
    assert len(find(cache, [1, 2, 3, 4, 5], 2, cache.chain_root(salt="a"))[0]) == 2
    roots = {
        cache.chain_root(),
        cache.chain_root(salt=""),
        cache.chain_root(adapter="x", salt="y"),
        cache.chain_root(adapter="x:1:salt:1:y"),
    }
    assert len(roots) == 4
    assert cache.chain_root(salt=None) == cache.chain_root()
    assert cache.chain_root(salt="\udc80") != cache.chain_root(), "any str a client can send is a salt"


def test_keys_are_not_predictable_from_outside() -> None:
    assert PrefixCache(PagePool(2), 2).chain_root() != PrefixCache(PagePool(2), 2).chain_root()


def test_hashes_are_made_only_as_far_as_the_search_goes() -> None:
    pool = PagePool(20)
    cache = PrefixCache(pool, 2)
    store(cache, pool, [1, 2, 3, 4], 2)
    hashes: list[bytes] = []
    cache.find(hashes, cache.chain_root(), [1, 2] + [9] * 100, 51)
    assert len(hashes) == 2


def test_a_hit_needs_every_group() -> None:
    pool = PagePool(20)
    cache = PrefixCache(pool, 2, (GroupLimits(),) * 2)
    tables = store(cache, pool, [1, 2, 3, 4, 5, 6], 2, groups=2)
    assert find(cache, [1, 2, 3, 4, 5, 6, 7], 2) == tables
    pool.touch([page for page in range(1, 20) if page != tables[1][2]])
    pool.allocate(1)  # takes and evicts the last page of group 1
    assert find(cache, [1, 2, 3, 4, 5, 6, 7], 2) == [tables[0][:2], tables[1][:2]]


def test_equal_pages_are_both_kept_and_one_survives_the_other() -> None:
    pool = PagePool(3)
    cache = PrefixCache(pool, 2)
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, cache.chain_root(), [1, 2], 1)
    first, second = pool.allocate(2)
    cache.register(hashes[0], 0, first)
    cache.register(hashes[0], 0, second)
    assert len(cache) == 2
    pool.free([first])
    assert pool.allocate(1) == [first]
    assert find(cache, [1, 2, 3], 2) == [[second]]
    cache.check_integrity()


def test_a_page_is_registered_once() -> None:
    pool = PagePool(3)
    cache = PrefixCache(pool, 2)
    [page] = pool.allocate(1)
    cache.register(b"x" * 32, 0, page)
    with pytest.raises(AssertionError, match="written again"):
        cache.register(b"y" * 32, 0, page)


def test_reset_forgets_everything() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, 2)
    store(cache, pool, [1, 2, 3, 4], 2)
    cache.reset()
    assert len(cache) == 0 and find(cache, [1, 2, 3], 2) == [[]]
    cache.check_integrity()
    pool.check_integrity({})
    assert pool.num_free == 3


@given(
    stored=st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=6),
    wanted=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    page_size=st.sampled_from([1, 2, 3]),
)
def test_hits_equal_brute_force(stored: list[list[int]], wanted: list[int], page_size: int) -> None:
    pool = PagePool(100)
    cache = PrefixCache(pool, page_size)
    held = {}
    for tokens in stored:
        [pages] = store(cache, pool, tokens, page_size)
        for i, page in enumerate(pages):
            held[page] = tokens[: (i + 1) * page_size]
    # What the pool handed out twice holds only its latest content.
    prefixes = [tokens for page, tokens in held.items() if pool.is_cached(page)]
    limit = (len(wanted) - 1) // page_size
    expected = 0
    while expected < limit and wanted[: (expected + 1) * page_size] in prefixes:
        expected += 1
    [found] = find(cache, wanted, page_size)
    assert [held[page] for page in found] == [wanted[: (i + 1) * page_size] for i in range(expected)]


GROUPS = [GroupLimits(), GroupLimits(window=1), GroupLimits(window=3), GroupLimits(window=4), GroupLimits(chunk=4), GroupLimits(chunk=3)]


@given(data=st.data(), groups=st.lists(st.sampled_from(GROUPS), min_size=1, max_size=3), page_size=st.sampled_from([1, 2, 3]))
def test_hits_of_groups_equal_brute_force(data: st.DataObject, groups: list[GroupLimits], page_size: int) -> None:
    """Any set of known pages: the hit is the longest behind which a token finds all that it sees; a hit watched goes stale in time."""
    pool = PagePool(100)
    cache = PrefixCache(pool, page_size, groups)
    tokens, count = list(range(8 * page_size + 1)), 8
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, cache.chain_root(), tokens, count)
    known = {}
    for group in range(len(groups)):
        for i in data.draw(st.sets(st.integers(0, count - 1))):
            [page] = pool.allocate(1)
            cache.register(hashes[i], group, page)
            known[group, i] = page

    def seen(group: int, length: int) -> range:
        return range(groups[group].first_visible(length * page_size) // page_size, length)

    def brute_force() -> list[list[int]]:
        lengths = [n for n in range(count + 1) if all((group, i) in known for group in range(len(groups)) for i in seen(group, n))]
        best = max(lengths)
        return [[known[group, i] if i in seen(group, best) else 0 for i in range(best)] for group in range(len(groups))]

    hit = cache.find([], cache.chain_root(), tokens, count)
    assert hit.tables == brute_force()
    watch = cache.watch(hit)
    group, i = data.draw(st.tuples(st.integers(0, len(groups) - 1), st.integers(0, count - 1)))
    if (group, i) in known:
        cache._forget(known.pop((group, i)))
    else:
        [known[group, i]] = pool.allocate(1)
        cache.register(hashes[i], group, known[group, i])
    assert watch.is_stale or brute_force() == hit.tables
