"""Which tile a thread block works on next, and which keys the tile's rows see. With a block mask both are in its lists: `sparse.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64, const_expr

from flashzoo.gpu import WARPGROUP_ROWS

Bounds = tuple[tuple[Int32, Int32], tuple[Int32, Int32]]

NEVER = 1 << 30
"""A query that there is not: of a key past the last one the first that sees it."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of keys, `begin <= n < end`; those `left <= n < right` among them need no mask."""

    begin: Int32
    left: Int32
    right: Int32
    end: Int32


@dataclass(frozen=True)
class TileScheduler:
    """The problem as the kernel sees it, and how its tiles are handed out.

    A row is a query of one head, or, where `2^pack` heads of a key/value head share a tile, row `(position << pack) + head`.

    Attributes:
        kernel: what is compiled.
        seqlen_q, seqlen_k: lengths.
        heads: query heads, packed ones counted once.
        group: of those, how many share a key/value head.
        pack: exponent of how many heads are packed.
        window_left, window_right: how many keys either side of the diagonal a query sees, where the kernel has that bound.
        blocks: tiles of one head.
        batch_heads: batch times heads.
        heads_in_section: heads whose K and V fit in L2 together.
        counter: one zero in memory, for this launch alone until it ends.
    """

    kernel: Constexpr[Any]
    seqlen_q: Int32
    seqlen_k: Int32
    heads: Int32
    group: Int32
    pack: Int32
    window_left: Int32
    window_right: Int32
    blocks: Int32
    batch_heads: Int32
    heads_in_section: Int32
    counter: cute.Pointer

    # What stands for a tile is the schedule's own affair: `first` and `described` make it, `tell` and `told` hand it on, and who
    # works on it gives it back unread. Here it is the tile's number.

    def first(self) -> Int32:
        """The tile that a thread block begins with."""
        return cute.arch.block_idx()[0]

    def described(self, number: Int32) -> Int32:
        """The tile of a number; the producer's to make, and early."""
        return number

    def tell(self, slot: cute.Tensor, tile: Int32) -> None:
        """Hand a tile over through shared memory."""
        slot[0] = tile

    def told(self, slot: cute.Tensor) -> Int32:
        """The tile that was handed over."""
        return slot[0]

    def exists(self, tile: Int32) -> Boolean:
        """Whether a tile is one, and not past the last."""
        return tile < self.blocks * self.batch_heads

    @cute.jit
    def fetch(self) -> Int32:
        """The number of the next tile that no block has taken; to be called by a whole warp.

        Every team starts at a tile of its own and fetches once for each tile it works on. That makes as many
        fetches as there are tiles, and the counter wraps to 0 at exactly that many: it is ready for the next launch.
        """
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.inline_ptx(
                "atom.global.inc.u32 {$w0}, [{$r0}], {$r1};",
                write_only_types=[Int32],
                read_only_args=[self.counter, self.blocks * self.batch_heads - 1],
            )
        return cute.arch.grid_dim()[0] * self.kernel.teams + cute.arch.shuffle_sync(taken, 0)

    @cute.jit
    def place(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """`(block of queries, head, batch)` of a tile."""
        rank, head, batch = self.rank_of(tile)
        return self.block_of(rank), head, batch

    def rank_of(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """The how-manieth of its head a tile is to be handed out, head, batch.

        Section by section of heads, and within a section the last queries first: under a causal mask they see the most
        keys, and short tiles at the end leave no block working alone.
        """
        tiles_in_section = self.heads_in_section * self.blocks
        section = number // tiles_in_section
        first_head = section * self.heads_in_section
        heads_here = cutlass.min(self.heads_in_section, self.batch_heads - first_head)
        place = number - section * tiles_in_section
        rank = place // heads_here
        batch_head = first_head + place - rank * heads_here
        batch = batch_head // self.heads
        return rank, batch_head - batch * self.heads, batch

    def block_of(self, rank: Int32) -> Int32:
        """The block that is the rank-th of its head to be handed out."""
        return self.blocks - 1 - rank

    def extent(self, tile: Int32, block: Int32) -> tuple[Int32, Int32]:
        """First of what a tile walks, and one past the last: here blocks of keys, from the last to the first. With a block mask they are
        places in its list."""
        return self.blocks_of_tile(block)

    def first_key(self, tile: Int32, n: Int32) -> Int32:
        """Where the n-th block of keys that a tile walks begins."""
        return n * self.kernel.tiles.block_kv

    @cute.jit
    def blocks_of_tile(self, block: Int32) -> tuple[Int32, Int32]:
        """First block of keys that some row of the tile sees, and one past the last.

        At least one block, which is masked where no row sees any: tiles that see nothing are no special case.
        """
        tiles = self.kernel.tiles
        begin, keys = Int32(0), self.seqlen_k
        if const_expr(self.kernel.right):
            last = ((block + 1) * tiles.block_q - 1) >> self.pack
            keys = cutlass.min(keys, self.diagonal(last) + self.window_right + 1)
        if const_expr(self.kernel.left):
            first = (block * tiles.block_q) >> self.pack
            begin = cutlass.max(0, self.diagonal(first) - self.window_left) // tiles.block_kv
        return begin, cutlass.max(begin + 1, (keys + tiles.block_kv - 1) // tiles.block_kv)

    @cute.jit
    def blocks_of_rows(self, first_row: Int32, begin: Int32, end: Int32) -> Blocks:
        """Of the tile's blocks, those that a warpgroup's own 64 rows see."""
        size = self.kernel.tiles.block_kv
        first, last = first_row >> self.pack, (first_row + WARPGROUP_ROWS - 1) >> self.pack
        if first >= self.seqlen_q:  # past the last query: the one block that no warpgroup does without
            end = begin + 1
        right = self.seqlen_k // size
        if const_expr(self.kernel.right):
            end = cutlass.max(begin + 1, cutlass.min(end, (self.diagonal(last) + self.window_right + size) // size))
            right = cutlass.min(right, cutlass.max(0, self.diagonal(first) + self.window_right + 1) // size)
        left = begin
        if const_expr(self.kernel.left):
            begin = cutlass.max(begin, cutlass.min(end - 1, (self.diagonal(first) - self.window_left) // size))
            left = cutlass.max(begin, (self.diagonal(last) - self.window_left + size - 1) // size)
        right = cutlass.max(begin, cutlass.min(right, end))
        return Blocks(begin, cutlass.min(left, right), right, end)

    @cute.jit
    def bounds(self, row: Int32, column: Int32) -> Bounds:
        """Of the two rows of a thread, the first visible key and one past the last, counted from its first column."""
        bounds = []
        for r in cutlass.range_constexpr(2):
            diagonal = self.diagonal((row + 8 * r) >> self.pack)
            lowest, highest = Int32(0), self.seqlen_k
            if const_expr(self.kernel.right):
                highest = cutlass.min(highest, diagonal + self.window_right + 1)
            if const_expr(self.kernel.left):
                lowest = diagonal - self.window_left
            bounds.append((lowest - column, highest - column))
        return tuple(bounds)

    def diagonal(self, position: Int32) -> Int32:
        """The key that a query is aligned with: the last query with the last key."""
        return position + self.seqlen_k - self.seqlen_q


@dataclass(frozen=True)
class TileSchedulerBackward(TileScheduler):
    """The same for the backward pass, whose tiles are blocks of keys, each with all queries that see it.

    `heads` are key/value heads, each with the queries of `group` heads; no heads are packed.
    """

    def block_of(self, rank: Int32) -> Int32:
        """Under a causal mask the first keys are seen by the most queries, and go first."""
        return rank

    @cute.jit
    def blocks_of_tile(self, block: Int32) -> tuple[Int32, Int32]:
        """First block of queries, some of which see some of the tile's keys, and one past the last.

        At least one block, which is masked where no query sees any: tiles that nothing sees are no special case.
        """
        tiles = self.kernel.tiles
        first_key, last_key = block * tiles.block_kv, (block + 1) * tiles.block_kv - 1
        begin, queries = Int32(0), self.seqlen_q
        if const_expr(self.kernel.right):
            first = cutlass.min(first_key - self.window_right - self.diagonal(0), self.seqlen_q - 1)
            begin = cutlass.max(0, first) // tiles.block_q
        if const_expr(self.kernel.left):
            queries = cutlass.min(queries, last_key + self.window_left - self.diagonal(0) + 1)
        return begin, cutlass.max(begin + 1, (queries + tiles.block_q - 1) // tiles.block_q)

    def walks(self, begin: Int32, end: Int32) -> bool | Boolean:
        """Whether a tile walks any block of queries."""
        return True

    def nth(self, i: Int32, begin: Int32, end: Int32) -> Int32:
        """Which of the blocks of queries that a tile walks it takes i-th of one head.

        Deterministic, the last block first: all tiles see it that see any, and so from their first step on each follows the one before.
        In the other order, under a causal mask, each would catch up with the one before and wait for it in every step.
        """
        return end - 1 - i if const_expr(self.kernel.deterministic) else begin + i

    @cute.jit
    def step(self, step: Int32, begin: Int32, end: Int32, head_kv: Int32) -> tuple[Int32, Int32]:
        """Query head and which of its blocks, of a step of a tile: all blocks of one head, then of the next that shares the keys."""
        head = step // (end - begin)
        return head_kv * self.group + head, self.nth(step - head * (end - begin), begin, end)

    def block_q(self, tile: Any, n: Int32) -> Int32:
        """The n-th block of queries that a tile walks."""
        return n

    @cute.jit
    def adds_before(self, block: Int32, block_q: Int32) -> Int32:
        """How many blocks of keys add to dQ of a block of queries before this one; `NEVER` where it does not, as nothing is seen.

        They add in the order in which they are handed out, so that none waits for one that has not begun.
        """
        tiles = self.kernel.tiles
        first_query, last_query = block_q * tiles.block_q, (block_q + 1) * tiles.block_q - 1
        first, sees = Int32(0), True
        if const_expr(self.kernel.left):
            first = cutlass.max(0, self.diagonal(first_query) - self.window_left) // tiles.block_kv
            sees = block >= first
        if const_expr(self.kernel.right):
            sees = sees and block * tiles.block_kv <= self.diagonal(last_query) + self.window_right
        return block - first if sees else Int32(NEVER)

    @cute.jit
    def crosses(self, tile: Any, first_key: Int32, n: Int32) -> Boolean:
        """Whether some of a warpgroup's keys are not seen by some queries of the n-th block."""
        tiles = self.kernel.tiles
        first_query = n * tiles.block_q
        last_key = first_key + WARPGROUP_ROWS - 1
        crosses = last_key >= self.seqlen_k
        if const_expr(self.kernel.right):
            crosses = crosses or last_key > self.diagonal(first_query) + self.window_right
        if const_expr(self.kernel.left):
            crosses = crosses or first_key < self.diagonal(first_query + tiles.block_q - 1) - self.window_left
        return crosses

    def bounds(self, row: Int32, column: Int32) -> Bounds:
        """Of a thread's two keys, the first query that sees it and one past the last, counted from the thread's first column."""
        return self.bounds_of(row, column), self.bounds_of(row + 8, column)

    @cute.jit
    def bounds_of(self, key: Int32, column: Int32) -> tuple[Int32, Int32]:
        """The same of one key."""
        lowest, highest = Int32(0), self.seqlen_q
        if const_expr(self.kernel.right):
            lowest = key - self.window_right - self.diagonal(0)
        if const_expr(self.kernel.left):
            highest = key + self.window_left - self.diagonal(0) + 1
        lowest = lowest if key < self.seqlen_k else Int32(NEVER)
        return lowest - column, highest - column

    @cute.jit
    def block_of_queries(self, head: Int32, block: Int32, batch: Int32) -> Int64:
        """Number of a block of queries among those of all heads."""
        return (Int64(batch) * self.heads * self.group + head) * self.kernel.blocks_q(self.seqlen_q) + block
