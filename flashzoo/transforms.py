"""Calls under forward-mode AD and the transforms of `torch.func`:
found, and refused but where a version is right there.

A kernel reads memory, in which there is neither the tangent of a dual tensor nor the batch of `torch.func.vmap`: it
would lose the one in silence and fail at the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flashzoo.call.problem import Problem
from flashzoo.registry import UnsupportedError, versions
from flashzoo.spec import TRANSFORMS, Spec

functorch_active = torch._C._are_functorch_transforms_active


def transforming() -> bool:
    """Whether any tensor may be under a transform now; what every call asks, so it looks at none."""
    return forward_ad._current_level >= 0 or functorch_active()


def check_transforms(tensors: Mapping[str, Tensor | None], problem: Problem, spec: Spec) -> None:
    """UnsupportedError where the version, which answers the problem, is not right under what these
    tensors are under."""
    under = {name: kinds for name, x in tensors.items() if x is not None and (kinds := transforms_of(x))}
    found = frozenset().union(*under.values())
    # where torch.func is active it refuses our autograd functions, of any tensor
    if problem.grad and (found or functorch_active()):
        found |= {"grad"}
    missing = found - _right_under(spec, problem)
    if missing:
        got = f"{', '.join(under)} under it" if under else "inputs that require grad"
        able = [s.name for s in versions().values() if not s.unsupported(problem) and found <= _right_under(s, problem)]
        would = (
            f"versions that would: {', '.join(able)}"
            if able
            else "no registered version would: call it outside of that"
        )
        raise UnsupportedError(f"version {spec.name!r} does not support {_in_words(missing)}, got {got}\n{would}")


def refuse_transforms(what: str, **tensors: Tensor | None) -> None:
    """NotImplementedError where one of these is under a transform; `what` is right under none."""
    for name, x in tensors.items():
        found = frozenset() if x is None else transforms_of(x)
        if found:
            raise NotImplementedError(
                f"{what} does not support {name} under {_in_words(found)}: call it outside of that"
            )


def refuse_batched(*gradients: Tensor | None) -> None:
    """NotImplementedError where one of these stands for a batch that is not among its dimensions."""
    for x in gradients:
        if x is not None and is_legacy_batchedtensor(x):
            raise NotImplementedError(
                "a kernel's backward pass does not support torch.autograd.grad(is_grads_batched=True): "
                "call grad for each gradient, or version='standard' or 'sdpa'"
            )


def refuse_traced_forward_ad() -> None:
    """NotImplementedError where a traced call may lose tangents:
    whether there are any, what is traced can't be asked."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"a traced flashzoo.attention does not support {TRANSFORMS['jvp']}: call it outside of that, or untraced"
        )


def transforms_of(x: Tensor) -> frozenset[str]:
    """What a tensor is under: names in `TRANSFORMS`."""
    if is_compiling():  # behind a graph break this is traced alone, and can't be
        refuse_traced_forward_ad()
    found = set()
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        found.add("jvp")
    if functorch_active():
        from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_get_level
        from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

        kinds = {
            interpreter.level(): interpreter.key().name.lower() for interpreter in retrieve_all_functorch_interpreters()
        }
        while is_functorch_wrapped_tensor(x):
            found.add(kinds[maybe_get_level(x)])
            x = get_unwrapped(x)
    return frozenset(found)


def _right_under(spec: Spec, problem: Problem) -> frozenset[str]:
    """Nothing in FP8, through whose rounding no tangent goes."""
    return frozenset() if problem.numerics in ("fp8", "e4m3") else spec.transforms


def _in_words(kinds: Iterable[str]) -> str:
    return " and ".join(TRANSFORMS[kind] for kind in TRANSFORMS if kind in kinds)
