"""Numbers in memory that the launches of one stream share."""

from __future__ import annotations

import torch
from torch import Tensor


class PerStream:
    """A number in memory, one for each stream of each device.

    Launches of one stream follow one another, so they share it. What is captured into a CUDA graph may be replayed beside
    anything, so it gets one of its own, written by the graph.

    Args:
        value, dtype: of the number.
    """

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        self._value, self._dtype = value, dtype
        self.kept: dict[tuple[int, int], Tensor] = {}

    def __call__(self, device: int, stream: int) -> Tensor:
        """The number for a launch on that stream; it must outlive the launch."""
        if torch.cuda.is_current_stream_capturing():
            return self._new(device)
        found = self.kept.get((device, stream))
        if found is None:  # of two threads that come here at once both take the one that is kept
            found = self.kept.setdefault((device, stream), self._new(device))
        return found

    def _new(self, device: int) -> Tensor:
        return torch.full((1,), self._value, dtype=self._dtype, device=f"cuda:{device}")


tile_counter: PerStream = PerStream(0, torch.int32)
"""The counter of a launch's tile scheduler: a zero before and after it."""
