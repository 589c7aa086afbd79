"""Rows as tables and pictures."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from bench_runs import parsed, rows_of

from bench import pictures, plot, readmes, runs
from bench.cells import cells
from bench.rows import Results


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
    *(
        _row("new", impl, "fwd", s, t)
        for impl, s, t in [("v2", 512, 200), ("flex", 512, 100), ("v2", 1024, 450), ("flex", 1024, 300)]
    ),
]


def test_tables_show_the_last_run_alone():
    ablation = {**_row("ablation", "v3_serial", "fwd", 8448, 998), "batch": "4"}  # not at the field's sizes
    text = plot.report([*RESULTS, ablation], Path("h200.csv"))
    assert "998" not in text
    assert "| 64 | yes | 512 | **200** | 100 |" in text
    assert "| v2 |  | 1.73 (worst 1.50) |" in text
    assert "matmul in the same run: 780" in text
    assert "999" not in text
    assert "Backward" not in text


@pytest.mark.parametrize(("cells", "run"), [(1, "new"), (2, "later")])
def test_a_ratio_is_of_no_run_that_was_cut_off(cells, run):
    """The cells that it lacks may be where it is worst."""
    later = [_row("later", impl, "fwd", s, t) for s in (512, 1024)[:cells] for impl, t in (("v2", 900), ("flex", 1))]
    found = runs.over([*RESULTS, *later], "v2", "flex", "fwd")
    assert found.run == run and len(found.values) == 2
    assert runs.over(RESULTS, "v2", "fa4", "fwd") is None


@pytest.mark.parametrize(("cells", "run"), [(1, "whole"), (2, "later")])
def test_times_alone_are_of_the_last_run_that_has_them_of_all_cells(cells, run):
    """A run of fewer implementations than the table's may be the one that the first page's figures are of."""
    rows = RESULTS + [
        {**_row(of, "v3", "fwd", s, 100), "ms": "1", "settled_ms": alone, "joules": "3"}
        for of, alone, lengths in (("whole", "4", (512, 1024)), ("later", "2", (512, 1024)[:cells]))
        for s in lengths
    ]
    table, alone = plot.report(rows, Path("h200.csv")).split("Each alone at settled clocks. ")
    assert "| 64 | yes | 512 | **200** | 100 |" in table and "matmul in the same run: 780" in table
    assert f"run {run} of d" in alone
    assert f"| 64 | yes | 512 | **{25 if run == 'whole' else 50}** | 3 |" in alone


def test_fp8_runs_have_tables_of_their_own():
    fp8 = [{**_row("fp8", impl, "fwd", 512, t), "dtype": "e4m3"} for impl, t in [("v3_fp8", 600), ("cudnn_fp8", 400)]]
    matmuls = [
        {**_row("fp8", "matmul", "gemm", 8192, t), "dtype": dtype} for dtype, t in [("bf16", 770), ("e4m3", 1340)]
    ]
    whole = [_row("whole", impl, "fwd", 512, t) for impl, t in [("v3", 300), ("v3_fp8_end_to_end", 450)]]
    ablation = [{**_row("later", impl, "fwd", 512, 999), "dtype": "e4m3"} for impl in ("v3_fp8", "v3_fp8_one_level")]
    text = plot.report([*RESULTS, *matmuls, *fp8, *whole, *ablation], Path("h200.csv"))
    assert "one_level" not in text and "999" not in text
    sixteen, rest = text.split("### Forward on FP8 inputs, e4m3")
    e4m3, end_to_end = rest.split("### Forward from 16 bits through FP8, quantisation included, bf16")
    assert "| 64 | yes | 512 | **200** | 100 |" in sixteen and "a bf16 matmul in the same run: 780" in sixteen
    assert "| 64 | yes | 512 | **600** | 400 |" in e4m3 and "an e4m3 matmul in the same run: 1340" in e4m3
    assert (
        "| 64 | yes | 512 | 300 | **450** |" in end_to_end
        and "| v3_fp8_end_to_end | 1.50 (worst 1.50) |  |" in end_to_end
    )


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


def _sparse_rows(tmp_path: Path) -> list[dict[str, str]]:
    """A made-up run: every block-sparse kernel takes its share of the dense kernel's time and a tenth more."""
    path = tmp_path / "made.csv"
    results = Results(path, "sparse", "cpu", "c0ffee")
    line = (
        "--masks dense,ones,causal,random/2,random/4,local/2,butterfly --causal 0 --head-dims 64 "
        "--tokens 2048 --hidden 64"
    )
    chosen = [cell for size in ("2048", "1024") for cell in cells(parsed(f"{line} --seqlens {size}"))]
    for cell in chosen:
        dense = {"v1": 40.0, "v2": 20.0, "v3": 10.0, "flex": 30.0, "fa4": 12.0}
        masked = {
            impl: dense[of] * cell.density * 1.1
            for impl, of in (("v3", "v3"), ("blocksparse", "v2"), ("flex", "flex"), ("fa4", "fa4"))
        }
        times = masked if cell.mask else dense
        numbers = {"density": f"{cell.density:.6g}", "tflops": 1, "ms_p10": 1, "ms_p90": 1, "max_err": 0, "rms_err": 0}
        results.append([{**cell.fields, **numbers, "impl": impl, "ms": f"{ms:.5g}"} for impl, ms in times.items()])
    return rows_of(path)


def test_the_block_sparse_run_has_a_table_and_no_other_has_its_rows(tmp_path):
    rows = _sparse_rows(tmp_path)
    sparse = runs.sparse_run(rows)
    assert sparse is not None and runs.last_run([{**row, "batch": "8"} for row in rows], "fwd") == []
    size = "fwd", 64, 2048
    assert sparse.speedup(size, "random/4", "blocksparse") == pytest.approx(4 / 1.1, rel=1e-3), "over v2"
    assert sparse.speedup(size, "random/4", "v1") is None
    assert (sparse.tokens, sorted(sparse.butterfly["bwd", 64])) == (2048, [1024, 2048])
    table = plot.sparse_table(sparse).splitlines()
    assert (
        "| random/4 | 25.00% | 64 | 2048 | fwd | - | - | **2.75** (3.64x) | 8.25 (3.64x) | 3.3 (3.64x) | 5.5 (3.64x) |"
        in table
    )
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
