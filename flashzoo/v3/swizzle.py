"""How many heads' tiles are interleaved under a causal mask, where a head's tiles are of different lengths.

Tiles of so many heads begin in turns, the longest of each first; when all of theirs have begun, those of as many
others. Of few heads L2 keeps operands from one tile to the next. Of too few the longest tiles of the last begin when
other multiprocessors have nothing left.

In the backward pass a tile of one query head begins at its diagonal: tiles that begin together begin at different
blocks, and add to different sums. One of a group of heads reads the queries of them all, of which L2 keeps little.
There tiles that run together read the same at the same time. As many heads are interleaved as have a tile for each
multiprocessor: a wave. All begin at the last block of queries, which all see, and go back block by block, each until
its diagonal. When one ends there, its multiprocessor begins a tile of the next wave, the longest when the first ones
end. Those go the other way, each from its diagonal on, where by then those are that began before it: one tile of 64
blocks and one of 2 take as long as one of 62 and one of 4. When they all reach the last block the next wave begins
there. Packed sequences begin with all heads of one and have waves too (`packed.py`).
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from itertools import count, takewhile

from flashzoo.gpu import MULTIPROCESSORS
from flashzoo.integers import cdiv, next_power_of_2

SWIZZLE_BYTES = 32 << 20
"""Of operands of the heads that are interleaved: more do not stay in L2 from one tile to the next."""
MOST, TILES = 16, 128
"""Heads that are interleaved where operands of more would stay, or more than these if they have not so many tiles."""
TWICE_AS_MANY = 0.03
"""What they cost, of the time, on an H200."""
FEW_WAVES, TWO_WAVES = 16, 2
"""With more tiles for each multiprocessor, how they end is no matter; with no more, all heads are interleaved in the
forward pass."""
MORE_THAN_A_WAVE = 1.1
"""Tiles for each multiprocessor that may still count as begun together."""
BESIDE = 1.5
"""Of a tile's time what is not of its blocks, in blocks."""


def swizzle_of(blocks: int, heads: int, bytes_of_head: int, group: int = 1) -> int:
    """How many heads in the forward pass, a power of two.

    Args:
        blocks: tiles of a head, of which the n-th to begin is as long as n others follow.
        heads: of all batches.
        bytes_of_head: what each group of `group` heads reads again and again.
    """
    if blocks * heads <= TWO_WAVES * MULTIPROCESSORS[90]:
        return next_power_of_2(heads, 2)
    kept = next_power_of_2(min(MOST, SWIZZLE_BYTES // max(1, bytes_of_head) * group) + 1) // 2
    return doubled(blocks, heads, max(2, kept, next_power_of_2(cdiv(TILES, max(1, blocks)))))[1]


def swizzle_backward(blocks: int, heads: int, group: int) -> tuple[int, int]:
    """How many heads in the backward pass, two at least, and how many tiles are a wave: those of so many heads as have
    about one for each multiprocessor, or, of one that has more, as many. Where a tile has one query head, and not a
    group of them, there are no waves: 0."""
    interleaved, wave = _heads_of_a_wave(blocks, heads)
    return interleaved, wave if group > 1 else 0


def _heads_of_a_wave(blocks: int, heads: int) -> tuple[int, int]:
    """The same, whatever a tile has."""
    at_once, blocks = MULTIPROCESSORS[90], max(1, blocks)
    if blocks > at_once:
        return doubled(blocks, heads, 2)[1], at_once
    fewer, more = at_once // blocks, cdiv(at_once, blocks)
    ways = [fewer, more] if more * blocks <= MORE_THAN_A_WAVE * at_once else [fewer]
    (_, interleaved), of_wave = min(((doubled(blocks, heads, max(2, n)), n) for n in ways), key=lambda way: way[0][0])
    return interleaved, of_wave * blocks if interleaved == max(2, of_wave) else at_once


@lru_cache(maxsize=1024)
def doubled(blocks: int, heads: int, least: int) -> tuple[float, int]:
    """So many heads, or twice or four times as many and so on: for which all are done first, by this model, and when,
    in steps of the first that could be. The fewest where there are many tiles."""
    waves = blocks * heads / MULTIPROCESSORS[90]
    if waves > FEW_WAVES:
        return 1.0, least
    ideal = max(blocks + BESIDE, waves * ((blocks + 1) / 2 + BESIDE))
    best, found = math.inf, least
    for n in takewhile(lambda n: not n or least << n < 2 * heads, count()):
        slower = 1 + n * TWICE_AS_MANY
        if best <= slower:  # no order of tiles is better
            break
        best, found = min((best, found), (steps(blocks, heads, least << n) / ideal * slower, least << n))
    return best, found


def steps(blocks: int, heads: int, interleaved: int) -> float:
    """When the last multiprocessor is done, in blocks that a tile walks, where each takes the next tile when it ends
    one."""
    ends = [0.0] * MULTIPROCESSORS[90]
    for first in range(0, heads, interleaved):
        for length in range(blocks, 0, -1):
            for _ in range(min(interleaved, heads - first)):
                heapq.heapreplace(ends, ends[0] + length + BESIDE)
    return max(ends)
