"""A small GPT trained with several versions, from the same weights on the same batches: do their loss curves agree?

    python examples/train_gpt.py                        # what `auto` takes here, beside torch's sdpa
    python examples/train_gpt.py --versions v3,v2 --head-dim 128 --compile --out curves

Correct kernels round differently, each step of training carries that on, and by how much the curves then part nobody
can say beforehand. So it is measured: with the channels of the residual stream in another order, in all weights alike,
the function, its gradients and AdamW's steps stay what they were, but sums over channels are added up in another order.
sdpa trained so, a few times over, shows how far rounding alone drives a curve. A version agrees where its largest
distance from sdpa, losses smoothed, is at most `LIMIT` times theirs. The exit status is 0 where all agree, 1 where one
doesn't, 2 where one can't run.
"""

from __future__ import annotations

import argparse
import csv
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashzoo

BASELINE = "sdpa"
LIMIT = 3.0
"""Of eight reorderings (4 layers, hidden 128, bf16 on a CPU, 300 steps at 3e-3) the farthest was 2.7 times as far as
the nearest: a right version stays below this even beside near ones."""
FLOOR = 1e-5
"""Nats that a version may always differ by: the last digits of a loss in float32, where ratios mean nothing."""
TEXT_BYTES = 8 << 20
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Linear = partial(nn.Linear, bias=False)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream `(batch, seqlen, hidden)`."""

    def __init__(self, hidden: int, head_dim: int, version: str) -> None:
        super().__init__()
        self.head_dim, self.version = head_dim, version
        self.norm_1, self.qkv, self.project = nn.LayerNorm(hidden), Linear(hidden, 3 * hidden), Linear(hidden, hidden)
        self.norm_2, self.up, self.down = nn.LayerNorm(hidden), Linear(hidden, 4 * hidden), Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        x = x + self.project(flashzoo.attention(q, k, v, causal=True, version=self.version).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Bytes `(batch, seqlen)` to logits of each next byte `(batch, seqlen, 256)`;
    positions learned, embeddings tied."""

    def __init__(self, args: argparse.Namespace, version: str, reordering: int | None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, args.hidden), nn.Embedding(args.seqlen, args.hidden)
        self.blocks = nn.Sequential(*(Block(args.hidden, args.head_dim, version) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.hidden)
        order = torch.arange(args.hidden)
        if reordering is not None:
            order = torch.randperm(args.hidden, generator=torch.Generator().manual_seed(reordering))
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # the norms' are alike in every channel
                to_residual = name.endswith(("project.weight", "down.weight"))
                drawn = torch.randn(weight.shape) * (0.02 / (2 * args.layers) ** 0.5 if to_residual else 0.02)
                weight.data = drawn[order] if to_residual else drawn[:, order]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def train(args: argparse.Namespace, name: str, version: str, reordering: int | None) -> tuple[Tensor, float]:
    """Train one model. Returns the loss of each step, nats a byte, float64,
    and the seconds of a step, the first tenth left out."""
    torch.manual_seed(args.seed)
    model = GPT(args, version, reordering).to(args.device)
    forward = model
    if args.compile:
        torch.compiler.reset()  # earlier models would count towards the limit of recompilations
        forward = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 10 * (step + 1) / args.steps))
    starts = torch.randint(len(args.data) - args.seqlen, (args.steps, args.batch, 1)).to(args.device)
    span = torch.arange(args.seqlen + 1, device=args.device)
    losses, untimed, begin = [], args.steps // 10, 0.0
    for step in progress(args.steps, name):
        if step == untimed:
            begin = now(args.device)
        ids = args.data[starts[step] + span].long()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = forward(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu(), (now(args.device) - begin) / (args.steps - untimed)


def progress(steps: int, name: str) -> Iterable[int]:
    """The steps, under a terminal with a bar (rich, of the extra `cli`)."""
    if not sys.stdout.isatty():
        return range(steps)
    from rich.progress import track

    return track(range(steps), name, transient=True)


def now(device: str) -> float:
    """Seconds, all that the GPU was given being done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def text(paths: list[Path]) -> Tensor:
    """The files' bytes, uint8, `TEXT_BYTES` at most; where none are given, those of Python's own library."""
    paths = paths or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)[:TEXT_BYTES]), dtype=torch.uint8)


def smoothed(losses: Tensor) -> Tensor:
    """The mean over each window of a fifteenth of the steps."""
    return losses.unfold(0, max(1, len(losses) // 15), 1).mean(-1)


def report(
    args: argparse.Namespace, curves: dict[str, Tensor], seconds: dict[str, float], reordered: Sequence[str]
) -> int:
    """Print the table and a verdict for each version. Returns how many do not agree."""
    distances = {name: smoothed(losses - curves[BASELINE]).abs().max().item() for name, losses in curves.items()}
    last = torch.arange(1, args.steps + 1)[-len(smoothed(curves[BASELINE])) :]  # step of each window
    shown = torch.linspace(0, len(last) - 1, 6).long().unique()
    sizes = f"{args.layers} layers, hidden {args.hidden}, head_dim {args.head_dim}, {args.batch} x {args.seqlen} bytes"
    print(f"{sizes}, {args.dtype}, {args.device}")
    steps = "".join(f"{step:8}" for step in last[shown].tolist())
    print(f"{'nats a byte, smoothed':24}{steps}{'distance':>10}{'ms a step':>11}{'tokens/s':>10}")
    for name, losses in curves.items():
        speed = f"{1e3 * seconds[name]:11.1f}{args.batch * args.seqlen / seconds[name]:10.0f}"
        print(
            f"{name:24}{''.join(f'{loss:8.4f}' for loss in smoothed(losses)[shown].tolist())}{distances[name]:10.1e}"
            f"{speed}"
        )
    noise = max(distances[name] for name in reordered)
    limit = max(LIMIT * noise, FLOOR)
    parted = [name for name in args.versions if not distances[name] <= limit]  # so NaN is one
    for name in args.versions:
        verdict = "PARTS from" if name in parted else "agrees with"
        print(
            f"{name} {verdict} {BASELINE}: {distances[name]:.1e} nats apart; "
            f"{noise:.1e} by reordering alone, {limit:.1e} allowed"
        )
    return len(parted)


def save(curves: dict[str, Tensor], folder: Path) -> None:
    """losses.csv, a row for each step and a column for each run, and losses.png where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *curves])
        writer.writerows([step, *losses] for step, losses in enumerate(torch.stack([*curves.values()], 1).tolist(), 1))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for name, losses in curves.items():
        style = "--" if "reordered" in name else "-"
        for axes, line in ((above, smoothed(losses)), (below, smoothed(losses - curves[BASELINE]))):
            axes.plot(
                range(len(losses) - len(line) + 1, len(losses) + 1), line.tolist(), style, label=name, linewidth=1
            )
    above.legend()
    above.set_ylabel("loss, nats a byte, smoothed")
    below.set_ylabel(f"minus {BASELINE}'s")
    below.set_xlabel("step")
    figure.savefig(folder / "losses.png", dpi=120)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked. `versions` becomes a dict: what to ask for, by the name of who answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--versions", default="auto", help=f"such as v3,v2, beside {BASELINE}; standard where that leaves none"
    )
    sizes = {
        "steps": 300,
        "batch": 8,
        "seqlen": 1024,
        "layers": 12,
        "hidden": 768,
        "head_dim": 64,
        "reorderings": 2,
        "seed": 0,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--lr", type=float, default=6e-4, help="reached after a tenth of the steps; default: 6e-4")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], help="files to train on; default: the sources of Python's library"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument(
        "--dtype", choices=DTYPES, help="bf16 by autocast, weights float32; default: bf16 on a GPU, fp32 on a CPU"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile(model, fullgraph=True)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write losses.csv there and, with matplotlib, losses.png"
    )
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    if args.hidden % args.head_dim:
        parser.error(f"--hidden: expected a multiple of --head-dim {args.head_dim}, got {args.hidden}")
    if args.reorderings < 1:
        parser.error(f"--reorderings: expected at least 1, got {args.reorderings}")
    if len(data := text(args.text)) <= args.seqlen:
        parser.error(f"--text: expected more than --seqlen {args.seqlen} bytes, got {len(data)}")
    args.data = data.to(args.device)
    shape = (args.batch, args.seqlen, args.hidden // args.head_dim, args.head_dim)
    q = torch.empty(shape, dtype=DTYPES[args.dtype], device=args.device, requires_grad=True)
    try:
        answers = [flashzoo.explain(q, q, q, causal=True, version=version) for version in args.versions.split(",")]
    except ValueError as error:
        parser.error(f"--versions: {error}")
    if refused := [str(answer) for answer in answers if answer.chosen is None]:
        parser.error("--versions: " + "\n".join(refused))
    args.versions = {answer.chosen: answer.wanted for answer in answers if answer.chosen != BASELINE} or {
        "standard": "standard"
    }
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train each, compare, report. Returns the exit status."""
    args = arguments(argv)
    reordered = {f"{BASELINE}, reordered {i}": (BASELINE, i) for i in range(1, args.reorderings + 1)}
    runs = {
        BASELINE: (BASELINE, None),
        **reordered,
        **{name: (version, None) for name, version in args.versions.items()},
    }
    curves, seconds = {}, {}
    for name, (version, reordering) in runs.items():
        curves[name], seconds[name] = train(args, name, version, reordering)
    if args.out:
        save(curves, args.out)
    return int(report(args, curves, seconds, [*reordered]) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
