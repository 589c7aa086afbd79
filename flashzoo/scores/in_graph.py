"""What `torch.compile` runs while it traces, and traces nothing of. Nothing here is imported by a call that is not
traced: the decorator loads the compiler."""

from __future__ import annotations

from collections.abc import Callable

import torch


@torch.compiler.assume_constant_result
def keep(make: Callable[[float], None], of: float) -> None:
    """Has a function make what it keeps of this."""
    make(of)
