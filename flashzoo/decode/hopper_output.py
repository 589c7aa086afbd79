"""How out and LSE leave a thread block of FlashDecoding on Hopper: to their place, or as parts, which are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

from flashzoo._cute.hopper.dtypes import DTYPES
from flashzoo.decode.hopper_items import Item, Params, value_at
from flashzoo.decode.traits import Kernel
from flashzoo.gpu import WARPGROUP_ROWS

LN2, LOG2E = 0.6931471805599453, 1.4426950408889634
NOTHING_SEEN = -3e38
"""The maximum of a row that has seen no key: below what float32 scores can be, and finite,
so that -inf less it is -inf."""


@dataclass(frozen=True)
class PartsInMemory:
    """The parts of a tile, O / l and LSE in log2 units of each of their rows, one behind the other in memory.

    Attributes:
        rows: of a part.
        first: number of the first part's first row, of all that there are.
        part: which one is the thread block's own.
    """

    params: Params
    rows: Int32
    first: Int64
    part: Int32

    def o(self, row: Int32) -> cute.Pointer:
        """A row of O of the thread block's own part."""
        return self.params.parts + (self.first + self.part * self.rows + row) * self.params.head_dim

    def lse(self, row: Int32) -> cute.Pointer:
        """Its LSE."""
        return self.params.lse_parts + (self.first + self.part * self.rows + row)

    def read_o(self, part: Int32, row: Int32, column: Int32, to: cute.Tensor) -> None:
        """Four columns of a row of O of any part."""
        source = self.params.parts + (self.first + part * self.rows + row) * self.params.head_dim + column
        cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(4)), to)

    def read_lse(self, part: Int32, row: Int32) -> Float32:
        """The row's LSE."""
        return value_at(self.params.lse_parts, self.first + part * self.rows + row)


def in_memory(params: Params, item: Item) -> PartsInMemory:
    """The parts of an item's tile."""
    rows = params.heads_of_tile * params.queries_of_tile
    return PartsInMemory(params, rows, Int64(item.tile) * params.splits * rows, item.part)


@dataclass(frozen=True)
class PartsInCluster:
    """The same where a cluster has a tile: each thread block's part in its own shared memory, in place of K and V."""

    kernel: Constexpr[Kernel]
    smem: cute.Pointer

    @property
    def stride(self) -> int:
        """Of rows: those that a warp writes at once begin in banks of their own."""
        return self.kernel.width_v + 8

    def o(self, row: Int32) -> cute.Pointer:
        """A row of O of the thread block's own part."""
        return self.smem + row * self.stride

    def lse(self, row: Int32) -> cute.Pointer:
        """Its LSE."""
        return self.smem + WARPGROUP_ROWS * self.stride + row

    def read_o(self, part: Int32, row: Int32, column: Int32, to: cute.Tensor) -> None:
        """Four columns of a row of O of any part."""
        # CuTe DSL has pointers into other thread blocks' shared memory, and no loads from there.
        read = cute.arch.inline_ptx(
            "{ .reg .u32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; "
            "ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [there]; }",
            write_only_types=[Float32] * 4,
            read_only_args=[(self.o(row) + column).toint(), part],
        )
        for i in range(4):
            to[i] = read[i]

    def read_lse(self, part: Int32, row: Int32) -> Float32:
        """The row's LSE."""
        return cute.arch.inline_ptx(
            "{ .reg .u32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; ld.shared::cluster.f32 {$w0}, [there]; }",
            write_only_types=[Float32],
            read_only_args=[self.lse(row).toint(), part],
        )


Parts: TypeAlias = PartsInMemory | PartsInCluster


@cute.jit
def epilogue(
    params: Params, item: Item, o: cute.Tensor, row_max: cute.Tensor,
    row_sum: cute.Tensor, row: Int32, column: Int32,
    parts: Parts | None = None,
):  # fmt: skip
    """Write O / l and LSE of the tile's rows: to out, which a second kernel may have one of for each split, or as one
    of `parts`."""
    p, part = params, const_expr(parts is not None)
    rows = p.heads_of_tile * p.queries_of_tile
    for r in cutlass.range_constexpr(2):
        total, mine = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4), row + 8 * r
        if total == 0.0:  # 0 whatever V holds, inf and NaN too
            columns_of(o, p.kernel)[None, r, None].fill(0.0)
        top = row_max[r]
        alpha = Float32(1.0)
        if const_expr(params.kernel.sinks and not part):
            top, total, alpha = with_sink(p, item, mine, top, total)
        blind = total == 0.0
        by = Float32(0.0) if blind else alpha * cute.arch.rcp_approx(total)
        lse_log2 = -Float32.inf if blind else top + cute.math.log2(total, fastmath=True)
        if mine < rows:
            if const_expr(part):
                store_row(p, parts.o(mine), o, r, column, by, Float32)
                if column == 0:
                    set_at(parts.lse(mine), 0, lse_log2)
            else:
                query, head = place_of(p, item, mine)
                if query < p.seqlen_q and head < p.group:
                    to, dtype = offset(p, item, query, head), DTYPES[params.kernel.out_dtype]
                    if const_expr(not p.kernel.apart):  # noqa: SIM114 - one is known when compiled, the other when run
                        store_row(p, to, o, r, column, by, dtype)
                    elif total > 0.0:  # nobody reads what saw nothing
                        store_row(p, to, o, r, column, by, dtype)
                    if column == 0:
                        set_at(p.lse, of_lse(p, item, query, head), lse_log2 * LN2)


