"""Which rows of the whole each rank has: `shard`, `unshard` and `positions`.

    zigzag       the whole is cut into 2 chunks for each rank, and rank r of P has chunk r and chunk 2P - 1 - r
    contiguous   rank r has the r-th of P equal parts

Under a causal mask a row costs as much as it sees, and zigzag gives every rank the same.

A whole that does not divide is padded behind its last row, so that of each rank's rows the padding is the last: what
comes first of a rank's chunks comes first of the whole too.
"""

from __future__ import annotations

from numbers import Complex
from operator import index
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashzoo.integers import cdiv
from flashzoo.parallel.exchange import gathered
from flashzoo.parallel.groups import kind_of, ranks_of
from flashzoo.parallel.parts import one_behind_the_other

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


def owner_of(number: int, size: int) -> int:
    """The rank that has a chunk of that number, in either layout."""
    return number if number < size else 2 * size - 1 - number


def real_rows(rank: int, size: int, rows: int, chunks: int, seqlen: int) -> int:
    """How many of a rank's rows are no padding, where the whole has so many: the first."""
    step = rows // chunks
    return sum(min(max(seqlen - number * step, 0), step) for number in numbers_of(rank, size, chunks))


def shard(x: Tensor, group: Any, dim: int = 1, layout: Layout = "zigzag", pad: float | bool | None = None) -> Tensor:
    """This rank's rows of a tensor that every rank has whole: inputs, labels, masks of the loss.

    Args:
        x: any dtype and device; of size S along `dim`, a multiple of the group's size, and of twice that in zigzag, or
            `pad` is given.
        group: a ProcessGroup or a DeviceMesh of one dimension, which the caller is in.
        dim: the one of the sequence; 0 for packed rows.
        layout: "zigzag", or "contiguous".
        pad: what rows of padding behind the last are filled with where S does not divide: 0 of inputs, of labels what
            the loss leaves out. `attention` is told S, as `seqlen`. None: S has to divide.

    Returns:
        S / ranks rows, rounded up, in the order in which `attention` takes them; differentiable. Nothing is
        communicated.

    Raises:
        TypeError, ValueError: an argument is malformed, or `pad` no number of x's dtype; S does not divide and `pad`
            is None.
    """
    if is_dynamo_compiling():  # a group is nothing that a graph can have
        from flashzoo.untraced import untraced

        return untraced(shard, x, group, dim, layout, pad)
    ranks = ranks_of(group)
    check_layout(layout)
    check_rows(x, dim)
    if pad is not None:
        check_pad(pad, x.dtype)
    seqlen, chunks = x.shape[dim], chunks_of(layout)
    parts = ranks.size * chunks
    step = cdiv(seqlen, parts)
    if seqlen % parts and pad is None:
        raise ValueError(
            f"x's size in dimension {dim} must be a multiple of {parts} for {ranks.size} ranks in layout {layout!r}, "
            f"got {seqlen}: shard(..., pad=0) pads it to {step * parts}, and attention(..., seqlen={seqlen}) then says "
            "what is none"
        )
    spans = [(min(number * step, seqlen), step) for number in numbers_of(ranks.rank, ranks.size, chunks)]
    mine = [x.narrow(dim, first, min(rows, seqlen - first)) for first, rows in spans]
    missing = step * chunks - sum(part.shape[dim] for part in mine)
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        mine.append(x.new_full(shape, 0 if pad is None else pad))
    return one_behind_the_other(mine, dim)


