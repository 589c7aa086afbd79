"""What a compiler made of a kernel, read from its machine code (SASS) on a machine that needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: 32-bit registers of a thread.
        stack: bytes of local memory of a thread.
        spills: instructions that store to or load from local memory.
        shared: bytes of shared memory of a block.
        opcodes: how often each machine instruction occurs.
        code: the instructions, and the labels that they branch to, in order.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    opcodes: dict[str, int]
    code: tuple[str, ...]


def read(cubin: bytes, shared: int) -> Resources:
    """The resources of a cubin's one kernel.

    Args:
        cubin: machine code.
        shared: bytes of shared memory that its launch asks for, which the code does not say.

    Raises:
        ModuleNotFoundError: Triton, whose wheel brings the disassembler, is not installed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    registers, stack = (int(x) for x in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    code = tuple(
        "".join(found) for found in re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;|^(\.L_\w+):", sass, re.MULTILINE)
    )
    opcodes: dict[str, int] = {}
    for instruction in code:
        if opcode := re.match(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", instruction):
            opcodes[opcode[1]] = opcodes.get(opcode[1], 0) + 1
    return Resources(registers, stack, opcodes.get("STL", 0) + opcodes.get("LDL", 0), shared, opcodes, code)


def _run(tool: str, *arguments: str) -> str:
    triton = find_spec("triton")  # found and not imported: CuTe kernels are read too
    if triton is None or triton.origin is None:
        raise ModuleNotFoundError(f"{tool} is taken from Triton's wheel, and the package 'triton' is not installed")
    command = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([command, *arguments], check=True, capture_output=True, text=True).stdout
