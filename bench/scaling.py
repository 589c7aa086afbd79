"""What sharing a sequence over more GPUs costs, by the arithmetic of `flashzoo.parallel.explain`: the table and the
picture of docs/context_parallel.md. `python -m bench.scaling` writes both. Nothing is measured here, but what
`bench.parallel` measured is drawn too.

Each GPU has as many tokens whatever their number. What is shown is the share of its time that a GPU works at one GPU's
rate: the FLOPs of its part over these and what it loses. Two levels: NVLink joins 8 GPUs, InfiniBand the hosts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.lengths import lengths
from bench.readmes import place
from bench.rows import read
from bench.runs import RESULTS, Row
from flashzoo.parallel.costs import (
    BACKWARD_FLOPS,
    BACKWARD_RATE,
    FORWARD_RATE,
    HOST,
    Costs,
    Sizes,
    pairs,
)
from flashzoo.parallel.costs import METHODS as OF_ALL
from flashzoo.parallel.documents import dealt
from flashzoo.parallel.packing import balanced, longest_across, works
from flashzoo.parallel.ulysses import copies_of

METHODS = {name: cost for name, cost in OF_ALL.items() if name != "halo"}
"""Those that take one sequence."""
PAGE = Path(__file__).parent.parent / "docs" / "context_parallel.md"
PICTURE = PAGE.with_name("context_parallel.png")
ORDERED = (2, 4, 8)
"""GPUs over which documents are packed."""
GPUS, SHOWN = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), (2, 4, 8, 64, 1024)
TOKENS, DRAWN = (8192, 32768, 131072), 32768
"""Tokens of one GPU."""
HEADS, HEAD_DIM = ((32, 8), (32, 32)), 128
FITS = 100e9
"""Bytes of keys and values that may lie in a GPU of 141 GB beside a rank's own rows."""
COLOURS = {"gather": "#2b69b0", "ulysses": "#c05c08", "ring": "#5b8c3a"}


def sizes_of(gpus: int, tokens: int, heads: int, heads_kv: int) -> Sizes:
    """A causal call of both passes, bf16, so many tokens on each GPU."""
    seqlen = tokens * gpus
    return Sizes(1, seqlen, seqlen, heads, heads_kv, HEAD_DIM, HEAD_DIM, 2, (None, 0), False, gpus, 2, True)


def efficiency(costs: Costs, sizes: Sizes) -> float:
    """The share of its time that a GPU works."""
    flops = sizes.flops(pairs(sizes.seqlen_q, sizes.seqlen_k, sizes.band)) / sizes.ranks
    work = flops / FORWARD_RATE + BACKWARD_FLOPS * flops / BACKWARD_RATE
    return work / (work + costs.lost)


def shares(gpus: int, tokens: int, heads: int, heads_kv: int) -> dict[str, tuple[float, Costs]]:
    """The share and the costs of each method that can: of Ulysses where there are heads for all."""
    sizes = sizes_of(gpus, tokens, heads, heads_kv)
    every = {name: cost(sizes, copies_of(heads_kv, gpus)) for name, cost in METHODS.items()}
    return {
        name: (efficiency(costs, sizes), costs)
        for name, costs in every.items()
        if name != "ulysses" or not heads % gpus
    }


def table() -> str:
    """Markdown: a row for each size, a column for each method, the best of those that fit in bold."""
    lines = [
        f"| heads | tokens a GPU | GPUs | {' | '.join(METHODS)} | keys and values held, GB |",
        "|---" * (4 + len(METHODS)) + "|",
    ]
    for heads, heads_kv in HEADS:
        for tokens in TOKENS:
            for gpus in SHOWN:
                found = shares(gpus, tokens, heads, heads_kv)
                fit = {name: share for name, (share, costs) in found.items() if costs.held <= FITS}
                best, texts, held = max(fit.values()), [], []
                for name in METHODS:
                    if name not in found:
                        texts.append("too few heads")
                        held.append("-")
                        continue
                    share, costs = found[name]
                    text = f"{share:.1%}" if name in fit else f"({share:.1%})"
                    texts.append(f"**{text}**" if fit.get(name) == best else text)
                    held.append(f"{costs.held / 1e9:.2g}")
                lines.append(
                    f"| {heads}:{heads_kv} | {tokens // 1024}k | {gpus} | {' | '.join(texts)} | {', '.join(held)} |"
                )
    return "\n".join(lines)


def table_of_orders() -> str:
    """Markdown: the mean rank's work over the busiest's, of the benchmark's documents as drawn and balanced, with the
    rows of the longest that shards share; and dealt out, with how many all ranks share."""
    lines = ["| tokens a GPU |" + "".join(f" {gpus} GPUs |" for gpus in ORDERED), "|---" * (1 + len(ORDERED)) + "|"]
    for tokens in (8192, 16384, 32768, 65536):
        cells = []
        for gpus in ORDERED:
            drawn = lengths("documents", tokens * gpus)
            orders = drawn, [drawn[i] for i in balanced(drawn, gpus)]
            even = [sum(work) / gpus / max(work) for work in (works(order, gpus) for order in orders)]
            shared = [longest_across(order, gpus) for order in orders]
            deal = dealt(drawn, gpus)
            even.append(sum(deal.works) / gpus / max(deal.works))
            shared.append(len(deal.shared))
            cells.append(" -> ".join(f"{share:.2f} ({of})" for share, of in zip(even, shared, strict=True)))
        lines.append(f"| {tokens // 1024}k | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row]) -> Any:
    """Shares by the number of GPUs, a panel for each layout of heads, and as crosses those that rows of a results file
    have."""
    from matplotlib.figure import Figure

    from bench.several import of_some_file, points

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(HEADS), sharey=True)
    for axes, (heads, heads_kv) in zip(panels, HEADS, strict=True):
        for name in METHODS:
            every = {gpus: shares(gpus, DRAWN, heads, heads_kv).get(name) for gpus in GPUS}
            found = {gpus: share for gpus, share in every.items() if share}
            inside = {gpus: share for gpus, (share, costs) in found.items() if costs.held <= FITS}
            axes.plot(found.keys(), [share for share, _ in found.values()], ":", color=COLOURS[name], linewidth=1)
            axes.plot(inside.keys(), inside.values(), "o-", color=COLOURS[name], label=name, markersize=4)
        for name, shown in points(of_some_file(rows), DRAWN, heads, heads_kv).items():
            axes.plot(shown.keys(), shown.values(), "x", color=COLOURS[name], label=f"{name}, measured", markersize=8)
        axes.axvline(HOST, color="#c9d0d9", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
        axes.set_title(f"{heads}:{heads_kv} heads, head_dim {HEAD_DIM}", fontsize=10)
        axes.set_xlabel(f"GPUs, {DRAWN // 1024}k tokens each")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of one GPU's speed")
    panels[0].legend(frameon=False)
    return figure


def main() -> int:
    """Write the tables into the page, and the picture beside it."""
    text = PAGE.read_text()
    for name, of in (("model", table), ("orders", table_of_orders)):
        text = place(text, name, of())
    PAGE.write_text(text)
    draw(read(RESULTS)).savefig(PICTURE, dpi=120, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
