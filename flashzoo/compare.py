"""Every version on the same inputs, side by side: error against the oracle with its budget, then time and memory.

No time is reported for a result that fails the rule of `flashzoo.accuracy`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from importlib.util import find_spec
from platform import python_version
from typing import Any, Literal

import torch
from torch import Tensor

from flashzoo.accuracy import Check, Judge
from flashzoo.api import attention, explain
from flashzoo.blocksparse.mask import BlockMask
from flashzoo.gpu import SHARED_LIMIT
from flashzoo.reference import Result
from flashzoo.registry import implementation
from flashzoo.registry import versions as registered
from flashzoo.spec import Problem, Spec, Window
from flashzoo.workloads import TORCH_DTYPES, Workload, block_mask, descales, flops, hbm_bytes, inputs

INTERPRETER_SCORES = 1 << 19
"""Most score elements (batch * heads * seqlen_q * seqlen_k) that are given to Triton's interpreter: some seconds' work."""
QUADRATIC_BYTES = 20
"""Bytes for each score element that a version holds which materialises S and P: S, P and dP in float32, their roundings."""
L2_FLUSH_BYTES = 256 << 20
GPU_SECONDS, CPU_SECONDS = 2.0, 2.0  # of timing in all, shared by the versions; never less than MIN_REPEATS each
MIN_REPEATS, MAX_REPEATS = 3, 100

PEAKS = (
    ("B200", 2250, 75),
    ("B300", 2250, 75),
    ("H200", 989, 67),
    ("GH200", 989, 67),
    ("H100 PCIe", 756, 51),
    ("H100 NVL", 835, 60),
    ("H100", 989, 67),
    ("H20", 148, 44),
    ("A100", 312, 19.5),
    ("A800", 312, 19.5),
    ("A30", 165, 10.3),
    ("A10", 125, 31.2),
    ("L40S", 362, 91.6),
    ("L4", 121, 30.3),
    ("RTX 4090", 165, 82.6),
    ("RTX 3090", 71, 35.6),
    ("V100", 125, 15.7),
)
"""Dense peak TFLOP/s by NVIDIA's datasheets and whitepapers: 16-bit tensor cores with float32 accumulation, then float32
outside tensor cores. The first name found in the GPU's own counts."""
NO_FP8 = ("A100", "A800", "A30", "A10", "RTX 3090", "V100")
"""Those of `PEAKS` without FP8 tensor cores; with them, FP8's peak is twice that of 16 bits."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one pass: median, 10th and 90th percentile, and of how many runs."""

    ms: float
    p10: float
    p90: float
    repeats: int


@dataclass(frozen=True)
class Row:
    """One version's line.

    Attributes:
        version, title: as registered.
        status: "ok"; "fails" (a check exceeds its budget); "can't" (the Spec has reasons against the problem); "too
            large" (for Triton's interpreter); "no memory"; "error" (it raised).
        reasons: why not "ok", or why the forward pass alone where both were asked for; one sentence each.
        ran: "GPU", "CPU", "interpreter" (Triton's, on the CPU), or "" where nothing ran.
        checks: every rule that was applied.
        errors, budgets: by tensor (out, lse, dq, dk, dv): largest and RMS absolute error, and what they may be.
        forward, backward: times, only where "ok".
        forward_tflops, backward_tflops: TFLOP/s of the visible part; None for the interpreter.
        forward_peak, backward_peak: the same in percent of the GPU's dense peak; None where that is not known.
        memory_bytes: peak of GPU memory beyond the inputs, forward and backward; None on the CPU.
        hbm_bytes: what the paper's IO formula says the forward pass moves; None where it has none.
    """

    version: str
    title: str
    status: str
    reasons: tuple[str, ...] = ()
    ran: str = ""
    checks: tuple[Check, ...] = ()
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    budgets: dict[str, tuple[float, float]] = field(default_factory=dict)
    forward: Timing | None = None
    backward: Timing | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    forward_peak: float | None = None
    backward_peak: float | None = None
    memory_bytes: int | None = None
    hbm_bytes: float | None = None

    def flat(self) -> dict[str, Any]:
        """The row as plain values under one level of names, for CSV and JSON."""
        values: dict[str, Any] = {"version": self.version, "status": self.status, "ran": self.ran, "reasons": "; ".join(self.reasons)}
        for tensor in TENSORS:
            for what, table in (("err", self.errors), ("budget", self.budgets)):
                values[f"{tensor}_max_{what}"], values[f"{tensor}_rms_{what}"] = table.get(tensor, (None, None))
        for name in PASSES:
            timing = getattr(self, name)
            values |= {f"{name}_{part}": getattr(timing, part, None) for part in ("ms", "p10", "p90", "repeats")}
            values |= {f"{name}_{part}": getattr(self, f"{name}_{part}") for part in ("tflops", "peak")}
        return values | {"memory_bytes": self.memory_bytes, "hbm_bytes": self.hbm_bytes}


