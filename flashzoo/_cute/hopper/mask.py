"""Masking scores on the registers of one thread."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from flashzoo._cute.hopper.bounds import ThreadBounds
from flashzoo._cute.hopper.wgmma import rows_of


@dataclass(frozen=True)
class Mask:
    """What a thread's part of a block of scores is masked by.

    Attributes:
        bounds: of its two rows, the first visible key and one past the last, counted from its first column.
        left, right: whether to look at that bound.
    """

    bounds: ThreadBounds
    left: Constexpr[bool]
    right: Constexpr[bool]

    def apply(self, s: cute.Tensor, first_key: Int32) -> None:
        """Set what is not seen to -inf."""
        mask_scores(s, self.bounds, first_key, self.left, self.right)


@cute.jit
def mask_scores(s: cute.Tensor, bounds: ThreadBounds, first_key: Int32, left: Constexpr[bool], right: Constexpr[bool]):
    """Set the scores outside of their rows' bounds to -inf.

    Args:
        s: a block of scores, as a WGMMA result.
        bounds: of the thread's two rows, the first visible key and one past the last, counted from its first column.
        first_key: of the block.
        left, right: whether to look at that bound.
    """
    rows = rows_of(s)
    for r in cutlass.range_constexpr(2):
        lowest, highest = bounds[r][0] - first_key, bounds[r][1] - first_key
        for i in cutlass.range_constexpr(cute.size(s) // 4):
            for c in cutlass.range_constexpr(2):
                if const_expr(right):
                    rows[c, r, i] = rows[c, r, i] if 8 * i + c < highest else -Float32.inf
                if const_expr(left):
                    rows[c, r, i] = rows[c, r, i] if 8 * i + c >= lowest else -Float32.inf
