"""FlashAttention-3 on the host: outputs, TMA descriptors, compiled kernels, launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashzoo._cute.cache import cached
from flashzoo._cute.compile import compile_for
from flashzoo._cute.driver import Function, TensorMap, current_stream
from flashzoo.autograd import differentiable
from flashzoo.spec import Problem
from flashzoo.v3.config import BYTES, WARPGROUP_ROWS, Kernel, KernelBackward, band_of, kernel_for, pack_for

ARCH = "sm_90a"
LOG2E = math.log2(math.e)

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

# The kernel's parameters: TMA descriptors of q, k, v and out; lse; Schedule's fields; the scale.
PARAMETERS = (*["128s"] * 4, "Q", *["i"] * 10, "Q", "f")

# A scale of 0 makes all scores equal. So does this one, and -inf times it stays -inf.
SMALLEST_SCALE = 1e-30

# Under a causal mask, how many heads' tiles are interleaved, longest first: as many as have K and V of so many bytes, which
# L2 keeps from one tile of a head to the next. Fewer than the least and one head's tiles read far apart, the most is enough.
SECTION_BYTES = 32 << 20
SECTION_HEADS = (16, 64)

Ints = tuple[int, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, block_mask: Any = None) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of raw CUDA tensors; see `flashzoo.attention`."""
    if block_mask is not None:
        from flashzoo.v3.launch_sparse import forward_sparse

        return forward_sparse(q, k, v, problem, softmax_scale, block_mask)
    misaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    launch = None if misaligned else forward_launch(problem, q.stride(), k.stride(), v.stride(), q.get_device())
    if launch is None:
        return forward(made_readable(q), made_readable(k), made_readable(v), problem, softmax_scale)
    return launch(q, k, v, softmax_scale)


