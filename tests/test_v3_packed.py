"""What is special to v3's packed sequences: tiles and masks on integers, rows as TMA counts them,
what lies where beside the kernel.

What it computes THE suite and test_packed.py say; what it compiles to test_compile_v3.py.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from on_integers import Memory, as_written, assume, missed
from test_v3_delta import as_registers, parts_of_keys
from torch import Tensor

from flashzoo import Problem
from flashzoo._cute.arguments import Packer
from flashzoo._cute.driver import TensorMap
from flashzoo._cute.hopper import bounds as bounds_module
from flashzoo._cute.hopper import tile_scheduler
from flashzoo._cute.hopper.bounds import NEVER, Bounds, BoundsBackward
from flashzoo._cute.tma import map_of_rows
from flashzoo._triton.packed import tiles_of
from flashzoo._triton.packed_kernels import COLUMNS
from flashzoo.call.operands import Operands
from flashzoo.gpu import SHARED_LIMIT, WARPGROUP_ROWS
from flashzoo.inputs import descales
from flashzoo.v3 import FP8_SPEC, fp8, launch, launch_fp8, packed
from flashzoo.v3.config import (
    BACKWARD,
    HOPPER,
    kernel_backward_for,
    kernel_for,
    kernel_fp8_for,
    pack_gqa_for,
    prepares,
    splits_for,
)
from flashzoo.v3.explain import describe_fp8, refusals_fp8
from flashzoo.v3.fp8 import Descale, Scaling, SoftmaxFp8
from flashzoo.v3.packed import (
    BoundsBackwardPacked,
    BoundsPacked,
    Entry,
    ParamsPacked,
    TileSchedulerBackwardPacked,
    TileSchedulerPacked,
    of_ragged,
)
from flashzoo.v3.programs import TABLE, arguments_of
from flashzoo.v3.traits import (
    ENTRY,
    Kernel,
    KernelBackward,
    KernelBackwardPacked,
    KernelFp8Packed,
    KernelPacked,
    Tiles,
    TilesBackward,
)

AS_WRITTEN = as_written(Bounds, BoundsBackward, BoundsPacked, BoundsBackwardPacked, SoftmaxFp8)
PLAIN = Problem(1, 300, 300, 4, 2, 64, sequences=5, dtype="fp16", lse=True, grad=True, arch=90)
IN_E4M3 = replace(PLAIN, dtype="e4m3", out_dtype=None, grad=False)


@pytest.fixture
def on_integers(monkeypatch):
    """The device's code as what it is without CuTe DSL: arithmetic."""
    for owner, name, method in AS_WRITTEN:
        monkeypatch.setattr(owner, name, method)
    for module in (tile_scheduler, bounds_module, packed, fp8):
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(min=min, max=max, range_constexpr=range))
        for name in ("Int32", "Int64"):
            monkeypatch.setattr(module, name, int, raising=False)

    def copy(source: Memory, target: list[int]) -> None:
        target[:] = [source[i] for i in range(len(target))]

    of_cute = {"make_tensor": lambda x, _: x, "make_layout": int, "make_rmem_tensor": lambda n, _: [0] * n}
    monkeypatch.setattr(fp8, "cute", SimpleNamespace(**of_cute))
    monkeypatch.setattr(packed, "cute", SimpleNamespace(**of_cute, autovec_copy=copy, assume=assume))


CASES = {
    "plain": ([0, 100, 101, 101, 230, 300], None, None),
    "around": ([7, 60, 60, 200, 263, 263], [20, 21, 21, 180, 200, 270], None),
    "more_keys": ([0, 0, 64, 65, 66, 300], [0, 150, 150, 151, 290, 299], None),
    "used": ([0, 130, 200, 250, 280, 300], [0, 130, 200, 250, 280, 300], [65, 0, 50, 1, 19]),
    "falling": ([0, 90, 20, 100, 200, 300], None, None),
    "beyond": ([-70, 90, 128, 200, 1 << 30, 1 << 30], None, None),
}
SPANS = {"full": {}, "causal": {"causal": True}, "left": {"window": (40, None)}, "window": {"window": (30, 9)}}
every_case = pytest.mark.parametrize("case", CASES)
every_span = pytest.mark.parametrize("span", SPANS)


