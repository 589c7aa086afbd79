"""What the papers claim, and what this GPU says to it: a table made from the results file alone.

Each claim is a record: what is claimed, where, how it is put there, and a function that finds the answer in the rows.
Speeds are compared within one run; the last that has both sides answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench import runs
from bench.runs import ERROR, TRAFFIC, Row
from bench.traffic import by_formula, counted
from flashzoo.gpu import peak_tflops

NOT_MEASURED = "not measured"
HEAD = ("claim", "where", "the paper", "measured here", "run")
ABLATION = {
    **{"v3_ping_pong_overlap": "with both", "v3_ping_pong": "without overlap"},
    **{"v3_overlap": "without ping-pong", "v3_serial": "neither"},
}
GENERATIONS = ("v3", "v2", "v1", "standard")
FA2 = "sdpa_flash"
"""FlashAttention-2 as its authors wrote it, in torch: what FA-3's paper is held against.
v2 is in Triton, and faster on Hopper."""
STANDARD = "sdpa_math"
"""torch's own standard attention, in 16 bits: what FA-1's paper is held against.
`standard`, our yardstick, takes twice its memory."""
QUANTIZED = ("v3_fp8_rotation_block_scales", "standard_per_tensor_scales", "v3_fp8_rotation", "v3_fp8_block_scales")
"""Ways of table 3: the paper's, the plain one, and the two halves of the paper's."""


@dataclass(frozen=True)
class Found:
    """An answer, and the runs that it is from."""

    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """One of a paper's claims.

    Attributes:
        what: what is claimed.
        where: paper and place.
        says: the paper's figure and circumstances.
        find: the answer of these rows; None where they have none.
    """

    what: str
    where: str
    says: str
    find: Callable[[list[Row]], Found | None]


def spread(values: list[float]) -> str:
    """Geometric mean and range of ratios."""
    return f"{runs.mean(values):.2f}x ({min(values):.2f}x to {max(values):.2f}x in {len(values)} cells)"


def faster(rows: list[Row], impl: str, other: str, table: str, longest: int = runs.TOKENS) -> Found | None:
    """Speed over another's, in cells of at most so long sequences."""
    ratios = runs.over(rows, impl, other, table)
    values = [value for shape, value in ratios.values.items() if shape[2] <= longest] if ratios else []
    return Found(spread(values), (ratios.run,)) if ratios and values else None


def fastest(rows: list[Row], impl: str, table: str) -> Found | None:
    """The best TFLOP/s of any cell, as a share of the GPU's data sheet and of the matrix product in its run."""
    mine = [row for row in runs.last_run(rows, table) if row["impl"] == impl]
    if not mine:
        return None
    best = max(mine, key=lambda row: float(row["tflops"]))
    speed, dtype = float(best["tflops"]), best["dtype"]
    text = (
        f"{speed:.0f} TFLOP/s (head dim {best['head_dim']}, "
        f"{runs.length(int(best['seqlen_q']))}{', causal' * (best['causal'] == '1')})"
    )
    if peak := peak_tflops(best["gpu"], dtype):
        text += f", {speed / peak:.0%} of the data sheet's {peak:.0f}"
    if products := runs.matmul(rows, best["run"], "e4m3" if dtype == "e4m3" else "bf16"):
        text += f", {speed / max(products):.2f} of a matmul in the run"
    return Found(text, (best["run"],))


def fastest_fp8(rows: list[Row]) -> Found | None:
    """That of v3_fp8 with one level of sums, which is the paper's, and with two."""
    two, one = (fastest(rows, impl, "fwd_e4m3") for impl in ("v3_fp8", "v3_fp8_fast_accum"))
    if not two or not one:
        return two
    return Found(f"with one level of sums, as the paper's, {one.text}; with two {two.text}", two.runs)


def eight_over_sixteen(rows: list[Row]) -> Found | None:
    """v3_fp8 on e4m3 inputs over v3 in bf16, which no run can hold together."""
    eight, sixteen = (runs.last_run(rows, table) for table in ("fwd_e4m3", "fwd"))
    found = {shape: cell["v3_fp8"] for shape, cell in runs.speeds(eight).items() if "v3_fp8" in cell}
    others = {shape: cell["v3"] for shape, cell in runs.speeds(sixteen).items() if "v3" in cell}
    values = {shape: found[shape] / others[shape] for shape in found if shape in others}
    if not values:
        return None
    long = [value for shape, value in values.items() if shape[2] == runs.TOKENS]
    text = spread(list(values.values())) + (f", {runs.mean(long):.2f}x at 16k" if long else "")
    return Found(f"{text}; of two runs", (eight[0]["run"], sixteen[0]["run"]))


