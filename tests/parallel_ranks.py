"""What each rank of tests/test_parallel.py does: cases against the call of the whole, in one process group of four by
gloo, or by NCCL of as many GPUs as there are, two or four.

A group of two is half of four, and each half runs half of its cases. A case is a function of a group that raises where
it fails; what it raised is written to a file, which the tests read. All that a case communicates comes before what may
fail on one rank alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

import flashzoo
from flashzoo import BlockMask, UnsupportedError, parallel
from flashzoo.accuracy import Judge
from flashzoo.lengths import Ranges
from flashzoo.parallel import groups, ulysses
from flashzoo.reference import Result
from flashzoo_suite.support import accept, same_bits

ROOT = Path(__file__).resolve().parent.parent
CLOSE = 1e-10
DEVICES = ("cpu", "cuda")
BACKENDS = dict(zip(DEVICES, ("gloo", "nccl"), strict=True))
WITHIN = {"cpu": 300.0, "cuda": 280.0}
"""Seconds for all processes of one spawn; on GPUs they compile."""
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """What is run, in a group of so many ranks, on these devices."""

    ranks: int
    run: Callable[[Any], None]
    devices: tuple[str, ...] = DEVICES


def world(device: str) -> int:
    """How many ranks there are: four processes, or on GPUs as many of two and four as these allow."""
    return 4 if device == "cpu" or torch.cuda.device_count() >= 4 else 2


def cases_on(device: str) -> dict[str, Case]:
    """Those that a device can have, whether or not there are GPUs enough."""
    return {name: case for name, case in CASES.items() if device in case.devices}


def here() -> str:
    """The device of this rank."""
    return "cuda" if dist.get_backend() == BACKENDS["cuda"] else "cpu"


@dataclass(frozen=True)
class Shape:
    """A call of the whole; in float64 it goes through `standard`. `across` is what ranks are told beside the options:
    rows of the longest sequence in more than one chunk."""

    options: dict[str, Any] = field(default_factory=dict)
    seqlen: int = 48
    seqlen_k: int | None = None
    heads: int = 4
    heads_kv: int = 4
    width: int = 8
    batch: int = 2
    layout: str = "zigzag"
    methods: tuple[str, ...] = ("gather", "ulysses", "ring")
    lengths: tuple[int, ...] | None = None
    head_dim: int = 8
    dtype: torch.dtype = torch.float64
    across: int | None = None

    @property
    def dim(self) -> int:
        """The one of the sequence."""
        return 1 if self.lengths is None else 0


LENGTHS = (5, 17, 0, 1, 20)
"""Of packed sequences: they cross every border of shards, and the last 5 of 48 rows are of none."""
CAUSAL, BY_PARTS, ALL_HEADS = {"causal": True}, ("gather", "ring"), ("ulysses",)
PACKED = ("gather", "ulysses", "ring", "halo")
LONGEST = {"max_seqlen_q": 20}
SHORT_ACROSS = (11, 2, 10, 2, 11, 1, 10)
"""Of these sequences no contiguous shard, of two or four, shares one of more than 2 rows."""
SHAPES = {
    "full": Shape(),
    "causal": Shape(CAUSAL),
    "contiguous": Shape(CAUSAL, layout="contiguous"),
    "gqa": Shape(CAUSAL | {"softmax_scale": -0.3}, heads_kv=2, width=12),
    "mqa": Shape(CAUSAL, heads_kv=1, batch=1),
    "six_heads": Shape(CAUSAL, heads=12, heads_kv=6),
    "odd_heads": Shape(CAUSAL, heads=3, heads_kv=3, methods=BY_PARTS),
    "short_window": Shape({"window_size": (3, 0)}),
    "long_window": Shape(CAUSAL | {"window_size": (17, None)}, heads_kv=2),
    "window": Shape({"window_size": (9, 4)}),
    "right_window": Shape({"window_size": (None, 5)}, layout="contiguous"),
    "cross": Shape(seqlen_k=32, heads_kv=2),
    "cross_causal": Shape(CAUSAL, seqlen_k=64, methods=ALL_HEADS),
    "sinks": Shape(CAUSAL | {"sinks": True, "deterministic": True}),
    "packed": Shape(CAUSAL | LONGEST, lengths=LENGTHS, heads_kv=2, methods=PACKED),
    "packed_contiguous": Shape(CAUSAL | LONGEST, lengths=LENGTHS, layout="contiguous", methods=PACKED),
    "packed_full": Shape(LONGEST, lengths=LENGTHS, methods=PACKED),
    "packed_full_contiguous": Shape(LONGEST, lengths=LENGTHS, heads_kv=1, layout="contiguous", methods=("halo",)),
    "packed_unsaid": Shape(CAUSAL, lengths=(0, 47, 0)),
    "packed_whole": Shape(CAUSAL | {"max_seqlen_q": 10**9}, lengths=(0, 47, 0), methods=("halo",)),
    "packed_long": Shape(CAUSAL | {"max_seqlen_k": 31}, lengths=(3, 31, 9), layout="contiguous", methods=("halo",)),
    "packed_short": Shape(CAUSAL | {"max_seqlen_q": 2}, lengths=(1, 2) * 15, methods=("halo",)),
    "packed_single": Shape({"max_seqlen_q": 1}, lengths=(1,) * 40, methods=("halo",)),
    "packed_few": Shape(CAUSAL | LONGEST, lengths=(5,), methods=("halo",)),
    "packed_across": Shape(
        CAUSAL | {"max_seqlen_q": 11}, lengths=SHORT_ACROSS, layout="contiguous", methods=PACKED, across=2
    ),
    "packed_across_full": Shape(lengths=SHORT_ACROSS, layout="contiguous", methods=("halo",), across=2),
    "packed_across_none": Shape(CAUSAL, lengths=(12,) * 4, layout="contiguous", methods=("halo",), across=0),
    "packed_window": Shape(
        CAUSAL | {"window_size": (6, 0)} | LONGEST, lengths=LENGTHS, methods=("gather", "ulysses", "halo")
    ),
    "packed_two_sided": Shape({"window_size": (6, 2)}, lengths=LENGTHS, methods=ALL_HEADS),
    "packed_sinks": Shape(
        CAUSAL | {"sinks": True, "window_size": (6, 0)} | LONGEST, lengths=LENGTHS, methods=("gather", "halo")
    ),
    "packed_deterministic": Shape(
        CAUSAL | {"sinks": True, "deterministic": True, "softmax_scale": 0.3} | LONGEST,
        lengths=LENGTHS,
        heads_kv=2,
        width=12,
        layout="contiguous",
        methods=("halo",),
    ),
    # of these lengths no number of ranks is a divisor: shards are padded
    "odd": Shape(seqlen=43, heads_kv=2),
    "odd_causal": Shape(CAUSAL, seqlen=43, heads_kv=2, width=12),
    "odd_contiguous": Shape(CAUSAL, seqlen=43, layout="contiguous"),
    "odd_window": Shape({"window_size": (9, 4)}, seqlen=45),
    "odd_left": Shape({"window_size": (17, None)}, seqlen=41, layout="contiguous"),
    "odd_cross": Shape(seqlen=43, seqlen_k=21, heads_kv=2),
    "odd_cross_sinks": Shape({"sinks": True}, seqlen=43, seqlen_k=3, methods=BY_PARTS),
    "odd_cross_causal": Shape(CAUSAL, seqlen=13, seqlen_k=43, methods=ALL_HEADS),
    "odd_sinks": Shape(CAUSAL | {"sinks": True, "deterministic": True}, seqlen=9),
    "odd_few": Shape(CAUSAL, seqlen=3, layout="contiguous"),
    "odd_one": Shape(seqlen=1),
    "odd_packed": Shape(CAUSAL | LONGEST, seqlen=45, lengths=LENGTHS, heads_kv=2, methods=PACKED),
    "odd_packed_full": Shape(LONGEST, seqlen=43, lengths=LENGTHS, layout="contiguous", methods=PACKED),
    "odd_packed_window": Shape(
        CAUSAL | {"window_size": (6, 0)} | LONGEST, seqlen=43, lengths=LENGTHS, methods=("gather", "halo")
    ),
    "odd_packed_few": Shape(CAUSAL | LONGEST, seqlen=3, lengths=(1, 2), layout="contiguous", methods=PACKED),
    "odd_packed_sinks": Shape(CAUSAL | {"sinks": True} | LONGEST, seqlen=9, lengths=(3, 0, 4), methods=PACKED),
    "caches": Shape(CAUSAL | {"seqused_k": torch.tensor([30, 48], dtype=torch.int32)}, methods=ALL_HEADS),
    "mask": Shape({"block_mask": True}, methods=ALL_HEADS),
}


def whole(shape: Shape) -> tuple[list[Tensor], dict[str, Any], Tensor, Tensor]:
    """q, k and v, the options, and the gradients of out and lse; the same on every rank, on its device."""
    torch.manual_seed(0)
    wide = torch.promote_types(shape.dtype, torch.float32)

    def drawn(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64).to(here(), dtype)

    rows, of_k = (shape.batch, shape.seqlen), (shape.batch, shape.seqlen_k or shape.seqlen)
    options = {name: x.to(here()) if isinstance(x, Tensor) else x for name, x in shape.options.items()}
    if shape.lengths is not None:
        rows, of_k = rows[1:], of_k[1:]
        options["cu_seqlens_q"] = torch.tensor((0, *shape.lengths)).cumsum(0).int().to(here())
    q = drawn(*rows, shape.heads, shape.head_dim)
    k, v = (drawn(*of_k, shape.heads_kv, width) for width in (shape.head_dim, shape.width))
    if options.get("sinks"):
        options["sinks"] = drawn(shape.heads, dtype=wide)
    if options.get("block_mask"):
        options["block_mask"] = BlockMask.from_dense((torch.rand(shape.seqlen, shape.seqlen) < 0.5).to(here()))
    dout = drawn(*rows, shape.heads, shape.width)
    return [q, k, v], options, dout, drawn(*dout[..., 0].transpose(-1, -2).shape, dtype=wide)


def results(
    call: Callable,
    tensors: list[Tensor],
    options: dict[str, Any],
    dout: Tensor,
    dlse: Tensor,
    version: str = "standard",
) -> list[Tensor]:
    """out, lse, and the gradients of q, k, v and sinks."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].detach().requires_grad_()}
        leaves.append(options["sinks"])
    out, lse = call(*leaves[:3], return_lse=True, version=version, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))]


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE, msg=lambda text: f"{what}: {text}")


