"""What a run leaves behind where it is stopped or killed, and how it goes on."""

from __future__ import annotations

import dataclasses

import pytest
from bench_runs import TINY, bench_tiny, forget_libraries, rows_of, timed_in, why_in

import flashzoo
from bench import peers, run
from flashzoo import cli, timing


def test_resume_finishes_the_cells_that_lack_some_implementations(tmp_path, versions_called):
    out = tmp_path / "cpu.csv"
    bench_tiny("--impls standard --passes fwd --causal 0", out)
    versions_called.clear()
    bench_tiny("--impls standard,sdpa,sdpa_math --passes fwd --resume r1", out)
    expected = [
        ("standard", "0"),
        ("sdpa", "0"),
        ("sdpa_math", "0"),
        ("standard", "1"),
        ("sdpa", "1"),
        ("sdpa_math", "1"),
    ]
    assert [(impl, causal) for impl, _, causal in timed_in(out)] == expected
    before = out.read_text()
    versions_called.clear()
    bench_tiny("--impls standard,sdpa,sdpa_math --passes fwd --resume r1", out)
    assert not versions_called and out.read_text() == before, "nothing was left to do"


def test_resume_tries_again_only_what_was_missing(tmp_path, broken_peer, absent_peer, monkeypatch):
    out, line = tmp_path / "cpu.csv", "--impls standard,v3,flex,fa3 --passes fwd --causal 0"
    bench_tiny(line, out)
    line += " --resume r1"
    assert [impl for impl, _, _ in why_in(out)] == ["v3", "flex", "fa3"]
    tried = len(broken_peer)
    bench_tiny(line, out)
    assert len(rows_of(out)) == 4 + 2 and len(broken_peer) == tried == 1
    monkeypatch.setitem(peers.PEERS, "fa3", peers.PEERS["sdpa_math"])
    monkeypatch.delitem(peers._LIBRARIES, "fa3")
    forget_libraries()
    bench_tiny(line, out)
    assert timed_in(out) == [("standard", "fwd", "0"), ("fa3", "fwd", "0")] and len(broken_peer) == 1


def test_a_version_whose_package_is_missing_is_tried_again_once_it_is_there(tmp_path):
    needy = dataclasses.replace(flashzoo.versions()["standard"], name="needy", requires=("no_such_package",), auto=())
    out, line = tmp_path / "cpu.csv", "--impls standard,needy --passes fwd --causal 0"
    try:
        for spec, timed in (
            (needy, ["standard"]),
            (needy, ["standard"]),
            (dataclasses.replace(needy, requires=()), ["standard", "needy"]),
        ):
            flashzoo.unregister("needy") if "needy" in flashzoo.versions() else None
            flashzoo.register(spec)
            bench_tiny(f"{line} --resume r1" if out.exists() else line, out)
            assert [impl for impl, _, _ in timed_in(out)] == timed
            ((impl, _, why),) = why_in(out)
            assert impl == "needy" and why.startswith("missing: needs the package 'no_such_package'")
    finally:
        flashzoo.unregister("needy")


def test_a_run_killed_as_it_wrote_is_mended(tmp_path, capsys):
    out, line = tmp_path / "cpu.csv", "--impls standard,sdpa_math --passes fwd --causal 0"
    bench_tiny(line, out)
    whole = out.read_text().splitlines(keepends=True)
    assert [row.split(",")[7] for row in whole] == ["impl", "matmul", "standard", "sdpa_math", "matmul"]
    for kept, left in ((whole[:3], whole[3][:90]), (whole[:3], whole[3][:-1]), ([], whole[0][:20]), ([], "")):
        out.write_text("".join(kept) + left)
        capsys.readouterr()
        bench_tiny(f"{line} --resume r1" if kept else line, out)
        assert [impl for impl, _, _ in timed_in(out)] == ["standard", "sdpa_math"]
        assert out.read_text().startswith("".join(kept) or whole[0])
        assert (f"ended within a row, which is cut off: {left}\n" in capsys.readouterr().out) == bool(left)


