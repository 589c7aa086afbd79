"""Which keys a query sees, as plain values: windows, and `MaskForm`, the hashable part of a block mask. And
`ScoreForm`, that of a function on scores. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LARGEST_SIDE = 2**63 - 1
"""Of a window: what a graph of torch's can hold."""

Window = tuple[int | None, int | None]


def span_of(causal: bool, window: Window) -> Window:
    """The visible band around the aligned diagonal: causal is a window with nothing on its right."""
    left, right = window
    return (left, 0 if right is None else min(right, 0)) if causal else (left, right)


def check_flags(**flags: Any) -> None:
    """TypeError where one is no bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")


def normalised(window_size: Any, name: str = "window_size") -> Window:
    """window_size with None for every side that is not bounded; name is what errors call it."""
    if window_size is None:
        return None, None
    expected = "must be None or a pair (left, right) of None, -1 or ints from 0 to 2**63 - 1"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{name} {expected}, got {window_size!r}")
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or not -1 <= side <= LARGEST_SIDE):
            raise ValueError(f"{name} {expected}, got {window_size!r}")
    left, right = (None if side == -1 else side for side in window_size)
    return left, right


@dataclass(frozen=True)
class MaskForm:
    """A `flashzoo.BlockMask` without its lists: what the choice of a version and of its kernels may depend on.

    Attributes:
        block_q, block_kv: sizes of a block, in tokens.
        batch, heads: for how many it has lists of their own; 1 where they are shared by all.
        causal, window: what its partial blocks apply to their elements, as in `Problem`.
        bits: they apply a mask of elements too.
    """

    block_q: int = 128
    block_kv: int = 128
    batch: int = 1
    heads: int = 1
    causal: bool = False
    window: Window = (None, None)
    bits: bool = False

    @property
    def span(self) -> Window:
        """The visible band of a partial block, causal folded in."""
        return span_of(self.causal, self.window)

    def __str__(self) -> str:
        text = f"block mask {self.block_q}x{self.block_kv}"
        text += "".join(f" by {name}" for name in ("batch", "heads") if getattr(self, name) > 1)
        how = [
            *(["causal"] if self.causal else []),
            *([f"window {self.window}"] if self.window != (None, None) else []),
        ]
        how += ["bits"] if self.bits else []
        return f"{text} ({', '.join(how)})" if how else text


SOFTCAP = """\
x0: f32 = mul(score, 0.05)
x1: f32 = tanh(x0)
x2: f32 = mul(x1, 20.0)
return x2"""


@dataclass(frozen=True)
class ScoreForm:
    """A `flashzoo.ScoreMod` without its function and its tensors' numbers: what the choice of a version and of its
    kernels may depend on.

    Attributes:
        text: of its `flashzoo.scores.program.Program`; unless given a softcap of 20.
        reads: dtype and shape of each tensor that it captured.
        grads: the numbers of those that have gradients.
        far: elements of one of them lie 2^31 or more apart.
    """

    text: str = SOFTCAP
    reads: tuple[tuple[str, tuple[int, ...]], ...] = ()
    grads: tuple[int, ...] = ()
    far: bool = False

    def __str__(self) -> str:
        text = f"score_mod of {self.text.count(chr(10))} operations"
        read = [f"{dtype} {shape}" for dtype, shape in self.reads]
        return f"{text} on {', '.join(read)}" if read else text
