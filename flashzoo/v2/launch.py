"""FlashAttention-2 on the host: outputs, tiles, grids."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from flashzoo._triton import Launch
from flashzoo._triton.dropout import kept_of, seed_of, share_of
from flashzoo._triton.packed import blocks, tiles_of
from flashzoo._triton.rows import rows_like
from flashzoo._triton.scores import (
    constexprs_of,
    functions,
    gradient_of_read,
    gradients_of,
    scales,
    sums_of,
    tensors_of,
)
from flashzoo._triton.tiles import (
    DELTA_BLOCK,
    Strides,
    aligned,
    constexprs,
    group_of,
    launch_of_delta,
    lengths_of,
    padded,
    rows_of_owned,
    tma_tiles,
    usable,
)
from flashzoo.autograd import differentiable
from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.integers import cdiv
from flashzoo.scores.evaluate import TORCH_DTYPES as SCORE_DTYPES
from flashzoo.tiles import block_d
from flashzoo.v2 import kernels
from flashzoo.v2.config import DBIAS_ANYWHERE, DBIAS_PROGRAMS, PART, apart, biases, tiles_for


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of raw CUDA or CPU tensors; see `flashzoo.attention`."""
    out = rows_like(q, TORCH_DTYPES[problem.out_dtype])
    lse = q.new_empty((problem.batch, problem.heads, problem.seqlen_q), dtype=torch.float32)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    launch, used = forward_launch(problem, strides, aligned(q, k, v)), _used(problem, operands)
    tiles, _ = tiles_of(problem, operands, launch.constexprs["BLOCK_Q"])
    read, seed = tensors_of(operands.score_mod), seed_of(operands, problem)
    floats = (*scales(problem), share_of(problem))
    launch((q, k, v, out, lse, tiles, used, operands.sinks, read, seed), floats)
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    operands: Operands,
) -> tuple[Tensor, ...]:
    """`(dq, dk, dv)`, with sinks their gradient too, and those of what a score_mod reads: delta first, then dK and dV
    with K/V fixed, then dQ with Q fixed."""
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dq, dk, dv = rows_like(q), rows_like(k), rows_like(v)
    delta, lse_log2 = q.new_empty((2, problem.batch * problem.heads, padded(problem)), dtype=torch.float32)
    dlse_given = dlse is not None
    dlse = lse if dlse is None else dlse.contiguous()

    summed, own = apart(problem)
    floats, sums = (problem.scale, *scales(problem), share_of(problem)), sums_of(operands.score_mod, summed)
    inputs = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    by_tma, used = aligned(q, k, v, dout), _used(problem, operands)
    of_dkdv = dkdv_launch(problem, (*inputs, *dk.stride()[:3], *dv.stride()[:3]), by_tma)
    of_dq = dq_launch(problem, (*inputs, *dq.stride()[:3]), by_tma)
    block_q = of_dq.constexprs["BLOCK_Q"]
    tiles, tiles_of_keys = tiles_of(problem, operands, block_q, of_dkdv.constexprs["BLOCK_KV"])
    tiles_of_delta = tiles if block_q == DELTA_BLOCK else tiles_of(problem, operands, DELTA_BLOCK)[0]
    of_delta = delta_launch(problem, (*out.stride()[:3], *dout.stride()[:3]), dlse_given)
    # of packed sequences some programs have no block
    dsinks = delta.new_zeros((problem.batch, problem.heads, padded(problem) // DELTA_BLOCK)) if problem.sinks else None
    of_delta((out, dout, lse, dlse, delta, lse_log2, tiles_of_delta, operands.sinks, dsinks), ())
    read, seed = tensors_of(operands.score_mod), seed_of(operands, problem)
    of_dkdv((q, k, v, dout, dk, dv, lse_log2, delta, tiles_of_keys, used, read, seed), floats)
    of_dq((q, k, v, dout, dq, lse_log2, delta, tiles, used, tensors_of(operands.score_mod, sums), seed), floats)
    dbiases: dict[int, Tensor] = {}
    for tensor in own:
        launch, shape, dtype, whole = dbias_launch(problem, inputs, by_tma, tensor)
        shares = (torch.empty if whole else torch.zeros)(shape, dtype=dtype, device=q.device)
        launch((q, k, v, dout, shares, lse_log2, delta, read, seed), floats[1:])
        dbiases[tensor] = shares[0] if len(shares) == 1 else shares.sum(0)
    gradients = (dq, dk, dv) if dsinks is None else (dq, dk, dv, dsinks.sum((0, 2)))
    return *gradients, *gradients_of(operands.score_mod, summed, sums, dbiases)


attention: Callable[..., tuple[Tensor, Tensor | None]] = differentiable(forward, backward)


@lru_cache(maxsize=1024)
def forward_launch(problem: Problem, strides: Strides, aligned: bool) -> Launch:
    """The launch of `forward_kernel`.

    Args:
        strides: over batch, seqlen and heads of q, k, v and out.
        aligned: whether q, k and v start at multiples of 16 bytes, as out and lse do.
    """
    tiles = usable(tiles_for("forward", problem), problem, aligned, strides[:9])
    owned = rows_of_owned(tiles, tiles.block_q)
    return Launch(
        kernels.forward_kernel,
        blocks(problem, problem.seqlen_q, tiles.block_q) * problem.heads,
        (*strides, problem.seqlen_q, problem.seqlen_k, problem.heads, group_of(problem), *problem.reach),
        constexprs(problem, strides, tiles, _masks(problem), "Q_IN_REGISTERS")
        | {"SCORE_MOD": functions(problem)["forward"], "KEPT": kept_of(problem)},
        tiles.num_warps,
        tiles.num_stages,
        aligned and not _reads_more(problem),
        tma_tiles=tma_tiles(problem, tiles, owned[0], tiles.block_kv, tiles.block_kv, *[None] * 7),
    )


@lru_cache(maxsize=1024)
def delta_launch(problem: Problem, strides: Strides, dlse: bool) -> Launch:
    """The launch of `delta_kernel`; strides of out and dout."""
    return launch_of_delta(kernels.delta_kernel, problem, strides, dlse, PACKED="packed" in problem.features)


@lru_cache(maxsize=1024)
def dkdv_launch(problem: Problem, strides: Strides, aligned: bool) -> Launch:
    """The launch of `dkdv_kernel`; strides of q, k, v, dout, dk and dv, the rest as in `forward_launch`."""
    tiles = usable(tiles_for("dkdv", problem), problem, aligned, strides[:12])
    rows, owned = tiles.block_q, rows_of_owned(tiles, tiles.block_kv)
    return Launch(
        kernels.dkdv_kernel,
        blocks(problem, problem.seqlen_k, tiles.block_kv) * problem.heads_kv,
        (*strides, *lengths_of(problem), problem.heads_kv, group_of(problem), *problem.reach),
        constexprs(problem, strides, tiles, _masks(problem), "K_IN_REGISTERS", "V_IN_REGISTERS")
        | constexprs_of(problem, "gradient")
        | {"KEPT": kept_of(problem)},
        tiles.num_warps,
        tiles.num_stages,
        aligned and not _reads_more(problem),
        tma_tiles=tma_tiles(
            problem, tiles, rows, owned[0], owned[1], rows, None, None, (1, rows), (1, rows), *[None] * 4
        ),
    )


@lru_cache(maxsize=1024)
def dq_launch(problem: Problem, strides: Strides, aligned: bool) -> Launch:
    """The launch of `dq_kernel`; strides of q, k, v, dout and dq, the rest as in `forward_launch`."""
    tiles = usable(tiles_for("dq", problem), problem, aligned, strides[:12])
    owned = rows_of_owned(tiles, tiles.block_q)
    return Launch(
        kernels.dq_kernel,
        blocks(problem, problem.seqlen_q, tiles.block_q) * problem.heads,
        (*strides, *lengths_of(problem), problem.heads, group_of(problem), *problem.reach),
        constexprs(problem, strides, tiles, _masks(problem), "Q_IN_REGISTERS", "DO_IN_REGISTERS")
        | constexprs_of(apart(problem)[0], "sums")
        | {"KEPT": kept_of(problem)},
        tiles.num_warps,
        tiles.num_stages,
        aligned and not _reads_more(problem),
        tma_tiles=tma_tiles(problem, tiles, owned[0], tiles.block_kv, tiles.block_kv, owned[1], *[None] * 7),
    )


@lru_cache(maxsize=1024)
def dbias_launch(
    problem: Problem, strides: Strides, aligned: bool, tensor: int
) -> tuple[Launch, tuple[int, ...], torch.dtype, bool]:
    """The launch of `dbias_kernel` for one of the tensors that a score_mod reads; strides of q, k, v and dout, the rest
    as in `forward_launch`. Then of what it writes: the shape, which is that of the tensor behind a dimension of shares
    to be summed; the dtype, the tensor's where there is one share; and whether it writes all of it."""
    tiles = usable(tiles_for("dbias", problem), problem, aligned, strides)
    tiles = tiles if tiles.tma == tiles_for("dbias", problem).tma else DBIAS_ANYWHERE
    assert problem.score_mod is not None
    dtype, shape = problem.score_mod.reads[tensor]
    indices = biases(problem)[tensor]
    sizes = {"b": problem.batch, "h": problem.heads, "q": problem.seqlen_q, "k": problem.seqlen_k}
    steps = dict.fromkeys("bhqk", 0) | {name: math.prod(shape[d + 1 :]) for d, name in enumerate(indices)}
    owners_b, owners_h = (sizes[name] if name in indices else 1 for name in "bh")
    sharers = problem.batch * problem.heads // (owners_b * owners_h)
    blocks = owners_b * owners_h * cdiv(problem.seqlen_q, tiles.block_q) * cdiv(problem.seqlen_k, tiles.block_kv)
    share = cdiv(sharers, min(sharers, cdiv(DBIAS_PROGRAMS, blocks))) if blocks and sharers else 1
    shares = cdiv(sharers, share)
    width = min(PART, block_d(problem.head_dim))
    first, rows = (1, tiles.block_q, 1, width), (1, tiles.block_kv, 1, width)
    left, right = problem.span
    launch = Launch(
        kernels.dbias_kernel,
        shares * blocks,
        (
            *(*strides, math.prod(shape), *(steps[name] for name in "bhqk"), *lengths_of(problem), problem.heads),
            *(group_of(problem), owners_b, owners_h, problem.heads // owners_h, sharers, share, *problem.reach),
        ),
        constexprs(problem, strides, tiles, {"LEFT": left is not None, "RIGHT": right is not None})
        | {"BLOCK_D": width, "SCORE_MOD": functions(problem)["forward"]}
        | {"READ_GRADIENT": gradient_of_read(problem, tensor), "KEPT": kept_of(problem)},
        tiles.num_warps,
        tiles.num_stages,
        tma_tiles=tma_tiles(problem, tiles, first, rows, rows, first, *[None] * 5),
    )
    whole = all(size == sizes.get(name, 1) for name, size in zip(indices, shape, strict=True))
    return launch, (shares, *shape), SCORE_DTYPES[dtype] if shares == 1 else torch.float32, whole


def _masks(problem: Problem) -> dict[str, bool]:
    left, right = problem.span
    bounds = {"LEFT": left is not None, "RIGHT": right is not None}
    lengths = {"PACKED": "packed" in problem.features, "CACHE": "cache" in problem.features}
    return {**bounds, **lengths, "BY_HEAD": any("b" not in indices for indices in biases(problem).values())}


def _reads_more(problem: Problem) -> bool:
    """Whether kernels read tensors of the caller's besides q, k, v and dout, which may start anywhere."""
    p = problem
    return p.score_mod is not None or p.sinks or p.used_k or bool(p.dropout_p)


def _used(problem: Problem, operands: Operands) -> Tensor | None:
    """How much of each cache is used; None where there is none, or the table of packed sequences knows."""
    return None if problem.sequences is not None else operands.seqused_k
