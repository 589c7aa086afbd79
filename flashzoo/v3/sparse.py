"""The forward pass of block-sparse attention: `forward.py` with a list of blocks of keys in place of a range.

1. A tile is one row of the block mask: the queries of two warpgroups. Its list has the partial blocks first, then the
   full ones, each part ascending; as in the dense kernel it is walked from its end to its start.
2. The block that is walked first may cross the end of the keys, and is masked by that where it does. The other full
   blocks are not masked at all, the partial ones by the window, the bits of the mask's elements, and the end of the
   keys.
3. The producer alone reads which block is next; a consumer does for the blocks that it masks. The scheduler warp looks
   up the row of the next tile and how much it keeps, and tells them with the tile's number.
4. A row that keeps nothing is a block past the last key, masked whole: no special case.
5. Where registers allow (head dim 64) a thread block works on two tiles at a time, with two teams of its warps: a row
   of the mask is two warpgroups' queries, and two are too few to keep the tensor cores busy under their softmax.

Rows begin in the order of their lengths, the longest first (LPT),
so that no thread block is left with a long one at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32, const_expr

from flashzoo._cute.hopper.bounds import NEVER, Bounds, ThreadBounds
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.pipeline import PipelineState
from flashzoo._cute.hopper.tile_scheduler import TileScheduler, WorkTile
from flashzoo._cute.hopper.wgmma import rows_of
from flashzoo.gpu import WARPGROUP_ROWS
from flashzoo.v3.forward import Consumer, Forward, own_team
from flashzoo.v3.traits import KernelBackwardSparse, KernelSparse


@dataclass(frozen=True)
class Row:
    """`Work` of a scheduler: a row of one head's block mask.

    Attributes:
        tile_idx: number of the tile.
        list: which of the lists of all heads.
        block: which row.
        partial, kept: how many of its blocks are partial, and how many there are in all.
        bit_block: which of the head's blocks of bits its last partial block has;
            for consumers, and where there are bits.
    """

    tile_idx: Int32
    list: Int32
    block: Int32
    partial: Int32
    kept: Int32
    bit_block: Int32


@dataclass(frozen=True)
class RowTile(WorkTile):
    """A tile, and its row."""

    row: Row


@dataclass(frozen=True)
class ParamsSparse(Params):
    """The same with a block mask, whose `Lists` of rows (columns, in the backward pass) these are. No heads are packed.

    `blocks` are the tiles of a head; `window_left` and `window_right` are what partial blocks are masked by.

    Attributes:
        list_batch, list_head: strides over batch and heads, in heads that have lists; 0 where they are shared.
        width: of the lists.
        bit_blocks: how many blocks of bits a head has.
        order, counts, full, indices, bit_index: the lists; any address where they have no room for anything.
        bits: of elements, four bytes at a time.
    """

    kernel: Constexpr[KernelSparse | KernelBackwardSparse]
    list_batch: Int32
    list_head: Int32
    width: Int32
    bit_blocks: Int32
    order: cute.Pointer
    counts: cute.Pointer
    full: cute.Pointer
    indices: cute.Pointer
    bit_index: cute.Pointer
    bits: cute.Pointer

    def list_of(self, head: Int32, batch: Int32) -> Int32:
        """Which of the heads that have lists."""
        return batch * self.list_batch + head * self.list_head

    def place_in_lists(self, row: Row, n: Int32) -> Int64:
        """Of the n-th block that a tile walks, among the entries of all lists."""
        return Int64(row.list) * self.width + n // self.kernel.parts

    def bit_block_of(self, row: Row, n: Int32) -> Int32:
        """Which block of bits the n-th block has that a tile walks, a partial one; any without bits."""
        return Int32(0) if not self.kernel.bits else at(self.bit_index, self.place_in_lists(row, n))


@dataclass(frozen=True)
class TileSchedulerSparse(TileScheduler):
    """The same with a block mask."""

    params: ParamsSparse

    def initial_work(self) -> Row:
        """The work that a team begins with."""
        tile_idx = cute.arch.block_idx()[0]
        if const_expr(self.params.kernel.teams > 1):
            tile_idx = tile_idx * self.params.kernel.teams + own_team(self.params.kernel.tiles)
        return self.with_bit_block(self.work_of(tile_idx))

    def work_of(self, tile_idx: Int32) -> Row:
        """The work of a number; past the last one, what is read of the last."""
        p = self.params
        rank, head, batch = self.coordinates(cutlass.min(tile_idx, p.blocks * p.batch_heads - 1))
        rows = p.list_of(head, batch) * p.blocks
        block = at(p.order, rows + rank)
        kept = at(p.counts, rows + block)
        return Row(tile_idx, rows + block, block, kept - at(p.full, rows + block), kept, Int32(0))

    def is_valid(self, work: Row) -> Boolean:
        """Whether it is a tile, and not past the last."""
        return work.tile_idx < self.params.blocks * self.params.batch_heads

    def work_tile(self, work: Row) -> RowTile:
        """Which tile it is."""
        _, head, batch = self.coordinates(work.tile_idx)
        return RowTile(work.block, head, batch, work)

    def to_smem(self, smem: cute.Tensor, work: Row) -> None:
        """Write it to shared memory."""
        smem[0], smem[1], smem[2], smem[3], smem[4] = work.tile_idx, work.list, work.block, work.partial, work.kept

    def from_smem(self, smem: cute.Tensor) -> Row:
        """Read it from there."""
        return self.with_bit_block(Row(smem[0], smem[1], smem[2], smem[3], smem[4], Int32(0)))

    def with_bit_block(self, row: Row) -> Row:
        """The row with `bit_block`: read here, it is there when the tile begins."""
        return replace(
            row, bit_block=self.params.bit_block_of(row, cutlass.max(row.partial * self.params.kernel.parts - 1, 0))
        )


@dataclass(frozen=True)
class BoundsSparse(Bounds):
    """The blocks of a tile's list, and the keys that the rows of partial ones see by the window."""

    params: ParamsSparse
    tile: RowTile

    def block_range(self) -> tuple[Int32, Int32]:
        """First of the blocks of keys that the tile walks, and one past the last: places in its list, at least one."""
        return Int32(0), cutlass.max(1, self.tile.row.kept * self.params.kernel.parts)

    @cute.jit
    def first_key(self, n: Int32) -> Int32:
        """Where the n-th block of keys begins; past the last key, where the row keeps none:
        zeros are loaded, and no NaN."""
        p, row, parts = self.params, self.tile.row, self.params.kernel.parts
        key = at(p.indices, p.place_in_lists(row, n)) * p.kernel.mask_kv + n % parts * p.kernel.tiles.block_kv
        return self.sequence.seqlen_k if row.kept == 0 else key

    def bit_block_of(self, n: Int32) -> Int32:
        """Which block of bits the tile's n-th block has, a partial one; any without bits."""
        return self.params.bit_block_of(self.tile.row, n)

    @cute.jit
    def read_bits(self, n: Int32, bit_block: Int32, row: Int32, words: cute.Tensor):
        """Read the bits of the n-th block: of row `row` of the tile and the one 8 below, into `(words, 2)`."""
        p, tiles, parts = self.params, self.params.kernel.tiles, self.params.kernel.parts
        words_of_row = p.kernel.mask_kv // 32
        first = (Int64(self.tile.row.list // p.blocks) * p.bit_blocks + bit_block) * (tiles.block_q * words_of_row)
        for r in cutlass.range_constexpr(2):
            place = first + ((row + 8 * r) * words_of_row + n % parts * (tiles.block_kv // 32))
            place = cute.assume(place, divby=tiles.block_kv // 32)
            source = cute.make_tensor(p.bits + place, cute.make_layout(tiles.block_kv // 32))
            cute.autovec_copy(source, words[None, r])


@dataclass(frozen=True)
class MaskSparse:
    """What a thread's part of a block of scores is masked by.

    Attributes:
        bounds: of its two rows, the first visible key and one past the last, counted from its first column.
        column: its first column.
        left: whether to look at the bound on the left.
        words: bits of its two rows, `(words, 2)`, or None.
    """

    bounds: ThreadBounds
    column: Int32
    left: Constexpr[bool]
    words: cute.Tensor | None = None

    @cute.jit
    def apply(self, s: cute.Tensor, first_key: Int32):
        """Set what is not seen to -inf.

        The bounds become bits too, counted from the thread's first column as they are:
        a test for each score, not one a bound.
        """
        rows = rows_of(s)
        for r in cutlass.range_constexpr(2):
            lowest, highest = self.bounds[r][0] - first_key, self.bounds[r][1] - first_key
            for word in cutlass.range_constexpr(cute.size(s) // 16):
                begin = cutlass.max(lowest - 32 * word, 0) if const_expr(self.left) else Int32(0)
                seen = ones(begin, cutlass.max(highest - 32 * word - begin, 0))
                if const_expr(self.words is not None):
                    seen = seen & (self.words[word, r] >> self.column)
                for i in cutlass.range_constexpr(4):
                    for c in cutlass.range_constexpr(2):
                        score = rows[c, r, 4 * word + i]
                        rows[c, r, 4 * word + i] = score if (seen & (1 << 8 * i + c)) != 0 else -Float32.inf


class ForwardSparse(Forward):
    """The program of one `KernelSparse`."""

    kernel: KernelSparse
    scheduler: type[TileScheduler] = TileSchedulerSparse
    bounds: type[Bounds] = BoundsSparse
    scheduler_warp: bool = True

    @cute.jit
    def mainloop(self, bounds: BoundsSparse, consumer: Consumer, used: PipelineState, q_use: Int32) -> PipelineState:
        """One tile's rows of O, not yet divided by l, and of the softmax state. Returns the new `used`."""
        kernel, tiles, mask_row = self.kernel, self.tiles, bounds.tile.row
        step = self.step_overlapped if const_expr(tiles.overlap) else self.step_serial
        column, row = consumer.column, consumer.wg_idx * WARPGROUP_ROWS + consumer.row
        _, end = bounds.block_range()
        last, partial = end - 1, mask_row.partial * kernel.parts
        nothing = mask_row.kept == 0
        begins_partial = not nothing and mask_row.partial == mask_row.kept
        # Past what a row keeps its list says nothing.
        first_key = Int32(0) if nothing else bounds.first_key(last)
        limit = Int32(-NEVER) if nothing else bounds.sequence.seqlen_k
        of_thread = bounds.of_thread(bounds.tile.block * tiles.block_q + row, column)
        keys = (Int32(-NEVER), limit - column)

        words, words_ahead = None, None
        if const_expr(kernel.bits):  # read a block ahead, and where they lie two; where the block lies, one
            words, words_ahead = (cute.make_rmem_tensor((tiles.block_kv // 32, 2), Uint32) for _ in range(2))
            words_ahead.fill(0)
            if partial > 0:
                bounds.read_bits(partial - 1, mask_row.bit_block, row, words_ahead)
            for i in cutlass.range_constexpr(tiles.block_kv // 32):
                for r in cutlass.range_constexpr(2):
                    words[i, r] = words_ahead[i, r] if begins_partial else Uint32(0xFFFFFFFF)
        bit_block = bounds.bit_block_of(cutlass.max(partial - 2, 0))
        of_first = tuple(
            [tuple([b if begins_partial else k for b, k in zip(of_row, keys, strict=True)]) for of_row in of_thread]
        )
        first = MaskSparse(of_first, column, kernel.left, words)

        consumer.storage.q_pipeline.consumer_wait(q_use)  # A1.14, A2.3
        consumer.o.fill(0.0)
        crosses = begins_partial or first_key + tiles.block_kv > limit
        if const_expr(tiles.overlap):
            self.first_scores(consumer, used, first_key, first, crosses)
        else:
            used = self.rest_of_step(consumer, self.scores(consumer, used), used, first_key, first, crosses)
        if begins_partial:
            partial -= 1
            if const_expr(kernel.bits):
                bounds.read_bits(cutlass.max(partial - 1, 0), bit_block, row, words_ahead)
            bit_block = bounds.bit_block_of(cutlass.max(partial - 2, 0))
        key = bounds.first_key(cutlass.max(partial - 1, 0))
        full = last - partial
        if const_expr(kernel.parts > 1):  # the other part of a full block that crosses the end of the keys
            crossing = cutlass.min(full, 1 if first_key > limit else 0)
            for _ in cutlass.range(crossing, unroll=1):
                used = step(consumer, used, first_key - tiles.block_kv, MaskSparse((keys, keys), column, False))
            full -= crossing
        for _ in cutlass.range(full, unroll=1):  # A1.15, A2.7
            used = step(consumer, used, Int32(0), None)
        mask = MaskSparse(of_thread, column, kernel.left, words)
        for i in cutlass.range(partial, unroll=1):
            n = partial - 1 - i
            if const_expr(kernel.bits):
                words.store(words_ahead.load())
                bounds.read_bits(cutlass.max(n - 1, 0), bit_block, row, words_ahead)
            first_key, key, bit_block = (
                key,
                bounds.first_key(cutlass.max(n - 1, 0)),
                bounds.bit_block_of(cutlass.max(n - 2, 0)),
            )
            used = step(consumer, used, first_key, mask)
        consumer.storage.q_pipeline.consumer_release(q_use)
        if const_expr(tiles.overlap):
            used = self.last_product(consumer, used)
        else:
            self.warp_scheduler_barrier_arrive(consumer.wg_idx)
        return used


def at(values: cute.Pointer, i: Any) -> Int32:
    """One of the numbers in memory."""
    return cute.make_tensor(values + i, cute.make_layout(1))[0]


def ones(begin: Int32, count: Int32) -> Uint32:
    """So many bits from `begin` on; what is past the last bit is left out."""
    return cute.arch.inline_ptx(
        "bmsk.clamp.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[begin, count]
    )
