"""What is special to v3's block-sparse kernels: their schedules and masks on integers, and which masks they take.

What it computes THE suite and test_blocksparse.py say; what it compiles to test_compile_v3.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from on_integers import Memory, as_written, assume
from torch import Tensor

import flashzoo
from flashzoo import BlockMask, Problem, UnsupportedError
from flashzoo._cute.hopper import bounds as bounds_module
from flashzoo._cute.hopper import mask as mask_module
from flashzoo._cute.hopper import tile_scheduler
from flashzoo._cute.hopper.bounds import Bounds, BoundsBackward
from flashzoo.call.forms import MaskForm
from flashzoo.gpu import SHARED_LIMIT, WARPGROUP, WARPGROUP_ROWS
from flashzoo.masks.lists import Lists, codes_of
from flashzoo.v3 import sparse, sparse_backward
from flashzoo.v3.config import BACKWARD, SPARSE, kernel_backward_for, kernel_for, pack_gqa_for
from flashzoo.v3.explain import describe, refusals
from flashzoo.v3.launch import lists_of
from flashzoo.v3.programs import LISTS
from flashzoo.v3.sparse import BoundsSparse, ForwardSparse, MaskSparse, ParamsSparse, Row, TileSchedulerSparse
from flashzoo.v3.sparse_backward import BackwardSparse, BoundsBackwardSparse, TileSchedulerBackwardSparse
from flashzoo.v3.traits import MASK_Q, KernelBackwardSparse

PLAIN = Problem(1, 256, 256, 2, 2, 64, arch=90, block_mask=MaskForm())


# Which masks it takes, and with which kernel.


def test_every_head_dim_and_block_has_a_kernel_that_fits():
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            for block_kv in (64, 128):
                kernel = kernel_for(
                    replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v, block_mask=MaskForm(block_kv=block_kv))
                )
                assert kernel.shared_bytes <= SHARED_LIMIT[90]
                assert kernel.mask_kv == block_kv == kernel.parts * kernel.tiles.block_kv
                assert kernel.tiles in SPARSE.values()


def test_a_kernel_looks_only_at_what_partial_blocks_apply():
    for form, expected in (
        (MaskForm(), (False, False, False)),
        (MaskForm(causal=True), (False, True, False)),
        (MaskForm(window=(8, None)), (True, False, False)),
        (MaskForm(window=(8, 9), bits=True), (True, True, True)),
    ):
        kernel = kernel_for(replace(PLAIN, block_mask=form))
        assert (kernel.left, kernel.right, kernel.bits) == expected


def test_no_other_field_asks_for_another_kernel():
    others = (
        {"batch": 7},
        {"seqlen_q": 1},
        {"seqlen_k": 9999},
        {"heads": 8},
        {"block_mask": MaskForm(batch=1, heads=2)},
    )
    assert {kernel_for(replace(PLAIN, **other)) for other in others} == {kernel_for(PLAIN)}


REFUSED = {
    "block_q": ({"block_mask": MaskForm(block_q=64)}, "takes block masks with block_q 128, got 64"),
    "block_kv": (
        {"grad": True, "block_mask": MaskForm(block_kv=64)},
        "its backward pass takes block masks with block_kv in multiples of 128 at these head dims, got 64",
    ),
    "heads": (
        {"grad": True, "heads": 4, "block_mask": MaskForm(heads=4)},
        "its backward pass takes block masks with heads 1 for 4 query heads on 2 key/value heads, got 4",
    ),
    "deterministic": (
        {"grad": True, "deterministic": True},
        "its backward pass takes block masks with deterministic=False, got True",
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_masks_that_are_refused(refused):
    fields, sentence = REFUSED[refused]
    problem = replace(PLAIN, **fields)
    assert refusals(problem) == [sentence]
    explained = flashzoo.explain(problem, version="auto")
    assert sentence in {one.name: one for one in explained.verdicts}["v3"].reasons and explained.chosen == "blocksparse"
    assert refusals(replace(problem, block_mask=None)) == [], "nothing that a mask has no part in"
    if problem.grad:
        assert refusals(replace(problem, grad=False)) == []


def test_all_that_is_refused_is_said_at_once():
    form = MaskForm(64, 64, heads=4)
    assert len(refusals(replace(PLAIN, grad=True, deterministic=True, heads=4, block_mask=form))) == len(REFUSED)
    q, kv = (
        torch.zeros(1, 256, 4, 64, dtype=torch.float16, requires_grad=True),
        torch.zeros(1, 256, 2, 64, dtype=torch.float16),
    )
    mask = BlockMask.random(256, blocks=1, heads=4, block_q=64, block_kv=64)
    with pytest.raises(UnsupportedError) as error:
        flashzoo.attention(q, kv, kv, block_mask=mask, deterministic=True, version="v3")
    assert all(sentence in str(error.value) for _, sentence in REFUSED.values())


def test_what_a_backward_kernel_can_cut_is_taken():
    for head_dim, head_dim_v, block_kv in (
        (64, 64, 128),
        (96, 96, 128),
        (128, 128, 128),
        (256, 256, 128),
        (256, 256, 64),
        (64, 136, 64),
        (64, 136, 128),
        (192, 128, 64),
        (192, 128, 128),
    ):
        form = MaskForm(block_kv=block_kv, heads=2, window=(9, 0), bits=True)
        problem = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v, grad=True, block_mask=form)
        kernel = kernel_backward_for(problem)
        assert refusals(problem) == [] and isinstance(kernel, KernelBackwardSparse)
        assert kernel.tiles in BACKWARD.values() and kernel.shared_bytes <= SHARED_LIMIT[90]
        assert (
            kernel.parts * kernel.tiles.block_q == MASK_Q and kernel.parts_of_column * kernel.tiles.block_kv == block_kv
        )
        assert (kernel.left, kernel.right, kernel.bits) == (True, True, True)
    assert flashzoo.explain(replace(PLAIN, grad=True)).chosen == "v3"
    with pytest.raises(
        ValueError, match="128 queries by 64 keys, or parts of them, and any order, got 128 keys by 128 queries"
    ):
        kernel_backward_for(replace(PLAIN, grad=True, block_mask=MaskForm(block_kv=64)))
    with pytest.raises(ValueError, match="deterministic=True"):
        kernel_backward_for(replace(PLAIN, grad=True, deterministic=True))


def test_sums_and_statistics_are_of_whole_rows_of_the_mask():
    for head_dim, head_dim_v in BACKWARD:
        kernel = kernel_backward_for(replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v, grad=True))
        for seqlen in (1, 63, 64, 65, 127, 128, 129, 191, 300):
            rows = -(-seqlen // MASK_Q)
            assert kernel.blocks_q(seqlen) * kernel.tiles.block_q == rows * MASK_Q
            assert kernel.blocks_kv(seqlen) * kernel.tiles.block_kv == rows * 128


def test_what_a_launch_takes_of_a_mask():
    def taken(mask: BlockMask, lists: Lists) -> dict[str, int]:
        return dict(zip(LISTS, lists_of(mask, lists), strict=True))

    plain, bits = BlockMask.random(300, blocks=1), BlockMask.from_dense(dense(2, 2, 300, 200))
    nothing = {"list_batch": 0, "list_head": 0, "bit_blocks": 0, "bit_index": 0, "bits": 0}
    assert taken(plain, plain.rows).items() >= {**nothing, "width": plain.rows.width}.items()
    for lists in (bits.rows, bits.columns):
        found = taken(bits, lists)
        sizes = {"list_batch": 2, "list_head": 1, "width": lists.width, "bit_blocks": bits.element.bits.shape[2]}
        addresses = {
            name: getattr(lists, name).data_ptr() for name in ("order", "counts", "full", "indices", "bit_index")
        }
        assert found == {**sizes, **addresses, "bits": bits.element.bits.data_ptr()} and found["bits"] % 16 == 0
    for mask, strides in (
        (BlockMask.from_dense(dense(2, 1, 70, 65)), (1, 0)),
        (BlockMask.random(300, blocks=1, heads=3), (0, 1)),
    ):
        assert lists_of(mask, mask.rows)[:2] == strides
    nowhere = BlockMask.random(200, 300, blocks=0)
    assert nowhere.rows.width == 0
    assert taken(nowhere, nowhere.rows)["indices"] == nowhere.rows.counts.data_ptr(), "an address all the same"


def test_heads_are_not_packed():
    assert flashzoo.explain(PLAIN).chosen == "v3"
    assert pack_gqa_for(replace(PLAIN, heads=8, heads_kv=1, seqlen_q=1), MASK_Q) == 0
    assert any("a row of the block mask" in line for line in describe(PLAIN))


# Schedulers, bounds and masks on Python's integers. Every thread of the consumers walks its tiles,
# and what it lets through is the mask.


class Table(dict):
    """Numbers in registers, `(i, j)`; `(None, j)` is a list to be written."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape

    def __getitem__(self, key):
        return (self, key[1]) if key[0] is None else super().__getitem__(key)

    def load(self) -> Table:
        return self

    def store(self, other: Table) -> None:
        self.update(other)

    def fill(self, value: int) -> None:
        self.update({(i, j): value for i in range(self.shape[0]) for j in range(self.shape[1])})


