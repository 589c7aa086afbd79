"""Functions on scores that have names, each made of the operations that any function for `attention(score_mod=)` may be
made of. With s a score, scaled, of query i and key j of head h:

    softcap             cap * tanh(s / cap)                        Gemma 2, arXiv:2408.00118
    alibi               s + slope_h * (j - i)                      Press et al. 2021, arXiv:2108.12409
    bias                s + bias_bhij                              T5, arXiv:1910.10683; AlphaFold 2
    relative_position   s + table_h[j - i]                         Shaw et al. 2018, arXiv:1803.02155; T5's buckets
    apart

A function has one: `lambda s, *at: relative(softcap(s, *at), *at)` is two of them, one behind the other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashzoo.scores.fitting import fitting
from flashzoo.scores.mod import ScoreMod

LEAST = -1e38
"""A bias below masks."""
SMALLEST_CAP, LARGEST_CAP = 1e-30, 1e30
"""Of softcap: within float32 is what a score is divided by and multiplied with."""

__all__ = ["alibi", "bias", "relative_position", "softcap"]


def softcap(cap: float) -> ScoreMod:
    """Scores within -cap and cap.

    Args:
        cap: a number from 1e-30 to 1e30.

    Raises:
        TypeError, ValueError: cap is none.
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise TypeError(f"cap must be a float, got {type(cap).__name__}")
    if not SMALLEST_CAP <= cap <= LARGEST_CAP:
        raise ValueError(f"cap must be from {SMALLEST_CAP} to {LARGEST_CAP}, got {cap}")

    if is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        from flashzoo.scores.in_graph import keep

        cap = guard_scalar(cap)  # a graph for each: the compiler makes a variable of the second
        keep(_make_softcap, cap)
    else:
        _make_softcap(cap)
    return _softcaps[cap]


_softcaps: dict[float, ScoreMod] = {}


def _make_softcap(cap: float) -> None:
    def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    if cap not in _softcaps:  # a graph is made anew where it finds another
        _softcaps[cap] = ScoreMod.of(softcap)


def alibi(slopes: Tensor) -> ScoreMod:
    """A penalty for distance, of each head its own: under a causal mask each key loses its head's slope for each token
    between it and its query. Keys ahead of the query gain as much.

    Args:
        slopes: `(heads,)` or `(batch, heads)`, floating-point. A call that they do not fit is an error.

    Raises:
        TypeError, ValueError: slopes are no such tensor.
    """
    _check("slopes", slopes, (1, 2), "(heads,) or (batch, heads)")
    by_batch = slopes.ndim == 2
    wide = torch.promote_types(slopes.dtype, torch.float32)  # 16 bits have few of the distances

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        slope = fitting(slopes)[b, h] if by_batch else fitting(slopes)[h]
        return score + slope.to(wide) * (kv_idx - q_idx)

    return ScoreMod.of(alibi)


def bias(bias: Tensor) -> ScoreMod:
    """A number added to each score. -inf masks it, and so does what is below -1e38: a row of such scores alone, the
    smallest of float32 say, would be nothing that float32 has an LSE of.

    Args:
        bias: `(batch, heads, seqlen_q, seqlen_k)` or what broadcasts to it, as a mask of
            `torch.nn.functional.scaled_dot_product_attention` does: sizes of 1, and fewer dimensions, the last ones;
            floating-point. A call that it does not fit is an error. Of packed sequences the first rows and columns are
            read, and how many it has is not checked.

    Raises:
        TypeError, ValueError: bias is no such tensor.
    """
    _check("bias", bias, (0, 1, 2, 3, 4), "(batch, heads, seqlen_q, seqlen_k), or what broadcasts to it")
    shape = bias.shape

    def add(score: Tensor, *at: Tensor) -> Tensor:
        index = tuple(0 if size == 1 else i for size, i in zip(shape, at[4 - len(shape) :], strict=True))
        number = fitting(bias)[index] if index else bias
        return torch.where(number.float() < LEAST, -math.inf, score + number)

    return ScoreMod.of(add)


def relative_position(table: Tensor) -> ScoreMod:
    """A number for how far a key lies from its query, learnt or given; as far as the table goes, and beyond that its
    last.

    Args:
        table: `(distances,)` or `(heads, distances)`, floating-point, of an odd number of distances: the middle one is
            that of the query's own place, those behind it are of keys ahead of the query. A call with other heads is an
            error.

    Raises:
        TypeError, ValueError: table is no such tensor.
    """
    _check("table", table, (1, 2), "(distances,) or (heads, distances)")
    furthest, by_head = table.shape[-1] // 2, table.ndim == 2
    if table.shape[-1] % 2 == 0:
        raise ValueError(f"table must have an odd number of distances, got {table.shape[-1]}")

    def relative_position(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at = (kv_idx - q_idx).clamp(-furthest, furthest) + furthest
        return score + (fitting(table)[h, at] if by_head else table[at])

    return ScoreMod.of(relative_position)


def _check(name: str, x: object, dimensions: tuple[int, ...], shape: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point Tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim not in dimensions:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
