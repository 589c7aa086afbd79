"""Does the suite see faults that are put into the code on purpose? `make mutants`, or `python tests/mutants.py --help`

`faults.py` has the faults. For each of them the tree is copied, the fault put in, and pytest run on the copy: first the
tests that the fault names, and only where all of these pass everything there is of its version. A fault is caught when
a test fails that passes without it, because something that was computed is wrong, or when the process crashes or never
ends. One that does not import, compile or find its tests is an error in the list. Exit status 1 where a fault survives
or the list has an error.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock

import pytest
import torch
from fault import Fault
from faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("flashzoo", "flashzoo_suite", "tests", "bench", "examples", "pyproject.toml", "README.md")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "triton", "pytest", "hypothesis"])
"""Every run is a process that begins with these imported, which would take it longer than most tests do."""
STARTING = Lock()
"""Held where a process begins, when Python asks after all others, and where one is asked how it ended:
it can tell that once."""
KERNELS = ROOT / ".pytest_cache" / "kernels"
"""Compiled kernels, for all copies: the names of these files say what they are made of."""

OF_EVERY_VERSION = ("flashzoo_suite", "tests/test_properties.py")
OF_VERSION = {
    "decode": ("tests/test_append.py", "tests/test_mla.py"),
    "blocksparse": ("tests/test_blocksparse.py",),
    "standard": ("tests/test_reference.py", "tests/test_accuracy.py"),
    "v3": (
        "tests/test_v3.py",
        "tests/test_v3_cache.py",
        "tests/test_v3_backward.py",
        "tests/test_v3_delta.py",
        "tests/test_v3_sparse.py",
        "tests/test_v3_packed.py",
        "tests/test_v3_scores.py",
        "tests/test_blocksparse.py",
    ),
    "v3_fp8": ("tests/test_quantize.py", "tests/test_v3_packed.py"),
}
"""What is run of a version, beside what every version has."""

PATIENCE = 60.0
"""Seconds that a run may take, and four times what it takes without the fault, before it counts as one
that never ends."""
PATIENCE_WITH_ALL = 3600.0
"""The same for everything of a version, which is not run without the fault."""

WRONG = ("AssertionError", "assert ", "Failed: ", "torch.AcceleratorError", "RuntimeError: CUDA")
"""How pytest's summary begins to say that something computed is wrong, or that the GPU refused."""


def named_tests(version: str, named: str = "") -> tuple[str, ...]:
    """What pytest takes for the tests of a version: all, or those that -k finds."""
    return ("-k", named, *OF_EVERY_VERSION, *OF_VERSION.get(version, ()))


@dataclass(frozen=True)
class Run:
    """One run of pytest: what it ended with, a signal where that is negative and None where it never did;
    its output and seconds."""

    status: int | None
    output: str
    seconds: float

    @property
    def first_failure(self) -> tuple[str, str]:
        """Node id of the first test that failed, and the summary's reason."""
        found = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - (.*))?$", self.output, re.MULTILINE)
        return (found[1], found[2] or "") if found else ("", "")

    @property
    def last_begun(self) -> str:
        """Node id of the last test that began."""
        begun = re.findall(r"^((?:flashzoo_suite|tests)/\S+?::\w+(?:\[.*?\])?)(?: |$)", self.output, re.MULTILINE)
        return begun[-1] if begun else ""


def verdict(run: Run) -> tuple[str, str]:
    """`("caught", by what)`, `("passed", "")` or `("error", why)`."""
    if run.status == 0:
        return "passed", ""
    if (run.status is None or run.status < 0) and run.last_begun:
        return "caught", f"{run.last_begun} {'hangs' if run.status is None else 'crashes'}"
    test, reason = run.first_failure
    if run.status == 1 and reason.startswith(WRONG):
        return "caught", test
    last = run.output.strip().splitlines()[-1:]
    return "error", f"pytest ended with {run.status}: {f'{test}: {reason}' if test else ''.join(last)}"


