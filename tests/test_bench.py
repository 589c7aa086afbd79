"""The benchmark's path on the CPU: cells, the gate before the clock, the results file, resuming, tables."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashzoo
from bench import ablation, claims, fp8_error, masks, peers, pictures, plot, readmes, run, runs, tune
from bench.ahead import compile_ahead, compile_jobs
from bench.arguments import parser_of
from bench.cells import PASSES, Cell, cells
from bench.contenders import ENDINGS, Contender, default_impls, fitting, names_with_endings, parted
from bench.progress import progress
from bench.referee import Referee, WrongResultError
from bench.rows import KEY_FIELDS, Results
from flashzoo import cli, timing
from flashzoo.autograd import differentiable
from flashzoo.call.problem import Problem
from flashzoo.reference import dequantized, rotated, standard
from flashzoo.v1 import config as v1_config
from flashzoo.v2 import config as v2_config
from flashzoo.v3 import config as v3_config
from flashzoo.workloads import inputs

COLUMNS = (
    "run,date,commit,gpu,torch,triton,cutlass_dsl,impl,pass,dtype,batch,seqlen_q,seqlen_k,heads,heads_kv,head_dim,causal,mask,density,"
    "ms,ms_p10,ms_p90,tflops,max_err,rms_err,peak_mib,host_us,compile_s,dram_mib,why"
)
TINY = "--device cpu --tokens 128 --hidden 64 --seqlens 64 --head-dims 16 --ms 1 --run r1 --commit c0ffee"


def _bench(options: str, out: Path) -> int:
    return run.main(f"{TINY} {options} --out {out}".split())


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _timed(path: Path) -> list[tuple[str, str, str]]:
    return [(row["impl"], row["pass"], row["causal"]) for row in _rows(path) if row["pass"] != "gemm" and not row["why"]]


def _why(path: Path) -> list[tuple[str, str, str]]:
    return [(row["impl"], row["causal"], row["why"]) for row in _rows(path) if row["why"]]


def doubled(q, k, v, problem, operands):
    """A version that is wrong in every element."""
    out, lse = standard(q, k, v, problem, operands)
    return 2 * out, lse


@pytest.fixture
def wrong():
    spec = flashzoo.Spec(
        name="wrong",
        title="twice the answer",
        paper="none",
        impl=f"{__name__}:doubled",
        cpu_dtypes=("bf16",),
        dtypes=("bf16",),
        features=frozenset({"causal"}),
        backward=frozenset({"causal"}),
    )
    yield flashzoo.register(spec).name
    flashzoo.unregister("wrong")


def test_both_passes_become_rows_of_the_agreed_columns(tmp_path):
    out = tmp_path / "new" / "cpu.csv"
    assert _bench("--impls standard,sdpa_math", out) == 0
    assert out.read_text().splitlines()[0] == COLUMNS
    expected = [(impl, pass_, causal) for pass_ in ("fwd", "bwd") for causal in "01" for impl in ("standard", "sdpa_math")]
    assert _timed(out) == expected
    for row in _rows(out):
        assert (row["run"], row["commit"], row["gpu"], row["torch"]) == ("r1", "c0ffee", "cpu", torch.__version__)
        assert 0 < float(row["ms_p10"]) <= float(row["ms"]) <= float(row["ms_p90"])
        operations = {"gemm": 2 * 256**3, "fwd": 4 * 2 * 4 * 16, "bwd": 10 * 2 * 4 * 16}[row["pass"]]
        pairs = {"gemm": 1, "fwd": 64 * 64, "bwd": 64 * 64}[row["pass"]] if row["causal"] == "0" else 64 * 65 // 2
        assert float(row["tflops"]) == pytest.approx(operations * pairs / float(row["ms"]) / 1e9, rel=1e-3)
    shape = ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "dtype", "mask", "density")
    assert {tuple(row[name] for name in shape) for row in _rows(out) if row["pass"] != "gemm"} == {
        ("2", "64", "64", "4", "4", "16", "bf16", "", "1")
    }
    assert all(0 < float(row["rms_err"]) < float(row["max_err"]) < 0.1 for row in _rows(out) if row["pass"] != "gemm")
    assert all(float(row["compile_s"]) > 0 for row in _rows(out) if row["pass"] != "gemm")
    assert not {row[name] for row in _rows(out) for name in ("peak_mib", "host_us", "dram_mib", "why")} - {""}, "there is no GPU here"
    assert [row["pass"] for row in _rows(out)].count("gemm") == 2


def test_a_wrong_result_gets_no_speed(tmp_path, capsys, wrong):
    out = tmp_path / "cpu.csv"
    assert _bench(f"--impls {wrong},sdpa_math", out) == 1
    assert {impl for impl, _, _ in _timed(out)} == {"sdpa_math"}
    assert "wrong FAILED: WrongResultError: out, elementwise" in capsys.readouterr().out


def test_an_error_in_one_element_of_the_sample_is_seen():
    cell = Cell(Problem(2, 64, 64, 4, 4, 16, "fp32", device="cpu"))
    tensors = inputs(cell.problem)
    referee, result = Referee(cell, tensors), Contender("standard", cell, tensors).result()
    assert float(str(referee.errors("standard", result)["max_err"])) < 1e-5
    result.out[0, 63, 1, 15] += 1e-2
    with pytest.raises(WrongResultError, match="elementwise"):
        referee.errors("standard", result)


@pytest.fixture
def broken(monkeypatch) -> list[Cell]:
    """A peer that can't run: the cells that it was tried on."""
    tried = []

    def attention(problem):
        def call(q, k, v):
            tried.append(problem)
            raise RuntimeError("no such\n  kernel")

        return call

    monkeypatch.setitem(peers.PEERS, "flex", attention)
    return tried


def _forget_libraries() -> None:
    for remembered in (peers._function, peers.missing):
        remembered.cache_clear()


@pytest.fixture
def absent(monkeypatch) -> Iterator[str]:
    """A peer whose library is not there."""
    monkeypatch.setitem(peers._LIBRARIES, "fa3", peers.Library("no_such_library.flash_attn_func", "no-such-library"))
    _forget_libraries()
    yield "fa3"
    _forget_libraries()


def test_what_has_no_result_has_a_row_that_says_why(tmp_path, wrong, broken, absent, monkeypatch):
    def full(problem):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setitem(peers.PEERS, "sdpa_math", full)
    out = tmp_path / "cpu.csv"
    assert _bench(f"--impls v3,{absent},{wrong},flex,sdpa_math,sdpa_cudnn,standard --passes fwd --causal 1", out) == 1
    *others, (last, _, why) = _why(out)
    assert [(impl, why) for impl, _, why in (*others[:2], *others[3:])] == [
        ("v3", "refused: does not run on CPU tensors"),
        ("fa3", "missing: needs no_such_library.flash_attn_func, which is not installed (No module named 'no_such_library')"),
        ("flex", "FAILED: RuntimeError: no such kernel"),
        ("sdpa_math", "out of memory"),
    ]
    assert others[2][0] == wrong and others[2][2].startswith("FAILED: WrongResultError: out, elementwise")
    assert (last, why) == ("sdpa_cudnn", "refused: torch has no CUDNN_ATTENTION kernel for it")
    assert _timed(out) == [("standard", "fwd", "1")]
    results = ("ms", "ms_p10", "ms_p90", "tflops", "max_err", "rms_err", "compile_s")
    assert not {row[name] for row in _rows(out) if row["why"] for name in results} - {""}
    shape = {tuple(row[name] for name in KEY_FIELDS) for row in _rows(out) if row["pass"] != "gemm"}
    assert len(shape) == 1, "they are rows of the same cell"


def test_a_peers_failure_is_not_the_runs(tmp_path, broken):
    assert _bench("--impls standard,flex --passes fwd", tmp_path / "cpu.csv") == 0


def test_resume_finishes_the_cells_that_lack_some_implementations(tmp_path, called):
    out = tmp_path / "cpu.csv"
    _bench("--impls standard --passes fwd --causal 0", out)
    called.clear()
    _bench("--impls standard,sdpa,sdpa_math --passes fwd --resume r1", out)
    expected = [("standard", "0"), ("sdpa", "0"), ("sdpa_math", "0"), ("standard", "1"), ("sdpa", "1"), ("sdpa_math", "1")]
    assert [(impl, causal) for impl, _, causal in _timed(out)] == expected
    before = out.read_text()
    called.clear()
    _bench("--impls standard,sdpa,sdpa_math --passes fwd --resume r1", out)
    assert not called and out.read_text() == before, "nothing was left to do"


