"""The public calls: `attention` and `explain`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashzoo import attention as attention_of_one
from flashzoo.parallel import gather, halo, ring, ulysses
from flashzoo.parallel.choose import Explanation, check_across, check_method, chosen, lengths_of
from flashzoo.parallel.gather import Gather
from flashzoo.parallel.groups import Ranks, kind_of, ranks_of, size_of
from flashzoo.parallel.layout import Layout, real_rows
from flashzoo.parallel.parts import How, padded, rows
from flashzoo.parallel.ring import Ring
from flashzoo.registry import requested
from flashzoo.transforms import refuse_transforms, transforming

Method = Literal["auto", "gather", "ulysses", "ring", "halo"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    layout: Layout = "zigzag",
    method: Method = "auto",
    seqlen: int | tuple[int, int] | None = None,
    max_across: int | None = None,
    return_lse: bool = False,
    version: str = "auto",
    **options: Any,
) -> Any:
    """`flashzoo.attention` of a sequence whose rows are shared out over the ranks of a group.

    Every rank calls it alike, in the same order, with its own rows: shards of one shape, the same options. What an
    option says is said of the whole: `cu_seqlens_q` counts all rows, `window_size` reaches over the borders of shards.

    Args:
        q: `(batch, seqlen_q / ranks, heads, head_dim)`, fp16, bf16, fp32 or fp64, or packed rows
            `(total_q / ranks, heads, head_dim)`; this rank's rows, as `shard` gives them. A DTensor that is sharded by
            rows alone, over the group's mesh, is taken as such: its layout is "contiguous", and so is out's.
        k, v: the same of keys and values; as many rows as q has where causal or a window is asked for, but in ulysses.
            Of several ranks, what has gaps between a row's numbers is copied.
        group: a `torch.distributed.ProcessGroup`, or a `DeviceMesh` of one dimension; the caller is in it. NCCL's for
            CUDA tensors, gloo's for CPU tensors.
        layout: "zigzag" (rank r of P has chunks r and 2P - 1 - r of 2P), which a causal mask wants, or "contiguous".
        method: "gather", "ulysses", "ring", "halo", or "auto" for the one that loses least time by the arithmetic that
            `explain` prints. A name never falls back.
        seqlen: how many rows the whole has, where `shard` padded it: `(queries, keys)`, or one number for both. Rows
            behind them are padding: no row sees their keys, they have 0 in out, -inf in lse, and gradients of 0. None:
            there is none.
        max_across: of packed sequences, how many rows one has at most that lies in more than one chunk, as
            `longest_across` tells: "halo" then receives no more, however long those are that lie within one.
        return_lse: return the log-sum-exp of each row of scores too.
        version: who answers the calls on each rank; as in `flashzoo.attention`.
        options: of `flashzoo.attention`, the same values on every rank. All methods: causal, softmax_scale,
            window_size, deterministic, sinks, cu_seqlens_q, max_seqlen_q, max_seqlen_k. "ulysses" also: precision,
            fast_accum, out_dtype, block_mask (shared by heads), cu_seqlens_k, seqused_k. "halo" takes packed sequences
            alone, and goes by the least of max_seqlen_q, max_seqlen_k and max_across: a longer one across a border of a
            rank's rows gives NaN there, which the gradients of its rows before that border lack. A bound that is the
            same in all steps has the ranks agree but once.

    Returns:
        out `(batch, seqlen_q / ranks, heads, head_dim_v)` of this rank's rows; with `return_lse` the pair
        `(out, lse)`, lse `(batch, heads, seqlen_q / ranks)`. Both are differentiable, once. Gradients of q, k and v are
        those of the sum of all ranks' losses. Those of sinks, which every rank has whole, are a rank's share, as those
        of weights are: their sum over ranks is the whole's. With one rank it is the plain call, bit by bit, which takes
        all options of `flashzoo.attention`.

    Raises:
        TypeError, ValueError: an argument is malformed, or ranks don't call alike; the same on every rank, before
            anything is communicated but what each is about to call, which is done once for each kind of call.
        flashzoo.UnsupportedError: the method, or under "auto" every method, has a reason against the call.
        RuntimeError: a rank did not come to a call within five minutes.
    """
    anew = {"group": group, "layout": layout, "method": method, "seqlen": seqlen, "max_across": max_across}
    anew |= {"return_lse": return_lse, "version": version, **options}
    if is_dynamo_compiling():  # a graph would remember what one rank has agreed on with others
        from flashzoo.untraced import untraced

        return untraced(attention, q, k, v, **anew)
    if any(hasattr(x, "to_local") for x in (q, k, v)):
        from flashzoo.parallel.dtensors import of_dtensors

        return of_dtensors(attention, q, k, v, **anew)
    if isinstance(q, Tensor) and q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):  # it would cast what travels
            return attention(q, k, v, **anew)
    if transforming():
        refuse_transforms("flashzoo.parallel.attention", q=q, k=k, v=v, sinks=options.get("sinks"))
    ranks = ranks_of(group)
    options = said(options)
    if ranks.size > 1:
        q, k, v = (gathered_rows(x) for x in (q, k, v))
    name, _ = requested(version)
    sinks = options.get("sinks")
    grad = _recorded(q, k, v, sinks)
    if grad and isinstance(sinks, Tensor) and sinks.is_inference():  # of which autograd saves none
        options["sinks"] = sinks.clone()
    how = {"layout": layout, "method": method, "seqlen": seqlen, "max_across": max_across, "return_lse": return_lse}
    how |= {"version": name, "grad": grad}
    asked = {"q": q, "k": k, "v": v, **how, **options}
    kind = kind_of(asked)
    if ranks.size == 1:
        return _of_one(ranks, kind, q, k, v, how, {**options, "version": version})
    explanation = ranks.agree(kind, lambda: chosen(q, k, v, ranks.size, **how, options=options).taken())
    packed = q.ndim == 3
    if packed:
        q, k, v = q[None], k[None], v[None]
    if explanation.chosen == "ulysses":
        sizes = explanation.sizes
        whole = (sizes.seqlen_q, sizes.seqlen_k)
        out, lse = ulysses.attend(ranks, sizes.chunks, whole, q, k, v, name, return_lse, options)
    else:
        out, lse = _of_rows(explanation, ranks, q, k, v, how, options)
    if packed:
        # whose backward is a view: that of [0] writes a whole gradient
        out, lse = out.squeeze(0), None if lse is None else lse.squeeze(0)
    return (out, lse) if return_lse else out


def _of_one(ranks: Ranks, kind: Any, q: Any, k: Any, v: Any, how: dict[str, Any], options: dict[str, Any]) -> Any:
    """The plain call, of what is no padding."""

    def check() -> tuple[int, int] | None:
        check_method(how["layout"], how["method"])
        check_across(how["max_across"], options)
        if how["seqlen"] is not None and q.ndim != k.ndim:
            raise TypeError(f"k and v must be packed rows where seqlen is given and q is, got shape {tuple(k.shape)}")
        return None if how["seqlen"] is None else lengths_of(how["seqlen"], q, k, 1)

    whole = ranks.agree(kind, check)
    if whole is None:
        return attention_of_one(q, k, v, return_lse=how["return_lse"], **options)
    dim, seqlen = q.ndim - 3, q.shape[q.ndim - 3]
    q, k, v = q.narrow(dim, 0, whole[0]), k.narrow(dim, 0, whole[1]), v.narrow(dim, 0, whole[1])
    if not how["return_lse"]:
        return padded(attention_of_one(q, k, v, **options), None, seqlen)[0]
    return padded(*attention_of_one(q, k, v, return_lse=True, **options), seqlen)


def said(options: dict[str, Any]) -> dict[str, Any]:
    """Those that say something."""
    return {name: x for name, x in options.items() if x is not None and not (name == "dropout_p" and x == 0)}


def gathered_rows(x: Any) -> Any:
    """A tensor whose rows have no gaps between their numbers: how they lie is a rank's own, and no reason to leave the
    others waiting. Of what is none, that."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested or not x.ndim:
        return x
    return x.contiguous() if x.stride(-1) != 1 and x.shape[-1] > 1 else x


