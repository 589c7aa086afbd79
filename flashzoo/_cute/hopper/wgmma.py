"""Products on the tensor cores: their operands in shared memory and their results in registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

# Registers of a thread (setmaxnreg), by the number of consumer warpgroups: of a multiprocessor's 64 K the producer
# gives up most of its share. No table of tiles has one consumer: that is for tests.
PRODUCER_REGISTERS = {1: 56, 2: 24, 3: 32, 4: 24}
CONSUMER_REGISTERS = {1: 256, 2: 240, 3: 160, 4: 112}


@cute.jit
def gemm(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    zero: Constexpr[bool],
    first: Constexpr[int] = 0,
):
    """Issue `acc = a b^T` (zero) or `acc += a b^T` as one group of WGMMAs; wait for the group before touching acc.

    Of b's columns, which WGMMA takes by 16, those from the `first` 16 on, as many as a has.
    """
    atom = cute.make_mma_atom(mma.op)
    warpgroup.fence()
    multiply(atom, acc, a, b, zero, first)
    warpgroup.commit_group()


@cute.jit
def multiply(
    atom: cute.MmaAtom,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    zero: Constexpr[bool],
    first: Constexpr[int] = 0,
):
    """The WGMMAs of a `gemm`, for a group that may have those of others too."""
    for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not (zero and i == 0))
        cute.gemm(atom, acc, a[None, None, i], b[None, None, first + i], acc)


def shared_layout(
    dtype: type[cutlass.Numeric], rows: int, width: int, stages: int, columns: int | None = None
) -> cute.ComposedLayout:
    """(rows, width, stages), swizzled as TMA writes and WGMMA reads it; so that each `columns` of the width
    are an operand, if given."""
    kind = hopper_helpers.get_smem_layout_atom(cutlass.tensor_utils.LayoutEnum.ROW_MAJOR, dtype, columns or width)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, width, stages), (0, 1, 2))


def transposed(stages: cute.Tensor) -> cute.Tensor:
    """Stages of (rows, width) as (width, rows)."""
    return cute.make_tensor(stages.iterator, cute.select(stages.layout, mode=[1, 0, 2]))


def columns_of(b: cute.Tensor, part: int | Int32) -> cute.Tensor:
    """One block of columns of an operand, of as many as a product has."""
    b = b[None, part, None]
    layout = cute.make_layout((b.shape[0], 1, b.shape[1]), stride=(b.stride[0], 0, b.stride[1]))
    return cute.make_tensor(b.iterator, layout)


def rows_of(acc: cute.Tensor) -> cute.Tensor:
    """A WGMMA result's registers as (pair, row, pairs): pairs of columns, 8 apart,
    of the rows `lane / 4` and 8 below."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, cute.size(acc) // 4)))


@cute.jit
def scale_rows(acc: cute.Tensor, by: cute.Tensor):
    """Multiply each of a thread's two rows of a WGMMA result by its factor."""
    rows = rows_of(acc)
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(2):
                rows[c, r, i] = rows[c, r, i] * by[r]


@cute.jit
def to_16_bits(x: cute.Tensor, y: cute.Tensor):
    """Round. WGMMA's result and its operand have the same layout, register by register; a pair is one instruction."""
    # Pairs by fours, only because CuTe DSL warns its users of loops of 64 and more.
    x_parts = cute.make_tensor(x.iterator, cute.make_layout((2, 4, cute.size(x) // 8)))
    y_parts = cute.make_tensor(y.iterator, cute.make_layout((2, 4, cute.size(y) // 8)))
    for i in cutlass.range_constexpr(cute.size(y) // 8):
        for j in cutlass.range_constexpr(4):
            y_parts[None, j, i].store(x_parts[None, j, i].load().to(y.element_type))
