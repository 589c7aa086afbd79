"""What a Hopper kernel of FlashDecoding is compiled for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from flashzoo.dtypes import BYTES
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS, WARPS

WIDTHS = (64, 128, 192, 256)
"""Head dims that have kernels of their own; TMA fills what a smaller one leaves with zeros."""

LATENT_WIDTHS = (576, 512)
"""Of a key, and of the value that is its first columns, in DeepSeek's MLA."""


class Merging(Enum):
    """Who merges the parts of a tile; in the words of `explain`."""

    NONE = "not at all, as keys are not split"
    LAST = "by who ends last"
    CLUSTER = "in a cluster"
    KERNEL = "by a second kernel"


@dataclass(frozen=True)
class Kernel:
    """Everything that a kernel is compiled for; all else is an argument of its launch.

    Attributes:
        dtype: "fp16" or "bf16".
        out_dtype: of what it writes: out, or parts for a second kernel.
        width: of `WIDTHS`.
        left, right: whether the window is bounded on that side.
        used: whether a length says how much of each cache is used.
        box: keys that TMA moves at a time: a block, or a page's part of one.
        paged: whether keys lie in pages.
        sinks: whether there are any that it joins.
        merging: who merges a tile's parts.
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
    merging: Merging
    block_kv: int
    stages: int
    blocks_per_sm: int

    consumers = 1
    """Consumer warpgroups, which share the columns of a tile's O."""

    stages_of_block = 2
    """A block of keys takes two stages: K, and V."""

    q_stages = 2
    """Tiles of Q on chip: the next item's arrives, and its keys behind it, while this one's is in use."""

    @property
    def split(self) -> bool:
        """Whether a head's keys are split."""
        return self.merging is not Merging.NONE

    @property
    def counted(self) -> bool:
        """Whether thread blocks count the parts of a tile that have ended, and the last merges them from memory."""
        return self.merging is Merging.LAST

    @property
    def clustered(self) -> bool:
        """Whether the thread blocks of a cluster have a tile's parts, and merge them on chip."""
        return self.merging is Merging.CLUSTER

    @property
    def apart(self) -> bool:
        """Whether parts are left in memory for a second kernel."""
        return self.merging is Merging.KERNEL

    @property
    def warps(self) -> int:
        """Consumer warps."""
        return self.consumers * WARPS

    registers = None
    """Of a thread of the producer's warpgroup, and of a consumer, where that gets more; else all have the same."""

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, the producer warp, and the one that looks up what is next; in whole
        warpgroups, where registers go from one to another."""
        return 32 * self.warps + (WARPGROUP if self.registers else 64)

    @property
    def width_v(self) -> int:
        """Columns of a value, and so of O."""
        return self.width

    teams = 1
    """How many tiles a thread block works on at a time."""

    at_once = 16
    """Loads of a merging thread before it waits for any: of parts of a row, and of as many rows as there is room
    for."""

    states: ClassVar[tuple[int, int]] = (0, 0)
    """Places in which consumer warps leave each other maxima and sums of rows, and how many rows a place has."""

    @property
    def dtype_kv(self) -> str:
        """Of keys and values."""
        return self.dtype

    @property
    def key_warps(self) -> int:
        """How many of the consumer warps share rows, and have keys of their own."""
        return 1

    @property
    def neighbours(self) -> int:
        """Columns side by side that a thread has of a row of O."""
        return 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block: Q, K and V; two mbarriers a stage; the next item, and the word of a part."""
        row = BYTES[self.dtype] * self.q_stages * WARPGROUP_ROWS + BYTES[self.dtype_kv] * self.stages * self.block_kv
        return row * self.width + 16 * (self.q_stages + self.stages + 3) + 16 + 8 * math.prod(self.states)


@dataclass(frozen=True)
class KernelE4m3(Kernel):
    """One for e4m3 keys and values beside a 16-bit Q.

    Attributes:
        row_tiles: a tile's rows are so many times 16 at most, which a warp has: 1, 2 or 4.
    """

    row_tiles: int
    at_once = 8
    states: ClassVar[tuple[int, int]] = (2, 16)
    """Two warps leave theirs."""

    @property
    def registers(self) -> tuple[int, int] | None:
        """The consumer gets more where two thread blocks share those of a multiprocessor."""
        return (56, 200) if self.blocks_per_sm == 2 else None

    @property
    def dtype_kv(self) -> str:
        """Of keys and values."""
        return "e4m3"

    @property
    def key_warps(self) -> int:
        """How many of the consumer warps share rows, and have keys of their own."""
        return WARPS // self.row_tiles

    @property
    def neighbours(self) -> int:
        """Columns side by side that a thread has of a row of O."""
        return 4


@dataclass(frozen=True)
class KernelLatent(Kernel):
    """One for keys of `LATENT_WIDTHS`, whose first columns are the values: a stage is a block of both."""

    consumers = 2
    registers = (72, 216)
    stages_of_block = 1
    q_stages = 1
    states: ClassVar[tuple[int, int]] = (WARPGROUP, 2)
    """Each thread of the first warpgroup leaves its two rows' to one of the second."""

    @property
    def width_v(self) -> int:
        """Columns of a value, and so of O."""
        return LATENT_WIDTHS[1]

    @property
    def shared_bytes(self) -> int:
        """And P, with two mbarriers."""
        return super().shared_bytes + BYTES[self.dtype] * WARPGROUP_ROWS * self.block_kv + 16
