"""Numbers in memory that the launches of one stream share."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from flashzoo._cute.driver import capture_of
from flashzoo.integers import next_power_of_2

SPARE = 1 << 16
"""Numbers of a device that CUDA graphs are given of."""


@dataclass
class _Spare:
    """Numbers for graphs yet to be captured.

    Attributes:
        numbers: those that are left.
        written: recorded when they had been written.
        ready: they are, so that a graph finds them whatever stream it is replayed on.
    """

    numbers: Tensor
    written: torch.cuda.Event
    ready: bool = False


class PerStream:
    """Equal numbers in memory, some for each stream of each device.

    Launches of one stream follow one another, so they share them, and leave them as they found them. A CUDA graph may
    be replayed beside anything, so what is captured of a stream gets some that nobody else has: of those that calls
    before it have had written; where there are none left the graph writes some itself, which costs it a kernel.

    Args:
        value, dtype: of the numbers.
    """

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        self._value, self._dtype = value, dtype
        self.kept: dict[tuple[int, int], Tensor] = {}
        self._captured: dict[tuple[int, int, int], Tensor] = {}
        self._spare: dict[int, _Spare] = {}
        self._outgrown: list[Tensor] = []  # which another thread may be about to launch with
        self._lock = Lock()

    def __call__(self, device: int, stream: int, n: int = 1) -> Tensor:
        """At least n numbers for a launch on that stream; they must outlive the launch."""
        if torch.cuda.is_current_stream_capturing():
            return self._of_graph(device, stream, n)
        spare = self._spare.get(device)
        if spare is None or not spare.ready:
            self._prepare(device)
        found = self.kept.get((device, stream))
        if found is None:  # of two threads that come here at once both take what is kept
            found = self.kept.setdefault((device, stream), self._new(device, n))
        if found.shape[0] < n:
            self._outgrown.append(found)
            found = self.kept[device, stream] = self._new(device, next_power_of_2(n))
        return found

    def _prepare(self, device: int) -> None:
        """Have spare numbers written, or see whether they are; asked of calls that nothing captures,
        as a capture must not ask."""
        with self._lock:
            spare = self._spare.get(device)
            if spare is None:
                spare = self._spare[device] = _Spare(self._new(device, SPARE), torch.cuda.Event())
                spare.written.record()
            elif spare.written.query():
                spare.ready = True

    def _of_graph(self, device: int, stream: int, n: int) -> Tensor:
        key = (device, stream, capture_of(stream))
        with self._lock:
            found, spare = self._captured.get(key), self._spare.get(device)
            if found is None or found.shape[0] < n:
                if spare is None or not spare.ready or spare.numbers.shape[0] < n:
                    found = self._new(device, n)
                else:
                    found, spare.numbers = spare.numbers[:n], spare.numbers[n:]
                self._captured[key] = found
            return found

    def _new(self, device: int, n: int) -> Tensor:
        return torch.full((n,), self._value, dtype=self._dtype, device=f"cuda:{device}")


tile_counter: PerStream = PerStream(0, torch.int32)
"""What the blocks of a launch count by, its tile scheduler's number first: zeros before and after it."""
