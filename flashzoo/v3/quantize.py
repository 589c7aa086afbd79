"""Inputs of FP8 attention from 16-bit ones: smoothed, rotated, scaled by block and rounded to e4m3, in two kernels (Triton).

1. `values_kernel`: for smoothing, the mean of a sample of k's rows (`SAMPLE`), rotated, a head a program; beside those v, 128
   rows of a head a program.
2. `scores_kernel`: k and q, 128 rows of a head at a time, read once.
   a. Rotation: the rows, 64 columns at a time, times a 64 x 64 matrix of signs on the tensor cores, and for head dims 128 and
      256 a butterfly or two between those products: a Hadamard matrix is a product of small ones.
   b. Smoothing: k less the mean of the sample. Softmax does not see what is subtracted from all keys, as all scores of a
      query change by as much: q . mean, which the LSE must get back (`lse_shift`).
3. In both the largest magnitude of a block becomes e4m3's largest number.
4. V as the FP8 tensor core wants it, keys along rows, where asked: four keys of a column make a 32-bit word in registers,
   so what is transposed are words.

Rotated values are kept small, by 2 n (n as in `rotation`), until they are scaled, so no finite input overflows on the way.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashzoo._triton import Launch
from flashzoo.spec import DESCALE_BLOCK, Problem

E4M3_MAX = tl.constexpr(448.0)
# Smaller magnitudes are rounded as if their block had this one: the reciprocal stays finite.
SMALLEST = tl.constexpr(2.0**-100)
SIGNS = tl.constexpr(random.Random("flashzoo").getrandbits(63))
"""Bit i says whether coordinate i of 64 is negated before the Hadamard matrix."""

# What is done about scales: they are found and used, only found (0 where all is 0), or given.
FIND_AND_USE, FIND, USE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# One compiled kernel for every length, batch and number of heads.
SIZES = ["batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "run"]


class Quantized(NamedTuple):
    """e4m3 inputs of `flashzoo.attention` and what they stand for.

    Attributes:
        q: `(batch, seqlen_q, heads, head_dim)`, e4m3, contiguous.
        k, v: `(batch, seqlen_k, heads_kv, head_dim)`, e4m3, contiguous.
        q_descale, k_descale, v_descale: float32, positive. One for every 128 rows of a head, `(batch, heads,
            ceil(seqlen_q / 128))` for q and `(batch, heads_kv, ceil(seqlen_k / 128))` for k and v, or `(batch, heads_kv)`
            each. What was quantised is the e4m3 number times its descale.
        lse_shift: float32 `(batch, heads, seqlen_q)`; `softmax_scale * lse_shift` is to be added to the LSE of the
            quantised problem. None where k was not smoothed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    lse_shift: Tensor | None


class Cut(NamedTuple):
    """How `scores_kernel` is cut.

    Attributes:
        num_warps: warps of a program.
        num_stages: depth of its software pipeline: with 3 it loads a block while it works on the one before, with 1 it leaves
            that to other programs of the same multiprocessor.
        run: how many blocks it takes one after another, at most.
    """

    num_warps: int
    num_stages: int = 1
    run: int = 4


# By width of the tile that holds the head dim.
CUTS = {16: Cut(4), 32: Cut(4), 64: Cut(4, 3, 8), 128: Cut(4, 3, 8), 256: Cut(8, 3, 8)}

# Warps of a program of `values_kernel`.
VALUES_WARPS = 8

# Runs of blocks are shorter where there would be fewer programs of `scores_kernel`.
PROGRAMS = 528

# Keys of a block of the sample, the most blocks of it, and the depth of the software pipeline that reads them.
MEAN = {"MEAN_ROWS": 64, "MEAN_SPLITS": 8, "MEAN_STAGES": 2}

SAMPLE = MEAN["MEAN_ROWS"] * MEAN["MEAN_SPLITS"]
"""How many keys the mean of k is taken of: of n blocks of 64 those with number `i * n // 8`, i = 0..7, or all of up to 8."""

