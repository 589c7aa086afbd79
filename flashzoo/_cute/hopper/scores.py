"""Functions on scores in a kernel: what `flashzoo.scores.walk` writes programs with, and what a tile tells them.

Roots, exponentials and logarithms are the hardware's, off by 2 units in the last place or 2^-22. The hardware
has a tanh as well (`tanh.approx.f32`), off by 2^-11 of itself, which a cap of 50 makes more than P loses in 16 bits. So
it is made of an exponential and a polynomial, off by 2e-6. That takes longer than the tensor cores take to make a
score; of small numbers a polynomial alone is as exact, and where a warp has no others it does with that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from ctypes import c_float
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Boolean,
    Constexpr,
    Float16,
    Float32,
    Float64,
    Int8,
    Int16,
    Int32,
    Int64,
    Uint8,
    Uint32,
    Uint64,
    const_expr,
)

from flashzoo._cute.hopper.opaque import opaque
from flashzoo._cute.hopper.wgmma import rows_of
from flashzoo.scores.factors import Factored, factored
from flashzoo.scores.program import COMPARISONS, FLOATS, is_value
from flashzoo.scores.traits import Scoring
from flashzoo.scores.walk import Index, Place, Walk

LOG2E = 1.4426950408889634

TANH = (0.999997795, -1.99969018, 1.99275601, -1.93414557, 1.6935339, -1.16142881, 0.513459086, -0.104484476)
"""Of (1 - e) / (1 + e), which tanh x is of e = exp(-2x): the minimax polynomial for e from 0 to 1, off by 2e-6."""


SMALL = 0.7
TANH_OF_SMALL = (0.349990444, -0.0142584012, 0.000668558237, -2.29831536e-05)
"""Of tanh(x) / y where y is 2 x / SMALL: a polynomial of y^2, minimax for x up to SMALL; tanh is off by 2e-6."""
AT_LEAST_2 = 1 << 30
"""The bit that a float of that magnitude, and one that is no number, has, and no smaller one."""


def tanh(x: Float32, unit: float = 1.0) -> Float32:
    """Of x units: of the magnitude, and then with the sign."""
    e = cute.math.exp2(cute.math.abs(x) * (-2 * LOG2E * unit), fastmath=True)
    return cute.math.copysign(polynomial(TANH, e), x)


def tanh_of_small(y: Any) -> Any:
    """Of y SMALL / 2, y from -2 to 2."""
    return polynomial(TANH_OF_SMALL, y * y) * y


def polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    """Coefficient i times x^i, summed."""
    *rest, found = coefficients
    for coefficient in reversed(rest):
        found = found * x + coefficient
    return found


def times(x: Float32, y: Float32) -> Float64:
    """How many whole times y goes into x, in float64: a float32 quotient that is a little less than a whole number
    would be rounded to it."""
    return cute.math.floor(x.to(Float64) / y.to(Float64))


def remainder(x: Float32, y: Float32) -> Float64:
    """What is left of x then; where y goes into it 0 times, infinity among others, x itself."""
    whole, x = times(x, y), x.to(Float64)
    return Float64(cutlass.select_(whole == 0.0, x, x - whole * y.to(Float64)))


_DTYPES: dict[str, type[cutlass.Numeric]] = {"bool": Boolean, "u8": Uint8, "i8": Int8, "i16": Int16, "i32": Int32}
_DTYPES |= {"i64": Int64, "f16": Float16, "bf16": BFloat16, "f32": Float32}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg")},
    **{name: getattr(operator, name) for name in COMPARISONS},
    **{name: getattr(operator, f"{name}_") for name in ("and", "or")},
    "xor": operator.xor,
    **{name: getattr(cute.math, name) for name in ("abs", "erf", "sin", "cos", "floor", "ceil")},
    "div": operator.truediv,
    "exp": lambda x: cute.math.exp2(x * LOG2E, fastmath=True),
    "exp2": lambda x: cute.math.exp2(x, fastmath=True),
    "log": lambda x: cute.math.log2(x, fastmath=True) * (1 / LOG2E),
    "log2": lambda x: cute.math.log2(x, fastmath=True),
    "sqrt": lambda x: cute.math.sqrt(x, approx=True),
    "rsqrt": lambda x: cute.math.rsqrt(x, approx=True),
    "sigmoid": lambda x: cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2E, fastmath=True)),
    "min": cute.arch.fmin,
    "max": cute.arch.fmax,
    "tanh": tanh,
    "floordiv": times,
    "remainder": remainder,
}
"""Of floats, and of others where these have no way of their own. Quotients are exact to the last place: a third of 9 is
no less than 3."""

_OF_INTEGERS: dict[str, Callable[..., Any]] = {
    "abs": lambda x: cutlass.max(x, -x),
    "min": cutlass.min,
    "max": cutlass.max,
    "floordiv": operator.floordiv,
    "remainder": lambda x, y: x - x // y * y,
    "not": operator.invert,
}


@dataclass(frozen=True)
class InCute:
    """The language of `Walk`.

    Attributes:
        scoring: what the kernel is compiled for.
        tensors: its arguments, as `scoring.parameters_of` has them.
        edge: places may be past the last query or key, or past what a tensor has.
    """

    scoring: Scoring
    tensors: tuple[Any, ...]
    edge: bool

    def typed(self, value: bool | int | float, dtype: str) -> Any:
        """A number as a value; rounded, as CuTe DSL casts what it knows as the number that it was given."""
        return _DTYPES[dtype](c_float(value).value if dtype == "f32" else value)

    def apply(self, operation: str, dtype: str, *arguments: Any) -> Any:
        """An operation on values."""
        if operation == "cast":
            return arguments[0] != 0 if dtype == "bool" else arguments[0].to(_DTYPES[dtype])
        if operation == "where":
            condition, x, y = arguments
            if isinstance(condition.value, bool):
                return x if condition.value else y
            return _DTYPES[dtype](cutlass.select_(condition, x, y))
        if operation == "not" and dtype == "bool":
            return arguments[0] ^ True
        way = _OPERATIONS[operation] if dtype in FLOATS or operation not in _OF_INTEGERS else _OF_INTEGERS[operation]
        found = way(*arguments)
        return found if operation in COMPARISONS else _DTYPES[dtype](found)

    def load(self, tensor: int, dtype: str, indices: tuple[Index, ...]) -> Any:
        """An element; 0 where an index is none of the tensor's, and anything past the last query or key."""
        pointer, sizes, strides = self._of_tensor(tensor)
        offset, inside = self._offset(indices, sizes, strides)
        value = cute.make_tensor(pointer + offset, cute.make_layout(1))[0]
        if inside is not None:
            value = type(value)(cutlass.select_(inside, value, type(value)(0)))
        return value != 0 if dtype == "bool" else value

    def load_pair(self, tensor: int, dtype: str, indices: tuple[Index, ...]) -> tuple[Any, Any] | None:
        """The element and the one behind it, whose word in memory is the same, and so is there."""
        if not self.scoring.pairs[tensor] or self.scoring.unchecked or not all(index.given for index in indices):
            return None
        pointer, sizes, strides = self._of_tensor(tensor)
        *others, last = indices
        (offset, _), column, more = self._offset(others, sizes, strides), self._wide(last.base), last.more
        if self.edge:
            column, more = _least(column + more, (sizes[-1] - 1) & -2), 0
        # the number stands behind the rest, as a part of the instruction
        values = cute.make_tensor(pointer + cute.assume(offset + column, divby=2) + more, cute.make_layout(2)).load()
        return values[0], values[1]

    def _offset(self, indices: Iterable[Index], sizes: Iterable[Any], strides: Iterable[Any]) -> tuple[Any, Any]:
        """How far an element within the tensor lies behind its first; and whether it is the one that was asked for,
        None where that is known."""
        offset: Any = 0
        inside: Any = None
        for index, size, stride in zip(indices, sizes, strides, strict=False):
            place = self._wide(index.base) + index.more
            if not index.given:
                place = type(place)(cutlass.select_(place < 0, place + size, place))
            if not index.given or self.scoring.unchecked:
                here = _unsigned(place) < _unsigned(size)
                inside = here if inside is None else inside & here
            offset += (_least(place, size - 1) if self.edge or not index.given else place) * stride
        return offset, inside

    def _of_tensor(self, tensor: int) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        first = sum(1 + 2 * dimensions for _, dimensions in self.scoring.reads[:tensor])
        _, dimensions = self.scoring.reads[tensor]
        pointer, *numbers = self.tensors[first : first + 1 + 2 * dimensions]
        return pointer, tuple(numbers[:dimensions]), tuple(numbers[dimensions:])

    def _wide(self, index: Any) -> Any:
        return index.to(Int64 if self.scoring.far or isinstance(index, Int64) else Int32)


