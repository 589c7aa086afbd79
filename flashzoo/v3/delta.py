"""Before and after the backward kernel, in Triton: delta, LSE in log2 units and zeros for dQ before it;
dQ rounded after it, and parts of dK and dV added where queries that share keys were split.

Both are bound by memory; each program has a block of queries or keys of one head, of packed sequences as a table says
(`packed.py`). Those of queries go through the heads from the last to the first, and the kernel between them from the
first to the last: what one has written last, the next finds in L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# One compiled kernel for every length, batch and number of heads.
SIZES = ["seqlen_q", "blocks", "heads"]
SIZES_AFTER = ["seqlen_q", "blocks_q", "heads", "seqlen_k", "blocks_kv", "heads_kv", "of_queries"]


@triton.jit
def block_of_program(
    program, tiles, seqlen, blocks, heads, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Of a program's block of queries, or keys: its number in memory; batch and head; which block of its sequence; the
    sequence's first row and rows. A packed block may be none, and then starts past the last row."""
    if PACKED:
        entry = tiles + program // heads * 8
        block, number = tl.load(entry), tl.load(entry + 6)
        if OF_KEYS:
            first, rows = tl.load(entry + 3), tl.load(entry + 5)
        else:
            first, rows = tl.load(entry + 1), tl.load(entry + 2)
        h = program % heads
        return (first // BLOCK + number + block) * heads + h, 0, h, block, first, rows
    else:
        bh = program // blocks
        return program, bh // heads, bh % heads, program - bh * blocks, 0, seqlen


@triton.jit
def rows_at(x, b, h, row, stride_b, stride_s, stride_h, ALIGNED: tl.constexpr):
    """Where rows of a head begin. ALIGNED divides the strides: of those of 72 columns Triton itself would see that 16
    does not, and move two bytes at a time."""
    of_head = tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    return x + tl.multiple_of(of_head, ALIGNED) + tl.multiple_of(tl.cast(row, tl.int64) * stride_s, ALIGNED)


@triton.jit
def in_order(sums, COLUMNS: tl.constexpr):
    """Rows of what lies as a WGMMA leaves its 64 x COLUMNS result in registers, in fours: by eight columns, then by
    thread, which has pairs of columns of two rows 8 apart."""
    return sums.reshape(COLUMNS // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, COLUMNS)


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    o, do, lse, dlse, delta, lse_log2, dq_sum, dq_semaphore, tiles, sinks, dsinks,
    stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh,
    seqlen_q, blocks, heads,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, SUMS: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr,
    DLSE: tl.constexpr, SEMAPHORES: tl.constexpr, ALIGNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dLSE, LSE in log2 units, zeros for dQ and for its semaphores.

    delta and LSE are padded to whole blocks of BLOCK_Q queries. LSE is +inf in the padding and where a row saw no key:
    P is 0 there. ROWS is the power of two that holds BLOCK_Q. Of sinks' gradients, sums of -P delta, each program has
    its block's share: dsinks is (batch, heads, blocks).
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    of_block, b, h, block, first, rows = block_of_program(
        program, tiles, seqlen_q, blocks, heads, BLOCK_Q, False, PACKED
    )
    if PACKED:  # noqa: SIM102 - decided as the kernel is compiled, the other as it runs
        if block * BLOCK_Q >= rows:
            return
    of_head = (tl.cast(b, tl.int64) * heads + h) * seqlen_q + first
    row = block * BLOCK_Q + tl.arange(0, ROWS)
    mine = tl.arange(0, ROWS) < BLOCK_Q
    inside = mine & (row < rows)
    column = tl.arange(0, BLOCK_DV)
    of_v = inside[:, None] & (column < HEAD_DIM_V)[None, :]
    o_rows = rows_at(o, b, h, first + row, stride_ob, stride_os, stride_oh, ALIGNED)
    do_rows = rows_at(do, b, h, first + row, stride_dob, stride_dos, stride_doh, ALIGNED)
    o_i = tl.load(o_rows[:, None] + column[None, :], mask=of_v, other=0.0)
    do_i = tl.load(do_rows[:, None] + column[None, :], mask=of_v, other=0.0)
    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)  # B2.4
    if DLSE:
        delta_i -= tl.load(dlse + of_head + row, mask=inside, other=0.0)
    lse_i = tl.load(lse + of_head + row, mask=inside, other=float("-inf"))
    lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)
    padded = tl.cast(of_block, tl.int64) * BLOCK_Q + tl.arange(0, ROWS)
    tl.store(delta + padded, delta_i, mask=mine)
    tl.store(lse_log2 + padded, lse_i * LOG2E, mask=mine)
    if sinks is not None:
        part = h * (tl.num_programs(0) // heads) + program // heads if PACKED else program
        p = tl.exp2((tl.load(sinks + h) - lse_i) * LOG2E)  # 1 where LSE is the sink, however large that is
        tl.store(dsinks + part, -tl.sum(p * delta_i))
    sums = dq_sum + tl.cast(of_block, tl.int64) * SUMS
    for start in range(0, SUMS, 1024):
        tl.store(sums + start + tl.arange(0, 1024), tl.zeros((1024,), tl.float32))
    if SEMAPHORES:
        tl.store(dq_semaphore + of_block * SEMAPHORES + tl.arange(0, SEMAPHORES), tl.zeros((SEMAPHORES,), tl.int32))


@triton.jit
def round_part(
    dq_sum, dq, tiles, program, scale,
    stride_dqb, stride_dqs, stride_dqh,
    seqlen_q, blocks, heads,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, PARTS: tl.constexpr, BY_ROWS: tl.constexpr, N: tl.constexpr,
    STEP: tl.constexpr, ALIGNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dQ = scale * its sum over the keys, of one part of a block: 64 queries.

    The parts of a block are its queries by 64, or else columns by N. Of N as many are taken at a time as N's largest
    power of two, STEP.
    """
    part = program % PARTS
    of_block, b, h, block, first, rows = block_of_program(
        program // PARTS, tiles, seqlen_q, blocks, heads, BLOCK_Q, False, PACKED
    )
    row = block * BLOCK_Q + tl.arange(0, 64)
    if BY_ROWS:
        row += part * 64
    of_rows = rows_at(dq, b, h, first + row, stride_dqb, stride_dqs, stride_dqh, ALIGNED)[:, None]
    row = row[:, None]
    of_part = dq_sum + (tl.cast(of_block, tl.int64) * PARTS + part) * (64 * N)
    if block * BLOCK_Q < rows:
        for start in tl.static_range(0, N, STEP):
            sums = tl.load(of_part + start * 64 + tl.arange(0, 64 * STEP))
            tile = in_order((sums * scale).to(dq.dtype.element_ty), STEP)
            column = start + tl.arange(0, STEP)
            if not BY_ROWS:
                column += part * N
            tl.store(of_rows + column[None, :], tile, mask=(row < rows) & (column < HEAD_DIM)[None, :])


@triton.jit
def add_parts(
    parts, of_rows, tile, apart, part, inside, column, scale,
    HEAD_DIM: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """STEP columns of 64 rows of a gradient: those of SPLITS tiles, whose numbers are `apart`, one after the other."""
    place = parts + (tl.cast(tile, tl.int64) * PARTS + part) * (64 * N) + column * 64 + tl.arange(0, 64 * STEP)
    sums = tl.load(place)
    for _ in tl.range(1, SPLITS, loop_unroll_factor=4):
        place += tl.cast(apart, tl.int64) * (PARTS * 64 * N)
        sums += tl.load(place)
    columns = column + tl.arange(0, STEP)[None, :]
    result = in_order((sums * scale).to(of_rows.dtype.element_ty), STEP)
    tl.store(of_rows[:, None] + columns, result, mask=inside[:, None] & (columns < HEAD_DIM))


@triton.jit
def sum_part(
    dk_parts, dv_parts, dk, dv, tiles, program, scale,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    seqlen_k, blocks, heads_kv,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, N: tl.constexpr, N_V: tl.constexpr, BLOCK_KV: tl.constexpr,
    SPLITS: tl.constexpr, STEP: tl.constexpr, ALIGNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dK = scale * its parts added, or dV, of STEP columns of 64 keys: parts of as many tiles as the queries of a
    key/value head are split over."""
    CHUNKS: tl.constexpr = (N + N_V) // STEP
    PARTS: tl.constexpr = BLOCK_KV // 64
    chunk = program % CHUNKS
    part = program // CHUNKS % PARTS
    of_block, b, h, block, first, rows = block_of_program(
        program // (CHUNKS * PARTS), tiles, seqlen_k, blocks, heads_kv, BLOCK_KV, True, PACKED
    )
    row = block * BLOCK_KV + part * 64 + tl.arange(0, 64)
    inside = row < rows
    if PACKED:
        tile, apart = of_block * SPLITS, 1  # the heads of a block are side by side
    else:
        tile, apart = (of_block - block) * SPLITS + block, blocks  # those of a head's blocks are
    if block * BLOCK_KV + part * 64 < rows:
        if chunk < N // STEP:
            of_rows = rows_at(dk, b, h, first + row, stride_dkb, stride_dks, stride_dkh, ALIGNED)
            add_parts(
                dk_parts, of_rows, tile, apart, part, inside, chunk * STEP, scale, HEAD_DIM, N, PARTS, SPLITS, STEP
            )
        else:
            of_rows = rows_at(dv, b, h, first + row, stride_dvb, stride_dvs, stride_dvh, ALIGNED)
            column = chunk * STEP - N
            add_parts(dv_parts, of_rows, tile, apart, part, inside, column, 1.0, HEAD_DIM_V, N_V, PARTS, SPLITS, STEP)


@triton.jit(do_not_specialize=SIZES_AFTER)
def round_and_sum_kernel(
    dq_sum, dq, tiles_q, dk_parts, dv_parts, dk, dv, tiles_kv, scale,
    stride_dqb, stride_dqs, stride_dqh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    seqlen_q, blocks_q, heads, seqlen_k, blocks_kv, heads_kv, of_queries,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, PARTS: tl.constexpr,
    BY_ROWS: tl.constexpr, N_Q: tl.constexpr, STEP_Q: tl.constexpr, ALIGNED_Q: tl.constexpr,
    N: tl.constexpr, N_V: tl.constexpr, BLOCK_KV: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
    ALIGNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dQ rounded, by the first `of_queries` programs; and where SPLITS is more than 1 the parts of dK and dV added,
    by the others."""
    program = tl.program_id(0)
    if program < of_queries:
        round_part(
            dq_sum, dq, tiles_q, of_queries - 1 - program, scale,
            stride_dqb, stride_dqs, stride_dqh, seqlen_q, blocks_q, heads,
            HEAD_DIM, BLOCK_Q, PARTS, BY_ROWS, N_Q, STEP_Q, ALIGNED_Q, PACKED,
        )  # fmt: skip
    else:
        if SPLITS > 1:
            sum_part(
                dk_parts, dv_parts, dk, dv, tiles_kv, program - of_queries, scale,
                stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, seqlen_k, blocks_kv, heads_kv,
                HEAD_DIM, HEAD_DIM_V, N, N_V, BLOCK_KV, SPLITS, STEP, ALIGNED, PACKED,
            )  # fmt: skip
