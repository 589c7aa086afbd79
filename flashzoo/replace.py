"""`replace_sdpa` and `install`: calls of torch's `scaled_dot_product_attention`, wherever they are, go through
the registry.

1. A `TorchFunctionMode` sees every function of torch that is called inside of it, in its own thread, and changes this
   one alone. Nothing is patched: where the mode ends, so does its effect.
2. What torch's arguments mean is said in `attention`'s, exactly, or the call is torch's as it was. torch aligns
   `is_causal` top-left: with fewer queries than keys the last keys are cut off, with more it is a window.
3. A mask that says of each sequence which keys it sees sorts these to the front, `seqused_k` of them; any other boolean
   mask becomes a block mask. Neither waits for the device. What was made of a mask is kept with it, for the next layer.
   A mask of numbers is read where it lies, by a function on scores that adds it.
4. Each call is counted, with who answered and why; but for those that are traced, as by `torch.compile`.
"""

from __future__ import annotations

import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from flashzoo.call.api import attention, planned_call, run_planned
from flashzoo.call.check import DTYPE_NAMES
from flashzoo.call.operands import Operands
from flashzoo.call.plan import Plan
from flashzoo.masks.block_mask import BlockMask
from flashzoo.registry import UnsupportedError, check_known
from flashzoo.scores.mod import ScoreMod
from flashzoo.transforms import transforming

TORCH = "torch"
"""Who answers a call that no version takes."""
KEPT_MASKS = 8
"""Of how many masks that are still there what was made of them is kept."""
MOST_KINDS = 4096
"""Kinds of call that are told apart: a model that writes has another length at every step."""
OTHERS = "calls of further kinds"


class SdpaCall(NamedTuple):
    """A kind of call that was seen, and what became of it.

    Attributes:
        asked: shapes, dtype and the arguments that were not at their default, in words.
        answered_by: the version, or `"torch"` where it fell back.
        why: the reason where it fell back; else what was made of a mask, or nothing.
        count: how many such calls there were.
    """

    asked: str
    answered_by: str
    why: str
    count: int

    def __str__(self) -> str:
        return f"{self.count:5} x {self.answered_by:<12} {self.asked}{f': {self.why}' if self.why else ''}"


class _NotOurs(Exception):
    """A call that is left to torch, and why."""


