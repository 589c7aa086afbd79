"""Cells of packed sequences: which lengths, what is asked of versions and peers, what a row says."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from bench_runs import bench_tiny, rows_of

from bench import peers
from bench.cells import Cell
from bench.contenders import default_impls, fitting
from bench.lengths import Packed, lengths
from bench.referee import Referee, WrongResultError
from flashzoo.call.problem import Problem
from flashzoo.inputs import inputs
from flashzoo.reference import Result

PACKED = Packed((5, 1, 26), "cpu")
PROBLEM = Problem(1, 32, 32, 4, 2, 16, dtype="fp32", device="cpu", causal=True, sequences=3)


@pytest.mark.parametrize("total", [4096, 16384, 65536])
def test_documents_are_of_many_lengths_and_no_more_than_a_quarter(total):
    found = lengths("documents", total)
    assert found == lengths("documents", total) and sum(found) == total
    assert min(found) >= 1 and max(found) <= total // 4 and len(set(found)) > min(4, len(found)) - 1


def test_equal_lengths_leave_the_rest_to_the_last():
    assert lengths("equal30", 100) == (30, 30, 30, 10)
    with pytest.raises(ValueError, match=r"lengths must have a name of the form .*, got 'equal0'"):
        lengths("equal0", 100)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_counted_is_what_is_seen(causal):
    seen = PACKED.seen_by(torch.arange(32), causal)
    same = PACKED.documents[:, None] == PACKED.documents
    assert torch.equal(seen[0, 0], same.tril() if causal else same)
    assert PACKED.density(causal) == seen.double().mean()


def test_rows_say_what_was_packed(tmp_path):
    out = tmp_path / "cpu.csv"
    assert bench_tiny("--impls standard,sdpa,v1 --lengths equal16 --dtype fp32", out) == 0
    rows = [row for row in rows_of(out) if row["pass"] != "gemm"]
    assert {(row["lengths"], row["batch"], row["seqlen_q"], row["mask"]) for row in rows} == {
        ("equal16", "8", "128", "")
    }
    assert {row["impl"] for row in rows} == {"standard", "sdpa"}, "v1 packs nothing"
    for row in rows:
        pairs = 8 * (16 * 17 // 2 if row["causal"] == "1" else 16 * 16)
        operations = {"fwd": 4, "bwd": 10}[row["pass"]] * int(row["heads"]) * int(row["head_dim"]) * pairs
        assert float(row["tflops"]) == pytest.approx(operations / float(row["ms"]) / 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--lengths books", r"expected names of the form documents\|equal.*, got books"),
        ("--lengths documents --masks causal", "--lengths: expected 16 or 32 bits and no block masks, got --masks"),
        (
            "--lengths documents --dtype e4m3 --passes fwd",
            "--lengths: expected 16 or 32 bits and no block masks, got e4m3",
        ),
    ],
)
def test_arguments_that_make_no_cells(tmp_path, capsys, line, text):
    with pytest.raises(SystemExit):
        bench_tiny(line, tmp_path / "cpu.csv")
    assert re.search(text, capsys.readouterr().err)


def test_a_neighbours_key_is_an_error():
    cell = Cell(PROBLEM, lengths="equal16")
    tensors = inputs(cell.problem)
    referee = Referee(cell, tensors)
    with pytest.raises(WrongResultError):
        referee.errors("standard", Result(torch.zeros(1, 32, 4, 16)))


def test_who_is_asked_unasked():
    assert default_impls("fwd", packed=True)[:2] == ["v3", "v2"] and set(peers.PACKED_PEERS) <= set(
        default_impls("bwd", packed=True)
    )
    assert fitting(["v2", "v1", "fa3"], Cell(PROBLEM, lengths="equal16"), masked=False) == ["v2", "fa3"]
    with pytest.raises(NotImplementedError, match=r"packed sequences are taken by .*, got xformers"):
        peers.peer("xformers", PROBLEM, packed=PACKED)


def test_a_library_is_told_where_sequences_begin(monkeypatch):
    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        assert (q.shape, k.shape, cu_seqlens_q.tolist(), max_seqlen_k, causal) == (
            (32, 4, 16),
            (32, 2, 16),
            [0, 5, 6, 32],
            26,
            True,
        )
        return q, None

    library = SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    monkeypatch.setattr(peers, "_function", lambda name: None)
    q, k, v, _ = inputs(PROBLEM)
    assert torch.equal(peers.peer("fa3", PROBLEM, packed=PACKED)(q, k, v), q)
