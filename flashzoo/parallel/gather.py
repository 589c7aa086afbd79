"""Method `gather`: every rank gets all keys and values, while it works on its own.

1. Keys and values set out for all ranks, of zigzag's two chunks a rank each by itself, into one buffer of slots.
2. Meanwhile each chunk of queries sees the keys of its own: the blocks on the diagonal.
3. Then the rest. The slots lie as they come, [2P-1 .. P | 0 .. P-1] in zigzag, and of P ranks chunk r sees those of
   [P, P+r) and chunk 2P-1-r those of [r+1, 2P): two calls without a mask, 2P-1 chunks of keys on every rank.
4. What a row has of both is merged through LSE.

Backward the keys and values set out again, they are not kept. Each call gives its share of dQ, dK and dV from the LSE
and the O of the whole. While keys and values come, the first chunk's block on the diagonal is worked on; while shares
of dK and dV go home, the second's. They go all-to-all, rounded once, and are summed there in float32 in the order of
the ranks: a reduce-scatter with the bytes of 16 bits and the sum of 32.

Windows make other calls of step 3 (`pieces`). Packed sequences have slots in the order of the whole, one lot for all.
Where there is no band at all the order of rows means nothing, so a rank's rows are one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashzoo.parallel.exchange import ahead, gathered, swapped
from flashzoo.parallel.groups import Ranks
from flashzoo.parallel.layout import numbers_of
from flashzoo.parallel.parts import (
    Given,
    How,
    Sum,
    backward,
    forward,
    join,
    parted,
    side_by_side,
    sum_dtype,
    sum_of_sinks,
)
from flashzoo.parallel.pieces import NO_BAND, Band, Piece, of_own, pieces


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of one rank.

    Attributes:
        chunks: of this rank's rows; each is a slot among those that come in one collective.
        natural: slots are brought into the order of the whole.
        own: a call for each chunk with the keys of its own; none where keys can't be parted.
        rest: the calls with all slots.
    """

    chunks: int
    natural: bool
    own: tuple[Piece, ...]
    rest: tuple[Piece, ...]


@lru_cache(maxsize=1024)
def planned(
    rank: int, size: int, rows_q: int, rows_k: int, chunks: int, band: Band, packed: bool, whole: tuple[int, int]
) -> Plan:
    """The calls of a rank whose shard has so many rows, in so many chunks; the band is the whole's, which has so many
    queries and keys, and behind them padding."""
    if band == NO_BAND and not packed and whole == (rows_q * size, rows_k * size):
        chunks = 1
    step_q, step_k = rows_q // chunks, rows_k // chunks
    mine = numbers_of(rank, size, chunks)
    queries = [(number * step_q, (number + 1) * step_q) for number in mine]
    if packed and band[0] is not None:  # by how much a window is moved differs from sequence to sequence
        ends = [min(end, whole[0]) for _, end in queries]
        calls = [
            Piece((i * step_q, i * step_q + end - first), (0, end), band, (first, end), (0, end))
            for i, ((first, _), end) in enumerate(zip(queries, ends, strict=True))
            if first < end
        ]
        return Plan(chunks, True, (), tuple(calls))
    if packed:
        slots = list(range(chunks * size))
    else:
        slots = [numbers_of(other, size, chunks)[lot] for lot in reversed(range(chunks)) for other in range(size)]
    own = of_own(queries, [(number * step_k, (number + 1) * step_k) for number in mine], band, whole)
    spans = [(slot * step_k, (slot + 1) * step_k) for slot in slots]
    rest = pieces(queries, spans, band, whole=whole, but=[slots.index(number) for number in mine])
    return Plan(chunks, packed, own, rest)


