"""New keys and values into a cache that `attention` reads."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from flashzoo.call.check import check_data, check_tensor, check_tensors
from flashzoo.call.operands import OPERANDS
from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.call.signs import resolved
from flashzoo.integers import cdiv
from flashzoo.transforms import refuse_transforms

E4M3 = torch.float8_e4m3fn


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    *,
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Write new keys and values into a cache behind what is used of it, in place, in one kernel.

    `attention` with `seqused_k + seqlen_new` then sees them. Nothing of seqused_k and page_table is read by the host.
    What there is no room for is left out: rows past the cache's end or the table's, and rows of a page whose number is
    none.

    Args:
        k_cache: `(batch, seqlen_max, heads_kv, head_dim)`, any real dtype, any strides with a contiguous last
            dimension; or pages `(pages, page_size, heads_kv, head_dim)` with page_table.
        v_cache: the same with head_dim_v. It may lie between k_cache's rows, or have columns of its rows where new
            rows have them too.
        k: `(batch, seqlen_new, heads_kv, head_dim)`, dtype and device of the cache; or fp16 or bf16 into an e4m3 cache:
            divided by k_descale in float32 and rounded to nearest, ties to even, what is beyond 448 to 448, infinity
            too, and NaN to NaN.
        v: the same with head_dim_v, of k's dtype.
        seqused_k: int32 `(batch,)` without gaps: how many keys of each sequence are used before.
        page_table: int32 `(batch, pages of a sequence)`, rows without gaps, as `attention` takes it. Sequences may
            share pages, but not those that are written to here, which is not looked at.
        k_descale, v_descale: those with which `attention` is to read the e4m3 cache, where k and v are not e4m3
            already: float32 `(batch, heads_kv)`, or `(batch, heads_kv, blocks)` with one for each 128 rows of a
            sequence; None is 1. Positive and finite, which is not looked at.

    Raises:
        TypeError, ValueError: an argument is malformed, or a cache expanded; the text names it, what was expected and
            what was got.
        NotImplementedError: it is being traced by torch.export. Under torch.compile the graph breaks here; with
            fullgraph=True, and in a strict export, that is torch's error.
    """
    if is_dynamo_compiling():
        from flashzoo.untraced import untraced

        descales = {"k_descale": k_descale, "v_descale": v_descale}
        return untraced(append, k_cache, v_cache, k, v, seqused_k, page_table=page_table, **descales)
    if is_compiling():
        raise NotImplementedError("flashzoo.append can't be traced: call it outside of what torch.export sees")
    named = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    operands = {"seqused_k": seqused_k, "page_table": page_table, "k_descale": k_descale, "v_descale": v_descale}
    operands = {name: x for name, x in operands.items() if x is not None or name == "seqused_k"}
    check_tensors(**named, **operands)
    check_data(*[x.device for x in named.values()])
    refuse_transforms("flashzoo.append", **named, **operands)
    for name, x in named.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension (stride 1), got stride {x.stride(3)}")
        if name.endswith("cache"):
            if not _rows_lie_apart(x):
                raise ValueError(
                    f"{name} must have memory of its own for each row, got strides {x.stride()} of {(*x.shape,)}"
                )
            if x.is_neg():
                raise ValueError(f"{name} must be written to as it lies in memory, got one that is lazily negated")
        if x.is_complex():
            raise TypeError(f"{name} must be of a real dtype, got {x.dtype}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} has no gradient through a cache, got one that requires grad")
    batch, new, heads, _ = k.shape
    if page_table is None and k_cache.shape[0] != batch:
        raise ValueError(f"k must have k_cache's batch {k_cache.shape[0]}, got {batch}; pages go with page_table")
    of_keys = (k.dtype, *([E4M3] if k.dtype in (torch.float16, torch.bfloat16) else []))
    of_caches = k_cache.shape[:2] if page_table is not None else (batch, k_cache.shape[1])
    check_tensor(
        "k_cache",
        k_cache,
        "pages or batch, rows, heads and head_dim",
        (*of_caches, heads, k.shape[3]),
        of_keys,
        "k's",
        k.device,
    )
    check_tensor("v", v, "k's batch, rows and heads", (batch, new, heads, v.shape[3]), (k.dtype,), "k's", k.device)
    check_tensor(
        "v_cache",
        v_cache,
        "k_cache's rows and heads, and v's head_dim",
        (*of_caches, heads, v.shape[3]),
        (k_cache.dtype,),
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
    _check_memory(**named, descales=(k_descale, v_descale))
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is not None:
            _check_descale(name, x, (batch, heads), capacity, k, k_cache.dtype)
    names = ("seqused_k", "page_table", "k_descale", "v_descale")
    read = [OPERANDS[name].prepared(operands.get(name), {}) for name in names]
    import_module("flashzoo._triton.append").append(k_cache, v_cache, resolved(k), resolved(v), *read)
    torch.autograd.graph.increment_version((k_cache, v_cache))  # what autograd has saved may be overwritten


def _rows_lie_apart(cache: Tensor) -> bool:
    """Whether no two of its numbers are at one place: each stride is beyond what smaller ones reach."""
    reach = 0
    if not cache.numel():
        return True
    for step, size in sorted((step, size) for step, size in zip(cache.stride(), cache.shape, strict=True) if size > 1):
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def _check_memory(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, descales: tuple[Any, Any]) -> None:
    """ValueError where new rows lie between a cache's first number and its last, or a row of one cache and one of the
    other share memory, unless they are columns of the same row that have the same new ones."""
    spans = {name: _span(x) for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v))}
    for name in ("k", "v"):
        for of in ("k_cache", "v_cache"):
            if spans[name][0] < spans[of][1] and spans[of][0] < spans[name][1]:
                raise ValueError(f"{name} must have memory of its own, got some of {of}'s, which is written to")
    if not k_cache.numel() or not v_cache.numel():
        return
    size, apart = k_cache.element_size(), spans["v_cache"][0] - spans["k_cache"][0]
    steps = [
        (step * size, step_v * size, count)
        for step, step_v, count in zip(k_cache.stride()[:3], v_cache.stride()[:3], k_cache.shape, strict=False)
        if count > 1
    ]
    widths = k_cache.shape[3] * size, v_cache.shape[3] * size
    for places in _meeting(apart, sorted(steps, reverse=True), *widths):
        if places is None or any(places):
            raise ValueError("v_cache must have memory of its own for each row, got some of other rows of k_cache")
        new = (spans["v"][0] - spans["k"][0]) * size == apart * k.element_size()
        new &= all(a == b for a, b, n in zip(k.stride(), v.stride(), k.shape[:3], strict=False) if n > 1)
        if not new or descales[0] is not descales[1]:
            raise ValueError("v_cache must have memory of its own where v or v_descale has, got k_cache's")


