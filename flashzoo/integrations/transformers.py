"""Hugging Face transformers: `register()`, and then `attn_implementation="zoo"`, or `"zoo:v2"` for one version alone.

1. The mask function (`masks.py`) is asked once in each forward pass. What a mask says arrives as flashzoo's own
   arguments: padded batches as packed sequences, static caches as `seqused_k`, windows as `window_size`. What none of
   these can say becomes a dense mask and, in the layers, one block mask that all of them share.
2. The attention function is asked in each layer. It hands these to `flashzoo.attention`.
3. What is done to scores (`softcap`) is a `score_mod`. What is added to them (`position_bias`, a mask of numbers) lies
   by batch, head, query and key, so nothing is packed beside it: the `score_mod` that adds it masks padding too.

The name is not "flashzoo", because transformers takes every name that contains "flash" for a kernel of its hub: it
loads that when a model is made, and refuses to compile generation with it as one graph.

Importing this needs transformers 5.17 or newer: the extra `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

import flashzoo
from flashzoo import score_mods
from flashzoo.integrations.masks import Packed, Padded, Plain, Used, mask_of, read

NAME = "zoo"
"""What `attn_implementation` is called."""

_made: Any = WeakTensorKeyDictionary()
"""By masks, which all layers of a forward pass share: what was made of them."""
_texts: dict[tuple[Any, ...], str] = {}
"""Of functions on scores that add and mask, by all that they depend on: not by lengths, which grow in generation."""

_REFUSED = {
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

    `softcap` is one of `flashzoo.score_mods`. `position_bias` and masks of numbers are added to scores, with their
    gradients; the least number of a mask's dtype masks as -inf does, and a row that sees no key so gives 0.

    Dropout while training is by a seed that is drawn from torch's generator, which gradient checkpointing puts back.

    A model that asks for what no version does raises `flashzoo.UnsupportedError`, which names it: `output_attentions`.

    Args:
        name: must not contain "flash", which transformers takes for a kernel of its hub.

    Raises:
        ValueError: name contains "flash".
    """
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', which transformers looks for in its hub, got {name!r}")
    for version in ("auto", *flashzoo.versions()):
        known = name if version == "auto" else f"{name}:{version}"
        AttentionInterface.register(known, _attention_of(version))
        AttentionMaskInterface.register(known, mask_of)


def _attention_of(version: str) -> Callable[..., tuple[Tensor, None]]:
    """An attention function of transformers, by this version."""

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
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """q, k and v `(batch, heads, seqlen, head_dim)`; out `(batch, seqlen, heads, head_dim)` and no weights."""
        _refuse(others)
        q, k, v = (_by_columns(x).transpose(1, 2) for x in _cast(query, key, value))
        options: dict[str, Any] = {"softmax_scale": scaling, "dropout_p": dropout, "version": version}
        if s_aux is not None:
            options["sinks"] = s_aux
        if softcap is not None:
            options["score_mod"] = score_mods.softcap(softcap)
        dense = None
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            options |= _without_mask(q, k, causal, sliding_window)
        elif attention_mask.dtype != torch.int32:
            if attention_mask.dtype == torch.bool and softcap is None and position_bias is None:
                shown = _kept(flashzoo.BlockMask.from_dense, attention_mask)
                return flashzoo.attention(q, k, v, block_mask=shown, **options), None
            dense = attention_mask
        else:
            said = read(attention_mask)
            options |= {"causal": said.causal, "window_size": said.window}
            if isinstance(said, Used):
                _refuse_lengths("a cache", others)  # attention holds their number to the batch's
                options["seqused_k"] = said.used
            elif isinstance(said, Plain):
                k, v = _seen(k, v, said)
            elif position_bias is not None:
                dense = _kept(_shown, attention_mask, _sizes(query, key))
                options |= {"causal": False, "window_size": None}
            else:
                if isinstance(said, Padded):
                    _refuse_lengths("a padded batch", others)
                    options |= {"cu_seqlens_k": said.cu_seqlens_k, "seqused_k": said.used}
                return _packed(q, k, v, options | {"cu_seqlens_q": said.cu_seqlens_q}, others), None
        if position_bias is not None or dense is not None:
            _refuse_lengths("what is added to scores", others)
            given = (softcap, position_bias, dense)
            return _added(q, k, v, options, given, _sizes(query, key)), None  # pyright: ignore[reportCallIssue]
        if others.get("cu_seq_lens_q") is not None:
            return _packed(q, k, v, options, others), None
        return flashzoo.attention(q, k, v, **options), None

    return attention


