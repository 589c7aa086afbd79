"""Programs written in a kernel language, by a table of what it calls each operation. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flashzoo.scores.program import COMPARISONS, FLOATS, Program, Step, is_value


@dataclass(frozen=True)
class Language:
    """How a kernel language says it.

    Attributes:
        operations: by name an expression with {0}, {1}, ... for operands, of a float; where it differs, by name and
            kind of operands, "remainder int" or "not bool", or their dtype, "div f32".
        dtypes: what it calls each.
        cast: an expression with {0} and the dtype's name {1}.
        number: how it writes a constant of a dtype, from how a program does and the dtype's name.
        load: the lines that make a load's value: from its name, the step and the names of its indices.
    """

    operations: Mapping[str, str]
    dtypes: Mapping[str, str]
    cast: str
    number: Callable[[str, str], str]
    load: Callable[[str, Step, tuple[str, ...]], list[str]]

    def lines(self, program: Program, outputs: Iterable[str]) -> list[str]:
        """One or more for each step that these values need."""
        return [line for i in program.needed(outputs) for line in self._of(program, f"x{i}", program.steps[i])]

    def _of(self, program: Program, name: str, step: Step) -> list[str]:
        if step.operation == "load":
            return self.load(name, step, step.arguments[1:])
        if step.operation == "const":
            return [f"{name} = {self.number(step.arguments[0], self.dtypes[step.dtype])}"]
        if step.operation == "cast":
            (x,) = step.arguments
            if step.dtype == "bool":
                return [f"{name} = {x} != 0"]
            if step.dtype == "bf16" and program.dtype(x) not in FLOATS:  # as torch has it, and Triton's interpreter not
                x = self.cast.format(x, self.dtypes["f32"])
            return [f"{name} = {self.cast.format(x, self.dtypes[step.dtype])}"]
        compared = next((x for x in step.arguments if is_value(x)), None)
        dtype = program.dtype(compared) if step.operation in COMPARISONS and compared is not None else step.dtype
        kind = "bool" if dtype == "bool" else "float" if dtype in FLOATS else "int"
        ways = (f"{step.operation} {dtype}", f"{step.operation} {kind}", step.operation)
        way = next(self.operations[name] for name in ways if name in self.operations)
        return [f"{name} = {way.format(*(self.argument(x, dtype) for x in step.arguments))}"]

    def argument(self, x: str, dtype: str) -> str:
        """An operand of an operation on such numbers as it is written in an expression."""
        if is_value(x):
            return x
        if dtype == "f32" and beyond_float32(x):  # by itself it would be a float64
            return self.number(x, self.dtypes[dtype])
        return f'float("{x}")' if x.lstrip("-") in ("inf", "nan") else f"({x})" if x[0] == "-" else x


def beyond_float32(literal: str) -> bool:
    """Whether it is a finite number, and not 0, that float32 has not or has with fewer digits."""
    if literal in ("True", "False"):
        return False
    size = abs(float(literal))
    return 0 < size < math.inf and not 2.0**-126 <= size <= (2 - 2.0**-23) * 2.0**127


INFIX = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
}
"""What languages that look like Python have in common."""
