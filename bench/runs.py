"""What a results file holds, run by run: which rows a table, a picture or a claim is of.
Ratios hold within one run only."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import TypeVar

from bench.cells import PASSES
from bench.contenders import parted
from bench.peers import PEERS
from bench.rows import COPY, GEMM, MISSING, key_of
from flashzoo.call.forms import MaskForm
from flashzoo.call.problem import Problem

RESULTS = Path(__file__).parent / "results" / "h200.csv"
FP8, END_TO_END, ABLATED = "e4m3", "end_to_end", "one_level"
TABLES = {
    "fwd": "Forward",
    "fwd_e4m3": "Forward on FP8 inputs",
    "fwd_end_to_end": "Forward from 16 bits through FP8, quantisation included",
    "bwd": "Backward",
}
"""Which runs a table is of, and its title: a pass, and what sets the run apart."""
ERROR, TRAFFIC = "error_", "traffic_"
"""What passes begin with that time no attention: `bench.fp8_error`'s and `bench.traffic`'s."""
WORDS = {"fwd": "forward", "bwd": "backward"}
TOKENS = 16384
BUTTERFLY = "butterfly"
CAUSAL = "causal=True"
DENSE = ("", CAUSAL)
"""What stands for a mask in a dense cell of a run with block masks."""
DENSE_OF = {"blocksparse": "v2"}
"""The dense kernel that a block-sparse one is held against, where it has another name."""
BEST_PEER = "the best peer"

ARCHS = {
    **dict.fromkeys(("A100", "A800", "A30"), 80),
    **dict.fromkeys(("A10", "3090"), 86),
    **dict.fromkeys(("L4", "L40S", "4090"), 89),
    **dict.fromkeys(("H20", "H100", "H200", "H800", "GH200"), 90),
    **{"B200": 100, "B300": 103},
}
"""Compute capability, which results files don't hold, by a word of the GPU's name."""
SIZES = ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim")

Fact = TypeVar("Fact")
NEARLY_ALL = 0.85
"""Of a table's cells: a run that was cut off earlier may lack those where a ratio is worst."""
Row = dict[str, str]
Shape = tuple[int, bool, int]
"""head_dim, causal, seqlen."""
Size = tuple[str, int, int]
"""pass, head_dim, seqlen."""
Speeds = dict[Shape, dict[str, float]]


def results_file(text: str) -> Path:
    """An argument that names a results file. Raises ArgumentTypeError where it is none that is there."""
    path = Path(text)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not there"
        raise ArgumentTypeError(f"expected a results file of `flashzoo bench`, got {path}, which is {what}")
    return path


def measured(rows: list[Row]) -> list[Row]:
    """Those that are results, and don't say why there is none."""
    return [row for row in rows if not row.get("why")]


def not_installed(rows: list[Row], run: str) -> list[str]:
    """What a run asked for and found missing in every cell."""
    mine = [row for row in rows if row["run"] == run]
    there = {row["impl"] for row in measured(mine)}
    absent = (row["impl"] for row in mine if row.get("why", "").startswith(MISSING) and row["impl"] not in there)
    return list(dict.fromkeys(absent))


def settled(row: Row) -> Row | None:
    """A result with the time and speed that it has alone, at settled clocks; None where it was not timed so."""
    if not row.get("settled_ms"):
        return None
    speed = float(row["tflops"]) * float(row["ms"]) / float(row["settled_ms"])
    return {**row, "ms": row["settled_ms"], "tflops": f"{speed:.5g}"}


def of_last(rows: list[Row]) -> list[Row]:
    """Those of the last row's run."""
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def of_most(
    rows: list[Row],
    measurement: Callable[[Row], Hashable] = lambda row: row["run"],
    cell: Callable[[Row], Hashable] = key_of,
) -> list[Row]:
    """Those of the measurement, a run, that has most cells, and of equal ones the last; none where there are none."""
    return max(reversed(_by(measurement, rows)), key=lambda mine: len(set(map(cell, mine))), default=[])


