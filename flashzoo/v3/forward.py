"""FlashAttention-3's forward pass for one Hopper GPU, in CuTe DSL.
Lines marked A1.x and A2.x are the paper's algorithms 1 and 2.

1. One thread block stays on each multiprocessor and works on tile after tile: 64 queries of one head for each of its
   consumer warpgroups.
2. The producer, one warp, has TMA load Q, and K and V block by block, last block first, into the stages of pipelines in
   shared memory. Two mbarriers a stage say that it is full and that it is empty.
3. A consumer warpgroup computes S = Q K^T on the tensor cores (WGMMA), P and l by online softmax in registers, and adds
   P V to O, P going into the product straight from registers.
4. Overlap inside a warpgroup: S of the next block is issued before O += P V of this one, and the softmax of the next
   runs while that product does.
5. Ping-pong between warpgroups, where `Tiles` asks for it: one issues its products after the other, so that one's
   softmax runs under another's products.
6. Epilogue: O / l goes through shared memory to TMA, which writes it while the next tile has begun. Where heads have
   sinks, exp(sink - m) joins l there.

What differs from v2: loads and products are asynchronous and are waited for where they are needed, by warps with roles
of their own, and not by a compiler's schedule. FP8 is in `fp8.py`. Left out of the paper: clusters with multicast.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.utils import hopper_helpers

from flashzoo._cute.hopper.bounds import Bounds
from flashzoo._cute.hopper.dtypes import DTYPES
from flashzoo._cute.hopper.mask import Mask
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.pipeline import Pipeline, PipelineState
from flashzoo._cute.hopper.scores import NOTHING_KNOWN, Scores, Told, modify, modify_within
from flashzoo._cute.hopper.tile_scheduler import CLAIMED_AT_ONCE, TileScheduler
from flashzoo._cute.hopper.tma import box_of, load, tma_atom
from flashzoo._cute.hopper.wgmma import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    gemm,
    rows_of,
    scale_rows,
    shared_layout,
    to_16_bits,
)
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS, WARPS
from flashzoo.v3.product import Product, RawV, ValuePath
from flashzoo.v3.softmax import LN2, Softmax, beside_sink
from flashzoo.v3.traits import ALIGNED, Kernel, Tiles


class NamedBarrier(IntEnum):
    """Hardware barriers of the block, for each kind the first of one a consumer warpgroup; 0 is `sync_threads`."""

    WARP_SCHEDULER = 1  # a warpgroup may issue its products: ping-pong
    EPILOGUE = 5  # a warpgroup's warps around the staging of O
    NEARLY_DONE = 9  # the first of one a team: its scheduler warp may look up the next tile


NEARLY_DONE_THREADS = 64
"""Of that barrier: the producer and the scheduler warp."""


@dataclass(frozen=True)
class TmaAtoms:
    """TMA copies of the tensors: loads, and of o stores."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    o: cute.CopyAtom


