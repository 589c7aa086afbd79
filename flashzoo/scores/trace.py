"""From a function on torch tensors to a program, by torch's own tracer, and from a program to that of its gradient, by
torch's own autograd.

The function is run on tensors of one element that have no data, so nothing is launched and nothing may depend on a
number. What it reads beside its arguments it has captured: tensors, which become the program's, and numbers, which are
written into it.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

from flashzoo.scores.by_default import float32_by_default
from flashzoo.scores.evaluate import NAMES, TORCH_DTYPES, evaluated, read
from flashzoo.scores.fitting import fitting
from flashzoo.scores.program import (
    COMPARISONS,
    FLOATS,
    OPERATIONS,
    Builder,
    Program,
    is_value,
    literal,
    parsed,
    tensor_number,
)

ARGUMENTS = ("score", "b", "h", "q", "k")
"""Of a score function."""
_DETACH = (Tensor.detach, Tensor.detach_, torch.detach)
_WITHOUT_GRADIENT = (*_DETACH, Tensor.data.__get__)  # pyright: ignore[reportAttributeAccessIssue]
"""What gives a number that is a tensor's, and has none of its gradient: a program has no word for that."""


class Captured(TorchFunctionMode):
    """Notes the tensors that a function reads and was not given, and puts others in their place. An index of tensors of
    one element is a reading of the tensor: torch would look at their numbers.

    Attributes:
        fitting: those that the function says are as large as the call.

    Args:
        instead: of a tensor, what the function is to read; None where it is to read the tensor itself.
    """

    def __init__(self, instead: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.instead = instead
        self.fitting: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is fitting:
            self.fitting.append(args[0])
        if func is torch._C._set_grad_enabled or (func in _WITHOUT_GRADIENT and args[0].is_floating_point()):
            what = func.__name__ if func in _DETACH else "data or no_grad"
            raise ValueError(f"score_mod must leave no gradient out, got {what}: detach what it captures beforehand")
        args, kwargs = tree_map_only(Tensor, self._replaced, (args, kwargs or {}))
        if func is read:
            return _read(args[0], tuple(args[1]))
        return _read(*args) if func is Tensor.__getitem__ else func(*args, **kwargs)

    def _replaced(self, x: Tensor) -> Tensor:
        other = self.instead(x)
        return x if other is None else other


def _read(x: Tensor, index: Any) -> Tensor:
    """x at an index of integers and tensors of one element, first dimensions first."""
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) > x.ndim:
        raise IndexError(f"score_mod reads a tensor of {x.ndim} dimensions {tuple(x.shape)} by {len(indices)} indices")
    whole = []
    for i, size in zip(indices, x.shape, strict=False):
        if isinstance(i, int) and not isinstance(i, bool):
            if not -size <= i < size:
                raise IndexError(f"score_mod reads a tensor of shape {tuple(x.shape)} at {index!r}, past its end")
            whole.append(torch.tensor(i % size, device="cpu"))
        elif isinstance(i, Tensor) and i.ndim == 0 and not i.is_floating_point() and i.dtype != torch.bool:
            whole.append(i)
        else:
            raise TypeError(f"score_mod must read tensors by integers, one for each dimension, got the index {index!r}")
    return torch.ops.aten.index.Tensor(x, whole)


_ONE_AT_A_TIME = RLock()
"""Torch's tracer changes what all threads see."""


