"""Which method answers a call, and every reason against the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashzoo import BlockMask, UnsupportedError
from flashzoo import explain as explain_call
from flashzoo.parallel.costs import METHODS, Costs, Sizes
from flashzoo.parallel.halo import reach
from flashzoo.parallel.layout import check_halves, check_layout, check_seqlen, chunks_of
from flashzoo.parallel.pieces import NO_BAND
from flashzoo.parallel.ulysses import copies_of
from flashzoo.registry import choose_backward, current, requested

PARTED = ("causal", "softmax_scale", "window_size", "deterministic", "sinks", "cu_seqlens_q", "max_seqlen_q",
          "max_seqlen_k")  # fmt: skip
"""Arguments of `attention` that calls on parts of the keys can honour, in `gather`, `ring` and `halo`."""
SHARED = (*PARTED, "precision", "fast_accum", "out_dtype", "block_mask", "cu_seqlens_k", "seqused_k")
"""Those that a call on some of the heads can, in `ulysses`."""


@dataclass(frozen=True)
class Explanation:
    """Which method takes a call, and why; prints as a table.

    Attributes:
        sizes: of the whole.
        wanted: the method that was asked for, or "auto".
        chosen: the one that runs, or None where none can.
        costs: of each method.
        reasons: against each method, sentences.
        partial: dtype of partial results; None for that of the inputs, where the version gives no other.
    """

    sizes: Sizes
    wanted: str
    chosen: str | None
    costs: Mapping[str, Costs]
    reasons: Mapping[str, tuple[str, ...]]
    partial: torch.dtype | None = None

    def __str__(self) -> str:
        s = self.sizes
        lines = [
            f"{self.chosen or 'no method'} for {s.ranks} ranks, {'asked for' if self.wanted != 'auto' else 'by auto'}: "
            f"batch {s.batch}, seqlen {s.seqlen_q} and {s.seqlen_k}, heads {s.heads}:{s.heads_kv}, "
            f"head_dim {s.head_dim}" + (f" and {s.head_dim_v}" if s.head_dim_v != s.head_dim else ""),
            *self._of_packed(),
            f"  {'what a rank receives':<22}{'forward':>12}{'backward':>12}{'lost':>13}{'keys held':>12}",
        ]
        for name, (forward, backward, held) in self.costs.items():
            mark = "*" if name == self.chosen else " "
            lost = 1e3 * (forward.lost + backward.lost)
            lines.append(
                f"{mark} {name:<22}{forward.bytes / 1e6:9.1f} MB{backward.bytes / 1e6:9.1f} MB{lost:10.3f} ms"
                f"{held / 1e6:9.1f} MB"
            )
            lines += [f"    - {reason}" for reason in self.reasons[name]]
        if self.chosen in ("gather", "ring"):
            how = "as the version rounds them" if self.partial is None else f"as {self.partial}"
            lines.append(f"  partial results come {how}, and are merged in float32 or wider")
        return "\n".join(lines)

    def _of_packed(self) -> list[str]:
        s = self.sizes
        if not s.told and s.across is None:
            return []
        (before, behind), size = reach(s.furthest, s.band), s.keys_a_row
        which = "" if s.across is None else " that lie in several chunks"
        lines = [
            f"  sequences{which} have at most {s.furthest} rows: halo receives what a rank lacks",
            f"  of {before} rows before and {behind} behind each chunk of {s.step}, a row's keys and values being "
            f"{size} B",
        ]
        if s.told:
            lines.append(
                f"  a rank with a sequence of {s.longest} rows to itself loses {1e3 * s.uneven:.3f} ms by it forward, "
                "and backward too, but in ulysses"
            )
        return lines

    def taken(self) -> Explanation:
        """Itself, or UnsupportedError with all reasons where no method takes the call."""
        if self.chosen is None:
            asked = [self.wanted] if self.wanted != "auto" else list(self.reasons)
            against = [f"  {name}: {reason}" for name in asked for reason in self.reasons[name]]
            would = [name for name, reasons in self.reasons.items() if not reasons]
            who = "no method can" if self.wanted == "auto" else f"method {self.wanted!r} can't"
            told = [f"flashzoo.parallel: {who} take this call for {self.sizes.ranks} ranks", *against]
            raise UnsupportedError("\n".join([*told, f"methods that would: {', '.join(would)}"] if would else told))
        return self


def check_method(layout: Any, method: Any) -> None:
    """ValueError where one of these is none."""
    check_layout(layout)
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method must be 'auto' or one of {', '.join(METHODS)}, got {method!r}")


def check_across(max_across: Any, options: Mapping[str, Any]) -> None:
    """TypeError or ValueError where it is no number of rows, or there are no sequences that it may be of."""
    if max_across is None:
        return
    if isinstance(max_across, bool) or not isinstance(max_across, int):
        raise TypeError(f"max_across must be an int, got {max_across!r}")
    if max_across < 0:
        raise ValueError(f"max_across must be 0 or more, got {max_across}")
    if options.get("cu_seqlens_q") is None:
        raise ValueError(f"max_across goes with cu_seqlens_q, got {max_across} without")


def chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: int,
    *,
    layout: str,
    method: str,
    seqlen: int | tuple[int, int] | None,
    max_across: int | None,
    return_lse: bool,
    version: str,
    grad: bool,
    options: dict[str, Any],
) -> Explanation:
    """Who takes the call of these shards.

    Raises:
        TypeError, ValueError: an argument is malformed.
        flashzoo.UnsupportedError: no version takes a call of the whole.
    """
    check_method(layout, method)
    check_across(max_across, options)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if getattr(x, "is_nested", False):
            raise TypeError(f"{name} must be packed rows with cu_seqlens_q of the whole, got a nested tensor")
    unknown = [name for name in options if name not in SHARED]
    lengths = None if seqlen is None else lengths_of(seqlen, q, k, size)
    whole = _whole(q, k, v, size, lengths)
    told = explain_call(*whole, return_lse=return_lse, version=version, **_flat(options))
    if unknown:
        raise TypeError(f"flashzoo.parallel.attention takes no {unknown[0]}: it takes {', '.join(SHARED)}")
    if told.problem.packed_q:
        raise TypeError(f"k and v must be packed rows, as q is, got caches, k of shape {tuple(k.shape)}")
    if told.problem.kv_in_e4m3:
        raise TypeError("q, k and v must be fp16, bf16, fp32 or fp64, got e4m3: precision='fp8' quantises them inside")
    for name, x in (("q", q), ("k", k)):
        check_halves(f"{name}'s rows on a rank", _rows(x), layout)
    p, chunks = told.problem, chunks_of(layout)
    packed = p.sequences is not None
    told_longest = [options[name] for name in ("max_seqlen_q", "max_seqlen_k") if packed and name in options]
    sizes = Sizes(p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.heads_kv, p.head_dim, p.head_dim_v, q.element_size(),
                  p.span, packed, size, chunks, grad, min((p.seqlen_q, *told_longest)), bool(told_longest),
                  max_across)  # fmt: skip
    copies = copies_of(p.heads_kv, size)
    square = p.seqlen_q == p.seqlen_k and _rows(q) == _rows(k)
    reasons = {name: _against_parts(sizes, options, name, square) for name in ("gather", "ring", "halo")}
    reasons["ulysses"] = _against_ulysses(sizes, options)
    partial = None
    for name in ("gather", "ring"):
        if not reasons[name]:
            partial, against = _partial(q, k, v, version, grad, options)
            reasons[name] += against
    if not reasons["ulysses"]:
        heads = [like(x, rows=1, heads=h) for x, h in zip(whole, _heads(sizes, copies), strict=True)]
        inner = explain_call(*heads, return_lse=return_lse, version=version, **_flat(options, p.heads // size))
        reasons["ulysses"] += () if inner.chosen else tuple(str(inner).splitlines())
    if not reasons["halo"]:
        cut = {name: options["cu_seqlens_q"].repeat(chunks) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        inner = explain_call(q, k, v, return_lse=return_lse, version=version, **options | cut)
        reasons["halo"] += () if inner.chosen else tuple(str(inner).splitlines())
    costs = {name: cost(sizes, copies) for name, cost in METHODS.items() if name != "halo" or packed}
    would = [name for name in costs if not reasons[name] and method in ("auto", name)]
    best = min(would, key=lambda name: costs[name].lost, default=None)
    return Explanation(sizes, method, best, costs, reasons, partial)


def _against_parts(s: Sizes, options: Mapping[str, Any], method: str, square: bool) -> tuple[str, ...]:
    found = [f"takes no {name}" for name, x in options.items() if name not in PARTED and _given(x)]
    if s.band != NO_BAND and not square:
        found.append(f"causal and window_size are of as many keys as queries there, got {s.seqlen_q} and {s.seqlen_k}")
    if method == "halo" and not s.packed:
        found.append("takes packed sequences alone, with cu_seqlens_q")
    elif method == "halo" and not s.told and s.across is None:
        found.append("max_seqlen_q must say how many rows a sequence has at most, or max_across")
    elif method == "halo" and not square:
        found.append(f"takes as many keys as queries, got {s.seqlen_q} and {s.seqlen_k}")
    left, right = s.band
    if s.packed and method == "ring" and left is not None:
        found.append("window_size does not go with cu_seqlens_q there")
    elif s.packed and (right not in (None, 0) or (left is not None and right is None)):
        found.append("window_size goes with cu_seqlens_q there where causal")
    return tuple(found)


def _against_ulysses(s: Sizes, options: Mapping[str, Any]) -> tuple[str, ...]:
    found = []
    if s.heads % s.ranks:
        found.append(f"heads must be a multiple of the {s.ranks} ranks, got {s.heads}")
    mask = options.get("block_mask")
    if isinstance(mask, BlockMask) and mask.heads > 1:
        found.append(f"block_mask must be shared by all heads, got one for each of {mask.heads}")
    return tuple(found)


def _partial(
    q: Tensor, k: Tensor, v: Tensor, version: str, grad: bool, options: Mapping[str, Any]
) -> tuple[torch.dtype | None, tuple[str, ...]]:
    """The dtype that parts come in, and who takes none: float32 where that changes nothing about who answers. Forward
    and backward are a call each."""
    options = {name: x for name, x in options.items() if name in PARTED}
    asked: dict[str, Any] = {**_flat(options), "return_lse": True}
    plain = explain_call(*(x.detach() for x in (q, k, v)), version=version, **asked)
    if plain.chosen is None:
        return None, tuple(str(plain).splitlines())
    if grad:
        try:
            choose_backward(replace(plain.problem, grad=True), *requested(version), current())
        except UnsupportedError as error:
            return None, tuple(str(error).splitlines())
    if q.element_size() > 2:
        return None, ()
    wide = explain_call(*(x.detach() for x in (q, k, v)), version=plain.chosen, out_dtype=torch.float32, **asked)
    return (torch.float32 if wide.chosen else None), ()


def lengths_of(seqlen: Any, q: Any, k: Any, size: int) -> tuple[int, int]:
    """How many queries and keys of the whole are no padding. TypeError or ValueError where there can't be so many."""
    pair = seqlen if isinstance(seqlen, tuple | list) else (seqlen, seqlen)
    if len(pair) != 2:
        raise ValueError(f"seqlen must be an int, or two of queries and keys, got {seqlen!r}")
    for name, n, x in zip(("queries", "keys"), pair, (q, k), strict=True):
        if isinstance(x, Tensor) and x.ndim in (3, 4):
            check_seqlen("seqlen" if pair[0] is pair[1] else f"seqlen of {name}", n, _rows(x) * size)
    return pair[0], pair[1]


