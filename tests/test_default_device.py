"""What torch's default device is changes nothing: all that is made lies where the inputs do, or on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashzoo
from flashzoo import BlockMask, score_mods
from flashzoo_suite.support import DEVICE


def attended(**options: Any) -> list[Any]:
    """out, and gradients of q, k and v."""
    leaves = [drawn(i).requires_grad_() for i in range(3)]
    out = flashzoo.attention(*leaves, **options)
    return [out, *torch.autograd.grad(out, leaves, drawn(3))]


def drawn(seed: int) -> torch.Tensor:
    numbers = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(1, 32, 2, 16, dtype=torch.float16, device=DEVICE, generator=numbers)


TABLE = torch.tensor([0.1, -0.2], device=DEVICE, requires_grad=True)
WHAT: dict[str, Callable[[], Any]] = {
    "attention": lambda: attended(causal=True),
    "packed": lambda: flashzoo.attention(
        *(drawn(i)[0] for i in range(3)), cu_seqlens_q=torch.tensor([0, 9, 32], dtype=torch.int32, device=DEVICE)
    ),
    "a function on scores": lambda: attended(score_mod=lambda s, b, h, i, j: s + TABLE[h] * TABLE[1] * (i - j)),
    "softcap": lambda: attended(score_mod=score_mods.softcap(20.0)),
    "documents": lambda: attended(block_mask=BlockMask.documents([9, 23], device=DEVICE)),
    "FP8": lambda: flashzoo.attention(*(drawn(i) for i in range(3)), precision="fp8", version="standard"),
    "compare": lambda: flashzoo.compare(*(drawn(i) for i in range(3)), causal=True, versions=["sdpa", "standard"]).ok,
}


@pytest.mark.parametrize("what", WHAT)
def test_another_default_device_changes_nothing(what):
    with torch.device("meta"):  # first, so that what is kept from then on was made there
        found = WHAT[what]()
    expected = WHAT[what]()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
