"""What a kernel of v3 is compiled for: its tiles, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.dtypes import BYTES
from flashzoo.gpu import WARPGROUP, WARPGROUP_ROWS
from flashzoo.integers import cdiv
from flashzoo.scores.traits import Scoring

MASK_Q = 128
"""Queries of a block of those masks that block-sparse kernels take: a tile's."""

ALIGNED = 1024
"""Bytes: an array of shared memory that TMA and WGMMA swizzle begins at a multiple of so many."""

ENTRY = 8
"""32-bit words of an entry of packed sequences' table: `_triton.packed_kernels.COLUMNS`, which this must not import."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes, stages and order of work of the forward kernel.

    Attributes:
        consumers: consumer warpgroups, each with 64 queries of the tile.
        block_kv: keys of a block (the paper's B_c).
        stages: blocks of K, and as many of V, on chip at a time.
        q_stages: with 2, the queries of the next tile arrive while those of this one are in use.
        ping_pong: the warpgroups issue their products one after the other, so that one's run under the other's softmax.
        overlap: inside a warpgroup, the product for the next block's scores is issued before the softmax of this one.
        teams: how many tiles a thread block works on at a time, each with consumers, a producer and shared memory of
            its own. Only block-sparse kernels have more than one.
    """

    consumers: int
    block_kv: int
    stages: int = 2
    q_stages: int = 1
    ping_pong: bool = True
    overlap: bool = True
    teams: int = 1

    @property
    def block_q(self) -> int:
        """Queries of a tile (the paper's B_r)."""
        return WARPGROUP_ROWS * self.consumers

    def __str__(self) -> str:
        how = [name for name, on in (("ping-pong", self.ping_pong), ("overlap", self.overlap)) if on]
        at_a_time = "" if self.teams == 1 else f"{self.teams} at a time, each with "
        size = f"{self.block_q}x{self.block_kv} tiles, {at_a_time}{self.consumers} consumer warpgroups"
        return f"{size}, {self.stages} stages, {self.q_stages} of queries, {' and '.join(how) or 'serial'}"


