"""What `bench.parallel` measured on several GPUs, as the section of docs/context_parallel.md, and beside the model of
`bench.scaling`. `bench.plot` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench import runs, scaling
from bench.parallel import GRAPH
from bench.readmes import Sections, origin, ratio, table
from bench.rows import read
from bench.runs import Row
from flashzoo.parallel.costs import BACKWARD_FLOPS, BACKWARD_RATE, FORWARD_RATE, METHODS

ALONE, OURS = "auto", "parallel_auto"
"""One GPU, and the method that `auto` takes."""
NAMES = {
    ALONE: "one GPU",
    **{f"parallel_{method}": method for method in METHODS},
    OURS: "auto",
    "parallel_documents": "dealt out",
    "zigzag_halo": "halo, zigzag",
    "plain_ring": "plain ring",
    "torch_cp_allgather": "torch, all-gather",
    "torch_cp_alltoall": "torch, all-to-all",
}
"""What tables call each, in their order."""
RIVALS = {"torch's `context_parallel`": ("torch_cp_allgather", "torch_cp_alltoall"), "a plain ring": ("plain_ring",)}
PASSES = {"fwd": "forward", "fwd_bwd": "forward and backward"}
WHAT = {"": "one sequence", "documents": "documents", "balanced": "documents in balanced order"}
"""By the column `lengths`."""
ELSEWHERE = "h100-80gb-hbm3.csv"
"""The results file of GPUs that could be had several at a time."""
LONG = 32768
"""Tokens in all from which on a share of one GPU's speed is promised."""


class Cell(NamedTuple):
    """A call, causal; `tokens` are one GPU's."""

    pass_: str
    heads: int
    heads_kv: int
    head_dim: int
    lengths: str
    tokens: int

    def __str__(self) -> str:
        return f"{WHAT[self.lengths]}, {self.heads}:{self.heads_kv} heads, {PASSES[self.pass_]}"


Speeds = dict[Cell, dict[str, float]]
"""TFLOP/s of each GPU, by implementation."""


class Kind(NamedTuple):
    """Of what there is a table: one sequence or documents, a number of GPUs, and whether calls were captured in CUDA
    graphs."""

    lengths: str
    gpus: int
    captured: bool = False

    def __str__(self) -> str:
        return f"{self.gpus} GPUs, {WHAT[self.lengths]}{', in CUDA graphs' if self.captured else ''}"


def last_runs(rows: list[Row]) -> dict[Kind, list[Row]]:
    """The results of the last run of each kind."""
    mine = [row for row in runs.measured(rows) if row.get("gpus")]

    def kind_of(row: Row) -> Kind:
        return Kind(row["lengths"], int(row["gpus"]), row["impl"].endswith(GRAPH))

    of = {kind_of(row): row["run"] for row in mine if row["gpus"] != "1"}
    return {
        kind: [row for row in mine if row["run"] == run and kind_of(row)._replace(gpus=kind.gpus) == kind]
        for kind, run in sorted(of.items())
    }


