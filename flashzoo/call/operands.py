"""What goes with q, k and v that is no plain value: each operand with its checks, its hashable form,
and its place in a torch operator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flashzoo.call.forms import normalised
from flashzoo.call.problem import DESCALE_BLOCK, Problem
from flashzoo.integers import cdiv
from flashzoo.lengths import Ranges
from flashzoo.masks.block_mask import BlockMask
from flashzoo.scores.mod import ScoreMod, is_far

# quoted, or pyright --verifytypes does not know it
Descales: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None]"
NO_DESCALES: Descales = (None, None, None)


@dataclass(frozen=True, eq=False, slots=True)
class Operands:
    """What a version is handed beside q, k and v; see `flashzoo.attention`. None where the call has none.

    Attributes:
        q_descale, k_descale, v_descale: of e4m3 inputs; float32, of any strides.
        block_mask: the call's causal and window are in it.
        cu_seqlens_q, cu_seqlens_k: of packed sequences, int32 without gaps, see `ranges`; of the latter there is none
            where k and v are caches.
        seqused_k: how many keys of each sequence are used, packed or not; int32 without gaps.
        page_table: int32 `(batch or sequences, pages of a sequence)`, rows without gaps: k and v are pages
            `(pages, page_size, heads_kv, head_dim)`.
        sinks: `(heads,)` without gaps, float32, or float64 where q may be.
        score_mod: traced, with the tensors that it reads, of any strides.
        dropout_seed: int64 `(1,)`, nobody else's, where the problem has a dropout_p.
    """

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    block_mask: BlockMask | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    sinks: Tensor | None = None
    score_mod: ScoreMod | None = None
    dropout_seed: Tensor | int | None = None

    def seeded(self, problem: Problem, device: torch.device, drawn: bool = True) -> Operands:
        """These with their seed in memory, where the problem has dropout. It is copied, as its owner may write the next
        one before a backward pass reads this.

        Args:
            drawn: draw one where there is none; else that is a ValueError.
        """
        if not problem.dropout_p:
            return self
        seed = self.dropout_seed
        if seed is None and not drawn:
            raise ValueError(
                f"dropout_seed must be that of the forward pass where dropout_p is {problem.dropout_p}, got None"
            )
        return replace(self, dropout_seed=seed_on(seed, device))

    @property
    def ranges(self) -> Ranges | None:
        """Which rows are whose, where sequences are packed, keys too."""
        if self.cu_seqlens_q is None:
            return None
        return Ranges(
            self.cu_seqlens_q, self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k, self.seqused_k
        )

    @property
    def descales(self) -> Descales:
        """Those of q, k and v."""
        return self.q_descale, self.k_descale, self.v_descale

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are one, and those that a function on scores reads."""
        found = {name: x for name in OPERANDS if isinstance(x := getattr(self, name), Tensor)}
        read = () if self.score_mod is None else self.score_mod.tensors
        return found | {f"score_mod's tensor {i}": x for i, x in enumerate(read)}

    @property
    def read_again(self) -> tuple[Tensor, ...]:
        """What a backward pass reads once more, so that autograd can say where it was changed in place since."""
        if self is NO_OPERANDS:
            return ()
        found = [x for x in _of_fields(self) if isinstance(x, Tensor)]
        if self.score_mod is not None:
            found += self.score_mod.tensors
        if isinstance(self.block_mask, BlockMask):
            found += self.block_mask.parts()[0]
        return tuple(found)

    def recordable(self) -> Operands:
        """These with copies of those that were made in inference mode: autograd saves none, and counts no change."""
        again = self.read_again
        if not any([x.is_inference() for x in again]):
            return self
        return self.reading([x.clone() if x.is_inference() else x for x in again])

    def reading(self, instead: Iterable[Tensor]) -> Operands:
        """These with others in place of what `read_again` gave: what hooks of autograd made of it."""
        given = {id(x): other for x, other in zip(self.read_again, instead, strict=True)}

        def of(part: Any) -> Any:
            return [of(x) for x in part] if isinstance(part, list) else given.get(id(part), part)

        def anew(kind: Operand, x: Any) -> Any:  # a mask may be a tensor by now
            return x if x is None else of(x) if isinstance(x, Tensor) else kind.joined(*map(of, kind.split(x)))

        return replace(self, **{name: anew(kind, getattr(self, name)) for name, kind in OPERANDS.items()})

    @property
    def forms(self) -> Forms:
        """What a plan depends on, of each in the order of `OPERANDS`."""
        return tuple(
            [None if (x := getattr(self, name)) is None else kind.form(name, x) for name, kind in OPERANDS.items()]
        )

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """Those of the call whose gradients a backward pass gives behind q's, k's and v's, in the fields' order."""
        return differentiable_of({name: getattr(self, name) for name in DIFFERENTIABLE})

    @property
    def requires_grad(self) -> bool:
        """Whether one of these does."""
        if self is NO_OPERANDS:
            return False
        return any([x.requires_grad for x in self.differentiable])


