"""`flashzoo list | explain | compare | check | bench | report`, and the table of `compare`."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import io
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import pytest
import torch

import flashzoo
from flashzoo import Problem
from flashzoo.accuracy import Check
from flashzoo.cli import main
from flashzoo.compare import Interrupted, compare_workload, expected_s
from flashzoo.comparison import TENSORS, Comparison, Row
from flashzoo.gpu import peak_tflops
from flashzoo.timing import Timing
from flashzoo.workloads import workload
from flashzoo_suite.support import ROOT, in_fresh_process, toy

TINY = [
    "--seq-len",
    "24",
    "--batch-size",
    "1",
    "--num-heads",
    "2",
    "--head-dim",
    "16",
    "--dtype",
    "fp32",
    "--device",
    "cpu",
]
WRONG = """
import flashzoo
from flashzoo.reference import standard

def attention(q, k, v, problem, operands):
    out, lse = standard(q, k, v, problem, operands)
    return out * 1.01, lse

flashzoo.register(flashzoo.Spec(name="one_percent_off", title="wrong", paper="none", impl=f"{__name__}:attention",
    dtypes=("fp16",), cpu_dtypes=("fp16",), features=frozenset({"causal", "lse"}),
    backward=frozenset({"causal", "lse"})))
"""


@pytest.fixture
def wrong_variant(tmp_path):
    path = tmp_path / "one_percent_off.py"
    path.write_text(WRONG)
    return path


@pytest.fixture
def registered():
    """Register specs for one test."""
    names = []

    def add(spec):
        names.append(flashzoo.register(spec).name)

    yield add
    for name in names:
        flashzoo.unregister(name)


@pytest.fixture
def own_variant(tmp_path, monkeypatch):
    """A file that registers `own`, which is undone, and what `main` leaves for processes that it starts."""
    monkeypatch.setenv("FLASHZOO_VARIANTS", "")  # not deleted: what was not there would not be taken back
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "own_variant.py"
    path.write_text(WRONG.replace("one_percent_off", "own").replace("1.01", "1").replace('"fp16"', '"fp32"'))
    yield path
    sys.modules.pop("own_variant", None)
    flashzoo.unregister("own")


def failing(q, k, v, problem, operands):
    raise RuntimeError("out of luck")


def doubled(q, k, v, problem, operands):
    out, lse = flashzoo.attention(q, k, v, version="standard", return_lse=True, softmax_scale=problem.scale)
    return 2 * out, lse


def interrupted(q, k, v, problem, operands):
    raise KeyboardInterrupt


def test_list_names_every_version(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}: {spec.title}" in text for name, spec in flashzoo.versions().items())


@pytest.mark.parametrize(
    "arguments", [["list"], ["explain"], ["compare", "--versions", "own,standard"]], ids=lambda words: words[0]
)
def test_every_command_takes_a_variants_file(arguments, own_variant, capsys):
    command, *options = arguments
    size = [] if command == "list" else TINY if command == "compare" else TINY[:-2]
    assert main([command, str(own_variant), *size, *options]) == 0
    assert "own" in capsys.readouterr().out


def test_bench_and_report_take_a_variants_file(own_variant, tmp_path, monkeypatch):
    results, page = tmp_path / "own.csv", tmp_path / "own.html"
    size = (
        "--device cpu --dtype fp32 --tokens 64 --hidden 32 --head-dims 16 --ms 1 --passes fwd "
        f"--causal 1 --out {results}"
    )
    assert main(["bench", str(own_variant), "--impls", "own,standard", *size.split()]) == 0
    assert [row["impl"] for row in csv.DictReader(results.open())] == ["matmul", "own", "standard", "matmul"]
    pytest.importorskip("bokeh")
    monkeypatch.setattr("bench.choose.GRIDS", {})
    assert main(["report", str(own_variant), "--csv", str(results), "-o", str(page)]) == 0
    assert '<th scope="col">own</th>' in page.read_text()


def test_a_variant_is_there_in_processes_that_a_command_starts(own_variant, capsys):
    assert main(["list", str(own_variant)]) == 0
    code = f"import sys; sys.path.append({str(ROOT / 'tests')!r}); import flashzoo; print(*flashzoo.versions())"
    assert "own" in in_fresh_process(code).split()


def test_results_of_a_variant_need_a_file_of_their_own(own_variant, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", str(own_variant), "--impls", "own,standard", "--device", "cpu"])
    assert stop.value.code == 2
    assert "--out: expected a file of your own for own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, "absent.py', which is not there"),
        ("notes.txt", "", "expected a Python file, whose name ends with .py, got"),
        ("idle.py", "", "registered no version"),
        ("json.py", "", "can't be imported as 'json'"),
    ],
)
def test_a_file_that_is_no_variant(name, text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["list", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    """As if SIGPIPE had ended it, which is what other tools let happen."""
    command = f"{sys.executable} -m flashzoo list | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_explain_of_a_gpu_that_is_not_there(capsys):
    size = [
        "--seq-len",
        "4096",
        "--head-dim",
        "128",
        "--num-heads",
        "16",
        "--batch-size",
        "8",
        "--dtype",
        "bf16",
        "--causal",
    ]
    assert main(["explain", "--arch", "90", *size]) == 0
    expected = "v3 takes batch 8, seqlen 4096, heads 16, head_dim 128, bf16, causal, on sm_90"
    assert capsys.readouterr().out.startswith(expected)


def test_explain_of_values_of_another_width(capsys):
    assert main(["explain", "--arch", "90", "--head-dim", "192", "--head-dim-v", "128", "--dtype", "bf16"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("v3 takes ") and "head_dim 192/128, bf16" in text
    assert "does not support v's head_dim different from q's" in text


def test_explain_where_nothing_can(capsys):
    assert main(["explain", "--arch", "90", "--seq-len", "64", "--window", "8", "0", "--version", "v1"]) == 1
    assert "does not support window_size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compare", *TINY, "--versions", "v9"], "v9"),
        (["explain", "--version", "v9"], "got 'v9'"),
        (["compare", *TINY, "--num-heads-kv", "3"], "must be a multiple"),
        (["check", "v9"], "v9"),
        (["check", "nowhere.py"], "not there"),
        (["compare", *TINY[:-1], "cuda:99"], "cuda:99"),
    ],
)
def test_bad_input_is_exit_code_2_and_a_sentence(arguments, text, capsys):
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["compare", "--seq-len", "-4"],
        ["compare", "--dtype", "int8"],
        ["compare", "--seed", str(2**63)],
        ["list", "--extra"],
    ],
    ids=str,
)
def test_bad_usage_is_exit_code_2(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_a_table_on_the_cpu_has_a_line_for_each_version_and_what_says_something_there(capsys):
    assert main(["compare", *TINY, "--causal", "--backward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    header = next(line for line in lines if line.startswith("version")).split()
    assert header == ["version", "result", "ran", "on", "budget", "out", "dq", "fwd", "ms", "bwd", "ms"]
    assert [line.split()[0] for line in lines if " ok " in line] == [
        "decode",
        "v2",
        "v1",
        "blocksparse",
        "sdpa",
        "standard",
    ]
    assert lines.count("v3, v3_fp8 can't: does not run on CPU tensors") == 1


MEASURED = Comparison(
    Problem(8, 4096, 4096, 16, 16, 128, causal=True, grad=True, arch=90),
    (
        Row("v3_fp8", "", "can't", ("takes dtype e4m3, got bf16", "does not support window_size")),
        *(
            Row(
                *(name, "", "ok", (), "GPU", (Check("out", "largest", 0.3, 1.0), Check("dq", "largest", 0.2, 0.4))),
                *(dict.fromkeys(("out", "lse", "dq", "dk", "dv"), (1.25e-3, 1e-4)), {}),
                *(
                    Timing(0.83, 0.82, 0.85, 50),
                    Timing(123.4, 122.0, 125.0, 9),
                    795.0,
                    12.2,
                    83.0,
                    1.2,
                    81 * 10**9,
                    3e9,
                ),
            )
            for name in ("v3", "blocksparse")
        ),
    ),
    {"device": "NVIDIA H200"},
)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 136, 200])
def test_a_table_fits_and_loses_its_least_important_columns_first(width):
    lines = MEASURED.text(width).splitlines()
    header = next(line for line in lines if line.startswith("version"))
    assert max(map(len, lines)) <= width
    assert "fwd ms" in header and [line for line in lines if line.startswith("blocksparse  ok")]
    expected = {"TFLOP/s": 60, "memory": 80, "dq": 100, "% of peak": 136, "HBM by formula": 200}
    assert {name: name in header for name in expected} == {name: width >= least for name, least in expected.items()}
    assert "ran on" not in header, "all of them on one GPU"
    told = " ".join(" ".join(lines).split())
    left_out = re.search(r"not in \d+ columns: (.*) \(CSV and JSON have all\)$", told)
    assert {name: left_out is None or name not in left_out[1].split(", ") for name in ("dq", "HBM by formula")} == {
        name: width >= expected[name] for name in ("dq", "HBM by formula")
    }
    errors = ", ".join(name for name in header.split() if name in TENSORS)
    assert f"(flashzoo/accuracy.py). {errors}: largest errors" in told if errors else "largest errors" not in told
    assert sum("v3_fp8" in line for line in lines) == 1
    assert "v3_fp8 can't: takes dtype e4m3, got bf16 (and 1 more)" in " ".join(" ".join(lines).split())


def test_a_legend_speaks_of_what_is_there():
    text = " ".join(MEASURED.text(20).split())
    assert "budget:" not in text and "ms: medians" not in text and "not in 20 columns" in text


def test_the_text_of_a_comparison_is_80_columns_wide_and_a_terminals_its_own(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert str(MEASURED) == MEASURED.text(80) != MEASURED.text(200)
    monkeypatch.setattr(sys.modules["flashzoo.cli"], "compare_workload", lambda *args, **how: MEASURED)
    for isatty, width in ((False, 80), (True, 200)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda isatty=isatty: isatty)
        assert main(["compare", *TINY]) == 0
        assert capsys.readouterr().out == MEASURED.text(width) + "\n"


def test_compare_refuses_what_would_take_a_cpu_too_long_and_says_what_would_do(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["flashzoo.compare"], "PART_SCORES", 1 << 12)
    size = "--seq-len 65536 --batch-size 8 --num-heads 16 --head-dim 128 --causal --dtype bf16 --backward --device cpu"
    assert main(["compare", *size.split()]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"on CPU, would take about \d+ (hours|days) there, longer than budget_s=300; what takes seconds: batch 1", said
    )
    does = Problem(1, 256, 256, 2, 2, 128, dtype="fp16", grad=True, device="cpu")
    assert "heads 2, seqlen 256, in fp16" in said
    monkeypatch.undo()
    assert expected_s(does, list(flashzoo.versions().values()), 1) < 15
    assert not flashzoo.versions()["v1"].unsupported(does)


def test_ctrl_c_leaves_what_was_finished(registered):
    registered(toy("stopped", impl=f"{__name__}:interrupted"))
    q = torch.randn(1, 20, 2, 16)
    with pytest.raises(KeyboardInterrupt) as stop:
        flashzoo.compare(q, q, q, versions=["standard", "stopped"], progress=False)
    assert isinstance(stop.value, Interrupted) and stop.value.left == ("stopped",)
    assert [(row.version, row.status) for row in stop.value.comparison.rows] == [("standard", "ok")]


WAITING = """
import sys, time
def attention(q, k, v, problem, operands):
    print("WAITING", file=sys.stderr, flush=True)
    time.sleep(60)
