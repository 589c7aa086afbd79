"""Correct before fast: results of full size, held against the oracle on a part of them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from torch import Tensor

from bench import masks
from bench.cells import Cell
from bench.contenders import parted
from bench.peers import PEERS
from bench.rows import Row
from bench.scores import Scores
from flashzoo.accuracy import Judge
from flashzoo.call.forms import MaskForm
from flashzoo.call.operands import NO_DESCALES
from flashzoo.reference import Result
from flashzoo.scores.at import flat

PEER_SLACK = 4.0
"""A peer's numerics are its own (another rounding of P, atomics): it is refused a speed where it errs this many times
what a version may. Versions get no slack."""


class WrongResultError(Exception):
    """A result fails the rule of `flashzoo.accuracy`."""


class Referee:
    """Holds full-size results of one cell against the oracle, on the first batch element and two heads (or one group).
    What is on the scores may have a gradient, a sum over batches: then these are all.

    Where only some queries are checked (`Cell.queries`), the oracle computes these, on all keys. Gradients then are
    those of these queries' out: so dk and dv are known in full, and every block of a mask has its part in them.

    Args:
        cell: what ran.
        tensors: q, k, v and dout at full size.
    """

    def __init__(self, cell: Cell, tensors: tuple[Tensor, ...]) -> None:
        problem = cell.problem
        group = problem.heads // problem.heads_kv
        self.heads_kv = min(problem.heads_kv, ceil(2 / group))
        self.heads = self.heads_kv * group
        self.scores = cell.scores
        self.batch = problem.batch if self.scores and self.scores.gradient else 1
        self.sample = replace(cell.dense, batch=self.batch, heads=self.heads, heads_kv=self.heads_kv, lse=False)
        heads = (self.heads, self.heads_kv, self.heads_kv, self.heads)
        q, k, v, dout = (x[:, :, :n] for x, n in zip(tensors, heads, strict=True))
        k, v = (cell.caches.first(x) if cell.caches else x[: self.batch] for x in (k, v))
        self.tensors = [q[: self.batch], k, v, dout[: self.batch]]
        found = cell.caches.descales if cell.caches else NO_DESCALES
        self.descales = tuple(None if x is None else x[: self.batch, : self.heads_kv] for x in found)
        self.queries, self.mask = cell.queries, None
        if self.queries is not None:
            self.tensors = [x if i in (1, 2) else x[:, self.queries] for i, x in enumerate(self.tensors)]
            if cell.pattern:
                self.mask = cell.pattern.of_queries(self.queries)
            elif cell.packed:
                self.mask = cell.packed.seen_by(self.queries, problem.causal)
            elif problem.causal:
                self.mask = masks.in_band(self.queries, problem.seqlen_k)[None, None]
            form = None if self.mask is None else MaskForm()
            self.sample = replace(
                self.sample, seqlen_q=len(self.queries), causal=False, block_mask=form, sequences=None
            )
        self.judges: dict[tuple[str, ...], Judge] = {}

    def judge(self, impl: str) -> Judge:
        """Of what that implementation is asked for, which may err more where it quantizes its inputs."""
        numerics = {name: value for name, value in parted(impl)[1].items() if name in ("precision", "fast_accum")}
        key = tuple(numerics)
        if key not in self.judges:
            q, k, v, dout = self.tensors
            asked, told = self.scores.judged(self.batch, self.heads, self.queries) if self.scores else ({}, {})
            sample = replace(self.sample, **numerics, **asked)
            told |= {"descales": self.descales, "mask": self.mask}
            self.judges[key] = Judge(q, k, v, sample, dout if sample.grad else None, **told)
        return self.judges[key]

    def errors(self, impl: str, result: Result) -> Row:
        """The columns max_err and rms_err: of out, or the worst of the gradients.

        Raises:
            WrongResultError: a check fails; for a peer, by more than `PEER_SLACK`.
        """
        sliced = Result(**{name: self._part(name, x) for name, x in result.items().items() if name != "lse"})
        slack, judge = PEER_SLACK if impl in PEERS else 1, self.judge(impl)
        failed = [str(check) for check in judge.checks(sliced) if not check.used <= slack]
        if failed:
            raise WrongResultError("; ".join(failed))
        found = judge.errors(sliced)
        of_pass = [errors for name, errors in found.items() if name != "out"] or [found["out"]]
        return {"max_err": f"{max(top for top, _ in of_pass):.3e}", "rms_err": f"{max(rms for _, rms in of_pass):.3e}"}

    def _part(self, name: str, x: Tensor) -> Tensor:
        """What is known of one tensor of a result."""
        if name == "dsinks":
            return x[: self.heads]
        if name == "dscore_mod":
            return flat((Scores.of_heads(x, self.heads, self.queries),))
        x = x[: self.batch, :, : self.heads_kv if name in ("dk", "dv") else self.heads]
        return x if self.queries is None or name in ("dk", "dv") else x[:, self.queries]