_of_fields = attrgetter(*[field.name for field in fields(Operands)])

Forms: TypeAlias = tuple[Hashable, ...]


class Operand(ABC):
    """How one operand is checked, told to dispatch, and carried by a torch operator.

    Attributes:
        parts: what the operator takes for it: endings of its name, and types in the schema.
        gradient: whether a backward pass gives one.
        differentiated: of one with a gradient the ending of the part that has it.
    """

    parts: Mapping[str, str] = {"": "Tensor?"}
    gradient = False
    differentiated = ""

    def differentiable(self, x: Any) -> tuple[Tensor, ...]:
        """Of one with a gradient the tensors that have it."""
        return (x,)

    @abstractmethod
    def form(self, name: str, x: Any) -> Hashable:
        """Its hashable part, on which dispatch may depend. TypeError where x is no such operand."""

    @abstractmethod
    def check(self, name: str, form: Any, device: torch.device) -> None:
        """TypeError or ValueError where it does not go with q's device, whatever the sizes."""

    @abstractmethod
    def check_sizes(self, name: str, form: Any, problem: Problem) -> None:
        """ValueError where it does not go with the problem."""

    def fields(self, name: str, form: Any) -> dict[str, Any]:
        """The fields of `Problem` that it gives."""
        return {}

    def prepared(self, x: Any, options: Mapping[str, Any]) -> Any:
        """As versions are handed it; options are those of the call."""
        return x.resolve_neg() if isinstance(x, Tensor) else x

    def split(self, x: Any) -> tuple[Any, ...]:
        """Its `parts`."""
        return (x,)

    def joined(self, *parts: Any) -> Any:
        """What was split; None where the parts are."""
        return parts[0]


class _OfTensor(Operand):
    """One that is a tensor; its form begins with shape, dtype and device."""

    dtypes: tuple[torch.dtype, ...]

    def form(self, name: str, x: Any) -> Hashable:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}")
        return x.shape, x.dtype, x.device, self.more(x)

    def more(self, x: Tensor) -> bool:
        """What else of it is checked."""
        return True

    def check(self, name: str, form: Any, device: torch.device) -> None:
        _, dtype, where, _ = form
        if dtype not in self.dtypes:
            raise TypeError(f"{name} must be of dtype {', '.join(map(str, self.dtypes))}, got {dtype}")
        if where != device:
            raise ValueError(f"{name} must be on q's device {device}, got {where}")


