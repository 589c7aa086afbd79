"""What attention means, in formulas: the oracle in float64, and `standard`, its low-precision twin.

    S = f(Q K^T * softmax_scale),  P = softmax(S),  O = (Z * P) V,  LSE_i = log sum_j exp(S_ij)
    dV = (Z * P)^T dO,  dP = Z * (dO V^T),  delta_i = sum_d dO_id O_id - dLSE_i,  dS = P * (dP - delta),
    dQ = f'(dS) K * scale,  dK = f'(dS)^T Q * scale

with these meanings, once for every version: causal and windows are aligned bottom-right, of packed sequences in each; a
block mask, here a dense one, hides what it hides beside them; a row that sees no key gives 0, LSE -inf and gradients 0;
query head h reads key/value head h // (heads // heads_kv). A sink is one more term of the softmax,
P_i,sink = exp(sink - LSE_i), whose value is 0: dsink = -sum_i P_i,sink delta_i. f is the call's score_mod, before what
is not seen is hidden, and where there is none S and dS as they are; torch's autograd differentiates it. Z is 1 but for
dropout (flashzoo.dropout): then 0 for what is dropped, and 1 / (1 - dropout_p) for what is kept.

`standard` is the same with the numerics of a flash kernel: scores, sums and accumulators in float32; P, dS and O
rounded to the I/O dtype. Its error is the yardstick that every version's error is held against. It is also the
attention that the papers start from: three passes, with S and P written to and read from memory.

In FP8 the real inputs are q, k and v times their descales. `standard` then has the numerics of an FP8 kernel on Hopper:
e4m3 products, S summed in the tensor cores' 13 bits, P times 2^8 rounded to e4m3, l summed from P before that rounding.
P V is summed in float32, as kernels promote its sums to that, and with `fast_accum=True` as S is, all keys in a row.
What is not e4m3 already, `precision="fp8"`, it quantises with one scale for each head; its backward pass is the 16-bit
one, with FP8's O and LSE. Beside a 16-bit q, e4m3 k and v are multiplied as that dtype, and products by their
descales in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashzoo.autograd import differentiable
from flashzoo.call.operands import Operands
from flashzoo.call.problem import DESCALE_BLOCK, Problem
from flashzoo.dropout import kept_at, times, weights
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.integers import cdiv
from flashzoo.lengths import visible_of_caches
from flashzoo.scores.at import ScoredAt, flat
from flashzoo.sinks import gradient_of_sinks, share_of_keys, with_sinks

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
P_SCALE = 256.0
"""P, at most 1, is e4m3 times this: the largest power of two within e4m3's range, since below 2^-6 e4m3 has
ever fewer bits."""
HOPPER_K = 32
"""Elements of the sum that one instruction of Hopper's FP8 tensor core adds to its accumulator."""
HOPPER_EACH = 1 << 24
"""Up to so many products at a time, each is cut as the tensor core cuts it, at the size of the largest that it is added
to; where there are more, only their sum is: it takes a sum of a few large terms for the difference to show."""
HOPPER_SUM_BITS = 13
"""Mantissa bits of that accumulator, what is below them cut off (found by DeepSeek-V3, arXiv:2412.19437,
and SageAttention2)."""


