"""THE suite: everything that a version declares, held to one oracle by one rule. A new Spec gets all of it with no edit.

Cases are made from the Specs and `flashzoo.workloads`. A version is spared only what `spec.unsupported` says, and what it
says is tested too. Everything goes through `flashzoo.attention(..., version=name)`. "Seen in" names a bug that some
attention kernel had and that the test would catch.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from support import (
    CHOSEN,
    DEVICE,
    WORKER_BYTES,
    Tensors,
    accept,
    as_arguments,
    as_operator,
    both,
    detached,
    draw,
    dtypes_of,
    forward,
    gives_lse,
    lazily_negated,
    same_bits,
    seen_by,
    small,
    storage_of,
    takes,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashzoo
from flashzoo import Problem, Spec, UnsupportedError
from flashzoo.accuracy import OUT_RMS, Judge
from flashzoo.call.forms import MaskForm
from flashzoo.call.operands import Descales
from flashzoo.call.problem import FEATURES, QUANTIZABLE
from flashzoo.reference import Result, visible
from flashzoo.spec import TRANSFORMS
from flashzoo.workloads import DESCALES, LAYOUTS, TORCH_DTYPES, Workload, descales, workloads

ON_GPU = DEVICE == "cuda"
asks = pytest.mark.asks


# What a version declares, it does; what it does not declare, it refuses.


@dataclass(frozen=True)
class Case:
    """One version on one workload in one dtype, e4m3 with one kind of `workloads.DESCALES`."""

    version: str
    workload: Workload
    problem: Problem
    descales: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """What its inputs, and so its Judge, are drawn by."""
        return self.workload.name, self.problem.dtype, str(self.problem.precision), str(self.descales)

    def __str__(self) -> str:
        how = [name for name, asked in (("fp8", self.problem.precision), ("deterministic", self.problem.deterministic)) if asked]
        how += [f"by_{self.descales}"] if self.descales else []
        return "-".join((self.version, self.workload.name, self.problem.dtype, *how))


def cases(specs: list[Spec], grad: bool) -> list[Case]:
    """Every case that the versions declare to take, those that share inputs next to one another."""
    found = []
    for workload in [w for tag in (("smoke", "hard", "large") if ON_GPU else ("smoke", "hard")) for w in workloads(tag)]:
        for dtype, precision, kind in NUMERICS:
            for deterministic in (False, True) if "smoke" in workload.tags and kind is None else (False,):
                for spec in specs:
                    asked = {"dtype": dtype, "precision": precision, "out_dtype": "fp16" if kind == "head" else None}
                    problem = workload.on(DEVICE, lse=gives_lse(spec), deterministic=deterministic, grad=grad, **asked)
                    if takes(spec, problem):
                        found.append(Case(spec.name, workload, problem, kind))
    return found


def each_once(specs: list[Spec], grad: bool) -> list[Case]:
    """The cases less what another test says of them already.

    A backward pass is judged with the forward pass that it follows, so alone the latter is judged on the smoke workloads only.
    `standard` is everybody's yardstick, held to the oracle by every Judge: it has cases of its own where it is alone.

    Without a GPU the smoke workloads take determinism in turns, and the hard ones dtypes and kinds of descales, but for torch's own
    kernel: an interpreted one's dtypes are NumPy's.
    """
    found = cases(specs, grad)
    if not grad:
        with_gradients = {str(case) for case in cases(specs, True)}
        found = [case for case in found if "smoke" in case.workload.tags or str(case) not in with_gradients]
    if not ON_GPU:
        turns = {workload.name: turn for turn, workload in enumerate(workloads())}
        found = [case for case in found if in_turn(case, turns[case.workload.name])]
    of_others = {case.inputs for case in found if case.version != "standard"}
    return [case for case in found if case.version != "standard" or case.inputs not in of_others]


def in_turn(case: Case, turn: int) -> bool:
    """Whether it is a case's turn in the turn-th workload: on a hard one its dtype's, or its kind of descales'; on a smoke one, where all
    dtypes are, that of determinism in its dtype, where the version is asked for both."""
    if "smoke" in case.workload.tags:
        both_ways = not case.descales and "deterministic" in flashzoo.versions()[case.version].features
        return not both_ways or (turn + [*TORCH_DTYPES].index(case.problem.dtype) + case.problem.deterministic) % 2 == 0
    if case.problem.dtype == "e4m3":
        return case.descales == DESCALES[turn % len(DESCALES)]
    dtypes = dtypes_of(flashzoo.versions()[case.version])
    return case.version == "sdpa" or case.problem.dtype == dtypes[turn % len(dtypes)]


NUMERICS = [
    *((dtype, None, kind) for dtype in TORCH_DTYPES for kind in (DESCALES if dtype == "e4m3" else (None,))),
    *((dtype, "fp8", None) for dtype in QUANTIZABLE),
]
"""dtype, precision and kind of descales, in every way that they go together."""


def refusals(spec: Spec) -> dict[str, tuple[Problem, str]]:
    """For everything that the version does not declare, a problem that asks for it and what the refusal must say."""
    plain = small(spec, lse=False)
    found = {name: (replace(plain, **FEATURES[name].example), FEATURES[name].asked) for name in FEATURES.keys() - spec.features}
    for name in spec.features - spec.backward if spec.backward is not None else ():
        found[f"backward_{name}"] = (
            replace(plain, grad=True, **FEATURES[name].example),
            f"backward pass does not support {FEATURES[name].asked}",
        )
    if spec.backward is None:
        found["backward"] = replace(plain, grad=True), "has no backward pass"
    nowhere = "does not run on CPU tensors"
    for dtype in TORCH_DTYPES.keys() - set(dtypes_of(spec)):
        found[dtype] = replace(plain, dtype=dtype, out_dtype=None), "takes dtype" if dtypes_of(spec) else nowhere
    for dtype in set(QUANTIZABLE) - set(spec.quantizes):
        refusal = "takes dtype" if spec.quantizes else "does not support precision='fp8'"
        found[f"{dtype}_fp8"] = replace(plain, dtype=dtype, precision="fp8"), refusal if dtypes_of(spec) else nowhere
    if "e4m3" in dtypes_of(spec) and spec.backward is not None:
        found["e4m3_backward"] = replace(plain, dtype="e4m3", out_dtype=None, grad=True), "e4m3 inputs have no gradients"
    undeclared = [d for d in range(1, 1025) if d not in spec.head_dims]
    if undeclared:
        found[f"head_dim_{undeclared[0]}"] = small(spec, lse=False, head_dim=undeclared[0]), "takes head_dim "
        found[f"head_dim_v_{undeclared[0]}"] = replace(plain, head_dim_v=undeclared[0]), "takes head_dim_v "
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    specs = metafunc.config.stash[CHOSEN]
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", each_once(specs, grad="gradients" in metafunc.function.__name__), ids=str)
    if "spec" in metafunc.fixturenames:
        metafunc.parametrize("spec", specs, ids=lambda spec: spec.name)
    if "refused" in metafunc.fixturenames:
        cells = [
            pytest.param(spec.name, *refusal, id=f"{spec.name}-{name}")
            for spec in specs
            for name, refusal in sorted(refusals(spec).items())
        ]
        metafunc.parametrize(("version", "refused", "text"), cells)


def drawn(case: Case) -> tuple[Tensors, Tensor, Tensor | None, Descales, Judge]:
    """Inputs, gradients, descales and the Judge of a case; the versions that are tested on them one after the other share them."""
    return _drawn(replace(case, version="", problem=replace(case.problem, deterministic=False)))


@lru_cache(maxsize=4)
def _drawn(case: Case) -> tuple[Tensors, Tensor, Tensor | None, Descales, Judge]:
    problem = case.problem
    tensors, dout, dlse = draw(problem, values=case.workload.values)
    scales = descales(problem, case.descales, device=DEVICE)
    judge = Judge(*tensors, problem, dout if problem.grad else None, dlse if problem.grad else None, scales, seen_by(problem))
    return tensors, dout, dlse, scales, judge


def declared(case: Case) -> float | None:
    """What the version promises of FP8's error on such numbers."""
    return dict(flashzoo.versions()[case.version].fp8_rms).get(case.workload.values) if case.problem.precision else None


