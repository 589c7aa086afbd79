"""Hugging Face transformers: `register()`, and then `attn_implementation="zoo"`, or `"zoo:v2"` for one version alone.

1. The mask function (`masks.py`) is asked once in each forward pass. What a mask says arrives as flashzoo's own
   arguments: padded batches as packed sequences, static caches as `seqused_k`, windows as `window_size`. What none of
   these can say becomes a dense mask and, in the layers, one block mask that all of them share.
2. The attention function is asked in each layer. It hands these to `flashzoo.attention`.

The name is not "flashzoo", because transformers takes every name that contains "flash" for a kernel of its hub: it
loads that when a model is made, and refuses to compile generation with it as one graph.

Importing this needs transformers 5.23 or newer: `pip install flashzoo[transformers]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

import flashzoo
from flashzoo.integrations.masks import Packed, Padded, Plain, Used, mask_of, read

NAME = "zoo"
"""What `attn_implementation` is called."""

_block_masks: Any = WeakTensorKeyDictionary()
"""By the dense mask that they were made of, which all layers of a forward pass share."""

_REFUSED = {
    "softcap": "no version caps scores",
    "position_bias": "no version adds a bias",
    "head_mask": "no version scales heads",
    "indices": "a key is seen by all heads and queries of a block, or by none: not by lists of keys",
    "block_indices": "blocks are chosen by a flashzoo.BlockMask",
    "sinks": "sinks come as s_aux",
    "cache": "the paged cache of continuous batching is for transformers' own implementations",
    "block_table": "the paged cache of continuous batching is for transformers' own implementations",
    "output_attentions": "no version gives weights: take 'eager' for them",
}
"""Arguments of an attention function that change what is computed, and why they are not taken."""


def register(name: str = NAME) -> None:
    """Makes `attn_implementation=name` known to transformers, for a model's `from_pretrained`, `from_config` and
    `set_attn_implementation`, and `f"{name}:{version}"` for each version that is registered now.

    Padding, left and right, packed batches (position ids that start anew, or `cu_seq_lens_q` and `cu_seq_lens_k`),
    windows, sinks, grouped heads, and dynamic and static caches arrive as arguments of `flashzoo.attention`. Rows that
    are padding give 0 where queries see by their position. Under autocast q, k and v are cast to its dtype.

    A model that asks for what no version does raises `flashzoo.UnsupportedError`, which names it: dropout while
    training, `softcap`, `position_bias`, additive masks, `output_attentions`.

    Args:
        name: must not contain "flash", which transformers takes for a kernel of its hub.

    Raises:
        ValueError: name contains "flash".
    """
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', which transformers looks for in its hub, got {name!r}")
    for version in ("auto", *flashzoo.versions()):
        known = name if version == "auto" else f"{name}:{version}"
        AttentionInterface.register(known, attention_of(version))
        AttentionMaskInterface.register(known, mask_of)


def attention_of(version: str) -> Callable[..., tuple[Tensor, None]]:
    """An attention function of transformers by this version."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """q, k and v `(batch, heads, seqlen, head_dim)`; out `(batch, seqlen, heads, head_dim)` and no weights."""
        _refuse(dropout, others)
        q, k, v = (x.transpose(1, 2) for x in _cast(query, key, value))
        options: dict[str, Any] = {"softmax_scale": scaling, "version": version}
        if s_aux is not None:
            options["sinks"] = s_aux
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            options |= _without_mask(q, k, causal, sliding_window)
        elif attention_mask.dtype != torch.int32:
            return flashzoo.attention(q, k, v, block_mask=_block_mask(attention_mask), **options), None
        else:
            said = read(attention_mask)
            options |= {"causal": said.causal, "window_size": said.window}
            if isinstance(said, (Packed, Padded)):
                if isinstance(said, Padded):
                    _refuse_lengths("a padded batch", others)
                    options |= {"cu_seqlens_k": said.cu_seqlens_k, "seqused_k": said.used}
                return _packed(q, k, v, options | {"cu_seqlens_q": said.cu_seqlens_q}, others), None
            if isinstance(said, Used):
                _refuse_lengths("a cache", others)  # attention holds their number to the batch's
                return flashzoo.attention(q, k, v, seqused_k=said.used, **options), None
            k, v = _seen(k, v, said)
        if others.get("cu_seq_lens_q") is not None:
            return _packed(q, k, v, options, others), None
        return flashzoo.attention(q, k, v, **options), None

    return attention


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise flashzoo.UnsupportedError(
            f"attn_implementation={NAME!r}: dropout must be 0, got {dropout}: no version drops out; "
            "set the config's attention dropout to 0"
        )
    for name, why in _REFUSED.items():
        if name in others and others[name] is not None and others[name] is not False:
            x = others[name]
            got = f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise flashzoo.UnsupportedError(f"attn_implementation={NAME!r}: {name} must be None, got {got}: {why}")


def _refuse_lengths(what: str, others: dict[str, Any]) -> None:
    if others.get("cu_seq_lens_q") is not None:
        raise ValueError(f"cu_seq_lens_q does not go with {what}: expected one or the other, got both")


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in autocast's dtype, where it is on: rotary embeddings leave q and k in float32, v is in 16 bits."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype != torch.float64 else x for x in tensors)


def _without_mask(q: Tensor, k: Tensor, causal: bool, sliding_window: int | None) -> dict[str, Any]:
    """What a layer that was given no mask sees: of a model that makes none, since `mask_of` always gives one."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if causal and 1 < seqlen_q != seqlen_k:
        raise ValueError(
            f"attention_mask must say what {seqlen_q} queries see of {seqlen_k} keys where is_causal, got None"
        )
    if sliding_window is None or seqlen_k <= sliding_window:
        return {"causal": causal}
    if not causal:
        raise ValueError(f"sliding_window={sliding_window} without is_causal goes with an attention_mask, got None")
    return {"causal": True, "window_size": (sliding_window - 1, 0)}