@dataclass(frozen=True)
class Result:
    """One attention's out and, where asked for, lse `(batch, heads, seqlen_q)` and gradients, each in the shape of its
    input, sinks' `(heads,)` too; those of what a score_mod reads as one, float64 `(numbers,)`."""

    out: Tensor
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    dscore_mod: Tensor | None = None

    def items(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def at(self, part: Part) -> Result:
        """Views of the tensors that are there and have parts."""
        index = {"out": part.queries, "lse": part.rows, "dq": part.queries, "dk": part.keys, "dv": part.keys}
        return Result(**{name: value[index[name]] for name, value in self.items().items() if name in index})


def visible(problem: Problem, device: torch.device | str = "cpu", mask: Tensor | None = None) -> Tensor | None:
    """`(seqlen_q, seqlen_k)` bool, True where the query sees the key; None where all do.

    Args:
        mask: bool, what the call's operands show, as `shown`: the answer then is of that shape. Where lengths on the
            device say what is seen, it is the answer.
    """
    left, right = problem.span
    if problem.by_lengths or (left is None and right is None):
        return mask
    distance = distances(problem, device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    return seen if mask is None else seen & mask


def distances(problem: Problem, device: torch.device | str) -> Tensor:
    """`(seqlen_q, seqlen_k)`: how far each key lies past its query's aligned diagonal."""
    diagonal = torch.arange(problem.seqlen_q, device=device)[:, None] + problem.offset
    return torch.arange(problem.seqlen_k, device=device)[None, :] - diagonal


def shown(problem: Problem, operands: Operands) -> Tensor | None:
    """`(batch or 1, heads or 1, seqlen_q, seqlen_k)` bool, the keys that a block mask shows, or that are of the query's
    own sequence, used and in its band; None where there is no such operand. A block mask may be dense, and so the
    answer, already."""
    mask, ranges = operands.block_mask, operands.ranges
    if mask is not None:
        return mask if isinstance(mask, Tensor) else mask.to_dense()
    if ranges is not None:
        return ranges.visible(problem.span, problem.seqlen_q, problem.seqlen_k)[None, None]
    used = operands.seqused_k
    return None if used is None else visible_of_caches(used, problem.span, problem.seqlen_q, problem.seqlen_k)


def scored_at(problem: Problem, operands: Operands) -> ScoredAt | None:
    """The call's score_mod at all places; None where it has none. It may be that already."""
    if isinstance(operands.score_mod, ScoredAt):
        return operands.score_mod
    sizes = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return ScoredAt.of(operands.score_mod, sizes, operands.ranges)


def from_pages(k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor, Operands]:
    """k and v `(batch, seqlen_k, heads_kv, head_dim)`, copied from their pages, zeros for a number of none, and the
    other operands; all as it is without pages."""
    table = operands.page_table
    if table is None:
        return k, v, operands
    nowhere = ((table < 0) | (table >= k.shape[0]))[:, :, None, None, None]
    pages = table.long().clamp(0, k.shape[0] - 1)
    k, v = (_zeroed(x[pages], nowhere).flatten(1, 2) for x in (k, v))
    return k, v, replace(operands, page_table=None)


def with_packed_keys(
    k: Tensor, v: Tensor, problem: Problem, operands: Operands
) -> tuple[Tensor, Tensor, Problem, Operands]:
    """k and v without pages; and beside packed queries packed too, whole caches one behind another, with the problem
    and the operands that then ask for the same."""
    k, v, operands = from_pages(k, v, operands)
    if not problem.packed_q:
        return k, v, problem, operands
    caches, seqlen_k = k.shape[:2]
    firsts = torch.arange(caches + 1, dtype=torch.int32, device=k.device) * seqlen_k
    scales = {
        name: None if descale is None else of_rows(x, descale).flatten(0, 1)[None]
        for name, x, descale in (("k_descale", k, operands.k_descale), ("v_descale", v, operands.v_descale))
    }
    problem = replace(problem, packed_q=False, page_size=None, seqlen_k=problem.total_k, max_seqlen_k=None)
    return k.flatten(0, 1)[None], v.flatten(0, 1)[None], problem, replace(operands, cu_seqlens_k=firsts, **scales)


def _zeroed(x: Tensor, where: Tensor) -> Tensor:
    """x with zeros there."""
    if x.dtype == torch.float8_e4m3fn:  # which torch fills by its bits alone
        return x.view(torch.uint8).masked_fill(where, 0).view(x.dtype)
    return x.masked_fill(where, 0)


def _without_use(seqlen_q: int, k: Tensor, operands: Operands) -> tuple[Tensor | None, Tensor | None]:
    """Which rows of q no packed sequence has, and which keys none has or are not used, each `(batch, seqlen, 1, 1)`;
    None where all have a use."""
    ranges, used = operands.ranges, operands.seqused_k
    if ranges is not None:
        of_none, unused = (~rows[None] for rows in ranges.taken(seqlen_q, k.shape[1]))
        return of_none[..., None, None], unused[..., None, None]
    if used is not None:
        return None, (torch.arange(k.shape[1], device=k.device) >= used[:, None])[..., None, None]
    return None, None


def only_used(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with zeros for what no packed sequence has, or is not used: 0 times what is no number is not 0."""
    of_none, unused = _without_use(q.shape[1], k, operands)
    q = q if of_none is None else _zeroed(q, of_none)
    return (q, k, v) if unused is None else (q, _zeroed(k, unused), _zeroed(v, unused))


def dequantized(x: Tensor, descale: Tensor | None) -> Tensor:
    """e4m3 q, k or v times its descale.

    Args:
        x: `(batch, seqlen, heads, head_dim)`.
        descale: `(batch, heads_kv)`, `(batch, heads, ceil(seqlen / 128))`, as `of_rows` gives it, or None for 1;
            float32.

    Returns:
        float64, where the product is exact, in the shape of x.
    """
    return x.double() if descale is None else x.double() * of_rows(x, descale).double()


def of_rows(x: Tensor, descale: Tensor | None, sequence: Tensor | None = None) -> Tensor:
    """The descale as float32 `(batch, seqlen, heads, 1)`, each row of x under its own number:
    itself where it is that already.

    Args:
        sequence: of packed sequences, whose descale is `(sequences, heads_kv)`, the one that each row is of.
    """
    batch, seqlen, heads, _ = x.shape
    if descale is None or not descale.numel():  # where there are no sequences nobody has a number, and nothing is seen
        return torch.ones((), dtype=torch.float32, device=x.device).expand(batch, seqlen, heads, 1)
    if descale.ndim == 4:
        return descale
    if descale.ndim == 3:
        return descale.repeat_interleave(DESCALE_BLOCK, 2)[..., :seqlen].transpose(1, 2)[..., None]
    # one number for each key/value head, and so for its query heads
    by_head = descale.repeat_interleave(heads // descale.shape[1], 1)
    rows = by_head[:, None].expand(-1, seqlen, -1) if sequence is None else by_head[sequence][None]
    return rows[..., None]


def descales_of_rows(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The descales of a call as `of_rows` gives them, and 1 for rows without a use, whose own may be no number."""
    ranges = operands.ranges
    of_q, of_k = (None, None) if ranges is None else ranges.numbers(q.shape[1], k.shape[1])
    of_none, unused = _without_use(q.shape[1], k, operands)
    found = (
        (of_rows(q, operands.q_descale, of_q), of_none),
        (of_rows(k, operands.k_descale, of_k), unused),
        (of_rows(v, operands.v_descale, of_k), unused),
    )
    q_rows, k_rows, v_rows = (x if none is None else x.masked_fill(none, 1) for x, none in found)
    return q_rows, k_rows, v_rows


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    scored: ScoredAt | None = None,
    kept: Tensor | None = None,
) -> Result:
    """Attention in float64, some heads at a time so that long problems fit.

    Args:
        q, k, v: as in `flashzoo.attention`, any floating dtype, CPU or GPU; zero lengths are welcome.
            What nobody sees must be numbers too, as `only_used` leaves it.
        problem: causal, window and scale are read from it.
        dout: gradient of out; gradients are computed where it is given.
        dlse: gradient of lse, `(batch, heads, seqlen_q)`; needs dout.
        dtype: float64 or float32.
        mask: of a block mask, as in `visible`.
        sinks: as in `flashzoo.attention`.
        scored: its score_mod at all places.
        kept: what its dropout keeps, as `kept_at`.

    Returns:
        A `Result` in `dtype`.
    """
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_zeros((batch, seqlen_q, heads, v.shape[3]), dtype=dtype)
    lse = with_sinks(q.new_full((batch, heads, seqlen_q), -math.inf, dtype=dtype), sinks)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) if dout is not None else None for x in (q, k, v))
    whole = Result(out, lse, dq, dk, dv)
    read = 0
    for part in parts(q, k, ORACLE_SCORES[q.device.type]):
        s = scores(q, k, problem, part, dtype, mask, scored)
        lse[part.rows] = with_sinks(
            torch.logsumexp(s, -1).flatten(1, 2), None if sinks is None else sinks[part.rows[1]]
        )
        p = probabilities(s, lse[part.rows])
        z = weights(of_part(kept, part), problem, p)
        out[part.queries] = from_groups(times(p, z) @ grouped(v[part.keys], part, dtype))
        if dout is not None:
            of_rows = None if dlse is None else dlse[part.rows]
            found = gradients(p, dout[part.queries], of_rows, out[part.queries], (q, k, v), problem, part, scored, z)
            read = read + found.pop("dscore_mod", 0)
            for name, x in found.items():
                whole.at(part).items()[name].add_(x)  # to dk and dv every query head of a group adds
    if dout is None:
        return whole
    if scored is not None and scored.differentiable:
        whole = replace(whole, dscore_mod=flat(scored.differentiable).zero_() + read)
    return whole if sinks is None else replace(whole, dsinks=gradient_of_sinks(sinks, lse, deltas(dout, dlse, out)))


