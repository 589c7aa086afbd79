"""What is special to v3's backward pass: who works on what, what is computed before and after it, tiles'
edges, a fixed order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import astuple, fields, replace
from types import SimpleNamespace

import pytest
import torch
from on_integers import as_written, missed
from torch import Tensor

import flashzoo
from flashzoo import Problem
from flashzoo._cute.driver import TensorMap
from flashzoo._cute.hopper import bounds as bounds_module
from flashzoo._cute.hopper.bounds import NEVER, Bounds, BoundsBackward
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.tile_scheduler import TileOfWave, TileSchedulerBackward
from flashzoo._cute.per_stream import tile_counter
from flashzoo._cute.scale import in_log2
from flashzoo.accuracy import Judge
from flashzoo.call.forms import MaskForm
from flashzoo.call.operands import NO_OPERANDS
from flashzoo.gpu import WARPGROUP_ROWS
from flashzoo.inputs import LAYOUTS
from flashzoo.reference import Result, visible
from flashzoo.v3 import FP8_SPEC, SPEC, launch, programs
from flashzoo.v3.backward import Backward
from flashzoo.v3.backward_by_head import BackwardByHead, TileSchedulerByHead
from flashzoo.v3.backward_pairs import BoundsPairs, TileSchedulerPairs
from flashzoo.v3.config import BACKWARD, PAIRS, PAIRS_FROM, kernel_backward_for, kernel_for, splits_for
from flashzoo.v3.explain import describe
from flashzoo.v3.swizzle import swizzle_backward
from flashzoo.v3.traits import (
    WRITERS,
    KernelBackward,
    KernelBackwardAllKeys,
    KernelBackwardByHead,
    KernelBackwardPairs,
    TilesBackward,
)
from flashzoo_suite.support import accept, both, draw, forward, same_bits

gpu = pytest.mark.gpu
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="v3 runs on Hopper, sm_90, alone"
)

PLAIN = Problem(batch=1, seqlen_q=128, seqlen_k=128, heads=2, heads_kv=2, head_dim=64, lse=True, grad=True, arch=90)
BANDS = {
    "full": {},
    "causal": {"causal": True},
    "itself": {"window": (0, 0)},
    "left_1": {"window": (1, 0)},
    "right_1": {"window": (0, 1)},
    "left": {"window": (63, None)},
    "right": {"window": (None, 5)},
    "wide": {"window": (200, 100)},
}
on_bands = pytest.mark.parametrize("band", BANDS)
LONGER = 1000
"""Keys, more than a tile has."""
LENGTHS = (1, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 200)


# Who works on what: `TileSchedulerBackward` and `BoundsBackward` on Python's integers, held to every pair
# of query and key.

TILINGS = {
    "128x128": TilesBackward(128),
    "128x64": TilesBackward(64),
    "64x64": TilesBackward(64, 64),
    "128x64_in_halves": TilesBackward(64, ds_stages=1, halved=True),
}


@pytest.fixture
def on_integers(monkeypatch):
    """The methods of bounds as what they are without CuTe DSL: arithmetic."""
    for owner in (Bounds, BoundsBackward):
        for name, method in vars(owner).items():
            if hasattr(method, "__wrapped__"):
                monkeypatch.setattr(owner, name, method.__wrapped__)
    monkeypatch.setattr(bounds_module, "Int32", int)
    monkeypatch.setattr(bounds_module, "Int64", int)


def params_of(problem: Problem, tiles: TilesBackward, swizzle: int = 1, splits: int = 1, wave: int = 1) -> Params:
    p = problem
    kernel = replace(kernel_backward_for(replace(p, seqlen_k=LONGER)), tiles=tiles, split_queries=splits > 1)
    blocks, batch_heads = -(-p.seqlen_k // tiles.block_kv), p.batch * p.heads_kv * splits
    sizes = (
        p.seqlen_q,
        p.seqlen_k,
        p.heads_kv * splits,
        -(-p.heads // p.heads_kv // splits),
        p.heads // p.heads_kv,
        splits,
        splits if p.heads == p.heads_kv else 1,
        0,
        *p.reach,
        blocks,
        batch_heads,
        min(swizzle, batch_heads),
        wave,
    )
    return Params(kernel, *sizes, counter=None)


def scheduled() -> list[tuple[Problem, Tensor]]:
    """Problems of all lengths against all, and whether a query sees a key `(seqlen_q, seqlen_k)`."""
    problems = [
        replace(PLAIN, seqlen_q=seqlen_q, seqlen_k=seqlen_k, deterministic=True, **band)
        for seqlen_q, seqlen_k, band in itertools.product(
            (1, 63, 64, 80, 129, 200, 515), (1, 64, 65, 128, 192, 321, 520), BANDS.values()
        )
    ]
    everything = [torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool) for p in problems]
    return [
        (p, every if (seen := visible(p, "cpu")) is None else seen)
        for p, every in zip(problems, everything, strict=True)
    ]


def blocks_that_see(params: Params, seen: Tensor) -> Tensor:
    """Whether some query of a block sees some key of a tile: (blocks of queries, tiles)."""
    tiles = params.kernel.tiles
    padded = torch.nn.functional.pad(seen, (0, -seen.shape[1] % tiles.block_kv, 0, -seen.shape[0] % tiles.block_q))
    return padded.view(-1, tiles.block_q, params.blocks, tiles.block_kv).any(3).any(1)


@pytest.mark.parametrize("tiling", TILINGS)
def test_a_tile_has_all_queries_that_see_it(tiling, on_integers):
    for problem, seen in scheduled():
        params = params_of(problem, TILINGS[tiling])
        pairs = blocks_that_see(params, seen)
        for block in range(params.blocks):
            bounds = BoundsBackward(params, TileOfWave(block, 1, 0, 0))
            begin, end = bounds.block_range()
            inside = pairs[:, block].nonzero().flatten().tolist()
            assert 0 <= begin < end <= len(pairs), f"{problem}: {begin} to {end} of {len(pairs)} blocks of queries"
            assert not inside or (begin <= inside[0] and inside[-1] < end), f"{problem}: key block {block}"
            steps = [bounds.step(i, begin, end) for i in range(bounds.steps(begin, end))]
            heads = range(params.group, 2 * params.group)
            assert sorted(steps) == [(head, block_q) for head in heads for block_q in range(begin, end)]


@pytest.mark.parametrize(("group", "least", "most"), [(8, 4, 4), (16, 4, 4), (7, 7, 7), (71, 6, 6), (1, 1, 1)])
def test_a_group_is_split_evenly_or_where_it_is_a_prime_all_but_evenly(group, least, most):
    """Of one key/value head, 8192 tokens: enough tiles for all multiprocessors, but no 71 parts to add."""
    problem = replace(PLAIN, batch=1, heads=group, heads_kv=1, seqlen_q=8192, seqlen_k=8192, causal=True, head_dim=128)
    splits = splits_for(problem)
    assert least <= splits <= most and (group % splits == 0 or (group + 1) % splits == 0)
    masked = replace(problem, causal=False, block_mask=MaskForm(128, 128))
    assert group % splits_for(masked) == 0


def test_queries_of_one_head_are_split_where_tiles_are_few():
    """Of 512 keys 4 tiles of each of 40 heads are 28 more than there are multiprocessors."""
    text = replace(PLAIN, batch=1, heads=40, heads_kv=40, seqlen_q=32760, seqlen_k=512, head_dim=128, head_dim_v=None)
    assert splits_for(text) == 4
    for others in (
        {"causal": True},
        {"seqlen_k": 32760},
        {"batch": 64},
        {"block_mask": MaskForm(128, 128)},
        {"seqlen_q": 0},
    ):
        assert splits_for(replace(text, **others)) == 1


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 6, 7])
def test_tiles_of_a_block_of_keys_share_out_its_query_heads(splits, causal, on_integers):
    """Each has some, none two of them have, and leaves its part in a place of its own, in the order that is added; LSE,
    delta and dQ's sums of a query head are where they are of all heads together."""
    group = 7 if splits in (4, 7) else 6
    problem = replace(PLAIN, batch=2, heads=3 * group, heads_kv=3, seqlen_q=200, seqlen_k=515, causal=causal)
    params = params_of(problem, TilesBackward(64), splits=splits)
    blocks, heads, places = params.blocks, {}, {}
    for wave, (batch, head, block) in enumerate(itertools.product(range(2), range(params.heads), range(blocks))):
        bounds = BoundsBackward(params, TileOfWave(block, head, batch, wave))
        begin, end = bounds.block_range()
        found = [bounds.step(i, begin, end) for i in range(bounds.steps(begin, end))]
        steps = {head for head, _ in found}
        assert sorted(found) == [*itertools.product(sorted(steps), range(begin, end))]
        assert {bounds.block_of_queries(of, 1) for of in steps} == {(batch * 3 * group + of) * 4 + 1 for of in steps}
        heads.setdefault((batch, bounds.head_kv(), block), []).append(steps)
        places.setdefault((batch, bounds.head_kv(), block), []).append(bounds.place_of_keys())
    assert len(heads) == 2 * 3 * blocks
    for (batch, head_kv, block), shared in heads.items():
        assert sorted(head for steps in shared for head in steps) == [*range(head_kv * group, (head_kv + 1) * group)]
        first = (batch * 3 + head_kv) * splits * blocks + block
        assert places[batch, head_kv, block] == [first + split * blocks for split in range(splits)]