def ablation(rows: list[Row]) -> Found | None:
    """v3 with ping-pong and overlap each on and off, at the paper's size."""
    mine = [
        row
        for row in runs.measured(rows)
        if row["impl"] in ABLATION and (row["pass"], row["head_dim"]) == ("fwd", "128")
    ]
    speeds = {row["impl"]: float(row["tflops"]) for row in runs.of_last(mine)}
    if speeds.keys() < ABLATION.keys():
        return None
    return Found(
        ", ".join(f"{speeds[impl]:.0f} {name}" for impl, name in ABLATION.items()) + " (TFLOP/s)", (mine[-1]["run"],)
    )


def errors(rows: list[Row]) -> Found | None:
    """RMSE of FA-3's way to quantise beside the plain one's."""
    mine = [row for row in runs.measured(rows) if row["pass"] == f"{ERROR}fp8_paper"]
    found = {row["impl"]: float(row["rms_err"]) for row in runs.of_last(mine)}
    if not found.keys() >= set(QUANTIZED):
        return None
    both, plain, rotation, blocks = (found[impl] for impl in QUANTIZED)
    text = (
        f"{plain / both:.1f}x less: {both:.1e} for {plain:.1e}; "
        f"rotation alone {rotation:.1e}, block scales alone {blocks:.1e}"
    )
    return Found(text, (mine[-1]["run"],))


def sparse(rows: list[Row]) -> Found | None:
    """v3's speed-up over its own dense kernel with random masks, by the share of blocks kept."""
    run = runs.sparse_run(rows)
    if run is None:
        return None
    times: dict[str, dict[int, list[float]]] = {}
    for size, cells in run.ms.items():
        for mask in cells:
            kind, _, share = mask.partition("/")
            if kind == "random" and (faster_by := run.speedup(size, mask, "v3")):
                times.setdefault(size[0], {}).setdefault(int(share), []).append(faster_by)
    parts = [
        f"{runs.WORDS[pass_]}: "
        + ", ".join(f"1/{share} kept {runs.mean(values):.1f}x" for share, values in sorted(found.items()))
        for pass_, found in times.items()
    ]
    return Found("; ".join(parts), (run.rows[0]["run"],)) if parts else None


def memory(rows: list[Row]) -> Found | None:
    """Growth of the memory that one sequence takes beyond its inputs, head dim 64."""
    mine = [row for row in runs.last_run(rows, "fwd") if (row["causal"], row["head_dim"]) == ("0", "64")]
    taken: dict[str, dict[int, float]] = {}
    for (_, _, seqlen), cell in runs.speeds(mine, "peak_mib").items():
        for impl in (impl for impl in GENERATIONS if cell.get(impl)):
            taken.setdefault(impl, {})[seqlen] = cell[impl] * seqlen / runs.tokens_of(mine[0])
    parts = []
    for impl, by_length in taken.items():
        first, last = min(by_length), max(by_length)
        if first < last:
            growth = f"{by_length[last] / by_length[first]:.0f}x for {last // first}x the keys"
            parts.append(f"{impl} {growth} ({by_length[last]:.0f} MiB at {runs.length(last)})")
    return Found("; ".join(parts), (mine[0]["run"],)) if parts else None


def traffic(rows: list[Row]) -> Found | None:
    """Bytes of standard attention over v1's, head dim 64: as the algorithms count them, and as DRAM saw them."""
    asked = [row for row in rows if row["pass"] == f"{TRAFFIC}fwd" or (row["pass"] == "fwd" and not row["mask"])]
    of = next((row for row in asked if (row["seqlen_q"], row["head_dim"], row["causal"]) == ("1024", "64", "0")), None)
    if of is None:
        return None
    problem = runs.problem_of({**of, "impl": "v1"})
    by_tiles = counted("standard", problem) / counted("v1", problem)
    by_paper = by_formula("standard", problem) / by_formula("v1", problem)
    formula = f"{by_paper:.1f}x by the paper's formula, {by_tiles:.1f}x by our tiles (forward, 1k)"
    mine = runs.of_last(
        [row for row in runs.measured(rows) if row["pass"].startswith(TRAFFIC) and row["head_dim"] == "64"]
    )
    parts = []
    for pass_, word in runs.WORDS.items():
        cells = runs.speeds([row for row in mine if row["pass"] == TRAFFIC + pass_], "dram_mib")
        both = {seqlen: cell for (_, _, seqlen), cell in cells.items() if {"standard", "v1"} <= cell.keys()}
        if both:
            parts.append(
                f"{word} "
                + ", ".join(f"{cell['standard'] / cell['v1']:.1f}x at {runs.length(n)}" for n, cell in both.items())
            )
    return Found(
        f"{formula}; DRAM's counters, `standard` in passes over float32: {'; '.join(parts) or NOT_MEASURED}",
        (mine[0]["run"],) if mine else (),
    )


