"""What is made of a results file: claims, pictures, the README's section, and the HTML report,
which needs no other file."""

from __future__ import annotations

import csv
import gzip
import json
import re
from base64 import b64decode
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import flashzoo
from bench import (
    choose,
    claims,
    everything,
    figures,
    limits,
    llama,
    matrix,
    pictures,
    plot,
    readmes,
    report,
    runs,
    scaling,
    several,
)
from bench.rows import FIELDS, RUN_FIELDS, read
from flashzoo import cli
from flashzoo.call.problem import FEATURES
from flashzoo_suite.support import ROOT

pytest.importorskip("matplotlib")
pytest.importorskip("bokeh")

VOID = {"meta", "link", "img", "br", "hr"}


class Page(HTMLParser):
    """What a test looks at: tags that are closed in order, tables as lists of rows of texts, and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.ids = [], Counter(), []
        self.tables: list[list[list[str]]] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"th", "td"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def table(self, *head: str) -> list[list[str]]:
        """The rows of the one table whose first columns are these."""
        (found,) = (rows for header, *rows in self.tables if tuple(header[: len(head)]) == head)
        return found


def _row(run_id: str, impl: str, pass_: str = "fwd", **fields: object) -> dict[str, str]:
    fixed = {
        **{
            "date": "2026-11-22",
            "commit": "c0ffee",
            "gpu": "NVIDIA H200",
            "torch": "2.11",
            "triton": "3.6",
            "cutlass_dsl": "4.8",
        },
        **{
            "dtype": "bf16",
            "batch": 16,
            "seqlen_q": 1024,
            "seqlen_k": 1024,
            "heads": 32,
            "heads_kv": 32,
            "head_dim": 64,
            "causal": 0,
        },
        **{
            "mask": "",
            "density": 1,
            "ms": 2.5,
            "ms_p10": 2.25,
            "ms_p90": 2.75,
            "tflops": 400,
            "max_err": "1.2e-03",
            "rms_err": "1.6e-04",
        },
    }
    return {
        field: str({**fixed, "run": run_id, "impl": impl, "pass": pass_, **fields}.get(field, "")) for field in FIELDS
    }


ROWS = [
    _row("old", "v1", tflops=111.125),
    _row("new", "matmul", "gemm", tflops=690.4, max_err="", rms_err=""),
    *(
        _row("new", impl, causal=causal, tflops=tflops)
        for impl, causal, tflops in [("v3", 0, 512.5), ("v2", 0, 400), ("v3", 1, 300)]
    ),
    _row("back", "v3", "bwd", tflops=505),
    _row("back", "fa3", "bwd", tflops="", ms="", rms_err="", why="missing: needs flash_attn_interface"),
    _row("back", "v1", "bwd", tflops="", ms="", rms_err="", why="FAILED: WrongResultError: dq"),
    _row("eight", "v3_fp8", dtype="e4m3", tflops=901),
    *(
        _row("sparse", impl, pass_, batch=1, seqlen_q=16384, seqlen_k=16384, mask=mask, density=density, ms=ms)
        for pass_ in ("fwd", "bwd")
        for impl, mask, density, ms in [
            ("v3", "", 1, 8),
            ("v3", "random/4", 0.25, 2),
            ("blocksparse", "random/4", 0.25, 3),
        ]
    ),
]


def _generations(run_id: str = "all", **fields: object) -> list[dict[str, str]]:
    """A run at two lengths, both passes: v1 twice as fast as standard, v2 three times v1, v3 one and a half times v2, a
    peer 2 % less. FA-2's own kernels are half as fast as v3."""
    speeds = {"standard": 50, "sdpa_math": 50, "v1": 100, "v2": 300, "v3": 450, "fa4": 441, "sdpa_flash": 225}
    cells = [(pass_, seqlen, head_dim) for pass_ in ("fwd", "bwd") for seqlen in (1024, 4096) for head_dim in (64, 128)]

    def row(impl: str, pass_: str, seqlen: int, head_dim: int) -> dict[str, str]:
        heads, batch = 2048 // head_dim, 16384 // seqlen
        size = {
            "batch": batch,
            "seqlen_q": seqlen,
            "seqlen_k": seqlen,
            "heads": heads,
            "heads_kv": heads,
            "head_dim": head_dim,
        }
        mib = batch * seqlen * (seqlen if impl == "standard" else 64) / 2**14
        work = 4 * batch * heads * seqlen**2 * head_dim * (1 if pass_ == "fwd" else 2.5)
        return _row(
            run_id, impl, pass_, **size, tflops=speeds[impl], ms=work / speeds[impl] / 1e9, peak_mib=mib, **fields
        )

    slow = ("standard", "sdpa_math")
    return [row(impl, *cell) for cell in cells for impl in speeds if impl not in slow or cell[0] == "fwd"]


def _claim(rows: list[dict[str, str]], what: str) -> tuple[str, str]:
    """The answer to the claim, and its runs."""
    ((*_, answer, of),) = (row for row in claims.answers(rows) if row[0] == what)
    return answer, of


