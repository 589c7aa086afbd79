"""Results as tables and pictures: docs/measured.md's part between its markers, and bench/results/*.png.
`python -m bench.plot`"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container, Iterable
from functools import partial
from pathlib import Path

from bench import claims, learn, llama, pictures, readmes, runs, several, traffic
from bench.rows import read
from bench.runs import (
    BUTTERFLY,
    FP8,
    RESULTS,
    TABLES,
    Row,
    Sparse,
    Speeds,
    alone,
    impls,
    last_run,
    length,
    ours,
    sparse_run,
    speeds,
)

Picture = Callable[[str, str], list[str]]
"""`picture_of` the pictures that are drawn."""

SECTION = "results"
"""The name of the section in its page."""
RATIOS = "Geometric mean of the speed ratios over the cells that both ran, and the worst cell:"
WORDS = {
    "speedups": (
        "Speed-ups",
        "Each version over the one before it, and over the fastest other library in each cell; "
        "a bar is a geometric mean, its line the range over the cells.",
    ),
    "errors": (
        "Error against speed",
        "Root mean square error of out against float64 on N(0, 1) inputs, as `bench` found it before it timed the "
        "cell. With e4m3 inputs these are the exact ones, and their rounding is no error; from 16 bits it is one.",
    ),
    "memory": (
        "Memory",
        "What one call allocates beyond its inputs, divided among its sequences. "
        "Standard attention holds a square of scores.",
    ),
    "roofline": (
        "Roofline",
        "Hollow: bytes as the algorithm's tiles ask for them. A version above the slope of memory has its keys and "
        "values, or v1 its O, from the L2 cache, which the papers' model of memory leaves out.",
    ),
}
"""Title and text of the pictures that have no table of their own."""


def table_of(table: Speeds) -> str:
    """Markdown: a row for each shape, a column for each implementation, TFLOP/s; the fastest in bold."""
    names = impls(table)
    lines = [f"| head_dim | causal | seqlen | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for (head_dim, causal, seqlen), cell in table.items():
        best = max(cell.values())
        texts = {name: f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}" for name, speed in cell.items()}
        shown = [f"**{texts[name]}**" if cell.get(name) == best else texts.get(name, "-") for name in names]
        lines.append(f"| {head_dim} | {'yes' if causal else 'no'} | {seqlen} | {' | '.join(shown)} |")
    return "\n".join(lines)


def ratios_of(table: Speeds) -> str:
    """Markdown: each version's speed over every other's, as geometric mean and worst cell of those that have both."""
    names = impls(table)
    lines = [f"| | {' | '.join(f'over {name}' for name in names)} |", "|---" * (1 + len(names)) + "|"]
    for name in (name for name in names if ours(name)):
        shown = [
            _ratio([cell[name] / cell[other] for cell in table.values() if name in cell and other in cell])
            for other in names
        ]
        lines.append(
            f"| {name} | {' | '.join('' if other == name else text for other, text in zip(names, shown, strict=True))} "
            "|"
        )
    return "\n".join(lines)


def sparse_table(run: Sparse) -> str:
    """Markdown: a row for each mask and size, ms of each implementation and its speed-up over its own dense kernel;
    the fastest in bold."""
    names = list(dict.fromkeys(impl for cells in run.ms.values() for cell in cells.values() for impl in cell))
    lines = [f"| mask | density | head_dim | seqlen | pass | {' | '.join(names)} |", "|---" * (5 + len(names)) + "|"]
    for size, cells in run.ms.items():
        pass_, head_dim, seqlen = size
        for mask, cell in cells.items():
            best = min(cell.values())
            shown = []
            for name in names:
                ms, times = cell.get(name), None if mask in runs.DENSE else run.speedup(size, mask, name)
                text = "-" if ms is None else f"**{ms:.3g}**" if ms == best else f"{ms:.3g}"
                shown.append(text + (f" ({times:.2f}x)" if times else ""))
            density = f"{run.densities.get((mask, seqlen), (seqlen + 1) / (2 * seqlen) if mask else 1):.2%}"
            what = {"": "none", runs.CAUSAL: f"none, {runs.CAUSAL}"}.get(mask, mask)
            lines.append(f"| {what} | {density} | {head_dim} | {seqlen} | {pass_} | {' | '.join(shown)} |")
    return "\n".join(lines)


def sparse_ratios(run: Sparse) -> str:
    """Markdown: each of our versions' speed over every other implementation's and over the better peer, over
    the masked cells."""
    masked = [cell for cells in run.ms.values() for mask, cell in cells.items() if mask not in runs.DENSE]
    names = list(dict.fromkeys(impl for cell in masked for impl in cell))
    best = "over the better peer"
    lines = [f"| | {best} | {' | '.join(f'over {name}' for name in names)} |", "|---" * (2 + len(names)) + "|"]
    for name in (name for name in names if ours(name)):
        rivals = [[ms for impl, ms in cell.items() if not ours(impl)] for cell in masked]
        shown = [_ratio([min(ms) / cell[name] for cell, ms in zip(masked, rivals, strict=True) if ms and name in cell])]
        for other in names:
            ratios = [cell[other] / cell[name] for cell in masked if name in cell and other in cell]
            shown.append("" if other == name else _ratio(ratios))
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _sparse_report(run: Sparse, rows: list[Row], picture: Picture) -> Iterable[str]:
    yield f"### Block-sparse, {run.rows[0]['dtype']}"
    yield _origin(rows, run.rows[0], "bf16", "ms, medians")
    if run.ms:
        yield (
            "One sequence, hidden 2048 at 16k tokens and 512 at 64k, blocks of 128 x 128 that all heads share. "
            "`random/8` keeps an eighth of each row's blocks, drawn at random, `local/8` as many around the diagonal; "
            "density is the share of pairs that are seen. In brackets the speed-up over the implementation's own dense "
            "kernel in the same run (v2's for `blocksparse`)."
        )
        yield from picture("blocksparse", "Speed-up over the dense kernel against 1/density")
        yield "Geometric mean of the speed ratios over the masked cells that both ran, and the worst cell:"
        yield sparse_ratios(run)
        yield from folded(f"All {sum(map(len, run.ms.values()))} cells", sparse_table(run))
    if run.butterfly:
        shares = ", ".join(
            f"{run.densities[BUTTERFLY, seqlen]:.1%} at {length(seqlen)}" for seqlen in run.butterfly_lengths
        )
        yield f"The butterfly mask, {length(run.tokens)} tokens in all; its density is {shares}."
        yield from picture("butterfly", "Time against seqlen, butterfly and dense")


def _traffic_report(rows: list[Row]) -> Iterable[str]:
    """A table of the bytes that the algorithms count and that DRAM's counters saw."""
    mine = runs.of_last([row for row in rows if row["pass"].startswith(runs.TRAFFIC)])
    if not mine:
        return
    lines = [
        "| version | head_dim | seqlen | pass | by the algorithm, MiB | by DRAM's counters, MiB |",
        "|---" * 6 + "|",
    ]
    for row in mine:
        pass_ = row["pass"].removeprefix(runs.TRAFFIC)
        by_count = f"{traffic.counted(row['impl'], runs.problem_of(row)) / 2**20:.0f}" if pass_ == "fwd" else "-"
        seen = row["why"] or f"{float(row['dram_mib']):.0f}"
        lines.append(f"| {row['impl']} | {row['head_dim']} | {row['seqlen_q']} | {pass_} | {by_count} | {seen} |")
    yield f"Bytes of one call, 16k tokens, hidden 2048, run {mine[0]['run']}."
    yield from folded(f"All {len(mine)} calls", "\n".join(lines))