def test_forward(case):
    tensors, _, _, scales, judge = drawn(case)
    accept(judge, forward(case.version, tensors, case.problem, descales=scales), declared(case))


def test_gradients(case):
    tensors, dout, dlse, _, judge = drawn(case)
    accept(judge, both(case.version, tensors, case.problem, dout, dlse), declared(case))


def test_everything_declared_is_exercised(spec):
    if not takes(spec, small(spec)):
        pytest.skip(f"{spec.name} takes nothing here: {'; '.join(spec.unsupported(small(spec)))}")
    exercised = cases([spec], grad=False)
    assert {case.problem.dtype for case in exercised if not case.problem.precision} == set(dtypes_of(spec))
    quantized = [case for case in exercised if case.problem.precision]
    assert {case.problem.dtype for case in quantized} == set(spec.quantizes)
    assert {kind for kind, _ in spec.fp8_rms} <= {case.workload.values for case in quantized}
    assert all(factor < OUT_RMS["fp8"] for _, factor in spec.fp8_rms), "everybody is held to that"
    assert frozenset().union(*(case.problem.features for case in exercised)) == spec.features
    if spec.backward is not None:
        assert frozenset().union(*(case.problem.features for case in cases([spec], grad=True))) == spec.backward


def test_everything_undeclared_is_refused(version, refused, text):
    tensors = tuple(x.requires_grad_(refused.grad) for x in draw(refused)[0])
    with pytest.raises(UnsupportedError, match=f"{version}: .*{text}"):
        forward(version, tensors, refused)


# Probes with one right answer, and no tolerance.

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal_more_keys": {"causal": True, "seqlen_k": 190},
    "causal_more_queries": {"causal": True, "seqlen_k": 67},
    "window": {"window": (20, 10)},
    "window_left": {"window": (0, None), "seqlen_k": 190},
    "window_right": {"window": (None, 3), "seqlen_k": 67},
    "window_causal": {"window": (33, None), "causal": True, "seqlen_k": 190},
    "window_itself": {"window": (0, 0)},
    "causal_narrow_values": {"causal": True, "head_dim_v": 8},
}


def seen_pairs(problem: Problem) -> Tensor:
    """`(seqlen_q, seqlen_k)` bool; `test_reference` holds `visible` to its definition in words."""
    seen = visible(problem, problem.device)
    return torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool, device=problem.device) if seen is None else seen


