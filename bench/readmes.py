"""The figures in READMEs and pages of docs, made from results files; the tables of versions, from Specs.

A page's section `name` is what stands between `<!-- name:begin -->` and `<!-- name:end -->`; `bench.plot` writes all.
Links in a section are written from the repository's root.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import fill

import flashzoo
from bench import claims, runs
from bench.caches import rate
from bench.ceiling import copied
from bench.cells import DECODE
from bench.models import MODELS
from bench.peers import DECODE_PEERS
from bench.rows import COPY, key_of, read
from bench.runs import BEST_PEER, ERROR, RESULTS, Row, Speeds
from bench.scores import PLAIN
from flashzoo.call.problem import FEATURES
from flashzoo.gpu import peak_tflops

ROOT = Path(__file__).parent.parent
H100 = RESULTS.with_name("h100-80gb-hbm3.csv")

NAMES = {
    **{
        "fa4": "flash-attn-4",
        "fa3": "FlashAttention-3",
        "sdpa_cudnn": "cuDNN",
        "sdpa_flash": "torch's FA-2",
        "sdpa_efficient": "torch's memory-efficient",
        "flex": "FlexAttention",
    },
    **{
        BEST_PEER: "the fastest other library of each cell",
        "cudnn_fp8": "cuDNN's FP8",
        "v3_deterministic": "v3, deterministic",
    },
}
ERRORS = {
    "v3 fp16": ("v3 in fp16", "1.9e-4"),
    "v3 bf16": ("v3 in bf16", ""),
    "standard_per_tensor_scales e4m3": ("standard attention in FP8, a scale for each tensor", "2.4e-2"),
    "cudnn_fp8 e4m3": ("cuDNN's FP8, no scales", ""),
    "v3_fp8_per_tensor_scales e4m3": ("a scale for each tensor", ""),
    "v3_fp8_block_scales e4m3": ("block scales", "2.4e-2"),
    "v3_fp8_rotation e4m3": ("rotation", "9.3e-3"),
    "v3_fp8_rotation_block_scales e4m3": ("rotation and block scales", "9.1e-3"),
    "v3_fp8_end_to_end e4m3": ('`precision="fp8"`: rotation, block scales, smoothing', ""),
}
"""Ways to quantise, by implementation and dtype of the row: what the table calls them, and the paper's error."""
ABLATION = {
    "v3_ping_pong_overlap": ("ping-pong and overlap", "661"),
    "v3_overlap": ("overlap, no ping-pong", ""),
    "v3_ping_pong": ("ping-pong, no overlap", "582"),
    "v3_serial": ("neither", ""),
}
"""What is on, and the paper's TFLOP/s at head dim 128."""
HEAD_DIMS = (64, 128, 256)
LONGEST = runs.TOKENS


