"""Tiles of v3: which table, which entry, which kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from flashzoo._cute.scoring import scoring_of
from flashzoo.call.forms import Window
from flashzoo.call.problem import DESCALE_BLOCK, Problem
from flashzoo.counts import visible_pairs
from flashzoo.dtypes import BYTES
from flashzoo.gpu import MULTIPROCESSORS, WARPGROUP_ROWS
from flashzoo.integers import cdiv
from flashzoo.v3.traits import (
    Kernel,
    KernelBackward,
    KernelBackwardAllKeys,
    KernelBackwardByHead,
    KernelBackwardPacked,
    KernelBackwardPairs,
    KernelBackwardSparse,
    KernelFp8,
    KernelFp8Packed,
    KernelPacked,
    KernelSparse,
    Tiles,
    TilesBackward,
)

# Width of q and k, width of v: tiles. The fastest measured on an H200, bf16, seqlens 512 to 16k,
# with and without a mask; those of 32, 48, 80 and 160 in fewer cells.
HOPPER = {
    (32, 32): Tiles(3, 128, stages=4, q_stages=2),
    (48, 48): Tiles(3, 128, stages=3, q_stages=2),
    (64, 64): Tiles(3, 128, stages=3, q_stages=2),
    (80, 80): Tiles(3, 112, q_stages=2),
    (96, 96): Tiles(3, 112, q_stages=2),
    (128, 128): Tiles(3, 80, ping_pong=False),
    (160, 160): Tiles(2, 128, ping_pong=False),
    (192, 128): Tiles(3, 64, ping_pong=False),
    (192, 192): Tiles(2, 96),
    (256, 256): Tiles(2, 64),
}

# The same widths: others, and their speed for what they compute, padding included, beside those above. Three warpgroups
# read K and V from L2 once for 192 queries, two leave fewer rows of a short sequence's last tile empty. By sweeps on an
# H200 over 12 lengths from 128 to 4096, and over 14 cells from 260 to 2048, of 32 over 6 (docs/measurements.md), where
# 208 keys were not timed at the lengths that choose them.
OTHERS: dict[tuple[int, int], dict[Tiles, float]] = {
    (32, 32): {
        Tiles(2, 128, stages=4, q_stages=2, ping_pong=False): 0.84,
        Tiles(2, 208, stages=4, q_stages=2): 0.82,
    },
    (48, 48): {
        Tiles(3, 112, stages=4, q_stages=2): 0.95,
        Tiles(2, 128, stages=3, q_stages=2, ping_pong=False): 0.87,
        Tiles(2, 208, q_stages=2): 0.86,
    },
    (64, 64): {
        Tiles(3, 112, stages=3, q_stages=2): 0.92,
        Tiles(2, 128, stages=3, q_stages=2, ping_pong=False): 0.8,
        Tiles(2, 112, stages=3, q_stages=2): 0.78,
        Tiles(2, 208, q_stages=2): 0.75,
    },
    (80, 80): {
        Tiles(3, 96, q_stages=2): 0.97,
        Tiles(2, 128, q_stages=2, ping_pong=False): 0.89,
        Tiles(2, 112, q_stages=2): 0.84,
    },
    (96, 96): {
        Tiles(2, 128, q_stages=2, ping_pong=False): 0.78,
        Tiles(2, 112, q_stages=2): 0.78,
    },
    (128, 128): {Tiles(2, 128, q_stages=2, ping_pong=False): 0.95},
    (160, 160): {Tiles(2, 96): 0.98},
}

CUT_SECTORS = 0.87
"""What remains of the speed of two warpgroups beside three's where TMA brings rows by 16 columns, 32 bytes, and half of
them begin within a sector of L2: each then is of two, for 128 queries in place of 192. So at 40 and 72."""

# Block-sparse: width of q and k, width of v, keys of a block of the mask. The fastest of those tried on an H200 at
# widths 64 and 128 with blocks of 128; the others were not tried against any. Its widths are fewer.
SPARSE = {
    (64, 64, 128): Tiles(2, 64, stages=4, q_stages=2, overlap=False, teams=2),
    (96, 96, 128): Tiles(2, 128, q_stages=2),
    (128, 128, 128): Tiles(2, 128, q_stages=2, ping_pong=False),
    (192, 128, 128): Tiles(2, 64, stages=3, ping_pong=False),
    (192, 192, 128): Tiles(2, 64, stages=3),
    (256, 256, 128): Tiles(2, 64),
    (64, 64, 64): Tiles(2, 64, stages=4, q_stages=2, overlap=False, teams=2),
    (96, 96, 64): Tiles(2, 64, stages=4, q_stages=2),
    (128, 128, 64): Tiles(2, 64, stages=4, q_stages=2, ping_pong=False),
    (192, 128, 64): Tiles(2, 64, stages=3, ping_pong=False),
    (192, 192, 64): Tiles(2, 64, stages=3),
    (256, 256, 64): Tiles(2, 64),
}


@dataclass(frozen=True)
class TilesFp8:
    """How an FP8 kernel is cut.

    Attributes:
        tiles: with blocks of as many keys as share a scale: V transposed then has rows of 128 bytes.
        columns: of O that one product computes. Where they are fewer than all, two products have registers beside O.
        raw_stages: blocks of V that wait to be transposed on chip, or parts of 128 columns.
        late: the last of these products is added to O when the next block's scores are under way, and has registers
            beside both. Only where V comes transposed: those who transpose it on chip have some of the registers.
        prepare: where a key is seen by so many queries of a head, on average, V is transposed beforehand,
            by a kernel of its own, which costs as much as a copy.
    """

    tiles: Tiles
    columns: int
    raw_stages: int
    late: bool
    prepare: int


# FP8, width of q, k and v. Measured as above.
FP8 = {
    64: TilesFp8(
        Tiles(3, DESCALE_BLOCK, stages=3, q_stages=2, overlap=False), 64, raw_stages=3, late=False, prepare=2048
    ),
    128: TilesFp8(Tiles(3, DESCALE_BLOCK, overlap=False), 64, raw_stages=2, late=False, prepare=4096),
    256: TilesFp8(Tiles(2, DESCALE_BLOCK, overlap=False), 64, raw_stages=2, late=True, prepare=4096),
}

# With one level of sums, `fast_accum`, at the widths where it is faster, if V comes transposed: blocks overlap inside a
# warpgroup, as in 16 bits, for which two levels have no registers. Not at 128: with three warpgroups it spills, with
# two it has fewer queries to a key.
ONE_LEVEL = {
    width: replace(FP8[width], tiles=replace(FP8[width].tiles, overlap=True), prepare=2048) for width in (64, 256)
}

# The backward pass, width of q and k, width of v; the narrowest that holds a problem's is taken.
BACKWARD = {
    (32, 32): TilesBackward(128),
    (48, 48): TilesBackward(128),
    (64, 64): TilesBackward(128),
    (80, 80): TilesBackward(128),
    (96, 96): TilesBackward(64, v_in_registers=True),
    (128, 128): TilesBackward(64),
    (160, 160): TilesBackward(64, ds_stages=1, halved=True),
    (192, 128): TilesBackward(64, ds_stages=1, halved=True),
    (192, 192): TilesBackward(64, 64, stages=3),
    (256, 256): TilesBackward(64, 64),
}

# The same in pairs of thread blocks. By gradient, dS and half of K of the partner are in the place of a stage of dO.
PAIRS = {
    (128, 128): TilesBackward(64),
    (192, 192): TilesBackward(64, 64, stages=3, stages_do=2, ds_stages=1),
    (256, 256): TilesBackward(64, 64, stages_do=1),
}

PAIRS_FROM = {(128, 128): (2048, 8192), (192, 192): (256, 256), (256, 256): (256, 256)}
"""From how many keys on thread blocks work in pairs, without a mask and with one: an H200 gains up to a fifth at 192
and 256, and loses at 192 keys; at 128 it gains 2 %."""

# Microseconds on an H200, by which the queries of a block of keys are split over several tiles of the backward pass:
# what a multiprocessor multiplies in one, what memory gives, how many steps a tile's beginning and end are worth, and
# what the launch costs that adds the parts.
FLOPS_PER_US, BYTES_PER_US, TILE_STEPS, SUM_US = 4.3e6, 3.3e6, 3, 10.0
KEPT_BYTES, UNCOVERED = 32e6, 0.6
"""Where thread blocks have a head each: what L2 keeps of the Q, dO and sums of dQ of the heads under way, and what of
the time nothing covers in which memory brings the rest again. Fitted to 162 shapes, each both ways, from 192 to 1536
tokens: the choice costs a thousandth of the time more than the better of the two (docs/measurements.md)."""
LEAST_UNEVEN = 5
"""Heads of a tile, at least, where the last of its group has one fewer: tiles of other lengths drift apart."""

UNSPLIT_WITH_A_MASK = {(80, 80)}
"""Widths at which, with a block mask, a thread that keeps parts of dK and dV has too few registers: all products would
wait for one another."""

WIDTHS = tuple(sorted(width for width, width_v in HOPPER if width == width_v))
"""Head dims that have tiles of their own; TMA fills what a smaller one leaves with zeros."""
SPARSE_WIDTHS = tuple(sorted({width for width, width_v, _ in SPARSE if width == width_v}))
"""The same with a block mask."""


def width_for(head_dim: int, widths: Iterable[int]) -> int:
    """The narrowest of those widths that holds a head dim."""
    return next(width for width in widths if head_dim <= width)


def widths_for(problem: Problem) -> tuple[int, int]:
    """Widths of a problem's tiles, for q and k, and for v and out."""
    widths = WIDTHS if problem.block_mask is None else SPARSE_WIDTHS
    return width_for(problem.head_dim, widths), width_for(problem.head_dim_v, widths)


