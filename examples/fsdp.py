"""A small model in the style of torchtitan, sharded by FSDP2: does each rank train as one process does on all batches?

    python examples/fsdp.py                                     # two processes on a CPU
    torchrun --nproc-per-node 8 examples/fsdp.py --hidden 1024  # a process for each GPU

Attention knows nothing of it: `fully_shard` gathers the weights of a block before it runs, and `flashzoo.attention`
sees whole tensors of the rank's own sequences. A step is held to the same step without sharding, on all ranks'
sequences: losses and the norm of all gradients. The exit status is 0 where they agree, else 1.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

import flashzoo

LIMIT = 1e-4
"""Of the relative distance, in float32: sums over ranks are added up in another order."""


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm and added to `(batch, seqlen, hidden)`."""

    def __init__(self, hidden: int, heads: int, version: str) -> None:
        super().__init__()
        self.heads, self.attend = heads, partial(flashzoo.attention, causal=True, version=version)
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.project(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.norm_2(x))


def model_of(args: argparse.Namespace, device: torch.device) -> nn.Sequential:
    """Tokens `(batch, seqlen)` to logits; the same weights on every rank."""
    torch.manual_seed(args.seed)
    blocks = (Block(args.hidden, args.heads, args.version) for _ in range(args.layers))
    ends = nn.Embedding(args.vocabulary, args.hidden), nn.Linear(args.hidden, args.vocabulary)
    return nn.Sequential(ends[0], *blocks, ends[1]).to(device)


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Each block's weights spread over the ranks, and then what is left."""
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the next tokens, and the norm of all gradients."""
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    squares = [x.grad.norm() ** 2 for x in model.parameters() if x.grad is not None]
    squares = [x.full_tensor() if isinstance(x, DTensor) else x for x in squares]
    return loss.detach(), torch.stack(squares).sum().sqrt()


def train(rank: int, world: int, args: argparse.Namespace) -> None:
    """One rank: a step sharded and a step whole. Raises where they part."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if args.gpu else torch.device("cpu")
    if args.gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.gpu else "gloo", rank=rank, world_size=world)
    try:
        model = model_of(args, device)
        tokens = torch.randint(args.vocabulary, (world * args.batch, args.seqlen + 1), device=device)
        whole = step(copy.deepcopy(model), tokens)
        mesh = init_device_mesh(device.type, (world,))
        loss, norm = step(sharded(model, mesh), tokens.chunk(world)[rank])
        dist.all_reduce(loss)
        for name, found, wanted in (("loss", loss / world, whole[0]), ("gradients", norm, whole[1])):
            far = float((found - wanted).abs() / wanted)
            if rank == 0:
                print(f"{name}: {float(found):.6f} on {world} ranks, {float(wanted):.6f} on one, {far:.1e} apart")
            if not far <= LIMIT:
                raise SystemExit(f"{name} parts from that of one process")
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """As torchrun's process, or as two of its own. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "seqlen": 64, "batch": 2, "vocabulary": 99, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--version", default="auto", help="of flashzoo; default: auto")
    args = parser.parse_args(argv)
    args.gpu = "RANK" in os.environ and torch.cuda.is_available()
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args)
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    # forked, and so with torch in them: nothing here has touched a GPU or begun a thread
    start_processes(train, (2, args), nprocs=2, start_method="fork")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
