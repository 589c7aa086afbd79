"""Functions on scores as Triton source: written from their programs, and handed to kernels as constexprs.

What they are told: `(score, b, h, q, k, tensors)`, in gradients with `ds` before the tensors. The tensors are one flat
tuple: of each the tensor, its sizes and its strides; and behind these, in the kernel that sums gradients, of each that
has one where it is summed, in float32, contiguous.
"""

from __future__ import annotations

import linecache
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashzoo._triton import score_operations
from flashzoo.call.forms import ScoreForm
from flashzoo.call.problem import LOG2E, Problem
from flashzoo.scores.emit import INFIX, Language
from flashzoo.scores.mod import ScoreMod
from flashzoo.scores.program import INPUTS, Step, is_value, parsed, tensor_number, unmasked
from flashzoo.scores.trace import gradient_of

_DTYPES = {"bool": "tl.int1", "u8": "tl.uint8", "i8": "tl.int8", "i16": "tl.int16", "i32": "tl.int32"}
_DTYPES |= {"i64": "tl.int64", "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32", "f64": "tl.float64"}
_OPERATIONS = {
    **INFIX,
    **{
        name: f"tl.{name}({{0}})"
        for name in ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf", "sin", "cos")
    },
    **{name: f"tl.{name}({{0}})" for name in ("sigmoid", "floor", "ceil")},
    "tanh": "tanh({0})",
    "min": "tl.minimum({0}, {1})",
    "max": "tl.maximum({0}, {1})",
    "div f32": "tl.div_rn({0}, {1})",
    "floordiv": "tl.floor({0} / {1})",
    "floordiv f32": "floor_div_f32({0}, {1})",
    "floordiv int": "floor_div({0}, {1})",
    "remainder": "{0} - tl.floor({0} / {1}) * {1}",
    "remainder f32": "remainder_f32({0}, {1})",
    "remainder int": "remainder({0}, {1})",
    "not": "~{0}",
    "not bool": "{0} == 0",
    "where": "tl.where({0}, {1}, {2})",
}
"""Of float32 Triton's `/` is off by up to two last bits: a multiple of 41 by 41 might be no whole number."""
_OWN = ("floor_div", "floor_div_f32", "remainder", "remainder_f32", "tanh")
_NAMES = {"tl": tl, **{name: getattr(score_operations, name) for name in _OWN}}


def _number(text: str, dtype: str) -> str:
    value = f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else text
    return f"tl.full([], {value}, {dtype})"


