"""Turn a version's forward and backward functions into one differentiable call. Knows no formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashzoo.call.problem import Problem
from flashzoo.transforms import refuse_batched, refuse_transforms, transforming

Forward = Callable[..., tuple[Tensor, Tensor | None]]
Backward = Callable[..., tuple[Tensor | None, ...]]
Prepared = Callable[[Problem, Any, torch.device], tuple[Problem, Any]]


def _as_read(x: Any, stride: tuple[int, ...] | None) -> Any:
    """What was saved, copied where hooks gave it back as it lies in memory in another way than it did."""
    return x if x is None or x.stride() == stride else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        operands: Any,
        functions: tuple[Forward, Backward, bool, bool],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *_: Tensor | None,
    ):
        run, run_backward, rows, ctx.batches = functions
        ctx.as_batch = q.ndim == 3 and not rows
        if ctx.as_batch:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        out, lse = run(q, k, v, problem, operands)
        ctx.read_again = operands.read_again
        saved = (q, k, v, out, lse, *ctx.read_again)
        ctx.strides = [x if x is None else x.stride() for x in saved]
        ctx.save_for_backward(*saved)
        ctx.problem, ctx.operands, ctx.run_backward = problem, operands, run_backward
        ctx.set_materialize_grads(False)
        return as_rows(out, lse) if ctx.as_batch else (out, lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_double_backward()
        if transforming():
            refuse_transforms("flashzoo's backward pass", dout=dout, dlse=dlse)
        if not ctx.batches:
            refuse_batched(dout, dlse)
        q, k, v, out, lse, *again = map(_as_read, ctx.saved_tensors, ctx.strides)
        operands = ctx.operands
        if any([x is not y for x, y in zip(again, ctx.read_again, strict=True)]):  # hooks saved them
            operands = operands.reading(again)
        if ctx.as_batch:
            dout, dlse = (x if x is None else x.unsqueeze(0) for x in (dout, dlse))
        # What a kernel reads is memory, where a number whose negative bit is set has the other sign.
        dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
        dlse = dlse if dlse is None else dlse.resolve_neg()
        given = (dout, dlse, q, k, v, out, lse, ctx.problem, operands)
        if is_dynamo_compiling() and not ctx.batches:  # as compiled autograd does, which can trace torch's operations
            from flashzoo.untraced import untraced

            dq, dk, dv, *more = untraced(ctx.run_backward, *given)
        else:
            dq, dk, dv, *more = ctx.run_backward(*given)
        if ctx.as_batch:
            dq, dk, dv = dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)
        return (None, None, None, dq, dk, dv, *more)


def as_rows(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Any]:
    """What a version gives for a batch of one, out `(1, rows, heads, head_dim_v)` and lse `(1, heads, rows)`, as packed
    rows: without that dimension."""
    return out.squeeze(0), None if lse is None else lse.squeeze(0)


def refuse_double_backward() -> None:
    """To begin a backward pass with that is not itself recorded: NotImplementedError where it would be, as a second
    derivative would be wrong with no error."""
    if torch.is_grad_enabled():
        raise NotImplementedError("flashzoo has no double backward: call backward or grad with create_graph=False")


def differentiable(
    forward: Forward, backward: Backward, prepared: Prepared | None = None, rows: bool = False, batches: bool = False
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An implementation that `Spec.impl` can name, from a pair of functions on raw tensors.

    Args:
        forward: `(q, k, v, problem, operands) -> (out, lse)`; lse may be None where neither `problem.lse`
            nor `problem.grad`, and where a Spec does not declare "lse", whatever backward makes of it.
        backward: `(dout, dlse or None, q, k, v, out, lse, problem, operands) -> (dq, dk, dv)`, and behind these the
            gradients of `operands.differentiable`.
        prepared: `(problem, operands, device) -> (problem, operands)`, what both are called with in place of the call's
            own; made once for a forward pass and the backward pass that follows it. None: they are called with the
            call's own.
        rows: both take packed rows of three dimensions.
        batches: backward is made of torch's operations, which are right for a dout of
            `torch.autograd.grad(is_grads_batched=True)`; what reads memory is not, and refuses it.

    Returns:
        `(q, k, v, problem, operands) -> (out, lse)`, recorded by autograd only where `problem.grad`. Its attribute
        `backward` is the backward pass alone, for who records calls by other means, and for
        `flashzoo.attention_backward`; `with_backward(change)` gives the same with `change(backward)` in its place. Its
        attribute `rows` says that it takes packed rows of three dimensions: views that autograd records cost the host
        as much as a launch does.
    """
    functions = (forward, backward, rows, batches)

    def attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Any) -> tuple[Tensor, Tensor | None]:
        if prepared is not None:
            problem, operands = prepared(problem, operands, q.device)
        if problem.grad:
            operands = operands.recordable()
            more = operands.differentiable
            return _Attention.apply(problem, operands, functions, q, k, v, *more)  # pyright: ignore[reportReturnType]
        if q.ndim == 3 and not rows:
            return as_rows(*forward(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), problem, operands))
        return forward(q, k, v, problem, operands)

    def alone(*arguments: Any) -> tuple[Tensor | None, ...]:
        *tensors, problem, operands = arguments
        return backward(*tensors, *prepared(problem, operands, tensors[0].device))  # pyright: ignore[reportOptionalCall]

    attention.backward = backward if prepared is None else alone  # pyright: ignore[reportFunctionMemberAccess]

    def with_backward(change: Callable[[Backward], Backward]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return differentiable(forward, change(backward), prepared, rows, batches)

    attention.with_backward = with_backward  # pyright: ignore[reportFunctionMemberAccess]
    attention.rows = True  # pyright: ignore[reportFunctionMemberAccess]
    return attention


def joined(forward: Forward, backward: Backward) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """One version's forward pass, an implementation that `Spec.impl` names, with the fallback backward of another.

    As `differentiable`; the forward pass is called with `problem.forward`, which asks for no gradients and for an LSE.
    """
    return differentiable(lambda q, k, v, problem, operands: forward(q, k, v, problem.forward, operands), backward)


def unquantized(forward: Forward, anew: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A quantised forward pass with the two passes of another implementation, on the saved inputs as they are,
    for a backward pass.

    FP8's own O and LSE would save that forward pass, but P is recomputed as exp(score - LSE): where scores are large,
    FP8's LSE is off by more than its rounding, and a gradient by the exponential of that.

    Args:
        anew: made by `differentiable`.
    """

    def backward(*arguments: Any) -> tuple[Tensor | None, ...]:
        dout, dlse, q, k, v, _, _, problem, operands = arguments
        problem = replace(problem, precision=None, fast_accum=False)
        out, lse = anew(q, k, v, problem.forward, operands)
        return anew.backward(dout, dlse, q, k, v, out, lse, problem, operands)

    return differentiable(forward, backward)
