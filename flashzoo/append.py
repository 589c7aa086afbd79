"""New keys and values into a cache that `attention` reads."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashzoo.call.check import check_data, check_tensor, check_tensors
from flashzoo.call.operands import OPERANDS
from flashzoo.transforms import refuse_transforms


def append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqused_k: Tensor, *, page_table: Tensor | None = None
) -> None:
    """Write new keys and values into a cache behind what is used of it, in place, in one kernel.

    `attention` with `seqused_k + seqlen_new` then sees them. Nothing of seqused_k and page_table is read by the host.
    What there is no room for is left out: rows past the cache's end or the table's, and rows of a page whose number is
    none.

    Args:
        k_cache: `(batch, seqlen_max, heads_kv, head_dim)`, any dtype and strides with a contiguous last dimension; or
            pages `(pages, page_size, heads_kv, head_dim)` with page_table.
        v_cache: the same with head_dim_v.
        k: `(batch, seqlen_new, heads_kv, head_dim)`, dtype and device of the cache.
        v: the same with head_dim_v.
        seqused_k: int32 `(batch,)` without gaps: how many keys of each sequence are used before.
        page_table: int32 `(batch, pages of a sequence)`, rows without gaps, as `attention` takes it.

    Raises:
        TypeError, ValueError: an argument is malformed; the text names it, what was expected and what was got.
        NotImplementedError: it is being traced, by torch.compile with fullgraph=True or by torch.export.
    """
    if is_compiling():
        raise NotImplementedError(
            "flashzoo.append can't be traced: call it outside of what torch.compile or torch.export sees"
        )
    named = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    check_tensors(**named, seqused_k=seqused_k, **({} if page_table is None else {"page_table": page_table}))
    check_data(*[x.device for x in named.values()])
    refuse_transforms("flashzoo.append", **named)
    for name, x in named.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension (stride 1), got stride {x.stride(3)}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} has no gradient through a cache, got one that requires grad")
    batch, new, heads, _ = k.shape
    if page_table is None and k_cache.shape[0] != batch:
        raise ValueError(f"k must have k_cache's batch {k_cache.shape[0]}, got {batch}; pages go with page_table")
    of_caches = k_cache.shape[:2] if page_table is not None else (batch, k_cache.shape[1])
    check_tensor(
        "k_cache",
        k_cache,
        "pages or batch, rows, heads and head_dim",
        (*of_caches, heads, k.shape[3]),
        (k.dtype,),
        "k's",
        k.device,
    )
    check_tensor("v", v, "k's batch, rows and heads", (batch, new, heads, v.shape[3]), (k.dtype,), "k's", k.device)
    check_tensor(
        "v_cache",
        v_cache,
        "k_cache's rows and heads, and v's head_dim",
        (*of_caches, heads, v.shape[3]),
        (k.dtype,),
        "k's",
        k.device,
    )
    for name, x in (("seqused_k", seqused_k), ("page_table", page_table)):
        if x is not None:
            kind = OPERANDS[name]
            kind.check(name, kind.form(name, x), k.device)
    if seqused_k.shape != (batch,):
        raise ValueError(f"seqused_k must have shape (batch,) {(batch,)}, got {tuple(seqused_k.shape)}")
    if page_table is not None and page_table.shape[0] != batch:
        raise ValueError(
            f"page_table must have a row for each of k's batch {batch}, got shape {tuple(page_table.shape)}"
        )
    k, v = k.resolve_neg(), v.resolve_neg()
    import_module("flashzoo._triton.append").append(k_cache, v_cache, k, v, seqused_k, page_table)