def backward(*arguments: Any, block_mask: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_backward.backward`, imported where it is first needed."""
    from flashzoo.v3.launch_backward import backward

    return backward(*arguments, block_mask=block_mask)


attention = differentiable(forward, backward)


def readable(shape: Ints, strides: Ints, address: int = 0, size: int = 2) -> bool:
    """Whether TMA can read a tensor where it lies: rows without gaps, start and strides in steps of 16 bytes, nothing broadcast.

    `size` is an element's, in bytes.
    """
    steps = [size * stride for stride, length in zip(strides[:-1], shape[:-1], strict=True) if length > 1]
    return strides[-1] == 1 and not address & 15 and all(step > 0 and step % 16 == 0 for step in steps)


def made_readable(x: Tensor) -> Tensor:
    """The tensor, or a copy if TMA can't read it where it lies."""
    return x if readable(x.shape, x.stride(), x.data_ptr()) else x.clone(memory_format=torch.contiguous_format)


def all_readable(problem: Problem, *strides: Ints) -> bool:
    """Whether TMA can read q, k and v, and dout if that is given, of these strides, wherever they start."""
    p = problem
    of_keys = [(p.batch, p.seqlen_k, p.heads_kv, head_dim) for head_dim in (p.head_dim, p.head_dim_v)]
    shapes = ((p.batch, p.seqlen_q, p.heads, p.head_dim), *of_keys, (p.batch, p.seqlen_q, p.heads, p.head_dim_v))
    return all(readable(*pair) for pair in zip(shapes, strides, strict=False))


@lru_cache(maxsize=1024)
def forward_launch(problem: Problem, q_strides: Ints, k_strides: Ints, v_strides: Ints, device: int) -> ForwardLaunch | None:
    """The launch for a problem, or None where TMA can't read tensors of these strides."""
    if not all_readable(problem, q_strides, k_strides, v_strides):
        return None
    return ForwardLaunch(problem, kernel_for(problem), q_strides, k_strides, v_strides, device)


class ForwardLaunch:
    """A forward kernel with everything about a call that its data don't decide, so that a call costs little host time.

    Args:
        problem: the sizes.
        kernel: what runs; any that fits the problem, of which `kernel_for(problem)` is the fastest known.
        q_strides, k_strides, v_strides: such that `readable`.
        device: index of the GPU.
    """

    def __init__(self, problem: Problem, kernel: Kernel, q_strides: Ints, k_strides: Ints, v_strides: Ints, device: int) -> None:
        p, tiles = problem, kernel.tiles
        self._device = device
        self._out_shape = (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
        self._lse_shape = (p.batch, p.heads, p.seqlen_q)
        self._out_strides = dense(self._out_shape, q_strides)
        self._out_dtype = TORCH_DTYPES[kernel.out_dtype]

        pack = pack_for(p, tiles.block_q)
        heads, group = p.heads >> pack, p.heads // p.heads_kv >> pack

        def by_query(dtype: str, head_dim: int, width: int, strides: Ints) -> TensorMap:
            """Head dim, packed heads, queries, heads, batch: a box holds 64 rows, the packed heads of a query side by side."""
            batch, row, head = in_bytes(dtype, strides, (p.batch, p.seqlen_q, p.heads))
            sizes = (head_dim, 1 << pack, p.seqlen_q, heads, p.batch)
            box = (1 << pack, WARPGROUP_ROWS >> pack, 1, 1)
            return tensor_map(dtype, sizes, (head, row, head << pack, batch), width, box)

        self._q = by_query(kernel.dtype, p.head_dim, kernel.width, q_strides)
        self._k = map_of_keys(p, kernel.dtype, p.head_dim, kernel.width, tiles.block_kv, k_strides)
        self._v = self.map_of_v(p, kernel, v_strides)
        self._out = by_query(kernel.out_dtype, p.head_dim_v, kernel.width_o, self._out_strides)
        blocks_q, batch_heads = -(-(p.seqlen_q << pack) // tiles.block_q), p.batch * heads
        self._blocks = min(torch.cuda.get_device_properties(device).multi_processor_count, -(-blocks_q * batch_heads // tiles.teams))
        section = min(batch_heads, _section(p, kernel, group))
        self._sizes = (p.seqlen_q, p.seqlen_k, heads, group, pack, *p.reach_of(band_of(p)), blocks_q, batch_heads, section)
        self._function = self.load(kernel).on(device)

    def map_of_v(self, problem: Problem, kernel: Kernel, strides: Ints) -> TensorMap:
        """Of a block of v."""
        return map_of_keys(problem, kernel.dtype, problem.head_dim_v, kernel.width_v, kernel.tiles.block_kv, strides)

    def load(self, kernel: Kernel) -> Function:
        """The kernel, ready to be launched."""
        return function_for(kernel)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, launched on the current stream of the tensors' device."""
        return self.launch(q, k, v, max(softmax_scale * LOG2E, SMALLEST_SCALE))

    def launch(self, q: Tensor, k: Tensor, v: Tensor, *scaling: float) -> tuple[Tensor, Tensor]:
        """The same, `scaling` being the parameters from the scale on."""
        if self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self.launch(q, k, v, *scaling)
        out = torch.empty_strided(self._out_shape, self._out_strides, dtype=self._out_dtype, device=q.device)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=q.device)
        stream = current_stream(self._device)
        self._function(
            *(self._device, self._blocks, stream),
            self._q.at(q.data_ptr()),
            self._k.at(k.data_ptr()),
            self._v.at(v.data_ptr()),
            self._out.at(out.data_ptr()),
            lse.data_ptr(),
            *self._sizes,
            counter(self._device, stream).data_ptr(),
            *scaling,
        )
        return out, lse


def dense(shape: Ints, order: Ints) -> Ints:
    """Strides of a tensor without gaps, whose dimensions follow one another as those of other strides do."""
    strides, step = [0] * len(shape), 1
    for i in sorted(range(len(shape)), key=order.__getitem__):
        strides[i], step = step, step * shape[i]
    return tuple(strides)


def in_bytes(dtype: str, strides: Ints, sizes: Ints) -> list[int]:
    """In bytes. The stride of a dimension of size 1 means nothing to torch and may be anything, but TMA wants steps of 16."""
    return [BYTES[dtype] * stride if size > 1 else 16 for stride, size in zip(strides, sizes, strict=False)]


def tensor_map(dtype: str, sizes: Ints, strides: Ints, width: int, box: Ints) -> TensorMap:
    """For tiles of that width: rows on chip are 128 bytes, or 64 where only those divide it."""
    size = BYTES[dtype]
    row_bytes = 128 if size * width % 128 == 0 else 64
    return TensorMap(dtype, sizes, strides, (row_bytes // size, *box), row_bytes)


def map_of_keys(problem: Problem, dtype: str, head_dim: int, width: int, block_kv: int, strides: Ints) -> TensorMap:
    """Of k or v: head dim, keys, heads, batch; a box holds a block of keys."""
    p = problem
    batch, row, head = in_bytes(dtype, strides, (p.batch, p.seqlen_k, p.heads_kv))
    return tensor_map(dtype, (head_dim, p.seqlen_k, p.heads_kv, p.batch), (row, head, batch), width, (block_kv, 1, 1))


def _section(problem: Problem, kernel: Kernel, group: int) -> int:
    """How many heads' tiles are interleaved, longest first; one, where all tiles are as long."""
    if kernel.left or not kernel.right:
        return 1
    return section_of(2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v), group)


def section_of(bytes_of_head: int, group: int = 1) -> int:
    """How many heads' tiles are interleaved where `group` heads share so many bytes."""
    least, most = SECTION_HEADS
    return max(least, min(most, SECTION_BYTES // bytes_of_head * group))


class PerStream:
    """A number in memory, one for each stream of each device.

    Launches of one stream follow one another, so they share it. What is captured into a CUDA graph may be replayed beside
    anything, so it gets one of its own, written by the graph.

    Args:
        value, dtype: of the number.
    """

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        self._value, self._dtype = value, dtype
        self.kept: dict[tuple[int, int], Tensor] = {}

    def __call__(self, device: int, stream: int) -> Tensor:
        """The number for a launch on that stream; it must outlive the launch."""
        if torch.cuda.is_current_stream_capturing():
            return self._new(device)
        found = self.kept.get((device, stream))
        if found is None:  # of two threads that come here at once both take the one that is kept
            found = self.kept.setdefault((device, stream), self._new(device))
        return found

    def _new(self, device: int) -> Tensor:
        return torch.full((1,), self._value, dtype=self._dtype, device=f"cuda:{device}")


counter: PerStream = PerStream(0, torch.int32)
"""The zero that a launch counts its tiles in, and leaves as a zero."""


@cache
def function_for(kernel: Kernel) -> Function:
    """The kernel, loaded."""
    return load(kernel, program, PARAMETERS)


def load(kernel: Kernel | KernelBackward, program: Callable[[Any], tuple[Any, tuple[Any, ...]]], parameters: tuple[str, ...]) -> Function:
    """The kernel of a program: from the cache on disk, or compiled into it."""
    image = cached((ARCH, repr(kernel)), Path(__file__).parent, lambda: compile_for(ARCH, *program(kernel)))
    return Function(image, kernel.threads, kernel.shared_bytes, parameters)


def program(kernel: Kernel) -> tuple[Any, tuple[Any, ...]]:
    """The CuTe DSL program of a kernel, and arguments to compile it with: types and static sizes, no data."""
    from cutlass import Float32

    from flashzoo.v3.forward import Forward

    q, k, v, out, *others = example(kernel)
    return Forward(kernel), (q, k, v, out, *others, Float32(1.0))


def example(kernel: Kernel, schedule: Any = None, more: tuple[Any, ...] = ()) -> list[Any]:
    """Arguments of `Forward.__call__` but the last; the schedule's class where it is not `Schedule`, and the fields it has more."""
    from cutlass import Float32, Int32

    from flashzoo.v3.schedule import Schedule

    tensors = [
        fake_tensor(dtype, (width, *[None] * (rank - 1)))
        for dtype, width, rank in (
            (kernel.dtype, kernel.width, 5),
            (kernel.dtype, kernel.width, 4),
            (kernel.dtype, kernel.width_v, 4),
            (kernel.out_dtype, kernel.width_v, 5),
        )
    ]
    sizes = [Int32(1)] * 10
    return [*tensors, fake_pointer(Float32), (schedule or Schedule)(kernel, *sizes, fake_pointer(Int32), *more)]  # pyright: ignore[reportCallIssue]


def fake_tensor(dtype: str, sizes: tuple[int | None, ...]) -> Any:
    """What TMA can read: the first dimension contiguous, the strides of the others in steps of 16 bytes; None is a size not known."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    from flashzoo.v3.forward import DTYPES

    strides = (1, *[cute.sym_int64(divisibility=16 // BYTES[dtype]) for _ in sizes[1:]])
    return make_fake_tensor(DTYPES[dtype], tuple(cute.sym_int32() if size is None else size for size in sizes), strides, assumed_align=16)


def fake_pointer(dtype: Any, align: int = 4) -> Any:
    """To 32-bit numbers in memory, at a multiple of so many bytes."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_ptr

    return make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=align)