def _meeting(
    apart: int, steps: list[tuple[int, int, int]], width: int, width_v: int
) -> Iterator[tuple[int, ...] | None]:
    """How many places of each dimension a row of k_cache is before one of v_cache that shares memory with it, of all
    there are; None where the strides of both are not the same and their places not told apart.

    Args:
        apart: bytes from the one's first row to the other's.
        steps: of each dimension, the largest first, both strides and the size.
        width, width_v: bytes of a row.
    """
    if not steps:
        if -width_v < apart < width:
            yield ()
        return
    (step, step_v, count), *smaller = steps
    reach = width + sum([of_k * (n - 1) for of_k, _, n in smaller])
    reach_v = width_v + sum([of_v * (n - 1) for _, of_v, n in smaller])
    if step == step_v and max(reach, reach_v) <= step:
        for places in (apart // step, apart // step + 1):
            if -count < places < count:
                for others in _meeting(apart - places * step, smaller, width, width_v):
                    yield None if others is None else (places, *others)
    elif -reach_v - step_v * (count - 1) < apart < reach + step * (count - 1):
        yield None


def _span(x: Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last."""
    first, (a, b, c, d), (i, j, m, n) = x.data_ptr(), x.shape, x.stride()
    if not x.numel():
        return first, first
    return first, first + ((a - 1) * i + (b - 1) * j + (c - 1) * m + (d - 1) * n + 1) * x.element_size()


def _check_descale(
    name: str, x: Tensor, by_head: tuple[int, int], capacity: int, k: Tensor, of_cache: torch.dtype
) -> None:
    kind = OPERANDS[name]
    kind.check(name, kind.form(name, x), k.device)
    if k.dtype == of_cache:
        raise ValueError(f"{name} is for fp16 or bf16 rows into e4m3 caches, got it with {k.dtype} into {of_cache}")
    by_block = (*by_head, cdiv(capacity, DESCALE_BLOCK))
    if x.shape not in (by_head, by_block):
        raise ValueError(
            f"{name} must have shape (batch, heads_kv) {by_head}, or (batch, heads_kv, blocks of {DESCALE_BLOCK} rows) "
            f"{by_block}, got {tuple(x.shape)}"
        )
