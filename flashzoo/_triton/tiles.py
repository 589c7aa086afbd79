"""What launches of tiled attention kernels have in common: which tiles TMA reads, constexprs, the kernel of delta."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

from flashzoo._triton.launch import RAGGED, Launch
from flashzoo.call.problem import Problem
from flashzoo.gpu import RAGGED_ROWS
from flashzoo.integers import cdiv
from flashzoo.tiles import Tiles, block_d

Strides = tuple[int, ...]

# Rows that delta and LSE are padded to a multiple of: no block of queries is longer.
LONGEST_BLOCK = 128
# Queries of a program of `delta_kernel`; those of each packed sequence are padded to a multiple of it.
DELTA_BLOCK = 64


def aligned(*tensors: Tensor) -> bool:
    """Whether every tensor starts at a multiple of 16 bytes, as TMA needs."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return not addresses & 15


def usable(tiles: Tiles, problem: Problem, aligned: bool, strides: Strides) -> Tiles:
    """The tiles, with plain loads where TMA can't read q, k, v (and dout) in place: strides must be positive multiples
    of 16 bytes, packed rows no more than it can count. Of a cache it would read on into what is not used, and that may
    be no number."""
    q_sizes = (problem.batch, problem.seqlen_q, problem.heads)
    kv_sizes = (problem.batch, problem.seqlen_k, problem.heads_kv)
    steps = [
        stride for stride, size in zip(strides, (*q_sizes, *kv_sizes, *kv_sizes, *q_sizes), strict=False) if size > 1
    ]
    elements = in_16_bytes(problem)
    readable = aligned and all(step > 0 and step % elements == 0 for step in steps) and "cache" not in problem.features
    readable &= problem.sequences is None or max(problem.seqlen_q, problem.seqlen_k) <= RAGGED_ROWS
    return tiles if readable or not tiles.tma else replace(tiles, tma=False, registers=0)


def constexprs(problem: Problem, strides: Strides, tiles: Tiles, masks: dict[str, Any], *owned: str) -> dict[str, Any]:
    """Constexprs of a kernel: its tile, its masks, how it reads by TMA (0 not at all, else how many dimensions
    descriptors have), and by name the same of those of its owned blocks that are in registers."""
    dimensions = RAGGED if problem.sequences is not None else 4
    return {
        **columns(problem, strides),
        "BLOCK_Q": tiles.block_q,
        "BLOCK_KV": tiles.block_kv,
        **masks,
        "TMA": dimensions if tiles.tma else 0,
        **{name: dimensions if tiles.registers > nth else 0 for nth, name in enumerate(owned)},
    }


def columns(problem: Problem, strides: Strides) -> dict[str, int]:
    """Constexprs of how rows are moved: columns, those of a tile, and what divides the strides."""
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_d(problem.head_dim),
        "ALIGNED": alignment(problem, strides),
    }


def in_16_bytes(problem: Problem) -> int:
    """How many numbers."""
    return 4 if problem.dtype == "fp32" else 8


def alignment(problem: Problem, strides: Strides) -> int:
    """What a kernel is told that divides its strides, so that a thread moves 16 bytes at once: 1, which tells it
    nothing, where 16 divides them, as Triton sees by itself."""
    return 1 if math.gcd(*strides) % 16 == 0 else math.gcd(in_16_bytes(problem), *strides)


def tma_tiles(
    problem: Problem, tiles: Tiles, *rows: int | tuple[int, ...] | None
) -> tuple[tuple[int, ...] | None, ...]:
    """What TMA reads of each tensor: a tile of that many rows of one head, a tile as given, or nothing."""
    if not tiles.tma:
        return ()
    first, width = (1,) if problem.sequences is None else (1, 1), block_d(problem.head_dim)
    return tuple((*first, tile, 1, width) if isinstance(tile, int) else tile for tile in rows)


def rows_of_owned(tiles: Tiles, rows: int) -> list[int | None]:
    """Rows that TMA reads of each of the two blocks that a program may own: of those that go through registers."""
    return [rows if tiles.registers > nth else None for nth in range(2)]


def padded(problem: Problem) -> int:
    """Rows of a head that delta and LSE have room for; of packed sequences whole blocks of each."""
    if problem.sequences is not None:
        return problem.entries(problem.seqlen_q, DELTA_BLOCK) * DELTA_BLOCK
    return cdiv(problem.seqlen_q, LONGEST_BLOCK) * LONGEST_BLOCK


def lengths_of(problem: Problem) -> tuple[int, int, int]:
    """Queries, keys and `padded`, as kernels of the backward pass take them."""
    return problem.seqlen_q, problem.seqlen_k, padded(problem)


def group_of(problem: Problem) -> int:
    """How many query heads share a head of keys."""
    return problem.heads // problem.heads_kv


def launch_of_delta(kernel: JITFunction, problem: Problem, strides: Strides, dlse: bool, **more: bool) -> Launch:
    """The launch of a `delta_kernel`; strides of out and dout, and more constexprs."""
    rows = padded(problem)
    return Launch(
        kernel,
        rows // DELTA_BLOCK * problem.batch * problem.heads,
        (*strides, problem.seqlen_q, rows, problem.heads),
        {**columns(problem, strides), "BLOCK_Q": DELTA_BLOCK, "DLSE": dlse, **more},
        num_warps=4,
        num_stages=1,
    )
