"""What this repository's tests have beside the suite's plugin: profiles of hypothesis, options of `make host`,
stand-ins for libraries."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from bench_runs import forget_libraries
from hypothesis import settings

import flashzoo
from bench import peers
from flashzoo import Problem, registry, spec
from flashzoo_suite.gpus import WORKER
from flashzoo_suite.support import CALLS, ROOT

pytest_plugins = ("flashzoo_suite.plugin",)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    saved = ROOT / "tests" / "host_baseline.json"
    parser.addoption(
        "--host-baseline",
        metavar="FILE",
        default=str(saved),
        help=f"what host costs are held to (default: {saved.name})",
    )
    parser.addoption(
        "--update-host-baseline", action="store_true", help="write the host costs that are measured, and compare none"
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Under `tests/seen.py` what fails is named at once: pytest names it at the end, which a run that is stopped
    does not reach."""
    if report.failed and "FLASHZOO_SEEN" in os.environ and WORKER not in os.environ:
        print(f"\nfailed: {report.nodeid}", flush=True)


@pytest.fixture
def broken_peer(monkeypatch) -> list[Problem]:
    """A peer, `flex`, that can't run: the problems that it was tried on."""
    tried = []

    def attention(problem):
        def call(q, k, v):
            tried.append(problem)
            raise RuntimeError("no such\n  kernel")

        return call

    monkeypatch.setitem(peers.PEERS, "flex", attention)
    return tried


@pytest.fixture
def absent_peer(monkeypatch) -> Iterator[str]:
    """A peer whose library is not there."""
    monkeypatch.setitem(peers._LIBRARIES, "fa3", peers.Library("no_such_library.flash_attn_func", "no-such-library"))
    forget_libraries()
    yield "fa3"
    forget_libraries()


@pytest.fixture
def versions_called(monkeypatch) -> list[tuple[str, bool]]:
    """Version and `deterministic` of every call."""
    attention, calls = flashzoo.attention, []

    def recorded(*tensors, version, deterministic=False, **options):
        calls.append((version, deterministic))
        return attention(*tensors, version=version, deterministic=deterministic, **options)

    monkeypatch.setattr(flashzoo, "attention", recorded)
    return calls


@pytest.fixture
def registry_as_it_was(monkeypatch) -> None:
    """A test may register, unregister and choose; none is felt by the next."""
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
    monkeypatch.delenv(spec.INTERPRETER_LIMIT, raising=False)
    monkeypatch.setattr(registry, "_zoo", registry.current())
    CALLS.clear()


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    """Small q, k and v in float32."""
    return tuple(torch.randn(2, 6, 4, 8) for _ in range(3))
