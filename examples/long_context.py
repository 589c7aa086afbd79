"""A small GPT whose sequences are shared out over several processes, and the same one trained by one process alone.

    torchrun --nproc-per-node 2 examples/long_context.py                              # NCCL on GPUs, gloo on CPUs
    torchrun --nproc-per-node 2 examples/long_context.py --seqlen 262144 --layers 9 --hidden 2048 --head-dim 128 \\
        --heads-kv 4 --steps 2              # what two H200s have memory for, and one has not; four have for 786432

Each rank has its rows of every sequence, which `parallel.positions` says: of the bytes, of the labels, and of the
angles that rotary embeddings turn by. Everything but attention works on rows and knows nothing of ranks, and DDP
averages the weights' gradients as it does over batches. Then the first rank trains the same model on whole sequences:
the losses of each step differ by what sums in another order round differently. The exit status is 0 where they never
differ by more than `--limit` nats, 1 where they do. Where whole sequences are too long for one GPU's memory that is
told, and there is nothing to compare.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import flashzoo
from flashzoo import parallel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
LIMITS = {"bf16": 0.05, "fp32": 1e-3, "fp64": 1e-8}
"""Nats that two curves may be apart, where every step carries on how the one before rounded."""


class Block(nn.Module):
    """Attention, with rotary embeddings, and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        hidden, self.head_dim, self.heads_kv = args.hidden, args.head_dim, args.heads_kv
        of_kv = 2 * args.heads_kv * args.head_dim
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.project = nn.Linear(hidden, hidden + of_kv), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, angles: Tensor, how: dict[str, Any]) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((qkv.shape[2] - 2 * self.heads_kv, self.heads_kv, self.heads_kv), 2)
        q, k = turned(q, angles), turned(k, angles)
        attention = parallel.attention if "group" in how else flashzoo.attention
        x = x + self.project(attention(q, k, v, causal=True, **how).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of `(batch, seqlen, heads, head_dim)` by `(seqlen, 1, head_dim / 2)` angles."""
    real, imaginary = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)


class GPT(nn.Module):
    """Bytes `(batch, rows)` and where in the sequence the rows are to logits of each next byte `(batch, rows, 256)`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(256, args.hidden), nn.LayerNorm(args.hidden)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.head, self.rates = nn.Linear(args.hidden, 256), args.head_dim // 2

    def forward(self, ids: Tensor, positions: Tensor, how: dict[str, Any]) -> Tensor:
        rates = 10000.0 ** -(torch.arange(self.rates, device=ids.device) / self.rates)
        angles = (positions[:, None] * rates)[:, None]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, angles, how)
        return self.head(self.norm(x))


def train(args: argparse.Namespace, group: Any) -> tuple[Tensor, float]:
    """Train on this rank's rows of each sequence, or without a group on whole ones. Returns the loss of each step over
    all rows, nats a byte, and the seconds of a step, the first left out; NaN where there is no other."""
    torch.manual_seed(args.seed)
    weights = torch.float64 if args.dtype == "fp64" else torch.float32
    model = GPT(args).to(args.device, weights)
    how: dict[str, Any] = {"version": args.version}
    positions, forward = torch.arange(args.seqlen, device=args.device), model
    if group is not None:
        positions = parallel.positions(args.seqlen, group, device=args.device)
        how |= {"group": group, "method": args.method}
        forward = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    data = args.data.to(args.device)
    starts = torch.randint(len(data) - args.seqlen, (args.steps, args.batch, 1)).to(args.device)
    losses, begin = [], 0.0
    for step in range(args.steps):
        if step == 1:
            begin = now(args.device)
        ids = data[starts[step] + positions].long()
        labels = data[starts[step] + positions + 1].long()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = forward(ids, positions, how)
        loss = F.cross_entropy(logits.to(weights).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if group is not None:  # all ranks have as many rows: the mean of their means is the whole's
            dist.all_reduce(loss, group=group)
            loss /= dist.get_world_size(group)
        losses.append(loss)
    seconds = (now(args.device) - begin) / (args.steps - 1) if args.steps > 1 else math.nan
    return torch.stack(losses).double().cpu(), seconds


def now(device: str) -> float:
    """Seconds, all that the GPU was given being done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def text(paths: list[Path], at_least: int) -> Tensor:
    """The files' bytes, uint8; where none are given, those of Python's own library, over again until they suffice."""
    paths = paths or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(found * (1 + at_least // len(found))), dtype=torch.uint8)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "steps": 50,
        "batch": 1,
        "seqlen": 4096,
        "layers": 4,
        "hidden": 256,
        "head_dim": 64,
        "heads_kv": 2,
        "seed": 0,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--method", default="auto", choices=("auto", "gather", "ulysses", "ring"))
    parser.add_argument("--version", default="auto", help="of flashzoo.attention, as flashzoo.versions() has them")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files; default: Python's library's sources")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 (autocast) on a GPU, fp32 on a CPU")
    parser.add_argument("--no-alone", action="store_true", help="train on all ranks only, and compare nothing")
    parser.add_argument("--limit", type=float, help=f"nats that losses may be apart; default by dtype: {LIMITS}")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    args.limit = LIMITS[args.dtype] if args.limit is None else args.limit
    if args.hidden % args.head_dim or args.hidden // args.head_dim % args.heads_kv:
        parser.error(
            "--hidden: expected --head-dim times a multiple of --heads-kv, "
            f"got {args.hidden}, {args.head_dim} and {args.heads_kv}"
        )
    args.data = text(args.text, args.seqlen + 2)
    return args


def pace(seconds: float) -> str:
    """What is printed of a step's seconds, if they are known."""
    return "" if math.isnan(seconds) else f", {1e3 * seconds:.1f} ms a step"


def compare(args: argparse.Namespace, losses: Tensor, ranks: int) -> int:
    """Train alone, and tell how far apart the losses are. Returns the exit status."""
    try:
        alone, seconds = train(args, None)
    except torch.OutOfMemoryError as error:
        print(f"1 rank:  out of memory, so there is nothing to compare: {str(error).partition('. ')[0]}")
        return 0
    apart = (losses - alone).abs().max().item()
    status = int(not apart <= args.limit)  # so NaN is apart
    print(f"1 rank:  loss {alone[0]:.4f} to {alone[-1]:.4f}{pace(seconds)}")
    verdict = "PART from" if status else "agree with"
    print(f"{ranks} ranks {verdict} one: {apart:.1e} nats apart at most, {args.limit:.1e} allowed")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Train on all ranks, then alone, and report. Returns the exit status."""
    args = arguments(argv)
    if "RANK" not in os.environ:
        print("expected to be run by torchrun: torchrun --nproc-per-node 2 examples/long_context.py", file=sys.stderr)
        return 2
    chunks = 2 * int(os.environ["WORLD_SIZE"])
    if args.seqlen % chunks:
        print(f"--seqlen: expected a multiple of {chunks}, two chunks a rank, got {args.seqlen}", file=sys.stderr)
        return 2
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    group = dist.group.WORLD
    status, ranks = 0, dist.get_world_size()
    losses, seconds = train(args, group)
    memory = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    if dist.get_rank() == 0:
        more = f", {memory:.1f} GiB a GPU" if memory else ""
        print(f"{args.layers} layers, hidden {args.hidden}, {args.batch} x {args.seqlen} bytes, {args.dtype}")
        print(f"{ranks} ranks: loss {losses[0]:.4f} to {losses[-1]:.4f}{pace(seconds)}{more}")
        if not args.no_alone:
            status = compare(args, losses, ranks)
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
