"""Probes with one right answer and no tolerance; what a row sees; numbers at the edge."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashzoo import Problem
from flashzoo.accuracy import Judge
from flashzoo.call.forms import MaskForm
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.reference import visible
from flashzoo_suite.support import (
    DEVICE,
    accept,
    both,
    draw,
    forward,
    same_bits,
)

ON_GPU = DEVICE == "cuda"
asks = pytest.mark.asks


# Probes with one right answer, and no tolerance.


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal_more_keys": {"causal": True, "seqlen_k": 190},
    "causal_more_queries": {"causal": True, "seqlen_k": 67},
    "window": {"window": (20, 10)},
    "window_left": {"window": (0, None), "seqlen_k": 190},
    "window_right": {"window": (None, 3), "seqlen_k": 67},
    "window_causal": {"window": (33, None), "causal": True, "seqlen_k": 190},
    "window_itself": {"window": (0, 0)},
    "causal_narrow_values": {"causal": True, "head_dim_v": 8},
}


def seen_pairs(problem: Problem) -> Tensor:
    """`(seqlen_q, seqlen_k)` bool; `test_reference` holds `visible` to its definition in words."""
    seen = visible(problem, problem.device)
    return (
        torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool, device=problem.device)
        if seen is None
        else seen
    )


@asks(
    {dtype: {"dtype": dtype} for dtype in ("fp16", "e4m3")},
    batch=2,
    heads=6,
    heads_kv=2,
    seqlen_q=130,
    seqlen_k=190,
    head_dim=64,
)
def test_needle(version, problem):
    """Every query has one key, its score so far above the rest that softmax is exactly one-hot, so out is that value.

    Seen in levanter #449, native-sparse #27, FA 4d9c722a: wrong key/value head of a group.
    """
    (q, k, v), *_ = draw(problem)
    k.copy_(torch.where(k.float() > 0, 1.0, -1.0))
    wanted = torch.randint(problem.seqlen_k, q.shape[:3], device=q.device)
    expected = torch.empty_like(q, dtype=TORCH_DTYPES[problem.out_dtype])
    for b in range(problem.batch):
        for h in range(problem.heads):
            q[b, :, h] = 4 * k.float()[b, wanted[b, :, h], h // 3]
            expected[b, :, h] = v[b, wanted[b, :, h], h // 3]
    assert torch.equal(forward(version, (q, k, v), replace(problem, softmax_scale=1.0)).out, expected)


COUNTED = {
    f"{name}-{of}": fields | dtype
    for name, fields in MASKS.items()
    for of, dtype in {
        "fp16": {"dtype": "fp16"},
        "e4m3": {"dtype": "e4m3"},
        "fp8": {"dtype": "bf16", "precision": "fp8"},
    }.items()
}
"""Equal scores make every P 1, and one and 0 are themselves in every dtype, quantised or not."""


@asks(COUNTED, seqlen_q=130, seqlen_k=130, heads=1, heads_kv=1)
def test_counting(version, problem):
    """Equal scores and one-hot values: out times the number of visible keys counts those of each group, as integers.

    Seen in FA 9e5e8bc9, #282, PyTorch #108108 (alignment), FlexAttention and ROCm window off-by-ones.
    """
    (q, k, v), *_ = draw(problem)
    groups = torch.nn.functional.one_hot(
        torch.arange(problem.seqlen_k, device=q.device) % problem.head_dim_v, problem.head_dim_v
    )
    v.copy_(groups[None, :, None])
    result = forward(version, (torch.zeros_like(q), k, v), problem)
    seen = seen_pairs(problem)
    visible = seen.sum(1)
    counted = (result.out[0, :, 0].double() * visible[:, None]).round()
    expected = seen.double() @ groups.double()
    for query, group in (counted != expected).nonzero()[:1].tolist():
        raise AssertionError(
            f"{problem}: query {query} sees {visible[query]} keys, and by out {counted[query, group]:.0f} of them are "
            f"{group} modulo {counted.shape[1]}, expected {expected[query, group]:.0f}"
        )
    if problem.lse:
        torch.testing.assert_close(result.lse[0, 0], visible.double().log().float(), rtol=1e-6, atol=1e-6)


TILE = 128 if ON_GPU else 64
"""No tile is larger, the interpreter's are 64; but v3's have up to 192 queries, and test_v3 goes round those."""
SHIFTS = range(-TILE - 1, TILE + 2) if ON_GPU else (-65, -64, -63, -62, -2, -1, 1, 2, 31, 32, 33, 61, 62, 63, 64, 65)


@asks(
    {"causal": {"causal": True}, "window": {"window": (TILE + 3, 1)}},
    both=True,
    seqlen_q=TILE + 6,
    seqlen_k=1,
    heads=1,
    heads_kv=1,
)
def test_every_place_of_the_diagonal_in_a_tile(version, problem):
    """Blocks that are seen whole, in part and not at all change places as seqlen_k - seqlen_q goes round a tile."""
    for shift in SHIFTS:
        shifted = replace(problem, seqlen_k=problem.seqlen_q + shift)
        tensors, dout, dlse = draw(shifted)
        accept(Judge(*tensors, shifted, dout, dlse), both(version, tensors, shifted, dout, dlse))


@asks({"plain": {}, "causal": {"causal": True}}, dtype="fp16", seqlen_q=70, seqlen_k=70)
@pytest.mark.parametrize("factor", [2.0, -1.0, 0.5])
def test_powers_of_two_pass_through(version, problem, factor):
    (q, k, v), *_ = draw(problem)
    v = v.abs() + 1  # far from the subnormals, where halving rounds
    out = forward(version, (q, k, v), problem).out
    assert torch.equal(forward(version, (q, k, factor * v), problem).out, factor * out)
    if factor > 0:
        scaled = replace(problem, softmax_scale=problem.scale / factor)
        assert torch.equal(forward(version, (factor * q, k, v), scaled).out, out)
        assert torch.equal(forward(version, (q, factor * k, v), scaled).out, out)


@asks({"plain": {}, "causal": {"causal": True}}, dtype="fp16", out_dtype="fp32", fp8=(), seqlen_q=70, seqlen_k=130)
def test_an_unrounded_out_was_not_rounded_before(version, problem):
    tensors, *_ = draw(problem)
    out = forward(version, tensors, problem).out
    assert (out != out.half()).float().mean() > 0.99
    rounded = forward(version, tensors, replace(problem, out_dtype=None)).out
    torch.testing.assert_close(out.half(), rounded, rtol=2**-10, atol=1e-6)  # a step of fp16


@asks(
    {"plain": {}, "gqa_causal": {"heads": 6, "heads_kv": 3, "causal": True}},
    batch=3,
    heads=3,
    heads_kv=3,
    seqlen_q=70,
    seqlen_k=70,
)
def test_heads_and_batches_do_not_meet(version, problem):
    """Permuted heads and batches give permuted outputs, bit for bit."""
    (q, k, v), *_ = draw(problem)
    batches, kv_heads = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    group = problem.heads // problem.heads_kv
    heads = (kv_heads[:, None] * group + torch.arange(group)).flatten()
    out = forward(version, (q, k, v), problem).out[batches][:, :, heads]
    moved = (q[batches][:, :, heads], k[batches][:, :, kv_heads], v[batches][:, :, kv_heads])
    assert same_bits(forward(version, moved, problem).out, out)


@asks(batch=2, heads=2, heads_kv=2, seqlen_q=70, seqlen_k=70)
def test_bad_numbers_stay_in_their_head(version, problem):
    tensors, *_ = draw(problem)
    sound = forward(version, tensors, problem).out
    tensors[1][1, 3, 0] = torch.nan
    tensors[2][1, 5, 0] = torch.nan if problem.dtype == "e4m3" else torch.inf  # e4m3 has no infinity
    out = forward(version, tensors, problem).out
    assert out[1, :, 0].isnan().all()
    untouched = torch.tensor([[True, True], [False, True]], device=out.device)
    assert same_bits(out.transpose(1, 2)[untouched], sound.transpose(1, 2)[untouched])


# What a row sees, and numbers at the edge.


BLIND = {
    "causal": {"causal": True, "seqlen_q": 150, "seqlen_k": 20},
    "causal_one_key": {"causal": True, "seqlen_q": 70, "seqlen_k": 1},
    "window": {"window": (4, 4), "seqlen_q": 150, "seqlen_k": 60},
    "window_causal": {"window": (4, None), "causal": True, "seqlen_q": 150, "seqlen_k": 60},
}


@asks(BLIND, both=True)
def test_rows_that_see_nothing(version, problem):
    """Output and gradients exactly 0, lse exactly -inf. Seen in PyTorch #103963, FA 26d7d92f: -inf - -inf is NaN."""
    tensors, dout, dlse = draw(problem)
    result = both(version, tensors, problem, dout, dlse)
    blind = ~seen_pairs(problem).any(1)
    assert blind.sum() == problem.blind_rows > 0
    assert not result.out[:, blind].any()
    if problem.grad:
        assert not result.dq[:, blind].any()
    if problem.lse:
        assert torch.equal(result.lse == -math.inf, blind.expand_as(result.lse))
    accept(Judge(*tensors, problem, dout, dlse), result)


