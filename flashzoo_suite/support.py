"""Small tools of the suite: the problems a version takes here, and one way to call it and get its gradients."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import Problem, ScoreMod, Spec
from flashzoo.accuracy import Judge
from flashzoo.autograd import differentiable
from flashzoo.call.check import options_of
from flashzoo.call.operands import NO_DESCALES, Descales, Operands, seed_on
from flashzoo.call.problem import FEATURES
from flashzoo.dropout import kept_at
from flashzoo.inputs import block_mask, in_pages, inputs, lengths, ranges, score_mod, sinks
from flashzoo.lengths import Ranges, visible_of_caches
from flashzoo.reference import Result, descales_of_rows, only_used, with_packed_keys
from flashzoo.scores.at import ScoredAt, flat
from flashzoo.workloads import hardware
from flashzoo_suite.gpus import take_one

ROOT = Path(__file__).resolve().parent.parent
take_one()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORKER_BYTES = 8 << 30
"""Of a GPU's memory, for each process that runs tests on it; a test that needs more asks what is free."""
SMALL = Problem(batch=1, seqlen_q=40, seqlen_k=40, heads=2, heads_kv=2, head_dim=16, **hardware(DEVICE))  # pyright: ignore[reportArgumentType]

CHOSEN = pytest.StashKey[list[Spec]]()
"""The versions under test, in pytest's config."""

SEED = -(2**40) - 3
"""The dropout_seed that stands for any."""

Tensors = tuple[Tensor, Tensor, Tensor]


def in_fresh_process(code: str) -> str:
    """What a new process prints; its error text where it fails."""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def dtypes_of(spec: Spec) -> tuple[str, ...]:
    """The dtypes that a version takes on the suite's device."""
    return spec.cpu_dtypes if DEVICE == "cpu" else spec.dtypes


def lazily_negated(x: Tensor) -> Tensor:
    """The same numbers, which lie in memory with the other sign, as those of `z.conj().imag` do."""
    return torch._neg_view(-x)  # pyright: ignore[reportPrivateImportUsage]


def interpreted(version: str) -> bool:
    """Whether Triton's interpreter runs it here, a thousand times slower than a GPU."""
    return flashzoo.versions()[version].interpreted(SMALL)


def gives_lse(spec: Spec) -> bool:
    """Whether lse and, if there are gradients at all, the gradient through it can be asked for."""
    return "lse" in spec.features and (spec.backward is None or "lse" in spec.backward)


def small(spec: Spec, **asked) -> Problem:
    """A small plain problem in the version's first dtype, with lse if it gives one,
    and these fields in place of others."""
    # v is as wide as q, and out of the dtype's own default, whatever is asked
    plain = {"dtype": (*dtypes_of(spec), "fp32")[0], "lse": gives_lse(spec), "head_dim_v": None, "out_dtype": None}
    return dataclasses.replace(SMALL, **plain | asked)


def takes(spec: Spec, problem: Problem) -> bool:
    return not spec.unsupported(problem)


FP8 = ("e4m3", "fp8")
"""`Problem.numerics` of e4m3 inputs, and of 16-bit ones under precision="fp8"."""


def asked(spec: Spec, both: bool = False, fp8: tuple[str, ...] = FP8, **fields) -> list[Problem]:
    """The small problem with these fields, each time that the version takes it;
    of `both` passes the forward pass where it has no other.

    It is asked in the version's first dtype and in those of `fp8`, or where the fields name a dtype in that alone.
    """
    ways = [{}]
    if "dtype" not in fields:
        plain = small(spec).dtype
        ways = [] if plain == "e4m3" else [{}]
        ways += [{"dtype": "e4m3"}] if "e4m3" in fp8 else []
        ways += [{"dtype": spec.quantizes[0], "precision": "fp8"}] if "fp8" in fp8 and spec.quantizes else []
    found = []
    for way in ways:
        problems = (
            [small(spec, **fields | way | more) for more in ({"grad": True}, {"grad": False})]
            if both
            else [small(spec, **fields | way)]
        )
        found += [problem for problem in problems if takes(spec, problem)][:1]
    return found


def as_arguments(problem: Problem, descales: Descales = NO_DESCALES) -> dict:
    """The keyword arguments of `flashzoo.attention` that ask for this problem."""
    arguments = options_of(problem)
    if problem.kv_in_e4m3:
        arguments |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    if problem.block_mask is not None:
        arguments["block_mask"] = mask_of(problem)
    if problem.sinks:
        arguments["sinks"] = sinks_of(problem)
    if problem.score_mod is not None:
        arguments["score_mod"] = score_mod_of(problem)
    if problem.dropout_p:
        arguments["dropout_seed"] = SEED
    return arguments | lengths(problem, device=problem.device)


def ranges_of(problem: Problem) -> Ranges:
    """The lengths that stand for the problem's."""
    return ranges(problem, device=problem.device)


def sinks_of(problem: Problem) -> Tensor | None:
    """The sinks that stand for the problem's."""
    return sinks(problem, device=problem.device)


