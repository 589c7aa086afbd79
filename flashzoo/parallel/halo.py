"""Method `halo`: of packed sequences a rank gets, besides its own keys, only those that its sequences may reach.

No sequence is longer than `max_seqlen_q`, so what a row sees lies within `max_seqlen_q - 1` rows of it, before it and,
without a causal mask, behind it, or within a window's left side where that is less. Of each chunk of a rank's rows:

1. The keys and values of its halo set out from whoever has them, point to point, right to where they come to lie:
   [halo | the chunk | halo], one chunk behind the other.
2. Meanwhile the rank's own are copied there, and `cu_seqlens_q` is cut to what is there of each sequence.
3. One call of `attention`, which knows nothing of ranks: a sequence's last query at hand sees its last key at hand
   where the mask is causal, and all of them where there is none. Nothing is merged.

Backward the halo's dK and dV go home the same way and are added to those that were made there, in the order of the
ranks. The keys at hand are kept for it, in place of the rank's own.

How many rows a halo has is known without a look at the lengths, which lie on the device. Were a sequence longer than
was said, its first keys would be missing: so then the halo's outermost keys are made NaN, and with them what reaches
that far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashzoo import attention
from flashzoo.integers import cdiv
from flashzoo.parallel.exchange import met, moved
from flashzoo.parallel.groups import Ranks
from flashzoo.parallel.layout import numbers_of
from flashzoo.parallel.parts import Sum, rows, sum_dtype
from flashzoo.parallel.pieces import Band, Span, cut

Move = tuple[int, Span, Span]
"""Of which rank (or to which), from which rows, and where to."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank sends, gets and calls.

    Attributes:
        queries: of each chunk the rows of the whole that it has; none are left out but padding.
        keys: of each chunk the rows of the whole whose keys are at hand, one chunk's behind the other's.
        own: from which rows of the shard to which of the keys at hand.
        gets: from which rank, from which rows of its shard, to which of the keys at hand.
        gives: to which rank, from which rows of this shard, to which of its keys at hand.
        outermost: rows of the keys at hand that only a sequence longer than it may be reaches with more behind them.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    own: tuple[tuple[Span, Span], ...]
    gets: tuple[Move, ...]
    gives: tuple[Move, ...]
    outermost: tuple[int, ...]

    @property
    def at_hand(self) -> int:
        """Rows of keys."""
        return sum(end - first for first, end in self.keys)

    @property
    def received(self) -> int:
        """Rows of keys that come from other ranks."""
        return sum(end - first for _, _, (first, end) in self.gets)


def reach(longest: int, band: Band) -> tuple[int, int]:
    """How many rows before a chunk and behind it its queries may see, in sequences of at most so many rows."""
    left, right = band
    most = max(longest - 1, 0)
    return (most if left is None else min(most, left)), (0 if right == 0 else most)


