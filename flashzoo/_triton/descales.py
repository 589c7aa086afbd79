"""Descales of e4m3 keys and values as kernels take them."""

from __future__ import annotations

from torch import Tensor


def strided(descale: Tensor | None) -> tuple[Tensor, int, int, int] | None:
    """The numbers, and their strides over batch, heads and blocks of rows, 0 where all blocks share one; None where
    there is no descale.

    Args:
        descale: `(batch, heads_kv)` or `(batch, heads_kv, blocks)`.
    """
    return None if descale is None else (descale, *(*descale.stride(), 0)[:3])  # pyright: ignore[reportReturnType]
