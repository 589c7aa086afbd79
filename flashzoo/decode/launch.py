"""FlashDecoding on the host: outputs, the splits' own, grids."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flashzoo._triton import Launch
from flashzoo._triton.descales import strided
from flashzoo._triton.packed import tiles_of
from flashzoo._triton.rows import rows_like
from flashzoo.call.operands import Operands
from flashzoo.call.problem import LOG2E, Problem
from flashzoo.decode import kernels
from flashzoo.decode.config import by_hopper, cut, tiles_for
from flashzoo.decode.launch_merge import merge_launch
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.tiles import block_d

Strides = tuple[int, ...]


def attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of raw CUDA or CPU tensors; see `flashzoo.attention`."""
    if by_hopper(problem):
        from flashzoo.decode import launch_hopper  # here, so that a process on another GPU loads no CuTe DSL

        done = launch_hopper.attention(q, k, v, problem, operands)
        if done is not None:
            return done
    p, how = problem, cut(problem)
    as_out = q if p.head_dim_v == p.head_dim else q[..., : p.head_dim_v]
    out = rows_like(as_out, TORCH_DTYPES[p.out_dtype])
    lse = q.new_empty((p.batch, p.heads, p.seqlen_q), dtype=torch.float32)
    inputs = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    scale_log2, table = p.scale * LOG2E, operands.page_table
    pages = (0, 0) if table is None else (table.stride(0), k.shape[0])
    given, descales = (operands.seqused_k, table), (strided(operands.k_descale), strided(operands.v_descale))
    tiles, _ = tiles_of(p, operands, how.rows, group=p.heads // p.heads_kv)
    if how.splits == 1:
        split_launch(p, (*inputs, *out.stride()[:3], 0, 0), pages)(
            (q, k, v, out, lse, *given, operands.sinks, *descales, tiles), (scale_log2,)
        )
        return out, lse
    parts = q.new_empty((how.splits, *out.shape), dtype=torch.float32)
    lse_parts = q.new_empty((how.splits, *lse.shape), dtype=torch.float32)
    of_parts = (*parts.stride()[1:4], parts.stride(0), lse_parts.stride(0))
    tensors = (q, k, v, parts, lse_parts, *given, None, *descales, tiles)
    split_launch(p, (*inputs, *of_parts), pages)(tensors, (scale_log2,))
    merge_launch(p, out.stride()[:3], how.splits)((parts, lse_parts, out, lse, operands.sinks), ())
    return out, lse


@lru_cache(maxsize=1024)
def split_launch(problem: Problem, strides: Strides, pages: tuple[int, int] = (0, 0)) -> Launch:
    """The launch of `split_kernel`.

    Args:
        problem: the sizes.
        strides: over batch (pages, of k and v that lie in them), seqlen and heads of q, k, v and where O goes; over
            splits of where O and LSE go.
        pages: stride of the page table, and how many pages there are.
    """
    p, tiles, how = problem, tiles_for(problem), cut(problem)
    left, right = p.span
    return Launch(
        kernels.split_kernel,
        p.batch * p.heads_kv * how.splits * how.blocks,
        (*strides, *pages, p.seqlen_q, p.seqlen_k, p.heads, p.heads_kv, how.blocks, how.split, how.splits, *p.reach),
        {
            "HEAD_DIM": p.head_dim_v,
            "BLOCK_D": block_d(p.head_dim_v),
            "REST": p.head_dim - p.head_dim_v,
            "BLOCK_REST": block_d(p.head_dim - p.head_dim_v) if p.latent else 0,
            "ROWS": how.rows,
            "BLOCK_KV": tiles.block_kv,
            "LEFT": left is not None,
            "RIGHT": right is not None,
            "CACHE": p.used_k,
            "PAGE": p.page_size or 0,
            "PARTS": how.splits > 1,
        },
        tiles.num_warps,
        tiles.num_stages,
    )
