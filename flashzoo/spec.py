"""What one call asks (`Problem`) and what one version declares (`Spec`).

Both are frozen records of plain values. This module imports nothing but the standard library, so every question of
dispatch can be asked, and tested, on a machine with no torch and no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from os import environ
from typing import Any

DTYPES = ("fp16", "bf16", "fp32", "fp64", "e4m3")
PRECISIONS = (None, "fp8")
"""What a call may ask its products to be made in: its inputs' own dtype, or e4m3 to which 16-bit inputs are quantised."""
QUANTIZABLE = ("fp16", "bf16")
"""Dtypes that `precision="fp8"` quantises."""
OUT_DTYPES = ("bf16", "fp16")
"""What out may be where the inputs are e4m3, the default first."""
DESCALE_BLOCK = 128
"""Rows of q, k or v that share one number of a descale by block."""

LARGEST_SIDE = 2**63 - 1
"""Of a window: what a graph of torch's can hold."""

FEATURES = {
    "causal": "causal=True",
    "window": "window_size",
    "gqa": "fewer key/value heads than query heads",
    "cross": "seqlen_q != seqlen_k",
    "head_dim_v": "v's head_dim different from q's",
    "lse": "return_lse=True",
    "deterministic": "deterministic=True",
    "block_mask": "block_mask",
}
"""What a call can ask for beyond plain attention, and how the caller asks for it."""

INTERPRETER_LIMIT = "FLASHZOO_INTERPRETER_LIMIT"
"""Environment variable with the most `Problem.blocks` that Triton's interpreter is given, in place of `INTERPRETER_BLOCKS`."""
INTERPRETER_BLOCKS = 256
INTERPRETER_BLOCK = 64
INTERPRETER_BLOCK_S = 0.02
"""Seconds of a block in the interpreter, forward, on a slow core, at head dims up to 64; wider ones take as much longer."""
TRANSFORMS = {
    "jvp": "forward-mode AD (torch.func.jvp, torch.autograd.forward_ad)",
    "vmap": "torch.func.vmap",
    "grad": "gradients within torch.func (grad, vjp, jacrev) or forward-mode AD",
    "functionalize": "torch.func.functionalize",
}
"""What may be done to a call from around it, and what does it."""

Window = tuple[int | None, int | None]

_DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl[cu13]"}
"""What pip calls a package, where that is not its own name."""


@lru_cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


@dataclass(frozen=True)
class MaskForm:
    """A `flashzoo.BlockMask` without its lists: what the choice of a version and of its kernels may depend on.

    Attributes:
        block_q, block_kv: sizes of a block, in tokens.
        batch, heads: for how many it has lists of their own; 1 where they are shared by all.
        causal, window: what its partial blocks apply to their elements, as in `Problem`.
        bits: they apply a mask of elements too.
    """

    block_q: int = 128
    block_kv: int = 128
    batch: int = 1
    heads: int = 1
    causal: bool = False
    window: Window = (None, None)
    bits: bool = False

    @property
    def span(self) -> Window:
        """The visible band of a partial block, causal folded in."""
        return span_of(self.causal, self.window)

    def __str__(self) -> str:
        text = f"block mask {self.block_q}x{self.block_kv}"
        text += "".join(f" by {name}" for name in ("batch", "heads") if getattr(self, name) > 1)
        how = [*(["causal"] if self.causal else []), *([f"window {self.window}"] if self.window != (None, None) else [])]
        how += ["bits"] if self.bits else []
        return f"{text} ({', '.join(how)})" if how else text


def span_of(causal: bool, window: Window) -> Window:
    """The visible band around the aligned diagonal: causal is a window with nothing on its right."""
    left, right = window
    return (left, 0 if right is None else min(right, 0)) if causal else (left, right)


