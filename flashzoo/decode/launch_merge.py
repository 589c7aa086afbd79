"""The kernel that merges splits, on the host: for `split_kernel`, and for Hopper's where parts are left to it."""

from __future__ import annotations

from functools import lru_cache

from flashzoo._triton import Launch
from flashzoo.call.problem import Problem
from flashzoo.decode import kernels
from flashzoo.decode.config import MERGED_COLUMNS, tiles_for
from flashzoo.gpu import multiprocessors_of
from flashzoo.integers import cdiv, next_power_of_2

NUMBERS = 4096
"""Of its splits, that a program of `merge_kernel` looks at in one step: as many as its registers hold."""
PROGRAMS = 16
"""For each multiprocessor, above which programs have more columns: MLA's 128 heads of 8 sequences take an H200 25 us in
all, and with four times as many programs 37."""
LSES = 256
"""Splits whose LSE it looks at in one step."""


@lru_cache(maxsize=1024)
def merge_launch(problem: Problem, strides: tuple[int, ...], splits: int, programmatic: bool = False) -> Launch:
    """The launch of `merge_kernel`; strides of out, and `programmatic` as in `Launch`."""
    p, merged = problem, tiles_for(problem).merged
    rows = p.batch * p.heads * p.seqlen_q
    columns = columns_for(cdiv(rows, merged), p)
    return Launch(
        kernels.merge_kernel,
        cdiv(rows, merged) * cdiv(p.head_dim_v, columns),
        (*strides, rows, p.seqlen_q, p.heads, splits),
        {
            "HEAD_DIM": p.head_dim_v,
            "COLUMNS": columns,
            "ROWS": merged,
            "SPLITS": min(NUMBERS // columns, next_power_of_2(splits)),
            "LSES": LSES,
            "PROGRAMMATIC": programmatic,
        },
        num_warps=4,
        num_stages=1,
        programmatic=programmatic,
    )


def columns_for(rows: int, problem: Problem) -> int:
    """Columns of a program that has one of so many rows, or groups of rows: few, for programs enough; of many rows
    more, since a program that waits for a place begins to read when others end."""
    most = PROGRAMS * multiprocessors_of(problem.arch)
    columns = MERGED_COLUMNS
    while columns < problem.head_dim_v and rows * cdiv(problem.head_dim_v, columns) > most:
        columns *= 2
    return columns