def deltas(dout: Tensor, dlse: Tensor | None, out: Tensor) -> Tensor:
    """delta of every row, `(batch, heads, seqlen_q)`, in out's dtype."""
    found = (dout.to(out.dtype) * out).sum(-1).transpose(1, 2)
    return found if dlse is None else found - dlse.to(out.dtype)


class Part(NamedTuple):
    """Indices of some (batch, head) slices: of what lies as q does, as k does, and as lse does;
    and how many heads share keys."""

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    rows: tuple[slice, ...]
    group: int


ORACLE_SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Scores that the oracle holds at a time, with some 4 numbers of 8 bytes for each, 2 GB on a GPU."""


def parts(q: Tensor, k: Tensor, most: int, whole_groups: bool = False) -> Iterator[Part]:
    """Slices of q and k with at most so many scores, or one head's where those are more; none where nothing is seen.

    The query heads of a key/value head are taken apart only where they are too many, and never if `whole_groups`.
    """
    if 0 in q.shape or 0 in k.shape:
        return
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    group, every = heads // heads_kv, slice(None)
    at_once = max(1, most // (seqlen_q * seqlen_k))  # heads
    if at_once < group and not whole_groups:
        for b, h in product(range(batch), range(heads_kv)):
            for first in range(h * group, (h + 1) * group, at_once):
                at, of_queries = slice(b, b + 1), slice(first, min(first + at_once, (h + 1) * group))
                yield Part(
                    (at, every, of_queries), (at, every, slice(h, h + 1)), (at, of_queries), of_queries.stop - first
                )
        return
    some_heads = min(heads_kv, max(1, at_once // group))
    some_batches = max(1, at_once // heads) if some_heads == heads_kv else 1
    for b, h in product(range(0, batch, some_batches), range(0, heads_kv, some_heads)):
        at, of_queries = slice(b, b + some_batches), slice(h * group, (h + some_heads) * group)
        yield Part((at, every, of_queries), (at, every, slice(h, h + some_heads)), (at, of_queries), group)


def of_part(mask: Tensor | None, part: Part) -> Tensor | None:
    """A mask as in `visible`, cut to a part."""
    if mask is None or mask.ndim == 2:
        return mask
    at, heads = part.rows
    mask = mask if mask.shape[0] == 1 else mask[at]
    return mask if mask.shape[1] == 1 else mask[:, heads]


def grouped(x: Tensor, part: Part, dtype: torch.dtype, of_queries: bool = False) -> Tensor:
    """A part of q, k, v or dout as `(batch, heads_kv, group, seqlen, head_dim)`, the group 1 for keys."""
    return x.to(dtype).transpose(1, 2).unflatten(1, (-1, part.group if of_queries else 1))


def from_groups(x: Tensor) -> Tensor:
    """`(batch, seqlen, heads, head_dim)` of what lies as `grouped`."""
    return x.flatten(1, 2).transpose(1, 2)


def scores(
    q: Tensor,
    k: Tensor,
    problem: Problem,
    part: Part,
    dtype: torch.dtype,
    mask: Tensor | None,
    scored: ScoredAt | None = None,
) -> Tensor:
    """Scores of a part, -inf where nobody sees: `(batch, heads_kv, group, seqlen_q, seqlen_k)`."""
    s = products(q, k, part, dtype)
    of = None if scored is None else scored.part(*part.rows)
    return score(s.flatten(1, 2), problem, of_part(mask, part), of).view(s.shape)


def products(q: Tensor, k: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    """q k^T of a part, `(batch, heads_kv, group, seqlen_q, seqlen_k)`."""
    return grouped(q[part.queries], part, dtype, True) @ grouped(k[part.keys], part, dtype).mT


def score(s: Tensor, problem: Problem, mask: Tensor | None, scored: ScoredAt | None) -> Tensor:
    """Scores, in place of products q k^T where it can be, `(batch, heads, seqlen_q, seqlen_k)`: for the oracle and for
    `standard`; mask as in `visible`."""
    s.mul_(problem.scale)
    if scored is not None:
        s = scored(s).contiguous()
    return hidden(s, problem, mask)


def hidden(s: Tensor, problem: Problem, mask: Tensor | None) -> Tensor:
    """Scores, those that nobody sees overwritten with -inf."""
    seen = visible(problem, s.device, mask)
    return s if seen is None else s.masked_fill_(~seen, -math.inf)


def probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse) in place of s, all 0 in a row that sees no key; lse `(batch, heads, seqlen_q)`."""
    return s.sub_(_finite(lse).view(*s.shape[:-1], 1)).exp_()


