"""Packed sequences: what malformed arguments get, what `flashzoo.validate` finds, what is seen,
and that nothing is read by the host."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

import flashzoo
from flashzoo.compare import compare_workload
from flashzoo.lengths import Ranges
from flashzoo.workloads import workload
from flashzoo_suite.support import DEVICE


def lengths(*numbers: int, **how) -> torch.Tensor:
    return torch.tensor(numbers, **{"dtype": torch.int32, "device": DEVICE} | how)


ROWS = tuple(torch.randn(30, 2, 16, device=DEVICE) for _ in range(3))
RIGHT = lengths(0, 10, 30)
E4M3 = dict(zip("qkv", (x.to(torch.float8_e4m3fn) for x in ROWS), strict=True))
NESTED = torch.nested.nested_tensor_from_jagged(ROWS[0], RIGHT.long())

MALFORMED = {
    "a list": ({"cu_seqlens_q": [0, 30]}, TypeError, r"cu_seqlens_q must be a torch.Tensor or None, got list"),
    "int64": ({"cu_seqlens_q": RIGHT.long()}, TypeError, r"cu_seqlens_q must be of dtype torch.int32, got torch.int64"),
    "two dimensions": (
        {"cu_seqlens_q": RIGHT[None]},
        ValueError,
        r"cu_seqlens_q must be contiguous, of shape \(sequences \+ 1,\), got .*1, 3",
    ),
    "empty": (
        {"cu_seqlens_q": RIGHT[:0]},
        ValueError,
        r"cu_seqlens_q must be contiguous, of shape \(sequences \+ 1,\), got shape \(0,\)",
    ),
    "gaps": (
        {"cu_seqlens_q": lengths(0, 1, 10, 1, 30)[::2]},
        ValueError,
        r"cu_seqlens_q must be contiguous, .* with gaps",
    ),
    "elsewhere": ({"cu_seqlens_q": RIGHT.to("meta")}, ValueError, r"cu_seqlens_q must be on q's device .*, got meta"),
    "more of keys": (
        {"cu_seqlens_q": RIGHT, "cu_seqlens_k": lengths(0, 3, 10, 30)},
        ValueError,
        r"cu_seqlens_k must have shape \(3,\), as cu_seqlens_q has 2 sequences, got \(4,\)",
    ),
    "used of others": (
        {"cu_seqlens_q": RIGHT, "seqused_k": RIGHT},
        ValueError,
        r"seqused_k must have shape \(2,\), .* got \(3,\)",
    ),
    "used of no tensor": (
        {"cu_seqlens_q": RIGHT, "seqused_k": 3},
        TypeError,
        r"seqused_k must be a torch.Tensor or None, got int",
    ),
    "longest below 0": (
        {"cu_seqlens_q": RIGHT, "max_seqlen_q": -1},
        ValueError,
        r"max_seqlen_q must be at least 0, got -1",
    ),
    "longest no int": (
        {"cu_seqlens_q": RIGHT, "max_seqlen_k": 20.0},
        TypeError,
        r"max_seqlen_k must be an int or None, got 20.0",
    ),
    "other rows of k": (
        {"cu_seqlens_q": RIGHT, "k": ROWS[1][:20], "v": ROWS[2][:20]},
        ValueError,
        r"cu_seqlens_k may be left out where k has as many rows as q, got 30 of q and 20 of k",
    ),
    "no rows of k": ({"cu_seqlens_q": RIGHT, "k": None}, TypeError, r"k must be a torch.Tensor, got NoneType"),
    "k in two dimensions": (
        {"cu_seqlens_q": RIGHT, "k": ROWS[1][0]},
        ValueError,
        r"k must have 3 dimensions \(total_k, heads_kv, head_dim\), as q has, or be a cache of 4",
    ),
    "a batch of two": (
        {"cu_seqlens_q": RIGHT, **dict(zip("qkv", (x.view(2, 15, 2, 16) for x in ROWS), strict=True))},
        ValueError,
        r"batch must be 1 where sequences share its rows .*cu_seqlens_q.* got 2",
    ),
    "rows alone": ({}, ValueError, r"q must have 4 dimensions \(batch, seqlen, heads, head_dim\).* cu_seqlens_q"),
    "a block mask": (
        {"cu_seqlens_q": RIGHT, "block_mask": flashzoo.BlockMask.causal(30, 30, device=DEVICE)},
        ValueError,
        r"block_mask does not go with packed sequences \(cu_seqlens_q\)",
    ),
    "descales of a batch": (
        {"cu_seqlens_q": RIGHT, **E4M3, "k_descale": torch.ones(1, 2, device=DEVICE)},
        ValueError,
        r"k_descale of packed sequences must have shape \(sequences, heads_kv\) \(2, 2\), got \(1, 2\)",
    ),
    "descales of blocks": (
        {"cu_seqlens_q": RIGHT, **E4M3, "q_descale": torch.ones(1, 2, 1, device=DEVICE)},
        ValueError,
        r"q_descale of packed sequences must have shape \(sequences, heads_kv\) \(2, 2\), got \(1, 2, 1\)",
    ),
    "descales of 16 bits": (
        {"cu_seqlens_q": RIGHT, "v_descale": torch.ones(2, 2, device=DEVICE)},
        ValueError,
        r"v_descale is for e4m3 inputs",
    ),
    "nested with lengths": (
        {**dict.fromkeys("qkv", NESTED), "cu_seqlens_q": RIGHT},
        TypeError,
        r"cu_seqlens_q goes with packed rows; nested tensors have their lengths with them",
    ),
    "nested by head": (
        dict.fromkeys("qkv", NESTED.transpose(1, 2)),
        ValueError,
        r"q must be nested in dimension 1 of \(batch, seqlen, heads, head_dim\)",
    ),
    "nested by others": (
        {"q": NESTED, "k": NESTED, "v": torch.nested.nested_tensor_from_jagged(ROWS[2], RIGHT.long())},
        ValueError,
        r"v must be nested by k's own offsets",
    ),
}
DENSE = {"max_seqlen_q": 3, "cu_seqlens_k": RIGHT}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_arguments_are_refused_by_name(case):
    given, error, text = MALFORMED[case]
    with pytest.raises(error, match=text):
        flashzoo.attention(**{**dict(zip("qkv", ROWS, strict=True)), **given})


@pytest.mark.parametrize("name", DENSE)
def test_what_goes_with_packed_sequences_is_refused_without(name):
    with pytest.raises(ValueError, match=f"{name} goes with .*cu_seqlens_q"):
        flashzoo.attention(*(x[None] for x in ROWS), **{name: DENSE[name]})


BATCH = [x.view(2, 15, 2, 16) for x in ROWS]
CACHES = {
    "of others": (lengths(3), ValueError, r"seqused_k must have shape \(batch,\) \(2,\), got \(1,\)"),
    "of none": (lengths(), ValueError, r"seqused_k must have shape \(batch,\) \(2,\), got \(0,\)"),
    "in two dimensions": (
        lengths(3, 4)[None],
        ValueError,
        r"seqused_k must be contiguous, of shape .* or \(batch,\), got shape \(1, 2\)",
    ),
    "in 64 bits": (lengths(3, 4).long(), TypeError, r"seqused_k must be of dtype torch.int32, got torch.int64"),
}


@pytest.mark.parametrize("case", CACHES)
def test_malformed_lengths_of_caches_are_refused(case):
    given, error, text = CACHES[case]
    with pytest.raises(error, match=text):
        flashzoo.attention(*BATCH, seqused_k=given)


def test_caches_and_block_masks_do_not_go_together():
    with pytest.raises(ValueError, match="block_mask does not go with seqused_k"):
        flashzoo.attention(*BATCH, seqused_k=lengths(3, 4), block_mask=flashzoo.BlockMask.causal(15, 15, device=DEVICE))


@pytest.mark.parametrize("used", [(3, 16), (-1, 3)], ids=str)
def test_validate_finds_caches_that_lie(used):
    flashzoo.attention(*BATCH, seqused_k=lengths(*used))
    with pytest.raises(ValueError, match=r"seqused_k must be from 0 to the cache's length, got (16|-1) of 15 at"):
        flashzoo.validate(*BATCH, seqused_k=lengths(*used))
    flashzoo.validate(*BATCH, seqused_k=lengths(0, 15))


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_validate_finds_sinks_that_take_all(value):
    flashzoo.validate(*BATCH, sinks=torch.tensor([2e38, -math.inf], device=DEVICE))
    with pytest.raises(ValueError, match=r"sinks must be at most 2.36e\+38, or -inf, got \[1.0, (inf|nan|3.*e\+38)\]"):
        flashzoo.validate(*BATCH, sinks=torch.tensor([1.0, value], device=DEVICE))


WRONG = {
    "beyond": ({"cu_seqlens_q": lengths(0, 10, 31)}, r"cu_seqlens_q must be from 0 to the 30 rows of q, got 0 to 31"),
    "negative": ({"cu_seqlens_q": lengths(-1, 10, 30)}, r"cu_seqlens_q must be from 0 .* got -1 to 30"),
    "falling": ({"cu_seqlens_q": lengths(0, 20, 10)}, r"cu_seqlens_q must not fall, got 20 and then 10 at 2"),
    "longer": (
        {"cu_seqlens_q": RIGHT, "max_seqlen_q": 19},
        r"max_seqlen_q must be at least each sequence's length, got 19 and 20 of",
    ),
    "used": (
        {"cu_seqlens_q": RIGHT, "seqused_k": lengths(10, 21)},
        r"seqused_k must be from 0 to the sequence's .*, got 21 of 20 at 1",
    ),
    "keys": (
        {"cu_seqlens_q": RIGHT, "cu_seqlens_k": lengths(0, 40, 50)},
        r"cu_seqlens_k must be from 0 to the 30 rows of k, got 0 to 50",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_validate_finds_values_that_lie(case):
    given, text = WRONG[case]
    flashzoo.attention(*ROWS, **given)  # takes them on trust, and cuts off what is outside
    with pytest.raises(ValueError, match=text):
        flashzoo.validate(*ROWS, **given)


def test_validate_finds_nothing_in_what_is_right():
    flashzoo.validate(*ROWS, cu_seqlens_q=RIGHT, seqused_k=lengths(0, 20), max_seqlen_q=20)
    flashzoo.validate(
        *(x[None] for x in ROWS), causal=True, block_mask=flashzoo.BlockMask.causal(30, 30, device=DEVICE)
    )


def test_compare_takes_packed_sequences():
    found = flashzoo.compare(*ROWS, cu_seqlens_q=RIGHT, causal=True, backward=True, versions=["standard", "sdpa", "v1"])
    nested = flashzoo.compare(NESTED, NESTED, NESTED, versions=["standard"])
    drawn = compare_workload(workload("packed_used"), versions=["standard"])
    in_e4m3 = compare_workload(workload("packed_used").on(DEVICE, dtype="e4m3"), versions=["standard"])
    assert {row.version: row.status for row in found.rows} == {"standard": "ok", "sdpa": "ok", "v1": "can't"}
    assert [row.status for comparison in (nested, drawn, in_e4m3) for row in comparison.rows] == ["ok"] * 3
    assert "v1 can't: does not support cu_seqlens_q" in str(found) and "2 packed sequences" in str(found)


def test_compare_takes_packed_queries_on_caches():
    for how in ({}, {"page_table": lengths(0, 1, 2, 3).view(2, 2)}):
        caches = POOL if how else KV
        found = flashzoo.compare(
            ROWS[0], *caches, cu_seqlens_q=RIGHT, backward=True, versions=["standard", "v1"], **how
        )
        assert [row.status for row in found.rows] == ["can't", "ok"], found
        assert found.rows[1].reasons[0].startswith("forward pass alone")


def test_validate_looks_at_descales():
    q, k, v = (x[None].to(torch.float8_e4m3fn) for x in ROWS)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="k_descale must be positive and finite, got"):
            flashzoo.validate(q, k, v, k_descale=torch.tensor([[1.0, bad]], device=DEVICE))


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_validate_looks_at_descales_of_what_is_used(name):
    """A cache's are made of zeros, and filled as it is."""
    q = torch.randn(2, 1, 2, 16, device=DEVICE).half()
    k, v = (torch.randn(2, 300, 2, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    by_block = torch.zeros(2, 2, 3, device=DEVICE)
    by_block[0, :, 0] = by_block[1, :, :2] = 1
    by_head = by_block[..., 1]
    flashzoo.validate(q, k, v, seqused_k=lengths(128, 256), **{name: by_block})
    flashzoo.validate(q, k, v, seqused_k=lengths(0, 300), **{name: by_head})
    for used, descale in (((129, 256), by_block), ((128, 257), by_block), ((1, 300), by_head)):
        with pytest.raises(ValueError, match=f"{name} must be positive and finite, got 0.0 among"):
            flashzoo.validate(q, k, v, seqused_k=lengths(*used), **{name: descale})


@pytest.mark.parametrize("span", [(None, None), (None, 0), (3, 2), (0, None)], ids=str)
def test_what_is_seen_is_what_each_sequence_sees(span):
    """Overlapping keys too, which are no error: several sequences may read the same."""
    q, k, used = lengths(0, 4, 4, 11), lengths(2, 9, 12, 20), lengths(5, 3, 8)
    expected = torch.zeros(13, 21, dtype=torch.bool, device=DEVICE)
    left, right = span
    for (q_first, q_end), (k_first, _), count in zip(
        pairwise(q.tolist()), pairwise(k.tolist()), used.tolist(), strict=True
    ):
        for i in range(q_end - q_first):
            for j in range(count):
                distance = j - (i + count - (q_end - q_first))
                expected[q_first + i, k_first + j] = (left is None or distance >= -left) and (
                    right is None or distance <= right
                )
    assert torch.equal(Ranges(q, k, used).visible(span, 13, 21), expected)


def test_rows_are_taken_that_a_sequence_has_and_uses():
    of_q, of_k = Ranges(lengths(1, 4, 4, 11), lengths(2, 9, 12, 20), lengths(5, 3, 8)).taken(13, 21)
    assert of_q.tolist() == [1 <= row < 11 for row in range(13)]
    assert of_k.tolist() == [2 <= row < 7 or 9 <= row < 20 for row in range(21)]
    for none in (lengths(3), lengths(0, 9, 3, 13)):
        assert not any(bool(rows.any()) for rows in Ranges(none, none).taken(13, 21)), "there are none, or they fall"


def test_each_row_has_its_sequences_number():
    q, k, used = lengths(1, 4, 4, 11), lengths(2, 9, 12, 20), lengths(5, 3, 8)
    of_q, of_k = (x.tolist() for x in Ranges(q, k, used).numbers(13, 21))
    assert of_q[1:11] == [0] * 3 + [2] * 7 and of_k[2:7] + of_k[9:20] == [0] * 5 + [1] * 3 + [2] * 8
    assert {*of_q, *of_k} <= {0, 1, 2}, "of rows that nobody has too"
    falls = Ranges(lengths(0, 9, 3, 13), lengths(0, 9, 3, 13)).numbers(13, 13)
    assert {*falls[0].tolist()} <= {0, 1, 2}


PACKED = [spec.name for spec in flashzoo.versions().values() if "packed" in spec.features]


def rows_for(version: str) -> list[torch.Tensor]:
    """ROWS in fp16, with gradients, or for a version of e4m3 alone in that."""
    if "fp16" in flashzoo.versions()[version].dtypes:
        return [x.half().requires_grad_() for x in ROWS]
    return [x.to(torch.float8_e4m3fn) for x in ROWS]


@pytest.mark.gpu
@pytest.mark.parametrize("version", PACKED)
def test_no_call_waits_for_the_device(version):
    rows = rows_for(version)

    def call() -> None:
        out = flashzoo.attention(*rows, cu_seqlens_q=RIGHT, version=version)
        if out.requires_grad:
            out.sum().backward()

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("version", PACKED)
def test_a_captured_graph_takes_other_lengths(version):
    q, k, v = (x.detach() for x in rows_for(version))
    cu = RIGHT.clone()
    flashzoo.attention(q, k, v, cu_seqlens_q=cu, causal=True, version=version)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashzoo.attention(q, k, v, cu_seqlens_q=cu, causal=True, version=version)
    for numbers in ((0, 10, 30), (0, 29, 30), (3, 3, 17), (0, 0, 0)):
        cu.copy_(lengths(*numbers))
        graph.replay()
        assert torch.equal(out, flashzoo.attention(q, k, v, cu_seqlens_q=cu, causal=True, version=version))


def test_changing_lengths_do_not_recompile():
    """torch.compile: one graph for lengths of the same sum, and one with dynamic sizes for all others."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(
        lambda q, cu: flashzoo.attention(q, q, q, cu_seqlens_q=cu, causal=True, version="standard"), backend=backend
    )
    for total, numbers in ((30, (0, 10, 30)), (30, (0, 29, 30)), (24, (0, 1, 24)), (17, (0, 2, 17)), (29, (0, 9, 20))):
        q = torch.randn(total, 2, 16, device=DEVICE)
        expected = flashzoo.attention(q, q, q, cu_seqlens_q=lengths(*numbers), causal=True, version="standard")
        torch.testing.assert_close(call(q, lengths(*numbers)), expected)
    assert len(graphs) <= 2


POOL = [torch.randn(9, 16, 2, 16, device=DEVICE) for _ in range(2)]
TABLE = lengths(0, 3, 8, 1).view(2, 2)
PAGES = {
    "no page": (
        {"page_table": TABLE, "k": POOL[0][:0], "v": POOL[1][:0]},
        ValueError,
        r"k must have a page where page_table has numbers, got shape \(0, 16, 2, 16\)",
    ),
    "of another batch": (
        {"page_table": TABLE[:1]},
        ValueError,
        r"page_table must have a row for each of q's batch 2, got shape \(1, 2\)",
    ),
    "in one dimension": (
        {"page_table": TABLE[0]},
        ValueError,
        r"page_table must have shape \(batch, pages of a sequence\), .*\(2,\)",
    ),
    "in 64 bits": (
        {"page_table": TABLE.long()},
        TypeError,
        r"page_table must be of dtype torch.int32, got torch.int64",
    ),
    "with gaps": (
        {"page_table": TABLE.T},
        ValueError,
        r"page_table must have shape .*, its rows without gaps, got .* with gaps",
    ),
    "no tensor": ({"page_table": [[0, 1], [2, 3]]}, TypeError, r"page_table must be a torch.Tensor or None, got list"),
    "of values elsewhere": (
        {"page_table": TABLE, "v": POOL[1][:8]},
        ValueError,
        r"v must have k's pages and page_size \(9, 16\), got \(8, 16\)",
    ),
    "of no pages": (
        {"page_table": TABLE, "k": POOL[0][0]},
        ValueError,
        r"k must be pages \(pages, page_size, heads_kv, head_dim\)",
    ),
    "packed": (
        {"page_table": TABLE[:1], "cu_seqlens_q": RIGHT},
        ValueError,
        r"q must be packed rows \(total_q, heads, head_dim\), as cu_seqlens_q and page_table are given, got .*1, 30",
    ),
    "used of others": (
        {"page_table": TABLE, "seqused_k": lengths(3)},
        ValueError,
        r"seqused_k must have shape \(batch,\) \(2,\), got \(1,\)",
    ),
}


def test_no_sequences_see_nothing():
    """Of a pool of pages that is not empty."""
    table = torch.zeros(0, 1, dtype=torch.int32, device=DEVICE)
    for version in ("auto", "standard"):
        given = {"cu_seqlens_q": lengths(0), "page_table": table, "version": version}
        assert not flashzoo.attention(ROWS[0], *POOL[:2], **given).any()


@pytest.mark.parametrize("case", PAGES)
def test_malformed_pages_are_refused_by_name(case):
    given, error, text = PAGES[case]
    q = ROWS[0].view(2, 15, 2, 16)[:, :3]
    if case == "packed":
        q = ROWS[0][None]
    with pytest.raises(error, match=text):
        flashzoo.attention(**{"q": q, "k": POOL[0], "v": POOL[1], **given})


KV = tuple(torch.randn(2, 24, 2, 16, device=DEVICE) for _ in range(2))
ON_CACHES = {
    "of other sequences": (
        {"k": KV[0][:1], "v": KV[1][:1]},
        ValueError,
        r"k must be a cache for each of cu_seqlens_q's sequences 2, got 1 \(q \(1, 30, 2, 16\), k \(1, 24",
    ),
    "pages of other sequences": (
        {"page_table": TABLE[:1]},
        ValueError,
        r"page_table must have a row for each of cu_seqlens_q's sequences 2, got shape \(1, 2\)",
    ),
    "values packed": ({"v": ROWS[2]}, ValueError, r"v must have 4 dimensions .*, got shape \(30, 2, 16\)$"),
    "keys begin elsewhere": (
        {"cu_seqlens_k": RIGHT},
        ValueError,
        r"cu_seqlens_k goes with packed k and v, got it with caches",
    ),
    "used of others": ({"seqused_k": lengths(3)}, ValueError, r"seqused_k must have shape \(2,\), .* got \(1,\)"),
    "a batch": (
        {"q": ROWS[0][None]},
        ValueError,
        r"k must have q's batch 1, got 2",
    ),
    "gradients": (
        {"q": ROWS[0].clone().requires_grad_()},
        flashzoo.UnsupportedError,
        r"backward pass does not support cu_seqlens_q with caches",
    ),
}


@pytest.mark.parametrize("case", ON_CACHES)
def test_malformed_caches_of_packed_queries_are_refused_by_name(case):
    given, error, text = ON_CACHES[case]
    with pytest.raises(error, match=text):
        flashzoo.attention(**{"q": ROWS[0], "k": KV[0], "v": KV[1], "cu_seqlens_q": RIGHT, **given})


def test_validate_looks_at_caches_of_packed_queries():
    call = partial(flashzoo.validate, ROWS[0], *KV)
    call(cu_seqlens_q=RIGHT, seqused_k=lengths(0, 24), max_seqlen_q=20, max_seqlen_k=24)
    for wrong, text in (
        ({"cu_seqlens_q": lengths(0, 31, 30)}, "cu_seqlens_q must not fall, got 31 and then 30 at 2"),
        ({"max_seqlen_q": 19}, "max_seqlen_q must be at least each sequence's length, got 19 and 20 of sequence 1"),
        ({"seqused_k": lengths(0, 25)}, "seqused_k must be from 0 to the cache's length, got 25 of 24 at 1"),
        ({"max_seqlen_k": 9}, "max_seqlen_k must be at least what is used of each cache, got 9 and 24 at 1"),
        ({"max_seqlen_k": 9, "seqused_k": None}, "max_seqlen_k must be at least .*, got 9 and 24 at 0"),
    ):
        with pytest.raises(ValueError, match=text):
            call(**{"cu_seqlens_q": RIGHT, "seqused_k": lengths(0, 24)} | wrong)
    with pytest.raises(ValueError, match="page_table must have numbers from 0 to 8 of 9 pages, got 9"):
        flashzoo.validate(ROWS[0], *POOL, cu_seqlens_q=RIGHT, page_table=lengths(0, 1, 9, 3).view(2, 2))


def test_validate_takes_no_sequences():
    none = torch.zeros(0, 24, 2, 16, device=DEVICE)
    flashzoo.validate(ROWS[0][:0], none, none, cu_seqlens_q=lengths(0), max_seqlen_k=0)


def test_a_pool_without_a_page_is_one_where_no_page_is_asked_for():
    empty, q = [x[:0] for x in POOL], ROWS[0].view(2, 15, 2, 16)
    out, lse = flashzoo.attention(q, *empty, page_table=TABLE[:, :0], return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    assert flashzoo.attention(q[:0], *empty, page_table=TABLE[:0]).shape == (0, 15, 2, 16)


def test_pages_have_no_gradients_and_say_so():
    q = ROWS[0].view(2, 15, 2, 16).requires_grad_()
    with pytest.raises(flashzoo.UnsupportedError, match="backward pass does not support page_table"):
        flashzoo.attention(q, *POOL, page_table=TABLE)


def test_validate_looks_at_pages_that_are_used():
    q = ROWS[0].view(2, 15, 2, 16)[:, :3]
    wild = lengths(0, 9, 8, -1).view(2, 2)
    flashzoo.validate(q, *POOL, page_table=wild, seqused_k=lengths(16, 16))
    with pytest.raises(ValueError, match="page_table must have numbers from 0 to 8 of 9 pages, got 9"):
        flashzoo.validate(q, *POOL, page_table=wild, seqused_k=lengths(17, 16))
    with pytest.raises(ValueError, match=r"page_table must have numbers .*, got (9|-1)"):
        flashzoo.validate(q, *POOL, page_table=wild)


def test_compare_takes_what_holds_no_numbers_where_nothing_is_used():
    q, k, v = (x.half() for x in BATCH)
    k[:, 9:], v[:, 9:] = torch.nan, torch.nan
    cached = flashzoo.compare(q, k, v, seqused_k=lengths(9, 4), causal=True, versions=["standard", "sdpa"])
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    rows[0][25:] = torch.nan  # of no sequence
    how = {"cu_seqlens_q": lengths(0, 15, 25), "seqused_k": lengths(9, 4), "backward": True}
    packed = flashzoo.compare(*rows, **how, versions=["standard", "sdpa"])
    drawn = compare_workload(workload("pages"), versions=["standard", "sdpa", "v1"])
    assert [row.status for comparison in (cached, packed) for row in comparison.rows] == ["ok"] * 4
    assert {row.version: row.status for row in drawn.rows} == {"standard": "ok", "sdpa": "ok", "v1": "can't"}
    assert "does not support page_table" in next(row.reasons for row in drawn.rows if row.version == "v1")
    assert "pages of 16" in str(drawn)


def test_no_lengths_are_no_packed_rows():
    """`cu_seqlens_q=None` is the default, spelt out."""
    rows = torch.randn(12, 2, 16, device=DEVICE)
    for named in ({}, {"cu_seqlens_q": None}):
        with pytest.raises(ValueError, match="q must have 4 dimensions"):
            flashzoo.attention(rows, rows, rows, **named)
