"""`Ranges`: which rows of q, k and v are whose, where the sequences of a batch lie behind one another,
or are not as long as their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flashzoo.call.forms import Window


def flaws_of_caches(used: Tensor, seqlen_k: int, longest: int | None = None) -> Iterator[str]:
    """What is wrong with how much of each cache is used, or with max_seqlen_k, `longest`, in words that begin with the
    argument's name; waits for the device."""
    for at, count in enumerate(used.tolist()):
        if not 0 <= count <= seqlen_k:
            yield f"seqused_k must be from 0 to the cache's length, got {count} of {seqlen_k} at {at}"
        if longest is not None and count > longest:
            yield f"max_seqlen_k must be at least what is used of each cache, got {longest} and {count} at {at}"


def flaws_of_packed(name: str, cu_seqlens: Tensor, total: int, longest: int | None) -> Iterator[str]:
    """What is wrong with where the sequences of q, or k, begin, in words that begin with the argument's name; waits for
    the device.

    Args:
        name: "q" or "k".
        cu_seqlens: int32 `(sequences + 1,)`.
        total: rows there are.
        longest: max_seqlen_q, or max_seqlen_k.
    """
    cu = cu_seqlens.tolist()
    lengths = [end - first for first, end in pairwise(cu)]
    if cu[0] < 0 or cu[-1] > total:
        yield f"cu_seqlens_{name} must be from 0 to the {total} rows of {name}, got {cu[0]} to {cu[-1]}"
    if min(lengths, default=0) < 0:
        at = next(i for i, length in enumerate(lengths) if length < 0)
        yield f"cu_seqlens_{name} must not fall, got {cu[at]} and then {cu[at + 1]} at {at + 1}"
    if longest is not None and max(lengths, default=0) > longest:
        at = lengths.index(max(lengths))
        yield (
            f"max_seqlen_{name} must be at least each sequence's length, "
            f"got {longest} and {lengths[at]} of sequence {at}"
        )


def visible_of_caches(used: Tensor, span: Window, seqlen_q: int, seqlen_k: int) -> Tensor:
    """`(batch, 1, seqlen_q, seqlen_k)` bool: the keys that each query sees where so many of each sequence's are used,
    the last of them with its last query.

    Args:
        used: int32 `(batch,)`; below 0 is 0, and above seqlen_k is seqlen_k.
        span: the band around the diagonal, as `Problem.span`.
    """
    used = used.long().clamp(0, seqlen_k)[:, None, None]
    query, key = (torch.arange(n, device=used.device) for n in (seqlen_q, seqlen_k))
    seen, distance = key < used, (key - used) - (query - seqlen_q)[:, None]
    left, right = span
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    return seen.expand(len(used), seqlen_q, seqlen_k)[:, None]


