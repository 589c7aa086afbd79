"""New rows written into caches of keys and values, behind what is used of them.

A program has one new row of one sequence, of all heads. Its place is row `used + i`: of the sequence's own cache, or,
in pages of PAGE rows, row `(used + i) % PAGE` of the page whose number the table has at `(used + i) // PAGE`. Where
there is no such row or page nothing is written: cut off, it would be another's.
"""

import triton
import triton.language as tl


@triton.jit
def write(cache, place, new, heads, strides, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The new row of so many heads to its place."""
    h = tl.arange(0, HEADS).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = (h < heads)[:, None] & (d < HEAD_DIM)[None, :]
    row = tl.load(new + h[:, None] * strides[1] + d[None, :], mask=inside)
    tl.store(cache + place + h[:, None] * strides[0] + d[None, :], row, mask=inside)


@triton.jit(do_not_specialize=["capacity", "pages", "stride_table", "new_rows", "heads"])
def append_kernel(
    k_cache, v_cache, k, v, used_k, page_table,
    stride_kcb, stride_kcs, stride_kch, stride_vcb, stride_vcs, stride_vch,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    capacity, pages, stride_table, new_rows, heads,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """The i-th new row of the b-th sequence."""
    b = tl.program_id(0) // new_rows
    i = tl.program_id(0) - b * new_rows
    row = tl.load(used_k + b).to(tl.int64) + i
    there = (row >= 0) & (row < capacity)
    batch = b.to(tl.int64)
    if PAGE:
        page = tl.load(page_table + batch * stride_table + row // PAGE, mask=there, other=-1).to(tl.int64)
        there = there & (page >= 0) & (page < pages)
        first, row = page, row % PAGE
    else:
        first = batch
    heads = tl.where(there, heads, 0)
    k_new = k + batch * stride_kb + i.to(tl.int64) * stride_ks
    v_new = v + batch * stride_vb + i.to(tl.int64) * stride_vs
    write(
        k_cache, first * stride_kcb + row * stride_kcs, k_new, heads, (stride_kch, stride_kh), HEADS, HEAD_DIM, BLOCK_D
    )
    write(
        v_cache,
        first * stride_vcb + row * stride_vcs,
        v_new,
        heads,
        (stride_vch, stride_vh),
        HEADS,
        HEAD_DIM_V,
        BLOCK_DV,
    )
