"""`flashzoo.attention_backward`: bit for bit what autograd gives, shares of a whole's gradients, rows that see
nothing, errors."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import BlockMask, UnsupportedError
from flashzoo.accuracy import Judge
from flashzoo.autograd import differentiable
from flashzoo.call import plan
from flashzoo.call.forms import MaskForm
from flashzoo.reference import Result
from flashzoo.registry import backward_of
from flashzoo_suite.support import (
    DEVICE,
    accept,
    as_arguments,
    both,
    dense,
    dense_backward,
    draw,
    forward,
    in_fixed_order,
    lazily_negated,
    same_bits,
    seen_by,
    sinks_of,
    toy,
)

asks = pytest.mark.asks
MASK = MaskForm(bits=True)
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (30, 5)},
    "head_dim_v": {"head_dim_v": 8},
    "mask": {"block_mask": MASK, "causal": True},
    "negative": {"softmax_scale": -0.3},
    "sinks": {"sinks": True, "causal": True},
}
SIZES = {"seqlen_q": 40, "seqlen_k": 90, "heads": 4, "heads_kv": 2}


def alone(version: str) -> bool:
    """Whether it has a backward pass apart from its forward pass; where it has none, that is an error by name."""
    if backward_of(flashzoo.versions()[version]):
        return True
    x = torch.zeros(1, 2, 1, 16, device=DEVICE, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match=f"version '{version}' has no backward pass for .*\n  {version}: "):
        flashzoo.attention_backward(x, x, x, x, x, torch.zeros(1, 1, 2, device=DEVICE), version=version)
    return False


@asks(CASES, fp8=(), grad=True, lse=True, deterministic=True, **SIZES)
def test_gradients_are_those_of_autograd(version, problem):
    if not alone(version):
        return
    tensors, dout, dlse = draw(problem)
    for of_lse in (dlse, None):
        expected = both(version, tensors, problem, dout, of_lse)
        given = (dout, *tensors, expected.out, expected.lse)
        before = [x.clone() for x in given]
        found = flashzoo.attention_backward(*given, dlse=of_lse, version=version, **as_arguments(problem))
        names = ("dq", "dk", "dv", "dsinks") if problem.sinks else ("dq", "dk", "dv")
        for name, x in zip(names, found, strict=True):
            assert same_bits(x, expected.items()[name]), name
        assert all(same_bits(x, old) for x, old in zip(given, before, strict=True))


@asks({name: CASES[name] for name in ("plain", "causal", "mask")}, fp8=(), dtype="fp32", grad=True, lse=True, **SIZES)
@pytest.mark.parametrize("by", ["out", "delta"])
def test_shares_of_two_parts_make_the_whole(version, problem, by):
    """As context parallelism has it: each part of the keys with the out and the LSE of all of them."""
    if not alone(version):
        return
    (q, k, v), dout, dlse = draw(problem)
    options, cut = as_arguments(problem), problem.offset + 1
    mask, causal = options.pop("block_mask", None), options.pop("causal")
    dense = None if mask is None else mask.to_dense()
    # The keys behind the first query's diagonal are aligned as before; it sees none of them where causal.
    parts = [
        (
            keys,
            options
            | {
                "causal": causal and behind,
                "block_mask": None if dense is None else BlockMask.from_dense(dense[..., keys]),
            },
        )
        for keys, behind in ((slice(0, cut), False), (slice(cut, None), True))
    ]
    found = [
        flashzoo.attention(q, k[:, keys], v[:, keys], return_lse=True, version=version, **how) for keys, how in parts
    ]
    out, lse = flashzoo.merge(*zip(*found, strict=True))
    given = {"out": out} if by == "out" else {"out": None, "delta": (dout * out).sum(-1).transpose(1, 2)}
    shares = [
        flashzoo.attention_backward(dout, q, k[:, at], v[:, at], lse=lse, dlse=dlse, version=version, **given, **how)
        for at, how in parts
    ]
    dqs, dks, dvs = zip(*shares, strict=True)
    result = Result(out, lse, dqs[0] + dqs[1], torch.cat(dks, 1), torch.cat(dvs, 1))
    accept(Judge(q, k, v, problem, dout, dlse, mask=seen_by(problem)), result)


@asks(fp8=(), dtype="fp32", grad=True, lse=True, **SIZES)
def test_rows_without_a_key_give_nothing(version, problem):
    """Even where this part of the keys is seen: so it is of rows that are to be left out."""
    if not alone(version):
        return
    (q, k, v), dout, _ = draw(problem)
    result = forward(version, (q, k, v), problem)
    lse = result.lse.clone()
    lse[:, :, 3:7] = -math.inf
    kept = [0, 1, 2, *range(7, problem.seqlen_q)]
    dq, dk, dv = flashzoo.attention_backward(dout, q, k, v, result.out, lse, version=version)
    assert not dq[:, 3:7].any()
    few = flashzoo.attention_backward(
        dout[:, kept], q[:, kept], k, v, result.out[:, kept], result.lse[:, :, kept], version=version
    )
    for x, expected in zip((dq[:, kept], dk, dv), few, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


@asks({"plain": {}, "packed": {"sequences": 3, "seqlen_k": 40}}, fp8=(), grad=True, lse=True, sinks=True, **SIZES)
def test_sinks_of_any_dtype(version, problem):
    """Their gradient comes in it; the others' are what LSE and out make them, with sinks or without."""
    if not alone(version):
        return
    tensors, dout, dlse = draw(problem)
    own, options = sinks_of(problem).to(torch.bfloat16), as_arguments(problem)
    problem = in_fixed_order(version, problem)
    if problem.deterministic:
        options["deterministic"] = True
    expected = both(version, tensors, problem, dout, dlse, sinks=own)
    given = [dout, *tensors, expected.out, expected.lse]
    rows = problem.sequences is not None
    if rows:
        given, dlse = [x[0] for x in given], dlse[0]
    found = flashzoo.attention_backward(*given, dlse=dlse, version=version, **options | {"sinks": own})
    assert found[3].dtype == torch.bfloat16 and same_bits(found[3], expected.dsinks)
    without = flashzoo.attention_backward(
        *given, dlse=dlse, version=version, **{k: x for k, x in options.items() if k != "sinks"}
    )
    for x, plain, name in zip(found, without, ("dq", "dk", "dv"), strict=False):
        assert same_bits(x, plain) and same_bits(x[None] if rows else x, expected.items()[name])