def widths_of(problem: Problem) -> tuple[int, int]:
    """The key of the tables for a problem: its widths, or where those have no tiles of their own,
    the wider for both."""
    widths = widths_for(problem)
    return widths if widths in HOPPER else (max(widths), max(widths))


def window_of(problem: Problem) -> Window:
    """The window; with a block mask that of its partial blocks."""
    return problem.span if problem.block_mask is None else problem.block_mask.span


def kernel_for(problem: Problem, pairs: tuple[bool, ...] = ()) -> Kernel:
    """The kernel of a problem; `pairs` as in `Scoring`."""
    if problem.block_mask is not None:
        return kernel_sparse_for(problem)
    left, right = (side is not None for side in problem.span)
    widths = widths_for(problem)
    kind = Kernel if problem.sequences is None else KernelPacked
    tiles, scoring = tiles_for(problem), scoring_of(problem, pairs)
    return kind(problem.dtype, *widths, left, right, tiles, sinks=problem.sinks, scoring=scoring)


def kernel_sparse_for(problem: Problem) -> KernelSparse:
    """The kernel of a problem with a block mask."""
    mask = problem.block_mask
    assert mask is not None
    left, right = (side is not None for side in mask.span)
    widths = widths_for(problem)
    tiles = SPARSE[(*widths_of(problem), mask.block_kv)]
    return KernelSparse(problem.dtype, *widths, left, right, tiles, mask.block_kv, mask.bits, sinks=problem.sinks)