def folded(summary: str, text: str) -> list[str]:
    """What is shown at a click."""
    return [f"<details>\n<summary>{summary}</summary>", text, "</details>"]


def _origin(rows: list[Row], of: Row, dtype: str, what: str) -> str:
    """A sentence on what a run was made with."""
    products = ", ".join(f"{speed:.0f}" for speed in runs.matmul(rows, of["run"], dtype))
    mine = [row for row in rows if row["run"] == of["run"]]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in mine))
    versions = f"torch {of['torch']}, triton {of['triton']}, commit {commits}"
    product = f"{'an' if dtype == FP8 else 'a'} {dtype} matmul in the same run: {products}"
    unit = "" if what.startswith("TFLOP/s") else " TFLOP/s"
    # names of others', as text
    gpu, run = (re.sub(r"([\\`*_<>&|\[\]])", r"\\\1", of[field]) for field in ("gpu", "run"))
    absent = runs.not_installed(rows, of["run"])
    missing = f" Not installed: {', '.join(absent)}." if absent else ""
    return f"{gpu}, {versions}, run {run} of {of['date']}. {what}; {product}{unit}.{missing}"


def _ratio(values: list[float]) -> str:
    return f"{runs.mean(values):.2f} (worst {min(values):.2f})" if values else "-"


