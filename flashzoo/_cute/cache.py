"""Compiled kernels on disk, so that a process compiles nothing that one before it has compiled.

Where: the folder that the environment variable FLASHZOO_CACHE_DIR names, or `flashzoo` in the user's cache folder
(XDG_CACHE_HOME, ~/.cache). FLASHZOO_CACHE_DIR=off turns it off.

A file's name is a digest of everything that the kernel depends on: what it is specialised for, the sources it is made
of, the release of CuTe DSL. Its content begins with a digest of the rest, so that a damaged file is compiled anew. It
appears under its name only when it is complete, so that processes can share the folder without locks. Nothing removes
what an older release has left; the folder may be deleted at any time.

The digest is of sources on disk, the kernel of those that the process has loaded. So a process under which flashzoo was
upgraded or edited goes without the folder: it would leave old kernels there under new names, or take new ones for its
own.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

from flashzoo import __imported__

ENVIRONMENT = "FLASHZOO_CACHE_DIR"

FACTS = tuple(
    Path(__file__).parents[1] / f"{name}.py"
    for name in (
        *("call/problem", "dtypes", "gpu", "integers"),
        *(f"scores/{name}" for name in ("factors", "program", "traits", "walk")),
    )
)
"""What kernels are made of besides the files of their version and of this folder."""

_FORMAT = "1"
_DIGEST_BYTES = 32
# One thread at a time builds: CuTe DSL can do no other, and the next may find in the folder what it came for.
_lock = threading.Lock()


@dataclass(frozen=True)
class Image:
    """A compiled kernel: its symbol, and its machine code."""

    name: str
    cubin: bytes


def cached(identity: tuple[str, ...], sources: Path, build: Callable[[], Image]) -> Image:
    """The image from the disk, or built and written there; built alone where the sources have changed since flashzoo
    was imported.

    Args:
        identity: what the kernel is specialised for.
        sources: the folder whose Python files, and its folders', say what is built,
            with those of this folder and `FACTS`.
        build: makes the image.
    """
    folder = _folder()
    with _lock:
        made_of = (sources, Path(__file__).parent, *FACTS)
        if folder is None or not all(map(_is_as_loaded, made_of)):
            return build()
        parts = (_FORMAT, version("nvidia-cutlass-dsl"), *map(_digest_of, made_of))
        path = folder / f"{hashlib.sha256(repr((*parts, *identity)).encode()).hexdigest()}.cubin"
        image = _read(path)
        if image is None:
            image = build()
            if all(map(_is_as_loaded, made_of)):  # still: it may have been this that loaded some of them
                _write(path, image)
        return image


def _folder() -> Path | None:
    given = os.environ.get(ENVIRONMENT)
    if given == "off":
        return None
    try:
        return (
            Path(given).expanduser()
            if given
            else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flashzoo"
        )
    except RuntimeError:  # a user without a home
        return None


def _is_as_loaded(sources: Path) -> bool:
    """Whether no file has changed, or come to where it is, since flashzoo was imported. By the time that no installer
    sets, as it may that of modification."""
    return all(path.stat().st_ctime_ns <= __imported__ for path in _files_of(sources))


def _files_of(sources: Path) -> list[Path]:
    return [sources] if sources.is_file() else sorted(sources.rglob("*.py"))


@lru_cache
def _digest_of(sources: Path) -> str:
    digest = hashlib.sha256()
    for path in _files_of(sources):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _read(path: Path) -> Image | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    name, _, cubin = rest.partition(b"\n")
    if hashlib.sha256(rest).digest() != digest or not name.isascii() or not cubin:
        return None
    return Image(name.decode(), cubin)


def _write(path: Path, image: Image) -> None:
    rest = image.name.encode() + b"\n" + image.cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{uuid4().hex}.tmp")
        try:
            unfinished.write_bytes(hashlib.sha256(rest).digest() + rest)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"flashzoo can't keep a compiled kernel in {path.parent} ({error}); "
            f"set {ENVIRONMENT} to a folder, or to off",
            stacklevel=2,
        )