@dataclass(frozen=True)
class Kernel:
    """Everything that a forward kernel is compiled for; all else is an argument of its launch.

    Attributes:
        dtype: "fp16" or "bf16", and "e4m3" for `KernelFp8`.
        width, width_v: of `WIDTHS`, for q and k, and for v and out.
        left, right: whether the window is bounded on that side.
        tiles: how it is cut.
        sinks: whether heads have sinks.
        scoring: the function on scores, or None.
    """

    dtype: str
    width: int
    width_v: int
    left: bool
    right: bool
    tiles: Tiles
    sinks: bool = field(default=False, kw_only=True)
    scoring: Scoring | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.tiles.teams != 1:
            raise ValueError(f"a kernel without a block mask has one team, got {self.tiles}")

    @property
    def out_dtype(self) -> str:
        """Of out."""
        return self.dtype

    @property
    def parts_v(self) -> int:
        """Parts of a block of V on chip, of so many columns, each with stages of its own."""
        return 1

    @property
    def stages_v(self) -> int:
        """Stages of V that the tensor core reads."""
        return self.tiles.stages * self.parts_v

    @property
    def stages_waiting(self) -> int:
        """Stages of V that is yet to be transposed."""
        return 0

    @property
    def threads(self) -> int:
        """Threads of a block: a producer warpgroup and the consumers."""
        return WARPGROUP * (1 + self.teams * self.tiles.consumers)

    @property
    def teams(self) -> int:
        """How many tiles a thread block works on at a time."""
        return self.tiles.teams

    @property
    def width_o(self) -> int:
        """Columns of O that a warpgroup stages on chip at a time, on their way to memory."""
        return self.width_v // cdiv(self.width_v, 128)

    @property
    def words_of_work(self) -> int:
        """32-bit words that tell of the next tile: its number."""
        return 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block: Q, K, V and O, each from a multiple of `ALIGNED` on, two mbarriers a stage,
        the next tile."""
        tiles = self.tiles
        size, size_out = BYTES[self.dtype], BYTES[self.out_dtype]
        stages_v = self.stages_v + self.stages_waiting
        arrays = (
            size * tiles.q_stages * tiles.block_q * self.width,
            size * tiles.stages * tiles.block_kv * self.width,
            size * stages_v * tiles.block_kv * self.width_v // self.parts_v,
            size_out * tiles.block_q * self.width_o,
        )
        stages = tiles.q_stages * tiles.consumers + tiles.stages + stages_v + 1
        aligned = sum(cdiv(tiles.teams * array, ALIGNED) * ALIGNED for array in arrays)
        return aligned + tiles.teams * 16 * stages + 8 * cdiv(tiles.teams * self.words_of_work, 2)


@dataclass(frozen=True)
class KernelSparse(Kernel):
    """A block-sparse forward kernel: a tile is a row of the block mask;
    `left` and `right` bound the window of partial blocks.

    Attributes:
        mask_kv: keys of a block of the mask.
        bits: partial blocks have a mask of elements too.
    """

    mask_kv: int
    bits: bool

    def __post_init__(self) -> None:
        tiles = self.tiles
        if tiles.block_q != MASK_Q or self.mask_kv % tiles.block_kv or tiles.block_kv % 32:
            expected = f"{MASK_Q} queries and, of blocks of {self.mask_kv} keys, a part in steps of 32"
            raise ValueError(f"a block-sparse kernel has {expected}, got {tiles}")

    @property
    def parts(self) -> int:
        """Blocks of keys that make one of the mask's."""
        return self.mask_kv // self.tiles.block_kv

    @property
    def words_of_work(self) -> int:
        """32-bit words that tell of the next tile: the number, the row, how much it keeps."""
        return 5


@dataclass(frozen=True)
class KernelPacked(Kernel):
    """A forward kernel of packed sequences."""

    @property
    def words_of_work(self) -> int:
        """32-bit words that tell of the next tile: its entry of the table, its number."""
        return ENTRY + 1


@dataclass(frozen=True)
class KernelFp8(Kernel):
    """An FP8 forward kernel: `dtype` is "e4m3".

    Attributes:
        out: dtype of out, "bf16" or "fp16".
        block_scales: K or V has a scale for each `DESCALE_BLOCK` rows, and not one for each head.
        transposed: V comes as (head_dim, keys), in the order of `quantize.transpose_v`; else it is transposed on chip.
        columns: of O, that are multiplied at a time where two_level.
        raw_stages: parts of blocks of V on chip that are yet to be transposed.
        late: a block's last columns are added to O under the product of the next block's scores, where two_level.
        two_level: each block's product is added to O in float32, and not by the tensor core. Only then are columns and
            late looked at.
    """

    out: str
    block_scales: bool
    transposed: bool
    columns: int
    raw_stages: int
    late: bool
    two_level: bool = True

    def __post_init__(self) -> None:
        if self.tiles.block_kv != DESCALE_BLOCK or self.width_v % self.columns:
            expected = f"blocks of {DESCALE_BLOCK} keys and columns that divide {self.width_v}"
            raise ValueError(f"an FP8 kernel has {expected}, got {self.tiles.block_kv} and {self.columns}")

    @property
    def out_dtype(self) -> str:
        """Of out."""
        return self.out

    @property
    def parts_v(self) -> int:
        """The same: V that is transposed on chip lies there in rows of 128 bytes at most."""
        return 1 if self.transposed else cdiv(self.width_v, 128)

    @property
    def stages_waiting(self) -> int:
        """The same, where it does not come transposed."""
        return 0 if self.transposed else self.raw_stages