def _seen(k: Tensor, v: Tensor, said: Plain) -> tuple[Tensor, Tensor]:
    """Keys that are there: behind them a static cache has room."""
    if k.shape[1] < said.keys or (k.shape[1] > said.keys and not said.causal):
        raise ValueError(f"attention_mask is of {said.keys} keys, got {k.shape[1]}")
    return k[:, : said.keys], v[:, : said.keys]


def _packed(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], others: dict[str, Any]) -> Tensor:
    """Rows of all the batch behind one another; the caller's own lengths take the place of those from position ids."""
    if others.get("cu_seq_lens_q") is not None:
        cu_q, cu_k = others["cu_seq_lens_q"], others.get("cu_seq_lens_k")
        options = options | {"cu_seqlens_q": cu_q.to(torch.int32)}
        if cu_k is not None:
            options["cu_seqlens_k"] = cu_k.to(torch.int32)
    rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    return flashzoo.attention(*rows, **options).view(*q.shape[:3], v.shape[3])


def _block_mask(mask: Tensor) -> flashzoo.BlockMask:
    if mask.dtype != torch.bool:
        raise flashzoo.UnsupportedError(
            f"attn_implementation={NAME!r}: attention_mask must be bool where it has 4 dimensions, got {mask.dtype} "
            f"{tuple(mask.shape)}: no version adds a mask to scores"
        )
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()  # the memory of a graph is its own
    if torch.compiler.is_compiling() or mask.is_inference() or capturing:  # and of these no changes are counted
        return flashzoo.BlockMask.from_dense(mask)
    now = mask._version, torch.cuda.current_stream(mask.device).cuda_stream if mask.is_cuda else None
    then, made = _block_masks.get(mask, (None, None))
    if made is None or then != now:
        made = flashzoo.BlockMask.from_dense(mask)
        _block_masks[mask] = now, made
    return made
