"""What was seen of the suite on a GPU is written down as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from flashzoo_suite import gpus, plugin
from flashzoo_suite.support import ROOT

pytest_plugins = ("pytester",)

SEEN = sorted((ROOT / "tests").glob("*_seen.json"))
NAME = re.compile(r"\w+")


def test_outcomes_are_counted_by_what_they_were(tmp_path):
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / "test_cases.py").write_text(
        "import pytest\n"
        "def test_sound(): pass\n"
        "def test_broken(): assert False\n"
        "@pytest.mark.parametrize('n', (1, 2))\n"
        "def test_spared(n): pytest.skip('no room')\n"
        "@pytest.mark.alone\n"
        "def test_in_quiet(): assert 'PYTEST_XDIST_WORKER' not in __import__('os').environ\n"
    )
    out = tmp_path / "seen.json"
    command = [
        sys.executable,
        "tests/seen.py",
        "--commit",
        "abc",
        "--jobs",
        "1",
        "--out",
        str(out),
        "--",
        f"--rootdir={folder}",
        str(folder),
    ]
    here = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    ended = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    seen = json.loads(out.read_text())
    together, alone = seen["runs"]
    assert (seen["commit"], together["cases"], together["passed"]) == ("abc", 4, 1)
    ((name, why),) = together["failed"].items()
    assert name.endswith("::test_broken") and why == "assert False"
    assert together["skipped"] == {"no room": 2}
    assert (alone["cases"], alone["passed"], alone["failed"]) == (1, 1, {}) and "alone" in alone["arguments"]
    command.insert(2, "--add")
    subprocess.run([*command, "-k", "quiet"], cwd=ROOT, env=here, capture_output=True)
    assert json.loads(out.read_text())["runs"] == [together, alone, ANY]
    command[command.index("abc")] = "other"
    other = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True)
    assert other.returncode == 2 and "--add: expected a file of other" in other.stderr


def test_what_wants_a_gpu_is_one_line_of_pytests_summary(pytester):
    pytester.makepyfile(f"""
        import pytest
        @pytest.mark.parametrize("n", range(3))
        def test_on_a_gpu(n): pytest.skip({plugin.WANTS_GPU!r})
        def test_on_another(): pytest.skip({plugin.WANTS_GPU!r})
        def test_spared(): pytest.skip("no room")
    """)
    summary = SimpleNamespace(pytest_terminal_summary=plugin.pytest_terminal_summary)
    text = pytester.runpytest_inprocess("-ra", "-p", "no:cacheprovider", plugins=[summary]).stdout.str()
    assert text.count(plugin.WANTS_GPU) == 0 and "no room" in text and "5 skipped" in text
    assert text.count("cases that need a GPU and were not run: 4\n") == 1


def test_workers_share_out_gpus():
    assert [gpus.share_of(f"gw{n}", 2, None) for n in range(4)] == ["0", "1", "0", "1"]
    assert [gpus.share_of(f"gw{n}", 3, "4,GPU-7,1") for n in (0, 1, 5)] == ["4", "GPU-7", "1"]
    assert gpus.share_of("", 8, None) is None and gpus.share_of("gw3", 1, "5") is None
    assert gpus.share_of("gw1", 0, "") is None


def test_a_worker_and_its_children_see_one_gpu(monkeypatch):
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv(gpus.WORKER, "gw6")
    monkeypatch.setenv(gpus.VISIBLE, "")  # undone behind the test, which is not so of a variable that was not there
    gpus.take_one()
    assert os.environ[gpus.VISIBLE] == "2"


def test_so_many_workers_as_all_gpus_hold(monkeypatch):
    memory = [141 << 30, 80 << 30]
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpus.torch.cuda, "get_device_properties", lambda at: SimpleNamespace(total_memory=memory[at]))
    assert gpus.workers_for(8 << 30) == 20, "each has as many, and the smaller one holds 10"
    assert gpus.workers_for(1 << 40) == 1


@pytest.mark.parametrize("path", SEEN, ids=lambda path: path.stem)
def test_all_that_was_seen_on_a_gpu_passed_each_run_within_ten_minutes(path):
    runs = json.loads(path.read_text())["runs"]
    for seen in runs:
        assert not seen["failed"] and seen["seconds"] < 600
        assert sum(seen["skipped"].values()) + seen["passed"] == seen["cases"]
    marks, chosen = ([_after(flag, seen["arguments"]) for seen in runs] for flag in ("-m", "-k"))
    assert {"not alone", "alone"} <= set(marks), "the whole suite has both"
    for file in (*ROOT.glob("tests/test_*.py"), *ROOT.glob("flashzoo_suite/test_*.py")):
        for mark in ("not alone", "alone"):
            of_mark = [seen["arguments"] for seen in runs if mark == _after("-m", seen["arguments"])]
            assert any(_takes(arguments, file) for arguments in of_mark), f"{file.name}: not among what ran"
    left_out = {word for text in chosen if text.startswith("not (") for word in NAME.findall(text)} - {"not", "or"}
    assert left_out <= {word for text in chosen if not text.startswith("not") for word in NAME.findall(text)}


def _takes(arguments: list[str], file: Path) -> bool:
    """Whether a run took what is in a file, but for names that it says it left out."""
    paths = [x for x in arguments if x.startswith(("tests", "flashzoo_suite"))]
    chosen = _after("-k", arguments)
    named = file.relative_to(ROOT)
    return (not chosen or chosen.startswith("not (")) and (
        not paths or any(named.match(path) or path == named.parts[0] for path in paths)
    )


def _after(flag: str, arguments: list[str]) -> str:
    return arguments[arguments.index(flag) + 1] if flag in arguments else ""
