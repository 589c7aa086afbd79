"""Where the numbers lie."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from torch import Tensor

from flashzoo.accuracy import Judge
from flashzoo.inputs import LAYOUTS
from flashzoo_suite.support import (
    DEVICE,
    accept,
    both,
    draw,
    storage_of,
)

ON_GPU = DEVICE == "cuda"
asks = pytest.mark.asks


LAYOUT_PROBLEM = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 50, "seqlen_k": 70, "head_dim": 24}


LAYOUT_ASKS = {
    "plain": {},
    "causal": {"causal": True},
    "wide_values": {"head_dim_v": 40},
    "sixteens": {"head_dim": 48},
    # past 64 columns, where a thread of the quantiser has several words of V
    **{f"head_dim_{d}": {"dtype": "bf16", "precision": "fp8", "head_dim": d} for d in (80, 128, 256)},
}


@pytest.mark.covering(2, "version", "layout")
@asks(LAYOUT_ASKS, both=True, **LAYOUT_PROBLEM)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(version, problem, layout):
    """Any strides, offsets and overlaps; inputs and what lies between them stay as they were.

    Seen in FA #2189, PyTorch #191937 (expand), FA #2745, xformers #813 (alignment), SageAttention #386 (views), FA
    9ee0ff1d (O's offset from dO's strides).
    """
    tensors, dout, dlse = draw(problem, layout=layout)
    before = [storage_of(x) for x in (*tensors, dout)]
    accept(Judge(*tensors, problem, dout, dlse), both(version, tensors, problem, dout, dlse))
    assert all(torch.equal(storage_of(x), then) for x, then in zip((*tensors, dout), before, strict=True))


OWN_LAYOUTS = {
    name: fields for name, fields in LAYOUT_ASKS.items() if name in ("plain", "sixteens", "head_dim_80", "head_dim_256")
}


@pytest.mark.covering(1)
@asks(OWN_LAYOUTS, both=True, **LAYOUT_PROBLEM)
def test_each_tensor_in_a_layout_of_its_own(version, problem):
    """And one shape in several layouts, one after the other. Seen in FA #2298: stride 0 baked into a cached kernel."""
    names = [name for name in LAYOUTS if name != "expanded"]
    tensors, dout, dlse = draw(problem)
    judge = Judge(*tensors, problem, dout, dlse)
    expanded, expanded_dout, _ = draw(problem, layout="expanded")
    accept(Judge(*expanded, problem, expanded_dout, dlse), both(version, expanded, problem, expanded_dout, dlse))
    for turn in range(len(names)):
        *moved, moved_dout = (LAYOUTS[names[(turn + i) % len(names)]](x) for i, x in enumerate((*tensors, dout)))
        accept(judge, both(version, tuple(moved), problem, moved_dout, dlse))


def frames(x: Tensor) -> Tensor:
    """Rows that each begin one number behind the one before, of a signal for each head: two dimensions of stride 1."""
    signals = x.transpose(1, 2).flatten(2)[..., : x.shape[1] + x.shape[3] - 1].contiguous()
    return signals.unfold(2, x.shape[3], 1).transpose(1, 2)


@pytest.mark.covering(1)
@asks({"plain": {}, "causal": {"causal": True}}, both=True, seqlen_q=12, seqlen_k=12, head_dim=64)
def test_frames_of_a_signal(version, problem):
    """Fewer of them than columns, which `torch.empty_like` then has outermost, in memory that nobody writes."""
    tensors, dout, dlse = draw(problem)
    tensors, dout = tuple(frames(x) for x in tensors), frames(dout)
    accept(Judge(*tensors, problem, dout, dlse), both(version, tensors, problem, dout, dlse))


@pytest.mark.covering(1)
@asks({"scale": {"softmax_scale": -0.3}, "lazy": {}}, both=True, fp8=("fp8",), seqlen_q=12, seqlen_k=12, head_dim=64)
def test_frames_of_the_other_sign(version, problem):
    """As `-x` and `x.resolve_neg()` lay them, too, their last dimension has gaps."""
    tensors, dout, dlse = draw(problem)
    tensors = tuple(frames(x) for x in tensors)
    if problem.scale > 0:
        tensors = tuple(torch._neg_view(x) for x in tensors)  # pyright: ignore[reportPrivateImportUsage]
    accept(Judge(*tensors, problem, dout, dlse), both(version, tensors, problem, dout, dlse))


@asks(grad=True, causal=True)
def test_gradient_of_a_sum(version, problem):
    """`(out.sum() + lse.sum()).backward()` hands over gradients whose strides are all 0."""
    tensors, dout, dlse = draw(problem)
    ones = torch.ones((), dtype=dout.dtype, device=dout.device).expand_as(dout)
    lse_ones = None if dlse is None else torch.ones((), device=dlse.device).expand_as(dlse)
    accept(Judge(*tensors, problem, ones, lse_ones), both(version, tensors, problem, ones, lse_ones))


@asks(grad=True, causal=True, heads=4, heads_kv=2, head_dim=16)
def test_a_gradient_with_gaps_in_its_last_dimension(version, problem):
    """Inputs have none, but what autograd hands over may lie in any way."""
    tensors, dout, dlse = draw(problem)
    wide = torch.full((*dout.shape[:3], 2 * dout.shape[3]), torch.nan, dtype=dout.dtype, device=dout.device)
    wide[..., ::2] = dout
    accept(Judge(*tensors, problem, dout, dlse), both(version, tensors, problem, wide[..., ::2], dlse))


@asks({"plain": {}, "causal": {"causal": True}}, both=True, batch=3, heads=3, heads_kv=3, head_dim=16)
@pytest.mark.parametrize("axis", ["batch", "seqlen", "heads"])
def test_offsets_past_2_to_31_elements(version, problem, axis):
    """Strides that fit 32 bits, times indices that take the product past them. Seen in FA #2260, #1500,
    PyTorch #190857, fla #1080."""
    tensors, dout, dlse = draw(problem)
    *far, far_dout = spread((*tensors, dout), axis)
    accept(Judge(*tensors, problem, dout, dlse), both(version, tuple(far), problem, far_dout, dlse))


def spread(tensors: tuple[Tensor, ...], axis: str) -> list[Tensor]:
    """The same numbers, the last along the axis 2**31 elements after the first, all in one storage."""
    at = ("batch", "seqlen", "heads").index(axis)
    shape = tensors[0].shape
    inside = [size for i, size in enumerate(shape) if i != at]
    strides = [inside[1] * inside[2], inside[2], 1]
    strides.insert(at, -(-(2**31) // (shape[at] - 1)) // 64 * 64 + 64)
    slot = math.prod(inside)
    storage = unwritten(2**31 + 2**16 + shape[at] * 64 + len(tensors) * slot, tensors[0])
    return [storage.as_strided(shape, strides, i * slot).copy_(x) for i, x in enumerate(tensors)]


def unwritten(elements: int, like: Tensor) -> Tensor:
    """Memory for so many elements; on the CPU pages that nobody touches cost nothing."""
    if ON_GPU:
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    return torch.frombuffer(mmap.mmap(-1, elements * like.itemsize), dtype=like.dtype)
