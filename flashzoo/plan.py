"""From the arguments of a call to a plan: tensors to a Problem, each argument checked by name, the Problem to who answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashzoo.autograd import joined
from flashzoo.masks.block_mask import BlockMask
from flashzoo.registry import Choice, Zoo, choose, implementation, lent, remembered
from flashzoo.spec import (
    DESCALE_BLOCK,
    OUT_DTYPES,
    PRECISIONS,
    QUANTIZABLE,
    MaskForm,
    Problem,
    Spec,
    Window,
    check_flags,
    normalised,
)

LARGEST_SCALE = 1e30
"""Of softmax_scale: scores are float32, and beyond this even small ones would be infinite."""

_DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
}
TORCH_OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def negated(x: Tensor) -> Tensor:
    """-x, of e4m3 too."""
    # torch has no arithmetic for e4m3, whose sign is its first bit
    return (x.view(torch.uint8) ^ 128).view(x.dtype) if x.dtype == torch.float8_e4m3fn else -x


# What a plan, and so the cache of plans, depends on. Not the strides but the last: kernels take them as they come.
# That is in a tuple, empty for a tensor of no dimensions.
Described = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, torch.layout]


def described(x: Tensor) -> Described:
    """What a plan depends on, of one tensor."""
    return x.shape, x.stride()[-1:], x.dtype, x.device, x.layout


Mask = tuple[MaskForm, int, int, torch.device]
"""What a plan depends on, of a block mask: its form, seqlen_q, seqlen_k, and where it is."""


def check_mask(block_mask: Any) -> None:
    """TypeError where it is no block mask."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a flashzoo.BlockMask or None, got {type(block_mask).__name__}")


def banded(block_mask: Any, causal: Any, window_size: Any) -> tuple[BlockMask, Mask]:
    """The block mask that versions are handed, with causal and the window put into it, and what a plan depends on of it.

    Without causal and window it is the one given, at no cost; with them some hundreds of small operations make another.

    Raises:
        TypeError, ValueError: an argument is malformed; the mask was made by hand, and `BlockMask.validate` finds fault with it.
    """
    check_mask(block_mask)
    mask, window = block_mask.check_once(), normalised(window_size)
    check_flags(causal=causal)
    if causal or window != (None, None):
        sizes = {"block_q": mask.block_q, "block_kv": mask.block_kv, "device": mask.device}
        mask &= mask.sliding_window(mask.seqlen_q, mask.seqlen_k, window_size=window, causal=causal, **sizes)
    return mask, (mask.form, mask.seqlen_q, mask.seqlen_k, mask.device)


