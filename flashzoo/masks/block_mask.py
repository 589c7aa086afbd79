"""`BlockMask`: which blocks of queries and keys are computed, built, combined and checked on the tensors' own device.

1. A builder says of every pair of blocks whether it is skipped, partial or full, by arithmetic on block numbers: a block
   matrix, of which a 64k sequence has 512 x 512 entries.
2. What its partial blocks apply is a band (causal, window), or bits where no band can say it: one for each element, of
   partial blocks only.
3. The block matrix becomes lists of numbers, by rows for the forward pass and by columns for the backward pass
   (`lists.py`). That is what kernels read.
4. `&` and `|` go back to block matrices, keep a band where that is exact, and make bits where it is not.

Nothing above waits for a GPU or copies from it. Where the number of blocks is in the data, storage is made for as many as the
shapes allow, and `compact` gives the rest back. What reads values says so: densities, pictures, `validate`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashzoo.call.forms import MaskForm, Window, check_flags, normalised, span_of
from flashzoo.integers import cdiv
from flashzoo.masks import picture
from flashzoo.masks.lists import FULL, Check, Lists, checks, codes_of, first_flaw, lists_of, shape_errors, slots_of, tensor_errors

BLOCKS = (64, 128)
"""What block_q and block_kv may be."""
BITS_ALIGNMENT = 16
"""Bytes, at a multiple of which the bits begin: v3 reads so many at once."""
ELEMENTS = 1 << 24
"""Elements of blocks that are looked at in one step, so that a step's memory is some hundred MB."""
BANDS = 8
"""How many masks that `banded` made a mask keeps."""

Device = torch.device | str | None
_keeping = Lock()


@dataclass(frozen=True, eq=False)
class Element:
    """What the elements of a partial block must satisfy: each of these that is there.

    Attributes:
        causal, window: as in `flashzoo.attention`: aligned bottom-right, window sides None where unbounded.
        bits: uint8 `(batch, heads, blocks, block_q, block_kv / 8)`, contiguous; bit t of byte c of row r says whether query r of
            the block sees its key 8 c + t. Which of the `blocks` is whose is in `Lists.bit_index`. They start at a multiple of
            `BITS_ALIGNMENT` bytes.
    """

    causal: bool = False
    window: Window = (None, None)
    bits: Tensor | None = None

    @property
    def span(self) -> Window:
        """The visible band around the aligned diagonal, causal folded in."""
        return span_of(self.causal, self.window)


Blocks = tuple[Tensor, Tensor]
"""A block matrix: bool `(batch, heads, n_q, n_k)` each, the kept blocks and the full ones among them."""
Seen = Callable[[Tensor], Tensor]
"""From numbers of blocks `(batch, heads, some)`, i n_k + j, to their elements: bool `(batch, heads, some, block_q, block_kv)`."""


