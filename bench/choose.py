"""Which kernel for me: a grid of problems, each with what `flashzoo.explain` says of it, and with the cell of a results
file that is most like it. Data alone, for the page of `bench.report`.

The grid of a pass has an axis for each of its questions. A problem's place is the number whose digits are its answers'
places on the axes, the last axis' the lowest. What many problems share is kept once, and they hold its number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Generic, TypeVar

from bench import runs
from bench.caches import rate
from bench.cells import DECODE
from bench.contenders import parted
from bench.peers import PEERS
from bench.rows import KEY_FIELDS
from flashzoo.call.forms import MaskForm, ScoreForm
from flashzoo.call.problem import Problem
from flashzoo.registry import Explanation, current, explain_problem
from flashzoo.spec import missing

ARCH = 90
"""Of the GPU that is asked about where the results are of none that is known."""
SEQUENCES = 8
PAGE_SIZE = 64
NEVER: dict[str, str] = {"measured": "never"}
"""Columns that no row has."""
KEPT = tuple(name for name in KEY_FIELDS if name not in ("batch", "seqlen_q", "heads", "heads_kv"))
"""Columns in which a row must be as it was asked, empty where nobody says how."""


@dataclass(frozen=True)
class Answer:
    """One answer to a question.

    Attributes:
        label: what a reader chooses.
        fields: of `Problem`.
        columns: what a row of a results file has that is of such a call.
        code: what the call has for it.
        setup: the line before the call that makes what `code` names.
        shapes: of q, and of k and v but for their last dimension, where they are others than the pass's.
    """

    label: str
    fields: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    code: str = ""
    setup: str = ""
    shapes: tuple[str, str] | None = None


def _seqlens(*seqlens: int) -> tuple[Answer, ...]:
    return tuple(Answer(runs.length(n), {"seqlen_k": n}, {"seqlen_k": str(n)}) for n in seqlens)


def _mask(label: str, fields: dict[str, Any], code: str, setup: str = "", **columns: str) -> Answer:
    return Answer(label, fields, columns or NEVER, code, setup)


NOTHING = Answer("nothing", {}, {"lengths": "", "deterministic": ""})
SINKS = Answer(
    "sinks",
    {"sinks": True},
    {**NOTHING.columns, "score": "sinks"},
    "sinks=sinks",
    'sinks = torch.randn(heads, device="cuda")',
)
INPUTS = (
    Answer("16 bits (bf16)", {"dtype": "bf16"}, {"dtype": "bf16", "precision": ""}),
    Answer(
        "16 bits, products in FP8",
        {"dtype": "bf16", "precision": "fp8"},
        {"dtype": "bf16", "precision": "fp8"},
        'precision="fp8"',
    ),
    Answer("FP8 (e4m3)", {"dtype": "e4m3"}, {"dtype": "e4m3", "precision": ""}),
)
ON_E4M3 = Answer(
    "16 bits on FP8 caches",
    {"dtype": "bf16", "dtype_kv": "e4m3"},
    {"dtype": "bf16", "precision": "", "dtype_kv": "e4m3"},
    setup="k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)",
)
HEAD_DIMS = (
    *(Answer(str(d), {"head_dim": d}, {"head_dim": str(d)}) for d in (64, 128, 256)),
    Answer("192, of v 128", {"head_dim": 192, "head_dim_v": 128}, NEVER),
)
HEADS = tuple(
    Answer(f"{heads}:{kv}", {"heads": heads, "heads_kv": kv})
    for heads, kv in ((16, 16), (32, 32), (16, 8), (32, 8), (64, 8))
)
NO_MASK = _mask("none", {}, "", causal="0", mask="")
WINDOW = _mask("causal, 1024 keys back", {"causal": True, "window": (1023, 0)}, "causal=True, window_size=(1023, 0)")
MASKS = (
    NO_MASK,
    _mask("causal", {"causal": True}, "causal=True", causal="1", mask=""),
    WINDOW,
    _mask(
        "block mask, a quarter kept",
        {"block_mask": MaskForm()},
        "block_mask=mask",
        'mask = flashzoo.BlockMask.random(seqlen, blocks=seqlen // 512, device="cuda")',
        causal="0",
        mask="random/4",
    ),
)
FEATURES = (
    NOTHING,
    Answer(
        "packed sequences",
        {"sequences": SEQUENCES},
        {"lengths": "documents", "deterministic": ""},
        "cu_seqlens_q=cu_seqlens",
        f'cu_seqlens = torch.arange(0, seqlen + 1, seqlen // {SEQUENCES}, device="cuda", dtype=torch.int32)',
        ("seqlen, heads, head_dim", "seqlen, heads_kv"),
    ),
    Answer("log-sum-exp returned", {"lse": True}, NEVER, "return_lse=True"),
    Answer(
        "the same bits in every run",
        {"deterministic": True},
        {"lengths": "", "deterministic": "1"},
        "deterministic=True",
    ),
    SINKS,
    Answer(
        "softcap",
        {"score_mod": ScoreForm()},
        {**NOTHING.columns, "score": "softcap"},
        "score_mod=flashzoo.score_mods.softcap(20.0)",
    ),
    Answer("dropout", {"dropout_p": 0.1}, {**NOTHING.columns, "score": "dropout"}, "dropout_p=0.1"),
)
PAGES = (
    "page_table=table",
    f'table = torch.arange(batch * seqlen // {PAGE_SIZE}, device="cuda", dtype=torch.int32).view(batch, -1)',
    ("batch, 1, heads, head_dim", f"batch * seqlen // {PAGE_SIZE}, {PAGE_SIZE}, heads_kv"),
)
CACHES = (
    NOTHING,
    Answer("pages of 64", {"page_size": PAGE_SIZE}, {"lengths": f"pages{PAGE_SIZE}", "deterministic": ""}, *PAGES),
    SINKS,
    Answer(
        "sinks, and pages of 64",
        {"page_size": PAGE_SIZE, "sinks": True},
        NEVER,
        f"{PAGES[0]}, {SINKS.code}",
        f"{PAGES[1]}\n{SINKS.setup}",
        PAGES[2],
    ),
)


@dataclass(frozen=True)
class Pass:
    """A grid.

    Attributes:
        name: of the pass in results files.
        fields: of `Problem`, for all.
        shapes: of q, and of k and v but for their last dimension.
        axes: by question the answers.
        code, setup: as in `Answer`, for all.
    """

    name: str
    fields: dict[str, Any]
    shapes: tuple[str, str]
    axes: dict[str, tuple[Answer, ...]]
    code: str = ""
    setup: str = ""


_AXES = {
    **{"inputs": INPUTS, "head dim": HEAD_DIMS, "heads": HEADS},
    "length": _seqlens(512, 2048, 4096, 8192, 16384, 65536),
    **{"mask": MASKS, "feature": FEATURES},
}
_OF_ALL = ("batch, seqlen, heads, head_dim", "batch, seqlen, heads_kv")
GRIDS = {
    "forward": Pass("fwd", {}, _OF_ALL, _AXES),
    "backward": Pass("bwd", {"grad": True}, _OF_ALL, _AXES),
    "decode": Pass(
        DECODE,
        {"seqlen_q": 1, "used_k": True},
        ("batch, 1, heads, head_dim", "batch, seqlen, heads_kv"),
        {
            **{"inputs": (*INPUTS[::2], ON_E4M3), "head dim": HEAD_DIMS, "heads": HEADS},
            "length": _seqlens(2048, 8192, 32768, 131072),
            "sequences": tuple(Answer(str(n), {"batch": n}, {"batch": str(n)}) for n in (1, 8, 32, 128)),
            **{"mask": (NO_MASK, WINDOW), "feature": CACHES},
        },
        "seqused_k=used",
        'used = torch.full((batch,), seqlen, device="cuda", dtype=torch.int32)',
    ),
}
MODELS = {
    "BERT large": {"head dim": "64", "heads": "16:16", "length": "512", "mask": "none", "feature": "nothing"},
    "Llama 2 7B": {"head dim": "128", "heads": "32:32", "mask": "causal", "feature": "nothing"},
    "Llama 3.1 8B": {"head dim": "128", "heads": "32:8", "mask": "causal", "feature": "nothing"},
    "Llama 3.1 70B": {"head dim": "128", "heads": "64:8", "mask": "causal", "feature": "nothing"},
    "Gemma 2 9B, layers with windows": {"head dim": "256", "heads": "16:8", "mask": WINDOW.label, "feature": "softcap"},
    "gpt-oss, layers that see all": {"head dim": "64", "heads": "64:8", "mask": "causal", "feature": "sinks"},
    "DeepSeek-V3 on eight GPUs, prefill": {
        **{"head dim": "192, of v 128", "heads": "16:16"},
        **{"mask": "causal", "feature": "nothing"},
    },
}
"""By name, the answers that a model's layers give; a question that they leave open, or a pass has not, stays."""