@float32_by_default()
def traced(function: Callable[..., Any]) -> tuple[Program, tuple[Tensor, ...]]:
    """The program of a score function, and the tensors that it captured.

    Raises:
        TypeError, ValueError: it gives something else than a score, reads data, changes what it captured, or uses an
            operation that no kernel has; the text says which.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.fx.experimental.proxy_tensor import make_fx

    _check_takes_five(function)
    if any(isinstance(mode, Captured) for mode in _get_current_function_mode_stack()):
        raise ValueError("score_mod must use a ScoreMod that was made before, not make one")
    captured: dict[int, Tensor] = {}
    fakes: dict[int, Tensor] = {}

    def noted(x: Tensor) -> Tensor | None:
        if isinstance(x, FakeTensor) and x.fake_mode is fake:
            return None
        if id(x) not in fakes:
            if x.layout != torch.strided or x.dtype not in NAMES:
                raise TypeError(f"score_mod must capture dense tensors of {', '.join(map(str, NAMES))}, got {_told(x)}")
            captured[id(x)] = x
            like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            fakes[id(x)] = like.requires_grad_(x.requires_grad)
        return fakes[id(x)]

    def graph_of(*arguments: Tensor) -> Any:
        mine = dict(zip(captured, arguments[len(ARGUMENTS) :], strict=True))
        with Captured(lambda x: mine.get(id(x))):
            return function(*arguments[: len(ARGUMENTS)])

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with _ONE_AT_A_TIME, torch.no_grad(), _alone(), fake:
            score, number = torch.zeros(()), torch.zeros((), dtype=torch.int32)
            arguments = (score, *[number.clone() for _ in ARGUMENTS[1:]])
            with Captured(noted) as seen:
                returned = function(*arguments)
            _check_returned(returned, any(x.dtype == torch.float64 for x in captured.values()))
            table = _decompositions()
        with _ONE_AT_A_TIME, torch.no_grad(), _alone(), fake:
            graph = make_fx(graph_of, decomposition_table=table)(*arguments, *fakes.values())
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            "score_mod must not depend on data: no number of a tensor may decide what it does or which shape it has "
            f"(if, int(), item()); torch.where chooses between values. Got {error}"
        ) from error
    tensors = tuple(captured.values())
    program = _Writer(tuple(NAMES[x.dtype] for x in tensors)).of_graph(graph)
    fits = tuple(f"t{i}" for i, x in enumerate(tensors) if any(x is other for other in seen.fitting))
    return replace(program, fitting=fits), tensors


@contextmanager
def _alone() -> Iterator[None]:
    """Under no mode and no transform that the call may be under: they would see tensors of ours as theirs."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def _check_takes_five(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except ValueError:  # it has none that can be asked for
        return
    try:
        signature.bind(*range(5))
    except TypeError as error:
        raise TypeError(
            f"score_mod must take (score, batch, head, q_idx, kv_idx), got {function!r}{signature}: {error}"
        ) from None


def _check_returned(x: Any, of_float64: bool) -> None:
    dtypes = (torch.float32, torch.float64) if of_float64 else (torch.float32,)
    if not isinstance(x, Tensor) or x.ndim or x.dtype not in dtypes:
        raise TypeError(
            f"score_mod must return a score, a torch.float32 Tensor of shape (), as it was given, got {_told(x)}"
        )


def _told(x: Any) -> str:
    return f"a Tensor {tuple(x.shape)}, {x.dtype}, {x.layout}" if isinstance(x, Tensor) else repr(x)


def _decompositions() -> dict[Any, Any]:
    """Torch's own for what is not written down below."""
    from torch._decomp import decomposition_table

    return {
        op: way
        for op, way in decomposition_table.items()
        if way.__module__ == "torch._decomp.decompositions" and _packet(op) not in _WRITTEN and _packet(op)[-1] != "_"
    }


def _packet(op: Any) -> str:
    """Of an operation torch.ops.aten.<name>.<overload> the name."""
    return str(op).split(".")[1] if "." in str(op) else str(op)


def _plain(node: Node) -> str:
    """The name of a node's operation, in place or not."""
    name = _packet(node.target)
    return name if name.endswith("__") else name.removesuffix("_")