class _Places:
    """Where in the tuple each tensor's parts are."""

    def __init__(self, form: ScoreForm) -> None:
        self.first, at = [], 0
        for _, shape in form.reads:
            self.first.append(at)
            at += 1 + 2 * len(shape)
        self.dimensions = [len(shape) for _, shape in form.reads]
        self.far = form.far
        self.sums = {tensor: at + i for i, tensor in enumerate(form.grads)}

    def wide(self, index: str) -> str:
        """An index to count with."""
        return f"tl.cast({index}, tl.int64)" if self.far else index

    def size(self, tensor: int, dimension: int) -> str:
        """Of one dimension."""
        return f"tensors[{self.first[tensor] + 1 + dimension}]"

    def stride(self, tensor: int, dimension: int) -> str:
        """Along one dimension."""
        return f"tensors[{self.first[tensor] + 1 + self.dimensions[tensor] + dimension}]"

    def index(self, name: str, tensor: int, indices: tuple[str, ...]) -> list[str]:
        """Lines that make `<name>_i<d>` of each index, counted from the end where it is negative, and `<name>_in` of
        whether all are within the tensor."""
        lines, within = [], []
        for d, index in enumerate(indices):
            size, mine = self.size(tensor, d), f"{name}_i{d}"
            if index in INPUTS or not is_value(index):  # never negative
                lines.append(f"{mine} = {index}")
            else:
                lines.append(f"{mine} = tl.where({index} < 0, {index} + {size}, {index})")
                within.append(f"({mine} >= 0)")
            if is_value(index):  # a number was looked at when it was traced
                within.append(f"({mine} < {size})")
        # of a bool that Triton's interpreter spreads over a tile it makes an integer, which is no mask to it
        return [*lines, f"{name}_in = ({' & '.join(within) or 'tl.full([], 1, tl.int1)'}) != 0"]

    def load(self, name: str, step: Step, indices: tuple[str, ...]) -> list[str]:
        """A load, of 0 past the tensor's ends."""
        tensor = tensor_number(step.arguments[0])
        pointer = f"tensors[{self.first[tensor]}]"
        if not indices:
            return [f"{name} = tl.load({pointer})"]
        at = " + ".join(f"{self.wide(f'{name}_i{d}')} * {self.stride(tensor, d)}" for d in range(len(indices)))
        value = f"{name} = tl.load({pointer} + ({at}), mask={name}_in, other=0)"
        as_bool = [f"{name} = {name} != 0"] if step.dtype == "bool" else []
        return [*self.index(name, tensor, indices), value, *as_bool]

    def add(self, name: str, tensor: int, indices: tuple[str, ...], value: str, inputs: frozenset[str]) -> list[str]:
        """Lines that add a gradient's tile to where a tensor's is summed: what is of one element first, by sums."""
        pointer = f"tensors[{self.sums[tensor]}]"
        value = _of_a_part(value)
        along = [axis for axis, letter in enumerate("qk") if letter not in inputs]
        lines = [] if not indices else self.index(name, tensor, indices)
        if len(along) == 2:
            lines.append(f"{name}_sum = tl.sum(tl.sum({value}, 1), 0)")
        elif along:
            lines.append(f"{name}_sum = tl.sum({value}, {along[0]}, keep_dims=True)")
        else:
            lines.append(f"{name}_sum = {value}")
        if not indices:
            return [*lines, f"tl.atomic_add({pointer}, {name}_sum)"]
        at = self.wide(f"{name}_i0")
        for d in range(1, len(indices)):
            at = f"({at} * {self.size(tensor, d)} + {name}_i{d})"
        mask = f"{name}_in" if along else f"{name}_in & ({name}_sum != 0)"
        return [*lines, f'tl.atomic_add({pointer} + {at}, {name}_sum, mask={mask}, sem="relaxed")']


def scales(problem: Problem) -> tuple[float, float | None]:
    """What scores are multiplied by to be in log2 units; and before a score_mod, of which None is compiled away."""
    return (problem.scale * LOG2E, None) if problem.score_mod is None else (LOG2E, problem.scale)


def constexprs_of(problem: Problem, gradient: str) -> dict[str, Any]:
    """What a kernel of a backward pass does with scores, and with their gradients: "gradient" or "sums"."""
    found = functions(problem)
    return {"SCORE_MOD": found["forward"], "SCORE_GRADIENT": found[gradient]}


@lru_cache(maxsize=256)
def functions(problem: Problem) -> dict[str, Any]:
    """The constexprs that a problem's function on scores is in kernels: "forward" of new scores, "gradient" of the
    scaled scores' gradient, and "sums" of that where the gradients of tensors are summed as well; None without one."""
    form = problem.score_mod
    if form is None:
        return dict.fromkeys(("forward", "gradient", "sums"))
    return _made(_without_sizes(form))


def gradient_of_read(problem: Problem, tensor: int) -> Any:
    """The constexpr that is the gradient of the one element of a tensor that a score reads."""
    assert problem.score_mod is not None
    return _made_of_read(_without_sizes(problem.score_mod), tensor)


def _without_sizes(form: ScoreForm) -> ScoreForm:
    """Of its tensors only what the source is made of."""
    return replace(form, reads=tuple((dtype, (1,) * len(shape)) for dtype, shape in form.reads))


def _language(places: _Places) -> Language:
    """How programs are written."""
    return Language(_OPERATIONS, _DTYPES, "({0}).to({1})", _number, places.load)


