"""The rule that accepts results must refuse wrong ones: faults are put into a sound result, one at a time."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from flashzoo import Problem, accuracy, reference
from flashzoo.accuracy import Judge
from flashzoo.call.forms import MaskForm
from flashzoo.call.operands import Descales, Operands
from flashzoo.inputs import block_mask, descales
from flashzoo.reference import Result, deltas, rotated, standard
from flashzoo.sinks import gradient_of_sinks
from flashzoo_suite.support import accept, as_judged, both, draw, forward, seen_by, sinks_of

PROBLEM = Problem(
    batch=1, seqlen_q=64, seqlen_k=64, heads=2, heads_kv=2, head_dim=32, causal=True, lse=True, grad=True, device="cpu"
)


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
    return Judge(*tensors, problem, dout, dlse), both("standard", tensors, problem, dout, dlse)


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


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("seqlen", "lost"), [(128, 2), (512, 16), (2048, 64)])
def test_the_last_keys_count_though_few_see_them(dtype, seqlen, lost):
    """Under a causal mask their dV is next to nothing in the norm of the whole tensor."""
    problem = dataclasses.replace(PROBLEM, dtype=dtype, seqlen_q=seqlen, seqlen_k=seqlen, heads=1, heads_kv=1)
    tensors, dout, dlse = draw(problem)
    judge = Judge(*tensors, problem, dout, dlse)
    for fault in (torch.Tensor.zero_, torch.Tensor.neg_):
        wrong = judge.yardstick.dv.clone()
        fault(wrong[:, -lost:])
        broken = [check for check in judge.checks(dataclasses.replace(judge.yardstick, dv=wrong)) if not check.ok]
        assert {check.tensor for check in broken} == {"dv"}, fault.__name__


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
@pytest.mark.parametrize(("at", "factor"), [(0, 1.05), (1, 1.05), (2, 1.05), (1, 1.5), (2, 1.3)], ids=str)
def test_a_fault_of_the_yardstick_is_nobodys_budget(monkeypatch, dtype, masked, at, factor):
    """Who errs as the yardstick does is refused with it, by what its roundings can explain,
    in every test that accepts a result."""
    problem = dataclasses.replace(
        PROBLEM, dtype=dtype, causal=False, block_mask=MaskForm(64, 64) if masked else None, seqlen_k=130
    )
    tensors, dout, dlse = draw(problem)
    mask = block_mask(problem)
    seen = None if mask is None else mask.to_dense()
    sound = reference._backward

    def wrong(*arguments, **options):
        found = list(sound(*arguments, **options))
        found[at] = found[at] * factor
        return tuple(found)

    assert all(check.ok for check in Judge(*tensors, problem, dout, dlse, mask=seen).of_yardstick)
    monkeypatch.setattr(reference, "_differentiable", reference.differentiable(reference._forward, wrong))
    judge = Judge(*tensors, problem, dout, dlse, mask=seen)
    name = ("dq", "dk", "dv")[at]
    assert [check.tensor for check in judge.of_yardstick if not check.ok] == [f"the yardstick's {name}"]
    with pytest.raises(AssertionError, match=f"the yardstick's {name}, beyond its roundings"):
        accept(judge, judge.yardstick)


@pytest.mark.parametrize(
    ("how", "factor"),
    [({"dtype": "bf16"}, 1.02), ({"dtype": "e4m3"}, 1.1), ({"dtype": "bf16", "precision": "fp8"}, 1.3)],
    ids=["bf16", "e4m3", "fp8"],
)
def test_a_fault_of_the_yardsticks_out_is_nobodys_budget(monkeypatch, how, factor):
    problem = dataclasses.replace(E4M3, **how, out_dtype=None)
    tensors, *_ = draw(problem)
    sound = reference._differentiable

    def wrong(*arguments, **options):
        out, lse = sound(*arguments, **options)
        out[:, 64:128] *= factor
        return out, lse

    assert all(check.ok for check in Judge(*tensors, problem).of_yardstick)
    monkeypatch.setattr(reference, "_differentiable", wrong)
    assert "the yardstick's out" in {check.tensor for check in Judge(*tensors, problem).of_yardstick if not check.ok}


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
    problem = Problem(
        batch=1,
        seqlen_q=8,
        seqlen_k=3,
        heads=1,
        heads_kv=1,
        head_dim=16,
        dtype="fp16",
        causal=True,
        lse=True,
        device="cpu",
    )
    tensors, *_ = draw(problem)
    judge = Judge(*tensors, problem)
    sound = judge.yardstick
    assert all(check.ok for check in judge.checks(sound))
    for name, value in (("out", 1e-4), ("lse", -1e30)):
        values = {key: x.clone() for key, x in sound.items().items()}
        values[name][0, 0, 0] = value
        assert not all(check.ok for check in judge.checks(Result(**values)))


E4M3 = Problem(
    batch=1, seqlen_q=300, seqlen_k=260, heads=4, heads_kv=2, head_dim=64, dtype="e4m3", lse=True, device="cpu"
)


def without(scales: Descales, at: int) -> tuple[Tensor | None, ...]:
    return tuple(None if i == at else x for i, x in enumerate(scales))


def of_the_next(scales: Descales, at: int) -> tuple[Tensor | None, ...]:
    """One descale moved on by a block, or where there is one for a head by a head."""
    return tuple(x.roll(1, -1) if i == at else x for i, x in enumerate(scales))


@pytest.mark.parametrize("kind", [None, "head", "block"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_yardstick_of_e4m3_is_accepted(kind, causal):
    problem = dataclasses.replace(E4M3, causal=causal)
    tensors, *_ = draw(problem)
    scales = descales(problem, kind)
    judge = Judge(*tensors, problem, descales=scales)
    assert [
        str(check) for check in judge.checks(forward("standard", tensors, problem, descales=scales)) if not check.ok
    ] == []


@pytest.mark.parametrize("kind", ["head", "block"])
@pytest.mark.parametrize("fault", [without, of_the_next], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("at", [0, 1, 2], ids="qkv")
def test_a_descale_that_is_not_its_own_is_seen(kind, fault, at):
    tensors, *_ = draw(E4M3)
    scales = descales(E4M3, kind)
    judge = Judge(*tensors, E4M3, descales=scales)
    broken = {
        check.tensor
        for check in judge.checks(forward("standard", tensors, E4M3, descales=fault(scales, at)))
        if not check.ok
    }
    assert broken == ({"out"} if at == 2 else {"out", "lse"})


@pytest.mark.parametrize("at", [0, 1, 2], ids="qkv")
def test_the_descale_of_another_sequence_is_seen(at):
    problem = dataclasses.replace(E4M3, sequences=5)
    tensors, *_ = draw(problem)
    scales = descales(problem, "head")
    judge = Judge(*tensors, problem, descales=as_judged(tensors, problem, scales)[2], mask=seen_by(problem))
    others = tuple(x.roll(1, 0) if i == at else x for i, x in enumerate(scales))
    assert all(check.ok for check in judge.checks(forward("standard", tensors, problem, descales=scales)))
    broken = {
        check.tensor for check in judge.checks(forward("standard", tensors, problem, descales=others)) if not check.ok
    }
    assert broken == ({"out"} if at == 2 else {"out", "lse"})


def test_a_p_that_was_not_scaled_is_seen(monkeypatch):
    tensors, *_ = draw(E4M3, values="sink")
    judge = Judge(*tensors, E4M3)
    monkeypatch.setattr(reference, "P_SCALE", 1.0)
    assert not all(check.ok for check in judge.checks(forward("standard", tensors, E4M3)))


def test_a_p_past_the_largest_number_is_seen(monkeypatch):
    """As under a maximum of the rows that is not the newest."""
    tensors, *_ = draw(E4M3)
    judge = Judge(*tensors, E4M3)
    rounded = Tensor.to
    monkeypatch.setattr(reference, "P_SCALE", 1024.0)
    monkeypatch.setattr(
        Tensor, "to", lambda x, dtype: rounded(x.clamp(-448, 448) if dtype == reference.E4M3 else x, dtype)
    )
    assert not all(check.ok for check in judge.checks(forward("standard", tensors, E4M3)))


@pytest.mark.parametrize("how", [{"dtype": "e4m3"}, {"dtype": "bf16", "precision": "fp8"}], ids=["e4m3", "fp8"])
class TestFp8:
    @pytest.fixture
    def problem(self, how) -> Problem:
        return dataclasses.replace(E4M3, **how, seqlen_k=160, out_dtype=None)

    def refused(self, judge: Judge, result: Result) -> set[str]:
        return {check.tensor for check in judge.checks(result) if not check.ok}

    def test_a_missing_key_is_seen(self, problem):
        few = dataclasses.replace(problem, seqlen_k=32)
        (q, k, v), *_ = draw(few)
        result = forward("standard", (q, k[:, :-1], v[:, :-1]), dataclasses.replace(few, seqlen_k=31))
        assert "out" in self.refused(Judge(q, k, v, few), result)

    def test_a_block_that_is_missing_in_the_sum_of_p_is_seen(self, problem):
        (q, k, v), *_ = draw(problem)
        sound = forward("standard", (q, k, v), problem)
        last = forward("standard", (q, k[:, 128:], v[:, 128:]), dataclasses.replace(problem, seqlen_k=32))
        rest = 1 - (last.lse - sound.lse).exp()
        wrong = Result(
            (sound.out.float() / rest.transpose(1, 2)[..., None]).to(sound.out.dtype), sound.lse + rest.log()
        )
        assert self.refused(Judge(q, k, v, problem), wrong) == {"out", "lse"}

    def test_a_block_of_values_under_the_scale_of_another_is_seen(self, problem):
        (q, k, v), *_ = draw(problem)
        sound = forward("standard", (q, k, v), problem)
        last = forward("standard", (q, k[:, 128:], v[:, 128:]), dataclasses.replace(problem, seqlen_k=32))
        share = (last.lse - sound.lse).exp().transpose(1, 2)[..., None]
        wrong = Result((sound.out.float() + 0.5 * share * last.out.float()).to(sound.out.dtype), sound.lse)
        assert self.refused(Judge(q, k, v, problem), wrong) == {"out"}

    def test_lse_less_what_a_smoothed_k_gave_up_is_seen(self, problem):
        (q, k, v), *_ = draw(problem)
        sound = forward("standard", (q, k, v), problem)
        shift = (
            torch.einsum("bihd,bhd->bhi", q.float(), k.float().mean(1).repeat_interleave(2, 1)) * problem.head_dim**-0.5
        )
        assert self.refused(Judge(q, k, v, problem), Result(sound.out, sound.lse - shift)) == {"lse"}

    @pytest.mark.parametrize("fault", [one_row, nan, infinity, zeros], ids=lambda fault: fault.__name__)
    @pytest.mark.parametrize("name", ["out", "lse"])
    def test_a_fault_is_seen(self, problem, name, fault):
        tensors, *_ = draw(problem)
        judge = Judge(*tensors, problem)
        values = {key: value.clone() for key, value in forward("standard", tensors, problem).items().items()}
        fault(values[name])
        assert self.refused(judge, Result(**values)) == {name}


def test_a_tighter_budget_that_a_version_declares_is_held():
    problem = dataclasses.replace(E4M3, dtype="bf16", precision="fp8", out_dtype=None)
    tensors, *_ = draw(problem)
    judge, result = Judge(*tensors, problem), forward("standard", tensors, problem)
    assert all(check.ok for check in judge.checks(result, rms=1.0))
    assert [check.rule for check in judge.checks(result, rms=0.4) if not check.ok] == ["worst head's RMS, as declared"]


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("fault", [one_row, nan, infinity, zeros], ids=lambda fault: fault.__name__)
def test_a_fault_in_a_gradient_under_fp8_is_seen(name, fault):
    problem = dataclasses.replace(PROBLEM, dtype="bf16", precision="fp8", out_dtype=None)
    tensors, dout, dlse = draw(problem)
    judge, sound = Judge(*tensors, problem, dout, dlse), both("standard", tensors, problem, dout, dlse)
    assert all(check.ok for check in judge.checks(sound))
    values = {key: value.clone() for key, value in sound.items().items()}
    fault(values[name])
    assert {check.tensor for check in judge.checks(Result(**values)) if not check.ok} == {name}


FEW_ROWS = dataclasses.replace(
    E4M3, dtype="bf16", precision="fp8", out_dtype=None, seqlen_q=1, seqlen_k=256, heads=1, heads_kv=1
)


def test_fp8_of_one_row_is_not_held_to_one_rounding():
    """Right results, whose rounding is another, at scores that few keys have all of: one in twenty was refused."""
    problem = dataclasses.replace(FEW_ROWS, head_dim=64, head_dim_v=None)
    refused = 0
    for seed in range(60):
        q, k, v = draw(problem, seed)[0]
        q = q * 10
        out, lse = standard(rotated(q, 99), rotated(k, 99), v, problem, Operands())
        refused += not all(check.ok for check in Judge(q, k, v, problem).checks(Result(out, lse)))
    assert refused == 0


@pytest.mark.parametrize(("rows", "drawn"), [(1, 16), (4, 16), (5, 13), (63, 2), (64, 1), (300, 1)])
def test_only_few_rows_are_drawn_again(rows, drawn, monkeypatch):
    seeds = []
    monkeypatch.setattr(accuracy, "rotated", lambda x, seed: seeds.append(seed) or rotated(x, seed))
    problem = dataclasses.replace(FEW_ROWS, seqlen_q=rows, causal=False)
    Judge(*draw(problem)[0], problem)
    assert seeds == [seed for seed in range(drawn) for _ in "qk"]


@pytest.mark.parametrize("seed", [42, 128, 146, 287, 362])
def test_what_rounding_out_makes_of_few_rows_is_no_fault(seed):
    """The last key's dK, of one query: its error is delta's, which is that of out, and the yardstick's was small."""
    problem = Problem(1, 129, 129, 8, 8, 8, dtype="bf16", causal=True, lse=True, grad=True, device="cpu")
    tensors, dout, _ = draw(problem, seed)
    judge, (q, k, _) = Judge(*tensors, problem, dout), (x.double() for x in tensors)
    ref = judge.reference
    assert ref.lse is not None and ref.dk is not None
    out = ref.out.to(dout.dtype)
    p = (torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale - ref.lse[..., None]).exp().tril()
    of_delta = (dout * (out - ref.out)).sum(-1)
    dk = (ref.dk - problem.scale * torch.einsum("bhij,bih,bihd->bjhd", p, of_delta, q)).to(dout.dtype)
    assert all(check.ok for check in judge.checks(dataclasses.replace(judge.yardstick, out=out, dk=dk)))
    dk[:, -1] = 0
    assert not all(check.ok for check in judge.checks(dataclasses.replace(judge.yardstick, out=out, dk=dk)))


