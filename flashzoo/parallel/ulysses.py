"""Method `ulysses`: from all heads of some rows to some heads of all rows, and back.

DeepSpeed Ulysses, Jacobs et al. 2023, arXiv:2309.14509:

1. All-to-all: each rank gets its share of the heads of q, k and v, of every row, in the order of the whole.
2. One call of `attention` on these, with whatever it takes: it knows nothing of ranks.
3. All-to-all back: each rank gets all heads of out, and of LSE, of its rows.

Backward the same, gradients in place of tensors. Where ranks don't share out the heads of k evenly, each is sent to as
many ranks as read it, and its gradients are summed.

Of packed sequences a rank's heads go in lots, where they are large enough: while one is worked on the next one comes,
and out of the one before goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashzoo import attention
from flashzoo.parallel.exchange import Works, ahead, swapped
from flashzoo.parallel.groups import Ranks
from flashzoo.parallel.layout import numbers_of
from flashzoo.parallel.parts import one_behind_the_other, padded, rows

MOST_LOTS = 4
LEAST_LOT = 100e6
"""Bytes of q, k and v that a rank gets in a lot: of fewer the host is longer at its calls than the exchange takes."""


def lots_of(heads_kv: int, received: float, packed: bool) -> int:
    """In how many lots a rank's heads go, of which it has so many of keys, and gets so many bytes of q, k and v.

    One sequence in one: its work is long beside what is sent, and slower beside it by as much as is hidden.
    """
    return max(
        n for n in range(1, MOST_LOTS + 1) if n == 1 or (packed and heads_kv % n == 0 and received >= n * LEAST_LOT)
    )


def copies_of(heads_kv: int, size: int) -> int:
    """To how many ranks each key/value head is sent, so that all get as many."""
    return size // gcd(heads_kv, size)


def attend(
    ranks: Ranks,
    chunks: int,
    whole: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    version: str,
    return_lse: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """out and lse of this rank's rows, from its q, k and v `(batch, seqlen, heads, head_dim)`.

    Args:
        chunks: of a shard's rows.
        whole: how many queries and keys all ranks have together, but padding.
    """
    copies = copies_of(k.shape[2], ranks.size)
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    received = sum(x.nbytes for x in (q, k, v)) * (ranks.size - 1) / ranks.size
    lots = lots_of(k.shape[2] // ranks.size, received, options.get("cu_seqlens_q") is not None)
    heads = q.shape[2] // (ranks.size * lots)
    seqlen = q.shape[1] * ranks.size
    # (batch, chunks, rows, ranks, heads, head_dim) of each lot
    parts = [x.unflatten(2, (ranks.size, lots, -1)).unflatten(1, (chunks, -1)).unbind(4) for x in (q, k, v)]
    coming, going = [_begun(_Way(ranks, chunks, True, lots), *lot) for lot in zip(*parts, strict=True)], []
    for lot, (way, token) in enumerate(coming):
        q, k, v = _End.apply(way, token)  # pyright: ignore[reportGeneralTypeIssues]
        q, k, v = rows(q, (0, whole[0])), rows(k, (0, whole[1])), rows(v, (0, whole[1]))
        how = {**options, "version": version}
        if options.get("sinks") is not None:
            how["sinks"] = options["sinks"].narrow(0, (ranks.rank * lots + lot) * heads, heads)
        if return_lse:
            out, lse = padded(*attention(q, k, v, return_lse=True, **how), seqlen)
            assert lse is not None
            going.append(_begun(_Way(ranks, chunks, False, lots), out, lse.transpose(1, 2)[..., None]))
        else:
            out, _ = padded(attention(q, k, v, **how), None, seqlen)
            going.append(_begun(_Way(ranks, chunks, False, lots), out))
    found = [_End.apply(way, token) for way, token in going]
    out, *lse = (one_behind_the_other(x, 4).flatten(3, 4).flatten(1, 2) for x in zip(*found, strict=True))  # pyright: ignore[reportArgumentType]
    return out, lse[0][..., 0].transpose(1, 2) if lse else None


class _Way:
    """Tensors on their way from a shard's rows, `(batch, chunks, rows, ranks, heads, head_dim)`, to a rank's heads of
    all rows, `(batch, seqlen, heads, head_dim)`, or back; and their gradients on the opposite way. They are one of so
    many lots."""

    def __init__(self, ranks: Ranks, chunks: int, to_heads: bool, lots: int) -> None:
        self.ranks, self.chunks, self.to_heads, self.lots = ranks, chunks, to_heads, lots
        self.begun: tuple[bool, list[Tensor], Works]
        self.given: list[bool] = []

    def begin(self, xs: Sequence[Tensor], to_heads: bool) -> None:
        """All set out at once."""
        begin = _begin_heads if to_heads else _begin_rows
        begun = [begin(x, self.ranks, self.chunks) for x in xs]
        self.begun = (
            to_heads,
            [into for into, _ in begun],
            swapped([lot for _, lots in begun for lot in lots], self.ranks),
        )

    def end(self) -> tuple[Tensor, ...]:
        """They are here."""
        to_heads, came, works = self.begun
        works.wait()
        del self.begun
        if to_heads and self.lots > 1:  # other lots are on their way while this one is worked on
            ahead(came[0])
        if to_heads:  # (chunks of the whole, batch, seqlen, heads, head_dim): no copy of a batch of one
            return tuple(into.transpose(0, 1).flatten(1, 2) for into in came)
        return tuple(into.permute(2, 0, 3, 1, 4, 5) for into in came)


def _begun(way: _Way, *xs: Tensor) -> tuple[_Way, Tensor]:
    return way, _Begin.apply(way, *xs)  # pyright: ignore[reportReturnType]


class _Begin(torch.autograd.Function):
    """Has tensors set out; backward, their gradients are here. What is returned is empty, and ties it to `_End`."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *xs: Tensor):
        ctx.way = way
        way.begin(xs, way.to_heads)
        return xs[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        found = iter(ctx.way.end())
        return None, *(next(found) if given else None for given in ctx.way.given)


class _End(torch.autograd.Function):
    """They are here; backward, their gradients set out."""

    @staticmethod
    def forward(ctx: Any, way: _Way, token: Tensor):
        ctx.way = way
        # Of out and lse this rank's loss may use one, and another rank's both: zeros travel for what it does not use.
        ctx.set_materialize_grads(not way.to_heads)
        if way.lots > 1:  # or a checkpoint, which stops behind the last tensor that is saved, has lots on their way
            ctx.save_for_backward(token)
        return way.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        # What of q, k and v has no gradient on this rank has none on the others: they make the same call.
        there = [dx for dx in gradients if dx is not None]
        ctx.way.given = [dx is not None for dx in gradients]
        ctx.way.begin(there, not ctx.way.to_heads)
        return None, there[0].new_zeros(0)


def _places(ranks: Ranks, chunks: int) -> list[list[int]]:
    """For each chunk of a shard, where in the whole each rank's is."""
    return [[numbers_of(rank, ranks.size, chunks)[i] for rank in range(ranks.size)] for i in range(chunks)]


Lots = list[tuple[Sequence[Tensor], Sequence[Tensor]]]


def _begin_heads(x: Tensor, ranks: Ranks, chunks: int) -> tuple[Tensor, Lots]:
    to = x.permute(1, 3, 0, 2, 4, 5).contiguous()
    into = to.new_empty((chunks * ranks.size, *to.shape[2:]))
    places = _places(ranks, chunks)
    return into, [(lot.unbind(), [into[at] for at in of]) for lot, of in zip(to, places, strict=True)]


def _begin_rows(x: Tensor, ranks: Ranks, chunks: int) -> tuple[Tensor, Lots]:
    whole = x.unflatten(1, (chunks * ranks.size, -1)).transpose(0, 1).contiguous()
    into = whole.new_empty((chunks, ranks.size, *whole.shape[1:]))
    places = _places(ranks, chunks)
    return into, [([whole[at] for at in of], lot.unbind()) for lot, of in zip(into, places, strict=True)]
