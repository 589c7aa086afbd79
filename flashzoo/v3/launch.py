"""FlashAttention-3 on the host: outputs, TMA descriptors, compiled kernels, launches."""

from __future__ import annotations

import math
import struct
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashzoo._cute.cache import cached
from flashzoo._cute.compile import compile_for
from flashzoo._cute.driver import Function, current_stream, tensor_map
from flashzoo.spec import Problem
from flashzoo.v3.config import WARPGROUP_ROWS, Kernel, kernel_for, pack_for

ARCH = "sm_90a"
LOG2E = math.log2(math.e)

# The kernel's parameters as they lie in memory: TMA descriptors of q, k, v and out; lse; Schedule's fields; the scale.
PARAMETERS = struct.Struct("<128s128s128s128sQ10iQf")
PARAMETER_BYTES = (*[128] * 4, 8, *[4] * 10, 8, 4)

# A scale of 0 makes all scores equal. So does this one, and -inf times it stays -inf.
SMALLEST_SCALE = 1e-30

# Under a causal mask tiles go section by section of heads whose K and V take so many bytes: L2 has 50 MB.
SECTION_BYTES = 32 << 20

Strides = tuple[int, ...]


def attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of CUDA tensors; see `flashzoo.attention`."""
    q, k, v = (x if readable(x) else x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q) if problem.head_dim == problem.head_dim_v else q.new_empty((*q.shape[:3], problem.head_dim_v))
    lse = q.new_empty((problem.batch, problem.heads, problem.seqlen_q), dtype=torch.float32)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    launch = forward_launch(problem, kernel_for(problem), strides, q.get_device())
    launch(q, k, v, out, lse, softmax_scale)
    return out, lse


def readable(x: Tensor) -> bool:
    """Whether TMA can read a tensor where it lies: starts and strides in steps of 16 bytes, nothing broadcast."""
    steps = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(step > 0 and step % 8 == 0 for step in steps)


@lru_cache(maxsize=1024)
def forward_launch(problem: Problem, kernel: Kernel, strides: Strides, device: int) -> ForwardLaunch:
    """The launch for a problem, compiled or taken from the cache on disk where this process has no such kernel yet."""
    return ForwardLaunch(problem, kernel, strides, device)


class ForwardLaunch:
    """A forward kernel with everything about a call that its data don't decide, so that a call costs little host time.

    Args:
        problem: the sizes.
        kernel: what runs; any that fits the problem, `kernel_for(problem)` being the fastest.
        strides: over batch, seqlen and heads of q, k, v and out.
        device: index of the GPU.
    """

    def __init__(self, problem: Problem, kernel: Kernel, strides: Strides, device: int) -> None:
        p, tiles = problem, kernel.tiles
        pack = pack_for(p, tiles.block_q)
        heads, group = p.heads >> pack, p.heads // p.heads_kv >> pack
        rows = ((p.seqlen_q, p.heads), (p.seqlen_k, p.heads_kv), (p.seqlen_k, p.heads_kv), (p.seqlen_q, p.heads))
        # Bytes; the stride of a dimension of size 1 means nothing to torch and may be anything, TMA wants steps of 16.
        steps = [
            tuple(2 * step if size > 1 else 16 for step, size in zip(strides[3 * i : 3 * i + 3], (p.batch, *rows[i]), strict=True))
            for i in range(4)
        ]

        def by_query(width: int, head_dim: int, batch: int, row: int, head: int) -> partial[bytes]:
            """Head dim, packed heads, queries, heads, batch: a box holds 64 rows, packed heads of one query side by side."""
            sizes = (head_dim, 1 << pack, p.seqlen_q, heads, p.batch)
            box = (1 << pack, WARPGROUP_ROWS >> pack, 1, 1)
            return partial(_tensor_map, p.dtype, sizes, (head, row, head << pack, batch), width, box)

        def by_key(width: int, head_dim: int, batch: int, row: int, head: int) -> partial[bytes]:
            sizes = (head_dim, p.seqlen_k, p.heads_kv, p.batch)
            return partial(_tensor_map, p.dtype, sizes, (row, head, batch), width, (tiles.block_kv, 1, 1))

        self._maps = (
            by_query(kernel.width, p.head_dim, *steps[0]),
            by_key(kernel.width, p.head_dim, *steps[1]),
            by_key(kernel.width_v, p.head_dim_v, *steps[2]),
            by_query(kernel.width_o, p.head_dim_v, *steps[3]),
        )
        blocks_q, batch_heads = -(-(p.seqlen_q << pack) // tiles.block_q), p.batch * heads
        self._blocks = min(torch.cuda.get_device_properties(device).multi_processor_count, blocks_q * batch_heads)
        self._sizes = (
            *(p.seqlen_q, p.seqlen_k, heads, group, pack),
            *window(p),
            *(blocks_q, batch_heads, min(batch_heads, section(p, kernel, group))),
        )
        self._function = function_for(kernel).on(device)
        self._device = device

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
        """Launch on the current stream of the tensors' device."""
        if self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(q, k, v, out, lse, softmax_scale)
        stream = current_stream(self._device)
        maps = [describe(x.data_ptr()) for describe, x in zip(self._maps, (q, k, v, out), strict=True)]
        scale = max(softmax_scale * LOG2E, SMALLEST_SCALE)
        arguments = PARAMETERS.pack(*maps, lse.data_ptr(), *self._sizes, counter(self._device, stream).data_ptr(), scale)
        self._function(self._blocks, stream, arguments)


