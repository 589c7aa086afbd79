"""What the docs say of a whole model, from rows of `examples/llama.py`."""

from __future__ import annotations

import csv

from bench.llama import MEASURED, rows_of, section, short

MODEL = {"date": "2026-11-25", "gpu": "H200", "torch": "2", "transformers": "5", "size": "1b", "parameters": "1498e6"}
MODEL |= {"seqlen": "8192", "context": "32768", "new": "64", "rounds": "3", "away": "0", "why": ""}


def kept(path, *rows):
    """A file of rows: commit, measure, implementation, speed or why there is none, and what else differs."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*MODEL, "commit", "measure", "implementation", "tokens_s"])
        writer.writeheader()
        for commit, measure, implementation, speed, more in rows:
            found = {"tokens_s": speed} if isinstance(speed, int) else {"tokens_s": "", "why": speed}
            of = {"commit": commit, "measure": measure, "implementation": implementation}
            writer.writerow(MODEL | of | found | more)
    return path


def test_each_measure_is_of_its_last_run(tmp_path):
    """Implementations of two runs never stand beside one another; a measure of another commit is still told."""
    rows = rows_of(
        kept(
            tmp_path / "llama.csv",
            ("old", "train", "sdpa", 100, {"size": "tiny"}),
            ("aaa", "train", "sdpa", 40000, {}),
            ("aaa", "train", "zoo", 50000, {}),
            ("aaa", "write", "sdpa", 70, {}),
            ("aaa", "write", "other", 90, {}),
            ("bbb", "write", "sdpa", 80, {"rounds": "1"}),
            ("bbb", "write", "zoo", 120, {"rounds": "1"}),
            ("bbb", "write", "gone", "missing: ImportError", {}),
        )
    )
    text = "\n".join(section(rows))
    assert "commit aaa of 2026-11-25 (training) and commit bbb of 2026-11-25 (writing)" in text
    assert "of 3 turns (training), of 1 turn (writing)" in text
    assert "50000 (1.25x)" in text and "120.0 (1.50x)" in text and "missing" in text
    assert "other" not in text and "90" not in text


def test_one_run_is_named_once(tmp_path):
    rows = rows_of(kept(tmp_path / "llama.csv", *[("aaa", of, "sdpa", 1000, {}) for of in ("train", "write")]))
    assert "commit aaa of 2026-11-25 (training" not in (text := "\n".join(section(rows))) and "commit aaa of" in text


def test_what_was_not_measured_is_not_told(tmp_path):
    assert rows_of(tmp_path / "none.csv") == [] and [*short([])] == []
    assert "Nothing" in next(section([]))


def test_what_is_committed_can_be_told():
    assert "tokens a second" in "\n".join(short(rows_of(MEASURED)))