@lru_cache(maxsize=256)
def _made(form: ScoreForm) -> dict[str, Any]:
    places, program, gradient = _Places(form), parsed(form.text), gradient_of(unmasked(form.text))
    language = _language(places)
    (new,) = program.outputs
    lines = language.lines(program, [new])
    if "score" not in program.inputs(new):  # of the score's shape all the same
        new = f"{new} + tl.zeros_like(score)"
    forward = _function("score_mod", "score, b, h, q, k, tensors", [*lines, f"return {new}"])
    of = gradient.program
    ds = _of_a_part(gradient.score) if "ds" in of.inputs(gradient.score) else f"{gradient.score} + tl.zeros_like(ds)"
    lines = [*language.lines(of, [gradient.score]), f"return {ds}"]
    backward = _function("score_gradient", _OF_GRADIENTS, lines)
    summed = [x for x in gradient.loads if x.tensor in form.grads and "ds" in of.inputs(x.value)]
    if not summed:
        return {"forward": forward, "gradient": backward, "sums": backward}
    wanted = [gradient.score, *(name for x in summed for name in (x.value, *x.indices) if name[0] == "x")]
    lines = language.lines(of, wanted)
    for i, x in enumerate(summed):
        inputs = frozenset().union(*(of.inputs(name) for name in x.indices))
        lines += places.add(f"d{i}", x.tensor, x.indices, x.value, inputs)
    sums = _function("score_gradient_and_sums", _OF_GRADIENTS, [*lines, f"return {ds}"])
    return {"forward": forward, "gradient": backward, "sums": sums}


@lru_cache(maxsize=256)
def _made_of_read(form: ScoreForm, tensor: int) -> Any:
    gradient = gradient_of(unmasked(form.text))
    language = _language(_Places(form))
    value = next((x.value for x in gradient.loads if x.tensor == tensor), "0.0")  # of what masks alone none
    lines = language.lines(gradient.program, [value])
    return _function("read_gradient", _OF_GRADIENTS, [*lines, f"return {_of_a_part(value)}"])


_OF_GRADIENTS = "score, b, h, q, k, ds, tensors"


def _of_a_part(value: str) -> str:
    """A gradient that is 0 of a score that has no part, though it be computed as no number."""
    return value if value == "ds" else f"tl.where(ds == 0, 0.0, {value})"


def _function(name: str, arguments: str, lines: list[str]) -> Any:
    """A function of Triton's from its source, which Triton reads where Python keeps that of files."""
    source = "\n".join([f"def {name}({arguments}):", *(f"    {line}" for line in lines), ""])
    file = f"<flashzoo {name} {abs(hash(source)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = dict(_NAMES)
    exec(compile(source, file, "exec"), namespace)
    namespace[name].__module__ = __name__
    return triton.jit(namespace[name])


def tensors_of(mod: ScoreMod | None, sums: tuple[Tensor, ...] = ()) -> tuple[Any, ...] | None:
    """What the functions are told of a call's tensors, in one tuple; None where there are none.

    Args:
        sums: where the gradients of those that have one are summed, as `sums_of`.
    """
    if mod is None or not mod.tensors:
        return None
    found: list[Any] = []
    for x in mod.tensors:
        found += [x, *x.shape, *x.stride()]
    return *found, *sums


def sums_of(mod: ScoreMod | None, problem: Problem) -> tuple[Tensor, ...]:
    """Zeros in float32 for the gradients of the tensors that have one in the problem."""
    if mod is None or problem.score_mod is None:
        return ()
    summed = (mod.tensors[tensor] for tensor in problem.score_mod.grads)
    return tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in summed)


def gradients_of(
    mod: ScoreMod | None, problem: Problem, sums: tuple[Tensor, ...], own: dict[int, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The gradients of a call's tensors, each in the tensor's dtype.

    Args:
        problem: what `sums_of` was told.
        sums: what it made, summed.
        own: by the number of the tensor the gradients of the others.
    """
    if mod is None or problem.score_mod is None:
        return ()
    found = dict(zip(problem.score_mod.grads, sums, strict=True)) | (own or {})
    return tuple(found[tensor].to(mod.tensors[tensor].dtype) for tensor in mod.grads)