SINKS = Problem(2, 200, 300, 6, 2, 64, causal=True, lse=True, grad=True, sinks=True, device="cpu")


def faulty(fault: str, sinks: Tensor, lse: Tensor, delta: Tensor, dlse: Tensor) -> Tensor:
    """Their gradient with something wrong in it."""
    if fault == "a row that is left out":
        delta = delta.clone()
        delta[1, 3, 77] = 0
    elif fault == "a row twice":
        delta = torch.cat((delta, delta[:, :, 40:41]), 2)
        lse = torch.cat((lse, lse[:, :, 40:41]), 2)
    elif fault == "no gradient of lse":
        delta = delta + dlse
    elif fault == "one batch alone":
        lse, delta = lse[:1], delta[:1]
    elif fault == "the next head's":
        sinks = sinks.roll(1)
    elif fault == "the sign":
        delta = -delta
    elif fault == "lse of the keys alone":
        lse = lse + torch.log1p(-torch.exp(sinks[:, None] - lse))
    return gradient_of_sinks(sinks, lse, delta)


SINKS_FAULTS = (
    "a row that is left out",
    "a row twice",
    "no gradient of lse",
    "one batch alone",
    "the next head's",
    "the sign",
    "lse of the keys alone",
)


@pytest.mark.parametrize("fault", ["", *SINKS_FAULTS])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_a_fault_in_the_gradient_of_sinks_is_seen(dtype, fault):
    problem = dataclasses.replace(SINKS, dtype=dtype, out_dtype=None)
    tensors, dout, dlse = draw(problem)
    own = sinks_of(problem)
    judge = Judge(*tensors, problem, dout, dlse, sinks=own)
    lse = judge.yardstick.lse
    delta = deltas(dout, dlse, judge.yardstick.out.to(lse.dtype))
    result = dataclasses.replace(judge.yardstick, dsinks=faulty(fault, own, lse, delta, dlse).to(own.dtype))
    accepted = all(check.ok for check in (*judge.of_yardstick, *judge.checks(result)))
    assert accepted == (not fault)


def test_sinks_go_with_a_problem_that_has_them():
    tensors, dout, dlse = draw(SINKS)
    with pytest.raises(ValueError, match=r"sinks must be given where the problem has them, got .* and sinks False"):
        Judge(*tensors, SINKS, dout, dlse)
