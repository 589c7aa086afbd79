"""FlashDecoding (Dao, Haziza, Massa and Sizov 2023) for one Hopper GPU, in CuTe DSL. Lines marked A1.x are the three steps of that text.

1. Thread blocks stay on their multiprocessors and work on item after item: a split of the keys of one key/value head, for a tile of rows.
   The rows are the queries of all query heads that share the key/value head, side by side, so that keys are read once for all of them.
2. The producer, one warp, has TMA load Q, and K and V block by block into one ring of stages. It runs ahead of the products, into the
   next item too, so that memory is never at rest: that is all that decoding is about.
3. The consumer warpgroup computes S = Q K^T, P and l by online softmax in registers, and O += P V.
4. A part leaves O / l in float32 and its LSE. The thread block that ends last of a tile's parts merges them, in the order of the splits,
   which does not depend on who that is: there is no second kernel, and the bits are the same in every run.

Keys and values may lie in pages: then TMA takes each page's part of a block, and what a number of no page stands for reads as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.utils import hopper_helpers

from flashzoo._cute.hopper.dtypes import DTYPES
from flashzoo._cute.hopper.mask import mask_scores
from flashzoo._cute.hopper.pipeline import Pipeline
from flashzoo._cute.hopper.tile_scheduler import TileScheduler
from flashzoo._cute.hopper.tma import box_of, tma_atom
from flashzoo._cute.hopper.wgmma import gemm, rows_of, shared_layout, to_16_bits, transposed
from flashzoo.decode.traits import Q_STAGES, Kernel
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS, WARPS

LN2, LOG2E = 0.6931471805599453, 1.4426950408889634
NOTHING_SEEN = -3e38
"""The maximum of a row that has seen no key: below what float32 scores can be, and finite, so that -inf less it is -inf."""
AT_ONCE = 16
"""Loads of a merging thread before it waits for any: of parts of a row, and of as many rows as there is room for."""


class NamedBarrier(IntEnum):
    """Hardware barriers of the block; 0 is `sync_threads`."""

    CONSUMERS = 1


@dataclass(frozen=True)
class Params:
    """A kernel's arguments but for q, k and v.

    Attributes:
        kernel: what is compiled.
        out: `(batch, seqlen_q, heads, head_dim)`, by its strides.
        lse: `(batch, heads, seqlen_q)`.
        parts, lse_parts: of each tile and split a row of float32 for each of the tile's rows, and its LSE in log2 units.
        used_k: how much of each cache is used.
        page_table: numbers of pages, `table_stride` for each of the batch.
        sinks: of each query head one more logit in the softmax.
        arrived: of each tile how many parts have ended: zeros before and after a launch.
        counter: one zero in memory, for this launch alone until it ends.
        seqlen_q, seqlen_k: queries, and room for keys, of each of the batch.
        heads, group: key/value heads, and how many query heads share one.
        heads_of_tile, queries_of_tile: a tile's rows are so many heads of so many queries.
        blocks: items of a sequence.
        batch_heads: sequences: TileScheduler's names.
        tiles: of a key/value head.
        splits, least: into so many parts at most the keys that a tile sees are split, and into none of fewer keys.
        page: keys of a page.
        table_stride: see page_table.
        head_dim: columns of out.
        out_batch, out_row, out_head: strides of out.
        window_left, window_right: how many keys either side of the diagonal a query sees, where the kernel has that bound.
        scale_log2: softmax scale times log2 e.
    """

    kernel: Constexpr[Kernel]
    out: cute.Pointer
    lse: cute.Pointer
    parts: cute.Pointer
    lse_parts: cute.Pointer
    used_k: cute.Pointer
    page_table: cute.Pointer
    sinks: cute.Pointer
    arrived: cute.Pointer
    counter: cute.Pointer
    seqlen_q: Int32
    seqlen_k: Int32
    heads: Int32
    group: Int32
    heads_of_tile: Int32
    queries_of_tile: Int32
    blocks: Int32
    batch_heads: Int32
    tiles: Int32
    splits: Int32
    least: Int32
    page: Int32
    table_stride: Int32
    head_dim: Int32
    out_batch: Int32
    out_row: Int32
    out_head: Int32
    window_left: Int32
    window_right: Int32
    scale_log2: Float32


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
        work: the number of the next item.
        last: whether a part was the last of its tile to end.
        part_pipeline: from the consumers to the scheduler warp: a part is in memory.
        last_pipeline: back: `last` says of it what it says.
    """

    q: cute.Tensor
    kv: cute.Tensor
    work: cute.Tensor
    last: cute.Tensor
    q_pipeline: Pipeline
    kv_pipeline: Pipeline
    work_pipeline: Pipeline
    part_pipeline: Pipeline
    last_pipeline: Pipeline