def kernel_fp8_for(problem: Problem, block_scales: bool, transposed: bool) -> KernelFp8:
    """The FP8 kernel of a problem, with sums of two levels, but where it may have one and is faster so.

    Args:
        block_scales: whether the scales of k or v are those of blocks.
        transposed: whether v comes transposed.
    """
    left, right = problem.span
    width = width_for(problem.head_dim, FP8)
    cut = cut_fp8(problem, transposed)
    kind = KernelFp8 if problem.sequences is None else KernelFp8Packed
    return kind(
        *("e4m3", width, width, left is not None, right is not None, cut.tiles),
        *(problem.out_dtype, block_scales, transposed, cut.columns, cut.raw_stages, cut.late and transposed),
        two_level=cut is FP8[width],
        sinks=problem.sinks,
    )


def cut_fp8(problem: Problem, transposed: bool) -> TilesFp8:
    """How an FP8 problem is cut: of `ONE_LEVEL` where it may be and is faster so, else of `FP8`."""
    width = width_for(problem.head_dim, FP8)
    return (ONE_LEVEL if problem.fast_accum and transposed and width in ONE_LEVEL else FP8)[width]


def prepares(problem: Problem) -> bool:
    """Whether e4m3 V is transposed by a kernel of its own, which knows nothing of packed sequences."""
    least = cut_fp8(problem, transposed=True).prepare * max(1, problem.seqlen_k)
    return problem.sequences is None and visible_pairs(problem) >= least


