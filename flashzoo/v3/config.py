"""Tiles of v3: which, and why."""

from __future__ import annotations

from dataclasses import dataclass

from flashzoo.spec import Problem

WARPGROUP = 128
"""Threads of a warpgroup, the four warps that issue one WGMMA."""

WARPGROUP_ROWS = 64
"""Queries of a consumer warpgroup: the M of one WGMMA."""


@dataclass(frozen=True)
class Tiles:
    """How the forward kernel is cut and scheduled.

    Attributes:
        consumers: consumer warpgroups, each with 64 queries of the tile.
        block_kv: keys of a block (the paper's B_c).
        stages: blocks of K, and as many of V, on chip at a time.
        q_stages: with 2, the queries of the next tile arrive while those of this one are in use.
        ping_pong: the warpgroups take turns in issuing their products, so that one's run under the other's softmax.
        overlap: inside a warpgroup, the product for the next block's scores is issued before the softmax of this one.
    """

    consumers: int
    block_kv: int
    stages: int = 2
    q_stages: int = 1
    ping_pong: bool = True
    overlap: bool = True

    @property
    def block_q(self) -> int:
        """Queries of a tile (the paper's B_r)."""
        return WARPGROUP_ROWS * self.consumers

    def __str__(self) -> str:
        how = [name for name, on in (("ping-pong", self.ping_pong), ("overlap", self.overlap)) if on]
        size = f"{self.block_q}x{self.block_kv} tiles, {self.consumers} consumer warpgroups"
        return f"{size}, {self.stages} stages, {self.q_stages} of queries, {' and '.join(how) or 'serial'}"


@dataclass(frozen=True)
class Kernel:
    """Everything that a forward kernel is compiled for; all else is an argument of its launch.

    Attributes:
        dtype: "fp16" or "bf16".
        width, width_v: of `WIDTHS`, for q and k, and for v and out.
        left, right: whether the visible band is bounded on that side.
        tiles: how it is cut.
    """

    dtype: str
    width: int
    width_v: int
    left: bool
    right: bool
    tiles: Tiles

    @property
    def threads(self) -> int:
        """Threads of a block: a producer warpgroup and the consumers."""
        return WARPGROUP * (1 + self.tiles.consumers)

    @property
    def width_o(self) -> int:
        """Columns of O that a warpgroup stages on chip at a time, on their way to memory."""
        return self.width_v // -(-self.width_v // 128)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: Q, K, V and O, two mbarriers for each slot, the number of a tile."""
        tiles = self.tiles
        elements = tiles.q_stages * tiles.block_q * self.width
        elements += tiles.stages * tiles.block_kv * (self.width + self.width_v)
        elements += tiles.block_q * self.width_o
        slots = tiles.q_stages * tiles.consumers + 2 * tiles.stages + 1
        return 2 * elements + 16 * slots + 8


# Width of q and k, width of v: tiles. The fastest measured on an H200, bf16, seqlens 512 to 16k, with and without a mask.
HOPPER = {
    (64, 64): Tiles(3, 128, stages=3, q_stages=2),
    (96, 96): Tiles(3, 112, q_stages=2),
    (128, 128): Tiles(3, 80, ping_pong=False),
    (192, 128): Tiles(3, 64, ping_pong=False),
    (192, 192): Tiles(2, 96),
    (256, 256): Tiles(2, 64),
}

# The same for fewer queries than `LONG`, where it differs: three warpgroups read K and V from L2 for 192 queries at a time,
# which the long sequences want, two leave fewer rows of the last tile empty.
HOPPER_SHORT = {(128, 128): Tiles(2, 128, q_stages=2, ping_pong=False)}
LONG = 2048

WIDTHS = tuple(sorted(width for width, width_v in HOPPER if width == width_v))
"""Head dims that have tiles of their own; TMA fills what a smaller one leaves with zeros."""


def width_for(head_dim: int) -> int:
    """The width of the tiles that hold a head dim."""
    return next(width for width in WIDTHS if head_dim <= width)


def widths_of(problem: Problem) -> tuple[int, int]:
    """The key of the tables for a problem: its widths, or where those have no tiles of their own, the wider for both."""
    width, width_v = width_for(problem.head_dim), width_for(problem.head_dim_v)
    widest = max(width, width_v)
    return (width, width_v) if (width, width_v) in HOPPER else (widest, widest)


def kernel_for(problem: Problem) -> Kernel:
    """The kernel of a problem."""
    left, right = problem.span
    widths = width_for(problem.head_dim), width_for(problem.head_dim_v)
    return Kernel(problem.dtype, *widths, left is not None, right is not None, table(problem)[widths_of(problem)])


def table(problem: Problem) -> dict[tuple[int, int], Tiles]:
    """The table that a problem's tiles are in."""
    return HOPPER_SHORT if problem.seqlen_q < LONG and widths_of(problem) in HOPPER_SHORT else HOPPER


def pack_for(problem: Problem, block_q: int) -> int:
    """How many query heads of one key/value head share a tile, as a power of two's exponent: 0 is none.

    Packed heads read K and V once, and fill tiles that a short sequence of queries would leave empty. It pays where it
    saves a tenth of the tiles; otherwise it only spoils the order in which tiles reuse L2.
    """
    group = problem.heads // problem.heads_kv
    pack = min((group & -group).bit_length() - 1, WARPGROUP_ROWS.bit_length() - 1)  # the largest power of two in both
    apart, packed = (-(-(problem.seqlen_q << p) // block_q) << pack - p for p in (0, pack))
    return pack if packed <= 0.9 * apart else 0


def describe(problem: Problem) -> list[str]:
    """Sentences for `explain`: how the problem is cut and why so, and what happens silently."""
    kernel = kernel_for(problem)
    lines = [f"forward: {kernel.tiles}"]
    widths = kernel.width, kernel.width_v
    own = f"tiles: those of head_dim {max(widths)}, not measured for {problem.head_dim}/{problem.head_dim_v}"
    lines.append("tiles: the fastest measured on an H200" if widths in HOPPER else own)
    of_v = [("head_dim_v", problem.head_dim_v, kernel.width_v)] if problem.head_dim_v != problem.head_dim else []
    for name, head_dim, width in (("head_dim", problem.head_dim, kernel.width), *of_v):
        if head_dim != width:
            lines.append(f"{name} {head_dim} is padded to {width} on chip, not in memory")
    if pack := pack_for(problem, kernel.tiles.block_q):
        lines.append(f"{1 << pack} query heads of a key/value head share a tile")
    lines.append("copies what TMA can't read in place: a start or stride that is no multiple of 16 bytes, a broadcast dimension")
    return lines
