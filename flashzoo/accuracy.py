"""When is a result correct? The one rule that the suite, `compare`, `check` and `bench` hold every version to.

The oracle is float64 on the same inputs. The yardstick is `standard`: the same formulas with a flash kernel's numerics
(scores and sums in float32; P, dS and outputs rounded to the I/O dtype). A version may err a little more than the
yardstick does on these very inputs, and no more. Maximum, worst row and RMS are all held, because each is blind to
faults that another sees: one wrong row hides in an RMS, a bias on every element hides under a maximum.

The constants are kept by `Problem.numerics`. For "e4m3" the oracle takes the inputs times their descales, so what errs
is P and the tensor core's sums. For "fp8" it takes the 16-bit inputs themselves, and what errs most is their
quantisation, which the yardstick does in the plainest way: one scale for each head. Or with q and k rotated too, where
that errs more: rotation spreads outliers, for which it is made, but also one large number that all rows share, whose
rounding had cancelled. A version with finer scales may use all that it gains, or promise it (`Spec.fp8_rms`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashzoo.call.operands import NO_DESCALES, Descales, Operands
from flashzoo.call.problem import Problem
from flashzoo.counts import visible_pairs
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.integers import cdiv
from flashzoo.reference import (
    HOPPER_SUM_BITS,
    Result,
    dequantized,
    of_part,
    of_rows,
    oracle,
    parts,
    rotated,
    standard,
    visible,
)
from flashzoo.roundings import ROWS, SMALLEST, of_blocks, of_delta_in_gradients, of_delta_in_read, of_yardstick
from flashzoo.scores.at import ScoredAt, flat
from flashzoo.sinks import gradient_of_sinks, with_sinks

OUT_MAX = 3.0
"""Elementwise, out may err this many times the yardstick's largest error: extremes of two samples differ by less."""
OUT_ROW = 3.0
"""The same for the worst row's relative L2; one row that misses a key or a block stands out here."""
OUT_RMS = {"fp16": 1.3, "bf16": 1.3, "fp32": 3.0, "fp64": 3.0, "e4m3": 1.3, "fp8": 1.3}
"""A head's RMS error over the yardstick's. In 16 bits roundings make the error, whatever the order of summation:
truncation doubles it, accumulating in bf16 more. In fp32 the order is all there is: 256 products added one by one err 3
times what 16 sums of 16 do, and the next coarser thing, TF32, a thousand times. In FP8 it is roundings again."""
SUMMED = 4.0
"""Roundings, at the accumulator's precision, of the terms P |V| that an fp32 or fp64 out is summed from, allowed to
every element before the three rules above: where thousands of values cancel, a yardstick that splits its sums (cuBLAS)
is closer than a running sum can be (3 to 12 times at 4097 and 65537 keys on an H200). A dropped key would be 1/seqlen_k
of a term, TF32 a thousand roundings."""
GRAD_L2 = {"fp16": 1.5, "bf16": 1.5, "fp32": 4.0, "fp64": 4.0, "fp8": 1.5}
"""A gradient's L2 error over the yardstick's; looser than out's in 16 bits because P and dS are rounded as well, and in
fp32 because its sums may be as long as the sequence (3.3 measured at 65537 keys against cuBLAS)."""
GRAD_ROWS = {"fp16": 1.5, "bf16": 1.5, "fp32": 4.0, "fp64": 4.0, "fp8": 1.5}
"""The L2 error of each `ROWS` rows of a head of a gradient over the yardstick's there, or over a rounding of what is
there: the last keys under a causal mask, whose dV is small, are nothing in the norm of the whole tensor. Beside a sink
or an outlier, or where scores are large, a row's error is one rounding's and a few rows have most of it: what chance
adds to the norm of n is allowed, 2/sqrt(n), where n is how many rows there would be if all had as much of it. And the
yardstick's may be small by luck: at least `USUAL` of what its roundings give it counts, that of out among them: of a
key that one query sees, the last of 129 say, dK may have delta's error and little else."""
USUAL = 0.45
"""What the yardstick errs of its roundings, each at its largest: see `YARDSTICK`."""
GRAD_MAX = {"fp16": 4.0, "bf16": 4.0, "fp32": 6.0, "fp64": 6.0, "fp8": 4.0}
"""A gradient's largest error over the yardstick's: tails are longer where atomics or split sums add up,
and see GRAD_L2."""
SPREAD = 4.0
"""An RMS of n independent roundings scatters by about 1/sqrt(n) of itself; four such deviations are allowed. A head's
out has no more of them than visible elements, nor than visible pairs (a row with one key has one P); a gradient has the
pairs. In FP8 the elements of a row err together, with the largest of its P and its scores, so neither has more than
rows."""
RMS_ROUNDING = 0.25
"""Rounding to nearest leaves an RMS of about 0.2 eps of the values. A yardstick that is exact by luck (one key, a
one-hot softmax) gets this much in place of its own error, so that a rounding is never forbidden but a truncation (0.4)
is."""
FP8_DRAWS = (64, 16)
"""Where a head has fewer rows than the first, the rotated yardstick is drawn anew, up to the second times, until it has
as many, and what is taken of it is the RMS over them. One row is one draw: where a few keys have it all, what moves it
is the rounding of a few scores, which is nearly nothing at times, and 2 to 8 in 100 right results of 1 to 4 rows were
beyond 3 times that."""
ROW_FLOOR = 0.1
"""Rows smaller than this share of their head's RMS row count as if so large: a row that cancels to nearly 0, common
only at head dims of a few elements, would make any relative error huge. Rows that are exactly 0 must be met exactly."""
YARDSTICK = 1.5
"""The yardstick's own error over its roundings, each at its largest (`flashzoo.roundings`), for each `ROWS` rows of a
head: 0.45 is usual, 0.8 in 16 bits and 1.3 in fp32, whose sums are the errors, the most that was seen. Of n elements
(1 + 1/sqrt(n)) times so much: a single one, of the last row at head dim 1, is no mean, and 1.6 was seen."""
YARDSTICK_LSE = 6.0
"""The same for each row's LSE, so of the extremes of thousands: 2.8 was seen."""
LSE_ATOL = {"fp16": 1e-3, "bf16": 1e-3, "fp32": 2e-5, "fp64": 2e-5, "e4m3": 1e-3, "fp8": 1e-3}
"""LSE stays in float32 and sees no output rounding, so this is tight: wrong units or one extra key exceed it."""
LSE_ULPS = 4.0
"""Roundings of scores, in `_score_eps`, allowed in LSE, at the size of the largest that its row can hold
(Cauchy-Schwarz) or of LSE itself. In e4m3 as much as the yardstick errs is allowed as well: the tensor core cuts off
each term of an instruction's sum, so that where all terms have one sign scores drift, all the same way. A row that sees
one key has all of its score's drift: 5 roundings of LSE at scores of -120 and head dim 64."""
SINKS = {"fp16": 5.0, "bf16": 5.0, "fp32": 12.0, "fp64": 12.0, "fp8": 5.0}
"""A sink's gradient is one number a head, so the yardstick's own error there is as good as luck. It is a sum over rows
of P_sink delta, and delta = rowsum(dO O) has the roundings of O, of which there are rows times head_dim: their
deviation is found from the yardstick's errors of O, no smaller than `RMS_ROUNDING`, whose squares times those of P_sink
dO add up. Of as many heads as there are the largest is 4 deviations, times `OUT_RMS`. Beside these the sum may be off
by what LSE is, as P_sink is, and by `SUMMED` roundings of its terms. One row in a hundred that is left out, or counted
twice, is some 25 of these deviations in bf16."""
SCORE_MOD = {"fp16": 6.0, "bf16": 6.0, "fp32": 12.0, "fp64": 12.0}
"""Deviations that the gradient of a number that a score_mod reads may be off by. It is a sum of dS, of as few as one
score or of all; `flashzoo.roundings` has the deviation of each dS, rounded as `standard` rounds it, of which sums have
the root of the sum of squares. Of thousands of numbers the largest is 4 deviations; and what is off in a row is so in
all of its dS, by delta and LSE."""
LSE_QUANTIZED = 3.0
"""With precision="fp8", LSE may err this many times the yardstick's largest error as well: scores of quantised q and k
are off by hundredths, the same way for all keys of a query whose own rounding they share."""
CANCELLED = 4.0
"""Float32 roundings of the terms that a gradient cancels from. One that is smaller everywhere (a single visible key
makes dQ and dK exactly 0) has no relative error to speak of, and is held to this instead."""

