"""The kernels of v3: which program compiles each kind, and which arguments a launch of it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from flashzoo._cute.arguments import FLOAT, INT, Arguments, Parameter, Pointer, Record, Tma
from flashzoo._cute.cache import cached
from flashzoo._cute.compile import compile_for
from flashzoo._cute.driver import Function
from flashzoo._cute.scoring import parameters_of
from flashzoo.v3.traits import (
    Kernel,
    KernelBackward,
    KernelBackwardAllKeys,
    KernelBackwardByHead,
    KernelBackwardPacked,
    KernelBackwardPairs,
    KernelBackwardSparse,
    KernelFp8,
    KernelFp8Packed,
    KernelPacked,
    KernelSparse,
)

ARCH = "sm_90a"
PACKED = (KernelPacked, KernelFp8Packed, KernelBackwardPacked)

PARAMS: dict[str, Parameter] = {
    **dict.fromkeys(("seqlen_q", "seqlen_k", "heads", "group", "group_kv", "splits", "query_splits", "pack_gqa"), INT),
    **dict.fromkeys(("window_left", "window_right", "blocks", "batch_heads", "l2_swizzle", "wave"), INT),
    "counter": Pointer("i32"),
}
"""Fields of `params.Params`."""

LISTS: dict[str, Parameter] = {
    **dict.fromkeys(("list_batch", "list_head", "width", "bit_blocks"), INT),
    **dict.fromkeys(("order", "counts", "full", "indices", "bit_index"), Pointer("i32")),
    "bits": Pointer("u32", align=16),
}
"""Those that `sparse.ParamsSparse` has more, of a block mask."""

TABLE: dict[str, Parameter] = {"tiles": Pointer("i32", align=16)}
"""Those that `packed.ParamsPacked` has more."""

WORKSPACE: dict[str, Parameter] = {
    **dict.fromkeys(("lse", "delta", "dq"), Pointer("fp32")),
    "dq_semaphore": Pointer("i32"),
    **dict.fromkeys(("dk_parts", "dv_parts"), Pointer("fp32", align=16)),
}
"""Fields of `backward.Workspace`."""

DESCALE: dict[str, Parameter] = {"values": Pointer("fp32"), **dict.fromkeys(("batch", "head", "block"), INT)}
"""Fields of `fp8.Descale`."""


def _params(kernel: Kernel | KernelBackward) -> Record:
    if isinstance(kernel, (KernelSparse, KernelBackwardSparse)):
        return Record("flashzoo.v3.sparse:ParamsSparse", {**PARAMS, **LISTS}, (kernel,))
    if isinstance(kernel, PACKED):
        return Record("flashzoo.v3.packed:ParamsPacked", {**PARAMS, **TABLE}, (kernel,))
    return Record("flashzoo._cute.hopper.params:Params", PARAMS, (kernel,))


def _any_size(kernel: Kernel | KernelBackward) -> tuple[None, ...]:
    """Of a tensor's dimensions but the head dim."""
    return (None,) * (4 if isinstance(kernel, PACKED) else 3)


def _forward(kernel: Kernel, **scaling: Parameter) -> Arguments:
    any_size = _any_size(kernel)
    transposed = isinstance(kernel, KernelFp8) and kernel.transposed
    return Arguments(
        q=Tma(kernel.dtype, (kernel.width, *any_size)),
        k=Tma(kernel.dtype, (kernel.width, *any_size)),
        v=Tma(kernel.dtype, (None, None, kernel.width_v, None) if transposed else (kernel.width_v, *any_size)),
        out=Tma(kernel.out_dtype, (kernel.width_v, *any_size)),
        lse=Pointer("fp32"),
        params=_params(kernel),
        **scaling,
        **({"sinks": Pointer("fp32")} if kernel.sinks else {}),
        **_read(kernel),
    )


def _read(kernel: Kernel | KernelBackward) -> dict[str, Parameter]:
    """The tensors that a function on scores reads, where there is one."""
    parameters = parameters_of(kernel.scoring)
    return {"tensors": Record("", parameters)} if parameters else {}


def _forward_fp8(kernel: KernelFp8) -> Arguments:
    descales = {name: Record("flashzoo.v3.fp8:Descale", DESCALE, prefix=f"{name}_") for name in ("q", "k", "v")}
    scaling = {"scale_log2": FLOAT, **descales, "q_group": INT}
    return _forward(kernel, scaling=Record("flashzoo.v3.fp8:Scaling", scaling))


