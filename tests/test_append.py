"""`flashzoo.append`: what it writes and where, and that it writes nothing else."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo.inputs import LAYOUTS
from flashzoo_suite.support import DEVICE, same_bits

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def expected(cache: Tensor, new: Tensor, used: Tensor, table: Tensor | None = None) -> Tensor:
    """The cache as it is to be, one row after the other."""
    found, size = cache.clone(), cache.shape[1]
    for b, first in enumerate(used.tolist()):
        for i in range(new.shape[1]):
            row = first + i
            if table is None and 0 <= row < size:
                found[b, row] = new[b, i]
            elif (
                table is not None
                and 0 <= row < size * table.shape[1]
                and 0 <= (page := int(table[b, row // size])) < len(cache)
            ):
                found[page, row % size] = new[b, i]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [1, 5])
def test_new_rows_follow_what_is_used(dtype, new):
    """Values may be of another width; rows without room are left out."""
    caches = drawn(4, 20, 3, 40, dtype=dtype), drawn(4, 20, 3, 24, dtype=dtype)
    k, v = drawn(4, new, 3, 40, dtype=dtype), drawn(4, new, 3, 24, dtype=dtype)
    used = numbers(0, 7, 18, 20)
    wanted = [expected(cache, x, used) for cache, x in zip(caches, (k, v), strict=True)]
    assert flashzoo.append(*caches, k, v, used) is None
    assert all(same_bits(cache, x) for cache, x in zip(caches, wanted, strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 30])
def test_pages(page_size):
    caches = drawn(11, page_size, 2, 16), drawn(11, page_size, 2, 16)
    k, v = drawn(3, 6, 2, 16), drawn(3, 6, 2, 16)
    table, used = numbers(4, 0, 7, 9, 1, 10, 2, 3, 5).view(3, 3), numbers(0, page_size - 1, 3 * page_size - 2)
    wanted = [expected(cache, x, used, table) for cache, x in zip(caches, (k, v), strict=True)]
    flashzoo.append(*caches, k, v, used, page_table=table)
    assert all(same_bits(cache, x) for cache, x in zip(caches, wanted, strict=True))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed", "offset"])
def test_any_layout(layout):
    k_cache, v_cache, k, v = (LAYOUTS[layout](drawn(2, rows, 3, 16)) for rows in (12, 12, 4, 4))
    used = numbers(3, 9)
    wanted = [expected(cache, x, used) for cache, x in ((k_cache, k), (v_cache, v))]
    flashzoo.append(k_cache, v_cache, k, v, used)
    assert same_bits(k_cache, wanted[0]) and same_bits(v_cache, wanted[1])


def test_lazily_negated_rows_that_overlap():
    """As `resolve_neg` lays them, too, their columns have gaps."""
    k, v = (torch._neg_view(drawn(2, 3, 17).unfold(2, 16, 1)) for _ in range(2))  # pyright: ignore[reportPrivateImportUsage]
    caches, used = (drawn(2, 12, 2, 16), drawn(2, 12, 2, 16)), numbers(3, 9)
    wanted = [expected(cache, x, used) for cache, x in zip(caches, (k, v), strict=True)]
    flashzoo.append(*caches, k, v, used)
    assert all(same_bits(cache, x) for cache, x in zip(caches, wanted, strict=True))


def test_numbers_that_lie_write_nothing():
    """Neither a length nor a page's number: cut off, it would be another's row."""
    k, v = drawn(2, 3, 2, 16), drawn(2, 3, 2, 16)
    for used in (numbers(-1000, 1 << 30), numbers(-3, 20)):
        caches = drawn(2, 20, 2, 16), drawn(2, 20, 2, 16)
        before = [cache.clone() for cache in caches]
        flashzoo.append(*caches, k, v, used)
        assert all(same_bits(*pair) for pair in zip(caches, before, strict=True))
        for table in (numbers(-1, 2, 1 << 30, -(1 << 31)).view(2, 2),):
            flashzoo.append(*caches, k, v, numbers(0, 0), page_table=table)
            assert all(same_bits(*pair) for pair in zip(caches, before, strict=True))


def test_what_is_appended_is_attended_to():
    """Token by token into pages, as a model that writes does; the same as all at once."""
    q, k, v = drawn(2, 9, 4, 16), drawn(2, 9, 2, 16), drawn(2, 9, 2, 16)
    k_pages, v_pages = (torch.full((8, 4, 2, 16), torch.nan, dtype=torch.float16, device=DEVICE) for _ in range(2))
    table, used, outs = numbers(3, 0, 6, 1, 7, 2).view(2, 3), numbers(0, 0), []
    for i in range(9):
        flashzoo.append(k_pages, v_pages, k[:, i : i + 1], v[:, i : i + 1], used, page_table=table)
        used += 1
        how = {"seqused_k": used, "page_table": table, "causal": True, "version": "decode"}
        outs.append(flashzoo.attention(q[:, i : i + 1], k_pages, v_pages, **how))
    torch.testing.assert_close(
        torch.cat(outs, 1), flashzoo.attention(q, k, v, causal=True, version="standard"), rtol=1e-2, atol=2e-3
    )


def test_every_number_is_rounded_to_the_nearest_e4m3():
    """Ties to even, what is beyond 448 to 448, and NaN to NaN; by the descale of a row's head, and of its block."""
    every = torch.arange(1 << 16, device=DEVICE).to(torch.int16).view(torch.float16).view(2, 32, 4, 256)
    caches = [torch.zeros(2, 140, 4, 256, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(2)]
    by_head, by_block = torch.rand(2, 4, device=DEVICE) + 0.5, torch.rand(2, 2, 4, device=DEVICE).mT + 0.5
    used = numbers(3, 108)  # of the second some are in the next block of 128 rows
    flashzoo.append(*caches, every, every, used, k_descale=by_head, v_descale=by_block)
    at = used[:, None] + torch.arange(32, device=DEVICE)
    of_rows = by_head[:, None].expand(2, 32, 4), by_block.mT[torch.arange(2, device=DEVICE)[:, None], at // 128]
    for cache, descale in zip(caches, of_rows, strict=True):
        nearest = (every.float() / descale[..., None]).clamp(-448, 448).to(cache.dtype).float()
        found = torch.stack([cache[b, first : first + 32] for b, first in enumerate(used.tolist())]).float()
        torch.testing.assert_close(found, nearest, rtol=0, atol=0, equal_nan=True)


def test_descales_that_lie_too_far_apart_for_kernels_are_copied(monkeypatch):
    """`attention` has the same; what is too far takes more memory than a test should."""
    handed = []
    monkeypatch.setattr("flashzoo.call.operands.is_far", lambda x: x is far)
    monkeypatch.setattr("flashzoo._triton.append.append", lambda *given: handed.extend(given[-2:]))
    near, far = (torch.rand(2, 4, device=DEVICE)[:, ::2] for _ in range(2))
    flashzoo.append(**GIVEN | IN_E4M3 | {"k_descale": near, "v_descale": far})
    assert handed[0] is near and handed[1].is_contiguous() and torch.equal(handed[1], far)


def test_nothing_to_append():
    caches = drawn(2, 20, 2, 16), drawn(2, 20, 2, 16)
    flashzoo.append(*caches, drawn(2, 0, 2, 16), drawn(2, 0, 2, 16), numbers(0, 0))


CACHES = {name: drawn(2, 20, 2, 16) for name in ("k_cache", "v_cache")}
GIVEN = CACHES | {"k": drawn(2, 3, 2, 16), "v": drawn(2, 3, 2, 16), "seqused_k": numbers(0, 0)}
E4M3 = torch.float8_e4m3fn
IN_E4M3 = {name: x.to(E4M3) for name, x in CACHES.items()}
ROWS, NEW, ROWS_IN_E4M3 = drawn(2, 21, 3, 16), drawn(2, 3, 2, 16), IN_E4M3["k_cache"]
MALFORMED = {
    "no tensor": ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
    "of three dimensions": (
        {"k_cache": drawn(2, 20, 16)},
        ValueError,
        r"k_cache must have 4 dimensions, got shape \(2, 20, 16\)",
    ),
    "of another batch": (
        {"k_cache": drawn(3, 20, 2, 16)},
        ValueError,
        "k must have k_cache's batch 3, got 2; pages go with page_table",
    ),
    "with other heads": (
        {"k_cache": drawn(2, 20, 3, 16)},
        ValueError,
        r"k_cache must have .* \(2, 20, 2, 16\), got \(2, 20, 3, 16\)",
    ),
    "of other heads": (
        {"v": drawn(2, 3, 1, 16)},
        ValueError,
        r"v must have k's batch, rows and heads \(2, 3, 2, 16\), got \(2, 3, 1, 16\)",
    ),
    "of other rows": (
        {"v_cache": drawn(2, 19, 2, 16)},
        ValueError,
        r"v_cache must have k_cache's rows .* got \(2, 19, 2, 16\)",
    ),
    "in another dtype": (
        {"k_cache": drawn(2, 20, 2, 16).float()},
        TypeError,
        "k_cache must be of dtype torch.float16, torch.float8_e4m3fn, got torch.float32",
    ),
    "float32 into e4m3": (
        {name: x.float() if name in "kv" else x.to(E4M3) for name, x in GIVEN.items() if x.is_floating_point()},
        TypeError,
        "k_cache must be of dtype torch.float32, got torch.float8_e4m3fn",
    ),
    "one cache in e4m3": (
        {"k_cache": drawn(2, 20, 2, 16, dtype=E4M3)},
        TypeError,
        "v_cache must be of dtype torch.float8_e4m3fn, got torch.float16",
    ),
    "a descale for copies": (
        {"k_descale": torch.ones(2, 2, device=DEVICE)},
        ValueError,
        "k_descale is for fp16 or bf16 rows into e4m3 caches, got it with torch.float16 into torch.float16",
    ),
    "a descale of new rows": (
        {**IN_E4M3, "v_descale": torch.ones(2, 3, 2, device=DEVICE)},
        ValueError,
        r"v_descale must have shape \(batch, heads_kv\) \(2, 2\), or .* \(2, 2, 1\), got \(2, 3, 2\)",
    ),
    "a descale in 16 bits": (
        {**IN_E4M3, "k_descale": drawn(2, 2)},
        TypeError,
        "k_descale must be of dtype torch.float32, got torch.float16",
    ),
    "used in 64 bits": (
        {"seqused_k": numbers(0, 0).long()},
        TypeError,
        "seqused_k must be of dtype torch.int32, got torch.int64",
    ),
    "used of others": (
        {"seqused_k": numbers(0)},
        ValueError,
        r"seqused_k must have shape \(batch,\) \(2,\), got \(1,\)",
    ),
    "used with gaps": ({"seqused_k": numbers(0, 1, 0, 1)[::2]}, ValueError, "seqused_k must be contiguous"),
    "a flat table": (
        {"page_table": numbers(0, 1)},
        ValueError,
        r"page_table must have shape \(batch, pages of a sequence\)",
    ),
    "a table of another batch": (
        {"page_table": numbers(0, 1).view(1, 2)},
        ValueError,
        "page_table must have a row for each of k's batch 2",
    ),
    "a table with gaps": (
        {"page_table": numbers(0, 1, 0, 1).view(2, 2).T},
        ValueError,
        "page_table must have shape .* with gaps",
    ),
    "transposed": (
        {"k": drawn(2, 3, 16, 2).mT},
        ValueError,
        r"k must be contiguous in its last dimension \(stride 1\), got stride 2",
    ),
    "expanded": (
        {"k_cache": drawn(1, 20, 2, 16).expand(2, -1, -1, -1)},
        ValueError,
        "k_cache must have memory of its own for each row, got strides",
    ),
    "overlapping": (
        {"k_cache": drawn(400).as_strided((2, 20, 2, 16), (200, 4, 80, 1))},
        ValueError,
        "k_cache must have memory of its own for each row, got strides",
    ),
    "negated": (
        {"v_cache": drawn(2, 20, 2, 16)._neg_view()},
        ValueError,
        "v_cache must be written to as it lies in memory, got one that is lazily negated",
    ),
    "rows of the cache": (
        {"v": CACHES["k_cache"][:, 4:7]},
        ValueError,
        "v must have memory of its own, got some of k_cache's, which is written to",
    ),
    "one cache": (
        {"v_cache": CACHES["k_cache"]},
        ValueError,
        "v_cache must have memory of its own where v or v_descale has, got k_cache's",
    ),
    "columns of one cache": (
        {"v_cache": CACHES["k_cache"][..., 4:], "v": drawn(2, 3, 2, 12)},
        ValueError,
        "v_cache must have memory of its own where v or v_descale has, got k_cache's",
    ),
    "heads of one cache": (
        {"k_cache": ROWS[..., :2, :], "v_cache": ROWS[..., 1:3, :]},
        ValueError,
        "v_cache must have memory of its own for each row, got some of other rows of k_cache",
    ),
    "rows of one cache": (
        {"k_cache": ROWS[:, :-1, :2], "v_cache": ROWS[:, 1:, :2]},
        ValueError,
        "v_cache must have memory of its own for each row, got some of other rows of k_cache",
    ),
    "rows of another order": (
        {"k_cache": ROWS[:, :20, :2], "v_cache": ROWS.view(-1)[:1280].view(2, 20, 2, 16)},
        ValueError,
        "v_cache must have memory of its own for each row, got some of other rows of k_cache",
    ),
    "other new columns": (
        {"v_cache": CACHES["k_cache"][..., 8:], "k": NEW, "v": NEW[..., 4:12]},
        ValueError,
        "v_cache must have memory of its own where v or v_descale has, got k_cache's",
    ),
    "other new columns to be rounded": (
        {"k_cache": ROWS_IN_E4M3, "v_cache": ROWS_IN_E4M3[..., 8:], "k": NEW, "v": NEW[..., 4:12]},
        ValueError,
        "v_cache must have memory of its own where v or v_descale has, got k_cache's",
    ),
    "complex": (
        {name: x.to(torch.complex64) for name, x in CACHES.items()},
        TypeError,
        "k_cache must be of a real dtype, got torch.complex64",
    ),
    "recorded": ({"k": drawn(2, 3, 2, 16).requires_grad_()}, ValueError, "k has no gradient through a cache"),
    "elsewhere": ({"v_cache": drawn(2, 20, 2, 16).to("meta")}, ValueError, "must have data, got device meta"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_arguments_are_refused_by_name(case):
    changed, error, text = MALFORMED[case]
    with pytest.raises(error, match=text):
        flashzoo.append(**GIVEN | changed)


@pytest.mark.parametrize("name", ["k", "seqused_k", "page_table", "k_descale", "v_descale"])
def test_is_for_outside_of_transforms(name):
    more = {
        "page_table": numbers(0, 1).view(2, 1),
        **{n: torch.ones(2, 2, device=DEVICE) for n in ("k_descale", "v_descale")},
    }
    given = {n: x.clone() for n, x in (GIVEN | IN_E4M3 | more).items()}
    with pytest.raises(NotImplementedError, match=f"flashzoo.append does not support {name} under torch.func.vmap"):
        torch.func.vmap(lambda x: (flashzoo.append(**given | {name: x}), x)[1])(torch.stack([given[name]] * 2))


def test_caches_share_no_memory_but_columns_of_a_row():
    """Of caches that lie anyhow in one tensor those are refused of which two numbers are one."""
    random, memory, refused = Random(0), torch.zeros(600, dtype=torch.int16, device=DEVICE), 0
    new = torch.zeros(2, 0, 2, 8, dtype=torch.int16, device=DEVICE)
    for _ in range(400):
        sizes, step, strides = (2, random.randint(1, 4), 2), random.randint(3, 9), {}
        for dim in random.sample(range(3), 3):
            strides[dim], step = step, step * sizes[dim] + random.choice((0, 0, 1, 5))
        widths = [random.randint(1, 4) for _ in range(2)]
        at = random.sample(range(41), 2)
        caches = [
            memory.as_strided((*sizes, width), (*[strides[dim] for dim in range(3)], 1), first)
            for width, first in zip(widths, at, strict=True)
        ]
        if max(widths) > min(strides.values()):  # then rows of one cache overlap
            continue
        places = torch.arange(600)
        k_at, v_at = (
            set(places.as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()) for x in caches
        )
        call = partial(flashzoo.append, *caches, *(new[..., :width] for width in widths), numbers(0, 0))
        if k_at & v_at:
            refused += 1
            with pytest.raises(ValueError, match="v_cache must have memory of its own"):
                call()
        else:
            call()
    assert 50 < refused < 350


def in_one_row(lies: str) -> tuple[Tensor, Tensor]:
    """Caches of head_dim 16 and 8 in one tensor, or of none."""
    memory = torch.zeros(4000, dtype=torch.float16, device=DEVICE)
    if lies == "heads behind heads":
        rows = memory[: 2 * 20 * 48].view(2, 20, 48)
        return rows[..., :32].view(2, 20, 2, 16), rows[..., 32:].view(2, 20, 2, 8)
    if lies == "sequences behind sequences":
        blocks = memory[: 2 * 20 * 48].view(2, 20 * 48)
        return blocks[:, : 20 * 32].view(2, 20, 2, 16), blocks[:, 20 * 32 :].view(2, 20, 2, 8)
    if lies == "heads first in one":
        blocks = memory[: 2 * 20 * 48].view(2, 20 * 48)
        return blocks[:, : 20 * 32].view(2, 20, 2, 16), blocks[:, 20 * 32 :].view(2, 2, 20, 8).transpose(1, 2)
    assert lies == "one head"  # whose stride says nothing
    rows = memory[: 2 * 20 * 24].view(2, 20, 24)
    return rows.as_strided((2, 20, 1, 16), (480, 24, 3, 1)), rows.as_strided((2, 20, 1, 8), (480, 24, 7, 1), 16)


@pytest.mark.parametrize("lies", ["heads behind heads", "sequences behind sequences", "heads first in one", "one head"])
def test_caches_of_two_widths_may_be_of_one_tensor(lies):
    k_cache, v_cache = in_one_row(lies)
    k, v = (drawn(2, 3, cache.shape[2], cache.shape[3]) for cache in (k_cache, v_cache))
    flashzoo.append(k_cache, v_cache, k, v, numbers(0, 5))
    for sequence, used in enumerate((0, 5)):
        for cache, new in ((k_cache, k), (v_cache, v)):
            assert torch.equal(cache[sequence, used : used + 3], new[sequence]) and cache.count_nonzero() == new.numel()


def test_values_that_are_columns_of_keys_are_rounded_once():
    k_cache, k = ROWS_IN_E4M3.clone(), drawn(2, 3, 2, 16)
    k_cache.zero_()
    flashzoo.append(k_cache, k_cache[..., 8:], k, k[..., 8:], numbers(0, 5))
    assert torch.equal(k_cache[1, 5:8].float(), k[1].to(torch.float8_e4m3fn).float())
    one = torch.ones(2, 2, device=DEVICE)
    flashzoo.append(k_cache, k_cache[..., 8:], k, k[..., 8:], numbers(0, 5), k_descale=one, v_descale=one)
    with pytest.raises(ValueError, match="memory of its own where v or v_descale has"):
        flashzoo.append(k_cache, k_cache[..., 8:], k, k[..., 8:], numbers(0, 5), v_descale=one)


def test_an_empty_cache_lies_anyhow():
    cache = drawn(1, 1, 2, 16).expand(2, 1, 2, 16)[:, :0]
    flashzoo.append(cache, cache, drawn(2, 3, 2, 16), drawn(2, 3, 2, 16), numbers(0, 5))


@pytest.mark.parametrize("lies", ["one behind the other", "side by side", "the last columns", "apart"])
def test_both_caches_and_new_rows_may_be_of_one_tensor(lies):
    """Rows of keys and values in turns; values that are the first or the last columns of keys, where the new ones are
    too; and columns of each in one row."""
    k, v = drawn(2, 3, 2, 16), drawn(2, 3, 2, 16)
    both = torch.zeros(2, 20, 2, 2, 16, dtype=k.dtype, device=DEVICE)
    k_cache, v_cache = both.unbind(2)
    if lies == "side by side":
        k_cache, v, v_cache = both[:, :, 0], k[..., :8], both[:, :, 0, :, :8]
    elif lies == "the last columns":
        k_cache, v, v_cache = both[:, :, 0], k[..., 8:], both[:, :, 0, :, 8:]
    elif lies == "apart":
        k, v = k[..., :8].clone(), v[..., 8:].clone()
        k_cache, v_cache = both[:, :, 0, :, :8], both[:, :, 0, :, 8:]
    flashzoo.append(k_cache, v_cache, k, v, numbers(0, 5))
    for sequence, used in enumerate((0, 5)):
        assert torch.equal(k_cache[sequence, used : used + 3], k[sequence])
        assert torch.equal(v_cache[sequence, used : used + 3], v[sequence])


@pytest.mark.gpu
def test_a_captured_graph_appends_behind_what_is_used_then():
    caches = [drawn(2, 20, 2, 16) for _ in range(2)]
    k, v, used = drawn(2, 1, 2, 16), drawn(2, 1, 2, 16), numbers(0, 5)
    flashzoo.append(*[cache.clone() for cache in caches], k, v, used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashzoo.append(*caches, k, v, used)
    for lengths in (numbers(0, 5), numbers(7, 19)):
        used.copy_(lengths)
        wanted = [expected(cache, x, used) for cache, x in zip(caches, (k, v), strict=True)]
        graph.replay()
        assert all(same_bits(*pair) for pair in zip(caches, wanted, strict=True))