EIGHT = [_row("eight", impl, dtype="e4m3", tflops=tflops) for impl, tflops in (("v3_fp8", 900), ("cudnn_fp8", 750))]
WHOLE = [_row("whole", impl, tflops=tflops) for impl, tflops in (("v3", 400), ("v3_fp8_end_to_end", 500))]
ERRORS = [
    _row("error", impl, "error_fp8_paper", dtype="e4m3", seqlen_q=8192, ms="", tflops="", rms_err=error)
    for impl, error in zip(claims.QUANTIZED, ("9.0e-3", "2.4e-2", "9.2e-3", "2.1e-2"), strict=True)
]
ABLATION = [
    _row("parts", impl, dtype="fp16", batch=4, seqlen_q=8448, head_dim=128, tflops=tflops)
    for impl, tflops in zip(claims.ABLATION, (700, 550, 680, 600), strict=True)
]
TRAFFIC = [
    _row("bytes", impl, f"traffic_{pass_}", ms="", tflops="", dram_mib=mib)
    for pass_ in ("fwd", "bwd")
    for impl, mib in (("standard", 4000), ("v1", 500), ("v2", 260), ("v3", 257))
] + [_row("bytes", "copy", "copy", batch=1, seqlen_q=16384, head_dim=8192, heads=1, ms=0.125, tflops="")]


SHARED = {
    "parallel_gather": 0.96,
    "parallel_auto": 0.97,
    "parallel_ring": 0.8,
    "plain_ring": 0.5,
    "torch_cp_allgather": 0.7,
}
"""Shares of one GPU's speed."""


def _several(run_id: str, gpus: int, **fields: object) -> list[dict[str, str]]:
    """A run of `bench.parallel`: one GPU makes 600 TFLOP/s; of documents torch has nothing."""
    size = {"batch": 1, "causal": 1, "head_dim": 128, "heads": 32, "heads_kv": 8}
    found = []
    for pass_, lengths, tokens in (("fwd", "", 32768), ("fwd_bwd", "", 32768), ("fwd", "documents", 8192)):
        for impl, share in {"auto": 1.0, **SHARED}.items():
            n = 1 if impl == "auto" else gpus
            of = {"seqlen_q": tokens * n, "seqlen_k": tokens * n, "lengths": lengths, "gpus": n}
            row = _row(run_id, impl, pass_, **{**size, **of, "tflops": 600 * share * n, **fields})
            if lengths and impl.startswith("torch"):
                row |= {"tflops": "", "ms": "", "why": "refused: no packed sequences"}
            found.append(row)
    return found


def test_several_gpus_have_a_section_of_their_own():
    assert list(several.measured(ROWS)) == ["Not measured yet; `bench.parallel` does."]
    rows = [*ROWS, *_several("old", 2, tflops=1), *_several("new", 2), *_several("four", 4)]
    text = "\n\n".join(several.measured(rows))
    kinds = [f"**{gpus} GPUs, {what}.**" for what in ("one sequence", "documents") for gpus in (2, 4)]
    again = [row | {"lengths": row["lengths"] and "balanced"} for row in _several("again", 2)]
    balanced = "\n".join(several.measured([*rows, *(row for row in again if row["lengths"])]))
    assert text.count("**") + 2 == balanced.count("**") and "**2 GPUs, documents in balanced order.**" in balanced
    assert sorted(kinds, key=text.index) == kinds and "`new`" in text and "`old`" not in text
    of_two, _, documents, _ = (text[text.index(kind) :].split("GPUs, ", 2)[1] for kind in kinds)
    head = "| call | tokens a GPU | one GPU | gather | ring | auto | plain ring |"
    assert f"{head} torch, all-gather |" in of_two and f"{head}\n" in documents
    speeds = "600 | 576 (96.0%) | 480 (80.0%) | 582 (97.0%) | 300 (50.0%) | "
    assert f"| one sequence, 32:8 heads, forward | 32k | {speeds}420 (70.0%) |" in of_two
    assert f"| documents, 32:8 heads, forward | 8k | {speeds[:-1]}\n" in documents, "what was refused has no speed"
    assert "on average: 97.0%, the least 97.0% (one sequence, 32:8 heads, forward, 32k a GPU)." in of_two
    assert "1.39x (worst 1.39x) as fast as torch's `context_parallel`, faster in 2 of 2 cells" in of_two
    assert "1.94x (worst 1.94x) as fast as a plain ring, faster in 2 of 2 cells" in of_two
    assert "`auto` is 1.94x (worst 1.94x) as fast as a plain ring, faster in 1 of 1 cells" in documents
    captured = [*rows, *(row | {"impl": f"{row['impl']}_graph"} for row in _several("graphs", 2))]
    text = "\n".join(several.measured(captured))
    assert "**2 GPUs, one sequence, in CUDA graphs.**" in text and "**2 GPUs, one sequence.**" in text
    assert list(several.headline(captured)) == list(several.headline(rows))
    later = [*rows, *(row for row in _several("later", 2) if row["lengths"])]
    assert [mine[0]["run"] for mine in several.last_runs(later).values()] == ["new", "four", "later", "four"]
    model = scaling.shares(2, 32768, 32, 8)
    line = f"| 32:8 | 32k | 641 / 600 | {model['gather'][0]:.1%} / 96.0% | - | {model['ring'][0]:.1%} / 80.0% |"
    assert line in of_two
    assert not list(several.headline(ROWS)) and not list(several.headline(_several("docs", 2)[-6:]))
    (head,) = several.headline(rows)
    assert head.startswith("One causal sequence shared out over 4 ")
    assert (
        "with 32:8 heads each GPU has, of the speed of one that works alone, 97% at 32k tokens a GPU. It is 1.39x"
        in head
    )
    found = several.points(rows, 32768, 32, 8)
    assert {method: list(of) for method, of in found.items()} == {"gather": [2, 4], "ring": [2, 4]}
    assert found["ring"][4] == pytest.approx(0.8)
    assert scaling.draw(rows).get_axes()[0].get_legend_handles_labels()[1][-1] == "ring, measured"


