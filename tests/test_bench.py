"""The benchmark's path on the CPU: cells, the gate before the clock, rows, and what is asked for wrongly."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from importlib.metadata import version
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from bench_runs import bench_tiny, parsed, rows_of, timed_in, why_in

import flashzoo
from bench import contenders, models, peers, run
from bench.ahead import compile_ahead
from bench.arguments import parser_of
from bench.cells import PASSES, Cell, cells
from bench.contenders import ENDINGS, Contender, default_impls, fitting, names_with_endings, parted
from bench.progress import progress
from bench.referee import Referee, WrongResultError
from bench.rows import KEY_FIELDS, read
from bench.settled import alone, meter, settled_columns
from flashzoo import cli, timing
from flashzoo.autograd import differentiable
from flashzoo.call.problem import Problem
from flashzoo.inputs import inputs
from flashzoo.reference import standard

COLUMNS = (
    "run,date,commit,gpu,torch,triton,cutlass_dsl,impl,pass,dtype,batch,seqlen_q,seqlen_k,heads,heads_kv,head_dim,"
    "causal,mask,density,ms,ms_p10,ms_p90,tflops,max_err,rms_err,peak_mib,host_us,compile_s,dram_mib,why,lengths,window,head_dim_v,model,settled_ms,joules,score,gpus,dtype_kv"
)


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
    assert bench_tiny("--impls standard,sdpa_math", out) == 0
    assert out.read_text().splitlines()[0] == COLUMNS
    expected = [
        (impl, pass_, causal) for pass_ in ("fwd", "bwd") for causal in "01" for impl in ("standard", "sdpa_math")
    ]
    assert timed_in(out) == expected
    for row in rows_of(out):
        assert (row["run"], row["commit"], row["gpu"], row["torch"]) == ("r1", "c0ffee", "cpu", torch.__version__)
        assert 0 < float(row["ms_p10"]) <= float(row["ms"]) <= float(row["ms_p90"])
        operations = {"gemm": 2 * 256**3, "fwd": 4 * 2 * 4 * 16, "bwd": 10 * 2 * 4 * 16}[row["pass"]]
        pairs = {"gemm": 1, "fwd": 64 * 64, "bwd": 64 * 64}[row["pass"]] if row["causal"] == "0" else 64 * 65 // 2
        assert float(row["tflops"]) == pytest.approx(operations * pairs / float(row["ms"]) / 1e9, rel=1e-3)
    shape = ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "dtype", "mask", "density")
    assert {tuple(row[name] for name in shape) for row in rows_of(out) if row["pass"] != "gemm"} == {
        ("2", "64", "64", "4", "4", "16", "bf16", "", "1")
    }
    assert all(0 < float(row["rms_err"]) < float(row["max_err"]) < 0.1 for row in rows_of(out) if row["pass"] != "gemm")
    assert all(float(row["compile_s"]) > 0 for row in rows_of(out) if row["pass"] != "gemm")
    assert not {row[name] for row in rows_of(out) for name in ("peak_mib", "host_us", "dram_mib", "why")} - {""}, (
        "there is no GPU here"
    )
    assert [row["pass"] for row in rows_of(out)].count("gemm") == 2


def test_a_wrong_result_gets_no_speed(tmp_path, capsys, wrong):
    out = tmp_path / "cpu.csv"
    assert bench_tiny(f"--impls {wrong},sdpa_math", out) == 1
    assert {impl for impl, _, _ in timed_in(out)} == {"sdpa_math"}
    assert "wrong FAILED: WrongResultError: out, elementwise" in capsys.readouterr().out


def test_an_error_in_one_element_of_the_sample_is_seen():
    cell = Cell(Problem(2, 64, 64, 4, 4, 16, "fp32", device="cpu"))
    tensors = inputs(cell.problem)
    referee, result = Referee(cell, tensors), Contender("standard", cell, tensors).result()
    assert float(str(referee.errors("standard", result)["max_err"])) < 1e-5
    result.out[0, 63, 1, 15] += 1e-2
    with pytest.raises(WrongResultError, match="elementwise"):
        referee.errors("standard", result)


def test_what_has_no_result_has_a_row_that_says_why(tmp_path, wrong, broken_peer, absent_peer, monkeypatch):
    def full(problem):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setitem(peers.PEERS, "sdpa_math", full)
    out = tmp_path / "cpu.csv"
    assert (
        bench_tiny(f"--impls v3,{absent_peer},{wrong},flex,sdpa_math,sdpa_cudnn,standard --passes fwd --causal 1", out)
        == 1
    )
    *others, (last, _, why) = why_in(out)
    assert [(impl, why) for impl, _, why in (*others[:2], *others[3:])] == [
        ("v3", "refused: does not run on CPU tensors"),
        (
            "fa3",
            "missing: needs no_such_library.flash_attn_func, "
            "which is not installed (No module named 'no_such_library')",
        ),
        ("flex", "FAILED: RuntimeError: no such kernel"),
        ("sdpa_math", "out of memory"),
    ]
    assert others[2][0] == wrong and others[2][2].startswith("FAILED: WrongResultError: out, elementwise")
    assert (last, why) == ("sdpa_cudnn", "refused: torch has no CUDNN_ATTENTION kernel for it")
    assert timed_in(out) == [("standard", "fwd", "1")]
    results = ("ms", "ms_p10", "ms_p90", "tflops", "max_err", "rms_err", "compile_s")
    assert not {row[name] for row in rows_of(out) if row["why"] for name in results} - {""}
    shape = {tuple(row[name] for name in KEY_FIELDS) for row in rows_of(out) if row["pass"] != "gemm"}
    assert len(shape) == 1, "they are rows of the same cell"


def test_a_peers_failure_is_not_the_runs(tmp_path, broken_peer):
    assert bench_tiny("--impls standard,flex --passes fwd", tmp_path / "cpu.csv") == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "",
            "--tokens and --hidden: expected small ones on a CPU, "
            "such as --tokens 256 --hidden 64 --dtype fp32, got none",
        ),
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


def test_too_little_memory_for_all_at_once_ends_no_run(tmp_path, monkeypatch):
    measured = timing.Clock.measure

    def full(clock, operations, ms_each):
        if "settled" not in operations:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return measured(clock, operations, ms_each)

    monkeypatch.setattr(timing.Clock, "measure", full)
    out = tmp_path / "cpu.csv"
    assert bench_tiny("--impls standard,sdpa_math --passes fwd", out) == 0
    assert timed_in(out) == []
    said = "out of memory, with the tensors held of all that is timed in the same turns: ask for fewer"
    assert why_in(out) == [(impl, causal, said) for causal in "01" for impl in ("standard", "sdpa_math")]


def test_a_missing_peer_is_named(tmp_path, capsys, absent_peer):
    assert bench_tiny(f"--impls {absent_peer},sdpa_math --passes fwd", tmp_path / "cpu.csv") == 0
    assert capsys.readouterr().out.count("fa3 is missing: needs no_such_library.flash_attn_func") == 1


def test_peers_are_listed_with_their_packages(capsys, absent_peer):
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
    assert [(cell.problem.head_dim, cell.problem.seqlen_q, cell.problem.causal) for cell in few] == [
        (128, 512, True),
        (128, 8192, True),
    ]


def test_a_new_version_is_timed_unasked(wrong):
    named = ["fa4", "fa3", "fa2", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex", "xformers"]
    assert default_impls("fwd")[-9:] == [wrong, *named]
    assert wrong in default_impls("bwd")
    assert not {"sdpa", "standard", "blocksparse", "decode"} & set(default_impls("bwd"))
    assert not {"sdpa", "blocksparse", "decode"} & set(default_impls("fwd"))


def test_a_length_behind_a_name_is_the_only_one(tmp_path):
    out = tmp_path / "cpu.csv"
    options = (
        "--tokens 64 --hidden 16 --seqlens 32,64 --head-dims 16 --causal 1 --passes fwd --impls "
        "standard,standard_deterministic@64"
    )
    assert bench_tiny(options, out) == 0
    found = [(row["impl"], row["seqlen_q"]) for row in rows_of(out) if row["pass"] == "fwd"]
    assert found == [("standard", "32"), ("standard", "64"), ("standard_deterministic", "64")]


def test_models_are_cells_with_their_windows_and_widths_of_values(tmp_path, monkeypatch):
    """Each shape once; what takes no windows says so, and where a time alone is asked for it has a column."""
    tiny = models.Model(Problem(1, 48, 64, 2, 1, 16, causal=True, window=(20, None), head_dim_v=8))
    monkeypatch.setattr("bench.cells.MODELS", {"tiny": tiny, "its-like": tiny})
    args = parsed("--models all")
    args.models = ["tiny", "its-like"]
    monkeypatch.setattr("bench.arguments.MODELS", {"tiny": tiny, "its-like": tiny})
    assert [cell.model for cell in cells(args)] == ["tiny", "tiny"]
    out = tmp_path / "r.csv"
    line = "--device cpu --models all --dtype fp32 --passes fwd --ms 1 --settled-ms 1 --commit c0ffee"
    assert run.main(f"{line} --impls standard,sdpa_math --out {out}".split()) == 0
    standard, peer = (row for row in rows_of(out) if row["model"])
    assert (standard["model"], standard["window"], standard["head_dim_v"]) == ("tiny", "20:", "8")
    assert float(standard["settled_ms"]) > 0 and not standard["joules"]
    assert "windows are taken by" in peer["why"]


def test_every_model_has_a_version_of_linear_memory_on_hopper():
    linear = [contenders.declared(name) for name, spec in flashzoo.versions().items() if spec.memory == "linear"]
    for name, model in models.MODELS.items():
        problem = dataclasses.replace(model.problem, device="cuda", arch=90, grad="bwd" in model.passes)
        assert any(not spec.unsupported(problem) for spec in linear), name


@pytest.mark.gpu
def test_a_call_alone_has_a_time_and_draws_power():
    """How long it is no test can say of a GPU that others use too."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    each, joules = alone(lambda: a @ a, timing.Clock("cuda"), 400, meter())
    assert each > 2 * 4096**3 / 1e12 and (joules is None or joules > 50e-3 * each), "under 50 W"


