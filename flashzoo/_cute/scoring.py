"""What a kernel is told of a function on scores: its traits, and its tensors as arguments."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flashzoo._cute.arguments import INT, LONG, Parameter, Pointer
from flashzoo.call.problem import Problem
from flashzoo.scores.mod import ScoreMod
from flashzoo.scores.program import parsed
from flashzoo.scores.trace import with_gradient
from flashzoo.scores.traits import Scoring

_MEMORY = {"bool": "u8", "f16": "fp16", "f32": "fp32"}
"""Programs' dtypes whose names in memory are others."""
_BYTES = {"bool": 1, "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4}


def scoring_of(problem: Problem, pairs: tuple[bool, ...] = (), gradient: bool = False) -> Scoring | None:
    """The traits of a problem's function; None without one.

    Args:
        pairs: as `pairs_of` has them; none where empty.
        gradient: for a backward kernel.
    """
    form = problem.score_mod
    if form is None:
        return None
    reads = tuple((dtype, len(shape)) for dtype, shape in form.reads)
    text = with_gradient(form.text) if gradient else form.text
    return Scoring(text, reads, pairs or (False,) * len(reads), form.far, problem.sequences is not None)


def parameters_of(scoring: Scoring | None) -> dict[str, Parameter]:
    """Of each tensor that a function reads the address, the sizes, the strides: all of them one behind the other."""
    found: dict[str, Parameter] = {}
    if scoring is None:
        return found
    number = LONG if scoring.far else INT
    for i, ((dtype, dimensions), pairs) in enumerate(zip(scoring.reads, scoring.pairs, strict=True)):
        found[f"tensor_{i}"] = Pointer(_MEMORY.get(dtype, dtype), align=_BYTES[dtype] * (2 if pairs else 1))
        found |= {f"{what}_{i}_{d}": number for what in ("size", "stride") for d in range(dimensions)}
    return found


def pairs_of(mod: ScoreMod | None) -> tuple[bool, ...]:
    """`Scoring.pairs` of a call; all are False where no load gains by it."""
    if mod is None or not mod.tensors:
        return ()
    wanted = {int(step.arguments[0][1:]) for _, step in parsed(mod.text).loads if step.arguments[-1] == "k"}
    return tuple([i in wanted and _has_pairs(x) for i, x in enumerate(mod.tensors)])


def _has_pairs(x: Tensor) -> bool:
    even = all([stride % 2 == 0 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1])
    return x.numel() > 0 and x.itemsize <= 4 and x.stride(-1) == 1 and even and x.data_ptr() % (2 * x.itemsize) == 0


def arguments_of_scoring(mod: ScoreMod | None, instead: int) -> Iterator[int]:
    """What a call gives for `parameters_of`.

    Args:
        instead: an address at which something may be read, for tensors that have no element.
    """
    for x in () if mod is None else mod.tensors:
        empty = not x.numel()
        yield instead if empty else x.data_ptr()
        yield from x.shape
        yield from (0,) * x.ndim if empty else x.stride()
