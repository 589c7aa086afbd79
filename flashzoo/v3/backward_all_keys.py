"""The backward pass where a tile has all keys: of cross attention to a short text, of short sequences.

What differs from `backward.py`: dQ of a block of queries is one tile's, so it is not summed in memory. A warpgroup
rounds its part on the way to shared memory, and the writer has TMA store the block where dQ is. Nothing is zero before,
and no kernel rounds behind.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from flashzoo._cute.hopper.bounds import BoundsBackward
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.tma import box_of
from flashzoo._cute.hopper.wgmma import to_16_bits
from flashzoo.v3.backward import Backward, Consumer, SharedStorage, TmaAtoms, Workspace, laid_out


class BackwardAllKeys(Backward):
    """The program of a `KernelBackwardAllKeys`."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq: cute.Tensor,
        workspace: Workspace,
        params: Params,
        scale_log2: Float32,
        scale: Float32,
        *tensors: Any,
    ):
        """The same, with dq as q."""
        self.launch(q, k, v, do, dk, dv, dq, workspace, params, scale_log2, scale, *tensors)

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
        rounded = cute.make_rmem_tensor(dq.shape, self.dtype)
        to_16_bits(dq, rounded)
        to_chip = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), consumer.mma_dq
        ).get_slice(consumer.thread)
        pipeline.producer_acquire(n)
        cute.copy(to_chip, to_chip.retile(rounded), to_chip.partition_D(self.dq_on_chip(consumer.storage)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipeline.full + pipeline.stage(n))

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
