"""`flashzoo.parallel` on gloo, 2 and 4 processes of one spawn, and on NCCL where there are 2 or 4 GPUs: outputs, LSE
and gradients are the whole's. Without processes: that the calls of all ranks see what the whole sees, each pair once,
and what `explain` says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies
from parallel_ranks import CASES, cases_on, in_processes, raise_alone, run_cases
from torch.distributed.run import get_args_parser

import flashzoo
from bench import parallel as benchmark
from bench import scaling
from flashzoo import UnsupportedError, parallel
from flashzoo.lengths import Ranges
from flashzoo.parallel import documents, gather, groups, halo, packing, ring
from flashzoo.parallel.costs import pairs
from flashzoo.parallel.layout import numbers_of

GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parents[1]


def on_gpus(count: int) -> list[pytest.MarkDecorator]:
    """The marks of a test that wants so many GPUs to itself."""
    few = pytest.mark.skipif(count > GPUS, reason=f"needs {count} CUDA devices")
    return [pytest.mark.gpu, pytest.mark.alone, few]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each case raised, of all ranks, by its name."""
    return run_cases(tmp_path_factory.mktemp("parallel"), "cpu")


@pytest.fixture(scope="module")
def failures_on_gpus(tmp_path_factory):
    """The same by NCCL."""
    return run_cases(tmp_path_factory.mktemp("parallel_on_gpus"), "cuda")


@pytest.mark.parametrize("case", cases_on("cpu"))
def test_ranks(case, failures):
    assert not failures[case]


ON_GPUS = [pytest.param(name, marks=on_gpus(max(2, CASES[name].ranks)), id=name) for name in cases_on("cuda")]


@pytest.mark.parametrize("case", ON_GPUS)
def test_ranks_on_gpus(case, failures_on_gpus):
    assert not failures_on_gpus[case]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpus(2))])
def test_a_rank_that_raises_ends_all(device, tmp_path):
    begin = time.monotonic()
    with pytest.raises(Exception, match=r"ArithmeticError: the loss is no number|Connection (closed|reset)"):
        in_processes(raise_alone, 2, tmp_path, device)
    assert time.monotonic() - begin < 60


ENDS = """import atexit, os, pathlib
@atexit.register
def names_of_threads():
    names = [task.joinpath("comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
    pathlib.Path(os.environ["ENDS"], str(os.getpid())).write_text("".join(names))
"""


def test_the_benchmark_has_no_threads_of_a_group_at_pythons_end(tmp_path):
    """One that lets go of a tensor then aborts the process, once in some hundred runs."""
    (tmp_path / "sitecustomize.py").write_text(ENDS)
    (ends := tmp_path / "ends").mkdir()
    run = "-m torch.distributed.run --standalone --nproc-per-node 2 -m bench.parallel --device cpu --tokens 64"
    sizes = f"--heads 4:2 --head-dim 8 --passes fwd --ms 1 --impls torch_cp_allgather --out {tmp_path / 'rows.csv'}"
    paths = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "ENDS": str(ends)}
    command = [sys.executable, *run.split(), *sizes.split()]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0 and "torch_cp_allgather" in done.stdout, done.stdout
    names = [path.read_text() for path in ends.iterdir()]
    assert names and not any("gloo" in of_process for of_process in names)


class Group:
    """No more than a store that outlives it."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def get_group_store(self) -> Any:
        return self.store


def test_what_was_told_in_another_groups_life_is_forgotten():
    """A store outlives the group that met in it."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    for causal in ((True, True), (True, False)):  # first alike, and in the second life not

        def told(rank: int, causal: tuple[bool, bool] = causal) -> str:
            one = groups.Ranks(Group(store), rank, 2, groups._Agreed())
            try:
                return one.agree((("causal", causal[rank]),), lambda: "made")
            except ValueError as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(told, range(2)))
        if causal[0] == causal[1]:
            assert found == ["made", "made"]
        else:
            assert all("every rank must make the same call" in text for text in found)


def test_groups_of_any_sizes_may_have_met_in_a_store():
    """And what they told there is forgotten once all have heard it."""
    store, keys = dist.HashStore(), []  # pyright: ignore[reportPrivateImportUsage]
    for size in (3, 2, 1, 4, 3):
        with ThreadPoolExecutor(size) as pool:
            ranks = [groups.Ranks(Group(store), rank, size, groups._Agreed()) for rank in range(size)]
            for n in range(4):
                kind = (("n", n),)
                assert [*pool.map(lambda one, kind=kind: one.agree(kind, lambda: "made"), ranks)] == ["made"] * size
                keys.append(store.num_keys())
    assert len(set(keys[1:4])) == 1 and keys[13:16] == [keys[13]] * 3


