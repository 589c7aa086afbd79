"""From the arguments of a call to a plan: tensors, options and operands to a Problem, the Problem to who answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashzoo.autograd import joined, unquantized
from flashzoo.call.check import DTYPE_NAMES, Described, check_data, fields_of, read_as_batch
from flashzoo.call.forms import check_flags
from flashzoo.call.operands import K_LENGTHS, OPERANDS, PAGE_TABLE, Q_LENGTHS, Forms, Operands, given
from flashzoo.call.packed import check_rows
from flashzoo.call.problem import OUT_DTYPES, QUANTIZABLE, Problem
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.registry import (
    Choice,
    Zoo,
    backward_of,
    choose,
    choose_backward,
    fallback_backward,
    implementation,
    in_16_bits,
    remembered,
)
from flashzoo.sinks import gradient_of_sinks
from flashzoo.spec import Spec
from flashzoo.transforms import functorch_active


@dataclass(slots=True, eq=False)
class Plan:
    """Everything about a call that its data don't decide.

    Attributes:
        run: the implementation.
        problem: what it is handed.
        negative: whether the call's softmax_scale is: its size is the problem's, and q is to be negated.
        spec: whose implementation it is.
        as_batch: the call's packed rows are made a batch of one for `run`, which takes no others.
        joined: another version's backward pass starts from the LSE of `run`.
        checked: what `run` returned has been looked at, which is done once.
    """

    run: Callable
    problem: Problem
    negative: bool
    spec: Spec
    as_batch: bool = False
    joined: bool = False
    checked: bool = False

    @property
    def backward_alone(self) -> Callable | None:
        """The backward pass that starts from an out and an LSE as calls give them; None where there is none. A version
        that does not declare "lse" may hand its own backward pass anything in its place."""
        return getattr(self.run, "backward", None) if "lse" in self.spec.features else None

    def check(self, result: Any, q: Tensor, lse_read: bool, recorded: bool, lse_recorded: bool) -> None:
        """TypeError where `run` did not return what `Spec.impl` says of q.

        Args:
            lse_read: the caller, or a backward pass by another, is to have LSE.
            recorded: autograd was to record out.
            lse_recorded: and LSE, on which v has no bearing.
        """
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._wrong("a tuple (out, lse)", _told(result))
        p, (out, lse) = self.problem, result
        dtype, batch = TORCH_DTYPES[p.out_dtype], (p.batch,) if q.ndim == 4 else ()
        self._check_tensor("out", out, (*batch, p.seqlen_q, p.heads, p.head_dim_v), dtype, q.device)
        if lse_read:
            self._check_tensor(
                "lse", lse, (*batch, p.heads, p.seqlen_q), torch.promote_types(dtype, torch.float32), q.device
            )
        mapped = functorch_active()  # under vmap who records it is outside
        if recorded and not mapped and not out.requires_grad:
            raise self._wrong("an out that carries gradients", "one that does not require grad")
        if lse_recorded and not mapped and not lse.requires_grad:
            raise self._wrong("an lse that carries gradients", "one that does not require grad")
        # of a call that is traced, or of which v alone requires grad, not all of it has
        self.checked = not mapped and (recorded, lse_recorded) == (p.grad, p.grad and p.lse)

    def _check_tensor(
        self, name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        if _differs(x, shape, dtype, device):
            raise self._wrong(f"{name} as a Tensor {shape}, {dtype}, on {device}", _told(x))

    def _wrong(self, expected: str, got: str) -> TypeError:
        return _wrong(self.spec, self.spec.impl, expected, got)


@dataclass(slots=True, eq=False)
class LookedAt:
    """A version's backward pass, whose first answer is looked at: in a plan, so of each kind of call.

    Attributes:
        run: the backward pass alone.
        spec: whose it is.
        checked: what it returned has been looked at.
    """

    run: Callable
    spec: Spec
    checked: bool = False

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        found = self.run(*given)
        if not self.checked:
            self.check(found, *given)
        return found

    def check(self, found: Any, *given: Any) -> None:
        """TypeError where that is not what `Spec.backward_impl` says of what was given."""
        _, _, q, k, v, _, _, _, operands = given
        more = len(operands.differentiable)
        if not isinstance(found, tuple) or len(found) != 3 + more:
            got = f"{type(found).__name__} of {len(found)}" if isinstance(found, (tuple, list)) else _told(found)
            operands_too = f" and the gradients of {more} tensors beside them" if more else ""
            raise self._wrong(f"a tuple (dq, dk, dv){operands_too}", got)
        for name, x, of in (("dq", found[0], q), ("dk", found[1], k), ("dv", found[2], v)):
            if _differs(x, of.shape, of.dtype, of.device):
                raise self._wrong(f"{name} as {_told(of)}", _told(x))
        self.checked = True

    def _wrong(self, expected: str, got: str) -> TypeError:
        return _wrong(self.spec, "its backward pass", expected, got)


def _differs(x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != (shape, dtype, device)


def _wrong(spec: Spec, what: str, expected: str, got: str) -> TypeError:
    return TypeError(f"version {spec.name!r}: {what} must return {expected}, got {got}")


def _told(x: Any) -> str:
    return f"a Tensor {tuple(x.shape)}, {x.dtype}, on {x.device}" if isinstance(x, Tensor) else type(x).__name__


@remembered
def plan(
    asked: tuple[str, str],
    zoo: Zoo,
    return_lse: bool,
    grad: bool,
    rows: bool,
    forms: Forms,
    *described: Any,
    **options: Any,
) -> Plan:
    """The plan of a call, made once for each kind of call.

    Args:
        asked: the version, and who asks for it.
        zoo: what is registered.
        return_lse: as in `attention`.
        grad: whether autograd records the call.
        rows: q, k and v are packed rows, of three dimensions.
        forms: of the operands.
        described: as `check.described_call` gives it.
        options: of `attention`, those that are in `OPTIONS`.
    """
    q, k, v, latent = *(described[first : first + 5] for first in (0, 5, 10)), described[15]
    if rows and len(k[0]) != 4:  # else they are caches
        q, k, v = (_batch_of_one(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    problem = problem_of((*q, *k, *v, latent), return_lse, grad, forms, None, options)
    device = q[3]
    check_data(device)
    choice = choose(problem, *asked, zoo)
    none = 0 in q[0] or 0 in k[0] or not problem.total_k
    run = _nothing_to_see if none else _implementation(choice)
    as_batch = rows and not getattr(run, "rows", False)
    return Plan(run, *_handed(problem), choice.forward, as_batch, choice.backward is not None)


def _batch_of_one(name: str, described: Described) -> Described:
    """Packed rows as a batch of one."""
    shape, *rest = described
    check_rows(name, shape)
    return torch.Size((1, *shape)), *rest  # pyright: ignore[reportReturnType] - the rest is as it was


@remembered
def plan_backward(
    asked: tuple[str, str], zoo: Zoo, through_lse: bool, forms: Forms, *described: Any, **options: Any
) -> Plan:
    """As `plan`, of a call of `attention_backward`: its `run` is a version's backward pass alone; through_lse:
    LSE has a gradient."""
    q, k = described[:5], described[5:10]
    problem = problem_of(described, through_lse, True, forms, None, options)
    check_data(q[3])
    if problem.kv_in_e4m3 or problem.precision is not None:
        got = "e4m3 ones" if problem.precision is None else f"precision={problem.precision!r}"
        raise ValueError(f"attention_backward is of fp16, bf16, fp32 or fp64 inputs as they are, got {got}")
    spec = choose_backward(problem, *asked, zoo)
    run = _no_gradients if 0 in q[0] or 0 in k[0] else LookedAt(backward_of(spec), spec)  # pyright: ignore[reportArgumentType] - who is chosen has one
    return Plan(run, *_handed(problem), spec)


def _handed(problem: Problem) -> tuple[Problem, bool]:
    """What a version is handed of a problem, and whether q is negated."""
    if problem.block_mask is not None:  # it has them in it
        problem = replace(problem, causal=False, window=(None, None))
    negative = problem.scale < 0
    return replace(problem, softmax_scale=-problem.scale) if negative else problem, negative


def _implementation(choice: Choice) -> Callable:
    run = implementation(choice.forward)
    if choice.backward is not None:
        return joined(run, LookedAt(fallback_backward(choice.backward), choice.backward))
    anew = in_16_bits(choice.forward)
    if anew is not None:
        run = unquantized(run, anew)
    if not hasattr(run, "with_backward"):
        return run
    return run.with_backward(lambda backward: LookedAt(backward, choice.forward))


def problem_of(
    described: tuple[Any, ...],
    return_lse: bool,
    grad: bool,
    forms: Forms,
    arch: int | None,
    options: dict[str, Any],
) -> Problem:
    """The Problem of a call, each argument checked once and by name; described: as `check.described_call` gives it."""
    tensors: Any = tuple(described[first : first + 5] for first in (0, 5, 10))
    for name, place in (("cu_seqlens_q", Q_LENGTHS), ("page_table", PAGE_TABLE)):  # by which k and v are read
        if forms[place] is not None:
            OPERANDS[name].check(name, forms[place], tensors[0][3])
    lengths, table = ((None if forms[place] is None else forms[place][0]) for place in (Q_LENGTHS, PAGE_TABLE))  # pyright: ignore[reportIndexIssue]
    tensors, of_tensors = read_as_batch(tensors, None if lengths is None else lengths[0] - 1, table)
    (q_shape, _, q_dtype, q_device, _), (k_shape, _, k_dtype, *_), (v_shape, *_) = tensors
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, heads_kv, _), head_dim_v = q_shape, k_shape, v_shape[3]
    dtype, asked = DTYPE_NAMES[q_dtype], fields_of(options) | of_tensors
    check_flags(return_lse=return_lse)
    dtype_kv = None if k_dtype == q_dtype else DTYPE_NAMES[k_dtype]
    if asked.get("precision") is not None and (dtype not in QUANTIZABLE or dtype_kv is not None):
        raise TypeError(
            f"precision={asked['precision']!r} quantises {' or '.join(QUANTIZABLE)} inputs, "
            f"got q {q_dtype}, k {k_dtype}"
        )
    if asked.get("out_dtype") not in (None, *OUT_DTYPES[dtype]):
        *others, last = (str(TORCH_DTYPES[name]) for name in OUT_DTYPES[dtype])
        raise TypeError(
            f"out_dtype of {q_dtype} inputs must be {', '.join(('None', *others))} or {last}, "
            f"got {options['out_dtype']}"
        )
    device, arch = _hardware(q_device, arch)
    for name, kind, form in given(forms):
        kind.check(name, form, q_device)
        asked |= kind.fields(name, form)
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads, "heads_kv": heads_kv}
    sizes |= {"head_dim": head_dim, "head_dim_v": head_dim_v, "latent": described[15]}
    how = {"dtype": dtype, "dtype_kv": dtype_kv, "lse": return_lse, "grad": grad, "device": device, "arch": arch}
    problem = Problem(**sizes, **how, **asked)
    for name, kind, form in given(forms):
        kind.check_sizes(name, form, problem)
    if "packed" in problem.features and seqlen_q != seqlen_k and forms[K_LENGTHS] is None:
        raise ValueError(
            f"cu_seqlens_k may be left out where k has as many rows as q, got {seqlen_q} of q and {seqlen_k} of k"
        )
    return problem


def _hardware(device: torch.device, arch: int | None) -> tuple[str, int | None]:
    if arch is not None:
        return "cuda", arch
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "cuda", 10 * major + minor
    if device.type in ("cpu", "meta"):
        return "cpu", None
    raise ValueError(f"q, k and v must be on a CPU or CUDA device, got {device}")


def _nothing_to_see(q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """The answer where there is no query or no key: zeros, and -inf or the sink, with zero gradients for q, k and v."""
    out = q.new_zeros((*q.shape[:3], problem.head_dim_v), dtype=TORCH_DTYPES[problem.out_dtype])
    if problem.grad:
        # For autograd the zeros must come from the inputs: each adds the sum of none of its numbers, whatever they are.
        out = out + sum(x.flatten()[:0].sum() for x in (q, k, v, *operands.differentiable))
    lse_dtype = torch.promote_types(out.dtype, torch.float32)
    nothing, sinks = out.to(lse_dtype).sum(-1).transpose(1, 2), operands.sinks
    # A sink of -inf is none, and has no gradient.
    return out, nothing + (-math.inf if sinks is None else sinks.where(sinks > -math.inf, -math.inf)[:, None])


def _no_gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    _: Problem,
    operands: Operands,
) -> tuple[Tensor, ...]:
    """The gradients where there is no query or no key: only sinks have one that is not 0, through the given out
    and LSE's gradient."""
    zeros = [torch.zeros_like(x) for x in (q, k, v, *operands.differentiable)]
    if operands.sinks is not None:
        delta = (dout * out.to(lse.dtype)).sum(-1).transpose(1, 2)
        zeros[3] = gradient_of_sinks(operands.sinks, lse, delta if dlse is None else delta - dlse)
    return tuple(zeros)
