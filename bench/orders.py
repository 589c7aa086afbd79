"""Who waits for whom in one attention loop, FlashAttention-1 to 3: the pictures of docs/learn, by the model of
`bench.timeline`. `python -m bench.orders`

A warpgroup has 64 queries, a block 128 keys; the head dim is 128 unless said. Each order of the loop is what its paper
writes down, alone on a multiprocessor: loads, products and softmax take what they take alone, and issuing, barriers and
launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import timeline
from bench.timeline import BAND, COLOURS, EDGE, LOAD, MUTED, PANEL, TEXT, Sheet, Task, Times, simulate

FOLDER = Path(__file__).parent.parent / "docs" / "learn"
HEAD_DIM = 128
CLOCKS = {**timeline.CLOCKS, "K, V": 1200, "Q, O": 900, "O, l": 600}
"""SM clocks of a task. FA-1's O is in float32: written it is twice Q, and read with Q three times."""
LONG = 12
"""Steps after which a loop has long been regular."""
WIDTH, LEFT, RIGHT, ROW, GAP, TITLE = 900, 128, 884, 20, 4, 26  # pixels

LABELS = {"softmax": "softmax {n}", "Q, O": "Q{n}, O{n}", "O, l": "O{n}"}
LABELS |= {once: once for once in ("Q", "O", "O/l", "K, V")}
"""What a task is called in a picture, where that is not its name and its number."""

Plan = list[tuple[str, Task, list[Task]]]
"""Lane, what it does, and what that waits for; each lane in its order."""


