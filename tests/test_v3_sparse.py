"""What is special to v3's block-sparse forward pass: its schedule and masks on integers, and which masks it takes.

What it computes THE suite and test_blocksparse.py say; what it compiles to test_compile.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import BlockMask, Problem
from flashzoo._sass import SHARED_LIMIT
from flashzoo.spec import MaskForm
from flashzoo.v3 import schedule, sparse
from flashzoo.v3.config import MASK_Q, SPARSE, WARPGROUP_ROWS, describe, kernel_for, pack_for
from flashzoo.v3.launch_sparse import parameters_of
from flashzoo.v3.schedule import Schedule
from flashzoo.v3.sparse import ForwardSparse, MaskSparse, ScheduleSparse

PLAIN = Problem(1, 256, 256, 2, 2, 64, arch=90, block_mask=MaskForm())


# Which masks it takes, and with which kernel.


def test_every_head_dim_and_block_has_a_kernel_that_fits():
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            for block_kv in (64, 128):
                kernel = kernel_for(replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v, block_mask=MaskForm(block_kv=block_kv)))
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
    others = ({"batch": 7}, {"seqlen_q": 1}, {"seqlen_k": 9999}, {"heads": 8}, {"block_mask": MaskForm(batch=1, heads=2)})
    assert {kernel_for(replace(PLAIN, **other)) for other in others} == {kernel_for(PLAIN)}


def test_blocks_of_64_queries_are_refused_and_heads_are_not_packed():
    verdict = {one.name: one for one in flashzoo.explain(replace(PLAIN, block_mask=MaskForm(block_q=64)), version="auto").verdicts}["v3"]
    assert "takes block masks with block_q 128, got 64" in verdict.reasons
    assert flashzoo.explain(PLAIN).chosen == "v3"
    assert pack_for(replace(PLAIN, heads=8, heads_kv=1, seqlen_q=1), MASK_Q) == 0
    assert any("a row of the block mask" in line for line in describe(PLAIN))


# The schedule and the masks on integers. Every thread of the consumers walks its tiles, and what it lets through is the mask.


class Memory:
    """A pointer, to what CuTe DSL's tensors are made of."""

    def __init__(self, values: list[int], first: int = 0) -> None:
        self.values, self.first = values, first

    def __add__(self, n: int) -> Memory:
        return Memory(self.values, self.first + n)

    def __getitem__(self, i: int) -> int:
        assert 0 <= self.first + i < len(self.values), "read outside of the tensor"
        return self.values[self.first + i]


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


def assume(x: int, divby: int) -> int:
    assert x % divby == 0
    return x


def copy(source: Memory, target: tuple[Table, int]) -> None:
    table, j = target
    table.update({(i, j): source[i] for i in range(table.shape[0])})


def ones(begin: int, count: int) -> int:
    assert begin >= 0 and count >= 0
    return ((1 << count) - 1 << begin) & 0xFFFFFFFF


@pytest.fixture
def on_integers(monkeypatch):
    """The device's code as what it is without CuTe DSL: arithmetic."""
    for owner in (Schedule, ScheduleSparse, MaskSparse, ForwardSparse):
        for name, method in vars(owner).items():
            if hasattr(method, "__wrapped__"):
                monkeypatch.setattr(owner, name, method.__wrapped__)
    arithmetic = {"min": min, "max": max, "range": lambda n, unroll: range(n), "range_constexpr": range}
    for module in (schedule, sparse):
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(**arithmetic))
        for name in ("Int32", "Int64"):
            monkeypatch.setattr(module, name, int)
    monkeypatch.setattr(sparse, "Float32", SimpleNamespace(inf=math.inf))
    cute = {
        "make_tensor": lambda x, _: x,
        "make_layout": int,
        "make_rmem_tensor": lambda shape, _: Table(shape),
        "autovec_copy": copy,
        "assume": assume,
    }
    monkeypatch.setattr(sparse, "cute", SimpleNamespace(size=lambda s: len(s), arch=SimpleNamespace(block_idx=lambda: (0, 0, 0)), **cute))
    monkeypatch.setattr(sparse, "rows_of", lambda s: s)
    monkeypatch.setattr(sparse, "ones", ones)


