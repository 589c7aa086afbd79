"""`attention` for what traces a call, `torch.compile` and `torch.export`: operators that a graph holds as one node each.

flashzoo::attention           out and lse; records flashzoo::attention_backward
flashzoo::attention_backward  dq, dk and dv

A tracer learns shapes, dtypes and strides from the fakes. The bodies see real tensors, so every version works here as it does in a
plain call, and sizes are looked at only there: a graph with dynamic shapes asks anew for each size. Outputs have no gaps,
their dimensions in the order of those that they belong to (out's in q's), which is what kernels give as a rule; others are copied.
Nothing here is imported, or run, by a call that is not traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashzoo.autograd import refuse_double_backward
from flashzoo.masks.block_mask import BlockMask
from flashzoo.plan import (
    Form,
    Mask,
    Plan,
    banded,
    check_descales,
    check_descales_alone,
    check_mask,
    check_scale,
    check_shapes,
    check_tensors,
    described,
    form_of,
    negated,
    plan,
)
from flashzoo.registry import ARGUMENT, current, requested
from flashzoo.spec import Problem, Window, check_flags, normalised
from flashzoo.transforms import refuse_traced_forward_ad

NAME, BACKWARD_NAME = "flashzoo::attention", "flashzoo::attention_backward"

_HOW = (
    "float? softmax_scale=None, bool causal=False, SymInt? window_left=None, SymInt? window_right=None, "
    "bool deterministic=False, bool return_lse=False"
)
_MASK = "Tensor[]? mask_tensors=None, SymInt[]? mask_sizes=None"
_DESCALES = "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)  # out lies in the order of the strides that q had when it was traced

torch.library.define(
    NAME,
    f"(Tensor q, Tensor k, Tensor v, {_HOW}, bool grad=False, str version='auto', str? precision=None, "
    f"ScalarType? out_dtype=None, {_DESCALES}, {_MASK}, str by='{ARGUMENT}') -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    BACKWARD_NAME,
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_HOW}, "
    f"str version='auto', str? precision=None, {_MASK}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_TAGS,
)


@torch.compiler.assume_constant_result
def _requested(version: Any) -> tuple[str, str]:
    """The name that a graph holds, and by whom: what the argument, flashzoo.use() and the environment say when it is traced."""
    return requested(version if isinstance(version, str) else repr(version))  # a bad one is refused when the graph runs, with the good ones


def traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_size: Window | None,
    deterministic: bool,
    return_lse: bool,
    version: str,
    precision: str | None,
    out_dtype: torch.dtype | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    block_mask: BlockMask | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flashzoo.attention` of what is being traced."""
    # What the operator's schema would convert, or refuse in words of its own.
    check_tensors(q, k, v)
    check_flags(causal=causal, deterministic=deterministic, return_lse=return_lse)
    check_scale(softmax_scale)
    form_of(precision, out_dtype)
    check_descales_alone((q_descale, k_descale, v_descale), q.device)
    parts = None, None
    if block_mask is not None:
        check_mask(block_mask)
        parts = block_mask.parts()
    left, right = normalised(window_size)
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    name, by = _requested(version)
    refuse_traced_forward_ad()
    out, lse = torch.ops.flashzoo.attention(
        *(q, k, v, softmax_scale, causal, left, right, deterministic, return_lse, grad, name),
        *(precision, out_dtype, q_descale, k_descale, v_descale, *parts, by),
    )
    return (out, lse) if return_lse else out


def _banded(
    tensors: Sequence[Tensor] | None, sizes: Sequence[int] | None, causal: bool, window: Window
) -> tuple[dict[str, BlockMask], Mask | None]:
    """The block mask that the version is handed, as its keyword argument if there is one, and what a plan depends on of it."""
    if tensors is None or sizes is None:
        return {}, None
    block_mask, mask = banded(BlockMask.of_parts(tensors, sizes), causal, window)
    return {"block_mask": block_mask}, mask


@torch.library.impl(NAME, "default")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    grad: bool = False,
    version: str = "auto",
    precision: str | None = None,
    out_dtype: torch.dtype | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    mask_tensors: Sequence[Tensor] | None = None,
    mask_sizes: Sequence[int] | None = None,
    by: str = ARGUMENT,
) -> tuple[Tensor, Tensor]:
    refuse_traced_forward_ad()
    window = (window_left, window_right)
    form = form_of(precision, out_dtype)
    masked, mask = _banded(mask_tensors, mask_sizes, causal, window)
    how = (causal, softmax_scale, window, deterministic, return_lse, grad, (version, by), form, mask)
    planned = _plan(q, k, v, *how)
    problem = planned.problem
    descales = (q_descale, k_descale, v_descale)
    check_descales(descales, problem, q.device)
    # The graph records the call, so the version must not: it is asked for its forward pass alone.
    more = (descales,) if planned.e4m3 else ()
    result = planned.run(negated(q) if planned.negative else q, k, v, problem.forward, planned.scale, *more, **masked)
    planned.check(result, q, recorded=False)
    out, lse = result
    out = _laid_out(out, *_dense(q, problem.head_dim_v))
    shape = _lse_shape(q, return_lse, grad)
    if lse is None or lse.shape != shape:  # nobody asked for it, and a version may give it or not
        return out, out.new_zeros(shape, dtype=_lse_dtype(out))
    return out, _laid_out(lse, shape, (shape[1] * shape[2], shape[2], 1))


