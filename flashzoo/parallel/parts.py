"""Calls on parts of the keys, and what joins them: `flashzoo.merge` forward, sums backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashzoo import attention, attention_backward, merge
from flashzoo.parallel.pieces import Piece, Span, cuts, depth


@dataclass(frozen=True, slots=True)
class How:
    """How every part of a call is to be answered.

    Attributes:
        options: of `attention`, those that hold of parts alike: softmax_scale, deterministic.
        version: as in `attention`.
        partial: dtype of what parts give, before it is merged.
        cu_seqlens: of packed sequences, of the whole.
    """

    options: Mapping[str, Any]
    version: str
    partial: torch.dtype | None
    cu_seqlens: Tensor | None = None

    def of(self, piece: Piece, sinks: Tensor | None) -> dict[str, Any]:
        """The options of one call."""
        left, right = piece.band
        how = {**self.options, "version": self.version}
        # said as causal where it is that, for versions that know no windows
        how |= {"causal": True} if right == 0 else {"window_size": (left, right)} if right is not None else {}
        if left is not None:
            how["window_size"] = (left, right)
        if self.cu_seqlens is not None:
            for name, (first, end) in (("cu_seqlens_q", piece.q_span), ("cu_seqlens_k", piece.k_span)):
                how[name] = self.cu_seqlens.clamp(first, end) - first
        if sinks is not None:
            how["sinks"] = sinks
        return how


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one tensor `(batch, seqlen, columns)`, which travels at once."""
    return torch.cat((k.flatten(2), v.flatten(2)), -1)


def parted(rows: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `(batch, seqlen, heads, head_dim)`, or their gradients, of rows that have both; sizes of keys are
    as k's."""
    heads, head_dim = k.shape[2:]
    of_k, of_v = rows.split((heads * head_dim, rows.shape[-1] - heads * head_dim), -1)
    return of_k.unflatten(-1, (heads, -1)), of_v.unflatten(-1, (heads, -1))


class Part(NamedTuple):
    """What some rows of a shard have from some keys: out `(batch, rows, heads, head_dim_v)`
    and lse `(batch, heads, rows)`."""

    rows: Span
    out: Tensor
    lse: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece, how: How, sinks: Tensor | None = None) -> Part:
    """One call, on rows of q and of the keys at hand; sinks join one part of each row."""
    out, lse = attention(
        rows(q, piece.q), rows(k, piece.k), rows(v, piece.k), return_lse=True, out_dtype=how.partial,
        **how.of(piece, sinks),
    )  # fmt: skip
    return Part(piece.q, out, lse)


class Given(NamedTuple):
    """What a backward pass starts from, of this rank's rows: those of the whole."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    out: Tensor
    lse: Tensor

    def of(self, span: Span) -> Given:
        """Of these rows alone."""
        dout, q, out = (rows(x, span) for x in (self.dout, self.q, self.out))
        dlse = None if self.dlse is None else self.dlse[:, :, slice(*span)]
        return Given(dout, dlse, q, out, self.lse[:, :, slice(*span)])

    def backward(self, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """One call's dq, dk, dv, and dsinks where sinks."""
        return attention_backward(self.dout, self.q, k, v, self.out, self.lse, dlse=self.dlse, **options)


def backward(
    given: Given, k: Tensor, v: Tensor, piece: Piece, how: How, sinks: Tensor | None = None
) -> tuple[Tensor, ...]:
    """That of `forward`, on the same rows."""
    return given.of(piece.q).backward(rows(k, piece.k), rows(v, piece.k), **how.of(piece, sinks))


def rows(x: Tensor, span: Span) -> Tensor:
    """Rows of `(batch, seqlen, heads, head_dim)`."""
    return x if span == (0, x.shape[1]) else x[:, slice(*span)]


def one_behind_the_other(xs: Sequence[Tensor], dim: int) -> Tensor:
    """As one tensor, without a copy where there is but one."""
    return xs[0] if len(xs) == 1 else torch.cat(list(xs), dim)


def join(parts: Sequence[Part], out: Tensor, lse: Tensor) -> None:
    """All parts of each row merged into out and lse, of all rows, which may be a part's own: in float32, rounded once.

    Rows of no part are left as they are.
    """
    for first, end in cuts([part.rows for part in parts]):
        found = []
        for (begin, stop), *statistics in parts:
            if begin <= first and end <= stop:
                o, l = statistics
                found.append((o[:, first - begin : end - begin], l[..., first - begin : end - begin]))
        if len(found) > 1:
            found = [merge(*zip(*found, strict=True), out_dtype=out.dtype)]
        (o, l), into = found[0], (out[:, first:end], lse[..., first:end])
        if o.data_ptr() != into[0].data_ptr() or o.dtype != out.dtype:
            into[0].copy_(o)
            into[1].copy_(l)


class Sum:
    """A sum of shares, each of some rows of `(batch, seqlen, heads, head_dim)`, of which the first is written and what
    comes later is added. Of 16 bits two are rounded once as they are; more are summed in float32.

    Args:
        x: where it comes to lie: uninitialised but for `there`, wide enough for the depth of its shares.
        there: rows of shares that lie in it already.
    """

    def __init__(self, x: Tensor, there: Sequence[Span] = ()) -> None:
        self.x: Tensor = x
        self.there: list[Span] = list(there)

    def add(self, span: Span, share: Tensor) -> None:
        """One more share."""
        for first, end in cuts([span, *self.there]):
            if span[0] <= first and end <= span[1]:
                into, part = self.x[:, first:end], share[:, first - span[0] : end - span[0]]
                if any(a <= first and end <= b for a, b in self.there):
                    into += part
                else:
                    into.copy_(part)
        self.there.append(span)

    def whole(self) -> Tensor:
        """The sum; 0 in rows of no share."""
        every = (0, self.x.shape[1])
        for first, end in cuts([every, *self.there]):
            if not any(a <= first and end <= b for a, b in self.there):
                self.x[:, first:end] = 0
        return self.x


def sum_dtype(spans: Sequence[Span], dtype: torch.dtype) -> torch.dtype:
    """In what shares of these rows are added up: two of 16 bits are rounded once as they are, more are summed wide."""
    return dtype if depth(spans) <= 2 else torch.promote_types(dtype, torch.float32)


def sum_of_sinks(shares: Sequence[Tensor], sinks: Tensor | None) -> Tensor | None:
    """The gradient of sinks from those of the calls that had them; 0 where all of a rank's rows are padding."""
    if sinks is None or shares:
        return sum(shares[1:], shares[0]) if shares else None
    return torch.zeros_like(sinks)


def padded(out: Tensor, lse: Tensor | None, seqlen: int) -> tuple[Tensor, Tensor | None]:
    """out `(..., rows, heads, head_dim)` and lse `(..., heads, rows)` of so many rows: behind those that are there 0,
    and -inf in lse."""
    missing = seqlen - out.shape[-3]
    if not missing:
        return out, lse
    return pad(out, (0, 0, 0, 0, 0, missing)), None if lse is None else pad(lse, (0, missing), value=-torch.inf)
