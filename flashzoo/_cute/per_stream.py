"""Numbers in memory that the launches of one stream share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Lock, local

import torch
from torch import Tensor

from flashzoo._cute.driver import capture_of
from flashzoo.integers import next_power_of_2

SPARE = 1 << 16
"""Numbers of a device that CUDA graphs are given of."""

PER_THREAD = 2
"""CUDA's handle of the default stream of whichever thread says it (`cudaStreamPerThread`)."""
_numbers = count(1)


class _Thread(local):
    """The calling thread, whose default stream has a number in the place of that handle: no handle is less than 0."""

    def __init__(self) -> None:
        self.stream: int = -next(_numbers)


_thread = _Thread()


def _uncaptured(device: int) -> torch.cuda.Stream:
    """Of the few streams that torch hands out in turns one that nobody captures."""
    while True:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream


class PerStream:
    """Equal numbers in memory, some for each stream of each device.

    Launches of one stream follow one another, so they share them, and leave them as they found them. A CUDA graph may
    be replayed beside anything, so what is captured of a stream gets some that nobody else has: of those that a call
    before it has had written; where there are none left the graph writes some itself, which costs it a kernel.

    Args:
        value, dtype: of the numbers.
    """

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        self._value, self._dtype = value, dtype
        self.kept: dict[tuple[int, int], Tensor] = {}
        self._captured: dict[tuple[int, int, int], Tensor] = {}
        self._spare: dict[int, Tensor] = {}  # of each device, for graphs yet to be captured
        self._outgrown: list[Tensor] = []  # which a graph has, or another thread may be about to launch with
        self._lock = Lock()

    def __call__(self, device: int, stream: int, n: int = 1) -> Tensor:
        """At least n numbers for a launch on that stream; they must outlive the launch."""
        if torch.cuda.is_current_stream_capturing():
            return self._of_graph(device, stream, n)
        stream = _thread.stream if stream == PER_THREAD else stream
        spare = self._spare.get(device)
        if spare is None or spare.shape[0] < SPARE // 2:
            more = self._written(device, SPARE)
            with self._lock:
                self._spare[device] = more
        found = self.kept.get((device, stream))
        return found if found is not None and found.shape[0] >= n else self._more(device, stream, n)

    def _more(self, device: int, stream: int, n: int) -> Tensor:
        more = self._written(device, next_power_of_2(n))
        with self._lock:  # of two threads that come here at once both take what is kept
            found = self.kept.get((device, stream))
            if found is not None and found.shape[0] >= n:
                return found
            self._outgrow(found)
            self.kept[device, stream] = more
            return more

    def _outgrow(self, numbers: Tensor | None) -> None:
        if numbers is not None:
            self._outgrown.append(numbers)

    def _of_graph(self, device: int, stream: int, n: int) -> Tensor:
        key = (device, stream, capture_of(stream))
        with self._lock:
            found, spare = self._captured.get(key), self._spare.get(device)
            if found is None or found.shape[0] < n:
                self._outgrow(found)
                if spare is None or spare.shape[0] < n:
                    found = self._new(device, n)
                else:
                    found, self._spare[device] = spare[:n], spare[n:]
                self._captured[key] = found
            return found

    def _written(self, device: int, n: int) -> Tensor:
        """New numbers that any stream, and any graph, finds written.

        Another thread makes them: `torch.compile`'s graph trees have all that theirs allocates, when they warm up too,
        come from a pool of their own, and raise an error where some of it is kept.
        """

        def write() -> Tensor:
            with torch.cuda.device(device), torch.cuda.stream(_uncaptured(device)):  # a new thread's device is 0
                numbers = self._new(device, n)
                torch.cuda.current_stream().record_event().synchronize()
                return numbers

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(write).result()

    def _new(self, device: int, n: int) -> Tensor:
        return torch.full((n,), self._value, dtype=self._dtype, device=f"cuda:{device}")


tile_counter: PerStream = PerStream(0, torch.int32)
"""What the blocks of a launch count by, its tile scheduler's number first: zeros before and after it."""
