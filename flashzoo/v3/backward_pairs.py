"""The backward pass by gradient, thread blocks in pairs: what it takes from L2 is its limit, and a pair takes Q and dO
once for both.

1. A pair is a cluster. Its tiles are two neighbouring blocks of keys of one head, and both walk the blocks of queries
   that see keys of either, in one order. What only the other sees is masked; past the last block of keys all is.
2. Each producer reads half of the rows of Q and dO, and TMA writes them to the shared memory of both. A stage is full
   when both halves have arrived, and is filled again when the consumers of both have read it.
3. One of the pair claims tiles, for both, and writes the number to the shared memory of both.
4. Neither ends before the other: until then that one arrives at its mbarriers.

Keys, values and the sums of dQ are each thread block's own, and so are LSE and delta, which are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flashzoo._cute.hopper.bounds import BoundsBackward
from flashzoo._cute.hopper.opaque import opaque
from flashzoo._cute.hopper.pipeline import PipelineOfPair
from flashzoo._cute.hopper.tile_scheduler import TileScheduler, TileSchedulerBackward, WorkTile
from flashzoo.v3.backward_by_gradient import BackwardByGradient
from flashzoo.v3.traits import KernelBackwardPairs

CLAIMS = 0
"""The thread block of a pair that claims tiles."""


@dataclass(frozen=True)
class TileSchedulerPairs(TileSchedulerBackward):
    """The same; what is numbered is pairs of tiles."""

    def initial_work(self) -> Int32:
        """The pair that a pair of thread blocks begins with."""
        return cute.arch.block_idx()[0] // 2

    def blocks(self) -> Int32:
        """Pairs of tiles of a head; opaque, as the producer has no register to keep what is made of it."""
        return opaque(self.params.blocks) >> 1

    def work_tile(self, work: Int32) -> WorkTile:
        """This thread block's tile of a pair."""
        rank, head, batch = self.coordinates(work)
        return WorkTile(2 * self.block_of(rank) + cute.arch.block_idx_in_cluster(), head, batch)

    def claims(self) -> Boolean:
        """The same, in one of the thread blocks."""
        return (cute.arch.lane_idx() == 0) & (cute.arch.block_idx_in_cluster() == CLAIMS)

    def claimed(self, fetched: Int32) -> Int32:
        """The number of the pair that a warp has claimed."""
        return cute.arch.grid_dim()[0] // 2 + cute.arch.shuffle_sync(fetched, 0)

    @cute.jit
    def publish_claimed(self, smem: cute.Tensor, pipeline: PipelineOfPair, n: Int32, fetched: Int32) -> Any:
        """The same in both thread blocks, where the caller reads what was claimed as all others do."""
        pair = self.claimed(fetched)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(pipeline.full, 4)
        if cute.arch.block_idx_in_cluster() == CLAIMS:
            pipeline.producer_acquire(n)
            with cute.arch.elect_one():
                for thread_block in cutlass.range_constexpr(2):
                    cute.arch.store_async_dsmem(smem.iterator, pair, pipeline.full, thread_block)
        return self.next_work(smem, pipeline, n)


@dataclass(frozen=True)
class BoundsPairs(BoundsBackward):
    """What both tiles of a pair walk, and what sees the keys of one."""

    def rank(self) -> Int32:
        """Which of its head's pairs it is."""
        return self.tile.block // 2

    def keys(self) -> tuple[Int32, Int32]:
        """First and last of the pair's keys."""
        size = 2 * self.params.kernel.tiles.block_kv
        return self.rank() * size, (self.rank() + 1) * size - 1


class BackwardPairs(BackwardByGradient):
    """The program of a `KernelBackwardPairs`."""

    scheduler: type[TileScheduler] = TileSchedulerPairs
    bounds: type[BoundsBackward] = BoundsPairs
    pipeline: type[PipelineOfPair] = PipelineOfPair

    def __init__(self, kernel: KernelBackwardPairs) -> None:
        super().__init__(kernel)
        self.work_readers += 1  # the producer
