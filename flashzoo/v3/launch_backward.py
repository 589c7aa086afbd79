"""FlashAttention-3's backward pass on the host: gradients, delta, launches."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashzoo._cute.driver import Function, TensorMap, current_stream
from flashzoo.spec import Problem
from flashzoo.v3.config import BYTES, KernelBackward, band_of, kernel_backward_for
from flashzoo.v3.launch import (
    LOG2E,
    SMALLEST_SCALE,
    TORCH_DTYPES,
    Ints,
    all_readable,
    counter,
    dense,
    fake_pointer,
    fake_tensor,
    in_bytes,
    load,
    made_readable,
    map_of_keys,
    section_of,
    tensor_map,
)

if TYPE_CHECKING:
    from flashzoo._triton import Launch

# The kernel's parameters: TMA descriptors of q, k, v, dout, dk and dv; lse, delta, dq, turns; Schedule's fields; the scales.
PARAMETERS = (*["128s"] * 6, *["Q"] * 4, *["i"] * 10, "Q", "f", "f")


# Heads whose tiles are interleaved in deterministic mode: the blocks of keys of one head add to dQ one after the other, and would
# wait for one another if they ran at the same time. By whether tiles are cut by gradient (there a head leaves L2 sooner), and
# whether some are longer.
DETERMINISTIC_SECTION = {(False, False): 32, (False, True): 64, (True, False): 8, (True, True): 32}


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    softmax_scale: float,
    block_mask: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` of CUDA tensors: delta, the kernel, dQ rounded."""
    if block_mask is not None:
        from flashzoo.v3.launch_sparse_backward import backward_sparse

        return backward_sparse(dout, dlse, q, k, v, out, lse, problem, softmax_scale, block_mask)
    misaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15
    strides = q.stride(), k.stride(), v.stride(), dout.stride()
    launch = None if misaligned else backward_launch(problem, *strides, out.stride(), dlse is not None, q.get_device())
    if launch is None:
        q, k, v, dout = (made_readable(x) for x in (q, k, v, dout))
        return backward(dout, dlse, q, k, v, out, lse, problem, softmax_scale)
    return launch(dout, dlse, q, k, v, out, lse, softmax_scale)


@lru_cache(maxsize=1024)
def backward_launch(
    problem: Problem, q_strides: Ints, k_strides: Ints, v_strides: Ints, dout_strides: Ints, out_strides: Ints, dlse: bool, device: int
) -> BackwardLaunch | None:
    """The launches for a problem, or None where TMA can't read tensors of these strides."""
    strides = (q_strides, k_strides, v_strides, dout_strides)
    if not all_readable(problem, *strides):
        return None
    return BackwardLaunch(problem, kernel_backward_for(problem), *strides, out_strides, dlse, device)