TENSORS = ("out", "lse", "dq", "dk", "dv")
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; printing it gives a table.

    Attributes:
        problem: what was asked of every version.
        rows: one for each version, in `auto` order.
        environment: device and the versions of the software, by name.
    """

    problem: Problem
    rows: tuple[Row, ...]
    environment: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every version that ran kept its budget. One that can't, or has no memory for it, does not count."""
        return not any(row.status in ("fails", "error") for row in self.rows)

    def to_json(self) -> str:
        """An object with problem, environment and rows (every check included); numbers that aren't finite become null."""
        rows = [row.flat() | {"checks": [vars(check) | {"ok": check.ok} for check in row.checks]} for row in self.rows]
        record = {"problem": asdict(self.problem), "environment": self.environment, "rows": rows}
        return json.dumps(_finite(record), indent=2)

    def to_csv(self) -> str:
        """One line for each version under a header; empty where there is nothing to say."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0].flat()) if self.rows else ["version"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.flat() for row in self.rows)
        return text.getvalue()

    def __str__(self) -> str:
        cells = [_cells(row) for row in self.rows]
        columns = [name for name in (cells[0] if cells else {}) if any(row[name] for row in cells)]
        table = [columns, *([row[name] for name in columns] for row in cells)]
        lines = [f"{self.problem}: {self.environment['device']}"]
        lines.append(_rich_table(table) if find_spec("rich") else _plain_table(table))
        lines += [f"{row.version}: {row.status}: {reason}" for row in self.rows for reason in row.reasons]
        lines.append("Errors: largest |result - float64 oracle| over its budget (the rule: flashzoo/accuracy.py). ms: median over p10-p90.")
        return "\n".join(lines)


def compare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: Window | None = None,
    deterministic: bool = False,
    precision: Literal["fp8"] | None = None,
    out_dtype: torch.dtype | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    block_mask: BlockMask | None = None,
    backward: bool = False,
    versions: Sequence[str] | None = None,
    progress: bool | None = None,
    seed: int = 0,
) -> Comparison:
    """Run every version on these inputs, hold each to the oracle, and time those that pass.

    Args:
        q, k, v, causal, softmax_scale, window_size, deterministic, precision, out_dtype, q_descale, k_descale, v_descale,
            block_mask: as in `flashzoo.attention`. Never modified.
        backward: gradients too, for a dout drawn from a standard normal, of the versions that have a backward pass.
        versions: names of versions; all that are registered where None.
        progress: show a bar on stderr while it works; where None, if stderr is a terminal and rich is installed.
        seed: of dout.

    Returns:
        A `Comparison`. On the CPU, Triton's kernels run once in its interpreter, and only on small problems.

    Raises:
        TypeError, ValueError: an argument is malformed, as in `flashzoo.attention`, or a version is unknown.
    """
    options = {"causal": causal, "window_size": window_size, "deterministic": deterministic, "precision": precision}
    options |= {"out_dtype": out_dtype, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "block_mask": block_mask}
    specs = _chosen(versions)
    with torch.set_grad_enabled(backward), _bar(progress, len(specs) + 2) as step:
        problem = explain(*_leaves((q, k, v), backward), softmax_scale=softmax_scale, **options).problem
        generator = torch.Generator(q.device).manual_seed(seed)
        out_shape = (*q.shape[:3], v.shape[3])
        dout = torch.randn(out_shape, generator=generator, device=q.device).to(q.dtype) if backward else None
        step("oracle")
        seen = None if block_mask is None else block_mask.to_dense()
        judge = Judge(q, k, v, replace(problem, lse=True), softmax_scale, dout, descales=(q_descale, k_descale, v_descale), mask=seen)
        bench = _Bench((q.detach(), k.detach(), v.detach()), dout, problem, softmax_scale, options, judge)
        rows = []
        for spec in specs:
            step(spec.name)
            rows.append(bench.row(spec))
        step("timing")
        rows = bench.timed(rows)
    return Comparison(problem, tuple(rows), _environment(q.device))


def compare_workload(
    source: Workload | Problem,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    backward: bool = False,
    versions: Sequence[str] | None = None,
    progress: bool | None = None,
) -> Comparison:
    """`compare` on inputs drawn for a workload or a problem; see `flashzoo.workloads.inputs`.

    Args:
        source: sizes, dtypes, precision, causal, window and deterministic are read from it, its hardware is not. e4m3 inputs get
            descales by block, and a problem with a block mask one of its form, from `flashzoo.workloads.block_mask`.
        device: the GPU if there is one, else the CPU, where None.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    problem = source.problem if isinstance(source, Workload) else source
    q, k, v, _ = inputs(source, seed, device)
    q_descale, k_descale, v_descale = descales(problem, "block" if problem.dtype == "e4m3" else None, seed, device)
    return compare(
        q,
        k,
        v,
        causal=problem.causal,
        window_size=problem.window,
        deterministic=problem.deterministic,
        precision="fp8" if problem.precision else None,
        out_dtype=TORCH_DTYPES[problem.out_dtype] if problem.dtype == "e4m3" else None,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        block_mask=block_mask(problem, seed, device),
        backward=backward,
        versions=versions,
        progress=progress,
        seed=seed + 1,
    )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_tflops(gpu: str, numerics: str) -> float | None:
    """Dense peak of a GPU by its name (`torch.cuda.get_device_name()`) and `Problem.numerics`; None where not known."""
    for name, half, single in PEAKS:
        if re.search(rf"\b{name}\b", gpu):
            fp8 = None if name in NO_FP8 else 2 * half
            return {"fp16": half, "bf16": half, "fp32": single, "e4m3": fp8, "fp8": fp8}.get(numerics)
    return None


