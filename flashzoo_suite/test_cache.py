"""What caches promise beyond being right: what is not used is as if it were not there,
and each sequence is what it is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import Problem
from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.integers import cdiv
from flashzoo_suite.support import DEVICE, Result, alike, both, draw, in_fixed_order, same_bits

asks = pytest.mark.asks
SIZES = {"batch": 4, "seqlen_q": 6, "seqlen_k": 150, "used_k": True}
KINDS = {
    "full": {},
    "causal_gqa": {"causal": True, "heads": 4, "heads_kv": 2},
    "window": {"window": (40, 3)},
    "prefill": {"causal": True, "seqlen_q": 130},
    "whole_blocks": {"seqlen_q": 130},
}
FP8 = {"fp8": {"dtype": "fp16", "dtype_kv": "e4m3", "causal": True}}
USED = (150, 0, 1, 97)


def numbers(*used: int) -> Tensor:
    """How much of each is used."""
    return torch.tensor(used, dtype=torch.int32, device=DEVICE)


def called(
    version: str, tensors: tuple[Tensor, ...], problem: Problem, dout: Tensor, dlse: Tensor | None, *used: int
) -> Result:
    """Both passes with so much of each cache used."""
    return both(
        version,
        tensors,
        problem,
        dout,
        dlse,
        attention=lambda *x, **how: flashzoo.attention(*x, **how | {"seqused_k": numbers(*used)}),
    )


@asks(KINDS | FP8, both=True, **SIZES)
def test_what_is_not_used_is_not_read(version, problem):
    """To the bit, whatever lies there; and gets gradients of 0."""
    problem = in_fixed_order(version, problem)
    (q, k, v), dout, dlse = draw(problem)
    plain = called(version, (q, k, v), problem, dout, dlse, *USED)
    beyond = (torch.arange(problem.seqlen_k, device=DEVICE) >= numbers(*USED)[:, None])[:, :, None, None]
    k, v = (torch.where(beyond, torch.nan, x.double()).to(x.dtype) for x in (k, v))
    found = called(version, (q, k, v), problem, dout, dlse, *USED)
    assert alike(problem, found, plain)
    if problem.grad:
        assert not found.dk.masked_select(beyond).any() and not found.dv.masked_select(beyond).any()
    assert not found.out[1].any() and (found.lse is None or bool((found.lse[1] == -torch.inf).all()))


@asks(FP8, **SIZES)
def test_descales_of_what_is_not_used_are_not_read(version, problem):
    """As memory is that nobody has written yet."""
    tensors, *_ = draw(problem)
    first = torch.arange(cdiv(problem.seqlen_k, DESCALE_BLOCK), device=DEVICE) * DESCALE_BLOCK
    beyond = (first >= numbers(*USED)[:, None])[:, None]
    plain = torch.full((problem.batch, problem.heads_kv, len(first)), 0.5, device=DEVICE)
    found = [
        flashzoo.attention(
            *tensors, seqused_k=numbers(*USED), k_descale=x, v_descale=x, causal=True, version=version, return_lse=True
        )
        for x in (plain, plain.masked_fill(beyond, torch.nan))
    ]
    assert all(same_bits(x, y) for x, y in zip(*found, strict=True))


@asks(KINDS, both=True, **SIZES)
def test_each_is_as_a_batch_of_that_length(version, problem):
    """The same as without a cache, but for what tiles of another length round."""
    (q, k, v), dout, dlse = draw(problem)
    found = called(version, (q, k, v), problem, dout, dlse, *USED)
    for b, length in enumerate(USED):
        one = replace(problem, batch=1, seqlen_k=length, used_k=False)
        some = [x[b : b + 1, :length].contiguous() for x in (k, v)]
        given = [None if x is None else x[b : b + 1] for x in (dout, dlse)]
        alone = both(version, (q[b : b + 1], *some), one, *given)
        near = {"rtol": 0.02, "atol": 0.02} if problem.dtype != "fp32" else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(found.out[b], alone.out[0], **near)
        if problem.grad:
            torch.testing.assert_close(found.dq[b], alone.dq[0], **near)
            torch.testing.assert_close(found.dk[b, :length], alone.dk[0], **near)


@asks(KINDS, both=True, **SIZES)
def test_each_has_its_bits_beside_any_others(version, problem):
    if not flashzoo.versions()[version].batch_invariant:
        pytest.skip(f"the Spec of {version} does not promise it")
    problem = in_fixed_order(version, problem)
    tensors, dout, dlse = draw(problem)
    found = called(version, tensors, problem, dout, dlse, *USED)
    for some in ((0, 3), (1, 2)):  # the rest are others
        others = [torch.full_like(x.double(), torch.nan).to(x.dtype) for x in tensors]
        lengths = [problem.seqlen_k - some[0]] * problem.batch
        for b in some:
            lengths[b] = USED[b]
            for mine, x in zip(others, tensors, strict=True):
                mine[b] = x[b]
        beside = called(version, tuple(others), problem, dout, dlse, *lengths)
        assert all(same_bits(x[b], found.items()[name][b]) for name, x in beside.items().items() for b in some)


@asks({"full": {}, "causal": {"causal": True}}, both=True, **SIZES)
def test_numbers_that_lie_are_cut_off(version, problem):
    problem = in_fixed_order(version, problem)
    (q, k, v), dout, dlse = draw(problem)
    lies = called(version, (q, k, v), problem, dout, dlse, 151, -1, 1 << 30, -(1 << 30))
    right = called(version, (q, k, v), problem, dout, dlse, 150, 0, 150, 0)
    assert alike(problem, lies, right)


@pytest.mark.gpu
@asks({"one_query": {"seqlen_q": 1}, "causal": {"causal": True}}, **SIZES)
def test_a_captured_graph_takes_other_numbers(version, problem):
    (q, k, v), *_ = draw(problem)
    how = {"causal": problem.causal, "version": version}
    used = numbers(*USED)
    flashzoo.attention(q, k, v, seqused_k=used, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashzoo.attention(q, k, v, seqused_k=used, **how)
    for lengths in ((1, 2, 3, 4), (0, 150, 149, 64)):
        used.copy_(numbers(*lengths))
        graph.replay()
        assert torch.equal(out, flashzoo.attention(q, k, v, seqused_k=used, **how))
