"""Which block of which packed sequence a program has: a table made on the device, of which no host reads anything.

1. A sequence that begins at row `first` has the slots from `first // BLOCK` plus its number on: enough for its blocks, whatever the
   lengths, so the number of slots follows from the rows and the number of sequences alone.
2. Each slot finds its sequence by counting those that begin before it.
3. Its place in the table is how many blocks have more work, plus how many of as much work come before: longest first, no sorting, and
   no atomics. Slots without a block come last.

Rows before the first sequence and behind the last are a sequence each, whose queries see no key: so they are written, too. What lies
outside of the tensors is clamped, and where the values fall no row is of any sequence: so the table is whole whatever they are.
"""

import triton
import triton.language as tl

COLUMNS: tl.constexpr = tl.constexpr(8)
"""Of an entry: which block of its sequence; first row and rows of queries, and of keys; rows of the side that the block is of; the number
of the sequence; how many entries there are that are blocks."""


@triton.jit
def _side(cu, number, sequences, total):
    """First row and rows of the sequences with these numbers, the rows around all of them among them."""
    first = tl.load(cu + number - 1, mask=(number > 0) & (number <= sequences + 1), other=0)
    end = tl.load(cu + number, mask=number <= sequences, other=total)
    first = tl.minimum(tl.maximum(first, 0), total)
    return first, tl.maximum(tl.minimum(end, total) - first, 0)


@triton.jit
def _lengths(cu_q, cu_k, used_k, number, sequences, total_q, total_k, OF_KEYS: tl.constexpr, USED: tl.constexpr):
    """Of sequences by number: first row and rows of queries, of keys, and rows of the side that is cut into blocks."""
    first_q, rows_q = _side(cu_q, number, sequences, total_q)
    first_k, rows_k = _side(cu_k, number, sequences, total_k)
    owned = rows_k if OF_KEYS else rows_q
    around = (number == 0) | (number > sequences)
    if USED:
        used = tl.load(used_k + number - 1, mask=(number > 0) & (number <= sequences), other=0)
        rows_k = tl.minimum(rows_k, tl.maximum(used, 0))
    if OF_KEYS:
        rows_q = tl.where(around, 0, rows_q)
    else:
        rows_k = tl.where(around, 0, rows_k)
    return first_q, rows_q, first_k, rows_k, owned


@triton.jit
def _work(rows_q, rows_k, blocks, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, RIGHT: tl.constexpr):
    """What the blocks of a sequence see of the other side, in blocks. Under a right bound each sees one more than another, the first of
    them one more than this: up to the last query, or from the last key on."""
    if RIGHT:
        least = (rows_k - rows_q) // BLOCK if not OF_KEYS else (rows_q - rows_k) // BLOCK
        return tl.maximum(least, -blocks)
    else:
        return tl.cdiv(rows_q if OF_KEYS else rows_k, BLOCK)


@triton.jit
def _falls(cu_q, cu_k, sequences, CHUNK: tl.constexpr):
    """Whether some sequence ends before it begins."""
    falls = 0
    for start in tl.range(0, sequences, CHUNK):
        number = start + tl.arange(0, CHUNK)
        inside = number < sequences
        for_q = tl.load(cu_q + number, mask=inside, other=0) > tl.load(cu_q + number + 1, mask=inside, other=0)
        for_k = tl.load(cu_k + number, mask=inside, other=0) > tl.load(cu_k + number + 1, mask=inside, other=0)
        falls += tl.sum((for_q | for_k).to(tl.int32), 0)
    return falls > 0


@triton.jit(do_not_specialize=["sequences", "total_q", "total_k"])
def tiles_kernel(
    cu_q, cu_k, used_k, tiles, sequences, total_q, total_k,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, USED: tl.constexpr, RIGHT: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The table for blocks of BLOCK queries, or keys."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    slots = (total_k if OF_KEYS else total_q) // BLOCK + sequences + 2
    sequences = tl.where(_falls(cu_q, cu_k, sequences, CHUNK), 0, sequences)
    number = tl.zeros([SLOTS], tl.int32) - 1
    for start in tl.range(0, sequences + 2, CHUNK):
        other = start + tl.arange(0, CHUNK)
        first_q, rows_q, first_k, rows_k, owned = _lengths(cu_q, cu_k, used_k, other, sequences, total_q, total_k, OF_KEYS, USED)
        begins = (first_k if OF_KEYS else first_q) // BLOCK + other
        number += tl.sum(((begins[None, :] <= slot[:, None]) & (other < sequences + 2)[None, :]).to(tl.int32), 1)
    first_q, rows_q, first_k, rows_k, owned = _lengths(cu_q, cu_k, used_k, number, sequences, total_q, total_k, OF_KEYS, USED)
    nth = slot - (first_k if OF_KEYS else first_q) // BLOCK - number
    n_blocks = tl.cdiv(owned, BLOCK)
    least = _work(rows_q, rows_k, n_blocks, BLOCK, OF_KEYS, RIGHT)
    work = least + (nth if not OF_KEYS else n_blocks - 1 - nth) + 1 if RIGHT else least

    more = tl.zeros([SLOTS], tl.int32)  # blocks with more work, and of as much work those that come before
    before = tl.zeros([SLOTS], tl.int32)  # blocks of the sequences up to this one
    every = 0
    for start in tl.range(0, sequences + 2, CHUNK):
        other = start + tl.arange(0, CHUNK)
        _, rows_q_o, _, rows_k_o, owned_o = _lengths(cu_q, cu_k, used_k, other, sequences, total_q, total_k, OF_KEYS, USED)
        blocks_o = tl.where(other < sequences + 2, tl.cdiv(owned_o, BLOCK), 0)
        least_o = _work(rows_q_o, rows_k_o, blocks_o, BLOCK, OF_KEYS, RIGHT)[None, :]
        earlier = other[None, :] < number[:, None]
        if RIGHT:
            above = least_o + blocks_o[None, :] - work[:, None]
            more += tl.sum(tl.minimum(tl.maximum(above, 0), blocks_o[None, :]), 1)
            same = (work[:, None] > least_o) & (above >= 0) & (blocks_o > 0)[None, :]
            more += tl.sum((same & earlier).to(tl.int32), 1)
        else:
            ahead = (least_o > work[:, None]) | ((least_o == work[:, None]) & earlier)
            more += tl.sum(tl.where(ahead, blocks_o[None, :], 0), 1)
        before += tl.sum(tl.where(other[None, :] <= number[:, None], blocks_o[None, :], 0), 1)
        every += tl.sum(blocks_o, 0)
    if not RIGHT:
        more += nth
    there = nth < n_blocks
    place = tl.where(there, more, every + slot - before)
    entry = tiles + place * COLUMNS
    mask = slot < slots
    tl.store(entry, nth, mask=mask)
    tl.store(entry + 1, first_q, mask=mask)
    tl.store(entry + 2, tl.where(there, rows_q, 0), mask=mask)
    tl.store(entry + 3, first_k, mask=mask)
    tl.store(entry + 4, tl.where(there, rows_k, 0), mask=mask)
    tl.store(entry + 5, tl.where(there, owned, 0), mask=mask)
    tl.store(entry + 6, number, mask=mask)
    tl.store(entry + 7, every, mask=mask)
