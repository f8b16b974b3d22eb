"""Log-probabilities of the prompt: which positions of a chunk must return one, and their collection over chunks.

The token at prompt position p + 1 is judged by the logits of position p, so the first prompt token has none. After a
preemption in mid-prompt the entries so far are kept, and those computed again are equal.
"""

from __future__ import annotations

from jaxserve.core.events import Logprobs
from jaxserve.core.sequence import Sequence


def is_complete(sequence: Sequence) -> bool:
    """True when nothing is left to collect (or nothing was asked)."""
    entries = sequence.prompt_logprobs
    return entries is None or len(entries) == sequence.num_prompt_tokens


def chunk_targets(sequence: Sequence, start: int, num_tokens: int) -> tuple[int, ...]:
    """For each of the chunk's positions the prompt token that follows, -1 after the prompt's end; () when none is missing."""
    last = sequence.num_prompt_tokens - 1
    if is_complete(sequence) or start >= last:
        return ()
    end = start + num_tokens
    targets = tuple(sequence.token_ids[start + 1 : min(end, last) + 1])
    return targets + (-1,) * (num_tokens - len(targets))


def collect(sequence: Sequence, start: int, entries: list[Logprobs]) -> None:
    """Keep the entries of a chunk that began at position `start`."""
    known = sequence.prompt_logprobs
    assert known is not None and len(known) > start, "a chunk of prompt logprobs is missing"
    known[start + 1 : start + 1 + len(entries)] = entries
