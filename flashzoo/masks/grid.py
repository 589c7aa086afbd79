"""`Grid`: two sequences cut into blocks, which of these a band crosses, and the arguments of builders that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashzoo.call.forms import Window
from flashzoo.integers import cdiv

BLOCKS = (64, 128)
"""What block_q and block_kv may be."""

Device = torch.device | str | None
Blocks: TypeAlias = "tuple[Tensor, Tensor]"  # quoted, or pyright --verifytypes does not know it
"""A block matrix: bool `(batch, heads, n_q, n_k)` each, the kept blocks and the full ones among them."""


@dataclass(frozen=True)
class Grid:
    """Sizes, and what follows from them alone."""

    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_kv: int
    device: torch.device

    @property
    def n_q(self) -> int:
        return cdiv(self.seqlen_q, self.block_q)

    @property
    def n_k(self) -> int:
        return cdiv(self.seqlen_k, self.block_kv)

    @property
    def offset(self) -> int:
        """From a query's number to that of the key on its aligned diagonal."""
        return self.seqlen_k - self.seqlen_q

    def arange(self, n: int, dtype: torch.dtype = torch.int32, step: int = 1) -> Tensor:
        """The first n multiples of step."""
        return torch.arange(0, n * step, step, dtype=dtype, device=self.device)

    def edges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First and last query of every row of blocks `(n_q, 1)`, first and last key of every column `(n_k,)`."""
        q, k = self.arange(self.n_q, step=self.block_q)[:, None], self.arange(self.n_k, step=self.block_kv)
        return (
            q,
            (q + (self.block_q - 1)).clamp(max=self.seqlen_q - 1),
            k,
            (k + (self.block_kv - 1)).clamp(max=self.seqlen_k - 1),
        )

    def reach(self, span: Window) -> tuple[int, int]:
        """A span in numbers; what nothing reaches is unbounded, and fits 32 bits."""
        furthest = self.seqlen_q + self.seqlen_k
        left, right = (furthest if side is None else min(side, furthest) for side in span)
        return left, right

    def band(self, span: Window) -> Blocks:
        """The blocks with an element in the band, and those with no other."""
        left, right = self.reach(span)
        first, last = self.offset - left, self.offset + right  # of the keys that query 0 sees
        q_first, q_last, k_first, k_last = self.edges()
        lowest, highest = k_first - q_last, k_last - q_first
        kept, full = (lowest <= last) & (highest >= first), (highest <= last) & (lowest >= first)
        return kept[None, None], full[None, None]

    def in_band(self, span: Window, q: Tensor, k: Tensor) -> Tensor:
        """Whether these queries see these keys."""
        left, right = self.reach(span)
        distance = k - (q + self.offset)
        return (distance <= right) & (distance >= -left)

    def band_widths(self, span: Window) -> tuple[int, int]:
        """At most how many blocks of a row, and of a column, have an element in the band."""
        keys = sum(self.reach(span))
        row = cdiv(keys + self.block_q - 1, self.block_kv) + 1
        column = cdiv(keys + self.block_kv - 1, self.block_q) + 1
        return min(row, self.n_k), min(column, self.n_q)

    def band_partials(self, span: Window) -> int:
        """At most how many blocks a band cuts: each edge those of a row that its slanted line meets."""
        edges = sum(side is not None for side in span)
        return self.n_q * min(edges * cdiv(self.block_q + self.block_kv - 2, self.block_kv), self.n_k)

    def positions(self, sites: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `(..., block_q, 1)` and keys `(..., 1, block_kv)` of the blocks of these numbers, past the end
        in the last ones."""
        i, j = sites // self.n_k, sites % self.n_k
        q = (i * self.block_q)[..., None] + self.arange(self.block_q, torch.int64)
        k = (j * self.block_kv)[..., None] + self.arange(self.block_kv, torch.int64)
        return q[..., :, None], k[..., None, :]

    def inside(self, sites: Tensor) -> Tensor:
        """Which elements of these blocks are not past the ends."""
        q, k = self.positions(sites)
        return (q < self.seqlen_q) & (k < self.seqlen_k)


def grid_of(seqlen_q: int, seqlen_k: int | None, block_q: int, block_kv: int, device: Device) -> Grid:
    """That of a builder's arguments, each checked by name."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    for name, block in (("block_q", block_q), ("block_kv", block_kv)):
        if not isinstance(block, int) or block not in BLOCKS:
            raise ValueError(f"{name} must be one of {BLOCKS}, got {block!r}")
    if device is None:  # what torch.compile has no word for
        device = torch.empty(0).device if is_compiling() else torch.get_default_device()
    device = torch.device(device)
    return Grid(count_of("seqlen_q", seqlen_q), count_of("seqlen_k", seqlen_k), block_q, block_kv, device)


def count_of(name: str, value: Any, least: int = 0) -> int:
    """The argument, if it is a number of things; ValueError where it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int, {least} or more, got {value!r}")
    return value


def tensor_of(name: str, x: Any, dtype: torch.dtype | None) -> Tensor:
    """The argument, if it is a tensor, of this dtype where one is given; TypeError where it is none."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor (torch.strided), got {x.layout}: call to_dense()")
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"{name} must be of dtype {dtype}, got {x.dtype}")
    return x


def matrix_of(name: str, x: Tensor, grid: Grid) -> Tensor:
    """x as `(batch, heads, n_q, n_k)`."""
    if x.ndim not in (2, 4) or x.shape[-2:] != (grid.n_q, grid.n_k):
        sizes = f"({grid.n_q}, {grid.n_k}) or (batch, heads, {grid.n_q}, {grid.n_k})"
        raise ValueError(
            f"{name} must have shape {sizes}, blocks of {grid.block_q} queries by {grid.block_kv} keys, "
            f"got {shape_of(x)}"
        )
    return x if x.ndim == 4 else x[None, None]


def shape_of(x: Any) -> str:
    """As errors tell it."""
    return str(tuple(x.shape)) if isinstance(x, Tensor) else repr(x)
