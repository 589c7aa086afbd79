"""FlashDecoding on e4m3 keys and values beside a 16-bit Q: what differs from `hopper.py`, which has the algorithm.

1. K and V stay e4m3 from memory to registers, where they become fp16, which holds every e4m3 number. There the tensor
   core takes them (mma.sync): shared memory is read once, and nothing is written back to it.
2. A consumer warp has 16 rows. Where a tile has no more, all four share them, or two and two if it has 32, and each has
   keys of its own of every block. They do not wait for one another: what they have is added up at an item's end, in
   the room that its Q had.
3. The sum over the head dim may take any order, and takes that in which a lane's 16 neighbouring bytes of a key are
   its share of four products. Q is read in the same order.
4. Of V a lane needs columns of neighbouring keys. ldmatrix takes two neighbouring columns for one 16-bit number and
   gives a lane those of two neighbouring keys, which are even and odd columns' operands when its bytes are permuted.
   The same permutation puts zeros where keys are not used, as what lies there may be no number.
5. A row of a bf16 Q is multiplied by the power of two that brings its largest number to where fp16 ends, and its scores
   by the inverse: fp16 then lacks only what is 2^39 times smaller. P is 2^15 at a row's maximum, for the same reason.
6. K's descale goes into the scale of a block's scores, V's multiplies what a block adds to O.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Constexpr, Float16, Float32, Int32, Uint32, const_expr

from flashzoo._cute.hopper.bounds import ThreadBounds
from flashzoo._cute.hopper.mask import mask_scores
from flashzoo._cute.hopper.wgmma import rows_of, to_16_bits
from flashzoo.decode.hopper import Decode, SharedStorage, TmaAtoms
from flashzoo.decode.hopper_items import Item, ParamsE4m3
from flashzoo.decode.hopper_output import columns_of
from flashzoo.decode.traits import KernelE4m3
from flashzoo.gpu import WARPGROUP_ROWS

KEYS = 32
"""Keys that a warp takes at a time."""
ROWS = 16
"""Rows of a warp: of one product of the tensor core, which has 8 columns and sums over 16."""
LINE = 128
"""Bytes of a row on chip, side by side; Q's, and those of keys and values but where these are 64 or 192 wide."""
WIDEST_Q = 128
"""Head dims to which Q stays in registers."""
LEAST_SCALE = 1e-30
"""Scores' scales are at least this: -inf times it stays -inf, as it would not times 0."""
BIAS, LARGEST = 127, 14
"""What float32 adds to exponents, and that of a row's largest number in fp16."""
BOTH, FIRST, NEITHER = 0x3120, 0x4140, 0x4444
"""Bytes of a word of V, of two keys and two columns, by columns: of both keys, of the first, zeros."""


@dataclass(frozen=True)
class Registers:
    """Operands of a thread in registers.

    Attributes:
        q: the four words of Q for a product, of two products for each 8 of a lane's 16 columns.
        p: P of `KEYS` keys.
        scales: what the scores of its two rows are multiplied by, in log2 units.
        o_shape: of O.
    """

    q: cute.Tensor
    p: cute.Tensor
    scales: cute.Tensor
    o_shape: Constexpr[int]


