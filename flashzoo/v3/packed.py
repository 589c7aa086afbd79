"""Packed sequences: both passes of `forward.py` and `backward.py`, and `fp8.py`,
with tiles of many sequences that lie in one tensor.

1. Which block of which sequence a tile is says a table in memory, the longest first; every head of an entry is a tile.
   A kernel before this one makes it: `flashzoo/_triton/packed_kernels.py`. Entries that are no block come last, and
   nothing works on them.
2. One TMA descriptor serves all sequences (`map_of_rows`, ragged): what is past a sequence's last row is outside of its
   tensor, reads as zeros whatever the next sequence holds, and is not written.
3. LSE, delta and dQ's sums have room for each sequence's blocks of queries, from `first_q / block_q` plus the number of
   the sequence on: so it does not depend on the lengths how much that is.

A sequence's tiles are cut from its own first row on, and no choice of tiles knows any length: its bits are the same
whatever it is packed with.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64

from flashzoo._cute.hopper.bounds import Bounds, BoundsBackward
from flashzoo._cute.hopper.params import Params, SequenceInfo
from flashzoo._cute.hopper.tile_scheduler import TileScheduler, WorkTile
from flashzoo.gpu import RAGGED_ROWS
from flashzoo.integers import cdiv
from flashzoo.v3.backward import Backward
from flashzoo.v3.backward_by_gradient import BackwardByGradient
from flashzoo.v3.backward_in_halves import BackwardInHalves
from flashzoo.v3.forward import Forward
from flashzoo.v3.fp8 import ForwardFp8
from flashzoo.v3.traits import ENTRY, KernelBackwardPacked, KernelFp8Packed, KernelPacked

REGISTERS_FP8 = {64: (40, 152)}
"""Where an FP8 kernel's consumers can spare registers for the producer's warpgroup, whose threads have an entry of the
table in theirs: those of each, by width, in place of `fp8.REGISTERS`."""


@dataclass(frozen=True)
class Entry:
    """`Work` of a scheduler: an entry of the table.

    Attributes:
        block: which of its sequence's blocks.
        first_q, rows_q, first_k, rows_k: where the sequence's queries and keys begin, and how many there are.
        owned: rows of the side that is cut into blocks: of keys also those that are not used.
        number: of the sequence.
        entries: how many of the table are blocks.
        tile_idx: number of the tile.
    """

    block: Int32
    first_q: Int32
    rows_q: Int32
    first_k: Int32
    rows_k: Int32
    owned: Int32
    number: Int32
    entries: Int32
    tile_idx: Int32


@dataclass(frozen=True)
class SequencePacked(SequenceInfo):
    """A sequence among others.

    Attributes:
        entry: what the table says of it.
    """

    entry: Entry

    def origin_q(self, row: Int32, head: Int32) -> tuple[Any, ...]:
        """A row of q, out or their gradients, as TMA counts in `map_of_rows`, ragged."""
        return of_ragged(row, head, self.entry.first_q, self.entry.rows_q)

    def origin_k(self, row: Int32, head: Int32) -> tuple[Any, ...]:
        """The same of k or v: of the keys that are used."""
        return of_ragged(row, head, self.entry.first_k, self.entry.rows_k)

    def origin_dk(self, row: Int32, head: Int32) -> tuple[Any, ...]:
        """The same of their gradients: of all keys."""
        return of_ragged(row, head, self.entry.first_k, self.entry.owned)


def of_ragged(row: Int32, head: Int32, first: Int32, rows: Int32) -> tuple[Any, ...]:
    """A row of `rows` that begin at `first`: heads, row, end, back."""
    return head, RAGGED_ROWS - rows + row, first + rows, RAGGED_ROWS


@dataclass(frozen=True)
class PackedTile(WorkTile):
    """A tile, and its entry."""

    entry: Entry


@dataclass(frozen=True)
class PackedTileOfWave(PackedTile):
    """The same, and which wave of tiles it is of."""

    wave: Int32


@dataclass(frozen=True)
class ParamsPacked(Params):
    """The same of packed sequences: `seqlen_q` and `seqlen_k` are rows of q and of k, `blocks` entries of the table.

    Attributes:
        tiles: the table.
    """

    kernel: Constexpr[KernelPacked | KernelFp8Packed | KernelBackwardPacked]
    tiles: cute.Pointer


@dataclass(frozen=True)
class TileSchedulerPacked(TileScheduler):
    """The same with a table."""

    params: ParamsPacked

    def work_of(self, tile_idx: Int32) -> Entry:
        """The work of a number; past the last one, what is read of the last."""
        place = cutlass.min(tile_idx // self.params.heads, self.params.blocks - 1) * ENTRY
        source = cute.make_tensor(self.params.tiles + cute.assume(place, divby=ENTRY), cute.make_layout(ENTRY))
        words = cute.make_rmem_tensor(ENTRY, Int32)
        cute.autovec_copy(source, words)
        return Entry(*[words[i] for i in range(ENTRY)], tile_idx)

    def tiles(self, work: Entry) -> Int32:
        """How many there are: every head of every block."""
        return work.entries * self.params.heads

    def is_valid(self, work: Entry) -> Boolean:
        """Whether it is a tile, and not past the last."""
        return work.tile_idx < self.tiles(work)

    def work_tile(self, work: Entry) -> PackedTile:
        """Which tile it is."""
        return PackedTile(work.block, work.tile_idx % self.params.heads, Int32(0), work)

    def to_smem(self, smem: cute.Tensor, work: Entry) -> None:
        """Write it to shared memory."""
        for i, field in enumerate(fields(Entry)):
            smem[i] = getattr(work, field.name)

    def from_smem(self, smem: cute.Tensor) -> Entry:
        """Read it from there."""
        return Entry(*[smem[i] for i in range(ENTRY + 1)])


class TileSchedulerBackwardPacked(TileSchedulerPacked):
    """The same with tiles of keys, in waves: `flashzoo.v3.swizzle`."""

    def work_tile(self, work: Entry) -> PackedTileOfWave:
        """Which tile it is. A sequence begins with the wave that most of its first tiles would be of, and has waves of
        its own. If it has less than three quarters of one, its tiles begin where those of several sequences end, in no
        order, and all go the same way: they are of wave 0."""
        tile, p = super().work_tile(work), self.params
        place = work.block * p.heads + tile.head  # among those of the sequence
        wave = (work.tile_idx - place + p.wave // 2) // p.wave + place // p.wave
        tiles = cdiv(work.owned, p.kernel.tiles.block_kv) * p.heads
        long = cutlass.min(1, 4 * tiles // (3 * p.wave))
        return PackedTileOfWave(tile.block, tile.head, tile.batch, work, long * wave)


class _OfEntry:
    """What the bounds of both passes take from the table."""

    params: ParamsPacked
    tile: PackedTile

    @property
    def sequence(self) -> SequencePacked:
        """The tile's."""
        entry = self.tile.entry
        return SequencePacked(Int32(0), entry.rows_q, entry.rows_k, entry)

    @cute.jit
    def number_of_sequence(self) -> Int32:
        """The same; where there are no keys the first, as rows around all sequences have neither keys
        nor anything else."""
        entry = self.tile.entry
        return entry.number - 1 if entry.rows_k > 0 else Int32(0)


