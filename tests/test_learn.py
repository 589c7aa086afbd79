"""docs/learn: its programs run, its change of v2 does what the page says, and no line of a paper is left out."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from newcomer import blocks
from test_options import changes

import flashzoo
from bench import learn
from flashzoo_suite.support import ROOT

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "learn").glob("*.md"))}


def test_there_is_a_page_for_each_generation():
    assert sorted(PAGES) == ["blocksparse", "v1", "v2", "v3"]
    assert all(f"]({name}.svg)" in text and "## Exercise" in text for name, text in PAGES.items())


@pytest.mark.parametrize("name", PAGES)
def test_a_solution_passes_its_own_test(name, capsys):
    for language, word, text in blocks(PAGES[name]):
        if language == "python" and word != "changed":
            assert "assert" in text
            exec(compile(text, f"docs/learn/{name}.md", "exec"), {"__name__": "__main__"})


@pytest.fixture
def changed(tmp_path: Path, monkeypatch):
    """v2 with the page's change, as a version of its own."""
    folder = tmp_path / "changed_v2"
    shutil.copytree(ROOT / "flashzoo" / "v2", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.glob("*.py"):
        path.write_text(path.read_text().replace("flashzoo.v2", "changed_v2"))
    ((path, old, new),) = changes(PAGES["v2"])
    kernels = folder / Path(path).name
    assert kernels.read_text().count(old) == 1
    kernels.write_text(kernels.read_text().replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    spec = dataclasses.replace(importlib.import_module("changed_v2").SPEC, name="changed")
    flashzoo.register(spec)
    yield spec.name
    flashzoo.unregister(spec.name)
    for module in [name for name in sys.modules if name.startswith("changed_v2")]:
        del sys.modules[module]


def test_the_change_of_v2_is_seen_by_the_pages_program(changed, capsys):
    (program,) = (text for _, word, text in blocks(PAGES["v2"]) if word == "changed")
    with pytest.raises(AssertionError, match="not close"):
        exec(program, {})
    exec(program.replace('version="v2"', f'version="{changed}"'), {})
    assert "forward and backward" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "kinds"), [("v1", "AB"), ("v2", "AB"), ("v3", ("A2",)), ("blocksparse", "A")])
def test_a_page_has_every_line_of_its_paper(name, kinds):
    in_code = {label for label in learn.lines(name) if label.startswith(tuple(kinds))}
    assert in_code <= set(re.findall(rf"\[({learn.LABEL})\]\(../../flashzoo/{name}/", PAGES[name]))


def test_the_model_ranks_the_orders_as_the_pages_say():
    steps = {name: order.step() for name, order in learn.ORDERS.items()}
    assert steps["fa1"] > steps["fa2"] > steps["overlap"] > steps["both"] == steps["ping_pong"]
    assert all(0 < order.busy(head_dim) <= 1 for order in learn.ORDERS.values() for head_dim in (64, 128, 256))
