"""`attention` for what traces a call, `torch.compile` and `torch.export`:
operators that a graph holds as one node each.

flashzoo::attention           out and lse; records flashzoo::attention_backward
flashzoo::attention_backward  dq, dk and dv, and the gradients of operands that have one

Their arguments are made from `OPTIONS` and `OPERANDS`.

A tracer learns shapes, dtypes and strides from the fakes. The bodies see real tensors, so every version works here as
it does in a plain call, and sizes are looked at only there: a graph with dynamic shapes asks anew for each size.
Outputs have no gaps, their dimensions in the order of those that they belong to (out's in q's), which is what kernels
give as a rule; others are copied. Nothing here is imported, or run, by a call that is not traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from flashzoo.autograd import as_rows, refuse_double_backward
from flashzoo.call.check import check_tensors, described, described_call, fields_of, read_as_batch
from flashzoo.call.forms import check_flags, normalised
from flashzoo.call.operands import DIFFERENTIABLE, OPERANDS, Operands, differentiable_of, seed_on, taken
from flashzoo.call.packed import as_batch
from flashzoo.call.plan import Plan, plan
from flashzoo.call.problem import OPTIONS, Problem
from flashzoo.call.signs import negated
from flashzoo.registry import ARGUMENT, current, requested
from flashzoo.transforms import refuse_traced_forward_ad

NAME, BACKWARD_NAME = "flashzoo::attention", "flashzoo::attention_backward"

Named = dict[str, Any]
"""Arguments of an operator by their names."""

_OPTIONS = {name: f"{option.schema} {name}={option.not_given}" for name, option in OPTIONS.items()}
_PARTS = {
    f"{name}{end}": f"{type_} {name}{end}=None" for name, kind in OPERANDS.items() for end, type_ in kind.parts.items()
}
_TENSORS = {name: part for name, part in _PARTS.items() if part.startswith("Tensor")}
_OTHERS = {name: part for name, part in {**_OPTIONS, **_PARTS}.items() if name not in _TENSORS}
_OTHERS |= {"return_lse": "bool return_lse=False", "version": "str version='auto'"}
_INPUTS = {name: f"Tensor {name}" for name in ("q", "k", "v")}
_FORWARD = {**_INPUTS, **_TENSORS}
"""What is given by position, as autograd wants tensors to be. All else is by name: Inductor keeps code that calls the
operator beyond an upgrade of flashzoo, and where an option more had shifted the others it would ask for another call.
"""
_SAVED = {"dout": "Tensor dout", "dlse": "Tensor? dlse", **_INPUTS, "out": "Tensor out", "lse": "Tensor lse"}
_BACKWARD = {**_SAVED, **_TENSORS}
_DIFFERENTIATED = {name: name for name in _INPUTS}
_DIFFERENTIATED |= {name: f"{name}{OPERANDS[name].differentiated}" for name in DIFFERENTIABLE}
"""What a backward pass has gradients of, in its order, and by which argument it comes."""
_LISTED = {name for name in DIFFERENTIABLE if "[]" in _PARTS[_DIFFERENTIATED[name]]}
"""Those that are several tensors, of which some have one."""
_GRADIENTS = [f"Tensor{'[]' if name in _LISTED else ''} d{name}" for name in _DIFFERENTIATED]
# out lies in the order of the strides that q had when it was traced
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_BY_NAME = [*_OTHERS.values(), "bool grad=False", f"str by='{ARGUMENT}'"]
torch.library.define(
    NAME, f"({', '.join([*_FORWARD.values(), '*', *_BY_NAME])}) -> (Tensor out, Tensor lse)", tags=_TAGS
)
torch.library.define(
    BACKWARD_NAME,
    f"({', '.join([*_BACKWARD.values(), '*', *_OTHERS.values()])}) -> ({', '.join(_GRADIENTS)})",
    tags=_TAGS,
)


@torch.compiler.assume_constant_result
def _requested(version: Any) -> tuple[str, str]:
    """The name that a graph holds, and by whom: what the argument, flashzoo.use() and the environment say
    when it is traced."""
    # a bad one is refused when the graph runs, with the good ones
    return requested(version if isinstance(version, str) else repr(version))


def traced(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, version: str, options: Named) -> tuple[Tensor, Tensor]:
    """`flashzoo.attention` of what is being traced: out and lse, which is one only where it is asked for."""
    # What the operator's schema would convert, or refuse in words of its own.
    check_tensors(q=q, k=k, v=v)
    check_flags(return_lse=return_lse)
    how = {name: x for name, x in options.items() if name not in OPERANDS}
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = how.get(name)
        if isinstance(longest, int):  # of a tensor too, whose number a graph is not told
            torch._check(longest >= 0)
    fields_of(how)
    window = normalised(how.get("window_size"))
    how["window_size"] = None if window == (None, None) else [-1 if side is None else side for side in window]
    for name, kind in OPERANDS.items():
        x = options.get(name)
        if x is not None:
            kind.check(name, kind.form(name, x), q.device)
            how |= {f"{name}{end}": part for end, part in zip(kind.parts, kind.split(x), strict=True)}
    how["dropout_seed"] = seed_on(options.get("dropout_seed"), q.device) if how.get("dropout_p") else None
    leaves = (q, k, v, *differentiable_of(options))
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    name, by = _requested(version)
    refuse_traced_forward_ad()
    return torch.ops.flashzoo.attention(q, k, v, **how, return_lse=return_lse, version=name, grad=grad, by=by)


def _planned(q: Tensor, k: Tensor, v: Tensor, how: Named, grad: bool, by: str = ARGUMENT) -> tuple[Plan, Operands]:
    """The plan of an operator's arguments, as of a plain call, and what the version is handed beside q, k and v."""
    options: Named = {name: how[name] for name in OPTIONS if name in how}
    for name, kind in OPERANDS.items():
        parts = [how.get(f"{name}{end}") for end in kind.parts]
        if all(part is not None for part in parts):
            options[name] = kind.joined(*parts)
    operands, forms = taken(options)
    tensors = described_call(q, k, v)
    asked = (how.get("version", "auto"), by)
    planned = plan(asked, current(), how.get("return_lse", False), grad, q.ndim == 3, forms, *tensors, **options)
    return planned, operands.seeded(planned.problem, q.device, drawn=False)


