"""Method `ulysses`: from all heads of some rows to some heads of all rows, and back.

DeepSpeed Ulysses, Jacobs et al. 2023, arXiv:2309.14509:

1. All-to-all: each rank gets its share of the heads of q, k and v, of every row, in the order of the whole.
2. One call of `attention` on these, with whatever it takes: it knows nothing of ranks.
3. All-to-all back: each rank gets all heads of out, and of LSE, of its rows.

Backward the same, gradients in place of tensors. Where ranks don't share out the heads of k evenly, each is sent to as
many ranks as read it, and its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashzoo import attention
from flashzoo.parallel.exchange import swapped
from flashzoo.parallel.groups import Ranks
from flashzoo.parallel.layout import numbers_of
from flashzoo.parallel.parts import padded, rows


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
    heads = q.shape[2] // ranks.size
    q, k, v = _exchange(ranks, chunks, True, q, k, v)
    seqlen = q.shape[1]
    q, k, v = rows(q, (0, whole[0])), rows(k, (0, whole[1])), rows(v, (0, whole[1]))
    if options.get("sinks") is not None:
        options = {**options, "sinks": options["sinks"].narrow(0, ranks.rank * heads, heads)}
    if not return_lse:
        out, _ = padded(attention(q, k, v, version=version, **options), None, seqlen)
        return _exchange(ranks, chunks, False, out)[0], None
    out, lse = padded(*attention(q, k, v, return_lse=True, version=version, **options), seqlen)
    assert lse is not None
    out, lse = _exchange(ranks, chunks, False, out, lse.transpose(1, 2)[..., None])
    return out, lse[..., 0].transpose(1, 2)


def _exchange(ranks: Ranks, chunks: int, to_heads: bool, *xs: Tensor) -> tuple[Tensor, ...]:
    return _Exchange.apply(ranks, chunks, to_heads, *xs)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, chunks: int, to_heads: bool, *xs: Tensor):
        ctx.ranks, ctx.chunks, ctx.to_heads = ranks, chunks, to_heads
        ctx.set_materialize_grads(False)
        return _all_heads_or_rows(ranks, chunks, to_heads, xs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        # What has no gradient on this rank has none on the others: they make the same call.
        there = [dx for dx in gradients if dx is not None]
        found = iter(_all_heads_or_rows(ctx.ranks, ctx.chunks, not ctx.to_heads, there))
        return None, None, None, *(None if dx is None else next(found) for dx in gradients)


def _all_heads_or_rows(ranks: Ranks, chunks: int, to_heads: bool, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All heads of a shard's rows as a rank's heads of all rows, or back; all on their way at once."""
    begin = _begin_heads if to_heads else _begin_rows
    begun = [begin(x, ranks, chunks) for x in xs]
    swapped([lot for _, lots in begun for lot in lots], ranks).wait()
    if to_heads:  # (chunks of the whole, batch, seqlen, heads, head_dim): no copy of a batch of one
        return tuple(into.transpose(0, 1).flatten(1, 2) for into, _ in begun)
    # (chunks of a shard, ranks, batch, seqlen, heads, head_dim)
    return tuple(into.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2) for into, _ in begun)


def _places(ranks: Ranks, chunks: int) -> list[list[int]]:
    """For each chunk of a shard, where in the whole each rank's is."""
    return [[numbers_of(rank, ranks.size, chunks)[i] for rank in range(ranks.size)] for i in range(chunks)]


Lots = list[tuple[Sequence[Tensor], Sequence[Tensor]]]


def _begin_heads(x: Tensor, ranks: Ranks, chunks: int) -> tuple[Tensor, Lots]:
    parts = x.unflatten(2, (ranks.size, -1)).unflatten(1, (chunks, -1))
    to = parts.permute(1, 3, 0, 2, 4, 5).contiguous()
    into = to.new_empty((chunks * ranks.size, *to.shape[2:]))
    places = _places(ranks, chunks)
    return into, [(lot.unbind(), [into[at] for at in of]) for lot, of in zip(to, places, strict=True)]


def _begin_rows(x: Tensor, ranks: Ranks, chunks: int) -> tuple[Tensor, Lots]:
    whole = x.unflatten(1, (chunks * ranks.size, -1)).transpose(0, 1).contiguous()
    into = whole.new_empty((chunks, ranks.size, *whole.shape[1:]))
    places = _places(ranks, chunks)
    return into, [([whole[at] for at in of], lot.unbind()) for lot, of in zip(into, places, strict=True)]
