"""New keys and values into a cache that `attention` reads."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from flashzoo.call.check import check_data, check_tensor, check_tensors
from flashzoo.call.operands import OPERANDS
from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.call.signs import resolved
from flashzoo.integers import cdiv
from flashzoo.registry import remembered
from flashzoo.transforms import refuse_transforms, transforming

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
    given = {"seqused_k": seqused_k, "page_table": page_table, "k_descale": k_descale, "v_descale": v_descale}
    operands = {name: x for name, x in given.items() if x is not None or name == "seqused_k"}
    check_tensors(**named, **operands)
    check_data(k_cache.device, v_cache.device, k.device, v.device)
    if transforming():
        refuse_transforms("flashzoo.append", **named, **operands)
    for name, x in named.items():
        if name.endswith("cache") and x.is_neg():
            raise ValueError(f"{name} must be written to as it lies in memory, got one that is lazily negated")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} has no gradient through a cache, got one that requires grad")
    forms = tuple([(name, OPERANDS[name].form(name, x)) for name, x in operands.items()])
    rows = tuple([_Rows(x.shape, x.stride(), x.dtype, x.device) for x in named.values()])
    spans = _checked(rows, forms)
    _check_memory([x.data_ptr() for x in named.values()], spans, rows, k_descale is v_descale)
    read = [OPERANDS[name].prepared(x, {}) for name, x in given.items()]
    import_module("flashzoo._triton.append").append(k_cache, v_cache, resolved(k), resolved(v), *read)
    torch.autograd.graph.increment_version((k_cache, v_cache))  # what autograd has saved may be overwritten


class _Rows(NamedTuple):
    """Of a cache, or of new rows, all that is checked but where they are."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@remembered
def _checked(rows: tuple[_Rows, ...], forms: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    """How many bytes k_cache, v_cache, k and v reach over. TypeError or ValueError where they or the operands, of which
    there are the forms, are malformed or don't go together."""
    k_cache, v_cache, k, v = rows
    named = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    for name, x in named.items():
        if len(x.shape) != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
        if x.stride[3] != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension (stride 1), got stride {x.stride[3]}")
        if name.endswith("cache") and not _rows_lie_apart(x):
            raise ValueError(
                f"{name} must have memory of its own for each row, got strides {x.stride} of {(*x.shape,)}"
            )
        if x.dtype.is_complex:
            raise TypeError(f"{name} must be of a real dtype, got {x.dtype}")
    operands, (batch, new, heads, _) = dict(forms), k.shape
    paged = "page_table" in operands
    if not paged and k_cache.shape[0] != batch:
        raise ValueError(f"k must have k_cache's batch {k_cache.shape[0]}, got {batch}; pages go with page_table")
    of_keys = (k.dtype, *([E4M3] if k.dtype in (torch.float16, torch.bfloat16) else []))
    of_caches = k_cache.shape[:2] if paged else (batch, k_cache.shape[1])
    for name, what, shape, dtypes in (
        ("k_cache", "pages or batch, rows, heads and head_dim", (*of_caches, heads, k.shape[3]), of_keys),
        ("v", "k's batch, rows and heads", (batch, new, heads, v.shape[3]), (k.dtype,)),
        ("v_cache", "k_cache's rows and heads, and v's head_dim", (*of_caches, heads, v.shape[3]), (k_cache.dtype,)),
    ):
        check_tensor(name, named[name], what, shape, dtypes, "k's", k.device)
    for name, form in forms:
        OPERANDS[name].check(name, form, k.device)
    used, table = operands["seqused_k"][0], operands["page_table"][0] if paged else None
    if used != (batch,):
        raise ValueError(f"seqused_k must have shape (batch,) {(batch,)}, got {tuple(used)}")
    if table is not None and table[0] != batch:
        raise ValueError(f"page_table must have a row for each of k's batch {batch}, got shape {tuple(table)}")
    capacity = k_cache.shape[1] * (1 if table is None else table[1])
    for name in ("k_descale", "v_descale"):
        if name in operands:
            _check_descale(name, operands[name][0], (batch, heads), capacity, k.dtype, k_cache.dtype)
    return _span(k_cache), _span(v_cache), _span(k), _span(v)


def _rows_lie_apart(cache: _Rows) -> bool:
    """Whether no two of its numbers are at one place: each stride is beyond what smaller ones reach."""
    reach = 0
    if 0 in cache.shape:
        return True
    for step, size in sorted((step, size) for step, size in zip(cache.stride, cache.shape, strict=True) if size > 1):
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def _check_memory(starts: list[int], spans: tuple[int, ...], rows: tuple[_Rows, ...], one_descale: bool) -> None:
    """ValueError where new rows lie between a cache's first number and its last, or a row of one cache and one of the
    other share memory, unless they are columns of the same row that have the same new ones.

    Args:
        starts, spans, rows: of k_cache, v_cache, k and v: addresses, how many bytes they reach over, and the rest.
        one_descale: both caches have the same.
    """
    of_keys, of_values, *new = (range(start, start + span) for start, span in zip(starts, spans, strict=True))
    for name, x in zip("kv", new, strict=True):
        for of, cache in (("k_cache", of_keys), ("v_cache", of_values)):
            if x.start < cache.stop and cache.start < x.stop:
                raise ValueError(f"{name} must have memory of its own, got some of {of}'s, which is written to")
    k_cache, v_cache, k, v = rows
    if not of_keys or not of_values or of_keys.stop <= of_values.start or of_values.stop <= of_keys.start:
        return
    apart, size = of_values.start - of_keys.start, k_cache.dtype.itemsize
    for places in _met(k_cache, v_cache, apart):
        if places is None or any(places):
            raise ValueError("v_cache must have memory of its own for each row, got some of other rows of k_cache")
        same = (starts[3] - starts[2]) * size == apart * k.dtype.itemsize
        same &= all(a == b for a, b, n in zip(k.stride, v.stride, k.shape[:3], strict=False) if n > 1)
        if not same or not one_descale:
            raise ValueError("v_cache must have memory of its own where v or v_descale has, got k_cache's")


@remembered
def _met(k_cache: _Rows, v_cache: _Rows, apart: int) -> tuple[tuple[int, ...] | None, ...]:
    """What `_meeting` finds of two caches with first rows so many bytes apart."""
    size = k_cache.dtype.itemsize
    steps = [
        (step * size, step_v * size, count)
        for step, step_v, count in zip(k_cache.stride[:3], v_cache.stride[:3], k_cache.shape, strict=False)
        if count > 1
    ]
    return tuple(_meeting(apart, sorted(steps, reverse=True), k_cache.shape[3] * size, v_cache.shape[3] * size))


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


def _span(x: _Rows) -> int:
    """How many bytes there are from its first number on to behind its last."""
    if 0 in x.shape:
        return 0
    return (sum([(size - 1) * step for size, step in zip(x.shape, x.stride, strict=True)]) + 1) * x.dtype.itemsize


def _check_descale(
    name: str,
    shape: torch.Size,
    by_head: tuple[int, int],
    capacity: int,
    of_rows: torch.dtype,
    of_cache: torch.dtype,
) -> None:
    if of_rows == of_cache:
        raise ValueError(f"{name} is for fp16 or bf16 rows into e4m3 caches, got it with {of_rows} into {of_cache}")
    by_block = (*by_head, cdiv(capacity, DESCALE_BLOCK))
    if shape not in (by_head, by_block):
        raise ValueError(
            f"{name} must have shape (batch, heads_kv) {by_head}, or (batch, heads_kv, blocks of {DESCALE_BLOCK} rows) "
            f"{by_block}, got {tuple(shape)}"
        )
