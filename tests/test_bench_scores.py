"""Cells with something on their scores: which, what versions and peers are asked, and that what is wrong is seen."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from bench_runs import bench_tiny, parsed, rows_of

from bench import peers, readmes, run, runs, scored, scores
from bench.ahead import compile_jobs
from bench.arguments import check, parser_of
from bench.cells import Cell, cells, left_out
from bench.contenders import Contender, default_impls, objection
from bench.referee import Referee, WrongResultError
from flashzoo import timing
from flashzoo.call.problem import Problem

TINY = Problem(2, 24, 24, 4, 4, 16, "fp32", device="cpu", causal=True)
ON = Problem(1, 16384, 16384, 32, 32, 64, device="cuda", arch=90, causal=True)


def test_rows_say_what_is_on_the_scores_and_have_a_table(tmp_path, absent_peer, monkeypatch):
    monkeypatch.setattr(timing, "MIN_REPEATS", 1)
    out = tmp_path / "cpu.csv"
    impls = f"standard,sdpa_math,{absent_peer}"
    line = f"--scores --impls {impls} --dtype fp32 --tokens 32 --hidden 16 --seqlens 16"
    assert bench_tiny(line, out) == 0
    rows = [row for row in rows_of(out) if row["pass"] != "gemm"]
    of_pass = {"fwd": set(scores.NAMES) - {"bias_grad"}, "bwd": set(scores.NAMES)}
    for pass_, names in of_pass.items():
        timed = {(row["impl"], row["score"]) for row in rows if row["pass"] == pass_ and not row["why"]}
        expected = {("standard", "" if name == "plain" else name) for name in names}
        assert timed == expected | {
            ("sdpa_math", name) for name in {"", "bias", "bias_grad"} if not name or name in names
        }
    whys = {(row["impl"], row["score"]): row["why"] for row in rows if row["why"]}
    assert whys["sdpa_math", "alibi"] == "refused: alibi is taken by flex and fa4, got sdpa_math"
    assert whys["sdpa_math", "dropout"] == "refused: dropout is taken by no peer, got sdpa_math"
    assert all(why.startswith("missing") for (impl, _), why in whys.items() if impl == absent_peer)
    for row in rows:
        if not row["why"]:
            operations = {"fwd": 4, "bwd": 10}[row["pass"]] * 2 * 16 * (16 * 17 // 2)
            assert float(row["tflops"]) == pytest.approx(operations / float(row["ms"]) / 1e9, rel=1e-3)
    assert runs.last_run(rows, "fwd") == [], "no row of a run with scores is of a table of plain ones"
    _, table = readmes.on_scores(rows)
    assert table.count("| bias_grad |") == 1 and "| forward | 1 | 16 | 16 | softcap | " in table


@pytest.mark.parametrize("name", ["softcap", "bias_grad", "sinks"])
def test_a_version_is_asked_for_all_of_it(name):
    cell = Cell(replace(TINY, batch=1, heads=2, heads_kv=2, grad=True), score=name)
    (tensors,) = cell.inputs()
    Referee(cell, tensors).errors("v2", Contender("v2", cell, tensors).result())


def test_a_run_is_the_issues_and_fits_a_gpu(monkeypatch):
    chosen = cells(parsed("--scores"))
    assert len(chosen) == 3 * 2 * (6 + 7) and all(cell.problem.causal for cell in chosen)
    assert {(c.problem.batch, c.problem.heads) for c in chosen if c.problem.head_dim == 128} == {(8, 16), (1, 16)}
    few = cells(parsed("--scores sinks,plain --seqlens 2048 --head-dims 64 --causal 0,1 --passes bwd"))
    assert [(cell.score, cell.problem.causal) for cell in few] == [(n, c) for c in (False, True) for n in ("sinks", "")]
    monkeypatch.setattr(scores, "room", lambda device: 40e9)
    assert [told.replace("  ", " ") for told in left_out(parsed("--scores"))] == [
        f"bwd d{d} causal 1x16384x{heads} bias_grad is left out: its bias takes {gb} GB, and there are 40"
        for d, heads, gb in ((64, 32, 86), (128, 16, 43))
    ]
    assert len(cells(parsed("--scores"))) == len(chosen) - 2


def test_turns_and_what_is_compiled_ahead():
    """A bias has turns of its own; each kernel is one job, of all lengths."""
    todo = {
        Cell(replace(ON, seqlen_q=n, seqlen_k=n), score=name): ["v3", "fa4", "flex"]
        for n in (2048, 4096)
        for name in ("", "softcap", "bias", "sinks")
    }
    assert [[cell.score for cell in work] for work in run.in_turns(todo, False)] == [
        ["", "softcap", "sinks"],
        ["bias"],
    ] * 2
    jobs = compile_jobs(todo)
    assert {impl: len([1 for name, _ in jobs if name == impl]) for impl in ("v3", "fa4", "flex")} == {
        "v3": 4,
        "fa4": 4,
        "flex": 8,
    }


def test_who_is_asked_and_who_refuses():
    assert default_impls("bwd", with_scores=True) == ["v3", "v2", "flex", "fa4", "fa3", "sdpa_efficient"]
    cell = Cell(TINY, score="dropout")
    assert objection("v2", cell) is None and "does not support" in (objection("blocksparse", cell) or "")
    with pytest.raises(NotImplementedError, match=r"fewer than 2\^31, got 8589934592"):
        scored.peer("flex", ON, scores.Scores("bias", ON))
    with pytest.raises(
        NotImplementedError, match="bias_grad is taken by flex and sdpa_efficient and sdpa_math, got fa4"
    ):
        scored.peer("fa4", ON, scores.Scores("bias_grad", ON))


def test_libraries_are_told_in_their_words(monkeypatch):
    told = {}

    def function(name, q, k, v, **how):
        told[name] = how
        return q, None

    monkeypatch.setattr(peers, "_function", lambda name: partial(function, name))
    q, problem = torch.zeros(2, 24, 4, 16), replace(TINY, dtype="bf16", out_dtype=None)
    for name, on in (("fa3", "softcap"), ("fa4", "softcap"), ("fa4", "sinks")):
        assert scored.peer(name, problem, scores.Scores(on, problem))(q, q, q) is q
        options = {"softcap": {"softcap": 30.0}, "sinks": {"learnable_sink": told[name].get("learnable_sink")}}[on]
        assert told[name] == {"causal": True, **options}
    assert told["fa4"]["learnable_sink"].shape == (4,)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_is_asked_for_the_same_scores(monkeypatch):
    """As its users write it, not compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    peers._compiled_flex.cache_clear()
    for name in scored.SCORE_PEERS["flex"]:
        cell = Cell(TINY, score=name)
        (tensors,) = cell.inputs()
        Referee(cell, tensors).errors("flex", Contender("flex", cell, tensors).result())
    assert peers._compiled_flex() is flex_attention
    peers._compiled_flex.cache_clear()


