"""Pictures of a results file, `bench/results/<gpu>_*.png`: one look for all. `bench.plot` draws them.

Our versions have colours that the colour-blind tell apart (Okabe and Ito's) and strong lines; peers are grey, with
marks and dashes of their own. The same implementation looks the same in every picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

from bench import runs, traffic
from bench.ceiling import copied
from bench.runs import BEST_PEER, BUTTERFLY, COPY, TRAFFIC, Row, Sparse, Speeds, length, ours

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLOURS = {
    **{"v3": RED, "v3_deterministic": ORANGE, "v3_fp8": PURPLE, "v3_fp8_end_to_end": PURPLE},
    "v3_fp8_fast_accum": ORANGE,
    **{"v2": BLUE, "v1": SKY, "standard": "#5a5a5a", "blocksparse": GREEN},
}
"""Of what is ours; a version of a reader's own is black."""
PEERS = {
    **{"fa4": ("#555555", "s"), "fa3": ("#555555", "v"), "fa2": ("#999999", "v"), "cudnn_fp8": ("#333333", "p")},
    **{
        "sdpa_cudnn": ("#777777", "^"),
        "sdpa_flash": ("#a5a5a5", "D"),
        "flex": ("#a5a5a5", "P"),
        "xformers": ("#a5a5a5", "X"),
    },
    **{"sdpa_efficient": ("#bbbbbb", "<"), "sdpa_math": ("#bbbbbb", ">")},
}
"""Grey and mark of a peer; others are as light as they come."""
SHARED = ("random", "local")
"""Masks of which there are several, by the share of the blocks that they keep; `ones` keeps all."""
BANDWIDTHS = {"GH200": 4.0, "H200": 4.8, "H100": 3.35, "H20": 4.0, "A100": 2.04, "B200": 8.0}
"""TB/s by the data sheets, for results without a row of pass `copy`, by a word of the GPU's name."""
LOOK: dict[Any, Any] = {
    **{"font.size": 10, "axes.titlesize": 10, "axes.labelsize": 10, "figure.titlesize": 12, "legend.fontsize": 9.5},
    **{
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#888888",
        "axes.grid": True,
        "axes.axisbelow": True,
    },
    **{
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.8,
        "xtick.color": "#444444",
        "ytick.color": "#444444",
        "legend.frameon": False,
        "legend.handlelength": 2.6,
    },
}
GENERATIONS = ("standard", "v1", "v2", "v3")
ORDER = (*GENERATIONS[:-1], BEST_PEER, GENERATIONS[-1])
"""Of the bars of the picture at the top of the README."""
PANEL, DPI, TONES = (3.9, 2.9), 120, 128

Panels = Any


def draw(rows: list[Row], results: Path) -> list[Path]:
    """Every picture that the rows have something for, beside the results file; their paths."""
    from matplotlib import rc_context

    paths = []
    with rc_context(LOOK):
        for name, made in pictures(rows).items():
            paths.append(results.with_name(f"{results.stem}_{name}.png"))
            _save(made(), paths[-1])
    return paths


def pictures(rows: list[Row]) -> dict[str, Callable[[], Any]]:
    """What makes each picture that the rows have something for, by the name that ends its file's."""
    sparse = runs.sparse_run(rows)
    drawn = {
        "generations": (_generations, _of_generations(rows)),
        **{table: (partial(_lines, title=title), runs.last_run(rows, table)) for table, title in runs.TABLES.items()},
        "speedups": (_speedups, _of_speedups(rows)),
        "errors": (_errors, _of_errors(rows)),
        "memory": (_memory, _of_memory(rows)),
        "roofline": (_roofline, _of_roofline(rows)),
        "blocksparse": (
            _curves,
            sparse if sparse and any(_has(sparse, *kind) for kind in product(runs.PASSES, SHARED)) else None,
        ),
        "butterfly": (_butterflies, sparse if sparse and sparse.butterfly_lengths else None),
    }
    return {name: partial(make, rows, data) for name, (make, data) in drawn.items() if data}


def _save(figure: Any, path: Path) -> None:
    # A palette makes the file a third as large, and nobody sees it.
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, dpi=DPI, facecolor="white")
    Image.open(buffer).convert("RGB").quantize(TONES, dither=Image.Dither.NONE).save(path, optimize=True)