import flashzoo
flashzoo.register(flashzoo.Spec(name="waiting", title="", paper="", impl=f"{__name__}:attention", cpu_dtypes=("fp32",)))
"""


def test_at_a_terminal_there_is_a_bar_before_torch_and_ctrl_c_ends_with_130_and_no_traceback(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    # SIGINT as at a terminal: a shell's background jobs ignore it, and so would what they start.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); import flashzoo_command as c; "
        "sys.exit(c.main())"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "compare",
        str(tmp_path / "waiting.py"),
        *TINY,
        "--versions",
        "standard,waiting",
    ]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {
        "TERM": "xterm"
    }
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said, told = b"", False
    try:
        while part := _read(ours):
            said += part
            if b"WAITING" in said and not told:
                process.send_signal(signal.SIGINT)
                told = True
    finally:
        process.kill()
        os.close(ours)
    assert process.wait() == 130, said.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", said.decode()).replace("\r", "\n")
    assert text.split()[0] == "importing" and "Traceback" not in text
    lines = [line for line in text.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("standard  ok")]
    assert lines[-1] == "flashzoo compare: interrupted before waiting"


def _read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux says that nobody writes any more
        return b""


def test_compare_of_values_of_another_width(capsys):
    assert main(["compare", *TINY, "--head-dim-v", "8", "--backward", "--json"]) == 0
    rows = {row["version"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {name for name, row in rows.items() if row["status"] == "ok"} >= {"sdpa", "standard"}
    assert "v's head_dim different from q's" in rows["v1"]["reasons"]


def test_compare_as_json(capsys):
    assert main(["compare", *TINY, "--causal", "--backward", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["problem"]["seqlen_q"] == 24 and record["problem"]["causal"] is True
    rows = {row["version"]: row for row in record["rows"]}
    assert rows.keys() == flashzoo.versions().keys()
    assert {name for name, row in rows.items() if row["status"] == "can't"} == {"v3", "v3_fp8"}
    assert "does not run on CPU tensors" in rows["v3"]["reasons"]
    for row in (row for name, row in rows.items() if name not in ("v3", "v3_fp8")):
        assert row["status"] == "ok", row["reasons"]
        assert 0 <= row["out_max_err"] <= row["out_max_budget"]
        assert row["forward_ms"] > 0
        if row["version"] != "decode":  # which has no backward pass
            assert row["dq_max_err"] is not None and row["backward_ms"] > 0
    assert rows["v2"]["ran"] == "interpreter" and rows["sdpa"]["ran"] == "CPU"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (["--dtype", "e4m3"], "e4m3 to bf16"),
        (["--dtype", "bf16", "--precision", "fp8"], "bf16 in fp8"),
        (["--dtype", "e4m3", "--backward"], "forward pass alone: e4m3 inputs have no gradients"),
        (["--dtype", "fp16", "--precision", "fp8", "--backward"], "fp16 in fp8, grad"),
    ],
    ids=str,
)
def test_compare_in_fp8(how, words, capsys):
    size = [word for word in TINY if word not in ("--dtype", "fp32")]
    assert main(["compare", *size, *how]) == 0
    assert words in capsys.readouterr().out
    assert main(["compare", *size, *how, "--json"]) == 0
    rows = {row["version"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {name for name, row in rows.items() if row["status"] == "ok"} == {"standard"}
    assert (rows["standard"]["dq_max_err"] is not None) == ("--precision" in how and "--backward" in how)


def test_explain_in_fp8(capsys):
    assert main(["explain", "--arch", "90", "--dtype", "e4m3"]) == 0
    assert capsys.readouterr().out.startswith(
        "v3_fp8 takes batch 8, seqlen 4096, heads 16, head_dim 128, e4m3 to bf16, on sm_90"
    )
    assert main(["explain", "--arch", "90", "--dtype", "bf16", "--precision", "fp8", "--backward"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("v3_fp8 takes ") and "bf16 in fp8, grad, on sm_90" in text
    assert "does not support precision='fp8'" in text
    assert main(["explain", "--arch", "90", "--dtype", "fp32", "--precision", "fp8"]) == 2
    assert "precision='fp8' quantises fp16 or bf16 inputs" in capsys.readouterr().err


def test_list_tells_what_is_quantised(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert 'quantizes fp16, bf16 with precision="fp8"' in text and 'quantizes none with precision="fp8"' in text


def test_fp8_has_twice_the_peak_where_there_is_any():
    assert (
        peak_tflops("NVIDIA H200", "e4m3")
        == peak_tflops("NVIDIA H200", "fp8")
        == 2 * peak_tflops("NVIDIA H200", "bf16")
    )
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "e4m3") is None


def test_compare_as_csv(capsys):
    assert main(["compare", *TINY, "--versions", "standard,sdpa", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["version"] for row in rows] == ["sdpa", "standard"]
    assert all(float(row["forward_ms"]) > 0 and row["backward_ms"] == "" for row in rows)


@pytest.fixture
def forward_only():
    flashzoo.register(dataclasses.replace(flashzoo.versions()["standard"], name="forward_only", backward=None))
    yield
    flashzoo.unregister("forward_only")


def test_compare_shows_the_forward_pass_of_a_version_that_has_no_other(forward_only):
    problem = workload("gqa3").on("cpu", dtype="fp32")
    rows = {row.version: row for row in _compare(problem, versions=["forward_only", "standard"], backward=True).rows}
    row = rows["forward_only"]
    assert row.status == "ok" and row.forward is not None and row.backward is None and set(row.errors) == {"out", "lse"}
    assert row.reasons == ("forward pass alone: has no backward pass, and an input requires grad",)
    assert rows["standard"].backward is not None and rows["standard"].reasons == ()


def test_compare_says_why_a_version_cannot():
    problem = workload("window").on("cpu", dtype="fp32")
    rows = {row.version: row for row in _compare(problem, versions=["v1", "sdpa"]).rows}
    assert rows["v1"].status == "can't" and rows["v1"].reasons == ("does not support window_size",)
    assert rows["v1"].forward is None and rows["sdpa"].status == "ok"


def _compare(problem, **options):
    return compare_workload(problem, device="cpu", progress=False, **options)


def test_compare_times_nothing_that_is_wrong(registered):
    registered(toy("doubled", impl=f"{__name__}:doubled"))
    comparison = _compare(workload("square").on("cpu", dtype="fp32"), versions=["doubled", "standard"])
    rows = {row.version: row for row in comparison.rows}
    assert not comparison.ok
    assert rows["doubled"].status == "fails" and rows["doubled"].forward is None
    assert any(reason.startswith("out, ") and "exceeds" in reason for reason in rows["doubled"].reasons)
    assert rows["standard"].status == "ok" and rows["standard"].forward is not None


def test_compare_survives_a_version_that_raises(registered):
    registered(toy("failing", impl=f"{__name__}:failing"))
    comparison = _compare(workload("square").on("cpu", dtype="fp32"), versions=["failing", "standard"])
    assert [row.status for row in comparison.rows] == ["ok", "error"]
    assert comparison.rows[1].reasons == ("RuntimeError: out of luck",)


def test_compare_leaves_its_inputs_alone():
    tensors = [torch.randn(1, 20, 2, 16) for _ in range(3)]
    before = [x.clone() for x in tensors]
    comparison = flashzoo.compare(*tensors, causal=True, backward=True, versions=["standard", "sdpa"], progress=False)
    assert comparison.ok
    assert all(
        torch.equal(x, then) and x.grad is None and not x.requires_grad for x, then in zip(tensors, before, strict=True)
    )


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"versions": ["v9"]}, ValueError, "versions must be from .*, got 'v9'"),
        ({"k": torch.randn(1, 20, 3, 16)}, ValueError, "v must have k's batch, seqlen and heads"),
        ({"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
        ({"version": "v2"}, TypeError, "compare: takes no version, .* got 'v2'"),
        ({"return_lse": False}, TypeError, "compare: takes no return_lse"),
        ({"arch": 90}, TypeError, "compare: takes no arch"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite"),
        (
            {"q": torch.randn(1, 20, 2, 16).to_sparse()},
            TypeError,
            r"q must be a dense tensor .* got torch.sparse_coo: call to_dense\(\)",
        ),
        (
            dict.fromkeys("qkv", torch.empty(1, 20, 2, 16, device="meta")),
            ValueError,
            "q, k and v must have data, got device meta",
        ),
    ],
)
def test_compare_refuses_what_attention_refuses(change, error, text):
    arguments = {name: torch.randn(1, 20, 2, 16) for name in "qkv"} | change
    with pytest.raises(error, match=text):
        flashzoo.compare(**arguments)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_compare_judges_no_input_with_nan_or_infinity(name, number):
    tensors = {name: torch.randn(1, 20, 2, 16) for name in "qkv"}
    tensors[name][0, 3, :, 1] = number
    with pytest.raises(ValueError, match=f"compare: {name} must be finite, .* got 2 that are not"):
        flashzoo.compare(**tensors, versions=["standard"], progress=False)


def test_compare_judges_no_e4m3_with_nan():
    tensors = {name: torch.randn(1, 20, 2, 16).to(torch.float8_e4m3fn) for name in "qkv"}
    tensors["v"].view(torch.uint8)[0, 3, 0, 1] = 127
    with pytest.raises(ValueError, match=r"compare: v must be finite, .* got 1 that are not"):
        flashzoo.compare(**tensors, versions=["standard"], progress=False)
    tensors["v"] = tensors["k"]
    with pytest.raises(ValueError, match=r"compare: k_descale must be finite, .* got 2 that are not"):
        flashzoo.compare(**tensors, k_descale=torch.full((1, 2), math.nan), versions=["standard"], progress=False)


def test_compare_judges_the_gradient_of_sinks():
    tensors = [torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3)]
    for own in (torch.tensor([1.0, -math.inf]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)):
        found = flashzoo.compare(*tensors, sinks=own, backward=True, versions=["standard", "v1"], progress=False)
        rows = {row.version: row for row in found.rows}
        assert rows["standard"].status == "ok" and rows["standard"].errors.keys() >= {"dq", "dsinks"}
        assert rows["v1"].status == "can't" and "does not support sinks" in rows["v1"].reasons[0]
    assert compare_workload(workload("sinks"), versions=["standard"], progress=False).rows[0].status == "ok"
    with pytest.raises(ValueError, match=r"compare: sinks must be finite, .* got 1 that are not"):
        flashzoo.compare(*tensors, sinks=torch.tensor([1.0, math.nan]), versions=["standard"], progress=False)


def test_check_refuses_a_wrong_variant(wrong_variant, capfd):
    arguments = ["check", str(wrong_variant), "-q", "-k", "test_forward and square", "-p", "no:cacheprovider"]
    # A process of its own: `check` imports the variant, which registers itself for good.
    assert subprocess.run([sys.executable, "-m", "flashzoo", *arguments], check=False).returncode == 1
    text = capfd.readouterr().out
    assert "test_forward[one_percent_off-square-fp16]" in text and "exceeds" in text
    assert "v2-" not in text, "only the variant is tested"


@pytest.mark.parametrize("command", ["bench", "report"])
def test_what_only_a_clone_has_is_refused_where_there_is_none(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("flashzoo.cli.ROOT", tmp_path)
    assert main([command]) == 2
    assert f"flashzoo {command}: expected {tmp_path}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert f" {command} " not in shown and " check " in shown