def check_tensors(q: Any, k: Any, v: Any, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """TypeError where one is no tensor, or of a layout that has neither strides nor, where nested, one shape."""
    for name, x in zip(names, (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        _check_layout(name, x.layout, x.is_nested)


def _check_layout(name: str, layout: torch.layout, nested: bool = False) -> None:
    dense = f"{name} must be a dense tensor (torch.strided)"
    if nested or layout == torch.jagged:
        instead = "pad it with torch.nested.to_padded_tensor, or pack its sequences into one with a BlockMask.documents"
        raise TypeError(f"{dense}, got a nested one ({layout}): {instead}")
    if layout != torch.strided:
        raise TypeError(f"{dense}, got {layout}: call to_dense()")


def check_data(*devices: torch.device) -> None:
    """ValueError where tensors on one of these have no data."""
    if any(device.type == "meta" for device in devices):
        raise ValueError("q, k and v must have data, got device meta: flashzoo.explain answers about such tensors")


@dataclass(slots=True, eq=False)
class Plan:
    """Everything about a call that its data don't decide.

    Attributes:
        run: the implementation.
        problem: what it is handed.
        scale: the size of the softmax scale.
        negative: whether the scale is negative.
        e4m3: whether the inputs are.
        spec: whose implementation it is.
        checked: what `run` returned has been looked at, which is done once.
    """

    run: Callable
    problem: Problem
    scale: float
    negative: bool
    e4m3: bool
    spec: Spec
    checked: bool = False

    def check(self, result: Any, q: Tensor, recorded: bool) -> None:
        """TypeError where `run` did not return what `Spec.impl` says of q; recorded: autograd was to record it."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._wrong("a tuple (out, lse)", _told(result))
        p, (out, lse) = self.problem, result
        dtype = TORCH_OUT_DTYPES[p.out_dtype] if self.e4m3 else q.dtype
        self._check_tensor("out", out, (p.batch, p.seqlen_q, p.heads, p.head_dim_v), dtype, q.device)
        if p.lse:
            self._check_tensor("lse", lse, (p.batch, p.heads, p.seqlen_q), torch.promote_types(dtype, torch.float32), q.device)
        if recorded and not out.requires_grad:
            raise self._wrong("an out that carries gradients", "one that does not require grad")

    def _check_tensor(self, name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        if not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != (shape, dtype, device):
            raise self._wrong(f"{name} as a Tensor {shape}, {dtype}, on {device}", _told(x))

    def _wrong(self, expected: str, got: str) -> TypeError:
        return TypeError(f"version {self.spec.name!r}: {self.spec.impl} must return {expected}, got {got}")


def _told(x: Any) -> str:
    return f"a Tensor {tuple(x.shape)}, {x.dtype}, on {x.device}" if isinstance(x, Tensor) else type(x).__name__


@remembered
def plan(
    q_shape: torch.Size,
    q_last: tuple[int, ...],
    q_dtype: torch.dtype,
    q_device: torch.device,
    q_layout: torch.layout,
    k_shape: torch.Size,
    k_last: tuple[int, ...],
    k_dtype: torch.dtype,
    k_device: torch.device,
    k_layout: torch.layout,
    v_shape: torch.Size,
    v_last: tuple[int, ...],
    v_dtype: torch.dtype,
    v_device: torch.device,
    v_layout: torch.layout,
    causal: bool,
    softmax_scale: float | None,
    window_size: Window | None,
    deterministic: bool,
    return_lse: bool,
    grad: bool,
    asked: tuple[str, str],
    form: Form | None,
    mask: Mask | None,
    zoo: Zoo,
) -> Plan:
    """The plan of a call, made once for each kind of call; asked is the version and who asks for it."""
    q = (q_shape, q_last, q_dtype, q_device, q_layout)
    k = (k_shape, k_last, k_dtype, k_device, k_layout)
    v = (v_shape, v_last, v_dtype, v_device, v_layout)
    scale = check_scale(softmax_scale)
    problem = problem_of((q, k, v), causal, window_size, deterministic, return_lse, grad, None, form, mask)
    check_data(q_device)
    if mask is not None and mask[3] != q_device:
        raise ValueError(f"block_mask must be on q's device {q_device}, got {mask[3]}")
    choice = choose(problem, *asked, zoo)
    if mask is not None:  # it has them in it
        problem = replace(problem, causal=False, window=(None, None))
    run = _nothing_to_see if 0 in q_shape or 0 in k_shape else _implementation(choice)
    scale = 1 / math.sqrt(problem.head_dim) if scale is None else scale
    return Plan(run, problem, abs(scale), scale < 0, problem.dtype == "e4m3", choice.forward)


def _implementation(choice: Choice) -> Callable:
    run = implementation(choice.forward)
    return run if choice.backward is None else joined(run, lent(choice.backward))


Form = tuple[str | None, str | None]  # precision and the name of out_dtype, each None where not given


def form_of(precision: Any, out_dtype: Any) -> Form:
    """Both arguments, checked."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be None or 'fp8', got {precision!r}")
    if out_dtype is None:
        return precision, None
    if not isinstance(out_dtype, torch.dtype) or _DTYPE_NAMES.get(out_dtype) not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be None, {' or '.join(map(str, TORCH_OUT_DTYPES.values()))}, got {out_dtype!r}")
    return precision, _DTYPE_NAMES[out_dtype]


def check_descales(descales: tuple[Any, Any, Any], problem: Problem, device: torch.device) -> None:
    """TypeError or ValueError where one of `(q_descale, k_descale, v_descale)`, each a tensor or None, does not fit the problem."""
    check_descales_alone(descales, device)
    p = problem
    for name, x, heads, seqlen in zip("qkv", descales, (p.heads, p.heads_kv, p.heads_kv), (p.seqlen_q, *[p.seqlen_k] * 2), strict=True):
        if x is None:
            continue
        name = f"{name}_descale"
        if p.dtype != "e4m3":
            raise ValueError(f"{name} is for e4m3 inputs (torch.float8_e4m3fn), got it with {p.dtype} ones")
        by_head, by_block = (p.batch, p.heads_kv), (p.batch, heads, -(-seqlen // DESCALE_BLOCK))
        if x.shape not in (by_head, by_block):
            raise ValueError(
                f"{name} must have shape (batch, heads_kv) {by_head}, or (batch, {'heads' if name[0] == 'q' else 'heads_kv'}, "
                f"blocks of {DESCALE_BLOCK} rows) {by_block}, got {tuple(x.shape)}"
            )


def check_descales_alone(descales: tuple[Any, Any, Any], device: torch.device) -> None:
    """The part of `check_descales` that asks for no sizes."""
    for name, x in zip("qkv", descales, strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}_descale must be a torch.Tensor or None, got {type(x).__name__}")
        if x.dtype != torch.float32:
            raise TypeError(f"{name}_descale must be of dtype torch.float32, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}_descale must be on q's device {device}, got {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}_descale has no gradient, got one that requires grad")


def check_scale(scale: Any) -> float | None:
    """softmax_scale as a float, or None where not given."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"softmax_scale must be a float or None, got {type(scale).__name__}")
    if not abs(scale) <= LARGEST_SCALE:  # true of NaN, and traced where the scale is an unknown number
        limit = f"at most {LARGEST_SCALE:g} in size" if isinstance(scale, int) or math.isfinite(scale) else "finite"
        raise ValueError(f"softmax_scale must be {limit}, got {scale}")
    return float(scale)


def check_shapes(tensors: tuple[Described, Described, Described]) -> None:
    """TypeError or ValueError where q, k and v are no inputs of attention, or do not go together."""
    (q_shape, _, q_dtype, q_device, _), (k_shape, _, k_dtype, k_device, _), (v_shape, _, v_dtype, v_device, _) = tensors
    for name, (shape, last, _, _, layout) in zip("qkv", tensors, strict=True):
        _check_layout(name, layout)
        if len(shape) != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), got shape {tuple(shape)}")
        if last != (1,) and shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension (stride 1), got stride {last[0]} for shape {tuple(shape)}")
    shapes = f"q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)}"
    (batch, _, heads, head_dim), (batch_k, seqlen_k, heads_kv, head_dim_k) = q_shape, k_shape
    *sizes_v, head_dim_v = v_shape
    if sizes_v != [batch_k, seqlen_k, heads_kv]:
        raise ValueError(f"v must have k's batch, seqlen and heads {tuple(k_shape[:3])}, got {tuple(sizes_v)} ({shapes})")
    if batch != batch_k:
        raise ValueError(f"k must have q's batch {batch}, got {batch_k} ({shapes})")
    if head_dim != head_dim_k:
        raise ValueError(f"k must have q's head_dim {head_dim}, got {head_dim_k} ({shapes})")
    if any(size < 1 for size in (head_dim, head_dim_v, heads, heads_kv)):
        raise ValueError(f"heads and head_dim must be at least 1, got {shapes}")
    if heads % heads_kv:
        raise ValueError(f"q's heads must be a multiple of k's, got {heads} and {heads_kv} ({shapes})")
    dtypes = f"q {q_dtype}, k {k_dtype}, v {v_dtype}"
    if not q_dtype == k_dtype == v_dtype:
        raise TypeError(f"q, k and v must have one dtype, got {dtypes}")
    if q_dtype not in _DTYPE_NAMES:
        raise TypeError(f"q, k and v must be of dtype {', '.join(_DTYPE_NAMES.values())}, got {dtypes}")
    if not q_device == k_device == v_device:
        raise ValueError(f"q, k and v must be on one device, got q {q_device}, k {k_device}, v {v_device}")


def problem_of(
    tensors: tuple[Described, Described, Described],
    causal: bool,
    window_size: Window | None,
    deterministic: bool,
    lse: bool,
    grad: bool,
    arch: int | None,
    form: Form | None = None,
    mask: Mask | None = None,
) -> Problem:
    """The Problem of a call, each argument checked once and by name."""
    check_shapes(tensors)
    (q_shape, _, q_dtype, q_device, _), (k_shape, *_), (v_shape, *_) = tensors
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, heads_kv, _), head_dim_v = q_shape, k_shape, v_shape[3]
    dtype = _DTYPE_NAMES[q_dtype]
    precision, out_dtype = form or (None, None)
    if precision is not None and dtype not in QUANTIZABLE:
        raise TypeError(f"precision={precision!r} quantises {' or '.join(QUANTIZABLE)} inputs, got q {q_dtype}")
    if out_dtype is not None and dtype != "e4m3":
        raise TypeError(f"out_dtype is for e4m3 inputs (out has the dtype of others), got {TORCH_OUT_DTYPES[out_dtype]} with q {q_dtype}")
    check_flags(causal=causal, deterministic=deterministic, return_lse=lse)
    device, arch = _hardware(q_device, arch)
    if mask is not None and mask[1:3] != (seqlen_q, seqlen_k):
        raise ValueError(f"block_mask must be of seqlen_q and seqlen_k ({seqlen_q}, {seqlen_k}), got ({mask[1]}, {mask[2]})")
    return Problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=causal,
        window=normalised(window_size),
        lse=lse,
        deterministic=deterministic,
        grad=grad,
        device=device,
        arch=arch,
        precision=precision,
        out_dtype=out_dtype,  # pyright: ignore[reportArgumentType]
        block_mask=None if mask is None else mask[0],
    )


def _hardware(device: torch.device, arch: int | None) -> tuple[str, int | None]:
    if arch is not None:
        return "cuda", arch
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "cuda", 10 * major + minor
    if device.type in ("cpu", "meta"):
        return "cpu", None
    raise ValueError(f"q, k and v must be on a CPU or CUDA device, got {device}")


def _nothing_to_see(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, descales: object = None, block_mask: object = None
) -> tuple[Tensor, Tensor]:
    """The answer where there is no query or no key: zeros and -inf, with zero gradients for all three inputs."""
    e4m3 = problem.dtype == "e4m3"
    out = q.new_zeros((*q.shape[:3], problem.head_dim_v), dtype=TORCH_OUT_DTYPES[problem.out_dtype] if e4m3 else q.dtype)
    if problem.grad:
        # For autograd the zeros must come from the inputs: each adds the sum of none of its numbers, whatever they are.
        out = out + sum(x[:0].sum() for x in (q, k, v))
    lse_dtype = torch.promote_types(out.dtype, torch.float32)
    return out, out.to(lse_dtype).sum(-1).transpose(1, 2) - math.inf