def test_a_host_that_is_held_up_lengthens_no_call_alone(monkeypatch):
    seconds = iter([0.0, 1.0, 2.0, 2.5, 50.0, 51.0, 52.0, 1000.0, 1001.0])
    monkeypatch.setattr("bench.settled.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    assert alone(lambda: None, timing.Clock("cpu"), 1e6, None) == (1000.0, None)


def test_clocks_that_drift_favour_nobody_alone(monkeypatch):
    """Whoever is at the same speed has the same time, whatever its place, while all grow slower by as much a visit."""
    at = count(1)
    monkeypatch.setattr("bench.settled.alone", lambda run, clock, ms, energy: (run() * (100 + next(at)), 3.0))
    timed = dict.fromkeys(("v3", "fa3", "fa4"), lambda: 2.0)
    found = settled_columns(timed, {"v3": 1, "fa3": 2, "fa4": 1}, timing.Clock("cpu"), 1)
    assert found == {
        "v3": {"settled_ms": "209", "joules": "3"},
        "fa3": {"settled_ms": "104.5", "joules": "1.5"},
        "fa4": {"settled_ms": "209", "joules": "3"},
    }
    assert settled_columns({}, {}, timing.Clock("cpu"), 1) == {}


def test_what_is_far_behind_the_fastest_is_not_timed_alone_as_well(tmp_path, monkeypatch):
    assert run.near({"v3": 1.0, "fa3": 1.9, "v2": 2.1, "fa4": 2.1}) == {"v3", "fa3"}
    assert run.near({"v3": 5.0, "v2": 4.0, "fa3": 1.0, "fa4": 1.1}) == {"v2", "fa3", "fa4"}
    monkeypatch.setattr("bench.run.FAR", 0.0)
    out = tmp_path / "cpu.csv"
    assert bench_tiny("--impls standard,sdpa,sdpa_math --passes fwd --settled-ms 1", out) == 0
    timed = [(row["causal"], row["impl"] == "sdpa_math") for row in rows_of(out) if row["settled_ms"]]
    assert sorted(timed) == [("0", False), ("0", True), ("1", False), ("1", True)]


def test_a_backward_run_has_a_fixed_order_at_one_length():
    chosen = {cell: fitting(default_impls("bwd"), cell, False) for cell in cells(parsed("--passes bwd"))}
    assert {cell.problem.seqlen_q for cell, impls in chosen.items() if "v3_deterministic" in impls} == {8192}
    assert all("v3" in impls for impls in chosen.values())
    others = default_impls("fwd"), default_impls("bwd", masked=True), default_impls("bwd", "fp32")
    assert not [impl for impls in others for impl in impls if "deterministic" in impl]


@pytest.mark.gpu
def test_what_is_only_compiled_has_no_rows(tmp_path):
    out = tmp_path / "gpu.csv"
    line = f"--tokens 4096 --hidden 256 --seqlens 2048 --head-dims 64 --impls v2 --workers 1 --compile-only --out {out}"
    assert run.main(line.split()) == 0 and not out.exists()


@pytest.mark.gpu
def test_a_gpus_rows_say_what_a_call_costs(tmp_path):
    out = tmp_path / "gpu.csv"
    options = (
        "--tokens 4096 --hidden 256 --seqlens 2048 --head-dims 64 --causal 0 --ms 1 --impls v2,sdpa_math,sdpa_flash"
    )
    assert run.main(f"{options} --workers 2 --out {out}".split()) == 0
    found = {(row["pass"], row["impl"]): row for row in rows_of(out) if row["pass"] != "gemm"}
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
    assert list(seconds) == [("v2", cell)] and 0 < seconds["v2", cell] < 60, (
        "v2 takes no bf16 here, and standard compiles nothing"
    )
    assert "[1/1, 0 s left] v2, fwd d16" in capsys.readouterr().out
    clock = timing.Clock("cpu")
    ahead, in_run = run.measure({cell: ["v2", "standard"]}, clock, 1, {("v2", cell): 123.4})[cell]
    assert ahead["compile_s"] == "123" and 0 < float(str(in_run["compile_s"])) < 60


def test_a_terminal_shows_the_time_left(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert bench_tiny("--impls standard,sdpa_math --passes fwd,bwd", tmp_path / "cpu.csv") == 0
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
        ("--compile-only --device cpu --tokens 64 --hidden 64", "--device cpu"),
        ("--compile-only --decode --device cuda", "--decode"),
        ("--compile-only --workers 0 --device cuda", "--workers 0"),
        ("--head-dims 48", "--head-dims 48"),
        ("--seqlens 3,5 --masks ones", "--seqlens 3,5"),
        ("--head-dims 64,96 --masks ones", "96"),
        pytest.param(
            "--device cuda", "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
        ),
    ],
)
def test_a_malformed_command_line_is_refused(line, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(line.split())
    assert stopped.value.code == 2
    said = capsys.readouterr().err.partition("error: ")[2]
    assert "expected" in said and named in said.partition("got ")[2]
    assert any(word in said for word in line.split() if word.startswith("--")), "which argument"


def test_fp8_inputs_become_rows_of_their_dtype(tmp_path):
    out = tmp_path / "cpu.csv"
    assert bench_tiny("--impls standard --dtype e4m3", out) == 0
    assert [(row["impl"], row["dtype"], row["pass"]) for row in rows_of(out)] == [
        ("matmul", "bf16", "gemm"),
        ("matmul", "e4m3", "gemm"),
        *[("standard", "e4m3", "fwd")] * 2,
        ("matmul", "bf16", "gemm"),
        ("matmul", "e4m3", "gemm"),
    ]


def test_a_version_is_timed_from_16_bits_through_fp8(tmp_path):
    out = tmp_path / "cpu.csv"
    assert bench_tiny("--impls standard,standard_end_to_end --passes fwd --causal 0", out) == 0
    fields = [(row["impl"], row["dtype"]) for row in rows_of(out) if row["pass"] == "fwd"]
    assert fields == [("standard", "bf16"), ("standard_end_to_end", "bf16")]
    errors = {row["impl"]: float(row["rms_err"]) for row in rows_of(out) if row["pass"] == "fwd"}
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
    assert {"v3_fp8_end_to_end", "v3_fp8_fast_accum"} <= {*names_with_endings()}


def test_fast_accum_is_timed_under_its_own_name_and_held_to_its_own_yardstick(tmp_path):
    out = tmp_path / "cpu.csv"
    line = "--dtype e4m3 --impls standard,standard_fast_accum --passes fwd --causal 0"
    assert bench_tiny(line, out) == 0
    assert timed_in(out) == [("standard", "fwd", "0"), ("standard_fast_accum", "fwd", "0")]
    q, k, v = (torch.ones(1, n, 1, 16).to(torch.float8_e4m3fn) for n in (1, 1 << 15, 1 << 15))
    cell = Cell(Problem(1, 1, 1 << 15, 1, 1, 16, "e4m3", device="cpu"))
    referee = Referee(cell, (q, k, v, torch.ones(1, 1, 1, 16)))
    half = Contender("standard_fast_accum", cell, (q, k, v, torch.ones(1, 1, 1, 16))).result()
    assert referee.errors("standard_fast_accum", half)
    with pytest.raises(WrongResultError):
        referee.errors("standard", half)


def test_a_fixed_order_is_timed_under_its_own_name(tmp_path, versions_called):
    out = tmp_path / "cpu.csv"
    assert bench_tiny("--impls standard,standard_deterministic --passes bwd --causal 0", out) == 0
    assert timed_in(out) == [("standard", "bwd", "0"), ("standard_deterministic", "bwd", "0")]
    assert set(versions_called) == {("standard", False), ("standard", True)}
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
    assert (
        bench_tiny(
            f"--impls {wrong_backward},{wrong_backward}_deterministic,sdpa_math --passes fwd,bwd --causal 0", out
        )
        == 1
    )
    right = [(impl, "fwd", "0") for impl in (wrong_backward, f"{wrong_backward}_deterministic", "sdpa_math")]
    assert timed_in(out) == [*right, ("sdpa_math", "bwd", "0")]
    said = capsys.readouterr().out
    assert all(
        f"{impl} FAILED: WrongResultError: dk" in said for impl in (wrong_backward, f"{wrong_backward}_deterministic")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "must be a results file, got one without a column 'run'"),
        ("run,impl,ms\nr1,v2,0.1\nr1,only\n", "line 3: expected a value for each of its columns"),
    ],
)
def test_what_is_no_results_file_is_told(text, message, tmp_path):
    (tmp_path / "some.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path / "some.csv")
