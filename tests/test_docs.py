"""The tutorial is true: its files are written and its commands run, in order, in a folder that is empty at first.

A block of docs/write_a_variant.md is a file where the line that opens it names one. A block of commands may be of
`setup`, which makes the environment that the tests have already, or `long`, which the tutorial shows in short too: both
are not run. `cpu` and `gpu` are for machines without and with one, and what `fails` must.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashzoo
from flashzoo._triton.compile import resources
from flashzoo_suite.support import DEVICE, ROOT

pytest.importorskip("matplotlib")

TUTORIAL = (ROOT / "docs" / "write_a_variant.md").read_text()
ELSEWHERE = {"setup", "long", "gpu" if DEVICE == "cpu" else "cpu"}


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Language, the second word of the opening line or "", and what is in it, of every fenced block."""
    yield from re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """A virtual environment of its own, for what the tutorial installs, that sees what the tests' has;
    flashzoo is this checkout."""
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    seen = [str(ROOT), *(path for path in sys.path if path.endswith("-packages"))]
    (packages / "tests.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen))
    for name, module in (("flashzoo", "flashzoo"), ("pip", "pip")):
        script = home / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{home}/bin/python" -m {module} "$@"\n')
        script.chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("FLASHZOO", "PYTEST", "PYTHON"))
    }
    # For pip to build with the setuptools that is here, and not to ask an index.
    pip = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    # The whole suite is for whoever follows the tutorial; here a part of it, where the tutorial names none.
    return environment | pip | {"PATH": f"{home}/bin:{os.environ['PATH']}", "PYTEST_ADDOPTS": "-k test_forward"}


def test_from_an_empty_folder_to_a_package(tmp_path, environment):
    folder, printed = tmp_path / "empty", []
    folder.mkdir()
    results = {path: path.stat().st_mtime_ns for path in (ROOT / "bench" / "results").iterdir()}
    for language, word, text in blocks(TUTORIAL):
        if language != "sh":
            (folder / word).write_text(text)
        elif word not in ELSEWHERE:
            done = subprocess.run(
                ["bash", "-euc", text],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert done.returncode == (1 if word == "fails" else 0), f"{text}\n{done.stdout}"
            printed.append((text, done.stdout))
    before, after = (text for command, text in printed if "flashzoo list\n" in command)
    assert "lazy: " not in before and "lazy: FlashAttention-2 that rescales lazily" in after
    everything = "".join(text for _, text in printed)
    assert "lazy takes batch 8, seqlen 4096" in everything
    assert "test_forward[too_lazy-scores_x30-fp16]" in everything and "exceeds" in everything
    assert "torch.Size([1, 128, 2, 64])" in everything
    page = (folder / "lazy.html").read_text()
    assert "<th>lazy</th>" in page and "data:image/png" in page
    assert results == {path: path.stat().st_mtime_ns for path in (ROOT / "bench" / "results").iterdir()}


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


def test_the_readme_names_extras_that_are_there():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = re.findall(r"\.\[([\w,]+)\]", (ROOT / "README.md").read_text())
    assert {"v3", "report"} <= {name for names in named for name in names.split(",")} <= set(extras)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may say behind its #."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("flashzoo/*/README.md")]),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    prose = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose)]
    assert links
    for name, _, anchor in links:
        target = page.parent / name if name else page
        assert target.exists() and (not anchor or anchor in anchors(target)), f"{name}#{anchor}"
