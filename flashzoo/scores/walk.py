"""A program's values where a thread has scores of several rows and columns, written in a language whose code is traced
Python.

Of what a program is told, some differs by row and one thing by column, one more with each: of rows that are queries the
key's position. So a value is made once for what it depends on, and what depends on no column may be made before a
loop. Whole numbers that move with the column, such as k - q, are a base for a row and a number that is known when the
kernel is compiled: the float of one is the float of the base plus that number, and an element's address the base's plus
that number of strides. Standard library only: the language is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from flashzoo.scores.program import COMPARISONS, INPUTS, Program, Step, is_value, number, tensor_number

MOST_ROWS = 1 << 22
"""Queries, and keys, up to which a sum of `_TERMS` of their positions and of as much again is a whole number in
float32: its float is then the sum of two floats."""
_TERMS = 2

Place: TypeAlias = "tuple[str, int | None, int | None]"
"""Of a value: its name; row and column, None where it is the same in all."""


@dataclass(frozen=True)
class Moving:
    """A whole number: `base + times * column + more`.

    Attributes:
        terms: how many positions base is the sum of.
        magnitude: it is the size of that, and not the sum itself.
    """

    base: Any
    times: int
    more: int
    terms: int
    magnitude: bool = False

    def beyond(self, column: int) -> int:
        """What is added to the base."""
        return self.times * column + self.more


@dataclass(frozen=True)
class Index:
    """One of a load's: `base + more`, which are of the language and a number.

    Attributes:
        given: it is an input or a number, and so not negative.
        moves: it is the input that differs by column.
    """

    base: Any
    more: int = 0
    given: bool = False
    moves: bool = False


class Language(Protocol):
    """What values are made with."""

    def typed(self, value: bool | int | float, dtype: str) -> Any:
        """A number as a value."""
        ...

    def apply(self, operation: str, dtype: str, *arguments: Any) -> Any:
        """An operation on values; dtype is a cast's own, a comparison's operands', else that of both."""
        ...

    def load(self, tensor: int, dtype: str, indices: tuple[Index, ...]) -> Any:
        """An element of a captured tensor; where an index is outside of it anything."""
        ...

    def load_pair(self, tensor: int, dtype: str, indices: tuple[Index, ...]) -> tuple[Any, Any] | None:
        """The element and the one behind it; None where they can't be read at once."""
        ...


