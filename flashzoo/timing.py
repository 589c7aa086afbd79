"""Times operations in turns, the L2 cache emptied before each: what `compare` and the benchmark measure with.
On a CPU by the clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil, inf
from typing import TypeVar

import torch

FLUSH_BYTES = 256 << 20
"""What is written before each operation, so that L2 holds nothing of what it reads."""
MIN_REPEATS, MAX_REPEATS = 10, 300
MIN_SHARED, MAX_SHARED = 3, 100
"""Repeats of each operation where all of them share the time that there is."""
SETTLE_MS = 400
GOLDEN = 0.618034
"""Steps of this size, modulo 1, are spread evenly however many they are."""
HOST_CALLS, HOST_S = 20, 0.05
"""The host is timed over so many calls, or as many as take so long."""
WARM_UPS = 2
"""Calls before one is captured: the first has written what the second finds ready."""

Operation = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one operation: median, 10th and 90th percentile, and of how many runs."""

    ms: float
    p10: float
    p90: float
    repeats: int

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """Of the milliseconds of each run."""
        at, times_of = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in ([0.1, 0.5, 0.9], times))
        p10, middle, p90 = times_of.quantile(at).tolist()
        return cls(middle, p10, p90, len(times))


class OutOfTimeError(Exception):
    """The clock's deadline is past."""


class Clock:
    """Times operations, which have any names, in turns, on CUDA events or, on the CPU, on the process's own clock.

    Args:
        device: a GPU or the CPU.
        deadline: of `time.monotonic`; nothing is begun after it.
    """

    def __init__(self, device: torch.device | str, deadline: float = inf) -> None:
        self.device: torch.device = torch.device(device)
        self.deadline: float = deadline
        self.cuda: bool = self.device.type == "cuda"
        self.flushed: torch.Tensor = torch.empty(FLUSH_BYTES if self.cuda else 0, dtype=torch.int8, device=device)

    def turns(self, operations: Mapping[Name, Operation], repeats: Mapping[Name, int]) -> dict[Name, list[float]]:
        """Milliseconds of every repeat, by name; the repeats of each operation are spread evenly over the rounds.

        Each round has an order of its own, and operations with few repeats have other rounds: a GPU at its power limit
        is slower behind an operation that draws more, and none shall always follow the same one. Raises OutOfTimeError.
        """
        rounds = max(repeats.values(), default=0)
        first = {name: int(place * GOLDEN % 1 * rounds) for place, name in enumerate(operations)}
        stops: dict[Name, list[Callable[[], float]]] = {name: [] for name in operations}
        shuffle = random.Random(0).sample
        with torch.cuda.device(self.device) if self.cuda else nullcontext():
            for turn in range(rounds):
                for name in shuffle(list(operations), len(operations)):
                    if (turn * repeats[name] + first[name]) // rounds != (
                        (turn + 1) * repeats[name] + first[name]
                    ) // rounds:
                        self.check()
                        stops[name].append(self._once(operations[name]))
            return {name: [stop() for stop in waiting] for name, waiting in stops.items()}

    def _once(self, run: Operation) -> Callable[[], float]:
        if not self.cuda:
            start = time.perf_counter()
            run()
            taken = (time.perf_counter() - start) * 1e3
            return lambda: taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Besides emptying L2 this keeps the GPU busy while the host gets ahead, so that no launch is timed.
        self.flushed.zero_()
        begin.record()
        run()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return elapsed

    def measure(self, operations: Mapping[Name, Operation], ms_each: float) -> dict[Name, list[float]]:
        """Milliseconds, by name, of as many repeats of each as take about `ms_each` together. Raises OutOfTimeError."""
        guess = self.turns(operations, dict.fromkeys(operations, 3))
        repeats = {
            name: min(MAX_REPEATS, max(MIN_REPEATS, ceil(ms_each / sorted(times)[1]))) for name, times in guess.items()
        }
        return self.turns(operations, repeats)

    def share(self, operations: Mapping[Name, Operation], seconds: float) -> dict[Name, list[float]]:
        """Milliseconds, by name, of as many rounds of all of them as take about `seconds`. Raises OutOfTimeError."""
        once = dict.fromkeys(operations, 1)
        if self.cuda:
            self.turns(operations, once)  # allocates, so that the round which is counted doesn't
        start = time.perf_counter()
        self.turns(operations, once)
        rounds = int(seconds / max(time.perf_counter() - start, 1e-9))
        return self.turns(operations, dict.fromkeys(operations, max(MIN_SHARED, min(MAX_SHARED, rounds))))

    def settled(self, run: Operation, ms: float) -> list[float]:
        """Milliseconds of each repeat of one operation alone, behind so many that the GPU's clocks have settled.
        Raises OutOfTimeError."""
        times = self.measure({"settled": run}, ms + SETTLE_MS)["settled"]
        return times[len(times) // 2 :]

    def host_us(self, run: Operation) -> float:
        """Microseconds until a call returns that finds the GPU idle, the median of some."""
        taken, until = [], time.perf_counter() + HOST_S
        while not taken or (len(taken) < HOST_CALLS and time.perf_counter() < until):
            self.wait()
            start = time.perf_counter()
            run()
            taken.append(1e3 * (time.perf_counter() - start))
        return 1e3 * Timing.of(taken).ms

    def wait(self) -> None:
        """Until the GPU is idle. Raises RuntimeError where an operation before has cost this process its GPU."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    @property
    def lost(self) -> bool:
        """Whether an operation, such as one that read where it must not, has cost this process its GPU."""
        try:
            self.wait()
        except RuntimeError:
            return True
        return False

    @property
    def out_of_time(self) -> bool:
        """Whether the deadline is past."""
        return time.monotonic() > self.deadline

    def check(self) -> None:
        """Raises OutOfTimeError where it is."""
        if self.out_of_time:
            raise OutOfTimeError


def with_peak(run: Callable[[], Returned], device: torch.device | str) -> tuple[Returned, int]:
    """What one call returns, and the bytes that it takes at most, that included, beyond what torch's allocator had
    given out before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    returned = run()
    return returned, torch.cuda.max_memory_allocated(device) - before


def captured(
    calls: Sequence[Callable[[], Returned]], device: torch.device | str, capture_error_mode: str = "global"
) -> tuple[Operation, Returned]:
    """All of the calls, one after another, as one operation; and what the first returns, on a GPU written anew.

    On a GPU the operation is the replay of a CUDA graph, which costs the host one launch however many calls there are,
    and keeps alive nothing that they read. Before it is captured they are made, on the stream that it is captured on.
    `capture_error_mode` is that of `torch.cuda.graph`: whose calls, of a kind that no capture allows, end it.
    """
    if torch.device(device).type == "cpu":
        return lambda: [call() for call in calls], calls[0]()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # around the capture too, which leaves its stream the current one where it fails
        for _ in range(WARM_UPS):
            for call in calls:
                call()
            side.synchronize()
        with torch.cuda.graph(graph, stream=side, capture_error_mode=capture_error_mode):
            returned = [call() for call in calls]
    torch.cuda.current_stream(device).wait_stream(side)
    return graph.replay, returned[0]
