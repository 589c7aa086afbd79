"""`ScoreMod`: a function of the caller's on scores, traced, with the tensors that it captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashzoo.call.forms import ScoreForm
from flashzoo.scores.by_default import float32_by_default

if TYPE_CHECKING:
    from flashzoo.scores.program import Program

Function = Callable[..., Tensor]


class ScoreMod:
    """A function on scores, as `flashzoo.attention` takes it, traced once and for all.

    `attention(score_mod=)` takes the function itself as well, and traces it again only where what it captured is
    another: numbers, tensors of other shapes or dtypes. One that reads through objects of classes of your own, by
    `getattr` or `vars`, or what it imports, is traced at every call, unless it is a `ScoreMod`; and only as such can it
    be in a graph of `torch.compile`, or be exported, by which its tensors are taken for constants. It can be copied and
    pickled, and then reads copies of its tensors. These are the very ones that it met: what has another put in the
    place of a module's buffer, `torch.func.functional_call` or `half()`, changes what a function reads that looks it
    up, and not what a `ScoreMod` does.

    Args:
        function: `(score, batch, head, q_idx, kv_idx) -> score`, FlexAttention's signature: on tensors of no
            dimensions, the score in float32, scaled, the others int32. It is called here alone, on tensors without
            data. Torch's default dtype is float32 meanwhile.

    Attributes:
        function: as given; None where there is only a text.
        program: what it computes.
        text: the program's, which is what kernels are chosen by and made of.
        tensors: what it captured, in the order in which it reads them.

    Raises:
        TypeError, ValueError: the function returns something else than a score, depends on data, changes what it was
            given or captured, or uses an operation that no kernel has; the text says which.
        IndexError: it reads a tensor past its end, or by more indices than it has dimensions.
    """

    def __init__(self, function: Function) -> None:
        from flashzoo.scores.captures import program_of

        if not callable(function):
            raise TypeError(f"score_mod must be a function (score, batch, head, q_idx, kv_idx), got {function!r}")
        self.function: Function | None = function
        self.program: Program
        self.tensors: tuple[Tensor, ...]
        self.program, self.tensors = program_of(function)
        self.text: str = self.program.text
        self._grads: tuple[int, ...] | None = None

    @classmethod
    def of_parts(cls, text: str, tensors: tuple[Tensor, ...], grads: tuple[int, ...] | None = None) -> ScoreMod:
        """One from its program's text, its tensors, and the numbers of those that are to have gradients, which where
        None are those that require them. ValueError where the text is none, or reads other tensors."""
        from flashzoo.scores.program import parsed

        return cls.of_program(None, parsed(text), tuple(tensors), grads)

    @classmethod
    def of_program(
        cls, function: Function | None, program: Program, tensors: tuple[Tensor, ...], grads: tuple[int, ...] | None
    ) -> ScoreMod:
        """One from its parts as they are kept."""
        found = cls.__new__(cls)
        found.function, found.program, found.text = function, program, program.text
        found.tensors, found._grads = tensors, grads
        return found

    @classmethod
    def of(cls, function: Function | ScoreMod) -> ScoreMod:
        """Of a function that may have been traced before."""
        if isinstance(function, ScoreMod):
            return function
        from flashzoo.scores.captures import mod_of

        return mod_of(function)

    @property
    def grads(self) -> tuple[int, ...]:
        """The numbers of the tensors that have gradients."""
        if self._grads is not None:
            return self._grads
        return tuple([i for i, x in enumerate(self.tensors) if x.requires_grad])

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """The tensors that have gradients."""
        return tuple([self.tensors[i] for i in self.grads])

    @property
    def form(self) -> ScoreForm:
        """What the choice of a version and of its kernels depends on."""
        from flashzoo.scores.evaluate import NAMES

        reads = tuple([(NAMES[x.dtype], tuple(x.shape)) for x in self.tensors])
        return ScoreForm(self.text, reads, self.grads, any([is_far(x) for x in self.tensors]))

    def resolved(self) -> ScoreMod:
        """Itself, or the same of tensors none of which is lazily negated."""
        if not any([x.is_neg() for x in self.tensors]):
            return self
        return self.of_program(None, self.program, tuple(x.resolve_neg() for x in self.tensors), self._grads)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """New scores, of tensors that broadcast; where score is float64 all that is float32 is."""
        return self.on((score, b, h, q, k), self.tensors)

    @float32_by_default()
    def on(
        self,
        arguments: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        tensors: tuple[Tensor, ...],
        rounded: bool = True,
        read_as: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """As the call, with other tensors in place of those that it captured; `rounded` and `read_as` as
        `evaluated`."""
        from flashzoo.scores.evaluate import evaluated
        from flashzoo.scores.trace import ARGUMENTS

        (found,) = evaluated(
            self.program, dict(zip(ARGUMENTS, arguments, strict=True)), None, tensors, rounded, read_as
        )
        return found.to(arguments[0].dtype).expand_as(arguments[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its text, with copies of its tensors, which its function would not read."""
        return ScoreMod.of_parts, (self.text, self.tensors, self._grads)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", "of a text")
        return f"ScoreMod({name}: {len(self.program.steps)} operations, {len(self.tensors)} tensors)"


def is_far(x: Tensor) -> bool:
    """Whether 32 bits don't number its elements, in memory or one behind another."""
    return max(x.numel(), sum([(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)])) >= 1 << 31
