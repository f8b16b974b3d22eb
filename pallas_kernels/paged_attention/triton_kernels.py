# An `if` on a constexpr leaves code out; merged with another condition, or as an expression, it would not read so.
# ruff: noqa: SIM102, SIM108
# mypy: ignore-errors
"""The Triton kernels of paged attention: one that walks keys, one that adds up the parts of a row that was split.

A program owns BLOCK_M query rows: a few tokens of one row of the step, times the query heads that share a kv head, so that a key is loaded
once for all of them. It walks the keys that its tokens see in tiles of TILE positions, which know nothing of pages: each position looks its
page up in the table. Scores are kept in units of log2, with a running peak and sum (Milakov and Gimelshein, arXiv 1805.02867).

The head dimension is two pieces, D1 and D2: tiles must be powers of two, and 192 = 128 + 64, 96 = 64 + 32, 80 = 64 + 16,
576 = 512 + 64 then cost no padding. Launches, sizes and the reasons for them: `triton`. Nothing here runs without triton.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _as_operand(stored, like, IS_FP8: tl.constexpr):
    """Elements of pages in the dtype of `like`, exactly (before any scale)."""
    if IS_FP8:
        # The bits of float8_e4m3fn, shifted into float16, are the value / 256, subnormals too. 0x7F is the one NaN.
        bits = stored.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((stored & 0x7F) == 0x7F, float("nan"), value)
        return value.to(like.dtype)
    return stored.to(like.dtype)


@triton.jit
def _load_rows(base, place, dim, is_row, H: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """Loads [rows, dims]; what a mask leaves out is 0 and is not touched."""
    pointers = base + place[:, None] + dim[None, :]
    if MASK_ROWS and MASK_DIMS:
        return tl.load(pointers, mask=is_row[:, None] & (dim < H)[None, :], other=0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=is_row[:, None], other=0)
    elif MASK_DIMS:
        return tl.load(pointers, mask=(dim < H)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a token at `position` sees; 0 stands for no window, no chunk."""
    if WINDOW > 0:
        return tl.maximum(position - (WINDOW - 1), 0)
    elif CHUNK > 0:
        return (position // CHUNK) * CHUNK
    else:
        return position * 0


@triton.jit
def _tiles_of_split(first_key, end_key, split, num_splits, TILE: tl.constexpr, MIN_TILES: tl.constexpr):
    """The tiles [first, end) of a split. All but the last have the same number, MIN_TILES at least, so a short row has few splits."""
    first = first_key // TILE
    end = tl.cdiv(end_key, TILE)
    used = tl.maximum(tl.minimum((end - first) // MIN_TILES, num_splits), 1)
    size = tl.cdiv(end - first, used)
    first = first + split * size
    return first, tl.minimum(first + size, end)


@triton.jit
def _walk(
    q1, q2, acc1, acc2, peak, total,
    pages, kv_scales, table, kv_head,
    first_tile, end_tile, first_key, end_key, q_position, q_first,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    PARTS: tl.constexpr, K: tl.constexpr, PAGE_SIZE: tl.constexpr, H: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE: tl.constexpr, IS_FP8: tl.constexpr, HAS_SCALES: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the tiles [first_tile, end_tile) into the running softmax. Without MASKED all queries see all of their keys."""
    dim1 = tl.arange(0, D1)
    PART: tl.constexpr = K * PAGE_SIZE
    MASK1: tl.constexpr = D1 > H
    MASK2: tl.constexpr = D1 + D2 > H
    for tile in tl.range(first_tile, end_tile):
        key = tile * TILE + tl.arange(0, TILE)
        is_key = (key >= first_key) & (key < end_key)
        if MASKED:
            page = tl.load(table + key // PAGE_SIZE, mask=is_key, other=0)
        else:
            page = tl.load(table + key // PAGE_SIZE)
        # Places of all pages together pass 2^31.
        place = page.to(tl.int64) * (PARTS * PART) + kv_head * PAGE_SIZE + key % PAGE_SIZE
        k1 = _as_operand(_load_rows(pages, place * H, dim1, is_key, H, MASKED, MASK1), q1, IS_FP8)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if D2 > 0:
            dim2 = D1 + tl.arange(0, D2)
            k2 = _as_operand(_load_rows(pages, place * H, dim2, is_key, H, MASKED, MASK2), q2, IS_FP8)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
        if HAS_SCALES:
            scores = scores * tl.load(kv_scales + place, mask=is_key, other=0.0)[None, :]
        if SOFT_CAP > 0.0:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both ends.
            power = tl.exp2(scores * (SCALE / SOFT_CAP * 2.0 * LOG2_E))
            scores = (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (power + 1.0))
        else:
            scores = scores * (SCALE * LOG2_E)
        if MASKED:
            is_visible = is_key[None, :] & (key[None, :] <= q_position[:, None]) & (key[None, :] >= q_first[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing visible yet: -inf + inf would be NaN
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        # A weight of 0 would let a NaN of V through, but what is not a key was loaded as 0.
        if PARTS == 2:
            place += PART
            v1 = _as_operand(_load_rows(pages, place * H, dim1, is_key, H, MASKED, MASK1), q1, IS_FP8)
        else:
            v1 = k1
        if HAS_SCALES:
            weights = weights * tl.load(kv_scales + place, mask=is_key, other=0.0)[None, :]
        weights = weights.to(q1.dtype)
        acc1 = tl.dot(weights, v1, acc1 * decay[:, None], input_precision=PRECISION)
        if D2 > 0:
            if PARTS == 2:
                v2 = _as_operand(_load_rows(pages, place * H, dim2, is_key, H, MASKED, MASK2), q2, IS_FP8)
            else:
                v2 = k2
            acc2 = tl.dot(weights, v2, acc2 * decay[:, None], input_precision=PRECISION)
    return acc1, acc2, peak, total


@triton.jit
def _store_piece(base, place, dim, is_row, value, H: tl.constexpr, MASK_DIMS: tl.constexpr):
    mask = is_row[:, None]
    if MASK_DIMS:
        mask = mask & (dim < H)[None, :]
    tl.store(base + place[:, None] + dim[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def attend(
    q, pages, kv_scales, page_tables, row_start, kv_length, position, tiles, sinks, out, stats,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PAGE_SIZE: tl.constexpr, P: tl.constexpr,
    H: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, IS_SPLIT: tl.constexpr, MIN_TILES: tl.constexpr,
    IS_FP8: tl.constexpr, HAS_SCALES: tl.constexpr, IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One program for each (row or tile of tokens, block of heads, split).

    ROWS says what axis 0 of the grid counts: "decode", rows of which each has the token of its own number; "single", rows, and those that
    have not just one token are left to another launch; "tiles", entries of `tiles` [..., 3]: row (-1 is padding), first token, tokens.
    HEADS of a kv head's query heads share a program. With IS_SPLIT `out` [B, N, splits, H] takes sums that are not divided yet, and
    `stats` [B, N, splits, 2] peaks and totals (axis 2 of the grid is the splits, so that one kernel serves any number of them); else
    `out` is [T, N, H], and `stats` is not touched.
    """
    GROUP: tl.constexpr = N // K
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # Products of float32 are exact to float32 either way: three of tensor cores, or, where their operands fill all registers, plain ones.
    PRECISION: tl.constexpr = "tf32x3" if IS_FLOAT32 and D1 + D2 <= 256 else "ieee"
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    first_head = (tl.program_id(1) % HEAD_BLOCKS) * HEADS
    split = tl.program_id(2)

    if ROWS == "tiles":
        entry = tiles + tl.program_id(0) * 3
        row = tl.load(entry)
        first_token = tl.load(entry + 1)
        num_tokens = tl.load(entry + 2)
        if num_tokens == 0:
            return
        length = tl.load(kv_length + row, mask=row >= 0, other=0)
        first_position = tl.load(position + first_token)
        last_position = tl.load(position + first_token + num_tokens - 1)
    else:
        row = tl.program_id(0)
        length = tl.load(kv_length + row)
        num_tokens = 1
        first_token = row
        if ROWS == "single":
            first_token = tl.load(row_start + row)
            if tl.load(row_start + row + 1) - first_token != 1:
                return
        first_position = length - 1
        last_position = length - 1

    end_key = tl.minimum(last_position + 1, length)
    first_key = tl.minimum(_first_seen(tl.maximum(first_position, 0), WINDOW, CHUNK), end_key)
    first_tile, end_tile = _tiles_of_split(first_key, end_key, split, tl.num_programs(2), TILE, MIN_TILES)
    if split > 0 and first_tile >= end_tile:
        return

    m = tl.arange(0, BLOCK_M)
    token = first_token + m // HEADS
    head = first_head + m % HEADS
    is_query = (m // HEADS < num_tokens) & (head < GROUP)
    q_head = kv_head * GROUP + head
    if ROWS == "tiles":
        q_position = tl.load(position + token, mask=is_query, other=-1)
    else:
        q_position = tl.where(is_query, last_position, -1)
    q_first = _first_seen(tl.maximum(q_position, 0), WINDOW, CHUNK)

    MASK1: tl.constexpr = D1 > H
    MASK2: tl.constexpr = D1 + D2 > H
    q_place = (token.to(tl.int64) * N + q_head) * H
    dim1 = tl.arange(0, D1)
    q1 = _load_rows(q, q_place, dim1, is_query, H, True, MASK1)
    acc1 = tl.zeros([BLOCK_M, D1], dtype=tl.float32)
    if D2 > 0:
        dim2 = D1 + tl.arange(0, D2)
        q2 = _load_rows(q, q_place, dim2, is_query, H, True, MASK2)
        acc2 = tl.zeros([BLOCK_M, D2], dtype=tl.float32)
    else:
        q2 = m
        acc2 = m
    if IS_FLOAT32:
        q1 = q1.to(tl.float32)
        if D2 > 0:
            q2 = q2.to(tl.float32)

    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        if split == 0:  # a sink is a key without a value: one split has it
            peak = tl.load(sinks + q_head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
            total = total + 1.0

    # All queries see the keys up to the first query's; only what follows needs masks. Not worth a second loop, whose loads start late,
    # where a window or chunk has an edge on the left too, or where a single token waits for memory and not for masks.
    mask_from = first_tile
    if ROWS == "tiles" and WINDOW == 0 and CHUNK == 0:
        mask_from = tl.maximum(tl.minimum(tl.minimum(first_position + 1, end_key) // TILE, end_tile), first_tile)
        acc1, acc2, peak, total = _walk(
            q1, q2, acc1, acc2, peak, total, pages, kv_scales, page_tables + row.to(tl.int64) * P, kv_head,
            first_tile, mask_from, first_key, end_key, q_position, q_first,
            SCALE, SOFT_CAP, PARTS, K, PAGE_SIZE, H, D1, D2, TILE, IS_FP8, HAS_SCALES, False, PRECISION,
        )  # fmt: skip
    acc1, acc2, peak, total = _walk(
        q1, q2, acc1, acc2, peak, total, pages, kv_scales, page_tables + row.to(tl.int64) * P, kv_head,
        mask_from, end_tile, first_key, end_key, q_position, q_first,
        SCALE, SOFT_CAP, PARTS, K, PAGE_SIZE, H, D1, D2, TILE, IS_FP8, HAS_SCALES, True, PRECISION,
    )  # fmt: skip

    if IS_SPLIT:
        part = (row.to(tl.int64) * N + q_head) * tl.num_programs(2) + split
        tl.store(stats + part * 2, peak, mask=is_query)
        tl.store(stats + part * 2 + 1, total, mask=is_query)
        out_place = part * H
    else:
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        acc1 = acc1 * inverse[:, None]
        if D2 > 0:
            acc2 = acc2 * inverse[:, None]
        out_place = q_place
    _store_piece(out, out_place, dim1, is_query, acc1, H, MASK1)
    if D2 > 0:
        _store_piece(out, out_place, dim2, is_query, acc2, H, MASK2)


@triton.jit
def add_splits(
    values, stats, row_start, kv_length, out,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, H: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """One program for each (row, head): `out` [T, N, H] of the row's token from the splits that have tiles. ROWS as in `attend`."""
    row = tl.program_id(0)
    token = row
    if ROWS == "single":
        token = tl.load(row_start + row)
        if tl.load(row_start + row + 1) - token != 1:
            return
    length = tl.load(kv_length + row)
    first_key = tl.minimum(_first_seen(tl.maximum(length - 1, 0), WINDOW, CHUNK), length)
    split = tl.arange(0, SPLITS_PADDED)
    first_tile, end_tile = _tiles_of_split(first_key, length, split, SPLITS, TILE, MIN_TILES)
    is_part = (split < SPLITS) & ((split == 0) | (first_tile < end_tile))

    part = (row.to(tl.int64) * N + tl.program_id(1)) * SPLITS + split
    peaks = tl.load(stats + part * 2, mask=is_part, other=float("-inf"))
    totals = tl.load(stats + part * 2 + 1, mask=is_part, other=0.0)
    peak = tl.max(peaks, 0)
    weights = tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(totals * weights, 0)
    dim = tl.arange(0, DIMS)
    mask = is_part[:, None] & (dim < H)[None, :]
    sums = tl.load(values + part[:, None] * H + dim[None, :], mask=mask, other=0.0)
    result = tl.sum(sums * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    place = (token.to(tl.int64) * N + tl.program_id(1)) * H
    tl.store(out + place + dim, result.to(out.dtype.element_ty), mask=dim < H)
