"""What sinks promise beyond being right: one of -inf is none, one is one more key, its gradient
comes with any other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo.accuracy import Judge
from flashzoo_suite.support import (
    DEVICE,
    accept,
    alike,
    as_arguments,
    both,
    draw,
    forward,
    in_fixed_order,
    lazily_negated,
    same_bits,
    sinks_of,
)

asks = pytest.mark.asks
KINDS = {
    "full": {},
    "causal_gqa": {"causal": True, "seqlen_k": 70, "heads": 4},
    "window": {"window": (9, 3), "seqlen_k": 90},
    "packed": {"sequences": 3, "causal": True},
    "cache": {"used_k": True, "seqlen_k": 90, "causal": True},
}


def sinks(*values: float) -> Tensor:
    """Sinks of these values."""
    return torch.tensor(values, device=DEVICE)


@asks(KINDS, both=True, sinks=True)
def test_minus_infinity_is_none(version, problem):
    """To the bit, LSE and gradients too, and its own gradient is 0."""
    problem = in_fixed_order(version, problem)
    tensors, dout, dlse = draw(problem)
    found = both(version, tensors, problem, dout, dlse, sinks=sinks(*[-math.inf] * problem.heads))
    plain = both(version, tensors, replace(problem, sinks=False), dout, dlse)
    assert alike(problem, replace(found, dsinks=None), plain)
    assert found.dsinks is None or not found.dsinks.any()


@asks(KINDS, both=True, sinks=True)
def test_a_huge_one_takes_everything(version, problem):
    """Where exp(sink - maximum) overflows float32."""
    tensors, dout, dlse = draw(problem)
    huge = sinks(*[1e4, 3e30, 150.0, 1e4][: problem.heads])
    found = both(version, tensors, problem, dout, dlse, sinks=huge)
    assert not found.out.any()
    if problem.lse:
        torch.testing.assert_close(
            found.lse, huge[:, None].expand(found.lse.shape).to(found.lse.dtype), rtol=1e-6, atol=0
        )
    if problem.grad:
        assert not any(x.any() for x in (found.dq, found.dk, found.dv))
        torch.testing.assert_close(found.dsinks, torch.zeros_like(huge) if dlse is None else dlse.sum((0, 2)))


@asks(both=True, sinks=True, causal=True, seqlen_q=70, seqlen_k=9)
def test_rows_without_a_key_have_their_sink(version, problem):
    tensors, dout, dlse = draw(problem)
    found = both(version, tensors, problem, dout, dlse)
    blind, own = problem.blind_rows, sinks_of(problem)[:, None].to(torch.float32)
    assert blind == 61 and not found.out[:, :blind].any()
    if problem.lse:
        torch.testing.assert_close(found.lse[:, :, :blind].float(), own.expand(1, -1, blind), rtol=1e-6, atol=1e-6)


@asks(both=True, fp8=(), sinks=True, seqlen_k=50)
def test_it_is_one_more_key(version, problem):
    """Whose score is the sink and whose value is 0: out, LSE and all gradients are those of the version
    itself without sinks."""
    (q, k, v), dout, dlse = draw(problem)
    own = sinks(1.5, -0.75)
    q[..., 0], k[..., 0] = 4, 0  # scores are scaled by a quarter
    key = torch.zeros_like(k[:, :1])
    key[..., 0] = own
    found = both(version, (q, k, v), problem, dout, dlse, sinks=own)
    without = replace(problem, sinks=False, seqlen_k=51)
    plain = both(version, (q, torch.cat((key, k), 1), torch.cat((torch.zeros_like(key), v), 1)), without, dout, dlse)
    close = {"rtol": 1e-2, "atol": 1e-2} if problem.dtype in ("fp16", "bf16") else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found.out, plain.out, **close)
    if problem.lse:
        torch.testing.assert_close(found.lse, plain.lse, rtol=1e-4, atol=1e-4)
    if problem.grad:
        torch.testing.assert_close(found.dk, plain.dk[:, 1:], **close)
        torch.testing.assert_close(found.dv, plain.dv[:, 1:], **close)
        assert (found.dq[..., 1:] - plain.dq[..., 1:]).abs().max() < 1e-2
        torch.testing.assert_close(found.dsinks, plain.dk[0, 0, :, 0].to(found.dsinks.dtype), rtol=2e-2, atol=2e-2)


@asks(grad=True, sinks=True, causal=True, seqlen_k=70)
def test_only_sinks_require_grad(version, problem):
    tensors, dout, dlse = draw(problem)
    leaf = sinks_of(problem).requires_grad_()
    result = forward(version, tensors, problem, sinks=leaf)
    outputs, given = ((result.out,), (dout,)) if dlse is None else ((result.out, result.lse), (dout, dlse))
    (found,) = torch.autograd.grad(outputs, leaf, given)
    assert same_bits(found, both(version, tensors, problem, dout, dlse).dsinks)


@asks({"plain": {}, "packed": {"sequences": 3}}, grad=True, sinks=True)
def test_q_k_and_v_alone_require_grad(version, problem):
    tensors, dout, dlse = draw(problem)
    problem = in_fixed_order(version, problem)
    expected = both(version, tensors, problem, dout, dlse)
    frozen = lambda *x, **how: flashzoo.attention(*x, **how | {"sinks": how["sinks"].detach()})  # noqa: E731
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    result = forward(version, leaves, problem, attention=frozen)
    outputs, given = ((result.out,), (dout,)) if dlse is None else ((result.out, result.lse), (dout, dlse))
    for x, name in zip(torch.autograd.grad(outputs, leaves, given), ("dq", "dk", "dv"), strict=True):
        assert same_bits(x, expected.items()[name])


LYING = {
    "fp16": lambda x: x.half(),
    "bf16": lambda x: x.bfloat16(),
    "strided": lambda x: torch.stack((x, x), 1)[:, 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "negated": lazily_negated,
}


@asks(both=True, sinks=True, heads=4, heads_kv=2)
@pytest.mark.parametrize("how", LYING)
def test_any_dtype_that_lies_anywhere(version, problem, how):
    """The same as float32 in a row; their gradient is rounded once, to their dtype."""
    problem = in_fixed_order(version, problem)
    tensors, dout, dlse = draw(problem)
    given = LYING[how](sinks_of(problem))
    found = both(version, tensors, problem, dout, dlse, sinks=given)
    plain = both(
        version,
        tensors,
        problem,
        dout,
        dlse,
        sinks=given.to(sinks_of(problem).dtype, copy=True).resolve_neg().contiguous(),
    )
    assert alike(problem, replace(found, dsinks=None), replace(plain, dsinks=None))
    if problem.grad:
        assert same_bits(found.dsinks.resolve_neg(), plain.dsinks.to(given.dtype).resolve_neg())
        given_to_judge = dout, dlse
    else:
        given_to_judge = None, None
    accept(Judge(*tensors, problem, *given_to_judge, sinks=given.resolve_neg()), found)


@asks(grad=True, fp8=(), sinks=True, lse=True, causal=True, dtype="fp32", seqlen_k=70)
def test_no_keys_at_all(version, problem):
    """Whoever is asked: out is 0, LSE the sink, and LSE's gradient the sink's."""
    problem = replace(problem, seqlen_k=0, causal=False)
    tensors, dout, dlse = draw(problem)
    found = both(version, tensors, problem, dout, dlse)
    assert not found.out.any() and torch.equal(found.lse, sinks_of(problem)[:, None].expand(found.lse.shape))
    torch.testing.assert_close(found.dsinks, dlse.sum((0, 2)))
    gone = both(version, tensors, problem, dout, dlse, sinks=sinks(*[-math.inf] * problem.heads))
    assert bool((gone.lse == -math.inf).all()) and not gone.dsinks.any()
    arguments = as_arguments(problem) | {"version": version}
    given = dout, *tensors, found.out, found.lse
    try:
        alone = flashzoo.attention_backward(*given, dlse=dlse, **arguments)
    except flashzoo.UnsupportedError:  # it has no backward pass apart from its forward pass
        return
    torch.testing.assert_close(alone[3], found.dsinks)
