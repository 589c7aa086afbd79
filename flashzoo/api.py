"""`attention`: from tensors to a Problem, from the Problem to a Spec, from the Spec to a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, overload

import torch
from torch import Tensor

from flashzoo.registry import Explanation, explain_problem, implementation, remembered, requested, resolve
from flashzoo.spec import DESCALE_BLOCK, OUT_DTYPES, PRECISIONS, QUANTIZABLE, Problem, Window

LARGEST_SCALE = 1e30
"""Of softmax_scale: scores are float32, and beyond this even small ones would be infinite."""

_DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
}
_OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: Window | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    version: str = ...,
    precision: Literal["fp8"] | None = ...,
    out_dtype: torch.dtype | None = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: Window | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    version: str = ...,
    precision: Literal["fp8"] | None = ...,
    out_dtype: torch.dtype | None = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: Window | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    version: str = "auto",
    precision: Literal["fp8"] | None = None,
    out_dtype: torch.dtype | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, `softmax(q k^T * softmax_scale) v`, by the version that is asked for or the best that can.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, fp16, bf16, fp32, fp64 or e4m3 (`torch.float8_e4m3fn`); any strides with a
            contiguous last dimension, so a transposed view of a `(batch, heads, seqlen, head_dim)` tensor passes with no copy.
        k: `(batch, seqlen_k, heads_kv, head_dim)`, dtype and device of q. `heads` is a multiple of `heads_kv`; query
            head h reads key/value head `h // (heads // heads_kv)`.
        v: `(batch, seqlen_k, heads_kv, head_dim_v)`, dtype and device of q. `head_dim_v` is mostly `head_dim`.
        causal: query i sees key j only where `j <= i + seqlen_k - seqlen_q`: the last query sees the last key.
        softmax_scale: finite float of at most 1e30, `1 / sqrt(head_dim)` where None. A negative one costs a copy of q.
        window_size: `(left, right)`: query i sees the keys from `i + seqlen_k - seqlen_q - left` to
            `i + seqlen_k - seqlen_q + right`; None or -1 on a side means no bound there.
        deterministic: the same bits in every run, gradients included; a version that can't promise it is not taken.
        return_lse: return the log-sum-exp of each row of scores too.
        version: a name from `flashzoo.versions()`, or "auto" for the newest that can take the call. A name never falls
            back. Overridden, where "auto", by `flashzoo.use(...)` and then by the environment variable FLASHZOO_VERSION.
        precision: "fp8" quantises fp16 or bf16 inputs to e4m3 for the forward pass; the backward pass runs in 16 bits, on the
            inputs as they are. Nothing is quantised where it is None.
        out_dtype: with e4m3 inputs, `torch.bfloat16` (None means it) or `torch.float16`. Other inputs have their own dtype out.
        q_descale: with e4m3 inputs, what q is multiplied by to be the real one: float32, on q's device, any strides,
            `(batch, heads_kv)` or one for each 128 rows of a head, `(batch, heads, ceil(seqlen_q / 128))`; None is 1. Positive
            and finite, which is not looked at: it lies on the device.
        k_descale, v_descale: the same for k and v, `(batch, heads_kv)` or `(batch, heads_kv, ceil(seqlen_k / 128))`.

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)`, q's dtype (for e4m3 see out_dtype) and device, under autocast too; with
        `return_lse` the pair `(out, lse)`, lse in natural log, float32 (float64 for float64 inputs), `(batch, heads,
        seqlen_q)`. Both are differentiable, once, but for e4m3 inputs, which have no gradients. A row that sees no key gives 0,
        and -inf in lse.

    Raises:
        TypeError, ValueError: an argument is malformed; the text names it, what was expected and what was got.
        flashzoo.UnsupportedError: the named version, or under "auto" every version, has a reason against the call.
    """
    wanted, _ = requested(version)
    if window_size is not None:
        window_size = _normalised(window_size)
    try:
        grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        tensors = (*_described(q), *_described(k), *_described(v))
    except AttributeError:
        _check_tensors(q, k, v)
        raise
    form = None if precision is None and out_dtype is None else _form(precision, out_dtype)
    run, problem, scale, negative, e4m3 = _plan(*tensors, causal, softmax_scale, window_size, deterministic, return_lse, grad, wanted, form)
    if negative:
        q = _negative(q)
    if e4m3 or not (q_descale is k_descale is v_descale is None):
        descales = (q_descale, k_descale, v_descale)
        _check_descales(descales, problem, q.device)
        out, lse = run(q, k, v, problem, scale, descales)
    else:
        out, lse = run(q, k, v, problem, scale)
    return (out, lse) if return_lse else out


