"""The HTML report: one well-formed file that needs no other, with every run's rows in it and who has none."""

from __future__ import annotations

import csv
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support import ROOT

from bench import plot, report, run
from flashzoo import cli

pytest.importorskip("matplotlib")

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
        **{"date": "2026-11-22", "commit": "c0ffee", "gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "cutlass_dsl": "4.8"},
        **{"dtype": "bf16", "batch": 16, "seqlen_q": 1024, "seqlen_k": 1024, "heads": 32, "heads_kv": 32, "head_dim": 64, "causal": 0},
        **{"mask": "", "density": 1, "ms": 2.5, "ms_p10": 2.25, "ms_p90": 2.75, "tflops": 400, "max_err": "1.2e-03", "rms_err": "1.6e-04"},
    }
    return {field: str({**fixed, "run": run_id, "impl": impl, "pass": pass_, **fields}[field]) for field in run.FIELDS}


ROWS = [
    _row("old", "v1", tflops=111.125),
    _row("new", "matmul", "gemm", tflops=690.4, max_err="", rms_err=""),
    *(_row("new", impl, causal=causal, tflops=tflops) for impl, causal, tflops in [("v3", 0, 512.5), ("v2", 0, 400), ("v3", 1, 300)]),
    _row("back", "v3", "bwd", tflops=505),
    _row("eight", "v3_fp8", dtype="e4m3", tflops=901),
    *(
        _row("sparse", impl, pass_, batch=1, seqlen_q=16384, seqlen_k=16384, mask=mask, density=density, ms=ms)
        for pass_ in ("fwd", "bwd")
        for impl, mask, density, ms in [("v3", "", 1, 8), ("v3", "random/4", 0.25, 2), ("blocksparse", "random/4", 0.25, 3)]
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("results") / "h200.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, run.FIELDS)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


@pytest.fixture(scope="module")
def text(results) -> str:
    return report.page(plot.read(results), results)


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_the_file_needs_no_other(text, page):
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    assert "default-src 'none'" in text
    pictures = [address for address in page.addresses if address.startswith("data:image/png;base64,")]
    assert len(pictures) == page.tags["img"] == 4 and all(len(address) > 10_000 for address in pictures)


def test_tables_sort(text, page):
    assert page.tags["script"] == 1 and "aria-sort" in text
    assert all(len({len(row) for row in table}) == 1 for table in page.tables)


def test_every_row_of_every_run_is_in_a_table(page):
    tables = [[dict(zip(header, row, strict=True)) for row in rows] for header, *rows in page.tables]
    for row in ROWS:
        said = {name: value for name, value in row.items() if name not in run.RUN_FIELDS and value}
        assert any(said.items() <= found.items() for table in tables for found in table), row


def test_the_tables_are_the_readmes(page):
    assert page.table("head_dim", "causal", "seqlen", "v3", "v2") == [["64", "no", "1024", "512", "400"], ["64", "yes", "1024", "300", "-"]]
    assert page.table("head_dim", "causal", "seqlen", "v3_fp8") == [["64", "no", "1024", "901"]]
    assert page.table("mask", "density")[1] == ["random/4", "25.00%", "64", "16384", "fwd", "2 (4.00x)", "3"]


def test_each_run_has_its_environment(page):
    runs = page.table(*run.RUN_FIELDS)
    assert [found[0] for found in runs] == ["old", "new", "back", "eight", "sparse"]
    same = ["2026-11-22", "c0ffee", "NVIDIA H200", "2.11", "3.6", "4.8"]
    assert runs[1] == ["new", *same, "4", "bf16 690", "Forward", "v3, v2"]
    assert runs[0] == ["old", *same, "1", "", "", "v1"], "no table is of it"


def test_who_has_no_row_says_why(page):
    absent = [tuple(row) for row in page.table("table", "version", "cells", "why")]
    assert ("Forward", "v2", "1 of 2", report.NO_OBJECTION) in absent
    assert ("Forward on FP8 inputs", "v2", "1 of 1", "takes dtype fp16 or bf16 or fp32, got e4m3") in absent
    assert ("Block-sparse", "v2", "2 of 4", "does not support block_mask") in absent
    assert ("Block-sparse", "blocksparse", "2 of 4", report.NO_OBJECTION) in absent
    assert not [row for row in absent if row[:2] in (("Forward", "v3"), ("Backward", "v3"), ("Block-sparse", "v3"))]


def test_names_of_others_are_text(results):
    odd = _row("<b>|*x*", "v2", gpu="NVIDIA & <i>", batch=3)
    page = Page(report.page([odd], results))
    assert page.table(*run.RUN_FIELDS)[0][:4] == ["<b>|*x*", "2026-11-22", "c0ffee", "NVIDIA & <i>"]
    assert not page.tags["b"] + page.tags["i"] + page.tags["em"]


def test_the_command_writes_it(results, tmp_path, text, capsys):
    out = tmp_path / "report.html"
    assert cli.main(["report", "-o", str(out), "--csv", str(results)]) == 0
    assert Page(out.read_text()).tables == Page(text).tables
    assert capsys.readouterr().out.strip() == str(out)


@pytest.mark.parametrize("content", [None, ",".join(run.FIELDS)])
def test_a_file_without_results_is_refused(content, tmp_path, capsys):
    path = tmp_path / "empty.csv"
    if content:
        path.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", "-o", str(tmp_path / "report.html"), "--csv", str(path)])
    assert stopped.value.code == 2
    assert "--csv: expected" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(cli.FROM_CHECKOUT, "report", ("bench.report", "no_such_package"))
    assert cli.main(["report"]) == 2
    assert "no_such_package must be installed: pip install 'flashzoo[report]'" in capsys.readouterr().err


def test_the_readme_is_what_the_results_file_says():
    readme = (ROOT / "README.md").read_text()
    assert plot.place(readme, plot.report(plot.read(plot.RESULTS), plot.RESULTS)) == readme
