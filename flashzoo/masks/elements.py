"""What partial blocks apply to their elements: a band, or bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashzoo.call.forms import Window, span_of
from flashzoo.masks.grid import Blocks, Grid

BITS_ALIGNMENT = 16
"""Bytes, at a multiple of which the bits begin: v3 reads so many at once."""
ELEMENTS = 1 << 24
"""Elements of blocks that are looked at in one step, so that a step's memory is some hundred MB."""

Seen = Callable[[Tensor], Tensor]
"""From numbers of blocks `(batch, heads, some)`, i n_k + j, to their elements: bool
`(batch, heads, some, block_q, block_kv)`."""


@dataclass(frozen=True, eq=False)
class Element:
    """What the elements of a partial block must satisfy: each of these that is there.

    Attributes:
        causal, window: as in `flashzoo.attention`: aligned bottom-right, window sides None where unbounded.
        bits: uint8 `(batch, heads, blocks, block_q, block_kv / 8)`, contiguous; bit t of byte c of row r says whether
            query r of the block sees its key 8 c + t. Which of the `blocks` is whose is in `Lists.bit_index`. They
            start at a multiple of `BITS_ALIGNMENT` bytes.
    """

    causal: bool = False
    window: Window = (None, None)
    bits: Tensor | None = None

    @property
    def span(self) -> Window:
        """The visible band around the aligned diagonal, causal folded in."""
        return span_of(self.causal, self.window)


WITHIN_BLOCKS = Element()
"""Nothing but that their blocks are kept."""


def looked_at(grid: Grid, blocks: Blocks, most: int, seen: Seen) -> tuple[Blocks, Tensor | None, Tensor | None]:
    """A block matrix whose partial blocks were looked at: full where `seen` says all of them, skipped where
    nothing, else with bits.

    Args:
        most: at most how many blocks of a (batch, head) are partial.

    Returns:
        The block matrix, the bits as in `Element`, and where in them those of each partial block are, int32 of the
        matrix's shape; None for both where no block can be partial.
    """
    kept, full = blocks
    kept, full = torch.broadcast_tensors(kept, full)
    n_blocks = grid.n_q * grid.n_k
    most = min(most, n_blocks)
    if not most:
        return (kept, full), None, None
    partial = kept ^ full
    sites, used = sites_of(partial, most)
    bits = torch.empty(*sites.shape, grid.block_q, grid.block_kv // 8, dtype=torch.uint8, device=grid.device)
    some, every = torch.empty_like(used), torch.empty_like(used)
    for step in steps_of(grid, sites):
        inside = grid.inside(sites[..., step])
        elements = seen(sites[..., step]) & inside
        bits[:, :, step] = packed(elements)
        some[..., step] = elements.flatten(3).any(-1)
        every[..., step] = (elements | ~inside).flatten(3).all(-1)
    target = torch.where(used, sites, n_blocks)

    def at_sites(flags: Tensor) -> Tensor:
        matrix = flags.new_zeros(*flags.shape[:2], n_blocks + 1)
        return matrix.scatter_(-1, target, flags)[..., :n_blocks].view(kept.shape)

    slots = (partial.flatten(2).cumsum(-1, dtype=torch.int32) - 1).view(kept.shape)
    return (full | at_sites(some), full | at_sites(every)), bits, slots


def sites_of(partial: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The numbers of the True blocks in row order, int64 `(batch, heads, most)`, 0 past the last;
    and which are not past it."""
    partial = partial.flatten(2)
    number = torch.arange(partial.shape[-1], device=partial.device)
    target = torch.where(partial, partial.cumsum(-1) - 1, most)
    sites = number.new_zeros(*partial.shape[:2], most + 1).scatter_(-1, target, number.expand(partial.shape))[
        ..., :most
    ]
    return sites, number[:most] < partial.sum(-1, keepdim=True)


def steps_of(grid: Grid, sites: Tensor) -> Iterator[slice]:
    """Slices of the last dimension, of at most `ELEMENTS` elements each."""
    batch, heads, n = sites.shape
    step = max(1, ELEMENTS // max(1, batch * heads * grid.block_q * grid.block_kv))
    return (slice(start, start + step) for start in range(0, n, step))


def packed(elements: Tensor) -> Tensor:
    """Bits of bools `(..., 8 n)`: uint8 `(..., n)`."""
    weights = torch.arange(8, dtype=torch.uint8, device=elements.device)
    return (elements.unflatten(-1, (-1, 8)).to(torch.uint8) << weights).sum(-1, dtype=torch.uint8)


def unpacked(bits: Tensor) -> Tensor:
    """What was `packed`."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> places) & 1).flatten(-2).bool()
