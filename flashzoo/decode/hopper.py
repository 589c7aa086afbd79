"""FlashDecoding (Dao, Haziza, Massa and Sizov 2023) for one Hopper GPU, in CuTe DSL.
Lines marked A1.x are the three steps of that text.

1. Thread blocks stay on their multiprocessors and work on item after item: a split of the keys of one key/value head,
   for a tile of rows. The rows are the queries of all query heads that share the key/value head, side by side, so that
   keys are read once for all of them.
2. The producer, one warp, has TMA load Q, and K and V block by block into one ring of stages. It runs ahead of the
   products, into the next item too, so that memory is never at rest: that is all that decoding is about.
3. The consumer warpgroup computes S = Q K^T, P and l by online softmax in registers, and O += P V.
4. A part leaves O / l in float32 and its LSE. The thread block that ends last of a tile's parts merges them, in the
   order of the splits, which does not depend on who that is: the bits are the same in every run.
5. Where a tile's parts are few enough for a cluster, and every item has a thread block of its own, parts stay on chip:
   each thread block of the cluster merges some rows, and reads them from the others' shared memory.
6. Where few tiles have many parts, one multiprocessor would read for long what all of them wrote. Then parts are left
   as `kernels.merge_kernel` wants them, which has programs for each row, and for some of its columns.

Keys and values may lie in pages: then TMA takes each page's part of a block,
and what a number of no page stands for reads as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.utils import hopper_helpers

from flashzoo._cute.hopper.bounds import ThreadBounds
from flashzoo._cute.hopper.dtypes import DTYPES
from flashzoo._cute.hopper.mask import mask_scores
from flashzoo._cute.hopper.pipeline import Pipeline
from flashzoo._cute.hopper.tile_scheduler import TileScheduler
from flashzoo._cute.hopper.tma import box_of, tma_atom
from flashzoo._cute.hopper.wgmma import gemm, rows_of, scale_rows, shared_layout, to_16_bits, transposed
from flashzoo.decode.hopper_items import Item, Params, item_of, page_at
from flashzoo.decode.hopper_output import (
    NOTHING_SEEN,
    PartsInCluster,
    arrive,
    epilogue,
    in_memory,
    merge,
    merge_rows,
)
from flashzoo.decode.traits import Kernel
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS, WARPS


class NamedBarrier(IntEnum):
    """Hardware barriers of the block; 0 is `sync_threads`."""

    CONSUMERS = 1
    WARPGROUP = 2


@dataclass(frozen=True)
class OneItem(TileScheduler):
    """Where every item has a thread block: a tile's parts are those of a cluster."""

    def initial_work(self) -> Int32:
        """The item's number."""
        p, cluster = self.params, cute.arch.cluster_size()
        tile, part = cute.arch.block_idx()[0] // cluster, cute.arch.block_idx_in_cluster()
        of_batch = p.heads * p.tiles
        return tile // of_batch * p.blocks + part * of_batch + tile % of_batch

    def next_work(self, smem: cute.Tensor, pipeline: Pipeline, n: Int32) -> Int32:
        """None."""
        return self.params.blocks * self.params.batch_heads