@dataclass(frozen=True)
class KernelFp8Packed(KernelFp8):
    """An FP8 forward kernel of packed sequences, each with a scale for each head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_scales or self.transposed:
            got = f"block_scales={self.block_scales}, transposed={self.transposed}"
            raise ValueError(
                f"an FP8 kernel of packed sequences has scales by head and transposes V on chip, got {got}"
            )

    @property
    def words_of_work(self) -> int:
        """32-bit words that tell of the next tile, as in `KernelPacked`."""
        return ENTRY + 1


@dataclass(frozen=True)
class TilesBackward:
    """Tile sizes and stages of the backward kernel, which divides its work in one of two ways.

    By keys: each consumer warpgroup has 64 of the tile's keys, with their dK and dV. By gradient, where a warpgroup's
    registers don't hold both: one warpgroup has dV and P of the tile's 64 keys, the other dK and dS, and each has half
    of the columns of dQ.

    Attributes:
        block_q: queries of a block.
        block_kv: keys of a tile; 64 is cut by gradient.
        stages: blocks of Q, and of dO where `stages_do` says nothing else, on chip at a time.
        ds_stages: blocks of dS on chip: with 2, a warpgroup writes the next before the others have read the last.
        v_in_registers: by keys, a warpgroup has its part of V in registers, and does not read it on chip at every step.
        stages_do: blocks of dO, where they are fewer than those of Q.
        halved: by keys, where dK and dV leave a warpgroup too few registers for the scores of a whole block: it has
            those of half of the queries at a time. dK and dV leave through the shared memory of K and V.
    """

    block_q: int
    block_kv: int = 128
    stages: int = 2
    ds_stages: int = 2
    v_in_registers: bool = False
    stages_do: int | None = None
    halved: bool = False

    @property
    def by_gradient(self) -> bool:
        """Whether both warpgroups have all of the tile's keys, and each one gradient."""
        return self.block_kv == WARPGROUP_ROWS

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return 2 if self.by_gradient else self.block_kv // WARPGROUP_ROWS

    @property
    def queries_at_once(self) -> int:
        """Queries whose scores a warpgroup has at a time."""
        return self.block_q // 2 if self.halved else self.block_q

    def __str__(self) -> str:
        size = f"{self.block_kv} keys by {self.block_q} queries, {self.consumers} consumer warpgroups"
        whose = "one with dV and one with dK" if self.by_gradient else "each with 64 of the keys"
        where = ", V in registers" if self.v_in_registers else ""
        where += f", scores of {self.queries_at_once} queries at a time" if self.halved else ""
        of_do = f" and {self.stages_do} of dO" if self.stages_do else ""
        return f"{size}, {whose}, {self.stages} stages of {'Q' if of_do else 'queries'}{of_do}{where}"


COLUMNS = 64
"""Columns of dQ that a warpgroup computes at a time where tiles are cut by gradient."""

WRITERS = 3
"""Writer warps of the backward pass in deterministic mode: all of the producer's warpgroup but the producer."""