def score_mod_of(problem: Problem) -> ScoreMod | None:
    """The function on scores that stands for the problem's; its tensors require grad where the problem does."""
    mod = score_mod(problem, device=problem.device)
    if mod is None or problem.grad:
        return mod
    return ScoreMod.of_parts(mod.text, tuple(x.detach() for x in mod.tensors))


def scored_by(problem: Problem) -> ScoredAt | None:
    """That at all places, as `Judge` takes it."""
    sizes = (problem.batch, problem.heads, problem.seqlen_q, problem.total_k)
    return ScoredAt.of(score_mod_of(problem), sizes, None if problem.sequences is None else ranges_of(problem))


def kept_by(problem: Problem) -> Tensor | None:
    """What a dropout by that seed keeps, as `Judge` takes it."""
    if not problem.dropout_p:
        return None
    ranges = vars(ranges_of(problem)) if problem.sequences is not None else {}
    return kept_at(problem, Operands(dropout_seed=seed_on(SEED, torch.device(problem.device)), **ranges))


def mask_of(problem: Problem) -> flashzoo.BlockMask | None:
    """The block mask that stands for the problem's."""
    form = problem.block_mask
    if form is None:
        return None
    sizes = {
        "batch": form.batch,
        "heads": form.heads,
        "heads_kv": form.heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
    }
    return _mask_of(dataclasses.replace(SMALL, **sizes, block_mask=form))


@lru_cache(maxsize=16)
def _mask_of(problem: Problem) -> flashzoo.BlockMask | None:
    return block_mask(problem, device=problem.device)


def seen_by(problem: Problem) -> Tensor | None:
    """What that mask, or those lengths, show, as `Judge` takes it."""
    if problem.sequences is not None:
        return ranges_of(problem).visible(problem.span, problem.seqlen_q, problem.total_k)[None, None]
    if problem.used_k:
        return visible_of_caches(
            lengths(problem, device=problem.device)["seqused_k"], problem.span, problem.seqlen_q, problem.seqlen_k
        )
    mask = mask_of(problem)
    return None if mask is None else mask.to_dense()


def as_judged(
    tensors: Tensors, problem: Problem, descales: Descales = NO_DESCALES
) -> tuple[Tensors, Problem, Descales]:
    """q, k and v, the problem and the descales as `Judge` takes them: without what nobody uses, packed sequences with
    descales where those lengths put them, and caches of packed queries packed too."""
    operands = Operands(*descales, **lengths(problem, device=problem.device))
    q, k, v = tensors
    k, v, problem, operands = with_packed_keys(k, v, problem, operands)
    tensors = only_used(q, k, v, operands)
    if problem.sequences is not None and problem.kv_in_e4m3:
        descales = descales_of_rows(*tensors, operands)
    return tensors, problem, descales


def draw(problem: Problem, seed: int = 0, **how) -> tuple[Tensors, Tensor, Tensor | None]:
    """`(q, k, v)`, dout, and dlse where the problem asks for lse; `how` goes to `workloads.inputs`."""
    q, k, v, dout = inputs(problem, seed, problem.device, **how)
    generator = torch.Generator(problem.device).manual_seed(seed + 1)
    dlse = torch.randn(problem.batch, problem.heads, problem.seqlen_q, generator=generator, device=problem.device)
    return (q, k, v), dout, dlse if problem.lse else None


def forward(
    version: str,
    tensors: Tensors,
    problem: Problem,
    descales: Descales = NO_DESCALES,
    attention: Callable = flashzoo.attention,
    **operands: Tensor,
) -> Result:
    """One forward pass, by `flashzoo.attention` or what stands for it;
    lse is None where the problem does not ask for it.

    Operands take the place of those that stand for the problem's.
    """
    arguments = as_arguments(problem, descales) | {"version": version} | operands
    if problem.page_size is not None:
        k, v, arguments["page_table"] = in_pages(problem, *tensors[1:])
        tensors = tensors[0], k, v
    if problem.packed_q:
        tensors = tensors[0][0], *tensors[1:]
    found = attention(*tensors, return_lse=True, **arguments) if problem.lse else (attention(*tensors, **arguments),)
    return Result(*(x[None] for x in found)) if problem.packed_q else Result(*found)


def both(
    version: str,
    tensors: Tensors,
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None = None,
    descales: Descales = NO_DESCALES,
    attention: Callable = flashzoo.attention,
    **operands: Tensor,
) -> Result:
    """Forward and backward; forward alone where the problem asks for no gradients.
    The tensors keep their strides and get no `.grad`."""
    if not problem.grad:
        return forward(version, tensors, problem, descales, attention, **operands)
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    if problem.sinks:
        operands["sinks"] = operands.get("sinks", sinks_of(problem)).detach().requires_grad_()
    if problem.score_mod is not None:
        operands["score_mod"] = operands.get("score_mod", score_mod_of(problem))
    result = forward(version, leaves, problem, descales, attention, **operands)  # pyright: ignore[reportArgumentType]
    outputs, gradients = ((result.out,), (dout,)) if dlse is None else ((result.out, result.lse), (dout, dlse))
    read = mod.differentiable if (mod := operands.pop("score_mod", None)) is not None else ()
    given = [x for x in operands.values() if x is not None and x.requires_grad]
    found = torch.autograd.grad(outputs, (*leaves, *given, *read), gradients)
    first = len(found) - len(read)
    return Result(*detached(result), *found[:first], dscore_mod=flat(found[first:]) if read else None)


