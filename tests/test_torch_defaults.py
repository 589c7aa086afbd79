"""What torch's default device and dtype are changes nothing: all that is made lies where the inputs do, or on the CPU,
and what a function on scores computes with whole numbers is float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flashzoo
from flashzoo import BlockMask, ScoreMod, score_mods
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
    "validate": lambda: flashzoo.validate(
        drawn(0)[0], drawn(1), drawn(2), cu_seqlens_q=torch.tensor([0, 32], dtype=torch.int32, device=DEVICE)
    ),
    # traced each time
    "a function on scores": lambda: attended(
        score_mod=ScoreMod(lambda s, b, h, i, j: s * 0.5 + TABLE[h] * TABLE[1] * ((i - j) / 3))
    ),
    "a function on scores, in v2": lambda: attended(
        score_mod=ScoreMod(lambda s, b, h, i, j: s + TABLE[h] * torch.exp2(-i)), version="v2"
    ),
    "softcap": lambda: attended(score_mod=score_mods.softcap(20.0)),
    "documents": lambda: attended(block_mask=BlockMask.documents([9, 23], device=DEVICE)),
    "sinks": lambda: attended(sinks=TABLE),
    "FP8": lambda: flashzoo.attention(*(drawn(i) for i in range(3)), precision="fp8", version="standard"),
    "compare": lambda: flashzoo.compare(*(drawn(i) for i in range(3)), causal=True, versions=["sdpa", "standard"]).ok,
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("what", WHAT)
def test_another_default_changes_nothing(what, default):
    with DEFAULTS[default]():  # first, so that what is kept from then on was made there
        found = WHAT[what]()
    expected = WHAT[what]()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
