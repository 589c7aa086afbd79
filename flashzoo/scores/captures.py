"""Functions on scores become `ScoreMod`s, and what they captured says which have been traced before.

What `torch.compile` traces nothing of, since it would take our tracer's tensors for its own. Nothing here is imported
before there is such a function: the decorator loads the compiler, as our tracer does.
"""

from __future__ import annotations

from collections.abc import Callable
from dis import opmap
from functools import lru_cache, partial
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor

from flashzoo.scores.fitting import fitting
from flashzoo.scores.mod import Function, ScoreMod
from flashzoo.scores.program import Program
from flashzoo.scores.trace import traced

_KNOWN: dict[tuple[Any, ...], tuple[Program, tuple[int, ...]]] = {}
"""By what functions are made of and had captured when they were traced, their programs, and which of the captured
tensors these read. Nothing of it keeps a tensor."""
MOST_KNOWN = 256
_PLAIN = frozenset({bool, int, float, str, bytes, NoneType, torch.dtype, torch.device})
"""Types of what is its value alone; one that is derived from them may have attributes, which change."""
_WHY = "a score function can't be traced by two: make the ScoreMod outside of what torch.compile sees"


@torch.compiler.disable(reason=_WHY)
def program_of(function: Function) -> tuple[Program, tuple[Tensor, ...]]:
    """As `traced`."""
    return traced(function)


@torch.compiler.disable(reason=_WHY)
def mod_of(function: Function) -> ScoreMod:
    """Of a function that may have been traced before."""
    try:
        found = _Captures(function)
        prints = tuple(found.prints)
        known = _KNOWN.get(prints)
    except (TypeError, _Unknown):  # nothing that can be asked what it captures
        return ScoreMod(function)
    if known is not None:
        program, places = known
        return ScoreMod.of_program(function, program, tuple(found.tensors[place] for place in places), None)
    mod = ScoreMod(function)
    places = [next((i for i, x in enumerate(found.tensors) if x is read), -1) for read in mod.tensors]
    if -1 not in places:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        _KNOWN[prints] = mod.program, tuple(places)
    return mod


class _Unknown(Exception):
    """Something that a function captured may change unseen."""


class _Captures:
    """What a function may read beside its arguments: closures, defaults, globals, and those of functions that it calls.
    Of what has attributes, a module, a class or a function say, it is those that any of this code names.

    Attributes:
        prints: all of it but tensors' numbers, to be compared.
        tensors: those among it.
    """

    def __init__(self, function: Any) -> None:
        self.prints: list[Any] = []
        self.tensors: list[Tensor] = []
        self._met: dict[int, tuple[int, Any]] = {}  # with the object, lest another one be given its id
        self._names: dict[str, None] = {}
        self._holders: list[Callable[[str, Any], Any]] = []
        self._add(function)
        self._look_up()

    def _add(self, x: Any) -> None:
        if type(x) in _PLAIN or _is_of_numpy(x) or x is fitting:
            # 0.0 equals -0.0, and a long int has no text
            self.prints.append((type(x), x if type(x) is int else repr(x)))
        elif id(x) in self._met:
            self.prints.append(self._met[id(x)][0])
        else:
            self._met[id(x)] = len(self._met), x
            self._add_new(x)

    def _add_new(self, x: Any) -> None:
        if isinstance(x, Tensor):
            strides = x.stride() if x.layout == torch.strided else None
            self.prints.append((type(x), x.device, x.dtype, x.shape, strides, x.requires_grad))
            self.tensors.append(x)
            if vars(x):
                self._holders.append(vars(x).get)
        elif isinstance(x, ScoreMod) and x.function is not None:
            self._add(x.function)
        elif isinstance(x, FunctionType):
            self._add_function(x)
        elif isinstance(x, (tuple, partial)):
            parts = x if isinstance(x, tuple) else (x.func, *x.args, *x.keywords.items())
            self.prints.append((type(x), len(parts)))
            for part in parts:
                self._add(part)
            if type(x) not in (tuple, torch.Size):
                self._holders.append(partial(getattr, x))
        elif isinstance(x, (ModuleType, type)):
            self._add_namespace(x)
        elif _is_constant(x):
            self.prints.append(x)
        else:
            raise _Unknown

    def _add_function(self, x: FunctionType) -> None:
        self.prints.append(x.__code__)
        parts = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        parts += [cell.cell_contents for cell in x.__closure__ or ()]
        if not _is_of_torch(x.__globals__.get("__name__")):
            names = _names(x.__code__)
            self._names |= dict.fromkeys(names)
            parts += [x.__globals__[name] for name in names if name in x.__globals__]
        if vars(x):
            self._holders.append(vars(x).get)
        for part in parts:
            self._add(part)

    def _add_namespace(self, x: ModuleType | type) -> None:
        if x.__name__ in _UNFOLLOWED:
            raise _Unknown
        self.prints.append(x)
        if isinstance(x, ModuleType):
            if not _is_of_torch(x.__name__):
                plain = type(x) is ModuleType and "__getattr__" not in vars(x)
                self._holders.append(vars(x).get if plain else partial(getattr, x))
        elif not _is_of_torch(x.__module__):
            self._holders.append(partial(getattr, x))
            for base in x.__mro__:
                if not _is_of_torch(base.__module__):
                    for part in vars(base).values():
                        if isinstance(part, FunctionType):  # an operator is called without its name
                            self._add(part)

    def _look_up(self) -> None:
        """Adds the attributes; as long as these name others, and have others."""
        looked = 0, 0
        while looked != (len(self._holders), len(self._names)):
            looked = len(self._holders), len(self._names)
            for holder in (*self._holders,):
                for name in (*self._names,):
                    try:
                        found = holder(name, _ABSENT)
                    except Exception as error:  # of code of the caller's
                        raise _Unknown from error
                    if found is not _ABSENT:
                        self.prints.append(name)
                        self._add(found)


_ABSENT = object()
_UNFOLLOWED = frozenset({"getattr", "attrgetter", "vars", "__dict__", "globals", "eval", "exec", "__import__"})
"""Of code that has them, by these names or others, it is not known what it reads."""
_IMPORT = opmap["IMPORT_NAME"]


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Of the globals and attributes that code may read, that of functions within it among it. `_Unknown` where it may
    read others."""
    if _IMPORT in code.co_code[::2] or not _UNFOLLOWED.isdisjoint(code.co_names):
        raise _Unknown
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _is_of_torch(module: Any) -> bool:
    """Of a module's name, whether it is torch's, in which nothing changes."""
    return module == "torch" or str(module).startswith("torch.")


def _is_of_numpy(x: Any) -> bool:
    """Whether it is a number of numpy's, or a string, which are as plain as Python's."""
    return type(x).__module__ == "numpy" and isinstance(x, (Number, str, bytes))


def _is_constant(x: Any) -> bool:
    """Whether nothing that it is bound to can change: functions of modules and classes, and torch's without state."""
    if isinstance(x, BuiltinFunctionType):
        return x.__name__ not in _UNFOLLOWED and isinstance(x.__self__, (ModuleType, type, NoneType))
    return _is_of_torch(type(x).__module__) and (not hasattr(x, "__dict__") or isinstance(x, _OPERATIONS))


_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
