"""New keys and values into caches on the host: the launch. See append_kernels.py."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flashzoo._triton.append_kernels import append_kernel
from flashzoo._triton.descales import strided
from flashzoo._triton.launch import Launch
from flashzoo.integers import next_power_of_2

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What numbers of so many bytes are copied as: their bits."""


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    page_table: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    """`flashzoo.append` of checked tensors."""
    if not k.numel() + v.numel() or not k_cache.shape[0]:
        return
    caches, new = ([x.view(BITS[x.itemsize]) for x in pair] for pair in ((k_cache, v_cache), (k, v)))
    tensors = (*caches, *(new if k.dtype == k_cache.dtype else (k, v)))
    pages = (0, 0) if page_table is None else (k_cache.shape[0], page_table.stride(0))
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    strides = tuple(stride for x in tensors for stride in x.stride()[:3])
    page_size = 0 if page_table is None else k_cache.shape[1]
    launch = append_launch(tensors[2].dtype, tuple(k.shape), v.shape[3], strides, (capacity, *pages), page_size)
    launch((*tensors, seqused_k, page_table, strided(k_descale), strided(v_descale)), ())


@lru_cache(maxsize=1024)
def append_launch(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    head_dim_v: int,
    strides: tuple[int, ...],
    sizes: tuple[int, int, int],
    page_size: int,
) -> Launch:
    """The launch of `append_kernel`.

    Args:
        dtype: of the new rows, which tells the caches': a `Launch` is for tensors of the dtypes that it was first
            called with.
        shape: of the new keys.
        head_dim_v: of the new values.
        strides: over batch (pages), rows and heads of both caches, and of the new keys and values.
        sizes: rows that a sequence has room for; how many pages there are, and the stride of their table.
        page_size: 0 where there are no pages.
    """
    batch, new, heads, head_dim = shape
    widths = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": next_power_of_2(head_dim),
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_DV": next_power_of_2(head_dim_v),
    }
    constexprs = {"HEADS": next_power_of_2(heads), **widths, "PAGE": page_size}
    return Launch(append_kernel, batch * new, (*strides, *sizes, new, heads), constexprs, num_warps=4, num_stages=1)
