"""Versions and peers over the field's shapes, in one run: correct first, then timed in turns. `python -m bench.run --help`

For each cell (a shape and a pass) every implementation runs once at full size, and two heads of what it returns are held
against the oracle; one that fails gets no speed. The others are then timed in turns, so that a warming GPU is unfair to
none: flush L2, CUDA event, call, CUDA event. The backward pass is timed alone. A bf16 matmul, timed before and after,
says what the GPU could do in this run; with `--dtype e4m3`, where inputs are FP8 and there is no backward pass, an FP8 one
too. A version that quantizes 16-bit inputs is timed so, end to end, under its name with `_end_to_end` behind it, and with
`_deterministic` behind it any that has an order of accumulation which is fixed.

With `--masks` cells have block masks (`bench.masks`), and the FLOPs of the pairs that those show; what takes no block mask runs in
the dense cells beside them. Masked cells, and dense ones of more than 16k tokens, are checked on 1024 queries from everywhere.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashzoo
from bench import masks
from bench.peers import FP8_PEERS, MASKED_PEERS, PEERS, Attention, missing, peer
from flashzoo.accuracy import Judge
from flashzoo.reference import Result
from flashzoo.spec import MaskForm, Problem
from flashzoo.workloads import TORCH_DTYPES, flops, hardware, inputs, workloads

RUN_FIELDS = ("run", "date", "commit", "gpu", "torch", "triton", "cutlass_dsl")
SHAPE_FIELDS = ("pass", "dtype", "batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "causal")
RESULT_FIELDS = ("mask", "density", "ms", "ms_p10", "ms_p90", "tflops", "max_err", "rms_err")
KEY_FIELDS = (*SHAPE_FIELDS, "mask")
FIELDS: tuple[str, ...] = (*RUN_FIELDS, "impl", *SHAPE_FIELDS, *RESULT_FIELDS)
TAGS = {"fwd": "bench", "bwd": "bench_bwd"}
PASSES = tuple(TAGS)
DEFAULT_PEERS = ("sdpa_flash", "flex")
MASKED_SIZES = ((16384, 2048), (65536, 512))
"""Tokens, of one sequence, and hidden sizes of a run with block masks."""
MASKED_HEAD_DIMS = (128, 64)
DENSE = "dense"
"""What stands among the names of masks for none."""
ENDINGS: dict[str, dict[str, Any]] = {"_end_to_end": {"precision": "fp8"}, "_deterministic": {"deterministic": True}}
"""What may end the name of a version, and what it is then called with: on 16-bit inputs, quantisation included; in a fixed order."""
MASKED_ONLY = "blocksparse"
MATMUL_SIZE = {"cuda": 8192, "cpu": 256}
SETTLE_MS = 400
FLUSH_BYTES = 256 << 20
MIN_REPEATS, MAX_REPEATS = 10, 300
WHOLE, QUERIES = 16384, 1024
"""Dense cells of at most so many queries are checked in all of them, others and masked ones in so many."""
PEER_SLACK = 4.0
"""A peer's numerics are its own (another rounding of P, atomics): it is refused a speed where it errs this many times
what a version may. Versions get no slack."""

Row = dict[str, object]
Operation = Callable[[], object]


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
        return tuple(str(self.fields[name]) for name in KEY_FIELDS)

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
    return [sized(head_dim, causal, seqlen) for head_dim in args.head_dims or (64,) for causal in args.causal for seqlen in seqlens]


def _wanted(problem: Problem, args: argparse.Namespace) -> bool:
    sizes = ((problem.head_dim, args.head_dims), (problem.seqlen_q, args.seqlens), (problem.causal, args.causal))
    return all(not wanted or size in wanted for size, wanted in sizes)


def default_impls(pass_: str, dtype: str = "bf16", masked: bool = False) -> list[str]:
    """Every registered version of that dtype but `sdpa`, which the peers stand for, and `blocksparse`, where no cell has a block mask; and
    the peers. Backward, and with block masks, only what needs linear memory."""
    specs = [spec for spec in flashzoo.versions().values() if dtype in (*spec.dtypes, *spec.cpu_dtypes)]
    specs = [spec for spec in specs if spec.name != "sdpa" and (masked or spec.name != MASKED_ONLY)]
    if pass_ == "bwd":
        specs = [spec for spec in specs if spec.backward is not None]
    if pass_ == "bwd" or masked:
        specs = [spec for spec in specs if spec.memory == "linear"]
    peers = FP8_PEERS if dtype == "e4m3" else MASKED_PEERS if masked else DEFAULT_PEERS
    return [*(spec.name for spec in specs), *peers]


def foreign(impls: dict[str, list[str]]) -> list[str]:
    """Those, by pass, that are versions from outside of flashzoo."""
    specs = flashzoo.versions()
    found = {impl: specs.get(parted(impl)[0]) for chosen in impls.values() for impl in chosen}
    return [impl for impl, spec in found.items() if spec and not spec.impl.startswith("flashzoo.")]


def fitting(impls: list[str], cell: Cell, masked: bool) -> list[str]:
    """Those that are for the cell: of versions, in a masked one, those that take a block mask, and in a dense one of a run with masks
    all but `blocksparse`, which is v2 there."""
    specs = flashzoo.versions()

    def fits(impl: str) -> bool:
        spec = specs.get(parted(impl)[0])
        if cell.mask:
            return spec is None or "block_mask" in spec.features
        return not (masked and impl == MASKED_ONLY)

    return [impl for impl in impls if fits(impl)]


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
            self.judges[precision] = Judge(q, k, v, sample, None, dout if sample.grad else None, mask=self.mask)
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


class Clock:
    """Times operations in turns, on CUDA events or, on the CPU, on the process's own clock."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.flushed = torch.empty(FLUSH_BYTES if self.cuda else 0, dtype=torch.int8, device=device)

    def turns(self, operations: dict[str, Operation], repeats: dict[str, int]) -> dict[str, list[float]]:
        """Milliseconds of every repeat, by name; the repeats of each operation are spread evenly over the rounds.

        Each round has an order of its own: a GPU at its power limit is slower behind an operation that draws more, and
        none shall always follow the same one.
        """
        rounds = max(repeats.values())
        stops = {name: [] for name in operations}
        shuffle = random.Random(0).sample
        for turn in range(rounds):
            for name in shuffle(list(operations), len(operations)):
                if turn * repeats[name] // rounds != (turn + 1) * repeats[name] // rounds:
                    stops[name].append(self._once(operations[name]))
        return {name: [stop() for stop in waiting] for name, waiting in stops.items()}

    def _once(self, run: Operation) -> Callable[[], float]:
        if not self.cuda:
            start = time.perf_counter()
            run()
            taken = (time.perf_counter() - start) * 1e3
            return lambda: taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Besides emptying L2 this keeps the GPU busy while the host gets ahead, so that no launch is timed.
        self.flushed.zero_()
        begin.record()
        run()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return elapsed

    def measure(self, operations: dict[str, Operation], ms_each: float) -> dict[str, list[float]]:
        """Milliseconds, by name, of as many repeats as take about `ms_each` together."""
        guess = self.turns(operations, dict.fromkeys(operations, 3))
        repeats = {name: min(MAX_REPEATS, max(MIN_REPEATS, ceil(ms_each / sorted(times)[1]))) for name, times in guess.items()}
        return self.turns(operations, repeats)


