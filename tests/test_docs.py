"""The tutorial's kernel compiles, and what the documents name is there.

The tutorial itself is followed by `make newcomer`.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from newcomer import PAGES as SHOWN
from newcomer import blocks
from test_learn import PAGES as TO_LEARN

import flashzoo
from flashzoo._triton.compile import resources
from flashzoo_suite.support import ROOT

TUTORIAL = (ROOT / "docs" / "write_a_variant.md").read_text()


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernel_compiles_for_a_gpu(tmp_path, monkeypatch, arch):
    """What the interpreter runs, the compiler may reject."""
    (text,) = (text for language, word, text in blocks(TUTORIAL) if word == "lazy.py")
    (tmp_path / "lazy.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        lazy = importlib.import_module("lazy")
        for head_dim, causal in ((64, False), (128, True)):
            problem = flashzoo.Problem(1, 4096, 4096, 16, 16, head_dim, causal=causal, arch=arch)
            launch = lazy.launch_of(problem, (4096 * 16 * head_dim, 16 * head_dim, head_dim) * 4)
            assert resources(launch, (*["bf16"] * 4, "fp32"), 1, arch).spills == 0
    finally:
        flashzoo.unregister("lazy")
        sys.modules.pop("lazy")


def test_what_is_not_run_names_what_is_there():
    apart = {word: text for language, word, text in blocks(TUTORIAL) if language == "sh" and word in ("setup", "long")}
    asked = re.search(r'pip install -e "\$FLASHZOO\[([\w,]+)\]"', apart["setup"])
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert asked and set(asked[1].split(",")) <= set(extras)
    named = re.findall(r"\$FLASHZOO/([\w.-]+)", apart["setup"])
    assert named and all((ROOT / name).is_file() for name in named)
    short = "flashzoo check lazy.py -q -k test_counting"
    assert apart["long"].strip() == "flashzoo check lazy.py -q -n 2" and f"\n{short}\n" in TUTORIAL


def test_extras_that_are_named_are_there():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = re.findall(r"\.\[([\w,]+)\]", (ROOT / "docs" / "start.md").read_text())
    assert {"v3", "report"} <= {name for names in named for name in names.split(",")} <= set(extras)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page, or to a line of code, may say behind its #."""
    if page.suffix == ".py":
        return {f"L{number}" for number, _ in enumerate(page.read_text().splitlines(), 1)}
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("flashzoo/*/README.md")]),
]


def test_every_program_of_the_documents_is_run():
    """By `make newcomer`, by test_use and by test_learn."""
    run = {*SHOWN, "docs/write_a_variant.md", "docs/use.md", *(f"docs/learn/{name}.md" for name in TO_LEARN)}
    there = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")]
    programs = {page.relative_to(ROOT).as_posix() for page in there if "\n```python" in page.read_text()}
    assert len(programs) > 5 and programs <= run


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    prose = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose)]
    assert links
    for name, _, anchor in links:
        target = page.parent / name if name else page
        assert target.exists() and (not anchor or anchor in anchors(target)), f"{name}#{anchor}"