def test_resume_tries_again_only_what_was_missing(tmp_path, broken, absent, monkeypatch):
    out, line = tmp_path / "cpu.csv", "--impls standard,v3,flex,fa3 --passes fwd --causal 0"
    _bench(line, out)
    line += " --resume r1"
    assert [impl for impl, _, _ in _why(out)] == ["v3", "flex", "fa3"]
    tried = len(broken)
    _bench(line, out)
    assert len(_rows(out)) == 4 + 2 and len(broken) == tried == 1
    monkeypatch.setitem(peers.PEERS, "fa3", peers.PEERS["sdpa_math"])
    monkeypatch.delitem(peers._LIBRARIES, "fa3")
    _forget_libraries()
    _bench(line, out)
    assert _timed(out) == [("standard", "fwd", "0"), ("fa3", "fwd", "0")] and len(broken) == 1


def test_a_version_whose_package_is_missing_is_tried_again_once_it_is_there(tmp_path):
    needy = dataclasses.replace(flashzoo.versions()["standard"], name="needy", requires=("no_such_package",), auto=())
    out, line = tmp_path / "cpu.csv", "--impls standard,needy --passes fwd --causal 0"
    try:
        for spec, timed in ((needy, ["standard"]), (needy, ["standard"]), (dataclasses.replace(needy, requires=()), ["standard", "needy"])):
            flashzoo.unregister("needy") if "needy" in flashzoo.versions() else None
            flashzoo.register(spec)
            _bench(f"{line} --resume r1" if out.exists() else line, out)
            assert [impl for impl, _, _ in _timed(out)] == timed
            ((impl, _, why),) = _why(out)
            assert impl == "needy" and why.startswith("missing: needs the package 'no_such_package'")
    finally:
        flashzoo.unregister("needy")


def test_a_run_killed_as_it_wrote_is_mended(tmp_path, capsys):
    out, line = tmp_path / "cpu.csv", "--impls standard,sdpa_math --passes fwd --causal 0"
    _bench(line, out)
    whole = out.read_text().splitlines(keepends=True)
    assert [row.split(",")[7] for row in whole] == ["impl", "matmul", "standard", "sdpa_math", "matmul"]
    for kept, left in ((whole[:3], whole[3][:90]), (whole[:3], whole[3][:-1]), ([], whole[0][:20]), ([], "")):
        out.write_text("".join(kept) + left)
        capsys.readouterr()
        _bench(f"{line} --resume r1" if kept else line, out)
        assert [impl for impl, _, _ in _timed(out)] == ["standard", "sdpa_math"]
        assert out.read_text().startswith("".join(kept) or whole[0])
        assert (f"ended within a row, which is cut off: {left}\n" in capsys.readouterr().out) == bool(left)


