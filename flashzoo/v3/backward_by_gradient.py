"""The backward pass where dK and dV of 64 keys don't fit in one warpgroup's registers: 192 and 256 wide.

What differs from `backward.py`: a tile has 64 keys, and both consumer warpgroups work on all of them.

1. The warpgroup of V computes S^T and P^T, leaves P^T to the other in shared memory, in float32, and adds P^T dO to dV.
2. The warpgroup of K computes dP^T and, from it and P^T, dS^T, and adds dS^T Q to dK.
3. dS goes through shared memory, and each computes half of the columns of dQ, by 64, of three such parts the warpgroup
   of K two, and adds them to memory straight from registers.
4. Each issues the next block's S^T or dP^T before it goes on with dQ of this one, so that the products run while it and
   the other wait for one another.

A warpgroup that computes dQ of a block in the next one's step (`KernelBackward.dq_deferred`) waits for no product that
nothing depends on yet: its gradient of the block and dQ of the one before run under P^T, or dS^T, of the next. The last
block's dQ comes behind the loop. Where the warpgroup of V alone does so, which has the fewer parts of dQ, that of K
issues dQ and the next block's dP^T first, then dK, which runs under dS^T of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from flashzoo._cute.hopper.bounds import BoundsBackward
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.pipeline import Pipeline
from flashzoo._cute.hopper.scores import Told
from flashzoo._cute.hopper.tma import box_of
from flashzoo._cute.hopper.wgmma import columns_of, gemm, multiply, rows_of, to_16_bits, transposed
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS, WARPS
from flashzoo.v3.backward import (
    Backward,
    SharedStorage,
    TmaAtoms,
    Workspace,
    semaphore_arrive,
    semaphore_wait,
    store_part,
)
from flashzoo.v3.scored_backward import differentiate, modify_block, told_of_head, told_of_keys
from flashzoo.v3.softmax import LN2
from flashzoo.v3.traits import KernelBackward


class Gradient(IntEnum):
    """The consumer warpgroups."""

    OF_V = 0
    OF_K = 1


class NamedBarrier(IntEnum):
    """Beside `backward.NamedBarrier`."""

    EPILOGUE = 2  # the first of one a warpgroup, of its warps


@dataclass(frozen=True)
class Tile:
    """A consumer warpgroup's operands and state for one tile.

    Attributes:
        bounds: what the tile walks.
        begin, end: its blocks of queries.
        storage: shared memory.
        thread: of the warpgroup.
        mma_s, mma_acc, mma_dq: products: scores; of the gradient, whose first operand is in registers;
            of columns of dQ.
        first, second: operands of the scores: K and Q, or V and dO; second with all stages.
        factor: second operand of the gradient: dO, or Q, all stages.
        ds, k_t: operands of dQ; ds with all stages, k_t with all columns.
        acc: the gradient.
        dq: its sum in memory.
        first_key: of its block.
        scale_log2: what scores are multiplied by to be in log2 units.
        told: what a function on scores is told of this thread's keys; None where nobody asks.
    """

    bounds: BoundsBackward
    begin: Int32
    end: Int32
    storage: SharedStorage
    thread: Int32
    mma_s: cute.TiledMma
    mma_acc: cute.TiledMma
    mma_dq: cute.TiledMma
    first: cute.Tensor
    second: cute.Tensor
    factor: cute.Tensor
    ds: cute.Tensor
    k_t: cute.Tensor
    acc: cute.Tensor
    dq: cute.Pointer
    first_key: Int32
    scale_log2: Float32
    told: Told | None


class BackwardByGradient(Backward):
    """The program of a `KernelBackward` whose tiles are cut by gradient."""

    def __init__(self, kernel: KernelBackward) -> None:
        super().__init__(kernel)
        self.kv_readers = 1
        self.ds_readers: int = WARPS * kernel.tiles.consumers
        self.ds_writers: int = WARPS
        self.exchange_readers = WARPS
        self.before_kv: int = kernel.stages_do  # K and V are in use until dK and dV have left

    def staged(self, k: cute.Tensor, v: cute.Tensor, *_: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Where dK and dV wait for TMA: in the place of K and V."""
        return k, v

    @cute.jit
    def consume(
        self,
        params: Params,
        storage: SharedStorage,
        tma: TmaAtoms,
        workspace: Workspace,
        scale_log2: Float32,
        scale: Float32,
        tensors: Any,
    ):
        """A consumer warpgroup: its gradient of tile after tile."""
        wg_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPS - 1)
        if wg_idx == Gradient.OF_V:
            self.run_gradient(Gradient.OF_V, params, storage, tma.dv, workspace, scale_log2, scale, tensors)
        else:
            self.run_gradient(Gradient.OF_K, params, storage, tma.dk, workspace, scale_log2, scale, tensors)

    @cute.jit
    def run_gradient(
        self,
        gradient: Constexpr[Gradient],
        params: Params,
        storage: SharedStorage,
        tma: cute.CopyAtom,
        workspace: Workspace,
        scale_log2: Float32,
        scale: Float32,
        tensors: Any,
    ):
        """One warpgroup's part."""
        tiles, scheduler = self.tiles, self.scheduler(params, storage.first)
        of_v, any_deferred = gradient == Gradient.OF_V, self.kernel.dq_deferred(int(Gradient.OF_V))
        width = self.kernel.width_v if of_v else self.kernel.width
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        mma_s = self.mma(OperandMajorMode.K, OperandMajorMode.K, (1, 1, 1), tiles.block_q)
        mma_acc = self.mma(OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1), width, warpgroup.OperandSource.RMEM)
        mma_dq = self.mma(OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1), self.kernel.dq_part[1])
        s, of_acc, of_dq = (x.get_slice(0) for x in (mma_s, mma_acc, mma_dq))
        kept, scored, factor = (storage.k, storage.q, storage.do) if of_v else (storage.v, storage.do, storage.q)
        operands = (
            mma_s.make_fragment_A(s.partition_A(kept[None, None, 0])),
            mma_s.make_fragment_B(s.partition_B(scored)),
            mma_acc.make_fragment_B(of_acc.partition_B(transposed(factor))),
            mma_dq.make_fragment_A(of_dq.partition_A(storage.ds)),
            mma_dq.make_fragment_B(of_dq.partition_B(transposed(storage.k)))[None, None, None, 0],
        )
        acc = cute.make_rmem_tensor(of_acc.partition_shape_C((tiles.block_kv, width)), Float32)

        used = Int32(0)  # blocks of queries so far, over all tiles
        work_idx = Int32(0)  # tiles so far
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            bounds = self.bounds(params, scheduler.work_tile(work))
            begin, end = bounds.block_range()
            first_key = bounds.tile.block * tiles.block_kv
            told = None
            if const_expr(of_v):
                key = first_key + thread // 32 * 16 + cute.arch.lane_idx() // 4
                told = told_of_keys(self.score_mod, bounds, key, scale_log2 * LN2, tensors)
            state = (acc, workspace.dq, first_key, self.in_log2(scale_log2), told)
            tile = Tile(bounds, begin, end, storage, thread, mma_s, mma_acc, mma_dq, *operands, *state)
            acc.fill(0.0)  # B2.7
            storage.k_pipeline.consumer_wait(work_idx)
            storage.v_pipeline.consumer_wait(work_idx)
            steps = bounds.steps(begin, end)
            scores = cute.make_rmem_tensor(s.partition_shape_C((WARPGROUP_ROWS, tiles.block_q)), Float32)
            self.issue_scores(tile, gradient, used, bounds.walks_any(begin, end), scores)
            if const_expr(any_deferred):
                warpgroup.wait_group(0)
            for i in cutlass.range(steps, unroll=1):  # B2.8
                if const_expr(self.kernel.dq_deferred(int(gradient))):
                    self.step_deferred(tile, gradient, used + i, i, scores, i + 1 < steps)
                elif const_expr(any_deferred):
                    self.step_of_k(tile, used + i, i, scores, i + 1 < steps)
                else:
                    self.step(tile, gradient, used + i, i, scores, i + 1 < steps)
            used += steps
            if const_expr(any_deferred):
                self.finish(tile, gradient, used, steps)
            else:
                warpgroup.wait_group(0)
            work = scheduler.next_work(storage.work, storage.work_pipeline, work_idx)
            if const_expr(self.kernel.split_queries):
                self.leave_part(tile, gradient, workspace, work_idx)
            else:
                self.gradient_epilogue(tile, gradient, tma, scale, work_idx)
            work_idx += 1

    @cute.jit
    def issue_scores(self, tile: Tile, gradient: Constexpr[Gradient], use: Int32, exists: Boolean, scores: cute.Tensor):
        """Have S^T, or dP^T, of a block computed; of whatever is in its stage where there is no such block,
        for nobody to read.

        A branch around the product would cost more: ptxas then spills a good part of the accumulators.
        """
        pipeline, _ = self.pipelines_of(tile, gradient)
        if exists:
            pipeline.consumer_wait(use)
        gemm(tile.mma_s, scores, tile.first, tile.second[None, None, None, pipeline.stage(use)], True)  # B2.10, B2.13

    @cute.jit
    def step(
        self, tile: Tile, gradient: Constexpr[Gradient], use: Int32, step: Int32, scores: cute.Tensor, more: Boolean
    ):
        """One block of queries, whose scores are under way; and the next block's scores, if there is one."""
        storage = tile.storage
        of_v = const_expr(gradient == Gradient.OF_V)
        pipeline, pipeline_of_factor = self.pipelines_of(tile, gradient)
        rounded = self.first_operand(tile)
        warpgroup.wait_group(0)
        if const_expr(of_v):
            self.make_p(tile, use, step, scores, rounded)
            self.round_p(scores, rounded)
        else:
            self.make_ds(tile, use, scores)
            self.leave_ds(tile, use, scores, rounded)
        pipeline.consumer_release(use)
        pipeline_of_factor.consumer_wait(use)
        # B2.12, B2.16
        gemm(tile.mma_acc, tile.acc, rounded, tile.factor[None, None, None, pipeline_of_factor.stage(use)], False)
        storage.ds_pipeline.consumer_wait(use)
        parts = len(self.kernel.dq_parts_of(int(gradient)))
        dq = self.issue_dq(tile, gradient, use, 0)
        warpgroup.wait_group(1)  # the gradient
        pipeline_of_factor.consumer_release(use)
        for j in cutlass.range_constexpr(1, parts):
            following = self.issue_dq(tile, gradient, use, j)
            warpgroup.wait_group(1)  # the part before
            self.add_to_dq(tile, gradient, use, step, j - 1, dq)
            dq = following
        self.issue_scores(tile, gradient, use + 1, more, scores)
        warpgroup.wait_group(1)  # the last part
        storage.ds_pipeline.consumer_release(use)
        self.add_to_dq(tile, gradient, use, step, parts - 1, dq)
        self.take_turns(tile, gradient, use)

    @cute.jit
    def step_deferred(
        self, tile: Tile, gradient: Constexpr[Gradient], use: Int32, step: Int32, scores: cute.Tensor, more: Boolean
    ):
        """One block of queries, whose S^T or dP^T is computed: its dV or dK, the next block's S^T or dP^T, and dQ of
        the block before, if there is one."""
        storage, before = tile.storage, cutlass.max(use - 1, 0)
        of_v = const_expr(gradient == Gradient.OF_V)
        pipeline, pipeline_of_factor = self.pipelines_of(tile, gradient)
        rounded = self.first_operand(tile)
        dq = self.start_dq(tile, gradient, before, step > 0)
        if const_expr(of_v):
            self.make_p(tile, use, step, scores, rounded)
        else:
            self.make_ds(tile, use, scores)
        pipeline.consumer_release(use)
        warpgroup.wait_group(0)  # the gradient and dQ of the block before
        if step > 0:
            pipeline_of_factor.consumer_release(before)
            storage.ds_pipeline.consumer_release(before)
        if const_expr(of_v):
            self.round_p(scores, rounded)
        else:
            self.leave_ds(tile, use, scores, rounded)
        self.issue_scores(tile, gradient, use + 1, more, scores)
        pipeline_of_factor.consumer_wait(use)
        # B2.12, B2.16
        gemm(tile.mma_acc, tile.acc, rounded, tile.factor[None, None, None, pipeline_of_factor.stage(use)], False)
        if step > 0:
            self.add_to_dq(tile, gradient, before, step - 1, 0, dq)
            self.take_turns(tile, gradient, before)
        warpgroup.wait_group(1)  # the scores

    @cute.jit
    def step_of_k(self, tile: Tile, use: Int32, step: Int32, dp: cute.Tensor, more: Boolean):
        """One block of queries, whose dP^T is computed: its dQ, the next block's dP^T, and its dK, which the next step
        waits for."""
        storage, parts, before = tile.storage, len(self.kernel.dq_parts_of(Gradient.OF_K)), cutlass.max(use - 1, 0)
        ds = self.first_operand(tile)
        self.make_ds(tile, use, dp)
        storage.do_pipeline.consumer_release(use)
        warpgroup.wait_group(0)  # dK of the block before
        if step > 0:
            storage.q_pipeline.consumer_release(before)
        self.leave_ds(tile, use, dp, ds)
        storage.q_pipeline.consumer_wait(use)
        dq = self.start_dq(tile, Gradient.OF_K, use, True)
        self.issue_scores(tile, Gradient.OF_K, use + 1, more, dp)
        warpgroup.wait_group(1)  # the first part of dQ
        for j in cutlass.range_constexpr(1, parts):
            self.add_to_dq(tile, Gradient.OF_K, use, step, j - 1, dq)
            cute.arch.sync_warp()  # the compiler would give the next part registers of its own
            dq = self.issue_dq(tile, Gradient.OF_K, use, j)
        gemm(tile.mma_acc, tile.acc, ds, tile.factor[None, None, None, storage.q_pipeline.stage(use)], False)  # B2.16
        warpgroup.wait_group(1)  # the last part
        storage.ds_pipeline.consumer_release(use)
        self.add_to_dq(tile, Gradient.OF_K, use, step, parts - 1, dq)
        self.take_turns(tile, Gradient.OF_K, use)
        warpgroup.wait_group(1)  # dP^T

    @cute.jit
    def finish(self, tile: Tile, gradient: Constexpr[Gradient], used: Int32, steps: Int32):
        """What the last step has left to the next, if there is one: dQ to compute, or dK to wait for."""
        storage, use, any_step = tile.storage, cutlass.max(used - 1, 0), steps > 0
        _, pipeline_of_factor = self.pipelines_of(tile, gradient)
        if const_expr(self.kernel.dq_deferred(int(gradient))):
            dq = self.start_dq(tile, gradient, use, any_step)
            warpgroup.wait_group(0)
            if any_step:
                pipeline_of_factor.consumer_release(use)
                storage.ds_pipeline.consumer_release(use)
                self.add_to_dq(tile, gradient, use, steps - 1, 0, dq)
                self.take_turns(tile, gradient, use)
        else:
            warpgroup.wait_group(0)
            if any_step:
                pipeline_of_factor.consumer_release(use)

    def pipelines_of(self, tile: Tile, gradient: Gradient) -> tuple[Pipeline, Pipeline]:
        """Of the second operands of a warpgroup's scores and of its gradient: Q and dO, or dO and Q."""
        q, do = tile.storage.q_pipeline, tile.storage.do_pipeline
        return (q, do) if gradient == Gradient.OF_V else (do, q)

    def first_operand(self, tile: Tile) -> cute.Tensor:
        """Registers for P^T or dS^T, rounded: the first operand of the gradient."""
        shape = tile.mma_acc.get_slice(0).partition_shape_A((WARPGROUP_ROWS, self.tiles.block_q))
        return cute.make_rmem_tensor(shape, self.dtype)

    @cute.jit
    def start_dq(self, tile: Tile, gradient: Constexpr[Gradient], use: Int32, exists: Boolean) -> cute.Tensor:
        """Registers that will hold the first of this warpgroup's parts of dS K; of whatever is on chip where there is
        no such block, for nobody to read: as in `issue_scores`."""
        if exists:
            tile.storage.ds_pipeline.consumer_wait(use)
        return self.issue_dq(tile, gradient, use, 0)

    @cute.jit
    def make_p(self, tile: Tile, use: Int32, step: Int32, s: cute.Tensor, p: cute.Tensor):
        """Turn S into P, and leave it to the other warpgroup; there times the slope of a function on scores that has
        one, and P itself is rounded already."""
        storage, bounds, first_key = tile.storage, tile.bounds, tile.first_key
        lane = cute.arch.lane_idx()
        head, n = bounds.step(step, tile.begin, tile.end)
        told, column = told_of_head(self.score_mod, tile.told, head), lane % 4 * 2
        if const_expr(self.score_mod is not None):
            of_thread = bounds.of_thread(first_key + tile.thread // 32 * 16 + lane // 4, column)
            where = (of_thread, column, bounds.crosses(first_key, n))
            if const_expr(self.by_slope):
                lse = self.columns(storage.lse[None, storage.q_pipeline.stage(use)])
                differentiate(self.score_mod, bounds, n, 0, s, None, lse, None, p, None, told, *where)
            else:
                modify_block(self.score_mod, bounds, n, 0, s, told, *where)
        elif bounds.crosses(first_key, n):
            of_thread = bounds.of_thread(first_key + tile.thread // 32 * 16 + lane // 4, column)
            self.mask(bounds, n, 0, s, of_thread, tile.thread)
        if const_expr(not self.by_slope):
            lse = self.columns(storage.lse[None, storage.q_pipeline.stage(use)])
            self.exponentiate(s, lse, tile.scale_log2)  # B2.11
        storage.exchange_pipeline.producer_acquire(use)
        fours = self.fours(tile, cute.size(s))
        cute.autovec_copy(cute.make_tensor(s.iterator, cute.make_layout(fours.shape)), fours)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.exchange_pipeline.full)

    @cute.jit
    def round_p(self, s: cute.Tensor, p: cute.Tensor):
        """Round P, where `make_p` has not."""
        if const_expr(not self.by_slope):
            to_16_bits(s, p)

    @cute.jit
    def make_ds(self, tile: Tile, use: Int32, dp: cute.Tensor):
        """Turn dP into dS, by the other warpgroup's P."""
        storage = tile.storage
        fours = self.fours(tile, cute.size(dp))
        p = cute.make_rmem_tensor(cute.size(dp), Float32)
        storage.exchange_pipeline.consumer_wait(use)
        cute.autovec_copy(fours, cute.make_tensor(p.iterator, cute.make_layout(fours.shape)))
        cute.arch.sync_warp()
        storage.exchange_pipeline.consumer_release(use)
        delta = self.columns(storage.delta[None, storage.do_pipeline.stage(use)])
        p_rows, dp_rows = rows_of(p), rows_of(dp)
        for i in cutlass.range_constexpr(cute.size(dp) // 4):
            pair = delta[None, i].load()
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    dp_rows[c, r, i] = p_rows[c, r, i] * (dp_rows[c, r, i] - pair[c])  # B2.14

    @cute.jit
    def leave_ds(self, tile: Tile, use: Int32, dp: cute.Tensor, ds: cute.Tensor):
        """Round dS, and leave it on chip for both."""
        storage, tiles = tile.storage, self.tiles
        to_16_bits(dp, ds)
        stage = storage.ds_pipeline.stage(use)
        to_chip = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(True, 4), self.dtype), tile.mma_s
        ).get_slice(tile.thread)
        part = cute.make_tensor(ds.iterator, tile.mma_s.get_slice(0).partition_shape_C((tiles.block_kv, tiles.block_q)))
        storage.ds_pipeline.producer_acquire(use)
        cute.copy(to_chip, to_chip.retile(part), to_chip.partition_D(transposed(storage.ds)[None, None, stage]))
        self.publish_ds(storage, use)

    def publish_ds(self, storage: SharedStorage, use: Int32) -> None:
        """This warp has written its part of dS."""
        storage.ds_pipeline.producer_commit(use)

    def fours(self, tile: Tile, numbers: int) -> cute.Tensor:
        """This thread's part of `exchange`, by fours: (4, numbers / 4)."""
        layout = cute.make_layout((4, numbers // 4), stride=(1, 4 * WARPGROUP))
        return cute.make_tensor((tile.storage.exchange[None, 0].iterator + tile.thread * 4).align(16), layout)

    @cute.jit
    def issue_dq(self, tile: Tile, gradient: Constexpr[Gradient], use: Int32, j: Constexpr[int]) -> cute.Tensor:
        """Registers that will hold the j-th of this warpgroup's parts of dS K."""
        dq = cute.make_rmem_tensor(tile.mma_dq.get_slice(0).partition_shape_C(self.kernel.dq_part), Float32)
        atom = cute.make_mma_atom(tile.mma_dq.op)
        warpgroup.fence()
        self.multiply_for_dq(atom, dq, tile, tile.storage.ds_pipeline.stage(use), self.nth_part(gradient, j))
        warpgroup.commit_group()
        return dq

    def nth_part(self, gradient: Gradient, j: int) -> int | Int32:
        """Which part of dQ the j-th of a warpgroup's is."""
        return self.kernel.dq_parts_of(int(gradient))[j]

    @cute.jit
    def multiply_for_dq(self, atom: cute.MmaAtom, dq: cute.Tensor, tile: Tile, stage: Int32, part: int | Int32):
        """The products of a part of dS K."""
        multiply(atom, dq, tile.ds[None, None, None, stage], columns_of(tile.k_t, part), True)

    @cute.jit
    def add_to_dq(
        self, tile: Tile, gradient: Constexpr[Gradient], use: Int32, step: Int32, j: Constexpr[int], dq: cute.Tensor
    ):
        """Add that part to memory; where deterministic, in order."""
        bounds, kernel = tile.bounds, self.kernel
        head, n = bounds.step(step, tile.begin, tile.end)
        block = bounds.block_of_queries(head, bounds.block_q(n))
        part = block * kernel.dq_parts + self.nth_part(gradient, j)
        memory = tile.dq + part * self.part + tile.thread * 4
        turns, turn = tile.storage.semaphore_pipeline, use * kernel.semaphores + j
        if const_expr(kernel.deterministic):
            turns.consumer_wait(turn)
        for i in cutlass.range_constexpr(cute.size(dq) // 4):
            add_four(memory + i * 4 * WARPGROUP, dq, 4 * i)  # B2.15
        if const_expr(kernel.deterministic):
            cute.arch.sync_warp()
            turns.consumer_release(turn)

    @cute.jit
    def take_turns(self, tile: Tile, gradient: Constexpr[Gradient], use: Int32):
        """Where deterministic, add nothing in the turns that this warpgroup has and has no part for."""
        turns, kernel = tile.storage.semaphore_pipeline, self.kernel
        if const_expr(kernel.deterministic):
            for j in cutlass.range_constexpr(len(kernel.dq_parts_of(int(gradient))), kernel.semaphores):
                turns.consumer_wait(use * kernel.semaphores + j)
                cute.arch.sync_warp()
                turns.consumer_release(use * kernel.semaphores + j)

    @cute.jit
    def store(self, params: Params, storage: SharedStorage, tma: TmaAtoms, writer: Int32, workspace: Workspace):
        """A writer warp: lets the consumers add to some columns of dQ when the tiles before have,
        then releases the semaphore."""
        parts, scheduler = self.kernel.semaphores, self.scheduler(params, storage.first)
        written = Int32(0)
        work_idx = Int32(0)
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            bounds = self.bounds(params, scheduler.work_tile(work))
            begin, end = bounds.block_range()
            steps = bounds.steps(begin, end) * parts
            for i in cutlass.range(self.first_step(written, writer), steps, self.kernel.writers, unroll=1):
                head, n = bounds.step(i // parts, begin, end)
                block_q = bounds.block_q(n)
                of_block = workspace.dq_semaphore + (bounds.block_of_queries(head, block_q) * parts + i % parts)
                before = bounds.adds_before(block_q)
                use = written + i
                semaphore_wait(of_block, before)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(storage.semaphore_pipeline.full + storage.semaphore_pipeline.stage(use))
                # The consumers' release comes behind their additions.
                storage.semaphore_pipeline.producer_acquire(use + self.kernel.writers)
                semaphore_arrive(of_block, before)
            written += steps
            work = scheduler.next_work(storage.work, storage.work_pipeline, work_idx)
            work_idx += 1

    @cute.jit
    def gradient_epilogue(
        self, tile: Tile, gradient: Constexpr[Gradient], tma: cute.CopyAtom, scale: Float32, work_idx: Int32
    ):
        """Write dV or dK of the tile to memory through the shared memory of V or K."""
        storage, acc = tile.storage, tile.acc
        of_v = const_expr(gradient == Gradient.OF_V)
        staged, pipeline = (storage.dv, storage.v_pipeline) if of_v else (storage.dk, storage.k_pipeline)
        thread = tile.thread + (work_idx >> 31)  # as in `backward.py`
        if const_expr(not of_v):
            acc.store(acc.load() * scale)
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        to_16_bits(acc, rounded)
        to_chip = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), tile.mma_acc
        ).get_slice(thread)
        self.sync_consumers()  # the other has read K and V
        cute.copy(to_chip, to_chip.retile(rounded), to_chip.partition_D(staged[None, None, 0]))
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_warpgroup(gradient)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS == 0:
            origin = (0, *tile.bounds.sequence.origin_dk(tile.first_key, tile.bounds.tile.head))
            gmem, smem = box_of(tma, staged[None, None, 0], origin)
            cute.copy(tma, smem, gmem)  # B2.18
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            pipeline.consumer_release(work_idx)

    @cute.jit
    def leave_part(self, tile: Tile, gradient: Constexpr[Gradient], workspace: Workspace, work_idx: Int32):
        """Write dV or dK of the tile to memory, to be added to those of other heads."""
        of_v = const_expr(gradient == Gradient.OF_V)
        pipeline = tile.storage.v_pipeline if of_v else tile.storage.k_pipeline
        self.sync_consumers()  # the other has read K and V
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS == 0:
            pipeline.consumer_release(work_idx)
        memory = workspace.dv_parts if of_v else workspace.dk_parts
        store_part(memory, tile.acc, tile.bounds.place_of_keys(), tile.thread)

    @cute.jit
    def sync_warpgroup(self, gradient: Constexpr[Gradient]):
        """Barrier of a warpgroup's warps."""
        cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE + int(gradient), number_of_threads=WARPGROUP)


@cute.jit
def add_four(memory: cute.Pointer, x: cute.Tensor, first: Constexpr[int]):
    """Add four float32 numbers to those in memory."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[memory, x[first], x[first + 1], x[first + 2], x[first + 3]],
    )