def explain(
    q: Tensor | Problem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: Window | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    version: str = "auto",
    precision: Literal["fp8"] | None = None,
    out_dtype: torch.dtype | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    arch: int | None = None,
) -> Explanation:
    """Who would answer a call of `attention` with these arguments, and every reason against the others. Runs nothing.

    Args:
        q, k, v: as in `attention`, on any device ("meta" too), or a `Problem` alone in place of all three.
        arch: ask about a GPU of this compute capability (90 for Hopper) in place of the tensors' own device.

    Returns:
        An `Explanation`; printing it gives a table.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    if isinstance(q, Problem):
        return explain_problem(q, version)
    if k is None or v is None:
        raise TypeError(f"explain: k and v must be tensors where q is one, got {type(k).__name__} and {type(v).__name__}")
    _check_tensors(q, k, v)
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    _check_scale(softmax_scale)
    tensors = (_described(q), _described(k), _described(v))
    problem = problem_of(tensors, causal, window_size, deterministic, return_lse, grad, arch, _form(precision, out_dtype))
    if q_descale is not None or k_descale is not None or v_descale is not None:
        _check_descales((q_descale, k_descale, v_descale), problem, q.device)
    return explain_problem(problem, version)


def quantize(
    q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = True, smooth: bool = True, scales: Literal["block", "head"] = "block"
) -> Any:
    """fp16 or bf16 inputs of `attention` as e4m3 ones with descales: what `precision="fp8"` does, to be kept and used again.

    Args:
        q, k, v: as in `attention`, v as wide as q, head_dim a multiple of 16 up to 256.
        rotate: multiply q and k by one orthogonal matrix (signs and Hadamard), which leaves their products as they were and
            spreads an outlier over the whole head dim.
        smooth: subtract from k its mean, of 512 of its keys where there are more, which softmax does not see.
        scales: a scale for each 128 rows of a head ("block"), or one for each (batch, key/value head) ("head").

    Returns:
        `flashzoo.v3.quantize.Quantized`, a named tuple: q, k, v in e4m3; q_descale, k_descale, v_descale as `attention` takes
        them; lse_shift `(batch, heads, seqlen_q)`, float32, of which `softmax_scale` times is to be added to the LSE (None
        unless smooth). No gradients pass through it.

    Raises:
        TypeError, ValueError: an argument is malformed.
    """
    return import_module("flashzoo.v3.quantize").quantize(q, k, v, rotate=rotate, smooth=smooth, scales=scales)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    version: str = "auto",
) -> Tensor:
    """`attention` under the layout and names of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: `(batch, heads, seqlen_q, head_dim)`.
        key: `(batch, heads_kv, seqlen_k, head_dim)`.
        value: `(batch, heads_kv, seqlen_k, head_dim_v)`.
        is_causal: torch aligns it top-left and flashzoo bottom-right, so it is refused where seqlen_q != seqlen_k.
        scale, enable_gqa: as in torch.
        version: as in `attention`.

    Returns:
        out `(batch, heads, seqlen_q, head_dim_v)`.

    Raises:
        ValueError: is_causal with seqlen_q != seqlen_k, or fewer key heads than query heads without enable_gqa.
    """
    _check_tensors(query, key, value, names=("query", "key", "value"))
    if query.ndim == key.ndim == 4:
        if is_causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"is_causal: torch aligns it top-left, flashzoo.attention(causal=True) bottom-right; expected equal lengths, "
                f"got seqlen_q {query.shape[2]} and seqlen_k {key.shape[2]}"
            )
        if not enable_gqa and query.shape[1] != key.shape[1]:
            heads = f"{query.shape[1]} and {key.shape[1]}"
            raise ValueError(f"enable_gqa: expected True where head counts differ, got False with {heads} heads")
    inputs = (x.transpose(1, 2) if x.ndim == 4 else x for x in (query, key, value))
    return attention(*inputs, causal=is_causal, softmax_scale=scale, version=version).transpose(1, 2)


def _negative(x: Tensor) -> Tensor:
    # torch has no arithmetic for e4m3, whose sign is its first bit
    return (x.view(torch.uint8) ^ 128).view(x.dtype) if x.dtype == torch.float8_e4m3fn else -x


# What a plan, and so the cache of plans, depends on. Not the strides but the last: kernels take them as they come.
_Described = tuple[torch.Size, int, torch.dtype, torch.device, torch.layout]


def _described(x: Tensor) -> _Described:
    return x.shape, x.stride(-1) if x.ndim else 1, x.dtype, x.device, x.layout


def _check_tensors(q: Any, k: Any, v: Any, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    for name, x in zip(names, (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


@remembered
def _plan(
    q_shape: torch.Size,
    q_last: int,
    q_dtype: torch.dtype,
    q_device: torch.device,
    q_layout: torch.layout,
    k_shape: torch.Size,
    k_last: int,
    k_dtype: torch.dtype,
    k_device: torch.device,
    k_layout: torch.layout,
    v_shape: torch.Size,
    v_last: int,
    v_dtype: torch.dtype,
    v_device: torch.device,
    v_layout: torch.layout,
    causal: bool,
    softmax_scale: float | None,
    window_size: Window | None,
    deterministic: bool,
    return_lse: bool,
    grad: bool,
    version: str,
    form: _Form | None,
) -> tuple[Callable, Problem, float, bool, bool]:
    """Everything about a call that its data don't decide, once for each kind of call.

    Returns:
        The implementation, the problem, the size of the softmax scale, whether it is negative, whether the inputs are e4m3.
    """
    q = (q_shape, q_last, q_dtype, q_device, q_layout)
    k = (k_shape, k_last, k_dtype, k_device, k_layout)
    v = (v_shape, v_last, v_dtype, v_device, v_layout)
    scale = _check_scale(softmax_scale)
    problem = problem_of((q, k, v), causal, window_size, deterministic, return_lse, grad, None, form)
    spec = resolve(problem, version)
    run = _nothing_to_see if 0 in q_shape or 0 in k_shape else implementation(spec)
    scale = 1 / math.sqrt(problem.head_dim) if scale is None else scale
    return run, problem, abs(scale), scale < 0, problem.dtype == "e4m3"


_Form = tuple[str | None, str | None]  # precision and the name of out_dtype, each None where not given


def _form(precision: Any, out_dtype: Any) -> _Form:
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be None or 'fp8', got {precision!r}")
    if out_dtype is None:
        return precision, None
    if not isinstance(out_dtype, torch.dtype) or _DTYPE_NAMES.get(out_dtype) not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be None, {' or '.join(map(str, _OUT_DTYPES.values()))}, got {out_dtype!r}")
    return precision, _DTYPE_NAMES[out_dtype]


def _check_descales(descales: tuple[Any, Any, Any], problem: Problem, device: torch.device) -> None:
    p = problem
    for name, x, heads, seqlen in zip("qkv", descales, (p.heads, p.heads_kv, p.heads_kv), (p.seqlen_q, *[p.seqlen_k] * 2), strict=True):
        if x is None:
            continue
        name = f"{name}_descale"
        if p.dtype != "e4m3":
            raise ValueError(f"{name} is for e4m3 inputs (torch.float8_e4m3fn), got it with {p.dtype} ones")
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be of dtype torch.float32, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} has no gradient, got one that requires grad")
        by_head, by_block = (p.batch, p.heads_kv), (p.batch, heads, -(-seqlen // DESCALE_BLOCK))
        if x.shape not in (by_head, by_block):
            raise ValueError(
                f"{name} must have shape (batch, heads_kv) {by_head}, or (batch, {'heads' if name[0] == 'q' else 'heads_kv'}, "
                f"blocks of {DESCALE_BLOCK} rows) {by_block}, got {tuple(x.shape)}"
            )


def _check_scale(scale: float | None) -> float | None:
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"softmax_scale must be a float or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be finite, got {scale}")
    if abs(scale) > LARGEST_SCALE:
        raise ValueError(f"softmax_scale must be at most {LARGEST_SCALE:g} in size, got {scale}")
    return float(scale)


def problem_of(
    tensors: tuple[_Described, _Described, _Described],
    causal: bool,
    window_size: Window | None,
    deterministic: bool,
    lse: bool,
    grad: bool,
    arch: int | None,
    form: _Form | None = None,
) -> Problem:
    """The Problem of a call, each argument checked once and by name."""
    (q_shape, _, q_dtype, q_device, _), (k_shape, _, k_dtype, k_device, _), (v_shape, _, v_dtype, v_device, _) = tensors
    for name, (shape, last, _, _, layout) in zip("qkv", tensors, strict=True):
        if layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor (torch.strided), got {layout}")
        if len(shape) != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), got shape {tuple(shape)}")
        if last != 1 and shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension (stride 1), got stride {last} for shape {tuple(shape)}")
    shapes = f"q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)}"
    (batch, seqlen_q, heads, head_dim), (batch_k, seqlen_k, heads_kv, head_dim_k) = q_shape, k_shape
    *sizes_v, head_dim_v = v_shape
    if sizes_v != [batch_k, seqlen_k, heads_kv]:
        raise ValueError(f"v must have k's batch, seqlen and heads {tuple(k_shape[:3])}, got {tuple(sizes_v)} ({shapes})")
    if batch != batch_k:
        raise ValueError(f"k must have q's batch {batch}, got {batch_k} ({shapes})")
    if head_dim != head_dim_k:
        raise ValueError(f"k must have q's head_dim {head_dim}, got {head_dim_k} ({shapes})")
    if min(head_dim, head_dim_v, heads, heads_kv) < 1:
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
    dtype = _DTYPE_NAMES[q_dtype]
    precision, out_dtype = form or (None, None)
    if precision is not None and dtype not in QUANTIZABLE:
        raise TypeError(f"precision={precision!r} quantises {' or '.join(QUANTIZABLE)} inputs, got {dtypes}")
    if out_dtype is not None and dtype != "e4m3":
        raise TypeError(f"out_dtype is for e4m3 inputs (out has the dtype of others), got {_OUT_DTYPES[out_dtype]} with {dtypes}")
    for name, flag in (("causal", causal), ("deterministic", deterministic), ("return_lse", lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")
    device, arch = _hardware(q_device, arch)
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
        window=_normalised(window_size),
        lse=lse,
        deterministic=deterministic,
        grad=grad,
        device=device,
        arch=arch,
        precision=precision,
        out_dtype=out_dtype,  # pyright: ignore[reportArgumentType]
    )


def _normalised(window_size: Any) -> Window:
    if window_size is None:
        return None, None
    expected = "window_size must be None or a pair (left, right) of None, -1 or ints >= 0"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{expected}, got {window_size!r}")
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < -1):
            raise ValueError(f"{expected}, got {window_size!r}")
    left, right = (None if side == -1 else side for side in window_size)
    return left, right


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
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, softmax_scale: float, descales: object = None
) -> tuple[Tensor, Tensor]:
    """The answer where there is no query or no key: zeros and -inf, with zero gradients for all three inputs."""
    e4m3 = problem.dtype == "e4m3"
    out = q.new_zeros((*q.shape[:3], problem.head_dim_v), dtype=_OUT_DTYPES[problem.out_dtype] if e4m3 else q.dtype)
    if problem.grad:
        # For autograd the zeros must come from the inputs: each adds the sum of none of its numbers, whatever they are.
        out = out + sum(x[:0].sum() for x in (q, k, v))
    lse_dtype = torch.promote_types(out.dtype, torch.float32)
    return out, out.to(lse_dtype).sum(-1).transpose(1, 2) - math.inf
