"""FlashAttention-1 (Dao et al. 2022, arXiv:2205.14135) on the device: Algorithm 1 forward, Algorithm 4 backward.

The order costs a read and a write of O, l and m for every block of keys: that traffic is what FA-2 removed.

Forward, one program for a range of query rows of one head:
1. Set O = 0, l = 0, m = -inf in memory.
2. Outer loop over blocks of K and V, each loaded once into on-chip memory.
3. Inner loop over the program's blocks of Q: load Q, O, l and m; S = Q K^T, its row maxima, P and row sums.
4. Merge: write back O, divided by the new l each time, and the new l and m.
5. At the end O goes to its own dtype, and l and m become LSE = m + log(l).

Backward, K and V in the outer loop again:
6. dK and dV of a block stay on chip; Q, O, dO stream by; P comes from LSE; dQ is read, added to and written in memory.

Compared with standard attention: no (seqlen_q, seqlen_k) matrix in memory. Compared with the paper: O and dQ are kept
in float32 between steps; LSE stands for l and m in the backward pass; and the work of a head may be split, over ranges
of rows forward (as FlashAttention 1.0 came to do) and over blocks of keys backward (its sequence-parallel mode, where
dQ is added atomically); and what dropout keeps is divided by its share where a sum is done. Left out: windows. Scores
are in log2 units, with softmax_scale * log2(e) folded in.

A function on scores (SCORE_MOD) is written by the host (flashzoo/_triton/scores.py) and handed to the kernels, as is
its gradient (SCORE_GRADIENT), which makes dS, of the scores that it gives, that of those that it is given. Scores are
then scaled before it, and made log2 units behind it. Where it reads tensors that have gradients, `backward_kernel` adds
them up as well, by atomics.

Dropout (KEPT) hides elements of P from V, and of dP from dS, where a function of the host's says so, of a seed and of
each element's place (flashzoo/_triton/dropout.py). The row sums are of all, so LSE is that without.

Comments A1.n are lines of the paper's Algorithm 1, B1.n of its Algorithm 4, which goes backward.
"""

import triton
import triton.language as tl

# Plain floats would do, but a kernel may read no globals other than constexprs.
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

# One compiled kernel for every length, batch and number of heads.
SIZES = ["seqlen_q", "seqlen_k", "heads", "heads_kv", "rows_per_program"]


