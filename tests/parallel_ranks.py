"""What each rank of tests/test_parallel.py does: cases against the call of the whole, in one process group of four.

A group of two is half of it, so both halves run each of its cases. A case is a function of a group that raises where it
fails; what it raised is written to a file, which the tests read.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flashzoo
from flashzoo import BlockMask, parallel
from flashzoo.parallel import groups

CLOSE = 1e-10
WORLD = 4
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """What is run, in a group of so many ranks."""

    ranks: int
    run: Callable[[Any], None]


@dataclass(frozen=True)
class Shape:
    """A call of the whole, in float64 through `standard`."""

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


LENGTHS = (5, 17, 0, 1, 20)
"""Of packed sequences: they cross every border of shards, and the last 5 of 48 rows are of none."""
CAUSAL, BY_PARTS, ALL_HEADS = {"causal": True}, ("gather", "ring"), ("ulysses",)
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
    "packed": Shape(CAUSAL, lengths=LENGTHS, heads_kv=2),
    "packed_contiguous": Shape(CAUSAL, lengths=LENGTHS, layout="contiguous"),
    "packed_full": Shape(lengths=LENGTHS),
    "packed_window": Shape(CAUSAL | {"window_size": (6, 0)}, lengths=LENGTHS, methods=("gather", "ulysses")),
    "packed_two_sided": Shape({"window_size": (6, 2)}, lengths=LENGTHS, methods=ALL_HEADS),
    "packed_sinks": Shape(CAUSAL | {"sinks": True, "window_size": (6, 0)}, lengths=LENGTHS, methods=("gather",)),
    "caches": Shape(CAUSAL | {"seqused_k": torch.tensor([30, 48], dtype=torch.int32)}, methods=ALL_HEADS),
    "mask": Shape({"block_mask": True}, methods=ALL_HEADS),
}


def whole(shape: Shape) -> tuple[list[Tensor], dict[str, Any], Tensor, Tensor]:
    """q, k and v, the options, and the gradients of out and lse; the same on every rank."""
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    rows, of_k = (shape.batch, shape.seqlen), (shape.batch, shape.seqlen_k or shape.seqlen)
    options = dict(shape.options)
    if shape.lengths is not None:
        rows, of_k = rows[1:], of_k[1:]
        options["cu_seqlens_q"] = torch.tensor((0, *shape.lengths)).cumsum(0).int()
    q = torch.randn(*rows, shape.heads, 8, **double)
    k, v = (torch.randn(*of_k, shape.heads_kv, width, **double) for width in (8, shape.width))
    if options.get("sinks"):
        options["sinks"] = torch.randn(shape.heads, **double)
    if options.get("block_mask"):
        options["block_mask"] = BlockMask.from_dense(torch.rand(shape.seqlen, shape.seqlen) < 0.5)
    dout = torch.randn(*rows, shape.heads, shape.width, **double)
    dlse = torch.randn(dout[..., 0].transpose(-1, -2).shape, **double)
    return [q, k, v], options, dout, dlse


def results(call: Callable, tensors: list[Tensor], options: dict[str, Any], dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """out, lse, and the gradients of q, k, v and sinks."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].detach().requires_grad_()}
        leaves.append(options["sinks"])
    out, lse = call(*leaves[:3], return_lse=True, version="standard", **options)
    seen = lse.detach() > -torch.inf
    (out * dout).sum().add((lse.where(seen, 0) * dlse).sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE, msg=lambda text: f"{what}: {text}")


def of_shape(shape: Shape, method: str) -> Callable[[Any], None]:
    """out, lse and every gradient are the shards of those of the whole."""

    def run(group: Any) -> None:
        tensors, options, dout, dlse = whole(shape)
        expected = results(flashzoo.attention, tensors, options, dout, dlse)
        rows = 1 if shape.lengths is None else 0

        def sharded(x: Tensor, dim: int) -> Tensor:
            return parallel.shard(x, group, dim, shape.layout)

        def call(*args, **how):
            return parallel.attention(*args, group=group, layout=shape.layout, method=method, **how)

        given = [sharded(x, rows) for x in tensors], options, sharded(dout, rows), sharded(dlse, rows + 1)
        found = results(call, *given)
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
            if name == "dsinks":
                dist.all_reduce(x, group=group)
            else:
                y = sharded(y, rows + (name == "lse"))
            close(x, y, name)

    return run


for _name, _shape in SHAPES.items():
    for _method in _shape.methods:
        for _ranks in (2, 4):
            CASES[f"{_name}-{_method}-{_ranks}"] = Case(_ranks, of_shape(_shape, _method))


def work(rank: int, folder: str) -> None:
    """One rank: all cases, and what they raised."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    of_size = {4: dist.group.WORLD}
    for ranks in ([0, 1], [2, 3], *([rank] for rank in range(WORLD))):
        group = dist.new_group(ranks)
        if rank in ranks:
            of_size[len(ranks)] = group
    raised = {}
    for name, case in CASES.items():
        try:
            case.run(of_size[case.ranks])
        except Exception:
            raised[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(raised))
    dist.destroy_process_group()


def in_processes(folder: Path) -> dict[str, str]:
    """What each case raised, of the ranks that raised; "" where none did."""
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=WORLD)
    raised = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {
        name: "\n".join(f"rank {rank}: {found[name]}" for rank, found in enumerate(raised) if name in found)
        for name in CASES
    }
