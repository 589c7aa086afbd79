"""A call that `torch.compile` traces: the graph breaks, and the call is made as it stands.

Ranks agree on a call where it is first made, and a graph would remember one rank's answer. What is before and behind
the call is compiled. Imported by a call that is traced, and by no other.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable(recursive=True)
def untraced(attention: Any, *inputs: Any, **named: Any) -> Any:
    """The call, out of the graph."""
    return attention(*inputs, **named)
