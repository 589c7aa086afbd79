"""Bytes that attention moves to and from memory: counted in the algorithms, and measured by the GPU's counters.
`python -m bench.traffic`

Forward and backward, without a mask, at the field's 16k tokens. Measuring takes Nsight Compute (`ncu`): it runs this
module once more, and counts what DRAM reads and writes in one call of each version, after a warm-up and with L2 emptied
of it. What a call leaves in L2, and DRAM has yet to take, is flushed and counted with it. The rows have the passes
`traffic_fwd` and `traffic_bwd`, `dram_mib` and no time.

The run also has a row of pass `copy`: a copy on the device, whose rate is the most that memory gives.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.arguments import names, numbers, offer_rows, results_of
from bench.ceiling import copy_row
from bench.cells import PASSES, Cell
from bench.contenders import Contender, objection
from bench.rows import FAILED, MISSING, NO_MEMORY, REFUSED
from bench.runs import TOKENS, TRAFFIC
from flashzoo.call.problem import Problem
from flashzoo.counts import LOG_SUM_BYTES, hbm_bytes
from flashzoo.dtypes import BYTES
from flashzoo.inputs import inputs
from flashzoo.timing import FLUSH_BYTES, Clock
from flashzoo.v1 import config as v1_config
from flashzoo.v1.launch import rows_per_program
from flashzoo.v2 import config as v2_config
from flashzoo.v3 import config as v3_config
from flashzoo.workloads import hardware

VERSIONS = ("standard", "v1", "v2", "v3")
HIDDEN = 2048
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
MARK = "spin_kernel"
"""What `torch.cuda._sleep` launches: one before a call, one between it and the flush behind it."""
DENIED = "ERR_NVGPUCTRPERM"

Kernel = tuple[str, float, float]
"""Name, bytes read and bytes written."""


class TrafficError(Exception):
    """No counter could be read; the message says why, and what would help."""


def by_formula(version: str, problem: Problem) -> float:
    """Bytes of a forward pass by the formula of the version's paper, its blocks as large as the GPU's on-chip
    memory lets them be."""
    return hbm_bytes(problem, version, v1_config.SRAM.get(problem.arch or 0, v1_config.SRAM[90])) or 0.0


def counted(version: str, problem: Problem) -> float:
    """Bytes of a forward pass without a mask, each access to memory counted as the version's tiles make it and
    caches left out.

    - standard: reads Q, K and V, writes O, and writes and reads S and P.
    - v1: K and V for each range of rows that has a program; for each block of keys Q once, and O in float32, l and m,
      read and written; these set to 0 before, and read after, to write O and LSE.
    - v2, v3: Q, O and LSE once; K and V for each tile of queries.

    Raises:
        ValueError: another version, or a problem with a mask.
    """
    if version not in VERSIONS or problem.span != (None, None) or problem.block_mask:
        raise ValueError(f"counted are {', '.join(VERSIONS)} without a mask, got {version} on {problem}")
    if version == "standard":
        return by_formula(version, problem)
    heads, rows = problem.batch * problem.heads, problem.batch * problem.heads * problem.seqlen_q
    row = problem.head_dim * BYTES[problem.dtype]
    of_keys = heads * problem.seqlen_k * 2 * row
    if version == "v1":
        tiles = v1_config.tiles_for("forward", problem)
        ranges = -(-problem.seqlen_q // rows_per_program(problem.seqlen_q, heads, tiles.block_q))
        kept = problem.head_dim * 4 + 2 * LOG_SUM_BYTES  # O, l and m
        passes = -(-problem.seqlen_k // tiles.block_kv)
        return float(of_keys * ranges + rows * (passes * (row + 2 * kept) + 2 * kept + row + LOG_SUM_BYTES))
    tiles = v2_config.tiles_for("forward", problem) if version == "v2" else v3_config.kernel_for(problem).tiles
    return float(rows * (2 * row + LOG_SUM_BYTES) + of_keys * -(-problem.seqlen_q // tiles.block_q))


def kernels(log: str) -> list[Kernel]:
    """The kernels in the order of their launches, from what `ncu --csv` writes, a row for each metric of each kernel.

    Raises:
        TrafficError: there is none, or a metric without a value.
    """
    lines = [line for line in log.splitlines() if line.startswith('"')]
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(lines):
        name, metrics = found.setdefault(row["ID"], (row["Kernel Name"], {}))
        if row["Metric Name"] in (READ, WRITTEN):
            if row["Metric Unit"] not in UNITS:
                raise TrafficError(
                    f"expected bytes of {row['Metric Name']}, got {row['Metric Value']!r} {row['Metric Unit']} for "
                    f"{name}"
                )
            metrics[row["Metric Name"]] = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
    if not found:
        raise TrafficError(f"expected kernels from ncu, got none: {' '.join(log.split())[-400:]}")
    return [(name, metrics[READ], metrics[WRITTEN]) for name, metrics in found.values()]


def by_call(launched: Iterable[Kernel]) -> list[float]:
    """Bytes of each call: what its kernels read and wrote, and what the flush behind it wrote."""
    calls: list[float] = []
    marks = 0
    for name, read, written in launched:
        if MARK in name:
            marks += 1
            calls += [0.0] if marks % 2 else []
        elif marks:
            calls[-1] += written + (read if marks % 2 else 0.0)
    return calls


def cells(args: argparse.Namespace) -> list[Cell]:
    """What is measured: each pass, head dim and length that the arguments say."""

    def cell(pass_: str, head_dim: int, seqlen: int) -> Cell:
        heads = HIDDEN // head_dim
        problem = Problem(TOKENS // seqlen, seqlen, seqlen, heads, heads, head_dim, **hardware("cuda"))  # pyright: ignore[reportArgumentType]
        return Cell(replace(problem, dtype="bf16", out_dtype=None, grad=pass_ == "bwd"))

    return [
        cell(pass_, head_dim, seqlen) for pass_ in args.passes for head_dim in args.head_dims for seqlen in args.seqlens
    ]


def call_each(todo: list[Cell]) -> None:
    """Under ncu: one call of each version on each cell between marks, and for each a line, "" or why there is none."""
    others = torch.ones(FLUSH_BYTES // 4, device="cuda")  # float32, since torch sums integers in a copy of 64 bits
    for cell in todo:
        tensors = inputs(cell.problem, device="cuda")
        for version in VERSIONS:
            why = objection(version, cell) or ""
            try:
                if not why:
                    _call(Contender(version, cell, tensors), others)
            except torch.OutOfMemoryError:
                why = NO_MEMORY
            torch.cuda.empty_cache()
            print(json.dumps(why), flush=True)


def _call(contender: Contender, others: torch.Tensor) -> None:
    contender.run()
    others.sum()  # reads: what is then in L2 need not be written
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    contender.run()
    torch.cuda._sleep(1)
    others.sum()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def measured(arguments: list[str]) -> tuple[list[str], list[float]]:
    """For each version on each cell "" or why it has no result; and the bytes of those that have.

    Args:
        arguments: of the process under ncu.

    Raises:
        TrafficError: ncu is missing or reads no counter.
    """
    if not (ncu := shutil.which("ncu")):
        raise TrafficError(f"{MISSING}: ncu (Nsight Compute, part of the CUDA toolkit) is not on the PATH")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        how = [
            "--clock-control",
            "none",
            "--cache-control",
            "none",
            "--profile-from-start",
            "off",
            "--print-units",
            "base",
        ]
        command = [ncu, *how, "--metrics", f"{READ},{WRITTEN}", "--csv", "--log-file", str(log)]
        command += [sys.executable, "-m", "bench.traffic", "--child", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        text = log.read_text() if log.exists() else ""
    if DENIED in text + done.stdout + done.stderr:
        raise TrafficError(f"{REFUSED}: the driver keeps its counters from this user ({DENIED}); run as root")
    if done.returncode:
        raise TrafficError(
            f"{FAILED}: ncu ended with {done.returncode}: {' '.join((text + done.stderr).split())[-400:]}"
        )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    moved = by_call(kernels(text))
    if len(moved) != said.count(""):
        raise TrafficError(
            f"{FAILED}: expected the kernels of {said.count('')} calls from ncu, got those of {len(moved)}"
        )
    return said, moved


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table beside what is counted, append rows; 1 where there is no GPU or ncu fails;
    it may be missing or refused."""
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m bench.traffic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    parser.add_argument("--passes", type=names(PASSES), default=list(PASSES), help="fwd,bwd")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128, 256])
    parser.add_argument("--seqlens", type=numbers, default=[1024, 4096, 16384])
    offer_rows(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if not torch.cuda.is_available():
        print("bench.traffic needs an NVIDIA GPU", file=sys.stderr)
        return 1
    todo = cells(args)
    if args.child:
        call_each(todo)
        return 0
    sizes = [
        f"--{name}={','.join(map(str, getattr(args, name.replace('-', '_'))))}"
        for name in ("passes", "head-dims", "seqlens")
    ]
    results = results_of(args, args.run, "cuda", parser) if args.run else None
    rows, error = [copy_row(Clock("cuda"), "cuda", 100)], None
    torch.cuda.empty_cache()
    try:
        said, moved = measured(sizes)
        numbers_left = iter(moved)
        jobs = [(cell, version) for cell in todo for version in VERSIONS]
        for (cell, version), why in zip(jobs, said, strict=True):
            mib = "" if why else f"{next(numbers_left) / 2**20:.5g}"
            by_count = f"{counted(version, cell.problem) / 2**20:10.0f}" if cell.pass_ == "fwd" else " " * 10
            print(f"{cell} {version:<9} counted {by_count}, measured {mib or why:>10} MiB")
            row = {
                **cell.fields,
                "pass": TRAFFIC + cell.pass_,
                "density": 1,
                "impl": version,
                "dram_mib": mib,
                "why": why,
            }
            rows.append(row)
    except TrafficError as problem:
        error = problem
    if results:
        results.append(rows)
    if error:
        print(f"no traffic was measured: {error}", file=sys.stderr)
    return int(error is not None and not str(error).startswith((MISSING, REFUSED)))


if __name__ == "__main__":
    raise SystemExit(main())