def unshard(x: Tensor, group: Any, dim: int = 1, layout: Layout = "zigzag", seqlen: int | None = None) -> Tensor:
    """The whole tensor, of which every rank has its shard: what `shard` was given.

    Args:
        x: this rank's rows, of the same shape and dtype on every rank.
        group, dim, layout: as in `shard`.
        seqlen: rows of the whole, where what is behind them is padding; None for all.

    Returns:
        The whole, on every rank; one all-gather. Not differentiable: what a rank's loss hangs on is its shard.

    Raises:
        TypeError, ValueError: an argument is malformed, ranks differ in shape or dtype, or x requires grad.
    """
    if is_dynamo_compiling():
        from flashzoo.untraced import untraced

        return untraced(unshard, x, group, dim, layout, seqlen)
    ranks = ranks_of(group)

    def check() -> None:
        check_layout(layout)
        check_rows(x, dim)
        check_halves(f"x's size in dimension {dim}", x.shape[dim], layout)
        if seqlen is not None:
            check_seqlen("seqlen", seqlen, x.shape[dim] * ranks.size)
        refuse_grad(x)

    how = {"dim": dim, "layout": layout, "seqlen": seqlen, "recorded": torch.is_grad_enabled()}
    ranks.agree(kind_of({"unshard": x, **how}), check)
    if ranks.size == 1:
        return x if seqlen is None else x.narrow(dim, 0, seqlen)
    chunks = chunks_of(layout)
    (every,), works = gathered([x.contiguous()], ranks)
    works.wait()
    parts = {}
    for rank, rows in enumerate(every):
        for number, chunk in zip(numbers_of(rank, ranks.size, chunks), rows.chunk(chunks, dim), strict=True):
            parts[number] = chunk
    whole = torch.cat([parts[number] for number in sorted(parts)], dim)
    return whole if seqlen is None else whole.narrow(dim, 0, seqlen)


def check_rows(x: Any, dim: Any) -> None:
    """TypeError or ValueError where x is no tensor of one rank, or has no such dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if hasattr(x, "to_local"):
        raise TypeError("x must be a tensor of this rank alone, got a DTensor: its to_local() or full_tensor() is one")
    if isinstance(dim, bool) or not isinstance(dim, SupportsIndex):
        raise TypeError(f"dim must be an int, got {dim!r}")
    if not -x.ndim <= index(dim) < x.ndim:
        raise ValueError(f"dim must be one of the {x.ndim} of x, of shape {tuple(x.shape)}, got {dim}")


def check_pad(pad: Any, dtype: torch.dtype) -> None:
    """TypeError or ValueError where it is no number of that dtype."""
    if not isinstance(pad, Complex) or (isinstance(pad, complex) and not dtype.is_complex):
        raise TypeError(f"pad must be a number{'' if dtype.is_complex else ', and real'}, got {pad!r}")
    if dtype.is_floating_point or dtype.is_complex:
        return
    number: Any = pad
    least, most = (False, True) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not least <= number <= most or number != int(number):
        raise ValueError(f"pad must be a number of x's dtype {dtype}, got {pad}")


def refuse_grad(x: Tensor) -> None:
    """ValueError where what is to be unsharded is recorded by autograd."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x must not require grad: unshard has no gradient, detach x or work on its shard")


def check_seqlen(name: str, seqlen: Any, rows: int) -> None:
    """TypeError or ValueError where ranks with so many rows together can't have so many that are no padding."""
    if isinstance(seqlen, bool) or not isinstance(seqlen, int):
        raise TypeError(f"{name} must be an int, got {seqlen!r}")
    if not 0 <= seqlen <= rows:
        raise ValueError(f"{name} must be from 0 to the {rows} rows that all ranks have together, got {seqlen}")


def check_halves(name: str, rows: int, layout: str) -> None:
    """ValueError where a shard of so many rows is none of the layout."""
    if rows % chunks_of(layout):
        raise ValueError(f"{name} must be even, two chunks of one length, in layout 'zigzag', got {rows}")


def positions(seqlen: int, group: Any, layout: Layout = "zigzag", device: torch.device | str | None = None) -> Tensor:
    """Where in the whole this rank's rows are: for rotary embeddings, learnt positions, and masks of one's own.

    Args:
        seqlen: rows of the whole; where they don't divide, padding is behind them, as in `shard`.
        group, layout: as in `shard`.
        device: of the answer.

    Returns:
        int64 `(seqlen / ranks,)`, rounded up, from 0 on. Those of padding are not less than seqlen, which is how a loss
        tells it: `positions(...) < seqlen`.

    Raises:
        TypeError, ValueError: as `shard`, for group and layout; seqlen is no int, or less than 0.
    """
    if is_dynamo_compiling():
        from flashzoo.untraced import untraced

        return untraced(positions, seqlen, group, layout, device)
    check_layout(layout)
    if isinstance(seqlen, bool) or not isinstance(seqlen, SupportsIndex):
        raise TypeError(f"seqlen must be an int, got {seqlen!r}")
    if seqlen < 0:
        raise ValueError(f"seqlen must be 0 or more, got {seqlen}")
    parts = ranks_of(group).size * chunks_of(layout)
    return shard(torch.arange(seqlen + -seqlen % parts, device=device), group, 0, layout)