@dataclass(frozen=True)
class TmaAtoms:
    """TMA loads of the tensors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom


@dataclass(frozen=True)
class SharedStorage:
    """A thread block's shared memory.

    Attributes:
        q, kv: Q, and stages of K and V by turns.
        parts: where K and V were, for `PartsInCluster`.
        states: what warps leave each other of their rows' maxima and sums, in places of so many rows.
        p: P, where a second warpgroup needs it.
        work: the number of the next item.
        last: whether a part was the last of its tile to end.
        part_pipeline: from the consumers to the scheduler warp: a part is in memory.
        last_pipeline: back: `last` says of it what it says.
        p_pipeline: from the warpgroup that makes P and `states` to the second.
    """

    q: cute.Tensor
    kv: cute.Tensor
    parts: cute.Pointer
    states: cute.Tensor | None
    p: cute.Tensor | None
    work: cute.Tensor
    last: cute.Tensor
    q_pipeline: Pipeline
    kv_pipeline: Pipeline
    work_pipeline: Pipeline
    part_pipeline: Pipeline
    last_pipeline: Pipeline
    p_pipeline: Pipeline | None = None


@dataclass(frozen=True)
class Products:
    """The two products, and a thread's views of what they read and write.

    Attributes:
        qk, pv: S = Q K^T, O += P V.
        q, k, v: stages of operands in shared memory.
        p: operand in registers.
        s_shape, o_shape: of results.
    """

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    s_shape: Constexpr[tuple]
    o_shape: Constexpr[tuple]


class Decode:
    """The program of one `Kernel`."""

    p_exponent: float = 0.0
    """Log2 of P at a row's maximum."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.dtype: type[cutlass.Numeric] = DTYPES[kernel.dtype]
        self.dtype_kv: type[cutlass.Numeric] = DTYPES[kernel.dtype_kv]
        self.scheduler: type[TileScheduler] = OneItem if kernel.clustered else TileScheduler

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, params: Params):
        """What is compiled. It is never run: `flashzoo._cute.driver` launches the kernel with descriptors of its own.

        Args:
            q: (head_dim, heads, queries, batch).
            k, v: (head_dim, heads, keys, batch), or of pages (head_dim, heads, keys of a page, pages); v is k again
                where values are columns of keys.
        """
        kernel = self.kernel
        q_layout = shared_layout(self.dtype, WARPGROUP_ROWS, kernel.width, kernel.q_stages)
        kv_layout = shared_layout(self.dtype_kv, kernel.block_kv, kernel.width, kernel.stages)
        box_layout = shared_layout(self.dtype_kv, kernel.box, kernel.width, 1)
        operation = cpasync.CopyBulkTensorTileG2SOp()
        atoms = [
            tma_atom(operation, x, layout)
            for x, layout in zip((q, k, v), (q_layout, box_layout, box_layout), strict=True)
        ]
        self.device(TmaAtoms(*atoms), params, q_layout, kv_layout).launch(
            grid=[1, 1, 1],
            block=[kernel.threads, 1, 1],
            smem=kernel.shared_bytes,
            min_blocks_per_mp=kernel.blocks_per_sm,
            preferred_smem_carveout=100,  # else the DSL asks a GPU, which need not be there
        )

    @cute.kernel
    def device(self, tma: TmaAtoms, params: Params, q_layout: cute.ComposedLayout, kv_layout: cute.ComposedLayout):
        """One thread block: pipelines, then each warp to its role."""
        storage = self.allocate(q_layout, kv_layout)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma.q, tma.k, tma.v):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                self.initialize(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        # all before this touches no memory, and runs while the launch before this one ends
        cute.arch.griddepcontrol_wait()
        self.role(warp, params, storage, tma)

    def initialize(self, storage: SharedStorage) -> None:
        """The mbarriers, by one thread."""
        warps = self.kernel.warps
        storage.q_pipeline.initialize(WARPS)  # the first warpgroup alone reads Q
        storage.kv_pipeline.initialize(warps)
        storage.work_pipeline.initialize(warps + 2)
        storage.part_pipeline.initialize(1, warps)
        storage.last_pipeline.initialize(warps)
        if storage.p_pipeline is not None:
            storage.p_pipeline.initialize(WARPS, WARPS)

    @cute.jit
    def role(self, warp: Int32, params: Params, storage: SharedStorage, tma: TmaAtoms):
        """What a warp does."""
        registers = self.kernel.registers
        if const_expr(registers is None):
            self.consume_of(warp, params, storage)
            self.supply(warp, params, storage, tma)
        else:
            if warp < self.kernel.warps:
                cute.arch.setmaxregister_increase(registers[1])
                self.consume_of(warp, params, storage)
            else:
                cute.arch.setmaxregister_decrease(registers[0])
                self.supply(warp, params, storage, tma)

    @cute.jit
    def consume_of(self, warp: Int32, params: Params, storage: SharedStorage):
        """A consumer warp: what its warpgroup does."""
        for wg_idx in cutlass.range_constexpr(self.kernel.consumers):
            if warp // WARPS == wg_idx:
                self.consume(params, storage, wg_idx)

    @cute.jit
    def supply(self, warp: Int32, params: Params, storage: SharedStorage, tma: TmaAtoms):
        """The warps behind the consumers': the producer, and the scheduler where items are claimed."""
        kernel = self.kernel
        if warp == kernel.warps:
            self.produce(params, storage, tma)
        if const_expr(not kernel.clustered):  # noqa: SIM102 - one is known when compiled, the other when run
            if warp == kernel.warps + 1:
                self.schedule(params, storage)

    def allocate(self, q_layout: cute.ComposedLayout, kv_layout: cute.ComposedLayout) -> SharedStorage:
        """A thread block's shared memory."""
        smem = cutlass.memory.SmemAllocator()
        q = smem.allocate_tensor(self.dtype, q_layout.outer, 1024, swizzle=q_layout.inner)
        kv = smem.allocate_tensor(self.dtype_kv, kv_layout.outer, 1024, swizzle=kv_layout.inner)
        kernel, states, p = self.kernel, None, None
        if kernel.consumers > 1:
            p_layout = shared_layout(self.dtype, WARPGROUP_ROWS, kernel.block_kv, 1)
            p = smem.allocate_tensor(self.dtype, p_layout.outer, 1024, swizzle=p_layout.inner)
        words = [cute.make_tensor(smem.allocate_array(Int32, 2), cute.make_layout(2)) for _ in range(2)]
        stages = (kernel.q_stages, kernel.stages, 1, 1, 1) + (() if p is None else (1,))
        pipelines = [Pipeline.allocate(smem, n) for n in stages]
        if any(kernel.states):
            states = smem.allocate_tensor(Float32, cute.make_layout((*kernel.states, 2)), 16)
        return SharedStorage(q, kv, cute.recast_ptr(kv.iterator, dtype=Float32), states, p, *words, *pipelines)

    @cute.jit
    def schedule(self, params: Params, storage: SharedStorage):
        """The scheduler warp: looks up each item while the one before it is worked on,
        and counts the parts of a tile that have ended.

        The consumers go on meanwhile, so that no item waits for memory to have another's part.

        The item behind one that the stages hold whole is claimed before that one begins, as the producer is soon done
        with it. Behind a longer one it is claimed when that one begins: earlier, it would be kept from thread blocks
        that run out of items.
        """
        scheduler, n, parts = TileScheduler(params), Int32(0), Int32(0)  # items, and those that are parts
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            if self.is_long(item_of(params, work)):
                storage.work_pipeline.producer_acquire(n)
            following = scheduler.work_of(scheduler.fetch_next(work))
            scheduler.publish(storage.work, storage.work_pipeline, n, following)
            cute.arch.sync_warp()
            storage.work_pipeline.consumer_release(n)
            n += 1
            if const_expr(self.kernel.counted):
                item = item_of(params, work)
                if item.is_part():
                    storage.part_pipeline.consumer_wait(parts)
                    storage.last_pipeline.producer_acquire(parts)
                    with cute.arch.elect_one():
                        storage.last[0] = (
                            Int32(1) if arrive(params.arrived + item.tile, item.parts) == item.parts - 1 else Int32(0)
                        )
                        cute.arch.mbarrier_arrive(storage.last_pipeline.full)
                    parts += 1
            work = following

    def is_long(self, item: Item) -> Boolean:
        """Whether the stages do not hold it whole."""
        return item.blocks(self.kernel.block_kv) * self.kernel.stages_of_block > self.kernel.stages

    @cute.jit
    def produce(self, params: Params, storage: SharedStorage, tma: TmaAtoms):
        """The producer warp: item after item, what the consumers will wait for, in the order in which they do."""
        scheduler = self.scheduler(params)
        loaded, items, n = Int32(0), Int32(0), Int32(0)  # stages filled so far, items that see keys, items
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            item = item_of(params, work)
            items, loaded = self.load_item(params, storage, tma, item, items, loaded)
            work = scheduler.next_work(storage.work, storage.work_pipeline, n)
            n += 1

    @cute.jit
    def load_item(
        self, params: Params, storage: SharedStorage, tma: TmaAtoms, item: Item, items: Int32, loaded: Int32
    ) -> tuple[Int32, Int32]:
        """Load an item's Q, and blocks of K and V: the consumers want the next K before this V.
        Returns how many items that see keys, and stages, have been loaded."""
        kernel = self.kernel
        blocks = item.blocks(kernel.block_kv)
        if blocks > 0:
            self.load_q(params, storage, tma, item, items)
            items += 1
            self.load_block(params, storage, tma.k, item, item.begin, loaded)
        for i in cutlass.range(blocks - 1, unroll=1):  # the consumers want the next K before this V
            first_key = item.begin + i * kernel.block_kv
            self.load_block(params, storage, tma.k, item, first_key + kernel.block_kv, loaded + 2 * i + 1)
            self.load_block(params, storage, tma.v, item, first_key, loaded + 2 * i + 2)
        if blocks > 0:
            loaded += 2 * blocks
            self.load_block(params, storage, tma.v, item, item.begin + (blocks - 1) * kernel.block_kv, loaded - 1)
        return items, loaded

    @cute.jit
    def load_q(self, params: Params, storage: SharedStorage, tma: TmaAtoms, item: Item, items: Int32):
        """Load an item's Q into its ring's next stage."""
        storage.q_pipeline.producer_acquire(items)
        origin = (0, item.head * params.group + item.first_head, item.first_query, item.batch)
        rows = params.heads_of_tile * params.queries_of_tile
        stage = storage.q_pipeline.stage(items)
        self.load(tma.q, storage.q[None, None, stage], origin, storage.q_pipeline.full + stage, rows)

    @cute.jit
    def load(self, tma: cute.CopyAtom, tile: cute.Tensor, origin: tuple, full: cute.Pointer, rows: Int32):
        """Have TMA read the box at `origin`, of so many rows, and arrive at `full` with it."""
        gmem, smem = box_of(tma, tile, origin)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, rows * (self.kernel.width * self.dtype.width // 8))
        cute.copy(tma, gmem, smem, tma_bar_ptr=full)

    @cute.jit
    def load_block(
        self, params: Params, storage: SharedStorage, tma: cute.CopyAtom, item: Item, first_key: Int32, loaded: Int32,
        pages: Int32 | None = None,
    ):  # fmt: skip
        """Load a block of K or V into the ring's next stage. `pages` are the numbers of its boxes' pages, a lane's that
        of the box of its number, where they have been looked up."""
        kernel, pipeline = self.kernel, storage.kv_pipeline
        pipeline.producer_acquire(loaded)
        stage = pipeline.stage(loaded)
        full = pipeline.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, kernel.block_kv * kernel.width * self.dtype_kv.width // 8)
        for i in cutlass.range_constexpr(kernel.block_kv // kernel.box):
            row, page = first_key + i * kernel.box, item.batch
            if const_expr(kernel.paged):
                key = row
                page = Int32(-1)  # which is none: zeros
                if const_expr(pages is not None):
                    page = cute.arch.shuffle_sync(pages, i)
                else:
                    if key < item.end:
                        page = page_at(params, item, key)
                row = key % params.page
            tile = cute.local_tile(storage.kv[None, None, stage], (kernel.box, kernel.width), (i, 0))
            gmem, smem = box_of(tma, tile, (0, item.head, row, page))
            cute.copy(tma, gmem, smem, tma_bar_ptr=full)

    @cute.jit
    def pages(self, params: Params, item: Item, first_key: Int32) -> Int32:
        """The number of the page of a block's box, a lane's that of the box of its number."""
        kernel, page = self.kernel, Int32(-1)  # which is none: zeros
        if const_expr(kernel.paged):
            box = cute.arch.lane_idx()
            key = first_key + box * kernel.box
            if box < kernel.block_kv // kernel.box and key < item.end:
                page = page_at(params, item, key)
        return page

    @cute.jit
    def consume(self, params: Params, storage: SharedStorage, wg_idx: Constexpr[int]):
        """A consumer warpgroup."""
        kernel, scheduler = self.kernel, self.scheduler(params)
        thread, lane = cute.arch.thread_idx()[0] - wg_idx * WARPGROUP, cute.arch.lane_idx()
        # The tensor core gives a thread two rows, 8 apart, and pairs of columns, 8 apart.
        row, column = thread // (32 * kernel.key_warps) * 16 + lane // 4, lane % 4 * 2
        # of the O that this thread writes
        own, own_column = row, column * (kernel.neighbours // 2) + wg_idx * (kernel.width_v // kernel.consumers)
        if const_expr(kernel.key_warps > 1):  # noqa: SIM102 - one is known when compiled, the other when run
            if thread // 32 % kernel.key_warps > 0:
                own = Int32(WARPGROUP_ROWS)  # none
        products = self.products(storage, wg_idx)
        o = cute.make_rmem_tensor(products.o_shape, Float32)
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)

        used, items, n = Int32(0), Int32(0), Int32(0)  # stages read so far, items that see keys, items
        # the last part, of which it is yet to be known whether it is its tile's last; parts
        pending, parts = Int32(-1), Int32(0)
        work = scheduler.initial_work()
        while scheduler.is_valid(work) or pending >= 0:  # one round more where a part is still to be merged
            is_item = scheduler.is_valid(work)
            item = item_of(params, work if is_item else pending)
            blocks = item.blocks(kernel.block_kv) if is_item else Int32(0)
            o.fill(0.0)
            row_max.fill(NOTHING_SEEN)
            row_sum.fill(0.0)
            bounds = self.bounds(params, item, row, column)
            items, used = self.walk(params, storage, products, item, bounds, o, row_max, row_sum, blocks, items, used)
            following = work
            if is_item:
                following = scheduler.next_work(storage.work, storage.work_pipeline, n)
                n += 1
            if const_expr(kernel.clustered):
                self.merge_in_cluster(params, storage, item, o, row_max, row_sum, own, own_column)
            elif const_expr(kernel.counted):
                is_last, is_part = self.is_last(storage, pending, parts), is_item and item.is_part()
                if is_part:
                    epilogue(params, item, o, row_max, row_sum, own, own_column, in_memory(params, item))
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(storage.part_pipeline.full)
                elif is_item and item.part == 0:
                    epilogue(params, item, o, row_max, row_sum, own, own_column)
                if is_last:
                    merge(params, item_of(params, pending))
                parts += Int32(1) if pending >= 0 else Int32(0)
                pending = work if is_part else Int32(-1)
            else:
                epilogue(params, item, o, row_max, row_sum, own, own_column)
            work = following

    def mma(self, b_major: OperandMajorMode, columns: int, a_source: warpgroup.OperandSource) -> cute.TiledMma:
        """A product of a warpgroup, of 64 rows and so many columns."""
        return hopper_helpers.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (WARPGROUP_ROWS, columns)),
            a_source=a_source,
        )

    def products(self, storage: SharedStorage, wg_idx: int) -> Products:
        """Of a thread of that warpgroup."""
        kernel = self.kernel
        mma_qk = self.mma(OperandMajorMode.K, kernel.block_kv, warpgroup.OperandSource.SMEM)
        mma_pv = self.mma(OperandMajorMode.MN, kernel.width, warpgroup.OperandSource.RMEM)
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        q_stages = mma_qk.make_fragment_A(qk.partition_A(storage.q))
        k = mma_qk.make_fragment_B(qk.partition_B(storage.kv))
        v = mma_pv.make_fragment_B(pv.partition_B(transposed(storage.kv)))
        s_shape = qk.partition_shape_C((WARPGROUP_ROWS, kernel.block_kv))
        p = cute.make_rmem_tensor(pv.partition_shape_A((WARPGROUP_ROWS, kernel.block_kv)), self.dtype)
        o_shape = pv.partition_shape_C((WARPGROUP_ROWS, kernel.width))
        return Products(mma_qk, mma_pv, q_stages, k, v, p, s_shape, o_shape)

    @cute.jit
    def walk(
        self, params: Params, storage: SharedStorage, products: Products, item: Item, bounds: ThreadBounds,
        o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, blocks: Int32, items: Int32, used: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Take an item's blocks into O, and the rows' maxima and sums.
        Returns how many items and stages have been read."""
        kernel, pipeline = self.kernel, storage.kv_pipeline
        q = products.q[None, None, None, storage.q_pipeline.stage(items)]
        if blocks > 0:
            storage.q_pipeline.consumer_wait(items)
            pipeline.consumer_wait(used)
            s = cute.make_rmem_tensor(products.s_shape, Float32)
            gemm(products.qk, s, q, products.k[None, None, None, pipeline.stage(used)], True)
            warpgroup.wait_group(0)
            pipeline.consumer_release(used)
            if self.crosses(params, item, item.begin):
                mask_scores(s, bounds, item.begin, kernel.left, True)
            self.softmax(s, row_max, row_sum, (params.scale_log2, params.scale_log2))
            to_16_bits(s, products.p)
        # A1.2: P of the next block while the P before it is multiplied with V
        for i in cutlass.range(blocks - 1, unroll=1):
            first_key = item.begin + (i + 1) * kernel.block_kv
            of_k, of_v = used + 2 * i + 1, used + 2 * i + 2
            pipeline.consumer_wait(of_k)
            s = cute.make_rmem_tensor(products.s_shape, Float32)
            gemm(products.qk, s, q, products.k[None, None, None, pipeline.stage(of_k)], True)
            pipeline.consumer_wait(of_v)
            gemm(products.pv, o, products.p, products.v[None, None, None, pipeline.stage(of_v)], False)
            warpgroup.wait_group(1)
            pipeline.consumer_release(of_k)
            if self.crosses(params, item, first_key):
                mask_scores(s, bounds, first_key, kernel.left, True)
            alpha = self.softmax(s, row_max, row_sum, (params.scale_log2, params.scale_log2))
            warpgroup.wait_group(0)
            pipeline.consumer_release(of_v)
            to_16_bits(s, products.p)
            scale_rows(o, alpha)
        if blocks > 0:
            storage.q_pipeline.consumer_release(items)
            items += 1
            used += 2 * blocks
            pipeline.consumer_wait(used - 1)
            stage, last_key = pipeline.stage(used - 1), item.begin + (blocks - 1) * kernel.block_kv
            if last_key + kernel.block_kv > item.used:  # P is 0 there, and what lies there may be no number
                self.clear(storage.kv[None, None, stage], item.used - last_key)
            gemm(products.pv, o, products.p, products.v[None, None, None, stage], False)
            warpgroup.wait_group(0)
            pipeline.consumer_release(used - 1)
        return items, used

    @cute.jit
    def merge_in_cluster(
        self, params: Params, storage: SharedStorage, item: Item, o: cute.Tensor, row_max: cute.Tensor,
        row_sum: cute.Tensor, row: Int32, column: Int32,
    ):  # fmt: skip
        """The consumers of a cluster's thread blocks share the tile's rows. A part without keys is one of no weight."""
        parts = PartsInCluster(self.kernel, storage.parts)
        self.sync_consumers()  # none of them reads V any more
        epilogue(params, item, o, row_max, row_sum, row, column, parts)
        cute.arch.sync_warp()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cluster = cute.arch.cluster_size()
        worker = cute.arch.warp_idx() * cluster + cute.arch.block_idx_in_cluster()
        merge_rows(params, item, parts, worker, self.kernel.warps * cluster, self.kernel.at_once)
        cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed()  # behind stores of what was read of other parts: no load is on its way
        cute.arch.cluster_wait()  # the others have read this part, too

    @cute.jit
    def is_last(self, storage: SharedStorage, pending: Int32, n: Int32) -> Boolean:
        """Whether the pending part, the n-th, was the last of its tile to end."""
        last = Int32(0)
        if pending >= 0:
            storage.last_pipeline.consumer_wait(n)
            last = storage.last[0]
            cute.arch.sync_warp()  # every lane has read it
            storage.last_pipeline.consumer_release(n)
        return last == 1

    @cute.jit
    def bounds(self, params: Params, item: Item, row: Int32, column: Int32):
        """The keys that rows `row` and `row + 8` see, for the thread that has them from `column` on."""
        p, bounds = params, []
        for r in cutlass.range_constexpr(2):
            diagonal = item.first_query + (row + 8 * r) // p.heads_of_tile + item.shift
            lowest, highest = Int32(0), item.end
            if const_expr(self.kernel.right):
                highest = cutlass.min(highest, diagonal + p.window_right + 1)
            if const_expr(self.kernel.left):
                lowest = diagonal - p.window_left
            bounds.append((lowest - column, highest - column))
        return tuple(bounds)

    @cute.jit
    def crosses(self, params: Params, item: Item, first_key: Int32) -> Boolean:
        """Whether some key of a block is not seen by some row of the tile."""
        kernel, last_key = self.kernel, first_key + self.kernel.block_kv - 1
        crosses = last_key >= item.end
        if const_expr(kernel.right):
            crosses = crosses or last_key > item.first_query + item.shift + params.window_right
        if const_expr(kernel.left):
            last = item.first_query + params.queries_of_tile - 1
            crosses = crosses or first_key < last + item.shift - params.window_left
        return crosses

    @cute.jit
    def softmax(
        self, s: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scales_log2: tuple[Float32, Float32]
    ) -> cute.Tensor:
        """Turn a block's scores into P in place, each row's with its scale; returns what O is to be multiplied by for
        the rows' new maximum, less `p_exponent`."""
        rows, alpha = rows_of(s), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            row = rows[None, r, None]
            top = row[0]
            for i in cutlass.range_constexpr(1, cute.size(row)):
                top = cute.arch.fmax(top, row[i])
            top = cute.arch.warp_reduction_max(top, threads_in_group=4) * scales_log2[r]
            if const_expr(self.p_exponent):
                top = top - self.p_exponent
            top = cute.arch.fmax(row_max[r], top)
            alpha[r] = cute.math.exp2(row_max[r] - top, fastmath=True)
            total = row_sum[r] * alpha[r]
            for i in cutlass.range_constexpr(cute.size(row)):
                p = cute.math.exp2(row[i] * scales_log2[r] - top, fastmath=True)
                row[i] = p
                total = total + p
            row_max[r], row_sum[r] = top, total
        return alpha

    @cute.jit
    def clear(self, v: cute.Tensor, there: Int32):
        """Zeros in the rows of a block of V from `there` on, by one warpgroup."""
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range(self.kernel.block_kv - there, unroll=1):
            for first in cutlass.range_constexpr(0, self.kernel.width, WARPGROUP):
                if thread + first < self.kernel.width:
                    v[there + i, thread + first] = self.dtype(0.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP, number_of_threads=WARPGROUP)

    @cute.jit
    def sync_consumers(self):
        """Barrier of all consumers."""
        cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=32 * self.kernel.warps)
