"""What one version declares: `Spec`, a frozen record. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from os import environ
from typing import Any

from flashzoo.call.problem import DTYPES, FEATURES, QUANTIZABLE, Problem
from flashzoo.integers import cdiv

INTERPRETER_LIMIT = "FLASHZOO_INTERPRETER_LIMIT"
"""Environment variable with the most blocks that Triton's interpreter is given, in place of `INTERPRETER_BLOCKS`."""
INTERPRETER_BLOCKS = 256
INTERPRETER_BLOCK = 64
INTERPRETER_BLOCK_S = 0.02
"""Seconds of a block in the interpreter, forward, on a slow core, at head dims up to 64;
wider ones take as much longer."""
TRANSFORMS = {
    "jvp": "forward-mode AD (torch.func.jvp, torch.autograd.forward_ad)",
    "vmap": "torch.func.vmap",
    "grad": "gradients within torch.func (grad, vjp, jacrev) or forward-mode AD",
    "functionalize": "torch.func.functionalize",
}
"""What may be done to a call from around it, and what does it."""

_DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl[cu13]"}
"""What pip calls a package, where that is not its own name."""


@lru_cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


_KINDS = {
    **dict.fromkeys(("name", "title", "paper", "memory"), str),
    **dict.fromkeys(("features", "backward", "transforms"), frozenset),
    "head_dims": range,
    "batch_invariant": bool,
    **dict.fromkeys(
        (
            *("dtypes", "cpu_dtypes", "quantizes", "fp8_rms", "arch", "latent_dims", "requires", "backward_requires"),
            *("auto", "faults"),
        ),
        tuple,
    ),
}
"""Of a Spec's fields, all hashable, so that what is found out about a Spec can be remembered."""


def _texts(given: tuple, count: int | None = None) -> bool:
    return all(isinstance(one, str) and one for one in given) and count in (None, len(given))


def _counts(given: tuple) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in given)


def _pairs(given: tuple) -> bool:
    return all(isinstance(one, tuple) and len(one) == 2 for one in given)


def _span(given: tuple) -> bool:
    """Whether it is a lowest number and a highest, or None for no highest."""
    ends = given[:1] if given[1:] == (None,) else given
    return len(given) == 2 and _counts(ends) and ends[0] <= ends[-1]


def _devices(given: tuple) -> bool:
    return all(one in ("cuda", "cpu") for one in given)


_PACKAGES = (_texts, "names of packages")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fp8_rms": (
        lambda given: (
            _pairs(given) and all(isinstance(kind, str) and isinstance(x, (int, float)) and x > 0 for kind, x in given)
        ),
        "pairs of a kind of values and a factor",
    ),
    "arch": (_span, "the lowest and the highest compute capability, as (80, None) or (90, 90)"),
    "head_dims": (lambda given: bool(given) and min(given[0], given[-1]) > 0, "a range of some numbers from 1 on"),
    "latent_dims": (lambda given: _pairs(given) and all(map(_counts, given)), "pairs of head_dim and head_dim_v"),
    "requires": _PACKAGES,
    "backward_requires": _PACKAGES,
    "auto": (_devices, "some of 'cuda' and 'cpu'"),
    "memory": (lambda given: given in ("linear", "quadratic"), "'linear' or 'quadratic'"),
    "faults": (
        lambda given: all(isinstance(one, tuple) and _texts(one, 3) and _devices(one[:1]) for one in given),
        "triples of a device, 'cuda' or 'cpu', the start of a test's id, and a sentence",
    ),
}
"""What holds of a field, and in which words."""


def function_at(path: str) -> Callable:
    """What stands at `"package.module:function"`. Raises ImportError or AttributeError where nothing does."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


_imported = lru_cache(function_at)


def deferred(path: str) -> Callable[[Problem], list[str]]:
    """A Spec's `check` or `notes` that is imported when it is first called: `"package.module:function"`. What it reads,
    tables of tiles and what these are made of, is no part of `import flashzoo`."""

    return partial(_called_at, path)


def _called_at(path: str, problem: Problem) -> list[str]:
    return _imported(path)(problem)


def in_any_order(problem: Problem) -> list[str]:
    """A Spec's `check`, of kernels that sum the gradients of what a score_mod reads by atomics."""
    if problem.grad and problem.deterministic and problem.score_mod is not None and problem.score_mod.grads:
        return ["sums gradients of tensors that score_mod reads in no fixed order, which deterministic=True asks for"]
    return []