def timing(times: list[float], operations: float) -> Row:
    """The columns ms, ms_p10, ms_p90 and tflops of a list of milliseconds."""
    low, middle, high = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {"ms": f"{middle:.5g}", "ms_p10": f"{low:.5g}", "ms_p90": f"{high:.5g}", "tflops": f"{operations / middle / 1e9:.5g}"}


def ceilings(clock: Clock, device: str, ms_each: float, dtype: str) -> list[Row]:
    """The row of the bf16 matmul, and for cells in e4m3 that of the FP8 one."""
    return [ceiling(clock, device, ms_each, product) for product in (("bf16", "e4m3") if dtype == "e4m3" else ("bf16",))]


def ceiling(clock: Clock, device: str, ms_each: float, dtype: str) -> Row:
    """The row of a matmul in bf16 or e4m3; run first for `SETTLE_MS`, so that the clocks settle."""
    size = MATMUL_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(TORCH_DTYPES[dtype]) for _ in range(2))
    times = clock.measure({"matmul": lambda: (PRODUCTS[dtype](a, b),)}, ms_each + SETTLE_MS)["matmul"]
    shape = {"pass": "gemm", "dtype": dtype, "batch": 1, "seqlen_q": size, "seqlen_k": size, "heads": 1, "heads_kv": 1, "head_dim": size}
    settled = times[len(times) // 2 :]
    return {**shape, "impl": "matmul", "causal": 0, "mask": "", "density": 1, **timing(settled, 2.0 * size**3)}


def _fp8_product(a: Tensor, b: Tensor) -> Tensor:
    # Both operands along k, the only way that FP8 tensor cores take them, and their fast accumulation: the highest rate there is.
    one = torch.ones((), device=a.device)
    scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


PRODUCTS = {"bf16": torch.matmul, "e4m3": _fp8_product}


class Results:
    """The rows of one run, appended to a CSV file cell by cell.

    Args:
        path: the file; its header is written where it isn't there yet.
        run: the id that all rows share.
        device: "cuda" or "cpu".
        commit: what was measured.
    """

    def __init__(self, path: Path, run: str, device: str, commit: str) -> None:
        self.path, self.run = path, run
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
        fresh = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerows({**self.common, **row} for row in rows)

    def measured(self) -> set[tuple[str, ...]]:
        """`Cell.key` of every cell that this run has rows of."""
        if not self.path.exists():
            return set()
        with self.path.open(newline="") as file:
            return {tuple(row[name] for name in KEY_FIELDS) for row in csv.DictReader(file) if row["run"] == self.run}


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


def _head_commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def measure(cell: Cell, impls: list[str], clock: Clock, ms_each: float) -> tuple[list[Row], dict[str, str]]:
    """A row for each implementation that is right on this cell, and for each other one why it has none."""
    tensors = inputs(cell.problem, device=cell.problem.device)
    referee = Referee(cell, tensors)
    contenders, errors, refused = {}, {}, {}
    for impl in impls:
        try:
            contender = Contender(impl, cell, tensors)
            errors[impl] = referee.errors(impl, contender.result())
            contenders[impl] = contender
        except torch.OutOfMemoryError:
            refused[impl] = "skipped: out of memory"
        except (ImportError, NotImplementedError) as error:
            refused[impl] = f"skipped: {_one_line(error)}"
        except Exception as error:  # one implementation's failure must not cost the others their rows
            refused[impl] = f"FAILED: {type(error).__name__}: {_one_line(error)}"
        _free(clock)
    times = clock.measure({impl: contender.run for impl, contender in contenders.items()}, ms_each) if contenders else {}
    operations = flops(cell.problem, cell.pass_, cell.density)
    fields = {**cell.fields, "density": f"{cell.density:.6g}"}
    return [{**fields, "impl": impl, **errors[impl], **timing(times[impl], operations)} for impl in contenders], refused


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _free(clock: Clock) -> None:
    if clock.cuda:
        torch.cuda.empty_cache()


def compile_ahead(todo: list[Cell], impls: dict[str, list[str]], workers: int) -> None:
    """Fill the disk caches of Triton, torch.compile and CuTe DSL from several processes, so that the run itself hardly compiles.

    Versions and fa4 compile once for a head dim and mask, FlexAttention for every shape, but not for every block mask. What fails here
    fails again, and is reported, in the run.
    """
    jobs = compile_jobs(todo, impls)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_compile_in_one_thread) as pool:
        for job in [pool.submit(_compile, impl, group) for impl, group in jobs]:
            job.exception()


