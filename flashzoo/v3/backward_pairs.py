"""The backward pass, thread blocks in pairs: a pair takes Q and dO from L2 once for both, and by gradient, where what
goes to and from L2 is the limit, adds to dQ once for both.

1. A pair is a cluster. Its tiles are two neighbouring blocks of keys of one head, and both walk the blocks of queries
   that see keys of either, in one order. What only the other sees is masked; past the last block of keys all is.
2. Each producer reads half of the rows of Q and dO, and TMA writes them to the shared memory of both. A stage is full
   when both halves have arrived, and is filled again when the consumers of both have read it.
3. One of the pair claims tiles, for both, and writes the number to the shared memory of both, when all warps of both
   have read the one before.
4. By gradient each has half of the columns of dQ, for the keys of both: with K it loads those columns of the other's,
   and in every step a copy from shared memory to shared memory brings it the other's dS. A stage of dS is full when its
   own and the other's are there, and empty when the consumers of both have read both.
5. Neither ends before the other: until then that one arrives at its mbarriers.

Keys and values are each thread block's own, and so are LSE and delta, which are small. The exchange of dS is that of
flash-attention's pull request 2889.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flashzoo._cute.hopper.bounds import BoundsBackward
from flashzoo._cute.hopper.opaque import opaque
from flashzoo._cute.hopper.pipeline import Pipeline, PipelineOfPair, PipelineOfPairWords
from flashzoo._cute.hopper.tile_scheduler import TileScheduler, TileSchedulerBackward
from flashzoo._cute.hopper.tma import load
from flashzoo._cute.hopper.wgmma import columns_of, multiply, shared_layout, transposed
from flashzoo.gpu import WARPS
from flashzoo.v3.backward import Backward, SharedStorage, TmaAtoms
from flashzoo.v3.backward_by_gradient import BackwardByGradient, Gradient, Tile
from flashzoo.v3.traits import ALIGNED, KernelBackwardPairs

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

    def block_of(self, rank: Int32) -> Int32:
        """This thread block's of the rank-th pair."""
        return 2 * super().block_of(rank) + cute.arch.block_idx_in_cluster()

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
        return self.tile.block >> 1

    def keys(self) -> tuple[Int32, Int32]:
        """First and last of the pair's keys."""
        size = 2 * self.params.kernel.tiles.block_kv
        return self.rank() * size, (self.rank() + 1) * size - 1


class BackwardPairs(Backward):
    """The program of a `KernelBackwardPairs` whose tiles are cut by keys."""

    scheduler: type[TileScheduler] = TileSchedulerPairs
    bounds: type[BoundsBackward] = BoundsPairs
    pipeline: type[Pipeline] = PipelineOfPair
    pipeline_of_work: type[Pipeline] = PipelineOfPairWords

    def __init__(self, kernel: KernelBackwardPairs) -> None:
        super().__init__(kernel)
        self.work_readers += 1  # the producer


class BackwardByGradientPairs(BackwardPairs, BackwardByGradient):
    """The program of one whose tiles are cut by gradient."""

    pipeline_of_ds: type[Pipeline] = PipelineOfPair

    def __init__(self, kernel: KernelBackwardPairs) -> None:
        super().__init__(kernel)
        self.k_loads += 1
        self.ds_writers = 1
        self.ds_places *= kernel.cluster

    def allocate_keys_of_partner(self, smem: cutlass.memory.SmemAllocator) -> cute.Tensor:
        """Half of its columns."""
        kernel = self.kernel
        layout = shared_layout(self.dtype, self.tiles.block_kv, kernel.width // kernel.cluster, 1, kernel.swizzled_k)
        return smem.allocate_tensor(self.dtype, layout.outer, ALIGNED, swizzle=layout.inner)

    @cute.jit
    def load_keys_of_partner(self, bounds: BoundsBackward, storage: SharedStorage, tma: TmaAtoms):
        """Those columns that this thread block has of dQ."""
        first_key = (bounds.tile.block ^ 1) * self.tiles.block_kv
        first = cute.arch.block_idx_in_cluster() * (self.kernel.width // self.kernel.cluster)
        origin = (first, *bounds.sequence.origin_k(first_key, bounds.head_kv()))
        load(tma.k, storage.k_partner[None, None, 0], origin, storage.k_pipeline.full)

    @cute.jit
    def publish_ds(self, storage: SharedStorage, use: Int32):
        """The warpgroup has written its dS, and one of its threads has it copied."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_warpgroup(Gradient.OF_K)
        stage = storage.ds_pipeline.stage(use)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS == 0:
            full, mine = storage.ds_pipeline.full + stage, storage.ds[None, None, stage]
            theirs = storage.ds[None, None, self.of_partner(stage)]
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, bytes_of(theirs))
                copy_to_partner(theirs, mine, full)

    def of_partner(self, stage: Int32) -> Int32:
        """Where the partner's dS of a stage is: behind the stages of its own."""
        return self.tiles.ds_stages + stage

    def nth_part(self, gradient: Gradient, j: int) -> Int32:
        """Which part of dQ the j-th of a warpgroup's is."""
        half = self.kernel.dq_parts // self.kernel.cluster
        return cute.arch.block_idx_in_cluster() * half + super().nth_part(gradient, j)

    @cute.jit
    def multiply_for_dq(self, atom: cute.MmaAtom, dq: cute.Tensor, tile: Tile, stage: Int32, part: Int32):
        """The products of a part of dS K, of its own keys and the partner's."""
        half = self.kernel.dq_parts // self.kernel.cluster
        of_dq, k_partner = tile.mma_dq.get_slice(0), transposed(tile.storage.k_partner)
        k_partner = tile.mma_dq.make_fragment_B(of_dq.partition_B(k_partner))[None, None, None, 0]
        multiply(atom, dq, tile.ds[None, None, None, stage], columns_of(tile.k_t, part), True)
        multiply(atom, dq, tile.ds[None, None, None, self.of_partner(stage)], columns_of(k_partner, part % half), False)


def bytes_of(x: cute.Tensor) -> int:
    """Its size."""
    return cute.size(x) * x.element_type.width // 8


@cute.jit
def copy_to_partner(theirs: cute.Tensor, mine: cute.Tensor, full: cute.Pointer):
    """Copy this thread block's shared memory to the partner's, and arrive at the partner's mbarrier with it."""
    partner = cute.arch.block_idx_in_cluster() ^ 1
    there = [cute.arch.map_dsmem_ptr(x, partner) for x in (theirs.iterator, full)]
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[there[0], mine.iterator, Int32(bytes_of(mine)), there[1]],
    )
