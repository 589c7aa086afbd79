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

# After launch's, before the scale: sizes of the mask as `_sizes` gives them, addresses of its tensors.
PARAMETERS = (*launch.PARAMETERS[:-1], *["i"] * 4, *["Q"] * 6, "f")


def forward_sparse(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, block_mask: Any) -> tuple[Tensor, Tensor]:
    """`launch.forward` with a `flashzoo.BlockMask`, which causal and window are in."""
    misaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    sizes = _sizes(block_mask)
    run = None if misaligned else forward_launch(problem, q.stride(), k.stride(), v.stride(), sizes, q.get_device())
    if run is None:
        return forward_sparse(*made_readable(q, k, v), problem, softmax_scale, block_mask)
    return run(q, k, v, softmax_scale, block_mask)


def _sizes(mask: Any) -> Ints:
    """Strides over batch and heads in heads, 0 where shared, width of the lists, and for how many blocks a head has bits."""
    bits = mask.element.bits
    return mask.heads if mask.batch > 1 else 0, int(mask.heads > 1), mask.rows.width, 0 if bits is None else bits.shape[2]


@lru_cache(maxsize=1024)
def forward_launch(
    problem: Problem, q_strides: Ints, k_strides: Ints, v_strides: Ints, sizes: Ints, device: int
) -> ForwardLaunchSparse | None:
    """The launch for a problem, or None where TMA can't read tensors of these strides."""
    if not all_readable(problem, q_strides, k_strides, v_strides):
        return None
    return ForwardLaunchSparse(problem, kernel_sparse_for(problem), q_strides, k_strides, v_strides, sizes, device)


class ForwardLaunchSparse(ForwardLaunch):
    """`ForwardLaunch` of a block-sparse kernel.

    Args:
        problem: the sizes.
        kernel: what runs.
        q_strides, k_strides, v_strides: such that `readable`.
        sizes: of the mask, as `_sizes` gives them.
        device: index of the GPU.
    """

    def __init__(
        self, problem: Problem, kernel: KernelSparse, q_strides: Ints, k_strides: Ints, v_strides: Ints, sizes: Ints, device: int
    ) -> None:
        super().__init__(problem, kernel, q_strides, k_strides, v_strides, device)
        self._mask_sizes = sizes

    def load(self, kernel: KernelSparse) -> Function:
        """The kernel, ready to be launched."""
        return function_for(kernel)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, block_mask: Any) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`(out, lse)`, launched on the current stream of the tensors' device."""
        lists, bits = block_mask.rows, block_mask.element.bits
        counts = lists.counts.data_ptr()
        # Where lists have no room for anything they have no address either, and their first entry is read all the same.
        indices = lists.indices.data_ptr() or counts
        of_bits = (0, 0)
        if bits is not None:
            if bits.data_ptr() & 15:  # a row of a block is read at once
                bits = bits.clone()
            of_bits = (lists.bit_index.data_ptr() or counts, bits.data_ptr())
        addresses = (lists.order.data_ptr(), counts, lists.full.data_ptr(), indices, *of_bits)
        return self.launch(q, k, v, *self._mask_sizes, *addresses, max(softmax_scale * LOG2E, SMALLEST_SCALE))


@cache
def function_for(kernel: KernelSparse) -> Function:
    """The kernel, loaded."""
    return load(kernel, program, PARAMETERS)


def program(kernel: KernelSparse) -> tuple[Any, tuple[Any, ...]]:
    """As `launch.program`."""
    from cutlass import Float32, Int32, Uint32

    from flashzoo.v3.sparse import ForwardSparse, ScheduleSparse

    lists = (*[Int32(1)] * 4, *[fake_pointer(Int32)] * 5, fake_pointer(Uint32, align=16))
    q, k, v, *others = example(kernel, ScheduleSparse, lists)
    return ForwardSparse(kernel), (q, k, v, *others, Float32(1.0))
