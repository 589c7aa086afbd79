"""A program whose factors that are numbers are multiplied first, and not with each score.

No compiler may do this, as each product is rounded: 20 tanh(0.05 (scale s)) has three multiplications by what is the
same for all scores, of which this leaves one; the scale and 0.05 become one number, and 20 is left to who takes the
exponential, which multiplies anyhow. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from flashzoo.scores.program import Builder, Program, Step, is_value, literal, number, parsed

_SMALLEST, _LARGEST = 1e-18, 1e18
"""A factor beyond them stays where it is, as products of such are no float32 any more."""


@dataclass(frozen=True)
class Factored:
    """A program whose `score` is the product of a query and a key, which times `scale` is one.

    Attributes:
        program: what it returns first is a new score but for a factor; of one with a gradient then its derivative.
        factor: positive; 1 where a new score is no product.
        scaled: the new score is to be multiplied by the scale as well.
        slope: the derivative, where it is a number.
    """

    program: Program
    factor: float
    scaled: bool
    slope: float | None


@dataclass(frozen=True)
class _Product:
    """Of a value `core * factor`, and times the scale where scaled; without a core it is a number."""

    core: str | None
    factor: float = 1.0
    scaled: bool = False


@lru_cache(maxsize=256)
def factored(text: str) -> Factored:
    """Of a program's text, that of a function or of one with its gradient: `ds` is 1."""
    writer = _Writer(parsed(text))
    new, *others = (writer.of(name) for name in writer.program.outputs)
    if new.core is None or new.factor <= 0:  # which must keep the order of scores
        new = _Product(writer.named(new))
    program = writer.builder.program(*(writer.named(x) for x in (_Product(new.core), *others)))
    slope = others[0].factor if others and others[0].core is None else None
    return Factored(program, new.factor, new.scaled, slope)


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program, self.builder = program, Builder()
        self._made: dict[str, _Product] = {}

    def of(self, name: str) -> _Product:
        """What a value is."""
        if name not in self._made:
            self._made[name] = self._product(name)
        return self._made[name]

    def _product(self, name: str) -> _Product:
        step = self.program.step(name) if is_value(name) else None
        if name == "score":
            return _Product("score", scaled=True)
        if name == "ds":
            return _Product(None)
        if step is None:
            return _Product(name)
        if step.dtype == "f32" and step.operation == "const":
            return _Product(None, float(number(step.arguments[0])))
        if step.dtype == "f32" and step.operation == "neg":
            x = self.of(step.arguments[0])
            return replace(x, factor=-x.factor)
        if step.dtype == "f32" and step.operation == "mul":
            return self._multiplied(*(self._operand(a) for a in step.arguments))
        if self._is_of_masked(name, step):
            return _Product(None)
        return _Product(self.builder.add(step.operation, step.dtype, *(self._whole(a) for a in step.arguments)))

    def _is_of_masked(self, name: str, step: Step) -> bool:
        """Whether a derivative is 0 where the new score is -inf and else 1: where it is -inf nobody looks at it."""
        if name not in self.program.outputs[1:] or step.operation != "where":
            return False
        new = self.program.step(self.program.outputs[0])
        condition, zero, one = step.arguments
        return (
            new is not None
            and (new.operation, new.arguments[0], one) == ("where", condition, "ds")
            and (self._number(new.arguments[1]), self._number(zero)) == (-math.inf, 0.0)
        )

    def _number(self, name: str) -> float | None:
        x = self._operand(name)
        return x.factor if x.core is None else None

    def _operand(self, name: str) -> _Product:
        return self.of(name) if is_value(name) else _Product(None, float(number(name)))

    def _multiplied(self, x: _Product, y: _Product) -> _Product:
        moderate = all(_SMALLEST < abs(z.factor) < _LARGEST for z in (x, y))
        if not moderate or (x.scaled and y.scaled):
            return _Product(self.builder.add("mul", "f32", self.whole(x), self.whole(y)))
        cores = [z.core for z in (x, y) if z.core is not None]
        core = self.builder.add("mul", "f32", *cores) if len(cores) == 2 else cores[0] if cores else None
        return _Product(core, x.factor * y.factor, x.scaled or y.scaled)

    def named(self, x: _Product) -> str:
        """The value itself as a step or an input, also of a number."""
        name = self.whole(x)
        return name if is_value(name) else self.builder.add("const", "f32", name)

    def _whole(self, argument: str) -> str:
        return self.whole(self.of(argument)) if is_value(argument) else argument

    def whole(self, x: _Product) -> str:
        """The value itself."""
        if x.core is None:
            return literal(x.factor)
        if x.scaled:
            scale = "scale" if x.factor == 1 else self.builder.add("mul", "f32", "scale", literal(x.factor))
            return self.builder.add("mul", "f32", x.core, scale)
        return x.core if x.factor == 1 else self.builder.add("mul", "f32", x.core, literal(x.factor))