def gradients(
    p: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    part: Part,
    scored: ScoredAt | None = None,
    z: Tensor | None = None,
) -> dict[str, Tensor]:
    """dq, dk and dv of a part, and of what a score_mod reads, by the formulas above, from its P, which is overwritten
    with dS; z as `weights`."""
    dtype, (q, k, v), more = p.dtype, inputs, {}
    do, q_h, k_h, v_h = (
        grouped(dout, part, dtype, True),
        grouped(q[part.queries], part, dtype, True),
        grouped(k[part.keys], part, dtype),
        grouped(v[part.keys], part, dtype),
    )
    delta = (do * grouped(out, part, dtype, True)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype).view(delta.shape)
    dv = (times(p, z).mT @ do).sum(2, keepdim=True)
    ds = p.mul_(times(do @ v_h.mT, z).sub_(delta[..., None]))
    if scored is not None:
        of = scored.part(*part.rows)
        s = products(q, k, part, dtype).mul_(problem.scale)
        found, read = of.gradients(s.flatten(1, 2), ds.flatten(1, 2))
        ds, more = found.view(ds.shape), {"dscore_mod": flat(read)} if read else {}
    dk = (ds.mT @ q_h).sum(2, keepdim=True) * problem.scale
    dq = from_groups(ds @ k_h * problem.scale)
    return {"dq": dq, "dk": from_groups(dk), "dv": from_groups(dv), **more}