def clocks(head_dim: int) -> dict[str, int]:
    """SM clocks of each task at a head dim, with which all but softmax grows."""
    return {what: taken if what == "softmax" else taken * head_dim // HEAD_DIM for what, taken in CLOCKS.items()}


def fa1(blocks: Sequence[int]) -> Plan:
    """One block of keys stays on chip; each block of queries is read with its O, which is written back."""
    plan: Plan = [("memory", ("K, V", 0, 0), [])]
    for i in blocks:
        read, s, softmax, pv, written = ((what, i, 0) for what in ("Q, O", "S", "softmax", "PV", "O, l"))
        plan += [("memory", read, []), ("tensor0", s, [read]), ("softmax0", softmax, [s]), ("tensor0", pv, [softmax])]
        plan += [("memory", written, [pv])]
    return plan


def loads(blocks: Sequence[int], warpgroups: int = 1) -> Plan:
    """Q once, then K and V block by block, each into one of two slots as all warpgroups have left it."""
    plan: Plan = [("memory", ("Q", 0, w), []) for w in range(warpgroups)]
    for n, before in zip(blocks, [None, None, *blocks], strict=False):
        for what, by in (("K", "S"), ("V", "PV")):
            left = [] if before is None else [(by, before, w) for w in range(warpgroups)]
            plan.append(("memory", (what, n, 0), left))
    return plan


def fa2(blocks: Sequence[int]) -> Plan:
    """One block of queries stays on chip with its O, and K and V stream by: S, softmax and P V one after the other."""
    plan = loads(blocks)
    for n in blocks:
        s, softmax, pv = ((what, n, 0) for what in ("S", "softmax", "PV"))
        plan += [("tensor0", s, [("K", n, 0), ("Q", 0, 0)]), ("softmax0", softmax, [s])]
        plan += [("tensor0", pv, [softmax, ("V", n, 0)])]
    divided = ("O/l", 0, 0)
    return [*plan, ("softmax0", divided, [("PV", blocks[-1], 0)]), ("memory", ("O", 0, 0), [divided])]


def fa3(blocks: Sequence[int], overlap: bool, warpgroups: int) -> Plan:
    """FlashAttention-3's two overlaps.

    Args:
        overlap: inside of a warpgroup: S of the next block is issued before P V of this one, under which its softmax
            then runs.
        warpgroups: of two, one multiplies while the other is at its softmax (ping-pong).
    """
    plan = loads(blocks, warpgroups)

    def turn(i: int) -> list[tuple[str, int]]:
        """The products that a warpgroup issues in one go once the i-th block has its P."""
        products = [("PV", blocks[i]), *(("S", n) for n in blocks[i + 1 : i + 2])]
        return products[::-1] if overlap else products

    for w in range(warpgroups):
        plan += [(f"tensor{w}", ("S", blocks[0], w), [("K", blocks[0], 0), ("Q", 0, w)])]
        for i, n in enumerate(blocks):
            *_, others = turn(i) if w else turn(i - 1) if i else [("S", n)]  # no such product where there is one group
            before = [("softmax", n, w), (*others, 1 - w)]
            plan.append((f"softmax{w}", ("softmax", n, w), [("S", n, w)]))
            for what, m in turn(i):
                plan.append((f"tensor{w}", (what, m, w), [*before, ("K" if what == "S" else "V", m, 0)]))
                before = before[:1]
    return plan


@dataclass(frozen=True)
class Order:
    """One way to run the loop: its name, its warpgroups, and its plan for blocks with these numbers."""

    title: str
    warpgroups: int
    plan: Callable[[Sequence[int]], Plan]

    def times(self, blocks: Sequence[int], head_dim: int = HEAD_DIM) -> Times:
        """Start and end of every task."""
        plan = self.plan(blocks)
        lanes: dict[str, list[Task]] = {}
        for lane, task, _ in plan:
            lanes.setdefault(lane, []).append(task)
        waits = {task: before for _, task, before in plan}
        return simulate(lanes, waits.__getitem__, clocks(head_dim))

    def step(self, head_dim: int = HEAD_DIM) -> float:
        """SM clocks for one warpgroup's queries and one block of keys, once the loop is regular."""
        times = self.times(range(LONG), head_dim)
        return (times["S", LONG - 2, 0][0] - times["S", LONG - 6, 0][0]) / 4 / self.warpgroups

    def busy(self, head_dim: int = HEAD_DIM) -> float:
        """The share of its time that the tensor cores multiply."""
        return (clocks(head_dim)["S"] + clocks(head_dim)["PV"]) / self.step(head_dim)


ORDERS = {
    "fa1": Order("FA-1", 1, fa1),
    "fa2": Order("FA-2", 1, fa2),
    "overlap": Order("FA-3, overlap alone", 1, lambda blocks: fa3(blocks, True, 1)),
    "ping_pong": Order("FA-3, ping-pong alone", 2, lambda blocks: fa3(blocks, False, 2)),
    "both": Order("FA-3, both", 2, lambda blocks: fa3(blocks, True, 2)),
}


def strip(sheet: Sheet, top: float, order: Order, blocks: Sequence[int], horizon: int, step: int | None) -> float:
    """Draw one order's lanes under its title, and the step from that place in the list of blocks; returns the lower
    edge."""
    times, scale = order.times(blocks), (RIGHT - LEFT) / horizon
    lanes = ["memory", "tensor", *(f"softmax{w}" for w in range(order.warpgroups))]
    names = {"memory": "memory", "tensor": "tensor cores", "softmax0": "CUDA cores", "softmax1": "CUDA cores"}
    y = {lane: top + TITLE + i * (ROW + GAP) for i, lane in enumerate(lanes)}
    bottom = top + TITLE + len(lanes) * (ROW + GAP)
    sheet.text(16, top + 12, order.title, 11, ha="left", weight="bold")
    if step is not None:
        start, end = (times["S", n, 0][0] for n in blocks[step : step + 2])
        sheet.box(LEFT + scale * start, top + 1, scale * (end - start), bottom - top - 1, BAND, BAND)
        words = f"{end - start} clocks" + (f" for {order.warpgroups} warpgroups" if order.warpgroups > 1 else "")
        sheet.text(LEFT + scale * (start + end) / 2, top + 12, words, 9.5, MUTED)
    for lane in lanes:
        sheet.text(LEFT - 8, y[lane] + ROW / 2, names[lane], 9.5, MUTED, "right")
        sheet.box(LEFT, y[lane] + ROW / 2 - 0.5, RIGHT - LEFT, 1, EDGE, EDGE, corner=0)
    for lane, (what, n, w), _ in order.plan(blocks):
        start, end = times[what, n, w]
        if end > horizon:
            continue
        row = "tensor" if lane.startswith("tensor") else lane
        colour = COLOURS[w].get(what, COLOURS[w]["softmax"] if what == "O/l" else LOAD)
        x, width = LEFT + scale * start, scale * (end - start)
        sheet.box(x, y[row], width, ROW, colour)
        label = LABELS.get(what, f"{what}{{n}}").format(n=n)
        sheet.text(x + width / 2, y[row] + ROW / 2, label, 8.5, PANEL if what == "S" else TEXT)
    return bottom


def draw(path: Path, strips: Iterable[tuple[Order, Sequence[int], int | None]], horizon: int) -> None:
    """A picture of some orders below one another, in one scale of time."""
    strips = list(strips)
    rows = sum(2 + order.warpgroups for order, _, _ in strips)
    sheet, y = Sheet(WIDTH, 16 + rows * (ROW + GAP) + len(strips) * (TITLE + 14)), 8.0
    for order, blocks, step in strips:
        y = strip(sheet, y, order, blocks, horizon, step) + 14
    sheet.save(path)


def main() -> None:
    """All four pictures."""
    every = range(LONG)
    fa1, fa2, overlap, ping_pong, both = ((order, every, 1 if name == "fa1" else 2) for name, order in ORDERS.items())
    FOLDER.mkdir(exist_ok=True)
    draw(FOLDER / "v1.svg", [fa1], 9000)
    draw(FOLDER / "v2.svg", [fa1, fa2], 9000)
    draw(FOLDER / "v3.svg", [fa2, overlap, ping_pong, both], 8000)
    dense, kept = (
        (Order(title, 1, plan.plan), blocks, None)
        for title, blocks in (("FA-2, all six blocks", range(6)), ("block-sparse, the two that are kept", (1, 4)))
        for plan in (ORDERS["fa2"],)
    )
    draw(FOLDER / "blocksparse.svg", [dense, kept], 13500)


if __name__ == "__main__":
    main()
