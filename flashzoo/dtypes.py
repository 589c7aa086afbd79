"""The dtypes of tensors by the names that a `Problem` has for them."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "e4m3": torch.float8_e4m3fn,
}

BYTES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
"""Of an element."""