def spread(x: Tensor) -> Tensor:
    """The same numbers, with gaps between them."""
    return torch.stack((x, torch.full_like(x, math.nan)), -1)[..., 0]


@asks(fp8=(), dtype="fp32", grad=True, lse=True, causal=True, deterministic=True, **SIZES)
def test_statistics_and_gradients_lie_anywhere(version, problem):
    if not alone(version):
        return
    tensors, dout, dlse = draw(problem)
    out, lse = forward(version, tensors, problem).items().values()
    how = {"version": version, **as_arguments(problem)}
    expected = flashzoo.attention_backward(dout, *tensors, out, lse, dlse=dlse, **how)
    turned = [
        flashzoo.attention_backward(
            dout, *tensors, out.mT.contiguous().mT, lse.mT.contiguous().mT, dlse=spread(dlse), **how
        )
    ]
    turned.append(
        flashzoo.attention_backward(
            spread(dout), *tensors, spread(out), spread(lse), dlse=dlse.mT.contiguous().mT, **how
        )
    )
    dout, q, k, v, out, lse, dlse = (lazily_negated(x) for x in (dout, *tensors, out, lse, dlse))
    turned.append(flashzoo.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **how))
    for found in turned:
        assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("lazy", [False, True], ids=["negative", "lazy"])
def test_heads_that_overlap(lazy):
    """As `-x` and `x.resolve_neg()` lay them, too, their columns have gaps."""
    given = small(heads_kv=4)
    for name in ("q", "k", "v"):
        x = torch.randn(*given[name].shape[:2], 19, device=DEVICE).unfold(2, 16, 1)
        given[name] = torch._neg_view(x) if lazy else x  # pyright: ignore[reportPrivateImportUsage]
    how = {"version": "v2", "softmax_scale": 0.3 if lazy else -0.3}
    found = flashzoo.attention_backward(**given, **how)
    expected = flashzoo.attention_backward(**{name: x.contiguous() for name, x in given.items()}, **how)
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


def small(heads_kv: int = 2, **changes) -> dict:
    """Arguments of a small call on the suite's device, with these in place of others."""
    q, out = torch.randn(2, 2, 5, 4, 16, device=DEVICE)
    k, v = torch.randn(2, 2, 7, heads_kv, 16, device=DEVICE)
    return {
        "dout": torch.randn_like(out),
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": torch.randn(2, 4, 5, device=DEVICE),
    } | changes


