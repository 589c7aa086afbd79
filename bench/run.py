"""Versions and peers over the field's shapes, in one run: correct first, then timed in turns. `flashzoo bench --help`

For each cell (a shape and a pass) every implementation runs once at full size, and two heads of what it returns are held
against the oracle; one that fails gets no speed. The others are then timed in turns, so that a warming GPU is unfair to
none: flush L2, CUDA event, call, CUDA event. The backward pass is timed alone. A bf16 matmul, timed before and after,
says what the GPU could do in this run; with `--dtype e4m3`, where inputs are FP8 and there is no backward pass, an FP8 one
too. A version that quantizes 16-bit inputs is timed so, end to end, under its name with `_end_to_end` behind it, and with
`_deterministic` behind it any that has an order of accumulation which is fixed.

With `--masks` cells have block masks (`bench.masks`), and the FLOPs of the pairs that those show; what takes no block mask runs in
the dense cells beside them. All cells of one size and pass, masked and dense, are timed in the same turns. Masked cells, and dense
ones of more than 16k tokens, are checked on 1024 queries from everywhere.

Each implementation that is asked for has a row in each cell: its result, or in the column `why` the reason that there is none, which
begins with "refused", "missing", "out of memory" or "FAILED". `--resume` adds the rows that a run lacks. It tries nothing again but
what was missing and is there now: what failed once would fail for ever.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from math import ceil, inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashzoo
from bench import masks
from bench.peers import FP8_PEERS, LINEAR_PEERS, MASKED_PEERS, PEERS, Attention, missing, package, peer
from flashzoo.accuracy import Judge
from flashzoo.call.forms import MaskForm
from flashzoo.call.problem import Problem
from flashzoo.compare import expected_s
from flashzoo.reference import Result
from flashzoo.spec import Spec, duration
from flashzoo.timing import MIN_REPEATS, Clock, Operation, OutOfTimeError, Timing, with_peak
from flashzoo.workloads import TORCH_DTYPES, flops, hardware, inputs, workloads

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
)
"""The last five: MiB that one call takes at most beyond what it finds, by torch's allocator; microseconds of the host until a call returns,
on an idle GPU; seconds of the cell's first call, in the process that compiled ahead or in the run; MiB that a call reads from and writes to
the GPU's memory, which `bench.traffic` measures; and why there is no result. On the CPU the first two are empty."""
KEY_FIELDS = (*SHAPE_FIELDS, "mask")
FIELDS: tuple[str, ...] = (*RUN_FIELDS, "impl", *SHAPE_FIELDS, *RESULT_FIELDS)
TAGS = {"fwd": "bench", "bwd": "bench_bwd"}
PASSES = tuple(TAGS)
DEFAULT_MODES = {"bwd": ("v3_deterministic@8192",)}
"""What runs unasked besides the versions as they are: at one length, which shows what a fixed order costs."""
MASKED_SIZES = ((16384, 2048), (65536, 512))
"""Tokens, of one sequence, and hidden sizes of a run with block masks."""
MASKED_HEAD_DIMS = (128, 64)
OWN_HEAD_DIMS = (64,)
"""Where `--tokens` and `--hidden` are given and no head dims are."""
DENSE = "dense"
"""What stands among the names of masks for none."""
ENDINGS: dict[str, dict[str, Any]] = {"_end_to_end": {"precision": "fp8"}, "_deterministic": {"deterministic": True}}
"""What may end the name of a version, and what it is then called with: on 16-bit inputs, quantisation included; in a fixed order."""
MASKED_ONLY = "blocksparse"
MATMUL_SIZE = {"cuda": 8192, "cpu": 256}
LONGEST_S = 3600
"""What is expected to take longer on a CPU needs a budget."""
WHOLE, QUERIES = 16384, 1024
"""Dense cells of at most so many queries are checked in all of them, others and masked ones in so many."""
PEER_SLACK = 4.0
"""A peer's numerics are its own (another rounding of P, atomics): it is refused a speed where it errs this many times
what a version may. Versions get no slack."""

MISSING, REFUSED, NO_MEMORY, FAILED = "missing", "refused", "out of memory", "FAILED"
"""What the column `why` begins with."""
CROWDED = f"{NO_MEMORY}, with the tensors held of all that is timed in the same turns: ask for fewer"
GEMM = "gemm"
"""The pass of a row that is a matrix product's."""

Row = dict[str, object]


