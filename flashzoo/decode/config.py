"""How a decode kernel is cut: its tiles, and how many parts keys are split into."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec

from flashzoo.call.problem import DESCALE_BLOCK, Problem
from flashzoo.decode.traits import LATENT_WIDTHS, WIDTHS, Kernel, KernelE4m3, KernelLatent, Merging
from flashzoo.dtypes import BYTES
from flashzoo.gpu import MULTIPROCESSORS, WARPGROUP_ROWS, multiprocessors_of
from flashzoo.integers import cdiv, next_power_of_2
from flashzoo.tiles import TENSOR_CORE, block_d

E4M3_ARCH = 89
"""The first that Triton converts e4m3 on."""


@dataclass(frozen=True)
class Tiles:
    """How `split_kernel` is cut.

    Attributes:
        rows: of a tile, at most: queries, those of all query heads that share a key/value head side by side.
        block_kv: keys of a block.
        num_warps, num_stages: warps of a program, and depth of the software pipeline over keys and values.
        programs: how many are to run on a multiprocessor, one after another or at a time.
        least: keys of a split, at least.
        merged: rows of a program of `merge_kernel`.
    """

    rows: int
    block_kv: int
    num_warps: int
    num_stages: int
    programs: int = 4
    least: int = 256
    merged: int = 1

    def __str__(self) -> str:
        return f"{self.rows} rows by {self.block_kv} keys, {self.num_warps} warps, {self.num_stages} stages"


# By the width of the head dim's tile. On Hopper the fastest of fifteen in most of nine caches of 2k to 128k keys on an
# H200, 16-bit inputs, Triton 3.6, one query.
HOPPER = {64: Tiles(64, 64, 4, 3, programs=2), 128: Tiles(64, 64, 4, 3, programs=2)}
# Not measured: the largest tried that compile without spills.
ANYWHERE = {
    64: Tiles(64, 64, 4, 3),
    128: Tiles(64, 64, 4, 2),
    256: Tiles(64, 32, 8, 2),
}
# Where values lie in keys, by the width of values: as above.
LATENT = {512: Tiles(32, 32, 8, 2)}
# A product on the CUDA cores holds whole rows of both operands in registers.
FLOAT32 = {64: Tiles(16, 32, 4, 1), 128: Tiles(16, 16, 4, 1), 256: Tiles(16, 16, 8, 1)}
# The interpreter's cost is per operation, not per element: few, large tiles;
# and splits, so that there is something to merge.
INTERPRETED = Tiles(64, 64, 4, 1, programs=1, least=128, merged=64)


MERGED_COLUMNS = 64
"""Columns of a program of `merge_kernel`, at least."""


def tiles_for(problem: Problem) -> Tiles:
    """The tiles of a problem."""
    if problem.device == "cpu":
        return INTERPRETED
    if problem.latent:
        return LATENT[block_d(problem.head_dim_v)]
    tables = (FLOAT32,) if problem.dtype == "fp32" else (HOPPER, ANYWHERE) if problem.arch == 90 else (ANYWHERE,)
    width = max(64, block_d(problem.head_dim))
    return next(table[width] for table in tables if width in table)


@dataclass(frozen=True)
class Cut:
    """A problem's grid: programs have a tile of rows and a split of keys.

    Attributes:
        rows: of a tile.
        blocks: tiles of a key/value head; of packed queries of all sequences, and some of none.
        split: keys of a split, whole blocks.
        splits: of the keys that a tile sees.
    """

    rows: int
    blocks: int
    split: int
    splits: int


@lru_cache(maxsize=1024)
def cut(problem: Problem) -> Cut:
    """How a problem is cut: by its shape alone, whatever its caches hold,
    so that a sequence has the same bits beside any others.

    Keys are split until there are as many programs as the GPU can have at work,
    but into no shorter parts than `Tiles.least`.
    """
    p, tiles = problem, tiles_for(problem)
    of_head = p.seqlen_q * (p.heads // p.heads_kv)
    rows = min(tiles.rows, next_power_of_2(of_head, TENSOR_CORE))
    blocks = cdiv(of_head, rows) if p.sequences is None else p.entries(of_head, rows)
    left, right = p.span
    keys = p.seqlen_k
    if left is not None and right is not None:  # what a tile's queries see together, and where it begins within a block
        keys = min(keys, left + right + cdiv(rows * p.heads_kv, p.heads) + 1 + tiles.block_kv)
    # of nothing, one part
    wanted = cdiv(tiles.programs * multiprocessors_of(p.arch), max(1, p.batch * p.heads_kv * blocks))
    split = cdiv(max(tiles.least, cdiv(keys, wanted)), tiles.block_kv) * tiles.block_kv
    return Cut(rows, blocks, split, max(1, cdiv(keys, split)))


BLOCK_KV = {64: 128, 128: 64, 192: 64, 256: 64, LATENT_WIDTHS[0]: 64}
"""By width, keys of a block of a Hopper kernel."""
STAGES: dict[int, tuple[int, ...]] = {64: (11, 5), 128: (11, 5), 192: (7,), 256: (5,), LATENT_WIDTHS[0]: (2,)}
"""By width, blocks of K and V, or of both in one, on chip with one thread block on a multiprocessor, and with two where
they fit."""
STAGES_E4M3: dict[int, tuple[int, ...]] = {64: (24, 12), 128: (12, 5), 192: (7,), 256: (5,)}
"""The same of e4m3 keys and values, whose blocks are those of their descales."""
WARP_ROWS = 16
"""Rows of a warp of the kernel for e4m3."""
MOST_ROWS_E4M3 = 128
"""Rows of a key/value head, at most, that it takes: it converts keys anew for each 16, and from 64 on that costs more
than memory does."""
LEAST_BOX = 8
"""Rows of a page, at least, that TMA moves at a time: the swizzle's."""
LARGEST = 1 << 31
"""Of what a kernel counts in 32 bits."""