def _llama(folder: Path, *lines: str) -> list[runs.Row]:
    """What is told of a file of lines: a commit, perhaps with the model's size, and measure, implementation, turns,
    speed, and why there is none."""
    model = "date,commit,gpu,torch,transformers,size,parameters,seqlen,context,new"
    text = model + ",measure,implementation,rounds,tokens_s,why\n"
    for line in lines:
        of, _, found = line.partition(" ")
        commit, _, size = of.partition("/")
        text += f"2026-11-25,{commit},NVIDIA H200,2.11.0,5.23.0,{size or '1b'},1498e6,8192,32768,64,{found}\n"
    (folder / "llama.csv").write_text(text)
    return llama.rows_of(folder / "llama.csv")


def test_a_whole_model_has_a_table_of_its_last_rows(tmp_path):
    assert list(llama.section(llama.rows_of(tmp_path / "none.csv"))) == ["Nothing of it is measured yet."]
    assert list(llama.short([])) == []
    rows = _llama(
        tmp_path,
        "old train,sdpa,3,1,",
        "new train,sdpa,3,1,",
        "new train,flash_attention_2,3,,missing: ImportError: its package",
        "new train,sdpa,3,40000,",
        "new train,zoo,3,50000,",
        "new write,sdpa,1,,out of memory: OutOfMemoryError: CUDA",
        "new write,zoo,1,67.3,",
    )
    said, shown = llama.section(rows)
    assert "Llama of 1.5 billion" in said and "commit new" in said and "torch 2.11.0" in said
    assert said.endswith("Medians of 3 turns (training), of 1 turn (writing).")
    assert shown.splitlines() == [
        "|  | training | writing |",
        "| --- | --- | --- |",
        "| `sdpa`, torch's | 40000 | out of memory |",
        "| `zoo` | 50000 (1.25x) | 67.3 |",
        "| `flash_attention_2` | missing | - |",
    ]
    on_first_page, same = llama.short(rows)
    assert "docs/use.md" in on_first_page and same == shown


def test_each_measure_of_a_whole_model_is_of_its_last_run(tmp_path):
    """Implementations of two runs never stand beside one another; a measure of another commit is still told."""
    rows = _llama(
        tmp_path,
        "old/tiny train,sdpa,3,100,",
        "aaa train,sdpa,3,40000,",
        "aaa train,zoo,3,50000,",
        "aaa write,sdpa,3,70,",
        "aaa write,other,3,90,",
        "bbb write,sdpa,1,80,",
        "bbb write,zoo,1,120,",
        "bbb write,gone,1,,missing: ImportError",
    )
    text = "\n".join(llama.section(rows))
    assert "commit aaa of 2026-11-25 (training) and commit bbb of 2026-11-25 (writing)" in text
    assert "of 3 turns (training), of 1 turn (writing)" in text
    assert "50000 (1.25x)" in text and "120.0 (1.50x)" in text and "missing" in text
    assert "other" not in text and "90" not in text


def test_one_run_of_a_whole_model_is_named_once(tmp_path):
    text = "\n".join(llama.section(_llama(tmp_path, "aaa train,sdpa,3,1000,", "aaa write,sdpa,3,1000,")))
    assert "commit aaa of" in text and "commit aaa of 2026-11-25 (training" not in text


def test_several_gpus_are_in_no_other_table(tmp_path):
    before = [*_generations(), _row("packed", "v3", causal=1, lengths="documents")]
    after = [*before, *_several("new", 2)]
    for table in runs.TABLES:
        assert runs.last_run(after, table) == runs.last_run(before, table)
    assert readmes.packed_run(after) == readmes.packed_run(before)
    assert plot.report(after, tmp_path / "h200.csv") == plot.report(before, tmp_path / "h200.csv")
    assert figures.shares(after) == figures.shares(before) and figures.history(after) == figures.history(before)
    assert figures.tables(after) == figures.tables(before)
    assert list(report.headline(after)) == list(report.headline(before))
    Page(report.page(after, tmp_path / "h200.csv"))


