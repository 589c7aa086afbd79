"""Dropout's mask in plain torch, bit by bit the kernels' (flashzoo/_triton/dropout.py).

Of a pair (query, key) of a head it is a function of the seed and of the pair's place alone, as Philox-4x32 is
(Salmon et al. 2011), of whose 7 rounds no test of theirs tells the numbers from random ones. It gives four at a time.
Those of {i, i + 8} x {j, j + 8}, in blocks of 16 by 16, are of one call, with the counter (j's, i's, head, batch): a
thread of the tensor cores has all four of them, whichever side is transposed, so that none is moved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashzoo.call.operands import Operands
from flashzoo.call.problem import DROPOUT_STEPS, Problem
from flashzoo.lengths import places

ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def kept_at(problem: Problem, operands: Operands) -> Tensor | None:
    """`(batch or 1, heads, seqlen_q, seqlen_k)` bool, the pairs that a call keeps; None where it has no dropout. Its
    seed may be that already."""
    seed: Any = operands.dropout_seed
    if not problem.dropout_p:
        return None
    if seed.dtype == torch.bool:
        return seed
    sizes = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return kept(seed, problem.dropped, places(sizes, operands.ranges, seed.device))


def weights(mask: Tensor | None, problem: Problem, like: Tensor) -> Tensor | None:
    """What each P is multiplied by on its way to V, as scores `(batch, heads_kv, group, seqlen_q, seqlen_k)` lie; mask
    as `kept_at`, of as many heads."""
    if mask is None:
        return None
    whole = mask.expand(like.shape[0], -1, -1, -1).reshape(like.shape)
    return whole.to(like.dtype).div_(1 - problem.dropped)


def times(x: Tensor, z: Tensor | None) -> Tensor:
    """Their product, x itself where z is None."""
    return x if z is None else x * z


def kept(seed: Tensor, dropped: float, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Which pairs are kept, bool.

    Args:
        seed: int64, of one element.
        dropped: the share of the others, a multiple of `1 / DROPOUT_STEPS`: see `Problem.dropped`.
        at: batch, or of packed sequences the sequence's number, query head, query and key of each pair, integers that
            broadcast to the answer's shape.
    """
    b, h, i, j = (x.long() for x in at)
    words = philox(seed, (_group(j), _group(i), h, b))
    lower, right = i % 16 >= 8, j % 16 >= 8
    word = torch.where(lower, torch.where(right, words[3], words[2]), torch.where(right, words[1], words[0]))
    return (word >> 8) >= round(dropped * DROPOUT_STEPS)


def _group(index: Tensor) -> Tensor:
    """Indices that are 8 apart in a block of 16 share one."""
    return index // 16 * 8 + index % 8


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random numbers of 32 bits for each counter of four, all in int64, whose products wrap as they are to."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> 32 & _LOW) ^ c1 ^ k0, second & _LOW
        c2, c3 = (first >> 32 & _LOW) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _STEPS[0]) & _LOW, (k1 + _STEPS[1]) & _LOW
    return c0, c1, c2, c3
