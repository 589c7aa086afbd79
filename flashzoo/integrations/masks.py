"""What a mask of transformers says, as flashzoo's arguments: `mask_of` makes it, once in a forward pass, and `read` is
what each layer does.

transformers hands a mask through whatever lies between as it is, if it is a tensor of four dimensions. So this is one,
int32, of shape `(rows, kind, window, numbers)`: what the host knows is in its sizes, and what the device knows in its
numbers, which no host reads. A model whose layers would take it, or the dense one, for something else is refused: one
that doesn't ask for the attention interface, and one that adds keys to masks.

    rows     of numbers: 3 for Padded, none for Plain, else 1
    kind     1 + causal + 2 * place in `_KINDS`
    window   1, or 2 + how many keys are seen to the left, and so many to the right, unless causal
    numbers  Plain: as many as there are keys. Used: how many keys each of the batch uses. Packed: where sequences
             begin. Padded: where queries of sequences begin, where keys do, and how many keys are used
A row begins at a multiple of 16 bytes, as tensors of their own do: so that of Padded has empty sequences at its end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_compiling
from transformers import PreTrainedModel, masking_utils

import flashzoo

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class _Band:
    causal: bool
    window: Window


@dataclass(frozen=True)
class Plain(_Band):
    """The last query sees the last of so many keys; behind these there may be room."""

    keys: int


@dataclass(frozen=True)
class Used(_Band):
    """Of each of the batch so many keys are used, int32 `(batch,)`."""

    used: Tensor


@dataclass(frozen=True)
class Packed(_Band):
    """The batch's rows, behind one another, are sequences that begin here, int32 `(sequences + 1,)`."""

    cu_seqlens_q: Tensor


@dataclass(frozen=True)
class Padded(_Band):
    """The same where keys have lengths of their own. Padding is sequences too, which use no key."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    used: Tensor


Said = Plain | Used | Packed | Padded
_KINDS = (Plain, Used, Packed, Padded)
_ROWS = (0, 1, 1, 3)
_SAID = "_zoo_said"


class _Sizes(NamedTuple):
    """Where queries and keys are: query i is at position `q_offset + i`, key j at `kv_offset + j`."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int


class _Rule(NamedTuple):
    """A mask function, taken apart: how many positions are seen to the left and to the right, None for all of them,
    and which sequence each of the batch's positions is of."""

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None

    @property
    def causal(self) -> bool:
        """Nothing is seen to the right."""
        return self.right == 0


def read(mask: Tensor) -> Said:
    """What `mask_of` made. ValueError where it did not make it, but somebody an int32 mask of elements.

    It stays with the mask, which every layer reads, but in a graph, and where its numbers would be copies: those are of
    the stream, or of the CUDA graph, that made them, as the mask itself need not be.
    """
    if is_compiling() or (mask.stride(3) != 1 and mask.shape[3] > 1):
        return _read(mask)
    said = getattr(mask, _SAID, None)
    if said is None:
        said = _read(mask)
        setattr(mask, _SAID, said)
    return said


def _read(mask: Tensor) -> Said:
    rows, kind, window, numbers = mask.shape
    place, causal = (kind - 1) // 2, bool((kind - 1) % 2)
    if place >= len(_KINDS) or rows != _ROWS[place]:
        raise ValueError(f"attention_mask must be bool where it is one of elements, got {mask.dtype} {mask.shape}")
    left = None if window == 1 else window - 2
    band = (causal, (left, 0 if causal else left))
    found = _KINDS[place]
    if found is Plain:
        return Plain(*band, numbers)
    values = mask[0, 0, 0].contiguous()
    if found is Used:
        return Used(*band, values)
    if found is Packed:
        return Packed(*band, values)
    return Padded(*band, values, mask[1, 0, 0].contiguous(), mask[2, 0, 0, :-1].contiguous())


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """A mask function of transformers' `AttentionMaskInterface`.

    Query i is at position `q_offset + i`, key j at `kv_offset + j`; `mask_function` says which position sees which, and
    attention_mask, bool `(batch, positions)`, which are there. Reads from the device once or twice.

    Returns:
        int32, for `read`; or bool `(batch, 1, q_length, kv_length)` where flashzoo's arguments can't say it.

    Raises:
        flashzoo.UnsupportedError: the model that asks, by its configuration, would not hand it to an attention function
            as it is.
    """
    why_not = _why_not(type(others.get("config")))
    if why_not is not None:
        raise flashzoo.UnsupportedError(why_not)
    sizes = _Sizes(batch_size, q_length, kv_length, q_offset, kv_offset)
    if is_compiling() and attention_mask is None and mask_function is masking_utils.causal_mask_function:
        found = _unpadded(_Rule(right=0), sizes, device)
        if found is not None:
            return found
    return _looked_at(mask_function, attention_mask, device, sizes, others)  # pyright: ignore[reportCallIssue]