@dataclass(frozen=True)
class _Grid:
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
        return q, (q + (self.block_q - 1)).clamp(max=self.seqlen_q - 1), k, (k + (self.block_kv - 1)).clamp(max=self.seqlen_k - 1)

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
        """Queries `(..., block_q, 1)` and keys `(..., 1, block_kv)` of the blocks of these numbers, past the end in the last ones."""
        i, j = sites // self.n_k, sites % self.n_k
        q = (i * self.block_q)[..., None] + self.arange(self.block_q, torch.int64)
        k = (j * self.block_kv)[..., None] + self.arange(self.block_kv, torch.int64)
        return q[..., :, None], k[..., None, :]


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which (block of queries, block of keys) pairs attention computes, for each (batch, head) or shared by them.

    A pair of blocks is skipped, full (everything in it is seen) or partial (its elements must satisfy `element`). Keys past
    seqlen_k are never seen. Make one with a builder: `causal`, `sliding_window`, `local_global`, `strided`, `butterfly`,
    `random`, `documents`, `from_blocks`, `from_dense`, `from_flex`, `top_k`; combine two of the same sizes with `&` and `|`.

    Builders take `seqlen_k=None` for seqlen_q, block sizes of 64 or 128, and a device, None for torch's default; those that are
    given tensors use the tensors' device. They raise ValueError or TypeError where an argument is malformed. On a GPU
    neither they nor `&` and `|` synchronise.

    Attributes:
        seqlen_q, seqlen_k: lengths in tokens.
        block_q, block_kv: sizes of a block, in tokens.
        batch, heads: 1 where shared by all.
        rows: of the blocks of queries, which blocks of keys: the forward pass.
        columns: of the blocks of keys, which blocks of queries: the backward pass.
        element: what partial blocks apply.
        tight: every full block lies within the element's band, so that `&` with another band needs no bits.
    """

    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_kv: int
    batch: int
    heads: int
    rows: Lists
    columns: Lists
    element: Element = Element()
    tight: bool = False
    _checked: bool = field(default=False, init=False)
    _versions: int | None = field(default=None, init=False)  # what `_count_versions` said when it was checked
    _bands: dict[tuple, BlockMask] = field(default_factory=dict, init=False)  # what `banded` made since then

    # Builders: by a band.

    @staticmethod
    def causal(seqlen_q: int, seqlen_k: int | None = None, *, block_q: int = 128, block_kv: int = 128, device: Device = None) -> BlockMask:
        """Query i sees the keys up to i + seqlen_k - seqlen_q: aligned bottom-right."""
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, device)
        return _banded(grid, Element(causal=True))

    @staticmethod
    def sliding_window(
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        window_size: Window,
        causal: bool = False,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> BlockMask:
        """Query i sees the keys i - left to i + right, aligned bottom-right, and none after it where causal.

        Args:
            window_size: `(left, right)`, a side None or -1 where unbounded.
        """
        check_flags(causal=causal)
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, device)
        return _banded(grid, Element(causal, normalised(window_size)))

    @staticmethod
    def local_global(
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        window_size: Window,
        global_tokens: int,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> BlockMask:
        """A window, and tokens that see all and are seen by all (Longformer, arXiv:2004.05150); `& causal(...)` makes it sinks.

        Args:
            window_size: `(left, right)`, as in `sliding_window`.
            global_tokens: the first so many keys; and the queries whose aligned diagonal lies before that key.
        """
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, device)
        n, offset = min(_count("global_tokens", global_tokens), seqlen_q + grid.seqlen_k), grid.offset
        element = Element(window=normalised(window_size))
        q_first, q_last, k_first, k_last = grid.edges()
        kept, full = grid.band(element.span)
        kept = kept | (k_first < n) | (q_first + offset < n)
        full = full | (k_last < n) | (q_last + offset < n)
        cut_column = 0 < n < grid.seqlen_k and n % block_kv
        cut_row = 0 < n - offset < seqlen_q and (n - offset) % block_q
        if not (cut_column or cut_row):  # what is not full for a global token's sake, the band cuts
            return _made(grid, kept, full, element)

        def seen(sites: Tensor) -> Tensor:
            q, k = grid.positions(sites)
            return grid.in_band(element.span, q, k) | (k < n) | (q + offset < n)

        most = grid.band_partials(element.span) + (grid.n_q if cut_column else 0) + (grid.n_k if cut_row else 0)
        return _with_bits(grid, (kept, full), most, seen)

    # Builders: by whole blocks.

    @staticmethod
    def strided(
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        stride: int,
        local: int = 1,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> BlockMask:
        """Every stride-th block counted from the diagonal, and those less than `local` from it (Sparse Transformer, arXiv:1904.10509).

        Distances are between squares of the larger block size, of which the last of the queries is on a level with the last
        of the keys. Both sides of the diagonal are kept; `& causal(...)` takes one.
        """
        _count("stride", stride, 1)
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, device)
        square = max(block_q, block_kv)
        level = cdiv(grid.seqlen_k, square) - cdiv(seqlen_q, square)
        i, j = _squares(grid)
        distance = i + level - j
        return _plain(grid, (distance % stride == 0) | (distance.abs() < _count("local", local)))

    @staticmethod
    def butterfly(
        seqlen_q: int, seqlen_k: int | None = None, *, block_q: int = 128, block_kv: int = 128, device: Device = None
    ) -> BlockMask:
        """Block (i, j) where i == j or i xor j is a power of two: the flat butterfly of pixelated butterfly (arXiv:2112.00029), which
        FlashAttention's block-sparse experiments use (arXiv:2205.14135).

        With block sizes that differ, i and j number squares of the larger. They count from the first query and the first key.
        """
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, device)
        i, j = _squares(grid)
        apart = i ^ j
        return _plain(grid, (apart & (apart - 1)) == 0)

    @staticmethod
    def random(
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        blocks: int,
        seed: int = 0,
        batch: int = 1,
        heads: int = 1,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> BlockMask:
        """In every row so many blocks, drawn without replacement (BigBird, arXiv:2007.14062). One seed gives the same on every device."""
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, device)
        shape = (_count("batch", batch, 1), _count("heads", heads, 1), grid.n_q, grid.n_k)
        number = grid.arange(shape[0] * shape[1] * grid.n_q * grid.n_k, torch.int64).view(shape)
        return _plain(grid, _highest(_hashed(number, seed), _count("blocks", blocks)), row_width=blocks)

    # Builders: from data.

    @staticmethod
    def documents(
        lengths: Sequence[int] | Tensor,
        *,
        lengths_k: Sequence[int] | Tensor | None = None,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> BlockMask:
        """Documents packed one after another: a query sees the keys of its own. `& causal(...)` makes that causal.

        Args:
            lengths: of the documents' queries, in tokens: ints, or an integer tensor `(documents,)` or `(batch, documents)`, whose
                values are not looked at (less than 0 counts as 0). Tokens after the last document see nothing.
            lengths_k: of their keys, as many; those of the queries where None.
            seqlen_q, seqlen_k: in all; required with a tensor, else the sum of the lengths where None.
            device: None for that of a tensor.
        """
        if device is None:
            device = next((x.device for x in (lengths, lengths_k) if isinstance(x, Tensor)), None)
        seqlen_q = _sum("lengths", lengths, "seqlen_q", seqlen_q)
        seqlen_k = seqlen_q if lengths_k is None and seqlen_k is None else seqlen_k
        seqlen_k = _sum("lengths_k", lengths if lengths_k is None else lengths_k, "seqlen_k", seqlen_k)
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, device)
        of_q, count = _document_of("lengths", lengths, seqlen_q, grid)
        of_k, count_k = (of_q, count) if lengths_k is None else _document_of("lengths_k", lengths_k, seqlen_k, grid)
        if lengths_k is None and seqlen_k != seqlen_q:
            of_k, _ = _document_of("lengths", lengths, seqlen_k, grid)
        if count_k != count or (len(of_q) != len(of_k) and 1 not in (len(of_q), len(of_k))):
            raise ValueError(f"lengths_k must be of as many documents as lengths, {count}, and of its batch, got {_shape(lengths_k)}")
        q_first, q_last, k_first, k_last = (edge.flatten() for edge in grid.edges())
        first_q, last_q = of_q[:, q_first, None], of_q[:, q_last, None]
        first_k, last_k = of_k[:, None, k_first], of_k[:, None, k_last]
        # Document numbers rise, so a block has those from its first to its last; `count` is what follows the last document.
        kept = torch.maximum(first_q, first_k) <= torch.minimum(last_q, last_k).clamp(max=count - 1)
        full = (first_q == last_q) & (first_k == last_k) & (first_q == first_k) & (first_q < count)

        def seen(sites: Tensor) -> Tensor:
            q, k = grid.positions(sites)
            q, k = (
                of.expand(len(x), -1).gather(1, x.flatten(1).clamp(max=of.shape[1] - 1)).view(x.shape) for of, x in ((of_q, q), (of_k, k))
            )
            return (q == k) & (q < count)

        # A partial block lies on the rim of some document's rectangle, whose sides are of so many blocks in all.
        most = 2 * (grid.n_q + grid.n_k) + 4 * count
        return _with_bits(grid, (kept[:, None], full[:, None]), most, seen)

    @staticmethod
    def from_blocks(
        blocks: Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        full: Tensor | None = None,
        causal: bool = False,
        window_size: Window | None = None,
        block_q: int = 128,
        block_kv: int = 128,
    ) -> BlockMask:
        """From a block matrix.

        Args:
            blocks: bool `(n_q, n_k)` or `(batch, heads, n_q, n_k)`: the blocks to keep.
            full: the blocks to which causal and window_size do not apply, of the same shape; kept too, wherever `blocks` is False.
            causal, window_size: what applies to the other ones.
        """
        check_flags(causal=causal)
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, _tensor("blocks", blocks, torch.bool).device)
        element = Element(causal, normalised(window_size))
        kept = _matrix_of("blocks", blocks, grid)
        in_band, whole = grid.band(element.span)
        if full is None:
            return _made(grid, kept & in_band, kept & whole, element, tight=True, widths=grid.band_widths(element.span))
        given = _matrix_of("full", _tensor("full", full, torch.bool), grid)
        if given.shape != kept.shape or given.device != kept.device:
            raise ValueError(f"full must have the shape and device of blocks, {tuple(blocks.shape)} on {blocks.device}, got {_shape(full)}")
        return _made(grid, given | kept & in_band, given | kept & whole, element)

    @staticmethod
    def from_dense(mask: Tensor, *, block_q: int = 128, block_kv: int = 128) -> BlockMask:
        """From a mask of elements. Its bits take an eighth of the mask's memory, until `compact`.

        Args:
            mask: bool `(seqlen_q, seqlen_k)` or `(batch, heads, seqlen_q, seqlen_k)`, any strides, True where the query sees the key.
        """
        _tensor("mask", mask, torch.bool)
        if mask.ndim not in (2, 4):
            raise ValueError(f"mask must have shape (seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k), got {_shape(mask)}")
        grid = _grid(mask.shape[-2], mask.shape[-1], block_q, block_kv, mask.device)
        mask = mask if mask.ndim == 4 else mask[None, None]
        padding = (0, grid.n_k * block_kv - grid.seqlen_k, 0, grid.n_q * block_q - grid.seqlen_q)
        mask = torch.nn.functional.pad(mask, padding) if any(padding) else mask
        mask = mask.unflatten(3, (grid.n_k, block_kv)).unflatten(2, (grid.n_q, block_q)) if mask.numel() else mask

        def seen(sites: Tensor) -> Tensor:
            b, h = grid.arange(mask.shape[0], torch.int64)[:, None, None], grid.arange(mask.shape[1], torch.int64)[:, None]
            return mask.transpose(3, 4)[b, h, sites // grid.n_k, sites % grid.n_k]

        every = torch.ones(*mask.shape[:2], grid.n_q, grid.n_k, dtype=torch.bool, device=grid.device)
        return _with_bits(grid, (every, torch.zeros_like(every)), grid.n_q * grid.n_k, seen)

    @staticmethod
    def from_flex(mask: Any) -> BlockMask:
        """From FlexAttention's `BlockMask`, its mask_mod evaluated on partial blocks only.

        How many of them are partial is in the data, so there is storage for all to be, an eighth of a byte an element until
        `compact`, and time is taken for all. Batch and heads are the mask's, 1 where it was made with None.
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexMask
        from torch.nn.attention.flex_attention import create_mask, noop_mask

        if not isinstance(mask, FlexMask):
            raise TypeError(f"mask must be a torch.nn.attention.flex_attention.BlockMask, got {type(mask).__name__}")
        (seqlen_q, seqlen_k), (block_q, block_kv) = mask.seq_lengths, mask.BLOCK_SIZE
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, mask.kv_indices.device)
        partial, full = (
            torch.zeros(1, 1, grid.n_q, grid.n_k, dtype=torch.bool, device=grid.device)
            if counts is None or numbers is None
            else codes_of(Lists(counts, torch.zeros_like(counts), numbers, counts), grid.n_k) > 0
            for counts, numbers in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
        )
        kept = partial | full
        if mask.mask_mod is noop_mask:
            return _plain(grid, kept)
        batch, heads = kept.shape[:2]

        def seen(sites: Tensor) -> Tensor:
            some = sites.shape[2]
            flat = sites.flatten()

            def element(nth: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
                site, bh = flat[nth], nth // some
                # Past the ends there is nothing that mask_mod could be asked about.
                q = (site // grid.n_k * block_q + q).clamp(max=seqlen_q - 1)
                k = (site % grid.n_k * block_kv + k).clamp(max=seqlen_k - 1)
                return mask.mask_mod(bh // heads, bh % heads, q, k)

            of_blocks = create_mask(element, flat.numel(), 1, block_q, block_kv, device=grid.device)
            return of_blocks.view(batch, heads, some, block_q, block_kv)

        return _with_bits(grid, (kept, full.expand(kept.shape)), grid.n_q * grid.n_k, seen)

    @staticmethod
    def top_k(
        scores: Tensor,
        k: int,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        causal: bool = False,
        window_size: Window | None = None,
        block_q: int = 128,
        block_kv: int = 128,
    ) -> BlockMask:
        """In every row the k blocks of the highest scores, among those that causal and window_size leave anything of.

        Args:
            scores: `(n_q, n_k)` or `(batch, heads, n_q, n_k)`, floating point. Of equal ones the first is taken; -inf and NaN never.
            causal, window_size: what applies to the elements of blocks.
        """
        check_flags(causal=causal)
        grid = _grid(seqlen_q, seqlen_k, block_q, block_kv, _tensor("scores", scores, None).device)
        if not scores.dtype.is_floating_point:
            raise TypeError(f"scores must be floating point, got {scores.dtype}")
        element = Element(causal, normalised(window_size))
        given = _matrix_of("scores", scores, grid)
        in_band, whole = grid.band(element.span)
        possible = in_band & (given > -torch.inf)
        kept = _highest(given.masked_fill(~possible, -torch.inf), _count("k", k)) & possible
        row, column = grid.band_widths(element.span)
        return _made(grid, kept, kept & whole, element, tight=True, widths=(min(row, k), column))

    # What it is.

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.rows.counts.device

    @cached_property
    def form(self) -> MaskForm:
        """What it is without its lists."""
        element = self.element
        return MaskForm(self.block_q, self.block_kv, self.batch, self.heads, element.causal, element.window, element.bits is not None)

    @property
    def density(self) -> float:
        """Kept blocks over all blocks. Synchronises."""
        blocks = self.batch * self.heads * self._grid.n_q * self._grid.n_k
        return int(self.rows.counts.sum()) / blocks if blocks else 0.0

    @property
    def visible(self) -> float:
        """(query, key) pairs that are seen over all pairs. Synchronises."""
        grid = self.check_once()._grid
        pairs = self.batch * self.heads * grid.seqlen_q * grid.seqlen_k
        if not pairs:
            return 0.0
        kept, full = self._blocks()
        q_first, q_last, k_first, k_last = grid.edges()
        seen = self._elements()
        total = ((q_last - q_first + 1).long() * (k_last - k_first + 1) * full).sum()
        sites, used = _sites(kept ^ full, min(self._partials, grid.n_q * grid.n_k))
        for some in _steps(grid, sites):
            total += (seen(sites[..., some]) & _inside(grid, sites[..., some]) & used[..., some, None, None]).sum()
        return int(total) / pairs

    def to_dense(self) -> Tensor:
        """bool `(batch, heads, seqlen_q, seqlen_k)`, True where the query sees the key: what the oracle reads."""
        grid, seen = self.check_once()._grid, self._elements()
        dense = torch.zeros(self.batch, self.heads, grid.n_q * self.block_q, grid.n_k * self.block_kv, dtype=torch.bool, device=self.device)
        if dense.numel():
            blocks = dense.unflatten(3, (grid.n_k, self.block_kv)).unflatten(2, (grid.n_q, self.block_q)).transpose(3, 4)
            for i in range(grid.n_q):
                sites = grid.arange(grid.n_k, torch.int64).add(i * grid.n_k).expand(self.batch, self.heads, -1)
                for some in _steps(grid, sites):
                    blocks[:, :, i, some] = seen(sites[..., some])
        return dense[:, :, : self.seqlen_q, : self.seqlen_k]

    def to(self, device: torch.device | str) -> BlockMask:
        """The same on another device."""
        element = self.element if self.element.bits is None else replace(self.element, bits=self.element.bits.to(device))
        moved = replace(self, rows=self.rows.to(device), columns=self.columns.to(device), element=element)
        return _known(moved) if self._sound else moved

    def parts(self) -> tuple[list[Tensor], list[int]]:
        """Its tensors, and everything else as ints: what an operator of `torch.library` takes."""
        tensors = []
        for lists in (self.rows, self.columns):
            tensors += [lists.counts, lists.full, lists.indices, lists.order]
        element, (left, right) = self.element, self.element.window
        if element.bits is not None:
            tensors += [self.rows.bit_index, self.columns.bit_index, element.bits]
        sizes = [self.seqlen_q, self.seqlen_k, self.block_q, self.block_kv, self.batch, self.heads]
        flags = [int(element.causal), int(self.tight), int(self._sound)]
        return tensors, [*sizes, -1 if left is None else left, -1 if right is None else right, *flags]

    @staticmethod
    def of_parts(tensors: Sequence[Tensor], sizes: Sequence[int]) -> BlockMask:
        """What `parts` took apart."""
        seqlen_q, seqlen_k, block_q, block_kv, batch, heads, left, right, causal, tight, checked = sizes
        of_rows, of_columns, bits = tensors[8:] or (None, None, None)
        rows, columns = Lists(*tensors[:4], of_rows), Lists(*tensors[4:8], of_columns)  # pyright: ignore[reportCallIssue]
        element = Element(bool(causal), normalised((left, right)), bits)
        mask = BlockMask(seqlen_q, seqlen_k, block_q, block_kv, batch, heads, rows, columns, element, bool(tight))
        return _known(mask) if checked else mask

    def __reduce__(self) -> tuple[Callable, tuple]:
        """So copies, of which torch counts the changes anew, have a count of their own, and keep no bands."""
        return BlockMask.of_parts, self.parts()

    def compact(self) -> BlockMask:
        """The same in as little memory as it takes. Synchronises once; worth it for a mask with bits that is kept."""
        kept, full = self.check_once()._blocks()
        partials = (kept ^ full).flatten(2).sum(-1)
        sizes = [x.max() if x.numel() else partials.new_zeros(()) for x in (kept.sum(-1), kept.sum(-2), partials)]
        row, column, most = torch.stack(sizes).tolist()
        if self.element.bits is None:
            return _made(self._grid, kept, full, self.element, self.tight, (row, column))
        return _with_bits(self._grid, (kept, full), most, self._elements(), (row, column))

    # Two of them.

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both see."""
        return _combined(self, other, False) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """What either sees."""
        return _combined(self, other, True) if isinstance(other, BlockMask) else NotImplemented

    def banded(self, causal: bool = False, window_size: Window | None = None) -> BlockMask:
        """It with a band put into it, as by `self & BlockMask.sliding_window(...)`. Itself where there is no band.

        Made once for each band and each stream, by some hundreds of small operations, and kept with this mask, the last `BANDS` of them,
        until a tensor of it is changed in place in a way that `check_once` sees. Made at every call where nothing may be kept: inside
        `torch.compile`, transforms of torch.func and inference mode, and in the capture of a CUDA graph, whose memory is its own.

        Args:
            causal, window_size: as in `flashzoo.attention`.
        """
        check_flags(causal=causal)
        band, device = Element(causal, normalised(window_size)), self.device
        self.check_once()
        if band.span == (None, None):
            return self
        on_gpu = device.type == "cuda"
        if is_compiling() or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return self & _banded(self._grid, band)
        # Each stream has its own: what another has made may not be there yet, and what it frees may still be read here.
        which = (causal, band.window, torch.cuda.current_stream(device).cuda_stream if on_gpu else None)
        bands = self._bands  # those of this check: a later one has a dict of its own
        made = bands.get(which)
        if made is None or not made._sound:
            made = self & _banded(self._grid, band)
            if self._lasting and made._lasting:
                with _keeping:
                    bands[which] = made
                    if len(bands) > BANDS:
                        del bands[next(iter(bands))]
        return made

    # How it looks.

    def plot(self, batch: int = 0, head: int = 0) -> Any:
        """A `matplotlib.figure.Figure` of the blocks of one head. Synchronises.

        Raises:
            ImportError: matplotlib is not installed (`pip install flashzoo[report]`).
        """
        return picture.figure(self._codes(batch, head), self.block_q, self.block_kv, f"{self._sizes}\n{self._shares}")

    def __str__(self) -> str:
        """Its sizes, and the blocks of its first head in characters, as many as the terminal has room for. Synchronises."""
        width, height = shutil.get_terminal_size()
        drawn = picture.characters(self._codes(0, 0), width, max(height - 5, 8)) if self.batch and self.heads else "no heads"
        return f"BlockMask {self._sizes}\n{self._shares}\n{drawn}"

    def __repr__(self) -> str:
        return f"<BlockMask {self._sizes}, on {self.device}>"

    @property
    def _sizes(self) -> str:
        text = f"{self.seqlen_q} x {self.seqlen_k} in blocks of {self.block_q} x {self.block_kv}"
        text += "".join(f", {n} {name}" for n, name in ((self.batch, "batches"), (self.heads, "heads")) if n != 1)
        left, right = self.element.window
        text += ", causal" if self.element.causal else ""
        text += f", window ({left}, {right})" if (left, right) != (None, None) else ""
        return text + (", bits" if self.element.bits is not None else "")

    @property
    def _shares(self) -> str:
        return f"{self.density:.2%} of blocks kept, {self.visible:.2%} of pairs seen"

    def _codes(self, batch: int, head: int) -> Tensor:
        return codes_of(self.rows, self._grid.n_k)[batch, head].cpu()

    # Whether it is sound.

    def validate(self) -> BlockMask:
        """Itself, if its tensors are what they should be; what a hand-made mask must pass before a kernel may read it.

        Shapes, dtypes and devices are looked at on the host. Indices, counts, their order, and that rows and columns tell of the same
        blocks and bits, are looked at on the device: some 180 small operations and one synchronisation.

        Raises:
            ValueError: with the field, what was expected, and what was got.
        """
        for error in self._host_errors():
            raise ValueError(error)
        grid, bits = self._grid, self.element.bits
        n_bits = 0 if bits is None else bits.shape[2]
        found = [*checks("rows", self.rows, grid.n_k, n_bits), *checks("columns", self.columns, grid.n_q, n_bits)]
        codes, by_columns = codes_of(self.rows, grid.n_k), codes_of(self.columns, grid.n_q).mT
        found.append(Check("columns", "of the blocks of rows (0 skipped, 1 partial, 2 full)", by_columns != codes, by_columns))
        if bits is not None:
            slots, by_columns = slots_of(self.rows, grid.n_k), slots_of(self.columns, grid.n_q).mT
            found.append(Check("columns.bit_index", "that of rows for every block", by_columns != slots, by_columns))
            partials = (self.rows.counts - self.rows.full).sum(-1)
            found.append(Check("element.bits", "of as many blocks as there are partial ones", partials > n_bits, partials))
        if self.tight and self.element.span != (None, None):
            beyond = (codes == FULL) & ~grid.band(self.element.span)[1]
            found.append(Check("tight", "False where a full block is not all in the band", beyond, codes))
        error = first_flaw(found)
        if error is not None:
            raise ValueError(f"block_mask: {error}")
        return _known(self)

    def check_once(self) -> BlockMask:
        """`validate`, but for a mask that was made by a builder or has passed before, and was not changed in place since: then nothing.

        What is changed through `.data`, by another library's kernel or in inference mode is not seen, nor is a change that a graph of
        `torch.compile` does not know of.
        """
        return self if self._sound else self.validate()

    @property
    def _sound(self) -> bool:
        return self._checked and (self._versions is None or is_compiling() or self._versions == self._count_versions())

    @property
    def _lasting(self) -> bool:
        """Whether it may be kept: its changes are counted, and its tensors are not those of a transform or of a mode alone."""
        plain = not torch._C._are_functorch_transforms_active() and all(type(x) is Tensor for x in self.parts()[0])
        return self._versions is not None and plain

    def _count_versions(self) -> int:
        """How often its tensors were changed in place, by torch's count."""
        bits, versions = self.element.bits, 0
        for x in (self.rows, self.columns):
            versions += x.counts._version + x.full._version + x.indices._version + x.order._version
            if bits is not None and x.bit_index is not None:
                versions += x.bit_index._version
        return versions if bits is None else versions + bits._version

    def _host_errors(self) -> Iterator[str]:
        for name in ("seqlen_q", "seqlen_k", "batch", "heads"):
            value, least = getattr(self, name), 0 if name[0] == "s" else 1
            if not isinstance(value, int) or value < least:
                yield f"block_mask: {name} must be an int, {least} or more, got {value!r}"
        for name in ("block_q", "block_kv"):
            if getattr(self, name) not in BLOCKS:
                yield f"block_mask: {name} must be one of {BLOCKS}, got {getattr(self, name)!r}"
        for name in ("rows", "columns"):
            if not isinstance(getattr(self, name), Lists):
                yield f"block_mask: {name} must be Lists, got {type(getattr(self, name)).__name__}"
        if not isinstance(self.rows.counts, Tensor):
            yield f"block_mask: rows.counts must be a torch.Tensor, got {type(self.rows.counts).__name__}"
        grid, bits = self._grid, self.element.bits
        sizes = (self.batch, self.heads)
        for name, n in (("rows", grid.n_q), ("columns", grid.n_k)):
            for error in shape_errors(name, getattr(self, name), *sizes, n, bits is not None, self.device):
                yield f"block_mask: {error}"
        if bits is not None:
            shape = (*sizes, bits.shape[2] if bits.ndim == 5 else "blocks", self.block_q, self.block_kv // 8)
            for error in tensor_errors("element.bits", bits, torch.uint8, shape, self.device):
                yield f"block_mask: {error}"
            if past := bits.data_ptr() % BITS_ALIGNMENT:
                yield f"block_mask: element.bits must start at a multiple of {BITS_ALIGNMENT} bytes, got one {past} bytes past it"
        try:
            check_flags(**{"element.causal": self.element.causal, "tight": self.tight})
        except TypeError as error:
            yield f"block_mask: {error}"
        try:
            if normalised(self.element.window) != self.element.window:
                yield f"block_mask: element.window must have None for a side without a bound, got {self.element.window}"
        except ValueError as error:
            yield f"block_mask: element.{error}"

    # What the algebra is made of.

    @property
    def _grid(self) -> _Grid:
        return _Grid(self.seqlen_q, self.seqlen_k, self.block_q, self.block_kv, self.device)

    @property
    def _partials(self) -> int:
        """At most how many partial blocks a (batch, head) has."""
        return self._grid.band_partials(self.element.span) if self.element.bits is None else self.element.bits.shape[2]

    def _blocks(self) -> Blocks:
        """Its block matrix; without bits the partial blocks are those that the band cuts, whatever the lists say."""
        codes = codes_of(self.rows, self._grid.n_k)
        kept, full = codes > 0, codes == FULL
        if self.element.bits is None:
            in_band, whole = self._grid.band(self.element.span)
            kept, full = full | kept & in_band, full | kept & whole
        return kept, full

    def _elements(self) -> Seen:
        """What it shows of its blocks; past the ends anything."""
        grid, bits, span = self._grid, self.element.bits, self.element.span
        codes = codes_of(self.rows, grid.n_k)
        slots = None if bits is None else slots_of(self.rows, grid.n_k).long()

        def seen(sites: Tensor) -> Tensor:
            batch, heads = sites.shape[:2]

            def of_sites(matrix: Tensor) -> Tensor:
                return matrix.flatten(2).expand(batch, heads, -1).gather(2, sites)

            code = of_sites(codes)[..., None, None]
            elements = code > 0
            if span != (None, None):
                elements = elements & grid.in_band(span, *grid.positions(sites))
            if bits is not None and slots is not None:
                b, h = grid.arange(self.batch, torch.int64).expand(batch), grid.arange(self.heads, torch.int64).expand(heads)
                elements = elements & _unpacked(bits[b[:, None, None], h[:, None], of_sites(slots)])
            return elements | (code == FULL)

        return seen


def _known(mask: BlockMask) -> BlockMask:
    object.__setattr__(mask, "_checked", True)
    object.__setattr__(mask, "_bands", {})
    if not is_compiling() and not any(x.is_inference() for x in mask.parts()[0]):  # of inference mode there is no count
        object.__setattr__(mask, "_versions", mask._count_versions())
    return mask


def _made(
    grid: _Grid,
    kept: Tensor,
    full: Tensor,
    element: Element,
    tight: bool = False,
    widths: tuple[int, int] | None = None,
    slots: Tensor | None = None,
) -> BlockMask:
    """A mask of a block matrix; widths are at most how many blocks of a row, and of a column, are kept."""
    rows, columns = lists_of(kept, full, widths or (grid.n_k, grid.n_q), slots)
    sizes = (grid.seqlen_q, grid.seqlen_k, grid.block_q, grid.block_kv, kept.shape[0], kept.shape[1])
    return _known(BlockMask(*sizes, rows, columns, element, tight or (element.bits is None and element.span == (None, None))))


def _banded(grid: _Grid, element: Element) -> BlockMask:
    return _made(grid, *grid.band(element.span), element, tight=True, widths=grid.band_widths(element.span))


def _plain(grid: _Grid, kept: Tensor, row_width: int | None = None) -> BlockMask:
    """A mask of full blocks alone."""
    kept = kept if kept.ndim == 4 else kept[None, None]
    return _made(grid, kept, kept, Element(), widths=(grid.n_k if row_width is None else min(row_width, grid.n_k), grid.n_q))


def _with_bits(grid: _Grid, blocks: Blocks, most: int, seen: Seen, widths: tuple[int, int] | None = None) -> BlockMask:
    """A mask of a block matrix whose partial blocks are what `seen` says: full where that is all, skipped where it is nothing.

    Args:
        most: at most how many blocks of a (batch, head) are partial.
    """
    kept, full = blocks
    kept, full = torch.broadcast_tensors(kept, full)
    n_blocks = grid.n_q * grid.n_k
    most = min(most, n_blocks)
    if not most:
        return _made(grid, kept, full, Element(), widths=widths)
    partial = kept ^ full
    sites, used = _sites(partial, most)
    bits = torch.empty(*sites.shape, grid.block_q, grid.block_kv // 8, dtype=torch.uint8, device=grid.device)
    some, every = torch.empty_like(used), torch.empty_like(used)
    for step in _steps(grid, sites):
        inside = _inside(grid, sites[..., step])
        elements = seen(sites[..., step]) & inside
        bits[:, :, step] = _packed(elements)
        some[..., step] = elements.flatten(3).any(-1)
        every[..., step] = (elements | ~inside).flatten(3).all(-1)
    target = torch.where(used, sites, n_blocks)

    def at_sites(flags: Tensor) -> Tensor:
        matrix = flags.new_zeros(*flags.shape[:2], n_blocks + 1)
        return matrix.scatter_(-1, target, flags)[..., :n_blocks].view(kept.shape)

    slots = (partial.flatten(2).cumsum(-1, dtype=torch.int32) - 1).view(kept.shape)
    return _made(grid, full | at_sites(some), full | at_sites(every), Element(bits=bits), widths=widths, slots=slots)


def _sites(partial: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The numbers of the True blocks in row order, int64 `(batch, heads, most)`, 0 past the last; and which are not past it."""
    partial = partial.flatten(2)
    number = torch.arange(partial.shape[-1], device=partial.device)
    target = torch.where(partial, partial.cumsum(-1) - 1, most)
    sites = number.new_zeros(*partial.shape[:2], most + 1).scatter_(-1, target, number.expand(partial.shape))[..., :most]
    return sites, number[:most] < partial.sum(-1, keepdim=True)


def _steps(grid: _Grid, sites: Tensor) -> Iterator[slice]:
    """Slices of the last dimension."""
    batch, heads, n = sites.shape
    step = max(1, ELEMENTS // max(1, batch * heads * grid.block_q * grid.block_kv))
    return (slice(start, start + step) for start in range(0, n, step))


def _inside(grid: _Grid, sites: Tensor) -> Tensor:
    """Which elements of these blocks are not past the ends."""
    q, k = grid.positions(sites)
    return (q < grid.seqlen_q) & (k < grid.seqlen_k)


def _packed(elements: Tensor) -> Tensor:
    weights = torch.arange(8, dtype=torch.uint8, device=elements.device)
    return (elements.unflatten(-1, (-1, 8)).to(torch.uint8) << weights).sum(-1, dtype=torch.uint8)


def _unpacked(bits: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> places) & 1).flatten(-2).bool()


def _combined(a: BlockMask, b: BlockMask, union: bool) -> BlockMask:
    """`a | b` or `a & b`."""
    for name in ("seqlen_q", "seqlen_k", "block_q", "block_kv", "device"):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(f"block masks to combine must have the same {name}, got {getattr(a, name)} and {getattr(b, name)}")
    for name in ("batch", "heads"):
        if getattr(a, name) != getattr(b, name) and 1 not in (getattr(a, name), getattr(b, name)):
            raise ValueError(f"block masks to combine must have the same {name} or 1, got {getattr(a, name)} and {getattr(b, name)}")
    grid = a.check_once()._grid
    (kept_a, full_a), (kept_b, full_b) = a._blocks(), b.check_once()._blocks()
    kept, full = (kept_a | kept_b, full_a | full_b) if union else (kept_a & kept_b, full_a & full_b)
    pairs = ((a.rows.width, b.rows.width, grid.n_k), (a.columns.width, b.columns.width, grid.n_q))
    row, column = (min(x + y, most) if union else min(x, y) for x, y, most in pairs)
    banded = a.element.bits is None and b.element.bits is None
    plain = [mask.element.bits is None and mask.element.span == (None, None) for mask in (a, b)]
    if banded and a.element.span == b.element.span:
        tight = a.tight and b.tight if union else a.tight or b.tight
        return _made(grid, kept, full, a.element, tight, (row, column))
    if banded and any(plain):
        other = b if plain[0] else a
        return _made(grid, kept, full, other.element, other.tight and not union, (row, column))
    if banded and not union and a.tight and b.tight:
        windows = zip(a.element.window, b.element.window, strict=True)
        left, right = (min((side for side in sides if side is not None), default=None) for sides in windows)
        element = Element(a.element.causal or b.element.causal, (left, right))
        # Both bands hold the diagonal, so what has elements in each has elements in both.
        return _made(grid, kept, full, element, True, (row, column))

    of_a, of_b = a._elements(), b._elements()

    def seen(sites: Tensor) -> Tensor:
        return of_a(sites) | of_b(sites) if union else of_a(sites) & of_b(sites)

    return _with_bits(grid, (kept, full), a._partials + b._partials, seen, (row, column))


def _squares(grid: _Grid) -> tuple[Tensor, Tensor]:
    """Of every row `(n_q, 1)` and column `(n_k,)` of blocks, the square of the larger block size that it lies in."""
    square = max(grid.block_q, grid.block_kv)
    i, j = grid.arange(grid.n_q) // (square // grid.block_q), grid.arange(grid.n_k) // (square // grid.block_kv)
    return i[:, None], j


def _highest(scores: Tensor, k: int) -> Tensor:
    """Of each row the k highest, of equal ones the first: bool."""
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, torch.ones_like(chosen, dtype=torch.bool))


def _hashed(number: Tensor, seed: int) -> Tensor:
    """int64 numbers that look random, by the finaliser of SplitMix64 but for its unsigned shifts."""
    x = number + _signed(seed * 0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0xD6E8FEB86659FD93)):
        x = (x ^ (x >> shift)) * _signed(factor)
    return x ^ (x >> 32)


def _signed(x: int) -> int:
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _document_of(name: str, lengths: Sequence[int] | Tensor, seqlen: int, grid: _Grid) -> tuple[Tensor, int]:
    """`(1 or batch, seqlen)` int64: the document of each token, and how many there are, which stands for "none"."""
    if not isinstance(lengths, Tensor):
        # From pinned memory, because a copy from other memory would wait for the GPU.
        pinned = grid.device.type == "cuda"
        lengths = torch.tensor(lengths, dtype=torch.int64, pin_memory=pinned)
    if lengths.ndim not in (1, 2) or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
        raise ValueError(f"{name} must be ints of shape (documents,) or (batch, documents), got {lengths.dtype} {_shape(lengths)}")
    lengths = lengths.to(grid.device, torch.int64, non_blocking=True)
    lengths = lengths if lengths.ndim == 2 else lengths[None]
    ends = lengths.clamp(min=0).cumsum(-1)
    tokens = grid.arange(seqlen, torch.int64).expand(len(ends), -1).contiguous()
    return torch.searchsorted(ends, tokens, right=True), lengths.shape[-1]


def _sum(name: str, lengths: Sequence[int] | Tensor, of: str, given: int | None) -> int:
    """seqlen_q or seqlen_k of documents."""
    if given is not None:
        return given
    if isinstance(lengths, Tensor):
        raise ValueError(f"{of} is required where {name} is a tensor, as reading that would wait for its device; got None")
    for length in lengths:
        _count(name, length)
    return sum(lengths)


def _matrix_of(name: str, x: Tensor, grid: _Grid) -> Tensor:
    """x as `(batch, heads, n_q, n_k)`."""
    if x.ndim not in (2, 4) or x.shape[-2:] != (grid.n_q, grid.n_k):
        sizes = f"({grid.n_q}, {grid.n_k}) or (batch, heads, {grid.n_q}, {grid.n_k})"
        raise ValueError(f"{name} must have shape {sizes}, blocks of {grid.block_q} queries by {grid.block_kv} keys, got {_shape(x)}")
    return x if x.ndim == 4 else x[None, None]


def _tensor(name: str, x: Any, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"{name} must be of dtype {dtype}, got {x.dtype}")
    return x


def _grid(seqlen_q: int, seqlen_k: int | None, block_q: int, block_kv: int, device: Device) -> _Grid:
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    for name, block in (("block_q", block_q), ("block_kv", block_kv)):
        if block not in BLOCKS:
            raise ValueError(f"{name} must be one of {BLOCKS}, got {block!r}")
    device = torch.get_default_device() if device is None else torch.device(device)
    return _Grid(_count("seqlen_q", seqlen_q), _count("seqlen_k", seqlen_k), block_q, block_kv, device)


def _count(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int, {least} or more, got {value!r}")
    return value


def _shape(x: Any) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else repr(x)
