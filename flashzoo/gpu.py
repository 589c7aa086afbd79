"""Facts of NVIDIA GPUs: what tiles and kernels are chosen by, and how fast they could be."""

from __future__ import annotations

import re

# Shared memory of one block in bytes, from the CUDA programming guide's table of compute capabilities.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

MULTIPROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148}
"""Of the GPU that stands for an architecture: what is split by them must not depend on anything but shapes, lest bits
do."""


def multiprocessors_of(arch: int | None) -> int:
    """That number; where the architecture is none of these, or there is no GPU, Hopper's."""
    return MULTIPROCESSORS.get(arch or 90, MULTIPROCESSORS[90])


WARPS = 4
"""Of a warpgroup."""

WARPGROUP = 32 * WARPS
"""Threads of a warpgroup, the four warps that issue one WGMMA."""

WARPGROUP_ROWS = 64
"""Rows of a consumer warpgroup: the M of one WGMMA."""

RAGGED_ROWS = 1 << 30
"""Rows, at most, of packed sequences that TMA reads: `flashzoo/_cute/tma.py` has the reason."""


def ragged_back(by_row: int) -> int:
    """The stride that, RAGGED_ROWS times, is as far back as so many rows are forward:
    less 2^64, which addresses are taken modulo."""
    return -by_row % (2**64 // RAGGED_ROWS)


PEAKS = (
    ("B200", 2250, 75),
    ("B300", 2250, 75),
    ("H200", 989, 67),
    ("GH200", 989, 67),
    ("H100 PCIe", 756, 51),
    ("H100 NVL", 835, 60),
    ("H100", 989, 67),
    ("H20", 148, 44),
    ("A100", 312, 19.5),
    ("A800", 312, 19.5),
    ("A30", 165, 10.3),
    ("A10", 125, 31.2),
    ("L40S", 362, 91.6),
    ("L4", 121, 30.3),
    ("RTX 4090", 165, 82.6),
    ("RTX 3090", 71, 35.6),
    ("V100", 125, 15.7),
)
"""Dense peak TFLOP/s by NVIDIA's datasheets and whitepapers: 16-bit tensor cores with float32 accumulation, then
float32 outside tensor cores. The first name found in the GPU's own counts."""
NO_FP8 = ("A100", "A800", "A30", "A10", "RTX 3090", "V100")
"""Those of `PEAKS` without FP8 tensor cores; with them, FP8's peak is twice that of 16 bits."""


def peak_tflops(gpu: str, numerics: str) -> float | None:
    """Dense peak of a GPU by its name (`torch.cuda.get_device_name()`) and `Problem.numerics`; None where not known."""
    for name, half, single in PEAKS:
        if re.search(rf"\b{name}\b", gpu):
            fp8 = None if name in NO_FP8 else 2 * half
            return {"fp16": half, "bf16": half, "fp32": single, "e4m3": fp8, "fp8": fp8}.get(numerics)
    return None
