"""What flashzoo is timed against: other libraries' attention, and torch's, under one signature.

Every peer takes q `(batch, seqlen_q, heads, head_dim)` and k, v `(batch, seqlen_k, heads_kv, head_dim)`, fp16 or bf16,
any strides, and returns out of q's shape, with gradients where an input asks for them. A layout of its own is met with
transposed views, no copies. Those of `FP8_PEERS` take e4m3, whose descales are 1, and have no gradients there. Those of
`MASKED_PEERS` take a block mask, which is made into one of their own before the first call, those of `PACKED_PEERS`
packed sequences in a batch of one, and those of `DECODE_PEERS` caches of q's dtype, all of which are used; what some
take on the scores is in `bench.scored`. What a peer does not take is a NotImplementedError, its own or one from here.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.caches import Caches
from bench.lengths import Packed
from bench.masks import BLOCK, Pattern
from flashzoo.call.problem import Problem

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def peer(
    name: str,
    problem: Problem,
    pattern: Pattern | None = None,
    packed: Packed | None = None,
    caches: Caches | None = None,
) -> Attention:
    """The peer of that name, ready to be called on the problem's tensors; nothing runs or compiles before the call.

    Args:
        name: a key of `PEERS`.
        problem: sizes and causal are read from it.
        pattern: the block mask, where there is one; the problem is then not causal.
        packed: the sequences, where they are packed.
        caches: where keys and values are those.

    Raises:
        KeyError: no peer has that name.
        ImportError: the library behind it is not installed, or too old to hold the function.
        NotImplementedError: the peer means something else by this problem, or does not take its dtype or block masks.
    """
    if pattern is not None:
        if name not in MASKED_PEERS:
            raise NotImplementedError(f"block masks are taken by {' and '.join(MASKED_PEERS)}, got {name}")
        return MASKED_PEERS[name](problem, pattern)
    if packed is not None:
        if name not in PACKED_PEERS:
            raise NotImplementedError(f"packed sequences are taken by {' and '.join(PACKED_PEERS)}, got {name}")
        return PACKED_PEERS[name](problem, packed)
    if caches is not None:
        if name not in DECODE_PEERS:
            raise NotImplementedError(f"caches are taken by {' and '.join(DECODE_PEERS)}, got {name}")
        if problem.dtype_kv:
            raise NotImplementedError(f"takes k and v of q's dtype, got {problem.dtype_kv} beside {problem.dtype}")
        return DECODE_PEERS[name](problem, caches)
    if problem.window != (None, None) and name not in WINDOW_PEERS:
        raise NotImplementedError(f"windows are taken by {' and '.join(WINDOW_PEERS)}, got {name}")
    if problem.dtype == "e4m3" and name not in FP8_PEERS:
        raise NotImplementedError(f"e4m3 is taken by {' and '.join(FP8_PEERS)}, got {name}")
    return PEERS[name](problem)


def package(name: str) -> str:
    """The package that the peer is of, by the name that it is installed under."""
    return _LIBRARIES[name].package if name in _LIBRARIES else "torch"


@lru_cache
def missing(name: str) -> str | None:
    """Why the peer can't be used on this machine, or None where it can."""
    try:
        if name in _LIBRARIES:
            _function(name)
    except ImportError as error:
        return str(error)
    return None


def _refuse_top_left(library: str, problem: Problem) -> None:
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        lengths = f"seqlen_q {problem.seqlen_q} and seqlen_k {problem.seqlen_k}"
        raise NotImplementedError(f"{library} aligns causal top-left: expected equal lengths, got {lengths}")


@contextmanager
def _math_in_16_bits() -> Iterator[None]:
    """torch's math path, standard attention, in the inputs' dtype:
    unasked it makes float32 of 16 bits, and takes twice as long."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def sdpa(backend: SDPBackend, problem: Problem, bias: Tensor | None = None) -> Attention:
    """torch's call by one of its kernels; what causal hides is put into a bias, since it takes one of the two."""
    _refuse_top_left("torch", problem)
    mask = bias
    if bias is not None and problem.causal:
        hidden = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
        mask = bias.masked_fill(hidden, -math.inf)
    if mask is not None:
        mask = mask.expand(problem.batch, problem.heads, -1, -1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        try:
            with sdpa_kernel(backend), _math_in_16_bits():
                out = scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    is_causal=problem.causal and mask is None,
                    enable_gqa=problem.heads != problem.heads_kv,
                )
        except RuntimeError as error:
            if not re.match("No (available kernel|viable backend)", str(error)):
                raise
            raise NotImplementedError(f"torch has no {backend.name} kernel for it") from error
        return out.transpose(1, 2)

    return attention


