"""What cells may have on their scores, by name, as models put it there: what versions and peers are asked, and what the
referee is told.

A name is what the column `score` of a results file holds: `softcap` (of 30, Gemma 2), `alibi` (slopes
2^(-8 (h + 1) / heads), BLOOM and MPT), `bias` (numbers in q's dtype of each head, query and key, the same in all of the
batch, AlphaFold 2), `bias_grad` (backward alone, their gradient too), `sinks` (a logit of each head, gpt-oss; backward
its gradient too) and `dropout` (of a tenth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from flashzoo import score_mods
from flashzoo.call.problem import Problem
from flashzoo.dropout import kept
from flashzoo.dtypes import BYTES, TORCH_DTYPES
from flashzoo.inputs import inputs, sinks
from flashzoo.lengths import places
from flashzoo.scores.at import ScoredAt
from flashzoo.scores.mod import ScoreMod

PLAIN = "plain"
"""What stands among the names for nothing."""
SOFTCAP, ALIBI, BIAS, BIAS_GRAD, SINKS, DROPOUT = "softcap", "alibi", "bias", "bias_grad", "sinks", "dropout"
NAMES = (PLAIN, SOFTCAP, ALIBI, BIAS, BIAS_GRAD, SINKS, DROPOUT)
BIASES = (BIAS, BIAS_GRAD)
CAP, DROPPED, SEED = 30.0, 0.1, 7
LARGER = 5
"""What q is multiplied by under a softcap: scores of deviation 1 feel so little of it that a result without it would
pass."""
MOST_OF_MEMORY = 0.8
"""What of a GPU's memory a bias and what is made of it may take."""


@dataclass(frozen=True)
class Scores:
    """What one cell has on its scores, on the problem's device.

    Attributes:
        name: one of `NAMES` but `PLAIN`.
        problem: with nothing on its scores; its grad says whether there are gradients.
    """

    name: str
    problem: Problem

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v and dout."""
        q, *others = inputs(self.problem, device=self.problem.device)
        return (q * LARGER if self.name == SOFTCAP else q, *others)

    @cached_property
    def slopes(self) -> Tensor:
        """float32 `(heads,)`, of ALiBi."""
        heads = self.problem.heads
        return torch.exp2(torch.arange(1, heads + 1, device=self.problem.device) * (-8 / heads))

    @cached_property
    def bias(self) -> Tensor:
        """`(1, heads, seqlen_q, seqlen_k)` of normal random numbers, in the problem's dtype."""
        p = self.problem
        drawn = _normal((1, p.heads, p.seqlen_q, p.seqlen_k), TORCH_DTYPES[p.dtype], p.device)
        return drawn.detach().requires_grad_(self.gradient == "dscore_mod")

    @cached_property
    def sinks(self) -> Tensor:
        """float32 `(heads,)`."""
        drawn = sinks(replace(self.problem, sinks=True), device=self.problem.device)
        assert drawn is not None
        return drawn.requires_grad_(self.problem.grad)

    @cached_property
    def seed(self) -> Tensor:
        """int64 `(1,)`, of dropout."""
        return torch.full((1,), SEED, dtype=torch.int64, device=self.problem.device)

    @cached_property
    def score_mod(self) -> ScoreMod | None:
        """As `flashzoo.attention` takes it; None for what is no function on scores."""
        if self.name == SOFTCAP:
            return score_mods.softcap(CAP)
        if self.name == ALIBI:
            return score_mods.alibi(self.slopes)
        return score_mods.bias(self.bias) if self.name in BIASES else None

    @property
    def options(self) -> dict[str, Any]:
        """By the arguments of `flashzoo.attention`."""
        if self.name == SINKS:
            return {"sinks": self.sinks}
        return self.asked | {"dropout_seed": self.seed} if self.name == DROPOUT else {"score_mod": self.score_mod}

    @property
    def asked(self) -> dict[str, Any]:
        """By the fields of `Problem`."""
        if self.score_mod is not None:
            return {"score_mod": self.score_mod.form}
        return {"sinks": True} if self.name == SINKS else {"dropout_p": DROPPED}

    @property
    def gradient(self) -> str:
        """What `Result` calls the gradient that there is beside q's, k's and v's; empty for none."""
        return {BIAS_GRAD: "dscore_mod", SINKS: "dsinks"}.get(self.name, "") if self.problem.grad else ""

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What has it, by that name."""
        return {self.gradient: self.sinks if self.name == SINKS else self.bias} if self.gradient else {}

    def judged(self, batch: int, heads: int, queries: Tensor | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the first of the batch and of the heads, and of some queries, None for all: the fields of `Problem`,
        and what `Judge` is told."""
        p = self.problem
        b, h, q, k = places((batch, heads, p.seqlen_q, p.seqlen_k), None, torch.device(p.device))
        at = b, h, q if queries is None else queries.int()[:, None], k
        if self.name == SINKS:
            return self.asked, {"sinks": self.sinks[:heads]}
        if self.name == DROPOUT:
            return self.asked, {"kept": kept(self.seed, replace(p, **self.asked).dropped, at)}
        mod = self.score_mod
        if self.name in BIASES:  # some rows of it, and so with the first numbers of rows
            some = self.of_heads(self.bias, heads, queries).detach().requires_grad_(self.bias.requires_grad)
            mod, at = score_mods.bias(some), (b, h, q[: some.shape[2]], k)
        assert mod is not None
        return {"score_mod": mod.form}, {"scored": ScoredAt(mod, at)}

    @staticmethod
    def of_heads(x: Tensor, heads: int, queries: Tensor | None) -> Tensor:
        """The rows of a bias, or of its gradient, that `judged` is of."""
        return x[:, :heads] if queries is None else x[:, :heads, queries]

    @property
    def bytes(self) -> int:
        """What a bias takes: itself, and what a peer makes of it; with its gradient, that too, summed in float32."""
        if self.name not in BIASES:
            return 0
        p, gradient = self.problem, self.name == BIAS_GRAD
        of_one = (3 if gradient else 2) * BYTES[p.dtype] + (4 if gradient else 0)
        return p.heads * p.seqlen_q * p.seqlen_k * of_one


def fits(name: str, problem: Problem) -> bool:
    """Whether there is room for the bias."""
    return Scores(name, problem).bytes <= room(problem.device)


def room(device: str) -> float:
    """Bytes that biases may take."""
    return MOST_OF_MEMORY * torch.cuda.get_device_properties().total_memory if device == "cuda" else math.inf


@lru_cache(maxsize=1)
def scores(name: str, problem: Problem) -> Scores:
    """Those of that name, kept while one cell is at hand."""
    return Scores(name, problem)


@lru_cache(maxsize=1)
def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=torch.Generator(device).manual_seed(0))


def forget() -> None:
    """Give back the memory of what is kept."""
    scores.cache_clear()
    _normal.cache_clear()
