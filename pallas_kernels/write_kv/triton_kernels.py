# ruff: noqa: SIM108
# mypy: ignore-errors
"""The Triton kernel that writes a step's keys and values into their pages. Nothing here runs without triton; next: `triton`."""

import triton
import triton.language as tl


@triton.jit
def _round(x):
    """To the nearest integer, halves to even, for |x| < 2^22: adding 1.5 x 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _float8_bits(x):
    """The bits of float8_e4m3fn nearest to float32 numbers within [-448, 448]. Cards below capability 8.9 have no instruction for it."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # 20 of the 23 bits of mantissa go, halves to even; a carry grows the exponent, whose bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9; what rounds up to 8 of them is the smallest normal number, 8 in bits as well.
    small = _round(magnitude.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def write(
    k, v, write_page, write_offset, pages, scales,
    K: tl.constexpr, PARTS: tl.constexpr, PAGE_SIZE: tl.constexpr, H: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr, LARGEST: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """One program for each (token, part). HEADS and DIMS are K and H padded to powers of two; LARGEST 0 stores numbers as they are."""
    token = tl.program_id(0)
    part = tl.program_id(1)
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    mask = (head < K)[:, None] & (dim < H)[None, :]
    source = (token.to(tl.int64) * K + head[:, None]) * H + dim[None, :]
    if PARTS == 2:
        if part == 0:
            x = tl.load(k + source, mask=mask, other=0.0)
        else:
            x = tl.load(v + source, mask=mask, other=0.0)
    else:
        x = tl.load(k + source, mask=mask, other=0.0)
    # Places of all pages together pass 2^31.
    page = tl.load(write_page + token).to(tl.int64)
    place = ((page * PARTS + part) * K + head) * PAGE_SIZE + tl.load(write_offset + token)
    if LARGEST > 0.0:
        x = x.to(tl.float32)
        peak = tl.max(tl.abs(x), 1)
        scale = tl.where(peak == 0.0, 1.0, tl.div_rn(peak, tl.full([HEADS], LARGEST, tl.float32)))
        # A NaN must show when its token is read, and 8 bits may have none: the scale carries it. A maximum does not.
        has_nan = tl.max((x != x).to(tl.int32), 1) > 0
        scale = tl.where(has_nan, float("nan"), scale)
        tl.store(scales + place, scale, mask=head < K)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], [HEADS, DIMS]))
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        if IS_FP8:
            stored = _float8_bits(x)
        else:
            stored = _round(x).to(tl.int8)
    else:
        stored = x.to(pages.dtype.element_ty)
    tl.store(pages + place[:, None] * H + dim[None, :], stored, mask=mask)