@triton.jit
def aligned(x, stride_b, stride_s, stride_h, b, h, seqlen, ALIGNED: tl.constexpr):
    """A head, as `load_block` has it, whose strides are multiples of ALIGNED. Of those of 72 columns the compiler sees
    only that 16 does not divide them, and would move number by number."""
    strides = (stride_b // ALIGNED * ALIGNED, stride_s // ALIGNED * ALIGNED, stride_h // ALIGNED * ALIGNED)
    return x, strides[0], strides[1], strides[2], b, h, seqlen


@triton.jit
def load_block(head, start, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows start .. start + ROWS of one head as a (ROWS, BLOCK_D) tile, zero beyond seqlen and HEAD_DIM.

    A head is (tensor, its strides over batch, seqlen and heads, batch index, head index, seqlen).
    """
    x, stride_b, stride_s, stride_h, b, h, seqlen = head
    row = start + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    base = x + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    tile = base + row[:, None].to(tl.int64) * stride_s + d[None, :]
    if HEAD_DIM < BLOCK_D:
        return tl.load(tile, mask=(row < seqlen)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(tile, mask=(row < seqlen)[:, None], other=0.0)


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
def visible(row, col, shift, seqlen_k, CAUSAL: tl.constexpr):
    """Which keys `col` the queries `row` see; the diagonal is aligned bottom-right by shift = seqlen_k - seqlen_q."""
    seen = col < seqlen_k
    if CAUSAL:
        seen = seen & (col <= row + shift)
    return seen


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, o, o_acc, l, m, lse, score_tensors, seed, scale_log2, score_scale, dropped,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    stride_ab, stride_as, stride_ah,
    seqlen_q, seqlen_k, heads, group, rows_per_program,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
    SCORE_MOD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    ranges = tl.cdiv(seqlen_q, rows_per_program)
    bh = tl.program_id(0) // ranges
    part = tl.program_id(0) - bh * ranges
    if CAUSAL:
        part = ranges - 1 - part  # the range that sees most keys first
    b = bh // heads
    h = bh - b * heads
    h_kv = h // group
    shift = seqlen_k - seqlen_q
    first_row = part * rows_per_program
    last_row = tl.minimum(first_row + rows_per_program, seqlen_q)
    at_head = tl.cast(bh, tl.int64) * seqlen_q
    q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, seqlen_q, ALIGNED)
    k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h_kv, seqlen_k, ALIGNED)
    v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h_kv, seqlen_k, ALIGNED)
    o_head = aligned(o, stride_ob, stride_os, stride_oh, b, h, seqlen_q, ALIGNED)
    o_acc_head = aligned(o_acc, stride_ab, stride_as, stride_ah, b, h, seqlen_q, ALIGNED)

    for start_q in tl.range(first_row, last_row, BLOCK_Q, num_stages=1):  # A1.2
        row = start_q + tl.arange(0, BLOCK_Q)
        zeros = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        store_block(o_acc_head, zeros, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)
        tl.store(l + at_head + row, tl.zeros([BLOCK_Q], tl.float32), mask=row < seqlen_q)
        tl.store(m + at_head + row, tl.full([BLOCK_Q], float("-inf"), tl.float32), mask=row < seqlen_q)

    last_key = seqlen_k
    if CAUSAL:
        last_key = tl.minimum(tl.maximum(last_row + shift, 0), seqlen_k)
    for start_kv in tl.range(0, last_key, BLOCK_KV, num_stages=1):  # A1.5
        # What another thread of this program wrote in the last pass is read in this one.
        tl.debug_barrier()
        k_j = load_block(k_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)  # A1.6
        v_j = load_block(v_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)
        col = start_kv + tl.arange(0, BLOCK_KV)
        first_seeing = first_row
        if CAUSAL:
            first_seeing = tl.maximum(first_row, first_row + (start_kv - shift - first_row) // BLOCK_Q * BLOCK_Q)
        for start_q in tl.range(first_seeing, last_row, BLOCK_Q):  # A1.7
            row = start_q + tl.arange(0, BLOCK_Q)
            at = at_head + row
            q_i = load_block(q_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)  # A1.8
            acc = load_block(o_acc_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)
            l_i = tl.load(l + at, mask=row < seqlen_q, other=0.0)
            m_i = tl.load(m + at, mask=row < seqlen_q, other=float("-inf"))
            s = tl.dot(q_i, k_j.T, input_precision="ieee")  # A1.9
            if SCORE_MOD is not None:
                s = SCORE_MOD(s * score_scale, b, h, row[:, None], col[None, :], score_tensors)
            s *= scale_log2
            s = tl.where(visible(row[:, None], col[None, :], shift, seqlen_k, CAUSAL), s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))  # A1.10, A1.11
            # A row that has seen no key yet keeps m = -inf, and -inf - -inf is NaN:
            # its p and alpha are exp2(-inf - 0) = 0.
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
            l_new = alpha * l_i + tl.sum(p, 1)
            l_safe = tl.where(l_new == 0.0, 1.0, l_new)
            if KEPT is not None:
                p = tl.where(KEPT((seed, dropped, b, h, start_q), start_kv, BLOCK_Q, BLOCK_KV, 0), p, 0.0)
            # A1.12
            acc = tl.dot(p.to(v_j.dtype), v_j, acc * (alpha * l_i)[:, None], input_precision="ieee") / l_safe[:, None]
            store_block(o_acc_head, acc, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)
            tl.store(l + at, l_new, mask=row < seqlen_q)  # A1.13
            tl.store(m + at, m_new, mask=row < seqlen_q)

    tl.debug_barrier()
    for start_q in tl.range(first_row, last_row, BLOCK_Q, num_stages=1):  # A1.16
        row = start_q + tl.arange(0, BLOCK_Q)
        acc = load_block(o_acc_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)
        if KEPT is not None:
            acc /= 1.0 - dropped
        store_block(o_head, acc, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)
        l_i = tl.load(l + at_head + row, mask=row < seqlen_q, other=1.0)
        m_i = tl.load(m + at_head + row, mask=row < seqlen_q, other=0.0)
        lse_i = (m_i + tl.log2(tl.where(l_i == 0.0, 1.0, l_i))) * LN2
        tl.store(lse + at_head + row, lse_i, mask=row < seqlen_q)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    q, k, v, o, do, dq_acc, dk, dv, lse, dlse, score_tensors, seed, scale, scale_log2, score_scale, dropped,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    stride_dob, stride_dos, stride_doh, stride_ab, stride_as, stride_ah,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    seqlen_q, seqlen_k, heads_kv, group,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr, DLSE: tl.constexpr, SERIAL: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_GRADIENT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    # SERIAL: a program walks all blocks of keys of its head, in order, so dQ is summed in one order. Else it has one.
    blocks = tl.cdiv(seqlen_k, BLOCK_KV)
    if SERIAL:
        bh_kv = tl.program_id(0)
        first_block = 0
        last_block = blocks
    else:
        bh_kv = tl.program_id(0) // blocks
        first_block = tl.program_id(0) - bh_kv * blocks
        last_block = first_block + 1
    b = bh_kv // heads_kv
    h_kv = bh_kv - b * heads_kv
    shift = seqlen_k - seqlen_q
    d = tl.arange(0, BLOCK_D)
    k_head = aligned(k, stride_kb, stride_ks, stride_kh, b, h_kv, seqlen_k, ALIGNED)
    v_head = aligned(v, stride_vb, stride_vs, stride_vh, b, h_kv, seqlen_k, ALIGNED)
    dk_head = aligned(dk, stride_dkb, stride_dks, stride_dkh, b, h_kv, seqlen_k, ALIGNED)
    dv_head = aligned(dv, stride_dvb, stride_dvs, stride_dvh, b, h_kv, seqlen_k, ALIGNED)

    for block in tl.range(first_block, last_block, num_stages=1):  # B1.6
        start_kv = block * BLOCK_KV
        col = start_kv + tl.arange(0, BLOCK_KV)
        tl.debug_barrier()
        k_j = load_block(k_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)  # B1.7
        v_j = load_block(v_head, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)
        dk_j = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)  # B1.8
        dv_j = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
        first_seeing = 0
        if CAUSAL:
            first_seeing = tl.maximum(start_kv - shift, 0) // BLOCK_Q * BLOCK_Q
        for member in range(group):
            h = h_kv * group + member
            bh = tl.cast(bh_kv * group + member, tl.int64)
            q_head = aligned(q, stride_qb, stride_qs, stride_qh, b, h, seqlen_q, ALIGNED)
            o_head = aligned(o, stride_ob, stride_os, stride_oh, b, h, seqlen_q, ALIGNED)
            do_head = aligned(do, stride_dob, stride_dos, stride_doh, b, h, seqlen_q, ALIGNED)
            for start_q in tl.range(first_seeing, seqlen_q, BLOCK_Q):  # B1.9
                row = start_q + tl.arange(0, BLOCK_Q)
                at = bh * seqlen_q + row
                q_i = load_block(q_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)  # B1.10
                o_i = load_block(o_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)
                do_i = load_block(do_head, start_q, BLOCK_Q, HEAD_DIM, BLOCK_D)
                lse_i = tl.load(lse + at, mask=row < seqlen_q, other=0.0) * LOG2E
                s = tl.dot(q_i, k_j.T, input_precision="ieee")  # B1.11
                if SCORE_MOD is not None:
                    given = s * score_scale
                    s = SCORE_MOD(given, b, h, row[:, None], col[None, :], score_tensors)
                    # a row of scores of -inf alone: P is 0, and not of -inf - -inf
                    lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)
                s *= scale_log2
                seen = visible(row[:, None], col[None, :], shift, seqlen_k, CAUSAL) & (row < seqlen_q)[:, None]  # B1.12
                p = tl.where(seen, tl.exp2(s - lse_i[:, None]), 0.0)  # B1.13
                p_kept = p
                if KEPT is not None:
                    kept = KEPT((seed, dropped, b, h, start_q), start_kv, BLOCK_Q, BLOCK_KV, 0)  # B1.14
                    p_kept = tl.where(kept, p, 0.0)  # B1.15
                dv_j = tl.dot(p_kept.to(do_i.dtype).T, do_i, dv_j, input_precision="ieee")  # B1.16
                dp = tl.dot(do_i, v_j.T, input_precision="ieee")  # B1.17
                if KEPT is not None:
                    dp = tl.where(kept, dp / (1.0 - dropped), 0.0)  # B1.18
                delta_i = tl.sum(do_i.to(tl.float32) * o_i.to(tl.float32), 1)  # B1.19
                if DLSE:
                    delta_i -= tl.load(dlse + at, mask=row < seqlen_q, other=0.0)
                ds = p * (dp - delta_i[:, None])  # B1.20
                if SCORE_MOD is not None:
                    ds = SCORE_GRADIENT(given, b, h, row[:, None], col[None, :], ds, score_tensors)
                ds = ds.to(q_i.dtype)
                dq_i = tl.dot(ds, k_j, input_precision="ieee") * scale  # B1.21
                dq_base = dq_acc + tl.cast(b, tl.int64) * stride_ab + tl.cast(h, tl.int64) * stride_ah
                rows = dq_base + row[:, None].to(tl.int64) * stride_as + d[None, :]
                mask = (row < seqlen_q)[:, None] & (d < HEAD_DIM)[None, :]
                if SERIAL:
                    tl.store(rows, tl.load(rows, mask=mask, other=0.0) + dq_i, mask=mask)
                else:
                    tl.atomic_add(rows, dq_i, mask=mask, sem="relaxed")
                dk_j = tl.dot(ds.T, q_i, dk_j, input_precision="ieee")  # B1.22
        if KEPT is not None:
            dv_j /= 1.0 - dropped
        store_block(dk_head, dk_j * scale, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)  # B1.24
        store_block(dv_head, dv_j, start_kv, BLOCK_KV, HEAD_DIM, BLOCK_D)
