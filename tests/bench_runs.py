"""Small runs of the benchmark on a CPU, and what they left in a results file."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from bench import peers, run
from bench.arguments import parser_of

TINY = "--device cpu --tokens 128 --hidden 64 --seqlens 64 --head-dims 16 --ms 1 --run r1 --commit c0ffee"
MASKED = "--device cpu --dtype fp16 --tokens 256 --hidden 16 --head-dims 16 --ms 1 --run r1 --commit c0ffee"
PATTERNS = ("ones", "causal", "window200", "butterfly", "random/2", "random/4", "local/2", "local/4")


def bench_tiny(options: str, out: Path) -> int:
    """A run of the tiniest cells, to which the options add; its exit code."""
    return run.main(f"{TINY} {options} --out {out}".split())


def bench_masked(options: str, out: Path) -> int:
    """A run of the tiniest cells that block masks have; its exit code."""
    return run.main(f"{MASKED} {options} --out {out}".split())


def parsed(line: str) -> argparse.Namespace:
    """The benchmark's arguments on a CPU."""
    return parser_of(None).parse_args(["--device", "cpu", *line.split()])


def rows_of(path: Path) -> list[dict[str, str]]:
    """All of a results file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def timed_in(path: Path) -> list[tuple[str, str, str]]:
    """Implementation, pass and causal of each result."""
    return [
        (row["impl"], row["pass"], row["causal"]) for row in rows_of(path) if row["pass"] != "gemm" and not row["why"]
    ]


def why_in(path: Path) -> list[tuple[str, str, str]]:
    """Implementation, causal and reason of each row without one."""
    return [(row["impl"], row["causal"], row["why"]) for row in rows_of(path) if row["why"]]


def forget_libraries() -> None:
    """What was found, or not, of other libraries is looked for again."""
    for remembered in (peers._function, peers.missing):
        remembered.cache_clear()
