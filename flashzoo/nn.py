"""`DotProductAttention`: what Megatron- and DeepSpeed-style models call their core attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import flashzoo
from flashzoo import score_mods

__all__ = ["DotProductAttention"]

_MASKED = {"no_mask": False, "causal": True, "padding": False, "padding_causal": True, "arbitrary": False}
"""Kinds of mask by their names in Megatron, and whether they are causal."""
_AT_THE_END = "_bottom_right"
"""Behind the names of Transformer Engine's that are causal from the last query and key on, whatever the lengths."""
_NEEDED = ("arbitrary",)
"""Those that mean nothing without an attention_mask."""
_OF_CONFIG = {
    "context_parallel_size": (1, None),
    "apply_query_key_layer_scaling": (False, None),
    "softmax_type": ("vanilla", None),
}
_OF_PACKED = {"qkv_format": ("thd", None), "cu_seqlens_q_padded": (None,), "cu_seqlens_kv_padded": (None,)}
"""What a configuration, and packed sequences' parameters, may ask for that is taken at these values alone."""


class DotProductAttention(nn.Module):
    """Attention of q, k and v `(seqlen, batch, heads, head_dim)`, in the place of Megatron-LM's `core_attention`.

    Under tensor parallelism a rank has some of the heads, and calls it on these: heads depend on no others. It holds no
    parameters. Its arguments are those that Megatron-LM builds a core attention with, so that
    `SelfAttentionSubmodules(core_attention=flashzoo.nn.DotProductAttention)` is the whole change.

    Args:
        config: None, or any object with attributes, of which `window_size` (left, right), `softmax_scale`,
            `window_attn_skip_freq`, `attn_logit_softcapping` (`flashzoo.score_mods.softcap`, where it is not 0),
            `attention_dropout`, `deterministic_mode` and what would change attention are looked at:
            `context_parallel_size`, `apply_query_key_layer_scaling` and `softmax_type` must ask for nothing.
        layer_number: from 1 on; by it config's `window_attn_skip_freq` leaves layers without the window: N every N-th,
            a list those where it has 0.
        attn_mask_type: "causal", "no_mask", "padding", "padding_causal" or "arbitrary", or a member of an enumeration
            of that name; "_bottom_right" may be behind those that are causal.
        attention_type: "self" or "cross"; not looked at.
        attention_dropout: the `dropout_p` of `flashzoo.attention` while the module trains; config's where None. Its
            seed is drawn from torch's generator: where tensor parallel ranks have theirs in one state, call the module
            in a fork of Megatron's tracker of random states, or the first heads of all ranks drop alike.
        softmax_scale: `1 / sqrt(head_dim)` where neither it nor config has one.
        window_size: `(left, right)` as in `flashzoo.attention`; config's where None.
        version: as in `flashzoo.attention`.
        others: what else a caller gives; it must be None.

    Raises:
        ValueError: attn_mask_type is not known, or config's `window_attn_skip_freq` says nothing of the layer.
        flashzoo.UnsupportedError: something is asked for that no version does; the text names it.
    """

    def __init__(
        self,
        config: Any = None,
        layer_number: int = 1,
        attn_mask_type: Any = "causal",
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        window_size: tuple[int | None, int | None] | None = None,
        version: str = "auto",
        **others: Any,
    ) -> None:
        super().__init__()
        _refuse("config", config, _OF_CONFIG)
        for name, value in others.items():
            if value is not None and name not in ("cp_comm_type", "pg_collection", "model_comm_pgs"):
                raise flashzoo.UnsupportedError(f"{name} must be None, got {value!r}")
        self.kind: str = _named(attn_mask_type)
        scale = getattr(config, "softmax_scale", None) if softmax_scale is None else softmax_scale
        self.softmax_scale: float | None = scale
        window = getattr(config, "window_size", None) if window_size is None else window_size
        skip = getattr(config, "window_attn_skip_freq", None) if window_size is None else None
        windowed = skip is None or _windowed(skip, layer_number)
        self.window_size: tuple[int | None, int | None] | None = window if windowed else None
        self.deterministic: bool = bool(getattr(config, "deterministic_mode", False))
        dropout = getattr(config, "attention_dropout", None) if attention_dropout is None else attention_dropout
        self.dropout_p: float = 0.0 if dropout is None else dropout
        self.softcap: float | None = getattr(config, "attn_logit_softcapping", None) or None
        self.version: str = version

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of a layer.

        Args:
            query: `(seqlen_q, batch, heads, head_dim)`; with packed_seq_params `(total_q, heads, head_dim)`.
            key, value: `(seqlen_k, batch, heads_kv, head_dim)`; with packed_seq_params `(total_k, heads_kv, head_dim)`.
            attention_mask: bool, of a shape that spreads to `(batch, heads, seqlen_q, seqlen_k)` and whose first two
                sizes are these or 1; True where a query does *not* see a key, beside what attn_mask_type says. It
                becomes a block mask.
            attn_mask_type: in the place of the module's own.
            attention_bias: floating-point `(batch, heads, seqlen_q, seqlen_k)`, the first two or 1, added to scores
                behind softcap; it may require grad. Not beside packed_seq_params.
            packed_seq_params: an object with `cu_seqlens_q` and `cu_seqlens_kv`, int32 `(sequences + 1,)`, and no
                padding between sequences.

        Returns:
            `(seqlen_q, batch, heads * head_dim_v)`, or `(total_q, heads * head_dim_v)`.

        Raises:
            TypeError, ValueError: as `flashzoo.attention`; or causal with other lengths of keys than of queries, of
                which Megatron does not say how it is aligned, unless a kind of mask of Transformer Engine does, with
                "bottom_right" behind its name. Packed, equal lengths are said by one tensor in both places; two are
                compared, for which the host waits.
            flashzoo.UnsupportedError: attention_bias beside packed_seq_params, these with `cu_seqlens_q_padded` or
                another `qkv_format` than "thd", or no version takes the call.
        """
        inputs = {"query": query, "key": key, "value": value}
        more = {"attention_mask": attention_mask, "attention_bias": attention_bias}
        for name, x in (inputs | {name: x for name, x in more.items() if x is not None}).items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        packed = packed_seq_params is not None
        dims, shape = (3, "(total, heads, head_dim), packed") if packed else (4, "(seqlen, batch, heads, head_dim)")
        for name, x in inputs.items():
            if x.ndim != dims:
                raise ValueError(f"{name} must be {shape}, got shape {tuple(x.shape)}")
        kind = self.kind if attn_mask_type is None else _named(attn_mask_type)
        causal = _MASKED[kind.removesuffix(_AT_THE_END)]
        equal_lengths = causal and not kind.endswith(_AT_THE_END)
        options: dict[str, Any] = {"causal": causal, "softmax_scale": self.softmax_scale, "version": self.version}
        options |= {"window_size": self.window_size, "deterministic": self.deterministic}
        options["dropout_p"] = self.dropout_p if self.training else 0.0
        if self.softcap is not None:
            options["score_mod"] = score_mods.softcap(self.softcap)
        if packed:
            if attention_mask is not None:
                raise ValueError(f"attention_mask must be None beside packed_seq_params, got {attention_mask.shape}")
            if attention_bias is not None:
                raise flashzoo.UnsupportedError(
                    "attention_bias must be None beside packed_seq_params, "
                    f"got a tensor {tuple(attention_bias.shape)}: it does not say which sequences it is of"
                )
            _refuse("packed_seq_params", packed_seq_params, _OF_PACKED)
            for name, of in (("cu_seqlens_q", "cu_seqlens_q"), ("cu_seqlens_k", "cu_seqlens_kv")):
                options[name] = getattr(packed_seq_params, of, None)
                if options[name] is None:
                    raise ValueError(f"packed_seq_params must have {of}, int32 (sequences + 1,), got None")
            if equal_lengths and not _equal(options["cu_seqlens_q"], options["cu_seqlens_k"]):
                raise ValueError("causal goes with equal lengths, got other cu_seqlens_kv than cu_seqlens_q")
            return flashzoo.attention(query, key, value, **options).flatten(1)
        if attention_mask is not None:
            options["block_mask"] = _shown(attention_mask, query, key)
        elif kind in _NEEDED:
            raise ValueError("attention_mask must be given where attn_mask_type is 'arbitrary', got None")
        if equal_lengths and query.shape[0] != key.shape[0]:
            raise ValueError(f"causal goes with equal lengths, got {query.shape[0]} queries and {key.shape[0]} keys")
        if attention_bias is not None:
            options["score_mod"] = _added(self.softcap, attention_bias, query, key)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return flashzoo.attention(q, k, v, **options).transpose(0, 1).flatten(2)


def _windowed(skip: Any, layer_number: int) -> bool:
    """Whether a layer has the window, by config's `window_attn_skip_freq`."""
    if layer_number < 1:
        raise ValueError(f"layer_number must be from 1 on, got {layer_number}")
    if isinstance(skip, int):
        if skip < 1:
            raise ValueError(f"config.window_attn_skip_freq must be from 1 on, or a list, got {skip}")
        return layer_number % skip != 0
    if len(skip) < layer_number:
        raise ValueError(f"config.window_attn_skip_freq must have layer {layer_number}, got {len(skip)} layers")
    return bool(skip[layer_number - 1])


