"""Which block of which packed sequence a program has: a table made on the device, of which no host reads anything.

1. A sequence that begins at row `first` has the slots from `first // BLOCK` plus its number on: enough for its blocks,
   whatever the lengths, so the number of slots follows from the rows and the number of sequences alone.
2. Each slot finds its sequence by counting those that begin before it.
3. Its place in the table is how many blocks the sequences have that are longer, or as long and before its own, plus how
   many of its own sequence go first: no sorting, and no atomics. So the longest sequence comes first, and of each the
   blocks with the most work; and programs that run together are of one sequence, whose keys and values L2 then has for
   all of them. Slots without a block come last.

Where queries alone are packed (cu_k is None) each sequence has a cache of total_k keys, from the first on. A query may
be several rows (GROUP), one for each head that shares its keys: then first row and rows of queries are of these.

Rows before the first sequence and behind the last are a sequence each, whose queries see no key: so they are written,
too. What lies outside of the tensors is clamped, and where the values fall no row is of any sequence: so the table is
whole whatever they are.
"""

import triton
import triton.language as tl

COLUMNS: tl.constexpr = tl.constexpr(8)
"""Of an entry: which block of its sequence; first row and rows of queries, and of keys; rows of the side that the block
is of; the number of the sequence; how many entries there are that are blocks."""


@triton.jit
def _side(cu, number, sequences, total):
    """First row and rows of the sequences with these numbers, the rows around all of them among them."""
    first = tl.load(cu + number - 1, mask=(number > 0) & (number <= sequences + 1), other=0)
    end = tl.load(cu + number, mask=number <= sequences, other=total)
    first = tl.minimum(tl.maximum(first, 0), total)
    return first, tl.maximum(tl.minimum(end, total) - first, 0)


@triton.jit
def _lengths(
    cu_q, cu_k, used_k, number, sequences, total_q, total_k,
    OF_KEYS: tl.constexpr, USED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of sequences by number: first row and rows of queries, of keys, and rows of the side that is cut into blocks."""
    first_q, rows_q = _side(cu_q, number, sequences, total_q)
    first_q, rows_q = first_q * GROUP, rows_q * GROUP
    if cu_k is None:
        first_k = tl.zeros_like(number)
        rows_k = first_k + total_k
    else:
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
def _falls(cu_q, cu_k, sequences, CHUNK: tl.constexpr):
    """Whether some sequence ends before it begins."""
    falls = 0
    for start in tl.range(0, sequences, CHUNK):
        number = start + tl.arange(0, CHUNK)
        inside = number < sequences
        here = tl.load(cu_q + number, mask=inside, other=0) > tl.load(cu_q + number + 1, mask=inside, other=0)
        if cu_k is not None:
            here |= tl.load(cu_k + number, mask=inside, other=0) > tl.load(cu_k + number + 1, mask=inside, other=0)
        falls += tl.sum(here.to(tl.int32), 0)
    return falls > 0


@triton.jit
def _table(
    program, cu_q, cu_k, used_k, tiles, sequences, total_q, total_k,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, USED: tl.constexpr,
    RIGHT: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some slots of the table for blocks of BLOCK queries, or keys."""
    slot = program * SLOTS + tl.arange(0, SLOTS)
    slots = (total_k if OF_KEYS else total_q * GROUP) // BLOCK + sequences + 2
    sequences = tl.where(_falls(cu_q, cu_k, sequences, CHUNK), 0, sequences)
    number = tl.zeros([SLOTS], tl.int32) - 1
    for start in tl.range(0, sequences + 2, CHUNK):
        other = start + tl.arange(0, CHUNK)
        first_q, rows_q, first_k, rows_k, owned = _lengths(
            cu_q, cu_k, used_k, other, sequences, total_q, total_k, OF_KEYS, USED, GROUP
        )
        begins = (first_k if OF_KEYS else first_q) // BLOCK + other
        number += tl.sum(((begins[None, :] <= slot[:, None]) & (other < sequences + 2)[None, :]).to(tl.int32), 1)
    first_q, rows_q, first_k, rows_k, owned = _lengths(
        cu_q, cu_k, used_k, number, sequences, total_q, total_k, OF_KEYS, USED, GROUP
    )
    nth = slot - (first_k if OF_KEYS else first_q) // BLOCK - number
    n_blocks = tl.cdiv(owned, BLOCK)
    length = rows_q if OF_KEYS else rows_k  # what a block walks at most

    ahead = tl.zeros([SLOTS], tl.int32)  # blocks of the sequences that go first
    before = tl.zeros([SLOTS], tl.int32)  # blocks of the sequences up to this one
    every = 0
    for start in tl.range(0, sequences + 2, CHUNK):
        other = start + tl.arange(0, CHUNK)
        _, rows_q_o, _, rows_k_o, owned_o = _lengths(
            cu_q, cu_k, used_k, other, sequences, total_q, total_k, OF_KEYS, USED, GROUP
        )
        blocks_o = tl.where(other < sequences + 2, tl.cdiv(owned_o, BLOCK), 0)
        length_o = (rows_q_o if OF_KEYS else rows_k_o)[None, :]
        first = (length_o > length[:, None]) | ((length_o == length[:, None]) & (other[None, :] < number[:, None]))
        ahead += tl.sum(tl.where(first, blocks_o[None, :], 0), 1)
        before += tl.sum(tl.where(other[None, :] <= number[:, None], blocks_o[None, :], 0), 1)
        every += tl.sum(blocks_o, 0)
    # under a right bound the last queries and the first keys see the most
    rank = n_blocks - 1 - nth if RIGHT and not OF_KEYS else nth
    there = nth < n_blocks
    place = tl.where(there, ahead + rank, every + slot - before)
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


@triton.jit(do_not_specialize=["sequences", "total_q", "total_k", "programs"])
def tiles_kernel(
    cu_q, cu_k, used_k, tiles, tiles_of_keys, sequences, total_q, total_k, programs,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, USED: tl.constexpr,
    RIGHT: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The table for blocks of BLOCK_Q queries, and, unless BLOCK_KV is 0,
    by programs from `programs` on, the one for blocks of keys."""
    program = tl.program_id(0)
    if program < programs or BLOCK_KV == 0:
        _table(
            program, cu_q, cu_k, used_k, tiles, sequences, total_q, total_k,
            BLOCK_Q, False, USED, RIGHT, SLOTS, CHUNK, GROUP,
        )  # fmt: skip
    elif BLOCK_KV > 0:
        of_keys = program - programs
        _table(
            of_keys, cu_q, cu_k, used_k, tiles_of_keys, sequences, total_q, total_k,
            BLOCK_KV, True, USED, RIGHT, SLOTS, CHUNK, GROUP,
        )  # fmt: skip
