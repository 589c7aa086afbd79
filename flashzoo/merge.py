"""Partial results of attention, over disjoint sets of keys, joined into that over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashzoo.call.check import check_tensor, check_tensors
from flashzoo.transforms import transforming

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LSE_DTYPES = (torch.float32, torch.float64)


def merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """What attention to all keys gives, from what it gave for each of several disjoint sets of them.

    `lse = log(sum_i exp(lse_i))` and `out = sum_i exp(lse_i - lse) out_i`, in float32, or float64 where a part is.
    Plain torch operations: differentiable through every out and every LSE, and traced like others. Two parts on a GPU
    that autograd does not record are joined by one kernel, in one pass over them. A merged result may be a part of the
    next.

    Args:
        outs: one `(batch, seqlen_q, heads, head_dim_v)` of each part, at least one, fp16, bf16, fp32 or fp64, all of
            one shape and on one device, as `flashzoo.attention(..., return_lse=True)` returns it.
        lses: as many, `(batch, heads, seqlen_q)`, natural log, fp32 or fp64;
            -inf where the row sees no key of that part.
        out_dtype: of the merged out; where None that of outs, where they differ what torch promotes them to.

    Returns:
        `(out, lse)`, in the shapes of the parts; lse in float32, or float64 where a part is. A row whose LSE is -inf in
        every part gives 0 and -inf, with gradients 0.

    Raises:
        TypeError, ValueError: an argument is malformed; the text names it, what was expected and what was got.
    """
    _check(outs, lses, out_dtype)
    wide = reduce(torch.promote_types, (x.dtype for x in (*outs, *lses)), torch.float32)
    out_dtype = out_dtype or reduce(torch.promote_types, (out.dtype for out in outs))
    if _in_one_kernel(outs, lses, out_dtype):
        return import_module("flashzoo._triton.merge").merge(tuple(outs), tuple(lses), out_dtype)
    lses = [lse.to(wide) for lse in lses]
    # Keeps the exponentials in range. The results do not depend on it, so nothing has to flow back through it.
    row_max = torch.stack([lse.detach() for lse in lses]).amax(0)
    row_max = row_max.masked_fill(row_max == -math.inf, 0)
    weights = [torch.exp(lse - row_max) for lse in lses]
    total = reduce(torch.add, weights)
    blind = total == 0
    # neither 0 / 0 nor the slope of log at 0, which masks behind them would leave NaN in gradients
    total = total.masked_fill(blind, 1)
    out = reduce(
        torch.add,
        (out.to(wide) * (weight / total).transpose(1, 2)[..., None] for out, weight in zip(outs, weights, strict=True)),
    )
    return out.to(out_dtype), (row_max + total.log()).masked_fill(blind, -math.inf)


def _in_one_kernel(outs: Sequence[Tensor], lses: Sequence[Tensor], out_dtype: torch.dtype) -> bool:
    """Whether a kernel can have all that the call asks for, and is there."""
    parts = (*outs, *lses)
    if len(outs) != 2 or not outs[0].is_cuda or not outs[0].numel() or is_compiling() or transforming():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        return False
    wide = torch.float64 in (out_dtype, *(x.dtype for x in parts))
    return not wide and outs[0].stride(3) == outs[1].stride(3) == 1 and not any(x.is_neg() for x in parts) and _triton()


@cache
def _triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def _check(outs: Any, lses: Any, out_dtype: Any) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of tensors, got {type(parts).__name__}")
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be of the same parts, at least one, got {len(outs)} and {len(lses)}")
    check_tensors(
        **{f"outs[{i}]": out for i, out in enumerate(outs)}, **{f"lses[{i}]": lse for i, lse in enumerate(lses)}
    )
    shape, device = tuple(outs[0].shape), outs[0].device
    if len(shape) != 4:
        raise ValueError(f"outs[0] must have 4 dimensions (batch, seqlen_q, heads, head_dim_v), got shape {shape}")
    of_rows = (shape[0], shape[2], shape[1])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_tensor(f"outs[{i}]", out, "outs[0]'s shape", shape, OUT_DTYPES, "outs[0]'s", device)
        check_tensor(f"lses[{i}]", lse, "shape (batch, heads, seqlen_q)", of_rows, LSE_DTYPES, "outs[0]'s", device)
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be None or one of {', '.join(map(str, OUT_DTYPES))}, got {out_dtype!r}")
