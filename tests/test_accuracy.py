"""The rule that accepts results must refuse wrong ones: faults are put into a sound result, one at a time."""

from __future__ import annotations

import dataclasses
import math

import pytest
from support import both, draw
from torch import Tensor

from flashzoo import Problem
from flashzoo.accuracy import Judge
from flashzoo.reference import Result

PROBLEM = Problem(batch=1, seqlen_q=64, seqlen_k=64, heads=2, heads_kv=2, head_dim=32, causal=True, lse=True, grad=True, device="cpu")


def one_element(x: Tensor) -> None:
    x[0, 1, 1] += 0.1


def one_row(x: Tensor) -> None:
    x[0, 1] = x[0, 0]


def bias(x: Tensor) -> None:
    x *= 1.02


def nan(x: Tensor) -> None:
    x[0, 1, 1] = math.nan


def infinity(x: Tensor) -> None:
    x[0, 1, 1] = math.inf


def zeros(x: Tensor) -> None:
    x.zero_()


@pytest.fixture(scope="module", params=["fp16", "bf16", "fp32"])
def judged(request) -> tuple[Judge, Result]:
    problem = dataclasses.replace(PROBLEM, dtype=request.param)
    tensors, dout, dlse = draw(problem)
    return Judge(*tensors, problem, None, dout, dlse), both("standard", tensors, problem, dout, dlse)


def test_the_yardstick_is_accepted(judged):
    judge, sound = judged
    assert [str(check) for check in judge.checks(sound) if not check.ok] == []


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("fault", [one_element, one_row, bias, nan, infinity, zeros], ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(judged, name, fault):
    judge, sound = judged
    values = {key: value.clone() for key, value in sound.items().items()}
    fault(values[name])
    broken = {check.tensor for check in judge.checks(Result(**values)) if not check.ok}
    assert broken == {name}


def test_lse_in_the_wrong_unit_is_seen(judged):
    judge, sound = judged
    values = sound.items() | {"lse": sound.lse / math.log(2)}
    assert not all(check.ok for check in judge.checks(Result(**values)))


@pytest.mark.parametrize("change", [lambda x: x[:, :-1], lambda x: x.double()], ids=["shape", "dtype"])
def test_another_shape_or_dtype_is_an_error(judged, change):
    judge, sound = judged
    with pytest.raises(ValueError, match="out must have shape"):
        judge.checks(Result(change(sound.out), sound.lse))


def test_a_row_that_sees_nothing_must_be_exactly_zero():
    problem = Problem(batch=1, seqlen_q=8, seqlen_k=3, heads=1, heads_kv=1, head_dim=16, dtype="fp16", causal=True, lse=True, device="cpu")
    tensors, *_ = draw(problem)
    judge = Judge(*tensors, problem, None)
    sound = judge.yardstick
    assert all(check.ok for check in judge.checks(sound))
    for name, value in (("out", 1e-4), ("lse", -1e30)):
        values = {key: x.clone() for key, x in sound.items().items()}
        values[name][0, 0, 0] = value
        assert not all(check.ok for check in judge.checks(Result(**values)))
