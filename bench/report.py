"""A results file as one HTML file: which kernel for a call, the papers' claims, speeds, limits, errors, energy, what
each version declares, who has no row and why, and every run with all its rows.

`flashzoo report -o report.html`, or `python -m bench.report`. It needs no GPU, and what it writes needs no other file:
Bokeh, which plots, is in it. Its parts are in `bench/page`.
"""

from __future__ import annotations

import argparse
import gzip
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashzoo
from bench import choose, claims, figures, limits, matrix, runs
from bench.caches import rate
from bench.contenders import declared, parted
from bench.rows import GEMM, RUN_FIELDS, key_of, read
from flashzoo.registry import requested

PAGE = Path(__file__).parent / "page"
NO_OBJECTION = "takes them; it was not asked in this run, or gave no right result"
SECTIONS = {
    "which": "Which kernel for me?",
    "claims": "The papers' claims, measured again",
    "curves": "Speed by length",
    "shares": "Share of cells by speed-up",
    "errors": "Error against speed",
    "energy": "Energy per call",
    "limits": "How much of the limit",
    "history": "Run after run",
    "features": "Features",
    "absent": "Who has no row, and why",
    "runs": "Runs",
}
"""Titles by their ids."""

Rows = list[runs.Row]


def page(rows: Rows, results: Path) -> str:
    """The whole file.

    Args:
        rows: of the results file, one at least.
        results: that file, for its name.
    """
    from bokeh import __version__ as bokeh_version
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    tables, by_run, found = shown(rows), _by_run(rows), data_of(rows)
    limited = list(shares_of_limits(rows))
    # that of energy says how it is measured
    absent_here = {*(figures.LOOKS.keys() - found["figures"].keys() - {"energy"}), *(() if limited else ("limits",))}
    bokeh = Resources(mode="inline", components=["bokeh"]).js_raw[0]
    data = json.dumps(found, separators=(",", ":")).encode()
    environment = Environment(
        loader=FileSystemLoader(PAGE, encoding="utf-8"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        title=f"flashzoo on {', '.join(dict.fromkeys(row['gpu'] for row in rows))}",
        results=results.name,
        measured=len(runs.measured(rows)),
        last=rows[-1],
        sections={name: title for name, title in SECTIONS.items() if name not in absent_here},
        headline=list(headline(rows)),
        arch=choose.arch_of(rows),
        missing=choose.lacking(),
        claims_head=claims.HEAD,
        claims=claims.answers(rows),
        energy="energy" in found["figures"],
        limits=limited,
        versions=flashzoo.versions(),
        features=matrix.matrix(),
        absent=list(absent(tables, rows)),
        run_columns=(*RUN_FIELDS, "rows", "matmul, TFLOP/s", "table", "implementations"),
        runs=[_run(mine, tables) for mine in by_run.values()],
        data=b64encode(gzip.compress(data, mtime=0)).decode(),
        bokeh=Markup(bokeh),
        bokeh_version=bokeh_version,
    )


def data_of(rows: Rows) -> dict[str, Any]:
    """What the page's JavaScript works on: the choice of a kernel, the figures that have something to show, and every
    row, run by run."""
    trees = {name: tree for name in figures.LOOKS if (tree := getattr(figures, name)(rows))}
    return {
        "choice": choose.data(rows),
        "figures": {
            name: {
                **{"tree": tree, "item": figures.figure(name, tree)},
                "keys": {impl: figures.key(impl) for impl in figures.names_in(tree)},
            }
            for name, tree in trees.items()
        },
        "rows": {run: _rows_of(mine) for run, mine in _by_run(rows).items()},
    }


def headline(rows: Rows) -> Iterator[tuple[str, str, str]]:
    """What was best, how much, and how much more than other libraries."""
    for table, impl in (("fwd", "v3"), ("bwd", "v3"), ("fwd_e4m3", "v3_fp8")):
        speeds = [cell[impl] for cell in runs.speeds(runs.last_run(rows, table)).values() if impl in cell]
        over = runs.over(rows, impl, runs.BEST_PEER, table)
        if speeds and over:
            detail = f"{claims.spread(list(over.values.values()))} the fastest other library"
            yield f"{impl}, {runs.TABLES[table].lower()}, at best", f"{max(speeds):.0f} TFLOP/s", detail
    decoded = [row for mine in figures.decoded(rows).values() for row in mine if row["impl"] == "decode"]
    if decoded:
        best = max(decoded, key=rate)
        what = (
            f"{best['batch']} caches of {runs.length(int(best['seqlen_k']))} keys{' in e4m3' * bool(best['dtype_kv'])}"
        )
        yield "decode, keys and values, at best", f"{rate(best):.0f} GB/s", what


def shares_of_limits(rows: Rows) -> Iterator[tuple[str, list[str], list[tuple[str, str, list[float | None]]]]]:
    """Of each table its title, implementations, and of each cell its name, its limit and what each reached of it."""
    for title, mine in figures.tables(rows).items():
        if title == runs.TABLES["fwd_end_to_end"]:
            continue
        cells: dict[str, dict[str, tuple[float, str]]] = {}
        for row in mine:
            if reached := limits.share(row):
                cells.setdefault(figures.cell_name(row), {})[row["impl"]] = reached
        names = list(dict.fromkeys(name for cell in cells.values() for name in cell))
        lines = [
            (name, next(iter(cell.values()))[1], [cell[impl][0] if impl in cell else None for impl in names])
            for name, cell in cells.items()
        ]
        if lines:
            yield title, names, lines


def shown(rows: Rows) -> dict[str, Rows]:
    """The rows of each table, by its title."""
    tables = {title: runs.last_run(rows, name) for name, title in runs.TABLES.items()}
    sparse = runs.sparse_run(rows)
    tables["Block-sparse"] = sparse.rows if sparse else []
    return {title: mine for title, mine in tables.items() if mine}


def absent(tables: dict[str, Rows], rows: Rows) -> Iterator[tuple[str, str, str, str]]:
    """For each table, each implementation that has no result in some of its cells:
    title, name, how many cells of how many, and why.

    Args:
        tables: as `shown` has them.
        rows: of the results file, those that say why there is no result among them.
    """
    for title, mine in tables.items():
        run, kinds = mine[0]["run"], {(row["pass"], row["dtype"]) for row in mine}
        said = [row for row in rows if row.get("why") and row["run"] == run and (row["pass"], row["dtype"]) in kinds]
        whys = {(row["impl"], *key_of(row)): row["why"] for row in said}
        there = {(row["impl"], *key_of(row)) for row in mine}
        cells = list({key_of(row): row for row in (*mine, *said)}.values())
        for impl in dict.fromkeys((*flashzoo.versions(), *(row["impl"] for row in (*mine, *said)))):
            names = [(impl, *key_of(row)) for row in cells]
            known = parted(impl)[0] in flashzoo.versions()
            lacking = [
                (name, row)
                for name, row in zip(names, cells, strict=True)
                if name not in there and (known or name in whys)
            ]
            why = Counter(whys.get(name) or _objections(impl, row) for name, row in lacking)
            for reasons, count in why.items():
                yield title, impl, f"{count} of {len(cells)}", reasons


def _objections(impl: str, row: runs.Row) -> str:
    return "; ".join(declared(parted(impl)[0]).unsupported(runs.problem_of({**row, "impl": impl}))) or NO_OBJECTION


def _by_run(rows: Rows) -> dict[str, Rows]:
    found = {}
    for row in rows:
        found.setdefault(row["run"], []).append(row)
    return found


def _run(mine: Rows, tables: dict[str, Rows]) -> list[str]:
    products = [row for row in mine if row["pass"] == GEMM]
    rates = {
        dtype: [f"{float(row['tflops']):.0f}" for row in products if row["dtype"] == dtype]
        for dtype in ("bf16", "e4m3")
    }
    return [
        *(mine[0][field] for field in RUN_FIELDS),
        str(len(mine)),
        "; ".join(f"{dtype} {', '.join(found)}" for dtype, found in rates.items() if found),
        ", ".join(title for title, of in tables.items() if of[0]["run"] == mine[0]["run"]),
        ", ".join(dict.fromkeys(row["impl"] for row in mine if row["pass"] not in (GEMM, runs.COPY))),
    ]


def _rows_of(mine: Rows) -> dict[str, Any]:
    """Every column that says something of some row."""
    columns = [name for name in mine[0] if name not in RUN_FIELDS and any(row[name] for row in mine)]
    return {"columns": columns, "rows": [[row[name] for name in columns] for row in mine]}


def main(argv: list[str] | None = None) -> int:
    """Write the file and print its path."""
    parser = argparse.ArgumentParser(
        prog="flashzoo report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), help="the file to write (default: report.html)"
    )
    parser.add_argument(
        "--csv", type=runs.results_file, default=str(runs.RESULTS), help="results (default: bench/results/h200.csv)"
    )
    args = parser.parse_args(argv)
    if not args.out.parent.is_dir():
        parser.error(f"--out: expected a file in a folder that is there, got {args.out}")
    rows = read(args.csv)
    if not rows:
        parser.error(f"--csv: expected results, got {args.csv} without a row")
    who, by = requested("auto")
    if who != "auto":
        parser.error(f"what explain says is to be auto's choice, got {who} by {by}")
    text = page(rows, args.csv)
    try:
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"--out: {error}")
    print(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
