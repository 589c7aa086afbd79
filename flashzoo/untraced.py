"""A call that `torch.compile` traces and that can't be in a graph: the graph breaks, and the call is made as it stands.
What is before and behind it is compiled. Imported by a call that is traced, and by no other: the decorator loads the
compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WHY = (
    "flashzoo.append, quantize, attention_backward and parallel's functions, attention of nested tensors or with a "
    "score_mod that is no flashzoo.ScoreMod made outside, and kernels' backward passes under compiled autograd, can't "
    "be traced: call them outside of what torch.compile sees, or without fullgraph=True"
)


@torch.compiler.disable(recursive=True, reason=WHY)
def untraced(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """The call, out of the graph."""
    return function(*inputs, **named)
