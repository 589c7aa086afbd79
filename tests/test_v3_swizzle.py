"""How many heads' causal tiles v3 interleaves."""

from __future__ import annotations

import pytest

from flashzoo.integers import cdiv
from flashzoo.v3.swizzle import BESIDE, FEW_WAVES, steps, swizzle_backward, swizzle_of

ROW = 1024
"""Bytes of a row of Q, dO and dQ's sum of 128 columns."""


def least(blocks: int, heads: int) -> float:
    """Steps that no order of tiles beats."""
    return max(blocks + BESIDE, heads * blocks * ((blocks + 1) / 2 + BESIDE) / 132)


@pytest.mark.parametrize("seqlen", [128, 512, 1000, 2048, 5000, 8192, 16384])
@pytest.mark.parametrize("heads", [1, 6, 16, 100])
@pytest.mark.parametrize("group", [1, 8])
def test_tiles_end_together(seqlen, heads, group):
    """However few heads are interleaved so that L2 keeps them: no multiprocessor is left with a long tile when others
    have nothing to do."""
    blocks = cdiv(seqlen, 128)
    interleaved = swizzle_of(blocks, heads, group * seqlen * ROW)
    assert interleaved.bit_count() == 1
    for n in (interleaved, swizzle_backward(blocks, heads, 1)[0]):
        assert steps(blocks, heads, n) <= 1.15 * least(blocks, heads) + 1


def test_what_two_heads_of_six_would_cost():
    """Three times a wave of tiles of 1 to 64 steps: the third has nobody to share with."""
    assert steps(64, 6, 2) > 1.3 * least(64, 6)
    assert swizzle_of(64, 6, 8192 * ROW) == 8


def test_of_many_tiles_as_many_heads_as_l2_keeps():
    """The longer they are the fewer, if two at least; of short ones as many as have a tile for each multiprocessor."""
    lengths = (128, 512, 2048, 4096, 8192, 16384, 65536)
    assert [swizzle_of(cdiv(n, 128), 4096, n * ROW) for n in lengths] == [128, 32, 16, 8, 4, 2, 2]
    assert swizzle_of(64, 4096, 8192 * ROW, group=4) == 16  # whose keys are the same


def test_all_heads_of_two_waves():
    """However much they read: 32 tiles of each of 8 heads."""
    assert swizzle_of(32, 8, 8 * 4096 * ROW) == 8


def test_few_and_many_tiles_meet():
    """Where the model ends, what it chose is near what is chosen behind."""
    heads = FEW_WAVES * 132 // 16
    for n in (heads, heads + 1):
        assert steps(16, n, swizzle_of(16, n, 2048 * ROW)) <= 1.1 * least(16, n)


def test_nothing_to_interleave():
    """No tile, no head, no byte: nobody launches it, and nothing is divided by."""
    assert swizzle_of(0, 0, 0) >= 1
    assert min(swizzle_backward(0, 0, 2)) >= 1


@pytest.mark.parametrize("blocks", [*range(1, 141), 200, 512])
@pytest.mark.parametrize("heads", [1, 12, 1000])
def test_a_wave_has_a_tile_for_each_multiprocessor(blocks, heads):
    """Or for most of them, where all tiles of a head are of one wave."""
    interleaved, wave = swizzle_backward(blocks, heads, 2)
    assert interleaved >= 2 and 66 <= wave <= 1.1 * 132
    assert wave % blocks == 0 or wave == 132
