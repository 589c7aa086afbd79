"""Results as tables and plots: the README's part between its markers, and bench/results/*.png. `python -m bench.plot`"""

from __future__ import annotations

import argparse
import csv
import re
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

import flashzoo
from bench.run import PASSES, parted

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "h200.csv"
FP8, END_TO_END, ABLATED = "e4m3", "end_to_end", "one_level"
TABLES = {
    "fwd": "Forward",
    "fwd_e4m3": "Forward on FP8 inputs",
    "fwd_end_to_end": "Forward from 16 bits through FP8, quantisation included",
    "bwd": "Backward",
}
"""Which runs a table is of, and its title: a pass, and what sets the run apart."""
TOKENS = 16384
BUTTERFLY = "butterfly"
SHARED = ("random", "local")
"""Masks of which there are several, by the share of the blocks that they keep; `ones` keeps all."""
DENSE_OF = {"blocksparse": "v2"}
"""The dense kernel that a block-sparse one is held against, where it has another name."""

# The same colour for the same implementation in every picture.
COLOURS = {
    name: f"C{i}" for i, name in enumerate(("v2", "v1", "standard", "sdpa_flash", "sdpa_cudnn", "flex", "v3", "blocksparse", "fa3", "fa4"))
} | {"v3_fp8": "C1", "v3_fp8_end_to_end": "C1", "cudnn_fp8": "C4"}

Row = dict[str, str]
Shape = tuple[int, bool, int]
Size = tuple[str, int, int]
Speeds = dict[Shape, dict[str, float]]


def read(results: Path) -> list[Row]:
    """The rows of a results file."""
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


def last_run(rows: list[Row], table: str) -> list[Row]:
    """A table's rows, at the field's sizes, of the run nearest the end of the file: ratios hold within a run only.

    Where no row is of the field's sizes, as in a run on a CPU, they are at the sizes of the last row.

    Args:
        rows: of the results file.
        table: one of `TABLES`. A run that times anything end to end is of that table, and of no other with its pass. One that
            times an ablated kernel is of none, nor one with block masks.
    """
    others = {row["run"] for row in rows if row["impl"].endswith(ABLATED) or row["mask"]}
    rows = [row for row in rows if row["run"] not in others]
    quantized = {row["run"] for row in rows if row["impl"].endswith(END_TO_END)}

    def table_of_row(row: Row) -> str:
        kind = FP8 if row["dtype"] == FP8 else END_TO_END if row["run"] in quantized and row["pass"] == "fwd" else ""
        return f"{row['pass']}_{kind}" if kind else row["pass"]

    mine = [row for row in rows if table_of_row(row) == table]
    sizes = [tokens_of(row) for row in mine]
    mine = [row for row, size in zip(mine, sizes, strict=True) if size == (TOKENS if TOKENS in sizes else sizes[-1])]
    return [row for row in mine if row["run"] == mine[-1]["run"]]


def tokens_of(row: Row) -> int:
    """Of all sequences together."""
    return int(row["batch"]) * int(row["seqlen_q"])


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
        texts = {name: f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}" for name, speed in cell.items()}
        shown = [f"**{texts[name]}**" if cell.get(name) == best else texts.get(name, "-") for name in names]
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


