"""Results as tables and plots: the README's part between its markers, and bench/results/*.png. `python -m bench.plot`"""

from __future__ import annotations

import argparse
import csv
from math import exp, log
from pathlib import Path
from typing import Any

import flashzoo
from bench.run import parted

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
ROOT = Path(__file__).parent.parent
FP8, END_TO_END, ABLATED = "e4m3", "end_to_end", "one_level"
TABLES = {
    "fwd": "Forward",
    "fwd_e4m3": "Forward on FP8 inputs",
    "fwd_end_to_end": "Forward from 16 bits through FP8, quantisation included",
    "bwd": "Backward",
}
"""Which runs a table is of, and its title: a pass, and what sets the run apart."""
TOKENS = 16384

# The same colour for the same implementation in every picture.
COLOURS = {
    name: f"C{i}" for i, name in enumerate(("v2", "v1", "standard", "sdpa_flash", "sdpa_cudnn", "flex", "v3", "blocksparse", "fa3", "fa4"))
} | {"v3_fp8": "C1", "v3_fp8_end_to_end": "C1", "cudnn_fp8": "C4"}

Row = dict[str, str]
Shape = tuple[int, bool, int]
Speeds = dict[Shape, dict[str, float]]


def last_run(rows: list[Row], table: str) -> list[Row]:
    """A table's rows, at the field's sizes, of the run nearest the end of the file: ratios hold within a run only.

    Args:
        rows: of the results file.
        table: one of `TABLES`. A run that times anything end to end is of that table, and of no other with its pass. One that
            times an ablated kernel is of none.
    """
    ablated = {row["run"] for row in rows if row["impl"].endswith(ABLATED)}
    rows = [row for row in rows if row["run"] not in ablated]
    quantized = {row["run"] for row in rows if row["impl"].endswith(END_TO_END)}

    def table_of_row(row: Row) -> str:
        kind = FP8 if row["dtype"] == FP8 else END_TO_END if row["run"] in quantized and row["pass"] == "fwd" else ""
        return f"{row['pass']}_{kind}" if kind else row["pass"]

    mine = [row for row in rows if table_of_row(row) == table and int(row["batch"]) * int(row["seqlen_q"]) == TOKENS]
    return [row for row in mine if row["run"] == mine[-1]["run"]]


def speeds(rows: list[Row]) -> Speeds:
    """TFLOP/s by (head_dim, causal, seqlen), then by implementation, in the file's order."""
    table: Speeds = {}
    for row in rows:
        shape = int(row["head_dim"]), row["causal"] == "1", int(row["seqlen_q"])
        table.setdefault(shape, {})[row["impl"]] = float(row["tflops"])
    return dict(sorted(table.items()))


def impls(table: Speeds) -> list[str]:
    """Every implementation in the table, in the order met."""
    return list(dict.fromkeys(impl for cell in table.values() for impl in cell))


