"""Block-sparse FlashAttention-3 on the host: the mask's lists, launches."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from flashzoo._cute.driver import Function
from flashzoo.spec import Problem
from flashzoo.v3 import launch
from flashzoo.v3.config import KernelSparse, kernel_sparse_for
from flashzoo.v3.launch import (
    LOG2E,
    SMALLEST_SCALE,
    ForwardLaunch,
    Ints,
    all_readable,
    example,
    fake_pointer,
    load,
    made_readable,
)

# After launch's, before the scale: as `parameters_of` gives them.
PARAMETERS = (*launch.PARAMETERS[:-1], *["i"] * 4, *["Q"] * 6, "f")


def forward_sparse(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, block_mask: Any) -> tuple[Tensor, Tensor]:
    """`launch.forward` with a `flashzoo.BlockMask`, which causal and window are in."""
    misaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    run = None if misaligned else forward_launch(problem, q.stride(), k.stride(), v.stride(), q.get_device())
    if run is None:
        return forward_sparse(made_readable(q), made_readable(k), made_readable(v), problem, softmax_scale, block_mask)
    return run(q, k, v, softmax_scale, parameters_of(block_mask, block_mask.rows))


def parameters_of(mask: Any, lists: Any) -> Ints:
    """What a kernel takes of a `BlockMask` and its rows or columns: strides over batch and heads in heads, 0 where shared, width of the
    lists, for how many blocks a head has bits, and addresses. Bits start at a multiple of 16 bytes."""
    bits, counts = mask.element.bits, lists.counts.data_ptr()
    # Where lists have no room for anything they have no address either, and their first entry is read all the same.
    addresses = (lists.order.data_ptr(), counts, lists.full.data_ptr(), lists.indices.data_ptr() or counts)
    of_bits = (0, 0) if bits is None else (lists.bit_index.data_ptr() or counts, bits.data_ptr())
    strides = mask.heads if mask.batch > 1 else 0, int(mask.heads > 1)
    return (*strides, lists.width, 0 if bits is None else bits.shape[2], *addresses, *of_bits)


@lru_cache(maxsize=1024)
def forward_launch(problem: Problem, q_strides: Ints, k_strides: Ints, v_strides: Ints, device: int) -> ForwardLaunchSparse | None:
    """The launch for a problem, or None where TMA can't read tensors of these strides."""
    if not all_readable(problem, q_strides, k_strides, v_strides):
        return None
    return ForwardLaunchSparse(problem, kernel_sparse_for(problem), q_strides, k_strides, v_strides, device)


class ForwardLaunchSparse(ForwardLaunch):
    """`ForwardLaunch` of a block-sparse kernel."""

    def load(self, kernel: KernelSparse) -> Function:
        """The kernel, ready to be launched."""
        return function_for(kernel)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, of_mask: Ints = ()) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, launched on the current stream of the tensors' device; `of_mask` as `parameters_of` gives it."""
        return self.launch(q, k, v, *of_mask, max(softmax_scale * LOG2E, SMALLEST_SCALE))


@cache
def function_for(kernel: KernelSparse) -> Function:
    """The kernel, loaded."""
    return load(kernel, program, PARAMETERS)


def program(kernel: KernelSparse) -> tuple[Any, tuple[Any, ...]]:
    """As `launch.program`."""
    from cutlass import Float32

    from flashzoo.v3.sparse import ForwardSparse, ScheduleSparse

    return ForwardSparse(kernel), (*example(kernel, ScheduleSparse, fake_lists()), Float32(1.0))


def fake_lists() -> tuple[Any, ...]:
    """What a schedule has of a block mask, to compile with."""
    from cutlass import Int32, Uint32

    return (*[Int32(1)] * 4, *[fake_pointer(Int32)] * 5, fake_pointer(Uint32, align=16))