def _finite(lse: Tensor) -> Tensor:
    # exp(-inf - lse) is then 0, not NaN, in a row that sees no key
    return lse.masked_fill(lse == -math.inf, 0)


def _forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor | None]:
    q, k, v = only_used(q, k, v, operands)
    if problem.precision == "fp8":
        (q, q_descale), (k, k_descale), (v, v_descale) = (_quantized(x) for x in (q, k, v))
        operands = replace(operands, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if q.dtype == E4M3:
        return _fp8_forward(q, k, v, problem, operands)
    k_rows, v_rows = descales_of_rows(q, k, v, operands)[1:] if problem.dtype_kv else (None, None)
    k, v = (x.to(q.dtype) for x in (k, v))  # which holds every e4m3 number
    s = _scores(q, k, problem, operands, k_rows)
    lse = None
    if problem.lse or problem.grad or problem.sinks:
        lse = torch.logsumexp(s, -1).view(problem.batch, problem.heads, -1)
    p = torch.softmax(s, -1)
    if lse is not None and operands.sinks is not None:
        p = p * share_of_keys(lse, operands.sinks).view(-1, problem.seqlen_q, 1)
        lse = with_sinks(lse, operands.sinks)
    if operands.block_mask is None and not problem.by_lengths and problem.score_mod is None:
        p[:, : problem.blind_rows] = 0  # softmax gives NaN where a row sees nothing
    else:
        p.masked_fill_((s == -math.inf).all(-1, keepdim=True), 0)
    p, v_h = times(p, _kept(problem, operands)).to(q.dtype), _heads_first(v, problem)
    out = _matmul(p, v_h) if v_rows is None else torch.bmm(p.float(), v_h.float() * _heads_first(v_rows, problem))
    return _seqlen_first(_by_share(out, problem).to(TORCH_DTYPES[problem.out_dtype]), problem), lse


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    operands: Operands,
) -> tuple[Tensor, ...]:
    rows = problem.batch * problem.heads
    q, k, v = only_used(q, k, v, operands)
    blind = lse == -math.inf
    dout = dout.masked_fill(blind.mT[..., None], 0)  # may be no number either in a row of no sequence
    do, k_h, v_h = _heads_first(dout, problem), _heads_first(k, problem), _heads_first(v, problem)
    delta = (dout.to(_wide(q)) * out.to(_wide(q))).sum(-1).transpose(1, 2).reshape(rows, -1)
    if dlse is not None:
        delta = delta - dlse.masked_fill(blind, 0).reshape(rows, -1)
    p = _scores(q, k, problem, operands).sub_(_finite(lse).reshape(rows, -1, 1)).exp_()
    mask = _kept(problem, operands)
    dv = _by_share(_matmul(times(p, mask).to(q.dtype).mT, do), problem)
    dp = _by_share(times(_matmul(do, v_h.mT), mask), problem)
    ds, of_read = dp.sub_(delta[..., None]).mul_(p), ()
    if (scored := scored_at(problem, operands)) is not None:
        s = _by_batch(_matmul(_heads_first(q, problem), k_h.mT).mul_(problem.scale), problem)
        ds, of_read = scored.gradients(s, _by_batch(ds, problem))
    ds = ds.reshape(p.shape).to(q.dtype)
    dq = _matmul(ds, k_h) * problem.scale
    dk = _matmul(ds.mT, _heads_first(q, problem)) * problem.scale
    group = problem.heads // problem.heads_kv
    dk, dv = (
        x.view(problem.batch, problem.heads_kv, group, problem.seqlen_k, -1).sum(2).transpose(1, 2) for x in (dk, dv)
    )
    gradients: tuple[Tensor, ...] = _seqlen_first(dq.to(q.dtype), problem), dk.to(k.dtype), dv.to(v.dtype)
    if operands.sinks is not None:
        gradients += (gradient_of_sinks(operands.sinks, lse, delta.reshape(lse.shape)),)
    return *gradients, *of_read