def table_of(table: Speeds) -> str:
    """Markdown: a row for each shape, a column for each implementation, TFLOP/s; the fastest in bold."""
    names = impls(table)
    lines = [f"| head_dim | causal | seqlen | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for (head_dim, causal, seqlen), cell in table.items():
        best = max(cell.values())
        shown = [f"**{cell[name]:.0f}**" if cell.get(name) == best else f"{cell[name]:.0f}" if name in cell else "-" for name in names]
        lines.append(f"| {head_dim} | {'yes' if causal else 'no'} | {seqlen} | {' | '.join(shown)} |")
    return "\n".join(lines)


def ratios_of(table: Speeds) -> str:
    """Markdown: each version's speed over every other's, as geometric mean and worst cell of those that have both."""
    names = impls(table)
    lines = [f"| | {' | '.join(f'over {name}' for name in names)} |", "|---" * (1 + len(names)) + "|"]
    for name in (name for name in names if _ours(name)):
        shown = [_ratio([cell[name] / cell[other] for cell in table.values() if name in cell and other in cell]) for other in names]
        lines.append(f"| {name} | {' | '.join('' if other == name else text for other, text in zip(names, shown, strict=True))} |")
    return "\n".join(lines)


def _ours(name: str) -> bool:
    return parted(name)[0] in flashzoo.versions()


def _ratio(values: list[float]) -> str:
    return f"{exp(sum(map(log, values)) / len(values)):.2f} (worst {min(values):.2f})" if values else "-"


def report(rows: list[Row], results: Path) -> str:
    """The whole section, as markdown; `results` is the CSV file that the pictures lie beside."""
    parts = []
    for name, title in TABLES.items():
        mine = last_run(rows, name)
        if not mine:
            continue
        table, of = speeds(mine), mine[0]
        dtype, matmul_of = (FP8, f"an {FP8} matmul") if of["dtype"] == FP8 else ("bf16", "a bf16 matmul")
        matmuls = [row for row in rows if row["pass"] == "gemm" and (row["run"], row["dtype"]) == (of["run"], dtype)]
        matmul = ", ".join(f"{float(row['tflops']):.0f}" for row in matmuls)
        versions = f"torch {of['torch']}, triton {of['triton']}, commit {of['commit']}"
        parts += [
            f"### {title}, {of['dtype']}",
            f"{of['gpu']}, {versions}, run {of['run']} of {of['date']}. TFLOP/s, medians; {matmul_of} in the same run: {matmul}.",
            table_of(table),
            f"![{title}, TFLOP/s against seqlen](bench/results/{results.stem}_{name}.png)",
            "Geometric mean of the speed ratios over the cells that both ran, and the worst cell:",
            ratios_of(table),
        ]
    return "\n\n".join(parts)


def place(text: str, section: str) -> str:
    """The text with the section between the markers. Raises ValueError where they are not there, once each and in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and after it {END}, got a text without them")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def draw(rows: list[Row], results: Path) -> list[Path]:
    """A picture for each table beside the results file: TFLOP/s over seqlen, a panel for each head dim and mask."""
    from matplotlib.figure import Figure

    paths = []
    for name, title in TABLES.items():
        mine = last_run(rows, name)
        if not mine:
            continue
        table = speeds(mine)
        masks, head_dims = (sorted({shape[i] for shape in table}) for i in (1, 0))
        figure = Figure(figsize=(4 * len(head_dims), 3.2 * len(masks)), layout="constrained")
        panels = figure.subplots(len(masks), len(head_dims), squeeze=False, sharex=True, sharey=True)
        for causal, line in zip(masks, panels, strict=True):
            for head_dim, axes in zip(head_dims, line, strict=True):
                _panel(axes, table, head_dim, bool(causal))
        panels[0, 0].set_ylim(bottom=0)
        for axes in panels[:, 0]:
            axes.set_ylabel("TFLOP/s")
        for axes in panels[-1]:
            axes.set_xlabel("seqlen, 16k tokens in all")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(impls(table)))
        figure.suptitle(f"{title}, {mine[0]['dtype']}, {mine[0]['gpu']}")
        paths.append(results.with_name(f"{results.stem}_{name}.png"))
        figure.savefig(paths[-1], dpi=110)
    return paths


def _panel(axes: Any, table: Speeds, head_dim: int, causal: bool) -> None:
    cells = {shape[2]: cell for shape, cell in table.items() if shape[:2] == (head_dim, causal)}
    for name in impls(table):
        points = {seqlen: cell[name] for seqlen, cell in cells.items() if name in cell}
        ours = _ours(name)
        axes.plot(
            list(points),
            list(points.values()),
            color=COLOURS.get(name),
            marker="o",
            markersize=4,
            linewidth=2 if ours else 1,
            linestyle="-" if ours else "--",
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(cells), [f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen) for seqlen in cells])
    axes.grid(alpha=0.3)
    axes.set_title(f"head_dim {head_dim}{', causal' if causal else ''}", fontsize="medium")


def main(argv: list[str] | None = None) -> int:
    """Render tables into the README, and with `--plots` pictures beside the CSV file."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("--csv", type=Path, default=ROOT / "bench" / "results" / "h200.csv")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--plots", action="store_true", help="draw bench/results/*.png too")
    args = parser.parse_args(argv)
    with args.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    args.readme.write_text(place(args.readme.read_text(), report(rows, args.csv)))
    for path in draw(rows, args.csv) if args.plots else []:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