def test_delta_has_the_place_of_out():
    given, dlse = small(), torch.randn(2, 4, 5, device=DEVICE)
    delta = (given["dout"] * given["out"]).sum(-1).transpose(1, 2)
    for of_lse in (None, dlse):
        expected = flashzoo.attention_backward(**given, dlse=of_lse, version="standard")
        for out in (None, torch.randn_like(given["out"])):
            found = flashzoo.attention_backward(**given | {"out": out}, dlse=of_lse, delta=delta, version="standard")
            torch.testing.assert_close(found, expected)


def test_an_unrounded_out_makes_delta():
    given = {name: x if name == "lse" else x.half() for name, x in small().items()}
    out = torch.randn_like(given["dout"], dtype=torch.float32)
    delta = (given["dout"].float() * out).sum(-1).transpose(1, 2)
    expected = flashzoo.attention_backward(**given | {"out": None}, delta=delta, version="standard")
    found = flashzoo.attention_backward(**given | {"out": out}, version="standard")
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


def test_auto_and_use():
    given = small()
    expected = flashzoo.attention_backward(**given, version="v2")
    with flashzoo.use("v2"):
        assert all(same_bits(x, y) for x, y in zip(flashzoo.attention_backward(**given), expected, strict=True))
    torch.testing.assert_close(flashzoo.attention_backward(**given), expected, rtol=1e-4, atol=1e-4)


def test_auto_takes_the_first_that_has_one(monkeypatch):
    """Of a version that leaves its backward pass to autograd there is none apart from its forward pass;
    of one to fall back on there is."""
    given, ends = small(heads_kv=4), "no backward pass apart from its forward pass"
    expected = flashzoo.attention_backward(**given, version="standard")
    flashzoo.register(toy("lent", backward_impl="flashzoo_suite.support:dense_backward"), before="v3")
    flashzoo.register(toy("recorded"), before="lent")
    try:
        with pytest.raises(UnsupportedError, match=f"recorded: has {ends}\nversions that would: lent, .*standard"):
            flashzoo.attention_backward(**given, version="recorded")
        for version in ("auto", "lent"):
            torch.testing.assert_close(
                flashzoo.attention_backward(**given, version=version), expected, rtol=1e-4, atol=1e-4
            )
    finally:
        flashzoo.unregister("recorded")
        flashzoo.unregister("lent")


GIVES: list = []
"""What the next backward pass makes of its gradients."""


def changed(*arguments):
    return GIVES[-1](*dense_backward(*arguments))


changed_attention = differentiable(dense, changed)


def by_autograd(given: dict, version: str, compiled: bool = False) -> None:
    leaves = [given[name].clone().requires_grad_() for name in "qkv"]
    call = torch.compile(flashzoo.attention, backend="aot_eager") if compiled else flashzoo.attention
    call(*leaves, version=version).backward(given["dout"])


@pytest.mark.parametrize("by", ["alone", "autograd", "joined", "compiled"])
@pytest.mark.parametrize(
    ("give", "expected"),
    [
        (lambda dq, dk, dv: (dq, dk), "a tuple (dq, dk, dv), got tuple of 2"),
        (lambda dq, dk, dv: (dq, dk, dv, dv), "a tuple (dq, dk, dv), got tuple of 4"),
        (lambda dq, dk, dv: dq, "a tuple (dq, dk, dv), got a Tensor (2, 5, 4, 16)"),
        (lambda dq, dk, dv: (None, dk, dv), "dq as a Tensor (2, 5, 4, 16), torch.float32, on {}, got NoneType"),
        (
            lambda dq, dk, dv: (dq, dk[:, :1], dv),
            "dk as a Tensor (2, 7, 4, 16), torch.float32, on {}, got a Tensor (2, 1",
        ),
        (lambda dq, dk, dv: (dq, dk, dv.double()), "dv as a Tensor (2, 7, 4, 16), torch.float32, on {}, got a Tensor"),
        (
            lambda dq, dk, dv: (dq.to("meta"), dk, dv),
            "torch.float32, on {}, got a Tensor (2, 5, 4, 16), torch.float32, on meta",
        ),
    ],
    ids=["few", "many", "one", "none", "shape", "dtype", "device"],
)
def test_a_version_that_gives_something_else_is_named(by, give, expected, registry_as_it_was, monkeypatch):
    monkeypatch.setitem(globals(), "GIVES", [give])
    given = small(heads_kv=4)
    flashzoo.register(
        toy("wrong", impl=f"{__name__}:changed_attention", backward_impl=f"{__name__}:changed"), before="v3"
    )
    flashzoo.register(toy("newer", impl="flashzoo_suite.support:dense", backward=None), before="wrong")
    torch.compiler.reset()
    must = f"version 'wrong': its backward pass must return .*{re.escape(expected.format(given['q'].device))}"
    with pytest.raises(TypeError, match=must):
        if by == "alone":
            flashzoo.attention_backward(**given, version="wrong")
        else:
            by_autograd(given, "auto" if by == "joined" else "wrong", by == "compiled")


