"""What a rank's rows see of some keys, as calls of `attention` whose masks are causal, a window or none.

A *span* is `(first, end)`, rows of the whole. Query i of the whole sees the keys from i - left to i + right (there are
as many keys as queries where there is a band at all). `attention` aligns a band with the last query and the last key of
what it is handed. So of queries [a, b) and keys [c, d) those are left out that see or are seen by none of the others,
and the band is moved by b - d: what is left of it never lies wholly to one side, where no window could say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

Span = tuple[int, int]
Band = tuple["int | None", "int | None"]
NO_BAND: Band = (None, None)


@dataclass(frozen=True, slots=True)
class Piece:
    """One call.

    Attributes:
        q: its queries, as rows of this rank's shard.
        k: its keys, as rows of those that are at hand.
        band: `window_size` of the call.
        q_span, k_span: where both are in the whole; of keys that were joined, from the first's first to the last's end.
    """

    q: Span
    k: Span
    band: Band
    q_span: Span
    k_span: Span


def seen(q: Span, k: Span, band: Band) -> tuple[Span, Span, Band] | None:
    """Of queries and keys those that see or are seen, and the band as the call has it; None where there are none."""
    left, right = band
    (a, b), (c, d) = q, k
    if right is not None:
        a = max(a, c - right)
        d = min(d, b + right)
    if left is not None:
        b = min(b, d + left)
        c = max(c, a - left)
    if right is not None:  # b may be less than it was
        d = min(d, b + right)
    if a >= b or c >= d:
        return None
    moved = b - d
    if left is not None:
        left -= moved
        if left >= d - c - 1:
            left = None
    if right is not None:
        right += moved
        if right >= b - a - 1:
            right = None
    return (a, b), (c, d), (left, right)


def pieces(
    queries: Sequence[Span],
    keys: Sequence[Span],
    band: Band,
    *,
    whole: tuple[int, int],
    but: Sequence[int] = (),
    in_order: bool = False,
) -> tuple[Piece, ...]:
    """The calls by which this rank's queries see these keys, as few as they can be joined to.

    Args:
        queries: the spans of this rank's chunks, in the order of its rows.
        keys: the spans of the keys at hand, in the order in which they lie.
        band: of the whole.
        whole: how many queries and keys it has; what is behind them is padding, of no call.
        but: for each of the queries the place among keys of one that is left out; all see all where it is empty.
        in_order: what is joined lies behind one another in the whole too, as `Piece`'s spans then say.
    """
    found: list[Piece] = []
    row = 0
    for number, q in enumerate(queries):
        mine: list[Piece] = []
        at = 0
        for place, k in enumerate(keys):
            part = None if but and place == but[number] else seen(cut(q, whole[0]), cut(k, whole[1]), band)
            if part is not None:
                (a, b), (c, d), of_call = part
                rows, cols = (row + a - q[0], row + b - q[0]), (at + c - k[0], at + d - k[0])
                piece = Piece(rows, cols, of_call, (a, b), (c, d))
                mine = _with(mine, piece, in_order)
            at += k[1] - k[0]
        row += q[1] - q[0]
        for piece in mine:
            found = _with(found, piece, in_order)
    return tuple(found)


def cut(span: Span, seqlen: int) -> Span:
    """What of it is of the whole, which has so many rows."""
    return min(span[0], seqlen), min(span[1], seqlen)


def of_own(queries: Sequence[Span], keys: Sequence[Span], band: Band, whole: tuple[int, int]) -> tuple[Piece, ...]:
    """A call for each of this rank's chunks with the keys of its own, all of which see or are seen. There may be none
    of these keys where queries and keys of the whole are not as many: so every query that is no padding has a call."""
    found, row, at = [], 0, 0
    for q, k in zip(queries, keys, strict=True):
        (a, b), (c, d) = cut(q, whole[0]), cut(k, whole[1])
        if a < b:
            part = seen((a, b), (c, d), band) if c < d else ((a, b), (c, d), NO_BAND)
            assert part is not None and part[:2] == ((a, b), (c, d))
            found.append(Piece((row, row + b - a), (at, at + d - c), part[2], (a, b), (c, d)))
        row, at = row + q[1] - q[0], at + k[1] - k[0]
    return tuple(found)


def _with(found: list[Piece], piece: Piece, in_order: bool) -> list[Piece]:
    """One more, joined to the last where neither has a mask and they are of the same rows of one side
    and of neighbours of the other."""
    if found and found[-1].band == piece.band == NO_BAND:
        last = found[-1]
        if last.q == piece.q and last.k[1] == piece.k[0] and (last.k_span[1] == piece.k_span[0] or not in_order):
            k, k_span = (last.k[0], piece.k[1]), (last.k_span[0], piece.k_span[1])
            return [*found[:-1], replace(last, k=k, k_span=k_span)]
        if last.k == piece.k and last.q[1] == piece.q[0] and (last.q_span[1] == piece.q_span[0] or not in_order):
            q, q_span = (last.q[0], piece.q[1]), (last.q_span[0], piece.q_span[1])
            return [*found[:-1], replace(last, q=q, q_span=q_span)]
    return [*found, piece]


def depth(spans: Sequence[Span]) -> int:
    """How many of these the row has that most of them have."""
    return max((sum(first <= at < end for first, end in spans) for at, _ in spans), default=0)


def cuts(spans: Sequence[Span]) -> list[Span]:
    """The rows of these, cut wherever one begins or ends."""
    at = sorted({edge for span in spans for edge in span})
    return [(first, end) for first, end in pairwise(at) if any(a <= first and end <= b for a, b in spans)]
