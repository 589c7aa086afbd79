"""CuTe DSL's schedules, bounds and masks without CuTe DSL: arithmetic on Python's integers."""

from __future__ import annotations

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
