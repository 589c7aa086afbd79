"""Functions on scores that a fuzzed call may have, what they read, and what they are told in every place of a call.

Each is written once, for a kernel that is made of it and for an oracle in float64 that calls it on all scores at once:
it reads by calling `read` with an index, so that who calls it says of what, and in which dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Read = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Kind:
    """A function on scores.

    Attributes:
        function: of the score, batch, head, query, key, and `read`.
        shape: of the tensor that it reads, from sequences, heads, seqlen_q and seqlen_k; None where it reads none.
        dtype: of that.
    """

    function: Callable[..., Tensor]
    shape: Callable[[int, int, int, int], tuple[int, ...]] | None = None
    dtype: torch.dtype = torch.float32


def _buckets(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, read: Read) -> Tensor:
    return torch.where(j % 3 == 0, s * read((h, (j - i).clamp(-4, 4) + 4)), s)


KINDS = {
    "softcap": Kind(lambda s, b, h, i, j, read: 6 * torch.tanh(s / 6)),
    "alibi": Kind(lambda s, b, h, i, j, read: s + read(h) * ((j - i) * 0.05), lambda n, h, q, k: (h,)),
    "bias": Kind(
        lambda s, b, h, i, j, read: torch.where((i + j) % 7 == 0, -torch.inf, s + read((b, 0, i, j))),
        lambda n, h, q, k: (n, 1, q, k),
        torch.bfloat16,
    ),
    "table": Kind(_buckets, lambda n, h, q, k: (h, 9)),
}


def places(call: Any, device: torch.device | str) -> tuple[Tensor, ...]:
    """Batch, head, query and key of every score, as they broadcast to `(batch, heads, seqlen_q, seqlen_k)`. Of rows of
    no sequence they are those of any."""
    b = torch.arange(call.batch, device=device)[:, None, None, None]
    h = torch.arange(call.heads, device=device)[None, :, None, None]
    i, j = torch.arange(call.seqlen_q, device=device)[:, None], torch.arange(call.seqlen_k, device=device)
    if call.lengths is not None:
        keys = call.lengths if call.lengths_k is None else call.lengths_k
        number, i = _of_rows(call.lengths, call.seqlen_q, device)
        b, i, j = number[:, None], i[:, None], _of_rows(keys, call.seqlen_k, device)[1]
    return b, h, i, j


def _of_rows(lengths: tuple[int, ...], rows: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Of each row the number of its sequence, and its place there."""
    number = [n for n, length in enumerate(lengths) for _ in range(length)]
    place = [i for length in lengths for i in range(length)]
    left = rows - len(place)
    number, place = ([*x, *[0] * left] for x in (number, place))
    number, place = (torch.tensor(x, dtype=torch.int64, device=device) for x in (number, place))  # there may be none
    return number, place


def sequences(call: Any) -> int:
    """How many a function is told of."""
    return call.batch if call.lengths is None else len(call.lengths)
