"""Method `halo`: of packed sequences a rank gets only those keys of others that its sequences may reach.

A sequence that lies within a chunk of a rank's rows needs no other rank. What is left are sequences across a chunk's
first border, and without a causal mask across its last: one each. None is longer than `max_seqlen_q`, so what such a
sequence has of the chunk, an *edge*, lies within `max_seqlen_q - 1` rows of the border, and its keys that are elsewhere
within as many on the other side, or a window's left side where that is less.

1. The keys and values beyond each border set out from whoever has them, point to point.
2. Meanwhile: a call of `attention` of all of the rank's own rows that are of no sequence across a border.
3. A call of each edge, with its keys, [halo | own] or [own | halo]. A sequence's last query at hand sees its last key
   at hand where the mask is causal, and all of them where there is none. A row is of one call: nothing is merged.

Backward the edges come first, and while their dK and dV go home the rank's own rows are worked on. Shares are added in
the order of the ranks. The edges' keys are kept for it.

How far edges reach is known without a look at the lengths, which lie on the device; which rows are of which call is
said there, by `cu_seqlens_q` and `cu_seqlens_k` of each. Of a sequence across a border that is longer than was said
keys may be missing, and so its rows are made NaN; gradients of its rows before that border lack theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashzoo import attention
from flashzoo.integers import cdiv
from flashzoo.parallel.exchange import Works, ahead, met, moved
from flashzoo.parallel.groups import Ranks
from flashzoo.parallel.layout import numbers_of, owner_of
from flashzoo.parallel.parts import (
    Given,
    Sum,
    one_behind_the_other,
    parted,
    rows,
    side_by_side,
    sum_dtype,
    sum_of_sinks,
)
from flashzoo.parallel.pieces import Band, Span, cut

Move = tuple[int, Span, Span]
"""Of which rank (or to which), from which rows, and where to."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a sequence across a border of a chunk may lie.

    Attributes:
        chunk: rows of the whole.
        border: the first of them, or the one behind the last.
        own: where they lie among this rank's rows.
        queries: which of them the sequence may have.
        keys: which rows of the whole these may see.
        at: where the keys lie among those of all its edges.
    """

    chunk: Span
    border: int
    own: Span
    queries: Span
    keys: Span
    at: Span

    @property
    def at_first(self) -> bool:
        """It is at the first border of the chunk, not at its last."""
        return self.border == self.chunk[0]

    @property
    def has_queries(self) -> bool:
        """False where sequences of at most one row are across no border."""
        return self.queries[0] < self.queries[1]

    @property
    def rows(self) -> Span:
        """Where the queries lie among this rank's rows."""
        moved = self.own[0] - self.chunk[0]
        return self.queries[0] + moved, self.queries[1] + moved


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank sends, gets and calls.

    Attributes:
        chunks: of each chunk the rows of the whole that it has; none are left out but padding.
        edges: those of all chunks.
        own: from which rows of the shard to which of the edges' keys.
        gets: from which rank, from which rows of its shard, to which of the edges' keys.
        gives: to which rank, from which rows of this shard, to which of its edges' keys.
    """

    chunks: tuple[Span, ...]
    edges: tuple[Edge, ...]
    own: tuple[tuple[Span, Span], ...]
    gets: tuple[Move, ...]
    gives: tuple[Move, ...]

    @property
    def at_hand(self) -> int:
        """Rows of the edges' keys."""
        return self.edges[-1].at[1] if self.edges else 0

    @property
    def received(self) -> int:
        """How many of these come from other ranks."""
        return sum(end - first for _, _, (first, end) in self.gets)


def reach(longest: int, band: Band) -> tuple[int, int]:
    """How many rows before a chunk and behind it its queries may see, in sequences of at most so many rows."""
    left, right = band
    most = max(longest - 1, 0)
    return (most if left is None else min(most, left)), (0 if right == 0 else most)


def edges_of(chunks: Sequence[Span], whole: int, longest: int, band: Band) -> Iterator[Edge]:
    """Those of a rank's chunks, in a whole of so many rows. One without queries tells of a sequence that is longer than
    was said, too."""
    (before, behind), most = reach(longest, band), max(longest - 1, 0)
    row, at = 0, 0
    for a, b in chunks:
        found = []
        if 0 < a < b:
            end = min(b, a + most)
            found.append((a, (a, end), (max(0, a - before), min(whole, a + most) if behind else end)))
        if a < b < whole and band[1] != 0:
            first = max(a, b - most)
            found.append((b, (first, b), (first, min(whole, b + behind))))
        for border, queries, keys in found:
            end = at + keys[1] - keys[0]
            yield Edge((a, b), border, (row, row + b - a), queries, keys, (at, end))
            at = end
        row += b - a


