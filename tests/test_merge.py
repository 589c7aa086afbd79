"""`flashzoo.merge`: partial results against one call, through out and LSE and back; rows that see nothing; errors."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import BlockMask
from flashzoo.accuracy import Judge
from flashzoo.call.forms import MaskForm
from flashzoo_suite.support import DEVICE, accept, both, draw, same_bits, seen_by

asks = pytest.mark.asks
Parts = tuple[list[Tensor], list[Tensor]]


def parts(n: int = 3, dtype: torch.dtype = torch.float32, lse_dtype: torch.dtype = torch.float32) -> Parts:
    """Outs `(2, 5, 3, 4)` and LSEs of n parts."""
    outs = [torch.randn(2, 5, 3, 4, device=DEVICE).to(dtype) for _ in range(n)]
    return outs, [3 * torch.randn(2, 3, 5, device=DEVICE, dtype=lse_dtype) for _ in range(n)]


def in_two(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, block_mask: BlockMask | None = None, **options
) -> tuple[Tensor, Tensor]:
    """`flashzoo.attention` to the keys before the aligned diagonal of the first query,
    and to those after it, merged."""
    found, cut = [], k.shape[1] - q.shape[1] + 1
    dense = None if block_mask is None else block_mask.to_dense()
    for keys, behind in ((slice(0, cut), False), (slice(cut, None), True)):
        mask = None if dense is None else BlockMask.from_dense(dense[..., keys])
        # The keys behind it are aligned as before, and the first query sees none of them where causal.
        found.append(
            flashzoo.attention(q, k[:, keys], v[:, keys], causal=causal and behind, block_mask=mask, **options)
        )
    return flashzoo.merge(*zip(*found, strict=True))


@asks(
    {"plain": {}, "causal": {"causal": True}, "mask": {"block_mask": MaskForm(bits=True)}},
    fp8=(),
    dtype="fp32",
    both=True,
    lse=True,
    seqlen_q=40,
    seqlen_k=90,
    heads=4,
    heads_kv=2,
)
def test_parts_make_the_whole(version, problem):
    tensors, dout, dlse = draw(problem)
    result = both(version, tensors, problem, dout, dlse, attention=in_two)
    accept(Judge(*tensors, problem, dout if problem.grad else None, dlse, mask=seen_by(problem)), result)


def test_gradients_are_those_of_finite_differences():
    outs, lses = parts(3, torch.float64, torch.float64)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    torch.autograd.gradcheck(lambda *x: flashzoo.merge(x[:3], x[3:]), leaves)


def row(x: Tensor, at: tuple[int, int, int]) -> Tensor:
    """Of an out or its gradient, the row of this batch, head and query."""
    return x[at[0], at[2], at[1]]


def test_rows_that_see_nothing():
    outs, lses = parts(2)
    nowhere, elsewhere = (0, 1, 2), (1, 2, 3)  # batch, head, query
    for lse in lses:
        lse[nowhere] = -math.inf
    lses[0][elsewhere] = -math.inf
    for x in (*outs, *lses):
        x.requires_grad_()
    out, lse = flashzoo.merge(outs, lses)
    assert not row(out, nowhere).any() and lse[nowhere] == -math.inf
    assert torch.equal(row(out, elsewhere), row(outs[1], elsewhere)) and lse[elsewhere] == lses[1][elsewhere]
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), (*outs, *lses), (dout, dlse))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(not row(gradient, nowhere).any() for gradient in gradients[:2])
    assert all(gradient[nowhere] == 0 for gradient in gradients[2:])
    assert not row(gradients[0], elsewhere).any() and gradients[2][elsewhere] == 0
    assert torch.equal(row(gradients[1], elsewhere), row(dout, elsewhere))
    torch.testing.assert_close(gradients[3][elsewhere], dlse[elsewhere])


def test_in_any_order_and_in_steps():
    outs, lses = parts(3, torch.float64, torch.float64)
    out, lse = flashzoo.merge(outs, lses)
    for order in permutations(range(3)):
        torch.testing.assert_close(flashzoo.merge([outs[i] for i in order], [lses[i] for i in order]), (out, lse))
    first = flashzoo.merge(outs[:2], lses[:2])
    torch.testing.assert_close(flashzoo.merge([first[0], outs[2]], [first[1], lses[2]]), (out, lse))


def test_one_part_is_itself():
    outs, lses = parts(1, torch.bfloat16)
    out, lse = flashzoo.merge(outs, lses)
    assert same_bits(out, outs[0]) and same_bits(lse, lses[0])


@pytest.mark.parametrize("shift", [1e5, -1e5])
def test_no_lse_is_too_large(shift):
    outs, lses = parts(2)
    near = [(lse * 64).round() / 64 for lse in lses]  # so that the shift rounds nothing
    out, lse = flashzoo.merge(outs, near)
    shifted = flashzoo.merge(outs, [x + shift for x in near])
    assert torch.equal(shifted[0], out)
    torch.testing.assert_close(shifted[1], lse + shift, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("of_parts", "lse_dtype", "asked", "expected"),
    [
        ((torch.float16, torch.float16), torch.float32, None, (torch.float16, torch.float32)),
        ((torch.bfloat16, torch.float32), torch.float32, None, (torch.float32, torch.float32)),
        ((torch.bfloat16, torch.bfloat16), torch.float32, torch.float32, (torch.float32, torch.float32)),
        ((torch.float64, torch.float64), torch.float32, None, (torch.float64, torch.float64)),
        ((torch.float32, torch.float32), torch.float64, torch.bfloat16, (torch.bfloat16, torch.float64)),
    ],
    ids=str,
)
def test_dtypes(of_parts, lse_dtype, asked, expected):
    outs, lses = parts(2, lse_dtype=lse_dtype)
    outs = [out.to(dtype) for out, dtype in zip(outs, of_parts, strict=True)]
    out, lse = flashzoo.merge(outs, lses, out_dtype=asked)
    assert (out.dtype, lse.dtype) == expected
    exact, _ = flashzoo.merge([x.double() for x in outs], [x.double() for x in lses])
    torch.testing.assert_close(out, exact.to(out.dtype))  # summed in float32 or more, and rounded once


def test_traced():
    outs, lses = parts()
    traced = torch.compile(flashzoo.merge, backend="aot_eager", fullgraph=True)
    for found, expected in zip(traced(outs, lses), flashzoo.merge(outs, lses), strict=True):
        assert same_bits(found, expected)


def changed(at: int, change: Callable[[Tensor], object], of_lse: bool = False) -> Callable[[Parts], tuple]:
    """The parts with one of them changed."""

    def made(given: Parts) -> tuple:
        given[of_lse][at] = change(given[of_lse][at])
        return given

    return made


ERRORS: dict[str, tuple[Callable[[Parts], tuple], dict, type[Exception], str]] = {
    "a tensor": (
        lambda x: (torch.stack(x[0]), x[1]),
        {},
        TypeError,
        "outs must be a list or tuple of tensors, got Tensor",
    ),
    "nothing": (
        lambda x: ([], []),
        {},
        ValueError,
        "outs and lses must be of the same parts, at least one, got 0 and 0",
    ),
    "fewer": (lambda x: (x[0], x[1][:2]), {}, ValueError, "of the same parts, at least one, got 3 and 2"),
    "no tensor": (changed(1, lambda x: None), {}, TypeError, r"outs\[1\] must be a torch.Tensor, got NoneType"),
    "no lse": (changed(2, lambda x: None, True), {}, TypeError, r"lses\[2\] must be a torch.Tensor, got NoneType"),
    "sparse": (changed(1, lambda x: x.to_sparse()), {}, TypeError, r"outs\[1\] must be a dense tensor"),
    "three dims": (
        changed(0, lambda x: x[0]),
        {},
        ValueError,
        r"outs\[0\] must have 4 dimensions .* got shape \(5, 3, 4\)",
    ),
    "shape": (
        changed(1, lambda x: x[:1]),
        {},
        ValueError,
        r"outs\[1\] must have outs\[0\]'s shape \(2, 5, 3, 4\), got \(1, 5, 3, 4\)",
    ),
    "lse's shape": (
        changed(0, lambda x: x.mT, True),
        {},
        ValueError,
        r"lses\[0\] must have shape \(batch, heads, seqlen_q\) \(2, 3, 5\), got \(2, 5, 3\)",
    ),
    "dtype": (
        changed(0, lambda x: x.to(torch.float8_e4m3fn)),
        {},
        TypeError,
        r"outs\[0\] must be of dtype .*, got torch.float8_e4m3fn",
    ),
    "lse's dtype": (
        changed(1, lambda x: x.half(), True),
        {},
        TypeError,
        r"lses\[1\] must be of dtype torch.float32, torch.float64, got torch.float16",
    ),
    "device": (
        changed(2, lambda x: x.to("meta")),
        {},
        ValueError,
        r"outs\[2\] must be on outs\[0\]'s device .*, got meta",
    ),
    "out_dtype": (
        lambda x: x,
        {"out_dtype": torch.int32},
        TypeError,
        "out_dtype must be None or one of .*, got torch.int32",
    ),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_errors(case):
    change, options, error, text = case
    with pytest.raises(error, match=text):
        flashzoo.merge(*change(parts()), **options)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_two_parts_in_one_kernel(dtype, out_dtype, monkeypatch):
    """What it gives, of rows that neither part or one alone sees too, and of parts that lie anywhere, is what torch's
    operations give; on a CPU in Triton's interpreter."""
    outs, lses = parts(2, dtype)
    for lse, row in ((lses[0], 1), (lses[1], 2), (lses[0], 3), (lses[1], 3)):
        lse[1, :, row] = -math.inf
    outs[0][1, [1, 3]], outs[1][1, [2, 3]] = 0, 0
    lying = [torch.cat((x, x), 2)[:, :, :3] for x in outs], [x.mT.contiguous().mT for x in lses]
    module = importlib.import_module("flashzoo.merge")
    monkeypatch.setattr(module, "_in_one_kernel", lambda *_: False)
    expected = flashzoo.merge(outs, lses, out_dtype=out_dtype)
    monkeypatch.setattr(module, "_in_one_kernel", lambda *_: True)
    for given in ((outs, lses), lying):
        out, lse = flashzoo.merge(*given, out_dtype=out_dtype)
        assert out.dtype == out_dtype and lse.dtype == torch.float32
        torch.testing.assert_close(out, expected[0], rtol=1e-3 if out_dtype == torch.float16 else 1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)
    assert not out[1, 3].any() and (lse[1, :, 3] == -math.inf).all()


def test_what_the_kernel_is_not_for(monkeypatch):
    """What is recorded, of three parts, float64 or a CPU's."""
    module = importlib.import_module("flashzoo.merge")
    asked = module._in_one_kernel
    outs, lses = parts(2)
    assert asked(outs, lses, torch.float32) == (DEVICE == "cuda")
    wide = [x.double() for x in outs]
    recorded = [x.clone().requires_grad_() for x in outs]
    for given in ((wide, lses, torch.float64), (recorded, lses, torch.float32), (*parts(3), torch.float32)):
        assert not asked(*given)