# Keys and columns of the tile of a program of `transpose_kernel`, and its warps.
TRANSPOSE = (128, 64, 4)


def quantize(q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = True, smooth: bool = True, scales: str = "block") -> Quantized:
    """q, k and v in e4m3 (`torch.float8_e4m3fn`) with float32 scales, for `flashzoo.attention`.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, fp16 or bf16, any strides with a contiguous last dimension; head_dim a
            multiple of 16 up to 256.
        k, v: `(batch, seqlen_k, heads_kv, head_dim)`, dtype and device of q; `heads` is a multiple of `heads_kv`.
        rotate: multiply q and k by the same orthogonal matrix (`rotation(head_dim)`), which spreads outliers over the head dim
            and leaves `q k^T` as it is ("incoherent processing", Shah et al. 2024, arXiv:2407.08608, section 3.3).
        smooth: subtract from k the mean of its keys, or of 512 of them, 8 evenly spaced blocks, where there are more: softmax
            does not see what is subtracted from all keys (Zhang et al. 2024, arXiv:2410.02367).
        scales: "block", one for every 128 rows of a head, or "head", one for each batch and kv head.

    Returns:
        A `Quantized`. Rounding is to nearest, ties to even. A block of zeros has descale 1. A block whose largest magnitude is
        below some 2^-100 is rounded as if that were its largest: ever more coarsely, and to zeros from some 2^-118 down. The
        same bits in every run. The tensors share one allocation: who keeps one keeps it all.

    Raises:
        TypeError, ValueError: an argument is malformed; the text names it, what was expected and what was got.
    """
    problem = _problem(q, k, v)
    if scales not in ("block", "head"):
        raise ValueError(f"quantize: scales must be 'block' or 'head', got {scales!r}")
    plan = plan_for(problem, q.stride(), k.stride(), v.stride(), bool(rotate), bool(smooth), True, False)
    return plan(q, k, v) if scales == "block" else plan.by_head(q, k, v)


def quantize_for(q: Tensor, k: Tensor, v: Tensor, problem: Problem, want_shift: bool) -> Quantized:
    """What the FP8 kernel reads, of 16-bit q, k and v: `quantize` with block scales, rotated and smoothed, and v transposed.

    Args:
        q, k, v: as in `quantize`, not checked again.
        problem: their sizes.
        want_shift: whether `lse_shift` is wanted; it is None otherwise.

    Returns:
        A `Quantized` whose v is as `transpose_v` gives it.
    """
    return plan_for(problem, q.stride(), k.stride(), v.stride(), True, True, want_shift, True)(q, k, v)


def transpose_v(v: Tensor) -> Tensor:
    """e4m3 v as the FP8 kernel reads it, keys along rows.

    Args:
        v: `(batch, seqlen_k, heads_kv, head_dim)`, e4m3, any strides with a contiguous last dimension.

    Returns:
        e4m3 `(batch, heads_kv, head_dim, padded)`, contiguous, padded = seqlen_k rounded up to a multiple of 16. Position p
        of each group g of 16 holds key `16 g + 2 (p // 4) + p % 2 + 8 (p // 2 % 2)`, or 0 where there is no such key: four
        neighbours are what one thread of the tensor core multiplies, and has in registers of P.
    """
    batch, seqlen_k, heads_kv, head_dim = v.shape
    out = v.new_empty((batch, heads_kv, head_dim, padded(seqlen_k)))
    launch = transpose_launch(tuple(v.shape), v.stride())
    if launch is not None:
        launch((v, out), ())
    return out


