"""The tables of docs/learn: the papers' lines beside the code that carries their numbers, bytes and speeds from the
results file, clocks from the model of `bench.orders`. `bench.plot` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import product

from bench import runs, trace, traffic
from bench.orders import ORDERS
from bench.readmes import ROOT, Sections, origin, table
from bench.runs import Row

DEVICE = {"v1": "kernels.py", "v2": "kernels.py", "v3": "forward.py", "blocksparse": "kernels.py"}
"""The file of each version that its paper's lines are in."""
LABEL = r"\b[AB]\d+\.\d+\b"
FORWARD_V2 = (
    "A1.5 -, - A1.4, A1.2 A1.5, - A1.6, A1.6 A1.7, A1.7 -, A1.8 -, A1.9 A1.8, A1.10 A1.9, A1.12 A1.10, A1.13 -, "
    "- A1.12, - A1.13, A1.16 A1.14, - A1.15"
)
BACKWARD_V2 = (
    "- B2.4, B1.6 -, B1.7 B2.6, B1.8 B2.7, B1.9 B2.8, B1.10 B2.9, B1.11 B2.10, B1.13 B2.11, B1.16 B2.12, B1.17 B2.13, "
    "B1.19 -, B1.20 B2.14, B1.21 B2.15, B1.22 B2.16, B1.24 B2.18"
)
FORWARD_V3 = (
    "- A2.1, A1.4 A2.3, A1.5 A2.2, - A2.4, - A2.5, - A2.6, A1.6 A2.7, A1.7 A2.8, A1.8 A2.9, - A2.10, A1.10 A2.11, "
    "- A2.12, A1.9 A2.13, - A2.14, - A2.15, - A2.16, - A2.18, - A2.19, A1.12 A2.20, A1.14 A1.25"
)
PRODUCER_V3 = "- A1.2, - A1.3, A1.4 A1.4, A1.6 A1.6, - A1.7, A1.7 A1.8"
FORWARD_SPARSE = (
    "A1.4 A1.4, A1.5 A1.5, A1.6 A1.6, - A5.8, A1.7 A1.7, A1.8 A1.8, - A5.11, A1.9 A1.9, A1.10 A1.10, A1.12 A1.12, "
    "A1.13 A1.13, A1.14 A1.14, A1.15 A1.15"
)
MEASURED = {"fa2": "v3_serial", "overlap": "v3_overlap", "ping_pong": "v3_ping_pong", "both": "v3_ping_pong_overlap"}
"""The orders of the loop that v3 was timed with, by the implementation's name."""


@cache
def lines(version: str) -> dict[str, tuple[int, str]]:
    """Number and code of the line that a paper's line number marks; where it marks several, of the first."""
    found: dict[str, tuple[int, str]] = {}
    text = (ROOT / "flashzoo" / version / DEVICE[version]).read_text().splitlines()
    for number, line in enumerate(text, 1):
        code, _, comment = line.partition("#")
        for label in re.findall(LABEL, comment):
            at = number if code.strip() else number + 1
            found.setdefault(label, (at, text[at - 1].partition("  #")[0].strip()))
    return found


@cache
def says(version: str) -> dict[str, str]:
    """What each of the paper's lines says, as the version's README has it."""
    text = (ROOT / "flashzoo" / version / "README.md").read_text()
    found = dict(re.findall(rf"^\| ({LABEL}) \| (.*?) \|", text, re.MULTILINE))
    return {label: found.get(words.removeprefix("as "), words) for label, words in found.items()}


def cell(version: str, label: str) -> str:
    """A paper's line number as a link to the code, and the code."""
    if label == "-":
        return ""
    number, code = lines(version)[label]
    return f"[{label}](flashzoo/{version}/{DEVICE[version]}#L{number}) `{code}`"


def alone(_: list[Row], version: str, kind: str) -> Iterator[str]:
    """Every line of one version's Algorithm A or B."""
    mine = [label for label in says(version) if label.startswith(kind)]
    yield table(("the paper's line", version), ([says(version)[label], cell(version, label)] for label in mine))


def side_by_side(_: list[Row], first: str, second: str, pairs: str) -> Iterator[str]:
    """Lines of two versions that do the same beside each other.

    Args:
        pairs: line numbers of both, in the order of the second's algorithm; - where one has none.
    """
    both = [pair.split() for pair in pairs.split(", ")]
    yield table(
        ("what is done", first, second),
        ([says(second).get(b) or says(first)[a], cell(first, a), cell(second, b)] for a, b in both),
    )


