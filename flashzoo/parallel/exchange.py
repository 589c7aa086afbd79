"""Collectives on whole chunks. Each gives what it will have filled and the work that says when: nothing is to be read,
or let go of, before `wait()`, which makes the current stream wait and, of CUDA tensors, not the host.

NCCL runs what it is given on a stream of the group's own, behind what the current stream had been given by then. So
what the current stream is given between the two runs beside the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashzoo.parallel.groups import Ranks


class Works:
    """Several works as one, with the tensors that they read, which so live as long."""

    def __init__(self, works: Sequence[Any], *kept: Tensor) -> None:
        self.works, self.kept = works, kept

    def wait(self) -> None:
        """Has the current stream wait for all of them."""
        for work in self.works:
            work.wait()
        self.kept = ()


def gathered(x: Tensor, ranks: Ranks, into: Tensor | None = None) -> tuple[Tensor, Works]:
    """`(ranks, *x.shape)`, every rank's x. Neither has gaps."""
    every = x.new_empty((ranks.size, *x.shape)) if into is None else into
    # torch 2.13 has the newer name for it, and warns of the older
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(every.view(-1), x.view(-1), group=ranks.group, async_op=True)
    return every, Works([work], x)


def swapped(to: Sequence[Tensor], ranks: Ranks, into: Sequence[Tensor] | None = None) -> tuple[Sequence[Tensor], Works]:
    """What each rank has for this one, in the order of the ranks; `to` is what this one has for each. None has gaps."""
    into = [torch.empty_like(x) for x in to] if into is None else into
    into[ranks.rank].copy_(to[ranks.rank])
    # dist.all_to_all is the same to NCCL, and gloo has none of lists before torch 2.13
    ops = [
        op
        for other in range(ranks.size)
        if other != ranks.rank
        for op in (
            dist.P2POp(dist.isend, to[other], group=ranks.group, group_peer=other),
            dist.P2POp(dist.irecv, into[other], group=ranks.group, group_peer=other),
        )
    ]
    return into, Works(dist.batch_isend_irecv(ops) if ops else [], *to, *into)


def passed_on(x: Tensor, ranks: Ranks) -> tuple[Tensor, Works]:
    """The same of the rank before this one, where the one behind it gets x, which has no gaps."""
    before, behind = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    came = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x, group=ranks.group, group_peer=behind),
        dist.P2POp(dist.irecv, came, group=ranks.group, group_peer=before),
    ]
    return came, Works(dist.batch_isend_irecv(ops), x, came)