def name_of(impl: str) -> str:
    """What prose and tables call it."""
    return NAMES.get(impl, impl)


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    head = list(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def origin(row: Row) -> str:
    """Where a row is from."""
    return f"{row['gpu']}, torch {row['torch']}, triton {row['triton']}, run `{row['run']}` of {row['date']}"


def pair(cells: Speeds, head_dim: int, seqlen: int, impl: str) -> str:
    """Speeds without and with a causal mask."""
    found = [cells.get((head_dim, causal, seqlen), {}).get(impl) for causal in (False, True)]
    return " / ".join("-" if speed is None else f"{speed:.0f}" for speed in found) if any(found) else ""


def ratio(values: Iterable[float]) -> str:
    """Geometric mean and the worst."""
    values = list(values)
    return f"{runs.mean(values):.2f}x (worst {min(values):.2f}x)"


def ratio_of(rows: list[Row], impl: str, other: str, name: str) -> str:
    """Speed over another's in the cells of a table; the run must be there."""
    found = runs.over(rows, impl, other, name)
    assert found
    return ratio(found.values.values())


def over(rows: list[Row], impl: str, others: Iterable[str], name: str) -> str:
    """Speed over others', in words, which tell of what is of another run than the table."""
    table_run, told = runs.last_run(rows, name)[0]["run"], {}
    for other in others:
        found = runs.over(rows, impl, other, name)
        assert found
        told.setdefault(_of_run(found, table_run), []).append(f"{ratio(found.values.values())} {against(found)}")
    return ", ".join(", ".join(texts) + of for of, texts in told.items())


def against(found: runs.Ratios) -> str:
    """Whom a speed is over: the one peer that there was, or the fastest of several."""
    return name_of(*found.others) if len(found.others) == 1 else NAMES[BEST_PEER]


def _of_run(found: runs.Ratios, table_run: str) -> str:
    return f" ({len(found.values)} cells of `{found.run}`)" if found.run != table_run else ""


def speeds_at(rows: list[Row], name: str, impls: tuple[str, ...], lengths: tuple[int, ...]) -> str:
    """A table of speeds, a row for each head dim and length, of those who have any."""
    cells = runs.speeds(runs.last_run(rows, name))
    there = [impl for impl in impls if any(impl in cell for cell in cells.values())]
    lines = ([str(d), str(n), *(pair(cells, d, n, impl) for impl in there)] for d in HEAD_DIMS for n in lengths)
    return table(("head_dim", "seqlen", *map(name_of, there)), lines)


def what(rows: list[Row], name: str) -> str:
    """The sentence above a table of speeds."""
    mine = runs.last_run(rows, name)
    products = " and ".join(f"{speed:.0f}" for speed in runs.matmul(rows, mine[0]["run"]))
    return (
        f"{mine[0]['dtype']}, hidden 2048, 16k tokens in all; TFLOP/s without / with a causal mask. {origin(mine[0])}; "
        f"a bf16 matmul of 8192^3 in the same run: {products}."
    )


def v1(rows: list[Row]) -> Iterator[str]:
    """Forward speeds and memory."""
    yield what(rows, "fwd")
    yield speeds_at(rows, "fwd", ("v1", "standard", "v2"), (LONGEST,))
    taken = runs.speeds(runs.last_run(rows, "fwd"), "peak_mib")[128, False, LONGEST]
    said = ", ".join(f"{impl} {taken[impl]:.0f} MiB" for impl in ("v2", "v1", "standard"))
    yield f"Memory beyond the inputs, one sequence of 16k, 16 heads of head dim 128: {said}."


def v2(rows: list[Row]) -> Iterator[str]:
    """Speeds of both passes."""
    for name, word in runs.WORDS.items():
        cells = len(runs.speeds(runs.last_run(rows, name)))
        yield f"{word.capitalize()}. {what(rows, name)}"
        yield speeds_at(rows, name, ("v2", "flex", "sdpa_flash", "v1"), (LONGEST,))
        yield f"Over all {cells} cells, geometric means: {over(rows, 'v2', ('flex', 'sdpa_flash', 'v1'), name)}."


def alone(rows: list[Row], impl: str, name: str) -> Iterator[str]:
    """A sentence on speeds at settled clocks, where there are any."""
    if found := runs.over_best_alone(rows, impl, name):
        of = _of_run(found, runs.last_run(rows, name)[0]["run"])
        yield (
            f"Each alone at settled clocks, over {against(found)}: {ratio(found.values.values())}, at least 1x in "
            f"{sum(value >= 1 for value in found.values.values())} of {len(found.values)}{of}."
        )


def headline(rows: list[Row]) -> Iterator[str]:
    """Below the first page's picture: whom it shows, and v3 against other libraries where clocks have settled."""
    mine = runs.last_run(rows, "fwd")
    cells = runs.speeds(mine)
    peers = [name_of(impl) for impl in runs.impls(cells) if not runs.ours(impl)]
    fa3 = name_of("fa3")
    without = (
        f"; {fa3} in C++ was not installed in that run" if "fa3" in runs.not_installed(rows, mine[0]["run"]) else ""
    )
    yield (
        f"Forward, bf16, on one {mine[0]['gpu']}; the best other library is the fastest of {', '.join(peers[:-1])} and "
        f"{peers[-1]} at each length{without}. [Measured](docs/measured.md) says where this is from and has all other "
        f"figures, those beside {fa3} among them."
    )
    of = ("forward", "v3", "fwd"), ("backward", "v3", "bwd"), ("forward in FP8, v3_fp8", "v3_fp8", "fwd_e4m3")
    found = {word: ratios for word, impl, name in of if (ratios := runs.over_best_alone(rows, impl, name))}
    if found:
        told = "; ".join(
            f"{word} {ratio(ratios.values.values())}"
            + (f" over {against(ratios)}" if len(ratios.others) == 1 else "")
            + f" in {len(ratios.values)} cells"
            for word, ratios in found.items()
        )
        yield (
            f"The speed of v3 over that of {NAMES[BEST_PEER]} (a head dim, a length, causal or not), on one "
            f"{mine[0]['gpu']}, each alone until clocks have settled, in geometric means: {told}."
        )


def forward(rows: list[Row]) -> Iterator[str]:
    """v3's."""
    yield what(rows, "fwd")
    yield from alone(rows, "v3", "fwd")
    yield speeds_at(rows, "fwd", ("v3", "fa4", "sdpa_cudnn", "v2"), (512, 2048, LONGEST))
    yield (
        "Over all cells, geometric means: "
        f"{over(rows, 'v3', (BEST_PEER, 'fa4', 'sdpa_cudnn', 'v2', 'sdpa_flash'), 'fwd')}."
    )


def ablation(rows: list[Row]) -> Iterator[str]:
    """Ping-pong and overlap each on and off; of each head dim the last run."""
    mine = [row for row in runs.measured(rows) if row["impl"] in ABLATION and row["pass"] == "fwd"]
    last = {d: runs.of_last([row for row in mine if row["head_dim"] == str(d)]) for d in HEAD_DIMS}
    found = {
        d: {row["impl"]: f"{float(row['tflops']):.0f}" for row in of if row["head_dim"] == str(d)}
        for d, of in last.items()
    }
    head = ("TFLOP/s", "paper, 128", *(f"{d} (`{of[0]['run']}`)" for d, of in last.items()))
    lines = [(text, paper, *(found[d][impl] for d in HEAD_DIMS)) for impl, (text, paper) in ABLATION.items()]
    yield table(head, [*lines, ("overlap, no warp specialisation", "570", "", "", "")])


def sparse(rows: list[Row]) -> Iterator[str]:
    """The share of 1/density that v3 reaches with random masks; of each mask the last run that has it."""
    run = runs.sparse_run(rows)
    assert run is not None
    of = {"1": "ones"} | {f"1/{n}": f"random/{n}" for n in (2, 4, 8, 16, 32)}
    reached: dict[tuple[runs.Size, str], float] = {}
    ids: dict[str, str] = {}
    for each in dict.fromkeys(row["run"] for row in rows if row["mask"]):
        found = runs.sparse_run([row for row in rows if row["run"] == each])
        for size, mask in ((size, mask) for size in (found.ms if found else ()) for mask in of.values()):
            if found and (times := found.speedup(size, mask, "v3")):
                reached[size, mask] = times * found.densities[mask, size[2]]
                ids[mask] = each
    others = "".join(f", {mask} `{each}`" for mask, each in ids.items() if each != run.rows[0]["run"])
    yield (
        f"{run.rows[0]['dtype']}, blocks of 128 x 128. {origin(run.rows[0])}{others}. The share of 1/density that is "
        "reached, of the dense kernel's time in the same turns, by the share of blocks kept, drawn at random:"
    )
    lines = (
        [
            f"{runs.WORDS[pass_]}, head dim {d}, {runs.length(n)}",
            *(
                f"{reached[(pass_, d, n), mask]:.2f}" if ((pass_, d, n), mask) in reached else ""
                for mask in of.values()
            ),
        ]
        for pass_, d, n in run.ms
    )
    yield table(("", *of), lines)
    masked = {
        (size, mask): min(ms for impl, ms in cell.items() if not runs.ours(impl)) / cell["v3"]
        for size, cells in run.ms.items()
        for mask, cell in cells.items()
        if mask not in runs.DENSE and "v3" in cell
    }
    by_part = {
        (
            f"{runs.WORDS[p]} at head dim {d} "
            f"{runs.mean([v for (size, _), v in masked.items() if size[:2] == (p, d)]):.2f}x"
        )
        for p, d in sorted({size[:2] for size, _ in masked}, key=str)
    }
    yield (
        f"Over the better of flash-attn-4's block sparsity and FlexAttention in each of {len(masked)} cells: "
        f"{ratio(masked.values())}; {', '.join(sorted(by_part))}."
    )


def backward(rows: list[Row]) -> Iterator[str]:
    """v3's."""
    yield f"{what(rows, 'bwd')} 2.5 times the forward FLOPs; the deterministic mode is timed at seqlen 8192."
    yield from alone(rows, "v3", "bwd")
    impls = ("v3", "fa3", "fa4", "sdpa_cudnn", "flex", "v2", "v1", "v3_deterministic")
    yield speeds_at(rows, "bwd", impls, (512, 2048, 8192, LONGEST))
    best, slower = runs.over(rows, "v3", BEST_PEER, "bwd"), runs.over(rows, "v3_deterministic", "v3", "bwd")
    assert best and slower
    by_head_dim = ", ".join(f"{runs.mean(best.of(d)):.2f}x at {d}" for d in HEAD_DIMS)
    kept = ", ".join(f"{min(slower.of(d)):.2f} to {max(slower.of(d)):.2f} at {d}" for d in HEAD_DIMS)
    yield (
        f"Over all cells, geometric means: {over(rows, 'v3', (BEST_PEER, 'v2', 'v1'), 'bwd')}; by head dim, over the "
        f"fastest other library, {by_head_dim}. The deterministic mode has this share of the other's speed "
        f"(`{slower.run}`), by head dim: {kept}."
    )


Packed = dict[tuple[str, tuple[int, int, int], int], dict[tuple[str, bool], float]]
"""TFLOP/s by pass, (heads, heads_kv, head_dim) and tokens, then by implementation and whether causal."""


def packed_run(rows: list[Row]) -> tuple[list[Row], Packed]:
    """The last run with the lengths of documents on one GPU, and its speeds."""
    packed = [row for row in runs.measured(rows) if row.get("lengths") == "documents" and not row.get("gpus")]
    mine = runs.of_last(packed)
    found: Packed = {}
    for row in mine:
        heads = int(row["heads"]), int(row["heads_kv"]), int(row["head_dim"])
        cell = found.setdefault((row["pass"], heads, int(row["seqlen_q"])), {})
        cell[row["impl"], row["causal"] == "1"] = float(row["tflops"])
    return mine, found


def packed_impls(found: Packed) -> list[str]:
    """Who has a result, in the order of the file."""
    return list(dict.fromkeys(name for cell in found.values() for name, _ in cell))


def packed_over(found: Packed, impl: str, other: str | None = None) -> dict[str, list[float]]:
    """Speed over another's, or over the fastest of other libraries, in each cell that has both; by pass."""
    values: dict[str, list[float]] = {pass_: [] for pass_ in runs.WORDS}
    for (pass_, _, _), cell in found.items():
        for causal in (False, True):
            others = [
                v for (name, c), v in cell.items() if c == causal and (name == other if other else not runs.ours(name))
            ]
            if others and (impl, causal) in cell:
                values[pass_].append(cell[impl, causal] / max(others))
    return values


def in_passes(values: dict[str, list[float]]) -> str:
    """Their means in words."""
    return " and ".join(f"{ratio(of)} {runs.WORDS[pass_]}" for pass_, of in values.items())


def packed(rows: list[Row]) -> Iterator[str]:
    """Documents of many lengths: every version and library that takes them."""
    mine, found = packed_run(rows)
    impls = packed_impls(found)
    yield (
        f"{mine[0]['dtype']}, documents of log-normal lengths, half of them below 493 tokens, none longer than a "
        f"quarter of all; TFLOP/s without / with a causal mask, of the pairs that are seen. {origin(mine[0])}."
    )
    for pass_, word in runs.WORDS.items():
        lines = []
        for (of, (heads, heads_kv, head_dim), tokens), cell in found.items():
            if of == pass_:
                speeds = (
                    " / ".join(f"{cell[i, c]:.0f}" if (i, c) in cell else "" for c in (False, True)) for i in impls
                )
                lines.append(
                    (f"{heads}:{heads_kv} of {head_dim}", runs.length(tokens), *(x.strip(" /") for x in speeds))
                )
        yield table((f"{word}, heads", "tokens", *map(name_of, impls)), lines)
    yield (
        f"v3 over the fastest other library of each cell, geometric means: {in_passes(packed_over(found, 'v3'))}. v2 "
        f"over FlexAttention with a mask of documents: {in_passes(packed_over(found, 'v2', 'flex'))}. With 4k tokens "
        "the host takes as long as the kernels."
    )


def packed_in_a_sentence(rows: list[Row]) -> Iterator[str]:
    """The same beside what packed sequences are."""
    mine, found = packed_run(rows)
    cells = sum(map(len, packed_over(found, "v3").values()))
    names = [name_of(name) for name in packed_impls(found) if not runs.ours(name)]
    yield (
        f"**Speed**: v3 is {in_passes(packed_over(found, 'v3'))} of the fastest of {', '.join(names[:-1])} and "
        f"{names[-1]}, in {cells} cells of documents of many lengths ([table](flashzoo/v3/README.md#packed-sequences); "
        f"run `{mine[0]['run']}`, {mine[0]['gpu']})."
    )


def on_scores(rows: list[Row]) -> Iterator[str]:
    """Softcap, ALiBi, biases, sinks and dropout, in the last run that has any, beside the same cells without."""
    rows = [row for row in runs.measured(rows) if row["pass"] in runs.WORDS and row["causal"] == "1"]
    of = [row["run"] for row in rows if row.get("score")]
    if not of:
        yield "Not measured yet; `flashzoo bench --scores` does."
        return
    mine = [row for row in rows if row["run"] == of[-1]]
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    for row in mine:
        key = row["pass"], row["heads"], row["head_dim"], row["seqlen_q"], row["score"] or PLAIN
        cells.setdefault(key, {})[row["impl"]] = float(row["tflops"])
    impls = list(dict.fromkeys(row["impl"] for row in mine))
    yield (
        f"{mine[0]['dtype']}, causal, {runs.tokens_of(mine[0])} tokens in all; TFLOP/s, of the FLOPs without. "
        f"{origin(mine[0])}."
    )
    ratios = [(name, "flex") for name in ("v3", "v2") if {name, "flex"} <= set(impls)]

    def line(key: tuple[str, ...], cell: dict[str, float]) -> list[str]:
        of_each = [f"{cell[impl]:.3g}" if impl in cell else "-" for impl in impls]
        over_flex = [f"{cell[a] / cell[b]:.2f}x" if a in cell and b in cell else "-" for a, b in ratios]
        return [runs.WORDS[key[0]], key[1], key[2], runs.length(int(key[3])), key[4], *of_each, *over_flex]

    head = ("pass", "heads", "head dim", "seqlen", "score", *map(name_of, impls))
    yield table((*head, *(f"{a} over {name_of(b)}" for a, b in ratios)), (line(*of) for of in cells.items()))


def of_models(rows: list[Row]) -> Iterator[str]:
    """v3 and its peers on the layers of real models, each layer and pass in the last run that has v3's."""
    rows = [row for row in runs.measured(rows) if row.get("model")]
    if not rows:
        yield "Not measured yet; `flashzoo bench --models all` does."
        return
    last = {(row["model"], row["pass"]): row["run"] for row in rows if row["impl"] == "v3"}
    mine = [row for row in rows if row["run"] == last.get((row["model"], row["pass"]))]
    newest = mine[-1]
    others = [run for run in dict.fromkeys(row["run"] for row in mine) if run != newest["run"]]
    cells, settled = _by_model(mine), _by_model([row for row in map(runs.settled, mine) if row])
    impls = list(dict.fromkeys(row["impl"] for row in mine))

    def share(cell: dict[str, float]) -> float | None:
        peers = [speed for impl, speed in cell.items() if not runs.ours(impl)]
        return cell["v3"] / max(peers) if "v3" in cell and peers else None

    told = f"; what that lacks is of {' and '.join(f'`{run}`' for run in others)}" if others else ""
    yield f"{newest['dtype']}, in turns; TFLOP/s forward / backward. {origin(newest)}{told}."

    def told_of(by_model: dict[str, dict[str, dict[str, float]]], pass_: str, models: Iterable[str]) -> str:
        found = [value for model in models if (value := share(by_model[model].get(pass_, {})))]
        return f"{ratio(found)}, at least 1x in {sum(value >= 1 for value in found)} of {len(found)}" if found else ""

    for pass_, word in runs.WORDS.items():
        if said := told_of(cells, pass_, cells):
            alone = [model for model, of in settled.items() if share(of.get(pass_, {}))]
            also = (
                f". Of the {len(alone)} that were also timed alone: in turns {told_of(cells, pass_, alone)}; alone at "
                f"settled clocks {told_of(settled, pass_, alone)}"
            )
            yield f"- {word.capitalize()}, v3 over the fastest peer: {said}{also if alone else ''}."

    def line(model: str, of: dict[str, dict[str, float]]) -> list[str]:
        both = [of.get(pass_, {}) for pass_ in runs.WORDS]
        speeds = [" / ".join(f"{cell[impl]:.0f}" if impl in cell else "-" for cell in both) for impl in impls]
        return [model, *speeds, " / ".join(f"{value:.2f}x" if (value := share(cell)) else "-" for cell in both)]

    order = [*MODELS, *cells]
    lines = (line(*of) for of in sorted(cells.items(), key=lambda of: order.index(of[0])))
    yield table(("layer", *map(name_of, impls), "v3 over the fastest peer"), lines)


def _by_model(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """TFLOP/s by layer, pass and implementation."""
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        cells.setdefault(row["model"], {}).setdefault(row["pass"], {})[row["impl"]] = float(row["tflops"])
    return cells


Caches = dict[tuple[str, str], dict[int, dict[str, Row]]]
"""Rows by heads and batch, then by the caches' length, then by implementation."""


def decode(rows: list[Row]) -> Iterator[str]:
    """One query on caches without pages, beside other libraries: of heads of one width, and of MLA's latent ones; and
    on e4m3 caches, beside those of 16 bits."""
    mine = [row for row in runs.measured(rows) if (row["pass"], row["seqlen_q"], row["lengths"]) == (DECODE, "1", "")]
    if not mine:
        yield "Not measured yet; `flashzoo bench --decode` does."
    for latent in (False, True):
        if of := [row for row in mine if bool(row["head_dim_v"]) == latent and not row["dtype_kv"]]:
            yield from _decode_run(rows, runs.of_most(of))
            yield from _decode_since(of)
    if in_e4m3 := [row for row in mine if row["dtype_kv"] and row["impl"] == "decode"]:
        yield from _decode_run_in_e4m3(rows, runs.of_most(in_e4m3))


def _of_caches(mine: list[Row]) -> Caches:
    cells: Caches = {}
    for row in mine:
        of = f"{row['heads']}:{row['heads_kv']} of {row['head_dim']}", row["batch"]
        cells.setdefault(of, {}).setdefault(int(row["seqlen_k"]), {})[row["impl"]] = row
    return cells


def _table_of_caches(cells: Caches, shown: Callable[[dict[str, Row]], str]) -> str:
    lengths = sorted({length for of in cells.values() for length in of})
    lines = ((*of, *(shown(found[n]) if n in found else "" for n in lengths)) for of, found in cells.items())
    return table(("heads", "batch", *map(runs.length, lengths)), lines)


def _origin_and_copies(rows: list[Row], of: Row) -> str:
    copies = [f"{1e3 * copied(row):.0f}" for row in rows if (row["run"], row["pass"]) == (of["run"], COPY)]
    return f"{origin(of)}; a copy in the same run: {' and '.join(copies)}."


def _decode_run(rows: list[Row], mine: list[Row]) -> Iterator[str]:
    cells, there = _of_caches(mine), {row["impl"] for row in mine}
    impls = [impl for impl in ("decode", *DECODE_PEERS, "v2") if impl in there]
    yield (
        f"{mine[0]['dtype']}, one query; GB/s of keys and values, {' / '.join(map(name_of, impls))}, by heads of "
        f"queries and of keys, sequences, and keys of each. {_origin_and_copies(rows, mine[0])}"
    )
    yield _table_of_caches(
        cells, lambda cell: " / ".join(f"{rate(cell[impl]):.0f}" if impl in cell else "-" for impl in impls)
    )
    for other, values in _over_peers(cells).items():
        yield f"decode over {name_of(other)}: {ratio(values)}, geometric mean of {len(values)} cells."


def _over_peers(cells: Caches) -> dict[str, list[float]]:
    """decode's speed over that of each peer, in the cells that have both."""
    ours = [found for cell in cells.values() for found in cell.values() if "decode" in found]
    over = {
        other: [_faster(found["decode"], found[other]) for found in ours if other in found] for other in DECODE_PEERS
    }
    return {other: values for other, values in over.items() if values}


def _decode_since(of: list[Row]) -> Iterator[str]:
    """Of a run behind the table's, which has fewer cells."""
    last = runs.of_last(of)
    if last[0]["run"] != runs.of_most(of)[0]["run"] and (over := _over_peers(_of_caches(last))):
        cells = max(map(len, over.values()))
        told = ", ".join(f"{ratio(values)} {name_of(other)}" for other, values in over.items())
        yield f"Since then run `{last[0]['run']}` of {last[0]['date']}, {cells} of these cells: {told}."


def _decode_run_in_e4m3(rows: list[Row], mine: list[Row]) -> Iterator[str]:
    """decode's own, over what it makes of 16-bit caches of the same shapes in the same run."""
    run, dtype = mine[0]["run"], mine[0]["dtype"]
    there = {(row["impl"], *key_of(row)): row for row in runs.measured(rows) if row["run"] == run}
    pairs = [(row, there.get(("decode", *key_of({**row, "dtype_kv": ""})))) for row in mine]
    values = {key_of(row): _faster(row, other) for row, other in pairs if other}

    def shown(cell: dict[str, Row]) -> str:
        faster = values.get(key_of(cell["decode"]))
        return f"{rate(cell['decode']):.0f}" + (f" ({faster:.2f}x)" if faster else "")

    yield (
        f"One query in {dtype} on e4m3 caches, descales by head; decode's GB/s of keys and values, in brackets its "
        f"speed over that on {dtype} caches of the same run. {_origin_and_copies(rows, mine[0])}"
    )
    yield _table_of_caches(_of_caches(mine), shown)
    errors = f"The largest RMS error of a cell is {max(float(row['rms_err']) for row in mine):.1e}"
    if values:
        of_16_bits = max(float(other["rms_err"]) for _, other in pairs if other)
        yield (
            f"On e4m3 caches over {dtype} ones: {ratio(values.values())}, geometric mean of {len(values)} cells. "
            f"{errors}, on {dtype} caches {of_16_bits:.1e}, each against float64 of what the caches hold."
        )
    else:
        yield f"{errors}, against float64 of what the caches hold."


def _faster(row: Row, other: Row) -> float:
    """How many times as fast."""
    return float(other["ms"]) / float(row["ms"])


def fp8(rows: list[Row]) -> Iterator[str]:
    """v3_fp8's speeds: e4m3 inputs, quantisation included, and what two levels cost."""
    mine, whole = runs.last_run(rows, "fwd_e4m3"), runs.over(rows, "v3_fp8_end_to_end", "v3", "fwd_end_to_end")
    assert whole
    lengths = sorted({seqlen for _, _, seqlen in whole.values})
    yield (
        f"- **e4m3 inputs**, scale 1: {over(rows, 'v3_fp8', (BEST_PEER, 'cudnn_fp8'), 'fwd_e4m3')}. {origin(mine[0])}."
    )
    yield from alone(rows, "v3_fp8", "fwd_e4m3")
    fast = "v3_fp8_fast_accum"
    if runs.over(rows, fast, BEST_PEER, "fwd_e4m3"):
        yield f"- **With `fast_accum=True`**: {over(rows, fast, (BEST_PEER,), 'fwd_e4m3')}."
        yield from alone(rows, fast, "fwd_e4m3")
    yield (
        "- **From bf16 inputs**, quantisation included, over v3 in bf16, "
        f"seqlen {' / '.join(map(str, lengths))} (run `{whole.run}`):"
    )
    cells = {
        (d, causal): " / ".join(f"{whole.values[d, causal, n]:.2f}" for n in lengths)
        for d in HEAD_DIMS
        for causal in (False, True)
    }
    yield table(("head_dim", "full", "causal"), ([str(d), cells[d, False], cells[d, True]] for d in HEAD_DIMS))
    levels = {
        shape: cell["v3_fp8"] / cell[fast]
        for shape, cell in runs.speeds(mine).items()
        if {"v3_fp8", fast} <= cell.keys()
    }
    if levels:
        parts = ", ".join(
            f"{d} {'causal' if causal else 'full'} {' / '.join(f'{levels[d, causal, n]:.2f}' for n in (4096, LONGEST))}"
            for d in (64, 256)
            for causal in (False, True)
        )
        yield f"- **Two levels** over one (`fast_accum`), speed at 4096 / {LONGEST}, by head dim: {parts}."


def errors(rows: list[Row]) -> Iterator[str]:
    """Table 3 of the paper."""
    mine = [row for row in runs.of_last([row for row in rows if row["pass"] == f"{ERROR}fp8_paper"]) if not row["why"]]
    found = {f"{row['impl']} {row['dtype']}": float(row["rms_err"]) for row in mine}
    lines = ((text, f"{found[key]:.2e}", paper) for key, (text, paper) in ERRORS.items())
    yield table((f"run `{mine[0]['run']}`", "RMSE", "the paper"), lines)


def blocksparse(rows: list[Row]) -> Iterator[str]:
    """The butterfly's fall of time, and FlexAttention."""
    run = runs.sparse_run(rows)
    assert run is not None
    first, last = run.butterfly_lengths[0], run.butterfly_lengths[-1]
    kept = " and ".join(f"{run.densities[runs.BUTTERFLY, n]:.0%} at {runs.length(n)}" for n in (first, last))
    yield (
        f"{run.rows[0]['dtype']}, {runs.length(run.tokens)} tokens in all, hidden 512, head dim 128. "
        f"{origin(run.rows[0])}. The butterfly keeps {kept}; ms, and at {runs.length(last)} the speed-up over the own "
        "dense kernel, v2's for blocksparse:"
    )
    lines = []
    for pass_, word in runs.WORDS.items():
        cells = run.butterfly[pass_, 128]
        for impl in ("blocksparse", "v3"):
            kinds = (False, impl), (True, runs.DENSE_OF.get(impl, impl))
            ms = [cells[n][is_dense][name] for is_dense, name in kinds for n in (first, last)]
            lines.append([impl, word, *(f"{each:.2f}" for each in ms), f"{ms[3] / ms[1]:.0f}x"])
    head = [f"{what}, {runs.length(n)}" for what in ("butterfly", "dense") for n in (first, last)]
    yield table(("", "pass", *head, "speed-up"), lines)
    masked = [
        cell
        for cells in run.ms.values()
        for mask, cell in cells.items()
        if mask not in runs.DENSE and "blocksparse" in cell
    ]
    against = ", ".join(
        f"{ratio(cell[other] / cell['blocksparse'] for cell in masked)} {NAMES[other]}" for other in ("flex", "fa4")
    )
    yield f"Over all {len(masked)} masked cells of that run, each library with masks of its own: {against}."


def h100(_: list[Row]) -> Iterator[str]:
    """One sentence on another GPU."""
    rows = read(H100)
    mine, eight = runs.last_run(rows, "fwd"), runs.last_run(rows, "fwd_e4m3")
    best, best8 = (
        max(float(row["tflops"]) for row in of if row["impl"] == impl) for of, impl in ((mine, "v3"), (eight, "v3_fp8"))
    )
    peak, lengths = peak_tflops(mine[0]["gpu"], "bf16"), sorted({int(row["seqlen_q"]) for row in mine})
    assert peak
    forward, backward = (ratio_of(rows, "v3", BEST_PEER, name) for name in runs.WORDS)
    yield (
        f"On an H100 of 700 W ([its CSV](bench/results/{H100.name}), seqlens {', '.join(map(str, lengths))}) v3 "
        f"reaches {best:.0f} TFLOP/s, {best / peak:.0%} of the data sheet's {peak:.0f}. Over {NAMES[BEST_PEER]} it is "
        f"{forward} forward and {backward} backward; v3_fp8 reaches {best8:.0f} TFLOP/s and is "
        f"{over(rows, 'v3_fp8', ('fa3', 'cudnn_fp8'), 'fwd_e4m3')}."
    )


def versions(_: list[Row]) -> Iterator[str]:
    """The README's table of versions."""
    lines = (
        [name_in_table(spec), spec.title, spec.arch_text, dtypes_of(spec)] for spec in flashzoo.versions().values()
    )
    yield table(("name", "what it is", "GPU", "dtypes"), lines)


def name_in_table(spec: flashzoo.Spec) -> str:
    """A version's name, as a link to its README where it has one."""
    home = f"flashzoo/{spec.impl.split('.')[1]}/README.md"
    return f"[`{spec.name}`]({home})" if (ROOT / home).exists() else f"`{spec.name}`"


def dtypes_of(spec: flashzoo.Spec) -> str:
    """What a version takes, and what it takes to quantise."""
    return ", ".join(spec.dtypes) + (f"; by `precision`: {', '.join(spec.quantizes)}" if spec.quantizes else "")


def features(_: list[Row]) -> Iterator[str]:
    """The table of versions with their features by name."""

    def lacks(has: frozenset[str], of: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in of if name not in has)

    lines = []
    for spec in flashzoo.versions().values():
        less = ""
        if spec.backward is None:
            less = "none"
        elif missing := lacks(spec.backward, (feature for feature in FEATURES if feature in spec.features)):
            less = f"not {missing}"
        elif spec.backward_16:
            less = "in 16 bits"
        missing = lacks(spec.features, FEATURES)
        lines.append(
            [
                name_in_table(spec),
                spec.title,
                spec.arch_text,
                dtypes_of(spec),
                f"all but {missing}" if missing else "all",
                less or "all of these",
            ]
        )
    yield table(("name", "what it is", "GPU", "dtypes", "features", "in its backward pass"), lines)
    asked = "; ".join(f"`{name}`, {feature.asked}" for name, feature in FEATURES.items())
    yield f"Features, and how a call asks for each: {asked}."


Sections = dict[str, Callable[[list[Row]], Iterator[str]]]
"""By name, paragraphs and tables made from rows."""
SECTIONS: dict[str, Sections] = {
    "README.md": {"headline": headline, "versions": versions, "claims": lambda rows: iter([claims.table(rows)])},
    "docs/versions.md": {"versions": features},
    "docs/options.md": {"packed": packed_in_a_sentence},
    "docs/measured.md": {"h100": h100, "scores": on_scores, "models": of_models},
    "flashzoo/v1/README.md": {"results": v1},
    "flashzoo/v2/README.md": {"results": v2},
    "flashzoo/v3/README.md": {
        **{"forward": forward, "ablation": ablation, "sparse": sparse, "backward": backward, "packed": packed},
        **{"fp8": fp8, "errors": errors},
    },
    "flashzoo/blocksparse/README.md": {"results": blocksparse},
    "flashzoo/decode/README.md": {"results": decode},
}
"""By file, from the root, then by the name of the section."""


def place(text: str, name: str, section: str) -> str:
    """The text with the section between its markers. Raises ValueError where they are not there, once
    each and in order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"expected {begin} and after it {end}, got a text without them")
    parts = (f"{text[: text.index(begin)]}{begin}", section, text[text.index(end) :])
    return "\n\n".join(part for part in parts if part)


def wrapped(part: str) -> str:
    """A paragraph in lines of 120 columns; a table as it is."""
    indent = "  " if part.startswith("- ") else ""
    return (
        part
        if part.startswith("|")
        else fill(part, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )


def written(path: str, sections: Sections, rows: list[Row]) -> str:
    """A page with its sections as the rows have them."""
    text = (ROOT / path).read_text()
    for name, of in sections.items():
        text = place(text, name, linked("\n\n".join(map(wrapped, of(rows))), path))
    return text


def linked(section: str, path: str) -> str:
    """A section with its links as they read in that file."""
    return re.sub(r"\]\((?=(?:bench|flashzoo)/)", f"]({'../' * path.count('/')}", section)
