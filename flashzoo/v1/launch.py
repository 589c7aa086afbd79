"""FlashAttention-1 on the host: outputs, what lives in memory between steps, block sizes, grids."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashzoo._triton import Launch
from flashzoo._triton.dropout import kept_of, seed_of, share_of
from flashzoo._triton.rows import rows_like
from flashzoo._triton.scores import constexprs_of, functions, gradients_of, scales, sums_of, tensors_of
from flashzoo._triton.tiles import columns
from flashzoo.autograd import differentiable
from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.integers import cdiv
from flashzoo.v1 import kernels
from flashzoo.v1.config import Tiles, tiles_for

# Programs that fill a GPU a few times over: with fewer heads than this, a head's rows are split among programs.
ENOUGH_PROGRAMS = 16 * 132

Strides = tuple[int, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of raw CUDA or CPU tensors; see `flashzoo.attention`."""
    out = rows_like(q, TORCH_DTYPES[problem.out_dtype])
    out_acc = q.new_empty(q.shape, dtype=torch.float32)
    row_sum, row_max, lse = q.new_empty((3, problem.batch, problem.heads, problem.seqlen_q), dtype=torch.float32)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *out_acc.stride()[:3])
    launch = forward_launch(problem, strides)
    read, seed = tensors_of(operands.score_mod), seed_of(operands, problem)
    floats = (*scales(problem), share_of(problem))
    launch((q, k, v, out, out_acc, row_sum, row_max, lse, read, seed), floats)
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
    """`(dq, dk, dv)`, and the gradients of what a score_mod reads; these and dq are summed in float32 in memory and
    rounded once at the end."""
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dlse_given = dlse is not None
    dlse = lse if dlse is None else dlse.contiguous()
    dq_acc = q.new_zeros(q.shape, dtype=torch.float32)
    dk, dv = rows_like(k), rows_like(v)
    strides = tuple(stride for x in (q, k, v, out, dout, dq_acc, dk, dv) for stride in x.stride()[:3])
    launch = backward_launch(problem, strides, dlse_given)
    sums, seed = sums_of(operands.score_mod, problem), seed_of(operands, problem)
    read, floats = tensors_of(operands.score_mod, sums), (problem.scale, *scales(problem), share_of(problem))
    launch((q, k, v, out, dout, dq_acc, dk, dv, lse, dlse, read, seed), floats)
    return torch.empty_like(q).copy_(dq_acc), dk, dv, *gradients_of(operands.score_mod, problem, sums)


attention: Callable[..., tuple[Tensor, Tensor | None]] = differentiable(forward, backward)


@lru_cache(maxsize=1024)
def forward_launch(problem: Problem, strides: Strides) -> Launch:
    """The launch of `forward_kernel`; strides over batch, seqlen and heads of q, k, v, out and its
    float32 accumulator."""
    tiles = tiles_for("forward", problem)
    heads = problem.batch * problem.heads
    rows = rows_per_program(problem.seqlen_q, heads, tiles.block_q)
    return Launch(
        kernels.forward_kernel,
        heads * cdiv(problem.seqlen_q, rows),
        (*strides, problem.seqlen_q, problem.seqlen_k, problem.heads, problem.heads // problem.heads_kv, rows),
        _constexprs(problem, strides, tiles) | {"SCORE_MOD": functions(problem)["forward"], "KEPT": kept_of(problem)},
        tiles.num_warps,
        tiles.num_stages,
    )


@lru_cache(maxsize=1024)
def backward_launch(problem: Problem, strides: Strides, dlse: bool) -> Launch:
    """The launch of `backward_kernel`; strides of q, k, v, out, dout, the accumulator of dq, dk and dv."""
    tiles = tiles_for("backward", problem)
    # Atomic additions to dQ come in any order. One program a head keeps the paper's, and with it the bits.
    serial = problem.deterministic
    return Launch(
        kernels.backward_kernel,
        problem.batch * problem.heads_kv * (1 if serial else cdiv(problem.seqlen_k, tiles.block_kv)),
        (*strides, problem.seqlen_q, problem.seqlen_k, problem.heads_kv, problem.heads // problem.heads_kv),
        {
            **_constexprs(problem, strides, tiles),
            "DLSE": dlse,
            "SERIAL": serial,
            **constexprs_of(problem, "sums"),
            "KEPT": kept_of(problem),
        },
        tiles.num_warps,
        tiles.num_stages,
    )


def rows_per_program(seqlen_q: int, heads: int, block_q: int) -> int:
    """Rows of a head that one program owns, a multiple of block_q: all of them where there are heads enough."""
    blocks = cdiv(seqlen_q, block_q)
    ranges = min(blocks, cdiv(ENOUGH_PROGRAMS, heads))
    return cdiv(blocks, ranges) * block_q


def _constexprs(problem: Problem, strides: Strides, tiles: Tiles) -> dict[str, Any]:
    return {
        **columns(problem, strides),
        "BLOCK_Q": tiles.block_q,
        "BLOCK_KV": tiles.block_kv,
        "CAUSAL": problem.causal,
    }
