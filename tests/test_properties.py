"""What must hold of any attention, whatever its numbers: no oracle, shapes and masks drawn by hypothesis.

`--hypothesis-profile=random` draws new ones; the default draws the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import flashzoo
from flashzoo import Problem
from flashzoo.reference import visible
from flashzoo_suite.support import Tensors, both, draw, dtypes_of, forward, interpreted, small, takes

LENGTHS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 129)
HEAD_DIMS = (1, 5, 8, 16, 20, 33, 64)
TOLERANCE = {"fp64": 2e-5, "fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2, "e4m3": 0.25}
asks = pytest.mark.asks


@dataclass(frozen=True)
class Call:
    """One drawn call; its tensors come from the seed."""

    problem: Problem
    seed: int

    @property
    def tensors(self) -> Tensors:
        return draw(self.problem, self.seed)[0]


def calls(version: str, problem: Problem, masked: bool, **asked) -> st.SearchStrategy[Call]:
    """Calls that the version takes, with sizes at and beside the edges of tiles;
    e4m3 where the problem is, else fp32 if it may be."""
    spec = flashzoo.versions()[version]
    dtype = "fp32" if problem.dtype != "e4m3" and "fp32" in dtypes_of(spec) else problem.dtype
    sides = st.one_of(st.none(), st.integers(0, 70))

    @st.composite
    def drawn(pick) -> Call:
        heads_kv = pick(st.integers(1, 2))
        problem = small(
            spec,
            dtype=dtype,
            batch=pick(st.integers(1, 2)),
            seqlen_q=pick(st.sampled_from(LENGTHS)),
            seqlen_k=pick(st.sampled_from(LENGTHS)),
            heads=heads_kv * pick(st.integers(1, 3)),
            heads_kv=heads_kv,
            head_dim=pick(st.sampled_from(HEAD_DIMS)),
            head_dim_v=pick(st.sampled_from((None, *HEAD_DIMS))) if "head_dim_v" in spec.features else None,
            causal=masked and pick(st.booleans()),
            window=(pick(sides), pick(sides)) if masked and "window" in spec.features else (None, None),
            softmax_scale=pick(st.sampled_from((None, 0.05, 1.0))),
            **asked,
        )
        assume(takes(spec, problem))
        return Call(problem, pick(st.integers(0, 1 << 20)))

    return drawn()


def for_all(strategy: st.SearchStrategy[Call], version: str, holds: Callable[[Call], None]) -> None:
    """Hypothesis, with few examples: a kernel is interpreted, or compiled for nearly each of them."""

    @settings(
        max_examples=5 if interpreted(version) else 12,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(strategy)
    def test(call: Call) -> None:
        holds(call)

    test()


def assert_near(found: torch.Tensor, expected: torch.Tensor, problem: Problem) -> None:
    tolerance = TOLERANCE[problem.dtype]
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)


def seeing(problem: Problem) -> torch.Tensor:
    """`(seqlen_q,)` bool: rows that see a key."""
    return torch.arange(problem.seqlen_q, device=problem.device) >= problem.blind_rows


@asks(fp8=("e4m3",))
def test_order_of_keys_does_not_matter(version, problem):
    def holds(call):
        q, k, v = call.tensors
        order = torch.randperm(call.problem.seqlen_k, generator=torch.Generator().manual_seed(call.seed)).to(k.device)
        out = forward(version, (q, k, v), call.problem).out
        assert_near(forward(version, (q, k[:, order], v[:, order]), call.problem).out, out, call.problem)

    for_all(calls(version, problem, masked=False), version, holds)


@asks(fp8=())
def test_one_vector_added_to_every_key_shifts_scores_only(version, problem):
    def holds(call):
        q, k, v = call.tensors
        # so that k + direction is what every dtype holds of it, and scores shift by just that
        k = (k * 16).round() / 16
        direction = 0.5 * torch.ones_like(k[:, :1])
        before = forward(version, (q, k, v), call.problem)
        after = forward(version, (q, k + direction, v), call.problem)
        assert_near(after.out, before.out, call.problem)
        if call.problem.lse:
            shift = call.problem.scale * 0.5 * q.float().sum(-1).transpose(1, 2)
            assert_near(after.lse, before.lse + shift, call.problem)

    for_all(calls(version, problem, masked=True), version, holds)


@asks(fp8=())
def test_linear_in_v(version, problem):
    def holds(call):
        q, k, v = call.tensors
        other = draw(call.problem, call.seed + 1)[0][2]
        left, right, mixed = (forward(version, (q, k, x), call.problem).out for x in (v, other, 0.5 * v - 2 * other))
        assert_near(mixed, 0.5 * left - 2 * right, call.problem)

    for_all(calls(version, problem, masked=True), version, holds)


@asks(fp8=("e4m3",), lse=True)
def test_two_parts_merge_into_the_whole_through_lse(version, problem):
    def holds(call):
        problem = call.problem
        assume(problem.seqlen_k > 1)
        q, k, v = call.tensors
        whole = forward(version, (q, k, v), problem)
        cut = 1 + call.seed % (problem.seqlen_k - 1)
        parts = []
        for keys in (slice(None, cut), slice(cut, None)):
            part = replace(problem, seqlen_k=len(range(problem.seqlen_k)[keys]))
            parts.append(forward(version, (q, k[:, keys], v[:, keys]), part))
        out, lse = flashzoo.merge([part.out for part in parts], [part.lse for part in parts])
        assert_near(lse, whole.lse, problem)
        assert_near(out, whole.out, problem)

    for_all(calls(version, problem, masked=False), version, holds)


@asks(fp8=("e4m3",))
def test_the_last_queries_alone_see_what_they_saw_among_all(version, problem):
    """Bottom-right alignment: decoding a row gives that row of the whole.
    Seen in ROCm flash-attention #158, FA #2595."""

    def holds(call):
        problem = call.problem
        q, k, v = call.tensors
        first = call.seed % problem.seqlen_q
        whole = forward(version, (q, k, v), problem)
        tail = forward(version, (q[:, first:], k, v), replace(problem, seqlen_q=problem.seqlen_q - first))
        assert_near(tail.out, whole.out[:, first:], problem)
        if problem.lse:
            assert_near(tail.lse, whole.lse[:, :, first:], problem)

    for_all(calls(version, problem, masked=True), version, holds)


