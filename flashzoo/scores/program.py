"""`Program`: what a score function computes, as a few lines of text by which kernels are chosen, and made.

    x0: f32 = mul(score, 0.05)
    x1: f32 = tanh(x0)
    x2: f32 = load(t0, h)
    x3: f32 = mul(x1, x2)
    return x3

Each line is one operation of `OPERATIONS` on what stands above it, on numbers, and on the inputs: the score, scaled;
the numbers of the batch `b` and of the query head `h`; the query's position `q` and the key's `k`; in a gradient also
`ds`, that of what is returned. `load` reads one element of the tensor t0, t1, ... that the function captured. Operands
are of the line's dtype, but a cast's, a load's indices, a condition, and what comparisons compare, which is of one
dtype. `return x3 fits t0` says of t0 that it has as many rows, keys, heads or batches as the call, and not more.
Nobody's names are in it, and lines that are not needed, or stand there twice, are left out: two functions that compute
the same in the same way have the same text. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256

INPUTS = {"score": "f32", "b": "i32", "h": "i32", "q": "i32", "k": "i32", "ds": "f32", "scale": "f32"}
"""Dtypes, by name. The last is told only to a program that has it from `factors.py`."""
DTYPES = ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")
FLOATS = DTYPES[6:]
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "remainder", "min", "max", "neg", "abs")
FUNCTIONS = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos", "floor", "ceil")
"""Of floating-point numbers."""
LOGIC = ("and", "or", "xor", "not")
"""Of bools, and of integers bit by bit."""
OPERATIONS = (*ARITHMETIC, *FUNCTIONS, *COMPARISONS, *LOGIC, "where", "cast", "const", "load")
"""All that a program may consist of, and so all that a back end has to know."""
UNBOUNDED = frozenset({"div", "floordiv", "remainder", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "load"})
"""Of these a result may be infinite, or no number, though the arguments are moderate."""

_LINE = r"x(\d+): (\w+) = (\w+)\(([^()]*)\)"
_LITERAL = r"-?(inf|nan|\d[\d.e+-]*)|True|False"
_ORDERLESS = frozenset({"add", "mul", "min", "max", "eq", "ne", "and", "or", "xor"})


@dataclass(frozen=True)
class Step:
    """One line: an operation, the dtype of its result, and its arguments as they are written."""

    operation: str
    dtype: str
    arguments: tuple[str, ...]


def tensor_number(argument: str) -> int:
    """Of a load's first argument."""
    return int(argument[1:])


@dataclass(frozen=True)
class Program:
    """Steps, of which the i-th is called x<i>, what is returned of them and of the inputs, and which tensors fit."""

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    fitting: tuple[str, ...] = ()

    @cached_property
    def text(self) -> str:
        """As in this file's head."""
        lines = [f"x{i}: {s.dtype} = {s.operation}({', '.join(s.arguments)})" for i, s in enumerate(self.steps)]
        fits = f" fits {', '.join(self.fitting)}" if self.fitting else ""
        return "\n".join([*lines, f"return {', '.join(self.outputs)}{fits}"])

    def step(self, name: str) -> Step | None:
        """What is called so; None of an input or a number."""
        return self.steps[int(name[1:])] if name[0] == "x" else None

    def dtype(self, name: str) -> str:
        """Of a step's result, or an input."""
        step = self.step(name)
        return INPUTS[name] if step is None else step.dtype

    @cached_property
    def _inputs(self) -> list[frozenset[str]]:
        found: list[frozenset[str]] = []
        for step in self.steps:
            above = [found[int(a[1:])] if a[0] == "x" else frozenset({a} & INPUTS.keys()) for a in step.arguments]
            found.append(frozenset().union(*above))
        return found

    def inputs(self, name: str) -> frozenset[str]:
        """Those inputs that a value depends on."""
        return self._inputs[int(name[1:])] if name[0] == "x" else frozenset({name} & INPUTS.keys())

    def needed(self, outputs: Iterable[str]) -> list[int]:
        """The numbers of the steps that these values are made of, in order."""
        found, ahead = set(), [name for name in outputs if name[0] == "x"]
        while ahead:
            number = int(ahead.pop()[1:])
            if number not in found:
                found.add(number)
                ahead += [name for name in self.steps[number].arguments if name[0] == "x"]
        return sorted(found)

    def bounded(self, name: str) -> bool:
        """Whether a value is a number whatever moderate score it is of."""
        steps = [self.steps[i] for i in self.needed([name])]
        if any(step.operation in UNBOUNDED for step in steps):
            return False
        return all(is_value(a) or math.isfinite(number(a)) for step in steps for a in step.arguments)

    @cached_property
    def released(self) -> tuple[tuple[str, ...], ...]:
        """Behind each step the values that nothing needs any more."""
        last = {a: i for i, step in enumerate(self.steps) for a in (f"x{i}", *step.arguments) if a[0] == "x"}
        found: list[list[str]] = [[] for _ in self.steps]
        for name, i in last.items():
            if name not in self.outputs:
                found[i].append(name)
        return tuple(map(tuple, found))

    @cached_property
    def loads(self) -> tuple[tuple[str, Step], ...]:
        """Every load, by name."""
        return tuple((f"x{i}", step) for i, step in enumerate(self.steps) if step.operation == "load")