def _by(measurement: Callable[[Row], Hashable], rows: list[Row]) -> list[list[Row]]:
    """Measurement by measurement, in the file's order."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(measurement(row), []).append(row)
    return [*found.values()]


def last_run(rows: list[Row], table: str) -> list[Row]:
    """A table's rows, at the field's sizes, of the run that has most results for it, by cells and implementations, and
    of equal ones the last, in one dtype.

    Where no row is of the field's sizes, as in a run on a CPU, they are at the sizes of the last row.

    Args:
        rows: of the results file.
        table: one of `TABLES`. A run that times anything end to end is of that table, and of no other with its pass.
            One that times an ablated kernel is of none, nor one with block masks, packed sequences, something on the
            scores or the layers of models, nor one of several GPUs.
    """
    return of_most(_of_table(rows, table), _measurement, lambda row: (shape_of(row), row["impl"]))


def _measurement(row: Row) -> tuple[str, str]:
    """What a table is of: one run, and of that one dtype."""
    return row["run"], row["dtype"]


def _of_table(rows: list[Row], table: str) -> list[Row]:
    apart = ("mask", "lengths", "score", "model", "gpus")
    others = {row["run"] for row in rows if row["impl"].endswith(ABLATED) or any(row.get(name) for name in apart)}
    rows = [row for row in measured(rows) if row["run"] not in others]
    quantized = {row["run"] for row in rows if row["impl"].endswith(END_TO_END)}

    def table_of_row(row: Row) -> str:
        kind = FP8 if row["dtype"] == FP8 else END_TO_END if row["run"] in quantized and row["pass"] == "fwd" else ""
        return f"{row['pass']}_{kind}" if kind else row["pass"]

    mine = [row for row in rows if table_of_row(row) == table]
    sizes = [tokens_of(row) for row in mine]
    return [row for row, size in zip(mine, sizes, strict=True) if size == (TOKENS if TOKENS in sizes else sizes[-1])]


def word_of(gpu: str, facts: Mapping[str, Fact]) -> Fact | None:
    """What is known of a GPU by a word of its name; None where nothing is."""
    return next((fact for word, fact in facts.items() if re.search(rf"\b{word}\b", gpu)), None)


def tokens_of(row: Row) -> int:
    """Of all sequences together."""
    return int(row["batch"]) * int(row["seqlen_q"])


def problem_of(row: Row) -> Problem:
    """What a row of pass `fwd` or `bwd` was asked."""
    return Problem(
        **{size: int(row[size]) for size in SIZES},
        dtype=row["dtype"],
        causal=row["causal"] == "1",
        grad=row["pass"] == "bwd",
        block_mask=MaskForm() if row["mask"] else None,
        device="cpu" if row["gpu"] == "cpu" else "cuda",
        arch=word_of(row["gpu"], ARCHS),
        **parted(row["impl"])[1],
    )


def shape_of(row: Row) -> Shape:
    """What sets a row of a table apart from the others, besides its implementation."""
    return int(row["head_dim"]), row["causal"] == "1", int(row["seqlen_q"])


def speeds(rows: list[Row], column: str = "tflops") -> Speeds:
    """TFLOP/s, or another column where it is filled, by shape, then by implementation, in the file's order."""
    table: Speeds = {}
    for row in rows:
        if row.get(column):
            table.setdefault(shape_of(row), {})[row["impl"]] = float(row[column])
    return dict(sorted(table.items()))


def impls(table: Speeds) -> list[str]:
    """Every implementation in the table, in the order met."""
    return list(dict.fromkeys(impl for cell in table.values() for impl in cell))


def ours(impl: str) -> bool:
    """Whether it is a version, ours or a reader's own, and no peer."""
    return impl not in PEERS


def mean(values: list[float]) -> float:
    """The geometric one."""
    return exp(sum(map(log, values)) / len(values))


@dataclass(frozen=True)
class Ratios:
    """One implementation's speed over another's, by shape, in the cells of one run that have both.

    Attributes:
        others: whose the other speeds are.
    """

    run: str
    values: dict[Shape, float]
    others: frozenset[str]

    def of(self, head_dim: int) -> list[float]:
        """Those of a head dim."""
        return [value for shape, value in self.values.items() if shape[0] == head_dim]


def over(rows: list[Row], impl: str, other: str, table: str) -> Ratios | None:
    """Speed of `impl` over that of `other`, in the last run of the table (one of `TABLES`) that has both in all its
    cells but a few; None where none has both in any.

    `other` may be `BEST_PEER`: in each cell the fastest of the peers.
    """
    found = [ratios for run in _by(_measurement, _of_table(rows, table)) if (ratios := _ratios(run, impl, other))]
    return _last_whole(found, lambda ratios: len(ratios.values))


def _last_whole(found: list[Fact], cells: Callable[[Fact], int]) -> Fact | None:
    """The last that has as many cells as any has, but a few."""
    most = max(map(cells, found), default=0)
    return next((each for each in reversed(found) if cells(each) >= NEARLY_ALL * most), None)


