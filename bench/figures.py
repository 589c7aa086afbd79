"""What the page of `bench.report` plots, speeds, shares of cells, errors, energy and runs, in figures that it fills.

The data of a figure are a tree of dicts, whose keys a reader chooses one after another, with a group at each end: the
titles of its axes, the places on the x axis where these are words, and by the name of an implementation its points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bench import readmes, runs
from bench.caches import rate
from bench.cells import DECODE
from bench.pictures import COLOURS, SHARED
from bench.rows import GEMM, key_of
from bench.runs import FP8, TABLES, Row, length, ours

Tree = dict[str, Any]
Points = dict[str, list[tuple[Any, float, str]]]
"""By implementation x, y, and what else there is to say."""

PACKED = "Packed sequences"
DECODING = "Decoding"
SPARSE = "Block-sparse, one sequence"
LENGTHS_OVER_RUNS = (2048, 16384)
ERROR = "RMS error against float64"


class Look(NamedTuple):
    """How a figure draws its points: joined by `line` or `step`, or by nothing; at words or numbers; logarithmic,
    and then at which places, where not at Bokeh's own; with which digits of y, as Bokeh writes them."""

    joined: str
    words: bool = False
    log: bool = False
    places: tuple[float, ...] = ()
    digits: str = "0.[0000]"


LOOKS = {
    **{"curves": Look("line", words=True), "shares": Look("step")},
    "errors": Look("", log=True, digits="0.00e+0"),
    # below two decades Bokeh's are as far apart as on a linear axis
    "energy": Look("", log=True, places=tuple(n * 10**e for e in (-2, -1, 0, 1, 2) for n in (1, 1.5, 2, 3, 5, 7))),
    "history": Look("line", words=True),
}
GREY, OWN = "#858585", "#7a6fd0"
MARKS = {
    **{"circle": "●", "square": "■", "triangle": "▲", "inverted_triangle": "▼", "diamond": "◆", "hex": "⬢"},
    **{"plus": "✚", "x": "✖", "star": "★", "square_pin": "▣", "triangle_pin": "◭", "circle_dot": "◉"},
}
"""Bokeh's markers, and as text."""
MARKERS = {
    **{
        "v3": "circle",
        "v2": "square",
        "v1": "triangle",
        "standard": "diamond",
        "blocksparse": "hex",
        "decode": "circle",
    },
    **{"fa4": "square", "fa3": "inverted_triangle", "fa2": "triangle", "sdpa_cudnn": "circle", "sdpa_flash": "diamond"},
    **{
        "flex": "plus",
        "xformers": "x",
        "cudnn_fp8": "hex",
        "sdpa_efficient": "square_pin",
        "sdpa_math": "triangle_pin",
    },
    "matmul": "circle_dot",
}
"""Others are stars."""


def colour(name: str) -> str:
    """Of an implementation, on white and on black: peers are grey, what is not among ours is violet."""
    known = {**COLOURS, "standard": "#8a7355", "decode": COLOURS["v3"], "matmul": GREY}
    return known.get(name, OWN if ours(name) else GREY)


def key(name: str) -> tuple[str, str]:
    """An implementation's colour and marker, as text."""
    return colour(name), MARKS[MARKERS.get(name, "star")]


def _group(x: str, y: str, points: Points, words: Iterable[str] | None = None) -> Tree:
    return {"x": x, "y": y, "words": None if words is None else list(words), "points": points}


def _said(row: Row) -> str:
    error = f", RMS error {float(row['rms_err']):.1e}" if row["rms_err"] else ""
    return f"{row['ms']} ms ({row['ms_p10']} to {row['ms_p90']}){error}"


Metrics = dict[str, Callable[[Row], float]]
SPEED: Metrics = {"TFLOP/s": lambda row: float(row["tflops"])}
SPEED_AND_MEMORY: Metrics = {
    **SPEED,
    "ms": lambda row: float(row["ms"]),
    "MiB beyond the inputs": lambda row: float(row["peak_mib"] or "nan"),
}
RATE: Metrics = {"GB/s of keys and values": lambda row: float(f"{rate(row):.5g}"), "ms": lambda row: float(row["ms"])}


