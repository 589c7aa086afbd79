"""Turn a version's forward and backward functions into one differentiable call. Knows no formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashzoo.spec import Problem
from flashzoo.transforms import refuse_transforms, transforming

Forward = Callable[..., tuple[Tensor, Tensor | None]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem, scale: float, functions: tuple[Forward, Backward], mask: dict):
        out, lse = functions[0](q, k, v, problem, scale, **mask)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem, ctx.scale, ctx.run_backward, ctx.mask = problem, scale, functions[1], mask
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_double_backward()
        if transforming():
            refuse_transforms("flashzoo's backward pass", dout=dout, dlse=dlse)
        q, k, v, out, lse = ctx.saved_tensors
        # What a kernel reads is memory, where a number whose negative bit is set has the other sign.
        dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
        dlse = dlse if dlse is None else dlse.resolve_neg()
        gradients = ctx.run_backward(dout, dlse, q, k, v, out, lse, ctx.problem, ctx.scale, **ctx.mask)
        return (*gradients, None, None, None, None)


def refuse_double_backward() -> None:
    """To begin a backward pass with that is not itself recorded: a second derivative would be wrong with no error."""
    if torch.is_grad_enabled():
        raise NotImplementedError("flashzoo has no double backward: call backward or grad with create_graph=False")


def differentiable(forward: Forward, backward: Backward) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An implementation that `Spec.impl` can name, from a pair of functions on raw tensors.

    Args:
        forward: `(q, k, v, problem, softmax_scale) -> (out, lse)`; lse may be None where neither `problem.lse` nor
            `problem.grad`.
        backward: `(dout, dlse or None, q, k, v, out, lse, problem, softmax_scale) -> (dq, dk, dv)`.

    Returns:
        `(q, k, v, problem, softmax_scale, **mask) -> (out, lse)`, recorded by autograd only where `problem.grad`; mask, which is
        `block_mask` or nothing, is handed to both functions. Its attribute `backward` is the backward pass as given, for who
        records calls by other means.
    """
    functions = (forward, backward)

    def attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, **mask: Any) -> tuple[Tensor, Tensor | None]:
        if problem.grad:
            return _Attention.apply(q, k, v, problem, softmax_scale, functions, mask)  # pyright: ignore[reportReturnType]
        return forward(q, k, v, problem, softmax_scale, **mask)

    attention.backward = backward  # pyright: ignore[reportFunctionMemberAccess]
    return attention


def joined(forward: Forward, backward: Backward) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """One version's forward pass, an implementation that `Spec.impl` names, with a backward pass that another lends.

    As `differentiable`; the forward pass is called with `problem.forward`, which asks for no gradients and for an LSE.
    """

    def alone(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, **mask: Any) -> tuple[Tensor, Tensor | None]:
        return forward(q, k, v, problem.forward, softmax_scale, **mask)

    return differentiable(alone, backward)
