"""How one step's inputs lie in the single int32 array that is uploaded for it.

The host packs (`runner.prepare`) and the traced step unpacks by the same `StepLayout`, so the two cannot drift apart. Floats
travel bit-cast. Knows sizes and offsets only, no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from jaxserve.core.buckets import Bucket

ADMISSION_INTS = ("slot", "length", "top_k", "seed_high", "seed_low", "min_length", "rope_length", "penalty_slot")
ADMISSION_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
ADMISSION_WORDS = len(ADMISSION_INTS) + len(ADMISSION_FLOATS)
"""An admission is a row of words, kept on the device as it came: ints, of which two are the sequence's threefry key, then floats.

top_k 0 is off, temperature 0 greedy; stop ids are masked while the sampled token's position is below min_length; penalty_slot is the null
one where the sequence needs none."""
PAGE_WRITE_WORDS = 4
UPDATE_PAGE_WRITES = 1024
"""Page-table writes that one call of the `update` program takes; a step with more than its own room calls it first."""


class Section(NamedTuple):
    """A named piece of the packed array: words [offset, end)."""

    offset: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StepLayout:
    """Sections of the packed array for one bucket.

    row_slot [B] · row_tokens [B] tokens of each row, 0 for padding · logits_row [R] row behind each logits row, B for padding ·
    is_sampled [R] · tokens [T], -1 for "the slot's last token" · wants_logprobs [1] · admissions [A, 14] · page_writes [W, 4]
    (slot, group, index, page) · targets [T] only with prompt log-probabilities · num_pooled_tokens [B] only with pooling.
    """

    bucket: Bucket
    num_groups: int
    page_size: int

    @property
    def max_page_writes(self) -> int:
        """Room for the pages a step usually starts: two for each row, and what T tokens fill."""
        return self.num_groups * (2 * self.bucket.rows + self.bucket.tokens // self.page_size)

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Offset and shape of each section, in order."""
        bucket = self.bucket
        shapes: dict[str, tuple[int, ...]] = {
            "row_slot": (bucket.rows,),
            "row_tokens": (bucket.rows,),
            "logits_row": (bucket.logits_rows,),
            "is_sampled": (bucket.logits_rows,),
            "tokens": (bucket.tokens,),
            "wants_logprobs": (1,),
            "admissions": (bucket.rows, ADMISSION_WORDS),
            "page_writes": (self.max_page_writes, PAGE_WRITE_WORDS),
        }
        if bucket.has_prompt_logprobs:
            shapes["targets"] = (bucket.tokens,)
        if bucket.has_pooling:
            shapes["num_pooled_tokens"] = (bucket.rows,)
        sections, offset = {}, 0
        for name, shape in shapes.items():
            sections[name] = Section(offset, offset + prod(shape), shape)
            offset = sections[name].end
        return sections

    @cached_property
    def size(self) -> int:
        """Length of the packed array in int32 words."""
        return list(self.sections.values())[-1].end
