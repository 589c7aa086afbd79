"""Which version answers a call: `register`, `versions`, `choose`, `explain_problem`. Standard library only.

The order of registration is the order of `auto`, but for versions that leave a problem to others (`Spec.leaves`), which
come last: the first with no objection is taken, or one that objects to the backward pass alone where another has a
fallback backward. An explicit name never falls back: it runs, backward pass
included, or raises with its reasons and with the versions that would do.

All of it may be called from any thread. What is registered is a `Zoo`, which never changes: another takes its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import RLock
from typing import TypeVar

from flashzoo.call.problem import Problem
from flashzoo.spec import Spec, function_at

ENTRY_POINTS = "flashzoo.versions"
ENVIRONMENT = "FLASHZOO_VERSION"
FILES = "FLASHZOO_VARIANTS"
"""Environment variable with files that register versions, joined as in PATH: plug-ins without a package."""

ARGUMENT = "the argument version="
"""Who asks for a version where a call does so itself."""

Answer = TypeVar("Answer", bound=Callable)


@dataclass(frozen=True, eq=False)
class Zoo:
    """What is registered at one moment. An answer that depends on it takes it as an argument,
    so none is remembered for another.

    Attributes:
        specs: the versions by name, in `auto` order.
        broken: the entry points in the group `flashzoo.versions`, and files in `FLASHZOO_VARIANTS`, that could not be
            loaded, and why.
    """

    specs: Mapping[str, Spec] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each plug-in that could not be loaded."""
        return tuple(f"plug-in {name!r} could not be loaded: {error}" for name, error in self.broken.items())


_zoo = Zoo()
_changing = RLock()
_caches: list[Callable[[], None]] = []
_of_files: dict[Path, list[str]] = {}
"""Names that a file has registered."""
_plugins = "unread"  # then "being read", then "read"
# Not the lock of `_changing`: who imports a plug-in in another thread holds Python's lock of that import
# when it registers.
_reading = RLock()
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
        TypeError: it is no `Spec`.
        ValueError: the name is taken, is "auto", or `before` is unknown.
    """
    if not isinstance(spec, Spec):
        raise TypeError(f"register: spec must be a flashzoo.Spec, got {spec!r}")
    if spec.name == "auto" or not spec.name.isidentifier():
        raise ValueError(f"register: spec.name must be an identifier other than 'auto', got {spec.name!r}")
    with _changing:
        specs = dict(_zoo.specs)
        if spec.name in specs:
            raise ValueError(
                f"register: the name {spec.name!r} is taken by {specs[spec.name].impl}; unregister it first"
            )
        if before is not None and before not in specs:
            raise ValueError(f"register: before must be one of {', '.join(specs)}, got {before!r}")
        order = list(specs.values())
        order.insert(len(order) if before is None else list(specs).index(before), spec)
        _change(specs={s.name: s for s in order})
    return spec


def unregister(name: str) -> None:
    """Remove a version. Raises ValueError where no version has that name."""
    with _changing:
        specs = dict(_zoo.specs)
        if name not in specs:
            raise ValueError(f"unregister: name must be one of {', '.join(specs)}, got {name!r}")
        del specs[name]
        _change(specs=specs)


def _change(**fields: Mapping) -> None:
    global _zoo
    with _changing:
        _zoo = replace(_zoo, **fields)
        _forget()


def remembered(function: Answer) -> Answer:
    """`functools.lru_cache`, emptied when a version is registered or unregistered; what depends on that takes a `Zoo`.

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
    return dict(current().specs)


def current() -> Zoo:
    """What is registered now. The first question loads the plug-ins,
    and whoever asks meanwhile in another thread waits."""
    if _plugins != "read":
        _read_plugins()
    return _zoo


def _read_plugins() -> None:
    # At the first question, not at import: a broken plug-in must not break `import flashzoo`.
    global _plugins
    with _reading:
        # read by another thread meanwhile; or it is a plug-in that asks, and sees what came before it
        if _plugins != "unread":
            return
        _plugins = "being read"
        try:
            for entry in entry_points(group=ENTRY_POINTS):
                _attempt(entry.name, lambda entry=entry: _load_entry(entry))
            for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
                _attempt(path, lambda path=path: load_file(path))
            _plugins = "read"
        finally:
            if _plugins != "read":  # interrupted: the next question starts anew
                _plugins = "unread"


def _attempt(name: str, load: Callable[[], object]) -> None:
    try:
        load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # whatever a third party's code does, sys.exit() too, is told by explain, by list and by errors
        _change(broken={**_zoo.broken, name: f"{type(error).__name__}: {error}"})


def _load_entry(entry: EntryPoint) -> None:
    spec = entry.load()
    if not isinstance(spec, Spec):
        raise TypeError(f"expected a flashzoo.Spec, got {type(spec).__name__}")
    # A module that registers itself when imported has done the work already.
    if _zoo.specs.get(spec.name) is not spec:
        register(spec)