def _kept(problem: Problem, operands: Operands) -> Tensor | None:
    """What dropout keeps, as P lies."""
    mask = kept_at(problem, operands)
    return None if mask is None else mask.expand(problem.batch, -1, -1, -1).flatten(0, 1)


def _by_share(x: Tensor, problem: Problem) -> Tensor:
    """A sum of what is kept, divided by how much that is."""
    return x.div_(1 - problem.dropped) if problem.dropout_p else x


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3 and its descale by block, one number for each (batch, head):
    its largest element becomes e4m3's largest."""
    largest = x.abs().amax((1, 3)).float()
    descale = torch.where(largest == 0, 1.0, largest / LARGEST_E4M3)
    quantized = (x.float() / descale[:, None, :, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    return quantized, descale[..., None].expand(-1, -1, cdiv(x.shape[1], DESCALE_BLOCK))


def rotated(x: Tensor, seed: int = 0) -> Tensor:
    """x times an orthogonal matrix along the head dim, float32:
    random signs, and Hadamard matrices of the largest power of two in it.

    q and k times the same one have the same scores. It spreads an outlier over all columns,
    and what all columns share over none.
    """
    head_dim = x.shape[-1]
    size = head_dim & -head_dim
    hadamard = torch.ones(1, 1, dtype=torch.float32, device=x.device)
    while hadamard.shape[0] < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)], 0)
    signs = torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(seed)).mul_(2).sub_(1).to(x.device)
    parts = (x.float() * signs).unflatten(-1, (-1, size))
    return (parts @ hadamard).flatten(-2) / math.sqrt(size)


