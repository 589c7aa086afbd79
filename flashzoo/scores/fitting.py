"""How a function on scores says of a tensor that it is as large as the call."""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def fitting(x: Tensor) -> Tensor:
    """The tensor itself, of which who traces the function takes note: a call with fewer rows, keys, heads or batches
    than it has is then refused, rather than given the first ones."""
    return handle_torch_function(fitting, (x,), x) if has_torch_function_unary(x) else x