@cute.jit
def with_sink(params: Params, item: Item, row: Int32, top: Float32, total: Float32) -> tuple[Float32, Float32, Float32]:
    """The maximum and the sum of a row with its sink, one more key, seen by every row, whose value is 0;
    and what O is scaled by."""
    _, head = place_of(params, item, row)
    sink = value_at(params.sinks, item.head * params.group + cutlass.min(head, params.group - 1)) * LOG2E
    higher = cute.arch.fmax(top, sink)
    alpha = cute.math.exp2(top - higher, fastmath=True)
    return higher, total * alpha + cute.math.exp2(sink - higher, fastmath=True), alpha


@cute.jit
def merge(params: Params, item: Item):
    """out and LSE of a tile from its parts in memory. Warps take rows by turns,
    and as many at a time as keep `Kernel.at_once` loads in flight."""
    parts, warp, workers = in_memory(params, item), cute.arch.warp_idx(), Int32(params.kernel.warps)
    most = const_expr(params.kernel.at_once)
    if item.parts <= most // 8:
        merge_rows(params, item, parts, warp, workers, most // 8)
    elif item.parts <= most // 4:
        merge_rows(params, item, parts, warp, workers, most // 4)
    elif item.parts <= most // 2:
        merge_rows(params, item, parts, warp, workers, most // 2)
    else:
        merge_rows(params, item, parts, warp, workers, most)


@cute.jit
def merge_rows(params: Params, item: Item, parts: Parts, worker: Int32, workers: Int32, at_once: Constexpr[int]):
    """The same, of so many parts at a time, for one of the warps that share the rows."""
    rows, rows_at_once = params.heads_of_tile * params.queries_of_tile, params.kernel.at_once // at_once
    for i in cutlass.range((rows + workers * rows_at_once - 1) // (workers * rows_at_once), unroll=1):
        first_row = (workers * i + worker) * rows_at_once
        for begin in cutlass.range(0, params.kernel.width_v, 128, unroll=1):
            merge_columns(params, item, parts, rows, first_row, begin + 4 * cute.arch.lane_idx(), at_once)


@cute.jit
def merge_columns(
    params: Params, item: Item, parts: Parts, rows: Int32, first_row: Int32, column: Int32, at_once: Constexpr[int]
):
    """Four columns of some rows of out, and their LSE: the sum of exp(LSE_split - LSE) O_split,
    in the order of the splits."""
    p, there, most = params, column < params.head_dim, const_expr(params.kernel.at_once)
    rows_at_once = most // at_once
    tops, totals = cute.make_rmem_tensor(rows_at_once, Float32), cute.make_rmem_tensor(rows_at_once, Float32)
    o = cute.make_rmem_tensor((4, rows_at_once), Float32)
    tops.fill(NOTHING_SEEN)
    totals.fill(0.0)
    o.fill(0.0)
    for i in cutlass.range((item.parts + at_once - 1) // at_once, unroll=1):
        read, lses = cute.make_rmem_tensor((4, most), Float32), cute.make_rmem_tensor(most, Float32)
        read.fill(0.0)
        for j in cutlass.range_constexpr(most):  # all loads before the first is waited for
            part = i * at_once + j % at_once
            row = cutlass.min(first_row + j // at_once, rows - 1)
            of = cutlass.min(part, item.parts - 1)
            lse_log2 = parts.read_lse(of, row)
            lses[j] = lse_log2 if part < item.parts else -Float32.inf
            if there:
                parts.read_o(of, row, column, read[None, j])
        for r in cutlass.range_constexpr(rows_at_once):
            top = tops[r]
            for j in cutlass.range_constexpr(r * at_once, (r + 1) * at_once):
                top = cute.arch.fmax(top, lses[j])
            alpha = cute.math.exp2(tops[r] - top, fastmath=True)
            tops[r], total = top, totals[r] * alpha
            for c in cutlass.range_constexpr(4):
                o[c, r] = o[c, r] * alpha
            for j in cutlass.range_constexpr(r * at_once, (r + 1) * at_once):  # A1.3
                weight = cute.math.exp2(lses[j] - top, fastmath=True)
                total = total + weight
                for c in cutlass.range_constexpr(4):
                    o[c, r] = o[c, r] + weight * read[c, j]
            totals[r] = total
    for r in cutlass.range_constexpr(rows_at_once):
        query, head = place_of(p, item, first_row + r)
        top, total, alpha = tops[r], totals[r], Float32(1.0)
        if const_expr(params.kernel.sinks):
            top, total, alpha = with_sink(p, item, first_row + r, top, total)
        if first_row + r < rows and query < p.seqlen_q and head < p.group:
            blind = total == 0.0
            if there:
                by, rounded = (
                    Float32(0.0) if blind else alpha / total,
                    cute.make_rmem_tensor(4, DTYPES[params.kernel.out_dtype]),
                )
                for c in cutlass.range_constexpr(4):
                    rounded[c] = DTYPES[params.kernel.out_dtype](o[c, r] * by)
                to = (offset(p, item, query, head) + column).align(DTYPES[params.kernel.out_dtype].width // 2)
                cute.autovec_copy(rounded, cute.make_tensor(to, cute.make_layout(4)))
            if column == 0:
                lse_log2 = -Float32.inf if blind else top + cute.math.log2(total, fastmath=True)
                set_at(p.lse, of_lse(p, item, query, head), lse_log2 * LN2)


def set_at(values: cute.Pointer, i: Int32 | Int64, value: Float32) -> None:
    """Write a number to memory."""
    cute.make_tensor(values + i, cute.make_layout(1))[0] = value


def place_of(params: Params, item: Item, row: Int32) -> tuple[Int32, Int32]:
    """Query, and head within its group, of a row of a tile."""
    query = row // params.heads_of_tile
    return item.first_query + query, item.first_head + row - query * params.heads_of_tile


def offset(params: Params, item: Item, query: Int32, head: Int32) -> cute.Pointer:
    """Where a row of out begins."""
    p = params
    row = Int64(item.batch) * p.out_batch + Int64(query) * p.out_row + Int64(item.head * p.group + head) * p.out_head
    return p.out + (row + rows_before(p, item) * p.head_dim if p.kernel.apart else row)


def of_lse(params: Params, item: Item, query: Int32, head: Int32) -> Int64:
    """Place of a row in LSE."""
    p = params
    row = (Int64(item.batch) * p.heads * p.group + item.head * p.group + head) * p.seqlen_q + query
    return row + rows_before(p, item) if p.kernel.apart else row


def rows_before(params: Params, item: Item) -> Int64:
    """Rows of all splits before an item's, which a second kernel merges."""
    p = params
    return Int64(item.part) * p.batch_heads * p.heads * p.group * p.seqlen_q


def columns_of(o: cute.Tensor, kernel: Kernel) -> cute.Tensor:
    """A thread's part of O as (columns side by side, its two rows, such columns)."""
    n = kernel.neighbours
    return cute.make_tensor(o.iterator, cute.make_layout((n, 2, cute.size(o) // (2 * n))))


@cute.jit
def store_row(
    params: Params, to: cute.Pointer, o: cute.Tensor, r: Constexpr[int], column: Int32, by: Float32,
    dtype: Constexpr[type[cutlass.Numeric]],
):  # fmt: skip
    """A thread's part of a row of O, times `by`, rounded to `dtype`; `column` is the first that it has."""
    n, columns = const_expr(params.kernel.neighbours), columns_of(o, params.kernel)
    some = cute.make_rmem_tensor(n, dtype)
    for i in cutlass.range_constexpr(cute.size(o) // (2 * n)):
        for c in cutlass.range_constexpr(n):
            some[c] = dtype(columns[c, r, i] * by)
        if 4 * n * i + column < params.head_dim:
            there = (to + 4 * n * i + column).align(n * dtype.width // 8)
            cute.autovec_copy(some, cute.make_tensor(there, cute.make_layout(n)))


@cute.jit
def arrive(arrived: cute.Pointer, parts: Int32) -> Int32:
    """How many of a tile's parts had ended before: what each wrote is seen by who comes last."""
    cute.arch.fence_acq_rel_gpu()
    before = cute.arch.inline_ptx(
        "atom.global.inc.u32 {$w0}, [{$r0}], {$r1};",  # which wraps to 0 with the last: ready for the next launch
        write_only_types=[Int32],
        read_only_args=[arrived, parts - 1],
    )
    cute.arch.fence_acq_rel_gpu()
    return before
