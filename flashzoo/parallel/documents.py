"""Packed documents dealt out to ranks, the longest to all of them: `Documents`.

A causal document of L rows has L²/2 pairs of a query and a key. Shards of one packed row have as many rows each, but
not as much work, and where one document is most of it no order of documents helps (`packing`). So here shards are no
spans of the packed row:

1. The k longest documents are shared: each has zigzag shards of its own, and is a call of `attention` for all ranks.
2. The others, longest first, each go whole to the rank that has least work and fewest rows, and are one call of packed
   sequences there, of which no other rank knows.

k is the least at which the busiest rank has at most `AS_EVEN` times the mean's work, and the fullest as many times its
rows; or the evenest. What a rank lacks of as many rows as the fullest is padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashzoo import UnsupportedError
from flashzoo import attention as attention_of_one
from flashzoo import explain as explain_call
from flashzoo.integers import cdiv
from flashzoo.parallel.api import Method, attention, explain, gathered_rows, said
from flashzoo.parallel.choose import like
from flashzoo.parallel.exchange import gathered
from flashzoo.parallel.groups import Ranks, kind_of, ranks_of
from flashzoo.parallel.layout import check_pad, check_rows, numbers_of, refuse_grad
from flashzoo.parallel.packing import AS_EVEN, whole_numbers
from flashzoo.parallel.parts import one_behind_the_other
from flashzoo.registry import requested

MOST_SHARED = 16
"""Documents, or as many as there are ranks, which of equal ones may want as many: each is a collective call."""
MOST_TOLD = 64
"""Lengths that ranks tell each other one by one."""
TAKEN = ("causal", "softmax_scale", "window_size", "deterministic", "sinks")


@dataclass(frozen=True)
class Deal:
    """Which documents all ranks share, which lie whole on each, and how even that is.

    Attributes:
        shared: their indices.
        whole: of each rank, its own.
        rows: of each rank.
        works: pairs of a query and a key that each rank has.
    """

    shared: tuple[int, ...]
    whole: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    works: tuple[float, ...]

    @property
    def uneven(self) -> float:
        """The busiest rank's work, or the fullest one's rows if that is more, over the mean's."""
        return max(max(each) * len(each) / sum(each) if sum(each) else 1.0 for each in (self.rows, self.works))


def dealt(lengths: Sequence[int], ranks: int) -> Deal:
    """As this module's text says; the evenest where none is as even as that."""
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    best = _dealt(lengths, longest, 0, ranks)
    for k in range(1, min(max(MOST_SHARED, ranks), len(lengths)) + 1):
        if best.uneven <= AS_EVEN or lengths[longest[k - 1]] < 2 * ranks:
            break
        best = min(best, _dealt(lengths, longest, k, ranks), key=lambda deal: deal.uneven)
    return best


def _dealt(lengths: Sequence[int], longest: Sequence[int], k: int, ranks: int) -> Deal:
    """With the k longest shared."""
    shared = longest[:k]
    all_rows, all_works = sum(lengths), sum(length**2 / 2 for length in lengths)
    rows = [sum(2 * _step(lengths[i], ranks) for i in shared)] * ranks
    works = [sum(lengths[i] ** 2 / 2 for i in shared) / ranks] * ranks
    whole: list[list[int]] = [[] for _ in range(ranks)]
    per_row, per_pair = max(all_rows, 1) ** -2, max(all_works, 1) ** -2
    for i in longest[k:]:
        length, more = lengths[i], lengths[i] ** 2 / 2
        fullness = [
            per_row * (n + length) ** 2 + per_pair * (work + more) ** 2 for n, work in zip(rows, works, strict=True)
        ]
        least = fullness.index(min(fullness))
        whole[least].append(i)
        rows[least] += length
        works[least] += more
    return Deal(tuple(shared), tuple(tuple(sorted(own)) for own in whole), tuple(rows), tuple(works))


