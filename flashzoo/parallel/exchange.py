"""Collectives on whole chunks. Each gives what it will have filled and the work that says when: nothing is to be read,
or let go of, before `wait()`, which makes the current stream wait and, of CUDA tensors, not the host.

NCCL runs what it is given on a stream of the group's own, behind what the current stream had been given by then. So
what the current stream is given between the two runs beside the communication. What sets out together is one kernel of
NCCL's, and `ahead` lets that begin first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from flashzoo.parallel.groups import Ranks

HEAD_START = 20_000
"""Cycles of a GPU's clock, some 10 us: twice what a kernel takes to begin on another stream behind an event."""


class Works:
    """Several works as one, with the tensors that they read and write, which so live as long."""

    def __init__(self, works: Sequence[Any], *kept: Tensor) -> None:
        self.works: Sequence[Any] = works
        self.kept: tuple[Tensor, ...] = kept

    def wait(self) -> None:
        """Has the current stream wait for all of them."""
        for work in self.works:
            work.wait()
        self.kept = ()


def ahead(x: Tensor) -> None:
    """Has the current stream of x's GPU do nothing for `HEAD_START`, so that what has set out gets its SMs.

    A kernel with a thread block for each SM, as those of attention are, follows at once in its stream, while NCCL's
    waits for an event first. It would find no SM free until the other ends, and nothing would be hidden.
    """
    if x.is_cuda:
        with torch.cuda.device(x.device):
            torch.cuda._sleep(HEAD_START)


def gathered(
    xs: Sequence[Tensor], ranks: Ranks, into: Sequence[Tensor] | None = None
) -> tuple[Sequence[Tensor], Works]:
    """`(ranks, *x.shape)` of each x, every rank's. None has gaps."""
    into = [x.new_empty((ranks.size, *x.shape)) for x in xs] if into is None else into
    # torch 2.13 has the newer name for it, and warns of the older
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _coalescing_manager(ranks.group, async_ops=True) as manager:
        for x, every in zip(xs, into, strict=True):
            gather(every.view(-1), x.view(-1), group=ranks.group)
    return into, Works([manager], *xs, *into)


def swapped(lots: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]], ranks: Ranks) -> Works:
    """Of each lot of tensors, one for each rank, the one of every rank that is for this one.

    Args:
        lots: what this rank has for each, and where what each has for this one comes to lie. None has gaps.
    """
    if not lots[0][0][0].is_cuda:  # gloo has no all_to_all of lists before torch 2.13
        for to, into in lots:
            into[ranks.rank].copy_(to[ranks.rank])
        others = [other for other in range(ranks.size) if other != ranks.rank]
        gives = [(other, to[other]) for to, _ in lots for other in others]
        return moved(gives, [(other, into[other]) for _, into in lots for other in others], ranks)
    device = lots[0][0][0].device
    with _coalescing_manager(ranks.group, device, async_ops=True) as manager:
        for to, into in lots:
            dist.all_to_all(list(into), list(to), group=ranks.group, async_op=True)
    return Works([manager], *(x for lot in lots for xs in lot for x in xs))


def passed_on(x: Tensor, ranks: Ranks) -> tuple[Tensor, Works]:
    """The same of the rank before this one, where the one behind it gets x, which has no gaps."""
    before, behind = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    came = torch.empty_like(x)
    return came, moved([(behind, x)], [(before, came)], ranks)


def moved(gives: Sequence[tuple[int, Tensor]], gets: Sequence[tuple[int, Tensor]], ranks: Ranks) -> Works:
    """Tensors without gaps, each to a rank or from one. What goes from one to another is got in the order in which it
    is given."""
    ops = [dist.P2POp(dist.isend, x, group=ranks.group, group_peer=to) for to, x in gives]
    ops += [dist.P2POp(dist.irecv, x, group=ranks.group, group_peer=of) for of, x in gets]
    return Works(dist.batch_isend_irecv(ops) if ops else [], *(x for _, x in (*gives, *gets)))


def met(ranks: Ranks, x: Tensor) -> None:
    """Has all ranks of a group communicate once on x's GPU, before the first call in which some may have nothing to:
    NCCL wants all of them where it begins."""
    if x.is_cuda and not ranks.agreed.met:
        gathered([x.new_zeros(1)], ranks)[1].wait()
        ranks.agreed.met = True
