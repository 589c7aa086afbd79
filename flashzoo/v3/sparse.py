"""The forward pass of block-sparse attention: `forward.py` with a list of blocks of keys in place of a range.

1. A tile is one row of the block mask: the queries of two warpgroups. Its list has the partial blocks first, then the full
   ones, each part ascending; as in the dense kernel it is walked from its end to its start.
2. What comes first may cross the end of the keys, and is masked by that where it does. The other full blocks are not masked at
   all. The partial ones are masked by the band and the bits of the mask's elements, and by the end of the keys.
3. The producer alone reads which block comes next; a consumer does for the blocks that it masks. A warp of its own, a tile ahead,
   looks up the row of the following tile and how much it keeps, and hands that over with the tile's number.
4. A row that keeps nothing is a block past the last key, masked whole: no special case.
5. Where registers allow (head dim 64) a thread block works on two tiles at a time, with two teams of its warps: a row of the mask
   is two warpgroups' queries, and two are too few to keep the tensor cores busy under their softmax.

Rows are handed out from the longest to the shortest, so that no thread block is left with a long one at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32, const_expr

from flashzoo._cute.hopper.tile_scheduler import NEVER, Bounds, TileScheduler
from flashzoo._cute.hopper.wgmma import rows_of
from flashzoo.gpu import WARPGROUP_ROWS
from flashzoo.v3.forward import Consumer, Forward, own_team
from flashzoo.v3.traits import KernelSparse


@dataclass(frozen=True)
class Row:
    """A tile: a row of one head's block mask.

    Attributes:
        number: of the tile, in the order in which they are handed out.
        list: which of the lists of all heads.
        block: which row.
        partial, kept: how many of its blocks are partial, and how many there are in all.
        bit_block: where the bits of its last partial block lie; for consumers, and where there are bits.
    """

    number: Int32
    list: Int32
    block: Int32
    partial: Int32
    kept: Int32
    bit_block: Int32


@dataclass(frozen=True)
class TileSchedulerSparse(TileScheduler):
    """The same with a block mask, whose `Lists` of rows these are. No heads are packed.

    `blocks` are the mask's rows; `window_left` and `window_right` the band that partial blocks apply.

    Attributes:
        list_batch, list_head: strides over batch and heads, in heads that have lists; 0 where they are shared.
        width: of the lists.
        bit_blocks: for how many blocks a head has bits.
        order, counts, full, indices, bit_index: the lists; any address where they have no room for anything.
        bits: of elements, four bytes at a time.
    """

    kernel: Constexpr[KernelSparse]
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

    def first(self) -> Row:
        """The tile that a team begins with."""
        number = cute.arch.block_idx()[0]
        if const_expr(self.kernel.teams > 1):
            number = number * self.kernel.teams + own_team(self.kernel.tiles)
        return self.with_bit_block(self.described(number))

    def described(self, number: Int32) -> Row:
        """The tile of a number; past the last one, what is read of the last."""
        rank, head, batch = self.rank_of(cutlass.min(number, self.blocks * self.batch_heads - 1))
        rows = self.list_of(head, batch) * self.blocks
        block = at(self.order, rows + rank)
        kept = at(self.counts, rows + block)
        return Row(number, rows + block, block, kept - at(self.full, rows + block), kept, Int32(0))

    def tell(self, slot: cute.Tensor, tile: Row) -> None:
        """Hand a tile over through shared memory."""
        slot[0], slot[1], slot[2], slot[3], slot[4] = tile.number, tile.list, tile.block, tile.partial, tile.kept

    def told(self, slot: cute.Tensor) -> Row:
        """The tile that was handed over."""
        return self.with_bit_block(Row(slot[0], slot[1], slot[2], slot[3], slot[4], Int32(0)))

    def with_bit_block(self, tile: Row) -> Row:
        """The tile with `bit_block`: read here, it is there when the tile begins."""
        return replace(tile, bit_block=self.bit_block_of(tile, cutlass.max(tile.partial * self.kernel.parts - 1, 0)))

    def exists(self, tile: Row) -> Boolean:
        """Whether a tile is one, and not past the last."""
        return tile.number < self.blocks * self.batch_heads

    def place(self, tile: Row) -> tuple[Int32, Int32, Int32]:
        """`(block of queries, head, batch)` of a tile."""
        _, head, batch = self.rank_of(tile.number)
        return tile.block, head, batch

    def extent(self, tile: Row, block: Int32) -> tuple[Int32, Int32]:
        """First of the blocks of keys that a tile walks, and one past the last: places in its list, at least one."""
        return Int32(0), cutlass.max(1, tile.kept * self.kernel.parts)

    @cute.jit
    def first_key(self, tile: Row, n: Int32) -> Int32:
        """Where the n-th block of keys that a tile walks begins; past the last key, where it keeps none: zeros are loaded, and no NaN."""
        tiles, parts = self.kernel.tiles, self.kernel.parts
        key = at(self.indices, self.place_in_lists(tile, n)) * self.kernel.mask_kv + n % parts * tiles.block_kv
        return self.seqlen_k if tile.kept == 0 else key

    def bit_block_of(self, tile: Row, n: Int32) -> Int32:
        """Where the bits of the n-th block lie that a tile walks, a partial one; nowhere without bits."""
        return Int32(0) if not self.kernel.bits else at(self.bit_index, self.place_in_lists(tile, n))

    @cute.jit
    def read_bits(self, tile: Row, n: Int32, bit_block: Int32, row: Int32, words: cute.Tensor):
        """Read the bits at `bit_block`, of the n-th block: of row `row` of the tile and the one 8 below, into `(words, 2)`."""
        tiles, parts = self.kernel.tiles, self.kernel.parts
        words_of_row = self.kernel.mask_kv // 32
        first = (Int64(tile.list // self.blocks) * self.bit_blocks + bit_block) * (tiles.block_q * words_of_row)
        for r in cutlass.range_constexpr(2):
            place = first + ((row + 8 * r) * words_of_row + n % parts * (tiles.block_kv // 32))
            place = cute.assume(place, divby=tiles.block_kv // 32)
            source = cute.make_tensor(self.bits + place, cute.make_layout(tiles.block_kv // 32))
            cute.autovec_copy(source, words[None, r])

    def place_in_lists(self, tile: Row, n: Int32) -> Int64:
        """Of the n-th block that a tile walks, among the entries of all lists."""
        return Int64(tile.list) * self.width + n // self.kernel.parts

    def list_of(self, head: Int32, batch: Int32) -> Int32:
        """Which of the heads that have lists."""
        return batch * self.list_batch + head * self.list_head


@dataclass(frozen=True)
class MaskSparse:
    """What a thread's part of a block of scores is masked by.

    Attributes:
        bounds: of its two rows, the first visible key and one past the last, counted from its first column.
        column: its first column.
        left: whether to look at the bound on the left.
        words: bits of its two rows, `(words, 2)`, or None.
    """

    bounds: Bounds
    column: Int32
    left: Constexpr[bool]
    words: cute.Tensor | None = None

    @cute.jit
    def apply(self, s: cute.Tensor, first_key: Int32):
        """Set what is not seen to -inf.

        The bounds become bits too, counted from the thread's first column as they are: a test for each score, not one a bound.
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
    scheduler_warp = True

    @cute.jit
    def mainloop(self, schedule: TileSchedulerSparse, tile: Row, block: Int32, consumer: Consumer, used: Int32, q_use: Int32) -> Int32:
        """One tile's rows of O, not yet divided by l, and of the softmax state. Returns the new `used`."""
        kernel, tiles = self.kernel, self.tiles
        step = self.step_overlapped if const_expr(tiles.overlap) else self.step_serial
        column, row = consumer.column, consumer.wg_idx * WARPGROUP_ROWS + consumer.row
        _, end = schedule.extent(tile, block)
        last, partial = end - 1, tile.partial * kernel.parts
        nothing = tile.kept == 0
        begins_partial = not nothing and tile.partial == tile.kept
        # Past what a row keeps its list says nothing.
        first_key = Int32(0) if nothing else schedule.first_key(tile, last)
        limit = Int32(-NEVER) if nothing else schedule.seqlen_k
        bounds = schedule.bounds(block * tiles.block_q + row, column)
        keys = (Int32(-NEVER), limit - column)

        words, words_ahead = None, None
        if const_expr(kernel.bits):  # read a block ahead, and where they lie two; where the block lies, one
            words, words_ahead = (cute.make_rmem_tensor((tiles.block_kv // 32, 2), Uint32) for _ in range(2))
            words_ahead.fill(0)
            if partial > 0:
                schedule.read_bits(tile, partial - 1, tile.bit_block, row, words_ahead)
            for i in cutlass.range_constexpr(tiles.block_kv // 32):
                for r in cutlass.range_constexpr(2):
                    words[i, r] = words_ahead[i, r] if begins_partial else Uint32(0xFFFFFFFF)
        bit_block = schedule.bit_block_of(tile, cutlass.max(partial - 2, 0))
        of_first = tuple([tuple([b if begins_partial else k for b, k in zip(of_row, keys, strict=True)]) for of_row in bounds])
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
                schedule.read_bits(tile, cutlass.max(partial - 1, 0), bit_block, row, words_ahead)
            bit_block = schedule.bit_block_of(tile, cutlass.max(partial - 2, 0))
        key = schedule.first_key(tile, cutlass.max(partial - 1, 0))
        full = last - partial
        if const_expr(kernel.parts > 1):  # the other part of a full block that crosses the end of the keys
            crossing = cutlass.min(full, 1 if first_key > limit else 0)
            for _ in cutlass.range(crossing, unroll=1):
                used = step(consumer, used, first_key - tiles.block_kv, MaskSparse((keys, keys), column, False))
            full -= crossing
        for _ in cutlass.range(full, unroll=1):  # A1.15, A2.7
            used = step(consumer, used, Int32(0), None)
        mask = MaskSparse(bounds, column, kernel.left, words)
        for i in cutlass.range(partial, unroll=1):
            n = partial - 1 - i
            if const_expr(kernel.bits):
                words.store(words_ahead.load())
                schedule.read_bits(tile, cutlass.max(n - 1, 0), bit_block, row, words_ahead)
            first_key, key, bit_block = (
                key,
                schedule.first_key(tile, cutlass.max(n - 1, 0)),
                schedule.bit_block_of(tile, cutlass.max(n - 2, 0)),
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
    return cute.arch.inline_ptx("bmsk.clamp.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[begin, count])