@pytest.mark.parametrize("text", ["run,date,ms\nold,d,1\n", "run,date,ms\nold,d", "ms,run", "a poem"])
def test_another_file_is_refused_and_left_alone(text, tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    out.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        _bench("--impls sdpa_math", out)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "--out: expected a file with the columns run,date,commit" in said and f"with {text.splitlines()[0]}" in said
    assert out.read_text() == text


def test_another_file_is_refused_before_errors_are_measured(tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    out.write_text("run,date,ms\n")
    with pytest.raises(SystemExit):
        fp8_error.main(["--device", "cpu", "--run", "r1", "--out", str(out)])
    said = capsys.readouterr()
    assert "--out: expected a file with the columns run,date,commit" in said.err and not said.out


def test_what_costs_the_process_its_gpu_ends_the_run_and_is_not_tried_again(tmp_path, broken, monkeypatch, capsys):
    out, line = tmp_path / "cpu.csv", "--impls standard,v3,flex,sdpa_math --passes fwd"
    monkeypatch.setattr(timing.Clock, "lost", property(lambda clock: len(broken) > 0))
    assert _bench(line, out) == 1
    assert _timed(out) == [] and [(impl, causal) for impl, causal, _ in _why(out)] == [("v3", "0"), ("flex", "0")]
    assert "stopped after 1 of 2 cells" in capsys.readouterr().out
    monkeypatch.setattr(timing.Clock, "lost", False)
    monkeypatch.setitem(peers.PEERS, "flex", peers.PEERS["sdpa_math"])
    assert _bench(f"{line} --resume r1", out) == 0
    assert sorted(_timed(out)) == sorted(
        (impl, "fwd", causal) for impl in ("standard", "sdpa_math", "flex") for causal in "01" if (impl, causal) != ("flex", "0")
    )


def test_resume_skips_what_the_run_has(tmp_path):
    out = tmp_path / "cpu.csv"
    _bench("--impls sdpa_math --passes fwd --causal 0", out)
    assert _timed(out) == [("sdpa_math", "fwd", "0")]
    _bench("--impls sdpa_math --passes fwd --resume r1", out)
    assert _timed(out) == [("sdpa_math", "fwd", "0"), ("sdpa_math", "fwd", "1")]
    _bench("--impls sdpa_math --passes fwd --run other", out)
    assert len(_timed(out)) == 4


def test_a_budget_holds_within_a_cell_and_the_rest_is_left_to_resume(tmp_path, monkeypatch, capsys):
    out, line = tmp_path / "cpu.csv", "--impls standard,v3,sdpa_math --passes fwd --causal 0"
    begun = []
    first_call = run.first_call

    def noting(impl, *rest):
        begun.append(impl)
        return first_call(impl, *rest)

    monkeypatch.setattr(run, "first_call", noting)
    monkeypatch.setattr(timing.Clock, "out_of_time", property(lambda clock: clock.deadline < float("inf") and "standard" in begun))
    assert _bench(f"{line} --budget-s 9", out) == 0
    assert begun == ["standard"] and _timed(out) == [] and "9 s are gone; go on with --resume r1" in capsys.readouterr().out
    monkeypatch.undo()
    assert _bench(f"{line} --resume r1", out) == 0
    assert [impl for impl, _, _ in _timed(out)] == ["standard", "sdpa_math"]


def test_nothing_is_timed_after_the_deadline():
    calls = []
    clock = timing.Clock("cpu", time.monotonic() - 1)
    with pytest.raises(timing.OutOfTimeError):
        clock.measure({"a": lambda: calls.append(1)}, 1)
    assert not calls and clock.out_of_time and not timing.Clock("cpu").out_of_time


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    out, measured = tmp_path / "cpu.csv", run.measure

    def interrupted(work, *rest):
        if any(cell.problem.causal for cell in work):
            raise KeyboardInterrupt
        return measured(work, *rest)

    monkeypatch.setattr(run, "measure", interrupted)
    assert cli.main(["bench", *TINY.split(), "--impls", "standard", "--passes", "fwd", "--out", str(out)]) == 130
    assert _timed(out) == [("standard", "fwd", "0")]
    assert "stopped after 1 of 2 cells, interrupted; go on with --resume r1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "--tokens and --hidden: expected small ones on a CPU, such as --tokens 256 --hidden 64 --dtype fp32, got none"),
        (
            "--tokens 65536 --hidden 4096",
            "--budget-s: expected one for so much work, or smaller --tokens and --hidden, got none for more",
        ),
    ],
)
def test_what_would_take_a_cpu_days_is_refused_at_once(line, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["flashzoo.compare"], "PART_SCORES", 1 << 12)
    out = tmp_path / "cpu.csv"
    with pytest.raises(SystemExit) as stopped:
        run.main(["--device", "cpu", "--out", str(out), *line.split()])
    assert stopped.value.code == 2 and not out.exists()
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("others", "said"), [((), "which has none"), (("a", "b"), "which has r1, a, b last")])
def test_resume_is_of_a_run_that_is_there(others, said, tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    for run_id in ("r1", *others) if others else ():
        _bench(f"--impls sdpa_math --passes fwd --causal 0 --run {run_id}", out)
    before = out.read_text() if others else None
    with pytest.raises(SystemExit) as stopped:
        _bench("--impls sdpa_math --passes fwd --resume r2", out)
    assert stopped.value.code == 2
    assert f"--resume: expected a run of {out}, {said}, got r2" in " ".join(capsys.readouterr().err.split())
    assert (out.read_text() if out.exists() else None) == before


def test_resume_is_on_the_same_gpu_and_says_what_else_is_new(tmp_path, capsys, monkeypatch):
    out, line = tmp_path / "cpu.csv", "--impls sdpa_math --passes fwd"
    _bench(f"{line} --causal 0", out)
    _bench(f"{line} --resume r1 --commit decaf", out)
    assert "run r1 began with commit c0ffee, and goes on with decaf" in capsys.readouterr().out
    assert [row["commit"] for row in _rows(out) if row["impl"] == "sdpa_math"] == ["c0ffee", "decaf"]
    monkeypatch.setattr("bench.rows.gpu_name", lambda device: "NVIDIA H100")
    with pytest.raises(SystemExit):
        _bench(f"{line} --resume r1", out)
    assert "--resume: expected the GPU on which r1 began, cpu, got NVIDIA H100" in capsys.readouterr().err


def test_too_little_memory_for_all_at_once_ends_no_run(tmp_path, monkeypatch):
    measured = timing.Clock.measure

    def full(clock, operations, ms_each):
        if "settled" not in operations:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return measured(clock, operations, ms_each)

    monkeypatch.setattr(timing.Clock, "measure", full)
    out = tmp_path / "cpu.csv"
    assert _bench("--impls standard,sdpa_math --passes fwd", out) == 0
    assert _timed(out) == []
    said = "out of memory, with the tensors held of all that is timed in the same turns: ask for fewer"
    assert _why(out) == [(impl, causal, said) for causal in "01" for impl in ("standard", "sdpa_math")]


def test_a_missing_peer_is_named(tmp_path, capsys, absent):
    assert _bench(f"--impls {absent},sdpa_math --passes fwd", tmp_path / "cpu.csv") == 0
    assert capsys.readouterr().out.count("fa3 is missing: needs no_such_library.flash_attn_func") == 1


def test_peers_are_listed_with_their_packages(capsys, absent):
    assert cli.main(["bench", "--list"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(listed) == list(peers.PEERS)
    assert listed["flex"] == listed["sdpa_efficient"] == f"torch {version('torch')}"
    assert listed["fa3"].startswith("needs no_such_library.flash_attn_func, which is not installed")


def test_the_fields_cells_are_36_forward_and_24_backward():
    chosen = cells(parser_of(None).parse_args([]))
    assert [cell.pass_ for cell in chosen] == ["fwd"] * 36 + ["bwd"] * 24
    assert {cell.problem.batch * cell.problem.seqlen_q for cell in chosen} == {16384}
    assert {cell.problem.heads * cell.problem.head_dim for cell in chosen} == {2048}
    few = cells(parser_of(None).parse_args(["--head-dims=128", "--seqlens=512,8192", "--causal=1", "--passes=bwd"]))
    assert [(cell.problem.head_dim, cell.problem.seqlen_q, cell.problem.causal) for cell in few] == [(128, 512, True), (128, 8192, True)]


def test_a_new_version_is_timed_unasked(wrong):
    named = ["fa4", "fa3", "fa2", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex", "xformers"]
    assert default_impls("fwd")[-9:] == [wrong, *named]
    assert wrong in default_impls("bwd")
    assert not {"sdpa", "standard", "blocksparse"} & set(default_impls("bwd"))


def test_a_length_behind_a_name_is_the_only_one(tmp_path):
    out = tmp_path / "cpu.csv"
    options = "--tokens 64 --hidden 16 --seqlens 32,64 --head-dims 16 --causal 1 --passes fwd --impls standard,standard_deterministic@64"
    assert _bench(options, out) == 0
    found = [(row["impl"], row["seqlen_q"]) for row in _rows(out) if row["pass"] == "fwd"]
    assert found == [("standard", "32"), ("standard", "64"), ("standard_deterministic", "64")]


def test_a_backward_run_has_a_fixed_order_at_one_length():
    chosen = {cell: fitting(default_impls("bwd"), cell, False) for cell in cells(_parsed("--passes bwd"))}
    assert {cell.problem.seqlen_q for cell, impls in chosen.items() if "v3_deterministic" in impls} == {8192}
    assert all("v3" in impls for impls in chosen.values())
    others = default_impls("fwd"), default_impls("bwd", masked=True), default_impls("bwd", "fp32")
    assert not [impl for impls in others for impl in impls if "deterministic" in impl]


class FakeGpu:
    """torch.cuda's allocator and queue, as far as `run.costs` asks them."""

    def __init__(self, monkeypatch) -> None:
        self.given, self.most, self.busy = 100 << 20, 0, True
        for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def synchronize(self, device) -> None:
        self.busy = False

    def reset_peak_memory_stats(self, device) -> None:
        self.most = self.given

    def memory_allocated(self, device) -> int:
        return self.given

    def max_memory_allocated(self, device) -> int:
        return self.most

    def call(self) -> None:
        assert not self.busy, "an operation was still running"
        self.busy, self.most = True, max(self.most, self.given + (24 << 20))
        time.sleep(1e-3)


def test_memory_and_host_time_are_of_one_call_on_an_idle_gpu(monkeypatch):
    gpu, clock = FakeGpu(monkeypatch), timing.Clock("cpu")
    gpu.most = 900 << 20  # of something before
    assert run.costs(clock, gpu.call) == {}
    clock.cuda = True
    costs = run.costs(clock, gpu.call)
    assert list(costs) == ["peak_mib", "host_us"] and costs["peak_mib"] == "24"
    assert 1e3 <= float(str(costs["host_us"])) < 1e5


def test_slow_calls_are_few():
    calls = []
    assert timing.Clock("cpu").host_us(lambda: calls.append(time.sleep(0.06))) >= 6e4
    assert len(calls) == 1


@pytest.mark.gpu
def test_a_gpus_rows_say_what_a_call_costs(tmp_path):
    out = tmp_path / "gpu.csv"
    options = "--tokens 4096 --hidden 256 --seqlens 2048 --head-dims 64 --causal 0 --ms 1 --impls v2,sdpa_math,sdpa_flash"
    assert run.main(f"{options} --workers 2 --out {out}".split()) == 0
    found = {(row["pass"], row["impl"]): row for row in _rows(out) if row["pass"] != "gemm"}
    assert len(found) == 6
    out_mib = 4096 * 256 * 2 / 2**20
    for (pass_, impl), row in found.items():
        assert 1 < float(row["host_us"]) < 1e5 and 0 < float(row["compile_s"]) < 600
        least = out_mib * (3 if pass_ == "bwd" else 1)
        scores = 2 * 4 * 2048 * 2048 * 2 / 2**20
        assert least <= float(row["peak_mib"]) and (float(row["peak_mib"]) >= scores) == (impl == "sdpa_math")


def test_what_is_compiled_ahead_is_timed(capsys):
    cell = Cell(Problem(1, 16, 16, 1, 1, 16, dtype="fp16", device="cpu"))
    other = dataclasses.replace(cell, problem=dataclasses.replace(cell.problem, dtype="bf16", out_dtype=None))
    seconds = compile_ahead({cell: ["v2", "standard"], other: ["v2"]}, workers=1)
    assert list(seconds) == [("v2", cell)] and 0 < seconds["v2", cell] < 60, "v2 takes no bf16 here, and standard compiles nothing"
    assert "[1/1, 0 s left] v2, fwd d16" in capsys.readouterr().out
    clock = timing.Clock("cpu")
    ahead, in_run = run.measure({cell: ["v2", "standard"]}, clock, 1, {("v2", cell): 123.4})[cell]
    assert ahead["compile_s"] == "123" and 0 < float(str(in_run["compile_s"])) < 60


def test_a_terminal_shows_the_time_left(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _bench("--impls standard,sdpa_math --passes fwd,bwd", tmp_path / "cpu.csv") == 0
    said = capsys.readouterr().out
    assert all(text in said for text in ("measuring", "100%", "0:00:00")) and said.count("TFLOP/s") == 4


def test_other_outputs_say_the_time_left(monkeypatch, capsys):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress(4, "measuring") as say:
        for line in "ab":
            now += 7
            say(line)
    assert capsys.readouterr().out == "[1/4, 21 s left] a\n[2/4, 14 s left] b\n"


def test_repeats_are_spread_over_the_rounds():
    order = []
    operations: dict[str, timing.Operation] = {name: partial(order.append, name) for name in "ab"}
    times = timing.Clock("cpu").turns(operations, {"a": 2, "b": 4})
    rounds = ["".join(order)[i:j] for i, j in ((0, 1), (1, 3), (3, 4), (4, 6))]
    assert ["".join(sorted(one)) for one in rounds] == ["b", "ab", "b", "ab"]
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 4}


def test_what_has_few_repeats_is_not_all_in_the_same_rounds():
    order = []
    repeats = {**dict.fromkeys("abcdefgh", 10), "-": 120}
    operations: dict[str, timing.Operation] = {name: partial(order.append, name) for name in repeats}
    times = timing.Clock("cpu").turns(operations, repeats)
    assert {name: len(taken) for name, taken in times.items()} == repeats
    longest = max(map(len, "".join(order).split("-")))
    assert longest <= 4, "of eight"


def test_masked_and_dense_cells_of_a_size_are_timed_in_the_same_turns(tmp_path, monkeypatch):
    together = []
    measured = timing.Clock.measure

    def noting(clock, operations, ms_each):
        together.append(list(operations))
        return measured(clock, operations, ms_each)

    monkeypatch.setattr(timing.Clock, "measure", noting)
    out = tmp_path / "cpu.csv"
    assert _masked_bench("--masks dense,ones,local/2 --impls standard,sdpa", out) == 0
    found = [{(cell.pass_, cell.mask, cell.problem.causal, impl) for cell, impl in keys} for keys in together if keys != ["settled"]]
    cells = [("", False), ("", True), ("ones", False), ("local/2", False)]
    assert found == [{(pass_, *of, impl) for of in cells for impl in ("standard", "sdpa")} for pass_ in ("fwd", "bwd")]
    together.clear()
    assert _bench("--impls standard,sdpa --passes fwd", out) == 0
    assert [len(keys) for keys in together if keys != ["settled"]] == [2, 2], "without masks each cell by itself"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--tokens 128", "--tokens without --hidden"),
        ("--impls v7", "v7"),
        ("--impls v2,v7@64", "v7"),
        ("--impls v2@long", "v2@long"),
        ("--passes sideways", "sideways"),
        ("--dtype e4m3 --passes bwd", "bwd"),
        ("--tokens 100 --hidden 64 --seqlens 64", "100"),
        ("--hidden 32 --tokens 64", "32"),
        ("--hidden 192 --tokens 256 --masks ones", "192"),
        ("--head-dims 64,x", "'x'"),
        ("--seqlens 0", "'0'"),
        ("--causal 2", "2"),
        ("--ms -3", "'-3'"),
        ("--budget-s soon", "'soon'"),
        ("--workers 1.5", "'1.5'"),
        ("--head-dims 48", "--head-dims 48"),
        ("--seqlens 3,5 --masks ones", "--seqlens 3,5"),
        ("--head-dims 64,96 --masks ones", "96"),
        pytest.param("--device cuda", "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_a_malformed_command_line_is_refused(line, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(line.split())
    assert stopped.value.code == 2
    said = capsys.readouterr().err.partition("error: ")[2]
    assert "expected" in said and named in said.partition("got ")[2]
    assert any(word in said for word in line.split() if word.startswith("--")), "which argument"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_means_what_flashzoo_means(causal):
    problem = Problem(1, 32, 48, 4, 2, 16, "fp32", causal=causal, device="cpu")
    q, k, v, _ = inputs(problem)
    with pytest.MonkeyPatch.context() as patch:
        from torch.nn.attention.flex_attention import flex_attention

        patch.setattr(peers, "_compiled_flex", lambda: flex_attention)  # compiling for the CPU would need a C++ compiler
        out = peers.peer("flex", problem)(q, k, v)
    torch.testing.assert_close(out, flashzoo.attention(q, k, v, causal=causal, version="standard"), rtol=0, atol=1e-5)


def test_sdpa_peers_refuse_another_alignment():
    with pytest.raises(NotImplementedError, match="top-left"):
        peers.peer("sdpa_math", Problem(1, 32, 48, 2, 2, 16, causal=True))


def test_fp8_inputs_become_rows_of_their_dtype(tmp_path):
    out = tmp_path / "cpu.csv"
    assert _bench("--impls standard --dtype e4m3", out) == 0
    assert [(row["impl"], row["dtype"], row["pass"]) for row in _rows(out)] == [
        ("matmul", "bf16", "gemm"),
        ("matmul", "e4m3", "gemm"),
        *[("standard", "e4m3", "fwd")] * 2,
        ("matmul", "bf16", "gemm"),
        ("matmul", "e4m3", "gemm"),
    ]


def test_a_version_is_timed_from_16_bits_through_fp8(tmp_path):
    out = tmp_path / "cpu.csv"
    assert _bench("--impls standard,standard_end_to_end --passes fwd --causal 0", out) == 0
    fields = [(row["impl"], row["dtype"]) for row in _rows(out) if row["pass"] == "fwd"]
    assert fields == [("standard", "bf16"), ("standard_end_to_end", "bf16")]
    errors = {row["impl"]: float(row["rms_err"]) for row in _rows(out) if row["pass"] == "fwd"}
    assert errors["standard_end_to_end"] > 3 * errors["standard"], "it was not quantised"


def test_fp8_errors_are_no_excuse_in_16_bits():
    cell = Cell(Problem(2, 64, 64, 4, 4, 16, "bf16", device="cpu"))
    tensors = inputs(cell.problem)
    referee, result = Referee(cell, tensors), Contender("standard_end_to_end", cell, tensors).result()
    referee.errors("standard_end_to_end", result)
    with pytest.raises(WrongResultError):
        referee.errors("standard", result)


def test_only_what_takes_the_dtype_is_timed_unasked():
    assert "v3_fp8" in default_impls("fwd", "e4m3") and "v3_fp8" not in default_impls("fwd")
    assert default_impls("fwd", "e4m3")[-2:] == list(peers.FP8_PEERS)
    assert not [impl for pass_ in PASSES for impl in default_impls(pass_) if impl.endswith(tuple(ENDINGS))]
    assert "v3_fp8_end_to_end" in names_with_endings()


@pytest.fixture
def called(monkeypatch) -> list[tuple[str, bool]]:
    """Version and `deterministic` of every call."""
    attention, calls = flashzoo.attention, []

    def recorded(*tensors, version, deterministic=False, **options):
        calls.append((version, deterministic))
        return attention(*tensors, version=version, deterministic=deterministic, **options)

    monkeypatch.setattr(flashzoo, "attention", recorded)
    return calls


def test_a_fixed_order_is_timed_under_its_own_name(tmp_path, called):
    out = tmp_path / "cpu.csv"
    assert _bench("--impls standard,standard_deterministic --passes bwd --causal 0", out) == 0
    assert _timed(out) == [("standard", "bwd", "0"), ("standard_deterministic", "bwd", "0")]
    assert set(called) == {("standard", False), ("standard", True)}
    assert {"v3_deterministic", "standard_deterministic"} <= set(names_with_endings())


def test_a_version_whose_own_name_has_an_ending_is_that_version():
    spec = flashzoo.register(dataclasses.replace(flashzoo.versions()["standard"], name="mine_deterministic", auto=()))
    try:
        assert parted(spec.name) == ("mine_deterministic", {})
        assert parted(f"{spec.name}_deterministic") == ("mine_deterministic", {"deterministic": True})
    finally:
        flashzoo.unregister(spec.name)


def half_of_dk(dout, dlse, q, k, v, out, lse, problem, operands):
    """A backward pass that is wrong in one gradient."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        dq, dk, dv = torch.autograd.grad(standard(*leaves, problem, operands)[0], leaves, dout)
    return dq, dk / 2, dv


attention_with_half_of_dk = differentiable(standard, half_of_dk)


@pytest.fixture
def wrong_backward():
    spec = flashzoo.Spec(
        name="wrong_backward",
        title="half of one gradient",
        paper="none",
        impl=f"{__name__}:attention_with_half_of_dk",
        cpu_dtypes=("bf16",),
        dtypes=("bf16",),
        features=frozenset({"causal", "deterministic"}),
        backward=frozenset({"causal", "deterministic"}),
    )
    yield flashzoo.register(spec).name
    flashzoo.unregister("wrong_backward")


def test_a_wrong_gradient_gets_no_speed_however_it_is_asked_for(tmp_path, capsys, wrong_backward):
    out = tmp_path / "cpu.csv"
    assert _bench(f"--impls {wrong_backward},{wrong_backward}_deterministic,sdpa_math --passes fwd,bwd --causal 0", out) == 1
    right = [(impl, "fwd", "0") for impl in (wrong_backward, f"{wrong_backward}_deterministic", "sdpa_math")]
    assert _timed(out) == [*right, ("sdpa_math", "bwd", "0")]
    said = capsys.readouterr().out
    assert all(f"{impl} FAILED: WrongResultError: dk" in said for impl in (wrong_backward, f"{wrong_backward}_deterministic"))


@pytest.mark.parametrize("name", ["fa4", "sdpa_cudnn", "flex"])
def test_a_peers_gradients_are_held_to_the_oracle_too(name, monkeypatch):
    """Right or wrong by what is behind the peer's name."""
    factor = 1.0

    def attention(problem):
        def call(q, k, v):
            return flashzoo.attention(q, torch.lerp(k.detach(), k, factor), v, causal=problem.causal, version="standard")

        return call

    monkeypatch.setitem(peers.PEERS, name, attention)
    cell = Cell(Problem(2, 64, 64, 4, 4, 16, "bf16", causal=True, device="cpu", grad=True))
    tensors = inputs(cell.problem)
    Referee(cell, tensors).errors(name, Contender(name, cell, tensors).result())
    factor = 0.5
    with pytest.raises(WrongResultError, match="dk"):
        Referee(cell, tensors).errors(name, Contender(name, cell, tensors).result())


def test_peers_refuse_a_dtype_that_is_not_theirs():
    with pytest.raises(NotImplementedError, match="e4m3 is taken by fa3 and cudnn_fp8, got sdpa_math"):
        peers.peer("sdpa_math", Problem(1, 32, 32, 2, 2, 16, "e4m3"))
    with pytest.raises(NotImplementedError, match="takes e4m3, got bf16"):
        peers.peer("cudnn_fp8", Problem(1, 32, 32, 2, 2, 16))


def test_libraries_refuse_32_bits():
    for name in ("fa2", "fa3", "fa4"):
        with pytest.raises(NotImplementedError, match="takes fp16 and bf16, got fp32"):
            peers.peer(name, Problem(1, 32, 32, 2, 2, 16, "fp32"))


def _fake_library(monkeypatch, **modules) -> list[dict]:
    """Put these modules, by name, in place of a library's. Returns what its function is called with besides q, k and v."""
    asked = []

    def function(q, k, v, **options):
        asked.append(options)
        if q.ndim == 5:  # as xformers has groups of heads
            assert q.shape[2:4] == k.shape[2:4] == v.shape[2:4], "heads of keys are to be repeated by the caller"
            assert k.stride(3) == v.stride(3) == 0, "with no copy"
            out = flashzoo.attention(*(x.flatten(2, 3) for x in (q, k, v)), causal=options["attn_bias"] is not None, version="standard")
            return out.unflatten(2, q.shape[2:4])
        causal = options["causal"] if "causal" in options else options["attn_bias"] is not None
        return flashzoo.attention(q, k, v, causal=causal, version="standard")

    for name, attributes in modules.items():
        given = {attribute: value or function for attribute, value in attributes.items()}
        monkeypatch.setitem(sys.modules, name.replace("__", "."), SimpleNamespace(**given))
    _forget_libraries()
    return asked


@pytest.fixture
def fresh_libraries() -> Iterator[None]:
    yield
    _forget_libraries()


class BottomRight:
    """What xformers calls causal, aligned as ours."""


LIBRARIES = {
    "fa2": {"flash_attn": {"flash_attn_func": None}},
    "fa3": {"flash_attn_interface": {"flash_attn_func": None}},
    "fa4": {"flash_attn__cute": {"flash_attn_func": None}},
    "xformers": {
        "xformers__ops": {"memory_efficient_attention": None},
        "xformers__ops__fmha__attn_bias": {"LowerTriangularFromBottomRightMask": BottomRight},
    },
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads_kv", "grad"), [(4, True), (2, False)])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_called_as_it_wants(name, heads_kv, grad, causal, monkeypatch, fresh_libraries):
    asked = _fake_library(monkeypatch, **LIBRARIES[name])
    assert peers.missing(name) is None
    cell = Cell(Problem(2, 40, 72, 4, heads_kv, 16, "bf16", causal=causal, device="cpu", grad=grad))
    tensors = inputs(cell.problem)
    Referee(cell, tensors).errors(name, Contender(name, cell, tensors).result())
    (options,) = asked
    if name == "xformers":
        assert set(options) == {"attn_bias"} and isinstance(options["attn_bias"], BottomRight) == causal
    else:
        assert options == {"causal": causal}


def test_flash_attn_without_its_function_is_missing(monkeypatch, fresh_libraries):
    """As where flash-attn-4 alone is installed, which lives inside the name."""
    _fake_library(monkeypatch, flash_attn={})
    assert "needs flash_attn.flash_attn_func, which is not installed" in str(peers.missing("fa2"))


class FakeCudnn:
    """As much of cuDNN's frontend as one FP8 graph needs: it notes what it is asked, and computes out with torch."""

    class data_type:
        FP8_E4M3, FLOAT, BFLOAT16, HALF = "e4m3", "fp32", "bf16", "fp16"

    class heur_mode:
        A, FALLBACK = "a", "fallback"

    class diagonal_alignment:
        TOP_LEFT = "top left"

    class Node:
        def __init__(self, **attributes):
            self.attributes, self.output = attributes, False

        def __getattr__(self, name):
            assert name.startswith("set_")

            def remember(value):
                self.attributes[name.removeprefix("set_")] = value
                return self

            return remember

    def create_handle(self):
        return "handle"

    def set_stream(self, handle, stream):
        self.stream = stream

    def pygraph(self, **options):
        assert options["handle"] == "handle"
        return self

    def tensor(self, **attributes):
        return self.Node(**attributes)

    def sdpa_fp8(self, **asked):
        self.asked = asked
        self.outs = [self.Node() for _ in range(3)]
        return self.outs[0], None, *self.outs[1:]

    def build(self, modes):
        assert all("output" in node.attributes and node.attributes["data_type"] for node in self.outs)

    def get_workspace_size(self):
        return 0

    def execute(self, pack, workspace, handle):
        assert set(pack) == {node for node in self.asked.values() if isinstance(node, self.Node)} | set(self.outs)
        for node, x in pack.items():
            view = x.transpose(1, 2) if x.shape[1] > 1 else x
            assert (list(view.shape), list(view.stride())) == (node.attributes["dim"], node.attributes["stride"])
        q, k, v = (pack[self.asked[name]] for name in "qkv")
        causal = self.asked.get("right_bound") == 0
        out = flashzoo.attention(q, k, v, causal=causal, softmax_scale=self.asked["attn_scale"], version="standard")
        pack[self.outs[0]].copy_(out)


@pytest.mark.parametrize("causal", [False, True])
def test_cudnns_graph_is_given_what_it_asks_for(causal, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    _forget_libraries()
    cell = Cell(Problem(2, 48, 48, 4, 2, 16, "e4m3", causal=causal, device="cpu"))
    tensors = inputs(cell.problem)
    contender = Contender("cudnn_fp8", cell, tensors)
    assert contender.run()[0].dtype == torch.float8_e4m3fn
    Referee(cell, tensors).errors("cudnn_fp8", contender.result())
    _forget_libraries()
    peers._cudnn_handle.cache_clear()


@pytest.mark.parametrize("name", fp8_error.WAYS)
def test_quantised_inputs_times_their_descales_are_the_inputs(name):
    way = fp8_error.WAYS[name]
    q, k, v, _ = inputs(Problem(2, 200, 300, 4, 2, 64, "fp32", device="cpu"), values="fp8_paper")
    tensors, descales = way(q, k, v)
    q_found, k_found, v_found = (dequantized(x, descale) for x, descale in zip(tensors, descales, strict=True))
    if way.smooth:
        k = k - k.mean(1, keepdim=True)
    turn = rotated(torch.eye(64)) if way.rotate else torch.eye(64)
    for found, x in ((q_found @ turn.T.double(), q), (k_found @ turn.T.double(), k), (v_found, v)):
        assert 0.02 < fp8_error.rmse(found, x.double()) / float(x.square().mean().sqrt()) < 0.035  # e4m3's three bits


@pytest.mark.parametrize("size", [16, 48, 64, 96])
def test_the_rotation_is_orthogonal(size):
    turn = rotated(torch.eye(size))
    torch.testing.assert_close(turn @ turn.T, torch.eye(size))


def test_the_error_table_shows_what_rotation_does_and_long_sums_lose(capsys):
    line = "--device cpu --head-dim 64 --seqlen 1024 --queries 128 --heads 4 --long 256,32768"
    assert fp8_error.main(line.split()) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    found = {cells[0]: cells[1:3] for cells in lines}
    assert float(found["rotation"][0]) < 0.8 * float(found["per-tensor scales"][0])
    assert float(found["one level"][0]) < 1.1 * float(found["two levels"][0])
    assert float(found["one level"][1]) > 1.1 * float(found["two levels"][1])
    assert float(found["two levels"][1]) < 1.1 * float(found["two levels"][0])


def test_errors_are_rows_of_the_results_file(tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    line = f"--device cpu --head-dim 64 --seqlen 256 --queries 64 --heads 1 --long 256 --run e1 --commit c0ffee --out {out}"
    assert fp8_error.main(line.split()) == 0
    first = capsys.readouterr().out.split("RMSE over")[0]
    shown = {cells[0]: cells[1:3] for cells in (line.strip("| ").split(" | ") for line in first.splitlines() if line.startswith("|"))}
    rows = _rows(out)
    assert {(row["pass"], row["run"], row["head_dim"], row["tflops"]) for row in rows} == {
        ("error_fp8_paper", "e1", "64", ""),
        ("error_randn", "e1", "64", ""),
    }
    found = {(row["impl"], row["dtype"]): float(row["rms_err"]) for row in rows if row["pass"] == "error_fp8_paper"}
    assert found["standard", "fp16"] == pytest.approx(float(shown["16 bits: fp16"][0]), rel=1e-2)
    assert found["standard_rotation_block_scales", "e4m3"] == pytest.approx(float(shown["rotation, block scales"][0]), rel=1e-2)
    assert len(rows) == 2 * (len(shown) - 2), "one for each line and kind of inputs, the head and its rule apart"


def test_an_errors_name_is_its_kernels_and_way():
    def impl(name: str) -> tuple[object, object]:
        row = fp8_error.row(name, 1e-3, Problem(1, 256, 256, 1, 1, 64), "fp8_paper", hopper=True)
        return row["impl"], row["dtype"]

    assert impl("16 bits: bf16") == ("v3", "bf16")
    assert impl("per-tensor scales") == ("v3_fp8_per_tensor_scales", "e4m3")
    assert impl('precision="fp8"') == ("v3_fp8_end_to_end", "e4m3")
    assert impl("standard attention, per-tensor scales") == ("standard_per_tensor_scales", "e4m3")
    assert impl("cudnn_fp8, no scales") == ("cudnn_fp8", "e4m3")
    assert impl("rotation, block scales") == (claims.QUANTIZED[0], "e4m3")


def test_one_level_is_a_version_of_its_own():
    with ablation.registered(ablation.ONE_LEVEL_SPEC):
        spec = flashzoo.versions()[ablation.ONE_LEVEL]
        assert spec.dtypes == ("e4m3",) and not spec.auto and not spec.quantizes
    assert ablation.ONE_LEVEL not in flashzoo.versions()


def _row(run_id: str, impl: str, pass_: str, seqlen: int, tflops: float) -> dict[str, str]:
    fixed = {
        "gpu": "NVIDIA H200",
        "torch": "2",
        "triton": "3",
        "commit": "c",
        "date": "d",
        "dtype": "bf16",
        "head_dim": "64",
        "causal": "1",
        "mask": "",
    }
    sizes = {"batch": str(16384 // seqlen), "seqlen_q": str(seqlen)}
    return {**fixed, **sizes, "run": run_id, "impl": impl, "pass": pass_, "tflops": str(tflops)}


RESULTS = [
    _row("old", "v2", "fwd", 512, 999),
    _row("new", "matmul", "gemm", 8192, 780),
    *(_row("new", impl, "fwd", s, t) for impl, s, t in [("v2", 512, 200), ("flex", 512, 100), ("v2", 1024, 450), ("flex", 1024, 300)]),
]


def test_rounds_have_orders_of_their_own():
    order = []
    operations: dict[str, timing.Operation] = {name: partial(order.append, name) for name in "abc"}
    timing.Clock("cpu").turns(operations, dict.fromkeys("abc", 40))
    rounds = [tuple(order[i : i + 3]) for i in range(0, 120, 3)]
    assert all(set(one) == set("abc") for one in rounds) and len(set(rounds)) > 3


def test_tables_show_the_last_run_alone():
    ablation = {**_row("ablation", "v3_serial", "fwd", 8448, 998), "batch": "4"}  # not at the field's sizes
    text = plot.report([*RESULTS, ablation], Path("h200.csv"))
    assert "998" not in text
    assert "| 64 | yes | 512 | **200** | 100 |" in text
    assert "| v2 |  | 1.73 (worst 1.50) |" in text
    assert "matmul in the same run: 780" in text
    assert "999" not in text
    assert "Backward" not in text


def test_fp8_runs_have_tables_of_their_own():
    fp8 = [{**_row("fp8", impl, "fwd", 512, t), "dtype": "e4m3"} for impl, t in [("v3_fp8", 600), ("cudnn_fp8", 400)]]
    matmuls = [{**_row("fp8", "matmul", "gemm", 8192, t), "dtype": dtype} for dtype, t in [("bf16", 770), ("e4m3", 1340)]]
    whole = [_row("whole", impl, "fwd", 512, t) for impl, t in [("v3", 300), ("v3_fp8_end_to_end", 450)]]
    ablation = [{**_row("later", impl, "fwd", 512, 999), "dtype": "e4m3"} for impl in ("v3_fp8", "v3_fp8_one_level")]
    text = plot.report([*RESULTS, *matmuls, *fp8, *whole, *ablation], Path("h200.csv"))
    assert "one_level" not in text and "999" not in text
    sixteen, rest = text.split("### Forward on FP8 inputs, e4m3")
    e4m3, end_to_end = rest.split("### Forward from 16 bits through FP8, quantisation included, bf16")
    assert "| 64 | yes | 512 | **200** | 100 |" in sixteen and "a bf16 matmul in the same run: 780" in sixteen
    assert "| 64 | yes | 512 | **600** | 400 |" in e4m3 and "an e4m3 matmul in the same run: 1340" in e4m3
    assert "| 64 | yes | 512 | 300 | **450** |" in end_to_end and "| v3_fp8_end_to_end | 1.50 (worst 1.50) |  |" in end_to_end


def test_tables_go_between_the_markers_and_nowhere_else(tmp_path):
    readme, results = tmp_path / "README.md", tmp_path / "h200.csv"
    readme.write_text("before\n<!-- results:begin -->\nstale\n<!-- results:end -->\nafter\n")
    with results.open("w", newline="") as file:
        writer = csv.DictWriter(file, RESULTS[0])
        writer.writeheader()
        writer.writerows(RESULTS)
    line = ["--csv", str(results), "--readme", str(readme), "--plots"]
    assert plot.main(line) == 0
    once = readme.read_text()
    assert once.startswith("before\n") and once.endswith("\nafter\n") and "stale" not in once and "**200**" in once
    assert plot.main(line) == 0
    assert readme.read_text() == once
    assert (tmp_path / "h200_fwd.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="results:begin"):
        readmes.place("no markers", "results", "section")


@pytest.mark.parametrize(("version", "table"), [("v1", v1_config.HOPPER), ("v2", v2_config.HOPPER)])
def test_the_tuner_tries_what_the_table_holds(version, table):
    for (kernel, width, *_), tiles in table.items():
        assert tiles in list(tune.candidates(version, kernel, width))


@pytest.mark.parametrize("table", [v3_config.HOPPER, v3_config.HOPPER_SHORT])
def test_the_tuner_tries_what_v3s_tables_hold(table):
    for (width, width_v), tiles in table.items():
        assert width != width_v or tiles in list(tune.candidates("v3", "forward", width))


def test_the_tuner_replaces_one_entry_and_puts_it_back():
    problem = Problem(1, 40, 40, 1, 1, 64, dtype="fp16", device="cpu")
    before, other = dict(v2_config.HOPPER), v2_config.Tiles(128, 32, 8, 1)
    with tune.entry("v2", "dq", problem, other):
        changed = {key for key, tiles in v2_config.HOPPER.items() if tiles != before[key]}
        assert changed == {("dq", 64, False)} and v2_config.HOPPER["dq", 64, False] == other
    assert before == v2_config.HOPPER


def test_the_tuner_times_right_candidates(monkeypatch):
    some = [v2_config.Tiles(64, 64, 4, 1), v2_config.Tiles(32, 32, 4, 1)]
    monkeypatch.setattr(tune, "candidates", lambda *_: iter(some))
    cell = Cell(Problem(1, 40, 40, 1, 1, 64, dtype="fp16", device="cpu"))
    found = tune.tune("v2", "forward", cell, timing.Clock("cpu"), 1.0)
    assert sorted(map(str, some)) == sorted(str(tiles) for _, tiles in found)
    assert all(ms > 0 for ms, _ in found) and found == sorted(found, key=lambda pair: pair[0])


MASKED = "--device cpu --dtype fp16 --tokens 256 --hidden 16 --head-dims 16 --ms 1 --run r1 --commit c0ffee"


@pytest.fixture
def hurried(monkeypatch):
    """Triton's interpreter is slow."""
    monkeypatch.setattr(timing, "MIN_REPEATS", 1)


def _parsed(line: str) -> argparse.Namespace:
    return parser_of(None).parse_args(["--device", "cpu", *line.split()])


def _masked_bench(options: str, out: Path) -> int:
    return run.main(f"{MASKED} {options} --out {out}".split())


def test_masked_cells_become_rows_beside_dense_ones(tmp_path, hurried):
    out = tmp_path / "cpu.csv"
    assert _masked_bench("--masks dense,ones,local/2,causal --causal 0 --impls v2,blocksparse", out) == 0
    found = [(row["impl"], row["pass"], row["mask"], row["density"]) for row in _rows(out) if row["pass"] != "gemm"]
    densities = {"ones": "1", "local/2": "0.5", "causal": "0.501953"}
    masked = [("blocksparse", mask, density) for mask, density in densities.items()]
    assert found == [(impl, pass_, *of) for pass_ in ("fwd", "bwd") for impl, *of in (("v2", "", "1"), *masked)]
    for row in _rows(out):
        if row["pass"] != "gemm":
            operations = {"fwd": 4, "bwd": 10}[row["pass"]] * 256 * 256 * 16 * float(row["density"])
            assert float(row["tflops"]) == pytest.approx(operations / float(row["ms"]) / 1e9, rel=1e-3)


def test_resume_tells_masks_apart(tmp_path, hurried):
    out = tmp_path / "cpu.csv"
    _masked_bench("--masks ones --passes fwd --impls blocksparse", out)
    _masked_bench("--masks dense,ones,local/2 --causal 0 --passes fwd --impls standard,blocksparse --resume r1", out)
    assert [row["mask"] for row in _rows(out) if row["impl"] == "blocksparse"] == ["ones", "local/2"]
    assert [row["mask"] for row in _rows(out) if row["impl"] == "standard"] == ["", "ones", "local/2"]


def test_a_peer_without_block_masks_is_named(tmp_path, capsys):
    assert _masked_bench("--masks local/2 --passes fwd --impls sdpa_math", tmp_path / "cpu.csv") == 0
    assert "sdpa_math refused: block masks are taken by flex and fa4, got sdpa_math" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["--masks randum/2", "--masks local", "--masks ones --dtype e4m3 --passes fwd"])
def test_masks_that_are_not_there_are_refused(line, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(line.split())
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_run_with_masks_is_the_issues():
    chosen = cells(_parsed("--masks default"))
    assert len(chosen) == 2 * 2 * 2 * (2 + len(masks.NAMES))
    sizes = [(128, 16384, 16), (128, 65536, 4), (64, 16384, 32), (64, 65536, 8)]
    assert list(dict.fromkeys((c.problem.head_dim, c.problem.seqlen_q, c.problem.heads) for c in chosen)) == sizes
    assert {cell.problem.batch for cell in chosen} == {1}
    assert not [cell for cell in chosen if cell.mask and cell.problem.causal]
    assert {"v3", "blocksparse", "v2", "flex", "fa4"} <= set(default_impls("bwd", masked=True))
    few = cells(_parsed("--masks butterfly --tokens 1024 --hidden 128 --seqlens 256,512"))
    assert {(c.problem.batch, c.problem.seqlen_q) for c in few} == {(4, 256), (2, 512)}


PATTERNS = ("ones", "causal", "window200", "butterfly", "random/2", "random/4", "local/2", "local/4")


@pytest.mark.parametrize("seqlen", [1024, 1000])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_its_mask(name, seqlen):
    pattern = masks.pattern(name, seqlen, "cpu")
    dense = pattern.mask.to_dense()
    assert torch.equal(pattern.of_queries(torch.arange(seqlen)), dense)
    assert pattern.visible == pytest.approx(float(dense.double().mean()))
    if "/" in name:
        kept = 8 // int(name.partition("/")[2])
        assert set((pattern.blocks[1].sum(1)).tolist()) == {kept}, "every row keeps as many"
    for by_columns in (False, True):
        for (counts, numbers), blocks in zip(pattern.lists(by_columns), pattern.blocks, strict=True):
            for i, row in enumerate(blocks.mT if by_columns else blocks):
                assert numbers[0, 0, i, : counts[0, 0, i]].tolist() == row.nonzero().flatten().tolist()


def test_a_window_sees_so_many_keys():
    seen = masks.pattern("window200", 1024, "cpu").mask.to_dense()[0, 0]
    assert seen[1000].nonzero().flatten().tolist() == list(range(801, 1001))


@pytest.mark.parametrize("grad", [False, True], ids=["fwd", "bwd"])
def test_every_block_has_its_part_in_what_is_checked(grad):
    """A result that lacks one block, whichever, or has one too many, gets no speed."""
    cell = Cell(Problem(1, 512, 512, 1, 1, 16, "fp16", device="cpu", grad=grad), "random/2")
    tensors = inputs(cell.problem)
    referee, contender = Referee(cell, tensors), Contender("standard", cell, tensors)
    referee.errors("standard", contender.result())
    assert cell.pattern is not None
    blocks = cell.pattern.blocks[1]
    for at in range(16):
        other = blocks.clone().flatten()
        other[at] = ~other[at]
        mask = flashzoo.BlockMask.from_blocks(other.view(4, 4), 512)
        contender.function = partial(flashzoo.attention, version="standard", block_mask=mask)
        if grad:
            contender.out = contender.function(*contender.leaves)
        result = contender.result()
        if grad:  # the gradients alone
            result = dataclasses.replace(result, out=Contender("standard", cell, tensors).result().out)
        with pytest.raises(WrongResultError):
            referee.errors("standard", result)


def test_the_queries_of_a_long_cell_are_from_everywhere():
    queries = Cell(Problem(1, 65536, 65536, 4, 4, 128, device="cpu")).queries
    assert queries is not None and len(queries) == 1024
    assert (queries // 128).unique().numel() == 512 and (queries % 64).unique().numel() == 64
    assert Cell(Problem(1, 16384, 16384, 4, 4, 128, device="cpu")).queries is None


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_dense_cell_is_checked_on_some_queries(causal, monkeypatch):
    monkeypatch.setattr("bench.cells.WHOLE", 128)
    monkeypatch.setattr("bench.cells.QUERIES", 64)
    cell = Cell(Problem(1, 256, 256, 2, 2, 16, "fp16", causal=causal, device="cpu", grad=True))
    tensors = inputs(cell.problem)
    referee, contender = Referee(cell, tensors), Contender("standard", cell, tensors)
    result = contender.result()
    referee.errors("standard", result)
    assert result.dk is not None and cell.queries is not None
    result.dk[0, 0, 0, 0] += 1
    with pytest.raises(WrongResultError, match="dk"):
        referee.errors("standard", result)
    result = contender.result()
    result.out[0, cell.queries[5], 1, 3] += 0.1
    with pytest.raises(WrongResultError, match="out"):
        referee.errors("standard", result)


@pytest.mark.parametrize("name", PATTERNS)
def test_flex_is_given_the_same_mask(name, monkeypatch):
    given = []
    monkeypatch.setattr(peers, "_compiled_flex", lambda: lambda q, k, v, block_mask, enable_gqa: given.append(block_mask) or q)
    pattern, problem = masks.pattern(name, 1024, "cpu"), Problem(1, 1024, 1024, 2, 2, 16, "fp16", device="cpu")
    q, k, v, _ = inputs(problem)
    peers.peer("flex", problem, pattern)(q, k, v)
    (mask,) = given
    i, j = torch.arange(1024)[:, None], torch.arange(1024)
    lists = ((mask.full_kv_num_blocks, mask.full_kv_indices), (mask.kv_num_blocks, mask.kv_indices))
    full, some = (_of_lists(*of) for of in lists)
    assert torch.equal(full | some & mask.mask_mod(None, None, i, j), pattern.mask.to_dense()[0, 0])
    lists = ((mask.full_q_num_blocks, mask.full_q_indices), (mask.q_num_blocks, mask.q_indices))
    full, some = (_of_lists(*of).mT for of in lists)
    assert torch.equal(full | some & mask.mask_mod(None, None, i, j), pattern.mask.to_dense()[0, 0])


def _of_lists(counts: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """bool, elements, of lists of blocks of 128 by 128."""
    blocks = torch.zeros(numbers.shape[2], numbers.shape[3], dtype=torch.bool)
    for i, count in enumerate(counts[0, 0].tolist()):
        blocks[i, numbers[0, 0, i, :count].long()] = True
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.filterwarnings("ignore")
def test_flex_compiles_once_for_all_masks_of_a_shape(monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.nn.attention.flex_attention import flex_attention

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=counter, dynamic=False, fullgraph=True)
    monkeypatch.setattr(peers, "_compiled_flex", lambda: compiled)
    problem = Problem(1, 256, 256, 1, 1, 16, "fp32", device="cpu")
    q, k, v, _ = inputs(problem)
    for name in ("causal", "ones", "random/2", "window100", "butterfly"):
        peers.peer("flex", problem, masks.pattern(name, 256, "cpu"))(q, k, v)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["random/2", "causal", "window200"])
def test_fa4_is_given_the_same_mask(name, monkeypatch):
    given = {}
    tensors = namedtuple(
        "Tensors", ["mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size"], defaults=[None, None, None]
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", SimpleNamespace(BlockSparseTensorsTorch=tensors))
    monkeypatch.setattr(peers, "_function", lambda name: lambda q, k, v, **options: (given.update(options) or q, None))
    monkeypatch.setattr(peers, "_fa4_band", lambda left: left)
    pattern, problem = masks.pattern(name, 1024, "cpu"), Problem(1, 1024, 1024, 2, 2, 16, "fp16", device="cpu")
    q, k, v, _ = inputs(problem)
    peers.peer("fa4", problem, pattern)(q, k, v)
    band = torch.ones(()).bool() if name == "random/2" else masks.in_band(torch.arange(1024), 1024, given["mask_mod"])
    for argument, turned in (("block_sparse_tensors", False), ("block_sparse_tensors_bwd", True)):
        lists = given[argument]
        assert lists.block_size == (128, 128)
        partial, full = _of_lists(lists.mask_block_cnt, lists.mask_block_idx), _of_lists(lists.full_block_cnt, lists.full_block_idx)
        partial, full = (partial.mT, full.mT) if turned else (partial, full)
        assert torch.equal(full | partial & band, pattern.mask.to_dense()[0, 0])


def test_what_is_compiled_ahead_shares_kernels():
    todo = cells(_parsed("--masks default --head-dims 128 --passes fwd"))
    impls = ["v3", "v2", "blocksparse", "flex", "fa4", "sdpa_flash"]
    jobs = compile_jobs({cell: fitting(impls, cell, True) for cell in todo})
    counts = {impl: [len(group) for name, group in jobs if name == impl] for impl in impls}
    assert {impl: len(groups) for impl, groups in counts.items()} == {
        **{"v3": 5, "v2": 2, "blocksparse": 3},  # full, causal; plain, causal, window
        **{"flex": 6, "fa4": 5, "sdpa_flash": 0},  # of each length full, causal, any mask
    }
    assert sum(counts["v3"]) == len(todo) and sum(counts["blocksparse"]) == len(todo) - 4


def _sparse_rows(tmp_path: Path) -> list[dict[str, str]]:
    """A made-up run: every block-sparse kernel takes its share of the dense kernel's time and a tenth more."""
    path = tmp_path / "made.csv"
    results = Results(path, "sparse", "cpu", "c0ffee")
    line = "--masks dense,ones,causal,random/2,random/4,local/2,butterfly --causal 0 --head-dims 64 --tokens 2048 --hidden 64"
    chosen = [cell for size in ("2048", "1024") for cell in cells(_parsed(f"{line} --seqlens {size}"))]
    for cell in chosen:
        dense = {"v1": 40.0, "v2": 20.0, "v3": 10.0, "flex": 30.0, "fa4": 12.0}
        masked = {
            impl: dense[of] * cell.density * 1.1 for impl, of in (("v3", "v3"), ("blocksparse", "v2"), ("flex", "flex"), ("fa4", "fa4"))
        }
        times = masked if cell.mask else dense
        numbers = {"density": f"{cell.density:.6g}", "tflops": 1, "ms_p10": 1, "ms_p90": 1, "max_err": 0, "rms_err": 0}
        results.append([{**cell.fields, **numbers, "impl": impl, "ms": f"{ms:.5g}"} for impl, ms in times.items()])
    return _rows(path)


def test_the_block_sparse_run_has_a_table_and_no_other_has_its_rows(tmp_path):
    rows = _sparse_rows(tmp_path)
    sparse = runs.sparse_run(rows)
    assert sparse is not None and runs.last_run([{**row, "batch": "8"} for row in rows], "fwd") == []
    size = "fwd", 64, 2048
    assert sparse.speedup(size, "random/4", "blocksparse") == pytest.approx(4 / 1.1, rel=1e-3), "over v2"
    assert sparse.speedup(size, "random/4", "v1") is None
    assert (sparse.tokens, sorted(sparse.butterfly["bwd", 64])) == (2048, [1024, 2048])
    table = plot.sparse_table(sparse).splitlines()
    assert "| random/4 | 25.00% | 64 | 2048 | fwd | - | - | **2.75** (3.64x) | 8.25 (3.64x) | 3.3 (3.64x) | 5.5 (3.64x) |" in table
    assert "| none | 100.00% | 64 | 2048 | fwd | 40 | 20 | **10** | 30 | 12 | - |" in table
    assert "| v3 | 1.20 (worst 1.20) |" in plot.sparse_ratios(sparse)
    section = plot.report(rows, tmp_path / "h200.csv")
    assert "### Block-sparse, bf16" in section and "### Forward" not in section
    assert "h200_blocksparse.png" in section and "50.0% at 1k, 31.2% at 2k" in section


def test_the_block_sparse_run_has_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = pictures.draw(_sparse_rows(tmp_path), tmp_path / "h200.csv")
    assert [path.name for path in drawn] == ["h200_blocksparse.png", "h200_butterfly.png"]
    assert all(path.stat().st_size > 10_000 for path in drawn)
    assert runs.sparse_run([{"mask": "", "run": "r"}]) is None