def moved(rows: list[Row], versions: tuple[str, ...]) -> Iterator[str]:
    """Bytes of forward calls: counted in the algorithm, and by DRAM's counters."""
    mine = runs.of_last([row for row in runs.measured(rows) if row["pass"] == f"{runs.TRAFFIC}fwd"])
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in mine:
        cells.setdefault((row["head_dim"], row["seqlen_q"]), {})[row["impl"]] = row

    def shown(row: Row) -> Iterable[str]:
        return f"{traffic.counted(row['impl'], runs.problem_of(row)) / 2**20:,.0f}", f"{float(row['dram_mib']):,.0f}"

    yield (
        f"MiB of one forward call, bf16, 16k tokens in all, hidden 2048: as the algorithm's tiles ask for them, and as "
        f"DRAM's counters saw them. {origin(mine[0])}. Q, K, V and O alone are 256 MiB."
    )
    head = (f"{version}, {what}" for version, what in product(versions, ("asked", "DRAM")))
    yield table(
        ("head_dim", "seqlen", *head),
        ([*key, *(text for version in versions for text in shown(of[version]))] for key, of in cells.items()),
    )


def clocks(_: list[Row], names: tuple[str, ...]) -> Iterator[str]:
    """What the model says of some orders of the loop."""
    yield table(
        ("order", "SM clocks for 64 queries and 128 keys", "of these the tensor cores multiply"),
        ([ORDERS[name].title, f"{ORDERS[name].step():.0f}", f"{ORDERS[name].busy():.0%}"] for name in names),
    )


def clocks_and_speeds(rows: list[Row]) -> Iterator[str]:
    """The same, and what v3 reached in each order."""
    asked = [row for row in runs.measured(rows) if row["impl"] in MEASURED.values() and row["head_dim"] == "128"]
    mine = runs.of_last([row for row in asked if row["pass"] == "fwd"])
    speeds = {row["impl"]: float(row["tflops"]) for row in mine}
    yield (
        f"Clocks are the model's; TFLOP/s are v3's, measured with its overlaps switched on and off, "
        f"{mine[0]['dtype']}, seqlen {mine[0]['seqlen_q']}, head dim 128, no mask. {origin(mine[0])}."
    )
    yield table(
        ("order", "SM clocks for 64 queries and 128 keys", "of these the tensor cores multiply", "v3, TFLOP/s"),
        (
            [
                "neither" if name == "fa2" else ORDERS[name].title,
                f"{ORDERS[name].step():.0f}",
                f"{ORDERS[name].busy():.0%}",
                f"{speeds[impl]:.0f}",
            ]
            for name, impl in MEASURED.items()
        ),
    )


def by_density(rows: list[Row]) -> Iterator[str]:
    """Time of blocksparse over v2's without a mask."""
    run = runs.sparse_run(rows)
    assert run is not None
    sizes = [size for size in run.ms if size[1] == 128]
    yield (
        f"Speed-up of `blocksparse` with random blocks over v2 without a mask, {run.rows[0]['dtype']}, head dim 128. "
        f"{origin(run.rows[0])}."
    )
    yield table(
        ("blocks kept", "at best", *(f"{runs.WORDS[pass_]}, {runs.length(n)}" for pass_, _, n in sizes)),
        (
            [f"1/{n}", f"{n}x", *(f"{run.speedup(size, f'random/{n}', 'blocksparse'):.2f}x" for size in sizes)]
            for n in (2, 4, 8, 16)
        ),
    )


SECTIONS: dict[str, Sections] = {
    "docs/learn/v1.md": {
        "forward": partial(alone, version="v1", kind="A"),
        "backward": partial(alone, version="v1", kind="B"),
        "bytes": partial(moved, versions=("standard", "v1")),
        "clocks": partial(clocks, names=("fa1",)),
    },
    "docs/learn/v2.md": {
        "forward": partial(side_by_side, first="v1", second="v2", pairs=FORWARD_V2),
        "backward": partial(side_by_side, first="v1", second="v2", pairs=BACKWARD_V2),
        "bytes": partial(moved, versions=("v1", "v2")),
        "clocks": partial(clocks, names=("fa1", "fa2")),
    },
    "docs/learn/v3.md": {
        "consumer": partial(side_by_side, first="v2", second="v3", pairs=FORWARD_V3),
        "producer": partial(side_by_side, first="v2", second="v3", pairs=PRODUCER_V3),
        "bytes": partial(moved, versions=("v2", "v3")),
        "clocks": clocks_and_speeds,
        "trace": lambda _: trace.section(),
    },
    "docs/learn/blocksparse.md": {
        "forward": partial(side_by_side, first="v2", second="blocksparse", pairs=FORWARD_SPARSE),
        "density": by_density,
    },
}
"""By file, from the root, then by the name of the section."""
