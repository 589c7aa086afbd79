"""What Hopper's kernels multiply scores by."""

from __future__ import annotations

from flashzoo.call.problem import LOG2E

SMALLEST_SCALE = 1e-30
"""A scale of 0 makes all scores equal. So does this one, and -inf times it stays -inf."""


def in_log2(softmax_scale: float) -> float:
    """A scale of scores in log2 units."""
    return max(softmax_scale * LOG2E, SMALLEST_SCALE)
