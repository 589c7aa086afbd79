"""One fuzzed call: a line of text and back, its tensors in storage that is poisoned around them, its block mask
element by element."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from random import Random
from typing import Any

import torch
from fuzz_scores import KINDS, sequences
from torch import Tensor

from flashzoo import BlockMask, Problem
from flashzoo.call.forms import MaskForm, ScoreForm, span_of
from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.inputs import VALUES
from flashzoo.workloads import hardware

Device = torch.device | str
Window = tuple[int | None, int | None]

MARGIN = 256
"""Bytes of poison between operands, and what they start at multiples of before their layout shifts them."""
POISON = 0xFF
"""A byte of which NaN consists in every dtype, e4m3 included."""

_HEAD = re.compile(r"(\w+) (\w+) b(\d+) q(\d+) k(\d+) h(\d+)/(\d+) d(\d+)/(\d+)((?: \S+)*)")


@dataclass(frozen=True)
class Call:
    """Everything about a call but its numbers, which are of the seed; `str` and `parsed` are each other's inverse.

    Attributes:
        version, dtype, precision, causal, window, scale, lse, deterministic, out_dtype:
            as `flashzoo.attention` takes them.
        batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v: sizes.
        entry: "attention"; "sdpa", the adapter; or "quantize", which is `flashzoo.quantize` and then attention
            on what it gives.
        grad: which of q, k, v, sinks and what `score` reads (m) require it, such as "qv" or "ks".
        through: what the gradients come through: "out", "lse" or "both".
        values: of `workloads.VALUES`.
        layouts: of `LAYOUTS`, for q, k, v and dout.
        dtype_kv: "e4m3" where k and v are that beside a 16-bit q.
        descales: of q, k and v: "none", or "head" or "block" and a layout, such as "block/padded1"; "head" has numbers
            for each of the batch, or of packed sequences.
        lengths, lengths_k, used: of packed sequences their queries and keys, and how many of these are used; all in a
            batch of one, behind one another from its first row on. None where sequences are not packed; no lengths_k
            where they are the queries', no `used` where all keys are. `used` alone is how much of each of a batch's
            caches is.
        page_size: rows of a page, where keys and values lie in pages.
        latent: v is k's first columns.
        packed_q: `lengths` are of queries alone: each sequence has a cache of seqlen_k rows, of which `used` are.
        scored: options that `fuzz_oracle.SCORES` knows, and their values: "decay:0.25".
        sinks: their dtype; "" for none. One in five calls has one of -inf.
        score: the function on scores, of `fuzz_scores.KINDS`; "" for none.
        dropout: the dropout_p; its seed is made of `seed`.
        fast_accum: as `flashzoo.attention` takes it.
        mask: kind, block sizes, and whether it has blocks of its own for each batch (b) and head (h):
            "dense:128x64:bh"; "" for none.
    """

    version: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    entry: str = "attention"
    precision: str | None = None
    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    lse: bool = False
    deterministic: bool = False
    grad: str = ""
    through: str = "out"
    values: str = "randn"
    layouts: tuple[str, ...] = ("bshd",) * 4
    dtype_kv: str | None = None
    descales: tuple[str, ...] = ("none",) * 3
    out_dtype: str | None = None
    lengths: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    used: tuple[int, ...] | None = None
    page_size: int | None = None
    packed_q: bool = False
    latent: bool = False
    scored: tuple[str, ...] = ()
    sinks: str = ""
    score: str = ""
    dropout: float = 0.0
    fast_accum: bool = False
    mask: str = ""
    seed: int = 0

    def __str__(self) -> str:
        heads, head_dims = f"h{self.heads}/{self.heads_kv}", f"d{self.head_dim}/{self.head_dim_v}"
        words = [self.version, self.dtype, f"b{self.batch}", f"q{self.seqlen_q}", f"k{self.seqlen_k}", heads, head_dims]
        for field in fields(self)[9:]:
            value = getattr(self, field.name)
            if value != field.default:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else value
                words.append(field.name if value is True else f"{field.name}={text}")
        return " ".join(words)

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.heads_kv

    @property
    def caches(self) -> int:
        """The batch of k and v."""
        return len(self.lengths) if self.packed_q and self.lengths is not None else self.batch

    @property
    def stored(self) -> torch.dtype:
        """Of out."""
        in_e4m3 = self.dtype == "e4m3" or self.entry == "quantize"
        return TORCH_DTYPES[self.out_dtype or ("bf16" if in_e4m3 else self.dtype)]

    @property
    def span(self) -> Window:
        """The band that causal and the window leave, None for a side without a bound."""
        left, right = (None if side == -1 else side for side in self.window or (None, None))
        return span_of(self.causal, (left, right))

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def on_scores(self) -> dict[str, float]:
        """What is `scored`, by name."""
        return {name: float(value) for name, _, value in (word.partition(":") for word in self.scored)}

    def problem(self, device: Device) -> Problem:
        """What versions are asked; of the block mask only what the line says."""
        form = None
        if self.mask:
            _, block_q, block_kv, batch, heads = self.mask_parts()
            form = MaskForm(block_q, block_kv, batch, heads)
        left, right = (None if side == -1 else side for side in self.window or (None, None))
        return Problem(
            *(self.batch, self.seqlen_q, self.seqlen_k, self.heads, self.heads_kv, self.head_dim),
            head_dim_v=self.head_dim_v,
            dtype="e4m3" if self.entry == "quantize" else self.dtype,
            dtype_kv=self.dtype_kv,
            causal=self.causal,
            window=(left, right),
            lse=self.lse,
            deterministic=self.deterministic,
            grad=bool(self.grad),
            precision=self.precision,
            out_dtype=self.out_dtype,
            block_mask=form,
            sequences=None if self.lengths is None else len(self.lengths),
            used_k=self.used is not None,
            page_size=self.page_size,
            packed_q=self.packed_q,
            latent=self.latent,
            sinks=bool(self.sinks),
            score_mod=ScoreForm(grads=(0,) if "m" in self.grad else ()) if self.score else None,
            dropout_p=self.dropout,
            fast_accum=self.fast_accum,
            **self.on_scores,
            **hardware(device),
        )

    def mask_parts(self) -> tuple[str, int, int, int, int]:
        """Kind, block_q, block_kv, batch and heads of the block mask."""
        kind, sizes, by = self.mask.split(":")
        block_q, block_kv = map(int, sizes.split("x"))
        return kind, block_q, block_kv, self.batch if "b" in by else 1, self.heads if "h" in by else 1


def parsed(line: str) -> Call:
    """The call of a line. Raises ValueError where it is none."""
    match = _HEAD.fullmatch(line.strip())
    if match is None:
        raise ValueError(f"expected 'version dtype b1 q1 k1 h1/1 d1/1 name=value ...', got {line!r}")
    version, dtype, *sizes, rest = match.groups()
    options: dict[str, Any] = {}
    for word in rest.split():
        name, given, text = word.partition("=")
        read = _READERS.get(name, str) if given else bool
        options[name] = read(text if given else name)
    return Call(version, dtype, *map(int, sizes), **options)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_READERS = {
    "window": lambda text: tuple(None if side == "None" else int(side) for side in _words(text)),
    "scale": float,
    "dropout": float,
    "seed": int,
    "page_size": int,
    **dict.fromkeys(("lengths", "lengths_k", "used"), lambda text: tuple(int(word) for word in _words(text) if word)),
    "layouts": _words,
    "scored": _words,
    "descales": _words,
}


@dataclass(frozen=True)
class Layout:
    """Where a `(batch, seqlen, heads, head_dim)` tensor lies.

    Attributes:
        order: of the dimensions in memory.
        slots: of as many tensors side by side along the heads it is the middle one, as in a fused qkv.
        around: how many more (batches, rows, heads, columns) the tensor that it is cut out of has on either side.
        after: columns that follow each row.
        shift: elements by which it starts past an aligned address.
        one: the dimension of which all share one, with stride 0.
    """

    order: str = "bshd"
    slots: int = 1
    around: tuple[int, int, int, int] = (0, 0, 0, 0)
    after: int = 0
    shift: int = 0
    one: str = ""

    def lie(self, shape: torch.Size) -> tuple[list[int], int, int]:
        """Strides, the offset of the first element and how many elements there are."""
        sizes = dict(zip("bshd", shape, strict=True))
        stored = sizes | {name: 1 for name in self.one}
        start = dict(zip("bshd", self.around, strict=True))
        whole = {name: stored[name] + 2 * start[name] for name in "bshd"}
        whole["d"] += self.after
        whole["h"] += (self.slots - 1) * stored["h"]
        start["h"] += self.slots // 2 * stored["h"]
        strides, step = {}, 1
        for name in reversed(self.order):
            strides[name], step = step, step * whole[name]
        offset = self.shift + sum(start[name] * strides[name] for name in "bshd")
        return [0 if name in self.one else strides[name] for name in "bshd"], offset, step + self.shift


ALIGNED = {
    "bshd": Layout(),
    "bhsd": Layout("bhsd"),
    "sbhd": Layout("sbhd"),
    "packed": Layout(slots=3),
    "padded16": Layout(after=16),
    "cut16": Layout(around=(1, 2, 1, 16)),
    "offset16": Layout(shift=16),
}
"""Rows start at multiples of 16 elements where head_dim is one, though not all strides lead there."""
UNALIGNED = {
    "padded1": Layout(after=1),
    "padded8": Layout(after=8),
    "cut1": Layout("bhsd", around=(1, 1, 1, 1)),
    "offset1": Layout(shift=1),
    "offset8": Layout(shift=8),
    "packed_offset1": Layout("sbhd", slots=3, shift=1),
    "one_head": Layout(one="h"),
    "one_batch": Layout(one="b"),
}
LAYOUTS = ALIGNED | UNALIGNED


@dataclass(frozen=True)
class Operands:
    """What a call is given.

    Attributes:
        storage: every byte of all operands and of what lies between them.
        q, k, v, dout: `(batch, seqlen, heads, head_dim)`.
        dlse: `(batch, heads, seqlen_q)`.
        descales: of q, k and v.
        sinks: `(heads,)`, or None.
        read: what the function on scores reads, or None.
    """

    storage: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    descales: tuple[Tensor | None, Tensor | None, Tensor | None]
    sinks: Tensor | None
    read: Tensor | None = None


def operands(call: Call, device: Device) -> Operands:
    """The call's tensors, in one allocation that is NaN wherever they are not."""
    generator = torch.Generator(device).manual_seed(call.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    of_queries, of_keys = (call.batch, call.seqlen_q), (call.caches, call.seqlen_k)
    q, k = normal(*of_queries, call.heads, call.head_dim), normal(*of_keys, call.heads_kv, call.head_dim)
    v, dout = (
        normal(*of, heads, call.head_dim_v) for of, heads in ((of_keys, call.heads_kv), (of_queries, call.heads))
    )
    if call.seqlen_q and call.seqlen_k:
        VALUES[call.values](q, k, v, 1 / math.sqrt(call.head_dim), generator)
    dtype, of_kv = TORCH_DTYPES[call.dtype], TORCH_DTYPES[call.dtype_kv or call.dtype]
    q, k, v = (
        x.clamp_(-448, 448) if to == torch.float8_e4m3fn else x
        for x, to in zip((q, k, v), (dtype, of_kv, of_kv), strict=True)
    )
    wide = torch.float64 if call.dtype == "fp64" else torch.float32
    laid = [
        (x.to(to), LAYOUTS[name]) for x, to, name in zip((q, k, v), (dtype, of_kv, of_kv), call.layouts, strict=False)
    ]
    laid += [
        (dout.to(call.stored), LAYOUTS[call.layouts[3]]),
        (normal(*of_queries, call.heads, 1).to(wide), LAYOUTS[call.layouts[3]]),
    ]
    kinds = [kind.partition("/") for kind in call.descales]
    for (kind, _, name), ((batch, seqlen), heads) in zip(
        kinds, ((of_queries, call.heads), *[(of_keys, call.heads_kv)] * 2), strict=True
    ):
        count = call.batch if call.lengths is None else len(call.lengths)
        shape = (count, 1, call.heads_kv, 1) if kind == "head" else (batch, -(-seqlen // DESCALE_BLOCK), heads, 1)
        if kind != "none":
            laid.append((torch.exp2(2 * torch.rand(shape, generator=generator, device=device) - 1), LAYOUTS[name]))
    if call.sinks:
        sinks = 3 + 2 * normal(1, 1, call.heads, 1)
        sinks[0, 0, 0] = sinks[0, 0, 0] if call.seed % 5 else -math.inf
        laid.append((sinks.to(TORCH_DTYPES[call.sinks]), LAYOUTS[call.layouts[0]]))
    storage, (q, k, v, dout, dlse, *rest) = _placed(laid, device)
    v = k[..., : call.head_dim_v] if call.latent else v
    scoring, read = KINDS.get(call.score), None
    if scoring is not None and scoring.shape is not None:
        shape = scoring.shape(sequences(call), call.heads, call.seqlen_q, call.seqlen_k)
        read = normal(*shape).to(scoring.dtype)
    sinks = rest.pop()[0, 0, :, 0] if call.sinks else None
    numbers = iter(rest)
    descales = [None if kind == "none" else next(numbers)[..., 0].transpose(1, 2) for kind, _, _ in kinds]
    q_scale, k_scale, v_scale = (
        x[..., 0] if x is not None and kind == "head" else x for x, (kind, _, _) in zip(descales, kinds, strict=True)
    )
    return Operands(storage, q, k, v, dout, dlse[..., 0].transpose(1, 2), (q_scale, k_scale, v_scale), sinks, read)


def _placed(laid: list[tuple[Tensor, Layout]], device: Device) -> tuple[Tensor, list[Tensor]]:
    starts, end = [], MARGIN
    for x, layout in laid:
        starts.append(end)
        end += -(-layout.lie(x.shape)[2] * x.itemsize // MARGIN) * MARGIN + MARGIN
    storage, views = torch.full((end,), POISON, dtype=torch.uint8, device=device), []
    for (x, layout), start in zip(laid, starts, strict=True):
        strides, offset, _ = layout.lie(x.shape)
        first = tuple(slice(0, 1) if name in layout.one else slice(None) for name in "bshd")
        kept = x[first]
        view = storage.view(x.dtype).as_strided(kept.shape, strides, start // x.itemsize + offset)
        view.copy_(kept)
        views.append(view.expand(x.shape))
    return storage, views


def offsets(call: Call, device: Device) -> Tensor:
    """`(seqlen_q, seqlen_k)`: how far past its query's aligned diagonal a key lies."""
    i, j = torch.arange(call.seqlen_q, device=device), torch.arange(call.seqlen_k, device=device)
    return j - i[:, None] - (call.seqlen_k - call.seqlen_q)


def in_band(offset: Tensor, span: Window) -> Tensor:
    """Which of these offsets the band holds."""
    left, right = span
    seen = torch.ones_like(offset, dtype=torch.bool)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    return seen


def cu_seqlens(call: Call, device: Device) -> dict[str, Tensor]:
    """The call's lengths as `flashzoo.attention` takes them; none where it packs nothing."""
    if call.lengths is None:
        return {} if call.used is None else {"seqused_k": torch.tensor(call.used, dtype=torch.int32, device=device)}
    found = {"cu_seqlens_q": (0, *accumulate(call.lengths))}
    if call.lengths_k is not None:
        found["cu_seqlens_k"] = (0, *accumulate(call.lengths_k))
    if call.used is not None:
        found["seqused_k"] = call.used
    return {name: torch.tensor(numbers, dtype=torch.int32, device=device) for name, numbers in found.items()}


def of_sequences(call: Call, device: Device) -> Tensor:
    """`(seqlen_q, seqlen_k)` bool: what each of the packed sequences sees of its own, by its own diagonal."""
    assert call.lengths is not None
    seen = torch.zeros(call.seqlen_q, call.seqlen_k, dtype=torch.bool, device=device)
    keys = call.lengths if call.lengths_k is None else call.lengths_k
    first_q = first_k = 0
    for n_q, n_k, used in zip(call.lengths, keys, keys if call.used is None else call.used, strict=True):
        alone = replace(call, seqlen_q=n_q, seqlen_k=used)
        seen[first_q : first_q + n_q, first_k : first_k + used] = in_band(offsets(alone, device), call.span)
        first_q, first_k = first_q + n_q, first_k + n_k
    return seen


def of_caches(call: Call, device: Device) -> Tensor:
    """`(batch, 1, seqlen_q, seqlen_k)` bool: what the queries see of as much of their caches as is used."""
    assert call.used is not None
    seen = torch.zeros(call.batch, 1, call.seqlen_q, call.seqlen_k, dtype=torch.bool, device=device)
    for b, used in enumerate(call.used):
        seen[b, 0, :, :used] = in_band(offsets(replace(call, seqlen_k=used), device), call.span)
    return seen


MASKS = (
    *(
        "blocks",
        "blocks_band",
        "blocks_full",
        "dense",
        "causal",
        "window",
        "local_global",
        "documents",
        "strided",
        "butterfly",
    ),
    *("and", "or"),
)
MASKS_BY_HEAD = ("blocks", "blocks_band", "blocks_full", "dense", "and", "or")
"""Those that may have blocks of their own for each batch and head."""


def block_mask(call: Call, device: Device) -> tuple[BlockMask, Tensor]:
    """The call's block mask, and what it shows of every element by this file's own account: bool,
    `(batch, heads, seqlen_q, seqlen_k)`."""
    kind, block_q, block_kv, batch, heads = call.mask_parts()
    seqlens = (call.seqlen_q, call.seqlen_k)
    blocks: dict[str, Any] = {"block_q": block_q, "block_kv": block_kv}
    sizes = blocks | {"device": device}
    random, generator = Random(call.seed), torch.Generator(device).manual_seed(call.seed)
    n_q, n_k = -(-call.seqlen_q // block_q), -(-call.seqlen_k // block_kv)
    share = random.choice((0.2, 0.6, 0.9))
    left, right, causal = random.choice((None, 0, 5, 70, 200)), random.choice((None, 0, 9, 130)), random.random() < 0.5
    window, span = (left, right), span_of(causal, (left, right))
    offset = offsets(call, device)
    i, j = torch.arange(call.seqlen_q, device=device)[:, None], torch.arange(call.seqlen_k, device=device)

    def drawn(share: float) -> Tensor:
        return torch.rand(batch, heads, n_q, n_k, generator=generator, device=device) < share

    def spread(matrix: Tensor) -> Tensor:
        return matrix[..., i // block_q, j // block_kv]

    def banded(band: Window) -> Tensor:
        return in_band(offset, band).expand(1, 1, *seqlens)

    def of_blocks(**how: Any) -> BlockMask:
        return BlockMask.from_blocks(kept, *seqlens, **blocks, **how)

    kept, other = drawn(share), drawn(0.4)
    if kind == "blocks":
        return of_blocks(), spread(kept)
    if kind == "blocks_band":
        return of_blocks(causal=causal, window_size=window), spread(kept) & banded(span)
    if kind == "blocks_full":
        return of_blocks(full=other, causal=causal, window_size=window), spread(other) | spread(kept) & banded(span)
    if kind == "dense":
        elements = torch.rand(batch, heads, *seqlens, generator=generator, device=device) < 0.5
        seen = spread(kept) & (spread(other) | elements)
        return BlockMask.from_dense(seen, **blocks), seen
    if kind == "causal":
        return BlockMask.causal(*seqlens, **sizes), banded((None, 0))
    if kind == "window":
        return BlockMask.sliding_window(*seqlens, window_size=window, causal=causal, **sizes), banded(span)
    if kind == "local_global":
        tokens = random.choice((0, 1, 64, 77, 128))
        seen = banded(window) | (j < tokens) | (i + call.seqlen_k - call.seqlen_q < tokens)
        return BlockMask.local_global(*seqlens, window_size=window, global_tokens=tokens, **sizes), seen
    if kind == "documents":
        ends_q, ends_k = (sorted(random.randint(0, n) for _ in range(3)) for n in seqlens)
        seen = torch.zeros(1, 1, *seqlens, dtype=torch.bool, device=device)
        for first_q, last_q, first_k, last_k in zip((0, *ends_q), ends_q, (0, *ends_k), ends_k, strict=False):
            seen[..., first_q:last_q, first_k:last_k] = True
        lengths, lengths_k = (
            [last - first for first, last in zip((0, *ends), ends, strict=False)] for ends in (ends_q, ends_k)
        )
        mask = BlockMask.documents(
            lengths, lengths_k=lengths_k, seqlen_q=call.seqlen_q, seqlen_k=call.seqlen_k, **sizes
        )
        return mask, seen
    if kind in ("strided", "butterfly"):
        square = max(block_q, block_kv)
        row, column = i // square, j // square
        if kind == "butterfly":
            apart = row ^ column
            return BlockMask.butterfly(*seqlens, **sizes), ((apart & (apart - 1)) == 0)[None, None]
        stride, local = random.randint(1, 3), random.randint(1, 2)
        distance = row - column + -(-call.seqlen_k // square) - -(-call.seqlen_q // square)
        mask = BlockMask.strided(*seqlens, stride=stride, local=local, **sizes)
        return mask, ((distance % stride == 0) | (distance.abs() < local))[None, None]
    if kind == "and":
        return of_blocks() & BlockMask.causal(*seqlens, **sizes), spread(kept) & banded((None, 0))
    assert kind == "or", f"no such mask: {kind}"
    return of_blocks() | BlockMask.sliding_window(*seqlens, window_size=window, **sizes), spread(kept) | banded(window)
