"""Which version answers a call: `register`, `versions`, `choose`, `explain_problem`. Standard library only.

The order of registration is the order of `auto`: the first version with no objection is taken, or one that objects to the
backward pass alone where another lends its own. An explicit name never falls back: it runs, backward pass included, or
raises with its reasons and with the versions that would do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from flashzoo.spec import Problem, Spec

ENTRY_POINTS = "flashzoo.versions"
ENVIRONMENT = "FLASHZOO_VERSION"
FILES = "FLASHZOO_VARIANTS"
"""Environment variable with files that register versions, joined as in PATH: plug-ins without a package."""

Answer = TypeVar("Answer", bound=Callable)

_specs: dict[str, Spec] = {}
_caches: list[Callable[[], None]] = []
_plugin_errors: dict[str, str] = {}
_plugins_loaded = False
_chosen: ContextVar[str | None] = ContextVar("flashzoo_version", default=None)


class UnsupportedError(NotImplementedError):
    """No version, or not the one that was named, can take the call. The text holds every reason."""


def register(spec: Spec, *, before: str | None = None) -> Spec:
    """Add a version to the zoo.

    Args:
        spec: what the version declares.
        before: name of the version that it precedes in `auto` order; the end where None.

    Returns:
        The spec, so that a module can write `SPEC = flashzoo.register(Spec(...))`.

    Raises:
        ValueError: the name is taken, is "auto", or `before` is unknown.
    """
    if spec.name == "auto" or not spec.name.isidentifier():
        raise ValueError(f"register: spec.name must be an identifier other than 'auto', got {spec.name!r}")
    if spec.name in _specs:
        raise ValueError(f"register: the name {spec.name!r} is taken by {_specs[spec.name].impl}; unregister it first")
    if before is not None and before not in _specs:
        raise ValueError(f"register: before must be one of {', '.join(_specs)}, got {before!r}")
    order = list(_specs.values())
    order.insert(len(order) if before is None else [s.name for s in order].index(before), spec)
    _specs.clear()
    _specs.update((s.name, s) for s in order)
    _forget()
    return spec


def unregister(name: str) -> None:
    """Remove a version. Raises ValueError where no version has that name."""
    if name not in _specs:
        raise ValueError(f"unregister: name must be one of {', '.join(_specs)}, got {name!r}")
    del _specs[name]
    _forget()


def remembered(function: Answer) -> Answer:
    """`functools.lru_cache` for answers that hold until a version is registered or unregistered.

    Typed, so that an equal argument of another type (1 for True) is looked at anew.
    """
    cached = lru_cache(maxsize=4096, typed=True)(function)
    _caches.append(cached.cache_clear)
    return cached  # pyright: ignore[reportReturnType]


def _forget() -> None:
    for clear in _caches:
        clear()


def versions() -> dict[str, Spec]:
    """Every registered version by name, in `auto` order, those of installed plug-ins included."""
    _load_plugins()
    return dict(_specs)


def plugin_errors() -> dict[str, str]:
    """Entry points in the group `flashzoo.versions`, and files in `FLASHZOO_VARIANTS`, that could not be loaded, and why."""
    _load_plugins()
    return dict(_plugin_errors)


def _load_plugins() -> None:
    # At the first question, not at import: a broken plug-in must not break `import flashzoo`.
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            spec = entry.load()
            if not isinstance(spec, Spec):
                raise TypeError(f"expected a flashzoo.Spec, got {type(spec).__name__}")
            # A module that registers itself when imported has done the work already.
            if _specs.get(spec.name) is not spec:
                register(spec)
        except Exception as error:  # any failure of a third party's code is reported, by explain and by list
            _plugin_errors[entry.name] = f"{type(error).__name__}: {error}"
    for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        try:
            load_file(path)
        except Exception as error:
            _plugin_errors[path] = f"{type(error).__name__}: {error}"


def load_file(path: str | Path) -> list[str]:
    """Import a file that registers versions, under its own name, so that `impl=f"{__name__}:attention"` resolves.

    Args:
        path: a Python file; its folder goes on `sys.path`.

    Returns:
        The names it registered, now or earlier.

    Raises:
        ValueError: there is no such file, its name is another module's, or it registers nothing.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"expected a Python file, got {str(path)!r}, which is not there")
    before = set(_specs)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise ValueError(
            f"{path.name} can't be imported as {path.stem!r}: that name is {module.__file__ or 'a built-in module'}; rename it"
        )
    added = [name for name, spec in _specs.items() if name not in before or spec.impl.partition(":")[0] == path.stem]
    if not added:
        raise ValueError(f"{path} registered no version: expected it to call flashzoo.register(flashzoo.Spec(...))")
    return added


@contextmanager
def use(version: str) -> Iterator[None]:
    """Within the block, calls that name no version use this one.

    Raises:
        ValueError: no version has that name.
    """
    _known(version, "use: version")
    token = _chosen.set(version)
    try:
        yield
    finally:
        _chosen.reset(token)


def requested(version: str) -> tuple[str, str]:
    """The version that a call asks for, and who asked: argument, then context manager, then environment, then auto."""
    if version != "auto":
        return version, "the argument version="
    chosen = _chosen.get()
    if chosen is not None:
        return chosen, "the context manager flashzoo.use()"
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return chosen, f"the environment variable {ENVIRONMENT}"
    return "auto", "the default"


def _known(version: object, what: str) -> None:
    _load_plugins()
    if version != "auto" and version not in _specs:
        raise ValueError(f"{what} must be 'auto' or one of {', '.join(_specs)}, got {version!r}")


