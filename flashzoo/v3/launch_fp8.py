"""FlashAttention-3 in FP8 on the host: quantised inputs, scales, launches."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from flashzoo._cute.driver import current_stream
from flashzoo._cute.per_stream import PerStream
from flashzoo._cute.tma import Ints, made_readable, readable
from flashzoo.call.operands import Descales, Operands
from flashzoo.call.problem import LOG2E, Problem
from flashzoo.sinks import share_of_keys, with_sinks
from flashzoo.v3.config import kernel_fp8_for, prepares
from flashzoo.v3.launch import ForwardLaunch, addresses_of, of_parts, of_sinks, tables
from flashzoo.v3.programs import DESCALE

SCALING = ("scale_log2", *(f"{tensor}_{name}" for tensor in ("q", "k", "v") for name in DESCALE), "q_group")
"""Names of the arguments that `scaling_of` gives."""


def attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor | None]:
    """`(out, lse)` of e4m3 CUDA tensors, or of 16-bit ones, which are quantised; see `flashzoo.attention`."""
    if problem.dtype == "e4m3":
        return forward_fp8(q, k, v, problem, operands)
    return forward_16(q, k, v, problem, operands)


def forward_fp8(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """Of e4m3 tensors."""
    descales = operands.descales
    shapes_and_strides = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or not _readable(*shapes_and_strides):
        q, k, v = made_readable(q), made_readable(k), made_readable(v)
    transposed = prepares(problem)
    if transposed:
        from flashzoo.v3.quantize import transpose_v

        v = transpose_v(v)
    run = forward_launch(problem, q.stride(), k.stride(), v.stride(), _of_blocks(descales), transposed, q.get_device())
    given, (tiles, _) = or_one(descales, q.get_device()), tables(problem, operands, run.block_q)
    more = () if tiles is None else (tiles.data_ptr(),)
    return run(q, k, v, *more, *scaling_of(problem, given), *addresses_of(operands.sinks))


def forward_16(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """Of 16-bit tensors, quantised: K smoothed, Q and K rotated, a scale for each block, V transposed."""
    from flashzoo.v3.quantize import quantize_for

    sinks, problem = operands.sinks, replace(problem, sinks=False)
    x = quantize_for(q, k, v, problem, want_shift=problem.lse or sinks is not None)
    run = forward_launch(problem, x.q.stride(), x.k.stride(), x.v.stride(), True, True, q.get_device())
    out, lse = run(x.q, x.k, x.v, *scaling_of(problem, (x.q_descale, x.k_descale, x.v_descale)))
    if x.lse_shift is not None:
        lse.add_(x.lse_shift, alpha=problem.scale)  # what smoothing took from every score of a row
    if sinks is not None:  # they stand beside scores that nothing was taken from
        out.mul_(share_of_keys(lse, sinks).transpose(1, 2)[..., None])
        lse = with_sinks(lse, sinks)
    return out, lse


@lru_cache(maxsize=1024)
def _readable(*shapes_and_strides: Ints) -> bool:
    """Whether TMA can read e4m3 tensors where they lie."""
    pairs = zip(shapes_and_strides[::2], shapes_and_strides[1::2], strict=True)
    return all(readable(shape, strides, size=1) for shape, strides in pairs)


def _of_blocks(descales: Descales) -> bool:
    """Whether K or V has scales for blocks."""
    return any(descale is not None and descale.ndim == 3 for descale in descales[1:])


@lru_cache(maxsize=1024)
def forward_launch(
    problem: Problem,
    q_strides: Ints,
    k_strides: Ints,
    v_strides: Ints,
    block_scales: bool,
    transposed: bool,
    device: int,
) -> ForwardLaunch:
    """The launch for a problem."""
    kernel, more = kernel_fp8_for(problem, block_scales, transposed), (*of_parts(problem), *SCALING, *of_sinks(problem))
    return ForwardLaunch(problem, kernel, q_strides, k_strides, v_strides, device, more)


def or_one(descales: Descales, device: int) -> tuple[Tensor, ...]:
    """The descales, and `one` for each that is None, or has no number as there are no sequences."""
    none = one(device, current_stream(device))
    return tuple(none if descale is None or not descale.numel() else descale for descale in descales)


def scaling_of(problem: Problem, descales: tuple[Tensor, ...]) -> tuple[float, ...]:
    """The arguments of an FP8 kernel named in `SCALING`.

    Args:
        problem: sizes and scale.
        descales: of q, k and v, as `or_one` gives them. Only their addresses are taken: whoever calls holds them until
            the launch, for in the capture of a graph nobody else may, and what is allocated next would lie where they
            did.
    """
    group = problem.heads // problem.heads_kv if descales[0].ndim == 2 else 1
    described = [value for descale in descales for value in _described(descale)]
    return (problem.scale * LOG2E, *described, group)


def _described(descale: Tensor) -> tuple[int, int, int, int]:
    """Address and strides of scales: (batch, heads, blocks), (batch, heads), (sequences, heads), or one for all."""
    batch, head, block = (*descale.stride(), 0)[:3] if descale.ndim > 1 else (0, 0, 0)
    return descale.data_ptr(), batch, head, block


one: PerStream = PerStream(1.0, torch.float32)
"""The scale of tensors that have none."""