@asks({dtype: {"dtype": dtype} for dtype in ("fp16", "e4m3")}, batch=2, heads=6, heads_kv=2, seqlen_q=130, seqlen_k=190, head_dim=64)
def test_needle(version, problem):
    """Every query has one key, its score so far above the rest that softmax is exactly one-hot, so out is that value.

    Seen in levanter #449, native-sparse #27, FA 4d9c722a: wrong key/value head of a group.
    """
    (q, k, v), *_ = draw(problem)
    k.copy_(torch.where(k.float() > 0, 1.0, -1.0))
    wanted = torch.randint(problem.seqlen_k, q.shape[:3], device=q.device)
    expected = torch.empty_like(q, dtype=TORCH_DTYPES[problem.out_dtype])
    for b in range(problem.batch):
        for h in range(problem.heads):
            q[b, :, h] = 4 * k.float()[b, wanted[b, :, h], h // 3]
            expected[b, :, h] = v[b, wanted[b, :, h], h // 3]
    assert torch.equal(forward(version, (q, k, v), replace(problem, softmax_scale=1.0)).out, expected)


COUNTED = {
    f"{name}-{of}": fields | dtype
    for name, fields in MASKS.items()
    for of, dtype in {"fp16": {"dtype": "fp16"}, "e4m3": {"dtype": "e4m3"}, "fp8": {"dtype": "bf16", "precision": "fp8"}}.items()
}
"""Equal scores make every P 1, and one and 0 are themselves in every dtype, quantised or not."""


@asks(COUNTED, seqlen_q=130, seqlen_k=130, heads=1, heads_kv=1)
def test_counting(version, problem):
    """Equal scores and one-hot values: out times the number of visible keys counts those of each group, as integers.

    Seen in FA 9e5e8bc9, #282, PyTorch #108108 (alignment), FlexAttention and ROCm window off-by-ones.
    """
    (q, k, v), *_ = draw(problem)
    groups = torch.nn.functional.one_hot(torch.arange(problem.seqlen_k, device=q.device) % problem.head_dim_v, problem.head_dim_v)
    v.copy_(groups[None, :, None])
    result = forward(version, (torch.zeros_like(q), k, v), problem)
    seen = seen_pairs(problem)
    visible = seen.sum(1)
    counted = (result.out[0, :, 0].double() * visible[:, None]).round()
    assert torch.equal(counted, seen.double() @ groups.double())
    if problem.lse:
        torch.testing.assert_close(result.lse[0, 0], visible.double().log().float(), rtol=1e-6, atol=1e-6)


TILE = 128 if ON_GPU else 64
"""No tile is larger, the interpreter's are 64; but v3's have up to 192 queries, and test_v3 goes round those."""
SHIFTS = range(-TILE - 1, TILE + 2) if ON_GPU else (-65, -64, -63, -62, -2, -1, 1, 2, 31, 32, 33, 61, 62, 63, 64, 65)


@asks({"causal": {"causal": True}, "window": {"window": (TILE + 3, 1)}}, both=True, seqlen_q=TILE + 6, seqlen_k=1, heads=1, heads_kv=1)
def test_every_place_of_the_diagonal_in_a_tile(version, problem):
    """Blocks that are seen whole, in part and not at all change places as seqlen_k - seqlen_q goes round a tile."""
    for shift in SHIFTS:
        shifted = replace(problem, seqlen_k=problem.seqlen_q + shift)
        tensors, dout, dlse = draw(shifted)
        accept(Judge(*tensors, shifted, dout, dlse), both(version, tensors, shifted, dout, dlse))


@asks({"plain": {}, "causal": {"causal": True}}, dtype="fp16", seqlen_q=70, seqlen_k=70)
@pytest.mark.parametrize("factor", [2.0, -1.0, 0.5])
def test_powers_of_two_pass_through(version, problem, factor):
    (q, k, v), *_ = draw(problem)
    v = v.abs() + 1  # far from the subnormals, where halving rounds
    out = forward(version, (q, k, v), problem).out
    assert torch.equal(forward(version, (q, k, factor * v), problem).out, factor * out)
    if factor > 0:
        scaled = replace(problem, softmax_scale=problem.scale / factor)
        assert torch.equal(forward(version, (factor * q, k, v), scaled).out, out)
        assert torch.equal(forward(version, (q, factor * k, v), scaled).out, out)


@asks({"plain": {}, "gqa_causal": {"heads": 6, "heads_kv": 3, "causal": True}}, batch=3, heads=3, heads_kv=3, seqlen_q=70, seqlen_k=70)
def test_heads_and_batches_do_not_meet(version, problem):
    """Permuted heads and batches give permuted outputs, bit for bit."""
    (q, k, v), *_ = draw(problem)
    batches, kv_heads = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    group = problem.heads // problem.heads_kv
    heads = (kv_heads[:, None] * group + torch.arange(group)).flatten()
    out = forward(version, (q, k, v), problem).out[batches][:, :, heads]
    moved = (q[batches][:, :, heads], k[batches][:, :, kv_heads], v[batches][:, :, kv_heads])
    assert same_bits(forward(version, moved, problem).out, out)


@asks(batch=2, heads=2, heads_kv=2, seqlen_q=70, seqlen_k=70)
def test_bad_numbers_stay_in_their_head(version, problem):
    tensors, *_ = draw(problem)
    sound = forward(version, tensors, problem).out
    tensors[1][1, 3, 0] = torch.nan
    tensors[2][1, 5, 0] = torch.inf
    out = forward(version, tensors, problem).out
    assert out[1, :, 0].isnan().all()
    untouched = torch.tensor([[True, True], [False, True]], device=out.device)
    assert same_bits(out.transpose(1, 2)[untouched], sound.transpose(1, 2)[untouched])


# What a row sees, and numbers at the edge.

BLIND = {
    "causal": {"causal": True, "seqlen_q": 150, "seqlen_k": 20},
    "causal_one_key": {"causal": True, "seqlen_q": 70, "seqlen_k": 1},
    "window": {"window": (4, 4), "seqlen_q": 150, "seqlen_k": 60},
    "window_causal": {"window": (4, None), "causal": True, "seqlen_q": 150, "seqlen_k": 60},
}


@asks(BLIND, both=True)
def test_rows_that_see_nothing(version, problem):
    """Output and gradients exactly 0, lse exactly -inf. Seen in PyTorch #103963, FA 26d7d92f: -inf - -inf is NaN."""
    tensors, dout, dlse = draw(problem)
    result = both(version, tensors, problem, dout, dlse)
    blind = ~seen_pairs(problem).any(1)
    assert blind.sum() == problem.blind_rows > 0
    assert not result.out[:, blind].any()
    if problem.grad:
        assert not result.dq[:, blind].any()
    if problem.lse:
        assert torch.equal(result.lse == -math.inf, blind.expand_as(result.lse))
    accept(Judge(*tensors, problem, dout, dlse), result)


MASKS_OF_GRADCHECK = {
    "plain": {"seqlen_q": 6},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "blind_rows": {"causal": True, "seqlen_q": 8, "lse": False},  # lse is -inf, which has no differences
    "narrow_values": {"head_dim_v": 2},
    "block_mask": {"block_mask": MaskForm(64, 64, bits=True), "lse": False},
}


@asks(MASKS_OF_GRADCHECK, dtype="fp64", grad=True, seqlen_q=4, seqlen_k=6, heads=2, heads_kv=1, head_dim=3)
def test_gradients_are_those_of_finite_differences(version, problem):
    """By torch's own check, which also lets outputs have no gradient at all; below float64 it is of no use."""

    def attention(*tensors):
        return tuple(forward(version, tensors, problem).items().values())

    tensors, _, _ = draw(problem)
    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in tensors])


