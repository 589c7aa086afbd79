"""What pages promise beyond being right: the same bits as without them, whatever their order,
and nothing read that is another's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import Problem
from flashzoo.call.check import options_of
from flashzoo.inputs import in_pages
from flashzoo_suite.support import DEVICE, draw, forward, same_bits

asks = pytest.mark.asks
SIZES = {"batch": 3, "seqlen_q": 6, "seqlen_k": 192, "used_k": True}
KINDS = {
    "of_1": {"page_size": 1},
    "of_16_causal_gqa": {"page_size": 16, "causal": True, "heads": 4, "heads_kv": 2},
    "of_64_window": {"page_size": 64, "window": (40, 3)},
    "of_96": {"page_size": 96, "seqlen_q": 70},
}
USED = (192, 0, 77)


def called(version: str, tensors: tuple[Tensor, ...], problem: Problem, **more) -> Tensor:
    """Out, with so much of each cache used."""
    used = torch.tensor(USED, dtype=torch.int32, device=DEVICE)
    return flashzoo.attention(*tensors, **options_of(problem), seqused_k=used, version=version, **more)


def agree(problem: Problem, found: Tensor, expected: Tensor) -> None:
    """With the result without pages, to the bit; on a GPU, where TMA takes pages in steps of 8 rows, others
    to one rounding."""
    if DEVICE == "cpu" or problem.page_size % 8 == 0:
        assert same_bits(found, expected)
    else:
        eps = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=eps, atol=eps * expected.abs().max().item())


@asks(KINDS | {"of_16_fp8": {"page_size": 16, "dtype": "fp16", "dtype_kv": "e4m3"}}, **SIZES)
def test_the_bits_are_those_without_pages(version, problem):
    """In whichever pages the keys lie, and whatever the others hold."""
    (q, k, v), *_ = draw(problem)
    expected = called(version, (q, k, v), replace(problem, page_size=None))
    for seed in (0, 1):
        k_pages, v_pages, table = in_pages(problem, k, v, seed)
        agree(problem, called(version, (q, k_pages, v_pages), problem, page_table=table), expected)


@asks(KINDS, **SIZES)
def test_no_page_is_read_that_is_not_used(version, problem):
    """Neither one of another's sequence, nor the row of the table behind what is used:
    there are no numbers in all of them."""
    (q, k, v), *_ = draw(problem)
    expected = called(version, (q, k, v), replace(problem, page_size=None))
    k_pages, v_pages, table = in_pages(problem, k, v)
    for b, used in enumerate(USED):
        mine = table[b, : -(-used // problem.page_size)].long()
        alone = [torch.full_like(x.double(), torch.nan).to(x.dtype) for x in (k_pages, v_pages)]
        for whole, x in zip(alone, (k_pages, v_pages), strict=True):
            whole[mine] = x[mine]
        wild = table.clone()
        wild[b, len(mine) :] = (1 << 30, -1)[b % 2]
        agree(problem, called(version, (q, *alone), problem, page_table=wild)[b], expected[b])


@asks(KINDS, **SIZES)
def test_numbers_of_no_page_read_zeros(version, problem):
    """And no page of another's: there are no numbers in those that nobody uses."""
    (q, k, v), *_ = draw(problem)
    k_pages, v_pages, table = in_pages(problem, k, v)
    without = [x.clone() for x in (k, v)]
    for x in without:
        x[:, : problem.page_size] = 0
    expected = called(version, (q, *without), replace(problem, page_size=None))
    k_pages[table[:, 0].long()] = v_pages[table[:, 0].long()] = torch.nan
    for wrong in (len(k_pages), 1 << 30, -1, -(1 << 31)):
        table[:, 0] = wrong
        agree(problem, called(version, (q, k_pages, v_pages), problem, page_table=table), expected)


@asks({"of_16": KINDS["of_16_causal_gqa"]}, **SIZES)
def test_a_table_that_is_a_part_of_a_longer_one(version, problem):
    """Its rows have a stride."""
    (q, k, v), *_ = draw(problem)
    k_pages, v_pages, table = in_pages(problem, k, v)
    longer = torch.full((3, table.shape[1] + 5), 1 << 30, dtype=torch.int32, device=DEVICE)
    longer[:, : table.shape[1]] = table
    expected = called(version, (q, k_pages, v_pages), problem, page_table=table)
    assert same_bits(called(version, (q, k_pages, v_pages), problem, page_table=longer[:, : table.shape[1]]), expected)


@pytest.mark.gpu
@asks({"of_16": KINDS["of_16_causal_gqa"]}, **SIZES)
def test_a_captured_graph_takes_another_table(version, problem):
    (q, k, v), *_ = draw(problem)
    k_pages, v_pages, table = in_pages(problem, k, v)
    called(version, (q, k_pages, v_pages), problem, page_table=table)
    used = torch.tensor(USED, dtype=torch.int32, device=DEVICE)
    how = options_of(problem) | {"seqused_k": used, "page_table": table, "version": version}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashzoo.attention(q, k_pages, v_pages, **how)
    for _ in range(2):
        table.copy_(table.roll(1, 0))
        used.copy_(used.roll(1))
        graph.replay()
        assert torch.equal(out, flashzoo.attention(q, k_pages, v_pages, **how))


@asks({"of_16": {"page_size": 16}}, batch=2, seqlen_q=3, seqlen_k=64)
def test_all_is_used_where_nobody_says_how_much(version, problem):
    tensors, *_ = draw(problem)
    assert same_bits(
        forward(version, tensors, problem).out, forward(version, tensors, replace(problem, page_size=None)).out
    )
