"""Which feature each version declares, and on which named problems the suite holds it to that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from bench.contenders import declared
from flashzoo.call.problem import FEATURES, QUANTIZABLE
from flashzoo.registry import Zoo, current, remembered
from flashzoo.spec import Spec
from flashzoo.workloads import workloads

ARCH = 90
"""Of the GPU on which the tests are counted."""

Exercised = dict[tuple[str, bool], tuple[str, ...]]
"""Names of workloads by feature, and by whether there are gradients."""


@dataclass(frozen=True)
class Cell:
    """One version and one feature.

    Attributes:
        passes: those that take it, in words; empty where none does.
        problems: names of the workloads with it that the suite runs, through the last of these passes.
        refused: the test that what is not declared is refused; empty where both passes are.
    """

    passes: str
    problems: tuple[str, ...]
    refused: str


@dataclass(frozen=True)
class Feature:
    """A row of the matrix: the feature's name, how it is asked for, and its cells by version."""

    name: str
    asked: str
    cells: dict[str, Cell]


def matrix() -> list[Feature]:
    """A row for each feature."""
    return _matrix(current())


@remembered
def _matrix(zoo: Zoo) -> list[Feature]:
    exercised = {name: _exercised(declared(name)) for name in zoo.specs}
    return [
        Feature(name, feature.asked, {of: _cell(declared(of), name, problems) for of, problems in exercised.items()})
        for name, feature in FEATURES.items()
    ]


BESIDE_E4M3 = [{"dtype": dtype} for dtype in QUANTIZABLE]
"""How a workload whose k and v are e4m3 can be asked."""


def _cell(spec: Spec, feature: str, problems: Exercised) -> Cell:
    backward = feature in (spec.backward or ())
    if feature not in spec.features:
        return Cell("", (), feature)
    refused = "" if backward else f"backward_{feature}" if spec.backward is not None else "backward"
    return Cell("forward, backward" if backward else "forward", problems.get((feature, backward), ()), refused)


def _exercised(spec: Spec) -> Exercised:
    """By feature and whether there are gradients the workloads that the version takes, asked as
    `flashzoo_suite.test_declared.cases` asks them."""
    found: dict[tuple[str, bool], dict[str, None]] = {}
    ways = [{"dtype": dtype} for dtype in spec.dtypes if dtype != "fp64"] + [
        {"dtype": dtype, "precision": "fp8"} for dtype in spec.quantizes
    ]
    for workload in (*workloads("smoke"), *workloads("hard")):
        beside_fp8 = [way for way in ways if workload.problem.dtype_kv is None or way in BESIDE_E4M3]
        if workload.problem.fast_accum:
            beside_fp8 = [way for way in ways if way["dtype"] == "e4m3" or "precision" in way]
        for way, grad in product(beside_fp8, (False, True)):
            features = (spec.backward or frozenset()) if grad else spec.features
            deterministic = "deterministic" in features and "smoke" in workload.tags
            asked = workload.on("cpu", lse="lse" in features, deterministic=deterministic, grad=grad, **way)
            problem = replace(asked, device="cuda", arch=ARCH)
            if not spec.unsupported(problem):
                for feature in problem.features:
                    found.setdefault((feature, grad), {})[workload.name] = None
    return {key: tuple(names) for key, names in found.items()}
