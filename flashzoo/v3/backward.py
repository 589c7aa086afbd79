"""FlashAttention-3's backward pass for one Hopper GPU, in CuTe DSL.

What is computed is FlashAttention-2's Algorithm 2, whose lines are marked B2.x; the roles are those of
FlashAttention-3's own code (`hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp` in Dao-AILab/flash-attention).

1. One thread block stays on each multiprocessor and works on tile after tile: a block of keys and values, and all
   queries that see it, of every query head that shares them. dK and dV stay in registers.
2. The producer, one warp, has TMA load K and V once, and Q and dO block by block, with the LSE and delta of their rows.
3. A consumer warpgroup has 64 of the keys. It computes S^T = K Q^T and dP^T = V dO^T, and from them
   P^T = exp(S^T - LSE) and dS^T = P^T (dP^T - delta), with no online softmax: the forward pass has left the LSE.
   Transposed, because then P^T and dS^T go into dV += P^T dO and dK += dS^T Q straight from registers.
4. dQ += dS K needs the keys of all warpgroups: dS goes through shared memory, and each warpgroup computes a part of dQ.
5. That part goes to shared memory, and the writer, a warp of its own, has TMA add it to dQ in memory, in float32. Tiles
   add in the order in which they come; in deterministic mode in a fixed one, by semaphores in memory.
6. dK and dV leave through the shared memory of dS, and the writer has TMA store them. So K and V of the next tile may
   come when the last dQ is computed, and come while dK and dV leave.
7. Where tiles of all queries that see their keys are too few to keep every multiprocessor busy, the query heads that
   share keys are split over several tiles, or the blocks of queries of one head. Each leaves its part of dK and dV as
   it is in registers, in float32, and a kernel behind this one adds them in order (`delta.py`).

Before it `delta.py` computes delta = rowsum(dO O) less the gradient of the LSE; after it dQ is rounded, unless a tile
has all keys (`backward_all_keys.py`) or a thread block all tiles of a head (`backward_by_head.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp
from cutlass.utils import hopper_helpers

from flashzoo._cute.hopper.bounds import NEVER, BoundsBackward, ThreadBounds
from flashzoo._cute.hopper.dtypes import DTYPES
from flashzoo._cute.hopper.mask import mask_scores
from flashzoo._cute.hopper.opaque import opaque
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.pipeline import Pipeline, sync_cluster
from flashzoo._cute.hopper.scores import Scores, Told
from flashzoo._cute.hopper.tile_scheduler import CLAIMED_AT_ONCE, TileScheduler, TileSchedulerBackward
from flashzoo._cute.hopper.tma import box_of, load, tma_atom
from flashzoo._cute.hopper.wgmma import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    columns_of,
    gemm,
    rows_of,
    shared_layout,
    to_16_bits,
    transposed,
)
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS, WARPS
from flashzoo.v3.scored_backward import differentiate, modify_block, told_of_head, told_of_keys
from flashzoo.v3.softmax import LN2
from flashzoo.v3.traits import ALIGNED, KernelBackward, TilesBackward

PRODUCER = 0
"""The warp that loads; the writers come after it."""


class NamedBarrier(IntEnum):
    """Hardware barriers of the block; 0 is `sync_threads`."""

    CONSUMERS = 1  # all consumer warpgroups


@dataclass(frozen=True)
class TmaAtoms:
    """TMA copies of the tensors: loads, but for those of dk, dv and, where a tile has all keys, dq."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    do: cute.CopyAtom
    dk: cute.CopyAtom
    dv: cute.CopyAtom
    dq: cute.CopyAtom | None = None


@dataclass(frozen=True)
class Workspace:
    """What `delta.py` leaves in memory, and what it is left there.

    Attributes:
        lse, delta: float32 (batch, heads, padded queries), LSE in log2 units.
        dq: float32 (batch, heads, blocks of queries, consumers, a warpgroup's part as it lies in registers); by head
            (thread blocks, blocks of queries, ...).
        dq_semaphore: where deterministic, how many tiles have added to each part of a block of dQ.
        dk_parts, dv_parts: where query heads are split, each tile's dK and dV: float32 (tiles, parts of 64 keys,
            a part as it lies in registers).
    """

    lse: cute.Pointer
    delta: cute.Pointer
    dq: cute.Pointer
    dq_semaphore: cute.Pointer
    dk_parts: cute.Pointer
    dv_parts: cute.Pointer


