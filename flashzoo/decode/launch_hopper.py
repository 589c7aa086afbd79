"""The Hopper kernel of FlashDecoding on the host: outputs, parts, TMA descriptors, one launch or two."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flashzoo._cute.driver import current_stream
from flashzoo._cute.per_stream import PerStream, tile_counter
from flashzoo._cute.scale import in_log2
from flashzoo._cute.tma import Ints, dense, map_of_rows, readable
from flashzoo._triton.descales import strided
from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem
from flashzoo.decode.config import cut_hopper, kernel_for
from flashzoo.decode.launch_merge import merge_launch
from flashzoo.decode.programs import DESCALE, SIZES, arguments_of, function_for
from flashzoo.decode.traits import KernelE4m3
from flashzoo.dtypes import BYTES, TORCH_DTYPES

one: PerStream = PerStream(1.0, torch.float32)
"""The descale of e4m3 keys and values that have none."""


def attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor] | None:
    """`(out, lse)` of CUDA tensors; None where TMA can't read them where they lie."""
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        return None
    table = operands.page_table
    pages = (0, 0) if table is None else (table.stride(0), k.shape[0])
    made = launch(problem, q.stride(), k.stride(), v.stride(), pages, q.get_device())
    return made and made(q, k, v, operands)


@lru_cache(maxsize=1024)
def launch(problem: Problem, q: Ints, k: Ints, v: Ints, pages: Ints, device: int) -> Launch | None:
    """The launch for a problem, or None where TMA can't read tensors of these strides.

    Args:
        problem: the sizes.
        q, k, v: strides.
        pages: stride of the page table, and how many pages there are.
        device: index of the GPU.
    """
    p = problem
    of_q = (p.batch, p.seqlen_q, p.heads, p.head_dim)
    of_k = (
        (p.batch, p.seqlen_k, p.heads_kv, p.head_dim)
        if p.page_size is None
        else (pages[1], p.page_size, p.heads_kv, p.head_dim)
    )
    size = BYTES[p.dtype_kv or p.dtype]
    if not (readable(of_q, q) and readable(of_k, k, size=size) and readable(of_k, v, size=size)):
        return None
    return Launch(problem, of_q, of_k, (q, k, v), pages[0], device)


class Launch:
    """The kernel with everything about a call that its data don't decide.

    Args:
        problem: the sizes.
        of_q, of_k: shapes of q, and of k and v.
        strides: of q, k and v.
        table_stride: of the page table.
        device: index of the GPU.
    """

    def __init__(
        self, problem: Problem, of_q: Ints, of_k: Ints, strides: tuple[Ints, Ints, Ints], table_stride: int, device: int
    ) -> None:
        p, kernel, how = problem, kernel_for(problem), cut_hopper(problem)
        self._device, of_out = device, (*of_q[:3], p.head_dim_v)
        self._out_dtype, self._out_shape, self._out_strides = (
            TORCH_DTYPES[p.out_dtype],
            of_out,
            dense(of_out, strides[0]),
        )
        self._lse_shape = (p.batch, p.heads, p.seqlen_q)
        self._scale_log2 = in_log2(p.scale)
        self._q = map_of_rows(p.dtype, of_q, strides[0], kernel.width, how.queries, how.heads)
        self._k, self._v = (map_of_rows(kernel.dtype_kv, of_k, x, kernel.width, kernel.box) for x in strides[1:])
        self._descaled = isinstance(kernel, KernelE4m3)
        tiles, blocks = p.batch * p.heads_kv * how.tiles, p.heads_kv * how.tiles * how.splits
        self._parts_shape = (tiles * how.splits * how.rows, p.head_dim_v + 1) if kernel.counted else (0, 1)
        self._of_lse = 4 * tiles * how.splits * how.rows * p.head_dim_v
        self._counters = 1 + tiles if kernel.counted else 1
        self._splits = how.splits
        to = self._out_strides[:3]
        self._merge = merge_launch(p, to, how.splits, programmatic=True) if kernel.apart else None
        written = dense(of_out, (3, 2, 1, 0)) if kernel.apart else self._out_strides
        sizes = (
            p.seqlen_q,
            p.seqlen_k,
            p.heads_kv,
            p.heads // p.heads_kv,
            how.heads,
            how.queries,
            blocks,
            p.batch,
            how.tiles,
        )
        more = (how.splits, how.least, p.page_size or 1, table_stride, p.head_dim_v, *written[:3], *p.reach)
        params = dict(zip(SIZES, (*sizes, *more), strict=True))
        workers = kernel.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
        given = (
            "q",
            "k",
            "v",
            "out",
            "lse",
            "parts",
            "lse_parts",
            "used_k",
            "page_table",
            "sinks",
            "arrived",
            "counter",
            "scale_log2",
        )
        if self._descaled:
            given += arguments_of(kernel).names[-2 * len(DESCALE) :]
        items, function = tiles * how.splits, function_for(kernel)
        if kernel.clustered:
            self._launch = function.bind(device, items, params, given, programmatic=True, cluster=how.splits)
        else:
            self._launch = function.bind(device, min(workers, items), params, given, programmatic=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
        """`(out, lse)`, launched on the current stream of the tensors' device."""
        if self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(q, k, v, operands)
        out = torch.empty_strided(self._out_shape, self._out_strides, dtype=self._out_dtype, device=q.device)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=q.device)
        if self._merge is not None:
            parts = torch.empty((self._splits, *self._out_shape), dtype=torch.float32, device=q.device)
            lse_parts = torch.empty((self._splits, *self._lse_shape), dtype=torch.float32, device=q.device)
            self._run(q, k, v, parts, lse_parts, operands)
            self._merge((parts, lse_parts, out, lse, operands.sinks), ())
        else:
            self._run(q, k, v, out, lse, operands)
        return out, lse

    def _run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, operands: Operands) -> None:
        """Launch the Hopper kernel; out and lse are those of all splits where a second kernel merges them."""
        parts = torch.empty(self._parts_shape, dtype=torch.float32, device=q.device)
        more = (operands.seqused_k, operands.page_table, operands.sinks)
        stream = current_stream(self._device)
        counters = tile_counter(self._device, stream, self._counters).data_ptr()
        descales = self._of_descales(stream, operands) if self._descaled else ()
        self._launch(
            stream,
            self._q.at(q.data_ptr()),
            self._k.at(k.data_ptr()),
            self._v.at(v.data_ptr()),
            out.data_ptr(),
            lse.data_ptr(),
            parts.data_ptr(),
            parts.data_ptr() + self._of_lse,
            *[0 if x is None else x.data_ptr() for x in more],
            counters + 4,
            counters,
            self._scale_log2,
            *descales,
        )

    def _of_descales(self, stream: int, operands: Operands) -> tuple[int, ...]:
        """Address and strides of K's descales, then of V's."""
        found = []
        for descale in (operands.k_descale, operands.v_descale):
            values, *strides = strided(descale) or (one(self._device, stream), 0, 0, 0)
            found += [values.data_ptr(), *strides]
        return tuple(found)