BANDS = {"full": (None, None), "causal": (None, 0), "left": (5, 0), "long": (30, 0), "both": (9, 4), "right": (None, 7)}


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_calls_of_all_ranks_are_the_whole(band, size, chunks):
    """Every pair that the whole sees is in one call, and no other in any; under causal zigzag has the same work for
    all."""
    rows = 12
    left, right = (10**6 if side is None else side for side in band)
    i = torch.arange(rows * size)
    expected = (i >= i[:, None] - left) & (i <= i[:, None] + right)
    for method in (gather, ring):
        counts, work = torch.zeros_like(expected, dtype=torch.int64), []
        for rank in range(size):
            plan = method.planned(rank, size, rows, rows, chunks, band, False, (rows * size, rows * size))
            n = 1 if band == (None, None) else chunks

            def at(of, n=n):
                return torch.cat([i[c * (rows // n) : (c + 1) * (rows // n)] for c in numbers_of(of, size, n)])

            if method is gather:
                slots = [numbers_of(other, size, n)[lot] for lot in reversed(range(n)) for other in range(size)]
                keys = torch.cat([i[c * (rows // n) : (c + 1) * (rows // n)] for c in slots])
                calls = [(piece, at(rank)) for piece in plan.own] + [(piece, keys) for piece in plan.rest]
            else:
                calls = [(piece, at(rank)) for piece in plan.own]
                calls += [
                    (piece, at((rank - step) % size)) for step, pieces in enumerate(plan.steps) for piece in pieces
                ]
            before = counts.sum().item()
            for piece, of_k in calls:
                q, k = at(rank)[slice(*piece.q)], of_k[slice(*piece.k)]
                l, r = (10**6 if side is None else side for side in piece.band)
                diagonal = torch.arange(len(q))[:, None] + len(k) - len(q)
                j = torch.arange(len(k))
                counts[q[:, None], k] += ((j >= diagonal - l) & (j <= diagonal + r)).long()
            work.append(counts.sum().item() - before)
        assert torch.equal(counts, expected.long())
        if band == (None, 0) and chunks == 2:
            assert len(set(work)) == 1 and len(plan.own) == 2


def test_gather_has_two_calls_beside_the_diagonal():
    """Without a mask, whatever the number of ranks: what the slots' order is for."""
    for size in (2, 8, 64):
        for rank in range(size):
            plan = gather.planned(rank, size, 256, 256, 2, (None, 0), False, (256 * size, 256 * size))
            assert len(plan.own) == 2 and len(plan.rest) <= 2
            assert all(piece.band == (None, None) for piece in plan.rest)
            assert sum(piece.k[1] - piece.k[0] for piece in plan.rest) == (2 * size - 1) * 128


def test_pairs():
    for band in BANDS.values():
        left, right = (10**6 if side is None else side for side in band)
        i = torch.arange(1024)
        seen = ((i >= i[:, None] - left) & (i <= i[:, None] + right)).sum().item()
        assert pairs(1024, 1024, band) == pytest.approx(seen, rel=0.02)


def shard(rows: int, heads: int, heads_kv: int, **how) -> list[torch.Tensor]:
    return [
        torch.empty(1, rows, h, 128, device="meta", dtype=torch.bfloat16, **how) for h in (heads, heads_kv, heads_kv)
    ]


def test_explain_tells_bytes_and_why():
    few = parallel.explain(*shard(16384, 32, 8, requires_grad=True), group=2, causal=True)
    assert few.chosen == "gather"
    keys = 2 * 32768 * 8 * 128 * 2
    assert few.costs["gather"].forward.bytes == keys / 2 and few.costs["gather"].backward.bytes == keys
    assert few.costs["gather"].held == keys and few.costs["ring"].held == keys
    queries = 2 * 32768 * 32 * 128 * 2
    assert few.costs["ulysses"].forward.bytes == (queries / 2 + keys / 2) / 2
    many = parallel.explain(*shard(1024, 32, 32), group=8, causal=True)
    assert many.chosen == "ulysses" and many.costs["ulysses"].backward.bytes == 0
    text = str(parallel.explain(*shard(1024, 12, 4), group=8, causal=True, method="ulysses"))
    assert text.startswith("no method for 8 ranks") and "heads must be a multiple of the 8 ranks, got 12" in text
    assert "* gather" in str(few) and "134.2 MB" in str(few)
    packed = parallel.explain(*(x[0] for x in shard(1024, 32, 8)), group=2, causal=True,
                              cu_seqlens_q=torch.empty(4, dtype=torch.int32, device="meta"))  # fmt: skip
    assert packed.chosen == "ulysses" and packed.sizes.packed
    assert packed.reasons["halo"] == ("max_seqlen_q must say how many rows a sequence has at most, or max_across",)


def test_explain_tells_the_halo():
    """Its bytes are those of the rows of others that are at hand; where a sequence may be as long as many ranks' rows,
    what is even is taken."""
    cu_seqlens = torch.empty(90, dtype=torch.int32, device="meta")
    for layout, size, halos in (("contiguous", 2, 1), ("zigzag", 2, 1), ("contiguous", 4, 1), ("zigzag", 4, 2)):
        rows = [x[0] for x in shard(32768, 32, 8, requires_grad=True)]
        how = {"group": size, "layout": layout, "causal": True, "cu_seqlens_q": cu_seqlens}
        told = parallel.explain(*rows, max_seqlen_q=2049, **how)
        forward, backward, held = told.costs["halo"]
        assert told.chosen == "halo" and forward.bytes == backward.bytes == held == halos * 2048 * 2 * 8 * 128 * 2
        assert "2048 rows before and 0 behind" in str(told) and "being 4096 B" in str(told)
    assert parallel.explain(*rows, max_seqlen_q=65536, **how).chosen == "ulysses"
    for longest in ({}, {"max_seqlen_q": 9000}):
        shared = parallel.explain(*rows, **longest, max_across=2049, **how)
        assert shared.chosen == "halo" and shared.costs["halo"] == told.costs["halo"]._replace(
            forward=shared.costs["halo"].forward, backward=shared.costs["halo"].backward
        )
        assert shared.costs["halo"].forward.bytes == forward.bytes
        assert "sequences that lie in several chunks have at most 2049 rows" in str(shared)
        assert ("a rank with a sequence of 9000 rows to itself" in str(shared)) == bool(longest)
    assert "halo" not in parallel.explain(*shard(1024, 32, 8), group=2).costs


@pytest.mark.parametrize("band", [(None, 0), (None, None), (6, 0)], ids=["causal", "full", "window"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("whole", [96, 89, 10])
@pytest.mark.parametrize("longest", [1, 5, 40, 96])
def test_every_rank_has_the_keys_of_its_halo(band, chunks, whole, longest):
    """Each row that a sequence across a chunk's border may reach is at hand once for it, comes from where it is, and is
    sent by whoever is asked for it; queries are where the plan says."""
    size, step = 4, 96 // 4 // chunks
    before, behind = halo.reach(longest, band)
    plans = [halo.planned(rank, size, step, chunks, whole, longest, band) for rank in range(size)]
    at = [[n * step + i for n in numbers_of(rank, size, chunks) for i in range(step)] for rank in range(size)]
    for rank, plan in enumerate(plans):
        expected = []
        for number in numbers_of(rank, size, chunks):
            first, end = min(number * step, whole), min((number + 1) * step, whole)
            own = range(first, end)
            if 0 < first < end:
                most = own[: longest - 1]
                expected += [*range(max(0, first - before), first), *most]
                expected += range(first + len(most), min(whole, first + behind))
            if first < end < whole and behind:
                expected += [*own[-behind:], *range(end, min(whole, end + behind))]
        found = [None] * plan.at_hand
        for other, src, into in [(rank, *move) for move in plan.own] + list(plan.gets):
            assert found[slice(*into)] == [None] * (src[1] - src[0])
            found[slice(*into)] = at[other][slice(*src)]
        assert found == expected
        for edge in plan.edges:
            assert at[rank][slice(*edge.rows)] == [*range(*edge.queries)]
        for other, theirs in enumerate(plans):
            given = [(src, into) for to, src, into in theirs.gives if to == rank]
            assert given == [(src, into) for of, src, into in plan.gets if of == other]


@given(
    lengths=strategies.lists(strategies.integers(0, 40), max_size=12),
    more=strategies.integers(0, 9),
    first=strategies.integers(0, 3),
    size=strategies.integers(1, 4),
    chunks=strategies.sampled_from([1, 2]),
    band=strategies.sampled_from([(None, 0), (None, None), (6, 0), (0, 0)]),
    too_low=strategies.just(0) | strategies.integers(1, 40),
)
def test_each_row_sees_in_one_call_what_it_sees_in_the_whole(lengths, more, first, size, chunks, band, too_low):
    """Whatever sequences are of rows, with rows before the first and behind the last, and padding; or it is said to be
    lost, where its sequence is longer than was said."""
    cu_seqlens = torch.tensor((first, *lengths)).cumsum(0).int()
    whole, longest = int(cu_seqlens[-1]) + more, max(0, max(lengths, default=0) - too_low)
    step = max(1, -(-whole // (size * chunks)))
    seen = Ranges(cu_seqlens, cu_seqlens).visible(band, whole, whole)
    length_of = torch.tensor([0] * first + [length for length in lengths for _ in range(length)] + [0] * more)
    for rank in range(size):
        plan = halo.planned(rank, size, step, chunks, whole, longest, band)
        of = halo.whose(cu_seqlens, plan, longest)
        rows = torch.cat([torch.arange(*chunk) for chunk in plan.chunks])
        found = torch.zeros(len(rows), whole, dtype=torch.int64)
        found[:, rows] += Ranges(*of.cu_seqlens.values()).visible(band, len(rows), len(rows))
        lost = torch.zeros(len(rows), dtype=torch.bool)
        for edge, across in zip(plan.edges, of.across, strict=True):
            queries, keys = slice(*edge.rows), slice(*edge.keys)
            part = Ranges(*across.cu_seqlens.values()).visible(band, len(rows[queries]), edge.keys[1] - edge.keys[0])
            there = ~across.lost[slice(*(row - edge.chunk[0] for row in edge.queries))]
            assert torch.equal(part.any(1)[there], across.queries[there])
            assert not (found[queries][across.queries]).any()
            found[queries, keys] += part
            lost[slice(*edge.own)] |= across.lost
        assert torch.equal(found[~lost], seen[rows][~lost].long())
        assert (length_of[rows][lost] > longest).all()


LENGTHS = strategies.lists(strategies.integers(0, 60), max_size=25)


@given(lengths=LENGTHS, ranks=strategies.integers(1, 8))
def test_documents_in_balanced_order_are_all_there_and_no_less_even(lengths, ranks):
    order = parallel.balanced(lengths, ranks)
    assert sorted(order) == [*range(len(lengths))]
    before, after = (packing.works(of, ranks) for of in (lengths, [lengths[i] for i in order]))
    assert max(after) <= packing.AS_EVEN * max(before) and sum(after) == sum(before)


@given(lengths=LENGTHS, ranks=strategies.integers(1, 4), layout=strategies.sampled_from(["contiguous", "zigzag"]))
def test_the_longest_across_is_that_of_rows_in_several_chunks(lengths, ranks, layout):
    of_row = [i for i, length in enumerate(lengths) for _ in range(length)]
    parts = ranks * (2 if layout == "zigzag" else 1)
    rows = max(1, -(-len(of_row) // parts))
    shared = [lengths[of_row[at]] for at in range(rows, len(of_row), rows) if of_row[at] == of_row[at - 1]]
    assert parallel.longest_across(lengths, ranks, layout) == max(shared, default=0)


def test_documents_that_shards_share_are_short_where_the_others_are_even_without():
    """A long document in each shard, and short ones."""
    lengths = [8000] * 4 + [60] * 600
    order = [lengths[i] for i in parallel.balanced(lengths, 4)]
    mean = sum(packing.works(order, 4)) / 4
    assert parallel.longest_across(order, 4) <= 60 and max(packing.works(order, 4)) < 1.01 * mean


@given(lengths=LENGTHS, ranks=strategies.integers(1, 8))
def test_a_shards_work_is_that_of_its_rows(lengths, ranks):
    """A causal row sees itself and those before it, in half of which a square is cut from its document's."""
    rows = [i + 0.5 for length in lengths for i in range(length)]
    shard = max(1, -(-len(rows) // ranks))
    assert packing.works(lengths, ranks) == [sum(rows[rank * shard :][:shard]) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_document_that_is_most_of_the_work_is_cut_where_half_of_it_is(ranks):
    """A shard of rows in one document for every two ranks, and as many in short ones."""
    lengths = [4096] * (ranks // 2) + [64] * (64 * ranks // 2)
    mean = sum(packing.works(lengths, ranks)) / ranks
    assert max(packing.works(lengths, ranks)) > 1.9 * mean
    assert max(packing.works([lengths[i] for i in parallel.balanced(lengths, ranks)], ranks)) < 1.02 * mean


@given(lengths=LENGTHS, ranks=strategies.integers(1, 8))
def test_documents_are_dealt_to_all_ranks_or_to_one(lengths, ranks):
    deal = documents.dealt(lengths, ranks)
    assert sorted([*deal.shared, *(i for own in deal.whole for i in own)]) == [*range(len(lengths))]
    for own, rows, work in zip(deal.whole, deal.rows, deal.works, strict=True):
        of_shared = [lengths[i] for i in deal.shared]
        assert rows == sum(lengths[i] for i in own) + sum(2 * -(-length // (2 * ranks)) for length in of_shared)
        expected = sum(lengths[i] ** 2 / 2 for i in own) + sum(length**2 / 2 for length in of_shared) / ranks
        assert work == pytest.approx(expected)
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    assert deal.uneven <= documents._dealt(lengths, longest, 0, ranks).uneven


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_document_that_is_most_of_the_work_is_dealt_to_all(ranks):
    deal = documents.dealt([8192] + [128] * 64 * ranks, ranks)
    assert deal.shared == (0,) and deal.uneven <= packing.AS_EVEN
    assert documents.dealt([128] * 64 * ranks, ranks).shared == ()


@pytest.mark.parametrize(("count", "ranks"), [(17, 32), (20, 64), (24, 16)])
def test_equal_documents_that_ranks_do_not_divide_are_shared(count, ranks):
    deal = documents.dealt([4096] * count, ranks)
    assert len(deal.shared) == count % ranks and deal.uneven == 1


def test_balanced_refuses():
    with pytest.raises(TypeError, match=r"lengths must be whole numbers, got 2\.5 at 1"):
        parallel.balanced([3, 2.5], 2)
    with pytest.raises(ValueError, match="lengths must be from 0 on, got -1 at 0"):
        parallel.balanced(torch.tensor([-1, 4]), 2)
    with pytest.raises(ValueError, match="group must be a group, or a number of ranks"):
        parallel.balanced([3], 0)
    with pytest.raises(TypeError, match=r"group must be a torch\.distributed\.ProcessGroup"):
        parallel.balanced([3], "2")
    with pytest.raises(ValueError, match="lengths must be from 0 on, got -1 at 0"):
        parallel.longest_across([-1], 2)
    with pytest.raises(ValueError, match="layout must be 'zigzag' or 'contiguous', got 'rows'"):
        parallel.longest_across([3], 2, "rows")


@pytest.mark.parametrize(
    ("max_across", "kind", "text"),
    [
        (2.0, TypeError, r"max_across must be an int, got 2\.0"),
        (True, TypeError, "max_across must be an int, got True"),
        (-1, ValueError, "max_across must be 0 or more, got -1"),
        (3, ValueError, "max_across goes with cu_seqlens_q, got 3 without"),
    ],
)
def test_max_across_that_is_none(max_across, kind, text):
    for size in (1, 2):
        with pytest.raises(kind, match=text):
            parallel.explain(*shard(64, 2, 2), group=size, max_across=max_across)


def test_the_page_has_the_models_table():
    page = scaling.PAGE.read_text()
    assert scaling.table() in page and scaling.table_of_orders() in page


def test_torchrun_leaves_the_benchmark_its_options(capsys):
    """It takes the beginning of a name for its own option, behind the script's too."""
    with pytest.raises(SystemExit):
        benchmark.arguments(["--help"])
    options = {*re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)}
    assert {"--tokens", "--run-id", "--out"} <= options
    for option in options:
        command = ["--nproc-per-node", "2", "-m", "bench.parallel", option, "value"]
        assert get_args_parser().parse_args(command).training_script_args == command[4:]


def test_explain_refuses():
    q, k, v = shard(16, 4, 4)
    with pytest.raises(ValueError, match="group must be a group, or a number of ranks"):
        parallel.explain(q, k, v, group=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cause'"):
        parallel.explain(q, k, v, group=2, cause=True)
    with pytest.raises(UnsupportedError, match=r"no method can take this call for 8 ranks\n.*gather: .*\n.*ring: .*"):
        parallel.explain(*shard(16, 4, 4), group=8, precision="fp8").taken()
    assert flashzoo.parallel is parallel