def kernel_backward_for(problem: Problem) -> KernelBackward:
    """The backward kernel of a problem."""
    left, right = (side is not None for side in window_of(problem))
    widths = widths_backward(problem)
    kind = KernelBackward
    if in_pairs(problem):
        kind = KernelBackwardPairs
    elif has_all_keys(problem):
        kind = KernelBackwardAllKeys
    elif (model := by_head(problem)) and model.pays:
        kind = KernelBackwardByHead
    tiles = PAIRS[widths] if kind is KernelBackwardPairs else BACKWARD[widths]
    ordered = problem.deterministic and kind is KernelBackward  # others have one order, or are not asked for it
    how = (problem.dtype, *widths, left, right, ordered, tiles)
    split, scoring, mask = splits_for(problem) > 1, scoring_of(problem, gradient=True), problem.block_mask
    if mask is not None:
        return KernelBackwardSparse(*how, mask.block_kv, mask.bits, split_queries=split)
    return (kind if problem.sequences is None else KernelBackwardPacked)(*how, split_queries=split, scoring=scoring)


def in_pairs(problem: Problem) -> bool:
    """Whether thread blocks of the backward pass work in pairs: of dense tensors, in any order of sums, where it pays.
    Of an odd number of blocks the last has a partner without keys."""
    p, widths = problem, widths_backward(problem)
    plain = p.block_mask is None and p.sequences is None and not p.deterministic
    return plain and widths in PAIRS and p.seqlen_k >= PAIRS_FROM[widths][p.span != (None, None)]


def has_all_keys(problem: Problem) -> bool:
    """Whether a tile of the backward pass has all keys, and walks every query: of dense tensors."""
    p, tiles = problem, BACKWARD[widths_backward(problem)]
    return every_query_sees(p) and 0 < p.seqlen_k <= tiles.block_kv and not tiles.by_gradient


def every_query_sees(problem: Problem) -> bool:
    """Whether tensors are dense and each query sees a key: no tile would store dQ of one that sees none."""
    p = problem
    return p.block_mask is None and not p.by_lengths and not p.blind_rows


@dataclass(frozen=True)
class ByHead:
    """What a backward pass takes less and more, in microseconds by a model, where a thread block has all tiles of a
    head.

    Attributes:
        saved: zeros for the sums of dQ, and their rounding.
        idle: multiprocessors share out heads less evenly than tiles.
        again: what the heads under way read and add to once more, tile by tile, and memory brings, as L2 no longer has
            it.
    """

    saved: float
    idle: float
    again: float

    @property
    def pays(self) -> bool:
        """Whether it takes less time."""
        return self.idle + self.again < self.saved


