"""Compile a launch for any GPU, on a machine with none, and read what the compiler made of it."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashzoo._sass import Resources, read
from flashzoo._triton.launch import Launch


def resources(launch: Launch, types: tuple[str | None, ...], floats: int, arch: int) -> Resources:
    """Compile for sm_`arch` and read registers, spills, shared memory and opcodes.

    Args:
        launch: what would be launched.
        types: Triton's element type ("bf16", "fp32", ...) of each tensor parameter, None where None is passed.
        floats: how many float parameters follow the tensors.
        arch: compute capability, 90 for Hopper.

    Raises:
        RuntimeError: the compiler rejects the kernel.
    """
    tiles = launch.tma_tiles or (None,) * len(types)
    tensors = [
        "constexpr" if kind is None else f"tensordesc<{kind}{list(tile)}>" if tile else f"*{kind}"
        for kind, tile in zip(types, tiles, strict=True)
    ]
    kinds = [*tensors, *["fp32"] * floats, *["i32"] * len(launch.scalars), *["constexpr"] * len(launch.constexprs)]
    names = launch.kernel.arg_names
    constexprs: dict[str, Any] = {
        **launch.constexprs,
        **{name: None for name, kind in zip(names, types, strict=False) if kind is None},
    }
    divisible = [i for i, (tile, kind) in enumerate(zip(tiles, types, strict=True)) if not tile and kind is not None]
    # What Triton's own launch path sees in an integer: whether it is 1, and whether 16 divides it.
    for i, scalar in enumerate(launch.scalars, len(types) + floats):
        if names[i] in launch.kernel.do_not_specialize:
            continue
        if scalar == 1:
            kinds[i], constexprs[names[i]] = "constexpr", 1
        elif scalar % 16 == 0:
            divisible.append(i)
    attributes = {(i,): [["tt.divisibility", 16]] for i in divisible}
    source = ASTSource(launch.kernel, dict(zip(names, kinds, strict=True)), constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    return read(compiled.asm["cubin"], compiled.metadata.shared)