@dataclass(frozen=True)
class SharedStorage:
    """A thread block's shared memory: K and V of the tile, and in a pair what dQ needs of the partner's K; stages of
    Q and dO with the LSE and delta of their rows, and of dS; dK and dV on their way to memory, in the place of others;
    `exchange`, through which float32 registers go from warpgroup to writer, or to the other warpgroup. `ds_pipeline` is
    by gradient that of dS; by keys, whose warpgroups wait for one another at dS, that of dK and dV in its place.
    `first` as in `TileScheduler`."""

    k: cute.Tensor
    k_partner: cute.Tensor | None
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    exchange: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    work: cute.Tensor
    first: cute.Tensor | None
    k_pipeline: Pipeline
    v_pipeline: Pipeline
    q_pipeline: Pipeline
    do_pipeline: Pipeline
    ds_pipeline: Pipeline
    exchange_pipeline: Pipeline
    semaphore_pipeline: Pipeline
    work_pipeline: Pipeline


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup's operands and state for one tile.

    Attributes:
        wg_idx: which warpgroup.
        thread: of all consumers.
        storage: shared memory.
        work_idx: number of the tile.
        end: one past its last block of Q and dO, counted over all tiles.
        mma_s, mma_dq: products whose operands are in shared memory: of scores, S^T, and of dQ.
        mma_dp: of dP^T: as mma_s, unless V is in registers.
        mma_dk, mma_dv: products whose first operand is in registers.
        k, v: first operands of the scores; q, do: their second ones, all stages.
        do_t, q_t: second operands of dV and dK, all stages.
        ds, k_t: operands of dQ; ds with all stages.
        dk, dv: the accumulators.
        bounds: the queries that see this thread's keys.
        scale_log2: what scores are multiplied by to be in log2 units.
        scale: softmax scale.
        column: the first of a block's queries that this thread has.
        told: what a function on scores is told of its keys, or None.
    """

    wg_idx: Int32
    thread: Int32
    storage: SharedStorage
    work_idx: Int32
    end: Int32
    mma_s: cute.TiledMma
    mma_dp: cute.TiledMma
    mma_dq: cute.TiledMma
    mma_dk: cute.TiledMma
    mma_dv: cute.TiledMma
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_t: cute.Tensor
    do_t: cute.Tensor
    ds: cute.Tensor
    k_t: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    bounds: ThreadBounds
    scale_log2: Float32
    scale: Float32
    column: Int32
    told: Told | None


@dataclass(frozen=True)
class Block:
    """A step's block of queries.

    Attributes:
        bounds: what the tile walks.
        used: which of the thread block's.
        n: which of the tile's.
        head: whose queries.
        q_stage, do_stage: where on chip its Q and LSE, and its dO and delta are.
        crosses: some of its queries don't see some keys of the warpgroup.
    """

    bounds: BoundsBackward
    used: Int32
    n: Int32
    head: Int32
    q_stage: Int32
    do_stage: Int32
    crosses: Boolean


class Backward:
    """The program of one `KernelBackward`."""

    scheduler: type[TileScheduler] = TileSchedulerBackward
    bounds: type[BoundsBackward] = BoundsBackward
    pipeline: type[Pipeline] = Pipeline  # of what is loaded for all that share it
    pipeline_of_work: type[Pipeline] = Pipeline
    pipeline_of_ds: type[Pipeline] = Pipeline

    def __init__(self, kernel: KernelBackward) -> None:
        self.kernel = kernel
        self.tiles: TilesBackward = kernel.tiles
        self.dtype: type[cutlass.Numeric] = DTYPES[kernel.dtype]
        self.part: int = kernel.dq_part[0] * kernel.dq_part[1]
        # warps that read, or write, what a pipeline guards, and loads of it
        self.kv_readers: int = WARPS * kernel.tiles.consumers
        self.k_loads = 1
        self.ds_places: int = kernel.tiles.ds_stages
        self.ds_readers: int = 1
        self.ds_writers: int = WARPS * kernel.tiles.consumers
        self.exchange_readers = 1
        self.work_readers: int = WARPS * kernel.tiles.consumers + kernel.writers
        # how many blocks of Q and dO have room before K and V have: those are released in a tile's last step
        self.before_kv: int = kernel.tiles.stages - 1
        self.score_mod: Scores | None = None if kernel.scoring is None else Scores(kernel.scoring, "q")
        # whether P and dS are made together, as a function on scores has a derivative
        self.by_slope: bool = self.score_mod is not None and not self.score_mod.adds

    @cute.jit
    def __call__(
        self,
        operands: tuple[cute.Tensor, ...],
        workspace: Workspace,
        params: Params,
        scale_log2: Float32,
        scale: Float32,
        *tensors: Any,
    ):
        """What is compiled. It is never run: `flashzoo._cute.driver` launches the kernel with descriptors of its own.

        Args:
            operands: q, k, v, do, dk, dv, and where a tile has all keys dq. Of queries (head_dim, heads, queries,
                batch), of keys (head_dim, heads, keys, batch), of packed sequences as `packed.py` has it.
            scale_log2: of the scores: softmax scale times log2 e.
            scale: softmax scale.
            tensors: where its function on scores reads some those, as `scoring.parameters_of` has them.
        """
        q, k, v, do, dk, dv, *dq = operands
        tiles, kernel = self.tiles, self.kernel
        layouts = (
            shared_layout(self.dtype, tiles.block_kv, kernel.width, 1, kernel.swizzled_k),
            shared_layout(self.dtype, tiles.block_kv, kernel.width_v, 1),
            shared_layout(self.dtype, tiles.block_q, kernel.width, tiles.stages),
            shared_layout(self.dtype, tiles.block_q, kernel.width_v, kernel.stages_do),
            shared_layout(self.dtype, tiles.block_q, tiles.block_kv, self.ds_places),
        )
        k_layout, v_layout, q_layout, do_layout, _ = layouts
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_shared = load if kernel.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        atoms = []
        for operation, x, layout, cluster in (
            (load_shared, q, q_layout, kernel.cluster),
            (load, k, k_layout, 1),
            (load, v, v_layout, 1),
            (load_shared, do, do_layout, kernel.cluster),
            (store, dk, k_layout, 1),
            (store, dv, v_layout, 1),
        ):
            atoms.append(tma_atom(operation, x, layout, cluster))
        for x in dq:
            atoms.append(tma_atom(store, x, self.layout_of_dq(), 1))
        read = tensors[0] if len(tensors) > 0 else None
        self.device(TmaAtoms(*atoms), workspace, params, scale_log2, scale, read, *layouts).launch(
            grid=[1, 1, 1], block=[kernel.threads, 1, 1], smem=kernel.shared_bytes, min_blocks_per_mp=1
        )

    @cute.kernel
    def device(
        self,
        tma: TmaAtoms,
        workspace: Workspace,
        params: Params,
        scale_log2: Float32,
        scale: Float32,
        tensors: Any,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
        do_layout: cute.ComposedLayout,
        ds_layout: cute.ComposedLayout,
    ):
        """One thread block: pipelines, then each warp to its role."""
        kernel, tiles = self.kernel, self.tiles
        smem = cutlass.memory.SmemAllocator()
        k, v, q, do = (
            smem.allocate_tensor(self.dtype, x.outer, ALIGNED, swizzle=x.inner)
            for x in (k_layout, v_layout, q_layout, do_layout)
        )
        k_partner = self.allocate_keys_of_partner(smem)
        of_ds = smem.allocate_array(self.dtype, kernel.ds_elements, byte_alignment=ALIGNED)
        ds = laid_out(of_ds, ds_layout)
        storage = SharedStorage(
            *(k, k_partner, v, q, do, ds, *self.staged(k, v, of_ds, k_layout, v_layout)),
            smem.allocate_tensor(Float32, cute.make_layout(self.kernel.exchange), ALIGNED),
            *[
                smem.allocate_tensor(Float32, cute.make_layout((tiles.block_q, stages)), 16)
                for stages in (tiles.stages, kernel.stages_do)
            ],
            cute.make_tensor(smem.allocate_array(Int32, kernel.words_of_work), cute.make_layout(kernel.words_of_work)),
            smem.allocate_tensor(Int32, cute.make_layout(1), 4) if const_expr(kernel.deterministic) else None,
            *[
                kind.allocate(smem, stages)
                for kind, stages in (
                    (Pipeline, 1),
                    (Pipeline, 1),
                    (self.pipeline, tiles.stages),
                    (self.pipeline, kernel.stages_do),
                    (self.pipeline_of_ds, kernel.ds_barriers),
                    (Pipeline, kernel.exchange_barriers),
                    (Pipeline, max(1, kernel.writers)),
                    (self.pipeline_of_work, 1),
                )
            ],
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma.q, tma.k, tma.v, tma.do, tma.dk, tma.dv):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                storage.k_pipeline.initialize(self.kv_readers, self.k_loads)
                storage.v_pipeline.initialize(self.kv_readers)
                storage.q_pipeline.initialize(WARPS * tiles.consumers)
                storage.do_pipeline.initialize(WARPS * tiles.consumers)
                storage.ds_pipeline.initialize(self.ds_readers, self.ds_writers)
                storage.exchange_pipeline.initialize(self.exchange_readers, WARPS)
                storage.semaphore_pipeline.initialize(WARPS * tiles.consumers)
                storage.work_pipeline.initialize(self.work_readers)
            if const_expr(kernel.deterministic):
                self.scheduler(params, storage.first).claim_first()
        cute.arch.mbarrier_init_fence()
        if const_expr(kernel.cluster > 1):
            sync_cluster()
        else:
            cute.arch.sync_threads()

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS[tiles.consumers])
            if warp == PRODUCER:
                self.produce(params, storage, tma, workspace)
            elif warp <= PRODUCER + kernel.writers:
                self.store(params, storage, tma, warp - PRODUCER - 1, workspace)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[tiles.consumers])
            self.consume(params, storage, tma, workspace, scale_log2, scale, tensors)
        if const_expr(kernel.cluster > 1):
            sync_cluster()  # until then others write into this thread block's shared memory and arrive at its mbarriers

    def allocate_keys_of_partner(self, smem: cutlass.memory.SmemAllocator) -> cute.Tensor | None:
        """Room for what a thread block of a pair needs of the other's K."""
        return None

    def load_keys_of_partner(self, bounds: BoundsBackward, storage: SharedStorage, tma: TmaAtoms) -> None:
        """Have TMA read it; K's mbarrier is told, and its place in K's pipeline is its own."""

    def staged(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        of_ds: cute.Pointer,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Where dK and dV wait for TMA: in the place of dS."""
        return laid_out(of_ds, k_layout), laid_out(of_ds + self.tiles.block_kv * self.kernel.width, v_layout)

    @cute.jit
    def produce(self, params: Params, storage: SharedStorage, tma: TmaAtoms, workspace: Workspace):
        """The producer warp: tile after tile, what the consumers will wait for."""
        tiles, scheduler = self.tiles, self.scheduler(params, storage.first)
        loaded = Int32(0)  # blocks of Q and dO so far, over all tiles
        work_idx = Int32(0)  # tiles so far
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            tile = scheduler.work_tile(work)
            bounds = self.bounds(params, tile)
            begin, end = bounds.block_range()
            steps = bounds.steps(begin, end)
            claimed = Int32(0)
            if steps <= CLAIMED_AT_ONCE:
                claimed = scheduler.claim_next(work)
            first = cutlass.min(steps, self.before_kv)
            for i in cutlass.range(first, unroll=1):
                self.load_queries(bounds, storage, tma, workspace, loaded + i, i, begin, end)
            origin = (0, *bounds.sequence.origin_k(tile.block * tiles.block_kv, bounds.head_kv()))
            for atom, x, pipeline in ((tma.k, storage.k, storage.k_pipeline), (tma.v, storage.v, storage.v_pipeline)):
                pipeline.producer_acquire(work_idx)
                load(atom, x[None, None, 0], origin, pipeline.full)
            self.load_keys_of_partner(bounds, storage, tma)
            for i in cutlass.range(first, steps, unroll=1):
                self.load_queries(bounds, storage, tma, workspace, loaded + i, i, begin, end)
            loaded += steps
            if steps > CLAIMED_AT_ONCE:
                claimed = scheduler.claim_next(work)
            work = scheduler.publish_claimed(storage.work, storage.work_pipeline, work_idx, claimed)
            work_idx += 1

    @cute.jit
    def load_queries(
        self,
        bounds: BoundsBackward,
        storage: SharedStorage,
        tma: TmaAtoms,
        workspace: Workspace,
        loaded: Int32,
        step: Int32,
        begin: Int32,
        end: Int32,
    ):
        """Q and dO of a tile's step, with the LSE and delta of their rows."""
        # The producer has 24 registers; and where it spills ptxas may serialise the WGMMAs of its neighbours too.
        head, n = bounds.step(opaque(step), begin, end)
        block = bounds.block_q(n)
        origin = (0, *bounds.sequence.origin_q(block * self.tiles.block_q, head))
        first = bounds.block_of_queries(head, block) * self.tiles.block_q
        for atom, x, pipeline, values, column in (
            (tma.q, storage.q, storage.q_pipeline, workspace.lse, storage.lse),
            (tma.do, storage.do, storage.do_pipeline, workspace.delta, storage.delta),
        ):
            pipeline.producer_acquire(loaded)
            stage = pipeline.stage(loaded)
            load(
                *(atom, x[None, None, stage], origin, pipeline.full + stage, values + first, column[None, stage]),
                self.kernel.cluster,
            )

    @cute.jit
    def store(self, params: Params, storage: SharedStorage, tma: TmaAtoms, writer: Int32, workspace: Workspace):
        """A writer warp: has TMA add the warpgroups' parts of dQ to memory. The first one has it store dK and dV."""
        tiles, scheduler = self.tiles, self.scheduler(params, storage.first)
        written = Int32(0)
        work_idx = Int32(0)
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            bounds = self.bounds(params, scheduler.work_tile(work))
            begin, end = bounds.block_range()
            steps = bounds.steps(begin, end)
            for i in cutlass.range(self.first_step(written, writer), steps, self.kernel.writers, unroll=1):
                head, n = bounds.step(i, begin, end)
                block_q = bounds.block_q(n)
                of_block = bounds.block_of_queries(head, block_q)
                before = bounds.adds_before(block_q)
                if const_expr(self.kernel.deterministic):
                    semaphore_wait(workspace.dq_semaphore + of_block, before)
                self.write_dq(bounds, storage, tma, workspace, written + i, head, block_q)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                for w in cutlass.range_constexpr(tiles.consumers):
                    storage.exchange_pipeline.consumer_release((written + i) * tiles.consumers + w)
                if const_expr(self.kernel.deterministic):
                    cute.arch.cp_async_bulk_wait_group(0)  # this thread's sums are in memory, to whom it releases them
                    cute.arch.fence_proxy("async.global")
                    semaphore_arrive(workspace.dq_semaphore + of_block, before)
            written += steps
            if const_expr(not self.kernel.split_queries):  # noqa: SIM102 - one is known when compiled, the other when run
                if writer == 0:
                    self.store_dk_dv(bounds, storage, tma, work_idx)
            work = scheduler.next_work(storage.work, storage.work_pipeline, work_idx)
            work_idx += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

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
        """Have TMA add the warpgroups' parts of dQ of a block of queries to memory."""
        consumers, of_block = self.tiles.consumers, bounds.block_of_queries(head, block_q)
        for w in cutlass.range_constexpr(consumers):
            storage.exchange_pipeline.consumer_wait(used * consumers + w)
            put(workspace.dq + (of_block * consumers + w) * self.part, storage.exchange[None, w], adds=True)  # B2.15
            cute.arch.cp_async_bulk_commit_group()

    def layout_of_dq(self) -> cute.ComposedLayout:
        """That of a block of dQ on chip, rounded, where a tile has all keys."""
        kernel = self.kernel
        return shared_layout(self.dtype, self.tiles.block_q, kernel.width, 1, kernel.dq_part[1])

    @cute.jit
    def store_dk_dv(self, bounds: BoundsBackward, storage: SharedStorage, tma: TmaAtoms, work_idx: Int32):
        """Have TMA write dK and dV of the tile to memory. It leaves out what is outside of the tensors."""
        origin = (0, *bounds.sequence.origin_dk(bounds.tile.block * self.tiles.block_kv, bounds.tile.head))
        storage.ds_pipeline.consumer_wait(work_idx)
        for atom, staged in ((tma.dk, storage.dk), (tma.dv, storage.dv)):
            gmem, smem = box_of(atom, staged[None, None, 0], origin)
            cute.copy(atom, smem, gmem)  # B2.18
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.release_staged(storage, work_idx)

    def release_staged(self, storage: SharedStorage, work_idx: Int32) -> None:
        """TMA has read dK and dV of the tile where they were staged."""
        storage.ds_pipeline.consumer_release(work_idx)

    def first_step(self, before: Int32, writer: Int32) -> Int32:
        """The first step of a tile that a writer takes, after `before` steps of earlier tiles:
        writers take steps round-robin."""
        return (
            (writer - before % self.kernel.writers + self.kernel.writers) % self.kernel.writers
            if self.kernel.writers > 1
            else Int32(0)
        )

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
        """A consumer warpgroup: its keys of tile after tile."""
        kernel, tiles, scheduler = self.kernel, self.tiles, self.scheduler(params, storage.first)
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        lane = cute.arch.lane_idx()
        wg_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPS - 1)
        # WGMMA gives a thread two rows, here keys, 8 apart, and pairs of columns, here queries, 8 apart.
        row, column = thread // 32 * 16 + lane // 4, lane % 4 * 2

        mma_s, mma_dp = (
            self.mma(OperandMajorMode.K, OperandMajorMode.K, (tiles.consumers, 1, 1), tiles.queries_at_once, source)
            for source in (
                warpgroup.OperandSource.SMEM,
                warpgroup.OperandSource.RMEM if tiles.v_in_registers else warpgroup.OperandSource.SMEM,
            )
        )
        mma_dv, mma_dk = (
            self.mma(
                OperandMajorMode.K, OperandMajorMode.MN, (tiles.consumers, 1, 1), width, warpgroup.OperandSource.RMEM
            )
            for width in (kernel.width_v, kernel.width)
        )
        mma_dq = self.mma_of_dq()
        s, of_dp, of_dv, of_dk, of_dq = (
            x.get_slice(wg_idx * WARPGROUP) for x in (mma_s, mma_dp, mma_dv, mma_dk, mma_dq)
        )
        k = mma_s.make_fragment_A(s.partition_A(storage.k[None, None, 0]))
        v = mma_dp.make_fragment_A(of_dp.partition_A(storage.v[None, None, 0]))
        q, do = (mma_s.make_fragment_B(s.partition_B(x)) for x in (storage.q, storage.do))
        q_t = mma_dk.make_fragment_B(of_dk.partition_B(transposed(storage.q)))
        do_t = mma_dv.make_fragment_B(of_dv.partition_B(transposed(storage.do)))
        ds = mma_dq.make_fragment_A(of_dq.partition_A(storage.ds))
        k_t = mma_dq.make_fragment_B(of_dq.partition_B(transposed(storage.k)))[None, None, None, 0]
        dk = cute.make_rmem_tensor(of_dk.partition_shape_C((tiles.block_kv, kernel.width)), Float32)
        dv = cute.make_rmem_tensor(of_dv.partition_shape_C((tiles.block_kv, kernel.width_v)), Float32)

        used = Int32(0)  # blocks of Q and dO so far, over all tiles
        work_idx = Int32(0)  # tiles so far
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            tile = scheduler.work_tile(work)
            bounds = self.bounds(params, tile)
            begin, end = bounds.block_range()
            steps = bounds.steps(begin, end)
            first_key = tile.block * tiles.block_kv
            of_thread = bounds.of_thread(first_key + row, column)
            consumer = Consumer(
                *(
                    wg_idx,
                    thread,
                    storage,
                    work_idx,
                    used + steps,
                    mma_s,
                    mma_dp,
                    mma_dq,
                    mma_dk,
                    mma_dv,
                    k,
                    v,
                    q,
                    do,
                    q_t,
                    do_t,
                    ds,
                    k_t,
                    dk,
                    dv,
                    of_thread,
                    self.in_log2(scale_log2),
                    scale,
                    column,
                    told_of_keys(self.score_mod, bounds, first_key + row, scale_log2 * LN2, tensors),
                )
            )
            dk.fill(0.0)
            dv.fill(0.0)  # B2.7
            storage.k_pipeline.consumer_wait(work_idx)  # B2.6
            storage.v_pipeline.consumer_wait(work_idx)
            if const_expr(tiles.v_in_registers):
                from_chip = cute.make_tiled_copy_A(
                    cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), self.dtype), mma_dp
                ).get_slice(thread + (work_idx >> 31))  # as in `epilogue`
                cute.copy(from_chip, from_chip.partition_S(storage.v[None, None, 0]), from_chip.retile(v))
            used = self.walk(bounds, consumer, used, begin, end)  # B2.8
            if steps == 0:
                self.release_kv(consumer)
            work = scheduler.next_work(storage.work, storage.work_pipeline, work_idx)
            if const_expr(kernel.split_queries):
                self.leave_parts(bounds, consumer, workspace)
            else:
                self.epilogue(consumer)
            work_idx += 1

    @cute.jit
    def walk(self, bounds: BoundsBackward, consumer: Consumer, used: Int32, begin: Int32, end: Int32) -> Int32:
        """Take the tile's blocks of queries into dK, dV and dQ, in the order of `Bounds.step`; how many the thread
        block has used then."""
        kernel, (first_head, heads) = self.kernel, bounds.heads()
        first_key = bounds.tile.block * self.tiles.block_kv + consumer.wg_idx * WARPGROUP_ROWS
        outer, inner = (end - begin, heads) if const_expr(kernel.uneven) else (heads, end - begin)
        for i in cutlass.range(outer, unroll=1):
            for j in cutlass.range(inner, unroll=1):
                n = bounds.nth(i if const_expr(kernel.uneven) else j, begin, end)
                head = first_head + (j if const_expr(kernel.uneven) else i)
                self.step(bounds, consumer, used, n, head, bounds.crosses(first_key, n))
                used += 1
        return used

    def in_log2(self, scale_log2: Float32) -> Float32:
        """What scores are multiplied by, those that a function gives where there is one."""
        return scale_log2 if self.score_mod is None else self.score_mod.scale_log2(scale_log2 * LN2)

    def mma(
        self,
        a_major: OperandMajorMode,
        b_major: OperandMajorMode,
        warpgroups: tuple[int, int, int],
        columns: int,
        a_source: warpgroup.OperandSource = warpgroup.OperandSource.SMEM,
    ) -> cute.TiledMma:
        """A product of all consumers, each with 64 rows and that many columns."""
        return hopper_helpers.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, a_major, b_major, Float32, warpgroups, (WARPGROUP_ROWS, columns)),
            a_source=a_source,
        )

    def mma_of_dq(self) -> cute.TiledMma:
        """dQ = dS K: each warpgroup has 64 of its rows, which are queries, or else some of its columns."""
        consumers = self.tiles.consumers
        warpgroups = (consumers, 1, 1) if self.kernel.dq_by_rows else (1, consumers, 1)
        return self.mma(OperandMajorMode.K, OperandMajorMode.MN, warpgroups, self.kernel.dq_part[1])

    @cute.jit
    def step(self, bounds: BoundsBackward, consumer: Consumer, used: Int32, n: Int32, head: Int32, crosses: Boolean):
        """Take the tile's n-th block of queries of a head into dK, dV and dQ."""
        storage = consumer.storage
        block = self.block(bounds, consumer, used, n, head, crosses)
        p, ds = self.begin_step(consumer, block)
        gemm(consumer.mma_dv, consumer.dv, p, consumer.do_t[None, None, None, block.do_stage], False)  # B2.12

        self.acquire_ds(consumer)  # in a branch, for the tile's first step alone, it would cost registers
        self.leave_ds(consumer, block, 0, ds)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_consumers()

        dq = self.issue_dq(consumer, used % self.tiles.ds_stages)  # B2.15: dS K
        warpgroup.wait_group(1)
        storage.do_pipeline.consumer_release(used)
        gemm(consumer.mma_dk, consumer.dk, ds, consumer.q_t[None, None, None, block.q_stage], False)  # B2.16
        warpgroup.wait_group(1)
        if used + 1 == consumer.end:
            self.release_kv(consumer)
        self.stage_dq(consumer, dq, used)
        warpgroup.wait_group(0)
        storage.q_pipeline.consumer_release(used)

    @cute.jit
    def begin_step(self, consumer: Consumer, block: Block) -> tuple[cute.Tensor, cute.Tensor]:
        """P and dS, rounded, of the block's queries, or of the first half of them."""
        storage = consumer.storage
        storage.q_pipeline.consumer_wait(block.used)  # B2.9
        s = self.issue_s(consumer, block, 0)
        storage.do_pipeline.consumer_wait(block.used)
        dp = self.issue_dp(consumer, block, 0)
        warpgroup.wait_group(1)
        self.make_p(consumer, block, 0, s)
        warpgroup.wait_group(0)
        return self.make_ds(consumer, block, 0, s, dp)

    def block(
        self, bounds: BoundsBackward, consumer: Consumer, used: Int32, n: Int32, head: Int32, crosses: Boolean
    ) -> Block:
        """The tile's n-th block of queries of a head, and the used-th of the thread block's."""
        q, do = consumer.storage.q_pipeline, consumer.storage.do_pipeline
        return Block(bounds, used, n, head, q.stage(used), do.stage(used), crosses)

    def scores_of(self, consumer: Consumer) -> cute.Tensor:
        """Registers for S^T or dP^T."""
        size = (self.tiles.block_kv, self.tiles.queries_at_once)
        return cute.make_rmem_tensor(consumer.mma_s.get_slice(0).partition_shape_C(size), Float32)

    @cute.jit
    def issue_s(self, consumer: Consumer, block: Block, half: Constexpr[int]) -> cute.Tensor:
        """Registers that will hold S^T of the block's queries, or of that half of them."""
        s = self.scores_of(consumer)
        q = consumer.q[None, None, None, block.q_stage]
        gemm(consumer.mma_s, s, consumer.k, columns_of(q, half), True)  # B2.10
        return s

    @cute.jit
    def issue_dp(self, consumer: Consumer, block: Block, half: Constexpr[int]) -> cute.Tensor:
        """The same of dP^T."""
        dp = self.scores_of(consumer)
        do = consumer.do[None, None, None, block.do_stage]
        gemm(consumer.mma_dp, dp, consumer.v, columns_of(do, half), True)  # B2.13
        return dp

    @cute.jit
    def make_p(self, consumer: Consumer, block: Block, half: Constexpr[int], s: cute.Tensor):
        """Turn S into P, in place, unless that waits for dP."""
        first = half * self.tiles.queries_at_once
        if const_expr(not self.by_slope):
            if const_expr(self.score_mod is not None):
                told = told_of_head(self.score_mod, consumer.told, block.head)
                where = consumer.bounds, consumer.column, block.crosses
                modify_block(self.score_mod, block.bounds, block.n, first, s, told, *where)
            elif block.crosses:
                self.mask(block.bounds, block.n, first, s, consumer.bounds, consumer.thread)
            lse = self.columns(consumer.storage.lse[None, block.q_stage], first)
            self.exponentiate(s, lse, consumer.scale_log2)  # B2.11

    @cute.jit
    def make_ds(
        self, consumer: Consumer, block: Block, half: Constexpr[int], s: cute.Tensor, dp: cute.Tensor
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """P and dS, rounded, of P, or S where that waits for dP."""
        tiles, storage, first = self.tiles, consumer.storage, half * self.tiles.queries_at_once
        p, ds = (
            cute.make_rmem_tensor(
                mma.get_slice(0).partition_shape_A((tiles.block_kv, tiles.queries_at_once)), self.dtype
            )
            for mma in (consumer.mma_dv, consumer.mma_dk)
        )
        delta = self.columns(storage.delta[None, block.do_stage], first)
        if const_expr(self.by_slope):
            lse = self.columns(storage.lse[None, block.q_stage], first)
            told = told_of_head(self.score_mod, consumer.told, block.head)
            where = consumer.bounds, consumer.column, block.crosses
            differentiate(self.score_mod, block.bounds, block.n, first, s, dp, lse, delta, p, ds, told, *where)
        else:
            self.differentiate(s, dp, delta, p, ds)  # B2.14
        return p, ds

    @cute.jit
    def leave_ds(self, consumer: Consumer, block: Block, half: Constexpr[int], ds: cute.Tensor):
        """Write dS to shared memory, for all warpgroups."""
        size = (self.tiles.block_kv, self.tiles.queries_at_once)
        to_chip = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(True, 4), self.dtype), consumer.mma_s)
        to_chip = to_chip.get_slice(consumer.thread)
        part = cute.make_tensor(ds.iterator, consumer.mma_s.get_slice(0).partition_shape_C(size))
        stage = block.used % self.tiles.ds_stages
        there = cute.local_tile(transposed(consumer.storage.ds)[None, None, stage], size, (0, half))
        cute.copy(to_chip, to_chip.retile(part), to_chip.partition_D(there))

    def mask(
        self,
        bounds: BoundsBackward,
        n: Int32,
        first: int,
        s: cute.Tensor,
        of_thread: ThreadBounds,
        thread: Int32,
    ) -> None:
        """Set what is not seen, of the scores of the tile's n-th block of queries from its first-th query on, to
        -inf."""
        mask_scores(s, of_thread, n * self.tiles.block_q + first, True, self.kernel.left)

    def columns(self, values: cute.Tensor, first: int = 0) -> cute.Tensor:
        """Of a block's LSE or delta, from its first-th query on, those of this thread's columns: (pair, pairs)."""
        pairs = cute.make_layout((2, self.tiles.queries_at_once // 8), stride=(1, 8))
        return cute.make_tensor((values.iterator + first + cute.arch.lane_idx() % 4 * 2).align(8), pairs)

    @cute.jit
    def exponentiate(self, s: cute.Tensor, lse: cute.Tensor, scale_log2: Float32):
        """Turn S into P, in place. LSE is inf in the padding and for rows that see nothing: their P is 0."""
        rows = rows_of(s)
        for i in cutlass.range_constexpr(cute.size(s) // 4):
            pair = lse[None, i].load()
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    rows[c, r, i] = cute.math.exp2(rows[c, r, i] * scale_log2 - pair[c], fastmath=True)

    @cute.jit
    def differentiate(
        self, p: cute.Tensor, dp: cute.Tensor, delta: cute.Tensor, p_rounded: cute.Tensor, ds_rounded: cute.Tensor
    ):
        """Round P, and dS, from dP: pair by pair, so that few numbers are in registers in both precisions at a time."""
        p, dp, p_rounded, ds_rounded = (rows_of(x) for x in (p, dp, p_rounded, ds_rounded))
        ds = cute.make_rmem_tensor(2, Float32)
        for i in cutlass.range_constexpr(cute.size(p, mode=[2])):
            pair = delta[None, i].load()
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    ds[c] = p[c, r, i] * (dp[c, r, i] - pair[c])
                p_rounded[None, r, i].store(p[None, r, i].load().to(self.dtype))
                ds_rounded[None, r, i].store(ds.load().to(self.dtype))

    @cute.jit
    def issue_dq(self, consumer: Consumer, stage: Int32) -> cute.Tensor:
        """Registers that will hold this warpgroup's part of dQ."""
        mma = consumer.mma_dq
        dq = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((self.tiles.block_q, self.kernel.width)), Float32)
        gemm(mma, dq, consumer.ds[None, None, None, stage], consumer.k_t, True)
        return dq

    @cute.jit
    def stage_dq(self, consumer: Consumer, dq: cute.Tensor, used: Int32):
        """Write this warpgroup's part of dQ to shared memory, for the writer."""
        storage, wg_idx = consumer.storage, consumer.wg_idx
        n = used * self.tiles.consumers + wg_idx
        mine = self.exchanged(consumer)
        # Each writer has mbarriers of its own for the same memory: the writer before must have read it.
        storage.exchange_pipeline.producer_acquire(n + (self.kernel.writers - 1) * self.tiles.consumers)
        cute.autovec_copy(cute.make_tensor(dq.iterator, cute.make_layout(mine.shape)), mine)
        storage.exchange_pipeline.producer_commit(n)

    def exchanged(self, consumer: Consumer) -> cute.Tensor:
        """Where a part of dQ is in shared memory what this thread has of it in registers, by fours."""
        fours = cute.make_layout((4, self.part // WARPGROUP // 4), stride=(1, 4 * WARPGROUP))
        part = consumer.storage.exchange[None, consumer.wg_idx]
        return cute.make_tensor((part.iterator + consumer.thread % WARPGROUP * 4).align(16), fours)

    @cute.jit
    def release_kv(self, consumer: Consumer):
        """This warp has read K and V of the tile: those of the next may come."""
        consumer.storage.k_pipeline.consumer_release(consumer.work_idx)
        consumer.storage.v_pipeline.consumer_release(consumer.work_idx)

    @cute.jit
    def acquire_ds(self, consumer: Consumer):
        """Wait until TMA has read dK and dV of the tile before, which are in the place of dS."""
        if const_expr(not self.kernel.split_queries):
            consumer.storage.ds_pipeline.producer_acquire(consumer.work_idx)

    @cute.jit
    def epilogue(self, consumer: Consumer):
        """Leave dK and dV of the tile to the writer, in the place of dS."""
        storage = consumer.storage
        # The sign of work_idx is 0, which the compiler can't know. Addresses that are the same for all tiles it would
        # work out once, and keep in registers that the steps need.
        thread = consumer.thread + (consumer.work_idx >> 31)
        consumer.dk.store(consumer.dk.load() * consumer.scale)
        self.acquire_ds(consumer)  # a tile without steps has not
        self.sync_consumers()  # the others have read dS
        for mma, acc, staged in (
            (consumer.mma_dk, consumer.dk, storage.dk),
            (consumer.mma_dv, consumer.dv, storage.dv),
        ):
            leave_rounded(acc, mma, thread, staged[None, None, 0])
        storage.ds_pipeline.producer_commit(Int32(0))

    @cute.jit
    def leave_parts(self, bounds: BoundsBackward, consumer: Consumer, workspace: Workspace):
        """Write this warpgroup's part of dK and dV of the tile to memory, to be added to those of other heads."""
        part = bounds.place_of_keys() * self.tiles.consumers + consumer.wg_idx
        store_part(workspace.dv_parts, consumer.dv, part, consumer.thread % WARPGROUP)
        store_part(workspace.dk_parts, consumer.dk, part, consumer.thread % WARPGROUP)

    @cute.jit
    def sync_consumers(self):
        """Barrier of all consumer warpgroups."""
        cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=self.tiles.consumers * WARPGROUP)


def laid_out(memory: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """Shared memory as a `shared_layout`."""
    return cute.make_tensor(cute.recast_ptr(memory, layout.inner, dtype=memory.dtype), layout.outer)


@cute.jit
def leave_rounded(acc: cute.Tensor, mma: cute.TiledMma, thread: Int32, staged: cute.Tensor):
    """Write a thread's part of a product's result to shared memory, rounded."""
    rounded = cute.make_rmem_tensor(acc.shape, staged.element_type)
    to_16_bits(acc, rounded)
    to_chip = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), staged.element_type), mma)
    to_chip = to_chip.get_slice(thread)
    cute.copy(to_chip, to_chip.retile(rounded), to_chip.partition_D(staged))


@cute.jit
def store_part(memory: cute.Pointer, acc: cute.Tensor, part: Int64, thread: Int32):
    """Write a warpgroup's accumulator to memory as it lies in registers, by fours: a part is 64 rows of it."""
    fours = cute.make_layout((4, cute.size(acc) // 4), stride=(1, 4 * WARPGROUP))
    mine = (memory + (part * (WARPGROUP * cute.size(acc)) + thread * 4)).align(16)
    cute.autovec_copy(cute.make_tensor(acc.iterator, cute.make_layout(fours.shape)), cute.make_tensor(mine, fours))


@cute.jit
def semaphore_wait(semaphore: cute.Pointer, before: Int32):
    """Until `before` tiles have added to a block of dQ; at once where it is `NEVER`."""
    if before != NEVER:
        seen = Int32(-1)
        while seen != before:
            seen = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[semaphore]
            )


@cute.jit
def semaphore_arrive(semaphore: cute.Pointer, before: Int32):
    """A tile has added to a block of dQ, unless `before` is `NEVER`. It releases its sums even where TMA has told that
    they are in memory: told so, some of them came behind those of who was told by a relaxed sum."""
    if before != NEVER:
        with cute.arch.elect_one():
            cute.arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[semaphore])


@cute.jit
def put(memory: cute.Pointer, storage: cute.Tensor, adds: Constexpr[bool]):
    """Have TMA write float32 values that lie one after the other to memory, or add them to those there."""
    copy, of = ("cp.reduce.async.bulk", ".add.f32") if const_expr(adds) else ("cp.async.bulk", "")
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            f"{copy}.global.shared::cta.bulk_group{of} [{{$r0}}], [{{$r1}}], {{$r2}};",
            read_only_args=[memory, storage.iterator, Int32(4 * cute.size(storage))],
        )
