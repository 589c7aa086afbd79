"""What packed queries on caches promise beyond being right: prompts and single tokens in one call, of which each is
what it is beside any others, and nothing read that is nobody's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import Problem
from flashzoo.call.check import options_of
from flashzoo.inputs import in_pages
from flashzoo_suite.support import DEVICE, draw, same_bits

asks = pytest.mark.asks
SIZES = {"seqlen_q": 142, "seqlen_k": 150, "sequences": 4, "packed_q": True, "used_k": True}
KINDS = {
    "causal_gqa": {"causal": True, "heads": 6, "heads_kv": 2},
    "window": {"window": (40, 3)},
}
STARTS, USED = (3, 4, 9, 9, 139), (150, 5, 0, 97)
"""One query, five, none and 130; three rows before them and three behind are nobody's."""


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def called(
    version: str,
    tensors: tuple[Tensor, ...],
    problem: Problem,
    starts: tuple[int, ...] = STARTS,
    used: tuple[int, ...] = USED,
    **more,
) -> tuple[Tensor, Tensor]:
    """out, and lse as its rows lie; zeros where the version gives none."""
    q, k, v = tensors
    how = options_of(problem) | {"cu_seqlens_q": numbers(*starts), "seqused_k": numbers(*used), "version": version}
    if not problem.lse:
        out = flashzoo.attention(q[0], k, v, **how | more)
        return out, torch.zeros_like(out[..., 0])
    out, lse = flashzoo.attention(q[0], k, v, return_lse=True, **how | more)
    return out, lse.T.contiguous()


@asks(KINDS, **SIZES)
def test_what_is_nobodys_is_not_read(version, problem):
    """To the bit, whatever it holds; rows of no sequence give zeros. Nor are pages that are not used, or the table
    behind them."""
    (q, k, v), *_ = draw(problem)
    out, lse = called(version, (q, k, v), problem)
    mine = torch.zeros(problem.seqlen_q, dtype=torch.bool, device=DEVICE)
    mine[STARTS[0] : STARTS[-1]] = True
    assert not out[~mine].any() and bool(out[mine].any())
    assert not problem.lse or bool((lse[~mine] == -torch.inf).all())
    beyond = (torch.arange(problem.seqlen_k, device=DEVICE) >= numbers(*USED)[:, None])[:, :, None, None]
    q = torch.where(mine[:, None, None], q.double(), torch.nan).to(q.dtype)
    k, v = (torch.where(beyond, torch.nan, x.double()).to(x.dtype) for x in (k, v))
    for found, expected in zip(called(version, (q, k, v), problem), (out, lse), strict=True):
        assert same_bits(found, expected)
    paged = replace(problem, page_size=10)
    if flashzoo.versions()[version].unsupported(paged):
        return
    k_pages, v_pages, table = in_pages(paged, k, v)
    table = torch.where(torch.arange(15, device=DEVICE) * 10 < numbers(*USED)[:, None], table, 1 << 30).int()
    assert same_bits(called(version, (q, k_pages, v_pages), paged, page_table=table)[0], out)


@asks(KINDS, **SIZES)
def test_each_has_its_bits_beside_any_others(version, problem):
    if not flashzoo.versions()[version].batch_invariant:
        pytest.skip(f"the Spec of {version} does not promise it")
    tensors = draw(problem)[0]
    found = called(version, tensors, problem)
    for some in ((0, 3), (1, 2)):  # the rest are others, and begin and end elsewhere
        rows = [slice(*STARTS[i : i + 2]) for i in some]
        q, k, v = (torch.full_like(x.double(), torch.nan).to(x.dtype) for x in tensors)
        for i, at in zip(some, rows, strict=True):
            q[:, at], k[i], v[i] = tensors[0][:, at], tensors[1][i], tensors[2][i]
        used = tuple(count if i in some else problem.seqlen_k - count for i, count in enumerate(USED))
        for x, expected in zip(called(version, (q, k, v), problem, used=used), found, strict=True):
            assert all(same_bits(x[at], expected[at]) for at in rows)


@asks(KINDS, **SIZES)
def test_numbers_that_lie_are_cut_off(version, problem):
    """Where cu_seqlens_q falls no row is of any sequence."""
    tensors, *_ = draw(problem)
    lies = called(version, tensors, problem, (-(1 << 30), 4, 9, 9, 1 << 30), (151, -1, 1 << 30, -(1 << 30)))
    right = called(version, tensors, problem, (0, 4, 9, 9, 142), (150, 0, 150, 0))
    assert all(same_bits(x, expected) for x, expected in zip(lies, right, strict=True))
    assert not called(version, tensors, problem, (3, 9, 4, 9, 139))[0].any()


@pytest.mark.gpu
@asks(KINDS, **SIZES)
def test_a_captured_graph_takes_other_numbers(version, problem):
    (q, k, v), *_ = draw(problem)
    starts, used = numbers(*STARTS), numbers(*USED)
    how = options_of(problem) | {"cu_seqlens_q": starts, "seqused_k": used, "version": version}
    flashzoo.attention(q[0], k, v, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashzoo.attention(q[0], k, v, **how)
    for others in ((0, 35, 36, 100, 142), (0, 0, 0, 140, 141)):
        starts.copy_(numbers(*others))
        used.copy_(used.roll(1))
        graph.replay()
        assert torch.equal(out, flashzoo.attention(q[0], k, v, **how))