@dataclass(frozen=True)
class Item:
    """A split of the keys of a tile.

    Attributes:
        batch, head: whose; a key/value head.
        tile: number of the tile, of all.
        part, parts: which split, and how many there are; those past them have nothing to do.
        first_query, first_head: of the tile, the head counted within its group.
        begin, end: the split's keys.
        used: keys of the sequence.
        shift: the diagonal of query i is at key `i + shift`.
    """

    batch: Int32
    head: Int32
    tile: Int32
    part: Int32
    parts: Int32
    first_query: Int32
    first_head: Int32
    begin: Int32
    end: Int32
    used: Int32
    shift: Int32

    @cute.jit
    def is_part(self) -> Boolean:
        """Whether it is to be merged with others."""
        return self.parts > 1 and self.part < self.parts

    def blocks(self, block_kv: int) -> Int32:
        """Blocks of keys that are walked."""
        return (cutlass.max(0, self.end - self.begin) + block_kv - 1) // block_kv


class Decode:
    """The program of one `Kernel`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.dtype: type[cutlass.Numeric] = DTYPES[kernel.dtype]
        self.dtype_o: type[cutlass.Numeric] = DTYPES[kernel.out_dtype]

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, params: Params):
        """What is compiled. It is never run: `flashzoo._cute.driver` launches the kernel with descriptors of its own.

        Args:
            q: (head_dim, heads, queries, batch).
            k, v: (head_dim, heads, keys, batch), or of pages (head_dim, heads, keys of a page, pages).
        """
        kernel = self.kernel
        q_layout = shared_layout(self.dtype, WARPGROUP_ROWS, kernel.width, Q_STAGES)
        kv_layout = shared_layout(self.dtype, kernel.block_kv, kernel.width, kernel.stages)
        box_layout = shared_layout(self.dtype, kernel.box, kernel.width, 1)
        operation = cpasync.CopyBulkTensorTileG2SOp()
        atoms = [tma_atom(operation, x, layout) for x, layout in zip((q, k, v), (q_layout, box_layout, box_layout), strict=True)]
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
        kernel = self.kernel
        smem = cutlass.memory.SmemAllocator()
        q, kv = (smem.allocate_tensor(self.dtype, x.outer, 1024, swizzle=x.inner) for x in (q_layout, kv_layout))
        words = [cute.make_tensor(smem.allocate_array(Int32, 2), cute.make_layout(2)) for _ in range(2)]
        storage = SharedStorage(q, kv, *words, *[Pipeline.allocate(smem, stages) for stages in (Q_STAGES, kernel.stages, 1, 1, 1)])
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma.q, tma.k, tma.v):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                storage.q_pipeline.initialize(WARPS)
                storage.kv_pipeline.initialize(WARPS)
                storage.work_pipeline.initialize(WARPS + 2)
                storage.part_pipeline.initialize(1, WARPS)
                storage.last_pipeline.initialize(WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # all before this touches no memory, and runs while the launch before this one ends
        if warp < WARPS:
            self.consume(params, storage)
        if warp == WARPS:
            self.produce(params, storage, tma)
        if warp == WARPS + 1:
            self.schedule(params, storage)

    @cute.jit
    def schedule(self, params: Params, storage: SharedStorage):
        """The scheduler warp: looks up each item while the one before it is worked on, and counts the parts of a tile that have ended.

        The consumers go on meanwhile, so that no item waits for memory to have another's part.
        """
        scheduler, n, parts = TileScheduler(params), Int32(0), Int32(0)  # items, and those that are parts
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            following = scheduler.work_of(scheduler.fetch_next(work))
            scheduler.publish(storage.work, storage.work_pipeline, n, following)
            cute.arch.sync_warp()
            storage.work_pipeline.consumer_release(n)
            n += 1
            if const_expr(self.kernel.split):
                item = self.item(params, work)
                if item.is_part():
                    storage.part_pipeline.consumer_wait(parts)
                    storage.last_pipeline.producer_acquire(parts)
                    with cute.arch.elect_one():
                        storage.last[0] = Int32(1) if arrive(params.arrived + item.tile, item.parts) == item.parts - 1 else Int32(0)
                        cute.arch.mbarrier_arrive(storage.last_pipeline.full)
                    parts += 1
            work = following

    def item(self, params: Params, work: Int32) -> Item:
        """The item of a number.

        Those that run together are to read what lies together: first the tiles of a head's split, which read the same keys; then heads,
        whose keys lie side by side (a third slower are splits of one head, then of the next); then splits.
        """
        p = params
        batch = work // p.blocks
        place = work - batch * p.blocks
        part = place // (p.heads * p.tiles)
        of_split = place - part * p.heads * p.tiles
        head = of_split // p.tiles
        block = of_split - head * p.tiles
        blocks_of_heads = (p.group + p.heads_of_tile - 1) // p.heads_of_tile
        of_queries = block // blocks_of_heads
        first_query, first_head = of_queries * p.queries_of_tile, (block - of_queries * blocks_of_heads) * p.heads_of_tile
        used, begin, end, parts = self.keys_of(p, batch, first_query, part)
        tile = (batch * p.heads + head) * p.tiles + block
        return Item(batch, head, tile, part, parts, first_query, first_head, begin, end, used, used - p.seqlen_q)

    @cute.jit
    def keys_of(self, params: Params, batch: Int32, first_query: Int32, part: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """How many keys a sequence has, where a split of those that a tile sees begins and ends, and how many splits there are."""
        p, kernel = params, self.kernel
        used = p.seqlen_k
        if const_expr(kernel.used):
            used = cutlass.min(cutlass.max(value_at(p.used_k, batch), 0), used)
        begin, end = Int32(0), used
        if const_expr(kernel.left):
            begin = cutlass.max(first_query + used - p.seqlen_q - p.window_left, 0) // kernel.block_kv * kernel.block_kv
        if const_expr(kernel.right):
            last = cutlass.min(first_query + p.queries_of_tile, p.seqlen_q) - 1
            end = cutlass.max(cutlass.min(last + used - p.seqlen_q + p.window_right + 1, used), 0)
        parts = Int32(1)
        if const_expr(kernel.split):  # A1.1
            keys = cutlass.max(end - begin, 0)
            blocks = ((keys + p.splits - 1) // p.splits + kernel.block_kv - 1) // kernel.block_kv
            split = cutlass.max(blocks * kernel.block_kv, p.least)
            parts = cutlass.max((keys + split - 1) // split, 1)
            begin += part * split
            end = cutlass.min(end, begin + split)
        return used, begin, end, parts

    @cute.jit
    def produce(self, params: Params, storage: SharedStorage, tma: TmaAtoms):
        """The producer warp: item after item, what the consumers will wait for, in the order in which they do."""
        kernel, scheduler = self.kernel, TileScheduler(params)
        loaded, items, n = Int32(0), Int32(0), Int32(0)  # stages filled so far, items that see keys, items
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            item = self.item(params, work)
            blocks = item.blocks(kernel.block_kv)
            if blocks > 0:
                storage.q_pipeline.producer_acquire(items)
                origin = (0, item.head * params.group + item.first_head, item.first_query, item.batch)
                rows = params.heads_of_tile * params.queries_of_tile
                stage = storage.q_pipeline.stage(items)
                self.load(tma.q, storage.q[None, None, stage], origin, storage.q_pipeline.full + stage, rows)
                items += 1
                self.load_block(params, storage, tma.k, item, item.begin, loaded)
            for i in cutlass.range(blocks - 1, unroll=1):  # the consumers want the next K before this V
                first_key = item.begin + i * kernel.block_kv
                self.load_block(params, storage, tma.k, item, first_key + kernel.block_kv, loaded + 2 * i + 1)
                self.load_block(params, storage, tma.v, item, first_key, loaded + 2 * i + 2)
            if blocks > 0:
                loaded += 2 * blocks
                self.load_block(params, storage, tma.v, item, item.begin + (blocks - 1) * kernel.block_kv, loaded - 1)
            work = scheduler.next_work(storage.work, storage.work_pipeline, n)
            n += 1

    @cute.jit
    def load(self, tma: cute.CopyAtom, tile: cute.Tensor, origin: tuple, full: cute.Pointer, rows: Int32):
        """Have TMA read the box at `origin`, of so many rows, and arrive at `full` with it."""
        gmem, smem = box_of(tma, tile, origin)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, rows * (self.kernel.width * self.dtype.width // 8))
        cute.copy(tma, gmem, smem, tma_bar_ptr=full)

    @cute.jit
    def load_block(self, params: Params, storage: SharedStorage, tma: cute.CopyAtom, item: Item, first_key: Int32, loaded: Int32):
        """Load a block of K or V into the ring's next stage."""
        kernel, pipeline = self.kernel, storage.kv_pipeline
        pipeline.producer_acquire(loaded)
        stage = pipeline.stage(loaded)
        full = pipeline.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, kernel.block_kv * kernel.width * self.dtype.width // 8)
        for i in cutlass.range_constexpr(kernel.block_kv // kernel.box):
            row, page = first_key + i * kernel.box, item.batch
            if const_expr(kernel.paged):
                key = row
                page = Int32(-1)  # which is none: zeros
                if key < item.end:
                    page = value_at(params.page_table, Int64(item.batch) * params.table_stride + key // params.page)
                row = key % params.page
            tile = cute.local_tile(storage.kv[None, None, stage], (kernel.box, kernel.width), (i, 0))
            gmem, smem = box_of(tma, tile, (0, item.head, row, page))
            cute.copy(tma, gmem, smem, tma_bar_ptr=full)

    @cute.jit
    def consume(self, params: Params, storage: SharedStorage):
        """The consumer warpgroup."""
        kernel, scheduler = self.kernel, TileScheduler(params)
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        # WGMMA gives a thread two rows, 8 apart, and pairs of columns, 8 apart.
        row, column = thread // 32 * 16 + lane // 4, lane % 4 * 2
        mma_qk = hopper_helpers.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K), Float32, (1, 1, 1), (WARPGROUP_ROWS, kernel.block_kv)
        )
        mma_pv = hopper_helpers.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN), Float32, (1, 1, 1), (WARPGROUP_ROWS, kernel.width),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        q_stages = mma_qk.make_fragment_A(qk.partition_A(storage.q))
        k = mma_qk.make_fragment_B(qk.partition_B(storage.kv))
        v = mma_pv.make_fragment_B(pv.partition_B(transposed(storage.kv)))
        s_shape = qk.partition_shape_C((WARPGROUP_ROWS, kernel.block_kv))
        p = cute.make_rmem_tensor(pv.partition_shape_A((WARPGROUP_ROWS, kernel.block_kv)), self.dtype)
        o = cute.make_rmem_tensor(pv.partition_shape_C((WARPGROUP_ROWS, kernel.width)), Float32)
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        pipeline = storage.kv_pipeline

        used, items, n = Int32(0), Int32(0), Int32(0)  # stages read so far, items that see keys, items
        pending, parts = Int32(-1), Int32(0)  # the last part, of which it is yet to be known whether it is its tile's last; parts
        work = scheduler.initial_work()
        while scheduler.is_valid(work):
            item = self.item(params, work)
            blocks = item.blocks(kernel.block_kv)
            o.fill(0.0)
            row_max.fill(NOTHING_SEEN)
            row_sum.fill(0.0)
            bounds = self.bounds(params, item, row, column)
            q = q_stages[None, None, None, storage.q_pipeline.stage(items)]
            if blocks > 0:
                storage.q_pipeline.consumer_wait(items)
                pipeline.consumer_wait(used)
                s = cute.make_rmem_tensor(s_shape, Float32)
                gemm(mma_qk, s, q, k[None, None, None, pipeline.stage(used)], True)
                warpgroup.wait_group(0)
                pipeline.consumer_release(used)
                if self.crosses(params, item, item.begin):
                    mask_scores(s, bounds, item.begin, kernel.left, True)
                self.softmax(s, row_max, row_sum, params.scale_log2)
                to_16_bits(s, p)
            for i in cutlass.range(blocks - 1, unroll=1):  # A1.2: P of the next block while the P before it is multiplied with V
                first_key = item.begin + (i + 1) * kernel.block_kv
                of_k, of_v = used + 2 * i + 1, used + 2 * i + 2
                pipeline.consumer_wait(of_k)
                s = cute.make_rmem_tensor(s_shape, Float32)
                gemm(mma_qk, s, q, k[None, None, None, pipeline.stage(of_k)], True)
                pipeline.consumer_wait(of_v)
                gemm(mma_pv, o, p, v[None, None, None, pipeline.stage(of_v)], False)
                warpgroup.wait_group(1)
                pipeline.consumer_release(of_k)
                if self.crosses(params, item, first_key):
                    mask_scores(s, bounds, first_key, kernel.left, True)
                alpha = self.softmax(s, row_max, row_sum, params.scale_log2)
                warpgroup.wait_group(0)
                pipeline.consumer_release(of_v)
                to_16_bits(s, p)
                scale_rows(o, alpha)
            if blocks > 0:
                storage.q_pipeline.consumer_release(items)
                items += 1
                used += 2 * blocks
                pipeline.consumer_wait(used - 1)
                stage, last_key = pipeline.stage(used - 1), item.begin + (blocks - 1) * kernel.block_kv
                if last_key + kernel.block_kv > item.used:  # P is 0 there, and what lies there may be no number
                    self.clear(storage.kv[None, None, stage], item.used - last_key)
                gemm(mma_pv, o, p, v[None, None, None, stage], False)
                warpgroup.wait_group(0)
                pipeline.consumer_release(used - 1)
            following = scheduler.next_work(storage.work, storage.work_pipeline, n)
            n += 1
            if const_expr(kernel.split):
                is_last = self.is_last(storage, pending, parts)
                if item.is_part():
                    self.epilogue(params, item, o, row_max, row_sum, row, column, True)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(storage.part_pipeline.full)
                elif item.part == 0:
                    self.epilogue(params, item, o, row_max, row_sum, row, column, False)
                if is_last:
                    self.merge(params, self.item(params, pending))
                parts += Int32(1) if pending >= 0 else Int32(0)
                pending = work if item.is_part() else Int32(-1)
            else:
                self.epilogue(params, item, o, row_max, row_sum, row, column, False)
            work = following
        if const_expr(kernel.split):  # noqa: SIM102 - one is known when compiled, the other when run
            if self.is_last(storage, pending, parts):
                self.merge(params, self.item(params, pending))

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
    def softmax(self, s: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale_log2: Float32) -> cute.Tensor:
        """Turn a block's scores into P in place; returns what O is to be multiplied by for the rows' new maximum."""
        rows, alpha = rows_of(s), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            row = rows[None, r, None]
            top = row[0]
            for i in cutlass.range_constexpr(1, cute.size(row)):
                top = cute.arch.fmax(top, row[i])
            top = cute.arch.fmax(row_max[r], cute.arch.warp_reduction_max(top, threads_in_group=4) * scale_log2)
            alpha[r] = cute.math.exp2(row_max[r] - top, fastmath=True)
            total = row_sum[r] * alpha[r]
            for i in cutlass.range_constexpr(cute.size(row)):
                p = cute.math.exp2(row[i] * scale_log2 - top, fastmath=True)
                row[i] = p
                total = total + p
            row_max[r], row_sum[r] = top, total
        return alpha

    @cute.jit
    def clear(self, v: cute.Tensor, there: Int32):
        """Zeros in the rows of a block of V from `there` on."""
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range(self.kernel.block_kv - there, unroll=1):
            for first in cutlass.range_constexpr(0, self.kernel.width, WARPGROUP):
                if thread + first < self.kernel.width:
                    v[there + i, thread + first] = self.dtype(0.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_consumers()

    @cute.jit
    def sync_consumers(self):
        """Barrier of the consumer warpgroup."""
        cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=WARPGROUP)

    @cute.jit
    def epilogue(
        self, params: Params, item: Item, o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, row: Int32, column: Int32,
        part: Constexpr[bool],
    ):  # fmt: skip
        """Write O / l and LSE of the tile's rows: to out, or as a part."""
        p = params
        rows = p.heads_of_tile * p.queries_of_tile
        place = (Int64(item.tile) * p.splits + item.part) * rows
        for r in cutlass.range_constexpr(2):
            total, mine = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4), row + 8 * r
            if total == 0.0:  # 0 whatever V holds, inf and NaN too
                rows_of(o)[None, r, None].fill(0.0)
            top = row_max[r]
            alpha = Float32(1.0)
            if const_expr(self.kernel.sinks and not part):
                top, total, alpha = self.with_sink(p, item, mine, top, total)
            blind = total == 0.0
            by = Float32(0.0) if blind else alpha * cute.arch.rcp_approx(total)
            lse_log2 = -Float32.inf if blind else top + cute.math.log2(total, fastmath=True)
            if mine < rows:
                if const_expr(part):
                    store_row(p.parts + (place + mine) * p.head_dim, o, r, column, by, p.head_dim, Float32)
                    if column == 0:
                        set_at(p.lse_parts, place + mine, lse_log2)
                else:
                    query, head = place_of(p, item, mine)
                    if query < p.seqlen_q and head < p.group:
                        store_row(offset(p, item, query, head), o, r, column, by, p.head_dim, self.dtype_o)
                        if column == 0:
                            set_at(p.lse, of_lse(p, item, query, head), lse_log2 * LN2)

    @cute.jit
    def with_sink(self, params: Params, item: Item, row: Int32, top: Float32, total: Float32) -> tuple[Float32, Float32, Float32]:
        """The maximum and the sum of a row with its sink, one more key, seen by every row, whose value is 0; and what O is scaled by."""
        _, head = place_of(params, item, row)
        sink = value_at(params.sinks, item.head * params.group + cutlass.min(head, params.group - 1)) * LOG2E
        higher = cute.arch.fmax(top, sink)
        alpha = cute.math.exp2(top - higher, fastmath=True)
        return higher, total * alpha + cute.math.exp2(sink - higher, fastmath=True), alpha

    @cute.jit
    def merge(self, params: Params, item: Item):
        """out and LSE of a tile from its parts. Warps take rows by turns, and as many at a time as keep AT_ONCE loads in flight."""
        parts = item.parts
        if parts <= AT_ONCE // 8:
            self.merge_rows(params, item, AT_ONCE // 8)
        elif parts <= AT_ONCE // 4:
            self.merge_rows(params, item, AT_ONCE // 4)
        elif parts <= AT_ONCE // 2:
            self.merge_rows(params, item, AT_ONCE // 2)
        else:
            self.merge_rows(params, item, AT_ONCE)

    @cute.jit
    def merge_rows(self, params: Params, item: Item, at_once: Constexpr[int]):
        """The same, of so many parts at a time."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        rows, rows_at_once = params.heads_of_tile * params.queries_of_tile, AT_ONCE // at_once
        for i in cutlass.range((rows + WARPS * rows_at_once - 1) // (WARPS * rows_at_once), unroll=1):
            first_row = (WARPS * i + warp) * rows_at_once
            for begin in cutlass.range_constexpr(0, self.kernel.width, 128):
                self.merge_columns(params, item, rows, first_row, begin + 4 * lane, at_once)

    @cute.jit
    def merge_columns(self, params: Params, item: Item, rows: Int32, first_row: Int32, column: Int32, at_once: Constexpr[int]):
        """Four columns of some rows of out, and their LSE: the sum of exp(LSE_split - LSE) O_split, in the order of the splits."""
        p, there, rows_at_once = params, column < params.head_dim, AT_ONCE // at_once
        first = Int64(item.tile) * p.splits * rows
        tops, totals = cute.make_rmem_tensor(rows_at_once, Float32), cute.make_rmem_tensor(rows_at_once, Float32)
        o = cute.make_rmem_tensor((4, rows_at_once), Float32)
        tops.fill(NOTHING_SEEN)
        totals.fill(0.0)
        o.fill(0.0)
        for i in cutlass.range((item.parts + at_once - 1) // at_once, unroll=1):
            parts, lses = cute.make_rmem_tensor((4, AT_ONCE), Float32), cute.make_rmem_tensor(AT_ONCE, Float32)
            parts.fill(0.0)
            for j in cutlass.range_constexpr(AT_ONCE):  # all loads before the first is waited for
                part = i * at_once + j % at_once
                row = cutlass.min(first_row + j // at_once, rows - 1)
                place = first + cutlass.min(part, item.parts - 1) * rows + row
                lse_log2 = value_at(p.lse_parts, place)
                lses[j] = lse_log2 if part < item.parts else -Float32.inf
                if there:
                    source = (p.parts + place * p.head_dim + column).align(16)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), parts[None, j])
            for r in cutlass.range_constexpr(rows_at_once):
                top = tops[r]
                for j in cutlass.range_constexpr(r * at_once, (r + 1) * at_once):
                    top = cute.arch.fmax(top, lses[j])
                alpha = cute.math.exp2(tops[r] - top, fastmath=True)
                tops[r], total = top, totals[r] * alpha
                for c in cutlass.range_constexpr(4):
                    o[c, r] = o[c, r] * alpha
                for j in cutlass.range_constexpr(r * at_once, (r + 1) * at_once):  # A1.3
                    weight = cute.math.exp2(lses[j] - top, fastmath=True)
                    total = total + weight
                    for c in cutlass.range_constexpr(4):
                        o[c, r] = o[c, r] + weight * parts[c, j]
                totals[r] = total
        for r in cutlass.range_constexpr(rows_at_once):
            query, head = place_of(p, item, first_row + r)
            top, total, alpha = tops[r], totals[r], Float32(1.0)
            if const_expr(self.kernel.sinks):
                top, total, alpha = self.with_sink(p, item, first_row + r, top, total)
            if first_row + r < rows and query < p.seqlen_q and head < p.group:
                blind = total == 0.0
                if there:
                    by, rounded = Float32(0.0) if blind else alpha / total, cute.make_rmem_tensor(4, self.dtype_o)
                    for c in cutlass.range_constexpr(4):
                        rounded[c] = self.dtype_o(o[c, r] * by)
                    to = (offset(p, item, query, head) + column).align(self.dtype_o.width // 2)
                    cute.autovec_copy(rounded, cute.make_tensor(to, cute.make_layout(4)))
                if column == 0:
                    lse_log2 = -Float32.inf if blind else top + cute.math.log2(total, fastmath=True)
                    set_at(p.lse, of_lse(p, item, query, head), lse_log2 * LN2)


def value_at(values: cute.Pointer, i: Int32 | Int64) -> cute.Numeric:
    """A number in memory."""
    return cute.make_tensor(values + i, cute.make_layout(1))[0]


def set_at(values: cute.Pointer, i: Int64, value: Float32) -> None:
    """Write a number to memory."""
    cute.make_tensor(values + i, cute.make_layout(1))[0] = value


def place_of(params: Params, item: Item, row: Int32) -> tuple[Int32, Int32]:
    """Query, and head within its group, of a row of a tile."""
    query = row // params.heads_of_tile
    return item.first_query + query, item.first_head + row - query * params.heads_of_tile


def offset(params: Params, item: Item, query: Int32, head: Int32) -> cute.Pointer:
    """Where a row of out begins."""
    p = params
    return p.out + (Int64(item.batch) * p.out_batch + Int64(query) * p.out_row + Int64(item.head * p.group + head) * p.out_head)


def of_lse(params: Params, item: Item, query: Int32, head: Int32) -> Int64:
    """Place of a row in LSE."""
    p = params
    return (Int64(item.batch) * p.heads * p.group + item.head * p.group + head) * p.seqlen_q + query


@cute.jit
def scale_rows(acc: cute.Tensor, by: cute.Tensor):
    """Multiply each of a thread's two rows of a WGMMA result by its factor."""
    rows = rows_of(acc)
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(2):
                rows[c, r, i] = rows[c, r, i] * by[r]


@cute.jit
def store_row(
    to: cute.Pointer, o: cute.Tensor, r: Constexpr[int], column: Int32, by: Float32, head_dim: Int32,
    dtype: Constexpr[type[cutlass.Numeric]],
):  # fmt: skip
    """A thread's part of a row of O, times `by`, rounded to `dtype`; `column` is the first that it has."""
    rows = rows_of(o)
    pair = cute.make_rmem_tensor(2, dtype)
    for i in cutlass.range_constexpr(cute.size(o) // 4):
        for c in cutlass.range_constexpr(2):
            pair[c] = dtype(rows[c, r, i] * by)
        if 8 * i + column < head_dim:
            cute.autovec_copy(pair, cute.make_tensor((to + 8 * i + column).align(dtype.width // 4), cute.make_layout(2)))


@cute.jit
def arrive(arrived: cute.Pointer, parts: Int32) -> Int32:
    """How many of a tile's parts had ended before: what each wrote is seen by who comes last."""
    cute.arch.fence_acq_rel_gpu()
    before = cute.arch.inline_ptx(
        "atom.global.inc.u32 {$w0}, [{$r0}], {$r1};",  # which wraps to 0 with the last: ready for the next launch
        write_only_types=[Int32],
        read_only_args=[arrived, parts - 1],
    )
    cute.arch.fence_acq_rel_gpu()
    return before
