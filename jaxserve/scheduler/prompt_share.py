"""n > 1: one sequence of the request computes the prompt, the others take its full pages by reference.

Works with prefix caching off too, but not for models with a recurrent state, of which each sequence needs its own. The share is an owner
of the pages itself, so they live until every child is admitted, even when the sequence that computed them finished, was aborted or
preempted meanwhile. Knows no budget. Next: `scheduler.sequence_pages`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jaxserve.cache.page_pool import NULL_PAGE
from jaxserve.core.sequence import Sequence
from jaxserve.scheduler.sequence_pages import PageTables, SequencePages


@dataclass(slots=True, eq=False)
class _Share:
    leader: Sequence  # computes the prompt
    children: list[Sequence]  # never admitted yet: parked here until `pages` is set, in the waiting queue after
    pages: PageTables | None = None


class PromptShares:
    """The shares of all requests with sequences that were never admitted yet."""

    def __init__(self, pages: SequencePages, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size
        self._shares: dict[str, _Share] = {}

    def __bool__(self) -> bool:
        return bool(self._shares)

    @property
    def num_parked(self) -> int:
        """Children that wait for their prompt, outside the waiting queue."""
        return sum(len(share.children) for share in self._shares.values() if share.pages is None)

    def add(self, sequences: list[Sequence]) -> None:
        """The first sequence will compute the prompt for the others."""
        self._shares[sequences[0].request.request_id] = _Share(sequences[0], sequences[1:])

    def prefix_of(self, sequence: Sequence) -> PageTables | None:
        """Pages that the sequence takes over at its first admission, None when it has no share in a prompt."""
        share = self._shares.get(sequence.request.request_id)
        return share.pages if share is not None and sequence in share.children else None

    def on_computed(self, sequence: Sequence, length: int) -> list[Sequence]:
        """The first `length` tokens of a running sequence are computed. Returns children that may now enter the queue.

        They recompute the last partial page (a whole one when the prompt ends with a page): no page has two writers, and the
        last token gives them their logits.
        """
        share = self._shares.get(sequence.request.request_id)
        if share is None or share.leader is not sequence or share.pages is not None or length < sequence.num_prompt_tokens:
            return []
        children = list(share.children)
        for child in children:
            child.num_cached_tokens = sequence.num_cached_tokens
            child.prompt_logprobs = sequence.prompt_logprobs
        if sequence.rope_length != sequence.num_prompt_tokens:
            # It was readmitted with output tokens, so a length-dependent RoPE may have used another table than a child will.
            self._close(share)
            return children
        num_pages = (sequence.num_prompt_tokens - 1) // self._page_size
        share.pages = self._pages.shared_prefix(sequence, num_pages)
        return children

    def end_unshared(self, sequence: Sequence, length: int) -> int:
        """Of a sequence's first `length` tokens how many it may take for seen: no more than children will start behind."""
        share = self._shares.get(sequence.request.request_id)
        if share is None or share.leader is not sequence or share.pages is not None or sequence.rope_length != sequence.num_prompt_tokens:
            return length
        return min(length, (sequence.num_prompt_tokens - 1) // self._page_size * self._page_size)

    def on_admitted(self, sequence: Sequence) -> None:
        """A child has its own references now (or a sequence without a share was admitted: nothing happens)."""
        share = self._shares.get(sequence.request.request_id)
        if share is not None and sequence in share.children:
            share.children.remove(sequence)
            self._close_if_done(share)

    def on_ended(self, sequence: Sequence) -> list[Sequence]:
        """A sequence ended in any state. Returns the child, if any, that now computes the prompt in its place."""
        share = self._shares.get(sequence.request.request_id)
        if share is None:
            return []
        promoted = []
        if sequence in share.children:
            share.children.remove(sequence)
        elif share.leader is sequence and share.pages is None:
            share.leader = share.children.pop(0)
            promoted.append(share.leader)
        self._close_if_done(share)
        return promoted

    def drop_idle(self) -> bool:
        """Give up one share whose pages nobody else holds; its children compute their prompts themselves. False if there is none.

        Done before a running sequence is preempted, and when nothing else could ever free pages.
        """
        for share in reversed(self._shares.values()):
            if share.pages is not None and any(self._pages.pool.ref_count(page) == 1 for table in share.pages for page in table):
                self._close(share)
                return True
        return False

    def forget_pages(self) -> None:
        """The device lost its pages: children in the queue compute their prompts themselves."""
        for share in list(self._shares.values()):
            if share.pages is not None:
                self._close(share)

    def owners(self) -> Counter[int]:
        """How often each page is held by a share."""
        return Counter(page for share in self._shares.values() for table in share.pages or () for page in table if page != NULL_PAGE)

    def _close_if_done(self, share: _Share) -> None:
        if not share.children:
            self._close(share)

    def _close(self, share: _Share) -> None:
        if share.pages is not None:
            self._pages.free(share.pages)
        del self._shares[share.leader.request.request_id]