def check_flags(**flags: Any) -> None:
    """TypeError where one is no bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")


def normalised(window_size: Any, name: str = "window_size") -> Window:
    """window_size with None for every side that is not bounded; name is what errors call it."""
    if window_size is None:
        return None, None
    expected = "must be None or a pair (left, right) of None, -1 or ints from 0 to 2**63 - 1"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{name} {expected}, got {window_size!r}")
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or not -1 <= side <= LARGEST_SIDE):
            raise ValueError(f"{name} {expected}, got {window_size!r}")
    left, right = (None if side == -1 else side for side in window_size)
    return left, right


_SIZES = (("batch", 0), ("seqlen_q", 0), ("seqlen_k", 0), ("heads", 1), ("heads_kv", 1), ("head_dim", 1), ("head_dim_v", 1))
"""A problem's sizes and the least of each."""
_NAMES = (("dtype", DTYPES), ("device", ("cuda", "cpu")), ("precision", PRECISIONS))
"""What a problem's fields of words may be."""


def _check_int(name: str, value: Any, least: int, more: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int{more}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class Problem:
    """One call of `flashzoo.attention`, without its data.

    Build it by hand (`Problem(batch=1, seqlen_q=4096, ...)`) to ask about a GPU that isn't there, or let
    `flashzoo.explain(q, k, v, ...)` build it from tensors.

    Attributes:
        batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim: sizes of q `(batch, seqlen_q, heads, head_dim)` and of
            k `(batch, seqlen_k, heads_kv, head_dim)`.
        head_dim_v: the last size of v and out, by keyword only; None stands for head_dim and is replaced by it, so
            `replace(problem, head_dim=...)` keeps the old width of v unless it is given head_dim_v=None too.
        dtype: of q, k and v, one of `DTYPES`.
        causal: query i sees key j only where `j <= i + seqlen_k - seqlen_q` (aligned bottom-right).
        window: `(left, right)`, how many keys either side of the aligned diagonal are seen; None is unbounded, and -1 is replaced by it.
        lse: the caller wants the log-sum-exp too.
        deterministic: the same bits in every run, gradients included.
        grad: the call is recorded by autograd, so a backward pass may follow.
        device: "cuda" or "cpu".
        arch: compute capability as `10 * major + minor` (90 for Hopper); None on the CPU.
        precision: of `PRECISIONS`.
        block_mask: the form of the block mask, causal and window put into it; None where there is none.
        out_dtype: of out. That of the inputs, whatever is given, but for e4m3: there one of `OUT_DTYPES`, for the first of
            which None stands, so `replace(problem, dtype="e4m3")` keeps the old one unless it is given out_dtype=None too.

    Raises:
        TypeError, ValueError: a field is none that a call could ask for; the text names it, what was expected and what was got.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int = field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType]
    dtype: str = "bf16"
    causal: bool = False
    window: Window = (None, None)
    lse: bool = False
    deterministic: bool = False
    grad: bool = False
    device: str = "cuda"
    arch: int | None = None
    precision: str | None = None
    out_dtype: str = None  # pyright: ignore[reportAssignmentType]
    block_mask: MaskForm | None = None

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if self.dtype != "e4m3":
            object.__setattr__(self, "out_dtype", self.dtype)
        elif self.out_dtype is None:
            object.__setattr__(self, "out_dtype", OUT_DTYPES[0])
        if self.window != (None, None):
            object.__setattr__(self, "window", normalised(self.window, "window"))
        self._check()

    def _check(self) -> None:
        given = self.__dict__
        for name, least in _SIZES:
            if type(given[name]) is not int or given[name] < least:
                _check_int(name, given[name], least)
        if self.arch is not None:
            _check_int("arch", self.arch, 1, ", such as 90, or None")
        if self.heads % self.heads_kv:
            raise ValueError(f"heads must be a multiple of heads_kv, got {self.heads} and {self.heads_kv}")
        check_flags(causal=self.causal, lse=self.lse, deterministic=self.deterministic, grad=self.grad)
        for name, known in _NAMES:
            if given[name] not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {given[name]!r}")
        if self.dtype == "e4m3" and self.out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype must be one of {', '.join(map(repr, OUT_DTYPES))}, got {self.out_dtype!r}")
        if self.precision is not None and self.dtype not in QUANTIZABLE:
            raise ValueError(f"precision={self.precision!r} is for dtype {' or '.join(QUANTIZABLE)}, got {self.dtype}")
        if self.block_mask is not None:
            self._check_form(self.block_mask)

    def _check_form(self, form: Any) -> None:
        if not isinstance(form, MaskForm):
            raise TypeError(f"block_mask must be a MaskForm, such as a flashzoo.BlockMask's `form`, or None, got {type(form).__name__}")
        for name in ("batch", "heads"):
            if getattr(form, name) not in (1, getattr(self, name)):
                raise ValueError(f"block_mask must have q's {name} {getattr(self, name)}, or 1 where shared, got {getattr(form, name)}")

    @property
    def numerics(self) -> str:
        """What the products are made in: "e4m3" of inputs that are it, "fp8" of inputs quantised to it, or the dtype."""
        return self.precision or self.dtype

    @cached_property
    def features(self) -> frozenset[str]:
        """The names in `FEATURES` that this call needs."""
        asked = {
            "causal": self.causal,
            "window": self.window != (None, None),
            "gqa": self.heads != self.heads_kv,
            "cross": self.seqlen_q != self.seqlen_k,
            "head_dim_v": self.head_dim != self.head_dim_v,
            "lse": self.lse,
            "deterministic": self.deterministic,
            "block_mask": self.block_mask is not None,
        }
        return frozenset(name for name, needed in asked.items() if needed)

    @cached_property
    def span(self) -> Window:
        """The visible band around the aligned diagonal, causal folded in."""
        return span_of(self.causal, self.window)

    @cached_property
    def forward(self) -> Problem:
        """The forward pass alone, with the LSE that a backward pass by another version starts from; itself where nothing is recorded."""
        return replace(self, grad=False, lse=True) if self.grad else self

    @property
    def reach(self) -> tuple[int, int]:
        """`span` in numbers: a side past both sequences together is unbounded, and can't overflow a kernel's 32-bit arithmetic."""
        return self.reach_of(self.span)

    def reach_of(self, span: Window) -> tuple[int, int]:
        """Another span in numbers, as `reach`."""
        furthest = self.seqlen_q + self.seqlen_k
        left, right = (furthest if side is None else min(side, furthest) for side in span)
        return left, right

    @property
    def blind_rows(self) -> int:
        """How many of the first queries see no key for causal's and window's sake; what a block mask does is in its lists."""
        right = self.span[1]
        return 0 if right is None else min(self.seqlen_q, max(0, self.seqlen_q - self.seqlen_k - right))

    @property
    def blocks(self) -> int:
        """Of `INTERPRETER_BLOCK` queries by as many keys, begun ones too: what time in Triton's interpreter goes by, not scores."""
        rows, columns = (-(-seqlen // INTERPRETER_BLOCK) for seqlen in (self.seqlen_q, self.seqlen_k))
        return self.batch * self.heads * rows * columns

    @property
    def where(self) -> str:
        """The hardware, in words: "CPU", "sm_90" or "a GPU of unknown architecture"."""
        if self.device == "cpu":
            return "CPU"
        return f"sm_{self.arch}" if self.arch else "a GPU of unknown architecture"

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}:{self.heads_kv}"
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        head_dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        text = f"batch {self.batch}, seqlen {lengths}, heads {heads}, head_dim {head_dims}, {self.dtype}"
        if self.precision is not None:
            text += f" in {self.precision}"
        if self.dtype == "e4m3":
            text += f" to {self.out_dtype}"
        if self.causal:
            text += ", causal"
        if self.window != (None, None):
            text += f", window {self.window}"
        if self.block_mask is not None:
            text += f", {self.block_mask}"
        text += "".join(f", {name}" for name in ("lse", "deterministic", "grad") if getattr(self, name))
        return f"{text}, on {self.where}"


_KINDS = {
    **dict.fromkeys(("name", "title", "paper"), str),
    **dict.fromkeys(("features", "backward"), frozenset),
    "head_dims": range,
    **dict.fromkeys(("dtypes", "cpu_dtypes", "quantizes", "fp8_rms", "arch", "requires", "backward_requires", "auto", "faults"), tuple),
}
"""Of a Spec's fields, all hashable, so that what is found out about a Spec can be remembered."""


@dataclass(frozen=True)
class Spec:
    """What one version of attention declares about itself. Data only: importing a Spec loads no kernel.

    Attributes:
        name: what `version=` takes.
        title: one line for tables.
        paper: where the algorithm is from.
        impl: `"package.module:function"`, imported on first use and called as
            `function(q, k, v, problem, softmax_scale) -> (out, lse or None)`. `out` must carry gradients where
            `problem.grad`; `lse` (float32, natural log, `(batch, heads, seqlen_q)`) must be there where `problem.lse`. For
            e4m3 inputs a sixth argument `descales` follows: those of q, k and v, each a float32 tensor, of any strides, or None.
            Where `problem.block_mask`, the `flashzoo.BlockMask` comes by keyword, as `block_mask`; it has the call's causal and
            window in it, and the problem has none. `out` has dtype `problem.out_dtype`.
        dtypes: dtypes taken on a GPU.
        cpu_dtypes: dtypes taken on CPU tensors; empty where the version does not run there.
        quantizes: dtypes taken, wherever it runs, with `precision="fp8"`.
        fp8_rms: `(kind of workloads.VALUES, factor)`: on such inputs, with `precision="fp8"`, no head's RMS error is more than
            so many times the yardstick's, which is plain FP8: one scale a head, nothing rotated. It can only ask for more
            than `flashzoo.accuracy` does of everybody.
        arch: lowest and highest compute capability, None for no upper end.
        head_dims: the head dims taken, of q and k and of v.
        features: names from `FEATURES` that the forward pass honours.
        backward: names from `FEATURES` that the backward pass honours; None where there is no backward pass.
        backward_impl: `"package.module:function"`, for a backward pass that other versions may use too, under "auto" where
            they give an LSE and have no backward pass of their own for a problem: called as
            `function(dout, dlse or None, q, k, v, out, lse, problem, softmax_scale) -> (dq, dk, dv)`, with a block mask as `impl`.
        transforms: names from `TRANSFORMS` under which its function is right, as one made of torch's own operations may be: a kernel
            reads memory, in which there is neither a tangent nor a batch. All else is refused.
        requires: packages that must be installed. What needs triton runs in its interpreter on CPU tensors, of at most
            `INTERPRETER_BLOCKS` blocks.
        backward_requires: those that the backward pass needs beside them.
        auto: the devices, of "cuda" and "cpu", on which `version="auto"` may choose it.
        memory: "linear" or "quadratic" in seqlen.
        faults: `(device, start of a test's id, sentence)`: what is known to be wrong in code that is not ours. The suite
            skips those cases and gives the sentence as its reason; `explain` tells it.
        check: sentences for what the fields above can't say; empty where the problem is taken.
        notes: sentences on what a call does silently (padding, copies, tile choice), for `explain`.

    Raises:
        TypeError, ValueError: a field is not of its kind, or names what nobody knows; the text names it and what was got.
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
    features: frozenset[str] = frozenset()
    backward: frozenset[str] | None = None
    backward_impl: str | None = None
    transforms: frozenset[str] = frozenset()
    requires: tuple[str, ...] = ()
    backward_requires: tuple[str, ...] = ()
    auto: tuple[str, ...] = ("cuda",)
    memory: str = "linear"
    faults: tuple[tuple[str, str, str], ...] = ()
    check: Callable[[Problem], list[str]] | None = None
    notes: Callable[[Problem], list[str]] | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            given = getattr(self, name)
            if not isinstance(given, kind) and not (name == "backward" and given is None):
                raise TypeError(f"Spec {self.name!r}: {name} must be a {kind.__name__}, got {given!r}")
        for name in ("features", "backward"):
            unknown = sorted((getattr(self, name) or frozenset()) - FEATURES.keys())
            if unknown:
                raise ValueError(f"Spec {self.name!r}: {name} must be names from {sorted(FEATURES)}, got {unknown}")
        unknown = sorted(self.transforms - TRANSFORMS.keys())
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
        for name, given in (("impl", self.impl), ("backward_impl", self.backward_impl)):
            named = isinstance(given, str) and given.count(":") == 1 and all(given.split(":"))
            if not named and (name == "impl" or given is not None):
                raise ValueError(f"Spec {self.name!r}: {name} must be 'package.module:function', got {given!r}")

    def unsupported(self, problem: Problem) -> list[str]:
        """Why this version can't take the problem, one sentence a reason, all of them; empty where it can."""
        # Where the hardware won't do, or the dtype, an installation would not help.
        reasons = self._hardware(problem) or [f"needs the package {missing}" for missing in _missing(self.requires)]
        for name in ("head_dim", "head_dim_v") if "head_dim_v" in problem.features else ("head_dim",):
            if getattr(problem, name) not in self.head_dims:
                reasons.append(f"takes {name} {_describe(self.head_dims)}, got {getattr(problem, name)}")
        reasons += [f"does not support {FEATURES[name]}" for name in sorted(problem.features - self.features)]
        if problem.grad and self.backward is None:
            reasons.append("has no backward pass, and an input requires grad")
        elif problem.grad and self.backward is not None:
            missing = (problem.features & self.features) - self.backward
            reasons += [f"its backward pass does not support {FEATURES[name]}" for name in sorted(missing)]
            reasons += [f"its backward pass needs the package {missing}" for missing in _missing(self.backward_requires)]
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
            return self._numerics(problem, self.cpu_dtypes, " on the CPU") if self.cpu_dtypes else ["does not run on CPU tensors"]
        reasons = []
        lowest, highest = self.arch
        if problem.arch is None:
            reasons.append("needs a GPU whose architecture is known: pass arch=, such as arch=90")
        elif problem.arch < lowest or (highest is not None and problem.arch > highest):
            reasons.append(f"needs {self.arch_text}, got sm_{problem.arch}")
        return reasons + self._numerics(problem, self.dtypes)

    def _numerics(self, problem: Problem, dtypes: tuple[str, ...], where: str = "") -> list[str]:
        by_precision = f'{" or ".join(self.quantizes)} with precision="fp8"'
        if problem.precision is not None:
            if not self.quantizes:
                return [f"does not support precision={problem.precision!r}"]
            return [] if problem.dtype in self.quantizes else [f"takes dtype {by_precision}, got {problem.dtype}"]
        if problem.dtype not in dtypes:
            # A dtype that it takes by precision alone is worth a word; one that it takes in both ways is not.
            also = f", or {by_precision}" if problem.dtype in self.quantizes else ""
            return [f"takes dtype {' or '.join(dtypes)}{where}{also}, got {problem.dtype}"]
        return []


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [
        f"{package!r}, which is not installed (pip install {_DISTRIBUTIONS.get(package, package)!r})"
        for package in packages
        if not _installed(package)
    ]


def _too_long_to_interpret(problem: Problem) -> list[str]:
    given = environ.get(INTERPRETER_LIMIT) or str(INTERPRETER_BLOCKS)
    if not given.isascii() or not given.isdecimal():
        raise ValueError(f"{INTERPRETER_LIMIT} must be a number of blocks of {INTERPRETER_BLOCK}x{INTERPRETER_BLOCK} scores, got {given!r}")
    if problem.blocks <= int(given):
        return []
    return [
        f"is too large for Triton's interpreter: {problem.blocks} blocks of {INTERPRETER_BLOCK}x{INTERPRETER_BLOCK} scores, "
        f"some {duration(interpreter_seconds(problem))}, and the limit is {given}; {INTERPRETER_LIMIT}={problem.blocks} lifts it"
    ]


def interpreter_seconds(problem: Problem) -> float:
    """About how long a forward pass takes in Triton's interpreter."""
    return problem.blocks * INTERPRETER_BLOCK_S * max(1, problem.head_dim / INTERPRETER_BLOCK)


def duration(seconds: float) -> str:
    """A time in words, in the largest unit of which there are two."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _describe(head_dims: range) -> str:
    text = f"{head_dims[0]} to {head_dims[-1]}"
    return text if head_dims.step == 1 else f"{text} in steps of {head_dims.step}"