# Microseconds on an H200, by which keys are split. A block of keys, 128 wide, where memory is not what holds it, for a
# multiprocessor's one thread block and for each of two; what beginning a part costs a thread block that has had one; a
# tile's merging, and, of parts in memory, each of its rounds: 64 rows times parts, 128 columns. What memory gives in
# one. And what v3, and v2 where a cache is used in part, take for 128 rows of a tile and a block of keys.
BLOCK_US, PART_US, MERGE_US, ROUND_US = (0.65, 1.0), 3.0, 2.6, 1.2
WIDE = {64: 1.2, 128: 1.0, 192: 1.5, 256: 2.0, LATENT_WIDTHS[0]: 2.6}
"""How many times as long a block takes, by width: one of 64 has twice the keys."""
BYTES_PER_US = 4.5e6
TILED_US = (0.6, 1.1)
FASTER = 0.95
"""Of another version's time by this model, from which on `auto` takes this one."""
CLUSTERS = {2: 64, 4: 16, 8: 8, 16: 4}
"""By how many thread blocks a cluster has, each with a multiprocessor to itself, how many of them an H200 surely runs
at a time: of 4 and more not twice as many, and of 3, 7 or 11 to 13 never as many as there would be room for. For
MLA none is taken: merging in one costs 15 us and more, a second kernel less."""
MERGE_KERNEL_US, MERGED_PER_US = 5.0, (8e4, 1.5e6)
"""What a second kernel takes that merges, and bytes of parts that it reads beyond: by a multiprocessor, and by all."""
MERGED_AT_ONCE = 64
"""Rows times parts that a thread block reads at a time when it merges:
`Kernel.at_once` of each warp."""


@cache
def _has_cute() -> bool:
    return find_spec("cutlass") is not None


