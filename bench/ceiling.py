"""What the GPU could do in this run: products of matrices, timed before and after."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.rows import GEMM, Row, no_attention, time_columns
from flashzoo.timing import Clock
from flashzoo.workloads import TORCH_DTYPES

MATMUL_SIZE = {"cuda": 8192, "cpu": 256}


def ceilings(clock: Clock, device: str, ms_each: float, dtype: str) -> list[Row]:
    """The row of the bf16 matmul, and for cells in e4m3 that of the FP8 one."""
    return [
        ceiling(clock, device, ms_each, product) for product in (("bf16", "e4m3") if dtype == "e4m3" else ("bf16",))
    ]


def ceiling(clock: Clock, device: str, ms_each: float, dtype: str) -> Row:
    """The row of a matmul in bf16 or e4m3, with the GPU's clocks settled."""
    size = MATMUL_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(TORCH_DTYPES[dtype]) for _ in range(2))
    times = clock.settled(lambda: PRODUCTS[dtype](a, b), ms_each)
    return {**no_attention(GEMM, "matmul", dtype, size, size), **time_columns(times, 2.0 * size**3)}


def _fp8_product(a: Tensor, b: Tensor) -> Tensor:
    # Both operands along k, the only way that FP8 tensor cores take them, and their fast accumulation:
    # the highest rate there is.
    one = torch.ones((), device=a.device)
    scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


PRODUCTS = {"bf16": torch.matmul, "e4m3": _fp8_product}
