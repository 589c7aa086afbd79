"""What one call asks: `Problem`, a frozen record of plain values, and the options of `attention` that its fields are.

Standard library only, so every question of dispatch can be asked, and tested, on a machine with no torch and no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from flashzoo.call.features import BESIDE_OPTIONS, Feature
from flashzoo.call.forms import MaskForm, ScoreForm, Window, check_flags, normalised, span_of

DTYPES = ("fp16", "bf16", "fp32", "fp64", "e4m3")
PRECISIONS = (None, "fp8")
"""What a call may ask its products to be made in: its inputs' own dtype,
or e4m3 to which 16-bit inputs are quantised."""
QUANTIZABLE = ("fp16", "bf16")
"""Dtypes that `precision="fp8"` quantises."""
OUT_DTYPES: dict[str, tuple[str, ...]] = {
    "fp16": ("fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp32": ("fp32",),
    "fp64": ("fp64",),
    "e4m3": ("bf16", "fp16"),
}
"""What out may be, by the dtype of the inputs, the default first."""
DESCALE_BLOCK = 128
"""Rows of q, k or v that share one number of a descale by block."""

DROPOUT_STEPS = 1 << 24
"""Random numbers that dropout_p is held against: as many as float32 has below 1 in equal steps."""

LARGEST_NUMBER = 1e30
"""Of softmax_scale and its like: scores are float32, and beyond this even small ones would be infinite."""

LOG2E = math.log2(math.e)
"""What scores are multiplied by to be in log2 units, in which kernels have them."""

_SIZES = (
    ("batch", 0),
    ("seqlen_q", 0),
    ("seqlen_k", 0),
    ("heads", 1),
    ("heads_kv", 1),
    ("head_dim", 1),
    ("head_dim_v", 1),
)
"""A problem's sizes and the least of each."""
_NAMES = (("dtype", DTYPES), ("device", ("cuda", "cpu")))
"""What a problem's fields of words may be."""
_OF_PACKED = ("max_seqlen_q", "max_seqlen_k", "packed_q")
"""Fields that say something of packed sequences."""


def _check_int(name: str, value: Any, least: int, more: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int{more}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_flag(name: str, value: Any) -> None:
    check_flags(**{name: value})


def _check_window(name: str, value: Any) -> None:
    normalised(value, name)


def _check_length(name: str, value: Any) -> None:
    if value is not None:
        _check_int(name, value, 0, " or None")


def _check_precision(name: str, value: Any) -> None:
    if value not in PRECISIONS:
        raise ValueError(f"{name} must be None or 'fp8', got {value!r}")


def _check_out_dtype(name: str, value: Any) -> None:
    if value is not None and value not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, DTYPES))} or None, got {value!r}")


def _check_number(name: str, number: Any) -> None:
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be a float or None, got {type(number).__name__}")
    if not abs(number) <= LARGEST_NUMBER:  # true of NaN, and traced where it is unknown
        limit = f"at most {LARGEST_NUMBER:g} in size" if isinstance(number, int) or math.isfinite(number) else "finite"
        raise ValueError(f"{name} must be {limit}, got {number}")


def _check_dropout(name: str, share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(share).__name__}")
    if not 0 <= share < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, got {share}")


