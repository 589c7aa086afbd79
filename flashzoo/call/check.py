"""The arguments of a call, each checked by name: tensors and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from flashzoo.call.forms import normalised
from flashzoo.call.operands import OPERANDS
from flashzoo.call.problem import OPTIONS, Problem
from flashzoo.dtypes import TORCH_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# What a plan, and so the cache of plans, depends on. Not the strides but the last: kernels take them as they come.
# That is in a tuple, empty for a tensor of no dimensions.
Described: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, torch.layout]


def described(x: Tensor) -> Described:
    """What a plan depends on, of one tensor."""
    return x.shape, x.stride()[-1:], x.dtype, x.device, x.layout


def described_call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What a plan depends on, of a call's tensors: of each what `described` gives, one behind the other, and last
    whether v lies in k."""
    of_k, of_v = described(k), described(v)
    return *described(q), *of_k, *of_v, of_k[0] != of_v[0] and lies_in(v, k)


def lies_in(v: Tensor, k: Tensor) -> bool:
    """Whether v is k's first columns, fewer than all, where these lie."""
    if v.ndim != k.ndim or v.shape[:-1] != k.shape[:-1] or v.shape[-1:] >= k.shape[-1:]:
        return False
    if (v.stride(), v.storage_offset(), v.dtype, v.is_neg()) != (k.stride(), k.storage_offset(), k.dtype, k.is_neg()):
        return False
    try:
        return v.untyped_storage() is k.untyped_storage()
    except NotImplementedError:  # under a transform of torch.func, which has none
        return False


def check_tensors(**tensors: Any) -> None:
    """TypeError where one is no tensor, or of a layout that has neither strides nor, where nested, one shape."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        _check_layout(name, x.layout, x.is_nested)


def _check_layout(name: str, layout: torch.layout, nested: bool = False) -> None:
    dense = f"{name} must be a dense tensor (torch.strided)"
    if nested or layout == torch.jagged:
        instead = "pad it with torch.nested.to_padded_tensor, or pack its sequences into one with a BlockMask.documents"
        raise TypeError(f"{dense}, got a nested one ({layout}): {instead}")
    if layout != torch.strided:
        raise TypeError(f"{dense}, got {layout}: call to_dense()")


class Shaped(Protocol):
    """What is checked of a tensor, or of what says it of one."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def check_tensor(
    name: str,
    x: Tensor | Shaped,
    what: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    whose: str,
    device: torch.device,
) -> None:
    """TypeError or ValueError where x is not of this shape, which is `what`, of one of these dtypes,
    and on this device, `whose`."""
    if x.shape != shape:
        raise ValueError(f"{name} must have {what} {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be of dtype {', '.join(map(str, dtypes))}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on {whose} device {device}, got {x.device}")


def check_data(*devices: torch.device) -> None:
    """ValueError where tensors on one of these have no data."""
    if any(device.type == "meta" for device in devices):
        raise ValueError("q, k and v must have data, got device meta: flashzoo.explain answers about such tensors")


def read_as_batch(
    tensors: tuple[Described, Described, Described], sequences: int | None, table: tuple[int, ...] | None
) -> tuple[tuple[Described, Described, Described], dict[str, Any]]:
    """q, k and v of four dimensions as a call means them, and the fields of `Problem` that their own dimensions give.
    TypeError or ValueError as `check_shapes`, or where k and v are no pages.

    Args:
        tensors: q of three dimensions is packed rows on caches.
        sequences: how many cu_seqlens_q has; None where there is none.
        table: the page table's shape.
    """
    q, k, v = tensors
    shape, *rest = q
    packed_q = sequences is not None and len(shape) == 3
    if packed_q:
        q = torch.Size((1, *shape)), *rest  # pyright: ignore[reportAssignmentType] - the rest is as it was
    elif sequences is not None and table is not None:
        raise ValueError(
            "q must be packed rows (total_q, heads, head_dim), as cu_seqlens_q and page_table are given, "
            f"got shape {tuple(shape)}"
        )
    found: dict[str, Any] = {"packed_q": True} if packed_q else {}
    if table is not None:
        of, batch = ("cu_seqlens_q's sequences", sequences) if packed_q else ("q's batch", next(iter(shape), None))
        if batch != table[0] and len(q[0]) == 4:
            raise ValueError(f"page_table must have a row for each of {of} {batch}, got shape {tuple(table)}")
        k, v, found["page_size"] = _read_by_pages(k, v, table)
    check_shapes((q, k, v), sequences if packed_q else None)  # pyright: ignore[reportArgumentType]
    return (q, k, v), found  # pyright: ignore[reportReturnType] - the rest is as it was


