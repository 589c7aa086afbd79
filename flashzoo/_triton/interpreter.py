"""Run a Triton kernel in Triton's interpreter, in a process that did not set TRITON_INTERPRET before importing Triton.

The interpreter stands in for `triton.language` while a kernel runs. Triton builds kernels for it only under that
environment variable, which decides at import; here the same is done for the time of one call, and undone.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

# The stand-in replaces functions of the module triton.language, for every thread.
_lock = threading.Lock()


def interpret(
    kernel: JITFunction, grid: tuple[int, int, int], arguments: tuple[Any, ...], constexprs: dict[str, Any]
) -> None:
    """Run every program of the grid in turn, on CPU tensors."""
    with _lock, _interpreting():
        interpreter.InterpretedFunction(kernel.fn)[grid](*arguments, **constexprs)


@contextmanager
def _interpreting() -> Iterator[None]:
    # Triton restores what the kernel's own module sees, but not what the functions it calls see (tl.sum and others are
    # JIT functions with globals of their own). So this scope is opened around it, over all of triton.language.
    sees_all = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    patch_tensor, compiled_call, np_dtype, convert_float = (
        interpreter._patch_lang_tensor,
        JITFunction.__call__,
        interpreter._get_np_dtype,
        interpreter._convert_float,
    )

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Triton 3.6 takes int() of an array of one element, which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    # Integers wrap as a GPU's do: an assertion at each sum and product costs a third of the time.
    builder, sanitized = interpreter.interpreter_builder, interpreter.interpreter_builder.options
    builder.options = replace(sanitized, sanitize_overflow=False)
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter._get_np_dtype = _np_dtype  # Triton's own makes a table of all dtypes at each operation
    interpreter._convert_float = lambda x, of, to, how: (
        _from_e4m3(x, to) if of == tl.float8e4nv else convert_float(x, of, to, how)
    )
    scope = interpreter._patch_lang(sees_all)
    # Triton's own way there would patch the language once more for each call of each function: a third of the time.
    JITFunction.__call__ = lambda self, *args, **kwargs: _rewritten(self.fn)(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        interpreter._patch_lang_tensor, JITFunction.__call__, interpreter._get_np_dtype = (
            patch_tensor,
            compiled_call,
            np_dtype,
        )
        interpreter._convert_float = convert_float
        builder.options = sanitized
        scope.restore()


_np_dtype_of_scalar = cache(interpreter._get_np_dtype)


def _np_dtype(dtype: Any) -> Any:
    scalar = dtype.scalar
    return _np_dtype_of_scalar(tl.uint64 if scalar.is_ptr() else scalar)


@cache
def _e4m3() -> Any:
    """Every e4m3 number by its bits; not a constant, as the first call, which imports this, may be under a transform of
    `torch.func` or another default device."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float().numpy()


def _from_e4m3(x: Any, dtype: Any) -> Any:
    """e4m3's bits as fp16 or fp32: Triton's own way takes NaN for 480."""
    return _e4m3()[x].astype(_np_dtype(dtype))


@cache
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    return interpreter.InterpretedFunction(function).rewrite()