@dataclass(frozen=True)
class Spec:
    """What one version of attention declares about itself. Data only: importing a Spec loads no kernel.

    Attributes:
        name: what `version=` takes.
        title: one line for tables.
        paper: where the algorithm is from.
        impl: `"package.module:function"`, imported on first use and called as
            `function(q, k, v, problem, operands) -> (out, lse or None)`, with scores to be multiplied by
            `problem.scale`, 0 or more. `operands` is a `flashzoo.call.operands.Operands`: what the call has beside q, k
            and v. `out` has dtype `problem.out_dtype`, and must carry gradients where `problem.grad`; `lse` (float32,
            natural log, `(batch, heads, seqlen_q)`) must be there where `problem.lse`. A block mask has the call's
            causal and window in it, and the problem has none.
        dtypes: dtypes taken on a GPU.
        cpu_dtypes: dtypes taken on CPU tensors; empty where the version does not run there.
        quantizes: dtypes taken, wherever it runs, with `precision="fp8"`.
        fp8_rms: `(kind of workloads.VALUES, factor)`: on such inputs, with `precision="fp8"`, no head's RMS error is
            more than so many times the yardstick's, which is plain FP8: one scale a head, nothing rotated. It can only
            ask for more than `flashzoo.accuracy` does of everybody.
        arch: lowest and highest compute capability, None for no upper end.
        head_dims: the head dims taken, of q and k and of v.
        latent_dims: pairs of head_dim and head_dim_v, those taken where v is k's first columns; where there are none,
            they are of head_dims too.
        features: names from `FEATURES` that the forward pass honours.
        backward: names from `FEATURES` that the backward pass honours; None where there is no backward pass.
        backward_impl: `"package.module:function"`, for a backward pass that other versions may use too, under "auto"
            where they give an LSE and have no backward pass of their own for a problem: called as
            `function(dout, dlse or None, q, k, v, out, lse, problem, operands) -> (dq, dk, dv)`, and behind these the
            gradients of the operands that have one, in the order of `Operands`.
        backward_16: `"package.module:function"`, for a version that quantizes: an implementation made by
            `flashzoo.autograd.differentiable`, whose two passes on the inputs as they are stand in for its backward
            pass.
        transforms: names from `TRANSFORMS` under which its function is right, as one made of torch's own operations may
            be: a kernel reads memory, in which there is neither a tangent nor a batch. All else is refused.
        requires: packages that must be installed. What needs triton runs in its interpreter on CPU tensors, of at most
            `INTERPRETER_BLOCKS` blocks.
        backward_requires: those that the backward pass needs beside them.
        auto: the devices, of "cuda" and "cpu", on which `version="auto"` may choose it.
        memory: "linear" or "quadratic" in seqlen.
        batch_invariant: of packed sequences each has the bits that it has alone, and of caches, of a batch or of packed
            queries, those that it has beside as many others, whatever is there, numbers that are none too; gradients
            with deterministic=True.
        faults: `(device, start of a test's id, sentence)`: what is known to be wrong in code that is not ours. The
            suite skips those cases and gives the sentence as its reason; `explain` tells it.
        check: sentences for what the fields above can't say; empty where the problem is taken.
        leaves: sentences on why `version="auto"` leaves a problem that is taken to the versions behind this one;
            empty where it does not.
        notes: sentences on what a call does silently (padding, copies, tile choice), for `explain`.

    Raises:
        TypeError, ValueError: a field is not of its kind, or names what nobody knows;
            the text names it and what was got.
    """

    name: str
    title: str
    paper: str
    impl: str
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    cpu_dtypes: tuple[str, ...] = ()
    quantizes: tuple[str, ...] = ()
    fp8_rms: tuple[tuple[str, float], ...] = ()
    arch: tuple[int, int | None] = (80, None)
    head_dims: range = range(1, 257)
    latent_dims: tuple[tuple[int, int], ...] = ()
    features: frozenset[str] = frozenset()
    backward: frozenset[str] | None = None
    backward_impl: str | None = None
    backward_16: str | None = None
    transforms: frozenset[str] = frozenset()
    requires: tuple[str, ...] = ()
    backward_requires: tuple[str, ...] = ()
    auto: tuple[str, ...] = ("cuda",)
    memory: str = "linear"
    batch_invariant: bool = False
    faults: tuple[tuple[str, str, str], ...] = ()
    check: Callable[[Problem], list[str]] | None = None
    leaves: Callable[[Problem], list[str]] | None = None
    notes: Callable[[Problem], list[str]] | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            given = getattr(self, name)
            if not isinstance(given, kind) and not (name == "backward" and given is None):
                raise TypeError(f"Spec {self.name!r}: {name} must be a {kind.__name__}, got {given!r}")
        for name in ("check", "leaves", "notes"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                where = "'package.module:function'" if not isinstance(given, str) else repr(given)
                raise TypeError(
                    f"Spec {self.name!r}: {name} must be a function of a Problem, or flashzoo.spec.deferred({where}) "
                    f"where it is imported later, got {given!r}"
                )
        for name, (holds, words) in _RULES.items():
            given = getattr(self, name)
            if not holds(given):
                raise ValueError(f"Spec {self.name!r}: {name} must be {words}, got {given!r}")
        for name in ("features", "backward"):
            unknown = sorted((getattr(self, name) or frozenset()) - FEATURES.keys(), key=str)
            if unknown:
                raise ValueError(f"Spec {self.name!r}: {name} must be names from {sorted(FEATURES)}, got {unknown}")
        unknown = sorted(self.transforms - TRANSFORMS.keys(), key=str)
        if unknown:
            raise ValueError(f"Spec {self.name!r}: transforms must be names from {sorted(TRANSFORMS)}, got {unknown}")
        for name in ("dtypes", "cpu_dtypes"):
            unknown = [dtype for dtype in getattr(self, name) if dtype not in DTYPES]
            if unknown:
                raise ValueError(f"Spec {self.name!r}: {name} must be from {DTYPES}, got {unknown}")
        unknown = [dtype for dtype in self.quantizes if dtype not in QUANTIZABLE]
        if unknown:
            raise ValueError(f"Spec {self.name!r}: quantizes must be from {QUANTIZABLE}, got {unknown}")
        if self.fp8_rms and not self.quantizes:
            raise ValueError(f"Spec {self.name!r}: fp8_rms is for a version that quantizes, got {self.fp8_rms}")
        for name in ("impl", "backward_impl", "backward_16"):
            given = getattr(self, name)
            named = isinstance(given, str) and given.count(":") == 1 and all(given.split(":"))
            if not named and (name == "impl" or given is not None):
                raise ValueError(f"Spec {self.name!r}: {name} must be 'package.module:function', got {given!r}")

    def unsupported(self, problem: Problem) -> list[str]:
        """Why this version can't take the problem, one sentence a reason, all of them; empty where it can."""
        # Where the hardware won't do, or the dtype, an installation would not help.
        reasons = self._hardware(problem) or [f"needs the package {package}" for package in missing(self.requires)]
        reasons += self._head_dims(problem)
        if not problem.features <= self.features:
            reasons += [f"does not support {FEATURES[name].asked}" for name in sorted(problem.features - self.features)]
        if problem.grad and self.backward is None:
            reasons.append("has no backward pass, and an input requires grad")
        elif problem.grad and self.backward is not None:
            forward_only = (problem.features & self.features) - self.backward
            reasons += [f"its backward pass does not support {FEATURES[name].asked}" for name in sorted(forward_only)]
            reasons += [f"its backward pass needs the package {package}" for package in missing(self.backward_requires)]
            if problem.dtype == "e4m3":
                reasons.append("e4m3 inputs have no gradients, and an input requires grad")
        if self.interpreted(problem):
            reasons += _too_long_to_interpret(problem)
        if self.check is not None:
            reasons += self.check(problem)
        return reasons

    def interpreted(self, problem: Problem) -> bool:
        """Whether Triton's interpreter is what runs it, a thousand times slower than a GPU."""
        return problem.device == "cpu" and bool(self.cpu_dtypes) and "triton" in self.requires

    @property
    def arch_text(self) -> str:
        """The GPUs it runs on, in words."""
        lowest, highest = self.arch
        if highest is None:
            return f"sm_{lowest} or newer"
        return f"sm_{lowest}" if lowest == highest else f"sm_{lowest} to sm_{highest}"

    def _hardware(self, problem: Problem) -> list[str]:
        if problem.device == "cpu":
            return (
                self._numerics(problem, self.cpu_dtypes, " on the CPU")
                if self.cpu_dtypes
                else ["does not run on CPU tensors"]
            )
        reasons = []
        lowest, highest = self.arch
        if problem.arch is None:
            reasons.append("needs a GPU whose architecture is known: pass arch=, such as arch=90")
        elif problem.arch < lowest or (highest is not None and problem.arch > highest):
            reasons.append(f"needs {self.arch_text}, got sm_{problem.arch}")
        return reasons + self._numerics(problem, self.dtypes)

    def _head_dims(self, problem: Problem) -> list[str]:
        width, width_v = problem.head_dim, problem.head_dim_v
        if self.latent_dims:
            latent = " or ".join(f"{d} and {d_v}" for d, d_v in self.latent_dims)
            if problem.latent:
                got = f"where v is k's first columns, got {width} and {width_v}"
                known = (width, width_v) in self.latent_dims
                return [] if known else [f"takes head_dim and head_dim_v {latent} {got}"]
            if (width, width_v) in self.latent_dims:
                got = f"where v is a view of k, k[..., :{width_v}], got another v"
                return [f"takes head_dim and head_dim_v {latent} {got}"]
        if width in self.head_dims and width_v in self.head_dims:
            return []
        widths = {"head_dim": width} if width == width_v else {"head_dim": width, "head_dim_v": width_v}
        return [
            f"takes {name} {_describe(self.head_dims)}, got {width}"
            for name, width in widths.items()
            if width not in self.head_dims
        ]

    def _numerics(self, problem: Problem, dtypes: tuple[str, ...], where: str = "") -> list[str]:
        if problem.precision is None and problem.dtype in dtypes:
            return []
        by_precision = f'{" or ".join(self.quantizes)} with precision="fp8"'
        if problem.precision is not None:
            if not self.quantizes:
                return [f"does not support precision={problem.precision!r}"]
            return [] if problem.dtype in self.quantizes else [f"takes dtype {by_precision}, got {problem.dtype}"]
        # A dtype that it takes by precision alone is worth a word; one that it takes in both ways is not.
        also = f", or {by_precision}" if problem.dtype in self.quantizes else ""
        return [f"takes dtype {' or '.join(dtypes)}{where}{also}, got {problem.dtype}"]


def missing(packages: tuple[str, ...]) -> list[str]:
    """Those of the packages that are not installed, each with how to install it."""
    return [
        f"{package!r}, which is not installed (pip install {_DISTRIBUTIONS.get(package, package)!r})"
        for package in packages
        if not _installed(package)
    ]


def _too_long_to_interpret(problem: Problem) -> list[str]:
    given = environ.get(INTERPRETER_LIMIT) or str(INTERPRETER_BLOCKS)
    if not given.isascii() or not given.isdecimal():
        raise ValueError(
            f"{INTERPRETER_LIMIT} must be a number of blocks of {INTERPRETER_BLOCK}x{INTERPRETER_BLOCK} scores, "
            f"got {given!r}"
        )
    blocks = blocks_of(problem)
    if blocks <= int(given):
        return []
    return [
        f"is too large for Triton's interpreter: {blocks} blocks of {INTERPRETER_BLOCK}x{INTERPRETER_BLOCK} scores, "
        f"some {duration(interpreter_seconds(problem))}, and the limit is {given}; {INTERPRETER_LIMIT}={blocks} lifts "
        "it"
    ]


def blocks_of(problem: Problem) -> int:
    """Of `INTERPRETER_BLOCK` queries by as many keys, begun ones too:
    what time in Triton's interpreter goes by, not scores."""
    rows, columns = (cdiv(seqlen, INTERPRETER_BLOCK) for seqlen in (problem.seqlen_q, problem.seqlen_k))
    return problem.batch * problem.heads * rows * columns


def interpreter_seconds(problem: Problem) -> float:
    """About how long a forward pass takes in Triton's interpreter."""
    return blocks_of(problem) * INTERPRETER_BLOCK_S * max(1, problem.head_dim / INTERPRETER_BLOCK)


def duration(seconds: float) -> str:
    """A time in words, in the largest unit of which there are two."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _describe(head_dims: range) -> str:
    text = f"{head_dims[0]} to {head_dims[-1]}"
    return text if head_dims.step == 1 else f"{text} in steps of {head_dims.step}"
