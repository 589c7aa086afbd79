"""THE suite: everything that a version declares, held to one oracle by one rule.
A new Spec gets all of it with no edit.

Cases are made from the Specs and `flashzoo.workloads`. A version is spared only what `spec.unsupported` says, and what
it says is tested too. Everything goes through `flashzoo.attention(..., version=name)`. "Seen in", here and in the files
beside this one, names a bug that some attention kernel had and that the test would catch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
from torch import Tensor

import flashzoo
from flashzoo import Problem, Spec, UnsupportedError
from flashzoo.accuracy import OUT_RMS, Judge
from flashzoo.call.operands import Descales
from flashzoo.call.problem import FEATURES, QUANTIZABLE
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.inputs import descales, kinds_of_descales
from flashzoo.workloads import Workload, workloads
from flashzoo_suite.support import (
    CHOSEN,
    DEVICE,
    Tensors,
    accept,
    as_judged,
    both,
    draw,
    dtypes_of,
    forward,
    gives_lse,
    kept_by,
    scored_by,
    seen_by,
    sinks_of,
    small,
    takes,
)

ON_GPU = DEVICE == "cuda"
asks = pytest.mark.asks


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
        how = [
            name
            for name, asked in (("fp8", self.problem.precision), ("deterministic", self.problem.deterministic))
            if asked
        ]
        how += [f"by_{self.descales}"] if self.descales else []
        return "-".join((self.version, self.workload.name, self.problem.dtype, *how))


def cases(specs: list[Spec], grad: bool) -> list[Case]:
    """Every case that the versions declare to take, those that share inputs next to one another."""
    found = []
    for workload in [
        w for tag in (("smoke", "hard", "large") if ON_GPU else ("smoke", "hard")) for w in workloads(tag)
    ]:
        for dtype, precision, kind in ways_of(workload):
            for deterministic in (False, True) if "smoke" in workload.tags and kind is None else (False,):
                for spec in specs:
                    asked = {"dtype": dtype, "precision": precision} | ({"out_dtype": "fp16"} if kind == "head" else {})
                    problem = workload.on(DEVICE, lse=gives_lse(spec), deterministic=deterministic, grad=grad, **asked)
                    if takes(spec, problem):
                        found.append(Case(spec.name, workload, problem, kind))
    return found


def each_once(specs: list[Spec], grad: bool) -> list[Case]:
    """The cases less what another test says of them already.

    A backward pass is judged with the forward pass that it follows, so alone the latter is judged on the smoke
    workloads only. `standard` is everybody's yardstick, held to the oracle by every Judge: it has cases of its own
    where it is alone.

    The smoke workloads take determinism in turns, the others dtypes of 16 bits; without a GPU these take all dtypes and
    kinds of descales so, but for torch's own kernel: an interpreted one's dtypes are NumPy's.
    """
    found = cases(specs, grad)
    if not grad:
        with_gradients = {str(case) for case in cases(specs, True)}
        found = [case for case in found if "smoke" in case.workload.tags or str(case) not in with_gradients]
    turns = {workload.name: turn for turn, workload in enumerate(workloads())}
    found = [case for case in found if in_turn(case, turns[case.workload.name])]
    of_others = {case.inputs for case in found if case.version != "standard"}
    return [case for case in found if case.version != "standard" or case.inputs not in of_others]


def in_turn(case: Case, turn: int) -> bool:
    """Whether it is a case's turn in the turn-th workload: on a smoke one, where all dtypes are, that of determinism in
    its dtype, where the version is asked for both; on another its dtype's, or its kind of descales'."""
    if "smoke" in case.workload.tags:
        asked_for_both = replace(case.problem, deterministic=True)
        both_ways = not case.descales and takes(flashzoo.versions()[case.version], asked_for_both)
        return not both_ways or (turn + [*TORCH_DTYPES].index(case.problem.dtype) + case.problem.deterministic) % 2 == 0
    if ON_GPU:
        return case.problem.dtype not in QUANTIZABLE or turn % 2 == QUANTIZABLE.index(case.problem.dtype)
    if case.problem.kv_in_e4m3:
        kinds = kinds_of_descales(case.problem)
        return case.descales == kinds[turn % len(kinds)]
    dtypes = dtypes_of(flashzoo.versions()[case.version])
    return case.version == "sdpa" or case.problem.dtype == dtypes[turn % len(dtypes)]


def ways_of(workload: Workload) -> list[tuple[str, str | None, str | None]]:
    """dtype, precision and kind of descales, in every way that they go together on the workload."""
    if workload.problem.dtype_kv is not None:
        return [(dtype, None, kind) for dtype in QUANTIZABLE for kind in kinds_of_descales(workload.problem)]
    in_e4m3 = replace(workload.problem, dtype="e4m3", out_dtype=None)
    found = [("e4m3", None, kind) for kind in kinds_of_descales(in_e4m3)]
    plain = [(dtype, None, None) for dtype in TORCH_DTYPES if dtype != "e4m3"]
    in_fp8 = [*found, *((dtype, "fp8", None) for dtype in QUANTIZABLE)]
    return in_fp8 if workload.problem.fast_accum else [*plain, *in_fp8]


def refusals(spec: Spec) -> dict[str, tuple[Problem, str]]:
    """For everything that the version does not declare, a problem that asks for it and what the refusal must say."""
    plain = small(spec, lse=False)
    found = {
        name: (replace(plain, **FEATURES[name].example), FEATURES[name].asked)
        for name in FEATURES.keys() - spec.features
    }
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
        found["e4m3_backward"] = (
            replace(plain, dtype="e4m3", out_dtype=None, grad=True),
            "e4m3 inputs have no gradients",
        )
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
    """Inputs, gradients, descales and the Judge of a case; the versions that are tested on them one after the
    other share them."""
    return _drawn(replace(case, version="", problem=replace(case.problem, deterministic=False)))


@lru_cache(maxsize=4)
def _drawn(case: Case) -> tuple[Tensors, Tensor, Tensor | None, Descales, Judge]:
    problem = case.problem
    tensors, dout, dlse = draw(problem, values=case.workload.values)
    scales = descales(problem, case.descales, device=DEVICE)
    given = (dout, dlse) if problem.grad else (None, None)
    used, packed, scales_of_rows = as_judged(tensors, problem, scales)
    operands = seen_by(problem), sinks_of(problem), scored_by(problem), kept_by(problem)
    judge = Judge(*used, packed, *given, scales_of_rows, *operands)
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


def test_cpu_tensors_where_there_is_a_gpu_too(spec):
    problem = replace(small(spec), device="cpu", arch=None, dtype=(*spec.cpu_dtypes, "fp32")[0])
    if not takes(spec, problem):
        pytest.skip(f"{spec.name}: {'; '.join(spec.unsupported(problem))}")
    tensors, *_ = draw(problem)
    accept(Judge(*tensors, problem), forward(spec.name, tensors, problem))
