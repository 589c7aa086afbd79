"""Rows of a results file: their columns, who writes them, and what a run has already."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

import torch

from flashzoo.timing import Timing

RUN_FIELDS = ("run", "date", "commit", "gpu", "torch", "triton", "cutlass_dsl")
SHAPE_FIELDS = ("pass", "dtype", "batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "causal")
RESULT_FIELDS = (
    "mask",
    "density",
    "ms",
    "ms_p10",
    "ms_p90",
    "tflops",
    "max_err",
    "rms_err",
    "peak_mib",
    "host_us",
    "compile_s",
    "dram_mib",
    "why",
    "lengths",
    "window",
    "head_dim_v",
    "model",
    "settled_ms",
    "joules",
    "score",
    "gpus",
    "dtype_kv",
)
"""The last fourteen: MiB that one call takes at most beyond what it finds, by torch's allocator; microseconds of the
host until a call returns, on an idle GPU; seconds of the cell's first call, in the process that compiled ahead or in
the run; MiB that a call reads from and writes to the GPU's memory, which `bench.traffic` measures; why there is no
result; and the name of packed sequences' lengths, of which the batch then is the number and seqlen_q and seqlen_k the
totals, or `pages64` for caches in pages of so many keys; the window, as `left:right`, either empty where all are seen;
v's head dim where it is another; whose shape it is, of `bench.models`; milliseconds of a call among its like, alone on
a GPU whose clocks have settled, and the joules that it then takes; what is on the scores, of `bench.scores`; in runs
of `bench.parallel` the number of GPUs that shared a call, of whose tokens seqlen_q and seqlen_k are the totals; and
`e4m3` where keys and values are that beside a 16-bit q. On the CPU the first two, `settled_ms` and `joules` are
empty."""
KEY_FIELDS = (*SHAPE_FIELDS, "mask", "lengths", "window", "head_dim_v", "score", "gpus", "dtype_kv")
FIELDS: tuple[str, ...] = (*RUN_FIELDS, "impl", *SHAPE_FIELDS, *RESULT_FIELDS)
MISSING, REFUSED, NO_MEMORY, FAILED = "missing", "refused", "out of memory", "FAILED"
"""What the column `why` begins with."""
GEMM, COPY = "gemm", "copy"
"""The passes of rows that are a matrix product's, and a copy's."""
Row = dict[str, object]


def read(results: Path) -> list[dict[str, str]]:
    """The rows of a results file, of every run; none where it is not there. ValueError where it is no such file."""
    if not results.exists():
        return []
    with results.open(newline="") as file:
        reader, rows = csv.DictReader(file), []
        for row in reader:
            if lacking := [name for name in ("run", "impl") if name not in row]:
                raise ValueError(f"{results} must be a results file, got one without a column {lacking[0]!r}")
            if None in row or None in row.values():
                raise ValueError(f"{results}, line {reader.line_num}: expected a value for each of its columns")
            rows.append(row)
        return rows


def key_of(row: Mapping[str, object]) -> tuple[str, ...]:
    """The cell that a row is of, as `Cell.key` has it."""
    return tuple(str(row[name]) for name in KEY_FIELDS)


def time_columns(times: list[float], operations: float) -> Row:
    """The columns ms, ms_p10, ms_p90 and tflops of a list of milliseconds."""
    found = Timing.of(times)
    speed = operations / found.ms / 1e9
    return {
        "ms": f"{found.ms:.5g}",
        "ms_p10": f"{found.p10:.5g}",
        "ms_p90": f"{found.p90:.5g}",
        "tflops": f"{speed:.5g}",
    }


def no_attention(pass_: str, impl: str, dtype: str, rows: int, columns: int) -> Row:
    """The columns that say what ran, where it was no attention but had a matrix of so many rows and columns."""
    shape = {
        "batch": 1,
        "seqlen_q": rows,
        "seqlen_k": rows,
        "heads": 1,
        "heads_kv": 1,
        "head_dim": columns,
        "causal": 0,
    }
    return {"pass": pass_, "impl": impl, "dtype": dtype, **shape, "mask": "", "density": 1}


class Results:
    """The rows of one run, appended to a CSV file cell by cell.

    What a run that was killed has written of its last row is cut off, with a line that says so,
    and no row is added to columns of others.

    Args:
        path: the file; its header is written where it isn't there yet.
        run: the id that all rows share.
        device: "cuda" or "cpu".
        commit: what was measured.

    Raises:
        ValueError: the file has other columns.
        OSError: it can't be written, or not be where it should.
    """

    def __init__(self, path: Path, run: str, device: str, commit: str) -> None:
        self.path, self.run = path, run
        self._check_place()
        self._mend()
        self.common: Row = {
            "run": run,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": commit,
            "gpu": gpu_name(device),
            "torch": torch.__version__,
            "triton": version_of("triton"),
            "cutlass_dsl": version_of("nvidia-cutlass-dsl"),
        }

    def append(self, rows: list[Row]) -> None:
        """Write the rows, what this run has in common filled in."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists() or not self.path.stat().st_size
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerows({**self.common, **row} for row in rows)

    def check_begun(self) -> None:
        """Print what is not as it was when the run began.

        Raises:
            ValueError: the file has no row of the run, or it began on another GPU.
        """
        rows = read(self.path)
        began = next((row for row in rows if row["run"] == self.run), None)
        if began is None:
            last = ", ".join(list(dict.fromkeys(row["run"] for row in rows))[-5:])
            raise ValueError(
                f"expected a run of {self.path}, which has {f'{last} last' if last else 'none'}, got {self.run}"
            )
        if began["gpu"] != self.common["gpu"]:
            raise ValueError(f"expected the GPU on which {self.run} began, {began['gpu']}, got {self.common['gpu']}")
        for name in ("commit", "torch", "triton", "cutlass_dsl"):
            if began[name] != self.common[name]:
                print(f"run {self.run} began with {name} {began[name]}, and goes on with {self.common[name]}")

    @property
    def whys(self) -> dict[tuple[str, ...], str]:
        """By implementation and `key_of` what the column `why` says in each row of this run: "" for a result."""
        return {(row["impl"], *key_of(row)): row["why"] for row in read(self.path) if row["run"] == self.run}

    def _check_place(self) -> None:
        """Before a run, not behind its first cell; nothing is made."""
        if self.path.exists():
            self.path.open("r+").close()
            return
        there = next(folder for folder in self.path.absolute().parents if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise PermissionError(
                f"expected a file that can be written, got {self.path}: {there} is no folder to write in"
            )

    def _mend(self) -> None:
        text = self.path.read_bytes() if self.path.exists() else b""
        header, columns = text.partition(b"\n")[0].decode(errors="replace"), ",".join(FIELDS)
        if header != columns and not (b"\n" not in text and columns.startswith(header)):
            raise ValueError(f"expected a file with the columns {columns}, got {self.path} with {header}")
        part = text.rpartition(b"\n")[2]
        if part:
            print(f"{self.path} ended within a row, which is cut off: {part.decode(errors='replace')}")
            os.truncate(self.path, len(text) - len(part))


def gpu_name(device: str) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def results_path(device: str) -> Path:
    """`bench/results/h200.csv` for "NVIDIA H200"."""
    name = gpu_name(device).removeprefix("NVIDIA ").lower().replace(" ", "-")
    return Path(__file__).parent / "results" / f"{name}.csv"


def version_of(package: str) -> str:
    """Of an installed package; "" where it is not there."""
    try:
        return package_version(package)
    except PackageNotFoundError:
        return ""


def head_commit() -> str:
    """The commit that is checked out, marked where files differ from it; "unknown" where there is no git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head