def compile_jobs(todo: list[Cell], impls: dict[str, list[str]]) -> list[tuple[str, list[Cell]]]:
    """What `compile_ahead` has a process do each: an implementation and cells that share its kernels, forward before backward.

    A kernel may still have variants, by whether a stride is a multiple of 16: so a process runs all of its cells.
    """
    masked = any(cell.mask for cell in todo)
    jobs: dict[tuple, list[Cell]] = {}
    for cell in sorted(todo, key=lambda cell: cell.problem.grad):
        problem = cell.problem
        kind = cell.pattern.kind if cell.pattern else "causal" if problem.causal else "full"
        for impl in fitting(impls[cell.pass_], cell, masked):
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


def _compile(impl: str, group: list[Cell]) -> None:
    for cell in group:
        Contender(impl, cell, inputs(cell.problem, device=cell.problem.device)).run()
        torch.cuda.empty_cache()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that prints a cell's line; under a terminal a bar beside it."""
    if not sys.stdout.isatty():
        yield partial(print, flush=True)
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("cells", total=total)

        def say(line: str) -> None:
            bar.console.print(line, highlight=False, markup=False)
            bar.advance(task)

        yield say


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*flashzoo.versions(), *names_with_endings(), *PEERS]
    truth = {"0": False, "1": True}

    def names(choices: list[str] | tuple[str, ...]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            unknown = [name for name in text.split(",") if name not in choices]
            if unknown:
                raise argparse.ArgumentTypeError(f"expected names from {', '.join(choices)}, got {', '.join(unknown)}")
            return text.split(",")

        return parse

    def mask_names(text: str) -> list[str]:
        found = [DENSE, *masks.NAMES] if text == "default" else text.split(",")
        unknown = [name for name in found if name != DENSE and not masks.known(name)]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected names of the form {DENSE}|{masks.FORMS}, got {', '.join(unknown)}")
        return found

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def truths(text: str) -> list[bool]:
        return [truth[name] for name in names(list(truth))(text)]

    parser.add_argument(
        "--impls",
        type=names(known),
        help=f"versions, also end to end or deterministic, and peers: {', '.join(known)}; default: what takes the dtype (and, with "
        "--masks, block masks or none)",
    )
    parser.add_argument(
        "--masks",
        type=mask_names,
        help="cells with block masks: `default`, or names of the forms dense (no mask, as --causal says), ones, causal, window1024, "
        f"butterfly, random/4, local/4 (a quarter of the blocks); `default` is {','.join((DENSE, *masks.NAMES))}. In one sequence of 16k "
        "tokens with hidden 2048 and one of 64k with hidden 512, head dims 128 and 64, unless --tokens, --hidden, --seqlens and "
        "--head-dims say otherwise",
    )
    parser.add_argument("--passes", type=names(PASSES), help="fwd,bwd; default: those that the dtype has")
    parser.add_argument("--head-dims", type=numbers, help="only these, such as 64,128")
    parser.add_argument("--seqlens", type=numbers, help="only these")
    parser.add_argument("--causal", type=truths, default=[False, True], help="only 0 or only 1")
    parser.add_argument("--tokens", type=int, help="other sizes than the field's: batch * seqlen; needs --hidden")
    parser.add_argument("--hidden", type=int, help="other sizes than the field's: heads * head_dim; needs --tokens")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32", "e4m3"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--ms", type=float, default=80, help="measured time for each implementation and cell")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="stop after the cell at hand once so much time is gone")
    parser.add_argument("--run", default=datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S"), help="id of the run's rows")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run: skip the cells it has in the file")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--out", type=Path, help="the CSV file; default: bench/results/<gpu>.csv")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes that compile ahead; 0: none")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a version gave a wrong result or an error, else 0 (what was skipped has not failed)."""
    started = time.monotonic()
    parser = _parser()
    args = parser.parse_args(argv)
    if args.dtype == "e4m3" and "bwd" in passes(args):
        parser.error(f"--passes: expected fwd for e4m3, which has no backward pass, got {','.join(args.passes)}")
    if args.dtype == "e4m3" and args.masks:
        parser.error("--masks: expected 16 or 32 bits, got e4m3, which takes no block mask")
    if bool(args.tokens) != bool(args.hidden):
        parser.error("--tokens and --hidden: expected both or neither")
    for name, whole, parts in (("--tokens", args.tokens, args.seqlens), ("--hidden", args.hidden, args.head_dims)):
        if whole and any(whole % part for part in parts or ()):
            parser.error(f"{name}: expected a multiple of each of {parts}, got {whole}")
    impls = {pass_: args.impls or default_impls(pass_, args.dtype, bool(args.masks)) for pass_ in passes(args)}
    if not args.out and (own := foreign(impls)):
        parser.error(f"--out: expected a file of your own for {', '.join(own)}, which this repository's results don't have")
    results = Results(args.out or results_path(args.device), args.resume or args.run, args.device, args.commit or _head_commit())
    measured = results.measured()
    todo = [cell for cell in cells(args) if cell.key not in measured]
    print(f"run {results.run}, {len(todo)} cells, {gpu_name(args.device)}, into {results.path}")
    for impl in dict.fromkeys(impl for chosen in impls.values() for impl in chosen):
        if why := missing(impl):
            print(f"{impl} is missing: {why}")
    if args.device == "cuda" and args.workers:
        compile_ahead(todo, impls, args.workers)
        print(f"compiled ahead, {time.monotonic() - started:.0f} s", flush=True)
    failed = _run(todo, impls, results, args, started)
    return int(failed)


def _run(todo: list[Cell], impls: dict[str, list[str]], results: Results, args: argparse.Namespace, started: float) -> bool:
    clock = Clock(args.device)
    failed = False
    results.append(ceilings(clock, args.device, args.ms, args.dtype))
    with _progress(len(todo)) as say:
        for position, cell in enumerate(todo, 1):
            there = [impl for impl in fitting(impls[cell.pass_], cell, bool(args.masks)) if not missing(impl)]
            rows, refused = measure(cell, there, clock, args.ms)
            _free(clock)
            results.append(rows)
            failed |= any(reason.startswith("FAILED") for impl, reason in refused.items() if impl not in PEERS)
            speeds = [f"{row['impl']} {float(str(row['tflops'])):.3g}" for row in rows]
            say(f"{cell}: {', '.join(speeds)} TFLOP/s" + "".join(f"\n    {impl} {reason}" for impl, reason in refused.items()))
            if time.monotonic() - started > args.budget_s and position < len(todo):
                say(f"stopped after {position} of {len(todo)} cells, {args.budget_s:.0f} s are gone; go on with --resume {results.run}")
                break
    results.append(ceilings(clock, args.device, args.ms, args.dtype))
    print(f"{time.monotonic() - started:.0f} s")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
