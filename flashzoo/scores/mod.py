"""`ScoreMod`: a function of the caller's on scores, traced, with the tensors that it captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dis import opmap
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashzoo.call.forms import ScoreForm
from flashzoo.scores.by_default import float32_by_default
from flashzoo.scores.fitting import fitting

if TYPE_CHECKING:
    from flashzoo.scores.program import Program

Function = Callable[..., Tensor]


class ScoreMod:
    """A function on scores, as `flashzoo.attention` takes it, traced once and for all.

    `attention(score_mod=)` takes the function itself as well, and traces it again only where what it captured is
    another: numbers, tensors of other shapes or dtypes. One that reads through objects of classes of your own, by
    `getattr` or `vars`, or what it imports, is traced at every call, unless it is a `ScoreMod`; and only as such can it
    be used under `torch.compile` and `torch.export`, which takes its tensors for constants. It can be copied and
    pickled, and then reads copies of its tensors.

    Args:
        function: `(score, batch, head, q_idx, kv_idx) -> score`, FlexAttention's signature: on tensors of no
            dimensions, the score in float32, scaled, the others int32. It is called with others as well, all of one
            score's place or of many that broadcast, in float64 too. Torch's default dtype is float32 meanwhile.

    Attributes:
        function: as given; None where there is only a text.
        program: what it computes.
        text: the program's, which is what kernels are chosen by and made of.
        tensors: what it captured, in the order in which it reads them.

    Raises:
        TypeError, ValueError: the function returns something else than a score, depends on data, changes what it was
            given or captured, or uses an operation that no kernel has; the text says which.
    """

    def __init__(self, function: Function) -> None:
        from flashzoo.scores.trace import traced

        if not callable(function):
            raise TypeError(f"score_mod must be a function (score, batch, head, q_idx, kv_idx), got {function!r}")
        _check_takes_five(function)
        self.function: Function | None = function
        self.program, self.tensors = traced(function)
        self.text: str = self.program.text
        self._grads: tuple[int, ...] | None = None

    @classmethod
    def of_parts(cls, text: str, tensors: tuple[Tensor, ...], grads: tuple[int, ...] | None = None) -> ScoreMod:
        """One from its program's text, its tensors, and the numbers of those that are to have gradients, which where
        None are those that require them. ValueError where the text is none, or reads other tensors."""
        from flashzoo.scores.program import parsed

        return cls._of(None, parsed(text), tuple(tensors), grads)

    @classmethod
    def _of(
        cls, function: Function | None, program: Program, tensors: tuple[Tensor, ...], grads: tuple[int, ...] | None
    ) -> ScoreMod:
        found = cls.__new__(cls)
        found.function, found.program, found.text = function, program, program.text
        found.tensors, found._grads = tensors, grads
        return found

    @classmethod
    def of(cls, function: Function | ScoreMod) -> ScoreMod:
        """Of a function that may have been traced before."""
        if isinstance(function, ScoreMod):
            return function
        try:
            found = _Captures(function)
            prints = tuple(found.prints)
            known = _KNOWN.get(prints)
        except (TypeError, _Unknown):  # nothing that can be asked what it captures
            return cls(function)
        if known is not None:
            program, places = known
            return cls._of(function, program, tuple(found.tensors[place] for place in places), None)
        mod = cls(function)
        places = [next((i for i, x in enumerate(found.tensors) if x is read), -1) for read in mod.tensors]
        if -1 not in places:
            if len(_KNOWN) >= MOST_KNOWN:
                _KNOWN.pop(next(iter(_KNOWN)), None)
            _KNOWN[prints] = mod.program, tuple(places)
        return mod

    @property
    def grads(self) -> tuple[int, ...]:
        """The numbers of the tensors that have gradients."""
        if self._grads is not None:
            return self._grads
        return tuple([i for i, x in enumerate(self.tensors) if x.requires_grad])

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """The tensors that have gradients."""
        return tuple([self.tensors[i] for i in self.grads])

    @property
    def form(self) -> ScoreForm:
        """What the choice of a version and of its kernels depends on."""
        from flashzoo.scores.evaluate import NAMES

        reads = tuple([(NAMES[x.dtype], tuple(x.shape)) for x in self.tensors])
        return ScoreForm(self.text, reads, self.grads, any([_is_far(x) for x in self.tensors]))

    def resolved(self) -> ScoreMod:
        """Itself, or the same of tensors none of which is lazily negated."""
        if not any([x.is_neg() for x in self.tensors]):
            return self
        return self._of(None, self.program, tuple(x.resolve_neg() for x in self.tensors), self._grads)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """New scores, of tensors that broadcast; where score is float64 all that is float32 is."""
        return self.on((score, b, h, q, k), self.tensors)

    @float32_by_default()
    def on(self, arguments: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        """As the call, with other tensors in place of those that it captured."""
        from flashzoo.scores.trace import ARGUMENTS, Captured

        if self.function is None:
            from flashzoo.scores.evaluate import evaluated

            (found,) = evaluated(self.program, dict(zip(ARGUMENTS, arguments, strict=True)), None, tensors)
        else:
            instead = {id(x): other for x, other in zip(self.tensors, tensors, strict=True)}
            with Captured(lambda x: instead.get(id(x)), False):
                found = self.function(*arguments)
        return found.to(arguments[0].dtype).expand_as(arguments[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its text, with copies of its tensors, which its function would not read."""
        return ScoreMod.of_parts, (self.text, self.tensors, self._grads)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", "of a text")
        return f"ScoreMod({name}: {len(self.program.steps)} operations, {len(self.tensors)} tensors)"


def _check_takes_five(function: Function) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # it has none that can be asked for
        return
    try:
        signature.bind(*range(5))
    except TypeError as error:
        raise TypeError(
            f"score_mod must take (score, batch, head, q_idx, kv_idx), got {function!r}{signature}: {error}"
        ) from None


def _is_far(x: Tensor) -> bool:
    """Whether 32 bits don't number its elements, in memory or one behind another."""
    return max(x.numel(), sum([(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)])) >= 1 << 31


_KNOWN: dict[tuple[Any, ...], tuple[Program, tuple[int, ...]]] = {}
"""By what functions are made of and had captured when they were traced, their programs, and which of the captured
tensors these read. Nothing of it keeps a tensor."""
MOST_KNOWN = 256
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


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
        if isinstance(x, _PLAIN) or x is fitting:
            self.prints.append((type(x), repr(x) if isinstance(x, float) else x))  # 0.0 equals -0.0
        elif id(x) in self._met:
            self.prints.append(self._met[id(x)][0])
        else:
            self._met[id(x)] = len(self._met), x
            self._add_new(x)

    def _add_new(self, x: Any) -> None:
        if isinstance(x, Tensor):
            self.prints.append((x.dtype, x.shape, x.layout))
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
"""Of code that names them it is not known what it reads."""
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


def _is_constant(x: Any) -> bool:
    """Whether nothing that it is bound to can change: functions of modules and classes, and torch's without state."""
    if isinstance(x, BuiltinFunctionType):
        return isinstance(x.__self__, (ModuleType, type, NoneType))
    return _is_of_torch(type(x).__module__) and (not hasattr(x, "__dict__") or isinstance(x, _OPERATIONS))


_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
