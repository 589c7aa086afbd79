"""A results file as one HTML file: the README's tables and pictures, who has no row and why,
and every run with all its rows.

`flashzoo report -o report.html`, or `python -m bench.report`. It needs no GPU, and what it writes needs nothing else:
pictures are in it, and tables sort by a few lines of JavaScript of its own.
"""

from __future__ import annotations

import argparse
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from markdown_it import MarkdownIt

import flashzoo
from bench import pictures, plot, runs
from bench.contenders import declared, parted
from bench.rows import GEMM, RUN_FIELDS, key_of, read

PAGE = Path(__file__).parent / "page.html"
NO_OBJECTION = "takes them; it was not asked in this run, or gave no right result"

Rows = list[runs.Row]


def page(rows: Rows, results: Path) -> str:
    """The whole file.

    Args:
        rows: of the results file, one at least.
        results: that file; its name is that of the pictures.
    """
    title = f"flashzoo on {', '.join(dict.fromkeys(row['gpu'] for row in rows))}"
    by_run = list(_by_run(rows).values())
    tables = shown(rows)
    parts = [
        f"# {_text(title)}",
        f"From {results.name}: {len(runs.measured(rows))} results of {len(by_run)} runs, the last of "
        f"{rows[-1]['date']}. Medians of interleaved repeats with the L2 cache flushed; each result was checked before "
        "it was timed. Each table is of one run: ratios hold within a run, and runs of different days differ by up to "
        "a tenth. A click on a column's head sorts a table.",
        *plot.picture_of(pictures.pictures(rows), results, "generations", "Generations, TFLOP/s by sequence length"),
        plot.report(rows, results).replace("### ", "## "),
        "## Who has no row, and why",
        "Who is not in some cells of a table: what the run said of it, or else what a version declares against those "
        "cells, as it is in this checkout and packages taken to be there.",
        _table(("table", "name", "cells", "why"), absent(tables, rows)),
        "## Names",
        _table(
            ("name", "what it is", "paper"),
            ((spec.name, spec.title, spec.paper) for spec in flashzoo.versions().values()),
        ),
        "## Runs",
        "The matmul is what the GPU sustained when hot, at the run's beginning and end. "
        "Attention cells run cooler, and can be above it.",
        _table(
            (*RUN_FIELDS, "rows", "matmul, TFLOP/s", "table", "implementations"),
            (_run(mine, tables) for mine in by_run),
        ),
        *(part for mine in by_run for part in _rows_of(mine)),
    ]
    with TemporaryDirectory() as folder:
        drawn = {path.name: _data(path) for path in pictures.draw(rows, Path(folder) / results.name)}
    nav, body = _html("\n\n".join(parts), drawn)
    text = PAGE.read_text(encoding="utf-8")
    for mark, what in (("title", escape(title)), ("nav", nav), ("body", body)):
        text = text.replace(f"<!--{mark}-->", what)
    return text


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


def _rows_of(mine: Rows) -> list[str]:
    """Every column that says something of some row, folded."""
    columns = [name for name in mine[0] if name not in RUN_FIELDS and any(row[name] for row in mine)]
    summary = f"<details>\n<summary>All {len(mine)} rows of {escape(mine[0]['run'])}</summary>"
    return [summary, _table(columns, ([row[name] for name in columns] for row in mine)), "</details>"]


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in markdown; what is in its cells is taken as it is."""
    names = list(columns)
    lines = [names, ["---"] * len(names), *(map(_text, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(cell: str) -> str:
    """Markdown of the text, none of whose characters means anything."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", cell)


def _data(picture: Path) -> str:
    return f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}"


def _html(text: str, pictures: dict[str, str]) -> tuple[str, str]:
    """Links to the headings, and the markdown as HTML with the pictures in it."""
    markdown = MarkdownIt("commonmark").enable("table").disable("html_inline")
    tokens, links = markdown.parse(text), []
    for token, inside in pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", f"part{len(links)}")
            links.append(f'<a href="#part{len(links)}">{escape(inside.content)}</a>')
        for child in token.children or ():
            if child.type == "image":
                child.attrSet("src", pictures[Path(str(child.attrGet("src"))).name])
    body = markdown.renderer.render(tokens, markdown.options, {})
    body = body.replace("<table>", '<div class="scroll">\n<table>').replace("</table>", "</table>\n</div>")
    return "\n".join(links), body


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
    args.out.write_text(page(rows, args.csv), encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