def test_each_claim_is_answered_by_its_rows():
    rows = [
        *_generations(),
        *EIGHT,
        *WHOLE,
        *ERRORS,
        *ABLATION,
        *TRAFFIC,
        *(row for row in ROWS if row["run"] == "sparse"),
    ]
    over_standard, of = _claim(rows, "FA-1 over standard attention (`sdpa_math`), forward")
    assert (over_standard, of) == ("2.00x (2.00x to 2.00x in 2 cells)", "all"), "no more than 2k keys"
    assert _claim(rows, "FA-2 over FA-1, backward") == ("3.00x (3.00x to 3.00x in 4 cells)", "all")
    assert _claim(rows, "FA-3 over FA-2, forward") == ("1.50x (1.50x to 1.50x in 4 cells)", "all")
    assert _claim(rows, "FA-3 over FA-2's CUDA kernels (`sdpa_flash`), forward") == (
        "2.00x (2.00x to 2.00x in 4 cells)",
        "all",
    )
    speed, _ = _claim(rows, "FA-3 in 16 bits")
    assert speed == "450 TFLOP/s (head dim 64, 1k), 46% of the data sheet's 989"
    assert _claim(rows, "FP8 over 16 bits, FP8 inputs") == (
        "2.00x (2.00x to 2.00x in 1 cells); of two runs",
        "eight, all",
    )
    assert _claim(rows, "FP8 over 16 bits, quantisation included") == ("1.25x (1.25x to 1.25x in 1 cells)", "whole")
    memory, _ = _claim(rows, "Memory linear in the length, head dim 64")
    assert (
        memory == "v3 4x for 4x the keys (16 MiB at 4k); v2 4x for 4x the keys (16 MiB at 4k); "
        "v1 4x for 4x the keys (16 MiB at 4k); standard 16x for 4x the keys (1024 MiB at 4k)"
    )
    moved, of = _claim(rows, "Fewer bytes moved than standard attention")
    assert (
        moved.endswith("`standard` in passes over float32: forward 8.0x at 1k; backward 8.0x at 1k") and of == "bytes"
    )
    sparse = "forward: 1/4 kept 4.0x; backward: 1/4 kept 4.0x", "sparse"
    assert _claim(rows, "Block-sparse: time by the share of blocks kept") == sparse
    parts = "700 with both, 550 without overlap, 680 without ping-pong, 600 neither (TFLOP/s)"
    assert _claim(rows, "FA-3's two overlaps") == (parts, "parts")
    error = "2.7x less: 9.0e-03 for 2.4e-02; rotation alone 9.2e-03, block scales alone 2.1e-02"
    assert _claim(rows, "FP8's error (RMSE)") == (error, "error")
    assert not [row for row in claims.answers(rows) if claims.NOT_MEASURED in row[3]]


def test_a_claim_without_rows_says_so():
    assert {row[3] for row in claims.answers([_row("one", "flex", head_dim=128)])} == {claims.NOT_MEASURED}
    forward = [row for row in _generations() if row["pass"] == "fwd"]
    assert _claim(forward, "FA-2 over FA-1, backward") == (claims.NOT_MEASURED, "")
    moved, of = _claim(forward, "Fewer bytes moved than standard attention")
    by_formula, by_counters = moved.split("; ")
    assert re.fullmatch(r"[\d.]+x by the paper's formula, [\d.]+x by our tiles \(forward, 1k\)", by_formula)
    assert by_counters.startswith("DRAM's counters, ") and by_counters.endswith(": not measured")
    assert of == ""


def test_claims_are_of_the_last_run_that_has_both_sides():
    rows = [*_generations("first"), *(row for row in _generations("second") if row["impl"] != "sdpa_math")]
    assert _claim(rows, "FA-1 over standard attention (`sdpa_math`), forward")[1] == "first"
    assert _claim(rows, "FA-2 over FA-1, forward")[1] == "second"
    failed = [row | {"tflops": "", "ms": "", "why": "FAILED: it did"} for row in _generations("third")]
    assert _claim([*rows, *failed], "FA-2 over FA-1, forward")[1] == "second", (
        "rows that say why there is no result are none"
    )


def test_a_run_of_two_dtypes_has_a_table_of_one():
    rows = [
        _row("one", impl, dtype=dtype, tflops=tflops)
        for dtype, tflops in (("bf16", 400), ("fp32", 50))
        for impl in ("v2", "v1")
    ]
    mixed = [*rows[:3], _row("one", "v1", dtype="fp16", tflops=100)]
    assert {row["dtype"] for row in runs.last_run(rows, "fwd")} == {"fp32"}
    assert _claim(mixed, "FA-2 over FA-1, forward") == ("1.00x (1.00x to 1.00x in 1 cells)", "one"), (
        "both sides are of bf16"
    )
    sparse = [_row("two", "v3", dtype=dtype, mask="random/4", ms=ms) for dtype, ms in (("fp16", 8), ("bf16", 2))]
    found = runs.sparse_run(sparse)
    assert found is not None and {row["dtype"] for row in found.rows} == {"bf16"}


