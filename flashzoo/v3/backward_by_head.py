"""The backward pass where a thread block has all tiles of a head: of many short sequences.

What differs from `backward.py`: dQ of a head is summed by one thread block, tile by tile, the last keys first. The
first tile that sees a block of queries stores its part of dQ, those behind it add to that, and the tile of the first
keys, which all queries see, adds what is there to its own part, rounds it, and stores the block where dQ is. So
nothing is zero before, no kernel rounds behind, and the sums have one order. They are in memory that the thread block
uses for its next head again: as long as that and the heads' queries stay in L2, memory moves none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from flashzoo._cute.hopper.bounds import BoundsBackward
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.tile_scheduler import TileSchedulerBackward
from flashzoo.v3.backward import Backward, Consumer, SharedStorage, TmaAtoms, Workspace, leave_rounded, put
from flashzoo.v3.backward_all_keys import BackwardAllKeys
from flashzoo.v3.backward_in_halves import BackwardInHalves
from flashzoo.v3.traits import KernelBackwardByHead


@dataclass(frozen=True)
class TileSchedulerByHead(TileSchedulerBackward):
    """Thread blocks claim heads, and have all tiles of one, one after another."""

    def block_of(self, rank: Int32) -> Int32:
        """The last keys first: the tile of the first, which under a causal mask too all queries see, ends the head."""
        return self.params.blocks - 1 - rank

    @cute.jit
    def work_of(self, number: Int32) -> Int32:
        """The first tile of a head of that number, or where it is negative the tile whose number it is inverted."""
        work = ~number
        if number >= 0:
            work = number * self.blocks()
        return work

    @cute.jit
    def claim_next(self, work: Any) -> Int32:
        """The same of heads: the counter is asked behind a head's last tile alone."""
        fetched = ~(work + 1)
        if (work + 1) % self.blocks() == 0 and self.claims():
            fetched = self.ask_counter(self.params.batch_heads)
        return fetched

    @cute.jit
    def claimed(self, fetched: Int32) -> Int32:
        """The head that a warp has claimed, or inverted the head's next tile."""
        number = cute.arch.shuffle_sync(fetched, 0)
        if number >= 0:
            number += self.begun()
        return number


class LastTile(BackwardAllKeys):
    """What a head's last tile does with dQ: it has the sums of all others."""

    @cute.jit
    def stage_dq(self, consumer: Consumer, dq: cute.Tensor, used: Int32):
        """Add this warpgroup's part of dQ to its sum, which the writer has had brought to shared memory, and leave it
        there rounded."""
        pipeline, scale = consumer.storage.exchange_pipeline, consumer.scale
        n = used * self.tiles.consumers + consumer.wg_idx
        pipeline.producer_acquire(n)
        sums = self.exchanged(consumer)
        parts = cute.make_tensor(dq.iterator, cute.make_layout(sums.shape))
        for i in cutlass.range_constexpr(cute.size(sums, mode=[1])):
            parts[None, i].store((parts[None, i].load() + sums[None, i].load()) * scale)
        self.sync_consumers()  # rounded, one's part is where another's sum was
        leave_rounded(dq, consumer.mma_dq, consumer.thread, self.dq_on_chip(consumer.storage))
        pipeline.producer_commit(n)


