"""FlashAttention-3's forward pass in FP8: what differs from `forward.py`, which has the algorithm.

1. Q, K and V are e4m3, and their products run at twice the rate (QGMMA). Each has scales, one a head or one a block of
   rows: those of Q and K go into the scale of a row's scores, those of V into the factor that rescales O.
2. FP8 operands must be contiguous along the dimension that is summed over, which for V is the keys. Either V comes
   transposed, or the three idle warps of the producer's warpgroup transpose its blocks on chip, between two pipelines.
3. The tensor core leaves a lane pairs of neighbouring scores, and wants P of four neighbouring keys. No P moves: within
   each 16 keys V's are put in the order in which P lies in the registers.
4. P is 2^8 at a row's maximum: e4m3 ends at 448 and thins out below 2^-6.
5. The tensor core keeps about 14 bits of an FP8 sum. Two-level accumulation: a block's product starts from zero and is
   added to O in float32 registers, by the same instruction that rescales O. O's columns come in parts, and one is added
   while the next is multiplied, the last under the next block's scores where registers allow.

With products this fast, registers are what is short, and the overlap inside a warpgroup (two blocks' worth of scores
and products alive) costs more than it brings: blocks are serial, with ping-pong between warpgroups. With one level, as
the paper's kernel has (`fast_accum`), a product has no registers beside O's, and blocks overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from flashzoo._cute.hopper.bounds import Bounds
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.pipeline import PipelineState
from flashzoo._cute.hopper.tile_scheduler import TileScheduler
from flashzoo._cute.hopper.wgmma import columns_of, gemm, rows_of, shared_layout
from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS, WARPS
from flashzoo.v3.forward import Consumer, Forward, SharedStorage
from flashzoo.v3.product import Product, ValuePath
from flashzoo.v3.softmax import NOTHING_SEEN, maximum
from flashzoo.v3.traits import ALIGNED, KernelFp8

REGISTERS = {2: (40, 232), 3: (32, 160)}
"""Registers of a thread of the producer's warpgroup, which transposes V, and of a consumer,
by the number of consumer warpgroups."""

KEYS = DESCALE_BLOCK
"""Keys of a block, which share a scale; of V transposed they are a row of the 128 bytes that swizzling works on."""

P_EXPONENT = 8.0
"""Log2 of P at a row's maximum."""

SCALES = (1e-30, 1e30)
"""Scales are kept between these: 0 or infinity would make NaN of the mask's -inf, and so of O."""


@dataclass(frozen=True)
class Descale:
    """What a tensor's e4m3 numbers are multiplied by: float32, one for each (batch, head) or block of `DESCALE_BLOCK`
    rows; where sequences are packed, for each (sequence, head).

    Attributes:
        values: the numbers.
        batch, head, block: their strides, that of the batch being the sequences'; 0 where they are the same for all.
    """

    values: cute.Pointer
    batch: Int32
    head: Int32
    block: Int32

    def at(self, batch: Int32, head: Int32, row: Int32) -> Float32:
        """The scale of a row of the tensor."""
        i = Int64(batch) * self.batch + head * self.head + row // DESCALE_BLOCK * self.block
        return cute.make_tensor(self.values + i, cute.make_layout(1))[0]


@dataclass(frozen=True)
class Scaling:
    """From e4m3 products to scores and outputs.

    Attributes:
        scale_log2: softmax scale times log2 e.
        q, k, v: of the tensors.
        q_group: how many query heads share one of q's scales.
    """

    scale_log2: Float32
    q: Descale
    k: Descale
    v: Descale
    q_group: Int32


