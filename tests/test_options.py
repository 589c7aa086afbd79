"""docs/add_an_option.md is true: an option that is added to a copy of the repository by its changes is asked for,
checked, refused, traced, tested and fuzzed, and counted are the places that say it. So is an operand, whose gradient
comes as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mutants import copied_tree

from flashzoo_suite.support import ROOT

GUIDE, _, OF_OPERANDS = (ROOT / "docs" / "add_an_option.md").read_text().partition("## 4.")
PLACES, PLACES_OF_OPERANDS = 5, 7
"""Files, at most, in which an option is said, or an operand, before a kernel is touched."""


def changes(text: str) -> list[tuple[str, str, str]]:
    """Path, old text and new text of every block that is a change."""
    found = []
    for path, lines in re.findall(r"^```diff (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        old, new = (
            "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +")
        )
        found.append((path, old, new))
    return found


def in_words(command: list[str], tree: Path) -> str:
    """What a command prints in the tree; its output is the reason where it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # where packages are that are not installed
    elsewhere = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environment | {"PYTHONPATH": os.pathsep.join(elsewhere)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def changed_by(guide: str) -> Iterator[Path]:
    """A copy of the repository with every change made."""
    with copied_tree(None) as copy:
        for path, old, new in changes(guide):
            text = (copy / path).read_text()
            assert text.count(old) == 1, f"{path} has {text.count(old)} of\n{old}"
            (copy / path).write_text(text.replace(old, new))
        yield copy


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    """The copy that has the option."""
    with changed_by(GUIDE) as copy:
        yield copy


def test_it_is_said_in_few_places():
    before_kernels = {path for path, _, _ in changes(GUIDE.partition("## 3.")[0])}
    assert len(before_kernels) <= PLACES
    assert len({path for path, _, _ in changes(OF_OPERANDS)}) <= PLACES_OF_OPERANDS


ASKED = """
import pytest, torch, flashzoo
q = torch.randn(1, 40, 2, 16)
told = {verdict.name: verdict.reasons for verdict in flashzoo.explain(q, q, q, decay=0.25).verdicts}
for name, reasons in told.items():
    assert (name in TAKEN) == ("does not support decay" not in reasons), (name, reasons)
for wrong, error in (("much", TypeError), (float("nan"), ValueError)):
    with pytest.raises(error, match="decay must be"):
        flashzoo.attention(q, q, q, decay=wrong)
near, far = (flashzoo.attention(q, q, q, decay=decay, version="standard") for decay in (30.0, None))
torch.testing.assert_close(near, q)
assert not torch.equal(near, far)
compiled = torch.compile(
    lambda q: flashzoo.attention(q, q, q, decay=0.25, version="standard"), backend="aot_eager", fullgraph=True
)
leaves = [q.clone().requires_grad_() for _ in range(2)]
for call, leaf in zip((compiled, lambda q: flashzoo.attention(q, q, q, decay=0.25, version="standard")), leaves):
    call(leaf).square().sum().backward()
assert torch.equal(leaves[0].grad, leaves[1].grad)
"""
TAKEN = ("standard", "v2")


def test_it_is_asked_for_refused_and_traced(tree):
    in_words(["-c", ASKED.replace("TAKEN", repr(TAKEN))], tree)


def test_it_is_a_flag(tree):
    printed = in_words(["-m", "flashzoo", "explain", "--arch", "90", "--decay", "0.25", "--version", "standard"], tree)
    assert "decay 0.25" in printed and "standard takes" in printed


def test_the_suite_has_it(tree):
    """Each version that takes it is judged on a workload, each other one must refuse it, and the fuzzer draws it."""
    command = [
        "-m",
        "pytest",
        "flashzoo_suite/test_declared.py",
        "tests/test_fuzz.py",
        "-p",
        "no:cacheprovider",
        "--benchmark-disable",
        "-v",
        "-k",
    ]
    printed = in_words([*command, "decay or declared_is_exercised or draws_all"], tree)
    passed = re.findall(r"::(\S+) PASSED", printed)
    for case in ("test_gradients[standard-decay-", "test_forward[v2-decay-"):
        assert any(test.startswith(case) for test in passed), printed
    assert "test_everything_undeclared_is_refused[v2-backward_decay]" in passed
    for name in ("v1", "blocksparse", "sdpa"):
        assert f"test_everything_undeclared_is_refused[{name}-decay]" in passed, printed
    assert "test_draws_all_that_is_declared_and_little_that_is_refused" in passed


OPERAND = """
import pytest, torch, flashzoo
q, k, v = (torch.randn(2, n, 2, 16, dtype=torch.float64) for n in (30, 40, 40))
bias = torch.randn(40)
told = {verdict.name: verdict.reasons for verdict in flashzoo.explain(q, k, v, key_bias=bias).verdicts}
for name, reasons in told.items():
    assert (name == "standard") == ("does not support key_bias" not in reasons), (name, reasons)
assert flashzoo.explain(q, k, v, key_bias=bias.requires_grad_()).problem.grad
for wrong, error in ((0.5, TypeError), (bias.double(), TypeError), (bias[:30], ValueError)):
    with pytest.raises(error, match="key_bias must"):
        flashzoo.attention(q, k, v, key_bias=wrong)
assert flashzoo.explain(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), key_bias=bias.detach()).chosen is None

def attention(q, k, v, bias):
    return flashzoo.attention(q, k, v, key_bias=bias, causal=True, version="standard", return_lse=True)

def dense(q, k, v, bias):
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4 + bias
    s = s.masked_fill(torch.ones(30, 40, dtype=torch.bool).triu(11), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1)

def gradients(call, of):
    leaves = [x.detach().requires_grad_(i in of) for i, x in enumerate((q, k, v, bias))]
    out, lse = call(*leaves)
    return torch.autograd.grad(out.square().sum() + lse.sin().sum(), [leaves[i] for i in of])

for of in ((0, 1, 2, 3), (3,), (0, 3)):
    expected = gradients(dense, of)
    for call in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(gradients(call, of), expected, rtol=1e-5, atol=1e-5)
out, lse = attention(q, k, v, bias.detach())
how = {"causal": True, "key_bias": bias.detach(), "version": "standard"}
found = flashzoo.attention_backward(2 * out, q, k, v, out, lse, dlse=lse.cos(), **how)
torch.testing.assert_close(found, gradients(dense, (0, 1, 2, 3)), rtol=1e-5, atol=1e-5)
"""


def test_an_operand_has_a_gradient_at_once():
    """Asked for, checked, refused by others, recorded, traced."""
    with changed_by(OF_OPERANDS) as copy:
        in_words(["-c", OPERAND], copy)