SCALED = {
    "plain": {},
    "causal": {"causal": True, "seqlen_q": 70, "seqlen_k": 70},
    "blind_rows": {"causal": True, "seqlen_k": 50},
}


@pytest.mark.covering(1)
@asks(SCALED, both=True, seqlen_q=190, seqlen_k=190, head_dim=64)
def test_any_finite_scale(version, problem):
    """One shape, several scales, one process: none is baked into a cached kernel. Seen in FA #1461: -inf * scale <= 0.

    The smallest is 0 in float32.
    """
    tensors, dout, dlse = draw(problem)
    for scale in (0.25, -0.3, 0.0, -1e-46, 3.0, 1):
        scaled = replace(problem, softmax_scale=scale)
        accept(Judge(*tensors, scaled, dout, dlse), both(version, tensors, scaled, dout, dlse))


PADDED = {
    "plain": {},
    "causal": {"causal": True},
    "narrow_values": {"head_dim_v": 12},
    "eights": {"head_dim": 24},  # all that some versions take; their rows start at multiples of 16 bytes, so TMA reads them in place
    "eights_narrow_values": {"head_dim": 40, "head_dim_v": 24, "causal": True},
    "sixteens": {"head_dim": 48, "causal": True},  # the same for e4m3
}


@asks(PADDED, both=True, seqlen_q=50, seqlen_k=90, head_dim=20)
def test_nothing_past_the_end_is_read(version, problem):
    """q, k, v and dout are cut from longer tensors that go on with NaN. Seen in FA #1745, #1974, #2374, FlashInfer #942."""
    tensors, dout, dlse = draw(problem)
    cut_tensors = tuple(cut_from_longer(x) for x in tensors)
    accept(Judge(*tensors, problem, dout, dlse), both(version, cut_tensors, problem, cut_from_longer(dout), dlse))


def cut_from_longer(x: Tensor) -> Tensor:
    """The same numbers, in a tensor that is NaN before, after, beside and below them."""
    batch, seqlen, heads, head_dim = x.shape
    longer = x.new_full((batch + 2, seqlen + 200, heads + 2, head_dim + 16), torch.nan)
    view = longer[1:-1, 100:-100, 1:-1, 8:-8]
    return view.copy_(x)


GUARD = 1 << 16
"""Bytes on either side of an allocation."""
ALLOCATE = {getattr(torch.ops.aten, f"{new}{what}") for new in ("", "new_") for what in ("empty", "empty_strided", "zeros")}
ALLOCATE |= {torch.ops.aten.empty_like, torch.ops.aten.zeros_like}


class Guarded(TorchDispatchMode):
    """What is allocated meanwhile lies between bytes of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.around: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        x = func(*args, **(kwargs or {}))
        if func.overloadpacket not in ALLOCATE or not x.numel():
            return x
        bytes_of_x = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        longer = bytes_of_x.new_full((bytes_of_x.numel() + 2 * GUARD,), 0xA5)
        longer[GUARD:-GUARD] = bytes_of_x
        self.around += longer[:GUARD], longer[-GUARD:]
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(longer.untyped_storage(), GUARD // x.itemsize, x.shape, x.stride())

    def intact(self) -> bool:
        """Whether these bytes are what they were."""
        return all(bool((x == 0xA5).all()) for x in self.around)


@asks({"plain": {}, "causal": {"causal": True}}, both=True, seqlen_q=70, seqlen_k=90, head_dim=24)
def test_nothing_past_the_end_is_written(version, problem):
    """Rows and columns that fill up a tile are in no tensor; beside what a version allocates for itself lies what is another's."""
    tensors, dout, dlse = draw(problem)
    with Guarded() as guarded:
        result = both(version, tensors, problem, dout, dlse)
    assert guarded.intact()
    accept(Judge(*tensors, problem, dout, dlse), result)