def copy(source: Memory, target: tuple[Table, int]) -> None:
    table, j = target
    table.update({(i, j): source[i] for i in range(table.shape[0])})


def ones(begin: int, count: int) -> int:
    assert begin >= 0 and count >= 0
    return ((1 << count) - 1 << begin) & 0xFFFFFFFF


METHODS = (
    Bounds,
    BoundsBackward,
    BoundsSparse,
    BoundsBackwardSparse,
    MaskSparse,
    ForwardSparse,
    sparse_backward._Masked,
)
AS_WRITTEN = as_written(*METHODS, mask_module)
AS_WRITTEN += [(sparse_backward, name, function) for owner, name, function in AS_WRITTEN if owner is mask_module]


@pytest.fixture
def on_integers(monkeypatch):
    """The device's code as what it is without CuTe DSL: arithmetic."""
    for owner, name, method in AS_WRITTEN:
        monkeypatch.setattr(owner, name, method)
    arithmetic = {"min": min, "max": max, "range": lambda n, unroll: range(n), "range_constexpr": range}
    for module in (tile_scheduler, bounds_module, sparse, sparse_backward, mask_module):
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(**arithmetic))
        for name in ("Int32", "Int64"):
            monkeypatch.setattr(module, name, int, raising=False)
        if module not in (tile_scheduler, bounds_module):
            monkeypatch.setattr(module, "Float32", SimpleNamespace(inf=math.inf))
            monkeypatch.setattr(module, "rows_of", lambda s: s)
    cute = {
        "make_tensor": lambda x, _: x,
        "make_layout": int,
        "make_rmem_tensor": lambda shape, _: Table(shape),
        "autovec_copy": copy,
        "assume": assume,
    }
    arch = SimpleNamespace(block_idx=lambda: (0, 0, 0), lane_idx=lambda: LANE[0])
    for module in (sparse, sparse_backward, mask_module):
        monkeypatch.setattr(module, "cute", SimpleNamespace(size=lambda s: len(s), arch=arch, **cute))
    monkeypatch.setattr(sparse, "ones", ones)


