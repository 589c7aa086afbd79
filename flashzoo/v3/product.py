"""The product of P with V in 16 bits: how V reaches the tensor core, and how a block's product is added to O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.utils import hopper_helpers

from flashzoo._cute.hopper.dtypes import DTYPES
from flashzoo._cute.hopper.params import Params
from flashzoo._cute.hopper.pipeline import Pipeline, PipelineState
from flashzoo._cute.hopper.wgmma import multiply, scale_rows, shared_layout, to_16_bits, transposed
from flashzoo.gpu import WARPGROUP_ROWS
from flashzoo.v3.traits import ALIGNED, Kernel


@dataclass(frozen=True)
class RawV:
    """V as TMA loads it, where it is transposed on chip: stages of (keys, head_dim), and their pipeline."""

    v: cute.Tensor
    pipeline: Pipeline


class ValuePath:
    """V goes straight to where the tensor core reads it, as it lies in memory: keys, head dim.

    Attributes:
        helpers: how many warps of the producer's warpgroup work on V, beside the producer.
        stages: blocks of V that TMA loads ahead.
    """

    helpers: int = 0

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.dtype: type[cutlass.Numeric] = DTYPES[kernel.dtype]
        self.stages: int = kernel.tiles.stages

    def shared_layout(self) -> cute.ComposedLayout:
        """Of what TMA loads: (keys, head_dim, stages)."""
        tiles = self.kernel.tiles
        return shared_layout(self.dtype, tiles.block_kv, self.kernel.width_v, tiles.teams * self.stages)

    def origin(self, column: int, *row: Any) -> tuple[Any, ...]:
        """Where a block of V, or a part of one, begins in memory: at a row as `SequenceInfo.origin_k` gives it."""
        return (column, *row)

    def allocate(
        self, smem: cutlass.memory.SmemAllocator, layout: cute.ComposedLayout
    ) -> tuple[cute.Tensor, cute.Tensor | None]:
        """The stages that the tensor core reads, and those that TMA fills where they differ."""
        return smem.allocate_tensor(self.dtype, layout.outer, ALIGNED, swizzle=layout.inner), None

    def operand(self, v: cute.Tensor) -> cute.Tensor:
        """The stages that the tensor core reads as (head_dim, keys, stages)."""
        return transposed(v)

    def help(self, params: Params, storage: Any, helper: Int32) -> None:
        """What a helper does."""


class Product:
    """P from registers times V, added to O by the tensor core.

    Attributes:
        columns: of O, that are multiplied at a time.
    """

    v_major: OperandMajorMode = OperandMajorMode.MN

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.dtype: type[cutlass.Numeric] = DTYPES[kernel.dtype]
        self.columns: int = kernel.width_v // kernel.parts_v

    def mma(self, columns: int) -> cute.TiledMma:
        """The product of P with that many columns of V."""
        return hopper_helpers.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, OperandMajorMode.K, self.v_major), Float32, (1, 1, 1), (WARPGROUP_ROWS, columns),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    def to_operand(self, s: cute.Tensor, p: cute.Tensor) -> None:
        """P as the operand of the next product."""
        to_16_bits(s, p)

    def wait(self, consumer: Any, n: PipelineState) -> None:
        """Wait for what `issue` begins with: the n-th block of V, or its first part."""
        consumer.storage.v_pipeline.consumer_wait(n.part(0, self.kernel.parts_v))

    @cute.jit
    def release(self, consumer: Any, n: PipelineState):
        """This warp has read the n-th block of V."""
        for part in cutlass.range_constexpr(self.kernel.parts_v):
            consumer.storage.v_pipeline.consumer_release(n.part(part, self.kernel.parts_v))

    @cute.jit
    def issue(self, consumer: Any, n: PipelineState) -> cute.Tensor | None:
        """Issue P times the n-th block of V, a group of WGMMAs to wait for, of each part once it is there:
        its result, or None where that is added to O."""
        atom = cute.make_mma_atom(consumer.mma_pv.op)
        v_pipeline, parts = consumer.storage.v_pipeline, self.kernel.parts_v
        shape = consumer.mma_pv.get_slice(0).partition_shape_C((WARPGROUP_ROWS, self.columns))
        warpgroup.fence()
        for part in cutlass.range_constexpr(parts):
            if const_expr(part > 0):
                v_pipeline.consumer_wait(n.part(part, parts))
            o = cute.make_tensor(consumer.o.iterator + part * cute.size(shape), cute.make_layout(shape))
            multiply(atom, o, consumer.p, consumer.v[None, None, None, v_pipeline.stage(n.part(part, parts))], False)
        warpgroup.commit_group()

    def add(self, consumer: Any, product: cute.Tensor | None) -> None:
        """Add a block's finished product to O: here the tensor core has."""

    def begin(self, consumer: Any) -> None:
        """Begin with an O of zeros."""
        consumer.o.fill(0.0)

    def catch_up(self, consumer: Any) -> None:
        """Add to O what `add` has left, under the product of the next block's scores: here nothing."""

    @cute.jit
    def rescale(self, consumer: Any, needed: Boolean, alpha: cute.Tensor):
        """Rescale O to the rows' new maximum."""
        if needed:
            scale_rows(consumer.o, alpha)
