"""The oracle is what everything is held against, so it is held against torch's own autograd and
torch's own attention."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashzoo import Problem, reference
from flashzoo.call.operands import Operands
from flashzoo.inputs import descales
from flashzoo.reference import Result, dequantized, descales_of_rows, oracle, visible
from flashzoo_suite.support import both, draw, forward

PLAIN = {"batch": 2, "seqlen_q": 7, "seqlen_k": 7, "heads": 4, "heads_kv": 4, "head_dim": 5}
PROBLEMS = {
    "plain": {},
    "causal": {"causal": True},
    "causal, more keys": {"causal": True, "seqlen_k": 12},
    "causal, rows that see nothing": {"causal": True, "seqlen_k": 3},
    "window": {"window": (2, 1)},
    "window to the left, causal": {"window": (2, None), "causal": True, "seqlen_k": 9},
    "window that misses every key of some rows": {"window": (0, 0), "seqlen_k": 3},
    "grouped heads": {"heads_kv": 2, "causal": True},
    "one key head": {"heads_kv": 1},
    "narrow values": {"head_dim_v": 3, "causal": True, "seqlen_k": 9},
    "wide values, grouped heads": {"head_dim_v": 8, "heads_kv": 2, "seqlen_k": 3, "causal": True},
}


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS)
def problem(request) -> Problem:
    return Problem(**PLAIN | request.param, dtype="fp64", device="cpu", lse=True, grad=True)


def naive_mask(problem: Problem) -> Tensor:
    """Visibility from its definition in words, one pair at a time."""
    left, right = problem.window
    seen = torch.zeros(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool)
    for i in range(problem.seqlen_q):
        aligned = i + problem.seqlen_k - problem.seqlen_q
        for j in range(problem.seqlen_k):
            after_left = left is None or j >= aligned - left
            before_right = right is None or j <= aligned + right
            seen[i, j] = after_left and before_right and (not problem.causal or j <= aligned)
    return seen


def naive(q: Tensor, k: Tensor, v: Tensor, problem: Problem, scale: float) -> tuple[Tensor, Tensor]:
    """Dense masked softmax that autograd can differentiate, written with einsum and no code of the package."""
    group = problem.heads // problem.heads_kv
    k, v = (torch.stack([x[:, :, h // group] for h in range(problem.heads)], 2) for x in (k, v))
    seen = naive_mask(problem)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    weights = torch.where(seen, s, torch.zeros(())).exp() * seen
    total = weights.sum(-1)
    sees = total > 0
    safe = torch.where(sees, total, torch.ones(()))
    out = torch.einsum("bhij,bjhd->bihd", weights / safe[..., None], v)
    return out, torch.where(sees, safe.log(), torch.tensor(-math.inf))


def differentiated(function, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> Result:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves)
    # A row that sees nothing has a constant lse: its gradient must reach nothing.
    return Result(out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse)))


def assert_close(got: Result, expected: Result, tolerance: float) -> None:
    for name, value in expected.items().items():
        torch.testing.assert_close(
            got.items()[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            check_dtype=False,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def test_mask_is_its_definition(problem):
    seen = visible(problem)
    expected = naive_mask(problem)
    assert torch.equal(torch.ones_like(expected) if seen is None else seen, expected)


def test_blind_rows_are_the_rows_that_see_nothing(problem):
    blind = (~naive_mask(problem)).all(1)
    assert problem.blind_rows == int(blind.sum())
    assert bool(blind[: problem.blind_rows].all())


@pytest.mark.parametrize("scale", [0.4, 0.0, -0.7])
def test_oracle_is_autograd_of_the_dense_softmax(problem, scale):
    (q, k, v), dout, dlse = draw(problem)
    expected = differentiated(lambda *x: naive(*x, problem, scale), q, k, v, dout, dlse)
    assert_close(oracle(q, k, v, replace(problem, softmax_scale=scale), dout, dlse), expected, 1e-12)


def test_oracle_gradients_are_finite_differences(problem):
    (q, k, v), dout, dlse = draw(problem)
    problem = replace(problem, softmax_scale=0.4)
    dlse[..., : problem.blind_rows] = 0  # a difference of two -inf says nothing

    def loss(*tensors: Tensor) -> Tensor:
        result = oracle(*tensors, problem)
        return (result.out * dout).sum() + (result.lse.nan_to_num(neginf=0) * dlse).sum()

    gradients = oracle(q, k, v, problem, dout, dlse)
    step = 1e-5
    for at, gradient in enumerate((gradients.dq, gradients.dk, gradients.dv)):
        direction = torch.randn_like(gradient)
        ahead, behind = (
            [x + sign * step * direction if i == at else x for i, x in enumerate((q, k, v))] for sign in (1, -1)
        )
        measured = (loss(*ahead) - loss(*behind)) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), measured, rtol=1e-7, atol=1e-7)


def test_oracle_is_torch_attention(problem):
    (q, k, v), *_ = draw(problem)
    out = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=naive_mask(problem), enable_gqa=True
    ).transpose(1, 2)
    got = oracle(q, k, v, problem).out
    sees = naive_mask(problem).any(1)
    torch.testing.assert_close(got[:, sees], out[:, sees], rtol=1e-12, atol=1e-12)
    assert not got[:, ~sees].any()


def test_oracle_in_float32_is_near_float64(problem):
    (q, k, v), dout, dlse = draw(problem)
    got = oracle(q, k, v, problem, dout, dlse, dtype=torch.float32)
    assert got.out.dtype == got.lse.dtype == got.dk.dtype == torch.float32
    assert_close(got, oracle(q, k, v, problem, dout, dlse), 1e-4)


def test_oracle_survives_scores_that_overflow_exp(problem):
    tensors, dout, dlse = draw(problem)
    q, k, v = (x * 1000 for x in tensors)
    assert all(
        value.isfinite().all()
        for name, value in oracle(q, k, v, replace(problem, softmax_scale=1.0), dout, dlse).items().items()
        if name != "lse"
    )


@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"seqlen_q": 0, "seqlen_k": 0}, {"seqlen_k": 0, "head_dim_v": 3}],
    ids=str,
)
def test_oracle_of_nothing(sizes):
    problem = Problem(**PLAIN | sizes, dtype="fp64", device="cpu", lse=True)
    (q, k, v), dout, dlse = draw(problem)
    result = oracle(q, k, v, replace(problem, softmax_scale=1.0), dout, dlse)
    assert result.out.shape == dout.shape and result.lse.shape == (problem.batch, problem.heads, problem.seqlen_q)
    assert not result.out.any() and bool((result.lse == -math.inf).all())
    assert [x.shape for x in (result.dq, result.dk, result.dv)] == [q.shape, k.shape, v.shape]
    assert not any(x.any() for x in (result.dq, result.dk, result.dv))


def test_standard_in_float64_is_the_oracle(problem):
    tensors, dout, dlse = draw(problem)
    got = both("standard", tensors, problem, dout, dlse)
    assert_close(got, oracle(*tensors, problem, dout, dlse), 2e-6)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_standard_is_close_to_the_oracle(dtype):
    sizes = {"batch": 1, "seqlen_q": 96, "seqlen_k": 128, "heads": 4, "heads_kv": 2, "head_dim": 64}
    problem = Problem(**sizes, dtype=dtype, causal=True, lse=True, grad=True, device="cpu")
    tensors, dout, dlse = draw(problem)
    result = both("standard", tensors, problem, dout, dlse)
    ideal = oracle(*tensors, problem, dout, dlse)
    step = torch.finfo(tensors[0].dtype).eps
    for name, value in result.items().items():
        error = (value.double() - ideal.items()[name]).norm() / ideal.items()[name].norm()
        assert error < 2 * max(step, 1e-6), (
            f"{name}: relative error {error:.1e}, expected under two roundings to {dtype}"
        )


IN_FP8 = Problem(
    batch=2,
    seqlen_q=140,
    seqlen_k=260,
    heads=4,
    heads_kv=2,
    head_dim=64,
    dtype="e4m3",
    causal=True,
    lse=True,
    device="cpu",
)


@pytest.mark.parametrize("kind", [None, "head", "block"])
def test_dequantized_is_each_row_times_its_own_number(kind):
    tensors, *_ = draw(IN_FP8)
    for name, x, scale in zip("qkv", tensors, descales(IN_FP8, kind), strict=True):
        found = dequantized(x, scale)
        for b, row, head in ((0, 0, 0), (1, 127, 1), (1, 128, 0), (0, x.shape[1] - 1, x.shape[2] - 1)):
            if kind is None:
                number = 1.0
            elif kind == "head":
                number = float(scale[b, head // 2 if name == "q" else head])
            else:
                number = float(scale[b, head, row // 128])
            assert torch.equal(found[b, row, head], x[b, row, head].double() * number)


def test_each_row_of_a_packed_sequence_is_under_its_own_number():
    packed = replace(IN_FP8, batch=1, sequences=3)
    tensors, *_ = draw(packed)
    q, k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 40, 40, 130], [10, 100, 101, 260]))
    numbers = descales(packed, "head")
    scales = descales_of_rows(*tensors, Operands(*numbers, cu_seqlens_q=q, cu_seqlens_k=k))
    for at, cu in enumerate((q, k, k)):
        group = tensors[at].shape[2] // 2
        for i, (first, end) in enumerate(pairwise(cu.tolist())):
            expected = tensors[at][0, first:end].double() * numbers[at][i].double().repeat_interleave(group)[:, None]
            assert torch.equal(dequantized(tensors[at], scales[at])[0, first:end], expected)


@pytest.mark.parametrize("kind", [None, "head", "block"])
def test_standard_in_e4m3_is_close_to_the_oracle(kind):
    tensors, *_ = draw(IN_FP8)
    scales = descales(IN_FP8, kind)
    result = forward("standard", tensors, IN_FP8, descales=scales)
    real = (dequantized(x, scale) for x, scale in zip(tensors, scales, strict=True))
    ideal = oracle(*real, IN_FP8)
    assert result.out.dtype == torch.bfloat16
    assert (result.out - ideal.out).norm() < 2**-5 * ideal.out.norm(), (
        "P is rounded to 4 bits, and rounded errors cancel in part"
    )
    assert (result.lse - ideal.lse).abs().max() < 4e-3


def test_standard_quantises_to_within_a_rounding():
    problem = Problem(
        batch=2, seqlen_q=9, seqlen_k=9, heads=2, heads_kv=2, head_dim=32, dtype="fp16", precision="fp8", device="cpu"
    )
    (x, *_), *_ = draw(problem)
    x[1, :, 1] = 0
    quantized, scale = reference._quantized(x)
    assert scale.shape == (2, 2, 1) and quantized.dtype == torch.float8_e4m3fn
    found = dequantized(quantized, scale)
    largest = x.abs().amax((1, 3), keepdim=True).double()
    assert bool(((found - x).abs() <= 2**-4 * x.abs() + 2**-9 / 448 * largest).all())
    assert torch.equal(found.abs().amax((1, 3)).half(), x.abs().amax((1, 3)))


def test_sums_keep_what_hoppers_tensor_core_keeps():
    a = torch.tensor([[[32.0, *[0.0] * 31, 2**-9, *[0.0] * 31]]])
    b = torch.ones(1, 1, 64)
    assert float(reference._hopper_sums(a, b)) == 32, "2^-9 is the 14th bit below 32's"
    a[..., 32] = 2**-8
    assert float(reference._hopper_sums(a, b)) == 32 + 2**-8


def in_one_level(p: Tensor, v: Tensor) -> float:
    """The sum of two rows of numbers, 32 at a time, in float64: beside the sum so far each product is cut towards 0 to
    multiples of 2^-13 of the largest of them, rounded down to a power of two, and then the new sum to its own."""

    def cut(x: float, largest: float) -> float:
        unit = 2.0 ** (math.frexp(largest)[1] - 14) if largest else 1.0
        return math.trunc(x / unit) * unit

    total = 0.0
    for first in range(0, len(p), 32):
        terms = [float(x) * float(y) for x, y in zip(p[first : first + 32], v[first : first + 32], strict=True)]
        largest = max(abs(x) for x in (*terms, total))
        total = cut(total, largest) + sum(cut(x, largest) for x in terms)
        total = cut(total, abs(total))
    return total


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("each", [reference.HOPPER_EACH, 32 * 5 * 3, 1])
def test_one_level_cuts_every_product_beside_the_sum(mean, each, monkeypatch):
    monkeypatch.setattr(reference, "HOPPER_EACH", max(each, 32 * 5))  # so many rows at a time: all, three, one
    p = torch.rand(2, 4, 1000).mul_(256).to(torch.float8_e4m3fn).float()
    v = (torch.randn(2, 1000, 5) + mean).to(torch.float8_e4m3fn).float() * 0.3
    found = reference.one_level(p, v)
    for b, row, column in ((0, 0, 0), (0, 3, 4), (1, 1, 2), (1, 2, 0)):
        expected = in_one_level(p[b, row], v[b, :, column])
        assert float(found[b, row, column]) == pytest.approx(expected, rel=1e-6)
    assert not torch.equal(found, p @ v)


def test_standard_with_fast_accum_has_one_level_of_sums():
    """A mean of ones, in one level: where the sum is 2^14 times a term, a term is nothing beside it."""
    n = 1 << 15
    q, k, v = (torch.full((1, rows, 1, 16), x).to(torch.float8_e4m3fn) for rows, x in ((2, 0.0), (n, 0.0), (n, 1.0)))
    problem = Problem(1, 2, n, 1, 1, 16, dtype="e4m3", device="cpu")
    assert bool((forward("standard", (q, k, v), problem).out == 1).all())
    assert bool((forward("standard", (q, k, v), replace(problem, fast_accum=True)).out == 0.5).all())


def test_fast_accum_is_of_the_forward_pass_alone():
    problem = Problem(
        *(1, 40, 70, 2, 1, 32),
        **{"dtype": "fp16", "precision": "fp8", "fast_accum": True, "grad": True, "lse": True, "device": "cpu"},
    )
    tensors, dout, dlse = draw(problem)
    fast = both("standard", tensors, problem, dout, dlse)
    plain = both("standard", tensors, replace(problem, fast_accum=False), dout, dlse)
    assert torch.equal(fast.lse, plain.lse) and torch.equal(fast.dv, plain.dv), "LSE is no sum of P V, nor is dV"
    assert not torch.equal(fast.out, plain.out)
