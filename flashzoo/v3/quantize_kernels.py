"""Inputs of FP8 attention from 16-bit ones: smoothed, rotated, scaled by block and rounded to e4m3, in two kernels
(Triton); and V alone transposed, in a third.

1. `values_kernel`: for smoothing, the mean of a sample of k's rows (`SAMPLE`), rotated, a head a program; beside those
   v, 128 rows of a head a program.
2. `scores_kernel`: k and q, 128 rows of a head at a time, read once.
   a. Rotation: the rows, 64 columns at a time, times a 64 x 64 matrix of signs on the tensor cores, and for head dims
      128 and 256 a butterfly or two between those products: a Hadamard matrix is a product of small ones.
   b. Smoothing: k less the mean of the sample. Softmax does not see what is subtracted from all keys, as all scores of
      a query change by as much: q . mean, which the LSE must get back (`lse_shift`).
3. In both the largest magnitude of a block becomes e4m3's largest number.
4. V as the FP8 tensor core wants it, keys along rows, where asked: four keys of a column make a 32-bit word in
   registers, so what is transposed are words.

Rotated values are kept small, by 2 n (n as in `rotation`), until they are scaled,
so no finite input overflows on the way.
"""

from __future__ import annotations

import random

import triton
import triton.language as tl

from flashzoo._triton.e4m3 import e4m3_bits

E4M3_MAX = tl.constexpr(448.0)
# Smaller magnitudes are rounded as if their block had this one: the reciprocal stays finite.
SMALLEST = tl.constexpr(2.0**-100)
SIGNS = tl.constexpr(random.Random("flashzoo").getrandbits(63))
"""Bit i says whether coordinate i of 64 is negated before the Hadamard matrix."""

