"""The clock that `compare` and the benchmark have."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from bench import run
from flashzoo import timing


def test_nothing_is_timed_after_the_deadline():
    calls = []
    clock = timing.Clock("cpu", time.monotonic() - 1)
    with pytest.raises(timing.OutOfTimeError):
        clock.measure({"a": lambda: calls.append(1)}, 1)
    assert not calls and clock.out_of_time and not timing.Clock("cpu").out_of_time


class FakeGpu:
    """torch.cuda's allocator and queue, as far as `run.costs` asks them."""

    def __init__(self, monkeypatch) -> None:
        self.given, self.most, self.busy = 100 << 20, 0, True
        for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def synchronize(self, device) -> None:
        self.busy = False

    def reset_peak_memory_stats(self, device) -> None:
        self.most = self.given

    def memory_allocated(self, device) -> int:
        return self.given

    def max_memory_allocated(self, device) -> int:
        return self.most

    def call(self) -> None:
        assert not self.busy, "an operation was still running"
        self.busy, self.most = True, max(self.most, self.given + (24 << 20))
        time.sleep(1e-3)


def test_memory_and_host_time_are_of_one_call_on_an_idle_gpu(monkeypatch):
    gpu, clock = FakeGpu(monkeypatch), timing.Clock("cpu")
    gpu.most = 900 << 20  # of something before
    assert run.costs(clock, gpu.call) == {}
    clock.cuda = True
    costs = run.costs(clock, gpu.call)
    assert list(costs) == ["peak_mib", "host_us"] and costs["peak_mib"] == "24"
    assert 1e3 <= float(str(costs["host_us"])) < 1e5


def test_slow_calls_are_few():
    calls = []
    assert timing.Clock("cpu").host_us(lambda: calls.append(time.sleep(0.06))) >= 6e4
    assert len(calls) == 1


def test_repeats_are_spread_over_the_rounds():
    order = []
    operations: dict[str, timing.Operation] = {name: partial(order.append, name) for name in "ab"}
    times = timing.Clock("cpu").turns(operations, {"a": 2, "b": 4})
    rounds = ["".join(order)[i:j] for i, j in ((0, 1), (1, 3), (3, 4), (4, 6))]
    assert ["".join(sorted(one)) for one in rounds] == ["b", "ab", "b", "ab"]
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 4}


def test_what_has_few_repeats_is_not_all_in_the_same_rounds():
    order = []
    repeats = {**dict.fromkeys("abcdefgh", 10), "-": 120}
    operations: dict[str, timing.Operation] = {name: partial(order.append, name) for name in repeats}
    times = timing.Clock("cpu").turns(operations, repeats)
    assert {name: len(taken) for name, taken in times.items()} == repeats
    longest = max(map(len, "".join(order).split("-")))
    assert longest <= 4, "of eight"


def test_rounds_have_orders_of_their_own():
    order = []
    operations: dict[str, timing.Operation] = {name: partial(order.append, name) for name in "abc"}
    timing.Clock("cpu").turns(operations, dict.fromkeys("abc", 40))
    rounds = [tuple(order[i : i + 3]) for i in range(0, 120, 3)]
    assert all(set(one) == set("abc") for one in rounds) and len(set(rounds)) > 3
