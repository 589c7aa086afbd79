"""Inputs of FP8 attention from 16-bit ones, on the host: what is quantised, outputs, launches. The kernels are in
`quantize_kernels.py`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashzoo._triton import Launch
from flashzoo.call.problem import DESCALE_BLOCK, Problem
from flashzoo.integers import cdiv
from flashzoo.tiles import block_d
from flashzoo.v3.quantize_kernels import FIND, FIND_AND_USE, SIGNS, USE, scores_kernel, transpose_kernel, values_kernel


class Quantized(NamedTuple):
    """e4m3 inputs of `flashzoo.attention` and what they stand for.

    Attributes:
        q: `(batch, seqlen_q, heads, head_dim)`, e4m3, contiguous.
        k, v: `(batch, seqlen_k, heads_kv, head_dim)`, e4m3, contiguous.
        q_descale, k_descale, v_descale: float32, positive. One for every 128 rows of a head,
            `(batch, heads, ceil(seqlen_q / 128))` for q and `(batch, heads_kv, ceil(seqlen_k / 128))` for k and v, or
            `(batch, heads_kv)` each. What was quantised is the e4m3 number times its descale.
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
    """Warps, pipeline and blocks of a program of `scores_kernel`.

    Attributes:
        num_warps: warps of a program.
        num_stages: depth of its software pipeline: with 3 it loads a block while it works on the one before, with 1 it
            leaves that to other programs of the same multiprocessor.
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
"""Keys that the mean of k is taken of: of n blocks of 64 those of number `i * n // 8`, i = 0..7,
or all where there are at most 8."""

# Keys and columns of the tile of a program of `transpose_kernel`, and its warps.
TRANSPOSE = (128, 64, 4)


def quantize(
    q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = True, smooth: bool = True, scales: str = "block"
) -> Quantized:
    """q, k and v in e4m3 (`torch.float8_e4m3fn`) with float32 scales, for `flashzoo.attention`.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, fp16 or bf16, any strides with a contiguous last dimension; head_dim a
            multiple of 16 up to 256.
        k, v: `(batch, seqlen_k, heads_kv, head_dim)`, dtype and device of q; `heads` is a multiple of `heads_kv`.
        rotate: multiply q and k by the same orthogonal matrix (`rotation(head_dim)`), which spreads outliers over the
            head dim and leaves `q k^T` as it is ("incoherent processing", Shah et al. 2024, arXiv:2407.08608, section
            3.3).
        smooth: subtract from k the mean of its keys, or of 512 of them, 8 evenly spaced blocks, where there are more:
            softmax does not see what is subtracted from all keys (Zhang et al. 2024, arXiv:2410.02367).
        scales: "block", one for every 128 rows of a head, or "head", one for each batch and kv head.

    Returns:
        A `Quantized`. Rounding is to nearest, ties to even. A block of zeros has descale 1. A block whose largest
        magnitude is below some 2^-100 is rounded as if that were its largest: ever more coarsely, and to zeros from
        some 2^-118 down. The same bits in every run. The tensors share one allocation: who keeps one keeps it all.

    Raises:
        TypeError, ValueError: an argument is malformed; the text names it, what was expected and what was got.
    """
    problem = _problem(q, k, v)
    if scales not in ("block", "head"):
        raise ValueError(f"quantize: scales must be 'block' or 'head', got {scales!r}")
    plan = plan_for(problem, q.stride(), k.stride(), v.stride(), bool(rotate), bool(smooth), True, False)
    return plan(q, k, v) if scales == "block" else plan.by_head(q, k, v)


def quantize_for(q: Tensor, k: Tensor, v: Tensor, problem: Problem, want_shift: bool) -> Quantized:
    """16-bit q, k and v as the FP8 kernel reads them: `quantize` with block scales, rotated and smoothed,
    and v transposed.

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
        e4m3 `(batch, heads_kv, head_dim, padded)`, contiguous, padded = seqlen_k rounded up to a multiple of 16.
        Position p of each group g of 16 holds key `16 g + 2 (p // 4) + p % 2 + 8 (p // 2 % 2)`, or 0 where there is no
        such key: four neighbours are what one thread of the tensor core multiplies, and has in registers of P.
    """
    batch, seqlen_k, heads_kv, head_dim = v.shape
    out = v.new_empty((batch, heads_kv, head_dim, padded(seqlen_k)))
    launch = transpose_launch(tuple(v.shape), v.stride())
    if launch is not None:
        launch((v, out), ())
    return out


def rotation(head_dim: int) -> Tensor:
    """The orthogonal matrix that q and k are multiplied by from the right: float64 `(head_dim, head_dim)`, on the CPU.

    Signs, a period of 64 that looks random, times a Hadamard matrix over sqrt(n): n is the largest power of two that
    divides the head dim, and the matrix is block-diagonal where that is not all of it.
    """
    n = power_of_two(head_dim)
    hadamard = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(hadamard) < n:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = [1.0 - 2.0 * (SIGNS.value >> i % 64 & 1) for i in range(head_dim)]
    signs = torch.tensor(signs, dtype=torch.float64, device="cpu")
    return signs[:, None] * torch.block_diag(*[hadamard / n**0.5] * (head_dim // n))


def power_of_two(head_dim: int) -> int:
    """The largest power of two that divides it."""
    return head_dim & -head_dim


def padded(seqlen_k: int) -> int:
    """Row length of transposed v."""
    return cdiv(seqlen_k, 16) * 16


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
        self,
        problem: Problem,
        strides: Strides,
        rotate: bool,
        smooth: bool,
        shift: bool,
        transposed: bool,
        cut: Cut | None = None,
    ) -> None:
        p = problem
        self._strides = strides
        self._q_shape = (p.batch, p.seqlen_q, p.heads, p.head_dim)
        self._k_shape = (p.batch, p.seqlen_k, p.heads_kv, p.head_dim)
        self._v_shape = (p.batch, p.heads_kv, p.head_dim, padded(p.seqlen_k)) if transposed else self._k_shape
        blocks_q, blocks_k = cdiv(p.seqlen_q, DESCALE_BLOCK), cdiv(p.seqlen_k, DESCALE_BLOCK)
        self._q_descale, self._k_descale = (p.batch, p.heads, blocks_q), (p.batch, p.heads_kv, blocks_k)
        self._shift_shape = (p.batch, p.heads, p.seqlen_q) if smooth and shift else None

        columns = block_d(p.head_dim)
        cut = self._cut = cut or CUTS[columns]
        smooth = self._smooth = smooth and p.batch * p.seqlen_k * p.heads_kv > 0
        blocks_v = p.batch * p.heads_kv * blocks_k
        self._programs_v = blocks_v + (p.batch * p.heads_kv if smooth else 0)
        self._run = max(1, min(cut.run, (blocks_v + p.batch * p.heads * blocks_q) // PROGRAMS))
        self._programs = p.batch * (p.heads * cdiv(blocks_q, self._run) + p.heads_kv * cdiv(blocks_k, self._run))

        mean = p.batch * p.heads_kv * p.head_dim if smooth else 0
        shift_shapes = () if self._shift_shape is None else (self._shift_shape,)
        self._floats, end = _parts(
            (self._q_descale, self._k_descale, self._k_descale, *shift_shapes), cdiv(mean, 128) * 128
        )
        self._numbers, end = _parts((self._q_shape, self._k_shape, self._v_shape), end * 4)
        self._length = end // 4

        width = min(64, columns)
        shape = {"WIDTH": width, "ROTATE": rotate}
        self._of_values = {"HEAD_DIM": p.head_dim, "BLOCK_D": columns, **shape, "TRANSPOSED": transposed}
        self._of_scores = {"HEAD_DIM": p.head_dim, **shape, "SMOOTH": smooth, "SHIFT": smooth and shift}
        self._problem = p
        self.values: Launch
        self.scores: Launch
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

    def run(
        self, launches: tuple[Launch, Launch], q: Tensor, k: Tensor, v: Tensor, out: Quantized, mean: Tensor
    ) -> None:
        """Launch both kernels, of which the first leaves the mean of k, small and rotated, in `mean`."""
        values, scores = launches
        if self._programs_v:
            values((k, v, out.v, out.v_descale, mean), ())
        if self._programs:
            shift = mean if out.lse_shift is None else out.lse_shift
            scores((q, k, out.q, out.k, out.q_descale, out.k_descale, mean, shift), ())

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Quantized:
        """Quantise with block scales."""
        out, mean = self.empty(q.device)
        self.run((self.values, self.scores), q, k, v, out, mean)
        return out

    def by_head(self, q: Tensor, k: Tensor, v: Tensor) -> Quantized:
        """Quantise with one scale for each batch and kv head: first the largest magnitude of its blocks,
        then the quantisation."""
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
        """Memory for the results, and all of it, which begins with the mean:
        one allocation and few views, as each costs a microsecond."""
        floats = torch.empty(self._length, dtype=torch.float32, device=device)
        numbers = floats.view(torch.float8_e4m3fn)
        out = [numbers.as_strided(*part) for part in self._numbers] + [
            floats.as_strided(*part) for part in self._floats
        ]
        if self._shift_shape is None:
            return Quantized(*out, lse_shift=None), floats
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
        start += cdiv(math.prod(shape), 128) * 128
    return parts, start


@lru_cache(maxsize=1024)
def transpose_launch(shape: tuple[int, ...], strides: Strides) -> Launch | None:
    """The launch of `transpose_kernel`, or None where there is nothing to do.

    Args:
        shape, strides: of v.
    """
    batch, seqlen_k, heads_kv, head_dim = shape
    keys, width, num_warps = TRANSPOSE
    width = min(width, block_d(head_dim))
    programs = batch * heads_kv * cdiv(seqlen_k, keys) * cdiv(head_dim, width)
    if not programs:
        return None
    constexprs = {"HEAD_DIM": head_dim, "WIDTH": width, "KEYS": keys}
    return Launch(transpose_kernel, programs, (*strides[:3], seqlen_k, heads_kv), constexprs, num_warps, 1)


def _problem(q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """The sizes, or an error that says what is wrong with the tensors."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"quantize: {name} must be a tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(
                f"quantize: {name} must have 4 dimensions (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}"
            )
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"quantize: {name} must be float16 or bfloat16, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"quantize: {name} must have q's dtype and device, {q.dtype} on {q.device}, got {x.dtype} on {x.device}"
            )
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"quantize: {name} must have a contiguous last dimension, got strides {x.stride()}")
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    if not 0 < head_dim <= 256 or head_dim % 16:
        raise ValueError(f"quantize: head_dim must be a multiple of 16 up to 256, got {head_dim}")
    if k.shape != (batch, seqlen_k, heads_kv, head_dim):
        raise ValueError(
            f"quantize: k must have q's batch and head_dim, {batch} and {head_dim}, got shape {tuple(k.shape)}"
        )
    if v.shape != k.shape:
        raise ValueError(f"quantize: v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if heads % heads_kv if heads_kv else heads:
        raise ValueError(f"quantize: q's heads must be a multiple of k's, got {heads} and {heads_kv}")
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        raise ValueError(
            "quantize: on the CPU q, k and v must be float16: Triton's interpreter is wrong in bfloat16, got bfloat16"
        )
    dtype = "fp16" if q.dtype == torch.float16 else "bf16"
    return Problem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, dtype=dtype, device=q.device.type)
