"""What packed sequences promise beyond being right: each alone, whatever it is packed with,
and nothing read that is nobody's."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import Problem
from flashzoo.accuracy import Judge
from flashzoo.call.check import options_of
from flashzoo.compare import DESCALES
from flashzoo.inputs import descales
from flashzoo_suite.support import (
    DEVICE,
    Result,
    accept,
    alike,
    both,
    draw,
    forward,
    in_fixed_order,
    ranges_of,
    same_bits,
    seen_by,
)

asks = pytest.mark.asks
SIZES = {"seqlen_q": 170, "seqlen_k": 170, "sequences": 6}
KINDS = {
    "full": {},
    "causal_gqa": {"causal": True, "heads": 4, "heads_kv": 2},
    "cross_window": {"window": (40, 10), "seqlen_k": 230},
    "used": {"causal": True, "seqlen_k": 230, "used_k": True},
}


def called(
    version: str, tensors: tuple[Tensor, ...], problem: Problem, dout: Tensor | None = None, **lengths
) -> Result:
    """A call of packed rows `(total, heads, head_dim)` with these lengths; gradients too where dout is given."""
    leaves = [x.detach().requires_grad_(dout is not None) for x in tensors]
    how = options_of(problem) | {"version": version, "return_lse": problem.lse, **lengths}
    out = flashzoo.attention(*leaves, **how)
    out, lse = out if problem.lse else (out, None)
    gradients = torch.autograd.grad(out, leaves, dout) if dout is not None else ()
    return Result(out.detach(), None if lse is None else lse.detach(), *gradients)


def sequences_of(problem: Problem) -> list[tuple[slice, slice, slice]]:
    """Of each sequence its queries, its keys, and those of them that are used."""
    found = ranges_of(problem)
    q, k = found.cu_seqlens_q.tolist(), found.cu_seqlens_k.tolist()
    ends = (
        k[1:]
        if found.seqused_k is None
        else [first + used for first, used in zip(k, found.seqused_k.tolist(), strict=False)]
    )
    slots = zip(pairwise(q), pairwise(k), ends, strict=False)
    return [(slice(*rows), slice(*keys), slice(keys[0], end)) for rows, keys, end in slots]


@asks(KINDS, dtype="e4m3", **SIZES)
def test_each_sequence_has_its_own_descales(version, problem):
    """It is what it is in a batch of one with them, within a rounding; rows that nobody has see nothing."""
    (q, k, v), *_ = draw(problem)
    scales = descales(problem, "head", device=DEVICE)
    found = called(
        version, (q[0], k[0], v[0]), problem, **vars(ranges_of(problem)), **dict(zip(DESCALES, scales, strict=True))
    )
    expected = Result(torch.zeros_like(found.out), torch.full_like(found.lse, -torch.inf) if problem.lse else None)
    for number, (rows, _, used) in enumerate(sequences_of(problem)):
        n_q, n_k = rows.stop - rows.start, used.stop - used.start
        alone = replace(problem, seqlen_q=n_q, seqlen_k=n_k, sequences=None, used_k=False)
        mine = tuple(x[number : number + 1] for x in scales)
        result = forward(version, (q[:, rows], k[:, used], v[:, used]), alone, mine)
        expected.out[rows] = result.out[0]
        if problem.lse:
            expected.lse[:, rows] = result.lse[0]
    torch.testing.assert_close(found.out, expected.out, rtol=1e-2, atol=4e-3)
    if problem.lse:
        torch.testing.assert_close(found.lse, expected.lse, rtol=1e-3, atol=1e-3)


@asks({"packed": {}, "none": {"sequences": 0}}, dtype="e4m3", **SIZES)
def test_descales_of_rows_that_nobody_has_are_not_asked_for(version, problem):
    """Not before the first sequence nor behind the last, and not where there are none."""
    (q, k, v), *_ = draw(problem)
    lengths = torch.tensor([9, 9, 9, 30, 90, 101, 150][: problem.sequences + 1], dtype=torch.int32, device=DEVICE)
    names = dict(zip(DESCALES, descales(problem, "head", device=DEVICE), strict=True))
    out = called(version, (q[0], k[0], v[0]), problem, cu_seqlens_q=lengths, **names).out
    mine = torch.zeros(len(out), dtype=torch.bool, device=DEVICE)
    mine[int(lengths[0]) : int(lengths[-1])] = True
    assert not out[~mine].any() and bool(out[mine].any()) == bool(problem.sequences)


# On a GPU long ones too, whose gradients are summed from many blocks.
LONG = (
    {"long_gqa": KINDS["causal_gqa"] | {"seqlen_q": 2000, "seqlen_k": 2000, "sequences": 3}} if DEVICE == "cuda" else {}
)


@asks(KINDS | LONG, both=True, **SIZES)
def test_each_sequence_is_what_it_is_alone(version, problem):
    """To the bit, gradients too, whatever its neighbours are: here numbers that are none."""
    if not flashzoo.versions()[version].batch_invariant:
        pytest.skip(f"the Spec of {version} does not promise it")
    problem = in_fixed_order(version, problem)
    (q, k, v), dout, _ = draw(problem)
    q, k, v, dout = (x[0] for x in (q, k, v, dout))
    dout = dout if problem.grad else None
    together = called(version, (q, k, v), problem, dout, **vars(ranges_of(problem)))
    for rows, slot, used in sequences_of(problem):
        n_q, n_k = rows.stop - rows.start, used.stop - used.start
        mine = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        mine[0][rows], mine[1][used], mine[2][used] = q[rows], k[used], v[used]
        his = None
        if dout is not None:
            his = torch.full_like(dout, torch.nan)
            his[rows] = dout[rows]
        among = called(version, tuple(mine), problem, his, **vars(ranges_of(problem)))
        assert same_bits(among.out[rows], together.out[rows])
        if problem.lse:
            assert same_bits(among.lse[:, rows], together.lse[:, rows])
        if his is not None:
            assert same_bits(among.dq[rows], together.dq[rows])
            assert same_bits(among.dk[slot], together.dk[slot]) and same_bits(among.dv[slot], together.dv[slot])
        if not n_q or not n_k:
            continue
        lengths = [torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (n_q, n_k)]
        one = replace(problem, seqlen_q=n_q, seqlen_k=n_k, sequences=1, used_k=False)
        alone = called(
            version,
            (q[rows].contiguous(), k[used].contiguous(), v[used].contiguous()),
            one,
            None if dout is None else dout[rows].contiguous(),
            cu_seqlens_q=lengths[0],
            cu_seqlens_k=lengths[1],
        )
        assert same_bits(alone.out, together.out[rows])
        if dout is not None:
            assert same_bits(alone.dq, together.dq[rows])
            assert same_bits(alone.dk, together.dk[used]) and same_bits(alone.dv, together.dv[used])


@asks(
    {"packed": {"causal": True}, "used": {"used_k": True}, "used_causal": {"used_k": True, "causal": True}},
    both=True,
    **SIZES,
)
def test_rows_of_no_sequence_give_zeros(version, problem):
    """Before the first, behind the last, and keys that are not used, whatever they hold; nothing is left unwritten."""
    problem = in_fixed_order(version, problem)
    tensors, dout, dlse = draw(problem)
    cu = torch.tensor([9, 109, 109, 139, 140, 150, 161], dtype=torch.int32, device=DEVICE)
    used = torch.tensor([30, 0, 20, 1, 0, 11], dtype=torch.int32, device=DEVICE) if problem.used_k else None
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": None, "seqused_k": used}
    mine = torch.zeros(170, dtype=torch.bool, device=DEVICE)
    mine[9:161] = True
    theirs = mine.clone()
    if used is not None:
        theirs[:] = False
        for first, count in zip(cu.tolist(), used.tolist(), strict=False):
            theirs[first : first + count] = True

    def attention(*x: Tensor, **how) -> Any:
        return flashzoo.attention(*x, **how | given)

    plain = both(version, tensors, problem, dout, dlse, attention=attention)
    q, k, v, dout = (
        torch.where(rows[:, None, None], x.double(), torch.nan).to(x.dtype)
        for x, rows in zip((*tensors, dout), (mine, theirs, theirs, mine), strict=True)
    )
    dlse = None if dlse is None else dlse.where(mine, torch.nan)
    result = both(version, (q, k, v), problem, dout, dlse, attention=attention)
    assert alike(problem, result, plain)
    assert not result.out[:, ~mine].any() and bool(result.out[:, mine].any())
    if problem.lse:
        assert bool((result.lse[..., ~mine] == -torch.inf).all())
    if problem.grad:
        assert not result.dq[:, ~mine].any() and not result.dk[:, ~theirs].any() and not result.dv[:, ~theirs].any()


@asks(both=True, seqlen_q=200, seqlen_k=200, sequences=1100, heads=1, heads_kv=1, causal=True)
def test_more_than_a_thousand_sequences(version, problem):
    """Most of them of no row, or of one. Seen in FA #2562: sequences without rows hang, or their gradients are NaN."""
    tensors, dout, dlse = draw(problem)
    gradients = (dout, dlse) if problem.grad else (None, None)
    accept(Judge(*tensors, problem, *gradients, mask=seen_by(problem)), both(version, tensors, problem, dout, dlse))


