"""Two partial results joined into one, each read once and the result written once.

A program has one row of one batch, of all heads. With m the larger of a head's two LSEs,

    w_i = exp(lse_i - m)    out = sum_i out_i w_i / (w_1 + w_2)    lse = m + log(w_1 + w_2)

in float32, rounded where it is stored. Where neither part sees a key, both are -inf: out is 0, and lse -inf.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "heads"])
def merge_kernel(
    out_1, out_2, lse_1, lse_2, out, lse,
    stride_1b, stride_1s, stride_1h, stride_2b, stride_2s, stride_2h,
    stride_l1b, stride_l1h, stride_l1s, stride_l2b, stride_l2h, stride_l2s,
    rows, heads,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The i-th row of the b-th batch; out and lse have no gaps."""
    b = (tl.program_id(0) // rows).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) - b * rows
    h = tl.arange(0, HEADS).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    real = h < heads
    inside = real[:, None] & (d < HEAD_DIM)[None, :]

    l_1 = tl.load(lse_1 + b * stride_l1b + i * stride_l1s + h * stride_l1h, mask=real, other=0)
    l_2 = tl.load(lse_2 + b * stride_l2b + i * stride_l2s + h * stride_l2h, mask=real, other=0)
    m = tl.maximum(l_1, l_2)
    m = tl.where(m == float("-inf"), 0.0, m)
    w_1, w_2 = tl.exp(l_1 - m), tl.exp(l_2 - m)
    total = w_1 + w_2
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    l = tl.where(blind, float("-inf"), m + tl.log(total))
    tl.store(lse + (b * heads + h) * rows + i, l, mask=real)

    at_1 = out_1 + b * stride_1b + i * stride_1s + h[:, None] * stride_1h + d[None, :]
    at_2 = out_2 + b * stride_2b + i * stride_2s + h[:, None] * stride_2h + d[None, :]
    o_1 = tl.load(at_1, mask=inside, other=0).to(tl.float32)
    o_2 = tl.load(at_2, mask=inside, other=0).to(tl.float32)
    o = o_1 * (w_1 / total)[:, None] + o_2 * (w_2 / total)[:, None]
    at = out + ((b * rows + i) * heads + h[:, None]) * HEAD_DIM + d[None, :]
    tl.store(at, o.to(out.dtype.element_ty), mask=inside)
