"""What only versions have that take or make FP8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashzoo import Problem
from flashzoo.accuracy import Judge
from flashzoo.inputs import descales
from flashzoo_suite.support import (
    DEVICE,
    accept,
    draw,
    forward,
    same_bits,
)

ON_GPU = DEVICE == "cuda"
asks = pytest.mark.asks


AT_THE_EDGE = {"seqlen_q": 300, "seqlen_k": 280, "heads": 4, "heads_kv": 2, "head_dim": 64, "causal": True}
OF_FP8 = {
    "e4m3": {"dtype": "e4m3"},
    "fp8_fp16": {"dtype": "fp16", "precision": "fp8"},
    "fp8_bf16": {"dtype": "bf16", "precision": "fp8"},
}


def _zeros(q: Tensor, k: Tensor, v: Tensor) -> None:
    for x in (q, k, v):
        x.zero_()


def _zero_blocks(q: Tensor, k: Tensor, v: Tensor) -> None:
    q[:, :128], k[:, 128:256], v[:, :128] = 0, 0, 0


def _zero_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    q[:, :, 0], k[:, :, 1], v[:, :, 0] = 0, 0, 0


def _one_outlier(q: Tensor, k: Tensor, v: Tensor) -> None:
    for x in (q, k, v):
        x[0, 200, 0, 3] = min(torch.finfo(x.dtype).max, 6e4)


def _largest(q: Tensor, k: Tensor, v: Tensor) -> None:
    for x in (q, k, v):
        x.copy_(x.float().sign() * 448)


def _tiny(q: Tensor, k: Tensor, v: Tensor) -> None:
    for x in (q, k, v):  # quantisers may count as 0 what is below 2^-100, where a scale's reciprocal would overflow
        x.copy_(x.float() * max(torch.finfo(x.dtype).tiny, 2.0**-90))


def _constant_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    v.fill_(0.3)


def _equal_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    k.copy_(k[:, :1].expand(k.shape))


EDGES = [_zeros, _zero_blocks, _zero_heads, _one_outlier, _largest, _tiny, _constant_values, _equal_keys]


@pytest.mark.covering(1)
@asks(OF_FP8, **AT_THE_EDGE)
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__[1:])
def test_numbers_at_the_edge_of_fp8(version, problem, edge):
    """A scale that is 0 or infinite, a P or a sum that overflows: no NaN and no infinity. Finite e4m3 numbers give no
    infinite score; the mask does, and some rows here are blind.

    Seen in FA 2409214a #2717 (P past 448 under a stale maximum).
    """
    tensors, *_ = draw(problem)
    edge(*tensors)
    result = forward(version, tensors, problem)
    assert bool(result.out.isfinite().all())
    accept(Judge(*tensors, problem), result)


DESCALED = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 300, "seqlen_k": 260, "head_dim": 64, "dtype": "e4m3"}


@asks({"plain": {}, "causal": {"causal": True}, "fp16": {"out_dtype": "fp16"}}, **DESCALED)
@pytest.mark.parametrize("kinds", [("block", "head", None), (None, "block", "head"), ("head", None, "block")], ids=str)
def test_each_descale_is_of_its_own_kind(version, problem, kinds):
    tensors, *_ = draw(problem)
    scales = tuple(descales(problem, kind, device=DEVICE)[at] for at, kind in enumerate(kinds))
    accept(Judge(*tensors, problem, descales=scales), forward(version, tensors, problem, descales=scales))


@asks(**DESCALED)
@pytest.mark.parametrize("kind", ["head", "block"])
def test_descales_lie_anywhere(version, problem, kind):
    """Any strides, broadcast ones too, and what lies between is not read."""
    tensors, *_ = draw(problem)
    scales = descales(problem, kind, device=DEVICE)
    expected = forward(version, tensors, problem, descales=scales)
    apart = []
    for x in scales:
        longer = x.new_full((*(2 * size + 1 for size in x.shape),), torch.nan)
        view = longer[tuple(slice(1, None, 2) for _ in x.shape)]
        apart.append(view.copy_(x))
    turned = tuple(x.movedim(0, -1).contiguous().movedim(-1, 0) for x in scales)
    for moved in (tuple(apart), turned):
        found = forward(version, tensors, problem, descales=moved)
        assert same_bits(found.out, expected.out)
    ones = tuple(torch.ones((), device=x.device).expand(x.shape) for x in scales)
    assert same_bits(forward(version, tensors, problem, descales=ones).out, forward(version, tensors, problem).out)


@asks({"plain": {}, "causal": {"causal": True}}, **DESCALED)
@pytest.mark.parametrize("kind", ["head", "block"])
def test_a_power_of_two_passes_through_descales(version, problem, kind):
    tensors, *_ = draw(problem)
    q_scale, k_scale, v_scale = descales(problem, kind, device=DEVICE)

    def scaled(factor: float) -> Problem:
        return replace(problem, softmax_scale=factor * problem.scale)

    out = forward(version, tensors, scaled(1), (q_scale, k_scale, v_scale)).out
    assert torch.equal(forward(version, tensors, scaled(1), (q_scale, k_scale, 2 * v_scale)).out, 2 * out)
    assert torch.equal(forward(version, tensors, scaled(0.5), (2 * q_scale, k_scale, v_scale)).out, out)
    assert torch.equal(forward(version, tensors, scaled(2), (q_scale, k_scale / 2, v_scale)).out, out)


LONG_SUM = {"seqlen_q": 70, "seqlen_k": 8192 if ON_GPU else 2048, "heads": 2, "heads_kv": 2, "head_dim": 64}


@asks({name: OF_FP8[name] for name in ("e4m3", "fp8_bf16")}, **LONG_SUM)
def test_a_long_sum_keeps_its_small_terms(version, problem):
    """Values of one sign that all weigh alike: what is cut off at the size of the sum is missing in the end.

    Seen in DeepSeek-V3, section 3.3.2: Hopper's tensor core sums FP8 products in some 14 bits.
    """
    q, k, v = draw(problem)[0]
    v.copy_(v.float().abs())
    problem = replace(problem, softmax_scale=0.0)
    accept(Judge(q, k, v, problem), forward(version, (q, k, v), problem))
