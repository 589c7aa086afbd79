"""What a compiler is not to know of a number."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def opaque(x: Int32) -> Int32:
    """The same number, of which no compiler knows that it grows from round to round of a loop: of addresses that are
    made of such a number LLVM keeps one for each place in a register from round to round, and these may be too many."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])
