"""The counts that speeds are quoted from: operations and bytes."""

from __future__ import annotations

import dataclasses

import pytest
from support import both, draw, forward
from torch.utils.flop_counter import FlopCounterMode

from flashzoo import Problem
from flashzoo.workloads import flops, hbm_bytes

PLAIN = Problem(batch=2, seqlen_q=7, seqlen_k=9, heads=4, heads_kv=2, head_dim=16, dtype="fp32", grad=True, device="cpu")
WIDTHS = [(16, 16), (24, 16), (8, 24)]


def of_widths(head_dim: int, head_dim_v: int) -> Problem:
    return dataclasses.replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_operations_are_those_of_the_products_that_torch_counts(widths):
    problem = of_widths(*widths)
    tensors, dout, _ = draw(problem)
    with FlopCounterMode(display=False) as forward_alone:
        forward("standard", tensors, problem)
    with FlopCounterMode(display=False) as in_all:
        both("standard", tensors, problem, dout)
    assert forward_alone.get_total_flops() == flops(problem)
    assert in_all.get_total_flops() == flops(problem) + flops(problem, "bwd")


def test_the_backward_pass_is_two_and_a_half_times_the_forward_pass_at_one_width():
    assert flops(PLAIN, "bwd") == 2.5 * flops(PLAIN)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_bytes_of_standard_are_those_of_its_tensors(widths):
    """Q, K, V and O once; S and P written and read."""
    problem = of_widths(*widths)
    (q, k, v), dout, _ = draw(problem)
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    assert hbm_bytes(problem, "standard", 1 << 16) == 4 * (q.numel() + k.numel() + v.numel() + dout.numel() + 4 * scores)