class Builder:
    """A program that is being written; a line that stands there already is not written again."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._names: dict[Step, str] = {}
        self._prints: dict[str, str] = {}

    def add(self, operation: str, dtype: str, *arguments: str) -> str:
        """The name of the result."""
        step = Step(operation, dtype, arguments)
        if step not in self._names:
            self._names[step] = f"x{len(self.steps)}"
            self.steps.append(step)
        return self._names[step]

    def dtype(self, name: str) -> str:
        """Of a value."""
        return self.steps[int(name[1:])].dtype if name[0] == "x" else INPUTS[name]

    def cast(self, name: str, dtype: str) -> str:
        """The value in this dtype; a number is of any."""
        if not is_value(name) or self.dtype(name) == dtype:
            return name
        return self.add("cast", dtype, name)

    def program(self, *outputs: str) -> Program:
        """What these values need, in an order that is of what they are alone, and not of who wrote them when."""
        found, names = Builder(), {}
        for number in self._in_order(outputs):
            step = self.steps[number]
            arguments = [names.get(name, name) for name in self._arranged(step)]
            names[f"x{number}"] = found.add(step.operation, step.dtype, *arguments)
        return Program(tuple(found.steps), tuple(names.get(name, name) for name in outputs))

    def _arranged(self, step: Step) -> tuple[str, ...]:
        """A step's arguments; where any order will do, steps by what they are, then inputs, then numbers."""
        if step.operation not in _ORDERLESS:
            return step.arguments
        return tuple(sorted(step.arguments, key=lambda a: (a[0] != "x", not is_value(a), self._print(a))))

    def _print(self, name: str) -> str:
        """What a value is, whatever it is called."""
        if name[0] != "x":
            return name
        if name not in self._prints:
            step = self.steps[int(name[1:])]
            parts = [self._print(a) for a in self._arranged(step)]
            self._prints[name] = sha256(repr((step.operation, step.dtype, parts)).encode()).hexdigest()
        return self._prints[name]

    def _in_order(self, outputs: tuple[str, ...]) -> list[int]:
        """The numbers of the steps that these are made of, each behind its arguments."""
        found: dict[int, None] = {}
        ahead = [(name, False) for name in reversed(outputs)]
        while ahead:
            name, whole = ahead.pop()
            if name[0] == "x" and int(name[1:]) not in found:
                if whole:
                    found[int(name[1:])] = None
                else:
                    ahead.append((name, True))
                    ahead += [(a, False) for a in reversed(self._arranged(self.steps[int(name[1:])]))]
        return list(found)


def is_value(name: str) -> bool:
    """Whether it is a step's result or an input, and no number."""
    return name[0] == "x" or name in INPUTS


