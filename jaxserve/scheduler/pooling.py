"""Embeddings: which hidden states of a chunk count, and their sum over chunks.

A sequence that was preempted in mid-prompt computes it again from the start where all of it counts, and then its sum starts anew too.
Next: `scheduler.results`, which ends the sequence when its prompt is computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jaxserve.core.plan import Row
from jaxserve.core.sequence import Sequence

if TYPE_CHECKING:
    import numpy as np


def needs_every_position(sequence: Sequence) -> bool:
    """Whether the hidden states of all prompt tokens are wanted, so that none may come from the prefix cache."""
    pooling = sequence.request.pooling
    return pooling is not None and pooling.pooling == "mean"


def num_pooled_tokens(sequence: Sequence, start: int, num_tokens: int) -> int:
    """Of the `num_tokens` tokens from position `start` how many last ones count."""
    if needs_every_position(sequence):
        return num_tokens
    return int(sequence.request.pooling is not None and start + num_tokens == sequence.num_prompt_tokens)


def collect(sequence: Sequence, row: Row, summed: np.ndarray) -> bool:
    """Adds the sum of a row, float32 [hidden size]; False when it is not finite."""
    part = summed.astype("float64")  # many chunks lose nothing
    sequence.pooled = part if sequence.pooled is None or row.start == 0 else sequence.pooled + part
    return math.isfinite(part.sum())


def embedding(sequence: Sequence) -> list[float]:
    """The pooled hidden state of a prompt that is computed, in float32's values."""
    assert sequence.pooled is not None
    count = sequence.num_prompt_tokens if needs_every_position(sequence) else 1
    values: list[float] = (sequence.pooled / count).astype("float32").tolist()
    return values