# What only FP8 has.

AT_THE_EDGE = {"seqlen_q": 300, "seqlen_k": 280, "heads": 4, "heads_kv": 2, "head_dim": 64, "causal": True}
OF_FP8 = {"e4m3": {"dtype": "e4m3"}, "fp8_fp16": {"dtype": "fp16", "precision": "fp8"}, "fp8_bf16": {"dtype": "bf16", "precision": "fp8"}}


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
    """A scale that is 0 or infinite, a P or a sum that overflows: no NaN and no infinity. Finite e4m3 numbers give no infinite
    score; the mask does, and some rows here are blind.

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


# Where the numbers lie.

LAYOUT_PROBLEM = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 50, "seqlen_k": 70, "head_dim": 24}


LAYOUT_ASKS = {
    "plain": {},
    "causal": {"causal": True},
    "wide_values": {"head_dim_v": 40},
    "sixteens": {"head_dim": 48},
    # past 64 columns, where a thread of the quantiser has several words of V
    **{f"head_dim_{d}": {"dtype": "bf16", "precision": "fp8", "head_dim": d} for d in (80, 128, 256)},
}


@pytest.mark.covering(2, "version", "layout")
@asks(LAYOUT_ASKS, both=True, **LAYOUT_PROBLEM)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(version, problem, layout):
    """Any strides, offsets and overlaps; inputs and what lies between them stay as they were.

    Seen in FA #2189, PyTorch #191937 (expand), FA #2745, xformers #813 (alignment), SageAttention #386 (views), FA 9ee0ff1d
    (O's offset from dO's strides).
    """
    tensors, dout, dlse = draw(problem, layout=layout)
    before = [storage_of(x) for x in (*tensors, dout)]
    accept(Judge(*tensors, problem, dout, dlse), both(version, tensors, problem, dout, dlse))
    assert all(torch.equal(storage_of(x), then) for x, then in zip((*tensors, dout), before, strict=True))


OWN_LAYOUTS = {name: fields for name, fields in LAYOUT_ASKS.items() if name in ("plain", "sixteens", "head_dim_80", "head_dim_256")}


@pytest.mark.covering(1)
@asks(OWN_LAYOUTS, both=True, **LAYOUT_PROBLEM)
def test_each_tensor_in_a_layout_of_its_own(version, problem):
    """And one shape in several layouts, one after the other. Seen in FA #2298: stride 0 baked into a cached kernel."""
    names = [name for name in LAYOUTS if name != "expanded"]
    tensors, dout, dlse = draw(problem)
    judge = Judge(*tensors, problem, dout, dlse)
    expanded, expanded_dout, _ = draw(problem, layout="expanded")
    accept(Judge(*expanded, problem, expanded_dout, dlse), both(version, expanded, problem, expanded_dout, dlse))
    for turn in range(len(names)):
        *moved, moved_dout = (LAYOUTS[names[(turn + i) % len(names)]](x) for i, x in enumerate((*tensors, dout)))
        accept(judge, both(version, tuple(moved), problem, moved_dout, dlse))


@asks(grad=True, causal=True)
def test_gradient_of_a_sum(version, problem):
    """`(out.sum() + lse.sum()).backward()` hands over gradients whose strides are all 0."""
    tensors, dout, dlse = draw(problem)
    ones = torch.ones((), dtype=dout.dtype, device=dout.device).expand_as(dout)
    lse_ones = None if dlse is None else torch.ones((), device=dlse.device).expand_as(dlse)
    accept(Judge(*tensors, problem, ones, lse_ones), both(version, tensors, problem, ones, lse_ones))


@asks(grad=True, causal=True, heads=4, heads_kv=2, head_dim=16)
def test_a_gradient_with_gaps_in_its_last_dimension(version, problem):
    """Inputs have none, but what autograd hands over may lie in any way."""
    tensors, dout, dlse = draw(problem)
    wide = torch.full((*dout.shape[:3], 2 * dout.shape[3]), torch.nan, dtype=dout.dtype, device=dout.device)
    wide[..., ::2] = dout
    accept(Judge(*tensors, problem, dout, dlse), both(version, tensors, problem, wide[..., ::2], dlse))


@asks({"plain": {}, "causal": {"causal": True}}, both=True, batch=3, heads=3, heads_kv=3, head_dim=16)
@pytest.mark.parametrize("axis", ["batch", "seqlen", "heads"])
def test_offsets_past_2_to_31_elements(version, problem, axis):
    """Strides that fit 32 bits, times indices that take the product past them. Seen in FA #2260, #1500, PyTorch #190857, fla #1080."""
    tensors, dout, dlse = draw(problem)
    *far, far_dout = spread((*tensors, dout), axis)
    accept(Judge(*tensors, problem, dout, dlse), both(version, tuple(far), problem, far_dout, dlse))