ORACLE_EPS = 1e-12
"""The oracle is exact to about this much: float64's rounding through long sums and scores of thousands. Fp64 results
are held to it, since their own eps would ask more of the oracle than it has."""

_EPS32, _EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
_FP8 = ("e4m3", "fp8")
_SLICE_SCORES = 1 << 27  # score elements the yardstick holds at a time: 512 MB in float32


@dataclass(frozen=True)
class Check:
    """One rule applied to one tensor.

    Attributes:
        tensor: "out", "lse", "dq", "dk", "dv", "dsinks" or "dscore_mod".
        rule: what was compared, in words.
        error: what was measured; NaN where the tensor holds one.
        budget: the most that is accepted.
    """

    tensor: str
    rule: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the budget; a NaN never is."""
        return self.error <= self.budget

    @property
    def used(self) -> float:
        """The share of the budget that the error takes: at most 1 where ok."""
        if self.error == 0 or self.budget == 0:
            return 0.0 if self.ok else math.inf
        return self.error / self.budget

    def __str__(self) -> str:
        return f"{self.tensor}, {self.rule}: {self.error:.3g} {'within' if self.ok else 'exceeds'} {self.budget:.3g}"


class Judge:
    """Holds results for one set of inputs against the oracle. Oracle and yardstick are computed once, here.

    Args:
        q, k, v: as in `oracle`; never modified.
        problem: of these tensors. Its lse says whether results are judged by their lse.
        dout: gradient of out, in its shape; gradients are judged where it is given, unless k and v are e4m3:
            then there are none.
        dlse: gradient of lse `(batch, heads, seqlen_q)`, or None; needs dout.
        descales: of q, k and v where they are e4m3, as in `flashzoo.attention`; of packed sequences those of
            `flashzoo.reference.descales_of_rows`.
        mask: what the block mask shows, bool `(batch or 1, heads or 1, seqlen_q, seqlen_k)`, where the problem has one.
        sinks: as in `flashzoo.attention`, where the problem has them. Their gradient is judged in their dtype.
        scored: the score_mod, where the problem has one, at all places. The gradients of what it reads are judged as
            `flashzoo.scores.at.flat` puts them, each number in its tensor's dtype.
        kept: what dropout keeps, as `flashzoo.dropout.kept_at`, where the problem has it.

    Attributes:
        reference: the oracle's `Result`, float64.
        yardstick: the yardstick's `Result`; with precision="fp8" the plain one's.
        shown: the share of the pairs, of those that causal and window leave, that the mask shows;
            1 where there is none.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        problem: Problem,
        dout: Tensor | None = None,
        dlse: Tensor | None = None,
        descales: Descales = NO_DESCALES,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        scored: ScoredAt | None = None,
        kept: Tensor | None = None,
    ) -> None:
        if (kept is not None) != bool(problem.dropout_p):
            raise ValueError(f"kept must be given where the problem has dropout, got {problem} and {kept is not None}")
        if (scored is not None) != (problem.score_mod is not None):
            raise ValueError(f"scored must be given where the problem has a score_mod, got {problem} and {scored}")
        if (sinks is not None) != problem.sinks:
            raise ValueError(
                f"sinks must be given where the problem has them, got {problem} and sinks {sinks is not None}"
            )
        masked = problem.block_mask is not None or problem.by_lengths
        if (mask is not None) != masked:
            raise ValueError(
                "mask must be given with a block mask or lengths on the device, "
                f"got {problem} and a mask {mask is not None}"
            )
        q, k, v = q.detach(), k.detach(), v.detach()
        if problem.precision == "fp8" and mask is not None and "cache" in problem.features:
            k, v = _up_to_the_last_seen(k, mask), _up_to_the_last_seen(v, mask)
        self.problem = problem
        self._dtype = TORCH_DTYPES[problem.out_dtype]
        self._eps = max(torch.finfo(self._dtype).eps, ORACLE_EPS)
        if problem.kv_in_e4m3:
            dout = dlse = None
        self._mask, self._dout, self._dlse, self._scored, self._kept = mask, dout, dlse, scored, kept
        self._sinks = None if sinks is None else sinks.detach()
        wide = None if self._sinks is None else self._sinks.to(torch.promote_types(self._sinks.dtype, torch.float32))
        self.yardstick: Result = _yardstick(q, k, v, problem, dout, dlse, descales, mask, wide, scored, kept)
        if problem.kv_in_e4m3:
            q, k, v = (dequantized(x, descale) for x, descale in zip((q, k, v), descales, strict=True))
        self.reference: Result = oracle(q, k, v, problem, dout, dlse, mask=mask, sinks=wide, scored=scored, kept=kept)
        self._rows, self._pairs = problem.seqlen_q - problem.blind_rows, visible_pairs(problem)
        self.shown: float = 1.0
        if mask is not None:
            in_band = self._pairs
            self._rows, self._pairs, mean = _seen_by_a_head(problem, mask)
            self.shown = mean / in_band if in_band else 0.0
        self._summed = self._summation_slack(q, k, v)
        self._terms = _largest_terms(q, k, v, problem, dout)
        yards = [self._errors_of(self.yardstick)]
        self._plain_rms = _head_rms(yards[0]["out"])
        if problem.precision == "fp8":
            plain = replace(problem, grad=False)
            enough, most = FP8_DRAWS
            for seed in range(max(1, min(most, cdiv(enough, max(1, self._rows))))):
                turned = rotated(q, seed), rotated(k, seed)
                yards.append(self._errors_of(_yardstick(*turned, v, plain, None, None, descales, mask, wide)))
        # Of the yardsticks' errors only these figures are needed again.
        self._yard_max = {
            name: _pooled([_top(yard[name]) for yard in yards if name in yard]).item() for name in yards[0]
        }
        self._yard_row = _pooled([_top(_row_errors(yard["out"], self.reference.out)) for yard in yards]).item()
        self._yard_rms = _pooled([_head_rms(yard["out"]) for yard in yards])
        self._yard_l2 = {name: float(error.norm()) for name, error in yards[0].items() if name in _GRADIENTS}
        self._yard_blocks = {name: of_blocks(error) for name, error in yards[0].items() if name in _GRADIENTS}
        inputs = (q, k, v)
        self._of_yardstick = (self.yardstick, self.reference, inputs, problem, dout, dlse, mask, wide, scored, kept)

    def _errors_of(self, result: Result) -> dict[str, Tensor]:
        return {name: _absolute(value, self.reference.items()[name]) for name, value in result.items().items()}

    def checks(self, result: Result, rms: float | None = None) -> list[Check]:
        """Every rule applied to every tensor that the result has; the result is correct where all are `ok`.

        Args:
            result: out, lse (only where `problem.lse`; else it is not looked at) and gradients.
            rms: how many times the yardstick's the RMS error of a head's out may be, where that is less than `OUT_RMS`.

        Raises:
            ValueError: a tensor has another shape or dtype than the call promises.
        """
        found = []
        for name, value in self._judged(result).items():
            ref = self.reference.items()[name]
            self._check_form(name, value, ref)
            found.append(
                Check(
                    name,
                    "non-finite elements where the oracle is finite",
                    float((ref.isfinite() & ~value.isfinite()).sum()),
                    0,
                )
            )
            if ref.numel():
                rules = {
                    "out": self._out_checks,
                    "lse": self._lse_checks,
                    "dsinks": self._sinks_checks,
                    "dscore_mod": self._read_checks,
                }.get(name, self._gradient_checks)
                found += rules(name, _absolute(value, ref), value)
                if name == "out" and rms is not None:
                    found.append(
                        _tightest(
                            name,
                            "worst head's RMS, as declared",
                            _head_rms(_absolute(value, ref)),
                            self._rms_budget(rms),
                        )
                    )
        return found

    @cached_property
    def _roundings(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By name, the yardstick's errors and what its roundings should give it."""
        errors, expected = of_yardstick(*self._of_yardstick)
        return errors.items(), expected.items()

    @cached_property
    def of_yardstick(self) -> list[Check]:
        """The yardstick against the oracle, by what its roundings explain:
        the suite asks it with every result that is held to it.

        For numbers drawn at random alone: where they repeat, or are all of one sign, roundings go together
        and add up to more.
        """
        errors, expected = self._roundings
        found = []
        for name in errors:
            error, budget = errors[name].abs(), expected[name]
            if not error.numel():
                continue
            if name in ("lse", "dsinks", "dscore_mod"):
                budget = budget * YARDSTICK_LSE
            else:
                few = 1 / of_blocks(torch.ones_like(error))  # the root of the number of elements
                error, budget = of_blocks(error), YARDSTICK * (1 + few) * of_blocks(budget)
            found.append(_tightest(f"the yardstick's {name}", "beyond its roundings", error, budget))
        return found

    def errors(self, result: Result) -> dict[str, tuple[float, float]]:
        """Largest and RMS absolute error of each tensor that is judged, where the oracle is finite."""
        absolute = {
            name: _absolute(value, self.reference.items()[name]) for name, value in self._judged(result).items()
        }
        return {name: (_top(error), _rms(error)) for name, error in absolute.items()}

    def budgets(self) -> dict[str, tuple[float, float]]:
        """What `errors` may be at most, for a table; `checks` is stricter, since it looks at rows and heads."""
        budgets = {}
        for name, ref in self.reference.items().items():
            if not ref.numel():
                budgets[name] = (0.0, 0.0)
            elif name == "out":
                budgets[name] = (_top(self._out_budget()), float(self._rms_budget().square().mean().sqrt()))
            elif name in ("lse", "dsinks", "dscore_mod"):
                budget = {"lse": self._lse_budget, "dsinks": self._sinks_budget, "dscore_mod": self._read_budget}[name]
                budgets[name] = (_top(budget()),) * 2
            else:
                budgets[name] = (
                    self._gradient_max_budget(name),
                    self._gradient_l2_budget(name) / math.sqrt(ref.numel()),
                )
        return budgets

    def _judged(self, result: Result) -> dict[str, Tensor]:
        known = self.reference.items()
        return {
            name: value
            for name, value in result.items().items()
            if name in known and (name != "lse" or self.problem.lse)
        }

    def _check_form(self, name: str, value: Tensor, ref: Tensor) -> None:
        dtypes = (
            (self._dtype,)
            if name != "lse"
            else (torch.float32, torch.float64)
            if self.problem.dtype == "fp64"
            else (torch.float32,)
        )
        if name == "dsinks" and self._sinks is not None:
            dtypes = (self._sinks.dtype,)
        if name == "dscore_mod":
            dtypes = (torch.float64,)
        if value.shape != ref.shape or value.dtype not in dtypes:
            expected = f"shape {tuple(ref.shape)} and dtype {dtypes[0]}"
            raise ValueError(f"{name} must have {expected}, got {tuple(value.shape)} and {value.dtype}")

    def _out_checks(self, name: str, error: Tensor, value: Tensor) -> list[Check]:
        error = (error - self._summed).clamp_min(0)
        rms, rms_budget = _head_rms(error), self._rms_budget()
        return [
            _tightest(name, "elementwise", error, self._out_budget()),
            Check(
                name,
                "worst row's relative L2",
                _top(_row_errors(error, self.reference.out)),
                OUT_ROW * self._yard_row + self._eps,
            ),
            _tightest(name, "worst head's RMS", rms, rms_budget),
        ]

    def _summation_slack(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | float:
        if self.problem.out_dtype not in ("fp32", "fp64"):
            return 0.0  # rounding to 16 bits is a thousand times more
        more = {"mask": self._mask, "sinks": self._sinks, "scored": self._scored, "kept": self._kept}
        return SUMMED * self._eps * oracle(q, k, v.abs(), self.problem, **more).out

    def _out_budget(self) -> Tensor:
        row_max = self.reference.out.abs().amax(-1, keepdim=True)
        # the smallest subnormal: what the dtype can't resolve
        tiny = torch.finfo(self._dtype).smallest_normal * self._eps
        return (OUT_MAX * self._yard_max["out"] + tiny + self._eps * row_max).expand_as(self.reference.out)

    def _rms_budget(self, factor: float | None = None) -> Tensor:
        problem = self.problem
        independent = self._rows if problem.numerics in _FP8 else min(self._rows * problem.head_dim_v, self._pairs)
        rounding = RMS_ROUNDING * self._eps * _head_rms(self.reference.out)
        rms = OUT_RMS[problem.numerics] * self._yard_rms if factor is None else factor * self._plain_rms
        return _spread(independent) * torch.maximum(rms, rounding)

    def _lse_checks(self, name: str, error: Tensor, value: Tensor) -> list[Check]:
        misplaced = (value == -math.inf) != (self.reference.lse == -math.inf)
        return [
            Check(name, "rows where only one of it and the oracle is -inf", float(misplaced.sum()), 0),
            _tightest(name, "elementwise", error, self._lse_budget()),
        ]

    def _lse_size(self) -> Tensor:
        lse = self.reference.items()["lse"]
        return lse.masked_fill(~lse.isfinite(), 0).abs()

    def _lse_budget(self) -> Tensor:
        return LSE_ATOL[self.problem.numerics] + self._of_large_scores()

    def _of_large_scores(self) -> Tensor:
        """What LSE may err for what scores are rounded to."""
        budget = LSE_ULPS * self._score_eps() * torch.maximum(self._lse_size(), self._terms["lse"])
        if self.problem.numerics == "fp8":
            budget = budget + LSE_QUANTIZED * self._spread_of_rows() * self._yard_max["lse"]
        if self.problem.numerics == "e4m3":
            budget = budget + self._yard_max["lse"]
        return budget

    def _score_eps(self) -> float:
        """The rounding of a score: float32's, or what Hopper's FP8 tensor core keeps."""
        return 2.0**-HOPPER_SUM_BITS if self.problem.numerics in _FP8 else _EPS32

    def _spread_of_rows(self) -> float:
        problem = self.problem
        return _spread(self._rows * problem.batch * problem.heads)

    def _sinks_checks(self, name: str, error: Tensor, value: Tensor) -> list[Check]:
        return [_tightest(name, "of each head", error, self._sinks_budget())]

    def _sinks_budget(self) -> Tensor:
        """`(heads,)`"""
        assert self._sinks is not None and self._dout is not None
        ref, dout, numerics = self.reference.items(), self._dout.double(), self.problem.numerics
        out, lse = ref["out"], ref["lse"]
        p = torch.exp(self._sinks.double()[:, None] - lse.masked_fill(lse == -math.inf, 0))
        dlse = 0 if self._dlse is None else self._dlse.double()
        delta, terms = ((x.sum(-1).transpose(1, 2)) for x in (dout * out, (dout * out).abs()))
        of_out = torch.maximum(_absolute(self.yardstick.out, out), RMS_ROUNDING * self._eps * out.abs())
        of_delta = (dout * of_out).square().sum(-1).transpose(1, 2)
        eps = ORACLE_EPS if numerics == "fp64" else _EPS32
        summed = SUMMED * eps * (terms + abs(dlse)) + (delta - dlse).abs() * (SUMMED * eps + self._of_large_scores())
        stored = torch.finfo(self._sinks.dtype)
        rounding = stored.eps * (ref["dsinks"].abs() + stored.smallest_normal)
        return SINKS[numerics] * (p.square() * of_delta).sum((0, 2)).sqrt() + (p * summed).sum((0, 2)) + rounding

    def _read_checks(self, name: str, error: Tensor, value: Tensor) -> list[Check]:
        return [_tightest(name, "of each number", error, self._read_budget())]

    def _read_budget(self) -> Tensor:
        """`(numbers,)`"""
        assert self._scored is not None and self._dout is not None
        ref, dout = self.reference.items(), self._dout.double()
        of_out = torch.maximum(_absolute(self.yardstick.out, ref["out"]), RMS_ROUNDING * self._eps * ref["out"].abs())
        of_delta = (dout * of_out).square().sum(-1).transpose(1, 2)
        _, _, inputs, problem, _, _, mask, *_ = self._of_yardstick
        variances = self._roundings[1]["dscore_mod"].square() + of_delta_in_read(
            of_delta, ref["lse"], inputs, problem, mask, self._scored
        )
        rounding = self._scored.eps * (ref["dscore_mod"].abs() + torch.finfo(torch.float16).tiny)
        return SCORE_MOD[self.problem.numerics] * variances.sqrt() + rounding

    def _gradient_checks(self, name: str, error: Tensor, value: Tensor) -> list[Check]:
        return [
            Check(name, "L2 of the whole tensor", float(error.norm()), self._gradient_l2_budget(name)),
            Check(name, "largest element", _top(error), self._gradient_max_budget(name)),
            self._gradient_rows_check(name, of_blocks(error)),
        ]

    def _gradient_rows_check(self, name: str, error: Tensor) -> Check:
        """Of each block's error. What chance allows takes an oracle's work to know,
        and is asked where the rest is not enough."""
        rule, yard = f"L2 of {ROWS} rows of a head", self._yard_blocks[name]
        found = _tightest(name, rule, error, self._gradient_rows_budget(name, yard, torch.full_like(yard, ROWS)))
        if found.ok:
            return found
        expected = self._gradient_roundings[name]
        of_rows = expected.square().sum(-1, keepdim=True)
        # the square of a sum over the sum of squares
        rows = (of_blocks(of_rows.sqrt()) / of_blocks(of_rows).sqrt()).pow(4)
        by_roundings = torch.maximum(yard, USUAL * of_blocks(expected))
        return _tightest(
            name, rule, error, self._gradient_rows_budget(name, by_roundings, rows.nan_to_num(1).clamp_min(1))
        )

    @cached_property
    def _gradient_roundings(self) -> dict[str, Tensor]:
        """What its roundings should give the yardstick's gradients, that of out among them."""
        assert self._dout is not None
        ref, expected = self.reference.items(), self._roundings[1]
        of_delta = (self._dout.double() * ref["out"] * self._eps / 2).square().sum(-1).transpose(1, 2)
        _, _, inputs, problem, _, _, mask, *_ = self._of_yardstick
        more = of_delta_in_gradients(of_delta, ref["lse"], inputs, problem, mask, self._scored)
        return expected | {name: (expected[name].square() + x).sqrt() for name, x in more.items()}

    def _gradient_rows_budget(self, name: str, yard: Tensor, rows: Tensor) -> Tensor:
        """Of the yardstick's errors of blocks, each shared by as many rows."""
        ref = self.reference.items()[name]
        budget = yard + max(RMS_ROUNDING * self._eps, self._of_scores()) * of_blocks(ref)
        # what the dtype and a flushed exponential can't resolve
        smallest = torch.finfo(self._dtype).smallest_normal * self._eps / 2 + SMALLEST * self._terms[f"{name} over P"]
        budget += smallest * math.sqrt(ROWS * ref.shape[-1])
        budget = GRAD_ROWS[self.problem.numerics] * (1 + 2 * rows.rsqrt()) * budget
        return budget.clamp_min(self._cancelled(name) * math.sqrt(ROWS * ref.shape[-1]))

    def _gradient_l2_budget(self, name: str) -> float:
        ref = self.reference.items()[name]
        fp8 = self.problem.numerics in _FP8
        spread = self._spread_of_rows() if fp8 else _spread(self._pairs * self.problem.batch * self.problem.heads)
        budget = GRAD_L2[self.problem.numerics] * spread * self._yard_l2[name] + self._recomputed() * float(ref.norm())
        return max(budget, self._cancelled(name) * math.sqrt(ref.numel()))

    def _gradient_max_budget(self, name: str) -> float:
        budget = GRAD_MAX[self.problem.numerics] * self._yard_max[name] + self._recomputed() * _top(
            self.reference.items()[name].abs()
        )
        return max(budget, self._cancelled(name))

    def _recomputed(self) -> float:
        """Relative error of the P that a backward pass recomputes from scores and LSE: each is rounded at its own size,
        and exp turns that into a relative error, which no normalisation divides out again."""
        return max(self._eps, self._of_scores())

    def _of_scores(self) -> float:
        return (_EPS64 if self._dtype == torch.float64 else _EPS32) * _top(self._lse_size())

    def _cancelled(self, name: str) -> float:
        """The rounding that a gradient cancels from, where it is no larger than that; else 0."""
        accumulator = torch.float64 if self._dtype == torch.float64 else torch.float32
        rounding = CANCELLED * torch.finfo(accumulator).eps * float(self._terms[name])
        return rounding if _top(self.reference.items()[name].abs()) <= rounding else 0.0


_GRADIENTS = ("dq", "dk", "dv")


def _up_to_the_last_seen(x: Tensor, mask: Tensor) -> Tensor:
    """Keys or values of caches with zeros for what is not used:
    no version reads it, and the yardstick's scales would be coarser for it."""
    used = mask.any(2).flip(-1).cummax(-1).values.flip(-1)  # (batch, 1, seqlen_k)
    return x.masked_fill(~used.transpose(1, 2)[..., None], 0)


def _yardstick(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    dout: Tensor | None,
    dlse: Tensor | None,
    descales: Descales,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    scored: ScoredAt | None = None,
    kept: Tensor | None = None,
) -> Result:
    """`standard` on as many (batch, key/value head) slices at a time as fit in `_SLICE_SCORES`."""
    grad = dout is not None
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=TORCH_DTYPES[problem.out_dtype])
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=wide)
    dq, dk, dv = (x.new_zeros(x.shape) if grad else None for x in (q, k, v))
    lse, dsinks = with_sinks(lse, sinks), None
    if sinks is not None and grad:
        dsinks = torch.zeros_like(sinks)
        if dlse is not None and not k.shape[1]:  # then there are no parts, and the sink is all that a row sees
            dsinks += gradient_of_sinks(sinks, lse, -dlse)
    of_read = None if scored is None or not grad or not scored.differentiable else flat(scored.differentiable).zero_()
    whole = Result(out, lse, dq, dk, dv, dsinks, of_read)
    rows = [None if descale is None else of_rows(x, descale) for x, descale in zip((q, k, v), descales, strict=True)]
    for part in parts(q, k, _SLICE_SCORES, whole_groups=True):
        some = [x[index] for x, index in ((q, part.queries), (k, part.keys), (v, part.keys))]
        given = [None if x is None else x[index] for x, index in ((dout, part.queries), (dlse, part.rows))]
        scales = [
            None if x is None else x[index] for x, index in zip(rows, (part.queries, part.keys, part.keys), strict=True)
        ]
        dense: Any = of_part(mask, part)  # which `standard` takes
        operands = Operands(
            scales[0],
            scales[1],
            scales[2],
            dense,
            sinks=None if sinks is None else sinks[part.rows[1]],
            dropout_seed=of_part(kept, part),  # the same
        )
        of = None if scored is None else scored.part(*part.rows)
        found = _standard(some, problem, given, operands, of).items()
        if "dscore_mod" in found:
            whole.items()["dscore_mod"].add_(found.pop("dscore_mod"))
        if dsinks is not None:
            dsinks[part.rows[1]] += found.pop("dsinks")  # every batch adds
        for name, value in found.items():
            whole.at(part).items()[name].copy_(value)
    return whole


