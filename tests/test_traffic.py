"""Bytes counted in the algorithms, what ncu says of calls, and the sets that `make report` goes through."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bench import everything, run, runs, traffic
from bench.arguments import check, parser_of
from bench.cells import cells
from bench.rows import Results, read
from flashzoo.call.problem import Problem

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def _log(*launched: tuple[str, str, str]) -> str:
    """What `ncu --csv --log-file` writes, in its own words, of kernels with these bytes read and written."""
    lines = [
        "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
        '==PROF== Profiling "spin_kernel" - 0: 0%....100% - 1 pass',
        HEADER,
    ]
    for number, (name, *moved) in enumerate(launched):
        for metric, value in zip((traffic.READ, traffic.WRITTEN), moved, strict=True):
            of = f'"{number}","4242","python3.12","127.0.0.1","{name}","1","7","(128, 1, 1)","(132, 1, 1)","0","9.0"'
            lines.append(f'{of},"Command line profiler metrics","{metric}","byte","{value}"')
    return "\n".join([*lines, "==PROF== Disconnected from process 4242"])


SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
CALLS = (
    (SPIN, "512", "0"),
    ("forward_kernel", "67,108,864", "33,554,432"),
    ("reduce_kernel", "1,024", "1,024"),
    (SPIN, "512", "0"),
    ("reduce_kernel", "268,435,456", "4,096"),
    (SPIN, "512", "64"),
    ("forward_kernel", "100", "10"),
    (SPIN, "512", "0"),
    ("reduce_kernel", "268,435,456", "5"),
)
CALLED = [67108864 + 33554432 + 2048 + 4096, 115]


def test_each_calls_bytes_are_its_kernels_and_what_the_flush_writes():
    launched = traffic.kernels(_log(*CALLS))
    assert launched[1] == ("forward_kernel", 67108864.0, 33554432.0)
    assert traffic.by_call(launched) == CALLED


def test_units_are_read():
    text = _log(("one", "1.5", "2")).replace('"byte"', '"Mbyte"')
    assert traffic.kernels(text) == [("one", 1.5e6, 2e6)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==ERROR== The application returned an error code (1).", "got none.*error code"),
        (_log(("one", "n/a", "2")).replace('"byte"', '""', 1), "expected bytes of dram__bytes_read.sum, got 'n/a'"),
    ],
)
def test_a_log_without_numbers_is_an_error(text, said):
    with pytest.raises(traffic.TrafficError, match=said):
        traffic.kernels(text)


def _ncu(tmp_path: Path, monkeypatch, log: str, out: str = "", code: int = 0) -> None:
    """An ncu that writes this log and runs nothing."""
    text, said = tmp_path / "log", tmp_path / "said"
    text.write_text(log)
    said.write_text(out)
    script = tmp_path / "ncu"
    script.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\ncat {text} > "$2"\ncat {said}\nexit {code}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_what_the_counters_say_is_put_to_the_calls(tmp_path, monkeypatch):
    _ncu(tmp_path, monkeypatch, _log(*CALLS), '""\n"out of memory"\n""\n')
    assert traffic.measured([]) == (["", "out of memory", ""], CALLED)


def test_without_ncu_or_its_counters_the_error_says_what_to_do(tmp_path, monkeypatch):
    _ncu(tmp_path, monkeypatch, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", code=1)
    with pytest.raises(traffic.TrafficError, match=r"^refused: .*ERR_NVGPUCTRPERM.*root"):
        traffic.measured([])
    _ncu(tmp_path, monkeypatch, "==ERROR== LibraryNotLoaded", code=9)
    with pytest.raises(traffic.TrafficError, match=r"^FAILED: ncu ended with 9: .*LibraryNotLoaded"):
        traffic.measured([])
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(traffic.TrafficError, match=r"^missing: ncu .*not on the PATH"):
        traffic.measured([])


def _problem(seqlen: int, head_dim: int = 64) -> Problem:
    return Problem(
        16384 // seqlen, seqlen, seqlen, 2048 // head_dim, 2048 // head_dim, head_dim, device="cuda", arch=90
    )


def test_bytes_are_counted_as_the_tiles_make_them():
    problem, rows = _problem(1024), 16384 * 32
    row = 64 * 2
    assert traffic.counted("standard", problem) == 4 * rows * row + 4 * rows * 1024 * 2
    # v1 has 64 x 128 tiles, and 512 heads enough for 5 ranges of at most 256 rows: 4.
    passes = row + 2 * (64 * 4 + 8)
    assert traffic.counted("v1", problem) == 4 * 2 * rows * row + rows * (8 * passes + 2 * (64 * 4 + 8) + row + 4)
    # v2 has 64 queries a tile
    assert traffic.counted("v2", problem) == rows * (2 * row + 4) + 16 * 2 * rows * row
    assert traffic.counted("v3", problem) < traffic.counted("v2", problem), "its tiles have more queries"


def test_bytes_grow_as_the_theorem_says():
    for version in traffic.VERSIONS:
        growth = traffic.counted(version, _problem(16384)) / traffic.counted(version, _problem(8192))
        assert 1.8 < growth < 2.05, "of one sequence four times, of half as many"
    assert traffic.by_formula("standard", _problem(1024)) > 5 * traffic.by_formula("v1", _problem(1024))
    with pytest.raises(ValueError, match="without a mask, got v2"):
        traffic.counted("v2", Problem(1, 64, 64, 2, 2, 64, causal=True))
    with pytest.raises(ValueError, match="got flex"):
        traffic.counted("flex", _problem(1024))


@pytest.fixture
def called(monkeypatch, tmp_path) -> list[list[str]]:
    """Sets that note what they are called with and write a row each; the second fails."""
    calls = []

    def main(line: list[str]) -> int:
        calls.append(line)
        arguments = dict(pairwise(line))
        if "--broken" in line:
            raise RuntimeError("it broke")
        run_id = arguments.get("--resume") or arguments["--run"]
        Results(Path(arguments["--out"]), run_id, "cpu", arguments["--commit"]).append([{"impl": "v3", "pass": "fwd"}])
        return 0

    sets = (
        everything.Set("one", main, ("--first", "--second")),
        everything.Set("two", main, ("--broken",)),
        everything.Set("three", main, ("",), resumes=False),
    )
    monkeypatch.setattr(everything, "SETS", sets)
    return calls


def test_every_set_is_measured_and_a_broken_one_stops_no_other(called, tmp_path, capsys):
    out = tmp_path / "h200.csv"
    assert everything.measure(everything.SETS, "h200-x", out, "c0ffee", float("inf")) == 1
    where = ["--out", str(out), "--commit", "c0ffee"]
    resumed = ["h200-x-one", "--budget-s", "inf", *where]
    assert called == [
        ["--first", "--run", *resumed],
        ["--second", "--resume", *resumed],
        ["--broken", "--run", "h200-x-two", *resumed[1:]],
        ["--run", "h200-x-three", *where],
    ]
    assert [row["run"] for row in read(out)] == ["h200-x-one", "h200-x-one", "h200-x-three"]
    called.clear()
    everything.measure(everything.SETS, "h200-x", out, "c0ffee", float("inf"))
    assert ["--run", "h200-x-three", *where] not in called, "it is there"


def test_traffic_without_its_counters_is_tried_again(called, tmp_path):
    out = tmp_path / "h200.csv"
    Results(out, "x-three", "cpu", "c").append([{"impl": runs.COPY, "pass": runs.COPY}])
    everything.measure(everything.SETS[2:], "x", out, "c", float("inf"))
    everything.measure(everything.SETS[2:], "x", out, "c", float("inf"))
    assert len(called) == 1


def test_the_repositorys_results_have_no_versions_of_others(monkeypatch, capsys):
    monkeypatch.setattr(everything.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(everything, "results_path", lambda device: Path("h200.csv"))
    monkeypatch.setattr("bench.arguments.foreign", lambda impls: ["lazy"])
    with pytest.raises(SystemExit):
        everything.main([])
    assert "--out: expected a file of your own for lazy" in capsys.readouterr().err


def test_a_budget_takes_from_the_end(called, tmp_path, capsys, monkeypatch):
    now = iter(range(0, 1000, 100))
    monkeypatch.setattr(everything.time, "monotonic", lambda: next(now))
    assert everything.measure(everything.SETS, "x", tmp_path / "h200.csv", "c", 250) == 0
    assert [line[0] for line in called] == ["--first", "--second"]
    assert "stopped before x-two: 250 s are gone; go on with --run x" in capsys.readouterr().out


def test_the_sets_are_what_the_benchmarks_take():
    parser = parser_of(None)
    for chosen in everything.SETS:
        for line in chosen.lines if chosen.main is run.main else ():
            args = parser.parse_args([*line.split(), "--device", "cpu"])
            check(args, parser)
            assert cells(args), line