def schedule_of(mask: BlockMask, problem: Problem) -> ScheduleSparse:
    p, rows, bits = problem, mask.rows, mask.element.bits
    blocks, batch_heads = -(-p.seqlen_q // MASK_Q), p.batch * p.heads
    sizes = (p.seqlen_q, p.seqlen_k, p.heads, p.heads // p.heads_kv, 0, *p.reach_of(p.block_mask.span), blocks, batch_heads, batch_heads)
    lists = [Memory(x.flatten().tolist()) for x in (rows.order, rows.counts, rows.full, rows.indices if rows.width else rows.counts)]
    of_bits = [Memory([]), Memory([])]
    if bits is not None:
        words = bits.flatten().view(torch.int32).long() & 0xFFFFFFFF
        of_bits = [Memory(rows.bit_index.flatten().tolist()), Memory(words.tolist())]
    return ScheduleSparse(kernel_for(p), *sizes, None, *parameters_of(mask, mask.rows)[:4], *lists, *of_bits)


def walked(plan: ScheduleSparse, tile: sparse.Row, me: int, row: int, column: int) -> tuple[list[int], list[dict]]:
    """What one thread does on a tile: the producer's keys, and for each block which of its scores `(c, r, i)` are let through."""
    keys, seen = [], []
    block, _, _ = plan.place(tile)
    begin, end = plan.extent(tile, block)
    for n in reversed(range(begin, end)):
        keys.append(plan.first_key(tile, n))

    def step(consumer, used: int, first_key: int, mask: MaskSparse | None, crosses: bool = True) -> int:
        n = len(seen)  # `used` counts products, which the first scores leave to the next step
        scores = {(c, r, i): 0.0 for c in range(2) for r in range(2) for i in range(plan.kernel.tiles.block_kv // 8)}
        if mask is not None and crosses:
            assert first_key == keys[n] or not tile.kept, "masked as another block than was loaded"
            mask.apply(scores, first_key)
        else:
            assert keys[n] + plan.kernel.tiles.block_kv <= plan.seqlen_k
        seen.append({place: score == 0.0 for place, score in scores.items()})
        return used + 1

    nothing = SimpleNamespace(fill=lambda *_: None, wait_full=lambda *_: None, release=lambda *_: None)
    consumer = SimpleNamespace(me=me, row=row, column=column, o=nothing, on_chip=SimpleNamespace(q_ring=nothing))
    program = {"kernel": plan.kernel, "tiles": plan.kernel.tiles, "last_product": lambda _, used: used + 1}
    program = SimpleNamespace(**program, first_scores=step, step_overlapped=step)
    assert ForwardSparse.attend(program, plan, tile, block, consumer, 0, 0) == len(keys)
    assert len(seen) == len(keys), "the consumers walk as many blocks as the producer loads"
    return keys, seen


def let_through(plan: ScheduleSparse, tile: sparse.Row) -> Tensor:
    """Of a tile, whether a row sees a key: `(128, seqlen_k)`."""
    found = torch.zeros(MASK_Q, plan.seqlen_k, dtype=torch.bool)
    for me in range(2):
        for row in (row for row in range(WARPGROUP_ROWS) if row % 16 < 8):
            for column in range(0, 8, 2):
                for first_key, seen in zip(*walked(plan, tile, me, row, column), strict=True):
                    for (c, r, i), visible in seen.items():
                        if visible:
                            found[me * WARPGROUP_ROWS + row + 8 * r, first_key + column + 8 * i + c] = True
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

    return replace(mask, rows=spoiled(mask.rows))


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
    "bits_and_a_band": lambda kv: with_band(BlockMask.from_dense(dense(200, 300, seed=1), block_kv=kv), causal=True, window=(150, None)),
    "rubbish": lambda kv: with_rubbish_past_counts(BlockMask.from_dense(dense(300, 203), block_kv=kv)),
    "full_past_the_end": lambda kv: BlockMask.sliding_window(130, 70, window_size=None, block_kv=kv),
    "full_past_the_end_by_more": lambda kv: BlockMask.sliding_window(20, 257, window_size=None, block_kv=kv),
    "nothing": lambda kv: with_rubbish_past_counts(nothing(200, 300, kv)),
    "no_room": lambda kv: BlockMask.random(200, 300, blocks=0, block_kv=kv),
}  # fmt: skip


@pytest.mark.parametrize(("head_dim", "block_kv"), [(64, 128), (64, 64), (256, 128)], ids=["128_keys", "64_keys", "128_keys_in_halves"])
@pytest.mark.parametrize("pattern", MASKS)
def test_threads_let_through_what_the_mask_shows(pattern, head_dim, block_kv, on_integers):
    mask = MASKS[pattern](block_kv)
    form = MaskForm(128, block_kv, mask.batch, mask.heads, mask.element.causal, mask.element.window, mask.element.bits is not None)
    sizes = {"batch": 2, "seqlen_q": mask.seqlen_q, "seqlen_k": mask.seqlen_k, "head_dim": head_dim, "head_dim_v": None}
    plan = schedule_of(mask, replace(PLAIN, block_mask=form, **sizes))
    shown = mask.to_dense()
    tiles = {}
    for number in range(plan.blocks * plan.batch_heads):
        told = [0] * plan.kernel.words_of_tile
        plan.tell(told, plan.described(number))
        tile = plan.told(told)
        assert plan.exists(tile)
        block, head, batch = plan.place(tile)
        tiles[batch, head, block] = tile
        heads_own = batch % mask.batch, head % mask.heads
        if heads_own != (batch, head):
            continue  # another has the same lists
        expected = shown[heads_own][block * MASK_Q : (block + 1) * MASK_Q]
        assert torch.equal(let_through(plan, tile)[: len(expected)], expected), f"batch {batch}, head {head}, row {block}"
    assert len(tiles) == plan.blocks * plan.batch_heads, "every row once"
    past = [0] * plan.kernel.words_of_tile
    plan.tell(past, plan.described(plan.blocks * plan.batch_heads + 5))
    assert not plan.exists(plan.told(past)), "and nothing is read for it that is not there"


def test_the_longest_rows_go_first(on_integers):
    mask = BlockMask.causal(1024)
    plan = schedule_of(mask, replace(PLAIN, seqlen_q=1024, seqlen_k=1024, block_mask=MaskForm(causal=True)))
    kept = [plan.described(number).kept for number in range(plan.blocks * plan.batch_heads)]
    assert kept == sorted(kept, reverse=True)