@dataclass(frozen=True)
class KernelBackward:
    """Everything that a backward kernel is compiled for.

    Attributes:
        dtype: "fp16" or "bf16".
        width, width_v: a key of `BACKWARD`, for q and k, and for v and out.
        left, right: whether the window is bounded on that side.
        deterministic: dQ is summed in a fixed order.
        tiles: how it is cut.
        split_queries: the queries of a block of keys are split over several tiles, whose dK and dV are added by a
            kernel behind this one.
        scoring: the function on scores with its gradient, or None.
    """

    dtype: str
    width: int
    width_v: int
    left: bool
    right: bool
    deterministic: bool
    tiles: TilesBackward
    split_queries: bool = field(default=False, kw_only=True)
    scoring: Scoring | None = field(default=None, kw_only=True)

    @property
    def threads(self) -> int:
        """Threads of a block: a producer warpgroup and the consumers."""
        return WARPGROUP * (1 + self.tiles.consumers)

    teams: ClassVar[int] = 1
    """How many tiles a thread block works on at a time."""

    cluster: ClassVar[int] = 1
    """Thread blocks that load queries for one another."""

    by_head: ClassVar[bool] = False
    """Whether a thread block has all tiles of a head."""

    @property
    def words_of_work(self) -> int:
        """32-bit words that tell of the next tile: its number."""
        return 1

    @property
    def stages_do(self) -> int:
        """Blocks of dO on chip at a time."""
        return self.tiles.stages_do or self.tiles.stages

    def blocks_q(self, seqlen_q: int) -> int:
        """Blocks of queries of a head, for which there are sums of dQ, LSE and delta. Kernels compute it too."""
        return (seqlen_q + self.tiles.block_q - 1) // self.tiles.block_q

    def blocks_kv(self, seqlen_k: int) -> int:
        """Tiles of a head."""
        return cdiv(seqlen_k, self.tiles.block_kv)

    @property
    def uneven(self) -> bool:
        """Whether tiles have fewer blocks of queries the later their keys are."""
        return self.right and not self.left

    @property
    def staggered(self) -> bool:
        """Whether tiles of a head begin at different blocks of queries: where all have all blocks, in any order."""
        return not (self.left or self.right or self.deterministic)

    @property
    def dq_by_rows(self) -> bool:
        """Whether each warpgroup computes dQ of 64 of the queries, and not some of its columns."""
        return not self.tiles.by_gradient and self.tiles.block_q == WARPGROUP_ROWS * self.tiles.consumers

    @property
    def dq_part(self) -> tuple[int, int]:
        """Queries and columns of a part of dQ, of which a warpgroup computes one, and by gradient one at a time."""
        tiles = self.tiles
        if tiles.by_gradient:
            return tiles.block_q, COLUMNS
        return (WARPGROUP_ROWS, self.width) if self.dq_by_rows else (tiles.block_q, self.width // tiles.consumers)

    @property
    def swizzled_k(self) -> int:
        """Columns that K's swizzle on chip divides: not all of K's, but those of a part of dQ, an operand each."""
        return self.dq_part[1]

    @property
    def dq_sums(self) -> int:
        """Float32 numbers in memory of a block of dQ, zeros beforehand, to which tiles add, and which are rounded
        behind the kernel; none where dQ leaves the kernel rounded."""
        return self.tiles.block_q * self.width

    def numbers_of_dq(self, blocks_q: int, heads: int, thread_blocks: int) -> int:
        """Float32 numbers in memory, to which tiles add, of so many blocks of queries of each of all heads."""
        return heads * blocks_q * self.dq_sums

    @property
    def dq_parts(self) -> int:
        """Parts of a block of dQ."""
        return self.width // self.dq_part[1] if self.tiles.by_gradient else self.tiles.consumers

    def dq_parts_of(self, wg_idx: int) -> range:
        """Those that a warpgroup computes. By gradient the one with dV, whose other products are no fewer, has the
        smaller half."""
        parts, consumers = self.dq_parts, self.tiles.consumers
        return range(wg_idx * parts // consumers, (wg_idx + 1) * parts // consumers)

    def dq_deferred(self, wg_idx: int) -> bool:
        """Whether, by gradient, a warpgroup computes its dQ of a block in the next one's step: that with dV where it
        has one part. At width 256 it has two, and measured slower so."""
        return self.tiles.by_gradient and wg_idx == 0 and len(self.dq_parts_of(wg_idx)) == 1

    @property
    def writers(self) -> int:
        """Warps of the producer's warpgroup that add to dQ in memory; they take steps round-robin.

        Deterministic, each step waits for other tiles' sums to arrive, and for its own: one warp would not keep up. By
        gradient the consumers add to dQ themselves, and the writers only keep them in order.
        """
        return WRITERS if self.deterministic else 0 if self.tiles.by_gradient else 1

    @property
    def semaphores(self) -> int:
        """Semaphores of a block of dQ. By gradient one for each part of a warpgroup's: the next tile can begin on the
        first while this one is at the last."""
        return max(len(self.dq_parts_of(wg_idx)) for wg_idx in range(self.tiles.consumers))

    @property
    def exchange(self) -> tuple[int, int]:
        """Float32 numbers of a stage of `exchange`, and stages: dQ on its way to the writer,
        or P to the other warpgroup."""
        tiles, (rows, columns) = self.tiles, self.dq_part
        return (tiles.block_q * tiles.block_kv, 1) if tiles.by_gradient else (rows * columns, tiles.consumers)

    @property
    def exchange_barriers(self) -> int:
        """Pairs of mbarriers of `exchange`: one for each stage and each writer that reads it."""
        return self.exchange[1] * (1 if self.tiles.by_gradient else self.writers)

    @property
    def ds_elements(self) -> int:
        """Elements of the memory of dS, by keys and not halved at least those of dK and dV, which leave through it."""
        tiles = self.tiles
        ds = tiles.ds_stages * tiles.block_q * tiles.block_kv
        alone = tiles.by_gradient or tiles.halved
        return ds if alone else max(ds, tiles.block_kv * (self.width + self.width_v))

    @property
    def ds_barriers(self) -> int:
        """Pairs of mbarriers of that memory: by gradient one for each stage, by keys one for dK and dV."""
        return self.tiles.ds_stages if self.tiles.by_gradient else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block: K, V, Q, dO, dS; `exchange`, delta and LSE;
        two mbarriers a stage, the next tile and, where deterministic, the first."""
        tiles, (numbers, stages) = self.tiles, self.exchange
        elements = tiles.block_kv * (self.width + self.width_v) + self.ds_elements
        elements += tiles.block_q * (tiles.stages * self.width + self.stages_do * self.width_v)
        floats = numbers * stages + (tiles.stages + self.stages_do) * tiles.block_q
        pipelines = tiles.stages + self.stages_do + self.ds_barriers + self.exchange_barriers + max(1, self.writers) + 3
        words = self.words_of_work + self.deterministic
        return BYTES[self.dtype] * elements + 4 * floats + 16 * pipelines + 8 * cdiv(words, 2)


@dataclass(frozen=True)
class KernelBackwardPairs(KernelBackward):
    """A backward kernel whose thread blocks work in pairs: a pair's tiles are two neighbouring blocks of keys. By
    gradient each thread block has half of the columns of dQ, for the keys of both."""

    cluster: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.deterministic:
            raise ValueError("pairs have any order of sums, got deterministic=True")

    @property
    def dq_part(self) -> tuple[int, int]:
        """The same, by gradient one for each warpgroup of both thread blocks."""
        tiles = self.tiles
        return (tiles.block_q, self.width // (self.cluster * tiles.consumers)) if tiles.by_gradient else super().dq_part

    @property
    def ds_elements(self) -> int:
        """The same, by gradient for each thread block's own dS and its partner's."""
        return super().ds_elements * (self.cluster if self.tiles.by_gradient else 1)

    def dq_parts_of(self, wg_idx: int) -> range:
        """The same, by gradient of its thread block's half of the columns."""
        if not self.tiles.by_gradient:
            return super().dq_parts_of(wg_idx)
        of_half, consumers = self.dq_parts // self.cluster, self.tiles.consumers
        return range(wg_idx * of_half // consumers, (wg_idx + 1) * of_half // consumers)

    def dq_deferred(self, wg_idx: int) -> bool:
        """The same of both warpgroups, where there is a stage of Q more for the block that dK and dQ lag behind by."""
        return self.tiles.by_gradient and self.tiles.stages > 2

    @property
    def shared_bytes(self) -> int:
        """The same, and by gradient half of the columns of the partner's K."""
        of_partner = BYTES[self.dtype] * self.tiles.block_kv * self.width // self.cluster
        return super().shared_bytes + (of_partner if self.tiles.by_gradient else 0)

    def blocks_kv(self, seqlen_k: int) -> int:
        """The same, for whole pairs."""
        return cdiv(seqlen_k, self.cluster * self.tiles.block_kv) * self.cluster


@dataclass(frozen=True)
class KernelBackwardAllKeys(KernelBackward):
    """A backward kernel whose tiles have all keys each, and so all of dQ of their queries: nobody adds to it."""

    def __post_init__(self) -> None:
        if self.deterministic or self.tiles.by_gradient:
            expected = "tiles by keys, and no order of sums"
            raise ValueError(f"a kernel of all keys has {expected}, got {self.tiles}, {self.deterministic=}")

    @property
    def dq_sums(self) -> int:
        """None."""
        return 0

    @property
    def exchange(self) -> tuple[int, int]:
        """The same, with dQ rounded."""
        numbers, stages = super().exchange
        return numbers * BYTES[self.dtype] // BYTES["fp32"], stages


@dataclass(frozen=True)
class KernelBackwardByHead(KernelBackward):
    """A backward kernel whose thread blocks have all tiles of a head each, one after another, and so all of its dQ: in
    a fixed order, and in memory of their own, that a thread block uses for one head after the other."""

    by_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        tiles = self.tiles
        if self.deterministic or self.left or self.split_queries or tiles.by_gradient:
            got = f"{tiles}, {self.deterministic=}, {self.left=}, {self.split_queries=}"
            raise ValueError(f"a kernel by head has tiles by keys, not split, and no window on the left, got {got}")

    @property
    def staggered(self) -> bool:
        """Tiles of a head don't run at the same time."""
        return False

    @property
    def dq_sums(self) -> int:
        """None."""
        return 0

    def numbers_of_dq(self, blocks_q: int, heads: int, thread_blocks: int) -> int:
        """The same, of each thread block's head."""
        return thread_blocks * blocks_q * self.tiles.block_q * self.width


@dataclass(frozen=True)
class KernelBackwardPacked(KernelBackward):
    """A backward kernel of packed sequences."""

    @property
    def words_of_work(self) -> int:
        """32-bit words that tell of the next tile, as in `KernelPacked`."""
        return ENTRY + 1


@dataclass(frozen=True)
class KernelBackwardSparse(KernelBackward):
    """A block-sparse backward kernel: a tile is a column of the block mask or a part of one; `left` and `right` bound
    the window of partial blocks.

    Attributes:
        mask_kv: keys of a block of the mask.
        bits: partial blocks have a mask of elements too.
    """

    mask_kv: int
    bits: bool

    @property
    def uneven(self) -> bool:
        """The same: as many as the mask's lists have."""
        return False

    @property
    def staggered(self) -> bool:
        """The same: tiles walk lists of their own."""
        return False

    def __post_init__(self) -> None:
        tiles = self.tiles
        if MASK_Q % tiles.block_q or self.mask_kv % tiles.block_kv or self.deterministic:
            expected = f"{MASK_Q} queries by {self.mask_kv} keys, or parts of them, and any order"
            raise ValueError(f"a block-sparse kernel has {expected}, got {tiles}, deterministic={self.deterministic}")

    @property
    def parts(self) -> int:
        """Blocks of queries that make one of the mask's."""
        return MASK_Q // self.tiles.block_q

    @property
    def parts_of_column(self) -> int:
        """Tiles that make a column of the mask."""
        return self.mask_kv // self.tiles.block_kv

    @property
    def words_of_work(self) -> int:
        """32-bit words that tell of the next tile, as in `KernelSparse`."""
        return 5

    def blocks_q(self, seqlen_q: int) -> int:
        """The same, for whole blocks of the mask."""
        return (seqlen_q + MASK_Q - 1) // MASK_Q * self.parts

    def blocks_kv(self, seqlen_k: int) -> int:
        """The same, for whole columns of the mask."""
        return cdiv(seqlen_k, self.mask_kv) * self.parts_of_column
