"""Versions and peers over the field's shapes, in one run: correct first, then timed in turns. `flashzoo bench --help`

For each cell (a shape and a pass) every implementation runs once at full size, and two heads of what it returns are
held against the oracle; one that fails gets no speed. The others are then timed in turns, so that a warming GPU is
unfair to none: flush L2, CUDA event, call, CUDA event. The backward pass is timed alone. A bf16 matmul, timed before
and after, says what the GPU could do in this run; with `--dtype e4m3`, where inputs are FP8 and there is no backward
pass, an FP8 one too. A version that quantizes 16-bit inputs is timed so, end to end, under its name with `_end_to_end`
behind it, with `_deterministic` behind it any that has an order of accumulation which is fixed, and with `_fast_accum`,
of e4m3 inputs, any that may leave sums to the tensor core.

With `--models` cells are real models' shapes (`bench.models`). With `--settled-ms` the fastest version, the
fastest peer and what takes less than twice as long as the fastest are timed once more, alone, call behind call until
the GPU's clocks have settled, with the energy of a call (`bench.settled`).

With `--scores` they have something on their scores (`bench.scores`), and the FLOPs of cells without. All cells of one
size and pass are timed in the same turns, but for a bias, which fills memory and has its own. They are checked on all
queries of up to 2k, and on 1024 of more.

With `--lengths` they have packed sequences (`bench.lengths`), and the FLOPs of the pairs that these see.

With `--decode` they are steps of decoding: one query, or a few, of each sequence on a cache, all of which is used
(`bench.caches`). What is timed is a CUDA graph of a call on each of several caches, more than L2 holds, and a call has
its share of the graph's time. A copy on the device, timed before and after, says what memory gives in this run; the
rate of keys and values is printed beside it. With `--dtype-kv bf16,e4m3` there are caches of 16 bits and, with descales
by head, of e4m3, which are timed in the same turns where their shape is one. The error beside these is against float64
of what they hold: e4m3 numbers times descales.

With `--masks` cells have block masks (`bench.masks`), and the FLOPs of the pairs that those show; what takes no block
mask runs in the dense cells beside them. All cells of one size and pass, masked and dense, are timed in the same turns.
Masked cells, and dense ones of more than 16k tokens, are checked on 1024 queries from everywhere.

Each implementation that is asked for has a row in each cell: its result, or in the column `why` the reason that there
is none, which begins with "refused", "missing", "out of memory" or "FAILED". `--resume` adds the rows that a run lacks.
It tries nothing again but what was missing and is there now: what failed once would fail for ever.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from statistics import median

import torch

import flashzoo
from bench.ahead import compile_ahead
from bench.arguments import check, check_out, check_size, parser_of, results_of
from bench.caches import rate
from bench.ceiling import ceilings, copied
from bench.cells import Cell, Work, cells, left_out, passes
from bench.contenders import Contender, default_impls, first_call, fitting, objection, parted
from bench.peers import PEERS, missing, package
from bench.progress import progress
from bench.referee import Referee
from bench.rows import COPY, FAILED, MISSING, NO_MEMORY, REFUSED, Results, Row, gpu_name, time_columns, version_of
from bench.scores import BIASES
from bench.settled import settled_columns
from flashzoo.compare import expected_s
from flashzoo.spec import duration
from flashzoo.timing import MIN_REPEATS, Clock, Operation, OutOfTimeError, with_peak

LONGEST_S = 3600
"""What is expected to take longer on a CPU needs a budget."""
FAR = 2.0
"""What takes so many times as long as the fastest in turns is not timed alone as well."""
CROWDED = f"{NO_MEMORY}, with the tensors held of all that is timed in the same turns: ask for fewer"


def listing() -> str:
    """Every peer, a line each: the package that it is of, and that package's version or why the peer is missing."""
    return "\n".join(f"{name:<15} {missing(name) or f'{package(name)} {version_of(package(name))}'}" for name in PEERS)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a version gave a wrong result or an error, else 0 (what was refused or is missing
    has not failed)."""
    started = time.monotonic()
    parser = parser_of(__doc__)
    args = parser.parse_args(argv)
    if args.list:
        print(listing())
        return 0
    check(args, parser)
    impls = {
        pass_: args.impls
        or default_impls(
            pass_,
            args.dtype,
            bool(args.masks),
            bool(args.lengths),
            linear=bool(args.models),
            with_scores=bool(args.scores),
        )
        for pass_ in passes(args)
    }
    check_out(args, [impl for chosen in impls.values() for impl in chosen], parser)
    check_size(args, parser)
    results = results_of(args, args.resume or args.run, args.device, parser)
    try:
        if args.resume:
            results.check_begun()
    except ValueError as error:
        parser.error(f"--resume: {error}")
    todo = _lacking(results, {cell: fitting(impls[cell.pass_], cell, bool(args.masks)) for cell in cells(args)})
    expected = _expected_s(todo, args.ms) if args.device == "cpu" else 0.0
    about = f"about {duration(expected)}" if expected <= LONGEST_S else f"more than {duration(LONGEST_S)}"
    if expected > LONGEST_S and args.budget_s == inf:
        parser.error(
            "--budget-s: expected one for so much work, or smaller --tokens and --hidden, "
            f"got none for {about} on a CPU"
        )
    where = f"{gpu_name(args.device)}, {about}" if expected >= 1 else gpu_name(args.device)
    print(f"run {results.run}, {len(todo)} cells, {where}, into {results.path}", flush=True)
    for told in left_out(args):
        print(told, flush=True)
    for impl in dict.fromkeys(impl for chosen in todo.values() for impl in chosen):
        if why := missing(impl):
            print(f"{impl} is missing: {why}", flush=True)
    # Processes side by side have no room for caches, and these cells few kernels.
    compiles = args.device == "cuda" and args.workers and not args.decode
    ahead = compile_ahead(todo, args.workers) if todo and compiles else {}
    if args.compile_only:
        return 0
    failed = _run(todo, results, args, started, ahead) if todo else False
    print(f"{time.monotonic() - started:.0f} s")
    return int(failed)


def _lacking(results: Results, wanted: Work) -> Work:
    """What the run has no row of, or one that says it was missing, which it is no longer."""
    whys = results.whys

    def lacks(impl: str, cell: Cell) -> bool:
        why = whys.get((impl, *cell.key))
        return why is None or (why.startswith(MISSING) and not (objection(impl, cell) or "").startswith(MISSING))

    left = {cell: [impl for impl in impls if lacks(impl, cell)] for cell, impls in wanted.items()}
    return {cell: impls for cell, impls in left.items() if impls}


def _run(
    todo: Work, results: Results, args: argparse.Namespace, started: float, ahead: Mapping[tuple[str, Cell], float]
) -> bool:
    """Whether a version failed."""
    clock, failed, stopped, done = Clock(args.device, started + args.budget_s), False, "", 0
    untimed = Clock(args.device)  # a product of matrices takes half a second
    ceiling = ceilings(untimed, args.device, args.ms, args.dtype, args.decode)
    results.append(ceiling)
    copy = next((1e3 * copied(row) for row in ceiling if row["pass"] == COPY), 0.0)
    try:
        with progress(len(todo), "measuring") as say:
            for work in in_turns(todo, bool(args.masks)):
                for cell, rows in measure(work, clock, args.ms, ahead, args.settled_ms).items():
                    results.append(rows)
                    failed |= _failed(rows)
                    if len(rows) == len(work[cell]) or clock.lost:
                        done += 1
                        say(f"{cell}: {_told(rows, copy)}")
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
        results.append(ceilings(untimed, args.device, args.ms, args.dtype, args.decode))
    return failed


def in_turns(todo: Work, masked: bool) -> list[Work]:
    """What is timed together: a cell; in a run with block masks all cells of one size and pass, masked and dense; with
    something on the scores all but biases; and caches of one shape, in 16 bits and in e4m3.

    A GPU at its power limit is as fast as what runs beside lets it be:
    so only what is timed in the same turns has a ratio.
    """
    together: dict[Cell, Work] = {}
    for cell, impls in todo.items():
        of = cell if cell.score in BIASES else replace(cell, score="")
        of = replace(of, problem=replace(cell.problem, dtype_kv=None))
        of = Cell(replace(cell.problem, causal=False)) if masked else of
        together.setdefault(of, {})[cell] = impls
    return list(together.values())


def measure(
    work: Work, clock: Clock, ms_each: float, ahead: Mapping[tuple[str, Cell], float], settled_ms: float = 0.0
) -> dict[Cell, list[Row]]:
    """For each cell a row for each implementation: what it took where it is right on this cell, else why
    it has no result.

    Where one costs the process its GPU, or the clock's deadline passes, only the rows of those that have no result: the
    others are for another process, or time, to measure.

    Args:
        work: what is timed in turns, once each is checked.
        ahead: seconds of first calls that another process made, to compile.
        settled_ms: how long each that is `near` the fastest is timed alone besides, behind as many calls as settle the
            GPU's clocks.
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
        operations = {key: contender.timed for key, contender in contenders.items()}
        times = clock.measure(operations, ms_each) if operations else {}
        medians: dict[Cell, dict[str, float]] = {}
        for (cell, impl), taken in times.items():
            each = [ms / contenders[cell, impl].calls for ms in taken]
            found[cell, impl] |= time_columns(each, cell.flops)
            medians.setdefault(cell, {})[impl] = median(each)
        alone = {key: x for key, x in contenders.items() if settled_ms and key[1] in near(medians[key[0]])}
        timed, calls = ({key: getattr(x, name) for key, x in alone.items()} for name in ("timed", "calls"))
        for key, columns in settled_columns(timed, calls, clock, settled_ms).items():
            found[key] |= columns
    except torch.OutOfMemoryError:  # each ran alone
        found |= {key: {"why": CROWDED} for key in contenders}
    except OutOfTimeError:
        contenders = {}
    rows: dict[Cell, list[Row]] = {cell: [] for cell in work}
    for (cell, impl), row in found.items():
        if (cell, impl) in contenders or "why" in row:
            rows[cell].append({**cell.fields, "density": f"{cell.density:.6g}", "impl": impl, **row})
    return rows


