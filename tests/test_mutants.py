"""The list of faults, and how a run is read. The faults themselves are run by `make mutants`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from _pytest.mark.expression import Expression
from fault import Change
from faults import FAULTS
from mutants import Run, named_tests, verdict

from flashzoo_suite.support import DEVICE, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_of_code_that_is_there(fault):
    changed = fault.changed(ROOT)
    assert changed and all(text != (ROOT / path).read_text() for path, text in changed.items())


def test_faults_are_told_apart():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.seen_by and fault.why for fault in FAULTS)


@pytest.mark.parametrize("version", sorted({fault.version for fault in FAULTS}))
def test_what_faults_name_is_there(version):
    """Of those that this machine can run: names of tests change, and workloads take other dtypes in turn."""
    hints = {
        fault.name: fault.seen_by for fault in FAULTS if fault.version == version and fault.gpu <= (DEVICE == "cuda")
    }
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "--versions", version, *named_tests(version)]
    ended = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True)
    names = [line for line in ended.stdout.splitlines() if "::" in line]
    assert names and not [fault for fault, hint in hints.items() if not any(selects(hint, name) for name in names)]


def selects(hint: str, name: str) -> bool:
    """Whether pytest's -k takes a test."""
    return Expression.compile(hint).evaluate(lambda part, **_: part.lower() in name.lower())


def test_what_does_not_apply_is_an_error():
    text = "x = 1\n\n\ndef f():\n    return 1\n\n\nclass C:\n    def f(self):\n        return 1\n"
    assert Change("", "return 1", "return 2", "C.f").applied(text) == text[:-2] + "2\n"
    for change in (Change("", "return 1", ""), Change("", "return 2", ""), Change("", "return 1", "", "g")):
        with pytest.raises(ValueError, match="there"):
            change.applied(text)


ENDS = {
    "passed": (Run(0, "2 passed in 1s", 1.0), ("passed", "")),
    "wrong": (
        Run(
            1,
            "tests/a.py::test_b[v1-x] FAILED [100%]\nFAILED tests/a.py::test_b[v1-x] - AssertionError: "
            "out, elementwise\n",
            1.0,
        ),
        ("caught", "tests/a.py::test_b[v1-x]"),
    ),
    "spaces": (
        Run(1, "FAILED tests/a.py::test_b[one row] - assert 1 == 2\n", 1.0),
        ("caught", "tests/a.py::test_b[one row]"),
    ),
    "crashed": (
        Run(-11, "tests/a.py::test_b[x y] Fatal Python error\n", 1.0),
        ("caught", "tests/a.py::test_b[x y] crashes"),
    ),
    "never ended": (
        Run(None, "tests/a.py::test_a PASSED\ntests/a.py::test_b[x]", 1.0),
        ("caught", "tests/a.py::test_b[x] hangs"),
    ),
    "crashed before any test": (Run(-11, "", 1.0), ("error", "pytest ended with -11: ")),
    "does not compile": (
        Run(1, "FAILED tests/a.py::test_b - NameError: x", 1.0),
        ("error", "pytest ended with 1: tests/a.py::test_b: NameError: x"),
    ),
    "no such test": (Run(5, "no tests ran in 1s", 1.0), ("error", "pytest ended with 5: no tests ran in 1s")),
}


@pytest.mark.parametrize(("run", "expected"), ENDS.values(), ids=ENDS)
def test_how_a_run_ends(run, expected):
    assert verdict(run) == expected