def test_gradients_beside_are_counted(registry_as_it_was, monkeypatch):
    monkeypatch.setitem(globals(), "GIVES", [lambda *found: found])
    flashzoo.register(toy("wrong", impl=f"{__name__}:changed_attention"))
    sinks = torch.randn(4, device=DEVICE)
    with pytest.raises(TypeError, match="the gradients of 1 tensors beside them, got tuple of 3"):
        flashzoo.attention_backward(**small(heads_kv=4), sinks=sinks, version="wrong")


def test_gradients_are_looked_at_once_for_each_kind_of_call(registry_as_it_was, monkeypatch):
    looked = []
    check = plan.LookedAt.check
    monkeypatch.setattr(plan.LookedAt, "check", lambda *arguments: looked.append(check(*arguments)))
    flashzoo.register(toy("own", impl="flashzoo_suite.support:dense_attention"))
    given = small(heads_kv=4)
    for causal in (False, True, False, True):
        flashzoo.attention_backward(**given, causal=causal, version="own")
    assert len(looked) == 2
    for _ in range(2):
        by_autograd(given, "own")
    assert len(looked) == 3


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 7), (5, 0)])
def test_nothing_to_see(seqlen_q, seqlen_k):
    q, k = torch.randn(1, seqlen_q, 2, 16, device=DEVICE), torch.randn(1, seqlen_k, 2, 16, device=DEVICE)
    lse = torch.full((1, 2, seqlen_q), -math.inf, device=DEVICE)
    found = flashzoo.attention_backward(q, q, k, k, q, lse)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape] and not any(x.any() for x in found)


def test_it_is_not_recorded():
    given = small()
    found = flashzoo.attention_backward(**{name: x.requires_grad_() for name, x in given.items()})
    assert not any(x.requires_grad for x in found)


def test_a_list_is_a_window():
    given = small()
    found = [
        flashzoo.attention_backward(**given, window_size=window, version="standard") for window in ([2, 0], (2, 0))
    ]
    assert all(same_bits(x, y) for x, y in zip(*found, strict=True))


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


