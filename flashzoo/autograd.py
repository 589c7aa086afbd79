"""Turn a version's forward and backward functions into one differentiable call. Knows no formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashzoo.spec import Problem

Forward = Callable[[Tensor, Tensor, Tensor, Problem, float], tuple[Tensor, Tensor | None]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem, scale: float, functions: tuple[Forward, Backward]):
        out, lse = functions[0](q, k, v, problem, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem, ctx.scale, ctx.run_backward = problem, scale, functions[1]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        # Without this a second derivative would be wrong with no error: the backward pass is not itself recorded.
        if torch.is_grad_enabled():
            raise NotImplementedError("flashzoo has no double backward: call backward or grad with create_graph=False")
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = ctx.run_backward(dout, dlse, q, k, v, out, lse, ctx.problem, ctx.scale)
        return (*gradients, None, None, None)


def differentiable(forward: Forward, backward: Backward) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An implementation that `Spec.impl` can name, from a pair of functions on raw tensors.

    Args:
        forward: `(q, k, v, problem, softmax_scale) -> (out, lse)`; lse may be None where neither `problem.lse` nor
            `problem.grad`.
        backward: `(dout, dlse or None, q, k, v, out, lse, problem, softmax_scale) -> (dq, dk, dv)`.

    Returns:
        `(q, k, v, problem, softmax_scale) -> (out, lse)`, recorded by autograd only where `problem.grad`.
    """
    functions = (forward, backward)

    def attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float) -> tuple[Tensor, Tensor | None]:
        if problem.grad:
            return _Attention.apply(q, k, v, problem, softmax_scale, functions)  # pyright: ignore[reportReturnType]
        return forward(q, k, v, problem, softmax_scale)

    return attention
