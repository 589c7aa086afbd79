"""Compile a CuTe DSL program for a GPU that need not be there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from flashzoo._cute.cache import Image


def compile_for(arch: str, program: Callable[..., Any], arguments: tuple[Any, ...]) -> Image:
    """The one kernel that a `@cute.jit` program launches, as machine code.

    Args:
        arch: such as "sm_90a".
        program, arguments: as `cute.compile` takes them.

    Only one thread at a time may compile, as `cached` ensures: CuTe DSL's state is the process's.
    """
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:  # what is kept is also written to a file
        compiled = cute.compile(program, *arguments, options=f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}")
    (name,) = compiled.kernel_info
    return Image(name, compiled.artifacts.CUBIN)