_SAME = (
    *("alias", "detach", "clone", "lift_fresh", "lift_fresh_copy", "expand", "view", "_unsafe_view", "reshape"),
    *("contiguous", "squeeze", "permute", "t", "broadcast_to"),
)
"""Of one element they are the element."""
_COPIES = ("clone", "lift_fresh", "lift_fresh_copy")
"""Of these those that have memory of their own."""
_BINARY = {"mul": "mul", "maximum": "max", "minimum": "min", "remainder": "remainder", "floor_divide": "floordiv"}
_UNARY = {
    name: name
    for name in ("neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos")
} | {"floor": "floor", "ceil": "ceil"}
_LOGIC = {f"{kind}_{name}": name for kind in ("logical", "bitwise") for name in ("and", "or", "xor")}
_LOGIC |= {f"__{name}__": name for name in ("and", "or", "xor")}
_FILLED = ("full", "scalar_tensor", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_ones")
_FILLED += ("new_full",)
_CAST = ("_to_copy", "to", "convert_element_type", "type_as")


def _worked_in(dtype: str) -> str:
    """In which dtype numbers of one are computed with."""
    return "f32" if dtype in ("f16", "bf16") else dtype


LARGEST_POWER = 8
"""Powers up to it are products."""


class _Writer:
    """Writes down a graph of torch's operations on tensors of one element."""

    def __init__(self, dtypes: tuple[str, ...] = ()) -> None:
        self.builder = Builder()
        self.env: dict[Node, Any] = {}
        self.tensors = [_Read(f"t{i}", dtype) for i, dtype in enumerate(dtypes)]

    def of_graph(self, graph: GraphModule) -> Program:
        """The program; the graph's inputs are `ARGUMENTS` and the tensors."""
        return self.builder.program(*self.written(graph, [*ARGUMENTS, *self.tensors]))

    def written(self, graph: GraphModule, inputs: list[Any]) -> list[str]:
        """What it returns, in names."""
        given = iter(inputs)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(given)
            elif node.op == "get_attr":
                self.env[node] = self._constant(getattr(graph, node.target))
            elif node.op == "call_function":
                self.env[node] = self._of(node)
        (last,) = (node for node in graph.graph.nodes if node.op == "output")
        returned = last.args[0] if isinstance(last.args[0], (tuple, list)) else (last.args[0],)
        return [self._element(x, "f32") for x in returned]

    def _constant(self, x: Any) -> Any:
        if x.numel() != 1:
            raise ValueError(f"score_mod must capture a tensor rather than make one, got one of shape {tuple(x.shape)}")
        value = x.item() if not hasattr(x, "constant") or x.constant is None else x.constant.item()
        return self.builder.add("const", NAMES[x.dtype], literal(value))

    def _of(self, node: Node) -> Any:
        name = _packet(node.target)
        if node.target is operator.getitem:
            raise self._refused("an operation of several results")
        self._check_kept(node)
        found = self._written(node, _plain(node))
        if name != _plain(node):  # in place, of a number that is the function's own
            self.env[node.args[0]] = found  # pyright: ignore[reportArgumentType]
        return found

    def _check_kept(self, node: Node) -> None:
        """ValueError where an argument is changed that others see."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        first: Any = node.args[0]
        others = [x for x in (first, *first.users) if _packet(x.target) in _SAME and _packet(x.target) not in _COPIES]
        if isinstance(self.env.get(first), _Read) or first.op == "placeholder" or others:
            raise ValueError(
                f"score_mod must have no side effects, got {node.target} on what it was given or captured, "
                "or what has another view"
            )

    @staticmethod
    def _refused(what: str) -> ValueError:
        known = ", ".join(name for name in OPERATIONS if name not in ("const", "load"))
        return ValueError(f"score_mod must be made of operations that kernels have ({known}), got {what}")

    def _written(self, node: Node, name: str) -> Any:
        if name not in _WRITTEN:
            raise self._refused(str(node.target))
        if name in ("index", "select"):
            return self._indexed(node, name)
        if name in _SAME:
            return self._same(node, name)
        if node.meta["val"].ndim:
            raise self._refused(f"{node.target} on a tensor of shape {tuple(node.meta['val'].shape)}")
        dtype = NAMES.get(node.meta["val"].dtype)
        if dtype is None:
            raise self._refused(f"{node.target} of {node.meta['val'].dtype}")
        return _WRITTEN[name](self, node, dtype)

    def _same(self, node: Node, name: str) -> Any:
        x: Any = node.args[0]
        if x.meta["val"].dtype != node.meta["val"].dtype:  # the same bits, which are another number
            raise self._refused(f"{node.target} of {x.meta['val'].dtype} as {node.meta['val'].dtype}")
        found, old, new = self.env[x], x.meta["val"].shape, node.meta["val"].shape
        if not isinstance(found, _Read) or (old == new and name not in ("permute", "t")):
            return found
        if new or old.numel() != 1:  # its indices would be others
            raise self._refused(f"{node.target} of a captured tensor of shape {tuple(old)}")
        return _Read(found.tensor, found.dtype, (*found.indices, *["0"] * len(old)))

    def _element(self, x: Any, dtype: str) -> str:
        """The argument of an operation in this dtype."""
        if isinstance(x, Node):
            found = self.env[x]
            if isinstance(found, _Read):
                found = found.element(self)
            return self.builder.cast(found, dtype)
        if isinstance(x, (bool, int, float)):
            if dtype not in FLOATS and dtype != "bool":
                range_of = torch.iinfo(TORCH_DTYPES[dtype])
                if not range_of.min <= int(x) <= range_of.max:
                    raise ValueError(
                        f"score_mod must have numbers of {range_of.dtype} beside such, got {x}: cast, as by long()"
                    )
            return literal(x if dtype == "bool" else float(x) if dtype in FLOATS else int(x))
        raise self._refused(f"the argument {x!r}")

    def calculated(self, operation: str, dtype: str, *arguments: Any) -> str:
        """An operation of which operands and result are of the dtype. 16-bit numbers are worked with in float32, as
        torch does, and rounded."""
        wide = _worked_in(dtype)
        return self.builder.cast(self.builder.add(operation, wide, *self._operands(wide, arguments)), dtype)

    def bounded(self, beyond: str, dtype: str, *arguments: Any) -> str:
        """The second where the first is beyond it, else the first; worked with as `calculated`. Of max, two that are
        equal have half of the gradient each."""
        wide = _worked_in(dtype)
        x, bound = self._operands(wide, arguments)
        found = self.builder.add("where", wide, self.builder.add(beyond, "bool", x, bound), bound, x)
        return self.builder.cast(found, dtype)

    def _operands(self, dtype: str, arguments: tuple[Any, ...]) -> list[str]:
        return [self._element(x, dtype) if not isinstance(x, str) else self.builder.cast(x, dtype) for x in arguments]

    def _indexed(self, node: Node, name: str) -> _Read:
        source: Any = self.env[node.args[0]]  # pyright: ignore[reportArgumentType]
        if not isinstance(source, _Read):
            raise self._refused(f"{node.target} of what is no captured tensor")
        if name == "select":
            if node.args[1] != 0:
                raise self._refused(f"{node.target} in another dimension than the first")
            return _Read(source.tensor, source.dtype, (*source.indices, self._element(node.args[2], "i32")))
        wanted: Any = node.args[1]
        if any(index is None for index in wanted):
            raise self._refused(f"{node.target} with dimensions left out")
        found = tuple(self._index(i) for i in wanted)
        return _Read(source.tensor, source.dtype, (*source.indices, *found))

    def _index(self, x: Node) -> str:
        """One that is always the same as a number."""
        name = self._element(x, "i32" if x.meta["val"].dtype == torch.int32 else "i64")
        step = self.builder.steps[int(name[1:])] if name[0] == "x" else None
        return step.arguments[0] if step is not None and step.operation == "const" else name


class _Read:
    """A captured tensor with as many of its first indices as are known."""

    def __init__(self, tensor: str, dtype: str, indices: tuple[str, ...] = ()) -> None:
        self.tensor, self.dtype, self.indices = tensor, dtype, indices

    def element(self, writer: _Writer) -> str:
        """The element, where all are."""
        return writer.builder.add("load", self.dtype, self.tensor, *self.indices)


def _args(node: Node, count: int) -> list[Any]:
    return [*node.args, *[None] * count][:count]


def _sum(writer: _Writer, node: Node, dtype: str) -> str:
    left, right = _args(node, 2)
    name, alpha = _plain(node), node.kwargs.get("alpha", 1)
    if name == "rsub":
        left, right = right, left
        alpha = node.args[2] if len(node.args) > 2 else alpha
    if alpha != 1:
        right = writer.calculated("mul", dtype, right, alpha)
    if dtype == "bool":  # of which torch has no difference
        return writer.calculated("or", dtype, left, right)
    return writer.calculated("add" if name == "add" else "sub", dtype, left, right)


def _quotient(writer: _Writer, node: Node, dtype: str) -> str:
    left, right = _args(node, 2)
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor":
        return writer.calculated("floordiv", dtype, left, right)
    if dtype not in FLOATS:
        raise writer._refused(f"{node.target} of integers towards 0")
    # a number that stays the same, and of which float32 has the reciprocal
    fixed = isinstance(right, (int, float)) and SMALLEST <= abs(right) <= 1 / SMALLEST
    if fixed and mode is None and (abs(math.frexp(right)[0]) == 0.5 or not _decides(node)):
        return writer.calculated("mul", dtype, left, 1 / right)
    found = writer.calculated("div", dtype, left, right)
    return found if mode is None else _towards_0(writer, found, dtype)


SMALLEST = 2.0**-126
"""Of float32's numbers of all 24 bits."""
_STEPS = ("floor", "ceil", "remainder", "floor_divide", "sign", "sgn")
"""Operations that jump, of those that give floating-point numbers."""


def _decides(node: Node) -> bool:
    """Whether a last bit of a node's result may be all the difference: something that jumps is made of it, as an index,
    a comparison or a whole number is. A product with a reciprocal rounds twice, and will not do for that."""
    ahead, met = [node], {node}
    while ahead:
        at = ahead.pop()
        made: list[Any] = [x for x in at.users if x.op == "call_function"]
        if any(_plain(x) in _STEPS or "rounding_mode" in x.kwargs or not _is_float(x) for x in made):
            return True
        if _packet(at.target) != _plain(at):  # in place: who reads what it was given reads this
            made.append(at.args[0])
        ahead += [x for x in made if x not in met]
        met.update(made)
    return False


def _is_float(node: Node) -> bool:
    x = node.meta["val"]
    return isinstance(x, Tensor) and x.is_floating_point()


def _towards_0(writer: _Writer, x: str, dtype: str) -> str:
    below = writer.builder.add("lt", "bool", x, "0.0")
    up, down = writer.calculated("ceil", dtype, x), writer.calculated("floor", dtype, x)
    return writer.builder.add("where", dtype, below, up, down)


def _power(writer: _Writer, node: Node, dtype: str) -> str:
    base, exponent = _args(node, 2)
    if base == 1 and dtype in FLOATS:
        return writer.builder.add("const", dtype, literal(1.0))
    if isinstance(base, (int, float)) and base > 0 and dtype in FLOATS:
        times = exponent if base == 2 else writer.calculated("mul", dtype, exponent, math.log2(base))
        return writer.calculated("exp2", dtype, times)
    if exponent == 0.5 and dtype in FLOATS:
        return writer.calculated("sqrt", dtype, base)
    if exponent == -0.5 and dtype in FLOATS:
        return writer.calculated("rsqrt", dtype, base)
    whole = isinstance(exponent, (int, float)) and exponent == int(exponent) and 1 <= abs(exponent) <= LARGEST_POWER
    if not whole or (exponent < 0 and dtype not in FLOATS):
        raise writer._refused(f"{node.target}: a power whose base is no positive number needs a whole exponent")
    wide = _worked_in(dtype)  # in which torch, too, rounds none but the result
    found = factor = writer._element(base, wide)
    for _ in range(abs(int(exponent)) - 1):
        found = writer.calculated("mul", wide, found, factor)
    return writer.builder.cast(found if exponent > 0 else writer.calculated("div", wide, 1, found), dtype)


def _clamped(writer: _Writer, node: Node, dtype: str) -> str:
    x, low, high = _args(node, 3)
    name = _plain(node)
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    if name == "clamp_max":
        low, high = None, low
    found = writer._element(x, dtype)
    for operation, beyond, bound in (("max", "lt", low), ("min", "gt", high)):
        if bound is not None and dtype in FLOATS:
            found = writer.bounded(beyond, dtype, found, bound)
        elif bound is not None:
            found = writer.calculated(operation, dtype, found, bound)
    return found


def _chosen(writer: _Writer, node: Node, dtype: str) -> str:
    condition, left, right = node.args
    values = [writer._element(x, dtype) for x in (left, right)]
    return writer.builder.add("where", dtype, writer._element(condition, "bool"), *values)


def _compared(writer: _Writer, node: Node, dtype: str) -> str:
    operands: list[Any] = [x.meta["val"] if isinstance(x, Node) else x for x in node.args]
    common = _worked_in(NAMES[torch.result_type(*operands)])
    return writer.builder.add(_plain(node), "bool", *[writer._element(x, common) for x in node.args])


def _combined(writer: _Writer, node: Node, dtype: str) -> str:
    return writer.builder.cast(writer.calculated(_LOGIC[_plain(node)], _decided_in(node, dtype), *node.args), dtype)


def _not(writer: _Writer, node: Node, dtype: str) -> str:
    return writer.builder.cast(writer.calculated("not", _decided_in(node, dtype), node.args[0]), dtype)


def _decided_in(node: Node, dtype: str) -> str:
    """Of `logical_and` and its like whether numbers are 0, also where one of them takes the answer; of bitwise ones all
    their bits."""
    return "bool" if _plain(node).startswith("logical") else dtype


def _filled(writer: _Writer, node: Node, dtype: str) -> str:
    name = _plain(node)
    value: Any = 0 if "zeros" in name else 1 if "ones" in name else node.args[name in ("full", "full_like", "new_full")]
    if name == "new_full":
        value = node.args[2]
    if not isinstance(value, (bool, int, float)):
        raise writer._refused(f"{node.target} of {value!r}")
    return writer.builder.add("const", dtype, literal(float(value) if dtype in FLOATS else value))


def _sign(writer: _Writer, node: Node, dtype: str) -> str:
    (x,) = node.args
    element = writer._element(x, dtype)
    zero, one = ("0.0", 1.0) if dtype in FLOATS else ("0", 1)
    above, below = (writer.builder.add(op, "bool", element, zero) for op in ("gt", "lt"))
    number = literal(one)
    negative = writer.builder.add("where", dtype, below, f"-{number}", zero)
    return writer.builder.add("where", dtype, above, number, negative)


def _unary(writer: _Writer, node: Node, dtype: str) -> str:
    if _plain(node) in ("floor", "ceil") and dtype not in FLOATS:
        return writer._element(node.args[0], dtype)
    return writer.calculated(_UNARY[_plain(node)], dtype, node.args[0])


def _binary(writer: _Writer, node: Node, dtype: str) -> str:
    return writer.calculated(_BINARY[_plain(node)], dtype, *node.args[:2])


def _inverse(writer: _Writer, node: Node, dtype: str) -> str:
    return writer.calculated("div", dtype, 1, node.args[0])


def _masked(writer: _Writer, node: Node, dtype: str) -> str:
    x, mask, value = node.args
    names = [writer._element(x, dtype) for x in (value, x)]
    return writer.builder.add("where", dtype, writer._element(mask, "bool"), *names)


def _positive(writer: _Writer, node: Node, dtype: str) -> str:
    return writer.bounded("le", dtype, node.args[0], 0)


_WRITTEN: dict[str, Any] = {
    **dict.fromkeys(_SAME),
    **dict.fromkeys(("index", "select")),
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_LOGIC, _combined),
    **dict.fromkeys(COMPARISONS, _compared),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
    **dict.fromkeys(_FILLED, _filled),
    **dict.fromkeys(_CAST, lambda writer, node, dtype: writer._element(node.args[0], dtype)),
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("sign", "sgn"), _sign),
    "div": _quotient,
    "pow": _power,
    "where": _chosen,
    "reciprocal": _inverse,
    "relu": _positive,
    "masked_fill": _masked,
}
"""By the name of torch's operation, how it is written down."""