def _standard(
    inputs: list[Tensor],
    problem: Problem,
    gradients: list[Tensor | None],
    operands: Operands,
    scored: ScoredAt | None,
) -> Result:
    (batch, _, heads, _), heads_kv = inputs[0].shape, inputs[1].shape[2]
    dout, dlse = gradients
    problem = replace(problem, batch=batch, heads=heads, heads_kv=heads_kv, lse=True, grad=dout is not None)
    sinks = None if operands.sinks is None else operands.sinks.detach().requires_grad_(dout is not None)
    operands = replace(operands, sinks=sinks)
    q, k, v = [x.detach().requires_grad_(dout is not None) for x in inputs]
    placed: Any = scored  # which `standard` takes
    operands = replace(operands, score_mod=placed)
    leaves = (q, k, v, *operands.differentiable)
    with torch.enable_grad():
        out, lse = standard(q, k, v, problem, operands)
        assert lse is not None, "standard gives lse where problem.lse"
        if dout is None:
            return Result(out, lse)
        outputs, given = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.to(lse.dtype)])
        found = torch.autograd.grad(outputs, leaves, given)
        first = len(leaves) - (0 if scored is None else len(scored.differentiable))
        of_read = flat(found[first:]) if first < len(leaves) else None
        return replace(Result(out.detach(), lse.detach(), *found[:first]), dscore_mod=of_read)


