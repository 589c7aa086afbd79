"""FlashAttention-3 in FP8 on the host: quantised inputs, scales, launches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from flashzoo._cute.driver import Function, TensorMap, current_stream
from flashzoo.autograd import differentiable
from flashzoo.spec import Problem
from flashzoo.v3 import launch
from flashzoo.v3.config import KernelFp8, kernel_fp8_for, prepares
from flashzoo.v3.launch import LOG2E, ForwardLaunch, Ints, PerStream, example, fake_pointer, fake_tensor, load, readable, tensor_map

Descales = tuple[Tensor | None, Tensor | None, Tensor | None]

# After launch's: the values and three strides of each tensor's scales; how many query heads share one of q's.
PARAMETERS = (*launch.PARAMETERS, *("Q", "i", "i", "i") * 3, "i")

NO_DESCALES: Descales = (None, None, None)


def attention(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, descales: Descales = NO_DESCALES
) -> tuple[Tensor, Tensor | None]:
    """`(out, lse)` of e4m3 CUDA tensors, or of 16-bit ones, which are quantised; see `flashzoo.attention`."""
    if problem.dtype == "e4m3":
        return forward_fp8(q, k, v, problem, softmax_scale, descales)
    return of_16_bits(q, k, v, problem, softmax_scale)


def forward_fp8(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, descales: Descales) -> tuple[Tensor, Tensor]:
    """Of e4m3 tensors."""
    shapes_and_strides = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or not _readable(*shapes_and_strides):
        q, k, v = (
            x if _readable(x.shape, x.stride()) and not x.data_ptr() & 15 else x.clone(memory_format=torch.contiguous_format)
            for x in (q, k, v)
        )
    transposed = prepares(problem)
    if transposed:
        from flashzoo.v3.quantize import transpose_v

        v = transpose_v(v)
    run = forward_launch(problem, q.stride(), k.stride(), v.stride(), _of_blocks(descales), transposed, q.get_device())
    return run(q, k, v, softmax_scale, descales)


def forward_16(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Of 16-bit tensors, quantised: K smoothed, Q and K rotated, a scale for each block, V transposed."""
    from flashzoo.v3.quantize import quantize_for

    x = quantize_for(q, k, v, problem, want_shift=problem.lse)
    run = forward_launch(problem, x.q.stride(), x.k.stride(), x.v.stride(), True, True, q.get_device())
    out, lse = run(x.q, x.k, x.v, softmax_scale, (x.q_descale, x.k_descale, x.v_descale))
    if x.lse_shift is not None:
        lse.add_(x.lse_shift, alpha=softmax_scale)  # what smoothing took from every score of a row
    return out, lse


def backward_16(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` of the saved inputs, by v3 in 16 bits: its forward pass, once more, and its backward pass.

    FP8's own O and LSE would save that forward pass, but P is recomputed as exp(score - LSE): where scores are large,
    FP8's LSE is off by more than its rounding, and a gradient by the exponential of that.
    """
    problem = replace(problem, precision=None)
    out, lse = launch.forward(q, k, v, problem, softmax_scale)
    return launch.backward(dout, dlse, q, k, v, out, lse, problem, softmax_scale)


of_16_bits = differentiable(forward_16, backward_16)
attention.backward = backward_16  # pyright: ignore[reportFunctionMemberAccess] - as `differentiable` has it


@lru_cache(maxsize=1024)
def _readable(*shapes_and_strides: Ints) -> bool:
    """Whether TMA can read e4m3 tensors where they lie."""
    pairs = zip(shapes_and_strides[::2], shapes_and_strides[1::2], strict=True)
    return all(readable(shape, strides, size=1) for shape, strides in pairs)


def _of_blocks(descales: Descales) -> bool:
    """Whether K or V has scales for blocks."""
    return any(descale is not None and descale.ndim == 3 for descale in descales[1:])


@lru_cache(maxsize=1024)
def forward_launch(
    problem: Problem, q_strides: Ints, k_strides: Ints, v_strides: Ints, block_scales: bool, transposed: bool, device: int
) -> ForwardLaunchFp8:
    """The launch for a problem."""
    return ForwardLaunchFp8(problem, kernel_fp8_for(problem, block_scales, transposed), q_strides, k_strides, v_strides, device)


class ForwardLaunchFp8(ForwardLaunch):
    """`ForwardLaunch` of an FP8 kernel.

    Args:
        problem: the sizes.
        kernel: what runs.
        q_strides, k_strides, v_strides: such that `readable`; of `quantize.transpose_v` of v where the kernel takes that.
        device: index of the GPU.
    """

    def __init__(self, problem: Problem, kernel: KernelFp8, q_strides: Ints, k_strides: Ints, v_strides: Ints, device: int) -> None:
        super().__init__(problem, kernel, q_strides, k_strides, v_strides, device)
        self._group = problem.heads // problem.heads_kv

    def map_of_v(self, problem: Problem, kernel: KernelFp8, strides: Ints) -> TensorMap:
        """Of a block of v; transposed: keys, head dim, heads, batch."""
        if not kernel.transposed:
            return super().map_of_v(problem, kernel, strides)
        batch, head, row, _ = strides
        sizes = (row, problem.head_dim, problem.heads_kv, problem.batch)  # a row is as long as there are keys, padded
        return tensor_map("e4m3", sizes, (row, head, batch), kernel.tiles.block_kv, (kernel.width_v, 1, 1))

    def load(self, kernel: KernelFp8) -> Function:
        """The kernel, ready to be launched."""
        return function_for(kernel)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, descales: Descales) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`(out, lse)`, launched on the current stream of the tensors' device.

        Args:
            q, k, v: e4m3, as the launch was made for.
            softmax_scale: positive or 0.
            descales: of q, k and v, as in `flashzoo.attention`.
        """
        q_descale = descales[0]
        group = self._group if q_descale is not None and q_descale.ndim == 2 else 1
        none = one(self._device, current_stream(self._device))
        scaling = [value for descale in descales for value in _described(none if descale is None else descale)]
        return self.launch(q, k, v, softmax_scale * LOG2E, *scaling, group)


def _described(descale: Tensor) -> tuple[int, int, int, int]:
    """Address and strides of scales: (batch, heads, blocks), (batch, heads), or one for all."""
    batch, head, block = (*descale.stride(), 0)[:3] if descale.ndim > 1 else (0, 0, 0)
    return descale.data_ptr(), batch, head, block


one: PerStream = PerStream(1.0, torch.float32)
"""The scale of tensors that have none."""


@cache
def function_for(kernel: KernelFp8) -> Function:
    """The kernel, loaded."""
    return load(kernel, program, PARAMETERS)


def program(kernel: KernelFp8) -> tuple[Any, tuple[Any, ...]]:
    """As `launch.program`."""
    from cutlass import Float32, Int32

    from flashzoo.v3.fp8 import Descale, ForwardFp8, Scaling

    q, k, v, *others = example(kernel)
    if kernel.transposed:
        v = fake_tensor(kernel.dtype, (None, kernel.width_v, None, None))
    descales = (Descale(fake_pointer(Float32), *[Int32(1)] * 3) for _ in range(3))
    return ForwardFp8(kernel), (q, k, v, *others, Scaling(Float32(1.0), *descales, Int32(1)))  # pyright: ignore[reportCallIssue]