def _backward(kernel: KernelBackward) -> Arguments:
    of_q, of_v = (Tma(kernel.dtype, (width, *_any_size(kernel))) for width in (kernel.width, kernel.width_v))
    of_dq = {} if kernel.dq_sums else {"dq_rounded": of_q}
    return Arguments(
        operands=Record("", {"q": of_q, "k": of_q, "v": of_v, "dout": of_v, "dk": of_q, "dv": of_v, **of_dq}),
        workspace=Record("flashzoo.v3.backward:Workspace", WORKSPACE),
        params=_params(kernel),
        scale_log2=FLOAT,
        scale=FLOAT,
        **_read(kernel),
    )


@dataclass(frozen=True)
class Program:
    """What compiles the kernels of a kind.

    Attributes:
        device: the CuTe DSL program, "module:class"; imported when a kernel is compiled. Empty where all tiles are cut
            by gradient.
        arguments: of a kernel, in the order of the program's `__call__`.
        by_gradient: the program where tiles are cut by gradient.
        halved: the program where scores are those of half of a block's queries.
    """

    device: str
    arguments: Callable[[Any], Arguments]
    by_gradient: str = ""
    halved: str = ""


PROGRAMS: dict[type[Kernel | KernelBackward], Program] = {
    Kernel: Program(
        "flashzoo.v3.forward:Forward",
        lambda kernel: _forward(kernel, scale_log2=FLOAT),
    ),
    KernelSparse: Program(
        "flashzoo.v3.sparse:ForwardSparse",
        lambda kernel: _forward(kernel, scale_log2=FLOAT),
    ),
    KernelPacked: Program(
        "flashzoo.v3.packed:ForwardPacked",
        lambda kernel: _forward(kernel, scale_log2=FLOAT),
    ),
    KernelFp8: Program("flashzoo.v3.fp8:ForwardFp8", _forward_fp8),
    KernelFp8Packed: Program("flashzoo.v3.packed:ForwardFp8Packed", _forward_fp8),
    KernelBackward: Program(
        "flashzoo.v3.backward:Backward",
        _backward,
        by_gradient="flashzoo.v3.backward_by_gradient:BackwardByGradient",
        halved="flashzoo.v3.backward_in_halves:BackwardInHalves",
    ),
    KernelBackwardAllKeys: Program(
        "flashzoo.v3.backward_all_keys:BackwardAllKeys",
        _backward,
        halved="flashzoo.v3.backward_all_keys:BackwardInHalvesAllKeys",
    ),
    KernelBackwardByHead: Program(
        "flashzoo.v3.backward_by_head:BackwardByHead",
        _backward,
        halved="flashzoo.v3.backward_by_head:BackwardInHalvesByHead",
    ),
    KernelBackwardPairs: Program(
        "flashzoo.v3.backward_pairs:BackwardPairs",
        _backward,
        by_gradient="flashzoo.v3.backward_pairs:BackwardByGradientPairs",
    ),
    KernelBackwardPacked: Program(
        "flashzoo.v3.packed:BackwardPacked",
        _backward,
        by_gradient="flashzoo.v3.packed:BackwardByGradientPacked",
        halved="flashzoo.v3.packed:BackwardInHalvesPacked",
    ),
    KernelBackwardSparse: Program(
        "flashzoo.v3.sparse_backward:BackwardSparse",
        _backward,
        by_gradient="flashzoo.v3.sparse_backward:BackwardByGradientSparse",
        halved="flashzoo.v3.sparse_backward:BackwardInHalvesSparse",
    ),
}


def arguments_of(kernel: Kernel | KernelBackward) -> Arguments:
    """What a launch of the kernel takes."""
    return PROGRAMS[type(kernel)].arguments(kernel)


def program(kernel: Kernel | KernelBackward) -> tuple[Any, tuple[Any, ...]]:
    """The CuTe DSL program of a kernel, and arguments to compile it with."""
    of_kind = PROGRAMS[type(kernel)]
    named = of_kind.device
    if isinstance(kernel, KernelBackward) and kernel.tiles.by_gradient:
        named = of_kind.by_gradient
    elif isinstance(kernel, KernelBackward) and kernel.tiles.halved:
        named = of_kind.halved
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)(kernel), arguments_of(kernel).examples()


@cache
def function_for(kernel: Kernel | KernelBackward) -> Function:
    """The kernel, from the cache on disk or compiled into it, and loaded."""
    image = cached((ARCH, repr(kernel)), Path(__file__).parent, lambda: compile_for(ARCH, *program(kernel)))
    return Function(image, kernel.threads, kernel.shared_bytes, arguments_of(kernel))