def _figure(
    lines: int, columns: int, title: str, size: tuple[float, float] = PANEL, **options: Any
) -> tuple[Any, Panels]:
    """A figure of so many panels, and they as an array with two dimensions."""
    from matplotlib.figure import Figure

    # No narrower than its title.
    figure = Figure(figsize=(max(size[0] * columns, 7.5), size[1] * lines + 0.7), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(lines, columns, squeeze=False, **options)


def _legend(figure: Any, labels: dict[str, Any]) -> None:
    # A column is as wide as the longest label, at this size of letters, and its mark.
    columns = max(1, int(figure.get_figwidth() / (0.5 + 0.08 * max(map(len, labels)))))
    lines = -(-len(labels) // columns)
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=-(-len(labels) // lines))


def _style(name: str, dashed: bool | None = None) -> dict[str, Any]:
    """Of a line: ours is wide, and solid unless said otherwise."""
    if not ours(name):
        colour, marker = PEERS.get(name, ("#bbbbbb", "x"))
        return {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.1, "linestyle": "--", "zorder": 2}
    line = "--" if (name.endswith(runs.END_TO_END) if dashed is None else dashed) else "-"
    top = 4 if name == "v3" else 3
    return {
        "color": COLOURS.get(name, BLACK),
        "marker": "o",
        "markersize": 5,
        "linewidth": 2.2,
        "linestyle": line,
        "zorder": top,
    }


def _line(axes: Any, name: str, points: dict[Any, float], dashed: bool | None = None) -> Any:
    return axes.plot(list(points), list(points.values()), **_style(name, dashed))[0]


def _by_length(axes: Any, lengths: Iterable[int]) -> None:
    """A logarithmic axis of sequence lengths."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [length(seqlen) for seqlen in lengths])
    axes.minorticks_off()


def _seqlen(row: Row) -> str:
    return f"seqlen, {length(runs.tokens_of(row))} tokens in all"


def _outer(panels: Panels, x: str, y: str) -> None:
    for axes in panels[:, 0]:
        axes.set_ylabel(y)
    for axes in panels[-1]:
        axes.set_xlabel(x)


def _of_generations(rows: list[Row]) -> dict[str, list[Row]]:
    tables = {pass_: runs.last_run(rows, pass_) for pass_ in runs.PASSES}
    tables = {
        pass_: [row for row in mine if row["head_dim"] == "128" and row["causal"] == "1"]
        for pass_, mine in tables.items()
    }
    return {pass_: mine for pass_, mine in tables.items() if any(row["impl"] in GENERATIONS for row in mine)}


def _generations(rows: list[Row], tables: dict[str, list[Row]]) -> Any:
    """The picture at the top of the README: bars of each generation and of the best peer by length, a
    panel for each pass."""
    from matplotlib.patheffects import withStroke

    first = next(iter(tables.values()))[0]
    title = f"Three generations of FlashAttention on one {first['gpu']}: {first['dtype']}, causal, head dim 128"
    figure, panels = _figure(1, len(tables), title, (5.9, 3.4), sharey=True)
    labels = {}
    for axes, (table, mine) in zip(panels[0], tables.items(), strict=True):
        cells = {shape[2]: cell for shape, cell in runs.speeds(mine).items()}
        peers = {n: [speed for name, speed in cell.items() if not ours(name)] for n, cell in cells.items()}
        bars = {name: {n: cell[name] for n, cell in cells.items() if name in cell} for name in ORDER}
        bars[BEST_PEER] = {n: max(found) for n, found in peers.items() if found}
        bars = {name: found for name, found in bars.items() if found}
        width = 0.84 / len(bars)
        for place, (name, found) in enumerate(bars.items()):
            at = [list(cells).index(n) + (place - (len(bars) - 1) / 2) * width for n in found]
            colour = "#b5b5b5" if name == BEST_PEER else COLOURS[name]
            drawn = axes.bar(at, list(found.values()), width * 0.92, color=colour)
            labels[name] = drawn
            if name == "v3":
                edge = [withStroke(linewidth=2.5, foreground="white")]
                axes.bar_label(drawn, fmt="%.0f", fontsize=9, padding=1, color=colour, weight="bold", path_effects=edge)
        if products := runs.matmul(rows, mine[0]["run"]):
            labels["bf16 matmul"] = _ceiling(axes, products)
        axes.set_xticks(range(len(cells)), [length(n) for n in cells])
        axes.grid(axis="x", visible=False)
        axes.set_title(runs.WORDS[table])
    _outer(panels, _seqlen(mine[0]), "TFLOP/s")
    # Either panel may lack one of the generations: the legend has them in their order all the same.
    _legend(figure, {name: labels[name] for name in (*ORDER, "bf16 matmul") if name in labels})
    return figure


def _ceiling(axes: Any, products: list[float]) -> Any:
    """The line of the run's matrix product."""
    return axes.axhline(max(products), color=BLACK, linewidth=1.2, linestyle=":", zorder=1)


def _lines(rows: list[Row], mine: list[Row], title: str) -> Any:
    """TFLOP/s over seqlen, a panel for each head dim and mask; the run's matrix product is a dotted line."""
    speeds, dtype = runs.speeds(mine), mine[0]["dtype"]
    factors = "e4m3" if dtype == "e4m3" else "bf16"
    figure, panels, columns = _by_shape(speeds, f"{title}, {dtype}, {mine[0]['gpu']}")
    labels = {}
    for axes, cells in columns:
        for name in runs.impls(speeds):
            labels[name] = _line(axes, name, {n: cell[name] for n, cell in cells.items() if name in cell})
        products = runs.matmul(rows, mine[0]["run"], factors)
        if products and mine[0]["gpu"] != "cpu":  # of which an interpreter is thousands of times away
            labels[f"{factors} matmul"] = _ceiling(axes, products)
    panels[0, 0].set_ylim(bottom=0)
    _outer(panels, _seqlen(mine[0]), "TFLOP/s")
    _legend(figure, labels)
    return figure


def _by_shape(table: Speeds, title: str) -> tuple[Any, Panels, list[tuple[Any, dict[int, dict[str, float]]]]]:
    """A figure with a line of panels for each mask and a column for each head dim;
    and each panel with its cells by seqlen."""
    masks, head_dims = (sorted({shape[i] for shape in table}) for i in (1, 0))
    figure, panels = _figure(len(masks), len(head_dims), title, sharex=True, sharey=True)
    found = []
    for causal, line in zip(masks, panels, strict=True):
        for head_dim, axes in zip(head_dims, line, strict=True):
            cells = {shape[2]: cell for shape, cell in table.items() if shape[:2] == (head_dim, causal)}
            _by_length(axes, cells)
            axes.set_title(f"head dim {head_dim}{', causal' if causal else ''}")
            found.append((axes, cells))
    return figure, panels, found


STEPS = {
    "Forward": (("v1", "standard", "fwd"), ("v2", "v1", "fwd"), ("v3", "v2", "fwd"), ("v3", BEST_PEER, "fwd")),
    "Backward": (("v2", "v1", "bwd"), ("v3", "v2", "bwd"), ("v3", BEST_PEER, "bwd")),
    "FP8 inputs": (("v3_fp8", BEST_PEER, "fwd_e4m3"),),
    "From 16 bits": (("v3_fp8_end_to_end", "v3", "fwd_end_to_end"),),
}
"""The bars of the picture of speed-ups, panel by panel: who, over whom, in which table."""


def _of_speedups(rows: list[Row]) -> dict[str, dict[tuple[str, str, str], runs.Ratios]]:
    found = {
        title: {step: ratios for step in steps if (ratios := runs.over(rows, *step))} for title, steps in STEPS.items()
    }
    return {title: steps for title, steps in found.items() if steps}


def _speedups(rows: list[Row], found: dict[str, dict[tuple[str, str, str], runs.Ratios]]) -> Any:
    """Geometric mean of each version's speed over the generation before it and over the best peer, by head dim,
    with the range."""
    widths = [len(steps) for steps in found.values()]
    title = f"Speed-up: geometric mean and range over the cells, by head dim, {rows[-1]['gpu']}"
    figure, panels = _figure(1, len(found), title, (3.1, 3.2), sharey=True, width_ratios=widths)
    for axes, (name, steps) in zip(panels[0], found.items(), strict=True):
        ticks = {}
        for place, ((impl, other, _), ratios) in enumerate(steps.items()):
            head_dims = sorted({shape[0] for shape in ratios.values})
            width = 0.84 / len(head_dims)
            for nth, head_dim in enumerate(head_dims):
                values, at = ratios.of(head_dim), place + (nth - (len(head_dims) - 1) / 2) * width
                middle, ticks[at] = runs.mean(values), head_dim
                axes.bar(at, middle - 1, width * 0.9, bottom=1, color=COLOURS.get(impl, BLACK))
                axes.vlines(at, min(values), max(values), color="#333333", linewidth=1)
                axes.annotate(
                    f"{middle:.2f}", (at, max(values)), (0, 3), textcoords="offset points", ha="center", fontsize=8
                )
            label = f"{impl.removesuffix('_end_to_end')}\nover {other}"
            axes.annotate(
                label, (place, 0), (0, -18), ("data", "axes fraction"), "offset points", ha="center", va="top"
            )
        axes.axhline(1, color=BLACK, linewidth=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda times, _: f"{times:g}x")
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="x", visible=False)
        axes.set_title(name)
    panels[0, 0].set_ylabel("times as fast")
    return figure


def _of_errors(rows: list[Row]) -> list[Row]:
    mine = runs.last_run(rows, "fwd") + runs.last_run(rows, "fwd_e4m3")
    mine += [row for row in runs.last_run(rows, "fwd_end_to_end") if row["impl"].endswith(runs.END_TO_END)]
    mine = [row for row in mine if row.get("rms_err")]
    nearest = min((row["seqlen_q"] for row in mine), key=lambda seqlen: abs(int(seqlen) - 4096), default="")
    return [row for row in mine if row["seqlen_q"] == nearest]


def _errors(rows: list[Row], mine: list[Row]) -> Any:
    """RMS error against TFLOP/s of every implementation at one length, a panel for each head dim;
    hollow marks are causal."""
    head_dims = sorted({int(row["head_dim"]) for row in mine})
    figure, panels = _figure(
        1,
        len(head_dims),
        f"Error against speed, forward, {length(int(mine[0]['seqlen_q']))} keys, {mine[0]['gpu']}",
        sharex=True,
        sharey=True,
    )
    labels = {}
    for row in mine:
        axes, style = panels[0, head_dims.index(int(row["head_dim"]))], _style(row["impl"])
        name = f"{row['impl']} (e4m3 inputs)" if row["dtype"] == "e4m3" else row["impl"]
        fill = "none" if row["causal"] == "1" else style["color"]
        kept = {key: style[key] for key in ("marker", "zorder")}
        if row["impl"].endswith(runs.END_TO_END):
            kept["marker"] = "*"
        elif row["dtype"] == "e4m3" and ours(row["impl"]):
            kept["marker"] = "d"
        size = 70 if ours(row["impl"]) else 36
        drawn = axes.scatter(
            float(row["tflops"]), float(row["rms_err"]), size, facecolors=fill, edgecolors=style["color"], **kept
        )
        if row["causal"] == "0" or name not in labels:
            labels[name] = drawn
    for axes, head_dim in zip(panels[0], head_dims, strict=True):
        axes.set_yscale("log")
        axes.margins(y=0.12)
        axes.set_title(f"head dim {head_dim}")
    panels[0, 0].set_xlim(left=0)
    _outer(panels, "TFLOP/s (hollow: causal)", "RMS error against float64")
    _legend(figure, labels)
    return figure


def _of_memory(rows: list[Row]) -> dict[str, list[Row]]:
    tables = {
        pass_: [row for row in runs.last_run(rows, pass_) if row.get("peak_mib") and row["causal"] == "0"]
        for pass_ in runs.PASSES
    }
    return {pass_: mine for pass_, mine in tables.items() if mine}


def _memory(rows: list[Row], tables: dict[str, list[Row]]) -> Any:
    """Memory that a call takes beyond its inputs against seqlen, for one sequence, a panel for each pass."""
    head_dims = {int(row["head_dim"]) for mine in tables.values() for row in mine}
    head_dim = 128 if 128 in head_dims else min(head_dims)
    of = next(row for mine in tables.values() for row in mine if row["head_dim"] == str(head_dim))
    title = f"Memory beyond the inputs, one sequence, {of['heads']} heads of {head_dim}, {of['dtype']}, {of['gpu']}"
    figure, panels = _figure(1, len(tables), title, (4.9, 3.2), sharey=True)
    labels = {}
    for axes, (pass_, mine) in zip(panels[0], tables.items(), strict=True):
        taken = {shape[2]: cell for shape, cell in runs.speeds(mine, "peak_mib").items() if shape[0] == head_dim}
        ends = {}
        for name in runs.impls(runs.speeds(mine, "peak_mib")):
            points = {n: cell[name] * n / runs.tokens_of(mine[0]) for n, cell in taken.items() if cell.get(name)}
            labels[name] = _line(axes, name, points)
            ends |= {name: points[max(taken)]} if max(taken) in points else {}
        _name_ends(axes, max(taken), ends)
        _by_length(axes, taken)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda mib, _: f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB")
        axes.set_title(runs.WORDS[pass_])
    _outer(panels, "seqlen", "peak, of one sequence")
    _legend(figure, labels)
    return figure


def _name_ends(axes: Any, end: int, values: dict[str, float]) -> None:
    """Names at the right ends of lines, since many lie on one another:
    those of equal values side by side, near ones beneath."""
    ranked = sorted(values, key=lambda name: -values[name])
    texts: list[tuple[float, str]] = []
    for before, name in zip(["", *ranked], ranked, strict=False):
        drop = values[name] / values[before] if before else 0.0
        if drop < 0.55:
            texts.append((values[name], name))
        else:
            at, text = texts[-1]
            texts[-1] = at, text + (", " if drop > 0.97 and len(text.split("\n")[-1]) < 18 else "\n") + name
    for at, text in texts:
        axes.annotate(text, (end, at), (7, 6), textcoords="offset points", va="top", fontsize=8.5)


def _of_roofline(rows: list[Row]) -> list[Row]:
    return [row for row in runs.last_run(rows, "fwd") if row["causal"] == "0" and row["impl"] in traffic.VERSIONS]


def _roofline(rows: list[Row], mine: list[Row]) -> Any:
    """Forward TFLOP/s against FLOPs for each byte that the algorithm moves,
    and for each that DRAM saw, a panel for each head dim."""
    from matplotlib.ticker import LogLocator, NullFormatter

    seen = [row for row in runs.measured(rows) if row["pass"] == f"{TRAFFIC}fwd" and row.get("dram_mib")]
    seen = {(row["impl"], runs.shape_of(row)): float(row["dram_mib"]) * 2**20 for row in seen}
    head_dims = sorted({int(row["head_dim"]) for row in mine})
    figure, panels = _figure(
        1,
        len(head_dims),
        f"Roofline, forward, {mine[0]['dtype']}, {mine[0]['gpu']}",
        (4.1, 3.3),
        sharex=True,
        sharey=True,
    )
    labels = {}
    for row in mine:
        axes, name = panels[0, head_dims.index(int(row["head_dim"]))], row["impl"]
        speed, colour = float(row["tflops"]), COLOURS[name]
        work = speed * float(row["ms"]) * 1e9
        intensity = work / traffic.counted(name, runs.problem_of(row))
        labels[name] = axes.scatter(intensity, speed, 30, facecolors="none", edgecolors=colour, zorder=3)
        if bytes_seen := seen.get((name, runs.shape_of(row))):
            axes.plot([intensity, work / bytes_seen], [speed, speed], color=colour, linewidth=0.8, alpha=0.6)
            axes.scatter(work / bytes_seen, speed, 30, color=colour, zorder=3)
    rate, source = bandwidth(rows, mine[0]["gpu"])
    products = runs.matmul(rows, mine[0]["run"])
    for axes, head_dim in zip(panels[0], head_dims, strict=True):
        axes.set_title(f"head dim {head_dim}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = axes.get_xlim()
        for axis, steps in ((axes.xaxis, (1, 2, 5) if high < 100 * low else (1,)), (axes.yaxis, (1, 2, 5))):
            axis.set_major_locator(LogLocator(subs=steps))
            axis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.set_minor_formatter(NullFormatter())
        if products:
            labels["bf16 matmul"] = _ceiling(axes, products)
    low, high = panels[0, 0].get_xlim()
    if rate:
        ends = [low, max(products) / rate if products else high]
        for axes in panels[0]:
            labels[f"memory, {rate:.1f} TB/s ({source})"] = axes.plot(
                ends, [rate * x for x in ends], color=BLACK, linewidth=1.2
            )[0]
    panels[0, 0].set_ylabel("TFLOP/s")
    moved = (
        "FLOPs for each byte that the algorithm moves, caches left out"
        + "; filled: that DRAM moved, by its counters" * bool(seen)
    )
    panels[0, len(head_dims) // 2].set_xlabel(moved)
    _legend(figure, labels)
    return figure


def bandwidth(rows: list[Row], gpu: str) -> tuple[float | None, str]:
    """TB/s of memory and where that is from: the last row of pass `copy`, else the GPU's data sheet;
    None where neither is known."""
    copies = [row for row in runs.measured(rows) if row["pass"] == COPY]
    if copies:
        return copied(copies[-1]), "a copy"
    sheet = runs.word_of(gpu, BANDWIDTHS)
    return (sheet, "data sheet") if sheet else (None, "")


def _curves(rows: list[Row], run: Sparse) -> Any:
    """Speed-up over the dense kernel against 1/density, a panel for each size and kind of mask."""
    columns = sorted({size[1:] for size in run.ms})
    lines = [(pass_, kind) for pass_ in runs.PASSES for kind in SHARED if _has(run, pass_, kind)]
    title = f"Block-sparse over the own dense kernel, {run.rows[0]['dtype']}, {run.rows[0]['gpu']}"
    figure, panels = _figure(len(lines), len(columns), title, (3.4, 2.9), sharex=True, sharey=True)
    labels = {}
    for (pass_, kind), line in zip(lines, panels, strict=True):
        for (head_dim, seqlen), axes in zip(columns, line, strict=True):
            size = pass_, head_dim, seqlen
            masks = (mask for mask in run.ms.get(size, {}) if mask == "ones" or mask.startswith(f"{kind}/"))
            shares = dict(sorted(((mask, 1 / run.densities[mask, seqlen]) for mask in masks), key=lambda item: item[1]))
            ideal = [min(shares.values(), default=1), max(shares.values(), default=1)]
            labels["1/density"] = axes.plot(ideal, ideal, color=BLACK, linewidth=1, linestyle=":")[0]
            for name in dict.fromkeys(impl for mask in shares for impl in run.ms[size][mask]):
                points = {shares[mask]: times for mask in shares if (times := run.speedup(size, mask, name))}
                labels[name] = _line(axes, name, points)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.set_title(f"{runs.WORDS[pass_]}, {kind}, head dim {head_dim}, {length(seqlen)}")
    _outer(panels, "1/density", "speed-up over dense")
    _legend(figure, labels)
    return figure


def _has(run: Sparse, pass_: str, kind: str) -> bool:
    return any(size[0] == pass_ and mask.startswith(f"{kind}/") for size, cells in run.ms.items() for mask in cells)


def _butterflies(rows: list[Row], run: Sparse) -> Any:
    """Time of the butterfly mask and of dense attention against seqlen, a panel for each pass and head dim."""
    lengths = run.butterfly_lengths
    lines = [pass_ for pass_ in runs.PASSES if any(key[0] == pass_ for key in run.butterfly)]
    columns = sorted({head_dim for _, head_dim in run.butterfly})
    title = f"Butterfly mask beside dense attention, {run.rows[0]['dtype']}, {run.rows[0]['gpu']}"
    figure, panels = _figure(len(lines), len(columns), title, (5.4, 3.5), sharex=True)
    labels = {}
    for pass_, line in zip(lines, panels, strict=True):
        for head_dim, axes in zip(columns, line, strict=True):
            cells = run.butterfly.get((pass_, head_dim), {})
            for dense in (False, True):
                for name in dict.fromkeys(
                    impl for cell in cells.values() for impl in cell.get(dense, {}) if ours(impl)
                ):
                    points = {
                        seqlen: cell[dense][name] for seqlen, cell in cells.items() if name in cell.get(dense, {})
                    }
                    labels[name + (", dense" if dense else ", butterfly")] = _line(axes, name, points, dashed=dense)
            axes.set_yscale("log")
            axes.set_xscale("log", base=2)
            axes.set_xticks(
                lengths,
                [f"{length(seqlen)}\n{run.densities[BUTTERFLY, seqlen]:.1%}" for seqlen in lengths],
                fontsize=8.5,
            )
            axes.minorticks_off()
            axes.set_title(f"{runs.WORDS[pass_]}, head dim {head_dim}")
    _outer(panels, f"seqlen, {length(run.tokens)} tokens in all; density of the butterfly", "ms")
    _legend(figure, labels)
    return figure
