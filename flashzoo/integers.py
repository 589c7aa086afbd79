"""Arithmetic of whole numbers."""

from __future__ import annotations


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int, least: int = 1) -> int:
    """The smallest power of two that is neither below x nor below `least`, a power of two itself."""
    return max(least, 1 << (x - 1).bit_length())