Place = tuple[Answer, ...]
Verdict = tuple[str, bool, str]
"""A version, whether it takes a problem, and its lines of the explanation."""
Outcome = tuple[str | None, tuple[int, ...]] | str
"""Who is chosen, and the numbers of verdicts; or the sentence by which no call can ask that."""
RowsOf = tuple[frozenset[tuple[str, str]], tuple[str, ...]]
"""Columns of a cell; and of several that have them its run, heads, heads_kv and batch."""
Thing = TypeVar("Thing", bound=Hashable)


class Shared(Generic[Thing]):
    """Things kept once, by their number."""

    def __init__(self) -> None:
        self._numbers: dict[Thing, int] = {}

    def number(self, thing: Thing) -> int:
        """The thing's."""
        return self._numbers.setdefault(thing, len(self._numbers))

    @property
    def things(self) -> list[Thing]:
        """In the order of their numbers."""
        return list(self._numbers)


def places(grid: Pass) -> Iterator[Place]:
    """Every combination of answers, in the order of their numbers."""
    return product(*grid.axes.values())


def arch_of(rows: list[runs.Row]) -> int:
    """Of the GPU whose results these are."""
    return runs.word_of(rows[-1]["gpu"], runs.ARCHS) or ARCH


def problem_at(grid: Pass, place: Place, arch: int) -> Problem:
    """What is asked there of such a GPU. Raises ValueError where no call can ask that."""
    fields: dict[str, Any] = {"dtype": "bf16", "arch": arch, **grid.fields}
    for answer in place:
        fields |= answer.fields
    seqlen = fields["seqlen_k"]
    batch = 1 if "sequences" in fields else max(1, runs.TOKENS // seqlen)
    return Problem(**{"batch": batch, "seqlen_q": seqlen, **fields})


def said(explanation: Explanation) -> list[Verdict]:
    """An explanation, version by version."""
    lines, found = iter(str(explanation).splitlines()[1:]), []
    for verdict in explanation.verdicts:
        mine = [next(lines) for _ in range(1 + len(verdict.reasons) + len(verdict.notes))]
        found.append((verdict.name, not verdict.reasons, "\n".join(mine)))
    return found


def explained(arch: int) -> dict[str, Any]:
    """What `explain` says at each place, by the registry as it is now, of a GPU of this compute capability.

    Returns:
        verdicts and outcomes, and by the pass's name the number of each place's outcome.
    """
    verdicts, outcomes = Shared[Verdict](), Shared[Outcome]()
    told: dict[Hashable, Outcome] = {}  # of explanations that differ in their problem alone

    def outcome(grid: Pass, place: Place) -> Outcome:
        try:
            problem = problem_at(grid, place, arch)
        except ValueError as error:
            return str(error)
        answer = explain_problem(problem)
        key = answer.chosen, answer.backward, answer.verdicts
        if key not in told:
            who = f"{answer.chosen} forward, {answer.backward} backward" if answer.backward else answer.chosen
            told[key] = who, tuple(map(verdicts.number, said(answer)))
        return told[key]

    found = {name: [outcomes.number(outcome(grid, place)) for place in places(grid)] for name, grid in GRIDS.items()}
    return {"verdicts": verdicts.things, "outcomes": outcomes.things, "places": found}


def _columns_of(row: runs.Row) -> frozenset[tuple[str, str]]:
    """What a row says of the call that it timed, in the words of `Answer.columns`."""
    asked = parted(row["impl"])[1]
    columns = {name: row[name] for name in KEPT} | {"precision": asked.get("precision", "")}
    columns |= {name: "1" if asked.get(name) else "" for name in ("deterministic", "fast_accum")}
    if row["pass"] == DECODE:
        columns["batch"] = row["batch"]
    return frozenset(columns.items())


def measured(rows: list[runs.Row]) -> dict[str, Any]:
    """The cell of a results file that is most like each place: of the same pass, inputs, head dim, length and mask.
    Of several it is that with the same heads, or else as many to a head of keys, then that with more results, then the
    last: ratios hold within a run.

    Returns:
        cells: each with its run, what was measured, unit, bars (name, rate, ms, p10, p90, RMS error, rate alone at
        settled clocks, joules) and whys; and by the pass's name the number of each place's cell, -1 where there is
        none.
    """
    found: dict[frozenset, dict[tuple[str, ...], list[runs.Row]]] = {}
    for row in rows:
        if row["seqlen_q"] in ("1", row["seqlen_k"]):
            of = row["run"], row["heads"], row["heads_kv"], row["batch"]
            found.setdefault(_columns_of(row), {}).setdefault(of, []).append(row)
    cells = Shared[RowsOf]()

    def cell(grid: Pass, place: Place) -> int:
        columns, fields = {**dict.fromkeys((*KEPT, "fast_accum"), ""), "pass": grid.name}, {}
        for answer in place:
            columns, fields = columns | answer.columns, fields | answer.fields
        candidates = found.get(frozenset(columns.items()), {})

        def fitness(of: tuple[str, ...]) -> tuple[Any, ...]:
            heads, heads_kv, results = int(of[1]), int(of[2]), runs.measured(candidates[of])
            asked = fields["heads"], fields["heads_kv"]
            return (heads, heads_kv) == asked, heads * asked[1] == heads_kv * asked[0], len(results)

        with_results = [of for of in candidates if runs.measured(candidates[of])]
        # max takes the first of equals
        best = max(reversed(with_results), key=fitness, default=None)
        return -1 if best is None else cells.number((frozenset(columns.items()), best))

    numbers = {name: [cell(grid, place) for place in places(grid)] for name, grid in GRIDS.items()}
    return {"cells": [_cell(found[columns][of]) for columns, of in cells.things], "places": numbers}


def _cell(mine: list[runs.Row]) -> dict[str, Any]:
    of = mine[0]
    size = {"fwd": "{batch} x {seqlen_k}", "bwd": "{batch} x {seqlen_k}", DECODE: "{batch} caches of {seqlen_k} keys"}
    if of.get("lengths") == "documents":
        size |= dict.fromkeys(runs.WORDS, "{batch} documents of {seqlen_k} tokens in all")
    what = f"{size[of['pass']]}, {{heads}}:{{heads_kv}} heads of {{head_dim}}, {{dtype}}".format(**of)
    decoding = of["pass"] == DECODE

    def speed(row: runs.Row) -> float:
        return float(f"{rate(row):.4g}") if decoding else float(row["tflops"])

    bars = [
        (
            # how a version was called is what was asked
            *(parted(row["impl"])[0], speed(row)),
            *(float(row[name]) if row[name] else None for name in ("ms", "ms_p10", "ms_p90", "rms_err")),
            *(speed(alone) if (alone := runs.settled(row)) else None, float(row["joules"]) if row["joules"] else None),
        )
        for row in runs.measured(mine)
    ]
    return {
        **{"run": of["run"], "what": what, "unit": "GB/s" if decoding else "TFLOP/s"},
        **{
            "bars": sorted(bars, key=lambda bar: -bar[1]),
            "whys": {parted(row["impl"])[0]: row["why"] for row in mine if row["why"]},
        },
    }


def data(rows: list[runs.Row]) -> dict[str, Any]:
    """All that the page asks and answers, fit for JSON."""
    explanations, results = explained(arch_of(rows)), measured(rows)
    grids = {
        name: {
            "axes": {question: list(map(_told, axis)) for question, axis in grid.axes.items()},
            **{"shapes": grid.shapes, "code": grid.code, "setup": grid.setup},
            **{"outcomes": explanations["places"][name], "cells": results["places"][name]},
        }
        for name, grid in GRIDS.items()
    }
    return {
        **{"grids": grids, "verdicts": explanations["verdicts"], "outcomes": explanations["outcomes"]},
        **{"cells": results["cells"], "models": MODELS, "peers": list(PEERS), "tokens": runs.TOKENS},
    }


def lacking() -> list[str]:
    """The packages of versions that are not installed here, and so are not in what `explain` says."""
    return list(dict.fromkeys(text for spec in current().specs.values() for text in missing(spec.requires)))


def _told(answer: Answer) -> dict[str, Any]:
    """What the page needs of an answer."""
    sizes = ("batch", "seqlen_k", "heads", "heads_kv", "head_dim", "head_dim_v", "dtype")
    fields = {name: value for name, value in answer.fields.items() if name in sizes}
    return {name: value for name, value in vars(answer).items() if name != "columns"} | {"fields": fields}
