"""Finds where stop strings end a text that arrives in pieces, and lets nothing of a stop string out before.

Text is held back only while it could still be the beginning of a stop string, so at most `max(len(stop)) - 1` characters. The
result does not depend on how the text was cut into pieces. Knows no tokens. Next: `sequence_text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """Text that may go to the client now, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None


class StopStrings:
    """Watches one text for its stop strings; the one that completes first ends it (of several, the longest).

    Args:
        stops: Non-empty strings; may be none at all.
        is_included: The text keeps the stop string that ended it.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_included = is_included
        self._held = ""

    def push(self, text: str, *, can_match: bool = True) -> Released:
        """Adds text; after a match nothing more may be pushed.

        Args:
            text: The new piece.
            can_match: False lets stop strings that complete in this piece pass (the first `min_tokens` tokens).
        """
        if not self._stops:
            return Released(text, None)
        buffer = self._held + text
        if can_match and (match := self._first_match(buffer)):
            end, stop = match
            self._held = ""
            return Released(buffer[: end if self._is_included else end - len(stop)], stop)
        num_held = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - num_held :]
        return Released(buffer[: len(buffer) - num_held], None)

    def flush(self) -> str:
        """The held text, when the sequence ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        """End and stop string of the match that completes first in the new part of `buffer`.

        A match that begins in earlier text lies in the buffer whole: its earlier part was held back.
        """
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            end = at + len(stop)
            if at >= 0 and (best is None or (end, -len(stop)) < (best[0], -len(best[1]))):
                best = end, stop
        return best


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
