"""Tile sizes of v2: which table, which row, and why. The tables come from `python -m bench.tune` where measured."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flashzoo.call.problem import Problem
from flashzoo.scores.program import paired
from flashzoo.spec import in_any_order
from flashzoo.tiles import Tiles, block_d

# (kernel, width of the head dim's tile, bounded on the right): tiles. Measured on an H200, 16-bit inputs, Triton 3.6.
HOPPER = {
    ("forward", 64, False): Tiles(64, 64, 4, 3, tma=True, registers=1),
    ("forward", 64, True): Tiles(64, 64, 4, 3, tma=True, registers=1),
    ("forward", 128, False): Tiles(64, 64, 4, 3, tma=True, registers=1),
    ("forward", 128, True): Tiles(64, 64, 4, 3, tma=True),
    ("forward", 256, False): Tiles(64, 32, 4, 3, tma=True, registers=1),
    ("forward", 256, True): Tiles(64, 32, 4, 3, tma=True, registers=1),
    ("dkdv", 64, False): Tiles(32, 64, 4, 4, tma=True, registers=2),
    ("dkdv", 64, True): Tiles(64, 64, 4, 3, tma=True, registers=2),
    ("dkdv", 128, False): Tiles(64, 64, 4, 2, tma=True),
    ("dkdv", 128, True): Tiles(64, 64, 4, 2, tma=True),
    ("dkdv", 256, False): Tiles(64, 64, 8, 2, tma=True),
    ("dkdv", 256, True): Tiles(64, 64, 8, 2, tma=True),
    ("dq", 64, False): Tiles(64, 64, 4, 3, tma=True),
    ("dq", 64, True): Tiles(64, 64, 4, 3, tma=True),
    ("dq", 128, False): Tiles(64, 64, 4, 3, tma=True, registers=1),
    ("dq", 128, True): Tiles(64, 64, 4, 3, tma=True, registers=1),
    ("dq", 256, False): Tiles(64, 64, 4, 2, tma=True),
    ("dq", 256, True): Tiles(64, 64, 4, 2, tma=True),
}

# Caches on Hopper, by plain loads. Not measured: the largest tried that compile for it without spills,
# by Triton 3.6 and 3.9.
HOPPER_CACHES = {
    ("forward", 64): Tiles(64, 64, 4, 2),
    ("forward", 128): Tiles(64, 64, 4, 2),
    ("forward", 256): Tiles(64, 32, 8, 2),
    ("dkdv", 64): Tiles(64, 64, 8, 1),
    ("dkdv", 128): Tiles(64, 32, 8, 1),
    ("dkdv", 256): Tiles(32, 32, 8, 1),
    ("dq", 64): Tiles(64, 64, 4, 2),
    ("dq", 128): Tiles(64, 64, 8, 2),
    ("dq", 256): Tiles(64, 32, 8, 2),
}

# Not measured: no such GPU is at hand. The largest tried that compile without spills for sm_80, sm_89 and sm_100, in
# the 99 KB on chip that the smallest of them has.
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

# In place of the above where a function reads a number for each query and key: these are streamed, too, and leave room
# for one program only. Measured is the first, against 64x64.
HOPPER_BIAS = {
    ("forward", 128): Tiles(64, 32, 4, 3, tma=True),
    ("dq", 64): Tiles(64, 64, 4, 2, tma=True),
    ("dq", 128): Tiles(64, 64, 4, 2, tma=True, registers=1),
}

# Of `dbias_kernel`, whose products are made in parts of the head dim: by TMA and by plain loads, for all widths. Of
# seven the one is the fastest at head dims 64, 128 and 256 or within 2 % of it (H100, bf16, 8 of 2k, causal); the other
# is not measured, and does not spill.
DBIAS = Tiles(64, 64, 4, 3, tma=True)
DBIAS_ANYWHERE = Tiles(64, 32, 8, 2)
DBIAS_FLOAT32 = Tiles(32, 32, 8, 1)
PART = 64
"""Numbers of a query or key in such a part: the widest that TMA brings without conflicts of banks."""
DBIAS_PROGRAMS = 264
"""Two for each processor of an H200. Where blocks are fewer several programs divide a block's sharers among them."""