def _seen_by_a_head(problem: Problem, mask: Tensor) -> tuple[int, int, float]:
    """Rows that see a key, and pairs that are seen, of the head that has fewest of all that see anything;
    and the pairs in the mean."""
    seen = visible(problem, mask.device, mask)
    assert seen is not None
    per_head = torch.stack([seen.any(-1).sum(-1), seen.sum((-1, -2))]).flatten(1)
    seeing = per_head[:, per_head[1] > 0]
    rows, pairs = seeing.amin(1).tolist() if seeing.numel() else (0, 0)
    return rows, pairs, float(per_head[1].double().mean())


def _largest_terms(q: Tensor, k: Tensor, v: Tensor, problem: Problem, dout: Tensor | None) -> dict[str, Tensor]:
    """Bounds on the terms that lse `(batch, heads, seqlen_q)`, dq, dk and dv (one number each) are summed from; and on
    the sums of those three if every P were 1."""
    wide = [
        x.to(torch.float64) if x is not None and x.numel() else q.new_zeros((1, 1, 1, 1), dtype=torch.float64)
        for x in (q, k, v, dout)
    ]
    (q_norm, k_norm, v_norm, dout_norm) = (x.norm(dim=-1) for x in wide)
    group = problem.heads // problem.heads_kv
    reach = k_norm.amax(1).repeat_interleave(group if k.numel() else 1, 1)[..., None]
    ds = abs(problem.scale) * dout_norm.max() * v_norm.max() / (1 - problem.dropped)
    queries_per_key = max(1.0, group * problem.seqlen_q / max(1, problem.seqlen_k))
    return {
        "lse": abs(problem.scale) * q_norm.transpose(1, 2) * reach,
        "dq": ds * wide[1].abs().max(),
        "dk": ds * wide[0].abs().max() * queries_per_key,
        "dv": ds.new_zeros(()),  # a sum of P dO: nothing in it cancels by construction
        "dq over P": ds * wide[1].abs().max() * problem.seqlen_k,
        "dk over P": ds * wide[0].abs().max() * problem.seqlen_q * group,
        "dv over P": wide[3].abs().max() * problem.seqlen_q * group / (1 - problem.dropped),
    }