@torch.library.impl(NAME, "default")
def _attention(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    refuse_traced_forward_ad()
    how = dict(zip(_FORWARD, arguments, strict=False)) | named
    q, k, v, grad = how["q"], how["k"], how["v"], how.get("grad", False)
    planned, operands = _planned(q, k, v, how, grad, how.get("by", ARGUMENT))
    problem = planned.problem
    # The graph records the call, so the version must not: it is asked for its forward pass alone.
    q_run = negated(q) if planned.negative else q
    q_run, k, v = as_batch(q_run, k, v) if planned.as_batch else (q_run, k, v)
    result = planned.run(q_run, k, v, problem.forward, operands)
    lse_read = problem.lse or (problem.grad and planned.backward_alone is not None)
    planned.check(result, q_run, lse_read, recorded=False, lse_recorded=False)
    out, lse = as_rows(*result) if planned.as_batch else result
    theirs = _storages(how[name] for name in _INPUTS)
    out = _laid_out(out, *_dense(q, problem.head_dim_v), theirs)
    shape = _lse_shape(q, how)
    if not lse_read:  # a version may give it or not, in any shape
        return out, out.new_zeros(shape, dtype=_lse_dtype(out))
    return out, _laid_out(lse, shape, (shape[-2] * shape[-1], shape[-1], 1)[-len(shape) :], theirs)


@torch.library.register_fake(NAME)
def _fake_attention(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    how = dict(zip(_FORWARD, arguments, strict=False)) | named
    q, k, v = how["q"], how["k"], how["v"]
    lengths, table = (None if how.get(name) is None else how[name].shape for name in ("cu_seqlens_q", "page_table"))
    read_as_batch((described(q), described(k), described(v)), None if lengths is None else lengths[0] - 1, table)
    dtype = how.get("out_dtype") or (torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype)
    out = torch.empty_strided(*_dense(q, v.shape[3]), dtype=dtype, device=q.device)
    return out, out.new_empty(_lse_shape(q, how), dtype=_lse_dtype(out))


@torch.library.impl(BACKWARD_NAME, "default")
def _attention_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    refuse_traced_forward_ad()
    how = dict(zip(_BACKWARD, arguments, strict=False)) | named
    dout, dlse, q, k, v, out, lse = (how[name] for name in _SAVED)
    planned, operands = _planned(q, k, v, how, grad=True)
    problem, alone = planned.problem, planned.backward_alone
    if planned.negative:
        q = negated(q)
    # Below a dispatch mode nothing is recorded, whatever enable_grad() says; this undoes that.
    with torch.inference_mode(False), torch.no_grad():
        if alone is not None:
            found = alone(dout, dlse, q, k, v, out, lse, problem, operands)
        else:
            found = _recorded_anew(planned.run, dout, dlse, q, k, v, problem, operands)
    gradients = iter((-found[0] if planned.negative else found[0], *found[1:]))
    theirs = _storages(how[name] for name in _SAVED)
    return _by_name(how, lambda x: _laid_out(next(gradients).to(x.dtype), *_dense(x), theirs))


def _by_name(how: Named, of: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """For each of `_DIFFERENTIATED` something of each tensor that has a gradient, in the dtype that it was handed over
    in, and of others nothing."""
    none, found = how["q"].new_empty, []
    for name, argument in _DIFFERENTIATED.items():
        x = how.get(argument)
        if name in _LISTED:
            grads = how.get(f"{name}_grads") or ()
            found.append([of(each) if i in grads else none(0) for i, each in enumerate(x or ())])
        else:
            found.append(none(0) if x is None else of(x))
    return tuple(found)


def _recorded_anew(
    run: Callable,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    operands: Operands,
) -> tuple[Any, ...]:
    """The gradients of a version that leaves its backward pass to autograd, or hands it what it alone knows: its
    forward pass once more, recorded."""
    recorded = {name: x.detach().requires_grad_() for name, x in operands.tensors.items() if name in _DIFFERENTIATED}
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out, lse = run(*leaves, problem, replace(operands, **recorded))
    outputs, gradients = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return torch.autograd.grad(outputs, (*leaves, *recorded.values()), gradients)


@torch.library.register_fake(BACKWARD_NAME)
def _fake_attention_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    how = dict(zip(_BACKWARD, arguments, strict=False)) | named
    return _by_name(how, lambda x: x.new_empty_strided(*_dense(x)))


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Named, output: tuple[Tensor, Tensor]) -> None:
    how = dict(zip(_FORWARD, inputs, strict=False)) | keyword_only_inputs
    leaves, ctx.tree = tree_flatten(how)
    ctx.plain = [None if isinstance(x, Tensor) else x for x in leaves]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in leaves), *output)
    if not how.get("return_lse"):
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    refuse_double_backward()
    *tensors, out, lse = ctx.saved_tensors
    how = tree_unflatten([plain if x is None else x for x, plain in zip(tensors, ctx.plain, strict=True)], ctx.tree)
    if not how.get("grad"):
        raise RuntimeError(f"{NAME}: an input requires grad, expected the argument grad to be True, got False")
    if dout is None:
        dout = torch.zeros_like(out)
    asked = {name: x for name, x in how.items() if name in _BACKWARD or name in _OTHERS}
    found = torch.ops.flashzoo.attention_backward(dout, dlse, **asked, out=out, lse=lse)
    gradients = {
        argument: [x if i in how[f"{name}_grads"] else None for i, x in enumerate(dx)] if name in _LISTED else dx
        for (name, argument), dx in zip(_DIFFERENTIATED.items(), found, strict=True)
        if how.get(argument) is not None
    }
    given = itertools.islice(how.items(), len(ctx.needs_input_grad))  # a graph leaves out trailing defaults
    return tuple(gradients.get(name, [None] * len(x) if _is_tensors(x) else None) for name, x in given)