@dataclass(frozen=True)
class Choice:
    """Who answers a problem.

    Attributes:
        forward: the version that runs.
        backward: the version that lends its backward pass (`Spec.backward_impl`), where `forward` has none for the problem.
    """

    forward: Spec
    backward: Spec | None = None

    def __str__(self) -> str:
        return self.forward.name if self.backward is None else f"{self.forward.name} forward, {self.backward.name} backward"


@remembered
def choose(problem: Problem, version: str = "auto") -> Choice:
    """Who takes the problem; under "auto" the backward pass may be another version's.

    Raises:
        ValueError: no version has that name.
        UnsupportedError: the named version can't take the problem, or under "auto" none can.
    """
    _known(version, "version")
    if version == "auto":
        candidates = [spec for spec in _specs.values() if problem.device in spec.auto]
        for spec in candidates:
            if not spec.unsupported(problem):
                return Choice(spec)
            if problem.grad and not spec.unsupported(problem.forward) and (lender := _lender(problem)):
                return Choice(spec, lender)
        raise UnsupportedError(f"no version takes {problem}\n{_reasons(problem, candidates)}")
    spec = _specs[version]
    if spec.unsupported(problem):
        able = [s.name for s in _specs.values() if not s.unsupported(problem)]
        would = f"versions that would: {', '.join(able)}" if able else "no registered version would"
        raise UnsupportedError(f"version {version!r} can't take {problem}\n{_reasons(problem, [spec])}\n{would}")
    return Choice(spec)


def resolve(problem: Problem, version: str = "auto") -> Spec:
    """The version whose forward pass answers: `choose(...).forward`, which also says whose backward pass."""
    return choose(problem, version).forward


def _lender(problem: Problem) -> Spec | None:
    lenders = (spec for spec in _specs.values() if spec.backward_impl is not None and problem.device in spec.auto)
    return next((spec for spec in lenders if not spec.unsupported(problem)), None)


def _reasons(problem: Problem, specs: list[Spec]) -> str:
    return "\n".join(f"  {spec.name}: {reason}" for spec in specs for reason in spec.unsupported(problem))


@remembered
def implementation(spec: Spec) -> Callable:
    """The function behind `spec.impl`, imported on first use."""
    return _imported(spec.impl)


def lent(spec: Spec) -> Callable:
    """The function behind `spec.backward_impl`, imported on first use."""
    if spec.backward_impl is None:
        raise ValueError(f"version {spec.name!r} lends no backward pass")
    return _imported(spec.backward_impl)


def _imported(impl: str) -> Callable:
    module, _, name = impl.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Verdict:
    """One version's answer to a problem: its reasons against, and what it does silently where it takes it.

    The version that is chosen for the forward pass alone has both: why its own backward pass is not taken, and its notes.
    """

    name: str
    title: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Who answers a call and why; prints as a table.

    Attributes:
        problem: what was asked.
        wanted: the version that was asked for, or "auto".
        chosen: name of the version that runs, or None where none can.
        by: who asked for it: argument, context manager, environment or default.
        verdicts: one for each registered version, in `auto` order.
        backward: name of the version that lends its backward pass to the chosen one, None where that has its own.
    """

    problem: Problem
    wanted: str
    chosen: str | None
    by: str
    verdicts: tuple[Verdict, ...]
    backward: str | None = None

    def __str__(self) -> str:
        width = max((len(verdict.name) for verdict in self.verdicts), default=0)
        if self.chosen:
            who = f"{self.chosen} takes" if self.backward is None else f"{self.chosen} forward, {self.backward} backward take"
            lines = [f"{who} {self.problem}, by {self.by}"]
        else:
            nobody_takes = "no version takes" if self.wanted == "auto" else f"{self.wanted} can't take"
            lines = [f"{nobody_takes} {self.problem}"]
        for verdict in self.verdicts:
            mark, status = self._status(verdict)
            lines.append(f"{mark} {verdict.name:<{width}}  {verdict.title}: {status}")
            lines += [f"  {'':<{width}}    - {line}" for line in (*verdict.reasons, *verdict.notes)]
        return "\n".join(lines)

    def _status(self, verdict: Verdict) -> tuple[str, str]:
        if verdict.name == self.chosen:
            return "*", "chosen" if self.backward is None else "chosen for the forward pass"
        if verdict.name == self.backward:
            return "*", "chosen for the backward pass"
        return (" ", "can't") if verdict.reasons else (" ", "could")


def _verdict(spec: Spec, problem: Problem, choice: Choice | None) -> Verdict:
    reasons = spec.unsupported(problem)
    # Notes may take for granted that the version takes the problem.
    taken = problem if not reasons else problem.forward if choice is not None and spec is choice.forward else None
    return Verdict(spec.name, spec.title, tuple(reasons), () if taken is None else tuple(_notes(spec, taken)))


def _notes(spec: Spec, problem: Problem) -> list[str]:
    faults = [f"known fault: {sentence}" for device, _, sentence in spec.faults if device == problem.device]
    return [*(spec.notes(problem) if spec.notes else []), *dict.fromkeys(faults)]


def explain_problem(problem: Problem, version: str = "auto") -> Explanation:
    """Who answers the problem, every reason against the others, and what is done silently. Nothing is run."""
    wanted, by = requested(version)
    _known(wanted, "version")
    try:
        choice = choose(problem, wanted)
    except UnsupportedError:
        choice = None
    verdicts = tuple(_verdict(spec, problem, choice) for spec in _specs.values())
    chosen, lender = (choice.forward.name, choice.backward) if choice else (None, None)
    return Explanation(problem, wanted, chosen, by, verdicts, lender.name if lender else None)
