"""Block-sparse FlashAttention on the host: the mask, outputs, tiles, grids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashzoo._triton import Launch
from flashzoo._triton.rows import rows_like
from flashzoo._triton.scores import constexprs_of, functions, gradients_of, scales, sums_of, tensors_of
from flashzoo._triton.tiles import (
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
from flashzoo.blocksparse import kernels
from flashzoo.blocksparse.config import tiles_for
from flashzoo.call.forms import MaskForm
from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.integers import cdiv
from flashzoo.masks.block_mask import BlockMask
from flashzoo.masks.lists import Lists

# TMA reads nothing of the mask, nor what a score_mod does.
_POINTERS = (None,) * 7


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of raw CUDA or CPU tensors."""
    block_mask = _mask(operands)
    out = rows_like(q, TORCH_DTYPES[problem.out_dtype])
    lse = q.new_empty((problem.batch, problem.heads, problem.seqlen_q), dtype=torch.float32)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    rows = _tensors(block_mask, block_mask.rows)
    launch = forward_launch(problem, strides, aligned(q, k, v, *rows), _sizes(block_mask, block_mask.rows))
    launch((q, k, v, out, lse, *rows, tensors_of(operands.score_mod)), scales(problem))
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
    """`(dq, dk, dv)`, and the gradients of what a score_mod reads: delta first, then dK and dV with K/V fixed, then dQ
    with Q fixed."""
    block_mask = _mask(operands)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dq, dk, dv = rows_like(q), rows_like(k), rows_like(v)
    delta, lse_log2 = q.new_empty((2, problem.batch * problem.heads, padded(problem)), dtype=torch.float32)
    dlse_given = dlse is not None
    dlse = lse if dlse is None else dlse.contiguous()

    launch = delta_launch(problem, (*out.stride()[:3], *dout.stride()[:3]), dlse_given)
    launch((out, dout, lse, dlse, delta, lse_log2), ())

    floats, sums = (problem.scale, *scales(problem)), sums_of(operands.score_mod, problem)
    inputs = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    columns, rows = _tensors(block_mask, block_mask.columns), _tensors(block_mask, block_mask.rows)
    by_tma = aligned(q, k, v, dout, *columns, *rows)
    launch = dkdv_launch(
        problem, (*inputs, *dk.stride()[:3], *dv.stride()[:3]), by_tma, _sizes(block_mask, block_mask.columns)
    )
    launch((q, k, v, dout, dk, dv, lse_log2, delta, *columns, tensors_of(operands.score_mod)), floats)
    launch = dq_launch(problem, (*inputs, *dq.stride()[:3]), by_tma, _sizes(block_mask, block_mask.rows))
    launch((q, k, v, dout, dq, lse_log2, delta, *rows, tensors_of(operands.score_mod, sums)), floats)
    return dq, dk, dv, *gradients_of(operands.score_mod, problem, sums)


def _masked(problem: Problem, operands: Operands, device: torch.device) -> tuple[Problem, Operands]:
    """A call without a block mask as one with a mask of causal and window alone."""
    if operands.block_mask is not None:
        return problem, operands
    window = {"window_size": problem.window, "causal": problem.causal}
    block_mask = BlockMask.sliding_window(problem.seqlen_q, problem.seqlen_k, **window, device=device)
    problem = replace(problem, causal=False, window=(None, None), block_mask=block_mask.form)
    return problem, replace(operands, block_mask=block_mask)


attention: Callable[..., tuple[Tensor, Tensor | None]] = differentiable(forward, backward, _masked)


def _mask(operands: Operands) -> BlockMask:
    assert operands.block_mask is not None, "`_masked` gives every call a mask"
    return operands.block_mask


def _tensors(mask: BlockMask, lists: Lists) -> tuple[Tensor, ...]:
    """What the kernels read of a mask; where there are no bits any tensor stands for what is not read."""
    counts, bit_index, bits = lists.counts, lists.bit_index, mask.element.bits
    where_bits = (counts, counts) if bit_index is None or bits is None else (bit_index, bits)
    return (lists.order, counts, lists.full, lists.indices, *where_bits)


def _sizes(mask: BlockMask, lists: Lists) -> tuple[int, ...]:
    """Strides over batch and heads, in heads and 0 where shared; width of the lists;
    how many blocks of bits a head has."""
    bits = mask.element.bits
    return mask.heads if mask.batch > 1 else 0, int(mask.heads > 1), lists.width, 0 if bits is None else bits.shape[2]