def _sizes(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """Batch, heads, queries and keys, those that are room in a cache too."""
    return *query.shape[:3], key.shape[2]  # pyright: ignore[reportReturnType]


def _refuse(others: dict[str, Any]) -> None:
    for name in [name for name in others if name in _REFUSED]:
        x, why = others[name], _REFUSED[name]
        if x is not None and x is not False:
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


def _by_columns(x: Tensor) -> Tensor:
    """Copied where columns of the head dim aren't neighbours: what a convolution along tokens gives, as Inkling has."""
    return x if x.stride(-1) == 1 else x.contiguous()


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


@torch.compiler.disable  # functions on scores that read tensors are made outside of graphs
def _added(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    given: tuple[float | None, Tensor | None, Tensor | None],
    sizes: tuple[int, int, int, int],
) -> Tensor:
    """Attention with softcap, position_bias and a dense mask, in this order, each where it is given.

    Args:
        given: these three.
        sizes: what they spread to: batch, heads, and how many queries and keys there are, whether seen or not.
    """
    softcap, *added = given
    read = []
    for name, x in zip(("position_bias", "attention_mask"), added, strict=True):
        if x is None:
            continue
        if not x.is_floating_point() and not (name == "attention_mask" and x.dtype == torch.bool):
            raise flashzoo.UnsupportedError(
                f"attn_implementation={NAME!r}: {name} must be {'bool or ' if name == 'attention_mask' else ''}"
                f"floating-point where it has 4 dimensions, got {x.dtype} {tuple(x.shape)}"
            )
        if x.ndim == 4 and not len(x):  # what was said in a mask of no rows, with something of the model's added
            raise flashzoo.UnsupportedError(
                f"attn_implementation={NAME!r}: {name} must be what the mask's function made, got that with what the "
                "model's layers add to masks, as BEiT's do: take 'sdpa'"
            )
        if x.ndim != 4 or any(size not in (1, wanted) for size, wanted in zip(x.shape, sizes, strict=True)):
            raise ValueError(f"{name} must spread to {sizes}, (batch, heads, queries, keys), got {tuple(x.shape)}")
        read.append(x)
    how: dict[str, Any] = {**options, "score_mod": _score_mod(softcap, tuple(read))}
    return flashzoo.attention(q, k, v, **how)


def _score_mod(softcap: float | None, read: tuple[Tensor, ...]) -> flashzoo.ScoreMod:
    """What caps scores, adds numbers and masks: traced once for tensors of these dtypes that spread so."""
    which = (softcap, *((x.dtype, *(size == 1 for size in x.shape)) for x in read))
    if which not in _texts:

        def scored(score: Tensor, *at: Tensor) -> Tensor:
            score = score if softcap is None else softcap * torch.tanh(score / softcap)
            for x in read:
                found = x[tuple(0 if size == 1 else i for size, i in zip(x.shape, at, strict=True))]
                if x.dtype == torch.bool:
                    score = torch.where(found, score, -torch.inf)
                else:
                    score = torch.where(found <= torch.finfo(x.dtype).min, -torch.inf, score + found)
            return score

        _texts[which] = flashzoo.ScoreMod(scored).text
    return flashzoo.ScoreMod.of_parts(_texts[which], read)


def _shown(mask: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """What a mask of packed sequences shows, dense, `(batch, 1, queries, keys)`."""
    batch, _, queries, keys = sizes
    said = read(mask)
    i, j = (torch.arange(n, device=mask.device) for n in (queries, keys))
    if isinstance(said, Packed):
        rows = torch.arange(batch * queries, device=mask.device)
        number = torch.searchsorted(said.cu_seqlens_q[1:], rows, right=True).view(batch, 1, queries)
        shown, ahead = number[..., None] == number[..., None, :], j - i[:, None]
    else:
        assert isinstance(said, Padded)
        first_q, end_q, first, end = (
            (cu[at : 3 * batch : 3] - n * torch.arange(batch, device=mask.device))[:, None, None, None]
            for cu, n in ((said.cu_seqlens_q, queries), (said.cu_seqlens_k, keys))
            for at in (1, 2)
        )
        i = i[:, None]
        shown = (first_q <= i) & (i < end_q) & (first <= j) & (j < end)
        ahead = (j - end) - (i - end_q)
    left, right = said.window
    if left is not None:
        shown = shown & (ahead >= -left)
    return shown if right is None else shown & (ahead <= right)


def _kept(make: Callable, mask: Tensor, *how: Any) -> Any:
    """What this makes of a mask, the same for all layers that it is given to."""
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()  # the memory of a graph is its own
    if torch.compiler.is_compiling() or mask.is_inference() or capturing:  # and of these no changes are counted
        return make(mask, *how)
    stream = torch.cuda.current_stream(mask.device).cuda_stream if mask.is_cuda else None
    now = make, how, mask._version, mask.data_ptr(), stream
    then, made = _made.get(mask, (None, None))
    if then != now:
        made = make(mask, *how)
        _made[mask] = now, made
    return made
