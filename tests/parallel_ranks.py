"""What each rank of tests/test_parallel.py does: cases against the call of the whole, in one process group of four.

A group of two is half of it, so both halves run each of its cases. A case is a function of a group that raises where it
fails; what it raised is written to a file, which the tests read.
"""

from __future__ import annotations

import importlib.util
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
from torch.multiprocessing.spawn import spawn

import flashzoo
from flashzoo import BlockMask, parallel
from flashzoo.parallel import groups

ROOT = Path(__file__).resolve().parent.parent
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
    return [out.detach(), lse.detach(), *(x.grad for x in leaves if x.grad is not None)]


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


def case(ranks: int) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Have a function run in a group of so many ranks."""

    def add(run: Callable[[Any], None]) -> Callable[[Any], None]:
        CASES[run.__name__] = Case(ranks, run)
        return run

    return add


def shards(seqlen: int = 16, dtype: torch.dtype = torch.float64, heads: int = 4, heads_kv: int = 4) -> list[Tensor]:
    """q, k and v of a rank, the same on every rank."""
    torch.manual_seed(1)
    return [torch.randn(2, seqlen, h, 16, dtype=torch.float64).to(dtype) for h in (heads, heads_kv, heads_kv)]


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


@case(2)
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


@case(2)
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
    x = torch.arange(2 * 24 * 3).view(2, 24, 3)
    for layout in ("zigzag", "contiguous"):
        mine = parallel.shard(x, group, layout=layout)
        assert torch.equal(parallel.unshard(mine, group, layout=layout), x)
        at = parallel.positions(24, group, layout)
        assert torch.equal(x[:, at], mine)
        assert torch.equal(parallel.shard(x.transpose(0, 1), group, 0, layout), mine.transpose(0, 1))
    rank = dist.get_rank(group)
    assert parallel.positions(24, group).tolist() == [
        *range(3 * rank, 3 * rank + 3),
        *range(21 - 3 * rank, 24 - 3 * rank),
    ]
    raises(ValueError, "must be a multiple of 8 for 4 ranks", lambda: parallel.shard(x[:, :20], group))
    raises(
        ValueError,
        "must not require grad",
        lambda: parallel.unshard(x.double().requires_grad_(), group, layout="contiguous"),
    )


@case(4)
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


@case(4)
def one_rank_in_error_all_hear_of_it(group: Any) -> None:
    rank = dist.get_rank(group)
    q, k, v = shards()
    odd = {"causal": 1 if rank == 3 else True, "softmax_scale": 0.125}
    told = raises(
        ValueError, "rank 3: TypeError: causal must be a bool", lambda: parallel.attention(q, k, v, group=group, **odd)
    )
    heard_by_all(told, group)
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
            *(x.to(torch.float8_e4m3fn) for x in shards()), group=group, q_descale=torch.ones(2, 4)
        ),
    )
    raises(
        TypeError,
        "k and v must be packed rows, as q is, got caches",
        lambda: parallel.attention(
            q[0], k[:1], v[:1], group=group, cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32)
        ),
    )
    raises(
        NotImplementedError,
        "heads must be a multiple of the 4 ranks, got 3",
        lambda: parallel.attention(*shards(heads=3, heads_kv=3), group=group, method="ulysses"),
    )
    raises(
        NotImplementedError,
        "as many keys as queries",
        lambda: parallel.attention(q, *(x[:, :8] for x in (k, v)), group=group, method="gather", causal=True),
    )


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
    fresh, within = dist.new_group(list(range(WORLD))), groups.AGREE_WITHIN
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

    mesh = DeviceMesh.from_group(group, "cpu")
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

    here = dist.get_rank(group) == 0  # the others' graphs would only cost time
    found, expected = [], []
    for call, gradients in ((torch.compile(model, backend=backend) if here else model, found), (model, expected)):
        q, k, v = (x.requires_grad_() for x in shards())
        out = call(q, k, v)
        out.sum().backward()
        gradients += [out.detach(), q.grad, k.grad, v.grad]
    assert len(graphs) == 2 * here
    for x, y in zip(found, expected, strict=True):
        close(x, y, "compiled")


@case(2)
def the_example_trains_alike(group: Any) -> None:
    """examples/long_context.py in float64: the losses of two ranks are those of one."""
    spec = importlib.util.spec_from_file_location("long_context", ROOT / "examples" / "long_context.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sizes = "--steps 3 --batch 2 --seqlen 32 --layers 2 --hidden 32 --head-dim 8 --device cpu --dtype fp64"
    args = example.arguments([*sizes.split(), "--text", __file__])
    alone, _ = example.train(args, None)
    for args.method in ("gather", "ring"):
        found, _ = example.train(args, group)
        close(found, alone, "losses")


@case(2)
def the_benchmark_checks_and_times(group: Any) -> None:
    from bench import parallel as bench

    sizes = "--device cpu --tokens 64 --heads 4:2 --head-dim 8 --repeats 1 --out none.csv"
    ours = ["auto", "parallel_gather", "parallel_ulysses", "parallel_ring", "plain_ring"]
    args = bench.arguments([*sizes.split(), "--impls", ",".join(ours)])
    for documents in (False, True):
        cell = bench.Cell(64, 4, 2, 8, documents, "fwd_bwd", 2)
        rows = list(bench.measure(cell, args, group))
        assert [row["impl"] for row in rows] == ours and [row["gpus"] for row in rows] == [1, 2, 2, 2, 2]
        for row in rows:
            assert float(row["ms"]) > 0 and row.keys() <= set(bench.COLUMNS), row
            assert row["impl"] == "auto" or float(row["max_err"]) < 1e-5
    wrong = dict(bench.CONTENDERS)
    try:
        bench.CONTENDERS["auto"] = bench.CONTENDERS["parallel_ring"] = bench.one_gpu  # of the whole, not of the shard
        (row,) = bench.measure(cell, bench.arguments([*sizes.split(), "--impls", "parallel_ring"]), group)
    finally:
        bench.CONTENDERS.update(wrong)
    assert "FAILED" in row["why"] and "ms" not in row


def work(rank: int, port: int, folder: str) -> None:
    """One rank: all cases, and what they raised."""
    join(rank, port, WORLD)
    of_size = {4: dist.group.WORLD}
    for ranks in ([0, 1], [2, 3], *([rank] for rank in range(WORLD))):
        group = dist.new_group(ranks)
        if rank in ranks:
            of_size[len(ranks)] = group
    raised, half = {}, 0
    for name, case in CASES.items():
        half ^= case.ranks == 2
        if case.ranks == 2 and half != rank // 2:  # each half has half of these
            continue
        try:
            case.run(of_size[case.ranks])
        except Exception:
            raised[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(raised))
    dist.destroy_process_group()


def raise_alone(rank: int, port: int, _: str) -> None:
    """The second rank raises, the first waits for it in the middle of a call."""
    join(rank, port, 2)
    q, k, v = shards()
    parallel.attention(q, k, v, group=dist.group.WORLD, method="ring")
    if rank == 1:
        raise ArithmeticError("the loss is no number")
    parallel.attention(q, k, v, group=dist.group.WORLD, method="ring")


def join(rank: int, port: int, ranks: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))


def in_processes(run: Callable[[int, int, str], None], ranks: int, folder: Path) -> None:
    """Run a function in so many processes, with its rank; raises what the first to fail raised."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    spawn(run, (store.port, str(folder)), nprocs=ranks)


def run_cases(folder: Path) -> dict[str, str]:
    """What each case raised, of the ranks that raised; "" where none did."""
    in_processes(work, WORLD, folder)
    raised = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {
        name: "\n".join(f"rank {rank}: {found[name]}" for rank, found in enumerate(raised) if name in found)
        for name in CASES
    }