class _Descale(_OfTensor):
    dtypes = (torch.float32,)

    def more(self, x: Tensor) -> bool:
        """Whether it is recorded by autograd."""
        return x.requires_grad and torch.is_grad_enabled()

    def prepared(self, x: Any, options: Mapping[str, Any]) -> Any:
        """Copied where its numbers lie further apart than kernels, which count them in 32 bits, can tell."""
        x = super().prepared(x, options)
        return x.contiguous() if isinstance(x, Tensor) and is_far(x) else x

    def check(self, name: str, form: Any, device: torch.device) -> None:
        super().check(name, form, device)
        if form[3]:
            raise ValueError(f"{name} has no gradient, got one that requires grad")

    def check_sizes(self, name: str, form: Any, problem: Problem) -> None:
        of_q = name == "q_descale"
        dtype = problem.dtype if of_q else problem.dtype_kv or problem.dtype
        if dtype != "e4m3":
            raise ValueError(f"{name} is for e4m3 inputs (torch.float8_e4m3fn), got it with {dtype} ones")
        heads, seqlen = (problem.heads, problem.seqlen_q) if of_q else (problem.heads_kv, problem.seqlen_k)
        batch = problem.batch if problem.sequences is None else problem.sequences
        if problem.sequences is not None and (of_q or not problem.packed_q):
            expected = (batch, problem.heads_kv)
            if form[0] != expected:
                raise ValueError(
                    f"{name} of packed sequences must have shape (sequences, heads_kv) {expected}, got {tuple(form[0])}"
                )
            return
        by_head, by_block = (batch, problem.heads_kv), (batch, heads, cdiv(seqlen, DESCALE_BLOCK))
        if form[0] not in (by_head, by_block):
            raise ValueError(
                f"{name} must have shape (batch, heads_kv) {by_head}, or (batch, {'heads' if of_q else 'heads_kv'}, "
                f"blocks of {DESCALE_BLOCK} rows) {by_block}, got {tuple(form[0])}"
            )


class _Mask(Operand):
    parts: Mapping[str, str] = {"_tensors": "Tensor[]?", "_sizes": "SymInt[]?"}

    def form(self, name: str, x: Any) -> Hashable:
        if not isinstance(x, BlockMask):
            raise TypeError(f"{name} must be a flashzoo.BlockMask or None, got {type(x).__name__}")
        return x.form, x.seqlen_q, x.seqlen_k, x.device

    def check(self, name: str, form: Any, device: torch.device) -> None:
        if form[3] != device and device.type != "meta":  # `explain` is asked of shapes alone
            raise ValueError(f"{name} must be on q's device {device}, got {form[3]}")

    def check_sizes(self, name: str, form: Any, problem: Problem) -> None:
        lengths = (problem.seqlen_q, problem.seqlen_k)
        if form[1:3] != lengths:
            raise ValueError(f"{name} must be of seqlen_q and seqlen_k {lengths}, got {form[1:3]}")

    def fields(self, name: str, form: Any) -> dict[str, Any]:
        return {name: form[0]}

    def prepared(self, x: Any, options: Mapping[str, Any]) -> Any:
        """With causal and the window put into it."""
        return x.banded(options.get("causal", False), options.get("window_size")) if isinstance(x, BlockMask) else x

    def split(self, x: Any) -> tuple[Any, ...]:
        return x.parts()

    def joined(self, *parts: Any) -> Any:
        return BlockMask.of_parts(*parts)


class _Lengths(_OfTensor):
    dtypes = (torch.int32,)

    def more(self, x: Tensor) -> bool:
        """Whether it has no gaps."""
        return x.is_contiguous()

    def check(self, name: str, form: Any, device: torch.device) -> None:
        super().check(name, form, device)
        shape, _, _, contiguous = form
        if len(shape) != 1 or not contiguous or not (shape[0] or name == "seqused_k"):
            of = "(sequences,) or (batch,)" if name == "seqused_k" else "(sequences + 1,)"
            raise ValueError(
                f"{name} must be contiguous, of shape {of}, got shape "
                f"{tuple(shape)}{'' if contiguous else ' with gaps'}"
            )

    def check_sizes(self, name: str, form: Any, problem: Problem) -> None:
        if problem.sequences is None:
            if name != "seqused_k":
                raise ValueError(f"{name} goes with cu_seqlens_q, got it without")
            if form[0] != (problem.batch,):
                raise ValueError(f"seqused_k must have shape (batch,) ({problem.batch},), got {tuple(form[0])}")
            return
        if problem.packed_q and name == "cu_seqlens_k":
            raise ValueError(
                "cu_seqlens_k goes with packed k and v, got it with caches, whose keys begin with their rows or pages: "
                "seqused_k says how many of them are used"
            )
        expected = problem.sequences + (name != "seqused_k")
        if form[0] != (expected,):
            raise ValueError(
                f"{name} must have shape ({expected},), as cu_seqlens_q has {problem.sequences} sequences, "
                f"got {tuple(form[0])}"
            )

    def fields(self, name: str, form: Any) -> dict[str, Any]:
        return {"cu_seqlens_q": {"sequences": form[0][0] - 1}, "seqused_k": {"used_k": True}}.get(name, {})