MASKS_OF_GRADCHECK = {
    "plain": {"seqlen_q": 6},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "blind_rows": {"causal": True, "seqlen_q": 8, "lse": False},  # lse is -inf, which has no differences
    "narrow_values": {"head_dim_v": 2},
    "block_mask": {"block_mask": MaskForm(64, 64, bits=True), "lse": False},
}


@asks(MASKS_OF_GRADCHECK, dtype="fp64", grad=True, seqlen_q=4, seqlen_k=6, heads=2, heads_kv=1, head_dim=3)
def test_gradients_are_those_of_finite_differences(version, problem):
    """By torch's own check, which also lets outputs have no gradient at all; below float64 it is of no use."""

    def attention(*tensors):
        return tuple(forward(version, tensors, problem).items().values())

    tensors, _, _ = draw(problem)
    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in tensors])


SCALED = {
    "plain": {},
    "causal": {"causal": True, "seqlen_q": 70, "seqlen_k": 70},
    "blind_rows": {"causal": True, "seqlen_k": 50},
}


@pytest.mark.covering(1)
@asks(SCALED, both=True, seqlen_q=190, seqlen_k=190, head_dim=64)
def test_any_finite_scale(version, problem):
    """One shape, several scales, one process: none is baked into a cached kernel. Seen in FA #1461: -inf * scale <= 0.

    The smallest is 0 in float32.
    """
    tensors, dout, dlse = draw(problem)
    for scale in (0.25, -0.3, 0.0, -1e-46, 3.0, 1):
        scaled = replace(problem, softmax_scale=scale)
        accept(Judge(*tensors, scaled, dout, dlse), both(version, tensors, scaled, dout, dlse))


