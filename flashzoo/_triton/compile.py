"""Compile a launch for any GPU, on a machine with none, and read what the compiler made of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashzoo._triton.launch import Launch

# Shared memory of one block in bytes, from the CUDA programming guide's table of compute capabilities.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: 32-bit registers of a thread.
        stack: bytes of local memory of a thread.
        spills: instructions that store to or load from local memory.
        shared: bytes of shared memory of a block.
        opcodes: how often each machine instruction occurs.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    opcodes: dict[str, int]


def resources(launch: Launch, types: tuple[str, ...], floats: int, arch: int) -> Resources:
    """Compile for sm_`arch` and read registers, spills, shared memory and opcodes.

    Args:
        launch: what would be launched.
        types: Triton's element type ("bf16", "fp32", ...) of each tensor parameter.
        floats: how many float parameters follow the tensors.
        arch: compute capability, 90 for Hopper.

    Raises:
        RuntimeError: the compiler rejects the kernel.
    """
    tiles = launch.tma_tiles or (None,) * len(types)
    tensors = [f"tensordesc<{kind}{list(tile)}>" if tile else f"*{kind}" for kind, tile in zip(types, tiles, strict=True)]
    kinds = [*tensors, *["fp32"] * floats, *["i32"] * len(launch.scalars), *["constexpr"] * len(launch.constexprs)]
    constexprs = dict(launch.constexprs)
    divisible = [i for i, tile in enumerate(tiles) if not tile]
    names = launch.kernel.arg_names
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
    return _read(compiled.asm["cubin"], compiled.metadata.shared)


def _read(cubin: bytes, shared: int) -> Resources:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        sass = _run(tools / "nvdisasm", "-c", file.name)
    registers, stack = (int(x) for x in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    opcodes: dict[str, int] = {}
    for opcode in re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass, re.MULTILINE):
        opcodes[opcode] = opcodes.get(opcode, 0) + 1
    return Resources(registers, stack, opcodes.get("STL", 0) + opcodes.get("LDL", 0), shared, opcodes)


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
