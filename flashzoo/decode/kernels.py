"""FlashDecoding (Dao, Haziza, Massa and Sizov 2023) on the device:
attention of few queries to many keys, split over the keys.

The lines A1.n in comments are the three steps of that text.

1. `split_kernel`: a program has a tile of rows and a split of the keys. The rows are the queries of all query heads
   that share a key/value head, side by side, so that keys and values are read once for all of them: row r is query
   r // group of head r % group.
2. It walks the split's blocks as FA-2 does (flashzoo/v2), with a row's maximum, l and unnormalised O on chip, and
   leaves O / l in float32 and the LSE of the split. A split in which its rows see no key leaves an LSE of -inf, and no
   O.
3. `merge_kernel`: out = sum of exp(LSE_split - LSE) O_split, with LSE = log of the sum of exp(LSE_split). The order
   follows from the number of splits, and where they begin does not depend on what other caches hold: the bits are the
   same in every run, and beside any others.

Keys and values may lie in pages (PAGE rows each, 0 where they don't): key j of a sequence is row j % PAGE of the page
whose number is the (j // PAGE)-th of the sequence's in the table.

They may be e4m3 beside a 16-bit q: a block of them is made 16 bits on chip, which hold every e4m3 number, and products
are multiplied by the descales of the block's rows.

Values may be the first HEAD_DIM columns of keys, as in MLA: then a block is loaded once, and scores are the sum of
those columns' products and of the REST's, in tiles of their own (REST is 0 where values have columns of their own).

Packed queries on caches share a batch of one. Which rows of which sequence a tile has is in a table that another kernel
makes on the device (flashzoo/_triton/packed_kernels.py), the sequences with the most keys first; a tile that has none
ends at once.

Where there is one split it writes out itself. Sinks, of each head one more logit in the softmax, join where out is
written. Scores are in log2 units: exp2 with softmax_scale * log2(e) folded in.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
DESCALE_BLOCK: tl.constexpr = tl.constexpr(128)  # rows that share a number of a descale; whole blocks of keys

# One compiled kernel for every length, batch and number of heads.
SIZES = [
    "stride_table",
    "pages",
    "seqlen_q",
    "seqlen_k",
    "heads",
    "heads_kv",
    "blocks",
    "split",
    "splits",
    "window_left",
    "window_right",
]


@triton.jit
def places(table, pages, key, end, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Page and row of keys, -1 for a number of no page; where there are no pages what is before the keys is in the
    head's address, and the row is the key."""
    if PAGE:
        page = tl.load(table + key // PAGE, mask=key < end, other=-1) if MASKED else tl.load(table + key // PAGE)
        return tl.where(page < pages, page, -1).to(tl.int64), (key % PAGE).to(tl.int64)
    else:
        return tl.zeros_like(key).to(tl.int64), key.to(tl.int64)


@triton.jit
def load_keys(
    head,
    strides,
    place,
    key,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys, or values, as a (keys, BLOCK_D) tile; zero where there is no page, and, MASKED, from `end` on: what lies
    there may be no number."""
    d = tl.arange(0, BLOCK_D)
    row = place[1] * strides[1]
    if PAGE:
        row += place[0] * strides[0]
    at = head + row[:, None] + d[None, :]
    if MASKED:
        inside = (place[0] >= 0) & (key < end)
        return tl.load(at, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif PAGE:
        return tl.load(at, mask=(place[0] >= 0)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def of_head(descale, b, h):
    """A head's numbers of a descale and their stride, from the numbers and their strides."""
    return descale[0] + b * descale[1] + tl.cast(h, tl.int64) * descale[2], descale[3]


@triton.jit
def descaled(x, descale, start):
    """x times a head's number for the rows from `start` on."""
    if descale is None:
        return x
    else:
        return x * tl.load(descale[0] + start // DESCALE_BLOCK * descale[1])


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Keys or values in q's dtype, which holds them: e4m3 by way of float32 to bf16, as Hopper converts fp16 to bf16
    at the rate of exponentials."""
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return x.to(tl.float32).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def packed_tile(tiles, at):
    """What the table says of a tile: its sequence, which tile of it this is, first row and rows of the sequence's
    queries, and how many keys it uses. The rows before all sequences are of number -1, those behind of the one past the
    last, and use none."""
    entry = tiles + at * 8
    return tl.load(entry + 6) - 1, tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 4)


@triton.jit
def attend(
    state, q_i, q_rest, keys, descales, first, last, end, diagonal, scale_log2, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_KV: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys first .. last into the state: acc, l_i and m_i."""
    acc, l_i, m_i = state
    k_head, k_strides, v_head, v_strides, table, pages = keys
    for start in tl.range(first, last, BLOCK_KV):
        key = start + tl.arange(0, BLOCK_KV)
        place = places(table, pages, key, end, PAGE, MASKED)
        k_j = load_keys(k_head, k_strides, place, key, end, HEAD_DIM, BLOCK_D, PAGE, MASKED)
        s = tl.dot(q_i, widened(k_j, q_i.dtype).T, input_precision="ieee")
        if REST:
            k_rest = load_keys(k_head + HEAD_DIM, k_strides, place, key, end, REST, BLOCK_REST, PAGE, MASKED)
            s = tl.dot(q_rest, k_rest.T, s, input_precision="ieee")
        s = s * descaled(scale_log2, descales[0], start)
        if MASKED:
            offset = key[None, :] - diagonal[:, None]
            seen = (key < end)[None, :] & (offset <= window_right) & (offset >= -window_left)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        # A row that has seen no key yet keeps m = -inf, and -inf - -inf is NaN: its p and alpha are exp2(-inf - 0) = 0.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_j = k_j if REST else load_keys(v_head, v_strides, place, key, end, HEAD_DIM, BLOCK_D, PAGE, MASKED)
        if descales[1] is None:
            acc = tl.dot(p.to(q_i.dtype), widened(v_j, q_i.dtype), acc * alpha[:, None], input_precision="ieee")
        else:
            o_j = tl.dot(p.to(q_i.dtype), widened(v_j, q_i.dtype))
            acc = acc * alpha[:, None] + descaled(o_j, descales[1], start)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
    q, k, v, out, lse, used_k, page_table, sinks, k_descale, v_descale, tiles, scale_log2,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh, stride_op, stride_lp,
    stride_table, pages, seqlen_q, seqlen_k, heads, heads_kv, blocks, split, splits, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_KV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CACHE: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out and lse are those of all splits; programs of a split's tiles run together, then those of a head's splits:
    what they read is in L2."""
    program = tl.program_id(0)
    if tiles is None:
        block = program % blocks
        part = program // blocks % splits
        bh = program // blocks // splits
        b = bh // heads_kv
        h_kv = bh - b * heads_kv
        rows_q = seqlen_q
    else:
        h_kv = program % heads_kv
        part = program // heads_kv % splits
        b, block, first_row, rows, used = packed_tile(tiles, program // heads_kv // splits)
        if block * ROWS >= rows:
            return
        rows_q = rows // (heads // heads_kv)
    group = heads // heads_kv
    row = block * ROWS + tl.arange(0, ROWS)
    position = row // group
    h = h_kv * group + row - position * group
    there = position < rows_q
    d = tl.arange(0, BLOCK_D)
    b_64 = tl.cast(b, tl.int64)

    # Where the queries are: in the batch's b_q-th, of its rows `at`.
    if tiles is None:
        b_q, at = b_64, position
        used = seqlen_k
        if CACHE:
            used = tl.minimum(tl.maximum(tl.load(used_k + b), 0), seqlen_k)
    else:
        b_q, at = tl.full([], 0, tl.int64), first_row // group + position
    # The keys that the tile's rows see: from `first`, where a block begins, to `end`.
    first, end, whole = 0, used, used
    if LEFT:
        first = tl.maximum(block * ROWS // group + used - rows_q - window_left, 0) // BLOCK_KV * BLOCK_KV
    if RIGHT:
        last_position = tl.minimum((block * ROWS + ROWS - 1) // group, rows_q - 1)
        end = tl.minimum(tl.maximum(last_position + used - rows_q + window_right + 1, 0), used)
        whole = tl.minimum(tl.maximum(block * ROWS // group + used - rows_q + window_right + 1, 0), used)
    first += part * split  # A1.1
    end = tl.minimum(end, first + split)
    # blocks before it are seen whole by every row
    whole = tl.maximum(tl.minimum(whole, end) // BLOCK_KV * BLOCK_KV, first)

    of_row = b_q * stride_qb + at.to(tl.int64) * stride_qs + h.to(tl.int64) * stride_qh
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    q_i, q_rest = tl.load(q + of_row[:, None] + d[None, :], mask=inside, other=0.0), None
    if REST:
        d_rest = tl.arange(0, BLOCK_REST)
        in_rest = there[:, None] & (d_rest < REST)[None, :]
        q_rest = tl.load(q + HEAD_DIM + of_row[:, None] + d_rest[None, :], mask=in_rest, other=0.0)
    k_head = k + tl.cast(h_kv, tl.int64) * stride_kh
    v_head = v + tl.cast(h_kv, tl.int64) * stride_vh
    if PAGE:
        table = page_table + b_64 * stride_table
    else:
        table = k  # which nobody looks at
        k_head += b_64 * stride_kb
        v_head += b_64 * stride_vb
    # A1.2
    state = (
        tl.zeros([ROWS, BLOCK_D], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
    )
    keys = (k_head, (stride_kb, stride_ks), v_head, (stride_vb, stride_vs), table, pages)
    if k_descale is not None:
        k_descale = of_head(k_descale, b_64, h_kv)
    if v_descale is not None:
        v_descale = of_head(v_descale, b_64, h_kv)
    descales = (k_descale, v_descale)
    diagonal = position + used - rows_q
    if LEFT:
        whole = first
    else:
        state = attend(
            state, q_i, q_rest, keys, descales, first, whole, end, diagonal, scale_log2, window_left, window_right,
            HEAD_DIM, BLOCK_D, REST, BLOCK_REST, BLOCK_KV, PAGE, False,
        )  # fmt: skip
    acc, l_i, m_i = attend(
        state, q_i, q_rest, keys, descales, whole, end, end, diagonal, scale_log2, window_left, window_right,
        HEAD_DIM, BLOCK_D, REST, BLOCK_REST, BLOCK_KV, PAGE, True,
    )  # fmt: skip

    if sinks is not None:  # one more key, seen by every row, whose value is 0
        sink = tl.load(sinks + h, mask=there, other=float("-inf")) * LOG2E
        m_new = tl.maximum(m_i, sink)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.exp2(sink - m_safe)
        acc = acc * alpha[:, None]
        m_i = m_new
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that saw no key: O = 0, LSE = -inf
    lse_i = (m_i + tl.log2(l_safe)) * LN2
    part_64 = tl.cast(part, tl.int64)
    tl.store(lse + part_64 * stride_lp + (b_q * heads + h) * seqlen_q + at, lse_i, mask=there)
    of_row = part_64 * stride_op + b_q * stride_ob + at.to(tl.int64) * stride_os + h.to(tl.int64) * stride_oh
    if PARTS:  # nobody reads what saw nothing
        inside = inside & (l_i > 0)[:, None]
    tl.store(out + of_row[:, None] + d[None, :], (acc / l_safe[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "seqlen_q", "heads", "splits"])
def merge_kernel(
    parts, lse_parts, out, lse, sinks,
    stride_ob, stride_os, stride_oh,
    rows, seqlen_q, heads, splits,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, LSES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """COLUMNS of ROWS queries of heads, one behind another as they are in lse. `parts` are
    (splits, batch, seqlen_q, heads, HEAD_DIM), `lse_parts` (splits, batch, heads, seqlen_q); a split has `rows` rows.
    SPLITS of them are looked at in one step, and LSES of their LSE for the largest."""
    if PROGRAMMATIC:  # until the kernel that writes the parts has ended
        gdc_wait()
    CHUNKS: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = program // CHUNKS * ROWS + tl.arange(0, ROWS)
    d = program % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    bh = row // seqlen_q
    position = row - bh * seqlen_q
    b = bh // heads
    h = bh - b * heads
    at = ((b * seqlen_q + position) * heads + h).to(tl.int64) * HEAD_DIM
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:  # one more split, whose O is 0
        sink = tl.load(sinks + h, mask=there, other=float("-inf"))
    m = sink
    for start in tl.range(0, splits, LSES):
        part = (start + tl.arange(0, LSES)).to(tl.int64)[:, None]
        seen = tl.load(
            lse_parts + part * rows + row[None, :], mask=(part < splits) & there[None, :], other=float("-inf")
        )
        m = tl.maximum(m, tl.max(seen, 0))
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    # Of each of SPLITS that are looked at together: what is summed over warps is summed once, at the end.
    total = tl.zeros([SPLITS, ROWS], tl.float32)
    acc = tl.zeros([SPLITS, ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, splits, SPLITS):
        part = (start + tl.arange(0, SPLITS)).to(tl.int64)[:, None]
        seen = tl.load(
            lse_parts + part * rows + row[None, :], mask=(part < splits) & there[None, :], other=float("-inf")
        )
        weight = tl.exp(seen - m_safe[None, :])
        of_part = parts + (part * rows * HEAD_DIM + at[None, :])[:, :, None] + d[None, None, :]
        # What saw nothing has left no O.
        o = tl.load(of_part, mask=(weight > 0)[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0)
        acc += o * weight[:, :, None]
        total += weight
    l_i = tl.sum(total, 0) + tl.exp(sink - m_safe)
    safe = tl.where(l_i == 0.0, 1.0, l_i)  # A1.3
    place = b.to(tl.int64) * stride_ob + position.to(tl.int64) * stride_os + h.to(tl.int64) * stride_oh
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    merged = tl.sum(acc, 0) / safe[:, None]
    tl.store(out + place[:, None] + d[None, :], merged.to(out.dtype.element_ty), mask=inside)
    if program % CHUNKS == 0:
        tl.store(lse + row, m + tl.log(safe), mask=there)