# The interpreter's cost is per operation, not per element: few, large tiles.
INTERPRETED = Tiles(64, 64, 4, 1)


# Up to this many keys a descriptor costs the host more (some 5 us each) than TMA saves the GPU.
SHORT = 256


@lru_cache(maxsize=1024)
def apart(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """The tensors whose gradients `dbias_kernel` sums, of which every query and key read a number of their own; and the
    problem in which only the others have gradients. Of packed sequences and caches, whose lengths no host knows, that
    is all of them."""
    form = problem.score_mod
    if form is None or problem.sequences is not None or "cache" in problem.features:
        return problem, ()
    own = tuple(tensor for tensor in form.grads if tensor in biases(problem))
    others = tuple(tensor for tensor in form.grads if tensor not in own)
    return replace(problem, score_mod=replace(form, grads=others)), own


def biases(problem: Problem) -> dict[int, tuple[str, ...]]:
    """The tensors of which a function on scores reads a number for each query and key, as `paired`."""
    return {} if problem.score_mod is None else paired(problem.score_mod.text)


def tiles_for(kernel: str, problem: Problem) -> Tiles:
    """The tiles of "forward", "dkdv", "dq" or "dbias" for a problem."""
    if problem.device == "cpu":
        return INTERPRETED
    if kernel == "dbias":
        return _tiles_for_dbias(problem)
    width = max(64, block_d(problem.head_dim))
    if problem.dtype == "fp32":
        return FLOAT32[kernel, width]
    if problem.arch == 90 and "cache" in problem.features:
        return HOPPER_CACHES[kernel, width]
    if problem.arch == 90:
        tiles = HOPPER[kernel, width, problem.span[1] is not None]
        tiles = HOPPER_BIAS.get((kernel, width), tiles) if biases(problem) else tiles
        short = kernel == "forward" and max(problem.seqlen_q, problem.seqlen_k) <= SHORT
        return replace(tiles, tma=False, registers=0) if short or problem.head_dim % 8 else tiles
    return ANYWHERE[kernel, width]


def _tiles_for_dbias(problem: Problem) -> Tiles:
    if problem.dtype == "fp32":
        return DBIAS_FLOAT32
    return DBIAS if problem.arch == 90 and problem.head_dim % 8 == 0 else DBIAS_ANYWHERE


def limits(problem: Problem) -> list[str]:
    """Sentences on what declarations can't say."""
    return in_any_order(apart(problem)[0])


def describe(problem: Problem) -> list[str]:
    """Sentences for `explain`: what runs, with which tiles and why, and what happens silently."""
    kernels = ("forward", "dkdv", "dq") if problem.grad else ("forward",)
    kernels += ("dbias",) if problem.grad and apart(problem)[1] else ()
    lines = [f"{kernel}: {tiles_for(kernel, problem)}" for kernel in kernels]
    if problem.device == "cpu":
        lines.append("runs in Triton's interpreter: exact, and slow")
    elif problem.dtype == "fp32":
        lines.append("tiles: small, as float32 products run on the CUDA cores")
    elif problem.arch == 90 and "cache" in problem.features:
        lines.append(
            "cache: plain loads, which stop where it does; tiles chosen to compile without spills, not measured"
        )
    elif problem.arch == 90:
        lines.append("tiles: the fastest measured on an H200")
        if problem.head_dim % 8:
            lines.append(f"head_dim {problem.head_dim} is no multiple of 16 bytes, which TMA needs: plain loads")
    else:
        lines.append("tiles: chosen to compile without spills, not measured on such a GPU")
    if problem.score_mod is not None:
        how = "chosen for a bias" if biases(problem) else "those measured without"
        lines.append(f"score_mod: written into the kernels, whose tiles are {how}")
    if problem.grad and apart(problem)[1]:
        lines.append("score_mod: what it reads for each query and key has its gradient in a fixed order, by dbias")
    if problem.dropout_p:
        lines.append("dropout_p: random numbers made in the kernels, whose tiles are those measured without")
    if block_d(problem.head_dim) != problem.head_dim:
        lines.append(f"head_dim {problem.head_dim} is padded to {block_d(problem.head_dim)} on chip, not in memory")
    return lines