def _ratios(rows: list[Row], impl: str, other: str) -> Ratios | None:
    """In the rows of one run."""
    values, others = {}, set()
    for shape, cell in speeds(rows).items():
        rivals = {name for name in cell if (not ours(name) if other == BEST_PEER else name == other)}
        if impl in cell and rivals:
            values[shape] = cell[impl] / max(cell[name] for name in rivals)
            others |= rivals
    return Ratios(rows[0]["run"], values, frozenset(others)) if values else None


def over_best_alone(rows: list[Row], impl: str, table: str) -> Ratios | None:
    """As `over`, of the fastest peer in each cell, each alone at settled clocks, in the last run that timed them so."""
    return over([row for row in map(settled, rows) if row], impl, BEST_PEER, table)


def alone(rows: list[Row], table: str) -> list[Row]:
    """What was timed alone at settled clocks, in the last run of the table that timed all its cells so but a few."""
    found = _by(_measurement, _of_table([row for row in map(settled, rows) if row], table))
    return _last_whole(found, lambda run: len(speeds(run))) or []


def matmul(rows: list[Row], run: str, dtype: str = "bf16") -> list[float]:
    """TFLOP/s of that run's matrix products in bf16 or e4m3, in its order."""
    return [float(row["tflops"]) for row in rows if row["pass"] == GEMM and (row["run"], row["dtype"]) == (run, dtype)]


@dataclass(frozen=True)
class Sparse:
    """The block-sparse run nearest the end of the file.

    Attributes:
        rows: all of it, the dense cells too.
        ms: by pass, head_dim and seqlen, then by mask (that of a dense cell is one of `DENSE`), then by implementation;
            of one sequence.
        densities: by mask and seqlen.
        butterfly: as ms, but by pass and head_dim, then by seqlen, then by whether the cell is dense;
            of as many tokens in all.
        tokens: of `butterfly`.
    """

    rows: list[Row]
    ms: dict[Size, dict[str, dict[str, float]]]
    densities: dict[tuple[str, int], float]
    butterfly: dict[tuple[str, int], dict[int, dict[bool, dict[str, float]]]]
    tokens: int

    def speedup(self, size: Size, mask: str, impl: str) -> float | None:
        """Of an implementation with a mask over its own dense kernel, where both ran."""
        sparse, dense = self.ms[size].get(mask, {}).get(impl), self.ms[size].get("", {}).get(DENSE_OF.get(impl, impl))
        return None if sparse is None or dense is None else dense / sparse

    @property
    def butterfly_lengths(self) -> list[int]:
        """The lengths at which the butterfly was timed."""
        return sorted(
            {seqlen for cells in self.butterfly.values() for seqlen in cells if (BUTTERFLY, seqlen) in self.densities}
        )


def sparse_run(rows: list[Row]) -> Sparse | None:
    """The last run with block masks; None where there is none."""
    rows = measured(rows)
    of = [_measurement(row) for row in rows if row["mask"]]
    rows = [row for row in rows if of and _measurement(row) == of[-1] and row["pass"] not in (GEMM, COPY)]
    if not rows:
        return None
    found = Sparse(rows, {}, {}, {}, 0)
    tokens = {}
    for row in rows:
        seqlen, mask, impl, of = int(row["seqlen_q"]), row["mask"], row["impl"], (row["pass"], int(row["head_dim"]))
        if mask:
            found.densities[mask, seqlen] = float(row["density"])
        if mask == BUTTERFLY:
            tokens.setdefault(tokens_of(row), set()).add(seqlen)
        if row["batch"] == "1":
            name = CAUSAL if row["causal"] == "1" else mask
            found.ms.setdefault((*of, seqlen), {}).setdefault(name, {})[impl] = float(row["ms"])
    whole = max(tokens, key=lambda n: len(tokens[n]), default=0)
    for row in rows:
        seqlen = int(row["seqlen_q"])
        if tokens_of(row) == whole and row["mask"] in ("", BUTTERFLY) and row["causal"] == "0":
            cells = found.butterfly.setdefault((row["pass"], int(row["head_dim"])), {})
            cells.setdefault(seqlen, {}).setdefault(not row["mask"], {})[row["impl"]] = float(row["ms"])
    sizes = dict(sorted(found.ms.items(), key=lambda item: (-item[0][1], item[0][2], PASSES.index(item[0][0]))))
    # A length that has nothing but the butterfly is of its picture alone.
    sizes = {size: cells for size, cells in sizes.items() if set(cells) - {"", BUTTERFLY}}
    # One length is no curve.
    curves = {of: dict(sorted(cells.items())) for of, cells in found.butterfly.items() if len(cells) > 1}
    return replace(found, ms=sizes, tokens=whole, butterfly=curves)


def length(seqlen: int) -> str:
    """16k for 16384."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen)