@contextmanager
def copied_tree(fault: Fault | None) -> Iterator[Path]:
    """A copy of the tree, with the fault in it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        if fault is not None:
            for path, text in fault.changed(ROOT).items():
                (copy / path).write_text(text)
        yield copy


def pytest_on(tree: Path, tests: tuple[str, ...], limit: float, gpu: bool, threads: int) -> Run:
    """One run of pytest in a tree, until a test fails or the limit is over."""
    begin = time.monotonic()
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        options = ("-x", "-v", "--tb=no", "-p", "no:cacheprovider", "--benchmark-disable", "-o", f"timeout={limit:.0f}")
        process = PROCESSES.Process(target=_child, args=(tree, (*options, *tests), output.name, gpu, threads))
        with STARTING:
            process.start()
        hangs = not wait([process.sentinel], limit)
        if hangs and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)  # what the tests have started, too
            wait([process.sentinel])
        with STARTING:
            process.join()
        return Run(None if hangs else process.exitcode, output.read(), time.monotonic() - begin)


def _child(tree: Path, arguments: tuple[str, ...], output: str, gpu: bool, threads: int) -> None:
    os.setsid()
    written = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.environ.update(FLASHZOO_CACHE_DIR=str(KERNELS), PYTHONDONTWRITEBYTECODE="1", COLUMNS="1000")
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(threads)
    os.chdir(tree)
    sys.path = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests")]
    sys.exit(pytest.main(list(arguments)))


Key = tuple[str, bool]
"""What goes into one run of tests on the tree as it is: a version, and whether on the GPU."""


class Suite:
    """Runs faults against the tests, so many at a time."""

    def __init__(self, faults: list[Fault], jobs: int, hinted_only: bool) -> None:
        self._hinted_only = hinted_only
        self._threads = max(1, (os.cpu_count() or 1) // jobs)
        self._pool = ThreadPoolExecutor(jobs)
        self._sound = self._without_faults(faults, jobs)
        self._running = {self._pool.submit(self._timed, fault): fault for fault in faults}

    def results(self) -> Iterator[tuple[Fault, str, str, float]]:
        """Each fault as it is done: `caught` by what, `SURVIVED`, `equivalent` and why, or `ERROR` and why;
        and the seconds it took."""
        with self._pool:
            for future in as_completed(self._running):
                yield (self._running[future], *future.result())

    def _without_faults(self, faults: list[Fault], jobs: int) -> dict[tuple[Key, str], Future[Run]]:
        """The tests that faults name, run on the tree as it is: those of one version together,
        in as many runs as there are jobs."""
        named: dict[Key, list[str]] = {}
        for fault in faults:
            hints = named.setdefault((fault.version, fault.gpu), [])
            hints += [] if fault.seen_by in hints else [fault.seen_by]
        sound = {}
        for key, hints in named.items():
            for some in filter(None, (hints[i::jobs] for i in range(jobs))):
                future = self._pool.submit(
                    self._run, None, *key, named_tests(key[0], " or ".join(f"({hint})" for hint in some))
                )
                sound |= {(key, hint): future for hint in some}
        return sound

    def _run(
        self, fault: Fault | None, version: str, gpu: bool, tests: tuple[str, ...], limit: float = PATIENCE_WITH_ALL
    ) -> Run:
        with copied_tree(fault) as tree:
            return pytest_on(tree, ("--versions", version, *tests), limit, gpu, self._threads)

    def _timed(self, fault: Fault) -> tuple[str, str, float]:
        sound = self._sound[(fault.version, fault.gpu), fault.seen_by].result()
        begin = time.monotonic()
        return *self._judged(fault, sound), time.monotonic() - begin

    def _judged(self, fault: Fault, sound: Run) -> tuple[str, str]:
        of_version = fault.version, fault.gpu
        if sound.status != 0:
            return "ERROR", f"without the fault: {verdict(sound)[1]}"
        try:
            limit = PATIENCE + 4 * sound.seconds
            found, by = verdict(self._run(fault, *of_version, named_tests(fault.version, fault.seen_by), limit))
            if found == "passed" and not self._hinted_only and not fault.equivalent:
                found, by = verdict(self._run(fault, *of_version, named_tests(fault.version)))
                if (
                    found == "caught"
                    and self._run(None, *of_version, (re.sub(" (hangs|crashes)$", "", by),)).status != 0
                ):
                    return "ERROR", f"{by}, without the fault too"
        except ValueError as error:
            return "ERROR", str(error)
        if fault.equivalent:
            return (
                ("equivalent", fault.equivalent)
                if found == "passed"
                else ("ERROR", f"said to be equivalent, but: {by}")
            )
        return {"caught": "caught", "passed": "SURVIVED", "error": "ERROR"}[found], by


@cache
def has_hopper() -> bool:
    """Whether the faults of Hopper's kernels can be run here."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def chosen(patterns: list[str]) -> list[Fault]:
    """The faults whose name or version matches one of the patterns; all where there is none."""
    return [
        fault
        for fault in FAULTS
        if not patterns or any(fnmatch(x, p) for x in (fault.name, fault.version) for p in patterns)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "patterns", nargs="*", metavar="NAME", help="names of faults or versions, with * and ?; all where there is none"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run side by side (default: 1)")
    parser.add_argument(
        "--hinted-only", action="store_true", help="run the tests that a fault names, and no others where these pass"
    )
    parser.add_argument("--gpu-only", action="store_true", help="run the faults that need a GPU, and no others")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args()
    faults = [fault for fault in chosen(options.patterns) if fault.gpu or not options.gpu_only]
    if not faults:
        parser.error(f"no fault is called {' or '.join(options.patterns)}")
    if options.list:
        for fault in faults:
            print(f"{fault.name}{' (GPU)' if fault.gpu else ''}: {fault.why}")
        return 0

    runnable = [fault for fault in faults if has_hopper() or not fault.gpu]
    counts: dict[str, int] = {}
    for done, (fault, found, by, seconds) in enumerate(Suite(runnable, options.jobs, options.hinted_only).results(), 1):
        counts[found] = counts.get(found, 0) + 1
        print(f"[{done}/{len(runnable)}] {fault.name}: {found}{f': {by}' if by else ''}, {seconds:.0f} s", flush=True)
    not_run = len(faults) - len(runnable)
    print(
        ", ".join(f"{count} {found}" for found, count in sorted(counts.items()))
        + (f", {not_run} not run: no Hopper GPU" if not_run else "")
    )
    return 1 if {"SURVIVED", "ERROR"} & counts.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
