"""What a comparison found: a line for each version, as a table in text, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from flashzoo.accuracy import Check
from flashzoo.call.problem import Problem
from flashzoo.timing import Timing

WIDTH = 80
"""Columns of a comparison's text where no terminal says how many it has."""
TENSORS = ("out", "lse", "dq", "dk", "dv", "dsinks", "dscore_mod")
PASSES = ("forward", "backward")
COLUMNS = ("version", "result", "ran on", "budget", *TENSORS, "fwd ms", "fwd p10-p90", "fwd TFLOP/s", "fwd % of peak")
COLUMNS += ("bwd ms", "bwd p10-p90", "bwd TFLOP/s", "bwd % of peak", "memory", "HBM by formula")
"""Of a comparison's text, from left to right; what stands right of fwd ms or bwd ms is headed without the pass."""
DISPENSABLE = (
    "HBM by formula",
    "bwd p10-p90",
    "fwd p10-p90",
    "lse",
    "bwd % of peak",
    "fwd % of peak",
    "dv",
    "dk",
    "dq",
    "dsinks",
    "dscore_mod",
)
DISPENSABLE += ("ran on", "memory", "out", "bwd TFLOP/s", "fwd TFLOP/s", "bwd ms", "budget", "fwd ms", "result")
"""In the order in which columns are left out where all of them are too wide."""
GAP = 2


