"""Every version on the same inputs, side by side: error against the oracle with its budget, then time and memory.

No time is reported for a result that fails the rule of `flashzoo.accuracy`.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from importlib.util import find_spec
from platform import python_version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashzoo.accuracy import Judge
from flashzoo.call.api import Options, attention, explain, takes_options
from flashzoo.call.check import check_data, options_of
from flashzoo.call.operands import DIFFERENTIABLE, NO_DESCALES, Operands, taken
from flashzoo.call.packed import batch_of_one
from flashzoo.call.problem import Problem
from flashzoo.comparison import PASSES, Comparison, Row
from flashzoo.counts import flops, hbm_bytes
from flashzoo.dropout import kept_at
from flashzoo.gpu import SHARED_LIMIT, peak_tflops
from flashzoo.inputs import block_mask, descales, in_pages, inputs, kinds_of_descales, lengths, score_mod, sinks
from flashzoo.reference import Result, descales_of_rows, only_used, scored_at, shown, with_packed_keys
from flashzoo.registry import current, implementation
from flashzoo.registry import versions as registered
from flashzoo.scores.at import flat
from flashzoo.scores.mod import ScoreMod
from flashzoo.spec import INTERPRETER_BLOCK, Spec, duration, interpreter_seconds
from flashzoo.timing import MIN_SHARED, Clock, Operation, Timing, with_peak
from flashzoo.workloads import Workload, hardware

if TYPE_CHECKING:
    from typing_extensions import Unpack

PART_SCORES = 1 << 20
"""Score elements of the part of a larger problem that is run on the CPU to see how long the whole takes."""
DOES = f"batch 1, heads 2, seqlen {4 * INTERPRETER_BLOCK}, in fp16"
"""A problem that every version that runs on the CPU answers within seconds."""
QUADRATIC_BYTES = 20
"""Bytes for each score element that a version holds which materialises S and P:
S, P and dP in float32, their roundings."""
GPU_SECONDS, CPU_SECONDS = 2.0, 0.5
"""Of timing in all, shared by the versions, which have `MIN_SHARED` repeats each in any case."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while `compare` was at work.

    Attributes:
        comparison: the rows that were finished, without times where none were taken yet.
        left: the versions that did not run.
    """

    def __init__(self, comparison: Comparison, left: tuple[str, ...]) -> None:
        super().__init__()
        self.comparison: Comparison = comparison
        self.left: tuple[str, ...] = left


@takes_options
def compare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backward: bool = False,
    versions: Sequence[str] | None = None,
    budget_s: float | None = None,
    progress: bool | None = None,
    seed: int = 0,
    **options: Unpack[Options],
) -> Comparison:
    """Run every version on these inputs, hold each to the oracle, and time those that pass.

    Args:
        q, k, v: as in `flashzoo.attention`. Never modified.
        backward: gradients too, for a dout drawn from a standard normal, of the versions that have a backward pass.
        versions: names of versions; all that are registered where None.
        budget_s: the most seconds that this may be expected to take on the CPU, by a part of it which is run first;
            None: any.
        progress: show a bar on stderr while it works; where None, if stderr is a terminal and rich is installed.
        seed: of dout.
        options: the other arguments of `flashzoo.attention`, but version and return_lse, which are chosen here.

    Returns:
        A `Comparison`. On the CPU, Triton's kernels run once in its interpreter, and only on small problems.

    Raises:
        TypeError, ValueError: an argument is malformed, as in `flashzoo.attention`, a version is unknown, budget_s is
            too short, or an input has NaN or infinity in it, of which there is no error to compare.
        flashzoo.compare.Interrupted: a KeyboardInterrupt that has the rows that were finished.
    """
    specs, given = _chosen(versions), dict(options)
    for name in ("version", "return_lse", "arch"):
        if name in given:
            raise TypeError(
                f"compare: takes no {name}, as it runs those of versions and looks at all, got {given[name]!r}"
            )
    q, k, v, given = batch_of_one(q, k, v, given)
    with torch.set_grad_enabled(backward), _bar(progress) as bar:
        problem = explain(*_leaves((q, k, v), backward), **given).problem
        check_data(q.device)
        used, *_ = _used(q, k, v, problem, taken(dict(given))[0])
        _check_finite(**dict(zip("qkv", used, strict=True)), **{name: given.get(name) for name in DESCALES})
        if problem.sinks:
            _check_finite(sinks=given["sinks"].clamp_min(0))  # -inf is none
        _foresee(bar, problem, specs, budget_s)
        return _compared(bar, (q, k, v), problem, given, specs, seed)


def _used(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, operands: Operands
) -> tuple[tuple[Tensor, Tensor, Tensor], Problem, Operands]:
    """q, k and v as a batch, with zeros for what no sequence has or uses, and the problem and operands of these."""
    k, v, packed, operands = with_packed_keys(k, v, problem, operands)
    return only_used(q[None] if problem.packed_q else q, k, v, operands), packed, operands


def _compared(
    bar: _Bar,
    tensors: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    options: dict[str, Any],
    specs: list[Spec],
    seed: int,
) -> Comparison:
    """`compare`, gradients enabled where the problem has them; options are the keywords of `attention`."""
    q, k, v = tensors
    generator = torch.Generator(q.device).manual_seed(seed)
    out_shape = (*q.shape[:-1], v.shape[-1])
    dout = torch.randn(out_shape, generator=generator, device=q.device).to(q.dtype) if problem.grad else None
    environment, rows = _environment(q.device), []
    try:
        bar.step("oracle")
        operands = taken(dict(options))[0].seeded(problem, q.device)
        options = options | {"dropout_seed": operands.dropout_seed}  # the same for all
        judged, asked, operands = _used(q, k, v, problem, operands)
        scales = descales_of_rows(*judged, operands) if problem.kv_in_e4m3 else NO_DESCALES
        operands_of: dict[str, Any] = {"sinks": options.get("sinks"), "scored": scored_at(asked, operands)}
        operands_of |= {"kept": kept_at(asked, operands), "mask": shown(asked, operands)}
        of_batch = dout[None] if dout is not None and problem.packed_q else dout
        judge = Judge(*judged, replace(asked, lse=True), of_batch, descales=scales, **operands_of)
        bench = _Bench((q.detach(), k.detach(), v.detach()), dout, problem, options, judge)
        for spec in specs:
            bar.step(spec.name)
            rows.append(bench.row(spec))
        bar.step("timing")
        rows = bench.timed(rows)
    except KeyboardInterrupt as stop:
        left = tuple(spec.name for spec in specs[len(rows) :])
        raise Interrupted(Comparison(problem, tuple(rows), environment), left) from stop
    return Comparison(problem, tuple(rows), environment)


def compare_workload(
    source: Workload | Problem,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    backward: bool = False,
    versions: Sequence[str] | None = None,
    budget_s: float | None = None,
    progress: bool | None = None,
) -> Comparison:
    """`compare` on inputs drawn for a workload or a problem; see `flashzoo.inputs.inputs`.

    Args:
        source: sizes, dtypes, precision, causal, window and deterministic are read from it, its hardware is not. e4m3
            inputs get descales by block, or where sequences are packed one for each of them; a problem with a block
            mask one of its form, from `flashzoo.inputs.block_mask`, one with packed sequences or caches lengths from
            `flashzoo.inputs.lengths`, one with sinks those of `flashzoo.inputs.sinks`, one with a score_mod that
            of `flashzoo.inputs.score_mod`, and one with dropout_p the seed as dropout_seed.
        device: the GPU if there is one, else the CPU, where None.
        backward, versions, budget_s, progress: as in `compare`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    problem = source.problem if isinstance(source, Workload) else source
    specs = _chosen(versions)
    with torch.set_grad_enabled(backward), _bar(progress) as bar:
        problem = replace(problem, grad=backward, **hardware(device))
        _foresee(bar, problem, specs, budget_s)
        bar.step("inputs")
        q, k, v, _ = inputs(source, seed, device)
        options = options_of(problem) | {"block_mask": block_mask(problem, seed, device)}
        options |= {**lengths(problem, seed, device), "sinks": sinks(problem, seed, device)}
        options |= {"score_mod": score_mod(problem, seed, device), "dropout_seed": seed}
        if problem.page_size is not None:
            k, v, options["page_table"] = in_pages(problem, k, v, seed)
        q = q[0] if problem.packed_q else q
        options |= zip(DESCALES, descales(problem, kinds_of_descales(problem)[-1], seed, device), strict=True)
        problem = explain(*_leaves((q, k, v), backward), **options).problem
        return _compared(bar, (q, k, v), problem, options, specs, seed + 1)


