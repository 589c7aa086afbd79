"""How a decode kernel is cut: its tiles, and how many parts keys are split into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flashzoo.call.problem import Problem
from flashzoo.integers import cdiv, next_power_of_2

TENSOR_CORE = 16
"""No side of a tile of the tensor cores is shorter."""
MULTIPROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148}
"""Of the GPU that stands for an architecture: a split must not depend on anything but shapes, lest bits do."""


@dataclass(frozen=True)
class Tiles:
    """How `split_kernel` is cut.

    Attributes:
        rows: of a tile, at most: queries, those of all query heads that share a key/value head side by side.
        block_kv: keys of a block.
        num_warps, num_stages: warps of a program, and depth of the software pipeline over keys and values.
        programs: how many are to run on a multiprocessor, one after another or at a time.
        least: keys of a split, at least.
        merged: rows of a program of `merge_kernel`.
    """

    rows: int
    block_kv: int
    num_warps: int
    num_stages: int
    programs: int = 4
    least: int = 256
    merged: int = 1

    def __str__(self) -> str:
        return f"{self.rows} rows by {self.block_kv} keys, {self.num_warps} warps, {self.num_stages} stages"


# By the width of the head dim's tile. On Hopper the fastest of fifteen in most of nine caches of 2k to 128k keys on an H200, 16-bit inputs,
# Triton 3.6, one query.
HOPPER = {64: Tiles(64, 64, 4, 3, programs=2), 128: Tiles(64, 64, 4, 3, programs=2)}
# Not measured: the largest tried that compile without spills.
ANYWHERE = {
    64: Tiles(64, 64, 4, 3),
    128: Tiles(64, 64, 4, 2),
    256: Tiles(64, 32, 8, 2),
}
# A product on the CUDA cores holds whole rows of both operands in registers.
FLOAT32 = {64: Tiles(16, 32, 4, 1), 128: Tiles(16, 16, 4, 1), 256: Tiles(16, 16, 8, 1)}
# The interpreter's cost is per operation, not per element: few, large tiles; and splits, so that there is something to merge.
INTERPRETED = Tiles(64, 64, 4, 1, programs=1, least=128, merged=64)


def block_d(head_dim: int) -> int:
    """Width of a tile that holds the head dim."""
    return next_power_of_2(head_dim, TENSOR_CORE)


def tiles_for(problem: Problem) -> Tiles:
    """The tiles of a problem."""
    if problem.device == "cpu":
        return INTERPRETED
    tables = (FLOAT32,) if problem.dtype == "fp32" else (HOPPER, ANYWHERE) if problem.arch == 90 else (ANYWHERE,)
    width = max(64, block_d(problem.head_dim))
    return next(table[width] for table in tables if width in table)


@dataclass(frozen=True)
class Cut:
    """A problem's grid: programs have a tile of rows and a split of keys.

    Attributes:
        rows: of a tile.
        blocks: tiles of a key/value head.
        split: keys of a split, whole blocks.
        splits: of the keys that a tile sees.
    """

    rows: int
    blocks: int
    split: int
    splits: int


@lru_cache(maxsize=1024)
def cut(problem: Problem) -> Cut:
    """How a problem is cut: by its shape alone, whatever its caches hold, so that a sequence has the same bits beside any others.

    Keys are split until there are as many programs as the GPU can have at work, but into no shorter parts than `Tiles.least`.
    """
    p, tiles = problem, tiles_for(problem)
    of_head = p.seqlen_q * (p.heads // p.heads_kv)
    rows = min(tiles.rows, next_power_of_2(of_head, TENSOR_CORE))
    blocks = cdiv(of_head, rows)
    left, right = p.span
    keys = p.seqlen_k
    if left is not None and right is not None:  # what a tile's queries see together, and where it begins within a block
        keys = min(keys, left + right + cdiv(rows * p.heads_kv, p.heads) + 1 + tiles.block_kv)
    wanted = cdiv(tiles.programs * MULTIPROCESSORS.get(p.arch or 90, 132), p.batch * p.heads_kv * blocks)
    split = cdiv(max(tiles.least, cdiv(keys, wanted)), tiles.block_kv) * tiles.block_kv
    return Cut(rows, blocks, split, max(1, cdiv(keys, split)))


def describe(problem: Problem) -> list[str]:
    """Sentences for `explain`: how the work is cut, and what happens silently."""
    tiles, how = tiles_for(problem), cut(problem)
    group = problem.heads // problem.heads_kv
    lines = [f"{tiles}", f"keys: {how.splits} splits of {how.split}, merged by a second kernel" if how.splits > 1 else "keys: not split"]
    if group > 1:
        lines.append(f"{group} query heads of a key/value head share tiles of {how.rows} rows")
    if problem.device == "cpu":
        lines.append("runs in Triton's interpreter: exact, and slow")
    else:
        known = tiles in HOPPER.values() and problem.arch == 90
        how_chosen = "the fastest measured on an H200" if known else "chosen to compile without spills, not measured"
        lines.append(f"tiles: {how_chosen}; auto does not take it yet")
    if block_d(problem.head_dim) != problem.head_dim:
        lines.append(f"head_dim {problem.head_dim} is padded to {block_d(problem.head_dim)} on chip, not in memory")
    return lines
