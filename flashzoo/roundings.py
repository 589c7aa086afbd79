"""What the yardstick itself may err: its roundings, one by one, to first order,
so that no fault of it is everybody's budget.

`standard` rounds P, dS and what it returns to the I/O dtype; scores, sums and LSE to float32; in FP8 P to e4m3, scores
(and with fast_accum=True the sums of P V) to what the tensor core keeps, and with precision="fp8" q, k and v before all
that. Roundings of different numbers are
independent, so in a sum their squares are added, here in float64. out and LSE are held to this against the oracle.
Gradients are held to it against the same formulas in float64 on the yardstick's own out and LSE, which is what a
backward pass begins with: so nothing but its own roundings is allowed for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashzoo.call.problem import Problem
from flashzoo.dropout import times, weights
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.integers import cdiv
from flashzoo.reference import (
    HOPPER_SUM_BITS,
    LARGEST_E4M3,
    ORACLE_SCORES,
    P_SCALE,
    Part,
    Result,
    deltas,
    from_groups,
    gradients,
    grouped,
    of_part,
    parts,
    probabilities,
    products,
    scores,
)
from flashzoo.scores.at import ScoredAt, flat
from flashzoo.sinks import gradient_of_sinks

ROWS = 64
"""Rows of a head that are judged together: so few that what is wrong in two of them shows,
so many that luck does not."""
E4M3_UNIT, E4M3_TINY = 2.0**-4, 2.0**-10
"""Half the distance between e4m3 numbers: of normal ones as a share of them, and of subnormal ones."""
IN_CORE = 2.0 ** (1 - HOPPER_SUM_BITS)
"""What Hopper's FP8 tensor core cuts off a term, as a share of the sum."""
STEPS = 8
"""Roundings that a function on scores makes beside those of what it is given and gives, at a size of 1."""
RUNNING = 16
"""A running sum of n terms gathers n / RUNNING times the square of one rounding of its terms and of itself."""
SMALLEST = torch.finfo(torch.float32).tiny
"""An exponential below may be 0."""
LARGEST_EXPONENT = 20.0
"""Of an error of a score: beyond, P is anything."""


def of_blocks(x: Tensor) -> Tensor:
    """L2 norms `(batch, heads, blocks)` of each `ROWS` rows of each head of x `(batch, seqlen, heads, head_dim)`."""
    rows = x.square().sum(-1).transpose(1, 2)
    blocks = cdiv(rows.shape[2], ROWS)
    return torch.nn.functional.pad(rows, (0, blocks * ROWS - rows.shape[2])).unflatten(2, (blocks, ROWS)).sum(3).sqrt()


