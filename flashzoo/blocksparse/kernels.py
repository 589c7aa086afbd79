"""Block-sparse FlashAttention (Algorithm 5 of Dao et al. 2022, arXiv:2205.14135) on the device,
as a change to FlashAttention-2.

What v2 has, so have these kernels, in the same order under the same names;
`diff flashzoo/v2/kernels.py` shows what is new:
1. A program walks a list: the blocks that its row (column, for dK and dV) keeps.
   What is skipped costs nothing, not a test.
2. Partial blocks come first in a list, and are masked element by element; then full ones, without a mask. The last full
   one may reach past the last key, and is masked there in a loop of its own.
3. Programs start with the longest rows, by the mask's `order`, so that no long one starts last.
4. A row whose list is empty gives O = 0, LSE = -inf and dQ = 0.

A block of the mask is a whole number of tiles, MASK_Q / BLOCK_Q by MASK_KV / BLOCK_KV; loops count tiles. What a
partial block is masked by is a window, causal folded in, as everywhere, and bits where there are any (BITS). Left out:
dropout. A function on scores (SCORE_MOD) is told the numbers of rows and columns, whatever the list skips.

Scores are in log2 units: exp2 with softmax_scale * log2(e) folded in. Comments A5.n are lines of Algorithm 5; A1.n and
B2.n of FlashAttention-2's (Dao 2023, arXiv:2307.08691) Algorithms 1 and 2, forward and backward.
"""

import triton
import triton.language as tl

# Plain floats would do, but a kernel may read no globals other than constexprs.
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

# One compiled kernel for every length, batch and number of heads.
SIZES = ["seqlen_q", "seqlen_k", "rows_padded", "heads", "heads_kv", "window_left", "window_right"]
SIZES += ["stride_mask_b", "stride_mask_h", "width", "n_bits"]