CLAIMS = (
    Claim(
        f"FA-1 over standard attention (`{STANDARD}`), forward",
        "FA-1, section 1",
        "up to 3x, 128 to 2k keys",
        partial(faster, impl="v1", other=STANDARD, table="fwd", longest=2048),
    ),
    Claim(
        "Memory linear in the length, head dim 64",
        "FA-1, section 4.3",
        "linear; up to 20x less than exact baselines",
        memory,
    ),
    Claim(
        "Fewer bytes moved than standard attention",
        "FA-1, theorem 2, figure 2",
        "Θ(N²d²/M), not Θ(Nd + N²); 9.2x fewer (1k, head dim 64, forward and backward)",
        traffic,
    ),
    Claim("Block-sparse: time by the share of blocks kept", "FA-1, figure 2", "proportional", sparse),
    Claim(
        "FA-2 over FA-1, forward",
        "FA-2, section 4",
        "1.7x to 3.0x",
        partial(faster, impl="v2", other="v1", table="fwd"),
    ),
    Claim(
        "FA-2 over FA-1, backward",
        "FA-2, section 4",
        "1.7x to 3.0x",
        partial(faster, impl="v2", other="v1", table="bwd"),
    ),
    Claim(
        "FA-3 over FA-2, forward",
        "FA-3, section 4.1",
        "1.5x to 2.0x",
        partial(faster, impl="v3", other="v2", table="fwd"),
    ),
    Claim(
        "FA-3 over FA-2, backward",
        "FA-3, section 4.1",
        "1.5x to 1.75x",
        partial(faster, impl="v3", other="v2", table="bwd"),
    ),
    Claim(
        "FA-3 over FA-2's CUDA kernels (`sdpa_flash`), forward",
        "FA-3, section 4.1",
        "1.5x to 2.0x",
        partial(faster, impl="v3", other=FA2, table="fwd"),
    ),
    Claim(
        "FA-3 over FA-2's CUDA kernels (`sdpa_flash`), backward",
        "FA-3, section 4.1",
        "1.5x to 1.75x",
        partial(faster, impl="v3", other=FA2, table="bwd"),
    ),
    Claim(
        "FA-3 in 16 bits",
        "FA-3, abstract",
        "up to 740 TFLOP/s, 75 % of the peak",
        partial(fastest, impl="v3", table="fwd"),
    ),
    Claim("FA-3 in FP8", "FA-3, abstract", "close to 1.2 PFLOP/s", fastest_fp8),
    Claim(
        "FP8 over 16 bits, FP8 inputs",
        "FA-3, figures 5 and 7",
        "about 1.55x at 16k, head dims 128 and 256 (read off)",
        eight_over_sixteen,
    ),
    Claim(
        "FP8 over 16 bits, quantisation included",
        "FA-3",
        "not given",
        partial(faster, impl="v3_fp8_end_to_end", other="v3", table="fwd_end_to_end"),
    ),
    Claim(
        "FA-3's two overlaps",
        "FA-3, table 2",
        "661 with both, 582 without overlap, 570 without warp specialisation (head dim 128)",
        ablation,
    ),
    Claim(
        "FP8's error (RMSE)",
        "FA-3, table 3",
        "2.6x less than plain FP8: 9.1e-3 for 2.4e-2; rotation alone 9.3e-3, block scales alone 2.4e-2",
        errors,
    ),
)


def answers(rows: list[Row]) -> list[tuple[str, ...]]:
    """The table's rows, its columns as `HEAD` names them; a claim without an answer says `NOT_MEASURED`."""
    found = ((claim, claim.find(rows) or Found(NOT_MEASURED, ())) for claim in CLAIMS)
    return [(claim.what, claim.where, claim.says, answer.text, ", ".join(answer.runs)) for claim, answer in found]


def table(rows: list[Row]) -> str:
    """The table in markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEAD, ["---"] * len(HEAD), *answers(rows)))
