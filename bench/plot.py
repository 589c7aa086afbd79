"""Results as tables and plots: the README's part between its markers, and bench/results/*.png. `python -m bench.plot`"""

from __future__ import annotations

import argparse
import csv
from math import exp, log
from pathlib import Path

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
ROOT = Path(__file__).parent.parent
PASSES = {"fwd": "Forward", "bwd": "Backward"}

Row = dict[str, str]
Shape = tuple[int, bool, int]
Speeds = dict[Shape, dict[str, float]]


def last_run(rows: list[Row], pass_: str) -> list[Row]:
    """The rows of this pass that belong to the run at the end of the file: ratios hold within a run only."""
    mine = [row for row in rows if row["pass"] == pass_]
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
    """Markdown: each implementation's speed over each other's, as geometric mean and worst cell of those that have both."""
    names = impls(table)
    lines = [f"| | {' | '.join(f'over {name}' for name in names)} |", "|---" * (1 + len(names)) + "|"]
    for name in names:
        shown = [_ratio([cell[name] / cell[other] for cell in table.values() if name in cell and other in cell]) for other in names]
        lines.append(f"| {name} | {' | '.join('' if other == name else text for other, text in zip(names, shown, strict=True))} |")
    return "\n".join(lines)


def _ratio(values: list[float]) -> str:
    return f"{exp(sum(map(log, values)) / len(values)):.2f} (worst {min(values):.2f})" if values else "-"


def report(rows: list[Row]) -> str:
    """The whole section, as markdown."""
    parts = []
    for pass_, title in PASSES.items():
        mine = last_run(rows, pass_)
        if not mine:
            continue
        table, of = speeds(mine), mine[0]
        matmul = ", ".join(f"{float(row['tflops']):.0f}" for row in rows if row["pass"] == "gemm" and row["run"] == of["run"])
        versions = f"torch {of['torch']}, triton {of['triton']}, commit {of['commit']}"
        parts += [
            f"### {title}, {of['dtype']}",
            f"{of['gpu']}, {versions}, run {of['run']} of {of['date']}. TFLOP/s, medians; a bf16 matmul in the same run: {matmul}.",
            table_of(table),
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
    """A picture for each pass beside the results file: TFLOP/s over seqlen, a panel for each head dim and mask."""
    from matplotlib.figure import Figure

    paths = []
    for pass_, title in PASSES.items():
        table = speeds(last_run(rows, pass_))
        panels = sorted({shape[:2] for shape in table})
        if not panels:
            continue
        figure = Figure(figsize=(4 * len(panels), 3.6), layout="constrained")
        for axes, (head_dim, causal) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for name in impls(table):
                points = {shape[2]: cell[name] for shape, cell in table.items() if shape[:2] == (head_dim, causal) and name in cell}
                axes.plot(list(points), list(points.values()), marker="o", label=name)
            axes.set_title(f"{title}, head_dim {head_dim}{', causal' if causal else ''}")
            axes.set(xlabel="seqlen", ylabel="TFLOP/s", xscale="log", ylim=(0, None))
            axes.legend(fontsize="small")
        paths.append(results.with_name(f"{results.stem}_{pass_}.png"))
        figure.savefig(paths[-1], dpi=110)
    return paths


def main(argv: list[str] | None = None) -> int:
    """Render tables into the README, and with `--plots` pictures beside the CSV file."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("--csv", type=Path, default=ROOT / "bench" / "results" / "h200.csv")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--plots", action="store_true", help="draw bench/results/*.png too")
    args = parser.parse_args(argv)
    with args.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    args.readme.write_text(place(args.readme.read_text(), report(rows)))
    for path in draw(rows, args.csv) if args.plots else []:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
