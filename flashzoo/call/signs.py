"""Numbers of the other sign, as kernels read them: from memory, and with a last stride of 1."""

from __future__ import annotations

import torch
from torch import Tensor


def negated(x: Tensor) -> Tensor:
    """-x, of e4m3 too, in whole rows."""
    # torch has no arithmetic for e4m3, whose sign is its first bit
    return in_rows((x.view(torch.uint8) ^ 128).view(x.dtype) if x.dtype == torch.float8_e4m3fn else -x)


def resolved(x: Tensor) -> Tensor:
    """x, where it is lazily negated a copy in whole rows: memory has such numbers with the other sign."""
    return in_rows(x.resolve_neg()) if x.is_neg() else x


def in_rows(x: Tensor) -> Tensor:
    """x, copied where its last dimension is not contiguous.

    torch has another dimension innermost in what it makes of a tensor where that has the same stride and is shorter,
    as heads that overlap.
    """
    return x if x.stride(-1) == 1 else x.contiguous()
