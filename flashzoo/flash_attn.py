"""flash-attention's functions under their own names: `from flashzoo.flash_attn import flash_attn_func` is all.

Names, argument order, defaults and what is returned are those of the package flash-attn 2.8
(github.com/Dao-AILab/flash-attention). What `flashzoo.attention` has no argument for is an error that names it, where
it is not at its default.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

import flashzoo
from flashzoo import score_mods

# quoted, or pyright --verifytypes does not know it
Result: TypeAlias = "Tensor | tuple[Tensor, Tensor, Tensor]"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_NOT_TAKEN = {
    "rotary_cos": (None, "turn q and k before the call"),
    "rotary_sin": (None, "turn q and k before the call"),
    "cache_batch_idx": (None, "k_cache[cache_batch_idx] is a cache of its own, page_table another way to share rows"),
    "cache_leftpad": (None, "a cache is used from its first key on"),
    "num_splits": (0, "how keys are split is flashzoo's to choose; with flashzoo.use('v2') they aren't, without pages"),
}
"""Arguments that are taken at their default alone: that, and what is lacking or to be done instead."""


def _refuse(function: str, **given: Any) -> None:
    """UnsupportedError where one is not at the only value that is taken."""
    for name, value in given.items():
        default, why = _NOT_TAKEN[name]
        taken = value is None if default is None else not isinstance(value, Tensor) and value == default
        if not taken:
            got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise flashzoo.UnsupportedError(f"{function}: {name} must be {default!r}, got {got}: {why}")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    return_attn_probs: bool,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool,
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    **lengths: Any,
) -> Result:
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    options |= {"deterministic": deterministic, "dropout_p": dropout_p, **lengths}
    found = _scored(q, k, v, return_attn_probs, softcap, alibi_slopes, options)
    # flash-attention has probabilities only where it drops some, for its own tests
    return (*found, q.new_empty(0)) if isinstance(found, tuple) else found


def _scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    return_lse: bool,
    softcap: float,
    alibi_slopes: Tensor | None,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with flash-attention's functions on scores, where they are asked for."""
    smallest, largest = score_mods.SMALLEST_CAP, score_mods.LARGEST_CAP
    if softcap is True or not isinstance(softcap, (int, float)) or not (softcap == 0 or smallest <= softcap <= largest):
        raise ValueError(f"softcap must be 0, or from {smallest} to {largest}, got {softcap!r}")
    if alibi_slopes is not None:
        how = (return_lse, softcap, alibi_slopes, options)
        return _with_alibi(q, k, v, *how)  # pyright: ignore[reportCallIssue]
    if softcap:
        options["score_mod"] = score_mods.softcap(softcap)
    return flashzoo.attention(q, k, v, return_lse=return_lse, **options)


def _with_alibi(
    q: Tensor, k: Tensor, v: Tensor, return_lse: bool, softcap: float, slopes: Tensor, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    _check_tensors(3, q=q, k=k, v=v)
    if not isinstance(slopes, Tensor) or slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, got {getattr(slopes, 'dtype', type(slopes).__name__)}")
    packed = "cu_seqlens_q" in options
    heads, batch = q.shape[-2], len(options["cu_seqlens_q"]) - 1 if packed else len(q)
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}")
    ahead, by_batch = _ahead(q, k, v, options), slopes.ndim == 2
    capped = score_mods.softcap(softcap) if softcap else None

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score if capped is None else capped(score, b, h, q_idx, kv_idx)
        distance = q_idx - kv_idx if ahead is None else q_idx - kv_idx + ahead[b]
        return score - (slopes[b, h] if by_batch else slopes[h]) * distance.abs()

    return flashzoo.attention(q, k, v, return_lse=return_lse, score_mod=alibi, **options)