_ADD_KEYS = ("deepseek_v4",)
"""Types of models whose layers add keys, and to masks what is seen of these."""


@assume_constant_result
def _why_not(config: type) -> str | None:
    """`_why_not_at_first`, which a graph is told and does not look into."""
    return _why_not_at_first(config)


@lru_cache
def _why_not_at_first(config: type) -> str | None:
    """Why models of this configuration can't be given a mask; None where they can, and where no model is known.

    What doesn't ask for the attention interface has in its module an attention of its own, and not the interface's
    name: what transformers itself goes by, in the source, where an implementation is set.
    """
    name = getattr(config, "model_type", "")
    if name in _ADD_KEYS:
        return f"{name} adds keys to masks in its layers, and no version knows what is seen of these: take 'eager'"
    models = (model for model in _below(PreTrainedModel) if getattr(model, "config_class", None) is config)
    modules = {model.__module__: getattr(sys.modules.get(model.__module__), "__dict__", {}) for model in models}
    if not modules or not all(map(_has_its_own, modules, modules.values())):
        return None
    return f"{name} has an attention of its own, which does not ask for transformers' interface: take 'eager'"


def _below(of: type) -> Iterator[type]:
    for each in of.__subclasses__():
        yield each
        yield from _below(each)


def _has_its_own(module: str, names: dict[str, Any]) -> bool:
    """Whether a module has an attention, and not the interface."""
    own = (x for name, x in names.items() if "Attention" in name and getattr(x, "__module__", None) == module)
    return "ALL_ATTENTION_FUNCTIONS" not in names and any(isinstance(x, type) and issubclass(x, nn.Module) for x in own)


@torch.compiler.disable
def _looked_at(
    mask_function: Callable,
    attention_mask: Tensor | None,
    device: torch.device | str,
    sizes: _Sizes,
    others: dict[str, Any],
) -> Tensor:
    """What depends on numbers that lie on the device, or on closures: outside of a graph."""
    rule = _taken_apart(mask_function)
    if rule is None or rule.right not in (0, rule.left):  # a window is shut on the right, or as wide there
        found = None
    elif rule.sequences is not None:
        found = _packed(rule, rule.sequences) if attention_mask is None else None
    else:
        found = _unpadded(rule, sizes, device)
        if found is not None and attention_mask is not None:
            found = _padded(rule, sizes, attention_mask, found)
    if found is not None:
        return found
    others = others | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    how = {"mask_function": mask_function, "attention_mask": attention_mask, "device": device}
    dense = masking_utils.sdpa_mask(**sizes._asdict(), **how, **others)
    assert dense is not None  # nothing may be skipped
    return dense.expand(sizes.batch_size, -1, sizes.q_length, sizes.kv_length)


def _unpadded(rule: _Rule, sizes: _Sizes, device: torch.device | str) -> Tensor | None:
    """What queries see where every position is there; None where they are not the last ones, which causal and windows
    are aligned by."""
    batch_size, q_length, kv_length, q_offset, kv_offset = sizes
    if isinstance(q_offset, Tensor) and not rule.causal:
        q_offset = int(q_offset)
    if isinstance(q_offset, Tensor) and q_length == 1:  # a step of generation, which waits for nothing
        used = (q_offset.to(torch.int32) + (1 - kv_offset)).expand(batch_size)
        return _made(Used, rule, kv_length, used)
    last = int(q_offset) + q_length - kv_offset
    if rule.causal and q_length == 1 and last < kv_length:  # the same sizes in every step
        return _made(Used, rule, kv_length, torch.full((batch_size,), last, dtype=torch.int32, device=device))
    if not rule.causal:
        if rule.left is not None and last != kv_length:
            return None
        last = kv_length
    elif not q_length <= last <= kv_length:
        return None
    return _made(Plain, rule, last, torch.empty(0, last, dtype=torch.int32, device=device))