@dataclass(frozen=True)
class Cell:
    """One shape, pass and block mask; `problem.grad` says which pass, and mask is one of `bench.masks` or empty."""

    problem: Problem
    mask: str = ""

    @property
    def pass_(self) -> str:
        return "bwd" if self.problem.grad else "fwd"

    @property
    def fields(self) -> Row:
        """The columns that say what was asked, but for `density`."""
        shape = {name: getattr(self.problem, name) for name in SHAPE_FIELDS[1:]}
        return {**shape, "pass": self.pass_, "causal": int(self.problem.causal), "mask": self.mask}

    @property
    def key(self) -> tuple[str, ...]:
        """The shape, pass and mask as a results file holds them."""
        return key_of(self.fields)

    @property
    def pattern(self) -> masks.Pattern | None:
        """The block mask, on the problem's device."""
        return masks.pattern(self.mask, self.problem.seqlen_q, self.problem.device) if self.mask else None

    @property
    def density(self) -> float:
        """The share of the pairs, of those that causal leaves, that the block mask shows."""
        return self.pattern.visible if self.pattern else 1

    @property
    def queries(self) -> Tensor | None:
        """The queries that are checked; None where all are. One of each run of equally many, at ever other places in a block."""
        seqlen = self.problem.seqlen_q
        if not self.mask and seqlen <= WHOLE:
            return None
        step = max(1, seqlen // QUERIES)
        first = torch.arange(0, seqlen, step, device=self.problem.device)
        return (first + first // step * 37 % step).clamp(max=seqlen - 1)

    def __str__(self) -> str:
        p = self.problem
        shape = f"{p.batch}x{p.seqlen_q}x{p.heads}"
        what = f"{self.mask:<10}" if self.mask else f"{'causal' if p.causal else 'full':<6}"
        return f"{self.pass_} d{p.head_dim:<3} {what} {shape}"


Work = dict[Cell, list[str]]
"""What is to be measured: for each cell these implementations."""


def cells(args: argparse.Namespace) -> list[Cell]:
    """The cells that the arguments leave, in the workloads' order; of other sizes where `--tokens` and `--hidden` are given.

    With `--masks` head dim by head dim, size by size, and pass by pass: the dense cells, then the masked ones.
    """
    if args.masks:
        return list(_masked(args))
    own = bool(args.tokens)
    chosen = []
    for pass_ in passes(args):
        problems = _sized(args) if own else [w.problem for w in workloads(TAGS[pass_])]
        chosen += [Cell(_here(p, pass_, args)) for p in problems if own or _wanted(p, args)]
    return chosen


def _here(problem: Problem, pass_: str, args: argparse.Namespace) -> Problem:
    return replace(problem, **hardware(args.device), dtype=args.dtype, out_dtype=None, grad=pass_ == "bwd")  # pyright: ignore[reportArgumentType]


def _masked(args: argparse.Namespace) -> Iterator[Cell]:
    if args.tokens:
        sizes = [(args.tokens, seqlen, args.hidden) for seqlen in args.seqlens or (args.tokens,)]
    else:
        sizes = [(tokens, tokens, hidden) for tokens, hidden in MASKED_SIZES if tokens in (args.seqlens or (tokens,))]
    for head_dim in args.head_dims or MASKED_HEAD_DIMS:
        for tokens, seqlen, hidden in sizes:
            heads = hidden // head_dim
            problem = Problem(tokens // seqlen, seqlen, seqlen, heads, heads, head_dim)
            for pass_ in passes(args):
                here = _here(problem, pass_, args)
                dense = args.causal if DENSE in args.masks else ()
                yield from (Cell(replace(here, causal=causal)) for causal in dense)
                yield from (Cell(here, mask) for mask in args.masks if mask != DENSE)


def passes(args: argparse.Namespace) -> list[str]:
    """Those asked for; where none are, all that the dtype has: e4m3 has no backward pass."""
    return args.passes or [pass_ for pass_ in PASSES if (pass_, args.dtype) != ("bwd", "e4m3")]


def _sized(args: argparse.Namespace) -> list[Problem]:
    def sized(head_dim: int, causal: bool, seqlen: int) -> Problem:
        heads = args.hidden // head_dim
        return Problem(args.tokens // seqlen, seqlen, seqlen, heads, heads, head_dim, causal=causal)

    seqlens = args.seqlens or (args.tokens,)
    return [sized(head_dim, causal, seqlen) for head_dim in args.head_dims or OWN_HEAD_DIMS for causal in args.causal for seqlen in seqlens]


def _wanted(problem: Problem, args: argparse.Namespace) -> bool:
    sizes = ((problem.head_dim, args.head_dims), (problem.seqlen_q, args.seqlens), (problem.causal, args.causal))
    return all(not wanted or size in wanted for size, wanted in sizes)


def default_impls(pass_: str, dtype: str = "bf16", masked: bool = False) -> list[str]:
    """Every registered version of that dtype but `sdpa`, which the peers stand for, and `blocksparse`, where no cell has a block mask;
    `DEFAULT_MODES`; and the peers that need linear memory, there or not. Backward, and with block masks, versions that need it too."""
    specs = [spec for spec in flashzoo.versions().values() if dtype in (*spec.dtypes, *spec.cpu_dtypes)]
    specs = [spec for spec in specs if spec.name != "sdpa" and (masked or spec.name != MASKED_ONLY)]
    if pass_ == "bwd":
        specs = [spec for spec in specs if spec.backward is not None]
    if pass_ == "bwd" or masked:
        specs = [spec for spec in specs if spec.memory == "linear"]
    names = [spec.name for spec in specs]
    modes = [] if masked else [mode for mode in DEFAULT_MODES.get(pass_, ()) if parted(mode.partition("@")[0])[0] in names]
    peers = FP8_PEERS if dtype == "e4m3" else MASKED_PEERS if masked else LINEAR_PEERS
    return [*names, *modes, *peers]


def foreign(impls: Iterable[str]) -> list[str]:
    """Those that are versions from outside of flashzoo."""
    specs = flashzoo.versions()
    found = {impl: specs.get(parted(impl.partition("@")[0])[0]) for impl in impls}
    return [impl for impl, spec in found.items() if spec and not spec.impl.startswith("flashzoo.")]


def fitting(impls: list[str], cell: Cell, masked: bool) -> list[str]:
    """Those that are for the cell: of versions, in a masked one, those that take a block mask, and in a dense one of a run with masks
    all but `blocksparse`, which is v2 there; what has a length behind its name, at that length."""
    specs = flashzoo.versions()

    def fits(impl: str, seqlen: str) -> bool:
        spec = specs.get(parted(impl)[0])
        if seqlen and int(seqlen) != cell.problem.seqlen_q:
            return False
        if cell.mask:
            return spec is None or "block_mask" in spec.features
        return not (masked and impl == MASKED_ONLY)

    parts = [impl.partition("@") for impl in impls]
    return list(dict.fromkeys(impl for impl, _, seqlen in parts if fits(impl, seqlen)))


def names_with_endings() -> list[str]:
    """The names of versions with each of `ENDINGS` that they can be called with."""
    specs = flashzoo.versions().values()
    can = {"_end_to_end": [spec for spec in specs if spec.quantizes]}
    can["_deterministic"] = [spec for spec in specs if "deterministic" in spec.features]
    return [f"{spec.name}{ending}" for ending in ENDINGS for spec in can[ending]]


def parted(impl: str) -> tuple[str, dict[str, Any]]:
    """The name without its ending, and what that asks for."""
    ending = next((ending for ending in ENDINGS if impl.endswith(ending) and impl not in flashzoo.versions()), "")
    return impl.removesuffix(ending), ENDINGS.get(ending, {})


def attention(impl: str, cell: Cell) -> Attention:
    """The version or peer of that name as a function of q, k and v."""
    problem, pattern = cell.problem, cell.pattern
    if impl in PEERS:
        return peer(impl, problem, pattern) if pattern else peer(impl, problem)
    version, options = parted(impl)
    if pattern:
        options = {**options, "block_mask": pattern.mask}
    return partial(flashzoo.attention, causal=problem.causal, window_size=problem.window, version=version, **options)


def objection(impl: str, cell: Cell) -> str | None:
    """Why the cell is not given to the implementation, as the column `why` holds it; None where nothing is declared against it."""
    if impl in PEERS:
        reason = missing(impl)
        return reason and f"{MISSING}: {reason}"
    version, options = parted(impl)
    form = cell.pattern.mask.form if cell.pattern else None
    asked = replace(cell.problem, block_mask=form, **options)
    if not (reasons := flashzoo.versions()[version].unsupported(asked)):
        return None
    return f"{REFUSED if declared(version).unsupported(asked) else MISSING}: {'; '.join(reasons)}"


def declared(version: str) -> Spec:
    """What a version declares, the packages that it needs taken to be there."""
    return replace(flashzoo.versions()[version], requires=(), backward_requires=())


class Contender:
    """One implementation on one cell's inputs. Making it runs the forward pass where the backward pass is the cell's.

    Args:
        impl: a version, perhaps with an ending, or a peer.
        cell: what to run.
        tensors: q, k, v and dout.
    """

    def __init__(self, impl: str, cell: Cell, tensors: tuple[Tensor, ...]) -> None:
        self.impl, self.grad, self.out_dtype = impl, cell.problem.grad, TORCH_DTYPES[cell.problem.out_dtype]
        self.queries = cell.queries
        self.function = attention(impl, cell)
        *self.leaves, self.dout = tensors
        if self.grad:
            self.leaves = [x.detach().requires_grad_() for x in self.leaves]
            self.out = self.function(*self.leaves)

    def run(self, dout: Tensor | None = None) -> tuple[Tensor, ...]:
        """What is timed: the forward pass, giving `(out,)`, or the backward pass alone, giving `(dq, dk, dv)`.

        Args:
            dout: another gradient of out than the inputs'.
        """
        if self.grad:
            return torch.autograd.grad(self.out, self.leaves, self.dout if dout is None else dout, retain_graph=True)
        with torch.no_grad():
            return (self.function(*self.leaves),)

    def result(self) -> Result:
        """One run's out and, in a backward cell, gradients; where only some queries are checked, those of these queries' out alone."""
        dout = None
        if self.grad and self.queries is not None:
            dout = torch.zeros_like(self.dout).index_copy_(1, self.queries, self.dout[:, self.queries])
        found = self.run(dout)
        out, gradients = (self.out.detach(), found) if self.grad else (found[0], ())
        # A peer may have another dtype for out, as cuDNN in FP8; it is judged in ours.
        return Result(out.to(self.out_dtype) if self.impl in PEERS else out, None, *gradients)


def first_call(impl: str, cell: Cell, tensors: tuple[Tensor, ...]) -> tuple[Contender, Result, float]:
    """The implementation on these inputs, what it gives, and the seconds that this took: what it compiles is compiled here."""
    start = time.perf_counter()
    contender = Contender(impl, cell, tensors)
    result = contender.result()
    if cell.problem.device == "cuda":
        torch.cuda.synchronize()
    return contender, result, time.perf_counter() - start


class Referee:
    """Holds full-size results of one cell against the oracle, on the first batch element and two heads (or one group).

    Where only some queries are checked (`Cell.queries`), the oracle computes these, on all keys. Gradients then are those of these
    queries' out: so dk and dv are known in full, and every block of a mask has its part in them.

    Args:
        cell: what ran.
        tensors: q, k, v and dout at full size.
    """

    def __init__(self, cell: Cell, tensors: tuple[Tensor, ...]) -> None:
        problem = cell.problem
        group = problem.heads // problem.heads_kv
        self.heads_kv = min(problem.heads_kv, ceil(2 / group))
        self.heads = self.heads_kv * group
        self.sample = replace(problem, batch=1, heads=self.heads, heads_kv=self.heads_kv, lse=False)
        self.tensors = [x[:1, :, :n] for x, n in zip(tensors, (self.heads, self.heads_kv, self.heads_kv, self.heads), strict=True)]
        self.queries, self.mask = cell.queries, None
        if self.queries is not None:
            self.tensors = [x if i in (1, 2) else x[:, self.queries] for i, x in enumerate(self.tensors)]
            if cell.pattern:
                self.mask = cell.pattern.of_queries(self.queries)
            elif problem.causal:
                self.mask = masks.in_band(self.queries, problem.seqlen_k)[None, None]
            form = None if self.mask is None else MaskForm()
            self.sample = replace(self.sample, seqlen_q=len(self.queries), causal=False, block_mask=form)
        self.judges: dict[str | None, Judge] = {}

    def judge(self, impl: str) -> Judge:
        """Of what that implementation is asked for, which may err more where it quantizes its inputs."""
        precision = parted(impl)[1].get("precision")
        if precision not in self.judges:
            q, k, v, dout = self.tensors
            sample = replace(self.sample, precision=precision)
            self.judges[precision] = Judge(q, k, v, sample, dout if sample.grad else None, mask=self.mask)
        return self.judges[precision]

    def errors(self, impl: str, result: Result) -> Row:
        """The columns max_err and rms_err: of out, or the worst of the gradients.

        Raises:
            WrongResultError: a check fails; for a peer, by more than `PEER_SLACK`.
        """
        heads = {"dk": self.heads_kv, "dv": self.heads_kv}
        parts = {name: x[:1, :, : heads.get(name, self.heads)] for name, x in result.items().items() if name != "lse"}
        if self.queries is not None:
            parts |= {name: parts[name][:, self.queries] for name in ("out", "dq") if name in parts}
        sliced = Result(**parts)
        slack, judge = PEER_SLACK if impl in PEERS else 1, self.judge(impl)
        failed = [str(check) for check in judge.checks(sliced) if not check.used <= slack]
        if failed:
            raise WrongResultError("; ".join(failed))
        found = judge.errors(sliced)
        of_pass = [found[name] for name in ("dq", "dk", "dv") if name in found] or [found["out"]]
        return {"max_err": f"{max(top for top, _ in of_pass):.3e}", "rms_err": f"{max(rms for _, rms in of_pass):.3e}"}


class WrongResultError(Exception):
    """A result fails the rule of `flashzoo.accuracy`."""


def costs(clock: Clock, run: Operation) -> Row:
    """The columns peak_mib and host_us of an operation that has run before; on the CPU none."""
    if not clock.cuda:
        return {}
    return {"peak_mib": f"{with_peak(run, clock.device)[1] / 2**20:.5g}", "host_us": f"{clock.host_us(run):.4g}"}


def timing(times: list[float], operations: float) -> Row:
    """The columns ms, ms_p10, ms_p90 and tflops of a list of milliseconds."""
    found = Timing.of(times)
    speed = operations / found.ms / 1e9
    return {"ms": f"{found.ms:.5g}", "ms_p10": f"{found.p10:.5g}", "ms_p90": f"{found.p90:.5g}", "tflops": f"{speed:.5g}"}


def ceilings(clock: Clock, device: str, ms_each: float, dtype: str) -> list[Row]:
    """The row of the bf16 matmul, and for cells in e4m3 that of the FP8 one."""
    return [ceiling(clock, device, ms_each, product) for product in (("bf16", "e4m3") if dtype == "e4m3" else ("bf16",))]


def ceiling(clock: Clock, device: str, ms_each: float, dtype: str) -> Row:
    """The row of a matmul in bf16 or e4m3, with the GPU's clocks settled."""
    size = MATMUL_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(TORCH_DTYPES[dtype]) for _ in range(2))
    times = clock.settled(lambda: PRODUCTS[dtype](a, b), ms_each)
    return {**no_attention(GEMM, "matmul", dtype, size, size), **timing(times, 2.0 * size**3)}


def no_attention(pass_: str, impl: str, dtype: str, rows: int, columns: int) -> Row:
    """The columns that say what ran, where it was no attention but had a matrix of so many rows and columns."""
    shape = {"batch": 1, "seqlen_q": rows, "seqlen_k": rows, "heads": 1, "heads_kv": 1, "head_dim": columns, "causal": 0}
    return {"pass": pass_, "impl": impl, "dtype": dtype, **shape, "mask": "", "density": 1}


def _fp8_product(a: Tensor, b: Tensor) -> Tensor:
    # Both operands along k, the only way that FP8 tensor cores take them, and their fast accumulation: the highest rate there is.
    one = torch.ones((), device=a.device)
    scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


PRODUCTS = {"bf16": torch.matmul, "e4m3": _fp8_product}


def read(results: Path) -> list[dict[str, str]]:
    """The rows of a results file, of every run; none where it is not there."""
    if not results.exists():
        return []
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


def key_of(row: Mapping[str, object]) -> tuple[str, ...]:
    """The cell that a row is of: `Cell.key`."""
    return tuple(str(row[name]) for name in KEY_FIELDS)


class Results:
    """The rows of one run, appended to a CSV file cell by cell.

    What a run that was killed has written of its last row is cut off, with a line that says so, and no row is added to columns of others.

    Args:
        path: the file; its header is written where it isn't there yet.
        run: the id that all rows share.
        device: "cuda" or "cpu".
        commit: what was measured.

    Raises:
        ValueError: the file has other columns.
    """

    def __init__(self, path: Path, run: str, device: str, commit: str) -> None:
        self.path, self.run = path, run
        self._mend()
        self.common: Row = {
            "run": run,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": commit,
            "gpu": gpu_name(device),
            "torch": torch.__version__,
            "triton": _version_of("triton"),
            "cutlass_dsl": _version_of("nvidia-cutlass-dsl"),
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
            raise ValueError(f"expected a run of {self.path}, which has {f'{last} last' if last else 'none'}, got {self.run}")
        if began["gpu"] != self.common["gpu"]:
            raise ValueError(f"expected the GPU on which {self.run} began, {began['gpu']}, got {self.common['gpu']}")
        for name in ("commit", "torch", "triton", "cutlass_dsl"):
            if began[name] != self.common[name]:
                print(f"run {self.run} began with {name} {began[name]}, and goes on with {self.common[name]}")

    def lacking(self) -> Callable[[str, Cell], bool]:
        """Whether this run has no row of the implementation in the cell, or one that says it was missing, which it is no longer."""
        whys = {(row["impl"], *key_of(row)): row["why"] for row in read(self.path) if row["run"] == self.run}

        def lacks(impl: str, cell: Cell) -> bool:
            why = whys.get((impl, *cell.key))
            return why is None or (why.startswith(MISSING) and not (objection(impl, cell) or "").startswith(MISSING))

        return lacks

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


def _version_of(package: str) -> str:
    try:
        return package_version(package)
    except PackageNotFoundError:
        return ""


def head_commit() -> str:
    """The commit that is checked out, marked where files differ from it; "unknown" where there is no git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def in_turns(todo: Work, masked: bool) -> list[Work]:
    """What is timed together: a cell, or in a run with block masks all cells of one size and pass, masked and dense.

    A GPU at its power limit is as fast as what runs beside lets it be: so only what is timed in the same turns has a ratio.
    """
    together: dict[Cell, Work] = {}
    for cell, impls in todo.items():
        of = Cell(replace(cell.problem, causal=False)) if masked else cell
        together.setdefault(of, {})[cell] = impls
    return list(together.values())


def measure(work: Work, clock: Clock, ms_each: float, ahead: Mapping[tuple[str, Cell], float]) -> dict[Cell, list[Row]]:
    """For each cell a row for each implementation: what it took where it is right on this cell, else why it has no result.

    Where one costs the process its GPU, or the clock's deadline passes, only the rows of those that have no result: the others are for
    another process, or time, to measure.

    Args:
        work: what is timed in turns, once each is checked.
        ahead: seconds of first calls that another process made, to compile.
    """
    contenders: dict[tuple[Cell, str], Contender] = {}
    found: dict[tuple[Cell, str], Row] = {}
    for cell, impls in work.items():
        rows_of_cell, right = _admitted(cell, impls, clock, ahead)
        found |= {(cell, impl): row for impl, row in rows_of_cell.items()}
        contenders |= {(cell, impl): contender for impl, contender in right.items()}
        if clock.lost:
            contenders = {}
            break
    try:
        times = clock.measure({key: contender.run for key, contender in contenders.items()}, ms_each) if contenders else {}
        for (cell, impl), taken in times.items():
            found[cell, impl] |= timing(taken, flops(cell.problem, cell.pass_, cell.density))
    except torch.OutOfMemoryError:  # each ran alone
        found |= {key: {"why": CROWDED} for key in contenders}
    except OutOfTimeError:
        contenders = {}
    rows: dict[Cell, list[Row]] = {cell: [] for cell in work}
    for (cell, impl), row in found.items():
        if (cell, impl) in contenders or "why" in row:
            rows[cell].append({**cell.fields, "density": f"{cell.density:.6g}", "impl": impl, **row})
    return rows


def _admitted(
    cell: Cell, impls: list[str], clock: Clock, ahead: Mapping[tuple[str, Cell], float]
) -> tuple[dict[str, Row], dict[str, Contender]]:
    """What is known of each implementation before it is timed, and those that are right on the cell."""
    tensors = inputs(cell.problem, device=cell.problem.device)
    referee = Referee(cell, tensors)
    found: dict[str, Row] = {}
    contenders: dict[str, Contender] = {}
    for impl in impls:
        try:
            clock.check()
            if why := objection(impl, cell):
                found[impl] = {"why": why}
            else:
                contender, result, seconds = first_call(impl, cell, tensors)
                row = referee.errors(impl, result)
                row |= {**costs(clock, contender.run), "compile_s": f"{ahead.get((impl, cell), seconds):.3g}"}
                found[impl], contenders[impl] = row, contender
        except OutOfTimeError:
            break
        except torch.OutOfMemoryError:
            found[impl] = {"why": NO_MEMORY}
        except (ImportError, NotImplementedError) as error:
            found[impl] = {"why": f"{MISSING if isinstance(error, ImportError) else REFUSED}: {_one_line(error)}"}
        except Exception as error:  # one implementation's failure must not cost the others their rows
            found[impl] = {"why": f"{FAILED}: {type(error).__name__}: {_one_line(error)}"}
            if clock.lost:
                break
        _free(clock)
    return found, contenders


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _free(clock: Clock) -> None:
    if clock.cuda:
        torch.cuda.empty_cache()


def compile_ahead(todo: Work, workers: int) -> dict[tuple[str, Cell], float]:
    """Fill the disk caches of Triton, torch.compile and CuTe DSL from several processes, so that the run itself hardly compiles.

    Versions and fa4 compile once for a head dim and mask, FlexAttention for every shape, but not for every block mask. What fails here
    fails again, and is reported, in the run.

    Returns:
        The seconds of each first call: long where it compiled, short where another cell's kernels serve.
    """
    jobs = compile_jobs(todo)
    seconds = {}
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_compile_in_one_thread)
    with pool, progress(len(jobs), "compiling ahead") as say:
        waiting = {pool.submit(_compile, impl, group): (impl, group) for impl, group in jobs}
        for future in as_completed(waiting):
            impl, group = waiting[future]
            found = {} if future.exception() else future.result()
            seconds |= {(impl, cell): taken for cell, taken in found.items()}
            say(f"{impl}, {group[0]}: {f'{sum(found.values()):.1f} s' if found else 'not compiled'}")
    return seconds


def compile_jobs(todo: Work) -> list[tuple[str, list[Cell]]]:
    """What `compile_ahead` has a process do each: an implementation and cells that share its kernels, forward before backward.

    A kernel may still have variants, by whether a stride is a multiple of 16: so a process runs all of its cells.
    """
    jobs: dict[tuple, list[Cell]] = {}
    for cell in sorted(todo, key=lambda cell: cell.problem.grad):
        problem = cell.problem
        kind = cell.pattern.kind if cell.pattern else "causal" if problem.causal else "full"
        for impl in todo[cell]:
            spec = flashzoo.versions().get(parted(impl)[0])
            if impl == "flex":
                of = (problem.batch, problem.seqlen_q, "masked" if cell.mask else kind)
            elif impl == "fa4" or (spec and spec.requires):
                of = (bool(cell.mask), kind)
            else:
                continue
            jobs.setdefault((impl, cell.pass_, problem.head_dim, *of), []).append(cell)
    return [(key[0], group) for key, group in jobs.items()]


def _compile_in_one_thread() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback


def _compile(impl: str, group: list[Cell]) -> dict[Cell, float]:
    """Seconds of each cell's first call, where it has one. What a process imports, once for many calls, is imported before."""
    seconds = {}
    spec = flashzoo.versions().get(parted(impl)[0])
    for cell in group:
        try:
            if objection(impl, cell):
                continue
            for name in spec.requires if spec else ():
                import_module(name)
            attention(impl, cell)
            seconds[cell] = first_call(impl, cell, inputs(cell.problem, device=cell.problem.device))[2]
        except Exception:  # the run meets it again, and reports it
            continue
        finally:
            torch.cuda.empty_cache()
    return seconds


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """A function that prints the line of one of so many steps. The time left is before it or, under a terminal, in a bar beneath."""
    if not sys.stdout.isatty():
        started, done = time.monotonic(), 0

        def tell(line: str) -> None:
            nonlocal done
            done += 1
            left = (time.monotonic() - started) / done * (total - done)
            print(f"[{done}/{total}, {left:.0f} s left] {line}", flush=True)

        yield tell
        return
    from rich.progress import Progress, TimeElapsedColumn

    # The speed of all steps up to now: of the last half minute there may be none.
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), speed_estimate_period=inf) as bar:
        task = bar.add_task(what, total=total)

        def say(line: str) -> None:
            bar.console.print(line, highlight=False, markup=False)
            bar.advance(task)

        yield say


def names(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an argument that lists some of these, with commas between."""
    known = list(choices)

    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected names from {', '.join(known)}, got {', '.join(unknown)}")
        return text.split(",")

    return parse


def whole(text: str, least: int = 1) -> int:
    """The type of an argument that is an integer of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    """The type of an argument that lists positive integers, with commas between."""
    return [whole(number) for number in text.split(",")]


def amount(text: str) -> float:
    """The type of an argument that is a number, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return number


def _mask_names(text: str) -> list[str]:
    found = [DENSE, *masks.NAMES] if text == "default" else text.split(",")
    unknown = [name for name in found if name != DENSE and not masks.known(name)]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected names of the form {DENSE}|{masks.FORMS}, got {', '.join(unknown)}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashzoo bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    versions, modes = list(flashzoo.versions()), names_with_endings()
    truth = {"0": False, "1": True}

    def impl_names(text: str) -> list[str]:
        found = text.split(",")
        names([*versions, *modes, *PEERS])(",".join(name.partition("@")[0] for name in found))
        for name, at, seqlen in (name.partition("@") for name in found):
            if at and not seqlen.isdecimal():
                raise argparse.ArgumentTypeError(f"expected {name}@ and a length, such as {name}@8192, got {name}@{seqlen}")
        return found

    def truths(text: str) -> list[bool]:
        return [truth[name] for name in names(truth)(text)]

    what = parser.add_argument_group("what runs")
    what.add_argument(
        "--impls",
        metavar="NAME,...",
        type=impl_names,
        help=f"versions ({', '.join(versions)}), these with {' or '.join(ENDINGS)} behind the name, and peers ({', '.join(PEERS)}); with "
        "@8192 behind the name in cells of this seqlen alone. Default: what takes the dtype, and with --masks block masks or none",
    )
    what.add_argument("--passes", metavar="PASS,...", type=names(PASSES), help="fwd,bwd (default: those that the dtype has)")
    what.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32", "e4m3"), help="of the inputs (default: bf16)")
    what.add_argument(
        "--masks",
        metavar="NAME,...",
        type=_mask_names,
        help="cells with block masks: dense (none, as --causal says), ones, causal, window1024, butterfly, random/4 and local/4 (a quarter "
        f"of the blocks), with any numbers; `default` is dense, {', '.join(masks.NAMES)}. In one sequence of 16k tokens with hidden 2048 "
        "and one of 64k with hidden 512, head dims 128 and 64, unless the sizes below say otherwise",
    )
    what.add_argument("--list", action="store_true", help="say which peers there are, installed or missing, and do no more")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--head-dims", metavar="N,...", type=numbers, help="only these, such as 64,128")
    sizes.add_argument("--seqlens", metavar="N,...", type=numbers, help="only these, such as 512,8192")
    sizes.add_argument("--causal", metavar="0,1", type=truths, default=[False, True], help="only 0 or only 1")
    sizes.add_argument("--tokens", metavar="N", type=whole, help="other sizes than the field's: batch * seqlen; needs --hidden")
    sizes.add_argument("--hidden", metavar="N", type=whole, help="other sizes than the field's: heads * head_dim; needs --tokens")
    how = parser.add_argument_group("how")
    how.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    how.add_argument("--ms", type=amount, default=80.0, help="measured time for each implementation and cell (default: 80)")
    how.add_argument(
        "--budget-s",
        metavar="S",
        type=amount,
        default=inf,
        help="stop once so much time is gone, after the call at hand; what was not timed yet of its cell, or with --masks of all of its "
        "size and pass, is left to --resume",
    )
    how.add_argument(
        "--workers",
        metavar="N",
        type=partial(whole, least=0),
        default=max(1, (os.cpu_count() or 1) - 2),
        help="processes that compile ahead, on a GPU (default: the cores but two); 0: none",
    )
    results = parser.add_argument_group("results")
    results.add_argument("--out", metavar="CSV", type=Path, help="the file that rows are appended to (default: bench/results/<gpu>.csv)")
    results.add_argument("--run", metavar="ID", default=datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S"), help="of the run's rows")
    results.add_argument("--resume", metavar="ID", help="go on with this run: measure only what it has no row of")
    results.add_argument("--commit", metavar="ID", help="what is measured, where there is no git")
    return parser


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Arguments that don't go together are an error of the parser's."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected cpu, since torch sees no GPU, got cuda")
    if args.dtype == "e4m3" and "bwd" in passes(args):
        parser.error(f"--passes: expected fwd for e4m3, which has no backward pass, got {','.join(args.passes)}")
    if args.dtype == "e4m3" and args.masks:
        parser.error("--masks: expected 16 or 32 bits, got e4m3, which takes no block mask")
    if bool(args.tokens) != bool(args.hidden):
        given, other = ("--tokens", "--hidden") if args.tokens else ("--hidden", "--tokens")
        parser.error(f"--tokens and --hidden: expected both or neither, got {given} without {other}")
    head_dims = args.head_dims or (MASKED_HEAD_DIMS if args.masks else OWN_HEAD_DIMS)
    for name, total, parts in (("--tokens", args.tokens, args.seqlens or ()), ("--hidden", args.hidden, head_dims)):
        if total and any(total % part for part in parts):
            parser.error(f"{name}: expected a multiple of each of {', '.join(map(str, sorted(set(parts))))}, got {total}")
    chosen = cells(args)
    if args.masks and not args.hidden:
        hidden = [size for _, size in MASKED_SIZES]
        if uneven := [head_dim for head_dim in args.head_dims or () if any(size % head_dim for size in hidden)]:
            expected = f"divisors of {' and '.join(map(str, hidden))}, or --tokens and --hidden"
            parser.error(f"--head-dims: expected {expected}, got {','.join(map(str, uneven))}")
    if not chosen:
        sizes = {"--head-dims": args.head_dims, "--seqlens": args.seqlens}
        got = " ".join(f"{name} {','.join(map(str, given))}" for name, given in sizes.items() if given)
        parser.error(f"expected sizes that a cell of the field's has, or --tokens and --hidden for others, got {got}")


def _check_size(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """The field's sizes on a CPU are an error of the parser's."""
    if args.device == "cpu" and not args.tokens:
        small = "small ones on a CPU, such as --tokens 256 --hidden 64 --dtype fp32"
        why = "none" if torch.cuda.is_available() else "none on a machine with no GPU"
        parser.error(f"--tokens and --hidden: expected {small}, got {why}; the field's sizes take a CPU days")


def check_out(args: argparse.Namespace, impls: Iterable[str], parser: argparse.ArgumentParser) -> None:
    """Others' versions in this repository's results are an error of the parser's."""
    if not args.out and (own := foreign(impls)):
        parser.error(f"--out: expected a file of your own for {', '.join(own)}, which this repository's results don't have")


def offer_rows(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that appends rows only where it is told a run's id; `results_of` reads them."""
    parser.add_argument("--run", help="id of the run's rows; without it none are written")
    parser.add_argument("--out", type=Path, help="the CSV file; default: bench/results/<gpu>.csv")
    parser.add_argument("--commit", help="what is measured, where there is no git")


def results_of(args: argparse.Namespace, run: str, device: str, parser: argparse.ArgumentParser) -> Results:
    """What `--out` and `--commit` say; a file with other columns is an error of the parser's."""
    try:
        return Results(args.out or results_path(device), run, device, args.commit or head_commit())
    except ValueError as error:
        parser.error(f"--out: {error}")


def listing() -> str:
    """Every peer, a line each: the package that it is of, and that package's version or why the peer is missing."""
    return "\n".join(f"{name:<15} {missing(name) or f'{package(name)} {_version_of(package(name))}'}" for name in PEERS)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a version gave a wrong result or an error, else 0 (what was refused or is missing has not failed)."""
    started = time.monotonic()
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        print(listing())
        return 0
    _check(args, parser)
    impls = {pass_: args.impls or default_impls(pass_, args.dtype, bool(args.masks)) for pass_ in passes(args)}
    check_out(args, [impl for chosen in impls.values() for impl in chosen], parser)
    _check_size(args, parser)
    results = results_of(args, args.resume or args.run, args.device, parser)
    try:
        if args.resume:
            results.check_begun()
    except ValueError as error:
        parser.error(f"--resume: {error}")
    lacks = results.lacking()
    todo: Work = {}
    for cell in cells(args):
        left = [impl for impl in fitting(impls[cell.pass_], cell, bool(args.masks)) if lacks(impl, cell)]
        if left:
            todo[cell] = left
    expected = _expected_s(todo, args.ms) if args.device == "cpu" else 0.0
    about = f"about {duration(expected)}" if expected <= LONGEST_S else f"more than {duration(LONGEST_S)}"
    if expected > LONGEST_S and args.budget_s == inf:
        parser.error(f"--budget-s: expected one for so much work, or smaller --tokens and --hidden, got none for {about} on a CPU")
    where = f"{gpu_name(args.device)}, {about}" if expected >= 1 else gpu_name(args.device)
    print(f"run {results.run}, {len(todo)} cells, {where}, into {results.path}", flush=True)
    for impl in dict.fromkeys(impl for chosen in todo.values() for impl in chosen):
        if why := missing(impl):
            print(f"{impl} is missing: {why}", flush=True)
    ahead = compile_ahead(todo, args.workers) if todo and args.device == "cuda" and args.workers else {}
    failed = _run(todo, results, args, started, ahead) if todo else False
    print(f"{time.monotonic() - started:.0f} s")
    return int(failed)


def _run(todo: Work, results: Results, args: argparse.Namespace, started: float, ahead: Mapping[tuple[str, Cell], float]) -> bool:
    """Whether a version failed."""
    clock, failed, stopped, done = Clock(args.device, started + args.budget_s), False, "", 0
    untimed = Clock(args.device)  # a product of matrices takes half a second
    results.append(ceilings(untimed, args.device, args.ms, args.dtype))
    try:
        with progress(len(todo), "measuring") as say:
            for work in in_turns(todo, bool(args.masks)):
                for cell, rows in measure(work, clock, args.ms, ahead).items():
                    results.append(rows)
                    failed |= _failed(rows)
                    if len(rows) == len(work[cell]) or clock.lost:
                        done += 1
                        say(f"{cell}: {_told(rows)}")
                if clock.lost:
                    stopped, failed = "the last of these has cost this process its GPU", True
                    break
                _free(clock)
                if clock.out_of_time and done < len(todo):
                    stopped = f"{args.budget_s:.0f} s are gone"
                    break
    except KeyboardInterrupt:
        stopped = "interrupted"
        raise
    finally:
        if stopped:
            print(f"stopped after {done} of {len(todo)} cells, {stopped}; go on with --resume {results.run}")
    if not clock.lost:
        results.append(ceilings(untimed, args.device, args.ms, args.dtype))
    return failed


def _expected_s(todo: Work, ms_each: float) -> float:
    """About how many seconds it takes on a CPU, peers taken for `standard`; not all of them where that is past `LONGEST_S`."""
    versions, total = flashzoo.versions(), 0.0
    for cell, impls in todo.items():
        specs = [versions.get(parted(impl)[0], versions["standard"]) for impl in impls]
        judged = 2 / (cell.problem.batch * cell.problem.heads)
        total += expected_s(cell.problem, specs, 4 + MIN_REPEATS, judged) + len(impls) * ms_each / 1e3
        if total > LONGEST_S:
            break
    return total


def _failed(rows: list[Row]) -> bool:
    """Whether a version, and no peer, has."""
    return any(str(row.get("why")).startswith(FAILED) for row in rows if row["impl"] not in PEERS)


def _told(rows: list[Row]) -> str:
    """A cell's rows in words; who is missing was told before."""
    speeds = [f"{row['impl']} {float(str(row['tflops'])):.3g}" for row in rows if "why" not in row]
    reasons = [f"\n    {row['impl']} {row['why']}" for row in rows if "why" in row and not missing(str(row["impl"]))]
    return f"{', '.join(speeds)} TFLOP/s{''.join(reasons)}" if speeds else f"no result{''.join(reasons)}"


if __name__ == "__main__":
    raise SystemExit(main())
