"""The counts that speeds are quoted from: operations and bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flashzoo import Problem
from flashzoo.counts import flops, hbm_bytes
from flashzoo.inputs import LAYOUTS, VALUES, descales, inputs, kinds_of_descales
from flashzoo.workloads import workload, workloads
from flashzoo_suite.support import WORKER_BYTES, both, draw, forward

PLAIN = Problem(
    batch=2, seqlen_q=7, seqlen_k=9, heads=4, heads_kv=2, head_dim=16, dtype="fp32", grad=True, device="cpu"
)
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
    assert hbm_bytes(problem, "standard", 1 << 16) == 4 * (
        q.numel() + k.numel() + v.numel() + dout.numel() + 4 * scores
    )


IN_E4M3 = dataclasses.replace(PLAIN, seqlen_q=130, seqlen_k=300, dtype="e4m3", out_dtype=None, grad=False)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_e4m3_inputs_are_finite_and_lie_where_they_should(values, layout):
    *tensors, dout = inputs(IN_E4M3, values=values, layout=layout)
    assert {x.dtype for x in tensors} == {torch.float8_e4m3fn} and dout.dtype == torch.bfloat16
    assert all(bool(x.float().isfinite().all()) for x in tensors)
    if layout != "expanded":
        plain = inputs(IN_E4M3, values=values)
        assert all(torch.equal(x.float(), y.float()) for x, y in zip(tensors, plain, strict=False))


def test_e4m3_inputs_are_the_others_rounded():
    halves, rounded = (inputs(dataclasses.replace(IN_E4M3, dtype=dtype)) for dtype in ("fp32", "e4m3"))
    for x, y in zip(halves[:3], rounded[:3], strict=True):
        assert bool(((x - y.float()).abs() <= x.abs() / 16 + 2**-10).all())


def test_descales_have_the_shapes_that_attention_takes():
    assert descales(IN_E4M3, None) == (None, None, None)
    assert [x.shape for x in descales(IN_E4M3, "head")] == [(2, 2)] * 3
    assert [x.shape for x in descales(IN_E4M3, "block")] == [(2, 4, 2), (2, 2, 3), (2, 2, 3)]
    for x in descales(IN_E4M3, "block"):
        assert x.dtype == torch.float32 and x.min() >= 0.5 and x.max() <= 2 and x.unique().numel() == x.numel()
    with pytest.raises(ValueError, match=r"kind must be one of .* got 'row'"):
        descales(IN_E4M3, "row")
    packed = dataclasses.replace(IN_E4M3, batch=1, sequences=3)
    assert kinds_of_descales(packed) == (None, "head") and [x.shape for x in descales(packed, "head")] == [(3, 2)] * 3
    with pytest.raises(ValueError, match=r"kind must be one of \(None, 'head'\), got 'block'"):
        descales(packed, "block")


def test_a_workload_in_another_dtype_has_that_dtypes_out():
    assert [workload("square").on("cpu", dtype=dtype).out_dtype for dtype in ("fp32", "fp16", "e4m3")] == [
        "fp32",
        "fp16",
        "bf16",
    ]
    assert workload("square").on("cpu", dtype="e4m3", out_dtype="fp16").out_dtype == "fp16"


@pytest.mark.parametrize("tag", ["smoke", "hard", "large"])
def test_what_the_suite_draws_fits_beside_other_processes(tag):
    """`standard` has S, P and a mask of all queries and all keys in float64, and its gradients as much again; torch's
    math has keys and values of every query head in 16 bits and in float32, and gradients of these."""
    for problem in (x.problem for x in workloads(tag)):
        keys = problem.total_k if problem.packed_q else problem.seqlen_k
        of_heads = problem.batch * problem.heads * keys
        assert 4 * 8 * of_heads * problem.seqlen_q <= WORKER_BYTES, str(problem)
        assert 2 * (2 + 4) * of_heads * (problem.head_dim + problem.head_dim_v) <= WORKER_BYTES, str(problem)