@dataclass(frozen=True)
class BoundsPacked(_OfEntry, Bounds):
    """A tile's blocks of keys, of its own sequence."""

    def place_of_row(self, head: Int32, position: Int32) -> Int64:
        """Of a query of a head of the tile's, or of the heads packed into it, in the memory of LSE."""
        p, entry = self.params, self.tile.entry
        return (Int64(self.tile.head << p.pack_gqa) + head) * p.seqlen_q + entry.first_q + position


@dataclass(frozen=True)
class BoundsBackwardPacked(_OfEntry, BoundsBackward):
    """A tile's blocks of queries, of its own sequence."""

    @cute.jit
    def block_range(self) -> tuple[Int32, Int32]:
        """First of the blocks of queries that the tile walks, and one past the last: none where no key of its is used,
        and where there are no queries."""
        begin, end = self.visible_blocks()
        first_key = self.tile.block * self.params.kernel.tiles.block_kv
        if self.tile.entry.rows_q == 0 or first_key >= self.tile.entry.rows_k:
            end = begin
        return begin, end

    def walks_any(self, begin: Int32, end: Int32) -> Boolean:
        """Whether the tile walks any block of queries."""
        return begin < end

    def place_of_keys(self) -> Int64:
        """Number of the tile in the memory of parts of dK and dV: the heads of a block side by side."""
        p, entry = self.params, self.tile.entry
        slot = entry.first_k // p.kernel.tiles.block_kv + entry.number + self.tile.block
        return Int64(slot) * p.heads + self.tile.head

    def block_of_queries(self, head: Int32, block: Int32) -> Int64:
        """Number of a block of queries, in the memory of LSE, delta and dQ's sums:
        the heads of a block side by side."""
        p, entry = self.params, self.tile.entry
        slot = entry.first_q // p.kernel.tiles.block_q + entry.number + block
        return Int64(slot) * self.heads_q() + head


class ForwardPacked(Forward):
    """The program of one `KernelPacked`."""

    scheduler: type[TileScheduler] = TileSchedulerPacked
    bounds: type[Bounds] = BoundsPacked
    scheduler_warp: bool = True


class ForwardFp8Packed(ForwardFp8):
    """The program of a `KernelFp8Packed`. No warp is left to look up tiles: those beside the producer transpose V."""

    scheduler: type[TileScheduler] = TileSchedulerPacked
    bounds: type[Bounds] = BoundsPacked

    def __init__(self, kernel: KernelFp8Packed) -> None:
        super().__init__(kernel)
        self.registers = REGISTERS_FP8.get(kernel.width, self.registers)


class BackwardPacked(Backward):
    """The program of a `KernelBackwardPacked`."""

    scheduler: type[TileScheduler] = TileSchedulerBackwardPacked
    bounds: type[BoundsBackward] = BoundsBackwardPacked


class BackwardByGradientPacked(BackwardByGradient):
    """The program of one whose tiles are cut by gradient."""

    scheduler: type[TileScheduler] = TileSchedulerBackwardPacked
    bounds: type[BoundsBackward] = BoundsBackwardPacked


class BackwardInHalvesPacked(BackwardInHalves):
    """The program of one that has scores of half of a block's queries."""

    scheduler: type[TileScheduler] = TileSchedulerBackwardPacked
    bounds: type[BoundsBackward] = BoundsBackwardPacked