def _unsigned(place: Any) -> Any:
    """Of which a negative one is past all others."""
    return place.to(Uint64 if isinstance(place, Int64) else Uint32)


def _least(place: Any, last: Any) -> Any:
    """A place up to the last; the last, too, of a negative one."""
    return cutlass.min(_unsigned(place), _unsigned(last)).to(type(place))


@dataclass(frozen=True)
class Told:
    """What a function is told of a thread's two rows of scores; see `Walk`.

    Attributes:
        tensors: the kernel's arguments.
        scale: softmax scale.
        b: the batch, or the number of the sequence.
        h: query head of each row.
        rows: query of each row, or key.
        known: what was made of these.
    """

    tensors: tuple[Any, ...]
    scale: Float32
    b: Int32
    h: tuple[Int32, Int32]
    rows: tuple[Int32, Int32]
    known: Known

    def given(self, name: str, row: int) -> Any:
        """An input that differs by no column."""
        return {"scale": self.scale, "b": self.b, "h": self.h[row]}.get(name, self.rows[row])


@dataclass(frozen=True)
class Known:
    """Values of a function, made where all of a loop may use them."""

    values: Mapping[Place, Any]


NOTHING_KNOWN = Known({})


@dataclass(frozen=True)
class Cap:
    """Names in a program: of a tanh, and of what the score is multiplied by in it, the same in all columns."""

    tanh: str
    factor: str