def spread(tensors: tuple[Tensor, ...], axis: str) -> list[Tensor]:
    """The same numbers, the last along the axis 2**31 elements after the first, all in one storage."""
    at = ("batch", "seqlen", "heads").index(axis)
    shape = tensors[0].shape
    inside = [size for i, size in enumerate(shape) if i != at]
    strides = [inside[1] * inside[2], inside[2], 1]
    strides.insert(at, -(-(2**31) // (shape[at] - 1)) // 64 * 64 + 64)
    slot = math.prod(inside)
    storage = unwritten(2**31 + 2**16 + shape[at] * 64 + len(tensors) * slot, tensors[0])
    return [storage.as_strided(shape, strides, i * slot).copy_(x) for i, x in enumerate(tensors)]


def unwritten(elements: int, like: Tensor) -> Tensor:
    """Memory for so many elements; on the CPU pages that nobody touches cost nothing."""
    if ON_GPU:
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    return torch.frombuffer(mmap.mmap(-1, elements * like.itemsize), dtype=like.dtype)


# What autograd may ask.


@asks(grad=True, heads=4, heads_kv=2, seqlen_k=70)
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_some_inputs_require_grad(version, problem, wanted):
    """Seen in FA #906, PyTorch #136101."""
    tensors, dout, dlse = draw(problem)
    inputs_by_name = dict(zip("qkv", tensors, strict=True))
    leaves = {name: inputs_by_name[name].requires_grad_() for name in wanted}
    result = forward(version, tensors, problem)
    outputs, given = ((result.out,), (dout,)) if dlse is None else ((result.out, result.lse), (dout, dlse))
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), given)
    found = Result(*detached(result), **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)})
    accept(Judge(*tensors, problem, dout, dlse), found)


@asks(grad=True, lse=True, causal=True, seqlen_k=70)
def test_gradient_through_lse_alone(version, problem):
    """Seen in the review of cudnn-frontend PR 554: the gradient of a returned LSE was dropped."""
    tensors, dout, dlse = draw(problem)
    leaves = tuple(x.clone().requires_grad_() for x in tensors)
    result = forward(version, leaves, problem)
    gradients = torch.autograd.grad(result.lse, leaves, dlse)
    judge = Judge(*tensors, problem, torch.zeros_like(dout), dlse)
    accept(judge, Result(result.out.detach(), result.lse.detach(), *gradients))


@asks(grad=True, dtype="fp32", lse=False)
def test_double_backward_raises_or_is_right(version, problem):
    """Seen in PyTorch #116350: an autograd.Function gives a wrong second derivative with no error."""
    tensors, dout, _ = draw(problem)

    def second_derivative(attention, tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        first = torch.autograd.grad(attention(*leaves), leaves, dout.to(leaves[0].dtype), create_graph=True)
        # Each leaf is in the second loss itself too, so a first derivative that autograd lost track of raises no error.
        return torch.autograd.grad([(x * leaf).sum() for x, leaf in zip(first, leaves, strict=True)], leaves)

    def dense(q, k, v):
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * problem.head_dim**-0.5, -1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    expected = second_derivative(dense, [x.double() for x in tensors])
    try:
        found = second_derivative(lambda q, k, v: flashzoo.attention(q, k, v, version=version), tensors)
    except (NotImplementedError, RuntimeError):
        return
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right.float(), rtol=1e-3, atol=1e-3)


def transformed(kind: str, attention: Callable[[Tensor], Tensor], q: Tensor, tangent: Tensor) -> Tensor:
    """What comes out of a transform of `attention` as a function of q alone."""
    if kind == "dual":
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(attention(forward_ad.make_dual(q, tangent))).tangent
            return torch.full_like(q, torch.nan) if found is None else found
    if kind == "jvp":
        return torch.func.jvp(attention, (q,), (tangent,))[1]
    if kind == "vmap":
        return torch.func.vmap(attention)(torch.stack([q, tangent]))
    if kind == "grad":
        return torch.func.grad(lambda q: (attention(q) * tangent).sum())(q)
    return torch.func.functionalize(attention)(q)


