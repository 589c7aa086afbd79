"""Every command of README and docs that wants a GPU, or several, runs here too: as it stands there, with options behind
its own that bound what it costs. On a CPU the same commands run at sizes of a CPU.

All other commands are run by `make newcomer`, on a machine without a GPU, where it also sees that these here are
refused in words. A block that neither runs fails `test_every_block_is_run`.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from newcomer import PAGES as OF_NEWCOMERS
from newcomer import blocks
from test_docs import PAGES

from flashzoo_suite.support import DEVICE, ROOT

LONGEST_S = 60
TUTORIAL = "docs/write_a_variant.md"
HERE = ("gpu", "gpus")
"""How blocks are marked that are run here."""
PRINTED = ""
"""The language of a block that shows what was printed."""
LANGUAGES = {"sh", "python", PRINTED}
ELSEWHERE = {
    "diff": ("docs/add_an_option.md", "docs/learn/v2.md"),  # test_options and test_learn make these changes
    "toml": (TUTORIAL,),  # newcomer makes a package of it
    "{eval-rst}": ("docs/reference.md",),  # `make docs`, in which a warning is an error
}
"""Other languages, and on which pages something else follows what they say."""


class Bound(NamedTuple):
    """Options that go behind a command's own; {rows} is a file that rows are looked for in afterwards."""

    on_gpu: str
    on_cpu: str


ROWS = "--ms 20 --budget-s 30 --passes fwd --causal 1 --out {rows}"
SMALL = "--tokens 64 --hidden 64 --head-dims 64 --seqlens 64 --dtype fp16"
BOUNDS = {
    "flashzoo compare": Bound("--batch-size 1", "--seq-len 64 --batch-size 1 --num-heads 2 --head-dim 32 --dtype fp16"),
    "flashzoo bench lazy.py": Bound(f"{ROWS} --seqlens 1024", f"{ROWS} {SMALL} --impls lazy,v2"),
    "flashzoo bench": Bound(
        f"{ROWS} --head-dims 128 --seqlens 1024 --impls v3,v2,sdpa_flash", f"{ROWS} {SMALL} --impls v2,standard"
    ),
    "python examples/train_gpt.py": Bound(
        "--steps 60 --layers 4",
        "--versions v2 --steps 2 --layers 1 --hidden 32 --head-dim 16 --seqlen 32 --batch 2",
    ),
    "torchrun --nproc-per-node 2 -m bench.parallel": Bound(
        "--tokens 16384 --heads 32:8 --passes fwd --ms 20 --budget-s 30 --out {rows}",
        "--tokens 64 --heads 4:2 --head-dim 8 --passes fwd --ms 1 --out {rows}",
    ),
}
"""By the words that a command begins with, the first that fit."""
PROGRAMS = {
    "flashzoo": [sys.executable, "-m", "flashzoo"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def found() -> list[tuple[str, str, str, str]]:
    """Page, language, mark and text of every block."""
    pages = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
    fences = re.compile(r"^```(\S*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(page, *block) for page, text in pages.items() for block in fences.findall(text)]


def commands(text: str) -> list[str]:
    """Of a block, without remarks."""
    return [line.partition(" #")[0].strip() for line in text.splitlines()]


def bound_of(command: str) -> Bound | None:
    return next((bound for words, bound in BOUNDS.items() if command.startswith(words)), None)


def objection(page: str, language: str, mark: str, text: str) -> str:
    """Why a block is run by nothing; empty where it is run."""
    if language not in LANGUAGES:
        return "" if page in ELSEWHERE.get(language, ()) else f"nothing follows blocks of {language!r} on this page"
    if language != "sh" or mark == "setup":  # what is python test_docs sees to; environments newcomer makes by itself
        return ""
    if mark in HERE:
        unbounded = [command for command in commands(text) if bound_of(command) is None]
        return f"BOUNDS has nothing for {unbounded}" if unbounded else ""
    by_newcomer = page == TUTORIAL or (page in OF_NEWCOMERS and not mark)
    return "" if by_newcomer else f"newcomer does not run blocks of {mark!r} on this page"


@pytest.mark.parametrize(("page", "language", "mark", "text"), found())
def test_every_block_is_run(page, language, mark, text):
    """By something: python by what test_docs names, commands by newcomer or below."""
    assert not (why := objection(page, language, mark, text)), f"{page}: {why}\n{text}"


@pytest.mark.parametrize(
    ("page", "language", "mark", "text"),
    [
        ("docs/use.md", "sh", "", "flashzoo list\n"),
        ("docs/start.md", "sh", "long", "flashzoo list\n"),
        ("docs/start.md", "sh", "gpu", "flashzoo report\n"),
        ("docs/start.md", "console", "", "$ flashzoo list\n"),
        ("docs/start.md", "toml", "", "[project]\n"),
    ],
)
def test_a_block_that_nothing_runs_is_told(page, language, mark, text):
    assert objection(page, language, mark, text)


def test_no_page_has_half_a_block():
    """Or a block would be looked for where there is none."""
    fences = sum(len(re.findall(r"^ *```", path.read_text(), re.MULTILINE)) for path in PAGES)
    assert fences == 2 * len(found())


SETUP = [line for _, language, mark, text in found() if (language, mark) == ("sh", "setup") for line in commands(text)]


@pytest.mark.parametrize("command", SETUP)
def test_what_makes_environments_is_a_command(command, tmp_path):
    """newcomer makes its own; here is seen that a target of make is there, and that test_docs knows the rest."""
    program, *words = shlex.split(command)
    if program == "make":
        if shutil.which("make") is None:
            pytest.skip("needs make")
        dry = subprocess.run(["make", "-n", *words, f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
        assert dry.returncode == 0 and dry.stdout, dry.stderr
    else:
        assert re.match(r"pip install -e |\. \.venv/bin/activate$|export FLASHZOO=|python3 -m venv \.venv$", command)


def cases() -> list:
    """Every command that is marked `gpu` or `gpus`."""
    of_gpus = [(page, mark, line) for page, _, mark, text in found() if mark in HERE for line in commands(text)]
    few = pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
    marks = {"gpu": [pytest.mark.alone], "gpus": [pytest.mark.alone, few]}
    return [pytest.param(page, line, marks=marks[mark], id=line) for page, mark, line in of_gpus]


@pytest.mark.parametrize(("page", "command"), cases())
def test_a_command_for_gpus_runs(page, command, tmp_path):
    """On a GPU at sizes of a GPU, in a process of its own and a minute at most; elsewhere at sizes of a CPU."""
    bound, rows = bound_of(command), tmp_path / "rows.csv"
    assert bound is not None
    if page == TUTORIAL:  # which is followed in a folder of its own, that has the files written so far
        for language, name, text in blocks((ROOT / page).read_text()):
            if language == "python":
                (tmp_path / name).write_text(text)
    program, *words = shlex.split(command)
    behind = shlex.split((bound.on_gpu if DEVICE == "cuda" else bound.on_cpu).format(rows=rows))
    done = subprocess.run(
        [*PROGRAMS[program], *words, *behind],
        cwd=tmp_path if page == TUTORIAL else ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
    if str(rows) in behind:
        assert any(row["ms"] and row["pass"] == "fwd" for row in read(rows)), done.stdout
    else:
        assert done.stdout.strip()


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