@asks({"full": {}, "causal": {"causal": True}}, both=True, seqlen_q=100, seqlen_k=100, sequences=3)
def test_lengths_that_lie_are_cut_off(version, problem):
    """Whatever they hold: nothing outside of the tensors is read or written, and no sequence that is right is touched
    by it. Where they fall no row is of any sequence."""
    (q, k, v), dout, _ = draw(problem)
    right = torch.tensor([0, 40, 70, 100], dtype=torch.int32, device=DEVICE)
    picks = random.Random(0)
    lies = [
        [0, 40, 70, 1 << 30],
        [-(1 << 30), 40, 70, 100],
        [0, 90, 20, 100],
        [1 << 30] * 4,
        [-5] * 4,
        [100, 70, 40, 0],
    ]
    lies += [[picks.randint(-300, 300) for _ in range(4)] for _ in range(6)]
    expected = called(version, (q[0], k[0], v[0]), problem, dout[0] if problem.grad else None, cu_seqlens_q=right)
    for lie in lies:
        cu = torch.tensor(lie, dtype=torch.int32, device=DEVICE)
        margin = [torch.full((300, *x.shape[2:]), torch.nan, dtype=x.dtype, device=DEVICE) for x in (q, k, v)]
        for whole, x in zip(margin, (q, k, v), strict=True):
            whole[100:200] = x[0]
        inside = tuple(whole[100:200] for whole in margin)
        found = called(version, inside, problem, dout[0] if problem.grad else None, cu_seqlens_q=cu)
        assert not any(bool(x.isnan().any()) for x in found.items().values()), lie
        if lie[:3] == [0, 40, 70]:
            assert same_bits(found.out[:70], expected.out[:70])
        if lie != sorted(lie):
            assert not found.out.any(), lie


