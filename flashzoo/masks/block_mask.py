"""`BlockMask`: which blocks of queries and keys are computed, built, combined and checked on the tensors' own device.

1. A builder (`builders.py`) says of every pair of blocks whether it is skipped, partial or full, by arithmetic on block
   numbers: a block matrix, of which a 64k sequence has 512 x 512 entries.
2. What its partial blocks apply (`elements.py`) is a band (causal, window), or bits where no band can say it: one for
   each element, of partial blocks only.
3. The block matrix becomes lists of numbers, by rows for the forward pass and by columns for the backward pass
   (`lists.py`). That is what kernels read.
4. `&` and `|` go back to block matrices, keep a band where that is exact, and make bits where it is not.

Nothing above waits for a GPU or copies from it. Where the number of blocks is in the data, storage is made for as many
as the shapes allow, and `compact` gives the rest back. What reads values says so: densities, pictures, `validate`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashzoo.call.forms import MaskForm, Window, check_flags, normalised
from flashzoo.masks import picture
from flashzoo.masks.builders import Builders
from flashzoo.masks.elements import BITS_ALIGNMENT, Element, Seen, sites_of, steps_of, unpacked
from flashzoo.masks.grid import BLOCKS, Blocks, Grid
from flashzoo.masks.lists import (
    FULL,
    Check,
    Lists,
    checks,
    codes_of,
    first_flaw,
    lists_of,
    shape_errors,
    slots_of,
    tensor_errors,
)

BANDS = 8
"""How many masks that `banded` made a mask keeps."""

_keeping = Lock()


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(Builders):
    """Which (block of queries, block of keys) pairs attention computes, for each (batch, head) or shared by them.

    A pair of blocks is skipped, full (everything in it is seen) or partial (its elements must satisfy `element`). Keys
    past seqlen_k are never seen. Make one with a builder: `causal`, `sliding_window`, `local_global`, `strided`,
    `butterfly`, `random`, `documents`, `from_blocks`, `from_dense`, `from_flex`, `top_k`; combine two of the same sizes
    with `&` and `|`.

    Builders take `seqlen_k=None` for seqlen_q, block sizes of 64 or 128, and a device, None for torch's default; those
    that are given tensors use the tensors' device. They raise ValueError or TypeError where an argument is malformed.
    On a GPU neither they nor `&` and `|` synchronise.

    Attributes:
        seqlen_q, seqlen_k: lengths in tokens.
        block_q, block_kv: sizes of a block, in tokens.
        batch, heads: 1 where shared by all.
        rows: of the blocks of queries, which blocks of keys: the forward pass.
        columns: of the blocks of keys, which blocks of queries: the backward pass.
        element: what partial blocks apply.
        form: what it is without its lists.
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
    element: Element
    tight: bool = False
    form: MaskForm = field(init=False)
    _checked: bool = field(default=False, init=False)
    _versions: int | None = field(default=None, init=False)  # what `_count_versions` said when it was checked
    _bands: dict[tuple, BlockMask] = field(default_factory=dict, init=False)  # what `banded` made since then

    # What it is.

    def __post_init__(self) -> None:
        element = self.element
        band = element.causal, element.window, element.bits is not None
        object.__setattr__(self, "form", MaskForm(self.block_q, self.block_kv, self.batch, self.heads, *band))

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.rows.counts.device

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
        sites, used = sites_of(kept ^ full, min(self._partials, grid.n_q * grid.n_k))
        for some in steps_of(grid, sites):
            total += (seen(sites[..., some]) & grid.inside(sites[..., some]) & used[..., some, None, None]).sum()
        return int(total) / pairs

    def to_dense(self) -> Tensor:
        """bool `(batch, heads, seqlen_q, seqlen_k)`, True where the query sees the key: what the oracle reads."""
        grid, seen = self.check_once()._grid, self._elements()
        dense = torch.zeros(
            self.batch,
            self.heads,
            grid.n_q * self.block_q,
            grid.n_k * self.block_kv,
            dtype=torch.bool,
            device=self.device,
        )
        if dense.numel():
            blocks = (
                dense.unflatten(3, (grid.n_k, self.block_kv)).unflatten(2, (grid.n_q, self.block_q)).transpose(3, 4)
            )
            for i in range(grid.n_q):
                sites = grid.arange(grid.n_k, torch.int64).add(i * grid.n_k).expand(self.batch, self.heads, -1)
                for some in steps_of(grid, sites):
                    blocks[:, :, i, some] = seen(sites[..., some])
        return dense[:, :, : self.seqlen_q, : self.seqlen_k]

    def to(self, device: torch.device | str) -> BlockMask:
        """The same on another device."""
        element = (
            self.element if self.element.bits is None else replace(self.element, bits=self.element.bits.to(device))
        )
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

    def __reduce__(self) -> tuple[Callable[..., BlockMask], tuple[Any, ...]]:
        """So copies, of which torch counts the changes anew, have a count of their own, and keep no bands."""
        return BlockMask.of_parts, self.parts()

    def compact(self) -> BlockMask:
        """The same in as little memory as it takes. Synchronises once; worth it for a mask with bits that is kept."""
        kept, full = self.check_once()._blocks()
        partials = (kept ^ full).flatten(2).sum(-1)
        sizes = [x.max() if x.numel() else partials.new_zeros(()) for x in (kept.sum(-1), kept.sum(-2), partials)]
        row, column, most = torch.stack(sizes).tolist()
        if self.element.bits is None:
            return BlockMask._made(self._grid, kept, full, self.element, self.tight, (row, column))
        return BlockMask._with_bits(self._grid, (kept, full), most, self._elements(), (row, column))

    # Two of them.

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both see."""
        return _combined(self, other, False) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """What either sees."""
        return _combined(self, other, True) if isinstance(other, BlockMask) else NotImplemented

    def banded(self, causal: bool = False, window_size: Window | None = None) -> BlockMask:
        """It with a band put into it, as by `self & BlockMask.sliding_window(...)`. Itself where there is no band.

        Made once for each band and each stream, by some hundreds of small operations, and kept with this mask, the last
        `BANDS` of them, until a tensor of it is changed in place in a way that `check_once` sees. Made at every call
        where nothing may be kept: inside `torch.compile`, transforms of torch.func and inference mode, and in the
        capture of a CUDA graph, whose memory is its own.

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
            return self & BlockMask._banded(self._grid, band)
        # Each stream has its own: what another has made may not be there yet, and what it frees may still be read here.
        which = (causal, band.window, torch.cuda.current_stream(device).cuda_stream if on_gpu else None)
        bands = self._bands  # those of this check: a later one has a dict of its own
        made = bands.get(which)
        if made is None or not made._sound:
            made = self & BlockMask._banded(self._grid, band)
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
            ImportError: matplotlib is not installed (the extra `report`).
        """
        return picture.figure(self._codes(batch, head), self.block_q, self.block_kv, f"{self._sizes}\n{self._shares}")

    def __str__(self) -> str:
        """Its sizes, and the blocks of its first head in characters, as many as the terminal has room for.
        Synchronises."""
        width, height = shutil.get_terminal_size()
        drawn = (
            picture.characters(self._codes(0, 0), width, max(height - 5, 8))
            if self.batch and self.heads
            else "no heads"
        )
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

        Shapes, dtypes and devices are looked at on the host. Indices, counts, their order, and that rows and columns
        tell of the same blocks and bits, are looked at on the device: some 180 small operations and one
        synchronisation.

        Raises:
            ValueError: with the field, what was expected, and what was got.
        """
        for error in self._host_errors():
            raise ValueError(error)
        grid, bits = self._grid, self.element.bits
        n_bits = 0 if bits is None else bits.shape[2]
        found = [*checks("rows", self.rows, grid.n_k, n_bits), *checks("columns", self.columns, grid.n_q, n_bits)]
        codes, by_columns = codes_of(self.rows, grid.n_k), codes_of(self.columns, grid.n_q).mT
        found.append(
            Check("columns", "of the blocks of rows (0 skipped, 1 partial, 2 full)", by_columns != codes, by_columns)
        )
        if bits is not None:
            slots, by_columns = slots_of(self.rows, grid.n_k), slots_of(self.columns, grid.n_q).mT
            found.append(Check("columns.bit_index", "that of rows for every block", by_columns != slots, by_columns))
            partials = (self.rows.counts - self.rows.full).sum(-1)
            found.append(
                Check("element.bits", "of as many blocks as there are partial ones", partials > n_bits, partials)
            )
        if self.tight and self.element.span != (None, None):
            beyond = (codes == FULL) & ~grid.band(self.element.span)[1]
            found.append(Check("tight", "False where a full block is not all in the band", beyond, codes))
        error = first_flaw(found)
        if error is not None:
            raise ValueError(f"block_mask: {error}")
        return _known(self)

    def check_once(self) -> BlockMask:
        """`validate`, but for a mask that was made by a builder or has passed before,
        and was not changed in place since: then nothing.

        What is changed through `.data`, by another library's kernel or in inference mode is not seen, nor is a change
        that a graph of `torch.compile` does not know of.
        """
        return self if self._sound else self.validate()

    @property
    def _sound(self) -> bool:
        return self._checked and (self._versions is None or is_compiling() or self._versions == self._count_versions())

    @property
    def _lasting(self) -> bool:
        """Whether it may be kept: its changes are counted, and its tensors are not those of a transform or
        of a mode alone."""
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
            value, least = getattr(self, name), int(name == "heads")
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
                yield (
                    f"block_mask: element.bits must start at a multiple of {BITS_ALIGNMENT} bytes, "
                    f"got one {past} bytes past it"
                )
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
    ) -> BlockMask:
        if not kept.shape[1]:
            raise ValueError(f"a block mask must be of one head or more, got none, of a batch of {kept.shape[0]}")
        rows, columns = lists_of(kept, full, widths or (grid.n_k, grid.n_q), slots)
        sizes = (grid.seqlen_q, grid.seqlen_k, grid.block_q, grid.block_kv, kept.shape[0], kept.shape[1])
        return _known(
            cls(*sizes, rows, columns, element, tight or (element.bits is None and element.span == (None, None)))
        )

    @property
    def _grid(self) -> Grid:
        return Grid(self.seqlen_q, self.seqlen_k, self.block_q, self.block_kv, self.device)

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
                b, h = (
                    grid.arange(self.batch, torch.int64).expand(batch),
                    grid.arange(self.heads, torch.int64).expand(heads),
                )
                elements = elements & unpacked(bits[b[:, None, None], h[:, None], of_sites(slots)])
            return elements | (code == FULL)

        return seen


