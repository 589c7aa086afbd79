"""Cells with block masks: what they are, and that all of a mask is checked."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from bench_runs import PATTERNS, bench_masked, bench_tiny, parsed, rows_of

import flashzoo
from bench import masks, run
from bench.ahead import compile_jobs
from bench.cells import Cell, cells
from bench.contenders import Contender, default_impls, fitting
from bench.referee import Referee, WrongResultError
from flashzoo import timing
from flashzoo.call.problem import Problem
from flashzoo.inputs import inputs


@pytest.fixture
def hurried(monkeypatch):
    """Triton's interpreter is slow."""
    monkeypatch.setattr(timing, "MIN_REPEATS", 1)


def test_masked_cells_become_rows_beside_dense_ones(tmp_path, hurried):
    out = tmp_path / "cpu.csv"
    assert bench_masked("--masks dense,ones,local/2,causal --causal 0 --impls v2,blocksparse", out) == 0
    found = [(row["impl"], row["pass"], row["mask"], row["density"]) for row in rows_of(out) if row["pass"] != "gemm"]
    densities = {"ones": "1", "local/2": "0.5", "causal": "0.501953"}
    masked = [("blocksparse", mask, density) for mask, density in densities.items()]
    assert found == [(impl, pass_, *of) for pass_ in ("fwd", "bwd") for impl, *of in (("v2", "", "1"), *masked)]
    for row in rows_of(out):
        if row["pass"] != "gemm":
            operations = {"fwd": 4, "bwd": 10}[row["pass"]] * 256 * 256 * 16 * float(row["density"])
            assert float(row["tflops"]) == pytest.approx(operations / float(row["ms"]) / 1e9, rel=1e-3)


def test_resume_tells_masks_apart(tmp_path, hurried):
    out = tmp_path / "cpu.csv"
    bench_masked("--masks ones --passes fwd --impls blocksparse", out)
    bench_masked("--masks dense,ones,local/2 --causal 0 --passes fwd --impls standard,blocksparse --resume r1", out)
    assert [row["mask"] for row in rows_of(out) if row["impl"] == "blocksparse"] == ["ones", "local/2"]
    assert [row["mask"] for row in rows_of(out) if row["impl"] == "standard"] == ["", "ones", "local/2"]


def test_masked_and_dense_cells_of_a_size_are_timed_in_the_same_turns(tmp_path, monkeypatch):
    together = []
    measured = timing.Clock.measure

    def noting(clock, operations, ms_each):
        together.append(list(operations))
        return measured(clock, operations, ms_each)

    monkeypatch.setattr(timing.Clock, "measure", noting)
    out = tmp_path / "cpu.csv"
    assert bench_masked("--masks dense,ones,local/2 --impls standard,sdpa", out) == 0
    found = [
        {(cell.pass_, cell.mask, cell.problem.causal, impl) for cell, impl in keys}
        for keys in together
        if keys != ["settled"]
    ]
    cells = [("", False), ("", True), ("ones", False), ("local/2", False)]
    assert found == [{(pass_, *of, impl) for of in cells for impl in ("standard", "sdpa")} for pass_ in ("fwd", "bwd")]
    together.clear()
    assert bench_tiny("--impls standard,sdpa --passes fwd", out) == 0
    assert [len(keys) for keys in together if keys != ["settled"]] == [2, 2], "without masks each cell by itself"


def test_a_peer_without_block_masks_is_named(tmp_path, capsys):
    assert bench_masked("--masks local/2 --passes fwd --impls sdpa_math", tmp_path / "cpu.csv") == 0
    assert "sdpa_math refused: block masks are taken by flex and fa4, got sdpa_math" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["--masks randum/2", "--masks local", "--masks ones --dtype e4m3 --passes fwd"])
def test_masks_that_are_not_there_are_refused(line, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(line.split())
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_run_with_masks_is_the_issues():
    chosen = cells(parsed("--masks default"))
    assert len(chosen) == 2 * 2 * 2 * (2 + len(masks.NAMES))
    sizes = [(128, 16384, 16), (128, 65536, 4), (64, 16384, 32), (64, 65536, 8)]
    assert list(dict.fromkeys((c.problem.head_dim, c.problem.seqlen_q, c.problem.heads) for c in chosen)) == sizes
    assert {cell.problem.batch for cell in chosen} == {1}
    assert not [cell for cell in chosen if cell.mask and cell.problem.causal]
    assert {"v3", "blocksparse", "v2", "flex", "fa4"} <= set(default_impls("bwd", masked=True))
    few = cells(parsed("--masks butterfly --tokens 1024 --hidden 128 --seqlens 256,512"))
    assert {(c.problem.batch, c.problem.seqlen_q) for c in few} == {(4, 256), (2, 512)}


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


def test_what_is_compiled_ahead_shares_kernels():
    todo = cells(parsed("--masks default --head-dims 128 --passes fwd"))
    impls = ["v3", "v2", "blocksparse", "flex", "fa4", "sdpa_flash"]
    jobs = compile_jobs({cell: fitting(impls, cell, True) for cell in todo})
    counts = {impl: [len(group) for name, group in jobs if name == impl] for impl in impls}
    assert {impl: len(groups) for impl, groups in counts.items()} == {
        **{"v3": 5, "v2": 2, "blocksparse": 3},  # full, causal; plain, causal, window
        **{"flex": 6, "fa4": 5, "sdpa_flash": 0},  # of each length full, causal, any mask
    }
    assert sum(counts["v3"]) == len(todo) and sum(counts["blocksparse"]) == len(todo) - 4
