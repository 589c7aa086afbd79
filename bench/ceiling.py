"""What the GPU could do in this run, timed before and after: products of matrices, and for decoding a copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bench.rows import COPY, GEMM, Row, no_attention, time_columns
from flashzoo.dtypes import BYTES, TORCH_DTYPES
from flashzoo.timing import Clock

MATMUL_SIZE = {"cuda": 8192, "cpu": 256}
COPIED = {"cuda": (16384, 8192), "cpu": (256, 256)}
"""Rows and columns in bf16 of what the row `copy` copies: on a GPU 256 MiB, five times an H200's L2."""


def ceilings(clock: Clock, device: str, ms_each: float, dtype: str, decode: bool = False) -> list[Row]:
    """The row of the bf16 matmul, for cells in e4m3 that of the FP8 one, and for those of decoding that of a copy."""
    products = ("bf16", "e4m3") if dtype == "e4m3" else ("bf16",)
    rows = [ceiling(clock, device, ms_each, product) for product in products]
    return [*rows, copy_row(clock, device, ms_each)] if decode else rows


def copy_row(clock: Clock, device: str, ms_each: float) -> Row:
    """The row of a copy on the device."""
    source = torch.ones(COPIED[device], dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    times = clock.measure({COPY: lambda: target.copy_(source)}, ms_each)[COPY]
    return {**no_attention(COPY, COPY, "bf16", *COPIED[device]), **time_columns(times, 1), "tflops": ""}


def copied(row: Mapping[str, object]) -> float:
    """TB/s, read and written, of a row of pass `copy`."""
    elements = int(str(row["seqlen_q"])) * int(str(row["head_dim"]))
    return 2 * BYTES[str(row["dtype"])] * elements / float(str(row["ms"])) / 1e9


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