def _ahead(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor | None:
    """How many more keys than queries each of the batch, or each sequence, has, int32; None where none has more. In a
    tensor, since a function with another number of its own is another kernel. Lengths are cut off at the tensors' ends,
    as `attention` does."""
    cu_q, cu_k, used = (options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    if cu_k is not None and cu_k is cu_q and q.shape[-3] == k.shape[-3]:
        return None
    pages = options.get("page_table")
    keys = k.shape[1] if pages is None else k.shape[1] * pages.shape[1]
    sequences = len(q) if cu_q is None else len(cu_q) - 1
    for x, more in ((cu_q, 1), (cu_k, 1), (used, 0)):
        if x is not None and (x.device != q.device or len(x) != sequences + more):
            flashzoo.explain(q, k, v, **options)  # raises what is wrong with it by name
    if cu_k is not None:
        used = cu_k.clamp(0, k.shape[0]).diff()
    elif used is not None:
        used = used.clamp(0, keys)
    if cu_q is not None:
        return ((keys if used is None else used) - cu_q.clamp(0, q.shape[0]).diff()).to(torch.int32)
    if used is not None:
        return (used - q.shape[1]).to(torch.int32)
    return None if keys == q.shape[1] else torch.full((len(q),), keys - q.shape[1], dtype=torch.int32, device=q.device)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flashzoo.attention` under flash-attention's arguments.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, of any dtype that `flashzoo.attention` takes.
        k, v: `(batch, seqlen_k, heads_kv, head_dim)`.
        dropout_p: as in `flashzoo.attention`, by a seed that is drawn from torch's generator; other elements are
            dropped than by flash-attention.
        softmax_scale: `1 / sqrt(head_dim)` where None.
        causal, window_size: aligned bottom-right; -1 means no bound on a side.
        softcap: where it is not 0, scaled scores become `softcap * tanh(score / softcap)`.
        alibi_slopes: float32 `(heads,)` or `(batch, heads)`; behind softcap, query i's score of key j is less by
            `slope * |i + seqlen_k - seqlen_q - j|`. It may require grad.
        deterministic: the same gradients in every run.
        return_attn_probs: return LSE too.

    Returns:
        out `(batch, seqlen_q, heads, head_dim)`; with return_attn_probs `(out, lse, empty)`, lse float32
        `(batch, heads, seqlen_q)` in natural log, and an empty tensor in the place of the probabilities that
        flash-attention gives, for its tests, if it drops some. Differentiable once.

    Raises:
        TypeError, ValueError: as `flashzoo.attention`.
        flashzoo.UnsupportedError: an argument is not supported, or no version takes the call; the text names it.
    """
    how = (return_attn_probs, softmax_scale, causal, window_size, deterministic, softcap, alibi_slopes, dropout_p)
    return _attend(q, k, v, *how)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with k and v in one tensor `(batch, seqlen_k, 2, heads_kv, head_dim)`."""
    k, v = _parts("kv", kv, 5, 2)
    how = (return_attn_probs, softmax_scale, causal, window_size, deterministic, softcap, alibi_slopes, dropout_p)
    return _attend(q, k, v, *how)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor `(batch, seqlen, 3, heads, head_dim)`."""
    q, k, v = _parts("qkv", qkv, 5, 3)
    how = (return_attn_probs, softmax_scale, causal, window_size, deterministic, softcap, alibi_slopes, dropout_p)
    return _attend(q, k, v, *how)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of packed sequences.

    Args:
        q: `(total_q, heads, head_dim)`.
        k, v: `(total_k, heads_kv, head_dim)`, or with block_table pages `(pages, page_size, heads_kv, head_dim)` of any
            size, without gradients.
        cu_seqlens_q, cu_seqlens_k: int32 `(sequences + 1,)`, where each sequence begins and the last ends; with
            block_table the differences of the latter are how many keys each has.
        max_seqlen_q, max_seqlen_k: no sequence is longer. No result depends on them.
        alibi_slopes: `(heads,)` or `(sequences, heads)`, by each sequence's own lengths.
        block_table: int32 `(sequences, pages of a sequence)`.

    Returns:
        out `(total_q, heads, head_dim)`; with return_attn_probs `(out, lse, empty)`, lse `(heads, total_q)`.

    Raises:
        TypeError, ValueError, flashzoo.UnsupportedError: as `flash_attn_func`.
    """
    how = (return_attn_probs, softmax_scale, causal, window_size, deterministic, softcap, alibi_slopes, dropout_p)
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        _check_int32("block_table", block_table, 2, "(sequences, pages of a sequence)")
        _check_rows("cu_seqlens_k", cu_seqlens_k, len(cu_seqlens_q), "cu_seqlens_q")
        _check_rows("block_table", block_table, len(cu_seqlens_q) - 1, "cu_seqlens_q")
        lengths |= {"page_table": block_table, "seqused_k": lengths.pop("cu_seqlens_k").diff()}
    return _attend(q, k, v, *how, **lengths)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with k and v in one tensor `(total_k, 2, heads_kv, head_dim)`."""
    k, v = _parts("kv", kv, 4, 2)
    how = (return_attn_probs, softmax_scale, causal, window_size, deterministic, softcap, alibi_slopes, dropout_p)
    return _attend(q, k, v, *how, **_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in one tensor `(total, 3, heads, head_dim)`, of one set of lengths."""
    q, k, v = _parts("qkv", qkv, 4, 3)
    how = (return_attn_probs, softmax_scale, causal, window_size, deterministic, softcap, alibi_slopes, dropout_p)
    return _attend(q, k, v, *how, **_lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Queries on a cache that is not full, into which new keys and values are written first where they are given.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, or with cu_seqlens_q `(total_q, heads, head_dim)`.
        k_cache, v_cache: `(batch, seqlen_cache, heads_kv, head_dim)`, or pages
            `(pages, page_size, heads_kv, head_dim)`, of any size, with block_table. Written in place.
        k, v: `(batch, seqlen_new, heads_kv, head_dim)`, written behind cache_seqlens (`flashzoo.append`).
        cache_seqlens: how much of each sequence's cache is used before: an int for all, or int32 `(batch,)`; all of it
            where None, which does not go with k and v.
        block_table: int32 `(batch, pages of a sequence)`.
        causal, window_size: aligned with the last key that is used, new ones among them.
        softcap, alibi_slopes: as in `flash_attn_func`; seqlen_k is how many keys are used.
        rotary_interleaved: how rotary_cos and rotary_sin would be used.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, num_splits: as they are by default.
        cu_seqlens_q, max_seqlen_q: of packed queries, as FlashAttention-3 has them: int32 `(batch + 1,)`, and that no
            sequence has more. They don't go with k and v.

    Returns:
        out in q's shape; with return_softmax_lse `(out, lse)`, lse float32 `(batch, heads, seqlen_q)`, or
        `(heads, total_q)`.

    Raises:
        TypeError, ValueError: as `flashzoo.attention` and `flashzoo.append`; or k, v and cache_seqlens do not go
            together, or are more than the cache has room for where that is an int. What `attention` refuses is refused
            when k and v are written.
        flashzoo.UnsupportedError: an argument is not supported, or no version takes the call; the text names it.
    """
    refused = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "num_splits": num_splits}
    _refuse("flash_attn_with_kvcache", **refused, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together, got {'v' if k is None else 'k'} alone")
    _check_tensors(3, q=q, **({} if k is None else {"k": k, "v": v}))
    _check_tensors(4, k_cache=k_cache, v_cache=v_cache)
    if max_seqlen_q is not None and cu_seqlens_q is None:
        raise ValueError(f"max_seqlen_q goes with cu_seqlens_q, got {max_seqlen_q!r} alone")
    if cu_seqlens_q is not None:
        _check_int32("cu_seqlens_q", cu_seqlens_q, 1, "(batch + 1,)", 1)
        if q.ndim != 3:
            raise ValueError(f"q must have shape (total_q, heads, head_dim) with cu_seqlens_q, got {tuple(q.shape)}")
    batch, of = (q.shape[0], "q") if cu_seqlens_q is None else (cu_seqlens_q.shape[0] - 1, "cu_seqlens_q")
    if block_table is not None:
        _check_int32("block_table", block_table, 2, "(batch, pages of a sequence)")
        _check_rows("block_table", block_table, batch, of)
    used = cache_seqlens
    if isinstance(used, int):
        room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        room -= 0 if k is None else k.shape[1]
        if isinstance(used, bool) or not 0 <= used <= room:
            raise ValueError(f"cache_seqlens must be from 0 to {room}, what the cache has room for, got {used!r}")
        used = torch.full((max(batch, 0),), used, dtype=torch.int32, device=q.device)
    elif used is not None:
        _check_int32("cache_seqlens", used, 1, "(batch,)")
        _check_rows("cache_seqlens", used, batch, of)
    if k is not None and cu_seqlens_q is not None:
        raise flashzoo.UnsupportedError(
            f"flash_attn_with_kvcache: k and v must be None with cu_seqlens_q, got a tensor {tuple(k.shape)}: "
            "write new keys with flashzoo.append before the call"
        )
    if k is not None and v is not None:
        if used is None:
            raise ValueError("cache_seqlens must say where k and v are written, got None")
        if k_cache.shape[-1] != q.shape[-1]:
            raise ValueError(f"k_cache must have q's head_dim {q.shape[-1]}, got {k_cache.shape[-1]}")
        flashzoo.append(k_cache, v_cache, k, v, used, page_table=block_table)
        used = used + k.shape[1]
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    options |= {"seqused_k": used, "page_table": block_table}
    if cu_seqlens_q is not None:
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    return _scored(q, k_cache, v_cache, return_softmax_lse, softcap, alibi_slopes, options)


def _parts(name: str, packed: Tensor, ndim: int, count: int) -> tuple[Tensor, ...]:
    """q, k and v, or k and v, that lie side by side in the third dimension from the last."""
    _check_tensors(0, **{name: packed})
    if packed.ndim != ndim or packed.shape[-3] != count:
        rows = "total" if ndim == 4 else "batch, seqlen"
        raise ValueError(f"{name} must have shape ({rows}, {count}, heads, head_dim), got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _check_tensors(least: int, **named: Any) -> None:
    """TypeError or ValueError where one is no tensor of so many dimensions or more."""
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim < least:
            raise ValueError(f"{name} must have {least} dimensions or more, got shape {tuple(x.shape)}")


def _check_int32(name: str, x: Any, ndim: int, shape: str, least: int = 0) -> None:
    """TypeError or ValueError by flash-attention's name for what `attention` calls something else."""
    _check_tensors(0, **{name: x})
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be of dtype torch.int32, got {x.dtype}")
    if x.ndim != ndim or x.shape[0] < least:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")


def _check_rows(name: str, x: Tensor, rows: int, of: str) -> None:
    """ValueError where it has not so many, as another argument has."""
    if x.shape[0] != rows:
        raise ValueError(f"{name} must have {rows} rows, as {of} says, got shape {tuple(x.shape)}")


def _lengths(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> dict[str, Any]:
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_int32(name, x, 1, "(sequences + 1,)", 1)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
