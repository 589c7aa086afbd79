"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) on the device: Algorithm 1 forward, Algorithm 2 backward.

Forward, one program for each block of queries of one head:
1. Load the block of Q once; start with acc = 0, l_i = 0, m_i = -inf on chip.
2. Stream the blocks of K and V that it sees: S = Q K^T, the row maxima, P = exp(S - m).
3. Rescale acc and l_i by alpha = exp(m_old - m_new), then add P V and the row sums: acc stays unnormalised.
4. After the last block divide once, O = acc / l_i, and write LSE = m_i + log(l_i).

Backward, two kernels and no atomics, so the bits are the same in every run:
5. `dkdv_kernel`: a program owns a block of keys and streams Q and dO, for every query head of its group.
6. `dq_kernel`: a program owns a block of queries and streams K and V. S and dP are computed in both: seven products
   where one pass over the pairs would have five, in exchange for no read-modify-write of dQ in memory.

Compared with FA-1 (flashzoo/v1): the loops are swapped, so O never leaves the chip unfinished; normalisation is
delayed to the end; one LSE in place of l and m.

Sinks, of each head one more logit in the softmax, join at the end of a row, and are in its LSE; so backward only their
own gradients are more, sums of -P delta that come with delta.

A function on scores (SCORE_MOD) is written by the host (flashzoo/_triton/scores.py) and handed to the kernels, as is
its gradient (SCORE_GRADIENT), which makes dS, of the scores that it gives, that of those that it is given. Scores are
then scaled before it, and made log2 units behind it. Where it reads tensors that have gradients, `dq_kernel` adds them
up as well, by atomics; but of a bias, of which each query and key read a number of their own, `dbias_kernel` sums it: a
program owns a block of queries and one of keys, and goes through the heads and the batch that share their numbers. S
and dP are computed once more, in exchange for no read-modify-write of the gradient and one order of its sums.

Dropout (KEPT) hides elements of P from V, and of dP from dS, where a function of the host's says so, of a seed and of
each element's place (flashzoo/_triton/dropout.py). The row sums are of all: so LSE is that without, and delta still is
rowsum(dO * O). What is kept is divided by its share once, where a sum is done.

Packed sequences (PACKED) share a batch of one. Which block of which sequence a program has is in a table that another
kernel makes on the device (flashzoo/_triton/packed_kernels.py): there the heads of one block run together, one sequence
after the other, the longest first. Where keys are a cache (CACHE) only so many of each sequence's are used, and the
others are neither seen nor read.

Programs of one head run together, so that what they stream stays in L2; where a bias is shared by the batch, those of
the same head of all of it. On Hopper what streams by comes through TMA
descriptors, LSE and delta included; what a program owns is read once by plain loads, unless the tensor cores are to
take it from registers (see `load_block`).

