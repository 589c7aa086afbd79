"""The arithmetic by which a method is chosen: bytes between GPUs, FLOPs, and what of the one the other hides.

What is counted is what one rank receives; of K and V of the whole, (P-1)/P of them in `gather` and `ring`. Times are
those of the H200s that `docs/context_parallel.md` tells of. Another GPU's differ in size, hardly in order.

Of packed sequences the host knows no length but the longest there may be. So nothing is said to be hidden behind work;
and where rows are shared out, and not heads, a rank may have a longest sequence all to itself (`uneven`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flashzoo.integers import cdiv
from flashzoo.parallel.halo import planned
from flashzoo.parallel.pieces import Band

FORWARD_RATE, BACKWARD_RATE = 700e12, 620e12
"""FLOP/s of one GPU, bf16, head_dim 128, causal."""
BACKWARD_FLOPS = 2.5
"""Of the backward pass, over the forward pass's."""
LINK = 243e9
"""Bytes/s into one rank of a collective within a host: what NVLink gave an all-gather of 256 MB (180e9 at 32 MB)."""
NETWORK = 45e9
"""Bytes/s into one GPU from other hosts: one port of 400 Gbit/s each, at 90 %."""
HOST = 8
"""GPUs that NVLink joins."""
LATENCY = 1e-4
"""Seconds that a call of attention, a merge or a collective more costs beside what it computes and moves, as two and
four H200s had it at 8k to 64k tokens each."""
OF_STEP = 4
"""How many of these a ring's step is: keys and values passed on, attention on each of two chunks, and a merge."""
MEMORY = 4e12
"""Bytes/s of one GPU's memory, read and written."""
MERGED = 14
"""Bytes of memory that move for each number of out where a row is merged from two parts, float32 at most."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A call on all ranks.

    Attributes:
        batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v: of the whole.
        itemsize: bytes of a number of q, k and v.
        band: what a query sees.
        packed: it is of packed sequences.
        ranks, chunks: how many share it, and how many chunks each has.
        grad: a backward pass may follow.
        longest: of packed sequences, how many rows one has at most.
        told: the caller says so; else it is all.
        across: how many rows one has at most that lies in more than one chunk; None where the caller says nothing.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    itemsize: int
    band: Band
    packed: bool
    ranks: int
    chunks: int
    grad: bool
    longest: int = 0
    told: bool = False
    across: int | None = None

    @property
    def keys_a_row(self) -> int:
        """Bytes of a row's keys and values."""
        return self.batch * self.heads_kv * (self.head_dim + self.head_dim_v) * self.itemsize

    @property
    def keys(self) -> int:
        """Bytes of all keys and values."""
        return self.seqlen_k * self.keys_a_row

    @property
    def step(self) -> int:
        """Rows of a chunk, padding among them."""
        return cdiv(self.seqlen_q, self.ranks * self.chunks)

    @property
    def furthest(self) -> int:
        """Rows at most of a sequence that lies in more than one chunk."""
        return self.longest if self.across is None else min(self.longest, self.across)

    @property
    def uneven(self) -> float:
        """Seconds that the forward pass takes longer than on average on a rank with a longest sequence to itself, or
        with its last rows where it has more than a rank. Who says how long those are that chunks share has put them in
        an order, as `balanced` does, which cuts the longest where half of its work lies on either side."""
        if not self.told:
            return 0.0
        longest, (left, right) = self.longest, self.band
        mine = min(longest, self.chunks * self.step)
        most, all_ = (mine * (longest - mine / 2), longest**2 / 2) if right == 0 else (mine * longest, longest**2)
        if left is not None:
            most, all_ = min(most, mine * (left + 1)), min(all_, longest * (left + 1))
        if self.across is not None:
            most = min(most, all_ / 2)
        return max(0.0, self.flops(most - all_ / self.ranks)) / FORWARD_RATE

    @property
    def summed(self) -> int:
        """Bytes of a number in which sums travel."""
        return max(self.itemsize, 4)

    def flops(self, pairs: float) -> float:
        """Of the forward pass over so many pairs of a query and a key."""
        return 2 * self.batch * self.heads * pairs * (self.head_dim + self.head_dim_v)


class Cost(NamedTuple):
    """What one rank receives in a pass, in bytes, and the seconds that it loses by that: waiting, merging, copying, and
    in a ring's steps working at a lower rate."""

    bytes: float
    lost: float


class Costs(NamedTuple):
    """A method's. `held` is bytes of others' keys and values, or of its own share of all of them, that lie in a rank's
    memory at once."""

    forward: Cost
    backward: Cost
    held: float

    @property
    def lost(self) -> float:
        """Seconds that are lost, of both passes."""
        return self.forward.lost + self.backward.lost


def pairs(seqlen_q: int, seqlen_k: int, band: Band) -> float:
    """How many keys all queries see together, aligned as `attention` does; a window's ends are not looked at."""
    left, right = band
    full = seqlen_q * seqlen_k
    above = full if right is None else min(full, seqlen_q * right + seqlen_q * seqlen_k - seqlen_q * seqlen_q / 2)
    return min(above, full if left is None else seqlen_q * (left + 1 + (seqlen_k if right is None else right)))


