"""Attention sinks: of each query head a logit that is in the softmax of all its rows, and has no value (gpt-oss, 2025).

With l the sum of a row's exponentials and m their maximum, the sink makes it l + exp(sink - m): P and out shrink, LSE
grows. The backward pass makes P from LSE, so it has the same formulas, with that LSE and that out; and the sink's own
gradient is that of a score whose value is 0, dS = P (0 - delta), summed over the rows that it is in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

MOST = torch.finfo(torch.float32).max / math.log2(math.e)
"""A sink above is infinite in kernels, which have it in log2 units."""


def flaws_of_sinks(sinks: Tensor) -> Iterator[str]:
    """What is wrong with their values, in words that begin with the argument's name; waits for the device."""
    if not bool((sinks <= MOST).all()):
        yield f"sinks must be at most {MOST:.2e}, or -inf, got {sinks.tolist()}"


def with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """LSE of rows that see their keys and, where there are any, sinks.

    Args:
        lse: of the keys alone, `(batch, heads, seqlen_q)`.
        sinks: `(heads,)`.
    """
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])


def share_of_keys(lse: Tensor, sinks: Tensor) -> Tensor:
    """How much of each row's softmax its keys have beside a sink, from the LSE of the keys alone."""
    return torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).masked_fill(lse == -math.inf, 0)


def gradient_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """`(heads,)`: the sum over rows of P of the sink times -delta, in a fixed order.

    Args:
        sinks: `(heads,)`.
        lse: of rows with their sinks, `(batch, heads, seqlen_q)`; -inf, or +inf, where there is no key and the sink is
            -inf.
        delta: rowsum(dO * O) - dLSE, as lse.
    """
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -math.inf, 0))
    return -(p * delta).sum((0, 2))