def option(
    default: Any,
    schema: str,
    check: Callable[[str, Any], object],
    *,
    argument: str | None = None,
    flag: dict[str, Any] | None = None,
    example: Any = None,
) -> Any:
    """A field of `Problem` that a keyword argument of `attention` gives.

    Args:
        default: of the field.
        schema: the argument's type in the schema of a torch operator; the argument's default is None where that is an
            optional one ("float?"), else the field's.
        check: called with the argument's name and value; raises TypeError or ValueError where it is malformed.
        argument: its name; the field's where None.
        flag: the keywords of `argparse.ArgumentParser.add_argument` for the command line; None where it has no flag.
        example: a value of the field other than its default, where it is a feature, which a version declares under the
            field's name or refuses. None where every version takes it.
    """
    return field(
        default=default,
        metadata={"schema": schema, "check": check, "argument": argument, "flag": flag, "example": example},
    )


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
        latent: v is k's first head_dim_v columns, where they lie, as of the latent cache of DeepSeek's MLA. By keyword
            only.
        dtype: of q, k and v, one of `DTYPES`.
        dtype_kv: "e4m3" where k and v are that beside a 16-bit q, as of an FP8 cache; None where they are of dtype. By
            keyword only.
        softmax_scale: what scores are multiplied by; None is `1 / sqrt(head_dim)`, see `scale`.
        causal: query i sees key j only where `j <= i + seqlen_k - seqlen_q` (aligned bottom-right).
        window: `(left, right)`, how many keys either side of the aligned diagonal are seen;
            None is unbounded, and -1 is replaced by it.
        lse: the caller wants the log-sum-exp too.
        deterministic: the same bits in every run, gradients included.
        grad: the call is recorded by autograd, so a backward pass may follow.
        device: "cuda" or "cpu".
        arch: compute capability as `10 * major + minor` (90 for Hopper); None on the CPU.
        precision: of `PRECISIONS`.
        block_mask: the form of the block mask, causal and window put into it; None where there is none.
        sequences: how many of them share the rows of q, k and v, which lie behind one another; batch is 1 then,
            seqlen_q and seqlen_k are the rows in all, and causal and windows are aligned in each. None where each of
            the batch has a sequence of its own.
        packed_q: the sequences share the rows of q alone: k and v are caches, one of seqlen_k rows for each of them, or
            lie in pages.
        used_k: of each sequence's keys only some are used, how many is on the device.
        page_size: keys and values lie in pages of so many rows, which of them are a sequence's is on the device; None
            where they don't. seqlen_k is as many rows as a sequence may have pages for.
        sinks: each query head has a logit in its softmax that brings no value.
        score_mod: the form of the function on scores; None where there is none.
        dropout_p: the share of the probabilities that is dropped, see `dropped`.
        max_seqlen_q, max_seqlen_k: no sequence has more queries, or keys; None where the caller does not say.
            Only with sequences.
        fast_accum: in FP8, sums of P V may stay in the tensor core, which keeps fewer bits of them than float32 has.
        out_dtype: of out, one of `OUT_DTYPES`; None stands for the first, as does what inputs of another dtype than
            e4m3 can't have. So `replace(problem, dtype=...)` keeps the old one, where it may, unless it is given
            out_dtype=None too.

    Raises:
        TypeError, ValueError: a field is none that a call could ask for;
            the text names it, what was expected and what was got.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int = field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType]
    latent: bool = field(default=False, kw_only=True)
    dtype: str = "bf16"
    dtype_kv: str | None = field(default=None, kw_only=True)
    causal: bool = option(
        False,
        "bool",
        _check_flag,
        example=True,
        flag={"action": "store_true", "help": "the last query sees the last key"},
    )
    window: Window = option(
        (None, None),
        "SymInt[]?",
        _check_window,
        example=(3, 2),
        argument="window_size",
        flag={
            "type": int,
            "nargs": 2,
            "metavar": ("LEFT", "RIGHT"),
            "help": "keys seen on either side; -1 is unbounded",
        },
    )
    softmax_scale: float | None = option(
        None,
        "float?",
        _check_number,
        flag={"type": float, "metavar": "S", "help": "of scores (default: 1 / sqrt(head_dim))"},
    )
    lse: bool = False
    deterministic: bool = option(
        False, "bool", _check_flag, example=True, flag={"action": "store_true", "help": "the same bits in every run"}
    )
    grad: bool = False
    device: str = "cuda"
    arch: int | None = None
    precision: str | None = option(
        None,
        "str?",
        _check_precision,
        flag={"choices": [name for name in PRECISIONS if name], "help": "quantise 16-bit inputs to this"},
    )
    fast_accum: bool = option(
        False,
        "bool",
        _check_flag,
        flag={"action": "store_true", "help": "sums of P V in FP8 may stay in the tensor core, in its fewer bits"},
    )
    out_dtype: str = option(None, "ScalarType?", _check_out_dtype)
    block_mask: MaskForm | None = None
    sequences: int | None = None
    packed_q: bool = False
    used_k: bool = False
    page_size: int | None = None
    sinks: bool = False
    score_mod: ScoreForm | None = None
    dropout_p: float = option(
        0.0,
        "float",
        _check_dropout,
        example=0.25,
        flag={"type": float, "metavar": "P", "help": "share of the probabilities that is dropped"},
    )
    max_seqlen_q: int | None = option(None, "SymInt?", _check_length)
    max_seqlen_k: int | None = option(None, "SymInt?", _check_length)

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        out_dtypes = OUT_DTYPES[self.dtype] if self.dtype in DTYPES else (None,)
        if self.out_dtype is None or (self.dtype != "e4m3" and self.out_dtype not in out_dtypes):
            object.__setattr__(self, "out_dtype", out_dtypes[0])
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
        check_flags(lse=self.lse, grad=self.grad, packed_q=self.packed_q, used_k=self.used_k, sinks=self.sinks)
        check_flags(latent=self.latent)
        if self.latent and self.head_dim_v >= self.head_dim:
            raise ValueError(
                f"head_dim_v must be less than head_dim {self.head_dim} where latent, got {self.head_dim_v}"
            )
        for name, default, check in _CHECKED:
            if given[name] is not default:
                check(name, given[name])
        for name, known in _NAMES:
            if given[name] not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {given[name]!r}")
        if self.out_dtype not in OUT_DTYPES[self.dtype]:
            raise ValueError(
                f"out_dtype must be one of {', '.join(map(repr, OUT_DTYPES[self.dtype]))}, got {self.out_dtype!r}"
            )
        if self.dtype_kv is not None:
            self._check_dtype_kv()
        if self.precision is not None and self.dtype not in QUANTIZABLE:
            raise ValueError(f"precision={self.precision!r} is for dtype {' or '.join(QUANTIZABLE)}, got {self.dtype}")
        if self.fast_accum and self.numerics not in ("e4m3", "fp8"):
            raise ValueError(f"fast_accum=True is for e4m3 inputs or precision='fp8', got {self.dtype}")
        if self.block_mask is not None:
            self._check_form(self.block_mask)
        if self.score_mod is not None and not isinstance(self.score_mod, ScoreForm):
            raise TypeError(
                "score_mod must be a ScoreForm, such as a flashzoo.ScoreMod's `form`, or None, "
                f"got {type(self.score_mod).__name__}"
            )
        if self.page_size is not None:
            self._check_pages()
        if self.sequences is not None:
            self._check_packed()
        else:
            for name in _OF_PACKED:
                if given[name]:
                    raise ValueError(f"{name} goes with packed sequences (cu_seqlens_q), got it without")
            if self.used_k and self.block_mask is not None:
                raise ValueError(
                    "block_mask does not go with seqused_k: its blocks are of all keys, "
                    "and what a query sees hangs on how many are used"
                )

    def _check_dtype_kv(self) -> None:
        if self.dtype_kv != "e4m3":
            raise ValueError(f"dtype_kv must be 'e4m3' or None, got {self.dtype_kv!r}")
        if self.dtype not in QUANTIZABLE:
            raise ValueError(f"dtype_kv='e4m3' is beside dtype {' or '.join(QUANTIZABLE)}, got {self.dtype}")
        if self.precision is not None:
            raise ValueError(f"precision={self.precision!r} quantises k and v, got them as dtype_kv='e4m3'")

    def _check_pages(self) -> None:
        _check_int("page_size", self.page_size, 1, " or None")
        if self.seqlen_k % self.page_size:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(f"seqlen_k must be whole pages of {self.page_size} rows, got {self.seqlen_k}")
        if self.sequences is not None and not self.packed_q:
            raise ValueError(
                f"page_size goes with sequences where packed_q, as packed keys are in no pages, got {self.page_size}"
            )
        if self.block_mask is not None:
            raise ValueError("block_mask does not go with page_table")

    def _check_packed(self) -> None:
        _check_int("sequences", self.sequences, 0, " or None")
        if self.batch != 1:
            raise ValueError(
                f"batch must be 1 where sequences share its rows (cu_seqlens_q: q is (total_q, heads, head_dim), or a "
                f"batch of one), got {self.batch}"
            )
        if self.block_mask is not None:
            raise ValueError(
                "block_mask does not go with packed sequences (cu_seqlens_q): "
                "BlockMask.documents is a mask that keeps them apart"
            )

    def _check_form(self, form: Any) -> None:
        if not isinstance(form, MaskForm):
            raise TypeError(
                "block_mask must be a MaskForm, such as a flashzoo.BlockMask's `form`, or None, "
                f"got {type(form).__name__}"
            )
        for name in ("batch", "heads"):
            if getattr(form, name) not in (1, getattr(self, name)):
                raise ValueError(
                    f"block_mask must have q's {name} {getattr(self, name)}, or 1 where shared, "
                    f"got {getattr(form, name)}"
                )

    # Each launch is looked up by its problem: made of all fields each time, the hash is a tenth of a call's host time.
    @cached_property
    def _hash(self) -> int:
        return hash(_values(self))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Its fields: a hash of text is another process's no more."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def numerics(self) -> str:
        """What the products are made in: "e4m3" of inputs that are it, "fp8" of inputs quantised to it,
        or the dtype."""
        return self.precision or self.dtype

    @property
    def kv_in_e4m3(self) -> bool:
        """Whether k and v are e4m3, which has descales and no gradients, whatever q is."""
        return "e4m3" in (self.dtype, self.dtype_kv)

    @cached_property
    def features(self) -> frozenset[str]:
        """The names in `FEATURES` that this call needs."""
        return frozenset(name for name, feature in FEATURES.items() if feature.needed(self))

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        # a float: kernels are compiled for the type of the first call, and 2 and 2.0 are one problem
        return 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else float(self.softmax_scale)

    @property
    def dropped(self) -> float:
        """dropout_p as it is computed with: the nearest multiple of `1 / DROPOUT_STEPS` below 1, which float32 holds,
        as it does what is left of 1."""
        return min(round(self.dropout_p * DROPOUT_STEPS), DROPOUT_STEPS - 1) / DROPOUT_STEPS

    @property
    def batch_kv(self) -> int:
        """Of k and v: packed queries may be on a batch of caches."""
        return self.sequences if self.packed_q else self.batch  # pyright: ignore[reportReturnType] - then there are some

    @property
    def total_k(self) -> int:
        """Keys of a row of scores of which nothing is skipped: of packed queries those of all caches."""
        return self.seqlen_k * (self.batch_kv if self.packed_q else 1)

    @property
    def offset(self) -> int:
        """From a query's number to that of the key on its aligned diagonal: the last query's is the last key."""
        return self.seqlen_k - self.seqlen_q

    @cached_property
    def span(self) -> Window:
        """The visible band around the aligned diagonal, causal folded in."""
        return span_of(self.causal, self.window)

    @cached_property
    def forward(self) -> Problem:
        """The forward pass alone, with the LSE that a backward pass by another version starts from;
        itself where nothing is recorded."""
        return replace(self, grad=False, lse=True) if self.grad else self

    @property
    def reach(self) -> tuple[int, int]:
        """`span` in numbers: a side past both sequences together is unbounded,
        and can't overflow a kernel's 32-bit arithmetic."""
        return self.reach_of(self.span)

    def reach_of(self, span: Window) -> tuple[int, int]:
        """Another span in numbers, as `reach`."""
        furthest = self.seqlen_q + self.seqlen_k
        left, right = (furthest if side is None else min(side, furthest) for side in span)
        return left, right

    def entries(self, rows: int, block: int) -> int:
        """Of packed sequences of so many rows in all, room for every block of `block` rows, whatever the lengths. The
        rows before the first sequence and behind the last are two more."""
        assert self.sequences is not None
        return rows // block + self.sequences + 2

    @property
    def blind_rows(self) -> int:
        """How many of the first queries see no key for causal's and window's sake; what a block mask does is in its
        lists. Not where it is `by_lengths`: then each sequence has its own."""
        right = self.span[1]
        return 0 if right is None else min(self.seqlen_q, max(0, -self.offset - right))

    @property
    def by_lengths(self) -> bool:
        """Whether lengths on the device say what a query sees: of packed sequences, or how much of a cache is used."""
        return self.sequences is not None or self.used_k

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
        batch = f"batch {self.batch}" if self.sequences is None else f"{self.sequences} packed sequences"
        batch += " of queries on caches" if self.packed_q else ""
        text = f"{batch}, seqlen {lengths}, heads {heads}, head_dim {head_dims}, {self.dtype}"
        if self.dtype_kv is not None:
            text += f" on {self.dtype_kv} k and v"
        if self.latent:
            text += ", v in k"
        if self.precision is not None:
            text += f" in {self.precision}"
        if self.out_dtype != self.dtype:
            text += f" to {self.out_dtype}"
        for name, default, _ in _CHECKED:
            value = getattr(self, name)
            if value != default and name not in ("precision", "out_dtype"):
                text += f", {name}" if value is True else f", {name} {value}"
        if self.page_size is not None:
            text += f", pages of {self.page_size}"
        if self.block_mask is not None:
            text += f", {self.block_mask}"
        if self.score_mod is not None:
            text += f", {self.score_mod}"
        text += "".join(f", {name}" for name in ("sinks", "lse", "grad") if getattr(self, name))
        return f"{text}, on {self.where}"