def _fp8_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor | None]:
    q_rows, k_rows, v_rows = (_heads_first(x, problem) for x in descales_of_rows(q, k, v, operands))
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))  # which holds every e4m3 number
    q_h, k_h, v_h = (_heads_first(x, problem) for x in (q, k, v))
    # As kernels have it: scores in log2 units by one factor for a row and a block, and score - maximum rounded once. At
    # scores of millions the rounded maximum moves P by more than its own rounding.
    s = _hopper_sums(q_h, k_h).double().mul_((problem.scale * math.log2(math.e) * q_rows * k_rows.mT).double())
    s = hidden(_by_batch(s, problem), problem, shown(problem, operands)).flatten(0, 1)
    row_max = _finite(s.amax(-1, keepdim=True).float())
    p = s.sub_(row_max).float().exp2_()
    l = p.sum(-1, keepdim=True)
    blind = l == 0
    lse = (row_max + l.log2()).mul_(math.log(2)).view(problem.batch, problem.heads, -1)
    rounded, v_h = p.mul_(P_SCALE).to(E4M3).float(), v_h.float().mul_(v_rows)
    out = one_level(rounded, v_h) if problem.fast_accum else torch.bmm(rounded, v_h)
    out.div_(P_SCALE * l.masked_fill(blind, 1))
    if operands.sinks is not None:
        out.mul_(share_of_keys(lse, operands.sinks).view(blind.shape))
        lse = with_sinks(lse, operands.sinks)
    return _seqlen_first(out.to(TORCH_DTYPES[problem.out_dtype]), problem), lse


