"""What a fuzzed call must answer, and how far from it roundings can lead.
Shares no line with `flashzoo.reference` or `.accuracy`.

The answer is the plain formula in float64, all heads at once, with gradients by autograd. How far a result may be from
it is worked out to first order from the same float64 numbers, in two parts that are kept apart:

- random: roundings to the I/O dtype, of P, dS and what is stored, of which each is as likely up as down. A sum of n
  such roundings errs by the root of the sum of their squares. A rounding to nearest is within one unit roundoff,
  `unit`.
- linear: what may have one sign (sums in float32 and the tensor core's 13 bits, exponentials, scores and LSE rounded at
  their own size, numbers too small for the dtype). These are added up as they are.

Two rules then hold. `EACH` element is within so many times the random part, and the norm of every `ROWS` rows of a head
within `BLOCK` times it, plus `LINEAR` times the linear part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_call import Call, Operands, in_band, of_caches, of_sequences, offsets
from fuzz_dropout import factors
from fuzz_scores import KINDS, places
from torch import Tensor

from flashzoo.call.problem import DESCALE_BLOCK
from flashzoo.dtypes import TORCH_DTYPES

EACH = 5.0
"""A rounding to nearest is evenly spread within a unit, so its deviation is at most 1/sqrt(3) of one, and 5 are 8.6
deviations: of the 1e10 elements that a run looks at a normal distribution has one beyond 6.5. The rest is for roundings
made twice."""
BLOCK = 2.0
"""A block of rows averages most of that out. Where it does not, because all elements share one rounding (a row that
sees a single key), that is within 1. A key that is dropped from n adds 1/sqrt(n) of out: 25 units at 100 keys in
bf16."""
LINEAR = 2.0
"""The linear part is worked out without constants below 2: roundings by half a unit twice, exp2 of
scores in other units."""
FEW_COLUMNS = 4
"""Of q and k: P and dS are then functions of a few numbers, so which are rounded up and which down goes with k, by whom
dS is multiplied next, and roundings add up as they are, not as squares do (seen at head dim 1 in bf16)."""
ROWS = 64

SCORES: dict[str, tuple[tuple[float, ...], Callable[[Tensor, Tensor, float], Tensor]]] = {}
"""Options of `attention` that change scores: by name the values to draw, and new scores from those scaled, from how far
each key lies past its query's diagonal, and from the value."""

E4M3_UNIT = 2.0**-4
E4M3_FLOOR = 2.0**-18
"""Half of e4m3's smallest step, 2^-9, of a P that is scaled by 2^8."""
HOPPER_K = 32
HOPPER_SCORES = 5 * 2.0**-13
"""What Hopper's FP8 tensor core cuts off a score, for an instruction of `HOPPER_K` terms: each term and the running sum
are cut towards 0 below 13 bits of the largest of them, of random signs, so that a deviation is sqrt(33 / 3), and 5 of
them 4 times `LINEAR` times 2, as a score's size is counted twice where one term is most of it."""
HOPPER_SUMS = 2 * 2.0**-13
"""The same for P V, over P |V|, beside which a term is small:
the running sum is cut 4 times before it is added up in float32."""
HOPPER_FAST_SUMS = 2.0**-14
"""The same for each key where nothing is added up in float32: half of what each term may be cut by below the running
sum, which is at most P |V|, always towards 0."""


@dataclass(frozen=True)
class Numerics:
    """How a call's products are rounded.

    Attributes:
        unit: of what is stored, `unit_p` of P, as the second product reads it.
        floor, floor_p: half the smallest step of each, and no less than what float32 flushes to zero.
        eps: of the accumulators.
        scores: of a score, over its size and that of its terms; `sums` of P V, over P |V|.
        quantised: of q, k and v themselves; 0 where they are taken as they are.
    """

    unit: float
    unit_p: float
    floor: float
    floor_p: float
    eps: float
    scores: float
    sums: float
    quantised: float = 0.0