def _leaves(tensors: tuple[Tensor, ...], grad: bool) -> tuple[Tensor, ...]:
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # explain says what is wrong with them
    return tuple(x.detach().requires_grad_(grad and x.is_floating_point()) for x in tensors)


def _chosen(names: Sequence[str] | None) -> list[Spec]:
    known = registered()
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"versions must be from {', '.join(known)}, got {', '.join(map(repr, unknown))}")
    return [spec for name, spec in known.items() if names is None or name in names]


class _Bench:
    """The inputs of one comparison, and what is done with each version on them."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        dout: Tensor | None,
        problem: Problem,
        scale: float | None,
        options: dict[str, Any],
        judge: Judge,
    ) -> None:
        self.tensors, self.dout, self.problem, self.scale, self.options, self.judge = tensors, dout, problem, scale, options, judge
        self.device = tensors[0].device
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else ""
        self.peaks = {"forward": peak_tflops(name, problem.numerics), "backward": peak_tflops(name, problem.dtype)}
        properties = torch.cuda.get_device_properties(self.device) if self.on_gpu else None
        self.shared = getattr(properties, "shared_memory_per_block_optin", SHARED_LIMIT[90])  # where there is no GPU, Hopper's

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def row(self, spec: Spec) -> Row:
        """The version's row, untimed but for the interpreter's one run."""
        row = Row(spec.name, spec.title, "ok", hbm_bytes=hbm_bytes(self.problem, spec.name, self.shared))
        asked = self._asked(spec)
        if reasons := spec.unsupported(asked):
            return replace(row, status="can't", reasons=tuple(reasons), hbm_bytes=None)
        row = replace(row, reasons=tuple(f"forward pass alone: {reason}" for reason in spec.unsupported(self.problem)))
        row = replace(row, ran="GPU" if self.on_gpu else "interpreter" if "triton" in spec.requires else "CPU")
        scores = self.problem.batch * self.problem.heads * self.problem.seqlen_q * self.problem.seqlen_k
        if row.ran == "interpreter" and scores > INTERPRETER_SCORES:
            reason = f"too large for Triton's interpreter here (limit {INTERPRETER_SCORES} score elements, got {scores})"
            return replace(row, status="too large", reasons=(reason,), ran="")
        needed = scores * QUADRATIC_BYTES if spec.memory == "quadratic" else 0
        # A GPU says when its memory is full; on the CPU the system would end the process.
        if not self.on_gpu and needed > _memory_bytes() // 2:
            reason = f"needs some {needed / 1e9:.0f} GB for its scores, more than half of this machine's {_memory_bytes() / 1e9:.0f} GB"
            return replace(row, status="no memory", reasons=(reason,), ran="")
        try:
            return self._judged(spec, asked, row)
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return replace(row, status="no memory", reasons=(str(error).split(".")[0],))
        except Exception as error:  # a version's failure is a row of the table, not the end of it
            return replace(row, status="error", reasons=(f"{type(error).__name__}: {error}",))

    def _asked(self, spec: Spec) -> Problem:
        """The problem, or its forward pass alone where the backward pass is all that the version has against it."""
        alone = replace(self.problem, grad=False)
        return alone if spec.unsupported(self.problem) and not spec.unsupported(alone) else self.problem

    def _judged(self, spec: Spec, problem: Problem, row: Row) -> Row:
        problem = replace(problem, lse=not spec.unsupported(replace(problem, lse=True)))
        implementation(spec)  # an import is no part of the interpreter's time
        if self.on_gpu:
            self._run(spec.name, problem)  # compiles, and makes the libraries' workspaces, which are nobody's peak
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        result, seconds = self._run(spec.name, problem)
        if self.on_gpu:
            row = replace(row, memory_bytes=torch.cuda.max_memory_allocated(self.device) - before)
        checks = tuple(self.judge.checks(result))
        errors = self.judge.errors(result)
        budgets = {name: budget for name, budget in self.judge.budgets().items() if name in errors}
        row = replace(row, checks=checks, errors=errors, budgets=budgets)
        broken = tuple(str(check) for check in checks if not check.ok)
        if broken:
            return replace(row, status="fails", reasons=broken)
        if row.ran == "interpreter":
            timings = {name: Timing(1e3 * spent, 1e3 * spent, 1e3 * spent, 1) for name, spent in seconds.items()}
            row = replace(row, **timings)
        return row

    def _run(self, name: str, problem: Problem) -> tuple[Result, dict[str, float]]:
        """One call with what was asked for, and the seconds of each pass by the wall clock (meaningless on a GPU)."""
        leaves = _leaves(self.tensors, problem.grad)
        start = time.perf_counter()
        returned = self._forward(name, leaves, problem.lse)
        seconds = {"forward": time.perf_counter() - start}
        out, log_sum = returned if isinstance(returned, tuple) else (returned, None)
        gradients = ()
        if problem.grad:
            start = time.perf_counter()
            gradients = torch.autograd.grad(out, leaves, self.dout)
            seconds["backward"] = time.perf_counter() - start
        log_sum = None if log_sum is None else log_sum.detach()
        return Result(out.detach(), log_sum, *gradients), seconds

    def _forward(self, name: str, leaves: tuple[Tensor, ...], lse: bool) -> Any:
        q, k, v = leaves
        return attention(q, k, v, softmax_scale=self.scale, return_lse=lse, version=name, **self.options)

    def timed(self, rows: list[Row]) -> list[Row]:
        """The rows with times, TFLOP/s and share of the peak, the versions interleaved."""
        able = {row.version: row.errors for row in rows if row.status == "ok" and row.ran in ("GPU", "CPU")}
        launches: dict[tuple[str, str], Callable[[], Any]] = {}
        for name, errors in able.items():
            launches[name, "forward"] = partial(self._forward, name, self.tensors, False)
            if "dq" in errors:  # its gradients were judged
                leaves = _leaves(self.tensors, True)
                out = self._forward(name, leaves, False)
                launches[name, "backward"] = partial(torch.autograd.grad, out, leaves, self.dout, retain_graph=True)
        timings = (_time_on_gpu if self.on_gpu else _time_on_cpu)(launches, self.device)
        return [self._with_times(row, {p: timings[row.version, p] for p in PASSES if (row.version, p) in timings}) for row in rows]

    def _with_times(self, row: Row, timings: dict[str, Timing]) -> Row:
        values: dict[str, Any] = dict(timings)
        for name, timing in timings.items():
            tflops = flops(self.problem, "fwd" if name == "forward" else "bwd", self.judge.shown) / timing.ms * 1e-9
            peak = self.peaks[name]
            values |= {f"{name}_tflops": tflops, f"{name}_peak": 100 * tflops / peak if peak else None}
        return replace(row, **values)


def _time_on_gpu(launches: dict[Any, Callable[[], Any]], device: torch.device) -> dict[Any, Timing]:
    """Each launch by CUDA events, round by round, the L2 cache flushed before each."""
    with torch.cuda.device(device):
        flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=device)

        def one_round() -> dict[Any, tuple[torch.cuda.Event, torch.cuda.Event]]:
            events = {}
            for key, launch in launches.items():
                flush.zero_()
                events[key] = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                events[key][0].record()
                launch()
                events[key][1].record()
            return events

        one_round()
        torch.cuda.synchronize()
        start = time.perf_counter()
        one_round()
        torch.cuda.synchronize()
        rounds = [one_round() for _ in range(_repeats(GPU_SECONDS, time.perf_counter() - start))]
        torch.cuda.synchronize()
    return {key: _timing([events[key][0].elapsed_time(events[key][1]) for events in rounds]) for key in launches}


def _time_on_cpu(launches: dict[Any, Callable[[], Any]], device: torch.device) -> dict[Any, Timing]:
    """Each launch by the wall clock, round by round."""

    def one_round() -> dict[Any, float]:
        spent = {}
        for key, launch in launches.items():
            start = time.perf_counter()
            launch()
            spent[key] = 1e3 * (time.perf_counter() - start)
        return spent

    rounds = [one_round() for _ in range(_repeats(CPU_SECONDS, sum(one_round().values()) / 1e3))]
    return {key: _timing([spent[key] for spent in rounds]) for key in launches}


def _repeats(seconds: float, one_round: float) -> int:
    return max(MIN_REPEATS, min(MAX_REPEATS, int(seconds / max(one_round, 1e-9))))


def _timing(ms: list[float]) -> Timing:
    p10, median, p90 = torch.tensor(ms, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return Timing(median, p10, p90, len(ms))


def _environment(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    try:
        triton = package_version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    return {"device": name, "torch": str(torch.__version__), "triton": triton, "python": python_version()}


@contextmanager
def _bar(wanted: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each step as it begins."""
    if wanted is False or not find_spec("rich") or (wanted is None and not sys.stderr.isatty()):
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda name: progress.update(task, advance=1, description=name)