class Loaded(NamedTuple):
    """An element that a score function loads: number of the tensor, the indices, and the element's gradient."""

    tensor: int
    indices: tuple[str, ...]
    value: str


@dataclass(frozen=True)
class Gradient:
    """Of a score function from the score, its places and the gradient `ds` of what it returns.

    Attributes:
        program: of all that follows.
        score: the gradient of the score that was given.
        loads: of each element; in float32, and 0 where it is no float.
    """

    program: Program
    score: str
    loads: tuple[Loaded, ...]


@lru_cache(maxsize=256)
@float32_by_default()
def gradient_of(text: str) -> Gradient:
    """The gradient of a score function, by its program's text."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    program = parsed(text)
    loads = program.loads

    def of(score: Tensor, ds: Tensor, *rest: Tensor) -> list[Tensor]:
        numbers, loaded = rest[: len(ARGUMENTS) - 1], rest[len(ARGUMENTS) - 1 :]
        with torch.enable_grad():
            score = score.detach().requires_grad_()
            elements = [x.detach().requires_grad_(x.is_floating_point()) for x in loaded]
            inputs: dict[str, Tensor] = dict(zip(ARGUMENTS, (score, *numbers), strict=True))
            (out,) = evaluated(program, inputs, dict(zip((name for name, _ in loads), elements, strict=True)))
            leaves = [score, *(x for x in elements if x.requires_grad)]
            found = iter(
                torch.autograd.grad(out, leaves, ds, allow_unused=True, materialize_grads=True)
                if out.requires_grad
                else [torch.zeros_like(x) for x in leaves]
            )
        return [next(found), *(next(found) if x.requires_grad else torch.zeros_like(score) for x in elements)]

    # below a dispatch mode, and in inference mode, nothing is recorded, whatever enable_grad() says; this undoes that
    with torch.inference_mode(False), FakeTensorMode():
        number = [torch.zeros((), dtype=torch.int32) for _ in ARGUMENTS[1:]]
        # what is read in 16 bits has its gradient in float32, in which it is summed
        wide = (_worked_in(step.dtype) for _, step in loads)
        elements = [torch.zeros((), dtype=TORCH_DTYPES[dtype]) for dtype in wide]
        graph = make_fx(of, decomposition_table=_decompositions())(torch.zeros(()), torch.zeros(()), *number, *elements)
    writer = _Writer()
    for step in program.steps:
        writer.builder.add(step.operation, step.dtype, *step.arguments)
    inputs = ["score", "ds", *ARGUMENTS[1:], *(name for name, _ in loads)]
    score_and_values = writer.written(graph, inputs)
    indices = [step.arguments[1:] for _, step in loads]
    wanted = [*score_and_values, *(name for some in indices for name in some if is_value(name))]
    whole = writer.builder.program(*wanted)
    names = dict(zip(wanted, whole.outputs, strict=True))
    score, *values = score_and_values
    found = [
        Loaded(tensor_number(step.arguments[0]), tuple(names.get(name, name) for name in some), names[value])
        for (_, step), some, value in zip(loads, indices, values, strict=True)
    ]
    return Gradient(whole, names[score], tuple(found))


@lru_cache(maxsize=256)
def with_gradient(text: str) -> str:
    """The text of a program that returns the new score, and behind it the gradient of the old one."""
    gradient, builder = gradient_of(text), Builder()
    found: list[str] = []
    for program, output in ((parsed(text), parsed(text).outputs[0]), (gradient.program, gradient.score)):
        names: dict[str, str] = {}
        for i, step in enumerate(program.steps):
            names[f"x{i}"] = builder.add(step.operation, step.dtype, *(names.get(a, a) for a in step.arguments))
        found.append(names.get(output, output))
    return builder.program(*found).text
