"""Who waits for whom in v3's forward kernel, measured: the last picture and table of docs/learn/v3.md.

`python -m bench.trace --out DIR`, on a Hopper GPU, compiles the kernel with stamps of the clock in it (`bench.stamps`)
in each of the ablation's four orders, fp16, without a mask, and writes the stamps of one tile of one thread block to
`DIR/h200_trace.json`, with what a launch takes with and without them. All else is made of that file, once it lies in
`bench/results`: `python -m bench.trace` draws the picture, `bench.plot` writes the section.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.orders import ORDERS, clocks
from bench.phases import HEAD_DIM, PHASES, TRACE, Lane, Order
from bench.readmes import ROOT, origin, table
from bench.timeline import BAND, EDGE, LOAD, MUTED, Sheet

PICTURE = ROOT / "docs" / "learn" / "v3_trace.svg"

ENDS = 2
"""Blocks at each end of a tile that are not counted: the loop is not regular yet, or any more."""

COLUMNS = {
    "waits for K and V": ("K", "V"),
    "for its turn": ("turn",),
    "issues products": ("S issued", "PV issued"),
    "waits for them": ("S", "PV"),
    "softmax": ("softmax",),
    "P to 16 bits": ("P",),
}
"""The table's columns, and the phases that are in each."""
S, PV, SOFTMAX, ROUNDED, TURN = "#2b69b0", "#d97a1c", "#9bd0ad", "#4d946a", "#e3cf6b"
COLOURS = {"K": LOAD, "V": LOAD, "turn": TURN, "S issued": S, "S": "#d0e3f6", "softmax": SOFTMAX, "P": ROUNDED}
COLOURS |= {"PV issued": PV, "PV": "#fce2c6", "K free": BAND, "V free": BAND, "K ordered": MUTED, "V ordered": MUTED}
LEGEND = {
    "orders a load": MUTED,
    "waits for K or V": LOAD,
    "for its turn": TURN,
    "issues S": S,
    "waits for S": COLOURS["S"],
    "softmax": SOFTMAX,
    "P to 16 bits": ROUNDED,
    "issues PV": PV,
    "waits for PV": COLOURS["PV"],
}
WIDTH, LEFT, RIGHT, BAR, THIN, GAP, TITLE = 900, 128, 884, 16, 6, 5, 24  # pixels
STEPS = 4
"""Of the fastest order, that the picture is as long as."""


@dataclass(frozen=True)
class Span:
    """From one clock to another, what a lane did, and of which block."""

    what: str
    block: int
    begin: int
    end: int


def spans(lane: Lane) -> list[Span]:
    """The phases of a lane, in order: each begins where the one before ends, so the first is left out."""
    stamps = sorted((clock, what, n) for what, of in lane.items() for n, clock in enumerate(of) if clock is not None)
    return [Span(what, n, begin, end) for (begin, *_), (end, what, n) in pairwise(stamps)]


def products(lane: Lane) -> list[Span]:
    """A warpgroup's products, each from when its first instruction may be issued to when the warpgroup knows that it
    is done, which may be later than it is."""
    begins = {(span.what, span.block): span.begin for span in spans(lane)}
    found = [
        (what, n, begins.get((f"{what} issued", n)), end) for what in ("S", "PV") for n, end in enumerate(lane[what])
    ]
    return [Span(what, n, begin, end) for what, n, begin, end in found if begin is not None and end is not None]


def covered(begin: int, end: int, over: Iterable[Span]) -> int:
    """How many of these clocks some span is over."""
    total, reached = 0, begin
    for span in sorted(over, key=lambda span: span.begin):
        total += max(0, min(end, span.end) - max(reached, span.begin))
        reached = max(reached, span.end)
    return total


@dataclass(frozen=True)
class Summary:
    """An order of the loop in its regular part, means over blocks and warpgroups.

    Attributes:
        step: clocks from one block of keys to the next.
        busy: share of them that the tensor cores multiply, at their full rate, for all warpgroups.
        phases: clocks of each phase of a step.
        under_way: share of the time in which some warpgroup has issued a product that it does not know to be done.
        under_own, under_others: shares of softmax in which its warpgroup, or another, has.
        slower: time of the kernel with stamps over that without, less 1.
    """

    step: float
    busy: float
    phases: dict[str, float]
    under_way: float
    under_own: float
    under_others: float
    slower: float


def summary(order: Order, block_kv: int) -> Summary:
    """The numbers of an order, of stamps of more than `2 * ENDS + 1` blocks."""
    lanes = order["lanes"][1:]
    first, last = ENDS, len(lanes[0]["S"]) - 1 - ENDS
    # of every phase each block has one
    mine = [[span for span in spans(lane) if first <= span.block < last] for lane in lanes]
    steps = len(lanes) * (last - first)
    phases = {what: sum(s.end - s.begin for of in mine for s in of if s.what == what) / steps for what in PHASES}
    issued = [{s.block: s.begin for s in spans(lane) if s.what == "S issued"} for lane in lanes]
    step = sum(of[last] - of[first] for of in issued) / steps
    made = [products(lane) for lane in lanes]
    begin, end = max(of[first] for of in issued), min(of[last] for of in issued)
    softmax = [[span for span in of if span.what == "softmax"] for of in mine]
    total = sum(s.end - s.begin for of in softmax for s in of)

    def under(own: bool) -> float:
        """The share of softmax that is under products of its warpgroup, or under those of the others."""
        over = [[p for j, of in enumerate(made) if (i == j) == own for p in of] for i in range(len(lanes))]
        return sum(covered(s.begin, s.end, over[i]) for i, of in enumerate(softmax) for s in of) / total

    return Summary(
        step,
        full_rate(len(lanes), block_kv) / step,
        phases,
        covered(begin, end, [p for of in made for p in of]) / (end - begin),
        under(True),
        under(False),
        order["stamped_ms"] / order["ms"] - 1,
    )