def numerics(call: Call) -> Numerics:
    """Those of the call's forward pass."""
    fp8 = call.dtype == "e4m3" or call.precision == "fp8" or call.entry == "quantize"
    stored = torch.finfo(call.stored)
    accumulator = torch.finfo(torch.float64 if call.dtype == "fp64" else torch.float32)
    # the oracle errs in float64 as well
    unit, eps = stored.eps / 2, accumulator.eps * (4 if call.dtype == "fp64" else 1)
    floor = max(stored.smallest_normal * unit, accumulator.smallest_normal)
    quantised = 0.0 if call.dtype == "e4m3" or not fp8 else E4M3_UNIT
    if fp8:
        scores = HOPPER_SCORES * math.sqrt(max(1, call.head_dim / HOPPER_K))
        sums = HOPPER_SUMS + (HOPPER_FAST_SUMS * call.seqlen_k if call.fast_accum else 0.0)
        return Numerics(unit, E4M3_UNIT, floor, E4M3_FLOOR, eps, scores, sums, quantised)
    of_p = torch.finfo(TORCH_DTYPES[call.dtype])
    floor_p = max(of_p.smallest_normal * of_p.eps / 2, accumulator.smallest_normal)
    return Numerics(unit, of_p.eps / 2, floor, floor_p, eps, _running(eps, call.head_dim), 0.0)


def _running(eps: float, terms: int) -> float:
    """A running sum of so many terms, over its size: half a unit for each, as good as random, and one more."""
    return eps * (1 + math.sqrt(terms) / 2)


@dataclass(frozen=True)
class Expected:
    """A tensor as it must be, and the two parts of what it may be off by, all float64 of one shape."""

    value: Tensor
    random: Tensor
    linear: Tensor