def load_file(path: str | Path) -> list[str]:
    """Import a file that registers versions, under its own name, so that `impl=f"{__name__}:attention"` resolves.

    Args:
        path: a Python file; its folder goes on `sys.path`.

    Returns:
        The names it registered, now or earlier.

    Raises:
        ValueError: there is no such file, it is none of Python's, its name is another module's, or it registers
            nothing.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"expected a Python file, got {str(path)!r}, which is not there")
    if path.suffix != ".py":
        raise ValueError(f"expected a Python file, whose name ends with .py, got {str(path)!r}")
    before = set(_zoo.specs)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise ValueError(
            f"{path.name} can't be imported as {path.stem!r}: that name is {module.__file__ or 'a built-in module'}; "
            "rename it"
        )
    with _changing:
        _of_files[path] = [*_of_files.get(path, ()), *(name for name in _zoo.specs if name not in before)]
        of_file = _of_files[path]
    added = [name for name, spec in _zoo.specs.items() if name in of_file or spec.impl.partition(":")[0] == path.stem]
    if not added:
        raise ValueError(f"{path} registered no version: expected it to call flashzoo.register(flashzoo.Spec(...))")
    return added


@contextmanager
def use(version: str) -> Iterator[None]:
    """Within the block, calls that name no version use this one.

    It holds for the block alone: for what it calls in the same thread, and for the asyncio tasks that it starts. A
    thread that it starts chooses anew (`threading.Thread`, a pool's; `contextvars.copy_context().run` takes the choice
    along), and a thread that runs beside it is not touched. So what a backward pass calls again, as activation
    checkpointing does, may not be under it: after the block it is not, and on a GPU it runs in a thread of torch's.
    There give `version=`, or set the environment variable, which holds for the whole process.

    Raises:
        ValueError: no version has that name.
    """
    check_known(version, "use: version")
    token = _chosen.set(version)
    try:
        yield
    finally:
        _chosen.reset(token)


def requested(version: str) -> tuple[str, str]:
    """The version that a call asks for, and who asked: argument, then context manager, then environment, then auto."""
    if not isinstance(version, str):
        check_known(version)
    if version != "auto":
        return version, ARGUMENT
    chosen = _chosen.get()
    if chosen is not None:
        return chosen, "the context manager flashzoo.use()"
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return chosen, f"the environment variable {ENVIRONMENT}"
    return "auto", "the default"


def check_known(version: object, what: str = "version", zoo: Zoo | None = None) -> None:
    """ValueError where no version has that name; what is how the text begins."""
    zoo = zoo or current()
    if isinstance(version, str) and (version == "auto" or version in zoo.specs):
        return
    raise ValueError(
        "\n".join((f"{what} must be 'auto' or one of {', '.join(zoo.specs)}, got {version!r}", *zoo.missing))
    )


def _asked_by(by: str) -> str:
    """Who named a version, to be put behind its name; nothing where the call itself did."""
    return "" if by == ARGUMENT else f", by {by},"


@dataclass(frozen=True)
class Choice:
    """Who answers a problem.

    Attributes:
        forward: the version that runs.
        backward: the version whose fallback backward runs (`Spec.backward_impl`),
            where `forward` has none for the problem.
    """

    forward: Spec
    backward: Spec | None = None

    def __str__(self) -> str:
        return (
            self.forward.name
            if self.backward is None
            else f"{self.forward.name} forward, {self.backward.name} backward"
        )


def choose(problem: Problem, version: str = "auto", by: str = ARGUMENT, zoo: Zoo | None = None) -> Choice:
    """Who takes the problem; under "auto" the backward pass may be another version's.

    Args:
        problem: what is asked.
        version: the name that is asked for, or "auto".
        by: who asks for it, for errors; `requested` gives both.
        zoo: of whom to choose; of all that are registered now where None.

    Raises:
        ValueError: no version has that name.
        UnsupportedError: the named version can't take the problem, or under "auto" none can.
    """
    return _choose(problem, version, by, zoo or current())


@remembered
def _choose(problem: Problem, version: str, by: str, zoo: Zoo) -> Choice:
    check_known(version, f"version{_asked_by(by)}", zoo)

    def objections(spec: Spec) -> list[str]:
        return spec.unsupported(problem)

    def leaves(spec: Spec) -> bool:
        return spec.leaves is not None and not spec.unsupported(problem.forward) and bool(spec.leaves(problem))

    if version == "auto":
        candidates = sorted([spec for spec in zoo.specs.values() if problem.device in spec.auto], key=leaves)
        for spec in candidates:
            if not objections(spec):
                return Choice(spec)
            if problem.grad and not spec.unsupported(problem.forward) and (fallback := _fallback(problem, zoo)):
                return Choice(spec, fallback)
        raise UnsupportedError(f"no version takes {problem}\n{_listed(candidates, objections)}")
    spec = zoo.specs[version]
    if objections(spec):
        raise UnsupportedError(
            f"version {version!r}{_asked_by(by)} can't take {problem}\n{_instead(spec, objections, zoo)}"
        )
    return Choice(spec)


def choose_backward(problem: Problem, version: str, by: str, zoo: Zoo) -> Spec:
    """Whose backward pass alone takes the problem; arguments and errors as of `choose`, implementations that would
    do are imported."""
    check_known(version, f"version{_asked_by(by)}", zoo)

    def objections(spec: Spec) -> list[str]:
        return spec.unsupported(problem) or (
            [] if backward_of(spec) else ["has no backward pass apart from its forward pass"]
        )

    if version == "auto":
        candidates = [spec for spec in zoo.specs.values() if problem.device in spec.auto]
        for spec in candidates:
            if not objections(spec):
                return spec
        raise UnsupportedError(f"no version has a backward pass for {problem}\n{_listed(candidates, objections)}")
    spec = zoo.specs[version]
    if objections(spec):
        raise UnsupportedError(
            f"version {version!r}{_asked_by(by)} has no backward pass for {problem}\n{_instead(spec, objections, zoo)}"
        )
    return spec


def _fallback(problem: Problem, zoo: Zoo) -> Spec | None:
    fallbacks = (spec for spec in zoo.specs.values() if spec.backward_impl is not None and problem.device in spec.auto)
    return next((spec for spec in fallbacks if not spec.unsupported(problem)), None)


def _listed(specs: list[Spec], objections: Callable[[Spec], list[str]]) -> str:
    return "\n".join(f"  {spec.name}: {reason}" for spec in specs for reason in objections(spec))


def _instead(spec: Spec, objections: Callable[[Spec], list[str]], zoo: Zoo) -> str:
    """What one version has against a problem, and who would take it."""
    able = [other.name for other in zoo.specs.values() if not objections(other)]
    would = f"versions that would: {', '.join(able)}" if able else "no registered version would"
    return f"{_listed([spec], objections)}\n{would}"


@remembered
def implementation(spec: Spec) -> Callable:
    """The function behind `spec.impl`, imported on first use."""
    return _imported(spec, spec.impl)


def backward_of(spec: Spec) -> Callable | None:
    """A version's backward pass alone, which starts from an out and an LSE of whoever;
    None where it has none apart from its forward."""
    found = getattr(implementation(spec), "backward", None)
    return fallback_backward(spec) if found is None and spec.backward_impl is not None else found


def fallback_backward(spec: Spec) -> Callable:
    """The function behind `spec.backward_impl`, imported on first use."""
    if spec.backward_impl is None:
        raise ValueError(f"version {spec.name!r} has no fallback backward")
    return _imported(spec, spec.backward_impl)


def in_16_bits(spec: Spec) -> Callable | None:
    """The implementation behind `spec.backward_16`, imported on first use; None where the version has none."""
    return None if spec.backward_16 is None else _imported(spec, spec.backward_16)


def _imported(spec: Spec, impl: str) -> Callable:
    try:
        function = function_at(impl)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"version {spec.name!r}: expected a function at {impl!r}, got {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ImportError(f"version {spec.name!r}: expected a function at {impl!r}, got {type(function).__name__}")
    return function


@dataclass(frozen=True)
class Verdict:
    """One version's answer to a problem: its reasons against, and what it does silently where it takes it.

    The version that is chosen for the forward pass alone has both:
    why its own backward pass is not taken, and its notes.
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
        backward: name of the version whose fallback backward the chosen one takes, None where that has its own.
        missing: a sentence for each plug-in that could not be loaded.
    """

    problem: Problem
    wanted: str
    chosen: str | None
    by: str
    verdicts: tuple[Verdict, ...]
    backward: str | None = None
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max((len(verdict.name) for verdict in self.verdicts), default=0)
        if self.chosen:
            who = (
                f"{self.chosen} takes"
                if self.backward is None
                else f"{self.chosen} forward, {self.backward} backward take"
            )
            lines = [f"{who} {self.problem}, by {self.by}"]
        else:
            nobody_takes = (
                "no version takes" if self.wanted == "auto" else f"{self.wanted}{_asked_by(self.by)} can't take"
            )
            lines = [f"{nobody_takes} {self.problem}"]
        for verdict in self.verdicts:
            mark, status = self._status(verdict)
            lines.append(f"{mark} {verdict.name:<{width}}  {verdict.title}: {status}")
            lines += [f"  {'':<{width}}    - {line}" for line in (*verdict.reasons, *verdict.notes)]
        return "\n".join([*lines, *self.missing])

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
    left = [
        f"auto leaves it to others that can: {sentence}" for sentence in (spec.leaves(problem) if spec.leaves else [])
    ]
    return [*(spec.notes(problem) if spec.notes else []), *left, *dict.fromkeys(faults)]


def explain_problem(problem: Problem, version: str = "auto") -> Explanation:
    """Who answers the problem, every reason against the others, and what is done silently. Nothing is run."""
    zoo = current()
    wanted, by = requested(version)
    try:
        choice = choose(problem, wanted, by, zoo)
    except UnsupportedError:
        choice = None
    verdicts = tuple(_verdict(spec, problem, choice) for spec in zoo.specs.values())
    chosen, fallback = (choice.forward.name, choice.backward) if choice else (None, None)
    return Explanation(problem, wanted, chosen, by, verdicts, fallback.name if fallback else None, zoo.missing)