def wrong(name, problem, on):
    """A peer without what is asked of it, or with a bias whose gradient is that of the first of the batch alone."""
    plain = peers.PEERS["sdpa_math"](problem)
    if name != "bias_grad":
        return plain
    first, others = (
        peers.sdpa(peers.SDPBackend.MATH, replace(problem, batch=1), x) for x in (on.bias, on.bias.detach())
    )
    return lambda q, k, v: torch.cat([first(q[:1], k[:1], v[:1]), others(q[1:], k[1:], v[1:])])


@pytest.mark.parametrize("name", ["softcap", "alibi", "bias", "sinks", "bias_grad"])
def test_a_peer_that_does_something_else_is_seen(name, monkeypatch):
    monkeypatch.setitem(scored.SCORE_PEERS, "sdpa_math", {name: partial(wrong, name)})
    cell = Cell(replace(TINY, grad=name == "bias_grad", dtype="bf16", out_dtype=None), score=name)
    (tensors,) = cell.inputs()
    with pytest.raises(WrongResultError, match="dscore_mod" if name == "bias_grad" else "out"):
        Referee(cell, tensors).errors("sdpa_math", Contender("sdpa_math", cell, tensors).result())


@pytest.mark.parametrize("name", ["alibi", "bias_grad", "sinks", "dropout"])
def test_long_cells_are_checked_on_some_queries(name, monkeypatch):
    monkeypatch.setattr("bench.cells.WHOLE_SCORED", 16)
    monkeypatch.setattr("bench.cells.QUERIES", 8)
    cell = Cell(replace(TINY, grad=True), score=name)
    assert cell.queries is not None and len(cell.queries) == 8
    (tensors,) = cell.inputs()
    referee, contender = Referee(cell, tensors), Contender("standard", cell, tensors)
    referee.errors("standard", contender.result())
    contender.out = contender.out + 1e-3
    with pytest.raises(WrongResultError, match="out"):
        referee.errors("standard", contender.result())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--scores caps", "expected names from plain, softcap, .*, got caps"),
        ("--scores --masks ones", "--scores: expected .* and nothing else beside it, got --masks"),
        ("--scores --decode", "--scores: expected .* and nothing else beside it, got --decode"),
        ("--scores --dtype e4m3 --passes fwd", "--scores: expected 16 or 32 bits .*, got --dtype e4m3"),
        ("--scores bias_grad --passes fwd", "--passes: expected bwd for bias_grad"),
        ("--scores --seqlens 3000", "--tokens: expected a multiple of each of 3000, got 16384"),
        ("--models all --scores", "--models: expected the models' own sizes, got --scores beside it"),
    ],
)
def test_arguments_that_make_no_cells(capsys, line, text):
    parser = parser_of(None)
    with pytest.raises(SystemExit):
        check(parser.parse_args(["--device", "cpu", *line.split()]), parser)
    assert re.search(text, capsys.readouterr().err)
