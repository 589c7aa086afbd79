"""Which rows of the whole each rank has: `shard`, `unshard` and `positions`.

    zigzag       the whole is cut into 2 chunks for each rank, and rank r of P has chunk r and chunk 2P - 1 - r
    contiguous   rank r has the r-th of P equal parts

Under a causal mask a row costs as much as it sees, and zigzag gives every rank the same.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flashzoo.parallel.exchange import gathered
from flashzoo.parallel.groups import form_of, ranks_of

Layout = Literal["zigzag", "contiguous"]
LAYOUTS = ("zigzag", "contiguous")


def check_layout(layout: Any) -> None:
    """ValueError where it is none."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be 'zigzag' or 'contiguous', got {layout!r}")


def chunks_of(layout: str) -> int:
    """How many chunks each rank has."""
    return 2 if layout == "zigzag" else 1


def numbers_of(rank: int, size: int, chunks: int) -> tuple[int, ...]:
    """The numbers of a rank's chunks, in the order of its rows."""
    return (rank, 2 * size - 1 - rank) if chunks == 2 else (rank,)


def check_whole(name: str, seqlen: int, size: int, layout: str) -> None:
    """ValueError where so many rows can't be shared out."""
    parts = size * chunks_of(layout)
    if seqlen % parts:
        raise ValueError(
            f"{name} must be a multiple of {parts} for {size} ranks in layout {layout!r}, got {seqlen}: pad to "
            f"{seqlen + -seqlen % parts}; under causal no row sees what is behind it, and else cu_seqlens_q says that "
            "padding is of no sequence"
        )


def shard(x: Tensor, group: Any, dim: int = 1, layout: Layout = "zigzag") -> Tensor:
    """This rank's rows of a tensor that every rank has whole: inputs, labels, masks of the loss.

    Args:
        x: any dtype and device; of size S along `dim`, a multiple of the group's size, and of twice that in zigzag.
        group: a ProcessGroup or a DeviceMesh of one dimension, which the caller is in.
        dim: the one of the sequence; 0 for packed rows.
        layout: "zigzag", or "contiguous".

    Returns:
        S / ranks rows, in the order in which `attention` takes them; differentiable. Nothing is communicated.

    Raises:
        TypeError, ValueError: an argument is malformed; S does not divide.
    """
    ranks = ranks_of(group)
    check_layout(layout)
    check_whole(f"x's size in dimension {dim}", x.shape[dim], ranks.size, layout)
    chunks = chunks_of(layout)
    parts = x.chunk(ranks.size * chunks, dim) if x.shape[dim] else (x,) * (ranks.size * chunks)
    mine = [parts[number] for number in numbers_of(ranks.rank, ranks.size, chunks)]
    return mine[0] if len(mine) == 1 else torch.cat(mine, dim)


def unshard(x: Tensor, group: Any, dim: int = 1, layout: Layout = "zigzag") -> Tensor:
    """The whole tensor, of which every rank has its shard: what `shard` was given.

    Args:
        x: this rank's rows, of the same shape and dtype on every rank.
        group, dim, layout: as in `shard`.

    Returns:
        The whole, on every rank; one all-gather. Not differentiable: what a rank's loss hangs on is its shard.

    Raises:
        TypeError, ValueError: an argument is malformed, ranks differ in shape or dtype, or x requires grad.
    """
    ranks = ranks_of(group)

    def check() -> None:
        check_layout(layout)
        check_halves(f"x's size in dimension {dim}", x.shape[dim], layout)
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("x must not require grad: unshard has no gradient, detach x or work on its shard")

    kind = (("unshard", form_of(x)), ("dim", dim), ("layout", layout), ("recorded", torch.is_grad_enabled()))
    ranks.agree(kind, check)
    if ranks.size == 1:
        return x
    chunks = chunks_of(layout)
    (every,), works = gathered([x.contiguous()], ranks)
    works.wait()
    parts = {}
    for rank, rows in enumerate(every):
        for number, chunk in zip(numbers_of(rank, ranks.size, chunks), rows.chunk(chunks, dim), strict=True):
            parts[number] = chunk
    return torch.cat([parts[number] for number in sorted(parts)], dim)


def check_halves(name: str, rows: int, layout: str) -> None:
    """ValueError where a shard of so many rows is none of the layout."""
    if rows % chunks_of(layout):
        raise ValueError(f"{name} must be even, two chunks of one length, in layout 'zigzag', got {rows}")


def positions(seqlen: int, group: Any, layout: Layout = "zigzag", device: torch.device | str | None = None) -> Tensor:
    """Where in the whole this rank's rows are: for rotary embeddings, learnt positions, and masks of one's own.

    Args:
        seqlen: rows of the whole, on all ranks together; as in `shard`.
        group, layout: as in `shard`.
        device: of the answer.

    Returns:
        int64 `(seqlen / ranks,)`, from 0 on.
    """
    return shard(torch.arange(seqlen, device=device), group, 0, layout)