class _Slots:
    """Everyone's keys and values, on their way here until `arrived`."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, ranks: Ranks) -> None:
        self.plan, self.ranks, self.k = plan, ranks, k
        rows = side_by_side(k, v)
        lots = [lot.contiguous() for lot in rows.unflatten(1, (plan.chunks, -1)).unbind(1)[::-1]]
        self.buffer = rows.new_empty((plan.chunks, ranks.size, *lots[0].shape))
        _, self.works = gathered(lots, ranks, self.buffer.unbind())
        ahead(rows)

    def arrived(self) -> tuple[Tensor, Tensor]:
        """All keys and values, `(batch, seqlen, heads, head_dim)` in the order of the slots."""
        self.works.wait()
        lots = _turned(self.buffer) if self.plan.natural else self.buffer
        return parted(lots.flatten(0, 1).transpose(0, 1).flatten(1, 2), self.k)


def _turned(lots: Tensor) -> Tensor:
    """`(chunks, ranks, ...)` from the order in which slots come to that of the whole, or back."""
    return lots if len(lots) == 1 else torch.stack((lots[1], lots[0].flip(0)))


def _turned_back(lots: Tensor) -> Tensor:
    return lots if len(lots) == 1 else torch.stack((lots[1].flip(0), lots[0]))


class _Shares:
    """This rank's shares of everyone's dK and dV, in the order of its slots, and then the sums of all shares of its
    own."""

    def __init__(self, slots: _Slots, dtype: torch.dtype) -> None:
        chunks, size, batch, seqlen, width = slots.buffer.shape
        self.slots, self.dtype = slots, slots.buffer.dtype
        self.rows = slots.buffer.new_empty((batch, chunks * size * seqlen, width), dtype=dtype)
        self.sums = [Sum(x) for x in parted(self.rows, slots.k)]

    def add(self, piece: Piece, dk: Tensor, dv: Tensor) -> None:
        """One call's."""
        for total, share in zip(self.sums, (dk, dv), strict=True):
            total.add(piece.k, share)

    def send(self) -> None:
        """Each to whose keys they are of."""
        plan, ranks = self.slots.plan, self.slots.ranks
        for total in self.sums:
            total.whole()
        lots = self.rows.to(self.dtype).unflatten(1, (plan.chunks, ranks.size, -1)).movedim(0, 2)
        lots = (_turned_back(lots) if plan.natural else lots).contiguous()
        self.came = torch.empty_like(lots)
        self.works = swapped([(lot.unbind(), into.unbind()) for lot, into in zip(lots, self.came, strict=True)], ranks)
        ahead(lots)

    def home(self) -> tuple[Tensor, Tensor]:
        """The sums, `(batch, seqlen of a shard, heads, head_dim)`, in float32 or float64."""
        self.works.wait()
        wide = torch.promote_types(self.dtype, torch.float32)
        sums = self.came.sum(1, dtype=wide).flip(0)  # lots lie last chunk first
        return parted(sums.transpose(0, 1).flatten(1, 2), self.slots.k)


class Gather(torch.autograd.Function):
    """out and lse of this rank's rows, from its q, k and v `(batch, seqlen, heads, head_dim)`."""

    @staticmethod
    def forward(ctx: Any, how: How, ranks: Ranks, plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None):
        slots = _Slots(k, v, plan, ranks)
        first, later = (sinks, None) if plan.own else (None, sinks)  # each row has them once
        found = [forward(q, k, v, piece, how, first) for piece in plan.own]
        every = slots.arrived()
        found += [forward(q, *every, piece, how, later) for piece in plan.rest]
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.promote_types(q.dtype, torch.float32))
        join(found, out, lse)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.how, ctx.ranks, ctx.plan = how, ranks, plan
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        how, plan = ctx.how, ctx.plan
        slots = _Slots(k, v, plan, ctx.ranks)
        given = Given(torch.zeros_like(out) if dout is None else dout, dlse, q, out, lse)
        first, later = (sinks, None) if plan.own else (None, sinks)
        dq = Sum(torch.empty_like(q, dtype=sum_dtype([piece.q for piece in (*plan.own, *plan.rest)], q.dtype)))
        own_k, own_v, of_sinks = Sum(torch.empty_like(k)), Sum(torch.empty_like(v)), []

        def on_diagonal(piece: Piece) -> None:
            of_q, of_k, of_v, *more = backward(given, k, v, piece, how, first)
            for total, span, share in ((dq, piece.q, of_q), (own_k, piece.k, of_k), (own_v, piece.k, of_v)):
                total.add(span, share)
            of_sinks.extend(more)

        for piece in plan.own[:1]:
            on_diagonal(piece)
        every = slots.arrived()
        shares = _Shares(slots, sum_dtype([piece.k for piece in plan.rest], k.dtype))
        for piece in plan.rest:
            of_q, of_k, of_v, *more = backward(given, *every, piece, how, later)
            dq.add(piece.q, of_q)
            shares.add(piece, of_k, of_v)
            of_sinks.extend(more)
        shares.send()
        for piece in plan.own[1:]:
            on_diagonal(piece)
        dk, dv = (own.whole() + share for own, share in zip((own_k, own_v), shares.home(), strict=True))
        dsinks = sum_of_sinks(of_sinks, sinks)
        return None, None, None, dq.whole().to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks
