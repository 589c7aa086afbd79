"""The table of packed sequences' blocks on the host: how many entries, and its launch. See packed_kernels.py."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flashzoo._triton.launch import Launch
from flashzoo._triton.packed_kernels import COLUMNS, tiles_kernel
from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem
from flashzoo.integers import cdiv

SLOTS, CHUNK = 32, 64
"""Slots of a program, and sequences that it looks at in one step."""


def blocks(problem: Problem, rows: int, block: int) -> int:
    """Programs of a head, one for each block of so many rows: of packed sequences as many as the table has entries, some of no block."""
    if problem.sequences is None:
        return problem.batch * cdiv(rows, block)
    return problem.entries(rows, block)


def tiles_of(problem: Problem, operands: Operands, block: int, of_keys: bool = False) -> Tensor | None:
    """The table for blocks of queries, or of keys: int32 `(blocks, COLUMNS)`; None where nothing is packed."""
    ranges = operands.ranges
    if ranges is None:
        return None
    rows = problem.seqlen_k if of_keys else problem.seqlen_q
    tiles = torch.empty((blocks(problem, rows, block), COLUMNS.value), dtype=torch.int32, device=ranges.cu_seqlens_q.device)
    used = ranges.cu_seqlens_k if ranges.seqused_k is None else ranges.seqused_k
    _launch(problem, block, of_keys)((ranges.cu_seqlens_q, ranges.cu_seqlens_k, used, tiles), ())
    return tiles


@lru_cache(maxsize=1024)
def _launch(problem: Problem, block: int, of_keys: bool) -> Launch:
    assert problem.sequences is not None
    rows = problem.seqlen_k if of_keys else problem.seqlen_q
    constexprs = {"BLOCK": block, "OF_KEYS": of_keys, "USED": problem.used_k, "RIGHT": problem.span[1] is not None}
    return Launch(
        tiles_kernel,
        cdiv(blocks(problem, rows, block), SLOTS),
        (problem.sequences, problem.seqlen_q, problem.seqlen_k),
        {**constexprs, "SLOTS": SLOTS, "CHUNK": CHUNK},
        num_warps=4,
        num_stages=1,
    )
