"""The backward pass where dK and dV of 64 keys leave a warpgroup too few registers for scores of a block of queries: at
head dims above 128, up to 320 of q and v together.

What differs from `backward.py`: a warpgroup has S^T and dP^T of half of the block's queries at a time, in half of the
registers.

1. S^T of the second half is issued before dV and dK of the first, and turned into P^T while these are computed.
2. Then dP^T of the second, its dV and dK, and dQ of both halves: its registers are those that scores had.
3. dK and dV leave through the shared memory of K and V, as none is left in the place of dS. So K and V of the next tile
   come when they have left.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32
from cutlass.cute.nvgpu import warpgroup

from flashzoo._cute.hopper.bounds import BoundsBackward
from flashzoo._cute.hopper.wgmma import gemm
from flashzoo.v3.backward import Backward, Block, Consumer, SharedStorage
from flashzoo.v3.traits import KernelBackward


class BackwardInHalves(Backward):
    """The program of a `KernelBackward` whose tiles are halved."""

    def __init__(self, kernel: KernelBackward) -> None:
        super().__init__(kernel)
        self.before_kv: int = (
            kernel.tiles.stages
        )  # K and V are in use until dQ is computed, or until dK and dV have left
        if not kernel.split_queries:
            self.kv_readers = 1  # the writer, which has TMA read dK and dV there

    def staged(self, k: cute.Tensor, v: cute.Tensor, *_: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Where dK and dV wait for TMA: in the place of K and V."""
        return k, v

    def release_staged(self, storage: SharedStorage, work_idx: Int32) -> None:
        """The same: K and V of the next tile may come."""
        storage.k_pipeline.consumer_release(work_idx)
        storage.v_pipeline.consumer_release(work_idx)

    def release_kv(self, consumer: Consumer) -> None:
        """The same, where dK and dV do not leave through them."""
        if self.kernel.split_queries:
            super().release_kv(consumer)

    def acquire_ds(self, consumer: Consumer) -> None:
        """Nothing else is in the place of dS."""

    @cute.jit
    def step(self, bounds: BoundsBackward, consumer: Consumer, used: Int32, n: Int32, head: Int32, crosses: Boolean):
        """Take the tile's n-th block of queries of a head into dK, dV and dQ."""
        storage = consumer.storage
        block = self.block(bounds, consumer, used, n, head, crosses)
        p, ds = self.begin_step(consumer, block)
        self.sync_consumers()  # the other has read dS of the block before
        self.leave_ds(consumer, block, 0, ds)

        s = self.issue_s(consumer, block, 1)
        self.issue_dv_dk(consumer, block, 0, p, ds)
        warpgroup.wait_group(2)  # the scores
        self.make_p(consumer, block, 1, s)
        warpgroup.wait_group(0)
        dp = self.issue_dp(consumer, block, 1)
        warpgroup.wait_group(0)
        p, ds = self.make_ds(consumer, block, 1, s, dp)
        self.leave_ds(consumer, block, 1, ds)
        self.issue_dv_dk(consumer, block, 1, p, ds)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_consumers()

        warpgroup.wait_group(0)  # before dQ, which has no registers beside P and dS
        storage.do_pipeline.consumer_release(used)
        storage.q_pipeline.consumer_release(used)
        dq = self.issue_dq(consumer, used % self.tiles.ds_stages)  # B2.15: dS K
        warpgroup.wait_group(0)
        if used + 1 == consumer.end:
            self.release_kv(consumer)
        self.stage_dq(consumer, dq, used)

    @cute.jit
    def issue_dv_dk(self, consumer: Consumer, block: Block, half: Constexpr[int], p: cute.Tensor, ds: cute.Tensor):
        """The products of a half that are added to dV, and to dK, a group each."""
        do_t, q_t = consumer.do_t[None, None, None, block.do_stage], consumer.q_t[None, None, None, block.q_stage]
        first = half * cute.size(p, mode=[2])
        gemm(consumer.mma_dv, consumer.dv, p, do_t, False, first)  # B2.12
        gemm(consumer.mma_dk, consumer.dk, ds, q_t, False, first)  # B2.16
