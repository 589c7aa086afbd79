"""What a backward pass reads again, and was changed in place since: an error as of torch's own operations, or gradients
that do not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashzoo
from flashzoo import UnsupportedError, score_mods
from flashzoo_suite.support import DEVICE, same_bits

DTYPE = torch.float32 if DEVICE == "cpu" else torch.float16


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE, requires_grad=True)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def lengths() -> tuple[tuple[Tensor, ...], dict, Callable[[], object]]:
    used = numbers(10, 7)
    return (drawn(2, 4, 2, 16), drawn(2, 32, 2, 16), drawn(2, 32, 2, 16)), {"seqused_k": used}, lambda: used.add_(4)


def documents() -> tuple[tuple[Tensor, ...], dict, Callable[[], object]]:
    begins = numbers(0, 5, 12)
    return tuple(drawn(12, 2, 16) for _ in "qkv"), {"cu_seqlens_q": begins}, lambda: begins[1].add_(3)


def sinks() -> tuple[tuple[Tensor, ...], dict, Callable[[], object]]:
    of_heads = torch.zeros(2, device=DEVICE)
    return tuple(drawn(1, 12, 2, 16) for _ in "qkv"), {"sinks": of_heads}, lambda: of_heads.add_(2)


def bias() -> tuple[tuple[Tensor, ...], dict, Callable[[], object]]:
    added = torch.zeros(1, 2, 12, 12, device=DEVICE, dtype=DTYPE)
    return (
        tuple(drawn(1, 12, 2, 16) for _ in "qkv"),
        {"score_mod": score_mods.bias(added)},
        lambda: added[..., 0].add_(5),
    )


def elements() -> tuple[tuple[Tensor, ...], dict, Callable[[], object]]:
    mask = flashzoo.BlockMask.from_dense(torch.rand(70, 70, device=DEVICE) < 0.5)
    bits = mask.element.bits
    assert bits is not None
    return tuple(drawn(1, 70, 2, 16) for _ in "qkv"), {"block_mask": mask}, lambda: bits.fill_(255)


versions = pytest.mark.parametrize("version", ["standard", "sdpa", "v1", "v2", "v3", "blocksparse"])
operands = pytest.mark.parametrize(
    "operand", [lengths, documents, sinks, bias, elements], ids=lambda make: make.__name__
)


def unchanged(tensors: tuple[Tensor, ...], options: dict, version: str) -> tuple[Tensor, ...]:
    """Gradients where nothing is changed; skips where the version takes no such call."""
    try:
        return torch.autograd.grad(flashzoo.attention(*tensors, **options, version=version).sum(), tensors)
    except UnsupportedError as error:
        pytest.skip(str(error).splitlines()[0])


@versions
@operands
def test_a_backward_pass_reads_what_the_forward_pass_read(version, operand):
    tensors, options, change = operand()
    expected = unchanged(tensors, options, version)
    out = flashzoo.attention(*tensors, **options, version=version)
    change()
    try:
        found = torch.autograd.grad(out.sum(), tensors)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    assert all(same_bits(x, wanted) for x, wanted in zip(found, expected, strict=True))


def turned(x: Tensor) -> Tensor:
    """The same numbers, with the first dimension's next to one another."""
    return torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device).permute(*reversed(range(x.ndim))).copy_(x)


def apart(x: Tensor) -> Tensor:
    """The same numbers, every other one of memory."""
    return torch.empty(*x.shape, 2, dtype=x.dtype, device=x.device)[..., 0].copy_(x)


@versions
@operands
@pytest.mark.parametrize("given_back", [torch.clone, turned, apart], ids=lambda how: how.__name__)
def test_a_backward_pass_reads_what_hooks_saved(version, operand, given_back):
    """As of `torch.autograd.graph.save_on_cpu`: torch counts no changes of what they give back, which may lie in memory
    in any way."""
    if version == "sdpa" and given_back is not torch.clone:
        pytest.skip("torch's own backward pass reads it with the strides that it had")
    tensors, options, change = operand()
    expected = unchanged(tensors, options, version)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, given_back):
        out = flashzoo.attention(*tensors, **options, version=version)
    change()
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(same_bits(x, wanted) for x, wanted in zip(found, expected, strict=True))


def test_a_cache_that_is_appended_to():
    q, (k_cache, v_cache) = drawn(1, 4, 1, 8), torch.zeros(2, 1, 16, 1, 8, device=DEVICE, dtype=DTYPE).unbind(0)
    used = numbers(8)
    out = flashzoo.attention(q, k_cache, v_cache, seqused_k=used, version="v2")
    flashzoo.append(k_cache, v_cache, *drawn(2, 1, 4, 1, 8).detach(), used - 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), q)


@versions
@operands
def test_operands_made_in_inference_mode(version, operand):
    """They have no count of changes, and autograd saves none of them: those of the forward pass are read."""
    with torch.inference_mode():
        torch.manual_seed(0)
        tensors, options, change = operand()
    tensors = tuple(x.clone().requires_grad_() for x in tensors)
    expected = unchanged(tensors, options, version)
    out = flashzoo.attention(*tensors, **options, version=version)
    with torch.inference_mode():
        change()
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(same_bits(x, wanted) for x, wanted in zip(found, expected, strict=True))