def _padded(rule: _Rule, sizes: _Sizes, attention_mask: Tensor, unpadded: Tensor) -> Tensor | None:
    """The same where some positions are padding; None where these lie between others."""
    batch_size, q_length, kv_length, q_offset, kv_offset = sizes
    there = attention_mask[:, kv_offset : kv_offset + kv_length]
    there = torch.nn.functional.pad(there, (0, kv_length - there.shape[1]))
    last = torch.as_tensor(q_offset, device=there.device) + (q_length - kv_offset)
    if not rule.causal:
        last = last.new_full((), kv_length)
    position = torch.arange(kv_length, device=there.device)
    there = there & (position < last)
    count = there.sum(1)
    first = torch.where(there, position, kv_length).amin(1).minimum(last)
    end = torch.where(there, position + 1, 0).amax(1).maximum(first)
    holes, padding = torch.stack([(end - first != count).any(), (count != last).any()]).tolist()
    if not padding:
        return unpadded
    if holes:
        return None
    if rule.causal or rule.left is not None:  # queries see by their own position, at which they may be padding
        q_first, q_end = ((x - last + q_length).clamp(0, q_length) for x in (first, end))
    else:
        q_first, q_end = torch.zeros_like(first), torch.full_like(end, q_length)
    none = torch.zeros_like(first)
    cu_q, cu_k = (
        torch.cat(
            [
                (torch.stack([none, x, y], 1) + torch.arange(batch_size, device=x.device)[:, None] * rows).flatten(),
                none[:1] + batch_size * rows,
            ]
        )
        for x, y, rows in ((q_first, q_end, q_length), (first, end, kv_length))
    )
    used = torch.stack([none, end - first, none], 1).flatten()
    spare = -len(cu_q) % 4
    cu_q, cu_k = (torch.cat([cu, cu[-1:].expand(spare)]) for cu in (cu_q, cu_k))
    numbers = [cu_q, cu_k, torch.nn.functional.pad(used, (0, spare + 1))]
    return _made(Padded, rule, kv_length, torch.stack(numbers).to(torch.int32))


def _packed(rule: _Rule, sequences: Tensor) -> Tensor:
    """Sequences behind one another in each of the batch: their numbers `(batch, seqlen)` change where one begins."""
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([sequences.numel()])]).to(torch.int32)
    return _made(Packed, rule, sequences.shape[1], cu_seqlens)


def _made(kind: type, rule: _Rule, kv_length: int, numbers: Tensor) -> Tensor:
    """A mask for `read`, its numbers `(n,)`, or rows of them."""
    window = 1 if rule.left is None or rule.left >= kv_length - 1 else 2 + rule.left
    code = 1 + rule.causal + 2 * _KINDS.index(kind)
    rows = (numbers if numbers.ndim == 2 else numbers[None]).contiguous()
    return rows[:, None, None].expand(-1, code, window, -1)


# Mask functions are closures of transformers' own. One is known by its code, and by what it holds: any other, and any
# of a transformers that has changed them, is not, and then its mask is made dense.
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_SLIDING_BOTH = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_AND = masking_utils.and_masks().__code__
_NUMBERS = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_OF_POSITIONS = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # absent in 5.17
_POSITIONS = _OF_POSITIONS and _OF_POSITIONS(len, torch.zeros(1, 1)).__code__


def _taken_apart(function: Any) -> _Rule | None:
    """What a mask function says; None where that is not known."""
    if function is masking_utils.causal_mask_function:
        return _Rule(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return _Rule()
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    held = {} if code is None else {name: x.cell_contents for name, x in zip(code.co_freevars, cells, strict=True)}
    if code is _SLIDING:
        return _Rule(left=held["sliding_window"] - 1)
    if code is _SLIDING_BOTH:
        return _Rule(held["sliding_window"], held["sliding_window"])
    if code is _NUMBERS:
        return _Rule(sequences=held["packed_sequence_mask"])
    if (
        code is not None and code is _POSITIONS
    ):  # within a sequence they rise by one, so that distances are those of places
        return _taken_apart(held["mask_function"])
    return _of_all(held["mask_functions"]) if code is _AND else None


def _of_all(functions: tuple[Any, ...]) -> _Rule | None:
    rules = [_taken_apart(function) for function in functions]
    if None in rules:
        return None
    left, right = (
        min((side for rule in rules if (side := getattr(rule, name)) is not None), default=None)
        for name in ("left", "right")
    )
    sequences = [rule.sequences for rule in rules if rule is not None and rule.sequences is not None]
    return _Rule(left, right, sequences[0] if sequences else None) if len(sequences) < 2 else None