# What is done about scales: they are found and used, only found (0 where all is 0), or given.
FIND_AND_USE, FIND, USE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# One compiled kernel for every length, batch and number of heads.
SIZES = ["batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "run"]


@triton.jit
def parity(x):
    """In bit 0, whether x < 64 has an odd number of bits."""
    return 0x96 >> ((x ^ (x >> 3)) & 7)


@triton.jit
def rotation_tile(POWER: tl.constexpr, WIDTH: tl.constexpr):
    """The rotation of WIDTH columns among themselves, with entries +-1 / (2 POWER), exact in 16 bits."""
    PART: tl.constexpr = min(POWER, WIDTH)
    i = tl.arange(0, WIDTH)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    signs = tl.full((WIDTH, 1), SIGNS, tl.int64) >> i.to(tl.int64)
    negative = (parity(i & j & (PART - 1)) ^ signs.to(tl.int32)) & 1
    entry = tl.where(negative == 1, -0.5 / POWER, 0.5 / POWER)
    return tl.where(i // PART == j // PART, entry, 0.0)


@triton.jit
def to_e4m3(y, INTERPRETED: tl.constexpr):
    """Rounded to nearest, ties to even, beyond 448 to 448, and NaN to NaN."""
    if INTERPRETED:  # whose cast halves what carries into the exponent, and makes a number of NaN
        return e4m3_bits(y).to(tl.float8e4nv, bitcast=True)
    return y.to(tl.float8e4nv)


@triton.jit
def scale_of(descale, amax, SCALES: tl.constexpr, TO_TRUE: tl.constexpr):
    """What to multiply a block by before rounding; stores or loads its descale.

    TO_TRUE is the factor from the kernel's small values to true ones.
    """
    if SCALES == USE:
        return TO_TRUE / tl.load(descale)
    else:
        bounded = tl.maximum(amax, SMALLEST)
        if SCALES == FIND:
            tl.store(descale, tl.where(amax > 0, bounded * (TO_TRUE / E4M3_MAX), 0.0))
        else:
            tl.store(descale, tl.where(amax > 0, bounded * (TO_TRUE / E4M3_MAX), 1.0))
        return E4M3_MAX / bounded


@triton.jit
def load_tile(row_ptrs, there, c, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows at the c-th WIDTH columns."""
    d = c * WIDTH + tl.arange(0, WIDTH)
    mask = there[:, None] & (d < HEAD_DIM)[None, :] if (c + 1) * WIDTH > HEAD_DIM else there[:, None]
    return tl.load(row_ptrs[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def butterflies(ys, WIDTH: tl.constexpr, POWER: tl.constexpr):
    """What is left of the rotation, between tiles that are rotated within."""
    if POWER == 2 * WIDTH:
        ys = (ys[0] + ys[1], ys[0] - ys[1])
    elif POWER == 4 * WIDTH:
        ys = (ys[0] + ys[1], ys[0] - ys[1], ys[2] + ys[3], ys[2] - ys[3])
        ys = (ys[0] + ys[2], ys[1] + ys[3], ys[0] - ys[2], ys[1] - ys[3])
    return ys


@triton.jit
def quantize_rows(
    tensors, place, sizes,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr, SMOOTH: tl.constexpr, SHIFT: tl.constexpr,
    SCALES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Blocks of one head.

    Where SMOOTH `times` the mean is subtracted, which is 1 for k.
    Where SHIFT they are multiplied by it, if `times` is 0.
    """
    x, stride_b, stride_s, stride_h, out, descale, mean, shift = tensors
    b, h, first_block, last_block, times = place
    seqlen, heads, heads_kv = sizes
    CHUNKS: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    POWER: tl.constexpr = HEAD_DIM & -HEAD_DIM
    TO_TRUE: tl.constexpr = 2.0 * POWER**0.5 if ROTATE else 2.0  # small values to true ones
    blocks = tl.cdiv(seqlen, ROWS)
    b_h = b.to(tl.int64) * heads + h
    head = x + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    out_head = out + b.to(tl.int64) * seqlen * heads * HEAD_DIM + h * HEAD_DIM
    column = tl.arange(0, WIDTH)
    if ROTATE:
        matrix = rotation_tile(POWER, WIDTH).to(x.dtype.element_ty)
    means = mean + (b.to(tl.int64) * heads_kv + h // (heads // heads_kv)) * HEAD_DIM

    for block in tl.range(first_block, last_block, num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        there = row < seqlen
        row_ptrs = head + row.to(tl.int64) * stride_s
        ys = ()
        for c in tl.static_range(CHUNKS):
            tile = load_tile(row_ptrs, there, c, HEAD_DIM, WIDTH)
            ys = ys + (tl.dot(tile, matrix) if ROTATE else tile.to(tl.float32) * 0.5,)  # noqa: RUF005
        if ROTATE:
            ys = butterflies(ys, WIDTH, POWER)
        if SHIFT:
            along = tl.zeros((ROWS,), tl.float32)
            for c in tl.static_range(CHUNKS):
                d = c * WIDTH + column
                along += tl.sum(ys[c] * tl.load(means + d, mask=d < HEAD_DIM, other=0.0)[None, :], 1)
            tl.store(shift + b_h * seqlen + row, along * (TO_TRUE * TO_TRUE), mask=there & (times == 0))
        if SMOOTH:
            smooth = ()
            for c in tl.static_range(CHUNKS):
                d = c * WIDTH + column
                smooth = smooth + (ys[c] - tl.load(means + d, mask=d < HEAD_DIM, other=0.0)[None, :] * times,)  # noqa: RUF005
            ys = smooth
        largest = tl.max(tl.abs(ys[0]), 1)
        for c in tl.static_range(1, CHUNKS):
            largest = tl.maximum(largest, tl.max(tl.abs(ys[c]), 1))
        amax = tl.max(tl.where(there, largest, 0.0), 0)
        scale = scale_of(descale + b_h * blocks + block, amax, SCALES, TO_TRUE)
        if SCALES != FIND:
            out_ptrs = out_head + row.to(tl.int64) * (heads * HEAD_DIM)
            for c in tl.static_range(CHUNKS):
                d = c * WIDTH + column
                mask = there[:, None] & (d < HEAD_DIM)[None, :] if (c + 1) * WIDTH > HEAD_DIM else there[:, None]
                tl.store(out_ptrs[:, None] + d[None, :], to_e4m3(ys[c] * scale, INTERPRETED), mask=mask)


@triton.jit
def load_keys(head, stride_s, start, offset, seqlen_k, d, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A quarter of KEYS keys, at columns d: of the four keys of each word the one that is `offset` after the first."""
    word = tl.arange(0, KEYS // 4)
    row = start + word // 4 * 16 + word % 4 * 2 + offset
    ptrs = head + row[:, None].to(tl.int64) * stride_s + d[None, :]
    return tl.load(ptrs, mask=(row < seqlen_k)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def magnitude(x):
    """Of 16-bit floats, as integers that compare as they do: half the registers."""
    return x.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def words_of(x_0, x_1, x_8, x_9):
    """Four tiles of bytes as one of 32-bit words, the first lowest."""
    low = x_0.to(tl.uint8, bitcast=True).to(tl.int32) | (x_1.to(tl.uint8, bitcast=True).to(tl.int32) << 8)
    return (
        low | (x_8.to(tl.uint8, bitcast=True).to(tl.int32) << 16) | (x_9.to(tl.uint8, bitcast=True).to(tl.int32) << 24)
    )


@triton.jit
def e4m3_words_of(y_0, y_1, y_8, y_9, INTERPRETED: tl.constexpr):
    """Four float32 tiles, rounded as `to_e4m3` does, as one of 32-bit words, the first lowest."""
    if INTERPRETED:
        return words_of(to_e4m3(y_0, True), to_e4m3(y_1, True), to_e4m3(y_8, True), to_e4m3(y_9, True))
    else:
        # Two roundings are a word, with no bytes in between. Triton rounds two neighbours in a tile at a time, and the
        # bytes of such pairs, put together anew, are optimised wrongly by the ptxas of Triton 3.6 in some layouts of
        # registers, such as those of V whose elements a thread has one by one: a ninth of them came out wrong on an
        # H200, and none with ptxas's optimisation off.
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r",
            [y_0, y_1, y_8, y_9],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def store_transposed(out, b_h, start, words, seqlen_k, d, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Words of keys as rows, at columns d, to where transposed v has them."""
    words_per_row = tl.cdiv(seqlen_k, 16) * 4
    word = start // 4 + tl.arange(0, KEYS // 4)
    ptrs = (
        out.to(tl.pointer_type(tl.int32), bitcast=True) + (b_h * HEAD_DIM + d[:, None]) * words_per_row + word[None, :]
    )
    tl.store(ptrs, tl.trans(words), mask=(d < HEAD_DIM)[:, None] & (word < words_per_row)[None, :])


@triton.jit
def quantize_transposed(
    tensors, place, sizes, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """A block of one head of v, keys along rows."""
    v, stride_b, stride_s, stride_h, out, descale = tensors
    b, h, block = place
    seqlen_k, heads_kv = sizes
    b_h = b.to(tl.int64) * heads_kv + h
    head = v + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    d = tl.arange(0, BLOCK_D)
    start = block * ROWS
    x_0 = load_keys(head, stride_s, start, 0, seqlen_k, d, ROWS, HEAD_DIM)
    x_1 = load_keys(head, stride_s, start, 1, seqlen_k, d, ROWS, HEAD_DIM)
    x_8 = load_keys(head, stride_s, start, 8, seqlen_k, d, ROWS, HEAD_DIM)
    x_9 = load_keys(head, stride_s, start, 9, seqlen_k, d, ROWS, HEAD_DIM)
    largest = tl.maximum(tl.maximum(magnitude(x_0), magnitude(x_1)), tl.maximum(magnitude(x_8), magnitude(x_9)))
    amax = tl.max(largest).to(tl.int16).to(v.dtype.element_ty, bitcast=True).to(tl.float32)
    scale = scale_of(descale + b_h * tl.cdiv(seqlen_k, ROWS) + block, amax, FIND_AND_USE, 1.0)
    words = e4m3_words_of(
        *(
            x_0.to(tl.float32) * scale,
            x_1.to(tl.float32) * scale,
            x_8.to(tl.float32) * scale,
            x_9.to(tl.float32) * scale,
        ),
        INTERPRETED,
    )
    store_transposed(out, b_h, start, words, seqlen_k, d, ROWS, HEAD_DIM)


@triton.jit
def mean_of_keys(
    tensors, place, sizes,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The mean of the sample of one head's keys, small and rotated as `quantize_rows` has them."""
    k, stride_b, stride_s, stride_h, mean = tensors
    b, h = place
    seqlen_k, heads_kv = sizes
    CHUNKS: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    POWER: tl.constexpr = HEAD_DIM & -HEAD_DIM
    blocks = tl.cdiv(seqlen_k, ROWS)
    sampled = tl.minimum(blocks, SPLITS)
    head = k + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    if ROTATE:
        matrix = (rotation_tile(POWER, WIDTH) / SPLITS).to(k.dtype.element_ty)
    ys = ()
    for _ in tl.static_range(CHUNKS):
        ys = ys + (tl.zeros((ROWS, WIDTH), tl.float32),)  # noqa: RUF005
    for i in tl.range(0, sampled, num_stages=STAGES):
        row = i * blocks // sampled * ROWS + tl.arange(0, ROWS)
        row_ptrs = head + row.to(tl.int64) * stride_s
        sums = ()
        for c in tl.static_range(CHUNKS):
            tile = load_tile(row_ptrs, row < seqlen_k, c, HEAD_DIM, WIDTH)
            sums = sums + (tl.dot(tile, matrix, ys[c]) if ROTATE else ys[c] + tile.to(tl.float32) * (0.5 / SPLITS),)  # noqa: RUF005
        ys = sums
    if ROTATE:
        ys = butterflies(ys, WIDTH, POWER)
    weight = SPLITS * 1.0 / tl.minimum(seqlen_k, SPLITS * ROWS)
    for c in tl.static_range(CHUNKS):
        d = c * WIDTH + tl.arange(0, WIDTH)
        tl.store(mean + (b.to(tl.int64) * heads_kv + h) * HEAD_DIM + d, tl.sum(ys[c] * weight, 0), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=SIZES)
def values_kernel(
    k, v, v8, v_descale, mean,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    batch, seqlen_k, heads_kv,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr, TRANSPOSED: tl.constexpr,
    SCALES: tl.constexpr, ROWS: tl.constexpr, MEAN_ROWS: tl.constexpr, MEAN_SPLITS: tl.constexpr,
    MEAN_STAGES: tl.constexpr, SMOOTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Programs of the mean of k, which take longest, then of v;
    of neighbouring heads first, which is how they lie in memory."""
    program = tl.program_id(0)
    h = program % heads_kv
    means = batch * heads_kv if SMOOTH else 0
    if program < means:
        mean_of_keys(
            *((k, k_stride_b, k_stride_s, k_stride_h, mean), (program // heads_kv, h), (seqlen_k, heads_kv)),
            *(HEAD_DIM, WIDTH, ROTATE, MEAN_ROWS, MEAN_SPLITS, MEAN_STAGES),
        )
    else:
        blocks = tl.cdiv(seqlen_k, ROWS)
        rest = (program - means) // heads_kv
        block, b = rest % blocks, rest // blocks
        if TRANSPOSED:
            quantize_transposed(
                *((v, v_stride_b, v_stride_s, v_stride_h, v8, v_descale), (b, h, block), (seqlen_k, heads_kv)),
                *(HEAD_DIM, BLOCK_D, ROWS, INTERPRETED),
            )
        else:
            quantize_rows(
                *((v, v_stride_b, v_stride_s, v_stride_h, v8, v_descale, mean, mean), (b, h, block, block + 1, 0)),
                *((seqlen_k, heads_kv, heads_kv), HEAD_DIM, WIDTH, False, False, False, SCALES, ROWS, 1, INTERPRETED),
            )


@triton.jit(do_not_specialize=SIZES)
def scores_kernel(
    q, k, q8, k8, q_descale, k_descale, mean, shift,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    batch, seqlen_q, seqlen_k, heads, heads_kv, run,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr, SMOOTH: tl.constexpr, SHIFT: tl.constexpr,
    SCALES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Programs of k, then of q, each of `run` blocks; of neighbouring heads first, which is how they lie in memory."""
    program = tl.program_id(0)
    blocks_q, blocks_k = tl.cdiv(seqlen_q, ROWS), tl.cdiv(seqlen_k, ROWS)
    runs_q, runs_k = tl.cdiv(blocks_q, run), tl.cdiv(blocks_k, run)
    programs_k = runs_k * batch * heads_kv
    if program < programs_k:
        x, out, descale, stride_b, stride_s, stride_h = k, k8, k_descale, k_stride_b, k_stride_s, k_stride_h
        seqlen, of_heads, blocks, runs, times = seqlen_k, heads_kv, blocks_k, runs_k, 1.0
    else:
        program -= programs_k
        x, out, descale, stride_b, stride_s, stride_h = q, q8, q_descale, q_stride_b, q_stride_s, q_stride_h
        seqlen, of_heads, blocks, runs, times = seqlen_q, heads, blocks_q, runs_q, 0.0
    h, first, b = program % of_heads, program // of_heads % runs * run, program // of_heads // runs
    tensors = (x, stride_b, stride_s, stride_h, out, descale, mean, shift)
    place, sizes = (b, h, first, tl.minimum(first + run, blocks), times), (seqlen, of_heads, heads_kv)
    quantize_rows(tensors, place, sizes, HEAD_DIM, WIDTH, ROTATE, SMOOTH, SHIFT, SCALES, ROWS, STAGES, INTERPRETED)


@triton.jit(do_not_specialize=["seqlen_k", "heads_kv"])
def transpose_kernel(
    v, out, stride_b, stride_s, stride_h, seqlen_k, heads_kv,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """KEYS keys of WIDTH columns of one head."""
    CHUNKS: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    chunk, rest = program % CHUNKS, program // CHUNKS
    runs = tl.cdiv(seqlen_k, KEYS)
    h, start, b = rest % heads_kv, rest // heads_kv % runs * KEYS, rest // heads_kv // runs
    head = v + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    d = chunk * WIDTH + tl.arange(0, WIDTH)
    words = words_of(
        load_keys(head, stride_s, start, 0, seqlen_k, d, KEYS, HEAD_DIM),
        load_keys(head, stride_s, start, 1, seqlen_k, d, KEYS, HEAD_DIM),
        load_keys(head, stride_s, start, 8, seqlen_k, d, KEYS, HEAD_DIM),
        load_keys(head, stride_s, start, 9, seqlen_k, d, KEYS, HEAD_DIM),
    )
    store_transposed(out, b.to(tl.int64) * heads_kv + h, start, words, seqlen_k, d, KEYS, HEAD_DIM)
