"""Tile sizes of blocksparse: which table, which row, and why.
No tile is longer than a block of a mask, and all divide it."""

from __future__ import annotations

from dataclasses import replace

from flashzoo.call.problem import Problem
from flashzoo.tiles import Tiles, block_d

# (kernel, width of the head dim's tile): tiles. Those that v2 was measured to be fastest with on an H200, 16-bit
# inputs, Triton 3.6.
HOPPER = {
    ("forward", 64): Tiles(64, 64, 4, 3, tma=True, registers=1),
    ("forward", 128): Tiles(64, 64, 4, 3, tma=True, registers=1),
    ("forward", 256): Tiles(64, 32, 4, 3, tma=True, registers=1),
    ("dkdv", 64): Tiles(64, 64, 4, 3, tma=True, registers=2),
    ("dkdv", 128): Tiles(64, 64, 4, 2, tma=True),
    ("dkdv", 256): Tiles(64, 64, 8, 2, tma=True),
    ("dq", 64): Tiles(64, 64, 4, 3, tma=True),
    ("dq", 128): Tiles(64, 64, 4, 3, tma=True, registers=1),
    ("dq", 256): Tiles(64, 64, 4, 2, tma=True),
}

# Not measured: no such GPU is at hand. The largest tried that compile without spills for sm_80, sm_89 and sm_100, in
# the 99 KB on chip that the smallest of them has; masks with bits spill some bytes.
ANYWHERE = {
    ("forward", 64): Tiles(64, 32, 4, 2),
    ("forward", 128): Tiles(64, 32, 4, 2),
    ("forward", 256): Tiles(64, 32, 8, 2),
    ("dkdv", 64): Tiles(32, 64, 4, 1),
    ("dkdv", 128): Tiles(64, 64, 8, 1),
    ("dkdv", 256): Tiles(32, 32, 8, 1),
    ("dq", 64): Tiles(32, 64, 4, 2),
    ("dq", 128): Tiles(64, 64, 8, 2),
    ("dq", 256): Tiles(32, 64, 8, 1),
}

# float32 products run on the CUDA cores ("ieee": no tensor core keeps float32), so tiles are small everywhere.
FLOAT32 = {
    ("forward", 64): Tiles(64, 32, 8, 1),
    ("forward", 128): Tiles(32, 32, 8, 1),
    ("forward", 256): Tiles(16, 16, 4, 1),
    ("dkdv", 64): Tiles(32, 16, 8, 1),
    ("dkdv", 128): Tiles(16, 32, 8, 1),
    ("dkdv", 256): Tiles(16, 16, 8, 1),
    ("dq", 64): Tiles(32, 32, 8, 1),
    ("dq", 128): Tiles(16, 16, 8, 1),
    ("dq", 256): Tiles(16, 16, 8, 1),
}

# The interpreter's cost is per operation, not per element: few, large tiles.
INTERPRETED = Tiles(64, 64, 4, 1)


# Up to this many keys a descriptor costs the host more (some 5 us each) than TMA saves the GPU.
SHORT = 256


def tiles_for(kernel: str, problem: Problem) -> Tiles:
    """The tiles of "forward", "dkdv" or "dq" for a problem."""
    if problem.device == "cpu":
        return INTERPRETED
    width = max(64, block_d(problem.head_dim))
    if problem.dtype == "fp32":
        return FLOAT32[kernel, width]
    if problem.arch == 90:
        tiles = HOPPER[kernel, width]
        short = kernel == "forward" and max(problem.seqlen_q, problem.seqlen_k) <= SHORT
        return replace(tiles, tma=False, registers=0) if short or problem.head_dim % 8 else tiles
    return ANYWHERE[kernel, width]


def describe(problem: Problem) -> list[str]:
    """Sentences for `explain`: what runs, with which tiles and why, and what happens silently."""
    kernels = ("forward", "dkdv", "dq") if problem.grad else ("forward",)
    lines = [f"{kernel}: {tiles_for(kernel, problem)}" for kernel in kernels]
    if problem.block_mask is None:
        lines.append(
            "no block_mask: one that says what causal and window_size do is made at every call; "
            "BlockMask.sliding_window(...), made beforehand, saves that"
        )
    elif problem.span != (None, None):
        lines.append(
            "causal and window_size are put into the block mask at the first such call of a stream, and kept with it "
            "where BlockMask.banded says; block_mask & BlockMask.causal(...) does it beforehand"
        )
    if problem.device == "cpu":
        lines.append("runs in Triton's interpreter: exact, and slow")
    elif problem.dtype == "fp32":
        lines.append("tiles: small, as float32 products run on the CUDA cores")
    elif problem.arch == 90:
        lines.append("tiles: those of v2, the fastest measured there on an H200")
        if problem.head_dim % 8:
            lines.append(f"head_dim {problem.head_dim} is no multiple of 16 bytes, which TMA needs: plain loads")
    else:
        lines.append("tiles: chosen to compile without spills, not measured on such a GPU")
    if problem.score_mod is not None:
        lines.append("score_mod: written into the kernels, whose tiles are those measured without")
    if block_d(problem.head_dim) != problem.head_dim:
        lines.append(f"head_dim {problem.head_dim} is padded to {block_d(problem.head_dim)} on chip, not in memory")
    return lines
