"""What attention means, in formulas: the oracle in float64, and `standard`, its low-precision twin.

    S = Q K^T * softmax_scale,  P = softmax(S),  O = P V,  LSE_i = log sum_j exp(S_ij)
    dV = P^T dO,  dP = dO V^T,  delta_i = sum_d dO_id O_id - dLSE_i,  dS = P * (dP - delta),  dQ = dS K * scale,  dK = dS^T Q * scale

with these meanings, once for every version: causal and windows are aligned bottom-right; a row that sees no key gives
0, LSE -inf and gradients 0; query head h reads key/value head h // (heads // heads_kv).

`standard` is the same with the numerics of a flash kernel: scores, sums and accumulators in float32; P, dS and O
rounded to the I/O dtype. Its error is the yardstick that every version's error is held against. It is also the
attention that the papers start from: three passes, with S and P written to and read from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from flashzoo.autograd import differentiable
from flashzoo.spec import Problem


@dataclass(frozen=True)
class Result:
    """One attention's out and, where asked for, lse `(batch, heads, seqlen_q)` and gradients, each in the shape of its input."""

    out: Tensor
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    def items(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def visible(problem: Problem, device: torch.device | str = "cpu") -> Tensor | None:
    """`(seqlen_q, seqlen_k)` bool, True where the query sees the key; None where all do."""
    left, right = problem.span
    if left is None and right is None:
        return None
    diagonal = torch.arange(problem.seqlen_q, device=device)[:, None] + (problem.seqlen_k - problem.seqlen_q)
    offset = torch.arange(problem.seqlen_k, device=device)[None, :] - diagonal
    seen = torch.ones_like(offset, dtype=torch.bool)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    return seen


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    softmax_scale: float,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Attention in float64, one key/value head at a time so that long problems fit.

    Args:
        q, k, v: as in `flashzoo.attention`, any floating dtype, CPU or GPU; zero lengths are welcome.
        problem: causal and window are read from it.
        softmax_scale: any finite float.
        dout: gradient of out; gradients are computed where it is given.
        dlse: gradient of lse, `(batch, heads, seqlen_q)`; needs dout.
        dtype: float64 or float32.

    Returns:
        A `Result` in `dtype`.
    """
    group = q.shape[2] // k.shape[2]
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_zeros((batch, seqlen_q, heads, v.shape[3]), dtype=dtype)
    lse = q.new_full((batch, heads, seqlen_q), -math.inf, dtype=dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) if dout is not None else None for x in (q, k, v))
    if 0 in q.shape or 0 in k.shape:
        return Result(out, lse, dq, dk, dv)
    seen = visible(problem, q.device)
    for b in range(batch):
        for h in range(heads):
            kv = h // group
            q_h, k_h, v_h = q[b, :, h].to(dtype), k[b, :, kv].to(dtype), v[b, :, kv].to(dtype)
            s = q_h @ k_h.T * softmax_scale
            if seen is not None:
                s.masked_fill_(~seen, -math.inf)
            row_lse = torch.logsumexp(s, -1)
            p = s.sub_(_finite(row_lse)[:, None]).exp_()
            out[b, :, h], lse[b, h] = p @ v_h, row_lse
            if dq is None or dk is None or dv is None or dout is None:
                continue
            do = dout[b, :, h].to(dtype)
            delta = (do * out[b, :, h]).sum(-1)
            if dlse is not None:
                delta = delta - dlse[b, h].to(dtype)
            dv[b, :, kv] += p.T @ do
            ds = p.mul_(do @ v_h.T - delta[:, None])
            dq[b, :, h] = ds @ k_h * softmax_scale
            dk[b, :, kv] += ds.T @ q_h * softmax_scale
    return Result(out, lse, dq, dk, dv)


def _finite(lse: Tensor) -> Tensor:
    # exp(-inf - lse) is then 0, not NaN, in a row that sees no key
    return lse.masked_fill(lse == -math.inf, 0)


def _forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float) -> tuple[Tensor, Tensor | None]:
    s = _scores(q, k, problem, softmax_scale)
    lse = torch.logsumexp(s, -1).view(problem.batch, problem.heads, -1) if problem.lse or problem.grad else None
    p = torch.softmax(s, -1)
    p[:, : problem.blind_rows] = 0  # softmax gives NaN where a row sees nothing
    out = _matmul(p.to(q.dtype), _heads_first(v, problem)).to(q.dtype)
    return _seqlen_first(out, problem), lse


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = problem.batch * problem.heads
    do, k_h, v_h = _heads_first(dout, problem), _heads_first(k, problem), _heads_first(v, problem)
    delta = (dout.to(_wide(q)) * out.to(_wide(q))).sum(-1).transpose(1, 2).reshape(rows, -1)
    if dlse is not None:
        delta = delta - dlse.reshape(rows, -1)
    p = _scores(q, k, problem, softmax_scale).sub_(_finite(lse).reshape(rows, -1, 1)).exp_()
    dv = _matmul(p.to(q.dtype).mT, do)
    ds = p.mul_(_matmul(do, v_h.mT).sub_(delta[..., None])).to(q.dtype)
    dq = _matmul(ds, k_h) * softmax_scale
    dk = _matmul(ds.mT, _heads_first(q, problem)) * softmax_scale
    group = problem.heads // problem.heads_kv
    dk, dv = (x.view(problem.batch, problem.heads_kv, group, problem.seqlen_k, -1).sum(2).transpose(1, 2) for x in (dk, dv))
    return _seqlen_first(dq.to(q.dtype), problem), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, problem: Problem, softmax_scale: float) -> Tensor:
    s = _matmul(_heads_first(q, problem), _heads_first(k, problem).mT).mul_(softmax_scale)
    seen = visible(problem, q.device)
    return s if seen is None else s.masked_fill_(~seen, -math.inf)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of I/O-dtype operands, accumulated and returned in float32."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
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
    def exact(*arguments: Any) -> Any:
        device = next(x.device.type for x in arguments if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*arguments)

    return exact


standard = differentiable(_without_autocast(_forward), _without_autocast(_backward))
