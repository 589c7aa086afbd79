"""New rows written into caches of keys and values, behind what is used of them.

A program has one new row of one sequence, of all heads. Its place is row `used + i`: of the sequence's own cache, or,
in pages of PAGE rows, row `(used + i) % PAGE` of the page whose number the table has at `(used + i) // PAGE`. Where
there is no such row or page nothing is written: cut off, it would be another's.

Numbers of the cache's own dtype are copied as bits. Others are divided by the descale of their row and rounded to e4m3.
"""

import triton
import triton.language as tl

from flashzoo._triton.e4m3 import e4m3_bits

DESCALE_BLOCK: tl.constexpr = tl.constexpr(128)  # rows of a cache that share a number of a descale


@triton.jit
def write(
    cache, place, new, descale, heads, strides, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The new row of so many heads to its place; descale: where the row's first number is, and the stride of heads."""
    h = tl.arange(0, HEADS).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = (h < heads)[:, None] & (d < HEAD_DIM)[None, :]
    row = tl.load(new + h[:, None] * strides[1] + d[None, :], mask=inside)
    if new.dtype.element_ty.is_floating():
        row = row.to(tl.float32)
        if descale is not None:
            row = tl.div_rn(row, tl.load(descale[0] + h * descale[1], mask=h < heads, other=1.0)[:, None])
        row = e4m3_bits(row)
    tl.store(cache + place + h[:, None] * strides[0] + d[None, :], row, mask=inside)


@triton.jit
def of_row(descale, b, row):
    """Where the numbers of a sequence's row begin, and the stride of heads."""
    return descale[0] + b * descale[1] + row // DESCALE_BLOCK * descale[3], descale[2]


@triton.jit(do_not_specialize=["capacity", "pages", "stride_table", "new_rows", "heads"])
def append_kernel(
    k_cache, v_cache, k, v, used_k, page_table, k_descale, v_descale,
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
    if k_descale is not None:
        k_descale = of_row(k_descale, batch, row)
    if v_descale is not None:
        v_descale = of_row(v_descale, batch, row)
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
        k_cache,
        first * stride_kcb + row * stride_kcs,
        k_new,
        k_descale,
        heads,
        (stride_kch, stride_kh),
        HEADS,
        HEAD_DIM,
        BLOCK_D,
    )
    write(
        v_cache,
        first * stride_vcb + row * stride_vcs,
        v_new,
        v_descale,
        heads,
        (stride_vch, stride_vh),
        HEADS,
        HEAD_DIM_V,
        BLOCK_DV,
    )