@lru_cache(maxsize=1024)
def planned(rank: int, size: int, step: int, chunks: int, whole: int, longest: int, band: Band) -> Plan:
    """What a rank does whose chunks have so many rows each, of a whole that has so many, and behind them padding."""
    before, behind = reach(longest, band)

    def queries(number: int) -> Span:
        return cut((number * step, (number + 1) * step), whole)

    def keys(number: int) -> Span:
        first, end = queries(number)
        return (max(0, first - before), min(whole, end + behind)) if first < end else (first, first)

    def moves(to: int) -> Iterator[Move]:
        """Who has what the keys at hand of a rank are made of, from where to where."""
        at = 0
        for first, end in map(keys, numbers_of(to, size, chunks)):
            for number in range(first // step, cdiv(end, step)) if first < end else ():
                a, b = queries(number)
                lo, hi = max(a, first), min(b, end)
                other = number if number < size else 2 * size - 1 - number
                begin = numbers_of(other, size, chunks).index(number) * step - a
                yield other, (begin + lo, begin + hi), (at + lo - first, at + hi - first)
            at += end - first

    numbers = numbers_of(rank, size, chunks)
    mine = tuple(map(keys, numbers))
    gives = [(to, src, into) for to in range(size) if to != rank for other, src, into in moves(to) if other == rank]
    outermost = []
    for at, (first, end) in zip(accumulate((b - a for a, b in mine), initial=0), mine, strict=False):
        if first < end:
            outermost += [at] * (first > 0 and before == max(longest - 1, 0))
            outermost += [at + end - first - 1] * (end < whole and band[1] != 0)
    return Plan(
        tuple(map(queries, numbers)),
        mine,
        tuple((src, into) for other, src, into in moves(rank) if other == rank),
        tuple(move for move in moves(rank) if move[0] != rank),
        tuple(gives),
        tuple(outermost),
    )


def attend(
    ranks: Ranks, plan: Plan, longest: int, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """out and lse of this rank's rows but padding, from its q, of these, and its k and v, `(1, rows, heads, head_dim)`.

    Args:
        longest: no sequence has more rows.
        options: those of the call of the whole, version among them.
    """
    k, v, of_q, of_k = _AtHand.apply(ranks, plan, longest, options["cu_seqlens_q"], k, v)  # pyright: ignore[reportGeneralTypeIssues]
    options = {name: x for name, x in options.items() if not name.startswith("max_seqlen")}
    options |= {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
    if return_lse:
        return attention(q, k, v, return_lse=True, **options)
    return attention(q, k, v, **options), None


def at_hand(cu_seqlens: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """`cu_seqlens` of the queries and of the keys at hand.

    Of two chunks those of the second come behind those of the first, and so there is a sequence between them, of the
    first's last key to the second's first. It has no query: rows before the first sequence of all, or behind the last,
    are a chunk's first or last, and the other chunk then has none.
    """
    of_q, of_k = ([(cu_seqlens - a).clamp_(0, b - a) for a, b in spans] for spans in (plan.queries, plan.keys))
    if len(of_q) == 1:
        return of_q[0], of_k[0]
    first, second = of_q
    (a, b), _ = plan.keys
    return torch.cat((first + second[:1], second + first[-1:])), torch.cat((of_k[0], of_k[1] + (b - a)))


class _AtHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, plan: Plan, longest: int, cu_seqlens: Tensor, *kv: Tensor):
        met(ranks, kv[0])
        into = [x.new_empty((1, plan.at_hand, *x.shape[2:])) for x in kv]
        gives = [(to, rows(x, src).contiguous()) for to, src, _ in plan.gives for x in kv]
        works = moved(gives, [(of, rows(x, place)) for of, _, place in plan.gets for x in into], ranks)
        for src, place in plan.own:
            for x, y in zip(kv, into, strict=True):
                rows(y, place).copy_(rows(x, src))
        of_q, of_k = at_hand(cu_seqlens, plan)
        longer = (cu_seqlens.diff() > longest).any() if plan.outermost else cu_seqlens.new_zeros((), dtype=torch.bool)
        works.wait()
        for row in plan.outermost:
            into[0][:, row].masked_fill_(longer, torch.nan)
        ctx.ranks, ctx.plan, ctx.rows = ranks, plan, kv[0].shape[1]
        ctx.mark_non_differentiable(of_q, of_k)
        ctx.set_materialize_grads(False)
        return *into, of_q, of_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        # What has no gradient on this rank has none on the others: they make the same call.
        there = [dx for dx in gradients[:2] if dx is not None]
        found = iter(_home(ctx.ranks, ctx.plan, ctx.rows, there))
        return None, None, None, None, *(None if dx is None else next(found) for dx in gradients[:2])


def _home(ranks: Ranks, plan: Plan, seqlen: int, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Of so many rows of this rank's keys, or values, the sum of all ranks' gradients, from those of the keys at
    hand."""
    came = [[x.new_empty((1, b - a, *x.shape[2:])) for _, (a, b), _ in plan.gives] for x in gradients]
    gives = [(of, rows(x, place).contiguous()) for of, _, place in plan.gets for x in gradients]
    gets = [(to, shares[i]) for i, (to, _, _) in enumerate(plan.gives) for shares in came]
    works = moved(gives, gets, ranks)
    spans = [*(src for src, _ in plan.own), *(src for _, src, _ in plan.gives)]
    sums = []
    for x in gradients:
        wide, every = sum_dtype(spans, x.dtype), (0, seqlen)
        if wide == x.dtype and [src for src, _ in plan.own] == [every]:
            total = Sum(rows(x, plan.own[0][1]), [every])  # which nobody else has
        else:
            total = Sum(x.new_empty((1, seqlen, *x.shape[2:]), dtype=wide))
            for src, place in plan.own:
                total.add(src, rows(x, place))
        sums.append(total)
    works.wait()
    for total, shares in zip(sums, came, strict=True):
        for (_, src, _), share in zip(plan.gives, shares, strict=True):
            total.add(src, share)
    return [total.whole().to(x.dtype) for total, x in zip(sums, gradients, strict=True)]
