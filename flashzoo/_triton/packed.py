"""The table of packed sequences' blocks on the host: how many entries, and its launch. See packed_kernels.py."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from flashzoo._triton.launch import Launch
from flashzoo._triton.packed_kernels import COLUMNS, tiles_kernel
from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem
from flashzoo.integers import cdiv

SLOTS, CHUNK = 32, 64
"""Slots of a program, and sequences that it looks at in one step."""
SLOTS_INTERPRETED = 256
"""The same where the interpreter runs it, whose cost is by operation and not by element."""


def blocks(problem: Problem, rows: int, block: int) -> int:
    """Programs of a head, one for each block of so many rows: of packed sequences as many as the table has entries,
    some of no block."""
    if problem.sequences is None:
        return problem.batch * cdiv(rows, block)
    return problem.entries(rows, block)


def tiles_of(
    problem: Problem, operands: Operands, block_q: int, block_kv: int = 0, group: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """The table for blocks of queries, and the one for blocks of keys, None where block_kv is 0: int32
    `(blocks, COLUMNS)`, by one kernel. None where nothing is packed.

    Args:
        problem: of packed queries alone each sequence has a cache.
        operands: with the lengths.
        block_q, block_kv: rows of a block.
        group: rows of a query.
    """
    cu_q, cu_k, used = operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqused_k
    if cu_q is None:
        return None, None
    if cu_k is None and not problem.packed_q:
        cu_k = cu_q
    launch, of_queries, of_keys = _launch(problem, block_q, block_kv, group)
    tiles = cu_q.new_empty(of_queries)
    tiles_of_keys = None if of_keys is None else cu_q.new_empty(of_keys)
    launch((cu_q, cu_k, used, tiles, tiles_of_keys), ())
    return tiles, tiles_of_keys


@lru_cache(maxsize=1024)
def _launch(
    problem: Problem, block_q: int, block_kv: int, group: int = 1
) -> tuple[Launch, tuple[int, int], tuple[int, int] | None]:
    """The launch, and the shapes of the tables."""
    p = problem
    assert p.sequences is not None
    of_queries, of_keys = p.entries(p.seqlen_q * group, block_q), p.entries(p.seqlen_k, block_kv) if block_kv else 0
    slots = SLOTS_INTERPRETED if p.device == "cpu" else SLOTS
    programs = cdiv(of_queries, slots)
    constexprs = {"BLOCK_Q": block_q, "BLOCK_KV": block_kv, "USED": p.used_k, "RIGHT": p.span[1] is not None}
    launch = Launch(
        tiles_kernel,
        programs + cdiv(of_keys, slots),
        (p.sequences, p.seqlen_q, p.seqlen_k, programs),
        {**constexprs, "SLOTS": slots, "CHUNK": CHUNK, "GROUP": group},
        num_warps=4,
        num_stages=1,
    )
    return launch, (of_queries, COLUMNS.value), (of_keys, COLUMNS.value) if of_keys else None
