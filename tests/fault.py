"""What a fault is that `mutants.py` puts into the code."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One replacement in one file.

    Attributes:
        file: its path in the repository.
        old: text that is there once, in the whole file or in what `within` names.
        new: what takes its place.
        within: a function or class, or a method as `Class.method`.
    """

    file: str
    old: str
    new: str
    within: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the replacement made. Raises ValueError where `old` is not there once."""
        begin, end = _extent(text, self.within) if self.within else (0, len(text))
        found = text.count(self.old, begin, end)
        if found != 1:
            raise ValueError(
                f"{self.file}: {self.old!r} must be {f'in {self.within}' if self.within else 'there'} once, "
                f"is {found} times"
            )
        at = text.index(self.old, begin)
        return text[:at] + self.new + text[at + len(self.old) :]


@lru_cache(maxsize=64)
def _extents(text: str) -> dict[str, tuple[int, int]]:
    """Where each function, class and method begins and ends."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside = [(f"{node.name}.{x.name}", x) for x in node.body if isinstance(x, ast.FunctionDef)]
            found |= {
                name: (starts[x.lineno - 1], starts[x.end_lineno or 0]) for name, x in ((node.name, node), *inside)
            }
    return found


def _extent(text: str, within: str) -> tuple[int, int]:
    extents = _extents(text)
    if within not in extents:
        raise ValueError(f"{within!r} is not there")
    return extents[within]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: `version/what_it_does`.
        why: what it is, in a line.
        changes: what makes it.
        seen_by: tests that see it, as pytest's -k takes them; tried first, for speed,
            of those that `mutants.py` runs of the version.
        gpu: whether it needs a Hopper GPU. What does not is run by Triton's interpreter, or by torch, on the CPU.
        equivalent: why it changes no result, for one that is kept to show that.
    """

    name: str
    why: str
    changes: tuple[Change, ...]
    seen_by: str
    gpu: bool = False
    equivalent: str = ""

    @property
    def version(self) -> str:
        """What it is a fault of."""
        return self.name.partition("/")[0]

    def changed(self, root: Path) -> dict[str, str]:
        """The new text of each file that it changes. Raises ValueError where it does not apply,
        or leaves what is no Python."""
        texts: dict[str, str] = {}
        for change in self.changes:
            texts[change.file] = change.applied(texts.get(change.file) or (root / change.file).read_text())
        for file, text in texts.items():
            try:
                ast.parse(text)
            except SyntaxError as error:
                raise ValueError(f"{file}: {error}") from error
        return texts


def fault(name: str, why: str, file: str, old: str, new: str, seen_by: str, within: str = "", **more) -> Fault:
    """One replacement in one file."""
    return Fault(name, why, (Change(file, old, new, within),), seen_by, **more)