def one_level(p: Tensor, v: Tensor) -> Tensor:
    """`p v` as Hopper's FP8 tensor core sums it from the first key to the last.

    Of so many rows at a time that each product is cut: cutting a sum as long as this alone makes some four times the
    error that an H200 has.

    Args:
        p: e4m3 numbers in float32, `(batch * heads, seqlen_q, seqlen_k)`.
        v: the same times their descales, `(batch * heads, seqlen_k, head_dim)`.
    """
    rows = max(1, HOPPER_EACH // (HOPPER_K * max(1, v.shape[2])))
    heads, queries = max(1, rows // max(1, p.shape[1])), min(rows, max(1, p.shape[1]))
    by_heads = zip(p.split(heads), v.mT.split(heads), strict=True)
    return torch.cat([torch.cat([_hopper_sums(x, v_h) for x in some.split(queries, 1)], 1) for some, v_h in by_heads])


def _hopper_sums(a: Tensor, b: Tensor) -> Tensor:
    """`a b^T` of e4m3 numbers, the running sum cut to the tensor core's bits after each of its instructions."""
    total = a.new_zeros((a.shape[0], a.shape[1], b.shape[1]), dtype=torch.float32)
    each = total.numel() * HOPPER_K <= HOPPER_EACH
    for a_part, b_part in zip(a.split(HOPPER_K, -1), b.split(HOPPER_K, -1), strict=True):
        if each:
            terms = a_part.float()[:, :, None] * b_part.float()[:, None]
            largest = torch.linalg.vector_norm(terms, math.inf, -1).maximum(total.abs())
            below = HOPPER_SUM_BITS + 1 - torch.frexp(largest).exponent
            scale = torch.ldexp(torch.ones_like(total), below.clamp_max_(127))
            total = (terms.mul_(scale[..., None]).trunc_().sum(-1) + total.mul_(scale).trunc_()).div_(scale)
        else:
            total += _matmul(a_part, b_part.mT)
        total.view(torch.int32).bitwise_and_(-1 << (23 - HOPPER_SUM_BITS))  # clears the lower of float32's 23 bits
    return total


def _scores(q: Tensor, k: Tensor, problem: Problem, operands: Operands, k_rows: Tensor | None = None) -> Tensor:
    """Scores `(batch * heads, seqlen_q, seqlen_k)`; k_rows: k's descale as `of_rows` gives it."""
    s = _by_batch(_matmul(_heads_first(q, problem), _heads_first(k, problem).mT), problem)
    if k_rows is not None:
        s = s * _by_batch(_heads_first(k_rows, problem).mT, problem)
    return score(s, problem, shown(problem, operands), scored_at(problem, operands)).flatten(0, 1)


def _by_batch(x: Tensor, problem: Problem) -> Tensor:
    return x.view(problem.batch, problem.heads, *x.shape[1:])


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of I/O-dtype operands, accumulated and returned in float32."""
    # this bmm has no tangent
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and forward_ad._current_level < 0:
        return torch.bmm(a, b, out_dtype=torch.float32)  # the tensor cores' own accumulator, not rounded on the way out
    return torch.bmm(a.to(_wide(a)), b.to(_wide(b)))


def _heads_first(x: Tensor, problem: Problem) -> Tensor:
    """`(batch * heads, seqlen, head_dim)`, key/value heads repeated for their group of query heads."""
    x = x.transpose(1, 2)
    if x.shape[1] != problem.heads:
        x = x.repeat_interleave(problem.heads // problem.heads_kv, 1)
    return x.reshape(-1, *x.shape[2:])


def _seqlen_first(x: Tensor, problem: Problem) -> Tensor:
    return x.view(problem.batch, problem.heads, problem.seqlen_q, -1).transpose(1, 2)


def _without_autocast(function: Callable) -> Callable:
    """Products in the dtypes as given: autocast would round S and lse too."""

    @wraps(function)
    def exact(*arguments: Any, **options: Any) -> Any:
        device = next(x.device.type for x in arguments if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return exact


def _with_dense_mask(problem: Problem, operands: Operands, device: torch.device) -> tuple[Problem, Operands]:
    return problem, replace(operands, block_mask=shown(problem, operands))  # pyright: ignore[reportArgumentType]


_differentiable = differentiable(
    _without_autocast(_forward), _without_autocast(_backward), _with_dense_mask, batches=True
)


def standard(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor | None]:
    """Attention in three passes, with a flash kernel's numerics; see this file's head, and `Spec.impl`.

    A block mask may be a dense one, as in `visible`, too, a score_mod one at all places, and a seed what is kept.
    """
    return _differentiable(q, *with_packed_keys(k, v, problem, operands))


standard.backward = _differentiable.backward  # pyright: ignore[reportFunctionMemberAccess]