def _sdpa_of_caches(backend: SDPBackend, problem: Problem, caches: Caches) -> Attention:
    """torch's call knows nothing of lengths on the device, and misses nothing by that where all keys are used."""
    if caches.page_table is not None:
        raise NotImplementedError("torch takes no pages")
    return sdpa(backend, problem)


@lru_cache
def _compiled_flex(with_sinks: bool = False) -> Callable[..., Any]:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def beside_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **how: Any) -> Tensor:
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **how)
        share: Tensor = torch.sigmoid(cast(Tensor, aux.lse) - sinks[:, None])  # of the keys
        return (out * share[..., None]).to(out.dtype)

    # One graph for each shape, at its fastest: the default limits would turn later shapes into eager attention.
    dynamo.recompile_limit = 1000
    dynamo.accumulated_recompile_limit = 10000
    functorch.donated_buffer = False  # else the compiled backward can run only once on a graph
    return torch.compile(beside_sinks if with_sinks else flex_attention, dynamic=False, fullgraph=True)


def flex(problem: Problem, score_mod: Callable[..., Tensor] | None = None, *sinks: Tensor) -> Attention:
    """FlexAttention, which has no sinks: its LSE says what is left of out beside them."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask, offset, (left, right) = None, problem.offset, problem.span
    compiled = _compiled_flex(bool(sinks))

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i - offset
        upto = distance <= (problem.seqlen_k if right is None else right)
        return upto if left is None else upto & (distance >= -left)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal mask
        if (left, right) != (None, None) and mask is None:
            mask = create_block_mask(visible, None, None, problem.seqlen_q, problem.seqlen_k, device=str(q.device))
        how = {"score_mod": score_mod, "block_mask": mask, "enable_gqa": problem.heads != problem.heads_kv}
        out = compiled(*(x.transpose(1, 2) for x in (q, k, v)), *sinks, **how)
        return out.transpose(1, 2)

    return attention


def _flex_masked(problem: Problem, pattern: Pattern) -> Attention:
    """One graph for all masks of a shape: partial and full blocks are in lists of equal sizes,
    and the band's width is a tensor's value.

    Only a partial block's elements are asked about, of which a mask has none, one or two in a row.
    """
    from torch.nn.attention.flex_attention import BlockMask

    (partial, full), device = pattern.lists(), pattern.mask.device
    seqlens = problem.seqlen_q, problem.seqlen_k
    mask = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=_flex_band(pattern.left, device), seq_lengths=seqlens
    )
    compiled = _compiled_flex()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(
            *(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=problem.heads != problem.heads_kv
        )
        return out.transpose(1, 2)

    return attention


@lru_cache
def _flex_band(left: int | None, device: torch.device) -> Callable[..., Tensor]:
    furthest = torch.tensor(torch.iinfo(torch.int32).max if left is None else left, dtype=torch.int32, device=device)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j <= furthest)

    return visible


class Library(NamedTuple):
    """A function, with its module, and the package that has it."""

    function: str
    package: str


_LIBRARIES = {
    "fa4": Library("flash_attn.cute.flash_attn_func", "flash-attn-4"),
    "fa3": Library("flash_attn_interface.flash_attn_func", "flash-attn-3"),
    "fa2": Library("flash_attn.flash_attn_func", "flash-attn"),
    "xformers": Library("xformers.ops.memory_efficient_attention", "xformers"),
    "cudnn_fp8": Library("cudnn.pygraph", "nvidia-cudnn-frontend"),
}


@lru_cache
def _function(name: str) -> Callable[..., Any]:
    module, _, function = _LIBRARIES[name].function.rpartition(".")
    # fa4 reads it as it is imported: kernels compiled ahead are kept
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        # flash_attn is there without fa2 where only fa4, which lives inside it, is installed
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"needs {_LIBRARIES[name].function}, which is not installed ({error})") from error


def _beside(name: str, function: str) -> Callable[..., Any]:
    """Another function of the module that the library's own is of."""
    _function(name)  # says what is missing
    return getattr(import_module(_LIBRARIES[name].function.rpartition(".")[0]), function)


def library(name: str, problem: Problem, **options: Any) -> Attention:
    """The library's function, with these options of its own."""
    if problem.dtype == "fp32":
        raise NotImplementedError("takes fp16 and bf16, got fp32")
    function = _function(name)
    how: dict[str, Any] = {"causal": problem.causal, **options}
    if problem.window != (None, None):
        no_side = None if name == "fa4" else -1
        how["window_size"] = tuple(no_side if side is None else side for side in problem.span)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **how)
        return out[0] if isinstance(out, tuple) else out

    return attention


def _library_packed(name: str, problem: Problem, packed: Packed) -> Attention:
    """The library's function for packed sequences, which has the name of the other with `varlen` in it."""
    call = _beside(name, "flash_attn_varlen_func")
    cu, longest = packed.cu_seqlens, packed.longest
    how = {
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": problem.causal,
    }

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = call(q[0], k[0], v[0], **how)
        return (out[0] if isinstance(out, tuple) else out)[None]

    return attention


