"""Numbers in memory that the launches of one stream share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from flashzoo._cute.driver import capture_of
from flashzoo.integers import next_power_of_2

SPARE = 1 << 16
"""Numbers of a device that CUDA graphs are given of."""


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
        self._outgrown: list[Tensor] = []  # which another thread may be about to launch with
        self._lock = Lock()

    def __call__(self, device: int, stream: int, n: int = 1) -> Tensor:
        """At least n numbers for a launch on that stream; they must outlive the launch."""
        if torch.cuda.is_current_stream_capturing():
            return self._of_graph(device, stream, n)
        spare = self._spare.get(device)
        if spare is None or spare.shape[0] < SPARE // 2:
            self._spare[device] = self._written(device, SPARE)
        found = self.kept.get((device, stream))
        if found is None:  # of two threads that come here at once both take what is kept
            found = self.kept.setdefault((device, stream), self._written(device, n))
        if found.shape[0] < n:
            self._outgrown.append(found)
            found = self.kept[device, stream] = self._written(device, next_power_of_2(n))
        return found

    def _of_graph(self, device: int, stream: int, n: int) -> Tensor:
        key = (device, stream, capture_of(stream))
        with self._lock:
            found, spare = self._captured.get(key), self._spare.get(device)
            if found is None or found.shape[0] < n:
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
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                numbers = self._new(device, n)
            stream.synchronize()
            return numbers

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(write).result()

    def _new(self, device: int, n: int) -> Tensor:
        return torch.full((n,), self._value, dtype=self._dtype, device=f"cuda:{device}")


tile_counter: PerStream = PerStream(0, torch.int32)
"""What the blocks of a launch count by, its tile scheduler's number first: zeros before and after it."""
