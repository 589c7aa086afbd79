"""Functions on scores in the backward pass, whose rows of scores are keys and whose columns are queries.

S is made anew and given to the function as in the forward pass: P = exp(f(S) - LSE) and dS = P f'(S) (dP - delta). What
adds to scores has a derivative of 1, and all that differs is S. Of others P and dS are made together, as there is no
room for a slope of each score until dP is there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from flashzoo._cute.hopper.bounds import BoundsBackward, ThreadBounds
from flashzoo._cute.hopper.mask import mask_scores
from flashzoo._cute.hopper.scores import NOTHING_KNOWN, Scores, Told, modify
from flashzoo._cute.hopper.wgmma import rows_of


def told_of_keys(
    scores: Scores | None, bounds: BoundsBackward, key: Int32, scale: Float32, tensors: Any
) -> Told | None:
    """What a function is told of keys `key` and `key + 8`; of one past the last key that of the last."""
    if scores is None:
        return None
    last, any_head = bounds.sequence.seqlen_k - 1, (Int32(0), Int32(0))
    keys = cutlass.min(key, last), cutlass.min(key + 8, last)
    return scores.know(Told(tensors, scale, bounds.number_of_sequence(), any_head, keys, NOTHING_KNOWN), "bk")


def told_of_head(scores: Scores | None, told: Told | None, head: Int32) -> Told | None:
    """The same of one query head."""
    return None if scores is None or told is None else scores.know(replace(told, h=(head, head)), "bh")


@cute.jit
def modify_block(
    scores: Constexpr[Scores],
    bounds: BoundsBackward,
    n: Int32,
    first: Constexpr[int],
    s: cute.Tensor,
    told: Told,
    of_thread: ThreadBounds,
    column: Int32,
    crosses: Boolean,
):
    """Put new scores in the place of the products of the tile's n-th block of queries, and -inf where nothing is seen.

    Args:
        first: of the block's queries, that s begins with.
        of_thread: the queries that see the thread's keys.
        column: the first of a block's queries that this thread has.
        crosses: some queries of the block don't see some keys.
    """
    first_query = n * bounds.params.kernel.tiles.block_q + first
    if crosses or at_the_end(bounds, first_query):
        modify(scores, told, s, first_query + column, True)
        mask_scores(s, of_queries(bounds, of_thread, column), first_query, True, True)
    else:
        modify(scores, told, s, first_query + column, False)


@cute.jit
def differentiate(
    scores: Constexpr[Scores],
    bounds: BoundsBackward,
    n: Int32,
    first: Constexpr[int],
    s: cute.Tensor,
    dp: cute.Tensor | None,
    lse: cute.Tensor,
    delta: cute.Tensor | None,
    p: cute.Tensor,
    ds: cute.Tensor | None,
    told: Told,
    of_thread: ThreadBounds,
    column: Int32,
    crosses: Boolean,
):
    """P and dS, rounded, of the products s of the tile's n-th block and of dP; without dP s becomes P f'(S)."""
    first_query = n * bounds.params.kernel.tiles.block_q + first
    if crosses or at_the_end(bounds, first_query):
        seen = of_queries(bounds, of_thread, column)
        differentiate_block(scores, s, dp, lse, delta, p, ds, told, seen, first_query, column, True)
    else:
        differentiate_block(scores, s, dp, lse, delta, p, ds, told, of_thread, first_query, column, False)


@cute.jit
def differentiate_block(
    scores: Constexpr[Scores],
    s: cute.Tensor,
    dp: cute.Tensor | None,
    lse: cute.Tensor,
    delta: cute.Tensor | None,
    p: cute.Tensor,
    ds: cute.Tensor | None,
    told: Told,
    of_thread: ThreadBounds,
    first_query: Int32,
    column: Int32,
    edge: Constexpr[bool],
):
    """The same, with a mask where the block is at an edge."""
    walk, scale_log2 = scores.at(told, s, first_query + column, edge), scores.scale_log2(told.scale)
    rows, p_rows = rows_of(s), rows_of(p)
    of_p, of_ds = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    for i in cutlass.range_constexpr(cute.size(s) // 4):
        pair_of_lse = lse[None, i].load()
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(2):
                new, slope = walk.outputs(r, 8 * i + c)
                if const_expr(edge):
                    query = first_query + (8 * i + c)
                    seen = query >= of_thread[r][0] and query < of_thread[r][1]
                    new, slope = (new if seen else -Float32.inf), (slope if seen else Float32(0.0))
                of_p[c] = cute.math.exp2(new * scale_log2 - pair_of_lse[c], fastmath=True)  # B2.11
                of_ds[c] = of_p[c] * slope
                if const_expr(not scores.bounded):
                    of_ds[c] = of_ds[c] if of_p[c] != 0.0 else Float32(0.0)
                if const_expr(dp is not None):
                    of_ds[c] = of_ds[c] * (rows_of(dp)[c, r, i] - delta[None, i].load()[c])  # B2.14
                rows[c, r, i] = of_ds[c]
            p_rows[None, r, i].store(of_p.load().to(p.element_type))
            if const_expr(ds is not None):
                rows_of(ds)[None, r, i].store(of_ds.load().to(ds.element_type))


def at_the_end(bounds: BoundsBackward, first_query: Int32) -> Boolean:
    """Whether some of the queries whose scores a warpgroup has at a time are past the last."""
    return first_query + bounds.params.kernel.tiles.queries_at_once > bounds.sequence.seqlen_q


def of_queries(bounds: BoundsBackward, of_thread: ThreadBounds, column: Int32) -> ThreadBounds:
    """The bounds of a thread, with the last query: past it a function may give anything, whatever LSE is."""
    end = bounds.sequence.seqlen_q - column
    return tuple([(lowest, cutlass.min(highest, end)) for lowest, highest in of_thread])