def _recorded(*inputs: Any) -> bool:
    """Whether autograd records a call of these."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs)


def _of_rows(
    explanation: Explanation,
    ranks: Ranks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    how: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """By a method in which a rank has the rows that it was given: of those that are no padding."""
    sizes, seqlen = explanation.sizes, q.shape[1]
    q = rows(q, (0, real_rows(ranks.rank, ranks.size, seqlen, sizes.chunks, sizes.seqlen_q)))
    if explanation.chosen == "halo":
        step = seqlen // sizes.chunks
        plan = halo.planned(ranks.rank, ranks.size, step, sizes.chunks, sizes.seqlen_q, sizes.furthest, sizes.band)
        k, v = (rows(x, (0, q.shape[1])) for x in (k, v))
        options = {**options, "version": how["version"]}
        return padded(*halo.attend(ranks, plan, sizes.furthest, q, k, v, options), seqlen)
    alike = {name: options[name] for name in ("softmax_scale", "deterministic") if name in options}
    cu_seqlens = options.get("cu_seqlens_q")
    if cu_seqlens is not None and how["grad"]:  # its owner may write the next ones before the backward pass
        cu_seqlens = cu_seqlens.clone()
    parts = How(alike, how["version"], explanation.partial, cu_seqlens)
    planned, method = (gather.planned, Gather) if explanation.chosen == "gather" else (ring.planned, Ring)
    whole = (sizes.seqlen_q, sizes.seqlen_k)
    plan = planned(ranks.rank, ranks.size, seqlen, k.shape[1], sizes.chunks, sizes.band, sizes.packed, whole)
    out, lse = method.apply(parts, ranks, plan, q, k, v, options.get("sinks"))  # pyright: ignore[reportGeneralTypeIssues]
    return padded(out, lse, seqlen)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    layout: Layout = "zigzag",
    method: Method = "auto",
    seqlen: int | tuple[int, int] | None = None,
    max_across: int | None = None,
    return_lse: bool = False,
    version: str = "auto",
    **options: Any,
) -> Explanation:
    """Which method would answer a call of `attention`, and the arithmetic: bytes, time that is lost, memory.

    Args:
        q, k, v: this rank's shards, as in `attention`; "meta" tensors too.
        group: as in `attention`, or a number of ranks, for which no group is needed.
        layout, method, seqlen, max_across, return_lse, version, options: as in `attention`.

    Returns:
        An `Explanation`; printing it gives a table. Nothing is run or communicated. `flashzoo.explain` tells which
        version answers on a rank.

    Raises:
        TypeError, ValueError: as `attention`; of one rank too, what several do not take.
    """
    size = size_of(group)
    options = said(options)
    grad = _recorded(q, k, v, options.get("sinks"))
    how = {"layout": layout, "method": method, "seqlen": seqlen, "max_across": max_across, "return_lse": return_lse}
    how |= {"version": version}
    return chosen(q, k, v, size, **how, grad=grad, options=options)
