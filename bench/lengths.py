"""Packed sequences that cells may have, by name: how long each is.

A name is what the column `lengths` of a results file holds: `documents` (lengths as documents have them, log-normal,
half of them below 493 tokens, each at most a quarter of the total) or `equal512` (as many of that length as there is
room for). What is over is the last one's.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from flashzoo.lengths import Ranges

FORMS = r"documents|equal[1-9]\d*"
MEAN, DEVIATION = 6.2, 1.1
"""Of the logarithm of a document's length: what packed batches of the web's text are like,
as benchmarks of packed attention draw them."""
SHARE = 4
"""The largest document has a quarter of all tokens."""


def known(name: str) -> bool:
    """Whether there are lengths of that name."""
    return re.fullmatch(FORMS, name) is not None


def lengths(name: str, total: int) -> tuple[int, ...]:
    """The lengths of that name, whose sum is the total. Raises ValueError for an unknown name."""
    if not known(name):
        raise ValueError(f"lengths must have a name of the form {FORMS}, got {name!r}")
    random, found, left = Random(total), [], total
    while left:
        drawn = (
            round(random.lognormvariate(MEAN, DEVIATION)) if name == "documents" else int(name.removeprefix("equal"))
        )
        most = max(1, total // SHARE) if name == "documents" else left
        found.append(min(max(1, drawn), most, left))
        left -= found[-1]
    return tuple(found)


@dataclass(frozen=True)
class Packed:
    """Sequences of these lengths, behind one another, and what calls of attention are told of them.

    Attributes:
        lengths: of each sequence, as many keys as queries.
        device: where `cu_seqlens` lies.
    """

    lengths: tuple[int, ...]
    device: str

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 `(sequences + 1,)`."""
        return torch.tensor((0, *accumulate(self.lengths)), dtype=torch.int32, device=self.device)

    @cached_property
    def documents(self) -> Tensor:
        """int32 `(total,)`: the sequence of each row."""
        return torch.repeat_interleave(
            torch.arange(len(self.lengths), dtype=torch.int32, device=self.device),
            torch.tensor(self.lengths, device=self.device),
            output_size=self.total,
        )

    def density(self, causal: bool) -> float:
        """The share of all pairs of a query and a key that are seen."""
        return sum(math.comb(n + 1, 2) if causal else n * n for n in self.lengths) / self.total**2

    def seen_by(self, queries: Tensor, causal: bool) -> Tensor:
        """`(1, 1, queries, total)` bool: the keys that these queries see."""
        ranges = Ranges(self.cu_seqlens, self.cu_seqlens)
        return ranges.visible((None, 0 if causal else None), self.total, self.total, queries)[None, None]


@lru_cache
def packed(name: str, total: int, device: str) -> Packed:
    """The sequences of that name."""
    return Packed(lengths(name, total), device)