class _Pages(_OfTensor):
    dtypes = (torch.int32,)

    def more(self, x: Tensor) -> bool:
        """Whether its rows have no gaps."""
        return x.ndim != 2 or x.stride(1) == 1 or x.shape[1] < 2

    def check(self, name: str, form: Any, device: torch.device) -> None:
        super().check(name, form, device)
        shape, _, _, whole = form
        if len(shape) != 2 or not whole:
            got = f"shape {tuple(shape)}{'' if whole else ' with gaps'}"
            raise ValueError(f"{name} must have shape (batch, pages of a sequence), its rows without gaps, got {got}")

    def check_sizes(self, name: str, form: Any, problem: Problem) -> None:
        """Nothing: `check.read_as_batch` has."""


class _Sinks(_OfTensor):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    gradient = True

    def check_sizes(self, name: str, form: Any, problem: Problem) -> None:
        if form[0] != (problem.heads,):
            raise ValueError(f"{name} must have shape (heads,) ({problem.heads},), got {tuple(form[0])}")
        if form[1] == torch.float64 and problem.dtype != "fp64":
            raise TypeError(f"{name} of dtype torch.float64 go with inputs of fp64, got them with {problem.dtype} ones")

    def fields(self, name: str, form: Any) -> dict[str, Any]:
        return {name: True}

    def prepared(self, x: Any, options: Mapping[str, Any]) -> Any:
        """In a dtype that kernels compute in, which holds all its numbers, and without gaps; autograd undoes both."""
        if not isinstance(x, Tensor):
            return x
        x = x.resolve_neg().contiguous()
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _ScoreMod(Operand):
    parts: Mapping[str, str] = {"_text": "str?", "_tensors": "Tensor[]?", "_grads": "SymInt[]?"}
    gradient = True
    differentiated = "_tensors"

    def differentiable(self, x: Any) -> tuple[Tensor, ...]:
        return x.differentiable

    def form(self, name: str, x: Any) -> Hashable:
        if not isinstance(x, ScoreMod):
            raise TypeError(f"{name} must be a flashzoo.ScoreMod where a call is traced, made outside, got {x!r}")
        return x.form, tuple([tensor.device for tensor in x.tensors])

    def check(self, name: str, form: Any, device: torch.device) -> None:
        for i, where in enumerate(form[1]):
            if where != device and device.type != "meta":  # `explain` is asked of shapes alone
                raise ValueError(f"{name}'s tensor {i} must be on q's device {device}, got {where}")

    def check_sizes(self, name: str, form: Any, problem: Problem) -> None:
        from flashzoo.scores.program import read_by

        for i, (dtype, _) in enumerate(form[0].reads):
            if dtype == "f64" and problem.dtype != "fp64":
                raise TypeError(
                    f"{name}'s tensor {i} of dtype torch.float64 goes with inputs of fp64, got {problem.dtype} ones"
                )
        batch = problem.batch if problem.sequences is None else problem.sequences
        least = {"b": ("batch", batch), "h": ("heads", problem.heads)}
        if problem.sequences is None:
            least |= {"q": ("seqlen_q", problem.seqlen_q), "k": ("seqlen_k", problem.seqlen_k)}
        for tensor, dimension, index, fits in read_by(form[0].text):
            if index not in least:
                continue
            shape, (of, size) = form[0].reads[tensor][1], least[index]
            if shape[dimension] < size or (fits and shape[dimension] > size):
                read = f"{name}'s tensor {tensor} {shape} is read by {of}"
                expected = size if fits else f"at least {size}"
                raise ValueError(
                    f"{read} in dimension {dimension}, whose size must be {expected}, got {shape[dimension]}"
                )

    def fields(self, name: str, form: Any) -> dict[str, Any]:
        return {name: form[0]}

    def prepared(self, x: Any, options: Mapping[str, Any]) -> Any:
        """Traced, and its tensors as they lie in memory."""
        return ScoreMod.of(x).resolved()

    def split(self, x: Any) -> tuple[Any, ...]:
        return x.text, list(x.tensors), list(x.grads)

    def joined(self, *parts: Any) -> Any:
        text, tensors, grads = parts
        return ScoreMod.of_parts(text, tuple(tensors), tuple(grads))