def _cells(row: Row) -> dict[str, str]:
    """The row as text by column; a cell's second line is the budget, or the spread, of the first."""
    cells = {"version": row.version, "status": row.status, "ran on": row.ran}
    for tensor in TENSORS:
        error, budget = row.errors.get(tensor), row.budgets.get(tensor)
        cells[tensor] = f"{error[0]:.1e}\n/{budget[0]:.1e}" if error and budget else ""
    for name, short in zip(PASSES, ("fwd", "bwd"), strict=True):
        timing, tflops, peak = (getattr(row, f"{name}{part}") for part in ("", "_tflops", "_peak"))
        spread = f"\n{timing.p10:.3g}-{timing.p90:.3g}" if timing and timing.repeats > 1 else ""
        cells[f"{short} ms"] = f"{timing.ms:.3g}{spread}" if timing else ""
        cells[f"{short} TFLOP/s"] = "" if tflops is None else f"{tflops:.3g}"
        cells[f"{short} %"] = "" if peak is None else f"{peak:.0f}"
    cells["peak memory"] = "" if row.memory_bytes is None else _size(row.memory_bytes)
    cells["HBM by formula"] = "" if row.hbm_bytes is None else _size(row.hbm_bytes)
    return cells


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _rich_table(table: list[list[str]]) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rendered = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in table[0]:
        rendered.add_column(name.replace(" ", "\n"), justify="left" if name in ("version", "status", "ran on") else "right", no_wrap=True)
    for row in table[1:]:
        rendered.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=1000)
    console.print(rendered)
    return console.file.getvalue().rstrip()  # pyright: ignore[reportAttributeAccessIssue]


def _plain_table(table: list[list[str]]) -> str:
    lines = [[cell.replace("\n", " ") for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines)


def _finite(value: Any) -> Any:
    """The same with None for every number that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
