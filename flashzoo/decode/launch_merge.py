"""The kernel that merges splits, on the host: for `split_kernel`, and for Hopper's where parts are left to it."""

from __future__ import annotations

from functools import lru_cache

from flashzoo._triton import Launch
from flashzoo.call.problem import Problem
from flashzoo.decode import kernels
from flashzoo.decode.config import MERGED_COLUMNS, tiles_for
from flashzoo.integers import cdiv, next_power_of_2

AT_ONCE = 64
"""Splits of a row that a program of `merge_kernel` looks at in one step, at most."""
LSES = 256
"""Splits whose LSE it looks at in one step."""


@lru_cache(maxsize=1024)
def merge_launch(problem: Problem, strides: tuple[int, ...], splits: int, programmatic: bool = False) -> Launch:
    """The launch of `merge_kernel`; strides of out, and `programmatic` as in `Launch`."""
    p, merged = problem, tiles_for(problem).merged
    rows = p.batch * p.heads * p.seqlen_q
    return Launch(
        kernels.merge_kernel,
        cdiv(rows, merged) * cdiv(p.head_dim_v, MERGED_COLUMNS),
        (*strides, rows, p.seqlen_q, p.heads, splits),
        {
            "HEAD_DIM": p.head_dim_v,
            "COLUMNS": MERGED_COLUMNS,
            "ROWS": merged,
            "SPLITS": min(AT_ONCE, next_power_of_2(splits)),
            "LSES": LSES,
            "PROGRAMMATIC": programmatic,
        },
        num_warps=4,
        num_stages=1,
        programmatic=programmatic,
    )
