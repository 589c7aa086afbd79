"""Method `ring`: keys and values travel from rank to rank, and no rank ever has more than two shards of them.

Ring attention, Liu et al. 2023, arXiv:2310.01889, with zigzag's chunks for its balance:

1. Send the keys and values at hand on to the next rank, and receive those of the rank before.
2. Meanwhile this rank's queries see those at hand.
3. Merge with what was found before, in float32, and go on with those that came, until all have been here.

Backward the same way once more: each shard of keys travels with its dK and dV, in float32, to which every rank adds its
share from the LSE and the O of the whole; one more step brings them home. It moves as much as `gather` forward and more
backward, in P - 1 steps that each end with the slower of both; what it saves is memory, O(seqlen / P).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashzoo.parallel.exchange import ahead, passed_on
from flashzoo.parallel.groups import Ranks
from flashzoo.parallel.layout import numbers_of
from flashzoo.parallel.parts import (
    Given,
    How,
    Part,
    Sum,
    backward,
    forward,
    join,
    parted,
    side_by_side,
    sum_of_sinks,
)
from flashzoo.parallel.pieces import NO_BAND, Band, Piece, of_own, pieces


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of one rank.

    Attributes:
        own: a call for each chunk of its rows with the keys of its own.
        steps: the calls with the keys of each rank: the rest of one's own, those of the rank before, and so on.
    """

    own: tuple[Piece, ...]
    steps: tuple[tuple[Piece, ...], ...]


@lru_cache(maxsize=1024)
def planned(
    rank: int, size: int, rows_q: int, rows_k: int, chunks: int, band: Band, packed: bool, whole: tuple[int, int]
) -> Plan:
    """The calls of a rank whose shard has so many rows, in so many chunks; the band is the whole's, which has so many
    queries and keys, and behind them padding."""
    if band == NO_BAND and not packed and whole == (rows_q * size, rows_k * size):
        chunks = 1
    step_q, step_k = rows_q // chunks, rows_k // chunks

    def spans(of: int, step: int) -> list[tuple[int, int]]:
        return [(number * step, (number + 1) * step) for number in numbers_of(of, size, chunks)]

    queries, steps = spans(rank, step_q), []
    own = of_own(queries, spans(rank, step_k), band, whole)
    for step in range(size):
        but = () if step else range(chunks)
        keys = spans((rank - step) % size, step_k)
        steps.append(pieces(queries, keys, band, whole=whole, but=but, in_order=packed))
    return Plan(own, tuple(steps))


def _at_hand(k: Tensor, v: Tensor, ranks: Ranks) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of one rank after another, one's own first; the next are on their way meanwhile."""
    rows = side_by_side(k, v)
    for step in range(ranks.size):
        came, works = passed_on(rows, ranks) if step < ranks.size - 1 else (rows, None)
        try:
            if works is not None:
                ahead(rows)
            yield parted(rows, k)
        finally:  # also where a call failed: what is on its way would meet the group's next
            if works is not None:
                works.wait()
        rows = came


class Ring(torch.autograd.Function):
    """out and lse of this rank's rows, from its q, k and v `(batch, seqlen, heads, head_dim)`."""

    @staticmethod
    def forward(ctx: Any, how: How, ranks: Ranks, plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None):
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=wide)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)
        for step, keys in enumerate(_at_hand(k, v, ranks)):
            found = [forward(q, *keys, piece, how) for piece in plan.steps[step]]
            if step == 0:  # beside which the first keys travel
                found = [*(forward(q, *keys, piece, how, sinks) for piece in plan.own), *found]
            else:
                found = [Part((0, q.shape[1]), out, lse), *found]
            join(found, out, lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.how, ctx.ranks, ctx.plan = how, ranks, plan
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        how, plan, ranks = ctx.how, ctx.plan, ctx.ranks
        given = Given(torch.zeros_like(out) if dout is None else dout, dlse, q, out, lse)
        dq, of_sinks, travelling = Sum(torch.empty_like(q, dtype=lse.dtype)), [], None
        for step, keys in enumerate(_at_hand(k, v, ranks)):
            shares = q.new_empty((*k.shape[:2], k.shape[2] * (k.shape[3] + v.shape[3])), dtype=lse.dtype)
            dk, dv = (Sum(x) for x in parted(shares, k))
            for piece in (*(plan.own if step == 0 else ()), *plan.steps[step]):
                with_sinks = sinks if step == 0 and piece in plan.own else None
                of_q, of_k, of_v, *more = backward(given, *keys, piece, how, with_sinks)
                for total, span, share in ((dq, piece.q, of_q), (dk, piece.k, of_k), (dv, piece.k, of_v)):
                    total.add(span, share)
                of_sinks += more
            for total in (dk, dv):
                total.whole()
            if travelling is not None:
                came, works = travelling
                works.wait()
                shares += came
            travelling = passed_on(shares, ranks)
        assert travelling is not None
        shares, works = travelling
        works.wait()
        dk, dv = parted(shares, k)
        dsinks = sum_of_sinks(of_sinks, sinks)
        return None, None, None, dq.whole().to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks
