"""Cells of decoding: what they are, that what is timed is checked, and what peers are told."""

from __future__ import annotations

import dataclasses
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from bench_runs import bench_tiny, parsed, rows_of, why_in

import flashzoo
from bench import caches, cells, peers, readmes, run
from bench.caches import Caches
from bench.cells import Cell
from bench.contenders import default_impls, first_call
from bench.referee import Referee, WrongResultError
from bench.rows import FIELDS
from flashzoo import timing
from flashzoo.call.problem import Problem
from flashzoo.reference import Result

SIZES = {"heads": 4, "heads_kv": 2, "head_dim": 16, "dtype": "fp32", "device": "cpu", "used_k": True}
PAGED = Problem(3, 4, 32, **SIZES, causal=True, page_size=8)
TINY = Problem(2, 1, 64, 4, 1, 24, head_dim_v=16, latent=True, dtype="fp32", device="cpu", used_k=True)
FEW = "--decode --dtype fp32"
IN_E4M3 = Problem(3, 4, 32, **{**SIZES, "dtype": "fp16"}, causal=True, dtype_kv="e4m3")
BOTH = "--decode --dtype fp16 --dtype-kv fp16,e4m3"


@pytest.fixture
def on_four_caches(monkeypatch):
    monkeypatch.setattr(Caches, "calls", 4)


def decode_rows(path):
    return [row for row in rows_of(path) if row["pass"] == "decode"]


def test_the_cells_unasked_are_one_query_on_caches_that_fit():
    found = cells.cells(parsed("--decode"))
    assert len(found) == len({cell.key for cell in found}) == 75
    assert {(c.problem.seqlen_q, c.problem.causal, c.problem.page_size) for c in found} == {(1, False, None)}
    assert max(cell.caches.bytes for cell in found) == 2 * 2 * 128 * 131072 * 2 * 256 < caches.MOST_BYTES
    wide = [(cell.problem.seqlen_k, cell.problem.batch) for cell in found if cell.problem.heads_kv == 32]
    assert (32768, 32) in wide and (131072, 8) in wide and not {(131072, 32), (32768, 128)} & set(wide)


def test_no_cell_has_more_than_half_of_the_gpus_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=2 << 20))
    fits = [caches.fits(Problem(1, 1, seqlen, 1, 1, 32, used_k=True)) for seqlen in (8192, 8193)]
    assert fits == [True, False]


def test_as_many_calls_as_read_a_gigabyte_and_no_more_than_40():
    def calls(batch):
        return Caches(Problem(batch, 1, 2048, 64, 8, 128, used_k=True)).calls

    assert [calls(batch) for batch in (1, 8, 32, 128)] == [40, 16, 4, 1]


def test_several_queries_are_causal_and_lengths_are_chosen():
    found = cells.cells(parsed("--decode --queries 1,4 --seqlens 4096 --batches 2,3 --head-dims 64 --page-size 16"))
    shapes = [(c.problem.seqlen_q, c.problem.batch, c.problem.causal) for c in found]
    assert shapes == [(1, 2, False), (1, 3, False), (4, 2, True), (4, 3, True)]
    assert {c.fields["lengths"] for c in found} == {"pages16"} and {c.fields["seqlen_k"] for c in found} == {4096}
    assert str(found[3]) == "decode d64  64:8 3x4 on 4096 in pages of 16"


def test_576_columns_are_mla_whose_values_are_read_with_its_keys():
    found = cells.cells(parsed("--decode --head-dims 576,64 --seqlens 2048 --batches 2"))
    assert [(c.problem.heads, c.problem.head_dim, c.problem.latent) for c in found] == [
        (64, 64, False),
        (16, 576, True),
        (128, 576, True),
    ]
    assert found[1].caches.bytes == 2 * 2 * 2048 * 576
    assert caches.rate({**found[1].fields, "dtype": "bf16", "ms": 2.0}) == pytest.approx(2 * 2 * 2048 * 576 / 2e6)
    q, k, v, dout = Caches(TINY).inputs(0)
    assert (q.shape[-1], k.shape[-1], v.shape[-1], dout.shape[-1]) == (24, 24, 16, 16)
    assert flashzoo.explain(q, k, v).problem.latent


def test_rows_are_of_a_call_and_say_what_was_read(tmp_path, monkeypatch, on_four_caches, capsys):
    monkeypatch.setattr(timing.Clock, "measure", lambda clock, operations, ms: dict.fromkeys(operations, [8.0] * 3))
    out = tmp_path / "cpu.csv"
    assert bench_tiny(f"{FEW} --impls standard,sdpa --queries 1,4", out) == 0
    assert [row["pass"] for row in rows_of(out)] == ["gemm", "copy", *["decode"] * 4, "gemm", "copy"]
    for row in decode_rows(out):
        queries = int(row["seqlen_q"])
        pairs = {1: 64, 4: 61 + 62 + 63 + 64}[queries]
        assert (row["ms"], row["batch"], row["seqlen_k"], row["causal"]) == ("2", "2", "64", str(int(queries > 1)))
        assert float(row["tflops"]) == pytest.approx(2 * 4 * 4 * 16 * pairs / 2 / 1e9, rel=1e-3)
        assert caches.rate(row) == pytest.approx(2 * 2 * 64 * 4 * 16 * 4 / 2e6)
    said = capsys.readouterr().out
    speeds = r"4:4 2x1 on 64: standard 0 \(\d+%\), sdpa 0 \(\d+%\) GB/s of keys and values \(of a copy's 0\)"
    assert re.search(speeds, said)


def test_resume_tells_pages_apart(tmp_path, on_four_caches):
    out = tmp_path / "cpu.csv"
    bench_tiny(f"{FEW} --impls standard", out)
    bench_tiny(f"{FEW} --impls standard,sdpa,v2,sdpa_cudnn --page-size 16 --resume r1", out)
    timed = [(row["impl"], row["lengths"]) for row in decode_rows(out) if not row["why"]]
    assert timed == [("standard", ""), ("standard", "pages16"), ("sdpa", "pages16")]
    assert [(impl, why) for impl, _, why in why_in(out)] == [
        ("v2", "refused: does not support page_table"),
        ("sdpa_cudnn", "refused: torch takes no pages"),
    ]


def test_decode_itself_runs_in_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(timing.Clock, "measure", lambda clock, operations, ms: dict.fromkeys(operations, [1.0] * 3))
    out = tmp_path / "cpu.csv"
    assert bench_tiny(f"{FEW} --impls decode --page-size 16 --queries 2", out) == 0
    assert [row["why"] for row in decode_rows(out)] == [""]


@pytest.mark.parametrize("page_size", [None, 8])
def test_what_is_checked_is_what_is_timed(monkeypatch, on_four_caches, page_size):
    cell = Cell(Problem(3, 4, 32, **SIZES, causal=True, page_size=page_size))
    inputs = cell.inputs()
    referee, called, attention = Referee(cell, inputs[0]), [], flashzoo.attention

    def noting(q, k, v, **options):
        called.append(k.data_ptr())
        assert options["seqused_k"].tolist() == [32] * 3 and (options["page_table"] is None) == (page_size is None)
        return attention(q, k, v, **options)

    monkeypatch.setattr(flashzoo, "attention", noting)
    contender, result, _ = first_call("standard", cell, *inputs)
    referee.errors("standard", result)
    called.clear()
    contender.timed()
    assert called == [tensors[1].data_ptr() for tensors in inputs] and len(set(called)) == contender.calls == 4
    with pytest.raises(WrongResultError):
        referee.errors("standard", Result(result.out.roll(1, dims=0)))


def test_pages_lie_in_any_order_and_all_are_somebodys():
    table = Caches(PAGED).page_table
    assert table.shape == (3, 4) and sorted(table.flatten().tolist()) == list(range(12)) != table.flatten().tolist()
    _, k, _, _ = Caches(PAGED).inputs(0)
    assert k.shape == (12, 8, 2, 16) and torch.equal(Caches(PAGED).first(k)[0, 8:16], k[table[0, 1]])


def test_e4m3_caches_are_timed_in_turns_with_those_of_16_bits():
    found = cells.cells(parsed("--decode --dtype-kv bf16,e4m3 --head-dims 256 --seqlens 4096,8192 --batches 2"))
    shapes = [(c.problem.seqlen_k, c.problem.dtype_kv, c.fields["dtype_kv"]) for c in found]
    assert shapes == [(n, *of) for n in (4096, 8192) for of in ((None, ""), ("e4m3", "e4m3"))]
    assert str(found[1]) == "decode d256 16:2 2x1 on 4096 in e4m3" and len({cell.key for cell in found}) == 4
    assert found[0].caches.bytes == 2 * found[1].caches.bytes == 2 * 2 * 2 * 4096 * 2 * 256
    assert caches.rate({**found[1].fields, "ms": 2.0}) == found[1].caches.bytes / 2e6
    assert [list(work) for work in run.in_turns({cell: ["decode"] for cell in found}, False)] == [found[:2], found[2:]]
    assert all(c.problem.dtype_kv is None for c in cells.cells(parsed("--decode")))


@pytest.mark.parametrize("page_size", [None, 8])
def test_e4m3_caches_are_held_against_their_numbers_times_descales(page_size):
    cell = Cell(dataclasses.replace(IN_E4M3, page_size=page_size))
    q, k, v, dout = cell.inputs()[0]
    assert (q.dtype, k.dtype, v.dtype, dout.dtype) == (torch.float16, *[torch.float8_e4m3fn] * 2, torch.float16)
    assert 0.9 < k.float().std() < 1.1 and not torch.equal(k.float(), v.float())
    referee, options = Referee(cell, (q, k, v, dout)), {**cell.caches.options, "causal": True, "version": "standard"}
    of_k, of_v = options["k_descale"], options["v_descale"]
    assert of_k.shape == of_v.shape == (3, 2) and len({*of_k.flatten().tolist(), *of_v.flatten().tolist()}) == 12

    def judged(**other):
        return referee.errors("standard", Result(flashzoo.attention(q, k, v, **{**options, **other}), None))

    assert 0 < float(judged()["rms_err"]) < 1e-3
    for wrong in ({"k_descale": None}, {"v_descale": None}, {"k_descale": of_v, "v_descale": of_k}):
        with pytest.raises(WrongResultError):
            judged(**wrong)
    with pytest.raises(WrongResultError):
        judged(k_descale=of_k.roll(1, dims=1))


def test_large_e4m3_caches_are_drawn_in_parts(monkeypatch):
    monkeypatch.setattr(caches, "DRAWN", 100)
    _, k, v, _ = Caches(IN_E4M3).inputs(0)
    assert len(k.flatten().float().unique()) > 50 and not torch.equal(
        k.flatten()[:100].float(), v.flatten()[:100].float()
    )
    assert not torch.equal(k.flatten()[:100].float(), k.flatten()[100:200].float())
    assert torch.equal(Caches(IN_E4M3).inputs(0)[1].float(), k.float()) and k.float().std() > 0.9


def test_one_run_holds_both_kinds_of_caches(tmp_path, on_four_caches, monkeypatch, capsys):
    monkeypatch.setattr(timing.Clock, "measure", lambda clock, operations, ms: dict.fromkeys(operations, [8.0] * 3))
    out = tmp_path / "cpu.csv"
    assert bench_tiny(f"{BOTH} --impls standard,decode,v2,sdpa_math", out) == 0
    found = [(row["impl"], row["dtype"], row["dtype_kv"]) for row in decode_rows(out) if not row["why"]]
    assert found == [
        *((impl, "fp16", "") for impl in ("standard", "decode", "v2")),
        *((impl, "fp16", "e4m3") for impl in ("standard", "decode")),
    ]
    rates = {(row["impl"], row["dtype_kv"]): caches.rate(row) for row in decode_rows(out) if not row["why"]}
    assert rates["decode", ""] == 2 * rates["decode", "e4m3"] == 2 * 2 * 2 * 64 * 4 * 16 / 2e6
    assert "4:4 2x1 on 64 in e4m3: standard" in capsys.readouterr().out
    refused = [row["why"] for row in decode_rows(out) if row["impl"] == "v2" and row["dtype_kv"]]
    assert refused == ["refused: does not support e4m3 k and v with 16-bit q"]


def test_resume_adds_e4m3_caches_to_a_run(tmp_path, on_four_caches):
    out = tmp_path / "cpu.csv"
    bench_tiny("--decode --dtype fp16 --impls standard", out)
    bench_tiny(f"{BOTH} --impls standard --resume r1", out)
    assert [(row["run"], row["dtype_kv"], row["why"]) for row in decode_rows(out)] == [
        ("r1", "", ""),
        ("r1", "e4m3", ""),
    ]
    before = out.read_text()
    bench_tiny(f"{BOTH} --impls standard --resume r1", out)
    assert out.read_text() == before


def test_libraries_take_caches_of_qs_dtype():
    for name in peers.DECODE_PEERS:
        with pytest.raises(NotImplementedError, match="takes k and v of q's dtype, got e4m3 beside fp16"):
            peers.peer(name, IN_E4M3, caches=Caches(IN_E4M3))


def test_who_is_asked_unasked():
    assert set(default_impls("decode")) == {"decode", "v2", "fa3", "sdpa_cudnn"}
    with pytest.raises(NotImplementedError, match=r"caches are taken by fa3 and sdpa_cudnn, got xformers"):
        peers.peer("xformers", PAGED, caches=Caches(PAGED))
    with pytest.raises(NotImplementedError, match="torch aligns causal top-left"):
        peers.peer("sdpa_cudnn", Problem(3, 4, 32, **SIZES, causal=True), caches=Caches(Problem(3, 4, 32, **SIZES)))


