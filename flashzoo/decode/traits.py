"""What a Hopper kernel of FlashDecoding is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from flashzoo.dtypes import BYTES
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS

WIDTHS = (64, 128, 192, 256)
"""Head dims that have kernels of their own; TMA fills what a smaller one leaves with zeros."""

Q_STAGES = 2
"""Tiles of Q on chip: the next item's arrives, and its keys behind it, while this one's is in use."""


@dataclass(frozen=True)
class Kernel:
    """Everything that a kernel is compiled for; all else is an argument of its launch.

    Attributes:
        dtype: "fp16" or "bf16".
        out_dtype: of out.
        width: of `WIDTHS`.
        left, right: whether the window is bounded on that side.
        used: whether a length says how much of each cache is used.
        box: keys that TMA moves at a time: a block, or a page's part of one.
        paged: whether keys lie in pages.
        sinks: whether there are any.
        split: whether a head's keys are split, and parts are merged.
        clustered: the thread blocks of a cluster have a tile's parts, on chip; else parts go through memory.
        block_kv: keys of a block.
        stages: blocks of K or V on chip at a time.
        blocks_per_sm: thread blocks of a multiprocessor.
    """

    dtype: str
    out_dtype: str
    width: int
    left: bool
    right: bool
    used: bool
    box: int
    paged: bool
    sinks: bool
    split: bool
    clustered: bool
    block_kv: int
    stages: int
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        """Threads of a block: a consumer warpgroup, the producer warp, and the one that looks up what is next."""
        return WARPGROUP + 64

    teams = 1
    """How many tiles a thread block works on at a time."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block: Q, K and V; two mbarriers a stage; the next item, and the word of a part."""
        elements = (Q_STAGES * WARPGROUP_ROWS + self.stages * self.block_kv) * self.width
        return BYTES[self.dtype] * elements + 16 * (Q_STAGES + self.stages + 3) + 16