def by_hopper(problem: Problem) -> bool:
    """Whether the kernel for Hopper takes the problem, where TMA can read its tensors."""
    p = problem
    if p.arch != 90:
        return False
    steps = 16 // BYTES[p.dtype_kv or p.dtype]
    wide = (p.head_dim, p.head_dim_v) == LATENT_WIDTHS if p.latent else p.head_dim <= WIDTHS[-1]
    fits = p.head_dim % steps == 0 and wide and p.batch * p.seqlen_q * p.heads * p.head_dim < LARGEST
    taken = p.dtype in ("fp16", "bf16") and not p.packed_q
    few = p.dtype_kv is None or p.seqlen_q * (p.heads // p.heads_kv) <= MOST_ROWS_E4M3
    return taken and few and fits and box_of(p) >= LEAST_BOX and _has_cute()


def box_of(problem: Problem) -> int:
    """Keys that TMA moves at a time."""
    block_kv = block_kv_of(problem)
    return block_kv if problem.page_size is None else math.gcd(block_kv, problem.page_size)


def block_kv_of(problem: Problem) -> int:
    """Keys of a block of the Hopper kernel."""
    return DESCALE_BLOCK if problem.dtype_kv else BLOCK_KV[width_of(problem)]


def stages_of(problem: Problem) -> tuple[int, ...]:
    """Its stages with one thread block on a multiprocessor, and with two where they fit."""
    return (STAGES_E4M3 if problem.dtype_kv else STAGES)[width_of(problem)]


def row_tiles_of(rows: int) -> int:
    """How many warps of the kernel for e4m3 share a tile's rows out: 1, 2 or 4."""
    return next_power_of_2(cdiv(rows, WARP_ROWS))


def width_of(problem: Problem) -> int:
    """The width of the Hopper kernel that holds the head dim."""
    return next(width for width in (*WIDTHS, LATENT_WIDTHS[0]) if problem.head_dim <= width)


@dataclass(frozen=True)
class CutHopper:
    """A problem's grid on Hopper: items have a tile of rows and a split of keys.

    Attributes:
        heads, queries: a tile's rows are so many heads of so many queries.
        tiles: of a key/value head.
        splits: into so many parts at most the keys that a tile sees are split.
        least: keys of a part, at least.
        merging: who merges a tile's splits.
        blocks_per_sm: thread blocks of a multiprocessor: one where each has an item to itself,
            which then has all of its memory's rate.
        microseconds: about how long that takes on an H200.
    """

    heads: int
    queries: int
    tiles: int
    splits: int
    least: int
    merging: Merging
    blocks_per_sm: int
    microseconds: float

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.heads * self.queries


@lru_cache(maxsize=1024)
def cut_hopper(problem: Problem) -> CutHopper:
    """How a problem is cut: by its shape alone, whatever its caches hold,
    so that a sequence has the same bits beside any others.

    The parts of a sequence follow from its own length and from how many they may be. That is the number for which, with
    who merges them, the model below takes least time where all of a cache is used.
    """
    p, group = problem, problem.heads // problem.heads_kv
    heads = min(group, WARPGROUP_ROWS)
    asked = max(1, p.seqlen_q)  # of no query, and of no key, the cut of one
    queries = min(asked, WARPGROUP_ROWS // heads)
    tiles = cdiv(asked, queries) * cdiv(group, heads)
    left, right = p.span
    keys, width = p.seqlen_k, width_of(p)
    block_kv, most = block_kv_of(p), len(stages_of(p))
    slower = row_tiles_of(heads * queries) if p.dtype_kv else 1
    if left is not None and right is not None:  # what a tile's queries see together, and where it begins within a block
        keys = min(keys, left + right + queries + block_kv)
    blocks, all_tiles = cdiv(max(1, keys), block_kv), max(1, p.batch) * p.heads_kv * tiles

    def blocks_per_sm(splits: int) -> int:
        return 1 if all_tiles * splits <= MULTIPROCESSORS[90] else most

    def ways(splits: int) -> Iterator[tuple[Merging, float]]:
        """Who may merge, and how long that takes."""
        if splits == 1:
            yield Merging.NONE, 0.0
            return
        of_round = MERGED_AT_ONCE * (KernelLatent.consumers if p.latent else 1)
        rounds = cdiv(heads * queries * splits, of_round) * cdiv(p.head_dim_v, 128)
        yield Merging.LAST, MERGE_US + ROUND_US * rounds
        if not p.latent and all_tiles <= CLUSTERS.get(splits, 0):
            yield Merging.CLUSTER, MERGE_US
        programs = max(1, p.batch) * p.heads * asked * cdiv(p.head_dim_v, MERGED_COLUMNS)
        by_one, by_all = MERGED_PER_US
        rate = min(by_all, by_one * min(programs, MULTIPROCESSORS[90]))
        yield Merging.KERNEL, MERGE_KERNEL_US + BYTES["fp32"] * splits * programs * MERGED_COLUMNS / rate

    def microseconds(splits: int) -> float:
        of_part, each = cdiv(blocks, splits), blocks_per_sm(splits)
        items, workers = all_tiles * cdiv(blocks, of_part), MULTIPROCESSORS[90] * each
        of_block = BYTES[p.dtype_kv or p.dtype] * block_kv * (p.head_dim if p.latent else 2 * p.head_dim)
        read = of_block * cdiv(min(items, workers), tiles)  # a split's tiles read the same keys
        block = max(BLOCK_US[each - 1] * WIDE[width] * slower, read / BYTES_PER_US)
        waves = cdiv(items, workers)
        return waves * of_part * block + (waves - 1) * PART_US

    most_splits = min(blocks, 2 * MULTIPROCESSORS[90])
    cuts = (
        CutHopper(heads, queries, tiles, splits, block_kv, merging, blocks_per_sm(splits), before + us)
        for splits in range(1, most_splits + 1)
        for before in (microseconds(splits),)
        for merging, us in ways(splits)
    )
    return min(cuts, key=lambda cut: cut.microseconds)


def tiled_microseconds(problem: Problem) -> float:
    """The same of a version that has a tile for each 128 queries, of a head or, where no cache is used in part,
    of all that share its keys."""
    p = problem
    heads, rows = (p.heads, p.seqlen_q) if p.used_k else (p.heads_kv, p.seqlen_q * (p.heads // p.heads_kv))
    left, right = p.span
    keys = p.seqlen_k if left is None or right is None else min(p.seqlen_k, left + right + 128)
    waves = cdiv(p.batch * heads * cdiv(rows, 128), MULTIPROCESSORS[90])
    read = p.batch * p.heads_kv * keys * 4 * p.head_dim
    return max(waves * cdiv(keys, 64) * TILED_US[p.used_k] * max(p.head_dim / 128, 0.5), read / BYTES_PER_US)


def unsupported(problem: Problem) -> list[str]:
    """Sentences on what declarations can't say."""
    p = problem
    if p.dtype_kv is not None and p.device == "cuda" and p.arch is not None and p.arch < E4M3_ARCH:
        return [f"takes e4m3 k and v on sm_{E4M3_ARCH} or newer, got sm_{p.arch}"]
    if p.latent and p.dtype_kv is not None:
        return [f"takes {p.dtype_kv} k and v that have numbers of their own, got v that is k's first columns"]
    if p.latent and p.device == "cuda" and p.dtype == "fp32":
        return ["takes dtype fp16 or bf16 where v is k's first columns, got fp32"]
    if p.packed_q and p.seqlen_q * (p.heads // p.heads_kv) >= LARGEST:
        return [f"counts packed queries times the heads of a group in 32 bits, got {p.seqlen_q}"]
    return []


def leaves(problem: Problem) -> list[str]:
    """Why `auto` leaves a problem to the versions that do not split keys."""
    if problem.grad:
        return ["an input requires grad"]
    if problem.dtype_kv is not None or problem.packed_q or problem.latent:  # no other does not make a copy of them
        return []
    if not by_hopper(problem):
        unmeasured = "only its kernel for Hopper was measured, which does not take this"
        return [unmeasured] if problem.page_size is None else []
    mine, other = cut_hopper(problem).microseconds, tiled_microseconds(problem)
    if mine <= FASTER * other:
        return []
    return [f"some {mine:.0f} us by its model, and {other:.0f} us in tiles of 128 rows without splits"]


def kernel_for(problem: Problem) -> Kernel:
    """The Hopper kernel of a problem."""
    p, (left, right), width, cut = problem, problem.span, width_of(problem), cut_hopper(problem)
    apart = cut.merging is Merging.KERNEL  # then sinks join where out is written, in a second kernel
    how = p.used_k, box_of(p), p.page_size is not None, p.sinks and not apart, cut.merging, block_kv_of(p)
    stages = stages_of(p)[cut.blocks_per_sm - 1]
    dtypes = p.dtype, "fp32" if apart else p.out_dtype
    given = *dtypes, width, left is not None, right is not None, *how, stages, cut.blocks_per_sm
    if p.dtype_kv:
        return KernelE4m3(*given, row_tiles_of(cut.rows))
    return KernelLatent(*given) if p.latent else Kernel(*given)


def describe(problem: Problem) -> list[str]:
    """Sentences for `explain`: how the work is cut, and what happens silently."""
    p, group = problem, problem.heads // problem.heads_kv
    if by_hopper(p):
        how, width = cut_hopper(p), width_of(p)
        lines = [
            f"{how.rows} rows by {block_kv_of(p)} keys, {how.blocks_per_sm} "
            f"thread block{'s' * (how.blocks_per_sm > 1)} a multiprocessor, in CuTe DSL"
        ]
        if p.dtype_kv is not None:
            lines.append(f"{p.dtype_kv} keys and values are made fp16 in registers")
        splits = (
            f"{how.splits} splits at most, merged {how.merging.value}; "
            f"some {how.microseconds:.0f} us on an H200 by its model"
        )
    else:
        how, width = cut(p), p.head_dim if p.latent else block_d(p.head_dim)
        lines = [f"{tiles_for(p)}, in Triton"]
        splits = f"{how.splits} splits of {how.split}, merged {Merging.KERNEL.value}"
        if p.dtype_kv is not None:
            lines.append(f"{p.dtype_kv} keys and values are made {p.dtype} on chip")
        elif p.arch == 90 and p.dtype in ("fp16", "bf16") and not p.packed_q:
            lines.append(
                f"the kernel for Hopper takes head dims and page sizes in steps of {LEAST_BOX}, and needs CuTe DSL"
            )
    lines.append(f"keys: {splits}" if how.splits > 1 else "keys: not split")
    if p.packed_q:
        lines.append("which queries of which sequence a tile has is in a table that a kernel makes of cu_seqlens_q")
    if group > 1:
        lines.append(f"{group} query heads of a key/value head share tiles of {how.rows} rows")
    if p.latent:
        lines.append("values are read with the keys that they lie in, once")
    if p.device == "cpu":
        lines.append("runs in Triton's interpreter: exact, and slow")
    if width != p.head_dim:
        lines.append(f"head_dim {p.head_dim} is padded to {width} on chip, not in memory")
    return lines