def as_operator(
    version: str, tensors: Tensors, problem: Problem, dout: Tensor, dlse: Tensor | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `torch.ops.flashzoo.attention` and of `attention_backward` that ask for this problem."""
    importlib.import_module("flashzoo.call.traced")
    left, right = (-1 if side is None else side for side in problem.window)
    how = {**options_of(problem), "window_size": [left, right], "return_lse": problem.lse, "version": version}
    leaves = tuple(x.detach().requires_grad_(problem.grad) for x in tensors)
    operands = {"sinks": sinks_of(problem)} if problem.sinks else {}
    if problem.score_mod is not None:
        mod = score_mod_of(problem)
        how |= {"score_mod_text": mod.text, "score_mod_tensors": list(mod.tensors), "score_mod_grads": list(mod.grads)}
    arguments = {**dict(zip("qkv", leaves, strict=True)), **how, "grad": problem.grad}
    arguments |= {name: x.detach().requires_grad_(problem.grad) for name, x in operands.items()}
    if problem.dropout_p:
        how["dropout_seed"] = arguments["dropout_seed"] = seed_on(SEED, torch.device(problem.device))
    if not problem.grad:
        return arguments, {}
    out, lse = torch.ops.flashzoo.attention(**arguments)
    inputs = dict(zip("qkv", tensors, strict=True))
    return arguments, {
        "dout": dout,
        "dlse": dlse,
        **inputs,
        **operands,
        "out": out.detach(),
        "lse": lse.detach(),
        **how,
    }


def detached(result: Result) -> tuple[Tensor, Tensor | None]:
    """out and lse without their history."""
    return result.out.detach(), None if result.lse is None else result.lse.detach()


def accept(judge: Judge, result: Result, rms: float | None = None) -> None:
    """Fails with every rule of `flashzoo.accuracy` that the result, or the yardstick, breaks;
    rms is that of `Judge.checks`."""
    broken = [str(check) for check in (*judge.of_yardstick, *judge.checks(result, rms)) if not check.ok]
    assert not broken, "\n".join(broken)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaNs and signs of zero included."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
    )


def in_fixed_order(version: str, problem: Problem) -> Problem:
    """The problem with deterministic=True where the version takes that:
    its gradients then have the same bits each time."""
    spec = flashzoo.versions()[version]
    features = spec.backward if problem.grad and spec.backward is not None else spec.features
    return dataclasses.replace(problem, deterministic="deterministic" in features)


def alike(problem: Problem, found: Result, expected: Result) -> bool:
    """Whether two results have the same bits; gradients that nobody keeps the order of may differ by
    what that rounds."""
    exact = [name for name in found.items() if problem.deterministic or name in ("out", "lse")]
    for name in found.items().keys() - set(exact):
        torch.testing.assert_close(found.items()[name], expected.items()[name], rtol=1e-2, atol=1e-2)
    return all(same_bits(found.items()[name], expected.items()[name]) for name in exact)


def storage_of(x: Tensor) -> Tensor:
    """A copy of every byte of the storage behind a view."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()


CALLS: list[Problem] = []
"""What `toy` versions were called with."""


def record(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, None]:
    """An implementation that notes that it was called, and multiplies q by the scale; k and v have gradients of 0."""
    CALLS.append(problem)
    out = q * problem.scale
    return (out + 0 * (k.sum() + v.sum()) if problem.grad else out), None


def dense(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """An implementation that notes that it was called, for plain problems, with no gradients and always an LSE."""
    CALLS.append(problem)
    with torch.no_grad():
        s = torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale
        return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1)


def dense_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    operands: Operands,
) -> tuple[Tensor, Tensor, Tensor]:
    """A fallback backward, which notes that it was called, made from the out and the LSE of whichever forward pass."""
    CALLS.append(problem)
    p = torch.exp(torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale - lse[..., None])
    delta = (dout * out).sum(-1).transpose(1, 2) - (0 if dlse is None else dlse)
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout, v) - delta[..., None]) * problem.scale
    dq, dk = torch.einsum("bhij,bjhd->bihd", ds, k), torch.einsum("bhij,bihd->bjhd", ds, q)
    return dq, dk, torch.einsum("bhij,bihd->bjhd", p, dout)


dense_attention = differentiable(dense, dense_backward)


def toy(name: str = "toy", **fields) -> Spec:
    """A version that takes everything but what the fields say, and calls `record`."""
    everything = {
        "title": "a toy",
        "paper": "none",
        "impl": f"{__name__}:record",
        "dtypes": ("fp16", "bf16", "fp32"),
        "cpu_dtypes": ("fp16", "fp32"),
        "features": frozenset(FEATURES),
        "backward": frozenset(FEATURES),
        "auto": ("cuda", "cpu"),
    }
    return Spec(name=name, **everything | fields)
