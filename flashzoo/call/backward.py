"""`attention_backward`: the backward pass of a version alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from flashzoo.call.api import Options, takes_options
from flashzoo.call.check import check_tensor, check_tensors, described_call, fields_of
from flashzoo.call.operands import DIFFERENTIABLE, differentiable_of, taken
from flashzoo.call.packed import as_batch
from flashzoo.call.plan import plan_backward
from flashzoo.call.signs import in_rows, negated, resolved
from flashzoo.registry import current, requested
from flashzoo.transforms import refuse_transforms, transforming

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_options
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    delta: Tensor | None = None,
    version: str = "auto",
    **options: Unpack[Options],
) -> tuple[Tensor, ...]:
    """The backward pass of one version alone, from a given out and LSE, which may be those of more keys than k has.

    With s the scores of `attention` times softmax_scale, -inf where nothing is seen, this is what is computed:

        delta = rowsum(dout * out)    p = exp(s - lse)    ds = p * (dout v^T - delta + dlse)
        dq = softmax_scale * ds k     dk = softmax_scale * ds^T q     dv = p^T dout

    So where k and v are a part of the keys, and lse and out (or delta) those of the whole, as `flashzoo.merge` gives
    them, dk and dv are the part's of the whole's gradients, and the dq of disjoint parts add up to the whole's. Rows
    whose lse is -inf give 0. With sinks, which lse and out then have in them,

        dsinks = - sum over a head's rows of exp(sink - lse) * (delta - dlse)

    is that of the whole already, whatever the part; without them dq, dk and dv are the same. With a score_mod p is made
    of new scores, of which ds is the gradient, and dq and dk have that of the old ones in its place. With dropout the p
    of dv is what went to v, and `dout v^T` is that of what was kept, divided by `1 - dropout_p`; keys are counted from
    k's first, so that of a part of the keys it is another dropout than the whole's.

    Args:
        dout: gradient of out, `(batch, seqlen_q, heads, head_dim_v)`, q's dtype and device, any strides.
        q, k, v: as in `attention`, fp16, bf16, fp32 or fp64.
        out: as dout, or float32 (`attention(out_dtype=torch.float32)`, `merge`), of which delta is then made in
            float32; may be None where delta is given, which then takes its place.
        lse: natural log, `(batch, heads, seqlen_q)`, float32 (float64 for float64 inputs), q's device, any strides.
        dlse: gradient of lse, as lse; None is 0.
        delta: as lse; `dlse - delta` has the place of both, so that what a caller has summed already is
            not summed again.
        version: as in `attention`; "auto" is the newest that has such a backward pass for the call.
        options: those of `attention` with which out and lse were made, block_mask that of the keys in k, dropout_seed
            given where dropout_p is; no `out_dtype`, and neither `precision` nor descales, as FP8 has no backward pass
            of its own.

    Returns:
        `(dq, dk, dv)` in the shapes and the dtype of q, k and v, and behind them dsinks in that of sinks where these
        are given, and those of the tensors that score_mod reads and that require grad; not recorded by autograd. With
        the out and the LSE of `attention` and the same version and options
        they are the gradients that autograd gives, to the bit where the version's bits are always the same.

    Raises:
        TypeError, ValueError: an argument is malformed; the text names it, what was expected and what was got.
        flashzoo.UnsupportedError: the named version, or under "auto" every version, has a reason against the call, or
            no backward pass apart from its forward pass; the text names those that would do.
        NotImplementedError: the call is traced by torch.export, or under a transform. Under torch.compile the graph
            breaks here; with fullgraph=True, and in a strict export, that is torch's error.
    """
    how = {"dlse": dlse, "delta": delta, "version": version, **options}
    if is_dynamo_compiling():
        from flashzoo.untraced import untraced

        return untraced(attention_backward, dout, q, k, v, out, lse, **how)
    if is_compiling():
        raise NotImplementedError(
            "flashzoo.attention_backward can't be traced: call it outside of what torch.export sees"
        )
    given = {"dout": dout, "q": q, "k": k, "v": v, "lse": lse}
    given |= {name: x for name, x in (("out", out), ("dlse", dlse), ("delta", delta)) if x is not None}
    check_tensors(**given)
    if options.get("cu_seqlens_q") is not None and q.ndim == 3:
        batch = [None if x is None else x[None] for x in (dout, out, lse, dlse, delta)]
        dout, out, lse, dlse, delta = batch  # pyright: ignore[reportAssignmentType]
        how |= {"dlse": dlse, "delta": delta}
        dq, dk, dv, *of_operands = attention_backward(dout, *as_batch(q, k, v), out, lse, **how)
        return dq[0], dk[0], dv[0], *of_operands
    if out is None and delta is None:
        raise ValueError("out or delta must be given, got None for both")
    asked: dict[str, Any] = {**options}
    operands, forms = taken(asked)
    if transforming():
        refuse_transforms("flashzoo.attention_backward", **given, **operands.tensors)
    asked_for = {name: options.get(name) for name in DIFFERENTIABLE} | {"score_mod": operands.score_mod}
    of_operands = [x.dtype for x in differentiable_of(asked_for)]
    fields_of(asked)
    tensors = described_call(q, k, v)
    unrounded = out is not None and out.dtype != q.dtype
    through_lse = dlse is not None or delta is not None or unrounded
    planned = plan_backward(requested(version), current(), through_lse, forms, *tensors, **asked)
    of_out, of_lse = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, *dtypes in (
        ("dout", q.dtype),
        ("out", *dict.fromkeys((q.dtype, wide))),
        ("lse", wide),
        ("dlse", wide),
        ("delta", wide),
    ):
        what, shape = ("seqlen_q, heads, head_dim_v", of_out) if "out" in name else ("heads, seqlen_q", of_lse)
        if name in given:
            check_tensor(name, given[name], f"shape (batch, {what})", shape, tuple(dtypes), "q's", q.device)

    with torch.no_grad():
        dout, q, k, v, lse = (resolved(x) for x in (dout, q, k, v, lse))
        # As no score is, so that p is 0, whatever keys are seen.
        lse = lse.masked_fill(lse == -math.inf, math.inf).contiguous()
        if delta is None and out is not None and unrounded:
            delta = (dout * out).sum(-1).transpose(1, 2)
        if delta is not None:
            dlse = -delta if dlse is None else dlse - delta
            out = dout.new_zeros((1, 1, 1, v.shape[3])).expand(of_out)
        if planned.negative:
            q = negated(q)
        assert out is not None
        out, dlse = in_rows(resolved(out)), None if dlse is None else resolved(dlse)
        operands = operands.seeded(planned.problem, q.device, drawn=False)
        dq, dk, dv, *more = planned.run(dout, dlse, q, k, v, out, lse, planned.problem, operands)
        more = [x.to(dtype) for x, dtype in zip(more, of_operands, strict=True)]
        return -dq if planned.negative else dq, dk, dv, *more
