"""Two partial results joined on the host: the launch. See merge_kernels.py."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flashzoo._triton.launch import Launch
from flashzoo._triton.merge_kernels import merge_kernel
from flashzoo.integers import next_power_of_2


def merge(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...], out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`flashzoo.merge` of two checked parts, float32 at most, that no autograd records."""
    out = torch.empty(outs[0].shape, dtype=out_dtype, device=outs[0].device)
    lse = torch.empty(lses[0].shape, dtype=torch.float32, device=outs[0].device)
    strides = tuple(stride for x in outs for stride in x.stride()[:3])
    strides += tuple(stride for x in lses for stride in x.stride())
    dtypes = (outs[0].dtype, outs[1].dtype, out_dtype)
    merge_launch(dtypes, tuple(out.shape), strides)((*outs, *lses, out, lse), ())
    return out, lse


@lru_cache(maxsize=1024)
def merge_launch(dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> Launch:
    """The launch of `merge_kernel`.

    Args:
        dtypes: of both parts and of what is made of them: a `Launch` is for those that it was first called with.
        shape: of out.
        strides: over batch, rows and heads of both outs, and over batch, heads and rows of both LSEs.
    """
    batch, rows, heads, head_dim = shape
    constexprs = {"HEADS": next_power_of_2(heads), "HEAD_DIM": head_dim, "BLOCK_D": next_power_of_2(head_dim)}
    return Launch(merge_kernel, batch * rows, (*strides, rows, heads), constexprs, num_warps=8, num_stages=1)