def on_ranks(
    shape: Shape, method: str, group: Any, given: tuple[list[Tensor], dict[str, Any], Tensor, Tensor], version: str
) -> list[Tensor]:
    """`results` of this rank's shards of what the whole was given, those of sinks summed over the ranks."""
    tensors, options, dout, dlse = given
    rows, whole = shape.dim, (shape.seqlen, shape.seqlen_k or shape.seqlen)
    parts = dist.get_world_size(group) * (2 if shape.layout == "zigzag" else 1)
    padded = any(seqlen % parts for seqlen in whole)

    def sharded(x: Tensor, dim: int) -> Tensor:
        return parallel.shard(x, group, dim, shape.layout, pad=torch.nan)

    def call(*args, **how):
        how |= {"seqlen": whole if whole[0] != whole[1] else whole[0]} if padded else {}
        how |= {} if shape.across is None else {"max_across": shape.across}
        return parallel.attention(*args, group=group, layout=shape.layout, method=method, **how)

    mine = [sharded(x, rows) for x in tensors], options, sharded(dout, rows), sharded(dlse, rows + 1)
    found = results(call, *mine, version=version)
    for dsinks in found[5:]:
        dist.all_reduce(dsinks, group=group)
    return found


def of_shape(shape: Shape, method: str) -> Callable[[Any], None]:
    """out, lse and every gradient are the shards of those of the whole, and of rows of padding 0, and -inf in lse."""

    def run(group: Any) -> None:
        given = whole(shape)
        expected = results(flashzoo.attention, *given)
        found = on_ranks(shape, method, group, given, "standard")
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
            if name != "dsinks":
                of_lse = name == "lse"
                y = parallel.shard(y, group, shape.dim + of_lse, shape.layout, pad=-torch.inf if of_lse else 0)
            close(x, y, name)

    return run


for _name, _shape in SHAPES.items():
    for _method in _shape.methods:
        for _ranks in (2, 4):
            CASES[f"{_name}-{_method}-{_ranks}"] = Case(_ranks, of_shape(_shape, _method))