@lru_cache(maxsize=1024)
def by_head(problem: Problem) -> ByHead | None:
    """Of dense tensors with a key/value head for each query head, all of whose queries its first keys see. None of
    others, where a tile has all keys, and where tiles share out a head's queries."""
    p, widths = problem, widths_backward(problem)
    tiles, at_once, (left, right) = BACKWARD[widths], MULTIPROCESSORS[90], window_of(problem)
    if left is not None or p.heads != p.heads_kv or tiles.by_gradient or not every_query_sees(p):
        return None
    heads, blocks, steps = p.batch * p.heads, cdiv(p.seqlen_k, tiles.block_kv), cdiv(p.seqlen_q, tiles.block_q)
    if blocks < 2 or not steps or not heads or splits_for(p) > 1:
        return None
    mean = steps if right is None else min(steps, _steps_of_a_tile(p, tiles, blocks))
    of_head = blocks * (mean + TILE_STEPS)
    apart = math.ceil(heads * blocks / at_once) * (steps + TILE_STEPS)
    if right is not None:  # as in `splits_for`
        apart = max(steps + TILE_STEPS, heads / at_once * of_head)
    sums, read = p.seqlen_q * widths[0] * BYTES["fp32"], p.seqlen_q * sum(widths) * BYTES[p.dtype]
    missed = max(0.0, 1 - KEPT_BYTES / (min(heads, at_once) * mean / steps * (read + sums)))
    again = missed * heads * (blocks * mean / steps - 1) * (read + 2 * sums)
    return ByHead(
        saved=2 * heads * sums / BYTES_PER_US,
        idle=(math.ceil(heads / at_once) * of_head - apart) * _step_us(tiles, widths),
        again=UNCOVERED * again / BYTES_PER_US,
    )


def _steps_of_a_tile(problem: Problem, tiles: TilesBackward, blocks: int) -> float:
    """Of a head, in the mean, where some tiles have fewer than others; some pairs of a step are not visible."""
    return visible_pairs(problem) / (blocks * tiles.block_kv * tiles.block_q) + 1


def _step_us(tiles: TilesBackward, widths: tuple[int, int]) -> float:
    return 5 * tiles.block_q * tiles.block_kv * sum(widths) / FLOPS_PER_US


