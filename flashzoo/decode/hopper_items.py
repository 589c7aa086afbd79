"""What a launch of FlashDecoding on Hopper says once for all thread blocks, and the items that they work on."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr

from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.decode.traits import Kernel


@dataclass(frozen=True)
class Params:
    """A kernel's arguments but for q, k and v.

    Attributes:
        kernel: what is compiled.
        out: `(batch, seqlen_q, heads, head_dim)`, by its strides; of each split such a tensor, one behind the other,
            where a second kernel merges them.
        lse: `(batch, heads, seqlen_q)`, or such a tensor of each split.
        parts, lse_parts: where the thread block that ends last merges, of each tile and split a row of float32 for each
            of the tile's rows, and its LSE in log2 units.
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
        window_left, window_right: how many keys either side of the diagonal a query sees,
            where the kernel has that bound.
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
class Descale:
    """What a tensor's e4m3 numbers are multiplied by: float32, one for each (batch, head) or block of `DESCALE_BLOCK`
    keys.

    Attributes:
        values: the numbers.
        batch, head, block: their strides; 0 where they are the same for all.
    """

    values: cute.Pointer
    batch: Int32
    head: Int32
    block: Int32

    def at(self, batch: Int32, head: Int32, key: Int32) -> Float32:
        """That of a key."""
        i = Int64(batch) * self.batch + head * self.head + key // DESCALE_BLOCK * self.block
        return value_at(self.values, i)


@dataclass(frozen=True)
class ParamsE4m3(Params):
    """The same of e4m3 keys and values.

    Attributes:
        k_descale, v_descale: theirs.
    """

    k_descale: Descale
    v_descale: Descale


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


def item_of(params: Params, work: Int32) -> Item:
    """The item of a number.

    Those that run together are to read what lies together: first the tiles of a head's split, which read the same
    keys; then heads, whose keys lie side by side; then splits.
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
    first_query, first_head = (
        of_queries * p.queries_of_tile,
        (block - of_queries * blocks_of_heads) * p.heads_of_tile,
    )
    used, begin, end, parts = keys_of(p, batch, first_query, part)
    tile = (batch * p.heads + head) * p.tiles + block
    return Item(batch, head, tile, part, parts, first_query, first_head, begin, end, used, used - p.seqlen_q)


@cute.jit
def keys_of(params: Params, batch: Int32, first_query: Int32, part: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """How many keys a sequence has, where a split of those that a tile sees begins and ends,
    and how many splits there are."""
    p, kernel = params, params.kernel
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


def page_at(params: Params, item: Item, key: Int32) -> Int32:
    """Number of the page that a key lies in."""
    return value_at(params.page_table, Int64(item.batch) * params.table_stride + key // params.page)


def value_at(values: cute.Pointer, i: Int32 | Int64) -> cute.Numeric:
    """A number in memory."""
    return cute.make_tensor(values + i, cute.make_layout(1))[0]
