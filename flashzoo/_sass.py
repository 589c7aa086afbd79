"""What a compiler made of a kernel, read from its machine code (SASS) on a machine that needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        cubin: the machine code.
        registers: 32-bit registers of a thread.
        stack: bytes of local memory of a thread.
        shared: bytes of shared memory of a block.
    """

    cubin: bytes = field(repr=False)
    registers: int
    stack: int
    shared: int

    @cached_property  # who asks for numbers alone does not wait for the disassembler
    def code(self) -> tuple[str, ...]:
        """The instructions, and the labels that they branch to, in order."""
        # Its analysis of data flow takes as long again, and changes no line.
        sass = _run("nvdisasm", "-c", "-ndf", of=self.cubin)
        found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;|^(\.L_\w+):", sass, re.MULTILINE)
        return tuple("".join(either) for either in found)

    @cached_property
    def opcodes(self) -> dict[str, int]:
        """How often each machine instruction occurs."""
        found = (re.match(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", instruction) for instruction in self.code)
        return dict(Counter(opcode[1] for opcode in found if opcode))

    @property
    def spills(self) -> int:
        """Instructions that store to or load from local memory."""
        return self.opcodes.get("STL", 0) + self.opcodes.get("LDL", 0)


def read(cubin: bytes, shared: int) -> Resources:
    """The resources of a cubin's one kernel.

    Args:
        cubin: machine code.
        shared: bytes of shared memory that its launch asks for, which the code does not say.

    Raises:
        ModuleNotFoundError: Triton, whose wheel brings the disassembler, is not installed.
    """
    usage = _run("cuobjdump", "-res-usage", of=cubin)
    registers, stack = (int(x) for x in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    return Resources(cubin, registers, stack, shared)


def _run(tool: str, *options: str, of: bytes) -> str:
    triton = find_spec("triton")  # found and not imported: CuTe kernels are read too
    if triton is None or triton.origin is None:
        raise ModuleNotFoundError(f"{tool} is taken from Triton's wheel, and the package 'triton' is not installed")
    command = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(of)
        file.flush()
        return subprocess.run([command, *options, file.name], check=True, capture_output=True, text=True).stdout
