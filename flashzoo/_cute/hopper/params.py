"""What a launch says once for all of its thread blocks, and the sequence that a tile is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Int32


@dataclass(frozen=True)
class SequenceInfo:
    """A sequence: where its rows are in q, k and v, and how many there are.

    Attributes:
        batch: its index.
        seqlen_q, seqlen_k: lengths.
    """

    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32

    def origin_q(self, row: Int32, head: Int32) -> tuple[Any, ...]:
        """A row of q, out or their gradients, as TMA counts: heads, rows, batch."""
        return head, row, self.batch

    def origin_k(self, row: Int32, head: Int32) -> tuple[Any, ...]:
        """The same of k or v."""
        return head, row, self.batch

    def origin_dk(self, row: Int32, head: Int32) -> tuple[Any, ...]:
        """The same of their gradients."""
        return self.origin_k(row, head)

    def diagonal(self, position: Int32) -> Int32:
        """The key that a query is aligned with: the last query with the last key."""
        return position + self.seqlen_k - self.seqlen_q


@dataclass(frozen=True)
class Params:
    """A kernel's arguments but for its tensors.

    Attributes:
        kernel: what is compiled.
        seqlen_q, seqlen_k: lengths of all sequences.
        heads: query heads; those that share a tile count as one. In the backward pass key/value heads, each counted
            `splits` times.
        group: of those query heads, how many share a key/value head. In the backward pass those of one tile, at most.
        group_kv, splits: in the backward pass, how many query heads share a key/value head, and over how many tiles
            their queries are split.
        query_splits: how many of these tiles have the same heads, and share out the blocks of queries; of others each
            has heads of its own, the last the fewest.
        pack_gqa: log2 of how many query heads of a key/value head share a tile.
        window_left, window_right: how many keys either side of the diagonal a query sees,
            where the kernel has that bound.
        blocks: tiles of one head.
        batch_heads: batch times heads.
        l2_swizzle: how many heads' tiles are interleaved, so that their keys and values are in L2 together.
        wave: in the backward pass, how many tiles begin together under a causal mask at the last block of queries; the
            next so many walk their blocks the other way. 0 where all begin at their diagonal.
        counter: one zero in memory, for this launch alone until it ends.
    """

    kernel: Constexpr[Any]
    seqlen_q: Int32
    seqlen_k: Int32
    heads: Int32
    group: Int32
    group_kv: Int32
    splits: Int32
    query_splits: Int32
    pack_gqa: Int32
    window_left: Int32
    window_right: Int32
    blocks: Int32
    batch_heads: Int32
    l2_swizzle: Int32
    wave: Int32
    counter: cute.Pointer

    def sequence(self, batch: Int32) -> SequenceInfo:
        """The sequence of that index."""
        return SequenceInfo(batch, self.seqlen_q, self.seqlen_k)