PADDED = {
    "plain": {},
    "causal": {"causal": True},
    "narrow_values": {"head_dim_v": 12},
    # all that some versions take; their rows start at multiples of 16 bytes, so TMA reads them in place
    "eights": {"head_dim": 24},
    "eights_narrow_values": {"head_dim": 40, "head_dim_v": 24, "causal": True},
    "sixteens": {"head_dim": 48, "causal": True},  # the same for e4m3
}


@asks(PADDED, both=True, seqlen_q=50, seqlen_k=90, head_dim=20)
def test_nothing_past_the_end_is_read(version, problem):
    """q, k, v and dout are cut from longer tensors that go on with NaN.
    Seen in FA #1745, #1974, #2374, FlashInfer #942."""
    tensors, dout, dlse = draw(problem)
    cut_tensors = tuple(cut_from_longer(x) for x in tensors)
    accept(Judge(*tensors, problem, dout, dlse), both(version, cut_tensors, problem, cut_from_longer(dout), dlse))


def cut_from_longer(x: Tensor) -> Tensor:
    """The same numbers, in a tensor that is NaN before, after, beside and below them."""
    batch, seqlen, heads, head_dim = x.shape
    longer = x.new_full((batch + 2, seqlen + 200, heads + 2, head_dim + 16), torch.nan)
    view = longer[1:-1, 100:-100, 1:-1, 8:-8]
    return view.copy_(x)


GUARD = 1 << 16
"""Bytes on either side of an allocation."""
ALLOCATE = {
    getattr(torch.ops.aten, f"{new}{what}") for new in ("", "new_") for what in ("empty", "empty_strided", "zeros")
}
ALLOCATE |= {torch.ops.aten.empty_like, torch.ops.aten.zeros_like}


class Guarded(TorchDispatchMode):
    """What is allocated meanwhile lies between bytes of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.around: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        x = func(*args, **(kwargs or {}))
        if func.overloadpacket not in ALLOCATE or not x.numel():
            return x
        bytes_of_x = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        longer = bytes_of_x.new_full((bytes_of_x.numel() + 2 * GUARD,), 0xA5)
        longer[GUARD:-GUARD] = bytes_of_x
        self.around += longer[:GUARD], longer[-GUARD:]
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(
            longer.untyped_storage(), GUARD // x.itemsize, x.shape, x.stride()
        )

    def intact(self) -> bool:
        """Whether these bytes are what they were."""
        return all(bool((x == 0xA5).all()) for x in self.around)


@asks({"plain": {}, "causal": {"causal": True}}, both=True, seqlen_q=70, seqlen_k=90, head_dim=24)
def test_nothing_past_the_end_is_written(version, problem):
    """Rows and columns that fill up a tile are in no tensor; beside what a version allocates for itself lies
    what is another's."""
    tensors, dout, dlse = draw(problem)
    with Guarded() as guarded:
        result = both(version, tensors, problem, dout, dlse)
    assert guarded.intact()
    accept(Judge(*tensors, problem, dout, dlse), result)