@dataclass(frozen=True)
class Row:
    """One version's line.

    Attributes:
        version, title: as registered.
        status: "ok"; "fails" (a check exceeds its budget); "can't" (the Spec has reasons against the problem); "no
            memory"; "error" (it raised).
        reasons: why not "ok", or why the forward pass alone where both were asked for; one sentence each.
        ran: "GPU", "CPU", "interpreter" (Triton's, on the CPU), or "" where nothing ran.
        checks: every rule that was applied.
        errors, budgets: by tensor (out, lse, dq, dk, dv, dsinks, dscore_mod): largest and RMS absolute error, and what
        they may be. forward, backward: times, only where "ok".
        forward_tflops, backward_tflops: TFLOP/s of the visible part; None for the interpreter.
        forward_peak, backward_peak: the same in percent of the GPU's dense peak; None where that is not known.
        memory_bytes: peak of GPU memory beyond the inputs, forward and backward; None on the CPU.
        hbm_bytes: what the paper's IO formula says the forward pass moves; None where it has none.
    """

    version: str
    title: str
    status: str
    reasons: tuple[str, ...] = ()
    ran: str = ""
    checks: tuple[Check, ...] = ()
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    budgets: dict[str, tuple[float, float]] = field(default_factory=dict)
    forward: Timing | None = None
    backward: Timing | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    forward_peak: float | None = None
    backward_peak: float | None = None
    memory_bytes: int | None = None
    hbm_bytes: float | None = None

    def flat(self) -> dict[str, Any]:
        """The row as plain values under one level of names, for CSV and JSON."""
        values: dict[str, Any] = {
            "version": self.version,
            "status": self.status,
            "ran": self.ran,
            "reasons": "; ".join(self.reasons),
        }
        for tensor in TENSORS:
            for what, table in (("err", self.errors), ("budget", self.budgets)):
                values[f"{tensor}_max_{what}"], values[f"{tensor}_rms_{what}"] = table.get(tensor, (None, None))
        for name in PASSES:
            timing = getattr(self, name)
            values |= {f"{name}_{part}": getattr(timing, part, None) for part in ("ms", "p10", "p90", "repeats")}
            values |= {f"{name}_{part}": getattr(self, f"{name}_{part}") for part in ("tflops", "peak")}
        return values | {"memory_bytes": self.memory_bytes, "hbm_bytes": self.hbm_bytes}


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; printing it gives a table.

    Attributes:
        problem: what was asked of every version.
        rows: one for each version, in `auto` order.
        environment: device and the versions of the software, by name.
    """

    problem: Problem
    rows: tuple[Row, ...]
    environment: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every version that ran kept its budget. One that can't, or has no memory for it, does not count."""
        return not any(row.status in ("fails", "error") for row in self.rows)

    def to_json(self) -> str:
        """An object with problem, environment and rows (every check included);
        numbers that aren't finite become null."""
        rows = [row.flat() | {"checks": [vars(check) | {"ok": check.ok} for check in row.checks]} for row in self.rows]
        record = {"problem": asdict(self.problem), "environment": self.environment, "rows": rows}
        return json.dumps(_finite(record), indent=2)

    def to_csv(self) -> str:
        """One line for each version under a header; empty where there is nothing to say."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0].flat()) if self.rows else ["version"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.flat() for row in self.rows)
        return text.getvalue()

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """A table with a line for each version that ran, and in words why others did not; no line is longer than width.

        Columns that say nothing are left out, and of the others the least important ones where all don't fit, which
        the last line names.
        """
        lines = [f"{self.problem}: {self.environment['device'].removeprefix('CPU, ')}"]
        table = [_cells(row) for row in self.rows if row.checks]
        shown, left_out = _columns(table, width)
        lines += ["", *_table(table, shown), ""] if table else []
        versions_by_why: dict[str, list[str]] = {}
        for row in self.rows:
            if row.reasons:
                versions_by_why.setdefault(_why(row), []).append(row.version)
        lines += [f"{', '.join(names)}{why}" for why, names in versions_by_why.items()]
        lines += _legend(shown)
        if left_out:
            lines.append(f"not in {width} columns: {', '.join(left_out)} (CSV and JSON have all)")
        return "\n".join(part for line in lines for part in _wrapped(line, width))


def _cells(row: Row) -> dict[str, str]:
    """The row as text by column; empty where it has nothing to say."""
    cells = dict.fromkeys(COLUMNS, "") | {"version": row.version, "result": row.status, "ran on": row.ran}
    cells["budget"] = f"{100 * max(check.used for check in row.checks):.0f}%"
    cells |= {tensor: f"{largest:.1e}" for tensor, (largest, _) in row.errors.items()}
    for name, short in zip(PASSES, ("fwd", "bwd"), strict=True):
        timing, tflops, peak = (getattr(row, f"{name}{part}") for part in ("", "_tflops", "_peak"))
        if timing:
            cells[f"{short} ms"] = f"{timing.ms:.3g}"
        if timing and timing.repeats > 1:
            cells[f"{short} p10-p90"] = f"{timing.p10:.3g}-{timing.p90:.3g}"
        if tflops is not None and row.ran == "GPU":
            cells[f"{short} TFLOP/s"] = f"{tflops:.3g}"
        if peak is not None:
            cells[f"{short} % of peak"] = f"{peak:.0f}"
    if row.memory_bytes is not None:
        cells["memory"] = _size(row.memory_bytes)
    if row.hbm_bytes is not None and row.ran == "GPU":
        cells["HBM by formula"] = _size(row.hbm_bytes)
    return cells


def _why(row: Row) -> str:
    """Why the row is not all that was asked for; of what a Spec has against the problem the first, since
    `explain` has the others."""
    if row.status == "can't":
        others = len(row.reasons) - 1
        return f" can't: {row.reasons[0]}{f' (and {others} more)' if others else ''}"
    return f"{': ' if row.status == 'ok' else f' {row.status}: '}{'; '.join(row.reasons)}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _columns(rows: list[dict[str, str]], width: int) -> tuple[list[str], list[str]]:
    """Which have something to say and a place, and which have something to say and none."""
    shown = [name for name in COLUMNS if any(row[name] for row in rows)]
    if len({row["ran on"] for row in rows}) == 1:
        shown.remove("ran on")  # the problem says where
    widths, told = _widths(rows, shown), list(shown)
    for name in DISPENSABLE:
        if sum(widths[name] + GAP for name in shown) - GAP <= width:
            break
        if name in shown:
            shown.remove(name)
    return shown, [name for name in told if name not in shown]


def _header(shown: list[str]) -> dict[str, str]:
    return {name: name if name.endswith(" ms") else name.removeprefix("fwd ").removeprefix("bwd ") for name in shown}


def _widths(rows: list[dict[str, str]], shown: list[str]) -> dict[str, int]:
    return {name: max(len(line[name]) for line in (_header(shown), *rows)) for name in shown}


def _legend(shown: list[str]) -> list[str]:
    """What the columns mean, of those that are there: a line, or none."""
    parts = ["budget: the worst error's share of what is allowed (flashzoo/accuracy.py)."] if "budget" in shown else []
    errors = [name for name in TENSORS if name in shown]
    parts += [f"{', '.join(errors)}: largest errors against a float64 oracle."] if errors else []
    parts += ["ms: medians."] if any(name.endswith(" ms") for name in shown) else []
    return [" ".join(parts)] if parts else []


def _table(rows: list[dict[str, str]], shown: list[str]) -> list[str]:
    """A line for the columns' names and one for each row."""
    header, widths = _header(shown), _widths(rows, shown)
    flush = {name: "<" if name in ("version", "result", "ran on") else ">" for name in shown}
    return [(" " * GAP).join(f"{line[name]:{flush[name]}{widths[name]}}" for name in shown) for line in (header, *rows)]


def _wrapped(line: str, width: int) -> list[str]:
    """The line in parts that fit."""
    return [line] if len(line) <= width else textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)


def _finite(value: Any) -> Any:
    """The same with None for every number that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