def of_yardstick(
    yardstick: Result,
    reference: Result,
    inputs: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    scored: ScoredAt | None = None,
    kept: Tensor | None = None,
) -> tuple[Result, Result]:
    """The yardstick's errors, and the standard deviations that its roundings, each at its largest, should give them.

    Args:
        yardstick: of `standard`; its gradients are looked at where dout is given.
        reference: the oracle's.
        inputs: q, k and v as the oracle takes them: e4m3 ones times their descales.
        problem, dout, dlse, mask, sinks, scored, kept: as in `oracle`.
    """
    q, k, _ = inputs
    exact, mine = reference.items(), yardstick.items()
    sizes = {name: torch.zeros_like(x) for name, x in exact.items()}
    right = {name: x if name in ("out", "lse") else torch.zeros_like(x) for name, x in exact.items()}
    model = _Model(inputs, problem, scored)
    for part in parts(q, k, ORACLE_SCORES[q.device.type] // 2):
        s = scores(q, k, problem, part, torch.float64, mask, scored)
        z = weights(of_part(kept, part), problem, s)
        found = model.forward(s, exact["lse"][part.rows], exact["out"][part.queries], part, z)
        if dout is not None:
            lse, out, do = mine["lse"][part.rows].double(), mine["out"][part.queries], dout[part.queries]
            of_rows = None if dlse is None else dlse[part.rows]
            p = probabilities(s, lse)
            found |= model.backward(p, lse, out, do, of_rows, part, z)
            for name, x in gradients(p, do, of_rows, out, inputs, problem, part, scored, z).items():
                _place(right, name, part).add_(x)  # to dk and dv every query head of a group adds
        for name, x in found.items():
            _place(sizes, name, part).add_(x)
    if sinks is not None and dout is not None:
        lse, out = mine["lse"].double(), mine["out"].double()
        delta = deltas(dout, dlse, out)
        right["dsinks"], sizes["dsinks"] = (
            gradient_of_sinks(sinks, lse, delta),
            model.sinks(sinks, lse, out, dout, delta),
        )
    if scored is not None and "dscore_mod" in sizes:
        sizes["dscore_mod"] += (scored.eps / 2 * right["dscore_mod"]).square()
    for name in sizes.keys() & {"dq", "dk", "dv"}:
        sizes[name] += (model.unit * right[name]).square_() + model.tiny**2
    errors = {name: (mine[name].double() - x).masked_fill_(~x.isfinite(), 0) for name, x in right.items()}
    return Result(**errors), Result(**{name: x.sqrt_() for name, x in sizes.items()})


def _place(of: dict[str, Tensor], name: str, part: Part) -> Tensor:
    """Where what was found of a part goes: what a score_mod reads has no parts."""
    return of[name] if name == "dscore_mod" else Result(**of).at(part).items()[name]


def of_delta_in_read(
    of_delta: Tensor,
    lse: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    mask: Tensor | None,
    scored: ScoredAt,
) -> Tensor:
    """Of the gradients of what a score_mod reads, `(numbers,)`, the variances that errors of delta make in them: all of
    a row's dS are off by P times the same, so that a sum of them is by no more than P times squares would be.

    Args:
        of_delta: variances `(batch, heads, seqlen_q)`.
        lse: of the oracle.
        inputs, problem, mask, scored: as in `of_yardstick`.
    """
    model, (q, k, _), found = _Model(inputs, problem, scored), inputs, flat(scored.differentiable).zero_()
    for part in parts(q, k, ORACLE_SCORES[q.device.type] // 2):
        p = probabilities(scores(q, k, problem, part, torch.float64, mask, scored), lse[part.rows])
        found += model.slopes(part, p * of_delta[part.rows].view(*p.shape[:-1], 1))[1]
    return found


def of_delta_in_gradients(
    of_delta: Tensor,
    lse: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    mask: Tensor | None,
    scored: ScoredAt | None,
) -> dict[str, Tensor]:
    """Of dq and dk the variances that errors of delta make in them: each dS is off by P times its row's, so that all
    terms of a row of dq err together.

    Args:
        of_delta, lse, inputs, problem, mask, scored: as in `of_delta_in_read`.
    """
    model, (q, k, _) = _Model(inputs, problem, scored), inputs
    found = {"dq": torch.zeros_like(q, dtype=torch.float64), "dk": torch.zeros_like(k, dtype=torch.float64)}
    for part in parts(q, k, ORACLE_SCORES[q.device.type] // 2):
        p = probabilities(scores(q, k, problem, part, torch.float64, mask, scored), lse[part.rows])
        if scored is not None:
            p *= model.slopes(part)[0]
        of_rows = problem.scale**2 * of_delta[part.rows].view(*p.shape[:-1], 1)
        found["dq"][part.queries] += from_groups(of_rows * (p @ model._of(1, part)).square())
        of_keys = (p.square() * of_rows).mT @ model._of(0, part).square()
        found["dk"][part.keys] += from_groups(of_keys.sum(2, keepdim=True))
    return found


class _Model:
    """Variances of the errors of one problem, a part at a time."""

    def __init__(self, inputs: tuple[Tensor, Tensor, Tensor], problem: Problem, scored: ScoredAt | None = None) -> None:
        self.inputs, self.scale, self.scored = inputs, problem.scale, scored
        kept = torch.finfo(TORCH_DTYPES[problem.out_dtype])
        self.unit, self.tiny = kept.eps / 2, kept.tiny * kept.eps / 2
        of_p = kept if problem.dtype == "e4m3" else torch.finfo(TORCH_DTYPES[problem.dtype])
        self.unit_p, self.tiny_p = of_p.eps / 2, of_p.tiny * of_p.eps / 2
        self.wide = torch.finfo(torch.float64 if problem.dtype == "fp64" else torch.float32).eps
        self.quantised = problem.precision == "fp8"
        self.in_fp8 = self.quantised or problem.dtype == "e4m3"
        self.of_sums = IN_CORE if problem.fast_accum else self.wide
        # of a head, of which the plainest quantiser makes one scale
        self.largest = [x.double().abs().amax((1, 3), keepdim=True) if x.numel() else x for x in inputs]

    def _of(self, at: int, part: Part, of: Sequence[Tensor] | None = None) -> Tensor:
        """Of q, k and v the at-th, `grouped`; or of as many others."""
        return grouped((of or self.inputs)[at][part.queries if at == 0 else part.keys], part, torch.float64, at == 0)

    def _of_quantised(self, at: int, part: Part) -> Tensor:
        finest = self._of(at, part, self.largest) * (E4M3_TINY / LARGEST_E4M3)
        return (self._of(at, part) * E4M3_UNIT).square() + finest.square()

    def _of_scores(self, s: Tensor, part: Part, in_fp8: bool) -> Tensor:
        """Of exp(score), as a share of it."""
        q, k = self._of(0, part).square(), self._of(1, part).square()
        unit = IN_CORE if in_fp8 else self.wide
        found = (unit * self.scale) ** 2 * (1 + q.shape[-1] / RUNNING) * (q @ k.mT)
        if self.scored is not None:  # what it is given is rounded, too, and each of its own steps
            given = products(self.inputs[0], self.inputs[1], part, torch.float64) * self.scale
            found = (found + (unit * given).square()) * self.slopes(part)[0].square() + STEPS * unit**2
        found += (unit * s).square()
        if in_fp8 and self.quantised:
            found += self.scale**2 * (self._of_quantised(0, part) @ k.mT + q @ self._of_quantised(1, part).mT)
        return found.sqrt_().clamp_max_(LARGEST_EXPONENT).expm1_().square_()

    def slopes(self, part: Part, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """By what a change of each score changes the new one, as scores lie; and what `ScoredAt.squares` sums."""
        assert self.scored is not None
        given = products(self.inputs[0], self.inputs[1], part, torch.float64) * self.scale
        weights = torch.zeros_like(given) if weights is None else weights
        found, sums = self.scored.part(*part.rows).squares(given.flatten(1, 2), weights.flatten(1, 2))
        return found.view(given.shape), sums

    def forward(self, s: Tensor, lse: Tensor, out: Tensor, part: Part, z: Tensor | None) -> dict[str, Tensor]:
        """Of out and lse, from the scores, which are -inf where nobody sees; z as `flashzoo.dropout.weights`."""
        seen = s != -math.inf
        p, v, o = (
            probabilities(s.clone(), lse),
            self._of(2, part).square(),
            grouped(out, part, torch.float64, True).square(),
        )
        of_scores = self._of_scores(s.masked_fill(~seen, 0), part, self.in_fp8)
        # What all scores of a row have in common LSE gets, and out does not see:
        # there what is left moves weight between values.
        shift, of_keys = (p * of_scores.sqrt()).sum(-1, keepdim=True), p.sum(-1, keepdim=True)
        # But beside a sink, which it does not move, it moves weight between that and all values.
        against_sink = (shift / of_keys.clamp_min(SMALLEST) * (1 - of_keys)).square_()
        of_lse = shift.flatten(1).view(lse.shape).square_()
        of_lse += (self.wide * lse.masked_fill(lse == -math.inf, 0)).square_() + self.wide**2
        unit, tiny = (
            (E4M3_UNIT, p.amax(-1, keepdim=True) * (E4M3_TINY / P_SCALE)) if self.in_fp8 else (self.unit_p, self.tiny_p)
        )
        sums = self.of_sums**2 * (1 + s.shape[-1] / RUNNING)
        squares = p.square_()
        moved = squares * of_scores
        of_row = moved.sum(-1, keepdim=True) + against_sink + sums + self.unit**2
        of_p = squares * (unit**2 + sums) + tiny**2 * seen + moved
        of_out = times(times(of_p, z), z) @ v + of_row * o
        if self.quantised:
            of_out += squares @ self._of_quantised(2, part)
        return {"out": from_groups(of_out + self.tiny**2), "lse": of_lse}

    def backward(
        self, p: Tensor, lse: Tensor, out: Tensor, dout: Tensor, dlse: Tensor | None, part: Part, z: Tensor | None
    ) -> dict[str, Tensor]:
        """Of dq, dk and dv, but for what rounding them adds, from P by the yardstick's own LSE."""
        q, k, v = (self._of(at, part) for at in range(3))
        do, o = (grouped(x, part, torch.float64, True) for x in (dout, out))
        lse = lse.masked_fill(lse == -math.inf, 0).view(*p.shape[:-1], 1)
        delta = (do * o).sum(-1, keepdim=True) - (0 if dlse is None else dlse.double().view(lse.shape))
        dp, seen, squares = times(do @ v.mT, z), p > 0, p.square()
        s = torch.where(seen, p.log() + lse, 0)
        in_p = (
            self._of_scores(s, part, False)
            + (self.wide * lse).square()
            + self.wide**2 * (1 + max(p.shape[-2:]) / RUNNING)
        )
        of_p = squares * (self.unit**2 + in_p) + max(self.tiny, SMALLEST) ** 2 * seen
        sums = self.wide**2 * (1 + do.shape[-1] / RUNNING)
        of_delta = sums * ((do * o).square().sum(-1, keepdim=True) + delta.square())
        of_dp = sums * (times(times(do.square() @ v.square().mT, z), z) + dp.square())
        ds = p * (dp - delta)
        of_ds = ds.square() * (self.unit**2 + in_p) + squares * (of_dp + of_delta)
        of_ds += (self.tiny**2 + (SMALLEST * (dp - delta)).square()) * seen
        # delta and LSE are one number for a row of dQ, whose terms then err together
        slopes, of_read = torch.ones_like(ds), {}
        if self.scored is not None:
            slopes, sums = self.slopes(part, of_ds + p * (of_delta + (self.wide * lse * (dp - delta)).square()))
            of_read = {"dscore_mod": sums} if self.scored.mod.grads else {}
            # its own formula rounds at the size of what it is given
            of_ds = (of_ds + STEPS * (self.wide * ds).square()) * slopes.square() + self.tiny**2 * seen
        together = of_delta * ((p * slopes) @ k).square() + (self.wide * lse).square() * ((ds * slopes) @ k).square()
        return of_read | {
            "dq": from_groups(self.scale**2 * (of_ds @ k.square() + together)),
            "dk": from_groups(self.scale**2 * (of_ds.mT @ q.square()).sum(2, keepdim=True)),
            "dv": from_groups((times(times(of_p, z), z).mT @ do.square()).sum(2, keepdim=True)),
        }

    def sinks(self, sinks: Tensor, lse: Tensor, out: Tensor, dout: Tensor, delta: Tensor) -> Tensor:
        """Of dsinks, from the yardstick's own LSE and out, in float64 as delta is."""
        terms = (dout.double() * out).square().sum(-1).transpose(1, 2)
        of_delta = self.wide**2 * (1 + out.shape[-1] / RUNNING) * (terms + delta.square())
        lse = lse.masked_fill(lse == -math.inf, 0)
        in_p = self.wide**2 * (lse.square() + 1 + lse.shape[-1] / RUNNING)
        return (torch.exp(sinks.double()[:, None] - lse).square() * (of_delta + delta.square() * in_p)).sum((0, 2))
