"""What functions on scores promise beyond being right: they are told the places of a sequence, -inf masks, and a tensor
that they read may be all that requires grad."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import flashzoo
from flashzoo import ScoreMod, score_mods
from flashzoo.call.forms import ScoreForm
from flashzoo.reference import Result
from flashzoo_suite.support import both, draw, forward, in_fixed_order, same_bits, takes

asks = pytest.mark.asks
KINDS = {"plain": {}, "cross_gqa": {"seqlen_k": 70, "heads": 4}}


def close(found: Result, expected: Result, dtype: str) -> None:
    """Both passes, but for roundings."""
    apart = {"rtol": 2e-2, "atol": 2e-2} if dtype in ("fp16", "bf16") else {"rtol": 1e-4, "atol": 1e-4}
    for name, x in expected.items().items():
        torch.testing.assert_close(found.items()[name], x, **apart)


@asks(KINDS, both=True, score_mod=ScoreForm())
@pytest.mark.parametrize("least", [-math.inf, torch.finfo(torch.float32).min])
def test_minus_infinity_is_as_masked(version, problem, least):
    """And what is -inf in log2 units. A causal mask by the function, of which some rows see nothing, is causal=True."""
    tensors, dout, dlse = draw(problem)
    shift = problem.seqlen_k - problem.seqlen_q - 9  # by which the first rows see nothing
    causal = lambda s, b, h, i, j: torch.where(i + shift >= j, s, least)  # noqa: E731
    found = both(version, tensors, problem, dout, dlse, score_mod=ScoreMod(causal))
    q, k, v = tensors
    beyond = replace(problem, seqlen_k=problem.seqlen_k - 9, score_mod=None, causal=True)
    masked = both("standard", (q, k[:, :-9], v[:, :-9]), beyond, dout, dlse)
    rest = {name: torch.nn.functional.pad(masked.items()[name], (0, 0, 0, 0, 0, 9)) for name in ("dk", "dv")}
    close(found, replace(masked, **rest) if problem.grad else masked, problem.dtype)
    blind = max(0, -shift)
    assert not found.out[:, :blind].any() and (found.lse is None or bool((found.lse[..., :blind] == -math.inf).all()))


@asks(both=True, seqlen_q=150, seqlen_k=200, score_mod=ScoreForm())
def test_what_a_function_masks_has_no_gradient(version, problem):
    """Though 0 times its slope is no number, in tiles that are seen whole too."""
    tensors, dout, dlse = draw(problem)
    weights = (torch.arange(200, device=problem.device) % 3 > 0).float()
    mods = (
        ScoreMod(lambda s, b, h, i, j: torch.where(weights[j] > 0, s / weights[j], -math.inf)),
        ScoreMod(lambda s, b, h, i, j: torch.where(weights[j] > 0, s, -math.inf)),
    )
    found, expected = (both(version, tensors, problem, dout, dlse, score_mod=mod) for mod in mods)
    close(found, expected, problem.dtype)


@asks(both=True, sequences=3, score_mod=ScoreForm())
def test_places_are_those_of_a_packed_sequence(version, problem):
    """As in a batch, of which the sequences are."""
    table = torch.linspace(-1, 1, 60, device=problem.device).view(3, 20)
    mod = ScoreMod(lambda s, b, h, i, j: s + table[b, (j - i) % 20 - 20] * (h + 1))
    tensors, dout, dlse = draw(problem)
    cu = torch.tensor([0, 7, 27, problem.seqlen_q], dtype=torch.int32, device=problem.device)
    found = both(version, tensors, problem, dout, dlse, score_mod=mod, cu_seqlens_q=cu, cu_seqlens_k=None)
    for number, (first, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        at = slice(first, end)
        own = ScoreMod(lambda s, b, h, i, j, n=number: s + table[n, (j - i) % 20] * (h + 1))
        alone = replace(problem, seqlen_q=end - first, seqlen_k=end - first, sequences=None)
        part = [x[:, at] for x in (*tensors, dout)]
        rows = None if dlse is None else dlse[..., at]
        expected = both("standard", tuple(part[:3]), alone, part[3], rows, score_mod=own)
        mine = {name: x[..., at] if name == "lse" else x[:, at] for name, x in found.items().items()}
        close(Result(**mine), expected, problem.dtype)


@asks(both=True, score_mod=ScoreForm())
def test_remainders_are_torchs(version, problem):
    """Of quotients that float32 rounds to a whole number, and of numbers below 0."""
    tensors, dout, dlse = draw(problem)
    mod = ScoreMod(lambda s, b, h, i, j: s + (j * 1.0) % 0.1 * 20 - (i - j) * 0.3 % -0.1 * 20 + (j * 1.0) // 0.1 * 0.01)
    found, expected = (both(name, tensors, problem, dout, dlse, score_mod=mod) for name in (version, "standard"))
    close(found, expected, problem.dtype)


@asks(grad=True, score_mod=ScoreForm(grads=(0,)))
def test_only_what_is_read_requires_grad(version, problem):
    tensors, dout, dlse = draw(problem)
    slopes = torch.linspace(0.1, 0.3, problem.heads, device=problem.device).requires_grad_()
    mod = ScoreMod(lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
    asked = replace(problem, score_mod=mod.form, deterministic=True)
    asked = asked if takes(flashzoo.versions()[version], asked) else replace(asked, deterministic=False)
    result = forward(version, tensors, asked, score_mod=mod)
    outputs, given = ((result.out,), (dout,)) if dlse is None else ((result.out, result.lse), (dout, dlse))
    (found,) = torch.autograd.grad(outputs, slopes, given)
    every = both(version, tensors, asked, dout, dlse, score_mod=mod)
    torch.testing.assert_close(found.double(), every.dscore_mod)
    if asked.deterministic:
        assert same_bits(every.dscore_mod, both(version, tensors, asked, dout, dlse, score_mod=mod).dscore_mod)


@asks(
    {
        "plain": {"batch": 2},
        "causal_cross_gqa": {"seqlen_k": 70, "heads": 4, "causal": True, "batch": 2},
        "window": {"seqlen_q": 128, "seqlen_k": 128, "window": (80, None)},  # that cuts a block at its left edge alone
    },
    grad=True,
    score_mod=ScoreForm(grads=(0,)),
)
def test_gradients_of_a_shared_bias(version, problem):
    """Of all of the batch, of all heads, of both and of neither; in a fixed order where the version says so. Not in
    bf16, where what `standard` sums is itself farther from float64 than `close` allows."""
    if "fp16" in flashzoo.versions()[version].dtypes:
        problem = replace(problem, dtype="fp16")
    tensors, dout, dlse = draw(problem)
    b, h, q, k = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    for shape in ((1, h, q, k), (b, 1, q, k), (q, k), (b, h, q, k)):
        bias = torch.randn(shape, device=problem.device).requires_grad_()
        mod = score_mods.bias(bias)
        asked = replace(problem, score_mod=mod.form, deterministic=True)
        asked = asked if takes(flashzoo.versions()[version], asked) else replace(asked, deterministic=False)
        found, expected = (both(name, tensors, asked, dout, dlse, score_mod=mod) for name in (version, "standard"))
        close(found, expected, problem.dtype)
        if asked.deterministic and len(shape) == 2:
            assert same_bits(found.dscore_mod, both(version, tensors, asked, dout, dlse, score_mod=mod).dscore_mod)


@asks(both=True, score_mod=ScoreForm())
def test_a_function_that_changes_nothing(version, problem):
    problem = in_fixed_order(version, problem)
    tensors, dout, dlse = draw(problem)
    found = both(version, tensors, problem, dout, dlse, score_mod=ScoreMod(lambda s, b, h, i, j: s))
    close(found, both(version, tensors, replace(problem, score_mod=None), dout, dlse), problem.dtype)


@asks(both=True, score_mod=ScoreForm())
def test_what_is_a_number_has_no_gradient(version, problem):
    """Of a score whose place it takes; of -inf in its place none is asked."""
    problem = in_fixed_order(version, problem)
    tensors, dout, dlse = draw(problem)
    mod = ScoreMod(lambda s, b, h, i, j: s.masked_fill(i < j, -1.0))
    found, expected = (both(name, tensors, problem, dout, dlse, score_mod=mod) for name in (version, "standard"))
    close(found, expected, problem.dtype)


@asks(both=True, seqlen_k=70, score_mod=ScoreForm())
def test_places_that_are_not_there(version, problem):
    """What a tile has of them is of no number here: not past the last query, nor past the last key."""
    tensors, dout, dlse = draw(problem)
    with_gradient = replace(problem, score_mod=ScoreForm(reads=(("f32", (problem.heads,)),), grads=(0,)))
    sums = problem.grad and takes(flashzoo.versions()[version], with_gradient)
    slopes = torch.linspace(0.1, 0.3, problem.heads, device=problem.device).requires_grad_(sums)
    ends = (problem.seqlen_q, problem.seqlen_k)
    mod = ScoreMod(lambda s, b, h, i, j: s + slopes[h] * torch.rsqrt((ends[0] - i) * (ends[1] - j) * 1.0))
    found, expected = (both(name, tensors, problem, dout, dlse, score_mod=mod) for name in (version, "standard"))
    close(found, expected, problem.dtype)
