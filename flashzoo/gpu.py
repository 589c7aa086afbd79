"""Facts of NVIDIA GPUs that tiles and kernels are chosen by."""

from __future__ import annotations

# Shared memory of one block in bytes, from the CUDA programming guide's table of compute capabilities.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

WARPS = 4
"""Of a warpgroup."""

WARPGROUP = 32 * WARPS
"""Threads of a warpgroup, the four warps that issue one WGMMA."""

WARPGROUP_ROWS = 64
"""Rows of a consumer warpgroup: the M of one WGMMA."""