@dataclass(frozen=True)
class Sparse:
    """The block-sparse run nearest the end of the file.

    Attributes:
        rows: all of it, the dense cells too.
        ms: by pass, head_dim and seqlen, then by mask (that of a dense cell is "", or "causal=True"), then by implementation; of one
            sequence.
        densities: by mask and seqlen.
        butterfly: as ms, but by pass and head_dim, then by seqlen, then by whether the cell is dense; of as many tokens in all.
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


def sparse_run(rows: list[Row]) -> Sparse | None:
    """The last run with block masks; None where there is none."""
    runs = [row["run"] for row in rows if row["mask"]]
    rows = [row for row in rows if runs and row["run"] == runs[-1] and row["pass"] != "gemm"]
    if not rows:
        return None
    found = Sparse(rows, {}, {}, {}, 0)
    tokens = {}
    for row in rows:
        seqlen, mask, impl, of = int(row["seqlen_q"]), row["mask"], row["impl"], (row["pass"], int(row["head_dim"]))
        if mask:
            found.densities[mask, seqlen] = float(row["density"])
        if mask == BUTTERFLY:
            tokens.setdefault(int(row["batch"]) * seqlen, set()).add(seqlen)
        if row["batch"] == "1":
            name = "causal=True" if row["causal"] == "1" else mask
            found.ms.setdefault((*of, seqlen), {}).setdefault(name, {})[impl] = float(row["ms"])
    whole = max(tokens, key=lambda n: len(tokens[n]), default=0)
    for row in rows:
        seqlen = int(row["seqlen_q"])
        if int(row["batch"]) * seqlen == whole and row["mask"] in ("", BUTTERFLY) and row["causal"] == "0":
            cells = found.butterfly.setdefault((row["pass"], int(row["head_dim"])), {})
            cells.setdefault(seqlen, {}).setdefault(not row["mask"], {})[row["impl"]] = float(row["ms"])
    sizes = dict(sorted(found.ms.items(), key=lambda item: (-item[0][1], item[0][2], PASSES.index(item[0][0]))))
    # A length that has nothing but the butterfly is of its picture alone.
    sizes = {size: cells for size, cells in sizes.items() if set(cells) - {"", BUTTERFLY}}
    return replace(found, ms=sizes, tokens=whole, butterfly={of: dict(sorted(cells.items())) for of, cells in found.butterfly.items()})


def sparse_table(run: Sparse) -> str:
    """Markdown: a row for each mask and size, ms of each implementation and its speed-up over its own dense kernel; the fastest in bold."""
    names = list(dict.fromkeys(impl for cells in run.ms.values() for cell in cells.values() for impl in cell))
    lines = [f"| mask | density | head_dim | seqlen | pass | {' | '.join(names)} |", "|---" * (5 + len(names)) + "|"]
    for size, cells in run.ms.items():
        pass_, head_dim, seqlen = size
        for mask, cell in cells.items():
            best = min(cell.values())
            shown = []
            for name in names:
                ms, times = cell.get(name), None if mask in ("", "causal=True") else run.speedup(size, mask, name)
                text = "-" if ms is None else f"**{ms:.3g}**" if ms == best else f"{ms:.3g}"
                shown.append(text + (f" ({times:.2f}x)" if times else ""))
            density = f"{run.densities.get((mask, seqlen), (seqlen + 1) / (2 * seqlen) if mask else 1):.2%}"
            what = {"": "none", "causal=True": "none, causal=True"}.get(mask, mask)
            lines.append(f"| {what} | {density} | {head_dim} | {seqlen} | {pass_} | {' | '.join(shown)} |")
    return "\n".join(lines)


def sparse_ratios(run: Sparse) -> str:
    """Markdown: each of our versions' speed over every other implementation's and over the better peer, over the masked cells."""
    masked = [cell for cells in run.ms.values() for mask, cell in cells.items() if mask not in ("", "causal=True")]
    names = list(dict.fromkeys(impl for cell in masked for impl in cell))
    best = "over the better peer"
    lines = [f"| | {best} | {' | '.join(f'over {name}' for name in names)} |", "|---" * (2 + len(names)) + "|"]
    for name in (name for name in names if _ours(name)):
        rivals = [[ms for impl, ms in cell.items() if not _ours(impl)] for cell in masked]
        shown = [_ratio([min(ms) / cell[name] for cell, ms in zip(masked, rivals, strict=True) if ms and name in cell])]
        for other in names:
            ratios = [cell[other] / cell[name] for cell in masked if name in cell and other in cell]
            shown.append("" if other == name else _ratio(ratios))
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _sparse_report(rows: list[Row], results: Path) -> list[str]:
    run = sparse_run(rows)
    if run is None:
        return []
    parts = [f"### Block-sparse, {run.rows[0]['dtype']}", f"{_origin(rows, run.rows[0], 'bf16', 'a bf16 matmul', 'ms, medians')}"]
    if run.ms:
        parts += [
            "One sequence, hidden 2048 at 16k tokens and 512 at 64k, blocks of 128 x 128 that all heads share. `random/8` keeps an eighth "
            "of each row's blocks, drawn at random, `local/8` as many around the diagonal; density is the share of pairs that are seen. In "
            "brackets the speed-up over the implementation's own dense kernel in the same run (v2's for `blocksparse`).",
            f"<details>\n<summary>All {sum(map(len, run.ms.values()))} cells</summary>",
            sparse_table(run),
            "</details>",
            f"![Speed-up over the dense kernel against 1/density](bench/results/{results.stem}_blocksparse.png)",
            "Geometric mean of the speed ratios over the masked cells that both ran, and the worst cell:",
            sparse_ratios(run),
        ]
    if run.butterfly:
        shares = ", ".join(f"{run.densities[BUTTERFLY, seqlen]:.1%} at {_length(seqlen)}" for seqlen in _butterfly_lengths(run))
        parts += [
            f"The butterfly mask, {_length(run.tokens)} tokens in all; its density is {shares}.",
            f"![Time against seqlen, butterfly and dense](bench/results/{results.stem}_butterfly.png)",
        ]
    return parts


def _butterfly_lengths(run: Sparse) -> list[int]:
    return sorted({seqlen for cells in run.butterfly.values() for seqlen in cells if (BUTTERFLY, seqlen) in run.densities})


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen)


def _origin(rows: list[Row], of: Row, dtype: str, product: str, what: str) -> str:
    """A sentence on what a run was made with."""
    matmuls = [row for row in rows if row["pass"] == "gemm" and (row["run"], row["dtype"]) == (of["run"], dtype)]
    matmul = ", ".join(f"{float(row['tflops']):.0f}" for row in matmuls)
    versions = f"torch {of['torch']}, triton {of['triton']}, commit {of['commit']}"
    unit = "" if what.startswith("TFLOP/s") else " TFLOP/s"
    gpu, run = (re.sub(r"([\\`*_<>&|\[\]])", r"\\\1", of[field]) for field in ("gpu", "run"))  # names of others', as text
    return f"{gpu}, {versions}, run {run} of {of['date']}. {what}; {product} in the same run: {matmul}{unit}."


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
        dtype, product = (FP8, f"an {FP8} matmul") if of["dtype"] == FP8 else ("bf16", "a bf16 matmul")
        parts += [
            f"### {title}, {of['dtype']}",
            _origin(rows, of, dtype, product, "TFLOP/s, medians"),
            table_of(table),
            f"![{title}, TFLOP/s against seqlen](bench/results/{results.stem}_{name}.png)",
            "Geometric mean of the speed ratios over the cells that both ran, and the worst cell:",
            ratios_of(table),
        ]
    parts += _sparse_report(rows, results)
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
            axes.set_xlabel(f"seqlen, {_length(tokens_of(mine[0]))} tokens in all")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(impls(table)))
        figure.suptitle(f"{title}, {mine[0]['dtype']}, {mine[0]['gpu']}")
        paths.append(results.with_name(f"{results.stem}_{name}.png"))
        figure.savefig(paths[-1], dpi=110)
    run = sparse_run(rows)
    for name, made in (("blocksparse", _curves), ("butterfly", _butterflies)):
        figure = made(run) if run else None
        if figure:
            paths.append(results.with_name(f"{results.stem}_{name}.png"))
            figure.savefig(paths[-1], dpi=110)
    return paths


def _curves(run: Sparse) -> Any:
    """Speed-up over the dense kernel against 1/density, a panel for each size and kind of mask; None where there are none."""
    from matplotlib.figure import Figure

    columns = sorted({size[1:] for size in run.ms})
    lines = [(pass_, kind) for pass_ in PASSES for kind in SHARED if any(size[0] == pass_ for size in run.ms)]
    if not columns:
        return None
    figure = Figure(figsize=(3.6 * len(columns), 3 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), len(columns), squeeze=False, sharex=True, sharey=True)
    labels = {}
    for (pass_, kind), line in zip(lines, panels, strict=True):
        for (head_dim, seqlen), axes in zip(columns, line, strict=True):
            size = pass_, head_dim, seqlen
            shares = {
                mask: 1 / run.densities[mask, seqlen] for mask in run.ms.get(size, {}) if mask == "ones" or mask.startswith(f"{kind}/")
            }
            shares = dict(sorted(shares.items(), key=lambda item: item[1]))
            ideal = [min(shares.values(), default=1), max(shares.values(), default=1)]
            labels["1/density"] = axes.plot(ideal, ideal, color="0.6", linewidth=1, linestyle=":")[0]
            for name in dict.fromkeys(impl for mask in shares for impl in run.ms[size][mask]):
                points = {shares[mask]: times for mask in shares if (times := run.speedup(size, mask, name))}
                labels[name] = _plot(axes, name, points)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.grid(alpha=0.3)
            axes.set_title(f"{pass_}, {kind}, head_dim {head_dim}, {_length(seqlen)}", fontsize="medium")
    for axes in panels[:, 0]:
        axes.set_ylabel("speed-up over dense")
    for axes in panels[-1]:
        axes.set_xlabel("1/density")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"Block-sparse over the own dense kernel, {run.rows[0]['dtype']}, {run.rows[0]['gpu']}")
    return figure


def _butterflies(run: Sparse) -> Any:
    """Time of the butterfly mask and of dense attention against seqlen, a panel for each pass and head dim; None where there are none."""
    from matplotlib.figure import Figure

    lengths = _butterfly_lengths(run)
    if not lengths:
        return None
    lines = [pass_ for pass_ in PASSES if any(key[0] == pass_ for key in run.butterfly)]
    columns = sorted({head_dim for _, head_dim in run.butterfly})
    figure = Figure(figsize=(5.5 * len(columns), 3.8 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), len(columns), squeeze=False, sharex=True)
    labels = {}
    for pass_, line in zip(lines, panels, strict=True):
        for head_dim, axes in zip(columns, line, strict=True):
            cells = run.butterfly.get((pass_, head_dim), {})
            for dense in (False, True):
                for name in dict.fromkeys(impl for cell in cells.values() for impl in cell.get(dense, {}) if _ours(impl)):
                    points = {seqlen: cell[dense][name] for seqlen, cell in cells.items() if name in cell.get(dense, {})}
                    labels[name + (", dense" if dense else ", butterfly")] = _plot(axes, name, points, dashed=dense)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [f"{_length(seqlen)}\n{run.densities[BUTTERFLY, seqlen]:.1%}" for seqlen in lengths], fontsize="small")
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.set_title(f"{pass_}, head_dim {head_dim}", fontsize="medium")
    for axes in panels[:, 0]:
        axes.set_ylabel("ms")
    for axes in panels[-1]:
        axes.set_xlabel(f"seqlen, {_length(run.tokens)} tokens in all; density of the butterfly")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"Butterfly mask beside dense attention, {run.rows[0]['dtype']}, {run.rows[0]['gpu']}")
    return figure


def _plot(axes: Any, name: str, points: dict[Any, float], dashed: bool | None = None) -> Any:
    """A line in the implementation's colour; ours is wider, and solid unless said otherwise."""
    ours = _ours(name)
    dashed = not ours if dashed is None else dashed
    width, style = 2 if ours else 1, "--" if dashed else "-"
    return axes.plot(
        list(points), list(points.values()), color=COLOURS.get(name, "black"), marker="o", markersize=4, linewidth=width, linestyle=style
    )[0]


def _panel(axes: Any, table: Speeds, head_dim: int, causal: bool) -> None:
    cells = {shape[2]: cell for shape, cell in table.items() if shape[:2] == (head_dim, causal)}
    for name in impls(table):
        _plot(axes, name, {seqlen: cell[name] for seqlen, cell in cells.items() if name in cell}).set_label(name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(cells), [_length(seqlen) for seqlen in cells])
    axes.grid(alpha=0.3)
    axes.set_title(f"head_dim {head_dim}{', causal' if causal else ''}", fontsize="medium")


def main(argv: list[str] | None = None) -> int:
    """Render tables into the README, and with `--plots` pictures beside the CSV file."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--plots", action="store_true", help="draw bench/results/*.png too")
    args = parser.parse_args(argv)
    rows = read(args.csv)
    args.readme.write_text(place(args.readme.read_text(), report(rows, args.csv)))
    for path in draw(rows, args.csv) if args.plots else []:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