def places(
    sizes: tuple[int, int, int, int], ranges: Ranges | None, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each score is: int32 tensors that broadcast to `(batch, heads, seqlen_q, seqlen_k)`, of its batch, or of
    packed sequences the sequence's number, of its head, and of its query and key, counted from a sequence's first.

    Args:
        sizes: batch, heads, seqlen_q and seqlen_k.
        ranges: of packed sequences.
        device: of the answer, where there are none.
    """
    device = device if ranges is None else ranges.cu_seqlens_q.device
    b, h, q, k = (torch.arange(size, dtype=torch.int32, device=device) for size in sizes)
    b = b[:, None, None, None]
    if ranges is not None:
        of_q, of_k = ranges.numbers(sizes[2], sizes[3])
        first_q, _, first_k, _ = ranges.bounds(sizes[2], sizes[3])
        if len(first_q):
            q, k = (q - first_q[of_q]).int().clamp(min=0), (k - first_k[of_k]).int().clamp(min=0)
            b = of_q.int()[None, None, :, None]
    return b, h[None, :, None, None], q[:, None], k


@dataclass(frozen=True, eq=False)
class Ranges:
    """Where each sequence's queries and keys begin, and where they end.
    All of it lies on the tensors' device, and no host reads it.

    What lies outside of the tensors is clamped, and where cu_seqlens fall no row is of any sequence: there is no value
    of these by which memory is read that is not theirs.

    Attributes:
        cu_seqlens_q: int32 `(sequences + 1,)`: sequence i has the queries from `cu_seqlens_q[i]` to
            `cu_seqlens_q[i + 1]`.
        cu_seqlens_k: the same for its keys.
        seqused_k: int32 `(sequences,)`: of its keys only so many, from the first on; None for all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None = None

    def bounds(self, total_q: int, total_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each sequence the first query, the one past the last, the first key, and the one past the last:
        int64 `(sequences,)` each."""
        q, k = (cu.long().clamp(0, total) for cu, total in ((self.cu_seqlens_q, total_q), (self.cu_seqlens_k, total_k)))
        q_first, k_first = q[:-1], k[:-1]
        falls = [(cu[1:] < cu[:-1]).any() for cu in (self.cu_seqlens_q, self.cu_seqlens_k)]
        q_end, k_end = (torch.where(falls[0] | falls[1], x[:-1], x[1:]) for x in (q, k))
        if self.seqused_k is not None:
            k_end = torch.minimum(k_end, k_first + self.seqused_k.long().clamp(min=0))
        return q_first, q_end, k_first, k_end

    def flaws(self, total_q: int, total_k: int, max_seqlen_q: int | None, max_seqlen_k: int | None) -> Iterator[str]:
        """What is wrong with these values, in words that begin with the argument's name; waits for the device."""
        yield from flaws_of_packed("q", self.cu_seqlens_q, total_q, max_seqlen_q)
        yield from flaws_of_packed("k", self.cu_seqlens_k, total_k, max_seqlen_k)
        if self.seqused_k is not None:
            lengths = self.cu_seqlens_k.diff().tolist()
            for at, (used, length) in enumerate(zip(self.seqused_k.tolist(), lengths, strict=True)):
                if not 0 <= used <= length:
                    yield f"seqused_k must be from 0 to the sequence's length, got {used} of {length} at {at}"
                    return

    def visible(self, span: Window, total_q: int, total_k: int, queries: Tensor | None = None) -> Tensor:
        """`(total_q, total_k)` bool, True where the query sees the key:
        one of its own sequence, and in the band around its own diagonal.

        Args:
            span: the band, as `Problem.span`.
            queries: int64, the rows of the answer; None for all.
        """
        query = torch.arange(total_q, device=self.cu_seqlens_q.device) if queries is None else queries
        key = torch.arange(total_k, device=self.cu_seqlens_q.device)
        q_first, q_end, k_first, k_end = self.bounds(total_q, total_k)
        if not len(q_first):
            return torch.zeros(len(query), total_k, dtype=torch.bool, device=query.device)
        of = _number(query, q_end)
        q_first, q_end, k_first, k_end = q_first[of], q_end[of], k_first[of], k_end[of]
        seen = ((query >= q_first) & (query < q_end))[:, None] & (key >= k_first[:, None]) & (key < k_end[:, None])
        left, right = span
        distance = (key - k_end[:, None]) - (query - q_end)[:, None]  # the last query's diagonal ends at the last key
        if left is not None:
            seen = seen & (distance >= -left)
        if right is not None:
            seen = seen & (distance <= right)
        return seen

    def taken(self, total_q: int, total_k: int) -> tuple[Tensor, Tensor]:
        """Of each row of q, whether a sequence has it, and of k, whether one uses it: bool."""
        q_first, q_end, k_first, k_end = self.bounds(total_q, total_k)
        return _within(total_q, q_first, q_end), _within(total_k, k_first, k_end)

    def numbers(self, total_q: int, total_k: int) -> tuple[Tensor, Tensor]:
        """Of each row of q, and of k, the number of its sequence, int64;
        of a row that no sequence has, or uses, that of any."""
        _, q_end, _, k_end = self.bounds(total_q, total_k)
        rows_q, rows_k = (torch.arange(total, device=q_end.device) for total in (total_q, total_k))
        return _number(rows_q, q_end), _number(rows_k, k_end)


def _within(total: int, firsts: Tensor, ends: Tensor) -> Tensor:
    """Of each row whether more sequences have begun by it than have ended."""
    row = torch.arange(total, device=firsts.device)
    return torch.searchsorted(firsts, row, right=True) > torch.searchsorted(ends, row, right=True)


def _number(row: Tensor, ends: Tensor) -> Tensor:
    return torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