@pytest.mark.parametrize("path", ["", "file/cpu.csv"], ids=["a folder", "in a file"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(path, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        bench_tiny("--impls sdpa_math", tmp_path / path)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and "--out: " in said.err and "sdpa_math" not in said.out
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("text", ["run,date,ms\nold,d,1\n", "run,date,ms\nold,d", "ms,run", "a poem"])
def test_another_file_is_refused_and_left_alone(text, tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    out.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        bench_tiny("--impls sdpa_math", out)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "--out: expected a file with the columns run,date,commit" in said and f"with {text.splitlines()[0]}" in said
    assert out.read_text() == text


def test_what_costs_the_process_its_gpu_ends_the_run_and_is_not_tried_again(tmp_path, broken_peer, monkeypatch, capsys):
    out, line = tmp_path / "cpu.csv", "--impls standard,v3,flex,sdpa_math --passes fwd"
    monkeypatch.setattr(timing.Clock, "lost", property(lambda clock: len(broken_peer) > 0))
    assert bench_tiny(line, out) == 1
    assert timed_in(out) == [] and [(impl, causal) for impl, causal, _ in why_in(out)] == [("v3", "0"), ("flex", "0")]
    assert "stopped after 1 of 2 cells" in capsys.readouterr().out
    monkeypatch.setattr(timing.Clock, "lost", False)
    monkeypatch.setitem(peers.PEERS, "flex", peers.PEERS["sdpa_math"])
    assert bench_tiny(f"{line} --resume r1", out) == 0
    assert sorted(timed_in(out)) == sorted(
        (impl, "fwd", causal)
        for impl in ("standard", "sdpa_math", "flex")
        for causal in "01"
        if (impl, causal) != ("flex", "0")
    )


def test_resume_skips_what_the_run_has(tmp_path):
    out = tmp_path / "cpu.csv"
    bench_tiny("--impls sdpa_math --passes fwd --causal 0", out)
    assert timed_in(out) == [("sdpa_math", "fwd", "0")]
    bench_tiny("--impls sdpa_math --passes fwd --resume r1", out)
    assert timed_in(out) == [("sdpa_math", "fwd", "0"), ("sdpa_math", "fwd", "1")]
    bench_tiny("--impls sdpa_math --passes fwd --run other", out)
    assert len(timed_in(out)) == 4


def test_a_budget_holds_within_a_cell_and_the_rest_is_left_to_resume(tmp_path, monkeypatch, capsys):
    out, line = tmp_path / "cpu.csv", "--impls standard,v3,sdpa_math --passes fwd --causal 0"
    begun = []
    first_call = run.first_call

    def noting(impl, *rest):
        begun.append(impl)
        return first_call(impl, *rest)

    monkeypatch.setattr(run, "first_call", noting)
    monkeypatch.setattr(
        timing.Clock, "out_of_time", property(lambda clock: clock.deadline < float("inf") and "standard" in begun)
    )
    assert bench_tiny(f"{line} --budget-s 9", out) == 0
    assert (
        begun == ["standard"]
        and timed_in(out) == []
        and "9 s are gone; go on with --resume r1" in capsys.readouterr().out
    )
    monkeypatch.undo()
    assert bench_tiny(f"{line} --resume r1", out) == 0
    assert [impl for impl, _, _ in timed_in(out)] == ["standard", "sdpa_math"]


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    out, measured = tmp_path / "cpu.csv", run.measure

    def interrupted(work, *rest):
        if any(cell.problem.causal for cell in work):
            raise KeyboardInterrupt
        return measured(work, *rest)

    monkeypatch.setattr(run, "measure", interrupted)
    assert cli.main(["bench", *TINY.split(), "--impls", "standard", "--passes", "fwd", "--out", str(out)]) == 130
    assert timed_in(out) == [("standard", "fwd", "0")]
    assert "stopped after 1 of 2 cells, interrupted; go on with --resume r1" in capsys.readouterr().out


@pytest.mark.parametrize(("others", "said"), [((), "which has none"), (("a", "b"), "which has r1, a, b last")])
def test_resume_is_of_a_run_that_is_there(others, said, tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    for run_id in ("r1", *others) if others else ():
        bench_tiny(f"--impls sdpa_math --passes fwd --causal 0 --run {run_id}", out)
    before = out.read_text() if others else None
    with pytest.raises(SystemExit) as stopped:
        bench_tiny("--impls sdpa_math --passes fwd --resume r2", out)
    assert stopped.value.code == 2
    assert f"--resume: expected a run of {out}, {said}, got r2" in " ".join(capsys.readouterr().err.split())
    assert (out.read_text() if out.exists() else None) == before


def test_resume_is_on_the_same_gpu_and_says_what_else_is_new(tmp_path, capsys, monkeypatch):
    out, line = tmp_path / "cpu.csv", "--impls sdpa_math --passes fwd"
    bench_tiny(f"{line} --causal 0", out)
    bench_tiny(f"{line} --resume r1 --commit decaf", out)
    assert "run r1 began with commit c0ffee, and goes on with decaf" in capsys.readouterr().out
    assert [row["commit"] for row in rows_of(out) if row["impl"] == "sdpa_math"] == ["c0ffee", "decaf"]
    monkeypatch.setattr("bench.rows.gpu_name", lambda device: "NVIDIA H100")
    with pytest.raises(SystemExit):
        bench_tiny(f"{line} --resume r1", out)
    assert "--resume: expected the GPU on which r1 began, cpu, got NVIDIA H100" in capsys.readouterr().err
