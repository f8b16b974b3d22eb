"""Which pages hold which token prefix: chained sha256 keys of full pages, mapped to page ids.

The key of page i covers its tokens, all tokens before it and the chain's tags (cache salt, adapter, RoPE table), so equal keys
mean equal KV content. Knows no sequences; lookups neither own nor touch pages. Next: `scheduler.sequence_pages`.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from jaxserve.cache.page_pool import PagePool


@dataclass(slots=True)
class Watch:
    """A found prefix, whose pages must stay known and whose next page must stay unknown, in any group, for it to be the longest."""

    pages: frozenset[int]
    next_keys: frozenset[bytes]
    is_stale: bool = False


class PrefixCache:
    """Map from prefix key and KV group to pages. A page keeps its key until the pool hands it out again.

    Two sequences that fill equal pages both keep theirs (page tables only grow), so a key may have several pages.
    """

    def __init__(self, pool: PagePool, page_size: int, num_groups: int = 1) -> None:
        self._pool = pool
        self._page_size = page_size
        self._group_tags = [group.to_bytes(4, "little") for group in range(num_groups)]
        self._pages: dict[bytes, dict[int, None]] = {}
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
        parent, first = hashes[-1] if hashes else root, len(hashes) * self._page_size
        tokens = array("i", token_ids[first : num_pages * self._page_size])
        data, page_bytes = tokens.tobytes(), self._page_size * tokens.itemsize
        for start in range(0, len(data), page_bytes):
            parent = sha256(parent + data[start : start + page_bytes]).digest()
            hashes.append(parent)

    def find(self, hashes: list[bytes], root: bytes, token_ids: Sequence[int], max_pages: int) -> list[list[int]]:
        """The longest known prefix of at most `max_pages` pages that every group has: one list of page ids for each group.

        Extends `hashes` as far as it looks, which is one page past the hit.
        """
        tables: list[list[int]] = [[] for _ in self._group_tags]
        for i in range(max_pages):
            if i == len(hashes):
                self.extend_hashes(hashes, root, token_ids, i + 1)
            found = [self._pages.get(hashes[i] + tag) for tag in self._group_tags]
            if not all(found):
                break
            for table, pages in zip(tables, found, strict=True):
                assert pages is not None
                table.append(next(iter(pages)))
        return tables

    def watch(self, tables: list[list[int]], hashes: list[bytes]) -> Watch:
        """Have `is_stale` set as soon as `find` with the same hashes could give anything but `tables`. Ends the watch before."""
        end = hashes[len(tables[0]) : len(tables[0]) + 1]
        pages = frozenset(page for table in tables for page in table)
        self._watch = Watch(pages, frozenset(page_hash + tag for page_hash in end for tag in self._group_tags))
        return self._watch

    def register(self, page_hash: bytes, group: int, page: int) -> None:
        """The owned page now holds the full page with this hash. A page is filled once, so it gets a key once."""
        assert page not in self._keys, f"page {page} is written again while its prefix is known"
        key = page_hash + self._group_tags[group]
        self._keys[page] = key
        self._pages.setdefault(key, {})[page] = None
        self._pool.mark_cached(page)
        if self._watch is not None and key in self._watch.next_keys:
            self._watch.is_stale = True

    def reset(self) -> None:
        """Forget every prefix."""
        self.forget(list(self._keys))

    def forget(self, pages: Iterable[int]) -> None:
        """Nobody may read these pages any more by their prefix; those without a known one are left out."""
        for page in pages:
            if page in self._keys:
                self._forget(page)
                self._pool.unmark_cached(page)

    def _forget(self, page: int) -> None:
        if self._watch is not None and page in self._watch.pages:
            self._watch.is_stale = True
        key = self._keys.pop(page)
        pages = self._pages[key]
        del pages[page]
        if not pages:
            del self._pages[key]

    def check_integrity(self) -> None:
        """Assert that keys, pages and the pool's marks agree."""
        assert {page: key for key, pages in self._pages.items() for page in pages} == self._keys
        assert all(pages for pages in self._pages.values())
        marked = {page for page in range(self._pool.num_pages) if self._pool.is_cached(page)}
        assert marked == self._keys.keys(), "the pool's marks and the cache's keys differ"