@asks(fp8=("e4m3",))
def test_outputs_lie_in_the_hull_of_the_values(version, problem):
    def holds(call):
        problem = call.problem
        q, k, v = call.tensors
        out = forward(version, (q, k, v), problem).out[:, seeing(problem)]
        lowest, highest = (
            x.repeat_interleave(problem.heads // problem.heads_kv, 2)
            for x in (v.float().amin(1, True), v.float().amax(1, True))
        )
        slack = 4 * torch.finfo(v.dtype).eps * v.float().abs().max()
        assert bool((out >= lowest - slack).all()) and bool((out <= highest + slack).all())

    for_all(calls(version, problem, masked=True), version, holds)


@asks(fp8=("e4m3",))
def test_values_of_one_give_one(version, problem):
    def holds(call):
        q, k, v = call.tensors
        out = forward(version, (q, k, torch.ones_like(v)), call.problem).out
        assert_near(out, seeing(call.problem)[None, :, None, None].expand_as(out), call.problem)

    for_all(calls(version, problem, masked=True), version, holds)


@asks(fp8=("e4m3",), lse=True)
def test_lse_of_equal_scores_counts_the_keys(version, problem):
    def holds(call):
        problem = call.problem
        q, k, v = call.tensors
        lse = forward(version, (torch.zeros_like(q), k, v), problem).lse
        seen = visible(problem, q.device)
        count = torch.full((problem.seqlen_q,), problem.seqlen_k, device=q.device) if seen is None else seen.sum(1)
        torch.testing.assert_close(lse, count.double().log().float().expand_as(lse), rtol=1e-6, atol=1e-6)

    for_all(calls(version, problem, masked=True), version, holds)


@asks(fp8=("e4m3",))
def test_every_key_twice_changes_only_lse(version, problem):
    def holds(call):
        q, k, v = call.tensors
        twice = replace(call.problem, seqlen_k=2 * call.problem.seqlen_k)
        once = forward(version, (q, k, v), call.problem)
        doubled = forward(version, (q, torch.cat((k, k), 1), torch.cat((v, v), 1)), twice)
        assert_near(doubled.out, once.out, call.problem)
        if call.problem.lse:
            assert_near(doubled.lse, once.lse + math.log(2), call.problem)

    for_all(calls(version, problem, masked=False), version, holds)


@asks(fp8=(), grad=True)
def test_gradients_of_scores_balance(version, problem):
    """Both q . dQ and k . dK are the derivative with respect to the logarithm of the scale, summed head by head."""

    def holds(call):
        problem = call.problem
        (q, k, v), dout, dlse = draw(problem, call.seed)
        result = both(version, (q, k, v), problem, dout, dlse)
        assert result.dq is not None and result.dk is not None
        by_query = (q.double() * result.dq.double()).sum((1, 3)).view(problem.batch, problem.heads_kv, -1).sum(2)
        by_key = (k.double() * result.dk.double()).sum((1, 3))
        size = (q.double() * result.dq.double()).abs().sum() + (k.double() * result.dk.double()).abs().sum()
        assert bool(((by_query - by_key).abs() <= TOLERANCE[problem.dtype] * (1 + size)).all())

    for_all(calls(version, problem, masked=True, grad=True), version, holds)


@asks(fp8=(), grad=True)
def test_gradients_of_values_hand_on_the_whole_of_dout(version, problem):
    """Each row of P sums to 1, so dV summed over keys is dO summed over the rows that see a key."""

    def holds(call):
        problem = call.problem
        tensors, dout, _ = draw(problem, call.seed)
        result = both(version, tensors, problem, dout, None)
        assert result.dv is not None
        given_out = (
            dout[:, seeing(problem)]
            .double()
            .sum(1)
            .view(problem.batch, problem.heads_kv, -1, problem.head_dim_v)
            .sum(2)
        )
        slack = TOLERANCE[problem.dtype] * (1 + dout.double().abs().sum())
        assert bool(((result.dv.double().sum(1) - given_out).abs() <= slack).all())

    for_all(calls(version, problem, masked=True, grad=True), version, holds)
