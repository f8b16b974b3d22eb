"""What an engine has done since it started: totals over its steps, counted as they are committed. Knows neither devices nor threads.

Next: `engine.engine`, which counts, and `engine.stats`, in whose form the totals leave the engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from jaxserve.core.events import TokenEvent
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.stats import STEP_TOKEN_BOUNDS


class Totals:
    """Sums over all committed steps."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_step_tokens = 0
        self._step_token_counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_corrupted_sequences = 0

    def add(self, num_tokens: int, events: Iterable[TokenEvent]) -> None:
        """Counts a step of `num_tokens` tokens and what its commit gave. A prompt counts when its first token is there."""
        self._num_steps += 1
        self._num_step_tokens += num_tokens
        self._step_token_counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        for event in events:
            self._num_generated_tokens += len(event.token_ids)
            if event.queue_s is not None:
                self._num_prompt_tokens += event.num_prompt_tokens
            if event.finish_reason is FinishReason.ERROR:  # a commit ends a sequence so for logits that are not finite, and only then
                self._num_corrupted_sequences += 1

    def figures(self) -> dict[str, Any]:
        """The totals by their names in `EngineStats`."""
        return {
            "num_steps": self._num_steps,
            "num_step_tokens": self._num_step_tokens,
            "step_token_counts": tuple(self._step_token_counts),
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_generated_tokens": self._num_generated_tokens,
            "num_corrupted_sequences": self._num_corrupted_sequences,
        }
