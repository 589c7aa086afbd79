"""FlashAttention-3's forward pass for one Hopper GPU, in CuTe DSL. Lines marked A1.x and A2.x are the paper's algorithms 1 and 2.

1. One thread block stays on each multiprocessor and works on tile after tile: 64 queries of one head for each of its
   consumer warpgroups.
2. The producer, one warp, has TMA bring Q, and K and V block by block, last block first, into pipelines of slots in shared
   memory. Two mbarriers for each slot say that it is full and that it is empty.
3. A consumer warpgroup computes S = Q K^T on the tensor cores (WGMMA), P and l by online softmax in registers, and adds P V
   to O, P going into the product straight from registers.
4. Overlap inside a warpgroup: S of the next block is issued before O += P V of this one, and the softmax of the next runs
   while that product does.
5. Ping-pong between warpgroups, where their tiles ask for it: they issue their products in turns, so that one's softmax
   runs under another's products.
6. O / l goes to memory by way of shared memory and TMA while the next tile has begun.

What differs from v2: loads and products are asynchronous and are waited for where they are needed, by warps with roles of
their own, and not by a compiler's schedule. FP8 is in `fp8.py`. Left out of the paper: clusters with multicast.
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
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.utils import hopper_helpers

from flashzoo._cute.hopper.dtypes import DTYPES
from flashzoo._cute.hopper.mask import Mask
from flashzoo._cute.hopper.pipeline import Pipeline
from flashzoo._cute.hopper.tile_scheduler import TileScheduler
from flashzoo._cute.hopper.tma import box_of, load, tma_atom
from flashzoo._cute.hopper.wgmma import CONSUMER_REGISTERS, PRODUCER_REGISTERS, gemm, rows_of, shared_layout, to_16_bits
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS, WARPS
from flashzoo.v3.product import Product, RawV, ValuePath
from flashzoo.v3.softmax import Softmax, scale_rows
from flashzoo.v3.traits import Kernel, Tiles

LN2 = 0.6931471805599453


class NamedBarrier(IntEnum):
    """Hardware barriers of the block, the first of one for each consumer warpgroup; 0 is `sync_threads`."""

    TURN = 1  # where it waits for its turn to issue products
    STORE = 5  # where its warps wait for one another around storing O


@dataclass(frozen=True)
class OnChip:
    """The block's shared memory: slots of 64 queries, of blocks of K and of V, O on its way out, the next tile."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    tile: cute.Tensor
    q_pipeline: Pipeline
    k_pipeline: Pipeline
    v_pipeline: Pipeline
    tile_pipeline: Pipeline
    raw: RawV | None = None

    def of_team(self, team: Int32, tiles: Constexpr[Tiles], words: Constexpr[int]) -> OnChip:
        """A team's shared memory, where this is that of all teams, one team's behind another's."""
        slots = tiles.consumers * tiles.q_stages, tiles.stages, tiles.stages, tiles.consumers
        tensors = [cute.domain_offset((0, 0, team * n), x) for n, x in zip(slots, (self.q, self.k, self.v, self.o), strict=True)]
        pipelines = [
            pipeline.of_team(team, tiles.teams) for pipeline in (self.q_pipeline, self.k_pipeline, self.v_pipeline, self.tile_pipeline)
        ]
        return OnChip(*tensors, cute.make_tensor(self.tile.iterator + team * words, self.tile.layout), *pipelines)


@dataclass(frozen=True)
class Consumer:
    """What one consumer warpgroup has in hand on one tile.

    Attributes:
        me: which warpgroup of its team.
        on_chip: shared memory.
        mma_qk, mma_pv: the two products.
        q, k, v: their operands in shared memory; k and v with all slots.
        p: P in registers, rounded, in the layout of an operand.
        o: the accumulator.
        s_shape: shape of a block of scores in registers.
        softmax: running state of this thread's two rows.
        row, column: of the warpgroup's scores, the first that this thread has: it has two rows, 8 apart, and pairs of columns, 8 apart.
    """

    me: Int32
    on_chip: OnChip
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

    def issue_scores(self, n: Int32) -> cute.Tensor:
        """Registers that will hold Q times the n-th block of K, once the group of WGMMAs is waited for."""
        s = cute.make_rmem_tensor(self.s_shape, Float32)
        gemm(self.mma_qk, s, self.q, self.k[None, None, None, self.on_chip.k_pipeline.slot(n)], True)
        return s