def in_lots(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """A case in which a rank's heads go in as many lots as there may be, however small."""

    def run_in_lots(group: Any) -> None:
        least, ulysses.LEAST_LOT = ulysses.LEAST_LOT, 1.0
        try:
            run(group)
        finally:
            ulysses.LEAST_LOT = least

    return run_in_lots


IN_LOTS = ("packed", "packed_contiguous", "packed_full", "packed_two_sided", "packed_sinks", "odd_packed")
for _name in IN_LOTS:
    _more = replace(SHAPES[_name], heads=16, heads_kv=8)
    for _ranks in (2, 4):
        CASES[f"{_name}-ulysses_in_lots-{_ranks}"] = Case(_ranks, in_lots(of_shape(_more, "ulysses")))


_BF16 = Shape(CAUSAL, 1024, heads_kv=2, width=128, batch=1, head_dim=128, dtype=torch.bfloat16)
JUDGED = {
    "causal": _BF16,
    "full_fp16": replace(_BF16, options={}, dtype=torch.float16),
    "window": replace(_BF16, options={"window_size": (300, 100)}, batch=2),
    "packed": replace(_BF16, options=CAUSAL | {"max_seqlen_q": 452}, lengths=(100, 380, 0, 10, 450), methods=PACKED),
    "odd": replace(_BF16, seqlen=1002),
    "sinks": replace(_BF16, options=CAUSAL | {"sinks": True, "deterministic": True}),
    "contiguous": replace(_BF16, layout="contiguous", methods=BY_PARTS),
    "fp32": replace(_BF16, dtype=torch.float32),
    "fp8": replace(_BF16, options=CAUSAL | {"precision": "fp8"}, methods=ALL_HEADS),
}
SMALLER = 4
"""By how much on a CPU a sequence is shorter, and a head narrower."""


def as_here(shape: Shape) -> Shape:
    """A shape in the size for this rank's device."""
    if here() == "cuda":
        return shape
    lengths = None if shape.lengths is None else tuple(n // SMALLER for n in shape.lengths)
    width = shape.head_dim // SMALLER
    options = {name: x // SMALLER if name == "max_seqlen_q" else x for name, x in shape.options.items()}
    return replace(shape, options=options, seqlen=shape.seqlen // SMALLER, lengths=lengths, head_dim=width, width=width)


def judged(shape: Shape, method: str) -> Callable[[Any], None]:
    """What all ranks have together is held to the rule of `flashzoo.accuracy`, as is the call of the whole: on GPUs the
    version that `auto` takes."""

    def run(group: Any) -> None:
        mine, version = as_here(shape), "auto" if here() == "cuda" else "standard"
        given = tensors, options, dout, dlse = whole(mine)
        leaves = [x.detach().requires_grad_() for x in tensors]
        problem = flashzoo.explain(*leaves, return_lse=True, version=version, **options).problem
        found = on_ranks(mine, method, group, given, version)
        for at, x in enumerate(found[:5]):
            found[at] = parallel.unshard(x.contiguous(), group, mine.dim + (at == 1), mine.layout, mine.seqlen)
        expected, mask = results(flashzoo.attention, *given, version=version), None
        if mine.lengths is not None:
            tensors, dout, dlse = [x[None] for x in tensors], dout[None], dlse[None]
            found, expected = ([x[None] for x in of] for of in (found, expected))
            cu_seqlens = options["cu_seqlens_q"]
            visible = Ranges(cu_seqlens, cu_seqlens).visible(problem.span, mine.seqlen, mine.seqlen)
            mask = visible[None, None]
        judge = Judge(*tensors, problem, dout, dlse, mask=mask, sinks=options.get("sinks"))
        accept(judge, Result(*expected))
        accept(judge, Result(*found))

    return run


for _name, _shape in JUDGED.items():
    for _method in _shape.methods:
        for _ranks in (2, 4):
            CASES[f"judged_{_name}-{_method}-{_ranks}"] = Case(_ranks, judged(_shape, _method))


def case(*sizes: int, devices: tuple[str, ...] = DEVICES) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Have a function run in a group of so many ranks, or in one of each of these sizes."""

    def add(run: Callable[[Any], None]) -> Callable[[Any], None]:
        for ranks in sizes:
            CASES[f"{run.__name__}-{ranks}" if len(sizes) > 1 else run.__name__] = Case(ranks, run, devices)
        return run

    return add


def shards(seqlen: int = 16, dtype: torch.dtype = torch.float64, heads: int = 4, heads_kv: int = 4) -> list[Tensor]:
    """q, k and v of a rank, the same on every rank."""
    torch.manual_seed(1)
    return [torch.randn(2, seqlen, h, 16, dtype=torch.float64).to(here(), dtype) for h in (heads, heads_kv, heads_kv)]


def raises(error: type[Exception], text: str, call: Callable[[], Any]) -> str:
    """Its message, in which the text is."""
    try:
        call()
    except error as found:
        assert text in str(found), f"expected {text!r} in {found}"
        return str(found)
    raise AssertionError(f"expected {error.__name__} with {text!r}, got none")


def heard_by_all(told: str, group: Any) -> None:
    """Every rank has the same text."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, told, group=group)
    assert len(set(every)) == 1, every


@case(1)
def one_rank_is_the_plain_call(group: Any) -> None:
    for shape in (SHAPES["gqa"], SHAPES["packed"], SHAPES["sinks"], Shape({"window_size": [3, 0]}, seqlen=47)):
        tensors, options, dout, dlse = whole(shape)
        expected = results(flashzoo.attention, tensors, options, dout, dlse)
        for method in ("auto", *shape.methods):
            found = results(
                lambda *args, m=method, **how: parallel.attention(*args, group=group, method=m, **how),
                tensors,
                options,
                dout,
                dlse,
            )
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@case(2, devices=("cpu",))  # a GPU's matrix products have other bits for other numbers of heads
def sixteen_bits_are_merged_wide(group: Any) -> None:
    """By parts: no farther from float64 than the plain call by more than a rounding; by heads: the same bits."""
    exact = [x.half().double() for x in shards(64, heads_kv=2)]
    q, k, v = (x.half() for x in exact)
    expected = flashzoo.attention(*exact, causal=True, version="standard")
    plain = flashzoo.attention(q, k, v, causal=True, version="standard")
    for method in ("gather", "ring", "ulysses"):
        mine = [parallel.shard(x, group).requires_grad_() for x in (q, k, v)]
        out = parallel.attention(*mine, group=group, causal=True, method=method, version="standard")
        assert out.dtype == torch.float16
        out.sum().backward()
        assert all(x.grad.dtype == torch.float16 for x in mine)
        found = parallel.unshard(out.detach(), group)
        if method == "ulysses":
            assert torch.equal(found, plain)
        error, of_plain = ((x.double() - expected).norm() for x in (found, plain))
        assert error <= 1.2 * of_plain, (method, error, of_plain)


@case(2, devices=("cpu",))
def fp8_within_ulysses(group: Any) -> None:
    q, k, v = (x.bfloat16() for x in shards(64))
    expected = flashzoo.attention(q, k, v, causal=True, precision="fp8", version="standard")
    mine = [parallel.shard(x, group).requires_grad_() for x in (q, k, v)]
    out = parallel.attention(*mine, group=group, causal=True, precision="fp8", version="standard")
    out.float().sum().backward()
    assert torch.equal(parallel.unshard(out.detach(), group), expected)
    told = raises(
        NotImplementedError,
        "ring: takes no precision",
        lambda: parallel.attention(*mine, group=group, precision="fp8", method="ring"),
    )
    assert "methods that would: ulysses" in told


@case(4)
def shards_are_put_together_again(group: Any) -> None:
    x = torch.arange(2 * 24 * 3, device=here()).view(2, 24, 3)
    for layout in ("zigzag", "contiguous"):
        mine = parallel.shard(x, group, layout=layout)
        assert torch.equal(parallel.unshard(mine, group, layout=layout), x)
        at = parallel.positions(24, group, layout, here())
        assert torch.equal(x[:, at], mine)
        assert torch.equal(parallel.shard(x.transpose(0, 1), group, 0, layout), mine.transpose(0, 1))
    rank = dist.get_rank(group)
    assert parallel.positions(24, group).tolist() == [
        *range(3 * rank, 3 * rank + 3),
        *range(21 - 3 * rank, 24 - 3 * rank),
    ]
    raises(ValueError, "must be a multiple of 8 for 4 ranks", lambda: parallel.shard(x[:, :20], group))
    for layout, seqlen, rows in (("zigzag", 21, 24), ("contiguous", 21, 24), ("zigzag", 3, 8), ("contiguous", 0, 0)):
        odd, filled = x[:, :seqlen], torch.full((2, rows - seqlen, 3), -100, device=here())
        mine, at = (
            parallel.shard(odd, group, layout=layout, pad=-100),
            parallel.positions(seqlen, group, layout, here()),
        )
        assert torch.equal(torch.cat((odd, filled), 1)[:, at], mine)
        assert torch.equal(parallel.unshard(mine, group, layout=layout, seqlen=seqlen), odd)
    raises(ValueError, "seqlen must be from 0 to the 8 rows", lambda: parallel.unshard(x[:, :2], group, seqlen=9))
    raises(
        ValueError,
        "must not require grad",
        lambda: parallel.unshard(x.double().requires_grad_(), group, layout="contiguous"),
    )
    for function in (parallel.shard, parallel.unshard):
        raises(ValueError, "dim must be one of the 3 of x, of shape (2, 24, 3), got 3", partial(function, x, group, 3))
        raises(TypeError, "dim must be an int, got 'rows'", partial(function, x, group, "rows"))
        raises(TypeError, "x must be a torch.Tensor, got list", partial(function, [1], group))
    whole = parallel.shard(x, group, -2)
    assert torch.equal(whole, parallel.shard(x, group)) and torch.equal(parallel.unshard(whole, group, -2), x)
    raises(ValueError, "seqlen must be 0 or more, got -1", lambda: parallel.positions(-1, group))
    raises(TypeError, "seqlen must be an int, got 3.5", lambda: parallel.positions(3.5, group))


@case(2, 4)
def only_some_gradients(group: Any) -> None:
    """Those that are asked for, and through LSE alone."""
    for method in ("gather", "ulysses", "ring"):
        q, k, v = shards()
        k.requires_grad_()
        _, lse = parallel.attention(q, k, v, group=group, causal=True, method=method, return_lse=True)
        lse.sum().backward()
        assert k.grad is not None and k.grad.abs().sum() > 0
        with torch.no_grad():
            assert not parallel.attention(q, k, v, group=group, causal=True, method=method).requires_grad


@case(2)
def no_double_backward(group: Any) -> None:
    for method in ("gather", "ulysses", "ring"):
        q, k, v = (x.requires_grad_() for x in shards())
        out = parallel.attention(q, k, v, group=group, method=method)
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        raises(RuntimeError, "", lambda dq=dq, q=q: torch.autograd.grad(dq.sum(), q))


@case(4)
def ranks_that_differ_all_hear_of_it(group: Any) -> None:
    rank = dist.get_rank(group)
    q, k, v = shards(12 if rank == 2 else 16)
    told = raises(ValueError, "every rank must make the same call", lambda: parallel.attention(q, k, v, group=group))
    assert "rank 0, 1, 3: " in told and "q=(2, 12, 4, 16) torch.float64" in told
    heard_by_all(told, group)
    q, k, v = shards(dtype=torch.float32 if rank == 1 else torch.float64)
    heard_by_all(raises(ValueError, "rank 1: ", lambda: parallel.attention(q, k, v, group=group)), group)
    q, k, v = shards()
    heard_by_all(
        raises(ValueError, "causal=True", lambda: parallel.attention(q, k, v, group=group, causal=rank == 3)), group
    )
    heard_by_all(raises(ValueError, "unshard=", lambda: parallel.unshard(q if rank else q[:1], group)), group)


@case(2, 4)
def how_rows_lie_is_a_ranks_own(group: Any) -> None:
    """A rank whose tensors have gaps computes as the others, whether or not they have made such a call before."""
    q, k, v = shards()
    for method in ("gather", "ulysses", "ring"):
        expected = parallel.attention(q, k, v, group=group, method=method)
        for x in range(3):
            given = [q, k, v]
            if dist.get_rank(group) == x % 2:
                given[x] = given[x].mT.contiguous().mT
            close(parallel.attention(*given, group=group, method=method), expected, f"out of {method}")


@case(4)
def one_rank_in_error_all_hear_of_it(group: Any) -> None:
    rank = dist.get_rank(group)
    q, k, v = shards()
    odd = {"causal": 1 if rank == 3 else True, "softmax_scale": 0.125}
    told = raises(
        ValueError, "rank 3: TypeError: causal must be a bool", lambda: parallel.attention(q, k, v, group=group, **odd)
    )
    heard_by_all(told, group)
    # and so it is where the ranks have made the call with True before, which is equal
    parallel.attention(q, k, v, group=group, causal=True)
    told = "causal must be a bool, got 1"
    raises(TypeError, told, lambda: parallel.attention(q, k, v, group=group, causal=1))
    # an error that all make alike is that error
    raises(
        TypeError, "softmax_scale must be a float", lambda: parallel.attention(q, k, v, group=group, softmax_scale="1")
    )
    raises(ValueError, "q's rows on a rank must be even", lambda: parallel.attention(*shards(15), group=group))
    raises(ValueError, "method must be 'auto' or one of", lambda: parallel.attention(q, k, v, group=group, method="x"))
    raises(ValueError, "layout must be", lambda: parallel.attention(q, k, v, group=group, layout="striped"))
    raises(
        TypeError,
        "takes no q_descale",
        lambda: parallel.attention(
            *(x.to(torch.float8_e4m3fn) for x in shards()), group=group, q_descale=torch.ones(2, 4, device=here())
        ),
    )
    raises(
        TypeError,
        "k and v must be packed rows, as q is, got caches",
        lambda: parallel.attention(
            q[0], k[:1], v[:1], group=group, cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32, device=here())
        ),
    )
    raises(
        NotImplementedError,
        "heads must be a multiple of the 4 ranks, got 3",
        lambda: parallel.attention(*shards(heads=3, heads_kv=3), group=group, method="ulysses"),
    )
    raises(
        NotImplementedError,
        "takes packed sequences alone, with cu_seqlens_q\nmethods that would: gather, ring, ulysses",
        lambda: parallel.attention(q, k, v, group=group, method="halo"),
    )
    raises(
        NotImplementedError,
        "as many keys as queries",
        lambda: parallel.attention(q, *(x[:, :8] for x in (k, v)), group=group, method="gather", causal=True),
    )


@case(2, 4)
def lengths_that_cannot_be(group: Any) -> None:
    """What seqlen says is looked at, and shards of rows that differ are no uneven length."""
    size = dist.get_world_size(group)
    q, k, v = shards()

    def call(seqlen: Any, keys: int = 16, **how: Any) -> Callable[[], Any]:
        return lambda: parallel.attention(q, k[:, :keys], v[:, :keys], group=group, seqlen=seqlen, **how)

    raises(ValueError, f"seqlen must be from 0 to the {16 * size} rows", call(16 * size + 1))
    raises(TypeError, "seqlen must be an int, got 2.0", call(2.0))
    raises(ValueError, "seqlen must be an int, or two of queries and keys", call((1, 2, 3)))
    raises(ValueError, "seqlen of keys must be from 0", call((16, -1)))
    told = raises(NotImplementedError, "as many keys as queries", call(16, 8, causal=True, method="gather"))
    assert "methods that would: ulysses" in told
    q, k, v = shards(16 if dist.get_rank(group) else 14)
    heard_by_all(
        raises(ValueError, "every rank must make the same call", lambda: parallel.attention(q, k, v, group=group)),
        group,
    )


@case(1)
def one_rank_with_padding(group: Any) -> None:
    q, k, v = (x.requires_grad_() for x in shards(24))
    out, lse = parallel.attention(q, k, v, group=group, seqlen=(21, 13), return_lse=True)
    expected, of_lse = flashzoo.attention(q[:, :21], k[:, :13], v[:, :13], return_lse=True)
    assert torch.equal(out[:, :21], expected) and torch.equal(lse[..., :21], of_lse)
    assert not out[:, 21:].any() and (lse[..., 21:] == -torch.inf).all()
    (out.sum() + lse[..., :21].sum()).backward()
    assert not any(x.grad[:, rows:].any() for x, rows in ((q, 21), (k, 13), (v, 13)))
    raises(
        ValueError, "seqlen must be from 0 to the 24 rows", lambda: parallel.attention(q, k, v, group=group, seqlen=25)
    )
    cu_seqlens = torch.tensor([0, 24], dtype=torch.int32, device=here())
    raises(
        TypeError,
        "k and v must be packed rows where seqlen is given and q is, got shape (1, 24, 4, 16)",
        lambda: parallel.attention(q[0], k[:1], v[:1], group=group, seqlen=(24, 1), cu_seqlens_q=cu_seqlens),
    )


@case(2)
def lengths_that_are_written_anew_before_the_backward_pass(group: Any) -> None:
    for method in PACKED:
        found = []
        for then in (None, [0, 3, 17]):
            q, k, v = (x[0].requires_grad_() for x in shards(12))
            cu_seqlens = torch.tensor([0, 10, 24], dtype=torch.int32, device=here())
            out = parallel.attention(
                q, k, v, group=group, method=method, causal=True, cu_seqlens_q=cu_seqlens, max_seqlen_q=14
            )
            if then is not None:
                cu_seqlens.copy_(torch.tensor(then))
            found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
        for x, y in zip(*found, strict=True):
            assert torch.equal(x, y), method


@case(2)
def a_loss_of_lse_on_one_rank_alone(group: Any) -> None:
    found = []
    for method in ("gather", "ring", "ulysses"):
        q, k, v = (x.requires_grad_() for x in shards())
        out, lse = parallel.attention(q, k, v, group=group, method=method, causal=True, return_lse=True)
        loss = out.square().sum() + (lse.square().sum() if dist.get_rank(group) == 0 else 0)
        found.append(torch.autograd.grad(loss, (q, k, v)))
    for gradients in found[1:]:
        for x, y in zip(gradients, found[0], strict=True):
            close(x, y, "gradients")


@case(2, 4)
def checkpoints(group: Any) -> None:
    """Which stop what they compute again behind the last tensor that is saved: nothing may be on its way then."""
    cu_seqlens = torch.tensor([0, 10, 31], dtype=torch.int32, device=here())

    def attend(*inputs: Tensor, method: str = "ulysses") -> Tensor:
        return parallel.attention(*inputs, group=group, method=method, causal=True, cu_seqlens_q=cu_seqlens)  # pyright: ignore[reportArgumentType]

    def held(_: Any) -> None:
        for method, reentrant in product(("gather", "ring", "ulysses"), (False, True)):
            found = []
            for around in (
                lambda *x, call: call(*x),
                lambda *x, call, r=reentrant: checkpoint(call, *x, use_reentrant=r),
            ):
                leaves = [x[0].requires_grad_() for x in shards(heads=16, heads_kv=8)]
                around(*leaves, call=partial(attend, method=method)).square().sum().backward()
                found.append([x.grad for x in leaves])
            for x, y in zip(*found, strict=True):
                assert torch.equal(x, y), method

    in_lots(held)(group)


@case(2)
def what_is_refused_before_anything_travels(group: Any) -> None:
    q, k, v = shards()
    for method in ("gather", "ring", "ulysses"):

        def call(q: Tensor, k: Tensor, v: Tensor, method: Any = method) -> Tensor:
            return parallel.attention(q, k, v, group=group, method=method)

        raises(
            NotImplementedError,
            "flashzoo.parallel.attention does not support q under forward-mode AD",
            lambda call=call: torch.func.jvp(call, (q, k, v), (q, k, v)),
        )
        assert call(q, k, v).isfinite().all()


@case(2)
def autocast_casts_nothing(group: Any) -> None:
    q, k, v = shards(dtype=torch.float16)
    for method in ("gather", "ring", "ulysses"):
        expected = parallel.attention(q, k, v, group=group, method=method, version="standard")
        with torch.autocast(here(), torch.bfloat16):
            found = parallel.attention(q, k, v, group=group, method=method, version="standard", dropout_p=0.0)
        assert torch.equal(found, expected) and found.dtype == torch.float16


@case(2, 4)
def a_sequence_longer_than_was_said_is_nan(group: Any) -> None:
    """In its rows of a chunk that are across a border that others see over, the first with a causal mask and any
    without; and right in all others."""
    for longest, across, (causal, layout) in product(
        (6, 1, 0), (False, True), ((True, "contiguous"), (True, "zigzag"), (False, "contiguous"))
    ):
        shape = Shape({"causal": causal, "max_seqlen_q": 40 if across else longest}, lengths=(4, 40, 3), layout=layout)
        shape = replace(shape, across=longest if across else None)
        given = tensors, options, *_ = whole(shape)
        out, lse, *_ = on_ranks(shape, "halo", group, given, "standard")
        expected = parallel.shard(flashzoo.attention(*tensors, version="standard", **options), group, 0, layout)
        at = parallel.positions(48, group, layout, here())
        step = 48 // dist.get_world_size(group) // (2 if layout == "zigzag" else 1)
        lacking = (at >= 4) & (at < 44) & ((at // step * step > 4) | (not causal))
        assert torch.equal(out.isnan().any(2), lacking[:, None].expand(48 // dist.get_world_size(group), 4))
        assert torch.equal(lse.isnan().any(0), lacking)
        close(out[~lacking], expected[~lacking], "the rest")


DEALT = ((30, 3, 5, 0, 2, 9, 1), (7, 7, 7), (40,), (), (0, 0), (1,) * 5, (5, 4, 3, 2, 1, 60, 50))
"""Lengths of documents, of which ranks share some, one or none; some ranks have none of their own, or only padding."""
DEALT_BY = ({"causal": True}, {}, {"causal": True, "window_size": (6, 0)}, {"causal": True, "sinks": True})


@case(2, 4)
def documents_are_dealt_out(group: Any) -> None:
    """out, lse and every gradient are rows of those of the packed whole; padding has 0, and -inf in lse."""
    for lengths, options in product(DEALT, DEALT_BY):
        tensors, options, dout, dlse = whole(Shape(options, seqlen=sum(lengths), heads_kv=2, width=12, lengths=lengths))
        expected = results(flashzoo.attention, tensors, options, dout, dlse)
        documents = parallel.Documents(lengths, group)
        assert sum(len(own) for own in documents.deal.whole) + len(documents.deal.shared) == len(lengths)
        options.pop("cu_seqlens_q")
        mine = [documents.shard(x) for x in tensors], options, documents.shard(dout), documents.shard(dlse, 1)
        out, lse, *gradients = results(documents.attention, *mine)
        close(documents.unshard(lse, 1), expected[1], "lse")
        for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *gradients), (expected[0], *expected[2:]), strict=False):
            close(x, documents.shard(y), name)
            assert torch.equal(documents.unshard(documents.shard(y)), y)
        for dsinks in gradients[3:]:
            dist.all_reduce(dsinks, group=group)
            close(dsinks, expected[5], "dsinks")
        padding = ~documents.shard(torch.ones(sum(lengths), dtype=torch.bool, device=here()))
        assert (lse[:, padding] == -torch.inf).all() and (out[padding] == 0).all()
        within = [i for length in lengths for i in range(length)]
        at = documents.shard(torch.tensor(within, dtype=torch.int64, device=here()))
        assert torch.equal(documents.positions(here()), at)
    torch._dynamo.reset()
    compiled = torch.compile(documents.attention, backend="eager")
    assert torch.equal(compiled(*mine[0], version="standard"), documents.attention(*mine[0], version="standard"))


@case(2)
def documents_that_are_none(group: Any) -> None:
    """All ranks raise the same."""
    rank = dist.get_rank()
    raises(ValueError, "lengths must be from 0 on, got -1 at 1", lambda: parallel.Documents([3, -1], group))
    raises(ValueError, "every rank must make the same call", lambda: parallel.Documents([3, 4 + rank], group))
    documents = parallel.Documents([30, 3, 5], group)
    assert "1 shared by all, of 30 rows" in str(documents)
    x = torch.zeros(38, 2, 8, device=here())
    mine = documents.shard(x)
    raises(ValueError, "must be the documents' 38 rows, got 37", lambda: documents.shard(x[1:]))
    raises(ValueError, f"must be each rank's {documents.rows} rows, got 38", lambda: documents.unshard(x))
    text = f"q must have shape ({documents.rows}, heads, head_dim), got (38, 2, 8)"
    raises(ValueError, text, lambda: documents.attention(x, mine, mine))
    lie = mine if rank else x
    raises(ValueError, "not every rank can make this call", lambda: documents.attention(lie, mine, mine))
    text = "Documents.attention takes no cu_seqlens_q: it takes causal"
    raises(TypeError, text, lambda: documents.attention(mine, mine, mine, cu_seqlens_q=torch.zeros(2)))
    text = "every rank must make the same call"
    raises(ValueError, text, lambda: documents.attention(mine, mine, mine, causal=bool(rank)))
    for lengths in (None, 5, torch.tensor(5)):
        raises(TypeError, "lengths must be a sequence of whole numbers", lambda x=lengths: parallel.Documents(x, group))
    raises(TypeError, "whole numbers, got True at 0", lambda: parallel.Documents(torch.tensor([True, False]), group))
    # alone wrong, or spelt in another way
    text = "not every rank can make this call"
    raises(ValueError, text, lambda: parallel.Documents(None if rank else [4, 4], group))  # pyright: ignore[reportArgumentType]
    assert parallel.Documents(torch.tensor([5, 2]) if rank else [5, 2], group).lengths == (5, 2)
    many = [1] * 100
    raises(ValueError, "100 of 100 rows", lambda: parallel.Documents([2, *many[1:]] if rank else many, group))
    known = len(groups.ranks_of(group).agreed.kinds)
    for length in range(5):
        parallel.Documents([length], group)
    assert len(groups.ranks_of(group).agreed.kinds) == known, "of each batch's documents nothing is kept"
    # whether a document is shared is no matter of who takes the call
    for documents in (parallel.Documents([30, 3, 5], group), parallel.Documents([4, 4], group)):
        y = documents.shard(torch.zeros(sum(documents.lengths), 3, 16, device=here()))
        raises(ValueError, "method must be", lambda d=documents, y=y: d.attention(y, y, y, method="bogus"))  # pyright: ignore[reportArgumentType]
        raises(ValueError, "got 'halo'", lambda d=documents, y=y: d.attention(y, y, y, method="halo"))
        raises(UnsupportedError, "multiple", lambda d=documents, y=y: d.attention(y, y, y, method="ulysses"))
        raises(UnsupportedError, "v1", lambda d=documents, y=y: d.attention(y, y, y, version="v1"))
        assert documents.attention(y, y, y, dropout_p=0.0, sinks=None).shape == y.shape
    with torch.no_grad():
        documents.unshard(mine := documents.shard(torch.zeros(8, 2, device=here(), requires_grad=True)))
    assert mine.shape == (documents.rows, 2)
    leaf = torch.zeros(8, 2, device=here(), requires_grad=True)
    raises(ValueError, "x must not require grad", lambda: documents.unshard(documents.shard(leaf) * 2))


@case(2)
def how_rows_of_documents_lie_is_a_ranks_own(group: Any) -> None:
    for lengths in ((30, 3, 5), (30,), (4, 4)):
        documents = parallel.Documents(lengths, group)
        leaf = documents.shard(torch.randn(sum(lengths), 2, 8, device=here())).requires_grad_()
        q = leaf.mT.contiguous().mT if dist.get_rank() else leaf
        out = documents.attention(q, leaf, leaf, causal=True)
        assert torch.equal(out, documents.attention(leaf, leaf, leaf, causal=True))
        out.sum().backward()


@case(2)
def what_alone_is_wrong_is_told_to_all(group: Any) -> None:
    """Also what no dict takes for a key."""
    q, k, v = shards()
    rank = dist.get_rank()
    text = "flashzoo.parallel: "
    raises(ValueError, text, lambda: parallel.attention(q, k, v, group=group, window_size=([3], 0) if rank else (3, 0)))
    raises(TypeError, "seqlen must be an int", lambda: parallel.unshard(q, group, seqlen=[3]))  # pyright: ignore[reportArgumentType]
    for pad, x in ((-100, torch.zeros(7, dtype=torch.uint8)), (0.5, torch.zeros(7, dtype=torch.int64))):
        raises(ValueError, "pad must be a number of x's dtype", lambda x=x, p=pad: parallel.shard(x, group, 0, pad=p))
        documents = parallel.Documents([5, 2], group)
        raises(ValueError, "pad must be", lambda x=x, p=pad, d=documents: d.shard(x, pad=p))


@case(2)
def a_version_without_a_backward_pass(group: Any) -> None:
    """Is refused before anything travels, by every method."""
    q, k, v = (x.requires_grad_() for x in shards(dtype=torch.float16 if here() == "cuda" else torch.float32))
    for method in ("gather", "ring", "ulysses"):

        def call(version: str, method: Any = method) -> Tensor:
            return parallel.attention(q, k, v, group=group, method=method, version=version, causal=True)

        raises(UnsupportedError, "decode", lambda call=call: call("decode"))
        call("standard").sum().backward()


@case(2)
def rows_in_a_graph(group: Any) -> None:
    """Which breaks there."""
    torch._dynamo.reset()
    x, rows = torch.arange(48.0, device=here()).view(1, 8, 6), parallel.Documents([5, 3], group)

    def model(x: Tensor) -> list[Tensor]:
        mine = parallel.shard(x, group) + parallel.positions(8, group, device=x.device)[:, None]
        of_rows = rows.shard(x[0] * 2)
        return [mine, parallel.unshard(mine + 0, group), of_rows, rows.unshard(of_rows + 0)]

    for found, expected in zip(torch.compile(model, backend="eager")(x), model(x), strict=True):
        assert torch.equal(found, expected)


@case(4)
def groups_that_are_none(group: Any) -> None:
    q, k, v = shards()
    raises(TypeError, "group must be a torch.distributed.ProcessGroup", lambda: parallel.attention(q, k, v, group=None))
    outside = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        raises(ValueError, "one that this rank is in", lambda: parallel.attention(q, k, v, group=outside))


@case(4)
def a_rank_that_stays_away_is_told_of(group: Any) -> None:
    """By the others, when they have waited for it; here for three seconds."""
    fresh, within = dist.new_group(list(range(4))), groups.AGREE_WITHIN
    q, k, v = shards()
    groups.AGREE_WITHIN = timedelta(seconds=3)
    try:
        parallel.attention(q, k, v, group=fresh)
        if dist.get_rank():
            raises(RuntimeError, "0:00:03", lambda: parallel.attention(q, k, v, group=fresh, causal=True))
    finally:
        groups.AGREE_WITHIN = within
    dist.barrier(group)


@case(2)
def meshes_and_dtensors(group: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(group, here())
    tensors = [x.requires_grad_() for x in shards(32)]
    expected = flashzoo.attention(*tensors, causal=True)
    mine = [parallel.shard(x, mesh) for x in tensors]
    close(parallel.attention(*mine, group=mesh, causal=True), parallel.shard(expected, group), "mesh")
    whole = [
        DTensor.from_local(parallel.shard(x, mesh, layout="contiguous"), mesh, (Shard(1),), run_check=False)
        for x in tensors
    ]
    how = {"group": mesh, "causal": True, "return_lse": True}
    out, lse = parallel.attention(*whole, layout="contiguous", **how)
    assert out.placements == (Shard(1),) and lse.placements == (Shard(2),) and lse.shape == (2, 4, 32)
    close(out.full_tensor(), expected, "DTensor")
    out.to_local().sum().backward()
    assert all(x.grad is not None for x in tensors)
    raises(TypeError, "x must be a tensor of this rank alone, got a DTensor", lambda: parallel.unshard(out, mesh))
    raises(ValueError, "layout must be 'contiguous' for DTensors", lambda: parallel.attention(*whole, **how))
    replicated = whole[0].redistribute(placements=(Replicate(),))
    raises(
        ValueError,
        "k must be sharded by rows",
        lambda: parallel.attention(whole[0], replicated, whole[2], layout="contiguous", **how),
    )
    raises(
        TypeError, "v must be a DTensor", lambda: parallel.attention(*whole[:2], mine[2], layout="contiguous", **how)
    )


@case(2)
def compiled_around(group: Any) -> None:
    """The graph breaks at the call; what is before and behind is compiled, and the same comes of it."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return parallel.attention(q * 2, k, v, group=group, causal=True).sin()

    first = dist.get_rank(group) == 0  # the others' graphs would only cost time
    found, expected = [], []
    for call, gradients in ((torch.compile(model, backend=backend) if first else model, found), (model, expected)):
        q, k, v = (x.requires_grad_() for x in shards())
        out = call(q, k, v)
        out.sum().backward()
        gradients += [out.detach(), q.grad, k.grad, v.grad]
    assert len(graphs) == 2 * first
    for x, y in zip(found, expected, strict=True):
        close(x, y, "compiled")


@case(2)
def the_example_trains_alike(group: Any) -> None:
    """examples/long_context.py in float64: the losses of two ranks are those of one."""
    spec = importlib.util.spec_from_file_location("long_context", ROOT / "examples" / "long_context.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sizes = "--steps 3 --batch 2 --seqlen 32 --layers 2 --hidden 32 --head-dim 8 --dtype fp64"
    args = example.arguments([*sizes.split(), "--device", here(), "--text", __file__])
    alone, _ = example.train(args, None)
    for args.method in ("gather", "ring"):
        found, _ = example.train(args, group)
        close(found, alone, "losses")


@case(2)
def the_benchmark_checks_and_times(group: Any) -> None:
    from bench import parallel as bench
    from bench.rows import FIELDS

    tokens, head_dim, most = (64, 8, 1e-5) if here() == "cpu" else (2048, 128, 0.05)
    sizes = f"--device {here()} --tokens {tokens} --heads 4:2 --head-dim {head_dim} --ms 1 --out none.csv"
    ours = ["auto", "parallel_gather", "parallel_ulysses", "parallel_ring", "parallel_auto", "plain_ring"]
    for documents in ("", "documents", "balanced"):
        ours += ["parallel_halo", "parallel_documents", "zigzag_halo"] if documents == "documents" else []
        args = bench.arguments([*sizes.split(), "--impls", ",".join(ours)])
        cell = bench.Cell(tokens, 4, 2, head_dim, documents, "fwd_bwd", 2)
        rows = list(bench.measure(cell, args, group))
        assert [row["impl"] for row in rows] == ours and [row["gpus"] for row in rows] == [1] + [2] * (len(ours) - 1)
        for row in rows:
            assert float(row["ms"]) > 0 and row.keys() <= set(FIELDS), row
            assert row["impl"] == "auto" or float(row["max_err"]) < most

    right, last = dict(bench.CONTENDERS), dist.get_rank(group) == dist.get_world_size(group) - 1
    wrong: dict[str, Callable[..., Tensor]] = {
        "negated": lambda call, q, k, v: -call(q, k, v),
        "NaN on one rank": lambda call, q, k, v: call(q, k, v) * (torch.nan if last else 1),
        "NaN in a gradient": lambda call, q, k, v: call(q, k + (k - k.detach()) * torch.nan, v),
    }
    for made in wrong.values():

        @contextmanager
        def contender(inputs: bench.Inputs, group: Any, made: Any = made) -> Iterator[bench.Ready]:
            with right["parallel_ring"](inputs, group) as (call, tensors, mine):
                yield partial(made, call), tensors, mine

        try:
            bench.CONTENDERS["parallel_ring"] = contender
            (row,) = bench.measure(cell, bench.arguments([*sizes.split(), "--impls", "parallel_ring"]), group)
        finally:
            bench.CONTENDERS.update(right)
        assert "FAILED" in row["why"] and "ms" not in row


@case(2, 4, devices=("cuda",))
def inputs_that_come_late(group: Any) -> None:
    """On a stream of one's own, into memory that was NaN before, call behind call with nobody waiting: the same bits as
    of a call by itself. What reads a buffer before it came, or writes one that is still being sent, has others."""
    in_lots(_come_late)(group)


def _come_late(group: Any) -> None:
    stream = torch.cuda.Stream()
    for method in ("gather", "ulysses", "ring", "halo"):
        shape = replace(JUDGED["causal"], seqlen=4096, heads=16, heads_kv=8)
        if method in ("ulysses", "halo"):
            shape = replace(shape, options=CAUSAL | {"max_seqlen_q": 900}, lengths=(700, 900, 500, 0, 900, 1, 800, 200))
        given = tensors, options, dout, dlse = whole(shape)
        options["deterministic"] = True
        expected = on_ranks(shape, method, group, given, "auto")
        late = [torch.full_like(x, torch.nan) for x in (*tensors, dout, dlse)]
        torch.cuda.synchronize()
        found = []
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            for x, value in zip(late, (*tensors, dout, dlse), strict=True):
                x.copy_(value)
            for _ in range(8):
                found.append(on_ranks(shape, method, group, (late[:3], options, *late[3:]), "auto"))
                blocks = [torch.full((1 << power,), torch.nan, device="cuda") for power in range(10, 24)]
                del blocks
        stream.synchronize()
        for again in found:
            for x, y in zip(again, expected, strict=True):
                assert same_bits(x, y), method


@case(2, 4, devices=("cuda",))
def captured_in_a_graph(group: Any) -> None:
    """Both passes in a CUDA graph: a replay gives the same bits as a call by itself, of other numbers and, where
    sequences are packed, of others of these."""
    in_lots(_captured)(group)


def _captured(group: Any) -> None:
    packed = replace(
        JUDGED["packed"],
        seqlen=2048,
        heads=16,
        heads_kv=8,
        options=CAUSAL | {"max_seqlen_q": 900, "deterministic": True},
    )
    for method in ("gather", "ulysses", "ring", "halo"):
        how = {"group": group, "layout": "contiguous", "method": method}
        shape, *others = (replace(packed, lengths=lengths) for lengths in ((700, 900, 0, 448), (1, 899, 800, 300)))
        tensors, options, dout, _ = whole(shape)
        static = [parallel.shard(x, group, 0, "contiguous") for x in (*tensors, dout)]

        def both(static: list[Tensor] = static, options: dict[str, Any] = options, how: Any = how) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in static[:3]]
            out = parallel.attention(*leaves, **how, **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, static[3])]

        both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = both()
        for other in (shape, *others):
            options["cu_seqlens_q"].copy_(whole(other)[1]["cu_seqlens_q"])
            for x in static:
                x.copy_(x.flip(0))
            graph.replay()
            for x, y in zip(found, both(), strict=True):
                assert same_bits(x, y), method


def work(rank: int, port: int, folder: str, device: str) -> None:
    """One rank: all cases, and what they raised, line by line."""
    ranks = world(device)
    join(rank, port, ranks, device)
    of_size = {ranks: dist.group.WORLD}
    pairs = [[first, first + 1] for first in range(0, ranks, 2)]
    for members in (*(pair for pair in pairs if len(pairs) > 1), *([one] for one in range(ranks))):
        group = dist.new_group(members)
        if rank in members:
            of_size[len(members)] = group
    turn = 0
    with Path(folder, f"{rank}.txt").open("w") as file:
        for name, case in cases_on(device).items():
            turn += case.ranks == 2
            if case.ranks > ranks or (case.ranks == 2 and rank not in pairs[turn % len(pairs)]):
                continue
            raised = ""
            try:
                case.run(of_size[case.ranks])
            except Exception:
                raised = traceback.format_exc()
            print(json.dumps((name, raised)), file=file, flush=True)
    dist.destroy_process_group()
    os._exit(0)  # DTensor and torch.compile keep groups: see the end of bench.parallel


def raise_alone(rank: int, port: int, _: str, device: str) -> None:
    """The second rank raises, the first waits for it in the middle of a call."""
    join(rank, port, 2, device)
    q, k, v = shards()
    parallel.attention(q, k, v, group=dist.group.WORLD, method="ring")
    if rank == 1:
        raise ArithmeticError("the loss is no number")
    parallel.attention(q, k, v, group=dist.group.WORLD, method="ring").cpu()


def join(rank: int, port: int, ranks: int, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        os.environ["LOCAL_RANK"] = str(rank)  # as torchrun would
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    # NCCL's, beyond which it ends the process, has to hold while another rank compiles
    within = timedelta(seconds=60 if device == "cpu" else 150)
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=ranks, timeout=within)


def in_processes(run: Callable[[int, int, str, str], None], ranks: int, folder: Path, device: str) -> None:
    """Run a function in so many processes, with its rank; raises what the first to fail raised, or TimeoutError where
    they have not ended after `WITHIN`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    end = time.monotonic() + WITHIN[device]
    context = spawn(run, (store.port, str(folder), device), nprocs=ranks, join=False)
    try:
        while not context.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError(f"expected {ranks} processes to end within {WITHIN[device]:.0f} s")
    finally:
        for process in context.processes:
            process.kill()


def run_cases(folder: Path, device: str) -> dict[str, str]:
    """What each case raised, of the ranks that raised, or why it did not end; "" where neither."""
    why = ""
    try:
        in_processes(work, world(device), folder, device)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    told: dict[str, dict[int, str]] = {name: {} for name in CASES}
    for rank in range(world(device)):
        path = folder / f"{rank}.txt"
        for line in path.read_text().splitlines() if path.exists() else ():
            name, raised = json.loads(line)
            told[name][rank] = raised
    found = {}
    for name, case in CASES.items():
        lines = [f"rank {rank}: {raised}" for rank, raised in told[name].items() if raised]
        if len(told[name]) < case.ranks:
            lines.append(f"it did not end on every rank: {why}")
        found[name] = "\n".join(lines)
    return found
