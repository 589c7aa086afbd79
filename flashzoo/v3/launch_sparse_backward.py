"""The backward pass of block-sparse FlashAttention-3 on the host."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from flashzoo._cute.driver import Function
from flashzoo.spec import Problem
from flashzoo.v3 import launch_backward
from flashzoo.v3.config import KernelBackwardSparse, kernel_backward_for
from flashzoo.v3.launch import Ints, all_readable, load, made_readable
from flashzoo.v3.launch_backward import BackwardLaunch, example
from flashzoo.v3.launch_sparse import fake_lists, parameters_of

# After launch_backward's, before the scales: as in `launch_sparse`.
PARAMETERS = (*launch_backward.PARAMETERS[:-2], *["i"] * 4, *["Q"] * 6, "f", "f")


def backward_sparse(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    softmax_scale: float,
    block_mask: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_backward.backward` with a `flashzoo.BlockMask`, which causal and window are in."""
    misaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15
    strides = q.stride(), k.stride(), v.stride(), dout.stride()
    run = None if misaligned else backward_launch(problem, *strides, out.stride(), dlse is not None, q.get_device())
    if run is None:
        q, k, v, dout = (made_readable(x) for x in (q, k, v, dout))
        return backward_sparse(dout, dlse, q, k, v, out, lse, problem, softmax_scale, block_mask)
    return run(dout, dlse, q, k, v, out, lse, softmax_scale, parameters_of(block_mask, block_mask.columns))


@lru_cache(maxsize=1024)
def backward_launch(
    problem: Problem, q_strides: Ints, k_strides: Ints, v_strides: Ints, dout_strides: Ints, out_strides: Ints, dlse: bool, device: int
) -> BackwardLaunchSparse | None:
    """The launches for a problem, or None where TMA can't read tensors of these strides."""
    strides = (q_strides, k_strides, v_strides, dout_strides)
    if not all_readable(problem, *strides):
        return None
    return BackwardLaunchSparse(problem, kernel_backward_for(problem), *strides, out_strides, dlse, device)


class BackwardLaunchSparse(BackwardLaunch):
    """`BackwardLaunch` of a block-sparse kernel."""

    def load(self, kernel: KernelBackwardSparse) -> Function:
        """The kernel, ready to be launched."""
        return function_for(kernel)


@cache
def function_for(kernel: KernelBackwardSparse) -> Function:
    """The kernel, loaded."""
    return load(kernel, program, PARAMETERS)


def program(kernel: KernelBackwardSparse) -> tuple[Any, tuple[Any, ...]]:
    """As `launch.program`."""
    from cutlass import Float32

    from flashzoo.v3.sparse_backward import BackwardByGradientSparse, BackwardSparse, ScheduleBackwardSparse

    arguments = example(kernel, ScheduleBackwardSparse, fake_lists())
    return (BackwardByGradientSparse if kernel.tiles.by_gradient else BackwardSparse)(kernel), (*arguments, Float32(1.0), Float32(1.0))