LANE = [0]
"""Of the thread that is looked at."""


def in_memory(mask: BlockMask, lists: Lists) -> tuple[int | Memory, ...]:
    """What `ParamsSparse` has of a mask."""
    bits, of_bits = mask.element.bits, [Memory([]), Memory([])]
    if bits is not None:
        words = bits.flatten().view(torch.int32).long() & 0xFFFFFFFF
        of_bits = [Memory(lists.bit_index.flatten().tolist()), Memory(words.tolist())]
    tensors = (lists.order, lists.counts, lists.full, lists.indices if lists.width else lists.counts)
    return (*lists_of(mask, lists)[:4], *[Memory(x.flatten().tolist()) for x in tensors], *of_bits)


def scheduler_of(mask: BlockMask, problem: Problem) -> TileSchedulerSparse:
    p, blocks, batch_heads = problem, -(-problem.seqlen_q // MASK_Q), problem.batch * problem.heads
    sizes = (
        p.seqlen_q,
        p.seqlen_k,
        p.heads,
        p.heads // p.heads_kv,
        p.heads // p.heads_kv,
        1,
        1,
        0,
        *p.reach_of(p.block_mask.span),
        blocks,
        batch_heads,
        batch_heads,
        1,
    )
    return TileSchedulerSparse(ParamsSparse(kernel_for(p), *sizes, None, *in_memory(mask, mask.rows)))


def backward_scheduler_of(mask: BlockMask, problem: Problem) -> TileSchedulerBackwardSparse:
    p, kernel = problem, kernel_backward_for(problem)
    blocks, batch_heads = kernel.blocks_kv(p.seqlen_k), p.batch * p.heads_kv
    sizes = (
        p.seqlen_q,
        p.seqlen_k,
        p.heads_kv,
        p.heads // p.heads_kv,
        p.heads // p.heads_kv,
        1,
        1,
        0,
        *p.reach_of(p.block_mask.span),
        blocks,
        batch_heads,
        2,
        1,
    )
    return TileSchedulerBackwardSparse(ParamsSparse(kernel, *sizes, None, *in_memory(mask, mask.columns)))


def walked(bounds: BoundsSparse, wg_idx: int, row: int, column: int) -> tuple[list[int], list[dict]]:
    """What one thread does on a tile: the producer's keys, and for each block which of its scores `(c, r, i)`
    are let through."""
    keys, seen = [], []
    kernel, kept, seqlen_k = bounds.params.kernel, bounds.tile.row.kept, bounds.sequence.seqlen_k
    begin, end = bounds.block_range()
    for n in reversed(range(begin, end)):
        keys.append(bounds.first_key(n))
    assert kept or keys == [seqlen_k], "nothing is loaded of what no list has"

    def step(consumer, used: int, first_key: int, mask: MaskSparse | None, crosses: bool = True) -> int:
        n = len(seen)  # `used` counts products, which the first scores leave to the next step
        scores = {(c, r, i): 0.0 for c in range(2) for r in range(2) for i in range(kernel.tiles.block_kv // 8)}
        if mask is not None and crosses:
            assert first_key == keys[n] or not kept, "masked as another block than was loaded"
            mask.apply(scores, first_key)
        else:
            assert keys[n] + kernel.tiles.block_kv <= seqlen_k
        seen.append({place: score == 0.0 for place, score in scores.items()})
        return used + 1

    nothing = SimpleNamespace(fill=lambda *_: None, consumer_wait=lambda *_: None, consumer_release=lambda *_: None)
    consumer = SimpleNamespace(
        wg_idx=wg_idx, row=row, column=column, o=nothing, storage=SimpleNamespace(q_pipeline=nothing)
    )
    program = {"kernel": kernel, "tiles": kernel.tiles, "last_product": lambda _, used: used + 1}
    program = SimpleNamespace(**program, first_scores=step, step_overlapped=step, step_serial=step)
    program.scores, program.warp_scheduler_barrier_arrive = lambda *_: None, lambda _: None
    program.rest_of_step = lambda consumer, _, *arguments: step(consumer, *arguments)
    assert ForwardSparse.mainloop(program, bounds, consumer, 0, 0) == len(keys)
    assert len(seen) == len(keys), "the consumers walk as many blocks as the producer loads"
    return keys, seen


def let_through(bounds: BoundsSparse) -> Tensor:
    """Of a tile, whether a row sees a key: `(128, seqlen_k)`."""
    found = torch.zeros(MASK_Q, bounds.sequence.seqlen_k, dtype=torch.bool)
    for wg_idx in range(2):
        for row in (row for row in range(WARPGROUP_ROWS) if row % 16 < 8):
            for column in range(0, 8, 2):
                for first_key, seen in zip(*walked(bounds, wg_idx, row, column), strict=True):
                    for (c, r, i), visible in seen.items():
                        if visible:
                            found[wg_idx * WARPGROUP_ROWS + row + 8 * r, first_key + column + 8 * i + c] = True
    return found


def dense(*shape: int, seed: int = 0) -> Tensor:
    """Elements in blocks of all three kinds."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (*shape[:-2], -(-shape[-2] // 64), -(-shape[-1] // 64)), generator=generator)
    kinds = kinds.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., : shape[-2], : shape[-1]]
    return (kinds == 2) | (kinds == 1) & (torch.rand(shape, generator=generator) < 0.4)


def with_rubbish_past_counts(mask: BlockMask) -> BlockMask:
    def spoiled(lists):
        past = torch.arange(lists.width) >= lists.counts[..., None]
        bit_index = None if lists.bit_index is None else lists.bit_index.masked_fill(past, 1 << 30)
        return replace(lists, indices=lists.indices.masked_fill(past, 1 << 30), bit_index=bit_index)

    return replace(mask, rows=spoiled(mask.rows), columns=spoiled(mask.columns))


def with_band(mask: BlockMask, **band) -> BlockMask:
    """Partial blocks apply a band too; full ones don't, whatever it cuts of them."""
    return replace(mask, element=replace(mask.element, **band), tight=False)


def nothing(seqlen_q: int, seqlen_k: int, block_kv: int) -> BlockMask:
    blocks = torch.zeros(-(-seqlen_q // MASK_Q), -(-seqlen_k // block_kv), dtype=torch.bool)
    return BlockMask.from_blocks(blocks, seqlen_q, seqlen_k, block_kv=block_kv)


MASKS = {
    "causal": lambda kv: BlockMask.causal(200, 330, block_kv=kv),
    "causal_more_queries": lambda kv: BlockMask.causal(330, 200, block_kv=kv),
    "window": lambda kv: BlockMask.sliding_window(300, 333, window_size=(40, 20), block_kv=kv),
    "left": lambda kv: BlockMask.sliding_window(140, 260, window_size=(40, None), block_kv=kv),
    "random": lambda kv: BlockMask.random(300, 450, blocks=2, heads=2, block_kv=kv),
    "documents": lambda kv: BlockMask.documents([100, 31, 0, 70], block_kv=kv),
    "dense": lambda kv: BlockMask.from_dense(dense(270, 290), block_kv=kv),
    "dense_by_heads": lambda kv: BlockMask.from_dense(dense(2, 2, 140, 200), block_kv=kv),
    "dense_by_batch": lambda kv: BlockMask.from_dense(dense(2, 1, 70, 65), block_kv=kv),
    "bits_and_a_band": lambda kv: with_band(
        BlockMask.from_dense(dense(200, 300, seed=1), block_kv=kv), causal=True, window=(150, None)
    ),
    "rubbish": lambda kv: with_rubbish_past_counts(BlockMask.from_dense(dense(300, 203), block_kv=kv)),
    "full_past_the_end": lambda kv: BlockMask.sliding_window(130, 70, window_size=None, block_kv=kv),
    "full_past_the_end_by_more": lambda kv: BlockMask.sliding_window(20, 257, window_size=None, block_kv=kv),
    "nothing": lambda kv: with_rubbish_past_counts(nothing(200, 300, kv)),
    "no_room": lambda kv: BlockMask.random(200, 300, blocks=0, block_kv=kv),
}  # fmt: skip


def problem_of(mask: BlockMask, head_dim: int, **fields) -> Problem:
    sizes = {"batch": 2, "seqlen_q": mask.seqlen_q, "seqlen_k": mask.seqlen_k, "head_dim": head_dim, "head_dim_v": None}
    return replace(PLAIN, block_mask=mask.form, **sizes, **fields)


def every_pattern(**configurations: tuple[int, int]) -> pytest.MarkDecorator:
    """Each pattern with each pair of head_dim and block_kv; without a GPU, where that takes minutes,
    with one of them in turns."""
    cells = [
        pytest.param(pattern, *configuration, id=f"{pattern}-{name}")
        for turn, pattern in enumerate(MASKS)
        for at, (name, configuration) in enumerate(configurations.items())
        if torch.cuda.is_available() or turn % len(configurations) == at
    ]
    return pytest.mark.parametrize(("pattern", "head_dim", "block_kv"), cells)


def through_smem(scheduler: TileSchedulerSparse, tile_idx: int) -> Row:
    """The work of a number, as it comes through shared memory."""
    smem = [0] * scheduler.params.kernel.words_of_work
    scheduler.to_smem(smem, scheduler.work_of(tile_idx))
    return scheduler.from_smem(smem)


@every_pattern(of_128_keys=(64, 128), of_64_keys=(64, 64), of_128_keys_in_halves=(256, 128))
def test_threads_let_through_what_the_mask_shows(pattern, head_dim, block_kv, on_integers):
    mask = MASKS[pattern](block_kv)
    scheduler = scheduler_of(mask, problem_of(mask, head_dim))
    params, shown, tiles = scheduler.params, mask.to_dense(), set()
    for tile_idx in range(params.blocks * params.batch_heads):
        work = through_smem(scheduler, tile_idx)
        assert scheduler.is_valid(work)
        tile = scheduler.work_tile(work)
        tiles.add((tile.batch, tile.head, tile.block))
        heads_own = tile.batch % mask.batch, tile.head % mask.heads
        if heads_own != (tile.batch, tile.head):
            continue  # another has the same lists
        expected = shown[heads_own][tile.block * MASK_Q : (tile.block + 1) * MASK_Q]
        assert torch.equal(let_through(BoundsSparse(params, tile))[: len(expected)], expected), str(tile)
    assert len(tiles) == params.blocks * params.batch_heads, "every row once"
    past = through_smem(scheduler, params.blocks * params.batch_heads + 5)
    assert not scheduler.is_valid(past), "and nothing is read for it that is not there"


def test_the_longest_rows_go_first(on_integers):
    mask = BlockMask.causal(1024)
    scheduler = scheduler_of(mask, replace(PLAIN, seqlen_q=1024, seqlen_k=1024, block_mask=MaskForm(causal=True)))
    kept = [
        scheduler.work_of(tile_idx).kept for tile_idx in range(scheduler.params.blocks * scheduler.params.batch_heads)
    ]
    assert kept == sorted(kept, reverse=True)


# The backward pass's: a tile is a column, or half of one.


def let_through_of(bounds: BoundsBackwardSparse, n: int) -> Tensor:
    """Of the n-th block of queries that a tile walks, whether its keys are let through: `(block_q, block_kv)`."""
    kernel, tiles = bounds.params.kernel, bounds.params.kernel.tiles
    found = torch.zeros(tiles.block_q, tiles.block_kv, dtype=torch.bool)
    program = SimpleNamespace(kernel=kernel)
    program.mask_by_bits = lambda *arguments: BackwardSparse.mask_by_bits(program, *arguments)
    first_key = bounds.tile.block * tiles.block_kv
    for thread in range(WARPGROUP * tiles.block_kv // WARPGROUP_ROWS):
        LANE[0] = thread % 32
        row, column = thread // 32 * 16 + LANE[0] // 4, LANE[0] % 4 * 2
        for first in range(0, tiles.block_q, tiles.queries_at_once):
            scores = {(c, r, i): 0.0 for c in range(2) for r in range(2) for i in range(tiles.queries_at_once // 8)}
            if bounds.crosses(first_key + thread // WARPGROUP * WARPGROUP_ROWS, n):
                of_thread = bounds.of_thread(first_key + row, column)
                BackwardSparse.mask(program, bounds, n, first, scores, of_thread, thread)
            for (c, r, i), score in scores.items():
                found[first + column + 8 * i + c, row + 8 * r] = score == 0.0
    return found


@every_pattern(
    of_128_queries=(64, 128),
    of_64_queries=(128, 128),
    scores_in_halves=(160, 128),
    columns_in_halves=(256, 128),
    of_64_keys=(256, 64),
)
def test_columns_let_through_what_the_mask_shows(pattern, head_dim, block_kv, on_integers):
    mask = MASKS[pattern](block_kv)
    problem = problem_of(mask, head_dim, grad=True, heads=2 * (mask.heads == 1) + 2)
    assert not refusals(problem)
    scheduler = backward_scheduler_of(mask, problem)
    params, kernel, shown = scheduler.params, scheduler.params.kernel, mask.to_dense()
    sums = problem.batch * problem.heads * kernel.blocks_q(problem.seqlen_q)
    kept = (codes_of(mask.columns, -(-mask.seqlen_q // MASK_Q)) > 0).sum(-1)
    places, added = set(), {}
    for tile_idx in range(params.blocks * params.batch_heads):
        work = through_smem(scheduler, tile_idx)
        assert scheduler.is_valid(work)
        tile = scheduler.work_tile(work)
        block, head_kv, batch, tiles = tile.block, tile.head, tile.batch, kernel.tiles
        places.add((batch, head_kv, block))
        bounds = BoundsBackwardSparse(params, tile)
        begin, end = bounds.block_range()
        lists = batch % mask.batch, head_kv % mask.heads
        steps = [bounds.step(i, begin, end) for i in range(params.group * (end - begin))]
        assert bool(steps) == bounds.walks_any(begin, end) == bool(kept[lists][block // kernel.parts_of_column])
        assert len(steps) == params.group * kernel.parts * kept[lists][block // kernel.parts_of_column]
        for head, n in steps:
            assert head // params.group == head_kv
            block_q = bounds.block_q(n)
            of_sum = bounds.block_of_queries(head, block_q)
            assert 0 <= block_q < kernel.blocks_q(problem.seqlen_q) and 0 <= of_sum < sums
            assert (of_sum, block) not in added, "a block of queries twice"
            added[of_sum, block] = None
        expected = shown[lists][:, block * tiles.block_kv : (block + 1) * tiles.block_kv]
        found = torch.zeros(kernel.blocks_q(problem.seqlen_q) * tiles.block_q, tiles.block_kv, dtype=torch.bool)
        if (batch, head_kv) == lists:  # others have the same lists
            for n in range(begin, end):
                first = bounds.block_q(n) * tiles.block_q
                found[first : first + tiles.block_q] = let_through_of(bounds, n)
            assert torch.equal(found[: mask.seqlen_q, : expected.shape[1]], expected), (
                f"batch {batch}, head {head_kv}, tile {block}"
            )
            assert not found[: mask.seqlen_q, expected.shape[1] :].any(), "a key past the last"
    assert len(places) == params.blocks * params.batch_heads, "every tile once"
    past = through_smem(scheduler, params.blocks * params.batch_heads + 5)
    assert not scheduler.is_valid(past), "and nothing is read for it that is not there"


@pytest.mark.parametrize("head_dim", [64, 160, 256])
def test_the_longest_columns_go_first(head_dim, on_integers):
    mask = BlockMask.causal(1024)
    scheduler = backward_scheduler_of(mask, replace(problem_of(mask, head_dim, grad=True), batch=1))
    kept = [
        scheduler.work_of(tile_idx).kept for tile_idx in range(scheduler.params.blocks * scheduler.params.batch_heads)
    ]
    assert kept == sorted(kept, reverse=True)