@dataclass(frozen=True)
class SoftmaxFp8:
    """Running state of a thread's two rows, as `softmax.Softmax`, with P up to 2^`P_EXPONENT`.

    O is kept in units of the scale of V's last block, so that a block's own scale costs nothing: it goes into alpha.

    Attributes:
        kernel: what is compiled.
        scaling: the scales of all.
        row_max: of the scores so far, in log2 units.
        row_sum: this thread's part of the rows' sums of P.
        alpha: of the rows, what O is multiplied by before the product with the P at hand is added.
        scale_log2: of the rows, softmax scale times log2 e times the scale of Q, and that of K where it has one a head.
        v_scale: of V's last block.
        ahead: the scales of the next block of K and of V, read a block early to hide the latency.
        place: sequence and head of key and value.
        pending: the last columns of a block's product, which may be added to O later, by the same alpha.
    """

    kernel: Constexpr[KernelFp8]
    scaling: Scaling
    row_max: cute.Tensor
    row_sum: cute.Tensor
    alpha: cute.Tensor
    scale_log2: cute.Tensor
    v_scale: cute.Tensor
    ahead: cute.Tensor
    place: cute.Tensor
    pending: cute.Tensor

    @cute.jit
    def reset(self, bounds: Bounds, row: Int32):
        """Begin with rows `row` and `row + 8`, which have seen no key."""
        self.row_max.fill(NOTHING_SEEN)
        self.row_sum.fill(0.0)
        self.alpha.fill(0.0)
        params, head, sequence = bounds.params, bounds.tile.head, bounds.number_of_sequence()
        self.place[0], self.place[1] = sequence, head // params.group
        self.read_ahead(Int32(0))
        self.v_scale[0] = limited(self.ahead[1])
        for r in cutlass.range_constexpr(2):
            of_head = ((row + 8 * r) & ((1 << params.pack_gqa) - 1)) + (head << params.pack_gqa)
            position = cutlass.min((row + 8 * r) >> params.pack_gqa, bounds.sequence.seqlen_q - 1)
            self.scale_log2[r] = self.scaling.scale_log2 * self.scaling.q.at(
                sequence, of_head // self.scaling.q_group, position
            )
            if const_expr(not self.kernel.block_scales):
                self.scale_log2[r] = limited(self.scale_log2[r] * self.ahead[0])

    @cute.jit
    def read_ahead(self, key: Int32):
        """Read the scales of the block that begins at a key."""
        self.ahead[0] = self.scaling.k.at(self.place[0], self.place[1], key)
        self.ahead[1] = self.scaling.v.at(self.place[0], self.place[1], key)

    @cute.jit
    def expect(self, first_key: Int32):
        """Prepare for the next block, which begins at that key."""
        if const_expr(self.kernel.block_scales):
            self.read_ahead(first_key)

    @cute.jit
    def step(self, s: cute.Tensor, first_key: Int32) -> tuple[Boolean, cute.Tensor]:
        """Turn a block's scores into P in place; returns whether O must be rescaled, for the whole warp alike,
        and by what."""
        scales, change = [self.scale_log2[0], self.scale_log2[1]], Float32(1.0)
        if const_expr(self.kernel.block_scales):
            scales = [limited(scale * self.ahead[0]) for scale in scales]
            v_scale = limited(self.ahead[1])
            change = cutlass.min(self.v_scale[0] * cute.arch.rcp_approx(v_scale), SCALES[1])
            self.v_scale[0] = v_scale
            self.read_ahead(cutlass.max(first_key - self.kernel.tiles.block_kv, 0))
        alpha = cute.make_rmem_tensor(2, Float32)
        rows = rows_of(s)
        for r in cutlass.range_constexpr(2):
            row_max = cute.arch.fmax(self.row_max[r], maximum(rows[None, r, None]) * scales[r])
            shrunk = cute.math.exp2(self.row_max[r] - row_max, fastmath=True)
            alpha[r] = shrunk * change
            self.row_max[r] = row_max
            self.row_sum[r] = self.row_sum[r] * shrunk
        for r in cutlass.range_constexpr(2):
            row, scale, below = rows[None, r, None], scales[r], self.row_max[r] - P_EXPONENT
            sums = [self.row_sum[r], None, None, None]  # four chains, as one would wait for itself
            for i in cutlass.range_constexpr(cute.size(row)):
                p = cute.math.exp2(row[i] * scale - below, fastmath=True)
                row[i] = p
                sums[i % 4] = p if const_expr(sums[i % 4] is None) else sums[i % 4] + p
            self.row_sum[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])
        needed = Boolean(True)  # with two levels it costs nothing
        if const_expr(not self.kernel.two_level):
            needed = cute.arch.vote_any_sync(alpha[0] != 1.0 or alpha[1] != 1.0)
        return needed, alpha

    def lse_log2(self, r: int, total: Float32) -> Float32:
        """LSE of row r in log2 units, `total` being the sum of its P."""
        return self.row_max[r] - P_EXPONENT + cute.math.log2(total, fastmath=True)

    def scale_of_o(self, total: Float32) -> Float32:
        """The factor of a row of O in the end."""
        return self.v_scale[0] * cute.arch.rcp_approx(total)