@asks({"plain": {}, "causal": {"causal": True, "seqlen_k": 70}, "gqa": {"heads": 4, "heads_kv": 2}}, fp8=("fp8",), lse=False)
@pytest.mark.parametrize("kind", ["dual", "jvp", "vmap", "grad", "functionalize"])
def test_transforms_are_right_or_refused(version, problem, kind):
    """A kernel reads no tangent: v1, v2 and v3 lost them with no error."""
    (q, k, v), tangent, _ = draw(problem)
    spec, name = flashzoo.versions()[version], "jvp" if kind == "dual" else kind
    arguments = as_arguments(problem)

    def dense(q: Tensor) -> Tensor:
        group = problem.heads // problem.heads_kv
        of_keys, of_values = (x.double().repeat_interleave(group, 2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, of_keys) * problem.head_dim**-0.5
        seen = visible(problem, q.device)
        weights = torch.softmax(scores if seen is None else scores.masked_fill(~seen, -math.inf), -1)
        return torch.einsum("bhij,bjhd->bihd", weights, of_values)

    try:
        found = transformed(kind, lambda q: flashzoo.attention(q, k, v, version=version, **arguments), q, tangent)
    except UnsupportedError as error:
        assert name not in spec.transforms or problem.precision
        assert f"version {version!r} does not support {TRANSFORMS[name].split()[0]}" in str(error) and "got q under it" in str(error)
        return
    assert name in spec.transforms, "works, and is not declared"
    expected = transformed(kind, dense, q.double(), tangent.double())
    tolerance = 1e-4 if problem.dtype in ("fp32", "fp64") else 3e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@asks(grad=True, causal=True, lse=False, fp8=("fp8",))
def test_a_dual_gradient_is_right_or_refused(version, problem):
    """The backward pass is linear in it, so its tangents are the gradients of the tangent."""
    tensors, dout, _ = draw(problem)
    tangent = dout.flip(1)
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    result = forward(version, leaves, problem)
    with forward_ad.dual_level():
        try:
            found = torch.autograd.grad(result.out, leaves, forward_ad.make_dual(dout, tangent))
        except NotImplementedError:
            return
        found = [forward_ad.unpack_dual(x).tangent for x in found]
    expected = both(version, tensors, problem, tangent)
    torch.testing.assert_close(found, [expected.dq, expected.dk, expected.dv])


@asks({"plain": {}, "mask": {"block_mask": MaskForm(causal=True)}}, both=True, fp8=("fp8",), heads=4, heads_kv=2)
def test_lazily_negated_numbers(version, problem):
    """`z.conj().imag` lies in memory with the other sign, and a kernel reads memory."""
    tensors, dout, dlse = draw(problem)
    lazy, lazy_dout = tuple(lazily_negated(x) for x in tensors), lazily_negated(dout)
    lazy_dlse = None if dlse is None else lazily_negated(dlse)
    judge = Judge(*tensors, problem, dout if problem.grad else None, dlse if problem.grad else None, mask=seen_by(problem))
    accept(judge, both(version, lazy, problem, lazy_dout, lazy_dlse))
    assert all(x.is_neg() for x in (*lazy, lazy_dout))


@asks({"fp32": {"dtype": "fp32"}, "fp8": {"dtype": "fp16", "precision": "fp8"}, "e4m3": {"dtype": "e4m3"}}, both=True, causal=True)
def test_autocast_changes_nothing(version, problem):
    """Seen in musubi-tuner #1037, diffusers #14104; torch's own attention and matmul round to 16 bits there."""
    tensors, dout, dlse = draw(problem)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        result = both(version, tensors, problem, dout, dlse)
    accept(Judge(*tensors, problem, dout, dlse), result)


@asks(grad=True, causal=True, seqlen_k=70)
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_activation_checkpointing(version, problem, reentrant):
    """The forward pass runs a second time inside the backward pass, in autograd's thread."""
    tensors, dout, dlse = draw(problem)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor, **options):
        return checkpoint(lambda *x: flashzoo.attention(*x, **options), q, k, v, use_reentrant=reentrant)

    # The reentrant kind records nothing of its own, so autograd.grad can't ask it: backward() does.
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    result = forward(version, leaves, problem, attention=checkpointed)
    outputs, given = ((result.out,), (dout,)) if dlse is None else ((result.out, result.lse), (dout, dlse))
    torch.autograd.backward(outputs, given)
    accept(Judge(*tensors, problem, dout, dlse), Result(*detached(result), *(x.grad for x in leaves)))


@asks()
def test_inference_mode(version, problem):
    with torch.inference_mode():
        tensors, *_ = draw(problem)
        result = forward(version, tensors, problem)
    accept(Judge(*tensors, problem), result)


# What traces a call: see test_ops for what no version decides.

BACKENDS = ("aot_eager", "inductor")
TRACED = {"plain": {}, "causal": {"causal": True, "heads": 4, "heads_kv": 2, "seqlen_k": 70}, "wide_values": {"head_dim_v": 24}}


@pytest.mark.covering(2, "version", "backend")
@asks(TRACED, both=True)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(version, problem, backend):
    """One graph, forward and backward, and the numbers of any other call."""
    torch.compiler.reset()
    tensors, dout, dlse = draw(problem)
    scales = descales(problem, "block" if problem.dtype == "e4m3" else None, device=DEVICE)
    judge = Judge(*tensors, problem, dout if problem.grad else None, dlse if problem.grad else None, scales)
    compiled = torch.compile(flashzoo.attention, backend=backend, fullgraph=True)
    for _ in range(2):
        accept(judge, both(version, tensors, problem, dout, dlse, scales, compiled))


@pytest.mark.covering(2, "version", "layout")
@asks(TRACED | {"small": {"seqlen_q": 1, "seqlen_k": 3}}, both=True)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed", "expanded"])
def test_operators_are_what_their_fakes_say(version, problem, layout):
    """Shapes, dtypes and strides; and by `opcheck` that they change no input, and that a traced backward pass is the eager one."""
    torch.compiler.reset()
    tensors, dout, dlse = draw(problem, layout=layout)
    arguments, backward_arguments = as_operator(version, tensors, problem, dout, dlse)
    check = torch.library.opcheck
    # The rest of opcheck multiplies, which e4m3 tensors have no kernels for, and takes long.
    whole = layout == "bshd" and problem.dtype != "e4m3"
    tests = {"rtol": 1e-2, "atol": 1e-3} if whole else {"test_utils": "test_faketensor"}
    check(torch.ops.flashzoo.attention.default, (), arguments, **tests)
    if problem.grad:
        check(torch.ops.flashzoo.attention_backward.default, (), backward_arguments, **tests)


# The same call again.

REPEATS = 50 if ON_GPU else 3
BUSY = (
    {"batch": 8, "heads": 8, "heads_kv": 2, "seqlen_q": 513, "seqlen_k": 640, "head_dim": 64} if ON_GPU else {"heads_kv": 1, "seqlen_k": 70}
)


@asks({"plain": {}, "causal": {"causal": True}, "mqa": {"heads_kv": 1}}, **BUSY | {"deterministic": True, "both": True})
def test_deterministic_means_the_same_bits(version, problem):
    """Seen in FA #2158, c5f6ff49 (GQA gradients), #2244, ab66326a (deterministic=True that was not)."""
    tensors, dout, dlse = draw(problem)
    first = both(version, tensors, problem, dout, dlse).items()
    for _ in range(REPEATS):
        again = both(version, tensors, problem, dout, dlse).items()
        assert [name for name in first if not same_bits(first[name], again[name])] == []


