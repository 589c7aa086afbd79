"""Compile a launch for any GPU, on a machine with none, and read what the compiler made of it."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashzoo._sass import Resources, read
from flashzoo._triton.launch import Launch


def _parameter(kind: Any, tile: tuple[int, ...] | None) -> Any:
    """How Triton writes the type of a parameter that is a tensor, a tuple, or None."""
    if isinstance(kind, tuple):
        return tuple(f"*{part}" if isinstance(part, str) else "constexpr" if part == 1 else "i32" for part in kind)
    return "constexpr" if kind is None else f"tensordesc<{kind}{list(tile)}>" if tile else f"*{kind}"


def resources(
    launch: Launch, types: tuple[Any, ...], floats: int, arch: int, left_out: tuple[int, ...] = ()
) -> Resources:
    """Compile for sm_`arch` and read registers, spills, shared memory and opcodes.

    Args:
        launch: what would be launched.
        types: Triton's element type ("bf16", "fp32", ...) of each tensor parameter, None where None is passed; of a
            tuple as many, and its integers.
        floats: how many float parameters follow the tensors.
        arch: compute capability, 90 for Hopper.
        left_out: the numbers of the float parameters that None is passed for.

    Raises:
        RuntimeError: the compiler rejects the kernel.
    """
    tiles = launch.tma_tiles or (None,) * len(types)
    tensors = [_parameter(kind, tile) for kind, tile in zip(types, tiles, strict=True)]
    floating = ["constexpr" if i in left_out else "fp32" for i in range(floats)]
    kinds = [*tensors, *floating, *["i32"] * len(launch.scalars), *["constexpr"] * len(launch.constexprs)]
    names = launch.kernel.arg_names
    constexprs: dict[Any, Any] = {
        **launch.constexprs,
        **{name: None for name, kind in zip(names, types, strict=False) if kind is None},
        **{names[len(types) + i]: None for i in left_out},
    }
    divisible: list[tuple[int, ...]] = []
    for i, (tile, kind) in enumerate(zip(tiles, types, strict=True)):
        if isinstance(kind, tuple):
            divisible += [(i, j) for j, part in enumerate(kind) if isinstance(part, str) or (part % 16 == 0)]
            constexprs |= {(i, j): 1 for j, part in enumerate(kind) if part == 1}
        elif not tile and kind is not None:
            divisible.append((i,))
    # What Triton's own launch path sees in an integer: whether it is 1, and whether 16 divides it.
    for i, scalar in enumerate(launch.scalars, len(types) + floats):
        if names[i] in launch.kernel.do_not_specialize:
            continue
        if scalar == 1:
            kinds[i], constexprs[names[i]] = "constexpr", 1
        elif scalar % 16 == 0:
            divisible.append((i,))
    attributes = {path: [["tt.divisibility", 16]] for path in divisible}
    source = ASTSource(launch.kernel, dict(zip(names, kinds, strict=True)), constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    return read(compiled.asm["cubin"], compiled.metadata.shared)
