"""FlashDecoding on MLA's latent cache: what differs from `hopper.py`, which has the algorithm.

1. A key's first 512 of 576 columns are its value: a stage is a block of both, which memory gives once.
2. O, 64 rows of 512 columns, is too much for a warpgroup's registers. Two have half the columns each.
3. The first computes S = Q K^T, online softmax and its half of P V, with P in registers. It leaves P in shared memory,
   and of each row the maximum and the sum so far; the second has its half of P V from there.
4. Q has one stage: all else is taken by two blocks of keys. So an item's first block is loaded before its Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from flashzoo._cute.hopper.bounds import ThreadBounds
from flashzoo._cute.hopper.mask import mask_scores
from flashzoo._cute.hopper.wgmma import gemm, scale_rows, to_16_bits, transposed
from flashzoo.decode.hopper import Decode, SharedStorage, TmaAtoms
from flashzoo.decode.hopper_items import Item, Params
from flashzoo.decode.traits import KernelLatent
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS


@dataclass(frozen=True)
class ProductsOfHalf:
    """The products of a warpgroup, and a thread's views of what they read and write.

    Attributes:
        wg_idx: which half of O's columns it has; the first has S, too.
        qk, pv: S = Q K^T, O += P V.
        q, k, v: stages of operands in shared memory, v of half the columns.
        p: operand in registers, of the second warpgroup in shared memory.
        s_shape, o_shape: of results.
    """

    wg_idx: Constexpr[int]
    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    s_shape: Constexpr[tuple]
    o_shape: Constexpr[tuple]


class DecodeLatent(Decode):
    """The program of one `KernelLatent`."""

    kernel: KernelLatent

    @cute.jit
    def load_item(
        self, params: Params, storage: SharedStorage, tma: TmaAtoms, item: Item, items: Int32, loaded: Int32
    ) -> tuple[Int32, Int32]:
        """Load an item's Q and its blocks, the first while Q's place is still in use.
        Returns how many items that see keys, and stages, have been loaded."""
        block_kv = self.kernel.block_kv
        blocks = item.blocks(block_kv)
        pages = self.pages(params, item, item.begin)
        if blocks > 0:
            self.load_block(params, storage, tma.k, item, item.begin, loaded, pages)
            self.load_q(params, storage, tma, item, items)
            items += 1
        pages = self.pages(params, item, item.begin + block_kv)
        for i in cutlass.range(1, blocks, unroll=1):
            first_key = item.begin + i * block_kv
            following = self.pages(params, item, first_key + block_kv)  # there when they are needed
            self.load_block(params, storage, tma.k, item, first_key, loaded + i, pages)
            pages = following
        return items, loaded + blocks

    def products(self, storage: SharedStorage, wg_idx: int) -> ProductsOfHalf:
        """Of a thread of that warpgroup."""
        kernel, first = self.kernel, wg_idx == 0
        columns = kernel.width_v // kernel.consumers
        mma_qk = self.mma(OperandMajorMode.K, kernel.block_kv, warpgroup.OperandSource.SMEM)
        source_of_p = warpgroup.OperandSource.RMEM if first else warpgroup.OperandSource.SMEM
        mma_pv = self.mma(OperandMajorMode.MN, columns, source_of_p)
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        q = mma_qk.make_fragment_A(qk.partition_A(storage.q))
        k = mma_qk.make_fragment_B(qk.partition_B(storage.kv))
        half = cute.composition(storage.kv, (kernel.block_kv, columns, kernel.stages))
        half = cute.make_tensor(storage.kv.iterator + storage.kv.layout((0, wg_idx * columns, 0)), half.layout)
        v = mma_pv.make_fragment_B(pv.partition_B(transposed(half)))
        if first:
            p = cute.make_rmem_tensor(pv.partition_shape_A((WARPGROUP_ROWS, kernel.block_kv)), self.dtype)
        else:
            p = mma_pv.make_fragment_A(pv.partition_A(storage.p))
        s_shape = qk.partition_shape_C((WARPGROUP_ROWS, kernel.block_kv))
        return ProductsOfHalf(
            wg_idx, mma_qk, mma_pv, q, k, v, p, s_shape, pv.partition_shape_C((WARPGROUP_ROWS, columns))
        )

    @cute.jit
    def walk(
        self, params: Params, storage: SharedStorage, products: ProductsOfHalf, item: Item, bounds: ThreadBounds,
        o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, blocks: Int32, items: Int32, used: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Take an item's blocks into this half of O, and the rows' maxima and sums.
        Returns how many items and stages have been read."""
        if blocks > 0:
            if const_expr(products.wg_idx == 0):
                self.walk_first(params, storage, products, item, bounds, o, row_max, row_sum, blocks, items, used)
            else:
                self.walk_second(storage, products, o, row_max, row_sum, blocks, used)
            items += 1
            used += blocks
        return items, used

    @cute.jit
    def walk_first(
        self, params: Params, storage: SharedStorage, products: ProductsOfHalf, item: Item, bounds: ThreadBounds,
        o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, blocks: Int32, items: Int32, used: Int32,
    ):  # fmt: skip
        """The warpgroup that has S."""
        kernel, pipeline = self.kernel, storage.kv_pipeline
        storage.q_pipeline.consumer_wait(items)
        q = products.q[None, None, None, 0]
        for i in cutlass.range(blocks, unroll=1):
            first_key = item.begin + i * kernel.block_kv
            stage = pipeline.stage(used + i)
            pipeline.consumer_wait(used + i)
            if first_key + kernel.block_kv > item.used:  # P is 0 there, and what lies there may be no number
                self.clear(storage.kv[None, None, stage], item.used - first_key)
            s = cute.make_rmem_tensor(products.s_shape, Float32)
            gemm(products.qk, s, q, products.k[None, None, None, stage], True)
            warpgroup.wait_group(0)
            if i == blocks - 1:
                storage.q_pipeline.consumer_release(items)
            if self.crosses(params, item, first_key):
                mask_scores(s, bounds, first_key, kernel.left, True)
            alpha = self.softmax(s, row_max, row_sum, (params.scale_log2, params.scale_log2))
            to_16_bits(s, products.p)
            self.leave(storage, products, row_max, row_sum, used + i)
            scale_rows(o, alpha)
            gemm(products.pv, o, products.p, products.v[None, None, None, stage], False)
            warpgroup.wait_group(0)
            pipeline.consumer_release(used + i)

    @cute.jit
    def leave(
        self, storage: SharedStorage, products: ProductsOfHalf, row_max: cute.Tensor, row_sum: cute.Tensor, n: Int32
    ):
        """Give the second warpgroup P and the rows' maxima and sums of the n-th block."""
        thread = cute.arch.thread_idx()[0]
        to_chip = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), products.qk)
        to_chip = to_chip.get_slice(thread)
        p = cute.make_tensor(products.p.iterator, cute.make_layout(products.s_shape))
        storage.p_pipeline.producer_acquire(n)
        cute.copy(to_chip, to_chip.retile(p), to_chip.partition_D(storage.p[None, None, 0]))
        for r in cutlass.range_constexpr(2):
            storage.states[thread, r, 0] = row_max[r]
            storage.states[thread, r, 1] = row_sum[r]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.p_pipeline.full)

    @cute.jit
    def walk_second(
        self, storage: SharedStorage, products: ProductsOfHalf, o: cute.Tensor, row_max: cute.Tensor,
        row_sum: cute.Tensor, blocks: Int32, used: Int32,
    ):  # fmt: skip
        """The other, whose threads have the same rows."""
        pipeline, thread = storage.kv_pipeline, cute.arch.thread_idx()[0] - WARPGROUP
        alpha = cute.make_rmem_tensor(2, Float32)
        for i in cutlass.range(blocks, unroll=1):
            storage.p_pipeline.consumer_wait(used + i)
            pipeline.consumer_wait(used + i)
            for r in cutlass.range_constexpr(2):
                top = storage.states[thread, r, 0]
                alpha[r] = cute.math.exp2(row_max[r] - top, fastmath=True)
                row_max[r], row_sum[r] = top, storage.states[thread, r, 1]
            scale_rows(o, alpha)
            v = products.v[None, None, None, pipeline.stage(used + i)]
            gemm(products.pv, o, products.p[None, None, None, 0], v, False)
            warpgroup.wait_group(0)
            storage.p_pipeline.consumer_release(used + i)
            pipeline.consumer_release(used + i)