class Forward:
    """The program of one `Kernel`.

    Attributes:
        hands_out: whether a warp of its own looks up which tile is next, and not the producer.
        value: how V reaches the tensor core.
        product: how P is multiplied with it.
    """

    hands_out = False

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.tiles: Tiles = kernel.tiles
        self.dtype: type[cutlass.Numeric] = DTYPES[kernel.dtype]
        self.dtype_o: type[cutlass.Numeric] = DTYPES[kernel.out_dtype]
        warpgroups = self.tiles.teams * self.tiles.consumers
        self.registers: tuple[int, int] = PRODUCER_REGISTERS[warpgroups], CONSUMER_REGISTERS[warpgroups]
        self.value: ValuePath = ValuePath(kernel)
        self.product: Product = Product(kernel)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Pointer, schedule: TileScheduler, scaling: Any
    ):
        """What is compiled. It is never run: `flashzoo._cute.driver` launches the kernel with descriptors of its own.

        Args:
            q, o: (head_dim, packed heads, queries, heads, batch).
            k, v: (head_dim, keys, heads, batch); v (keys, head_dim, ...) where an FP8 kernel takes it transposed.
            scaling: of the scores: softmax scale times log2 e; in FP8 a `Scaling`.
        """
        tiles, kernel = self.tiles, self.kernel
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
        self.device(*atoms, lse, schedule, scaling, *layouts).launch(
            grid=[1, 1, 1], block=[kernel.threads, 1, 1], smem=kernel.shared_bytes, min_blocks_per_mp=1
        )

    @cute.kernel
    def device(
        self,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_o: cute.CopyAtom,
        lse: cute.Pointer,
        schedule: TileScheduler,
        scaling: Any,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        o_layout: cute.ComposedLayout,
    ):
        """One thread block: pipelines, then each warpgroup to its role."""
        kernel, tiles = self.kernel, self.tiles
        smem = cutlass.memory.SmemAllocator()
        # A1.1
        q, k = (smem.allocate_tensor(self.dtype, x.outer, 1024, swizzle=x.inner) for x in (q_layout, k_layout))
        v, raw = self.value.allocate(smem, v_layout)
        on_chip = OnChip(
            *(q, k, v, smem.allocate_tensor(self.dtype_o, o_layout.outer, 1024, swizzle=o_layout.inner)),
            cute.make_tensor(smem.allocate_array(Int32, tiles.teams * kernel.words_of_tile), cute.make_layout(kernel.words_of_tile)),
            *[Pipeline.allocate(smem, tiles.teams * slots) for slots in (tiles.consumers * tiles.q_stages, tiles.stages, tiles.stages, 1)],
            None if raw is None else RawV(raw, Pipeline.allocate(smem, self.value.stages)),
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(tma)
            with cute.arch.elect_one():
                on_chip.q_pipeline.initialize(WARPS)
                on_chip.k_pipeline.initialize(WARPS * tiles.consumers)
                on_chip.v_pipeline.initialize(WARPS * tiles.consumers, self.value.helpers or 1)
                on_chip.tile_pipeline.initialize(WARPS * tiles.consumers + self.value.helpers + int(self.hands_out))
                if const_expr(on_chip.raw is not None):
                    on_chip.raw.pipeline.initialize(self.value.helpers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        role = warp  # in the producer's warpgroup
        if const_expr(tiles.teams > 1):
            role = warp % (WARPS // tiles.teams)
            on_chip = on_chip.of_team(own_team(tiles), tiles, kernel.words_of_tile)
        if warp < WARPS:  # A1.2
            cute.arch.setmaxregister_decrease(self.registers[0])  # A1.3
            if role == 0:
                self.produce(schedule, on_chip, tma_q, tma_k, tma_v)
            if const_expr(self.hands_out):  # noqa: SIM102 - one is known when compiled, the other when run
                if role == 1:
                    self.hand_out(schedule, on_chip)
            if const_expr(self.value.helpers > 0):  # noqa: SIM102 - one is known when compiled, the other when run
                if warp > 0:
                    self.value.help(schedule, on_chip, warp - 1)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])  # A1.12, A2.1
            self.consume(schedule, on_chip, scaling, tma_o, lse)

    @cute.jit
    def produce(self, schedule: TileScheduler, on_chip: OnChip, tma_q: cute.CopyAtom, tma_k: cute.CopyAtom, tma_v: cute.CopyAtom):
        """The producer warp: tile after tile, what the consumers will wait for, in the order in which they do."""
        tiles = self.tiles
        slots_of_v, pipeline_of_v = (
            (on_chip.v, on_chip.v_pipeline) if const_expr(on_chip.raw is None) else (on_chip.raw.v, on_chip.raw.pipeline)
        )
        loaded = Int32(0)  # blocks of K and V so far, over all tiles
        turn = Int32(0)  # tiles so far
        tile = schedule.first()
        while schedule.exists(tile):
            number = schedule.fetch() if const_expr(not self.hands_out) else Int32(0)
            block, head, batch = schedule.place(tile)
            begin, end = schedule.extent(tile, block)
            head_kv = head // schedule.group
            first_key = schedule.first_key(tile, end - 1)
            self.load_block(tma_k, on_chip.k, on_chip.k_pipeline, loaded, self.origin(first_key, head_kv, batch))
            for w in cutlass.range_constexpr(tiles.consumers):
                n = turn * tiles.consumers + w
                first = (block * tiles.block_q + w * WARPGROUP_ROWS) >> schedule.pack
                on_chip.q_pipeline.producer_acquire(n)
                slot = on_chip.q_pipeline.slot(n)
                load(tma_q, on_chip.q[None, None, slot], (0, 0, first, head, batch), on_chip.q_pipeline.full + slot)  # A1.4, A1.5
            for i in cutlass.range(end - 1 - begin, unroll=1):  # A1.6
                n = end - 2 - i
                next_key = schedule.first_key(tile, n)
                if const_expr(tiles.overlap):  # the consumers want the next K before this V
                    self.load_block(tma_k, on_chip.k, on_chip.k_pipeline, loaded + 1, self.origin(next_key, head_kv, batch))
                self.load_block(tma_v, slots_of_v, pipeline_of_v, loaded, self.value.origin(first_key, head_kv, batch))
                if const_expr(not tiles.overlap):
                    self.load_block(tma_k, on_chip.k, on_chip.k_pipeline, loaded + 1, self.origin(next_key, head_kv, batch))
                first_key = next_key
                loaded += 1
            self.load_block(tma_v, slots_of_v, pipeline_of_v, loaded, self.value.origin(first_key, head_kv, batch))
            loaded += 1
            if const_expr(self.hands_out):
                tile = take_over(schedule, on_chip, turn)
            else:
                tile = schedule.described(number)
                self.hand_over(schedule, on_chip, tile, turn)
            turn += 1

    @cute.jit
    def hand_out(self, schedule: TileScheduler, on_chip: OnChip):
        """The warp that looks up one tile after the other, each while the one before it is worked on."""
        turn = Int32(0)
        tile = schedule.first()
        while schedule.exists(tile):
            tile = schedule.described(schedule.fetch())
            self.hand_over(schedule, on_chip, tile, turn)
            turn += 1

    @cute.jit
    def hand_over(self, schedule: TileScheduler, on_chip: OnChip, tile: Any, turn: Int32):
        """The next tile to all who work on this one."""
        on_chip.tile_pipeline.producer_acquire(turn)
        with cute.arch.elect_one():
            schedule.tell(on_chip.tile, tile)
            cute.arch.mbarrier_arrive(on_chip.tile_pipeline.full)

    @cute.jit
    def load_block(self, tma: cute.CopyAtom, slots: cute.Tensor, pipeline: Pipeline, loaded: Int32, origin: tuple):
        """The block of K or V at `origin` into the pipeline's next slot."""
        pipeline.producer_acquire(loaded)  # A1.7
        slot = pipeline.slot(loaded)
        load(tma, slots[None, None, slot], origin, pipeline.full + slot)  # A1.8, A1.9

    def origin(self, first_key: Int32, head: Int32, batch: Int32) -> tuple[Any, ...]:
        """Where a block of keys begins."""
        return (0, first_key, head, batch)

    @cute.jit
    def consume(self, schedule: TileScheduler, on_chip: OnChip, scaling: Any, tma_o: cute.CopyAtom, lse: cute.Pointer):
        """A consumer warpgroup: its 64 rows of tile after tile."""
        kernel, tiles = self.kernel, self.tiles
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = cute.arch.lane_idx()
        me = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPS - 1)
        if const_expr(tiles.teams > 1):
            me = me % tiles.consumers
        # WGMMA gives a thread two rows, 8 apart, and pairs of columns, 8 apart.
        row, column = thread // 32 * 16 + lane // 4, lane % 4 * 2

        mma_qk = hopper_helpers.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K), Float32, (1, 1, 1), (WARPGROUP_ROWS, tiles.block_kv)
        )
        mma_pv = self.product.mma(self.product.columns)
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        q_slots = mma_qk.make_fragment_A(qk.partition_A(on_chip.q))
        k = mma_qk.make_fragment_B(qk.partition_B(on_chip.k))
        v = mma_pv.make_fragment_B(pv.partition_B(self.value.operand(on_chip.v)))
        p = cute.make_rmem_tensor(pv.partition_shape_A((WARPGROUP_ROWS, tiles.block_kv)), self.dtype)
        o = cute.make_rmem_tensor(pv.partition_shape_C((WARPGROUP_ROWS, kernel.width_v)), Float32)
        s_shape = qk.partition_shape_C((WARPGROUP_ROWS, tiles.block_kv))
        softmax = self.softmax(scaling)

        if me == 0:
            self.pass_turn(Int32(tiles.consumers - 1))  # the first turn is warpgroup 0's
        used = Int32(0)  # blocks of K and V so far, over all tiles
        turn = Int32(0)  # tiles so far
        tile = schedule.first()
        while schedule.exists(tile):
            block, head, batch = schedule.place(tile)
            first_row = block * tiles.block_q + me * WARPGROUP_ROWS
            n = turn * tiles.consumers + me
            q = q_slots[None, None, None, on_chip.q_pipeline.slot(n)]
            consumer = Consumer(me, on_chip, mma_qk, mma_pv, q, k, v, p, o, s_shape, softmax, row, column)
            softmax.reset(schedule, batch, head, first_row + row)  # A1.13, A2.2
            used = self.attend(schedule, tile, block, consumer, used, n)
            tile = take_over(schedule, on_chip, turn)
            turn += 1
            self.store(schedule, consumer, tma_o, lse, batch, head, first_row)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory goes with the block

    def softmax(self, scaling: Float32) -> Softmax:
        """The state of this thread's rows."""
        return Softmax(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scaling)

    @cute.jit
    def attend(self, schedule: TileScheduler, tile: Any, block: Int32, consumer: Consumer, used: Int32, q_use: Int32) -> Int32:
        """One tile's rows of O, not yet divided by l, and of the softmax state. Returns the new `used`.

        The blocks that only other warpgroups' rows see are skipped; those that cross the edge of the visible band are masked.
        """
        kernel, tiles = self.kernel, self.tiles
        step = self.step_overlapped if const_expr(tiles.overlap) else self.step_serial
        first_row = block * tiles.block_q + consumer.me * WARPGROUP_ROWS
        begin, end = schedule.extent(tile, block)
        bounds = schedule.bounds(first_row + consumer.row, consumer.column)
        consumer.on_chip.q_pipeline.consumer_wait(q_use)  # A1.14, A2.3
        mine = schedule.blocks_of_rows(first_row, begin, end)
        both, only_left = Mask(bounds, kernel.left, True), Mask(bounds, True, False)
        consumer.o.fill(0.0)
        if const_expr(not tiles.overlap):
            self.wait_turn(consumer.me)
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
        consumer.on_chip.q_pipeline.consumer_release(q_use)
        if const_expr(tiles.overlap):
            used = self.last_product(consumer, used)
        if const_expr(kernel.left):
            used = self.skip(consumer, used, mine.begin - begin)
        if const_expr(not tiles.overlap):
            self.pass_turn(consumer.me)
        return used

    @cute.jit
    def first_scores(self, consumer: Consumer, used: Int32, first_key: Int32, mask: Mask, crosses: Boolean):
        """P of the first block, masked where it crosses an edge; its product with V is left to the next step."""
        s = self.scores(consumer, used)  # A2.4, A2.5
        if crosses:
            mask.apply(s, first_key)
        consumer.softmax.step(s, first_key)  # A2.6
        self.product.to_operand(s, consumer.p)

    @cute.jit
    def scores(self, consumer: Consumer, used: Int32) -> cute.Tensor:
        """Scores of a block, waited for, whoever's turn it is."""
        k_pipeline = consumer.on_chip.k_pipeline
        k_pipeline.consumer_wait(used)
        s = consumer.issue_scores(used)
        warpgroup.wait_group(0)
        k_pipeline.consumer_release(used)
        return s

    @cute.jit
    def step_overlapped(self, consumer: Consumer, used: Int32, first_key: Int32, mask: Mask | None) -> Int32:
        """P of the next block, while the P before it is multiplied with V."""
        k_pipeline, v_pipeline = consumer.on_chip.k_pipeline, consumer.on_chip.v_pipeline
        k_pipeline.consumer_wait(used + 1)  # A2.8
        self.wait_turn(consumer.me)
        s = consumer.issue_scores(used + 1)  # A2.9
        v_pipeline.consumer_wait(used)  # A2.10
        product = self.product.issue(consumer, used)  # A2.11
        self.pass_turn(consumer.me)
        warpgroup.wait_group(1)  # A2.12
        k_pipeline.consumer_release(used + 1)
        if const_expr(mask is not None):
            mask.apply(s, first_key)
        rescale, alpha = consumer.softmax.step(s, first_key)  # A2.13
        warpgroup.wait_group(0)  # A2.14
        v_pipeline.consumer_release(used)  # A2.15
        self.product.add(consumer, product)
        self.product.to_operand(s, consumer.p)  # A2.16
        self.product.rescale(consumer, rescale, alpha)
        return used + 1

    @cute.jit
    def last_product(self, consumer: Consumer, used: Int32) -> Int32:
        """O += P V of the last block."""
        v_pipeline = consumer.on_chip.v_pipeline
        v_pipeline.consumer_wait(used)  # A2.18
        product = self.product.issue(consumer, used)  # A2.19
        warpgroup.wait_group(0)
        v_pipeline.consumer_release(used)
        self.product.add(consumer, product)
        return used + 1

    @cute.jit
    def step_serial(self, consumer: Consumer, used: Int32, first_key: Int32, mask: Mask | None) -> Int32:
        """One block without overlap: scores, softmax, product, each waited for."""
        k_pipeline = consumer.on_chip.k_pipeline
        k_pipeline.consumer_wait(used)  # A1.16
        s = consumer.issue_scores(used)  # A1.17
        self.pass_turn(consumer.me)
        warpgroup.wait_group(0)
        k_pipeline.consumer_release(used)
        return self.rest_of_step(consumer, s, used, first_key, mask)

    @cute.jit
    def rest_of_step(
        self, consumer: Consumer, s: cute.Tensor, used: Int32, first_key: Int32, mask: Mask | None, crosses: Boolean | bool = True
    ) -> Int32:
        """What follows the scores of a block; they are masked where it crosses an edge."""
        v_pipeline = consumer.on_chip.v_pipeline
        if const_expr(mask is not None):  # noqa: SIM102 - one is known when compiled, the other when run
            if crosses:
                mask.apply(s, first_key)
        rescale, alpha = consumer.softmax.step(s, first_key)  # A1.18, A1.19
        self.product.to_operand(s, consumer.p)
        self.product.rescale(consumer, rescale, alpha)
        v_pipeline.consumer_wait(used)  # A1.20
        self.wait_turn(consumer.me)
        product = self.product.issue(consumer, used)  # A1.21
        warpgroup.wait_group(0)
        v_pipeline.consumer_release(used)  # A1.22
        self.product.add(consumer, product)
        return used + 1

    @cute.jit
    def skip(self, consumer: Consumer, used: Int32, blocks: Int32) -> Int32:
        """Give blocks back unused, in step with the other warpgroups' turns."""
        k_pipeline, v_pipeline = consumer.on_chip.k_pipeline, consumer.on_chip.v_pipeline
        for _ in cutlass.range(blocks, unroll=1):
            k_pipeline.consumer_wait(used)
            k_pipeline.consumer_release(used)
            if const_expr(self.tiles.overlap):
                self.wait_turn(consumer.me)
                self.pass_turn(consumer.me)
            else:
                self.pass_turn(consumer.me)
                self.wait_turn(consumer.me)
            v_pipeline.consumer_wait(used)
            v_pipeline.consumer_release(used)
            used += 1
        return used

    @cute.jit
    def wait_turn(self, me: Int32):
        """Ping-pong: until the warpgroup before this one has issued its products."""
        if const_expr(self.tiles.ping_pong):
            cute.arch.barrier(barrier_id=NamedBarrier.TURN + self.of_block(me), number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, me: Int32):
        """Ping-pong: the next warpgroup may issue its products."""
        if const_expr(self.tiles.ping_pong):
            following = Int32(0) if me == self.tiles.consumers - 1 else me + 1
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + self.of_block(following), number_of_threads=2 * WARPGROUP)

    def of_block(self, me: Int32) -> Int32:
        """Number among the block's consumer warpgroups of one of this team's."""
        return me if self.tiles.teams == 1 else own_team(self.tiles) * self.tiles.consumers + me

    @cute.jit
    def store(
        self,
        schedule: TileScheduler,
        consumer: Consumer,
        tma_o: cute.CopyAtom,
        lse: cute.Pointer,
        batch: Int32,
        head: Int32,
        first_row: Int32,
    ):
        """O / l and LSE of 64 rows to memory. TMA leaves out rows and columns outside of the tensor."""
        o, softmax = consumer.o, consumer.softmax
        thread, lane = cute.arch.thread_idx()[0] % WARPGROUP, cute.arch.lane_idx()
        by = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(softmax.l[r], threads_in_group=4)
            blind = total == 0.0
            by[r] = Float32(0.0) if blind else softmax.scale_of_o(total)
            if blind:  # 0 whatever V holds, inf and NaN too
                rows_of(o)[None, r, None].fill(0.0)
            packed_row = first_row + consumer.row + 8 * r
            position, packed_head = packed_row >> schedule.pack, packed_row & ((1 << schedule.pack) - 1)
            if position < schedule.seqlen_q and lane % 4 == 0:
                value = -Float32.inf if blind else softmax.lse_log2(r, total) * LN2
                of_head = ((Int64(batch) * schedule.heads + head) << schedule.pack) + packed_head
                cute.make_tensor(lse + (of_head * schedule.seqlen_q + position), cute.make_layout(1))[0] = value
        scale_rows(o, by)  # A1.24, A2.20
        rounded = cute.make_rmem_tensor(cute.size(o), self.dtype_o)
        to_16_bits(o, rounded)

        width = self.kernel.width_o
        mma = self.product.mma(width)
        to_chip = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype_o), mma).get_slice(thread)
        staged = consumer.on_chip.o[None, None, consumer.me]
        for column in cutlass.range_constexpr(0, self.kernel.width_v, width):
            part = cute.make_tensor(rounded.iterator + column // 2, mma.get_slice(0).partition_shape_C((WARPGROUP_ROWS, width)))
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # what was staged before is on its way
            self.meet(consumer.me)
            cute.copy(to_chip, to_chip.retile(part), to_chip.partition_D(staged))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet(consumer.me)
            if thread < 32:
                memory, on_chip = box_of(tma_o, staged, (column, 0, first_row >> schedule.pack, head, batch))
                cute.copy(tma_o, on_chip, memory)  # A1.25
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def meet(self, me: Int32):
        """The warps of one warpgroup wait for one another."""
        cute.arch.barrier(barrier_id=NamedBarrier.STORE + self.of_block(me), number_of_threads=WARPGROUP)


@cute.jit
def take_over(schedule: TileScheduler, on_chip: OnChip, turn: Int32) -> Any:
    """The next tile, by a whole warp."""
    on_chip.tile_pipeline.consumer_wait(turn)
    tile = schedule.told(on_chip.tile)
    cute.arch.sync_warp()  # every lane has read it
    on_chip.tile_pipeline.consumer_release(turn)
    return tile


@cute.jit
def own_team(tiles: Constexpr[Tiles]) -> Int32:
    """The team of the warp that asks: each has as many of the producer's warpgroup, and warpgroups of consumers of its own."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return warp // (WARPS // tiles.teams) if warp < WARPS else (warp // WARPS - 1) // tiles.consumers
