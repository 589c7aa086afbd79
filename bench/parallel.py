"""Attention over several GPUs: `flashzoo.parallel` by each method, a plain ring and torch's `context_parallel`, beside
one GPU at as many tokens a GPU.

    torchrun --nproc-per-node 2 -m bench.parallel --documents --budget-s 150
    torchrun --nproc-per-node 2 -m bench.parallel --device cpu --tokens 64 --heads 4:2 --head-dim 8 --out cpu.csv

A cell is so many tokens of all GPUs together, one sequence or packed documents, causal. Each contender's out and
gradients are held against one GPU's call of the whole before it is timed, and one that is wrong has no time. A row is
what one call took on the slowest rank: ranks are aligned on the GPU by a small all-reduce before each call, so no host
waits, and contenders take turns in rounds. Rows are written cell by cell, and where the budget is spent a run stops
behind the round that it is in.

`seqlen_q` is the tokens of all GPUs, `tflops` what all make together; `auto` with gpus 1 is one GPU at a rank's share
of the tokens, all GPUs doing that at once. Pass `fwd_bwd` is both. Of documents every call is told how long
the longest is; `parallel_halo` and `parallel_auto` have them in contiguous shards, `parallel_documents` deals them out.
They lie as they were drawn, or with
`--documents balanced` as `flashzoo.parallel.balanced` has them.

With `--graphs` a call is captured in a CUDA graph, of which `_graph` behind the contender's name tells, and what is
checked and timed is a replay: what the GPUs take where no host is waited for.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flashzoo
from bench.arguments import amount, numbers, whole
from bench.lengths import lengths
from bench.rows import FAILED, REFUSED, Results, Row, head_commit, results_path, time_columns
from flashzoo import parallel
from flashzoo.parallel.layout import Layout
from flashzoo.timing import captured

PASSES = {"fwd": 1.0, "fwd_bwd": 3.5}
"""FLOPs of a pass, over the forward pass's."""
MOST_ERROR = 0.02
"""Of out and of each gradient, the norm of what they are off by over their own, in 16 bits."""
DOCUMENTS = {"also": ("", "documents"), "only": ("documents",), "balanced": ("balanced",)}
"""What cells are of, by the option: one sequence, documents as they were drawn, or in an order of even work."""
GRAPH = "_graph"
"""Behind the name of a contender whose call is captured."""
ROUNDS = 3
LEAST, MOST = 2, 20
"""Calls of a contender that are timed in a round."""


@dataclass(frozen=True)
class Cell:
    """What is called: so many tokens of all ranks together, and how heads are laid out."""

    tokens: int
    heads: int
    heads_kv: int
    head_dim: int
    documents: str
    pass_: str
    ranks: int

    def operations(self, tokens: int) -> float:
        """FLOPs of a call of so many tokens: half of each sequence's square."""
        squares = sum(length**2 for length in self.lengths(tokens))
        return PASSES[self.pass_] * 2 * self.heads * squares * self.head_dim

    def lengths(self, tokens: int) -> tuple[int, ...]:
        """Of its sequences."""
        if not self.documents:
            return (tokens,)
        drawn = lengths("documents", tokens)
        order = parallel.balanced(drawn, self.ranks) if self.documents == "balanced" else range(len(drawn))
        return tuple(drawn[i] for i in order)


