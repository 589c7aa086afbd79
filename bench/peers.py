"""What flashzoo is timed against: other libraries' attention, and torch's, under one signature.

Every peer takes q `(batch, seqlen_q, heads, head_dim)` and k, v `(batch, seqlen_k, heads_kv, head_dim)`, fp16 or bf16,
any strides, and returns out of q's shape, with gradients where an input asks for them. A layout of its own is met with
transposed views, no copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashzoo.spec import Problem

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def peer(name: str, problem: Problem) -> Attention:
    """The peer of that name, ready to be called on the problem's tensors; nothing runs or compiles before the call.

    Args:
        name: a key of `PEERS`.
        problem: sizes and causal are read from it.

    Raises:
        KeyError: no peer has that name.
        ImportError: the library behind it is not installed, or too old to hold the function.
        NotImplementedError: the peer means something else by this problem.
    """
    return PEERS[name](problem)


def missing(name: str) -> str | None:
    """Why the peer can't be used on this machine, or None where it can."""
    try:
        if name in _LIBRARIES:
            _function(name)
    except ImportError as error:
        return str(error)
    return None


def _sdpa(backend: SDPBackend, problem: Problem) -> Attention:
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise NotImplementedError(
            f"torch aligns causal top-left: expected equal lengths, got seqlen_q {problem.seqlen_q} and seqlen_k {problem.seqlen_k}"
        )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=problem.heads != problem.heads_kv)
        return out.transpose(1, 2)

    return attention


@lru_cache
def _compiled_flex() -> Callable[..., Any]:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    from torch.nn.attention.flex_attention import flex_attention

    # One graph for each shape, at its fastest: the default limits would turn later shapes into eager attention.
    dynamo.recompile_limit = 1000
    dynamo.accumulated_recompile_limit = 10000
    functorch.donated_buffer = False  # else the compiled backward can run only once on a graph
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _flex(problem: Problem) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask

    mask, shift = None, problem.seqlen_k - problem.seqlen_q
    compiled = _compiled_flex()

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + shift

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal mask
        if problem.causal and mask is None:
            mask = create_block_mask(visible, None, None, problem.seqlen_q, problem.seqlen_k, device=str(q.device))
        out = compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=problem.heads != problem.heads_kv)
        return out.transpose(1, 2)

    return attention


_LIBRARIES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


@lru_cache
def _function(name: str) -> Callable[..., Any]:
    module = _LIBRARIES[name]
    try:
        # flash_attn is there without fa2 where only fa4, which lives inside it, is installed
        return import_module(module).flash_attn_func
    except (ImportError, AttributeError) as error:
        raise ImportError(f"needs {module}.flash_attn_func, which is not installed ({error})") from error


def _library(name: str, problem: Problem) -> Attention:
    function = _function(name)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=problem.causal)
        return out[0] if isinstance(out, tuple) else out

    return attention


PEERS: dict[str, Callable[[Problem], Attention]] = {
    "sdpa_flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa_math": partial(_sdpa, SDPBackend.MATH),
    "flex": _flex,
    **{name: partial(_library, name) for name in _LIBRARIES},
}
"""What each peer makes of a problem, by the names that results have."""
