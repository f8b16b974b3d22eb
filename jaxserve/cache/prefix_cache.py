"""Which pages hold which token prefix: chained sha256 keys of full pages, mapped to page ids.

The key of page i covers its tokens, all tokens before it and the chain's tags (cache salt, adapter, RoPE table), so equal keys
mean equal KV content. Knows no sequences; lookups neither own nor touch pages. Next: `scheduler.sequence_pages`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import Struct
from typing import NamedTuple

from jaxserve.cache.page_pool import NULL_PAGE, PagePool
from jaxserve.config import GroupLimits


class Hit(NamedTuple):
    """A known prefix: for each group its pages, the null page where the next token does not look; and the keys that were missed."""

    tables: list[list[int]]
    missing: set[bytes]


@dataclass(slots=True)
class Watch:
    """A hit, whose pages must stay known, and whose missing keys must stay unknown, for it to be the longest."""

    pages: frozenset[int]
    missing: set[bytes]
    is_stale: bool = False


class PrefixCache:
    """Map from prefix key and KV group to pages. A page keeps its key until the pool hands it out again.

    Two sequences that fill equal pages both keep theirs (page tables only grow), so a key may have several pages.
    """

    def __init__(self, pool: PagePool, page_size: int, groups: Sequence[GroupLimits] = (GroupLimits(),)) -> None:
        self._pool = pool
        self._page_size = page_size
        self._pack_page = Struct(f"<{page_size}I").pack
        self._groups = tuple(groups)
        self._is_whole = [group.reach is None for group in groups]
        self._group_tags = [group.to_bytes(4, "little") for group in range(len(groups))]
        self._pages: dict[bytes, list[int]] = {}  # never empty, the page that was filled first ahead
        self._keys: dict[int, bytes] = {}
        # Random, so that keys cannot be predicted or compared across processes.
        self._secret = secrets.token_bytes(32)
        self._watch: Watch | None = None
        pool.on_evict(self._forget)

    def __len__(self) -> int:
        """Number of pages with a known prefix."""
        return len(self._keys)

    def chain_root(self, **tags: str | None) -> bytes:
        """Parent key of a first page. Tags are named and length-prefixed, so a salt never collides with an equal adapter name."""
        root = sha256(self._secret)
        for name, value in sorted(tags.items()):
            if value is not None:
                data = value.encode("utf-8", "surrogatepass")
                root.update(f"{name}:{len(data)}:".encode() + data)
        return root.digest()

    def extend_hashes(self, hashes: list[bytes], root: bytes, token_ids: Sequence[int], num_pages: int) -> None:
        """Append the hashes of pages `len(hashes)` .. num_pages - 1 of `token_ids`; the chain starts at `root`."""
        parent, size = hashes[-1] if hashes else root, self._page_size
        for start in range(len(hashes) * size, num_pages * size, size):
            parent = sha256(parent + self._pack_page(*token_ids[start : start + size])).digest()
            hashes.append(parent)

    def find(self, hashes: list[bytes], root: bytes, token_ids: Sequence[int], max_pages: int) -> Hit:
        """The longest known prefix of at most `max_pages` pages that every group has, as far as the token behind it sees.

        A group that sees everything needs all pages of the prefix, so the search ends at the first that it lacks; the others need
        only the last ones. Extends `hashes` as far as it looks.
        """
        chains: list[list[int]] = [[] for _ in self._groups]  # pages by group, the null page where one is missing
        starts = [0] * len(chains)  # of the unbroken run at the end of each chain
        missing: set[bytes] = set()
        num_pages, all_whole = 0, all(self._is_whole)
        for i in range(max_pages):
            if i == len(hashes):
                self.extend_hashes(hashes, root, token_ids, i + 1)
            is_over = False
            for group, tag in enumerate(self._group_tags):
                key = hashes[i] + tag
                if pages := self._pages.get(key):
                    chains[group].append(pages[0])
                else:
                    chains[group].append(NULL_PAGE)
                    starts[group] = i + 1
                    missing.add(key)
                    is_over = is_over or self._is_whole[group]
            if is_over:
                break
            if all_whole or all(start <= first for start, first in zip(starts, self.first_pages(i + 1), strict=True)):
                num_pages = i + 1
        if num_pages == 0:
            return Hit([[] for _ in chains], missing)
        firsts = self.first_pages(num_pages)
        tables = [[NULL_PAGE] * first + chain[first:num_pages] for first, chain in zip(firsts, chains, strict=True)]
        return Hit(tables, missing)

    def first_pages(self, num_pages: int) -> list[int]:
        """For each group the first page that the token behind `num_pages` pages sees; `num_pages` where it sees none."""
        position = num_pages * self._page_size
        return [group.first_visible(position) // self._page_size for group in self._groups]

    def watch(self, hit: Hit) -> Watch:
        """Have `is_stale` set as soon as `find` with the same hashes could give anything else. Ends the watch before."""
        pages = frozenset([page for table in hit.tables for page in table if page != NULL_PAGE])
        self._watch = Watch(pages, hit.missing)
        return self._watch

    def register(self, page_hash: bytes, group: int, page: int) -> None:
        """The owned page now holds the full page with this hash. A page is filled once, so it gets a key once."""
        assert page not in self._keys, f"page {page} is written again while its prefix is known"
        self._keys[page] = key = page_hash + self._group_tags[group]
        self._pages.setdefault(key, []).append(page)
        self._pool.mark_cached(page)
        if self._watch is not None and key in self._watch.missing:
            self._watch.is_stale = True

    def reset(self) -> None:
        """Forget every prefix."""
        for page in list(self._keys):
            self._forget(page)
            self._pool.unmark_cached(page)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Nobody may read pages with these hashes any more, in any group, whoever filled them."""
        for page_hash in hashes:
            for tag in self._group_tags:
                for page in list(self._pages.get(page_hash + tag, ())):
                    self._forget(page)
                    self._pool.unmark_cached(page)

    def _forget(self, page: int) -> None:
        if self._watch is not None and page in self._watch.pages:
            self._watch.is_stale = True
        key = self._keys.pop(page)
        pages = self._pages[key]
        if len(pages) == 1:
            del self._pages[key]
        else:
            pages.remove(page)

    def check_integrity(self) -> None:
        """Assert that keys, pages and the pool's marks agree."""
        assert {page: key for key, pages in self._pages.items() for page in pages} == self._keys
        assert all(pages for pages in self._pages.values())
        marked = {page for page in range(self._pool.num_pages) if self._pool.is_cached(page)}
        assert marked == self._keys.keys(), "the pool's marks and the cache's keys differ"