def _by_length(
    mine: list[Row], panel: Callable[[Row], str], metrics: Metrics, x: str, column: str = "seqlen_k"
) -> Tree:
    """A group for each panel and metric, of rows over one of their columns."""
    tree: Tree = {}
    for row in mine:
        tree.setdefault(panel(row), []).append(row)
    for name, of in tree.items():
        words = [length(n) for n in sorted({int(row[column]) for row in of})]
        tree[name] = groups = {}
        for metric, value in metrics.items():
            points: Points = {}
            for row in sorted(of, key=lambda row: int(row[column])):
                if (y := value(row)) == y:
                    points.setdefault(row["impl"], []).append((length(int(row[column])), y, _said(row)))
            if points:
                groups[metric] = _group(x, metric, points, words)
    return tree


def _dense(row: Row) -> str:
    return f"head dim {row['head_dim']}{', causal' * (row['causal'] == '1')}"


def _with_heads(row: Row) -> str:
    heads = f"{row['heads']}:{row['heads_kv']} heads of {row['head_dim']}"
    if row["pass"] == DECODE:
        sequences = f"{row['batch']} sequence{'s' * (row['batch'] != '1')}"
        return ", ".join(filter(None, (heads, sequences, row["lengths"], row["dtype_kv"])))
    return f"{runs.WORDS[row['pass']]}, {heads}{', causal' * (row['causal'] == '1')}"


def cell_name(row: Row) -> str:
    """A cell's in words: its shape, and its length."""
    shape = _with_heads(row) if row["pass"] == DECODE or row["lengths"] else _dense(row)
    return f"{shape}, {length(int(row['seqlen_k']))}"


def decoded(rows: list[Row]) -> dict[str, list[Row]]:
    """By title those of the run of decoding that has most cells, for each kind of caches."""
    kinds: dict[str, list[Row]] = {DECODING: [], f"{DECODING}, MLA": [], f"{DECODING}, e4m3 caches": []}
    in_16_bits, latent, in_e4m3 = kinds.values()
    for row in runs.measured(rows):
        if row["pass"] == DECODE:
            (in_e4m3 if row["dtype_kv"] else latent if row["head_dim_v"] else in_16_bits).append(row)
    return {title: runs.of_most(mine) for title, mine in kinds.items()}


