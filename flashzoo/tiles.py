"""How Triton's kernels are cut, as far as versions say it alike."""

from __future__ import annotations

from dataclasses import dataclass

from flashzoo.integers import next_power_of_2

TENSOR_CORE = 16
"""No side of a tile of the tensor cores is shorter."""


@dataclass(frozen=True)
class Tiles:
    """How one kernel of v2 or blocksparse is cut.

    Attributes:
        block_q, block_kv: rows of a block of queries (the paper's B_r) and of keys (B_c).
        num_warps, num_stages: warps of a program, and depth of the software pipeline over what it streams.
        tma: read what streams by through TMA descriptors where its layout allows it.
        registers: how many of the blocks that a program owns (Q; K and V; Q and dO) go to the tensor cores from
            registers and not from shared memory. Needs tma.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    tma: bool = False
    registers: int = 0

    def __str__(self) -> str:
        how = f"TMA, {self.registers} owned from registers" if self.tma else "plain loads"
        return f"{self.block_q}x{self.block_kv} tiles, {self.num_warps} warps, {self.num_stages} stages, {how}"


def block_d(head_dim: int) -> int:
    """Width of a tile that holds the head dim: a power of two, and large enough for the tensor cores."""
    return next_power_of_2(head_dim, TENSOR_CORE)
