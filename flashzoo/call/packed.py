"""Packed sequences in the forms that callers have them in, made a batch of one,
which is what is checked, planned and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k")
"""Arguments that say where packed sequences lie."""


def on_caches(k: Any) -> bool:
    """Whether packed queries are on caches, or pages: k has a dimension more than they."""
    return getattr(k, "ndim", 3) == 4


def as_batch(q: Tensor, k: Any, v: Any) -> tuple[Tensor, Any, Any]:
    """q, k and v `(total, heads, head_dim)` as a batch of one, caches as they are. TypeError or ValueError where k or v
    is no such tensor."""
    if on_caches(k):
        return q[None], k, v
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        check_rows(name, x.shape)
    return q[None], k[None], v[None]


def check_rows(name: str, shape: tuple[int, ...]) -> None:
    """ValueError where k or v, of that shape, is not in packed rows as q is."""
    if len(shape) != 3:
        raise ValueError(
            f"{name} must have 3 dimensions (total_k, heads_kv, head_dim), as q has, or be a cache of 4, "
            f"got shape {tuple(shape)}"
        )


def rows_of_nested(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The packed rows of nested tensors `(batch, seqlen, heads, head_dim)`,
    and the arguments that their offsets are."""
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.layout != torch.jagged or not x.is_nested:
            layout = (
                f"a nested one ({x.layout})"
                if getattr(x, "is_nested", False)
                else f"{type(x).__name__} {getattr(x, 'layout', '')}"
            )
            raise TypeError(
                f"{name} must be a nested tensor of layout torch.jagged, as all three or none, got {layout.strip()}"
            )
        holes: Any = tensors[name].lengths()
        if x.ndim != 4 or isinstance(x.shape[1], int) or holes is not None:
            got = f"shape {tuple(x.shape)}{'' if holes is None else ' with holes'}"
            raise ValueError(
                f"{name} must be nested in dimension 1 of (batch, seqlen, heads, head_dim), without holes, got {got}"
            )
    asked = [name for name in LENGTHS if options.get(name) is not None]
    if asked:
        raise TypeError(f"{asked[0]} goes with packed rows; nested tensors have their lengths with them")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v must be nested by k's own offsets, got lengths {v.shape[1]} and {k.shape[1]}")
    lengths = {"cu_seqlens_q": q.offsets().to(torch.int32)}
    if k.offsets() is not q.offsets():
        lengths["cu_seqlens_k"] = k.offsets().to(torch.int32)
    return (q.values(), k.values(), v.values()), lengths


def batch_of_one(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Packed rows and nested tensors as a batch of one, with the options that say so; other tensors, and packed rows on
    caches, as they are."""
    if getattr(q, "is_nested", False):
        (q, k, v), lengths = rows_of_nested(q, k, v, options)
        options = options | lengths
    if options.get("cu_seqlens_q") is not None and isinstance(q, Tensor) and q.ndim == 3 and not on_caches(k):
        q, k, v = as_batch(q, k, v)
    return q, k, v, options


def of_nested(attention: Callable, q: Any, k: Any, v: Any, *, return_lse: bool, version: str, **options: Any) -> Any:
    """`attention` of nested tensors: out is nested as q is."""
    rows, lengths = rows_of_nested(q, k, v, options)
    result = attention(*rows, return_lse=return_lse, version=version, **options | lengths)
    out = torch.nested.nested_tensor_from_jagged(result[0] if return_lse else result, q.offsets())
    return (out, result[1]) if return_lse else out