@lru_cache(maxsize=1024)
def splits_for(problem: Problem) -> int:
    """Over how many tiles the queries of a key/value head are split in the backward pass. Where it has several query
    heads, each tile has some of them: the number is a divisor of theirs, or, where that is a prime and there is no
    block mask, of one more, so that the last tile has a head less. Where it has one, tiles share out its blocks of
    queries, if all see all keys.

    Tiles are blocks of keys, each with all queries that see them. Where these are few, or the longest is longer than
    its share, multiprocessors are idle; split, each tile leaves its part of dK and dV in memory, and reads keys
    and values of its own. What takes least time by this model is taken. Packed sequences may not be split by how many
    rows there are where their bits must not depend on that.
    """
    p, group = problem, problem.heads // problem.heads_kv
    if p.sequences is not None and p.deterministic:
        return 1
    if not p.seqlen_k or p.sequences == 0:  # no tile has a step
        return 1
    if group == 1 and (p.sequences is not None or p.block_mask is not None or p.span != (None, None)):
        return 1
    widths = widths_backward(p)
    if p.block_mask is not None and widths in UNSPLIT_WITH_A_MASK:
        return 1
    tiles = BACKWARD[widths]
    blocks, batch = cdiv(p.seqlen_k, tiles.block_kv), p.batch
    longest = mean = cdiv(p.seqlen_q, tiles.block_q)  # steps of a head
    left, right = window_of(p)
    if p.sequences is not None:
        longest = mean = cdiv(longest, p.sequences)
    elif left is not None or right is not None:
        mean = _steps_of_a_tile(p, tiles, blocks)
        if left is not None and right is not None:
            longest = min(longest, cdiv(left + right + tiles.block_kv, tiles.block_q) + 1)
    uneven = mean < longest
    step_us = _step_us(tiles, widths)
    bytes_of_parts = 2 * BYTES["fp32"] * batch * p.heads_kv * blocks * tiles.block_kv * sum(widths)

    def microseconds(splits: int) -> float:
        waves = batch * p.heads_kv * blocks * splits / MULTIPROCESSORS[90]
        of_tile = longest * cdiv(group, splits) if group > 1 else cdiv(longest, splits)
        if uneven:  # tiles of all lengths fill one another's gaps
            steps = max(of_tile + TILE_STEPS, waves * (mean * group / splits + TILE_STEPS))
        else:
            steps = math.ceil(waves) * (of_tile + TILE_STEPS)
        adding = SUM_US + splits * bytes_of_parts / BYTES_PER_US if splits > 1 else 0.0
        return steps * step_us + adding

    if group == 1:
        return min(range(1, longest + 1), key=microseconds, default=1)
    ways = [splits for splits in range(1, group + 1) if group % splits == 0]
    if len(ways) == 2 and p.block_mask is None:
        ways += [splits for splits in range(2, (group + 1) // LEAST_UNEVEN + 1) if (group + 1) % splits == 0]
    return min(ways, key=microseconds)


def widths_backward(problem: Problem) -> tuple[int, int]:
    """The key of `BACKWARD` for a problem: the narrowest that holds it, but for a block mask of 64 keys those that are
    halved, whose tiles have 128, as wider ones have 64."""
    p, mask = problem, problem.block_mask

    def holds(widths: tuple[int, int], tiles: TilesBackward) -> bool:
        cuts = mask is None or not tiles.halved or mask.block_kv % tiles.block_kv == 0
        return p.head_dim <= widths[0] and p.head_dim_v <= widths[1] and cuts

    return next(widths for widths, tiles in BACKWARD.items() if holds(widths, tiles))


def tiles_for(problem: Problem) -> Tiles:
    """The tiles that take least time, by what they compute of a head and how fast. Packed sequences are cut as long
    ones, as the bits of one must not depend on how long others are."""
    speeds = speeds_of(problem)
    return min(speeds, key=lambda tiles: padded(problem, tiles) / speeds[tiles])


def speeds_of(problem: Problem) -> dict[Tiles, float]:
    """Tiles that may be a problem's, and the speed of each beside the first's."""
    widths = widths_of(problem)
    first, others = HOPPER[widths], OTHERS.get(widths, {}) if problem.sequences is None else {}
    cut = widths[0] % 32 and problem.head_dim % 16
    return {first: 1.0} | {
        tiles: speed * CUT_SECTORS if cut and tiles.consumers < first.consumers else speed
        for tiles, speed in others.items()
    }


def padded(problem: Problem, tiles: Tiles) -> float:
    """Queries of a head times the keys that each is computed with, as full tiles and blocks have them."""
    p, pack = problem, pack_gqa_for(problem, tiles.block_q)
    queries = cdiv(p.seqlen_q << pack, tiles.block_q) * tiles.block_q / (1 << pack)
    reach = [side for side in p.span if side is not None]
    keys = min(p.seqlen_k, sum(reach) + (tiles.block_q >> pack)) if len(reach) == 2 else p.seqlen_k
    return queries * cdiv(keys, tiles.block_kv) * tiles.block_kv


def pack_gqa_for(problem: Problem, block_q: int) -> int:
    """Log2 of how many query heads of one key/value head share a tile.

    Packed heads read K and V once, and fill tiles that a short sequence of queries would leave empty. It pays where it
    saves a tenth of the tiles; otherwise it only spoils the order in which tiles reuse L2. With a block mask a tile is
    a row of it, and one head's. Of packed sequences, whose lengths this may not depend on, all are packed that can be:
    short ones fill tiles so.
    """
    if problem.block_mask is not None:
        return 0
    group = problem.heads // problem.heads_kv
    pack = min((group & -group).bit_length() - 1, WARPGROUP_ROWS.bit_length() - 1)  # the largest power of two in both
    if problem.sequences is not None:
        return pack
    apart, packed = (cdiv(problem.seqlen_q << p, block_q) << pack - p for p in (0, pack))
    return pack if packed <= 0.9 * apart else 0