@lru_cache(maxsize=4096)
def _tensor_map(dtype: str, sizes: Strides, strides: Strides, width: int, box: tuple[int, ...], address: int) -> bytes:
    """The TMA descriptor of a tensor for tiles of that width: rows on chip are 128 bytes, or 64 where only those divide it."""
    columns = 64 if width % 64 == 0 else 32
    return tensor_map(address, dtype, sizes, strides, (columns, *box), 2 * columns)


def window(problem: Problem) -> tuple[int, int]:
    """How many keys either side of the diagonal are seen. A bound past both sequences is none, and can't overflow 32 bits."""
    furthest = problem.seqlen_q + problem.seqlen_k
    left, right = (furthest if side is None else min(side, furthest) for side in problem.span)
    return left, right


def section(problem: Problem, kernel: Kernel, group: int) -> int:
    """How many heads' tiles are interleaved, longest first. One, where all tiles are as long."""
    if kernel.left or not kernel.right:
        return 1
    bytes_of_head = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return max(1, SECTION_BYTES // bytes_of_head) * group


_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: int, stream: int) -> Tensor:
    """The zero that a launch counts its tiles in, and leaves as a zero.

    Launches of one stream follow one another, so they share it. What is captured into a CUDA graph may be replayed beside
    anything, so it gets one of its own, set to zero by the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
    if (device, stream) not in _counters:
        _counters[device, stream] = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
    return _counters[device, stream]


@cache
def function_for(kernel: Kernel) -> Function:
    """The kernel, loaded: from the cache on disk, or compiled into it."""
    image = cached((ARCH, repr(kernel)), Path(__file__).parent, lambda: compile_for(ARCH, *program(kernel)))
    return Function(image, kernel.threads, kernel.shared_bytes, PARAMETER_BYTES)


def program(kernel: Kernel) -> tuple[Any, tuple[Any, ...]]:
    """The CuTe DSL program of a kernel, and arguments to compile it with: types and static sizes, no data."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_tensor, make_ptr

    from flashzoo.v3.forward import DTYPES, Forward
    from flashzoo.v3.schedule import Schedule

    def tensor(width: int, rank: int) -> Any:
        sizes = (width, *[cute.sym_int32() for _ in range(rank - 1)])
        strides = (1, *[cute.sym_int64(divisibility=8) for _ in range(rank - 1)])
        return make_fake_tensor(DTYPES[kernel.dtype], sizes, strides, assumed_align=16)

    lse, counter = (make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=4) for dtype in (Float32, Int32))
    tensors = (tensor(kernel.width, 5), tensor(kernel.width, 4), tensor(kernel.width_v, 4), tensor(kernel.width_v, 5))
    schedule = Schedule(*(kernel, *[Int32(1)] * 10, counter))
    return Forward(kernel), (*tensors, lse, schedule, Float32(1.0))