@dataclass(frozen=True)
class SharedStorage:
    """A thread block's shared memory: stages of 64 queries, of blocks of K and of V; O on its way out;
    the next tile's `Work`."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    work: cute.Tensor
    q_pipeline: Pipeline
    k_pipeline: Pipeline
    v_pipeline: Pipeline
    work_pipeline: Pipeline
    raw: RawV | None = None

    def of_team(self, team: Int32, tiles: Constexpr[Tiles], words: Constexpr[int]) -> SharedStorage:
        """A team's shared memory, where this is that of all teams, one team's behind another's."""
        stages = tiles.consumers * tiles.q_stages, tiles.stages, tiles.stages, tiles.consumers
        tensors = [
            cute.domain_offset((0, 0, team * n), x)
            for n, x in zip(stages, (self.q, self.k, self.v, self.o), strict=True)
        ]
        pipelines = [
            pipeline.of_team(team, tiles.teams)
            for pipeline in (self.q_pipeline, self.k_pipeline, self.v_pipeline, self.work_pipeline)
        ]
        return SharedStorage(
            *tensors, cute.make_tensor(self.work.iterator + team * words, self.work.layout), *pipelines
        )


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup's operands and state for one tile.

    Attributes:
        wg_idx: which warpgroup of its team.
        storage: shared memory.
        mma_qk, mma_pv: the two products.
        q, k, v: their operands in shared memory; k and v with all stages.
        p: P in registers, rounded, in the layout of an operand.
        o: the accumulator.
        s_shape: shape of a block of scores in registers.
        softmax: running state of this thread's two rows.
        row, column: of the warpgroup's scores, the first that this thread has:
            it has two rows, 8 apart, and pairs of columns, 8 apart.
        told: what a function on scores is told of these rows, or None.
    """

    wg_idx: Int32
    storage: SharedStorage
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    o: cute.Tensor
    s_shape: Constexpr[tuple]
    softmax: Softmax
    row: Int32
    column: Int32
    told: Told | None

    def issue_scores(self, n: PipelineState) -> cute.Tensor:
        """Registers that will hold Q times the n-th block of K, once the group of WGMMAs is waited for."""
        s = cute.make_rmem_tensor(self.s_shape, Float32)
        gemm(self.mma_qk, s, self.q, self.k[None, None, None, self.storage.k_pipeline.stage(n)], True)
        return s


class Forward:
    """The program of one `Kernel`.

    Attributes:
        scheduler, bounds: what says which tile is next, and what it walks.
        scheduler_warp: whether a warp of its own looks up the next tile, in place of the producer.
        claimed_at_once: blocks of a tile, up to which the next tile is claimed when this one begins.
        value: how V reaches the tensor core.
        product: how P is multiplied with it.
    """

    scheduler: type[TileScheduler] = TileScheduler
    bounds: type[Bounds] = Bounds
    scheduler_warp: bool = False
    claimed_at_once: int = CLAIMED_AT_ONCE

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.tiles: Tiles = kernel.tiles
        self.dtype: type[cutlass.Numeric] = DTYPES[kernel.dtype]
        self.dtype_o: type[cutlass.Numeric] = DTYPES[kernel.out_dtype]
        warpgroups = self.tiles.teams * self.tiles.consumers
        self.registers: tuple[int, int] = PRODUCER_REGISTERS[warpgroups], CONSUMER_REGISTERS[warpgroups]
        self.score_mod: Scores | None = None if kernel.scoring is None else Scores(kernel.scoring, "k")
        self.reads = kernel.scoring is not None and bool(kernel.scoring.reads)
        self.value: ValuePath = ValuePath(kernel)
        self.product: Product = Product(kernel)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Pointer,
        params: Params,
        scaling: Any,
        *more: Any,
    ):
        """What is compiled. It is never run: `flashzoo._cute.driver` launches the kernel with descriptors of its own.

        Args:
            q, o: (head_dim, heads, queries, batch), of packed sequences as `packed.py` has it.
            k, v: (head_dim, heads, keys, batch); v (keys, heads, head_dim, batch) where an FP8 kernel
                takes it transposed.
            scaling: of the scores: softmax scale times log2 e; in FP8 a `Scaling`.
            more: where the kernel has them sinks, a float for each query head; and tensors that its function on scores
                reads, as `scoring.parameters_of` has them.
        """
        tiles, kernel = self.tiles, self.kernel
        sinks, tensors = (more[0] if kernel.sinks else None), (more[-1] if self.reads else None)
        layouts = (
            shared_layout(self.dtype, WARPGROUP_ROWS, kernel.width, tiles.teams * tiles.consumers * tiles.q_stages),
            shared_layout(self.dtype, tiles.block_kv, kernel.width, tiles.teams * tiles.stages),
            self.value.shared_layout(),
            shared_layout(self.dtype_o, WARPGROUP_ROWS, kernel.width_o, tiles.teams * tiles.consumers),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        atoms = []
        for operation, x, layout in zip((load, load, load, store), (q, k, v, o), layouts, strict=True):
            atoms.append(tma_atom(operation, x, layout))
        self.device(TmaAtoms(*atoms), lse, params, scaling, sinks, tensors, *layouts).launch(
            grid=[1, 1, 1], block=[kernel.threads, 1, 1], smem=kernel.shared_bytes, min_blocks_per_mp=1
        )

    @cute.kernel
    def device(
        self,
        tma: TmaAtoms,
        lse: cute.Pointer,
        params: Params,
        scaling: Any,
        sinks: Any,
        tensors: Any,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        o_layout: cute.ComposedLayout,
    ):
        """One thread block: pipelines, then each warpgroup to its role."""
        kernel, tiles = self.kernel, self.tiles
        smem = cutlass.memory.SmemAllocator()
        # A1.1
        q, k = (smem.allocate_tensor(self.dtype, x.outer, ALIGNED, swizzle=x.inner) for x in (q_layout, k_layout))
        v, raw = self.value.allocate(smem, v_layout)
        storage = SharedStorage(
            *(q, k, v, smem.allocate_tensor(self.dtype_o, o_layout.outer, ALIGNED, swizzle=o_layout.inner)),
            cute.make_tensor(
                smem.allocate_array(Int32, tiles.teams * kernel.words_of_work), cute.make_layout(kernel.words_of_work)
            ),
            *[
                Pipeline.allocate(smem, tiles.teams * stages)
                for stages in (tiles.consumers * tiles.q_stages, tiles.stages, kernel.stages_v, 1)
            ],
            None if raw is None else RawV(raw, Pipeline.allocate(smem, self.value.stages)),
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma.q, tma.k, tma.v, tma.o):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                storage.q_pipeline.initialize(WARPS)
                storage.k_pipeline.initialize(WARPS * tiles.consumers)
                storage.v_pipeline.initialize(WARPS * tiles.consumers, self.value.helpers or 1)
                storage.work_pipeline.initialize(
                    WARPS * tiles.consumers + self.value.helpers + int(self.scheduler_warp)
                )
                if const_expr(storage.raw is not None):
                    storage.raw.pipeline.initialize(self.value.helpers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        role = warp  # in the producer's warpgroup
        if const_expr(tiles.teams > 1):
            role = warp % (WARPS // tiles.teams)
            storage = storage.of_team(own_team(tiles), tiles, kernel.words_of_work)
        if warp < WARPS:  # A1.2
            cute.arch.setmaxregister_decrease(self.registers[0])  # A1.3
            if role == 0:
                self.produce(params, storage, tma)
            if const_expr(self.scheduler_warp):  # noqa: SIM102 - one is known when compiled, the other when run
                if role == 1:
                    self.schedule(params, storage)
            if const_expr(self.value.helpers > 0):  # noqa: SIM102 - one is known when compiled, the other when run
                if warp > 0:
                    self.value.help(params, storage, warp - 1)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])  # A1.12, A2.1
            self.consume(params, storage, scaling, tma, lse, sinks, tensors)

    @cute.jit
    def produce(self, params: Params, storage: SharedStorage, tma: TmaAtoms):
        """The producer warp: tile after tile, what the consumers will wait for, in the order in which they do."""
        tiles, scheduler = self.tiles, self.scheduler(params)
        v_stages, v_pipeline = (
            (storage.v, storage.v_pipeline)
            if const_expr(storage.raw is None)
            else (storage.raw.v, storage.raw.pipeline)
        )
        loaded = Int32(0)  # blocks of K and V so far, over all tiles
        work_idx = Int32(0)  # tiles so far
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            tile = scheduler.work_tile(work)
            bounds = self.bounds(params, tile)
            begin, end = bounds.block_range()
            sequence, head_kv = bounds.sequence, tile.head // params.group
            first_key = bounds.first_key(end - 1)
            claimed = Int32(0)
            if const_expr(self.claimed_at_once > 0):  # noqa: SIM102 - one is known when compiled, the other when run
                if end - begin <= self.claimed_at_once:
                    claimed = self.claim(scheduler, work)
            self.load_block(tma.k, storage.k, storage.k_pipeline, loaded, (0, *sequence.origin_k(first_key, head_kv)))
            for w in cutlass.range_constexpr(tiles.consumers):
                n = work_idx * tiles.consumers + w
                first = (tile.block * tiles.block_q + w * WARPGROUP_ROWS) >> params.pack_gqa
                storage.q_pipeline.producer_acquire(n)
                stage = storage.q_pipeline.stage(n)
                origin = (0, *sequence.origin_q(first, tile.head << params.pack_gqa))
                load(tma.q, storage.q[None, None, stage], origin, storage.q_pipeline.full + stage)  # A1.4, A1.5
            for i in cutlass.range(end - 1 - begin, unroll=1):  # A1.6
                n = end - 2 - i
                next_key = bounds.first_key(n)
                if const_expr(tiles.overlap):  # the consumers want the next K before this V
                    self.load_block(
                        tma.k, storage.k, storage.k_pipeline, loaded + 1, (0, *sequence.origin_k(next_key, head_kv))
                    )
                self.load_values(tma.v, v_stages, v_pipeline, loaded, sequence.origin_k(first_key, head_kv))
                if const_expr(not tiles.overlap):
                    self.load_block(
                        tma.k, storage.k, storage.k_pipeline, loaded + 1, (0, *sequence.origin_k(next_key, head_kv))
                    )
                first_key = next_key
                loaded += 1
            if end - begin > self.claimed_at_once:
                claimed = self.claim(scheduler, work)
            self.load_values(tma.v, v_stages, v_pipeline, loaded, sequence.origin_k(first_key, head_kv))
            loaded += 1
            if const_expr(self.scheduler_warp):
                work = scheduler.next_work(storage.work, storage.work_pipeline, work_idx)
            else:
                work = scheduler.publish_claimed(storage.work, storage.work_pipeline, work_idx, claimed)
            work_idx += 1

    @cute.jit
    def schedule(self, params: Params, storage: SharedStorage):
        """The scheduler warp: looks up each tile when the producer lets it."""
        scheduler, work_idx = self.scheduler(params), Int32(0)
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            cute.arch.barrier(barrier_id=self.nearly_done(), number_of_threads=NEARLY_DONE_THREADS)
            claimed = scheduler.claim_next(work)
            work = scheduler.publish_claimed(storage.work, storage.work_pipeline, work_idx, claimed)
            work_idx += 1

    @cute.jit
    def claim(self, scheduler: TileScheduler, work: Any) -> Int32:
        """Claim the next tile, or let the scheduler warp do it."""
        claimed = Int32(0)
        if const_expr(self.scheduler_warp):
            cute.arch.barrier_arrive(barrier_id=self.nearly_done(), number_of_threads=NEARLY_DONE_THREADS)
        else:
            claimed = scheduler.claim_next(work)
        return claimed

    def nearly_done(self) -> Int32 | int:
        """The barrier of this warp's team."""
        return NamedBarrier.NEARLY_DONE + (0 if self.tiles.teams == 1 else own_team(self.tiles))

    @cute.jit
    def load_block(self, tma: cute.CopyAtom, stages: cute.Tensor, pipeline: Pipeline, loaded: Int32, origin: tuple):
        """Load the block of K or V at `origin` into the pipeline's next stage."""
        pipeline.producer_acquire(loaded)  # A1.7
        stage = pipeline.stage(loaded)
        load(tma, stages[None, None, stage], origin, pipeline.full + stage)  # A1.8, A1.9

    @cute.jit
    def load_values(self, tma: cute.CopyAtom, stages: cute.Tensor, pipeline: Pipeline, loaded: Int32, row: tuple):
        """Load the block of V that begins at a row, in its parts."""
        parts = self.kernel.parts_v
        for part in cutlass.range_constexpr(parts):
            origin = self.value.origin(part * (self.kernel.width_v // parts), *row)
            self.load_block(tma, stages, pipeline, loaded * parts + part, origin)

    @cute.jit
    def consume(
        self,
        params: Params,
        storage: SharedStorage,
        scaling: Any,
        tma: TmaAtoms,
        lse: cute.Pointer,
        sinks: Any,
        tensors: Any,
    ):
        """A consumer warpgroup: its 64 rows of tile after tile."""
        kernel, tiles, scheduler = self.kernel, self.tiles, self.scheduler(params)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = cute.arch.lane_idx()
        wg_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPS - 1)
        if const_expr(tiles.teams > 1):
            wg_idx = wg_idx % tiles.consumers
        # WGMMA gives a thread two rows, 8 apart, and pairs of columns, 8 apart.
        row, column = thread // 32 * 16 + lane // 4, lane % 4 * 2

        mma_qk = hopper_helpers.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K),
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, tiles.block_kv),
        )
        mma_pv = self.product.mma(self.product.columns)
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        q_stages = mma_qk.make_fragment_A(qk.partition_A(storage.q))
        k = mma_qk.make_fragment_B(qk.partition_B(storage.k))
        v = mma_pv.make_fragment_B(pv.partition_B(self.value.operand(storage.v)))
        p = cute.make_rmem_tensor(pv.partition_shape_A((WARPGROUP_ROWS, tiles.block_kv)), self.dtype)
        o = cute.make_rmem_tensor(pv.partition_shape_C((WARPGROUP_ROWS, kernel.width_v)), Float32)
        s_shape = qk.partition_shape_C((WARPGROUP_ROWS, tiles.block_kv))
        softmax = self.softmax(scaling)

        if wg_idx == 0:
            self.warp_scheduler_barrier_arrive(Int32(tiles.consumers - 1))  # warpgroup 0 issues first
        used = PipelineState.first()  # the block of K and V that is next, of all tiles
        work_idx = Int32(0)  # tiles so far
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            tile = scheduler.work_tile(work)
            bounds = self.bounds(params, tile)
            first_row = tile.block * tiles.block_q + wg_idx * WARPGROUP_ROWS
            n = work_idx * tiles.consumers + wg_idx
            q = q_stages[None, None, None, storage.q_pipeline.stage(n)]
            told = self.told(bounds, first_row + row, scaling, tensors)
            consumer = Consumer(wg_idx, storage, mma_qk, mma_pv, q, k, v, p, o, s_shape, softmax, row, column, told)
            softmax.reset(bounds, first_row + row)  # A1.13, A2.2
            used = self.mainloop(bounds, consumer, used, n)
            work = scheduler.next_work(storage.work, storage.work_pipeline, work_idx)
            work_idx += 1
            self.epilogue(bounds, consumer, tma, lse, sinks, first_row)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory goes with the block

    def softmax(self, scaling: Float32) -> Softmax:
        """The state of this thread's rows."""
        scale_log2 = scaling if self.score_mod is None else self.score_mod.scale_log2(scaling * LN2)
        return Softmax(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scale_log2)

    def told(self, bounds: Bounds, row: Int32, scaling: Any, tensors: Any) -> Told | None:
        """What a function on scores is told of rows `row` and `row + 8`; of one past the last query that of the
        last."""
        if self.score_mod is None:
            return None
        pack, head, last = bounds.params.pack_gqa, bounds.tile.head, bounds.sequence.seqlen_q - 1
        rows = [row + 8 * r for r in range(2)]
        heads = tuple((head << pack) + (x & ((1 << pack) - 1)) for x in rows)
        positions = tuple(cutlass.min(x >> pack, last) for x in rows)
        told = Told(tensors, scaling * LN2, bounds.number_of_sequence(), heads, positions, NOTHING_KNOWN)
        return self.score_mod.know(told, "bhq")

    def read_ahead(self, consumer: Consumer, s: cute.Tensor, first_key: Int32, edge: bool) -> Told | None:
        """What the kernel's function, if it has one, is told; arguments as in `modify`, but for scores that are yet
        to come."""
        if self.score_mod is None:
            return None
        return self.score_mod.ahead(consumer.told, s, first_key + consumer.column, edge)

    def modify(self, told: Told | None, s: cute.Tensor, first: Int32, edge: bool) -> None:
        """What the kernel's function makes of scores, if it has one.

        Args:
            told: what it is told.
            first: key of this thread's first column.
            edge: there may be keys past the last.
        """
        if self.score_mod is not None and edge:
            modify(self.score_mod, told, s, first, True)
        elif self.score_mod is not None:
            modify_within(self.score_mod, told, s, first)

    @cute.jit
    def mainloop(self, bounds: Bounds, consumer: Consumer, used: PipelineState, q_use: Int32) -> PipelineState:
        """One tile's rows of O, not yet divided by l, and of the softmax state. Returns the new `used`.

        Blocks that only other warpgroups' rows see are skipped; those that an edge of the window crosses are masked.
        """
        kernel, tiles = self.kernel, self.tiles
        step = self.step_overlapped if const_expr(tiles.overlap) else self.step_serial
        first_row = bounds.tile.block * tiles.block_q + consumer.wg_idx * WARPGROUP_ROWS
        begin, end = bounds.block_range()
        begin, end = cute.arch.make_warp_uniform(begin), cute.arch.make_warp_uniform(end)
        of_thread = bounds.of_thread(first_row + consumer.row, consumer.column)
        consumer.storage.q_pipeline.consumer_wait(q_use)  # A1.14, A2.3
        mine = bounds.blocks_of_rows(first_row, begin, end)
        both, only_left = Mask(of_thread, kernel.left, True), Mask(of_thread, True, False)
        self.product.begin(consumer)
        if const_expr(not tiles.overlap):
            self.warp_scheduler_barrier_sync(consumer.wg_idx)
        used = self.skip(consumer, used, end - mine.end)
        last = mine.end - 1
        consumer.softmax.expect(last * tiles.block_kv)
        if const_expr(tiles.overlap):
            self.first_scores(consumer, used, last * tiles.block_kv, both, mine.right < mine.end or kernel.left)
        else:
            used = step(consumer, used, last * tiles.block_kv, both)
        right, left = cutlass.min(mine.right, last), cutlass.min(mine.left, last)
        if const_expr(kernel.right):
            for i in cutlass.range(last - right, unroll=1):
                used = step(consumer, used, (last - 1 - i) * tiles.block_kv, both)
        for i in cutlass.range(right - left, unroll=1):  # A1.15, A2.7
            used = step(consumer, used, (right - 1 - i) * tiles.block_kv, None)
        if const_expr(kernel.left):
            for i in cutlass.range(left - mine.begin, unroll=1):
                used = step(consumer, used, (left - 1 - i) * tiles.block_kv, only_left)
        consumer.storage.q_pipeline.consumer_release(q_use)
        if const_expr(tiles.overlap):
            used = self.last_product(consumer, used)
        if const_expr(kernel.left):
            used = self.skip(consumer, used, mine.begin - begin)
        if const_expr(not tiles.overlap):
            self.warp_scheduler_barrier_arrive(consumer.wg_idx)
        self.product.catch_up(consumer)
        return used

    @cute.jit
    def first_scores(self, consumer: Consumer, used: PipelineState, first_key: Int32, mask: Mask, crosses: Boolean):
        """P of the first block, masked where it crosses an edge; its product with V is left to the next step."""
        s = self.scores(consumer, used)  # A2.4, A2.5
        self.modify(consumer.told, s, first_key + consumer.column, True)
        if crosses:
            mask.apply(s, first_key)
        consumer.softmax.step(s, first_key)  # A2.6
        self.product.to_operand(s, consumer.p)

    @cute.jit
    def scores(self, consumer: Consumer, used: PipelineState) -> cute.Tensor:
        """Scores of a block, waited for; issued regardless of ping-pong."""
        k_pipeline = consumer.storage.k_pipeline
        k_pipeline.consumer_wait(used)
        s = consumer.issue_scores(used)
        warpgroup.wait_group(0)
        k_pipeline.consumer_release(used)
        return s

    @cute.jit
    def step_overlapped(
        self, consumer: Consumer, used: PipelineState, first_key: Int32, mask: Mask | None
    ) -> PipelineState:
        """P of the next block, while the P before it is multiplied with V."""
        k_pipeline = consumer.storage.k_pipeline
        following = k_pipeline.following(used)
        k_pipeline.consumer_wait(following)  # A2.8
        self.warp_scheduler_barrier_sync(consumer.wg_idx)
        s = consumer.issue_scores(following)  # A2.9
        self.product.wait(consumer, used)  # A2.10
        product = self.product.issue(consumer, used)  # A2.11
        self.warp_scheduler_barrier_arrive(consumer.wg_idx)
        told = self.read_ahead(consumer, s, first_key, mask is not None)
        warpgroup.wait_group(1)  # A2.12
        k_pipeline.consumer_release(following)
        self.modify(told, s, first_key + consumer.column, mask is not None)
        if const_expr(mask is not None):
            mask.apply(s, first_key)
        rescale, alpha = consumer.softmax.step(s, first_key)  # A2.13
        warpgroup.wait_group(0)  # A2.14
        self.product.release(consumer, used)  # A2.15
        self.product.add(consumer, product)
        self.product.to_operand(s, consumer.p)  # A2.16
        self.product.rescale(consumer, rescale, alpha)
        return following

    @cute.jit
    def last_product(self, consumer: Consumer, used: PipelineState) -> PipelineState:
        """O += P V of the last block."""
        self.product.wait(consumer, used)  # A2.18
        product = self.product.issue(consumer, used)  # A2.19
        warpgroup.wait_group(0)
        self.product.release(consumer, used)
        self.product.add(consumer, product)
        return consumer.storage.k_pipeline.following(used)

    @cute.jit
    def step_serial(
        self, consumer: Consumer, used: PipelineState, first_key: Int32, mask: Mask | None
    ) -> PipelineState:
        """One block without overlap: scores, softmax, product, each waited for."""
        k_pipeline = consumer.storage.k_pipeline
        k_pipeline.consumer_wait(used)  # A1.16
        s = consumer.issue_scores(used)  # A1.17
        self.warp_scheduler_barrier_arrive(consumer.wg_idx)
        self.product.catch_up(consumer)
        warpgroup.wait_group(0)
        k_pipeline.consumer_release(used)
        return self.rest_of_step(consumer, s, used, first_key, mask)

    @cute.jit
    def rest_of_step(
        self,
        consumer: Consumer,
        s: cute.Tensor,
        used: PipelineState,
        first_key: Int32,
        mask: Mask | None,
        crosses: Boolean | bool = True,
    ) -> PipelineState:
        """What follows the scores of a block; they are masked where it crosses an edge."""
        self.modify(consumer.told, s, first_key + consumer.column, mask is not None)
        if const_expr(mask is not None):  # noqa: SIM102 - one is known when compiled, the other when run
            if crosses:
                mask.apply(s, first_key)
        rescale, alpha = consumer.softmax.step(s, first_key)  # A1.18, A1.19
        self.product.to_operand(s, consumer.p)
        self.product.rescale(consumer, rescale, alpha)
        self.product.wait(consumer, used)  # A1.20
        self.warp_scheduler_barrier_sync(consumer.wg_idx)
        product = self.product.issue(consumer, used)  # A1.21
        warpgroup.wait_group(0)
        self.product.release(consumer, used)  # A1.22
        self.product.add(consumer, product)
        return consumer.storage.k_pipeline.following(used)

    @cute.jit
    def skip(self, consumer: Consumer, used: PipelineState, blocks: Int32) -> PipelineState:
        """Release blocks unused, in step with the other warpgroups' ping-pong."""
        k_pipeline, v_pipeline = consumer.storage.k_pipeline, consumer.storage.v_pipeline
        for _ in cutlass.range(blocks, unroll=1):
            k_pipeline.consumer_wait(used)
            k_pipeline.consumer_release(used)
            if const_expr(self.tiles.overlap):
                self.warp_scheduler_barrier_sync(consumer.wg_idx)
                self.warp_scheduler_barrier_arrive(consumer.wg_idx)
            else:
                self.warp_scheduler_barrier_arrive(consumer.wg_idx)
                self.warp_scheduler_barrier_sync(consumer.wg_idx)
            for part in cutlass.range_constexpr(self.kernel.parts_v):
                v_pipeline.consumer_wait(used.part(part, self.kernel.parts_v))
                v_pipeline.consumer_release(used.part(part, self.kernel.parts_v))
            used = k_pipeline.following(used)
        return used

    @cute.jit
    def warp_scheduler_barrier_sync(self, wg_idx: Int32):
        """Ping-pong: wait until the warpgroup before this one has issued its products."""
        if const_expr(self.tiles.ping_pong):
            cute.arch.barrier(
                barrier_id=NamedBarrier.WARP_SCHEDULER + self.of_block(wg_idx), number_of_threads=2 * WARPGROUP
            )

    @cute.jit
    def warp_scheduler_barrier_arrive(self, wg_idx: Int32):
        """Ping-pong: the next warpgroup may issue its products."""
        if const_expr(self.tiles.ping_pong):
            following = Int32(0) if wg_idx == self.tiles.consumers - 1 else wg_idx + 1
            cute.arch.barrier_arrive(
                barrier_id=NamedBarrier.WARP_SCHEDULER + self.of_block(following), number_of_threads=2 * WARPGROUP
            )

    def of_block(self, wg_idx: Int32) -> Int32:
        """Index in the thread block of a consumer warpgroup of this team."""
        return wg_idx if self.tiles.teams == 1 else own_team(self.tiles) * self.tiles.consumers + wg_idx

    @cute.jit
    def epilogue(
        self, bounds: Bounds, consumer: Consumer, tma: TmaAtoms, lse: cute.Pointer, sinks: Any, first_row: Int32
    ):
        """Write O / l and LSE of 64 rows to memory. TMA leaves out rows and columns outside of the tensor."""
        o, softmax, params, sequence, head = (
            consumer.o,
            consumer.softmax,
            bounds.params,
            bounds.sequence,
            bounds.tile.head,
        )
        thread, lane = cute.arch.thread_idx()[0] % WARPGROUP, cute.arch.lane_idx()
        by = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(softmax.row_sum[r], threads_in_group=4)
            blind = total == 0.0
            by[r] = Float32(0.0) if blind else softmax.scale_of_o(total)
            if blind:  # 0 whatever V holds, inf and NaN too
                rows_of(o)[None, r, None].fill(0.0)
            packed_row = first_row + consumer.row + 8 * r
            position, packed_head = packed_row >> params.pack_gqa, packed_row & ((1 << params.pack_gqa) - 1)
            if const_expr(sinks is not None):
                sink = cute.make_tensor(sinks + (head << params.pack_gqa) + packed_head, cute.make_layout(1))[0]
                of_keys = -Float32.inf if blind else softmax.lse_log2(r, total) * LN2
                share, with_sink = beside_sink(of_keys, sink)
                by[r] = by[r] * share
            if position < sequence.seqlen_q and lane % 4 == 0:
                if const_expr(sinks is not None):
                    value = with_sink
                else:
                    value = -Float32.inf if blind else softmax.lse_log2(r, total) * LN2
                cute.make_tensor(lse + bounds.place_of_row(packed_head, position), cute.make_layout(1))[0] = value
        scale_rows(o, by)  # A1.24, A2.20
        rounded = cute.make_rmem_tensor(cute.size(o), self.dtype_o)
        to_16_bits(o, rounded)

        width = self.kernel.width_o
        mma = self.product.mma(width)
        to_chip = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype_o), mma).get_slice(
            thread
        )
        staged = consumer.storage.o[None, None, consumer.wg_idx]
        for column in cutlass.range_constexpr(0, self.kernel.width_v, width):
            part = cute.make_tensor(
                rounded.iterator + column // 2, mma.get_slice(0).partition_shape_C((WARPGROUP_ROWS, width))
            )
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # what was staged before has been read
            self.sync_warpgroup(consumer.wg_idx)
            cute.copy(to_chip, to_chip.retile(part), to_chip.partition_D(staged))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync_warpgroup(consumer.wg_idx)
            if thread < 32:
                gmem, smem = box_of(
                    tma.o, staged, (column, *sequence.origin_q(first_row >> params.pack_gqa, head << params.pack_gqa))
                )
                cute.copy(tma.o, smem, gmem)  # A1.25
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def sync_warpgroup(self, wg_idx: Int32):
        """Barrier of a warpgroup's warps."""
        cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE + self.of_block(wg_idx), number_of_threads=WARPGROUP)


@cute.jit
def own_team(tiles: Constexpr[Tiles]) -> Int32:
    """The calling warp's team: each has an equal share of the producer's warpgroup's warps,
    and consumer warpgroups of its own."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return warp // (WARPS // tiles.teams) if warp < WARPS else (warp // WARPS - 1) // tiles.consumers