DESCALES = ("q_descale", "k_descale", "v_descale")


def _foresee(bar: _Bar, problem: Problem, specs: list[Spec], budget_s: float | None) -> None:
    """Tell the bar what is to come. Raises ValueError where that takes longer than budget_s."""
    bar.begin(len(specs) + 3)  # inputs, oracle, timing
    expected = 0.0
    if problem.device == "cpu":
        once, repeated = (
            [spec for spec in specs if spec.interpreted(problem) == interpreted] for interpreted in (True, False)
        )
        expected = expected_s(problem, once, 1) + expected_s(problem, repeated, 2 + MIN_SHARED)
    if budget_s is not None and expected > budget_s:
        took = f"{problem}, would take about {duration(expected)} there, longer than budget_s={budget_s:g}"
        raise ValueError(f"{took}; what takes seconds: {DOES}")
    bar.expect(expected)


def expected_s(problem: Problem, specs: list[Spec], calls: int, judged: float = 1.0) -> float:
    """About how many seconds versions take on the CPU, by blocks where Triton's interpreter runs them, else by a
    part of the problem.

    Args:
        calls: of each, with the backward pass where the problem has one.
        judged: the share of the results that is held against the oracle.

    Returns:
        The seconds, without those of what is too small to matter.
    """
    taken = [spec for spec in specs if not spec.unsupported(replace(problem, grad=False))]
    interpreted = [spec for spec in taken if spec.interpreted(problem)]
    passes = sum(3 if problem.grad and spec.backward is not None else 1 for spec in interpreted)
    total = calls * passes * interpreter_seconds(problem)
    direct = [spec for spec in taken if not spec.interpreted(problem)]
    if direct and _scores(problem) > 4 * PART_SCORES:
        _part_s(problem, direct, PART_SCORES >> 8)  # what is done once for all, such as the choice of torch's kernels
        judging, running = _part_s(problem, direct, PART_SCORES)
        total += judged * judging + calls * running
    return total