def _agreed(lengths: Sequence[int], group: Any) -> tuple[Ranks, tuple[int, ...], Deal]:
    """The group's ranks, the lengths that all of them have, and how they are dealt."""
    ranks, whole, wrong = ranks_of(group), (), None
    try:
        whole = tuple(whole_numbers(lengths))
    except (TypeError, ValueError) as error:  # the others are to hear of it
        wrong = error

    def made() -> Deal:
        if wrong is not None:
            raise wrong
        return dealt(whole, ranks.size)

    kind = (("documents", whole if len(whole) <= MOST_TOLD else _digest(whole)),)
    return ranks, whole, ranks.agree(kind, made, remember=False)


def _digest(lengths: Sequence[int]) -> str:
    told = sha256(repr(lengths).encode()).hexdigest()[:16]
    return f"{len(lengths)} of {sum(lengths)} rows, {lengths[0]} to {lengths[-1]}, sha256 {told}"


def _step(length: int, ranks: int) -> int:
    """Rows of a chunk of a shared document."""
    return cdiv(length, 2 * ranks)


class Documents:
    """Which rows of packed documents each rank of a group has: as many, with about as much work.

    Every rank makes one alike, of each batch anew. What it is for is a document, or a few, that are most of the work;
    where none is, documents in contiguous shards (`balanced`) cost fewer calls.

    Args:
        lengths: rows of each document, in the order in which they are packed.
        group: as in `parallel.attention`.

    Attributes:
        lengths: those.
        deal: which documents are shared, which lie where, and how even that is.
        rows: of every rank, padding among them.

    Raises:
        TypeError, ValueError: a length is no whole number from 0 on, group is none, or ranks have other lengths; the
            same on every rank.
    """

    def __init__(self, lengths: Sequence[int], group: Any) -> None:
        self._group = group
        self.lengths: tuple[int, ...]
        self.deal: Deal
        self._ranks, self.lengths, self.deal = _agreed(lengths, group)
        self.rows: int = max(self.deal.rows)
        self._placed: dict[torch.device, dict[str, Tensor]] = {}

    def __str__(self) -> str:
        deal, longest = self.deal, [self.lengths[i] for i in self.deal.shared]
        shared = f"{len(longest)} shared by all, of {', '.join(map(str, longest))} rows" if longest else "none shared"
        mean = sum(deal.works) / len(deal.works)
        return (
            f"{len(self.lengths)} documents of {sum(self.lengths)} rows on {self._ranks.size} ranks: {shared}\n"
            f"  the busiest has {max(deal.works) / mean if mean else 1:.2f} times the mean work; each has {self.rows} "
            f"rows, of which {min(deal.rows)} or more are no padding"
        )

    def shard(self, x: Tensor, dim: int = 0, pad: float | bool = 0) -> Tensor:
        """This rank's rows of a tensor that every rank has whole: inputs, labels, masks of the loss.

        Args:
            x: any dtype and device; of size `sum(lengths)` along `dim`, documents one behind the other.
            dim: the one of the rows.
            pad: what rows of padding are filled with: 0 of inputs, of labels what the loss leaves out.

        Returns:
            `rows` rows, in the order in which `attention` takes them; differentiable. Nothing is communicated.

        Raises:
            TypeError, ValueError: an argument is malformed.
        """
        check_rows(x, dim)
        check_pad(pad, x.dtype)
        if x.shape[dim] != sum(self.lengths):
            raise ValueError(
                f"x's size in dimension {dim} must be the documents' {sum(self.lengths)} rows, got {x.shape[dim]}"
            )
        at, shape = self._on(x.device)["places"], list(x.shape)
        shape[dim] = self.rows
        if not x.shape[dim]:
            return x.new_full(shape, pad)
        found = x.index_select(dim, at.clamp(min=0))
        return found.masked_fill((at < 0).view([-1 if i == dim % x.ndim else 1 for i in range(x.ndim)]), pad)

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """The whole tensor, of which every rank has its shard: what `shard` was given.

        Args:
            x: this rank's rows, of the same shape and dtype on every rank.
            dim: as in `shard`.

        Returns:
            The whole, on every rank, documents in their order; one all-gather. Not differentiable.

        Raises:
            TypeError, ValueError: an argument is malformed, ranks differ in shape or dtype, or x requires grad.
        """
        if is_dynamo_compiling():
            from flashzoo.untraced import untraced

            return untraced(self.unshard, x, dim)
        ranks = self._ranks

        def check() -> None:
            check_rows(x, dim)
            if x.shape[dim] != self.rows:
                raise ValueError(
                    f"x's size in dimension {dim} must be each rank's {self.rows} rows, got {x.shape[dim]}"
                )
            refuse_grad(x)

        how = {"dim": dim, "rows": self.rows, "recorded": torch.is_grad_enabled()}
        ranks.agree(kind_of({"unshard": x, **how}), check)
        if not self.rows:
            return x
        (every,), works = gathered([x.contiguous()], ranks)
        works.wait()
        shape = list(x.shape)
        shape[dim] = sum(self.lengths)
        whole = x.new_empty(shape)
        for rank, part in enumerate(every):
            at = self._of_rank(rank)["places"]
            here = (at >= 0).nonzero()[:, 0]
            whole.index_copy_(dim, at[here].to(x.device), part.index_select(dim, here.to(x.device)))
        return whole

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Where in its document each of this rank's rows is: for rotary embeddings, learnt positions.

        Args:
            device: of the answer.

        Returns:
            int64 `(rows,)`; of padding 0.
        """
        device = torch.device(torch.get_default_device() if device is None else device)
        return self._on(device)["positions"].clone()

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        method: Method = "auto",
        return_lse: bool = False,
        version: str = "auto",
        **options: Any,
    ) -> Any:
        """`flashzoo.attention` of the documents, each of which sees itself alone.

        Every rank calls it alike, in the same order, with its own rows.

        Args:
            q: `(rows, heads, head_dim)`, as `shard` gives them; fp16, bf16, fp32 or fp64.
            k, v: `(rows, heads_kv, head_dim)` and `(rows, heads_kv, head_dim_v)`.
            method: of `parallel.attention`, by which shared documents are answered: all but "halo".
            return_lse: return the log-sum-exp of each row of scores too.
            version: who answers the calls on each rank; as in `flashzoo.attention`.
            options: of `flashzoo.attention`, the same values on every rank: causal, softmax_scale, window_size,
                deterministic, sinks.

        Returns:
            out `(rows, heads, head_dim_v)`, 0 where there is padding; with `return_lse` the pair `(out, lse)`, lse
            `(heads, rows)`, -inf there. Differentiable, once, as `parallel.attention` is.

        Raises:
            TypeError, ValueError, flashzoo.UnsupportedError, RuntimeError: as `parallel.attention`.
        """
        how = {"return_lse": return_lse, "version": version, **said(options)}
        if is_dynamo_compiling():  # as in `parallel.attention`
            from flashzoo.untraced import untraced

            return untraced(self.attention, q, k, v, method=method, **how)
        q, k, v = (gathered_rows(x) for x in (q, k, v))
        tensors = {"q": q, "k": k, "v": v}
        asked = {**how, **tensors, "method": method, "recorded": torch.is_grad_enabled()}
        forms: dict[str, Any] = dict(kind_of(asked | {"version": requested(version)[0]}))
        self._ranks.agree((("documents' rows", self.rows), *forms.items()), lambda: self._check_rows(tensors))
        for name in tensors:  # what else is to be checked is the same of any rows
            shape, *more = forms[name]
            forms[name] = (shape[1:], *more)
        self._ranks.agree((("documents", "any"), *forms.items()), lambda: self._check(tensors, method, how))
        found, first = [], 0
        for i in self.deal.shared:
            end = first + 2 * _step(self.lengths[i], self._ranks.size)
            rows = (x[None, first:end] for x in (q, k, v))
            seqlen = self.lengths[i] if self.lengths[i] < self._ranks.size * (end - first) else None
            out = attention(*rows, group=self._group, method=method, seqlen=seqlen, **how)
            found.append(tuple(x.squeeze(0) for x in out) if return_lse else (out.squeeze(0),))
            first = end
        end = self.deal.rows[self._ranks.rank]
        if first < end or not found:
            rows = (x[first:end] for x in (q, k, v))
            out = attention_of_one(*rows, cu_seqlens_q=self._on(q.device)["ends"], **how)
            found.append(out if return_lse else (out,))
        if end < self.rows:
            last = found[-1]
            of_out = last[0].new_zeros((self.rows - end, *last[0].shape[1:]))
            found.append((of_out, *(x.new_full((len(x), self.rows - end), -inf) for x in last[1:])))
        parts = [one_behind_the_other(xs, dim) for dim, xs in enumerate(zip(*found, strict=True))]
        return tuple(parts) if return_lse else parts[0]

    def _check_rows(self, tensors: Mapping[str, Any]) -> None:
        """TypeError or ValueError where these are no rows of the documents."""
        for name, x in tensors.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.ndim != 3 or x.shape[0] != self.rows:
                raise ValueError(f"{name} must have shape ({self.rows}, heads, head_dim), got {tuple(x.shape)}")

    def _check(self, tensors: Mapping[str, Tensor], method: Any, how: Mapping[str, Any]) -> None:
        """TypeError, ValueError or UnsupportedError where these are none of a call, be documents shared or not: which
        are is another matter in every batch."""
        unknown = [name for name in how if name not in (*TAKEN, "return_lse", "version")]
        if unknown:
            raise TypeError(f"Documents.attention takes no {unknown[0]}: it takes {', '.join(TAKEN)}")
        if method == "halo":
            raise ValueError("method must be one that takes a document by itself, got 'halo'")
        a_document = [like(x, rows=2, times=False)[None] for x in tensors.values()]
        if self._ranks.size > 1:
            explain(*a_document, group=self._group, method=method, **how).taken()
        begins = torch.zeros(2, dtype=torch.int32, device=tensors["q"].device)
        own = explain_call(*(x[0] for x in a_document), cu_seqlens_q=begins, **how)
        if own.chosen is None:
            raise UnsupportedError(str(own))

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """Of this rank's rows "places" in the packed row, -1 of padding, and "positions" in their documents; and "ends"
        of its own documents: on a device, copied there once."""
        if device not in self._placed:
            self._placed[device] = {name: x.to(device) for name, x in self._of_rank(self._ranks.rank).items()}
        return self._placed[device]

    def _of_rank(self, rank: int) -> dict[str, Tensor]:
        """The same of any rank, on the CPU."""
        begins = [*accumulate(self.lengths, initial=0)]
        own = [self.lengths[i] for i in self.deal.whole[rank]]
        spans = []
        for i in self.deal.shared:
            step = _step(self.lengths[i], self._ranks.size)
            spans += [(i, number * step, step) for number in numbers_of(rank, self._ranks.size, 2)]
        spans += [(i, 0, self.lengths[i]) for i in self.deal.whole[rank]]
        places, positions = [], []
        for i, first, rows in spans:
            at = torch.arange(first, first + rows, device="cpu")
            there = at < self.lengths[i]
            places.append(torch.where(there, at + begins[i], -1))
            positions.append(torch.where(there, at, 0))
        padding = self.rows - sum(rows for *_, rows in spans)
        return {
            "places": torch.cat([*places, torch.full((padding,), -1, device="cpu")]),
            "positions": torch.cat([*positions, torch.zeros(padding, dtype=torch.int64, device="cpu")]),
            "ends": torch.tensor([*accumulate(own, initial=0)], dtype=torch.int32, device="cpu"),
        }
