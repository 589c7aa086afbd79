"""In which order documents are packed so that each rank's rows have as much work: `balanced`. And how long those are
that shards share: `longest_across`.

A causal document of L rows has L²/2 pairs, and shards have as many rows each, so that a rank with a long document has
more to do than others. Documents see nothing of each other: whoever packs them may put them in any order. What is here
is a greedy one:

1. The k longest lie across borders of shards, every other border first, cut where both sides have half of their work:
   at L / sqrt(2) rows.
2. The others, longest first, each go to the shard with least work that has room for them. Those for which none has lie
   across borders that are free, or move one that is not by less than half of their rows.

It is made for every k there may be, and the given order is one more. Of those that are about as even as the evenest
(`AS_EVEN`) the one is taken whose longest document across a border is the shortest: its keys are what ranks receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import sqrt
from operator import index
from typing import Any

from torch import Tensor

from flashzoo.integers import cdiv
from flashzoo.parallel.groups import size_of
from flashzoo.parallel.layout import Layout, check_layout, chunks_of

AS_EVEN = 1.04
"""The busiest rank's work over that in the evenest order, up to which a shorter halo is worth more."""


def balanced(lengths: Sequence[int], group: Any) -> list[int]:
    """The order in which to pack documents, for `layout="contiguous"` under a causal mask.

    Args:
        lengths: rows of each document.
        group: as in `attention`, or a number of ranks. All ranks get the same answer: nothing is communicated.

    Returns:
        Indices into lengths: the documents are packed `[lengths[i] for i in balanced(lengths, group)]`. The busiest
        rank has no more work than in the given order, or a twenty-fifth more where shards then share shorter documents.
        A document lies in two shards at most unless it is longer than one: where a single one is most of the work no
        order is even, and method "ulysses" is.

    Raises:
        TypeError, ValueError: a length is no whole number from 0 on, or group is none.
    """
    lengths = whole_numbers(lengths)
    ranks = size_of(group)
    ways = [[*range(len(lengths))], *(_across(lengths, ranks, k) for k in range(ranks))]
    packed = [[lengths[i] for i in way] for way in ways]
    busiest = [max(works(way, ranks)) for way in packed]
    even = [i for i, work in enumerate(busiest) if work <= AS_EVEN * min(busiest)]
    return ways[min(even, key=lambda i: (longest_across(packed[i], ranks), busiest[i]))]


def longest_across(lengths: Sequence[int], group: Any, layout: Layout = "contiguous") -> int:
    """Rows of the longest document that lies in more than one chunk: `max_across` of `attention`.

    Args:
        lengths: rows of each document, in the order in which they are packed. They are all rows of the whole.
        group, layout: as in `attention`, or a number of ranks.

    Returns:
        0 where none does.

    Raises:
        TypeError, ValueError: a length is no whole number from 0 on, or group or layout is none.
    """
    check_layout(layout)
    lengths = whole_numbers(lengths)
    rows = max(1, cdiv(sum(lengths), size_of(group) * chunks_of(layout)))
    begins = accumulate(lengths, initial=0)
    across = (length for at, length in zip(begins, lengths, strict=False) if at // rows < (at + length - 1) // rows)
    return max(across, default=0)


def works(lengths: Sequence[int], ranks: int) -> list[float]:
    """Pairs of a query and a key that each rank's shard of packed causal documents has, L²/2 of a whole one."""
    rows, found = max(1, cdiv(sum(lengths), ranks)), [0.0] * ranks
    for begin, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        done = 0
        while done < length:
            rank = (begin + done) // rows
            end = min(length, (rank + 1) * rows - begin)
            found[rank] += (end**2 - done**2) / 2
            done = end
    return found


def whole_numbers(lengths: Sequence[int]) -> list[int]:
    """Lengths of documents. TypeError or ValueError where one is no whole number from 0 on."""
    found = []
    try:
        given = [*(lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    except TypeError:
        raise TypeError(f"lengths must be a sequence of whole numbers, got {lengths!r}") from None
    for i, length in enumerate(given):
        try:
            if isinstance(length, bool):
                raise TypeError
            found.append(index(length))
        except TypeError:
            raise TypeError(f"lengths must be whole numbers, got {length!r} at {i}") from None
        if found[-1] < 0:
            raise ValueError(f"lengths must be from 0 on, got {found[-1]} at {i}")
    return found


def _across(lengths: Sequence[int], ranks: int, most: int) -> list[int]:
    """The greedy order with so many of the longest documents across borders, or as many as have room."""
    rows = cdiv(sum(lengths), ranks)
    room, work, whole = [rows] * ranks, [0.0] * ranks, [[] for _ in range(ranks)]
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    borders, across = [*range(0, ranks - 1, 2), *range(1, ranks - 1, 2)], {}
    for rank, i in zip(borders[:most], longest, strict=False):
        length = lengths[i]
        behind = min(length - round(length / sqrt(2)), room[rank + 1])
        before = length - behind
        if before > room[rank]:
            break
        across[rank] = i, before
        for at, part, pairs in ((rank, before, before**2 / 2), (rank + 1, behind, (length**2 - before**2) / 2)):
            room[at] -= part
            work[at] += pairs
    over = []
    for i in longest[len(across) :]:
        fits = [rank for rank in range(ranks) if room[rank] >= lengths[i]]
        if not fits:
            over.append(i)
            continue
        least = min(fits, key=lambda rank: work[rank])
        whole[least].append(i)
        room[least] -= lengths[i]
        work[least] += lengths[i] ** 2 / 2
    order, packed = [], 0
    for rank in range(ranks):
        there, before = across.get(rank, (None, 0))
        order += whole[rank]
        packed += sum(lengths[i] for i in whole[rank])
        while over and packed + (lengths[over[0]] / 2 if before else 0) < (rank + 1) * rows - before:
            order.append(over.pop(0))
            packed += lengths[order[-1]]
        if there is not None:
            order.append(there)
            packed += lengths[there]
    return order + over
