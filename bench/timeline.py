"""The time line of v3's forward kernel, from a small model of its order and its waits: flashzoo/v3/timeline.svg.
`python -m bench.timeline`. `bench.orders` draws simpler loops by the same model.

One thread block, two consumer warpgroups, two tiles of queries. Times are in SM clocks, for head_dim 128 and blocks of
128 keys. Products and softmax take what they take alone; loads and the epilogue are rough. Products have the tensor
cores one at a time. The kernel passes the turn on when both products are issued; the picture shows it where it takes
effect, when both are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# of keys for each tile; numbered in the order of use through both tiles, and drawn with their index in memory
BLOCKS = 4
SLOTS = 2  # for K, and for V
CLOCKS = {"K": 600, "V": 600, "Q": 300, "S": 512, "PV": 512, "softmax": 900, "O/l": 400, "O": 300}

Task = tuple[str, int, int]  # what; of which block, or for Q, O/l and O of which tile; by which warpgroup
Times = dict[Task, tuple[int, int]]
OUT = Path(__file__).parent.parent / "flashzoo" / "v3" / "timeline.svg"
WIDTH, HEIGHT, LEFT, RIGHT, BOX, THIN = 900, 324, 186, 882, 26, 16  # pixels
ROWS = {"TMA": 52, "softmax0": 97, "tensor0": 126, "tensor1": 171, "softmax1": 200, "both": 245}  # upper edges
NAMES = {65: "Producer warp", 124.5: "Warpgroup 0", 198.5: "Warpgroup 1", 253: "Both"}
TEXT, MUTED, PANEL, EDGE, BAND, LOAD = "#1f2937", "#5b6472", "#fbfcfd", "#d5dae1", "#e9ecf1", "#c9d0d9"
COLOURS = (
    {"S": "#2b69b0", "PV": "#74a9df", "softmax": "#d0e3f6"},
    {"S": "#c05c08", "PV": "#f2aa5c", "softmax": "#fce2c6"},
)
LEGEND = {"S": (196, "S3 = Q K3ᵀ"), "PV": (346, "PV3: O += P3 V3"), "softmax": (523, "softmax 3: S3 → P3")}


def programs() -> dict[str, list[Task]]:
    """What each lane does, in its order."""
    lanes: dict[str, list[Task]] = {lane: [] for lane in ROWS if lane != "both"}
    for tile in range(2):
        first, *rest = blocks = range(tile * BLOCKS, (tile + 1) * BLOCKS)
        lanes["TMA"] += [("K", first, 0), ("Q", tile, 0), ("Q", tile, 1)]
        lanes["TMA"] += [load for n in rest for load in (("K", n, 0), ("V", n - 1, 0))] + [("V", blocks[-1], 0)]
        for w in range(2):
            steps = [product for n in rest for product in (("S", n, w), ("PV", n - 1, w))]
            lanes[f"tensor{w}"] += [("S", first, w), *steps, ("PV", blocks[-1], w)]
            lanes[f"softmax{w}"] += [("softmax", n, w) for n in blocks] + [("O/l", tile, w), ("O", tile, w)]
    return lanes


def waits(task: Task) -> list[Task]:
    """What must be done before a task, apart from what its lane does before it."""
    what, n, w = task
    if what in "KV":  # K's slot is free after S, V's after PV and the softmax that runs over it, of both warpgroups
        over = [("softmax", n - SLOTS + 1, i) for i in range(2)] if what == "V" and (n - SLOTS + 1) % BLOCKS else []
        return [("S" if what == "K" else "PV", n - SLOTS, i) for i in range(2)] + over
    if what == "S" and n % BLOCKS == 0:
        return [("K", n, 0), ("Q", n // BLOCKS, w), ("O/l", n // BLOCKS - 1, w)]
    if what == "S":  # and the turn, which the other passes after the PV of its step
        return [("K", n, 0), ("softmax", n - 1, w), ("PV", n - 1 if w else n - 2 if n % BLOCKS > 1 else n - 3, 1 - w)]
    if what == "PV":
        return [("softmax", n, w), ("V", n, 0)]
    return [
        {
            "Q": ("softmax", n * BLOCKS - 1, w),
            "softmax": ("S", n, w),
            "O/l": ("PV", (n + 1) * BLOCKS - 1, w),
            "O": ("O/l", n, w),
        }[what]
    ]


def simulate(
    programs: Mapping[str, list[Task]], waits: Callable[[Task], list[Task]], clocks: Mapping[str, int] = CLOCKS
) -> Times:
    """Start and end of each task. What can start first does; of two that can at once, the one that
    has waited longer.

    Args:
        programs: what each lane does, in its order; lanes whose names begin with "tensor" take turns.
        waits: what must be done before a task, apart from what its lane does before it; what no lane does is not
            waited for.
        clocks: how long a task takes, by the first of its names.
    """
    lanes, times = {lane: list(tasks) for lane, tasks in programs.items()}, Times()
    every, free = {task for tasks in lanes.values() for task in tasks}, dict.fromkeys(lanes, 0)
    while any(lanes.values()):
        heads = {lane: every.intersection(waits(tasks[0])) for lane, tasks in lanes.items() if tasks}
        ready = {
            lane: max((times[task][1] for task in before), default=0)
            for lane, before in heads.items()
            if before <= times.keys()
        }
        start, _, lane = min((max(since, free[lane]), since, lane) for lane, since in ready.items())
        task = lanes[lane].pop(0)
        times[task] = start, start + clocks[task[0]]
        together = [other for other in lanes if other.startswith("tensor")] if lane.startswith("tensor") else [lane]
        free |= dict.fromkeys(together, times[task][1])
    return times


class Sheet:
    """A drawing in pixels, from the upper left."""

    def __init__(self, width: int, height: int) -> None:
        from matplotlib import figure

        self.canvas = figure.Figure((width / 96, height / 96), facecolor="none")
        self.axes = self.canvas.add_axes(
            (0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), frame_on=False, xticks=(), yticks=()
        )
        self.box(1, 1, width - 2, height - 2, PANEL, EDGE, corner=10)

    def text(
        self, x: float, y: float, words: str, size: float = 9.5, colour: str = TEXT, ha: str = "center", **more: Any
    ) -> None:
        """Words around a height, at, behind or before a place."""
        self.axes.text(x, y, words, fontsize=0.75 * size, color=colour, ha=ha, va="center_baseline", **more)

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        colour: str,
        edge: str = PANEL,
        alpha: float = 1,
        corner: float = 3,
    ) -> None:
        """A rectangle with round corners."""
        from matplotlib import patches

        shape = f"round,pad=0,rounding_size={corner}"
        self.axes.add_patch(patches.FancyBboxPatch((x, y), w, h, shape, fc=colour, ec=edge, lw=0.8, alpha=alpha))

    def bars(self, ranges: Iterable[tuple[float, float]], y: float, height: float, colour: str) -> None:
        """Rectangles side by side, from x to x each, as one shape, which keeps the file small."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Shape

        lower = y + height
        corners = [at for a, b in ranges for at in ((a, y), (b, y), (b, lower), (a, lower), (a, y))]
        codes = [Shape.MOVETO, *[Shape.LINETO] * 3, Shape.CLOSEPOLY] * (len(corners) // 5)
        self.axes.add_patch(PathPatch(Shape(corners, codes), fc=colour, lw=0))

    def save(self, path: Path) -> None:
        """As SVG with words in it, the same bytes for the same drawing."""
        from matplotlib import rc_context

        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flashzoo"}):
            self.canvas.savefig(path, metadata={"Date": None, "Creator": None})


def draw(times: Times) -> None:
    """The first tile, and faded the next one to the end of its first softmax."""
    sheet, horizon = Sheet(WIDTH, HEIGHT), times["softmax", BLOCKS, 1][1]
    text, box, scale = sheet.text, sheet.box, (RIGHT - LEFT) / horizon
    start, end = (times["S", n, 0][0] for n in (2, 3))
    box(LEFT + scale * start, 11, scale * (end - start), ROWS["both"] + THIN - 5, BAND, BAND)
    text(LEFT + scale * (start + end) / 2, 23, "one step", weight="bold")
    text(LEFT + scale * (start + end) / 2, 38, f"{end - start} SM clocks", 9, MUTED)
    text(LEFT + scale * times["K", BLOCKS, 0][0], 38, "next tile, faded", 9, MUTED, "left")
    for lane, (what, n, w) in (
        (lane, task) for lane, tasks in programs().items() for task in tasks if times[task][1] <= horizon
    ):
        start, end = times[what, n, w]
        x, width, y, per_block = LEFT + scale * start, scale * (end - start), ROWS[lane], what not in ("Q", "O/l", "O")
        alpha = 0.4 if n >= (BLOCKS if per_block else 1) else 1
        colour = LOAD if what in "KVQO" else COLOURS[w].get(what, COLOURS[w]["softmax"])
        label = f"{what}{' ' * (what == 'softmax')}{BLOCKS - 1 - n % BLOCKS if per_block else w if what == 'Q' else ''}"
        box(x, y, width, BOX, colour, alpha=alpha)
        text(x + width / 2, y + BOX / 2, label, 9, PANEL if what == "S" and alpha == 1 else TEXT, alpha=0.5 + alpha / 2)
        if "tensor" in lane:
            box(x, ROWS["both"], width, THIN, colour, alpha=alpha)
        if what == "PV" and times.get(("S", n + 1 + w, 1 - w), (0,))[0] == end:
            ends = [(x + width, ROWS["tensor0"] + BOX + 2), (x + width, ROWS["tensor1"] - 2)]
            sheet.axes.annotate(
                "", ends[1 - w], ends[w], arrowprops={"arrowstyle": "-|>", "color": TEXT, "shrinkA": 0, "shrinkB": 0}
            )
    for y, name in NAMES.items():
        text(16, y, name, 11, ha="left", weight="bold")
    for y, name in zip(
        ROWS.values(), ("TMA", "CUDA cores", "tensor cores", "tensor cores", "CUDA cores", "tensor cores"), strict=True
    ):
        text(LEFT - 10, y + (THIN if y == ROWS["both"] else BOX) / 2, name, colour=MUTED, ha="right")
    box(16, 287, 14, 14, LOAD)
    text(35, 294, "TMA: loads, store of O", 10, ha="left")
    for what, (x, words) in LEGEND.items():
        for w in range(2):
            box(x + 15 * w, 287, 14, 14, COLOURS[w][what])
        text(x + 35, 294, words, 10, ha="left")
    text(717, 294, "↑↓ the turn passes (barrier)", 10, ha="left")
    sheet.save(OUT)


if __name__ == "__main__":
    draw(simulate(programs(), waits))
