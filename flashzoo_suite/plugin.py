"""A pytest plugin: which versions the suite runs on, which problems each test gives them, the poisoned memory every
test starts from.

`pytest --versions v1,v2` runs it on these alone. `flashzoo check` adds that,
and names a variant's file in FLASHZOO_VARIANTS.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Generator
from itertools import combinations

import pytest
import torch

import flashzoo
from flashzoo import Spec
from flashzoo.registry import current
from flashzoo_suite.gpus import WORKER, workers_for
from flashzoo_suite.support import CHOSEN, DEVICE, FP8, WORKER_BYTES, asked

POISON_BYTES = [1 << power for power in range(9, 29) for _ in range(4)]
"""Blocks of every size class of the caching allocator, up to 256 MiB."""

KEPT_BYTES = 4 << 30
"""What a process may keep of a GPU's memory from one test to the next."""

WANTS_GPU = "needs a CUDA device"
"""Why a test that is marked `gpu` is skipped where there is none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--versions", metavar="NAME[,NAME]", help="test only these versions")
    parser.addoption("--every-case", action="store_true", help="all cases of the tests marked covering, as on a GPU")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """What `-n auto` is: on GPUs, which the workers share out, no more than their memory holds."""
    workers = yield
    if DEVICE == "cpu":
        return workers
    return min(workers, workers_for(WORKER_BYTES))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line(
        "markers", "alone: of a GPU's suite, run with no other process beside it, which sees all GPUs (`make seen`)"
    )
    config.addinivalue_line("markers", "compiles: for GPUs that need not be there, and runs nothing on one")
    config.addinivalue_line(
        "markers",
        "asks({id: fields}, both=False, fp8=('e4m3', 'fp8'), **fields): give the test `version` and `problem`, for "
        "every version and every set of fields of `Problem` that this version takes; both=True is for tests that call "
        "`support.both`: grad=True, or where the version has no such backward pass grad=False, so that its forward "
        "pass is held to the same; fp8 says in which kinds of FP8 the question makes sense, besides the "
        "version's first dtype",
    )
    config.addinivalue_line(
        "markers",
        "covering(strength, *parameters): without a GPU, and of tests marked compiles, which need none, unless "
        "--every-case is given, only a covering array of its cases is run: every value of every parameter is met, and "
        "with strength 2 every two values of these parameters (all where none is named) that any case brings together",
    )
    if WORKER in os.environ:
        torch.set_num_threads(1)  # the workers are the parallelism
    elif config.getoption("numprocesses", None):
        # theirs and their children's; NumPy's threads wait for one another while others work
        os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # Compiled kernels on disk: not in the user's cache, but one folder for all workers, from one run to the next.
    os.environ.setdefault("FLASHZOO_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "kernels"))
    config.stash[CHOSEN] = _chosen(config.getoption("--versions"))


def _chosen(names: str | None) -> list[Spec]:
    known = flashzoo.versions()
    chosen = names.split(",") if names else list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        wrong = f"--versions must be from {', '.join(known)}, got {', '.join(unknown)}"
        raise pytest.UsageError("\n".join([wrong, *current().missing]))
    return [known[name] for name in chosen]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("asks")
    if marker is None:
        return
    alternatives = marker.args[0] if marker.args else {"": {}}
    cells = [
        pytest.param(
            spec.name,
            problem,
            id="-".join(filter(None, (spec.name, name, problem.numerics if problem.numerics in FP8 else ""))),
        )
        for spec in metafunc.config.stash[CHOSEN]
        for name, fields in alternatives.items()
        for problem in asked(spec, **marker.kwargs | fields)
    ]
    metafunc.parametrize(("version", "problem"), cells)


def pytest_collection_finish() -> None:
    """What is there by now stays: looked at by no later garbage collection,
    of which an interpreted kernel starts many."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-case"):
        left_out = spared([item for item in items if DEVICE == "cpu" or item.get_closest_marker("compiles")])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("gpu") and DEVICE == "cpu":
            item.add_marker(pytest.mark.skip(reason=WANTS_GPU))
        for spec in flashzoo.versions().values():
            for device, where, sentence in spec.faults:
                if device == DEVICE and item.name.startswith(where):
                    item.add_marker(pytest.mark.skip(reason=f"known fault of {spec.name}: {sentence}"))


def spared(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of the tests marked covering, the cases that their covering array can do without."""
    tests = defaultdict(dict)
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker is not None and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            strength, *names = marker.args
            values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
            together = combinations([value for value in values if not names or value[0] in names], strength)
            tests[item.parent, item.originalname][item] = {*combinations(values, 1), *together}
    left_out = set()
    for cases in tests.values():
        to_meet = set().union(*cases.values())
        while to_meet:
            item = max(cases, key=lambda item: len(cases[item] & to_meet))
            to_meet -= cases.pop(item)
        left_out |= cases.keys()
    return left_out


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """Says in one line how many cases want a GPU, where pytest would have a line for each place."""
    stats = terminalreporter.stats
    every = stats.get("skipped", [])
    other = [report for report in every if WANTS_GPU not in str(report.longrepr)]
    if len(other) == len(every):
        return (yield)
    stats["skipped"] = other
    try:
        return (yield)
    finally:
        stats["skipped"] = every  # the last line counts them
        terminalreporter.write_line(f"cases that need a GPU and were not run: {len(every) - len(other)}")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """What was never written reads as NaN, so no result passes on what memory happened to hold."""
    torch.manual_seed(0)
    if DEVICE == "cuda":
        blocks = [torch.full((size // 4,), torch.nan, device="cuda") for size in POISON_BYTES]
        del blocks
        yield
        if torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()  # for the other workers
    else:
        torch.use_deterministic_algorithms(True)  # fills every empty tensor with NaN
        yield
        torch.use_deterministic_algorithms(False)
