"""The two versions that are not ours to write: the papers' starting point, and torch's own attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.functional import pad

from flashzoo.call.operands import Operands
from flashzoo.call.problem import Problem
from flashzoo.reference import from_pages, only_used, shown, visible
from flashzoo.spec import Spec
from flashzoo.transforms import functorch_active

_EVERY_HEAD_DIM = range(1, 1 << 16)
LARGEST_GRID = 65535
"""Programs along the second and third dimension of a CUDA grid; torch's kernels lay the batch along one."""
BIAS_ALIGNMENT = 16
"""Elements, at multiples of which torch's efficient kernel wants rows of a mask that is added to the scores."""
SMALLEST_SCALE = 2.0**-100
"""Of softmax_scale, for torch: its flash kernels multiply a mask's -inf by it, in float32, and 0 gives NaN."""


_DENSE_MASK = "makes a dense (batch, heads, seqlen_q, seqlen_k) mask of the block mask, and skips nothing"
_DENSE_CACHE = (
    "makes a dense (batch, seqlen_q, seqlen_k) mask of what is used, copies k and v without what is not, "
    "and skips nothing"
)
_FROM_PAGES = "copies k and v from their pages"
_DENSE_LENGTHS = "makes a dense (total_q, total_k) mask that keeps sequences apart, copies q, k, v, and skips nothing"


def _sdpa_notes(problem: Problem) -> list[str]:
    other_kernel = (
        "torch's flash kernel needs v as wide as q: its memory-efficient one runs where it can, else math, "
        "quadratic in memory"
    )
    notes = {
        "builds the (seqlen_q, seqlen_k) mask as a tensor": _needs_mask(problem)
        and not problem.features & {"block_mask", "packed", "cache"},
        _DENSE_LENGTHS: "packed" in problem.features,
        _DENSE_CACHE: "cache" in problem.features,
        _FROM_PAGES: "paged" in problem.features,
        _DENSE_MASK: problem.block_mask is not None,
        "copies inputs whose rows do not start at multiples of 16 bytes": problem.device == "cuda",
        other_kernel: problem.head_dim != problem.head_dim_v,
    }
    return [note for note, holds in notes.items() if holds]


def _sdpa_limits(problem: Problem) -> list[str]:
    if problem.device == "cuda" and problem.batch > LARGEST_GRID:
        return [f"its CUDA kernels take a batch of at most {LARGEST_GRID}, got {problem.batch}"]
    return []


_LARGE_SCORES = "gradients lose digits where scores are about 1e5: P is recomputed from a rounded log-sum-exp"
_GROUP_SUMS = "dk and dv are summed over many query heads in 16 bits"
_SDPA_FAULTS = (
    ("cpu", "test_gradients[sdpa-gqa7-bf16", _GROUP_SUMS),
    ("cuda", "test_gradients[sdpa-large_scores_causal", _LARGE_SCORES),
)


def _standard_notes(problem: Problem) -> list[str]:
    plain = "quantises q, k and v to e4m3 with one scale a head, and rotates nothing: the papers' plain FP8"
    notes = {
        plain: problem.precision == "fp8",
        "sums P V in float32 with every term cut off as Hopper's FP8 tensor core does, slowly": problem.fast_accum,
        _DENSE_MASK: problem.block_mask is not None,
        _DENSE_LENGTHS: problem.sequences is not None,
        _DENSE_CACHE: "cache" in problem.features and problem.sequences is None,
        _FROM_PAGES: "paged" in problem.features,
    }
    return [note for note, holds in notes.items() if holds]


_STANDARD_FEATURES = frozenset(
    {
        "causal",
        "window",
        "gqa",
        "cross",
        "head_dim_v",
        "mla",
        "lse",
        "deterministic",
        "packed",
        "used_k",
        "cache",
        "block_mask",
        "sinks",
        "score_mod",
        "dropout_p",
        "fast_accum",
    }
)


def _standard_limits(problem: Problem) -> list[str]:
    in_fp8 = problem.numerics in ("e4m3", "fp8")
    in_16_bits = sorted({"score_mod", "dropout_p"} & problem.features) if in_fp8 else []
    return [f"does not support {name} in FP8" for name in in_16_bits]


STANDARD = Spec(
    name="standard",
    title="three-pass attention that writes S and P to memory",
    paper="Vaswani et al. 2017, arXiv:1706.03762; Algorithm 0 of Dao et al. 2022, arXiv:2205.14135",
    impl="flashzoo.reference:standard",
    dtypes=("fp16", "bf16", "fp32", "fp64", "e4m3"),
    cpu_dtypes=("fp16", "bf16", "fp32", "fp64", "e4m3"),
    quantizes=("fp16", "bf16"),
    arch=(70, None),
    head_dims=_EVERY_HEAD_DIM,
    features=_STANDARD_FEATURES | {"out_dtype", "packed_q", "paged", "fp8_kv"},
    backward=_STANDARD_FEATURES,
    transforms=frozenset({"jvp", "vmap", "functionalize"}),
    auto=("cuda", "cpu"),
    memory="quadratic",
    check=_standard_limits,
    notes=_standard_notes,
)

_SDPA_FEATURES = frozenset(
    {"causal", "window", "gqa", "cross", "head_dim_v", "mla", "packed", "used_k", "cache", "block_mask"}
)