@lru_cache(maxsize=1024)
def forward_launch(problem: Problem, strides: Strides, aligned: bool, sizes: tuple[int, ...]) -> Launch:
    """The launch of `forward_kernel`.

    Args:
        strides: over batch, seqlen and heads of q, k, v and out.
        aligned: whether q, k, v and the mask's tensors start at multiples of 16 bytes, as out and lse do.
        sizes: of the mask, as `_sizes` gives them.
    """
    tiles = usable(tiles_for("forward", problem), problem, aligned, strides[:9])
    owned = rows_of_owned(tiles, tiles.block_q)
    return Launch(
        kernels.forward_kernel,
        _tiles(problem.seqlen_q, _form(problem).block_q, tiles.block_q) * problem.batch * problem.heads,
        (*strides, problem.seqlen_q, problem.seqlen_k, problem.heads, group_of(problem), *_reach(problem), *sizes),
        constexprs(problem, strides, tiles, _masks(problem), "Q_IN_REGISTERS")
        | {"SCORE_MOD": functions(problem)["forward"]},
        tiles.num_warps,
        tiles.num_stages,
        aligned and problem.score_mod is None,
        tma_tiles=tma_tiles(problem, tiles, owned[0], tiles.block_kv, tiles.block_kv, None, None, *_POINTERS),
    )


@lru_cache(maxsize=1024)
def delta_launch(problem: Problem, strides: Strides, dlse: bool) -> Launch:
    """The launch of `delta_kernel`; strides of out and dout."""
    return launch_of_delta(kernels.delta_kernel, problem, strides, dlse)


@lru_cache(maxsize=1024)
def dkdv_launch(problem: Problem, strides: Strides, aligned: bool, sizes: tuple[int, ...]) -> Launch:
    """The launch of `dkdv_kernel`; strides of q, k, v, dout, dk and dv, the rest as in `forward_launch`."""
    tiles = usable(tiles_for("dkdv", problem), problem, aligned, strides[:12])
    rows, owned = tiles.block_q, rows_of_owned(tiles, tiles.block_kv)
    return Launch(
        kernels.dkdv_kernel,
        _tiles(problem.seqlen_k, _form(problem).block_kv, tiles.block_kv) * problem.batch * problem.heads_kv,
        (
            *strides,
            *lengths_of(problem),
            problem.heads_kv,
            group_of(problem),
            *_reach(problem),
            *sizes,
        ),
        constexprs(problem, strides, tiles, _masks(problem), "K_IN_REGISTERS", "V_IN_REGISTERS")
        | constexprs_of(problem, "gradient"),
        tiles.num_warps,
        tiles.num_stages,
        aligned and problem.score_mod is None,
        tma_tiles=tma_tiles(
            problem, tiles, rows, owned[0], owned[1], rows, None, None, (1, rows), (1, rows), *_POINTERS
        ),
    )


@lru_cache(maxsize=1024)
def dq_launch(problem: Problem, strides: Strides, aligned: bool, sizes: tuple[int, ...]) -> Launch:
    """The launch of `dq_kernel`; strides of q, k, v, dout and dq, the rest as in `forward_launch`."""
    tiles = usable(tiles_for("dq", problem), problem, aligned, strides[:12])
    owned = rows_of_owned(tiles, tiles.block_q)
    return Launch(
        kernels.dq_kernel,
        _tiles(problem.seqlen_q, _form(problem).block_q, tiles.block_q) * problem.batch * problem.heads,
        (*strides, *lengths_of(problem), problem.heads, group_of(problem), *_reach(problem), *sizes),
        constexprs(problem, strides, tiles, _masks(problem), "Q_IN_REGISTERS", "DO_IN_REGISTERS")
        | constexprs_of(problem, "sums"),
        tiles.num_warps,
        tiles.num_stages,
        aligned and problem.score_mod is None,
        tma_tiles=tma_tiles(
            problem, tiles, owned[0], tiles.block_kv, tiles.block_kv, owned[1], None, None, None, *_POINTERS
        ),
    )


def _masks(problem: Problem) -> dict[str, Any]:
    form = _form(problem)
    return {"MASK_Q": form.block_q, "MASK_KV": form.block_kv, "BITS": form.bits}


def _form(problem: Problem) -> MaskForm:
    assert problem.block_mask is not None, "`_masked` gives every call a mask"
    return problem.block_mask


def _reach(problem: Problem) -> tuple[int, int]:
    return problem.reach_of(_form(problem).span)


def _tiles(seqlen: int, block: int, tile: int) -> int:
    """How many tiles all blocks of the mask along seqlen have."""
    return cdiv(seqlen, block) * (block // tile)