def tables(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each table of speed by its title, those of packed sequences and of decoding too."""
    found = {title: runs.last_run(rows, table) for table, title in TABLES.items()}
    return {**found, PACKED: readmes.packed_run(rows)[0], **decoded(rows)}


def curves(rows: list[Row]) -> Tree:
    """Speed, time and memory by length, or by what a mask keeps: table, then shape, then what is shown."""
    tree = {}
    for table, title in TABLES.items():
        mine = runs.last_run(rows, table)
        tree[title] = _by_length(mine, _dense, SPEED_AND_MEMORY, "tokens of a sequence")
    tree[PACKED] = _by_length(readmes.packed_run(rows)[0], _with_heads, SPEED_AND_MEMORY, "tokens in all")
    for title, mine in decoded(rows).items():
        tree[title] = _by_length(mine, _with_heads, RATE, "keys of a sequence")
    sparse = runs.sparse_run(rows)
    tree[SPARSE] = _by_share(sparse) if sparse else {}
    return {title: found for title, found in tree.items() if found}


def _by_share(run: runs.Sparse) -> Tree:
    tree: Tree = {}
    for size, cells in run.ms.items():
        for kind in SHARED:
            masks = {
                mask: mask.partition("/")[2] or "1" for mask in cells if mask == "ones" or mask.startswith(f"{kind}/")
            }
            faster: Points = {}
            times: Points = {}
            for mask in sorted(masks, key=lambda mask: int(masks[mask])):
                for impl, ms in cells[mask].items():
                    times.setdefault(impl, []).append((masks[mask], ms, f"{ms} ms"))
                    if over := run.speedup(size, mask, impl):
                        faster.setdefault(impl, []).append((masks[mask], round(over, 3), f"{ms} ms"))
            if len(masks) > 1:
                words, x = sorted(masks.values(), key=int), "one of so many blocks is kept"
                y = "times as fast as its own dense kernel"
                title = f"{runs.WORDS[size[0]]}, {kind}, head dim {size[1]}, {length(size[2])}"
                tree[title] = {name: _group(x, name, points, words) for name, points in ((y, faster), ("ms", times))}
    return tree


Cells = list[dict[str, float]]
"""Of each cell the speed of each implementation."""


def _cells(mine: list[Row], speed: Callable[[Row], float]) -> Cells:
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in mine:
        found.setdefault(key_of(row), {})[row["impl"]] = speed(row)
    return list(found.values())


def shares(rows: list[Row]) -> Tree:
    """The share of a table's cells in which an implementation is at least x times as fast as the fastest of other
    libraries. A cell in which it has no result counts as one in which it is not."""
    of = {f"{title}": _cells(runs.last_run(rows, table), SPEED["TFLOP/s"]) for table, title in TABLES.items()}
    packed = readmes.packed_run(rows)[0]
    for pass_, word in runs.WORDS.items():
        of[f"{PACKED}, {word}"] = _cells([row for row in packed if row["pass"] == pass_], SPEED["TFLOP/s"])
    of |= {title: _cells(mine, rate) for title, mine in decoded(rows).items()}
    tree = {}
    for title, cells in of.items():
        best = [max((speed for name, speed in cell.items() if not ours(name)), default=0) for cell in cells]
        against = [(cell, peer) for cell, peer in zip(cells, best, strict=True) if peer]
        points: Points = {}
        for name in dict.fromkeys(name for cell, _ in against for name in cell):
            ratios = sorted(cell[name] / peer for cell, peer in against if name in cell)
            reached = [(round(ratio, 4), len(ratios) - place) for place, ratio in enumerate(ratios)]
            points[name] = [
                (x, n / len(against), f"{n} of {len(against)} cells") for x, n in ((0, len(ratios)), *reached)
            ]
        if points:
            x = f"times as fast as the fastest other library of the cell, {len(against)} cells"
            tree[title] = _group(x, "share of the cells", points)
    return tree


def errors(rows: list[Row]) -> Tree:
    """Error against speed of every cell: table, then head dim."""
    tree: Tree = {}
    for table, title in TABLES.items():
        for row in runs.last_run(rows, table):
            if row["rms_err"] and float(row["rms_err"]):
                panels = tree.setdefault(title, {})
                group = panels.setdefault(f"head dim {row['head_dim']}", _group("TFLOP/s", ERROR, {}))
                what = f"{length(int(row['seqlen_q']))}{', causal' * (row['causal'] == '1')}"
                group["points"].setdefault(row["impl"], []).append((float(row["tflops"]), float(row["rms_err"]), what))
    return tree


def energy(rows: list[Row]) -> Tree:
    """Energy of a FLOP, or of a byte of keys and values, against speed, of every cell that was timed alone beside a
    meter: table, then head dim."""
    metered, tree = {row["run"] for row in rows if row.get("joules")}, {}
    for title, mine in tables([row for row in rows if row["run"] in metered]).items():
        read = title.startswith(DECODING)
        unit, of = ("GB/s", "nJ a byte of keys and values") if read else ("TFLOP/s", "pJ a FLOP")
        for row in mine:
            if (alone := runs.settled(row)) and row["joules"]:
                speed = rate(alone) if read else float(alone["tflops"])
                watts = 1e3 * float(row["joules"]) / float(alone["ms"])
                panels = tree.setdefault(title, {})
                group = panels.setdefault(f"head dim {row['head_dim']}", _group(f"{unit}, alone", of, {}))
                what = f"{cell_name(row)}: {row['joules']} J a call, {watts:.0f} W"
                # W by TFLOP/s are pJ by FLOP, W by GB/s nJ by byte
                point = float(f"{speed:.4g}"), float(f"{watts / speed:.4g}"), what
                group["points"].setdefault(row["impl"], []).append(point)
    return tree


def history(rows: list[Row]) -> Tree:
    """Medians over runs, and so over commits, of what several timed, beside the run's matrix product."""
    tree: Tree = {}
    for row in runs.measured(rows):
        dense = row["pass"] in runs.WORDS and not any(row[name] for name in ("mask", "lengths", "score", "gpus"))
        if row["pass"] == DECODE or (
            dense and row["dtype"] in ("bf16", FP8) and int(row["seqlen_q"]) in LENGTHS_OVER_RUNS
        ):
            title = f"{'Decoding' if row['pass'] == DECODE else runs.WORDS[row['pass']].capitalize()}, {row['dtype']}"
            tree.setdefault(title, {}).setdefault(cell_name(row), []).append(row)
    return {title: found for title, of in tree.items() if (found := _over_runs(of, rows))}


def _over_runs(of: dict[str, list[Row]], rows: list[Row]) -> Tree:
    found = {}
    for panel, mine in of.items():
        metric, value = next(iter((RATE if mine[0]["pass"] == DECODE else SPEED).items()))
        dates = {row["run"]: row["date"] for row in mine}
        points: Points = {}
        for row in mine:
            said = f"commit {row['commit']} of {row['date']}, {_said(row)}"
            points.setdefault(row["impl"], []).append((row["run"], value(row), said))
        if metric in SPEED:
            for run in dates:
                if products := runs.matmul(rows, run, FP8 if mine[0]["dtype"] == FP8 else "bf16"):
                    points.setdefault("matmul", []).append(
                        (run, max(products), f"{len(products)} products of a {GEMM}")
                    )
        if len(dates) > 1:
            found[panel] = _group("run", metric, points, dates)
    return found


def _ends(tree: Tree) -> Iterable[Tree]:
    if "points" in tree:
        yield tree
    else:
        for below in tree.values():
            yield from _ends(below)


def names_in(tree: Tree) -> list[str]:
    """Every implementation that has a point."""
    return list(dict.fromkeys(name for group in _ends(tree) for name in group["points"]))


def figure(name: str, tree: Tree) -> Any:
    """Bokeh's description of an empty figure, with a source for each implementation, which bears its name."""
    from bokeh.embed import json_item
    from bokeh.models import BoxZoomTool, ColumnDataSource, FactorRange, HoverTool
    from bokeh.plotting import figure as new

    look = LOOKS[name]
    axes: dict[str, Any] = {"x_range": FactorRange()} if look.words else {}
    plot: Any = new(
        name=name,
        height=430,
        sizing_mode="stretch_width",
        tools=[drag := BoxZoomTool(), "pan", "wheel_zoom", "reset", "save"],
        active_drag=drag,
        y_axis_type="log" if look.log else "linear",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **axes,
    )
    if look.words:
        plot.xaxis.major_label_orientation = 0.6 if name == "history" else "horizontal"
    if not look.log:
        plot.y_range.start = 0
    if look.places:
        plot.yaxis.ticker = list(look.places)
    marks = []
    for impl in names_in(tree):
        source = ColumnDataSource({"x": [], "y": [], "more": []}, name=impl)
        if look.joined:
            options = {"mode": "before"} if look.joined == "step" else {}
            width, dash = (2.5, "solid") if ours(impl) and impl != "matmul" else (1.2, "dashed")
            draw = getattr(plot, look.joined)
            draw("x", "y", source=source, color=colour(impl), line_width=width, line_dash=dash, **options)
        marks.append(
            plot.scatter(
                *("x", "y"),
                **{"source": source, "name": impl, "color": colour(impl), "size": 8 if ours(impl) else 6},
                marker=MARKERS.get(impl, "star"),
                fill_alpha=0.85,
            )
        )
    tip = f'<div style="color: #1c1f24"><b>$name</b> @y{{{look.digits}}} at @x<br>@more</div>'
    plot.add_tools(HoverTool(renderers=marks, tooltips=tip))
    plot.toolbar.logo = None
    return json_item(plot)
