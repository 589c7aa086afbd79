"""How many heads' tiles are interleaved under a causal mask, where a head's tiles are of different lengths.

Tiles of so many heads begin in turns, the longest of each first; when all of theirs have begun, those of as many
others. Of few heads L2 keeps operands from one tile to the next. Of too few the longest tiles of the last begin when
other multiprocessors have nothing left.
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
"""With more tiles for each multiprocessor, how they end is no matter; with no more, all heads are interleaved."""
BESIDE = 1.5
"""Of a tile's time what is not of its blocks, in blocks."""


@lru_cache(maxsize=1024)
def swizzle_of(blocks: int, heads: int, bytes_of_head: int, group: int = 1) -> int:
    """How many heads: the power of two for which all are done first, by this model.

    Args:
        blocks: tiles of a head, of which the n-th to begin is as long as n others follow.
        heads: of all batches.
        bytes_of_head: what each group of `group` heads reads again and again.
    """
    kept = next_power_of_2(min(MOST, SWIZZLE_BYTES // max(1, bytes_of_head) * group) + 1) // 2
    kept = max(2, kept, next_power_of_2(cdiv(TILES, max(1, blocks))))
    waves = blocks * heads / MULTIPROCESSORS[90]
    if waves <= TWO_WAVES:
        return next_power_of_2(heads, 2)
    if waves > FEW_WAVES:
        return kept
    least = max(blocks + BESIDE, waves * ((blocks + 1) / 2 + BESIDE))
    best, found = math.inf, kept
    for n in takewhile(lambda n: kept << n < 2 * heads, count()):
        slower = 1 + n * TWICE_AS_MANY
        if best <= least * slower:  # no order of tiles is better
            break
        best, found = min((best, found), (steps(blocks, heads, kept << n) * slower, kept << n))
    return found


def steps(blocks: int, heads: int, interleaved: int) -> float:
    """When the last multiprocessor is done, in blocks that a tile walks, where each takes the next tile when it ends
    one."""
    ends = [0.0] * MULTIPROCESSORS[90]
    for first in range(0, heads, interleaved):
        for length in range(blocks, 0, -1):
            for _ in range(min(interleaved, heads - first)):
                heapq.heapreplace(ends, ends[0] + length + BESIDE)
    return max(ends)
