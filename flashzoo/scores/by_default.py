"""A function on scores means one thing, whatever torch's default dtype is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_by_default() -> Iterator[None]:
    """What whole numbers become that are divided, or multiplied by 0.5, is float32 in here. In all threads, since torch
    has but one default."""
    before = torch.get_default_dtype()
    if before == torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
