"""Which blocks a tile walks, and which scores of them are visible. With a block mask the blocks are in its lists:
`v3/sparse.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from flashzoo._cute.hopper.params import Params, SequenceInfo
from flashzoo._cute.hopper.tile_scheduler import WorkTile
from flashzoo.gpu import WARPGROUP_ROWS

ThreadBounds: TypeAlias = tuple[tuple[Int32, Int32], tuple[Int32, Int32]]
"""Of a thread's two rows of scores, the first visible column and one past the last, counted from the
thread's first column."""

STAGGERED = 4
"""Tiles of a head that begin at blocks of queries of their own."""

NEVER = 1 << 30
"""A row of scores that sees no column has its first visible one here."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of keys, `begin <= n < end`; those `left <= n < right` among them need no mask."""

    begin: Int32
    left: Int32
    right: Int32
    end: Int32


@dataclass(frozen=True)
class Bounds:
    """A tile's blocks of keys, and the keys that its rows see.

    A row is a query of one head, or, where `2^pack_gqa` heads share a tile, row `(position << pack_gqa) + head`.
    """

    params: Params
    tile: WorkTile

    @property
    def sequence(self) -> SequenceInfo:
        """The tile's."""
        return self.params.sequence(self.tile.batch)

    def number_of_sequence(self) -> Int32:
        """The tile's sequence, as an index of what each has one of."""
        return self.tile.batch

    def place_of_row(self, head: Int32, position: Int32) -> Int64:
        """Of a query of a head of the tile's, or of the heads packed into it, in the memory of LSE."""
        p, sequence = self.params, self.sequence
        of_head = ((Int64(sequence.batch) * p.heads + self.tile.head) << p.pack_gqa) + head
        return of_head * sequence.seqlen_q + position

    def block_range(self) -> tuple[Int32, Int32]:
        """First of the blocks that the tile walks, and one past the last.
        Keys are walked from the last block to the first."""
        return self.visible_blocks()

    def first_key(self, n: Int32) -> Int32:
        """Where the n-th block of keys begins."""
        return n * self.params.kernel.tiles.block_kv

    @cute.jit
    def visible_blocks(self) -> tuple[Int32, Int32]:
        """First block of keys that some row of the tile sees, and one past the last.

        At least one block, which is masked where no row sees any: tiles that see nothing are no special case.
        """
        p, sequence, tiles = self.params, self.sequence, self.params.kernel.tiles
        begin, keys = Int32(0), sequence.seqlen_k
        if const_expr(p.kernel.right):
            last = ((self.tile.block + 1) * tiles.block_q - 1) >> p.pack_gqa
            keys = cutlass.min(keys, sequence.diagonal(last) + p.window_right + 1)
        if const_expr(p.kernel.left):
            first = (self.tile.block * tiles.block_q) >> p.pack_gqa
            begin = cutlass.max(0, sequence.diagonal(first) - p.window_left) // tiles.block_kv
        return begin, cutlass.max(begin + 1, (keys + tiles.block_kv - 1) // tiles.block_kv)

    @cute.jit
    def blocks_of_rows(self, first_row: Int32, begin: Int32, end: Int32) -> Blocks:
        """Of the tile's blocks, those that a warpgroup's own 64 rows see."""
        p, sequence, size = self.params, self.sequence, self.params.kernel.tiles.block_kv
        first, last = first_row >> p.pack_gqa, (first_row + WARPGROUP_ROWS - 1) >> p.pack_gqa
        if first >= sequence.seqlen_q:  # past the last query: the one block that no warpgroup does without
            end = begin + 1
        right = sequence.seqlen_k // size
        if const_expr(p.kernel.right):
            end = cutlass.max(begin + 1, cutlass.min(end, (sequence.diagonal(last) + p.window_right + size) // size))
            right = cutlass.min(right, cutlass.max(0, sequence.diagonal(first) + p.window_right + 1) // size)
        left = begin
        if const_expr(p.kernel.left):
            begin = cutlass.max(begin, cutlass.min(end - 1, (sequence.diagonal(first) - p.window_left) // size))
            left = cutlass.max(begin, (sequence.diagonal(last) - p.window_left + size - 1) // size)
        right = cutlass.max(begin, cutlass.min(right, end))
        return Blocks(begin, cutlass.min(left, right), right, end)

    @cute.jit
    def of_thread(self, row: Int32, column: Int32) -> ThreadBounds:
        """The keys that rows `row` and `row + 8` see, for the thread that has them from `column` on."""
        p, sequence, bounds = self.params, self.sequence, []
        for r in cutlass.range_constexpr(2):
            diagonal = sequence.diagonal((row + 8 * r) >> p.pack_gqa)
            lowest, highest = Int32(0), sequence.seqlen_k
            if const_expr(p.kernel.right):
                highest = cutlass.min(highest, diagonal + p.window_right + 1)
            if const_expr(p.kernel.left):
                lowest = diagonal - p.window_left
            bounds.append((lowest - column, highest - column))
        return tuple(bounds)


@dataclass(frozen=True)
class BoundsBackward(Bounds):
    """A tile's blocks of queries, and the queries that see its keys. No heads are packed."""

    def head_kv(self) -> Int32:
        """The tile's key/value head."""
        p, head = self.params, self.tile.head
        return head // p.splits if const_expr(p.kernel.split_queries) else head

    def block_range(self) -> tuple[Int32, Int32]:
        """First of the blocks of queries that the tile walks, and one past the last: its share of them."""
        begin, end = self.visible_blocks()
        p = self.params
        if const_expr(p.kernel.split_queries and not (p.kernel.left or p.kernel.right)):
            share, blocks = self.tile.head % p.query_splits, end - begin
            begin, end = (begin + (share + i) * blocks // p.query_splits for i in range(2))
        return begin, end

    @cute.jit
    def heads(self) -> tuple[Int32, Int32]:
        """The first of the tile's query heads, and how many there are."""
        p = self.params
        first, heads = self.tile.head * p.group, p.group
        if const_expr(p.kernel.split_queries):
            of_group = self.tile.head % p.splits // p.query_splits * p.group
            first, heads = self.head_kv() * p.group_kv + of_group, cutlass.min(p.group, p.group_kv - of_group)
        return first, heads

    def steps(self, begin: Int32, end: Int32) -> Int32:
        """How many steps the tile has: blocks of all its query heads."""
        return self.heads()[1] * (end - begin)

    def heads_q(self) -> Int32:
        """Query heads of a sequence."""
        p = self.params
        return p.heads // p.splits * p.group_kv if const_expr(p.kernel.split_queries) else p.heads * p.group

    def keys(self) -> tuple[Int32, Int32]:
        """First and last of the keys whose queries the tile walks: its own."""
        size = self.params.kernel.tiles.block_kv
        return self.tile.block * size, (self.tile.block + 1) * size - 1

    def rank(self) -> Int32:
        """Which of its head's tiles it is, of those that walk blocks of queries in an order of their own."""
        return self.tile.block

    def place_of_keys(self) -> Int64:
        """Number of the tile among all tiles, in the memory of parts of dK and dV."""
        p, tile = self.params, self.tile
        return (Int64(tile.batch) * p.heads + tile.head) * p.blocks + tile.block

    @cute.jit
    def visible_blocks(self) -> tuple[Int32, Int32]:
        """First block of queries, some of which see some of the tile's keys, and one past the last.

        At least one block, which is masked where no query sees any: tiles that nothing sees are no special case.
        """
        p, sequence, tiles = self.params, self.sequence, self.params.kernel.tiles
        first_key, last_key = self.keys()
        begin, queries = Int32(0), sequence.seqlen_q
        if const_expr(p.kernel.right):
            first = cutlass.min(first_key - p.window_right - sequence.diagonal(0), sequence.seqlen_q - 1)
            begin = cutlass.max(0, first) // tiles.block_q
        if const_expr(p.kernel.left):
            queries = cutlass.min(queries, last_key + p.window_left - sequence.diagonal(0) + 1)
        return begin, cutlass.max(begin + 1, (queries + tiles.block_q - 1) // tiles.block_q)

    def walks_any(self, begin: Int32, end: Int32) -> bool | Boolean:
        """Whether the tile walks any block of queries."""
        return True

    @cute.jit
    def nth(self, i: Int32, begin: Int32, end: Int32) -> Int32:
        """Which of a head's blocks the tile takes i-th.

        Without a mask tiles of one head would be at the same block at the same time, and add to the same sums: each of
        STAGGERED begins a block later than the one before it, and ends with those that it has left out.

        Under a causal mask, and deterministic, the last block first: all tiles see it that see any. So those that run
        together read the same blocks at the same time; and where they add in order each follows the one before from its
        first step on. In the other order, each would catch up with the one before and wait for it in every step. Where
        they need not, each second wave of tiles goes the other way, and of tiles of one head each does
        (`flashzoo.v3.swizzle`).
        """
        kernel = self.params.kernel
        if const_expr(kernel.staggered):
            blocks = end - begin
            i += self.rank() % STAGGERED if blocks > STAGGERED else 0
            i = i - blocks if i >= blocks else i
        if const_expr(kernel.deterministic):
            return end - 1 - i
        if const_expr(kernel.uneven):
            return begin + i if self.ascends() else end - 1 - i
        return begin + i

    def ascends(self) -> bool | Boolean:
        """Whether the tile walks its blocks from its diagonal on, and not from the last block back."""
        return (self.params.wave == 0) | (self.tile.wave % 2 == 1)

    @cute.jit
    def step(self, step: Int32, begin: Int32, end: Int32) -> tuple[Int32, Int32]:
        """Query head and which of its blocks, of a step of the tile:
        all blocks of one head, then of the next that shares the keys.

        Under a causal mask one block of all those heads, then the next: tiles that have fewer blocks would be at other
        heads than others after the first.
        """
        (first, heads), blocks = self.heads(), end - begin
        if const_expr(self.params.kernel.uneven):
            i = step // heads
            head = step - i * heads
        else:
            head = step // blocks
            i = step - head * blocks
        return first + head, self.nth(i, begin, end)

    def block_q(self, n: Int32) -> Int32:
        """Which block of queries the tile's n-th is."""
        return n

    @cute.jit
    def adds_before(self, block_q: Int32) -> Int32:
        """How many tiles add to dQ of a block of queries before this one;
        `NEVER` where this one does not, as nothing is seen.

        They add in the order in which they begin, so that none waits for one that has not begun.
        """
        p, sequence, tiles, block = self.params, self.sequence, self.params.kernel.tiles, self.tile.block
        first_query, last_query = block_q * tiles.block_q, (block_q + 1) * tiles.block_q - 1
        first, sees = Int32(0), True
        if const_expr(p.kernel.left):
            first = cutlass.max(0, sequence.diagonal(first_query) - p.window_left) // tiles.block_kv
            sees = block >= first
        if const_expr(p.kernel.right):
            sees = sees and block * tiles.block_kv <= sequence.diagonal(last_query) + p.window_right
        return block - first if sees else Int32(NEVER)

    @cute.jit
    def crosses(self, first_key: Int32, n: Int32) -> Boolean:
        """Whether some of a warpgroup's keys are not seen by some queries of the tile's n-th block."""
        p, sequence, tiles = self.params, self.sequence, self.params.kernel.tiles
        first_query = n * tiles.block_q
        last_key = first_key + WARPGROUP_ROWS - 1
        crosses = last_key >= sequence.seqlen_k
        if const_expr(p.kernel.right):
            crosses = crosses or last_key > sequence.diagonal(first_query) + p.window_right
        if const_expr(p.kernel.left):
            crosses = crosses or first_key < sequence.diagonal(first_query + tiles.block_q - 1) - p.window_left
        return crosses

    def of_thread(self, row: Int32, column: Int32) -> ThreadBounds:
        """The queries that see keys `row` and `row + 8`, for the thread that has them from `column` on."""
        return self.of_key(row, column), self.of_key(row + 8, column)

    @cute.jit
    def of_key(self, key: Int32, column: Int32) -> tuple[Int32, Int32]:
        """The same of one key."""
        p, sequence = self.params, self.sequence
        lowest, highest = Int32(0), sequence.seqlen_q
        if const_expr(p.kernel.right):
            lowest = key - p.window_right - sequence.diagonal(0)
        if const_expr(p.kernel.left):
            highest = key + p.window_left - sequence.diagonal(0) + 1
        lowest = lowest if key < sequence.seqlen_k else Int32(NEVER)
        return lowest - column, highest - column

    @cute.jit
    def block_of_queries(self, head: Int32, block: Int32) -> Int64:
        """Number of a block of queries among those of all heads, in the memory of LSE, delta and dQ's sums."""
        p, sequence = self.params, self.sequence
        of_batch = Int64(sequence.batch) * self.heads_q()
        return (of_batch + head) * p.kernel.blocks_q(sequence.seqlen_q) + block
