"""A program on torch tensors of any shapes that go together: what the reference computes, and what torch
differentiates."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from flashzoo.scores.by_default import float32_by_default
from flashzoo.scores.fitting import fitting
from flashzoo.scores.program import DTYPES, Program, is_value, number, tensor_number

TORCH_DTYPES: dict[str, torch.dtype] = dict(
    zip(
        DTYPES,
        (
            *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        ),
        strict=True,
    )
)

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_TORCH: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "eq", "ne", "lt", "le", "gt", "ge")},
    **{
        name: getattr(torch, name) for name in ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid")
    },
    **{name: getattr(torch, name) for name in ("erf", "sin", "cos", "floor", "ceil", "remainder", "where")},
    "min": torch.minimum,
    "max": torch.maximum,
    "div": lambda x, y: x / _on_device(y, x),
    "floordiv": lambda x, y: torch.div(x, _on_device(y, x), rounding_mode="floor"),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": torch.bitwise_not,
}


@float32_by_default()
def evaluated(
    program: Program,
    inputs: Mapping[str, Tensor],
    loaded: Mapping[str, Tensor] | None = None,
    tensors: tuple[Tensor, ...] = (),
    rounded: bool = True,
    read_as: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """What the program returns.

    Args:
        inputs: by their names. A score in float64 makes floating-point numbers float64 that the program has in float32.
        loaded: elements, by the names of the loads; where None they are read from the tensors.
        tensors: those that the program loads from, of its dtypes or of wider ones.
        rounded: to 16 bits, where the program has numbers of these, which else are as the score is: a gradient is
            rounded on its way back through what was.
        read_as: what is made of each element that is read.
    """
    of_score = inputs["score"].dtype
    wide = of_score == torch.float64
    values: dict[str, Tensor] = dict(inputs)

    def of_dtype(name: str) -> torch.dtype:
        if (wide and name == "f32") or (not rounded and name in ("f16", "bf16")):
            return of_score
        return TORCH_DTYPES[name]

    for i, step in enumerate(program.steps):
        name, dtype = f"x{i}", of_dtype(step.dtype)
        arguments: list[Any] = [values[a] if is_value(a) else number(a) if a[0] != "t" else a for a in step.arguments]
        if step.operation == "load":
            if loaded is None:
                x = tensors[tensor_number(step.arguments[0])]
                element = read(fitting(x) if step.arguments[0] in program.fitting else x, arguments[1:])
                element = element.to(torch.promote_types(element.dtype, dtype))
                values[name] = element if read_as is None else read_as(element)
            else:
                values[name] = loaded[name]
        elif step.operation == "const":
            values[name] = inputs["score"].new_full((), arguments[0], dtype=dtype)
        elif step.operation == "cast":
            values[name] = arguments[0].to(dtype)
        elif step.operation in ("min", "max"):
            values[name] = _TORCH[step.operation](*(_tensor(a, inputs["score"], dtype) for a in arguments))
        elif step.operation == "where" and not any(map(is_value, step.arguments[1:])):  # two numbers have no dtype
            condition, *numbers = arguments
            values[name] = torch.where(condition, *(_tensor(a, inputs["score"], dtype) for a in numbers))
        else:
            values[name] = _TORCH[step.operation](*arguments)
        for released in program.released[i]:
            del values[released]
    return tuple([values[name] for name in program.outputs])


def read(x: Tensor, indices: Sequence[Tensor | int]) -> Tensor:
    """x at whole numbers, one for each dimension; 0 past its ends, as kernels have it. Who traces it makes it a
    load."""
    if has_torch_function_unary(x):
        return handle_torch_function(read, (x,), x, indices)
    if not indices:
        return x
    whole, within = [], torch.ones((), dtype=torch.bool, device=x.device)
    for i, size in zip(indices, x.shape, strict=True):
        i = i.long() if isinstance(i, Tensor) else torch.tensor(i, device=x.device)
        i = torch.where(i < 0, i + size, i)
        within = within & (i >= 0) & (i < size)
        whole.append(i.clamp(0, max(size - 1, 0)))
    if not x.numel():
        return x.new_zeros(within.shape)
    return x[tuple(whole)].masked_fill(~within, 0)


def _on_device(y: Any, x: Any) -> Any:
    """A divisor that is a number, in memory: by one of the host's torch multiplies with its reciprocal on a GPU."""
    return _tensor(y, x, x.dtype) if isinstance(x, Tensor) else y


def _tensor(x: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    return x if isinstance(x, Tensor) else like.new_full((), x, dtype=dtype)