def near(times: Mapping[str, float]) -> set[str]:
    """Whose times in one cell are not `FAR` behind the fastest's; the fastest version and the fastest peer always, as
    their ratio is asked for."""
    sides = [[impl for impl in times if (impl in PEERS) == peers] for peers in (False, True)]
    first = {min(side, key=times.__getitem__) for side in sides if side}
    return first | {impl for impl, time in times.items() if time < FAR * min(times.values())}


def _admitted(
    cell: Cell, impls: list[str], clock: Clock, ahead: Mapping[tuple[str, Cell], float]
) -> tuple[dict[str, Row], dict[str, Contender]]:
    """What is known of each implementation before it is timed, and those that are right on the cell."""
    tensors = cell.inputs()
    referee = Referee(cell, tensors[0])
    found: dict[str, Row] = {}
    contenders: dict[str, Contender] = {}
    for impl in impls:
        try:
            clock.check()
            if why := objection(impl, cell):
                found[impl] = {"why": why}
            else:
                contender, result, seconds = first_call(impl, cell, *tensors)
                row = referee.errors(impl, result)
                del result  # the gradient of a bias is large
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


def costs(clock: Clock, run: Operation) -> Row:
    """The columns peak_mib and host_us of an operation that has run before; on the CPU none."""
    if not clock.cuda:
        return {}
    return {"peak_mib": f"{with_peak(run, clock.device)[1] / 2**20:.5g}", "host_us": f"{clock.host_us(run):.4g}"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def _free(clock: Clock) -> None:
    if clock.cuda:
        torch.cuda.empty_cache()


def _expected_s(todo: Work, ms_each: float) -> float:
    """About how many seconds it takes on a CPU, peers taken for `standard`;
    not all of them where that is past `LONGEST_S`."""
    versions, total = flashzoo.versions(), 0.0
    for cell, impls in todo.items():
        specs = [versions.get(parted(impl)[0], versions["standard"]) for impl in impls]
        judged = 2 / (cell.problem.batch * cell.problem.heads)
        calls = cell.caches.calls if cell.caches else 1
        total += expected_s(cell.problem, specs, 4 + MIN_REPEATS * calls, judged) + len(impls) * ms_each / 1e3
        if total > LONGEST_S:
            break
    return total


def _failed(rows: list[Row]) -> bool:
    """Whether a version, and no peer, has."""
    return any(str(row.get("why")).startswith(FAILED) for row in rows if row["impl"] not in PEERS)


def _told(rows: list[Row], copy: float) -> str:
    """A cell's rows in words; who is missing was told before. `copy` is what GB/s are held against, or 0."""
    timed = [row for row in rows if "why" not in row]
    if copy:
        unit = f"GB/s of keys and values (of a copy's {copy:.0f})"
        speeds = [f"{row['impl']} {rate(row):.0f} ({rate(row) / copy:.0%})" for row in timed]
    else:
        unit, speeds = "TFLOP/s", [f"{row['impl']} {float(str(row['tflops'])):.3g}" for row in timed]
    reasons = [f"\n    {row['impl']} {row['why']}" for row in rows if "why" in row and not missing(str(row["impl"]))]
    return f"{', '.join(speeds)} {unit}{''.join(reasons)}" if speeds else f"no result{''.join(reasons)}"


if __name__ == "__main__":
    raise SystemExit(main())