@lru_cache(maxsize=1024)
def planned(rank: int, size: int, step: int, chunks: int, whole: int, longest: int, band: Band) -> Plan:
    """What a rank does whose chunks have so many rows each, of a whole that has so many, and behind them padding."""

    def chunk(number: int) -> Span:
        return cut((number * step, (number + 1) * step), whole)

    def edges(of: int) -> tuple[Edge, ...]:
        return tuple(edges_of([chunk(number) for number in numbers_of(of, size, chunks)], whole, longest, band))

    def moves(to: int) -> Iterator[Move]:
        """Who has what the keys of a rank's edges are made of, from where to where."""
        for edge in edges(to):
            first, end = edge.keys
            for number in range(first // step, cdiv(end, step)) if first < end else ():
                a, b = chunk(number)
                lo, hi, at = max(a, first), min(b, end), edge.at[0] - first
                other = owner_of(number, size)
                begin = numbers_of(other, size, chunks).index(number) * step - a
                yield other, (begin + lo, begin + hi), (at + lo, at + hi)

    gives = [(to, src, into) for to in range(size) if to != rank for other, src, into in moves(to) if other == rank]
    return Plan(
        tuple(map(chunk, numbers_of(rank, size, chunks))),
        edges(rank),
        tuple((src, into) for other, src, into in moves(rank) if other == rank),
        tuple(move for move in moves(rank) if move[0] != rank),
        tuple(gives),
    )


class Across(NamedTuple):
    """What of an edge is of the sequence across its border, on the device.

    Attributes:
        cu_seqlens: of the edge's call, which has queries of this sequence alone; as `Whose.cu_seqlens`.
        queries: which of the edge's are its own: bool `(rows,)`.
        lost: which rows of the chunk, where it is longer than was said: bool `(rows,)`.
    """

    cu_seqlens: Mapping[str, Any]
    queries: Tensor
    lost: Tensor


class Whose(NamedTuple):
    """Of which call a rank's rows are, on the device.

    Attributes:
        cu_seqlens: `cu_seqlens_q` and `cu_seqlens_k` of the call of its own rows, without sequences across borders.
        across: these, of each edge.
    """

    cu_seqlens: Mapping[str, Any]
    across: tuple[Across, ...]


def whose(cu_seqlens: Tensor, plan: Plan, longest: int) -> Whose:
    """Made from the `cu_seqlens_q` of the whole, at which no host looks."""
    of_q, of_k, across, first_row = [], [], [], 0
    for chunk in plan.chunks:
        mine = _within(cu_seqlens, chunk)
        for edge in (edge for edge in plan.edges if edge.chunk == chunk):
            span = _across(cu_seqlens, edge)
            inside, row = _within(span, chunk), torch.arange(chunk[1] - chunk[0], device=cu_seqlens.device)
            if edge.at_first:
                has, mine = row < inside[1], mine.maximum(inside[1])
            else:
                has, mine = row >= inside[0], mine.minimum(inside[0])
            of_call = {"cu_seqlens_q": _within(span, edge.queries), "cu_seqlens_k": _within(span, edge.keys)}
            first, end = edge.queries
            across.append(Across(of_call, has[first - chunk[0] : end - chunk[0]], has & (span[1] - span[0] > longest)))
        mine = mine + first_row if first_row else mine
        # Between two chunks there are queries without keys, and then keys without queries.
        of_q += [mine[:1], mine] if of_q else [mine]
        of_k += [of_k[-1][-1:], mine] if of_k else [mine]
        first_row += chunk[1] - chunk[0]
    return Whose(
        {"cu_seqlens_q": one_behind_the_other(of_q, 0), "cu_seqlens_k": one_behind_the_other(of_k, 0)}, tuple(across)
    )


def _within(at: Tensor, span: Span) -> Tensor:
    """Where rows of the whole lie in a span of it, or at which of its ends."""
    return (at - span[0]).clamp_(0, span[1] - span[0])


def _across(cu_seqlens: Tensor, edge: Edge) -> Tensor:
    """First row and end of the sequence across a border; where there is none, of one without rows on the chunk's side,
    whose keys nobody sees."""
    sequences = (cu_seqlens if len(cu_seqlens) > 1 else cu_seqlens.expand(2)).unfold(0, 2, 1)
    if edge.at_first:  # the last one that begins before it
        return torch.where(sequences[:, :1] < edge.border, sequences, 0).amax(0)
    # the first one that ends behind it; one that is across both of a chunk's borders is of the first edge
    found = torch.where(sequences[:, 1:] > edge.border, sequences, torch.iinfo(sequences.dtype).max).amin(0)
    return torch.where(found[:1] < edge.chunk[0], edge.border, found)


def attend(
    ranks: Ranks, plan: Plan, longest: int, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows but padding, from its q, k and v of these, `(1, rows, heads, head_dim)`.

    Args:
        longest: no sequence has more rows.
        options: those of the call of the whole, version among them.
    """
    how = {name: x for name, x in options.items() if "seqlen" not in name and name != "sinks"}
    given = plan, longest, options["cu_seqlens_q"], how
    return _Halo.apply(ranks, *given, q, k, v, options.get("sinks"))  # pyright: ignore[reportReturnType]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, plan: Plan, longest: int, cu_seqlens: Tensor, how: Mapping[str, Any],
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    ):  # fmt: skip
        met(ranks, k)
        keys = k.new_empty((1, plan.at_hand, k.shape[2:].numel() + v.shape[2:].numel()))
        gives = [(to, side_by_side(rows(k, src), rows(v, src))) for to, src, _ in plan.gives]
        works = moved(gives, [(of, rows(keys, place)) for of, _, place in plan.gets], ranks)
        of = whose(cu_seqlens, plan, longest)
        if not plan.edges:  # otherwise that was some 20 kernels for each, which are as good
            ahead(k)
        options: dict[str, Any] = {**how, "sinks": sinks, "return_lse": True}
        out, lse = attention(q, k, v, **options, **of.cu_seqlens)
        for src, place in plan.own:
            for x, into in zip((k, v), parted(keys, k), strict=True):
                rows(into, place).copy_(rows(x, src))
        works.wait()
        for edge, across in zip(plan.edges, of.across, strict=True):
            if edge.has_queries:
                found = attention(rows(q, edge.rows), *parted(rows(keys, edge.at), k), **options, **across.cu_seqlens)
                # Each row is of no sequence in at least one of the two calls: there out is 0, and lse -inf or the sink,
                # below which no row's is.
                rows(out, edge.rows).add_(found[0])
                torch.maximum(of_rows := lse[:, :, slice(*edge.rows)], found[1], out=of_rows)
            rows(out, edge.own)[..., 0].masked_fill_(across.lost[:, None], nan)
            lse[:, :, slice(*edge.own)].masked_fill_(across.lost, nan)
        ctx.save_for_backward(q, k, v, out, lse, sinks, keys)
        ctx.ranks, ctx.plan, ctx.of, ctx.how = ranks, plan, of, how
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, sinks, keys = ctx.saved_tensors
        plan, of, how = ctx.plan, ctx.of, {**ctx.how, "sinks": sinks}
        given = Given(torch.zeros_like(out) if dout is None else dout, dlse, q, out, lse)
        own = given if sinks is None else given._replace(lse=lse.clone())
        of_edges, dsinks = [], []
        for edge, across in zip(plan.edges, of.across, strict=True):
            if edge.has_queries:
                part = given.of(edge.rows)
                if sinks is not None:  # whose gradient is a sum over the rows of a call, and each is of one
                    part = part._replace(lse=part.lse.masked_fill(~across.queries, -inf))
                    rows(own.lse.mT, edge.rows).masked_fill_(across.queries[:, None], -inf)
                dq, dk, dv, *more = part.backward(*parted(rows(keys, edge.at), k), **how, **across.cu_seqlens)
                of_edges.append((edge, dq, dk, dv))
                dsinks += more
        of_keys = [one_behind_the_other(x, 1) for x in list(zip(*of_edges, strict=True))[2:]]
        came, works = _sent_home(ctx.ranks, plan, keys, of_keys)
        dq, dk, dv, *more = own.backward(k, v, **how, **of.cu_seqlens)
        for edge, share, *_ in of_edges:
            rows(dq, edge.rows).add_(share)
        every = (0, k.shape[1])
        wide = sum_dtype([every, *(src for src, _ in plan.own), *(src for _, src, _ in plan.gives)], k.dtype)
        sums = [Sum(x.to(wide), [every]) for x in (dk, dv)]
        for total, x in zip(sums, of_keys, strict=False):
            for src, place in plan.own:
                total.add(src, rows(x, place))
        works.wait()
        for (_, src, _), share in zip(plan.gives, came, strict=True):
            for total, x in zip(sums, parted(share, k), strict=True):
                total.add(src, x)
        dk, dv = (total.whole().to(k.dtype) for total in sums)
        return None, None, None, None, None, dq, dk, dv, sum_of_sinks([*dsinks, *more], sinks)


def _sent_home(ranks: Ranks, plan: Plan, like: Tensor, of_keys: Sequence[Tensor]) -> tuple[list[Tensor], Works]:
    """Others' shares of the gradients of this rank's keys and values, for each of `gives`, on their way here; this
    rank's are sent to whose they are of. Rows are as those of `like`, both side by side."""
    came = [like.new_empty((1, end - first, like.shape[2])) for _, (first, end), _ in plan.gives]
    gives = [(of, side_by_side(*(rows(x, place) for x in of_keys))) for of, _, place in plan.gets]
    works = moved(gives, [(to, share) for (to, _, _), share in zip(plan.gives, came, strict=True)], ranks)
    ahead(like)
    return came, works
