"""Lists of blocks, which block-sparse kernels walk: made from a boolean block matrix, turned back into one,
and checked.

All of it runs on the tensors' own device, in a fixed number of torch operations; nothing here waits for the device.
A block matrix is `(batch, heads, n, m)`: n rows of blocks, each of which may keep any of m blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

PARTIAL, FULL = 1, 2
"""What `codes_of` says of a kept block; 0 of a skipped one."""
TOGETHER = 1 << 20
"""Entries up to which a square matrix is listed both ways at once:
half the launches, a small mask's time, for twice the memory."""


@dataclass(frozen=True, eq=False)
class Lists:
    """The kept blocks of each row of a block matrix. All int32, contiguous, on one device.

    Attributes:
        counts: `(batch, heads, n)`, how many blocks the row keeps.
        full: `(batch, heads, n)`, how many of these are full.
        indices: `(batch, heads, n, width)`, their numbers: the partial ones first, ascending, then the full ones,
            ascending. Entries past `counts` are 0, and never read.
        order: `(batch, heads, n)`, the rows from the longest to the shortest.
        bit_index: `(batch, heads, n, width)`, for each partial block where in `Element.bits` its bits lie, 0 elsewhere;
            None where there are no bits.
    """

    counts: Tensor
    full: Tensor
    indices: Tensor
    order: Tensor
    bit_index: Tensor | None = None

    @property
    def width(self) -> int:
        """How many blocks a row has room for."""
        return self.indices.shape[-1]

    def to(self, device: torch.device | str) -> Lists:
        """The same on another device."""
        return self.each(lambda x: x.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Lists:
        """What becomes of it when every tensor is changed so."""
        tensors = (change(self.counts), change(self.full), change(self.indices), change(self.order))
        return Lists(*tensors, None if self.bit_index is None else change(self.bit_index))


def lists_of(kept: Tensor, full: Tensor, widths: tuple[int, int], slots: Tensor | None = None) -> tuple[Lists, Lists]:
    """The lists of a block matrix, by rows and by columns.

    Args:
        kept, full: bool `(batch, heads, n, m)`; full implies kept.
        widths: of the lists of rows and of columns; none of them keeps more.
        slots: int32, of the same shape: what `bit_index` holds for a partial block.
    """
    matrices = [kept, full] if slots is None else [kept, full, slots]
    n, m = kept.shape[-2:]
    if n == m and n % 4 == 0 and widths[0] == widths[1] and kept.numel() <= TOGETHER:
        # With rows by fours the columns, which lie behind them, start at a multiple of 16 bytes too.
        both = _by_rows(widths[0], *(torch.stack((x, x.mT)) for x in matrices))
        return both.each(lambda x: x[0]), both.each(lambda x: x[1])
    return _by_rows(widths[0], *matrices), _by_rows(widths[1], *(x.mT for x in matrices))


def _by_rows(width: int, kept: Tensor, full: Tensor, slots: Tensor | None = None) -> Lists:
    """The lists of the rows of `(..., n, m)`, of shapes that begin alike."""
    kinds = torch.add(full.view(torch.int8), kept, alpha=-2).contiguous()  # -2 partial, -1 full, 0 skipped
    kinds, numbers = (x[..., :width] for x in kinds.sort(dim=-1, stable=True))
    counts, n_full = kept.sum(-1, dtype=torch.int32), full.sum(-1, dtype=torch.int32)
    indices = numbers.int() * (kinds < 0)
    order = counts.argsort(dim=-1, descending=True, stable=True).int()
    bit_index = None if slots is None else slots.gather(-1, numbers) * (kinds == -2)
    return Lists(counts, n_full, indices, order, bit_index)


def codes_of(lists: Lists, m: int) -> Tensor:
    """uint8 `(batch, heads, n, m)`: 0, `PARTIAL` or `FULL`. A number outside 0 .. m - 1 is passed over."""
    nth = torch.arange(lists.width, dtype=torch.int32, device=lists.counts.device)
    kinds = torch.where(nth < (lists.counts - lists.full)[..., None], PARTIAL, FULL).to(torch.uint8)
    return _matrix(lists, m, nth < lists.counts[..., None], kinds)


def slots_of(lists: Lists, m: int) -> Tensor:
    """int32 `(batch, heads, n, m)`: where the bits of a partial block lie; 0 elsewhere."""
    assert lists.bit_index is not None
    nth = torch.arange(lists.width, dtype=torch.int32, device=lists.counts.device)
    return _matrix(lists, m, nth < (lists.counts - lists.full)[..., None], lists.bit_index)


def _matrix(lists: Lists, m: int, there: Tensor, values: Tensor) -> Tensor:
    there = there & (lists.indices >= 0) & (lists.indices < m)
    target = torch.where(there, lists.indices, m).long()
    return values.new_zeros((*lists.counts.shape, m + 1)).scatter_(-1, target, values)[..., :m]


class Check(NamedTuple):
    """One thing that must hold of a tensor's elements.

    Attributes:
        field: what the error names.
        expected: in words.
        bad: bool, of any shape, where it does not hold.
        got: int, of that shape, what the error tells.
    """

    field: str
    expected: str
    bad: Tensor
    got: Tensor


def shape_errors(
    name: str, lists: Lists, batch: int, heads: int, n: int, bits: bool, device: torch.device
) -> Iterator[str]:
    """What is wrong with the lists' tensors but for what is in them, a sentence each."""
    width = lists.indices.shape[-1:] if isinstance(lists.indices, Tensor) else ("width",)
    for field in fields(lists):
        x, where = getattr(lists, field.name), f"{name}.{field.name}"
        if field.name == "bit_index" and (x is not None) != bits:
            yield (
                f"{where} must be {'a tensor, as there are bits' if bits else 'None, as there are no bits'}, "
                f"got {_kind(x)}"
            )
            continue
        if x is None and field.name == "bit_index":
            continue
        shape = (batch, heads, n, *width) if field.name in ("indices", "bit_index") else (batch, heads, n)
        yield from tensor_errors(where, x, torch.int32, shape, device)


def tensor_errors(where: str, x: object, dtype: torch.dtype, shape: tuple, device: torch.device) -> Iterator[str]:
    """What is wrong with a tensor but for what is in it, a sentence each."""
    if not isinstance(x, Tensor):
        yield f"{where} must be a torch.Tensor, got {_kind(x)}"
        return
    if x.dtype != dtype:
        yield f"{where} must be of dtype {dtype}, got {x.dtype}"
    if x.shape != shape:
        yield f"{where} must have shape {shape}, got {tuple(x.shape)}"
    if x.device != device:
        yield f"{where} must be on {device} as rows.counts is, got {x.device}"
    if not x.is_contiguous():
        yield f"{where} must be contiguous, got strides {x.stride()}"


def _kind(x: object) -> str:
    return "None" if x is None else "a tensor" if isinstance(x, Tensor) else type(x).__name__


def checks(name: str, lists: Lists, m: int, n_bits: int) -> list[Check]:
    """What must hold within lists whose tensors have the right shapes.

    Args:
        name: "rows" or "columns".
        m: how many blocks there are to keep.
        n_bits: for how many blocks of a (batch, head) there are bits.
    """
    counts, full, indices = lists.counts, lists.full, lists.indices
    most = min(lists.width, m)
    nth = torch.arange(lists.width, dtype=torch.int32, device=counts.device)
    there, n_partial = nth < counts[..., None], (counts - full)[..., None]
    found = [
        Check(
            f"{name}.counts", f"0 to {most}, of {m} blocks in lists {lists.width} wide", _outside(counts, most), counts
        ),
        Check(f"{name}.full", f"0 to {name}.counts", (full < 0) | (full > counts), full),
        Check(f"{name}.indices", f"blocks 0 to {m - 1}", there & _outside(indices, m - 1), indices),
    ]
    if lists.width > 1:
        same_part = there[..., 1:] & (nth[1:] != n_partial)
        falls = same_part & (indices[..., 1:] <= indices[..., :-1])
        found.append(Check(f"{name}.indices", "each part ascending, no block twice", falls, indices[..., 1:]))
    ones = torch.ones_like(indices, dtype=torch.bool)
    doubled = _matrix(lists, m, nth < n_partial, ones) & _matrix(lists, m, there & (nth >= n_partial), ones)
    number = torch.arange(m, dtype=torch.int32, device=counts.device).expand(doubled.shape)
    found.append(Check(f"{name}.indices", "no block both partial and full", doubled, number))

    n, order = counts.shape[-1], lists.order
    wrong = _outside(order, n - 1)
    hit = torch.zeros_like(order, dtype=torch.bool)
    row = order.clamp(0, max(n - 1, 0)).long()
    hit.scatter_(-1, row, torch.ones_like(hit))
    number = torch.arange(n, dtype=torch.int32, device=counts.device).expand(order.shape)
    found += [
        Check(f"{name}.order", f"rows 0 to {n - 1}", wrong, order),
        Check(f"{name}.order", "a permutation of the rows, of which one is missing", ~hit, number),
    ]
    if n > 1:
        lengths = counts.gather(-1, row)
        rises = lengths[..., 1:] > lengths[..., :-1]
        found.append(Check(f"{name}.order", "from the longest row to the shortest", rises, order[..., 1:]))
    if lists.bit_index is not None:
        bad = (nth < n_partial) & there & _outside(lists.bit_index, n_bits - 1)
        found.append(Check(f"{name}.bit_index", f"0 to {n_bits - 1}", bad, lists.bit_index))
    return found


def _outside(x: Tensor, last: int) -> Tensor:
    return (x < 0) | (x > last)


def first_flaw(found: list[Check]) -> str | None:
    """The first of these that does not hold, in words. One flag of each is read, all together:
    one synchronisation if all hold."""
    flags = [check.bad.any() for check in found]
    failed = [check for check, flag in zip(found, torch.stack(flags).tolist(), strict=True) if flag]
    if not failed:
        return None
    field, expected, bad, got = failed[0]
    place = bad.nonzero()[0]
    return f"{field} must be {expected}, got {int(got[place.unbind()])} at {tuple(place.tolist())}"