def test_every_picture_is_drawn(tmp_path):
    from PIL import Image

    rows = [
        *_generations(causal=1),
        *_generations(),
        *EIGHT,
        *WHOLE,
        *TRAFFIC,
        *(row for row in ROWS if row["run"] == "sparse"),
    ]
    rows += [
        _row("sparse", "v3", batch=32, seqlen_q=512, seqlen_k=512, mask=mask, ms=1, density=0.5)
        for mask in ("", "butterfly")
    ]
    rows += [_row("sparse", "v3", batch=1, seqlen_q=16384, seqlen_k=16384, mask="butterfly", ms=2, density=0.1)]
    drawn = pictures.draw(rows, tmp_path / "h200.csv")
    names = ["generations", *runs.TABLES, "speedups", "errors", "memory", "roofline", "blocksparse", "butterfly"]
    assert [path.name for path in drawn] == [f"h200_{name}.png" for name in names]
    for path in drawn:
        picture = Image.open(path).convert("RGB")
        assert picture.width > 500 and len(picture.getcolors(1 << 24) or ()) > 8 and path.stat().st_size < 200_000


@pytest.mark.parametrize(
    "rows",
    [
        [_row("one", "v3")],
        [_row("one", "v3", "bwd", causal=1, head_dim=128)],
        [_row("one", "mine"), _row("one", "v2")],
        TRAFFIC,
        ERRORS,
        EIGHT,
        [row for row in ROWS if row["run"] == "sparse" and row["pass"] == "bwd"],
        [_row("one", "v3", tflops="", ms="", rms_err="", why="out of memory")],
        [_row("one", "v3", gpu="NVIDIA H100 80GB HBM3")],
        [_row("one", "v2", gpu="Some GPU"), _row("one", "standard", gpu="Some GPU")],
    ],
)
def test_what_is_missing_breaks_no_page(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "figure", lambda name, tree: {})  # which is Bokeh's, and the same for all
    results = tmp_path / "h100.csv"
    section = plot.report(rows, results)
    drawn = {path.name for path in pictures.draw(rows, results)}
    assert set(re.findall(r"bench/results/(\S+\.png)", section)) == drawn - {"h100_generations.png"}, (
        "a picture that is shown is drawn"
    )
    Page(report.page(rows, results))


