"""The builders of block masks: block matrices by arithmetic on block numbers, or from data."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashzoo.call.forms import Window, check_flags, normalised
from flashzoo.integers import cdiv
from flashzoo.masks.elements import WITHIN_BLOCKS, Element, Seen, looked_at
from flashzoo.masks.grid import Blocks, Device, Grid, count_of, grid_of, matrix_of, shape_of, tensor_of
from flashzoo.masks.lists import Lists, codes_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Builders:
    """The builders of `flashzoo.BlockMask`, which says what they have in common, and makes a mask of a block matrix."""

    # By a band.

    @classmethod
    def causal(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> Self:
        """Query i sees the keys up to i + seqlen_k - seqlen_q: aligned bottom-right."""
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, device)
        return cls._banded(grid, Element(causal=True))

    @classmethod
    def sliding_window(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        window_size: Window,
        causal: bool = False,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> Self:
        """Query i sees the keys i - left to i + right, aligned bottom-right, and none after it where causal.

        Args:
            window_size: `(left, right)`, a side None or -1 where unbounded.
        """
        check_flags(causal=causal)
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, device)
        return cls._banded(grid, Element(causal, normalised(window_size)))

    @classmethod
    def local_global(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        window_size: Window,
        global_tokens: int,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> Self:
        """A window, and tokens that see all and are seen by all (Longformer, arXiv:2004.05150);
        `& causal(...)` makes it sinks.

        Args:
            window_size: `(left, right)`, as in `sliding_window`.
            global_tokens: the first so many keys; and the queries whose aligned diagonal lies before that key.
        """
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, device)
        n, offset = min(count_of("global_tokens", global_tokens), seqlen_q + grid.seqlen_k), grid.offset
        element = Element(window=normalised(window_size))
        q_first, q_last, k_first, k_last = grid.edges()
        kept, full = grid.band(element.span)
        kept = kept | (k_first < n) | (q_first + offset < n)
        full = full | (k_last < n) | (q_last + offset < n)
        cut_column = 0 < n < grid.seqlen_k and n % block_kv
        cut_row = 0 < n - offset < seqlen_q and (n - offset) % block_q
        if not (cut_column or cut_row):  # what is not full for a global token's sake, the band cuts
            return cls._made(grid, kept, full, element)

        def seen(sites: Tensor) -> Tensor:
            q, k = grid.positions(sites)
            return grid.in_band(element.span, q, k) | (k < n) | (q + offset < n)

        most = grid.band_partials(element.span) + (grid.n_q if cut_column else 0) + (grid.n_k if cut_row else 0)
        return cls._with_bits(grid, (kept, full), most, seen)

    # By whole blocks.

    @classmethod
    def strided(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        stride: int,
        local: int = 1,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> Self:
        """Every stride-th block counted from the diagonal, and those less than `local` from it (Sparse Transformer,
        arXiv:1904.10509).

        Distances are between squares of the larger block size, of which the last of the queries is on a level with the
        last of the keys. Both sides of the diagonal are kept; `& causal(...)` takes one.
        """
        count_of("stride", stride, 1)
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, device)
        square = max(block_q, block_kv)
        level = cdiv(grid.seqlen_k, square) - cdiv(seqlen_q, square)
        i, j = _squares(grid)
        distance, apart = i + level - j, grid.n_q + grid.n_k + abs(level)  # which fits 32 bits, as these may not
        stride, local = min(stride, apart), min(count_of("local", local), apart)
        return cls._plain(grid, (distance % stride == 0) | (distance.abs() < local))

    @classmethod
    def butterfly(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> Self:
        """Block (i, j) where i == j or i xor j is a power of two: the flat butterfly of pixelated butterfly
        (arXiv:2112.00029), which FlashAttention's block-sparse experiments use (arXiv:2205.14135).

        With block sizes that differ, i and j number squares of the larger.
        They count from the first query and the first key.
        """
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, device)
        i, j = _squares(grid)
        apart = i ^ j
        return cls._plain(grid, (apart & (apart - 1)) == 0)

    @classmethod
    def random(
        cls,
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
    ) -> Self:
        """In every row so many blocks, drawn without replacement (BigBird, arXiv:2007.14062).
        One seed, any int, gives the same on every device."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an int, got {seed!r}")
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, device)
        shape = (count_of("batch", batch, 1), count_of("heads", heads, 1), grid.n_q, grid.n_k)
        number = grid.arange(shape[0] * shape[1] * grid.n_q * grid.n_k, torch.int64).view(shape)
        return cls._plain(grid, _highest(_hashed(number, seed), count_of("blocks", blocks)), row_width=blocks)

    # From data.

    @classmethod
    def documents(
        cls,
        lengths: Sequence[int] | Tensor,
        *,
        lengths_k: Sequence[int] | Tensor | None = None,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        block_q: int = 128,
        block_kv: int = 128,
        device: Device = None,
    ) -> Self:
        """Documents packed one after another: a query sees the keys of its own. `& causal(...)` makes that causal.

        Args:
            lengths: of the documents' queries, in tokens: ints, or an integer tensor `(documents,)` or
                `(batch, documents)`, whose values are not looked at (less than 0 counts as 0, and what is behind
                seqlen_q is cut off). Tokens after the last document see nothing.
            lengths_k: of their keys, as many; those of the queries where None.
            seqlen_q, seqlen_k: in all; required with a tensor, else the sum of the lengths where None.
            device: None for that of a tensor.
        """
        for name, x in (("lengths", lengths), ("lengths_k", lengths_k)):
            if not isinstance(x, Sized) and (name, x) != ("lengths_k", None):
                raise TypeError(f"{name} must be a sequence of ints or an integer tensor, got {type(x).__name__}")
        if device is None:
            device = next((x.device for x in (lengths, lengths_k) if isinstance(x, Tensor)), None)
        seqlen_q = _sum("lengths", lengths, "seqlen_q", seqlen_q)
        seqlen_k = seqlen_q if lengths_k is None and seqlen_k is None else seqlen_k
        seqlen_k = _sum("lengths_k", lengths if lengths_k is None else lengths_k, "seqlen_k", seqlen_k)
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, device)
        of_q, count = _document_of("lengths", lengths, seqlen_q, grid)
        of_k, count_k = (of_q, count) if lengths_k is None else _document_of("lengths_k", lengths_k, seqlen_k, grid)
        if lengths_k is None and seqlen_k != seqlen_q:
            of_k, _ = _document_of("lengths", lengths, seqlen_k, grid)
        if count_k != count or (len(of_q) != len(of_k) and 1 not in (len(of_q), len(of_k))):
            raise ValueError(
                f"lengths_k must be of as many documents as lengths, {count}, and of its batch, "
                f"got {shape_of(lengths_k)}"
            )
        q_first, q_last, k_first, k_last = (edge.flatten() for edge in grid.edges())
        first_q, last_q = of_q[:, q_first, None], of_q[:, q_last, None]
        first_k, last_k = of_k[:, None, k_first], of_k[:, None, k_last]
        # Document numbers rise, so a block has those from its first to its last;
        # `count` is what follows the last document.
        kept = torch.maximum(first_q, first_k) <= torch.minimum(last_q, last_k).clamp(max=count - 1)
        full = (first_q == last_q) & (first_k == last_k) & (first_q == first_k) & (first_q < count)

        def seen(sites: Tensor) -> Tensor:
            q, k = grid.positions(sites)
            q, k = (
                of.expand(len(x), -1).gather(1, x.flatten(1).clamp(max=of.shape[1] - 1)).view(x.shape)
                for of, x in ((of_q, q), (of_k, k))
            )
            return (q == k) & (q < count)

        # A partial block lies on the rim of some document's rectangle, whose sides are of so many blocks in all.
        most = 2 * (grid.n_q + grid.n_k) + 4 * count
        return cls._with_bits(grid, (kept[:, None], full[:, None]), most, seen)

    @classmethod
    def from_blocks(
        cls,
        blocks: Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        full: Tensor | None = None,
        causal: bool = False,
        window_size: Window | None = None,
        block_q: int = 128,
        block_kv: int = 128,
    ) -> Self:
        """From a block matrix.

        Args:
            blocks: bool `(n_q, n_k)` or `(batch, heads, n_q, n_k)`: the blocks to keep.
            full: the blocks to which causal and window_size do not apply, of the same shape;
                kept too, wherever `blocks` is False.
            causal, window_size: what applies to the other ones.
        """
        check_flags(causal=causal)
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, tensor_of("blocks", blocks, torch.bool).device)
        element = Element(causal, normalised(window_size))
        kept = matrix_of("blocks", blocks, grid)
        in_band, whole = grid.band(element.span)
        if full is None:
            return cls._made(
                grid, kept & in_band, kept & whole, element, tight=True, widths=grid.band_widths(element.span)
            )
        given = matrix_of("full", tensor_of("full", full, torch.bool), grid)
        if given.shape != kept.shape or given.device != kept.device:
            raise ValueError(
                f"full must have the shape and device of blocks, {tuple(blocks.shape)} on {blocks.device}, "
                f"got {shape_of(full)}"
            )
        return cls._made(grid, given | kept & in_band, given | kept & whole, element)

    @classmethod
    def from_dense(cls, mask: Tensor, *, block_q: int = 128, block_kv: int = 128) -> Self:
        """From a mask of elements. Its bits take an eighth of the mask's memory, until `compact`.

        Args:
            mask: bool `(seqlen_q, seqlen_k)` or `(batch, heads, seqlen_q, seqlen_k)`, any strides, True where the
                query sees the key.
        """
        tensor_of("mask", mask, torch.bool)
        if mask.ndim not in (2, 4):
            raise ValueError(
                f"mask must have shape (seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k), got {shape_of(mask)}"
            )
        grid = grid_of(mask.shape[-2], mask.shape[-1], block_q, block_kv, mask.device)
        mask = mask if mask.ndim == 4 else mask[None, None]
        padding = (0, grid.n_k * block_kv - grid.seqlen_k, 0, grid.n_q * block_q - grid.seqlen_q)
        mask = torch.nn.functional.pad(mask, padding) if any(padding) else mask
        mask = mask.unflatten(3, (grid.n_k, block_kv)).unflatten(2, (grid.n_q, block_q))

        def seen(sites: Tensor) -> Tensor:
            b, h = (
                grid.arange(mask.shape[0], torch.int64)[:, None, None],
                grid.arange(mask.shape[1], torch.int64)[:, None],
            )
            return mask.transpose(3, 4)[b, h, sites // grid.n_k, sites % grid.n_k]

        every = torch.ones(*mask.shape[:2], grid.n_q, grid.n_k, dtype=torch.bool, device=grid.device)
        return cls._with_bits(grid, (every, torch.zeros_like(every)), grid.n_q * grid.n_k, seen)

    @classmethod
    def from_flex(cls, mask: Any) -> Self:
        """From FlexAttention's `BlockMask`, its mask_mod evaluated on partial blocks only.

        How many of them are partial is in the data, so there is storage for all to be, an eighth of a byte an element
        until `compact`, and time is taken for all. Batch and heads are the mask's, 1 where it was made with None.
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexMask
        from torch.nn.attention.flex_attention import create_mask, noop_mask

        if not isinstance(mask, FlexMask):
            raise TypeError(f"mask must be a torch.nn.attention.flex_attention.BlockMask, got {type(mask).__name__}")
        (seqlen_q, seqlen_k), (block_q, block_kv) = mask.seq_lengths, mask.BLOCK_SIZE
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, mask.kv_indices.device)
        partial, full = (
            torch.zeros(1, 1, grid.n_q, grid.n_k, dtype=torch.bool, device=grid.device)
            if counts is None or numbers is None
            else codes_of(Lists(counts, torch.zeros_like(counts), numbers, counts), grid.n_k) > 0
            for counts, numbers in (
                (mask.kv_num_blocks, mask.kv_indices),
                (mask.full_kv_num_blocks, mask.full_kv_indices),
            )
        )
        kept = partial | full
        if mask.mask_mod is noop_mask:
            return cls._plain(grid, kept)
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

        return cls._with_bits(grid, (kept, full.expand(kept.shape)), grid.n_q * grid.n_k, seen)

    @classmethod
    def top_k(
        cls,
        scores: Tensor,
        k: int,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        causal: bool = False,
        window_size: Window | None = None,
        block_q: int = 128,
        block_kv: int = 128,
    ) -> Self:
        """In every row the k blocks of the highest scores, among those that causal and window_size leave anything of.

        Args:
            scores: `(n_q, n_k)` or `(batch, heads, n_q, n_k)`, floating point. Of equal ones the first is taken;
                -inf and NaN never.
            causal, window_size: what applies to the elements of blocks.
        """
        check_flags(causal=causal)
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_kv, tensor_of("scores", scores, None).device)
        if not scores.dtype.is_floating_point:
            raise TypeError(f"scores must be floating point, got {scores.dtype}")
        element = Element(causal, normalised(window_size))
        given = matrix_of("scores", scores, grid)
        in_band, whole = grid.band(element.span)
        possible = in_band & (given > -torch.inf)
        kept = _highest(given.masked_fill(~possible, -torch.inf), count_of("k", k)) & possible
        row, column = grid.band_widths(element.span)
        return cls._made(grid, kept, kept & whole, element, tight=True, widths=(min(row, k), column))

    # What they end with.

    @classmethod
    def _banded(cls, grid: Grid, element: Element) -> Self:
        """A mask of a band alone."""
        return cls._made(grid, *grid.band(element.span), element, tight=True, widths=grid.band_widths(element.span))

    @classmethod
    def _plain(cls, grid: Grid, kept: Tensor, row_width: int | None = None) -> Self:
        """A mask of full blocks alone."""
        kept = kept if kept.ndim == 4 else kept[None, None]
        return cls._made(
            grid,
            kept,
            kept,
            WITHIN_BLOCKS,
            widths=(grid.n_k if row_width is None else min(row_width, grid.n_k), grid.n_q),
        )

    @classmethod
    def _with_bits(
        cls, grid: Grid, blocks: Blocks, most: int, seen: Seen, widths: tuple[int, int] | None = None
    ) -> Self:
        """A mask of a block matrix whose partial blocks are what `seen` says; see `looked_at`."""
        (kept, full), bits, slots = looked_at(grid, blocks, most, seen)
        return cls._made(grid, kept, full, Element(bits=bits), widths=widths, slots=slots)

    @classmethod
    def _made(
        cls,
        grid: Grid,
        kept: Tensor,
        full: Tensor,
        element: Element,
        tight: bool = False,
        widths: tuple[int, int] | None = None,
        slots: Tensor | None = None,
    ) -> Self:
        """A mask of a block matrix; widths are at most how many blocks of a row, and of a column, are kept."""
        raise NotImplementedError


def _squares(grid: Grid) -> tuple[Tensor, Tensor]:
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


def _document_of(name: str, lengths: Sequence[int] | Tensor, seqlen: int, grid: Grid) -> tuple[Tensor, int]:
    """`(1 or batch, seqlen)` int64: the document of each token, and how many there are, which stands for "none"."""
    if not isinstance(lengths, Tensor):
        # From pinned memory, because a copy from other memory would wait for the GPU.
        pinned = grid.device.type == "cuda"
        lengths = torch.tensor(lengths, dtype=torch.int64, device="cpu", pin_memory=pinned)
    if lengths.ndim not in (1, 2) or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
        raise ValueError(
            f"{name} must be ints of shape (documents,) or (batch, documents), got {lengths.dtype} {shape_of(lengths)}"
        )
    lengths = lengths.to(grid.device, torch.int64, non_blocking=True)
    lengths = lengths if lengths.ndim == 2 else lengths[None]
    ends = lengths.clamp(min=0).cumsum(-1)
    tokens = grid.arange(seqlen, torch.int64).expand(len(ends), -1).contiguous()
    return torch.searchsorted(ends, tokens, right=True), lengths.shape[-1]


def _sum(name: str, lengths: Sequence[int] | Tensor, of: str, given: int | None) -> int:
    """seqlen_q or seqlen_k of documents."""
    if isinstance(lengths, Tensor):
        if given is None:
            raise ValueError(
                f"{of} is required where {name} is a tensor, as reading that would wait for its device; got None"
            )
        return given
    total = sum(count_of(name, length) for length in lengths)
    if given is not None and total > count_of(of, given):
        raise ValueError(f"{name} must add up to no more than {of} {given}, got {total}")
    return total if given is None else given