SDPA = Spec(
    name="sdpa",
    title="torch.nn.functional.scaled_dot_product_attention, any of its kernels but cuDNN's",
    paper="docs.pytorch.org",
    impl="flashzoo.baselines:sdpa",
    dtypes=("fp16", "bf16", "fp32", "fp64"),
    cpu_dtypes=("fp16", "bf16", "fp32", "fp64"),
    arch=(50, None),
    head_dims=_EVERY_HEAD_DIM,
    features=_SDPA_FEATURES | {"paged"},
    backward=_SDPA_FEATURES,
    transforms=frozenset({"vmap", "grad", "functionalize"}),
    auto=("cuda", "cpu"),
    faults=_SDPA_FAULTS,
    check=_sdpa_limits,
    notes=_sdpa_notes,
)


def _needs_mask(problem: Problem) -> bool:
    aligned_alike = problem.window == (None, None) and problem.seqlen_q == problem.seqlen_k
    return problem.block_mask is not None or problem.by_lengths or (problem.span != (None, None) and not aligned_alike)


def _readable(x: Tensor) -> Tensor:
    """The tensor, copied where torch's CUDA kernels would read it at misaligned addresses, which loses the CUDA
    context; and where a row begins one column behind another, as of `x.unfold(1, head_dim, 1)`, since torch's kernels
    then give what nobody wrote."""
    if any(stride == 1 and size > 1 for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)):
        return x.clone(memory_format=torch.contiguous_format)
    if not x.is_cuda:
        return x
    if functorch_active() or is_legacy_batchedtensor(x):  # then it may have no address
        return x.clone(memory_format=torch.contiguous_format)
    steps = [stride * x.itemsize for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    aligned = x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in steps)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _readable_gradient(dout: Tensor | None) -> Tensor | None:
    """The same of out's gradient, which is None where nothing flows back into out."""
    return None if dout is None else _readable(dout)


def _attend_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """`scaled_dot_product_attention` of CUDA tensors `(batch, heads, seqlen, head_dim)`,
    by any of its kernels but cuDNN's.

    torch's switch of cuDNN's kernel is the whole process's: turned off here, it would be off for other threads, and
    turned on there, it would be on here. So no switch is touched. The kernel is chosen here, in torch's order and by
    torch's own answers to what each can do, and handed what torch hands it: flash heads padded to a multiple of 8, the
    others a mask that is added to the scores.
    """
    # cuDNN's, of torch 2.11 on an H200: NaN gradients where every score is about -120,
    # where a tile is partly blind and at softmax_scale 0.
    asked = SDPAParams(q, k, v, attn_mask, 0.0, is_causal, enable_gqa)
    if can_use_flash_attention(asked):
        head_dim = q.shape[-1]
        if head_dim % 8:
            q, k, v = (pad(x, (0, -head_dim % 8)) for x in (q, k, v))
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal, scale=scale)[0]
        return out[..., :head_dim] if head_dim % 8 else out
    if not enable_gqa and can_use_efficient_attention(asked):  # it has no heads that share keys
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        unaligned = k.shape[-2] % BIAS_ALIGNMENT
        if attn_mask is not None and recorded and unaligned:
            # A hook on what autograd saves copies the bias without what lies between its rows.
            unseen = BIAS_ALIGNMENT - unaligned
            k, v = (pad(x, (0, 0, 0, unseen)) for x in (k, v))
            attn_mask = pad(attn_mask, (0, unseen))
        bias = None if attn_mask is None else _bias(attn_mask, q).expand(*q.shape[:3], -1)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, recorded, is_causal=is_causal, scale=scale
        )[0]
    bias = None if attn_mask is None else _bias(attn_mask, q)
    return torch.ops.aten._scaled_dot_product_attention_math(
        q, k, v, bias, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _attend_elsewhere(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """The same of others, by the operation that the function is: the function itself another version may be in the
    place of (`flashzoo.replace_sdpa`)."""
    return torch.ops.aten.scaled_dot_product_attention(
        q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _bias(seen: Tensor, q: Tensor) -> Tensor:
    """0 where a key is seen and -inf where not, in q's dtype; rows start where the efficient kernel wants them."""
    *rows, seqlen_k = seen.shape
    bias = q.new_zeros(*rows, seqlen_k + -seqlen_k % BIAS_ALIGNMENT)[..., :seqlen_k]
    return bias.masked_fill_(~seen, -torch.inf)


def sdpa(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, None]:
    """torch's attention under `Spec.impl`'s contract; torch aligns causal top-left, so other shapes get a mask."""
    k, v, operands = from_pages(k, v, operands)
    masked, scale = _needs_mask(problem), problem.scale
    seen = visible(problem, q.device, shown(problem, operands)) if masked else None
    q, k, v = only_used(q, k, v, operands)
    if scale < SMALLEST_SCALE:  # a part of it goes into q, which no mask is in
        q, scale = q * (scale / SMALLEST_SCALE), SMALLEST_SCALE
    attend = _attend_on_gpu if q.is_cuda else _attend_elsewhere
    with torch.autocast(q.device.type, enabled=False):  # it would change the dtype
        out = attend(
            *(_readable(x).transpose(1, 2) for x in (q, k, v)),
            attn_mask=seen,
            is_causal=problem.causal and not masked,
            scale=scale,
            enable_gqa=problem.heads != problem.heads_kv,
        ).transpose(1, 2)
    if out.requires_grad:
        out.register_hook(_readable_gradient)
    elif problem.grad:  # under vmap, who records it is outside; a product's gradient has memory of its own
        out = out * 1
    if seen is not None and seen.ndim == 4:
        out = out.masked_fill(~seen.any(-1).transpose(1, 2)[..., None], 0)
    elif problem.blind_rows:
        rows = torch.arange(problem.seqlen_q, device=q.device) < problem.blind_rows
        out = out.masked_fill(rows[:, None, None], 0)
    return out, None
