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


def tiles_of(problem: Problem, operands: Operands, block_q: int, block_kv: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """The table for blocks of queries, and the one for blocks of keys, None where block_kv is 0: int32 `(blocks, COLUMNS)`, by one kernel.
    None where nothing is packed."""
    ranges = operands.ranges
    if ranges is None:
        return None, None
    device = ranges.cu_seqlens_q.device
    tiles = torch.empty((problem.entries(problem.seqlen_q, block_q), COLUMNS.value), dtype=torch.int32, device=device)
    of_keys = None
    if block_kv:
        of_keys = torch.empty((problem.entries(problem.seqlen_k, block_kv), COLUMNS.value), dtype=torch.int32, device=device)
    used = ranges.cu_seqlens_k if ranges.seqused_k is None else ranges.seqused_k
    _launch(problem, block_q, block_kv)((ranges.cu_seqlens_q, ranges.cu_seqlens_k, used, tiles, of_keys), ())
    return tiles, of_keys


@lru_cache(maxsize=1024)
def _launch(problem: Problem, block_q: int, block_kv: int) -> Launch:
    p = problem
    assert p.sequences is not None
    programs = cdiv(p.entries(p.seqlen_q, block_q), SLOTS)
    of_keys = cdiv(p.entries(p.seqlen_k, block_kv), SLOTS) if block_kv else 0
    constexprs = {"BLOCK_Q": block_q, "BLOCK_KV": block_kv, "USED": p.used_k, "RIGHT": p.span[1] is not None}
    return Launch(
        tiles_kernel,
        programs + of_keys,
        (p.sequences, p.seqlen_q, p.seqlen_k, programs),
        {**constexprs, "SLOTS": SLOTS, "CHUNK": CHUNK},
        num_warps=4,
        num_stages=1,
    )