def literal(value: bool | int | float) -> str:
    """How a number is written."""
    return repr(value) if isinstance(value, (bool, int)) else repr(float(value))


def number(text: str) -> bool | int | float:
    """The number that is written so."""
    if text in ("True", "False"):
        return text == "True"
    return float(text) if any(c in text for c in ".einf") else int(text)


@lru_cache(maxsize=256)
def parsed(text: str) -> Program:
    """The program of a text. ValueError where it is none."""
    *lines, last = text.split("\n")
    steps: list[Step] = []
    for line in lines:
        match = re.fullmatch(_LINE, line)
        if match is None or int(match[1]) != len(steps) or match[2] not in DTYPES or match[3] not in OPERATIONS:
            raise ValueError(
                f"score_mod's line {len(steps)} must be 'x{len(steps)}: dtype = operation(...)', got {line!r}"
            )
        steps.append(Step(match[3], match[2], tuple(match[4].split(", "))))
        for name in steps[-1].arguments:
            if not _is_known(name, len(steps) - 1):
                raise ValueError(f"score_mod's line {len(steps) - 1} must read what stands above it, got {name!r}")
    match = re.fullmatch(r"return (.*?)(?: fits (t\d+(?:, t\d+)*))?", last)
    outputs = tuple(match[1].split(", ")) if match is not None else ()
    if match is None or not all(is_value(name) and _is_known(name, len(steps)) for name in outputs):
        raise ValueError(f"score_mod's last line must be 'return' and values, got {last!r}")
    return Program(tuple(steps), outputs, tuple(match[2].split(", ")) if match[2] else ())


def _is_known(name: str, above: int) -> bool:
    if name in INPUTS or re.fullmatch(_LITERAL, name):
        return True
    return name[1:].isdecimal() and (name[0] == "t" or (name[0] == "x" and int(name[1:]) < above))


@lru_cache(maxsize=256)
def read_by(text: str) -> tuple[tuple[int, int, str, bool], ...]:
    """Of a program the tensors that an input is an index of: number of the tensor, dimension, input, and whether it
    fits."""
    program = parsed(text)
    return tuple(
        (tensor_number(step.arguments[0]), dimension, name, step.arguments[0] in program.fitting)
        for _, step in program.loads
        for dimension, name in enumerate(step.arguments[1:])
        if name in INPUTS
    )


@lru_cache(maxsize=256)
def paired(text: str) -> dict[int, tuple[str, ...]]:
    """Of a program the tensors of which each pair of a query and a key reads a number of its own, a bias say: by the
    number of the tensor the indices of its one load, `q` and `k`, and at most once `b` and `h`; the others are
    0. What reads the same number then are the same query and key of other heads, or of others of the batch."""
    loads: dict[int, list[tuple[str, ...]]] = {}
    for _, step in parsed(text).loads:
        loads.setdefault(tensor_number(step.arguments[0]), []).append(step.arguments[1:])
    found: dict[int, tuple[str, ...]] = {}
    for tensor, (indices, *more) in loads.items():
        values = [name for name in indices if name != "0"]
        if not more and {"q", "k"} <= {*values} <= {*"bhqk"} and len(values) == len({*values}):
            found[tensor] = indices
    return found


@lru_cache(maxsize=256)
def unmasked(text: str) -> str:
    """The text of the score that a function gives where it does not mask with -inf as the last thing that it does: its
    gradients are the function's, as that of a score of -inf is 0 anyhow."""
    program = parsed(text)
    last = program.step(program.outputs[0])
    if last is None or last.operation != "where":
        return text
    _, *either = last.arguments
    scores = [name for name in either if not _is_minus_infinity(program, name)]
    if len(scores) != 1 or not is_value(scores[0]):
        return text
    builder = Builder()
    builder.steps += program.steps
    return builder.program(*scores).text


def _is_minus_infinity(program: Program, name: str) -> bool:
    step = program.step(name) if is_value(name) else None
    return (name if step is None else step.arguments[0] if step.operation == "const" else "") == "-inf"
