"""Which tile a thread block works on next: persistent thread blocks, a counter, LPT order, an L2 swizzle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.pipeline import Pipeline

CLAIMED_AT_ONCE = 8
"""Steps of a tile, up to which the next is claimed when it begins, so that its loads can follow these. Who has a longer
one claims at its end: at its beginning it would have claimed another behind it while others run out of tiles."""


@dataclass(frozen=True)
class WorkTile:
    """A tile: a block of queries of one query head, or, in the backward pass, of keys of one key/value head."""

    block: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class TileOfWave(WorkTile):
    """A tile, and which wave of tiles it is of."""

    wave: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Tiles are numbered in the order in which they begin; `Work` is what one warp tells the others of the next:
    here its number.

    Attributes:
        params: the launch's.
        first: in shared memory the number of a thread block's first tile, where that is claimed as the others are: all
            before it have begun then, and it may wait for them though not all thread blocks run at a time. Without it
            the first tile's number is the thread block's.
    """

    params: Params
    first: cute.Tensor | None = None

    def initial_work(self) -> Any:
        """The work that a thread block begins with."""
        return self.work_of(cute.arch.block_idx()[0] if self.first is None else self.first[0])

    @cute.jit
    def claim_first(self):
        """Claim it, by a whole warp; all threads of the thread block must be synchronised before they ask for it."""
        number = self.claimed(self.claim_next(self.work_of(cute.arch.block_idx()[0])))
        with cute.arch.elect_one():
            self.first[0] = number

    def work_of(self, tile_idx: Int32) -> Int32:
        """The work of a number."""
        return tile_idx

    def tiles(self, work: Int32) -> Int32:
        """How many there are, told by any work."""
        return self.blocks() * self.params.batch_heads

    def blocks(self) -> Int32:
        """How many of one head."""
        return self.params.blocks

    def is_valid(self, work: Int32) -> Boolean:
        """Whether it is a tile, and not past the last."""
        return work < self.tiles(work)

    def work_tile(self, work: Int32) -> WorkTile:
        """Which tile it is."""
        rank, head, batch = self.coordinates(work)
        return WorkTile(self.block_of(rank), head, batch)

    def to_smem(self, smem: cute.Tensor, work: Int32) -> None:
        """Write it to shared memory."""
        smem[0] = work

    def from_smem(self, smem: cute.Tensor) -> Int32:
        """Read it from there."""
        return smem[0]

    def fetch_next(self, work: Any) -> Int32:
        """The number of the next tile that no thread block has, behind this work; to be called by a whole warp."""
        return self.claimed(self.claim_next(work))

    @cute.jit
    def claim_next(self, work: Any) -> Int32:
        """Claim that tile; `claimed` tells its number. What is done between the two runs while the counter answers.

        Every team begins with a tile of its own and claims one for each tile it works on. That makes as many claims as
        there are tiles, and, where the first is claimed too, one for each team more. The counter wraps to 0 at exactly
        that many: it is ready for the next launch.
        """
        fetched = Int32(0)
        if self.claims():
            fetched = self.ask_counter(
                self.tiles(work) if const_expr(self.first is None) else self.tiles(work) + self.begun()
            )
        return fetched

    def ask_counter(self, claims: Int32) -> Int32:
        """How many have claimed before, of so many that will."""
        return cute.arch.inline_ptx(
            "atom.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int32],
            read_only_args=[self.params.counter, claims - 1],
        )

    def begun(self) -> Int32:
        """How many tiles begin a thread block's work: one for each team."""
        return cute.arch.grid_dim()[0] * self.params.kernel.teams

    def claims(self) -> Boolean:
        """Whether this lane is the one of its warp that claims."""
        return cute.arch.lane_idx() == 0

    def claimed(self, fetched: Int32) -> Int32:
        """The number of the tile that a warp has claimed."""
        number = cute.arch.shuffle_sync(fetched, 0)
        return number if self.first is not None else self.begun() + number

    @cute.jit
    def publish_claimed(self, smem: cute.Tensor, pipeline: Pipeline, n: Int32, fetched: Int32) -> Any:
        """Tell all warps that work on the n-th tile which has been claimed behind it, the caller among them; by a whole
        warp."""
        work = self.work_of(self.claimed(fetched))
        self.publish(smem, pipeline, n, work)
        return work

    @cute.jit
    def publish(self, smem: cute.Tensor, pipeline: Pipeline, n: Int32, work: Any):
        """Tell all warps that work on the n-th tile which is next; by a whole warp."""
        pipeline.producer_acquire(n)
        with cute.arch.elect_one():
            self.to_smem(smem, work)
            cute.arch.mbarrier_arrive(pipeline.full)

    @cute.jit
    def next_work(self, smem: cute.Tensor, pipeline: Pipeline, n: Int32) -> Any:
        """What was published; by a whole warp."""
        pipeline.consumer_wait(n)
        work = self.from_smem(smem)
        cute.arch.sync_warp()  # every lane has read it
        pipeline.consumer_release(n)
        return work

    def coordinates(self, tile_idx: Int32) -> tuple[Int32, Int32, Int32]:
        """`(rank, head, batch)` of the tile of a number: it is the rank-th of its head to begin.

        `l2_swizzle` heads at a time (of all batches): first the first tile of each of them, then the second of each.
        """
        p = self.params
        tiles_of_section = p.l2_swizzle * self.blocks()
        section = tile_idx // tiles_of_section
        first_head = section * p.l2_swizzle
        heads_here = cutlass.min(p.l2_swizzle, p.batch_heads - first_head)
        place = tile_idx - section * tiles_of_section
        rank = place // heads_here
        batch_head = first_head + place - rank * heads_here
        batch = batch_head // p.heads
        return rank, batch_head - batch * p.heads, batch

    def block_of(self, rank: Int32) -> Int32:
        """The rank-th block of its head to begin: LPT order, as under a causal mask the last queries
        see the most keys."""
        return self.params.blocks - 1 - rank


@dataclass(frozen=True)
class TileSchedulerBackward(TileScheduler):
    """The same, with tiles of keys."""

    def block_of(self, rank: Int32) -> Int32:
        """LPT order: under a causal mask the first keys are seen by the most queries."""
        return rank

    def work_tile(self, work: Int32) -> TileOfWave:
        """Which tile it is."""
        rank, head, batch = self.coordinates(work)
        return TileOfWave(self.block_of(rank), head, batch, work // cutlass.max(1, self.params.wave))