def test_a_library_is_told_what_is_used_and_where_it_lies(monkeypatch):
    found = Caches(PAGED)

    def kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, causal):
        assert (k_cache.shape, cache_seqlens.dtype, causal) == ((12, 8, 2, 16), torch.int32, True)
        assert torch.equal(page_table, found.page_table) and cache_seqlens.tolist() == [32] * 3
        return q

    library = SimpleNamespace(flash_attn_func=None, flash_attn_with_kvcache=kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    monkeypatch.setattr(peers, "_function", lambda name: None)
    q, k, v, _ = found.inputs(0)
    assert peers.peer("fa3", PAGED, caches=found)(q, k, v) is q


def test_torch_is_given_views_of_the_caches(monkeypatch):
    """cuDNN's kernel itself is for a GPU."""
    problem = Problem(3, 1, 32, **SIZES)
    given = []

    def sdpa(q, k, v, *, attn_mask, is_causal, enable_gqa):
        given.append((k.shape, k.data_ptr(), attn_mask, is_causal, enable_gqa))
        return q

    monkeypatch.setattr(peers, "scaled_dot_product_attention", sdpa)
    q, k, v, _ = Caches(problem).inputs(0)
    out = peers.peer("sdpa_cudnn", problem, caches=Caches(problem))(q, k, v)
    assert out.shape == q.shape and given == [((3, 2, 32, 16), k.data_ptr(), None, False, True)]


def test_calls_are_made_on_the_side_stream_before_they_are_captured(monkeypatch):
    log = []

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            log.append("wait")

        def synchronize(self):
            log.append("synchronize")

    def graph_of(graph, stream, capture_error_mode):
        log.append(f"capture, {capture_error_mode}")
        assert isinstance(stream, Stream)
        return nullcontext()

    graph = SimpleNamespace(replay=lambda: log.append("replay"))
    for name, stand_in in {
        **{"Stream": Stream, "current_stream": Stream, "CUDAGraph": lambda: graph, "graph": graph_of},
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    calls = [lambda: log.append("a") or "A", lambda: log.append("b") or "B"]
    replay, first = timing.captured(calls, "cuda", capture_error_mode="relaxed")
    replay()
    warm = ["a", "b", "synchronize"]
    assert first == "A" and log == ["wait", *warm, *warm, "capture, relaxed", "a", "b", "wait", "replay"]


@pytest.mark.gpu
def test_a_graph_writes_anew_what_its_first_call_returned():
    xs = [torch.ones(5, device="cuda"), torch.zeros(5, device="cuda")]
    replay, first = timing.captured([lambda x=x: x + 1 for x in xs], "cuda")
    xs[0].fill_(7)
    replay()
    assert first.tolist() == [8.0] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["", "--page-size 64", "--queries 4"])
def test_a_gpus_cells_are_timed(tmp_path, options):
    out = tmp_path / "gpu.csv"
    line = f"--decode --head-dims 64 --batches 2 --seqlens 2048 --ms 1 --impls decode,sdpa --run r {options}"
    assert run.main([*line.split(), "--out", str(out)]) == 0
    assert [(row["impl"], row["why"]) for row in decode_rows(out)] == [("decode", ""), ("sdpa", "")]
    assert all(1 < caches.rate(row) < 1e5 for row in decode_rows(out) if row["impl"] == "decode")


@pytest.mark.gpu
def test_a_gpus_e4m3_caches_are_timed(tmp_path):
    out = tmp_path / "gpu.csv"
    line = "--decode --dtype-kv bf16,e4m3 --head-dims 64 --batches 2 --seqlens 2048 --ms 1 --impls decode --run r"
    assert run.main([*line.split(), "--out", str(out)]) == 0
    assert [(row["dtype_kv"], row["why"]) for row in decode_rows(out)] == [("", ""), ("e4m3", "")]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--decode --masks causal", "--decode: expected forward cells of 16 or 32 bits.*, got --masks"),
        ("--decode --passes bwd", "--decode: expected forward cells of 16 or 32 bits.*, got --passes"),
        ("--decode --dtype e4m3", "--decode: expected forward cells of 16 or 32 bits.*, got --dtype e4m3"),
        ("--decode --batches 2", "--decode: expected .*, got --tokens beside --batches"),
        ("--decode --page-size 48", "--page-size: expected a divisor of the caches' lengths, got 48 for 64"),
        ("--decode --causal 1", "--causal: expected 0 for one query or 1 for several, got 1 for --queries"),
        ("--page-size 16", "--page-size: expected --decode beside it, got none"),
        ("--queries 2", "--queries: expected --decode beside it, got none"),
        ("--dtype-kv e4m3", "--dtype-kv: expected --decode beside it, got none"),
        ("--decode --dtype-kv fp16", "--dtype-kv: expected bf16 or e4m3 beside --dtype bf16, got fp16"),
        ("--decode --dtype fp32 --dtype-kv e4m3", "--dtype-kv: expected fp32 beside --dtype fp32, got e4m3"),
        ("--decode --dtype-kv int8", "--dtype-kv: expected names from bf16, fp16, fp32, e4m3, got int8"),
    ],
)
def test_arguments_that_make_no_cells(tmp_path, capsys, line, text):
    with pytest.raises(SystemExit):
        bench_tiny(line, tmp_path / "cpu.csv")
    assert re.search(text, " ".join(capsys.readouterr().err.split()))


