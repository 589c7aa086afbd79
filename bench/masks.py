"""The block masks that cells may have: built from their names, and taken apart for peers,
which want lists of their own.

A name is what the column `mask` of a results file holds: `ones` (every block, full), `causal`, `window1024` (so many
keys, the last of them the query's own), `butterfly`, `random/8` (in each row an eighth of the blocks, drawn at random)
and `local/8` (as many around the diagonal; at the ends the band is pushed inwards, so that every row keeps as many).
Blocks have 128 queries by 128 keys, and all heads share them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from flashzoo import BlockMask

BLOCK = 128
SHARES = (2, 4, 8, 16)
NAMES = (
    "causal",
    "ones",
    *(f"{kind}/{share}" for kind in ("random", "local") for share in SHARES),
    "window1024",
    "butterfly",
)
"""Those that a run has unasked."""
FORMS = r"ones|causal|butterfly|window[1-9]\d*|(random|local)/[1-9]\d*"

Listed = tuple[Tensor, Tensor]
"""Counts `(1, 1, n)` and numbers `(1, 1, n, m)` of the blocks of each of n rows, ascending, those past the counts
never read; int32."""


def known(name: str) -> bool:
    """Whether there is a mask of that name."""
    return re.fullmatch(FORMS, name) is not None


def build(name: str, seqlen: int, device: torch.device | str) -> BlockMask:
    """The mask of that name for as many queries as keys. Raises ValueError for an unknown name."""
    if not known(name):
        raise ValueError(f"a block mask's name must be of the form {FORMS}, got {name!r}")
    kind, _, share = name.partition("/")
    blocks = -(-seqlen // BLOCK)
    kept = max(1, blocks // int(share or 1))
    if kind == "causal":
        return BlockMask.causal(seqlen, device=device)
    if kind == "butterfly":
        return BlockMask.butterfly(seqlen, device=device)
    if kind == "random":
        return BlockMask.random(seqlen, blocks=kept, device=device)
    if kind in ("ones", "local"):
        first = (torch.arange(blocks, device=device) - kept // 2).clamp(0, blocks - kept)[:, None]
        number = torch.arange(blocks, device=device)
        return BlockMask.from_blocks((number >= first) & (number < first + kept), seqlen)
    window = int(kind.removeprefix("window"))
    return BlockMask.sliding_window(seqlen, window_size=(window - 1, 0), device=device)


@dataclass(frozen=True, eq=False)
class Pattern:
    """A mask and what it is made of, read once.

    Attributes:
        mask: for our versions.
    """

    mask: BlockMask

    @cached_property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """Which blocks are partial and which are full: bool, `(blocks of queries, blocks of keys)`."""
        rows = self.mask.rows
        n_k = -(-self.mask.seqlen_k // self.mask.block_kv)
        counts, full, indices = (x[0, 0].long() for x in (rows.counts, rows.full, rows.indices))
        nth, n_partial = torch.arange(rows.width, device=indices.device), (counts - full)[:, None]

        def matrix(there: Tensor) -> Tensor:
            empty = there.new_zeros(len(counts), n_k + 1)
            return empty.scatter_(1, torch.where(there, indices, n_k), True)[:, :n_k]

        return matrix(nth < n_partial), matrix((nth >= n_partial) & (nth < counts[:, None]))

    @cached_property
    def visible(self) -> float:
        """The share of all pairs that it shows."""
        return self.mask.visible

    @cached_property
    def has_partial(self) -> bool:
        """Whether its band matters."""
        return bool(self.blocks[0].any())

    @property
    def left(self) -> int | None:
        """How many keys before its own a query of a partial block sees, those after it none; None where all."""
        return self.mask.element.span[0]

    @property
    def kind(self) -> str:
        """What kernels are compiled for: no band, one with a right side, one with both."""
        left, right = self.mask.element.span
        return "plain" if right is None else "causal" if left is None else "window"

    def of_queries(self, queries: Tensor) -> Tensor:
        """What these queries see, bool `(1, 1, queries, seqlen_k)`."""
        partial, full = (x[queries // BLOCK].repeat_interleave(BLOCK, 1)[:, : self.mask.seqlen_k] for x in self.blocks)
        return (full | partial & in_band(queries, self.mask.seqlen_k, self.left))[None, None]

    def lists(self, by_columns: bool = False) -> tuple[Listed, Listed]:
        """Its partial and its full blocks, by rows or by columns,
        in lists as wide as there are blocks, whatever the mask."""
        partial, full = (_listed(x.mT if by_columns else x) for x in self.blocks)
        return partial, full


def in_band(queries: Tensor, seqlen_k: int, left: int | None = None) -> Tensor:
    """bool `(queries, seqlen_k)`: the keys up to the query itself, `left` of them and the query's own where
    that is not None."""
    distance = queries[:, None] - torch.arange(seqlen_k, device=queries.device)
    return (distance >= 0) & (distance <= (seqlen_k if left is None else left))


def _listed(kept: Tensor) -> Listed:
    numbers = kept.to(torch.int8).argsort(dim=1, descending=True, stable=True).int()
    return kept.sum(1, dtype=torch.int32)[None, None], numbers[None, None].contiguous()


@lru_cache(maxsize=32)
def pattern(name: str, seqlen: int, device: str) -> Pattern:
    """The pattern of that name, kept."""
    return Pattern(build(name, seqlen, device))