class BackwardByHead(Backward):
    """The program of a `KernelBackwardByHead`."""

    scheduler = TileSchedulerByHead
    last_tile: type[LastTile] = LastTile

    def __init__(self, kernel: KernelBackwardByHead) -> None:
        super().__init__(kernel)
        self.last = self.last_tile(kernel)

    @cute.jit
    def walk(self, bounds: BoundsBackward, consumer: Consumer, used: Int32, begin: Int32, end: Int32) -> Int32:
        """Take the tile's blocks of queries into dK, dV and dQ."""
        if bounds.tile.block == 0:
            used = self.last.walk(bounds, consumer, used, begin, end)
        else:
            used = Backward.walk(self, bounds, consumer, used, begin, end)
        return used

    @cute.jit
    def store(self, params: Params, storage: SharedStorage, tma: TmaAtoms, writer: Int32, workspace: Workspace):
        """The writer warp: has TMA store the warpgroups' parts of dQ or add them, and bring sums to the last tile."""
        scheduler, pipeline = self.scheduler(params, storage.first), storage.exchange_pipeline
        consumers = self.tiles.consumers
        written = Int32(0)  # steps so far, over all tiles
        fetched = Int32(0)  # sums brought so far
        work_idx = Int32(0)
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            bounds = self.bounds(params, scheduler.work_tile(work))
            begin, end = bounds.block_range()
            steps, seen_before = bounds.steps(begin, end), self.first_seen_before(params, bounds)
            cute.arch.cp_async_bulk_wait_group(0)  # sums of the tile before are in memory: this one adds to them
            cute.arch.fence_proxy("async.global")
            for i in cutlass.range(steps, unroll=1):
                head, block = bounds.step(i, begin, end)
                sums = self.sums_of(params, workspace, block)
                if bounds.tile.block == 0:
                    if block < seen_before:
                        self.clear(storage)
                    else:
                        self.fetch(storage, sums, fetched)
                        fetched += 1
                if written + i > 0:
                    for w in cutlass.range_constexpr(consumers):
                        pipeline.consumer_release((written + i - 1) * consumers + w)
                if bounds.tile.block == 0:
                    self.last.write_dq(bounds, storage, tma, workspace, written + i, head, block)
                else:
                    self.write_sums(storage, sums, written + i, block < seen_before)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            written += steps
            self.store_dk_dv(bounds, storage, tma, work_idx)
            work = scheduler.next_work(storage.work, storage.work_pipeline, work_idx)
            work_idx += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def first_seen_before(self, params: Params, bounds: BoundsBackward) -> Int32:
        """The first block of queries that the head's tile before this one, and so any, has walked."""
        tile, first = bounds.tile, Int32(0)
        if tile.block == params.blocks - 1:
            first = self.kernel.blocks_q(bounds.sequence.seqlen_q)
        else:
            first, _ = self.bounds(params, replace(tile, block=tile.block + 1)).block_range()
        return first

    def sums_of(self, params: Params, workspace: Workspace, block: Int32) -> cute.Pointer:
        """Where the sums of a block of dQ are of this thread block's head."""
        place = Int64(cute.arch.block_idx()[0]) * self.kernel.blocks_q(params.seqlen_q) + block
        return workspace.dq + place * (self.tiles.consumers * self.part)

    @cute.jit
    def clear(self, storage: SharedStorage):
        """Zeros in place of sums that there are none of."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        first = storage.exchange.iterator + cute.arch.lane_idx() * 4
        for i in cutlass.range(cute.size(storage.exchange) // 128, unroll=4):
            cute.autovec_copy(zeros, cute.make_tensor((first + i * 128).align(16), cute.make_layout(4)))
        cute.arch.sync_warp()

    @cute.jit
    def fetch(self, storage: SharedStorage, sums: cute.Pointer, fetched: Int32):
        """Have TMA read the sums of a block of dQ, and wait for them."""
        full, numbers = storage.semaphore_pipeline.full, cute.size(storage.exchange)
        memory, chip = (
            cute.make_tensor(x, cute.make_layout(numbers)) for x in (sums.align(16), storage.exchange.iterator)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * numbers)
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), memory, chip, mbar_ptr=full)
        cute.arch.mbarrier_wait(full, fetched & 1)

    @cute.jit
    def write_sums(self, storage: SharedStorage, sums: cute.Pointer, used: Int32, first: Boolean):
        """Have TMA store the warpgroups' parts of dQ of a block of queries, or add them to those that are there."""
        for w in cutlass.range_constexpr(self.tiles.consumers):
            storage.exchange_pipeline.consumer_wait(used * self.tiles.consumers + w)
            if first:
                put(sums + w * self.part, storage.exchange[None, w], adds=False)
            else:
                put(sums + w * self.part, storage.exchange[None, w], adds=True)  # B2.15
            cute.arch.cp_async_bulk_commit_group()


class LastTileInHalves(LastTile, BackwardInHalves):
    """The same where scores are those of half of a block's queries."""


class BackwardInHalvesByHead(BackwardByHead, BackwardInHalves):
    """The program of one that has such scores."""

    last_tile: type[LastTile] = LastTileInHalves