Causal is a window with nothing on its right (window_right = 0). Blocks the window cuts are masked, in loops of their
own; blocks it leaves whole are not. Scores are in log2 units: exp2 with softmax_scale * log2(e) folded in.
Comments A1.n are lines of the paper's Algorithm 1, B2.n of its Algorithm 2, which goes backward.
"""

import triton
import triton.language as tl

# Plain floats would do, but a kernel may read no globals other than constexprs.
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# The first rows' coordinate in a descriptor of packed sequences, and rows that their statistics are padded to:
# as the host has them.
RAGGED_ROWS: tl.constexpr = tl.constexpr(1 << 30)
DELTA_BLOCK: tl.constexpr = tl.constexpr(64)

# One compiled kernel for every length, batch and number of heads.
SIZES = ["seqlen_q", "seqlen_k", "rows_padded", "heads", "heads_kv", "window_left", "window_right"]


@triton.jit
def aligned(x, stride_b, stride_s, stride_h, b, h, first, rows, ALIGNED: tl.constexpr):
    """A head, as `load_block` has it, whose strides are multiples of ALIGNED. Of those of 72 columns the compiler sees
    only that 16 does not divide them, and would move number by number."""
    strides = (stride_b // ALIGNED * ALIGNED, stride_s // ALIGNED * ALIGNED, stride_h // ALIGNED * ALIGNED)
    return x, strides[0], strides[1], strides[2], b, h, first, rows


@triton.jit
def load_block(
    head,
    start,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    first_d=0,
):
    """Rows start .. start + ROWS of one head, numbers first_d .. first_d + BLOCK_D of each, as a tile, zero beyond
    seqlen and HEAD_DIM.

    A head is (tensor, its strides over batch, seqlen and heads, batch index, head index, first row, rows). TMA is 0, or
    how many dimensions the tensor's descriptor has: 5 that of packed sequences, where a sequence's rows end with it. A
    left operand of tl.dot that comes through TMA reaches the tensor cores from registers (the compiler does not look
    through the reshape), one that a plain load brought from shared memory.
    """
    x, stride_b, stride_s, stride_h, b, h, first, seqlen = head
    if TMA == 5:
        return x.load([RAGGED_ROWS, first + seqlen, RAGGED_ROWS - seqlen + start, h, first_d]).reshape(ROWS, BLOCK_D)
    elif TMA:
        return x.load([b, start, h, first_d]).reshape(ROWS, BLOCK_D)
    else:
        row = tl.arange(0, ROWS)
        d = first_d + tl.arange(0, BLOCK_D)
        base = (
            x
            + tl.cast(b, tl.int64) * stride_b
            + tl.cast(h, tl.int64) * stride_h
            + tl.cast(first + start, tl.int64) * stride_s
        )
        tile = base + row[:, None].to(tl.int64) * stride_s + d[None, :]
        if MASKED and HEAD_DIM % BLOCK_D:
            return tl.load(tile, mask=(start + row < seqlen)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            return tl.load(tile, mask=(start + row < seqlen)[:, None], other=0.0)
        elif HEAD_DIM % BLOCK_D:
            return tl.load(tile, mask=(d < HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(tile)


@triton.jit
def store_block(head, tile, start, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the tile to rows start .. start + ROWS of one head, those that are within seqlen."""
    x, stride_b, stride_s, stride_h, b, h, first, seqlen = head
    row = start + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    base = x + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    ptrs = base + (first + row)[:, None].to(tl.int64) * stride_s + d[None, :]
    tl.store(ptrs, tile.to(x.dtype.element_ty), mask=(row < seqlen)[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def load_statistic(x, rows, start, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Rows start .. start + ROWS of one head of delta or LSE, as `delta_kernel` left them: padded, so no mask is
    needed. The rows are (number of the head, rows padded, where those of the sequence begin)."""
    bh, rows_padded, first = rows
    if TMA:
        return x.load([bh, first + start]).reshape(ROWS)
    else:
        row = start + tl.arange(0, ROWS)
        return tl.load(x + tl.cast(bh, tl.int64) * rows_padded + first + row)


@triton.jit
def packed_tile(tiles, heads):
    """What the table says of a program: number of its head; which block of its sequence, first row and rows of the
    sequence's queries and of its keys, rows of the side that the block is of; and where the statistics of the
    sequence's queries begin, which have whole blocks of DELTA_BLOCK rows."""
    at = tl.program_id(0) // heads
    entry = tiles + at * 8
    first_q = tl.load(entry + 1)
    statistics = (first_q // DELTA_BLOCK + tl.load(entry + 6)) * DELTA_BLOCK
    bh, block = tl.program_id(0) - at * heads, tl.load(entry)
    lengths = first_q, tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    return bh, block, lengths, statistics


@triton.jit
def head_of(nth, BY_HEAD: tl.constexpr, heads, programs_of_head):
    """The number of the head, of all in the batch, that comes nth: one of each of the batch after the other, or with
    BY_HEAD the same one of all of the batch, which then share in L2 what a function on scores reads of it."""
    if BY_HEAD:
        batch = tl.num_programs(0) // (heads * programs_of_head)
        return nth % batch * heads + nth // batch
    else:
        return nth


@triton.jit
def visible(row, col, window):
    """Which keys `col` the queries `row` see.

    The window is (shift, seqlen_k, window_left, window_right); shift = seqlen_k - seqlen_q aligns its diagonal
    bottom-right. An unbounded side has a bound that nothing reaches.
    """
    shift, seqlen_k, window_left, window_right = window
    offset = col - row - shift
    return (col < seqlen_k) & (offset <= window_right) & (offset >= -window_left)


@triton.jit
def visible_keys(
    start_q, window, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Of a block of queries: keys first .. last are seen by some row, whole_first .. whole_last by every row."""
    shift, seqlen_k, window_left, window_right = window
    first = 0
    whole_first = 0
    last = seqlen_k
    whole_last = seqlen_k
    if LEFT:
        first = tl.maximum(start_q + shift - window_left, 0) // BLOCK_KV * BLOCK_KV
        whole_first = tl.maximum(start_q + BLOCK_Q - 1 + shift - window_left, 0)
    if RIGHT:
        last = tl.minimum(tl.maximum(start_q + BLOCK_Q + shift + window_right, 0), seqlen_k)
        whole_last = tl.minimum(tl.maximum(start_q + 1 + shift + window_right, 0), seqlen_k)
    whole_first = tl.minimum(tl.cdiv(whole_first, BLOCK_KV) * BLOCK_KV, tl.cdiv(last, BLOCK_KV) * BLOCK_KV)
    whole_last = tl.maximum(whole_last // BLOCK_KV * BLOCK_KV, whole_first)
    return first, whole_first, whole_last, last


@triton.jit
def used_of(used_k, b, seqlen_k):
    """How many keys of a sequence's cache are used."""
    return tl.minimum(tl.maximum(tl.load(used_k + b), 0), seqlen_k)


@triton.jit
def block_of_queries(
    tiles,
    used_k,
    seqlen_q,
    seqlen_k,
    heads,
    BLOCK_Q: tl.constexpr,
    RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    CACHE: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """What a program owns: number of the head, where its block of queries starts in the sequence, first row and rows of
    the sequence's queries and of its keys, and where its statistics begin. A packed block may be none, and then starts
    past the last query."""
    if PACKED:
        bh, block, lengths, statistics = packed_tile(tiles, heads)
        first_q, rows_q, first_k, rows_k, _ = lengths
    else:
        blocks = tl.cdiv(seqlen_q, BLOCK_Q)
        nth = tl.program_id(0) // blocks
        block = tl.program_id(0) - nth * blocks
        bh = head_of(nth, BY_HEAD, heads, blocks)
        if RIGHT:
            block = blocks - 1 - block  # the block that sees most keys first, so that no long one starts last
        first_q, rows_q, first_k, rows_k = 0, seqlen_q, 0, used_of(used_k, bh // heads, seqlen_k) if CACHE else seqlen_k
        statistics = 0
    return bh, block * BLOCK_Q, first_q, rows_q, first_k, rows_k, statistics


@triton.jit
def sequence_of(tiles, heads, b, PACKED: tl.constexpr, SCORE_MOD: tl.constexpr, KEPT: tl.constexpr):
    """The number of a program's sequence, for a function on scores and dropout: of the batch, or of packed ones."""
    if PACKED and (SCORE_MOD is not None or KEPT is not None):
        return tl.load(tiles + tl.program_id(0) // heads * 8 + 6) - 1
    else:
        return b


@triton.jit
def attend(
    state, queries, keys, first, last, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    SCORE_MOD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Take the keys first .. last into the state, acc, l_i and m_i."""
    acc, l_i, m_i = state
    q_i, row, scored, dropout = queries
    k_head, v_head = keys
    for start in tl.range(first, last, BLOCK_KV):  # A1.6
        k_j = load_block(k_head, start, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA)  # A1.7
        s = tl.dot(q_i, k_j.T, input_precision="ieee")  # A1.8
        if SCORE_MOD is not None:
            b, h, score_scale, score_tensors = scored
            at = start + tl.arange(0, BLOCK_KV)
            s = SCORE_MOD(s * score_scale, b, h, row[:, None], at[None, :], score_tensors)
        if MASKED:
            col = start + tl.arange(0, BLOCK_KV)
            seen = visible(row[:, None], col[None, :], window)
            s = tl.where(seen, s * scale_log2, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))
        else:
            m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)  # A1.9
        m_safe = m_new
        if MASKED or SCORE_MOD is not None:
            # A row that has seen no key yet keeps m = -inf, and -inf - -inf is NaN:
            # its p and alpha are exp2(-inf - 0) = 0.
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s if MASKED else s * scale_log2) - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        if KEPT is not None:
            p = tl.where(KEPT(dropout, start, q_i.shape[0], BLOCK_KV, 0), p, 0.0)
        v_j = load_block(v_head, start, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA)
        acc = tl.dot(p.to(v_j.dtype), v_j, acc * alpha[:, None], input_precision="ieee")  # A1.10
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, o, lse, tiles, used_k, sinks, score_tensors, seed, scale_log2, score_scale, dropped,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    seqlen_q, seqlen_k, heads, group, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PACKED: tl.constexpr, CACHE: tl.constexpr, BY_HEAD: tl.constexpr,
    TMA: tl.constexpr, Q_IN_REGISTERS: tl.constexpr, SCORE_MOD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    bh, start_q, first_q, rows_q, first_k, rows_k, _ = block_of_queries(
        tiles, used_k, seqlen_q, seqlen_k, heads, BLOCK_Q, RIGHT, PACKED, CACHE, BY_HEAD
    )
    if PACKED:  # noqa: SIM102 - decided as the kernel is compiled, the other as it runs
        if start_q >= rows_q:
            return
    b = bh // heads
    h = bh - b * heads
    h_kv = h // group
    row = start_q + tl.arange(0, BLOCK_Q)
    window = (rows_k - rows_q, rows_k, window_left, window_right)
    q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, first_q, rows_q, ALIGNED)
    k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h_kv, first_k, rows_k, ALIGNED)
    v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h_kv, first_k, rows_k, ALIGNED)
    o_head = aligned(o, stride_ob, stride_os, stride_oh, b, h, first_q, rows_q, ALIGNED)

    q_i = load_block(q_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D, True, Q_IN_REGISTERS)  # A1.4
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)  # A1.5
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)

    first, whole_first, whole_last, last = visible_keys(start_q, window, BLOCK_Q, BLOCK_KV, LEFT, RIGHT)
    sequence = sequence_of(tiles, heads, b, PACKED, SCORE_MOD, KEPT)
    scored, dropout = (sequence, h, score_scale, score_tensors), (seed, dropped, sequence, h, start_q)
    state, queries, keys = (acc, l_i, m_i), (q_i, row, scored, dropout), (k_head, v_head)
    if LEFT:
        state = attend(
            state, queries, keys, first, whole_first, scale_log2, window,
            HEAD_DIM, BLOCK_D, BLOCK_KV, True, TMA, SCORE_MOD, KEPT,
        )  # fmt: skip
    state = attend(
        state, queries, keys, whole_first, whole_last, scale_log2, window,
        HEAD_DIM, BLOCK_D, BLOCK_KV, False, TMA, SCORE_MOD, KEPT,
    )  # fmt: skip
    acc, l_i, m_i = attend(
        state, queries, keys, whole_last, last, scale_log2, window,
        HEAD_DIM, BLOCK_D, BLOCK_KV, True, TMA, SCORE_MOD, KEPT,
    )  # fmt: skip

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that saw no key: O = 0, LSE = -inf
    o_i = acc / l_safe[:, None]  # A1.12
    if KEPT is not None:
        o_i /= 1.0 - dropped
    lse_i = (m_i + tl.log2(l_safe)) * LN2  # A1.13
    if sinks is not None:  # one more key, seen by every row, whose value is 0
        # Not in log2 units, so that where the sink is nearly all LSE is the sink itself, of which its gradient is made.
        sink = tl.load(sinks + h)
        top = tl.maximum(lse_i, sink)
        # Of the greater of both, the other is this much: 0 beside a sink of -inf, which so changes no bit.
        other = tl.exp2(-tl.where(top == float("-inf"), 0.0, tl.abs(sink - lse_i)) * LOG2E)
        o_i *= (tl.where(lse_i >= sink, 1.0, other) / (1.0 + other))[:, None]
        lse_i = top + tl.log2(1.0 + other) * LN2
    store_block(o_head, o_i, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)  # A1.14
    tl.store(lse + tl.cast(bh, tl.int64) * seqlen_q + first_q + row, lse_i, mask=row < rows_q)  # A1.15


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    o, do, lse, dlse, delta, lse_log2, tiles, sinks, dsinks,
    stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh,
    seqlen_q, rows_padded, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr,
    DLSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dLSE, and LSE in log2 units.

    Both are padded to whole blocks, packed sequences each, so that no later load of them needs a mask. LSE is +inf in
    the padding and where a row saw no key: P is 0 there. Of sinks' gradients each program has its block's share: dsinks
    is (batch, heads, blocks).
    """
    if PACKED:
        bh, block, lengths, statistics = packed_tile(tiles, heads)
        first, rows, _, _, _ = lengths
        start = block * BLOCK_Q
        if start >= rows:
            return
    else:
        blocks = rows_padded // BLOCK_Q
        bh = tl.program_id(0) // blocks
        start = (tl.program_id(0) - bh * blocks) * BLOCK_Q
        first, rows, statistics = 0, seqlen_q, 0
    b = bh // heads
    h = bh - b * heads
    row = start + tl.arange(0, BLOCK_Q)
    o_head = aligned(o, stride_ob, stride_os, stride_oh, b, h, first, rows, ALIGNED)
    do_head = aligned(do, stride_dob, stride_dos, stride_doh, b, h, first, rows, ALIGNED)
    o_i = load_block(o_head, start, BLOCK_Q, HEAD_DIM, BLOCK_D, True, 0)
    do_i = load_block(do_head, start, BLOCK_Q, HEAD_DIM, BLOCK_D, True, 0)
    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)  # B2.4
    at = tl.cast(bh, tl.int64) * seqlen_q + first + row
    if DLSE:
        delta_i -= tl.load(dlse + at, mask=row < rows, other=0.0)
    lse_i = tl.load(lse + at, mask=row < rows, other=float("-inf"))
    lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)
    at_padded = tl.cast(bh, tl.int64) * rows_padded + statistics + row
    tl.store(delta + at_padded, delta_i)
    tl.store(lse_log2 + at_padded, lse_i * LOG2E)
    if sinks is not None:
        program = tl.program_id(0)
        part = bh * (tl.num_programs(0) // heads) + program // heads if PACKED else program
        p = tl.exp2((tl.load(sinks + h) - lse_i) * LOG2E)  # 1 where LSE is the sink, however large that is
        tl.store(dsinks + part, -tl.sum(p * delta_i))


@triton.jit
def accumulate_dkdv(
    gradients, keys, queries, first, last, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Take the queries first .. last into the gradients, dk and dv. Everything is transposed, (keys, queries), so that
    P^T and dS^T go from one product into the next without leaving the registers."""
    dk, dv = gradients
    k_j, v_j, col = keys
    q_head, do_head, lse_log2, delta, rows, scored, dropout = queries
    for start in tl.range(first, last, BLOCK_Q):  # B2.8
        q_i = load_block(q_head, start, BLOCK_Q, HEAD_DIM, BLOCK_D, MASKED, TMA)  # B2.9
        lse_i = load_statistic(lse_log2, rows, start, BLOCK_Q, TMA)
        delta_i = load_statistic(delta, rows, start, BLOCK_Q, TMA)
        s = tl.dot(k_j, q_i.T, input_precision="ieee")  # B2.10
        if SCORE_MOD is not None:
            b, h, score_scale, score_tensors = scored
            at = start + tl.arange(0, BLOCK_Q)
            given = s * score_scale
            s = SCORE_MOD(given, b, h, at[None, :], col[:, None], score_tensors)
        p = tl.exp2(s * scale_log2 - lse_i[None, :])  # B2.11
        if MASKED:
            row = start + tl.arange(0, BLOCK_Q)
            p = tl.where(visible(row[None, :], col[:, None], window), p, 0.0)
            if SCORE_MOD is not None:  # past the last query the score may be no number
                p = tl.where(lse_i[None, :] == float("inf"), 0.0, p)
        do_i = load_block(do_head, start, BLOCK_Q, HEAD_DIM, BLOCK_D, MASKED, TMA)
        p_kept = p
        if KEPT is not None:
            kept = KEPT(dropout, start, k_j.shape[0], BLOCK_Q, 1)
            p_kept = tl.where(kept, p, 0.0)
        dv = tl.dot(p_kept.to(do_i.dtype), do_i, dv, input_precision="ieee")  # B2.12
        dp = tl.dot(v_j, do_i.T, input_precision="ieee")  # B2.13
        if KEPT is not None:
            dp = tl.where(kept, dp / (1.0 - dropout[1]), 0.0)
        ds = p * (dp - delta_i[None, :])  # B2.14
        if SCORE_MOD is not None:
            ds = SCORE_GRADIENT(given, b, h, at[None, :], col[:, None], ds, score_tensors)
        dk = tl.dot(ds.to(q_i.dtype), q_i, dk, input_precision="ieee")  # B2.16
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    q, k, v, do, dk, dv, lse_log2, delta, tiles, used_k, score_tensors, seed,
    scale, scale_log2, score_scale, dropped,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_dob, stride_dos, stride_doh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    seqlen_q, seqlen_k, rows_padded, heads_kv, group, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PACKED: tl.constexpr, CACHE: tl.constexpr, BY_HEAD: tl.constexpr,
    TMA: tl.constexpr, K_IN_REGISTERS: tl.constexpr, V_IN_REGISTERS: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    if PACKED:
        bh_kv, block, lengths, statistics = packed_tile(tiles, heads_kv)
        first_q, rows_q, first_k, rows_k, owned = lengths
        start_kv = block * BLOCK_KV
        if start_kv >= owned:
            return
    else:
        blocks = tl.cdiv(seqlen_k, BLOCK_KV)
        nth = tl.program_id(0) // blocks
        start_kv = (tl.program_id(0) - nth * blocks) * BLOCK_KV
        bh_kv = head_of(nth, BY_HEAD, heads_kv, blocks)
        first_q, rows_q, first_k, owned, statistics = 0, seqlen_q, 0, seqlen_k, 0
        rows_k = used_of(used_k, bh_kv // heads_kv, seqlen_k) if CACHE else seqlen_k
    b = bh_kv // heads_kv
    h_kv = bh_kv - b * heads_kv
    shift = rows_k - rows_q
    col = start_kv + tl.arange(0, BLOCK_KV)
    window = (shift, rows_k, window_left, window_right)
    k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h_kv, first_k, rows_k, ALIGNED)
    v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h_kv, first_k, rows_k, ALIGNED)
    dk_head = aligned(dk, stride_dkb, stride_dks, stride_dkh, b, h_kv, first_k, owned, ALIGNED)
    dv_head = aligned(dv, stride_dvb, stride_dvs, stride_dvh, b, h_kv, first_k, owned, ALIGNED)

    k_j = load_block(k_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, True, K_IN_REGISTERS)  # B2.6
    v_j = load_block(v_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, True, V_IN_REGISTERS)
    dk_j = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)  # B2.7
    dv_j = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)

    # Queries first .. last see some key of the block, whole_first .. whole_last every key.
    first = 0
    whole_first = 0
    last = rows_q
    whole_last = rows_q
    if RIGHT:
        first = tl.minimum(tl.maximum(start_kv - shift - window_right, 0), rows_q) // BLOCK_Q * BLOCK_Q
        whole_first = tl.maximum(start_kv + BLOCK_KV - 1 - shift - window_right, 0)
    if LEFT:
        last = tl.minimum(tl.maximum(start_kv + BLOCK_KV - shift + window_left, 0), rows_q)
        whole_last = tl.minimum(tl.maximum(start_kv + 1 - shift + window_left, 0), rows_q)
    whole_first = tl.minimum(tl.cdiv(whole_first, BLOCK_Q) * BLOCK_Q, tl.cdiv(last, BLOCK_Q) * BLOCK_Q)
    whole_last = tl.maximum(whole_last // BLOCK_Q * BLOCK_Q, whole_first)

    gradients, keys = (dk_j, dv_j), (k_j, v_j, col)
    for member in range(group):
        h = h_kv * group + member
        q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, first_q, rows_q, ALIGNED)
        do_head = aligned(do, stride_dob, stride_dos, stride_doh, b, h, first_q, rows_q, ALIGNED)
        sequence = sequence_of(tiles, heads_kv, b, PACKED, SCORE_MOD, KEPT)
        scored, dropout = (sequence, h, score_scale, score_tensors), (seed, dropped, sequence, h, start_kv)
        rows = (bh_kv * group + member, rows_padded, statistics)
        queries = (q_head, do_head, lse_log2, delta, rows, scored, dropout)
        if RIGHT:
            gradients = accumulate_dkdv(
                gradients, keys, queries, first, whole_first, scale_log2, window,
                HEAD_DIM, BLOCK_D, BLOCK_Q, True, TMA, SCORE_MOD, SCORE_GRADIENT, KEPT,
            )  # fmt: skip
        gradients = accumulate_dkdv(
            gradients, keys, queries, whole_first, whole_last, scale_log2, window,
            HEAD_DIM, BLOCK_D, BLOCK_Q, False, TMA, SCORE_MOD, SCORE_GRADIENT, KEPT,
        )  # fmt: skip
        gradients = accumulate_dkdv(
            gradients, keys, queries, whole_last, last, scale_log2, window,
            HEAD_DIM, BLOCK_D, BLOCK_Q, True, TMA, SCORE_MOD, SCORE_GRADIENT, KEPT,
        )  # fmt: skip
    dk_j, dv_j = gradients
    if KEPT is not None:
        dv_j /= 1.0 - dropped
    if PACKED or CACHE:  # of the rows that are stored some may be keys that are not used
        dk_j = tl.where((col < rows_k)[:, None], dk_j, 0.0)
        dv_j = tl.where((col < rows_k)[:, None], dv_j, 0.0)

    store_block(dk_head, dk_j * scale, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)  # B2.18
    store_block(dv_head, dv_j, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)


@triton.jit
def accumulate_dq(
    dq, queries, keys, first, last, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Take the keys first .. last into dq."""
    q_i, do_i, lse_i, delta_i, row, told, scored, dropout = queries
    k_head, v_head = keys
    for start in tl.range(first, last, BLOCK_KV):
        k_j = load_block(k_head, start, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA)
        s = tl.dot(q_i, k_j.T, input_precision="ieee")
        if SCORE_MOD is not None:
            b, h, score_scale, score_tensors = scored
            at = start + tl.arange(0, BLOCK_KV)
            given = s * score_scale
            s = SCORE_MOD(given, b, h, told[:, None], at[None, :], score_tensors)
        p = tl.exp2(s * scale_log2 - lse_i[:, None])
        if MASKED:
            col = start + tl.arange(0, BLOCK_KV)
            p = tl.where(visible(row[:, None], col[None, :], window), p, 0.0)
        v_j = load_block(v_head, start, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA)
        dp = tl.dot(do_i, v_j.T, input_precision="ieee")
        if KEPT is not None:
            dp = tl.where(KEPT(dropout, start, q_i.shape[0], BLOCK_KV, 0), dp / (1.0 - dropout[1]), 0.0)
        ds = p * (dp - delta_i[:, None])
        if SCORE_MOD is not None:
            ds = SCORE_GRADIENT(given, b, h, told[:, None], at[None, :], ds, score_tensors)
        dq = tl.dot(ds.to(k_j.dtype), k_j, dq, input_precision="ieee")  # B2.15
    return dq


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q, k, v, do, dq, lse_log2, delta, tiles, used_k, score_tensors, seed, scale, scale_log2, score_scale, dropped,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_dob, stride_dos, stride_doh,
    stride_dqb, stride_dqs, stride_dqh,
    seqlen_q, seqlen_k, rows_padded, heads, group, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PACKED: tl.constexpr, CACHE: tl.constexpr, BY_HEAD: tl.constexpr,
    TMA: tl.constexpr, Q_IN_REGISTERS: tl.constexpr, DO_IN_REGISTERS: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    bh, start_q, first_q, rows_q, first_k, rows_k, statistics = block_of_queries(
        tiles, used_k, seqlen_q, seqlen_k, heads, BLOCK_Q, RIGHT, PACKED, CACHE, BY_HEAD
    )
    if PACKED:  # noqa: SIM102 - decided as the kernel is compiled, the other as it runs
        if start_q >= rows_q:
            return
    b = bh // heads
    h = bh - b * heads
    h_kv = h // group
    row = start_q + tl.arange(0, BLOCK_Q)
    window = (rows_k - rows_q, rows_k, window_left, window_right)
    q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, first_q, rows_q, ALIGNED)
    k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h_kv, first_k, rows_k, ALIGNED)
    v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h_kv, first_k, rows_k, ALIGNED)
    do_head = aligned(do, stride_dob, stride_dos, stride_doh, b, h, first_q, rows_q, ALIGNED)
    dq_head = aligned(dq, stride_dqb, stride_dqs, stride_dqh, b, h, first_q, rows_q, ALIGNED)
    rows = (bh, rows_padded, statistics)

    q_i = load_block(q_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D, True, Q_IN_REGISTERS)
    do_i = load_block(do_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D, True, DO_IN_REGISTERS)
    lse_i = load_statistic(lse_log2, rows, start_q, BLOCK_Q, 0)
    delta_i = load_statistic(delta, rows, start_q, BLOCK_Q, 0)
    dq_i = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    first, whole_first, whole_last, last = visible_keys(start_q, window, BLOCK_Q, BLOCK_KV, LEFT, RIGHT)
    sequence = sequence_of(tiles, heads, b, PACKED, SCORE_MOD, KEPT)
    scored, dropout = (sequence, h, score_scale, score_tensors), (seed, dropped, sequence, h, start_q)
    told = tl.minimum(row, rows_q - 1)  # past the last query a function on scores might give no numbers
    queries, keys = (q_i, do_i, lse_i, delta_i, row, told, scored, dropout), (k_head, v_head)
    if LEFT:
        dq_i = accumulate_dq(
            dq_i, queries, keys, first, whole_first, scale_log2, window,
            HEAD_DIM, BLOCK_D, BLOCK_KV, True, TMA, SCORE_MOD, SCORE_GRADIENT, KEPT,
        )  # fmt: skip
    dq_i = accumulate_dq(
        dq_i, queries, keys, whole_first, whole_last, scale_log2, window,
        HEAD_DIM, BLOCK_D, BLOCK_KV, False, TMA, SCORE_MOD, SCORE_GRADIENT, KEPT,
    )  # fmt: skip
    dq_i = accumulate_dq(
        dq_i, queries, keys, whole_last, last, scale_log2, window,
        HEAD_DIM, BLOCK_D, BLOCK_KV, True, TMA, SCORE_MOD, SCORE_GRADIENT, KEPT,
    )  # fmt: skip

    store_block(dq_head, dq_i * scale, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)


@triton.jit
def accumulate_dbias(
    dbias, block, tensors, sharing, first, last, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr,
    SCORE_MOD: tl.constexpr, READ_GRADIENT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Take the sharers first .. last of the block's numbers into dbias. Their products are made in parts of the head
    dim, by one loop over sharers and parts, so that what comes next is always being loaded."""
    start_q, start_kv, row, told, col = block
    q_of, k_of, v_of, do_of, lse_log2, delta, rows_padded, score_scale, score_tensors, seed, dropped = tensors
    first_b, first_h, shared_h, heads, group = sharing
    parts: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    s = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    dp = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for step in tl.range(first * parts, last * parts):
        sharer = step // parts
        d = (step - sharer * parts) * BLOCK_D
        b = first_b + sharer // shared_h
        h = first_h + sharer % shared_h
        q, stride_qb, stride_qs, stride_qh, seqlen_q = q_of
        q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, 0, seqlen_q, ALIGNED)
        k, stride_kb, stride_ks, stride_kh, seqlen_k = k_of
        k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h // group, 0, seqlen_k, ALIGNED)
        v, stride_vb, stride_vs, stride_vh, _ = v_of
        v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h // group, 0, seqlen_k, ALIGNED)
        do, stride_dob, stride_dos, stride_doh, _ = do_of
        do_head = aligned(do, stride_dob, stride_dos, stride_doh, b, h, 0, seqlen_q, ALIGNED)
        rows = (b * heads + h, rows_padded, 0)
        lse_i = load_statistic(lse_log2, rows, start_q, BLOCK_Q, 0)
        delta_i = load_statistic(delta, rows, start_q, BLOCK_Q, 0)
        q_i = load_block(q_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D, MASKED, TMA, d)
        k_j = load_block(k_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA, d)
        s = tl.dot(q_i, k_j.T, s, input_precision="ieee")
        do_i = load_block(do_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D, MASKED, TMA, d)
        v_j = load_block(v_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA, d)
        dp = tl.dot(do_i, v_j.T, dp, input_precision="ieee")
        if d + BLOCK_D >= HEAD_DIM:
            given = s * score_scale
            new = SCORE_MOD(given, b, h, told[:, None], col[None, :], score_tensors)
            p = tl.exp2(new * scale_log2 - lse_i[:, None])
            if MASKED:
                p = tl.where(visible(row[:, None], col[None, :], window), p, 0.0)
            if KEPT is not None:
                kept = KEPT((seed, dropped, b, h, start_q), start_kv, BLOCK_Q, BLOCK_KV, 0)
                dp = tl.where(kept, dp / (1.0 - dropped), 0.0)
            ds = p * (dp - delta_i[:, None])
            dbias += READ_GRADIENT(given, b, h, told[:, None], col[None, :], ds, score_tensors)
            s = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
            dp = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    return dbias


@triton.jit(do_not_specialize=SIZES)
def dbias_kernel(
    q, k, v, do, dbias, lse_log2, delta, score_tensors, seed, scale_log2, score_scale, dropped,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_dob, stride_dos, stride_doh,
    stride_share, stride_b, stride_h, stride_q, stride_k,
    seqlen_q, seqlen_k, rows_padded, heads, group, owners_b, owners_h, shared_h, sharers, share,
    window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TMA: tl.constexpr,
    SCORE_MOD: tl.constexpr, READ_GRADIENT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The gradient of a tensor of which each query and key read a number of their own. It has numbers for owners_b of
    the batch and owners_h heads, one or all; each is shared by `sharers`, shared_h of them in each of the batch. A
    program sums `share` of these, and dbias has a tensor for each share."""
    blocks_kv = tl.cdiv(seqlen_k, BLOCK_KV)
    blocks = tl.cdiv(seqlen_q, BLOCK_Q) * blocks_kv
    owner = tl.program_id(0) // blocks
    nth_block = tl.program_id(0) - owner * blocks
    start_q = nth_block // blocks_kv * BLOCK_Q
    start_kv = nth_block % blocks_kv * BLOCK_KV
    nth = owner // (owners_b * owners_h)
    owner_b = owner // owners_h % owners_b
    owner_h = owner % owners_h
    row = start_q + tl.arange(0, BLOCK_Q)
    told = tl.minimum(row, seqlen_q - 1)  # as in `dq_kernel`
    col = start_kv + tl.arange(0, BLOCK_KV)
    block = (start_q, start_kv, row, told, col)
    shift = seqlen_k - seqlen_q
    window = (shift, seqlen_k, window_left, window_right)

    # Sharers first .. last of a block that no query sees any key of are none; of one that is whole none is masked.
    first = nth * share
    last = tl.minimum(first + share, sharers)
    whole = (start_q + BLOCK_Q <= seqlen_q) & (start_kv + BLOCK_KV <= seqlen_k)
    if LEFT:
        nearest = start_kv + BLOCK_KV - 1 - start_q - shift
        last = tl.where(nearest < -window_left, first, last)
        whole &= start_kv - (start_q + BLOCK_Q - 1) - shift >= -window_left
    if RIGHT:
        nearest = start_kv - (start_q + BLOCK_Q - 1) - shift
        last = tl.where(nearest > window_right, first, last)
        whole &= start_kv + BLOCK_KV - 1 - start_q - shift <= window_right
    not_masked = tl.where(whole, last, first)

    q_of, k_of = (q, stride_qb, stride_qs, stride_qh, seqlen_q), (k, stride_kb, stride_ks, stride_kh, seqlen_k)
    v_of, do_of = (v, stride_vb, stride_vs, stride_vh, seqlen_k), (do, stride_dob, stride_dos, stride_doh, seqlen_q)
    tensors = (q_of, k_of, v_of, do_of, lse_log2, delta, rows_padded, score_scale, score_tensors, seed, dropped)
    sharing = (owner_b, owner_h, shared_h, heads, group)
    dbias_ij = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    dbias_ij = accumulate_dbias(
        dbias_ij, block, tensors, sharing, first, not_masked, scale_log2, window,
        HEAD_DIM, BLOCK_D, ALIGNED, BLOCK_Q, BLOCK_KV, False, TMA, SCORE_MOD, READ_GRADIENT, KEPT,
    )  # fmt: skip
    dbias_ij = accumulate_dbias(
        dbias_ij, block, tensors, sharing, not_masked, last, scale_log2, window,
        HEAD_DIM, BLOCK_D, ALIGNED, BLOCK_Q, BLOCK_KV, True, TMA, SCORE_MOD, READ_GRADIENT, KEPT,
    )  # fmt: skip

    base = dbias + tl.cast(nth, tl.int64) * stride_share + tl.cast(owner_b, tl.int64) * stride_b
    base += tl.cast(owner_h, tl.int64) * stride_h
    ptrs = base + row[:, None].to(tl.int64) * stride_q + col[None, :].to(tl.int64) * stride_k
    dbias_ij = dbias_ij.to(dbias.dtype.element_ty)
    if (start_q + BLOCK_Q <= seqlen_q) & (start_kv + BLOCK_KV <= seqlen_k):  # several numbers in one store
        tl.store(ptrs, dbias_ij)
    else:
        tl.store(ptrs, dbias_ij, mask=(row < seqlen_q)[:, None] & (col < seqlen_k)[None, :])
