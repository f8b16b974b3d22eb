# mypy: ignore-errors
"""The Triton kernel of `grouped_linear`: one program for each block of rows and tile of outputs. Nothing here runs without triton."""

import triton
import triton.language as tl


@triton.jit
def multiply_blocks(
    x, weight, bias, place, block_expert, num_used, out,
    NO_COPY: tl.constexpr, COPIES: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr, TILE_IN: tl.constexpr, TILE_OUT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Blocks have SIZE rows, padded to ROWS; programs of neighbouring blocks, often of one expert, run together and share its weights."""
    PRECISION: tl.constexpr = "tf32x3" if IS_FLOAT32 else "ieee"
    block = tl.program_id(0)
    if block < tl.load(num_used):
        m = tl.arange(0, ROWS)
        n = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
        copy = tl.load(place + block * SIZE + m, mask=m < SIZE, other=NO_COPY)
        is_copy = (copy != NO_COPY)[:, None]
        row = (copy // COPIES).to(tl.int64)
        acc = tl.zeros([ROWS, TILE_OUT], dtype=tl.float32)
        # All experts' weights together pass 2^31 elements.
        matrix_row = tl.load(block_expert + block).to(tl.int64) * NUM_OUTPUTS + n
        for start in tl.range(0, NUM_INPUTS, TILE_IN):
            k = start + tl.arange(0, TILE_IN)
            rows = tl.load(x + row[:, None] * NUM_INPUTS + k[None, :], mask=is_copy & (k < NUM_INPUTS)[None, :], other=0.0)
            matrix = tl.load(
                weight + matrix_row[:, None] * NUM_INPUTS + k[None, :],
                mask=(n < NUM_OUTPUTS)[:, None] & (k < NUM_INPUTS)[None, :],
                other=0.0,
            )
            acc = tl.dot(rows, tl.trans(matrix), acc, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias + matrix_row, mask=n < NUM_OUTPUTS, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + copy.to(tl.int64)[:, None] * NUM_OUTPUTS + n[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_copy & (n < NUM_OUTPUTS)[None, :],
        )
