"""What of a function on scores a kernel is compiled for. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scoring:
    """All of it that decides a kernel.

    Attributes:
        text: of its program, which returns the new score, and in a backward kernel the old one's gradient behind it.
        reads: dtype and number of dimensions of each tensor.
        pairs: whether two elements of a tensor that follow one another, the first in an even place of the last
            dimension, are one aligned load.
        far: indices are of 64 bits.
        unchecked: tensors may have fewer elements than there are queries or keys.
    """

    text: str
    reads: tuple[tuple[str, int], ...]
    pairs: tuple[bool, ...]
    far: bool
    unchecked: bool
