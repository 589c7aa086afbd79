"""The Hopper kernels of decode: what a launch of one takes, and where it comes from."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from flashzoo._cute.arguments import FLOAT, INT, Arguments, Pointer, Record, Tma
from flashzoo._cute.cache import cached
from flashzoo._cute.compile import compile_for
from flashzoo._cute.driver import Function
from flashzoo.decode.traits import Kernel, KernelE4m3, KernelLatent

ARCH = "sm_90a"

SIZES = (
    *(
        "seqlen_q",
        "seqlen_k",
        "heads",
        "group",
        "heads_of_tile",
        "queries_of_tile",
        "blocks",
        "batch_heads",
        "tiles",
        "splits",
        "least",
    ),
    *("page", "table_stride", "head_dim", "out_batch", "out_row", "out_head", "window_left", "window_right"),
)
"""Fields of `hopper_items.Params` that all launches of a problem have in common."""


DESCALE = {"values": Pointer("fp32"), **dict.fromkeys(("batch", "head", "block"), INT)}
"""Fields of `hopper_items.Descale`."""


def arguments_of(kernel: Kernel) -> Arguments:
    """What a launch of the kernel takes."""
    given = {"out": Pointer(kernel.out_dtype, align=16), "lse": Pointer("fp32"), "parts": Pointer("fp32", align=16)}
    given |= {
        "lse_parts": Pointer("fp32"),
        **dict.fromkeys(("used_k", "page_table"), Pointer("i32")),
        "sinks": Pointer("fp32"),
    }
    given |= dict.fromkeys(("arrived", "counter"), Pointer("i32"))
    q, kv = (Tma(dtype, (kernel.width, None, None, None)) for dtype in (kernel.dtype, kernel.dtype_kv))
    params, of = {**given, **dict.fromkeys(SIZES, INT), "scale_log2": FLOAT}, "Params"
    if isinstance(kernel, KernelE4m3):
        descales = {
            f"{x}_descale": Record("flashzoo.decode.hopper_items:Descale", DESCALE, prefix=f"{x}_descale_")
            for x in ("k", "v")
        }
        params, of = {**params, **descales}, "ParamsE4m3"
    return Arguments(q=q, k=kv, v=kv, params=Record(f"flashzoo.decode.hopper_items:{of}", params, (kernel,)))


def program(kernel: Kernel) -> tuple[Any, tuple[Any, ...]]:
    """The CuTe DSL program of a kernel, and arguments to compile it with."""
    if isinstance(kernel, KernelE4m3):
        made = import_module("flashzoo.decode.hopper_e4m3").DecodeE4m3(kernel)
    elif isinstance(kernel, KernelLatent):
        made = import_module("flashzoo.decode.hopper_latent").DecodeLatent(kernel)
    else:
        made = import_module("flashzoo.decode.hopper").Decode(kernel)
    return made, arguments_of(kernel).examples()


@cache
def function_for(kernel: Kernel) -> Function:
    """The kernel, from the cache on disk or compiled into it, and loaded."""
    image = cached((ARCH, repr(kernel)), Path(__file__).parent, lambda: compile_for(ARCH, *program(kernel)))
    return Function(image, kernel.threads, kernel.shared_bytes, arguments_of(kernel))
