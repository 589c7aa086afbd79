"""CuTe DSL's schedules, bounds and masks without CuTe DSL: arithmetic on Python's integers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from types import FunctionType


class Memory:
    """A pointer, to what CuTe DSL's tensors are made of."""

    def __init__(self, values: list[int], first: int = 0) -> None:
        self.values, self.first = values, first

    def __add__(self, n: int) -> Memory:
        return Memory(self.values, self.first + n)

    def __getitem__(self, i: int) -> int:
        assert 0 <= self.first + i < len(self.values), "read outside of the tensor"
        return self.values[self.first + i]


def assume(x: int, divby: int) -> int:
    assert x % divby == 0
    return x


def as_written(*owners) -> list[tuple[object, str, FunctionType]]:
    """The functions that CuTe DSL compiles, each a copy: it rewrites them in place when it first compiles one."""
    found = []
    for owner in owners:
        for name, method in vars(owner).items():
            if function := getattr(method, "__wrapped__", None):
                copy = FunctionType(
                    function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
                )
                copy.__kwdefaults__ = function.__kwdefaults__
                found.append((owner, name, copy))
    return found


def missed(walks: Iterable[Iterator[Hashable]], at_once: int = 132, kept: int = 512) -> int:
    """How often L2 has not what a tile reads next, where each of so many thread blocks takes the next tile when it ends
    one, steps take as long, and L2 keeps so much of what was read last."""
    waiting = iter(walks)
    running = [walk for walk, _ in zip(waiting, range(at_once), strict=False)]
    in_l2: OrderedDict[Hashable, None] = OrderedDict()
    found = 0
    while running:
        still = []
        for walk in running:
            read = next(walk, None)
            if read is None and (following := next(waiting, None)) is not None:
                walk, read = following, next(following, None)
            if read is not None:
                found += read not in in_l2
                in_l2[read] = None
                in_l2.move_to_end(read)
                if len(in_l2) > kept:
                    in_l2.popitem(last=False)
                still.append(walk)
        running = still
    return found