def _is_tensors(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(isinstance(each, Tensor) for each in x)  # torch takes [] for one


torch.library.register_autograd(NAME, _differentiate, setup_context=_keep)


def _dense(x: Tensor, width: int | None = None) -> tuple[list[int], list[int]]:
    """Shape and strides of a tensor without gaps, as x but for the last size, its dimensions in the order of x's."""
    if not x.ndim:
        return [], []
    *rows, last = x.shape
    shape = [*rows, last if width is None else width]
    strides, step = [1] * x.ndim, shape[-1]
    for i in sorted(range(len(rows)), key=x.stride, reverse=True)[::-1]:
        strides[i], step = step, step * shape[i]
    return shape, strides


def _laid_out(x: Tensor, shape: Sequence[int], strides: Sequence[int], theirs: set[int]) -> Tensor:
    """x, copied where its strides are not these, it is part of a larger tensor, or its storage is one of theirs, to
    which it is then added: what an operator gives shares none with what it was given, nor with another of its own."""
    storage = x.untyped_storage().data_ptr()
    if (
        not x.storage_offset()
        and storage not in theirs
        and all(size == 1 or found == stride for size, found, stride in zip(shape, x.stride(), strides, strict=True))
    ):
        theirs.add(storage)
        return x
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _storages(tensors: Iterable[Tensor | None]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if x is not None}


def _lse_shape(q: Tensor, how: Named) -> tuple[int, ...]:
    """Of what the operator gives as lse: nothing, where it is neither asked for nor kept for a backward pass."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3]) if how.get("return_lse") or how.get("grad") else (0,)


def _lse_dtype(out: Tensor) -> torch.dtype:
    return torch.promote_types(out.dtype, torch.float32)
