"""What was seen of the suite on a GPU is written down as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import ROOT

SEEN = sorted((ROOT / "tests").glob("*_seen.json"))


def test_outcomes_are_counted_by_what_they_were(tmp_path):
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / "test_cases.py").write_text(
        "import pytest\n"
        "def test_sound(): pass\n"
        "def test_broken(): assert False\n"
        "@pytest.mark.parametrize('n', (1, 2))\n"
        "def test_spared(n): pytest.skip('no room')\n"
        "def test_tensors_of_more_than_2_to_31(): pass\n"
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
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    seen = json.loads(out.read_text())
    assert (seen["commit"], seen["cases"], seen["passed"]) == ("abc", 5, 2)
    assert [name.rpartition("::")[2] for name in seen["failed"]] == ["test_broken"]
    assert seen["skipped"] == {"no room": 2}


@pytest.mark.parametrize("path", SEEN, ids=lambda path: path.stem)
def test_all_that_was_seen_on_a_gpu_passed_within_ten_minutes(path):
    seen = json.loads(path.read_text())
    assert seen["arguments"] == [] and seen["failed"] == []
    assert sum(seen["skipped"].values()) + seen["passed"] == seen["cases"]
    assert seen["seconds"] < 600