@asks(both=True, **SIZES)
def test_a_nested_tensor_is_taken_as_it_is(version, problem):
    (q, k, v), *_ = draw(problem)
    cu = torch.tensor([0, 60, 61, 61, 150, 170], dtype=torch.int64, device=DEVICE)
    nested = [torch.nested.nested_tensor_from_jagged(x[0].detach().requires_grad_(problem.grad), cu) for x in (q, k, v)]
    packed = [x[0].detach().requires_grad_(problem.grad) for x in (q, k, v)]
    how = {"causal": True, "version": version}
    out = flashzoo.attention(*nested, **how)
    expected = flashzoo.attention(*packed, cu_seqlens_q=cu.int(), **how)
    assert out.is_nested and out.shape[0] == 5 and same_bits(out.values().detach(), expected.detach())
    if problem.grad:
        out.values().float().square().sum().backward()
        expected.float().square().sum().backward()


@asks(**SIZES | {"sequences": 3})
def test_a_batch_of_one_is_taken_too(version, problem):
    (q, k, v), *_ = draw(problem)
    cu = torch.tensor([0, 60, 61, 150], dtype=torch.int32, device=DEVICE)
    three = flashzoo.attention(q[0], k[0], v[0], cu_seqlens_q=cu, version=version)
    four = flashzoo.attention(q, k, v, cu_seqlens_q=cu, version=version)
    assert four.shape == (1, *three.shape) and same_bits(three, four[0])


@asks({name: KINDS[name] for name in ("full", "causal_gqa")}, fp8=("e4m3",), **SIZES)
def test_equal_lengths_are_a_batch(version, problem):
    """The same numbers as of a dense batch, within what two orders of summing may differ."""
    dense = replace(problem, batch=3, seqlen_q=50, seqlen_k=50, sequences=None)
    tensors, *_ = draw(dense)
    expected = forward(version, tensors, dense)
    cu = torch.arange(0, 151, 50, dtype=torch.int32, device=DEVICE)
    found = called(version, tuple(x.flatten(0, 1) for x in tensors), problem, cu_seqlens_q=cu)
    torch.testing.assert_close(found.out.unflatten(0, (3, 50)), expected.out, rtol=2e-3, atol=2e-3)