def rotation(head_dim: int) -> Tensor:
    """The orthogonal matrix that q and k are multiplied by from the right: float64 `(head_dim, head_dim)`, on the CPU.

    Signs, a period of 64 that looks random, times a Hadamard matrix over sqrt(n): n is the largest power of two that divides
    the head dim, and the matrix is block-diagonal where that is not all of it.
    """
    n = power_of_two(head_dim)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < n:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.tensor([1.0 - 2.0 * (SIGNS.value >> i % 64 & 1) for i in range(head_dim)], dtype=torch.float64)
    return signs[:, None] * torch.block_diag(*[hadamard / n**0.5] * (head_dim // n))


def power_of_two(head_dim: int) -> int:
    """The largest power of two that divides it."""
    return head_dim & -head_dim


def padded(seqlen_k: int) -> int:
    """Row length of transposed v."""
    return -(-seqlen_k // 16) * 16


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
    """Rounded to nearest, ties to even, beyond 448 to 448."""
    if INTERPRETED:  # where a cast that carries into the exponent halves the number, so here nothing is left to round
        y = tl.minimum(tl.maximum(y, -E4M3_MAX), E4M3_MAX)
        bits = y.to(tl.int32, bitcast=True)
        normal = (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20).to(tl.float32, bitcast=True)
        y = tl.where(tl.abs(y) < 0.015625, (y + 24576.0) - 24576.0, normal)
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
    x,
    out,
    descale,
    mean,
    shift,
    stride_b,
    stride_s,
    stride_h,
    b,
    h,
    first_block,
    last_block,
    seqlen,
    heads,
    heads_kv,
    times,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    POWER: tl.constexpr,
    ROTATE: tl.constexpr,
    SMOOTH: tl.constexpr,
    SHIFT: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Blocks of one head.

    Where SMOOTH `times` the mean is subtracted, which is 1 for k. Where SHIFT they are multiplied by it, if `times` is 0.
    """
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
    return low | (x_8.to(tl.uint8, bitcast=True).to(tl.int32) << 16) | (x_9.to(tl.uint8, bitcast=True).to(tl.int32) << 24)


@triton.jit
def e4m3_words_of(y_0, y_1, y_8, y_9, INTERPRETED: tl.constexpr):
    """Four float32 tiles, rounded as `to_e4m3` does, as one of 32-bit words, the first lowest."""
    if INTERPRETED:
        return words_of(to_e4m3(y_0, True), to_e4m3(y_1, True), to_e4m3(y_8, True), to_e4m3(y_9, True))
    else:
        # Two roundings are a word, with no bytes in between. Triton rounds two neighbours in a tile at a time, and the bytes of such
        # pairs, put together anew, are optimised wrongly by the ptxas of Triton 3.6 in some layouts of registers, such as those of V
        # whose elements a thread has one by one: a ninth of them came out wrong on an H200, and none with ptxas's optimisation off.
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
    ptrs = out.to(tl.pointer_type(tl.int32), bitcast=True) + (b_h * HEAD_DIM + d[:, None]) * words_per_row + word[None, :]
    tl.store(ptrs, tl.trans(words), mask=(d < HEAD_DIM)[:, None] & (word < words_per_row)[None, :])


@triton.jit
def quantize_transposed(
    v,
    out,
    descale,
    stride_b,
    stride_s,
    stride_h,
    b,
    h,
    block,
    seqlen_k,
    heads_kv,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A block of one head of v, keys along rows."""
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
        *(x_0.to(tl.float32) * scale, x_1.to(tl.float32) * scale, x_8.to(tl.float32) * scale, x_9.to(tl.float32) * scale),
        INTERPRETED,
    )
    store_transposed(out, b_h, start, words, seqlen_k, d, ROWS, HEAD_DIM)


@triton.jit
def mean_of_keys(
    k,
    mean,
    stride_b,
    stride_s,
    stride_h,
    b,
    h,
    seqlen_k,
    heads_kv,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    POWER: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The mean of the sample of one head's keys, small and rotated as `quantize_rows` has them."""
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
    k,
    v,
    v8,
    v_descale,
    mean,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    batch,
    seqlen_k,
    heads_kv,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    POWER: tl.constexpr,
    ROTATE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    MEAN_ROWS: tl.constexpr,
    MEAN_SPLITS: tl.constexpr,
    MEAN_STAGES: tl.constexpr,
    SMOOTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs of the mean of k, which take longest, then of v; of neighbouring heads first, which is how they lie in memory."""
    program = tl.program_id(0)
    h = program % heads_kv
    means = batch * heads_kv if SMOOTH else 0
    if program < means:
        mean_of_keys(
            *(k, mean, k_stride_b, k_stride_s, k_stride_h, program // heads_kv, h, seqlen_k, heads_kv),
            *(HEAD_DIM, WIDTH, CHUNKS, POWER, ROTATE, MEAN_ROWS, MEAN_SPLITS, MEAN_STAGES),
        )
    else:
        blocks = tl.cdiv(seqlen_k, ROWS)
        rest = (program - means) // heads_kv
        block, b = rest % blocks, rest // blocks
        if TRANSPOSED:
            quantize_transposed(
                *(v, v8, v_descale, v_stride_b, v_stride_s, v_stride_h, b, h, block, seqlen_k, heads_kv),
                *(HEAD_DIM, BLOCK_D, ROWS, INTERPRETED),
            )
        else:
            quantize_rows(
                *(v, v8, v_descale, mean, mean, v_stride_b, v_stride_s, v_stride_h),
                *(b, h, block, block + 1, seqlen_k, heads_kv, heads_kv, 0),
                *(HEAD_DIM, WIDTH, CHUNKS, POWER, False, False, False, SCALES, ROWS, 1, INTERPRETED),
            )


@triton.jit(do_not_specialize=SIZES)
def scores_kernel(
    q,
    k,
    q8,
    k8,
    q_descale,
    k_descale,
    mean,
    shift,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    batch,
    seqlen_q,
    seqlen_k,
    heads,
    heads_kv,
    run,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    POWER: tl.constexpr,
    ROTATE: tl.constexpr,
    SMOOTH: tl.constexpr,
    SHIFT: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
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
    quantize_rows(
        *(x, out, descale, mean, shift, stride_b, stride_s, stride_h),
        *(b, h, first, tl.minimum(first + run, blocks), seqlen, of_heads, heads_kv, times),
        *(HEAD_DIM, WIDTH, CHUNKS, POWER, ROTATE, SMOOTH, SHIFT, SCALES, ROWS, STAGES, INTERPRETED),
    )


@triton.jit(do_not_specialize=["seqlen_k", "heads_kv"])
def transpose_kernel(
    v,
    out,
    stride_b,
    stride_s,
    stride_h,
    seqlen_k,
    heads_kv,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
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


Strides = tuple[int, ...]


@lru_cache(maxsize=1024)
def plan_for(
    problem: Problem,
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    rotate: bool,
    smooth: bool,
    shift: bool,
    transposed: bool,
) -> Plan:
    """The plan of a call, by everything that its data don't decide."""
    return Plan(problem, (*q_strides[:3], *k_strides[:3], *v_strides[:3]), rotate, smooth, shift, transposed)


class Plan:
    """Outputs and launches of one quantisation, so that a call costs little host time.

    Args:
        problem: the sizes.
        strides: over batch, seqlen and heads of q, k and v.
        rotate, smooth: as in `quantize`.
        shift: compute `lse_shift` where smooth.
        transposed: v as in `transpose_v`.
        cut: how `scores_kernel` is cut; None for the best known.
    """

    def __init__(
        self, problem: Problem, strides: Strides, rotate: bool, smooth: bool, shift: bool, transposed: bool, cut: Cut | None = None
    ) -> None:
        p = problem
        self._strides = strides
        self._q_shape = (p.batch, p.seqlen_q, p.heads, p.head_dim)
        self._k_shape = (p.batch, p.seqlen_k, p.heads_kv, p.head_dim)
        self._v_shape = (p.batch, p.heads_kv, p.head_dim, padded(p.seqlen_k)) if transposed else self._k_shape
        blocks_q, blocks_k = _cdiv(p.seqlen_q, DESCALE_BLOCK), _cdiv(p.seqlen_k, DESCALE_BLOCK)
        self._q_descale, self._k_descale = (p.batch, p.heads, blocks_q), (p.batch, p.heads_kv, blocks_k)
        self._shift_shape = (p.batch, p.heads, p.seqlen_q) if smooth and shift else None

        block_d = max(16, 1 << (p.head_dim - 1).bit_length())
        cut = self._cut = cut or CUTS[block_d]
        smooth = self._smooth = smooth and p.batch * p.seqlen_k * p.heads_kv > 0
        blocks_v = p.batch * p.heads_kv * blocks_k
        self._programs_v = blocks_v + (p.batch * p.heads_kv if smooth else 0)
        self._run = max(1, min(cut.run, (blocks_v + p.batch * p.heads * blocks_q) // PROGRAMS))
        self._programs = p.batch * (p.heads * _cdiv(blocks_q, self._run) + p.heads_kv * _cdiv(blocks_k, self._run))

        mean = p.batch * p.heads_kv * p.head_dim if smooth else 0
        shift_shapes = () if self._shift_shape is None else (self._shift_shape,)
        self._floats, end = _parts((self._q_descale, self._k_descale, self._k_descale, *shift_shapes), _cdiv(mean, 128) * 128)
        self._numbers, end = _parts((self._q_shape, self._k_shape, self._v_shape), end * 4)
        self._length = end // 4

        width = min(64, block_d)
        shape = {"WIDTH": width, "CHUNKS": _cdiv(p.head_dim, width), "POWER": power_of_two(p.head_dim), "ROTATE": rotate}
        self._of_values = {"HEAD_DIM": p.head_dim, "BLOCK_D": block_d, **shape, "TRANSPOSED": transposed}
        self._of_scores = {"HEAD_DIM": p.head_dim, **shape, "SMOOTH": smooth, "SHIFT": smooth and shift}
        self._problem = p
        self.values, self.scores = self._launches(FIND_AND_USE)

    def _launches(self, scales: tl.constexpr) -> tuple[Launch, Launch]:
        p, cut = self._problem, self._cut
        interpreted = p.device == "cpu"
        common = {"SCALES": scales.value, "ROWS": DESCALE_BLOCK, "INTERPRETED": interpreted}
        scalars = (*self._strides[3:], p.batch, p.seqlen_k, p.heads_kv)
        constexprs = {**self._of_values, **common, **MEAN, "SMOOTH": self._smooth}
        values = Launch(values_kernel, self._programs_v, scalars, constexprs, VALUES_WARPS, 1)
        scalars = (*self._strides[:6], p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.heads_kv, self._run)
        constexprs = {**self._of_scores, **common, "STAGES": cut.num_stages}
        scores = Launch(scores_kernel, self._programs, scalars, constexprs, cut.num_warps, cut.num_stages)
        return values, scores

    def run(self, launches: tuple[Launch, Launch], q: Tensor, k: Tensor, v: Tensor, out: Quantized, mean: Tensor) -> None:
        """Both kernels, of which the first leaves the mean of k, small and rotated, in `mean`."""
        values, scores = launches
        if self._programs_v:
            values((k, v, out.v, out.v_descale, mean), ())
        if self._programs:
            shift = mean if out.lse_shift is None else out.lse_shift
            scores((q, k, out.q, out.k, out.q_descale, out.k_descale, mean, shift), ())

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Quantized:
        """With block scales."""
        out, mean = self.empty(q.device)
        self.run((self.values, self.scores), q, k, v, out, mean)
        return out

    def by_head(self, q: Tensor, k: Tensor, v: Tensor) -> Quantized:
        """With one scale for each batch and kv head: the largest of its blocks' magnitudes first, then the quantisation."""
        out, mean = self.empty(q.device)
        self.run(self._launches(FIND), q, k, v, out, mean)
        batch, heads_kv = self._problem.batch, self._problem.heads_kv
        scales, of_blocks = [], []
        for found in out[3:6]:
            scale = found.new_zeros(batch, heads_kv)
            if found.numel():
                scale = found.reshape(batch, heads_kv, -1).amax(2)
            scale = torch.where(scale > 0, scale, 1.0)
            scales.append(scale)
            repeated = scale.repeat_interleave(found.shape[1] // max(1, heads_kv), 1)[:, :, None]
            of_blocks.append(repeated.expand(found.shape).contiguous())
        names = ("q_descale", "k_descale", "v_descale")
        self.run(self._launches(USE), q, k, v, out._replace(**dict(zip(names, of_blocks, strict=True))), mean)
        return out._replace(**dict(zip(names, scales, strict=True)))

    def empty(self, device: torch.device) -> tuple[Quantized, Tensor]:
        """Where the results go, and what begins with the place of the mean: one allocation, and few views, as each costs a microsecond."""
        floats = torch.empty(self._length, dtype=torch.float32, device=device)
        numbers = floats.view(torch.float8_e4m3fn)
        out = [numbers.as_strided(*part) for part in self._numbers] + [floats.as_strided(*part) for part in self._floats]
        if self._shift_shape is None:
            return Quantized(*out, None), floats
        if not self._smooth:  # no keys to take a mean of
            out[6].zero_()
        return Quantized(*out), floats


Part = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a contiguous tensor within a larger one, in elements."""


def _parts(shapes: tuple[tuple[int, ...], ...], start: int) -> tuple[list[Part], int]:
    """Parts of these shapes from `start` on, each a multiple of 128 elements after it, and where the last ends."""
    parts = []
    for shape in shapes:
        parts.append((shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), start))
        start += _cdiv(math.prod(shape), 128) * 128
    return parts, start


@lru_cache(maxsize=1024)
def transpose_launch(shape: tuple[int, ...], strides: Strides, tile: tuple[int, int, int] = TRANSPOSE) -> Launch | None:
    """The launch of `transpose_kernel`, or None where there is nothing to do.

    Args:
        shape, strides: of v.
        tile: keys and columns of a program's tile, and its warps.
    """
    batch, seqlen_k, heads_kv, head_dim = shape
    keys, width, num_warps = tile
    width = min(width, max(16, 1 << (head_dim - 1).bit_length()))
    programs = batch * heads_kv * _cdiv(seqlen_k, keys) * _cdiv(head_dim, width)
    if not programs:
        return None
    constexprs = {"HEAD_DIM": head_dim, "WIDTH": width, "KEYS": keys}
    return Launch(transpose_kernel, programs, (*strides[:3], seqlen_k, heads_kv), constexprs, num_warps, 1)


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


def _problem(q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """The sizes, or an error that says what is wrong with the tensors."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"quantize: {name} must be a tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"quantize: {name} must have 4 dimensions (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}")
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"quantize: {name} must be float16 or bfloat16, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"quantize: {name} must have q's dtype and device, {q.dtype} on {q.device}, got {x.dtype} on {x.device}")
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"quantize: {name} must have a contiguous last dimension, got strides {x.stride()}")
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    if not 0 < head_dim <= 256 or head_dim % 16:
        raise ValueError(f"quantize: head_dim must be a multiple of 16 up to 256, got {head_dim}")
    if k.shape != (batch, seqlen_k, heads_kv, head_dim):
        raise ValueError(f"quantize: k must have q's batch and head_dim, {batch} and {head_dim}, got shape {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"quantize: v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if heads % heads_kv if heads_kv else heads:
        raise ValueError(f"quantize: q's heads must be a multiple of k's, got {heads} and {heads_kv}")
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        raise ValueError("quantize: on the CPU q, k and v must be float16: Triton's interpreter is wrong in bfloat16, got bfloat16")
    dtype = "fp16" if q.dtype == torch.float16 else "bf16"
    return Problem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, dtype=dtype, device=q.device.type)
