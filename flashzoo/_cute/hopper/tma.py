"""What TMA moves between memory and shared memory."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int16, const_expr
from cutlass.cute.nvgpu import cpasync


def tma_atom(operation: Any, x: cute.Tensor, layout: cute.ComposedLayout, cluster: int = 1) -> cute.CopyAtom:
    """A TMA copy between a tensor (head_dim, heads, rows, ...) and stages (rows, width, stages) of that layout;
    where thread blocks of a cluster load for one another, of each one's share."""
    rows_first = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 0, 1, *range(3, cute.rank(x))]))
    box = cute.select(layout, mode=[0, 1])
    return cpasync.make_tiled_tma_atom(operation, rows_first, box, cute.product_each(box.shape), cluster)[0]


@cute.jit
def load(
    tma: cute.CopyAtom,
    tile: cute.Tensor,
    origin: tuple,
    full: cute.Pointer,
    values: cute.Pointer | None = None,
    column: cute.Tensor | None = None,
    cluster: Constexpr[int] = 1,
):
    """Have TMA read the box at `origin` into a tile, and float32 values into a column beside it;
    arrive at `full` with both.

    Each of the thread blocks of a cluster that load the same box reads its share of the rows into the tiles of all, and
    arrives at the mbarriers of all: each expects the whole tile.
    """
    gmem, smem = box_of(tma, tile, origin, cluster)
    floats = 0 if const_expr(column is None) else cute.size(column)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, cute.size(tile) * tile.element_type.width // 8 + 4 * floats)
        if const_expr(column is not None):
            source = cute.make_tensor(values.align(16), cute.make_layout(floats))
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), source, column, mbar_ptr=full)
    if const_expr(cluster > 1):
        cute.copy(tma, gmem, smem, tma_bar_ptr=full, mcast_mask=Int16((1 << cluster) - 1))
    else:
        cute.copy(tma, gmem, smem, tma_bar_ptr=full)


@cute.jit
def box_of(tma: cute.CopyAtom, tile: cute.Tensor, origin: tuple, cluster: Constexpr[int] = 1):
    """The two sides of a TMA copy: the box at `origin` of (head_dim, heads, rows, ...), and the tile (rows, width);
    of a cluster's thread block its share of both."""
    rows, width = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    box = cute.make_identity_tensor((width, 1, rows, *[1] * (len(origin) - 3)))
    at_origin = cute.group_modes(cute.domain_offset(origin, box), 0, len(origin))
    columns_first = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
    share = cute.arch.block_idx_in_cluster() if const_expr(cluster > 1) else 0
    shares = cute.make_layout(cluster)
    smem, gmem = cpasync.tma_partition(tma, share, shares, cute.group_modes(columns_first, 0, 2), at_origin)
    return gmem, smem