@pytest.mark.parametrize("seqlen_q", [130, 200, 515])
@pytest.mark.parametrize("splits", [2, 3])
def test_tiles_of_a_block_of_keys_share_out_the_queries_of_one_head(splits, seqlen_q, on_integers):
    """Each has some blocks of queries, none two of them have, and leaves its part in a place of its own."""
    problem = replace(PLAIN, batch=2, heads=3, heads_kv=3, seqlen_q=seqlen_q, seqlen_k=515)
    params = params_of(problem, TilesBackward(64), splits=splits)
    found, places = {}, set()
    for batch, head, block in itertools.product(range(2), range(params.heads), range(params.blocks)):
        bounds = BoundsBackward(params, TileOfWave(block, head, batch, 0))
        begin, end = bounds.block_range()
        steps = [bounds.step(i, begin, end) for i in range(bounds.steps(begin, end))]
        assert len(steps) >= -(-seqlen_q // 64) // splits
        found.setdefault((batch, bounds.head_kv(), block), []).extend(steps)
        places.add(bounds.place_of_keys())
    assert places == {*range(2 * 3 * splits * params.blocks)} and len(found) == 2 * 3 * params.blocks
    for (_, head, _), steps in found.items():
        assert sorted(steps) == [(head, n) for n in range(-(-seqlen_q // 64))]


@pytest.mark.parametrize(
    ("seqlen", "heads_kv", "group", "most"),
    [
        (4096, 16, 7, 1.0),
        (8192, 8, 4, 1.0),
        (3072, 20, 7, 1.0),
        (1024, 64, 4, 1.0),
        (4608, 16, 4, 1.0),
        (12800, 8, 2, 2.0),
        (32768, 4, 2, 4.0),
    ],
)
def test_tiles_that_run_together_read_the_same(seqlen, heads_kv, group, most, on_integers):
    """Under a causal mask L2, of which 32 MB hold 512 blocks of 64 queries with Q, dO and dQ's sum of 128 columns,
    misses each once, or a few times where a head has more tiles than a wave or a number that no wave is a multiple
    of."""
    problem = replace(PLAIN, seqlen_q=seqlen, seqlen_k=seqlen, heads=group * heads_kv, heads_kv=heads_kv, causal=True)
    blocks = seqlen // 128
    swizzle, wave = swizzle_backward(blocks, heads_kv, group)
    scheduler = TileSchedulerBackward(params_of(problem, TilesBackward(64), swizzle, wave=wave))

    def walk(number):
        bounds = BoundsBackward(scheduler.params, scheduler.work_tile(number))
        begin, end = bounds.block_range()
        return (bounds.step(i, begin, end) for i in range(bounds.steps(begin, end)))

    found = missed(map(walk, range(scheduler.tiles(0))))
    assert found <= 1.05 * most * group * heads_kv * seqlen // 64


@pytest.mark.parametrize(("seqlen", "heads"), [(16384, 16), (8192, 5), (2048, 64), (512, 512)])
def test_tiles_of_one_head_that_begin_together_add_to_different_sums(seqlen, heads, on_integers):
    """Under a causal mask each begins at its own diagonal, and is a block behind the next one from then on."""
    problem = replace(PLAIN, seqlen_q=seqlen, seqlen_k=seqlen, heads=heads, heads_kv=heads, causal=True)
    swizzle, wave = swizzle_backward(seqlen // 128, heads, 1)
    scheduler = TileSchedulerBackward(params_of(problem, TilesBackward(64), swizzle, wave=wave))
    blocks = []
    for number in range(132):
        bounds = BoundsBackward(scheduler.params, scheduler.work_tile(number))
        blocks.append((bounds.tile.batch, *bounds.step(0, *bounds.block_range())))
    assert len({*blocks}) == len(blocks)


@pytest.mark.parametrize("tiling", TILINGS)
def test_only_what_is_seen_goes_unmasked(tiling, on_integers):
    for problem, seen in scheduled():
        params = params_of(problem, TILINGS[tiling])
        tiles = params.kernel.tiles
        for first_key in range(0, params.blocks * tiles.block_kv, WARPGROUP_ROWS):
            bounds = BoundsBackward(params, TileOfWave(first_key // tiles.block_kv, 0, 0, 0))
            keys = seen[:, first_key : first_key + WARPGROUP_ROWS]
            for n, first_query in enumerate(range(0, problem.seqlen_q, tiles.block_q)):
                if not bounds.crosses(first_key, n):
                    whole = keys[first_query : first_query + tiles.block_q]
                    assert whole.shape[1] == WARPGROUP_ROWS and whole.all(), (
                        f"{problem}: from key {first_key}, query {first_query}"
                    )


def test_a_key_is_masked_to_the_queries_that_see_it(on_integers):
    for problem, seen in scheduled():
        params = params_of(problem, TILINGS["128x64"])
        queries = torch.arange(problem.seqlen_q)
        for key in range(params.blocks * params.kernel.tiles.block_kv - 8):
            bounds = BoundsBackward(params, TileOfWave(key // params.kernel.tiles.block_kv, 0, 0, 0))
            for (lowest, highest), row in zip(bounds.of_thread(key, 2), (key, key + 8), strict=True):
                found = queries - 2 >= lowest
                if params.kernel.left:
                    found &= queries - 2 < highest
                expected = seen[:, row] if row < problem.seqlen_k else torch.zeros_like(found)
                assert torch.equal(found, expected), f"{problem}: key {row}"


@pytest.mark.parametrize("tiling", TILINGS)
def test_tiles_add_to_dq_in_the_order_in_which_they_begin(tiling, on_integers):
    """Else a tile waits for ever: for one that never adds, or for one that waits behind it."""
    for problem, seen in scheduled():
        params = params_of(problem, TILINGS[tiling])
        pairs = blocks_that_see(params, seen)
        tiles = [BoundsBackward(params, TileSchedulerBackward(params).work_tile(i)) for i in range(params.blocks)]
        for block_q in range(len(pairs)):
            adds = {bounds: before for bounds in tiles if (before := bounds.adds_before(block_q)) != NEVER}
            assert list(adds.values()) == [*range(len(adds))], (
                f"{problem}: block of queries {block_q}: {[*adds.values()]}"
            )
            adding = {bounds.tile.block for bounds in adds}
            assert {*pairs[block_q].nonzero().flatten().tolist()} <= adding, (
                f"{problem}: block of queries {block_q} has a sum left out"
            )
            for bounds in adds:
                begin, end = bounds.block_range()
                assert begin <= block_q < end, (
                    f"{problem}: key block {bounds.tile.block} is waited for at {block_q}, and never adds"
                )


@pytest.mark.parametrize("swizzle", [1, 3, 8, 100])
def test_every_tile_is_worked_on_once(swizzle):
    problem = replace(
        PLAIN, batch=3, heads=12, heads_kv=6, seqlen_q=300, seqlen_k=1000, deterministic=True, causal=True
    )
    params = params_of(problem, TILINGS["128x64"], swizzle)
    scheduler = TileSchedulerBackward(params)
    tiles = [astuple(scheduler.work_tile(i))[:3] for i in range(params.blocks * params.batch_heads)]
    assert sorted(tiles) == [*itertools.product(range(params.blocks), range(6), range(3))]
    for head, batch in itertools.product(range(6), range(3)):
        assert [tile[0] for tile in tiles if tile[1:] == (head, batch)] == [
            scheduler.block_of(rank) for rank in range(params.blocks)
        ]


@pytest.mark.parametrize("tiling", ["128x128", "128x64"])
@pytest.mark.parametrize("band", ["full", "causal", "right"])
def test_a_thread_block_has_all_tiles_of_a_head(band, tiling, monkeypatch, on_integers):
    """One after another, that of the first keys last, which all queries see. Of each block of queries the first tile
    that walks it stores dQ, and takes nothing for what others have left."""
    counter = itertools.count()
    for owner, name, method in as_written(TileSchedulerByHead):
        monkeypatch.setattr(owner, name, method)
    monkeypatch.setattr(TileSchedulerByHead, "ask_counter", lambda self, claims: next(counter) % claims)
    monkeypatch.setattr(TileSchedulerByHead, "claims", lambda self: True)
    monkeypatch.setattr(TileSchedulerByHead, "begun", lambda self: at_once)
    arch = SimpleNamespace(shuffle_sync=lambda x, lane: x)
    monkeypatch.setattr("flashzoo.v3.backward_by_head.cute", SimpleNamespace(arch=arch))
    first_seen_before = BackwardByHead.first_seen_before.__wrapped__
    monkeypatch.setattr("flashzoo.v3.backward_by_head.Int32", int)
    for seqlen_q, seqlen_k, at_once in itertools.product((1, 64, 200, 515), (129, 321, 520), (1, 3, 100)):
        sizes = {"batch": 3, "heads": 5, "heads_kv": 5, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        problem = replace(PLAIN, **sizes, **BANDS[band])
        if problem.blind_rows:
            continue
        params = params_of(problem, TILINGS[tiling], wave=0)
        values = {field.name: getattr(params.kernel, field.name) for field in fields(params.kernel)}
        scheduler = TileSchedulerByHead(replace(params, kernel=KernelBackwardByHead(**values)))
        params, program = scheduler.params, SimpleNamespace(kernel=scheduler.params.kernel, bounds=BoundsBackward)
        running, heads, walked = [scheduler.work_of(i) for i in range(at_once)], [], [set() for _ in range(at_once)]
        while valid := [i for i, work in enumerate(running) if scheduler.is_valid(work)]:
            for i in valid:
                tile = scheduler.work_tile(running[i])
                bounds = BoundsBackward(params, tile)
                begin, end = bounds.block_range()
                if tile.block == params.blocks - 1:
                    heads.append((tile.head, tile.batch))
                    walked[i].clear()
                before = first_seen_before(program, params, bounds)
                assert {n for n in range(begin, end) if n >= before} == walked[i]
                walked[i] |= {*range(begin, end)}
                assert tile.block or (begin, end) == (0, params.kernel.blocks_q(seqlen_q))
                running[i] = scheduler.work_of(scheduler.claimed(scheduler.claim_next(running[i])))
                if tile.block:
                    assert astuple(scheduler.work_tile(running[i]))[:3] == (tile.block - 1, tile.head, tile.batch)
        assert sorted(heads) == [*itertools.product(range(5), range(3))]
        assert next(counter) % 15 == 0, "the counter is where it was, for the next launch"
        counter = itertools.count()


def test_heads_go_one_by_one_where_l2_keeps_them_and_all_multiprocessors_have_one():
    short = replace(PLAIN, batch=33, heads=8, heads_kv=8, seqlen_q=512, seqlen_k=512)
    assert isinstance(kernel_backward_for(short), KernelBackwardByHead)
    ordered = kernel_backward_for(replace(short, deterministic=True))
    assert isinstance(ordered, KernelBackwardByHead) and not ordered.deterministic, "it has one order anyway"
    for batch, seqlen, head_dim, head_dim_v, causal in ((33, 512, 128, 128, True), (16, 256, 160, 160, False)):
        sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": head_dim, "head_dim_v": head_dim_v}
        wide = replace(short, batch=batch, causal=causal, **sizes)
        assert isinstance(kernel_backward_for(wide), KernelBackwardByHead), sizes
    others = (
        *({"seqlen_q": 1024, "seqlen_k": 1024}, {"head_dim": 128, "head_dim_v": None}, {"batch": 1}, {"heads_kv": 4}),
        *({"head_dim": 160, "head_dim_v": None}, {"head_dim": 256, "head_dim_v": None}, {"window": (100, None)}),
        *({"causal": True, "seqlen_q": 513}, {"sequences": 33, "batch": 1}, {"block_mask": MaskForm()}),
    )
    for asked in others:
        assert not isinstance(kernel_backward_for(replace(short, **asked)), KernelBackwardByHead), asked
    widths, lengths = (32, 64, 96, 128, 160), (129, 200, 256, 400, 512)
    for batch, head_dim, seqlen in itertools.product(range(1, 80, 3), widths, lengths):
        causal = bool(batch % 2)
        p = replace(short, batch=batch, head_dim=head_dim, head_dim_v=None, seqlen_q=seqlen, causal=causal)
        assert type(kernel_backward_for(p)) in (KernelBackward, KernelBackwardByHead), "none is split, and fails"
    assert "backward: by head, which by a model takes 21 us less for zeros" in "\n".join(describe(short))
    assert "not by head, which by a model would take 42 us less" in "\n".join(describe(replace(short, **others[0])))
    with pytest.raises(ValueError, match="a kernel by head has tiles by keys"):
        KernelBackwardByHead("bf16", 64, 64, True, False, False, TilesBackward(128))


def in_pairs(problem: Problem) -> Params:
    """Params of the problem where thread blocks work in pairs."""
    params = params_of(problem, TilesBackward(64, 64))
    values = {field.name: getattr(params.kernel, field.name) for field in fields(params.kernel)}
    kernel = KernelBackwardPairs(**values | {"width": 256, "width_v": 256, "deterministic": False})
    return replace(params, kernel=kernel, blocks=kernel.blocks_kv(problem.seqlen_k))


def test_a_pair_walks_the_same_blocks_and_meets_what_is_seen_once(on_integers):
    """Else each waits for loads that the other never issues."""
    for problem, seen in scheduled():
        params, met = in_pairs(replace(problem, heads=4)), torch.zeros(seen.shape, dtype=torch.int32)
        for block in range(0, params.blocks, 2):
            pair = [BoundsPairs(params, TileOfWave(block + place, 1, 0, block // 2)) for place in range(2)]
            begin, end = pair[0].block_range()
            assert pair[1].block_range() == (begin, end), f"{problem}: keys from block {block}"
            steps, others = ([x.step(i, begin, end) for i in range(2 * (end - begin))] for x in pair)
            assert steps == others, f"{problem}: keys from block {block}"
            assert sorted(steps) == [*itertools.product((2, 3), range(begin, end))]
            for bounds, n in itertools.product(pair, range(begin, end)):
                first_key, query = bounds.tile.block * 64, torch.arange(n * 64, n * 64 + 64)[:, None]
                lowest, highest = torch.tensor([bounds.of_key(first_key + i, 0) for i in range(64)]).T
                meets = (query >= lowest) & (query < highest) if params.kernel.left else query >= lowest
                if not bounds.crosses(first_key, n):
                    assert meets.all(), f"{problem}: key {first_key}, block of queries {n}"
                rows, columns = (max(0, min(64, x)) for x in (problem.seqlen_q - n * 64, problem.seqlen_k - first_key))
                assert not meets[:, columns:].any(), f"{problem}: sees past the last key"
                met[n * 64 :, first_key:][:rows, :columns] += meets[:rows, :columns]
        assert torch.equal(met, seen.int()), f"{problem}"


@pytest.mark.parametrize("keys", [1000, 1100])
@pytest.mark.parametrize("swizzle", [1, 3, 100])
def test_every_tile_is_one_thread_blocks_of_a_pair(swizzle, keys, monkeypatch):
    problem = replace(PLAIN, batch=3, heads=12, heads_kv=6, seqlen_q=300, seqlen_k=keys, causal=True)
    params = replace(in_pairs(problem), l2_swizzle=min(swizzle, 18))
    scheduler, found = TileSchedulerPairs(params), []
    for place in range(2):
        arch = SimpleNamespace(block_idx_in_cluster=lambda place=place: place)
        monkeypatch.setattr("flashzoo.v3.backward_pairs.cute", SimpleNamespace(arch=arch))
        monkeypatch.setattr("flashzoo.v3.backward_pairs.opaque", int)
        found.append([astuple(scheduler.work_tile(i)) for i in range(scheduler.tiles(0))])
    tiles = sorted(tile[:3] for tile in itertools.chain(*found))
    assert tiles == [*itertools.product(range(params.blocks), range(6), range(3))]
    assert params.blocks % 2 == 0 and 0 <= params.blocks - -(-keys // 64) < 2
    for first, second in zip(*found, strict=True):
        assert (first[0] % 2, second) == (0, (first[0] + 1, *first[1:])), "neighbours"


@pytest.mark.parametrize("widths", [*PAIRS_FROM], ids=str)
@pytest.mark.parametrize("more", [0, 1, 40000])
def test_a_launch_has_whole_pairs(more, widths, monkeypatch):
    """As many as run at a time, or as there are; of half a block of queries each thread block loads one."""
    keys, block_kv = PAIRS_FROM[widths][False] + more, PAIRS[widths].block_kv
    bound, sizes = [], {"heads": 1, "heads_kv": 1, "head_dim": widths[0], "head_dim_v": widths[1], "seqlen_k": keys}
    problem = replace(PLAIN, **sizes)

    def bind(device, blocks, fixed, given, cluster):
        bound.append((blocks, fixed["blocks"], cluster))

    function = SimpleNamespace(bind=bind, clusters=lambda device, cluster: 66)
    monkeypatch.setattr(launch, "function_for", lambda kernel: function)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    of_tensors = zip((128, keys, keys, 128, 128), (widths[0],) * 2 + (widths[1],) * 3, strict=True)
    strides = [torch.empty(1, n, 1, width).stride() for n, width in of_tensors]
    made = launch.BackwardLaunch(problem, kernel_backward_for(problem), tuple(strides[:4]), strides[4], False, 0)
    pairs = -(-keys // (2 * block_kv))
    assert bound == [(2 * min(66, pairs), 2 * pairs, 2)]
    boxes = [[*x._shape[2]] for x in (made._q, made._dout, made._k, made._v, made._dk, made._dv)]
    of_k = 16 if widths[0] == 192 else 64  # columns that divide 48, or 64, which a warpgroup has of dQ
    assert boxes == [[64, 1, 32, 1]] * 2 + [[columns, 1, block_kv, 1] for columns in (of_k, 64) * 2]


@pytest.mark.parametrize(
    ("asked", "dlse"),
    [
        ({}, False),
        ({"deterministic": True}, True),
        ({"heads_kv": 1, "seqlen_q": 1024}, True),
        ({"sinks": True}, False),
        ({"seqlen_k": 77, "deterministic": True}, True),
        ({"seqlen_k": 77, "heads_kv": 1, "seqlen_q": 1024}, True),
        ({"heads": 264, "heads_kv": 264, "deterministic": True}, True),
    ],
    ids=["plain", "deterministic", "split", "sinks", "all_keys", "all_keys_split", "by_head"],
)
def test_kernels_find_what_others_left(asked, dlse, monkeypatch):
    """What they share is handed to each under its name, and lies in one piece of memory, apart from all else."""
    problem = replace(PLAIN, **{"seqlen_q": 70, "seqlen_k": 177, "heads": 4, "heads_kv": 4, **asked})
    told, memory, counter, empty = {}, [], torch.zeros(1), torch.empty

    def bind(device, blocks, fixed, given, cluster=1):
        return lambda stream, *values: told.update(kernel=dict(zip(given, values, strict=True)))

    def noted(run, device, stream, addresses, floats=()):
        assert len(run._dtypes) == len(addresses)
        told[run.kernel.__name__] = dict(zip(run.kernel.arg_names, (*addresses, *floats), strict=False))

    monkeypatch.setattr(launch, "function_for", lambda kernel: SimpleNamespace(bind=bind))
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor gives as its own
    monkeypatch.setattr(TensorMap, "_at", lambda self, address: address)
    monkeypatch.setattr("flashzoo._triton.Launch.at", noted)
    monkeypatch.setattr("flashzoo._cute.per_stream.PerStream.__call__", lambda self, device, stream: counter)
    q, out, dout = torch.zeros(3, 1, problem.seqlen_q, problem.heads, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 1, problem.seqlen_k, problem.heads_kv, 64, dtype=torch.bfloat16)
    lse, of_lse = torch.zeros(2, 1, problem.heads, problem.seqlen_q)
    sinks, strides = torch.zeros(4) if problem.sinks else None, tuple(x.stride() for x in (q, k, v, dout))
    kernel = kernel_backward_for(problem)
    made = launch.BackwardLaunch(problem, kernel, strides, out.stride(), dlse, -1)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: memory.append(empty(*size, **how)) or memory[-1])
    dq, dk, dv, *_ = made(dout, of_lse if dlse else None, q, k, v, out, lse, sinks=sinks)

    own = told.pop("kernel")
    of_scratch = {"delta": own["delta"], "lse_log2": own["lse"], "dq_sum": own["dq"]}
    of_scratch |= {name: own[name] for name in ("dq_semaphore", "dk_parts", "dv_parts")}
    tensors = {"q": q, "k": k, "v": v, "o": out, "do": dout, "dout": dout, "lse": lse, "sinks": sinks}
    tensors |= {"dlse": of_lse if dlse else lse, "dq": dq, "dk": dk, "dv": dv, "tiles": None}
    tensors |= {"tiles_q": None, "tiles_kv": None, "dq_rounded": dq}
    expected = of_scratch | {name: x if x is None else x.data_ptr() for name, x in tensors.items()}
    expected |= {"scale": 0.125, "scale_log2": in_log2(0.125), "counter": counter.data_ptr()}
    assert own == {name: expected[name] for name in own} | {name: own[name] for name in ("lse", "dq")}
    assert (told["delta_kernel"].pop("dsinks") is None) is not problem.sinks
    assert told == {of: {name: expected[name] for name in given} for of, given in told.items()}
    all_keys = isinstance(kernel, KernelBackwardAllKeys)
    rounding = all_keys or kernel.by_head
    assert (all_keys, kernel.by_head) == (problem.seqlen_k == 77, problem.heads == 264)
    assert not (rounding and kernel.deterministic)
    assert told.keys() == {"delta_kernel", *["round_and_sum_kernel"] * (not rounding or kernel.split_queries)}

    rows = problem.heads * kernel.blocks_q(problem.seqlen_q) * kernel.tiles.block_q
    keys = kernel.blocks_kv(problem.seqlen_k) * kernel.tiles.block_kv * splits_for(problem)
    keys = keys if kernel.split_queries else 0
    sums = 64 * (rows // problem.heads * 132 if kernel.by_head else rows)
    room = {"lse": rows, "delta": rows, "dq": 0 if all_keys else sums}
    room["dq_semaphore"] = kernel.deterministic * rows // 128
    (scratch,), end = memory, 0
    for name, numbers in (room | dict.fromkeys(("dk_parts", "dv_parts"), 64 * keys)).items():
        begin = own[name] - scratch.data_ptr()
        assert begin >= end and begin % 512 == 0, name
        end = begin + 4 * numbers
        assert max(end, begin + 4) <= 4 * scratch.numel(), "no launcher takes an address behind the memory's end"


def test_a_tile_has_all_keys_where_every_query_sees_one():
    """It stores their dQ, and nobody else does; a query that sees no key no tile walks."""
    problems = [
        replace(PLAIN, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=None, **band)
        for seqlen_q, seqlen_k, head_dim, band in itertools.product(
            (1, 128, 300), (0, 1, 128, 129), (40, 128, 160, 256), BANDS.values()
        )
    ]
    for p in problems:
        kernel, all_seen = kernel_backward_for(p), p.blind_rows == 0
        fits = 0 < p.seqlen_k <= 128 and p.head_dim <= 160
        assert isinstance(kernel, KernelBackwardAllKeys) == (fits and all_seen), p
    for asked in ({"sequences": 1}, {"block_mask": MaskForm()}):
        assert not isinstance(kernel_backward_for(replace(PLAIN, **asked)), KernelBackwardAllKeys)
    with pytest.raises(ValueError, match="a kernel of all keys has tiles by keys"):
        KernelBackwardAllKeys("bf16", 64, 64, False, False, True, TilesBackward(128))


@pytest.mark.parametrize("tiling", ["128x128", "128x64"])
def test_a_tile_of_all_keys_walks_every_query(tiling, on_integers):
    tiles = TILINGS[tiling]
    for problem, _ in scheduled():
        if problem.seqlen_k <= tiles.block_kv and not problem.blind_rows:
            params = params_of(problem, tiles)
            blocks = -(-problem.seqlen_q // tiles.block_q)
            assert BoundsBackward(params, TileOfWave(0, 1, 0, 0)).block_range() == (0, blocks), f"{problem}"


def test_pairs_are_for_many_keys_in_any_order():
    assert PAIRS.keys() == PAIRS_FROM.keys()
    for (width, width_v), causal in itertools.product(PAIRS, (False, True)):
        keys = PAIRS_FROM[width, width_v][causal]
        long = replace(PLAIN, head_dim=width, head_dim_v=width_v, seqlen_k=keys, causal=causal)
        others = ({"seqlen_k": keys - 1}, {"head_dim": 160, "head_dim_v": None}, {"deterministic": True})
        kinds = [type(kernel_backward_for(replace(long, **changed))) for changed in ({}, *others)]
        assert [kind is KernelBackwardPairs for kind in kinds] == [True, False, False, False]
    with pytest.raises(ValueError, match="pairs have any order"):
        KernelBackwardPairs("bf16", 128, 128, False, False, True, TilesBackward(64))


@pytest.mark.parametrize("writers", [1, WRITERS])
def test_every_step_has_one_writer(writers, monkeypatch):
    monkeypatch.setattr("flashzoo.v3.backward.Int32", int)
    program = SimpleNamespace(kernel=SimpleNamespace(writers=writers))
    before = 0
    for steps in (5, 1, 7, 2, 3, 4, 1, 1, 6):
        taken = [
            (i, writer)
            for writer in range(writers)
            for i in range(Backward.first_step(program, before, writer), steps, writers)
        ]
        assert sorted(taken) == [(i, (before + i) % writers) for i in range(steps)]
        before += steps


def test_every_head_dim_has_a_kernel():
    for head_dim, head_dim_v, deterministic in itertools.product(range(8, 257, 8), range(8, 257, 8), (False, True)):
        asked = {"head_dim": head_dim, "head_dim_v": head_dim_v, "deterministic": deterministic}
        kernel = kernel_backward_for(replace(PLAIN, seqlen_k=LONGER // 4, **asked))
        fits = [(width, width_v) for width, width_v in BACKWARD if width >= head_dim and width_v >= head_dim_v]
        assert (kernel.width, kernel.width_v) == min(fits, key=sum)
        parts = [part for wg_idx in range(kernel.tiles.consumers) for part in kernel.dq_parts_of(wg_idx)]
        assert parts == list(range(kernel.dq_parts)), "each part of dQ is one warpgroup's"
        assert kernel.deterministic == deterministic and kernel.tiles in BACKWARD.values()


# In FP8.


def test_fp8_goes_back_by_v3s_own_passes():
    """Whoever else is registered, and would be taken under "auto"."""
    assert FP8_SPEC.backward_16 == SPEC.impl
    lines = str(flashzoo.explain(replace(PLAIN, precision="fp8", grad=True), version="v3_fp8"))
    assert "backward: v3's, in 16 bits" in lines and "it runs v3's forward pass again first" in lines


FP8_TAKES = [{}, {"causal": True}, {"window": (5, 3)}, {"heads_kv": 1, "seqlen_k": 77}, {"deterministic": True}]
FP8_REFUSES = [{"block_mask": MaskForm()}, {"arch": 100}, {"head_dim_v": 8}]


@pytest.mark.parametrize("fields", [*FP8_TAKES, *FP8_REFUSES], ids=str)
def test_what_fp8_takes_with_gradients_v3_takes_too(fields):
    """So that a refusal comes before anything runs."""
    taken = 0
    for dtype, head_dim in itertools.product(FP8_SPEC.quantizes, FP8_SPEC.head_dims):
        asked = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": None} | fields
        problem = replace(PLAIN, precision="fp8", grad=True, lse=True, **asked)
        if not FP8_SPEC.unsupported(problem):
            assert SPEC.unsupported(replace(problem, precision=None)) == []
            taken += 1
    assert taken == (len(FP8_SPEC.quantizes) * len(FP8_SPEC.head_dims) if fields in FP8_TAKES else 0)


# On the GPU: lengths around tiles' edges.


def sampled(head_dim: int, band: str, count: int = 6) -> list[Problem]:
    """Problems of this kind whose other fields are drawn, the same ones every time."""
    chance = random.Random(f"{head_dim} {band}")
    found = []
    for i in range(count):
        # each dtype and band is a kernel to compile
        dtype = "fp16" if band in ("full", "causal") and i % 3 == 2 else "bf16"
        group, heads_kv = chance.choice((1, 1, 2, 3, 8)), chance.choice((1, 2))
        sizes = {"batch": chance.choice((1, 2)), "seqlen_q": chance.choice(LENGTHS), "seqlen_k": chance.choice(LENGTHS)}
        heads = {
            "heads": group * heads_kv,
            "heads_kv": heads_kv,
            "head_dim": head_dim - 8 * (i % 4 == 3),
            "head_dim_v": None,
        }
        how = {"dtype": dtype, "out_dtype": None, "lse": chance.random() < 0.5, "deterministic": i % 3 == 1}
        found.append(replace(PLAIN, **sizes, **heads, **how, **BANDS[band]))
    return found


def short(problem: Problem) -> str:
    p = problem
    how = [name for name in ("lse", "deterministic") if getattr(p, name)]
    return "-".join(
        (p.dtype, f"{p.batch}x{p.seqlen_q}x{p.seqlen_k}", f"{p.heads}of{p.heads_kv}", f"d{p.head_dim}", *how)
    )


SAMPLED = [
    pytest.param(problem, id=f"{band}-{short(problem)}")
    for head_dim, band in itertools.product((64, 80, 96, 128, 192, 256), BANDS)
    for problem in sampled(head_dim, band)
]


@gpu
@on_hopper
@pytest.mark.parametrize("problem", SAMPLED)
def test_lengths_around_the_edges_of_tiles(problem):
    tensors, dout, dlse = draw(problem)
    found = both("v3", tensors, problem, dout, dlse)
    accept(Judge(*tensors, problem, dout, dlse), found)
    if problem.deterministic:
        assert same_results(both("v3", tensors, problem, dout, dlse), found)


def again_and_again(
    tensors: tuple[Tensor, ...], problem: Problem, dout: Tensor, dlse: Tensor
) -> tuple[Result, Callable[[], tuple[Tensor, ...]]]:
    """v3's out and lse, and what runs its backward pass behind them at each call."""
    leaves = tuple(x.clone().requires_grad_() for x in tensors)
    result = forward("v3", leaves, problem)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad((result.out, result.lse), leaves, (dout, dlse), retain_graph=True)

    return Result(result.out.detach(), result.lse.detach()), gradients


def same_results(left: Result, right: Result) -> bool:
    return all(same_bits(x, y) for x, y in zip(left.items().values(), right.items().values(), strict=True))


@gpu
@on_hopper
@pytest.mark.parametrize("band", ["causal", "wide", "left"])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_every_place_of_the_diagonal_in_a_tile(head_dim, band):
    """Blocks of queries change from seen whole to seen in part to not seen at all."""
    for shift in range(-130, 131, 9):
        problem = replace(
            PLAIN,
            heads=1,
            heads_kv=1,
            seqlen_q=198,
            seqlen_k=198 + shift,
            head_dim=head_dim,
            head_dim_v=None,
            **BANDS[band],
        )
        tensors, dout, dlse = draw(problem)
        accept(Judge(*tensors, problem, dout, dlse), both("v3", tensors, problem, dout, dlse))


@gpu
@on_hopper
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "head_dims", [(64, 128), (128, 64), (40, 200), (256, 64), (72, 8), (88, 96), (192, 128)], ids=str
)
def test_values_of_another_width(head_dims, deterministic):
    head_dim, head_dim_v = head_dims
    problem = replace(
        PLAIN,
        seqlen_q=130,
        seqlen_k=200,
        causal=True,
        deterministic=deterministic,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    tensors, dout, dlse = draw(problem)
    accept(Judge(*tensors, problem, dout, dlse), both("v3", tensors, problem, dout, dlse))


@gpu
@on_hopper
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_gradient_through_lse_alone(head_dim, deterministic):
    problem = replace(
        PLAIN,
        seqlen_q=200,
        seqlen_k=129,
        heads=4,
        causal=True,
        deterministic=deterministic,
        head_dim=head_dim,
        head_dim_v=None,
    )
    tensors, dout, dlse = draw(problem)
    leaves = tuple(x.clone().requires_grad_() for x in tensors)
    result = forward("v3", leaves, problem)
    gradients = torch.autograd.grad(result.lse, leaves, dlse)
    found = Result(result.out.detach(), result.lse.detach(), *gradients)
    accept(Judge(*tensors, problem, torch.zeros_like(dout), dlse), found)
    assert not gradients[2].any(), "v has no part in LSE"


# On the GPU: many tiles, few, and a fixed order.

MANY = replace(PLAIN, batch=16, seqlen_q=300, seqlen_k=1100, heads=8, head_dim=128, head_dim_v=None, causal=True)
"""More tiles than a GPU has multiprocessors, so that the counter hands them out; four heads to a tile."""
SIZES = {
    "many": MANY,
    "few": replace(MANY, batch=1, heads=2),
    "one_tile": replace(MANY, batch=1, heads=8, heads_kv=1, seqlen_k=100),
}


def counters_are_zero() -> bool:
    torch.cuda.synchronize()
    return not any(counters.any() for counters in tile_counter.kept.values())


@gpu
@on_hopper
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 192, 256])
def test_queries_of_one_head_that_are_split(head_dim, deterministic):
    """Unevenly; in pairs, too, the last without keys."""
    of_heads = {"heads": 2, "heads_kv": 2, "head_dim": head_dim, "head_dim_v": None}
    for seqlen_k in (130, 500, 2100):
        lengths = {"batch": 1, "seqlen_q": 4500, "seqlen_k": seqlen_k}
        problem = replace(PLAIN, **lengths, **of_heads, deterministic=deterministic)
        assert splits_for(problem) > 1
        tensors, dout, dlse = draw(problem)
        accept(Judge(*tensors, problem, dout, dlse), both("v3", tensors, problem, dout, dlse))
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
def test_query_heads_that_are_split_unevenly(head_dim, causal, deterministic):
    """Where a group is a prime; in pairs, too."""
    of_heads = {"heads": 71, "heads_kv": 1, "head_dim": head_dim, "head_dim_v": None}
    paired = PAIRS_FROM.get((head_dim, head_dim), (500, 500))[causal]
    for seqlen_k in (500, paired):
        lengths = {"batch": 3, "seqlen_q": 500, "seqlen_k": seqlen_k}
        problem = replace(PLAIN, **lengths, **of_heads, causal=causal, deterministic=deterministic)
        assert 71 % splits_for(problem)
        tensors, dout, dlse = draw(problem)
        accept(Judge(*tensors, problem, dout, dlse), both("v3", tensors, problem, dout, dlse))
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_query_heads_of_packed_sequences_that_are_split_unevenly(head_dim, causal):
    starts = torch.tensor([0, 5, 5, 400, 1000, 1001, 1500, 2200, 2900, 3000], dtype=torch.int32, device="cuda")
    packed = replace(PLAIN, seqlen_q=3000, seqlen_k=3000, sequences=9, heads=71, heads_kv=1, causal=causal)
    assert 71 % splits_for(replace(packed, head_dim=head_dim, head_dim_v=None))
    *qkv, dout = (torch.randn(3000, h, head_dim, dtype=torch.float16, device="cuda") for h in (71, 1, 1, 71))

    def gradients(version: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        out = flashzoo.attention(*leaves, cu_seqlens_q=starts, causal=causal, version=version)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    for found, expected in zip(gradients("v3", torch.float16), gradients("standard", torch.float32), strict=True):
        assert (found - expected).norm() < 3e-3 * expected.norm()


@gpu
@on_hopper
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (160, 160), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_more_tiles_than_multiprocessors_and_fewer(size, head_dims, deterministic):
    head_dim, head_dim_v = head_dims
    problem = replace(SIZES[size], head_dim=head_dim, head_dim_v=head_dim_v, deterministic=deterministic)
    tensors, dout, dlse = draw(problem)
    accept(Judge(*tensors, problem, dout, dlse), both("v3", tensors, problem, dout, dlse))
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160])
def test_dk_and_dv_of_short_tiles_are_the_same_bits_at_every_call(head_dim):
    """They leave while the next tile is worked on. The first keys are seen by no query, in tiles of a single step."""
    problem = replace(MANY, seqlen_q=200, head_dim=head_dim, head_dim_v=None, causal=False, window=(500, None))
    tensors, dout, dlse = draw(problem)
    result, gradients = again_and_again(tensors, problem, dout, dlse)
    first = gradients()
    accept(Judge(*tensors, problem, dout, dlse), Result(result.out, result.lse, *first))
    assert not any(x[:, :256].any() for x in first[1:])
    for _ in range(50):
        assert [
            name for name, x, y in zip(("dk", "dv"), gradients()[1:], first[1:], strict=True) if not same_bits(x, y)
        ] == []
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 192, 256])
def test_tiles_without_a_step_between_others(head_dim):
    """Of several hundred packed sequences with keys, many have no query: their tiles walk nothing, and leave zeros,
    while dK and dV of the tile before leave and keys of the next come. Others' are the bits that they have alone."""
    random.seed(head_dim)
    lengths = [(random.choice((0, 0, 1, 70, 200)), random.choice((1, 130, 300))) for _ in range(400)]
    starts = [list(itertools.accumulate(of, initial=0)) for of in zip(*lengths, strict=True)]

    def drawn(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_dim, dtype=torch.float16, device="cuda")

    def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, cu: list[list[int]]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in cu)
        out = flashzoo.attention(*leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, version="v3")
        return torch.autograd.grad(out, leaves, dout)

    q, k, v, dout = (drawn(starts[x][-1], 2) for x in (0, 1, 1, 0))
    for _ in range(5):
        _, dk, dv = gradients(q, k, v, dout, starts)
        for n, (queries, keys) in enumerate(lengths):
            rows = slice(starts[1][n], starts[1][n] + keys)
            if not queries:
                assert not dk[rows].any() and not dv[rows].any()
            elif n % 40 == 0:
                own = slice(starts[0][n], starts[0][n] + queries)
                alone = gradients(q[own], k[rows], v[rows], dout[own], [[0, queries], [0, keys]])
                assert same_bits(dk[rows], alone[1]) and same_bits(dv[rows], alone[2])
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("band", ["full", "causal", "wide", "left"])
@pytest.mark.parametrize("widths", [*PAIRS_FROM], ids=str)
def test_pairs_at_the_edges_of_tiles(widths, band):
    """An odd number of blocks of keys, a last one that is not full, heads that share keys, split or not."""
    block_kv = PAIRS[widths].block_kv
    for more, heads, batch in ((0, 2, 1), (1, 4, 5), (block_kv, 2, 1), (block_kv + 23, 16, 1)):
        for seqlen_q in (1, 200, 1000):
            lengths = {"seqlen_q": seqlen_q, "seqlen_k": PAIRS_FROM[widths][band != "full"] + more}
            sizes = {"batch": batch, **lengths, "heads": heads, "heads_kv": heads // 2}
            head_dims = {"head_dim": widths[0], "head_dim_v": widths[1], "out_dtype": None}
            problem = replace(PLAIN, **sizes, **head_dims, **BANDS[band])
            assert isinstance(kernel_backward_for(problem), KernelBackwardPairs)
            tensors, dout, dlse = draw(problem)
            accept(Judge(*tensors, problem, dout, dlse), both("v3", tensors, problem, dout, dlse))
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("band", ["full", "causal", "right"])
@pytest.mark.parametrize(
    "head_dims",
    [(32, 32), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (136, 136), (160, 160), (192, 128)],
    ids=str,
)
def test_heads_of_a_thread_block(head_dims, band):
    """Two or more each, of some blocks of keys and of queries, of which some tiles see none: sums are those of no other
    head, and the same bits at every call. No key is the only one of those that are judged together: one query gives
    some of hundreds a gradient that cancels, and is rounding alone."""
    longest = ((256, 256), (300, 400)) if sum(head_dims) <= 256 else ((220, 256),)
    for seqlen_q, seqlen_k in ((33, 150), (100, 300), (197, 197), *longest):
        lengths = {"batch": 24, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": 11, "heads_kv": 11}
        how = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "deterministic": seqlen_q == 100}
        problem = replace(PLAIN, **lengths, **how, **BANDS[band])
        assert isinstance(kernel_backward_for(problem), KernelBackwardByHead)
        tensors, dout, dlse = draw(problem)
        result, gradients = again_and_again(tensors, problem, dout, dlse)
        first = gradients()
        accept(Judge(*tensors, problem, dout, dlse), Result(result.out, result.lse, *first))
        for _ in range(10):
            assert all(map(same_bits, gradients(), first))
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("band", ["full", "causal", "left"])
@pytest.mark.parametrize("widths", [*PAIRS_FROM], ids=str)
def test_pairs_of_many_short_tiles(widths, band):
    """Warps of both thread blocks read which tile is next at times of their own: a hang or a tile done twice is one
    that read what came behind."""
    sizes = {"batch": 5, "seqlen_q": 1, "seqlen_k": 8193, "heads": 4, "heads_kv": 2}
    problem = replace(PLAIN, **sizes, head_dim=widths[0], head_dim_v=widths[1], out_dtype=None, **BANDS[band])
    assert isinstance(kernel_backward_for(problem), KernelBackwardPairs)
    tensors, dout, dlse = draw(problem)
    result, gradients = again_and_again(tensors, problem, dout, dlse)
    first = gradients()
    accept(Judge(*tensors, problem, dout, dlse), Result(result.out, result.lse, *first))
    for _ in range(50):
        assert all(same_bits(x, y) for x, y in zip(gradients()[1:], first[1:], strict=True))
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("band", ["full", "causal", "wide"])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_deterministic_is_the_same_bits_when_busy(head_dim, band):
    lengths = {"batch": 2, "seqlen_q": 2048, "seqlen_k": 2048, "heads": 12, "heads_kv": 6}
    problem = replace(PLAIN, **lengths, head_dim=head_dim, head_dim_v=None, deterministic=True, **BANDS[band])
    tensors, dout, dlse = draw(problem)
    result, gradients = again_and_again(tensors, problem, dout, dlse)
    first = gradients()
    few = tuple(x[:1, :, : 2 if x.shape[2] == 12 else 1] for x in (*tensors, dout, result.out, *first))
    sample = replace(problem, batch=1, heads=2, heads_kv=1)
    judge = Judge(*few[:3], sample, few[3], dlse[:1, :2])
    accept(judge, Result(few[4], result.lse[:1, :2], *few[5:]))
    for _ in range(50):
        assert [
            name for name, x, y in zip(("dq", "dk", "dv"), gradients(), first, strict=True) if not same_bits(x, y)
        ] == []
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [*BACKWARD], ids=str)
def test_deterministic_means_one_order_of_sums(widths, causal):
    """Where all keys are one dQ is what rounding leaves of a sum that is 0: in 16 bits too it tells of its order, which
    else one of a million numbers does."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int, head_dim: int) -> Tensor:
        return torch.randn(2, 4096, heads, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, v, dout = (normal(16, head_dim).requires_grad_() for head_dim in (*widths, widths[1]))
    k = normal(16, widths[0])[:, :1].expand(q.shape).contiguous().requires_grad_()
    out = flashzoo.attention(q, k, v, version="v3", causal=causal, deterministic=True)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    first = gradients()
    for _ in range(20):
        assert all(map(same_bits, gradients(), first))


@gpu
@on_hopper
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_each_tensor_in_a_layout_of_its_own(head_dim, layout):
    """Out among them, which a caller of the operator hands over as it likes.
    Delta is summed in an order that is its layout's."""
    problem = replace(MANY, batch=2, head_dim=head_dim, head_dim_v=None, deterministic=True)
    tensors, dout, dlse = draw(problem)
    judge, result = Judge(*tensors, problem, dout, dlse), forward("v3", tensors, problem)
    given = (dout, *tensors, result.out)

    def backward(dout: Tensor, *rest: Tensor) -> Result:
        gradients = launch.backward(dout, dlse, *rest, result.lse, problem, NO_OPERANDS)
        return Result(result.out, result.lse, *gradients)

    expected = backward(*given)
    for moved in ({0, 1, 2, 3, 4}, {0}, {1}, {2}, {3}, {4}):
        found = backward(*(LAYOUTS[layout](x) if at in moved else x for at, x in enumerate(given)))
        accept(judge, found)
        assert same_bits(found.dv, expected.dv)


@gpu
@on_hopper
def test_two_streams_at_once():
    """Each stream has a tile counter of its own, and each call its own turns."""
    problem = replace(MANY, deterministic=True)
    drawn = [draw(problem, seed) for seed in range(2)]
    expected = [both("v3", tensors, problem, dout, dlse) for tensors, dout, dlse in drawn]
    streams = [torch.cuda.Stream() for _ in drawn]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(10):
        for stream, (tensors, dout, dlse), results in zip(streams, drawn, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(both("v3", tensors, problem, dout, dlse))
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        assert all(same_results(result, wanted) for result in results)
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_deterministic_where_not_all_thread_blocks_run_at_a_time(head_dim, packed):
    """None waits for one that has not begun."""
    q, k, v, dout = torch.randn(4, 1, 4096, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 1500, 4096], dtype=torch.int32, device="cuda")
    asked = {"version": "v3", "deterministic": True} | ({"cu_seqlens_q": cu_seqlens} if packed else {})
    out, lse = flashzoo.attention(q, k, v, return_lse=True, **asked)
    expected = flashzoo.attention_backward(dout, q, k, v, out, lse, **asked)
    few = torch.cuda.green_contexts.GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
    torch.cuda.synchronize()
    few.set_context()
    try:
        found = flashzoo.attention_backward(dout, q, k, v, out, lse, **asked)
        torch.cuda.synchronize()
    finally:
        few.pop_context()
    assert all(map(same_bits, found, expected))
    assert counters_are_zero()


@gpu
@on_hopper
@pytest.mark.alone  # a worker sees one GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_pairs_on_another_device_than_the_current_one():
    """How many clusters it runs is asked of that one."""
    problem = replace(PLAIN, seqlen_q=300, seqlen_k=700, head_dim=256, head_dim_v=256)
    assert kernel_backward_for(problem).cluster == 2
    tensors, dout, _ = draw(problem)
    q, k, v, there = (x.to("cuda:1") for x in (*tensors, dout))
    out, lse = flashzoo.attention(q, k, v, return_lse=True, version="v3")
    gradients = flashzoo.attention_backward(there, q, k, v, out, lse, version="v3")
    accept(Judge(*tensors, problem, dout), Result(*(x.to("cuda:0") for x in (out, lse, *gradients))))


@gpu
@on_hopper
def test_sizes_do_not_compile_again():
    """But for whether query heads that share keys are split, and forward for the tiles that lengths ask for."""
    small = replace(PLAIN, seqlen_k=200, causal=True, head_dim_v=None)
    split = {"heads": 8, "heads_kv": 1}
    others = (
        {"batch": 3},
        {"seqlen_q": 77},
        {"seqlen_k": 513},
        {"heads": 6},
        {"head_dim": 56},
        split | {"seqlen_q": 77},
        split | {"heads": 12},
    )
    problems = [small, replace(small, **split), *(replace(small, **other) for other in others)]
    compiled = programs.function_for.cache_info().misses
    kernels = [{kernel(problem) for problem in problems} for kernel in (kernel_for, kernel_backward_for)]
    for problem in problems:
        tensors, dout, dlse = draw(problem)
        accept(Judge(*tensors, problem, dout, dlse), both("v3", tensors, problem, dout, dlse))
    assert programs.function_for.cache_info().misses - compiled <= sum(map(len, kernels))
    forward_kernels, backward_kernels = kernels
    assert len({replace(kernel, tiles=kernel_for(small).tiles) for kernel in forward_kernels}) == 1
    assert len(forward_kernels) < len(problems) and len(backward_kernels) == 2