def speeds(mine: list[Row], gpus: int) -> Speeds:
    """Of one run, by cell: of those that so many GPUs shared, and of one GPU with as many tokens."""
    found: Speeds = {}
    for row in mine:
        shared = int(row["gpus"])
        if shared in (1, gpus):
            heads, heads_kv, head_dim = (int(row[name]) for name in ("heads", "heads_kv", "head_dim"))
            cell = Cell(row["pass"], heads, heads_kv, head_dim, row["lengths"], int(row["seqlen_q"]) // shared)
            found.setdefault(cell, {})[row["impl"].removesuffix(GRAPH)] = float(row["tflops"]) / shared
    return dict(sorted(found.items(), key=lambda of: (bool(of[0].lengths), of[0].heads_kv, of[0].pass_, of[0].tokens)))


def measured(rows: list[Row]) -> Iterator[str]:
    """By kind: who is how fast, and the model."""
    found = last_runs(rows)
    if not found:
        yield "Not measured yet; `bench.parallel` does."
        return
    for kind, mine in found.items():
        yield from _of_run(mine, kind)


def _of_run(mine: list[Row], kind: Kind) -> Iterator[str]:
    gpus, cells = kind.gpus, speeds(mine, kind.gpus)
    there = [name for name in NAMES if any(name in cell for cell in cells.values())]
    last = mine[-1]
    yield (
        f"**{kind}.** {last['dtype']}, causal, head_dim {last['head_dim']}. {origin(last)}, commit "
        f"{last['commit']}. TFLOP/s a GPU, and in brackets over those of one GPU at as many tokens a GPU."
    )

    def shown(cell: dict[str, float], name: str) -> str:
        if name not in cell:
            return "-"
        share = f" ({cell[name] / cell[ALONE]:.1%})" if ALONE in cell and name != ALONE else ""
        return f"{cell[name]:.0f}{share}"

    lines = ((str(of), runs.length(of.tokens), *(shown(cell, name) for name in there)) for of, cell in cells.items())
    yield table(("call", "tokens a GPU", *(NAMES[name] for name in there)), lines)
    yield from _share(cells, gpus)
    yield from _over_rivals(cells)
    yield from _beside_the_model(cells, gpus)


def _share(cells: Speeds, gpus: int) -> Iterator[str]:
    """Of one GPU's speed."""
    of = {
        cell: found[OURS] / found[ALONE]
        for cell, found in cells.items()
        if {OURS, ALONE} <= found.keys() and cell.tokens * gpus >= LONG
    }
    if of:
        least = min(of, key=lambda cell: of[cell])
        where = f"{least}, {runs.length(least.tokens)} a GPU"
        yield (
            f"`auto` has this share of one GPU's speed from {runs.length(LONG)} tokens in all on, on average: "
            f"{runs.mean(list(of.values())):.1%}, the least {of[least]:.1%} ({where})."
        )


def _over_rivals(cells: Speeds) -> Iterator[str]:
    """How many times as fast as others' ways."""
    told = []
    for who, names in RIVALS.items():
        of = [
            found[OURS] / max(found[name] for name in names if name in found)
            for found in cells.values()
            if OURS in found and any(name in found for name in names)
        ]
        if of:
            faster = sum(value > 1 for value in of)
            told.append(f"{ratio(of)} as fast as {who}, faster in {faster} of {len(of)} cells")
    if told:
        yield f"`auto` is {'; '.join(told)}."


def headline(rows: list[Row]) -> Iterator[str]:
    """Of one sequence on most GPUs, trained: how fast, of one GPU and of torch's way, by tokens a GPU."""
    found = {kind: mine for kind, mine in last_runs(rows).items() if not (kind.lengths or kind.captured)}
    if not found:
        return
    kind = max(found)
    cells = {
        cell: of
        for cell, of in speeds(found[kind], kind.gpus).items()
        if cell.pass_ == "fwd_bwd" and {OURS, ALONE} <= of.keys()
    }
    heads = [*dict.fromkeys(f"{cell.heads}:{cell.heads_kv}" for cell in cells)]
    shares: dict[int, list[str]] = {}
    for cell, of in cells.items():
        shares.setdefault(cell.tokens, []).append(f"{of[OURS] / of[ALONE]:.0%}")
    told = [
        f"{' and '.join(of)} at {runs.length(tokens)}" for tokens, of in sorted(shares.items()) if len(of) == len(heads)
    ]
    last, rivals = found[kind][-1], next(_over_rivals(cells), "").replace("`auto`", "It")
    if told:
        yield (
            f"One causal sequence shared out over {kind.gpus} {last['gpu']} by `flashzoo.parallel`, forward and "
            f"backward, head_dim {last['head_dim']}: with {' and '.join(heads)} heads each GPU has, of the speed of "
            f"one that works alone, {told[0]} tokens a GPU{''.join(f', {more}' for more in told[1:])}. {rivals} "
            "[Several GPUs](docs/context_parallel.md) has all figures."
        )


def _beside_the_model(cells: Speeds, gpus: int) -> Iterator[str]:
    """Shares of one GPU's speed, of both passes, as the arithmetic has them and as they were."""
    one = (1 + BACKWARD_FLOPS) / (1 / FORWARD_RATE + BACKWARD_FLOPS / BACKWARD_RATE) / 1e12
    lines = []
    for cell, found in cells.items():
        if cell.pass_ != "fwd_bwd" or cell.lengths or cell.head_dim != scaling.HEAD_DIM or ALONE not in found:
            continue
        model = scaling.shares(gpus, cell.tokens, cell.heads, cell.heads_kv)
        each = (
            f"{model[method][0]:.1%} / {found[name] / found[ALONE]:.1%}" if method in model and name in found else "-"
            for method, name in ((method, f"parallel_{method}") for method in scaling.METHODS)
        )
        lines.append(
            (f"{cell.heads}:{cell.heads_kv}", runs.length(cell.tokens), f"{one:.0f} / {found[ALONE]:.0f}", *each)
        )
    if lines:
        yield "The model beside it, forward and backward of one sequence, by the arithmetic / as measured:"
        yield table(("heads", "tokens a GPU", "one GPU, TFLOP/s", *scaling.METHODS), lines)


def points(rows: list[Row], tokens: int, heads: int, heads_kv: int) -> dict[str, dict[int, float]]:
    """By method and number of GPUs, the measured share of one GPU's speed, of both passes of one sequence."""
    cell, found = Cell("fwd_bwd", heads, heads_kv, scaling.HEAD_DIM, "", tokens), {}
    for kind, mine in last_runs(rows).items():
        if kind.captured:
            continue
        of = speeds(mine, kind.gpus).get(cell, {})
        for method in scaling.METHODS:
            if ALONE in of and f"parallel_{method}" in of:
                found.setdefault(method, {})[kind.gpus] = of[f"parallel_{method}"] / of[ALONE]
    return found


def of_some_file(rows: list[Row]) -> list[Row]:
    """These, and of kinds that they have no run of the last that `ELSEWHERE` has."""
    here = last_runs(rows)
    there = last_runs(read(runs.RESULTS.with_name(ELSEWHERE)))
    return [*rows, *(row for kind, mine in there.items() if kind not in here for row in mine)]


SECTIONS: dict[str, Sections] = {
    "docs/context_parallel.md": {"measured": lambda rows: measured(of_some_file(rows))},
    "README.md": {"parallel": lambda rows: headline(of_some_file(rows))},
}
"""By file, from the root, then by the name of the section."""