def _whole(q: Any, k: Any, v: Any, size: int, lengths: tuple[int, int] | None) -> tuple[Any, Any, Any]:
    """q, k and v of all ranks, but padding, without memory for them."""
    if lengths is None or not all(isinstance(x, Tensor) and x.ndim in (3, 4) for x in (q, k, v)):
        return like(q, rows=size), like(k, rows=size), like(v, rows=size)
    of_q, of_k = lengths
    return (
        like(q, rows=of_q, times=False),
        like(k, rows=of_k, times=False),
        like(v, rows=of_k if _rows(v) == _rows(k) else _rows(v) * size, times=False),
    )


def _given(x: Any) -> bool:
    return x is not None and x is not False


def _rows(x: Tensor) -> int:
    return x.shape[0] if x.ndim == 3 else x.shape[1]


def _heads(s: Sizes, copies: int) -> tuple[int, int, int]:
    """Of q, k and v on one rank."""
    kv = s.heads_kv * copies // s.ranks
    return s.heads // s.ranks, kv, kv


def like(x: Any, *, rows: int, heads: int | None = None, times: bool = True) -> Any:
    """A tensor of so many times the rows, or of so many rows, and so many heads, without memory for them."""
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        return x
    shape = list(x.shape)
    shape[x.ndim - 3] = shape[x.ndim - 3] * rows if times else rows
    shape[-2] = heads or shape[-2]
    like = x.detach().new_empty(shape[-1]).expand(shape)
    return like.requires_grad_() if x.requires_grad else like


def _flat(options: Mapping[str, Any], heads: int | None = None) -> dict[str, Any]:
    """The options, with as many sinks as there are heads."""
    sinks = options.get("sinks")
    return dict(options) if sinks is None or heads is None else {**options, "sinks": sinks[:heads]}