def _spread(n: int) -> float:
    """How much the RMS of n independent roundings may exceed what is expected."""
    return 1 + SPREAD / math.sqrt(max(1, n))


def _absolute(value: Tensor, ref: Tensor) -> Tensor:
    """|value - ref| in float64, 0 where the oracle is not finite (those elements have checks of their own)."""
    return (value.to(ref.dtype) - ref).abs_().masked_fill_(~ref.isfinite(), 0)


def _row_errors(error: Tensor, ref: Tensor) -> Tensor:
    """`(batch, seqlen_q, heads)`: relative L2 of each row."""
    size, wrong = ref.norm(dim=-1), error.norm(dim=-1)
    typical = size.square().mean(1, keepdim=True).sqrt()
    size = torch.where(size > 0, torch.maximum(size, ROW_FLOOR * typical), size)
    return torch.where(wrong == 0, wrong, wrong / size)


def _head_rms(x: Tensor) -> Tensor:
    """`(batch, heads)`."""
    return x.square().mean((1, 3)).sqrt()


def _pooled(figures: list[Tensor] | list[float]) -> Tensor:
    """Of the plain yardstick's figure and the rotated ones': the larger of the first and the RMS of the others."""
    plain, *turned = (torch.as_tensor(x, dtype=torch.float64, device=getattr(x, "device", "cpu")) for x in figures)
    return torch.maximum(plain, torch.stack(turned).square().mean(0).sqrt()) if turned else plain


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _top(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _tightest(tensor: str, rule: str, error: Tensor, budget: Tensor) -> Check:
    """The check of the element that has the least to spare; a NaN has less than any."""
    at = (error - budget).argmax()
    return Check(tensor, rule, float(error.flatten()[at]), float(budget.flatten()[at]))