class Walk:
    """A program's values, each made when it is asked for first.

    Args:
        program: of a function on scores.
        language: what they are made with.
        moving: the input that differs by column, "k" or "q".
        of_rows: the inputs that differ by row, which the score does besides.
        inputs: `(name, row, column) -> value`; of `moving` the value at column 0.
        known: values made before, as `kept` gives them.
    """

    def __init__(
        self,
        program: Program,
        language: Language,
        moving: str,
        of_rows: frozenset[str],
        inputs: Callable[[str, int, int], Any],
        known: Mapping[Place, Any],
    ) -> None:
        self.program: Program = program
        self.language: Language = language
        self.moving: str = moving
        self.of_rows: frozenset[str] = of_rows | {"score"}
        self.inputs = inputs
        self._values: dict[Place, Any] = dict(known)

    def kept(self, inputs: set[str], rows: int) -> dict[Place, Any]:
        """Of so many rows the values that depend on some of these inputs and on nothing else, and that others use."""
        steps = [(f"x{i}", step) for i, step in enumerate(self.program.steps)]
        used = {a for name, step in steps if not self.program.inputs(name) <= inputs for a in step.arguments}
        wanted = [n for n, _ in steps if self.program.inputs(n) and self.program.inputs(n) <= inputs]
        wanted = [name for name in wanted if name in used or name in self.program.outputs]
        return {self._place(name, r, 0): self.value(name, r, 0) for name in wanted for r in range(rows)}

    def loaded(self, tensors: Collection[int], rows: int, columns: Iterable[int]) -> dict[Place, Any]:
        """Of so many rows and these columns, elements of these tensors that differ by column and by no score."""
        of_columns = {
            name: tensor_number(step.arguments[0])
            for name, step in self.program.loads
            if self.program.inputs(name) & {"score", self.moving} == {self.moving}
        }
        wanted = [name for name, tensor in of_columns.items() if tensor in tensors]
        places = [(name, r, c) for name in wanted for r in range(rows) for c in columns]
        return {self._place(*place): self.value(*place) for place in places}

    def _place(self, name: str, row: int, column: int) -> Place:
        inputs = self.program.inputs(name)
        return name, row if inputs & self.of_rows else None, column if inputs & {"score", self.moving} else None

    def value(self, name: str, row: int, column: int) -> Any:
        """Of a step or an input, at a row and a column."""
        place = self._place(name, row, column)
        if place not in self._values:
            self._values[place] = self._made(name, row, column)
        return self._values[place]

    def outputs(self, row: int, column: int) -> list[Any]:
        """All that the program returns."""
        return [self.value(name, row, column) for name in self.program.outputs]

    def _made(self, name: str, row: int, column: int) -> Any:
        moving, step = self._moving(name, row), self.program.step(name)
        if moving is not None:
            found = self._plus(moving.base, moving.beyond(column), INPUTS[self.moving])
            return self.language.apply("abs", INPUTS[self.moving], found) if moving.magnitude else found
        if step is None:
            return self.inputs(name, row, column)
        if step.operation == "const":
            return self.language.typed(number(step.arguments[0]), step.dtype)
        if step.operation == "load":
            return self._loaded(name, step, row, column)
        if step.operation == "cast" and step.dtype == "f32":
            moving = self._moving(step.arguments[0], row)
            if moving is not None:
                found = self._plus(self._float(moving, step.arguments[0], row), float(moving.beyond(column)), "f32")
                return self.language.apply("abs", "f32", found) if moving.magnitude else found
        dtype = self._dtype(step)
        arguments = [
            self.value(a, row, column) if is_value(a) else self.language.typed(number(a), dtype) for a in step.arguments
        ]
        return self.language.apply(step.operation, step.dtype if step.operation == "cast" else dtype, *arguments)

    def _dtype(self, step: Step) -> str:
        """Of a step's operands, where they are numbers."""
        if step.operation in COMPARISONS:
            return next((self.program.dtype(a) for a in step.arguments if is_value(a)), "f32")
        return "f32" if step.operation == "cast" else step.dtype

    def _plus(self, base: Any, more: int | float, dtype: str) -> Any:
        return self.language.apply("add", dtype, base, self.language.typed(more, dtype)) if more else base

    def _float(self, moving: Moving, name: str, row: int) -> Any:
        """Of the base."""
        place = (f"float {name}", row if self.program.inputs(name) & self.of_rows else None, None)
        if place not in self._values:
            self._values[place] = self.language.apply("cast", "f32", moving.base)
        return self._values[place]

    def _moving(self, name: str, row: int) -> Moving | None:
        """A value that is one."""
        if name == self.moving:
            return Moving(self.inputs(name, row, 0), 1, 0, 1)
        if name[0] != "x" or self.moving not in self.program.inputs(name):
            return None
        place = (f"moving {name}", row if self.program.inputs(name) & self.of_rows else None, None)
        if place not in self._values:
            self._values[place] = self._summed(self.program.steps[int(name[1:])], row)
        return self._values[place]

    def _summed(self, step: Step, row: int) -> Moving | None:
        if step.dtype != "i32" or step.operation not in ("add", "sub", "neg", "abs"):
            return None
        x, *others = (self._term(a, row) for a in step.arguments)
        if x is None or x.magnitude:
            return None
        if step.operation == "neg":
            return Moving(self.language.apply("neg", "i32", x.base), -x.times, -x.more, x.terms)
        if step.operation == "abs":
            return replace(x, magnitude=True)
        (y,) = others
        if y is None or y.magnitude:
            return None
        sign = 1 if step.operation == "add" else -1
        more, terms = x.more + sign * y.more, x.terms + y.terms
        if abs(more) > MOST_ROWS or terms > _TERMS:
            return None
        base = x.base
        if y.base is not None:
            left = self.language.typed(0, "i32") if x.base is None else x.base
            base = self.language.apply(step.operation, "i32", left, y.base)
        return Moving(base, x.times + sign * y.times, more, terms)

    def _term(self, name: str, row: int) -> Moving | None:
        """What may be an operand of a sum: of a number there is no base."""
        if not is_value(name):
            return Moving(None, 0, int(number(name)), 0)
        if name in INPUTS and name != self.moving:
            return Moving(self.value(name, row, 0), 0, 0, 1)
        return self._moving(name, row)

    def _loaded(self, name: str, step: Step, row: int, column: int) -> Any:
        tensor = tensor_number(step.arguments[0])
        indices = tuple(self._index(a, row, column) for a in step.arguments[1:])
        if indices and indices[-1].moves and column % 2 == 0:
            pair = self.language.load_pair(tensor, step.dtype, indices)
            if pair is not None:
                following = self._place(name, row, column + 1)
                self._values[following] = pair[1]
                return pair[0]
        return self.language.load(tensor, step.dtype, indices)

    def _index(self, name: str, row: int, column: int) -> Index:
        if not is_value(name):
            return Index(self.language.typed(int(number(name)), "i32"), given=True)
        moving = self._moving(name, row)
        if moving is None or moving.magnitude:
            return Index(self.value(name, row, column), given=name in INPUTS)
        return Index(moving.base, moving.beyond(column), name in INPUTS, name == self.moving)
