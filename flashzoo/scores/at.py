"""A function on scores at all places of a problem at once: what the oracle and `standard` compute with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashzoo.lengths import Ranges, places
from flashzoo.scores.mod import ScoreMod

Places = tuple[Tensor, Tensor, Tensor, Tensor]
LEAST = torch.finfo(torch.float32).min / math.log2(math.e)
"""A score below is -inf in kernels, which have it in log2 units, and so everywhere."""


@dataclass(frozen=True, eq=False)
class ScoredAt:
    """Of scores `(batch, heads, seqlen_q, seqlen_k)` what a function is told beside each.

    Attributes:
        mod: the function.
        places: as `flashzoo.lengths.places`.
    """

    mod: ScoreMod
    places: Places

    @classmethod
    def of(cls, mod: ScoreMod | None, sizes: tuple[int, int, int, int], ranges: Ranges | None) -> ScoredAt | None:
        """All places, None without a function.

        Args:
            sizes: batch, heads, seqlen_q and seqlen_k of the scores.
            ranges: of packed sequences.
        """
        if mod is None:
            return None
        return cls(mod, places(sizes, ranges, mod.tensors[0].device if mod.tensors else "cpu"))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that the function reads."""
        return self.mod.tensors

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """The tensors that have gradients."""
        return self.mod.differentiable

    @property
    def eps(self) -> Tensor:
        """Of all numbers of these, one behind another, that of their dtypes, `(numbers,)`."""
        return flat(
            tuple(torch.full_like(x, torch.finfo(x.dtype).eps, dtype=torch.float64) for x in self.differentiable)
        )

    def part(self, batch: slice, heads: slice) -> ScoredAt:
        """Of some of the batch and some heads."""
        b, h, q, k = self.places
        return ScoredAt(self.mod, (b if b.shape[0] == 1 else b[batch], h[:, heads], q, k))

    def _on(self, device: torch.device) -> Places:
        b, h, q, k = self.places
        return b.to(device), h.to(device), q.to(device), k.to(device)

    def __call__(self, s: Tensor) -> Tensor:
        """New scores from those scaled; in float64 from float64, whatever the tensors are in that the function
        reads."""
        return self._new(s, self._read(), s.dtype != torch.float64)

    def _new(
        self,
        s: Tensor,
        read: tuple[Tensor, ...],
        rounded: bool,
        read_as: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        new = self.mod.on((s, *self._on(s.device)), read, rounded, read_as)
        return new.masked_fill(new < LEAST, -torch.inf)

    def _read(self) -> tuple[Tensor, ...]:
        """The function's tensors, as none of autograd's, but with their tangents, which `detach` would drop."""
        return tuple(x.detach() if x.requires_grad else x for x in self.mod.tensors)

    def gradients(self, s: Tensor, ds: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """From the scaled scores and the gradient of the new ones that of the scaled ones; and those of the tensors
        that have one, in the scores' dtype. A score that has no part, whose gradient is 0, gives none, though what is
        computed with it be no number."""
        read, elements, alone = list(self._read()), list[Tensor](), list[Tensor]()
        for i in self.mod.grads:
            read[i] = read[i].to(s.dtype).requires_grad_()
        of_these = [read[i] for i in self.mod.grads]

        def of_each_score(x: Tensor) -> Tensor:
            if not x.requires_grad:
                return x
            elements.append(x.expand_as(s))
            alone.append(elements[-1].detach().requires_grad_())
            return alone[-1]

        def of_parts(x: Tensor) -> Tensor:
            return torch.where(ds == 0, x.new_zeros(()), x)

        with torch.enable_grad():
            s = s.detach().requires_grad_()
            new = self._new(s, tuple(read), False, of_each_score)
            if not new.requires_grad:  # a function of none of these
                return torch.zeros_like(ds), tuple(map(torch.zeros_like, of_these))
            first, *found = torch.autograd.grad(new, (s, *alone), ds, allow_unused=True, materialize_grads=True)
        if not elements:
            return of_parts(first), tuple(map(torch.zeros_like, of_these))
        sums = torch.autograd.grad(
            elements, of_these, list(map(of_parts, found)), allow_unused=True, materialize_grads=True
        )
        return of_parts(first), sums

    def squares(self, s: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """By what a change of each score changes the new one; and of all numbers of the tensors that have gradients,
        one behind another, the sum over scores of weights times the square of that."""
        # no part of `import flashzoo`
        from flashzoo.scores.evaluate import evaluated
        from flashzoo.scores.program import is_value
        from flashzoo.scores.trace import gradient_of

        gradient, tensors = gradient_of(self.mod.program.text), tuple(x.detach() for x in self.mod.tensors)
        inputs = {"score": s, "ds": torch.ones_like(s), **dict(zip("bhqk", self._on(s.device), strict=True))}
        outputs = dict(zip(gradient.program.outputs, evaluated(gradient.program, inputs, None, tensors), strict=True))
        sums = {i: s.new_zeros(tensors[i].numel()) for i in self.mod.grads}
        for tensor, indices, value in gradient.loads:
            if tensor in sums:
                at = torch.zeros((), dtype=torch.int64, device=s.device)
                for name, size in zip(indices, tensors[tensor].shape, strict=True):
                    at = at * size + (outputs[name].long() if is_value(name) else int(name)) % size
                each = (weights * outputs[value].square()).expand_as(s)
                sums[tensor].index_add_(0, at.expand_as(s).flatten(), each.flatten().to(s.dtype))
        return outputs[gradient.score].to(s.dtype).expand_as(s), torch.cat([*sums.values(), s.new_zeros(0)])


def flat(gradients: tuple[Tensor, ...]) -> Tensor:
    """The gradients of the tensors of a function on scores as one, float64 `(numbers,)`, as `Result` has them."""
    return torch.cat([*(x.detach().double().flatten() for x in gradients)])