@dataclass(frozen=True)
class _Answer:
    """The numbers of a call in float64, keys and values repeated for each query head, and what its gradients start
    from; z is what dropout multiplies P by."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    s: Tensor
    p: Tensor
    out: Tensor
    lse: Tensor
    blind: Tensor
    dout: Tensor
    dlse: Tensor
    gradients: list[Tensor]
    p_sink: Tensor
    on_scores: _OnScores | None
    z: Tensor


@dataclass(frozen=True)
class _OnScores:
    """A call's function on scores, in float64: what it was given; by what a change of that, and of what was read there,
    changes what it gave, 0 where it gave -inf; and from numbers of every score the sums of those at each number
    read."""

    given: Tensor
    slope: Tensor
    factor: Tensor
    summed: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Drawn:
    """What a backward pass takes over of a forward pass's roundings: of scores their sizes and their rows', of out its
    two parts, of LSE the same, and of a running sum."""

    sizes: Tensor
    of_scores: Tensor
    random: Tensor
    linear: Tensor
    shift: Tensor
    drifted: Tensor
    long: float


def expected(call: Call, given: Operands, seen: Tensor | None) -> dict[str, Expected]:
    """out, lse and the gradients that the call asks for.

    Args:
        seen: what the block mask shows; None where there is none.
    """
    call, given = _with_packed_keys(call, given) if call.packed_q else (call, given)
    n, answer = numerics(call), _answer(call, given, seen)
    with torch.no_grad():
        answers, drawn = _forward(call, n, answer)
        return answers | _backward(call, n, answer, drawn) if call.grad else answers


def _with_packed_keys(call: Call, given: Operands) -> tuple[Call, Operands]:
    """The same of keys and values that are packed too, whole caches one behind another, and are the real ones."""
    k, v = (_real(*of, None).flatten(0, 1)[None] for of in zip((given.k, given.v), given.descales[1:], strict=True))
    rows = {"seqlen_k": k.shape[1], "lengths_k": (call.seqlen_k,) * call.caches}
    return replace(call, packed_q=False, page_size=None, **rows), replace(
        given, k=k, v=v, descales=(given.descales[0], None, None)
    )


def _answer(call: Call, given: Operands, seen: Tensor | None) -> _Answer:
    keys = call.lengths if call.lengths_k is None else call.lengths_k
    inputs = [
        _real(*of) for of in zip((given.q, given.k, given.v), given.descales, (call.lengths, keys, keys), strict=True)
    ]
    leaves = [x.requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(call.group, 1) for x in (k, v))
    offset = offsets(call, q.device)
    visible = in_band(offset, call.span)
    if call.lengths is not None:
        visible = of_sequences(call, q.device)
    elif call.used is not None:
        visible = of_caches(call, q.device)
    visible = visible if seen is None else visible & seen
    if not call.seqlen_k:  # whatever has no keys has no maximum either
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        visible = torch.zeros(call.seqlen_q, 1, dtype=torch.bool, device=q.device)
        offset = visible.long()

    s = q @ k.mT * call.softmax_scale
    read = None if given.read is None else given.read.detach().double().requires_grad_()
    s, on_scores = _on_scores(call, s, read)
    for name, value in call.on_scores.items():
        s = SCORES[name][1](s, offset, value)
    s = s.masked_fill(~visible, -math.inf)
    sink = s.new_full((call.heads,), -math.inf) if given.sinks is None else given.sinks.detach().double()
    sink.requires_grad_()
    top = s.detach().amax(-1, keepdim=True).maximum(sink.detach()[:, None, None])
    top = top.masked_fill(top == -math.inf, 0)
    weights, of_sink = torch.exp(s - top), torch.exp(sink[:, None, None] - top)
    total = weights.sum(-1, keepdim=True) + of_sink
    blind = total == 0
    p = weights / total.masked_fill(blind, 1)
    z = factors(call, q.device) if call.dropout and call.seqlen_k else s.new_ones(1, 1, 1, 1)
    out, lse = (p * z) @ v, (top + total.masked_fill(blind, 1).log())[..., 0]
    dout, dlse = given.dout.double().transpose(1, 2), given.dlse.double()
    dout = dout if call.through != "lse" else torch.zeros_like(dout)
    dlse = dlse.masked_fill(blind[..., 0], 0) if call.through != "out" else torch.zeros_like(dlse)
    gradients: list[Tensor] = []
    if call.grad:
        of = (*leaves, sink) if read is None else (*leaves, sink, read)
        through = (out * dout).sum() + (lse * dlse).sum()
        found = torch.autograd.grad(through, of, allow_unused=True, materialize_grads=True)
        gradients = [*(x.transpose(1, 2) for x in found[:3]), *(x.nan_to_num() for x in found[3:])]
    p_sink = (of_sink / total.masked_fill(blind, 1)).detach()
    q, k, v, s, p, out, lse = (x.detach() for x in (q, k, v, s, p, out, lse))
    return _Answer(q, k, v, visible, s, p, out, lse, blind, dout, dlse, gradients, p_sink, on_scores, z)


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """What whole numbers become that are multiplied by 0.5 is float64 in here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _on_scores(call: Call, s: Tensor, read: Tensor | None) -> tuple[Tensor, _OnScores | None]:
    """New scores, and what there is to know of them."""
    if not call.score or not call.seqlen_k:
        return s, None
    function, at = KINDS[call.score].function, places(call, s.device)
    nothing = torch.zeros_like(s.detach()).requires_grad_()
    used: list = []

    def reading(index: Any) -> Tensor:
        used.append(index)
        assert read is not None
        return read[index] + nothing

    with _float64_by_default():  # as beside a score in float64 a function's own numbers are
        new = function(s, *at, reading)
        local = s.detach().requires_grad_()
        seen = function(local, *at, reading)
    slope, factor = torch.autograd.grad(
        seen.masked_fill(seen == -math.inf, 0).sum(), (local, nothing), allow_unused=True, materialize_grads=True
    )

    def summed(numbers: Tensor) -> Tensor:
        whole = torch.zeros_like(read.detach()).requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad((whole[used[0]] * numbers).sum(), whole)[0]

    return new, _OnScores(s.detach(), slope, factor, summed)