@torch.library.register_fake(NAME)
def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    grad: bool = False,
    version: str = "auto",
    precision: str | None = None,
    out_dtype: torch.dtype | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    mask_tensors: Sequence[Tensor] | None = None,
    mask_sizes: Sequence[int] | None = None,
    by: str = ARGUMENT,
) -> tuple[Tensor, Tensor]:
    check_shapes((described(q), described(k), described(v)))
    dtype = (out_dtype or torch.bfloat16) if q.dtype == torch.float8_e4m3fn else q.dtype
    out = torch.empty_strided(*_dense(q, v.shape[3]), dtype=dtype, device=q.device)
    return out, out.new_empty(_lse_shape(q, return_lse, grad), dtype=_lse_dtype(out))


@torch.library.impl(BACKWARD_NAME, "default")
def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    version: str = "auto",
    precision: str | None = None,
    mask_tensors: Sequence[Tensor] | None = None,
    mask_sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_traced_forward_ad()
    window = (window_left, window_right)
    form = (precision, None)
    masked, mask = _banded(mask_tensors, mask_sizes, causal, window)
    how = (causal, softmax_scale, window, deterministic, return_lse, True, (version, ARGUMENT), form, mask)
    planned = _plan(q, k, v, *how)
    run, problem, scale = planned.run, planned.problem, planned.scale
    if planned.negative:
        q = negated(q)
    # Below a dispatch mode nothing is recorded, whatever enable_grad() says; this undoes that.
    with torch.inference_mode(False), torch.no_grad():
        if hasattr(run, "backward"):
            dq, dk, dv = run.backward(dout, dlse, q, k, v, out, lse, problem, scale, **masked)
        else:
            dq, dk, dv = _recorded_anew(run, dout, dlse, q, k, v, problem, scale, **masked)
    if planned.negative:
        dq = -dq
    dq, dk, dv = (_laid_out(dx, *_dense(x)) for dx, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv


def _recorded_anew(
    run: Callable, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, problem: Problem, scale: float, **mask: BlockMask
) -> tuple[Tensor, ...]:
    """The gradients of a version that leaves its backward pass to autograd: its forward pass once more, recorded."""
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out, lse = run(*leaves, problem, scale, **mask)
    outputs, gradients = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return torch.autograd.grad(outputs, leaves, gradients)


@torch.library.register_fake(BACKWARD_NAME)
def _fake_attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_strided(*_dense(x), dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *how = inputs
    softmax_scale, causal, left, right, deterministic, return_lse, ctx.grad, version, precision = how[:9]
    mask_tensors, ctx.mask_sizes = how[13:15] or (None, None)
    ctx.save_for_backward(q, k, v, *output, *(mask_tensors or ()))
    if not return_lse:
        ctx.mark_non_differentiable(output[1])
    ctx.how = (softmax_scale, causal, left, right, deterministic, return_lse, version, precision)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    refuse_double_backward()
    if not ctx.grad:
        raise RuntimeError(f"{NAME}: an input requires grad, expected the argument grad to be True, got False")
    q, k, v, out, lse, *mask_tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = torch.ops.flashzoo.attention_backward(dout, dlse, q, k, v, out, lse, *ctx.how, mask_tensors or None, ctx.mask_sizes)
    others: list[Any] = [None] * (len(ctx.needs_input_grad) - 3)  # as many as were given: a graph leaves out trailing defaults
    if mask_tensors:
        others[13] = [None] * len(mask_tensors)
    return (*gradients, *others)


torch.library.register_autograd(NAME, _differentiate, setup_context=_keep)


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window: Window,
    deterministic: bool,
    lse: bool,
    grad: bool,
    asked: tuple[str, str],
    form: Form,
    mask: Mask | None,
) -> Plan:
    tensors = (*described(q), *described(k), *described(v))
    return plan(*tensors, causal, softmax_scale, window, deterministic, lse, grad, asked, form, mask, current())


def _dense(x: Tensor, width: int | None = None) -> tuple[list[int], list[int]]:
    """Shape and strides of a tensor without gaps, as x but for the last size, its dimensions in the order of x's."""
    shape = [*x.shape[:3], x.shape[3] if width is None else width]
    strides, step = [1] * 4, shape[3]
    for i in sorted(range(3), key=x.stride, reverse=True)[::-1]:
        strides[i], step = step, step * shape[i]
    return shape, strides


def _laid_out(x: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """x, copied where its strides are not these, or it is part of a larger tensor."""
    if not x.storage_offset() and all(size == 1 or found == stride for size, found, stride in zip(shape, x.stride(), strides, strict=True)):
        return x
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _lse_shape(q: Tensor, lse: bool, grad: bool) -> tuple[int, ...]:
    """Of what the operator gives as lse: nothing, where it is neither asked for nor kept for a backward pass."""
    return (q.shape[0], q.shape[2], q.shape[1]) if lse or grad else (0,)


def _lse_dtype(out: Tensor) -> torch.dtype:
    return torch.promote_types(out.dtype, torch.float32)