ERRORS = {
    "no tensor": (TypeError, "dout must be a torch.Tensor, got NoneType", lambda: {"dout": None}),
    "no lse": (TypeError, "lse must be a torch.Tensor, got float", lambda: {"lse": 1.0}),
    "sparse": (TypeError, "out must be a dense tensor", lambda: {"out": x(2, 5, 4, 16).to_sparse()}),
    "neither": (ValueError, "out or delta must be given, got None for both", lambda: {"out": None}),
    "q's shape": (ValueError, "q must have 4 dimensions", lambda: {"q": x(2, 5, 16)}),
    "dout": (
        ValueError,
        r"dout must have shape \(batch, seqlen_q, heads, head_dim_v\) \(2, 5, 4, 16\), got \(2, 5, 2, 16\)",
        lambda: {"dout": x(2, 5, 2, 16)},
    ),
    "dout's dtype": (
        TypeError,
        "dout must be of dtype torch.float32, got torch.float16",
        lambda: {"dout": x(2, 5, 4, 16).half()},
    ),
    "out": (ValueError, r"out must have shape .* \(2, 5, 4, 16\), got \(2, 5, 4, 8\)", lambda: {"out": x(2, 5, 4, 8)}),
    "out beside delta": (ValueError, "out must have shape", lambda: {"out": x(1), "delta": x(2, 4, 5)}),
    "out's device": (
        ValueError,
        "out must be on q's device .*, got meta",
        lambda: {"out": x(2, 5, 4, 16, device="meta")},
    ),
    "lse": (
        ValueError,
        r"lse must have shape \(batch, heads, seqlen_q\) \(2, 4, 5\), got \(2, 5, 4\)",
        lambda: {"lse": x(2, 5, 4)},
    ),
    "lse's dtype": (
        TypeError,
        "lse must be of dtype torch.float32, got torch.float64",
        lambda: {"lse": x(2, 4, 5).double()},
    ),
    "dlse": (ValueError, r"dlse must have shape .* \(2, 4, 5\), got \(2, 4\)", lambda: {"dlse": x(2, 4)}),
    "dlse's dtype": (
        TypeError,
        "dlse must be of dtype torch.float32, got torch.bfloat16",
        lambda: {"dlse": x(2, 4, 5).bfloat16()},
    ),
    "delta": (
        ValueError,
        r"delta must have shape .* \(2, 4, 5\), got \(2, 4, 5, 1\)",
        lambda: {"delta": x(2, 4, 5, 1)},
    ),
    "delta's device": (ValueError, "delta must be on q's device", lambda: {"delta": x(2, 4, 5, device="meta")}),
    "option": (TypeError, "unexpected keyword argument 'cause'", lambda: {"cause": True}),
    "causal": (TypeError, "causal must be a bool, got 1", lambda: {"causal": 1}),
    "window": (ValueError, r"window_size must be None or a pair .* got \[1\]", lambda: {"window_size": [1]}),
    "version": (ValueError, "version must be 'auto' or one of .* got 'v9'", lambda: {"version": "v9"}),
    "precision": (
        ValueError,
        "inputs as they are, got precision='fp8'",
        lambda: {name: x(2, 5, 4, 16).half() for name in "qkv"} | {"precision": "fp8"},
    ),
    "e4m3": (
        ValueError,
        "inputs as they are, got e4m3 ones",
        lambda: {name: x(2, 5, 4, 16).to(torch.float8_e4m3fn) for name in "qkv"},
    ),
    "descale": (ValueError, "q_descale is for e4m3 inputs", lambda: {"q_descale": x(2, 2)}),
    "out_dtype": (
        TypeError,
        "out_dtype of torch.float32 inputs must be None or torch.float32, got",
        lambda: {"out_dtype": torch.float16},
    ),
    "out's dtype": (
        TypeError,
        "out must be of dtype torch.float32, got torch.float16",
        lambda: {"out": x(2, 5, 4, 16).half()},
    ),
    "mask": (
        ValueError,
        r"block_mask must be of seqlen_q and seqlen_k \(5, 7\)",
        lambda: {"block_mask": BlockMask.causal(5, device=DEVICE)},
    ),
    "meta": (
        ValueError,
        "must have data, got device meta",
        lambda: {name: x(2, 5, 4, 16, device="meta") for name in "qkv"},
    ),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_errors(case):
    error, text, changes = case
    with pytest.raises(error, match=text):
        flashzoo.attention_backward(**small() | changes())


def test_who_can_not_is_told_of_who_can():
    told = r"sdpa: has no backward pass apart from its forward pass\nversions that would: .*standard"
    with pytest.raises(UnsupportedError, match=told):
        flashzoo.attention_backward(**small(), version="sdpa")
    told = r"version 'v1' has no backward pass for .*\n  v1: does not support window_size\n.*standard"
    with pytest.raises(UnsupportedError, match=told):
        flashzoo.attention_backward(**small(), window_size=(2, 0), version="v1")


def test_traced_or_transformed_it_is_refused():
    given = small()
    with pytest.raises(NotImplementedError, match=r"attention_backward does not support q under torch\.func\.vmap"):
        torch.func.vmap(lambda q: flashzoo.attention_backward(**given | {"q": q}))(given["q"][None])
    with torch.autograd.forward_ad.dual_level():
        table = torch.autograd.forward_ad.make_dual(*torch.ones(2, 2, device=given["q"].device))
        for how in ({"sinks": table}, {"score_mod": lambda s, b, h, i, j: s * table[0]}):
            with pytest.raises(
                NotImplementedError, match=r"does not support (sinks|score_mod's tensor 0) under forward"
            ):
                flashzoo.attention_backward(**given, **how, version="standard")
    with pytest.raises(Exception, match=r"attention_backward .*can't be traced"):
        torch.compile(lambda q: flashzoo.attention_backward(**given | {"q": q}), backend="eager", fullgraph=True)(
            given["q"]
        )