def _forward(call: Call, n: Numerics, answer: _Answer) -> tuple[dict[str, Expected], _Drawn]:
    """out and lse."""
    q, k, v, s, p, out, lse, blind, z = (
        getattr(answer, name) for name in ("q", "k", "v", "s", "p", "out", "lse", "blind", "z")
    )
    visible, scale, keys = answer.visible, call.softmax_scale, max(1, call.seqlen_k)
    size = s.masked_fill(~visible | (s == -math.inf), 0).abs()
    # Where one term is most of a score, partial sums are as large as that; else they walk at random.
    sizes = (q.square() @ k.square().mT).sqrt() * abs(scale) + size
    if (on_scores := answer.on_scores) is not None:  # which rounds as often as it has operations
        sizes = (sizes + on_scores.given.abs()) * on_scores.slope.abs() + 4 * size + 4
    of_scores = size + size.amax(-1, keepdim=True)
    # Relative errors of P: exp turns absolute ones of scores into them.
    drift = _exp(n.scores * sizes + n.eps * (4 + of_scores))
    spread = torch.zeros_like(s)
    if n.quantised:
        # Elements of q and k are rounded, rotated or not: then they are as large as the row's norm says.
        even = q.square().sum(-1, keepdim=True) * k.square().sum(-1)[..., None, :] / call.head_dim
        spread = _exp(abs(scale) * n.quantised * (2 * (q.square() @ k.square().mT + even)).sqrt())
    relative = n.unit_p**2 + n.quantised**2 + spread.square()
    long = n.eps * (4 + keys / 64)  # a running sum is rounded once for each block of keys
    v_size = v.abs()
    of_p = (z.square() * (p.square() * relative + n.floor_p**2)) @ v.square()
    random = of_p.sqrt() + (p * spread).norm(dim=-1, keepdim=True) * out.abs() + n.unit * out.abs()
    linear = (z * p * drift) @ v_size + ((z * p) @ v_size) * (long + n.sums) + n.floor
    if call.dropout:  # the row sum is of others
        linear += (p * drift).sum(-1, keepdim=True) * out.abs()
    answers = {"out": Expected(out, random.masked_fill(blind, 0), linear.masked_fill(blind, 0))}
    shift, drifted = (p * spread).norm(dim=-1), (p * drift).sum(-1) + n.eps * (4 + lse.abs() + keys / 64) + n.floor
    if call.lse:
        answers["lse"] = Expected(lse.masked_fill(blind[..., 0], -math.inf), shift, drifted)
    return answers, _Drawn(sizes, of_scores, random, linear, shift, drifted, long)