class Replacement(TorchFunctionMode):
    """What `replace_sdpa` enters: while it is, `scaled_dot_product_attention` of its thread is answered by a version.

    Args:
        version: as in `flashzoo.attention`.
    """

    def __init__(self, version: str = "auto") -> None:
        super().__init__()
        check_known(version)  # a name that is not known is an error here, and later a reason to fall back
        self.version = version
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._masks: dict[tuple, tuple[Any, int, Any]] = {}

    @property
    def calls(self) -> tuple[SdpaCall, ...]:
        """The kinds of call that were seen, in the order of their first."""
        return tuple(SdpaCall(*key, count) for key, count in self._seen.items())

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls)) or "no call of scaled_dot_product_attention"

    def __enter__(self) -> Replacement:
        global _latest
        _latest = self
        super().__enter__()
        return self

    def __torch_function__(
        self,
        func: Callable,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        # While a mode handles a function it does not see what that calls: of layers attention, and of a backward pass
        # what checkpoints compute again.
        if func is multi_head_attention_forward:
            return _with_globals(func, has_torch_function=_no, scaled_dot_product_attention=self._attend)(
                *args, **kwargs
            )
        if func in _BACKWARD and not is_compiling() and all(kind in (Tensor, nn.Parameter) for kind in types):
            TorchFunctionMode.__enter__(self)  # as which it is no later than it was
            try:
                return _BACKWARD[func](*args, **kwargs)
            finally:
                self.__exit__(None, None, None)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        how = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        how |= {"scale": scale, "enable_gqa": enable_gqa}
        try:
            q, k, v = _inputs(query, key, value, **how)
            mask = attn_mask
            if mask is not None and query.ndim == 3 and mask.ndim > 2:
                if mask.ndim > 3:
                    raise _NotOurs(f"attn_mask of {mask.ndim} dimensions beside a query of 3")
                mask = mask[:, None]
            k, v, options, made = self._said(q, k, v, mask, is_causal, scale)
            options["dropout_p"] = dropout_p
            if dropout_p and "block_mask" in options:
                raise _NotOurs(f"dropout_p={dropout_p} beside a mask of pairs, which `standard` alone takes")
            # what is traced is planned when the graph runs, and not counted
            planned = None if is_compiling() else _planned(q, k, v, self.version, options)
        except _NotOurs as reason:
            self._count(query, key, how, TORCH, reason.args[0])
            return scaled_dot_product_attention(query, key, value, **how)
        if planned is None:
            out, who = attention(q, k, v, version=self.version, **options), ""
        else:
            (out, _), who = run_planned(*planned, q, k, v), planned[0].spec.name
        out = out.transpose(1, 2)
        self._count(query, key, how, who, made)
        return out if query.ndim == 4 else out[:, 0]

    def _said(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, dict[str, Any], str]:
        """k, v and the options of `attention` that mean what torch's arguments do, and what was made of a mask."""
        options: dict[str, Any] = {"softmax_scale": scale}
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        if attn_mask is not None:
            return self._masked(q, k, v, attn_mask, options)
        if not is_causal:
            return k, v, options, ""
        if seqlen_q > seqlen_k:  # query i sees the keys up to i
            return k, v, options | {"window_size": (None, seqlen_q - seqlen_k)}, "is_causal top-left, by a window"
        cut = "" if seqlen_q == seqlen_k else "is_causal top-left, without the keys that nothing sees"
        return k[:, :seqlen_q], v[:, :seqlen_q], options | {"causal": True}, cut

    def _masked(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Any], str]:
        batch, seqlen_q, heads, _ = q.shape
        sizes = (batch, heads, seqlen_q, k.shape[1])
        of_last = zip(mask.shape, sizes[4 - mask.ndim :], strict=False)
        if mask.ndim not in (2, 3, 4) or any(size not in (1, wanted) for size, wanted in of_last):
            raise _NotOurs(f"attn_mask of shape {tuple(mask.shape)} does not spread to {sizes}")
        mask = mask[(None,) * (4 - mask.ndim)]
        if mask.dtype != torch.bool:
            return k, v, options | {"score_mod": _added(q, mask)}, "attn_mask as a score_mod that adds it"
        shared = [size == 1 or not stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
        if shared[1] and shared[2]:
            order, used = self._kept(mask, sizes, _keys_first)
            k, v = (torch.take_along_dim(x, order[..., None, None], 1) for x in (k, v))
            return k, v, options | {"seqused_k": used}, "attn_mask of keys as seqused_k, its keys in front"
        return k, v, options | {"block_mask": self._kept(mask, sizes, _block_mask)}, "attn_mask as a block_mask"

    def _kept(self, mask: Tensor, sizes: tuple[int, ...], make: Callable) -> Any:
        """What `make` makes of a mask: kept while the same tensor, unchanged, comes again on the same stream."""
        if is_compiling() or mask.is_inference():  # of which changes are not counted
            return make(mask, sizes)
        stream = None
        if mask.is_cuda:
            if torch.cuda.is_current_stream_capturing():  # the memory of a graph is its own
                return make(mask, sizes)
            stream = torch.cuda.current_stream(mask.device).cuda_stream
        base = mask if mask._base is None else mask._base
        which = (id(base), mask.data_ptr(), mask.stride(), mask.shape, sizes, make, stream)
        alive, version, made = self._masks.get(which, (lambda: None, -1, None))
        if alive() is not base or version != mask._version:
            made = make(mask, sizes)
            self._masks = {at: kept for at, kept in self._masks.items() if kept[0]() is not None}
            while len(self._masks) >= KEPT_MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[which] = (weakref.ref(base), mask._version, made)
        return made

    def _count(self, query: Tensor, key: Tensor, how: dict[str, Any], who: str, why: str) -> None:
        if is_compiling():
            return
        if not isinstance(query, Tensor) or not isinstance(key, Tensor):
            asked = f"query {type(query).__name__}, key {type(key).__name__}"
        else:
            shapes = f"query {_shape(query)}, key {_shape(key)}, "
            asked = shapes + DTYPE_NAMES.get(query.dtype, str(query.dtype))
        for name, value in how.items():
            if isinstance(value, Tensor):
                asked += f", {name} {_shape(value)}"
            elif value:
                asked += f", {name}={value}"
        kind = asked, who, why
        if kind not in self._seen and len(self._seen) >= MOST_KINDS:
            kind = OTHERS, who, why
        self._seen[kind] += 1


_latest: Replacement | None = None
_installed: Replacement | None = None


def replace_sdpa(version: str = "auto") -> Replacement:
    """`with flashzoo.replace_sdpa() as calls:` has every `torch.nn.functional.scaled_dot_product_attention` inside
    answered by a version of the registry: of `nn.MultiheadAttention`, timm, diffusers, or your own.

    Where torch's arguments can't be said in `flashzoo.attention`'s, or no version takes them, the call is torch's as it
    was: dropout beside a mask of queries and keys, masks of numbers under `torch.compile`, tensors that are nested or
    of a subclass, transforms of torch.func. `print(calls)` says which went where, and why. What
    `torch.nn.attention.sdpa_kernel` allows holds for those calls alone: it chooses among torch's own kernels.

    Results differ from torch's by rounding; a query that its mask shows no key gives 0, where the least number of a
    mask's dtype shows none, as -inf does. Dropout drops other elements than torch's does, by a seed that is drawn from
    torch's generator. Under autocast inputs are cast as torch's own function casts them.

    It holds for the thread that enters it, and for backward passes that are begun inside, which activation
    checkpointing needs: begin these inside too. Every call of torch's inside costs about a microsecond more. Inside of
    any mode torch's own layers leave their fast path, beside which `nn.MultiheadAttention` takes no nested tensors.

    Args:
        version: as in `flashzoo.attention`. A call that a named version can't take falls back to torch too, but in a
            graph of `torch.compile`, where it is an error as the graph runs.

    Returns:
        A context manager that yields itself, a `Replacement`: `calls` has what it saw, and it prints them.

    Raises:
        TypeError, ValueError: version is not known.
    """
    return Replacement(version)


def install(version: str = "auto") -> Replacement:
    """As `replace_sdpa`, from here on and until `uninstall`, in this thread. Installed anew it replaces itself.

    Args:
        version: as in `flashzoo.attention`.
    """
    global _installed
    replacement = Replacement(version)
    if _installed is not None:
        uninstall()
    _installed = replacement.__enter__()
    return replacement


def uninstall() -> None:
    """Undoes `install`; nothing where it was not called.

    Raises:
        RuntimeError: another mode of torch's was entered since and is not left, or it was installed in another thread.
    """
    global _installed
    if _installed is None:
        return
    from torch.overrides import _get_current_function_mode

    if _get_current_function_mode() is not _installed:
        raise RuntimeError(
            "uninstall: expected the mode that install() entered to be this thread's innermost, "
            f"got {_get_current_function_mode()!r}: leave that first, or call it in the thread of install()"
        )
    _installed.__exit__(None, None, None)
    _installed = None


def last_calls() -> tuple[SdpaCall, ...]:
    """What the `replace_sdpa` or `install` that was entered last saw: which calls went where, and why."""
    return () if _latest is None else _latest.calls


def _inputs(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, ...]:
    """q, k and v as `attention` takes them, cast as autocast casts torch's. `_NotOurs` where they are none."""
    tensors = {"query": query, "key": key, "value": value, "attn_mask": how["attn_mask"]}
    for name, x in tensors.items():
        if x is not None and type(x) not in (Tensor, nn.Parameter):
            raise _NotOurs(f"{name} is a {type(x).__name__}")
        if x is not None and x.is_nested:  # of layout strided, so of type Tensor, and without a shape
            raise _NotOurs(f"{name} is nested")
        if x is not None and x.layout != torch.strided:
            raise _NotOurs(f"{name} is of layout {x.layout}")
        if x is not None and x.is_meta:
            raise _NotOurs(f"{name} has no data")
    if not 0 <= how["dropout_p"] < 1:
        raise _NotOurs(f"dropout_p={how['dropout_p']}")
    if how["attn_mask"] is not None and how["is_causal"]:
        raise _NotOurs("attn_mask beside is_causal")
    if not is_compiling() and transforming():
        raise _NotOurs("a transform of torch.func or forward-mode AD is active")
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim or 0 in (*query.shape, *key.shape):
        raise _NotOurs(f"dimensions {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}")
    if query.ndim == 4 and not how["enable_gqa"] and query.shape[1] != key.shape[1]:
        raise _NotOurs("as many heads of query as of key are expected without enable_gqa")
    if query.shape[0] != key.shape[0] or key.shape[:-1] != value.shape[:-1]:
        raise _NotOurs("sizes that are broadcast")
    q, k, v = ((x if x.ndim == 4 else x[:, None]).transpose(1, 2) for x in (query, key, value))
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def _shape(x: Tensor) -> str:
    """In words: a nested tensor of layout strided has none."""
    return f"nested, of {x.size(0)}" if x.is_nested and x.layout == torch.strided else str(tuple(x.shape))


def _planned(q: Tensor, k: Tensor, v: Tensor, version: str, options: dict[str, Any]) -> tuple[Plan, Operands]:
    """The call, planned. `_NotOurs` where no version answers it, or the arguments are none."""
    try:
        return planned_call(q, k, v, False, version, options)
    except UnsupportedError as error:
        call, *reasons = str(error).splitlines()
        raise _NotOurs("; ".join([call, *(x.strip() for x in reasons if x.startswith(" "))])) from error
    except (TypeError, ValueError) as error:
        raise _NotOurs(str(error).splitlines()[0]) from error


def _added(q: Tensor, mask: Tensor) -> ScoreMod:
    """A function on scores that adds a mask of four dimensions, with its gradient. `_NotOurs` where it is none."""
    if is_compiling():
        raise _NotOurs("attn_mask of numbers in a graph, outside of which a function on scores is made")
    if mask.is_floating_point() and torch.is_autocast_enabled(q.device.type) and mask.dtype != torch.float64:
        mask = mask.to(q.dtype)
    if mask.dtype not in (q.dtype, torch.float32):
        raise _NotOurs(f"attn_mask of {mask.dtype} beside {q.dtype}")
    shape, least = tuple(mask.shape), torch.finfo(mask.dtype).min

    def added(score: Tensor, *at: Tensor) -> Tensor:
        found = mask[tuple(0 if size == 1 else i for size, i in zip(shape, at, strict=True))]
        return torch.where(found <= least, -torch.inf, score + found)

    return ScoreMod.of(added)


def _keys_first(mask: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of a mask of keys their order, those that are seen first, int64 `(batch, seqlen_k)`, and how many these are."""
    seen = mask[:, 0, 0].expand(sizes[0], sizes[3])
    order = torch.argsort((~seen).to(torch.uint8), dim=1, stable=True)
    return order, seen.sum(1, dtype=torch.int32)


def _block_mask(mask: Tensor, sizes: tuple[int, ...]) -> BlockMask:
    shared = [size == 1 or not stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    for dim in (0, 1):
        mask = mask[(slice(None),) * dim + (slice(0, 1),)] if shared[dim] else mask
    return BlockMask.from_dense(mask.expand(*mask.shape[:2], *sizes[2:]))


def _with_globals(function: Any, **names: Any) -> Callable:
    """The same function of Python, where these names of its module mean something else."""
    there = {**function.__globals__, **names}  # not by |, which the compiler of torch 2.15 can't trace
    twin = types.FunctionType(function.__code__, there, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _no(*_: Any) -> bool:
    return False


def _tensors_backward(
    x: Tensor, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """`Tensor.backward`."""
    _backward(x, gradient, retain_graph, create_graph, inputs=inputs)


_backward = _with_globals(torch.autograd.backward, has_torch_function=_no)
_BACKWARD: dict[Callable, Callable] = {
    Tensor.backward: _tensors_backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _with_globals(torch.autograd.grad, has_torch_function=_no),
}
"""By torch's functions that begin a backward pass the same, which ask no mode."""
