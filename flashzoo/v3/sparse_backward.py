"""The backward pass of block-sparse attention: `backward.py`, `backward_in_halves.py` and `backward_by_gradient.py`
with a list of blocks of queries in place of a range.

1. A tile is a column of the block mask, or a part of one. The heads that share its keys share its list.
2. Of its list the partial blocks come first and are masked by the window and the bits of the mask's elements. Full ones
   are masked by the end of the keys alone, where their column crosses it.
3. The producer, a tile ahead, looks up the column of the next tile and how much it keeps. A column that keeps nothing
   has no step: its dK and dV stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr

from flashzoo._cute.hopper.bounds import NEVER, BoundsBackward, ThreadBounds
from flashzoo._cute.hopper.mask import mask_scores
from flashzoo._cute.hopper.tile_scheduler import TileScheduler
from flashzoo._cute.hopper.wgmma import rows_of
from flashzoo.gpu import WARPGROUP_ROWS
from flashzoo.v3.backward import Backward
from flashzoo.v3.backward_by_gradient import BackwardByGradient
from flashzoo.v3.backward_in_halves import BackwardInHalves
from flashzoo.v3.sparse import ParamsSparse, Row, RowTile, TileSchedulerSparse, at
from flashzoo.v3.traits import MASK_Q, KernelBackwardSparse


@dataclass(frozen=True)
class TileSchedulerBackwardSparse(TileSchedulerSparse):
    """The same with tiles of keys: a column of the mask, or a part of one."""

    def work_of(self, tile_idx: Int32) -> Row:
        """The work of a number; past the last one, what is read of the last."""
        p, parts = self.params, self.params.kernel.parts_of_column
        rank, head_kv, batch = self.coordinates(cutlass.min(tile_idx, p.blocks * p.batch_heads - 1))
        lists = p.list_of(head_kv * p.group, batch) * (p.blocks // parts)
        column = at(p.order, lists + rank // parts)
        kept = at(p.counts, lists + column)
        return Row(
            tile_idx, lists + column, column * parts + rank % parts, kept - at(p.full, lists + column), kept, Int32(0)
        )

    def with_bit_block(self, row: Row) -> Row:
        """As it is: bits are read where they are used."""
        return row


@dataclass(frozen=True)
class BoundsBackwardSparse(BoundsBackward):
    """The blocks of a tile's list, and the queries that see the keys of partial ones by the window."""

    params: ParamsSparse
    tile: RowTile

    def block_range(self) -> tuple[Int32, Int32]:
        """First of the blocks of queries that the tile walks, and one past the last: places in its list."""
        return Int32(0), self.tile.row.kept * self.params.kernel.parts

    def walks_any(self, begin: Int32, end: Int32) -> Boolean:
        """Whether the tile walks any block of queries."""
        return begin < end

    def block_q(self, n: Int32) -> Int32:
        """Which block of queries the tile's n-th is."""
        p, parts = self.params, self.params.kernel.parts
        return at(p.indices, p.place_in_lists(self.tile.row, n)) * parts + n % parts

    @cute.jit
    def crosses(self, first_key: Int32, n: Int32) -> Boolean:
        """Whether some of a warpgroup's keys are not seen by some queries of the tile's n-th block."""
        return (
            n < self.tile.row.partial * self.params.kernel.parts or first_key + WARPGROUP_ROWS > self.sequence.seqlen_k
        )


class _Masked:
    """What both programs do."""

    kernel: KernelBackwardSparse
    scheduler: type[TileScheduler] = TileSchedulerBackwardSparse
    bounds: type[BoundsBackward] = BoundsBackwardSparse

    @cute.jit
    def mask(
        self,
        bounds: BoundsBackwardSparse,
        n: Int32,
        first: Constexpr[int],
        s: cute.Tensor,
        of_thread: ThreadBounds,
        thread: Int32,
    ):
        """Set what is not seen, of the scores of the n-th block of queries that a tile walks, to -inf."""
        kernel, tiles = self.kernel, self.kernel.tiles
        partial = n < bounds.tile.row.partial * kernel.parts
        first_query = bounds.block_q(n) * tiles.block_q + first
        # A full block is masked by the end of the keys alone: past it the bounds are `NEVER`.
        of_block = []
        for lowest, highest in of_thread:
            whole = Int32(NEVER) if lowest > NEVER // 2 else Int32(-NEVER)
            of_block.append((lowest if partial else whole, highest if partial else Int32(NEVER)))
        mask_scores(s, tuple(of_block), first_query, True, kernel.left)
        if const_expr(kernel.bits):  # noqa: SIM102 - one is known when compiled, the other when run
            if partial:
                self.mask_by_bits(bounds, n, first, s, thread)

    @cute.jit
    def mask_by_bits(
        self, bounds: BoundsBackwardSparse, n: Int32, first: Constexpr[int], s: cute.Tensor, thread: Int32
    ):
        """The same by the bits of a partial block. Both keys of a thread are in one word of a query's bits."""
        kernel, tiles, params, row = self.kernel, self.kernel.tiles, bounds.params, bounds.tile.row
        lane = cute.arch.lane_idx()
        key = row.block % kernel.parts_of_column * tiles.block_kv + thread // 32 * 16 + lane // 4
        query = n % kernel.parts * tiles.block_q + first + lane % 4 * 2
        words_of_row = kernel.mask_kv // 32
        of_head = row.list // (params.blocks // kernel.parts_of_column)
        bit_block = Int64(of_head) * params.bit_blocks + params.bit_block_of(row, n)
        words = params.bits + (bit_block * (MASK_Q * words_of_row) + (query * words_of_row + key // 32))
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


class BackwardInHalvesSparse(_Masked, BackwardInHalves):
    """The program of one that has scores of half of a block's queries."""
