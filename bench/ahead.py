"""Compiles what a run needs before it is timed, in several processes."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from multiprocessing import get_context

import torch

import flashzoo
from bench import scores
from bench.cells import Cell, Work
from bench.contenders import attention, first_call, objection, parted
from bench.progress import progress
from flashzoo.inputs import inputs


def compile_ahead(todo: Work, workers: int) -> dict[tuple[str, Cell], float]:
    """Fill the disk caches of Triton, torch.compile and CuTe DSL from several processes,
    so that the run itself hardly compiles.

    Versions and fa4 compile once for a head dim, mask and what is on the scores, FlexAttention for every shape, but not
    for every block mask.
    What fails here fails again, and is reported, in the run.

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
    """What `compile_ahead` has a process do each: an implementation and cells that share its kernels, forward
    before backward.

    A kernel may still have variants, by whether a stride is a multiple of 16: so a process runs all of its cells.
    """
    jobs: dict[tuple, list[Cell]] = {}
    for cell in sorted(todo, key=lambda cell: cell.problem.grad):
        problem = cell.problem
        kind = cell.pattern.kind if cell.pattern else "causal" if problem.causal else "full"
        kind = f"packed {kind}" if cell.lengths else kind
        for impl in todo[cell]:
            spec = flashzoo.versions().get(parted(impl)[0])
            if impl == "flex":
                of = (problem.batch, problem.seqlen_q, "masked" if cell.mask else kind)
            elif impl == "fa4" or (spec and spec.requires):
                of = (bool(cell.mask), kind)
            else:
                continue
            jobs.setdefault((impl, cell.pass_, problem.head_dim, cell.score, *of), []).append(cell)
    return [(key[0], group) for key, group in jobs.items()]


def _compile_in_one_thread() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback


def _compile(impl: str, group: list[Cell]) -> dict[Cell, float]:
    """Seconds of each cell's first call, where it has one. What a process imports, once for many calls, is
    imported before."""
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
            scores.forget()  # a bias may fill a GPU that other processes use as well
            torch.cuda.empty_cache()
    return seconds
