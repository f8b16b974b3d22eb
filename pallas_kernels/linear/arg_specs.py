"""The one list of shapes that tests and the bench of `linear` share, and the arrays that belong to a shape.

Next: `test_linear`, `bench_linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """One product's shape. Activations, weight and bias have the same dtype."""

    num_tokens: int
    num_inputs: int
    num_outputs: int
    dtype: str = "bfloat16"
    out_dtype: str = "float32"
    has_bias: bool = False

    @property
    def name(self) -> str:
        """For test ids and cards."""
        return f"{self.num_tokens}x{self.num_inputs}x{self.num_outputs}-{self.dtype}-{self.out_dtype}" + "-bias" * self.has_bias


class LinearArgs(NamedTuple):
    """The positional arguments of `api.linear`, as NumPy arrays."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None


def make_args(spec: LinearSpec, seed: int = 0) -> LinearArgs:
    """Random arrays of a shape, from a standard normal distribution."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[spec.dtype]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    x, weight = normal(spec.num_tokens, spec.num_inputs), normal(spec.num_outputs, spec.num_inputs)
    return LinearArgs(x, weight, normal(spec.num_outputs) if spec.has_bias else None)


TEST_SPECS: tuple[LinearSpec, ...] = (
    # Whole tiles, then a last tile of outputs that is not whole, one or two tiles of tokens, and more tokens than an item has.
    LinearSpec(num_tokens=1, num_inputs=64, num_outputs=96),
    LinearSpec(num_tokens=2, num_inputs=576, num_outputs=64, out_dtype="bfloat16"),
    LinearSpec(num_tokens=17, num_inputs=96, num_outputs=49, has_bias=True),
    LinearSpec(num_tokens=33, num_inputs=32, num_outputs=16, out_dtype="bfloat16", has_bias=True),
    LinearSpec(num_tokens=270, num_inputs=128, num_outputs=600),
    # Too narrow for tiles.
    LinearSpec(num_tokens=7, num_inputs=100, num_outputs=50, has_bias=True),
    LinearSpec(num_tokens=3, num_inputs=7, num_outputs=3, out_dtype="bfloat16"),
    LinearSpec(num_tokens=1, num_inputs=71, num_outputs=21, dtype="float32"),
    LinearSpec(num_tokens=16, num_inputs=64, num_outputs=640, dtype="float32", has_bias=True),
    LinearSpec(num_tokens=40, num_inputs=64, num_outputs=33, dtype="float32"),
    LinearSpec(num_tokens=2, num_inputs=64, num_outputs=33, dtype="float16", out_dtype="float16"),
)

LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""SmolLM2-135M's weights of a layer: fused query, key and value; output; fused gate and up; down."""
BENCH_TOKENS = (1, 2, 8, 32, 128, 512)
