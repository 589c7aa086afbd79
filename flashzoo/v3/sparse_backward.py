"""The backward pass of block-sparse attention: `backward.py` and `backward_by_gradient.py` with a list of blocks of queries in place
of a range.

1. A tile is a column of the block mask, or a part of one. The heads that share its keys share its list.
2. Of its list the partial blocks come first and are masked by the band and the bits of the mask's elements. Full ones are masked by
   the end of the keys alone, where their column crosses it.
3. The producer, a tile ahead, looks up the column of the next tile and how much it keeps. A column that keeps nothing has no step: its
   dK and dV stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr

from flashzoo._cute.hopper.mask import mask_scores
from flashzoo._cute.hopper.tile_scheduler import NEVER, Bounds, TileSchedulerBackward
from flashzoo._cute.hopper.wgmma import rows_of
from flashzoo.gpu import WARPGROUP_ROWS
from flashzoo.v3.backward import Backward
from flashzoo.v3.backward_by_gradient import BackwardByGradient
from flashzoo.v3.sparse import Row, TileSchedulerSparse, at
from flashzoo.v3.traits import MASK_Q, KernelBackwardSparse


@dataclass(frozen=True)
class TileSchedulerBackwardSparse(TileSchedulerSparse, TileSchedulerBackward):
    """The same with a block mask, whose `Lists` of columns these are; `blocks` are tiles."""

    kernel: Constexpr[KernelBackwardSparse]

    def described(self, number: Int32) -> Row:
        """The tile of a number; past the last one, what is read of the last."""
        rank, head_kv, batch = self.rank_of(cutlass.min(number, self.blocks * self.batch_heads - 1))
        parts = self.kernel.parts_of_column
        lists = self.list_of(head_kv * self.group, batch) * self.columns
        column = at(self.order, lists + rank // parts)
        kept = at(self.counts, lists + column)
        return Row(number, lists + column, column * parts + rank % parts, kept - at(self.full, lists + column), kept, Int32(0))

    def with_bit_block(self, tile: Row) -> Row:
        """As it is: bits are read where they are used."""
        return tile

    @property
    def columns(self) -> Int32:
        """Of a head's mask."""
        return self.blocks // self.kernel.parts_of_column

    def extent(self, tile: Row, block: Int32) -> tuple[Int32, Int32]:
        """First of the blocks of queries that a tile walks, and one past the last: places in its list."""
        return Int32(0), tile.kept * self.kernel.parts

    def walks(self, begin: Int32, end: Int32) -> Boolean:
        """Whether a tile walks any block of queries."""
        return begin < end

    def block_q(self, tile: Row, n: Int32) -> Int32:
        """The n-th block of queries that a tile walks."""
        parts = self.kernel.parts
        return at(self.indices, self.place_in_lists(tile, n)) * parts + n % parts

    @cute.jit
    def crosses(self, tile: Row, first_key: Int32, n: Int32) -> Boolean:
        """Whether some of a warpgroup's keys are not seen by some queries of the n-th block."""
        return n < tile.partial * self.kernel.parts or first_key + WARPGROUP_ROWS > self.seqlen_k


class _Masked:
    """What both programs do."""

    kernel: KernelBackwardSparse

    @cute.jit
    def mask(self, schedule: TileSchedulerBackwardSparse, tile: Row, n: Int32, s: cute.Tensor, bounds: Bounds, thread: Int32):
        """Set what is not seen, of the scores of the n-th block of queries that a tile walks, to -inf."""
        kernel, tiles = self.kernel, self.kernel.tiles
        partial = n < tile.partial * kernel.parts
        first_query = schedule.block_q(tile, n) * tiles.block_q
        # Of a full block what matters is which keys there are: `NEVER` is in the bounds of those that there are not.
        of_block = []
        for lowest, highest in bounds:
            whole = Int32(NEVER) if lowest > NEVER // 2 else Int32(-NEVER)
            of_block.append((lowest if partial else whole, highest if partial else Int32(NEVER)))
        mask_scores(s, tuple(of_block), first_query, True, kernel.left)
        if const_expr(kernel.bits):  # noqa: SIM102 - one is known when compiled, the other when run
            if partial:
                self.mask_by_bits(schedule, tile, n, s, thread)

    @cute.jit
    def mask_by_bits(self, schedule: TileSchedulerBackwardSparse, tile: Row, n: Int32, s: cute.Tensor, thread: Int32):
        """The same by the bits of a partial block. Both keys of a thread are in one word of a query's bits."""
        kernel, tiles = self.kernel, self.kernel.tiles
        lane = cute.arch.lane_idx()
        key = tile.block % kernel.parts_of_column * tiles.block_kv + thread // 32 * 16 + lane // 4
        query = n % kernel.parts * tiles.block_q + lane % 4 * 2
        words_of_row = kernel.mask_kv // 32
        bit_block = Int64(tile.list // schedule.columns) * schedule.bit_blocks + schedule.bit_block_of(tile, n)
        words = schedule.bits + (bit_block * (MASK_Q * words_of_row) + (query * words_of_row + key // 32))
        rows = rows_of(s)
        for i in cutlass.range_constexpr(cute.size(s) // 4):
            for c in cutlass.range_constexpr(2):
                word = at(words, (8 * i + c) * words_of_row) >> key % 32
                for r in cutlass.range_constexpr(2):
                    rows[c, r, i] = rows[c, r, i] if (word & (1 << 8 * r)) != 0 else -Float32.inf


class BackwardSparse(_Masked, Backward):
    """The program of a `KernelBackwardSparse`."""


class BackwardByGradientSparse(_Masked, BackwardByGradient):
    """The program of one whose tiles are cut by gradient."""
