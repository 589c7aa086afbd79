"""Block sizes of v1: the paper's formula, or the table where it says better."""

from __future__ import annotations

from dataclasses import dataclass

from flashzoo.call.problem import Problem
from flashzoo.integers import cdiv
from flashzoo.tiles import block_d


@dataclass(frozen=True)
class Tiles:
    """How one kernel is cut.

    Attributes:
        block_q, block_kv: rows of a block of queries (the paper's B_r) and of keys (B_c).
        num_warps, num_stages: warps of a program, and depth of the software pipeline of the inner loop.
        why: "paper" where the sizes follow the paper's formula, "measured" or "compiles" where the table overrides it.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    why: str

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv} blocks ({self.why}), {self.num_warps} warps, {self.num_stages} stages"


# On-chip memory of one SM in bytes, M in the paper; it counts in elements.
SRAM = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 120: 99 << 10}

# (kernel, width of the head dim's tile): tiles, where the paper's are slower or don't fit the registers.
HOPPER: dict[tuple[str, int], Tiles] = {
    ("forward", 64): Tiles(64, 128, 4, 1, "measured"),
    ("forward", 128): Tiles(64, 128, 4, 1, "measured"),
    ("forward", 256): Tiles(64, 128, 8, 1, "measured"),
    ("backward", 64): Tiles(64, 64, 4, 1, "measured"),
    ("backward", 128): Tiles(64, 64, 4, 1, "measured"),
    ("backward", 256): Tiles(32, 64, 8, 1, "measured"),
}
ANYWHERE: dict[tuple[str, int], Tiles] = {
    ("forward", 64): Tiles(64, 32, 4, 2, "compiles"),
    ("forward", 128): Tiles(32, 32, 8, 1, "compiles"),
    ("forward", 256): Tiles(64, 32, 8, 1, "compiles"),
    ("backward", 64): Tiles(64, 32, 4, 1, "compiles"),
    ("backward", 128): Tiles(64, 64, 8, 1, "compiles"),
    ("backward", 256): Tiles(32, 32, 8, 1, "compiles"),
}
FLOAT32: dict[tuple[str, int], Tiles] = {
    ("forward", 64): Tiles(32, 64, 8, 1, "compiles"),
    ("forward", 128): Tiles(16, 16, 8, 1, "compiles"),
    ("forward", 256): Tiles(16, 16, 8, 1, "compiles"),
    ("backward", 64): Tiles(16, 16, 8, 1, "compiles"),
    ("backward", 128): Tiles(16, 16, 4, 1, "compiles"),
    ("backward", 256): Tiles(16, 16, 8, 1, "compiles"),
}
INTERPRETED = Tiles(64, 64, 4, 1, "interpreter")


def paper_tiles(head_dim: int, sram_bytes: int, itemsize: int) -> tuple[int, int]:
    """Algorithm 1, line 1: `(B_r, B_c)` with `B_c = ceil(M / 4d)` and `B_r = min(B_c, d)`, M in elements."""
    block_kv = cdiv(sram_bytes, itemsize * 4 * head_dim)
    return min(block_kv, head_dim), block_kv


def tiles_for(kernel: str, problem: Problem) -> Tiles:
    """The tiles of "forward" or "backward" for a problem."""
    if problem.device == "cpu":
        return INTERPRETED
    width = max(64, block_d(problem.head_dim))
    if problem.dtype == "fp32":
        return FLOAT32[kernel, width]
    return (HOPPER if problem.arch == 90 else ANYWHERE)[kernel, width]


def describe(problem: Problem) -> list[str]:
    """Sentences for `explain`: what runs, with which tiles, and what happens silently."""
    lines = [
        f"{kernel}: {tiles_for(kernel, problem)}"
        for kernel in (("forward", "backward") if problem.grad else ("forward",))
    ]
    if problem.arch in SRAM:
        block_q, block_kv = paper_tiles(problem.head_dim, SRAM[problem.arch], 4 if problem.dtype == "fp32" else 2)
        lines.append(
            f"the paper's formula would give {block_q}x{block_kv} blocks for {SRAM[problem.arch] >> 10} KB on chip"
        )
    if problem.device == "cpu":
        lines.append("runs in Triton's interpreter: exact, and slow")
    if problem.score_mod is not None:
        lines.append("score_mod: written into the kernels, whose tiles are those measured without")
    if problem.dropout_p:
        lines.append("dropout_p: random numbers made in the kernels, whose tiles are those measured without")
    if block_d(problem.head_dim) != problem.head_dim:
        lines.append(f"head_dim {problem.head_dim} is padded to {block_d(problem.head_dim)} on chip, not in memory")
    lines.append(
        "keeps O in float32, l and m in memory between steps" + (", and dQ in float32" if problem.grad else "")
    )
    return lines