@asks({"plain": {}, "causal": {"causal": True}}, both=True, heads_kv=1, seqlen_k=70)
def test_threads(version, problem):
    """Several threads at once, each with inputs of its own. Seen in Triton #8437, FlashInfer #4476 (shared workspace)."""
    drawn_by = [draw(problem, seed) for seed in range(4)]
    together = threading.Barrier(4)

    def work(seed: int) -> Result:
        tensors, dout, dlse = drawn_by[seed]
        together.wait()
        return both(version, tensors, problem, dout, dlse)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    for (tensors, dout, dlse), result in zip(drawn_by, results, strict=True):
        accept(Judge(*tensors, problem, dout, dlse), result)


def test_cpu_tensors_where_there_is_a_gpu_too(spec):
    problem = replace(small(spec), device="cpu", arch=None, dtype=(*spec.cpu_dtypes, "fp32")[0])
    if not takes(spec, problem):
        pytest.skip(f"{spec.name}: {'; '.join(spec.unsupported(problem))}")
    tensors, *_ = draw(problem)
    accept(Judge(*tensors, problem), forward(spec.name, tensors, problem))


# What only a GPU has.


@pytest.mark.gpu
@asks({"plain": {}, "causal": {"causal": True}}, both=True, **BUSY)
def test_cuda_graph(version, problem):
    """Captured once, replayed on other numbers. Seen in Triton #10596 (autotuning in capture), FA #2620 (a sync)."""
    tensors, dout, dlse = draw(problem, seed=0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(version, tensors, problem, dout, dlse)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = both(version, tensors, problem, dout, dlse)
    others, other_dout, other_dlse = draw(problem, seed=1)
    for held, other in zip((*tensors, dout), (*others, other_dout), strict=True):
        held.copy_(other)
    if dlse is not None and other_dlse is not None:
        dlse.copy_(other_dlse)
    graph.replay()
    accept(Judge(*others, problem, other_dout, other_dlse), result)


@pytest.mark.gpu
@asks(both=True, causal=True, **BUSY)
def test_side_stream(version, problem):
    """The inputs arrive late, on a stream of their own. Seen in FA #1957, xformers test_cuda_streams."""
    tensors, dout, dlse = draw(problem)
    late = tuple(torch.full_like(x, torch.nan) for x in tensors)
    both(version, tensors, problem, dout, dlse)  # compiled before the clock below starts
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for x, value in zip(late, tensors, strict=True):
            x.copy_(value)
        result = both(version, late, problem, dout, dlse)
    stream.synchronize()
    accept(Judge(*tensors, problem, dout, dlse), result)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@asks(both=True, causal=True)
def test_tensors_on_another_device_than_the_current_one(version, problem):
    """Seen in FlashInfer #452, xformers #681, PyTorch #141010."""
    tensors, dout, dlse = draw(problem)
    there = torch.device("cuda", 1)
    moved = tuple(x.to(there) for x in tensors)
    with torch.cuda.device(0):
        result = both(version, moved, problem, dout.to(there), None if dlse is None else dlse.to(there))
        assert torch.cuda.current_device() == 0
    assert result.out.device == there
    accept(Judge(*tensors, problem, dout, dlse), Result(**{name: x.to("cuda:0") for name, x in result.items().items()}))


@pytest.mark.gpu
@asks(both=True, causal=True, batch=(1 << 17) + 2, seqlen_q=16, seqlen_k=16, heads=16, heads_kv=16, head_dim=64)
def test_tensors_of_more_than_2_to_31_elements(version, problem):
    """The last batch lies past 32 bits, and so does the grid past 65535. Seen in PyTorch #142228, FA #1500, FlashInfer #3125."""
    free, _ = torch.cuda.mem_get_info()
    others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) - 1
    needed = 100 if problem.grad else 60
    if free - others * WORKER_BYTES < needed << 30:
        beside = f" beside {others} other processes' {WORKER_BYTES >> 30} (-n 1 leaves none)" if others else ""
        pytest.skip(f"needs {needed} GiB of GPU memory{beside}, {free >> 30} GiB are free")
    tensors, dout, dlse = draw(problem)
    result = both(version, tensors, problem, dout, dlse)
    last = slice(-2, None)
    tail = replace(problem, batch=2)
    judge = Judge(*(x[last] for x in tensors), tail, dout[last], None if dlse is None else dlse[last])
    accept(
        judge, Result(**{name: x[last] for name, x in result.items().items() if x.numel()} | ({} if problem.lse else {"lse": result.lse}))
    )


@pytest.mark.gpu
@asks(both=True, causal=True, heads=4, heads_kv=4, head_dim=64)
def test_memory_grows_as_declared(version, problem):
    """Peak memory of a forward and backward pass beyond its inputs, at twice the length."""
    short, long = (peak_bytes(version, replace(problem, seqlen_q=n, seqlen_k=n)) for n in (4096, 8192))
    least, most = (0, 2.2) if flashzoo.versions()[version].memory == "linear" else (3, math.inf)
    assert least < long / short < most


def peak_bytes(version: str, problem: Problem) -> int:
    tensors, dout, dlse = draw(problem)
    both(version, tensors, problem, dout, dlse)
    gc.collect()  # of what other tests left, which would make room in between
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    both(version, tensors, problem, dout, dlse)
    return torch.cuda.max_memory_allocated() - held
