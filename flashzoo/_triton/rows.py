"""Memory for what kernels write."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory in x's shape and in the order of its dimensions, columns innermost, whose stride kernels take for 1.

    `torch.empty_like` has another dimension innermost where that has the same stride and is shorter, as queries that
    are frames of one signal, `x.unfold(1, head_dim, 1)`.
    """
    found = torch.empty_like(x, dtype=dtype)
    return found if found.stride(-1) == 1 else torch.empty(x.shape, dtype=found.dtype, device=x.device)