class DecodeE4m3(Decode):
    """The program of one `KernelE4m3`."""

    kernel: KernelE4m3
    p_exponent: float = 15.0

    def __init__(self, kernel: KernelE4m3) -> None:
        super().__init__(kernel)
        self.line: int = LINE if kernel.width % LINE == 0 else LINE // 2
        self.wide: bool = kernel.width > WIDEST_Q

    @cute.jit
    def load_item(
        self, params: ParamsE4m3, storage: SharedStorage, tma: TmaAtoms, item: Item, items: Int32, loaded: Int32
    ) -> tuple[Int32, Int32]:
        """Load an item's Q, and its blocks of K and V by turns."""
        kernel = self.kernel
        blocks = item.blocks(kernel.block_kv)
        if blocks > 0:
            self.load_q(params, storage, tma, item, items)
            items += 1
        pages = self.pages(params, item, item.begin)
        for i in cutlass.range(blocks, unroll=1):
            first_key = item.begin + i * kernel.block_kv
            following = self.pages(params, item, first_key + kernel.block_kv)  # there when they are needed
            self.load_block(params, storage, tma.k, item, first_key, loaded + 2 * i, pages)
            self.load_block(params, storage, tma.v, item, first_key, loaded + 2 * i + 1, pages)
            pages = following
        loaded += 2 * blocks
        return items, loaded

    def is_long(self, item: Item) -> Boolean:
        """Never: in the kernels of two thread blocks a multiprocessor no register is left to ask."""
        return Boolean(False)

    def products(self, storage: SharedStorage, wg_idx: int) -> Registers:
        """The operands of a thread."""
        q = cute.make_rmem_tensor((4, 2, 2, self.kernel.width // 64), Uint32)
        p = cute.make_rmem_tensor(ROWS * KEYS // 32, Float16)
        return Registers(q, p, cute.make_rmem_tensor(2, Float32), ROWS * self.kernel.width // 32)

    @cute.jit
    def walk(
        self, params: ParamsE4m3, storage: SharedStorage, registers: Registers, item: Item, bounds: ThreadBounds,
        o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, blocks: Int32, items: Int32, used: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Take an item's blocks into O, and the rows' maxima and sums.
        Returns how many items and stages have been read."""
        kernel, pipeline = self.kernel, storage.kv_pipeline
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), lane_anew()
        if blocks > 0:
            storage.q_pipeline.consumer_wait(items)
            q_at = self.read_q(params, storage, registers, warp // kernel.key_warps * ROWS, lane, items)
            for i in cutlass.range(blocks, unroll=1):
                first_key, of_k, of_v = item.begin + i * kernel.block_kv, used + 2 * i, used + 2 * i + 1
                k_descale = params.k_descale.at(item.batch, item.head, first_key)
                v_descale = params.v_descale.at(item.batch, item.head, first_key)
                scale_0 = cutlass.max(registers.scales[0] * k_descale, LEAST_SCALE)
                scale_1 = cutlass.max(registers.scales[1] * k_descale, LEAST_SCALE)
                crosses = self.crosses(params, item, first_key)
                pipeline.consumer_wait(of_k)
                for j in cutlass.range(kernel.row_tiles, unroll=1):
                    begin = (warp % kernel.key_warps * kernel.row_tiles + j) * KEYS  # of the warp's keys in the block
                    s = cute.make_rmem_tensor(ROWS * KEYS // 32, Float32)
                    self.multiply_k(s, registers.q, q_at, storage.kv[None, None, pipeline.stage(of_k)], begin, lane)
                    if j == kernel.row_tiles - 1:
                        cute.arch.sync_warp()
                        pipeline.consumer_release(of_k)
                    if crosses:
                        row = warp // kernel.key_warps * ROWS + (lane >> 2)
                        bounds = self.bounds(params, item, row, (lane & 3) << 1)  # few blocks need them
                        mask_scores(s, bounds, first_key + begin, kernel.left, True)
                    alpha = self.softmax(s, row_max, row_sum, (scale_0, scale_1))
                    to_16_bits(s, registers.p)
                    pipeline.consumer_wait(of_v)
                    there = item.used - first_key - begin
                    v = storage.kv[None, None, pipeline.stage(of_v)]
                    self.multiply_v(o, registers.p, v, begin, there, alpha, v_descale, lane)
                cute.arch.sync_warp()
                pipeline.consumer_release(of_v)
            if const_expr(kernel.key_warps > 1):
                self.add_up(storage, o, row_max, row_sum, warp, lane, items)
            cute.arch.fence_proxy("async.shared", space="cta")  # TMA is to write the next Q where this warp wrote
            cute.arch.sync_warp()
            storage.q_pipeline.consumer_release(items)
            items += 1
            used += 2 * blocks
        return items, used

    @cute.jit
    def read_q(
        self, params: ParamsE4m3, storage: SharedStorage, registers: Registers, first_row: Int32, lane: Int32,
        items: Int32,
    ) -> Int32:  # fmt: skip
        """Read a warp's rows of Q, in the order in which `multiply_k` has K, and in fp16.
        Returns where a lane's first row is, which has its numbers in fp16 too where they do not fit its registers."""
        q, n = registers.q, self.kernel.width // 64
        at = storage.q[None, None, storage.q_pipeline.stage(items)].iterator.toint() + (first_row + (lane >> 2)) * LINE
        registers.scales.fill(params.scale_log2)
        narrow = const_expr(self.dtype is BFloat16)
        if const_expr(narrow or not self.wide):
            for i in cutlass.range_constexpr(n):
                for half in cutlass.range_constexpr(2):
                    self.read_piece(q[None, None, half, i], at, i, half, lane)
        if const_expr(narrow):
            self.narrow(params, registers)
        if const_expr(narrow and self.wide):
            self.sync_consumers()  # all have read it. Warps that share rows write the same, and read what they wrote
            for i in cutlass.range_constexpr(n):
                for half in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        words = [q[r + 2 * (j % 2), j // 2, half, i] for j in range(4)]
                        store(at + self.place_of_q(i, half, lane) + r * 8 * LINE, words)
        return at

    @cute.jit
    def read_piece(self, q: cute.Tensor, at: Int32, i: Constexpr[int], half: Constexpr[int], lane: Int32):
        """Read half of a lane's i-th 16 columns of both its rows: (words, products)."""
        for r in cutlass.range_constexpr(2):
            words = load(at + self.place_of_q(i, half, lane) + r * 8 * LINE)
            for j in cutlass.range_constexpr(4):
                q[r + 2 * (j % 2), j // 2] = words[j]

    def place_of_q(self, i: int, half: int, lane: Int32) -> Int32:
        """Where that half lies, but for the row: 64 numbers of all rows lie behind one another, a row's 16-byte pieces
        exchanged by its number."""
        line, piece = self.piece(i, lane & 3)
        column = line * self.line + 16 * piece + 8 * half
        return (column >> 6) * (WARPGROUP_ROWS * LINE) + (((column >> 3 ^ lane >> 2) & 7) << 4)

    @cute.jit
    def narrow(self, params: ParamsE4m3, registers: Registers):
        """Q from bf16 to fp16: a row times the power of two that its scores are divided by."""
        n = cute.size(registers.q) // 4
        q = cute.make_tensor(registers.q.iterator, cute.make_layout((4, n)))
        from_16 = cute.make_tensor(cute.recast_ptr(q.iterator, dtype=BFloat16), cute.make_layout((2, 2, 2, n)))
        for r in cutlass.range_constexpr(2):
            top = Float32(0.0)
            for i in cutlass.range_constexpr(n):
                for j in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        x = Float32(from_16[c, r, j, i])
                        top = cute.arch.fmax(top, cute.arch.fmax(x, -x))
            top = cute.arch.warp_reduction_max(top, threads_in_group=4)
            exponent = cutlass.min(cutlass.max(as_bits(top) >> 23, LARGEST + 1), 2 * BIAS)
            by = as_float((2 * BIAS + LARGEST - exponent) << 23)
            registers.scales[r] = params.scale_log2 * as_float((exponent - LARGEST) << 23)
            for i in cutlass.range_constexpr(n):
                for j in cutlass.range_constexpr(2):
                    low, high = (Float32(from_16[c, r, j, i]) * by for c in range(2))
                    q[r + 2 * j, i] = cute.arch.inline_ptx(
                        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
                    )

    def piece(self, i: int, quarter: Int32) -> tuple[int, Int32]:
        """Which 16 columns of the head dim are the i-th of a lane, as a line and one of its pieces: such that lanes of
        two keys, which read at a time, read all banks."""
        if self.line == LINE:
            return i // 2, quarter * 2 + i % 2
        return i, quarter

    @cute.jit
    def multiply_k(self, s: cute.Tensor, q: cute.Tensor, q_at: Int32, k: cute.Tensor, first_key: Int32, lane: Int32):
        """S = Q K^T of a stage's keys from `first_key` on."""
        key, rows = lane >> 2, rows_of(s)
        begin = k.iterator.toint() + (first_key + key) * self.line
        s.fill(0.0)
        for i in cutlass.range_constexpr(self.kernel.width // 64):
            self.keep_order()
            at = begin + self.place(*self.piece(i, lane & 3), key)
            words = [load(at + n * 8 * self.line) for n in range(KEYS // 8)]
            for half in cutlass.range_constexpr(2):
                some = q[None, None, half, i]
                if const_expr(self.wide):
                    some = cute.make_rmem_tensor((4, 2), Uint32)
                    self.read_piece(some, q_at, i, half, lane)
                for j in cutlass.range_constexpr(2):
                    for n in cutlass.range_constexpr(KEYS // 8):
                        multiply_add(rows[None, None, n], some[None, j], to_fp16(words[n][2 * half + j]))

    def keep_order(self) -> None:
        """Loads behind this are not moved before it, where registers for what they load are short."""
        if self.wide:
            cute.arch.sync_warp()

    def place(self, line: int, piece: Int32, key: Int32) -> Int32:
        """Where a piece of a key's line lies from the key's first line on: a line's pieces are exchanged by the number
        of the 128 bytes in which it lies."""
        number = key & 7 if self.line == LINE else key >> 1 & 3
        return line * (self.kernel.block_kv * self.line) + ((piece ^ number) << 4)

    @cute.jit
    def multiply_v(
        self, o: cute.Tensor, p: cute.Tensor, v: cute.Tensor, first_key: Int32, there: Int32, alpha: cute.Tensor,
        descale: Float32, lane: Int32,
    ):  # fmt: skip
        """O = alpha O + descale P V of a stage's keys from `first_key` on, of which so many are there."""
        key, columns = lane & 15, columns_of(o, self.kernel)
        begin = v.iterator.toint() + (first_key + key) * self.line
        p_words = cute.make_tensor(cute.recast_ptr(p.iterator, dtype=Uint32), cute.make_layout((4, KEYS // 16)))
        kept = [bytes_kept(there - 8 * n - ((lane & 3) << 1)) for n in range(KEYS // 8)]
        for i in cutlass.range_constexpr(self.kernel.width // 32):
            self.keep_order()
            at = begin + self.place(32 * i // self.line, 32 * i % self.line // 16 + (lane >> 4), key)
            words = [load_transposed(at + n * 16 * self.line) for n in range(KEYS // 16)]
            for half in cutlass.range_constexpr(2):
                sums = cute.make_rmem_tensor((2, 2, 2), Float32)  # of even and odd columns
                sums.fill(0.0)
                for n in cutlass.range_constexpr(KEYS // 16):
                    first, second = (to_fp16(permuted(words[n][2 * half + j], kept[2 * n + j])) for j in range(2))
                    for odd in cutlass.range_constexpr(2):
                        multiply_add(sums[None, None, odd], p_words[None, n], (first[odd], second[odd]))
                for r in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(4):
                        old = columns[c, r, 2 * i + half] * alpha[r]
                        columns[c, r, 2 * i + half] = old + sums[c // 2, r, c % 2] * descale

    @cute.jit
    def add_up(
        self, storage: SharedStorage, o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, warp: Int32,
        lane: Int32, items: Int32,
    ):  # fmt: skip
        """Add up what warps of the same rows have; the first has the sum."""
        self.sync_consumers()  # all have read Q, in whose place it is
        if const_expr(self.kernel.key_warps == 4):
            self.add_half(storage, o, row_max, row_sum, warp, lane, items, 2)
        self.add_half(storage, o, row_max, row_sum, warp, lane, items, 1)

    @cute.jit
    def add_half(
        self, storage: SharedStorage, o: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, warp: Int32,
        lane: Int32, items: Int32, n: Constexpr[int],
    ):  # fmt: skip
        """Add what the n warps behind the first n of the same rows have to that of those."""
        kernel = self.kernel
        number = warp % kernel.key_warps
        fours = cute.make_tensor(o.iterator, cute.make_layout((4, cute.size(o) // 4)))
        of_o = storage.q[None, None, storage.q_pipeline.stage(items)].iterator.toint() + 16 * lane
        row = lane >> 2
        if number >= n and number < 2 * n:
            slot = self.slot(warp)
            for r in cutlass.range_constexpr(2):
                storage.states[slot, row + 8 * r, 0] = row_max[r]
                storage.states[slot, row + 8 * r, 1] = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            for i in cutlass.range_constexpr(cute.size(o) // 4):
                at = of_o + slot * (4 * ROWS * kernel.width) + 512 * i
                store(at, tuple(fours[c, i] for c in range(4)))
        self.sync_consumers()
        if number < n:
            slot = self.slot(warp + n)
            mine, others = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                others_max, others_sum = storage.states[slot, row + 8 * r, 0], storage.states[slot, row + 8 * r, 1]
                top = cute.arch.fmax(row_max[r], others_max)
                mine[r] = cute.math.exp2(row_max[r] - top, fastmath=True)
                others[r] = cute.math.exp2(others_max - top, fastmath=True)
                added = others_sum * others[r] if lane & 3 == 0 else Float32(0.0)  # of four lanes' sum
                row_max[r], row_sum[r] = top, row_sum[r] * mine[r] + added
            for i in cutlass.range_constexpr(cute.size(o) // 4):
                read = load(of_o + slot * (4 * ROWS * kernel.width) + 512 * i, Float32)
                for c in cutlass.range_constexpr(4):
                    fours[c, i] = fours[c, i] * mine[i % 2] + read[c] * others[i % 2]

    def slot(self, warp: Int32) -> Int32:
        """Which of the two places a warp writes to that gives away what it has."""
        return warp % 2 if self.kernel.key_warps == 4 else warp // 2


@cute.jit
def bytes_kept(keys: Int32) -> Int32:
    """Which bytes of a word of V are kept where so many keys are left."""
    kept = Int32(BOTH)
    if keys < 2:
        kept = Int32(FIRST) if keys > 0 else Int32(NEITHER)
    return kept


def permuted(word: Uint32, kept: Int32) -> Uint32:
    """Bytes of a word of V by columns; see `BOTH`."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, 0, {$r1};", write_only_types=[Uint32], read_only_args=[word, kept]
    )


def to_fp16(word: Uint32) -> tuple[Uint32, Uint32]:
    """Four e4m3 numbers as two words of fp16."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; "
        "cvt.rn.f16x2.e4m3x2 {$w1}, high;}",
        write_only_types=[Uint32] * 2, read_only_args=[word],
    )  # fmt: skip


def multiply_add(d: cute.Tensor, a: cute.Tensor, b: tuple[Uint32, Uint32]) -> None:
    """d += a b on the tensor core: a warp's 16 rows of fp16 by 8 columns, over 16."""
    at = ((0, 0), (1, 0), (0, 1), (1, 1))
    found = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*[a[i] for i in range(4)], *b, *[d[i] for i in at]],
    )
    for i, x in zip(at, found, strict=True):
        d[i] = x


def load(source: Int32, dtype: type[cutlass.Numeric] = Uint32) -> tuple[cutlass.Numeric, ...]:
    """Four words of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[dtype] * 4, read_only_args=[source]
    )


def store(target: Int32, words: tuple[Float32, ...]) -> None:
    """Four numbers to shared memory."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[target, *words])


def load_transposed(source: Int32) -> tuple[Uint32, ...]:
    """Four 8x8 matrices of 16-bit numbers, transposed; lane 8 i + j gives the address of row j of the i-th."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4, read_only_args=[source],
    )  # fmt: skip


def lane_anew() -> Int32:
    """The thread's number in its warp, such that what follows from it is not kept in registers over all items."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[cute.arch.lane_idx()]
    )


def as_bits(x: Float32) -> Int32:
    """A number's bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def as_float(bits: Int32) -> Float32:
    """The number of these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])