def _backward(call: Call, n: Numerics, answer: _Answer, drawn: _Drawn) -> dict[str, Expected]:
    """The gradients that the call asks for."""
    q, k, v, p, out, lse, dout, dlse, z = (
        getattr(answer, name) for name in ("q", "k", "v", "p", "out", "lse", "dout", "dlse", "z")
    )
    random, linear, shift, drifted, long = drawn.random, drawn.linear, drawn.shift, drawn.drifted, drawn.long
    scale, v_size, answers = call.softmax_scale, v.abs(), {}

    # Backward, in 16 bits whatever the forward pass was: with its out and its LSE.
    dp, size_dp = z * (dout @ v.mT), z * (dout.abs() @ v_size.mT)
    delta = (dout * out).sum(-1, keepdim=True) - dlse[..., None]
    size_delta = (dout * out).abs().sum(-1, keepdim=True) + dlse.abs()[..., None]
    off_delta = (dout * random).norm(dim=-1, keepdim=True)
    drift = _exp(
        _running(n.eps, call.head_dim) * drawn.sizes
        + n.eps * (4 + drawn.of_scores + lse.abs()[..., None])
        + drifted[..., None]
    )
    ds = p * (dp - delta)
    random_ds = ds.square() * (n.unit**2 + shift.square()[..., None]) + (p * off_delta).square()
    linear_ds = p * (
        drift * (dp - delta).abs()
        + n.eps * (4 * size_dp + 4 * size_delta)
        + (dout.abs() * linear).sum(-1, keepdim=True)
    )
    linear_ds += long * ds.abs() + n.floor * (1 + size_dp + size_delta)
    weights = random_ds + p * (off_delta.square() + (shift[..., None] * (dp - delta)).square()), linear_ds
    of_running = n.eps * (8 + call.seqlen_q * call.seqlen_k / 64) * ds.abs()
    if (on_scores := answer.on_scores) is not None:
        slope, rounded = on_scores.slope, 8 * n.eps * ds.abs() + n.floor  # and however small, it is stored
        ds, random_ds, linear_ds = ds * slope, random_ds * slope.square(), linear_ds * slope.abs() + rounded
        p = p * slope
    if call.head_dim < FEW_COLUMNS:
        linear_ds += n.unit / LINEAR * ds.abs()
    common = shift[..., None] * (ds @ k).abs() + off_delta * (p @ k).abs()
    random_dq = ((ds.square() * n.unit**2) @ k.square()).sqrt() + common
    random_dk, linear_dk = (
        random_ds.mT @ q.square(),
        linear_ds.mT @ q.abs() + n.eps * call.seqlen_q / 64 * (ds.abs().mT @ q.abs()),
    )
    p = answer.p * z
    random_p = p.square() * (n.unit**2 + shift.square()[..., None])
    random_dv, linear_dv = (
        random_p.mT @ dout.square(),
        (p * drift).mT @ dout.abs() + n.floor / (1 - call.dropout) * dout.abs().sum(-2, keepdim=True),
    )
    linear_dv += n.eps * (4 + call.seqlen_q / 64) * (p.mT @ dout.abs())
    parts = {
        "dq": (random_dq * abs(scale), linear_ds @ k.abs() * abs(scale)),
        "dk": (_grouped(random_dk, call).sqrt() * abs(scale), _grouped(linear_dk, call) * abs(scale)),
        "dv": (_grouped(random_dv, call).sqrt(), _grouped(linear_dv, call)),
    }
    of_heads = {"dk": ds.mT @ q * scale, "dv": p.mT @ dout}
    for (name, (random, linear)), value in zip(parts.items(), answer.gradients, strict=False):
        if name[1] not in call.grad:
            continue
        value, random, linear = (
            x[..., : call.seqlen_k if name != "dq" else call.seqlen_q, :] for x in (value, random, linear)
        )
        random = random + n.unit * value.abs()
        if name in of_heads and call.group > 1 and call.version in ("sdpa", "auto"):
            # torch's kernels round each query head's share and each sum of two, as baselines.py says
            shares = _grouped(of_heads[name].square(), call)[..., : call.seqlen_k, :].sqrt()
            random = random + n.unit * math.sqrt(call.group) * shares
        answers[name] = Expected(value, random, linear + n.floor)
    if "s" in call.grad:
        answers["dsinks"] = _of_sinks(call, n, answer, drawn, delta, size_delta, off_delta)
    if "m" in call.grad:
        value, stored = answer.gradients[4], torch.finfo(KINDS[call.score].dtype)
        if on_scores is None:
            answers["dread"] = Expected(value, torch.zeros_like(value), torch.zeros_like(value))
        else:
            random = on_scores.summed(weights[0] * on_scores.factor.square()).sqrt()
            linear = on_scores.summed((weights[1] + of_running) * on_scores.factor.abs())
            random = random + stored.eps / 2 * value.abs()
            answers["dread"] = Expected(value, random, linear + stored.smallest_normal * stored.eps + n.floor)
    return answers


def _of_sinks(
    call: Call, n: Numerics, answer: _Answer, drawn: _Drawn, delta: Tensor, size_delta: Tensor, off_delta: Tensor
) -> Expected:
    """Their gradient, from delta, how large what it is the sum of is, and how far off it is."""
    p_sink, stored = answer.p_sink, torch.finfo(TORCH_DTYPES[call.sinks])
    floor = max(stored.smallest_normal * stored.eps / 2, torch.finfo(torch.float32).smallest_normal)
    random = (p_sink * (off_delta + drawn.shift[..., None] * delta.abs())).square().sum((0, 2, 3)).sqrt()
    off_p = drawn.drifted[..., None] + n.eps * (4 + answer.lse.abs()[..., None] + call.seqlen_q / 64)
    linear = p_sink * (
        off_p * delta.abs() + 4 * n.eps * size_delta + (answer.dout.abs() * drawn.linear).sum(-1, keepdim=True)
    )
    value = answer.gradients[3]
    return Expected(value, random + stored.eps / 2 * value.abs(), linear.sum((0, 2, 3)) + floor)