def _read_by_pages(k: Described, v: Described, table: tuple[int, ...]) -> tuple[Described, Described, int]:
    """k and v as if they were a batch, and the page size."""
    for name, (shape, *_) in (("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(
                f"{name} must be pages (pages, page_size, heads_kv, head_dim), as page_table is given, "
                f"got {tuple(shape)}"
            )
    if k[0][:2] != v[0][:2]:
        raise ValueError(f"v must have k's pages and page_size {tuple(k[0][:2])}, got {tuple(v[0][:2])}")
    page_size = k[0][1]
    if not k[0][0] and page_size and 0 not in table:
        raise ValueError(f"k must have a page where page_table has numbers, got shape {tuple(k[0])}")
    as_batch = (((table[0], table[1] * page_size, *shape[2:]), *rest) for shape, *rest in (k, v))
    return *as_batch, page_size  # pyright: ignore[reportReturnType] - two of them, the rest is as it was


def check_shapes(tensors: tuple[Described, Described, Described], caches: int | None = None) -> None:
    """TypeError or ValueError where q, k and v are no inputs of attention, or do not go together; caches: how many k
    and v are, where that is not q's batch."""
    (q_shape, _, q_dtype, q_device, _), (k_shape, _, k_dtype, k_device, _), (v_shape, _, v_dtype, v_device, _) = tensors
    for name, (shape, last, _, _, layout) in zip("qkv", tensors, strict=True):
        _check_layout(name, layout)
        if len(shape) != 4:
            rows = (
                "; packed rows (total, heads, head_dim) go with cu_seqlens_q"
                if len(shape) == 3 and caches is None
                else ""
            )
            raise ValueError(
                f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), got shape {tuple(shape)}{rows}"
            )
        if last != (1,) and shape[-1] > 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension (stride 1), "
                f"got stride {last[0]} for shape {tuple(shape)}"
            )
    (batch, _, heads, head_dim), (batch_k, seqlen_k, heads_kv, head_dim_k) = q_shape, k_shape
    *sizes_v, head_dim_v = v_shape
    if sizes_v != [batch_k, seqlen_k, heads_kv]:
        raise ValueError(
            f"v must have k's batch, seqlen and heads {tuple(k_shape[:3])}, got {tuple(sizes_v)} ({_shapes(tensors)})"
        )
    if caches is not None and caches != batch_k:
        raise ValueError(
            f"k must be a cache for each of cu_seqlens_q's sequences {caches}, got {batch_k} ({_shapes(tensors)})"
        )
    if caches is None and batch != batch_k:
        raise ValueError(f"k must have q's batch {batch}, got {batch_k} ({_shapes(tensors)})")
    if head_dim != head_dim_k:
        raise ValueError(f"k must have q's head_dim {head_dim}, got {head_dim_k} ({_shapes(tensors)})")
    if head_dim < 1 or head_dim_v < 1 or heads < 1 or heads_kv < 1:
        raise ValueError(f"heads and head_dim must be at least 1, got {_shapes(tensors)}")
    if heads % heads_kv:
        raise ValueError(f"q's heads must be a multiple of k's, got {heads} and {heads_kv} ({_shapes(tensors)})")
    of_fp8_cache = q_dtype in (torch.float16, torch.bfloat16) and k_dtype == v_dtype == torch.float8_e4m3fn
    if not (q_dtype == k_dtype == v_dtype or of_fp8_cache):
        raise TypeError(
            f"q, k and v must have one dtype, got q {q_dtype}, k {k_dtype}, v {v_dtype}; "
            "only k and v, both, may be torch.float8_e4m3fn beside q of torch.float16 or torch.bfloat16"
        )
    if q_dtype not in DTYPE_NAMES:
        raise TypeError(
            f"q, k and v must be of dtype {', '.join(TORCH_DTYPES)}, got q {q_dtype}, k {k_dtype}, v {v_dtype}"
        )
    if not q_device == k_device == v_device:
        raise ValueError(f"q, k and v must be on one device, got q {q_device}, k {k_device}, v {v_device}")


def _shapes(tensors: tuple[Described, Described, Described]) -> str:
    shapes = ", ".join(f"{name} {tuple(shape)}" for name, (shape, *_) in zip("qkv", tensors, strict=True))
    return f"{shapes}, as (batch, seqlen, heads, head_dim)"


def _name_of_out_dtype(out_dtype: Any) -> str | None:
    if out_dtype is None:
        return None
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in DTYPE_NAMES:
        raise TypeError(f"out_dtype must be None or a torch.dtype of {', '.join(TORCH_DTYPES)}, got {out_dtype!r}")
    return DTYPE_NAMES[out_dtype]


_TO_FIELD = {"window_size": normalised, "out_dtype": _name_of_out_dtype}
"""What makes an option a field of `Problem`, where it is not one already; each checks it."""


def fields_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Problem` that these options of `attention` give, each checked by name."""
    unknown = sorted(options.keys() - OPTIONS.keys())
    if unknown:
        known = ", ".join((*OPTIONS, *OPERANDS))
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}, expected some of {known}")
    found = {}
    for name, value in options.items():
        if name in _TO_FIELD:
            value = _TO_FIELD[name](value)
        else:
            OPTIONS[name].check(name, value)
        found[OPTIONS[name].field] = value
    return found


def options_of(problem: Problem) -> dict[str, Any]:
    """The options of `attention` that ask for a problem, beside its operands: the reverse of `fields_of`."""
    found = {name: getattr(problem, option.field) for name, option in OPTIONS.items()}
    return found | {"out_dtype": TORCH_DTYPES[problem.out_dtype] if problem.out_dtype != problem.dtype else None}