def seconds(received: float, ranks: int, *, once_a_host: bool = False) -> float:
    """How long a rank receives so many bytes from all others alike.

    Args:
        once_a_host: the same bytes go to all ranks, so that a host's GPUs can each take a share from other hosts.
    """
    if ranks <= HOST:
        return received / LINK
    outside = received * (ranks - HOST) / (ranks - 1)
    return max((outside / HOST if once_a_host else outside) / NETWORK, received / LINK)


def of_gather(s: Sizes) -> Costs:
    """All-gather of keys and values; backward once more, and shares of their gradients all-to-all."""
    received = s.keys * (s.ranks - 1) / s.ranks
    own, each = _own_seconds(s), s.chunks if s.band != (None, None) else 1
    merged = s.batch * s.seqlen_q / s.ranks * s.heads * s.head_dim_v * MERGED / MEMORY
    there = seconds(received, s.ranks, once_a_host=True)
    back = seconds(received, s.ranks)
    merged += s.uneven
    own_b = _backward(own) / each
    backward = max(0.0, there - own_b) + max(0.0, back - own_b * (each - 1)) + _backward(s.uneven)
    forward, parted = max(0.0, there - own) + merged, (2 * each - 1) * LATENCY
    return Costs(Cost(received, forward + parted), _if_grad(s, Cost(2 * received, backward + parted)), s.keys)


def of_ring(s: Sizes) -> Costs:
    """P - 1 steps of a shard of keys and values; backward once more, with gradients in float32, and one step home."""
    shard = s.keys / s.ranks
    slowest = LINK if s.ranks <= HOST else NETWORK
    step = s.flops(pairs(s.seqlen_q, s.seqlen_k, s.band)) / s.ranks**2 / FORWARD_RATE if not s.packed else 0.0
    merged = s.batch * s.seqlen_q / s.ranks * s.heads * s.head_dim_v * MERGED / MEMORY
    forward = (s.ranks - 1) * (max(0.0, shard / slowest - step) + merged + OF_STEP * LATENCY) + s.uneven
    gradients = shard * s.summed / s.itemsize
    step_b = _backward(step)
    waited = max(0.0, (shard + gradients) / slowest - step_b) + OF_STEP * LATENCY
    backward = (s.ranks - 1) * waited + gradients / slowest + _backward(s.uneven)
    received = shard * (s.ranks - 1)
    return Costs(Cost(received, forward), _if_grad(s, Cost(received + s.ranks * gradients, backward)), 2 * shard)


def of_ulysses(s: Sizes, copies: int) -> Costs:
    """All-to-all of q, k, v and out; backward the same. Of k and v, `copies` where ranks share a head."""
    queries = s.batch * s.seqlen_q * s.heads * (s.head_dim + s.head_dim_v) * s.itemsize
    held = s.keys * copies / s.ranks
    received = (queries / s.ranks + held) * (s.ranks - 1) / s.ranks
    copied = 4 * (queries / s.ranks + held) / MEMORY
    cost = Cost(received, seconds(received, s.ranks) + copied + LATENCY)
    return Costs(cost, _if_grad(s, cost), held)


def of_halo(s: Sizes) -> Costs:
    """Of packed sequences: keys and values of the rows around each chunk, and backward their gradients home; those of
    the rank's own rows that belong to the edges are copied beside them, and their gradients from there."""
    some = {rank for rank in (0, 1, s.ranks - 1) if 0 <= rank < s.ranks}  # who gets most is one of these
    plans = [planned(rank, s.ranks, s.step, s.chunks, s.seqlen_q, s.furthest, s.band) for rank in some]
    plan = max(plans, key=lambda plan: plan.received)
    received, slowest = plan.received * s.keys_a_row, LINK if s.ranks <= HOST else NETWORK
    moved = received / slowest + 2 * plan.at_hand * s.keys_a_row / MEMORY + s.chunks * LATENCY
    backward = Cost(received, moved + _backward(s.uneven))
    return Costs(Cost(received, moved + s.uneven), _if_grad(s, backward), received)


METHODS: dict[str, Callable[[Sizes, int], Costs]] = {
    "gather": lambda s, copies: of_gather(s),
    "ulysses": of_ulysses,
    "ring": lambda s, copies: of_ring(s),
    "halo": lambda s, copies: of_halo(s),
}
"""In the order in which they are taken where they cost the same."""


def _own_seconds(s: Sizes) -> float:
    """Of the calls on the diagonal, forward; 0 where nothing is known of it."""
    if s.packed:
        return 0.0
    chunks = s.chunks if s.band != (None, None) else 1
    step_q, step_k = s.seqlen_q // (s.ranks * chunks), s.seqlen_k // (s.ranks * chunks)
    return chunks * s.flops(pairs(step_q, step_k, s.band)) / FORWARD_RATE


def _backward(forward: float) -> float:
    """Seconds of the backward pass over what takes the forward pass so long."""
    return forward * BACKWARD_FLOPS * FORWARD_RATE / BACKWARD_RATE


def _if_grad(s: Sizes, cost: Cost) -> Cost:
    return cost if s.grad else Cost(0.0, 0.0)