def _part_s(problem: Problem, specs: list[Spec], scores: int) -> tuple[float, float]:
    """The seconds that the oracle takes, and one call of each version, from a part of the problem
    with so many scores."""
    group = problem.heads // problem.heads_kv
    side = math.isqrt(scores // group) or 1
    seqlen_q, seqlen_k = min(problem.seqlen_q, side), min(problem.seqlen_k, side)
    room = max(1, scores // (group * seqlen_q * seqlen_k))
    heads_kv = min(problem.heads_kv, room)
    sizes = {"batch": max(1, min(problem.batch, room // heads_kv)), "heads": group * heads_kv, "heads_kv": heads_kv}
    dense = {"block_mask": None, "sequences": None, "packed_q": False, "used_k": False, "page_size": None}
    dense |= {"sinks": False, "score_mod": None, "dropout_p": 0.0}
    dense |= {"max_seqlen_q": None, "max_seqlen_k": None}
    part = replace(problem, **sizes, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **dense)  # pyright: ignore[reportArgumentType]
    q, k, v, dout = inputs(part, device="cpu")
    start = time.perf_counter()
    judge = Judge(q, k, v, replace(part, lse=True), dout if part.grad else None)
    judged = time.perf_counter()
    bench = _Bench((q, k, v), dout, part, options_of(part), judge)
    for spec in specs:
        bench.row(spec)
    whole = _scores(problem) / _scores(part)
    return whole * (judged - start), whole * (time.perf_counter() - judged)


def _scores(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k


def _check_finite(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            count = int((~(x.float() if x.dtype == torch.float8_e4m3fn else x).isfinite()).sum())
            if count:
                raise ValueError(
                    f"compare: {name} must be finite, as no error of NaN or infinity can be told, "
                    f"got {count} that are not"
                )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _leaves(tensors: tuple[Tensor, ...], grad: bool) -> tuple[Tensor, ...]:
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # explain says what is wrong with them
    return tuple(x.detach().requires_grad_(grad and x.is_floating_point()) for x in tensors)


def _chosen(names: Sequence[str] | None) -> list[Spec]:
    known = registered()
    if isinstance(names, str):
        raise TypeError(f"versions must be a sequence of names, such as [{names!r}], got {names!r}")
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(
            "\n".join(
                (f"versions must be from {', '.join(known)}, got {', '.join(map(repr, unknown))}", *current().missing)
            )
        )
    return [spec for name, spec in known.items() if names is None or name in names]


class _Bench:
    """The inputs of one comparison, and what is done with each version on them."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        dout: Tensor | None,
        problem: Problem,
        options: dict[str, Any],
        judge: Judge,
    ) -> None:
        self.dout, self.problem, self.options, self.judge = dout, problem, options, judge
        self.operands = [name for name in DIFFERENTIABLE if isinstance(options.get(name), Tensor)]
        self.tensors: tuple[Tensor, ...] = (*tensors, *(options[name] for name in self.operands))
        mod = options.get("score_mod")
        self.read: tuple[Tensor, ...] = () if mod is None else ScoreMod.of(mod).differentiable
        self.device = tensors[0].device
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else ""
        self.peaks = {"forward": peak_tflops(name, problem.numerics), "backward": peak_tflops(name, problem.dtype)}
        properties = torch.cuda.get_device_properties(self.device) if self.on_gpu else None
        # where there is no GPU, Hopper's
        self.shared = getattr(properties, "shared_memory_per_block_optin", SHARED_LIMIT[90])

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
        row = replace(row, ran="GPU" if self.on_gpu else "interpreter" if spec.interpreted(self.problem) else "CPU")
        needed = _scores(self.problem) * QUADRATIC_BYTES if spec.memory == "quadratic" else 0
        # A GPU says when its memory is full; on the CPU the system would end the process.
        if not self.on_gpu and needed > _memory_bytes() // 2:
            reason = (
                f"needs some {needed / 1e9:.0f} GB for its scores, "
                f"more than half of this machine's {_memory_bytes() / 1e9:.0f} GB"
            )
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
            (result, seconds), memory = with_peak(lambda: self._run(spec.name, problem), self.device)
            row = replace(row, memory_bytes=memory)
        else:
            result, seconds = self._run(spec.name, problem)
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
            gradients = torch.autograd.grad(out, (*leaves, *self.read), self.dout)
            seconds["backward"] = time.perf_counter() - start
        log_sum = None if log_sum is None else log_sum.detach()
        if problem.packed_q:  # which is judged as a batch of one
            out, log_sum = out[None], None if log_sum is None else log_sum[None]
        of_inputs, of_read = gradients[: len(leaves)], gradients[len(leaves) :]
        return Result(out.detach(), log_sum, *of_inputs, dscore_mod=flat(of_read) if of_read else None), seconds

    def _forward(self, name: str, leaves: tuple[Tensor, ...], lse: bool) -> Any:
        q, k, v, *operands = leaves
        options: dict[str, Any] = self.options | dict(zip(self.operands, operands, strict=True))
        return attention(q, k, v, return_lse=lse, version=name, **options)

    def timed(self, rows: list[Row]) -> list[Row]:
        """The rows with times, TFLOP/s and share of the peak, the versions interleaved."""
        able = {row.version: row.errors for row in rows if row.status == "ok" and row.ran in ("GPU", "CPU")}
        launches: dict[tuple[str, str], Operation] = {}
        for name, errors in able.items():
            launches[name, "forward"] = partial(self._forward, name, _leaves(self.tensors, False), False)
            if "dq" in errors:  # its gradients were judged
                leaves = _leaves(self.tensors, True)
                out = self._forward(name, leaves, False)
                launches[name, "backward"] = partial(
                    torch.autograd.grad, out, (*leaves, *self.read), self.dout, retain_graph=True
                )
        times = Clock(self.device).share(launches, GPU_SECONDS if self.on_gpu else CPU_SECONDS)
        timings = {key: Timing.of(taken) for key, taken in times.items()}
        return [
            self._with_times(row, {p: timings[row.version, p] for p in PASSES if (row.version, p) in timings})
            for row in rows
        ]

    def _with_times(self, row: Row, timings: dict[str, Timing]) -> Row:
        values: dict[str, Any] = dict(timings)
        for name, timing in timings.items():
            tflops = flops(self.problem, "fwd" if name == "forward" else "bwd", self.judge.shown) / timing.ms * 1e-9
            peak = self.peaks[name]
            values |= {f"{name}_tflops": tflops, f"{name}_peak": 100 * tflops / peak if peak else None}
        return replace(row, **values)


def _environment(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    try:
        triton = package_version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    return {"device": name, "torch": str(torch.__version__), "triton": triton, "python": python_version()}


class _Bar:
    """What is at work, on stderr. With rich a bar of the steps, else a line for each;
    nothing where nobody is there to read it.

    Args:
        progress: rich's `Progress`, or None.
        lines: whether to print lines where there is no `Progress`.
    """

    def __init__(self, progress: Any = None, lines: bool = False) -> None:
        self.progress, self.lines = progress, lines
        self.task = progress.add_task("", total=None, expected="") if progress else None
        self.begun = 0

    def begin(self, steps: int) -> None:
        """So many steps are to come."""
        if self.progress:
            self.progress.update(self.task, total=steps, description="a part of it")
        self.begun = 0

    def expect(self, seconds: float) -> None:
        """All of them take about so long, where that is worth a word."""
        text = f"of about {duration(seconds)}" if seconds >= 2 else ""
        if self.progress:
            self.progress.update(self.task, expected=text)
        elif self.lines and text:
            print(text, file=sys.stderr)

    def step(self, name: str) -> None:
        """The step of this name begins."""
        if self.progress:
            self.progress.update(self.task, completed=self.begun, description=name)
        elif self.lines:
            print(name, file=sys.stderr)
        self.begun += 1


@contextmanager
def _bar(wanted: bool | None) -> Iterator[_Bar]:
    shown = sys.stderr.isatty() if wanted is None else wanted
    if not shown or not find_spec("rich"):
        yield _Bar(lines=shown)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[expected]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress)