class Scores:
    """A kernel's function on scores.

    Args:
        scoring: what it is compiled for.
        moving: what differs by column: "k" or "q".
    """

    def __init__(self, scoring: Scoring, moving: str) -> None:
        self.scoring, self.moving = scoring, moving
        self.of_rows = frozenset("hq" if moving == "k" else "k")
        self.function: Factored = factored(scoring.text)
        self.moves = any(
            moving in self.function.program.inputs(f"x{i}") for i in range(len(self.function.program.steps))
        )

    @cached_property
    def cap(self) -> Cap | None:
        """Its tanh, where it has one, of a multiple of the score, and looks at the score for nothing else."""
        steps = self.function.program.steps
        caps = [i for i, step in enumerate(steps) if step.operation == "tanh"]
        of = int(steps[caps[0]].arguments[0][1:]) if len(caps) == 1 and steps[caps[0]].arguments[0][0] == "x" else None
        read = [a for step in steps for a in step.arguments] + list(self.function.program.outputs)
        if of is None or steps[of].operation != "mul" or read.count("score") != 1 or read.count(f"x{of}") != 1:
            return None
        factors = [a for a in steps[of].arguments if a != "score"]
        inputs = self.function.program.inputs
        if len(factors) != 1 or not is_value(factors[0]) or inputs(factors[0]) & {"score", self.moving}:
            return None
        return Cap(f"x{caps[0]}", factors[0])

    def scale_log2(self, scale: Float32) -> Float32:
        """What new scores, as they are made here, are yet to be multiplied by to be in log2 units."""
        factor = Float32(self.function.factor * LOG2E)
        return factor * scale if self.function.scaled else factor

    @property
    def adds(self) -> bool:
        """Whether the new score's derivative is 1, or nobody looks at it."""
        return self.function.slope == 1.0

    @cached_property
    def bounded(self) -> bool:
        """Whether the new score's derivative is a number where the new score is -inf, too."""
        return self.function.program.bounded(self.function.program.outputs[1])

    def know(self, told: Told, inputs: str) -> Told:
        """The same with what is made of the scale and of some of b, h, q and k."""
        edge = self.scoring.unchecked
        known = self._walk(told, lambda name, row, _: told.given(name, row), edge).kept({*inputs, "scale"}, 2)
        return replace(told, known=Known({**told.known.values, **known}))

    def ahead(self, told: Told, s: cute.Tensor, first: Any, edge: bool) -> Told:
        """The same with the elements of tensors of 16 bits that belong to a block of scores: before these are there,
        so that reading them takes no time. Wider ones would take more registers than there are."""
        narrow = [i for i, (dtype, _) in enumerate(self.scoring.reads) if dtype in ("f16", "bf16")]
        columns = [8 * i + c for i in range(cute.size(s) // 4) for c in range(2)]
        loaded = self.at(told, s, first, edge).loaded(narrow, 2, columns) if narrow else {}
        return replace(told, known=Known({**told.known.values, **loaded}))

    def at(self, told: Told, s: cute.Tensor, first: Any, edge: bool) -> Walk:
        """The function at the scores of a block.

        Args:
            s: products of queries and keys, as a WGMMA result.
            first: of the block's columns, keys or queries, the thread's first.
            edge: some may be past the last query or key.
        """
        rows = rows_of(s)
        if self.moves:
            first = opaque(first)

        def inputs(name: str, row: int, column: int) -> Any:
            if name == "score":
                return rows[column % 8, row, column // 8]
            return first if name == self.moving else told.given(name, row)

        return self._walk(told, inputs, edge or self.scoring.unchecked)

    def _walk(self, told: Told, inputs: Callable[[str, int, int], Any], edge: bool) -> Walk:
        language = InCute(self.scoring, told.tensors, edge)
        return Walk(self.function.program, language, self.moving, self.of_rows, inputs, told.known.values)


def modify(scores: Scores, told: Told, s: cute.Tensor, first: Any, edge: bool) -> None:
    """Put new scores, but for `scale_log2`, in the place of products; arguments as in `Scores.at`."""
    walk, rows, (new, *_) = scores.at(told, s, first, edge), rows_of(s), scores.function.program.outputs
    for c, r, i in _places(s):
        rows[c, r, i] = walk.value(new, r, 8 * i + c)


@cute.jit
def modify_within(scores: Constexpr[Scores], told: Told, s: cute.Tensor, first: Any):
    """The same of a block within the call, whose scores are all of one sequence: a row's bits may depend on them, and
    on no other's, by which of two ways to tanh they let a warp go."""
    if const_expr(scores.cap is None):
        modify(scores, told, s, first, False)
    else:
        walk, rows = scores.at(told, s, first, False), rows_of(s)
        factors = [walk.value(scores.cap.factor, r, 0) * (2 / SMALL) for r in range(2)]
        for c, r, i in _places(s):
            rows[c, r, i] = rows[c, r, i] * factors[r]
        words = rows_of(cute.recast_tensor(s, Uint32))
        bits = reduce(operator.or_, [words[place] for place in _places(s)])
        if cute.arch.vote_any_sync((bits & AT_LEAST_2) != 0):
            _modify_capped(scores, told, s, first, lambda y: tanh(y, SMALL / 2))
        else:
            _modify_capped(scores, told, s, first, tanh_of_small)


def _modify_capped(
    scores: Scores, told: Told, s: cute.Tensor, first: Any, capped: Callable[[Float32], Float32]
) -> None:
    """Put new scores in the place of what `capped` makes their tanh of."""
    assert scores.cap is not None
    rows = rows_of(s)
    made = {(scores.cap.tanh, r, 8 * i + c): capped(rows[c, r, i]) for c, r, i in _places(s)}
    modify(scores, replace(told, known=Known({**told.known.values, **made})), s, first, False)


def _places(s: cute.Tensor) -> Iterator[tuple[int, int, int]]:
    """Of a thread's scores in `rows_of`."""
    return ((c, r, i) for r in range(2) for i in range(cute.size(s) // 4) for c in range(2))