class Option(NamedTuple):
    """A keyword argument of `attention` that is a plain value: the field of `Problem` that it gives, its default,
    and as in `option`."""

    field: str
    default: Any
    schema: str
    check: Callable[[str, Any], object]
    flag: dict[str, Any] | None
    example: Any

    @property
    def not_given(self) -> Any:
        """The argument's default."""
        return None if self.schema.endswith("?") else self.default


def _feature(argument: str, option: Option) -> Feature:
    name, default = option.field, option.default
    asked = f"{argument}=True" if option.example is True else argument
    return Feature(asked, lambda problem: getattr(problem, name) != default, {name: option.example})


_values = attrgetter(*(field.name for field in fields(Problem)))
"""All fields of a problem, of which its hash is."""
OPTIONS = {
    x.metadata["argument"] or x.name: Option(x.name, x.default, *(x.metadata[name] for name in Option._fields[2:]))
    for x in fields(Problem)
    if x.metadata
}
"""By the argument's name."""
FEATURES = {
    option.field: _feature(name, option) for name, option in OPTIONS.items() if option.example is not None
} | BESIDE_OPTIONS
"""By the name that a `Spec` declares it under."""
_CHECKED = [(option.field, option.default, option.check) for option in OPTIONS.values()]
"""What `Problem` checks of its options, of which a default needs no check:
every question of dispatch makes some problems."""