def _library_of_caches(name: str, problem: Problem, caches: Caches) -> Attention:
    call = _beside(name, "flash_attn_with_kvcache")
    how = {"cache_seqlens": caches.used, "page_table": caches.page_table, "causal": problem.causal}
    columns = problem.head_dim_v  # of MLA's q and k those that go with v are told apart
    how |= {"softmax_scale": problem.scale} if problem.latent else {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if problem.latent:
            out = call(q[..., columns:], k[..., columns:], v, qv=q[..., :columns], **how)
        else:
            out = call(q, k, v, **how)
        return out[0] if isinstance(out, tuple) else out

    return attention


def _torch_packed(problem: Problem, packed: Packed) -> Attention:
    """torch.nn.attention.varlen, which says causal by a flag or, newer, by a window."""
    call = import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(call).parameters
    causal = (
        {"is_causal": problem.causal} if "is_causal" in known else {"window_size": (-1, 0 if problem.causal else -1)}
    )
    groups = {"enable_gqa": True} if "enable_gqa" in known and problem.heads != problem.heads_kv else {}
    if problem.heads != problem.heads_kv and not groups:
        raise NotImplementedError("this torch's packed attention has no heads that share keys")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = (packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)
        return call(q[0], k[0], v[0], *lengths, **causal, **groups)[None]

    return attention


def _flex_packed(problem: Problem, packed: Packed) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask

    document, compiled = packed.documents, _compiled_flex()

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = document[i] == document[j]
        return same & (j <= i) if problem.causal else same

    mask = create_block_mask(visible, None, None, packed.total, packed.total, device=packed.device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(
            *(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=problem.heads != problem.heads_kv
        )
        return out.transpose(1, 2)

    return attention


def _xformers(problem: Problem) -> Attention:
    """Whichever of its kernels xformers chooses. It takes groups of heads in a dimension of their own,
    and those forward alone."""
    function, group = _function("xformers"), problem.heads // problem.heads_kv
    bias = import_module("xformers.ops.fmha.attn_bias").LowerTriangularFromBottomRightMask() if problem.causal else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group == 1:
            return function(q, k, v, attn_bias=bias)
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
        return function(q.unflatten(2, (problem.heads_kv, group)), k, v, attn_bias=bias).flatten(2, 3)

    return attention


def _fa4_masked(problem: Problem, pattern: Pattern) -> Attention:
    """flash-attn-4's block sparsity. On sm_90 it wants blocks of as many keys as its tiles have:
    up to head dim 128 that is 128."""
    function = _function("fa4")
    tensors = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    by_rows, by_columns = (
        tensors(*partial, *full, block_size=(BLOCK, BLOCK))
        for partial, full in (pattern.lists(), pattern.lists(by_columns=True))
    )
    band = _fa4_band(pattern.left) if pattern.has_partial else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, mask_mod=band, block_sparse_tensors=by_rows, block_sparse_tensors_bwd=by_columns)
        return out[0] if isinstance(out, tuple) else out

    return attention


@lru_cache
def _fa4_band(left: int | None) -> Callable[..., Any]:
    """What a partial block's elements are asked, in fa4's language: numbers come as vectors of one."""
    cute, utils, int32 = (
        import_module("cutlass.cute"),
        import_module("flash_attn.cute.utils"),
        import_module("cutlass").Int32,
    )

    @cute.jit
    def causal(batch: Any, head: Any, i: Any, j: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return j <= i

    @cute.jit
    def window(batch: Any, head: Any, i: Any, j: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return (j <= i) & (j >= i - utils.scalar_to_ssa(left, int32))

    return causal if left is None else window


CUDNN_P_SCALE = 64.0
"""What cuDNN multiplies P by before it rounds it to e4m3: as in NVIDIA's own tests, far from underflow and from 448."""


def _cudnn_fp8(problem: Problem) -> Attention:
    """cuDNN's FP8 forward pass (nvidia-cudnn-frontend, on the libcudnn that torch has loaded).

    On Hopper it writes nothing but e4m3, so out is e4m3, with a scale of 1: half the bytes that ours has, and coarser.
    Two maxima, of P and of out, are written as well.
    """
    _refuse_top_left("cuDNN in FP8 on Hopper", problem)
    if problem.dtype != "e4m3":
        raise NotImplementedError(f"takes e4m3, got {problem.dtype}")
    _function("cudnn_fp8")
    graphs: dict[tuple[tuple[int, ...], ...], CudnnFp8] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layout = q.stride(), k.stride(), v.stride()
        if layout not in graphs:
            graphs[layout] = CudnnFp8(problem, q, k, v)
        return graphs[layout](q, k, v)

    return attention


class CudnnFp8:
    """cuDNN's graph of FP8 attention for tensors that lie like these, built, and called as a function of such tensors.

    Args:
        problem: causal, with top-left alignment, is read from it.
        q, k, v: e4m3, on the GPU that the graph is for, in `(batch, seqlen, heads, head_dim)`; any strides.
        out_dtype: of out; Hopper knows e4m3 alone, Blackwell bf16 and fp16 too.

    Raises:
        cudnn.cudnnGraphNotSupportedError: this cuDNN has no kernel for it on this GPU.
    """

    def __init__(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out_dtype: torch.dtype = torch.float8_e4m3fn
    ) -> None:
        self._cudnn = cudnn = import_module("cudnn")
        self._device, self._out_dtype = q.device, out_dtype
        self._handle = _cudnn_handle(q.get_device())
        e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        outs = {
            torch.float8_e4m3fn: e4m3,
            torch.bfloat16: cudnn.data_type.BFLOAT16,
            torch.float16: cudnn.data_type.HALF,
        }
        graph = cudnn.pygraph(
            io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=self._handle
        )

        def tensor(x: Tensor, dtype: Any) -> Any:
            return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=dtype)

        def number(value: float) -> Tensor:
            return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=q.device)

        self._inputs = [tensor(x.transpose(1, 2), e4m3) for x in (q, k, v)]
        scales = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), 1.0)
        scales |= {"scale_s": CUDNN_P_SCALE, "descale_s": 1 / CUDNN_P_SCALE}
        numbers = {name: number(value) for name, value in scales.items()}
        described = {name: tensor(x, fp32) for name, x in numbers.items()}
        mask = {"right_bound": 0, "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT} if problem.causal else {}
        self._out, _, *maxima = graph.sdpa_fp8(
            **dict(zip("qkv", self._inputs, strict=True)),
            **described,
            **mask,
            attn_scale=1 / math.sqrt(problem.head_dim),
            generate_stats=False,
        )
        shape = self._empty(q, v).transpose(1, 2)
        self._out.set_output(True).set_dim(list(shape.shape)).set_stride(list(shape.stride())).set_data_type(
            outs[out_dtype]
        )
        for maximum in maxima:
            maximum.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self._graph = graph
        self._constants = {described[name]: x for name, x in numbers.items()} | {
            maximum: number(0) for maximum in maxima
        }
        self._workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

    def _empty(self, q: Tensor, v: Tensor) -> Tensor:
        return torch.empty((*q.shape[:3], v.shape[3]), dtype=self._out_dtype, device=self._device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Out `(batch, seqlen_q, heads, head_dim)`, on the current stream of the tensors' device."""
        out = self._empty(q, v)
        self._cudnn.set_stream(self._handle, torch.cuda.current_stream(self._device).cuda_stream)
        given = dict(zip(self._inputs, (q, k, v), strict=True))
        self._graph.execute({**given, **self._constants, self._out: out}, self._workspace, handle=self._handle)
        return out


@lru_cache
def _cudnn_handle(device: int) -> Any:
    # cuDNN binds a handle to the device that is current as it is made.
    with torch.cuda.device(device):
        return import_module("cudnn").create_handle()


PEERS: dict[str, Callable[[Problem], Attention]] = {
    **{name: partial(library, name) for name in ("fa4", "fa3", "fa2")},
    "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa_flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_math": partial(sdpa, SDPBackend.MATH),
    "flex": flex,
    "xformers": _xformers,
    "cudnn_fp8": _cudnn_fp8,
}
"""What each peer makes of a problem, by the names that results have."""

LINEAR_PEERS = tuple(name for name in PEERS if name not in ("sdpa_math", "cudnn_fp8"))
"""Those that take 16 bits and need linear memory."""

MASKED_PEERS: dict[str, Callable[[Problem, Pattern], Attention]] = {"flex": _flex_masked, "fa4": _fa4_masked}
"""Those that take block masks."""

PACKED_PEERS: dict[str, Callable[[Problem, Packed], Attention]] = {
    **{name: partial(_library_packed, name) for name in ("fa4", "fa3", "fa2")},
    "sdpa_flash": _torch_packed,
    "flex": _flex_packed,
}
"""Those that take packed sequences; torch's own is its FA-2 for these."""

DECODE_PEERS: dict[str, Callable[[Problem, Caches], Attention]] = {
    "fa3": partial(_library_of_caches, "fa3"),
    "sdpa_cudnn": partial(_sdpa_of_caches, SDPBackend.CUDNN_ATTENTION),
}
"""Those that take caches."""

WINDOW_PEERS = ("fa4", "fa3", "fa2", "flex")
"""Those that take windows."""

FP8_PEERS = ("fa3", "cudnn_fp8")
"""Those that take e4m3."""
