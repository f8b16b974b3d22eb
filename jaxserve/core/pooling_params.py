"""What a client may ask of an embedding: how hidden states become one vector, and what becomes of the vector.

Knows no tokenizer and no model; whether a model's vectors are long enough is checked in `jaxserve.engine.admission`. The engine reads
`pooling` alone: `finish` is called where the vector is handed to its client. Next: `core.request`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.config import POOLINGS
from jaxserve.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to embed a prompt. Raises `InvalidRequest`, naming the field, on a value out of range.

    Attributes:
        pooling: "last" is the hidden state of the prompt's last token, "mean" the mean over all its tokens; both after the final norm.
        normalize: Scale the vector to length 1.
        dimensions: Keep so many leading values (Matryoshka embeddings), before normalizing; None keeps all.
    """

    pooling: str = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise InvalidRequest(f"pooling is {self.pooling!r}; it must be one of {', '.join(POOLINGS)}.", param="pooling")
        if not isinstance(self.normalize, bool):
            raise InvalidRequest(f"normalize is {self.normalize!r}; it must be true or false.", param="normalize")
        if self.dimensions is not None:
            if isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int):
                raise InvalidRequest(f"dimensions is {self.dimensions!r}; it must be an integer.", param="dimensions")
            if self.dimensions < 1:
                raise InvalidRequest(f"dimensions is {self.dimensions}; it must be at least 1.", param="dimensions")

    def finish(self, pooled: Sequence[float]) -> list[float]:
        """The vector that the client gets of a pooled one: cut, then scaled. A vector of zeros stays as it is."""
        vector = list(pooled[: self.dimensions])
        length = math.hypot(*vector) if self.normalize else 0.0
        return [value / length for value in vector] if length else vector