class Inputs:
    """q, k, v and out's gradient of so many tokens, the same on every rank, and what a call is told beside them."""

    def __init__(self, cell: Cell, tokens: int, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.dim = 0 if cell.documents else 1
        batch = () if cell.documents else (1,)
        heads = (cell.heads, cell.heads_kv, cell.heads_kv, cell.heads)
        self.tensors = [
            torch.randn(*batch, tokens, h, cell.head_dim, device=args.device, dtype=args.dtype) for h in heads
        ]
        self.options: dict[str, Any] = {"causal": True}
        self.layout: Layout = "contiguous" if cell.documents else "zigzag"
        if cell.documents:
            ends = torch.tensor((0, *cell.lengths(tokens)), device=args.device).cumsum(0)
            self.options |= {"cu_seqlens_q": ends.int(), "max_seqlen_q": max(cell.lengths(tokens))}

        self.cell = cell
        self.tokens = tokens

    def shared(self, layout: Layout) -> dict[str, Any]:
        """What ranks are told of documents that several have, where these are in balanced order."""
        if self.cell.documents != "balanced" or layout != "contiguous":
            return {}
        return {"max_across": parallel.longest_across(self.cell.lengths(self.tokens), self.cell.ranks)}


Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Shard = Callable[[Tensor], Tensor]
Ready = tuple[Call, list[Tensor], Shard]
"""A call, this rank's q, k, v and dout, and which rows of a tensor of the whole it has."""


def rows_by(inputs: Inputs, group: Any, layout: Layout = "zigzag") -> Shard:
    """This rank's rows by a layout."""
    return partial(parallel.shard, group=group, dim=inputs.dim, layout=layout)


@contextmanager
def ours(inputs: Inputs, group: Any, method: Any, layout: Any = "zigzag") -> Iterator[Ready]:
    """`flashzoo.parallel` by one method."""
    shared = inputs.shared(layout)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return parallel.attention(q, k, v, group=group, method=method, layout=layout, **inputs.options, **shared)

    mine = rows_by(inputs, group, layout)
    yield call, [mine(x) for x in inputs.tensors], mine


@contextmanager
def dealt(inputs: Inputs, group: Any) -> Iterator[Ready]:
    """`flashzoo.parallel.Documents`, whose host's part is done once for a batch."""
    if not inputs.cell.documents:
        raise NotImplementedError("Documents are packed sequences")
    documents = parallel.Documents(inputs.cell.lengths(inputs.tokens), group)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return documents.attention(q, k, v, causal=True)

    yield call, [documents.shard(x) for x in inputs.tensors], documents.shard


@contextmanager
def torchs(inputs: Inputs, group: Any, rotate: str) -> Iterator[Ready]:
    """torch's `context_parallel`, whose order of rows is zigzag's."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if inputs.dim == 0:
        raise NotImplementedError("context_parallel takes no packed sequences")
    set_rotate_method(rotate)
    device = inputs.tensors[0].device.type
    mesh = DeviceMesh.from_group(group, device)
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in inputs.tensors)
    if k.shape[1] != q.shape[1]:  # it has no heads that share keys
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    buffers = [q, k, v, dout]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    with (
        sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
    ):
        yield call, [x.transpose(1, 2) for x in buffers], rows_by(inputs, group)


@contextmanager
def one_gpu(inputs: Inputs, group: Any) -> Iterator[Ready]:
    """The plain call, on each rank by itself."""
    yield lambda q, k, v: flashzoo.attention(q, k, v, **inputs.options), inputs.tensors, lambda x: x


CONTENDERS: dict[str, Callable[..., Any]] = {
    "auto": one_gpu,
    "parallel_gather": lambda inputs, group: ours(inputs, group, "gather"),
    "parallel_ulysses": lambda inputs, group: ours(inputs, group, "ulysses"),
    "parallel_ring": lambda inputs, group: ours(inputs, group, "ring"),
    "parallel_halo": lambda inputs, group: ours(inputs, group, "halo", inputs.layout),
    "parallel_auto": lambda inputs, group: ours(inputs, group, "auto", inputs.layout),
    "parallel_documents": dealt,
    "zigzag_halo": lambda inputs, group: ours(inputs, group, "halo"),
    "plain_ring": lambda inputs, group: ours(inputs, group, "ring", "contiguous"),
    "torch_cp_allgather": lambda inputs, group: torchs(inputs, group, "allgather"),
    "torch_cp_alltoall": lambda inputs, group: torchs(inputs, group, "alltoall"),
}
"""Each with the inputs and the group: a context, in which it is ready. Of documents `halo` needs fewer keys where
shards are contiguous."""


def results(call: Call, tensors: Sequence[Tensor], pass_: str) -> list[Tensor]:
    """One call: out, and the gradients of q, k and v where the pass has them."""
    q, k, v, dout = tensors
    if pass_ == "fwd":
        with torch.no_grad():
            return [call(q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def replayed(run: Callable[[], list[Tensor]], device: str) -> Callable[[], list[Tensor]]:
    """A call captured in a CUDA graph, which gives the same tensors each time."""
    # NCCL's own thread looks at events meanwhile
    replay, found = captured([run], device, capture_error_mode="thread_local")

    def again() -> list[Tensor]:
        replay()
        return found

    return again


def errors(found: Sequence[Tensor], expected: Sequence[Tensor], group: Any) -> tuple[float, float, float]:
    """The largest relative error of a tensor, and the largest and the RMS error of out, of the worst rank."""
    relative = []
    for x, y in zip(found, expected, strict=True):
        if x.shape != y.shape:  # of keys that were handed over once for each head of a group
            x = x.unflatten(-2, (y.shape[-2], -1)).sum(-2)
        relative.append(((x.float() - y.float()).norm() / y.float().norm()).item())
    off = found[0].float() - expected[0].float()
    worst = torch.tensor([*relative, off.abs().max().item(), off.square().mean().sqrt().item()], device=off.device)
    worst.nan_to_num_(nan=inf, posinf=inf)  # of which a maximum may lose NaN
    worst = torch.stack([worst[:-2].max(), *worst[-2:]])
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    return tuple(worst.tolist())


def times(run: Callable[[], Any], about_ms: float, device: str, group: Any) -> list[float]:
    """Milliseconds of each of some runs, of the slowest rank: of as many as take so long together."""
    (first,) = _times(run, 1, device, group)
    return _times(run, max(LEAST, min(MOST, ceil(about_ms / first))), device, group)


def _times(run: Callable[[], Any], repeats: int, device: str, group: Any) -> list[float]:
    aligned = torch.zeros(1, device=device)
    if device == "cpu":
        found = []
        for _ in range(repeats):
            dist.all_reduce(aligned, group=group)
            begin = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - begin))
    else:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            dist.all_reduce(aligned, group=group)
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        found = [begin.elapsed_time(end) for begin, end in events]
    slowest = torch.tensor(found, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return slowest.tolist()


class Clock:
    """Whether the budget is spent; all ranks are told the same.

    Args:
        seconds: from the clock's making on.
    """

    def __init__(self, seconds: float, device: str, group: Any) -> None:
        self.end, self.device, self.group = time.monotonic() + seconds, device, group

    def spent(self) -> bool:
        """Whether it is so on any rank."""
        over = torch.tensor([float(time.monotonic() >= self.end)], device=self.device)
        dist.all_reduce(over, dist.ReduceOp.MAX, self.group)
        return bool(over.item())


def measure(cell: Cell, args: argparse.Namespace, group: Any, clock: Clock | None = None) -> Iterator[Row]:
    """Check every contender, time those that are right, in rounds, of which the first is made whatever the clock says.
    A row of each."""
    whole_inputs = Inputs(cell, cell.tokens, args)
    with one_gpu(whole_inputs, group) as (of_all, tensors, _):  # which the suite holds to a better oracle
        expected = results(of_all, tensors, cell.pass_)
    found: dict[str, list[float]] = {name: [] for name in args.impls}
    rows = {name: row_of(name, cell, args) for name in args.impls}
    for turn in range(1 + ROUNDS):
        if turn > 1 and clock is not None and clock.spent():
            break
        order = list(found)
        random.Random(turn).shuffle(order)  # alike on every rank
        for name in order:
            inputs = Inputs(cell, cell.tokens // cell.ranks, args) if name == "auto" else whole_inputs
            try:
                with CONTENDERS[name](inputs, group) as (call, tensors, mine):
                    run = partial(results, call, tensors, cell.pass_)
                    run = replayed(run, args.device) if args.graphs else run
                    if turn:
                        found[name] += times(run, args.ms, args.device, group)
                    elif name != "auto":
                        relative, largest, rms = errors(run(), [mine(x) for x in expected], group)
                        rows[name] |= {"max_err": f"{largest:.4g}", "rms_err": f"{rms:.4g}"}
                        if not relative <= MOST_ERROR:
                            raise ValueError(f"off by {relative:.3g} of its norm, {MOST_ERROR} allowed")
            except (dist.DistError, torch.AcceleratorError, torch.OutOfMemoryError):  # a rank alone may have one
                raise
            except Exception as error:  # every rank makes the same call, and the same error
                why = REFUSED if isinstance(error, NotImplementedError) else FAILED
                rows[name]["why"] = f"{why}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                found.pop(name)
    for name, row in rows.items():
        if found.get(name):
            tokens = cell.tokens // cell.ranks if name == "auto" else cell.tokens
            row |= time_columns(found[name], cell.operations(tokens))
        yield row


def row_of(name: str, cell: Cell, args: argparse.Namespace) -> Row:
    """A row without a result."""
    tokens = cell.tokens // cell.ranks if name == "auto" else cell.tokens
    return {
        "impl": name + args.graphs * GRAPH,
        "pass": cell.pass_,
        "dtype": "bf16" if args.device == "cuda" else "fp32",
        "batch": len(cell.lengths(tokens)),
        "seqlen_q": tokens,
        "seqlen_k": tokens,
        "heads": cell.heads,
        "heads_kv": cell.heads_kv,
        "head_dim": cell.head_dim,
        "causal": 1,
        "mask": "",
        "density": 1,
        "lengths": cell.documents,
        "gpus": 1 if name == "auto" else cell.ranks,
    }


def report(rows: list[Row]) -> None:
    """Print TFLOP/s a GPU of each, and over one GPU's."""
    alone = next((float(str(row["tflops"])) for row in rows if row["gpus"] == 1 and "tflops" in row), None)
    first = rows[0]
    print(f"{first['pass']} {first['heads']}:{first['heads_kv']} {first['lengths']}", flush=True)
    for row in rows:
        if "tflops" not in row:
            print(f"  {row['impl']:20} {row.get('why', '')}", flush=True)
            continue
        each = float(str(row["tflops"])) / int(str(row["gpus"]))
        share = f"{each / alone:7.1%} of one GPU's" if alone else ""
        print(f"  {row['impl']:20} {row['seqlen_q']:>8} tokens {row['ms']:>9} ms {each:8.1f} a GPU {share}", flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens",
        type=numbers,
        default=[32768, 65536, 16384, 131072],
        help="of all GPUs together, the most wanted first: a budget that runs out takes from the end",
    )
    parser.add_argument("--heads", default="32:8,32:32", help="of queries and of keys; default: 32:8,32:32")
    parser.add_argument("--head-dim", type=whole, default=128)
    parser.add_argument("--passes", default=",".join(PASSES), help=f"of {', '.join(PASSES)}")
    parser.add_argument("--impls", default=",".join(CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument(
        "--documents",
        nargs="?",
        const="also",
        choices=tuple(DOCUMENTS),
        help="packed documents too, or them only, as they were drawn or balanced",
    )
    parser.add_argument("--graphs", action="store_true", help="calls captured in CUDA graphs")
    parser.add_argument("--ms", type=amount, default=100, help="about how long a round times each; default: 100")
    parser.add_argument("--budget-s", type=amount, default=inf, help="stop after so many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument(
        "--run-id",
        default=f"parallel-{time.strftime('%Y%m%d')}-x{os.environ.get('WORLD_SIZE', 1)}",
        help="that all rows share; torchrun takes --run, as other benchmarks call it, for its own",
    )
    parser.add_argument("--commit", help="what is measured; default: what git says")
    parser.add_argument("--out", type=Path, help="CSV, appended to; default: bench/results/<gpu>.csv")
    args = parser.parse_args(argv)
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    args.heads = [tuple(numbers(heads.replace(":", ","))) for heads in args.heads.split(",")]
    args.passes, args.impls = args.passes.split(","), args.impls.split(",")
    for name, known in (("passes", PASSES), ("impls", CONTENDERS)):
        if unknown := [one for one in getattr(args, name) if one not in known]:
            parser.error(f"--{name}: expected of {', '.join(known)}, got {', '.join(unknown)}")
    if args.graphs and args.device == "cpu":
        parser.error("--graphs: expected a GPU, got --device cpu")
    if any(len(heads) != 2 for heads in args.heads):
        parser.error("--heads: expected such as 32:8,32:32")
    return args


def options_of(device: str) -> Any:
    """NCCL's, of a stream whose kernels get the next SM that is free: attention that fills the GPU would keep them."""
    if device == "cpu":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # pyright: ignore[reportPrivateImportUsage]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cells and write their rows. Returns the exit status: 1 where a contender failed."""
    args = arguments(argv)
    if "RANK" not in os.environ:
        raise SystemExit("expected to be run by torchrun: torchrun --nproc-per-node 2 -m bench.parallel")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", pg_options=options_of(args.device))
    group, ranks, status = dist.group.WORLD, dist.get_world_size(), 0
    clock, file = Clock(args.budget_s, args.device, group), None
    if dist.get_rank() == 0:
        file = Results(args.out or results_path(args.device), args.run_id, args.device, args.commit or head_commit())
    todo = [
        Cell(tokens, heads, heads_kv, args.head_dim, documents, pass_, ranks)
        for tokens in args.tokens
        for documents in DOCUMENTS.get(args.documents, ("",))
        for heads, heads_kv in args.heads
        for pass_ in args.passes
    ]
    for done, cell in enumerate(todo):
        if clock.spent():
            if file is not None:
                print(f"stopped before {len(todo) - done} of {len(todo)} cells: {args.budget_s:.0f} s are gone")
            break
        rows = list(measure(cell, args, group, clock))
        status |= any(str(row.get("why", "")).startswith(FAILED) for row in rows)
        if file is not None:
            file.append(rows)
            report(rows)
    dist.barrier()  # the first rank has written its rows
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    ended = main()
    # Not by Python's own end. torch's `context_parallel` leaves the group in DTensor's caches, so that gloo's threads
    # live on, and one that lets go of a tensor while Python ends aborts the process (pytorch's issue 190489).
    sys.stdout.flush()
    os._exit(ended)