def test_a_run_of_other_sizes_alone_has_a_table_and_pictures(tmp_path):
    """As on a CPU, whose speeds need digits."""
    sizes = [
        {"batch": 512 // seqlen, "seqlen_q": seqlen, "seqlen_k": seqlen, "tflops": 3.2e-5 * seqlen}
        for seqlen in (64, 512)
    ]
    rows = [
        _row("small", impl, gpu="cpu", dtype="fp16", causal=1, heads=2, peak_mib="", **size)
        for size in sizes
        for impl in ("v2", "own")
    ]
    text = plot.report(rows, tmp_path / "cpu.csv")
    assert "| 64 | yes | 64 | **0.002** | **0.002** |" in text and "| 64 | yes | 512 | **0.016** | **0.016** |" in text
    assert [path.name for path in pictures.draw(rows, tmp_path / "cpu.csv")] == ["cpu_fwd.png", "cpu_errors.png"]
    assert plot.report([*rows, *_generations()], tmp_path / "cpu.csv").count("0.016") == 0, (
        "the field's sizes are wanted first"
    )


def test_a_runs_commits_are_named_and_who_was_not_installed(tmp_path):
    rows = [_row("one", "v3", commit="aaa"), _row("one", "v2", commit="bbb"), _row("two", "v2", "bwd", commit="ccc")]
    rows += [_row("one", impl, tflops="", ms="", why="missing: needs it") for impl in ("fa3", "v2", "xformers")]
    text = plot.report(rows, tmp_path / "h200.csv")
    assert "commit aaa and bbb and c0ffee, run one" in text and "commit ccc, run two" in text
    assert text.count("Not installed: fa3, xformers.") == text.count("Not installed") == 1


def test_a_peer_is_grey_and_a_version_of_ones_own_is_not():
    grey = pictures._style("flex")["color"].strip("#")
    assert grey[:2] == grey[2:4] == grey[4:] and pictures._style("mine")["color"] == pictures.BLACK
    assert (
        len(
            {pictures._style(name)["color"] for name in ("v1", "v2", "v3", "v3_fp8", "blocksparse", "standard", "mine")}
        )
        == 7
    )


def test_memory_is_as_fast_as_a_copy_or_as_the_data_sheet_says():
    rate, source = pictures.bandwidth(TRAFFIC, "NVIDIA H200")
    assert source == "a copy" and rate == pytest.approx(4 * 16384 * 8192 / 0.125e-3 / 1e12)
    assert pictures.bandwidth([], "NVIDIA H200") == (4.8, "data sheet")
    assert pictures.bandwidth([], "a GPU of one's own") == (None, "")


@pytest.fixture(scope="module", autouse=True)
def no_questions():
    """What explain says of thousands of problems is `test_page`'s."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(choose, "GRIDS", {})
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("results") / "h200.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


@pytest.fixture(scope="module")
def text(results) -> str:
    return report.page(read(results), results)


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def data(text) -> dict:
    (packed,) = re.findall(r'<script type="text/plain" id="data">([^<]*)<', text)
    return json.loads(gzip.decompress(b64decode(packed)))


def test_the_file_needs_no_other(text, page):
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    assert "default-src 'none'" in text and "unsafe-eval" not in text and page.tags["script"] == 3
    assert "Copyright (c) Anaconda, Inc., and Bokeh Contributors" in text
    assert all(len({len(row) for row in table}) == 1 for table in page.tables)


def test_every_row_of_every_run_is_there(data):
    told = {run: [dict(zip(of["columns"], row, strict=True)) for row in of["rows"]] for run, of in data["rows"].items()}
    for row in ROWS:
        said = {name: value for name, value in row.items() if name not in RUN_FIELDS and value}
        assert any(said.items() <= found.items() for found in told[row["run"]]), row


def test_figures_show_the_rows(data):
    trees = {name: figure["tree"] for name, figure in data["figures"].items()}
    forward = trees["curves"]["Forward"]["head dim 64"]["TFLOP/s"]
    assert forward["words"] == ["1k"] and set(forward["points"]) == {"v3", "v2"}
    assert forward["points"]["v3"] == [["1k", 512.5, "2.5 ms (2.25 to 2.75), RMS error 1.6e-04"]]
    assert figures.SPARSE not in trees["curves"], "one mask is no curve"
    assert trees["errors"]["Forward"]["head dim 64"]["points"]["v2"] == [[400.0, 1.6e-4, "1k"]]
    assert trees.keys() == {"curves", "errors"}, "no peer, and no cell of two runs"


def test_shares_of_cells_and_runs():
    rows = [*_generations("one"), *_generations("two", commit="c0ffef")]
    shares = figures.shares(rows)["Forward"]["points"]
    assert shares["v3"] == [(0, 1.0, "4 of 4 cells")] + [(1.0204, n / 4, f"{n} of 4 cells") for n in (4, 3, 2, 1)]
    assert shares["fa4"][-1][0] == 1 and shares["v1"][-1][:2] == (pytest.approx(100 / 441, abs=1e-4), 0.25)
    assert "standard" in shares
    lacking = [row for row in rows if (row["impl"], row["seqlen_q"]) != ("v3", "4096")]
    assert figures.shares(lacking)["Forward"]["points"]["v3"][0][1] == 0.5, "a cell without a result is not won"
    long = [{**row, "seqlen_q": "2048", "seqlen_k": "2048"} for row in rows if row["seqlen_q"] == "1024"]
    run = figures.history(long)["Forward, bf16"]["head dim 128, 2k"]
    assert run["words"] == ["one", "two"] and "commit c0ffef" in run["points"]["v3"][1][2]


def test_energy_is_of_rows_with_joules():
    """2 J in 4 ms are 500 W, at 250 TFLOP/s for 400 in turns of 2.5 ms."""
    alone = {"settled_ms": 4, "joules": 2}
    rows = [
        *(_row("old", impl, **fields) for impl, fields in (("v3", alone), ("v2", {"settled_ms": 5}), ("v1", {}))),
        _row("packed", "v3", lengths="documents", heads_kv=8, **alone),
        _row("old", "decode", "decode", seqlen_q=1, **alone),
        _row("new", "v3"),
    ]
    tree = figures.energy(rows)
    assert tree.keys() == {"Forward", figures.PACKED, figures.DECODING}
    forward = tree["Forward"]["head dim 64"]
    assert forward["points"] == {"v3": [(250.0, 2.0, "head dim 64, 1k: 2 J a call, 500 W")]}
    assert (forward["x"], forward["y"]) == ("TFLOP/s, alone", "pJ a FLOP")
    (((speed, joules, _),),) = tree[figures.DECODING]["head dim 64"]["points"].values()
    read_bytes = 2 * 2 * 16 * 1024 * 32 * 64
    assert speed == pytest.approx(read_bytes / 4e6, rel=1e-3) and joules == pytest.approx(2e9 / read_bytes, rel=1e-3)
    assert figures.energy(ROWS) == {}


def test_kinds_of_caches_are_not_mixed():
    mla = {"head_dim_v": 512, "head_dim": 576}
    rows = [
        *(_row("whole", "decode", "decode", seqlen_q=1, seqlen_k=n) for n in (1024, 2048)),
        *(_row("both", "decode", "decode", seqlen_q=1, dtype_kv=kv, ms=ms) for kv, ms in (("", 2), ("e4m3", 1))),
        _row("latent", "decode", "decode", seqlen_q=1, **mla),
    ]
    found = figures.decoded(rows)
    assert {title: [row["run"] for row in mine] for title, mine in found.items()} == {
        "Decoding": ["whole"] * 2,
        "Decoding, MLA": ["latent"],
        "Decoding, e4m3 caches": ["both"],
    }
    assert list(figures.curves(rows)["Decoding, e4m3 caches"]) == ["32:32 heads of 64, 16 sequences, e4m3"]
    (panels,) = (tree for title, tree in figures.history([*rows, *_again(rows)]).items() if title == "Decoding, bf16")
    assert len(panels) == 4, "one for each shape and kind"
    speeds = [text for text in report.headline(rows[2:4]) if text[0].startswith("decode")]
    assert speeds[0][2] == "16 caches of 1k keys" and len(speeds) == 1


def _again(rows):
    return [{**row, "run": f"{row['run']}-again"} for row in rows]


def test_without_joules_the_page_says_how_to_measure_them(text):
    section = re.findall(r'id="energy">Energy per call</h2>(.*?)<h2', text, re.DOTALL)
    assert [re.sub(r"<.*?>", "", part).strip() for part in section] == [
        "No row has joules yet: flashzoo bench --settled-ms 300 measures them."
    ]


def test_the_limit_of_a_cell_is_its_slowest_part():
    """A pair of query and key is 4 * head_dim FLOPs, and as many clocks of 4096 of them, and one of 16 exponentials."""
    fields = {"batch": 1, "heads": 32, "heads_kv": 32, "seqlen_q": 16384, "seqlen_k": 16384, "ms": 10}
    work = 4 * 32 * 16384**2
    of = {d: _row("one", "v3", head_dim=d, tflops=work * d / 10e9, **fields) for d in (64, 256)}
    found = limits.limits(of[64])
    assert found["products"] == pytest.approx(64 * work / 989e9) == found["exponentials"]
    assert found["shared memory"] == pytest.approx(found["products"] / 2)
    assert found["memory"] == pytest.approx(4 * 2 * 32 * 16384 * 64 / 4.8e9)
    assert limits.share(of[256]) == (pytest.approx(256 * work / 989e9 / 10), "products")
    eight = _row("one", "v3_fp8", dtype="e4m3", head_dim=64, tflops=64 * work / 10e9, **fields)
    assert limits.share(eight) == (pytest.approx(found["exponentials"] / 10), "exponentials")
    back = limits.limits(_row("one", "v3", "bwd", head_dim=64, tflops=2.5 * 64 * work / 10e9, **fields))
    assert back["exponentials"] == pytest.approx(found["exponentials"])
    assert back["products"] == pytest.approx(2.5 * found["products"]) and max(back, key=back.get) == "products"
    cache = _row("one", "decode", "decode", head_dim=128, tflops=1, **{**fields, "seqlen_q": 1})
    assert limits.share(cache) == (pytest.approx(2 * 2 * 16384 * 32 * 128 / 4.8e9 / 10), "memory")
    assert limits.share(_row("one", "v3", gpu="a GPU of one's own")) is None


def test_the_matrix_is_the_specs():
    rows = {feature.name: feature.cells for feature in matrix.matrix()}
    assert list(rows) == list(FEATURES)
    for name, spec in flashzoo.versions().items():
        for feature, cells in rows.items():
            cell, backward = cells[name], feature in (spec.backward or ())
            assert bool(cell.passes) == (feature in spec.features) and ("backward" in cell.passes) == backward
            assert bool(cell.refused) != backward
            assert bool(cell.problems) == bool(cell.passes), f"{name} declares {feature}, and no workload asks for it"


def test_each_run_has_its_environment(page, text):
    runs = page.table(*RUN_FIELDS)
    assert [found[0] for found in runs] == ["old", "new", "back", "eight", "sparse"]
    same = ["2026-11-22", "c0ffee", "NVIDIA H200", "2.11", "3.6", "4.8"]
    assert runs[1] == ["new", *same, "4", "bf16 690", "Forward", "v3, v2"]
    assert runs[0] == ["old", *same, "1", "", "", "v1"], "no table is of it"
    assert "13 results of 5 runs" in text


def test_who_has_no_row_says_why(page):
    absent = [tuple(row) for row in page.table("table", "name", "cells", "why")]
    assert ("Forward", "v2", "1 of 2", report.NO_OBJECTION) in absent
    assert ("Forward on FP8 inputs", "v2", "1 of 1", "takes dtype fp16 or bf16 or fp32, got e4m3") in absent
    assert ("Block-sparse", "v2", "2 of 4", "does not support block_mask") in absent
    assert ("Block-sparse", "blocksparse", "2 of 4", report.NO_OBJECTION) in absent
    assert not [row for row in absent if row[:2] in (("Forward", "v3"), ("Backward", "v3"), ("Block-sparse", "v3"))]
    assert ("Backward", "fa3", "1 of 1", "missing: needs flash_attn_interface") in absent, (
        "what the run said, of a peer too"
    )
    assert ("Backward", "v1", "1 of 1", "FAILED: WrongResultError: dq") in absent


def test_names_of_others_are_text(results):
    odd = _row("<b>|*x*", "v2", gpu="NVIDIA & <i>", batch=3)
    page = Page(report.page([odd], results))
    assert page.table(*RUN_FIELDS)[0][:4] == ["<b>|*x*", "2026-11-22", "c0ffee", "NVIDIA & <i>"]
    assert not page.tags["b"] + page.tags["i"] + page.tags["em"]


def test_the_command_writes_it(results, tmp_path, text, capsys):
    out = tmp_path / "report.html"
    assert cli.main(["report", "-o", str(out), "--csv", str(results)]) == 0
    assert Page(out.read_text()).tables == Page(text).tables
    assert capsys.readouterr().out.strip() == str(out)


@pytest.mark.parametrize("content", [None, ",".join(FIELDS)])
def test_a_file_without_results_is_refused(content, tmp_path, capsys):
    path = tmp_path / "empty.csv"
    if content:
        path.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", "-o", str(tmp_path / "report.html"), "--csv", str(path)])
    assert stopped.value.code == 2
    assert "--csv: expected" in capsys.readouterr().err


def test_a_folder_or_file_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", "-o", str(tmp_path / "none" / "report.html")])
    assert "--out: expected a file in a folder that is there, got " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plot.main(["--csv", str(tmp_path / "none.csv"), "--no-readme"])
    assert "none.csv, which is not there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plot.main(["--csv", str(tmp_path), "--no-readme"])
    assert f"{tmp_path}, which is a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", "-o", str(tmp_path)])
    assert stopped.value.code == 2 and "--out: " in capsys.readouterr().err


def test_a_choice_from_elsewhere_is_not_explains(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FLASHZOO_VERSION", "v1")
    with pytest.raises(SystemExit):
        cli.main(["report", "-o", str(tmp_path / "report.html"), "--csv", str(results)])
    assert "got v1 by the environment variable FLASHZOO_VERSION" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(cli.FROM_CHECKOUT, "report", ("bench.report", "no_such_package"))
    assert cli.main(["report"]) == 2
    assert f"no_such_package must be installed: pip install -e '{ROOT}[report]'" in capsys.readouterr().err


def test_without_a_gpu_all_is_drawn_from_what_is_there(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(everything.torch.cuda, "is_available", lambda: False)
    head, *lines = results.read_text().splitlines(keepends=True)
    before = "".join((head, *(line for line in lines if line.startswith("new"))))
    copied = tmp_path / "h100.csv"
    copied.write_text(before)
    readme = (ROOT / "README.md").read_text()
    assert everything.main(["--out", str(copied), "-o", str(tmp_path / "report.html")]) == 0
    assert "nothing is measured" in capsys.readouterr().out and copied.read_text() == before
    assert (tmp_path / "h100_fwd.png").exists() and Page((tmp_path / "report.html").read_text()).tables
    assert (ROOT / "README.md").read_text() == readme, "it shows another file"


def test_the_pictures_of_results_are_there():
    page = ROOT / "docs" / "measured.md"
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    assert len(shown) > 8 and all((page.parent / path).is_file() for path in shown)
    assert "![" in (ROOT / "README.md").read_text()[:2500], "the first screen has one"


def test_the_headline_is_in_words():
    shown, alone = readmes.headline(read(runs.RESULTS))
    assert "_" not in shown.partition("[Measured]")[0], "every library has a name"
    assert re.search(r"in FP8, v3_fp8 [\d.]+x \(worst [\d.]+x\) over FlashAttention-3 in", alone)


READMES = plot.shown(read(runs.RESULTS), runs.RESULTS)


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_readmes_are_what_the_results_files_say(path):
    assert path.read_text() == READMES[path], "`make report` writes it"


SHOWING = sorted([*ROOT.glob("**/README.md"), *ROOT.glob("docs/learn/*.md")])
SHOWING += [ROOT / "docs" / f"{name}.md" for name in ("call", "measured", "options", "start", "versions")]


@pytest.mark.parametrize("path", SHOWING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_readme_has_no_figures_of_speed_of_its_own(path):
    """What is measured is in a section that is made, names its run, and changes with it."""
    if any(part.startswith(".") for part in path.relative_to(ROOT).parts):
        return
    by_hand = re.sub(r"<!-- ([\w-]+):begin -->.*<!-- \1:end -->", "", path.read_text(), flags=re.DOTALL)
    assert re.findall(r"h[12]00-2\d{7}[\w-]*|\d+ TFLOP/s|\d\.\d+x|\d ms\b", by_hand) == []
