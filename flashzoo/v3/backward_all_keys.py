"""The backward pass where a tile has all keys: of cross attention to a short text, of short sequences.

What differs from `backward.py`: dQ of a block of queries is one tile's, so it is not summed in memory. A warpgroup
rounds its part on the way to shared memory, and the writer has TMA store the block where dQ is. Nothing is zero before,
and no kernel rounds behind.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flashzoo._cute.hopper.bounds import BoundsBackward
from flashzoo._cute.hopper.tma import box_of
from flashzoo.v3.backward import (
    Backward,
    Consumer,
    SharedStorage,
    TmaAtoms,
    Workspace,
    laid_out,
    leave_rounded,
)
from flashzoo.v3.backward_in_halves import BackwardInHalves


class BackwardAllKeys(Backward):
    """The program of a `KernelBackwardAllKeys`."""

    def dq_on_chip(self, storage: SharedStorage) -> cute.Tensor:
        """A block of dQ, rounded: (queries, width)."""
        memory = cute.recast_ptr(storage.exchange.iterator, dtype=self.dtype)
        return laid_out(memory, self.layout_of_dq())[None, None, 0]

    @cute.jit
    def stage_dq(self, consumer: Consumer, dq: cute.Tensor, used: Int32):
        """Write this warpgroup's part of dQ to shared memory, for the writer."""
        pipeline = consumer.storage.exchange_pipeline
        n = used * self.tiles.consumers + consumer.wg_idx
        dq.store(dq.load() * consumer.scale)
        pipeline.producer_acquire(n)
        leave_rounded(dq, consumer.mma_dq, consumer.thread, self.dq_on_chip(consumer.storage))
        pipeline.producer_commit(n)

    @cute.jit
    def write_dq(
        self,
        bounds: BoundsBackward,
        storage: SharedStorage,
        tma: TmaAtoms,
        workspace: Workspace,
        used: Int32,
        head: Int32,
        block_q: Int32,
    ):
        """Have TMA store dQ of a block of queries."""
        for w in cutlass.range_constexpr(self.tiles.consumers):
            storage.exchange_pipeline.consumer_wait(used * self.tiles.consumers + w)
        origin = (0, *bounds.sequence.origin_q(block_q * self.tiles.block_q, head))
        gmem, smem = box_of(tma.dq, self.dq_on_chip(storage), origin)
        cute.copy(tma.dq, smem, gmem)  # B2.15
        cute.arch.cp_async_bulk_commit_group()


class BackwardInHalvesAllKeys(BackwardAllKeys, BackwardInHalves):
    """The program of one that has scores of half of a block's queries."""