class BackwardLaunch:
    """The backward kernel, and those before and after it, with everything about a call that its data don't decide.

    Args:
        problem: the sizes.
        kernel: what runs; any that fits the problem.
        q_strides, k_strides, v_strides, dout_strides: such that `readable`.
        out_strides: any.
        dlse: whether LSE has a gradient.
        device: index of the GPU.
    """

    def __init__(
        self,
        problem: Problem,
        kernel: KernelBackward,
        q_strides: Ints,
        k_strides: Ints,
        v_strides: Ints,
        dout_strides: Ints,
        out_strides: Ints,
        dlse: bool,
        device: int,
    ) -> None:
        p, tiles = problem, kernel.tiles
        self._device = device
        of_q, of_out = (p.batch, p.seqlen_q, p.heads, p.head_dim), (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
        of_k, of_v = ((p.batch, p.seqlen_k, p.heads_kv, head_dim) for head_dim in (p.head_dim, p.head_dim_v))
        self._gradients = [(shape, dense(shape, strides)) for shape, strides in ((of_q, q_strides), (of_k, k_strides), (of_v, v_strides))]
        self._dtype = TORCH_DTYPES[kernel.dtype]
        (_, dq_strides), (_, dk_strides), (_, dv_strides) = self._gradients
        blocks_q, blocks = kernel.blocks_q(p.seqlen_q), kernel.blocks_kv(p.seqlen_k)
        self._statistics_shape = (2, p.batch * p.heads, blocks_q * tiles.block_q)
        self._sum_shape = (p.batch * p.heads * blocks_q * tiles.block_q * kernel.width,)
        self._turns_shape = (p.batch * p.heads * blocks_q * kernel.turns if kernel.deterministic else 0,)

        def by_query(shape: Ints, width: int, strides: Ints) -> TensorMap:
            batch, row, head = in_bytes(p.dtype, strides, shape[:3])
            return tensor_map(p.dtype, (shape[3], p.seqlen_q, p.heads, p.batch), (row, head, batch), width, (tiles.block_q, 1, 1))

        self._q, self._dout = by_query(of_q, kernel.width, q_strides), by_query(of_out, kernel.width_v, dout_strides)
        self._k, self._dk = (map_of_keys(p, p.dtype, p.head_dim, kernel.width, tiles.block_kv, x) for x in (k_strides, dk_strides))
        self._v, self._dv = (map_of_keys(p, p.dtype, p.head_dim_v, kernel.width_v, tiles.block_kv, x) for x in (v_strides, dv_strides))

        batch_heads = p.batch * p.heads_kv
        self._blocks = min(torch.cuda.get_device_properties(device).multi_processor_count, blocks * batch_heads)
        bytes_of_head = p.heads // p.heads_kv * p.seqlen_q * (BYTES[p.dtype] * (p.head_dim + p.head_dim_v) + 4 * p.head_dim)
        uneven = kernel.right and not kernel.left
        section = section_of(bytes_of_head) if uneven else 1
        if kernel.deterministic:
            section = DETERMINISTIC_SECTION[tiles.by_gradient, uneven]
        section = min(batch_heads, section)
        self._sizes = (p.seqlen_q, p.seqlen_k, p.heads_kv, p.heads // p.heads_kv, 0, *p.reach_of(band_of(p)), blocks, batch_heads, section)
        self._function = self.load(kernel).on(device)
        self._delta = delta_launch(p, kernel, out_strides, dout_strides, dlse)
        self._round = round_launch(p, kernel, dq_strides)

    def load(self, kernel: KernelBackward) -> Function:
        """The kernel, ready to be launched."""
        return function_for(kernel)

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
        of_mask: Ints = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)`, launched on the current stream of the tensors' device; `of_mask` are the parameters of a block mask."""
        if self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(dout, dlse, q, k, v, out, lse, softmax_scale, of_mask)
        dq, dk, dv = (torch.empty_strided(shape, strides, dtype=self._dtype, device=q.device) for shape, strides in self._gradients)
        delta, lse_log2 = torch.empty(self._statistics_shape, dtype=torch.float32, device=q.device)
        dq_sum = torch.empty(self._sum_shape, dtype=torch.float32, device=q.device)
        turns = torch.empty(self._turns_shape, dtype=torch.int32, device=q.device)
        self._delta((out, dout, lse, lse if dlse is None else dlse.contiguous(), delta, lse_log2, dq_sum, turns), ())
        stream = current_stream(self._device)
        self._function(
            *(self._device, self._blocks, stream),
            self._q.at(q.data_ptr()),
            self._k.at(k.data_ptr()),
            self._v.at(v.data_ptr()),
            self._dout.at(dout.data_ptr()),
            self._dk.at(dk.data_ptr()),
            self._dv.at(dv.data_ptr()),
            *(lse_log2.data_ptr(), delta.data_ptr(), dq_sum.data_ptr(), turns.data_ptr()),
            *self._sizes,
            counter(self._device, stream).data_ptr(),
            *of_mask,
            max(softmax_scale * LOG2E, SMALLEST_SCALE),
            softmax_scale,
        )
        self._round((dq_sum, dq), (softmax_scale,))
        return dq, dk, dv


def delta_launch(problem: Problem, kernel: KernelBackward, out_strides: Ints, dout_strides: Ints, dlse: bool) -> Launch:
    """The launch of `delta_kernel`."""
    from flashzoo._triton import Launch  # here, so that a process that only asks what would run loads no Triton
    from flashzoo.v3.delta import delta_kernel

    p, block_q = problem, kernel.tiles.block_q
    blocks = kernel.blocks_q(p.seqlen_q)
    sizes = {"HEAD_DIM_V": p.head_dim_v, "BLOCK_DV": _power(p.head_dim_v), "SUMS": block_q * kernel.width}
    return Launch(
        delta_kernel,
        blocks * p.batch * p.heads,
        (*out_strides[:3], *dout_strides[:3], p.seqlen_q, blocks, p.heads),
        {**sizes, "BLOCK_Q": block_q, "ROWS": _power(block_q), "DLSE": dlse, "TURNS": kernel.turns if kernel.deterministic else 0},
        num_warps=4,
        num_stages=1,
    )


def round_launch(problem: Problem, kernel: KernelBackward, dq_strides: Ints) -> Launch:
    """The launch of `round_kernel`."""
    from flashzoo._triton import Launch
    from flashzoo.v3.delta import round_kernel

    p, block_q = problem, kernel.tiles.block_q
    blocks = kernel.blocks_q(p.seqlen_q)
    return Launch(
        round_kernel,
        blocks * kernel.tiles.consumers * p.batch * p.heads,
        (*dq_strides[:3], p.seqlen_q, blocks, p.heads),
        {"HEAD_DIM": p.head_dim, "BLOCK_Q": block_q, "PARTS": kernel.tiles.consumers, "BY_ROWS": kernel.dq_by_rows, "N": kernel.dq_part[1]},
        num_warps=4,
        num_stages=1,
    )


def _power(size: int) -> int:
    """The power of two that holds it, of 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def function_for(kernel: KernelBackward) -> Function:
    """The kernel, loaded."""
    return load(kernel, program, PARAMETERS)


def program(kernel: KernelBackward) -> tuple[Any, tuple[Any, ...]]:
    """As `launch.program`."""
    from cutlass import Float32

    from flashzoo.v3.backward import Backward
    from flashzoo.v3.backward_by_gradient import BackwardByGradient
    from flashzoo.v3.schedule import ScheduleBackward

    return (BackwardByGradient if kernel.tiles.by_gradient else Backward)(kernel), (
        *example(kernel, ScheduleBackward),
        Float32(1.0),
        Float32(1.0),
    )


def example(kernel: KernelBackward, schedule: Any, more: tuple[Any, ...] = ()) -> list[Any]:
    """Arguments of `Backward.__call__` but the scales; the schedule's class, and the fields that it has more."""
    from cutlass import Float32, Int32

    tensors = [
        fake_tensor(dtype, (width, None, None, None))
        for dtype, width in (
            *[(kernel.dtype, width) for width in (kernel.width, kernel.width, kernel.width_v, kernel.width_v)],
            *[(kernel.dtype, width) for width in (kernel.width, kernel.width_v)],
        )
    ]
    pointers = [*[fake_pointer(Float32) for _ in range(3)], fake_pointer(Int32)]
    return [*tensors, *pointers, schedule(kernel, *[Int32(1)] * 10, fake_pointer(Int32), *more)]