def _exp(error: Tensor) -> Tensor:
    """Half the relative error of exp where its argument is off by twice so much,
    of which `LINEAR` makes the whole again."""
    return torch.expm1((LINEAR * error).clamp(max=50)) / LINEAR


def _real(x: Tensor, descale: Tensor | None, lengths: tuple[int, ...] | None) -> Tensor:
    """float64 `(batch, seqlen, heads, head_dim)`, multiplied by its descale; lengths are those of packed sequences."""
    x = x.detach().double()
    if descale is None:
        return x
    rows = torch.arange(x.shape[1], device=x.device)
    heads = torch.arange(x.shape[2], device=x.device)
    if descale.ndim == 2:
        factors = descale[:, None, heads // (x.shape[2] // descale.shape[1])]
        if lengths is None:
            factors = factors.expand(x.shape[:3])
        else:
            whose = [number for number, length in enumerate(lengths) for _ in range(length)]
            whose += [0] * (x.shape[1] - len(whose))  # nobody's, and seen by nobody
            factors = factors[whose].transpose(0, 1)
    else:
        factors = descale[:, heads][:, :, rows // DESCALE_BLOCK].transpose(1, 2)
    return x * factors[..., None].double()


def _grouped(x: Tensor, call: Call) -> Tensor:
    """Summed over the query heads of a key/value head."""
    return x.unflatten(1, (call.heads_kv, call.group)).sum(2)


def shares(found: dict[str, Tensor], answers: dict[str, Expected]) -> dict[str, tuple[Tensor, Tensor]]:
    """For each tensor the largest share of the bound that an element, and a block of rows, takes:
    at most 1 where right, NaN never is.

    Args:
        found: by the names of `answers`: out and gradients `(batch, seqlen, heads, head_dim)`, lse
            `(batch, heads, seqlen_q)`, dsinks `(heads,)`, dread as it is read.
    """
    used = {name: _shares(_by_head(name, value), answers[name]) for name, value in found.items()}
    for name in used.keys() & {"dsinks", "dread"}:  # of which no block is more than an element
        used[name] = (used[name][0],) * 2
    return used


def worst(name: str, value: Tensor, answer: Expected) -> str:
    """The element that has least to spare, in words."""
    value = _by_head(name, value)
    used = _used(_error(value, answer), EACH * answer.random + LINEAR * answer.linear).nan_to_num(nan=math.inf)
    at = int(used.argmax())
    where = [int(x) for x in torch.unravel_index(torch.tensor(at), value.shape)]
    place = dict(zip(("batch", "head", "row", "column"), where, strict=False))
    bound = EACH * answer.random + LINEAR * answer.linear
    beyond = int((~(used <= 1)).sum())
    numbers = [float(x.flatten()[at]) for x in (value, answer.value, bound)]
    return (
        f"at {place}: {numbers[0]:.6g}, expected {numbers[1]:.6g} within {numbers[2]:.3g}; "
        f"{beyond} of {used.numel()} elements beyond"
    )


def _by_head(name: str, x: Tensor) -> Tensor:
    if name in ("dsinks", "dread"):
        return x.flatten()[None, :, None, None].double()
    return (x[..., None] if name == "lse" else x.transpose(1, 2)).double()


def _error(value: Tensor, answer: Expected) -> Tensor:
    right = answer.value.view(value.shape)
    return torch.where(value == right, 0.0, (value - right).abs())  # two -inf differ by NaN


def _used(error: Tensor, bound: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / bound.view(error.shape))


def _shares(value: Tensor, answer: Expected) -> tuple[Tensor, Tensor]:
    error, random, linear = (x.view(value.shape) for x in (_error(value, answer), answer.random, answer.linear))
    if not error.numel():
        return error.new_zeros(()), error.new_zeros(())
    pad = (0, 0, 0, -error.shape[2] % ROWS)

    def norms(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, pad).unflatten(2, (-1, ROWS)).square().sum((-1, -2)).sqrt()

    of_blocks = _used(norms(error), BLOCK * norms(random) + LINEAR * norms(linear))
    return _used(error, EACH * random + LINEAR * linear).amax(), of_blocks.amax()