@triton.jit
def aligned(x, stride_b, stride_s, stride_h, b, h, seqlen, ALIGNED: tl.constexpr):
    """A head, as `load_block` has it, whose strides are multiples of ALIGNED. Of those of 72 columns the compiler sees
    only that 16 does not divide them, and would move number by number."""
    strides = (stride_b // ALIGNED * ALIGNED, stride_s // ALIGNED * ALIGNED, stride_h // ALIGNED * ALIGNED)
    return x, strides[0], strides[1], strides[2], b, h, seqlen


@triton.jit
def load_block(
    head,
    start,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows start .. start + ROWS of one head as a (ROWS, BLOCK_D) tile, zero beyond seqlen and HEAD_DIM.

    A head is (tensor, its strides over batch, seqlen and heads, batch index, head index, seqlen). A left operand of
    tl.dot that comes through TMA reaches the tensor cores from registers (the compiler does not look through the
    reshape), one that a plain load brought from shared memory.
    """
    x, stride_b, stride_s, stride_h, b, h, seqlen = head
    if TMA:
        return x.load([b, start, h, 0]).reshape(ROWS, BLOCK_D)
    else:
        row = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)
        base = (
            x + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h + tl.cast(start, tl.int64) * stride_s
        )
        tile = base + row[:, None].to(tl.int64) * stride_s + d[None, :]
        if MASKED and HEAD_DIM < BLOCK_D:
            return tl.load(tile, mask=(start + row < seqlen)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            return tl.load(tile, mask=(start + row < seqlen)[:, None], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            return tl.load(tile, mask=(d < HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(tile)


@triton.jit
def store_block(head, tile, start, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the tile to rows start .. start + ROWS of one head, those that are within seqlen."""
    x, stride_b, stride_s, stride_h, b, h, seqlen = head
    row = start + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    base = x + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    ptrs = base + row[:, None].to(tl.int64) * stride_s + d[None, :]
    tl.store(ptrs, tile.to(x.dtype.element_ty), mask=(row < seqlen)[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def load_statistic(x, bh, start, rows_padded, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Rows start .. start + ROWS of one head of delta or LSE, as `delta_kernel` left them."""
    if TMA:
        return x.load([bh, start]).reshape(ROWS)
    else:
        return tl.load(x + tl.cast(bh, tl.int64) * rows_padded + start + tl.arange(0, ROWS))


@triton.jit
def list_of(lists, head, row, rows, there, seqlen, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The list of one of `rows` rows of blocks, empty unless `there`:
    blocks of ROWS along seqlen, walked in tiles of BLOCK.

    Returns the list; and, counted in tiles, where its full blocks begin, where those end that lie within seqlen, and
    its end. A list is (block numbers, ROWS, (places of their bits, bits of the head, MASK_Q, MASK_KV)).
    """
    counts, full, indices, bit_index, bits, width, n_bits, MASK_Q, MASK_KV = lists
    at = head * rows + row
    kept = tl.load(counts + at, mask=there, other=0)
    whole = tl.load(full + at, mask=there, other=0)
    first = tl.cast(at, tl.int64) * width
    bits += tl.cast(head, tl.int64) * n_bits * (MASK_Q * MASK_KV // 8)
    blocks = (indices + first, ROWS, (bit_index + first, bits, MASK_Q, MASK_KV))
    whole_first = (kept - whole) * (ROWS // BLOCK)
    whole_last = kept * (ROWS // BLOCK)
    last = whole_last
    # Full blocks ascend: if one reaches past the end it is the last.
    left = seqlen - tl.load(indices + first + kept - 1, mask=whole > 0, other=0) * ROWS
    if (whole > 0) & (left < ROWS):
        whole_last -= ROWS // BLOCK
        last = whole_last + tl.cdiv(left, BLOCK)
    return blocks, whole_first, whole_last, last


@triton.jit
def start_of(blocks, nth, BLOCK: tl.constexpr):
    """The first row of the nth tile of a list."""
    indices, ROWS, _ = blocks
    return tl.load(indices + nth // (ROWS // BLOCK)) * ROWS + nth % (ROWS // BLOCK) * BLOCK


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
def visible_by_bits(row, start_kv, blocks, nth, BLOCK: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Which of the BLOCK_KV keys from start_kv the queries `row` see by the bits of the block that a list's
    nth tile lies in."""
    _, ROWS, of_list = blocks
    bit_index, bits, MASK_Q, MASK_KV = of_list
    bits += tl.load(bit_index + nth // (ROWS // BLOCK)).to(tl.int64) * (MASK_Q * MASK_KV // 8)
    byte = start_kv % MASK_KV // 8 + tl.arange(0, BLOCK_KV // 8)
    eight = tl.load(bits + (row % MASK_Q)[:, None] * (MASK_KV // 8) + byte[None, :])
    return (((eight[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1) != 0).reshape(row.shape[0], BLOCK_KV)


@triton.jit
def attend(
    state, queries, keys, span, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr, BITS: tl.constexpr, TMA: tl.constexpr, SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """Take the tiles first .. last of a list of blocks, the span, into the state, acc, l_i and m_i."""
    acc, l_i, m_i = state
    q_i, row, scored = queries
    k_head, v_head = keys
    blocks, first, last = span
    for nth in tl.range(first, last):  # A1.6, A5.8
        start = start_of(blocks, nth, BLOCK_KV)
        k_j = load_block(k_head, start, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA)  # A1.7
        s = tl.dot(q_i, k_j.T, input_precision="ieee")  # A1.8
        if SCORE_MOD is not None:
            b, h, score_scale, score_tensors = scored
            at = start + tl.arange(0, BLOCK_KV)
            s = SCORE_MOD(s * score_scale, b, h, row[:, None], at[None, :], score_tensors)
        if MASKED:
            col = start + tl.arange(0, BLOCK_KV)
            seen = visible(row[:, None], col[None, :], window)  # A5.11
            if BITS:
                seen = seen & visible_by_bits(row, start, blocks, nth, BLOCK_KV, BLOCK_KV)
            s = tl.where(seen, s * scale_log2, float("-inf"))
        elif SCORE_MOD is not None:
            s *= scale_log2
        if MASKED or SCORE_MOD is not None:
            m_new = tl.maximum(m_i, tl.max(s, 1))
            # A row that has seen no key yet keeps m = -inf, and -inf - -inf is NaN:
            # its p and alpha are exp2(-inf - 0) = 0.
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
        else:
            m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)  # A1.9
            p = tl.exp2(s * scale_log2 - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_j = load_block(v_head, start, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA)
        acc = tl.dot(p.to(v_j.dtype), v_j, acc * alpha[:, None], input_precision="ieee")  # A1.10
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, o, lse, order, counts, full, indices, bit_index, bits, score_tensors, scale_log2, score_scale,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    seqlen_q, seqlen_k, heads, group, window_left, window_right,
    stride_mask_b, stride_mask_h, width, n_bits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK_Q: tl.constexpr, MASK_KV: tl.constexpr, BITS: tl.constexpr,
    TMA: tl.constexpr, Q_IN_REGISTERS: tl.constexpr, SCORE_MOD: tl.constexpr,
):  # fmt: skip
    rows = tl.cdiv(seqlen_q, MASK_Q)
    tiles = rows * (MASK_Q // BLOCK_Q)
    bh = tl.program_id(0) // tiles
    tile = tl.program_id(0) - bh * tiles
    b = bh // heads
    h = bh - b * heads
    h_kv = h // group
    lists = (counts, full, indices, bit_index, bits, width, n_bits, MASK_Q, MASK_KV)
    mask_head = b * stride_mask_b + h * stride_mask_h
    # the longest first, so that none starts last
    mask_row = tl.load(order + mask_head * rows + tile // (MASK_Q // BLOCK_Q))
    start_q = mask_row * MASK_Q + tile % (MASK_Q // BLOCK_Q) * BLOCK_Q
    shift = seqlen_k - seqlen_q
    row = start_q + tl.arange(0, BLOCK_Q)
    window = (shift, seqlen_k, window_left, window_right)
    no_window = (shift, seqlen_k, seqlen_q + seqlen_k, seqlen_q + seqlen_k)
    q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, seqlen_q, ALIGNED)
    k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h_kv, seqlen_k, ALIGNED)
    v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h_kv, seqlen_k, ALIGNED)
    o_head = aligned(o, stride_ob, stride_os, stride_oh, b, h, seqlen_q, ALIGNED)

    q_i = load_block(q_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D, True, Q_IN_REGISTERS)  # A1.4
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)  # A1.5
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)

    blocks, whole_first, whole_last, last = list_of(
        lists, mask_head, mask_row, rows, start_q < seqlen_q, seqlen_k, MASK_KV, BLOCK_KV
    )
    scored = (b, h, score_scale, score_tensors)
    state, queries, keys = (acc, l_i, m_i), (q_i, row, scored), (k_head, v_head)
    span = (blocks, 0, whole_first)
    state = attend(
        state, queries, keys, span, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_KV, True, BITS, TMA, SCORE_MOD
    )
    span = (blocks, whole_first, whole_last)
    state = attend(
        state, queries, keys, span, scale_log2, no_window, HEAD_DIM, BLOCK_D, BLOCK_KV, False, False, TMA, SCORE_MOD
    )
    span = (blocks, whole_last, last)
    acc, l_i, m_i = attend(
        state, queries, keys, span, scale_log2, no_window, HEAD_DIM, BLOCK_D, BLOCK_KV, True, False, TMA, SCORE_MOD
    )

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that saw no key: O = 0, LSE = -inf
    o_i = acc / l_safe[:, None]  # A1.12
    lse_i = (m_i + tl.log2(l_safe)) * LN2  # A1.13
    store_block(o_head, o_i, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)  # A1.14
    tl.store(lse + tl.cast(bh, tl.int64) * seqlen_q + row, lse_i, mask=row < seqlen_q)  # A1.15


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    o, do, lse, dlse, delta, lse_log2,
    stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh,
    seqlen_q, rows_padded, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dLSE, and LSE in log2 units.

    Both are padded to whole blocks, so that no later load of them needs a mask. LSE is +inf in the padding and where a
    row saw no key: P is 0 there.
    """
    blocks = rows_padded // BLOCK_Q
    bh = tl.program_id(0) // blocks
    start = (tl.program_id(0) - bh * blocks) * BLOCK_Q
    b = bh // heads
    h = bh - b * heads
    row = start + tl.arange(0, BLOCK_Q)
    o_head = aligned(o, stride_ob, stride_os, stride_oh, b, h, seqlen_q, ALIGNED)
    do_head = aligned(do, stride_dob, stride_dos, stride_doh, b, h, seqlen_q, ALIGNED)
    o_i = load_block(o_head, start, BLOCK_Q, HEAD_DIM, BLOCK_D, True, False)
    do_i = load_block(do_head, start, BLOCK_Q, HEAD_DIM, BLOCK_D, True, False)
    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)  # B2.4
    at = tl.cast(bh, tl.int64) * seqlen_q + row
    if DLSE:
        delta_i -= tl.load(dlse + at, mask=row < seqlen_q, other=0.0)
    lse_i = tl.load(lse + at, mask=row < seqlen_q, other=float("-inf"))
    at_padded = tl.cast(bh, tl.int64) * rows_padded + row
    tl.store(delta + at_padded, delta_i)
    tl.store(lse_log2 + at_padded, tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E))


@triton.jit
def accumulate_dkdv(
    gradients, keys, queries, span, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr, BITS: tl.constexpr, TMA: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Take the tiles first .. last of a list of blocks, the span, into the gradients, dk and dv. Everything is
    transposed, (keys, queries), so that P^T and dS^T go from one product into the next without leaving the
    registers."""
    dk, dv = gradients
    k_j, v_j, col, start_kv = keys
    q_head, do_head, lse_log2, delta, bh, rows_padded, scored = queries
    blocks, first, last = span
    for nth in tl.range(first, last):  # B2.8
        start = start_of(blocks, nth, BLOCK_Q)
        q_i = load_block(q_head, start, BLOCK_Q, HEAD_DIM, BLOCK_D, MASKED, TMA)  # B2.9
        lse_i = load_statistic(lse_log2, bh, start, rows_padded, BLOCK_Q, TMA)
        delta_i = load_statistic(delta, bh, start, rows_padded, BLOCK_Q, TMA)
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
            if BITS:
                p = tl.where(visible_by_bits(row, start_kv, blocks, nth, BLOCK_Q, col.shape[0]).T, p, 0.0)
            if SCORE_MOD is not None:  # past the last query the score may be no number
                p = tl.where(lse_i[None, :] == float("inf"), 0.0, p)
        do_i = load_block(do_head, start, BLOCK_Q, HEAD_DIM, BLOCK_D, MASKED, TMA)
        dv = tl.dot(p.to(do_i.dtype), do_i, dv, input_precision="ieee")  # B2.12
        dp = tl.dot(v_j, do_i.T, input_precision="ieee")  # B2.13
        ds = p * (dp - delta_i[None, :])  # B2.14
        if SCORE_MOD is not None:
            ds = SCORE_GRADIENT(given, b, h, at[None, :], col[:, None], ds, score_tensors)
        dk = tl.dot(ds.to(q_i.dtype), q_i, dk, input_precision="ieee")  # B2.16
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    q, k, v, do, dk, dv, lse_log2, delta, order, counts, full, indices, bit_index, bits, score_tensors,
    scale, scale_log2, score_scale,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_dob, stride_dos, stride_doh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    seqlen_q, seqlen_k, rows_padded, heads_kv, group, window_left, window_right,
    stride_mask_b, stride_mask_h, width, n_bits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK_Q: tl.constexpr, MASK_KV: tl.constexpr, BITS: tl.constexpr,
    TMA: tl.constexpr, K_IN_REGISTERS: tl.constexpr, V_IN_REGISTERS: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(seqlen_k, MASK_KV)
    tiles = columns * (MASK_KV // BLOCK_KV)
    bh_kv = tl.program_id(0) // tiles
    tile = tl.program_id(0) - bh_kv * tiles
    b = bh_kv // heads_kv
    h_kv = bh_kv - b * heads_kv
    lists = (counts, full, indices, bit_index, bits, width, n_bits, MASK_Q, MASK_KV)
    mask_head = b * stride_mask_b + h_kv * group * stride_mask_h
    # The longest first, by the lists of the group's first head.
    mask_column = tl.load(order + mask_head * columns + tile // (MASK_KV // BLOCK_KV))
    start_kv = mask_column * MASK_KV + tile % (MASK_KV // BLOCK_KV) * BLOCK_KV
    shift = seqlen_k - seqlen_q
    col = start_kv + tl.arange(0, BLOCK_KV)
    window = (shift, seqlen_k, window_left, window_right)
    no_window = (shift, seqlen_k, seqlen_q + seqlen_k, seqlen_q + seqlen_k)
    k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h_kv, seqlen_k, ALIGNED)
    v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h_kv, seqlen_k, ALIGNED)
    dk_head = aligned(dk, stride_dkb, stride_dks, stride_dkh, b, h_kv, seqlen_k, ALIGNED)
    dv_head = aligned(dv, stride_dvb, stride_dvs, stride_dvh, b, h_kv, seqlen_k, ALIGNED)

    k_j = load_block(k_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, True, K_IN_REGISTERS)  # B2.6
    v_j = load_block(v_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, True, V_IN_REGISTERS)
    dk_j = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)  # B2.7
    dv_j = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)

    gradients, keys = (dk_j, dv_j), (k_j, v_j, col, start_kv)
    for member in range(group):
        h = h_kv * group + member
        q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, seqlen_q, ALIGNED)
        do_head = aligned(do, stride_dob, stride_dos, stride_doh, b, h, seqlen_q, ALIGNED)
        scored = (b, h, score_scale, score_tensors)
        queries = (q_head, do_head, lse_log2, delta, bh_kv * group + member, rows_padded, scored)
        blocks, whole_first, whole_last, last = list_of(
            lists,
            mask_head + member * stride_mask_h,
            mask_column,
            columns,
            start_kv < seqlen_k,
            seqlen_q,
            MASK_Q,
            BLOCK_Q,
        )
        span = (blocks, 0, whole_first)
        gradients = accumulate_dkdv(
            gradients, keys, queries, span, scale_log2, window,
            HEAD_DIM, BLOCK_D, BLOCK_Q, True, BITS, TMA, SCORE_MOD, SCORE_GRADIENT,
        )  # fmt: skip
        span = (blocks, whole_first, whole_last)
        gradients = accumulate_dkdv(
            gradients, keys, queries, span, scale_log2, no_window,
            HEAD_DIM, BLOCK_D, BLOCK_Q, False, False, TMA, SCORE_MOD, SCORE_GRADIENT,
        )  # fmt: skip
        span = (blocks, whole_last, last)
        gradients = accumulate_dkdv(
            gradients, keys, queries, span, scale_log2, no_window,
            HEAD_DIM, BLOCK_D, BLOCK_Q, True, False, TMA, SCORE_MOD, SCORE_GRADIENT,
        )  # fmt: skip
    dk_j, dv_j = gradients

    store_block(dk_head, dk_j * scale, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)  # B2.18
    store_block(dv_head, dv_j, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)


@triton.jit
def accumulate_dq(
    dq, queries, keys, span, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr, BITS: tl.constexpr, TMA: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Take the tiles first .. last of a list of blocks, the span, into dq."""
    q_i, do_i, lse_i, delta_i, row, scored = queries
    k_head, v_head = keys
    blocks, first, last = span
    for nth in tl.range(first, last):
        start = start_of(blocks, nth, BLOCK_KV)
        k_j = load_block(k_head, start, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA)
        s = tl.dot(q_i, k_j.T, input_precision="ieee")
        if SCORE_MOD is not None:
            b, h, score_scale, score_tensors = scored
            at = start + tl.arange(0, BLOCK_KV)
            given = s * score_scale
            s = SCORE_MOD(given, b, h, row[:, None], at[None, :], score_tensors)
        p = tl.exp2(s * scale_log2 - lse_i[:, None])
        if SCORE_MOD is not None:
            p = tl.where(lse_i[:, None] == float("inf"), 0.0, p)
        if MASKED:
            col = start + tl.arange(0, BLOCK_KV)
            p = tl.where(visible(row[:, None], col[None, :], window), p, 0.0)
            if BITS:
                p = tl.where(visible_by_bits(row, start, blocks, nth, BLOCK_KV, BLOCK_KV), p, 0.0)
        v_j = load_block(v_head, start, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED, TMA)
        dp = tl.dot(do_i, v_j.T, input_precision="ieee")
        ds = p * (dp - delta_i[:, None])
        if SCORE_MOD is not None:
            ds = SCORE_GRADIENT(given, b, h, row[:, None], at[None, :], ds, score_tensors)
        dq = tl.dot(ds.to(k_j.dtype), k_j, dq, input_precision="ieee")  # B2.15
    return dq


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q, k, v, do, dq, lse_log2, delta, order, counts, full, indices, bit_index, bits, score_tensors,
    scale, scale_log2, score_scale,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_dob, stride_dos, stride_doh,
    stride_dqb, stride_dqs, stride_dqh,
    seqlen_q, seqlen_k, rows_padded, heads, group, window_left, window_right,
    stride_mask_b, stride_mask_h, width, n_bits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    MASK_Q: tl.constexpr, MASK_KV: tl.constexpr, BITS: tl.constexpr,
    TMA: tl.constexpr, Q_IN_REGISTERS: tl.constexpr, DO_IN_REGISTERS: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
):  # fmt: skip
    rows = tl.cdiv(seqlen_q, MASK_Q)
    tiles = rows * (MASK_Q // BLOCK_Q)
    bh = tl.program_id(0) // tiles
    tile = tl.program_id(0) - bh * tiles
    b = bh // heads
    h = bh - b * heads
    h_kv = h // group
    lists = (counts, full, indices, bit_index, bits, width, n_bits, MASK_Q, MASK_KV)
    mask_head = b * stride_mask_b + h * stride_mask_h
    # the longest first, so that none starts last
    mask_row = tl.load(order + mask_head * rows + tile // (MASK_Q // BLOCK_Q))
    start_q = mask_row * MASK_Q + tile % (MASK_Q // BLOCK_Q) * BLOCK_Q
    shift = seqlen_k - seqlen_q
    row = start_q + tl.arange(0, BLOCK_Q)
    window = (shift, seqlen_k, window_left, window_right)
    no_window = (shift, seqlen_k, seqlen_q + seqlen_k, seqlen_q + seqlen_k)
    q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, seqlen_q, ALIGNED)
    k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h_kv, seqlen_k, ALIGNED)
    v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h_kv, seqlen_k, ALIGNED)
    do_head = aligned(do, stride_dob, stride_dos, stride_doh, b, h, seqlen_q, ALIGNED)
    dq_head = aligned(dq, stride_dqb, stride_dqs, stride_dqh, b, h, seqlen_q, ALIGNED)

    q_i = load_block(q_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D, True, Q_IN_REGISTERS)
    do_i = load_block(do_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D, True, DO_IN_REGISTERS)
    lse_i = load_statistic(lse_log2, bh, start_q, rows_padded, BLOCK_Q, False)
    delta_i = load_statistic(delta, bh, start_q, rows_padded, BLOCK_Q, False)
    dq_i = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    blocks, whole_first, whole_last, last = list_of(
        lists, mask_head, mask_row, rows, start_q < seqlen_q, seqlen_k, MASK_KV, BLOCK_KV
    )
    scored = (b, h, score_scale, score_tensors)
    queries, keys = (q_i, do_i, lse_i, delta_i, row, scored), (k_head, v_head)
    span = (blocks, 0, whole_first)
    dq_i = accumulate_dq(
        dq_i, queries, keys, span, scale_log2, window,
        HEAD_DIM, BLOCK_D, BLOCK_KV, True, BITS, TMA, SCORE_MOD, SCORE_GRADIENT,
    )  # fmt: skip
    span = (blocks, whole_first, whole_last)
    dq_i = accumulate_dq(
        dq_i, queries, keys, span, scale_log2, no_window,
        HEAD_DIM, BLOCK_D, BLOCK_KV, False, False, TMA, SCORE_MOD, SCORE_GRADIENT,
    )  # fmt: skip
    span = (blocks, whole_last, last)
    dq_i = accumulate_dq(
        dq_i, queries, keys, span, scale_log2, no_window,
        HEAD_DIM, BLOCK_D, BLOCK_KV, True, False, TMA, SCORE_MOD, SCORE_GRADIENT,
    )  # fmt: skip

    store_block(dq_head, dq_i * scale, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)