def limited(scale: Float32) -> Float32:
    """The scale, kept between `SCALES`."""
    return cutlass.min(cutlass.max(scale, SCALES[0]), SCALES[1])


class ValueTransposed(ValuePath):
    """V comes as (head_dim, keys), in the order of `quantize.transpose_v`."""

    def shared_layout(self) -> cute.ComposedLayout:
        """Of what TMA loads: (head_dim, keys, stages)."""
        return shared_layout(self.dtype, self.kernel.width_v, KEYS, self.stages)

    def origin(self, column: int, head: Int32, row: Int32, batch: Int32) -> tuple[Any, ...]:
        """Where a block of V begins in memory."""
        return row, head, column, batch

    def operand(self, v: cute.Tensor) -> cute.Tensor:
        """The stages that the tensor core reads as (head_dim, keys, stages), as they are."""
        return v


class ValueTransposedOnChip(ValuePath):
    """V comes as it lies in memory, and warps of the producer's warpgroup transpose it."""

    helpers: int = WARPS - 1

    def __init__(self, kernel: KernelFp8, scheduler: type[TileScheduler], bounds: type[Bounds]) -> None:
        super().__init__(kernel)
        self.stages: int = kernel.raw_stages
        self.columns: int = kernel.width_v // kernel.parts_v
        self.scheduler: type[TileScheduler] = scheduler
        self.bounds: type[Bounds] = bounds

    def shared_layout(self) -> cute.ComposedLayout:
        """Of what TMA loads: (keys, head_dim, stages)."""
        return shared_layout(self.dtype, KEYS, self.columns, self.stages)

    def allocate(
        self, smem: cutlass.memory.SmemAllocator, layout: cute.ComposedLayout
    ) -> tuple[cute.Tensor, cute.Tensor | None]:
        """The stages that the tensor core reads, (head_dim, keys, stages), and those that TMA fills."""
        loaded = smem.allocate_tensor(self.dtype, layout.outer, ALIGNED, swizzle=layout.inner)
        layout = shared_layout(self.dtype, self.columns, KEYS, self.kernel.stages_v)
        return smem.allocate_tensor(self.dtype, layout.outer, ALIGNED, swizzle=layout.inner), loaded

    def operand(self, v: cute.Tensor) -> cute.Tensor:
        """The stages that the tensor core reads as (head_dim, keys, stages), as they are."""
        return v

    @cute.jit
    def help(self, params: Params, storage: SharedStorage, helper: Int32):
        """A warp that transposes V: its share of every block of tile after tile."""
        raw, v_pipeline, scheduler = storage.raw, storage.v_pipeline, self.scheduler(params)
        used = Int32(0)  # parts of blocks of V so far, over all tiles
        work_idx = Int32(0)  # tiles so far
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            begin, end = self.bounds(params, scheduler.work_tile(work)).block_range()
            for _ in cutlass.range((end - begin) * self.kernel.parts_v, unroll=1):
                raw.pipeline.consumer_wait(used)
                v_pipeline.producer_acquire(used)
                self.transpose(
                    raw.v[None, None, raw.pipeline.stage(used)],
                    storage.v[None, None, v_pipeline.stage(used)],
                    helper,
                    used,
                )
                v_pipeline.producer_commit(used)
                raw.pipeline.consumer_release(used)
                used += 1
            work = scheduler.next_work(storage.work, storage.work_pipeline, work_idx)
            work_idx += 1

    @cute.jit
    def transpose(self, source: cute.Tensor, target: cute.Tensor, helper: Int32, used: Int32):
        """This warp's share of a part of a block of V, from (keys, columns) to (columns, keys in the order that P has
        them).

        By squares of 16 keys and 32 columns. ldmatrix takes two neighbouring bytes for one 16-bit number and gives a
        lane, of each of four 8 x 8 matrices, those of two neighbouring keys. From two matrices, 8 keys apart, come the
        four bytes of either column that P has in one register; they are rows of the four matrices that stmatrix writes.

        Addresses are put together here, since only the lane's share of the swizzle varies: within rows of 128 bytes (64
        for head dim 64) the 16-byte pieces are exchanged by the row's number. The rows of a matrix that is stored have
        all of them, so that no two are in the same banks: even columns in one half and odd ones in the other.
        """
        line = self.columns
        lane = cute.arch.lane_idx() + (used >> 31)  # 0, which the compiler can't know: it would keep all addresses
        # of a square: the row whose address the lane gives, where it is loaded and where it is stored
        upper_keys, upper_columns, row = lane >> 3 & 1, lane >> 4, lane & 7
        column = (upper_columns << 4) + (row << 1) + (upper_keys ^ (row >> 2))
        bytes_first = Int32(0x6420) if lane < 16 else Int32(0x7531)  # of which columns the lane has its row
        swizzle = (upper_columns ^ (row if const_expr(line == KEYS) else row >> 1)) << 4
        load_from = source.iterator.toint() + ((upper_keys << 3) + row) * line + swizzle
        store_to = target.iterator.toint() + column * KEYS + ((column & 7) << 4)
        for keys in cutlass.range(helper, KEYS // 16, self.helpers, unroll=1):
            load_keys, store_keys = load_from + keys * (16 * line), store_to ^ (keys << 4)
            # two at a time hide some latency and fit the registers
            for pair in cutlass.range_constexpr(line // 64):
                squares = [32 * (2 * pair + i) for i in range(2)]
                loaded = [load_transposed(load_keys ^ first) for first in squares]
                for i in cutlass.range_constexpr(2):
                    store_pairs(store_keys + squares[i] * KEYS, bytes_first, loaded[i])


class ProductFp8(Product):
    """P in e4m3 from registers times V, added to O by the tensor core."""

    v_major: OperandMajorMode = OperandMajorMode.K

    def to_operand(self, s: cute.Tensor, p: cute.Tensor) -> None:
        """P as the operand of the next product."""
        to_8_bits(s, p)


class ProductTwoLevel(ProductFp8):
    """P in e4m3 times V, each block's product from zero, and added to O in float32 registers.

    The columns of O come in parts, with two products at a time: one is added to O while the next is computed. The last
    has none behind it but the next block's scores.

    Attributes:
        parts: how many there are.
    """

    def __init__(self, kernel: KernelFp8) -> None:
        super().__init__(kernel)
        self.columns: int = kernel.columns
        self.parts: int = kernel.width_v // kernel.columns

    def begin(self, consumer: Consumer) -> None:
        """Begin with an O of zeros, to which nothing is yet to be added."""
        super().begin(consumer)
        if self.kernel.late:
            consumer.softmax.pending.fill(0.0)

    @cute.jit
    def issue(self, consumer: Consumer, n: PipelineState) -> cute.Tensor:
        """Issue P times the n-th block of V, a group of WGMMAs for each part, and add to O all but the last, which is
        to be waited for."""
        v_pipeline, parts_v = consumer.storage.v_pipeline, self.kernel.parts_v
        of_part = self.parts // parts_v
        shape = consumer.mma_pv.get_slice(0).partition_shape_C((WARPGROUP_ROWS, self.columns))
        last = cute.make_tensor(consumer.softmax.pending.iterator, cute.make_layout(shape))
        products = [last, cute.make_rmem_tensor(shape, Float32)]  # by how many parts are behind, the last's first
        for part in cutlass.range_constexpr(self.parts):
            if const_expr(part > 0 and part % of_part == 0):
                v_pipeline.consumer_wait(n.part(part // of_part, parts_v))
            v = consumer.v[None, None, None, v_pipeline.stage(n.part(part // of_part, parts_v))]
            columns = columns_of(v, part % of_part)
            gemm(consumer.mma_pv, products[(self.parts - 1 - part) % 2], consumer.p, columns, True)
            if const_expr(part > 0):
                warpgroup.wait_group(1)
                self.add_part(consumer, products[(self.parts - part) % 2], part - 1)
        return last

    def add(self, consumer: Consumer, product: cute.Tensor) -> None:
        """Add the last part to O, unless that is left to `catch_up`."""
        if not self.kernel.late:
            self.add_part(consumer, product, self.parts - 1)

    def catch_up(self, consumer: Consumer) -> None:
        """Add to O the last part of the block before, by whose alpha: the softmax of the next has not begun."""
        if self.kernel.late:
            self.add_part(consumer, consumer.softmax.pending, self.parts - 1)

    @cute.jit
    def add_part(self, consumer: Consumer, product: cute.Tensor, part: Constexpr[int]):
        """Multiply some columns of O by alpha, and add those of a block's product."""
        size = cute.size(product)
        rows = rows_of(product)
        o_rows = rows_of(cute.make_tensor(consumer.o.iterator + part * size, cute.make_layout(size)))
        for i in cutlass.range_constexpr(size // 4):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    o_rows[c, r, i] = o_rows[c, r, i] * consumer.softmax.alpha[r] + rows[c, r, i]

    def rescale(self, consumer: Consumer, needed: Boolean, alpha: cute.Tensor) -> None:
        """Leave alpha to the next product, which rescales O."""
        consumer.softmax.alpha[0], consumer.softmax.alpha[1] = alpha[0], alpha[1]


class ForwardFp8(Forward):
    """The program of one `KernelFp8`."""

    claimed_at_once: int = 0  # a number held from a tile's first load to its last is one that its producer spills

    def __init__(self, kernel: KernelFp8) -> None:
        super().__init__(kernel)
        self.value: ValuePath = (
            ValueTransposed(kernel) if kernel.transposed else ValueTransposedOnChip(kernel, self.scheduler, self.bounds)
        )
        self.product: Product = (ProductTwoLevel if kernel.two_level else ProductFp8)(kernel)
        if self.value.helpers:
            self.registers: tuple[int, int] = REGISTERS[self.tiles.consumers]

    def softmax(self, scaling: Scaling) -> SoftmaxFp8:
        """The state of this thread's rows."""
        floats = [cute.make_rmem_tensor(n, Float32) for n in (2, 2, 2, 2, 1, 2)]
        pending = cute.make_rmem_tensor(WARPGROUP_ROWS * self.product.columns // WARPGROUP, Float32)
        return SoftmaxFp8(self.kernel, scaling, *floats, cute.make_rmem_tensor(2, Int32), pending)


def load_transposed(source: Int32) -> tuple[Uint32, ...]:
    """Four 8x8 matrices of 16-bit numbers, transposed; lane 8 i + j gives the address of row j of the i-th."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4, read_only_args=[source],
    )  # fmt: skip


def store_pairs(target: Int32, bytes_first: Int32, a: tuple[Uint32, ...]) -> None:
    """Store bytes of each two matrices of `load_transposed` as rows whose addresses the lanes give: those that
    `bytes_first` selects, the upper or the lower, and then the others."""
    cute.arch.inline_ptx(
        "{.reg .b32 e, o, f, p, s; xor.b32 s, {$r1}, 0x1111; prmt.b32 e, {$r2}, {$r3}, {$r1}; "
        "prmt.b32 o, {$r2}, {$r3}, s; prmt.b32 f, {$r4}, {$r5}, {$r1}; prmt.b32 p, {$r4}, {$r5}, s; "
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {e, o, f, p};}",
        read_only_args=[target, bytes_first, *a],
    )


@cute.jit
def to_8_bits(x: cute.Tensor, y: cute.Tensor):
    """Round to e4m3. Of each row, the pairs of columns of two neighbouring results make four bytes of the operand."""
    rows = rows_of(x)
    words = cute.make_tensor(cute.recast_ptr(y.iterator, dtype=Uint32), cute.make_layout((2, cute.size(x) // 8)))
    for i in cutlass.range_constexpr(cute.size(x) // 8):
        for r in cutlass.range_constexpr(2):
            words[r, i] = cute.arch.inline_ptx(
                "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
                "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high};}",
                write_only_types=[Uint32],
                read_only_args=[rows[0, r, 2 * i], rows[1, r, 2 * i], rows[0, r, 2 * i + 1], rows[1, r, 2 * i + 1]],
            )