def test_the_readmes_table_is_of_the_last_run():
    def row(run_id, impl, ms, **more):
        shape = {"batch": "8", "seqlen_q": "1", "seqlen_k": "2048", "heads": "64", "heads_kv": "8", "head_dim": "128"}
        origin = {"gpu": "NVIDIA H200", "run": run_id, "dtype": "bf16", "pass": "decode"}
        return dict.fromkeys(FIELDS, "") | origin | shape | {"impl": impl, "ms": ms} | more

    copied = {"pass": "copy", "seqlen_q": "16384", "head_dim": "8192"}
    rows = [row("old", "decode", "9"), row("new", "copy", "0.125", **copied)]
    rows += [row("new", "decode", "0.02"), row("new", "sdpa_cudnn", "0.04"), row("new", "decode", "0.1", seqlen_q="4")]
    rows += [row("new", "fa3", "", why="missing"), row("new", "decode", "0.08", seqlen_k="8192", batch="1")]
    text, table, ratio = readmes.decode(rows)
    assert "decode / cuDNN, by heads" in text and text.endswith("run `new` of ; a copy in the same run: 4295.")
    assert table.splitlines() == [
        "| heads | batch | 2k | 8k |",
        "| --- | --- | --- | --- |",
        "| 64:8 of 128 | 8 | 3355 / 1678 |  |",
        "| 64:8 of 128 | 1 |  | 419 / - |",
    ]
    assert ratio == "decode over cuDNN: 2.00x (worst 2.00x), geometric mean of 1 cells."
    assert list(readmes.decode(rows[1:2])) == ["Not measured yet; `flashzoo bench --decode` does."]


def test_the_readme_has_e4m3_caches_in_a_table_of_their_own():
    def row(run_id, ms, seqlen_k, dtype_kv, **more):
        shape = {"batch": "8", "seqlen_q": "1", "seqlen_k": seqlen_k, "heads": "64", "heads_kv": "8", "head_dim": "128"}
        origin = {"gpu": "NVIDIA H200", "run": run_id, "dtype": "bf16", "pass": "decode", "impl": "decode", "ms": ms}
        return dict.fromkeys(FIELDS, "") | origin | shape | {"dtype_kv": dtype_kv, "rms_err": "1e-4"} | more

    of_16_bits = [row("whole", "0.02", "2048", ""), row("whole", "0.08", "8192", ""), row("whole", "0.3", "32768", "")]
    both = [row("both", "0.02", "2048", ""), row("both", "0.01", "2048", "e4m3", rms_err="2e-4")]
    both += [row("both", "0.08", "8192", ""), row("both", "0.05", "8192", "e4m3"), row("both", "0.1", "32768", "e4m3")]
    assert list(readmes.decode(of_16_bits)) == list(readmes.decode(of_16_bits + both))[:2], "of the whole run"
    text, table, told = list(readmes.decode(of_16_bits + both))[2:]
    assert text.startswith("One query in bf16 on e4m3 caches, descales by head") and "run `both`" in text
    assert table.splitlines()[0] == "| heads | batch | 2k | 8k | 32k |"
    assert table.splitlines()[2] == "| 64:8 of 128 | 8 | 3355 (2.00x) | 2684 (1.60x) | 5369 |"
    assert told.startswith("On e4m3 caches over bf16 ones: 1.79x (worst 1.60x), geometric mean of 2 cells. ")
    assert told.endswith("is 2.0e-04, on bf16 caches 1.0e-04, each against float64 of what the caches hold.")
    *_, alone = readmes.decode([row("e4m3", "0.1", "2048", "e4m3")])
    assert alone == "The largest RMS error of a cell is 1.0e-04, against float64 of what the caches hold."
