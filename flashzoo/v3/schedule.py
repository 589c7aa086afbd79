"""Which tile a thread block works on next, and which keys the tile's rows see."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from flashzoo.v3.config import WARPGROUP_ROWS, Kernel

Bounds = tuple[tuple[Int32, Int32], tuple[Int32, Int32]]


@dataclass(frozen=True)
class Blocks:
    """Blocks of keys, `begin <= n < end`; those `left <= n < right` among them need no mask."""

    begin: Int32
    left: Int32
    right: Int32
    end: Int32


@dataclass(frozen=True)
class Schedule:
    """The problem as the kernel sees it, and how its tiles are handed out.

    A row is a query of one head, or, where `2^pack` heads of a key/value head share a tile, row `(position << pack) + head`.

    Attributes:
        kernel: what is compiled.
        seqlen_q, seqlen_k: lengths.
        heads: query heads, packed ones counted once.
        group: of those, how many share a key/value head.
        pack: exponent of how many heads are packed.
        window_left, window_right: how many keys either side of the diagonal a query sees, where the kernel has that bound.
        blocks_q: tiles of one head.
        batch_heads: batch times heads.
        heads_in_section: heads whose K and V fit in L2 together.
        counter: one zero in memory, for this launch alone until it ends.
    """

    kernel: Constexpr[Kernel]
    seqlen_q: Int32
    seqlen_k: Int32
    heads: Int32
    group: Int32
    pack: Int32
    window_left: Int32
    window_right: Int32
    blocks_q: Int32
    batch_heads: Int32
    heads_in_section: Int32
    counter: cute.Pointer

    def exists(self, tile: Int32):
        """Whether a tile is one, and not past the last."""
        return tile < self.blocks_q * self.batch_heads

    @cute.jit
    def fetch(self) -> Int32:
        """The next tile that no block has taken; to be called by a whole warp.

        Every block starts at the tile of its own number and fetches once for each tile it works on. That makes as many
        fetches as there are tiles, and the counter wraps to 0 at exactly that many: it is ready for the next launch.
        """
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.inline_ptx(
                "atom.global.inc.u32 {$w0}, [{$r0}], {$r1};",
                write_only_types=[Int32],
                read_only_args=[self.counter, self.blocks_q * self.batch_heads - 1],
            )
        return cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(taken, 0)

    @cute.jit
    def place(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """`(block of queries, head, batch)` of a tile.

        Section by section of heads, and within a section the last queries first: under a causal mask they see the most
        keys, and short tiles at the end leave no block working alone.
        """
        tiles_in_section = self.heads_in_section * self.blocks_q
        section = tile // tiles_in_section
        first_head = section * self.heads_in_section
        heads_here = cutlass.min(self.heads_in_section, self.batch_heads - first_head)
        place = tile - section * tiles_in_section
        rank = place // heads_here
        batch_head = first_head + place - rank * heads_here
        batch = batch_head // self.heads
        return self.blocks_q - 1 - rank, batch_head - batch * self.heads, batch

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