def _refuse(what: str, given: Any, known: dict[str, tuple[Any, ...]]) -> None:
    """UnsupportedError where an attribute has another value than those that are taken."""
    for name, taken in known.items():
        asked = getattr(given, name, None)
        if not any(asked is value or (not isinstance(asked, Tensor) and asked == value) for value in taken):
            got = f"a tensor {tuple(asked.shape)}" if isinstance(asked, Tensor) else repr(asked)
            raise flashzoo.UnsupportedError(f"{what}.{name} must be {taken[0]!r}, got {got}")


def _named(attn_mask_type: Any) -> str:
    """The name of a kind of mask."""
    name = str(getattr(attn_mask_type, "name", attn_mask_type))
    if name not in _MASKED and not _MASKED.get(name.removesuffix(_AT_THE_END)):
        raise ValueError(f"attn_mask_type must be one of {', '.join(_MASKED)}, got {attn_mask_type!r}")
    return name


def _equal(x: Any, y: Any) -> bool:
    """False for tensors of other numbers; of what is none `flashzoo.attention` says so."""
    if x is y or not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return True
    return x.shape == y.shape and torch.equal(x, y)


def _added(softcap: float | None, bias: Tensor, query: Tensor, key: Tensor) -> Callable[..., Tensor]:
    """A function on scores that adds a bias, behind softcap where it is asked for."""
    _check_spreads("attention_bias", bias, query, key)
    add = score_mods.bias(bias)
    if softcap is None:
        return add
    cap = score_mods.softcap(softcap)
    return lambda score, *at: add(cap(score, *at), *at)


def _check_spreads(name: str, x: Tensor, query: Tensor, key: Tensor) -> None:
    """ValueError where x has not a number for each score, or for all batches, heads, queries or keys one."""
    sizes = (*query.shape[1:3], query.shape[0], key.shape[0])
    if x.ndim != 4 or any(size not in (1, wanted) for size, wanted in zip(x.shape, sizes, strict=True)):
        raise ValueError(f"{name} must spread to {sizes}, got {tuple(x.shape)}")


def _shown(attention_mask: Tensor, query: Tensor, key: Tensor) -> flashzoo.BlockMask:
    if attention_mask.dtype != torch.bool or attention_mask.ndim != 4:
        got = f"{attention_mask.dtype} {tuple(attention_mask.shape)}"
        raise ValueError(f"attention_mask must be bool, of 4 dimensions and True where nothing is seen, got {got}")
    _check_spreads("attention_mask", attention_mask, query, key)
    shown = ~attention_mask
    return flashzoo.BlockMask.from_dense(shown.expand(*shown.shape[:2], query.shape[0], key.shape[0]))
