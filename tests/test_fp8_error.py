"""What FP8 costs in accuracy, as `bench.fp8_error` measures it."""

from __future__ import annotations

import pytest
import torch
from bench_runs import rows_of

import flashzoo
from bench import ablation, claims, fp8_error
from flashzoo.call.problem import Problem
from flashzoo.inputs import inputs
from flashzoo.reference import dequantized, rotated


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
    line = "--device cpu --head-dim 64 --seqlen 1024 --queries 128 --heads 4 --long 256,16384"
    assert fp8_error.main(line.split()) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    found = {cells[0]: cells[1:3] for cells in lines}
    assert float(found["rotation"][0]) < 0.8 * float(found["per-tensor scales"][0])
    assert float(found["one level"][0]) < 1.1 * float(found["two levels"][0])
    assert 1 < float(found["one level"][1]) / float(found["two levels"][1]) < 1.1, "what is cut has either sign"
    assert float(found["two levels"][1]) < 1.1 * float(found["two levels"][0])
    around_1 = [float(found[f"{name}, values around 1"][1]) for name in ("two levels", "one level")]
    assert around_1[0] < 0.1 * around_1[1] and around_1[1] > 0.1, "all that is cut has one"


def test_errors_are_rows_of_the_results_file(tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    line = (
        "--device cpu --head-dim 64 --seqlen 256 --queries 64 --heads 1 --long 256 --run e1 "
        f"--commit c0ffee --out {out}"
    )
    assert fp8_error.main(line.split()) == 0
    first = capsys.readouterr().out.split("RMSE over")[0]
    shown = {
        cells[0]: cells[1:3]
        for cells in (line.strip("| ").split(" | ") for line in first.splitlines() if line.startswith("|"))
    }
    rows = rows_of(out)
    assert {(row["pass"], row["run"], row["head_dim"], row["tflops"]) for row in rows} == {
        ("error_fp8_paper", "e1", "64", ""),
        ("error_randn", "e1", "64", ""),
    }
    found = {(row["impl"], row["dtype"]): float(row["rms_err"]) for row in rows if row["pass"] == "error_fp8_paper"}
    assert found["standard", "fp16"] == pytest.approx(float(shown["16 bits: fp16"][0]), rel=1e-2)
    assert found["standard_rotation_block_scales", "e4m3"] == pytest.approx(
        float(shown["rotation, block scales"][0]), rel=1e-2
    )
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


def test_another_file_is_refused_before_errors_are_measured(tmp_path, capsys):
    out = tmp_path / "cpu.csv"
    out.write_text("run,date,ms\n")
    with pytest.raises(SystemExit):
        fp8_error.main(["--device", "cpu", "--run", "r1", "--out", str(out)])
    said = capsys.readouterr()
    assert "--out: expected a file with the columns run,date,commit" in said.err and not said.out


def test_one_level_is_a_version_of_its_own():
    with ablation.registered(ablation.ONE_LEVEL_SPEC):
        spec = flashzoo.versions()[ablation.ONE_LEVEL]
        assert spec.dtypes == ("e4m3",) and not spec.auto and not spec.quantizes
    assert ablation.ONE_LEVEL not in flashzoo.versions()