class _Seed(Operand):
    def form(self, name: str, x: Any) -> Hashable:
        """Nothing of an int."""
        if isinstance(x, Tensor):
            return x.shape, x.dtype, x.device
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"{name} must be an int, a torch.Tensor of one or None, got {type(x).__name__}")
        if not -(2**63) <= x < 2**63:
            raise ValueError(f"{name} must be from -2**63 to 2**63 - 1, got {x}")
        return ()

    def check(self, name: str, form: Any, device: torch.device) -> None:
        if not form:
            return
        shape, dtype, where = form
        if dtype != torch.int64:
            raise TypeError(f"{name} must be of dtype torch.int64, got {dtype}")
        if shape.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {tuple(shape)}")
        if where != device:
            raise ValueError(f"{name} must be on q's device {device}, got {where}")

    def check_sizes(self, name: str, form: Any, problem: Problem) -> None:
        """Nothing: it goes with all."""


def seed_on(seed: Tensor | int | None, device: torch.device) -> Tensor:
    """int64 `(1,)` with a seed, drawn from torch's generator of the device where there is none."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed.reshape(1).clone()
    return torch.full((1,), seed, dtype=torch.int64, device=device)


OPERANDS: dict[str, Operand] = {
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), _Descale()),
    "block_mask": _Mask(),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), _Lengths()),
    "page_table": _Pages(),
    "sinks": _Sinks(),
    "score_mod": _ScoreMod(),
    "dropout_seed": _Seed(),
}
"""By the argument's name, in the order of the fields of `Operands`."""
DIFFERENTIABLE = tuple(name for name, kind in OPERANDS.items() if kind.gradient)
"""Those that have one."""


def differentiable_of(operands: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Of operands by name the tensors that have gradients, in the order of the table."""
    found: list[Tensor] = []
    for name in DIFFERENTIABLE:
        if operands.get(name) is not None:
            found += OPERANDS[name].differentiable(operands[name])
    return tuple(found)


_PLACES = {name: place for place, name in enumerate(OPERANDS)}
Q_LENGTHS, K_LENGTHS, PAGE_TABLE = (_PLACES[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "page_table"))
"""Their places among forms."""

NO_OPERANDS = Operands()
NO_FORMS = NO_OPERANDS.forms


def taken(options: dict[str, Any]) -> tuple[Operands, Forms]:
    """The operands among the arguments of a call, which leave `options`, and their forms. A window stays, normalised,
    for plans to be remembered by: a list has no hash, and (1, 0) and (1.0, False) are one key of a dict."""
    if options.get("window_size") is not None:
        options["window_size"] = normalised(options["window_size"])
    names = [name for name in options if name in OPERANDS]
    if not names:
        return NO_OPERANDS, NO_FORMS
    found, forms = {}, list(NO_FORMS)
    for name in names:
        if (x := options.pop(name)) is not None:
            if isinstance(x, Tensor) and x.layout != torch.strided:
                raise TypeError(f"{name} must be a dense tensor (torch.strided), got {x.layout}: call to_dense()")
            kind = OPERANDS[name]
            found[name] = x = kind.prepared(x, options)
            forms[_PLACES[name]] = kind.form(name, x)
    return Operands(**found), tuple(forms)


def given(forms: Forms) -> Iterator[tuple[str, Operand, Any]]:
    """Name, kind and form of each operand that the call has."""
    return ((name, kind, form) for (name, kind), form in zip(OPERANDS.items(), forms, strict=True) if form is not None)