def section(path: Path = TRACE) -> Iterator[str]:
    """What docs/learn/v3.md says of the trace; nothing where there is none."""
    if not path.exists():
        return
    found = json.loads(path.read_text())
    of = {name: summary(order, found["block_kv"]) for name, order in found["orders"].items()}
    warpgroups = len(found["orders"]["both"]["lanes"]) - 1
    slower = sorted(s.slower for s in of.values())
    yield (
        f"What v3 does can be seen, too. Its kernel has {warpgroups} consumer warpgroups here, and blocks of "
        f"{found['block_kv']} keys. One thread of the producer and of each warpgroup wrote down the multiprocessor's "
        f"clock after each phase of its loop. Thin bars are products, from when they are issued until their warpgroup "
        f"knows that they are done."
    )
    yield f"![Measured time lines of one thread block, in each of the four orders]({PICTURE.name})"
    yield (
        f"Clocks of a step, by what a warpgroup does in them: means over a tile of one thread block, "
        f"{found['dtype']}, batch {found['batch']}, seqlen {found['seqlen']}, {found['heads']} heads, head dim "
        f"{found['head_dim']}, no mask. The stamps made the kernels {slower[0]:.1%} to {slower[-1]:.1%} slower. "
        f"{origin(found)}."
    )
    yield table(
        ("order", "a step", *COLUMNS),
        (
            [
                title(name),
                f"{s.step:.0f}",
                *(f"{sum(s.phases[what] for what in these):.0f}" for these in COLUMNS.values()),
            ]
            for name, s in of.items()
        ),
    )
    yield (
        f"The products of {warpgroups} warpgroups' steps take the tensor cores "
        f"{full_rate(warpgroups, found['block_kv'])} clocks. So this is how well they are used, and how much of "
        f"softmax is hidden:"
    )
    yield table(
        ("order", "tensor cores multiply", "some product is under way", "softmax under own products", "under others'"),
        (
            [title(name), *(f"{share:.0%}" for share in (s.busy, s.under_way, s.under_own, s.under_others))]
            for name, s in of.items()
        ),
    )


def title(name: str) -> str:
    """Of an order."""
    return "neither" if name == "fa2" else ORDERS[name].title


def full_rate(warpgroups: int, block_kv: int) -> int:
    """Clocks that the tensor cores need for a step of all warpgroups."""
    return warpgroups * 2 * clocks(HEAD_DIM)["S"] * block_kv // 128


def draw(found: Mapping[str, Any], path: Path = PICTURE) -> None:
    """The orders below one another, in one scale of time, each from a step in the middle of its tile on."""
    steps = {name: summary(order, found["block_kv"]).step for name, order in found["orders"].items()}
    horizon, warpgroups = STEPS * min(steps.values()), len(found["orders"]["both"]["lanes"]) - 1
    height = TITLE + BAR + GAP + warpgroups * (BAR + THIN + GAP) + 12
    sheet, y = Sheet(WIDTH, 8 + len(steps) * height + 30), 8
    for name, step in steps.items():
        sheet.text(16, y + 12, title(name), 11, ha="left", weight="bold")
        sheet.text(RIGHT, y + 12, f"{step:.0f} clocks a step", 9.5, MUTED, "right")
        strip(sheet, y + TITLE, found["orders"][name]["lanes"], horizon)
        y += height
    x = 16
    for words, colour in LEGEND.items():
        sheet.box(x, y, 14, 14, colour)
        sheet.text(x + 19, y + 7, words, 9.5, ha="left")
        x += 36 + 5 * len(words)
    sheet.save(path)


def strip(sheet: Sheet, y: float, lanes: list[Lane], horizon: float) -> None:
    """An order's lanes, from that height down, for so many clocks."""
    scale, middle = (RIGHT - LEFT) / horizon, len(lanes[1]["S"]) // 2
    start = next(span.begin for span in spans(lanes[1]) if (span.what, span.block) == ("S issued", middle))

    def bars(these: Iterable[Span], y: float, height: float) -> None:
        ranges: dict[str, list[tuple[float, float]]] = {}
        for span in these:
            begin, end = (LEFT + scale * min(max(clock - start, 0), horizon) for clock in (span.begin, span.end))
            if begin < end:
                ranges.setdefault(COLOURS[span.what], []).append((begin, end))
                if span.what == "softmax" and end - begin > 50:
                    sheet.text((begin + end) / 2, y + height / 2, f"softmax {span.block}", 8.5)
        for colour, of in ranges.items():
            sheet.bars(of, y, height, colour)

    for i, lane in enumerate(lanes):
        sheet.text(LEFT - 8, y + BAR / 2, f"warpgroup {i - 1}" if i else "producer", 9.5, MUTED, "right")
        sheet.box(LEFT, y + BAR / 2 - 0.5, RIGHT - LEFT, 1, EDGE, EDGE, corner=0)
        bars((span for span in spans(lane) if span.what != "O"), y, BAR)
        if i:
            made = sorted(products(lane), key=lambda span: span.what)  # S, which is done first, over P V
            bars((replace(span, what=f"{span.what} issued") for span in made), y + BAR, THIN)
            y += THIN
        y += BAR + GAP


def main(argv: list[str] | None = None) -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.trace", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="measure, and write the stamps there")
    args = parser.parse_args(argv)
    if args.out:
        from bench.stamps import measure  # loads CuTe DSL

        measure(args.out)
    else:
        draw(json.loads(TRACE.read_text()))


if __name__ == "__main__":
    main()
