"""Dropout on the device: the function that a kernel is handed as a constexpr, None where nothing is dropped.

See flashzoo/dropout.py for what the mask is, and why four of its elements lie as they do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flashzoo import dropout
from flashzoo.call import problem
from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem

# A kernel may read no globals other than constexprs.
ROUNDS: tl.constexpr = tl.constexpr(dropout.ROUNDS)
DROPOUT_STEPS: tl.constexpr = tl.constexpr(problem.DROPOUT_STEPS)


@triton.jit
def kept(dropout, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr):
    """Which pairs of a tile are kept, (ROWS, COLUMNS). QUERIES is the dimension that queries are along; keys are along
    the other.

    Args:
        dropout: seed, int64 in memory; the share that is dropped, as `Problem.dropped`; the number of the batch, or of
            a packed sequence; that of the query head; and the first row.
        start: the first column. It, the first row, ROWS and COLUMNS are multiples of 16.
    """
    seed, dropped, b, h, first = dropout
    row = (first // 2 + tl.arange(0, ROWS // 2))[:, None]
    column = (start // 2 + tl.arange(0, COLUMNS // 2))[None, :]
    if QUERIES == 0:
        here, right, below, across = tl.philox(tl.load(seed), column, row, h, b, ROUNDS)
    else:
        here, below, right, across = tl.philox(tl.load(seed), row, column, h, b, ROUNDS)
    words = tl.join(tl.join(here, below), tl.join(right, across)).reshape(ROWS // 16, 8, COLUMNS // 16, 8, 2, 2)
    words = words.permute(0, 4, 1, 2, 5, 3).reshape(ROWS, COLUMNS)
    return (words >> 8).to(tl.int32) >= tl.cast(dropped * DROPOUT_STEPS, tl.int32)


def kept_of(problem: Problem) -> Any:
    """The constexpr of a problem's kernels."""
    return kept if problem.dropout_p else None


def share_of(problem: Problem) -> float | None:
    """Their parameter `dropped`."""
    return problem.dropped if problem.dropout_p else None


def seed_of(operands: Operands, problem: Problem) -> Tensor | None:
    """Their seed."""
    return operands.dropout_seed if problem.dropout_p else None  # pyright: ignore[reportReturnType] - see `seeded`