def _known(mask: BlockMask) -> BlockMask:
    object.__setattr__(mask, "_checked", True)
    object.__setattr__(mask, "_bands", {})
    if not is_compiling() and not any(x.is_inference() for x in mask.parts()[0]):  # of inference mode there is no count
        object.__setattr__(mask, "_versions", mask._count_versions())
    return mask


def _combined(a: BlockMask, b: BlockMask, union: bool) -> BlockMask:
    """`a | b` or `a & b`."""
    for name in ("seqlen_q", "seqlen_k", "block_q", "block_kv", "device"):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(
                f"block masks to combine must have the same {name}, got {getattr(a, name)} and {getattr(b, name)}"
            )
    for name in ("batch", "heads"):
        if getattr(a, name) != getattr(b, name) and 1 not in (getattr(a, name), getattr(b, name)):
            raise ValueError(
                f"block masks to combine must have the same {name} or 1, got {getattr(a, name)} and {getattr(b, name)}"
            )
    grid = a.check_once()._grid
    (kept_a, full_a), (kept_b, full_b) = a._blocks(), b.check_once()._blocks()
    kept, full = (kept_a | kept_b, full_a | full_b) if union else (kept_a & kept_b, full_a & full_b)
    pairs = ((a.rows.width, b.rows.width, grid.n_k), (a.columns.width, b.columns.width, grid.n_q))
    row, column = (min(x + y, most) if union else min(x, y) for x, y, most in pairs)
    banded = a.element.bits is None and b.element.bits is None
    plain = [mask.element.bits is None and mask.element.span == (None, None) for mask in (a, b)]
    if banded and a.element.span == b.element.span:
        tight = a.tight and b.tight if union else a.tight or b.tight
        return BlockMask._made(grid, kept, full, a.element, tight, (row, column))
    if banded and any(plain):
        other = b if plain[0] else a
        return BlockMask._made(grid, kept, full, other.element, other.tight and not union, (row, column))
    if banded and not union and a.tight and b.tight:
        windows = zip(a.element.window, b.element.window, strict=True)
        left, right = (min((side for side in sides if side is not None), default=None) for sides in windows)
        element = Element(a.element.causal or b.element.causal, (left, right))
        # Both bands hold the diagonal, so what has elements in each has elements in both.
        return BlockMask._made(grid, kept, full, element, True, (row, column))

    of_a, of_b = a._elements(), b._elements()

    def seen(sites: Tensor) -> Tensor:
        return of_a(sites) | of_b(sites) if union else of_a(sites) & of_b(sites)

    return BlockMask._with_bits(grid, (kept, full), a._partials + b._partials, seen, (row, column))