def operands_of(case: str) -> Operands:
    """Lengths, on the CPU."""
    q, k, used = (None if numbers is None else torch.tensor(numbers, dtype=torch.int32) for numbers in CASES[case])
    return Operands(cu_seqlens_q=q, cu_seqlens_k=k, seqused_k=used)


def asked(case: str, span: str, **fields) -> Problem:
    return replace(PLAIN, used_k=CASES[case][2] is not None, **SPANS[span], **fields)


def visible(problem: Problem, operands: Operands) -> Tensor:
    """Which rows of k each row of q sees."""
    return operands.ranges.visible(problem.span, problem.seqlen_q, problem.seqlen_k)


def scheduler_of(
    problem: Problem, operands: Operands, kernel: Kernel | KernelBackwardPacked, splits: int = 1, wave: int = 1
) -> TileSchedulerPacked:
    """The scheduler of a launch, with the table as the kernel before it leaves it; the query heads of a key/value head
    over so many tiles, of which so many are a wave."""
    p, of_keys = problem, isinstance(kernel, KernelBackward)
    pack = 0 if of_keys else pack_gqa_for(p, kernel.tiles.block_q)
    rows, block = (p.seqlen_k, kernel.tiles.block_kv) if of_keys else (p.seqlen_q, kernel.tiles.block_q >> pack)
    heads, group = (p.heads_kv, p.heads // p.heads_kv) if of_keys else (p.heads >> pack, p.heads // p.heads_kv >> pack)
    heads, group_kv, group = heads * splits, group, -(-group // splits)
    table = tiles_of(p, operands, 64, block)[1] if of_keys else tiles_of(p, operands, block)[0]
    assert table.shape == (p.entries(rows, block), ENTRY)
    sizes = (
        p.seqlen_q,
        p.seqlen_k,
        heads,
        group,
        group_kv,
        splits,
        1,
        pack,
        *p.reach,
        p.entries(rows, block),
        heads,
        1,
        wave,
        None,
    )
    kind = TileSchedulerBackwardPacked if of_keys else TileSchedulerPacked
    return kind(ParamsPacked(kernel, *sizes, Memory(table.flatten().tolist())))


def block_of(scheduler: TileSchedulerPacked) -> int:
    """Rows of a block of the table."""
    kernel = scheduler.params.kernel
    return (
        kernel.tiles.block_kv
        if isinstance(kernel, KernelBackward)
        else kernel.tiles.block_q >> int(scheduler.params.pack_gqa)
    )


def works(scheduler: TileSchedulerPacked) -> list[Entry]:
    """All tiles' work as it comes through shared memory, in the order in which tiles begin."""
    found = []
    for tile_idx in itertools.count():
        smem = [0] * scheduler.params.kernel.words_of_work
        scheduler.to_smem(smem, scheduler.work_of(tile_idx))
        work = scheduler.from_smem(smem)
        if not scheduler.is_valid(work):
            break
        assert work.block * block_of(scheduler) < work.owned, "of a block"
        found.append(work)
    assert len(found) == scheduler.tiles(scheduler.work_of(0)), "as many as blocks fetch"
    return found


def test_an_entry_is_a_row_of_the_table():
    assert COLUMNS.value == ENTRY and len(fields(Entry)) == ENTRY + 1


def test_every_head_dim_has_kernels_that_fit():
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        problem = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v)
        forward, backward = kernel_for(problem), kernel_backward_for(problem)
        assert isinstance(forward, KernelPacked) and isinstance(backward, KernelBackwardPacked)
        assert forward.tiles in HOPPER.values() and backward.tiles in BACKWARD.values()
        assert max(forward.shared_bytes, backward.shared_bytes) <= SHARED_LIMIT[90]


def test_every_head_dim_has_an_fp8_kernel_that_fits():
    for head_dim in FP8_SPEC.head_dims:
        problem = replace(IN_E4M3, head_dim=head_dim, head_dim_v=None, seqlen_q=1 << 20)
        kernel = kernel_fp8_for(problem, False, prepares(problem))
        assert isinstance(kernel, KernelFp8Packed) and kernel.shared_bytes <= SHARED_LIMIT[90]
        assert kernel == kernel_fp8_for(replace(problem, seqlen_q=1, sequences=1), False, False)
    for wrong in ({"block_scales": True}, {"transposed": True}):
        with pytest.raises(
            ValueError, match=f"has scales by head and transposes V on chip, got .*{next(iter(wrong))}=True"
        ):
            replace(kernel, **wrong)


def test_no_length_asks_for_another_kernel():
    """Else a sequence's bits would depend on what it is packed with; those of gradients may, unless deterministic."""
    fixed = replace(PLAIN, deterministic=True)
    for others in ({"seqlen_q": 1}, {"seqlen_q": 1 << 20}, {"seqlen_k": 9}, {"sequences": 1}, {"max_seqlen_q": 1}):
        other = replace(PLAIN, **others)
        assert kernel_for(other) == kernel_for(PLAIN)
        assert kernel_backward_for(replace(fixed, **others)) == kernel_backward_for(fixed)
        assert splits_for(replace(fixed, **others)) == 1
        assert pack_gqa_for(other, 128) == pack_gqa_for(PLAIN, 128) == 1


TILES = {"of_2": Tiles(2, 128), "of_3": Tiles(3, 80)}


@every_case
@every_span
@pytest.mark.parametrize(("tiles", "heads"), [("of_2", 2), ("of_2", 6), ("of_3", 4)])
def test_each_row_of_each_head_is_in_one_tile_and_sees_its_keys(case, span, tiles, heads, on_integers):
    problem, operands = asked(case, span, heads=heads), operands_of(case)
    kernel = replace(kernel_for(problem), tiles=TILES[tiles])
    seen, scheduler = visible(problem, operands), scheduler_of(problem, operands, kernel)
    params, rows_written = scheduler.params, set()
    for work in works(scheduler):
        bounds = BoundsPacked(params, scheduler.work_tile(work))
        begin, end = bounds.block_range()
        assert 0 <= begin < end
        for first_row in range(
            bounds.tile.block * kernel.tiles.block_q, (bounds.tile.block + 1) * kernel.tiles.block_q, WARPGROUP_ROWS
        ):
            mine = bounds.blocks_of_rows(first_row, begin, end)
            assert begin <= mine.begin <= mine.left <= mine.right <= mine.end <= end and mine.begin < mine.end
            for row, r in itertools.product((row for row in range(WARPGROUP_ROWS) if row % 16 < 8), range(2)):
                packed_row = first_row + row + 8 * r
                position, packed_head = packed_row >> params.pack_gqa, packed_row & ((1 << params.pack_gqa) - 1)
                if position >= work.rows_q:
                    continue
                lowest, highest = bounds.of_thread(first_row + row, 0)[r]
                keys = set()
                for n in range(mine.begin, mine.end):
                    of_block = range(n * kernel.tiles.block_kv, (n + 1) * kernel.tiles.block_kv)
                    if n == mine.end - 1 or not mine.left <= n < mine.right:
                        left, right = kernel.left, n == mine.end - 1 or n >= mine.right
                        of_block = [
                            key for key in of_block if not (left and key < lowest) and not (right and key >= highest)
                        ]
                    keys.update(of_block)
                at, head = work.first_q + position, (bounds.tile.head << params.pack_gqa) + packed_head
                assert {work.first_k + key for key in keys} == {*seen[at].nonzero().flatten().tolist()}, (
                    f"{work}, row {at}"
                )
                assert bounds.place_of_row(packed_head, position) == head * problem.seqlen_q + at
                assert (head, at) not in rows_written
                rows_written.add((head, at))
    assert len(rows_written) == problem.heads * problem.seqlen_q


class Registers(list):
    def fill(self, value: float) -> None:
        self[:] = [value] * len(self)


@every_case
@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize("kinds", [("head",) * 3, ("head", None, None), (None, "head", "head")], ids=str)
def test_each_row_is_under_its_own_sequences_scales(case, heads, kinds, on_integers):
    """And no scale is read that is not there, by rows around all sequences neither."""
    problem, operands = (
        replace(asked(case, "causal", heads=heads), dtype="e4m3", out_dtype=None, grad=False),
        operands_of(case),
    )
    numbers = [x if kind else torch.ones(1) for x, kind in zip(descales(problem, "head"), kinds, strict=True)]
    # with gaps between rows
    numbers = [torch.nn.functional.pad(x, (0, 3))[:, : problem.heads_kv] if x.ndim == 2 else x for x in numbers]
    scale_log2, *of_tensors, q_group = launch_fp8.scaling_of(problem, tuple(numbers))
    memory = [x.as_strided((problem.sequences * x.stride(0) if x.ndim == 2 else 1,), (1,)).tolist() for x in numbers]
    q, k, v = (Descale(Memory(memory[i]), *of_tensors[4 * i + 1 : 4 * i + 4]) for i in range(3))
    kernel = kernel_fp8_for(problem, False, False)
    scheduler, group, met = scheduler_of(problem, operands, kernel), problem.heads // problem.heads_kv, set()
    softmax = SoftmaxFp8(
        kernel, Scaling(scale_log2, q, k, v, q_group), *(Registers([0.0] * n) for n in (2, 2, 2, 2, 1, 2, 2, 1))
    )
    for work in works(scheduler):
        bounds = BoundsPacked(scheduler.params, scheduler.work_tile(work))
        pack = scheduler.params.pack_gqa
        for row in (*range(8), kernel.tiles.block_q - 16):
            softmax.reset(bounds, bounds.tile.block * kernel.tiles.block_q + row)
            if not work.rows_k:
                continue
            for r in range(2):
                of_head = (bounds.tile.head << pack) + ((row + 8 * r) & ((1 << pack) - 1))
                q_scale, k_scale, v_scale = (
                    float(x[work.number - 1, of_head // group]) if x.ndim == 2 else 1.0 for x in numbers
                )
                assert (
                    softmax.scale_log2[r] == pytest.approx(scale_log2 * q_scale * k_scale)
                    and softmax.v_scale[0] == v_scale
                )
                met.add((work.number - 1, of_head))
    lengths = zip(*(torch.stack(operands.ranges.bounds(300, 300)).tolist()), strict=True)
    with_keys = [i for i, (first_q, end_q, first_k, end_k) in enumerate(lengths) if end_q > first_q and end_k > first_k]
    assert met == {*itertools.product(with_keys, range(problem.heads))}


@pytest.mark.parametrize(
    ("lengths", "heads_kv", "group", "most"),
    [
        ([4096] * 8, 4, 7, 1.0),
        ([2048] * 12, 8, 8, 1.6),
        ([8192] * 2, 8, 4, 2.2),
        ([1971, 3671, 6848, 1200, 5521, 900, 4500], 8, 4, 2.0),
        ([512] * 32, 4, 7, 1.1),
    ],
    ids=["of_a_wave", "of_two", "of_four", "of_all_lengths", "short"],
)
def test_tiles_of_sequences_that_run_together_read_the_same(lengths, heads_kv, group, most, on_integers):
    """As of dense tensors (`test_v3_backward.py`), sequence after sequence. All one way, L2 misses 8.5, 4.7, 12.7, 6.1
    and 1.1 times as much as there is."""
    total = sum(lengths)
    problem = replace(PLAIN, seqlen_q=total, seqlen_k=total, heads=group * heads_kv, heads_kv=heads_kv)
    problem = replace(problem, head_dim=128, causal=True, sequences=len(lengths))
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    kernel = replace(kernel_backward_for(problem), split_queries=False)
    scheduler = scheduler_of(problem, Operands(cu_seqlens_q=cu, cu_seqlens_k=cu), kernel, wave=132)

    def walk(work):
        bounds = BoundsBackwardPacked(scheduler.params, scheduler.work_tile(work))
        begin, end = bounds.block_range()
        return ((work.number, *bounds.step(i, begin, end)) for i in range(bounds.steps(begin, end)))

    found = missed(map(walk, works(scheduler)))
    assert found <= 1.05 * most * group * heads_kv * sum(-(-length // 64) for length in lengths)


@pytest.mark.parametrize("span", SPANS)
def test_a_launch_tells_how_many_tiles_begin_together(span, monkeypatch):
    told = []

    def bind(device, blocks, fixed, given, cluster):
        told.append(fixed["wave"])

    monkeypatch.setattr(launch, "function_for", lambda kernel: SimpleNamespace(bind=bind))
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    problem = replace(PLAIN, **SPANS[span])
    q, kv = (torch.empty(300, heads, 64).stride() for heads in (4, 2))
    launch.BackwardLaunch(problem, kernel_backward_for(problem), (q, kv, kv, q), q, False, 0)
    assert told == [132 if span == "causal" else 1]


TILINGS = {
    "128x128": TilesBackward(128),
    "128x64": TilesBackward(64),
    "64x64": TilesBackward(64, 64),
    "128x64_in_halves": TilesBackward(64, ds_stages=1, halved=True),
}


@every_case
@every_span
@pytest.mark.parametrize("tiling", TILINGS)
def test_each_key_of_each_head_is_in_one_tile_and_meets_its_queries(case, span, tiling, on_integers):
    problem, operands = asked(case, span), operands_of(case)
    kernel = replace(kernel_backward_for(problem), tiles=TILINGS[tiling])
    seen, scheduler = visible(problem, operands), scheduler_of(problem, operands, kernel)
    params, tiles, written = scheduler.params, kernel.tiles, set()
    for work in works(scheduler):
        bounds = BoundsBackwardPacked(params, scheduler.work_tile(work))
        begin, end = bounds.block_range()
        assert bounds.walks_any(begin, end) == (begin < end)
        if begin < end:
            steps = [bounds.step(i, begin, end) for i in range(bounds.steps(begin, end))]
            heads = range(bounds.tile.head * params.group, (bounds.tile.head + 1) * params.group)
            assert sorted(steps) == [*itertools.product(heads, range(begin, end))]
        first_key = bounds.tile.block * tiles.block_kv
        for key in range(first_key, first_key + tiles.block_kv):
            if key >= work.owned:
                continue
            lowest, highest = bounds.of_key(key, 0)
            queries = set()
            for n in range(begin, end):
                of_block = range(n * tiles.block_q, (n + 1) * tiles.block_q)
                if bounds.crosses(key // WARPGROUP_ROWS * WARPGROUP_ROWS, n):
                    of_block = [
                        query for query in of_block if lowest <= query and not (kernel.left and query >= highest)
                    ]
                queries.update(query for query in of_block if query < work.rows_q)  # LSE is inf past the last
            at = work.first_k + key
            expected = {*seen[:, at].nonzero().flatten().tolist()}
            assert {work.first_q + query for query in queries} == expected, f"{work}, key {at}"
            assert (bounds.tile.head, at) not in written
            written.add((bounds.tile.head, at))
    assert len(written) == problem.heads_kv * problem.seqlen_k


@every_case
@every_span
@pytest.mark.parametrize("tiling", TILINGS)
def test_tiles_add_to_dq_in_the_order_in_which_they_begin(case, span, tiling, on_integers):
    """Else a tile waits for ever: for one that never adds, or for one that waits behind it."""
    problem = asked(case, span, deterministic=True)
    scheduler = scheduler_of(problem, operands_of(case), replace(kernel_backward_for(problem), tiles=TILINGS[tiling]))
    added = {}
    for work in works(scheduler):
        bounds = BoundsBackwardPacked(scheduler.params, scheduler.work_tile(work))
        begin, end = bounds.block_range()
        for i in range(bounds.steps(begin, end)):
            head, n = bounds.step(i, begin, end)
            block, before = bounds.block_of_queries(head, n), bounds.adds_before(n)
            if before != NEVER:
                assert added.setdefault(block, 0) == before, f"{work}, block of queries {n}"
                added[block] += 1


@every_case
@pytest.mark.parametrize("span", ["full", "causal"])
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_the_longest_sequence_begins_first_and_of_each_its_longest_tiles(case, span, of_keys, on_integers):
    """One sequence after the other, as tiles that run together share what they read."""
    problem = asked(case, span, heads=2)
    kernel, bounds_of = (
        (kernel_backward_for(problem), BoundsBackwardPacked) if of_keys else (kernel_for(problem), BoundsPacked)
    )
    scheduler, walked = scheduler_of(problem, operands_of(case), kernel), {}
    for work in works(scheduler):
        begin, end = bounds_of(scheduler.params, scheduler.work_tile(work)).block_range()
        walked.setdefault((work.rows_q if of_keys else work.rows_k, work.number), []).append(end - begin)
    assert [length for length, _ in walked] == sorted((length for length, _ in walked), reverse=True)
    assert len(walked) == len({number for _, number in walked}), "a sequence in two places"
    assert all(later <= earlier for tiles in walked.values() for earlier, later in pairwise(tiles))


def reached(tma: TensorMap, *place: int) -> int | None:
    """How many bytes behind the tensor's start what lies at these coordinates;
    None outside, where TMA reads zeros and writes nothing."""
    sizes, strides, *_ = tma._shape
    if not all(0 <= at < size for at, size in zip(place, sizes, strict=True)):
        return None
    return sum(at * stride for at, stride in zip(place[1:], strides, strict=True)) % 2**64


@pytest.mark.parametrize("strides", [(4 * 64, 64), (9 * 64, 128), (64, 40 * 64)], ids=["bshd", "padded", "bhsd"])
def test_past_a_sequences_end_is_outside_for_tma(strides):
    """And before it is the sequence's own row; and the descriptor begins where the tensor does."""
    picks, (by_row, by_head) = random.Random(0), strides
    tma = map_of_rows("fp16", (1, 40, 4, 64), (40 * by_row, by_row, by_head, 1), 64, 16, ragged=True)
    assert reached(tma, 0, 0, 0, 0, 0) == 0 and all(stride < 2**40 and stride % 16 == 0 for stride in tma._shape[1])
    for _ in range(200):
        first = picks.randrange(41)
        rows = picks.randrange(41 - first)
        row, head = picks.randrange(60), picks.randrange(4)
        expected = 2 * ((first + row) * by_row + head * by_head) if row < rows else None
        assert reached(tma, 0, *of_ragged(row, head, first, rows)) == expected


KERNELS = {
    "by_rows": KernelBackwardPacked("fp16", 64, 64, False, False, False, TilesBackward(128)),
    "by_columns": KernelBackwardPacked("fp16", 128, 128, False, False, True, TilesBackward(64)),
    "by_48_columns": KernelBackwardPacked("fp16", 96, 96, False, False, False, TilesBackward(64)),
    "by_gradient": KernelBackwardPacked("fp16", 256, 256, False, False, True, TilesBackward(64, 64)),
}
on_kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@every_case
@on_kernels
def test_what_lies_where_before_and_after_the_kernel(case, kernel, on_integers):
    """Each block of queries that a tile walks finds its rows' LSE and delta, and zeros to add to;
    and its sums become dQ's rows."""
    p, operands = asked(case, "causal", head_dim=kernel.width - 24, head_dim_v=None), operands_of(case)
    block_q, blocks = kernel.tiles.block_q, p.entries(p.seqlen_q, kernel.tiles.block_q) * p.heads
    out, dout, wanted = (torch.randn(1, p.seqlen_q, p.heads, p.head_dim).half() for _ in range(3))
    lse, dlse = torch.randn(1, p.heads, p.seqlen_q), torch.randn(1, p.heads, p.seqlen_q)
    delta, lse_log2 = torch.full((2, blocks, block_q), torch.nan)
    dq_sum = torch.full((blocks, kernel.dq_parts, block_q * kernel.width // kernel.dq_parts), torch.nan)
    turns = torch.full((blocks, kernel.semaphores), -1, dtype=torch.int32)
    tiles, _ = tiles_of(p, operands, block_q)
    sinks, dsinks = torch.randn(p.heads), torch.zeros(p.heads, p.entries(p.seqlen_q, block_q))
    before = launch.delta_launch(p, kernel, out.stride(), dout.stride(), True)
    before((out, dout, lse, dlse, delta, lse_log2, dq_sum, turns, tiles, sinks, dsinks), ())

    of_rows = (out.float() * dout.float()).sum(3).transpose(1, 2)[0] - dlse[0]
    torch.testing.assert_close(
        dsinks.sum(1), -(torch.exp(sinks[:, None] - lse[0]) * of_rows).sum(1), rtol=1e-4, atol=1e-2
    )
    dense = KernelBackward(**{field.name: getattr(kernel, field.name) for field in fields(KernelBackward)})
    scheduler, places = scheduler_of(p, operands, kernel), {}
    for work in works(scheduler):
        bounds = BoundsBackwardPacked(scheduler.params, scheduler.work_tile(work))
        begin, end = bounds.block_range()
        for i in range(bounds.steps(begin, end)):
            head, n = bounds.step(i, begin, end)
            first, rows = work.first_q + n * block_q, min(block_q, work.rows_q - n * block_q)
            place, mine = bounds.block_of_queries(head, n), slice(first, first + rows)
            if place in places:
                assert places[place] == (head, first), "two blocks in one place"
                continue
            places[place] = head, first
            torch.testing.assert_close(delta[place, :rows], of_rows[head, mine], rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(lse_log2[place, :rows], lse[0, head, mine] / math.log(2))
            assert not delta[place, rows:].any() and (lse_log2[place, rows:] == math.inf).all()
            assert not dq_sum[place].any() and not (kernel.deterministic and turns[place].any())
            block = torch.zeros(1, block_q, 1, p.head_dim)
            block[0, :rows, 0] = wanted[0, mine, head]
            dq_sum[place] = as_registers(block, dense)[0, 0, 0]

    dq, met = torch.full_like(wanted, torch.nan), torch.zeros(p.heads, p.seqlen_q, dtype=torch.bool)
    run = launch.round_and_sum_launch(p, kernel, 0, 1, *[dq.stride()] * 3)
    run((dq_sum, dq, tiles, *[None] * 5), (0.5,))
    ends = operands.ranges.bounds(p.seqlen_q, p.seqlen_k)[1].tolist()
    for head, first in places.values():
        met[head, first : min([end for end in ends if end > first] + [first + block_q, p.seqlen_q])] = True
    met = met.T[None, :, :, None]
    torch.testing.assert_close(dq, torch.where(met, wanted * 0.5, 0.0), rtol=0, atol=0)


@every_case
@on_kernels
def test_parts_of_split_groups_lie_where_they_are_added(case, kernel, on_integers):
    """Each tile leaves its part of dK and dV in a place of its own; added, they are the gradients of every row of k."""
    p = replace(PLAIN, heads=12, head_dim=kernel.width, head_dim_v=None, used_k=CASES[case][2] is not None)
    operands, splits, block_kv = operands_of(case), 3, kernel.tiles.block_kv
    kernel = replace(kernel, split_queries=True)
    wanted = torch.randn(splits, 1, p.seqlen_k, p.heads_kv, kernel.width)
    entries = p.entries(p.seqlen_k, block_kv)
    memory = torch.full((entries * p.heads_kv * splits, block_kv // 64, 64 * kernel.width), torch.nan)
    scheduler, met = scheduler_of(p, operands, kernel, splits), set()
    for work in works(scheduler):
        tile = scheduler.work_tile(work)
        bounds = BoundsBackwardPacked(scheduler.params, tile)
        place, first = bounds.place_of_keys(), work.first_k + work.block * block_kv
        assert place not in met, "two tiles in one place"
        met.add(place)
        rows, split = min(block_kv, work.owned - work.block * block_kv), tile.head % splits
        part = wanted[split : split + 1, :, first : first + rows, tile.head // splits : tile.head // splits + 1]
        memory[place] = parts_of_keys(part, kernel, kernel.width)[0, 0, 0, 0]
    dk, dv = torch.full((2, 1, p.seqlen_k, p.heads_kv, kernel.width), torch.nan).half()
    dq = torch.full((1, p.seqlen_q, p.heads, kernel.width), torch.nan).half()
    dq_sum = torch.zeros(p.entries(p.seqlen_q, kernel.tiles.block_q) * p.heads, kernel.tiles.block_q * kernel.width)
    tiles_q, tiles_kv = tiles_of(p, operands, kernel.tiles.block_q, block_kv)
    run = launch.round_and_sum_launch(p, kernel, entries, splits, *[x.stride() for x in (dq, dk, dv)])
    run((dq_sum, dq, tiles_q, memory, memory, dk, dv, tiles_kv), (0.5,))
    total = wanted[0] + wanted[1] + wanted[2]
    torch.testing.assert_close(dk, (total * 0.5).half(), rtol=0, atol=0)
    torch.testing.assert_close(dv, total.half(), rtol=0, atol=0)


@every_span
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_a_launch_gives_what_the_kernel_takes(span, deterministic, head_dim, monkeypatch):
    """By name, and as many thread blocks as there may be tiles."""
    problem = asked("plain", span, head_dim=head_dim, head_dim_v=None, deterministic=deterministic, sinks=deterministic)
    bound = []

    def bind(kernel):
        return lambda device, blocks, fixed, given, cluster=1: bound.append(
            (blocks, Packer(arguments_of(kernel), 0, fixed, given))
        )

    monkeypatch.setattr(launch, "function_for", lambda kernel: SimpleNamespace(bind=bind(kernel)))
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 13)
    shape = (1, 300, 4, head_dim)
    of_q, of_k = torch.empty(shape).stride(), torch.empty(1, 300, 2, head_dim).stride()
    forward = launch.forward_launch(problem, of_q, of_k, of_k, 0)
    backward = launch.backward_launch(problem, of_q, of_k, of_k, of_q, of_q, False, 0)
    assert [blocks for blocks, _ in bound] == [min(13, problem.entries(300, forward.block_q) * 2), 13]
    rows = problem.entries(300, backward.block_q) * backward.block_q * 4
    _, delta, dq, semaphores, *_ = backward._workspace
    assert (dq - delta, semaphores - dq) == (4 * rows, 4 * rows * head_dim)


@pytest.mark.parametrize("sequences", [5, 0])
def test_an_fp8_launch_gives_what_the_kernel_takes(sequences, monkeypatch):
    """Its table before its scales, each by name; and where there are no sequences no scale of theirs."""
    problem, given = replace(IN_E4M3, sequences=sequences, seqlen_q=20000), []

    def bind(kernel):
        assert isinstance(kernel, KernelFp8Packed)

        def bound(device, blocks, fixed, which):
            assert which[6:] == (*TABLE, *launch_fp8.SCALING)
            packer = Packer(arguments_of(kernel), 0, fixed, which)
            return lambda stream, *values: given.append((dict(zip(which, values, strict=True)), packer(values)))

        return bound

    one = torch.ones(1)
    monkeypatch.setattr(launch, "function_for", lambda kernel: SimpleNamespace(bind=bind(kernel)))
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(TensorMap, "_at", lambda self, address: bytes(128))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor gives as its own
    monkeypatch.setattr("flashzoo._cute.per_stream.PerStream.__call__", lambda self, device, stream, n=1: one)
    for module in (launch, launch_fp8):
        monkeypatch.setattr(module, "current_stream", lambda device: 0)
    launch_fp8.forward_launch.cache_clear()
    q, k, v = (torch.randn(1, n, heads, 64).to(torch.float8_e4m3fn) for n, heads in ((20000, 4), (300, 2), (300, 2)))
    numbers = descales(problem, "head")
    cu_q, cu_k = (torch.linspace(0, n, sequences + 1).int() for n in (20000, 300))
    out, lse = launch_fp8.attention(q, k, v, problem, Operands(*numbers, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))
    launch_fp8.forward_launch.cache_clear()
    ((found, _),) = given
    assert out.dtype == torch.bfloat16 and lse.shape == (1, 4, 20000) and found["tiles"]
    for name, x in zip("qkv", numbers, strict=True):
        expected = (x.data_ptr(), 2, 1, 0) if sequences else (one.data_ptr(), 0, 0, 0)
        assert tuple(found[f"{name}_{field}"] for field in ("values", "batch", "head", "block")) == expected
    assert found["q_group"] == (2 if sequences else 1)


def test_16_bit_inputs_are_not_quantised_where_sequences_are_packed():
    """By a sentence that holds where e4m3 ones are declared too, whose forward pass is all that they have."""
    declared = replace(FP8_SPEC, features=FP8_SPEC.features | {"packed", "used_k"})
    quantised = replace(PLAIN, precision="fp8")
    sentence = "does not quantise packed sequences: they come as e4m3 tensors, with descales (sequences, heads_kv)"
    assert refusals_fp8(quantised) == [sentence] == declared.unsupported(replace(quantised, grad=False))
    assert sentence in FP8_SPEC.unsupported(quantised) and not refusals_fp8(replace(quantised, sequences=None))
    for asked_for in ({}, {"causal": True, "used_k": True}, {"seqlen_q": 1 << 20}):
        problem = replace(IN_E4M3, **asked_for)
        assert not declared.unsupported(problem) and "v is transposed on chip" in describe_fp8(problem)
    assert [reason for reason in declared.unsupported(replace(IN_E4M3, grad=True)) if "gradients" in reason]