def picture_of(drawn: Container[str], results: Path, name: str, text: str) -> list[str]:
    """The line of a picture, with that text in its place, where it is among those that are drawn beside
    this results file."""
    return [f"![{text}](bench/results/{results.stem}_{name}.png)"] if name in drawn else []


def report(rows: list[Row], results: Path) -> str:
    """The whole section, as markdown; `results` is the CSV file that the pictures lie beside."""
    picture = partial(picture_of, set(pictures.pictures(rows)), results)

    def of_picture(name: str) -> list[str]:
        title, text = WORDS[name]
        drawn = picture(name, title)
        return [f"### {title}", text, *drawn] if drawn else []

    parts = ["### The papers' claims, measured again", claims.table(rows), *of_picture("speedups")]
    for name, title in TABLES.items():
        mine = last_run(rows, name)
        if not mine:
            continue
        table, dtype = speeds(mine), mine[0]["dtype"]
        parts += [
            f"### {title}, {dtype}",
            _origin(rows, mine[0], FP8 if dtype == FP8 else "bf16", "TFLOP/s, medians"),
            *picture(name, f"{title}, TFLOP/s against seqlen"),
            RATIOS,
            ratios_of(table),
            *folded(f"All {len(table)} cells, TFLOP/s", table_of(table)),
            *_alone_report(rows, alone(rows, name), mine[0]["run"]),
        ]
    parts += [*of_picture("errors"), *of_picture("memory"), *of_picture("roofline"), *_traffic_report(rows)]
    if sparse := sparse_run(rows):
        parts += _sparse_report(sparse, rows, picture)
    return "\n\n".join(parts)


def _alone_report(rows: list[Row], found: list[Row], table_run: str) -> list[str]:
    """What was found to be timed alone at settled clocks, as markdown, with where it is from if not from the table's
    run; nothing where nothing was."""
    if not found:
        return []
    table, joules = speeds(found), speeds(found, "joules")
    told = [name for name in impls(table) if 2 * sum(name in cell for cell in joules.values()) >= len(table)]
    both = {
        shape: cell | {f"{name}, J": joules[shape][name] for name in told if name in joules.get(shape, {})}
        for shape, cell in table.items()
    }
    run = found[0]["run"]
    origin = "" if run == table_run else _origin(rows, found[0], found[0]["dtype"], "TFLOP/s, medians") + " "
    text = f"Each alone at settled clocks. {origin}{RATIOS}"
    summary = f"These {len(table)} cells, TFLOP/s{', and joules a call' if told else ''}"
    return [text, ratios_of(table), *folded(summary, table_of(both))]


def shown(rows: list[Row], results: Path) -> dict[Path, str]:
    """The text of every page that shows figures, as these rows have them."""
    sections: dict[str, readmes.Sections] = {}
    for module in (readmes, learn, several, llama):
        for path, of in module.SECTIONS.items():
            sections[path] = sections.get(path, {}) | of
    found = {readmes.ROOT / path: readmes.written(path, sections[path], rows) for path in sections}
    page = "docs/measured.md"
    measured = readmes.linked(report(rows, results).replace("### ", "## "), page)
    return found | {readmes.ROOT / page: readmes.place(found[readmes.ROOT / page], SECTION, measured)}


def main(argv: list[str] | None = None) -> int:
    """Render figures into READMEs and docs, and with `--plots` pictures beside the CSV file."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("--csv", type=runs.results_file, default=str(RESULTS))
    readme = parser.add_mutually_exclusive_group()
    readme.add_argument("--readme", type=Path, help="write the section of tables into this file, and no other")
    readme.add_argument("--no-readme", action="store_true", help="leave READMEs and docs alone: they show another GPU")
    parser.add_argument("--plots", action="store_true", help="draw bench/results/*.png too")
    args = parser.parse_args(argv)
    rows = read(args.csv)
    if args.readme:
        args.readme.write_text(readmes.place(args.readme.read_text(), SECTION, report(rows, args.csv)))
    elif not args.no_readme:
        for path, text in shown(rows, args.csv).items():
            path.write_text(text)
    for path in pictures.draw(rows, args.csv) if args.plots else []:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
